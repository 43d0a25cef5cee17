//! Runs any request on any disk by blocking system calls: what worker threads do.
//!
//! This is the one place that knows how to do what the kernel's asynchronous interfaces do not: requests that direct
//! I/O refuses as they are, discards, zeroes. It is straight-line code because it may wait wherever it likes.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::buffers::{self, Aligned};
use crate::disk::{Backing, Disk};
use crate::engine::Job;
use crate::geometry::{self, SECTOR};
use crate::request::{IoVec, Op};

/// As much as one system call takes (`UIO_MAXIOV`).
pub(crate) const MAX_IOVECS: usize = 1024;
/// The most memory that a worker keeps for copies, in bytes.
const SCRATCH: u64 = 1 << 20;

/// Memory that a worker keeps from one request to the next.
#[derive(Default)]
pub(crate) struct Scratch {
    copy: Option<Aligned>,
    rest: Vec<IoVec>,
}

impl Scratch {
    /// Aligned memory of at least `len` bytes (at most [`SCRATCH`]), with anything in it.
    fn copy(&mut self, disk: &Disk, len: u64) -> (&mut Aligned, &mut Vec<IoVec>) {
        let len = len.min(SCRATCH).next_power_of_two() as usize;
        let align = disk.alignment.memory.max(disk.alignment.offset).max(4096) as usize;
        if self.copy.as_ref().is_some_and(|copy| copy.len() < len || copy.align() < align) {
            self.copy = None;
        }
        (self.copy.get_or_insert_with(|| Aligned::zeroed(len, align)), &mut self.rest)
    }
}

/// Runs a request to its end.
pub(crate) fn run(disk: &Disk, job: &Job, scratch: &mut Scratch) -> Result<(), Errno> {
    let request = &job.request;
    let (offset, len, buffers) = (request.offset, request.len, request.buffers.as_slice());
    match request.op {
        Op::Read if fits(disk, offset, buffers) => transfer(disk, Way::Read, offset, buffers, &mut scratch.rest)?,
        Op::Read => read_by_copy(disk, offset, len, buffers, scratch)?,
        Op::Write { fua } => write(disk, fua, offset, len, buffers, scratch)?,
        Op::Flush => sync(disk)?,
        Op::Discard => together(disk, offset..offset + len, || discard(disk, offset, len))?,
        Op::WriteZeroes { unmap } => write_zeroes(disk, offset, len, unmap, scratch)?,
    }
    if job.sync_after { sync(disk) } else { Ok(()) }
}

/// Whether direct I/O takes these buffers at this offset as they are; anything fits the page cache.
pub(crate) fn fits(disk: &Disk, offset: u64, buffers: &[IoVec]) -> bool {
    let block = disk.alignment.offset as usize - 1;
    let memory = disk.alignment.memory as usize - 1;
    // Both are powers of two: a bit that is set below them anywhere is an odd address or an odd length.
    let (odd_len, odd_base) = buffers
        .iter()
        .fold((offset as usize, 0), |(lens, bases), piece| (lens | piece.len(), bases | piece.base() as usize));
    odd_len & block == 0 && odd_base & memory == 0
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Read,
    Write { through: bool },
}

/// Moves all of the buffers' bytes, continuing what the kernel does by halves. A read past the end of the image finds
/// zeroes there.
fn transfer(disk: &Disk, way: Way, offset: u64, buffers: &[IoVec], rest: &mut Vec<IoVec>) -> Result<(), Errno> {
    let fd = disk.fd();
    let total: u64 = buffers.iter().map(|piece| piece.len() as u64).sum();
    let mut moved = 0;
    let mut left = buffers;
    while moved < total {
        let count = left.len().min(MAX_IOVECS) as libc::c_int;
        let iovecs = left.as_ptr().cast::<libc::iovec>();
        let at = (offset + moved) as libc::off_t;
        // SAFETY: `IoVec` is a transparent iovec, each of memory that stays mapped until the request completes, which
        // is after this call.
        let result = unsafe {
            match way {
                Way::Read => libc::preadv(fd, iovecs, count, at),
                Way::Write { through: false } => libc::pwritev(fd, iovecs, count, at),
                Way::Write { through: true } => libc::pwritev2(fd, iovecs, count, at, libc::RWF_DSYNC),
            }
        };
        let now = match result {
            -1 => match last_error() {
                Errno::INTR => continue,
                e => return Err(e),
            },
            now => now as u64,
        };
        moved += now;
        // Direct I/O stops in the middle of a block only where the image ends.
        let ended = now == 0 || !now.is_multiple_of(disk.alignment.offset.into());
        if ended && moved < total {
            if way == Way::Read {
                buffers::zero(buffers, moved);
                return Ok(());
            }
            return Err(Errno::NOSPC);
        }
        if moved < total {
            buffers::cut(buffers, moved, u64::MAX, rest);
            left = rest;
        }
    }
    Ok(())
}

