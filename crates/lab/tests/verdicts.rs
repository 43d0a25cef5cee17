//! Whole runs of the built-in plans on a machine that is made up: what they find, and what they don't.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use egret_lab::analysis::Analysis;
use egret_lab::plan::{Metric, Plan};
use egret_lab::report;
use egret_lab::results::{Cell, FORMAT, Host, Latency, Ledger, Measurement, Operations, Outcome, Run};
use egret_lab::runner::{Step, more_steps, steps};
use egret_lab::statistics::{Overall, Verdict};
use egret_loadgen::random::{Random, mix};

/// The scatter of one measurement, as a share of it.
const NOISE: f64 = 0.03;

fn normal(random: &mut Random) -> f64 {
    (-2.0 * random.unit().ln()).sqrt() * (std::f64::consts::TAU * random.unit()).cos()
}

/// A subject that does a share less than the others under one load.
type Planted = Option<(&'static str, &'static str, f64)>;

fn measure(step: &Step, seed: u64, planted: Planted) -> Cell {
    let id = step.id.clone();
    let name = format!("{id:?}").bytes().fold(seed, |hash, byte| mix(hash ^ u64::from(byte)));
    let mut random = Random::new(name);
    let mut scattered = |value: f64| value * (NOISE * normal(&mut random)).exp();
    let lost = planted.filter(|(load, subject, _)| (*load, *subject) == (id.load.as_str(), id.subject.as_str()));
    let most = scattered(100_000.0 * (1.0 - lost.map_or(0.0, |(_, _, share)| share)));
    // The highest of several peaks is some deviations above their mean, so that the last rates are more than anybody reaches.
    let offered = step.share.map(|share| share * 106_000.0);
    let requests = offered.map_or(most, |offered| offered.min(most)) as u64;
    // As a queue does: the less is left of what could be done the longer it waits.
    let mean = offered.map_or(1e9 / most, |_| 1e9 / (most - requests as f64).max(most / 1000.0));
    let latency = Latency { mean, p99: 3.0 * mean, ..Latency::default() };
    let reads = Some(Operations { requests, bytes: requests * 4096, latency });
    let cpu = Ledger { server: Some(scattered(2000.0 * requests as f64) as u64), ..Ledger::default() };
    let measurement = Measurement { seconds: 1.0, reads, cpu, offered_iops: offered, ..Measurement::default() };
    Cell { id, started: 0, outcome: Outcome::Measured(Box::new(measurement)) }
}

/// Runs a built-in plan as the runner does, with more repetitions where they may decide.
fn run(name: &str, seed: u64, planted: Planted) -> Run {
    run_of(Plan::named(name).expect("a plan"), seed, |step| measure(step, seed, planted))
}

/// Runs any plan, in which each step comes to what `measure` says.
fn run_of(plan: Plan, seed: u64, measure: impl Fn(&Step) -> Cell) -> Run {
    let host = Host::default();
    let (cells, incidents) = (Vec::new(), Vec::new());
    let mut run = Run {
        format: FORMAT,
        plan,
        scale: 1.0,
        seed,
        started: 0,
        only: None,
        peaks: Default::default(),
        job_files: Default::default(),
        ended: Some(1),
        host,
        cells,
        incidents,
    };
    let mut next = steps(&run.plan, seed, None);
    while !next.is_empty() {
        run.cells.extend(next.iter().map(&measure));
        let measured = run.cells.iter().map(|cell| cell.id.repetition + 1).max().unwrap_or(0);
        next = more_steps(&run, measured);
    }
    run
}

#[test]
fn plans_of_things_that_are_alike_do_not_fail() {
    for (name, runs) in [("quick", 20), ("modes", 20), ("curve", 20), ("polling", 2)] {
        for seed in 0..runs {
            let run = run(name, seed, None);
            let analysis = Analysis::new(&run);
            assert_ne!(analysis.overall(), Overall::Fail, "{name}, {seed}: {}", analysis.verdict());
        }
    }
}

