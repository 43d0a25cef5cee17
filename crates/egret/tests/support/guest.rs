//! A virtqueue in a memfd, driven over hand-written messages: what a guest gone mad can do.
//!
//! The queue's parts and its data lie in two regions, so that a test can pull away either. Guest addresses differ from
//! user addresses on purpose: rings are named by the latter, descriptors hold the former.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};

use super::wire::*;
use super::{PATIENCE, await_that};

/// Entries of the queue.
pub const SIZE: u16 = 16;
/// The length of a memory region.
pub const REGION: u64 = 64 << 10;

/// The guest address at which the data region begins.
pub const DATA: u64 = 0x4000_0000;
/// Where a request's header lies by convention, and after it its data and its status byte.
pub const HEADER_AT: u64 = DATA;
pub const BUFFER_AT: u64 = DATA + 0x1000;
pub const STATUS_AT: u64 = DATA + 0x8000;

/// `VIRTQ_DESC_F_*`.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// The name of all memory that guests share, in `/proc/PID/maps` too.
pub const MEMORY_NAME: &str = "hostile";

const RINGS: u64 = 0x1000_0000;
/// How far user addresses lie above guest addresses.
pub const USER: u64 = 0x7f00_0000_0000;
const AVAIL: u64 = 0x1000;
/// Where the used ring lies in its region.
pub const USED: u64 = 0x2000;

/// Memory that a guest shares.
#[derive(Debug)]
pub struct Share {
    /// Which a test may truncate.
    pub file: File,
    pub guest: u64,
    pub len: u64,
}

impl Share {
    /// `len` bytes at guest address `guest`, allocated when first touched.
    pub fn new(guest: u64, len: u64) -> Self {
        let file = File::from(memfd_create(MEMORY_NAME, MemfdFlags::CLOEXEC).expect("a memfd"));
        file.set_len(len).expect("its length");
        Self { file, guest, len }
    }

    /// The payload of `ADD_MEM_REG` and `REM_MEM_REG`.
    pub fn message(&self) -> Vec<u8> {
        u64s(&[0, self.guest, self.len, self.guest + USER, 0])
    }

    /// The payload of `SET_MEM_TABLE`.
    pub fn table(shares: &[&Self]) -> Vec<u8> {
        let regions = shares.iter().flat_map(|share| u64s(&[share.guest, share.len, share.guest + USER, 0]));
        u32s(&[shares.len() as u32, 0]).into_iter().chain(regions).collect()
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at - self.guest).expect("our own memory");
    }

    pub fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, at - self.guest).expect("our own memory");
        bytes
    }
}

/// A guest with one queue.
pub struct Guest {
    /// The session, for more messages.
    pub wire: Wire,
    /// Descriptors, available and used ring.
    pub rings: Share,
    /// What descriptors point at.
    pub data: Share,
    kick: OwnedFd,
    error: OwnedFd,
    offered: u16,
}

impl Guest {
    /// Connects, shares memory and starts queue 0.
    pub fn boot(socket: &Path) -> Self {
        Self::try_boot(socket).expect("the queue starts")
    }

