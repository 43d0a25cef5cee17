//! Worker threads: the engine of `aio=threads`, and the helpers of the others.
//!
//! Jobs go to the workers through a locked queue, a batch at a time. They come back on a list that the loop takes
//! whole with one atomic exchange, so that a worker that loses its processor at a bad moment holds up nobody.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use egret_event_loop::{Nanos, clock};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::{Engine, Finished, Job};
use crate::blocking::{self, Scratch};
use crate::disk::Disk;
use crate::error::EngineError;
use crate::stats::EngineCounters;

/// How many workers there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// This many stay.
    pub(crate) min: u32,
    /// There are never more.
    pub(crate) max: u32,
    /// The others leave after so long without work.
    pub(crate) idle: Duration,
}

impl Limits {
    /// The same, with somebody to do the work.
    fn sound(self) -> Self {
        Self { max: self.max.max(1), ..self }
    }
}

/// A job, and what is needed to run it, on its way to a worker and back.
struct Node {
    job: Job,
    disk: *const Disk,
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
    limits: Limits,
    jobs: VecDeque<Handed>,
    workers: u32,
    /// Workers that wait for a job.
    idle: usize,
    /// Workers that were started and have not looked for a job yet.
    starting: usize,
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

/// See the module's description.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    /// Disks by slot.
    disks: Vec<Option<Arc<Disk>>>,
    /// Pushed and not submitted.
    pending: VecDeque<Handed>,
    /// Nodes to use again. They are boxed because lists of them go through other threads.
    #[expect(clippy::vec_box, reason = "the boxes are what is kept")]
    spare: Vec<Box<Node>>,
    counters: Arc<EngineCounters>,
}

