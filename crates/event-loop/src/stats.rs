//! What a loop counts about itself.

use egret_polling::Nanos;

/// Plain counters of one loop, since it started.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoopStats {
    /// Turns taken.
    pub turns: u64,
    /// Times there was nothing to dispatch, and the loop waited.
    pub waits: u64,
    /// Waits that spinning ended.
    pub hits: u64,
    /// Time spun in waits that spinning ended.
    pub spin_found: Nanos,
    /// Time spun in waits that blocked after all.
    pub spin_wasted: Nanos,
    /// Events of sources that the monitor reported: kicks, where sources are guests' queues.
    pub kicks: u64,
    /// Times a look found a source with work that nobody had to report.
    pub kicks_spared: u64,
    /// Times the loop slept.
    pub blocks: u64,
    /// Time asleep.
    pub asleep: Nanos,
    /// Sum of the windows of all waits, each counted as at most a second.
    pub window_sum: Nanos,
    /// Waits whose window was zero.
    pub window_zero: u64,
    /// Waits whose window was at least 7/8 of the largest allowed.
    pub window_near_max: u64,
    /// The window of the last wait.
    pub window: Nanos,
}
