//! What tests of exports share: a loop on a thread of its own, and a front-end.
#![allow(dead_code, unreachable_pub, reason = "each test uses its part of this")]

pub mod gate;
pub mod lines;

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use egret_disk::{EngineOptions, EngineSet};
use egret_event_loop::{ClockReads, EventLoop, LoopHandle, LoopOptions, MonitorChoice, Nanos, spawn};
use egret_export::{Access, Address, ErrorPolicy, ExportConfig, Keeping, Rings, Worker};
use egret_polling::{Parameters, PolicyKind};
use egret_virtio::blk::BlkConfig;
use egret_vring::memory::{MemoryRules, Region};
pub use egret_vring::vhost_user::flag::NEED_REPLY;
pub use egret_vring::vhost_user::request::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

pub const RING_PACKED: u64 = 1 << 34;
pub const RING_EVENT_IDX: u64 = 1 << 29;

/// Waits for what shows on no descriptor.
pub fn await_that(what: &str, mut is_so: impl FnMut() -> bool) {
    let patience_ends = Instant::now() + Duration::from_secs(120);
    while !is_so() {
        assert!(Instant::now() < patience_ends, "waited in vain for {what}");
        std::thread::yield_now();
    }
}

/// A loop on its thread, stopped at the end.
pub struct IoThread(pub LoopHandle<Worker>, Option<std::thread::JoinHandle<()>>);

impl IoThread {
    pub fn start() -> Self {
        Self::with_aio_depth(EngineOptions::default().aio_depth)
    }

    /// One whose engine of Linux AIO is made for so many requests.
    pub fn with_aio_depth(aio_depth: u32) -> Self {
        let options = LoopOptions {
            name: "io".into(),
            monitor: MonitorChoice::Auto,
            policy: egret_polling::build(PolicyKind::Off, &Parameters::default()).unwrap(),
            window_max: Nanos::ZERO,
            idle_after: Nanos::from_millis(1_000),
            clock_reads: ClockReads::default(),
        };
        let engines = move |ring| EngineSet::new(EngineOptions { ring, aio_depth, ..EngineOptions::default() });
        let (handle, thread) = spawn(options, engines, |e| panic!("{e}")).unwrap();
        Self(handle, Some(thread))
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        self.0.send(EventLoop::stop);
        self.1.take().unwrap().join().unwrap();
    }
}

/// A loop that takes no turn until this is dropped.
pub struct Stuck {
    is: Arc<AtomicBool>,
    _go_on: Sender<()>,
}

impl Stuck {
    /// When this returns it is.
    pub fn begin(on: &LoopHandle<Worker>) -> Self {
        let ((begun, begins), (go_on, goes_on)) = (channel(), channel::<()>());
        let is = Arc::new(AtomicBool::new(true));
        let theirs = Arc::clone(&is);
        on.send(move |_| {
            let _ = begun.send(());
            // Who waits for it comes to an end, and is found out.
            let _ = goes_on.recv_timeout(Duration::from_secs(60));
            theirs.store(false, Ordering::Relaxed);
        });
        begins.recv().unwrap();
        Self { is, _go_on: go_on }
    }

    /// Whether it is still: nobody has waited for it then.
    pub fn is(&self) -> bool {
        self.is.load(Ordering::Relaxed)
    }
}

/// An export that is found there, and is as usual.
pub fn export_config(address: Address) -> ExportConfig {
    ExportConfig {
        id: "e0".into(),
        address,
        access: Access::default(),
        memory: MemoryRules::default(),
        rings: Rings::default(),
        errors: ErrorPolicy::default(),
        keeping: Keeping::default(),
    }
}

/// A disk of virtio-blk without anything particular.
pub fn blk_config(capacity_bytes: u64, num_queues: u16) -> BlkConfig {
    BlkConfig { capacity_bytes, num_queues, serial: "egret".into(), ..BlkConfig::default() }
}

/// A front-end.
pub struct Peer(pub UnixStream);

impl Peer {
    /// Agrees on everything that is offered, but packed rings.
    pub fn agree(&mut self) {
        self.agree_but(RING_PACKED);
    }

    /// Agrees on everything that is offered, but these features.
    pub fn agree_but(&mut self, unwanted: u64) {
        let features = self.ask_u64(GET_FEATURES) & !unwanted;
        self.say(SET_FEATURES, 0, &features.to_ne_bytes(), &[]);
        let features = self.ask_u64(GET_PROTOCOL_FEATURES);
        self.say(SET_PROTOCOL_FEATURES, 0, &features.to_ne_bytes(), &[]);
    }

    pub fn say(&self, request: u32, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) {
        let message = [words(&[request, 1 | flags, body.len() as u32]), body.to_vec()].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(65))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
        sendmsg(&self.0, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL).unwrap();
    }

    pub fn hear(&mut self) -> Option<Vec<u8>> {
        let mut header = [0; 12];
        self.0.read_exact(&mut header).ok()?;
        assert_eq!(header[4..8], 5u32.to_ne_bytes(), "an answer, of the first version");
        let mut body = vec![0; u32::from_ne_bytes(header[8..].try_into().unwrap()) as usize];
        self.0.read_exact(&mut body).ok()?;
        Some(body)
    }

    /// An answer that is a number, and the descriptor that came with it.
    pub fn hear_with(&mut self) -> Option<(u64, Option<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut message = [0; 20];
        let got = recvmsg(&self.0, &mut [IoSliceMut::new(&mut message)], &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
        let fd = control.drain().find_map(|part| match part {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        (got.bytes == message.len()).then(|| (u64::from_ne_bytes(message[12..].try_into().unwrap()), fd))
    }

    pub fn ask(&mut self, request: u32, body: &[u8]) -> Option<Vec<u8>> {
        self.say(request, 0, body, &[]);
        self.hear()
    }

    pub fn ask_u64(&mut self, request: u32) -> u64 {
        u64::from_ne_bytes(self.ask(request, &[]).expect("an answer").try_into().unwrap())
    }

    /// Sends what must be acknowledged; `None` if the session ended instead of an answer.
    pub fn order(&mut self, request: u32, body: &[u8]) -> Option<u64> {
        self.say(request, NEED_REPLY, body, &[]);
        Some(u64::from_ne_bytes(self.hear()?.try_into().unwrap()))
    }
}

/// Starts a ring, and gives its memory and kick descriptor, which the caller keeps.
pub fn start_ring(peer: &mut Peer, index: u32) -> (Region, OwnedFd) {
    let kept = kick_ring(peer, index);
    assert_eq!(peer.order(SET_VRING_ENABLE, &words(&[index, 1])), Some(0));
    kept
}

/// Likewise, but for that it is not enabled.
pub fn kick_ring(peer: &mut Peer, index: u32) -> (Region, OwnedFd) {
    let region = Region::anonymous(0, 1 << 20).unwrap();
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let table = [words(&[1, 0]), longs(&[0, region.size, 0, 0])].concat();
    peer.say(SET_MEM_TABLE, 0, &table, &[region.file.as_fd()]);
    peer.say(SET_VRING_NUM, 0, &words(&[index, 16]), &[]);
    peer.say(SET_VRING_ADDR, 0, &[words(&[index, 0]), longs(&[0x1000, 0x2000, 0x3000, 0])].concat(), &[]);
    peer.say(SET_VRING_KICK, 0, &longs(&[index.into()]), &[kick.as_fd()]);
    (region, kick)
}

pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

pub fn longs(longs: &[u64]) -> Vec<u8> {
    longs.iter().flat_map(|long| long.to_ne_bytes()).collect()
}
