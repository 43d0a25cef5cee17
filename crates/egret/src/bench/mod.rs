//! `egret bench`: runs the lab's plans, and brings in what fio measured elsewhere.

mod progress;

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use egret_lab::analysis::Analysis;
use egret_lab::compare::junit;
use egret_lab::plan::{BUILT_IN, Plan};
use egret_lab::process::ProcessReaper;
use egret_lab::results::{Outcome, Run};
use egret_lab::runner::{self, Ending, RunOptions, Runner};
use egret_lab::{disks, import, report, stack};
use egret_loadgen::random::mix;
use time::OffsetDateTime;

use progress::Bar;

/// Where runs go that are given no directory.
const RESULTS: &str = "egret-bench";

/// Measure I/O modes side by side: on this machine, with confidence.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Ends with 0 if every cell that can be measured here was, and 1 if one failed or none can be; with --check \
                        with 0 if the plan passes, 1 if it fails, and 2 if nobody can tell. docs/lab.md explains plans, the \
                        method, and how to resume a run."
)]
pub struct Bench {
    /// What to measure: a built-in plan or a TOML file [default: quick]
    #[arg(value_name = "PLAN")]
    plans: Vec<String>,

    /// Describe the built-in plans, and measure nothing
    #[arg(long)]
    list: bool,
    /// Name the cells and how long they take, and measure nothing
    #[arg(long)]
    dry_run: bool,
    /// Take the times and the sizes that the plan has under this name, such as published
    #[arg(long, value_name = "NAME", conflicts_with = "resume")]
    profile: Option<String>,
    /// Shrink sizes and times evenly, such as by 0.1
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    scale: f64,
    /// Measure every cell so often [default: as the plan says]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repetitions: Option<u32>,
    /// Only cells whose load or subject has this in its name
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// The baseline beside itself: what differs then is the noise floor
    #[arg(long)]
    aa: bool,
    /// All of the plan's comparisons, of subjects that are set up alike: whatever is found is noise
    #[arg(long, conflicts_with_all = ["aa", "resume"])]
    aa_all: bool,
    /// Measure curves at the rates of the run in this directory, to compare the two
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    rates_of: Option<PathBuf>,
    /// Where results go; a run that is there already is continued [default: ./egret-bench/PLAN-DATE-TIME]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Continue a run that was interrupted
    #[arg(
        long, value_name = "DIR",
        conflicts_with_all = ["plans", "output", "scale", "repetitions", "only", "aa", "dry_run", "seed"]
    )]
    resume: Option<PathBuf>,
    /// The QEMU that the plan calls so, such as after=./qemu-system-x86_64
    #[arg(long, value_name = "NAME=PATH", value_parser = named_path, conflicts_with = "resume")]
    qemu: Vec<(String, PathBuf)>,
    /// Draw the order of cells from this number
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Let the plan write to its device
    #[arg(long)]
    write_device: bool,
    /// Write all of the plan's device twice before, and once more at random where the loads do
    #[arg(long, conflicts_with = "resume")]
    precondition: bool,
    /// Write the verdicts as JUnit XML, too
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// End as the plan's verdict says: 0 pass, 1 fail, 2 can't tell
    #[arg(long)]
    check: bool,
    /// Bring in what fio wrote with --output-format=json elsewhere: [NAME=]FILE
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["plans", "resume", "dry_run"])]
    import: Vec<String>,
}

/// Runs `egret bench`: 0 if every cell that can be measured here was, and 1 if one failed or none can be; with `--check` as
/// the worst verdict says.
pub fn run(asked: &Bench) -> Result<ExitCode> {
    let mut worst = 0;
    measure(asked, &mut |code| worst = worse(worst, code))?;
    Ok(ExitCode::from(worst))
}

/// What two runs end with together: a fail counts for more than what nobody can tell.
fn worse(one: u8, other: u8) -> u8 {
    if [one, other].contains(&1) { 1 } else { one.max(other) }
}

