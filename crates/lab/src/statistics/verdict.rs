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

/// What a comparison comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Verdict {
    /// No more was lost than the limit allows.
    Pass,
    /// Something was certainly lost, and perhaps more than the limit allows.
    Fail,
    /// Neither is sure.
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

    /// Whether the whole interval keeps it.
    pub fn is_kept_by(self, estimate: &Estimate) -> bool {
        match self {
            Self::AtLeast(limit) => estimate.low >= limit,
            Self::AtMost(limit) => estimate.high <= limit,
        }
    }

    /// Whether a ratio keeps it.
    pub fn holds_for(self, ratio: f64) -> bool {
        match self {
            Self::AtLeast(limit) => ratio >= limit,
            Self::AtMost(limit) => ratio <= limit,
        }
    }

    /// The sign of a loss's logarithm.
    pub fn sign_of_loss(self) -> f64 {
        match self {
            Self::AtLeast(_) => -1.0,
            Self::AtMost(_) => 1.0,
        }
    }
}

/// How many comparisons came out how, and what that comes to: a plan's verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Comparisons that passed.
    pub passed: usize,
    /// Those that failed.
    pub failed: usize,
    /// Those of which nobody can tell.
    pub cant_tell: usize,
    /// Those that decide nothing, whatever their figures are.
    pub nothing: usize,
}

/// What a family of comparisons comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overall {
    /// Every comparison that decides passed.
    Pass,
    /// One failed.
    Fail,
    /// Some may have, or nothing decides.
    CantTell,
    /// Nothing may be compared.
    NotComparable,
}

impl Overall {
    /// In a word or two.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::CantTell => "can't tell",
            Self::NotComparable => "not comparable",
        }
    }

    /// As a program ends: 0 pass, 1 fail, 2 can't tell, 3 not comparable.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::Fail => 1,
            Self::CantTell => 2,
            Self::NotComparable => 3,
        }
    }
}

impl Count {
    /// Counts decisions: verdicts, and reasons why there is none.
    pub fn of<'a, E: 'a>(decisions: impl Iterator<Item = &'a Result<Verdict, E>>) -> Self {
        let mut count = Self::default();
        for decision in decisions {
            *match decision {
                Ok(Verdict::Pass) => &mut count.passed,
                Ok(Verdict::Fail) => &mut count.failed,
                Ok(Verdict::CantTell { .. }) => &mut count.cant_tell,
                Err(_) => &mut count.nothing,
            } += 1;
        }
        count
    }

    /// What it comes to. A plan passes only if every comparison does, which is safe with intervals of 95 % each (the
    /// intersection–union test, Berger 1982); it fails if one does.
    pub fn overall(&self) -> Overall {
        match (self.failed, self.cant_tell, self.passed) {
            (1.., _, _) => Overall::Fail,
            (0, 0, 1..) => Overall::Pass,
            _ => Overall::CantTell,
        }
    }
}

impl std::fmt::Display for Count {
    /// `of 24 comparisons 20 passed, 1 failed, 3 can't be told; 4 more decide nothing`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { passed, failed, cant_tell, nothing } = self;
        match passed + failed + cant_tell {
            0 => write!(f, "no comparison decides anything")?,
            all => write!(f, "of {all} comparisons {passed} passed, {failed} failed, {cant_tell} can't be told")?,
        }
        if *nothing > 0 { write!(f, "; {nothing} more decide nothing") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_has_one_verdict_and_says_how_many_comparisons_decide() {
        let (pass, fail, open) = (Ok(Verdict::Pass), Ok(Verdict::Fail), Ok(Verdict::CantTell { more_pairs: None }));
        let count = |decisions: &[Result<Verdict, &str>]| Count::of(decisions.iter());
        assert_eq!(count(&[pass, Err("host")]).overall(), Overall::Pass);
        assert_eq!(count(&[pass, open]).overall(), Overall::CantTell);
        assert_eq!(count(&[pass, open, fail]).overall(), Overall::Fail);
        assert_eq!(count(&[Err("host")]).overall(), Overall::CantTell, "nothing decides");
        assert_eq!(
            count(&[pass, open, fail, Err("host")]).to_string(),
            "of 3 comparisons 1 passed, 1 failed, 1 can't be told; 1 more decide nothing"
        );
        assert_eq!(count(&[]).to_string(), "no comparison decides anything");
    }

    #[test]
    fn a_limit_is_below_for_what_should_be_more_and_above_for_what_should_be_less() {
        let estimate = |low: f64, high: f64| Estimate { pairs: 5, ratio: 1.0, low, high };
        let (more, less) = (Limit::for_loss(0.25, true), Limit::for_loss(0.25, false));
        assert_eq!((more, less), (Limit::AtLeast(0.75), Limit::AtMost(1.25)));
        assert_eq!((more.at(), less.at()), (0.75, 1.25));
        assert_eq!((more.sign_of_loss(), less.sign_of_loss()), (-1.0, 1.0));
        for (ratio, of_more, of_less) in
            [(0.7, false, true), (0.75, true, true), (1.25, true, true), (1.3, true, false)]
        {
            assert_eq!((more.holds_for(ratio), less.holds_for(ratio)), (of_more, of_less), "{ratio}");
        }
        for (low, high, of_more, of_less) in
            [(0.75, 9.0, true, false), (0.74, 9.0, false, false), (0.1, 1.25, false, true), (0.75, 1.25, true, true)]
        {
            let estimate = estimate(low, high);
            assert_eq!((more.is_kept_by(&estimate), less.is_kept_by(&estimate)), (of_more, of_less), "{estimate:?}");
        }
    }

    #[test]
    fn verdicts_have_the_exit_codes_and_words_that_the_page_has() {
        let all = [Overall::Pass, Overall::Fail, Overall::CantTell, Overall::NotComparable];
        assert_eq!(all.map(Overall::exit_code), [0, 1, 2, 3]);
        assert_eq!(all.map(Overall::word), ["pass", "fail", "can't tell", "not comparable"]);
    }
}
