use super::*;
use crate::plan::Metric;
use crate::results::{
    Bottleneck, Cell, CellId, Component, Host, Latency, Ledger, Measurement, Operations, Outcome, Symbol,
};
use crate::statistics::{Overall, Verdict};

const PLAN: &str = r#"
name = "two"
title = "?"
[disk]
type = "null"
[[subject]]
name = "egret"
stack = "egret"
[[load]]
iodepth = [1, 64]
"#;

/// A run in which `egret` does so many requests per second, and a hundredth more in each repetition than in the one before.
fn run(iops: f64) -> Run {
    let mut host = Host { kernel: "6.12".into(), ..Host::default() };
    host.components = vec![Component { name: "egret".into(), version: "1".into(), ..Component::default() }];
    let cell = |load: &str, repetition: u32| {
        let requests = (iops * (1.0 + f64::from(repetition) / 100.0)) as u64;
        let operations = Operations { requests, bytes: requests * 4096, latency: Latency::default() };
        let cpu = Ledger { server: Some(requests * 2000), ..Ledger::default() };
        let id = CellId { load: load.into(), subject: "egret".into(), repetition, point: 0 };
        let measurement = Measurement { seconds: 1.0, reads: Some(operations), cpu, ..Measurement::default() };
        Cell { id, started: 0, outcome: Outcome::Measured(Box::new(measurement)) }
    };
    let cells = ["randread 4k QD1", "randread 4k QD64"].iter().flat_map(|load| (0..5).map(|n| cell(load, n))).collect();
    Run { ended: Some(1), host, cells, ..Run::of(PLAN) }
}

fn each_measurement(run: &mut Run, change: impl Fn(&mut Measurement)) {
    for cell in &mut run.cells {
        if let Outcome::Measured(measurement) = &mut cell.outcome {
            change(measurement);
        }
    }
}

fn overall(a: &Run, b: &Run) -> Overall {
    Comparison::of(&[a], &[b], None).overall(false)
}

#[test]
fn a_run_beside_itself_passes() {
    assert_eq!(overall(&run(1e5), &run(1e5)), Overall::Pass);
}

#[test]
fn a_run_that_lost_a_third_fails_and_one_that_gained_it_passes() {
    assert_eq!(overall(&run(1e5), &run(0.67e5)), Overall::Fail);
    assert_eq!(overall(&run(0.67e5), &run(1e5)), Overall::Pass);
}

#[test]
fn a_loss_within_the_noise_cannot_be_told() {
    assert_eq!(overall(&run(1e5), &run(0.95e5)), Overall::CantTell);
}

#[test]
fn one_repetition_decides_nothing() {
    let (mut a, mut b) = (run(1e5), run(0.67e5));
    for run in [&mut a, &mut b] {
        run.cells.retain(|cell| cell.id.repetition == 0);
    }
    assert_eq!(overall(&a, &b), Overall::CantTell);
}

#[test]
fn more_cpu_for_each_request_is_a_loss_too() {
    let mut dearer = run(1e5);
    each_measurement(&mut dearer, |measurement| measurement.cpu.server = measurement.cpu.server.map(|ns| 2 * ns));
    assert_eq!(overall(&run(1e5), &dearer), Overall::Fail);
}

#[test]
fn another_kernel_may_be_what_is_compared_and_another_kernel_with_another_program_may_not() {
    let mut newer = run(1e5);
    newer.host.kernel = "6.18".into();
    assert_eq!(overall(&run(1e5), &newer), Overall::Pass);
    newer.host.components[0].version = "2".into();
    let comparison = Comparison::of(&[&run(1e5)], &[&newer], None);
    assert_eq!(comparison.overall(false), Overall::NotComparable);
    assert_eq!(comparison.overall(true), Overall::Pass);
    assert!(comparison.objections[0].contains("both the kernel and programs (egret) differ"));
}

#[test]
fn another_cpu_or_another_load_cannot_be_compared() {
    let mut other = run(1e5);
    other.host.cpu.model = "another".into();
    assert_eq!(overall(&run(1e5), &other), Overall::NotComparable);
    let mut other = run(1e5);
    other.plan.loads.change(|loads| loads[0].norandommap = false);
    assert_eq!(overall(&run(1e5), &other), Overall::NotComparable);
}

#[test]
fn settings_that_move_figures_have_to_be_the_same_where_both_runs_know_them() {
    let with = |halt_poll_ns: &str| {
        let mut run = run(1e5);
        run.host.settings = vec![("halt_poll_ns".into(), halt_poll_ns.into()), ("turbo".into(), "on".into())];
        run
    };
    assert_eq!(overall(&with("200000"), &with("200000")), Overall::Pass);
    assert_eq!(overall(&run(1e5), &with("0")), Overall::Pass, "an older run did not look");
    let comparison = Comparison::of(&[&with("200000")], &[&with("0")], None);
    assert_eq!(comparison.objections, ["settings: halt_poll_ns 200000 against halt_poll_ns 0"]);
}

