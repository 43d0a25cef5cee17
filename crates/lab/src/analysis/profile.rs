//! What `perf` saw of the host while some cells were measured.

use std::collections::BTreeMap;

use statrs::distribution::{ContinuousCDF, StudentsT};

use crate::results::{Cell, Measurement, SYMBOLS};
use crate::statistics::{mean, squares};

/// How often an interval misses what it is of.
pub const MISS: f64 = 0.05;

/// The profiles of some cells that are repetitions of each other.
#[derive(Debug)]
pub struct Profiles<'a> {
    /// Those that have one.
    pub cells: Vec<&'a Measurement>,
    /// The run that each of them is of.
    runs: Vec<usize>,
    /// The samples of all of them; none where they were not counted.
    pub samples: u64,
}

/// What is independent of each other in some profiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Each cell: they are of one run.
    Cell,
    /// Each run: what a boot and a layout make of a symbol is in all of a run's cells.
    Run,
}

/// A symbol's share of all samples, and its interval of 95 %, in percent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// The share.
    pub percent: f64,
    /// Where its interval begins and ends.
    pub interval: [f64; 2],
}

impl<'a> Profiles<'a> {
    /// Of some cells of one run, as far as they were measured.
    pub fn of(cells: impl IntoIterator<Item = &'a Cell>) -> Self {
        Self::of_runs(cells.into_iter().map(|cell| (0, cell)))
    }

    /// Of some cells, each with the number of its run.
    pub fn of_runs(cells: impl IntoIterator<Item = (usize, &'a Cell)>) -> Self {
        let measured = cells.into_iter().filter_map(|(run, cell)| {
            let measured = cell.measured().filter(|measured| !measured.symbols.is_empty())?;
            Some((run, measured))
        });
        let (runs, cells): (Vec<_>, Vec<_>) = measured.unzip();
        Self { samples: cells.iter().map(|cell| cell.samples).sum(), cells, runs }
    }

    /// Whether all of them are of the same run.
    pub fn is_of_one_run(&self) -> bool {
        self.runs.iter().all(|run| Some(run) == self.runs.first())
    }

    /// A symbol's share in each unit, over all that run it.
    pub fn shares(&self, name: &str, unit: Unit) -> Vec<f64> {
        let share =
            |cell: &&Measurement| cell.symbols.iter().filter(|one| one.name == name).map(|one| one.percent).sum();
        let mut units: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
        for (number, (run, cell)) in self.runs.iter().zip(&self.cells).enumerate() {
            let key = if unit == Unit::Run { (*run, 0) } else { (*run, number) };
            units.entry(key).or_default().push(share(cell));
        }
        units.values().filter_map(|shares| mean(shares)).collect()
    }

    /// How much larger a symbol's share may be than what is known of it: a cell with as many symbols as are kept may have had as
    /// much of another as of its coldest.
    pub fn untold(&self, name: &str) -> f64 {
        let untold = self.cells.iter().map(|cell| {
            let shares = summed(cell.symbols.iter().map(|one| (one.name.as_str(), one.percent)));
            let is_cut = shares.len() >= SYMBOLS && !shares.contains_key(name);
            if is_cut { shares.into_values().fold(100.0, f64::min) } else { 0.0 }
        });
        mean(&untold.collect::<Vec<_>>()).unwrap_or(0.0)
    }

    /// The variance of the mean of some shares as far as it comes of counting so many samples: what they scatter is no less.
    pub fn counting(&self, shares: &[f64]) -> f64 {
        let share = mean(shares).unwrap_or(0.0) / 100.0;
        if self.samples > 0 { share * (1.0 - share) / self.samples as f64 * 1e4 } else { 0.0 }
    }

    /// The share of a symbol over all cells; `None` where it was not among the hottest in any.
    pub fn share(&self, name: &str) -> Option<Share> {
        let shares = self.shares(name, if self.is_of_one_run() { Unit::Cell } else { Unit::Run });
        let percent = mean(&shares).filter(|share| *share > 0.0)?;
        let freedom = shares.len().saturating_sub(1).max(1) as f64;
        // All shares have their say in the mean, and so in what it scatters, however far off they are.
        let between = squares(&shares) / freedom / shares.len() as f64;
        let half = half_width(between.max(self.counting(&shares)), freedom, MISS)?;
        Some(Share { percent, interval: [(percent - half).max(0.0), (percent + half).min(100.0)] })
    }

    /// The names of the hottest symbols, the hottest first.
    pub fn hottest(&self, most: usize) -> Vec<&'a str> {
        let symbols = self.cells.iter().flat_map(|cell| &cell.symbols);
        let mut names = ranked(symbols.map(|one| (one.name.as_str(), one.percent)));
        names.truncate(most);
        names
    }

    /// Who runs a symbol most.
    pub fn comms(&self, name: &str) -> Vec<&'a str> {
        let symbols = self.cells.iter().flat_map(|cell| &cell.symbols);
        let of_it = symbols.filter(|one| one.name == name && !one.comm.is_empty());
        let mut comms = ranked(of_it.map(|one| (one.comm.as_str(), one.percent)));
        comms.truncate(3);
        comms
    }
}

/// The sum of each name.
fn summed<'a>(shares: impl Iterator<Item = (&'a str, f64)>) -> BTreeMap<&'a str, f64> {
    let mut by = BTreeMap::new();
    shares.for_each(|(name, share)| *by.entry(name).or_default() += share);
    by
}

/// Names from the one with the largest sum on.
fn ranked<'a>(shares: impl Iterator<Item = (&'a str, f64)>) -> Vec<&'a str> {
    let mut by: Vec<_> = summed(shares).into_iter().collect();
    by.sort_by(|one, other| other.1.total_cmp(&one.1));
    by.into_iter().map(|(name, _)| name).collect()
}

impl Share {
    /// `2.41 % [2.37, 2.45]`.
    pub fn text(&self) -> String {
        let [low, high] = self.interval;
        format!("{:.2} % [{low:.2}, {high:.2}]", self.percent)
    }
}

/// Half of the width of Student's interval that misses so often.
pub fn half_width(variance: f64, freedom: f64, miss: f64) -> Option<f64> {
    let student = StudentsT::new(0.0, 1.0, freedom).ok()?;
    Some(student.inverse_cdf(1.0 - miss / 2.0) * variance.sqrt())
}
