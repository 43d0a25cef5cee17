//! `egret-mutate`: which changes of a crate its tests do not notice.
//!
//! cargo-mutants says what can be changed, and builds the crate anew for each change, which takes hours. Here all changes
//! are compiled into one program, which makes the one that it is told to (`rewrite.rs`), and a change is held against the
//! tests that come by it alone. Those that no program can make while it runs take a build each, and all tests.

#![forbid(unsafe_code)]

mod build;
mod change;
mod rewrite;
mod run;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, iter, thread};

use anyhow::{Context as _, bail};

use crate::change::Change;
use crate::rewrite::Id;
use crate::run::{Outcome, Place, Test};

/// The longest that a test may take as it is.
const LONGEST: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, PartialEq)]
enum Fate {
    /// It takes a build of its own.
    LeftOut,
    DoesNotCompile,
    Noticed,
    NoticedByTime,
    Missed,
    NotReached,
    NotTried,
}

/// What a test takes as it is.
type Timed<'a> = (Duration, &'a Test);

fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [workspace, folder, list, users @ ..] = &arguments[..] else {
        bail!(
            "usage: egret-mutate WORKSPACE FOLDER LIST [USER...]: a copy to rewrite, a crate in it, what can be changed, \
             and crates that use it, whose tests are to notice as well"
        );
    };
    let changes: Vec<Change> = serde_json::from_slice(&fs::read(list)?).with_context(|| list.clone())?;
    let number =
        |name: &'static str| env::var(name).ok().map(|text| text.parse::<u64>().with_context(|| name)).transpose();
    let end = number("EGRET_MUTANTS_MINUTES")?.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes));
    let at_once = match number("RUST_TEST_THREADS")? {
        Some(number) => number,
        None => thread::available_parallelism()?.get() as u64,
    };

    let workspace = fs::canonicalize(workspace)?;
    let folders: Vec<_> = iter::once(folder).chain(users).map(|folder| workspace.join(folder)).collect();
    let built = build::build(&workspace, &folders, &changes)?;
    let places: Vec<_> = (0..at_once).map(Place::new).collect();
    let mut tests = Vec::new();
    for (folder, program) in &built.programs {
        tests.extend(run::list(program, folder)?);
    }
    let (timed, reaching) = reaching(&places, &tests, changes.len())?;
    let is_over = || end.is_some_and(|end| end < Instant::now());
    let mut fates = each(&places, &changes, |place, index, change| {
        let (id, tests) = (index as Id + 1, &reaching[index]);
        let fate = match () {
            () if built.do_not_compile.contains(&id) => Fate::DoesNotCompile,
            () if !built.made.contains(&id) => Fate::LeftOut,
            () if tests.is_empty() => Fate::NotReached,
            () if is_over() => Fate::NotTried,
            () => hold(place, id, tests)?,
        };
        fate.tell(change);
        progress(index, changes.len());
        Ok(fate)
    })?;
    let left = fates.iter_mut().zip(&changes).filter(|(fate, _)| **fate == Fate::LeftOut);
    let left: Vec<_> = left.collect();
    let alone = left.len();
    for (done, (fate, change)) in left.into_iter().enumerate() {
        *fate = match () {
            () if is_over() => Fate::NotTried,
            () if !built.alone(&workspace, &folders, change)? => Fate::DoesNotCompile,
            () => hold_all(&places, &timed)?,
        };
        fate.tell(change);
        eprintln!("{} of {alone}, by a build each", done + 1);
    }
    let count = |fate| fates.iter().filter(|it| **it == fate).count();
    let unnoticed = count(Fate::Missed) + count(Fate::NotReached);
    let by_time = count(Fate::NoticedByTime);
    println!(
        "changes: {}, by a build each: {alone}, do not compile: {}, noticed: {}, of these by time: {by_time}, missed: {}, \
         not reached by any test: {}, not tried: {}",
        changes.len(),
        count(Fate::DoesNotCompile),
        count(Fate::Noticed) + by_time,
        count(Fate::Missed),
        count(Fate::NotReached),
        count(Fate::NotTried),
    );
    Ok(ExitCode::from(if unnoticed > 0 { 2 } else { 0 }))
}

