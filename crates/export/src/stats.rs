//! What a queue counts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use egret_event_loop::{Counter, Nanos};
use egret_virtio::{Completed, RequestType, Status};

use crate::latency::{Latencies, LatencyCounters};

/// Requests of one type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpStats {
    /// Requests that completed.
    pub requests: u64,
    /// Bytes they moved, discarded or zeroed.
    pub bytes: u64,
    /// Those that completed with an error.
    pub errors: u64,
}

impl OpStats {
    /// Those that have not failed. Of counters that go on while they are read one may be ahead.
    pub const fn succeeded(&self) -> u64 {
        self.requests.saturating_sub(self.errors)
    }

    /// What was counted after `before`; nothing of what has less now, because something was part of it that is gone.
    pub const fn since(&self, before: &Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(before.requests),
            bytes: self.bytes.saturating_sub(before.bytes),
            errors: self.errors.saturating_sub(before.errors),
        }
    }

    /// Counts others, too.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.errors += other.errors;
    }
}

/// What one queue of an export counts, as it counts it: whichever loop runs the queue writes, any thread may read.
///
/// It is the export's, and stays while clients come and go and the queue moves.
#[derive(Debug, Default)]
// On cache lines of its own, so that two loops that count do not get into each other's way.
#[repr(align(128))]
pub struct QueueCounters {
    ops: [TimedCounters; RequestType::ALL.len()],
    /// Requests taken in and not completed.
    pub in_flight: Counter,
    /// Of those, requests that wait because the export is stopped for an error.
    pub waiting: Counter,
    /// Of those in flight, requests that take longer than they may before that is told.
    pub overdue: Counter,
    /// Notifications sent to the guest.
    pub calls: Counter,
    /// Batches of used requests that the guest did not want to be notified of.
    pub calls_spared: Counter,
    /// Times the guest broke the queue.
    pub broken: Counter,
    /// Of the requests, those for each disk, by its name, where there may be several. No I/O thread takes the lock.
    disks: Mutex<BTreeMap<String, Arc<DiskCounters>>>,
}

/// Of what one queue counts, the requests for one of several disks, but for how long they took: histograms for each would be large.
#[derive(Debug, Default)]
pub(crate) struct DiskCounters {
    ops: [OpCounters; RequestType::ALL.len()],
}

impl DiskCounters {
    #[inline]
    pub(crate) fn count(&self, completed: &Completed) {
        self.ops[completed.request_type as usize].count(completed.bytes, completed.status == Status::Ok);
    }
}

#[derive(Debug, Default)]
struct OpCounters {
    requests: Counter,
    bytes: Counter,
    errors: Counter,
}

/// Likewise, and how long they took.
#[derive(Debug, Default)]
struct TimedCounters {
    op: OpCounters,
    /// Made at the first request, so that an idle queue costs no memory.
    latency: OnceLock<Box<LatencyCounters>>,
}

impl OpCounters {
    #[inline]
    fn count(&self, bytes: u64, is_ok: bool) {
        self.requests.add(1);
        self.bytes.add(if is_ok { bytes } else { 0 });
        self.errors.add(u64::from(!is_ok));
    }

    fn read(&self) -> OpStats {
        OpStats { requests: self.requests.get(), bytes: self.bytes.get(), errors: self.errors.get() }
    }
}

impl QueueCounters {
    /// Those for a disk, which are there until they are [forgotten](Self::forget_disk).
    pub(crate) fn of_disk(&self, node_name: &str) -> Arc<DiskCounters> {
        Arc::clone(self.disks().entry(node_name.to_owned()).or_default())
    }

    /// Its disk is not one of the export's any more.
    pub(crate) fn forget_disk(&self, node_name: &str) {
        self.disks().remove(node_name);
    }

    /// Adds the requests for one of several disks to `sum`, but for how long they took.
    pub fn add_of_disk_to(&self, node_name: &str, sum: &mut QueueStats) {
        if let Some(counters) = self.disks().get(node_name) {
            sum.ops.iter_mut().zip(&counters.ops).for_each(|(sum, op)| sum.add(&op.read()));
        }
    }

    fn disks(&self) -> MutexGuard<'_, BTreeMap<String, Arc<DiskCounters>>> {
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn count(&self, completed: &Completed, latency: Nanos) {
        self.count_op(completed.request_type, completed.bytes, completed.status == Status::Ok, latency);
    }

