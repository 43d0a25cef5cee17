//! Split and packed virtqueues (virtio 1.3, 2.7 and 2.8): both halves.
//!
//! | half | type | who has it | split | packed |
//! |---|---|---|---|---|
//! | device | [`Queue`] | an export's queue worker, by value | `split.rs` | `packed.rs` |
//! | driver | [`Driver`] | tests and load generators | `driver/split.rs` | `driver/packed.rs` |
//!
//! A [`Queue`] is made by starting a [`QueueConfig`] and gives one back when it stops: one that runs cannot be
//! configured. It trusts nothing in the ring. Whatever the specification forbids the driver breaks the queue, with a
//! [`RingError`] that says what, and nothing but that queue.
//!
//! A queue keeps a [`Record`] of what it has in flight, where the front-end wants one, by which the next queue on the same
//! ring goes on should this one's process be killed.

mod area;
mod chain;
mod chains;
mod driver;
mod either;
mod inflight;
mod log;
mod packed;
mod queue;
mod split;

use std::fmt;

use thiserror::Error;

pub use chain::Chain;
pub use driver::{Driver, DriverConfig, Full, Piece, Used};
pub use inflight::{Inflight, InflightConfig, InflightError, Record, RecordError};
pub use queue::{Queue, QueueConfig};

/// The largest queue (virtio 1.3, 2.7 and 2.8).
pub const MAX_SIZE: u16 = 32768;

/// Where a packed ring begins after a reset, as [`QueueConfig::base`] has it: both sides at the first descriptor, with
/// their wrap counters at 1 (2.8.1).
pub const PACKED_BASE: u32 = 0x8000_8000;

/// The most descriptors followed through an indirect table.
///
/// The specification's limit is the queue size (2.7.5.3.1), but drivers go by `seg_max` and use indirect tables longer
/// than a small queue, and other devices let them.
pub const MAX_INDIRECT: u16 = 1024;

/// The most iovecs of guest memory in one chain, header and status included: as many segments as QEMU takes, and these two.
///
/// The specification counts descriptors, but a buffer is in as many iovecs as there are regions that it lies in. Only one
/// of regions made to that end comes anywhere near.
pub const MAX_IOVECS: u32 = 1026;

/// The three parts of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// The descriptor table (2.7.5).
    Descriptors,
    /// The available ring (2.7.6).
    Available,
    /// The used ring (2.7.8).
    Used,
    /// A packed ring's descriptors (2.8.13).
    Ring,
    /// The driver's event suppression (2.8.14).
    DriverEvents,
    /// The device's event suppression (2.8.14).
    DeviceEvents,
}

impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Descriptors => "descriptor table",
            Self::Available => "available ring",
            Self::Used => "used ring",
            Self::Ring => "descriptor ring",
            Self::DriverEvents => "driver event area",
            Self::DeviceEvents => "device event area",
        })
    }
}

