//! What is said of made-up runs, in words.

mod advice;

use super::choice::{Advice, OperatingPoint, Related};
use super::*;
use crate::results::{Bottleneck, Cell, CellId, Latency, Ledger, Measurement, Operations, Outcome};
use crate::statistics::Verdict;

/// What a subject does under a load: its IOPS, its mean and its 99th latency in microseconds, and the CPU time of a request.
type Does = [f64; 4];

/// Five repetitions of a plan, with a thousandth of noise, in which each subject does what `does` says of it under a load.
fn run(plan: &str, does: impl Fn(&str, &str, u32) -> Does) -> Run {
    repeated(5, plan, does)
}

/// The same with so many repetitions.
fn repeated(repetitions: u32, plan: &str, does: impl Fn(&str, &str, u32) -> Does) -> Run {
    let mut run = Run::of(&format!("name = 'p'\ntitle = '?'\nnoise-floor = false\n[disk]\ntype = 'null'\n{plan}"));
    run.ended = Some(1);
    let loads: Vec<_> = run.plan.loads.iter().map(|load| load.name.clone()).collect();
    for (load, repetition) in loads.iter().flat_map(|load| (0..repetitions).map(move |repetition| (load, repetition))) {
        for (index, subject) in run.plan.subjects.iter().enumerate() {
            let by = if (repetition as usize + index).is_multiple_of(2) { 1.001 } else { 1.0 };
            let [iops, mean, p99, cpu] = does(load, &subject.name, repetition).map(|value| value * by);
            let latency = Latency { mean: mean * 1e3, p99: p99 * 1e3, ..Latency::default() };
            let reads = Some(Operations { requests: iops as u64, bytes: 4096 * iops as u64, latency });
            let cpu = Ledger { server: Some((cpu * 1e3 * iops) as u64), ..Ledger::default() };
            let measured = Measurement { seconds: 1.0, reads, cpu, transactions: Some(iops), ..Measurement::default() };
            let id = CellId { load: load.clone(), subject: subject.name.clone(), repetition, point: 0 };
            run.cells.push(Cell { id, started: 0, outcome: Outcome::Measured(Box::new(measured)) });
        }
    }
    run
}

const ALIKE: Does = [100_000.0, 100.0, 200.0, 10.0];
const WORSE: Does = [80_000.0, 130.0, 260.0, 13.0];

const TWO: &str = "[[subject]]\nname = 'a'\nstack = 'egret'\n[[subject]]\nname = 'b'\nstack = 'egret'\n";
const HOST: &str = "[[subject]]\nname = 'host'\nstack = 'host'\n";
const LOAD: &str = "[[load]]\nname = 'one'\n";

fn which(run: &mut Run) {
    run.plan.asks = Asks::Which;
}

fn crash(run: &mut Run, subject: &str) {
    let cell = run.cells.iter_mut().find(|cell| cell.id.subject == subject).unwrap();
    cell.outcome = Outcome::Failed { reason: "it crashed".into(), log: Vec::new() };
}

#[test]
fn a_plan_s_verdict_is_one_line_in_the_words_of_what_it_asks() {
    let plan = [TWO, HOST, LOAD].concat();
    let with = |of_b: Does| run(&plan, |_, subject, _| if subject == "b" { of_b } else { ALIKE });
    let said = |run: &Run| {
        let analysis = Analysis::new(run);
        (analysis.overall(), analysis.failed_cells(), analysis.verdict())
    };
    let (mut alike, mut worse) = (with(ALIKE), with(WORSE));
    // fio on the host, in two metrics.
    let rest = "0 can't be told; 2 more decide nothing";
    assert_eq!(said(&alike), (Overall::Pass, 0, format!("pass: of 2 comparisons 2 passed, 0 failed, {rest}")));
    assert_eq!(said(&worse), (Overall::Fail, 0, format!("fail: of 2 comparisons 0 passed, 2 failed, {rest}")));
    [&mut alike, &mut worse].into_iter().for_each(which);
    let beside = |passed: u32, failed: u32| {
        format!(
            "beside a, {passed} times no worse, {failed} times slower or with more CPU, 0 times nobody can tell; 2 more \
             decide nothing"
        )
    };
    assert_eq!(said(&alike), (Overall::Pass, 0, format!("none is worse: {}", beside(2, 0))));
    assert_eq!(said(&worse), (Overall::Fail, 0, format!("they differ: {}", beside(0, 2))));
    // Nothing passes where something failed, be it only the reference; what is lost is a fail all the same.
    [&mut alike, &mut worse].into_iter().for_each(|run| crash(run, "host"));
    let failed = "; of 15 cells 1 failed";
    assert_eq!(said(&alike), (Overall::CantTell, 1, format!("can't tell: {}{failed}", beside(2, 0))));
    assert_eq!(said(&worse), (Overall::Fail, 1, format!("fail: {}{failed}", beside(0, 2))));
    alike.plan.asks = Asks::Whether;
    let count = format!("of 2 comparisons 2 passed, 0 failed, {rest}");
    assert_eq!(said(&alike), (Overall::CantTell, 1, format!("can't tell: {count}{failed}")));

    let mut alone = run(&format!("{TWO}{LOAD}"), |_, _, _| ALIKE);
    which(&mut alone);
    let text = said(&alone).2;
    assert!(text.ends_with("0 times nobody can tell"), "nothing decides nothing: {text}");
    alone.cells.retain(|cell| cell.id.subject == "a");
    let nothing = "can't tell: no comparison decides anything; nothing was measured of b under one";
    assert_eq!(said(&alone), (Overall::CantTell, 0, nothing.into()));
}

