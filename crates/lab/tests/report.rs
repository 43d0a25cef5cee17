//! What a report says of a run whose truth is known, and whether a browser shows it.

mod browser;

use std::fs;

use browser::Browser;
use egret_lab::analysis::choice::Advice;
use egret_lab::analysis::{Analysis, Status};
use egret_lab::compare::junit;
use egret_lab::plan::{Application, Metric, Plan, Stack};
use egret_lab::report;
use egret_lab::results::{
    Bottleneck, Cell, CellId, FORMAT, Host, Incident, Latency, Ledger, Measurement, Operations, Outcome, Run, Symbol,
    Warning,
};
use egret_lab::statistics::{Overall, Verdict};
use egret_loadgen::random::Random;

const PLAN: &str = r#"
name = "made-up"
title = "Which of them?"
baseline = "base"

[disk]
type = "null"
size = "1G"

[[subject]]
name = "base"
stack = "egret"
line = "base"
at = 1

[[subject]]
name = "slow"
stack = "egret"
line = "slow"
at = 1

[[subject]]
name = "alike"
stack = "egret"
line = "alike"
at = 1

[[subject]]
name = "</script><b>guest"
stack = "guest"

[[load]]
rw = "randread"
iodepth = [1, 64]

[[load]]
rw = "randwrite"
iodepth = 8
curve = { from = 10, to = 90, points = 3 }

[[chart]]
id = "2a"
title = "Latency"
metric = "latency"

[[chart]]
id = "2g"
title = "Latency against IOPS"
form = "curve"
metric = "latency"
loads = ["randwrite 4k QD8 curve"]

[[chart]]
id = "2k"
title = "By number"
form = "ladder"
metric = "iops"

[[chart]]
id = "S4"
title = "Beside what was published"
form = "table"
metric = "iops"
published = "s4_devices"
"#;

/// How fast each is, in requests per second at depth 1.
const SPEEDS: [(&str, f64); 4] =
    [("base", 10_000.0), ("base (again)", 10_000.0), ("slow", 6000.0), ("alike", 10_000.0)];

fn measurement(iops: f64, depth: f64, cpu_us: f64) -> Measurement {
    let requests = (iops * 5.0) as u64;
    let mean = depth * 1e9 / iops;
    let latency =
        Latency { mean, p50: 0.9 * mean, p90: 1.5 * mean, p99: 3.0 * mean, p999: 6.0 * mean, ..Latency::default() };
    let spent = (requests as f64 * cpu_us * 1e3) as u64;
    let cpu = Ledger {
        io_thread_work: Some(spent / 2),
        io_thread_system: Some(spent / 2),
        load: Some(spent / 3),
        host_busy: Some(spent * 3 / 2),
        ..Ledger::default()
    };
    let reads = Some(Operations { requests, bytes: requests * 4096, latency });
    Measurement { seconds: 5.0, reads, cpu, ..Measurement::default() }
}

/// A run of [`PLAN`] with a noise of half a percent, and what `change` makes of its cells.
fn run(change: impl Fn(&mut Cell)) -> Run {
    let plan: Plan = toml::from_str(PLAN).expect("a plan");
    let mut random = Random::new(1);
    let mut cells = Vec::new();
    for repetition in 0..plan.repetitions {
        for (load, speedup, depth, points) in [
            ("randread 4k QD1", 1.0, 1.0, 0..=0),
            ("randread 4k QD64", 20.0, 64.0, 0..=0),
            ("randwrite 4k QD8 curve", 5.0, 8.0, 0..=3),
        ] {
            for point in points {
                for (subject, iops) in SPEEDS {
                    let share = if point == 0 { 1.0 } else { 0.1 + 0.4 * f64::from(point - 1) };
                    let noise = 1.0 + 0.01 * (random.unit() - 0.5);
                    let mut measured = measurement(iops * speedup * share * noise, depth, 12.0 / speedup.sqrt());
                    // Rates are shares of one peak, and the slow one does not reach them.
                    measured.offered_iops = (point > 0).then_some(10_000.0 * speedup * share);
                    let id = CellId { load: load.into(), subject: subject.into(), repetition, point };
                    let mut cell = Cell { id, started: 0, outcome: Outcome::Measured(Box::new(measured)) };
                    change(&mut cell);
                    cells.push(cell);
                }
            }
        }
    }
    let id = CellId { load: "randread 4k QD1".into(), subject: "</script><b>guest".into(), repetition: 0, point: 0 };
    cells.push(Cell { id, started: 0, outcome: Outcome::Impossible { reason: "no /dev/kvm".into() } });
    let warnings = vec![Warning { about: "governor".into(), text: "powersave & <slow>".into() }];
    Run {
        format: FORMAT,
        plan,
        scale: 1.0,
        seed: 1,
        only: None,
        peaks: Default::default(),
        job_files: Default::default(),
        started: 1_795_235_760,
        ended: Some(1_795_236_000),
        host: Host { name: "here".into(), warnings, ..Host::default() },
        cells,
        incidents: vec![Incident { at: 1_795_235_770, cell: None, source: "kernel".into(), text: "hung task".into() }],
    }
}

/// What was decided of the closed loops.
fn decisions(run: &Run, subject: &str, metric: Metric) -> Vec<Result<Verdict, String>> {
    let mut judged = Analysis::new(run).judged;
    judged.retain(|one| (one.subject.as_str(), one.metric, one.point) == (subject, metric, 0));
    judged.into_iter().map(|one| one.decision).collect()
}

#[test]
fn a_loss_fails_and_what_is_alike_passes() {
    let run = run(|_| {});
    assert_eq!(decisions(&run, "slow", Metric::Iops), vec![Ok(Verdict::Fail); 3]);
    assert_eq!(decisions(&run, "alike", Metric::Iops), vec![Ok(Verdict::Pass); 3]);
    let advice = Analysis::new(&run).advice();
    let either = ["base, or alike", "alike, or base"];
    assert!(either.contains(&advice[0].choice.as_str()), "{advice:#?}");
    assert!(advice.iter().any(|one| one.aim == "Leave out slow"), "{advice:#?}");
    assert!(advice.iter().all(|one| !one.evidence.is_empty()));
}