/// What is wrong with a ring. Clauses are virtio 1.3's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RingError {
    /// 2.7: the size is a power of two, at most 32768.
    #[error("queue size {0} is not a power of two from 1 to 32768")]
    Size(u16),
    /// 2.8: the size of a packed queue is at most 32768.
    #[error("size {0} of a packed queue is not from 1 to 32768")]
    PackedSize(u16),
    /// A packed queue was to go on at a descriptor that it does not have.
    #[error("base at slot {slot} of a packed queue of {size}")]
    Base {
        /// The slot.
        slot: u16,
        /// The queue's size.
        size: u16,
    },
    /// 2.7: an area at an address that is not aligned as it must be, for the guest or here.
    #[error("{area} at {addr:#x} is not aligned to {align} bytes")]
    Alignment {
        /// Which area.
        area: Area,
        /// Its guest address.
        addr: u64,
        /// What it must be a multiple of.
        align: u64,
    },
    /// An area that is not wholly inside one region of guest memory.
    #[error("{area} at {addr:#x} of {len} bytes is outside guest memory")]
    AreaOutside {
        /// Which area.
        area: Area,
        /// Its guest address.
        addr: u64,
        /// Its length in bytes.
        len: usize,
    },
    /// The driver made more chains available than there are descriptors.
    #[error("available index {available} is more than {size} ahead of {popped}")]
    IndexAhead {
        /// The driver's index.
        available: u16,
        /// The next index to pop.
        popped: u16,
        /// The queue's size.
        size: u16,
    },
    /// A chain begins or goes on at a descriptor that does not exist.
    #[error("descriptor {index} of a table of {len}")]
    NoSuchDescriptor {
        /// The descriptor's index.
        index: u16,
        /// The table's length in descriptors.
        len: u32,
    },
    /// A chain of a packed ring whose buffer ID is not less than the size.
    #[error("buffer ID {id} in a queue of {size}")]
    NoSuchBuffer {
        /// The buffer ID.
        id: u16,
        /// The queue's size.
        size: u16,
    },
    /// 2.8.1: a descriptor of a packed ring was made available again before it was used.
    #[error("descriptor {0} made available before it was used")]
    NotUsed(u16),
    /// 2.7.13: a chain was made available again before it was used.
    #[error("descriptor chain {0} made available while in flight")]
    Duplicate(u16),
    /// 2.7.5.2: a chain that loops, or is longer than it may be.
    #[error("descriptor chain loops or is longer than {limit}")]
    TooLong {
        /// How many descriptors it may have.
        limit: u32,
    },
    /// 2.7.5.2: more than 2^32 - 1 bytes in one chain.
    #[error("descriptor chain of 4 GiB or more")]
    TooMuch,
    /// A chain in more iovecs than the device follows.
    #[error("descriptor chain of {iovecs} pieces of guest memory or more; at most {MAX_IOVECS} are taken")]
    TooManyIoVecs {
        /// How many there were when it was followed no further.
        iovecs: u32,
    },
    /// 2.7.4.2: a device-readable buffer behind a device-writable one.
    #[error("readable buffer behind a writable one")]
    ReadableAfterWritable,
    /// A buffer that is not wholly inside guest memory.
    #[error("buffer at {addr:#x} of {len} bytes is outside guest memory")]
    BufferOutside {
        /// Its guest address.
        addr: u64,
        /// Its length in bytes.
        len: u32,
    },
    /// An indirect table that is not wholly inside guest memory.
    #[error("indirect table at {addr:#x} of {len} bytes is outside guest memory")]
    TableOutside {
        /// Its guest address.
        addr: u64,
        /// Its length in bytes.
        len: u32,
    },
    /// 2.7.5.3.1: an indirect table whose length is zero, no multiple of 16, or more than 65535 descriptors.
    #[error("indirect table of {0} bytes")]
    TableLength(u32),
    /// 2.7.5.3.1: an indirect descriptor inside an indirect table.
    #[error("indirect descriptor inside an indirect table")]
    IndirectInIndirect,
    /// 2.7.5.3.1: a descriptor that is both indirect and has a next.
    #[error("indirect descriptor with a next one")]
    IndirectWithNext,
    /// The front-end handed over a record of other chains in flight than the ring can have.
    #[error("in-flight record of {0}")]
    Record(#[from] RecordError),
    /// 2.8.19: an indirect descriptor of a packed ring behind others of its chain.
    #[error("indirect descriptor behind others of its chain")]
    IndirectInChain,
    /// The driver's half was handed a chain that it did not make available.
    #[error("device used descriptor chain {0}, which is not available")]
    NotAvailable(u32),
    /// Not the guest's fault: the memory map cannot be replaced while chains are in flight.
    #[error("{0} descriptor chains in flight")]
    InFlight(u16),
}

/// Whether the other side asked to be told when an index moved from `old` to `new` (2.7.10).
///
/// It did if `event`, which it wrote, is among the entries from `old` up to but not including `new`.
pub const fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(kani)]
mod proofs;
#[cfg(test)]
mod tests;
