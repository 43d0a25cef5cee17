//! Who spent CPU time on a request.

use serde::Serialize;

use super::{Analysis, CellKey};
use crate::results::{Ledger, Measurement};
use crate::statistics::median;

/// What the parts are called, in the order in which they are stacked.
pub const PARTS: [&str; 13] = [
    "I/O thread: work",
    "I/O thread: spin that found work",
    "I/O thread: spin in vain",
    "I/O thread: system",
    "server: other threads",
    "server: all",
    "guest",
    "behind the disk",
    "kernel threads",
    "interrupts",
    "the load",
    "unaccounted",
    "host busy",
];

/// CPU time per I/O of a subject under a load, in microseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spent {
    /// Under which load.
    pub load: String,
    /// By whom.
    pub subject: String,
    /// In the order of [`PARTS`]: medians. Absent is what nobody could tell. The last is the sum of the others as the
    /// host saw it, and is not stacked.
    pub parts: [Option<f64>; PARTS.len()],
}

fn parts(ledger: &Ledger) -> [Option<u64>; PARTS.len()] {
    [
        ledger.io_thread_work,
        ledger.io_thread_spin_found,
        ledger.io_thread_spin_wasted,
        ledger.io_thread_system,
        ledger.server_other,
        ledger.server,
        ledger.guest,
        ledger.backend,
        ledger.kernel_threads,
        ledger.interrupts,
        ledger.load,
        ledger.unaccounted(),
        ledger.host_busy,
    ]
}

impl Analysis<'_> {
    /// Of every subject under every load that was measured, closed loops only.
    pub fn ledgers(&self) -> Vec<Spent> {
        let mut all = Vec::new();
        for load in &self.loads {
            for subject in &self.subjects {
                let key = CellKey { load: &load.name, subject, point: 0 };
                let measured: Vec<&Measurement> = self.table.measured(key).map(|(_, one)| one).collect();
                let part = |index: usize| {
                    let shares = measured.iter().filter(|one| one.requests() > 0);
                    let shares =
                        shares.filter_map(|one| Some(parts(&one.cpu)[index]? as f64 / 1e3 / one.requests() as f64));
                    let shares: Vec<f64> = shares.collect();
                    (!shares.is_empty()).then(|| median(shares))
                };
                let parts = std::array::from_fn(part);
                if parts.iter().any(Option::is_some) {
                    all.push(Spent { load: load.name.clone(), subject: (*subject).into(), parts });
                }
            }
        }
        all
    }
}
