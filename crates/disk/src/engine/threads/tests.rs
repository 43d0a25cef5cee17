//! Workers and their disks, with no loop around them.

#![allow(unsafe_code)]

use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use egret_vring::memory::{IoVec, Lent};

use super::*;
use crate::refuse::refuse_threads;
use crate::request::{Op, Request, RequestToken};
use crate::{Driver, Options};

const DISKS: u32 = 3;
const FEW: WorkerLimits = WorkerLimits { min: 1, max: 4, idle: Duration::from_millis(1) };

fn threads(limits: WorkerLimits) -> Threads {
    let mut threads = Threads::new(limits, Arc::default()).unwrap();
    for slot in 0..DISKS {
        let driver = Driver::Null { size: 4096, latency: Nanos::ZERO, read_zeroes: false };
        threads.attach(slot, &Arc::new(Disk::open(&Options::new("null", driver)).unwrap())).unwrap();
    }
    threads
}

fn push(threads: &mut Threads, token: u64) {
    let request = Request { op: Op::Flush, offset: 0, len: 0, buffers: Lent::default(), token: RequestToken(token) };
    threads.push(Job::new(token as u32 % DISKS, request));
}

/// Reaps what is back, blocking as the loop does if there is nothing.
fn reap_some(threads: &mut Threads, done: &mut dyn FnMut(Box<Job>)) {
    if threads.arm() {
        let mut fds = [rustix::event::PollFd::new(&threads.workers.done.event, rustix::event::PollFlags::IN)];
        let hangs = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&hangs)), Ok(1), "nothing comes back");
        // A loop watches for edges; here the level is taken away.
        threads.workers.done.event.clear();
    }
    threads.suppress();
    threads.reap(Nanos::ZERO, done);
}

/// Reaps until `count` jobs are back.
fn reap(threads: &mut Threads, count: usize) {
    let mut done = 0;
    while done < count {
        reap_some(threads, &mut |_| done += 1);
    }
}

/// How many flushes of the disk in `slot` one worker ends before it ends a large read of the first disk, which it begins
/// with: one between two parts of that.
fn overtaken(threads: &mut Threads, slot: u32, large: &mut [u8]) -> usize {
    let len = large.len() as u64;
    // SAFETY: the memory is there until the job is back, below.
    let buffers = unsafe { Lent::assume(vec![IoVec::new(large.as_mut_ptr(), large.len())]) };
    let request = Request { op: Op::Read, offset: 0, len, buffers, token: RequestToken(0) };
    threads.push(Job::new(0, request));
    for token in 1..=100 {
        let request =
            Request { op: Op::Flush, offset: 0, len: 0, buffers: Lent::default(), token: RequestToken(token) };
        threads.push(Job::new(slot, request));
    }
    threads.submit(Nanos::ZERO);
    let mut ended = Vec::new();
    while ended.len() < 101 {
        reap_some(threads, &mut |finished| ended.push(finished.request.token));
    }
    ended.iter().position(|token| *token == RequestToken(0)).unwrap()
}

#[test]
fn parts_of_a_large_job_are_small_while_there_are_other_disks() {
    let mut threads = threads(WorkerLimits { min: 1, max: 1, idle: Duration::from_secs(10) });
    let mut large = vec![1; 2 * blocking::PART as usize];
    let turns = |part: u64| (2 * blocking::PART / part) as usize;
    threads.set_beside_others(true);
    assert_eq!(overtaken(&mut threads, 1, &mut large), turns(blocking::SHARED_PART) - 1);
    (1..DISKS).for_each(|slot| threads.detach(slot));
    threads.set_beside_others(false);
    assert_eq!(overtaken(&mut threads, 0, &mut large), turns(blocking::PART) - 1);
}

/// Waits until one worker is left, which still works.
fn await_the_last(threads: &mut Threads) {
    let mut queue = threads.workers.lock();
    while queue.workers > 1 {
        queue = threads.workers.left.wait(queue).unwrap();
    }
    drop(queue);
    push(threads, 0);
    threads.submit(Nanos::ZERO);
    reap(threads, 1);
}

