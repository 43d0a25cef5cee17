//! SCSI commands: CDB in; disk operation, or data and sense out.
//!
//! A [`LogicalUnit`] is a disk as SCSI has it. It knows neither what carries its commands nor what runs its disk
//! operations: whoever has a CDB [begins](LogicalUnit::begin) a command with it, and does what each [`Step`] says until
//! the command is done.
//!
//! ```text
//!            ┌──────────────── retry ◀── Wait ◀──┐
//!            ▼                                   │
//!   CDB ── begin ──────────────────────────────▶ Step ──▶ Done: status, sense, data-in
//!            ▲                                   │    ──▶ Overrun: the buffers are too short
//!            │                                   ▼
//!          step ◀── Ok or errno ── the disk ◀── Disk: operation, offset, length, which memory
//! ```
//!
//! READ and WRITE are one disk operation on the initiator's own memory, and cost no allocation, no lock and no copy. Who
//! is in a hurry asks first whether a command is a [transfer](LogicalUnit::begin_transfer), and need not look at steps.
//! A [`Command`] is the room that one takes while it is under way; it is recycled.
//!
//! ```
//! use std::task::Waker;
//!
//! use egret_scsi::{Command, LogicalUnit, LunConfig, NexusId, Status, Step, Task};
//!
//! let config = LunConfig { capacity_bytes: 1 << 30, serial: "pond-7".into(), ..LunConfig::default() };
//! let unit = LogicalUnit::new(config)?;
//! let nexus = unit.attach(NexusId { initiator: 1, port: 1 });
//! let mut command = Command::new();
//!
//! let read_capacity = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
//! let cdb = &read_capacity;
//! let task = Task { cdb, nexus: &nexus, luns: &[0], data_in: 8, data_out: 0, lane: 0, waker: Waker::noop() };
//! let no_data: &[u8] = &[];
//! // A new nexus hears of the power on before anything else.
//! let Step::Done(done) = unit.begin(&mut command, &task, &no_data) else { unreachable!() };
//! assert_eq!(done.status, Status::CheckCondition);
//! let Step::Done(done) = unit.begin(&mut command, &task, &no_data) else { unreachable!() };
//! assert_eq!(done.status, Status::Good);
//! assert_eq!(command.data_in(), [0, 0x1f, 0xff, 0xff, 0, 0, 2, 0]);
//!
//! let read = [0x28, 0, 0, 0, 0, 7, 0, 0, 8, 0];
//! let task = Task { cdb: &read, data_in: 4096, ..task };
//! let Step::Disk(op) = unit.begin(&mut command, &task, &no_data) else { unreachable!() };
//! assert_eq!((op.offset, op.len), (7 * 512, 8 * 512));
//! // The disk fills the initiator's memory; then:
//! let Step::Done(done) = unit.step(&mut command, Ok(()), &no_data, &nexus, Waker::noop()) else { unreachable!() };
//! assert_eq!((done.status, done.moved), (Status::Good, 4096));
//! # Ok::<(), egret_scsi::ConfigError>(())
//! ```
//!
//! # What keeps commands apart
//!
//! COMPARE AND WRITE happens as if alone: a command that would change the same blocks waits for it, and it waits for
//! every operation that was changing the medium before it began. PREEMPT AND ABORT ends when all of those have, and a command
//! of the preempted nexus that has more of them conflicts. Reads never wait. To wait is a step of its own, [`Step::Wait`]; nothing here blocks, and nobody has to poll: a command that
//! may have its turn has its task's waker woken.
//!
//! A caller whose disk takes nothing for a while, because it fails say, [suspends](LogicalUnit::suspend) commands, so that
//! nobody waits for them. They take their turns anew when they are [readmitted](LogicalUnit::readmit).
//!
//! # What a command takes
//!
//! A command that reads what it does not hand over, or writes what it was not given as it is, needs memory of its own,
//! at most [`MAX_SCRATCH`] bytes and for one operation at a time. It is made by [`Command::scratch`], so the caller says
//! how many commands have any: who has none to give puts the operation off. Nor does a step do more with the initiator's
//! data than compare that much of it. A parameter list is read as far as it can mean something, and answers are as long as
//! the room for them.
//!
//! All of this is per logical unit, and so are reservations: a disk that is offered twice must be one [`LogicalUnit`] with
//! two nexuses. Each nexus has its own task set.
//!
//! # What it knows
//!
//! | | |
//! |---|---|
//! | medium | READ and WRITE 6/10/12/16, VERIFY and WRITE AND VERIFY 10/12/16 |
//! | | SYNCHRONIZE CACHE and WRITE SAME 10/16, UNMAP, COMPARE AND WRITE |
//! | state | TEST UNIT READY, START STOP UNIT, PREVENT ALLOW MEDIUM REMOVAL, SEND DIAGNOSTIC |
//! | | REQUEST SENSE, MODE SENSE and SELECT 6/10, LOG SENSE |
//! | identity | INQUIRY with pages 00h, 80h, 83h, 85h, 86h, 87h, 88h, B0h, B1h, B2h; READ CAPACITY 10/16; REPORT LUNS |
//! | | REPORT SUPPORTED OPERATION CODES and TASK MANAGEMENT FUNCTIONS |
//! | sharing | PERSISTENT RESERVE IN and OUT, with all six types; RESERVE and RELEASE 6/10, of whole units |
//!
//! Rules are those of SAM-5, SPC-5 and SBC-4, and SPC-2's of what those have given up. Clauses are named by their titles:
//! their numbers change from one revision to the next.

#![forbid(unsafe_code)]

mod absent;
mod call;
mod cdb;
mod command;
mod config;
mod execute;
mod inquiry;
mod kept;
mod medium;
mod mode;
mod nexus;
mod persist;
mod report;
mod reservations;
mod sense;
mod state;
mod step;
#[cfg(test)]
mod testing;
mod unit;
mod work;
mod write_fence;
#[cfg(test)]
#[path = "write_fence/tests.rs"]
mod write_fence_tests;

/// What the write fence is made of; its test puts loom's in their place.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
    pub(crate) use std::sync::{Mutex, MutexGuard};

    /// How many counters there are. With more threads on one logical unit, some share a counter.
    pub(crate) const LANES: usize = 16;
}

pub use absent::absent;
pub use command::Command;
pub use config::{ConfigError, DiscardConfig, LunConfig, Naa};
pub use kept::{Change, Keeper, Registered};
pub use nexus::{Attention, Nexus, NexusId};
pub use sense::{Code, Key, Pointer, Sense, Status};
pub use state::{Origin, UnitState, UnitStateError};
pub use step::{DataOut, DiskOp, Done, MAX_SCRATCH, Memory, Step, Task};
pub use unit::LogicalUnit;