#[test]
fn a_run_that_is_not_whole_passes_nothing_and_says_what_it_lacks() {
    let plan = format!("{TWO}[[subject]]\nname = 'c'\nstack = 'egret'\n{LOAD}[[load]]\nname = 'two'\n{CURVE}");
    let whole = || {
        let mut run = run(&plan, |_, _, _| ALIKE);
        let points = run.cells.iter().filter(|cell| cell.id.load == "two").cloned().collect::<Vec<_>>();
        run.cells.extend(points.into_iter().map(|cell| Cell { id: CellId { point: 1, ..cell.id }, ..cell }));
        run
    };
    let said = |run: &Run| {
        let analysis = Analysis::new(run);
        let verdict = analysis.verdict();
        let skipped = crate::compare::junit::of_run(&analysis).unwrap().matches("<skipped").count();
        assert!(verdict.ends_with(&analysis.gaps()) && verdict.starts_with(analysis.overall().word()), "{verdict}");
        (analysis.overall(), analysis.gaps(), skipped)
    };
    assert_eq!(said(&whole()), (Overall::Pass, String::new(), 0));
    let mut unfinished = whole();
    unfinished.ended = None;
    assert_eq!(said(&unfinished), (Overall::CantTell, "; not finished".into(), 1));

    let without = |is_meant: fn(&CellId) -> bool| {
        let mut run = whole();
        run.cells.retain(|cell| !is_meant(&cell.id));
        run
    };
    let gap = |text: &str| format!("; nothing was measured of {text}");
    let nowhere = without(|id| id.subject == "c");
    assert_eq!(said(&nowhere), (Overall::CantTell, gap("c under one and in 2 other places"), 3));
    let no_point = without(|id| id.subject == "c" && id.point == 1);
    assert_eq!(said(&no_point), (Overall::CantTell, gap("c under two, point 1"), 1));
    let no_load = without(|id| id.load == "two");
    assert_eq!(said(&no_load), (Overall::CantTell, gap("a under two and in 5 other places"), 6));
    let some = without(|id| id.subject == "c" && id.repetition == 3 && id.point == 0);
    let few = |of: &str| format!("; c under one was measured in {of} of 5 repetitions only");
    // Each of its comparisons, in two metrics, is skipped, and that all of it was measured, under two loads.
    assert_eq!(said(&some), (Overall::CantTell, few("4") + ", as in 1 other places", 6));
    // Of one that is not finished that goes without saying.
    assert_eq!(said(&Run { ended: None, ..some }), (Overall::CantTell, "; not finished".into(), 5));
    let mut cannot = whole();
    for cell in cannot.cells.iter_mut().filter(|cell| cell.id.load == "one" && cell.id.subject == "c") {
        if cell.id.repetition > 0 {
            cell.outcome = Outcome::Impossible { reason: "no /dev/kvm".into() };
        }
    }
    assert_eq!(
        said(&cannot),
        (Overall::CantTell, few("1"), 3),
        "one pair has the others' variance, and passes nothing"
    );
    let place = tempfile::tempdir().unwrap();
    crate::report::write(&cannot, place.path()).unwrap();
    let text = std::fs::read_to_string(place.path().join("report.md")).unwrap();
    assert!(text.contains("| cannot run here, in 4 of 5 repetitions | no /dev/kvm |"), "{text}");
    let mut impossible = whole();
    for cell in impossible.cells.iter_mut().filter(|cell| cell.id.subject == "c" && cell.id.load == "one") {
        cell.outcome = Outcome::Impossible { reason: "no /dev/kvm".into() };
    }
    assert_eq!(said(&impossible), (Overall::CantTell, gap("c under one"), 1));
    let xml = crate::compare::junit::of_run(&Analysis::new(&impossible)).unwrap();
    assert!(xml.contains("cannot run here: no /dev/kvm"), "{xml}");

    // What nobody asked for is not missing, and what a load is not put on neither; what failed is told as that.
    let mut asked = nowhere.clone();
    asked.cells.retain(|cell| cell.id.load == "one");
    asked.plan.loads.change(|loads| loads[0].subjects = vec!["a".into(), "b".into()]);
    asked.only = Some("one".into());
    assert_eq!(said(&asked), (Overall::Pass, String::new(), 0));
    let mut failed = whole();
    failed.cells.iter_mut().filter(|cell| cell.id.subject == "c").for_each(|cell| {
        cell.outcome = Outcome::Failed { reason: "it crashed".into(), log: Vec::new() };
    });
    assert_eq!(Analysis::new(&failed).gaps(), "");
}

#[test]
fn a_figure_that_the_baseline_tells_and_the_subject_does_not_passes_nothing() {
    let without_cpu = |lacks: fn(&CellId) -> bool| {
        let mut run = run(&[TWO, LOAD].concat(), |_, _, _| ALIKE);
        run.cells.iter_mut().filter(|cell| lacks(&cell.id)).for_each(|cell| measured(cell).cpu = Ledger::default());
        let analysis = Analysis::new(&run);
        (analysis.overall(), analysis.judged[1].note.clone())
    };
    assert_eq!(without_cpu(|id| id.subject == "b" && id.repetition > 0), (Overall::CantTell, None));
    assert_eq!(without_cpu(|id| id.subject == "b"), (Overall::CantTell, Some("b does not tell it".into())));
    // Where the baseline does not, nothing is compared.
    assert_eq!(without_cpu(|id| id.subject == "a"), (Overall::Pass, None));
    assert_eq!(without_cpu(|_| true), (Overall::Pass, None));
}

#[test]
fn a_ci_sees_that_a_run_in_which_nothing_decides_is_no_pass() {
    let mut run = run(&[TWO, LOAD].concat(), |_, _, _| ALIKE);
    run.cells.iter_mut().for_each(|cell| measured(cell).functional_only = true);
    let analysis = Analysis::new(&run);
    assert_eq!((analysis.overall(), analysis.gaps()), (Overall::CantTell, String::new()));
    let xml = crate::compare::junit::of_run(&analysis).unwrap();
    assert_eq!((xml.matches("<testcase").count(), xml.matches("<skipped").count()), (1, 1), "{xml}");
    assert!(xml.contains("no comparison decides anything; 2 more decide nothing"), "{xml}");
}

#[test]
fn what_a_comparison_is_called_that_fails_is_what_was_lost() {
    let words = |asks: Asks, crashes: bool| {
        let mut run = run(&format!("{TWO}{LOAD}"), |_, subject, _| if subject == "b" { WORSE } else { ALIKE });
        run.plan.asks = asks;
        if crashes {
            crash(&mut run, "b");
        }
        Analysis::new(&run).judged.iter().map(|one| one.fail).collect::<Vec<_>>()
    };
    assert_eq!(words(Asks::Whether, false), ["fail", "fail"]);
    assert_eq!(words(Asks::Which, false), ["slower", "more CPU"]);
    assert_eq!(words(Asks::Which, true), ["fail", "more CPU"]);
}

fn aims(run: &Run) -> Vec<String> {
    Analysis::new(run).advice().into_iter().map(|Advice { aim, choice, .. }| format!("{aim}: {choice}")).collect()
}

#[test]
fn each_aim_is_answered_of_the_loads_that_it_is_of() {
    let across = "disks = 2\nacross_disks = true";
    let keys = ["", "iodepth = 4", "numjobs = 2", "disks = 2", "rate_iops = 1000", "application = 'pgbench'", across];
    let loads: String =
        keys.iter().enumerate().map(|(number, keys)| format!("[[load]]\nname = '{number}'\n{keys}\n")).collect();
    let run = run(&format!("{TWO}{loads}"), |_, subject, _| if subject == "b" { WORSE } else { ALIKE });
    assert_eq!(
        aims(&run),
        [
            "Lowest latency, one request at a time (0): a",
            "Lowest latency, one request at a time (6): a",
            "Most IOPS, many at a time (1): a",
            "Most IOPS, many at a time (2): a",
            "Most IOPS, many at a time (3): a",
            "Least CPU per request, one at a time (0): a",
            "Least CPU per request, one at a time (6): a",
            "Least CPU per request, many at a time (1): a",
            "Least CPU per request, many at a time (2): a",
            "Least CPU per request, many at a time (3): a",
            "5: transactions (5): a",
            "Leave out b: a instead",
        ]
    );
}

