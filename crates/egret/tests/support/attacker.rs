//! A virtqueue of any layout and device, driven over hand-written messages: what a guest or a front end gone mad can do.
//!
//! Every chain is one descriptor of the ring that names an indirect table, so that a chain may have a thousand pieces and
//! rings of either layout are written alike. Chains have numbers, which name their header, their status and their table.
//! Unlike [`guest`](super::guest) it drives packed rings and virtio-scsi too, with as much memory as an attack asks for.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use egret_vring::vhost_user::NO_FD;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

use super::await_that;
use super::guest::{INDIRECT, NEXT, Share, USER, WRITE, descriptor, is_over};
use super::wire::*;

/// Entries of the queue, and chains at a time.
pub const SIZE: u16 = 1024;
/// The guest address at which an attacker's data begins.
pub const DATA: u64 = 1 << 40;

/// The guest address of rings, headers and tables.
const CONTROL: u64 = 0x1000_0000;
const AVAILABLE: u64 = 0x8000;
const USED: u64 = 0x1_0000;
const HEADERS: u64 = 0x2_0000;
const STATUSES: u64 = 0x4_0000;
const TABLES: u64 = 0x10_0000;
/// From one header to the next, one status to the next, and one table to the next.
const HEADER: u64 = 64;
const STATUS: u64 = 128;
const TABLE: u64 = 16 * 2048;
const CONTROL_LEN: u64 = TABLES + TABLE * SIZE as u64;

/// `VIRTQ_DESC_F_AVAIL` and `VIRTQ_DESC_F_USED`.
const PACKED_AVAILABLE: u16 = 1 << 7;
const PACKED_USED: u16 = 1 << 15;
const SECTOR: u64 = 512;
/// The status of a chain that has none yet.
const UNTOLD: u8 = 0xFF;
/// As virtio-scsi writes it.
const LUN_0: [u8; 8] = [1, 0, 0x40, 0, 0, 0, 0, 0];

/// What an attacker drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Blk,
    Scsi,
}

/// How an attacker drives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    pub device: Device,
    /// Whether its rings are packed.
    pub packed: bool,
}

impl Variant {
    /// Every device over either layout of rings.
    pub const ALL: [Self; 4] = {
        let [blk, scsi] = [Device::Blk, Device::Scsi];
        [
            Self { device: blk, packed: false },
            Self { device: blk, packed: true },
            Self { device: scsi, packed: false },
            Self { device: scsi, packed: true },
        ]
    };
    /// What every back-end has.
    pub const PLAIN: Self = Self::ALL[0];

    /// The queue that carries requests.
    fn queue(self) -> u32 {
        match self.device {
            Device::Blk => 0,
            Device::Scsi => 2,
        }
    }
}

/// What a chain asks for.
#[derive(Clone, Copy, Debug)]
pub enum Ask {
    Read {
        at: u64,
    },
    Write {
        at: u64,
    },
    /// A write with FUA, which virtio-blk does not have: there it is as any other.
    WriteStable {
        at: u64,
    },
    /// What makes writes stable, those that have ended.
    Flush,
    WriteZeroes {
        at: u64,
        len: u64,
    },
    /// VERIFY (16): with BYTCHK=1 against the chain's data, else of `len` bytes against nothing.
    Verify {
        at: u64,
        len: u64,
        against_data: bool,
    },
    /// What was written there need not be kept: of virtio-blk, which has this as a request.
    Discard {
        at: u64,
        len: u64,
    },
    /// UNMAP, with the chain's data as its parameter list.
    Unmap,
    /// WRITE SAME (16): the chain's data, a logical block, over all of `len` bytes.
    WriteSame {
        at: u64,
        len: u64,
    },
    /// COMPARE AND WRITE: the first half of the chain's data is compared, the second written.
    CompareAndWrite {
        at: u64,
    },
    /// PERSISTENT RESERVE OUT, with the chain's data as its parameter list.
    Reserve {
        action: u8,
        kind: u8,
    },
    /// PERSISTENT RESERVE IN: READ KEYS.
    ReadKeys,
}

impl Ask {
    const fn is_data_out(self) -> bool {
        !matches!(self, Self::Read { .. } | Self::ReadKeys)
    }