/// Does what is asked for, and tells how each run ended, as `Overall::exit_code` does.
fn measure(asked: &Bench, ended: &mut dyn FnMut(u8)) -> Result<()> {
    if asked.list {
        return crate::print(&list()?);
    }
    if !asked.import.is_empty() {
        ended(bring_in(asked)?);
        return Ok(());
    }
    if let Some(directory) = &asked.resume {
        ended(resume(asked, directory)?);
        return Ok(());
    }
    if !(asked.scale > 0.0 && asked.scale <= 1000.0) {
        bail!("--scale must be above 0 and at most 1000, got {}", asked.scale);
    }
    let names = if asked.plans.is_empty() { vec![BUILT_IN[0].0.to_owned()] } else { asked.plans.clone() };
    if names.len() > 1 && asked.output.is_some() {
        bail!("--output is one run's directory, and {} plans make {} runs", names.len(), names.len());
    }
    if names.len() > 1 && asked.junit.is_some() {
        bail!("--junit is one run's file, and {} plans make {} runs", names.len(), names.len());
    }
    // All of them are looked at before the first is run.
    let whole = |name: &String| {
        let (plan, left_out) = plan(name, asked)?;
        let peaks = peaks(&plan, asked)?;
        Ok((plan, left_out, peaks))
    };
    let plans = names.iter().map(whole).collect::<Result<Vec<_>>>()?;
    for (plan, left_out, peaks) in plans {
        if asked.dry_run {
            let left_out: String = left_out.iter().map(|text| format!("{text}\n")).collect();
            crate::print(&(left_out + &dry_run(&plan, asked)))?;
            continue;
        }
        let directory = asked
            .output
            .clone()
            .unwrap_or_else(|| Path::new(RESULTS).join(dated(&plan.name, OffsetDateTime::now_utc())));
        let runs = directory.join(runner::RESULT).exists();
        if runs {
            let before = runner::read(&directory)?;
            // Its disk was preconditioned, and is not again.
            let mut again = plan.clone();
            again.disk.preconditioned |= asked.precondition;
            let is_of_another_seed = asked.seed.is_some_and(|seed| seed != before.seed);
            if before.plan != again || before.only != asked.only || before.peaks != peaks || is_of_another_seed {
                bail!("{} holds a run of something else; --resume continues it as it was", directory.display());
            }
            ended(resume(asked, &directory)?);
        } else {
            let options = RunOptions { left_out, peaks, ..options(asked, &directory)? };
            runner::check(&plan, &options).map_err(anyhow::Error::msg).with_context(|| plan.name.clone())?;
            ended(conduct(asked, |reaper| Ok(Runner::begin(plan, &options, reaper)?), &directory)?);
        }
    }
    Ok(())
}

/// `NAME=PATH`; the path of a program by its whole, as runs are resumed elsewhere.
fn named_path(text: &str) -> Result<(String, PathBuf), String> {
    let (name, path) = text.split_once('=').ok_or("it is NAME=PATH, such as after=./qemu-system-x86_64")?;
    let path = std::path::absolute(path).map_err(|error| format!("{path}: {error}"))?;
    Ok((name.to_owned(), path))
}

