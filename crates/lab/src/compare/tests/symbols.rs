//! Symbols whose share moved.

use super::*;
use crate::analysis::profile::{Profiles, Share};
use crate::results::{SYMBOLS, Symbol};

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
    assert!(text.contains("cpupri_set: 2.41 % [2.35, 2.47] -> 0.35 % [0.33, 0.37] of samples, -2.06 [-2.1"), "{text}");
    assert!(text.contains(", in fio)") && text.contains("of a symbol with 1 % of them a move by 0.06 % can"), "{text}");

    let least = comparison.symbols.least_seen().unwrap();
    assert!((least - 2.8 * (0.0099_f64 * 2.0 / 500_000.0).sqrt() * 100.0).abs() < 1e-9, "{least}");

    // Of so few samples the larger move is sure, and the other one may be chance.
    let few = beside(1000);
    assert_eq!(few.symbols.moved.iter().filter(|moved| moved.symbol == "sbitmap_find_bit").count(), 0);
    assert!(few.symbols.moved.iter().any(|moved| moved.symbol == "cpupri_set"));
}

#[test]
fn a_symbol_that_moved_has_an_interval_of_its_scatter_and_of_its_samples_and_those_who_run_it() {
    /// A symbol: its name, who runs it, and its share in each repetition.
    type Shares = (&'static str, &'static str, [f64; 5]);
    let with = |samples: u64, shares: &[Shares]| {
        let mut run = run(1e5);
        run.cells.retain(|cell| cell.id.load.ends_with("QD64"));
        for cell in &mut run.cells {
            let symbol = |(name, comm, percent): &Shares| Symbol {
                name: (*name).into(),
                comm: (*comm).into(),
                percent: percent[cell.id.repetition as usize],
            };
            let Outcome::Measured(measured) = &mut cell.outcome else { continue };
            (measured.samples, measured.symbols) = (samples, shares.iter().map(symbol).collect());
        }
        run
    };
    let moved = |samples: u64, a: &[Shares], b: &[Shares]| {
        let [a, b] = [a, b].map(|shares| with(samples, shares));
        Comparison::of(&[&a], &[&b], None).symbols
    };
    let one = |symbols: &Symbols| {
        assert_eq!(symbols.moved.len(), 1, "{symbols:?}");
        symbols.moved[0].by.map(|by| (by * 1000.0).round() / 1000.0)
    };
    // Student's distribution has 8 degrees of freedom, and asks for 2.306 standard errors.
    let scattered = moved(u64::MAX / 100, &[("s", "x", [1.0, 3.0, 1.0, 3.0, 2.0])], &[("s", "x", [10.0; 5])]);
    let half = 2.306 * (1.0_f64 / 5.0).sqrt();
    assert_eq!(one(&scattered), [8.0, 8.0 - half, 8.0 + half].map(|by| (by * 1000.0).round() / 1000.0));
    let counted = moved(1000, &[("s", "x", [2.0; 5])], &[("s", "x", [10.0; 5])]);
    let half = 2.306 * ((0.02 * 0.98 + 0.1 * 0.9) / 5000.0_f64).sqrt() * 100.0;
    assert_eq!(one(&counted), [8.0, 8.0 - half, 8.0 + half].map(|by| (by * 1000.0).round() / 1000.0));
    assert_eq!(counted.samples, Some([5000; 2]));

    // Each side's own has 4 degrees of freedom, 2.776 standard errors, and no end beyond what a share can be.
    let share = |symbols: &Symbols| symbols.moved[0].a.unwrap().interval.map(|end| (end * 1000.0).round() / 1000.0);
    let half = 2.7764 * (1.0_f64 / 5.0).sqrt();
    assert_eq!(share(&scattered), [2.0 - half, 2.0 + half].map(|end| (end * 1000.0).round() / 1000.0));
    let half = 2.7764 * (0.02_f64 * 0.98 / 5000.0).sqrt() * 100.0;
    assert_eq!(share(&counted), [2.0 - half, 2.0 + half].map(|end| (end * 1000.0).round() / 1000.0));
    let most = moved(u64::MAX / 100, &[("s", "x", [1.0, 1.0, 1.0, 1.0, 5.0])], &[("s", "x", [99.0; 5])]);
    assert_eq!(share(&most)[0], 0.0);

    // What is certain and small is left out, and runs that did not count their samples are as sure as they scatter.
    let by = |by: f64| moved(0, &[("s", "x", [2.0; 5])], &[("s", "x", [2.0 + by; 5])]);
    assert_eq!((by(0.09).moved.len(), by(0.11).moved.len(), by(0.11).samples), (0, 1, None));

    let a = [("gone", "x", [5.0; 5]), ("more", "x", [1.0; 5])];
    let more = [("more", "y", [3.0; 5]), ("more", "x", [2.0; 5]), ("more", "x", [2.0; 5]), ("new", "z", [4.0; 5])];
    let found = moved(1_000_000, &a, &more).moved;
    let percent = |share: Option<Share>| share.map(|share| share.percent);
    let found = found.iter().map(|one| (one.symbol.as_str(), percent(one.a), percent(one.b), one.comms.join(", ")));
    let found: Vec<_> = found.collect();
    assert_eq!(
        found,
        [
            ("more", Some(1.0), Some(7.0), "x, y".into()),
            ("gone", Some(5.0), None, "x".into()),
            ("new", None, Some(4.0), "z".into())
        ]
    );
}

