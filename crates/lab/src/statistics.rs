//! Medians and ratios of pairs.

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

/// The median, and behind it the whole range: `1.02 (0.99..1.04)`; `-` of none.
pub fn spread(values: Vec<f64>) -> String {
    if values.is_empty() {
        return "-".into();
    }
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{:.2} ({least:.2}..{most:.2})", median(values))
}

/// Fewer repetitions than this agree too easily by chance. Even with this many, of a server beside itself one cell in
/// sixteen looks decided: look at the ratio, too, or repeat more often.
pub const ENOUGH: usize = 5;

/// Whether something holds in every repetition, in none, or only in some of them or of too few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// In every one.
    Yes,
    /// In none.
    No,
    /// Sometimes, or not often enough tried.
    CantTell,
}

/// Judges the ratios of pairs; none of them, no verdict.
pub fn verdict(ratios: &[f64], good: impl Fn(f64) -> bool) -> Option<Verdict> {
    let count = ratios.iter().filter(|ratio| good(**ratio)).count();
    match count {
        _ if ratios.is_empty() => None,
        _ if ratios.len() < ENOUGH => Some(Verdict::CantTell),
        0 => Some(Verdict::No),
        _ if count == ratios.len() => Some(Verdict::Yes),
        _ => Some(Verdict::CantTell),
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
    }

    #[test]
    fn a_verdict_needs_enough_repetitions_that_agree() {
        let good = |ratio: f64| ratio >= 1.0;
        assert_eq!(verdict(&[], good), None);
        assert_eq!(verdict(&[2.0; 4], good), Some(Verdict::CantTell));
        assert_eq!(verdict(&[2.0; 5], good), Some(Verdict::Yes));
        assert_eq!(verdict(&[0.5; 5], good), Some(Verdict::No));
        assert_eq!(verdict(&[0.5, 2.0, 2.0, 2.0, 2.0], good), Some(Verdict::CantTell));
    }
}