/// A plan, and what it is left without on this machine.
fn plan(name: &str, asked: &Bench) -> Result<(Plan, Vec<String>)> {
    let plan = Plan::named(name)?;
    let own_size = plan.clone().scaled(asked.scale).disk.size;
    let plan = asked.profile.iter().try_fold(plan, |plan, profile| plan.with_profile(profile))?;
    let mut plan = plan.scaled(asked.scale);
    for (called, path) in &asked.qemu {
        plan.place_qemu(called, path).map_err(anyhow::Error::msg)?;
    }
    if asked.aa_all {
        plan = plan.all_alike();
    }
    let mut left_out = stack::leave_out(&mut plan);
    left_out.extend(disks::make_room(&mut plan, own_size, asked.output.as_deref().unwrap_or(Path::new(RESULTS))));
    if let Some(repetitions) = asked.repetitions {
        (plan.repetitions, plan.most_repetitions) = (repetitions, None);
    }
    if asked.aa {
        let baseline = plan.baseline().to_owned();
        plan.subjects.retain(|subject| subject.name == baseline);
        plan.loads.change(|loads| {
            loads.retain(|keys| keys.subjects.is_empty() || keys.subjects.contains(&baseline));
            loads.iter_mut().for_each(|keys| keys.subjects.clear());
        });
        plan.noise_floor = true;
    }
    stack::check_options(&plan).with_context(|| name.to_owned())?;
    if runner::steps(&plan, 0, asked.only.as_deref()).is_empty() {
        bail!("{name}: no load and no subject has '{}' in its name", asked.only.as_deref().unwrap_or_default());
    }
    Ok((plan, left_out))
}

/// What the plan's curves have their points at shares of, where that is another run's.
fn peaks(plan: &Plan, asked: &Bench) -> Result<BTreeMap<String, f64>> {
    let Some(directory) = &asked.rates_of else { return Ok(BTreeMap::new()) };
    let steps = runner::steps(plan, 0, asked.only.as_deref());
    let curves = steps.iter().filter(|step| step.share.is_some()).map(|step| step.id.load.as_str());
    let curves: BTreeSet<&str> = curves.collect();
    if curves.is_empty() {
        bail!("--rates-of is for curves, and {} has none", plan.name);
    }
    let peaks = runner::peaks(&runner::read(directory)?, curves).map_err(anyhow::Error::msg);
    peaks.with_context(|| format!("--rates-of {}", directory.display()))
}

fn options(asked: &Bench, directory: &Path) -> Result<RunOptions> {
    let nanoseconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().subsec_nanos();
    Ok(RunOptions {
        scale: asked.scale,
        seed: asked.seed.unwrap_or_else(|| mix(nanoseconds.into()) >> 16),
        only: asked.only.clone(),
        peaks: BTreeMap::new(),
        directory: directory.to_owned(),
        egret: std::env::current_exe().context("where this program is")?,
        write_device: asked.write_device,
        precondition: asked.precondition,
        left_out: Vec::new(),
    })
}

fn resume(asked: &Bench, directory: &Path) -> Result<u8> {
    // What was preconditioned is no more so by doing it again.
    let options = RunOptions { precondition: false, ..options(asked, directory)? };
    conduct(asked, |reaper| Ok(Runner::resume(&options, reaper)?), directory)
}

/// Runs what `begin` makes, to its end or to the first signal.
fn conduct(asked: &Bench, begin: impl FnOnce(&Arc<ProcessReaper>) -> Result<Runner>, directory: &Path) -> Result<u8> {
    let reaper = ProcessReaper::new().context("/bin/sh")?;
    stop_on_signals(&reaper)?;
    let mut runner = begin(&reaper).map_err(|error| match reaper.has_stopped() {
        true => anyhow::anyhow!("interrupted before the first cell"),
        false => error,
    })?;
    let mut bar = Bar::new(&runner, std::io::stderr().is_terminal());
    let ending = runner.go(&mut bar);
    bar.finish();
    let ending = ending?;
    let code = finish(asked, runner.run(), directory)?;
    if ending == Ending::Interrupted {
        bail!("interrupted; to go on: egret bench --resume {}", directory.display());
    }
    Ok(code)
}

