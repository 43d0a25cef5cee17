mod symbols;

use super::*;
use crate::plan::Metric;
use crate::results::{
    BlockDevice, Bottleneck, Cell, CellId, Component, Host, Incident, Latency, Ledger, Measurement, Operations, Outcome,
};
use crate::statistics::{Overall, Verdict, deviation};

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

/// As good a run, made a moment later.
fn another(run: &Run) -> Run {
    Run { started: run.started + 1, ..run.clone() }
}

fn overall(a: &Run, b: &Run) -> Overall {
    let comparison = Comparison::of(&[a], &[b], None);
    agreed(&comparison, false)
}

/// What it comes to, which is what a CI reads.
fn agreed(comparison: &Comparison, force: bool) -> Overall {
    let overall = comparison.overall(force);
    let xml = comparison.junit(force).unwrap();
    let suite = xml.lines().find(|line| line.contains("<testsuite ")).unwrap();
    let [tests, skipped, errors, failures] = ["tests", "disabled", "errors", "failures"].map(|of| {
        let text = suite.split(&format!(" {of}=\"")).nth(1).unwrap();
        text.split('"').next().unwrap().parse::<usize>().unwrap()
    });
    let read = match () {
        () if errors > 0 => Overall::NotComparable,
        () if failures > 0 => Overall::Fail,
        () if skipped > 0 || tests == 0 => Overall::CantTell,
        () => Overall::Pass,
    };
    assert_eq!(read, overall, "{xml}");
    let cases: Vec<_> = xml.lines().filter(|line| line.contains("<testcase ")).collect();
    let distinct: std::collections::BTreeSet<_> = cases.iter().collect();
    assert_eq!(distinct.len(), cases.len(), "two tests of one name are one to a CI: {xml}");
    overall
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

/// A run on two processors beside others who used so many percent of them.
fn disturbed(mut run: Run, percent: u64) -> Run {
    run.host.cpu.usable = vec![0, 1];
    each_measurement(&mut run, |one| one.cpu.host_busy = Some(one.cpu.server.unwrap() + 2 * percent * 10_000_000));
    run
}

#[test]
fn what_was_lost_beside_other_work_cannot_be_told_of_one_run_each_and_can_of_several() {
    for (before, after, of_one, of_several) in [
        (0, 0, Overall::Fail, Overall::Fail),
        (5, 5, Overall::Fail, Overall::Fail),
        (6, 0, Overall::CantTell, Overall::Fail),
        (0, 6, Overall::CantTell, Overall::CantTell),
        (6, 6, Overall::CantTell, Overall::Fail),
    ] {
        let (a, b) = (disturbed(run(1e5), before), disturbed(run(0.67e5), after));
        let comparison = Comparison::of(&[&a], &[&b], None);
        assert_eq!(comparison.overall(false), of_one, "{before} {after}");
        let said = if before > 0 { "others used 6 % of the machine in the first run" } else { "in the second run" };
        let notes = || comparison.rows.iter().filter_map(|row| row.note.as_deref());
        assert_eq!(notes().any(|note| note.ends_with(said)), of_one == Overall::CantTell, "{before} {after}");
        let [more_a, more_b] = [&a, &b].map(another);
        // Where others were in all runs of the second side and in none of the first, chance has not put them there.
        assert_eq!(Comparison::of(&[&a, &more_a], &[&b, &more_b], None).overall(false), of_several, "{before} {after}");
    }
}

#[test]
fn what_others_used_is_a_share_of_all_processors_also_of_those_that_the_lab_may_not_use() {
    let of_eight = |mut run: Run| {
        run.host.cpu.online = 8;
        run
    };
    let (a, b) = (disturbed(run(1e5), 6), disturbed(run(0.67e5), 0));
    assert_eq!(Comparison::of(&[&a], &[&b], None).overall(false), Overall::CantTell);
    assert_eq!(Comparison::of(&[&of_eight(a)], &[&of_eight(b)], None).overall(false), Overall::Fail);
}

#[test]
fn what_is_slower_does_not_pass_beside_a_first_run_that_others_disturbed() {
    for (before, after, of_one, of_several) in [
        (5, 5, Overall::Pass, Overall::Pass),
        (0, 6, Overall::Pass, Overall::Pass),
        (6, 0, Overall::CantTell, Overall::CantTell),
        (6, 6, Overall::CantTell, Overall::Pass),
    ] {
        // It does 100k by itself.
        let (a, b) = (disturbed(run(0.7e5), before), disturbed(run(0.8e5), after));
        let comparison = Comparison::of(&[&a], &[&b], None);
        assert_eq!(comparison.overall(false), of_one, "{before} {after}");
        let said = "can't tell: others used 6 % of the machine in the first run";
        assert_eq!(comparison.text().contains(said), of_one == Overall::CantTell, "{}", comparison.text());
        let [more_a, more_b] = [&a, &b].map(another);
        assert_eq!(Comparison::of(&[&a, &more_a], &[&b, &more_b], None).overall(false), of_several, "{before} {after}");
    }
    // Time that a hypervisor took away is others' work too.
    let mut a = disturbed(run(0.7e5), 0);
    each_measurement(&mut a, |one| one.cpu.stolen = Some(120_000_000));
    assert_eq!(overall(&a, &disturbed(run(0.8e5), 0)), Overall::CantTell);
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

/// Each change of a run, by what it is told as, and what that means.
#[test]
fn what_makes_figures_move_is_an_objection_and_what_does_not_is_told_at_most() {
    use likeness::{Role, differences};
    let component = |name: &str, version: &str, sha256: &str| Component {
        name: name.into(),
        path: format!("/usr/bin/{name}"),
        version: version.into(),
        sha256: sha256.into(),
    };
    let mut base = run(1e5);
    let host = &mut base.host;
    (host.memory, host.kernel_options) = (100, "quiet root=/dev/vda".into());
    host.components = ["egret", "qemu-storage-daemon", "fio", "/opt/qemu-system-x86_64", "rbd"]
        .map(|name| component(name, "1", "a"))
        .into();
    host.started = vec![component("spdk", "", "a")];
    host.disk = Some(BlockDevice { size: Some(1 << 40), ..BlockDevice::default() });
    host.settings = vec![("turbo".into(), "on".into())];
    type Change = fn(&mut Run);
    base.plan.subjects[0].qemu = Some("/opt/qemu-system-x86_64".into());
    base.plan.loads.change(|loads| {
        (loads[0].name, loads[0].jobfile) = (Some("of a file".into()), Some("/plans/load.fio".into()));
        loads[0].iodepth = crate::plan::OneOrMany::One(1);
    });
    base.job_files.insert(base.plan.loads[0].name.clone(), "a".into());
    let changes: [(&str, Role, Change); 40] = [
        ("host", Role::Told, |run| run.host.name = "other".into()),
        ("kernel", Role::Compared, |run| run.host.kernel = "6.18".into()),
        ("kernel options", Role::Unlike, |run| run.host.kernel_options = "quiet mitigations=off".into()),
        ("CPU", Role::Unlike, |run| run.host.cpu.model = "other".into()),
        ("usable CPUs", Role::Unlike, |run| run.host.cpu.usable.push(1)),
        ("cores", Role::Unlike, |run| run.host.cpu.cores.push(vec![1])),
        ("NUMA nodes", Role::Unlike, |run| run.host.cpu.nodes += 1),
        ("frequency governor", Role::Unlike, |run| run.host.cpu.governor = Some("powersave".into())),
        ("idle driver", Role::Unlike, |run| run.host.cpu.idle = Some("haltpoll".into())),
        ("mitigations", Role::Unlike, |run| run.host.cpu.mitigations = vec![("l1tf".into(), "off".into())]),
        ("settings", Role::Unlike, |run| run.host.settings[0].1 = "off".into()),
        ("hypervisor", Role::Unlike, |run| run.host.hypervisor = Some("kvm".into())),
        ("memory", Role::Unlike, |run| run.host.memory = 112),
        ("memory", Role::Unlike, |run| run.host.memory = 89),
        ("disk", Role::Unlike, |run| run.host.disk.get_or_insert_default().model = Some("nvme".into())),
        ("disk's size", Role::Unlike, |run| run.host.disk.get_or_insert_default().size = Some(2 << 40)),
        ("I/O scheduler", Role::Unlike, |run| run.host.disk.get_or_insert_default().scheduler = Some("bfq".into())),
        ("file system", Role::Unlike, |run| run.host.disk.get_or_insert_default().file_system = Some("xfs".into())),
        ("egret", Role::Compared, |run| run.host.components[0].version = "2".into()),
        ("egret", Role::Compared, |run| run.host.components[0].sha256 = "b".into()),
        ("qemu-storage-daemon", Role::Compared, |run| run.host.components[1].version = "2".into()),
        ("fio", Role::Unlike, |run| run.host.components[2].version = "2".into()),
        ("fio", Role::Told, |run| run.host.components[2].sha256 = "b".into()),
        ("QEMU", Role::Compared, |run| run.host.components[3].version = "2".into()),
        ("another program", Role::Compared, |run| run.host.components[4].sha256 = "b".into()),
        ("another program", Role::Compared, |run| run.host.started[0].sha256 = "b".into()),
        ("plan", Role::Unlike, |run| run.plan.name = "other".into()),
        ("scale", Role::Unlike, |run| run.scale *= 0.5),
        ("disk under test", Role::Unlike, |run| run.plan.disk.size = Some(crate::plan::Bytes(1 << 20))),
        ("disk under test", Role::Unlike, |run| run.plan.disk.kind = crate::plan::DiskKind::Loop),
        ("preconditioned", Role::Unlike, |run| run.plan.disk.preconditioned = true),
        ("load-cpus", Role::Unlike, |run| run.plan.load_cpus = vec![1]),
        ("perf", Role::Unlike, |run| run.plan.perf = true),
        ("io-submit", Role::Unlike, |run| run.plan.io_submit = true),
        ("load", Role::Unlike, |run| run.plan.loads.change(|loads| loads[0].norandommap = false)),
        ("load", Role::Unlike, |run| run.plan.loads.change(|loads| loads[0].jobfile = Some("/plans/other.fio".into()))),
        ("job file", Role::Unlike, |run| run.job_files.values_mut().for_each(|digest| *digest = "b".into())),
        ("QEMU", Role::Compared, |run| {
            run.plan.subjects[0].qemu = Some("/new/qemu-system-x86_64".into());
            (run.host.components[3].name, run.host.components[3].sha256) =
                ("/new/qemu-system-x86_64".into(), "b".into());
        }),
        ("subject", Role::Unlike, |run| run.plan.subjects[0].iothreads = 2),
        ("subject", Role::Unlike, |run| run.plan.subjects[0].scheduler = Some("bfq".into())),
    ];
    for (about, role, change) in changes {
        let mut other = base.clone();
        change(&mut other);
        for (a, b) in [(&base, &other), (&other, &base)] {
            let mut found: Vec<_> = differences(a, b).iter().map(|one| (one.about, one.role)).collect();
            found.dedup();
            assert_eq!(found, [(about, role)]);
            let expected = if role == Role::Unlike { Overall::NotComparable } else { Overall::Pass };
            assert_eq!(overall(a, b), expected, "{about}");
        }
    }
    // Of these neither is a difference: where the system was found, a little memory, interrupts, what only one side has.
    let same: [Change; 11] = [
        |run| run.plan.loads.change(|loads| loads[0].jobfile = Some("/elsewhere/load.fio".into())),
        |run| {
            run.plan.subjects[0].qemu = Some("/new/qemu-system-x86_64".into());
            run.host.components[3].name = "/new/qemu-system-x86_64".into();
        },
        |run| run.host.kernel_options = "BOOT_IMAGE=/b initrd=/i quiet root=/dev/vdb resume=/dev/c".into(),
        |run| run.host.memory = 111,
        |run| run.host.memory = 90,
        |run| run.host.settings.push(("disk's interrupts".into(), "34: 0".into())),
        |run| run.host.settings.clear(),
        |run| run.host.components.truncate(1),
        |run| run.host.disk.get_or_insert_default().size = None,
        |run| {
            run.host.started[0] = Component { path: "/other".into(), sha256: "b".into(), ..run.host.started[0].clone() }
        },
        |run| run.plan.subjects[0].name = "another".into(),
    ];
    for (number, change) in same.into_iter().enumerate() {
        let mut other = base.clone();
        change(&mut other);
        assert_eq!((differences(&base, &other), differences(&other, &base)), (vec![], vec![]), "{number}");
    }
    // Nor is that a job file's name stands for its load's in one plan, and is in the other one.
    let called = |name: Option<&str>, path: &str| {
        let mut run = base.clone();
        run.plan.loads.change(|loads| (loads[0].name, loads[0].jobfile) = (name.map(str::to_owned), Some(path.into())));
        run.job_files = [(run.plan.loads[0].name.clone(), "a".into())].into();
        run
    };
    assert_eq!(differences(&called(None, "load.fio"), &called(Some("load.fio"), "/plans/load.fio")), []);
    // With another kernel come its words for mitigations and its settings.
    let mut newer = base.clone();
    newer.host.kernel = "6.18".into();
    newer.host.cpu.mitigations = vec![("l1tf".into(), "off".into())];
    newer.host.settings[0].1 = "off".into();
    assert_eq!(overall(&base, &newer), Overall::Pass);
}

#[test]
fn perf_that_was_asked_for_and_saw_nothing_is_none() {
    let with = |samples: u64| {
        let mut run = run(1e5);
        run.plan.perf = true;
        each_measurement(&mut run, |measured| measured.samples = samples);
        run
    };
    assert_eq!(overall(&with(0), &with(0)), Overall::Pass);
    let comparison = Comparison::of(&[&with(9)], &[&with(0)], None);
    assert_eq!(agreed(&comparison, false), Overall::NotComparable);
    assert_eq!(comparison.objections, ["perf: on against on, and it saw nothing"]);
    assert_eq!(agreed(&comparison, true), Overall::Pass);
    // What never came so far is a failure, and no difference.
    let mut broken = with(0);
    broken.cells.iter_mut().for_each(|cell| {
        cell.outcome = Outcome::Failed { reason: "it crashed".into(), log: Vec::new() };
    });
    assert_eq!(overall(&with(9), &broken), Overall::Fail);
}

#[test]
fn a_run_that_was_resumed_under_other_conditions_is_none_of_one_thing() {
    let mut resumed = run(1e5);
    resumed.incidents.push(Incident {
        at: 1,
        cell: None,
        source: Incident::LAB.into(),
        text: "resumed with other conditions than it began with: the programs".into(),
    });
    for (a, b, which) in [(&run(1e5), &resumed, "second"), (&resumed, &run(1e5), "first")] {
        let comparison = Comparison::of(&[a], &[b], None);
        assert_eq!(agreed(&comparison, false), Overall::NotComparable);
        let said = format!("a {which} run was resumed with other conditions than it began with: the programs");
        assert_eq!(comparison.objections, [said]);
    }
    let mut complained = run(1e5);
    complained.incidents.push(Incident { source: "kernel".into(), ..resumed.incidents[0].clone() });
    assert_eq!(overall(&run(1e5), &complained), Overall::Pass);
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
    let [a, b, c] = [run(1e5), another(&run(1e5)), another(&another(&run(1e5)))];
    let comparison = Comparison::of(&[&a, &b], &[&c, &other], None);
    assert_eq!(comparison.overall(false), Overall::NotComparable);
    assert_eq!(comparison.objections, ["the second runs differ among themselves: egret"]);
}

#[test]
fn runs_without_a_cell_in_common_cannot_be_compared_and_say_what_each_has() {
    let mut other = run(1e5);
    other.cells.iter_mut().for_each(|cell| cell.id.subject = "another".into());
    let comparison = Comparison::of(&[&run(1e5)], &[&other], None);
    assert_eq!(agreed(&comparison, true), Overall::NotComparable);
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
        assert_eq!(agreed(&comparison, false), Overall::Fail);
        let said = format!("failed in {repetitions} of 5 repetitions: the server ended with signal 11");
        let row = comparison.rows.iter().find(|row| row.note.as_ref() == Some(&said)).unwrap();
        assert_eq!((row.metric, row.a.is_some(), row.b.is_some()), (Metric::Iops, true, repetitions < 5));
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
fn what_worked_mostly_and_works_no_more_fails_and_what_nobody_measured_before_is_named() {
    let failed = |repetitions: u32| {
        let mut run = run(1e5);
        fail(&mut run, repetitions);
        run
    };
    let without = |run: &Run| {
        let mut run = run.clone();
        run.cells.retain(|cell| !cell.id.load.ends_with("QD64"));
        run
    };
    let impossible = |mut run: Run| {
        for cell in run.cells.iter_mut().filter(|cell| cell.id.load.ends_with("QD64")) {
            cell.outcome = Outcome::Impossible { reason: "no /dev/kvm".into() };
        }
        run
    };
    let fine = run(1e5);
    let says = |a: &Run, b: &Run| {
        let comparison = Comparison::of(&[a], &[b], None);
        let noted = comparison.rows.iter().filter(|row| row.load.ends_with("QD64"));
        let notes: Vec<_> =
            noted.filter_map(|row| Some(format!("{}: {}", row.metric.name(), row.note.clone()?))).collect();
        (comparison.overall(false), notes.join(" | "))
    };
    let crash = |times: u32| format!("failed in {times} of 5 repetitions: the server ended with signal 11");
    let (five, before) = (crash(5), |times: u32| format!("; before, it {}", crash(times)));
    for (a, b, overall, note) in [
        (failed(1), failed(5), Overall::Fail, format!("{five}{}", before(1))),
        (failed(3), failed(5), Overall::CantTell, format!("{five}{}", before(3))),
        (failed(1), failed(4), Overall::CantTell, format!("{}{}", crash(4), before(1))),
        (failed(5), failed(5), Overall::CantTell, format!("{five}{}", before(5))),
        (without(&fine), failed(5), Overall::CantTell, format!("{five}; the first run did not measure it")),
        (impossible(run(1e5)), failed(1), Overall::CantTell, format!("{}; the first run did not measure it", crash(1))),
        (failed(5), without(&fine), Overall::CantTell, "missing from the second run".into()),
        (run(1e5), impossible(run(1e5)), Overall::CantTell, "impossible in the second run: no /dev/kvm".into()),
    ] {
        assert_eq!(says(&a, &b), (overall, format!("IOPS: {note}")));
    }
    // What this machine cannot run is no loss to anybody, and what is mended is none.
    for (a, b) in
        [(impossible(run(1e5)), impossible(run(1e5))), (impossible(run(1e5)), run(1e5)), (failed(5), run(1e5))]
    {
        assert_eq!(says(&a, &b), (Overall::Pass, String::new()));
    }
}

#[test]
fn an_open_loop_that_falls_short_passes_nothing_by_its_latency_and_fails_by_what_it_reached() {
    let open = |iops: f64, mean: f64, is_database: bool| {
        let mut run = run(iops);
        each_measurement(&mut run, |measured| {
            measured.offered_iops = Some(1e5);
            measured.reads.as_mut().unwrap().latency = Latency { mean, ..Latency::default() };
            measured.transactions = is_database.then_some(iops);
        });
        run
    };
    let of = |a: &Run, b: &Run, metric: Metric| {
        let rows = Comparison::of(&[a], &[b], None).rows;
        let row = rows.into_iter().find(|row| row.metric == metric).expect("a row");
        (row.decision, row.note)
    };
    let not_found = || (Err("offered, not found".into()), None);
    for (is_database, reached) in [(false, Metric::Iops), (true, Metric::Transactions)] {
        let (fine, short) = (open(1e5, 1e5, is_database), open(0.63e5, 0.5e5, is_database));
        assert_eq!(of(&fine, &fine, reached), not_found());
        let note = |text: &str| Some(text.to_owned());
        let open = || Ok(Verdict::CantTell { more_pairs: None });
        assert_eq!(of(&fine, &short, Metric::Latency), (open(), note("reached 64 % of the rate")));
        assert_eq!(of(&fine, &short, reached), (Ok(Verdict::Fail), note("reached 64 % of the rate")));
        assert_eq!(of(&short, &fine, Metric::Latency), (open(), note("the baseline reached 64 % of the rate")));
        assert_eq!(of(&short, &fine, reached).0, Ok(Verdict::Pass));
        assert_eq!(overall(&fine, &short), Overall::Fail);
    }
}

#[test]
fn points_at_rates_that_differ_decide_nothing_and_are_no_pass() {
    let at = |rate: f64, mean: f64| {
        let mut run = run(1.2e5);
        each_measurement(&mut run, |measured| {
            measured.offered_iops = Some(rate);
            measured.reads.as_mut().unwrap().latency = Latency { mean, ..Latency::default() };
        });
        run
    };
    let mut closed = at(0.0, 1e5);
    each_measurement(&mut closed, |measured| measured.offered_iops = None);
    let said = |comparison: &Comparison| comparison.text().contains("can't tell: their rates differ");
    for (a, b, then) in [
        // The peak has fallen by 3 %, and at the same rate latency would be 2.5 times what it was.
        (at(95_000.0, 1e5), at(92_150.0, 1.03e5), Overall::CantTell),
        (at(95_000.0, 1e5), at(99_000.0, 2.5e5), Overall::CantTell),
        (at(95_000.0, 1e5), closed, Overall::CantTell),
        (at(95_000.0, 1e5), at(95_900.0, 1.03e5), Overall::Pass),
        (at(95_000.0, 1e5), at(94_100.0, 2.5e5), Overall::Fail),
    ] {
        let comparison = Comparison::of(&[&a], &[&b], None);
        assert_eq!(comparison.overall(false), then, "{}", comparison.text());
        assert_eq!(said(&comparison), then == Overall::CantTell);
        assert!(comparison.rows.iter().any(|row| row.metric == Metric::Latency && row.ratio.is_some()));
    }
    // Nor may runs of one side differ, each of which has found a peak of its own.
    let [a, b] = [at(95_000.0, 1e5), at(95_000.0, 1e5)].map(|run| [another(&run), another(&another(&run))]);
    let mut other = at(97_000.0, 1e5);
    other.started = 7;
    assert_eq!(Comparison::of(&[&a[0], &a[1]], &[&b[0], &b[1]], None).overall(true), Overall::Pass);
    let comparison = Comparison::of(&[&a[0], &other], &[&b[0], &b[1]], None);
    assert_eq!((comparison.overall(true), said(&comparison)), (Overall::CantTell, true));
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
fn a_run_that_is_not_finished_passes_nothing_and_says_so() {
    let numbered = |started: u64, ended: Option<u64>| Run { started, ended, ..run(1e5) };
    for (a, b, which) in
        [(numbered(1, Some(1)), numbered(2, None), "second"), (numbered(1, None), numbered(2, Some(1)), "first")]
    {
        let comparison = Comparison::of(&[&a], &[&b], None);
        assert_eq!(agreed(&comparison, false), Overall::CantTell);
        let said = format!("the {which} run is not finished");
        assert!(comparison.said().contains(&said) && comparison.junit(false).unwrap().contains(&said));
        let [more_a, more_b] = [3, 4].map(|number| numbered(number, Some(1)));
        let comparison = Comparison::of(&[&a, &more_a], &[&b, &more_b], None);
        assert_eq!(agreed(&comparison, false), Overall::CantTell);
        assert_eq!(comparison.gaps, [format!("1 of the {which} runs is not finished")]);
    }
    let slow = Run { ended: None, ..run(0.67e5) };
    assert_eq!(overall(&run(1e5), &slow), Overall::Fail, "what is lost by then is lost");
}

#[test]
fn repetitions_that_are_missing_are_named_and_no_pass() {
    let with = |started: u64, repetitions: u32| {
        let mut run = Run { started, ..run(1e5) };
        run.cells.retain(|cell| cell.id.repetition < repetitions || cell.id.load.ends_with("QD1"));
        run
    };
    let gaps = |a: &[&Run], b: &[&Run]| {
        let comparison = Comparison::of(a, b, None);
        assert_eq!(agreed(&comparison, false), Overall::CantTell);
        comparison.gaps
    };
    let said =
        |measured: u32, place: &str| format!("{measured} of 5 repetitions of egret, randread 4k QD64 in {place}");
    let [a, more_a, b] = [1, 2, 3].map(|number| with(number, 5));
    for measured in [1, 4] {
        assert_eq!(gaps(&[&a], &[&with(4, measured)]), [said(measured, "the second run")]);
    }
    // Of several runs one may lack them, or all of the cell.
    for measured in [0, 1] {
        assert_eq!(gaps(&[&a, &more_a], &[&b, &with(4, measured)]), [said(measured, "one of the second runs")]);
    }
    // What this machine could not run any more was not measured.
    let mut impossible = b.clone();
    for cell in impossible.cells.iter_mut().filter(|cell| cell.id.repetition > 0 && cell.id.load.ends_with("QD64")) {
        cell.outcome = Outcome::Impossible { reason: "no /dev/kvm".into() };
    }
    assert_eq!(gaps(&[&a], &[&impossible]), [said(1, "the second run")]);
    // More than its plan asks for were measured of the first run, where that decided; and it may have fewer itself.
    let mut few = a.clone();
    few.plan.repetitions = 3;
    assert_eq!(overall(&few, &with(4, 3)), Overall::Pass);
    assert_eq!(overall(&with(4, 3), &a), Overall::Pass);
}

#[test]
fn who_completes_nothing_has_failed_and_what_the_second_run_does_not_tell_is_named() {
    let change = |change: fn(&mut Measurement)| {
        let mut run = run(1e5);
        let there = |cell: &&mut Cell| cell.id.load.ends_with("QD64") && cell.id.repetition < 2;
        for cell in run.cells.iter_mut().filter(there) {
            if let Outcome::Measured(measured) = &mut cell.outcome {
                change(measured);
                cell.outcome = std::mem::take(&mut **measured).into();
            }
        }
        run
    };
    let stuck = change(|measured| measured.reads.as_mut().unwrap().requests = 0);
    let comparison = Comparison::of(&[&run(1e5)], &[&stuck], None);
    assert_eq!(agreed(&comparison, false), Overall::Fail);
    assert!(comparison.text().contains("FAIL: failed in 2 of 5 repetitions: no request was completed"));
    assert_eq!(overall(&stuck, &run(1e5)), Overall::Pass, "what is mended is no loss");
    // At so low a rate none may have been due.
    let rare = change(|measured| {
        measured.offered_iops = Some(1.0);
        measured.reads.as_mut().unwrap().requests = 0;
    });
    assert!(!Comparison::of(&[&run(1e5)], &[&rare], None).text().contains("FAIL"));

    let mut silent = run(1e5);
    each_measurement(&mut silent, |measured| measured.cpu = Ledger::default());
    let comparison = Comparison::of(&[&run(1e5)], &[&silent], None);
    assert_eq!(agreed(&comparison, false), Overall::CantTell);
    assert_eq!(comparison.gaps[0], "no CPU per I/O of egret, randread 4k QD1 in the second run");
    assert_eq!(overall(&silent, &run(1e5)), Overall::Pass);
}

#[test]
fn of_one_run_each_it_says_that_nobody_knows_how_far_runs_lie_apart() {
    let said = "one run each: what differs from one boot";
    let (a, b) = (run(1e5), run(1e5));
    assert!(Comparison::of(&[&a], &[&b], None).text().contains(said));
    let (more_a, more_b) = (another(&a), another(&b));
    assert!(!Comparison::of(&[&a, &more_a], &[&b, &more_b], None).text().contains(said));
}

#[test]
fn a_run_that_is_given_twice_is_refused_and_several_of_one_boot_say_so() {
    let numbered = |number: u64, boot: Option<&str>| {
        let mut run = run(1e5);
        run.started = number;
        run.host.boot_id = boot.map(str::to_owned);
        run
    };
    let runs = [0, 1, 2, 3].map(|number| numbered(number, Some(if number == 3 { "another" } else { "one" })));
    let [a, b, c, d] = &runs;
    for (first, second) in
        [(vec![a, a], vec![b, c]), (vec![b, c], vec![a, a]), (vec![a, b], vec![c, a]), (vec![a], vec![b, a])]
    {
        let comparison = Comparison::of(&first, &second, None);
        assert_eq!(comparison.overall(false), Overall::NotComparable);
        assert!(comparison.objections[0].starts_with("one of the runs is given twice: "));
    }
    assert_eq!(overall(a, a), Overall::Pass, "a trial");
    assert_eq!(Comparison::of(&[a, b], &[c, d], None).overall(false), Overall::Pass);

    let boots = |first: &[&Run], second: &[&Run]| {
        let text = Comparison::of(first, second, None).text();
        ["first", "second"].map(|which| text.contains(&format!("the {which} runs are all of one boot: ")))
    };
    assert_eq!(boots(&[a, b], &[c, d]), [true, false]);
    assert_eq!(boots(&[c, d], &[a, b]), [false, true]);
    assert_eq!(boots(&[a], &[b]), [false; 2], "of one run each another line says more");
    let unknown = [0, 1, 2, 3].map(|number| numbered(number, None));
    assert_eq!(boots(&[&unknown[0], &unknown[1]], &[&unknown[2], &unknown[3]]), [false; 2]);
}

#[test]
fn several_runs_show_how_far_runs_of_one_thing_lie_apart() {
    let number = std::cell::Cell::new(0);
    let side = |rates: [f64; 3]| {
        rates.map(|rate| {
            number.set(number.get() + 1);
            Run { started: number.get(), ..run(rate) }
        })
    };
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
    // Where runs tell how far they lie apart a sure loss is one, though it may be within the limit.
    let slower = side([0.951e5, 0.952e5, 0.953e5]);
    assert_eq!(iops(&of(&a, &slower)), vec![Ok(Verdict::Fail); 2]);
}

#[test]
fn of_runs_of_one_boot_beside_those_of_another_nobody_knows_how_far_boots_lie_apart() {
    let side = |first: u64, iops: f64, boots: [&str; 3]| {
        [0, 1, 2].map(|number| {
            let mut run = run(iops * (1.0 + number as f64 / 1000.0));
            run.started = first + number;
            run.host.boot_id = Some(boots[number as usize].into());
            run
        })
    };
    let of = |a: &[Run; 3], iops: f64, boots: [&str; 3]| {
        let b = side(10, iops, boots);
        Comparison::of(&a.iter().collect::<Vec<_>>(), &b.iter().collect::<Vec<_>>(), None)
    };
    let a = side(0, 1e5, ["one"; 3]);
    let fails = |iops: f64, boots: [&str; 3]| {
        let comparison = of(&a, iops, boots);
        self::iops(&comparison).contains(&Ok(Verdict::Fail))
    };
    let boots = [["one"; 3], ["two"; 3], ["two", "three", "four"]];
    // It is sure that something was lost, and perhaps more than the threshold: one other boot may be that much slower.
    assert_eq!(boots.map(|boots| fails(0.9505e5, boots)), [true, false, true]);
    // More than that is a loss, as of one run each.
    assert_eq!(boots.map(|boots| fails(0.9e5, boots)), [true; 3]);
}

#[test]
fn a_baseline_that_the_load_held_back_passes_nothing_by_its_latency_though_it_fell_short_of_its_rate() {
    let open = |iops: f64, mean: f64, is_bound: bool| {
        let mut run = run(iops);
        each_measurement(&mut run, |measured| {
            measured.offered_iops = Some(1e5);
            measured.reads.as_mut().unwrap().latency = Latency { mean, ..Latency::default() };
            measured.limit = is_bound.then(|| Bottleneck::Load("it was late".into()));
        });
        run
    };
    // The load was late, so that it waited long for a server that is twice as fast as the second.
    let comparison = Comparison::of(&[&open(0.8e5, 9e5, true)], &[&open(1e5, 2e5, false)], None);
    let latency = comparison.rows.iter().find(|row| row.metric == Metric::Latency).unwrap();
    assert_eq!(latency.decision, Ok(Verdict::CantTell { more_pairs: None }), "{}", comparison.text());
    assert_eq!(
        latency.note.as_deref(),
        Some("the baseline reached 82 % of the rate; the baseline is load-bound: it was late")
    );
    assert_eq!(agreed(&comparison, false), Overall::CantTell);
}

#[test]
fn a_closed_loop_is_judged_by_its_rate_and_an_open_one_by_its_mean_latency() {
    let decisions = |change: fn(&mut Measurement)| {
        let mut run = run(1e5);
        each_measurement(&mut run, |measured| {
            measured.reads.as_mut().unwrap().latency = Latency { mean: 1e5, p99: 2e5, p999: 3e5, ..Latency::default() };
            change(measured);
        });
        let rows = Comparison::of(&[&run], &[&run], None).rows;
        rows.into_iter().take(5).map(|row| (row.metric, row.decision)).collect::<Vec<_>>()
    };
    let no = |why: &str| Err(why.to_owned());
    let expected = |decisions: [Result<Verdict, String>; 5]| {
        use Metric::{CpuPerIo, Iops, Latency, LatencyP99, LatencyP999};
        [Iops, Latency, LatencyP99, LatencyP999, CpuPerIo].into_iter().zip(decisions).collect::<Vec<_>>()
    };
    let (pass, iops, shown) = (|| Ok(Verdict::Pass), || no("IOPS say it"), || no("shown only"));
    assert_eq!(decisions(|_| {}), expected([pass(), iops(), iops(), iops(), pass()]));
    let open = decisions(|measured| measured.offered_iops = Some(1e5));
    assert_eq!(open, expected([no("offered, not found"), pass(), shown(), shown(), pass()]));
    let emulated = decisions(|measured| measured.functional_only = true);
    assert_eq!(emulated, expected([(); 5].map(|()| no("under emulation"))));
}

#[test]
fn no_less_noise_is_believed_than_a_baseline_has_beside_itself() {
    // It is as much faster now as slower then, so that both together are steady.
    let with = |iops: f64, by: f64| {
        let mut run = run(iops);
        let mut again = run.cells.clone();
        again.iter_mut().for_each(|cell| cell.id.subject += crate::runner::AGAIN);
        for (cells, by) in [(&mut run.cells, by), (&mut again, 1.0 / by)] {
            for cell in cells {
                let Outcome::Measured(measured) = &mut cell.outcome else { continue };
                measured.seconds *= if cell.id.repetition % 2 == 0 { by } else { 1.0 / by };
            }
        }
        run.cells.extend(again);
        run
    };
    let of = |by: f64| {
        let comparison = Comparison::of(&[&with(1e5, by)], &[&with(0.67e5, by)], None);
        let row = comparison.rows.into_iter().find(|row| row.metric == Metric::Iops).unwrap();
        let ratio = row.ratio.unwrap();
        (row.decision, (ratio.high / ratio.low).ln() / 2.0)
    };
    assert_eq!(of(1.0).0, Ok(Verdict::Fail));
    let (decision, half) = of(1.5);
    assert!(matches!(decision, Ok(Verdict::CantTell { .. })), "{decision:?}");
    // Each value is the mean of two measurements, and a pair's variance is that of two; five values stand against five.
    // Student's distribution asks for 1.96 to 2.31 standard errors, by how much is known of other loads.
    let pairs = [-2.0, 2.0, -2.0, 2.0, -2.0].map(|times| times * 1.5_f64.ln());
    let error = (deviation(&pairs).powi(2) / 2.0 / 2.0 * (1.0 / 5.0 + 1.0 / 5.0)).sqrt();
    assert!((1.9..2.4).contains(&(half / error)), "{half} {error}");
}

#[test]
fn what_failed_in_the_second_run_alone_was_not_measured_there() {
    let mut b = run(1e5);
    let mut more = b.cells.clone();
    more.iter_mut().for_each(|cell| cell.id.subject = "another".into());
    b.cells.extend(more);
    let said = |b: &Run| Comparison::of(&[&run(1e5)], &[b], None).text().contains("measured in the second run alone");
    assert!(said(&b));
    for cell in b.cells.iter_mut().filter(|cell| cell.id.subject == "another") {
        cell.outcome = Outcome::Failed { reason: "it crashed".into(), log: Vec::new() };
    }
    assert!(!said(&b));
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
    let spending = |each: u64| {
        let mut run = run(1e5);
        each_measurement(&mut run, |measured| {
            measured.cpu = Ledger { load: Some(each * measured.requests()), ..Ledger::default() };
        });
        run
    };
    let rows = |change: fn(&mut Ledger), metric: Metric| {
        let [a, b] = [1000, 2000].map(|each| {
            let mut run = spending(each);
            each_measurement(&mut run, |measured| {
                measured.cpu.host_busy = measured.cpu.load;
                change(&mut measured.cpu);
            });
            run
        });
        let mut rows = Comparison::of(&[&a], &[&b], None).rows;
        rows.retain(|row| row.metric == metric);
        rows.into_iter().map(|row| row.decision).collect::<Vec<_>>()
    };
    let shown = vec![Err("shown only".to_owned()); 2];
    let (host, served) = (|_: &mut Ledger| {}, |cpu: &mut Ledger| cpu.server = Some(1));
    assert_eq!(rows(host, Metric::LoadCpu), vec![Ok(Verdict::Fail); 2]);
    assert_eq!(rows(served, Metric::LoadCpu), []);
    // A guest's clock goes on where it waits.
    let guest = |cpu: &mut Ledger| (cpu.guest, cpu.io_thread_work) = (Some(1), Some(1));
    assert_eq!(rows(guest, Metric::LoadCpu), shown);
    // How busy the host was is published by others, of fio on the host.
    assert_eq!(rows(host, Metric::HostBusy), shown);
    assert_eq!((rows(served, Metric::HostBusy), rows(guest, Metric::HostBusy)), (vec![], vec![]));
}