impl Threads {
    pub(crate) fn new(limits: Limits, counters: Arc<EngineCounters>) -> Result<Self, EngineError> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| EngineError::Event(e.into()))?;
        let queue =
            Queue { limits: limits.sound(), jobs: VecDeque::new(), workers: 0, idle: 0, starting: 0, closing: false };
        let shared = Arc::new(Shared {
            queue: Mutex::new(queue),
            work: Condvar::new(),
            left: Condvar::new(),
            done: AtomicPtr::new(ptr::null_mut()),
            armed: AtomicBool::new(false),
            event: File::from(event),
        });
        Ok(Self { shared, disks: Vec::new(), pending: VecDeque::new(), spare: Vec::new(), counters })
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
        for Handed(node) in self.pending.drain(..) {
            self.shared.publish(node);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A worker that panicked left the queue as it was; what it guards stays consistent between statements.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a worker if there are more jobs than workers to take them. A worker does the same when it takes a job,
    /// so that a large batch costs the loop the start of one thread.
    fn grow(self: &Arc<Self>, mut queue: MutexGuard<'_, Queue>) {
        if queue.jobs.len() <= queue.idle + queue.starting || queue.workers >= queue.limits.max {
            return;
        }
        queue.workers += 1;
        queue.starting += 1;
        drop(queue);
        let shared = Arc::clone(self);
        let spawned = std::thread::Builder::new().name("disk-worker".into()).spawn(move || work(&shared));
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
        for Handed(node) in std::mem::take(&mut queue.jobs) {
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
            // It may have been woken for a job: somebody who stays takes it.
            shared.work.notify_one();
            break;
        }
        if let Some(Handed(node)) = queue.jobs.pop_front() {
            shared.grow(queue);
            // SAFETY: taken from the queue, so it is ours; the disk stays attached until the loop has it back.
            let (disk, job) = unsafe { (&*(*node).disk, &(*node).job) };
            let result = blocking::run(disk, job, &mut scratch);
            // SAFETY: still ours.
            unsafe { (*node).result = result };
            shared.publish(node);
            queue = shared.lock();
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
        if waited.timed_out() && queue.jobs.is_empty() && queue.workers > queue.limits.min {
            break;
        }
    }
    queue.workers -= 1;
    shared.left.notify_all();
}

impl Engine for Threads {
    fn attach(&mut self, slot: u32, disk: &Arc<Disk>) {
        let slot = slot as usize;
        self.disks.resize(self.disks.len().max(slot + 1), None);
        self.disks[slot] = Some(Arc::clone(disk));
    }

    fn detach(&mut self, slot: u32) {
        self.disks[slot as usize] = None;
    }

    fn push(&mut self, job: Job) {
        let disk = self.disks[job.slot as usize].as_ref().map_or(ptr::null(), Arc::as_ptr);
        assert!(!disk.is_null(), "a job is for an attached disk");
        let next = ptr::null_mut();
        let node = Node { job, disk, result: Ok(()), next };
        let node = match self.spare.pop() {
            Some(mut spare) => {
                *spare = node;
                spare
            }
            None => Box::new(node),
        };
        self.pending.push_back(Handed(Box::into_raw(node)));
    }

    fn submit(&mut self, _now: Nanos) {
        if self.pending.is_empty() {
            return;
        }
        let count = self.pending.len();
        let begun = clock::now();
        let mut queue = self.shared.lock();
        queue.jobs.append(&mut self.pending);
        let wake = queue.idle.min(count);
        self.shared.grow(queue);
        for _ in 0..wake {
            self.shared.work.notify_one();
        }
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
            self.spare.push(node);
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

    fn limit_workers(&mut self, limits: Limits) {
        let mut queue = self.shared.lock();
        queue.limits = limits.sound();
        // Those that are too many now leave when they see it; the others come with the work.
        self.shared.work.notify_all();
        self.shared.grow(queue);
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
    use super::*;
    use crate::request::{Op, Request, Token};
    use crate::{Driver, Options};

    const FEW: Limits = Limits { min: 1, max: 4, idle: Duration::from_millis(1) };

    fn threads(limits: Limits) -> Threads {
        let mut threads = Threads::new(limits, Arc::default()).unwrap();
        let driver = Driver::Null { size: 4096, latency: Nanos::ZERO, read_zeroes: false };
        threads.attach(0, &Arc::new(Disk::open(&Options::new("disk0", driver)).unwrap()));
        threads
    }

    fn push(threads: &mut Threads, token: u64) {
        let request = Request { op: Op::Flush, offset: 0, len: 0, buffers: Vec::new(), token: Token(token) };
        threads.push(Job { slot: 0, sync_after: false, request });
    }

    /// Reaps until `count` jobs are back, blocking as the loop does.
    fn reap(threads: &mut Threads, count: usize) {
        let mut done = 0;
        while done < count {
            if threads.arm() {
                let mut fds = [rustix::event::PollFd::new(&threads.shared.event, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut fds, None).unwrap();
                // A loop watches for edges; here the level is taken away.
                let _ = std::io::Read::read(&mut (&threads.shared.event), &mut [0; 8]);
            }
            threads.suppress();
            threads.reap(Nanos::ZERO, &mut |_| done += 1);
        }
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
        let long = Limits { idle: Duration::from_secs(100), ..FEW };
        let mut threads = threads(Limits { max: 8, ..long });
        for round in 0..200 {
            for token in 0..100 {
                push(&mut threads, token);
            }
            threads.submit(Nanos::ZERO);
            let max = [1, 8, 3][round % 3];
            threads.limit_workers(Limits { max, ..long });
            reap(&mut threads, 100);
        }
        threads.limit_workers(Limits { min: 0, max: 0, ..long });
        await_the_last(&mut threads);
    }

    #[test]
    fn no_completion_is_lost_between_the_last_look_and_the_block() {
        let mut threads = threads(Limits { idle: Duration::from_secs(10), ..FEW });
        for round in 0..5000 {
            push(&mut threads, round);
            threads.submit(Nanos::ZERO);
            reap(&mut threads, 1);
        }
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
