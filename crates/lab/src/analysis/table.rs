//! The cells of a run by load, subject and point of a curve.

use std::collections::BTreeMap;

use super::bound::of_most;
use crate::plan::{Load, Metric, Plan};
use crate::results::{Bottleneck, Cell, CellId, Measurement, Outcome, Run, shortfall};
use crate::runner::AGAIN;
use crate::statistics::{mean, median};

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

impl<'a> CellKey<'a> {
    /// What a cell has in common with its repetitions.
    pub(crate) fn of(id: &'a CellId) -> Self {
        Self { load: &id.load, subject: &id.subject, point: id.point }
    }
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
    /// None failed, and this machine cannot run them.
    Impossible(&'a str),
    /// None has ended.
    Missing,
}

impl<'a> Table<'a> {
    /// Of a run.
    pub fn new(run: &'a Run) -> Self {
        let mut keys: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for cell in &run.cells {
            keys.entry(CellKey::of(&cell.id)).or_default().push(cell);
        }
        Self(keys)
    }

    /// Those that have cells.
    pub fn keys(&self) -> impl Iterator<Item = CellKey<'a>> {
        self.0.keys().copied()
    }

    fn cells<'b>(&'b self, key: CellKey<'b>) -> &'b [&'a Cell] {
        // A map of longer lives is one of shorter lives, too.
        let cells: &'b BTreeMap<CellKey<'b>, Vec<&'a Cell>> = &self.0;
        cells.get(&key).map_or(&[], Vec::as_slice)
    }

    /// Whether any cell with a key has ended.
    pub fn has(&self, key: CellKey<'_>) -> bool {
        !self.cells(key).is_empty()
    }

    /// What was measured, with its repetition.
    pub fn measured(&self, key: CellKey<'_>) -> impl Iterator<Item = (u32, &'a Measurement)> {
        self.cells(key).to_vec().into_iter().filter_map(|cell| Some((cell.id.repetition, cell.measured()?)))
    }

    /// The values of a metric.
    pub fn values(&self, key: CellKey<'_>, metric: Metric) -> Vec<f64> {
        self.measured(key).filter_map(|(_, measurement)| metric.of(measurement)).collect()
    }

    /// The logarithm of a metric in each repetition: of a baseline that was measured twice, the mean of both.
    pub(super) fn logs(&self, key: CellKey<'_>, metric: Metric, twice: bool) -> BTreeMap<u32, f64> {
        let mut logs: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
        let again = format!("{}{AGAIN}", key.subject);
        let keys = [key, CellKey { subject: &again, ..key }];
        for key in &keys[..if twice { 2 } else { 1 }] {
            for (repetition, measurement) in self.measured(*key) {
                logs.entry(repetition).or_default().extend(metric.of(measurement).map(f64::ln));
            }
        }
        logs.into_iter().filter_map(|(repetition, logs)| Some((repetition, mean(&logs)?))).collect()
    }

    /// The logarithms of the ratios of one key's values to another's, each within one repetition.
    pub fn log_ratios(&self, key: CellKey<'_>, to: CellKey<'_>, metric: Metric) -> Vec<(u32, f64)> {
        // Beside itself a baseline is compared measurement by measurement.
        let twice = ![key.subject, to.subject].iter().any(|name| name.ends_with(AGAIN));
        let others = self.logs(to, metric, twice);
        let ratio = |(repetition, log)| Some((repetition, log - others.get(&repetition)?));
        self.logs(key, metric, twice).into_iter().filter_map(ratio).collect()
    }

    /// The same of a key's second measurements to its first.
    pub fn beside_itself(&self, key: CellKey<'_>, metric: Metric) -> Vec<(u32, f64)> {
        let again = format!("{}{AGAIN}", key.subject);
        self.log_ratios(CellKey { subject: &again, ..key }, key, metric)
    }

