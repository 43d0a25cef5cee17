//! What `low-regret` must reach on the traces that ship, generated and recorded.
#![allow(missing_docs)]

use egret_polling::builtin::Builtin;
use egret_polling::replay::{Contender, Row, Setting, replay};
use egret_polling::trace::Trace;
use egret_polling::{BlockCost, Nanos, Parameters, PolicyKind};

/// The default `poll-max-ns`, and one so large that it never binds.
const MAXIMA: [Nanos; 2] = [Parameters::DEFAULT_MAX, Nanos::from_millis(10)];

/// The traces that were recorded on a real machine.
fn recorded() -> Vec<(String, Trace)> {
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/traces")).unwrap();
    let read = |file: std::fs::DirEntry| {
        (file.file_name().into_string().unwrap(), Trace::parse(&std::fs::read(file.path()).unwrap()).unwrap())
    };
    folder.map(|file| read(file.unwrap())).collect()
}

/// Every trace that ships, by its name.
fn every_trace() -> Vec<(String, Trace)> {
    let generated = Builtin::ALL.into_iter().map(|trace| (trace.name().to_owned(), trace.generate()));
    generated.chain(recorded()).collect()
}

/// The row of `low-regret` for each maximum and for K = 5 us and 30 us.
fn rows((name, waits): (String, Trace)) -> Vec<Row> {
    let mut rows = Vec::new();
    for max in MAXIMA {
        for k in [Nanos::from_micros(5), Nanos::from_micros(30)] {
            let parameters = Parameters { max, ..Parameters::default() };
            let setting = Setting { block: BlockCost::from_total(k), parameters };
            let replayed = replay(&name, &waits, &setting, &[PolicyKind::LowRegret]).unwrap();
            let ours = replayed.into_iter().find(|row| row.contender == Contender::Policy(PolicyKind::LowRegret));
            rows.push(ours.expect("a row for each policy asked for"));
        }
    }
    rows
}

#[test]
fn low_regret_is_within_a_twentieth_of_the_best_fixed_window_on_every_trace() {
    for row in every_trace().into_iter().flat_map(rows) {
        assert!(row.against_best_fixed <= 1.05, "{row:?}");
    }
}

#[test]
fn low_regret_never_costs_more_than_1_6_times_the_offline_optimum() {
    for row in every_trace().into_iter().flat_map(rows) {
        assert!(row.competitive_ratio <= 1.6, "{row:?}");
    }
}

#[test]
fn low_regret_beats_the_best_fixed_window_where_waits_have_structure() {
    let structured = Builtin::ALL.into_iter().filter(|trace| trace.has_structure());
    for row in structured.flat_map(|trace| rows((trace.name().to_owned(), trace.generate()))) {
        assert!(row.against_best_fixed < 1.0, "{row:?}");
    }
}
