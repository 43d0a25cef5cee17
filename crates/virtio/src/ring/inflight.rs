//! The in-flight record of split rings: what a device had popped and not used when it went away.
//!
//! The record is memory that the front-end keeps and hands to the next device on the same rings. Its layout and the
//! order of its stores are those of vhost-user, "Inflight I/O tracking":
//!
//! ```text
//!   pop      counter ──▶ inflight = 1
//!   use      next = last_batch_head ──▶ last_batch_head = head                   for each chain of a batch
//!   publish  the ring's used index ──▶ inflight = 0, for each of the batch ──▶ used_idx = the ring's
//! ```
//!
//! A device may be killed between any two of these stores. Up to the used index's, the driver has seen nothing of the
//! batch, and all of it is in flight. From there on the two indices differ, by as many chains as the driver has seen
//! but the record still has: the list that begins at `last_batch_head` says which. So the next device knows what the
//! driver waits for, chain by chain, and pops that first, in the order in which it was made available.
//!
//! The stores are volatile, and so stay in this order; there is nobody to see them but who comes after a process that
//! is dead, and then all of its stores have arrived.
//!
//! Behind the queues' parts a device of ours has a word of its own: what its driver has chosen, which no front-end tells
//! the next device. Another's record ends before it.
//!
//! Whoever has the record's file can write to it. What it says is checked when a queue starts; later it is only
//! written, and read no further than to find where to write, inside the record.

use std::fs::File;
use std::sync::Arc;

use thiserror::Error;

use crate::memory::{GuestMemory, MemoryError, Region};

const VERSION: u16 = 1;

/// `QueueRegionSplit` up to its descriptors, whose states are as long again each.
const HEADER: u64 = 16;
const STATE: u64 = 16;
/// Each queue's part begins on a cache line, as with libvhost-user and DPDK.
const LINE: u64 = 64;
/// What the word behind them begins with, and nothing that is there by chance; the last byte says what it is about.
const CHOICES: u64 = u64::from_be_bytes(*b"egretwc\0");

/// Why a record cannot be used.
#[derive(Debug, Error)]
pub enum InflightError {
    /// It is too short for what it is said to be.
    #[error("{size} bytes of it; {queues} queues of {queue_size} descriptors take {needed}")]
    Short {
        /// Its length in bytes.
        size: u64,
        /// How many queues it is for.
        queues: u16,
        /// How many descriptors each has.
        queue_size: u16,
        /// What these need, in bytes.
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
}

/// The records of a device's queues, as its front-end hands them over.
#[derive(Clone, Debug)]
pub struct Inflight {
    /// A map with nothing in it but the record, from address 0 on: it is the front-end's memory as much as a guest's is.
    memory: Arc<GuestMemory>,
    queues: u16,
    queue_size: u16,
    has_choices: bool,
}

impl Inflight {
    /// How long the record of so many queues is, in bytes. One that was never used is all zeroes.
    pub const fn bytes(queues: u16, queue_size: u16) -> u64 {
        Self::bytes_of_queues(queues, queue_size) + LINE
    }

    const fn bytes_of_queues(queues: u16, queue_size: u16) -> u64 {
        queues as u64 * Self::queue_bytes(queue_size)
    }

    const fn queue_bytes(queue_size: u16) -> u64 {
        (HEADER + STATE * queue_size as u64).next_multiple_of(LINE)
    }

    /// Takes the record in that begins at `offset` in `file` and has `size` bytes.
    ///
    /// # Errors
    ///
    /// It is too short, oddly placed, or cannot be mapped.
    pub fn map(file: File, offset: u64, size: u64, queues: u16, queue_size: u16) -> Result<Self, InflightError> {
        let needed = Self::bytes_of_queues(queues, queue_size);
        if size < needed {
            return Err(InflightError::Short { size, queues, queue_size, needed });
        }
        if !offset.is_multiple_of(8) {
            return Err(InflightError::Offset(offset));
        }
        let size = size.min(Self::bytes(queues, queue_size));
        let has_choices = size == Self::bytes(queues, queue_size);
        let region = Region { guest_addr: 0, size, user_addr: 0, file, offset };
        Ok(Self { memory: Arc::new(GuestMemory::empty().with(region)?), queues, queue_size, has_choices })
    }

