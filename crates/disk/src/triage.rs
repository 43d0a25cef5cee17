//! Decides, for each request, who runs it.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

use rustix::io::Errno;

use crate::blocking::{self, MAX_IOVECS, PART};
use crate::buffers;
use crate::disk::{Backing, Disk};
use crate::geometry::SECTOR;
use crate::job::Job;
use crate::options::{DetectZeroes, Discard};
use crate::request::{Op, Request};

/// Bytes of a write in which the loop looks for zeroes; where it finds nothing else a worker looks at the rest.
const LOOK: u64 = 64 << 10;

/// Who runs a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// None: the request has this result already.
    Answered(Result<(), Errno>),
    /// None: it is a flush of a disk that has lost writes, and fails as if the disk had been asked.
    Lost(Errno),
    /// The disk's engine.
    Engine,
    /// A worker, which can do anything.
    Worker,
    /// A worker, because direct I/O does not take it as it is.
    Bounce,
}

/// Looks at a request once, and turns it into what will be run: zeroes that were written into zeroes, options into
/// what they mean for it.
///
/// How long that takes, and how long an engine's submission takes, does not depend on the request's length: large requests
/// go to workers.
pub(crate) fn triage(disk: &Disk, job: &mut Job) -> Verdict {
    if let Some(errno) = objection(disk, job) {
        return Verdict::Answered(Err(errno));
    }
    if let Backing::Null { read_zeroes, .. } = disk.backing {
        let fills = read_zeroes && job.request.op == Op::Read;
        return if fills && is_large(&job.request) { Verdict::Worker } else { Verdict::Engine };
    }
    if let Backing::Remote(_) = disk.backing {
        return remote(disk, job);
    }
    let request = &mut job.request;
    let options = &disk.options;
    match &mut request.op {
        Op::Flush if options.no_flush => Verdict::Answered(Ok(())),
        Op::Flush => Verdict::Worker,
        _ if request.len == 0 => Verdict::Answered(Ok(())),
        Op::Read => moved(disk, job),
        Op::Write { fua } => {
            job.is_to_be_stable = *fua;
            *fua &= !options.no_flush;
            // See `Syncs`: of what the page cache has lost nobody but a sync may be told.
            job.sync_after = disk.may_be_cached() && std::mem::take(fua);
            if options.detect_zeroes != DetectZeroes::Off && buffers::is_zero(&request.buffers, LOOK) {
                job.sync_after |= std::mem::take(fua);
                job.maybe_zero = true;
                return Verdict::Worker;
            }
            if job.sync_after || *fua && !disk.able.write_through.load(Ordering::Relaxed) {
                return Verdict::Worker;
            }
            moved(disk, job)
        }
        Op::Discard => {
            if disk.discards() {
                Verdict::Worker
            } else {
                Verdict::Answered(Ok(()))
            }
        }
        Op::WriteZeroes { unmap, fua } => {
            *unmap &= options.discard == Discard::Unmap;
            job.is_to_be_stable = *fua;
            // No system call makes zeroes and waits until they are stable.
            job.sync_after = std::mem::take(fua) && !options.no_flush;
            Verdict::Worker
        }
    }
}

