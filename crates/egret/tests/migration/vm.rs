//! A virtual machine that migrates, without the machine: a driver on rings of its own, which writes, reads back and compares,
//! and whose memory goes to the destination as a VMM has it: once as a whole, then only what has been written since.
//!
//! What the guest wrote itself it knows. What the daemon wrote it learns from the log alone, so that a page that is not
//! logged is at the destination what it was before, and the next request notices.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use egret_vring::memory::{GuestMemory, Region};
use egret_vring::ring::{Driver, DriverConfig, PACKED_BASE, Piece};
use egret_vring::vhost_user::{F_LOG_ALL, VRING_LOG};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::support::PATIENCE;
use crate::support::wire::*;

pub const BLOCK: usize = 4096;
pub const BLOCKS: usize = 512;
pub const SIZE: u16 = 64;
const DEPTH: usize = 8;

const PAGE: u64 = 4096;
const MEMORY: u64 = 0x1000_0000;
/// A queue's part of memory: the ring, and slots behind it. Of a slot's pages the guest writes the first; the daemon the
/// second, where the status is; and whoever has to the third, where the data is.
const RING: u64 = 4 * PAGE;
const SLOT: u64 = 3 * PAGE;
const QUEUE: u64 = RING + DEPTH as u64 * SLOT;

/// VIRTIO_BLK_F_WRITE_ZEROES.
const F_WRITE_ZEROES: u64 = 1 << 14;
const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
/// VIRTIO_BLK_T_WRITE_ZEROES; on SCSI WRITE SAME (16) without data.
const ZEROES: u32 = 13;

/// What the machine's disk is.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub scsi: bool,
    pub packed: bool,
    pub queues: u16,
}

#[derive(Clone, Copy)]
struct Sent {
    kind: u32,
    block: usize,
    version: u32,
}

struct Queue {
    driver: Driver,
    slots: [Option<Sent>; DEPTH],
    kick: OwnedFd,
    call: OwnedFd,
    /// Where it goes on.
    base: u32,
}

impl Queue {
    /// For a message: kick and call.
    fn descriptors(&self) -> [OwnedFd; 2] {
        [&self.kick, &self.call].map(|fd| fd.try_clone().expect("a descriptor"))
    }
}

/// What has been copied of a machine that is about to move.
struct Copied {
    memory: Vec<u8>,
    log: File,
}

/// See the module's documentation.
pub struct Vm {
    machine: Machine,
    memory: Arc<GuestMemory>,
    file: File,
    queues: Vec<Queue>,
    wire: Option<Wire>,
    record: Option<(Vec<u8>, OwnedFd)>,
    copied: Option<Copied>,
    /// Pages that the guest has written since memory was copied.
    written: BTreeSet<u64>,
    /// How often each block has been written, or will have been when what is in flight has ended.
    pub versions: Vec<u32>,
    random: u64,
    pub done: u64,
    /// Bytes that were read and as they should be.
    pub verified: u64,
    /// Requests that failed.
    pub errors: u64,
}

