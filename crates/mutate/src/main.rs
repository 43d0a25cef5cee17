//! `egret-mutate`: which changes of a crate its tests do not notice.
//!
//! cargo-mutants says what can be changed, and builds the crate anew for each change, which takes hours. Here all changes
//! are compiled into one program, which makes the one that it is told to (`rewrite.rs`), and a change is held against the
//! tests that come by it alone.

#![forbid(unsafe_code)]

mod build;
mod change;
mod rewrite;
mod run;

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context as _, bail};

use crate::change::Change;
use crate::rewrite::Id;
use crate::run::{Outcome, Place, Test};

/// The longest that a test may take as it is.
const LONGEST: Duration = Duration::from_secs(120);

#[derive(Clone, Copy, PartialEq)]
enum Fate {
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
    let [workspace, folder, list] = &arguments[..] else {
        bail!("usage: egret-mutate WORKSPACE FOLDER LIST: a copy to rewrite, a crate in it, what can be changed");
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
    let folder = workspace.join(folder);
    let built = build::build(&workspace, &folder, &changes)?;
    let places: Vec<_> = (0..at_once).map(|number| Place::new(&folder, number)).collect();
    let mut tests = Vec::new();
    for program in &built.programs {
        tests.extend(run::list(program, &folder)?);
    }
    let reaching = reaching(&places, &tests, changes.len())?;
    let fates = each(&places, &changes, |place, index, change| {
        let (id, tests) = (index as Id + 1, &reaching[index]);
        let fate = match () {
            () if built.do_not_compile.contains(&id) => Fate::DoesNotCompile,
            () if !built.made.contains(&id) => Fate::LeftOut,
            () if tests.is_empty() => Fate::NotReached,
            () if end.is_some_and(|end| end < Instant::now()) => Fate::NotTried,
            () => hold(place, id, tests)?,
        };
        match fate {
            Fate::Missed => println!("missed: {}", change.name),
            Fate::NotReached => println!("not reached: {}", change.name),
            _ => (),
        }
        Ok(fate)
    })?;
    let count = |fate| fates.iter().filter(|it| **it == fate).count();
    let unnoticed = count(Fate::Missed) + count(Fate::NotReached);
    let by_time = count(Fate::NoticedByTime);
    println!(
        "changes: {}, left out: {}, do not compile: {}, noticed: {}, of these by time: {by_time}, missed: {}, \
         not reached by any test: {}, not tried: {}",
        changes.len(),
        count(Fate::LeftOut),
        count(Fate::DoesNotCompile),
        count(Fate::Noticed) + by_time,
        count(Fate::Missed),
        count(Fate::NotReached),
        count(Fate::NotTried),
    );
    Ok(ExitCode::from(if unnoticed > 0 { 2 } else { 0 }))
}

/// The tests that reach each change, the fastest first.
fn reaching<'a>(places: &[Place], tests: &'a [Test], changes: usize) -> anyhow::Result<Vec<Vec<Timed<'a>>>> {
    let mut reached = each(places, tests, |place, _, test| {
        let begun = Instant::now();
        let (outcome, ids) = place.reach(test, LONGEST)?;
        if outcome != Outcome::Passed {
            println!("left out, for it does not pass as it is: {}", test.name);
            return Ok(((begun.elapsed(), test), Vec::new()));
        }
        Ok(((begun.elapsed(), test), ids))
    })?;
    reached.sort_by_key(|((takes, _), _)| *takes);
    let mut reaching = vec![Vec::new(); changes];
    for (test, ids) in reached {
        ids.into_iter().for_each(|id| reaching[id as usize - 1].push(test));
    }
    Ok(reaching)
}

/// Runs tests with a change until one notices.
fn hold(place: &Place, id: Id, tests: &[Timed]) -> anyhow::Result<Fate> {
    for (takes, test) in tests {
        match place.change(test, id, Duration::from_secs(5) + *takes * 10)? {
            Outcome::Passed => (),
            Outcome::Failed => return Ok(Fate::Noticed),
            Outcome::TookTooLong => return Ok(Fate::NoticedByTime),
        }
    }
    Ok(Fate::Missed)
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
            if (index + 1).is_multiple_of(100) {
                eprintln!("{} of {}", index + 1, items.len());
            }
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
