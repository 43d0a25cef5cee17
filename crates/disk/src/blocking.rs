//! Runs any request on any disk by blocking system calls: what worker threads do.
//!
//! This is the one place that knows how to do what the kernel's asynchronous interfaces do not: requests that direct
//! I/O refuses as they are, discards, zeroes. It is straight-line code because it may wait wherever it likes; but not
//! for long at a time: what is large is run in parts, and between them other disks have their turn.

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use egret_vring::memory::IoVec;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::buffers::{self, Aligned};
use crate::disk::{Backing, Disk};
use crate::geometry::{self, SECTOR};
use crate::job::Job;
use crate::options::DetectZeroes;
use crate::request::Op;

/// As much as one system call takes (`UIO_MAXIOV`).
pub(crate) const MAX_IOVECS: usize = 1024;
/// Bytes that are moved in one go, by a worker or inside an engine's submission: more than Linux puts into one request
/// (1280 KiB), and little enough for others to wait for.
pub(crate) const PART: u64 = 2 << 20;
/// The same for the parts of what is larger, where several disks share the workers: a core that copies for one of them
/// is had back by the others soon.
pub(crate) const SHARED_PART: u64 = 256 << 10;
/// The most memory that a worker keeps for copies, in bytes; what is copied goes in parts of that.
const SCRATCH: u64 = 1 << 20;
/// Bytes that the kernel is asked to discard or to zero in one go. Mostly that is a note in a table, and a trim of
/// gigabytes should not be cut into crumbs; but a device that cannot do it has the kernel write the zeroes, and that
/// should be over in a fraction of a second.
const EXTENT: u64 = 64 << 20;

/// What a worker keeps from one part of a request to the next.
#[derive(Default)]
pub(crate) struct Scratch {
    copy: Option<Aligned>,
    /// Bytes of the request that is run that are moved in one go.
    step: u64,
    /// The pieces of a part, where that is not all of its request.
    part: Vec<IoVec>,
    rest: Vec<IoVec>,
}

impl Scratch {
    /// As much of `bytes` as goes through memory of ours in one go.
    fn copied(&self, bytes: Range<u64>) -> Range<u64> {
        up_to_multiple(bytes, self.step.min(SCRATCH))
    }

    /// Aligned memory of at least `len` bytes (at most [`SCRATCH`]), with anything in it.
    fn copy(&mut self, disk: &Disk, len: u64) -> (&mut Aligned, &mut Vec<IoVec>) {
        debug_assert!(len <= SCRATCH);
        let len = len.next_power_of_two() as usize;
        let align = disk.alignment.memory.max(disk.alignment.offset).max(4096) as usize;
        if self.copy.as_ref().is_some_and(|copy| copy.len() < len || copy.align() < align) {
            self.copy = None;
        }
        (self.copy.get_or_insert_with(|| Aligned::zeroed(len, align)), &mut self.rest)
    }
}

/// Runs the next part of a request, of which `done` bytes have been run, and counts them there. What is moved of a
/// request of more than [`PART`] is no more than `part` bytes. Pending if that is not all of it: between two parts it
/// holds nothing that others wait for, so that they may go first.
pub(crate) fn run(
    disk: &Disk,
    job: &mut Job,
    done: &mut u64,
    part: u64,
    scratch: &mut Scratch,
) -> Poll<Result<(), Errno>> {
    scratch.step = if job.request.len > PART { part } else { PART };
    let ran = run_part(disk, job, *done, scratch);
    // Lists that were longer than a system call takes are not kept.
    for list in [&mut scratch.part, &mut scratch.rest] {
        list.clear();
        list.shrink_to(MAX_IOVECS);
    }
    match ran {
        Ok(bytes) => *done += bytes,
        Err(e) => return Poll::Ready(Err(e)),
    }
    if *done < job.request.len {
        return Poll::Pending;
    }
    Poll::Ready(if job.sync_after { disk.sync() } else { Ok(()) })
}

