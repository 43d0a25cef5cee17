//! One context: what has been learned in it, and what a block costs in it.

use super::PROBE_EVERY;
use super::buckets::LONGEST;
use super::context::{Class, Depth};
use super::experts::{Advice, Experts};
use super::histogram::Histogram;
use super::price::Price;
use super::trial::{Arm, Trial};
use crate::{BlockCost, Contention, Wait};

/// Waits between two trials, at first.
const SOONEST: u32 = 128;

/// Spins in vain that end a trial.
const FRUITLESS: u32 = 2;

/// A context's experts, its price of a block, and the trials that find that out.
pub(super) struct Learner {
    depth: Depth,
    experts: Experts,
    price: Price,
    trial: Trial,
    /// By how much a block makes waits of this context longer, as far as trials have shown.
    added: Option<i64>,
    until_probe: u32,
}

/// What was decided about a wait.
#[derive(Clone, Copy, Default)]
pub(super) struct Decision {
    advice: Advice,
    /// The window that is trusted, whatever was tried instead.
    trusted: u64,
    /// The window.
    pub(super) window: u64,
    reason: Reason,
}

/// Why a wait has the window it has.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Reason {
    #[default]
    Trusted,
    Probe,
    Trial(Arm),
    /// It is not for this learner to say.
    Overruled,
    /// Nor is it to learn from what comes of it.
    Ignored,
}

/// What a learner has to say about a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Say {
    /// Its window is the one.
    Now,
    /// Another habit is in force, and it learns from what comes of that.
    Later,
    /// Another habit is tried.
    None,
}

impl Decision {
    pub(super) fn trusted(&self) -> u64 {
        self.trusted
    }
}

impl Learner {
    pub(super) fn new(depth: Depth, price: Price) -> Self {
        Self {
            depth,
            experts: Experts::new(),
            price,
            trial: Trial::new(SOONEST, FRUITLESS),
            added: None,
            until_probe: PROBE_EVERY,
        }
    }

    /// How long the coming wait is to be spun for, after one of class `last`, if it is for this learner to say.
    pub(super) fn decide(&mut self, last: Class, say: Say) -> Decision {
        let break_even = self.price.break_even();
        let advice = self.experts.advice(last, break_even);
        let trusted = self.experts.trusted(&advice);
        let (window, reason) = match (say, self.trial.arm()) {
            (Say::None, _) => (trusted, Reason::Ignored),
            (Say::Later, _) => (trusted, Reason::Overruled),
            (Say::Now, Arm::AsUsual) if trusted < break_even && self.probe_is_due() => (break_even, Reason::Probe),
            (Say::Now, Arm::AsUsual) => (trusted, Reason::Trusted),
            (Say::Now, Arm::Block) => (0, Reason::Trial(Arm::Block)),
            (Say::Now, Arm::Spin) => (self.price.reach(), Reason::Trial(Arm::Spin)),
        };
        Decision { advice, trusted, window, reason }
    }

    /// Learns from a wait; returns the class of the last wait, as what follows should take it.
    pub(super) fn observe(&mut self, decision: &Decision, last: Class, wait: &Wait<'_>) -> Class {
        let length = self.price.true_length(wait);
        if decision.reason == Reason::Probe && !wait.blocked && length > decision.trusted {
            // This was a surprise, and one surprise seldom comes alone. A row of them costs nothing, as each is a block
            // saved; it ends with the first miss.
            self.until_probe = 1;
        }
        // A wait that was slept through for the sake of a trial is none that any experts should count on.
        let is_usual = !matches!(decision.reason, Reason::Trial(Arm::Block) | Reason::Ignored);
        if is_usual {
            self.experts.learn(&decision.advice, last, length, &self.price);
        }
        if self.depth != Depth::Many && !matches!(decision.reason, Reason::Overruled | Reason::Ignored) {
            // Nobody knows whether a guest waits: with nothing in flight sleeping is tried only to take back what trials found.
            let may_try = self.depth == Depth::One || self.added.is_some_and(|added| added > self.price.latency());
            let may_block = |length| may_try && self.price.may_pay_to_block(length);
            if let Some(added) = self.trial.take(wait.length.0.min(LONGEST), wait.blocked, may_block) {
                self.learn_added(added);
            }
        }
        if is_usual { Class::of(length) } else { last }
    }

    /// Whether the coming wait is to be spun for in spite of a short window; to be asked once for each such wait.
    fn probe_is_due(&mut self) -> bool {
        self.until_probe -= 1;
        let due = self.until_probe == 0;
        if due {
            self.until_probe = PROBE_EVERY;
        }
        due
    }

    fn learn_added(&mut self, found: i64) {
        let known = self.added.unwrap_or_else(|| self.price.latency());
        self.added = Some(known.midpoint(found));
        self.reprice();
    }

    fn reprice(&mut self) {
        if let Some(added) = self.added {
            // With nothing in flight it is the guest who decides when the wait ends, and it may not be waiting for us:
            // then a block delays its request and does not show in the wait.
            let least = if self.depth == Depth::None { self.price.latency() } else { i64::MIN };
            self.price.set_added(added.max(least));
        }
        self.experts.histograms().for_each(Histogram::hurry);
    }

    /// Learns what a block costs where waits do not tell.
    pub(super) fn set_block(&mut self, cost: BlockCost) {
        let before = self.price.latency();
        self.price.set_block(cost);
        // What makes wake-ups later makes blocked waits longer by as much.
        let later = self.price.latency() - before;
        self.added = self.added.map(|added| added.saturating_add(later));
        self.reprice();
    }

