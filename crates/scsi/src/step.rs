//! What a caller gives for a command, and what it has to do next.

use std::ops::Range;
use std::task::Waker;

use egret_disk::Op;

use crate::nexus::Nexus;
use crate::sense::{Refusal, Sense, Status};

/// What an initiator asks for.
#[derive(Clone, Copy, Debug)]
pub struct Task<'a> {
    /// The command descriptor block. What follows its end, which its first byte tells, is not looked at.
    pub cdb: &'a [u8],
    /// Who asks: a nexus of this logical unit.
    pub nexus: &'a Nexus,
    /// The target's logical units, for REPORT LUNS: each the eight bytes of the LUN structure (SAM-5, logical unit
    /// numbers) as a big-endian number.
    pub luns: &'a [u64],
    /// How much data the initiator has room for, in bytes.
    pub data_in: u64,
    /// How much data the initiator gives, in bytes.
    pub data_out: u64,
    /// The number of the thread or queue that asks. Those that ask at the same time should have different ones; nothing
    /// but speed depends on it.
    pub lane: usize,
    /// Is woken when a command that waits is worth another try.
    pub waker: &'a Waker,
}

/// The data that an initiator gives with a command.
pub trait DataOut {
    /// Fills `into` with the bytes from `at` on. Never asks for what is past the task's [`data_out`](Task::data_out).
    ///
    /// The data may change from one call to the next: what matters is read once.
    fn read_at(&self, at: u64, into: &mut [u8]);
}

impl DataOut for &[u8] {
    fn read_at(&self, at: u64, into: &mut [u8]) {
        let at = at as usize;
        into.copy_from_slice(&self[at..at + into.len()]);
    }
}

/// What the caller has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Step {
    /// Run this on the disk; then [`step`](crate::LogicalUnit::step).
    Disk(DiskOp),
    /// It waits for commands on the same blocks: [`retry`](crate::LogicalUnit::retry) when the task's waker has been woken, which
    /// says that one of all that wait with this waker may have its turn. Who cannot wait may
    /// [`abort`](crate::LogicalUnit::abort) the command and answer [`Status::Busy`].
    Wait,
    /// It is over.
    Done(Done),
    /// It is over, and nothing has happened: it moves more data than the buffers hold. SCSI has no status for that; the
    /// transports have.
    Overrun {
        /// How many bytes it would move.
        needed: u64,
    },
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its status.
    pub status: Status,
    /// Why, for CHECK CONDITION.
    pub sense: Option<Sense>,
    /// How many bytes have been moved, in the direction that the command moves them. Where that is data-in, they are
    /// [`Command::data_in`](crate::Command::data_in)'s if it has any, and otherwise the disk has put them there. The residual is what the buffer
    /// has beyond.
    pub moved: u64,
}

/// One disk operation of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskOp {
    /// What to do.
    pub op: Op,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How much of the disk it is about, in bytes; zero for a flush.
    pub len: u64,
    /// The memory that goes with it.
    pub memory: Memory,
}

/// Which memory a disk operation reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// None: nothing is moved.
    None,
    /// The first bytes of the initiator's data-in.
    DataIn,
    /// The initiator's data-out, from this byte on.
    DataOut(u64),
    /// The command's own: [`Command::scratch`](crate::Command::scratch).
    Scratch,
}

/// The most scratch memory that an operation has, in bytes: a multiple of every block size. It is also the most that is
/// compared in one step.
pub const MAX_SCRATCH: u64 = 64 << 10;

impl DiskOp {
    pub(crate) const FLUSH: Self = Self { op: Op::Flush, offset: 0, len: 0, memory: Memory::None };

    /// What it is about, in bytes.
    pub(crate) fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }
}

/// Has what an operation writes be stable when it ends, if it writes.
pub(crate) fn make_stable(op: &mut Op) {
    match op {
        Op::Write { fua } | Op::WriteZeroes { fua, .. } => *fua = true,
        Op::Read | Op::Flush | Op::Discard => {}
    }
}

impl Step {
    /// Done, and well.
    pub(crate) const fn good(moved: u64) -> Self {
        Self::Done(Done { status: Status::Good, sense: None, moved })
    }

    /// Done, with nothing moved.
    pub(crate) const fn refused(status: Status, sense: Option<Sense>) -> Self {
        Self::Done(Done { status, sense, moved: 0 })
    }
}

impl From<Sense> for Step {
    fn from(sense: Sense) -> Self {
        Self::refused(Status::CheckCondition, Some(sense))
    }
}

impl From<Refusal> for Step {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Sense(sense) => sense.into(),
            Refusal::Conflict => Self::refused(Status::ReservationConflict, None),
            Refusal::Overrun(needed) => Self::Overrun { needed },
        }
    }
}
