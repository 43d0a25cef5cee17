//! Worker threads: the engine of `aio=threads`, and the helpers of the others.
//!
//! Jobs go to the workers through a locked queue, a batch at a time. They come back on a list that the loop takes
//! whole with one atomic exchange, so that a worker that loses its processor at a bad moment holds up nobody.
//!
//! The workers are shared fairly by all disks of the I/O thread ([`Turns`]). A turn is a part of a job
//! ([`blocking::run`]): what is left of it goes to the end of its disk's line.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use egret_confine::{Bounds, Kind};
use egret_event_loop::{Nanos, clock};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::turns::Turns;
use super::{Engine, WorkerLimits};
use crate::blocking::{self, Scratch};
use crate::disk::Disk;
use crate::error::EngineError;
use crate::job::{Finished, Job};
use crate::stats::EngineCounters;

impl WorkerLimits {
    /// The same, with somebody to do the work.
    fn sound(self) -> Self {
        Self { max: self.max.max(1), ..self }
    }
}

/// Nodes that are kept; with more jobs than this in flight each of the others allocates one.
const SPARE: usize = 4096;

/// A job, and what is needed to run it, on its way to a worker and back.
struct Node {
    job: Job,
    disk: *const Disk,
    /// Bytes of it that have been run.
    done: u64,
    result: Result<(), Errno>,
    /// The next on the list of those that are done.
    next: *mut Node,
}

/// A node that the workers have.
struct Handed(*mut Node);

// SAFETY: a node is used by one thread at a time: the one that took it from the queue or from the list. `Disk` is
// `Sync`, and outlives the node because the engine keeps a disk attached while it has jobs.
unsafe impl Send for Handed {}

struct Queue {
    limits: WorkerLimits,
    /// The jobs, for as many of which there is a place as there may be workers.
    jobs: Turns<Handed>,
    workers: u32,
    /// Workers that wait for a job.
    idle: u32,
    /// Of those that wait: how many were woken and have not looked yet.
    woken: u32,
    /// Workers that were started and have not looked for a job yet.
    starting: u32,
    closing: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
    left: Condvar,
    /// Nodes that are done, the last one first.
    done: AtomicPtr<Node>,
    /// Whether the loop is about to block, and wants to be told of the next one that is done.
    armed: AtomicBool,
    event: File,
}

/// Where a disk's jobs wait.
#[derive(Clone, Copy)]
struct Lines {
    large: usize,
    others: usize,
}

/// See the module's description.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    /// Disks and their lines, for large jobs and for others, by slot.
    disks: Vec<Option<(Arc<Disk>, Lines)>>,
    /// Pushed and not submitted, with the lines that they are for.
    pending: Vec<(usize, Handed)>,
    /// Nodes to use again. They are boxed because lists of them go through other threads.
    #[expect(clippy::vec_box, reason = "the boxes are what is kept")]
    spare: Vec<Box<Node>>,
    counters: Arc<EngineCounters>,
}