    /// As [`count`](Self::count), of a request that was no chain of descriptors.
    #[inline]
    pub(crate) fn count_op(&self, request_type: RequestType, bytes: u64, is_ok: bool, latency: Nanos) {
        let TimedCounters { op, latency: times } = &self.ops[request_type as usize];
        op.count(bytes, is_ok);
        times.get_or_init(|| Box::new(LatencyCounters::new())).count(latency);
    }

    /// Requests of `request_type`.
    pub fn op(&self, request_type: RequestType) -> OpStats {
        self.ops[request_type as usize].op.read()
    }

    /// Adds how long requests of `request_type` took to `sum`, if there were any.
    pub fn add_latency_to(&self, request_type: RequestType, sum: &mut Option<Latencies>) {
        if let Some(latency) = self.ops[request_type as usize].latency.get() {
            latency.add_to(sum.get_or_insert_default());
        }
    }

    /// Everything, without asking the loop.
    pub fn read(&self) -> QueueStats {
        let mut stats = QueueStats::default();
        self.add_to(&mut stats);
        stats
    }

    /// Adds everything to `sum`.
    pub fn add_to(&self, sum: &mut QueueStats) {
        for request_type in RequestType::ALL {
            sum.ops[request_type as usize].add(&self.op(request_type));
            self.add_latency_to(request_type, &mut sum.latency[request_type as usize]);
        }
        sum.in_flight += self.in_flight.get();
        sum.waiting += self.waiting.get();
        sum.overdue += self.overdue.get();
        sum.calls += self.calls.get();
        sum.calls_spared += self.calls_spared.get();
        sum.broken += self.broken.get();
    }
}

/// What one queue, or several, had counted when they were read, since their exports began.
#[derive(Clone, Debug, Default)]
pub struct QueueStats {
    ops: [OpStats; RequestType::ALL.len()],
    latency: [Option<Latencies>; RequestType::ALL.len()],
    /// Requests taken in and not completed.
    pub in_flight: u64,
    /// Of those, requests that wait because the export is stopped for an error.
    pub waiting: u64,
    /// Of those in flight, requests that take longer than they may before that is told.
    pub overdue: u64,
    /// Notifications sent to the guest.
    pub calls: u64,
    /// Batches of used requests that the guest did not want to be notified of.
    pub calls_spared: u64,
    /// Times the guest broke the queue.
    pub broken: u64,
}

impl QueueStats {
    /// Requests of `request_type`.
    pub const fn op(&self, request_type: RequestType) -> OpStats {
        self.ops[request_type as usize]
    }

    /// Requests of every type.
    pub fn total(&self) -> OpStats {
        self.ops.iter().fold(OpStats::default(), |mut sum, op| {
            sum.add(op);
            sum
        })
    }

    /// How long requests of `request_type` took, from the turn that took them in to the turn that saw them end; `None` before
    /// the first.
    pub const fn latency_of(&self, request_type: RequestType) -> Option<&Latencies> {
        self.latency[request_type as usize].as_ref()
    }

    /// How long requests of every type took; `None` before the first.
    pub fn latency(&self) -> Option<Latencies> {
        self.latency.iter().flatten().cloned().reduce(|mut sum, more| {
            sum.add(&more);
            sum
        })
    }

    /// The latencies of requests that completed after `before` was taken; `None` if none has.
    pub fn latency_since(&self, before: &Self) -> Option<Latencies> {
        let now = self.latency()?;
        let since = before.latency().map_or_else(|| now.clone(), |before| now.since(&before));
        (since.count() > 0).then_some(since)
    }

