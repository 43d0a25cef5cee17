//! A vhost-user-blk server that does as a test says: honest by default, and bad where it is told to be.
#![allow(dead_code, unreachable_pub, reason = "each test uses its part of this")]

use std::io::{self, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use egret_loadgen::client::{Client, ClientOptions};
use egret_loadgen::load::{Job, Spec};
use egret_vring::memory::{GuestMemory, Region};
use egret_vring::ring::{Chain, Queue, QueueConfig};
use egret_vring::vhost_user::request::*;
use egret_vring::vhost_user::{F_PROTOCOL_FEATURES, flag, protocol_feature};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// What a patient client allows a server in these tests.
pub const PATIENCE: Duration = Duration::from_millis(200);

/// The size of the disk, in bytes.
pub const CAPACITY: u64 = 1 << 20;

const VERSION_1: u64 = 1 << 32;
const EVENT_IDX: u64 = 1 << 29;
const PROTOCOL: u64 = protocol_feature::MQ
    | protocol_feature::REPLY_ACK
    | protocol_feature::CONFIG
    | protocol_feature::CONFIGURE_MEM_SLOTS;

/// What a server offers and answers.
#[derive(Clone, Copy, Debug)]
pub struct PuppetOptions {
    pub features: u64,
    pub protocol: u64,
    /// What orders are answered with.
    pub ack: u64,
}

impl Default for PuppetOptions {
    fn default() -> Self {
        Self { features: VERSION_1 | F_PROTOCOL_FEATURES | EVENT_IDX, protocol: PROTOCOL, ack: 0 }
    }
}

/// What a test does with a queue that its server was given.
pub struct Device {
    pub memory: Arc<GuestMemory>,
    pub queue: Queue,
    pub stream: UnixStream,
    kick: OwnedFd,
    pub call: OwnedFd,
    pub err: OwnedFd,
    /// The used ring, for whoever wants to write to it by hand.
    pub config: QueueConfig,
    chain: Chain,
}

impl Device {
    /// Waits for a request and answers it with `status`; false when the client has left.
    pub fn serve_one(&mut self, status: u8) -> bool {
        while !self.queue.pop(&mut self.chain).expect("a client that keeps to the rules") {
            if !self.await_request() {
                return false;
            }
        }
        let last = self.chain.writable().len() - 1;
        self.memory.scatter(&self.chain.writable()[last..], &[status]);
        self.queue.add_used(self.chain.head(), 1);
        if self.queue.publish_used() {
            rustix::io::write(&self.call, &1u64.to_ne_bytes()).unwrap();
        }
        true
    }

    /// Serves until the client leaves.
    pub fn serve(mut self) {
        while self.serve_one(0) {}
    }

    /// Waits until there is a request; false when the client has left.
    pub fn await_request(&mut self) -> bool {
        while self.queue.arm_kicks() {
            let mut both = [
                PollFd::from_borrowed_fd(self.kick.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.stream.as_fd(), PollFlags::IN),
            ];
            poll(&mut both, None).unwrap();
            // After its start a client says nothing more: what there is to read is its end.
            if !both[1].revents().is_empty() {
                return false;
            }
            let _ = rustix::io::read(&self.kick, &mut [0; 8]);
        }
        true
    }
}

/// A job on a server that talks well enough.
pub fn job(puppet: &Puppet, spec: &Spec) -> Job {
    let disk = Client::connect(&puppet.socket, ClientOptions::default()).unwrap().start(spec.shape()).unwrap();
    spec.jobs(disk).unwrap().remove(0)
}

/// Listens at a socket of its own, and runs `serve` in a thread with the first client.
pub struct Puppet {
    pub socket: PathBuf,
    thread: Option<JoinHandle<()>>,
    _directory: tempfile::TempDir,
}

impl Puppet {
    /// A server whose every byte is the test's.
    pub fn saying(serve: impl FnOnce(UnixStream) + Send + 'static) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        let thread = std::thread::spawn(move || serve(listener.accept().unwrap().0));
        Self { socket, thread: Some(thread), _directory: directory }
    }

    /// A server that talks as `options` says, and hands the one queue that its client starts to `run`.
    pub fn with(options: PuppetOptions, run: impl FnOnce(Device) + Send + 'static) -> Self {
        Self::saying(move |stream| {
            if let Some(device) = Conversation::new(options).hold(stream).unwrap() {
                run(device);
            }
        })
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("the server's thread has failed");
        }
    }
}

