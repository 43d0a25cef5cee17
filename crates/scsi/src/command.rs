//! A command under way, and what its caller has to do next.

use std::ops::Range;

use egret_disk::Op;

use crate::kept::Outcome;
use crate::nexus::NexusId;
use crate::persist::ReserveOut;
use crate::sense::{Refusal, Sense};
use crate::step::{DataOut, DiskOp, Memory, Step, Task};
use crate::work::{Work, fill};
use crate::write_fence::{Pass, Ticket};

/// Room for a command under way. Recycled, it needs no memory that it does not have: only what answers with data or is
/// made of several disk operations allocates anything at all.
///
/// In this order, because the first five are all that a transfer touches: they are next to each other.
#[derive(Debug, Default)]
#[repr(C)]
pub struct Command {
    /// What will have been moved if it ends well, in bytes.
    pub(crate) moved: u64,
    pub(crate) hold: Hold,
    /// The operation that is out.
    pub(crate) out: Option<Op>,
    /// How often its nexus had been preempted when it began. Of a transfer that reads, whatever was there before.
    pub(crate) preempted: u32,
    /// Whether anything below may be other than after a reset.
    pub(crate) touched: bool,
    /// How much scratch memory the operation has that is out, in bytes.
    pub(crate) piece: usize,
    pub(crate) work: Work,
    pub(crate) admission: Admission,
    /// Whether the medium is ejected when it ends, or loaded.
    pub(crate) ejects: Option<bool>,
    /// Of one that flushes because it turns the write cache off: how often that had happened by then, and whose it is.
    pub(crate) flushes: Option<(u64, NexusId)>,
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
    /// To change the reservations.
    Reserve(ReserveOut),
}

impl Admission {
    /// Whether it is to change the medium.
    pub(crate) fn changes_medium(&self) -> bool {
        match self {
            Self::Change(..) | Self::Alone(_) => true,
            Self::None | Self::Quiet | Self::Reserve(_) => false,
        }
    }
}

/// What a command has of the fence, or of the unit's reservations.
#[derive(Debug, Default)]
pub(crate) enum Hold {
    #[default]
    Nothing,
    Pass(Pass),
    /// A place among those who wait to be let in.
    Place(Ticket),
    Ticket {
        ticket: Ticket,
        drained: bool,
    },
    /// A place among those who wait to change the reservations.
    Turn(u64),
    /// A change of the reservations is being stored.
    Change(Outcome),
}

/// What a command may keep for the next: data-in in bytes, and a number of extents. There are as many commands as a
/// transport has places for them, and most of them are never again as long as one has been once.
pub(crate) const KEEP_DATA: usize = 256;
pub(crate) const KEEP_EXTENTS: usize = 16;

impl Command {
    /// Room for one command at a time.
    pub fn new() -> Self {
        Self::default()
    }

    /// What to give to the initiator as data-in, when the command is [`Done`](crate::Done). Empty where the disk has done that.
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
    /// [`MAX_SCRATCH`](crate::MAX_SCRATCH). `data` is that of [`begin`](crate::LogicalUnit::begin).
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

    /// The next disk operation, if there is another.
    pub(crate) fn issue(&mut self) -> Option<DiskOp> {
        let op = self.work.next(&mut self.extents);
        while self.extents.pop_if(|extent| extent.is_empty()).is_some() {}
        self.out = op.map(|op| op.op);
        self.piece = op.filter(|op| op.memory == Memory::Scratch).map_or(0, |op| op.len as usize);
        op
    }

    /// Looks at what the operation has done that [`issue`](Self::issue) returned last.
    pub(crate) fn absorb(&mut self, data: &dyn DataOut) -> Result<(), Sense> {
        // Given back here: the operation has ended, and nobody else has the memory any more. Empty where the operation
        // had none of it, as a write of the initiator's data.
        let (read, len) = (std::mem::take(&mut self.scratch), std::mem::take(&mut self.piece));
        debug_assert_eq!(read.len(), len, "the operation's memory was not asked for");
        self.work.absorb(&read, data)
    }

    /// Ready for another, when what [`data_in`](Self::data_in) returns has been given to the initiator; and keeps little
    /// memory until then. Nothing is to be done after a transfer.
    #[inline]
    pub fn recycle(&mut self) {
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
        self.ejects = None;
        self.flushes = None;
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
