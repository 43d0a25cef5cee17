//! `egret compare`: two runs of the lab beside each other.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use egret_lab::compare::Comparison;
use egret_lab::results::Run;
use egret_lab::runner;
use egret_lab::statistics::Overall;

/// Put runs of the lab beside each other: two kernels, two versions, two hosts.
#[derive(Args, Clone, Debug)]
#[command(
    override_usage = "egret compare [OPTIONS] A B\n       egret compare [OPTIONS] A... -- B...",
    after_help = "Several runs on each side show how far runs of one thing lie apart. Ends with 0 if nothing was lost, 1 if \
                  something was or fails, 2 if nobody can tell, and 3 if the runs cannot be compared or read. \
                  docs/lab.md explains the table."
)]
pub struct Compare {
    /// The runs that the others are compared with: their directories, or the result.json in them; and, if there is one
    /// of each, the other
    #[arg(value_name = "A", required = true, num_args = 1..)]
    pub a: Vec<PathBuf>,
    /// The others
    #[arg(value_name = "B", last = true)]
    pub b: Vec<PathBuf>,
    /// Compare runs that are unlike in more than one thing
    #[arg(long)]
    pub force: bool,
    /// The largest loss that is tolerated, in percent [default: the plan's, which is 5 unless it sets another]
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    pub threshold: Option<f64>,
    /// Write the verdicts as JUnit XML, too
    #[arg(long, value_name = "FILE")]
    pub junit: Option<PathBuf>,
}

fn percent(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.trim_end_matches('%').parse().ok();
    let share = number.map(|percent| percent / 100.0).filter(|share| (0.0..1.0).contains(share));
    share.ok_or_else(|| "0 up to, but not including, 100".into())
}

/// Runs `egret compare`; its result is the exit status.
pub fn run(arguments: &Compare) -> ExitCode {
    match compare(arguments) {
        Ok(overall) => ExitCode::from(overall.exit_code()),
        Err(error) => {
            crate::complain(&crate::in_one_line(&error));
            ExitCode::from(Overall::NotComparable.exit_code())
        }
    }
}

fn compare(arguments: &Compare) -> Result<Overall> {
    let (a, b) = match (arguments.a.as_slice(), arguments.b.as_slice()) {
        ([a, b], []) => (std::slice::from_ref(a), std::slice::from_ref(b)),
        (a, []) => bail!("two runs are compared, A and B, or several as A1 A2 A3 -- B1 B2 B3; got {}", a.len()),
        both => both,
    };
    let read_all = |paths: &[PathBuf]| paths.iter().map(|path| read(path)).collect::<Result<Vec<_>>>();
    let (a, b) = (read_all(a)?, read_all(b)?);
    let [first, second] = [&a, &b].map(|runs| runs.iter().collect::<Vec<_>>());
    let comparison = Comparison::of(&first, &second, arguments.threshold);
    crate::print(&comparison.text())?;
    if let Some(path) = &arguments.junit {
        std::fs::write(path, comparison.junit(arguments.force)?).with_context(|| path.display().to_string())?;
    }
    let overall = comparison.overall(arguments.force);
    if overall == Overall::NotComparable && !comparison.objections.is_empty() {
        let objections = comparison.objections.join("; ");
        crate::complain(&format!("the runs are unlike: {objections}. --force compares them nevertheless"));
    } else {
        crate::print(&format!("{}: {}\n", sentence(overall), comparison.said()))?;
    }
    Ok(overall)
}

/// A run by its directory, or by the result in it.
fn read(path: &Path) -> Result<Run> {
    let found = path.metadata().with_context(|| path.display().to_string())?;
    let directory = if found.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
    Ok(runner::read(directory)?)
}

const fn sentence(overall: Overall) -> &'static str {
    match overall {
        Overall::Pass => "pass: nothing was lost",
        Overall::Fail => "fail: something was lost, or fails",
        Overall::CantTell => "can't tell: measure more repetitions, or several runs",
        Overall::NotComparable => "not comparable: nothing that both measured decides anything",
    }
}
