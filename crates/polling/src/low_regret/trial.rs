//! Finds out what a block adds to a wait, by doing for a while what is not being done.
//!
//! Calibration tells how late this thread wakes up. What sleeping does to a wait can be more than that, or less: a client
//! that is kept waiting sleeps more deeply and answers later, and who serves the disk may be sooner done on the core that
//! this thread has left. A thread that always blocks sees only the waits that blocking makes long, and goes on
//! blocking. So now and then a few waits in a row are spun for where blocking is the rule, and slept through where
//! spinning is, and the lengths are compared: in a row, because clients take a while to adapt. Waits differ anyway, and may come
//! in phases: what a block adds is only what shows in short waits and in long ones, and against those before the trial and after it.

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

    /// The shortest and the longest, but for one of each.
    fn range(mut self) -> [i64; 2] {
        self.lengths.sort_unstable();
        [1, SAMPLE - 2].map(|place| self.lengths[place].cast_signed())
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
    /// It is over: what came before it, what came of it, and waits as usual again.
    After { control: Sample, tried: Sample, settling: u32, sample: Sample },
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
                if sample.is_full() {
                    let (control, tried) = (*control, *sample);
                    self.phase = Phase::After { control, tried, settling: SETTLING, sample: Sample::default() };
                } else if self.fruitless == self.patience {
                    self.phase = Phase::Resting(self.gap);
                }
            }
            Phase::After { settling, .. } if *settling > 0 => *settling -= 1,
            Phase::After { control, tried, sample, .. } => {
                sample.add(length, blocked);
                if sample.is_full() {
                    let sides = [&*control, &*sample].map(|side| added(side, tried));
                    self.phase = Phase::Resting(self.gap);
                    return agreed(sides[0]?, sides[1]?, 3);
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

/// By how much a block made a wait longer; `None` if there were about as many of them on either side, or by chance.
fn added(one: &Sample, other: &Sample) -> Option<i64> {
    let (more, fewer) = if one.blocks > other.blocks { (one, other) } else { (other, one) };
    if more.blocks - fewer.blocks < SAMPLE / 2 {
        return None;
    }
    let ([short, long], [shorter, longer]) = (more.range(), fewer.range());
    agreed(short - shorter, long - longer, 2)
}

/// What two measurements come to that differ by such a part of the larger at most, a half or a third.
fn agreed(one: i64, other: i64, part: u64) -> Option<i64> {
    let agree = one.abs_diff(other) <= one.unsigned_abs().max(other.unsigned_abs()) / part;
    agree.then(|| one.midpoint(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOONEST: u32 = 128;
    const FRUITLESS: u32 = 2;

    /// Goes through a trial in a world where spinning makes waits of `spun` and blocking of `blocked`, and the rule is
    /// to spin or not; returns how many waits it took, and what it found.
    fn one(trial: &mut Trial, spins: bool, spun: u64, blocked: u64) -> (u32, Option<i64>) {
        among(trial, spins, |_, blocks| if blocks { blocked } else { spun })
    }

    /// The same where waits are as long as `length` says of each, by its number and whether it blocks.
    fn among(trial: &mut Trial, spins: bool, length: impl Fn(u32, bool) -> u64) -> (u32, Option<i64>) {
        for wait in 0.. {
            let blocks = match trial.arm() {
                Arm::AsUsual => !spins,
                Arm::Block => true,
                Arm::Spin => false,
            };
            let was_resting = matches!(trial.phase, Phase::Resting(_));
            let found = trial.take(length(wait, blocks), blocks, |_| true);
            if !was_resting && matches!(trial.phase, Phase::Resting(_)) {
                return (wait + 1, found);
            }
        }
        unreachable!("each trial has an end")
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
        assert!(took.is_sorted() && took[9] > LATEST && took[1] < 2 * SOONEST + 5 * SAMPLE as u32, "{took:?}");
        one(&mut trial, false, 10_000, 25_000);
        assert!(one(&mut trial, false, 10_000, 25_000).0 < SOONEST + 5 * SAMPLE as u32);
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
        let around = 3 * SAMPLE as u32 + 2 * SETTLING;
        let rests: Vec<_> = (0..9).map(|_| one(&mut trial, true, 10_000, 25_000).0 - around).collect();
        assert_eq!(rests, [128, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 8_192]);
    }

    /// Waits of which so many blocked.
    fn sample(lengths: [u64; SAMPLE], blocks: usize) -> Sample {
        Sample { lengths, waits: SAMPLE, blocks }
    }

    #[test]
    fn what_makes_short_waits_and_long_ones_longer_alike_is_the_doing_of_blocks_if_half_of_the_waits_differ() {
        let (short, long) = ([8, 7, 6, 5, 4, 3, 2, 1], [900, 16, 15, 14, 13, 12, 11, 1]);
        for (one, other, found) in [
            (sample(short, 0), sample(long, 8), Some(9)),
            (sample(long, 8), sample(short, 0), Some(9)),
            (sample(short, 8), sample(long, 0), Some(-9)),
            (sample(short, 2), sample(long, 6), Some(9)),
            (sample(short, 2), sample(long, 5), None),
            (sample(short, 6), sample(long, 3), None),
            // By 9 and by 18, and by 9 and by 20.
            (sample(short, 0), sample([900, 25, 15, 14, 13, 12, 11, 1], 8), Some(13)),
            (sample(short, 0), sample([900, 27, 15, 14, 13, 12, 11, 1], 8), None),
        ] {
            assert_eq!(added(&one, &other), found, "{one:?} {other:?}");
        }
        let agreed = [(-4, -6), (4, 7), (-1, 1), (0, 0)].map(|(one, other)| agreed(one, other, 3));
        assert_eq!(agreed, [Some(-5), None, None, Some(0)]);
    }

    #[test]
    fn a_phase_of_long_waits_that_begins_or_ends_with_a_trial_is_not_its_doing() {
        let trial_begins = SOONEST + SAMPLE as u32;
        let trial_ends = trial_begins + SETTLING + SAMPLE as u32;
        for (from, to, found) in [
            (u32::MAX, u32::MAX, Some(18_000)),
            (0, u32::MAX, Some(18_000)),
            (trial_begins, u32::MAX, None),
            (0, trial_begins, None),
            (trial_ends, u32::MAX, None),
            (0, trial_ends, None),
        ] {
            for spins in [true, false] {
                let length = |wait, blocks| {
                    let is_long = (from..to).contains(&wait);
                    (if is_long { 80_000 } else { 3_000 }) + if blocks { 18_000 } else { 0 }
                };
                assert_eq!(among(&mut Trial::new(SOONEST, FRUITLESS), spins, length).1, found, "{from} {to} {spins}");
            }
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
