//! Chance: numbers, shuffles, and orders in which nothing comes twice.

use std::time::{SystemTime, UNIX_EPOCH};

/// Numbers without a pattern that a disk or a cache would notice.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    const BITS: u32 = 48;

    /// The same numbers for the same `seed`.
    pub fn new(seed: u64) -> Self {
        // Seeds that differ little begin alike, so they are spread first.
        Self(mix(seed) | 1)
    }

    /// The next number, of 48 bits: Marsaglia's xorshift64*.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> (64 - Self::BITS)
    }

    /// A number below `limit`, which is below 2^48.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> Self::BITS) as u64
    }

    /// A number above 0 and up to 1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() + 1) as f64 / (1_u64 << Self::BITS) as f64
    }

    /// Exponentially distributed: the time from one chance event to the next.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }
}

/// Spreads the bits of a number over all of it (the finaliser of splitmix64).
#[inline]
pub const fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ (number >> 31)
}

/// All numbers below a limit in an order without a pattern, over and over, each time in another one.
///
/// A Feistel network over the next power of four, walked until it comes back below the limit: no map of what has been.
#[derive(Clone, Debug)]
pub struct Permutation {
    limit: u64,
    half: u32,
    keys: [u64; 4],
    index: u64,
    random: Random,
}

impl Permutation {
    /// Of the numbers below `limit`, which is not 0.
    pub fn new(limit: u64, random: Random) -> Self {
        let bits = (limit.max(4) - 1).ilog2() + 1;
        let mut new = Self { limit, half: bits.div_ceil(2), keys: [0; 4], index: 0, random };
        new.rekey();
        new
    }

    fn rekey(&mut self) {
        self.keys = std::array::from_fn(|_| self.random.bits());
        self.index = 0;
    }

    /// The next number.
    #[inline]
    pub fn draw(&mut self) -> u64 {
        if self.index == self.limit {
            self.rekey();
        }
        let mut number = self.encrypt(self.index);
        while number >= self.limit {
            number = self.encrypt(number);
        }
        self.index += 1;
        number
    }

    #[inline]
    fn encrypt(&self, number: u64) -> u64 {
        let mask = (1 << self.half) - 1;
        let (mut left, mut right) = (number >> self.half, number & mask);
        for key in self.keys {
            let mixed = (right ^ key).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
            (left, right) = (right, (left ^ mixed) & mask);
        }
        left << self.half | right
    }
}

/// Puts things in an order that differs from run to run.
#[derive(Clone, Debug)]
pub struct Shuffle(Random);

impl Shuffle {
    /// The same orders for the same `seed`.
    pub fn seeded(seed: u64) -> Self {
        Self(Random::new(seed))
    }

    /// From the nanoseconds that it is now.
    pub fn seeded_by_the_clock() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(Random::new(u64::from(now.subsec_nanos())))
    }

    /// The same things in another order.
    pub fn of<T>(&mut self, mut things: Vec<T>) -> Vec<T> {
        for last in (1..things.len()).rev() {
            things.swap(last, self.0.below(last as u64 + 1) as usize);
        }
        things
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_permutation_names_every_number_once_and_then_again_in_another_order() {
        for limit in [1, 2, 3, 4, 5, 63, 64, 65, 1000] {
            let mut order = Permutation::new(limit, Random::new(7));
            let mut pass = || (0..limit).map(|_| order.draw()).collect::<Vec<_>>();
            let (first, second) = (pass(), pass());
            for pass in [&first, &second] {
                let mut sorted = pass.clone();
                sorted.sort_unstable();
                assert_eq!(sorted, (0..limit).collect::<Vec<_>>());
            }
            assert!(limit < 60 || first != second, "{limit}");
        }
    }

    #[test]
    fn numbers_below_a_limit_are_below_it_and_reach_all_of_it() {
        let mut random = Random::new(1);
        let mut seen = [0; 10];
        (0..10_000).for_each(|_| seen[random.below(10) as usize] += 1);
        assert!(seen.iter().all(|&count| (800..1200).contains(&count)), "{seen:?}");
    }

    #[test]
    fn exponential_gaps_have_the_mean_that_was_asked_for() {
        let mut random = Random::new(1);
        let mean = (0..100_000).map(|_| random.exponential(200.0)).sum::<f64>() / 100_000.0;
        assert!((195.0..205.0).contains(&mean), "{mean}");
    }
}
