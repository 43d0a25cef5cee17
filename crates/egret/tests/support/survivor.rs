//! A client that survives its daemon, and goes on with the next: it keeps its memory, its ring and the record of what is in
//! flight, as a virtual machine monitor does that connects again. It verifies what it reads.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use egret_vring::memory::{GuestMemory, Region};
use egret_vring::ring::{Driver, DriverConfig, PACKED_BASE, Piece};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::PATIENCE;
use super::server::{Options, Program, Server};
use super::wire::*;

pub const BLOCK: usize = 4096;
pub const BLOCKS: usize = 512;
pub const SIZE: u16 = 128;
pub const DEPTH: usize = 32;

/// Where the ring is, in the memory that client and daemon share.
const RING: u64 = 0x1000_0000;
/// Where the slots are, each with a header, a status byte behind it, and on the next page a block of data.
const SLOTS: u64 = RING + 0x10_0000;
const SLOT: u64 = 2 * BLOCK as u64;
const STATUS: u64 = 16;
const DATA: u64 = BLOCK as u64;
const MEMORY: u64 = 0x10_0000 + DEPTH as u64 * SLOT;

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;

#[derive(Clone, Copy)]
pub struct Sent {
    kind: u32,
    block: usize,
    version: u32,
}

/// A client that survives its daemon.
pub struct Client {
    pub memory: Arc<GuestMemory>,
    memory_file: File,
    pub driver: Driver,
    pub wire: Option<Wire>,
    kick: OwnedFd,
    call: OwnedFd,
    record: Option<(Vec<u8>, OwnedFd)>,
    /// How many descriptors it asks a record for.
    pub asks_for: u16,
    pub slots: Vec<Option<Sent>>,
    /// What each block holds, or will when what is in flight has ended.
    pub versions: Vec<u32>,
    random: u64,
    sent: u64,
    pub done: u64,
    /// Bytes that were read and as they should be.
    pub verified: u64,
}

