//! The traces that ship with Egret: generated, seeded, the same on every machine.
//!
//! Each is a caricature of one thing that real waits do, so that a policy's strength or weakness has a name.

mod random;

use std::str::FromStr;

use strum::VariantArray;
use thiserror::Error;

use self::random::Random;
use crate::trace::{Ready, Record, Trace};
use crate::{BlockCost, EventKind, Nanos, Slot};

/// A generated trace, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, VariantArray)]
pub enum Builtin {
    /// `lognormal`: a fast disk, 10 us and a little spread.
    Lognormal,
    /// `tight`: a disk across a network, 150 us and hardly any spread.
    Tight,
    /// `exponential`: 20 us on average, and having waited says nothing.
    Exponential,
    /// `mixture`: a guest's kick after 3 us or a completion after 80 us, at random.
    Mixture,
    /// `alternating`: the same waits strictly in turn, as at queue depth 1.
    Alternating,
    /// `bursts`: batches of requests that complete every 2 us, then nothing for 2 ms.
    Bursts,
    /// `phases`: for a while memory at 2 us, then a fast disk at 10 us, then a network at 150 us, and around again.
    Phases,
    /// `heavy-tail`: mostly just above 2 us, and now and then anything (Pareto, 1.1).
    HeavyTail,
}

impl Builtin {
    /// All of them.
    pub const ALL: [Self; Self::VARIANTS.len()] = *Self::VARIANTS.first_chunk().expect("all of them");

    /// Waits in each.
    pub const WAITS: usize = 20_000;

    /// How it is spelled.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lognormal => "lognormal",
            Self::Tight => "tight",
            Self::Exponential => "exponential",
            Self::Mixture => "mixture",
            Self::Alternating => "alternating",
            Self::Bursts => "bursts",
            Self::Phases => "phases",
            Self::HeavyTail => "heavy-tail",
        }
    }

    /// What it stands for, in a few words.
    pub const fn note(self) -> &'static str {
        match self {
            Self::Lognormal => "lognormal, median 10 us, sigma 0.25",
            Self::Tight => "lognormal, median 150 us, sigma 0.02",
            Self::Exponential => "exponential, mean 20 us",
            Self::Mixture => "kick after 3 us or completion after 80 us, at random",
            Self::Alternating => "kick after 3 us, completion after 80 us, in turn",
            Self::Bursts => "8 to 32 completions 2 us apart, then 2 ms until the next kick",
            Self::Phases => "300 to 3000 waits each of 2 us, 10 us, 150 us, around and around",
            Self::HeavyTail => "Pareto, least 2 us, alpha 1.1",
        }
    }

    /// Whether what the loop knows before a wait, or the waits just before, foretell the wait.
    pub const fn has_structure(self) -> bool {
        matches!(self, Self::Alternating | Self::Bursts | Self::Phases)
    }

    /// Draws the waits; the same every time.
    pub fn generate(self) -> Trace {
        let mut pen = Pen::new(self as u64 + 1);
        while pen.waits.len() < Self::WAITS {
            self.draw(&mut pen);
        }
        pen.waits.truncate(Self::WAITS);
        let note = format!("generated: {}", self.note());
        Trace { note, block: BlockCost::default(), lost: 0, waits: pen.waits }
    }

    fn draw(self, pen: &mut Pen) {
        // Where waits are independent so is the number of requests in flight: a policy that believes otherwise pays.
        let any_depth = pen.random.between(0, 9);
        match self {
            Self::Lognormal => {
                let length = pen.random.lognormal(10_000.0, 0.25);
                pen.completion(any_depth, length);
            }
            Self::Tight => {
                let length = pen.random.lognormal(150_000.0, 0.02);
                pen.completion(any_depth, length);
            }
            Self::Exponential => {
                let length = pen.random.exponential(20_000.0);
                pen.completion(any_depth, length);
            }
            Self::HeavyTail => {
                let length = pen.random.pareto(2_000.0, 1.1);
                pen.completion(any_depth, length);
            }
            Self::Mixture => {
                if pen.random.coin() {
                    pen.kick_soon(any_depth);
                } else {
                    pen.disk(any_depth);
                }
            }
            Self::Alternating => {
                pen.kick_soon(0);
                pen.disk(1);
            }
            Self::Bursts => {
                let gap = pen.random.exponential(2_000_000.0);
                pen.kick(0, gap);
                for in_flight in (1..=pen.random.between(8, 32)).rev() {
                    let length = pen.random.lognormal(2_000.0, 0.25);
                    pen.completion(in_flight, length);
                }
            }
            Self::Phases => {
                for (median, sigma) in [(2_000.0, 0.25), (10_000.0, 0.25), (150_000.0, 0.02)] {
                    for _ in 0..pen.random.between(300, 3_000) {
                        let length = pen.random.lognormal(median, sigma);
                        pen.completion(1, length);
                    }
                }
            }
        }
    }
}

