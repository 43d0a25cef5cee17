//! Symbols whose share of the host's time moved between two sides, beyond what chance would move them.

use std::collections::{BTreeMap, BTreeSet};

use crate::analysis::profile::{MISS, Profiles, Share, Unit, half_width};
use crate::results::{Cell, Run};
use crate::statistics::Sample;

/// Smaller moves are not listed, in percent of all samples.
const LEAST: f64 = 0.1;
/// The longest list.
const MOST: usize = 20;

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
    /// Its share on the first side; `None` where it was not among the hottest.
    pub a: Option<Share>,
    /// And on the second.
    pub b: Option<Share>,
    /// The difference, and where its interval of 95 % begins and ends.
    pub by: [f64; 3],
}

/// What two sides' profiles say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Symbols {
    /// Those that moved, the farthest first.
    pub moved: Vec<Moved>,
    /// How many samples each side has under a load and subject, at least; nothing of runs that did not count them, nor where runs
    /// are the units: how far they lie apart says more then.
    pub samples: Option<[u64; 2]>,
}

impl Symbols {
    /// The least move of a symbol with 1 % of all samples that is seen in four of five cases, in percent of all samples.
    pub fn least_seen(&self) -> Option<f64> {
        let [a, b] = self.samples?.map(|count| count as f64);
        Some(2.8 * (0.01 * 0.99 * (1.0 / a + 1.0 / b)).sqrt() * 100.0)
    }
}

/// What moved between two sides, over all repetitions of all their runs. Where a side has several of a load and subject, runs are
/// the units of both.
pub fn moved(a: &[&Run], b: &[&Run]) -> Symbols {
    let mut found = Symbols::default();
    let theirs = by_load(b);
    for (key, ours) in by_load(a) {
        let Some(theirs) = theirs.get(&key) else { continue };
        let sides = [&ours, theirs].map(|cells| Profiles::of_runs(cells.iter().copied()));
        // Without a profile in both nothing can have moved.
        if sides.iter().any(|side| side.cells.is_empty()) {
            continue;
        }
        let unit = if sides.iter().all(Profiles::is_of_one_run) { Unit::Cell } else { Unit::Run };
        if unit == Unit::Cell && sides.iter().all(|side| side.samples > 0) {
            let here = [sides[0].samples, sides[1].samples];
            found.samples = Some(found.samples.map_or(here, |least| [0, 1].map(|side| least[side].min(here[side]))));
        }
        let cells = sides.iter().flat_map(|side| &side.cells);
        let names: BTreeSet<&str> = cells.flat_map(|cell| &cell.symbols).map(|one| one.name.as_str()).collect();
        let count = names.len();
        found.moved.extend(names.into_iter().filter_map(|name| between(&sides, unit, key, name, count)));
    }
    found.moved.sort_by(|one, other| other.by[0].abs().total_cmp(&one.by[0].abs()));
    found.moved.truncate(MOST);
    found
}

/// The cells under each load of each subject, with the numbers of their runs.
fn by_load<'a>(runs: &[&'a Run]) -> BTreeMap<(&'a str, &'a str), Vec<(usize, &'a Cell)>> {
    let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (number, run) in runs.iter().enumerate() {
        for (key, cells) in run.by_load() {
            all.entry(key).or_default().extend(cells.into_iter().map(|cell| (number, cell)));
        }
    }
    all
}

/// A symbol that moved, if that is sure beside the `count` others of its profiles.
fn between(
    sides: &[Profiles<'_>; 2],
    unit: Unit,
    (load, subject): (&str, &str),
    name: &str,
    count: usize,
) -> Option<Moved> {
    let shares = [sides[0].shares(name, unit), sides[1].shares(name, unit)];
    // Shares in place of logarithms: how far they lie apart is found alike.
    let Sample { log_ratio: by, variance, leverage, freedom, .. } = Sample::of_groups(&shares[1], &shares[0])?;
    let counting = sides[0].counting(&shares[0]) + sides[1].counting(&shares[1]);
    let (variance, freedom) = ((variance * leverage).max(counting), freedom.max(1.0));
    // What was not among the hottest on one side was there all the same.
    let untold = [sides[0].untold(name), sides[1].untold(name)];
    let sure = if by > 0.0 { by - untold[0] } else { -by - untold[1] };
    // Chance lists something under one load and subject as often as an interval misses.
    if sure < LEAST || sure < half_width(variance, freedom, MISS / count.max(1) as f64)? {
        return None;
    }
    let half = half_width(variance, freedom, MISS)?;
    Some(Moved {
        load: load.to_owned(),
        subject: subject.to_owned(),
        symbol: name.to_owned(),
        comms: sides[usize::from(shares[1].iter().any(|share| *share > 0.0))]
            .comms(name)
            .into_iter()
            .map(str::to_owned)
            .collect(),
        a: sides[0].share(name),
        b: sides[1].share(name),
        by: [by, by - half - untold[0], by + half + untold[1]],
    })
}