/// What a client has said so far.
struct Conversation {
    options: PuppetOptions,
    memory: GuestMemory,
    config: QueueConfig,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    err: Option<OwnedFd>,
    event_idx: bool,
    enabled: bool,
}

impl Conversation {
    fn new(options: PuppetOptions) -> Self {
        let config =
            QueueConfig { size: 0, desc: 0, avail: 0, used: 0, base: 0, packed: false, event_idx: false, log: None };
        let (kick, call, err) = (None, None, None);
        Self { options, memory: GuestMemory::empty(), config, kick, call, err, event_idx: false, enabled: false }
    }

    /// Talks until a queue is enabled and the client has asked whether all is well, or it leaves.
    fn hold(mut self, mut stream: UnixStream) -> io::Result<Option<Device>> {
        loop {
            let Some((number, flags, body, fds)) = receive(&mut stream)? else { return Ok(None) };
            let answer = self.answer(number, &body, fds);
            let needs_ack = flags & flag::NEED_REPLY != 0 && self.options.protocol & protocol_feature::REPLY_ACK != 0;
            let answer = answer.or_else(|| needs_ack.then(|| self.options.ack.to_ne_bytes().to_vec()));
            if let Some(answer) = answer {
                let mut message =
                    [number, flag::VERSION | flag::REPLY, answer.len() as u32].map(u32::to_ne_bytes).concat();
                message.extend(answer);
                stream.write_all(&message)?;
            }
            if self.enabled && number == GET_FEATURES {
                let memory = Arc::new(self.memory);
                let config = QueueConfig { event_idx: self.event_idx, ..self.config };
                let queue = config.start(&memory).unwrap();
                let (kick, call, err) = (self.kick.unwrap(), self.call.unwrap(), self.err.unwrap());
                return Ok(Some(Device { memory, queue, stream, kick, call, err, config, chain: Chain::new() }));
            }
        }
    }

    fn answer(&mut self, number: u32, body: &[u8], mut fds: Vec<OwnedFd>) -> Option<Vec<u8>> {
        let word = |at: usize| u32::from_ne_bytes(body[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_ne_bytes(body[at..at + 8].try_into().unwrap());
        let number_reply = |value: u64| Some(value.to_ne_bytes().to_vec());
        match number {
            GET_FEATURES => return number_reply(self.options.features),
            SET_FEATURES => self.event_idx = long(0) & EVENT_IDX != 0,
            GET_PROTOCOL_FEATURES => return number_reply(self.options.protocol),
            GET_QUEUE_NUM => return number_reply(1),
            GET_CONFIG => {
                let mut reply = body.to_vec();
                reply[12..20].copy_from_slice(&(CAPACITY / 512).to_le_bytes());
                return Some(reply);
            }
            // Both begin a description of the region at byte 8, and this client has one region only.
            SET_MEM_TABLE | ADD_MEM_REG => {
                let region = Region {
                    guest_addr: long(8),
                    size: long(16),
                    user_addr: long(24),
                    offset: long(32),
                    file: fds.pop().unwrap(),
                };
                self.memory = self.memory.with(region).unwrap();
            }
            SET_VRING_NUM => self.config.size = word(4) as u16,
            SET_VRING_ADDR => {
                let at = |at| self.memory.guest_address(long(at)).unwrap();
                (self.config.desc, self.config.used, self.config.avail) = (at(8), at(16), at(24));
            }
            SET_VRING_KICK => self.kick = fds.pop(),
            SET_VRING_CALL => self.call = fds.pop(),
            SET_VRING_ERR => self.err = fds.pop(),
            SET_VRING_ENABLE => self.enabled = word(4) == 1,
            _ => {}
        }
        None
    }
}

/// A message's number, flags, body and descriptors; nothing when the client has left.
type Message = (u32, u32, Vec<u8>, Vec<OwnedFd>);

fn receive(stream: &mut UnixStream) -> io::Result<Option<Message>> {
    let mut header = [0; 12];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // A message is sent in one piece, and these are the first bytes of one.
    let got = recvmsg(&*stream, &mut [IoSliceMut::new(&mut header)], &mut control, RecvFlags::empty())?;
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = part {
            fds.extend(received);
        }
    }
    let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
    let mut body = vec![0; word(8) as usize];
    stream.read_exact(&mut body)?;
    Ok(Some((word(0), word(4), body, fds)))
}