/// Fills buffers with what is in the page cache, as far as that goes, and returns how many bytes it was. The one call
/// here that does not wait for the storage.
///
/// # Errors
///
/// `EAGAIN` if not even the first byte is there; `EOPNOTSUPP` if the file system cannot read without waiting; whatever
/// else the kernel says, `EFAULT` for memory that its owner has taken away among it.
pub(crate) fn read_cached(disk: &Disk, offset: u64, buffers: &[IoVec]) -> Result<u64, Errno> {
    let (iovecs, count) = (buffers.as_ptr().cast::<libc::iovec>(), buffers.len() as libc::c_int);
    // SAFETY: as in `transfer`.
    match unsafe { libc::preadv2(disk.fd(), iovecs, count, offset as libc::off_t, libc::RWF_NOWAIT) } {
        -1 => Err(last_error()),
        moved => Ok(moved as u64),
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

fn sync(disk: &Disk) -> Result<(), Errno> {
    disk.file().map_or(Ok(()), rustix::fs::fdatasync)
}

/// Runs `what` while no sub-block write is under way in `bytes`.
fn together<T>(disk: &Disk, bytes: Range<u64>, what: impl FnOnce() -> T) -> T {
    let Some(gate) = &disk.gate else { return what() };
    gate.enter(&bytes);
    let result = what();
    gate.leave(&bytes);
    result
}

/// Runs `what` while no write at all is under way in `bytes`.
fn alone<T>(disk: &Disk, bytes: Range<u64>, what: impl FnOnce() -> T) -> T {
    let Some(gate) = &disk.gate else { return what() };
    gate.enter_alone(&bytes);
    let result = what();
    gate.leave_alone(&bytes);
    result
}

fn write(disk: &Disk, fua: bool, offset: u64, len: u64, buffers: &[IoVec], scratch: &mut Scratch) -> Result<(), Errno> {
    let mut once = |through| {
        let way = Way::Write { through };
        if fits(disk, offset, buffers) {
            together(disk, offset..offset + len, || transfer(disk, way, offset, buffers, &mut scratch.rest))
        } else {
            write_by_copy(disk, way, offset, len, Some(buffers), scratch)
        }
    };
    if !fua {
        return once(false);
    }
    if disk.able.write_through.load(Ordering::Relaxed) {
        match once(true) {
            Err(e) if is_unsupported(e) => disk.able.write_through.store(false, Ordering::Relaxed),
            other => return other,
        }
    }
    once(false)?;
    sync(disk)
}

/// The blocks around `bytes`.
fn whole_blocks(disk: &Disk, bytes: &Range<u64>) -> Range<u64> {
    let block = u64::from(disk.alignment.offset);
    bytes.start / block * block..bytes.end.div_ceil(block) * block
}

/// Calls `each` with the parts of `blocks` that fit a worker's memory.
fn in_parts(blocks: Range<u64>, mut each: impl FnMut(Range<u64>) -> Result<(), Errno>) -> Result<(), Errno> {
    let mut start = blocks.start;
    while start < blocks.end {
        let end = blocks.end.min(start + SCRATCH);
        each(start..end)?;
        start = end;
    }
    Ok(())
}

/// Reads whole blocks to memory of ours and copies from there.
fn read_by_copy(disk: &Disk, offset: u64, len: u64, buffers: &[IoVec], scratch: &mut Scratch) -> Result<(), Errno> {
    let wanted = offset..offset + len;
    let blocks = whole_blocks(disk, &wanted);
    let (copy, rest) = scratch.copy(disk, blocks.end - blocks.start);
    in_parts(blocks, |part| {
        let memory = &mut copy.bytes()[..(part.end - part.start) as usize];
        read_blocks(disk, part.start, memory, rest)?;
        let here = wanted.start.max(part.start)..wanted.end.min(part.end);
        let found = &memory[(here.start - part.start) as usize..(here.end - part.start) as usize];
        buffers::scatter(buffers, here.start - wanted.start, found);
        Ok(())
    })
}

/// Copies to memory of ours, around which the blocks' old content is read first, and writes whole blocks from there.
/// Without buffers zeroes are written.
fn write_by_copy(
    disk: &Disk,
    way: Way,
    offset: u64,
    len: u64,
    buffers: Option<&[IoVec]>,
    scratch: &mut Scratch,
) -> Result<(), Errno> {
    let wanted = offset..offset + len;
    let blocks = whole_blocks(disk, &wanted);
    let block = disk.alignment.offset as usize;
    let (copy, rest) = scratch.copy(disk, blocks.end - blocks.start);
    let patch = || {
        in_parts(blocks.clone(), |part| {
            let memory = &mut copy.bytes()[..(part.end - part.start) as usize];
            let here = wanted.start.max(part.start)..wanted.end.min(part.end);
            if here.start > part.start {
                read_blocks(disk, part.start, &mut memory[..block], rest)?;
            }
            // The last block may be the first one, with both its ends kept.
            if here.end < part.end && (memory.len() > block || here.start == part.start) {
                let last = memory.len() - block;
                read_blocks(disk, part.end - block as u64, &mut memory[last..], rest)?;
            }
            let new = &mut memory[(here.start - part.start) as usize..(here.end - part.start) as usize];
            match buffers {
                Some(buffers) => buffers::gather(buffers, here.start - wanted.start, new),
                None => new.fill(0),
            }
            transfer(disk, way, part.start, &[piece(memory)], rest)
        })
    };
    if blocks == wanted { together(disk, blocks.clone(), patch) } else { alone(disk, blocks.clone(), patch) }
}

fn read_blocks(disk: &Disk, offset: u64, memory: &mut [u8], rest: &mut Vec<IoVec>) -> Result<(), Errno> {
    transfer(disk, Way::Read, offset, &[piece(memory)], rest)
}

fn piece(memory: &mut [u8]) -> IoVec {
    // SAFETY: memory of ours, borrowed mutably by each caller for as long as the piece is used.
    unsafe { IoVec::new(memory.as_mut_ptr(), memory.len()) }
}

/// Discards what it can; it is a hint, and what cannot be discarded is left as it is.
fn discard(disk: &Disk, offset: u64, len: u64) -> Result<(), Errno> {
    let able = &disk.able.discard;
    if !able.load(Ordering::Relaxed) {
        return Ok(());
    }
    let result = match &disk.backing {
        Backing::File(file) => punch(file, offset, len),
        Backing::Device(file) => {
            let block = u64::from(disk.logical_block_size());
            let start = offset.div_ceil(block) * block;
            let end = (offset + len) / block * block;
            if start >= end {
                return Ok(());
            }
            geometry::discard_device(file, start, end - start)
                .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
        }
        Backing::Null { .. } => Ok(()),
    };
    match result {
        Err(e) if is_unsupported(e) => {
            able.store(false, Ordering::Relaxed);
            Ok(())
        }
        other => other,
    }
}

fn punch(file: &impl std::os::fd::AsFd, offset: u64, len: u64) -> Result<(), Errno> {
    rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)
}

fn write_zeroes(disk: &Disk, offset: u64, len: u64, unmap: bool, scratch: &mut Scratch) -> Result<(), Errno> {
    // A file is zeroed to the byte, a device by its blocks; what sticks out of them is written.
    let block = match &disk.backing {
        Backing::Device(_) => u64::from(disk.logical_block_size()),
        _ => u64::from(SECTOR),
    };
    let end = offset + len;
    let inner = offset.div_ceil(block) * block..end / block * block;
    let written = |from: u64, to: u64, scratch: &mut Scratch| {
        if from < to {
            write_by_copy(disk, Way::Write { through: false }, from, to - from, None, scratch)
        } else {
            Ok(())
        }
    };
    if inner.start >= inner.end {
        return written(offset, end, scratch);
    }
    if together(disk, inner.clone(), || zero_blocks(disk, &inner, unmap))? {
        written(offset, inner.start, scratch)?;
        written(inner.end, end, scratch)
    } else {
        written(offset, end, scratch)
    }
}

/// Zeroes by asking the kernel to; false if it cannot.
fn zero_blocks(disk: &Disk, bytes: &Range<u64>, unmap: bool) -> Result<bool, Errno> {
    let Some(file) = disk.file() else { return Ok(true) };
    let try_one = |able: &AtomicBool, flags| {
        if !able.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match rustix::fs::fallocate(file, flags | FallocateFlags::KEEP_SIZE, bytes.start, bytes.end - bytes.start) {
            Ok(()) => Ok(true),
            Err(e) if is_unsupported(e) => {
                able.store(false, Ordering::Relaxed);
                Ok(false)
            }
            // Some file systems refuse some ranges only.
            Err(Errno::INVAL) => Ok(false),
            Err(e) => Err(e),
        }
    };
    Ok((unmap && try_one(&disk.able.punch_hole, FallocateFlags::PUNCH_HOLE)?)
        || try_one(&disk.able.zero_range, FallocateFlags::ZERO_RANGE)?)
}

/// Whether an error says that a thing cannot be done here, rather than that it failed.
pub(crate) fn is_unsupported(e: Errno) -> bool {
    matches!(e, Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY)
}