    /// A key's cells, of a baseline also its second measurements.
    fn with_again(&self, key: CellKey<'_>) -> Vec<&'a Cell> {
        let again = format!("{}{AGAIN}", key.subject);
        [key, CellKey { subject: &again, ..key }].map(|key| self.cells(key).to_vec()).concat()
    }

    /// Whether most of a key's cells were measured; of a baseline also its second measurements.
    pub fn mostly_works(&self, key: CellKey<'_>) -> bool {
        let cells = self.with_again(key);
        2 * cells.iter().filter(|cell| matches!(cell.outcome, Outcome::Measured(_))).count() > cells.len()
    }

    /// In how many of its repetitions a key's cells failed, and why; of a baseline also its second measurements.
    pub fn failures(&self, key: CellKey<'_>) -> Option<String> {
        let cells = self.with_again(key);
        let reasons: Vec<&str> = cells.iter().filter_map(|cell| cell.failure()).collect();
        let reason = reasons.last()?;
        Some(format!("{} failed in {} of {} repetitions: {reason}", key.subject, reasons.len(), cells.len()))
    }

    /// The rate that an open loop asked for, in requests per second: the median.
    pub fn offered(&self, key: CellKey<'_>) -> Option<f64> {
        let rates: Vec<f64> = self.measured(key).filter_map(|(_, measurement)| measurement.offered_iops).collect();
        (!rates.is_empty()).then(|| median(rates))
    }

    /// What became of it.
    pub fn status(&self, key: CellKey<'_>) -> Status<'a> {
        let mut status = Status::Missing;
        for cell in self.cells(key) {
            match (&cell.outcome, status) {
                (Outcome::Measured(_), _) => return Status::Measured,
                (Outcome::Failed { reason, log }, _) => status = Status::Failed(reason, log),
                // Where it could be tried it failed.
                (Outcome::Impossible { .. }, Status::Failed(..)) => {}
                (Outcome::Impossible { reason }, _) => status = Status::Impossible(reason),
            }
        }
        status
    }

    /// How many of a key's cells have ended, and of these, how many this machine could not run and why.
    pub fn impossible(&self, key: CellKey<'_>) -> (usize, Vec<&'a str>) {
        let reasons = self.cells(key).iter().filter_map(|cell| match &cell.outcome {
            Outcome::Impossible { reason } => Some(reason.as_str()),
            Outcome::Measured(_) | Outcome::Failed { .. } => None,
        });
        (self.cells(key).len(), reasons.collect())
    }

    /// The share of the rate that was asked for that an open loop reached, if it fell short of it by more than chance.
    pub fn shortfall(&self, key: CellKey<'_>) -> Option<f64> {
        shortfall(self.measured(key).map(|(_, one)| one))
    }

    /// What other than the server limited most of a key's cells.
    pub fn limit(&self, key: CellKey<'_>) -> Option<&'a Bottleneck> {
        let limits: Vec<_> = self.measured(key).map(|(_, measurement)| measurement.limit.as_ref()).collect();
        of_most(&limits)
    }

    /// Whether its speed means nothing.
    pub fn is_functional_only(&self, key: CellKey<'_>) -> bool {
        self.measured(key).any(|(_, measurement)| measurement.functional_only)
    }
}

/// Whom a subject is compared with under a load: the baseline, or whoever of the baseline's line is at the same place.
pub fn counterpart<'a>(plan: &'a Plan, load: &'a Load, name: &str) -> Option<&'a str> {
    let baseline = plan.baseline_under(load);
    if name.ends_with(AGAIN) {
        return Some(baseline);
    }
    let (baseline, subject) = (plan.subject(baseline)?, plan.subject(name)?);
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
        let subjects = subjects.map(subject).concat()
            + "[[subject]]\nname = 'blk'\nstack = 'egret'\nline = 'blk'\n[[subject]]\nname = 'none'\nstack = 'egret'\n";
        let loads = "[[load]]\n[[load]]\niodepth = 2\nsubjects = ['scsi 2', 'scsi 1']\n\
                     [[load]]\niodepth = 3\nsubjects = ['scsi 2', 'blk 1']\n";
        let plan = format!("name = 'p'\ntitle = 't'\n[disk]\ntype = 'null'\n{subjects}{loads}");
        let plan: Plan = toml::from_str(&plan).unwrap();
        let [all, scsi, two] = [0, 1, 2].map(|load| &plan.loads[load]);
        let with = |load| ["blk 1", "blk 2", "scsi 1", "scsi 2"].map(|name| counterpart(&plan, load, name));
        assert_eq!(with(all), [None, Some("blk 1"), Some("blk 1"), Some("blk 2")]);
        assert_eq!(with(scsi)[2..], [Some("scsi 2"), None]);
        assert_eq!(with(two)[3], Some("blk 1"), "who is at its place is not under this load");
        assert_eq!(counterpart(&plan, all, "none"), Some("blk 1"), "it is on no line");
    }
}
