//! A client's half of the handshake: from the server's greeting to an export that takes requests.
//!
//! ```text
//! greet ──▶ (start_tls, and all goes on inside of it) ──▶ choose ──▶ Export
//! ```
//!
//! The stream says when time is up. The server is not trusted: what it sends is bounded, and what it says of its export is
//! checked.

#![forbid(unsafe_code)]

use std::io::{self, Read, Write};

use crate::protocol::{
    ANSWER_MAGIC, BlockSizes, BlockSizesError, GREETING_MAGIC, Headers, LONGEST_STRING, OLDSTYLE_MAGIC, OPTION_MAGIC,
    answer, export_flag, handshake_flag, info, option, take_u16, take_u64,
};

/// Answers to one option; a server says little of an export.
const MOST_ANSWERS: u32 = 32;
/// Bytes of one answer: a string and what belongs to it.
const LONGEST_ANSWER: u32 = LONGEST_STRING as u32 + 64;
/// Characters of what a server says that are worth telling.
const SHOWN: usize = 200;

/// An export that takes requests, as the server describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Bytes.
    pub size: u64,
    /// What it can do: of [`export_flag`].
    pub flags: u16,
    /// What it wants of offsets and lengths.
    pub blocks: BlockSizes,
    /// How headers are written from here on.
    pub headers: Headers,
}

impl Export {
    /// Whether the server has set a flag.
    pub const fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Why there is no export.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The connection failed.
    #[error("{0}")]
    Io(#[source] io::Error),
    /// The server has ended the connection.
    #[error("the server has ended the connection {0}")]
    Ended(&'static str),
    /// Something else.
    #[error("what listens there is no NBD server: it greets with {0:#018x}")]
    NotNbd(u64),
    /// A server from before 2010.
    #[error("the server has one export and no names for exports (oldstyle negotiation); use a server of the new style")]
    Oldstyle,
    /// It does not answer as it must.
    #[error("the server breaks the protocol: {0}")]
    Broken(String),
    /// No such export.
    #[error("the server has no export '{0}'{1}; `nbdinfo --list` shows which it has")]
    NoExport(String, Said),
    /// Not without TLS.
    #[error("the server wants TLS{0}; name credentials by tls-creds")]
    WantsTls(Said),
    /// Not with TLS.
    #[error("the server has no TLS{0}; leave out tls-creds, or use a server that has")]
    NoTls(Said),
    /// Anything else that it says no to.
    #[error("the server refuses {0}{1}")]
    Refused(&'static str, Said),
    /// It says what cannot be.
    #[error("the server's {0}")]
    BlockSizes(#[from] BlockSizesError),
    /// Likewise.
    #[error("the server says that the export has {0} bytes, more than any disk can have")]
    Size(u64),
}

/// What a server says to its refusal, on one line.
#[derive(Debug)]
pub struct Said(String);

impl Said {
    fn new(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        Self(text.chars().take(SHOWN).flat_map(char::escape_debug).collect())
    }
}

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " ('{}')", self.0) }
    }
}

use HandshakeError::{Broken, Ended};

/// What a server said in its greeting.
#[derive(Clone, Copy, Debug)]
pub struct Greeting {
    /// Options are answered.
    is_fixed: bool,
    no_zeroes: bool,
}

