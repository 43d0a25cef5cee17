//! A ratio with its confidence intervals.

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

use super::{median, resample};

/// The family-wise error rate: the probability that at least one interval of a family misses the true ratio.
const FAMILY_ERROR: f64 = 0.05;

/// More pairs than this are not recommended.
const MOST_PAIRS: usize = 1000;

/// Intervals that are read together. Without a correction one of twenty intervals of 95 % is expected to miss, and that
/// one would be noticed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Family {
    /// How many there are.
    pub comparisons: usize,
    /// The noise floor: the [`deviation`] of the baseline's ratios to itself; 0 if it is unknown. Pairs that agree better
    /// than this do so by chance.
    pub noise: f64,
}

/// A confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Where it begins.
    pub low: f64,
    /// Where it ends.
    pub high: f64,
    /// Its confidence if it is read alone.
    pub confidence: f64,
}

/// A ratio with its intervals.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The number of pairs.
    pub pairs: usize,
    /// The median of the ratios.
    pub median: f64,
    /// The interval of 95 % for this comparison alone.
    pub alone: Interval,
    /// The interval that covers with 95 % together with all others of the family.
    pub together: Interval,
}

impl Family {
    /// A family of one interval, with no known noise floor.
    pub fn alone() -> Self {
        Self { comparisons: 1, noise: 0.0 }
    }

    /// Both intervals. That of the family has Bonferroni's confidence, 1 - error / comparisons, which holds however the
    /// comparisons depend on each other; they share a baseline.
    fn intervals(self, of: impl Fn(f64) -> (f64, f64)) -> [Interval; 2] {
        [1, self.comparisons.max(1)].map(|comparisons| {
            let confidence = 1.0 - FAMILY_ERROR / comparisons as f64;
            let (low, high) = of(confidence);
            Interval { low: low.exp(), high: high.exp(), confidence }
        })
    }
}

impl Estimate {
    /// Of ratios of pairs; `None` without any. Ratios that are not positive and finite are left out.
    ///
    /// An interval is the percentile bootstrap of the median (Efron 1979) if there are enough pairs for a sign test to
    /// reach its confidence. With fewer pairs a bootstrap cannot leave their range; then it is Student's t interval of the
    /// logarithms' mean, and at least that range. The t interval assumes normally distributed logarithms; longer tails make
    /// it wider rather than wrong. Of one pair it is infinite.
    pub fn of_pairs(ratios: &[f64], family: Family) -> Option<Self> {
        let logs = logarithms(ratios);
        // The noise floor bounds the standard error from below, because few pairs can agree by chance.
        let error = deviation(ratios).max(family.noise) / (logs.len() as f64).sqrt();
        let interval = |confidence| {
            if suffices(logs.len(), confidence) {
                return resample::percentile_interval([&logs], confidence, |[median]| median);
            }
            let (least, most) = range(&logs);
            let half = half_width(confidence, logs.len() as f64 - 1.0, error);
            ((mean(&logs) - half).min(least), (mean(&logs) + half).max(most))
        };
        if logs.is_empty() {
            return None;
        }
        let [alone, together] = family.intervals(interval);
        Some(Self { pairs: logs.len(), median: median(logs.clone()).exp(), alone, together })
    }

    /// Of two independent samples, such as two runs of the same cell: the ratio of their medians. `None` where one is
    /// empty. As [`of_pairs`](Self::of_pairs), with Welch's t interval (1947) in place of Student's: the two runs may differ in
    /// their variance.
    pub fn of_samples(values: &[f64], baseline: &[f64], family: Family) -> Option<Self> {
        let [ours, theirs] = [logarithms(values), logarithms(baseline)];
        let fewer = ours.len().min(theirs.len());
        if fewer == 0 {
            return None;
        }
        let middle = median(ours.clone()) - median(theirs.clone());
        // The noise floor is of ratios, whose logarithms have the variance of two values.
        let variance = |of| deviation(of).max(family.noise / std::f64::consts::SQRT_2).powi(2);
        let errors = [variance(values) / ours.len() as f64, variance(baseline) / theirs.len() as f64];
        let freedom = welch(errors, [&ours, &theirs].map(|of| of.len() as f64 - 1.0));
        let interval = |confidence| {
            if suffices(fewer, confidence) {
                return resample::percentile_interval([&ours, &theirs], confidence, |[ours, theirs]| ours - theirs);
            }
            let centre = mean(&ours) - mean(&theirs);
            let half = half_width(confidence, freedom, (errors[0] + errors[1]).sqrt());
            ((centre - half).min(middle), (centre + half).max(middle))
        };
        let [alone, together] = family.intervals(interval);
        Some(Self { pairs: fewer, median: middle.exp(), alone, together })
    }