/// The first signal ends the current cell and writes the results; the second ends the lab immediately, which its
/// servers notice.
fn stop_on_signals(reaper: &Arc<ProcessReaper>) -> Result<()> {
    static SEEN: AtomicBool = AtomicBool::new(false);
    // Of several plans each has its own, and all have one handler.
    static REAPER: Mutex<Weak<ProcessReaper>> = Mutex::new(Weak::new());
    let running = || REAPER.lock().unwrap_or_else(PoisonError::into_inner);
    *running() = Arc::downgrade(reaper);
    let handled = ctrlc::set_handler(move || {
        let reaper = running().upgrade();
        match reaper.filter(|_| !SEEN.swap(true, Ordering::AcqRel)) {
            // What does not end at once is not to keep the second one waiting.
            Some(reaper) => drop(std::thread::spawn(move || reaper.stop())),
            None => std::process::exit(130),
        }
    });
    match handled {
        Ok(()) | Err(ctrlc::Error::MultipleHandlers) => {}
        Err(error) => return Err(error).context("signals"),
    }
    // It came when the plan before had no cell left to end.
    if SEEN.load(Ordering::Acquire) { Err(anyhow::anyhow!("interrupted")) } else { Ok(()) }
}

fn list() -> Result<String> {
    let mut text = String::new();
    for (name, _) in BUILT_IN {
        let plan = Plan::named(name)?;
        let steps = runner::steps(&plan, 0, None);
        let length = minutes(runner::duration(&plan, &steps));
        text += &format!("{name:<12}{}\n", plan.title);
        for line in plan.about.trim().lines().chain(plan.answers.trim().lines()) {
            text += &format!("{:12}{line}\n", "");
        }
        let experiments = plan.experiments.join(", ");
        text += &format!("{:12}{} cells, {length}; reproduces {experiments}\n\n", "", steps.len());
    }
    Ok(text.trim_end().to_owned() + "\n")
}

fn dry_run(plan: &Plan, asked: &Bench) -> String {
    let steps = runner::steps(plan, asked.seed.unwrap_or(0), asked.only.as_deref());
    let mut text = String::new();
    let mut cells: Vec<_> = steps.iter().filter(|step| step.id.repetition == 0).collect();
    cells.sort_by_key(|step| (step.load, step.id.point, step.subject, step.id.subject.clone()));
    for step in cells {
        let point = step.share.map_or(String::new(), |share| format!(", {:.0}% of the highest peak", share * 100.0));
        let missing = stack::missing(&plan.subjects[step.subject]).map_or(String::new(), |why| format!(" ({why})"));
        text += &format!("{:<32} {}{point}{missing}\n", step.id.load, step.id.subject);
    }
    for line in stack::unnamed_engines(plan) {
        text += &format!("warning: {line}\n");
    }
    let length = minutes(runner::duration(plan, &steps));
    let most = plan.most_repetitions();
    let job_files = plan.loads.iter().any(|load| load.keys.jobfile.is_some());
    let job_files = if job_files { ", and as long as the job files say" } else { "" };
    let more = if most > plan.repetitions { format!("; up to {most} where they decide") } else { String::new() };
    text + &format!(
        "{}: {} cells in {} repetitions, {length}{job_files}{more}\n",
        plan.name,
        steps.len(),
        plan.repetitions
    )
}

fn minutes(length: Duration) -> String {
    match length.as_secs() {
        seconds @ 0..90 => format!("about {seconds} s"),
        seconds => format!("about {} min", seconds.div_ceil(60)),
    }
}

/// Writes the report of the cells so far, prints its path and the verdict, and tells how to end.
fn finish(asked: &Bench, run: &Run, directory: &Path) -> Result<u8> {
    report::write(run, directory).with_context(|| format!("the report in {}", directory.display()))?;
    let analysis = Analysis::new(run);
    if let Some(path) = &asked.junit {
        std::fs::write(path, junit::of_run(&analysis)?).with_context(|| path.display().to_string())?;
    }
    crate::print(&format!("{}\n{}\n", summary(run, directory), analysis.verdict()))?;
    Ok(match asked.check {
        true => analysis.overall().exit_code(),
        false => u8::from(analysis.failed_cells() > 0 || measured_cells(run) == 0),
    })
}

