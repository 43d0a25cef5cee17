//! An NBD client written by hand, as badly as a test likes.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use egret_nbd::protocol::{
    ANSWER_MAGIC, Headers, OPTION_MAGIC, Reply, Request, answer, chunk, command, command_flag, info, option,
};

use super::PATIENCE;

/// A client that has chosen an export.
pub struct NbdClient {
    stream: UnixStream,
    headers: Headers,
    /// Bytes of the export.
    pub size: u64,
    /// What it can do.
    pub flags: u16,
    cookie: u64,
    /// What was asked for and not answered yet.
    asked: Vec<Asked>,
}

/// A request, how much a read brings, and what has come of it so far.
struct Asked {
    cookie: u64,
    offset: u64,
    brings: usize,
    data: Vec<u8>,
    extents: Extents,
    failed: Option<u32>,
}

/// By their context.
type Extents = Vec<(u32, Vec<(u64, u64)>)>;

/// A server's answer to an option: its kind, and its data.
type Answer = (u32, Vec<u8>);

/// What a request came to: data, and extents by their context; or an error as it was sent.
pub type Outcome = Result<(Vec<u8>, Extents), u32>;

/// Connects, and hears and answers the greeting.
pub fn greet(socket: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(socket).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).expect("a greeting");
    assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\0\x03");
    stream.write_all(&3u32.to_be_bytes()).expect("it reads");
    stream
}

/// Names an option.
pub fn send_option(stream: &mut UnixStream, option: u32, data: &[u8]) -> io::Result<()> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend([option, data.len() as u32].into_iter().flat_map(u32::to_be_bytes));
    bytes.extend(data);
    stream.write_all(&bytes)
}

/// Names an option, and hears all that the server says to it.
pub fn haggle(stream: &mut UnixStream, option: u32, data: &[u8]) -> Vec<Answer> {
    send_option(stream, option, data).expect("it reads");
    let mut answers = Vec::new();
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header).expect("an answer");
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().expect("four bytes"));
        assert_eq!((&header[..8], word(8)), (&ANSWER_MAGIC.to_be_bytes()[..], option));
        let mut data = vec![0; word(16) as usize];
        stream.read_exact(&mut data).expect("an answer's data");
        answers.push((word(12), data));
        if word(12) == answer::ACK || word(12) & answer::ERROR != 0 {
            return answers;
        }
    }
}

/// A string as options have it.
pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

impl NbdClient {
    /// Connects, and chooses an export.
    pub fn connect(socket: &Path, name: &str, headers: Headers) -> Self {
        Self::choose(greet(socket), name, headers)
    }

    /// Chooses an export, with all contexts of metadata where headers allow that.
    pub fn choose(mut stream: UnixStream, name: &str, headers: Headers) -> Self {
        let agree = match headers {
            Headers::Simple => None,
            Headers::Structured => Some(option::STRUCTURED_REPLY),
            Headers::Extended => Some(option::EXTENDED_HEADERS),
        };
        if let Some(agree) = agree {
            assert_eq!(haggle(&mut stream, agree, &[]), [(answer::ACK, vec![])]);
            let contexts = ["base:allocation", "qemu:allocation-depth"].map(string).concat();
            let query = [&string(name)[..], &2u32.to_be_bytes(), &contexts].concat();
            assert_eq!(haggle(&mut stream, option::SET_META_CONTEXT, &query).len(), 3);
        }
        let told = haggle(&mut stream, option::GO, &[&string(name)[..], &[0, 0]].concat());
        assert_eq!(told.last().map(|(kind, _)| *kind), Some(answer::ACK), "{told:?}");
        let (_, export) =
            told.iter().find(|(_, data)| data.starts_with(&info::EXPORT.to_be_bytes())).expect("its size");
        let size = u64::from_be_bytes(export[2..10].try_into().expect("eight bytes"));
        let flags = u16::from_be_bytes(export[10..].try_into().expect("two bytes"));
        Self { stream, headers, size, flags, cookie: 0, asked: Vec::new() }
    }

    /// The stream itself, for a client that misbehaves.
    pub fn stream(&mut self) -> &mut UnixStream {
        &mut self.stream
    }

    /// Sends a request, whose answer is waited for later; returns its cookie.
    pub fn ask(&mut self, flags: u16, command: u16, offset: u64, length: u64, data: &[u8]) -> u64 {
        self.try_ask(flags, command, offset, length, data).expect("it reads")
    }