#[test]
fn one_burst_among_many_repetitions_moves_no_symbol() {
    let with = |shares: [f64; 12]| {
        let mut run = run(1e5);
        let first = run.cells.iter().find(|cell| cell.id.load.ends_with("QD64")).unwrap().clone();
        let of = |(repetition, percent)| {
            let mut cell = first.clone();
            cell.id.repetition = repetition;
            let Outcome::Measured(measured) = &mut cell.outcome else { panic!("it was measured") };
            measured.samples = 1_000_000;
            measured.symbols = vec![Symbol { name: "compact".into(), comm: "x".into(), percent }];
            cell
        };
        run.cells = (0..).zip(shares).map(of).collect();
        run
    };
    let even = [1.0, 1.05, 0.95, 1.0, 1.05, 0.95, 1.0, 1.05, 0.95, 1.0, 1.05, 0.95];
    let mut burst = even;
    burst[7] = 15.0;
    let (even, burst) = (with(even), with(burst));
    assert_eq!(Comparison::of(&[&even], &[&burst], None).symbols.moved, []);
    let share = Profiles::of(&burst.cells).share("compact").unwrap();
    let [low, high] = share.interval;
    assert!(low < 1.0 && high > 4.0, "{share:?}");
}

#[test]
fn of_several_runs_a_symbol_has_moved_by_more_than_runs_lie_apart() {
    let with = |percent: f64| {
        let mut run = run(1e5);
        run.cells.retain(|cell| cell.id.load.ends_with("QD64"));
        for cell in &mut run.cells {
            let Outcome::Measured(measured) = &mut cell.outcome else { panic!("it was measured") };
            let percent = percent + 0.02 * (f64::from(cell.id.repetition) - 2.0);
            measured.samples = 1_000_000;
            measured.symbols = vec![Symbol { name: "s".into(), comm: "x".into(), percent }];
        }
        run
    };
    let moved = |a: &[f64], b: &[f64]| {
        let [a, b] = [a, b].map(|side| side.iter().map(|percent| with(*percent)).collect::<Vec<_>>());
        let comparison = Comparison::of(&a.iter().collect::<Vec<_>>(), &b.iter().collect::<Vec<_>>(), None);
        assert_eq!(comparison.objections, [""; 0]);
        assert!(!comparison.text().contains("can be seen"), "samples do not say how far runs lie apart");
        comparison.symbols.moved
    };
    // Repetitions of a run agree to 0.03 %, and runs of one thing to 0.15 %.
    assert_eq!(moved(&[1.0, 1.2, 1.1], &[1.3, 1.5, 1.25]), []);
    assert_eq!(moved(&[1.0, 1.2, 1.1], &[1.4]), []);
    // Student's distribution has 4 degrees of freedom for both, 2.776 standard errors, and 2 for each, 4.303.
    let found = moved(&[1.0, 1.2, 1.1], &[2.3, 2.5, 2.4]);
    let half = 2.776_f64 * (0.01_f64 * 2.0 / 3.0).sqrt();
    let is_near = |one: f64, other: f64| (one - other).abs() < 0.001;
    assert!(found.len() == 1 && is_near(found[0].by[0], 1.3) && is_near(found[0].by[1], 1.3 - half), "{found:?}");
    let half = 4.303_f64 * (0.01_f64 / 3.0).sqrt();
    assert!(is_near(found[0].a.unwrap().interval[0], 1.1 - half), "{found:?}");
}

#[test]
fn a_symbol_that_only_one_side_kept_has_moved_by_what_it_has_more_than_the_others_coldest() {
    let with = |first: f64, last: (&str, f64)| {
        let mut run = run(1e5);
        let shares = (1..SYMBOLS).map(|number| (format!("s{number}"), 0.3)).chain([(last.0.into(), last.1)]);
        let shares = shares.map(|(name, percent)| Symbol { name, comm: "x".into(), percent });
        let mut symbols: Vec<_> = shares.collect();
        symbols[0].percent = first;
        each_measurement(&mut run, |measured| {
            (measured.samples, measured.symbols) = (1_000_000, symbols.clone());
        });
        run
    };
    let moved = |ours: f64| {
        let comparison = Comparison::of(&[&with(1.0, ("theirs", 0.25))], &[&with(1.0, ("ours", ours))], None);
        comparison.symbols.moved.into_iter().filter(|one| one.load.ends_with("QD1")).collect::<Vec<_>>()
    };
    // Each may have been the next after the other side's last.
    assert_eq!(moved(0.25), []);
    assert_eq!(moved(0.3), []);
    let [only] = &moved(0.45)[..] else { panic!("one") };
    assert_eq!((only.symbol.as_str(), only.a, only.by[0]), ("ours", None, 0.45));
    assert!(only.by[1] > 0.1 && only.by[1] < 0.2, "{only:?}");
}
