//! What the engines have done so far.

#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock};

use egret_event_loop::{Counter, Nanos};

use crate::engine_kind::EngineKind;

/// Classes of batch sizes, by powers of two; the last one is 2^15 and more.
pub const BATCH_CLASSES: usize = 16;

/// What the engines of one I/O thread count, as they count it; any thread may [read](Self::read) it.
#[derive(Debug, Default)]
pub struct Counters {
    /// By [`EngineKind::index`]; there from the engine's first use on.
    engines: [OnceLock<Arc<EngineCounters>>; EngineKind::COUNT],
    pub(crate) fallbacks: Counter,
    pub(crate) bounced: Counter,
    pub(crate) answered: Counter,
    pub(crate) cached: Counter,
}

impl Counters {
    /// The counters of an engine. An engine that is made again goes on with those that it had.
    pub(crate) fn engine(&self, kind: EngineKind) -> Arc<EngineCounters> {
        let new = || Arc::new(EngineCounters { name: kind.name(), ..EngineCounters::default() });
        Arc::clone(self.engines[kind.index()].get_or_init(new))
    }

    /// What they have come to, without asking the I/O thread.
    pub fn read(&self) -> Stats {
        Stats {
            engines: self.engines.iter().filter_map(OnceLock::get).map(|engine| engine.read()).collect(),
            fallbacks: self.fallbacks.get(),
            bounced: self.bounced.get(),
            answered: self.answered.get(),
            cached: self.cached.get(),
        }
    }
}

/// Counters of all engines of one I/O thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// One entry per engine in use.
    pub engines: Vec<EngineStats>,
    /// Requests that an engine could not take without holding up its loop, or that the kernel refused to run
    /// asynchronously, and that worker threads ran instead.
    pub fallbacks: u64,
    /// Requests that went through a copy because direct I/O does not take their offset or their memory.
    pub bounced: u64,
    /// Requests that were answered without an engine: flushes that are ignored, discards that do nothing, requests
    /// that make no sense.
    pub answered: u64,
    /// Reads that the host's page cache answered at once, without an engine.
    pub cached: u64,
}

/// Counters of one engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// `threads`, `native`, `io_uring` or `null`, or the remote disks' `nbd` or `rbd`.
    pub engine: &'static str,
    /// Requests it has taken.
    pub requests: u64,
    /// Times that it handed a batch on. Every one is a system call, except where the loop's own wait submits, and with
    /// worker threads that were awake.
    pub submissions: u64,
    /// Batches by size: entry `n` counts those of `2^n` to `2^(n+1) - 1` requests, the last one all larger ones too.
    pub batches: [u64; BATCH_CLASSES],
    /// Time spent inside submissions; zero where the loop's own wait submits.
    pub submitting: Nanos,
    /// The longest of them.
    pub longest_submission: Nanos,
    /// Requests, and parts of some, whose memory was pinned already.
    pub registered: u64,
    /// How much memory is pinned, in bytes.
    pub pinned: u64,
}

/// What one engine counts, as it counts it.
#[derive(Debug, Default)]
pub(crate) struct EngineCounters {
    name: &'static str,
    pub(crate) requests: Counter,
    submissions: Counter,
    batches: [Counter; BATCH_CLASSES],
    submitting: Counter,
    longest_submission: Counter,
    pub(crate) registered: Counter,
    pub(crate) pinned: Counter,
}

impl EngineCounters {
    /// Counts a batch of `size` requests that are new.
    pub(crate) fn batch(&self, size: u64) {
        self.requests.add(size);
        self.submission(size);
    }

    /// Counts a submission of `size` requests, of which some may have been tried before.
    pub(crate) fn submission(&self, size: u64) {
        self.submissions.add(1);
        self.batches[(size.max(1).ilog2() as usize).min(BATCH_CLASSES - 1)].add(1);
    }

    /// Counts the time that a submission took.
    pub(crate) fn took(&self, time: Nanos) {
        self.submitting.add_time(time);
        self.longest_submission.set(self.longest_submission.get().max(time.0));
    }

    pub(crate) fn read(&self) -> EngineStats {
        EngineStats {
            engine: self.name,
            requests: self.requests.get(),
            submissions: self.submissions.get(),
            batches: std::array::from_fn(|class| self.batches[class].get()),
            submitting: self.submitting.time(),
            longest_submission: self.longest_submission.time(),
            registered: self.registered.get(),
            pinned: self.pinned.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_of_the_class_of_its_size_and_the_largest_are_of_one() {
        let classes = [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (1 << 15, 15), (1 << 16, 15), (u64::MAX, 15)];
        for (size, class) in classes.into_iter().chain([((1 << 15) - 1, 14)]) {
            let counters = EngineCounters::default();
            counters.submission(size);
            let EngineStats { submissions, batches, .. } = counters.read();
            let counted: Vec<usize> = (0..BATCH_CLASSES).filter(|class| batches[*class] > 0).collect();
            assert_eq!((submissions, counted), (1, vec![class]), "{size}");
        }
    }

    #[test]
    fn the_times_of_submissions_are_added_up_and_the_longest_is_known() {
        let counters = EngineCounters::default();
        [3, 5, 2].into_iter().for_each(|time| counters.took(Nanos(time)));
        let EngineStats { submitting, longest_submission, .. } = counters.read();
        assert_eq!((submitting, longest_submission), (Nanos(10), Nanos(5)));
    }
}