/// Writes waits down one after another.
struct Pen {
    random: Random,
    waits: Vec<Record>,
}

impl Pen {
    const QUEUE: Slot = Slot(0);
    const ENGINE: Slot = Slot(1);

    fn new(seed: u64) -> Self {
        Self { random: Random::seeded(seed), waits: Vec::with_capacity(Builtin::WAITS) }
    }

    fn kick(&mut self, in_flight: u32, length: f64) {
        self.write(in_flight, length, Self::QUEUE, EventKind::Queue);
    }

    fn completion(&mut self, in_flight: u32, length: f64) {
        self.write(in_flight, length, Self::ENGINE, EventKind::Completion);
    }

    /// A guest that answers a completion with the next request.
    fn kick_soon(&mut self, in_flight: u32) {
        let length = self.random.lognormal(3_000.0, 0.15);
        self.kick(in_flight, length);
    }

    /// A disk too slow to spin for.
    fn disk(&mut self, in_flight: u32) {
        let length = self.random.lognormal(80_000.0, 0.15);
        self.completion(in_flight, length);
    }

    fn write(&mut self, in_flight: u32, length: f64, slot: Slot, kind: EventKind) {
        let length = Nanos(length as u64);
        let mut ready = Ready::default();
        ready.push(slot, kind);
        self.waits.push(Record { length, spun: length, blocked: false, in_flight, ended_by: kind, ready });
    }
}

/// A generated trace that does not exist.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("generated traces are {known}; got '{0}'", known = Builtin::ALL.map(Builtin::name).join(", "))]
pub struct UnknownBuiltin(String);

impl FromStr for Builtin {
    type Err = UnknownBuiltin;

