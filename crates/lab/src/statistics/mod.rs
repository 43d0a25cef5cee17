//! Statistics of paired measurements. `docs/report.md` has the method and its sources.
//!
//! | | |
//! |---|---|
//! | [`mean`], [`squares`], [`median`], [`spread`], [`deviation`] | values of one kind |
//! | [`Sample`] | one comparison as it was measured, of pairs or of two groups |
//! | `moderated` | variances of one kind, each moderated by all |
//! | [`judge`], [`judge_runs`], [`Estimate`], [`Verdict`] | comparisons that are read together: pass, fail, can't tell |
//! | [`reaches`] | how far single pairs lie from their comparison by chance |
//! | [`relations`] | pairs of options: alike, more, less, unknown |
//! | [`Looks`], [`Look`] | when a plan that may measure more looks at what it has |
//! | [`Count`], [`Overall`] | the verdict of a whole plan |
//! | [`agreement`] | whether something held in every repetition |

mod family;
mod looks;
mod moderated;
mod sample;
#[cfg(test)]
mod simulations;
mod verdict;

pub use family::{Estimate, FALSE_FAIL, Null, Question, Relation, judge, judge_runs, reaches, relations};
pub use looks::{Look, Looks};
pub use sample::{Sample, mean, squares, trimmed};
pub use verdict::{Count, Limit, Overall, Verdict};

/// The middle of some values; `NaN` of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

/// The standard deviation of some values of which a trimmed mean is taken, as [`Sample`] has it: of many those that are furthest
/// off add nothing. It says nothing of a plain mean. 0 of fewer than two.
pub fn deviation(values: &[f64]) -> f64 {
    Sample::of_pairs(values).map_or(0.0, |sample| sample.variance.sqrt())
}

/// The median, and behind it the whole range: `1.02 (0.99..1.04)`; `-` of none.
pub fn spread(values: Vec<f64>) -> String {
    if values.is_empty() {
        return "-".into();
    }
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{:.2} ({least:.2}..{most:.2})", median(values))
}

/// Fewer repetitions than this agree too easily by chance. Even five agree in one case of sixteen when a server is
/// compared with itself (2 · 2⁻⁵): look at the ratio too, or repeat more often.
pub const ENOUGH: usize = 5;

/// Whether something holds in every repetition, in none, or only in some of them or of too few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// In every one.
    Yes,
    /// In none.
    No,
    /// Sometimes, or not often enough tried.
    CantTell,
}

/// Judges the ratios of pairs; `None` without any.
pub fn agreement(ratios: &[f64], good: impl Fn(f64) -> bool) -> Option<Agreement> {
    let count = ratios.iter().filter(|ratio| good(**ratio)).count();
    match count {
        _ if ratios.is_empty() => None,
        _ if ratios.len() < ENOUGH => Some(Agreement::CantTell),
        0 => Some(Agreement::No),
        _ if count == ratios.len() => Some(Agreement::Yes),
        _ => Some(Agreement::CantTell),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_shows_the_median_and_the_range() {
        assert_eq!(spread(vec![1.0, 0.5, 2.0]), "1.00 (0.50..2.00)");
        assert_eq!(spread(vec![1.0, 2.0]), "1.50 (1.00..2.00)");
        assert_eq!(spread(Vec::new()), "-");
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn agreement_needs_enough_repetitions_that_agree() {
        let good = |ratio: f64| ratio >= 1.0;
        assert_eq!(agreement(&[], good), None);
        assert_eq!(agreement(&[2.0; 4], good), Some(Agreement::CantTell));
        assert_eq!(agreement(&[2.0; 5], good), Some(Agreement::Yes));
        assert_eq!(agreement(&[0.5; 5], good), Some(Agreement::No));
        assert_eq!(agreement(&[0.5, 2.0, 2.0, 2.0, 2.0], good), Some(Agreement::CantTell));
    }
}
