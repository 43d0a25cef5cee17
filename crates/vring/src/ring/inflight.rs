//! The in-flight record: what a device had popped and not used when it went away.
//!
//! The record is memory that the front-end keeps and hands to the next device on the same rings. Its layout and the
//! order of its stores are those of vhost-user, "Inflight I/O tracking". Each queue has a part, which begins alike for
//! either layout of rings; [`split`] and [`packed`] tell the rest, and what is stored when.
//!
//! The stores are volatile, and so stay in their order; there is nobody to see them but who comes after a process that
//! is dead, and then all of its stores have arrived.
//!
//! Behind the queues' parts a device of ours has two words of its own: what its driver has chosen, which no front-end tells
//! the next device, and which device noted it. Another's record ends before them.
//!
//! Whoever has the record's file can write to it. What it says is checked when a queue starts; later it is only
//! written, and read no further than to find where to write, inside the record.

pub(super) mod packed;
pub(super) mod split;

use std::marker::PhantomData;
use std::os::fd::AsFd;
use std::sync::Arc;

use thiserror::Error;

use crate::memory::{GuestMemory, MemoryError, Region};

const VERSION: u16 = 1;

/// Each queue's part begins on a cache line, as with libvhost-user and DPDK.
const LINE: u64 = 64;
/// What the first word behind them begins with, and nothing that is there by chance; the last byte says what it is about.
const CHOICES: u64 = u64::from_be_bytes(*b"egretwc\0");
/// Where the words behind them are, in bytes.
const CHOSEN: u64 = 0;
const KEEPER: u64 = 8;

/// Why a record cannot be used.
#[derive(Debug, Error)]
pub enum InflightError {
    /// It is too short for what it is said to be.
    #[error("{size} bytes of it; {} queues of {} descriptors take {needed}", config.queues, config.queue_size)]
    Short {
        /// Its length in bytes.
        size: u64,
        /// What it is for.
        config: InflightConfig,
        /// What this needs, in bytes.
        needed: u64,
    },
    /// Where it begins in its file.
    #[error("its offset {0} is no multiple of 8")]
    Offset(u64),
    /// It cannot be mapped.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// What is wrong with one queue's part of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RecordError {
    /// Not of the one kind that there is.
    #[error("version {version} with features {features:#x}; version 1 has none")]
    Unknown {
        /// Its version.
        version: u16,
        /// Its features.
        features: u64,
    },
    /// It says another length of itself than the one who handed it over.
    #[error("{desc_num} descriptors; it was handed over as one of {size}")]
    Length {
        /// What it says.
        desc_num: u16,
        /// What was said of it.
        size: u16,
    },
    /// The ring has more descriptors.
    #[error("{size} descriptors for a ring of {ring}")]
    TooSmall {
        /// The record's.
        size: u16,
        /// The ring's.
        ring: u16,
    },
    /// The used index has run ahead by more than a batch can be.
    #[error("used index {recorded} where the ring's is {used}; at most {ring} can be between them")]
    Batch {
        /// The record's used index.
        recorded: u16,
        /// The ring's.
        used: u16,
        /// The ring's size.
        ring: u16,
    },
    /// A chain that begins beyond the ring's descriptors.
    #[error("descriptor chain {head} of a ring of {ring}")]
    NoSuchHead {
        /// Its first descriptor.
        head: u16,
        /// The ring's size.
        ring: u16,
    },
    /// It is of split rings and the ring is packed, or the other way round.
    #[error("rings of the other layout")]
    Layout,
    /// A packed ring has no such descriptor to go on at.
    #[error("used index {slot} of a ring of {ring}")]
    NoSuchSlot {
        /// The used index.
        slot: u16,
        /// The ring's size.
        ring: u16,
    },
    /// The free entries and those of the chains in flight are not all the entries there are, each of them once.
    #[error("{0} descriptors whose lists do not have each of them once")]
    Lists(u16),
    /// A packed ring's chains in flight have more descriptors than the ring.
    #[error("more descriptors in flight than a ring of {0} has")]
    TooMuch(u16),
}

/// What a record is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightConfig {
    /// How many queues it is for.
    pub queues: u16,
    /// How many descriptors each has, at most.
    pub queue_size: u16,
    /// Whether `VIRTIO_F_RING_PACKED` was negotiated.
    pub packed: bool,
}

impl InflightConfig {
    /// How long the record is, in bytes. One that was never used is all zeroes.
    pub const fn bytes(self) -> u64 {
        self.bytes_of_queues() + LINE
    }

    const fn bytes_of_queues(self) -> u64 {
        self.queues as u64 * self.queue_bytes()
    }