fn measured_cells(run: &Run) -> usize {
    run.cells.iter().filter(|cell| cell.measured().is_some()).count()
}

fn summary(run: &Run, directory: &Path) -> String {
    let count = |what: fn(&Outcome) -> bool| run.cells.iter().filter(|cell| what(&cell.outcome)).count();
    let measured = measured_cells(run);
    let failed = count(|outcome| matches!(outcome, Outcome::Failed { .. }));
    let impossible = count(|outcome| matches!(outcome, Outcome::Impossible { .. }));
    let more = |count: usize, what: &str| if count > 0 { format!(", {count} {what}") } else { String::new() };
    format!(
        "{measured} cells measured{}{}: {}",
        more(failed, "failed"),
        more(impossible, "impossible here"),
        directory.join(report::PAGE).display()
    )
}

fn bring_in(asked: &Bench) -> Result<u8> {
    let run = import::import(&asked.import).map_err(anyhow::Error::msg)?;
    let directory =
        asked.output.clone().unwrap_or_else(|| Path::new(RESULTS).join(dated("import", OffsetDateTime::now_utc())));
    drop(runner::Journal::create(&directory, &run)?);
    finish(asked, &run, &directory)
}

/// `NAME-20260102-030405`.
fn dated(name: &str, now: OffsetDateTime) -> String {
    let ((year, month, day), (hour, minute, second)) = (now.to_calendar_date(), now.to_hms());
    format!("{name}-{year:04}{:02}{day:02}-{hour:02}{minute:02}{second:02}", u8::from(month))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_plan_is_listed_with_its_length() {
        let list = list().unwrap();
        for (name, _) in BUILT_IN {
            assert!(list.lines().any(|line| line.starts_with(name)), "{name}");
        }
        assert!(list.contains("cells, about "));
    }

    #[test]
    fn a_fail_in_one_of_several_plans_is_what_all_end_with() {
        let ends_with = |codes: [u8; 3]| codes.into_iter().fold(0, worse);
        assert_eq!([[1, 2, 0], [2, 1, 0], [0, 2, 1]].map(ends_with), [1; 3]);
        assert_eq!([[0, 0, 0], [2, 0, 0], [0, 2, 0]].map(ends_with), [0, 2, 2]);
    }

    #[test]
    fn a_plan_is_measured_beside_itself_by_its_baseline_or_by_all_of_it() {
        #[derive(clap::Parser)]
        struct Words {
            #[command(flatten)]
            bench: Bench,
        }
        let cells = |words: &[&str]| {
            let asked = <Words as clap::Parser>::parse_from([&["egret"], words].concat()).bench;
            let (plan, _) = plan("polling", &asked).unwrap();
            let policies = plan.subjects.iter().map(|one| format!("{:?}", one.iothread)).collect::<BTreeSet<_>>();
            // fio on the host may be missing.
            let steps = runner::steps(&plan, 0, None);
            (
                steps.iter().filter(|step| step.id.repetition == 0 && step.id.subject != "host").count(),
                policies.len() > 2,
            )
        };
        assert_eq!(cells(&["--aa"]), (2 * 32, false));
        assert_eq!(cells(&["--aa-all"]), (7 * 32 + 7 * 12 + 6, false));
        assert_eq!(cells(&[]), (7 * 32 + 7 * 12 + 6, true));
    }

    #[test]
    fn a_runs_directory_is_named_after_its_plan_and_when_it_began() {
        let began = OffsetDateTime::from_unix_timestamp(951_868_799).unwrap();
        assert_eq!(dated("quick", began), "quick-20000229-235959");
    }

    #[test]
    fn quick_is_done_in_five_minutes() {
        let plan = Plan::named("quick").unwrap();
        let length = runner::duration(&plan, &runner::steps(&plan, 0, None));
        assert!(length < Duration::from_secs(270), "{length:?}");
    }
}
