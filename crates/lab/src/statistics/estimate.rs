//! A ratio, and how sure one can be of it.

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

use super::{median, resample};

/// The probability that any interval of a family misses what it is to cover.
const FAMILY_ERROR: f64 = 0.05;

/// To measure more pairs than this is no advice.
const MOST_PAIRS: usize = 1000;

/// Intervals that are read together: of twenty intervals of 95 % each one is expected to be wrong, and it would be that
/// one which catches the eye.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Family {
    /// How many there are.
    pub comparisons: usize,
    /// How much the logarithms of pairs of one thing and itself deviate (see [`deviation`]); 0 where that is unknown.
    /// What agrees better than that does so by chance.
    pub noise: f64,
}

/// A confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Where it begins.
    pub low: f64,
    /// Where it ends.
    pub high: f64,
    /// The confidence that it has if it is read alone.
    pub confidence: f64,
}

/// A ratio with its intervals.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// How many pairs it is of.
    pub pairs: usize,
    /// The median of the ratios.
    pub median: f64,
    /// Of 95 %: what one cell says by itself.
    pub alone: Interval,
    /// So wide that all intervals of the family cover their truths together with 95 %.
    pub together: Interval,
}

impl Family {
    /// One interval, of pairs whose noise is unknown.
    pub fn alone() -> Self {
        Self { comparisons: 1, noise: 0.0 }
    }

    /// Both intervals. The wide one's confidence is Bonferroni's.
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
    /// An interval is the percentile bootstrap of the median, where there are so many pairs that a sign test could reach
    /// its confidence. Of fewer pairs a bootstrap knows nothing beyond their range: then it is Student's, of the
    /// logarithms, and at least that range. Student's assumes logarithms that are distributed normally; those that have
    /// longer tails widen it more than they move it. It is infinite of one pair.
    pub fn of_pairs(ratios: &[f64], family: Family) -> Option<Self> {
        let logs = logarithms(ratios);
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
    /// empty. As of pairs, but with Welch's interval in place of Student's.
    pub fn of_samples(values: &[f64], baseline: &[f64], family: Family) -> Option<Self> {
        let [ours, theirs] = [logarithms(values), logarithms(baseline)];
        let fewer = ours.len().min(theirs.len());
        if fewer == 0 {
            return None;
        }
        let middle = median(ours.clone()) - median(theirs.clone());
        // A pair's noise is that of two values.
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

    /// How many more pairs would probably move `interval` off `limit`: its width shrinks with the root of their number,
    /// and faster while they are few. `None` where that takes more than anybody would measure.
    pub(super) fn more_pairs(&self, interval: Interval, limit: f64) -> Option<usize> {
        let distance = (limit / self.median).ln().abs();
        let reach = if limit < self.median { self.median / interval.low } else { interval.high / self.median }.ln();
        if !reach.is_finite() {
            // One pair says nothing of how many it takes.
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

/// Whether a sign test of so many pairs could reach a confidence: all of them on one side.
fn suffices(pairs: usize, confidence: f64) -> bool {
    2.0 * 0.5_f64.powi(pairs as i32) <= 1.0 - confidence
}

/// Welch's degrees of freedom of a difference, from both squared standard errors and their own.
fn welch(errors: [f64; 2], freedoms: [f64; 2]) -> f64 {
    if freedoms.contains(&0.0) {
        return 0.0;
    }
    let sum = errors[0].powi(2) / freedoms[0] + errors[1].powi(2) / freedoms[1];
    if sum == 0.0 { freedoms[0].min(freedoms[1]) } else { (errors[0] + errors[1]).powi(2) / sum }
}

/// The standard deviation of the logarithms of some ratios or values: near their coefficient of variation where it is
/// small. 0 of fewer than two.
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

/// How far an interval reaches to either side. One value says nothing of how far others lie, though it seems to have no error.
fn half_width(confidence: f64, freedom: f64, error: f64) -> f64 {
    let errors = student(confidence, freedom);
    if errors.is_finite() { errors * error } else { f64::INFINITY }
}

/// How many standard errors an interval of `confidence` reaches to either side; infinitely many without a degree of
/// freedom.
fn student(confidence: f64, freedom: f64) -> f64 {
    let distribution = StudentsT::new(0.0, 1.0, freedom);
    distribution.map_or(f64::INFINITY, |distribution| distribution.inverse_cdf((1.0 + confidence) / 2.0))
}
