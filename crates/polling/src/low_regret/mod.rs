//! Learns how long waits are, and prices spinning against blocking.
//!
//! Spinning for a wait X under a window t costs `min(X, t)`, plus K if X is longer than t; K is what a block costs. Who
//! knew X beforehand would pay `min(X, K)`. This policy pays little more where the past tells of the future, and never
//! much more than twice as much where it does not.
//!
//! | file | what it is |
//! |---|---|
//! | `price.rs` | what spinning and blocking cost now |
//! | `buckets.rs` | the scale on which waits are counted |
//! | `histogram.rs` | the waits of late, and the window that would have been cheapest for them |
//! | `context.rs` | what the loop knows before a wait, sorted into a few contexts |
//! | `experts.rs` | four experts on the next window, and which of them has been cheapest of late |
//! | `trial.rs` | what a block adds to a wait, found by experiment |
//! | `slice.rs` | what some requests in a row came to, CPU and time |
//! | `habits.rs` | to follow that, to block at once, or to spin to the end: which serves requests at the least cost |
//! | `learner.rs` | all of this for one context |

mod buckets;
mod context;
mod experts;
mod habits;
mod histogram;
mod learner;
mod price;
mod slice;
mod trial;

use self::buckets::LONGEST;
use self::context::{Class, Context};
use self::habits::Habits;
use self::learner::{Decision, Learner, Say};
use self::price::Price;
use crate::{BlockCost, Contention, HabitTimes, Nanos, Parameters, Policy, PolicyKind, Slot, Standing, Wait};

/// While the window is too short to see it, one wait in so many is spun for until spinning has cost a block.
///
/// A wait that blocked is known only by its wake-up, and a wake-up is late by more than was calibrated on a machine
/// that has gone quiet. A loop that only ever blocks would never find out that its waits have become short. This
/// costs at most K / 128 a wait.
const PROBE_EVERY: u32 = 128;

/// The policy `low-regret`.
pub(crate) struct LowRegret {
    is_off: bool,
    /// One for each context.
    learners: Vec<Learner>,
    habits: Habits,
    /// How long the last wait truly was.
    last: Class,
    /// The wait that `window` was asked about and `observe` will tell of.
    coming: Context,
    decision: Decision,
}

impl LowRegret {
    /// The longest window, if nobody says otherwise: half of the longest wait that is told from a longer one.
    pub(crate) const LONGEST: Nanos = Nanos(LONGEST / 2);

    pub(crate) fn new(parameters: &Parameters) -> Self {
        let max = parameters.max_for(PolicyKind::LowRegret);
        let price = Price::new(max, parameters.price_or_default());
        Self {
            is_off: max == Nanos::ZERO,
            learners: Context::depths().map(|depth| Learner::new(depth, price.clone())).collect(),
            habits: Habits::new(price),
            last: Class::default(),
            coming: Context::default(),
            decision: Decision::default(),
        }
    }
}

impl Policy for LowRegret {
    fn window(&mut self, before: &Standing) -> Nanos {
        if self.is_off {
            return Nanos::ZERO;
        }
        self.coming = Context::of(before);
        self.habits.resume(before);
        let ruled = self.habits.window();
        let say = match ruled {
            None => Say::Now,
            Some(_) if self.habits.is_trial() => Say::None,
            Some(_) => Say::Later,
        };
        self.decision = self.learners[self.coming.index()].decide(self.last, say);
        Nanos(ruled.unwrap_or(self.decision.window))
    }

    fn observe(&mut self, wait: &Wait<'_>) {
        if self.is_off {
            return;
        }
        self.habits.observe(wait);
        self.last = self.learners[self.coming.index()].observe(&self.decision, self.last, wait);
    }

    fn forget(&mut self, _slot: Slot) {}

    fn window_now(&self) -> Nanos {
        Nanos(self.habits.trusted().unwrap_or(self.decision.trusted()))
    }

    fn weighs_block_cost(&self) -> bool {
        true
    }

    fn wants_cpu_time(&self) -> bool {
        self.habits.wants_cpu_time()
    }

    fn habits(&self) -> Option<HabitTimes> {
        Some(self.habits.in_use())
    }

    fn set_block_cost(&mut self, cost: BlockCost) {
        self.learners.iter_mut().for_each(|learner| learner.set_block(cost));
        self.habits.set_block(cost);
    }

    fn contend(&mut self, evidence: Contention) {
        self.learners.iter_mut().for_each(|learner| learner.contend(evidence));
        self.habits.contend(evidence);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Done, EventKind, LastWait};

    const WAKEUP: u64 = 18_000;

    /// `low-regret` at K = 30 us.
    fn policy(max: u64) -> LowRegret {
        let mut policy = LowRegret::new(&Parameters { max: Some(Nanos(max)), ..Parameters::default() });
        policy.set_block_cost(BlockCost::from_total(Nanos(30_000)));
        policy
    }

    /// Plays `waits` with a wake-up that is late by `wakeup`; returns the windows.
    fn play(policy: &mut LowRegret, waits: impl IntoIterator<Item = u64>, wakeup: u64) -> Vec<u64> {
        let mut last = LastWait::default();
        let mut one = |length: u64| {
            let window = policy.window(&Standing { in_flight: 1, last, ..Standing::default() }).0;
            let blocked = length > window;
            let seen = Nanos(if blocked { length + wakeup } else { length });
            policy.observe(&Wait { length: seen, spun: Nanos(length.min(window)), blocked, active: &[] });
            last = LastWait { kind: EventKind::Completion, length: seen };
            window
        };
        waits.into_iter().map(&mut one).collect()
    }