#[test]
fn workers_come_with_the_work_and_leave_when_they_are_idle() {
    let mut threads = threads(FEW);
    assert_eq!(threads.workers.lock().workers, 0);
    for token in 0..1000 {
        push(&mut threads, token);
    }
    threads.submit(Nanos::ZERO);
    assert!((1..=4).contains(&threads.workers.lock().workers));
    reap(&mut threads, 1000);
    await_the_last(&mut threads);
}

#[test]
fn one_worker_stays_and_does_what_comes_when_no_other_can_be_started() {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut threads = threads(WorkerLimits { min: 0, max: 4, idle: Duration::ZERO });
            for round in 0..1000 {
                push(&mut threads, round);
                threads.submit(Nanos::ZERO);
                reap_some(&mut threads, &mut |finished| assert_eq!(finished.result, Ok(())));
                if round == 0 {
                    refuse_threads();
                }
            }
        });
    });
}

#[test]
fn workers_that_are_there_when_limits_are_given_leave_when_they_are_idle_and_others_come() {
    let limits = WorkerLimits { min: 2, max: 2, idle: Duration::from_millis(1) };
    let mut threads = threads(limits);
    for workers in [1, 2, 1] {
        while threads.workers.lock().workers < workers {
            (0..100).for_each(|token| push(&mut threads, token));
            threads.submit(Nanos::ZERO);
            reap(&mut threads, 100);
        }
        threads.limit_workers(limits);
        let mut queue = threads.workers.lock();
        while queue.workers > 0 {
            queue = threads.workers.left.wait(queue).unwrap();
        }
    }
    // Other limits are nothing to those that there are.
    push(&mut threads, 0);
    threads.submit(Nanos::ZERO);
    reap(&mut threads, 1);
    threads.limit_workers(WorkerLimits { max: 3, ..limits });
    assert!(!threads.workers.lock().renews);
}

#[test]
fn limits_that_change_under_load_hold_at_once_and_leave_no_job_behind() {
    let long = WorkerLimits { idle: Duration::from_secs(100), ..FEW };
    let mut threads = threads(WorkerLimits { max: 8, ..long });
    for round in 0..200 {
        for token in 0..100 {
            push(&mut threads, token);
        }
        threads.submit(Nanos::ZERO);
        let max = [1, 8, 3][round % 3];
        threads.limit_workers(WorkerLimits { max, ..long });
        reap(&mut threads, 100);
    }
    threads.limit_workers(WorkerLimits { min: 0, max: 0, ..long });
    await_the_last(&mut threads);
}

#[test]
fn no_completion_is_lost_between_the_last_look_and_the_block() {
    let mut threads = threads(WorkerLimits { idle: Duration::from_secs(10), ..FEW });
    for round in 0..5000 {
        push(&mut threads, round);
        threads.submit(Nanos::ZERO);
        reap(&mut threads, 1);
    }
}

#[test]
fn the_loop_is_told_once_of_what_is_done_and_only_if_it_asked() {
    for asked in [false, true] {
        let mut threads = threads(WorkerLimits { min: 1, max: 1, idle: Duration::from_secs(10) });
        assert_eq!(threads.descriptor(), Some(threads.workers.done.event.as_raw_fd()));
        assert!(threads.arm());
        if !asked {
            threads.suppress();
        }
        (0..3).for_each(|token| push(&mut threads, token));
        threads.submit(Nanos::ZERO);
        threads.workers.end();
        let mut told = [0; 8];
        let read = rustix::io::read(&threads.workers.done.event, &mut told);
        assert_eq!((read.is_ok(), u64::from_ne_bytes(told)), (asked, u64::from(asked)));
    }
}

const MIB: u64 = 1 << 20;

