//! Worker threads: the engine of `aio=threads`, and the helpers of the others.
//!
//! Jobs go to the workers through a locked queue, a batch at a time, and come back on a [list](done) that needs no lock.
//!
//! The workers are shared fairly by all disks of the I/O thread ([`Turns`](super::turns::Turns)). A turn is a part of a
//! job ([`blocking::run`]): what is left of it goes to the end of its disk's line.

mod done;
mod workers;

use std::os::fd::RawFd;
use std::sync::Arc;

use egret_event_loop::{EventNotifier, Nanos, clock};

use self::done::{DoneList, JobPtr, Node};
use self::workers::Workers;
use super::{Engine, SharedEngine, WorkerLimits};
use crate::blocking;
use crate::disk::Disk;
use crate::error::EngineError;
use crate::job::Job;
use crate::stats::EngineCounters;

impl WorkerLimits {
    /// The same, with at least one worker, which stays: where no thread can be started any more, whatever comes would fail
    /// for having none.
    fn sound(self) -> Self {
        Self { min: self.min.max(1), max: self.max.max(1), ..self }
    }
}

/// Nodes that are kept; with more jobs than this in flight each of the others allocates one.
const SPARE: usize = 4096;

/// Where a disk's jobs wait.
#[derive(Clone, Copy)]
struct Lines {
    large: usize,
    others: usize,
}

/// See the module's description.
pub(crate) struct Threads {
    workers: Arc<Workers>,
    /// Disks and their lines, for large jobs and for others, by slot.
    disks: Vec<Option<(Arc<Disk>, Lines)>>,
    /// Pushed and not submitted, with the lines that they are for.
    pending: Vec<(usize, JobPtr)>,
    /// Nodes to use again. They are boxed because lists of them go through other threads.
    #[expect(clippy::vec_box, reason = "the boxes are what is kept")]
    spare: Vec<Box<Node>>,
    counters: Arc<EngineCounters>,
}

impl Threads {
    pub(crate) fn new(limits: WorkerLimits, counters: Arc<EngineCounters>) -> Result<Self, EngineError> {
        let event = EventNotifier::new().map_err(EngineError::Event)?;
        let workers = Arc::new(Workers::new(limits.sound(), DoneList::new(event)));
        Ok(Self { workers, disks: Vec::new(), pending: Vec::new(), spare: Vec::new(), counters })
    }

    /// Waits for the workers; what was never submitted joins what is done.
    fn wait(&mut self) {
        self.workers.end();
        self.pending.drain(..).for_each(|(_, job)| self.workers.done.push(job));
    }
}

impl Engine for Threads {
    fn push(&mut self, job: Box<Job>) {
        let (disk, lines) = self.disks[job.slot as usize].as_ref().expect("a job is for an attached disk");
        let line = if job.request.len > blocking::PART { lines.large } else { lines.others };
        let node = Node::new(job, Arc::as_ptr(disk));
        let node = match self.spare.pop() {
            Some(mut spare) => {
                *spare = node;
                spare
            }
            None => Box::new(node),
        };
        self.pending.push((line, JobPtr::new(node)));
    }

    fn submit(&mut self, _now: Nanos) {
        if self.pending.is_empty() {
            return;
        }
        let count = self.pending.len();
        let begun = clock::now();
        let mut queue = self.workers.lock();
        self.pending.drain(..).for_each(|(line, job)| queue.jobs.put(line, job));
        self.workers.call(queue);
        self.counters.batch(count as u64);
        self.counters.took(clock::now() - begun);
    }

    fn has_completions(&mut self) -> bool {
        !self.workers.done.is_empty()
    }

    fn reap(&mut self, _now: Nanos, done: &mut dyn FnMut(Box<Job>)) {
        let Self { workers, spare, .. } = self;
        workers.done.take(|mut node| {
            let result = node.result;
            let job = node.job.take();
            if spare.len() < SPARE {
                spare.push(node);
            }
            if let Some(job) = job {
                done(job.ended(result));
            }
        });
    }

    fn arm(&mut self) -> bool {
        let quiet = self.workers.done.arm();
        if !quiet {
            self.suppress();
        }
        quiet
    }

    fn suppress(&mut self) {
        self.workers.done.disarm();
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.workers.done.descriptor())
    }

    fn end(mut self: Box<Self>, left: &mut dyn FnMut(Box<Job>)) {
        self.wait();
        self.reap(Nanos::ZERO, left);
    }
}

impl SharedEngine for Threads {
    fn attach(&mut self, slot: u32, disk: &Arc<Disk>) -> Result<(), EngineError> {
        let mut queue = self.workers.lock();
        let lines = Lines { large: queue.jobs.open_large(disk), others: queue.jobs.open(disk) };
        drop(queue);
        let slot = slot as usize;
        self.disks.resize(self.disks.len().max(slot + 1), None);
        self.disks[slot] = Some((Arc::clone(disk), lines));
        Ok(())
    }

    fn detach(&mut self, slot: u32) {
        let Some((_, Lines { large, others })) = self.disks[slot as usize].take() else { return };
        let mut queue = self.workers.lock();
        queue.jobs.close(large);
        queue.jobs.close(others);
        self.workers.call(queue);
    }

    fn set_beside_others(&mut self, several: bool) {
        self.workers.lock().jobs.set_beside_others(several);
    }

    fn limit_workers(&mut self, limits: WorkerLimits) {
        self.workers.set_limits(limits.sound());
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.wait();
        self.reap(Nanos::ZERO, &mut |_| {});
    }
}

#[cfg(test)]
mod tests;
