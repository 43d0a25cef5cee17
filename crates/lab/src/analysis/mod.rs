//! What a run says: ratios with their intervals, verdicts, who spent CPU time, and what to choose.
//!
//! All of it is computed from a [`Run`], and nothing is measured here.
//!
//! | module | holds |
//! |---|---|
//! | [`table`] | the cells by load, subject and point |
//! | `metric` | names, units, and which way is better |
//! | [`chart`] | what the charts of the plan show |
//! | [`ledger`] | CPU time per I/O, by who spent it |
//! | `judge` | comparisons with the baseline, and what they decide |
//! | [`bound`] | what it means that the disk or the load was the bottleneck |
//! | [`profile`] | what `perf` saw of the host, and how sure a symbol's share is |
//! | [`choice`] | "which option should I choose?" |

pub mod bound;
pub mod chart;
pub mod choice;
mod judge;
pub mod ledger;
mod metric;
pub mod profile;
pub mod table;
#[cfg(test)]
mod tests;

use std::cell::OnceCell;

use serde::Serialize;

use crate::plan::{Asks, Load, Metric, Stack};
use crate::results::{CellId, Run};
use crate::runner::{AGAIN, steps, subject_called};
use crate::statistics::{Count, Overall, median};

pub use judge::Judged;
pub use metric::{difference, differences, figure};
pub use table::{CellKey, Status, Table, counterpart};

/// A run, understood.
#[derive(Debug)]
pub struct Analysis<'a> {
    /// What it is of.
    pub run: &'a Run,
    /// Its cells.
    pub table: Table<'a>,
    /// Its loads, in the plan's order, of which some cell has ended.
    pub loads: Vec<&'a Load>,
    /// Its subjects' names, in the plan's order.
    pub subjects: Vec<&'a str>,
    /// Each comparison with a baseline, and what it decides.
    pub judged: Vec<Judged>,
    /// What options are to each other, once somebody asks.
    relations: OnceCell<choice::Relations>,
}

/// Some values, and what they scatter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// How many.
    pub count: usize,
    /// Their median.
    pub median: f64,
    /// The least.
    pub low: f64,
    /// The most.
    pub high: f64,
}

impl Summary {
    /// Of some values, if there are any.
    pub fn of(values: &[f64]) -> Option<Self> {
        let low = values.iter().copied().reduce(f64::min)?;
        let high = values.iter().copied().reduce(f64::max)?;
        Some(Self { count: values.len(), median: median(values.to_vec()), low, high })
    }
}

impl<'a> Analysis<'a> {
    /// Understands a run.
    pub fn new(run: &'a Run) -> Self {
        let table = Table::new(run);
        let seen = |name: &str| table.keys().any(|key| key.load == name);
        let loads = run.plan.loads.iter().filter(|load| seen(&load.name)).collect();
        let named = run.plan.subjects.iter().map(|subject| subject.name.as_str());
        let mut subjects: Vec<&str> = named.filter(|name| table.keys().any(|key| key.subject == *name)).collect();
        if subjects.len() == 1 {
            // The baseline beside itself is then what the run is about.
            subjects.extend(table.keys().map(|key| key.subject).find(|name| name.ends_with(AGAIN)));
        }
        let mut new = Self { run, table, loads, subjects, judged: Vec::new(), relations: OnceCell::new() };
        new.judged = new.judge();
        new
    }

    /// A metric of the cells with a key.
    pub fn summary(&self, key: CellKey<'_>, metric: Metric) -> Option<Summary> {
        Summary::of(&self.table.values(key, metric))
    }

    /// How many cells failed, whatever their subject is.
    pub fn failed_cells(&self) -> usize {
        self.run.cells.iter().filter(|cell| cell.failure().is_some()).count()
    }

    /// Places in the plan, as far as it was asked for, of which nothing was measured and nothing failed: whoever has not
    /// been measured yet, or cannot be here. What the plan can do without was left out of it before it began.
    pub fn absent(&self) -> Vec<CellId> {
        let is_absent =
            |id: &CellId| matches!(self.table.status(CellKey::of(id)), Status::Impossible(_) | Status::Missing);
        self.places().filter(is_absent).collect()
    }