    const fn queue_bytes(self) -> u64 {
        (self.stride() * (1 + self.queue_size as u64)).next_multiple_of(LINE)
    }

    /// How long a queue's header is, and each of the states behind it.
    const fn stride(self) -> u64 {
        if self.packed { packed::STRIDE } else { split::STRIDE }
    }
}

/// The records of a device's queues, as its front-end hands them over.
#[derive(Clone, Debug)]
pub struct Inflight {
    /// A map with nothing in it but the record, from address 0 on: it is the front-end's memory as much as a guest's is.
    memory: Arc<GuestMemory>,
    config: InflightConfig,
    has_choices: bool,
}

impl Inflight {
    /// Takes the record in that begins at `offset` in `file`, which must be shared memory, and has `size` bytes.
    ///
    /// No budget has to have room for it: a client has one record at a time, of no more than its queues need.
    ///
    /// # Errors
    ///
    /// It is too short, oddly placed, or cannot be mapped.
    pub fn map(file: impl AsFd, offset: u64, size: u64, config: InflightConfig) -> Result<Self, InflightError> {
        let needed = config.bytes_of_queues();
        if size < needed {
            return Err(InflightError::Short { size, config, needed });
        }
        if !offset.is_multiple_of(8) {
            return Err(InflightError::Offset(offset));
        }
        let size = size.min(config.bytes());
        let has_choices = size == config.bytes();
        let region = Region { guest_addr: 0, size, user_addr: 0, file, offset };
        Ok(Self { memory: Arc::new(GuestMemory::empty().with(region)?), config, has_choices })
    }

    /// Whether it is of packed rings.
    pub fn is_packed(&self) -> bool {
        self.config.packed
    }

    /// What the driver had chosen, as the device noted it that kept the record before.
    pub fn choices(&self) -> Option<u8> {
        let word = self.get_word(CHOSEN)?;
        (word & !0xff == CHOICES).then_some(word as u8)
    }

    /// Notes what the driver has chosen.
    pub fn set_choices(&self, choices: u8) {
        self.set_word(CHOSEN, CHOICES | u64::from(choices));
    }

    /// Which device noted the choices, by the name that it gave itself.
    pub fn keeper(&self) -> Option<u64> {
        self.get_word(KEEPER)
    }

    /// Says which device notes choices from here on.
    pub fn set_keeper(&self, name: u64) {
        self.set_word(KEEPER, name);
    }

    fn get_word(&self, at: u64) -> Option<u64> {
        // SAFETY: there is a word.
        self.word(at).map(|word| unsafe { word.read_volatile() })
    }

    fn set_word(&self, at: u64, value: u64) {
        if let Some(word) = self.word(at) {
            // SAFETY: there is a word.
            unsafe { word.write_volatile(value) }
        }
    }

    /// Where a word behind the queues' parts is: mapped as long as `memory` is, and aligned as the record is, to 8.
    fn word(&self, at: u64) -> Option<*mut u64> {
        let at = self.config.bytes_of_queues() + at;
        let piece = self.has_choices.then(|| self.memory.slice(at, 8))??;
        Some(piece.base().cast())
    }

    /// The part of the queue `index`, if there is one.
    pub fn queue(&self, index: u16) -> Option<Record> {
        let InflightConfig { queues, queue_size, packed } = self.config;
        let len = self.config.queue_bytes();
        let part = (index < queues).then(|| self.memory.slice(u64::from(index) * len, len as usize))??;
        Some(Record { base: part.base(), memory: Arc::clone(&self.memory), size: queue_size, packed })
    }
}

/// One queue's part of a record, for its queue to keep up to date.
///
/// Invariant: `base` is aligned to 8, and a header and `size` states of the layout's are mapped there as long as `memory`
/// is.
#[derive(Debug)]
pub struct Record {
    base: *mut u8,
    memory: Arc<GuestMemory>,
    size: u16,
    packed: bool,
}

// SAFETY: `base` points into a mapping that `memory` keeps, which is good from any thread.
unsafe impl Send for Record {}

/// A field of a header or a state, as its offset there, to which it is aligned.
struct Field<T>(usize, PhantomData<T>);

impl<T> Field<T> {
    const fn at(offset: usize) -> Self {
        assert!(offset.is_multiple_of(size_of::<T>()));
        Self(offset, PhantomData)
    }
}

/// Where a header or a state begins.
#[derive(Clone, Copy)]
struct Place(*mut u8);

/// What the headers of either layout begin with.
mod header {
    use super::Field;

    pub(super) const FEATURES: Field<u64> = Field::at(0);
    pub(super) const VERSION: Field<u16> = Field::at(8);
    pub(super) const DESC_NUM: Field<u16> = Field::at(10);
}

