//! What `low-regret` must reach on the generated traces.
#![allow(missing_docs)]

use egret_polling::builtin::Builtin;
use egret_polling::replay::{Contender, Row, Setting, replay};
use egret_polling::{BlockCost, Nanos, Parameters, PolicyKind};

/// The default `poll-max-ns`, and one so large that it never binds.
const MAXIMA: [Nanos; 2] = [Parameters::DEFAULT_MAX, Nanos::from_millis(10)];

/// The row of `low-regret` for each maximum and for K = 5 us and 30 us.
fn rows(trace: Builtin) -> Vec<Row> {
    let waits = trace.generate();
    let mut rows = Vec::new();
    for max in MAXIMA {
        for k in [Nanos::from_micros(5), Nanos::from_micros(30)] {
            let parameters = Parameters { max, ..Parameters::default() };
            let setting = Setting { block: BlockCost::from_total(k), parameters };
            let replayed = replay(trace.name(), &waits, &setting, &[PolicyKind::LowRegret]).unwrap();
            let ours = replayed.into_iter().find(|row| row.contender == Contender::Policy(PolicyKind::LowRegret));
            rows.push(ours.expect("a row for each policy asked for"));
        }
    }
    rows
}

#[test]
fn low_regret_is_within_a_twentieth_of_the_best_fixed_window_on_every_trace() {
    for row in Builtin::ALL.into_iter().flat_map(rows) {
        assert!(row.against_best_fixed <= 1.05, "{row:?}");
    }
}

#[test]
fn low_regret_never_costs_more_than_1_6_times_what_the_clairvoyant_pays() {
    for row in Builtin::ALL.into_iter().flat_map(rows) {
        assert!(row.against_clairvoyant <= 1.6, "{row:?}");
    }
}

#[test]
fn low_regret_beats_the_best_fixed_window_where_waits_have_structure() {
    for row in Builtin::ALL.into_iter().filter(|trace| trace.has_structure()).flat_map(rows) {
        assert!(row.against_best_fixed < 1.0, "{row:?}");
    }
}