    /// Places in the plan of which something was measured, and in fewer repetitions than were asked for, with the numbers of
    /// both: in others this machine could not run them, or nobody tried. What failed is told as that. Of a run that is not
    /// finished all that goes without saying.
    pub(crate) fn sparse(&self) -> Vec<(CellId, usize, usize)> {
        if self.run.ended.is_none() {
            return Vec::new();
        }
        let sparse = self.places().filter_map(|id| {
            let (ended, impossible) = self.table.impossible(CellKey::of(&id));
            let asked = ended.max(self.run.plan.repetitions as usize);
            let is_sparse = self.table.status(CellKey::of(&id)) == Status::Measured && ended - impossible.len() < asked;
            is_sparse.then(|| (self.table.measured(CellKey::of(&id)).count(), asked)).map(|(of, asked)| (id, of, asked))
        });
        sparse.collect()
    }

    /// All places of the plan, as far as it was asked for, in its order.
    fn places(&self) -> impl Iterator<Item = CellId> + use<> {
        let mut first = steps(&self.run.plan, self.run.seed, self.run.only.as_deref());
        first.retain(|step| step.id.repetition == 0 && !step.id.subject.ends_with(AGAIN));
        first.sort_by_key(|step| (step.load, step.id.point, step.subject));
        first.into_iter().map(|step| step.id)
    }

    /// What the whole plan comes to. Nothing passes where something failed, be it only the reference, or where something is
    /// not there that the plan asks for.
    pub fn overall(&self) -> Overall {
        match self.count().overall() {
            Overall::Pass if self.failed_cells() > 0 || !self.gaps().is_empty() => Overall::CantTell,
            overall => overall,
        }
    }

    /// What is to be said behind a verdict of a run that is not whole; nothing of one that is.
    pub fn gaps(&self) -> String {
        let mut text = String::new();
        if self.run.ended.is_none() {
            text.push_str("; not finished");
        }
        if let [first, others @ ..] = &self.absent()[..] {
            let more = if others.is_empty() { String::new() } else { format!(" and in {} other places", others.len()) };
            text += &format!("; nothing was measured of {} under {}{more}", first.subject, first.place());
        }
        if let [(first, of, asked), others @ ..] = &self.sparse()[..] {
            let (subject, place) = (&first.subject, first.place());
            let more = if others.is_empty() { String::new() } else { format!(", as in {} other places", others.len()) };
            text += &format!("; {subject} under {place} was measured in {of} of {asked} repetitions only{more}");
        }
        text
    }

    /// The verdict of the whole plan in one line.
    pub fn verdict(&self) -> String {
        let failed = match self.failed_cells() {
            0 => String::new(),
            cells => format!("; of {} cells {cells} failed", self.run.cells.len()),
        };
        let (overall, count) = (self.overall(), self.count());
        let verdict = match (self.run.plan.asks, overall) {
            (Asks::Whether, _) => format!("{}: {count}{failed}", overall.word()),
            // What crashes is a fail, whatever was asked.
            (Asks::Which, Overall::Fail) if !failed.is_empty() => format!("fail: {}{failed}", self.beside(count)),
            (Asks::Which, Overall::Fail) => format!("they differ: {}", self.beside(count)),
            (Asks::Which, Overall::Pass) => format!("none is worse: {}", self.beside(count)),
            (Asks::Which, _) => format!("{}: {}{failed}", overall.word(), self.beside(count)),
        };
        verdict + &self.gaps()
    }

    /// The count in the words of a plan that asks which option to choose.
    fn beside(&self, Count { passed, failed, cant_tell, nothing }: Count) -> String {
        if passed + failed + cant_tell == 0 {
            return "no comparison decides anything".into();
        }
        let more = if nothing > 0 { format!("; {nothing} more decide nothing") } else { String::new() };
        format!(
            "beside {}, {passed} times no worse, {failed} times slower or with more CPU, {cant_tell} times nobody can tell{more}",
            self.run.plan.baseline()
        )
    }

    /// A subject's stack.
    pub fn stack(&self, name: &str) -> Option<Stack> {
        subject_called(&self.run.plan, name).map(|subject| subject.stack)
    }
}