#[test]
fn of_somebodys_own_job_file_nobody_knows_how_many_requests_are_in_flight_or_which() {
    let guests = TWO.replace("egret", "guest");
    let plan =
        format!("{guests}{LOAD}[[load]]\nname = 'mine'\njobfile = 'mine.fio'\n[[load]]\nname = 'five'\ndisks = 5\n");
    let run = run(&plan, |_, subject, _| if subject == "b" { WORSE } else { ALIKE });
    assert_eq!(
        aims(&run),
        [
            "Lowest latency, one request at a time (one): a",
            "Most IOPS, many at a time (five): a",
            "Most IOPS (mine): a",
            "Least CPU per request, one at a time (one): a",
            "Least CPU per request, many at a time (five): a",
            "Least CPU per request (mine): a",
            "Leave out b: a instead",
        ]
    );
    let points = Analysis::new(&run).operating_points();
    let workload = |load: &str| points.iter().find(|one| one.load == load).unwrap().workload.as_str();
    assert_eq!(workload("one"), "randread 4k, in a guest");
    assert_eq!(workload("mine"), "mine, in a guest");
    assert_eq!(workload("five"), "randread 4k, 5 disks, in a guest");
}

#[test]
fn who_is_better_in_something_and_worse_in_nothing_that_is_known_replaces_the_other() {
    let leaves_out = |of_b: Does, wild: Option<usize>| {
        let run = run(&format!("{TWO}{LOAD}"), |_, subject, repetition| {
            let mut does = if subject == "b" { of_b } else { ALIKE };
            // Up and down by so much that nobody can tell.
            if let (Some(at), "b") = (wild, subject) {
                does[at] *= [0.3, 3.0, 1.0, 0.4, 2.5][repetition as usize];
            }
            does
        });
        let mut advice = Analysis::new(&run).advice();
        advice.retain(|one| one.aim.starts_with("Leave out"));
        advice.into_iter().map(|one| (one.aim, one.reasons.join("; "))).collect::<Vec<_>>()
    };
    let better =
        |what: &str| vec![("Leave out b".to_owned(), format!("nowhere slower or dearer, and better in {what}"))];
    let all = "IOPS under one, mean latency under one, p99 latency under one, CPU per I/O under one";
    assert_eq!(leaves_out(WORSE, None), better(all));
    assert_eq!(leaves_out([100_000.0, 100.0, 200.0, 13.0], None), better("CPU per I/O under one"));
    assert_eq!(leaves_out(ALIKE, None), [], "neither is better");
    assert_eq!(leaves_out([120_000.0, 80.0, 160.0, 13.0], None), [], "each is better in something");
    assert_eq!(leaves_out([100_000.0, 100.0, 300.0, 9.0], None), [], "a tail is something");
    let no_tail = "IOPS under one, mean latency under one, CPU per I/O under one";
    assert_eq!(leaves_out(WORSE, Some(2)), better(no_tail), "nobody knows of a tail that is worse");
    assert_eq!(leaves_out(WORSE, Some(3)), [], "it may take less CPU");
}

#[test]
fn who_is_alike_and_has_a_longer_tail_is_not_advised() {
    let plan = [TWO, LOAD, "[[load]]\nname = 'deep'\niodepth = 4\n"].concat();
    for (long, other) in [("a", "b"), ("b", "a")] {
        // It is even a little ahead in all else, by no more than matters.
        let does = |_: &str, subject: &str, _| if subject == long { [100_200.0, 99.8, 500.2, 9.98] } else { ALIKE };
        let run = run(&plan, does);
        let analysis = Analysis::new(&run);
        let advice = analysis.advice();
        assert_eq!(advice.len(), 5, "{advice:#?}");
        for Advice { aim, choice, reasons, .. } in &advice[..4] {
            assert_eq!(choice, other, "{aim}");
            assert!(reasons.contains(&format!("worse: {long} (p99 ×2.50)")), "{reasons:?}");
        }
        assert_eq!(advice[4].aim, format!("Leave out {long}"));
        let tails: Vec<_> = analysis.tails().into_iter().map(|one| (one.load, one.better, one.worse)).collect();
        assert_eq!(tails, ["deep", "one"].map(|load| (load.into(), other.into(), long.into())));
    }
}

#[test]
fn a_stall_that_the_mean_leaves_out_is_told_and_passes_only_where_the_baseline_stalls_as_well() {
    // What a subject does of its IOPS in a repetition, where it is not all.
    let with = |repetitions: u32, noise: f64, stalls: &[(&str, u32, f64)]| {
        let mut run = repeated(repetitions, &[TWO, LOAD].concat(), |_, subject, repetition| {
            let up = if (subject == "b") == repetition.is_multiple_of(3) { 1.0 + noise } else { 1.0 };
            let stalls = stalls.iter().filter(|(who, at, _)| *who == subject && [repetition, 99].contains(at));
            let [iops, rest @ ..] = ALIKE;
            let [mean, p99, cpu] = rest;
            [iops * up * stalls.map(|(.., by)| by).product::<f64>(), mean, p99, cpu]
        });
        run.plan.repetitions = repetitions;
        run
    };
    let said = |run: &Run| {
        let judged = Analysis::new(run).judged;
        (judged[0].decision.clone().unwrap(), judged[0].note.clone().map(|note| note.replace('\u{a0}', " ")))
    };
    let (pass, fail, open) = (Verdict::Pass, Verdict::Fail, Verdict::CantTell { more_pairs: None });
    let note = |text: &str| Some(text.to_owned());
    assert_eq!(said(&with(12, 0.01, &[])), (pass, None));
    let stalled = with(12, 0.01, &[("b", 4, 0.1)]);
    assert_eq!(said(&stalled), (open, note("one of 12 pairs left out: −90.1 %")));
    let two = with(16, 0.01, &[("b", 4, 0.1), ("b", 9, 0.2)]);
    assert_eq!(said(&two), (open, note("2 of 16 pairs left out, the worst: −90.1 %")));
    // Of seven none is left out: it is in the scatter.
    let seven = said(&with(7, 0.01, &[("b", 4, 0.1)]));
    assert!(matches!(seven, (Verdict::CantTell { more_pairs: Some(_) }, None)), "{seven:?}");
    // What the baseline does, too, is the machine's.
    let both = with(12, 0.01, &[("b", 4, 0.1), ("a", 7, 0.2)]);
    assert_eq!(said(&both), (pass, note("one of 12 pairs left out: −90.1 %, and the baseline stalled as well")));
    let mut beside_itself = stalled.clone();
    for mut cell in stalled.cells.iter().filter(|cell| cell.id.subject == "a").cloned() {
        cell.id.subject += AGAIN;
        if cell.id.repetition == 2 {
            measured(&mut cell).seconds *= 5.0;
        }
        beside_itself.cells.push(cell);
    }
    assert_eq!(said(&beside_itself).0, pass);
    // A loss is one all the same, and what is better has lost nothing.
    let lost = with(12, 0.01, &[("b", 99, 0.8), ("b", 4, 0.1)]);
    assert_eq!(said(&lost), (fail, note("one of 12 pairs left out: −92.1 %")));
    assert_eq!(said(&with(12, 0.01, &[("b", 4, 3.0)])), (pass, None));
    // No farther off than chance takes a pair where all scatter by so much.
    assert_eq!(said(&with(12, 0.12, &[("b", 4, 0.9)])).1, None);
    let place = tempfile::tempdir().unwrap();
    crate::report::write(&stalled, place.path()).unwrap();
    let text = std::fs::read_to_string(place.path().join("report.md")).unwrap();
    assert!(text.contains("can't tell; one of 12 pairs left out: −90.1\u{a0}%"), "{text}");
}

