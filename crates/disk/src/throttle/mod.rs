//! Limits on what disks may do, and the groups that share them.
//!
//! ```text
//!   EngineSet::push ─▶ ThrottledSlot ─▶ ThrottledQueue, one for each disk on each queue of a loop: requests wait here
//!                                         │ asks, takes        ▲ the loop's timer
//!                                         ▼                    │
//!                                 ThrottleGroup ─ Mutex<Schedule> ─ Buckets
//! ```
//!
//! Arithmetic ([`buckets`], [`limits`]) and order ([`schedule`]) know no clock: time is passed in, as QEMU's semantics
//! are tested in virtual time.
//!
//! The disks of a group may be on many I/O threads, so a group is behind a lock. Only limited disks touch it: once a
//! turn in which they push requests or their timer is up, and for some hundred nanoseconds. Nobody wakes anybody:
//! every loop with requests that wait has a timer of its own at the moment when the group's buckets have room again.
//! The first to come grants turns for all, and the others find theirs; no request can become free earlier than its
//! loop looks, because what others are granted only makes it later. Whoever changes limits has the loops look again.

mod buckets;
mod group;
mod limits;
mod queue;
mod schedule;
mod slot;

pub(crate) use buckets::Direction;
pub(crate) use group::Throttle;
pub use group::ThrottleGroup;
pub use limits::{LARGEST_LIMIT, Limit, Limits, LimitsError, Rates};
pub(crate) use slot::ThrottledSlot;
