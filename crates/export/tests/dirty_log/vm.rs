//! A virtual machine that is migrated: its memory, of which every byte can be looked at, its rings, and its dirty log.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use egret_vring::memory::{GuestMemory, LOG_PAGE, Region};
use egret_vring::ring::{Driver, DriverConfig, PACKED_BASE, Piece, QueueConfig};
use egret_vring::vhost_user::{F_LOG_ALL, VRING_LOG};
use rustix::event::{EventfdFlags, eventfd};

use crate::peer::*;

/// Where the rings are, each in a place of its own.
const RINGS: u64 = 0x10_0000;
const RING_BYTES: u64 = 0x1_0000;
/// Where the buffers are: above 4 GiB, as in a guest that has that much memory.
pub const DATA: u64 = 0x1_0000_0000;
pub const DATA_BYTES: u64 = 0x8_0000;
/// Where the front-end has what the guest has at 0.
const USER: u64 = 0x7f00_0000_0000;
/// What the log is for.
const END: u64 = DATA + DATA_BYTES;
const EVENT_IDX: u64 = 1 << 29;

/// Numbers without end, the same for each seed.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % end
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.below(256) as u8).collect()
    }
}

/// What the rings are like.
#[derive(Clone, Copy, Debug)]
pub struct Rings {
    pub packed: bool,
    pub event_idx: bool,
    pub size: u16,
}

impl Rings {
    /// Every layout, in one page and in several.
    pub fn all() -> impl Iterator<Item = Self> {
        let both = [false, true];
        let layouts = both.into_iter().flat_map(move |packed| both.map(|event_idx| (packed, event_idx)));
        layouts.flat_map(|(packed, event_idx)| [16, 1024].map(|size| Self { packed, event_idx, size }))
    }
}

pub struct Ring {
    pub driver: Driver,
    kick: OwnedFd,
    call: OwnedFd,
}

impl Ring {
    /// Shows the device what was added, and does not ask to be called.
    pub fn publish(&mut self) {
        if self.driver.publish() {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
    }
}

/// How long a log of all memory is.
pub const LOG_BYTES: u64 = END.div_ceil(8 * LOG_PAGE);

fn new_log() -> (File, u64) {
    (Region::anonymous(0, LOG_BYTES).unwrap().file, LOG_BYTES)
}

/// What is in a log.
pub fn read_log(log: &File) -> BTreeSet<u64> {
    let mut bytes = vec![0; log.metadata().unwrap().len() as usize];
    log.read_exact_at(&mut bytes, 0).unwrap();
    let set = bytes.iter().enumerate().filter(|(_, byte)| **byte != 0);
    set.flat_map(|(at, byte)| (0..8).filter(move |bit| byte >> bit & 1 != 0).map(move |bit| 8 * at as u64 + bit))
        .collect()
}

pub fn pages(range: Range<u64>) -> BTreeSet<u64> {
    (range.start / LOG_PAGE..range.end.div_ceil(LOG_PAGE)).collect()
}

/// Hands memory over, all at once: where the guest has it, and its size.
pub fn share(peer: &Peer, files: &[&(u64, u64, File)]) {
    let rows = files.iter().flat_map(|(at, size, _)| longs(&[*at, *size, USER + at, 0]));
    let table = words(&[files.len() as u32, 0]).into_iter().chain(rows).collect::<Vec<_>>();
    let fds: Vec<_> = files.iter().map(|(_, _, file)| file.as_fd()).collect();
    peer.say(SET_MEM_TABLE, 0, &table, &fds);
}

pub struct Vm {
    pub peer: Peer,
    pub memory: Arc<GuestMemory>,
    pub files: [(u64, u64, File); 2],
    features: u64,
    configs: Vec<QueueConfig>,
    /// Empty while a load has them.
    pub rings: Vec<Ring>,
    pub log: File,
}

impl Vm {
    pub fn boot(stream: UnixStream, shape: Rings) -> Self {
        Self::boot_recorded(stream, shape, None)
    }