/// Runs what comes after the first `done` bytes, as much of it as goes in one part, and returns how many bytes that was.
fn run_part(disk: &Disk, job: &mut Job, done: u64, scratch: &mut Scratch) -> Result<u64, Errno> {
    let bytes = job.request.offset + done..job.request.offset + job.request.len;
    match job.request.op {
        Op::Read => read(disk, &job.request.buffers, done, bytes, scratch),
        Op::Write { .. } => write(disk, job, done, bytes, scratch),
        Op::Flush => disk.sync().map(|()| job.request.len),
        Op::Discard => {
            let part = first_part(bytes, EXTENT);
            together(disk, &part, || discard(disk, &part))?;
            Ok(part.end - part.start)
        }
        Op::WriteZeroes { unmap, .. } => write_zeroes(disk, bytes, unmap, scratch),
    }
}

/// All of `bytes` if they are not more than `most`, or else up to the next multiple of that, where blocks meet.
fn first_part(bytes: Range<u64>, most: u64) -> Range<u64> {
    if bytes.end - bytes.start <= most { bytes } else { up_to_multiple(bytes, most) }
}

/// The beginning of `bytes`, up to a multiple of `of`: blocks that have a part of it are in between as well.
fn up_to_multiple(bytes: Range<u64>, of: u64) -> Range<u64> {
    bytes.start..bytes.end.min((bytes.start / of + 1) * of)
}

