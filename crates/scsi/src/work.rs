//! Commands as sequences of disk operations.
//!
//! | command | operations |
//! |---|---|
//! | READ, WRITE, SYNCHRONIZE CACHE | one |
//! | READ with FUA, where there is a write cache | a flush, then the read |
//! | UNMAP, WRITE SAME of zeroes | one per range, or per part of it that the disk takes at once |
//! | WRITE SAME of anything else | writes of the block many times over |
//! | VERIFY | reads, each compared with the data that was given, if any was |
//! | WRITE AND VERIFY | a write, then those reads |
//! | COMPARE AND WRITE | reads, each compared; then a write |
//!
//! What is read, or written many times over, is at most [`MAX_SCRATCH`] bytes at a time: neither the memory that a
//! command takes nor what one step of it compares depends on how much it is about.

use std::ops::Range;

use egret_disk::Op;

use crate::sense::{Code, Key, Sense};
use crate::step::{DataOut, DiskOp, MAX_SCRATCH, Memory, make_stable};

/// How much of the initiator's data is looked at at once, in bytes.
const LOOK: usize = 4096;

/// What is left to do of a command.
#[derive(Debug, Default)]
pub(crate) enum Work {
    #[default]
    Idle,
    /// One operation.
    Once(Option<DiskOp>),
    /// A flush, and then this.
    FlushThen(DiskOp),
    /// `op` on each of the command's extents, at most `limit` bytes at a time.
    Ranges {
        op: Op,
        limit: u64,
    },
    /// Writes of the block that the initiator gives, of `block` bytes, one after the other.
    Fill {
        offset: u64,
        left: u64,
        block: u64,
        fua: bool,
    },
    Verify(Verify),
    /// Reads of `len` bytes, of which the first `compared` are known to be as they should; then the write.
    CompareAndWrite {
        offset: u64,
        len: u64,
        compared: u64,
        write: DiskOp,
        is_written: bool,
    },
}

/// Reads of a range, and what they are compared with. In bytes.
#[derive(Debug)]
pub(crate) struct Verify {
    /// The write that comes first.
    pub(crate) write: Option<DiskOp>,
    pub(crate) offset: u64,
    pub(crate) left: u64,
    /// How much of the range has been compared.
    pub(crate) done: u64,
    pub(crate) against: Against,
    pub(crate) block: u64,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Against {
    /// Nothing: that it can be read is enough.
    Nothing,
    /// Byte by byte with the data given.
    Data,
    /// Every block with the one given.
    Block,
}

impl Work {
    /// The next disk operation, if there is another; `extents` are the command's.
    pub(crate) fn next(&mut self, extents: &mut [Range<u64>]) -> Option<DiskOp> {
        match self {
            Self::Idle => None,
            Self::Once(op) => op.take(),
            Self::FlushThen(op) => {
                *self = Self::Once(Some(*op));
                Some(DiskOp::FLUSH)
            }
            Self::Ranges { op, limit } => extents.last_mut().map(|extent| {
                let (offset, len) = (extent.start, (extent.end - extent.start).min(*limit));
                extent.start += len;
                DiskOp { op: *op, offset, len, memory: Memory::None }
            }),
            Self::Fill { left: 0, .. } => None,
            Self::Fill { offset, left, fua, .. } => {
                let (at, len) = (*offset, MAX_SCRATCH.min(*left));
                (*offset, *left) = (at + len, *left - len);
                Some(DiskOp { op: Op::Write { fua: *fua }, offset: at, len, memory: Memory::Scratch })
            }
            Self::Verify(Verify { write: write @ Some(_), .. }) => write.take(),
            Self::Verify(Verify { offset, left, done, .. }) => read(*offset + *done, *left),
            Self::CompareAndWrite { offset, len, compared, write, is_written } => {
                read(*offset + *compared, *len - *compared)
                    .or_else(|| (!std::mem::replace(is_written, true)).then_some(*write))
            }
        }
    }

    /// Whether there is another.
    pub(crate) fn goes_on(&self, extents: &[Range<u64>]) -> bool {
        match self {
            Self::Idle => false,
            Self::Once(op) => op.is_some(),
            Self::FlushThen(_) => true,
            Self::Ranges { .. } => !extents.is_empty(),
            Self::Fill { left, .. } => *left > 0,
            Self::Verify(Verify { write, left, .. }) => write.is_some() || *left > 0,
            Self::CompareAndWrite { is_written, .. } => !is_written,
        }
    }