    /// The header of a request about `len` bytes of data, on a disk with such logical blocks.
    fn header(self, device: Device, len: u64, block: u64) -> Vec<u8> {
        // A header for LUN 0 with a CDB of ten bytes, which ends in how long the data is.
        let ten = |cdb: [u8; 3]| {
            let [high, low] = (len as u16).to_be_bytes();
            [&LUN_0[..], &[0; 11], &cdb, &[0, 0, 0, 0, high, low], &[0; 23]].concat()
        };
        let (blk, cdb, at, len) = match self {
            Self::Reserve { action, kind } => return ten([0x5f, action, kind]),
            Self::Unmap => return ten([0x42, 0, 0]),
            Self::ReadKeys => return ten([0x5e, 0, 0]),
            Self::Read { at } => (0_u32, [0x88, 0], at, len),
            Self::Write { at } => (1, [0x8a, 0], at, len),
            Self::WriteStable { at } => (1, [0x8a, 1 << 3], at, len),
            // SYNCHRONIZE CACHE (16) of all blocks.
            Self::Flush => (4, [0x91, 0], 0, 0),
            // WRITE SAME (16) without a buffer.
            Self::WriteZeroes { at, len } => (13, [0x93, 1], at, len),
            Self::Discard { at, len } => (11, [u8::MAX; 2], at, len),
            Self::WriteSame { at, len } => (u32::MAX, [0x93, 0], at, len),
            Self::CompareAndWrite { at } => (u32::MAX, [0x89, 0], at, len / 2),
            Self::Verify { at, len, against_data } => (u32::MAX, [0x8f, u8::from(against_data) << 1], at, len),
        };
        let unit = if device == Device::Blk { SECTOR } else { block };
        let (sector, sectors) = (at / unit, (len / unit) as u32);
        if device == Device::Blk {
            let mut header = [&blk.to_le_bytes()[..], &[0; 4]].concat();
            let is_ranged = matches!(self, Self::WriteZeroes { .. } | Self::Discard { .. });
            header.extend(if is_ranged { 0_u64.to_le_bytes() } else { sector.to_le_bytes() });
            if is_ranged {
                header.extend(sector.to_le_bytes());
                header.extend(sectors.to_le_bytes());
                header.extend([0; 4]);
            }
            return header;
        }
        let mut header = [&LUN_0[..], &[0; 11]].concat();
        header.extend(cdb);
        header.extend(sector.to_be_bytes());
        // COMPARE AND WRITE has a byte for it, which is the last of these.
        header.extend(sectors.to_be_bytes());
        header.resize(51, 0);
        header
    }
}

/// The descriptors by which the two sides wake each other.
#[derive(Debug)]
pub struct Signals {
    /// Without one the device is to look for itself.
    pub kick: Option<OwnedFd>,
    pub call: OwnedFd,
    pub error: OwnedFd,
}

impl Signals {
    pub fn new() -> Self {
        Self { kick: Some(new_eventfd()), call: new_eventfd(), error: new_eventfd() }
    }
}

/// An eventfd; blocking, as a hostile peer likes it.
pub fn new_eventfd() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")
}

/// Fills an eventfd's counter and clears O_NONBLOCK, so that a write to it blocks.
pub fn stuff(eventfd: &OwnedFd) {
    let flags = fcntl_getfl(eventfd).expect("our own eventfd");
    fcntl_setfl(eventfd, flags | OFlags::NONBLOCK).expect("our own eventfd");
    loop {
        // The other side may add to it in between.
        let _ = rustix::io::read(eventfd, &mut [0; 8]);
        let _ = rustix::io::write(eventfd, &(u64::MAX - 1).to_ne_bytes());
        match rustix::io::write(eventfd, &1_u64.to_ne_bytes()) {
            Err(Errno::AGAIN) => break,
            other => drop(other.expect("our own eventfd")),
        }
    }
    make_block(eventfd);
}

/// Clears O_NONBLOCK for all holders of a descriptor: the flag belongs to the open file description.
pub fn make_block(eventfd: &OwnedFd) {
    let flags = fcntl_getfl(eventfd).expect("our own eventfd");
    fcntl_setfl(eventfd, flags & !OFlags::NONBLOCK).expect("our own eventfd");
}