/// The same for a remote disk, whose engine runs whatever there is to run.
fn remote(disk: &Disk, Job { request, settles, is_to_be_stable, .. }: &mut Job) -> Verdict {
    let options = &disk.options;
    let runs = match &mut request.op {
        Op::Flush if disk.ignores_flushes() => false,
        // Who waits for what the disk before has left behind is a worker.
        Op::Flush if disk.is_owed() => {
            *settles = true;
            return Verdict::Worker;
        }
        // It may have lost something since it was attached, perhaps where there are no workers.
        Op::Flush => match disk.tell_loss() {
            Ok(()) => true,
            Err(errno) => return Verdict::Lost(errno),
        },
        _ if request.len == 0 => false,
        Op::Read => true,
        Op::Write { fua } => {
            *is_to_be_stable = *fua;
            let fua = *fua && !options.no_flush;
            // There is no worker to look at more than the loop has time for.
            let looks = options.detect_zeroes != DetectZeroes::Off && !is_large(request);
            request.op = if looks && buffers::is_zero(&request.buffers, u64::MAX) {
                Op::WriteZeroes { unmap: options.detect_zeroes == DetectZeroes::Unmap, fua }
            } else {
                Op::Write { fua }
            };
            true
        }
        Op::Discard => disk.discards(),
        Op::WriteZeroes { unmap, fua } => {
            *unmap &= options.discard == Discard::Unmap;
            *is_to_be_stable = *fua;
            *fua &= !options.no_flush;
            true
        }
    };
    if runs { Verdict::Engine } else { Verdict::Answered(Ok(())) }
}

/// Who moves a request's data.
fn moved(disk: &Disk, job: &Job) -> Verdict {
    let request = &job.request;
    if !blocking::fits(disk, request.offset, &request.buffers) {
        Verdict::Bounce
    } else if request.buffers.len() > MAX_IOVECS || is_large(request) {
        Verdict::Worker
    } else {
        Verdict::Engine
    }
}

/// Whether an engine would hold up the loop with it: io_uring and `io_submit` copy from and to the page cache, or pin
/// each page for direct I/O, before they return.
const fn is_large(request: &Request) -> bool {
    request.len > PART
}

/// What is wrong with a request, if anything.
fn objection(disk: &Disk, job: &Job) -> Option<Errno> {
    let request = &job.request;
    let block = if let Backing::Remote(_) = disk.backing { disk.logical_block_size() } else { SECTOR };
    let sector = u64::from(block) - 1;
    let within = request.offset.checked_add(request.len).is_some_and(|end| end <= disk.size());
    if !within || (request.offset | request.len) & sector != 0 {
        return Some(Errno::INVAL);
    }
    debug_assert!(
        !matches!(request.op, Op::Read | Op::Write { .. })
            || request.len == request.buffers.iter().map(|piece| piece.len() as u64).sum::<u64>(),
        "a request is as long as its buffers"
    );
    let changes = !matches!(request.op, Op::Read | Op::Flush);
    (changes && disk.read_only()).then_some(Errno::ROFS)
}

/// Locks the blocks of a write that the kernel runs, where they need that; false if it must wait, as a worker can. Workers
/// lock by themselves.
pub(crate) fn try_lock(disk: &Disk, job: &Job) -> bool {
    match (&disk.block_range_lock, job.request.op) {
        (Some(lock), Op::Write { .. }) => lock.try_lock_shared(&job.bytes()),
        _ => true,
    }
}

/// Takes back a [`try_lock`] that was true.
pub(crate) fn unlock(disk: &Disk, job: &Job) {
    if let (Some(lock), Op::Write { .. }) = (&disk.block_range_lock, job.request.op) {
        lock.unlock_shared(&job.bytes());
    }
}

/// Whether worker threads should try what the kernel refused to run asynchronously.
pub(crate) fn deserves_a_worker(op: Op, errno: Errno) -> bool {
    match op {
        _ if errno == Errno::AGAIN => true,
        // Old kernels do not know it.
        Op::Write { fua: true } => errno == Errno::INVAL || blocking::is_unsupported(errno),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_try_what_could_not_run_asynchronously_and_nothing_else() {
        for op in [Op::Read, Op::Write { fua: false }, Op::Write { fua: true }] {
            assert!(deserves_a_worker(op, Errno::AGAIN));
            assert!(!deserves_a_worker(op, Errno::IO));
            assert!(!deserves_a_worker(op, Errno::NOSPC));
        }
        assert!(deserves_a_worker(Op::Write { fua: true }, Errno::OPNOTSUPP));
        assert!(!deserves_a_worker(Op::Read, Errno::INVAL));
    }
}
