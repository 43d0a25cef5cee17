//! Runs any request on any disk by blocking system calls: what worker threads do.
//!
//! This is the one place that knows how to do what the kernel's asynchronous interfaces do not: requests that direct
//! I/O refuses as they are, discards, zeroes. It is straight-line code because it may wait wherever it likes; but not
//! for long at a time: what is large is run in parts, and between them other disks have their turn.

#![allow(unsafe_code)]

mod bounce;
mod part;
mod transfer;
mod zeroes;

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::task::Poll;

use egret_vring::memory::IoVec;
use rustix::io::Errno;

pub(crate) use self::bounce::Scratch;
use self::bounce::{read_by_copy, write_by_copy};
use self::part::next_part;
pub(crate) use self::part::{PART, SHARED_PART};
pub(crate) use self::transfer::{MAX_IOVECS, cut_off, fits, is_unsupported, read_cached};
use self::transfer::{Way, transfer};
use self::zeroes::{discard, write_zeroes};
use crate::block_range_lock::BlockRangeLock;
use crate::buffers;
use crate::disk::{Backing, Disk};
use crate::job::Job;
use crate::options::DetectZeroes;
use crate::request::Op;

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
        Op::Flush => {
            let synced = if job.settles { disk.sync_predecessor() } else { disk.sync() };
            synced.map(|()| job.request.len)
        }
        Op::Discard => discard(disk, bytes),
        Op::WriteZeroes { unmap, .. } => write_zeroes(disk, bytes, unmap, scratch),
    }
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
        let moved = BlockRangeLock::shared(&disk.block_range_lock, &part, || {
            transfer(disk, way, part.start, pieces, &mut scratch.rest)
        });
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

#[cfg(test)]
mod tests {
    use egret_vring::memory::Lent;

    use super::bounce::SCRATCH;
    use super::*;
    use crate::request::{Request, RequestToken};
    use crate::{Driver, Options};

    /// A disk of 8 MiB.
    fn zeroes() -> (tempfile::NamedTempFile, Disk) {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(8 << 20).unwrap();
        let options = Options::new("disk0", Driver::File { filename: image.path().to_owned() });
        let disk = Disk::open(&options).unwrap();
        (image, disk)
    }

    #[test]
    fn lists_that_are_longer_than_a_system_call_takes_are_not_kept() {
        let (_image, disk) = zeroes();
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
    fn what_is_run_of_a_large_request_in_one_go_moves_a_part_of_it_and_nothing_else() {
        let (_image, disk) = zeroes();
        let mut memory = vec![1u8; 5 << 20];
        let base = memory.as_mut_ptr();
        // SAFETY: the memory outlives the request.
        let buffers = unsafe { Lent::assume(vec![IoVec::new(base, 5 << 20)]) };
        let request = Request { op: Op::Read, offset: 0, len: 5 << 20, buffers, token: RequestToken(0) };
        let (mut job, mut done, mut scratch) = (Job::new(0, request), 0, Scratch::default());
        for parts in 1..4 {
            assert!(run(&disk, &mut job, &mut done, SHARED_PART, &mut scratch).is_pending());
            assert_eq!(done, parts * SHARED_PART);
            let filled = memory.iter().position(|byte| *byte != 0);
            assert_eq!(filled, Some(done as usize), "the image is all zeroes");
        }
    }

    #[test]
    fn parts_are_as_long_as_asked_for_whatever_is_done_and_what_is_not_large_has_none() {
        let (_image, disk) = zeroes();
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
