//! What a queue counts.

use egret_event_loop::Nanos;
use egret_virtio::{Ended, Kind, Status};
use hdrhistogram::Histogram;

/// Latencies are told apart from a quarter of a microsecond to a minute, to two digits.
const LATENCY_NS: (u64, u64, u8) = (1 << 8, 60_000_000_000, 2);

/// How many kinds of request there are; `Other` is the last.
const KINDS: usize = Kind::Other as usize + 1;

/// Requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpStats {
    /// Requests that ended.
    pub requests: u64,
    /// Bytes they moved, discarded or zeroed.
    pub bytes: u64,
    /// Those that ended with an error.
    pub errors: u64,
}

impl OpStats {
    fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.bytes += other.bytes;
        self.errors += other.errors;
    }
}

/// Plain counters of one queue, since it was set up; owned by its loop, and copied when somebody asks.
#[derive(Clone, Debug, Default)]
pub struct QueueStats {
    ops: [OpStats; KINDS],
    latency: Option<Box<Histogram<u32>>>,
    /// Notifications sent to the guest.
    pub calls: u64,
    /// Batches of used requests that the guest did not want to be notified of.
    pub calls_spared: u64,
    /// Times the guest broke the queue.
    pub broken: u64,
}

impl QueueStats {
    pub(crate) fn count(&mut self, ended: &Ended, latency: Nanos) {
        self.ops[ended.kind as usize].add(&OpStats {
            requests: 1,
            bytes: ended.bytes,
            errors: u64::from(ended.status != Status::Ok),
        });
        // Made at the first request, so that an idle queue costs no memory.
        let (low, high, digits) = LATENCY_NS;
        let histogram = self.latency.get_or_insert_with(|| {
            Box::new(Histogram::new_with_bounds(low, high, digits).expect("these bounds are valid"))
        });
        histogram.saturating_record(latency.0);
    }

    /// Requests of `kind`.
    pub const fn op(&self, kind: Kind) -> OpStats {
        self.ops[kind as usize]
    }

    /// Requests of every kind.
    pub fn total(&self) -> OpStats {
        self.ops.iter().fold(OpStats::default(), |mut sum, op| {
            sum.add(op);
            sum
        })
    }

    /// How long requests took, in nanoseconds, from the turn that took them in to the turn that saw them end; `None`
    /// before the first.
    pub fn latency(&self) -> Option<&Histogram<u32>> {
        self.latency.as_deref()
    }

    /// The latencies of requests that ended after `before` was taken; `None` if none has.
    pub fn latency_since(&self, before: &Self) -> Option<Histogram<u32>> {
        let mut since = self.latency()?.clone();
        if let Some(earlier) = before.latency() {
            // Refused where a counter has gone back, which is when queues have come and gone: all that is left is all.
            let _ = since.subtract(earlier);
        }
        (!since.is_empty()).then_some(since)
    }

    /// Adds `other` to this.
    pub fn add(&mut self, other: &Self) {
        for (op, more) in self.ops.iter_mut().zip(&other.ops) {
            op.add(more);
        }
        match (&mut self.latency, &other.latency) {
            (Some(mine), Some(more)) => mine.add(more.as_ref()).expect("both have the same bounds"),
            (mine @ None, more) => mine.clone_from(more),
            (Some(_), None) => {}
        }
        self.calls += other.calls;
        self.calls_spared += other.calls_spared;
        self.broken += other.broken;
    }
}
