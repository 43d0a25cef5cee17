//! The bootstrap: the distribution of a median over resampled repetitions.

use egret_loadgen::random::Random;

use super::median;

/// The percentile bootstrap (Efron 1979): the central interval of `confidence` of `statistic`, over samples that are drawn
/// from each of `samples` with replacement. The seed is fixed, so that equal values give equal intervals.
pub fn percentile_interval<const N: usize>(
    samples: [&[f64]; N],
    confidence: f64,
    statistic: impl Fn([f64; N]) -> f64,
) -> (f64, f64) {
    let tail = (1.0 - confidence) / 2.0;
    // Enough draws for about twenty beyond each quantile.
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