    /// Has everything that is left to write be stable when it ends.
    pub(crate) fn make_stable(&mut self) {
        match self {
            Self::Idle | Self::Once(None) | Self::Verify(Verify { write: None, .. }) => {}
            Self::Once(Some(op)) | Self::FlushThen(op) | Self::Verify(Verify { write: Some(op), .. }) => {
                make_stable(&mut op.op)
            }
            Self::Ranges { op, .. } => make_stable(op),
            Self::Fill { fua, .. } => *fua = true,
            Self::CompareAndWrite { write, .. } => make_stable(&mut write.op),
        }
    }

    /// Forgets what was compared: it may be different now.
    pub(crate) fn begin_again(&mut self) {
        if let Self::CompareAndWrite { compared, is_written, .. } = self {
            (*compared, *is_written) = (0, false);
        }
    }

    /// Looks at what the last operation has `read`.
    pub(crate) fn absorb(&mut self, read: &[u8], data: &dyn DataOut) -> Result<(), Sense> {
        match self {
            Self::Verify(verify) => verify.absorb(read, data),
            Self::CompareAndWrite { compared, .. } => {
                if let Some(at) = difference(read, data, *compared) {
                    // SBC-4, COMPARE AND WRITE: where in the data it is.
                    return Err(Sense::new(Key::Miscompare, Code::MISCOMPARE).with(*compared + at));
                }
                *compared += read.len() as u64;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// A read of the first of `left` bytes to compare; `None` if there are none left.
fn read(offset: u64, left: u64) -> Option<DiskOp> {
    (left > 0).then_some(DiskOp { op: Op::Read, offset, len: left.min(MAX_SCRATCH), memory: Memory::Scratch })
}

/// Whether the first `len` bytes of the data are all zeroes.
pub(crate) fn is_zeroes(data: &dyn DataOut, len: u64) -> bool {
    let mut given = [0; LOOK];
    (0..len).step_by(LOOK).all(|at| {
        let given = &mut given[..(len - at).min(LOOK as u64) as usize];
        data.read_at(at, given);
        given.iter().all(|byte| *byte == 0)
    })
}

/// Fills `scratch` with copies of the first `block` bytes of the data, of which it has a multiple.
pub(crate) fn fill(scratch: &mut [u8], block: usize, data: &dyn DataOut) {
    let (first, rest) = scratch.split_at_mut(block);
    data.read_at(0, first);
    rest.chunks_exact_mut(block).for_each(|copy| copy.copy_from_slice(first));
}

impl Verify {
    fn absorb(&mut self, read: &[u8], data: &dyn DataOut) -> Result<(), Sense> {
        let different = match self.against {
            Against::Nothing => None,
            Against::Data => difference(read, data, self.done),
            Against::Block => difference_from_block(read, data, self.block as usize),
        };
        if let Some(at) = different {
            let lba = (self.offset + self.done + at) / self.block;
            return Err(Sense::new(Key::Miscompare, Code::MISCOMPARE).with(lba));
        }
        let len = read.len() as u64;
        self.done += len;
        self.left -= len;
        Ok(())
    }
}

/// Where `read` is first different from the data from `at` on.
fn difference(read: &[u8], data: &dyn DataOut, at: u64) -> Option<u64> {
    let mut given = [0; LOOK];
    read.chunks(LOOK).enumerate().find_map(|(i, part)| {
        let (done, given) = (i * LOOK, &mut given[..part.len()]);
        data.read_at(at + done as u64, given);
        differs(part, given).map(|first| (done + first) as u64)
    })
}

/// Where one of the blocks in `read`, whichever, is first different from the block that the data begins with. Each byte
/// of the data is read once, however many blocks there are.
fn difference_from_block(read: &[u8], data: &dyn DataOut, block: usize) -> Option<u64> {
    let mut given = [0; LOOK];
    let mut first: Option<usize> = None;
    for at in (0..block).step_by(LOOK) {
        let given = &mut given[..(block - at).min(LOOK)];
        data.read_at(at as u64, given);
        let starts = (at..read.len()).step_by(block);
        let found = { starts }.find_map(|start| Some(start + differs(&read[start..start + given.len()], given)?));
        first = first.into_iter().chain(found).min();
    }
    first.map(|at| at as u64)
}

fn differs(a: &[u8], b: &[u8]) -> Option<usize> {
    if a == b { None } else { a.iter().zip(b).position(|(a, b)| a != b) }
}