    fn from_str(text: &str) -> Result<Self, UnknownBuiltin> {
        let known = Self::ALL.into_iter().find(|trace| trace.name() == text);
        known.ok_or_else(|| UnknownBuiltin(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mean wait, in whole microseconds.
    fn mean_us(trace: Builtin) -> u64 {
        let waits = trace.generate().waits;
        waits.iter().map(|record| record.length.0).sum::<u64>() / waits.len() as u64 / 1_000
    }

    #[test]
    fn a_trace_is_the_same_every_time_and_differs_from_the_others() {
        for trace in Builtin::ALL {
            assert_eq!(trace.generate(), trace.generate());
            assert_eq!(trace.generate().waits.len(), Builtin::WAITS);
        }
        assert_ne!(Builtin::Mixture.generate().waits, Builtin::Alternating.generate().waits);
        // The first numbers that SplitMix64 draws with the seeds 1, 2, 3 and 8, modulo 10.
        let independent = [Builtin::Lognormal, Builtin::Tight, Builtin::Exponential, Builtin::HeavyTail];
        assert_eq!(independent.map(|trace| trace.generate().waits[0].in_flight), [5, 0, 3, 2]);
    }

    #[test]
    fn the_waits_are_about_as_long_as_the_note_says() {
        assert_eq!(mean_us(Builtin::Lognormal), 10);
        assert_eq!(mean_us(Builtin::Tight), 150);
        assert!((19..=20).contains(&mean_us(Builtin::Exponential)));
        assert!((41..=42).contains(&mean_us(Builtin::Mixture)));
        assert!((41..=42).contains(&mean_us(Builtin::Alternating)));
    }

    #[test]
    fn every_trace_survives_its_file_format() {
        for trace in Builtin::ALL {
            let trace = trace.generate();
            assert_eq!(Trace::parse(trace.to_string().as_bytes()), Ok(trace));
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_names() {
        let message = "alternate".parse::<Builtin>().unwrap_err().to_string();
        assert!(message.starts_with("generated traces are lognormal, tight,"), "{message}");
        assert!(message.ends_with("got 'alternate'"), "{message}");
    }

    /// How often each number of requests in flight was seen.
    fn depths(trace: &Trace) -> Vec<usize> {
        let mut seen = vec![0; 33];
        trace.waits.iter().for_each(|record| seen[record.in_flight as usize] += 1);
        seen
    }

    #[test]
    fn each_trace_is_drawn_as_its_note_says() {
        let median = |trace: &Trace| {
            let mut lengths: Vec<_> = trace.waits.iter().map(|record| record.length.0).collect();
            lengths.sort_unstable();
            lengths[lengths.len() / 2]
        };
        // Name, the median in ns within a fiftieth or so, the part of waits that a guest ended, in percent, and the most requests in
        // flight.
        for (trace, name, typical, kicks, deepest) in [
            (Builtin::Lognormal, "lognormal", 9_800..10_200, 0..1, 9),
            (Builtin::Tight, "tight", 149_500..150_500, 0..1, 9),
            (Builtin::Exponential, "exponential", 13_600..14_200, 0..1, 9),
            (Builtin::Mixture, "mixture", 3_000..90_000, 49..52, 9),
            (Builtin::Alternating, "alternating", 3_000..90_000, 50..51, 1),
            (Builtin::Bursts, "bursts", 1_950..2_150, 4..6, 32),
            (Builtin::Phases, "phases", 8_000..12_000, 0..1, 1),
            (Builtin::HeavyTail, "heavy-tail", 3_650..3_850, 0..1, 9),
        ] {
            assert_eq!((trace.name(), name.parse()), (name, Ok(trace)));
            let drawn = trace.generate();
            assert_eq!(drawn.note, format!("generated: {}", trace.note()));
            assert!(typical.contains(&median(&drawn)), "{name}: {}", median(&drawn));
            let of_guests = drawn.waits.iter().filter(|record| record.ended_by == EventKind::Queue).count();
            assert!(kicks.contains(&(of_guests * 100 / Builtin::WAITS)), "{name}: {of_guests}");
            let depths = depths(&drawn);
            assert_eq!(depths.iter().rposition(|&seen| seen > 0), Some(deepest), "{name}: {depths:?}");
            for record in &drawn.waits {
                let slot = if record.ended_by == EventKind::Queue { Slot(0) } else { Slot(1) };
                assert_eq!(record.ready.iter().collect::<Vec<_>>(), [(slot, record.ended_by)]);
            }
        }
        assert_eq!(Builtin::Tight.note(), "lognormal, median 150 us, sigma 0.02");
        let structured = Builtin::ALL.into_iter().filter(|trace| trace.has_structure());
        assert!(structured.eq([Builtin::Alternating, Builtin::Bursts, Builtin::Phases]));
    }

    #[test]
    fn batches_end_one_by_one_and_phases_follow_one_another() {
        let waits = Builtin::Bursts.generate().waits;
        let mut batches = waits.split(|record| record.in_flight == 0);
        assert_eq!(batches.next().map(<[_]>::len), Some(0), "a guest begins");
        for batch in batches {
            assert!(batch.len() <= 32);
            assert!(batch.windows(2).all(|two| two[0].in_flight == two[1].in_flight + 1));
        }
        let gaps: Vec<_> = waits.iter().filter(|record| record.in_flight == 0).map(|record| record.length.0).collect();
        let mean = gaps.iter().sum::<u64>() / gaps.len() as u64;
        assert!((1_850_000..2_150_000).contains(&mean), "{mean}");

        // Memory and a fast disk, each in turn, and then what lies across a network, which no other wait is as long as.
        let waits = Builtin::Phases.generate().waits;
        let rounds: Vec<_> = waits.chunk_by(|a, b| (a.length.0 > 40_000) == (b.length.0 > 40_000)).collect();
        let mean = |waits: &[Record]| waits.iter().map(|record| record.length.0).sum::<u64>() / waits.len() as u64;
        assert!(rounds.len() > 6);
        // The last one was cut off.
        for (index, waits) in rounds[..rounds.len() - 1].iter().enumerate() {
            if index % 2 == 1 {
                assert!((300..=3_000).contains(&waits.len()) && (149_000..151_000).contains(&mean(waits)));
            } else {
                assert!((600..=6_000).contains(&waits.len()));
                let (memory, disk) = (mean(&waits[..300]), mean(&waits[waits.len() - 300..]));
                assert!((1_900..2_200).contains(&memory) && (9_700..10_900).contains(&disk), "{memory} {disk}");
            }
        }
    }
}
