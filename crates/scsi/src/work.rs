//! Commands as sequences of disk operations.
//!
//! | command | operations |
//! |---|---|
//! | READ, WRITE, SYNCHRONIZE CACHE | one |
//! | UNMAP, WRITE SAME of zeroes | one per range, or per part of it that the disk takes at once |
//! | WRITE SAME of anything else | writes of the block many times over |
//! | VERIFY | reads, each compared with the data that was given, if any was |
//! | WRITE AND VERIFY | a write, then those reads |
//! | COMPARE AND WRITE | a read, compared; then a write |

use egret_disk::Op;

use crate::command::{Command, DataOut, DiskOp, Memory};
use crate::sense::{Code, Key, Sense};

/// How much is read or written at once by a command that does it piece by piece, in bytes: a multiple of every block
/// size, and little enough for many commands at a time.
const PIECE: u64 = 256 << 10;

/// What is left to do of a command.
#[derive(Debug, Default)]
pub(crate) enum Work {
    #[default]
    Idle,
    /// One operation.
    Once(Option<DiskOp>),
    /// `op` on each of the command's extents, at most `limit` bytes at a time.
    Ranges {
        op: Op,
        limit: u64,
    },
    /// Writes of the scratch memory, one after the other.
    Fill {
        offset: u64,
        left: u64,
        fua: bool,
    },
    Verify(Verify),
    /// A read and a write of `len` bytes.
    CompareAndWrite {
        phase: Phase,
        offset: u64,
        len: u64,
        fua: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Read,
    Write,
    End,
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
    /// How much is being read.
    pub(crate) reading: u64,
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

impl Command {
    /// The next disk operation, if there is another.
    pub(crate) fn issue(&mut self) -> Option<DiskOp> {
        let mut op = match &mut self.work {
            Work::Idle => None,
            Work::Once(op) => op.take(),
            Work::Ranges { op, limit } => self.extents.last_mut().map(|extent| {
                let (offset, len) = (extent.start, (extent.end - extent.start).min(*limit));
                extent.start += len;
                DiskOp { op: *op, offset, len, memory: Memory::None }
            }),
            Work::Fill { left: 0, .. } => None,
            Work::Fill { offset, left, fua } => {
                let (at, len) = (*offset, (self.scratch.len() as u64).min(*left));
                (*offset, *left) = (at + len, *left - len);
                self.scratch.truncate(len as usize);
                Some(DiskOp { op: Op::Write { fua: *fua }, offset: at, len, memory: Memory::Scratch })
            }
            Work::Verify(verify) => verify.issue(&mut self.scratch),
            Work::CompareAndWrite { phase: Phase::End, .. } => None,
            &mut Work::CompareAndWrite { phase: Phase::Read, offset, len, .. } => {
                self.scratch.clear();
                self.scratch.resize(len as usize, 0);
                Some(DiskOp { op: Op::Read, offset, len, memory: Memory::Scratch })
            }
            &mut Work::CompareAndWrite { phase: Phase::Write, offset, len, fua } => {
                Some(DiskOp { op: Op::Write { fua }, offset, len, memory: Memory::DataOut(len) })
            }
        };
        while self.extents.pop_if(|extent| extent.is_empty()).is_some() {}
        if op.is_none() && std::mem::take(&mut self.flush) {
            op = Some(DiskOp::FLUSH);
        }
        self.out = op.map(|op| op.op);
        op
    }

    /// Looks at what the operation has done that [`issue`](Self::issue) returned last.
    pub(crate) fn absorb(&mut self, data: &dyn DataOut) -> Result<(), Sense> {
        match &mut self.work {
            Work::Verify(verify) => verify.absorb(&self.scratch, data),
            Work::CompareAndWrite { phase: phase @ Phase::Read, .. } => {
                if let Some(at) = difference(&self.scratch, data, 0, u64::MAX) {
                    // SBC-4, COMPARE AND WRITE: where in the data it is.
                    return Err(Sense::new(Key::Miscompare, Code::MISCOMPARE).with(at));
                }
                *phase = Phase::Write;
                Ok(())
            }
            Work::CompareAndWrite { phase, .. } => {
                *phase = Phase::End;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Makes the scratch memory a piece of as many copies of the block that the initiator gives as `len` bytes have.
    /// Returns whether the block is all zeroes.
    pub(crate) fn take_pattern(&mut self, data: &dyn DataOut, block: u64, len: u64) -> bool {
        self.scratch.clear();
        self.scratch.resize(block as usize, 0);
        data.read_at(0, &mut self.scratch);
        if self.scratch.iter().all(|byte| *byte == 0) {
            return true;
        }
        let copies = len.min(PIECE).max(block) / block;
        self.scratch.reserve_exact((block * (copies - 1)) as usize);
        for _ in 1..copies {
            self.scratch.extend_from_within(..block as usize);
        }
        false
    }
}

impl DiskOp {
    pub(crate) const FLUSH: Self = Self { op: Op::Flush, offset: 0, len: 0, memory: Memory::None };
}

impl Verify {
    fn issue(&mut self, scratch: &mut Vec<u8>) -> Option<DiskOp> {
        if let Some(write) = self.write.take() {
            return Some(write);
        }
        let len = self.left.min(PIECE);
        if len == 0 {
            return None;
        }
        scratch.clear();
        scratch.resize(len as usize, 0);
        self.reading = len;
        Some(DiskOp { op: Op::Read, offset: self.offset + self.done, len, memory: Memory::Scratch })
    }

    fn absorb(&mut self, read: &[u8], data: &dyn DataOut) -> Result<(), Sense> {
        // Nothing is being read while the write is out.
        let len = std::mem::take(&mut self.reading);
        let different = match self.against {
            _ if len == 0 => None,
            Against::Nothing => None,
            Against::Data => difference(read, data, self.done, u64::MAX),
            Against::Block => difference(read, data, 0, self.block),
        };
        if let Some(at) = different {
            let lba = (self.offset + self.done + at) / self.block;
            return Err(Sense::new(Key::Miscompare, Code::MISCOMPARE).with(lba));
        }
        self.done += len;
        self.left -= len;
        Ok(())
    }
}

/// Where `read` is first different from the data that begins at `at`, which begins anew every `period` bytes.
fn difference(read: &[u8], data: &dyn DataOut, at: u64, period: u64) -> Option<u64> {
    let mut given = [0; 4096];
    let mut done = 0;
    while done < read.len() {
        let from = done as u64 % period;
        let len = (read.len() - done).min(given.len()).min((period - from).min(4096) as usize);
        data.read_at(at + from, &mut given[..len]);
        let part = &read[done..done + len];
        if part != &given[..len] {
            let first = part.iter().zip(&given).position(|(a, b)| a != b)?;
            return Some((done + first) as u64);
        }
        done += len;
    }
    None
}