impl Fate {
    /// Of a change that one test was run with.
    fn of(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Passed => Self::Missed,
            Outcome::Failed => Self::Noticed,
            Outcome::TookTooLong => Self::NoticedByTime,
        }
    }

    fn tell(self, change: &Change) {
        match self {
            Self::Missed => println!("missed: {}", change.name),
            Self::NotReached => println!("not reached: {}", change.name),
            _ => (),
        }
    }
}

/// The tests that pass as they are, and of these those that reach each change, the fastest first.
fn reaching<'a>(
    places: &[Place],
    tests: &'a [Test],
    changes: usize,
) -> anyhow::Result<(Vec<Timed<'a>>, Vec<Vec<Timed<'a>>>)> {
    let mut reached = each(places, tests, |place, index, test| {
        let begun = Instant::now();
        progress(index, tests.len());
        let (outcome, ids) = place.reach(test, LONGEST)?;
        if outcome != Outcome::Passed {
            println!("left out, for it does not pass as it is: {}", test.name);
            return Ok(((begun.elapsed(), test), None));
        }
        Ok(((begun.elapsed(), test), Some(ids)))
    })?;
    reached.sort_by_key(|((takes, _), _)| *takes);
    let (mut timed, mut reaching) = (Vec::new(), vec![Vec::new(); changes]);
    for (test, ids) in reached.into_iter().filter_map(|(test, ids)| Some((test, ids?))) {
        timed.push(test);
        ids.into_iter().for_each(|id| reaching[id as usize - 1].push(test));
    }
    Ok((timed, reaching))
}

/// Runs tests with a change until one notices.
fn hold(place: &Place, id: Id, tests: &[Timed]) -> anyhow::Result<Fate> {
    for (takes, test) in tests {
        let fate = Fate::of(place.change(test, id, limit(*takes))?);
        if fate != Fate::Missed {
            return Ok(fate);
        }
    }
    Ok(Fate::Missed)
}

/// Runs tests that have been built with a change, several at once, until one notices.
fn hold_all(places: &[Place], tests: &[Timed]) -> anyhow::Result<Fate> {
    let is_noticed = AtomicBool::new(false);
    let fates = each(places, tests, |place, _, (takes, test)| {
        if is_noticed.load(Ordering::Relaxed) {
            return Ok(Fate::Missed);
        }
        let fate = Fate::of(place.run(test, limit(*takes))?);
        is_noticed.fetch_or(fate != Fate::Missed, Ordering::Relaxed);
        Ok(fate)
    })?;
    Ok(fates.into_iter().find(|fate| *fate != Fate::Missed).unwrap_or(Fate::Missed))
}

/// How long a test may take that took so long as it is.
fn limit(takes: Duration) -> Duration {
    Duration::from_secs(5) + takes * 10
}

fn progress(index: usize, of: usize) {
    if (index + 1).is_multiple_of(100) {
        eprintln!("{} of {of}", index + 1);
    }
}

/// Does something with each item, as many at once as there are places; what came of it is in the items' order.
fn each<'a, T: Sync, R: Send>(
    places: &[Place],
    items: &'a [T],
    work: impl Fn(&Place, usize, &'a T) -> anyhow::Result<R> + Sync,
) -> anyhow::Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let worker = |place: &Place| -> anyhow::Result<Vec<(usize, R)>> {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return Ok(done) };
            done.push((index, work(place, index, item)?));
        }
    };
    let mut all: Vec<(usize, R)> = Vec::new();
    thread::scope(|scope| {
        let workers: Vec<_> = places.iter().map(|place| scope.spawn(move || worker(place))).collect();
        for worker in workers {
            all.extend(worker.join().expect("it does not panic")?);
        }
        anyhow::Ok(())
    })?;
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, result)| result).collect())
}