#[test]
fn of_a_single_subject_the_noise_floor_is_what_is_judged() {
    let mut run = run(|_| {});
    run.plan.subjects.truncate(1);
    run.cells.retain(|cell| cell.id.subject.starts_with("base"));
    assert_eq!(decisions(&run, "base (again)", Metric::Iops), vec![Ok(Verdict::Pass); 3]);
}

/// Changes what was measured of a subject under 64 requests at once, in some repetitions.
fn limited(run: &mut Run, subjects: &[&str], repetitions: std::ops::Range<u32>, limit: &Bottleneck) {
    for cell in &mut run.cells {
        let id = &cell.id;
        let is_meant = id.load == "randread 4k QD64" && repetitions.contains(&id.repetition);
        if let (Outcome::Measured(measured), true, true) =
            (&mut cell.outcome, is_meant, subjects.contains(&id.subject.as_str()))
        {
            measured.limit = Some(limit.clone());
        }
    }
}

#[test]
fn what_the_disk_or_the_load_limits_on_both_sides_decides_nothing_of_speed() {
    for limit in [Bottleneck::Device("as fast as fio".into()), Bottleneck::Load("its core is full".into())] {
        let mut run = run(|_| {});
        limited(&mut run, &["base", "slow"], 0..5, &limit);
        let speed = decisions(&run, "slow", Metric::Iops);
        assert!(speed[0].is_ok() && speed[1].as_ref().is_err_and(|why| why.contains("-bound")), "{speed:?}");
        assert!(decisions(&run, "slow", Metric::CpuPerIo)[1].is_ok(), "what a request costs is compared all the same");
    }
}

#[test]
fn a_bound_of_one_side_or_of_one_repetition_hides_no_loss() {
    for limit in [Bottleneck::Device("as fast as fio".into()), Bottleneck::Load("its core is full".into())] {
        for (subjects, repetitions) in [(&["base"][..], 0..5), (&["slow"], 0..5), (&["base", "slow"], 0..2)] {
            let mut run = run(|_| {});
            limited(&mut run, subjects, repetitions, &limit);
            assert_eq!(decisions(&run, "slow", Metric::Iops)[1], Ok(Verdict::Fail), "{subjects:?}");
        }
    }
    let mut run = run(|_| {});
    limited(&mut run, &["base"], 0..5, &Bottleneck::Load("its core is full".into()));
    let alike = decisions(&run, "alike", Metric::Iops);
    assert!(matches!(alike[1], Ok(Verdict::CantTell { .. })), "a baseline held back passes nothing: {alike:?}");
}

/// Lets a subject fail under one load in its first so many repetitions.
fn failing(subject: &str, repetitions: u32) -> Run {
    run(|cell| {
        let id = &cell.id;
        if id.subject == subject && id.load == "randread 4k QD64" && id.repetition < repetitions {
            cell.outcome = Outcome::Failed { reason: "it crashed".into(), log: vec!["signal 11".into()] };
        }
    })
}

fn ratio(run: &Run, subject: &str, metric: Metric) -> egret_lab::statistics::Estimate {
    let judged = Analysis::new(run).judged;
    let found = judged.into_iter().find(|one| one.subject == subject && one.metric == metric).expect("a comparison");
    found.ratio.expect("a ratio")
}

#[test]
fn both_measurements_of_the_baseline_are_what_others_are_compared_with() {
    let run = run(|cell| {
        if let (Outcome::Measured(measured), "base (again)") = (&mut cell.outcome, cell.id.subject.as_str()) {
            measured.seconds /= 1.21;
        }
    });
    let ratio = ratio(&run, "alike", Metric::Iops).ratio;
    assert!((ratio * 1.1 - 1.0).abs() < 0.01, "{ratio}");
}

#[test]
fn a_plan_that_may_look_again_spends_a_part_of_its_error_at_each_look() {
    let run = run(|_| {});
    let mut again = run.clone();
    again.plan.most_repetitions = Some(12);
    let width = |run: &Run| {
        let ratio = ratio(run, "alike", Metric::Iops);
        ratio.high / ratio.low
    };
    assert!(width(&again) > width(&run), "{} {}", width(&again), width(&run));
}

#[test]
fn a_loss_that_is_within_the_noise_floor_is_no_fail() {
    let noisy = |by: f64| {
        let run = run(|cell| {
            let up = if cell.id.repetition % 2 == 0 { by } else { 1.0 / by };
            if let (Outcome::Measured(measured), "base (again)") = (&mut cell.outcome, cell.id.subject.as_str()) {
                measured.seconds *= up;
            }
            // What the mean of both baselines takes away comes back, so that pairs agree all the same.
            if let (Outcome::Measured(measured), "slow" | "alike") = (&mut cell.outcome, cell.id.subject.as_str()) {
                measured.seconds *= up.sqrt();
            }
        });
        decisions(&run, "slow", Metric::Iops)
    };
    assert_eq!(noisy(1.0), vec![Ok(Verdict::Fail); 3]);
    assert!(noisy(4.0).iter().all(|one| matches!(one, Ok(Verdict::CantTell { .. }))), "{:?}", noisy(4.0));
}

