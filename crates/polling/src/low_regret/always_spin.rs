//! Whether to spin for every wait, found by what a request comes to.
//!
//! What a block does to the waits after it shows in no single one of them. With several requests in flight they gather
//! meanwhile, and a later look finds more of them ended; and a client that is left to sleep once sleeps more deeply from
//! there on. So what [`Trial`] compares here is the price of a request, CPU and time together, over some dozens of requests
//! at a time.

use super::buckets::LONGEST;
use super::price::Price;
use super::trial::{Arm, Trial};
use crate::{BlockCost, Standing, Wait};

/// Requests that are priced together.
const SLICE: u32 = 32;
/// Slices between two trials, at first.
const SOONEST: u32 = 32;
/// A slice of more waits is over: with so few requests to so many waits, nothing of this pays.
const MOST_WAITS: u32 = 8 * SLICE;
/// Spinning for every wait is chosen where it saves more than this part of a request's price, and kept
/// while it saves anything.
const WORTH_IT: i64 = 32;
/// So many slices in a row whose waits are too long to spin for end it.
const IN_VAIN: u32 = 4;

/// What happened while some requests were served.
#[derive(Clone, Copy, Debug, Default)]
struct Slice {
    requests: u32,
    waits: u32,
    blocks: u32,
    /// Nanoseconds that waits took, and those of them that were spent spinning.
    waited: u64,
    spun: u64,
    /// Nanoseconds between waits.
    busy: u64,
}

impl Slice {
    /// Whether waits are so short that spinning for `reach` could find most of them.
    fn is_brisk(&self, reach: u64) -> bool {
        self.requests >= SLICE && self.waited <= 2 * reach * u64::from(self.waits)
    }

    fn is_mostly_slept_through(&self) -> bool {
        self.blocks * 4 >= self.waits
    }
}

/// Whether every wait is spun for, and the trials of the opposite.
pub(super) struct AlwaysSpin {
    price: Price,
    slice: Slice,
    trial: Trial,
    /// By how much spinning for every wait makes a request cheaper, averaged over the last trials.
    saved: i64,
    spins: bool,
    in_vain: u32,
}

impl AlwaysSpin {
    pub(super) fn new(price: Price) -> Self {
        let trial = Trial::new(SOONEST, u32::MAX);
        Self { price, slice: Slice::default(), trial, saved: 0, spins: false, in_vain: 0 }
    }

    /// Takes in what was done since the last wait.
    pub(super) fn resume(&mut self, before: &Standing) {
        let slice = &mut self.slice;
        slice.requests = slice.requests.saturating_add(before.done.requests);
        slice.busy += before.done.took.0.min(LONGEST);
        if slice.requests >= SLICE || slice.waits == MOST_WAITS {
            self.close();
        }
        self.slice.waits += 1;
    }

    /// The window that is trusted for every wait, if that is not for the experts to say.
    pub(super) fn trusted(&self) -> Option<u64> {
        self.spins.then(|| self.price.reach())
    }

    /// The window of the coming wait, if it is not for the experts to say.
    pub(super) fn window(&self) -> Option<u64> {
        match self.trial.arm() {
            Arm::AsUsual => self.trusted(),
            Arm::Block => Some(0),
            Arm::Spin => Some(self.price.reach()),
        }
    }

    /// Takes in a wait.
    pub(super) fn observe(&mut self, wait: &Wait<'_>) {
        let slice = &mut self.slice;
        slice.blocks += u32::from(wait.blocked);
        slice.waited += wait.length.0.min(LONGEST);
        slice.spun += wait.spun.0.min(LONGEST);
    }

    fn close(&mut self) {
        let slice = std::mem::take(&mut self.slice);
        let (brisk, slept) = (slice.is_brisk(self.price.reach()), slice.is_mostly_slept_through());
        let in_vain = !brisk || slept && self.window().is_some_and(|window| window > 0);
        self.in_vain = if in_vain { self.in_vain + 1 } else { 0 };
        if self.in_vain == IN_VAIN {
            *self = Self::new(self.price.clone());
        }
        if !brisk {
            return;
        }
        let Slice { requests, blocks, waited, spun, busy, .. } = slice;
        let cost = self.price.served(busy + spun, blocks, busy + waited) / u64::from(requests);
        // Where the experts spin by themselves they are left alone.
        let may_block = self.spins;
        if let Some(dearer) = self.trial.take(cost, slept, |_| may_block) {
            self.saved = self.saved.midpoint(dearer);
            self.spins = self.saved > if self.spins { 0 } else { cost.cast_signed() / WORTH_IT };
        }
    }

