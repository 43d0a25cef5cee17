//! Finds out what a block adds to a wait, by doing for a while what is not being done.
//!
//! Calibration tells how late this thread wakes up. What sleeping does to a wait can be more than that, or less: a client
//! that is kept waiting sleeps more deeply and answers later, and who serves the disk may be sooner done on the core that
//! this thread has left. A thread that always blocks sees only the waits that blocking makes long, and goes on
//! blocking. So now and then a few waits in a row are spun for where blocking is the rule, and slept through where
//! spinning is, and the lengths are compared: in a row, because clients take a while to adapt.

/// Waits that are compared on either side.
const SAMPLE: usize = 8;
/// Waits at the beginning of a trial that are not counted: clients and disks react only after some.
const SETTLING: u32 = 4;
/// Waits between two trials, at most.
const LATEST: u32 = 8_192;

/// What a trial has the coming wait be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Arm {
    /// As the experts will.
    #[default]
    AsUsual,
    /// Slept through from the start.
    Block,
    /// Spun for, longer than usual.
    Spin,
}

/// Some waits in a row.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    lengths: [u64; SAMPLE],
    waits: usize,
    blocks: usize,
}

impl Sample {
    fn add(&mut self, length: u64, blocked: bool) {
        self.lengths[self.waits] = length;
        self.waits += 1;
        self.blocks += usize::from(blocked);
    }

    fn is_full(&self) -> bool {
        self.waits == SAMPLE
    }

    /// The median, which one wait that took forever does not move.
    fn typical(mut self) -> u64 {
        self.lengths.sort_unstable();
        self.lengths[(SAMPLE - 1) / 2]
    }
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// So many waits until the next trial.
    Resting(u32),
    /// Waits as usual, to compare with.
    Control(Sample),
    /// The trial: what came before it, and what has come of it so far.
    Running { control: Sample, settling: u32, sample: Sample },
}

/// The trials of one context; or of slices of requests, whose price then stands for the length of a wait.
pub(super) struct Trial {
    phase: Phase,
    arm: Arm,
    gap: u32,
    /// `gap`, at first.
    soonest: u32,
    /// Spins in vain that end a trial: such waits are too long to compare.
    patience: u32,
    /// Spins in vain during this trial.
    fruitless: u32,
}

impl Trial {
    /// The first trial begins after `soonest` waits. The distance doubles with each that finds the same rule as the one
    /// before.
    pub(super) fn new(soonest: u32, patience: u32) -> Self {
        Self { phase: Phase::Resting(soonest), arm: Arm::AsUsual, gap: soonest, soonest, patience, fruitless: 0 }
    }

    /// What the coming wait is to be.
    pub(super) fn arm(&self) -> Arm {
        if matches!(self.phase, Phase::Running { .. }) { self.arm } else { Arm::AsUsual }
    }

    /// Takes in a wait as it was seen. At the end of a trial: by how much a block makes a wait longer, in nanoseconds.
    ///
    /// `may_block` says whether blocking could possibly pay for waits of so many nanoseconds; where it cannot, sleeping
    /// through some would be a waste.
    pub(super) fn take(&mut self, length: u64, blocked: bool, may_block: impl Fn(u64) -> bool) -> Option<i64> {
        match &mut self.phase {
            Phase::Resting(1) => self.phase = Phase::Control(Sample::default()),
            Phase::Resting(left) => *left -= 1,
            Phase::Control(sample) => {
                sample.add(length, blocked);
                if sample.is_full() {
                    let control = *sample;
                    self.begin(control, may_block(control.typical()));
                }
            }
            Phase::Running { control, settling, sample } => {
                self.fruitless += u32::from(blocked && self.arm == Arm::Spin);
                if *settling > 0 {
                    *settling -= 1;
                } else {
                    sample.add(length, blocked);
                }
                let (control, sample) = (*control, *sample);
                if self.fruitless == self.patience || sample.is_full() {
                    self.phase = Phase::Resting(self.gap);
                }
                if sample.is_full() {
                    return added(&control, &sample);
                }
            }
        }
        None
    }

    fn begin(&mut self, control: Sample, may_block: bool) {
        let arm = if control.blocks * 2 >= SAMPLE { Arm::Spin } else { Arm::Block };
        // A rule that has changed is looked at again soon.
        self.gap = if arm == self.arm { (self.gap * 2).min(LATEST) } else { self.soonest };
        self.arm = arm;
        self.fruitless = 0;
        self.phase = if arm == Arm::Block && !may_block {
            Phase::Resting(self.gap)
        } else {
            Phase::Running { control, settling: SETTLING, sample: Sample::default() }
        };
    }
}