    /// What the driver had chosen, as the device noted it that kept the record before.
    pub fn choices(&self) -> Option<u8> {
        // SAFETY: `word` is where a word is.
        let word = self.word().map(|word| unsafe { word.read_volatile() })?;
        (word & !0xff == CHOICES).then_some(word as u8)
    }

    /// Notes what the driver has chosen.
    pub fn set_choices(&self, choices: u8) {
        if let Some(word) = self.word() {
            // SAFETY: `word` is where a word is.
            unsafe { word.write_volatile(CHOICES | u64::from(choices)) }
        }
    }

    /// Where the word of choices is: mapped as long as `memory` is, and aligned as the record is, to 8.
    fn word(&self) -> Option<*mut u64> {
        let at = Self::bytes_of_queues(self.queues, self.queue_size);
        let piece = self.has_choices.then(|| self.memory.slice(at, 8))??;
        Some(piece.base().cast())
    }

    /// The part of the queue `index`, if there is one.
    pub fn queue(&self, index: u16) -> Option<Record> {
        let len = Self::queue_bytes(self.queue_size);
        let part = (index < self.queues).then(|| self.memory.slice(u64::from(index) * len, len as usize))??;
        Some(Record { base: part.base(), memory: Arc::clone(&self.memory), size: self.queue_size, counter: 0 })
    }
}

/// One queue's part of a record, which its queue keeps up to date.
///
/// Invariant: `base` is aligned to 8, and a header and `size` states are mapped there as long as `memory` is.
#[derive(Debug)]
pub struct Record {
    base: *mut u8,
    memory: Arc<GuestMemory>,
    size: u16,
    /// The next counter.
    counter: u64,
}

// SAFETY: `base` points into a mapping that `memory` keeps, which is good from any thread.
unsafe impl Send for Record {}

/// A field of the header, as its offset in 16-bit words.
#[derive(Clone, Copy)]
enum Field {
    Version = 4,
    DescNum = 5,
    LastBatchHead = 6,
    UsedIdx = 7,
}

impl Record {
    /// Whether the peer took the record's memory away.
    #[inline]
    pub(super) fn is_torn(&self) -> bool {
        self.memory.is_torn()
    }

    /// Whether it has chains in flight, as far as that can be told without their ring.
    pub fn is_busy(&self) -> bool {
        (0..self.size).any(|head| self.is_in_flight(head))
    }

    /// Brings the record into agreement with a ring of `ring` descriptors whose used index is `used`. Returns the heads
    /// of the chains in flight, in the order in which they were popped; `None` for a record that was never used.
    pub(super) fn recover(&mut self, used: u16, ring: u16) -> Result<Option<Vec<u16>>, RecordError> {
        let size = self.size;
        if size < ring {
            return Err(RecordError::TooSmall { size, ring });
        }
        match (self.get(Field::Version), self.features()) {
            (0, _) => {
                self.begin_anew(used);
                return Ok(None);
            }
            (VERSION, 0) => {}
            (version, features) => return Err(RecordError::Unknown { version, features }),
        }
        let desc_num = self.get(Field::DescNum);
        if desc_num != size {
            return Err(RecordError::Length { desc_num, size });
        }
        let recorded = self.get(Field::UsedIdx);
        if used.wrapping_sub(recorded) > ring {
            return Err(RecordError::Batch { recorded, used, ring });
        }
        self.end_batch(recorded, used)?;
        let in_flight = (0..size).filter(|&head| self.is_in_flight(head));
        let mut in_flight: Vec<(u64, u16)> = in_flight.map(|head| (self.counter(head), head)).collect();
        in_flight.sort_unstable();
        if let Some(&(_, head)) = in_flight.iter().find(|(_, head)| *head >= ring) {
            return Err(RecordError::NoSuchHead { head, ring });
        }
        self.counter = in_flight.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(Some(in_flight.into_iter().map(|(_, head)| head).collect()))
    }

