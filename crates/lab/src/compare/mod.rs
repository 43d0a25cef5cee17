//! Two runs of one plan beside each other: two kernels, two versions, two hosts.
//!
//! ```text
//!   Run A ─┐                  ┌─ differences: may they be compared?   likeness.rs
//!          ├─► Comparison ────┼─ rows: ratios with their intervals    row.rs
//!   Run B ─┘                  └─ symbols whose share moved            symbols.rs
//!                                        └─► a table, JUnit           table.rs, junit.rs
//! ```
//!
//! Cells of two runs are not paired: differences between the days are in the figures too. So the intervals are Welch's, and
//! wider than those within a run.

mod junit;
mod likeness;
mod row;
mod symbols;
mod table;

use crate::results::Run;

pub use likeness::{Difference, Role};
pub use row::{Row, Side};
pub use symbols::Moved;

/// Two runs beside each other.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Everything that the runs differ in.
    pub differences: Vec<Difference>,
    /// Why they should not be compared, in one line each.
    pub objections: Vec<String>,
    /// Every cell that is in both, and how it was judged.
    pub rows: Vec<Row>,
    /// Cells, as `subject, load`, that only one of the runs has, and which.
    pub unmatched: Vec<(String, Side)>,
    /// Symbols whose share moved, where both runs have profiles.
    pub symbols: Vec<Moved>,
    /// How large a loss may be before it is one, as a share.
    pub threshold: f64,
}

/// What a comparison comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overall {
    /// Nothing was lost.
    Pass,
    /// Something was.
    Fail,
    /// Something may have been.
    CantTell,
    /// The runs are too unlike.
    NotComparable,
}

impl Overall {
    /// As a program ends: 0 pass, 1 fail, 2 can't tell, 3 not comparable.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::Fail => 1,
            Self::CantTell => 2,
            Self::NotComparable => 3,
        }
    }
}

impl Comparison {
    /// Puts `b` beside `a`, which is the baseline. `threshold` is the plan's if there is none.
    pub fn of(a: &Run, b: &Run, threshold: Option<f64>) -> Self {
        let differences = likeness::differences(a, b);
        let threshold = threshold.unwrap_or(a.plan.threshold);
        let (rows, unmatched) = row::rows(a, b, threshold);
        Self {
            objections: likeness::objections(&differences),
            differences,
            rows,
            unmatched,
            symbols: symbols::moved(a, b),
            threshold,
        }
    }

    /// What it comes to; `force` overlooks that the runs are unlike.
    pub fn overall(&self, force: bool) -> Overall {
        use crate::statistics::Verdict;
        let any =
            |wanted: fn(&Verdict) -> bool| self.rows.iter().filter_map(Row::verdict).any(|verdict| wanted(&verdict));
        match () {
            () if !force && !self.objections.is_empty() => Overall::NotComparable,
            () if self.rows.iter().all(|row| row.verdict().is_none()) => Overall::NotComparable,
            () if any(|verdict| *verdict == Verdict::Fail) => Overall::Fail,
            () if any(|verdict| *verdict != Verdict::Pass) => Overall::CantTell,
            () => Overall::Pass,
        }
    }
}

#[cfg(test)]
mod tests;
