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
//! turn in which they push requests or their timer is up, and for some hundred nanoseconds; while debts are paid that are due,
//! for up to 256 turns of the group. Loops do not
//! wake one another: each loop with throttled requests sets a timer of its own for the moment when the buckets have room
//! again. The first loop to look grants turns to all, and the others find theirs. No request can be released before its
//! loop looks, because a grant to another only fills the buckets. After a change of limits the loops have to look again.
//!
//! A drain waits for no limit, as with QEMU (`throttle_group_restart_tgm`). What it lets go its disk owes: it has its turns later,
//! in which nothing begins. Who drains a disk for a client again begins nothing new for that one before.

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
pub use schedule::Debt;
pub(crate) use slot::ThrottledSlot;