    /// Makes a record of one that was never used.
    fn begin_anew(&mut self, used: u16) {
        self.set_features(0);
        (0..self.size).for_each(|head| self.set_in_flight(head, false));
        self.set(Field::DescNum, self.size);
        self.set(Field::LastBatchHead, 0);
        self.set(Field::UsedIdx, used);
        // Last: with a version there is all of it.
        self.set(Field::Version, VERSION);
    }

    /// A chain has been popped.
    #[inline]
    pub(super) fn begin(&mut self, head: u16) {
        self.set_counter(head, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.set_in_flight(head, true);
    }

    /// A chain has its place in the used ring, which the driver has not been shown.
    #[inline]
    pub(super) fn add_used(&mut self, head: u16) {
        self.set_next(head, self.get(Field::LastBatchHead));
        self.set(Field::LastBatchHead, head);
    }

    /// The driver has been shown the used ring from `old` up to `new`.
    #[inline]
    pub(super) fn publish(&mut self, old: u16, new: u16) {
        // A head that does not exist was written there by somebody else, whose loss it is.
        let _ = self.end_batch(old, new);
    }

    /// Takes the last chains used, from the index `old` up to `new`, out of flight.
    #[inline]
    fn end_batch(&mut self, old: u16, new: u16) -> Result<(), RecordError> {
        if old == new {
            return Ok(());
        }
        let mut head = self.get(Field::LastBatchHead);
        for _ in 0..new.wrapping_sub(old) {
            if head >= self.size {
                return Err(RecordError::NoSuchHead { head, ring: self.size });
            }
            self.set_in_flight(head, false);
            head = self.next(head);
        }
        self.set(Field::UsedIdx, new);
        Ok(())
    }

    #[inline]
    fn get(&self, field: Field) -> u16 {
        // SAFETY: the field is in the header, which the invariant covers.
        unsafe { self.base.cast::<u16>().add(field as usize).read_volatile() }
    }

    #[inline]
    fn set(&mut self, field: Field, value: u16) {
        // SAFETY: as in `get`.
        unsafe { self.base.cast::<u16>().add(field as usize).write_volatile(value) }
        crash::point();
    }

    fn features(&self) -> u64 {
        // SAFETY: the header begins with them, and the invariant covers it.
        unsafe { self.base.cast::<u64>().read_volatile() }
    }

    fn set_features(&mut self, features: u64) {
        // SAFETY: as in `features`.
        unsafe { self.base.cast::<u64>().write_volatile(features) }
        crash::point();
    }

    /// Where the state of a chain is: `inflight` in its first byte, `next` in its fourth 16-bit word, `counter` in its
    /// second 64-bit word.
    #[inline]
    fn state(&self, head: u16) -> *mut u8 {
        assert!(head < self.size, "descriptor chain {head} of a record of {}", self.size);
        // SAFETY: the invariant covers a header and `size` states.
        unsafe { self.base.add((HEADER + STATE * u64::from(head)) as usize) }
    }

    #[inline]
    fn is_in_flight(&self, head: u16) -> bool {
        // SAFETY: `state` is a state's place.
        unsafe { self.state(head).read_volatile() != 0 }
    }

    #[inline]
    fn set_in_flight(&mut self, head: u16, in_flight: bool) {
        // SAFETY: as in `is_in_flight`.
        unsafe { self.state(head).write_volatile(in_flight.into()) }
        crash::point();
    }

    #[inline]
    fn next(&self, head: u16) -> u16 {
        // SAFETY: `state` is a state's place, aligned to 8.
        unsafe { self.state(head).cast::<u16>().add(3).read_volatile() }
    }

    #[inline]
    fn set_next(&mut self, head: u16, next: u16) {
        // SAFETY: as in `next`.
        unsafe { self.state(head).cast::<u16>().add(3).write_volatile(next) }
        crash::point();
    }

    #[inline]
    fn counter(&self, head: u16) -> u64 {
        // SAFETY: as in `next`.
        unsafe { self.state(head).cast::<u64>().add(1).read_volatile() }
    }

    #[inline]
    fn set_counter(&mut self, head: u16, counter: u64) {
        // SAFETY: as in `next`.
        unsafe { self.state(head).cast::<u64>().add(1).write_volatile(counter) }
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
