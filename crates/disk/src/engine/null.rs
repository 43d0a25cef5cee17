//! The engine that does nothing: for measuring everything else.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use egret_event_loop::Nanos;

use super::{Engine, SharedEngine};
use crate::buffers;
use crate::disk::{Backing, Disk};
use crate::error::EngineError;
use crate::job::Job;
use crate::request::Op;
use crate::stats::EngineCounters;

/// Completes every job, at once or after its disk's latency.
pub(crate) struct Null {
    /// By slot.
    disks: Vec<Setting>,
    /// Jobs that take no time.
    done: VecDeque<Box<Job>>,
    /// Jobs that take some, by latency: within one they finish in the order in which they came.
    lanes: Vec<Lane>,
    /// The clock as it was last handed down.
    now: Nanos,
    pushed: u64,
    counters: Arc<EngineCounters>,
}

/// What a disk's jobs come to.
#[derive(Clone, Copy, Default)]
struct Setting {
    read_zeroes: bool,
    /// Which lane, if they take time.
    lane: Option<usize>,
}

struct Lane {
    latency: Nanos,
    /// Jobs and when they finish.
    waiting: VecDeque<(Nanos, Box<Job>)>,
    /// How many at the back were pushed but not submitted: their time has not begun.
    fresh: usize,
}

impl Null {
    pub(crate) fn new(counters: Arc<EngineCounters>) -> Self {
        Self { disks: Vec::new(), done: VecDeque::new(), lanes: Vec::new(), now: Nanos::ZERO, pushed: 0, counters }
    }
}

impl Engine for Null {
    #[inline]
    fn push(&mut self, job: Box<Job>) {
        let setting = self.disks[job.slot as usize];
        if setting.read_zeroes && job.request.op == Op::Read {
            buffers::zero(&job.request.buffers, 0);
        }
        self.pushed += 1;
        match setting.lane {
            None => self.done.push_back(job),
            Some(lane) => {
                self.lanes[lane].waiting.push_back((Nanos::MAX, job));
                self.lanes[lane].fresh += 1;
            }
        }
    }

    fn submit(&mut self, now: Nanos) {
        if self.pushed == 0 {
            return;
        }
        self.now = now;
        self.counters.batch(std::mem::take(&mut self.pushed));
        for lane in &mut self.lanes {
            let deadline = now + lane.latency;
            for (at, _) in lane.waiting.iter_mut().rev().take(std::mem::take(&mut lane.fresh)) {
                *at = deadline;
            }
        }
    }

    #[inline]
    fn has_completions(&mut self) -> bool {
        !self.done.is_empty() || self.deadline().is_some_and(|at| at <= self.now)
    }

    fn reap(&mut self, now: Nanos, done: &mut dyn FnMut(Box<Job>)) {
        self.now = now;
        while let Some(job) = self.done.pop_front() {
            done(job.ended(Ok(())));
        }
        for lane in &mut self.lanes {
            while lane.waiting.front().is_some_and(|&(at, _)| at <= now) {
                let Some((_, job)) = lane.waiting.pop_front() else { break };
                done(job.ended(Ok(())));
            }
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        self.lanes.iter().filter_map(|lane| lane.waiting.front()).map(|&(at, _)| at).min()
    }

    fn end(self: Box<Self>, left: &mut dyn FnMut(Box<Job>)) {
        let waiting = self.lanes.into_iter().flat_map(|lane| lane.waiting).map(|(_, job)| job);
        self.done.into_iter().chain(waiting).for_each(left);
    }
}

impl SharedEngine for Null {
    fn attach(&mut self, slot: u32, disk: &Arc<Disk>) -> Result<(), EngineError> {
        let Backing::Null { latency, read_zeroes } = disk.backing else { return Ok(()) };
        let lane = (latency > Nanos::ZERO).then(|| {
            self.lanes.iter().position(|lane| lane.latency == latency).unwrap_or_else(|| {
                self.lanes.push(Lane { latency, waiting: VecDeque::new(), fresh: 0 });
                self.lanes.len() - 1
            })
        });
        let slot = slot as usize;
        self.disks.resize(self.disks.len().max(slot + 1), Setting::default());
        self.disks[slot] = Setting { read_zeroes, lane };
        Ok(())
    }

    fn detach(&mut self, slot: u32) {
        self.disks[slot as usize] = Setting::default();
    }
}

#[cfg(test)]
mod tests {
    use egret_vring::memory::Lent;

    use super::*;
    use crate::request::{Request, RequestToken};
    use crate::{Driver, Options};

    #[test]
    fn an_engine_that_ends_gives_back_what_it_has_whether_that_takes_time_or_not() {
        let mut null = Box::new(Null::new(Arc::default()));
        for (slot, latency) in [(0, Nanos::ZERO), (1, Nanos(7)), (2, Nanos(9))] {
            let driver = Driver::Null { size: 512, latency, read_zeroes: false };
            null.attach(slot, &Arc::new(Disk::open(&Options::new("null", driver)).unwrap())).unwrap();
            let token = RequestToken(slot.into());
            let request = Request { op: Op::Flush, offset: 0, len: 0, buffers: Lent::default(), token };
            null.push(Job::new(slot, request));
        }
        let mut left = Vec::new();
        null.end(&mut |job| left.push(job.request.token.0));
        assert_eq!(left, [0, 1, 2]);
    }
}