    /// The same, where the daemon may not like the last word, which starts the queue.
    pub fn try_boot(socket: &Path) -> Option<Self> {
        let mut wire = Wire::agree(socket, F_VERSION_1 | F_INDIRECT_DESC | F_EVENT_IDX);
        let (rings, data) = (Share::new(RINGS, REGION), Share::new(DATA, REGION));
        for region in [&rings, &data] {
            wire.must(ADD_MEM_REG, &region.message(), &[region.file.as_fd()]);
        }
        let [kick, call, error] = [(); 3].map(|()| eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
        wire.must(SET_VRING_NUM, &u32s(&[0, SIZE.into()]), &[]);
        wire.must(SET_VRING_BASE, &u32s(&[0, 0]), &[]);
        wire.must(SET_VRING_ADDR, &ring_addresses(RINGS + USER), &[]);
        wire.must(SET_VRING_ERR, &u64s(&[0]), &[error.as_fd()]);
        wire.must(SET_VRING_CALL, &u64s(&[0]), &[call.as_fd()]);
        wire.must(SET_VRING_KICK, &u64s(&[0]), &[kick.as_fd()]);
        let starts = !wire.refuses(SET_VRING_ENABLE, &u32s(&[0, 1]), &[]);
        starts.then(|| Self { wire, rings, data, kick, error, offered: 0 })
    }

    /// Stops the queue; what was offered has ended when this returns.
    pub fn stop(&mut self) {
        let base = self.wire.ask(GET_VRING_BASE, &u32s(&[0, 0])).expect("its base");
        assert_eq!(base >> 32, u64::from(self.offered));
    }

    /// Starts the queue where it stopped; false if the daemon refuses.
    pub fn try_start(&mut self) -> bool {
        let base = self.offered.into();
        self.wire.must(SET_VRING_BASE, &u32s(&[0, base]), &[]);
        self.try_kick_anew()
    }

    /// Hands over the kick descriptor, also of a queue that runs; false if the daemon refuses.
    pub fn try_kick_anew(&mut self) -> bool {
        !self.wire.refuses(SET_VRING_KICK, &u64s(&[0]), &[self.kick.as_fd()])
    }

    /// Writes descriptor `index` of the table.
    pub fn describe(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.rings.put(RINGS + u64::from(index) * 16, &descriptor(addr, len, flags, next));
    }

    /// Reads the byte at guest address `at` of the data region.
    pub fn data_byte(&self, at: u64) -> u8 {
        let [byte] = self.data.get(at);
        byte
    }

    /// Describes an honest read of `len` bytes of sector 0, in descriptors 0 to 2.
    pub fn describe_read(&self, len: u32) {
        self.describe_read_at(0, len);
    }

    /// [`describe_read`](Self::describe_read), in the three descriptors from `head` on.
    pub fn describe_read_at(&self, head: u16, len: u32) {
        self.data.put(HEADER_AT, &[0; 16]);
        self.data.put(STATUS_AT, &[0xFF]);
        self.describe(head, HEADER_AT, 16, NEXT, head + 1);
        self.describe(head + 1, BUFFER_AT, len, NEXT | WRITE, head + 2);
        self.describe(head + 2, STATUS_AT, 1, WRITE, 0);
    }

    /// Makes the chain at `head` available.
    pub fn offer(&mut self, head: u16) {
        self.rings.put(RINGS + AVAIL + 4 + u64::from(self.offered % SIZE) * 2, &head.to_le_bytes());
        self.offered = self.offered.wrapping_add(1);
        self.publish(self.offered);
    }

    /// Claims that `index` chains have been made available so far, and kicks.
    pub fn publish(&self, index: u16) {
        self.rings.put(RINGS + AVAIL + 2, &index.to_le_bytes());
        self.kick();
    }

    /// Kicks for no reason.
    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("our own eventfd");
    }

    /// Whether the daemon has taken up all that was offered: it asks, before it sleeps, to be kicked for the next.
    pub fn is_taken_up(&self) -> bool {
        let avail_event = USED + 4 + 8 * u64::from(SIZE);
        u16::from_le_bytes(self.rings.get(RINGS + avail_event)) == self.offered
    }

    /// How many chains the daemon has returned.
    pub fn used(&self) -> u16 {
        u16::from_le_bytes(self.rings.get(RINGS + USED + 2))
    }

    /// Reads 4096 bytes honestly, which shows that the queue works.
    pub fn read_honestly(&mut self) {
        let before = self.used();
        self.describe_read(4096);
        self.offer(0);
        await_that("an honest read", || self.used() == before.wrapping_add(1));
        assert_eq!(self.data_byte(STATUS_AT), 0, "the read succeeds");
    }

    /// Waits until the daemon signals the queue's error eventfd.
    pub fn await_queue_error(&self) {
        let patience = Timespec::try_from(PATIENCE).expect("a short time");
        assert!(is_readable(&[self.error.as_fd()], &patience), "the queue's error descriptor is signalled");
    }

    /// Whether the queue is broken or the session is over.
    pub fn is_over(&self) -> bool {
        is_over(&self.error, &self.wire)
    }
}

/// Whether a queue with this error descriptor is broken, or its session is over.
pub fn is_over(error: &OwnedFd, session: &Wire) -> bool {
    is_readable(&[error.as_fd(), session.as_fd()], &Timespec::default())
}

/// Whether any of `fds` becomes readable within `patience`.
fn is_readable(fds: &[BorrowedFd<'_>], patience: &Timespec) -> bool {
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    poll(&mut polled, Some(patience)).expect("poll") > 0
}

/// One descriptor, as it lies in a table.
pub fn descriptor(addr: u64, len: u32, flags: u16, next: u16) -> Vec<u8> {
    [&addr.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
}

/// The payload of `SET_VRING_ADDR` for queue 0 whose parts begin at user address `rings`.
pub fn ring_addresses(rings: u64) -> Vec<u8> {
    u64s(&[0, rings, rings + USED, rings + AVAIL, 0])
}