#[test]
fn what_failed_once_fails_and_is_shown_and_is_no_advice() {
    let run = failing("alike", 1);
    assert_eq!(decisions(&run, "alike", Metric::Iops)[1], Ok(Verdict::Fail));
    let analysis = Analysis::new(&run);
    assert_eq!((analysis.overall(), analysis.failed_cells()), (Overall::Fail, 1));
    let verdict = analysis.verdict();
    // What cannot run here is named behind that.
    let (verdict, _) = verdict.split_once("; nothing was measured of ").expect("a gap");
    assert!(verdict.starts_with("fail: of ") && verdict.ends_with(" cells 1 failed"), "{verdict}");
    let advice = analysis.advice();
    let chooses = |one: &Advice| !one.aim.starts_with("Leave out") && one.choice.contains("alike");
    assert!(!advice.iter().any(chooses), "{advice:#?}");
    assert!(advice.iter().any(|one| one.aim == "Leave out alike" && one.choice == "It failed"), "{advice:#?}");
    let points = analysis.operating_points();
    assert!(!points.is_empty() && points.iter().all(|one| one.subject != "alike"), "no constraint brings it back");
    let directory = tempfile::tempdir().expect("a directory");
    egret_lab::report::write(&run, directory.path()).expect("a report");
    for name in ["report.html", "report.md"] {
        let text = fs::read_to_string(directory.path().join(name)).expect(name);
        for said in
            ["it crashed", "1 cells failed, of alike", "failed in repetition 1", "alike failed in 1 of 5 repetitions"]
        {
            assert!(text.contains(said), "{name} says nothing of '{said}'");
        }
        assert!(text.contains(verdict), "{name} has no verdict");
    }
    let csv = fs::read_to_string(directory.path().join("cells.csv")).expect("a table");
    assert!(csv.lines().any(|line| line.contains("alike") && line.ends_with(",failed,it crashed")), "{csv}");
    assert!(junit::of_run(&analysis).expect("XML").contains(r#"errors="1""#));
}

#[test]
fn a_baseline_that_failed_once_passes_nothing() {
    for baseline in ["base", "base (again)"] {
        let run = failing(baseline, 1);
        let decision = &decisions(&run, "alike", Metric::Iops)[1];
        assert!(matches!(decision, Ok(Verdict::CantTell { .. })), "{baseline}: {decision:?}");
    }
}

#[test]
fn an_option_with_the_better_mean_and_the_worse_tail_is_a_trade_off() {
    let run = run(|cell| {
        if let (Outcome::Measured(measured), "alike") = (&mut cell.outcome, cell.id.subject.as_str()) {
            let latency = measured.reads.as_mut().map(|reads| &mut reads.latency).expect("reads");
            (latency.mean, latency.p99) = (0.8 * latency.mean, 2.0 * latency.p99);
        }
    });
    let advice = Analysis::new(&run).advice();
    assert_eq!(advice[0].choice, "A trade-off: alike, or base for p99", "{advice:#?}");
    assert!(advice[0].reasons.iter().any(|why| why.starts_with("p99: ")), "{advice:#?}");
    assert!(!advice.iter().any(|one| one.choice == "alike instead"), "{advice:#?}");
}

#[test]
fn curves_give_advice_too() {
    let advice = Analysis::new(&run(|_| {})).advice();
    let curve = advice.iter().find(|one| one.aim.starts_with("Lowest latency as load rises")).expect("advice");
    assert_eq!(curve.choice, "base, or alike", "{curve:#?}");
    assert_eq!(curve.reasons.len(), 1, "one answer for all rates: {curve:#?}");
}

#[test]
fn nothing_is_on_the_front_by_chance() {
    let run = run(|_| {});
    let points = Analysis::new(&run).operating_points();
    let at =
        |subject: &str| points.iter().find(|one| one.subject == subject && one.load == "randread 4k QD64").unwrap();
    // Their ranges overlap in everything.
    assert!(!at("base").on_front && !at("alike").on_front, "{:#?}", at("base"));
    let mut faster = run.clone();
    for cell in faster.cells.iter_mut().filter(|cell| cell.id.subject == "alike") {
        if let Outcome::Measured(measured) = &mut cell.outcome {
            measured.reads.as_mut().expect("reads").latency.mean *= 0.8;
        }
    }
    let points = Analysis::new(&faster).operating_points();
    assert!(points.iter().any(|one| one.subject == "alike" && one.on_front), "{points:#?}");
}

#[test]
fn a_cell_that_failed_is_a_result_with_its_log_and_never_a_zero() {
    let run = run(|cell| {
        if cell.id.subject == "slow" && cell.id.load == "randread 4k QD1" {
            cell.outcome = Outcome::Failed { reason: "it crashed".into(), log: vec!["signal 11".into()] };
        }
    });
    let analysis = Analysis::new(&run);
    assert!(analysis.table.keys().any(|key| matches!(analysis.table.status(key), Status::Failed("it crashed", _))));
    let mark = &analysis.figures()[0].groups[0].marks[1];
    assert_eq!((mark.value, mark.note.as_deref()), (None, Some("failed: it crashed")));
    let directory = tempfile::tempdir().expect("a directory");
    egret_lab::report::write(&run, directory.path()).expect("a report");
    for name in ["report.html", "report.md"] {
        let text = fs::read_to_string(directory.path().join(name)).expect(name);
        for said in ["it crashed", "signal 11", "no /dev/kvm", "hung task"] {
            assert!(text.contains(said), "{name} says nothing of '{said}'");
        }
    }
    let csv = fs::read_to_string(directory.path().join("cells.csv")).expect("a table");
    assert_eq!(csv.lines().count(), 1 + run.cells.len());
    let columns = || csv.lines().map(|line| line.split(',').count());
    assert!(columns().min() == columns().max() && csv.starts_with("load,subject,"), "{csv}");
}

#[test]
fn a_cell_s_row_says_what_its_load_asks_for() {
    let columns = ["load", "rw", "bs_bytes", "iodepth", "numjobs", "rwmixread", "disks", "idle_disks"];
    let rows = |run: &Run| {
        let directory = tempfile::tempdir().expect("a directory");
        egret_lab::report::write(run, directory.path()).expect("a report");
        let mut table = csv::Reader::from_path(directory.path().join("cells.csv")).expect("a table");
        let names = table.headers().expect("columns").clone();
        let places = columns.map(|column| names.iter().position(|name| name == column).expect(column));
        let rows = table.records().map(|row| row.expect("a row"));
        rows.map(|row| places.map(|place| row[place].to_owned())).collect::<std::collections::BTreeSet<_>>()
    };
    let own = |row: [&str; 8]| row.map(str::to_owned);
    let random = rows(&run(|_| {}));
    assert!(random.contains(&own(["randread 4k QD64", "randread", "4096", "64", "1", "50", "1", "0"])), "{random:?}");
    let mut other = run(|_| {});
    other.plan.loads.change(|loads| loads[0].jobfile = Some("elsewhere.fio".into()));
    other.cells.iter_mut().for_each(|cell| cell.id.load = "elsewhere.fio".into());
    assert_eq!(rows(&other), [own(["elsewhere.fio", "", "", "", "", "", "", ""])].into());
}

#[test]
fn a_field_with_commas_or_quotes_is_one_field() {
    let run = run(|cell| {
        if let Outcome::Measured(measured) = &mut cell.outcome {
            measured.limit = Some(Bottleneck::Device("as fast as \"fio\", and no faster".into()));
        }
    });
    let directory = tempfile::tempdir().expect("a directory");
    egret_lab::report::write(&run, directory.path()).expect("a report");
    let csv = fs::read_to_string(directory.path().join("cells.csv")).expect("a table");
    let row = csv.lines().nth(1).expect("a cell");
    assert!(row.contains(r#","device: as fast as ""fio"", and no faster",false,"#), "{row}");
}

#[test]
fn the_tail_stands_beside_the_mean() {
    let run = run(|cell| {
        if let (Outcome::Measured(measured), "alike") = (&mut cell.outcome, cell.id.subject.as_str()) {
            measured.reads.as_mut().expect("reads").latency.p999 *= 4.0;
        }
    });
    let directory = tempfile::tempdir().expect("a directory");
    egret_lab::report::write(&run, directory.path()).expect("a report");
    let text = fs::read_to_string(directory.path().join("report.md")).expect("a text");
    let latency = text.split("## 2a: Latency").nth(1).expect("a chart").lines().nth(2).expect("a heading");
    assert!(latency.contains("| Mean latency, µs | p99, µs | p99.9, µs |"), "{latency}");
    let card = text.lines().find(|line| line.starts_with("- **Lowest latency, one request")).expect("a card");
    let said = ["base", "alike"].map(|best| format!("{best}: "));
    assert!(said.iter().any(|said| card.contains(said)) && card.contains(" µs, p99 ") && card.contains(" µs, p99.9 "));
    assert!(text.lines().all(|line| !line.starts_with("- **Most IOPS") || !line.contains("p99.9 ")), "of latency only");
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split('|').map(str::trim).collect()).collect();
    let heading = rows.iter().find(|row| row.get(1..4) == Some(&["Load", "Subject", "What"])).expect("comparisons");
    let place = heading.iter().position(|name| *name == "p99 (baseline’s), µs").expect("a column");
    assert_eq!(heading[place + 1], "p99.9 (baseline’s), µs");
    let of = |what: &str| {
        let mut all = rows.iter().filter(|row| row.len() == heading.len());
        let row = all.find(|row| row[1..4] == ["randwrite 4k QD8 curve, point 1", "alike", what]).expect(what);
        [place, place + 1].map(|column| row[column])
    };
    let both = |text: &str| -> [f64; 2] {
        let figure = |text: &str| text.replace('\u{202f}', "").parse().expect("a figure");
        let (ours, theirs) = text.strip_suffix(')').and_then(|text| text.split_once(" (")).expect("two");
        [figure(ours), figure(theirs)]
    };
    // 8 requests at a time at 5000 a second take 1600 µs.
    for (text, ours, theirs) in [(of("mean latency")[0], 4800.0, 4800.0), (of("mean latency")[1], 38_400.0, 9600.0)] {
        let [is, beside] = both(text);
        assert!((is / ours - 1.0_f64).abs() < 0.02 && (beside / theirs - 1.0_f64).abs() < 0.02, "{text}");
    }
    assert_eq!(of("CPU per I/O"), ["–"; 2], "what is no latency has no tail");
}

/// What is on a page before its script: what it links to on itself, and the names that it has for links.
fn links(page: &str) -> (Vec<&str>, Vec<&str>) {
    let page = page.split("<script type=\"application/json\"").next().expect("a page");
    let values = |begin| page.split(begin).skip(1).filter_map(|after| after.split('"').next()).collect();
    (values("href=\"#"), values(" id=\""))
}

#[test]
fn every_figure_leads_to_its_runs_in_one_click() {
    let mut run = failing("alike", 2);
    let cell = run.cells.iter().find(|cell| cell.failure().is_some()).map(|cell| cell.id.clone());
    run.incidents.push(Incident { at: 1_795_235_771, cell, source: "kernel".into(), text: "a panic".into() });
    let page = page(&run);
    let (to, names) = links(&page);
    for link in &to {
        assert_eq!(names.iter().filter(|name| name == &link).count(), 1, "{link}");
    }
    let all: std::collections::BTreeSet<_> = names.iter().collect();
    assert_eq!(all.len(), names.len(), "{names:?}");
    let part = |begin: &str, end: &str| {
        let part = page.split(begin).nth(1).and_then(|after| after.split(end).next());
        links(part.unwrap_or_else(|| panic!("{begin}"))).0
    };
    let is_run = |link: &&str| link.starts_with("runs-randread-4k-qd");
    for begin in [
        "class=\"advice\"",
        "All operating points",
        "Every comparison",
        "id=\"chart-2a\"",
        "id=\"chart-2k\"",
        "<h4>Published: ",
        "id=\"cpu\"",
        "Last lines",
        "Said meanwhile",
    ] {
        assert!(
            part(begin, if begin.starts_with("class") { "</ul>" } else { "</table>" }).iter().any(&is_run),
            "{begin}"
        );
    }
    assert!(
        part("id=\"verdicts\"", "<details").contains(&"verdict-randread-4k-qd64--alike--iops"),
        "of those that fail the first"
    );
    assert!(part("<header>", "</header>").contains(&"verdicts"));
}

/// The page of a run.
fn page(run: &Run) -> String {
    let directory = tempfile::tempdir().expect("a directory");
    egret_lab::report::write(run, directory.path()).expect("a report");
    fs::read_to_string(directory.path().join("report.html")).expect("a page")
}

#[test]
fn a_page_says_whose_open_loops_fio_counted_from_the_submission() {
    const CHART: &str = "fio’s open loops counted from submission";
    let own = page(&run(|_| {}));
    assert!(own.contains("from when a request was due. CPU time") && !own.contains(CHART));
    for stack in [Stack::Host, Stack::Guest, Stack::Ssh] {
        let mut fios = run(|_| {});
        fios.plan.subjects[2].stack = stack;
        let fios = page(&fios);
        assert!(fios.contains("from when a request was due; of alike from when fio submitted it"), "{stack:?}");
        assert_eq!(fios.matches(CHART).count(), 1, "{stack:?}: of the curve, and not of closed loops");
    }
    let mut rate = run(|_| {});
    rate.plan.subjects[2].stack = Stack::Guest;
    rate.plan.loads.change(|loads| loads[0].rate_iops = Some(1000.0));
    assert_eq!(page(&rate).matches(CHART).count(), 2);
    let mut application = run(|_| {});
    application.plan.subjects[2].stack = Stack::Guest;
    application.plan.loads.change(|loads| {
        (loads[1].name, loads[1].application) = (Some("randwrite 4k QD8 curve".into()), Some(Application::Pgbench));
    });
    assert!(page(&application).contains("from when a request was due. CPU time"), "so pgbench counts, too");
}

#[test]
fn a_page_says_that_nothing_went_wrong_only_as_far_as_somebody_looked() {
    let mut calm = run(|_| {});
    calm.incidents.clear();
    calm.cells.retain(|cell| matches!(cell.outcome, Outcome::Measured(_)));
    assert!(
        page(&calm)
            .contains("Nothing: every cell was measured, and neither this machine’s kernel nor a server complained.")
    );
    let unfinished = Run { ended: None, ..calm.clone() };
    assert!(page(&unfinished).contains("Nothing so far: every cell that ended was measured, and neither this"));
    let text = "what the kernel says cannot be read (Operation not permitted)";
    calm.host.warnings.push(Warning { about: Warning::KERNEL_LOG.into(), text: text.into() });
    let deaf = page(&calm);
    assert!(deaf.contains("and no server complained. What the kernel said could not be read.") && deaf.contains(text));
    assert!(!deaf.contains("neither this"));
}

#[test]
fn the_hottest_symbols_are_on_the_page_with_who_ran_them_and_how_sure_their_shares_are() {
    let symbol = |name: &str, comm: &str, percent| Symbol { name: name.into(), comm: comm.into(), percent };
    let run = run(|cell| {
        let is_meant = cell.id.subject == "slow" && cell.id.load == "randread 4k QD64";
        if let (Outcome::Measured(measured), true) = (&mut cell.outcome, is_meant) {
            measured.samples = 20_000;
            // It scatters from repetition to repetition.
            let hot = 6.0 + f64::from(cell.id.repetition % 2);
            measured.symbols = vec![symbol("hot", "io0", hot), symbol("hot", "fio", 1.0), symbol("a<b>", "", 2.0)];
            measured.symbols.extend((0..20).map(|number| symbol(&format!("cold {number}"), "fio", 0.5)));
        }
    });
    let directory = tempfile::tempdir().expect("a directory");
    let raw = directory.path().join("raw");
    fs::create_dir(&raw).expect("a directory");
    let names = ["randread-4k-QD64--slow--r1-p0", "randread-4k-QD64--slow--r10-p0", "elsewhere"];
    names.iter().for_each(|name| fs::write(raw.join(format!("{name}.callgraph")), "").expect("a file"));
    fs::write(raw.join(format!("{}.json", names[0])), "").expect("a file");
    egret_lab::report::write(&run, directory.path()).expect("a report");
    let [page, text] = ["report.html", "report.md"].map(|name| {
        let text = fs::read_to_string(directory.path().join(name)).expect(name);
        text.split(if name.ends_with("md") { "## Hottest symbols" } else { "id=\"symbols\"" })
            .nth(1)
            .expect(name)
            .to_owned()
    });
    // Of 7, 8, 7, 8, 7 the mean is 7.4, and its standard error 0.245.
    let (at, after) =
        (text.find("| hot | io0, fio | 7.40 % [6.72, 8.08] | 100\u{202f}000 |"), text.find("| a&lt;b> |  | 2.00 % ["));
    assert!(at.is_some() && after > at, "{text}");
    assert_eq!(text.matches("| cold ").count(), 8, "ten are shown");
    assert!(page.contains("7.40 % [6.72, 8.08]") && page.contains("href=\"#runs-randread-4k-qd64--slow\">slow</a>"));
    let graphs: Vec<&str> = page.split("href=\"raw/").skip(1).filter_map(|after| after.split('"').next()).collect();
    let expected = ["callgraph", "callgraph", "json"].map(|kind| format!("{}.{kind}", names[0]));
    assert_eq!(graphs, expected, "at the symbols, and at its run with its other files");
    assert!(!self::page(&run).contains("href=\"raw/"), "what is not there has no link");
}

#[test]
fn several_runs_make_a_page_over_time_that_says_when_something_was_lost() {
    let before = run(|_| {});
    let mut after = run(|cell| {
        if let (Outcome::Measured(measured), "alike") = (&mut cell.outcome, cell.id.subject.as_str()) {
            let reads = measured.reads.as_mut().expect("reads");
            reads.requests /= 2;
        }
    });
    after.started += 86_400;
    let named = |name: &str, run: &Run| (format!("{name}/report.html"), run.clone());
    // In whatever order they come.
    let page = report::over_time(&[named("new", &after), named("old", &before)]).expect("a page");
    let (old, new) = (page.find("old/report.html").expect("the old"), page.find("new/report.html").expect("the new"));
    assert!(old < new && page[new..].contains(r#"<span class="verdict fail">fail</span>"#));
    assert!(!page[old..new].contains(r#"class="verdict fail">fail</span> of 1"#) && page.contains("<svg "));
    assert!(!page.contains("</script><b>guest") && !page.contains("src=\"http"));
    assert!(page.contains("; nothing was measured of &lt;/script&gt;&lt;b&gt;guest under "), "{page}");
    let mut other = run(|_| {});
    other.plan.name = "another".into();
    let error = report::over_time(&[named("old", &before), named("other", &other)]).unwrap_err();
    assert!(error.starts_with("the runs are of several plans: "), "{error}");
}

#[test]
fn the_page_over_time_has_contents_and_each_point_and_names_what_failed() {
    let before = failing("alike", 5);
    let mut after = run(|cell| {
        let is_meant = cell.id.subject == "slow" && cell.id.point == 2 && cell.id.repetition < 2;
        if is_meant {
            cell.outcome = Outcome::Failed { reason: "it hung".into(), log: Vec::new() };
        }
    });
    after.started += 86_400;
    let runs = [("old/report.html".to_owned(), before), ("new/report.html".to_owned(), after)];
    let page = report::over_time(&runs).expect("a page");
    let (to, names) = links(&page);
    let parts = ["runs", "load-randread-4k-qd1", "load-randread-4k-qd64", "load-randwrite-4k-qd8-curve"];
    assert_eq!(to, parts);
    assert!(parts.iter().all(|part| names.contains(part)), "{names:?}");
    let row = |begin: &str| {
        let row = page.split("<tr><td>").find(|row| row.starts_with(begin)).expect(begin);
        row.split("</tr>").next().expect("a row").to_owned()
    };
    for point in 1..=3 {
        assert!(row(&format!("alike, point {point}<")).contains("<circle "), "{point}");
    }
    let hung = row("slow, point 2<");
    let said = ["href=\"new/report.html#wrong\"", "slow failed in 2 of 5 repetitions: it hung"];
    assert!(said.iter().all(|said| hung.contains(said)) && hung.contains("</text>"), "{hung}");
    assert!(hung.contains("href=\"old/report.html#runs-randwrite-4k-qd8-curve--slow\""), "{hung}");
    assert!(!row("slow, point 1<").contains("#wrong"));
    // Of a place where all failed, too, and the last that was measured is not called the newest.
    let crashed = page.split("id=\"load-randread-4k-qd64\"").nth(1).expect("a load");
    let crashed = crashed.split("<tr><td>alike").nth(1).and_then(|row| row.split("</tr>").next()).expect("a row");
    assert!(crashed.contains("alike failed in 5 of 5 repetitions: it crashed"), "{crashed}");
    assert!(page.contains("href=\"old/report.html#wrong\">5 cells failed, of alike.</a>"));
}

#[test]
fn a_name_cannot_leave_its_place_on_the_page() {
    let directory = tempfile::tempdir().expect("a directory");
    egret_lab::report::write(&run(|_| {}), directory.path()).expect("a report");
    let page = fs::read_to_string(directory.path().join("report.html")).expect("a page");
    assert!(!page.contains("</script><b>guest") && page.contains("powersave &amp; &lt;slow&gt;"));
    assert!(!page.contains("src=\"http") && !page.contains("href=\"http"));
}

#[test]
fn a_run_of_which_nothing_ended_yet_has_a_report() {
    let run = Run { cells: Vec::new(), ended: None, ..run(|_| {}) };
    let directory = tempfile::tempdir().expect("a directory");
    egret_lab::report::write(&run, directory.path()).expect("a report");
}

#[test]
fn a_browser_tells_the_reader_whose_tail_is_better() {
    let Some(mut browser) = Browser::start_or_skips(1280, 900) else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let mut answer = |faster: f64| {
        let run = run(|cell| {
            if let (Outcome::Measured(measured), "alike") = (&mut cell.outcome, cell.id.subject.as_str()) {
                measured.seconds /= faster;
                let latency = measured.reads.as_mut().map(|reads| &mut reads.latency).expect("reads");
                (latency.mean, latency.p99) = (latency.mean / faster, 2.0 * latency.p99);
            }
        });
        egret_lab::report::write(&run, directory.path()).expect("a report");
        browser.open(&directory.path().join("report.html"));
        let answer = browser.evaluate("document.querySelector('#answer').innerText");
        assert_eq!(browser.complaints, Vec::<String>::new());
        answer.as_str().expect("a text").to_owned()
    };
    let trade_off = answer(1.2);
    assert!(trade_off.starts_with("Choose alike, or base") && trade_off.contains(" for p99: "), "{trade_off}");
    let alike = answer(1.005);
    assert!(alike.starts_with("Choose base: ") && !alike.contains("alike"), "{alike}");
}

#[test]
fn a_browser_chooses_by_latency_at_a_rate_that_all_reach() {
    let Some(mut browser) = Browser::start_or_skips(1280, 900) else { return };
    let directory = tempfile::tempdir().expect("a directory");
    // Whoever has a few requests more by chance has three times the latency.
    for (fast, slow) in [("base", "alike"), ("alike", "base")] {
        let mut run = run(|cell| {
            let Outcome::Measured(measured) = &mut cell.outcome else { return };
            let is_slow = cell.id.subject.starts_with(slow);
            let reads = measured.reads.as_mut().expect("reads");
            reads.requests = if is_slow { 50_010 } else { 50_000 };
            reads.latency.mean = if is_slow { 300_000.0 } else { 100_000.0 };
            measured.offered_iops = Some(10_000.0);
        });
        run.cells.retain(|cell| cell.id.load == "randread 4k QD1" && cell.id.subject != "slow");
        run.plan.loads.change(|loads| loads[0].rate_iops = Some(10_000.0));
        egret_lab::report::write(&run, directory.path()).expect("a report");
        browser.open(&directory.path().join("report.html"));
        let answer = browser.evaluate("document.querySelector('#answer').innerText");
        let answer = answer.as_str().expect("a text");
        assert!(answer.starts_with(&format!("Choose {fast}: ")) && !answer.contains(slow), "{answer}");
    }
    assert_eq!(browser.complaints, Vec::<String>::new());
}

#[test]
fn a_browser_draws_the_report_and_answers_the_reader() {
    let Some(mut browser) = Browser::start_or_skips(1280, 900) else { return };
    let directory = tempfile::tempdir().expect("a directory");
    egret_lab::report::write(&run(|_| {}), directory.path()).expect("a report");
    browser.open(&directory.path().join("report.html"));
    let drawn = "[...document.querySelectorAll('.chart')].map(one => one.querySelectorAll('svg path').length)";
    let paths = browser.evaluate(drawn);
    assert!(
        paths.as_array().is_some_and(|all| all.len() == 5 && all.iter().all(|one| one.as_u64() > Some(5))),
        "{paths}"
    );

    let [left, top, width, _] = browser.bounds("#chart-2a .chart");
    browser.mouse("mouseMoved", left + width / 3.0, top + 44.0);
    browser.wait("document.querySelector('#chart-2a .chart').innerText.includes('median of 5')");

    let labels = "document.querySelector('#chart-2g svg').textContent";
    let before = browser.evaluate(labels);
    let [left, top, width, height] = browser.bounds("#chart-2g .chart");
    browser.mouse("mouseMoved", left + width / 2.0, top + height / 3.0);
    browser.mouse("mouseWheel", left + width / 2.0, top + height / 3.0);
    browser.wait(&format!("{labels} !== {before}"));

    let answer = "document.querySelector('#answer').innerText";
    let before = browser.evaluate(answer);
    assert!(
        before.as_str().is_some_and(|text| text.contains("Choose ") && text.contains("No meaningful difference")),
        "{before}"
    );
    let slide = |to: u32| {
        format!(
            "(() => {{ const one = document.querySelector('#latency'); one.value = {to}; one.dispatchEvent(new Event('input')); }})()"
        )
    };
    browser.evaluate(&slide(20));
    let rows = "document.querySelectorAll('#recommended tbody tr').length";
    assert_ne!(browser.evaluate(answer), before);
    assert_eq!(browser.evaluate("document.querySelector('#latency-shown').value.startsWith('up to')"), true);
    let fitting = browser.evaluate(rows);
    assert_eq!(fitting, 2, "the slow one is too slow");
    browser.evaluate("(() => { const one = document.querySelector('#workload'); one.value = 'randwrite 4k'; one.dispatchEvent(new Event('change')); })()");
    browser.wait(&format!("{answer}.includes('IOPS')"));

    assert_eq!(browser.complaints, Vec::<String>::new());
}

#[test]
fn what_the_host_reaches_is_a_line_across_the_bars_of_its_load() {
    let Some(mut browser) = Browser::start_or_skips(1280, 900) else { return };
    let directory = tempfile::tempdir().expect("a directory");
    for (of, expected) in [(Stack::Egret, 0), (Stack::Host, 1)] {
        let mut run = run(|_| {});
        run.plan.subjects[2].stack = of;
        egret_lab::report::write(&run, directory.path()).expect("a report");
        browser.open(&directory.path().join("report.html"));
        let all = "[...document.querySelectorAll('#chart-2a svg path[stroke-dasharray]')]";
        let dashed = format!("{all}.filter(one => one.getBBox().height > 0).length");
        assert_eq!(browser.evaluate(&dashed), expected, "{of:?}");
    }
    let across = browser.evaluate(
        "(() => { const { series, yAxis } = echarts.getInstanceByDom(document.querySelector('#chart-2a .chart')).getOption(); \
         const [bars, host] = ['bar', 'the host'].map(one => series.find(all => all.type === one || all.name === one).data); \
         return host.slice(0, 2).map(([value, key]) => [bars.findIndex(bar => bar.value === value), yAxis[0].data.indexOf(key)]); })()",
    );
    assert_eq!(across, serde_json::json!([[3, 0], [3, 4]]), "from the heading to the last, at its own bar's end");
}

#[test]
fn a_click_on_what_a_chart_shows_leads_to_its_runs() {
    let Some(mut browser) = Browser::start_or_skips(1280, 900) else { return };
    let directory = tempfile::tempdir().expect("a directory");
    egret_lab::report::write(&run(|_| {}), directory.path()).expect("a report");
    // Bars are clicked in their middle, and points that nothing is drawn over.
    for (chart, is_bar, runs) in [
        ("#chart-2a .chart", true, "randread-4k-qd1--base"),
        ("#chart-2g .chart", false, "randwrite-4k-qd8-curve--alike"),
        ("#chart-2k .chart", false, "randwrite-4k-qd8-curve--alike"),
        ("#front", false, "randread-4k-qd1--alike"),
        ("#ledger", true, "randread-4k-qd1--base"),
    ] {
        browser.open(&directory.path().join("report.html"));
        let [left, top, ..] = browser.bounds(chart);
        let at = browser.evaluate(&format!(
            "(() => {{ const chart = echarts.getInstanceByDom(document.querySelector('{chart}')), all = chart.getOption().series; \
             const seriesIndex = {is_bar} ? 0 : all.length - 1, values = all[seriesIndex].data.map(one => one.value ?? one); \
             const first = values.findIndex(value => value !== 0), value = values[first]; \
             return chart.convertToPixel({{ seriesIndex }}, {is_bar} ? [value / 2, first] : value); }})()"
        ));
        let [x, y] = [0, 1].map(|index| at[index].as_f64().expect("a place"));
        browser.click(left + x, top + y);
        browser.wait(&format!("location.hash === '#runs-{runs}'"));
        // Its rows were folded away.
        browser.wait("(at => at.width > 0 && at.top >= 0 && at.bottom <= innerHeight)(document.querySelector(':target').getBoundingClientRect())");
    }
    browser.open(&directory.path().join("report.html"));
    let missing = "[...document.querySelectorAll('a[href^=\"#\"]')].filter(one => !document.getElementById(one.hash.slice(1))).length";
    assert_eq!(browser.evaluate(missing), 0);
    assert_eq!(
        browser.evaluate("document.querySelector('#recommended a').hash.startsWith('#runs-randread-4k-qd')"),
        true
    );
    assert_eq!(browser.complaints, Vec::<String>::new());
}

#[test]
fn a_click_leads_to_the_runs_of_a_subject_whose_name_is_in_another_script() {
    let Some(mut browser) = Browser::start_or_skips(1280, 900) else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let mut run = run(|cell| match cell.id.subject.as_str() {
        "slow" => cell.id.subject = "Старый".into(),
        "alike" => cell.id.subject = "新的②".into(),
        _ => {}
    });
    (run.plan.subjects[1].name, run.plan.subjects[2].name) = ("Старый".into(), "新的②".into());
    egret_lab::report::write(&run, directory.path()).expect("a report");
    browser.open(&directory.path().join("report.html"));
    let there = "['Старый', '新的②'].map(subject => { location.hash = runsOf('randread 4k QD1', subject); \
                 return document.querySelector(':target')?.innerText.includes(subject); })";
    assert_eq!(browser.evaluate(there), serde_json::json!([true, true]));
    assert_eq!(browser.complaints, Vec::<String>::new());
}

/// What the reader of a page cannot read for want of contrast: of each text the least of it, beside its background.
const FAINT: &str = r"(() => {
    const rgb = text => (text.match(/[\d.]+/g) ?? []).map(Number);
    const light = colour => colour.slice(0, 3).map(one => (one /= 255) <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4)
        .reduce((sum, one, index) => sum + one * [.2126, .7152, .0722][index], 0);
    const under = one => {
        for (; one; one = one.parentElement) {
            const colour = rgb(getComputedStyle(one).backgroundColor);
            if (colour.length === 3) return colour;
        }
        return [255, 255, 255];
    };
    const faint = [];
    for (const one of document.querySelectorAll('body *')) {
        const hasText = [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim());
        if (!hasText || !one.getClientRects().length || one.closest('script, option')) continue;
        const colour = rgb(one.closest('svg') ? getComputedStyle(one).fill : getComputedStyle(one).color);
        const [a, b] = [light(colour), light(under(one))];
        const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (contrast < 4) faint.push(contrast.toFixed(1) + ': ' + one.outerHTML.slice(0, 160));
    }
    return faint;
})()";

/// Whether the page is dark.
const IS_DARK: &str = "getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 27)'";

#[test]
fn a_browser_shows_pages_in_the_dark_and_in_the_light_and_prints_all_of_them_on_white() {
    let Some(mut browser) = Browser::start_or_skips(1280, 900) else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let mut grave = failing("alike", 1);
    grave.host.warnings.push(Warning { about: "not-preconditioned".into(), text: "it looks empty".into() });
    egret_lab::report::write(&grave, directory.path()).expect("a report");
    let over_time = directory.path().join("time");
    fs::create_dir(&over_time).expect("a directory");
    let runs = ["old", "new"].map(|name| (format!("{name}/report.html"), grave.clone()));
    fs::write(over_time.join("report.html"), report::over_time(&runs).expect("a page")).expect("a page");
    for page in [directory.path(), &over_time] {
        for scheme in ["dark", "light"] {
            // Whose system changes while the page is open.
            browser.show("", if scheme == "dark" { "light" } else { "dark" });
            browser.open(&page.join("report.html"));
            browser.show("", scheme);
            assert_eq!(browser.evaluate(IS_DARK), scheme == "dark");
            browser.wait(
                "(inks => [...document.querySelectorAll('#chart-2a svg text')].every(one => inks.includes(one.getAttribute('fill'))))\
                 (['--ink', '--quiet'].map(name => getComputedStyle(document.documentElement).getPropertyValue(name)))",
            );
            let colours = "(one => one && [getComputedStyle(one).color, getComputedStyle(one.previousSibling).color])(document.querySelector('.warnings .grave'))";
            let red = if scheme == "dark" { "rgb(255, 138, 122)" } else { "rgb(192, 57, 43)" };
            let warned = browser.evaluate(colours);
            assert!(warned.is_null() == (page != directory.path()), "{warned}");
            assert!(warned.is_null() || (warned[0] == red && warned[1] != red), "{scheme}: {warned}");
            browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)");
            assert_eq!(browser.evaluate(FAINT), serde_json::json!([]), "{scheme}");
            browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = false)");
            // What is seen once all that the page does for paper is done, and before it is taken back.
            browser.evaluate(
                "addEventListener('beforeprint', () => window.seen = { \
                 folded: document.querySelectorAll('details:not([open])').length, \
                 ink: [...new Set([...document.querySelectorAll('#chart-2a svg text')].map(one => one.getAttribute('fill')))] })",
            );
            browser.print();
            assert_eq!(browser.evaluate("window.seen.folded"), 0);
            if page == directory.path() {
                let ink = browser.evaluate("window.seen.ink");
                assert_eq!(
                    ink,
                    serde_json::json!(["#5b6470", "#1b1f24"]),
                    "charts of a {scheme} screen are dark on white"
                );
            }
            assert_eq!(browser.evaluate("document.querySelectorAll('details[open]').length"), 0, "as it was");
            // A sheet of A4 between margins of a centimetre, on which nothing can be scrolled.
            browser.show("print", scheme);
            browser.resize(718, 1047);
            browser.evaluate("dispatchEvent(new Event('beforeprint'))");
            let cut = "[...document.querySelectorAll('body, .scroll, .chart, pre')] \
                       .filter(one => one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight + 1) \
                       .map(one => one.outerHTML.slice(0, 200) + one.scrollWidth)";
            assert_eq!(browser.evaluate(cut), serde_json::json!([]));
            assert_eq!(browser.evaluate("getComputedStyle(document.body).backgroundColor"), "rgb(255, 255, 255)");
            assert_eq!(browser.evaluate("getComputedStyle(document.querySelector('nav')).display"), "none");
            assert_eq!(browser.evaluate(FAINT), serde_json::json!([]), "on paper, of a {scheme} screen");
            browser.resize(1280, 900);
        }
    }
    assert_eq!(browser.complaints, Vec::<String>::new());
}

#[test]
fn a_browser_goes_where_the_contents_lead_and_zooms_where_a_plan_asks_for_it() {
    let Some(mut browser) = Browser::start_or_skips(1280, 900) else { return };
    let directory = tempfile::tempdir().expect("a directory");
    let mut run = run(|_| {});
    let mut zoomed = run.plan.charts[1].clone();
    (zoomed.id, zoomed.zoom) = ("2h".into(), Some(3.0));
    run.plan.charts.insert(2, zoomed);
    egret_lab::report::write(&run, directory.path()).expect("a report");
    browser.open(&directory.path().join("report.html"));
    let ends = |browser: &mut Browser, chart: &str| {
        let end = browser.evaluate(&format!(
            "(() => {{ const model = echarts.getInstanceByDom(document.querySelector('#chart-{chart} .chart')).getModel(); \
             const shown = data.figures.find(one => one.anchor === 'chart-{chart}'); \
             const values = shown.groups.flatMap(group => group.marks).flatMap(mark => mark.value ? [mark.value.median] : []); \
             return [model.getComponent('yAxis').axis.scale.getExtent()[1] / Math.min(...values), Math.max(...values) / Math.min(...values)]; }})()"
        ));
        [0, 1].map(|index| end[index].as_f64().expect("a number"))
    };
    let ([all, most], [near, _]) = (ends(&mut browser, "2g"), ends(&mut browser, "2h"));
    assert!(most > 3.0 && all >= most && (near - 3.0).abs() < 1e-6, "{all} {most} {near}");

    let parts = "[...document.querySelectorAll('nav a')].map(one => one.hash)";
    let sections = "[...document.querySelectorAll('main > section')].map(one => '#' + one.id)";
    assert_eq!(browser.evaluate(parts), browser.evaluate(sections), "all of the page, in its order");
    // A scroll that is smooth would be under way when the next begins.
    browser.evaluate("document.documentElement.style.scrollBehavior = 'auto'");
    for index in [6, 1, 4] {
        // Below the contents, which stay where they are.
        browser.evaluate(&format!("document.querySelectorAll('nav a')[{index}].click()"));
        browser.wait(
            "(at => at.top >= document.querySelector('nav').getBoundingClientRect().bottom && at.bottom <= innerHeight)\
             (document.querySelector(':target h2').getBoundingClientRect())",
        );
        assert_eq!(browser.evaluate("document.querySelector('nav').getBoundingClientRect().top"), 0);
    }
    assert_eq!(browser.complaints, Vec::<String>::new());
}