/// The part of `bytes` that is moved next, and its memory, which begins `done` bytes into `buffers`.
fn next_part<'a>(
    buffers: &'a [IoVec],
    done: u64,
    bytes: &Range<u64>,
    step: u64,
    list: &'a mut Vec<IoVec>,
) -> (Range<u64>, &'a [IoVec]) {
    let part = first_part(bytes.clone(), step);
    if done == 0 && part == *bytes {
        return (part, buffers);
    }
    buffers::cut(buffers, done, part.end - part.start, list);
    (part, list)
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

/// Runs `what` while no sub-block write is under way in `bytes`.
fn together<T>(disk: &Disk, bytes: &Range<u64>, what: impl FnOnce() -> T) -> T {
    let Some(gate) = &disk.gate else { return what() };
    gate.enter(bytes);
    let result = what();
    gate.leave(bytes);
    result
}

/// Runs `what` while no write at all is under way in `bytes`.
fn alone<T>(disk: &Disk, bytes: &Range<u64>, what: impl FnOnce() -> T) -> T {
    let Some(gate) = &disk.gate else { return what() };
    gate.enter_alone(bytes);
    let result = what();
    gate.leave_alone(bytes);
    result
}

fn read(disk: &Disk, buffers: &[IoVec], done: u64, bytes: Range<u64>, scratch: &mut Scratch) -> Result<u64, Errno> {
    let (part, pieces) = next_part(buffers, done, &bytes, scratch.step, &mut scratch.part);
    if let Backing::Null { .. } = disk.backing {
        buffers::zero(pieces, 0);
    } else if fits(disk, part.start, pieces) {
        transfer(disk, Way::Read, part.start, pieces, &mut scratch.rest)?;
    } else {
        return read_by_copy(disk, buffers, done, scratch.copied(bytes), scratch);
    }
    Ok(part.end - part.start)
}

fn write(disk: &Disk, job: &mut Job, done: u64, bytes: Range<u64>, scratch: &mut Scratch) -> Result<u64, Errno> {
    let able = &disk.able.write_through;
    // One sync for all parts, however long they are.
    let in_parts = job.request.len > PART;
    if job.request.op == (Op::Write { fua: true }) && (in_parts || !able.load(Ordering::Relaxed)) {
        (job.request.op, job.sync_after) = (Op::Write { fua: false }, true);
    }
    let way = Way::Write { through: job.request.op == Op::Write { fua: true } };
    let buffers = &job.request.buffers[..];
    let (part, pieces) = next_part(buffers, done, &bytes, scratch.step, &mut scratch.part);
    if job.maybe_zero && buffers::is_zero(pieces, u64::MAX) {
        let unmap = disk.options.detect_zeroes == DetectZeroes::Unmap;
        return write_zeroes(disk, part, unmap, scratch);
    }
    let written = if fits(disk, part.start, pieces) {
        let moved = together(disk, &part, || transfer(disk, way, part.start, pieces, &mut scratch.rest));
        moved.map(|()| part.end - part.start)
    } else {
        write_by_copy(disk, way, Some((buffers, done)), scratch.copied(bytes), scratch)
    };
    match written {
        // The same once more, with a sync at the end.
        Err(e) if way == (Way::Write { through: true }) && is_unsupported(e) => {
            able.store(false, Ordering::Relaxed);
            Ok(0)
        }
        other => other,
    }
}

/// The blocks around `bytes`.
fn whole_blocks(disk: &Disk, bytes: &Range<u64>) -> Range<u64> {
    let block = u64::from(disk.alignment.offset);
    bytes.start / block * block..bytes.end.div_ceil(block) * block
}

/// Reads whole blocks to memory of ours and copies from there, to what is `at` bytes into `buffers`. The blocks are not
/// more than a worker's memory holds. Returns how many bytes were wanted.
fn read_by_copy(
    disk: &Disk,
    buffers: &[IoVec],
    at: u64,
    wanted: Range<u64>,
    scratch: &mut Scratch,
) -> Result<u64, Errno> {
    let blocks = whole_blocks(disk, &wanted);
    let len = blocks.end - blocks.start;
    let (copy, rest) = scratch.copy(disk, len);
    let memory = &mut copy.bytes()[..len as usize];
    read_blocks(disk, blocks.start, memory, rest)?;
    buffers::scatter(buffers, at, &memory[within(&wanted, &blocks)]);
    Ok(wanted.end - wanted.start)
}

/// Copies to memory of ours, around which the blocks' old content is read first, and writes whole blocks from there.
/// `from` says how many bytes into which buffers the data begins; without it zeroes are written. The blocks are not more
/// than a worker's memory holds. Returns how many bytes were wanted.
fn write_by_copy(
    disk: &Disk,
    way: Way,
    from: Option<(&[IoVec], u64)>,
    wanted: Range<u64>,
    scratch: &mut Scratch,
) -> Result<u64, Errno> {
    let blocks = whole_blocks(disk, &wanted);
    let block = disk.alignment.offset as usize;
    let len = blocks.end - blocks.start;
    let (copy, rest) = scratch.copy(disk, len);
    let memory = &mut copy.bytes()[..len as usize];
    let patch = || {
        if wanted.start > blocks.start {
            read_blocks(disk, blocks.start, &mut memory[..block], rest)?;
        }
        // The last block may be the first one, with both its ends kept.
        if wanted.end < blocks.end && (memory.len() > block || wanted.start == blocks.start) {
            let last = memory.len() - block;
            read_blocks(disk, blocks.end - block as u64, &mut memory[last..], rest)?;
        }
        let new = &mut memory[within(&wanted, &blocks)];
        match from {
            Some((buffers, at)) => buffers::gather(buffers, at, new),
            None => new.fill(0),
        }
        transfer(disk, way, blocks.start, &[piece(memory)], rest)
    };
    if blocks == wanted { together(disk, &blocks, patch) } else { alone(disk, &blocks, patch) }?;
    Ok(wanted.end - wanted.start)
}

/// Where `bytes` are in memory that holds `blocks`.
fn within(bytes: &Range<u64>, blocks: &Range<u64>) -> Range<usize> {
    (bytes.start - blocks.start) as usize..(bytes.end - blocks.start) as usize
}

fn read_blocks(disk: &Disk, offset: u64, memory: &mut [u8], rest: &mut Vec<IoVec>) -> Result<(), Errno> {
    transfer(disk, Way::Read, offset, &[piece(memory)], rest)
}

fn piece(memory: &mut [u8]) -> IoVec {
    // SAFETY: memory of ours, borrowed mutably by each caller for as long as the piece is used.
    unsafe { IoVec::new(memory.as_mut_ptr(), memory.len()) }
}

/// Discards what it can; it is a hint, and what cannot be discarded is left as it is.
fn discard(disk: &Disk, bytes: &Range<u64>) -> Result<(), Errno> {
    let able = &disk.able.discard;
    if !able.load(Ordering::Relaxed) {
        return Ok(());
    }
    let result = match &disk.backing {
        Backing::File(file) => fallocate(file, FallocateFlags::PUNCH_HOLE, bytes),
        Backing::Device(file) => {
            let block = u64::from(disk.logical_block_size());
            let start = bytes.start.div_ceil(block) * block;
            let end = bytes.end / block * block;
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

fn fallocate(file: &File, flags: FallocateFlags, bytes: &Range<u64>) -> Result<(), Errno> {
    rustix::fs::fallocate(file, flags | FallocateFlags::KEEP_SIZE, bytes.start, bytes.end - bytes.start)
}

/// Zeroes the beginning of `bytes`, and returns how many it was.
fn write_zeroes(disk: &Disk, bytes: Range<u64>, unmap: bool, scratch: &mut Scratch) -> Result<u64, Errno> {
    // A file is zeroed to the byte, a device by its blocks; what sticks out of them is written.
    let block = match &disk.backing {
        Backing::Device(_) => u64::from(disk.logical_block_size()),
        _ => u64::from(SECTOR),
    };
    let aligned = bytes.start.is_multiple_of(block);
    let mut whole = first_part(bytes.clone(), EXTENT);
    whole.end -= whole.end % block;
    if aligned && !whole.is_empty() && zero_blocks(disk, &whole, unmap)? {
        return Ok(whole.end - whole.start);
    }
    let written = if aligned { scratch.copied(bytes) } else { up_to_multiple(bytes, block) };
    write_by_copy(disk, Way::Write { through: false }, None, written, scratch)
}

/// Zeroes by asking the kernel to; false if it cannot.
fn zero_blocks(disk: &Disk, bytes: &Range<u64>, unmap: bool) -> Result<bool, Errno> {
    let Some(file) = disk.file() else { return Ok(true) };
    let try_one = |able: &AtomicBool, flags| {
        if !able.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match together(disk, bytes, || fallocate(file, flags, bytes)) {
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

#[cfg(test)]
mod tests {
    use egret_vring::memory::Lent;

    use super::*;
    use crate::request::{Request, RequestToken};
    use crate::{Driver, Options};

    #[test]
    fn lists_that_are_longer_than_a_system_call_takes_are_not_kept() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(8 << 20).unwrap();
        let options = Options::new("disk0", Driver::File { filename: image.path().to_owned() });
        let disk = Disk::open(&options).unwrap();
        let mut memory = vec![0u8; 5 << 20];
        // SAFETY: the memory outlives the request.
        let buffers = unsafe {
            Lent::assume(memory.chunks_exact_mut(512).map(|piece| IoVec::new(piece.as_mut_ptr(), 512)).collect())
        };
        let request = Request { op: Op::Read, offset: 0, len: 5 << 20, buffers, token: RequestToken(0) };
        let (mut job, mut scratch) = (Job::new(0, request), Scratch::default());
        assert_eq!(parts(&disk, &mut job, PART, &mut scratch), 3);
        assert!([&scratch.part, &scratch.rest].iter().all(|list| list.capacity() <= MAX_IOVECS));
    }

    /// In how many parts a request is run.
    fn parts(disk: &Disk, job: &mut Job, part: u64, scratch: &mut Scratch) -> u64 {
        let (mut done, mut parts) = (0, 1);
        while run(disk, job, &mut done, part, scratch).is_pending() {
            parts += 1;
        }
        assert_eq!(done, job.request.len);
        parts
    }

    #[test]
    fn parts_are_as_long_as_asked_for_whatever_is_done_and_what_is_not_large_has_none() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(8 << 20).unwrap();
        let options = Options::new("disk0", Driver::File { filename: image.path().to_owned() });
        let disk = Disk::open(&options).unwrap();
        let mut memory = vec![1u8; 5 << 20];
        let zeroes = Op::WriteZeroes { unmap: false, fua: false };
        disk.able.zero_range.store(false, Ordering::Relaxed);
        for op in [Op::Read, Op::Write { fua: false }, Op::Write { fua: true }, zeroes] {
            for (len, part, expected) in [(5 << 20, SHARED_PART, 20), (PART, SHARED_PART, 1)] {
                // SAFETY: the memory outlives the request.
                let buffers = unsafe { Lent::assume(vec![IoVec::new(memory.as_mut_ptr(), len as usize)]) };
                let buffers = if op == zeroes { Lent::default() } else { buffers };
                let request = Request { op, offset: 0, len, buffers, token: RequestToken(0) };
                // What the kernel cannot zero is copied, in parts of a worker's memory.
                let expected = if op == zeroes { expected.max(len / SCRATCH) } else { expected };
                let mut job = Job::new(0, request);
                assert_eq!(parts(&disk, &mut job, part, &mut Scratch::default()), expected, "{op:?} of {len}");
                // One sync makes all parts stable.
                assert_eq!(job.sync_after, op == (Op::Write { fua: true }) && len > PART);
            }
        }
    }
}