/// What is where it is in the states of either layout.
mod state {
    use super::Field;

    pub(super) const INFLIGHT: Field<u8> = Field::at(0);
    pub(super) const COUNTER: Field<u64> = Field::at(8);
}

impl Record {
    /// Whether no queue has used it yet.
    pub fn is_new(&self) -> bool {
        self.get(self.header(), header::VERSION) == 0
    }

    /// Whether it has chains in flight, as far as that can be told without their ring.
    pub fn is_busy(&self) -> bool {
        (0..self.size).any(|entry| self.is_in_flight(entry))
    }

    /// Whether the peer took the record's memory away.
    #[inline]
    fn is_truncated(&self) -> bool {
        self.memory.is_truncated()
    }

    /// Whether a queue has used it; `begin_anew` otherwise makes a record of it for a ring of `ring` descriptors.
    fn take_in(&mut self, packed: bool, ring: u16, begin_anew: impl FnOnce(&mut Self)) -> Result<bool, RecordError> {
        let size = self.size;
        if self.packed != packed {
            return Err(RecordError::Layout);
        }
        if size < ring {
            return Err(RecordError::TooSmall { size, ring });
        }
        let header = self.header();
        match (self.get(header, header::VERSION), self.get(header, header::FEATURES)) {
            (0, _) => {
                self.set(header, header::FEATURES, 0);
                (0..size).for_each(|entry| self.set_in_flight(entry, false));
                self.set(header, header::DESC_NUM, size);
                begin_anew(self);
                // Last: with a version there is all of it.
                self.set(header, header::VERSION, VERSION);
                return Ok(false);
            }
            (VERSION, 0) => {}
            (version, features) => return Err(RecordError::Unknown { version, features }),
        }
        match self.get(header, header::DESC_NUM) {
            desc_num if desc_num == size => Ok(true),
            desc_num => Err(RecordError::Length { desc_num, size }),
        }
    }

    /// The entries of the chains in flight with their counters, in the order in which the chains were popped.
    fn in_flight(&self) -> Vec<(u64, u16)> {
        let in_flight = (0..self.size).filter(|&entry| self.is_in_flight(entry));
        let mut in_flight: Vec<(u64, u16)> =
            in_flight.map(|entry| (self.get(self.state(entry), state::COUNTER), entry)).collect();
        in_flight.sort_unstable();
        in_flight
    }

    #[inline]
    fn is_in_flight(&self, entry: u16) -> bool {
        self.get(self.state(entry), state::INFLIGHT) != 0
    }

    #[inline]
    fn set_in_flight(&mut self, entry: u16, in_flight: bool) {
        self.set(self.state(entry), state::INFLIGHT, in_flight.into());
    }

    #[inline]
    fn set_counter(&mut self, entry: u16, counter: u64) {
        self.set(self.state(entry), state::COUNTER, counter);
    }

    #[inline]
    fn header(&self) -> Place {
        Place(self.base)
    }

    /// # Panics
    ///
    /// When there is no such state.
    #[inline]
    fn state(&self, entry: u16) -> Place {
        assert!(entry < self.size, "descriptor {entry} of a record of {}", self.size);
        let stride = if self.packed { packed::STRIDE } else { split::STRIDE };
        // SAFETY: the invariant covers a header and `size` states.
        Place(unsafe { self.base.add(stride as usize * (1 + usize::from(entry))) })
    }

    #[inline]
    fn get<T: Copy>(&self, Place(place): Place, field: Field<T>) -> T {
        // SAFETY: a place is in what the invariant covers, aligned to 8, and the field is there in either layout, or in the
        // one that `take_in` has found this to have.
        unsafe { place.add(field.0).cast::<T>().read_volatile() }
    }

    #[inline]
    fn set<T>(&mut self, Place(place): Place, field: Field<T>, value: T) {
        // SAFETY: as in `get`.
        unsafe { place.add(field.0).cast::<T>().write_volatile(value) }
        crash::point();
    }
}

/// Where a test may have the device die: behind each of the record's stores, and the ring's between them.
pub(super) mod crash {
    #[cfg(test)]
    std::thread_local! {
        static LIFE: std::cell::Cell<u64> = const { std::cell::Cell::new(u64::MAX) };
    }

    /// The device dies when it has come past `after` points from here.
    #[cfg(test)]
    pub(in crate::ring) fn die(after: u64) {
        LIFE.set(after);
    }

    /// A point at which it may.
    #[inline(always)]
    pub(in crate::ring) fn point() {
        #[cfg(test)]
        match LIFE.replace(u64::MAX) {
            0 => std::panic::resume_unwind(Box::new("killed")),
            u64::MAX => {}
            left => LIFE.set(left - 1),
        }
    }
}
