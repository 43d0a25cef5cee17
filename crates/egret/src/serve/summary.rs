//! What an operator sees go by: requests, bytes, latency; and how the I/O threads waited.

use std::fmt::Write as _;
use std::time::Instant;

use egret_daemon::{Daemon, QueueStats};

/// Rates, from one look to the next.
pub struct CpuMeter {
    last: QueueStats,
    at: Instant,
}

impl CpuMeter {
    /// Begins to measure.
    pub fn new(daemon: &Daemon) -> Self {
        Self { last: daemon.queue_stats(), at: Instant::now() }
    }

    /// One line about what has happened since the last, if anything has.
    pub fn line(&mut self, daemon: &Daemon) -> Option<String> {
        let now = daemon.queue_stats();
        let seconds = self.at.elapsed().as_secs_f64();
        self.at = Instant::now();
        let before = std::mem::replace(&mut self.last, now);
        let new = self.last.total().since(&before.total());
        let latency = self.last.latency_since(&before)?;
        let micros = |quantile| latency.quantile(quantile).0 as f64 / 1e3;
        Some(format!(
            "{:>9.0} IOPS {:>9.1} MB/s   p50 {:>8.1} us   p99 {:>8.1} us{}",
            new.requests as f64 / seconds,
            new.bytes as f64 / seconds / 1e6,
            micros(0.5),
            micros(0.99),
            match new.errors {
                0 => String::new(),
                errors => format!("   {errors} errors"),
            }
        ))
    }
}

/// How each I/O thread waited since it began: a line each.
pub fn waits(daemon: &Daemon) -> String {
    let mut text = String::new();
    for (name, stats) in daemon.loop_stats() {
        let waits = stats.waits.max(1) as f64;
        let percent = |count: u64| 100.0 * count as f64 / waits;
        let _ = writeln!(
            text,
            "iothread {name}: {} waits, {:.1}% ended spinning; spun {:.1} ms in vain and {:.1} ms not; slept {} times; \
             window {:.1} us on average, {} resets, {:.1}% of the time near the maximum; {} kicks, {} spared",
            stats.waits,
            percent(stats.hits),
            stats.spin_wasted.0 as f64 / 1e6,
            stats.spin_found.0 as f64 / 1e6,
            stats.blocks,
            stats.window_sum.0 as f64 / waits / 1e3,
            stats.resets,
            100.0 * stats.near_max.0 as f64 / stats.elapsed.0.max(1) as f64,
            stats.kicks,
            stats.kicks_spared,
        );
    }
    let queues = daemon.queue_stats();
    let _ = writeln!(text, "queues: {} notifications sent, {} spared", queues.calls, queues.calls_spared);
    text
}
