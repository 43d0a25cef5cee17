//! Four experts on the next window, and which of them has been cheapest of late: prediction with expert advice, by
//! following the leader.

use super::context::{CLASSES, Class};
use super::histogram::Histogram;
use super::price::Price;

/// How many experts there are.
const EXPERTS: usize = 4;
/// About how many waits back losses are remembered.
const LOSS_MEMORY: u64 = 256;

/// What each expert says the coming window should be, in nanoseconds.
///
/// 0. Spin until it has cost a block: wrong by a factor of two at most, whatever the waits do.
/// 1. The cheapest window for the waits in this context.
/// 2. The same, among waits that followed a wait as long as the last one: waits in turn.
/// 3. The same, among waits that followed, in this context, one as long as its last: phases.
pub(super) type Advice = [u64; EXPERTS];

/// Everything learned about one context.
pub(super) struct Experts {
    all: Histogram,
    by_last: [Histogram; CLASSES],
    by_own_last: [Histogram; CLASSES],
    /// How long the last wait in this context was.
    own_last: Class,
    /// What following each expert would have cost of late.
    losses: [u64; EXPERTS],
    /// The expert that is followed.
    leader: usize,
}

impl Experts {
    pub(super) fn new() -> Self {
        Self {
            all: Histogram::new(),
            by_last: std::array::from_fn(|_| Histogram::new()),
            by_own_last: std::array::from_fn(|_| Histogram::new()),
            own_last: Class::default(),
            losses: [0; EXPERTS],
            leader: 1,
        }
    }

    /// Asks every expert; one with little evidence says what a broader one says.
    pub(super) fn advice(&self, last: Class, break_even: u64) -> Advice {
        let all = self.all.window().unwrap_or(break_even);
        let by_last = self.by_last[last.index()].window().unwrap_or(all);
        let by_own_last = self.by_own_last[self.own_last.index()].window().unwrap_or(all);
        [break_even, all, by_last, by_own_last]
    }

    /// The window to follow.
    pub(super) fn trusted(&self, advice: &Advice) -> u64 {
        advice[self.leader]
    }

    /// Learns from a wait of `length` that followed one of class `last` and for which `advice` was given.
    pub(super) fn learn(&mut self, advice: &Advice, last: Class, length: u64, price: &Price) {
        self.add_losses(advice, length, price);
        self.all.add(length, price);
        self.by_last[last.index()].add(length, price);
        self.by_own_last[self.own_last.index()].add(length, price);
        self.own_last = Class::of(length);
    }

    /// Adds up what following each expert would have cost; the cheapest is the leader if it is cheaper by a fiftieth.
    fn add_losses(&mut self, advice: &Advice, length: u64, price: &Price) {
        let (least, most) =
            advice.iter().fold((u64::MAX, 0), |(low, high), &window| (low.min(window), high.max(window)));
        if length <= least || least == most {
            // All would have come to the same: most waits are of this sort, and it is no reason to change one's mind.
            return;
        }
        let mut cheapest = self.leader;
        for (expert, &window) in advice.iter().enumerate() {
            let loss = &mut self.losses[expert];
            *loss -= *loss / LOSS_MEMORY;
            *loss += price.cost(length, window);
            if self.losses[expert] < self.losses[cheapest] {
                cheapest = expert;
            }
        }
        let least = self.losses[cheapest];
        if least + least / 50 < self.losses[self.leader] {
            self.leader = cheapest;
        }
    }

    pub(super) fn histograms(&mut self) -> impl Iterator<Item = &mut Histogram> {
        std::iter::once(&mut self.all).chain(&mut self.by_last).chain(&mut self.by_own_last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockCost, Nanos};

    fn price() -> Price {
        let mut price = Price::new(Nanos(32_768), 1);
        price.set_block(BlockCost::from_total(Nanos(30_000)));
        price
    }

    /// Lets the experts see `length`, after a wait of class `last`; returns the window it would have been given.
    fn step(experts: &mut Experts, last: Class, length: u64) -> u64 {
        let price = price();
        let advice = experts.advice(last, price.break_even());
        let window = experts.trusted(&advice);
        experts.learn(&advice, last, length, &price);
        window
    }

    #[test]
    fn without_evidence_every_seat_says_break_even() {
        assert_eq!(Experts::new().advice(Class::of(40_000), 30_000), [30_000; EXPERTS]);
    }

    #[test]
    fn who_sees_the_pattern_comes_to_lead() {
        let mut experts = Experts::new();
        let (short, long) = (3_000, 80_000);
        // Long follows short and short follows long, whatever this context saw last: only expert 2 can tell.
        let mut random = 1_u64;
        for _ in 0..400 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (last, length) = if random >> 63 == 0 { (short, long) } else { (long, short) };
            step(&mut experts, Class::of(last), length);
        }
        assert_eq!(experts.leader, 2);
        assert_eq!(step(&mut experts, Class::of(short), long), 0);
        assert!(step(&mut experts, Class::of(long), short) >= short);
    }

    #[test]
    fn the_leader_is_followed_until_another_has_been_cheaper_by_a_fiftieth() {
        for (ours, leader) in [(92, 1), (93, 2)] {
            // Of two that are as cheap it is the first.
            let mut experts = Experts { losses: [0, ours, 90, 90], ..Experts::new() };
            experts.add_losses(&[0, 20, 20, 20], 10, &price());
            assert_eq!((experts.losses, experts.leader), ([30_000, ours + 10, 100, 100], leader));
        }
        // What was lost long ago counts less.
        let mut experts = Experts { losses: [25_600; EXPERTS], ..Experts::new() };
        experts.add_losses(&[0, 20, 20, 20], 10, &price());
        assert_eq!(experts.losses, [55_500, 25_510, 25_510, 25_510]);
    }

    #[test]
    fn a_wait_that_costs_the_same_under_all_advice_is_no_loss_to_anybody() {
        for (advice, length, is_loss) in
            [([20, 30, 30, 30], 20, false), ([20, 30, 30, 30], 21, true), ([20; EXPERTS], 30, false)]
        {
            let mut experts = Experts::new();
            experts.add_losses(&advice, length, &price());
            assert_eq!(experts.losses != [0; EXPERTS], is_loss, "{advice:?} {length}");
        }
        assert_eq!(Experts::new().histograms().count(), 1 + 2 * CLASSES);
    }
}
