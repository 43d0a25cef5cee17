//! Symbols whose share of the host's time moved between two sides, beyond what chance would move them.

use std::collections::{BTreeMap, BTreeSet};

use statrs::distribution::{ContinuousCDF, StudentsT};

use crate::results::{Cell, Measurement, Outcome, Run};
use crate::statistics::{deviation, mean};

/// Smaller moves are not listed, in percent of all samples.
const LEAST: f64 = 0.1;
/// The longest list.
const MOST: usize = 20;
/// How often chance may list something under one load and subject; and misses of an interval.
const MISS: f64 = 0.05;

/// A symbol whose share moved.
#[derive(Clone, Debug, PartialEq)]
pub struct Moved {
    /// The load under which it did.
    pub load: String,
    /// The subject.
    pub subject: String,
    /// The symbol.
    pub symbol: String,
    /// The programs and threads that ran it most, on the second side or else on the first.
    pub comms: Vec<String>,
    /// Its share on the first side, in percent of all samples; `None` where it was not among the hottest.
    pub a: Option<f64>,
    /// And on the second.
    pub b: Option<f64>,
    /// The difference, and where its interval of 95 % begins and ends.
    pub by: [f64; 3],
}

/// What two sides' profiles say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Symbols {
    /// Those that moved, the farthest first.
    pub moved: Vec<Moved>,
    /// How many samples each side has under a load and subject, at least; nothing of runs that did not count them.
    pub samples: Option<[u64; 2]>,
}

impl Symbols {
    /// The least move of a symbol with 1 % of all samples that is seen in four of five cases, in percent of all samples.
    pub fn least_seen(&self) -> Option<f64> {
        let [a, b] = self.samples?.map(|count| count as f64);
        Some(2.8 * (0.01 * 0.99 * (1.0 / a + 1.0 / b)).sqrt() * 100.0)
    }
}

/// The profiles of a side under one load, of one subject.
struct Side<'a> {
    cells: Vec<&'a Measurement>,
    samples: u64,
}

impl<'a> Side<'a> {
    fn of(cells: &[&'a Cell]) -> Self {
        let measured = cells.iter().filter_map(|cell| match &cell.outcome {
            Outcome::Measured(measured) => Some(measured.as_ref()),
            Outcome::Failed { .. } | Outcome::Impossible { .. } => None,
        });
        let cells: Vec<_> = measured.filter(|measured| !measured.symbols.is_empty()).collect();
        Self { samples: cells.iter().map(|cell| cell.samples).sum(), cells }
    }

    /// A symbol's share in each cell, over all that run it.
    fn shares(&self, name: &str) -> Vec<f64> {
        let share =
            |cell: &&Measurement| cell.symbols.iter().filter(|one| one.name == name).map(|one| one.percent).sum();
        self.cells.iter().map(share).collect()
    }

    /// The variance of the mean of some shares: what they scatter, and at least what counting so many samples scatters.
    fn variance(&self, shares: &[f64]) -> f64 {
        let between = deviation(shares).powi(2) / shares.len().max(1) as f64;
        let share = mean(shares).unwrap_or(0.0) / 100.0;
        let counting = if self.samples > 0 { share * (1.0 - share) / self.samples as f64 * 1e4 } else { 0.0 };
        between.max(counting)
    }

    /// Who runs a symbol most.
    fn comms(&self, name: &str) -> Vec<String> {
        let mut by: BTreeMap<&str, f64> = BTreeMap::new();
        let of_it = self.cells.iter().flat_map(|cell| &cell.symbols).filter(|one| one.name == name);
        of_it.filter(|one| !one.comm.is_empty()).for_each(|one| *by.entry(&one.comm).or_default() += one.percent);
        let mut by: Vec<_> = by.into_iter().collect();
        by.sort_by(|one, other| other.1.total_cmp(&one.1));
        by.into_iter().take(3).map(|(comm, _)| comm.to_owned()).collect()
    }
}

/// What moved between two sides, over all repetitions of all their runs.
pub fn moved(a: &[&Run], b: &[&Run]) -> Symbols {
    let mut found = Symbols::default();
    let theirs = by_load(b);
    for (key, ours) in by_load(a) {
        let Some(theirs) = theirs.get(&key) else { continue };
        let sides = [Side::of(&ours), Side::of(theirs)];
        // Without a profile in both nothing can have moved.
        if sides.iter().any(|side| side.cells.is_empty()) {
            continue;
        }
        if sides.iter().all(|side| side.samples > 0) {
            let here = [sides[0].samples, sides[1].samples];
            found.samples = Some(found.samples.map_or(here, |least| [0, 1].map(|side| least[side].min(here[side]))));
        }
        let cells = sides.iter().flat_map(|side| &side.cells);
        let names: BTreeSet<&str> = cells.flat_map(|cell| &cell.symbols).map(|one| one.name.as_str()).collect();
        let count = names.len();
        found.moved.extend(names.into_iter().filter_map(|name| between(&sides, key, name, count)));
    }
    found.moved.sort_by(|one, other| other.by[0].abs().total_cmp(&one.by[0].abs()));
    found.moved.truncate(MOST);
    found
}

fn by_load<'a>(runs: &[&'a Run]) -> BTreeMap<(&'a str, &'a str), Vec<&'a Cell>> {
    let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (key, cells) in runs.iter().flat_map(|run| run.by_load()) {
        all.entry(key).or_default().extend(cells);
    }
    all
}

/// A symbol that moved, if that is sure beside the `count` others of its profiles.
fn between(sides: &[Side<'_>; 2], (load, subject): (&str, &str), name: &str, count: usize) -> Option<Moved> {
    let shares = [sides[0].shares(name), sides[1].shares(name)];
    let [a, b] = shares.each_ref().map(|shares| mean(shares).unwrap_or(0.0));
    let error = (sides[0].variance(&shares[0]) + sides[1].variance(&shares[1])).sqrt();
    let freedom = (shares[0].len() + shares[1].len()).saturating_sub(2).max(1) as f64;
    let student = StudentsT::new(0.0, 1.0, freedom).ok()?;
    let half = |miss: f64| student.inverse_cdf(1.0 - miss / 2.0) * error;
    let by = b - a;
    if by.abs() < LEAST || by.abs() < half(MISS / count.max(1) as f64) {
        return None;
    }
    let seen = |share: f64| (share > 0.0).then_some(share);
    Some(Moved {
        load: load.to_owned(),
        subject: subject.to_owned(),
        symbol: name.to_owned(),
        comms: sides[usize::from(b > 0.0)].comms(name),
        a: seen(a),
        b: seen(b),
        by: [by, by - half(MISS), by + half(MISS)],
    })
}