/// By how much a block made a wait longer; `None` if there were about as many of them on either side.
fn added(one: &Sample, other: &Sample) -> Option<i64> {
    let (more, fewer) = if one.blocks > other.blocks { (one, other) } else { (other, one) };
    let differ = more.blocks - fewer.blocks >= SAMPLE / 2;
    differ.then(|| more.typical().cast_signed() - fewer.typical().cast_signed())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOONEST: u32 = 128;
    const FRUITLESS: u32 = 2;

    /// Goes through a trial in a world where spinning makes waits of `spun` and blocking of `blocked`, and the rule is
    /// to spin or not; returns how many waits it took, and what it found.
    fn one(trial: &mut Trial, spins: bool, spun: u64, blocked: u64) -> (u32, Option<i64>) {
        let (mut waits, mut was_running) = (0, false);
        loop {
            let blocks = match trial.arm() {
                Arm::AsUsual if was_running => return (waits, None),
                Arm::AsUsual => !spins,
                Arm::Block => true,
                Arm::Spin => false,
            };
            was_running = trial.arm() != Arm::AsUsual;
            waits += 1;
            if let Some(found) = trial.take(if blocks { blocked } else { spun }, blocks, |_| true) {
                return (waits, Some(found));
            }
        }
    }

    #[test]
    fn what_a_block_adds_is_found_whichever_is_the_rule() {
        assert_eq!(one(&mut Trial::new(SOONEST, FRUITLESS), true, 10_000, 25_000).1, Some(15_000));
        assert_eq!(one(&mut Trial::new(SOONEST, FRUITLESS), false, 10_000, 25_000).1, Some(15_000));
        assert_eq!(one(&mut Trial::new(SOONEST, FRUITLESS), false, 17_000, 12_000).1, Some(-5_000));
    }

    #[test]
    fn trials_become_rare_while_the_rule_stays_and_come_soon_after_it_has_changed() {
        let mut trial = Trial::new(SOONEST, FRUITLESS);
        let took: Vec<_> = (0..10).map(|_| one(&mut trial, true, 10_000, 25_000).0).collect();
        assert!(took.is_sorted() && took[9] > LATEST && took[1] < 2 * SOONEST + 4 * SAMPLE as u32, "{took:?}");
        one(&mut trial, false, 10_000, 25_000);
        assert!(one(&mut trial, false, 10_000, 25_000).0 < SOONEST + 4 * SAMPLE as u32);
    }

    #[test]
    fn nobody_sleeps_where_that_could_not_pay() {
        let mut trial = Trial::new(SOONEST, FRUITLESS);
        for _ in 0..10 * SOONEST {
            assert_eq!(trial.take(2_000, false, |length| length > 4_000), None);
            assert_eq!(trial.arm(), Arm::AsUsual);
        }
    }

    #[test]
    fn waits_too_long_to_spin_for_end_a_trial_early_and_say_nothing() {
        let mut trial = Trial::new(SOONEST, FRUITLESS);
        let mut spins = 0;
        for _ in 0..2 * SOONEST {
            spins += u32::from(trial.arm() == Arm::Spin);
            assert_eq!(trial.take(1_000_000, true, |_| true), None);
        }
        assert_eq!(spins, FRUITLESS);
    }

    #[test]
    fn the_distance_doubles_with_each_trial_of_the_same_rule() {
        let mut trial = Trial::new(SOONEST, FRUITLESS);
        let around = 2 * SAMPLE as u32 + SETTLING;
        let rests: Vec<_> = (0..9).map(|_| one(&mut trial, true, 10_000, 25_000).0 - around).collect();
        assert_eq!(rests, [128, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 8_192]);
    }

    /// Waits of which so many blocked.
    fn sample(lengths: [u64; SAMPLE], blocks: usize) -> Sample {
        Sample { lengths, waits: SAMPLE, blocks }
    }

    #[test]
    fn waits_are_compared_by_their_medians_if_half_of_them_differ() {
        let (short, long) = ([8, 7, 6, 5, 4, 3, 2, 1], [900, 10, 10, 10, 10, 1, 1, 1]);
        for (one, other, found) in [
            (sample(short, 0), sample(long, 8), Some(6)),
            (sample(long, 8), sample(short, 0), Some(6)),
            (sample(short, 8), sample(long, 0), Some(-6)),
            (sample(short, 2), sample(long, 6), Some(6)),
            (sample(short, 2), sample(long, 5), None),
            (sample(short, 6), sample(long, 3), None),
        ] {
            assert_eq!(added(&one, &other), found, "{one:?} {other:?}");
        }
    }

    #[test]
    fn where_half_of_the_waits_block_that_is_the_rule_and_spinning_is_tried() {
        for (blocks, arm) in [(3, Arm::Block), (4, Arm::Spin)] {
            let mut trial = Trial::new(1, FRUITLESS);
            assert_eq!(trial.take(5, false, |_| true), None);
            for wait in 0..SAMPLE {
                assert_eq!(trial.arm(), Arm::AsUsual);
                assert_eq!(trial.take(5, wait < blocks, |_| true), None);
            }
            assert_eq!(trial.arm(), arm);
        }
    }
}