impl Threads {
    pub(crate) fn new(limits: WorkerLimits, counters: Arc<EngineCounters>) -> Result<Self, EngineError> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| EngineError::Event(e.into()))?;
        let queue = Queue {
            limits: limits.sound(),
            jobs: Turns::new(limits.sound().max),
            workers: 0,
            idle: 0,
            woken: 0,
            starting: 0,
            closing: false,
        };
        let shared = Arc::new(Shared {
            queue: Mutex::new(queue),
            work: Condvar::new(),
            left: Condvar::new(),
            done: AtomicPtr::new(ptr::null_mut()),
            armed: AtomicBool::new(false),
            event: File::from(event),
        });
        Ok(Self { shared, disks: Vec::new(), pending: Vec::new(), spare: Vec::new(), counters })
    }

    /// Waits until the workers have done what they were given, because it is others' memory that they use, and have
    /// left; what was never submitted joins what is done.
    fn wait(&mut self) {
        let mut queue = self.shared.lock();
        queue.closing = true;
        self.shared.work.notify_all();
        while queue.workers > 0 {
            queue = self.shared.left.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        drop(queue);
        for (_, Handed(node)) in self.pending.drain(..) {
            self.shared.publish(node);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A worker that panicked left the queue as it was; what it guards stays consistent between statements.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes as many workers as can begin something now, and starts one if there are too few. A worker does the same
    /// when it takes a job, so that a large batch costs the loop the start of one thread.
    fn call(self: &Arc<Self>, mut queue: MutexGuard<'_, Queue>) {
        let (coming, asleep) = (queue.woken + queue.starting, queue.idle - queue.woken);
        let missing = queue.jobs.wanted(coming + asleep + 1).saturating_sub(coming);
        let wake = missing.min(asleep);
        queue.woken += wake;
        let start = missing > wake && queue.workers < queue.limits.max;
        if !start {
            drop(queue);
            (0..wake).for_each(|_| self.work.notify_one());
            return;
        }
        queue.workers += 1;
        queue.starting += 1;
        drop(queue);
        (0..wake).for_each(|_| self.work.notify_one());
        let (shared, bounds) = (Arc::clone(self), Bounds::of_this_thread());
        let spawned = std::thread::Builder::new().name("disk-worker".into()).spawn(move || {
            bounds.narrow(Kind::Worker);
            work(&shared);
        });
        if spawned.is_ok() {
            return;
        }
        let mut queue = self.lock();
        queue.workers -= 1;
        queue.starting -= 1;
        if queue.workers > 0 {
            return;
        }
        // Nobody is left to take them.
        for Handed(node) in queue.jobs.drain() {
            // SAFETY: taken from the queue, so it is ours.
            unsafe { (*node).result = Err(Errno::AGAIN) };
            self.publish(node);
        }
    }

    /// Puts a node that is done on the list, and wakes the loop if it asked for that.
    ///
    /// Nothing is lost: `publish` writes `done`, fences and reads `armed`; `arm` writes `armed`, fences and reads
    /// `done`. Of two such sequences at least one sees what the other wrote: either the loop finds the node and does
    /// not block, or the worker finds the flag and writes the event.
    fn publish(&self, node: *mut Node) {
        let mut head = self.done.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node is ours until it is on the list.
            unsafe { (*node).next = head };
            match self.done.compare_exchange_weak(head, node, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::Relaxed) {
            // A counter that is full announces as well as one that goes up.
            let _ = (&self.event).write(&1u64.to_ne_bytes());
        }
    }
}

/// A worker's life.
fn work(shared: &Arc<Shared>) {
    let mut scratch = Scratch::default();
    let mut queue = shared.lock();
    queue.starting -= 1;
    loop {
        if queue.workers > queue.limits.max {
            break;
        }
        if let Some((line, Handed(node))) = queue.jobs.take() {
            let part = if queue.jobs.are_shared() { blocking::SHARED_PART } else { blocking::PART };
            shared.call(queue);
            // SAFETY: taken from the queue, so it is ours; the disk stays attached until the loop has it back.
            let (Node { job, done, result, .. }, disk) = unsafe { (&mut *node, &*(*node).disk) };
            let ran = blocking::run(disk, job, done, part, &mut scratch);
            if let Poll::Ready(ended) = ran {
                *result = ended;
                shared.publish(node);
            }
            if ran.is_pending() {
                // On a processor that it shares with its I/O thread, or with whoever waits for that, it would come back
                // after milliseconds only.
                std::thread::yield_now();
            }
            queue = shared.lock();
            queue.jobs.leave(line);
            if ran.is_pending() {
                queue.jobs.put(line, Handed(node));
            }
            continue;
        }
        if queue.closing {
            break;
        }
        queue.idle += 1;
        let idle = queue.limits.idle;
        let (back, waited) = shared.work.wait_timeout(queue, idle).unwrap_or_else(PoisonError::into_inner);
        queue = back;
        queue.idle -= 1;
        // Whoever wakes looks, whether it was the one that was meant or not: it counts for one of them.
        queue.woken = queue.woken.saturating_sub(1);
        if waited.timed_out() && queue.jobs.is_empty() && queue.workers > queue.limits.min {
            break;
        }
    }
    queue.workers -= 1;
    shared.left.notify_all();
    // It may have been woken for a job: somebody who stays takes it.
    shared.call(queue);
}

impl Engine for Threads {
    fn attach(&mut self, slot: u32, disk: &Arc<Disk>) {
        let mut queue = self.shared.lock();
        let lines = Lines { large: queue.jobs.open_large(disk), others: queue.jobs.open(disk) };
        drop(queue);
        let slot = slot as usize;
        self.disks.resize(self.disks.len().max(slot + 1), None);
        self.disks[slot] = Some((Arc::clone(disk), lines));
    }

    fn detach(&mut self, slot: u32) {
        let Some((_, Lines { large, others })) = self.disks[slot as usize].take() else { return };
        let mut queue = self.shared.lock();
        queue.jobs.close(large);
        queue.jobs.close(others);
        self.shared.call(queue);
    }

    fn push(&mut self, job: Job) {
        let (disk, lines) = self.disks[job.slot as usize].as_ref().expect("a job is for an attached disk");
        let line = if job.request.len > blocking::PART { lines.large } else { lines.others };
        let disk = Arc::as_ptr(disk);
        let node = Node { job, disk, done: 0, result: Ok(()), next: ptr::null_mut() };
        let node = match self.spare.pop() {
            Some(mut spare) => {
                *spare = node;
                spare
            }
            None => Box::new(node),
        };
        self.pending.push((line, Handed(Box::into_raw(node))));
    }

    fn submit(&mut self, _now: Nanos) {
        if self.pending.is_empty() {
            return;
        }
        let count = self.pending.len();
        let begun = clock::now();
        let mut queue = self.shared.lock();
        self.pending.drain(..).for_each(|(line, node)| queue.jobs.put(line, node));
        self.shared.call(queue);
        self.counters.batch(count as u64);
        self.counters.took(clock::now() - begun);
    }

    fn has_completions(&mut self) -> bool {
        !self.shared.done.load(Ordering::Relaxed).is_null()
    }

    fn reap(&mut self, _now: Nanos, done: &mut dyn FnMut(Finished)) {
        let mut newest = self.shared.done.swap(ptr::null_mut(), Ordering::Acquire);
        let mut oldest: *mut Node = ptr::null_mut();
        while !newest.is_null() {
            // SAFETY: the list was taken whole, so its nodes are ours.
            let next = unsafe { std::mem::replace(&mut (*newest).next, oldest) };
            oldest = newest;
            newest = next;
        }
        while !oldest.is_null() {
            // SAFETY: made by `Box::into_raw` in `push`, and taken from the list once.
            let mut node = unsafe { Box::from_raw(oldest) };
            oldest = node.next;
            let result = node.result;
            let job = std::mem::replace(&mut node.job, Job::nothing());
            if self.spare.len() < SPARE {
                self.spare.push(node);
            }
            done(Finished { job, result });
        }
    }

    fn arm(&mut self) -> bool {
        self.shared.armed.store(true, Ordering::Relaxed);
        // See `Shared::publish`.
        fence(Ordering::SeqCst);
        if self.has_completions() {
            self.suppress();
            return false;
        }
        true
    }

    fn suppress(&mut self) {
        self.shared.armed.store(false, Ordering::Relaxed);
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.shared.event.as_raw_fd())
    }

    fn end(self: Box<Self>, left: &mut dyn FnMut(Job)) {
        let mut this = self;
        this.wait();
        this.reap(Nanos::ZERO, &mut |finished| left(finished.job));
    }

    fn limit_workers(&mut self, limits: WorkerLimits) {
        let mut queue = self.shared.lock();
        queue.limits = limits.sound();
        queue.jobs.set_places(limits.sound().max);
        // Those that are too many now leave when they see it; the others come with the work.
        self.shared.work.notify_all();
        self.shared.call(queue);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.wait();
        self.reap(Nanos::ZERO, &mut |_| {});
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use egret_vring::memory::{IoVec, Lent};

    use super::*;
    use crate::request::{Op, Request, RequestToken};
    use crate::{Driver, Options};

    const DISKS: u32 = 3;
    const FEW: WorkerLimits = WorkerLimits { min: 1, max: 4, idle: Duration::from_millis(1) };

    fn threads(limits: WorkerLimits) -> Threads {
        let mut threads = Threads::new(limits, Arc::default()).unwrap();
        for slot in 0..DISKS {
            let driver = Driver::Null { size: 4096, latency: Nanos::ZERO, read_zeroes: false };
            threads.attach(slot, &Arc::new(Disk::open(&Options::new("null", driver)).unwrap()));
        }
        threads
    }

    fn push(threads: &mut Threads, token: u64) {
        let request =
            Request { op: Op::Flush, offset: 0, len: 0, buffers: Lent::default(), token: RequestToken(token) };
        threads.push(Job::new(token as u32 % DISKS, request));
    }

    /// Reaps what is back, blocking as the loop does if there is nothing.
    fn reap_some(threads: &mut Threads, done: &mut dyn FnMut(Finished)) {
        if threads.arm() {
            let mut fds = [rustix::event::PollFd::new(&threads.shared.event, rustix::event::PollFlags::IN)];
            let hangs = rustix::event::Timespec { tv_sec: 60, tv_nsec: 0 };
            assert_eq!(rustix::event::poll(&mut fds, Some(&hangs)), Ok(1), "nothing comes back");
            // A loop watches for edges; here the level is taken away.
            let _ = std::io::Read::read(&mut (&threads.shared.event), &mut [0; 8]);
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
            reap_some(threads, &mut |finished| ended.push(finished.job.request.token));
        }
        ended.iter().position(|token| *token == RequestToken(0)).unwrap()
    }

    #[test]
    fn parts_of_a_large_job_are_small_while_there_are_other_disks() {
        let mut threads = threads(WorkerLimits { min: 1, max: 1, idle: Duration::from_secs(10) });
        let mut large = vec![1; 2 * blocking::PART as usize];
        let turns = |part: u64| (2 * blocking::PART / part) as usize;
        assert_eq!(overtaken(&mut threads, 1, &mut large), turns(blocking::SHARED_PART) - 1);
        (1..DISKS).for_each(|slot| threads.detach(slot));
        assert_eq!(overtaken(&mut threads, 0, &mut large), turns(blocking::PART) - 1);
    }

    /// Waits until one worker is left, which still works.
    fn await_the_last(threads: &mut Threads) {
        let mut queue = threads.shared.lock();
        while queue.workers > 1 {
            queue = threads.shared.left.wait(queue).unwrap();
        }
        drop(queue);
        push(threads, 0);
        threads.submit(Nanos::ZERO);
        reap(threads, 1);
    }

    #[test]
    fn workers_come_with_the_work_and_leave_when_they_are_idle() {
        let mut threads = threads(FEW);
        assert_eq!(threads.shared.lock().workers, 0);
        for token in 0..1000 {
            push(&mut threads, token);
        }
        threads.submit(Nanos::ZERO);
        assert!((1..=4).contains(&threads.shared.lock().workers));
        reap(&mut threads, 1000);
        await_the_last(&mut threads);
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

    const MIB: u64 = 1 << 20;

    /// A pool of at most `max` workers, and as many disks as files: each with a gate, by which a test holds up those who
    /// write there, and unable to have the kernel zero anything.
    fn gated(max: u32, count: u32) -> (Threads, Vec<Arc<Disk>>, tempfile::TempDir) {
        let mut threads =
            Threads::new(WorkerLimits { min: 0, max, idle: Duration::from_secs(10) }, Arc::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let disks: Vec<Arc<Disk>> = (0..count)
            .map(|at| {
                let filename = dir.path().join(at.to_string());
                std::fs::File::create(&filename).unwrap().set_len(16 * MIB).unwrap();
                let mut disk = Disk::open(&Options::new(format!("disk{at}"), Driver::File { filename })).unwrap();
                disk.gate = Some(Default::default());
                disk.able.zero_range.store(false, Ordering::Relaxed);
                Arc::new(disk)
            })
            .collect();
        disks.iter().enumerate().for_each(|(slot, disk)| threads.attach(slot as u32, disk));
        (threads, disks, dir)
    }

    /// Holds up who writes to these bytes of a disk, until it is dropped.
    struct Closed<'a>(&'a Disk, std::ops::Range<u64>);

    impl<'a> Closed<'a> {
        fn new(disk: &'a Disk, bytes: std::ops::Range<u64>) -> Self {
            disk.gate.as_ref().unwrap().enter_alone(&bytes);
            Self(disk, bytes)
        }
    }

    impl Drop for Closed<'_> {
        fn drop(&mut self) {
            self.0.gate.as_ref().unwrap().leave_alone(&self.1);
        }
    }

    /// Pushes zeroes for the first `len` bytes of the disk at `slot`.
    fn push_zeroes(threads: &mut Threads, slot: u32, len: u64, token: u64) {
        let op = Op::WriteZeroes { unmap: false, fua: false };
        threads
            .push(Job::new(slot, Request { op, offset: 0, len, buffers: Lent::default(), token: RequestToken(token) }));
    }

    /// Waits for the next `count` jobs that come back, and names them in their order.
    fn ended(threads: &mut Threads, count: usize) -> Vec<u64> {
        let mut ended = Vec::new();
        while ended.len() < count {
            reap_some(threads, &mut |finished| {
                assert_eq!(finished.result, Ok(()));
                ended.push(finished.job.request.token.0);
            });
        }
        ended
    }

    /// Waits until so many workers are at a job.
    fn await_busy(threads: &Threads, count: u32) {
        let begun = std::time::Instant::now();
        while threads.shared.lock().jobs.taken() != count {
            assert!(begun.elapsed() < Duration::from_secs(60), "{} are", threads.shared.lock().jobs.taken());
            std::thread::yield_now();
        }
    }

    #[test]
    fn between_two_parts_of_a_job_others_have_their_turn() {
        for max in [1, 2] {
            let (mut threads, disks, _dir) = gated(max, max + 1);
            // Whoever is at a large job gets no further than its first part.
            let closed: Vec<_> = disks[..max as usize].iter().map(|disk| Closed::new(disk, MIB..2 * MIB)).collect();
            (0..max).for_each(|slot| push_zeroes(&mut threads, slot, 16 * MIB, slot.into()));
            push_zeroes(&mut threads, max, 512, 100);
            threads.submit(Nanos::ZERO);
            assert_eq!(ended(&mut threads, 1), [100], "it begins after one part of each worker");
            drop(closed);
            assert_eq!(ended(&mut threads, max as usize).len(), max as usize);
        }
    }

    #[test]
    fn disks_have_their_turns_one_after_the_other() {
        let (mut threads, _disks, _dir) = gated(1, 3);
        (0..100).for_each(|token| push_zeroes(&mut threads, 0, 512, token));
        // The second disk is at two slots, and that gets it no more.
        let twice = Arc::clone(&threads.disks[1].as_ref().unwrap().0);
        threads.attach(3, &twice);
        (100..110).for_each(|token| push_zeroes(&mut threads, [1, 3][token as usize % 2], 512, token));
        (200..210).for_each(|token| push_zeroes(&mut threads, 2, 512, token));
        threads.submit(Nanos::ZERO);
        let ended = ended(&mut threads, 120);
        assert_eq!(ended[..6], [0, 100, 200, 1, 101, 201]);
        assert!(ended[..30].iter().all(|token| token % 100 < 10), "{ended:?}");
    }

    #[test]
    fn a_disk_that_hangs_leaves_workers_to_the_others() {
        let (mut threads, disks, _dir) = gated(8, 3);
        let mut closed = Vec::new();
        // Of eight workers the first disk gets four, of the four that are left the second gets two.
        for (slot, busy) in [(0, 4), (1, 6)] {
            closed.push(Closed::new(&disks[slot], 0..MIB));
            (0..20).for_each(|token| push_zeroes(&mut threads, slot as u32, 512, token));
            threads.submit(Nanos::ZERO);
            await_busy(&threads, busy);
        }
        (100..120).for_each(|token| push_zeroes(&mut threads, 2, 512, token));
        threads.submit(Nanos::ZERO);
        assert!(ended(&mut threads, 20).iter().all(|&token| token >= 100));
        await_busy(&threads, 6);
        drop(closed);
        assert_eq!(ended(&mut threads, 40).len(), 40);
    }

    #[test]
    fn a_disk_that_is_alone_has_all_workers() {
        let (mut threads, disks, _dir) = gated(8, 2);
        let closed = Closed::new(&disks[0], 0..MIB);
        (0..20).for_each(|token| push_zeroes(&mut threads, 0, 512, token));
        threads.submit(Nanos::ZERO);
        await_busy(&threads, 4);
        threads.detach(1);
        await_busy(&threads, 8);
        drop(closed);
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
        let shared = Arc::downgrade(&threads.shared);
        let mut left = 0;
        Box::new(threads).end(&mut |_| left += 1);
        assert_eq!(left, 101);
        // A worker's last breath may come a moment after it has been counted out.
        while shared.strong_count() > 0 {
            std::thread::yield_now();
        }
    }
}
