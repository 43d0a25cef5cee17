//! The cells of a run by load, subject and point of a curve.

use std::collections::BTreeMap;

use crate::plan::{Load, Metric, Plan};
use crate::results::{Bottleneck, Cell, Measurement, Outcome, Run};
use crate::runner::AGAIN;

/// What cells that are repetitions of each other have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CellKey<'a> {
    /// The load's name.
    pub load: &'a str,
    /// The subject's.
    pub subject: &'a str,
    /// The point of a curve; 0 is a closed loop.
    pub point: u32,
}

/// All cells, by key.
#[derive(Debug)]
pub struct Table<'a>(BTreeMap<CellKey<'a>, Vec<&'a Cell>>);

/// What became of the cells with a key, seen together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Status<'a> {
    /// Some were measured.
    Measured,
    /// All that ended failed; the last lines that somebody said.
    Failed(&'a str, &'a [String]),
    /// This machine cannot run them.
    Impossible(&'a str),
    /// None has ended.
    Missing,
}

impl<'a> Table<'a> {
    /// Of a run.
    pub fn new(run: &'a Run) -> Self {
        let mut keys: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for cell in &run.cells {
            let id = &cell.id;
            let key = CellKey { load: &id.load, subject: &id.subject, point: id.point };
            keys.entry(key).or_default().push(cell);
        }
        Self(keys)
    }

    /// Those that have cells.
    pub fn keys(&self) -> impl Iterator<Item = CellKey<'a>> {
        self.0.keys().copied()
    }

    fn cells(&self, key: CellKey<'_>) -> &[&'a Cell] {
        self.0.iter().find(|(other, _)| **other == key).map_or(&[], |(_, cells)| cells)
    }

    /// What was measured, with its repetition.
    pub fn measured(&self, key: CellKey<'_>) -> impl Iterator<Item = (u32, &'a Measurement)> {
        self.cells(key).iter().filter_map(|cell| match &cell.outcome {
            Outcome::Measured(measurement) => Some((cell.id.repetition, measurement.as_ref())),
            _ => None,
        })
    }

    /// The values of a metric.
    pub fn values(&self, key: CellKey<'_>, metric: Metric) -> Vec<f64> {
        self.measured(key).filter_map(|(_, measurement)| metric.of(measurement)).collect()
    }

    /// The ratios of the values of one key's cells to those of another's, each within one repetition.
    pub fn ratios(&self, key: CellKey<'_>, to: CellKey<'_>, metric: Metric) -> Vec<f64> {
        let others: BTreeMap<u32, &Measurement> = self.measured(to).collect();
        let ratio = |(repetition, measurement)| Some(metric.of(measurement)? / metric.of(others.get(&repetition)?)?);
        self.measured(key).filter_map(ratio).collect()
    }

    /// What became of it.
    pub fn status(&self, key: CellKey<'_>) -> Status<'a> {
        let mut status = Status::Missing;
        for cell in self.cells(key) {
            match &cell.outcome {
                Outcome::Measured(_) => return Status::Measured,
                Outcome::Failed { reason, log } => status = Status::Failed(reason, log),
                Outcome::Impossible { reason } => status = Status::Impossible(reason),
            }
        }
        status
    }

    /// What other than the server limited most of a key's cells.
    pub fn limit(&self, key: CellKey<'_>) -> Option<&'a Bottleneck> {
        let limits: Vec<_> = self.measured(key).map(|(_, measurement)| measurement.limit.as_ref()).collect();
        let limited = limits.iter().flatten().count();
        (2 * limited > limits.len()).then(|| limits.iter().flatten().next().copied()).flatten()
    }

    /// Whether its speed means nothing.
    pub fn is_functional_only(&self, key: CellKey<'_>) -> bool {
        self.measured(key).any(|(_, measurement)| measurement.functional_only)
    }
}

/// Whom a subject is compared with under a load: the baseline, or whoever of the baseline's line is at the same place.
pub fn counterpart<'a>(plan: &'a Plan, load: &'a Load, name: &str) -> Option<&'a str> {
    let named = |name: &str| plan.subjects.iter().find(|subject| subject.name == name);
    let baseline = plan.baseline_under(load);
    if name.ends_with(AGAIN) {
        return Some(baseline);
    }
    let (baseline, subject) = (named(baseline)?, named(name)?);
    let on_line = baseline.line.is_some() && subject.line.is_some() && subject.line != baseline.line;
    let mut beside = plan.subjects.iter().filter(|other| other.line == baseline.line && load.is_put_on(&other.name));
    let other = beside.find(|other| on_line && other.at == subject.at).unwrap_or(baseline);
    (other.name != subject.name).then_some(&other.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_on_another_line_is_compared_with_whoever_is_at_its_place_on_the_baselines() {
        let subject = |(name, line, at): (&str, &str, u32)| {
            format!("[[subject]]\nname = '{name}'\nstack = 'egret'\nline = '{line}'\nat = {at}\n")
        };
        let subjects = [("blk 1", "blk", 1), ("blk 2", "blk", 2), ("scsi 1", "scsi", 1), ("scsi 2", "scsi", 2)];
        let subjects = subjects.map(subject).concat();
        let loads = "[[load]]\n[[load]]\niodepth = 2\nsubjects = ['scsi 2', 'scsi 1']\n";
        let plan = format!("name = 'p'\ntitle = 't'\n[disk]\ntype = 'null'\n{subjects}{loads}");
        let plan: Plan = toml::from_str(&plan).unwrap();
        let [all, scsi] = [0, 1].map(|load| &plan.loads[load]);
        let with = |load| ["blk 1", "blk 2", "scsi 1", "scsi 2"].map(|name| counterpart(&plan, load, name));
        assert_eq!(with(all), [None, Some("blk 1"), Some("blk 1"), Some("blk 2")]);
        assert_eq!(with(scsi)[2..], [Some("scsi 2"), None]);
    }
}