    /// How many more pairs would probably move `interval` off `limit`. Its width is taken to shrink with the root of the
    /// number of pairs and with Student's factor. `None` if it takes more than [`MOST_PAIRS`].
    pub(super) fn more_pairs(&self, interval: Interval, limit: f64) -> Option<usize> {
        let distance = (limit / self.median).ln().abs();
        let reach = if limit < self.median { self.median / interval.low } else { interval.high / self.median }.ln();
        if !reach.is_finite() {
            // One pair has no deviation to extrapolate from.
            return Some(super::ENOUGH.saturating_sub(self.pairs).max(1));
        }
        let width = |pairs: usize| student(interval.confidence, pairs as f64 - 1.0) / (pairs as f64).sqrt();
        let is_short = |pairs: usize| reach * width(pairs) / width(self.pairs) > distance;
        let (mut short, mut enough) = (self.pairs, MOST_PAIRS);
        if is_short(enough) {
            return None;
        }
        while enough - short > 1 {
            let middle = short.midpoint(enough);
            *(if is_short(middle) { &mut short } else { &mut enough }) = middle;
        }
        Some(enough - self.pairs)
    }
}

/// Whether a two-sided sign test of so many pairs can reach a confidence: if the true median were 1, all pairs would lie on
/// one side of it with a probability of 2 · 2⁻ⁿ.
fn suffices(pairs: usize, confidence: f64) -> bool {
    2.0 * 0.5_f64.powi(pairs as i32) <= 1.0 - confidence
}

/// The degrees of freedom of a difference by Welch and Satterthwaite, from both squared standard errors and their degrees
/// of freedom.
fn welch(errors: [f64; 2], freedoms: [f64; 2]) -> f64 {
    if freedoms.contains(&0.0) {
        return 0.0;
    }
    let sum = errors[0].powi(2) / freedoms[0] + errors[1].powi(2) / freedoms[1];
    if sum == 0.0 { freedoms[0].min(freedoms[1]) } else { (errors[0] + errors[1]).powi(2) / sum }
}

/// The sample standard deviation of the logarithms of some ratios or values, which is near their coefficient of variation
/// if it is small; 0 of fewer than two.
pub fn deviation(ratios: &[f64]) -> f64 {
    let logs = logarithms(ratios);
    let middle = mean(&logs);
    let squares: f64 = logs.iter().map(|log| (log - middle).powi(2)).sum();
    if logs.len() < 2 { 0.0 } else { (squares / (logs.len() as f64 - 1.0)).sqrt() }
}

fn logarithms(ratios: &[f64]) -> Vec<f64> {
    ratios.iter().filter(|ratio| **ratio > 0.0 && ratio.is_finite()).map(|ratio| ratio.ln()).collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn range(values: &[f64]) -> (f64, f64) {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    (least, values.iter().copied().fold(f64::NEG_INFINITY, f64::max))
}

/// Half the width of a t interval. It is infinite of one value, whose standard error seems to be 0.
fn half_width(confidence: f64, freedom: f64, error: f64) -> f64 {
    let errors = student(confidence, freedom);
    if errors.is_finite() { errors * error } else { f64::INFINITY }
}

/// Student's factor: half the width of a two-sided interval, in standard errors; infinite without a degree of freedom.
fn student(confidence: f64, freedom: f64) -> f64 {
    let distribution = StudentsT::new(0.0, 1.0, freedom);
    distribution.map_or(f64::INFINITY, |distribution| distribution.inverse_cdf((1.0 + confidence) / 2.0))
}