#[test]
fn whoever_is_worse_at_any_point_of_a_curve_replaces_nobody() {
    let faster = [120_000.0, 80.0, 160.0, 9.0];
    let leaves_out = |of_a: Does, of_b: Does| {
        let mut run = at_a_rate(CURVE, |_| ALIKE);
        for cell in &mut run.cells {
            let does = match (cell.id.subject.as_str(), cell.id.point) {
                ("b", 0) => faster,
                ("b", _) => of_b,
                (_, 0) => ALIKE,
                _ => of_a,
            };
            let measured = measured(cell);
            let latency = Latency { mean: does[1] * 1e3, p99: does[2] * 1e3, ..Latency::default() };
            measured.reads = Some(Operations { requests: does[0] as u64, bytes: 4096, latency });
            measured.cpu.server = Some((does[3] * 1e3 * does[0]) as u64);
        }
        let mut advice = Analysis::new(&run).advice();
        advice.retain(|one| one.aim == "Leave out a");
        advice.into_iter().map(|one| one.reasons.join("; ")).collect::<Vec<_>>()
    };
    let closed = "nowhere slower or dearer, and better in IOPS under one, mean latency under one, p99 latency under one, \
                  CPU per I/O under one";
    assert_eq!(leaves_out(ALIKE, ALIKE), [closed]);
    let at_the_point = format!("{closed}, mean latency under one, point 1");
    assert_eq!(leaves_out(ALIKE, [100_000.0, 70.0, 200.0, 10.0]), [at_the_point]);
    for worse in [[100_000.0, 130.0, 200.0, 10.0], [100_000.0, 100.0, 300.0, 10.0], [100_000.0, 100.0, 200.0, 13.0]] {
        assert_eq!(leaves_out(ALIKE, worse), [""; 0], "{worse:?}");
    }
    // Who makes fewer requests has less to wait for: of a rate that is not reached only who reaches it is told.
    let short = |mean: f64| [60_000.0, mean, 2.0 * mean, 10.0];
    assert_eq!(leaves_out(ALIKE, short(50.0)), [""; 0]);
    assert_eq!(leaves_out(short(50.0), ALIKE), [format!("{closed}, the rate that it reaches under one, point 1")]);
    assert_eq!(leaves_out(short(50.0), short(60.0)), [closed]);
}

#[test]
fn of_options_that_the_load_held_back_nobody_knows_whether_they_are_alike() {
    let advice = |bound: &[&str], of_b: Does, limit: Bottleneck| {
        let mut run = run(&[TWO, LOAD].concat(), |_, subject, _| if subject == "b" { of_b } else { ALIKE });
        for cell in run.cells.iter_mut().filter(|cell| bound.contains(&cell.id.subject.as_str())) {
            measured(cell).limit = Some(limit.clone());
        }
        let analysis = Analysis::new(&run);
        let related = analysis.relations().iter().map(|one| one.alike).collect::<Vec<_>>();
        (aims(&run).remove(0).split_once(": ").unwrap().1.to_owned(), related, analysis.tails().len())
    };
    let load = || Bottleneck::Load("l".into());
    let none = "No meaningful difference".to_owned();
    assert_eq!(advice(&[], ALIKE, load()), (none.clone(), vec![true], 0));
    assert_eq!(advice(&["a"], ALIKE, load()), ("Perhaps b".into(), vec![], 0));
    assert_eq!(advice(&["a", "b"], ALIKE, load()), ("Perhaps b".into(), vec![], 0));
    assert_eq!(advice(&["a", "b"], WORSE, load()), ("Perhaps a".into(), vec![], 0));
    assert_eq!(advice(&["a"], WORSE, load()), ("a".into(), vec![false], 1), "it is better at least by that");
    assert_eq!(advice(&["a", "b"], ALIKE, Bottleneck::Device("d".into())), (none, vec![true], 0), "so is the disk");
}

#[test]
fn options_are_ranked_by_the_repetitions_that_all_of_them_have() {
    let plan = [TWO, LOAD].concat();
    // The machine slows down, and `a` is not measured any more.
    let mut run = repeated(12, &plan, |_, subject, repetition| {
        let by = if repetition < 5 { 1.0 } else { 0.8 } * if subject == "b" { 1.1 } else { 1.0 };
        [100_000.0 * by, 100.0 / by, 200.0 / by, 10.0]
    });
    run.cells.retain(|cell| cell.id.subject == "b" || cell.id.repetition < 5);
    let advice = Analysis::new(&run).advice();
    assert_eq!(advice[0].choice, "b");
    assert!(advice[0].reasons.contains(&"worse: a (+10.0\u{a0}%)".to_owned()), "{:?}", advice[0].reasons);
}

/// A run of one load, at a rate of 100 000 a second at its one point if it has some and else in its closed loop, of which
/// each subject reaches what `does` says.
fn at_a_rate(keys: &str, does: impl Fn(&str) -> Does) -> Run {
    let mut run = run(&[TWO, "[[load]]\nname = 'one'\n", keys].concat(), |_, subject, _| does(subject));
    let curve = run.plan.loads[0].keys.curve;
    if curve.is_some() {
        let closed = run.cells.clone();
        closed
            .into_iter()
            .map(|cell| Cell { id: CellId { point: 1, ..cell.id }, ..cell })
            .for_each(|cell| run.cells.push(cell));
    }
    for cell in run.cells.iter_mut().filter(|cell| curve.is_none() || cell.id.point > 0) {
        measured(cell).offered_iops = Some(100_000.0);
    }
    run
}

const AT_A_RATE: &str = "rate_iops = 100000\n";
const CURVE: &str = "curve = { from = 50, to = 50, points = 1 }\n";

