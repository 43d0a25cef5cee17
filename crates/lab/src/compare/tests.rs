use super::*;
use crate::plan::Plan;
use crate::results::{
    Bottleneck, Cell, CellId, Component, Host, Latency, Ledger, Measurement, Operations, Outcome, Symbol,
};

fn plan() -> Plan {
    let text = r#"
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
    toml::from_str(text).expect("a plan")
}

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
    let (format, incidents) = (crate::results::FORMAT, Vec::new());
    Run { format, plan: plan(), scale: 1.0, seed: 1, started: 0, only: None, ended: Some(1), host, cells, incidents }
}

fn each_measurement(run: &mut Run, change: impl Fn(&mut Measurement)) {
    for cell in &mut run.cells {
        if let Outcome::Measured(measurement) = &mut cell.outcome {
            change(measurement);
        }
    }
}

fn overall(a: &Run, b: &Run) -> Overall {
    Comparison::of(a, b, None).overall(false)
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
    let comparison = Comparison::of(&run(1e5), &newer, None);
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
fn runs_without_a_cell_in_common_cannot_be_compared_and_say_what_each_has() {
    let mut other = run(1e5);
    other.cells.iter_mut().for_each(|cell| cell.id.subject = "another".into());
    let comparison = Comparison::of(&run(1e5), &other, None);
    assert_eq!(comparison.overall(true), Overall::NotComparable);
    assert!(comparison.text().contains("measured in the first run alone: egret, randread 4k QD1"));
}

#[test]
fn what_the_load_or_the_disk_limited_decides_nothing() {
    for limit in [Bottleneck::Load("its core is full".into()), Bottleneck::Device("as fast as the host".into())] {
        let mut slower = run(0.67e5);
        each_measurement(&mut slower, |measurement| measurement.limit = Some(limit.clone()));
        let comparison = Comparison::of(&run(1e5), &slower, None);
        let iops = comparison.rows.iter().filter(|row| row.metric == crate::plan::Metric::Iops);
        assert!(iops.clone().count() == 2 && iops.clone().all(|row| row.verdict().is_none()), "{}", comparison.text());
    }
}

#[test]
fn symbols_that_moved_are_listed_the_farthest_first() {
    let with = |shares: [(&str, f64); 2]| {
        let mut run = run(1e5);
        let symbols = shares.map(|(name, percent)| Symbol { name: name.into(), percent });
        each_measurement(&mut run, |measurement| measurement.symbols = symbols.to_vec());
        run
    };
    let comparison = Comparison::of(
        &with([("cpupri_set", 2.41), ("sbitmap_find_bit", 0.75)]),
        &with([("cpupri_set", 0.35), ("sbitmap_find_bit", 0.39)]),
        None,
    );
    let names: Vec<_> = comparison.symbols.iter().map(|moved| (moved.symbol.as_str(), moved.load.as_str())).collect();
    assert_eq!(names[0].0, "cpupri_set");
    assert_eq!(names.len(), 4);
    assert!(comparison.text().contains("cpupri_set: 2.41 % -> 0.35 % of samples"));
}

#[test]
fn a_ci_reads_a_test_for_each_row_that_decides() {
    let xml = Comparison::of(&run(1e5), &run(0.67e5), None).junit(false).unwrap();
    assert!(xml.contains(r#"tests="4" "#) && xml.contains(r#"failures="2""#), "{xml}");
    assert!(xml.contains("IOPS 102\u{202f}000 -&gt; 68\u{202f}340 IOPS"), "{xml}");
    let mut other = run(1e5);
    other.host.cpu.model = "another".into();
    let xml = Comparison::of(&run(1e5), &other, None).junit(false).unwrap();
    assert!(xml.contains(r#"errors="1""#), "{xml}");
}
