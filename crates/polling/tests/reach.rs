//! What `low-regret` must reach on the traces that ship, generated and recorded.
#![allow(missing_docs)]

use egret_polling::builtin::Builtin;
use egret_polling::replay::{Contender, Row, Setting, replay};
use egret_polling::trace::{Ready, Record, Trace};
use egret_polling::{BlockCost, EventKind, Nanos, Parameters, PolicyKind, Slot};

/// No `poll-max-ns`, and QEMU's.
const MAXIMA: [Option<Nanos>; 2] = [None, Some(Parameters::QEMU_MAX)];

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

/// Numbers that look random and are the same on every run.
struct Random(u64);

impl Random {
    /// Above 0, up to 1.
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) + 1) as f64 / f64::from(1 << 24)
    }

    /// Gamma with a whole shape: so many exponentials, one after the other.
    fn gamma(&mut self, shape: u32, mean: f64) -> f64 {
        (0..shape).map(|_| -self.unit().ln() * mean / f64::from(shape)).sum()
    }
}

/// Waits that ship with nobody, of `(in flight, microseconds)`.
fn made_up(draw: impl Fn(&mut Random, usize) -> (u32, f64)) -> Trace {
    let mut random = Random(7);
    let wait = |index| {
        let (in_flight, us) = draw(&mut random, index);
        let kind = if in_flight == 0 { EventKind::Queue } else { EventKind::Completion };
        let mut ready = Ready::default();
        ready.push(Slot(u32::from(in_flight == 0)), kind);
        let length = Nanos((us * 1_000.0) as u64);
        Record { length, spun: length, blocked: false, in_flight, ended_by: kind, ready }
    };
    Trace { note: String::new(), block: BlockCost::default(), lost: 0, waits: (0..30_000).map(wait).collect() }
}

#[test]
fn low_regret_is_within_a_twentieth_of_every_policy_and_every_window_on_waits_that_it_has_never_seen() {
    let gamma = |random: &mut Random, _| (1, random.gamma(4, 24.0));
    let drifting = |random: &mut Random, index: usize| (1, random.gamma(8, 5.0 + index as f64 / 300.0));
    let alternating = |random: &mut Random, index: usize| {
        if index.is_multiple_of(2) { (0, random.gamma(8, 4.0)) } else { (1, random.gamma(8, 90.0)) }
    };
    let pauses = |random: &mut Random, index: usize| {
        if index.is_multiple_of(50) { (0, 2_000.0) } else { (1, random.gamma(4, 12.0)) }
    };
    let regimes = |random: &mut Random, index: usize| (1, random.gamma(6, [8.0, 120.0, 25.0][index / 700 % 3]));
    let traces = [
        ("gamma", made_up(gamma)),
        ("drifting", made_up(drifting)),
        ("alternating", made_up(alternating)),
        ("pauses", made_up(pauses)),
        ("regimes", made_up(regimes)),
    ];
    for (name, trace) in traces {
        for k_us in [5, 15, 30, 60] {
            let setting =
                Setting { block: BlockCost::from_total(Nanos::from_micros(k_us)), parameters: Parameters::default() };
            let rows = replay(name, &trace, &setting, PolicyKind::ALL).unwrap();
            let cost = |row: &Row| row.cost_ns as f64;
            let ours = rows.iter().find(|row| row.contender == Contender::Policy(PolicyKind::LowRegret)).unwrap();
            // The first row knows the future.
            for row in &rows[1..] {
                assert!(cost(ours) <= 1.05 * cost(row), "{name}, K = {k_us} us: {} of {row:?}", cost(ours) / cost(row));
            }
        }
    }
}