#[test]
fn a_database_at_a_rate_is_judged_by_its_latency_and_its_tail_counts_everywhere() {
    let pgbench = "application = 'pgbench'\n";
    let slower = |subject: &str| if subject == "b" { [100_000.0, 200.0, 400.0, 10.0] } else { ALIKE };
    let longer = |subject: &str| if subject == "b" { [100_000.0, 100.0, 400.0, 10.0] } else { ALIKE };
    let judged = |run: &Run| {
        let judged = Analysis::new(run).judged;
        judged.into_iter().map(|one| (one.point, one.metric, one.decision.unwrap())).collect::<Vec<_>>()
    };
    let (pass, fail) = (|| Verdict::Pass, || Verdict::Fail);
    let curve = at_a_rate(&[pgbench, CURVE].concat(), slower);
    let (cpu, latency, all) = (Metric::CpuPerIo, Metric::Latency, Metric::Transactions);
    assert_eq!(judged(&curve), [(0, all, pass()), (0, cpu, pass()), (1, latency, fail()), (1, cpu, pass())]);
    let rate = at_a_rate(&[pgbench, AT_A_RATE].concat(), slower);
    assert_eq!(judged(&rate), [(0, latency, fail()), (0, cpu, pass())]);

    let of = |run: &Run, aim: &str| {
        let mut advice = Analysis::new(run).advice();
        advice.retain(|one| one.aim.starts_with(aim));
        assert_eq!(advice.len(), 1, "{aim}");
        (advice.remove(0).choice, advice)
    };
    for does in [slower, longer] {
        let curve = at_a_rate(&[pgbench, CURVE].concat(), does);
        let advice = Analysis::new(&curve).advice();
        let rises = advice.iter().find(|one| one.aim == "Lowest latency as load rises (one)").expect("advice");
        assert_eq!((rises.choice.as_str(), &rises.reasons[..]), ("a", &["up to 100\u{202f}000 1/s: a".to_owned()][..]));
        assert_eq!(of(&curve, "one: transactions").0, "a", "of a closed loop the tail counts too");
        assert_eq!(of(&at_a_rate(&[pgbench, AT_A_RATE].concat(), does), "one: mean latency").0, "a");
    }
}

#[test]
fn who_falls_short_of_a_rate_passes_nothing_by_its_latency_and_fails_by_what_it_reached() {
    let short = |iops: f64, mean: f64| [iops, mean, 2.0 * mean, 10.0];
    let of = |keys: &str, a: Does, b: Does| {
        let run = at_a_rate(keys, |subject| if subject == "b" { b } else { a });
        let judged = Analysis::new(&run).judged.into_iter().filter(|one| one.metric != Metric::CpuPerIo);
        let last = judged.filter(|one| one.point > 0 || keys == AT_A_RATE);
        last.map(|one| (one.metric, one.decision.unwrap(), one.note)).collect::<Vec<_>>()
    };
    let (latency, iops) = (Metric::Latency, Metric::Iops);
    let (pass, fail, open) = (Verdict::Pass, Verdict::Fail, Verdict::CantTell { more_pairs: None });
    let says = |text: &str| Some(text.to_owned());
    for keys in [AT_A_RATE, CURVE] {
        assert_eq!(of(keys, ALIKE, ALIKE), [(latency, pass, None)], "a rate that is reached is no result");
        // It makes fewer requests, and so they wait for less.
        let note = || says("reached 63 % of the rate");
        let better = of(keys, ALIKE, short(63_000.0, 50.0));
        assert_eq!(better, [(latency, open, note()), (iops, fail, note())]);
        let worse = of(keys, ALIKE, short(63_000.0, 500.0));
        assert_eq!(worse, [(latency, fail, note()), (iops, fail, note())]);
        let note = || says("the baseline reached 63 % of the rate");
        let baseline = of(keys, short(63_000.0, 50.0), ALIKE);
        assert_eq!(baseline, [(latency, open, note()), (iops, pass, note())]);
        let baseline = of(keys, short(63_000.0, 500.0), ALIKE);
        assert_eq!(baseline, [(latency, pass, note()), (iops, pass, note())]);
        let note = || says("reached 63 % of the rate, and the baseline 63 %");
        let both = of(keys, short(63_000.0, 100.0), short(63_000.0, 100.0));
        assert_eq!(both, [(latency, open, note()), (iops, pass, note())]);
    }
    // Of which option to choose the slower is asked, and not who takes more CPU.
    let mut run = at_a_rate(AT_A_RATE, |subject| if subject == "b" { short(63_000.0, 50.0) } else { ALIKE });
    which(&mut run);
    let words: Vec<_> = Analysis::new(&run).judged.iter().map(|one| (one.metric, one.fail)).collect();
    assert_eq!(words, [(latency, "slower"), (Metric::CpuPerIo, "more CPU"), (iops, "slower")]);
}

#[test]
fn on_the_front_is_who_is_known_to_be_better_in_something_than_each_other() {
    let plan = [TWO, LOAD, "[[load]]\nname = 'deep'\niodepth = 4\n"].concat();
    let ringed = |repetitions: u32, load: &str, of_b: Does| {
        let run =
            repeated(repetitions, &plan, |at, subject, _| if (at, subject) == (load, "b") { of_b } else { ALIKE });
        let points = Analysis::new(&run).operating_points();
        let ringed = points.into_iter().filter(|one| one.on_front);
        ringed.map(|one| (one.load, one.subject)).collect::<Vec<_>>()
    };
    let b = || vec![("one".to_owned(), "b".to_owned())];
    let faster = [130_000.0, 70.0, 140.0, 7.0];
    assert_eq!(ringed(5, "one", ALIKE), []);
    assert_eq!(ringed(5, "one", faster), b());
    // Beside the other load's there are no pairs, and ranges of so few are apart by chance.
    assert_eq!(ringed(4, "one", faster), []);
    assert_eq!(ringed(1, "one", faster), []);
    let [iops, mean, p99, cpu] = ALIKE;
    assert_eq!(ringed(5, "one", [iops, mean, 0.5 * p99, cpu]), b(), "a tail is something");
    assert_eq!(ringed(5, "one", [iops, mean, p99, 0.5 * cpu]), b());
    // In pairs ranges may overlap, as where all scatter alike from one repetition to the next.
    let together = repeated(5, &[TWO, LOAD].concat(), |_, subject, repetition| {
        let by = f64::from(repetition + 1) * if subject == "b" { 0.8 } else { 1.0 };
        [iops, mean * by, p99, cpu]
    });
    let on_front = |one: &OperatingPoint| one.on_front.then(|| one.subject.clone());
    assert_eq!(Analysis::new(&together).operating_points().iter().filter_map(on_front).collect::<Vec<_>>(), ["b"]);
}

