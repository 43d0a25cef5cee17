//! Verdicts: pass, fail, can't tell.

use serde::Serialize;

use super::Estimate;

/// The bound that a ratio must keep to pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Limit {
    /// A lower bound, for a metric of which more is better.
    AtLeast(f64),
    /// An upper bound, for a metric of which less is better.
    AtMost(f64),
}

/// How an estimate compares with a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Verdict {
    /// The interval lies on the good side.
    Pass,
    /// The interval lies on the bad side.
    Fail,
    /// The interval straddles the limit.
    CantTell {
        /// How many more pairs would probably decide; none if it takes too many.
        more_pairs: Option<usize>,
    },
}

impl Limit {
    /// The limit for a loss of at most `threshold`, as a share of the baseline.
    pub fn for_loss(threshold: f64, more_is_better: bool) -> Self {
        if more_is_better { Self::AtLeast(1.0 - threshold) } else { Self::AtMost(1.0 + threshold) }
    }

    /// The ratio at which it lies.
    pub fn at(self) -> f64 {
        match self {
            Self::AtLeast(limit) | Self::AtMost(limit) => limit,
        }
    }
}

impl Estimate {
    /// Judges it. A plan passes only if every comparison does, which is safe with uncorrected intervals (intersection–union
    /// test, Berger 1982): a pass takes `alone`. It fails if any comparison does, so a fail takes `together`.
    pub fn judge(&self, limit: Limit) -> Verdict {
        let at = limit.at();
        let (good, bad, likely_good) = match limit {
            Limit::AtLeast(_) => (self.alone.low >= at, self.together.high < at, self.median >= at),
            Limit::AtMost(_) => (self.alone.high <= at, self.together.low > at, self.median <= at),
        };
        let interval = if likely_good { self.alone } else { self.together };
        match (good, bad) {
            (true, _) => Verdict::Pass,
            (_, true) => Verdict::Fail,
            _ => Verdict::CantTell { more_pairs: self.more_pairs(interval, at) },
        }
    }

    /// Whether it is within `threshold` of 1, an equivalence test of both bounds (TOST, Schuirmann 1987); `None` if that is
    /// undecided.
    pub fn is_about_one(&self, threshold: f64) -> Option<bool> {
        let (least, most) = (1.0 - threshold, 1.0 + threshold);
        let inside = self.alone.low >= least && self.alone.high <= most;
        let outside = self.together.high < least || self.together.low > most;
        (inside || outside).then_some(inside)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Family;

    fn of(ratios: &[f64]) -> Estimate {
        Estimate::of_pairs(ratios, Family::alone()).expect("ratios")
    }

    #[test]
    fn an_interval_that_straddles_the_limit_decides_nothing() {
        let steady = of(&[0.90, 0.91, 0.90, 0.89, 0.90]);
        assert_eq!(steady.judge(Limit::AtLeast(0.95)), Verdict::Fail);
        assert_eq!(steady.judge(Limit::AtMost(1.05)), Verdict::Pass);
        assert_eq!(steady.judge(Limit::AtLeast(0.8)), Verdict::Pass);
        assert!(matches!(steady.judge(Limit::AtLeast(0.895)), Verdict::CantTell { .. }));
    }

    #[test]
    fn so_many_more_pairs_as_are_named_would_decide_if_they_came_out_alike() {
        let few = [0.98, 1.02, 0.99, 1.03, 0.98];
        let Verdict::CantTell { more_pairs: Some(more) } = of(&few).judge(Limit::AtLeast(0.975)) else {
            panic!("{:?}", of(&few));
        };
        assert!((2..40).contains(&more), "{more}");
        let many: Vec<_> = few.into_iter().cycle().take(5 + 2 * more).collect();
        assert_eq!(of(&many).judge(Limit::AtLeast(0.975)), Verdict::Pass);
    }

    #[test]
    fn no_number_of_pairs_decides_what_lies_on_the_limit() {
        let verdict = of(&[0.94, 0.95, 0.96]).judge(Limit::AtLeast(0.95));
        assert_eq!(verdict, Verdict::CantTell { more_pairs: None });
    }

    #[test]
    fn alike_different_and_unknown_are_told_apart() {
        assert_eq!(of(&[1.0, 1.01, 0.99, 1.0, 1.0]).is_about_one(0.05), Some(true));
        assert_eq!(of(&[2.0, 2.1, 2.0, 1.9, 2.0]).is_about_one(0.05), Some(false));
        assert_eq!(of(&[1.0, 1.2, 0.9, 1.1, 1.0]).is_about_one(0.05), None);
    }
}
