//! What the engines have done so far.

#![forbid(unsafe_code)]

use egret_event_loop::Nanos;

/// Batch sizes are told apart up to 2^15 and more.
pub const BATCH_CLASSES: usize = 16;

/// Counters of all engines of one I/O thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// One entry per engine in use.
    pub engines: Vec<EngineStats>,
    /// Requests that an engine could not take, or that the kernel refused to run asynchronously, and that worker
    /// threads ran instead.
    pub fallbacks: u64,
    /// Requests that went through a copy because direct I/O does not take their offset or their memory.
    pub bounced: u64,
    /// Requests that were answered without an engine: flushes that are ignored, discards that do nothing, requests
    /// that make no sense.
    pub answered: u64,
}

/// Counters of one engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// `threads`, `native`, `io_uring` or `null`.
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
}

impl EngineStats {
    pub(crate) fn new(engine: &'static str) -> Self {
        Self { engine, ..Self::default() }
    }

    /// Counts a batch of `size` requests that are new.
    pub(crate) fn batch(&mut self, size: u64) {
        self.requests += size;
        self.submission(size);
    }

    /// Counts a submission of `size` requests, of which some may have been tried before.
    pub(crate) fn submission(&mut self, size: u64) {
        self.submissions += 1;
        self.batches[(size.max(1).ilog2() as usize).min(BATCH_CLASSES - 1)] += 1;
    }

    /// Counts the time that a submission took.
    pub(crate) fn took(&mut self, time: Nanos) {
        self.submitting += time;
        self.longest_submission = self.longest_submission.max(time);
    }
}
