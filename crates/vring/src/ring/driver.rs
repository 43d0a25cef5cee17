//! The driver's half of a ring: what a guest does, for tests and load generators.

mod packed;
mod split;

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use super::area::Descriptors;
use super::chain::WRITE;
use super::either::{Either, either};
use super::{QueueConfig, RingError};
use crate::memory::GuestMemory;

/// Areas begin on cache lines of their own, so that the halves do not share more than they must.
const LINE: u64 = 64;

/// How a driver sets its ring up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverConfig {
    /// Descriptors in the table: a power of two, or any number for a packed ring.
    pub size: u16,
    /// Whether `VIRTIO_F_RING_PACKED` was negotiated.
    pub packed: bool,
    /// Whether `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// The most descriptors of a chain that goes through an indirect table, for which each head has one; or none, and
    /// chains take descriptors from the ring's own table.
    pub indirect: Option<u16>,
    /// Where both sides begin. After a reset 0; in a packed ring the half of [`PACKED_BASE`](super::PACKED_BASE).
    pub base: u16,
}

/// Where the areas go, as offsets, and how long they are together.
struct Layout {
    used: u64,
    avail: u64,
    tables: u64,
    end: u64,
}

impl DriverConfig {
    fn layout(&self) -> Layout {
        let size = u64::from(self.size);
        let (used_bytes, avail_bytes) = if self.packed { (4, 4) } else { (6 + 8 * size, 6 + 2 * size) };
        let used = (16 * size).next_multiple_of(LINE);
        let avail = (used + used_bytes).next_multiple_of(LINE);
        let tables = (avail + avail_bytes).next_multiple_of(LINE);
        let end = tables + 16 * size * u64::from(self.indirect.unwrap_or(0));
        Layout { used, avail, tables, end }
    }

    /// How much memory the ring takes, in bytes.
    pub fn bytes(&self) -> u64 {
        self.layout().end
    }

    /// What to start the device's half with, for a ring at `at`.
    pub fn queue(&self, at: u64) -> QueueConfig {
        let layout = self.layout();
        let base = u32::from(self.base);
        QueueConfig {
            size: self.size,
            desc: at,
            avail: at + layout.avail,
            used: at + layout.used,
            base: if self.packed { base << 16 | base } else { base },
            packed: self.packed,
            event_idx: self.event_idx,
            log: None,
        }
    }
}

/// Where a driver's ring is.
struct Home {
    memory: Arc<GuestMemory>,
    at: u64,
    config: DriverConfig,
}

impl Home {
    /// Looks whether there is memory for all indirect tables.
    fn new(memory: &Arc<GuestMemory>, at: u64, config: DriverConfig) -> Result<Self, RingError> {
        let home = Self { memory: Arc::clone(memory), at, config };
        // Where there are none, the memory may end.
        let tables = if config.indirect.is_some() { config.size } else { 0 };
        (0..tables).try_for_each(|head| home.table(head).map(drop))?;
        Ok(home)
    }

    fn queue(&self) -> QueueConfig {
        self.config.queue(self.at)
    }

    /// The indirect table of a chain, and its guest address.
    fn table(&self, head: u16) -> Result<(u64, Descriptors), RingError> {
        let most = u32::from(self.config.indirect.unwrap_or(0));
        let (addr, len) = (self.at + self.config.layout().tables + u64::from(head) * 16 * u64::from(most), 16 * most);
        let table = self.memory.slice(addr, len as usize).ok_or(RingError::TableOutside { addr, len })?;
        // SAFETY: the piece has room for that many descriptors, and is of the memory that a driver keeps.
        Ok((addr, unsafe { Descriptors::at(table.base(), most) }))
    }
}

/// A buffer in guest memory, as a descriptor has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its guest address.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u32,
}

/// A chain that the device has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// What [`Driver::add`] was given.
    pub token: u64,
    /// How many bytes the device says it wrote.
    pub written: u32,
}

/// There are not enough free descriptors for a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("not enough free descriptors")]
pub struct Full;

/// The driver's half of a ring, which owns the ring's memory. Allocates nothing after it is made.
pub struct Driver(Either<split::Driver, packed::Driver>);

impl Driver {
    /// Lays a ring out in `config.bytes()` bytes at `at`, a guest address, and resets it.
    ///
    /// # Errors
    ///
    /// A size that the ring cannot have, `at` not a multiple of 16, or the memory not there.
    pub fn new(memory: &Arc<GuestMemory>, at: u64, config: DriverConfig) -> Result<Self, RingError> {
        Ok(Self(match config.packed {
            false => Either::Split(split::Driver::new(memory, at, config)?),
            true => Either::Packed(packed::Driver::new(memory, at, config)?),
        }))
    }

    /// The memory that the ring is in.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        either!(&self.0, driver => &driver.home.memory)
    }

    /// What to start the device's half with.
    pub fn queue(&self) -> QueueConfig {
        either!(&self.0, driver => driver.home.queue())
    }

    /// How many descriptors are free.
    pub fn free(&self) -> usize {
        either!(&self.0, driver => driver.free())
    }

    /// Makes a chain of `readable` and then `writable` buffers; the device sees it after [`publish`](Self::publish).
    /// It comes back from [`reap`](Self::reap) with `token`.
    ///
    /// With indirect tables, a chain of one buffer goes without, as Linux has it.
    ///
    /// # Errors
    ///
    /// Not enough free descriptors, or more buffers than an indirect table holds. Nothing has changed.
    ///
    /// # Panics
    ///
    /// When there are no buffers at all.
    pub fn add(&mut self, readable: &[Piece], writable: &[Piece], token: u64) -> Result<(), Full> {
        let count = readable.len() + writable.len();
        assert!(count > 0, "a chain needs a buffer");
        let buffers = readable.iter().map(|piece| (piece, 0)).chain(writable.iter().map(|piece| (piece, WRITE)));
        either!(&mut self.0, driver => driver.add(count, buffers, token))
    }

    /// Shows the device the chains added since the last time; returns whether it wants a kick.
    pub fn publish(&mut self) -> bool {
        either!(&mut self.0, driver => driver.publish())
    }

    /// Whether there is a used chain to reap: one load.
    #[inline]
    pub fn has_used(&self) -> bool {
        either!(&self.0, driver => driver.has_used())
    }

    /// Takes the next used chain, if there is one, and frees its descriptors.
    ///
    /// # Errors
    ///
    /// The device used a chain that it does not have.
    pub fn reap(&mut self) -> Result<Option<Used>, RingError> {
        either!(&mut self.0, driver => driver.reap())
    }

    /// Tells the device that it need not notify: a hint.
    pub fn suppress_calls(&mut self) {
        either!(&mut self.0, driver => driver.suppress_calls());
    }

    /// Asks the device to notify of the next used chain. False if one is there already: reap instead of waiting.
    pub fn arm_calls(&mut self) -> bool {
        either!(&mut self.0, driver => driver.arm_calls())
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        either!(&self.0, driver => f
            .debug_struct("Driver")
            .field("queue", &driver.home.queue())
            .field("next_avail", &driver.next_avail)
            .field("next_used", &driver.next_used)
            .field("free", &driver.free())
            .finish_non_exhaustive())
    }
}
