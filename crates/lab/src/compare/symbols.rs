//! Symbols whose share of the host's time moved between two runs.

use std::collections::BTreeMap;

use crate::results::{Cell, Outcome, Run};
use crate::statistics::median;

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
    /// Its share in the first run, in percent of all samples; `None` where it was not among the hottest.
    pub a: Option<f64>,
    /// And in the second.
    pub b: Option<f64>,
}

impl Moved {
    /// By how much, in percent of all samples.
    pub fn by(&self) -> f64 {
        self.b.unwrap_or(0.0) - self.a.unwrap_or(0.0)
    }
}

/// Those that moved most, the farthest first.
pub fn moved(a: &Run, b: &Run) -> Vec<Moved> {
    let mut moved = Vec::new();
    let theirs = b.by_load();
    for ((load, subject), ours) in a.by_load() {
        let Some(theirs) = theirs.get(&(load, subject)) else { continue };
        let (ours, theirs) = (shares(&ours), shares(theirs));
        // Without a profile in both nothing can have moved.
        if ours.is_empty() || theirs.is_empty() {
            continue;
        }
        let mut names: Vec<_> = ours.keys().chain(theirs.keys()).collect();
        names.sort();
        names.dedup();
        moved.extend(names.into_iter().map(|name| Moved {
            load: load.into(),
            subject: subject.into(),
            symbol: (*name).into(),
            a: ours.get(name).copied(),
            b: theirs.get(name).copied(),
        }));
    }
    moved.retain(|moved| moved.by().abs() >= LEAST);
    moved.sort_by(|one, other| other.by().abs().total_cmp(&one.by().abs()));
    moved.truncate(MOST);
    moved
}

/// The median share of each symbol over the repetitions in which it was seen.
fn shares<'a>(cells: &[&'a Cell]) -> BTreeMap<&'a str, f64> {
    let mut seen: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for cell in cells {
        let Outcome::Measured(measurement) = &cell.outcome else { continue };
        for symbol in &measurement.symbols {
            seen.entry(&symbol.name).or_default().push(symbol.percent);
        }
    }
    seen.into_iter().map(|(name, shares)| (name, median(shares))).collect()
}
