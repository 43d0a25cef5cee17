//! A server's own counters during a measurement, over QMP, which Egret and `qemu-storage-daemon` share.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use egret_loadgen::load::Edge;
use serde_json::{Value, json};

use crate::qmp::{PATIENCE, Qmp};
use crate::results::{Ledger, Measurement, Polling};

/// A connection to a server's monitor.
pub(super) struct Telemetry {
    qmp: Qmp,
    /// What the I/O threads had counted at both edges; none where the server does not say.
    counted: [Option<Counted>; 2],
}

/// What all I/O threads have counted together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Counted {
    waits: u64,
    hits: u64,
    blocks: u64,
    spin_found_ns: u64,
    spin_wasted_ns: u64,
    /// Of windows: their sum, and resets; the time that they were near the maximum, and all time.
    windows: Option<[u64; 4]>,
}

impl Telemetry {
    /// Connects, and gets through the greeting.
    pub(super) fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self { qmp: Qmp::connect(path, Some(PATIENCE))?, counted: [None, None] })
    }

    /// The numbers of its I/O threads; nothing where it does not know the question.
    pub(super) fn io_threads(&mut self) -> Option<BTreeSet<u32>> {
        Some(self.qmp.threads("query-iothreads").ok()?.into_iter().collect())
    }

    /// Takes the counters down, where the server has any.
    pub(super) fn edge(&mut self, edge: Edge) {
        let counted = self.qmp.run("egret-query-stats", json!({})).ok().map(|answer| Counted::of(&answer));
        self.counted[usize::from(edge == Edge::End)] = counted;
    }

    /// Puts what the counters say into a measurement: polling, and of the I/O threads' own time what was spinning.
    pub(super) fn complete(&self, measurement: &mut Measurement) {
        let [Some(before), Some(after)] = &self.counted else { return };
        let (polling, found, wasted) = after.since(before);
        measurement.polling = Some(polling);
        divide(&mut measurement.cpu, found, wasted);
    }
}

/// Takes what was spinning off the work. Spinning is time in user space, as work is; of both together the ledger knows
/// the sum, so that no part can be more than that.
fn divide(ledger: &mut Ledger, found: u64, wasted: u64) {
    let Some(user) = ledger.io_thread_work else { return };
    let found = found.min(user);
    let wasted = wasted.min(user - found);
    ledger.io_thread_spin_found = Some(found);
    ledger.io_thread_spin_wasted = Some(wasted);
    ledger.io_thread_work = Some(user - found - wasted);
}

impl Counted {
    fn of(answer: &Value) -> Self {
        let threads = answer["iothreads"].as_array().map(Vec::as_slice).unwrap_or_default();
        let sum = |key: &str| threads.iter().map(|thread| thread[key].as_u64()).sum::<Option<u64>>();
        let windows = ["window-sum-ns", "windows-reset", "window-near-max-ns", "elapsed-ns"].map(sum);
        Self {
            waits: sum("waits").unwrap_or(0),
            hits: sum("hits").unwrap_or(0),
            blocks: sum("blocks").unwrap_or(0),
            spin_found_ns: sum("spin-found-ns").unwrap_or(0),
            spin_wasted_ns: sum("spin-wasted-ns").unwrap_or(0),
            windows: match windows {
                [Some(sum), Some(resets), Some(near_max), Some(elapsed)] => Some([sum, resets, near_max, elapsed]),
                _ => None,
            },
        }
    }

    /// Polling between two looks, and the time spun with and without success.
    fn since(&self, before: &Self) -> (Polling, u64, u64) {
        let waits = self.waits.saturating_sub(before.waits);
        let counted = |place: usize| Some(self.windows?[place].saturating_sub(before.windows?[place]));
        let share = |place: usize, of: u64| (of > 0).then(|| Some(counted(place)? as f64 / of as f64)).flatten();
        let polling = Polling {
            waits,
            hits: self.hits.saturating_sub(before.hits),
            blocks: self.blocks.saturating_sub(before.blocks),
            mean_window_ns: share(0, waits),
            windows_reset: share(1, waits),
            windows_near_max: share(2, counted(3).unwrap_or(0)),
        };
        let found = self.spin_found_ns.saturating_sub(before.spin_found_ns);
        (polling, found, self.spin_wasted_ns.saturating_sub(before.spin_wasted_ns))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(waits: u64, found: u64, windows: bool) -> Counted {
        let mut thread = json!({ "waits": waits, "hits": waits / 2, "blocks": waits / 4, "spin-found-ns": found,
                                 "spin-wasted-ns": 10 });
        if windows {
            thread["window-sum-ns"] = json!(waits * 100);
            thread["windows-reset"] = json!(waits / 4);
            thread["window-near-max-ns"] = json!(waits * 30);
            thread["elapsed-ns"] = json!(waits * 120);
        }
        Counted::of(&json!({ "iothreads": [thread.clone(), thread] }))
    }

    #[test]
    fn what_was_counted_before_does_not_count() {
        let (polling, found, wasted) = counted(100, 500, true).since(&counted(60, 100, true));
        assert_eq!((polling.waits, polling.hits, polling.blocks), (80, 40, 20));
        assert_eq!((polling.mean_window_ns, polling.windows_reset), (Some(100.0), Some(0.25)));
        assert_eq!(polling.windows_near_max, Some(0.25));
        assert_eq!((found, wasted), (800, 0));
        let (polling, _, _) = counted(100, 500, false).since(&counted(60, 100, false));
        assert_eq!(polling.mean_window_ns, None);
    }

    #[test]
    fn spinning_is_a_part_of_the_io_threads_own_time_and_never_more() {
        let mut ledger = Ledger { io_thread_work: Some(100), ..Ledger::default() };
        divide(&mut ledger, 30, 20);
        let parts = |ledger: &Ledger| {
            [ledger.io_thread_work, ledger.io_thread_spin_found, ledger.io_thread_spin_wasted].map(Option::unwrap)
        };
        assert_eq!(parts(&ledger), [50, 30, 20]);
        let mut ledger = Ledger { io_thread_work: Some(100), ..Ledger::default() };
        divide(&mut ledger, 90, 20);
        assert_eq!(parts(&ledger), [0, 90, 10]);
    }
}
