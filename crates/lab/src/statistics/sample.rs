//! What one comparison was measured to be, before it is read beside others.

/// The logarithm of a ratio, with what is known of its scatter.
///
/// Logarithms, because a ratio and its inverse are equally far from 1, and because noise is a share of what is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Pairs; of two groups the values of the smaller one.
    pub count: usize,
    /// The mean logarithm of the ratio; of many pairs without those that are furthest off.
    pub log_ratio: f64,
    /// The variance of one pair's logarithm, or of one value's. Of a trimmed mean: that which gives its standard error.
    pub variance: f64,
    /// The degrees of freedom of that variance.
    pub freedom: f64,
    /// The squared standard error of `log_ratio`, in variances: 1/n of pairs, 1/m + 1/n of two groups.
    pub leverage: f64,
}

/// One of so many pairs has no say at either end.
const TRIMMED: usize = 8;

impl Sample {
    /// Of the logarithms of paired ratios; `None` without any.
    ///
    /// One measurement into which a stall of the machine fell would hide a loss that a dozen others show, so of
    /// eight pairs the least and the largest have no say, and two each of sixteen: a trimmed mean, and Student's test of it by
    /// Yuen (1974), "The two-sample trimmed t for unequal population variances". Of fewer than eight none can be spared.
    pub fn of_pairs(logs: &[f64]) -> Option<Self> {
        let mut logs = logs.to_vec();
        logs.sort_by(f64::total_cmp);
        let (count, cut) = (logs.len(), trimmed(logs.len()));
        let kept = cut..count - cut;
        let log_ratio = mean(&logs[kept.clone()])?;
        let (all, kept_count) = (count as f64, kept.len() as f64);
        let freedom = kept_count - 1.0;
        // Those without a say are as far off as the next ones are (winsorized).
        let (least, most) = (logs[kept.start], logs[kept.end - 1]);
        logs.iter_mut().for_each(|log| *log = log.clamp(least, most));
        let variance = squares(&logs) / freedom.max(1.0) * (all / kept_count);
        Some(Self { count, log_ratio, variance, freedom, leverage: 1.0 / all })
    }

    /// Of the logarithms of two independent groups: how much larger the first is. Both are taken to scatter alike, so that
    /// one value may stand against several. `None` where one is empty.
    pub fn of_groups(ours: &[f64], theirs: &[f64]) -> Option<Self> {
        let log_ratio = mean(ours)? - mean(theirs)?;
        let [m, n] = [ours, theirs].map(|of| of.len() as f64);
        let freedom = m + n - 2.0;
        let variance = (squares(ours) + squares(theirs)) / freedom.max(1.0);
        let count = ours.len().min(theirs.len());
        Some(Self { count, log_ratio, variance, freedom, leverage: 1.0 / m + 1.0 / n })
    }
}

/// How many of some pairs have no say at either end.
pub const fn trimmed(pairs: usize) -> usize {
    pairs / TRIMMED
}

/// The mean; `None` without a value.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The sum of squared distances from the mean.
pub fn squares(values: &[f64]) -> f64 {
    let middle = mean(values).unwrap_or(0.0);
    values.iter().map(|value| (value - middle).powi(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_eight_pairs_the_least_and_the_largest_have_no_say() {
        let sample = |by: f64, count: usize| {
            Sample::of_pairs(&[-0.05, by, -0.06, -0.06, -0.04, -0.05, -0.04, -0.06][..count]).unwrap()
        };
        assert_ne!(sample(0.1, 7), sample(1.0, 7), "seven have none to spare");
        assert_eq!(sample(0.1, 8), sample(1.0, 8));
        // By hand: two of -0.06, two of -0.05 and two of -0.04 are left, and the ends count as the next ones in the scatter.
        let Sample { count, log_ratio, variance, freedom, leverage } = sample(1.0, 8);
        assert_eq!((count, freedom, leverage), (8, 5.0, 0.125));
        let scatter = 6e-4 / 5.0 * 8.0 / 6.0;
        assert!((log_ratio + 0.05).abs() < 1e-12 && (variance - scatter).abs() < 1e-12, "{variance}");
    }

    #[test]
    fn pairs_and_groups_have_a_mean_a_variance_and_its_degrees_of_freedom() {
        let pairs = Sample::of_pairs(&[0.1, 0.3]).unwrap();
        assert_eq!((pairs.count, pairs.freedom, pairs.leverage), (2, 1.0, 0.5));
        assert!((pairs.log_ratio - 0.2).abs() < 1e-12 && (pairs.variance - 0.02).abs() < 1e-12);
        let groups = Sample::of_groups(&[1.0, 3.0], &[0.0]).unwrap();
        assert_eq!((groups.count, groups.freedom, groups.leverage), (1, 1.0, 1.5));
        assert_eq!((groups.log_ratio, groups.variance), (2.0, 2.0));
        assert_eq!(Sample::of_pairs(&[]), None);
        assert_eq!(Sample::of_groups(&[1.0], &[]), None);
    }
}