/// Hears the greeting and answers it ("Newstyle negotiation").
///
/// # Errors
/// It is no server that one can go on with.
pub fn greet(stream: &mut (impl Read + Write)) -> Result<Greeting, HandshakeError> {
    let mut magic = [0; 8];
    read(stream, &mut magic, "before it greeted")?;
    if u64::from_be_bytes(magic) != GREETING_MAGIC {
        return Err(HandshakeError::NotNbd(u64::from_be_bytes(magic)));
    }
    let mut style = [0; 8];
    read(stream, &mut style, "while it greeted")?;
    match u64::from_be_bytes(style) {
        OPTION_MAGIC => {}
        OLDSTYLE_MAGIC => return Err(HandshakeError::Oldstyle),
        other => return Err(Broken(format!("it greets with {other:#018x}"))),
    }
    let mut flags = [0; 2];
    read(stream, &mut flags, "while it greeted")?;
    let flags = u16::from_be_bytes(flags) & (handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
    write(stream, &u32::from(flags).to_be_bytes())?;
    Ok(Greeting {
        is_fixed: flags & handshake_flag::FIXED_NEWSTYLE != 0,
        no_zeroes: flags & handshake_flag::NO_ZEROES != 0,
    })
}

/// Has the server go on inside TLS, from its next byte on.
///
/// # Errors
/// It does not.
pub fn start_tls(stream: &mut (impl Read + Write), greeting: Greeting) -> Result<(), HandshakeError> {
    if !greeting.is_fixed {
        return Err(HandshakeError::NoTls(Said::new(b"")));
    }
    ask(stream, option::STARTTLS, &[])?;
    match hear(stream, option::STARTTLS)? {
        Answer { kind: answer::ACK, .. } => Ok(()),
        Answer { said, .. } => Err(HandshakeError::NoTls(Said::new(&said))),
    }
}

/// Chooses an export, which takes requests from then on.
///
/// # Errors
/// There is none of that name, or the server says of it what cannot be.
pub fn choose(stream: &mut (impl Read + Write), greeting: Greeting, name: &str) -> Result<Export, HandshakeError> {
    if !greeting.is_fixed {
        return by_name(stream, greeting, name, Headers::Simple);
    }
    let headers = if agree(stream, option::EXTENDED_HEADERS)? {
        Headers::Extended
    } else if agree(stream, option::STRUCTURED_REPLY)? {
        Headers::Structured
    } else {
        Headers::Simple
    };
    let mut wish = Vec::with_capacity(name.len() + 8);
    wish.extend_from_slice(&(name.len() as u32).to_be_bytes());
    wish.extend_from_slice(name.as_bytes());
    wish.extend_from_slice(&1u16.to_be_bytes());
    wish.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
    ask(stream, option::GO, &wish)?;
    let (mut described, mut blocks) = (None, BlockSizes::default());
    for _ in 0..MOST_ANSWERS {
        let Answer { kind, said } = hear(stream, option::GO)?;
        match kind {
            answer::INFO => match told(&said)? {
                Info::Export { size, flags } => described = Some((size, flags)),
                Info::BlockSizes(sizes) => blocks = sizes,
                Info::Other => {}
            },
            answer::ACK => {
                let (size, flags) =
                    described.ok_or_else(|| Broken("it does not say how large the export is".to_owned()))?;
                return export(size, flags, blocks, headers);
            }
            answer::UNSUPPORTED => return by_name(stream, greeting, name, headers),
            answer::UNKNOWN => return Err(HandshakeError::NoExport(name.to_owned(), Said::new(&said))),
            answer::TLS_REQUIRED => return Err(HandshakeError::WantsTls(Said::new(&said))),
            _ => return Err(HandshakeError::Refused("the export", Said::new(&said))),
        }
    }
    Err(Broken(format!("it says more than {MOST_ANSWERS} things of one export")))
}

/// The way of old servers (`NBD_OPT_EXPORT_NAME`): an export that is not there ends the connection.
fn by_name(
    stream: &mut (impl Read + Write),
    greeting: Greeting,
    name: &str,
    headers: Headers,
) -> Result<Export, HandshakeError> {
    ask(stream, option::EXPORT_NAME, name.as_bytes())?;
    let mut answer = [0; 10 + 124];
    let answer = if greeting.no_zeroes { &mut answer[..10] } else { &mut answer[..] };
    read(stream, answer, "when it was asked for the export, which it does not have perhaps")?;
    let mut rest = &answer[..];
    let (size, flags) = take_u64(&mut rest).zip(take_u16(&mut rest)).unwrap_or_default();
    export(size, flags, BlockSizes::default(), headers)
}

fn export(size: u64, flags: u16, blocks: BlockSizes, headers: Headers) -> Result<Export, HandshakeError> {
    if size > i64::MAX as u64 {
        return Err(HandshakeError::Size(size));
    }
    // Without HAS_FLAGS they mean nothing ("Transmission flags").
    let flags = if flags & export_flag::HAS_FLAGS == 0 { 0 } else { flags };
    Ok(Export { size, flags, blocks, headers })
}

enum Info {
    Export { size: u64, flags: u16 },
    BlockSizes(BlockSizes),
    Other,
}

fn told(mut said: &[u8]) -> Result<Info, HandshakeError> {
    let broken = |what: &str| Broken(format!("it tells {what} in {} bytes", said.len()));
    let kind = take_u16(&mut said).ok_or_else(|| broken("something"))?;
    match kind {
        info::EXPORT => match take_u64(&mut said).zip(take_u16(&mut said)) {
            Some((size, flags)) if said.is_empty() => Ok(Info::Export { size, flags }),
            _ => Err(broken("an export's size and flags")),
        },
        info::BLOCK_SIZE => Ok(Info::BlockSizes(BlockSizes::read(said).ok_or_else(|| broken("block sizes"))??)),
        _ => Ok(Info::Other),
    }
}

/// Whether the server takes an option that it may refuse.
fn agree(stream: &mut (impl Read + Write), option: u32) -> Result<bool, HandshakeError> {
    ask(stream, option, &[])?;
    match hear(stream, option)? {
        Answer { kind: answer::ACK, .. } => Ok(true),
        Answer { kind: answer::TLS_REQUIRED, said } => Err(HandshakeError::WantsTls(Said::new(&said))),
        _ => Ok(false),
    }
}

fn ask(stream: &mut impl Write, option: u32, data: &[u8]) -> Result<(), HandshakeError> {
    let mut bytes = Vec::with_capacity(16 + data.len());
    bytes.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    bytes.extend_from_slice(&option.to_be_bytes());
    bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
    bytes.extend_from_slice(data);
    write(stream, &bytes)
}

struct Answer {
    kind: u32,
    said: Vec<u8>,
}

fn hear(stream: &mut impl Read, option: u32) -> Result<Answer, HandshakeError> {
    let mut number = |len: usize| {
        let mut bytes = [0; 8];
        read(stream, &mut bytes[8 - len..], "while options were haggled over").map(|()| u64::from_be_bytes(bytes))
    };
    let (magic, about) = (number(8)?, number(4)?);
    if magic != ANSWER_MAGIC || about != option.into() {
        return Err(Broken(format!("option {option} is answered by {magic:#018x}, about option {about}")));
    }
    let (kind, len) = (number(4)? as u32, number(4)? as u32);
    if len > LONGEST_ANSWER {
        return Err(Broken(format!("an answer has {len} bytes")));
    }
    let mut said = vec![0; len as usize];
    read(stream, &mut said, "while options were haggled over")?;
    Ok(Answer { kind, said })
}

fn read(stream: &mut impl Read, into: &mut [u8], when: &'static str) -> Result<(), HandshakeError> {
    stream.read_exact(into).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => Ended(when),
        _ => HandshakeError::Io(e),
    })
}

fn write(stream: &mut impl Write, bytes: &[u8]) -> Result<(), HandshakeError> {
    stream.write_all(bytes).and_then(|()| stream.flush()).map_err(|e| match e.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Ended("while options were haggled over"),
        _ => HandshakeError::Io(e),
    })
}

#[cfg(test)]
mod tests;