impl Client {
    pub fn new(packed: bool) -> Self {
        let region = Region::anonymous(RING, MEMORY).expect("memory");
        let memory_file = region.file.try_clone().expect("a descriptor");
        let memory = Arc::new(GuestMemory::empty().with(region).expect("a mapping"));
        let (indirect, base) = if packed { (None, PACKED_BASE as u16) } else { (Some(4), 65500) };
        let config = DriverConfig { size: SIZE, packed, event_idx: true, indirect, base };
        let driver = Driver::new(&memory, RING, config).expect("a ring");
        let [kick, call] = [(); 2].map(|()| eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
        let (slots, versions) = (vec![None; DEPTH], vec![0; BLOCKS]);
        Self {
            memory,
            memory_file,
            driver,
            wire: None,
            kick,
            call,
            record: None,
            asks_for: SIZE,
            slots,
            versions,
            random: 1,
            sent: 0,
            done: 0,
            verified: 0,
        }
    }

    /// Connects, hands over memory and record, and starts the queue, knowing no more of it than the ring says. A packed one
    /// says nothing, and is told to begin where it once began.
    pub fn connect(&mut self, socket: &Path) {
        assert!(self.is_let_in(socket), "the daemon takes the queue in");
    }

    /// As [`connect`](Self::connect), with a record that the daemon may not like.
    pub fn is_let_in(&mut self, socket: &Path) -> bool {
        let queue = self.driver.queue();
        let packed = if queue.packed { F_RING_PACKED } else { 0 };
        let mut wire = Wire::agree(socket, F_VERSION_1 | F_INDIRECT_DESC | F_EVENT_IDX | packed);
        let asks_for = self.asks_for;
        let record = self.record.get_or_insert_with(|| {
            let (message, file) = wire.ask_inflight(1, asks_for).expect("an answer");
            (message, file.expect("a record"))
        });
        let mut used = [0; 2];
        assert!(self.memory.read(queue.used + 2, &mut used));
        let base = if queue.packed { queue.base } else { u16::from_le_bytes(used).into() };
        wire.must(SET_INFLIGHT_FD, &record.0, &[record.1.as_fd()]);
        wire.must(ADD_MEM_REG, &u64s(&[0, RING, MEMORY, RING, 0]), &[self.memory_file.as_fd()]);
        wire.must(SET_VRING_NUM, &u32s(&[0, SIZE.into()]), &[]);
        wire.must(SET_VRING_BASE, &u32s(&[0, base]), &[]);
        wire.must(SET_VRING_ADDR, &u64s(&[0, queue.desc, queue.used, queue.avail, 0]), &[]);
        wire.must(SET_VRING_CALL, &u64s(&[0]), &[self.call.as_fd()]);
        wire.must(SET_VRING_KICK, &u64s(&[0]), &[self.kick.as_fd()]);
        let is_let_in = !wire.refuses(SET_VRING_ENABLE, &u32s(&[0, 1]), &[]);
        self.wire = Some(wire);
        is_let_in
    }

    /// The record's file.
    pub fn record_file(&self) -> File {
        let (_, file) = self.record.as_ref().expect("it has connected");
        file.try_clone().expect("a descriptor").into()
    }

    /// As a null disk does.
    pub fn forget_what_was_written(&mut self) {
        self.versions.fill(0);
        self.slots.iter_mut().flatten().for_each(|sent| sent.version = 0);
    }

    fn random(&mut self, below: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below
    }

    /// Keeps every slot busy until so many more requests have ended.
    pub fn load(&mut self, requests: u64) {
        let until = self.done + requests;
        loop {
            for slot in 0..DEPTH {
                if self.slots[slot].is_none() {
                    self.send(slot);
                }
            }
            if self.driver.publish() {
                rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("our own eventfd");
            }
            if self.done >= until {
                return;
            }
            self.reap();
        }
    }

    /// Waits until nothing is in flight.
    pub fn drain(&mut self) {
        while self.slots.iter().any(Option::is_some) {
            self.reap();
        }
        assert_eq!(self.done, self.sent, "each request has ended once");
    }

    /// Has a last daemon end what is in flight, leaves it, and sees it end well.
    pub fn finish(&mut self, options: &Options, socket: &Path) {
        let server = Server::start(&Program::egret(), options);
        self.connect(socket);
        self.drain();
        self.wire = None;
        assert_eq!(server.terminate().code(), Some(0));
    }

    fn send(&mut self, slot: usize) {
        let block = self.random(BLOCKS);
        let is_taken = self.slots.iter().flatten().any(|other| other.kind != FLUSH && other.block == block);
        let kind = if is_taken { FLUSH } else { [READ, WRITE, WRITE, WRITE][self.random(4)] };
        if kind == WRITE {
            self.versions[block] += 1;
        }
        let version = self.versions[block];
        let at = SLOTS + slot as u64 * SLOT;
        let header = [u64::from(kind), (block * BLOCK / 512) as u64].map(u64::to_le_bytes).concat();
        let data = if kind == WRITE { content(block, version) } else { vec![0xee; BLOCK] };
        for (offset, bytes) in [(0, &header[..]), (STATUS, &[0xff]), (DATA, &data)] {
            assert!(self.memory.write(at + offset, bytes));
        }
        let piece = |offset, len| Piece { addr: at + offset, len };
        let (header, data, status) = (piece(0, 16), piece(DATA, BLOCK as u32), piece(STATUS, 1));
        let added = match kind {
            READ => self.driver.add(&[header], &[data, status], slot as u64),
            WRITE => self.driver.add(&[header, data], &[status], slot as u64),
            _ => self.driver.add(&[header], &[status], slot as u64),
        };
        added.expect("there are more descriptors than slots");
        self.slots[slot] = Some(Sent { kind, block, version });
        self.sent += 1;
    }

    /// Waits until something has ended, and looks at it.
    fn reap(&mut self) {
        if self.driver.arm_calls() {
            let mut polled = [PollFd::new(&self.call, PollFlags::IN)];
            // Ceph may take most of half a minute to take who is gone for dead.
            let patience = 2 * PATIENCE;
            let limit = Timespec::try_from(patience).expect("a short time");
            assert!(poll(&mut polled, Some(&limit)).expect("poll") > 0, "waited {patience:?} to be called");
            rustix::io::read(&self.call, &mut [0; 8]).expect("our own eventfd");
        }
        while let Some(used) = self.driver.reap().expect("nothing ends twice") {
            let sent = self.slots[used.token as usize].take().expect("it was in flight");
            let at = SLOTS + used.token * SLOT;
            let (mut status, mut data) = ([0xff], vec![0; BLOCK]);
            assert!(self.memory.read(at + STATUS, &mut status) && self.memory.read(at + DATA, &mut data));
            assert_eq!(status, [0], "it succeeds");
            assert!(sent.kind != READ || data == content(sent.block, sent.version), "block {} as written", sent.block);
            self.verified += if sent.kind == READ { BLOCK as u64 } else { 0 };
            self.done += 1;
        }
    }
}

/// What a block holds when it has been written so often: each word says where in it that is.
pub fn content(block: usize, version: u32) -> Vec<u8> {
    let word = |place| (block as u64) << 41 | place << 32 | u64::from(version);
    if version == 0 { vec![0; BLOCK] } else { u64s(&(0..BLOCK as u64 / 8).map(word).collect::<Vec<_>>()) }
}
