//! Requests and the engines that run them.
//!
//! A [`Disk`] is an open image, a file, a block device or a remote disk: shared, and the same for everybody.
//! [`EngineSet`] is what one I/O thread runs requests on: its own, and for every disk that it serves. A [`Request`] is
//! pushed; nothing happens until the loop has collected its batch and submits; then it comes back as a [`Completion`].
//!
//! ```text
//! Request ──► EngineSet ──► triage ──┬─► threads    workers that block
//!                                    ├─► native     Linux AIO
//!                                    ├─► io_uring   the loop's ring, or its own
//!                                    ├─► null       nothing at all
//!                                    └─► a [`Remote`]'s  a protocol or a library of another crate's
//! ```
//!
//! Whatever the engine, a request means the same: a read past the end of an image that has shrunk fails, a
//! transfer that the kernel cut short is continued, direct I/O takes memory and sectors of any alignment (through a
//! copy, if it must), and zeroes are written where they cannot be asked for. What an engine cannot do itself, worker
//! threads do.
//!
//! A read that comes alone, and that the host's page cache can answer, is answered where the batch is submitted, and no
//! engine sees it.
//!
//! A disk may be in a [`ThrottleGroup`], which limits what its disks do together: requests beyond that wait in front of
//! triage.

#![deny(unsafe_code)]

mod blkdebug;
mod block_range_lock;
#[cfg(test)]
#[path = "block_range_lock/tests.rs"]
mod block_range_lock_tests;
mod blocking;
mod buffers;
mod disk;
mod engine;
mod engine_kind;
mod engine_set;
mod error;
mod failure;
pub mod format;
mod geometry;
mod job;
mod lock;
mod options;
#[cfg(test)]
#[path = "../../event-loop/tests/refuse/mod.rs"]
mod refuse;
mod remote;
mod request;
mod slab;
mod stats;
mod syncs;
mod throttle;
mod triage;

/// What the lock on ranges of blocks, the workers and the syncs are made of; their tests put loom's in their place.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use std::thread;

    pub(crate) use egret_event_loop::EventNotifier;
}

pub use blkdebug::{DebugRules, InjectError, SetState};
pub use disk::{Active, Disk, Extent, Image, LockedForNow, Loss, Standing};
pub use engine::{Engine, Pinning};
pub use engine_set::{DiskSlot, EngineOptions, EngineSet};
pub use error::{EngineError, OpenCause, OpenError};
pub use failure::{Action, Failure, FailureLog};
pub use geometry::{Blocks, Limits as BlockLimits};
pub use job::{Job, Jobs};
pub use lock::{LOCK_PATIENCE, LOOK_AGAIN};
pub use options::{Aio, DebugEvent, DetectZeroes, Discard, Driver, IoType, Locking, Options, RemoteKind, UnknownValue};
pub use remote::{Remote, RemoteDisk, Shape};
pub use request::{Completion, Ended, FailedRequest, Op, PartOf, Request, RequestToken};
pub use slab::Slab;
pub use stats::{BATCH_CLASSES, Counters, EngineStats, Stats};
pub use syncs::FlushError;
pub use throttle::{Debt, LARGEST_LIMIT, Limit, Limits, LimitsError, Rates, ThrottleGroup};

#[cfg(test)]
pub(crate) mod tests;