impl Vm {
    pub fn new(machine: Machine) -> Self {
        let region = Region::anonymous(MEMORY, u64::from(machine.queues) * QUEUE).expect("memory");
        let file = region.file.try_clone().expect("a descriptor");
        let memory = Arc::new(GuestMemory::empty().with(region).expect("a mapping"));
        let base = if machine.packed { PACKED_BASE as u16 } else { 65500 };
        let config = DriverConfig { size: SIZE, packed: machine.packed, event_idx: true, indirect: None, base };
        let queues = (0..u64::from(machine.queues)).map(|queue| {
            let driver = Driver::new(&memory, MEMORY + queue * QUEUE, config).expect("a ring");
            let [kick, call] = [(); 2].map(|()| eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
            let base = driver.queue().base;
            Queue { driver, slots: [None; DEPTH], kick, call, base }
        });
        Self {
            machine,
            file,
            queues: queues.collect(),
            wire: None,
            record: None,
            copied: None,
            written: BTreeSet::new(),
            versions: vec![0; BLOCKS],
            random: 1,
            done: 0,
            verified: 0,
            errors: 0,
            memory,
        }
    }

    /// The number of a request queue in messages.
    fn index(&self, queue: usize) -> u32 {
        queue as u32 + if self.machine.scsi { 2 } else { 0 }
    }

    /// Connects, and starts the queues where they stopped. The connection that there was ends afterwards.
    pub fn connect(&mut self, socket: &Path) {
        let wire = Wire::agree(socket, self.features() | F_LOG_ALL);
        let before = self.wire.replace(wire);
        self.set_features(false);
        let queues = self.index(self.queues.len()) as u16;
        if self.record.is_none() {
            let (message, file) = self.wire().ask_inflight(queues, SIZE).expect("an answer");
            self.record = Some((message, file.expect("a record")));
        }
        let (message, record) = self.record.as_ref().expect("it was made");
        let (message, record) = (message.clone(), record.try_clone().expect("a descriptor"));
        self.must(SET_INFLIGHT_FD, &message, &[record.as_fd()]);
        let region = u64s(&[0, MEMORY, self.bytes(), MEMORY, 0]);
        let memory = self.file.try_clone().expect("a descriptor");
        self.must(ADD_MEM_REG, &region, &[memory.as_fd()]);
        for at in 0..self.queues.len() {
            let index = self.index(at);
            let (base, [kick, call]) = (self.queues[at].base, self.queues[at].descriptors());
            self.must(SET_VRING_NUM, &u32s(&[index, SIZE.into()]), &[]);
            self.must(SET_VRING_BASE, &u32s(&[index, base]), &[]);
            self.set_address(at, false);
            self.must(SET_VRING_CALL, &u64s(&[index.into()]), &[call.as_fd()]);
            self.must(SET_VRING_KICK, &u64s(&[index.into()]), &[kick.as_fd()]);
            self.must(SET_VRING_ENABLE, &u32s(&[index, 1]), &[]);
        }
        drop(before);
    }

    /// As [`connect`](Self::connect), when the daemon is gone that knew where the queues were: split rings know it, and for
    /// packed ones the record does.
    pub fn reconnect(&mut self, socket: &Path) {
        self.wire = None;
        for queue in self.queues.iter_mut().filter(|_| !self.machine.packed) {
            let mut used = [0; 2];
            assert!(self.memory.read(queue.driver.queue().used + 2, &mut used));
            queue.base = u16::from_le_bytes(used).into();
        }
        self.connect(socket);
        if self.copied.is_some() {
            self.log(true);
        }
    }

    /// Leaves without a word.
    pub fn leave(&mut self) {
        self.wire = None;
    }

    /// Begins to move: from here on the daemon logs, and memory is copied as it is.
    pub fn begin_to_move(&mut self) {
        let log = File::from(memfd_create("log", MemfdFlags::CLOEXEC).expect("a memfd"));
        log.set_len(((MEMORY + self.bytes()) / PAGE).div_ceil(8).next_multiple_of(PAGE)).expect("its length");
        self.copied = Some(Copied { memory: Vec::new(), log });
        self.log(true);
        self.written.clear();
        let memory = self.content();
        self.copied.as_mut().expect("it has begun").memory = memory;
    }

    /// Copies what was written meanwhile, and has what comes logged elsewhere.
    pub fn copy_once_more(&mut self) {
        let Copied { mut memory, log } = self.copied.take().expect("it has begun to move");
        let fresh = File::from(memfd_create("log", MemfdFlags::CLOEXEC).expect("a memfd"));
        fresh.set_len(log.metadata().expect("a file").len()).expect("its length");
        self.copied = Some(Copied { memory: Vec::new(), log: fresh });
        self.log(true);
        self.copy_dirty(&mut memory, &log);
        self.copied.as_mut().expect("it is moving").memory = memory;
    }

    /// Does not move after all.
    pub fn stay(&mut self) {
        self.log(false);
        self.copied = None;
    }

    /// Stops the queues; what is in flight has ended.
    pub fn stop(&mut self) {
        for at in 0..self.queues.len() {
            let index = self.index(at);
            let state = self.wire().ask(GET_VRING_BASE, &u32s(&[index, 0])).expect("its state");
            self.queues[at].base = (state >> 32) as u32;
        }
    }

    /// Goes on elsewhere, with the memory that was copied.
    pub fn arrive(&mut self, socket: &Path) {
        let Copied { mut memory, log } = self.copied.take().expect("it has begun to move");
        self.copy_dirty(&mut memory, &log);
        self.file.write_all_at(&memory, 0).expect("our own memory");
        // QEMU's destination asks its daemon for a new one: nothing is in flight.
        self.record = None;
        self.connect(socket);
    }

    /// Starts the queues again where they stopped.
    pub fn go_on(&mut self) {
        for at in 0..self.queues.len() {
            let (index, base) = (self.index(at), self.queues[at].base);
            let [kick, call] = self.queues[at].descriptors();
            self.must(SET_VRING_BASE, &u32s(&[index, base]), &[]);
            self.must(SET_VRING_CALL, &u64s(&[index.into()]), &[call.as_fd()]);
            self.must(SET_VRING_KICK, &u64s(&[index.into()]), &[kick.as_fd()]);
        }
    }

    fn copy_dirty(&mut self, copy: &mut [u8], log: &File) {
        let mut bits = vec![0; log.metadata().expect("a file").len() as usize];
        log.read_exact_at(&mut bits, 0).expect("our own memory");
        let logged = (MEMORY / PAGE..(MEMORY + self.bytes()) / PAGE)
            .filter(|page| bits[(page / 8) as usize] & 1 << (page % 8) != 0)
            .map(|page| page - MEMORY / PAGE);
        let rings = (0..u64::from(self.machine.queues)).flat_map(|queue| {
            let at = queue * QUEUE / PAGE;
            at..at + RING / PAGE
        });
        let written = std::mem::take(&mut self.written);
        for page in logged.chain(rings).chain(written) {
            let at = (page * PAGE) as usize;
            self.file.read_exact_at(&mut copy[at..at + PAGE as usize], at as u64).expect("our own memory");
        }
    }

    fn content(&self) -> Vec<u8> {
        let mut memory = vec![0; self.bytes() as usize];
        self.file.read_exact_at(&mut memory, 0).expect("our own memory");
        memory
    }

    /// As QEMU does it, while the queues run.
    fn log(&mut self, on: bool) {
        if on {
            let log = self.copied.as_ref().expect("it has begun to move").log.try_clone().expect("a descriptor");
            let size = log.metadata().expect("a file").len();
            self.wire().order(SET_LOG_BASE, &u64s(&[size, 0]), &[log.as_fd()]).expect("an answer");
        }
        self.set_features(on);
        (0..self.queues.len()).for_each(|queue| self.set_address(queue, on));
    }

    fn set_features(&mut self, log: bool) {
        let log = if log { F_LOG_ALL } else { 0 };
        self.must(SET_FEATURES, &u64s(&[self.features() | F_PROTOCOL_FEATURES | log]), &[]);
    }

    /// What its driver wants. Without VIRTIO_BLK_F_FLUSH each of its writes would be stable, whatever the export says.
    fn features(&self) -> u64 {
        let packed = if self.machine.packed { F_RING_PACKED } else { 0 };
        let blk = if self.machine.scsi { 0 } else { F_BLK_FLUSH | F_WRITE_ZEROES };
        F_VERSION_1 | F_EVENT_IDX | packed | blk
    }

    fn set_address(&mut self, queue: usize, log: bool) {
        let ring = self.queues[queue].driver.queue();
        let flags = if log { VRING_LOG } else { 0 };
        let first = u32s(&[self.index(queue), flags]);
        let rest = u64s(&[ring.desc, ring.used, ring.avail, if log { ring.used } else { 0 }]);
        self.must(SET_VRING_ADDR, &[first, rest].concat(), &[]);
    }

    fn bytes(&self) -> u64 {
        u64::from(self.machine.queues) * QUEUE
    }

    fn wire(&mut self) -> &mut Wire {
        self.wire.as_mut().expect("it is connected")
    }

    fn must(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        self.wire().must(request, payload, fds);
    }

    /// Keeps every slot busy until so many more requests have ended.
    pub fn load(&mut self, requests: u64) {
        let until = self.done + requests;
        loop {
            self.submit();
            if self.done >= until {
                return;
            }
            self.reap();
        }
    }

    /// Has the disk flushed so often, one after the other.
    pub fn flush(&mut self, times: u16) {
        for _ in 0..times {
            self.send(0, 0, Sent { kind: FLUSH, block: 0, version: 0 });
            self.publish(0);
            self.drain();
        }
    }

    /// Fills the slots that are free.
    pub fn submit(&mut self) {
        for queue in 0..self.queues.len() {
            for slot in 0..DEPTH {
                if self.queues[queue].slots[slot].is_none() {
                    let sent = self.choose(queue);
                    self.send(queue, slot, sent);
                }
            }
            self.publish(queue);
        }
    }

    /// Waits until nothing is in flight.
    pub fn drain(&mut self) {
        while self.queues.iter().any(|queue| queue.slots.iter().any(Option::is_some)) {
            self.reap();
        }
    }

    fn publish(&mut self, queue: usize) {
        let Queue { driver, kick, .. } = &mut self.queues[queue];
        if driver.publish() {
            rustix::io::write(kick, &1u64.to_ne_bytes()).expect("our own eventfd");
        }
    }

    fn random(&mut self, below: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below
    }

    /// A request of a block that is this queue's alone, and that no other request is about.
    fn choose(&mut self, queue: usize) -> Sent {
        let queues = self.queues.len();
        let block = self.random(BLOCKS / queues) * queues + queue;
        let taken = |sent: &Sent| sent.kind != FLUSH && sent.block == block;
        let is_taken = self.queues[queue].slots.iter().flatten().any(taken);
        let kind = if is_taken { FLUSH } else { [READ, WRITE, WRITE, READ][self.random(4)] };
        let version = &mut self.versions[block];
        *version += u32::from(kind == WRITE);
        let kind = if kind == WRITE && is_zeroes(*version) { ZEROES } else { kind };
        Sent { kind, block, version: *version }
    }

    fn send(&mut self, queue: usize, slot: usize, sent: Sent) {
        let at = MEMORY + queue as u64 * QUEUE + RING + slot as u64 * SLOT;
        let header = if self.machine.scsi { scsi_header(sent) } else { blk_header(sent) };
        let mut pages = vec![(at, header.clone())];
        if sent.kind == WRITE {
            pages.push((at + 2 * PAGE, content(sent.block, sent.version)));
        }
        // Nothing but the answer clears the status, and nothing but the read brings the data.
        let offset = |address: u64| address - MEMORY;
        let spoilt = if sent.kind == READ { SLOT - PAGE } else { PAGE };
        self.file.write_all_at(&vec![0xee; spoilt as usize], offset(at + PAGE)).expect("our own memory");
        for (address, bytes) in &pages {
            self.file.write_all_at(bytes, offset(*address)).expect("our own memory");
        }
        self.written.extend((0..SLOT / PAGE).map(|page| offset(at) / PAGE + page));
        let piece = |page, len: usize| Piece { addr: at + page * PAGE, len: len as u32 };
        let (header, data) = (piece(0, header.len()), piece(2, BLOCK));
        let answer = piece(1, if self.machine.scsi { 108 } else { 1 });
        let driver = &mut self.queues[queue].driver;
        let added = match (sent.kind, self.machine.scsi) {
            (READ, false) => driver.add(&[header], &[data, answer], slot as u64),
            (READ, true) => driver.add(&[header], &[answer, data], slot as u64),
            (WRITE, _) => driver.add(&[header, data], &[answer], slot as u64),
            _ => driver.add(&[header], &[answer], slot as u64),
        };
        added.expect("there are more descriptors than slots");
        self.queues[queue].slots[slot] = Some(sent);
    }

    /// Waits until something has ended, and looks at it.
    fn reap(&mut self) {
        let all_wait = self.queues.iter_mut().all(|queue| queue.driver.arm_calls());
        if all_wait {
            let mut calls: Vec<_> = self.queues.iter().map(|queue| PollFd::new(&queue.call, PollFlags::IN)).collect();
            let patience = Timespec::try_from(PATIENCE).expect("a short time");
            assert!(poll(&mut calls, Some(&patience)).expect("poll") > 0, "waited {PATIENCE:?} to be called");
            let called: Vec<_> = calls.iter().map(|call| !call.revents().is_empty()).collect();
            for (queue, _) in self.queues.iter().zip(called).filter(|(_, called)| *called) {
                rustix::io::read(&queue.call, &mut [0; 8]).expect("our own eventfd");
            }
        }
        for queue in 0..self.queues.len() {
            while let Some(used) = self.queues[queue].driver.reap().expect("nothing ends twice") {
                let slot = used.token as usize;
                let sent = self.queues[queue].slots[slot].take().expect("it was in flight");
                self.end(queue, slot, sent);
            }
            self.publish(queue);
        }
    }

    fn end(&mut self, queue: usize, slot: usize, sent: Sent) {
        let at = MEMORY + queue as u64 * QUEUE + RING + slot as u64 * SLOT;
        let (mut answer, mut data) = ([0xee; 16], vec![0; BLOCK]);
        assert!(self.memory.read(at + PAGE, &mut answer) && self.memory.read(at + 2 * PAGE, &mut data));
        if self.machine.scsi {
            // A unit that is new to its initiator says so once: UNIT ATTENTION, in the third byte of the sense data.
            if (answer[10], answer[11], answer[14] & 0xf) == (2, 0, 6) {
                return self.send(queue, slot, sent);
            }
        }
        let succeeds = if self.machine.scsi { answer[10..12] == [0, 0] } else { answer[0] == 0 };
        self.errors += u64::from(!succeeds);
        assert!(
            !succeeds || sent.kind != READ || data == content(sent.block, sent.version),
            "block {} as written",
            sent.block
        );
        self.verified += if succeeds && sent.kind == READ { BLOCK as u64 } else { 0 };
        self.done += 1;
    }
}

fn blk_header(Sent { kind, block, version }: Sent) -> Vec<u8> {
    let sector = (block * BLOCK / 512) as u64;
    let header = |sector| u64s(&[kind.into(), sector]);
    match kind {
        // `struct virtio_blk_discard_write_zeroes` follows; its last field is whether they may be unmapped.
        ZEROES => {
            let may_unmap = version.is_multiple_of(8);
            [header(0), u64s(&[sector]), u32s(&[(BLOCK / 512) as u32, may_unmap.into()])].concat()
        }
        _ => header(sector),
    }
}

/// `struct virtio_scsi_req_cmd` with READ (10), WRITE (10), WRITE SAME (16) or SYNCHRONIZE CACHE (10) of target 0, LUN 0.
fn scsi_header(Sent { kind, block, .. }: Sent) -> Vec<u8> {
    let mut header = vec![0; 51];
    header[..4].copy_from_slice(&[1, 0, 0x40, 0]);
    let cdb = &mut header[19..];
    cdb[0] = match kind {
        READ => 0x28,
        WRITE => 0x2a,
        ZEROES => 0x93,
        _ => 0x35,
    };
    let (lba, blocks) = ((block * BLOCK / 512) as u32, (BLOCK / 512) as u16);
    match kind {
        FLUSH => {}
        // With NDOB: no data-out buffer.
        ZEROES => {
            cdb[1] = 1;
            cdb[6..10].copy_from_slice(&lba.to_be_bytes());
            cdb[12..14].copy_from_slice(&blocks.to_be_bytes());
        }
        _ => {
            cdb[2..6].copy_from_slice(&lba.to_be_bytes());
            cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
        }
    }
    header
}

/// Whether a block was filled with zeroes when it was written so often: at first, and every fourth time.
const fn is_zeroes(version: u32) -> bool {
    version.is_multiple_of(4)
}

/// What a block holds when it has been written so often: each word says where in it that is.
pub fn content(block: usize, version: u32) -> Vec<u8> {
    let word = |place| (block as u64) << 41 | place << 32 | u64::from(version);
    if is_zeroes(version) { vec![0; BLOCK] } else { u64s(&(0..BLOCK as u64 / 8).map(word).collect::<Vec<_>>()) }
}
