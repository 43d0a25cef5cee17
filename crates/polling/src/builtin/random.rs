//! Numbers that look random and are the same on every run.

/// SplitMix64: small, and good enough to draw waits from.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Above 0, up to 1.
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    pub(super) fn coin(&mut self) -> bool {
        self.next() & 1 == 1
    }

    /// From `low` to `high`, both included.
    pub(super) fn between(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next() % u64::from(high - low + 1)) as u32
    }

    /// Log-normal around `median`; the logarithm's deviation is `sigma`.
    pub(super) fn lognormal(&mut self, median: f64, sigma: f64) -> f64 {
        let normal = (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos();
        median * (sigma * normal).exp()
    }

    pub(super) fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Pareto: never below `least`, and the smaller `alpha` the heavier the tail.
    pub(super) fn pareto(&mut self, least: f64, alpha: f64) -> f64 {
        least * self.unit().powf(-1.0 / alpha)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_those_that_splitmix64_is_known_for() {
        let mut random = Random::seeded(1_234_567);
        let drawn = [(); 5].map(|()| random.next());
        assert_eq!(
            drawn,
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423,
                4_593_380_528_125_082_431,
                16_408_922_859_458_223_821,
            ]
        );
    }

    #[test]
    fn an_odd_number_is_heads_and_a_normal_one_above_its_mean_is_a_long_wait() {
        let seeded = || Random::seeded(1_234_567);
        assert!(seeded().coin());
        // 0.35 and 0.17 of the way, and so 0.67 deviations above the mean.
        assert!((11.0..11.3).contains(&seeded().lognormal(8.0, 0.5)));
    }

    /// Means of what is drawn, many times over.
    fn mean(mut draw: impl FnMut(&mut Random) -> f64) -> f64 {
        const DRAWN: u32 = 100_000;
        let mut random = Random::seeded(7);
        (0..DRAWN).map(|_| draw(&mut random)).sum::<f64>() / f64::from(DRAWN)
    }

    #[test]
    fn each_draw_has_the_mean_and_the_spread_that_its_law_has() {
        // A law, what it is a mean of, and that by theory.
        let square = |value: f64| value * value;
        for (what, is, ought) in [
            ("unit", mean(Random::unit), 0.5),
            ("unit's square", mean(|random| square(random.unit())), 1.0 / 3.0),
            ("coin", mean(|random| f64::from(u8::from(random.coin()))), 0.5),
            ("between", mean(|random| f64::from(random.between(8, 32))), 20.0),
            ("between's spread", mean(|random| square(f64::from(random.between(8, 32)) - 20.0)), 52.0),
            ("lognormal's logarithm", mean(|random| random.lognormal(8.0, 0.5).log2()), 3.0),
            ("its spread", mean(|random| square((random.lognormal(8.0, 0.5) / 8.0).ln())), 0.25),
            ("its third moment's size", mean(|random| (random.lognormal(1.0, 1.0).ln().powi(3)).abs()), 1.595_77),
            ("exponential", mean(|random| random.exponential(20.0)), 20.0),
            ("exponential's square", mean(|random| square(random.exponential(20.0))), 800.0),
            ("pareto's root", mean(|random| random.pareto(4.0, 2.0).sqrt()), 2.0 * 4.0 / 3.0),
            ("pareto's inverse", mean(|random| 1.0 / random.pareto(4.0, 2.0)), 1.0 / 4.0 * 2.0 / 3.0),
        ] {
            assert!((is / ought - 1.0).abs() < 0.02, "{what}: {is}, not {ought}");
        }
    }

    #[test]
    fn both_ends_are_drawn_and_nothing_beyond_them() {
        let mut random = Random::seeded(1);
        let mut seen = [0_u32; 6];
        (0..1_000).for_each(|_| seen[random.between(1, 4) as usize] += 1);
        assert!(seen[1..=4].iter().all(|&times| times > 200) && seen[0] + seen[5] == 0, "{seen:?}");
        assert!((0..1_000).all(|_| random.pareto(4.0, 1.1) >= 4.0));
        let units: Vec<_> = (0..1_000).map(|_| random.unit()).collect();
        assert!(units.iter().all(|&unit| unit > 0.0 && unit <= 1.0));
        // The next number is 0, of which there is no logarithm.
        let mut random = Random::seeded(0_u64.wrapping_sub(0x9e37_79b9_7f4a_7c15));
        assert_eq!(random.unit(), 1.0 / (1_u64 << 53) as f64);
    }
}