    pub(super) fn contend(&mut self, evidence: Contention) {
        if self.price.contend(evidence) {
            self.reprice();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Nanos;

    /// Has the learner see so many waits of `length`; returns the window it trusts in the end.
    fn see(learner: &mut Learner, say: Say, length: u64, waits: u32) -> u64 {
        let last = Class::of(10_000);
        for _ in 0..waits {
            let decision = learner.decide(last, say);
            let (spun, blocked) = (Nanos(length.min(decision.window)), length > decision.window);
            learner.observe(&decision, last, &Wait { length: Nanos(length), spun, blocked, active: &[] });
        }
        learner.decide(last, Say::None).trusted()
    }

    #[test]
    fn nothing_is_learned_from_waits_under_a_habit_that_is_tried() {
        let mut price = Price::new(Nanos(1_000_000), 1);
        price.set_block(BlockCost::from_total(Nanos(30_000)));
        let mut learner = Learner::new(Depth::One, price);
        let before = see(&mut learner, Say::Now, 10_000, 500);
        assert!(before >= 10_000, "{before}");
        assert_eq!(see(&mut learner, Say::None, 150_000, 2_000), before);
        // Under one that is in force it is.
        assert_ne!(see(&mut learner, Say::Later, 150_000, 2_000), before);
    }

    fn learner(depth: Depth) -> Learner {
        let mut price = Price::new(Nanos(1_000_000), 1);
        price.set_block(BlockCost { cpu: Nanos(10_000), latency: Nanos(20_000) });
        Learner::new(depth, price)
    }

    #[test]
    fn where_waits_are_too_long_one_in_128_is_probed_and_a_surprise_is_followed_by_more_probes_until_the_first_miss() {
        let mut learner = learner(Depth::Many);
        let last = Class::of(150_000);
        let mut probed = |length: u64| {
            let decision = learner.decide(last, Say::Now);
            let (spun, blocked) = (Nanos(length.min(decision.window)), length > decision.window);
            learner.observe(&decision, last, &Wait { length: Nanos(length), spun, blocked, active: &[] });
            (decision.trusted < decision.window).then_some(decision.window)
        };
        // Eight waits tell it so.
        let probes: Vec<_> = (0..8 + 3 * 128).filter(|_| probed(150_000) == Some(30_000)).collect();
        assert_eq!(probes, [7 + 128, 7 + 2 * 128, 7 + 3 * 128]);
        assert!((1..128).all(|_| probed(150_000).is_none()));
        let row = [25_000, 25_000, 150_000, 150_000].map(|length| probed(length).is_some());
        assert_eq!(row, [true, true, true, false]);
        // One that is no longer than what is spun for anyway is no surprise.
        assert!((2..128).all(|_| probed(150_000).is_none()));
        assert_eq!([0, 150_000].map(|length| probed(length).is_some()), [true, false]);
    }

    #[test]
    fn what_trials_find_is_met_half_way_and_where_a_guest_may_not_wait_a_block_is_never_taken_for_less_than_it_is() {
        for (depth, found, block) in [
            (Depth::One, 30_000, 35_000),
            (Depth::One, -20_000, 10_000),
            (Depth::None, 30_000, 35_000),
            (Depth::None, -20_000, 30_000),
        ] {
            let mut learner = learner(depth);
            learner.learn_added(found);
            assert_eq!(learner.price.block(), block, "{depth:?} {found}");
            // Later wake-ups come on top.
            let added = learner.added.unwrap();
            assert_eq!(added, 20_000_i64.midpoint(found));
            learner.set_block(BlockCost { cpu: Nanos(10_000), latency: Nanos(25_000) });
            assert_eq!((learner.added, learner.price.block()), (Some(added + 5_000), block + 5_000));
        }
    }

    #[test]
    fn a_wait_that_a_trial_slept_through_is_learned_by_no_expert() {
        let slept = |reason| {
            let mut learner = learner(Depth::Many);
            let decision = Decision { reason, ..learner.decide(Class::of(1_000), Say::Now) };
            let wait = Wait { length: Nanos(600_000), spun: Nanos::ZERO, blocked: true, active: &[] };
            learner.observe(&decision, Class::of(1_000), &wait)
        };
        let (as_it_was, new) = (Class::of(1_000), Class::of(580_000));
        for (reason, class) in [
            (Reason::Trusted, new),
            (Reason::Probe, new),
            (Reason::Overruled, new),
            (Reason::Trial(Arm::Spin), new),
            (Reason::Trial(Arm::Block), as_it_was),
            (Reason::Ignored, as_it_was),
        ] {
            assert_eq!(slept(reason), class);
        }
    }

    #[test]
    fn a_trial_begins_where_a_single_wait_can_tell_and_it_is_for_the_learner_to_say() {
        for (depth, say, spins, known, is_tried) in [
            (Depth::One, Say::Now, true, None, true),
            (Depth::None, Say::Now, false, None, true),
            // Whether a guest waits nobody knows, and so nothing is slept through; but what trials have raised they can lower.
            (Depth::None, Say::Now, true, None, false),
            (Depth::None, Say::Now, true, Some(20_000), false),
            (Depth::None, Say::Now, true, Some(20_001), true),
            (Depth::Many, Say::Now, true, None, false),
            (Depth::One, Say::Later, true, None, false),
            (Depth::One, Say::None, true, None, false),
        ] {
            let mut learner = Learner { added: known, ..learner(depth) };
            let length = if spins { 20_000 } else { 150_000 };
            let is_seen = (0..200).any(|_| {
                let decision = learner.decide(Class::of(length), say);
                let (spun, blocked) = (Nanos(length.min(decision.window)), length > decision.window);
                let wait = Wait { length: Nanos(length), spun, blocked, active: &[] };
                learner.observe(&decision, Class::of(length), &wait);
                learner.trial.arm() != Arm::AsUsual
            });
            assert_eq!(is_seen, is_tried, "{depth:?} {say:?} {spins} {known:?}");
        }
    }
}