    /// One with a record of what is in flight.
    pub fn boot_recorded(stream: UnixStream, shape: Rings, record: Option<&Region>) -> Self {
        let mut peer = Peer(stream);
        let mut features = peer.ask_u64(GET_FEATURES) & !F_LOG_ALL;
        if !shape.packed {
            features &= !RING_PACKED;
        }
        if !shape.event_idx {
            features &= !EVENT_IDX;
        }
        peer.say(SET_FEATURES, 0, &features.to_ne_bytes(), &[]);
        let protocol = peer.ask_u64(GET_PROTOCOL_FEATURES);
        peer.say(SET_PROTOCOL_FEATURES, 0, &protocol.to_ne_bytes(), &[]);
        let queues = peer.ask_u64(GET_QUEUE_NUM);
        if let Some(Region { size, file, .. }) = record {
            let message = longs(&[*size, 0, u64::from(shape.size) << 16 | queues]);
            peer.say(SET_INFLIGHT_FD, 0, &message, &[file.as_fd()]);
        }
        let region = |at, size| {
            let region = Region::anonymous(at, size).unwrap();
            let file = region.file.try_clone().unwrap();
            (region, (at, size, file))
        };
        let (low, low_file) = region(RINGS, queues * RING_BYTES);
        let (high, high_file) = region(DATA, DATA_BYTES);
        share(&peer, &[&low_file, &high_file]);
        let memory = Arc::new(GuestMemory::empty().with(low).unwrap().with(high).unwrap());
        let base = if shape.packed { PACKED_BASE as u16 } else { 0 };
        let Rings { packed, event_idx, size } = shape;
        let config = DriverConfig { size, packed, event_idx, indirect: None, base };
        let rings = (0..queues).map(|index| {
            let driver = Driver::new(&memory, RINGS + index * RING_BYTES, config).unwrap();
            let fd = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
            Ring { driver, kick: fd(), call: fd() }
        });
        let rings: Vec<Ring> = rings.collect();
        let configs = rings.iter().map(|ring| ring.driver.queue()).collect();
        let files = [low_file, high_file];
        let mut vm = Self { peer, memory, files, features, configs, rings, log: new_log().0 };
        for index in 0..queues as u32 {
            let queue = vm.queue(index);
            vm.peer.say(SET_VRING_NUM, 0, &words(&[index, queue.size.into()]), &[]);
            vm.peer.say(SET_VRING_BASE, 0, &words(&[index, queue.base]), &[]);
            vm.address(index, None);
            let name = longs(&[index.into()]);
            vm.peer.say(SET_VRING_CALL, 0, &name, &[vm.rings[index as usize].call.as_fd()]);
            vm.peer.say(SET_VRING_KICK, 0, &name, &[vm.rings[index as usize].kick.as_fd()]);
            assert_eq!(vm.peer.order(SET_VRING_ENABLE, &words(&[index, 1])), Some(0));
        }
        vm
    }

    pub fn queues(&self) -> u32 {
        self.configs.len() as u32
    }

    fn queue(&self, index: u32) -> QueueConfig {
        self.configs[index as usize]
    }

    /// Stops all rings.
    pub fn stop(&mut self) {
        for index in 0..self.queues() {
            assert!(self.peer.ask(GET_VRING_BASE, &words(&[index, 0])).is_some());
        }
    }

    /// Sets a ring's addresses, and by which its used ring is logged.
    pub fn address(&mut self, index: u32, log: Option<u64>) {
        let QueueConfig { desc, avail, used, .. } = self.queue(index);
        let flags = if log.is_some() { VRING_LOG } else { 0 };
        let log = log.unwrap_or(0);
        let body = [words(&[index, flags]), longs(&[USER + desc, USER + used, USER + avail, log])].concat();
        assert_eq!(self.peer.order(SET_VRING_ADDR, &body), Some(0));
    }

    /// Hands another log over, and returns the one before.
    pub fn set_log(&mut self) -> File {
        let (log, size) = new_log();
        self.peer.say(SET_LOG_BASE, 0, &longs(&[size, 0]), &[log.as_fd()]);
        assert_eq!(self.peer.hear(), Some(longs(&[size, 0])));
        std::mem::replace(&mut self.log, log)
    }