/// A client, and one queue of its device.
pub struct Attacker {
    /// The session, for more messages.
    pub wire: Wire,
    pub signals: Signals,
    /// What it shares beside its rings.
    pub data: Vec<Share>,
    /// The logical block of the disk, in bytes.
    pub block: u64,
    control: Share,
    variant: Variant,
    features: u64,
    /// The descriptors of the ring, by place: an address, a length and flags.
    ring: Vec<(u64, u32, u16)>,
    /// Chains made so far, and those of them that were published.
    made: u64,
    published: u64,
    /// Chains that were seen used in a packed ring.
    seen: u64,
    /// The flags of a packed batch's first descriptor, which go last.
    first_flags: Option<(u64, u16)>,
}

impl Attacker {
    /// Connects, shares `len` bytes of data and starts the queue.
    pub fn boot(socket: &Path, variant: Variant, len: u64) -> Self {
        Self::boot_with(socket, variant, vec![Share::new(DATA, len)], Signals::new())
    }

    /// [`boot`](Self::boot), with that memory and those descriptors.
    pub fn boot_with(socket: &Path, variant: Variant, data: Vec<Share>, signals: Signals) -> Self {
        Self::start(socket, variant, 0, data, signals)
    }

    /// [`boot`](Self::boot), as a driver that knows of flushes: virtio-blk writes through for any other (virtio 1.3,
    /// 5.2.6.2).
    pub fn boot_flushing(socket: &Path, variant: Variant, len: u64) -> Self {
        let flush = if variant.device == Device::Blk { F_BLK_FLUSH } else { 0 };
        Self::start(socket, variant, flush, vec![Share::new(DATA, len)], Signals::new())
    }

    fn start(socket: &Path, variant: Variant, more: u64, data: Vec<Share>, signals: Signals) -> Self {
        let packed = if variant.packed { F_RING_PACKED } else { 0 };
        let features = F_VERSION_1 | F_INDIRECT_DESC | packed | more;
        let wire = Wire::agree(socket, features);
        let control = Share::new(CONTROL, CONTROL_LEN);
        let (ring, made, published, seen) = (vec![(0, 0, 0); SIZE.into()], 0, 0, 0);
        let mut new = Self {
            wire,
            signals,
            data,
            block: SECTOR,
            control,
            variant,
            features,
            ring,
            made,
            published,
            seen,
            first_flags: None,
        };
        new.start_queue();
        new
    }

    fn start_queue(&mut self) {
        let addresses = self.addresses(0);
        let Self { wire, signals, data, control, variant, .. } = self;
        let queue = variant.queue();
        for share in data.iter().chain([&*control]) {
            wire.must(ADD_MEM_REG, &share.message(), &[share.file.as_fd()]);
        }
        let base = if variant.packed { 0x8000_8000 } else { 0 };
        let which = u64s(&[queue.into()]);
        wire.must(SET_VRING_NUM, &u32s(&[queue, SIZE.into()]), &[]);
        wire.must(SET_VRING_BASE, &u32s(&[queue, base]), &[]);
        wire.must(SET_VRING_ADDR, &addresses, &[]);
        wire.must(SET_VRING_ERR, &which, &[signals.error.as_fd()]);
        wire.must(SET_VRING_CALL, &which, &[signals.call.as_fd()]);
        match &signals.kick {
            Some(kick) => wire.must(SET_VRING_KICK, &which, &[kick.as_fd()]),
            None => wire.must(SET_VRING_KICK, &u64s(&[u64::from(queue) | NO_FD]), &[]),
        }
        wire.must(SET_VRING_ENABLE, &u32s(&[queue, 1]), &[]);
    }

    /// The features that it has agreed on.
    pub fn features(&self) -> u64 {
        self.features | F_PROTOCOL_FEATURES
    }

    /// The payload of `SET_VRING_ADDR`. By the same address as the guest has it the used ring is logged, if it is.
    pub fn addresses(&self, flags: u32) -> Vec<u8> {
        let at = CONTROL + USER;
        let places = [at, at + USED, at + AVAILABLE, CONTROL + USED];
        [u32s(&[self.variant.queue(), flags]), u64s(&places)].concat()
    }

    /// The payload of messages that name the queue and nothing else.
    pub fn which(&self) -> Vec<u8> {
        u64s(&[self.variant.queue().into()])
    }