#[test]
fn runs_of_one_side_have_to_be_alike_among_themselves() {
    let mut other = run(1e5);
    other.host.components[0].version = "2".into();
    let comparison = Comparison::of(&[&run(1e5), &run(1e5)], &[&run(1e5), &other], None);
    assert_eq!(comparison.overall(false), Overall::NotComparable);
    assert_eq!(comparison.objections, ["the second runs differ among themselves: egret"]);
}

#[test]
fn runs_without_a_cell_in_common_cannot_be_compared_and_say_what_each_has() {
    let mut other = run(1e5);
    other.cells.iter_mut().for_each(|cell| cell.id.subject = "another".into());
    let comparison = Comparison::of(&[&run(1e5)], &[&other], None);
    assert_eq!(comparison.overall(true), Overall::NotComparable);
    let text = comparison.text();
    assert!(text.contains("can't tell: missing from the second run"), "{text}");
    assert!(text.contains("measured in the second run alone: another, randread 4k QD1"), "{text}");
}

fn iops(comparison: &Comparison) -> Vec<Result<Verdict, String>> {
    let rows = comparison.rows.iter().filter(|row| row.metric == crate::plan::Metric::Iops);
    rows.map(|row| row.decision.clone()).collect()
}

#[test]
fn what_the_load_or_the_disk_limited_on_both_sides_decides_nothing() {
    for limit in [Bottleneck::Load("its core is full".into()), Bottleneck::Device("as fast as the host".into())] {
        let [a, b] = [1e5, 0.67e5].map(|iops| {
            let mut run = run(iops);
            each_measurement(&mut run, |measurement| measurement.limit = Some(limit.clone()));
            run
        });
        let comparison = Comparison::of(&[&a], &[&b], None);
        let iops = iops(&comparison);
        assert!(iops.len() == 2 && iops.iter().all(Result::is_err), "{}", comparison.text());
    }
}

#[test]
fn a_bound_that_one_side_or_one_repetition_was_at_hides_no_regression() {
    for limit in [Bottleneck::Load("its core is full".into()), Bottleneck::Device("as fast as the host".into())] {
        for (bound, repetitions) in [("a", 0..5), ("b", 0..5), ("both", 0..1)] {
            let [a, b] = [("a", 1e5), ("b", 0.67e5)].map(|(side, iops)| {
                let mut run = run(iops);
                for cell in run.cells.iter_mut().filter(|cell| repetitions.contains(&cell.id.repetition)) {
                    if let (Outcome::Measured(measurement), true) = (&mut cell.outcome, [side, "both"].contains(&bound))
                    {
                        measurement.limit = Some(limit.clone());
                    }
                }
                run
            });
            let comparison = Comparison::of(&[&a], &[&b], None);
            assert_eq!(iops(&comparison), vec![Ok(Verdict::Fail); 2], "{bound}: {}", comparison.text());
        }
    }
}

#[test]
fn a_baseline_that_the_load_held_back_passes_nothing() {
    let mut a = run(1e5);
    each_measurement(&mut a, |measurement| measurement.limit = Some(Bottleneck::Load("its core is full".into())));
    let comparison = Comparison::of(&[&a], &[&run(1e5)], None);
    assert_eq!(comparison.overall(false), Overall::CantTell);
    assert!(comparison.text().contains("can't tell: the baseline is load-bound: its core is full"));
}

/// Lets the first so many repetitions under one load fail.
fn fail(run: &mut Run, repetitions: u32) {
    let here = run.cells.iter_mut().filter(|cell| cell.id.load.ends_with("QD64"));
    for cell in here.filter(|cell| cell.id.repetition < repetitions) {
        cell.outcome = Outcome::Failed { reason: "the server ended with signal 11".into(), log: Vec::new() };
    }
}