    /// Likewise, where the server may be gone.
    pub fn try_ask(&mut self, flags: u16, command: u16, offset: u64, length: u64, data: &[u8]) -> io::Result<u64> {
        self.cookie += 1;
        let request = Request { flags, command, cookie: self.cookie, offset, length };
        let mut header = [0; 32];
        let len = request.write(self.headers, &mut header);
        self.stream.write_all(&[&header[..len], data].concat())?;
        let brings = if command == command::READ { length as usize } else { 0 };
        let asked = Asked { cookie: self.cookie, offset, brings, data: Vec::new(), extents: Vec::new(), failed: None };
        self.asked.push(asked);
        Ok(self.cookie)
    }

    /// Sends a request and waits for its answer.
    pub fn call(&mut self, flags: u16, command: u16, offset: u64, length: u64, data: &[u8]) -> Outcome {
        let cookie = self.ask(flags, command, offset, length, data);
        let (answered, outcome) = self.hear().expect("an answer");
        assert_eq!(answered, cookie);
        outcome
    }

    /// Reads.
    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.call(0, command::READ, offset, len as u64, &[]).expect("it can be read").0
    }

    /// Writes, so that it is stable.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        self.call(command_flag::FUA, command::WRITE, offset, data.len() as u64, data).expect("it can be written");
    }

    /// Waits for an answer, to whatever it is; chunks of others may come in between.
    ///
    /// # Errors
    /// The server has hung up.
    pub fn hear(&mut self) -> io::Result<(u64, Outcome)> {
        loop {
            let mut header = vec![0; 4];
            self.stream.read_exact(&mut header)?;
            let is_simple = header == [0x67, 0x44, 0x66, 0x98];
            header.resize(if is_simple { 16 } else { self.headers.reply_len() }, 0);
            self.stream.read_exact(&mut header[4..])?;
            let (reply, _) = Reply::read(self.headers, &header).expect("a reply").expect("all of it");
            let (flags, kind, cookie, length) = match reply {
                Reply::Simple { error, cookie } => {
                    let asked = self.take(cookie);
                    let mut data = vec![0; if error == 0 { asked.brings } else { 0 }];
                    self.stream.read_exact(&mut data)?;
                    return Ok((cookie, if error == 0 { Ok((data, Vec::new())) } else { Err(error) }));
                }
                Reply::Chunk { flags, kind, cookie, length, .. } => (flags, kind, cookie, length),
            };
            let mut payload = vec![0; length as usize];
            self.stream.read_exact(&mut payload)?;
            let asked = self.asked.iter_mut().find(|asked| asked.cookie == cookie).expect("it was asked for");
            asked.data.resize(asked.brings, 0xee);
            let number = |at: usize| u64::from_be_bytes(payload[at..at + 8].try_into().expect("eight bytes"));
            let word = |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().expect("four bytes"));
            match kind {
                chunk::NONE => {}
                chunk::OFFSET_DATA => {
                    let at = (number(0) - asked.offset) as usize;
                    asked.data[at..at + payload.len() - 8].copy_from_slice(&payload[8..]);
                }
                chunk::OFFSET_HOLE => {
                    let at = (number(0) - asked.offset) as usize;
                    asked.data[at..at + word(8) as usize].fill(0);
                }
                chunk::BLOCK_STATUS => {
                    let of = payload[4..].chunks(8).map(|one| {
                        let word = |at: usize| u32::from_be_bytes(one[at..at + 4].try_into().expect("four bytes"));
                        (word(0).into(), word(4).into())
                    });
                    asked.extents.push((word(0), of.collect()));
                }
                chunk::BLOCK_STATUS_EXT => {
                    let count = (payload.len() - 8) / 16;
                    assert_eq!(word(4) as usize, count);
                    let of = (0..count).map(|at| (number(8 + 16 * at), number(16 + 16 * at)));
                    asked.extents.push((word(0), of.collect()));
                }
                chunk::ERROR | chunk::ERROR_OFFSET => asked.failed = Some(word(0)),
                other => panic!("a chunk of kind {other}"),
            }
            if flags & chunk::FLAG_DONE != 0 {
                let Asked { data, extents, failed, .. } = self.take(cookie);
                return Ok((cookie, failed.map_or(Ok((data, extents)), Err)));
            }
        }
    }

    fn take(&mut self, cookie: u64) -> Asked {
        let at = self.asked.iter().position(|asked| asked.cookie == cookie).expect("it was asked for, once");
        self.asked.swap_remove(at)
    }

    /// Whether the server hangs up, in the end.
    pub fn is_hung_up_on(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(e) => e.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}
