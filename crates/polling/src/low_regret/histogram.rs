//! The waits of late, and the window that would have been cheapest for them.

use super::buckets::{BUCKETS, END, MIDDLE, bucket};
use super::price::Price;

/// A wait's worth of count. Above one, so that halving does not forget a rare long wait at once.
const ONE: u16 = 16;
/// Counts are halved when they add up to this many waits; so the last 512 to 1024 are remembered.
const MEMORY: u32 = 1_024;
/// With less evidence than this a histogram recommends no window.
const ENOUGH: u32 = 8;
/// How many waits apart the window is reconsidered, once there is evidence.
const PERIOD: u32 = 64;

/// A decayed histogram of waits, and the window it recommends.
pub(super) struct Histogram {
    counts: [u16; BUCKETS],
    /// The sum of `counts`.
    total: u32,
    /// Waits until the window is reconsidered, at least one.
    until_review: u32,
    /// What is recommended, in nanoseconds; `None` with little evidence.
    window: Option<u32>,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self { counts: [0; BUCKETS], total: 0, until_review: ENOUGH, window: None }
    }

    /// The window that would have been cheapest, in nanoseconds, or `None` with too little evidence.
    pub(super) fn window(&self) -> Option<u64> {
        self.window.map(u64::from)
    }

    /// Counts a wait of `length` nanoseconds.
    pub(super) fn add(&mut self, length: u64, price: &Price) {
        // What no window can find is all one, and so the bucket that the maximum cuts holds only what can be found.
        let index = if length > price.longest() { BUCKETS - 1 } else { bucket(length) };
        self.counts[index] += ONE;
        self.total += u32::from(ONE);
        if self.total >= MEMORY * u32::from(ONE) {
            self.halve();
        }
        self.until_review -= 1;
        if self.until_review == 0 {
            self.review(price);
        }
    }

    /// Has the window reconsidered with the next wait: prices have changed.
    pub(super) fn hurry(&mut self) {
        self.until_review = 1;
    }

    fn halve(&mut self) {
        self.counts.iter_mut().for_each(|count| *count /= 2);
        self.total = self.counts.iter().map(|&count| u32::from(count)).sum();
    }

    fn review(&mut self, price: &Price) {
        // The first advice rest on little, and are renewed when the evidence has doubled.
        let waits = self.total / u32::from(ONE);
        self.until_review = waits.clamp(ENOUGH, PERIOD);
        if waits >= ENOUGH {
            self.window = Some(self.cheapest(price));
        }
    }

    /// One pass over the buckets. The window of now stays unless another is cheaper by a fiftieth.
    fn cheapest(&self, price: &Price) -> u32 {
        let mut unfound = u64::from(self.total);
        let mut spun = 0;
        let mut best = (unfound * price.block(), 0);
        let mut now = best.0;
        for (index, &count) in self.counts[..BUCKETS - 1].iter().enumerate() {
            let window = END[index].min(price.longest());
            unfound -= u64::from(count);
            spun += u64::from(count) * MIDDLE[index].min(window);
            let cost = price.spinning(spun + unfound * window) + unfound * price.block();
            if cost < best.0 {
                best = (cost, window as u32);
            }
            if self.window.is_some_and(|current| u64::from(current) >= window) {
                now = cost;
            }
            if unfound == 0 || window == price.longest() {
                break;
            }
        }
        match self.window {
            Some(current) if best.0 + best.0 / 50 >= now => current,
            _ => best.1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockCost, Nanos};

    /// K = 30 us.
    fn price(max: u64) -> Price {
        let mut price = Price::new(Nanos(max), 1);
        price.set_block(BlockCost::from_total(Nanos(30_000)));
        price
    }

    fn after(waits: impl IntoIterator<Item = u64>, price: &Price) -> Option<u64> {
        let mut histogram = Histogram::new();
        waits.into_iter().for_each(|length| histogram.add(length, price));
        histogram.window()
    }

    #[test]
    fn seven_waits_are_no_evidence_and_eight_are() {
        assert_eq!(after([10_000; 7], &price(32_768)), None);
        assert_eq!(after([10_000; 8], &price(32_768)), Some(10_239));
    }

    #[test]
    fn the_window_ends_with_the_bucket_of_the_longest_wait_worth_spinning_for() {
        let mixture = || [3_000, 80_000].into_iter().cycle().take(200);
        assert_eq!(after(mixture(), &price(32_768)), Some(3_071));
        assert_eq!(after([80_000; 100], &price(32_768)), Some(0));
        assert_eq!(after([80_000; 100], &price(10_000_000)), Some(0));
        // What is spun in vain counts: nine times for each that is found.
        let mostly_long = (0..200).map(|wait| if wait % 10 == 0 { 20_000 } else { 80_000 });
        assert_eq!(after(mostly_long, &price(32_768)), Some(0));
    }

    #[test]
    fn the_maximum_caps_the_window_even_within_a_bucket() {
        assert_eq!(after([19_000; 100], &price(20_000)), Some(20_000));
        assert_eq!(after([10_000; 100], &price(9_000)), Some(0));
    }

    #[test]
    fn a_window_stays_unless_another_is_cheaper_by_a_fiftieth() {
        let price = price(32_768);
        let mut histogram = Histogram::new();
        (0..1_000).for_each(|_| histogram.add(10_000, &price));
        // One wait in two hundred a little longer: not worth a change.
        for round in 0..5_000 {
            histogram.add(if round % 200 == 0 { 11_000 } else { 10_000 }, &price);
        }
        assert_eq!(histogram.window(), Some(10_239));
        for round in 0..5_000 {
            histogram.add(if round % 5 == 0 { 11_000 } else { 10_000 }, &price);
        }
        assert_eq!(histogram.window(), Some(12_287));
    }

    #[test]
    fn what_happened_a_few_thousand_waits_ago_is_forgotten() {
        let waits = std::iter::repeat_n(150_000, 3_000).chain(std::iter::repeat_n(10_000, 3_000));
        assert_eq!(after(waits, &price(32_768)), Some(10_239));
    }

    #[test]
    fn advice_is_renewed_when_the_evidence_has_doubled_and_then_every_64_waits() {
        let price = price(32_768);
        let mut histogram = Histogram::new();
        let mut reviews = Vec::new();
        for wait in 1..=256 {
            let before = histogram.until_review;
            histogram.add(10_000, &price);
            if before == 1 {
                reviews.push(wait);
            }
        }
        assert_eq!(reviews, [8, 16, 32, 64, 128, 192, 256]);
        histogram.hurry();
        assert_eq!(histogram.until_review, 1);
    }

    #[test]
    fn half_of_1024_waits_are_remembered() {
        let price = price(32_768);
        let mut histogram = Histogram::new();
        (0..1_023).for_each(|wait| histogram.add(if wait % 2 == 0 { 10_000 } else { 150_000 }, &price));
        let counted = |histogram: &Histogram, length| u32::from(histogram.counts[bucket(length)] / ONE);
        assert_eq!((histogram.total / u32::from(ONE), counted(&histogram, 10_000)), (1_023, 512));
        histogram.add(150_000, &price);
        assert_eq!((histogram.total / u32::from(ONE), counted(&histogram, 10_000)), (512, 256));
        // No window finds these: they are all one.
        assert_eq!(histogram.counts[BUCKETS - 1] / ONE, 256);
    }

    #[test]
    fn a_wait_as_long_as_the_maximum_can_be_found() {
        assert_eq!(after([20_000; 8], &price(20_000)), Some(20_000));
        assert_eq!(after([20_001; 8], &price(20_000)), Some(0));
        // Where to spin costs as much as to block it is not spun for.
        let mut price = price(20_000);
        price.set_block(BlockCost::from_total(Nanos(MIDDLE[bucket(10_000)])));
        assert_eq!(after([10_000; 8], &price), Some(0));
    }
}