/// A pool of at most `max` workers, and as many disks as files: each with a block range lock, by which
/// a test holds up those who write there, and unable to have the kernel zero anything.
fn lockable(max: u32, count: u32) -> (Threads, Vec<Arc<Disk>>, tempfile::TempDir) {
    let mut threads =
        Threads::new(WorkerLimits { min: 0, max, idle: Duration::from_secs(10) }, Arc::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let disks: Vec<Arc<Disk>> = (0..count)
        .map(|at| {
            let filename = dir.path().join(at.to_string());
            std::fs::File::create(&filename).unwrap().set_len(16 * MIB).unwrap();
            let mut disk = Disk::open(&Options::new(format!("disk{at}"), Driver::File { filename })).unwrap();
            disk.block_range_lock = Some(Default::default());
            disk.able.zero_range.store(false, Ordering::Relaxed);
            Arc::new(disk)
        })
        .collect();
    disks.iter().enumerate().for_each(|(slot, disk)| threads.attach(slot as u32, disk).unwrap());
    (threads, disks, dir)
}

/// Holds up who writes to these bytes of a disk, until it is dropped.
struct Locked<'a>(&'a Disk, std::ops::Range<u64>);

impl<'a> Locked<'a> {
    fn new(disk: &'a Disk, bytes: std::ops::Range<u64>) -> Self {
        disk.block_range_lock.as_ref().unwrap().lock_exclusive(&bytes);
        Self(disk, bytes)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.0.block_range_lock.as_ref().unwrap().unlock_exclusive(&self.1);
    }
}

/// Pushes zeroes for the first `len` bytes of the disk at `slot`.
fn push_zeroes(threads: &mut Threads, slot: u32, len: u64, token: u64) {
    let op = Op::WriteZeroes { unmap: false, fua: false };
    threads.push(Job::new(slot, Request { op, offset: 0, len, buffers: Lent::default(), token: RequestToken(token) }));
}

/// Waits for the next `count` jobs that come back, and names them in their order.
fn ended(threads: &mut Threads, count: usize) -> Vec<u64> {
    let mut ended = Vec::new();
    while ended.len() < count {
        reap_some(threads, &mut |finished| {
            assert_eq!(finished.result, Ok(()));
            ended.push(finished.request.token.0);
        });
    }
    ended
}

/// Waits until so many workers are at a job.
fn await_busy(threads: &Threads, count: u32) {
    let begun = std::time::Instant::now();
    while threads.workers.lock().jobs.taken() != count {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} are", threads.workers.lock().jobs.taken());
        std::thread::yield_now();
    }
}

#[test]
fn between_two_parts_of_a_job_others_have_their_turn() {
    for max in [1, 2] {
        let (mut threads, disks, _dir) = lockable(max, max + 1);
        // Whoever is at a large job gets no further than its first part.
        let locked: Vec<_> = disks[..max as usize].iter().map(|disk| Locked::new(disk, MIB..2 * MIB)).collect();
        (0..max).for_each(|slot| push_zeroes(&mut threads, slot, 16 * MIB, slot.into()));
        push_zeroes(&mut threads, max, 512, 100);
        threads.submit(Nanos::ZERO);
        assert_eq!(ended(&mut threads, 1), [100], "it begins after one part of each worker");
        drop(locked);
        assert_eq!(ended(&mut threads, max as usize).len(), max as usize);
    }
}

#[test]
fn a_job_of_more_than_a_part_waits_in_the_line_of_large_ones() {
    let (mut threads, _disks, _dir) = lockable(1, 1);
    for len in [512, blocking::PART, blocking::PART + 512] {
        push_zeroes(&mut threads, 0, len, 0);
    }
    let Lines { large, others } = threads.disks[0].as_ref().unwrap().1;
    assert!(threads.pending.iter().map(|(line, _)| *line).eq([others, others, large]));
}

