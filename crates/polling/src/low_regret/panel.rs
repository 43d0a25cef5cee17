//! Four opinions on the next window, and which of them has been cheapest of late.

use super::histogram::Histogram;
use super::price::Price;
use super::situation::{CLASSES, Class};

/// How many opinions there are.
const SEATS: usize = 4;
/// About how many waits back losses are remembered.
const LOSS_MEMORY: u64 = 256;

/// What each seat of a panel says the coming window should be, in nanoseconds.
///
/// 0. Spin until it has cost a block: wrong by a factor of two at most, whatever the waits do.
/// 1. The cheapest window for the waits in this situation.
/// 2. The same, among waits that followed a wait as long as the last one: waits in turn.
/// 3. The same, among waits that followed, in this situation, one as long as its last: phases.
pub(super) type Opinions = [u64; SEATS];

/// Everything learned about one situation.
pub(super) struct Panel {
    all: Histogram,
    by_last: [Histogram; CLASSES],
    by_own_last: [Histogram; CLASSES],
    /// How long the last wait in this situation was.
    own_last: Class,
    /// What each opinion would have cost of late.
    losses: [u64; SEATS],
    /// The opinion that is followed.
    trusted: usize,
}

impl Panel {
    pub(super) fn new() -> Self {
        Self {
            all: Histogram::new(),
            by_last: std::array::from_fn(|_| Histogram::new()),
            by_own_last: std::array::from_fn(|_| Histogram::new()),
            own_last: Class::default(),
            losses: [0; SEATS],
            trusted: 1,
        }
    }

    /// Asks every seat; one with little evidence says what a broader one says.
    pub(super) fn opinions(&self, last: Class, break_even: u64) -> Opinions {
        let all = self.all.window().unwrap_or(break_even);
        let by_last = self.by_last[last.index()].window().unwrap_or(all);
        let by_own_last = self.by_own_last[self.own_last.index()].window().unwrap_or(all);
        [break_even, all, by_last, by_own_last]
    }

    /// The window to follow.
    pub(super) fn trusted(&self, opinions: &Opinions) -> u64 {
        opinions[self.trusted]
    }

    /// Learns from a wait of `length` that followed one of class `last` and for which `opinions` were given.
    pub(super) fn learn(&mut self, opinions: &Opinions, last: Class, length: u64, price: &Price) {
        self.hold_to_account(opinions, length, price);
        self.all.add(length, price);
        self.by_last[last.index()].add(length, price);
        self.by_own_last[self.own_last.index()].add(length, price);
        self.own_last = Class::of(length);
    }

    /// Adds up what every opinion would have cost, and trusts the cheapest if it is cheaper by a fiftieth.
    fn hold_to_account(&mut self, opinions: &Opinions, length: u64, price: &Price) {
        let (least, most) =
            opinions.iter().fold((u64::MAX, 0), |(low, high), &window| (low.min(window), high.max(window)));
        if length <= least || least == most {
            // All would have come to the same: most waits are of this sort, and it is no reason to change one's mind.
            return;
        }
        let mut cheapest = self.trusted;
        for (seat, &window) in opinions.iter().enumerate() {
            let loss = &mut self.losses[seat];
            *loss -= *loss / LOSS_MEMORY;
            *loss += price.cost(length, window);
            if self.losses[seat] < self.losses[cheapest] {
                cheapest = seat;
            }
        }
        let least = self.losses[cheapest];
        if least + least / 50 < self.losses[self.trusted] {
            self.trusted = cheapest;
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

    /// Lets the panel see `length`, after a wait of class `last`; returns the window it would have been given.
    fn step(panel: &mut Panel, last: Class, length: u64) -> u64 {
        let price = price();
        let opinions = panel.opinions(last, price.break_even());
        let window = panel.trusted(&opinions);
        panel.learn(&opinions, last, length, &price);
        window
    }

    #[test]
    fn without_evidence_every_seat_says_break_even() {
        assert_eq!(Panel::new().opinions(Class::of(40_000), 30_000), [30_000; SEATS]);
    }

    #[test]
    fn a_panel_comes_to_trust_whoever_sees_the_pattern() {
        let mut panel = Panel::new();
        let (short, long) = (3_000, 80_000);
        // Long follows short and short follows long, whatever this situation saw last: only seat 2 can tell.
        let mut random = 1_u64;
        for _ in 0..400 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let (last, length) = if random >> 63 == 0 { (short, long) } else { (long, short) };
            step(&mut panel, Class::of(last), length);
        }
        assert_eq!(panel.trusted, 2);
        assert_eq!(step(&mut panel, Class::of(short), long), 0);
        assert!(step(&mut panel, Class::of(long), short) >= short);
    }
}
