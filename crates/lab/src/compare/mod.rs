//! Runs of one plan beside each other: two kernels, two versions, two hosts.
//!
//! ```text
//!   Runs A ─┐                  ┌─ differences: may they be compared?   likeness.rs
//!           ├─► Comparison ────┼─ rows: ratios with their intervals    row.rs
//!   Runs B ─┘                  └─ symbols whose share moved            symbols.rs
//!                                         └─► a table, JUnit           table.rs, junit.rs
//! ```
//!
//! Cells of two runs are not paired, so what differs from day to day and from boot to boot is in the figures too. Several
//! runs on each side show how much that is; of one run each nobody knows.

pub mod junit;
mod likeness;
mod row;
mod symbols;
mod table;

use crate::results::{Incident, Run};

pub use likeness::{Difference, Role};
pub(crate) use row::METRICS;
pub use row::Row;
pub use symbols::{Moved, Symbols};

use crate::statistics::{Count, Overall, Verdict};

/// Two sides beside each other.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Everything that the runs differ in.
    pub differences: Vec<Difference>,
    /// Why they should not be compared, in one line each.
    pub objections: Vec<String>,
    /// Every cell that the first side measured, and how it was judged.
    pub rows: Vec<Row>,
    /// What is not there of a run that should be, in one line each: nothing passes beside it.
    pub gaps: Vec<String>,
    /// Cells, as `subject, load`, that only the second side measured.
    pub new: Vec<String>,
    /// Symbols whose share moved, where both sides have profiles.
    pub symbols: Symbols,
    /// How many runs each side has.
    pub runs: [usize; 2],
    /// Of each side whether it is of several runs that were all made between one boot and the next.
    pub of_one_boot: [bool; 2],
}

impl Comparison {
    /// Puts `b` beside `a`, which is the baseline. `threshold` is the plan's if there is none. A side without a run has
    /// nothing to compare.
    pub fn of(a: &[&Run], b: &[&Run], threshold: Option<f64>) -> Self {
        let (first, second) = (a.first(), b.first());
        let mut differences = Vec::new();
        let mut objections = Vec::new();
        if let (Some(first), Some(second)) = (first, second) {
            differences = likeness::differences(first, second);
            objections = likeness::objections(&differences);
            for (side, runs) in [("first", a), ("second", b)] {
                for other in &runs[1..] {
                    let unlike = likeness::differences(runs[0], other);
                    let unlike = unlike.iter().filter(|one| one.role != Role::Told).map(|one| one.about);
                    let unlike: Vec<&str> = unlike.collect();
                    if !unlike.is_empty() {
                        objections.push(format!("the {side} runs differ among themselves: {}", unlike.join(", ")));
                    }
                }
            }
        }
        objections.extend(repeated(a, b));
        objections.extend(resumed_otherwise(a, b));
        let threshold = threshold.or_else(|| first.map(|run| run.plan.threshold)).unwrap_or_default();
        let (rows, new) = row::rows(a, b, threshold);
        let gaps = unfinished(a, b).chain(row::gaps(a, b)).collect();
        let symbols = symbols::moved(a, b);
        let of_one_boot = [a, b].map(|runs| {
            let boot = runs.first().and_then(|run| run.host.boot_id.as_ref());
            runs.len() > 1 && boot.is_some() && runs.iter().all(|run| run.host.boot_id.as_ref() == boot)
        });
        Self { objections, differences, rows, gaps, new, symbols, runs: [a.len(), b.len()], of_one_boot }
    }

    /// How many rows came out how.
    pub fn count(&self) -> Count {
        Count::of(self.rows.iter().map(|row| &row.decision))
    }

    /// What it comes to; `force` overlooks that the runs are unlike.
    pub fn overall(&self, force: bool) -> Overall {
        let says = |row: &Row| row.decision == Ok(Verdict::Fail) || (row.decision.is_ok() && row.ratio.is_some());
        let is_nothing = !self.rows.iter().any(says);
        if (!force && !self.objections.is_empty()) || is_nothing {
            return Overall::NotComparable;
        }
        match self.count().overall() {
            Overall::Pass if !self.gaps.is_empty() => Overall::CantTell,
            overall => overall,
        }
    }

    /// How many rows came out how, and what is not there.
    pub fn said(&self) -> String {
        std::iter::once(self.count().to_string()).chain(self.gaps.iter().cloned()).collect::<Vec<_>>().join("; ")
    }
}

/// Of each side whether its runs have all come to their end.
fn unfinished(a: &[&Run], b: &[&Run]) -> impl Iterator<Item = String> {
    let of_side = |(which, runs): (&str, &[&Run])| match runs.iter().filter(|run| run.ended.is_none()).count() {
        0 => None,
        1 if runs.len() == 1 => Some(format!("the {which} run is not finished")),
        1 => Some(format!("1 of the {which} runs is not finished")),
        several => Some(format!("{several} of the {which} runs are not finished")),
    };
    [("first", a), ("second", b)].map(of_side).into_iter().flatten()
}

/// Of several runs none may be there twice: it would show no difference from itself. One beside itself alone is a trial
/// of this command.
fn repeated(a: &[&Run], b: &[&Run]) -> Option<String> {
    let all = [a, b].concat();
    let is_there_before = |(index, run): (usize, &&Run)| all[..index].contains(run);
    let is_trial = a.len() == 1 && b.len() == 1;
    (!is_trial && all.iter().enumerate().any(is_there_before))
        .then(|| "one of the runs is given twice: only runs of their own show how far runs lie apart".into())
}

/// A run that was interrupted, and resumed with another kernel, program or job file, is of both, and its fingerprint of the first.
fn resumed_otherwise(a: &[&Run], b: &[&Run]) -> impl Iterator<Item = String> {
    let of_side = |(which, runs): (&'static str, &[&Run])| {
        let incidents = runs.iter().flat_map(|run| &run.incidents).filter(|said| said.source == Incident::LAB);
        incidents.map(|said| format!("a {which} run was {}", said.text)).collect::<Vec<_>>()
    };
    [("first", a), ("second", b)].map(of_side).into_iter().flatten()
}

#[cfg(test)]
mod tests;
