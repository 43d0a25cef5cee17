//! What one comparison was measured to be, before it is read beside others.

/// The logarithm of a ratio, with what is known of its scatter.
///
/// Logarithms, because a ratio and its inverse are equally far from 1, and because noise is a share of what is measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Pairs; of two groups the values of the smaller one.
    pub count: usize,
    /// The mean logarithm of the ratio.
    pub log_ratio: f64,
    /// The variance of one pair's logarithm, or of one value's.
    pub variance: f64,
    /// The degrees of freedom of that variance.
    pub freedom: f64,
    /// The squared standard error of `log_ratio`, in variances: 1/n of pairs, 1/m + 1/n of two groups.
    pub leverage: f64,
}

impl Sample {
    /// Of the logarithms of paired ratios; `None` without any.
    pub fn of_pairs(logs: &[f64]) -> Option<Self> {
        let log_ratio = mean(logs)?;
        let freedom = logs.len() as f64 - 1.0;
        let variance = squares(logs) / freedom.max(1.0);
        Some(Self { count: logs.len(), log_ratio, variance, freedom, leverage: 1.0 / logs.len() as f64 })
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

/// The mean; `None` without a value.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The sum of squared distances from the mean.
fn squares(values: &[f64]) -> f64 {
    let middle = mean(values).unwrap_or(0.0);
    values.iter().map(|value| (value - middle).powi(2)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

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