    fn hits(windows: &[u64], length: u64) -> usize {
        windows.iter().filter(|&&window| window >= length).count()
    }

    #[test]
    fn knowing_nothing_it_spins_until_spinning_has_cost_a_block() {
        assert_eq!(play(&mut policy(50_000), [10_000], WAKEUP), [30_000]);
        assert_eq!(play(&mut policy(20_000), [10_000], WAKEUP), [20_000]);
    }

    #[test]
    fn it_never_spins_when_the_maximum_is_zero() {
        assert_eq!(play(&mut policy(0), [1; 300], WAKEUP), [0; 300]);
    }

    #[test]
    fn short_waits_are_spun_for_and_long_ones_slept_through_but_for_probes_and_trials() {
        let short = play(&mut policy(32_768), [10_000; 2_000], WAKEUP);
        assert!(hits(&short, 10_000) > 1_940, "{}", hits(&short, 10_000));
        assert!(short[100..].iter().filter(|&&window| window > 13_000).count() <= 15);

        let long = play(&mut policy(32_768), [150_000; 2_000], WAKEUP);
        let probes = long[100..].iter().filter(|&&window| window > 0).count();
        assert!((10..=25).contains(&probes), "{probes}");
    }

    #[test]
    fn a_loop_that_wakes_later_than_calibrated_still_finds_out_that_its_waits_are_short() {
        let mut policy = policy(32_768);
        play(&mut policy, [2_000_000; 3_000], 5 * WAKEUP);
        let windows = play(&mut policy, [10_000; 3_000], 5 * WAKEUP);
        assert!(hits(&windows, 10_000) > 2_750, "{}", hits(&windows, 10_000));
    }

    #[test]
    fn a_change_of_phase_is_followed_at_once_where_phases_have_been_seen_before() {
        let mut policy = policy(32_768);
        for _ in 0..4 {
            play(&mut policy, [150_000; 500], WAKEUP);
            play(&mut policy, [10_000; 500], WAKEUP);
        }
        let slow = play(&mut policy, [150_000; 100], WAKEUP);
        assert!(hits(&slow[1..], 1) <= 1);
        let fast = play(&mut policy, [10_000; 100], WAKEUP);
        assert_eq!(hits(&fast[1..], 10_000), 99);
    }

    #[test]
    fn a_dearer_block_is_worth_a_longer_spin_within_a_few_waits() {
        let mut policy = policy(32_768);
        let before = play(&mut policy, [20_000; 1_000], WAKEUP);
        assert!(hits(&before[900..], 20_000) == 100);
        policy.set_block_cost(BlockCost::from_total(Nanos(5_000)));
        let cheap = play(&mut policy, [20_000; 1_000], 3_000);
        assert_eq!(hits(&cheap[2..], 20_000), 0);
        policy.set_block_cost(BlockCost::from_total(Nanos(30_000)));
        let dear = play(&mut policy, [20_000; 1_000], WAKEUP);
        assert!(hits(&dear[1..], 20_000) > 900);
    }

    #[test]
    fn where_somebody_wants_the_core_spinning_is_dearer() {
        let mut policy = policy(32_768);
        play(&mut policy, [20_000; 1_000], WAKEUP);
        let contended = Contention { ran: Nanos(50_000_000), delayed: Nanos(50_000_000), preempted: 20 };
        (0..10).for_each(|_| policy.contend(contended));
        let windows = play(&mut policy, [20_000; 1_000], WAKEUP);
        assert!(hits(&windows[2..], 20_000) < 40);
        (0..30).for_each(|_| policy.contend(Contention { delayed: Nanos::ZERO, ..contended }));
        let windows = play(&mut policy, [20_000; 1_000], WAKEUP);
        assert!(hits(&windows[1..], 20_000) > 950);
    }

    #[test]
    fn the_telemetry_window_is_the_trusted_one() {
        let mut policy = policy(32_768);
        let windows = play(&mut policy, [10_000; 100], WAKEUP);
        assert_eq!(policy.window_now(), Nanos(windows[99]));
    }

    #[test]
    fn of_waits_under_a_habit_that_is_in_force_it_learns_and_of_those_under_one_that_is_tried_it_does_not() {
        let mut policy = policy(1_000_000);
        // Whether the window was the habit's, and whether that was tried; and whether the CPU time was asked for.
        let (mut seen, mut asked) = ([[false; 2]; 2], [false; 2]);
        let mut last = LastWait::default();
        for _ in 0..20_000 {
            asked[usize::from(policy.wants_cpu_time())] = true;
            let done = Done { requests: 8, took: Nanos::ZERO };
            let window = policy.window(&Standing { in_flight: 1, done, last, ..Standing::default() }).0;
            let (is_tried, is_ruled) = (policy.habits.is_trial(), policy.habits.window().is_some());
            // Whatever is tried is cheaper, and so comes into force.
            let length = if is_tried { 100_000 } else { 900_000 };
            let (spun, blocked) = (Nanos(length.min(window)), length > window);
            policy.last = Class::default();
            policy.observe(&Wait { length: Nanos(length), spun, blocked, active: &[] });
            assert_eq!(policy.last != Class::default(), !(is_tried && is_ruled));
            last = LastWait { kind: EventKind::Completion, length: Nanos(length) };
            seen[usize::from(is_ruled)][usize::from(is_tried)] = true;
            if seen[1] == [true; 2] {
                break;
            }
        }
        assert_eq!((seen[1], asked), ([true; 2], [true; 2]));
    }
}
