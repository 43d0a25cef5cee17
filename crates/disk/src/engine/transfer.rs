//! A job that the kernel moves in one piece or in several.

#![allow(unsafe_code)]

use egret_vring::memory::IoVec;
use rustix::io::Errno;

use crate::blocking::cut_off;
use crate::buffers;
use crate::job::Job;
use crate::request::Op;

/// A job that the kernel runs, and how much of it is done.
pub(crate) struct Transfer {
    job: Box<Job>,
    /// Bytes.
    moved: u64,
    /// What the kernel moves next, where that is not all of the job. The job's own buffers go back as they came.
    part: Vec<IoVec>,
}

/// What to do with a transfer that the kernel has returned.
pub(crate) enum Next {
    /// Give it to the kernel again: there is more to move.
    Again,
    /// It is over.
    Over(Result<(), Errno>),
}

impl Transfer {
    pub(crate) fn new(job: Box<Job>) -> Self {
        Self { job, moved: 0, part: Vec::new() }
    }

    pub(crate) fn slot(&self) -> u32 {
        self.job.slot
    }

    pub(crate) fn op(&self) -> Op {
        self.job.request.op
    }

    /// Where the kernel goes on, in bytes.
    pub(crate) fn offset(&self) -> u64 {
        self.job.request.offset + self.moved
    }

    /// The memory that the kernel goes on with. Its address stays the same until the transfer ends, is
    /// [`advance`](Self::advance)d or [`cut`](Self::cut), wherever the transfer itself is moved to.
    pub(crate) fn buffers(&self) -> &[IoVec] {
        if self.part.is_empty() { &self.job.request.buffers } else { &self.part }
    }

    /// How many bytes are still to be moved.
    pub(crate) fn left(&self) -> u64 {
        self.job.request.len - self.moved
    }

    /// Has the kernel move no more than `most` bytes when it goes on. It does not have the transfer now.
    pub(crate) fn cut(&mut self, most: u64) {
        buffers::cut(&self.job.request.buffers, self.moved, most, &mut self.part);
    }

    /// Learns what the kernel returned: bytes, or a negated errno. `block` is what direct I/O moves, in bytes.
    pub(crate) fn advance(&mut self, result: i64, block: u32) -> Next {
        if result < 0 {
            let errno = Errno::from_raw_os_error(-result as i32);
            return if errno == Errno::INTR { Next::Again } else { Next::Over(Err(errno)) };
        }
        let request = &self.job.request;
        self.moved += result as u64;
        if self.moved >= request.len {
            return Next::Over(Ok(()));
        }
        // Direct I/O stops in the middle of a block only where the image ends.
        let ended = result == 0 || !(result as u64).is_multiple_of(block.into());
        if !ended {
            self.cut(u64::MAX);
            return Next::Again;
        }
        Next::Over(Err(cut_off(request.op == Op::Read)))
    }

    /// Gives up on it.
    pub(crate) fn into_job(self) -> Box<Job> {
        self.job
    }

    pub(crate) fn finish(self, result: Result<(), Errno>) -> Box<Job> {
        self.job.ended(result)
    }
}

#[cfg(test)]
mod tests {
    use egret_vring::memory::Lent;

    use super::*;
    use crate::request::{Request, RequestToken};

    fn transfer(op: Op, memory: &mut [u8]) -> Transfer {
        let (left, right) = memory.split_at_mut(1024);
        // SAFETY: the memory outlives the transfer in every test here.
        let buffers = unsafe {
            let pieces = [left, right].map(|part| IoVec::new(part.as_mut_ptr(), part.len()));
            Lent::assume(pieces.into())
        };
        let len = memory.len() as u64;
        Transfer::new(Job::new(0, Request { op, offset: 8192, len, buffers, token: RequestToken(1) }))
    }

    #[test]
    fn a_short_transfer_goes_on_where_it_stopped_and_keeps_its_buffers() {
        let mut memory = [1u8; 4096];
        let mut transfer = transfer(Op::Read, &mut memory);
        assert_eq!(transfer.left(), 4096);
        assert!(matches!(transfer.advance(512, 512), Next::Again));
        assert_eq!((transfer.offset(), transfer.buffers().len(), transfer.buffers()[0].len()), (8704, 2, 512));
        assert_eq!(transfer.left(), 3584);
        assert!(matches!(transfer.advance(-4, 512), Next::Again));
        assert!(matches!(transfer.advance(1024, 512), Next::Again));
        assert_eq!((transfer.offset(), transfer.buffers().len(), transfer.buffers()[0].len()), (9728, 1, 2560));
        assert!(matches!(transfer.advance(2560, 512), Next::Over(Ok(()))));
        let buffers = transfer.finish(Ok(())).request.buffers;
        assert_eq!(buffers.iter().map(IoVec::len).collect::<Vec<_>>(), [1024, 3072]);
    }

    #[test]
    fn a_read_past_the_end_fails() {
        for (moved, block) in [(0, 1), (0, 512), (1000, 512)] {
            let mut memory = [1u8; 4096];
            let mut transfer = transfer(Op::Read, &mut memory);
            assert!(matches!(transfer.advance(moved, block), Next::Over(Err(Errno::IO))));
        }
    }

    #[test]
    fn a_write_that_moves_nothing_fails() {
        let mut memory = [1u8; 4096];
        let mut transfer = transfer(Op::Write { fua: false }, &mut memory);
        assert!(matches!(transfer.advance(0, 1), Next::Over(Err(Errno::NOSPC))));
    }
}