    /// Adds `other` to this.
    pub fn add(&mut self, other: &Self) {
        for (op, more) in self.ops.iter_mut().zip(&other.ops) {
            op.add(more);
        }
        for (mine, more) in self.latency.iter_mut().zip(&other.latency) {
            if let Some(more) = more {
                mine.get_or_insert_default().add(more);
            }
        }
        self.in_flight += other.in_flight;
        self.waiting += other.waiting;
        self.overdue += other.overdue;
        self.calls += other.calls;
        self.calls_spared += other.calls_spared;
        self.broken += other.broken;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was counted of each type: how much, and the latencies.
    fn told(stats: &QueueStats) -> Vec<(OpStats, Option<(u64, Nanos)>)> {
        let latency = |of| stats.latency_of(of).map(|latency| (latency.count(), latency.sum()));
        RequestType::ALL.into_iter().map(|of| (stats.op(of), latency(of))).collect()
    }

    #[test]
    fn what_is_less_than_it_was_or_ahead_of_what_it_is_part_of_is_nothing_new() {
        let of = |requests, bytes, errors| OpStats { requests, bytes, errors };
        assert_eq!(of(5, 4096, 2).since(&of(3, 512, 1)), of(2, 3584, 1));
        assert_eq!(of(3, 512, 1).since(&of(5, 4096, 2)), of(0, 0, 0));
        assert_eq!([of(5, 4096, 2).succeeded(), of(1, 0, 2).succeeded()], [3, 0]);
    }

    #[test]
    fn a_request_that_did_not_succeed_counts_as_an_error_and_has_moved_nothing() {
        for (status, bytes, errors) in [(Status::Ok, 512, 0), (Status::IoError, 0, 1), (Status::Unsupported, 0, 1)] {
            let counters = QueueCounters::default();
            let completed =
                Completed { head: 0, written: 1, request_type: RequestType::Write, bytes: 512, status, disk: None };
            counters.count(&completed, Nanos(7));
            assert_eq!(counters.op(RequestType::Write), OpStats { requests: 1, bytes, errors });
        }
    }

    #[test]
    fn a_sum_has_all_that_each_queue_has_counted_by_its_type() {
        let (one, other) = (QueueCounters::default(), QueueCounters::default());
        one.count_op(RequestType::Read, 512, true, Nanos(1000));
        one.count_op(RequestType::Read, 1024, false, Nanos(2000));
        let before = one.read();
        assert_eq!(
            (before.latency_since(&QueueStats::default()), before.latency_since(&before)),
            (before.latency(), None)
        );
        one.count_op(RequestType::Write, 4096, true, Nanos(4000));
        other.count_op(RequestType::Read, 2048, false, Nanos(8000));
        other.count_op(RequestType::Flush, 0, true, Nanos(16_000));
        for (at, counters) in (1..).zip([&one, &other]) {
            let QueueCounters { in_flight, waiting, overdue, calls, calls_spared, broken, .. } = counters;
            for (kind, counter) in (1..).zip([in_flight, waiting, overdue, calls, calls_spared, broken]) {
                counter.set(10 * kind + at);
            }
        }
        let mut expected = vec![(OpStats::default(), None); RequestType::ALL.len()];
        let mut expect = |of, requests, bytes, errors, time| {
            expected[of as usize] = (OpStats { requests, bytes, errors }, Some((requests, Nanos(time))));
        };
        // What failed has moved nothing.
        expect(RequestType::Read, 3, 512, 2, 11_000);
        expect(RequestType::Write, 1, 4096, 0, 4000);
        expect(RequestType::Flush, 1, 0, 0, 16_000);
        let mut at_once = QueueStats::default();
        [&one, &other].into_iter().for_each(|counters| counters.add_to(&mut at_once));
        let mut one_by_one = one.read();
        one_by_one.add(&other.read());
        for sum in [at_once, one_by_one] {
            assert_eq!(told(&sum), expected);
            assert_eq!(sum.total(), OpStats { requests: 5, bytes: 4608, errors: 2 });
            let all = sum.latency().unwrap();
            assert_eq!((all.count(), all.sum(), all.longest()), (5, Nanos(31_000), Nanos(16_000)));
            let since = sum.latency_since(&before).unwrap();
            assert_eq!((since.count(), since.sum()), (3, Nanos(28_000)));
            let QueueStats { in_flight, waiting, overdue, calls, calls_spared, broken, .. } = sum;
            assert_eq!([in_flight, waiting, overdue, calls, calls_spared, broken], [23, 43, 63, 83, 103, 123]);
        }
        assert_eq!(QueueStats::default().latency(), None);
        let mut read = None;
        one.add_latency_to(RequestType::Flush, &mut read);
        assert_eq!(read, None);
        other.add_latency_to(RequestType::Flush, &mut read);
        assert_eq!(read.map(|latency| latency.sum()), Some(Nanos(16_000)));
    }
}
