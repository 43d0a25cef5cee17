//! A command under way, and what its caller has to do next.

use std::ops::Range;
use std::task::Waker;

use egret_disk::Op;

use crate::gate::{Pass, Ticket};
use crate::nexus::Nexus;
use crate::sense::{Refusal, Sense, Status};
use crate::unit::Medium;
use crate::work::{Work, fill};

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
    /// Others are at the same blocks: [`retry`](crate::LogicalUnit::retry) when the task's waker has been woken, which
    /// says that one of all that wait with this waker may have its turn. Who cannot wait may
    /// [`abort`](crate::LogicalUnit::abort) the command and answer [`Status::Busy`].
    Wait,
    /// It is over.
    Done(Done),
    /// It is over, and nothing has happened: it moves more data than the buffers hold. SCSI has no word for that; a
    /// transport has.
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
    /// [`Command::data_in`]'s if it has any, and otherwise the disk has put them there. The residual is what the buffer
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
    /// The command's own: [`Command::scratch`].
    Scratch,
}

/// Room for a command under way. Recycled, it needs no memory that it does not have: only what answers with data or is
/// made of several disk operations allocates anything at all.
///
/// In this order, because the first four are all that a transfer touches: they are next to each other.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Command {
    /// What will have been moved if it ends well, in bytes.
    pub(crate) moved: u64,
    pub(crate) hold: Hold,
    /// The operation that is out.
    pub(crate) out: Option<Op>,
    /// Whether anything below may be other than after a reset.
    pub(crate) touched: bool,
    /// How much scratch memory the operation has that is out, in bytes.
    pub(crate) piece: usize,
    pub(crate) work: Work,
    pub(crate) admission: Admission,
    /// Whether it ends with a flush.
    pub(crate) flush: bool,
    /// What becomes of the medium when it ends.
    pub(crate) medium: Option<Medium>,
    pub(crate) response: Vec<u8>,
    pub(crate) scratch: Vec<u8>,
    /// What is left to do, in bytes, the next last.
    pub(crate) extents: Vec<Range<u64>>,
}

/// What a command needs before its first disk operation.
#[derive(Clone, Debug, Default)]
pub(crate) enum Admission {
    #[default]
    None,
    /// To change this range, in bytes, counted in this lane.
    Change(Range<u64>, usize),
    /// To be alone with this range, in bytes.
    Alone(Range<u64>),
    /// That every change has ended which began earlier.
    Quiet,
}

/// What a command has of the gate.
#[derive(Debug, Default)]
pub(crate) enum Hold {
    #[default]
    Nothing,
    Pass(Pass),
    Ticket {
        ticket: Ticket,
        drained: bool,
    },
}

/// The most scratch memory that an operation has, in bytes: a multiple of every block size. It is also the most that is
/// compared in one step.
pub const MAX_SCRATCH: u64 = 64 << 10;

/// What a command may keep for the next: data-in in bytes, and a number of extents. There are as many commands as a
/// transport has places for them, and most of them are never again as long as one has been once.
pub(crate) const KEEP_DATA: usize = 256;
pub(crate) const KEEP_EXTENTS: usize = 16;

impl Command {
    /// Room for one command at a time.
    pub fn new() -> Self {
        Self::default()
    }

    /// What to give to the initiator as data-in, when the command is [`Done`]. Empty where the disk has done that.
    #[inline]
    pub fn data_in(&self) -> &[u8] {
        if self.touched { &self.response } else { &[] }
    }

    /// Whether it was [begun as a transfer](crate::LogicalUnit::begin_transfer).
    #[inline]
    pub fn is_transfer(&self) -> bool {
        !self.touched
    }

    /// The memory of the disk operation that says [`Memory::Scratch`], as long as the operation and never more than
    /// [`MAX_SCRATCH`]. `data` is that of [`begin`](crate::LogicalUnit::begin).
    ///
    /// It is made when it is first asked for, so that a caller who has to be sparing with it can put the operation off;
    /// and it is let go of by the command's next step. Whoever runs the operation may take it meanwhile, and
    /// [puts it back](Self::put_scratch) before that step.
    pub fn scratch(&mut self, data: &dyn DataOut) -> &mut Vec<u8> {
        if self.scratch.is_empty() {
            self.scratch = vec![0; self.piece];
            if let Work::Fill { block, .. } = self.work {
                fill(&mut self.scratch, block as usize, data);
            }
        }
        &mut self.scratch
    }

    /// Puts back the memory that was taken for an operation, with what the operation has made of it.
    pub fn put_scratch(&mut self, scratch: Vec<u8>) {
        self.scratch = scratch;
    }

    /// Ready for another, when what [`data_in`](Self::data_in) returns has been given to the initiator; and keeps little
    /// memory until then.
    pub fn recycle(&mut self) {
        self.begin();
    }

    /// Ready for another: nothing is to be done after a transfer.
    #[inline]
    pub(crate) fn begin(&mut self) {
        if self.touched {
            self.reset();
        }
        debug_assert!(
            matches!((&self.hold, self.out), (Hold::Nothing, None)),
            "a command that is under way cannot begin another"
        );
    }

    pub(crate) fn reset(&mut self) {
        self.moved = 0;
        self.out = None;
        self.touched = false;
        self.work = Work::Idle;
        self.admission = Admission::None;
        self.flush = false;
        self.medium = None;
        self.piece = 0;
        self.scratch = Vec::new();
        self.response.clear();
        self.extents.clear();
        self.response.shrink_to(KEEP_DATA);
        self.extents.shrink_to(KEEP_EXTENTS);
    }

    /// The first bytes, at most `most`, of a parameter list of `len` bytes, which `task` must have.
    pub(crate) fn take_list(
        &mut self,
        task: &Task<'_>,
        data: &dyn DataOut,
        len: usize,
        most: usize,
    ) -> Result<Vec<u8>, Refusal> {
        if len as u64 > task.data_out {
            return Err(Refusal::Overrun(len as u64));
        }
        let mut list = vec![0; len.min(most)];
        data.read_at(0, &mut list);
        self.moved = len as u64;
        Ok(list)
    }

    /// Ends the command with what is in `response`, as far as `allocated` and the initiator have room for it (SPC-5,
    /// 4.2.5.6).
    pub(crate) fn respond(&mut self, task: &Task<'_>, allocated: usize) -> Result<Step, Refusal> {
        self.response.truncate(allocated);
        let moved = self.response.len() as u64;
        if moved > task.data_in { Err(Refusal::Overrun(moved)) } else { Ok(Step::good(moved)) }
    }
}

impl DiskOp {
    /// What it is about, in bytes.
    pub(crate) fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
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