    /// Begins to log, in a log of so many bytes. The last answer, unless the session has ended.
    pub fn hand_over_log(&mut self, size: u64) -> Option<Vec<u8>> {
        self.set_features(self.features | F_LOG_ALL);
        let log = Region::anonymous(0, size).unwrap().file;
        self.peer.say(SET_LOG_BASE, 0, &longs(&[size, 0]), &[log.as_fd()]);
        self.peer.hear()
    }

    /// Begins to log, with a ring that is logged at this address. The last answer, unless the session has ended or refuses.
    pub fn logs_ring_at(&mut self, log: u64) -> Option<u64> {
        self.start_logging();
        let QueueConfig { desc, avail, used, .. } = self.queue(0);
        let body = [words(&[0, VRING_LOG]), longs(&[USER + desc, USER + used, USER + avail, log])].concat();
        self.peer.order(SET_VRING_ADDR, &body).filter(|answer| *answer == 0)
    }

    /// Forgets what is in the log.
    pub fn clear_log(&self) {
        let len = self.log.metadata().unwrap().len() as usize;
        self.log.write_all_at(&vec![0; len], 0).unwrap();
    }

    fn set_features(&mut self, features: u64) {
        assert_eq!(self.peer.order(SET_FEATURES, &features.to_ne_bytes()), Some(0));
    }

    /// Begins to log, in QEMU's order.
    pub fn start_logging(&mut self) {
        self.set_log();
        self.set_features(self.features | F_LOG_ALL);
        (0..self.queues()).for_each(|index| self.address(index, Some(self.queue(index).used)));
    }

    pub fn stop_logging(&mut self) {
        self.set_features(self.features);
        (0..self.queues()).for_each(|index| self.address(index, None));
    }

    /// Has a ring that was stopped go on.
    pub fn start_again(&mut self, index: u32) {
        let name = longs(&[index.into()]);
        self.peer.say(SET_VRING_KICK, NEED_REPLY, &name, &[self.rings[index as usize].kick.as_fd()]);
        assert_eq!(self.peer.hear(), Some(longs(&[0])));
    }

    /// Waits until each queue's loop has come past what it was at.
    pub fn sync(&mut self) {
        for index in 0..self.queues() {
            let name = longs(&[index.into()]);
            self.peer.say(SET_VRING_CALL, NEED_REPLY, &name, &[self.rings[index as usize].call.as_fd()]);
            assert_eq!(self.peer.hear(), Some(longs(&[0])));
        }
    }

    /// What is in each page.
    pub fn pages(&self) -> BTreeMap<u64, Vec<u8>> {
        let mut pages = BTreeMap::new();
        for (at, size, file) in &self.files {
            let mut bytes = vec![0; *size as usize];
            file.read_exact_at(&mut bytes, 0).unwrap();
            let numbered = (at / LOG_PAGE..).zip(bytes.chunks(LOG_PAGE as usize).map(<[u8]>::to_vec));
            pages.extend(numbered);
        }
        // What the driver itself stores to show its chains.
        for QueueConfig { avail, packed, .. } in &self.configs {
            if !packed {
                let index = (avail + 2) % LOG_PAGE;
                pages.get_mut(&(avail / LOG_PAGE)).unwrap()[index as usize..][..2].fill(0);
            }
        }
        pages
    }

    /// The pages that devices write of a ring.
    pub fn ring_pages(&self, index: u32) -> BTreeSet<u64> {
        let QueueConfig { size, desc, used, packed, .. } = self.queue(index);
        let size = u64::from(size);
        match packed {
            false => pages(used..used + 6 + 8 * size),
            true => &pages(desc..desc + 16 * size) | &pages(used..used + 4),
        }
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        assert!(self.memory.write(at, bytes));
    }

    /// Adds a chain that the device does not see yet.
    pub fn add(&mut self, queue: u32, readable: &[Piece], writable: &[Piece]) {
        self.rings[queue as usize].driver.add(readable, writable, 0).unwrap();
    }

    /// Shows the device what was added, everywhere.
    pub fn publish(&mut self) {
        self.rings.iter_mut().for_each(Ring::publish);
    }

    /// Waits for so many used chains of a queue, without a word to the device.
    pub fn reap(&mut self, queue: u32, count: usize) {
        for _ in 0..count {
            while self.rings[queue as usize].driver.reap().unwrap().is_none() {
                std::thread::yield_now();
            }
        }
    }
}