#[test]
fn a_build_that_crashes_fails_however_fast_the_rest_of_it_is() {
    for repetitions in [1, 5] {
        let mut b = run(1e5);
        fail(&mut b, repetitions);
        let comparison = Comparison::of(&[&run(1e5)], &[&b], None);
        assert_eq!(comparison.overall(false), Overall::Fail);
        let said = format!("failed in {repetitions} of 5 repetitions: the server ended with signal 11");
        assert!(comparison.text().contains(&format!("FAIL: {said}")), "{}", comparison.text());
        let xml = comparison.junit(false).unwrap();
        assert!(xml.contains(r#"failures="1""#) && xml.contains(&said), "{xml}");
    }
}

#[test]
fn what_crashed_before_is_no_regression_and_no_pass() {
    let [mut a, mut b] = [run(1e5), run(1e5)];
    [&mut a, &mut b].into_iter().for_each(|run| fail(run, 1));
    assert_eq!(overall(&a, &b), Overall::CantTell);
    assert_eq!(overall(&a, &run(1e5)), Overall::Pass, "what is mended is no loss");
}

#[test]
fn cells_that_are_missing_are_named_and_no_pass() {
    let mut b = run(1e5);
    b.cells.retain(|cell| !cell.id.load.ends_with("QD64"));
    let comparison = Comparison::of(&[&run(1e5)], &[&b], None);
    assert_eq!(comparison.overall(false), Overall::CantTell);
    assert!(comparison.text().contains("can't tell: missing from the second run"), "{}", comparison.text());
    assert!(comparison.junit(false).unwrap().contains("missing from the second run"));
}

#[test]
fn of_one_run_each_it_says_that_nobody_knows_how_far_runs_lie_apart() {
    let said = "one run each: what differs from one boot";
    let (a, b) = (run(1e5), run(1e5));
    assert!(Comparison::of(&[&a], &[&b], None).text().contains(said));
    assert!(!Comparison::of(&[&a, &a], &[&b, &b], None).text().contains(said));
}

#[test]
fn several_runs_show_how_far_runs_of_one_thing_lie_apart() {
    let side = |rates: [f64; 3]| rates.map(run);
    let of = |a: &[Run; 3], b: &[Run; 3]| {
        let [a, b] = [a, b].map(|runs| runs.iter().collect::<Vec<_>>());
        Comparison::of(&a, &b, None)
    };
    // Within each run all is steady, and one boot is 10 % faster than another: only runs can tell that.
    let (a, slower) = (side([1.0e5, 1.1e5, 1.0e5]), side([0.99e5, 0.92e5, 1.0e5]));
    assert!(!iops(&of(&a, &slower)).contains(&Ok(Verdict::Fail)));
    assert!(iops(&Comparison::of(&[&a[1]], &[&slower[1]], None)).contains(&Ok(Verdict::Fail)));
    let (a, slower) = (side([1.0e5, 1.001e5, 1.002e5]), side([0.9e5, 0.901e5, 0.902e5]));
    let comparison = of(&a, &slower);
    assert_eq!(iops(&comparison), vec![Ok(Verdict::Fail); 2], "{}", comparison.text());
    assert_eq!(comparison.rows[0].ratio.map(|ratio| ratio.pairs), Some(3), "runs, and not repetitions");
}

#[test]
fn symbols_that_moved_are_listed_the_farthest_first() {
    let with = |samples: u64, shares: [(&str, f64); 2]| {
        let mut run = run(1e5);
        let symbols = shares.map(|(name, percent)| Symbol { name: name.into(), comm: "fio".into(), percent });
        each_measurement(&mut run, |measurement| {
            (measurement.samples, measurement.symbols) = (samples, symbols.to_vec());
        });
        run
    };
    let beside = |samples: u64| {
        let a = with(samples, [("cpupri_set", 2.41), ("sbitmap_find_bit", 0.75)]);
        let b = with(samples, [("cpupri_set", 0.35), ("sbitmap_find_bit", 0.39)]);
        Comparison::of(&[&a], &[&b], None)
    };
    let comparison = beside(100_000);
    let names: Vec<_> =
        comparison.symbols.moved.iter().map(|moved| (moved.symbol.as_str(), moved.load.as_str())).collect();
    assert_eq!(names[0].0, "cpupri_set");
    assert_eq!(names.len(), 4);
    let text = comparison.text();
    assert!(text.contains("cpupri_set: 2.41 % -> 0.35 % of samples, -2.06 [-2.1"), "{text}");
    assert!(text.contains(", in fio)") && text.contains("of a symbol with 1 % of them a move by 0.06 % can"), "{text}");

    // Of so few samples the larger move is sure, and the other one may be chance.
    let few = beside(1000);
    assert_eq!(few.symbols.moved.iter().filter(|moved| moved.symbol == "sbitmap_find_bit").count(), 0);
    assert!(few.symbols.moved.iter().any(|moved| moved.symbol == "cpupri_set"));
}

#[test]
fn a_ci_reads_a_test_for_each_row_that_decides() {
    let xml = Comparison::of(&[&run(1e5)], &[&run(0.67e5)], None).junit(false).unwrap();
    assert!(xml.contains(r#"tests="4" "#) && xml.contains(r#"failures="2""#), "{xml}");
    assert!(xml.contains("IOPS 102\u{202f}000 -&gt; 68\u{202f}340 IOPS"), "{xml}");
    let mut other = run(1e5);
    other.host.cpu.model = "another".into();
    let xml = Comparison::of(&[&run(1e5)], &[&other], None).junit(false).unwrap();
    assert!(xml.contains(r#"errors="1""#), "{xml}");
}

#[test]
fn what_fio_on_the_host_spends_itself_is_compared_and_what_a_servers_load_spends_is_not() {
    let spending = |each: u64, server: Option<u64>| {
        let mut run = run(1e5);
        each_measurement(&mut run, |measured| {
            measured.cpu = Ledger { load: Some(each * measured.requests()), server, ..Ledger::default() };
        });
        run
    };
    let rows = |server| {
        let comparison = Comparison::of(&[&spending(1000, server)], &[&spending(2000, server)], None);
        comparison
            .rows
            .into_iter()
            .filter(|row| row.metric == Metric::LoadCpu)
            .map(|row| row.decision)
            .collect::<Vec<_>>()
    };
    assert!(!rows(None).is_empty() && rows(None).iter().all(|decision| *decision == Ok(Verdict::Fail)));
    assert_eq!(rows(Some(1)), []);
}