    /// Makes a chain that asks for something with these buffers, as addresses and lengths. The device sees it after
    /// [`publish`](Self::publish).
    pub fn ask(&mut self, ask: Ask, buffers: &[(u64, u32)]) {
        let len = buffers.iter().map(|&(_, len)| u64::from(len)).sum();
        let number = self.made % u64::from(SIZE);
        let header = ask.header(self.variant.device, len, self.block);
        let (header_at, status_at) = (CONTROL + HEADERS + HEADER * number, CONTROL + STATUSES + STATUS * number);
        self.control.put(header_at, &header);
        self.control.put(status_at, &[UNTOLD; 12]);
        let status_len = if self.variant.device == Device::Blk { 1 } else { 108 };
        let data = buffers.iter().map(|&(at, len)| (at, len, !ask.is_data_out()));
        let (first, status) = ((header_at, header.len() as u32, false), (status_at, status_len, true));
        let mut pieces = vec![first];
        // A response comes before what is read, in virtio-scsi; a status after it, in virtio-blk.
        match (self.variant.device, ask.is_data_out()) {
            (Device::Scsi, false) => pieces.extend([status].into_iter().chain(data)),
            _ => pieces.extend(data.chain([status])),
        }
        self.chain(&pieces);
    }

    /// Makes a chain of these pieces: addresses, lengths, and whether the device may write.
    pub fn chain(&mut self, pieces: &[(u64, u32, bool)]) {
        let last = pieces.len() - 1;
        let table = pieces.iter().enumerate().flat_map(|(at, &(addr, len, is_writable))| {
            let next = if at == last { 0 } else { NEXT };
            let write = if is_writable { WRITE } else { 0 };
            self.descriptor(addr, len, next | write, if at == last { 0 } else { at as u16 + 1 })
        });
        let table: Vec<u8> = table.collect();
        let at = CONTROL + TABLES + TABLE * (self.made % u64::from(SIZE));
        assert!(table.len() as u64 <= TABLE, "a table has its place");
        self.control.put(at, &table);
        self.make_available(at, table.len() as u32, INDIRECT);
    }

    /// Makes the last chains once more, as many as the ring has room for. Their tables are still there, so this takes
    /// little time where the device needs long for each.
    pub fn make_all_again(&mut self) {
        assert!(self.made >= SIZE.into() && self.is_served(), "each place has a chain, and none is in use");
        for _ in 0..SIZE {
            let (addr, len, flags) = self.ring[(self.made % u64::from(SIZE)) as usize];
            self.make_available(addr, len, flags);
        }
    }

    /// Makes a chain that breaks the rules: one that loops, in a split ring; in a packed one, where none can, one whose
    /// table ends in half a descriptor.
    pub fn chain_that_breaks(&mut self) {
        if self.variant.packed {
            self.make_available(CONTROL + TABLES, 24, INDIRECT);
        } else {
            self.make_available(DATA, 512, NEXT | WRITE);
        }
    }

    fn make_available(&mut self, addr: u64, len: u32, flags: u16) {
        let place = self.made % u64::from(SIZE);
        let desc = CONTROL + 16 * place;
        self.ring[place as usize] = (addr, len, flags);
        if self.variant.packed {
            let is_odd_lap = (self.made / u64::from(SIZE)).is_multiple_of(2);
            let flags = flags | if is_odd_lap { PACKED_AVAILABLE } else { PACKED_USED };
            // All but the flags, and those too unless the device would see the batch's beginning.
            let bytes = self.descriptor(addr, len, flags, place as u16);
            if self.made == self.published {
                self.control.put(desc, &bytes[..14]);
                self.first_flags = Some((desc + 14, flags));
            } else {
                self.control.put(desc, &bytes);
            }
        } else {
            // A descriptor that follows itself, if it has a next one at all.
            self.control.put(desc, &descriptor(addr, len, flags, place as u16));
            self.control.put(CONTROL + AVAILABLE + 4 + 2 * place, &(place as u16).to_le_bytes());
        }
        self.made += 1;
    }

    fn descriptor(&self, addr: u64, len: u32, flags: u16, last: u16) -> Vec<u8> {
        match self.variant.packed {
            false => descriptor(addr, len, flags, last),
            // The buffer's ID, and then flags.
            true => descriptor(addr, len, last, flags),
        }
    }