#[test]
fn pairs_are_told_of_which_it_is_known_whether_they_are_alike_in_speed() {
    let plan = format!("{TWO}[[subject]]\nname = 'c'\nstack = 'egret'\n{HOST}{LOAD}");
    let run = run(&plan, |_, subject, repetition| match subject {
        "b" => WORSE,
        "c" => ALIKE.map(|value| value * [0.3, 3.0, 1.0, 0.4, 2.5][repetition as usize]),
        _ => [100_000.0, 100.0, 200.0, 99.0],
    });
    let of = |names: [&str; 2], alike| Related { load: "one".into(), options: names.map(str::to_owned), alike };
    assert_eq!(Analysis::new(&run).relations(), [of(["a", "b"], false)]);
    let run = super::tests::run(&plan, |_, subject, _| if subject == "b" { WORSE } else { ALIKE });
    assert_eq!(Analysis::new(&run).relations(), [of(["a", "b"], false), of(["a", "c"], true), of(["b", "c"], false)]);
}

#[test]
fn points_to_choose_from_are_told_apart_by_all_that_makes_rates_unlike() {
    let plan = format!(
        "{TWO}{HOST}[[subject]]\nname = 'g'\nstack = 'guest'\n[[subject]]\nname = 'tcg'\nstack = 'guest'\n\
         [[load]]\nname = 'one'\n[[load]]\nname = 'mixed'\nrw = 'randrw'\nrwmixread = 70\nidle_disks = 3\n\
         [[load]]\nname = 'db'\napplication = 'pgbench'\n"
    );
    let mut run = run(&plan, |_, _, _| ALIKE);
    for cell in run.cells.iter_mut().filter(|cell| cell.id.subject == "tcg") {
        let Outcome::Measured(measured) = &mut cell.outcome else { continue };
        measured.functional_only = true;
    }
    let points = Analysis::new(&run).operating_points();
    let points: Vec<_> = points.iter().map(|one| (one.subject.as_str(), one.workload.as_str())).collect();
    assert_eq!(
        points,
        [
            ("a", "randrw70 4k, 3 idle disks"),
            ("b", "randrw70 4k, 3 idle disks"),
            ("g", "randrw70 4k, 3 idle disks, in a guest"),
            ("a", "randread 4k"),
            ("b", "randread 4k"),
            ("g", "randread 4k, in a guest"),
        ]
    );
}

fn measured(cell: &mut Cell) -> &mut Measurement {
    match &mut cell.outcome {
        Outcome::Measured(measured) => measured,
        Outcome::Failed { reason, .. } | Outcome::Impossible { reason } => panic!("{reason}"),
    }
}

/// What is decided of `b`, in the first metric of the load `one`.
fn decision(run: &Run) -> Result<Verdict, String> {
    let judged = Analysis::new(run).judged;
    judged.into_iter().find(|one| one.subject == "b" && one.load == "one").expect("a comparison").decision
}

#[test]
fn what_was_not_measured_alike_decides_nothing_and_says_why() {
    let changed = |plan: &str, change: &dyn Fn(&mut Cell)| {
        let mut run = run(plan, |_, _, _| ALIKE);
        run.cells.iter_mut().for_each(change);
        run
    };
    let of = |subject: &'static str, change: fn(&mut Cell)| {
        decision(&changed(&[TWO, LOAD].concat(), &|cell| {
            if cell.id.subject == subject {
                change(cell);
            }
        }))
    };
    for subject in ["a", "b"] {
        let why = |what: &str| Err(what.replace('?', subject));
        let kvm = |cell: &mut Cell| cell.outcome = Outcome::Impossible { reason: "no /dev/kvm".into() };
        assert_eq!(of(subject, kvm), why("?: no /dev/kvm"));
        assert_eq!(of(subject, |cell| measured(cell).functional_only = true), why("functional only: emulated"));
        assert_eq!(of(subject, |cell| measured(cell).limit = Some(Bottleneck::Device("d".into()))), Ok(Verdict::Pass));
    }
    let bound = |cell: &mut Cell| measured(cell).limit = Some(Bottleneck::Load("l".into()));
    assert_eq!(decision(&changed(&[TWO, LOAD].concat(), &bound)), Err("load-bound: l".into()));

    let mut missing = run(&[TWO, LOAD, "[[load]]\nname = 'two'\n"].concat(), |_, _, _| ALIKE);
    missing.cells.retain(|cell| cell.id.subject != "b" || cell.id.load != "one");
    assert_eq!(decision(&missing), Err("b was not measured".into()));

    // What fio does on the host is beside what a server does no result, and beside another of its own it is one.
    for (stacks, expected) in [
        (["host", "egret"], Err("the reference".to_owned())),
        (["egret", "host"], Err("the reference".to_owned())),
        (["host", "host"], Ok(Verdict::Pass)),
    ] {
        let [a, b] = stacks;
        let subjects = format!("[[subject]]\nname = 'a'\nstack = '{a}'\n[[subject]]\nname = 'b'\nstack = '{b}'\n");
        let mut run = run(&[&subjects, LOAD].concat(), |_, _, _| ALIKE);
        assert_eq!(decision(&run), expected);
        // And one beside itself is its noise, whatever it is.
        run.cells.retain(|cell| cell.id.subject == "a");
        for mut cell in run.cells.clone() {
            cell.id.subject += AGAIN;
            run.cells.push(cell);
        }
        assert_eq!(Analysis::new(&run).judged[0].decision, Ok(Verdict::Pass), "{stacks:?}");
    }

    for (rate, is_alike) in [(1009.0, true), (1011.0, false), (991.0, true), (989.0, false)] {
        let plan = [TWO, "[[load]]\nname = 'one'\nrate_iops = 1000\n"].concat();
        let offered = decision(&changed(&plan, &|cell| {
            measured(cell).offered_iops = Some(if cell.id.subject == "b" { rate } else { 1000.0 });
        }));
        let expected = if is_alike { Ok(Verdict::Pass) } else { Err("their rates differ".into()) };
        assert_eq!(offered, expected, "{rate}");
    }
}

#[test]
fn what_fio_spends_is_compared_where_it_goes_the_kernels_path_by_itself() {
    let of = |subjects: [&str; 2]| {
        let [a, b] = subjects;
        let subjects = format!("[[subject]]\nname = 'a'\n{a}\n[[subject]]\nname = 'b'\n{b}\n");
        let mut run = run(&[&subjects, LOAD].concat(), |_, _, _| ALIKE);
        which(&mut run);
        for cell in &mut run.cells {
            let twice = if cell.id.subject == "b" { 2 } else { 1 };
            let measured = measured(cell);
            measured.cpu.load = Some(twice * 5000 * measured.requests());
        }
        let judged = Analysis::new(&run).judged;
        judged.into_iter().map(|one| (one.metric, one.decision, one.fail)).collect::<Vec<_>>()
    };
    let always = [(Metric::Iops, Ok(Verdict::Pass), "slower"), (Metric::CpuPerIo, Ok(Verdict::Pass), "more CPU")];
    let dearer = [&always[..], &[(Metric::LoadCpu, Ok(Verdict::Fail), "more CPU")]].concat();
    let [none, deadline] = ["none", "mq-deadline"].map(|scheduler| {
        ["host", "guest", "egret"].map(|stack| match stack {
            "egret" => "stack = 'egret'".to_owned(),
            _ => format!("stack = '{stack}'\nscheduler = '{scheduler}'"),
        })
    });
    let of = |one: &str, other: &str| of([one, other]);
    assert_eq!(of(&none[0], &deadline[0]), dearer);
    assert_eq!(of(&none[1], &deadline[1]), dearer);
    // The lab's own load, and guests of one kernel, spend what they spend on everybody.
    assert_eq!(of(&none[2], &deadline[2]), always);
    assert_eq!(of(&none[1], &none[1]), always);
}

