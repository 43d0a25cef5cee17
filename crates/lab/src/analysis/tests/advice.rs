//! What a reader is told to choose, and to leave out.

use super::*;

/// What is known of `a` and `b` at a rate of 100 000 a second, and which of their points have reached it.
fn known_at_a_rate(a: Does, b: Does) -> (Vec<bool>, Vec<Option<f64>>) {
    let run = at_a_rate(AT_A_RATE, |subject| if subject == "b" { b } else { a });
    let analysis = Analysis::new(&run);
    let alike = analysis.relations().into_iter().map(|one| one.alike).collect();
    (alike, analysis.operating_points().into_iter().map(|one| one.rate).collect())
}

#[test]
fn at_a_rate_who_reaches_it_is_as_fast_as_its_latency_is_low_and_who_does_not_is_compared_by_what_it_reached() {
    let rate = Some(100_000.0);
    let slower = [100_000.0, 300.0, 600.0, 10.0];
    assert_eq!(known_at_a_rate(ALIKE, ALIKE), (vec![true], vec![rate; 2]));
    assert_eq!(known_at_a_rate(ALIKE, slower), (vec![false], vec![rate; 2]));
    // It makes fewer requests, which wait as long as the other's.
    assert_eq!(
        known_at_a_rate(ALIKE, WORSE.map(|of| if of > 1000.0 { of } else { 100.0 })),
        (vec![], vec![rate, None])
    );
    assert_eq!(known_at_a_rate(WORSE, WORSE), (vec![], vec![None; 2]));
}

#[test]
fn a_rate_that_was_rounded_for_one_of_them_is_one_rate() {
    let mut run = at_a_rate(AT_A_RATE, |_| ALIKE);
    let mut rates = |of_b: f64| {
        for cell in run.cells.iter_mut().filter(|cell| cell.id.subject == "b") {
            measured(cell).offered_iops = Some(of_b);
        }
        Analysis::new(&run).operating_points().into_iter().map(|one| one.rate.unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(rates(99_500.0), [100_000.0; 2]);
    assert_eq!(rates(90_000.0), [100_000.0, 90_000.0]);
}

#[test]
fn who_reached_less_of_a_rate_that_neither_reaches_replaces_nobody_however_little_a_request_costs() {
    let leaves_out = |a: Does, b: Does| {
        let run = at_a_rate(AT_A_RATE, |subject| if subject == "b" { b } else { a });
        let mut advice = Analysis::new(&run).advice();
        advice.retain(|one| one.aim.starts_with("Leave out"));
        advice.into_iter().map(|one| (one.aim, one.reasons.join("; "))).collect::<Vec<_>>()
    };
    let short = |iops: f64, cpu: f64| [iops, 100.0, 200.0, cpu];
    let b =
        |better: &str| vec![("Leave out b".to_owned(), format!("nowhere slower or dearer, and better in {better}"))];
    assert_eq!(leaves_out(short(60_000.0, 8.0), short(90_000.0, 10.0)), []);
    assert_eq!(
        leaves_out(short(60_000.0, 10.0), short(90_000.0, 8.0)),
        [(
            "Leave out a".to_owned(),
            "nowhere slower or dearer, and better in CPU per I/O under one, IOPS under one".to_owned()
        )]
    );
    assert_eq!(leaves_out(short(90_000.0, 10.0), short(60_000.0, 10.0)), b("IOPS under one"));
    assert_eq!(leaves_out(short(60_000.0, 8.0), short(60_000.0, 10.0)), b("CPU per I/O under one"));
    // What they reached scatters by so much that nobody can tell.
    let mut run =
        at_a_rate(AT_A_RATE, |subject| if subject == "b" { short(60_000.0, 10.0) } else { short(60_000.0, 8.0) });
    for cell in run.cells.iter_mut().filter(|cell| cell.id.subject == "b") {
        let by = [0.67, 3.3, 1.0, 2.0, 0.71][cell.id.repetition as usize];
        measured(cell).seconds *= by;
    }
    assert!(!aims(&run).iter().any(|aim| aim.starts_with("Leave out")), "{:?}", aims(&run));
}

#[test]
fn of_guests_without_kvm_none_is_to_be_left_out() {
    let with = |emulated: &[&str]| {
        let mut run = run(&[TWO, LOAD].concat(), |_, subject, _| if subject == "b" { WORSE } else { ALIKE });
        for cell in run.cells.iter_mut().filter(|cell| emulated.contains(&cell.id.subject.as_str())) {
            measured(cell).functional_only = true;
        }
        let analysis = Analysis::new(&run);
        (aims(&run).len(), analysis.relations().len(), analysis.tails().len())
    };
    // For latency, for CPU, and whom to leave out.
    assert_eq!(with(&[]), (3, 1, 1));
    for emulated in [&["a", "b"][..], &["a"], &["b"]] {
        assert_eq!(with(emulated), (0, 0, 0), "{emulated:?}");
    }
}