    /// Shows the device what was made, and kicks.
    pub fn publish(&mut self) {
        if let Some((at, flags)) = self.first_flags.take() {
            self.control.put(at, &flags.to_le_bytes());
        } else if !self.variant.packed {
            self.control.put(CONTROL + AVAILABLE + 2, &(self.made as u16).to_le_bytes());
        }
        self.published = self.made;
        self.kick();
    }

    /// Kicks for no reason.
    pub fn kick(&self) {
        if let Some(kick) = &self.signals.kick {
            rustix::io::write(kick, &1_u64.to_ne_bytes()).expect("our own eventfd");
        }
    }

    /// How many chains the device has returned.
    pub fn used(&mut self) -> u64 {
        if !self.variant.packed {
            let index = u16::from_le_bytes(self.control.get(CONTROL + USED + 2));
            // It is at most a queue's size behind what was published.
            let behind = (self.published as u16).wrapping_sub(index);
            return self.published - u64::from(behind);
        }
        while self.seen < self.published {
            let flags = u16::from_le_bytes(self.control.get(CONTROL + 16 * (self.seen % u64::from(SIZE)) + 14));
            let both = PACKED_AVAILABLE | PACKED_USED;
            let is_odd_lap = (self.seen / u64::from(SIZE)).is_multiple_of(2);
            if flags & both != if is_odd_lap { both } else { 0 } {
                break;
            }
            self.seen += 1;
        }
        self.seen
    }

    /// Whether all that was published is used.
    pub fn is_served(&mut self) -> bool {
        self.used() == self.published
    }

    /// Waits until all that was published is used.
    pub fn await_all(&mut self) {
        await_that("all chains to be used", || self.is_served());
    }

    /// [`await_all`](Self::await_all); when each chain from this number on had ended at the latest.
    pub fn await_each(&mut self, first: u64) -> Vec<Instant> {
        let mut ended = vec![None; (self.made - first) as usize];
        await_that("all chains to be used", || {
            for (number, ended) in (first..).zip(&mut ended).filter(|(_, ended)| ended.is_none()) {
                *ended = self.has_status(number).then(Instant::now);
            }
            self.is_served()
        });
        ended.into_iter().map(|ended| ended.unwrap_or_else(Instant::now)).collect()
    }

    /// Whether the device has given a chain its status.
    pub fn has_status(&self, number: u64) -> bool {
        self.status_of(number) != UNTOLD
    }

    /// The status of the last chain: zero is success.
    pub fn status(&self) -> u8 {
        self.status_of(self.made - 1)
    }

    /// How many chains were made so far, which is the number of the next.
    pub const fn made(&self) -> u64 {
        self.made
    }

    /// The status of a chain by its number: zero is success.
    pub fn status_of(&self, number: u64) -> u8 {
        let at = CONTROL + STATUSES + STATUS * (number % u64::from(SIZE));
        match self.variant.device {
            Device::Blk => self.control.get::<1>(at)[0],
            // The command's status, and the transport's.
            Device::Scsi => self.control.get::<2>(at + 10).into_iter().fold(0, |all, status| all | status),
        }
    }

    /// Reads a block honestly, which shows that the queue works.
    pub fn read_honestly(&mut self) {
        let times = match self.variant.device {
            Device::Blk => 1,
            // A new initiator is told first that the unit was powered on.
            Device::Scsi => 2,
        };
        for _ in 0..times {
            self.ask(Ask::Read { at: 0 }, &[(DATA, self.block as u32)]);
            self.publish();
            self.await_all();
        }
        assert_eq!(self.status(), 0, "an honest read succeeds");
    }

    /// Whether the queue is broken or the session is over.
    pub fn is_over(&self) -> bool {
        is_over(&self.signals.error, &self.wire)
    }

    /// Waits until the queue is broken or the session is over.
    pub fn await_end(&self) {
        await_that("the queue or the session to end", || self.is_over());
    }

    /// Waits until each chain is used, or the queue or the session is over.
    pub fn await_all_or_end(&mut self) {
        await_that("all chains or the queue to end", || self.is_served() || self.is_over());
    }
}
