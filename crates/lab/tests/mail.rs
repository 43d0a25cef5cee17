//! What `egret report --mail` prints of a run whose truth is known.

use std::fs;

use egret_lab::analysis::Analysis;
use egret_lab::plan::Plan;
use egret_lab::report;
use egret_lab::results::{Cell, CellId, FORMAT, Host, Latency, Ledger, Measurement, Operations, Outcome, Run};

/// Two lines over one and two I/O threads, under two patterns with one and four jobs.
fn plan() -> Plan {
    let mut text = String::from(
        "name = 'p'\ntitle = 'Before and after'\nrepetitions = 2\nnoise-floor = false\n[disk]\ntype = 'null'\n",
    );
    for (line, iothreads) in [("before", 1), ("before", 2), ("after", 1), ("after", 2)] {
        text += &format!(
            "[[subject]]\nname = '{line} {iothreads}'\nline = '{line}'\nat = {iothreads}\niothreads = {iothreads}\nstack = 'egret'\n"
        );
    }
    text += "[[load]]\nrw = ['randread', 'randwrite']\nbs = '8k'\niodepth = 8\nnumjobs = [1, 4]\n";
    toml::from_str(&(text + "[[chart]]\nid = 'S0'\ntitle = 'IOPS'\nmetric = 'iops'\npublished = 's0_iops'\n")).unwrap()
}

/// What came after loses 10 % of random reads with one job, and takes half of the CPU.
fn run() -> Run {
    let plan = plan();
    let mut cells = Vec::new();
    for load in plan.loads.iter() {
        for (subject, repetition) in plan.subjects.iter().flat_map(|subject| [(subject, 0), (subject, 1)]) {
            let is_after = subject.name.starts_with("after");
            let loses = is_after && load.rw == "randread" && load.numjobs == 1;
            let requests = if loses { 9000 } else { 10_000 };
            let cpu = if is_after { 250_000_000 } else { 500_000_000 };
            let operations =
                Operations { requests, bytes: requests * 8192, latency: Latency { mean: 1.0, ..Latency::default() } };
            let cpu = Ledger { io_thread_work: Some(cpu), guest: Some(9 * cpu), ..Ledger::default() };
            let measured = Measurement { seconds: 1.0, reads: Some(operations), cpu, ..Measurement::default() };
            let id = CellId { load: load.name.clone(), subject: subject.name.clone(), repetition, point: 0 };
            cells.push(Cell { id, started: 0, outcome: Outcome::Measured(Box::new(measured)) });
        }
    }
    let host = Host::default();
    Run {
        format: FORMAT,
        plan,
        scale: 1.0,
        seed: 1,
        only: None,
        peaks: Default::default(),
        job_files: Default::default(),
        started: 0,
        ended: Some(1),
        host,
        cells,
        incidents: Vec::new(),
    }
}

/// The words of the lines of a text that begin with `first`.
fn rows<'a>(text: &'a str, first: &str) -> Vec<Vec<&'a str>> {
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    lines.filter(|words| words.starts_with(&first.split(' ').collect::<Vec<_>>())).collect()
}

#[test]
fn a_mail_has_every_cell_before_and_after_beside_the_published_one() {
    let run = run();
    let text = report::mail(&Analysis::new(&run)).unwrap();
    let lost = rows(&text, "randread 8k 1 1");
    let [lost] = lost.as_slice() else { panic!("{text}") };
    assert_eq!(lost[4..6], ["10000", "-10.0"], "{text}");
    assert!(lost.ends_with(&["50.0", "25.0", "163417", "-7.8"]), "a thread's own CPU, and theirs: {text}");
    let kept = rows(&text, "randwrite 8k 4 2");
    let [kept] = kept.as_slice() else { panic!("{text}") };
    assert_eq!(kept[4..6], ["10000", "+0.0"]);
    assert!(kept.ends_with(&["25.0", "12.5", "247075", "-5.1"]), "two threads share it: {text}");
}

#[test]
fn a_mail_has_averages_over_jobs_and_their_range_over_patterns() {
    let run = run();
    let text = report::mail(&Analysis::new(&run)).unwrap();
    // The root of 0.9 for random reads, nothing lost for random writes, and the mean of both.
    assert_eq!(
        rows(&text, "1 8k"),
        [["1", "8k", "-2.6", "-5.1", "..", "+0.0", "-50.0", "-50.0", "..", "-50.0"]],
        "{text}"
    );
    assert_eq!(rows(&text, "2 25.00"), [["2", "25.00", "12.50", "78.43", "66.13"]], "{text}");
}

#[test]
fn a_mail_has_what_failed_and_says_that_averages_are_without_it() {
    let mut run = run();
    let fails = |cell: &&mut Cell| cell.id.subject == "after 1" && cell.id.load.starts_with("randread 8k QD8 4 jobs");
    let mut failed = 0;
    for cell in run.cells.iter_mut().filter(fails) {
        cell.outcome = Outcome::Failed { reason: "it crashed".into(), log: Vec::new() };
        failed += 1;
    }
    assert_eq!(failed, 2);
    let text = report::mail(&Analysis::new(&run)).unwrap();
    let row = rows(&text, "randread 8k 4 1");
    let [row] = row.as_slice() else { panic!("{text}") };
    assert_eq!(row[4..6], ["10000", "failed"], "{text}");
    assert!(text.contains("after 1 failed in 2 of 2 repetitions: it crashed"), "{text}");
    for first in ["1 8k", "1 50.00"] {
        let average = rows(&text, first);
        let [average] = average.as_slice() else { panic!("{text}") };
        assert!(average.ends_with(&["incomplete:", "3", "of", "4", "cells"]), "{text}");
    }
    assert_eq!(text.matches("incomplete").count(), 2, "{text}");
}

#[test]
fn a_run_without_lines_makes_no_mail_and_says_what_would() {
    let mut run = run();
    run.plan.subjects.iter_mut().for_each(|subject| subject.line = None);
    let error = report::mail(&Analysis::new(&run)).unwrap_err();
    assert!(error.contains("see 'line' in docs/lab.md"), "{error}");
}

#[test]
fn beside_a_published_change_is_what_the_others_differ_from_the_baseline_s_line() {
    let mut run = run();
    // As in the plan polling, where the baseline has a name that the weights' line begins like, and need not be the first.
    run.plan.baseline = Some("weighted 1".into());
    for subject in &mut run.plan.subjects {
        let rename = |name: &str| name.replace("after", "weighted");
        subject.line = subject.line.as_deref().map(rename);
        subject.name = rename(&subject.name);
    }
    run.cells.iter_mut().for_each(|cell| cell.id.subject = cell.id.subject.replace("after", "weighted"));
    let directory = tempfile::tempdir().unwrap();
    report::write(&run, directory.path()).unwrap();
    let text = fs::read_to_string(directory.path().join("report.md")).unwrap();
    assert!(text.contains("| Here: weighted, IOPS | Here: before, difference to weighted |"), "{text}");
    let row = text.lines().find(|line| line.starts_with("| randread | 8k | 1 | 1 | 163417 | -7.8 |"));
    assert!(row.is_some_and(|row| row.contains("| 9\u{202f}000 | +11.1\u{a0}%")), "{row:?}");
}

#[test]
fn a_mail_has_each_line_once_in_whatever_order_its_subjects_are() {
    let mut run = run();
    run.plan.subjects.swap(1, 2);
    let text = report::mail(&Analysis::new(&run)).unwrap();
    assert_eq!(text.matches("after, with before before it").count(), 1, "{text}");
    assert!(!text.contains("before, with"), "{text}");
}
