//! What a run found: a directory with `result.json`, `cells.csv`, the raw output and the report.
//!
//! [`Run`] is `result.json`, whole; [`FORMAT`] is its version. Everything that a report says is computed from it.

mod cell;
mod host;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::plan::Plan;

pub(crate) use cell::place;
pub use cell::{
    Bottleneck, Cell, CellId, DISTURBS, Latency, Ledger, Measurement, Operations, Outcome, Polling, SYMBOLS, Symbol,
    shortfall,
};
pub use host::{BlockDevice, Component, Cpu, Host, Warning};

/// The version of `result.json` that this program writes, and the newest that it reads.
pub const FORMAT: u32 = 2;

/// A run of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// [`FORMAT`] when it was written.
    pub format: u32,
    /// What was to be done, after scaling.
    pub plan: Plan,
    /// By how much the plan's times and sizes were scaled.
    pub scale: f64,
    /// What the order of cells was drawn from.
    pub seed: u64,
    /// If only some cells were asked for: what the name of their load or their subject contains.
    #[serde(default)]
    pub only: Option<String>,
    /// By load: the peak that a curve's points are shares of, in requests per second, where another run's was taken.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub peaks: BTreeMap<String, f64>,
    /// By load: what its job file was, as a SHA-256.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub job_files: BTreeMap<String, String>,
    /// When it began, in seconds since 1970.
    pub started: u64,
    /// When it ended; not before all cells have.
    pub ended: Option<u64>,
    /// What it ran on, when it began.
    pub host: Host,
    /// Every cell that has ended, in the order in which they did. One that failed is a result.
    pub cells: Vec<Cell>,
    /// What the kernel or a server said meanwhile that a reader should know, by when it was said.
    pub incidents: Vec<Incident>,
}

/// A crash, a hang, a line in the kernel's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Incident {
    /// Seconds since 1970.
    pub at: u64,
    /// The cell that was being measured.
    pub cell: Option<CellId>,
    /// Who said it: `kernel`, or a subject's name.
    pub source: String,
    /// What was said.
    pub text: String,
}

impl Incident {
    /// Who says that the run itself is not what it was.
    pub const LAB: &str = "egret bench";
}

#[cfg(test)]
impl Run {
    /// One of a plan, of which nothing is known yet.
    pub(crate) fn of(plan: &str) -> Self {
        Self {
            format: FORMAT,
            plan: toml::from_str(plan).expect("a plan"),
            scale: 1.0,
            seed: 1,
            only: None,
            peaks: BTreeMap::new(),
            job_files: BTreeMap::new(),
            started: 0,
            ended: None,
            host: Host::default(),
            cells: Vec::new(),
            incidents: Vec::new(),
        }
    }
}

impl Run {
    /// The cells of every subject under every load, each in the order of repetitions.
    pub fn by_load(&self) -> BTreeMap<(&str, &str), Vec<&Cell>> {
        let mut cells: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for cell in &self.cells {
            cells.entry((cell.id.load.as_str(), cell.id.subject.as_str())).or_default().push(cell);
        }
        cells.values_mut().for_each(|cells| cells.sort_by_key(|cell| (cell.id.repetition, cell.id.point)));
        cells
    }
}