    pub(super) fn set_block(&mut self, cost: BlockCost) {
        self.price.set_block(cost);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Done, Nanos};

    /// How a batch of four requests goes: how long the wait for it is, for who spins and for who sleeps.
    #[derive(Clone, Copy)]
    struct Batch {
        spun: u64,
        slept: u64,
    }

    /// At K = 10 us of CPU, and windows of up to 50 us.
    fn always_spin() -> AlwaysSpin {
        let mut price = Price::new(Nanos(50_000), 1);
        price.set_block(BlockCost { cpu: Nanos(10_000), latency: Nanos(15_000) });
        AlwaysSpin::new(price)
    }

    /// Serves some batches, where the experts would sleep or spin; returns how many were slept through.
    fn serve(policy: &mut AlwaysSpin, batches: u32, batch: Batch, experts: u64) -> u32 {
        let mut blocks = 0;
        for _ in 0..batches {
            let done = Done { requests: 4, took: Nanos(5_000) };
            policy.resume(&Standing { done, ..Standing::default() });
            let window = policy.window().unwrap_or(experts);
            let length = if window == 0 { batch.slept } else { batch.spun };
            let blocked = length > window;
            let spun = Nanos(length.min(window));
            policy.observe(&Wait { length: Nanos(length), spun, blocked, active: &[] });
            blocks += u32::from(blocked);
        }
        blocks
    }

    /// Spinning takes 30 + 30 us and blocking 80 + 10.
    const SLEEPY: Batch = Batch { spun: 30_000, slept: 80_000 };
    /// Spinning takes 30 + 30 us and blocking 40 + 10.
    const BRISK: Batch = Batch { spun: 30_000, slept: 40_000 };

    #[test]
    fn who_sleeps_and_makes_requests_dear_by_that_comes_to_spin() {
        let mut policy = always_spin();
        serve(&mut policy, 1_000, SLEEPY, 0);
        assert_eq!(policy.trusted(), Some(50_000));
        let slept = serve(&mut policy, 10_000, SLEEPY, 0);
        assert!(slept < 1_000, "{slept}");
    }

    #[test]
    fn where_requests_are_cheaper_slept_through_only_trials_spin() {
        let mut policy = always_spin();
        let slept = serve(&mut policy, 10_000, BRISK, 0);
        assert_eq!(policy.trusted(), None);
        assert!(slept > 9_000, "{slept}");
    }

    #[test]
    fn spinning_that_has_ceased_to_pay_is_given_up() {
        let mut policy = always_spin();
        serve(&mut policy, 1_000, SLEEPY, 0);
        serve(&mut policy, 10_000, BRISK, 0);
        assert_eq!(policy.trusted(), None);
    }

    #[test]
    fn waits_that_have_become_too_long_to_spin_for_end_it_at_once() {
        let mut policy = always_spin();
        serve(&mut policy, 1_000, SLEEPY, 0);
        serve(&mut policy, 50, Batch { spun: 60_000, ..SLEEPY }, 0);
        assert_eq!(policy.trusted(), None);
    }

    #[test]
    fn nobody_spins_for_what_takes_so_long_that_it_cannot_pay() {
        let batch = Batch { spun: 90_000, slept: 120_000 };
        assert_eq!(serve(&mut always_spin(), 10_000, batch, 0), 10_000);
        let mut policy = always_spin();
        serve(&mut policy, 1_000, SLEEPY, 0);
        assert_eq!(serve(&mut policy, 1_000, batch, 0), 1_000);
        assert_eq!(policy.trusted(), None);
    }

    #[test]
    fn experts_that_spin_are_left_alone() {
        assert_eq!(serve(&mut always_spin(), 10_000, SLEEPY, 50_000), 0);
    }

    #[test]
    fn waits_without_requests_come_to_nothing() {
        let mut policy = always_spin();
        serve(&mut policy, 1_000, SLEEPY, 0);
        let wait = Wait { length: Nanos(1), spun: Nanos(1), blocked: false, active: &[] };
        for _ in 0..=IN_VAIN * MOST_WAITS {
            policy.resume(&Standing::default());
            policy.observe(&wait);
        }
        assert_eq!(policy.trusted(), None);
    }
}