#[test]
fn what_is_slower_is_no_fail_where_one_asks_which_to_choose() {
    let mut run = run("quick", 1, Some(("randread 4k QD64", "egret, threads", 0.5)));
    let analysis = Analysis::new(&run);
    assert!(analysis.verdict().starts_with("they differ: beside egret, io_uring, "), "{}", analysis.verdict());
    assert_eq!(analysis.overall().exit_code(), 1);
    let place = tempfile::tempdir().unwrap();
    report::write(&run, place.path()).unwrap();
    let text = std::fs::read_to_string(place.path().join("report.md")).unwrap();
    assert!(text.contains("| slower |") && !text.contains("fail"), "{text}");

    run.cells[0].outcome = Outcome::Failed { reason: "it crashed".into(), log: Vec::new() };
    assert!(Analysis::new(&run).verdict().starts_with("fail: "), "what crashes is one");
}

#[test]
fn a_planted_slowdown_is_found_and_only_what_is_open_is_measured_more() {
    let load = "randwrite 8k QD8 8 jobs";
    for seed in 0..2 {
        let run = run("polling", seed, Some((load, "low-regret, 2 I/O threads", 0.078)));
        let analysis = Analysis::new(&run);
        let failed: Vec<_> = analysis.judged.iter().filter(|one| one.decision == Ok(Verdict::Fail)).collect();
        let names: Vec<_> = failed.iter().map(|one| (one.load.as_str(), one.subject.as_str(), one.metric)).collect();
        assert_eq!(names, [(load, "low-regret, 2 I/O threads", Metric::Iops)], "{seed}: {}", analysis.verdict());
        let all = steps(&run.plan, seed, None).len() * 12 / 5;
        assert!(run.cells.len() < all, "{} of {all} cells", run.cells.len());
    }
}

#[test]
fn a_comparison_that_is_decided_keeps_its_verdict_when_others_are_measured_more() {
    let run = run("modes", 1, Some(("randread 4k QD1", "threads", 0.3)));
    let early = Run { cells: run.cells.iter().filter(|cell| cell.id.repetition < 5).cloned().collect(), ..run.clone() };
    let (early, late) = (Analysis::new(&early), Analysis::new(&run));
    for (before, after) in early.judged.iter().zip(&late.judged) {
        if matches!(before.decision, Ok(Verdict::Pass | Verdict::Fail)) {
            assert_eq!(before.decision, after.decision, "{} {}", before.load, before.subject);
        }
    }
    assert!(early.judged.iter().any(|one| one.decision == Ok(Verdict::Fail)));
}

/// What `scripts/planted` says of two runs of its plan in which these subjects are half as fast as the others, and whether it is
/// content.
fn planted(slow: &[&str]) -> (String, bool) {
    let place = tempfile::tempdir().unwrap();
    let lab = place.path().join("lab");
    let planted = |script: &str| {
        fs::write(&lab, script).unwrap();
        fs::set_permissions(&lab, Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/planted"));
        let output = command.arg("2").arg(place.path()).env("EGRET", &lab).output().unwrap();
        (String::from_utf8(output.stderr).unwrap(), output.status.success())
    };
    // It writes its plan, and then calls the lab.
    planted("#!/bin/sh\nexit 1\n");
    let plan = place.path().join("planted.toml");
    for seed in [1, 2] {
        let run = run_of(Plan::named(plan.to_str().unwrap()).unwrap(), seed, |step| {
            let mut cell = measure(step, seed, None);
            if let Outcome::Measured(measured) = &mut cell.outcome
                && slow.contains(&cell.id.subject.as_str())
            {
                measured.seconds *= 2.0;
            }
            cell
        });
        let results = place.path().join(seed.to_string());
        fs::create_dir(&results).unwrap();
        report::write(&run, &results).unwrap();
    }
    planted("#!/bin/sh\necho a verdict\n")
}

#[test]
fn planted_losses_are_counted_and_so_is_what_is_found_where_nothing_is() {
    let losses = ["5 % slower", "7.8 % slower"];
    let (said, is_content) = planted(&losses);
    assert!(said.contains("5 % found in 4 of 4 cases, 7.8 % in 4; 0 found where nothing is"), "{said}");
    assert!(is_content);
    let (said, is_content) = planted(&[&losses[..], &["0 % slower"]].concat());
    assert!(said.contains("5 % found in 4 of 4 cases, 7.8 % in 4; 4 found where nothing is"), "{said}");
    assert!(!is_content);
}