#[test]
fn disks_have_their_turns_one_after_the_other() {
    let (mut threads, _disks, _dir) = lockable(1, 3);
    (0..100).for_each(|token| push_zeroes(&mut threads, 0, 512, token));
    // The second disk is at two slots, and that gets it no more.
    let twice = Arc::clone(&threads.disks[1].as_ref().unwrap().0);
    threads.attach(3, &twice).unwrap();
    (100..110).for_each(|token| push_zeroes(&mut threads, [1, 3][token as usize % 2], 512, token));
    (200..210).for_each(|token| push_zeroes(&mut threads, 2, 512, token));
    threads.submit(Nanos::ZERO);
    let ended = ended(&mut threads, 120);
    assert_eq!(ended[..6], [0, 100, 200, 1, 101, 201]);
    assert!(ended[..30].iter().all(|token| token % 100 < 10), "{ended:?}");
}

#[test]
fn a_disk_that_hangs_leaves_workers_to_the_others() {
    let (mut threads, disks, _dir) = lockable(8, 3);
    let mut locked = Vec::new();
    // Of eight workers the first disk gets four, of the four that are left the second gets two.
    for (slot, busy) in [(0, 4), (1, 6)] {
        locked.push(Locked::new(&disks[slot], 0..MIB));
        (0..20).for_each(|token| push_zeroes(&mut threads, slot as u32, 512, token));
        threads.submit(Nanos::ZERO);
        await_busy(&threads, busy);
    }
    (100..120).for_each(|token| push_zeroes(&mut threads, 2, 512, token));
    threads.submit(Nanos::ZERO);
    assert!(ended(&mut threads, 20).iter().all(|&token| token >= 100));
    await_busy(&threads, 6);
    drop(locked);
    assert_eq!(ended(&mut threads, 40).len(), 40);
}

#[test]
fn a_disk_that_is_alone_has_all_workers_but_one_and_what_comes_when_it_hangs_has_that() {
    let (mut threads, disks, _dir) = lockable(8, 2);
    let locked = Locked::new(&disks[0], 0..MIB);
    (0..20).for_each(|token| push_zeroes(&mut threads, 0, 512, token));
    threads.submit(Nanos::ZERO);
    await_busy(&threads, 4);
    threads.detach(1);
    await_busy(&threads, 7);
    threads.attach(1, &disks[1]).unwrap();
    (100..120).for_each(|token| push_zeroes(&mut threads, 1, 512, token));
    threads.submit(Nanos::ZERO);
    assert!(ended(&mut threads, 20).iter().all(|&token| token >= 100));
    drop(locked);
    assert_eq!(ended(&mut threads, 20).len(), 20);
}

#[test]
fn a_limit_that_is_raised_has_more_workers_at_jobs_at_once() {
    let (mut threads, disks, _dir) = lockable(1, 1);
    let locked = Locked::new(&disks[0], 0..MIB);
    (0..20).for_each(|token| push_zeroes(&mut threads, 0, 512, token));
    threads.submit(Nanos::ZERO);
    await_busy(&threads, 1);
    threads.limit_workers(WorkerLimits { min: 0, max: 4, idle: Duration::from_secs(10) });
    await_busy(&threads, 3);
    drop(locked);
    assert_eq!(ended(&mut threads, 20).len(), 20);
}

#[test]
fn a_job_that_is_done_keeps_little_memory() {
    let mut threads = threads(FEW);
    for token in 0..2 * SPARE as u64 {
        push(&mut threads, token);
    }
    threads.submit(Nanos::ZERO);
    reap(&mut threads, 2 * SPARE);
    assert_eq!(threads.spare.len(), SPARE);
}

#[test]
fn workers_that_are_dropped_do_what_they_were_given_first() {
    let mut threads = threads(FEW);
    for token in 0..100 {
        push(&mut threads, token);
    }
    threads.submit(Nanos::ZERO);
    push(&mut threads, 100);
    let workers = Arc::downgrade(&threads.workers);
    let mut left = 0;
    Box::new(threads).end(&mut |_| left += 1);
    assert_eq!(left, 101);
    // A worker's last breath may come a moment after it has been counted out.
    while workers.strong_count() > 0 {
        std::thread::yield_now();
    }
}
