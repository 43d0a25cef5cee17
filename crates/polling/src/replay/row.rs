//! One line of the report.

use std::fmt;

use serde::{Serialize, Serializer};

use super::Setting;
use super::simulate::Tally;
use crate::{Nanos, PolicyKind};

/// Whose line it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// Knows every wait before it begins: the lower bound.
    OfflineOptimum,
    /// One window for all waits, the best there is in hindsight.
    BestFixed(Nanos),
    /// One window for all waits.
    Fixed(Nanos),
    /// A policy that can be chosen.
    Policy(PolicyKind),
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OfflineOptimum => f.pad("offline-optimum"),
            Self::BestFixed(_) => f.pad("best-fixed"),
            Self::Fixed(_) => f.pad("fixed"),
            Self::Policy(kind) => kind.fmt(f),
        }
    }
}

impl Serialize for Contender {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What one contender made of one trace. Costs are in nanoseconds of CPU, latency priced in.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The trace's name.
    pub trace: String,
    /// `offline-optimum`, `best-fixed`, `fixed`, or the policy's name.
    pub contender: Contender,
    /// The window, of a contender that has one and the same always.
    pub window_ns: Option<u64>,
    /// K: what a block was taken to cost.
    pub k_ns: u64,
    /// `poll-price` within it.
    pub price: u32,
    /// `poll-max-ns`, which binds all but the offline optimum and `busy`; unset, each policy has its own bound, and the
    /// best fixed window none.
    pub poll_max_ns: Option<u64>,
    /// Waits in the trace.
    pub waits: u64,
    /// Spinning, plus K for every block.
    pub cost_ns: u64,
    /// Cost over the offline optimum's: 1 is perfect.
    pub competitive_ratio: f64,
    /// Cost over the best fixed window's: below 1, learning paid.
    pub against_best_fixed: f64,
    /// Spinning that ended with work.
    pub spin_found_ns: u64,
    /// Spinning that ended with a block.
    pub spin_wasted_ns: u64,
    /// Waits that blocked.
    pub blocks: u64,
    /// CPU spent waiting: spinning, and the CPU share of blocks.
    pub cpu_ns: u64,
    /// Latency that wake-ups added.
    pub added_latency_ns: u64,
    /// Of a policy that can be chosen.
    pub windows: Option<Windows>,
}

/// What became of a policy's windows, in the terms in which QEMU's are published; a running loop counts the same.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Windows {
    /// The mean of all waits' windows.
    pub mean_ns: u64,
    /// Resets of a source's interval, or of a window, for each wait.
    pub reset_rate: f64,
    /// The share of time, not of waits, with a window near the maximum ([`Nanos::is_near`]).
    pub near_max: f64,
}

impl Row {
    pub(super) fn new(
        trace: &str,
        contender: Contender,
        setting: &Setting,
        tally: Tally,
        offline_optimum: &Tally,
        best_fixed: &Tally,
    ) -> Self {
        let k = setting.k();
        let cost = tally.cost(k);
        // A trace without waits costs everybody nothing, and that is as good as anybody.
        let ratio = |to: u64| {
            if to == cost { 1.0 } else { cost as f64 / to as f64 }
        };
        let spun = tally.spin_found + tally.spin_wasted;
        let times = |each: Nanos| Nanos(tally.blocks.saturating_mul(each.0));
        Self {
            trace: trace.to_owned(),
            contender,
            window_ns: match contender {
                Contender::BestFixed(window) | Contender::Fixed(window) => Some(window.0),
                Contender::OfflineOptimum | Contender::Policy(_) => None,
            },
            k_ns: k.0,
            price: setting.parameters.price_or_default(),
            poll_max_ns: setting.parameters.max.map(|max| max.0),
            waits: tally.waits,
            cost_ns: cost,
            competitive_ratio: ratio(offline_optimum.cost(k)),
            against_best_fixed: ratio(best_fixed.cost(k)),
            spin_found_ns: tally.spin_found.0,
            spin_wasted_ns: tally.spin_wasted.0,
            blocks: tally.blocks,
            cpu_ns: (spun + times(setting.block.cpu)).0,
            added_latency_ns: times(setting.block.latency).0,
            windows: None,
        }
    }

    /// CPU spent per wait, in microseconds.
    pub fn cpu_us_per_wait(&self) -> f64 {
        self.cpu_ns as f64 / self.waits.max(1) as f64 / 1_000.0
    }

    /// Latency added per wait, in microseconds.
    pub fn latency_us_per_wait(&self) -> f64 {
        self.added_latency_ns as f64 / self.waits.max(1) as f64 / 1_000.0
    }
}

impl Tally {
    /// In nanoseconds, a block at `k`.
    pub(super) fn cost(&self, k: Nanos) -> u64 {
        (self.spin_found + self.spin_wasted + Nanos(self.blocks.saturating_mul(k.0))).0
    }
}
