//! The bootstrap: how a median would have come out had other repetitions of the same kind been measured.

use egret_loadgen::random::Random;

use super::median;

/// The central interval of `confidence` of what `statistic` is for samples drawn from `samples`, each from its own, with
/// replacement: Efron's percentile bootstrap. The same for the same values, whenever it is computed.
pub fn percentile_interval<const N: usize>(
    samples: [&[f64]; N],
    confidence: f64,
    statistic: impl Fn([f64; N]) -> f64,
) -> (f64, f64) {
    let tail = (1.0 - confidence) / 2.0;
    // So many that the quantile lies between some twenty and all the others.
    let draws = (20.0 / tail).clamp(2_000.0, 20_000.0) as usize;
    let mut random = Random::new(draws as u64);
    let mut draw = |values: &[f64]| {
        let drawn = values.iter().map(|_| values[random.below(values.len() as u64) as usize]);
        median(drawn.collect())
    };
    let mut statistics: Vec<f64> = (0..draws).map(|_| statistic(samples.map(&mut draw))).collect();
    statistics.sort_by(f64::total_cmp);
    let below = (tail * draws as f64) as usize;
    (statistics[below], statistics[draws - 1 - below])
}
