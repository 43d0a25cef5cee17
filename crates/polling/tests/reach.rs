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

    fn either(&mut self, one: f64, in_hundred: u32, other: f64) -> f64 {
        if self.unit() * 100.0 <= f64::from(in_hundred) { one } else { other }
    }

    /// Such that half are shorter than `median`.
    fn lognormal(&mut self, median: f64, sigma: f64) -> f64 {
        let normal = (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos();
        median * (sigma * normal).exp()
    }
}

/// Waits that ship with nobody, of `(in flight, microseconds)`.
fn made_up(draw: impl Fn(&mut Random, usize) -> (u32, f64)) -> Trace {
    drawn(7, draw)
}

fn drawn(chances: u64, draw: impl Fn(&mut Random, usize) -> (u32, f64)) -> Trace {
    let mut random = Random(chances);
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

type Draw = fn(&mut Random) -> f64;

#[test]
fn single_waits_are_tried_without_taking_chance_or_phases_for_what_a_block_adds() {
    let phases = |random: &mut Random, index: usize, of: usize| {
        let is_short = (index / of).is_multiple_of(2);
        random.gamma(400, if is_short { 3.0 } else { 80.0 })
    };
    let draws: [(&str, Draw); 7] = [
        ("2 or 40 us", |random| random.either(2.0, 50, 40.0)),
        ("3 or 50 us", |random| random.either(3.0, 50, 50.0)),
        ("3 or 80 us", |random| random.either(3.0, 50, 80.0)),
        ("10 or 100 us", |random| random.either(10.0, 70, 100.0)),
        ("exponential, 20 us", |random| random.gamma(1, 20.0)),
        ("exponential, 40 us", |random| random.gamma(1, 40.0)),
        ("lognormal, 20 us", |random| random.lognormal(20.0, 2.0)),
    ];
    let setting = Setting {
        block: BlockCost { cpu: Nanos::from_micros(12), latency: Nanos::from_micros(18) },
        parameters: Parameters::default(),
    };
    let reached = |draw: &dyn Fn(&mut Random, usize) -> (u32, f64)| {
        [1, 2, 3, 4, 5, 6, 7, 8].map(|chances| {
            let rows = replay("", &drawn(chances * 7_919, draw), &setting, &[PolicyKind::LowRegret]).unwrap();
            let ours = rows.iter().find(|row| row.contender == Contender::Policy(PolicyKind::LowRegret));
            ours.expect("a row for each policy asked for").against_best_fixed
        })
    };
    for in_flight in [0, 1] {
        for (what, draw) in draws {
            let reached = reached(&|random, _| (in_flight, draw(random)));
            let mean = reached.iter().sum::<f64>() / 8.0;
            // Where spinning for all comes to little more than sleeping at once, chance may keep up either.
            assert!(
                mean <= 1.05 && reached.iter().all(|&it| it <= 1.2),
                "{what}, {in_flight} in flight: {reached:.3?}"
            );
        }
        for (of, bound) in [(8, 1.05), (16, 1.0), (20, 1.0), (24, 1.0), (32, 1.0), (64, 1.0)] {
            for it in reached(&|random, index| (in_flight, phases(random, index, of))) {
                assert!(it <= bound, "phases of {of}, {in_flight} in flight: {it:.3}");
            }
        }
    }
}
