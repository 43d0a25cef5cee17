//! What an NBD server may send to an I/O thread that has requests there.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use egret_disk::{Disk, Driver, EngineOptions, EngineSet, Op, Options, RemoteDisk, Request, RequestToken};
use egret_event_loop::{Backend, Nanos};
use egret_nbd::handshake::Export;
use egret_nbd::protocol::{self, BlockSizes, Headers, Reply, chunk};
use egret_vring::memory::Buffers;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use crate::blk_ring::{REGIONS, memory, ring};
use crate::connected::Connected;
use crate::input::Input;

const SIZE: u64 = 1 << 20;

/// A program: requests, and what a server sends that has read some of them, or none.
///
/// # Panics
/// When a request comes back twice, or not at all, or with memory that it did not bring.
pub fn nbd_replies(data: &[u8]) {
    let mut input = Input(data);
    let headers = input.one_of(&[Headers::Structured, Headers::Extended, Headers::Simple]);
    let maximum = input.one_of(&[4096, 1 << 25]);
    let blocks = BlockSizes { minimum: 512, preferred: 4096, maximum };
    let export = Export { size: SIZE, flags: 1 | u16::from(input.u8()) << 2, blocks, headers };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a pair");
    let remote = RemoteDisk::new(Connected::new(export, ours));
    let disk = Arc::new(Disk::open(&Options::new("d0", Driver::Remote(remote))).expect("a disk"));
    let mut engines = EngineSet::new(EngineOptions::default());
    let slot = engines.attach(&disk).expect("its engine");
    let mut server = Server { socket: theirs, headers, heard: Vec::new(), requests: Vec::new() };
    // It lends what the requests bring.
    let config = ring(&mut Input(&[]));
    let mut queue = config.queue(REGIONS[0].0).start(&memory()).expect("a ring");
    let mut sent: HashMap<u64, usize> = HashMap::new();
    let (mut next, mut ended) = (0, Vec::new());
    while !input.is_over() {
        match input.u8() % 8 {
            0 | 1 => {
                let len = 512 * (1 + u64::from(input.u8() % 32));
                let offset = 512 * u64::from(input.u16() % 1024);
                let ops = [
                    Op::Read,
                    Op::Read,
                    Op::Write { fua: true },
                    Op::Flush,
                    Op::WriteZeroes { unmap: true, fua: false },
                ];
                let op = input.one_of(&ops);
                let data = matches!(op, Op::Read | Op::Write { .. });
                let bytes = if data { vec![0xee; len as usize] } else { Vec::new() };
                let (offset, len) = if op == Op::Flush { (0, 0) } else { (offset, len) };
                let lent = queue.lend(Buffers::own(bytes, Vec::new()), op.access()).expect("its own");
                next += 1;
                sent.insert(next, if data { len as usize } else { 0 });
                engines.push(slot, Request { op, offset, len, buffers: lent, token: RequestToken(next) });
                engines.submit(Nanos::ZERO);
            }
            2 => server.hear(),
            3 => server.say(input.bytes(64)),
            4 => server.say(&vec![input.u8(); usize::from(input.u16() % 8192)]),
            5 | 6 => server.answer(&mut input),
            _ => {
                engines.descriptors().into_iter().for_each(|fd| engines.announced(fd));
                engines.reap(Nanos::ZERO, &mut |end| ended.push(end.completion));
                engines.submit(Nanos::ZERO);
            }
        }
    }
    // Without a connection all of them end.
    drop(server);
    for _ in 0..64 {
        engines.descriptors().into_iter().for_each(|fd| engines.announced(fd));
        engines.submit(Nanos::ZERO);
        engines.reap(Nanos::ZERO, &mut |end| ended.push(end.completion));
    }
    for completion in ended {
        let len = sent.remove(&completion.token.0).expect("it is on its way, and comes back once");
        let bytes = queue.take_back(completion.buffers).into_parts().1.expect("its own");
        assert_eq!(bytes.len(), len);
    }
    assert!(sent.is_empty(), "requests that do not come back");
}

/// What has the other end of a connection.
struct Server {
    socket: OwnedFd,
    headers: Headers,
    heard: Vec<u8>,
    requests: Vec<protocol::Request>,
}

impl Server {
    fn say(&self, bytes: &[u8]) {
        let _ = send(&self.socket, bytes, SendFlags::NOSIGNAL);
    }

    /// Reads what has come.
    fn hear(&mut self) {
        let mut bytes = vec![0; 1 << 16];
        let Ok((count, _)) = recv(&self.socket, &mut bytes[..], RecvFlags::empty()) else { return };
        self.heard.extend(&bytes[..count]);
        while let Some(request) = protocol::Request::read(self.headers, &self.heard).expect("requests alone are sent") {
            let data = if request.command == protocol::command::WRITE { request.length as usize } else { 0 };
            let len = self.headers.request_len() + data;
            if self.heard.len() < len {
                return;
            }
            self.heard.drain(..len);
            self.requests.push(request);
        }
    }

    /// Answers a request that was read, more or less.
    fn answer(&mut self, input: &mut Input<'_>) {
        if self.requests.is_empty() {
            return;
        }
        let at = usize::from(input.u8()) % self.requests.len();
        let request = self.requests[at];
        let offset = (self.headers == Headers::Extended).then_some(request.offset);
        let flags = u16::from(input.u8() % 2);
        let kinds = [
            chunk::NONE,
            chunk::OFFSET_DATA,
            chunk::OFFSET_DATA,
            chunk::OFFSET_HOLE,
            chunk::ERROR,
            chunk::ERROR_OFFSET,
            5,
            6,
            77,
        ];
        let kind = input.one_of(&kinds);
        let (error, any) = (input.u8(), u64::from(input.u16()));
        let skip = u64::from(input.u8() % 4) * 512;
        let len = input.one_of(&[request.length.saturating_sub(skip), request.length, 512, 1, any]).min(1 << 16);
        let place = (request.offset + skip).to_be_bytes();
        let payload = match kind {
            chunk::NONE => Vec::new(),
            chunk::OFFSET_DATA => [&place[..], &vec![0x11; len as usize]].concat(),
            chunk::OFFSET_HOLE => [&place[..], &(len as u32).to_be_bytes()].concat(),
            _ => [&[0, 0, 0, error], &(len as u16).to_be_bytes()[..], &vec![b'x'; len as usize % 100]].concat(),
        };
        let reply = match self.headers {
            Headers::Simple => Reply::Simple { error: u32::from(input.u8() / 128), cookie: request.cookie },
            _ => Reply::Chunk { flags, kind, cookie: request.cookie, offset, length: payload.len() as u64 },
        };
        let mut header = [0; 32];
        let written = reply.write(&mut header);
        self.say(&header[..written]);
        match self.headers {
            Headers::Simple => self.say(&vec![0x11; len as usize]),
            _ => self.say(&payload),
        }
        if input.u8().is_multiple_of(2) {
            self.requests.remove(at);
        }
    }
}
