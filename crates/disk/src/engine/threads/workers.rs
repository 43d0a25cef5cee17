//! The workers: when one is started, when it is woken, what it does, and when it leaves.
//!
//! `tests/workers.rs` walks through the interleavings with loom.

#![allow(unsafe_code)]

use std::sync::{Arc, PoisonError};
use std::task::Poll;

use egret_confine::{Bounds, ThreadKind};
use rustix::io::Errno;

use super::done::{DoneList, JobPtr, Node};
use crate::blocking::{self, Scratch};
use crate::engine::WorkerLimits;
use crate::engine::turns::Turns;
use crate::sync::{Condvar, Mutex, MutexGuard, thread};

/// What workers and their loop share under a lock.
pub(super) struct Queue {
    pub(super) limits: WorkerLimits,
    /// The jobs, for as many of which there is a place as there may be workers.
    pub(super) jobs: Turns<JobPtr>,
    pub(super) workers: u32,
    /// Workers that wait for a job.
    idle: u32,
    /// Of those that wait: how many were woken and have not looked yet.
    woken: u32,
    /// Workers that were started and have not looked for a job yet.
    starting: u32,
    closing: bool,
    /// Those that there are were started where their I/O thread ran then: all leave when they have been idle.
    pub(super) renews: bool,
}

/// The workers of one I/O thread.
pub(super) struct Workers {
    queue: Mutex<Queue>,
    pub(super) work: Condvar,
    pub(super) left: Condvar,
    pub(super) done: DoneList,
}

impl Workers {
    /// None yet: they come with the work.
    pub(super) fn new(limits: WorkerLimits, done: DoneList) -> Self {
        let jobs = Turns::new(limits.max);
        let queue = Queue { limits, jobs, workers: 0, idle: 0, woken: 0, starting: 0, closing: false, renews: false };
        Self { queue: Mutex::new(queue), work: Condvar::new(), left: Condvar::new(), done }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes as many workers as can begin something now, and starts one if there are too few. A worker does the same
    /// when it takes a job, so that a large batch costs the loop the start of one thread.
    pub(super) fn call(self: &Arc<Self>, mut queue: MutexGuard<'_, Queue>) {
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
        let (workers, bounds) = (Arc::clone(self), Bounds::of_this_thread());
        let spawned = thread::Builder::new().name("disk-worker".into()).spawn(move || {
            bounds.narrow(ThreadKind::Worker);
            work(&workers);
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
        // There is no worker, and none can be started: the jobs fail, or they would never come back.
        for mut job in queue.jobs.drain() {
            job.node().result = Err(Errno::AGAIN);
            self.done.push(job);
        }
    }

    /// There may be so many from here on. Where that is as it was, others take the place of those that there are, once these have
    /// been idle: a worker runs on the processors of who started it, and these have changed.
    pub(super) fn set_limits(self: &Arc<Self>, limits: WorkerLimits) {
        let mut queue = self.lock();
        queue.renews |= queue.limits == limits && queue.workers > 0;
        queue.limits = limits;
        queue.jobs.set_places(limits.max);
        // Those that are too many now leave when they see it; the others come with the work.
        self.work.notify_all();
        self.call(queue);
    }

    /// Waits until the workers have run their jobs, which use the guests' memory, and have left.
    pub(super) fn end(&self) {
        let mut queue = self.lock();
        queue.closing = true;
        self.work.notify_all();
        while queue.workers > 0 {
            queue = self.left.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A worker's life.
fn work(workers: &Arc<Workers>) {
    let mut scratch = Scratch::default();
    let mut queue = workers.lock();
    queue.starting -= 1;
    loop {
        if queue.workers > queue.limits.max {
            break;
        }
        if let Some((line, mut taken)) = queue.jobs.take() {
            let part = if queue.jobs.are_beside_others() { blocking::SHARED_PART } else { blocking::PART };
            workers.call(queue);
            let Node { job: Some(job), disk, done, result, .. } = taken.node() else {
                unreachable!("it is on its way")
            };
            // SAFETY: the disk stays attached until the loop has the job back.
            let disk = unsafe { &**disk };
            let rest = match blocking::run(disk, job, done, part, &mut scratch) {
                Poll::Ready(ended) => {
                    *result = ended;
                    workers.done.push(taken);
                    None
                }
                Poll::Pending => {
                    // Its I/O thread, or that thread's client, may want this processor; without a yield the scheduler
                    // would leave the worker on it for milliseconds.
                    thread::yield_now();
                    Some(taken)
                }
            };
            queue = workers.lock();
            queue.jobs.leave(line);
            if let Some(rest) = rest {
                queue.jobs.put(line, rest);
            }
            continue;
        }
        if queue.closing {
            break;
        }
        queue.idle += 1;
        let is_to_stay = !queue.renews && queue.workers <= queue.limits.min;
        let mut timed_out = false;
        if is_to_stay {
            queue = workers.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
        } else {
            let idle = queue.limits.idle;
            let (back, waited) = workers.work.wait_timeout(queue, idle).unwrap_or_else(PoisonError::into_inner);
            (queue, timed_out) = (back, waited.timed_out());
        }
        queue.idle -= 1;
        // A worker may wake by itself before one that was notified does: whichever looks first counts as the notified one.
        queue.woken = queue.woken.saturating_sub(1);
        if timed_out && queue.jobs.is_empty() && (queue.renews || queue.workers > queue.limits.min) {
            break;
        }
    }
    queue.workers -= 1;
    queue.renews &= queue.workers > 0;
    workers.left.notify_all();
    // It may leave although it was notified of a job; another worker has to take that.
    workers.call(queue);
}