#[test]
fn what_fails_decides_of_speed_and_what_a_request_costs_is_compared_all_the_same() {
    let of = |crashes: &[&str]| {
        let mut run = run(&[TWO, LOAD].concat(), |_, _, _| ALIKE);
        crashes.iter().for_each(|subject| crash(&mut run, subject));
        Analysis::new(&run).judged.into_iter().map(|one| (one.decision.unwrap(), one.note)).collect::<Vec<_>>()
    };
    let note = |subject: &str| Some(format!("{subject} failed in 1 of 5 repetitions: it crashed"));
    let (open, cpu) = (Verdict::CantTell { more_pairs: None }, (Verdict::Pass, None));
    assert_eq!(of(&[]), [(Verdict::Pass, None), cpu.clone()]);
    // Of five four are left, which pass nothing.
    let four = (Verdict::CantTell { more_pairs: Some(1) }, None);
    assert_eq!(of(&["b"]), [(Verdict::Fail, note("b")), four.clone()]);
    assert_eq!(of(&["a"]), [(open, note("a")), four.clone()]);
    assert_eq!(of(&["a", "b"]), [(open, note("b")), four]);
}

/// A run in which the cells of a subject end otherwise in some repetitions.
fn ending(run: &Run, subject: &str, repetitions: std::ops::Range<u32>, outcome: &Outcome) -> Run {
    let mut run = run.clone();
    let meant = |cell: &&mut Cell| cell.id.subject == subject && repetitions.contains(&cell.id.repetition);
    run.cells.iter_mut().filter(meant).for_each(|cell| cell.outcome = outcome.clone());
    run
}

fn crashed() -> Outcome {
    Outcome::Failed { reason: "it crashed".into(), log: Vec::new() }
}

#[test]
fn what_crashes_fails_though_its_figures_would_decide_nothing() {
    let alike = run(&[TWO, LOAD].concat(), |_, _, _| ALIKE);
    let bounds = [Bottleneck::Device("d".into()), Bottleneck::Load("l".into())].map(|limit| {
        let mut run = alike.clone();
        run.cells.iter_mut().for_each(|cell| measured(cell).limit = Some(limit.clone()));
        run
    });
    let mut emulated = alike.clone();
    emulated.cells.iter_mut().for_each(|cell| measured(cell).functional_only = true);
    for run in bounds.into_iter().chain([emulated]) {
        assert!(decision(&run).is_err());
        let crashes = ending(&run, "b", 1..3, &crashed());
        assert_eq!(decision(&crashes), Ok(Verdict::Fail));
        assert_eq!(Analysis::new(&crashes).overall(), Overall::Fail);
        assert!(decision(&ending(&run, "a", 1..3, &crashed())).is_err(), "whatever the baseline does");
    }
    // It failed where it could be tried, in whichever order that was.
    let no_kvm = Outcome::Impossible { reason: "no /dev/kvm".into() };
    for (fails, cannot) in [(0..1, 1..5), (4..5, 0..4), (2..3, 3..5)] {
        let run = ending(&ending(&alike, "b", fails, &crashed()), "b", cannot, &no_kvm);
        assert_eq!(decision(&run), Ok(Verdict::Fail));
    }
    // Beside a baseline that was never measured nothing is told.
    let nobody = ending(&ending(&alike, "b", 0..1, &crashed()), "a", 0..5, &no_kvm);
    assert_eq!(decision(&nobody), Err("a: no /dev/kvm".into()));
    // A reference is no candidate, and a candidate that fails beside one is.
    for (stacks, expected) in
        [(["host", "egret"], Ok(Verdict::Fail)), (["egret", "host"], Err("the reference".to_owned()))]
    {
        let [a, b] = stacks;
        let subjects = format!("[[subject]]\nname = 'a'\nstack = '{a}'\n[[subject]]\nname = 'b'\nstack = '{b}'\n");
        let run = run(&[&subjects, LOAD].concat(), |_, _, _| ALIKE);
        assert_eq!(decision(&ending(&run, "b", 0..1, &crashed())), expected);
    }
}

#[test]
fn beside_a_baseline_that_failed_nothing_passes_and_what_is_lost_is_lost() {
    let plan = [TWO, LOAD].concat();
    let with = |of_b: Does| repeated(12, &plan, |_, subject, _| if subject == "b" { of_b } else { ALIKE });
    let open = Ok(Verdict::CantTell { more_pairs: None });
    let once = |of_b: Does| ending(&with(of_b), "a", 3..4, &crashed());
    assert_eq!(decision(&with(ALIKE)), Ok(Verdict::Pass));
    assert_eq!(decision(&once(ALIKE)), open);
    assert_eq!(decision(&once(WORSE)), Ok(Verdict::Fail));
    let notes: Vec<_> = Analysis::new(&once(WORSE)).judged.into_iter().map(|one| one.note).collect();
    assert_eq!(notes, [Some("a failed in 1 of 12 repetitions: it crashed".into()), None]);
    // Both fail now and then: figures decide, and pass nothing.
    assert_eq!(decision(&ending(&once(WORSE), "b", 5..6, &crashed())), Ok(Verdict::Fail));
    assert_eq!(decision(&ending(&once(ALIKE), "b", 5..6, &crashed())), open);
    // What mostly works beside what never does.
    assert_eq!(decision(&ending(&once(ALIKE), "b", 0..12, &crashed())), Ok(Verdict::Fail));
    let half = ending(&with(ALIKE), "a", 0..6, &crashed());
    assert_eq!(decision(&ending(&half, "b", 0..12, &crashed())), open);
}

