//! What a device model asks of a disk, and what it gets back.

use egret_vring::memory::{Access, Lent};
use rustix::io::Errno;

use crate::engine_set::DiskSlot;

/// Identifies a request to whoever pushed it. Engines carry it and never look inside.
///
/// It has two parts: the source of the loop that pushed the request, and the request's slot in that source's own table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestToken(pub u64);

impl RequestToken {
    /// For the request in `slot` of the source that its loop knows by the index `source`.
    #[inline]
    pub const fn new(source: u32, slot: u16) -> Self {
        Self((source as u64) << 16 | slot as u64)
    }

    /// The source's index.
    #[inline]
    pub const fn source(self) -> u32 {
        (self.0 >> 16) as u32
    }

    /// The request's slot.
    #[inline]
    pub const fn slot(self) -> u16 {
        self.0 as u16
    }
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fill the buffers from the disk.
    Read,
    /// Write the buffers to the disk.
    Write {
        /// Complete only when the data is on stable storage (force unit access).
        fua: bool,
    },
    /// Complete only when every write that completed before is on stable storage.
    Flush,
    /// The range's content is no longer needed; what it reads as afterwards is undefined.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// The storage behind the range may be given back.
        unmap: bool,
        /// Complete only when the zeroes are on stable storage.
        fua: bool,
    },
}

impl Op {
    /// What it does to its buffers.
    #[inline]
    pub const fn access(self) -> Access {
        match self {
            Self::Read => Access::Write,
            Self::Write { .. } | Self::Flush | Self::Discard | Self::WriteZeroes { .. } => Access::Read,
        }
    }
}

/// One request to one disk.
///
/// Its buffers travel with it and come back with its [`Completion`], so that a device model that recycles them
/// allocates nothing per request. A disk takes one whose buffers are [`Lent`]; one that is still to be given to a disk has
/// those that its model made.
#[derive(Debug)]
pub struct Request<B = Lent> {
    /// What to do.
    pub op: Op,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How much of the disk it touches, in bytes: for `Read` and `Write` the sum of the buffers' lengths, for `Flush`
    /// zero.
    pub len: u64,
    /// The memory to fill or to write; empty for the other operations.
    pub buffers: B,
    /// Comes back with the completion.
    pub token: RequestToken,
}

/// What of what somebody has asked for a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartOf {
    /// All of what was asked for, in bytes.
    pub whole: u64,
    /// It is all of that, or the first part.
    pub is_first: bool,
}

impl PartOf {
    /// All of what was asked for: so many bytes.
    pub const fn all(whole: u64) -> Self {
        Self { whole, is_first: true }
    }
}

/// A request that has ended.
#[derive(Debug)]
pub struct Completion<B = Lent> {
    /// The request's own.
    pub token: RequestToken,
    /// Success, or the error that the guest's status is made from. `Ok` means all of it: a short transfer was
    /// continued or became an error.
    pub result: Result<(), Errno>,
    /// The request's buffers, for use in another.
    pub buffers: B,
}

/// What an [`EngineSet`](crate::EngineSet) gives back of a request.
#[derive(Debug)]
pub struct Ended {
    /// How it ended.
    pub completion: Completion,
    /// What its engine could not do, if it failed there: boxed, so that requests that succeed carry a word. `None` for
    /// requests that make no sense, and for those whose guest took their memory away.
    pub failed: Option<Box<FailedRequest>>,
}

/// A request that its engine failed to run. With the buffers of its completion it can be made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedRequest {
    /// The disk.
    pub slot: DiskSlot,
    /// What was asked for.
    pub op: Op,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How much of the disk it touches, in bytes.
    pub len: u64,
    /// What the system says.
    pub errno: Errno,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_its_source_and_its_slot_whatever_they_are() {
        for (source, slot) in
            [(0, 0), (1, 0), (0, 1), (7, 300), (1 << 16, u16::MAX), (u32::MAX, 1), (u32::MAX, u16::MAX)]
        {
            let token = RequestToken::new(source, slot);
            assert_eq!((token.source(), token.slot()), (source, slot));
        }
    }

    #[test]
    fn a_read_alone_changes_its_buffers() {
        assert_eq!(Op::Read.access(), Access::Write);
        let others = [Op::Write { fua: true }, Op::Flush, Op::Discard, Op::WriteZeroes { unmap: true, fua: false }];
        assert!(others.iter().all(|op| op.access() == Access::Read));
    }
}
