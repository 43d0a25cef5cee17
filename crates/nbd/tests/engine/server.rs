//! A server that does what its test wants, request by request.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use egret_nbd::protocol::{
    ANSWER_MAGIC, BlockSizes, GREETING_MAGIC, Headers, OPTION_MAGIC, Reply, Request, answer, chunk, command,
    export_flag, info, option,
};
use egret_nbd::{Address, Target};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Nothing takes so long.
pub const HANGS: Duration = Duration::from_secs(30);

/// What a server says of its export.
#[derive(Clone, Copy)]
pub struct Says {
    pub size: u64,
    pub flags: u16,
    pub blocks: Option<BlockSizes>,
    pub headers: Headers,
}

impl Default for Says {
    /// A server that can do everything, and has a mebibyte.
    fn default() -> Self {
        let flags = export_flag::HAS_FLAGS
            | export_flag::SEND_FLUSH
            | export_flag::SEND_FUA
            | export_flag::SEND_TRIM
            | export_flag::SEND_WRITE_ZEROES
            | export_flag::CAN_MULTI_CONN;
        Self { size: 1 << 20, flags, blocks: None, headers: Headers::Structured }
    }
}

impl Says {
    pub fn without(self, flags: u16) -> Self {
        Self { flags: self.flags & !flags, ..self }
    }

    pub fn with(self, headers: Headers) -> Self {
        Self { headers, ..self }
    }
}

pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

/// A connection, when the haggling is over.
pub struct Peer {
    stream: UnixStream,
    headers: Headers,
}

impl Server {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("nbd");
        Self { listener: UnixListener::bind(&path).unwrap(), path, _dir: dir }
    }

    /// Of the export "disk", with these delays in milliseconds.
    pub fn target(&self, reconnect_delay: u64) -> Target {
        Target {
            node_name: "d0".to_owned(),
            uri: "nbd+unix:///disk".to_owned(),
            address: Address::Unix(self.path.clone()),
            encryption: None,
            export: "disk".to_owned(),
            read_only: false,
            reconnect_delay: Duration::from_millis(reconnect_delay),
            open_timeout: Duration::ZERO,
        }
    }

    /// Haggles with the next client.
    pub fn accept(&self, says: Says) -> Peer {
        let stream = self.accept_silently();
        stream.set_read_timeout(Some(HANGS)).unwrap();
        let mut peer = Peer { stream, headers: says.headers };
        peer.haggle(says);
        peer
    }

    /// Takes the next client, and says nothing.
    pub fn accept_silently(&self) -> UnixStream {
        let patience = Timespec::try_from(HANGS).unwrap();
        let connected = poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&patience)).unwrap();
        assert_eq!(connected, 1, "nobody connects");
        self.listener.accept().unwrap().0
    }

    /// Whether a client has come that nobody has taken.
    pub fn has_visitor(&self) -> bool {
        poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&Timespec::default())).unwrap() > 0
    }
}

impl Peer {
    fn haggle(&mut self, says: Says) {
        self.send(&[GREETING_MAGIC.to_be_bytes(), OPTION_MAGIC.to_be_bytes()].concat());
        self.send(&[0, 3]);
        self.take(4);
        loop {
            assert_eq!(self.take(8), OPTION_MAGIC.to_be_bytes());
            let [option, len] = [self.number(), self.number()];
            let data = self.take(len as usize);
            match option {
                option::EXTENDED_HEADERS if says.headers == Headers::Extended => self.answer(option, answer::ACK, &[]),
                option::STRUCTURED_REPLY if says.headers == Headers::Structured => {
                    self.answer(option, answer::ACK, &[])
                }
                option::GO => {
                    assert_eq!(data[4..8], *b"disk");
                    let export = [&info::EXPORT.to_be_bytes()[..], &says.size.to_be_bytes(), &says.flags.to_be_bytes()];
                    self.answer(option, answer::INFO, &export.concat());
                    if let Some(blocks) = says.blocks {
                        let sizes = [&info::BLOCK_SIZE.to_be_bytes()[..], &blocks.to_bytes()].concat();
                        self.answer(option, answer::INFO, &sizes);
                    }
                    return self.answer(option, answer::ACK, &[]);
                }
                _ => self.answer(option, answer::UNSUPPORTED, &[]),
            }
        }
    }

    fn answer(&mut self, option: u32, kind: u32, data: &[u8]) {
        let numbers = [option, kind, data.len() as u32].map(u32::to_be_bytes);
        self.send(&[&ANSWER_MAGIC.to_be_bytes()[..], &numbers.concat(), data].concat());
    }

    fn number(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().unwrap())
    }

    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn send(&mut self, bytes: &[u8]) {
        // Who was lied to may have left in the middle of it.
        let _ = self.stream.write_all(bytes);
    }

    /// The next request, and its data.
    pub fn request(&mut self) -> (Request, Vec<u8>) {
        let header = self.take(self.headers.request_len());
        let request = Request::read(self.headers, &header).unwrap().unwrap();
        let data = if request.command == command::WRITE { self.take(request.length as usize) } else { Vec::new() };
        (request, data)
    }

    /// Nothing but the end comes.
    pub fn is_left(&mut self) -> bool {
        // A goodbye may come before. It is called a reset where not all that was sent was received.
        let mut rest = Vec::new();
        let end = self.stream.read_to_end(&mut rest).map_or_else(|e| e.kind(), |_| ErrorKind::ConnectionReset);
        end == ErrorKind::ConnectionReset && (rest.is_empty() || rest.len() == self.headers.request_len())
    }

    /// A request that was done.
    pub fn done(&mut self, request: &Request) {
        match self.headers {
            Headers::Simple => self.simple(request, 0, &[]),
            _ => self.chunk(request, chunk::FLAG_DONE, chunk::NONE, &[]),
        }
    }

    pub fn fail(&mut self, request: &Request, error: u32) {
        match self.headers {
            Headers::Simple => self.simple(request, error, &[]),
            _ => self.chunk(
                request,
                chunk::FLAG_DONE,
                chunk::ERROR,
                &[&error.to_be_bytes()[..], &[0, 3], b"why"].concat(),
            ),
        }
    }

    pub fn simple(&mut self, request: &Request, error: u32, data: &[u8]) {
        let mut header = [0; 32];
        let len = Reply::Simple { error, cookie: request.cookie }.write(&mut header);
        self.send(&[&header[..len], data].concat());
    }

    pub fn chunk(&mut self, request: &Request, flags: u16, kind: u16, data: &[u8]) {
        let offset = (self.headers == Headers::Extended).then_some(request.offset);
        let mut header = [0; 32];
        let reply = Reply::Chunk { flags, kind, cookie: request.cookie, offset, length: data.len() as u64 };
        let len = reply.write(&mut header);
        self.send(&[&header[..len], data].concat());
    }

    /// What was to be read, in one piece.
    pub fn data(&mut self, request: &Request, data: &[u8]) {
        match self.headers {
            Headers::Simple => self.simple(request, 0, data),
            _ => self.part(request, chunk::FLAG_DONE, request.offset, data),
        }
    }

    pub fn part(&mut self, request: &Request, flags: u16, offset: u64, data: &[u8]) {
        self.chunk(request, flags, chunk::OFFSET_DATA, &[&offset.to_be_bytes()[..], data].concat());
    }

    pub fn hole(&mut self, request: &Request, flags: u16, offset: u64, len: u32) {
        let hole = [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat();
        self.chunk(request, flags, chunk::OFFSET_HOLE, &hole);
    }

    pub fn headers(&self) -> Headers {
        self.headers
    }
}