#[test]
fn the_noise_of_a_baseline_beside_itself_is_told_of_its_load_and_metric_and_is_the_least_that_is_believed() {
    let plan = "[[load]]\nname = 'one'\n[[load]]\nname = 'two'\n";
    let mut run = run(&[TWO, HOST, plan].concat(), |_, _, _| ALIKE);
    let again: Vec<_> = run.cells.iter().filter(|cell| cell.id.subject == "a").cloned().collect();
    // How much slower it was the second time, by turns: by a tenth on average under one load, and not at all under the other.
    for mut cell in again {
        let [up, down]: [f64; 2] = if cell.id.load == "one" { [1.21, 1.0] } else { [1.0, 1.0] };
        measured(&mut cell).seconds *= [up, down, up, down, (up * down).sqrt()][cell.id.repetition as usize];
        cell.id.subject += AGAIN;
        run.cells.push(cell);
    }
    let analysis = Analysis::new(&run);
    let floor = |load: &str, subject: &str, metric: Metric| {
        let found = analysis
            .judged
            .iter()
            .find(|one| (one.load.as_str(), one.subject.as_str(), one.metric) == (load, subject, metric));
        found.and_then(|one| one.floor).map(|floor| (floor.ratio * 1000.0).round() / 1000.0)
    };
    assert_eq!((floor("one", "b", Metric::Iops), floor("two", "b", Metric::Iops)), (Some(0.909), Some(1.0)));
    assert_eq!(floor("one", "b", Metric::CpuPerIo), Some(1.0), "a request costs the same");

    // A load under which nothing scattered tells of no noise.
    let noise = analysis.noise(Metric::Iops);
    assert!((noise - 1.1_f64.ln()).abs() < 1e-6, "{noise}");
    assert_eq!(analysis.noise(Metric::CpuPerIo), 0.0);
    let believed = |pair: [&str; 2]| analysis.floor(u32::MAX, &run.plan.loads[0], Metric::Iops, pair) / noise.powi(2);
    for (pair, expected) in [(["b", "host"], 1.0), (["a", "b"], 0.75), (["b", "a"], 0.75), (["a", "a"], 0.5)] {
        assert!((believed(pair) - expected).abs() < 1e-9, "{pair:?}: {}", believed(pair));
    }
}

#[test]
fn what_is_decided_at_a_look_stays_so_whatever_is_measured_of_others_after_it() {
    let plan = [TWO, LOAD, "[[load]]\nname = 'two'\n"].concat();
    let mut run = repeated(12, &plan, |load, subject, _| if (load, subject) == ("one", "b") { WORSE } else { ALIKE });
    (run.plan.repetitions, run.plan.most_repetitions) = (5, Some(12));
    run.cells.retain(|cell| cell.id.load == "two" || cell.id.repetition < 5);
    for mut cell in run.cells.clone().into_iter().filter(|cell| cell.id.subject == "a") {
        cell.id.subject += AGAIN;
        let at = cell.id.repetition;
        measured(&mut cell).seconds *= if at < 5 { 1.0 + f64::from(at) / 1000.0 } else { f64::from(at) };
        run.cells.push(cell);
    }
    let judged = Analysis::new(&run).judged;
    let of = |load: &str| judged.iter().find(|one| one.load == load && one.subject == "b").unwrap();
    assert_eq!(of("one").decision, Ok(Verdict::Fail), "{:?}", of("one"));
    assert!(of("two").decision == Ok(Verdict::Pass), "{:?}", of("two"));
}

#[test]
fn who_falls_short_of_a_rate_does_so_by_more_than_a_little_and_by_more_than_chance() {
    let plan = [TWO, "[[load]]\nname = 'one'\nrate_iops = 1000\n"].concat();
    let shortfall = |reached: f64, rate: Option<f64>| {
        let mut run = run(&plan, |_, _, _| [reached + 0.5, 100.0, 200.0, 10.0]);
        for measured in run.cells.iter_mut().map(measured) {
            measured.offered_iops = rate;
            measured.reads.as_mut().unwrap().requests = reached as u64;
        }
        Table::new(&run).shortfall(CellKey { load: "one", subject: "b", point: 0 })
    };
    for (reached, rate, expected) in [
        (96_000.0, 100_000.0, Some(0.96)),
        (97_000.0, 100_000.0, None),
        (101_000.0, 100_000.0, None),
        // Of so few requests a few are missing by chance: four times the root of 5 × 80.
        (77.0, 80.0, None),
        (64.0, 80.0, None),
        (63.0, 80.0, Some(63.0 / 80.0)),
    ] {
        assert_eq!(shortfall(reached, Some(rate)), expected, "{reached} of {rate}");
    }
    assert_eq!(shortfall(1.0, None), None, "a closed loop has no rate");
}

#[test]
fn what_one_look_has_decided_stays_and_the_last_look_is_made_of_what_there_is() {
    let measured = |repetitions: u32, does: fn(u32) -> f64| {
        let mut run = repeated(repetitions, &[TWO, LOAD].concat(), |_, subject, repetition| {
            let [iops, rest @ ..] = ALIKE;
            let [mean, p99, cpu] = rest;
            [if subject == "b" { iops * does(repetition) } else { iops }, mean, p99, cpu]
        });
        // It looks after 5, 9 and 12.
        run.plan.most_repetitions = Some(12);
        decision(&run)
    };
    let then_worse = |repetition: u32| if repetition < 5 { 1.0 } else { 0.6 };
    assert_eq!(measured(12, then_worse), Ok(Verdict::Pass), "the first look sees what there was then");
    // A sure loss that is as probably within the limit as not is a fail at the last look alone.
    let open = Ok(Verdict::CantTell { more_pairs: Some(1) });
    assert_eq!(
        [5, 9, 10, 12].map(|many| measured(many, |_| 0.9503)),
        [open.clone(), open, Ok(Verdict::Fail), Ok(Verdict::Fail)]
    );
}

#[test]
fn loads_of_more_and_more_disks_are_a_line_of_each_subject() {
    let plan = format!(
        "{TWO}[[load]]\nidle_disks = [99, 0]\ndisks = 2\n[[load]]\nname = 'b alone'\nsubjects = ['b']\nidle_disks = 9\n\
         [[chart]]\nid = 'd'\ntitle = 'Disks'\nform = 'ladder'\nmetric = 'iops'\nacross = 'disks'\n"
    );
    let run = run(&plan, |load, _, _| if load.contains("99") { WORSE } else { ALIKE });
    let [figure] = Analysis::new(&run).figures().try_into().unwrap();
    assert_eq!(figure.across, "disks, busy and idle");
    let line = |group: &chart::Group| {
        let marks = group.marks.iter();
        let marks =
            marks.map(|mark| (mark.x.unwrap(), mark.value.unwrap().median < 90_000.0, mark.load.clone().unwrap()));
        (group.line.clone().unwrap(), marks.collect::<Vec<_>>())
    };
    let (few, many) = ("randread 4k QD1 2 disks", "randread 4k QD1 2 disks 99 idle disks");
    let of = |marks: &[(f64, bool, &str)]| {
        marks.iter().map(|(x, slow, load)| (*x, *slow, (*load).to_owned())).collect::<Vec<_>>()
    };
    assert_eq!(
        figure.groups.iter().map(line).collect::<Vec<_>>(),
        [
            ("a".into(), of(&[(2.0, false, few), (101.0, true, many)])),
            ("b".into(), of(&[(2.0, false, few), (10.0, false, "b alone"), (101.0, true, many)])),
        ]
    );
}
