//! Moderated variances: many comparisons of few repetitions tell each other how much such measurements scatter.
//!
//! Five pairs know their own variance badly, and a Student's factor of four degrees of freedom that is to hold for
//! hundreds of comparisons finds nothing. But comparisons of one kind scatter much alike. Their variances are taken to be
//! drawn from a scaled inverse χ² distribution, whose scale and degrees of freedom are fitted to those that were seen
//! (empirical Bayes: Smyth 2004, "Linear models and empirical Bayes methods", as in limma): the more alike they are, the
//! more each is drawn towards what is usual, and the more degrees of freedom it has in exchange.

use statrs::function::gamma::digamma;

use super::Sample;
use super::sample::mean;

/// A variance and its degrees of freedom.
pub type Moderated = (f64, f64);

/// How variances of one kind are moderated.
pub type Moderate = fn(&[Sample]) -> Vec<Moderated>;

/// More degrees of freedom than this are as good as infinitely many.
const PLENTY: f64 = 1e4;
/// A variance of less than this share of the usual one is chance: values that happen to be equal.
const LEAST: f64 = 1e-5;

/// The variances of samples of one kind, each moderated by all.
pub fn moderated(samples: &[Sample]) -> Vec<Moderated> {
    let known: Vec<Moderated> =
        samples.iter().filter(|one| one.freedom > 0.0).map(|one| (one.variance, one.freedom)).collect();
    let (usual, weight) = prior(&known);
    // All together they know no more than this.
    let most = known.iter().map(|(_, freedom)| freedom).sum::<f64>().min(PLENTY);
    let moderate = |one: &Sample| {
        let freedom = one.freedom.max(0.0);
        let variance = (weight * usual + freedom * one.variance) / (weight + freedom).max(f64::MIN_POSITIVE);
        (variance, (weight + freedom).min(most))
    };
    samples.iter().map(moderate).collect()
}

/// The same of samples whose values are whole runs. What differs from one run to the next, a boot or a layout, is in all of
/// a run's cells, so that their variances agree without knowing any more than one of them does: none has more degrees of
/// freedom than the runs have. Nor does their agreement say that one which scatters more does so by chance.
pub fn moderated_of_runs(samples: &[Sample]) -> Vec<Moderated> {
    let of_runs = samples.iter().map(|one| one.freedom).fold(0.0, f64::max);
    let moderated = moderated(samples).into_iter().zip(samples);
    moderated.map(|((variance, freedom), own)| (variance.max(own.variance), freedom.min(of_runs))).collect()
}

/// The scale and the degrees of freedom of the distribution that variances are from, by the moments of their logarithms
/// (Smyth 2004, section 6.2). No degrees of freedom of too few.
fn prior(known: &[Moderated]) -> Moderated {
    let total: f64 = known.iter().map(|(_, freedom)| freedom).sum();
    let pooled = known.iter().map(|(variance, freedom)| variance * freedom).sum::<f64>() / total;
    if known.len() < 3 || pooled <= 0.0 {
        return (0.0, 0.0);
    }
    let logs: Vec<f64> = known
        .iter()
        .map(|(variance, freedom)| variance.max(LEAST * pooled).ln() - digamma(freedom / 2.0) + (freedom / 2.0).ln())
        .collect();
    let centre = mean(&logs).unwrap_or(0.0);
    let scatter = logs.iter().map(|log| (log - centre).powi(2)).sum::<f64>() / (logs.len() as f64 - 1.0);
    let own = known.iter().map(|(_, freedom)| trigamma(freedom / 2.0)).sum::<f64>() / known.len() as f64;
    if scatter <= own {
        // No farther apart than chance alone makes them.
        return (pooled, PLENTY);
    }
    let half = inverse_trigamma(scatter - own);
    ((centre + digamma(half) - half.ln()).exp(), (2.0 * half).min(PLENTY))
}

/// The second derivative of the logarithm of the gamma function (Abramowitz and Stegun, 6.4.6 and 6.4.12).
fn trigamma(mut x: f64) -> f64 {
    let mut sum = 0.0;
    while x < 10.0 {
        sum += 1.0 / (x * x);
        x += 1.0;
    }
    let square = 1.0 / (x * x);
    sum + 1.0 / x + square / 2.0 + square / x * (1.0 / 6.0 - square * (1.0 / 30.0 - square / 42.0))
}

/// Where [`trigamma`] has a value, which is between 1/x and 1/x + 1/x²; by bisection.
fn inverse_trigamma(value: f64) -> f64 {
    let (mut low, mut high) = (1.0 / value, 1.0 / value + 1.0);
    for _ in 0..60 {
        let middle = low.midpoint(high);
        *(if trigamma(middle) > value { &mut low } else { &mut high }) = middle;
    }
    low.midpoint(high)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(variance: f64) -> Sample {
        Sample { count: 5, log_ratio: 0.0, variance, freedom: 4.0, leverage: 0.2 }
    }

    #[test]
    fn trigamma_is_that_of_the_tables() {
        for (x, value) in [(1.0, 1.644_934_066_8), (2.0, 0.644_934_066_8), (0.5, 4.934_802_200_5)] {
            assert!((trigamma(x) - value).abs() < 1e-8, "{x}: {}", trigamma(x));
            assert!((inverse_trigamma(value) - x).abs() < 1e-8, "{x}");
        }
    }

    #[test]
    fn what_scatters_alike_is_pooled_and_what_does_not_keeps_its_own() {
        let alike = moderated(&[0.9, 1.0, 1.1, 1.0, 1.0, 1.2].map(sample));
        assert!(
            alike.iter().all(|(variance, freedom)| (variance - 1.033).abs() < 0.01 && *freedom == 24.0),
            "{alike:?}"
        );
        let unlike = moderated(&[1e-4, 1.0, 1e4, 1e-2, 1e2, 1e3].map(sample));
        assert!(unlike.iter().all(|(_, freedom)| (4.0..4.5).contains(freedom)), "{unlike:?}");
        assert!((unlike[2].0 / 1e4 - 1.0).abs() < 0.1, "{unlike:?}");
    }

    #[test]
    fn cells_of_the_same_runs_know_no_more_together_than_the_runs_do() {
        let alike = moderated_of_runs(&[0.9, 1.0, 1.1, 1.0, 1.0, 1.2].map(sample));
        assert!(alike.iter().all(|(_, freedom)| *freedom == 4.0), "{alike:?}");
        assert!(alike[5].0 == 1.2 && (alike[0].0 - 1.033).abs() < 0.01, "no less than its own: {alike:?}");
        let one_run = Sample { freedom: 0.0, variance: 0.0, ..sample(0.0) };
        let with = moderated_of_runs(&[sample(1.0), sample(1.0), sample(1.0), one_run]);
        assert_eq!(with[3], (1.0, 4.0));
        assert_eq!(moderated_of_runs(&[one_run]), [(0.0, 0.0)]);
    }

    #[test]
    fn few_are_left_alone_and_one_without_a_variance_borrows_that_of_the_others() {
        assert_eq!(moderated(&[sample(1.0), sample(9.0)]), [(1.0, 4.0), (9.0, 4.0)]);
        let one_pair = Sample { freedom: 0.0, variance: 0.0, ..sample(0.0) };
        let with = moderated(&[sample(1.0), sample(1.0), sample(1.0), one_pair]);
        assert_eq!(with[3], (1.0, 12.0));
        assert_eq!(moderated(&[one_pair]), [(0.0, 0.0)]);
    }
}
