//! Comparisons that are read together: their estimates and verdicts.

use serde::Serialize;
use statrs::distribution::{ContinuousCDF, StudentsT};

use super::moderated::{Moderate, moderated, moderated_of_runs};
use super::{Limit, Look, Sample, Verdict};

/// The probability that a plan fails though nothing was lost: of twenty runs of a thing beside itself none fails, with a
/// confidence of 98 % (0.999²⁰).
pub const FALSE_FAIL: f64 = 0.001;
/// The probability that an interval misses the true ratio.
const MISS: f64 = 0.05;
/// More pairs than this are not recommended.
const MOST_PAIRS: usize = 1000;

/// A ratio with its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The number of pairs, or of runs.
    pub pairs: usize,
    /// The geometric mean of the ratios.
    pub ratio: f64,
    /// Where the interval of 95 % begins.
    pub low: f64,
    /// Where it ends; infinite of a single pair that nothing is known of.
    pub high: f64,
}

/// A comparison of a family, and what it has to keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Question {
    /// What scatters alike: questions of one kind moderate each other's variances.
    pub kind: &'static str,
    /// What was measured.
    pub sample: Sample,
    /// The least variance that is believed: the noise floor. Pairs that agree better do so by chance.
    pub floor: f64,
    /// The bound that the ratio has to keep.
    pub limit: Limit,
    /// What a fail has to rule out.
    pub null: Null,
    /// What was decided of it before, be it that nobody can tell without anything new; none of what is to be decided now. It
    /// counts in the family all the same, and a fail among the discoveries.
    pub decided: Option<Verdict>,
}

/// What a fail has to rule out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Null {
    /// That nothing was lost.
    NoLoss,
    /// That no more was lost than the limit allows: where something that nobody has measured may be in the ratio, too.
    LossWithinLimit,
}

impl Question {
    /// The logarithm of the ratio that a fail has to rule out.
    fn null(&self) -> f64 {
        match self.null {
            Null::NoLoss => 0.0,
            Null::LossWithinLimit => self.limit.at().ln(),
        }
    }
}

/// A sample with the scatter that is believed of it.
#[derive(Clone, Copy, Debug)]
struct Believed {
    sample: Sample,
    /// The standard error of the logarithm.
    error: f64,
    freedom: f64,
}

impl Believed {
    /// Half the width of the interval that misses with this probability, as a logarithm.
    fn half_width(&self, miss: f64) -> f64 {
        let student = StudentsT::new(0.0, 1.0, self.freedom);
        student.map_or(f64::INFINITY, |student| student.inverse_cdf(1.0 - miss / 2.0) * self.error)
    }

    /// The probability that so large a loss, or a larger one, is seen where `null` is true; `sign` is that of a loss.
    fn p_value(&self, null: f64, sign: f64) -> f64 {
        let student = StudentsT::new(0.0, 1.0, self.freedom);
        let distance = sign * (self.sample.log_ratio - null);
        student.map_or(1.0, |student| student.sf(distance / self.error.max(f64::MIN_POSITIVE)))
    }

    fn estimate(&self, half: f64) -> Estimate {
        let Sample { count, log_ratio, .. } = self.sample;
        let [ratio, low, high] = [log_ratio, log_ratio - half, log_ratio + half].map(f64::exp);
        Estimate { pairs: count, ratio, low, high }
    }

    /// How it would be after more pairs that came out alike: their mean is surer, and so is their scatter.
    fn after(&self, more: usize) -> Self {
        let count = self.sample.count as f64;
        let error = self.error * (count / (count + more as f64)).sqrt();
        Self { error, freedom: self.freedom + more as f64, ..*self }
    }

    /// How many more pairs that came out alike would decide; `None` if it takes too many.
    fn more_pairs(&self, decides: impl Fn(&Self) -> bool) -> Option<usize> {
        if !self.error.is_finite() || self.freedom <= 0.0 {
            return Some(super::ENOUGH.saturating_sub(self.sample.count).max(1));
        }
        if !decides(&self.after(MOST_PAIRS)) {
            return None;
        }
        let (mut too_few, mut enough) = (0, MOST_PAIRS);
        while enough - too_few > 1 {
            let between = usize::midpoint(too_few, enough);
            *(if decides(&self.after(between)) { &mut enough } else { &mut too_few }) = between;
        }
        Some(enough)
    }
}

/// What is believed of each sample: its variance moderated by those of its kind, and not less than the noise floor.
fn believed(all: &[(&'static str, Sample, f64)], moderate: Moderate) -> Vec<Believed> {
    let mut believed: Vec<Option<Believed>> = vec![None; all.len()];
    let mut kinds: Vec<&str> = all.iter().map(|(kind, ..)| *kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for kind in kinds {
        let members: Vec<usize> = (0..all.len()).filter(|index| all[*index].0 == kind).collect();
        let samples: Vec<Sample> = members.iter().map(|index| all[*index].1).collect();
        for ((index, sample), (variance, freedom)) in members.into_iter().zip(&samples).zip(moderate(&samples)) {
            let error = (variance.max(all[index].2) * sample.leverage).sqrt();
            believed[index] = Some(Believed { sample: *sample, error, freedom });
        }
    }
    believed.into_iter().flatten().collect()
}

/// Judges a family at a look, which may spend its share of the probability of an error.
///
/// It **passes** what cannot have lost more than its limit: the interval of 95 % excludes it. It **fails** what certainly
/// lost something, by its [`Null`], and perhaps more than the limit. Certain is what the procedure of Benjamini and Hochberg (1995) finds,
/// at a false discovery rate of [`FALSE_FAIL`]: where nothing was lost that is the probability of a single fail, and a
/// plan with many losses finds them more easily than one with a single one. A sure loss that is probably within the limit
/// fails at the last look alone: what is measured until then may make it pass.
pub fn judge(questions: &[Question], look: Look) -> Vec<(Estimate, Verdict)> {
    judge_with(questions, look, moderated)
}

/// Judges a family of which each value is that of a whole run: what is peculiar to a run is in all of its cells.
pub fn judge_runs(questions: &[Question]) -> Vec<(Estimate, Verdict)> {
    judge_with(questions, Look::ONLY, moderated_of_runs)
}

fn judge_with(questions: &[Question], look: Look, moderate: Moderate) -> Vec<(Estimate, Verdict)> {
    let samples: Vec<_> = questions.iter().map(|one| (one.kind, one.sample, one.floor)).collect();
    let believed = believed(&samples, moderate);
    let p_values: Vec<f64> = questions
        .iter()
        .zip(&believed)
        .map(|(question, believed)| match question.decided {
            None => believed.p_value(question.null(), question.limit.sign_of_loss()),
            // Each look keeps its share of the rate whatever was found before: what is found at it is a share of all that is
            // found in the end, which is no less.
            Some(Verdict::Fail) => 0.0,
            Some(Verdict::Pass | Verdict::CantTell { .. }) => 1.0,
        })
        .collect();
    let certain = discoveries(&p_values, FALSE_FAIL * look.share);
    let judge = |((question, believed), certain): ((&Question, &Believed), bool)| {
        let half = believed.half_width(MISS * look.share);
        let estimate = believed.estimate(half);
        let limit = question.limit;
        let verdict = match () {
            () if limit.is_kept_by(&estimate) => Verdict::Pass,
            () if certain && (look.is_last || !limit.holds_for(estimate.ratio)) => Verdict::Fail,
            () if certain => Verdict::CantTell { more_pairs: Some(1) },
            () => {
                let bound = FALSE_FAIL * look.share / questions.len() as f64;
                // A loss that is on the good side of its limit may come out either way.
                let decides = |then: &Believed| {
                    limit.is_kept_by(&then.estimate(then.half_width(MISS * look.share)))
                        || then.p_value(question.null(), limit.sign_of_loss()) <= bound
                };
                Verdict::CantTell { more_pairs: believed.more_pairs(decides) }
            }
        };
        (estimate, verdict)
    };
    questions.iter().zip(&believed).zip(certain).map(judge).collect()
}

/// How far the logarithm of a single pair may lie from its comparison's by chance, of a family of comparisons, each of a kind
/// and with a noise floor: that of none of all their pairs lies farther, but with the probability [`FALSE_FAIL`].
pub fn reaches(samples: &[(&'static str, Sample, f64)]) -> Vec<f64> {
    let pairs: usize = samples.iter().map(|(_, sample, _)| sample.count).sum();
    let reach = |one: Believed| {
        let error = one.error * (1.0 + 1.0 / one.sample.leverage).sqrt();
        Believed { error, ..one }.half_width(FALSE_FAIL / pairs as f64)
    };
    believed(samples, moderated).into_iter().map(reach).collect()
}

/// How two things compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// The interval of 95 % lies within the threshold (TOST, Schuirmann 1987).
    Alike,
    /// The first is more, by an amount that may be beyond the threshold.
    More,
    /// The first is less.
    Less,
    /// Nobody can tell.
    Unknown,
}

/// Relations of a family of pairs, each of a kind and with a noise floor: those that differ, at a false discovery rate of
/// 5 %; those that are alike within `threshold`.
pub fn relations(samples: &[(&'static str, Sample, f64)], threshold: f64) -> Vec<Relation> {
    let believed = believed(samples, moderated);
    let two_sided = |one: &Believed| (2.0 * one.p_value(0.0, one.sample.log_ratio.signum())).min(1.0);
    let differ = discoveries(&believed.iter().map(two_sided).collect::<Vec<_>>(), MISS);
    let relation = |(believed, differs): (&Believed, bool)| {
        let Estimate { ratio, low, high, .. } = believed.estimate(believed.half_width(MISS));
        match () {
            () if low >= 1.0 - threshold && high <= 1.0 + threshold => Relation::Alike,
            () if differs && ratio > 1.0 => Relation::More,
            () if differs => Relation::Less,
            () => Relation::Unknown,
        }
    };
    believed.iter().zip(differ).map(relation).collect()
}

/// Which of some p-values are discoveries, by Benjamini and Hochberg's procedure (1995): the k smallest, where k is the
/// largest number whose k-th smallest is at most `rate` · k / m. It holds where comparisons share a baseline (Benjamini and
/// Yekutieli 2001, one-sided comparisons with a common control).
fn discoveries(p_values: &[f64], rate: f64) -> Vec<bool> {
    let mut ordered = p_values.to_vec();
    ordered.sort_by(f64::total_cmp);
    let at_most = |rank: usize| rate * rank as f64 / ordered.len() as f64;
    let last = (1..=ordered.len()).rev().find(|rank| ordered[rank - 1] <= at_most(*rank));
    let bound = last.map_or(-1.0, at_most);
    p_values.iter().map(|p| *p <= bound).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(ratios: &[f64], limit: Limit) -> Question {
        let logs: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
        Question {
            kind: "IOPS",
            sample: Sample::of_pairs(&logs).unwrap(),
            floor: 0.0,
            limit,
            null: Null::NoLoss,
            decided: None,
        }
    }

    fn verdict(ratios: &[f64], limit: Limit) -> Verdict {
        judge(&[question(ratios, limit)], Look::ONLY)[0].1
    }

    const LOST: [f64; 5] = [0.90, 0.91, 0.90, 0.89, 0.90];

    #[test]
    fn what_certainly_lost_something_fails_unless_that_is_surely_within_the_limit() {
        assert_eq!(verdict(&LOST, Limit::AtLeast(0.95)), Verdict::Fail);
        assert_eq!(verdict(&LOST, Limit::AtLeast(0.9)), Verdict::Fail);
        assert_eq!(verdict(&LOST, Limit::AtLeast(0.8)), Verdict::Pass);
        assert_eq!(verdict(&LOST, Limit::AtMost(1.05)), Verdict::Pass);
        assert_eq!(verdict(&LOST.map(|ratio| 1.0 / ratio), Limit::AtMost(1.05)), Verdict::Fail);
        assert!(matches!(verdict(&[0.8, 1.2, 0.9, 1.1, 0.95], Limit::AtLeast(0.95)), Verdict::CantTell { .. }));
    }

    #[test]
    fn where_more_may_be_in_a_ratio_than_was_measured_the_loss_has_to_be_beyond_the_limit() {
        for (limit, then) in [(0.9, false), (0.93, true)] {
            let question = Question { null: Null::LossWithinLimit, ..question(&LOST, Limit::AtLeast(limit)) };
            assert_eq!(judge(&[question], Look::ONLY)[0].1 == Verdict::Fail, then, "{limit}");
        }
    }

    #[test]
    fn a_sure_loss_that_is_probably_within_the_limit_is_measured_more_before_it_fails() {
        let sure = question(&LOST, Limit::AtLeast(0.895));
        let first = Look { is_last: false, ..Look::ONLY };
        assert_eq!(judge(&[sure], first)[0].1, Verdict::CantTell { more_pairs: Some(1) });
        assert_eq!(judge(&[sure], Look::ONLY)[0].1, Verdict::Fail);
        let beyond = question(&LOST, Limit::AtLeast(0.95));
        assert_eq!(judge(&[beyond], first)[0].1, Verdict::Fail);
    }

    #[test]
    fn a_loss_that_is_seen_once_among_many_has_to_be_surer_than_one_alone() {
        let loss = [0.90, 0.93, 0.88, 0.92, 0.86];
        assert_eq!(verdict(&loss, Limit::AtLeast(0.95)), Verdict::Fail);
        let steady = question(&[1.0, 1.03, 0.97, 1.04, 0.96], Limit::AtLeast(0.95));
        let other = Question { kind: "CPU", ..question(&loss, Limit::AtLeast(0.95)) };
        let family: Vec<_> = std::iter::repeat_n(steady, 99).chain([other]).collect();
        assert!(matches!(judge(&family, Look::ONLY)[99].1, Verdict::CantTell { .. }));
    }

    #[test]
    fn what_is_closed_fails_no_more_and_an_error_that_is_spent_in_part_takes_more() {
        let closed = Question { decided: Some(Verdict::Pass), ..question(&LOST, Limit::AtLeast(0.95)) };
        assert!(matches!(judge(&[closed], Look::ONLY)[0].1, Verdict::CantTell { .. }));
        let widths = [1.0, 0.2].map(|share| {
            let look = Look { share, ..Look::ONLY };
            let (estimate, _) = judge(&[question(&LOST, Limit::AtLeast(0.95))], look)[0];
            estimate.high / estimate.low
        });
        assert!(widths[0] < widths[1], "{widths:?}");
    }

    #[test]
    fn a_loss_is_found_more_easily_beside_those_that_were_found_before() {
        let loss = Question { kind: "CPU", ..question(&[0.90, 0.93, 0.88, 0.92, 0.86], Limit::AtLeast(0.95)) };
        let beside = |decided| {
            let other = Question { decided, ..question(&[1.0, 1.03, 0.97, 1.04, 0.96], Limit::AtLeast(0.95)) };
            judge(&std::iter::repeat_n(other, 99).chain([loss]).collect::<Vec<_>>(), Look::ONLY)[99].1
        };
        assert_eq!(beside(Some(Verdict::Fail)), Verdict::Fail);
        assert!(matches!(beside(Some(Verdict::Pass)), Verdict::CantTell { .. }));
    }

    #[test]
    fn pairs_that_agree_better_than_the_noise_floor_do_so_by_chance() {
        let quiet = question(&LOST, Limit::AtLeast(0.95));
        assert_eq!(judge(&[quiet], Look::ONLY)[0].1, Verdict::Fail);
        let loud = Question { floor: 0.1_f64.powi(2), ..quiet };
        assert!(matches!(judge(&[loud], Look::ONLY)[0].1, Verdict::CantTell { .. }));
    }

    #[test]
    fn so_many_more_pairs_as_are_named_would_decide_if_they_came_out_alike() {
        for (few, limit, then) in [
            ([0.98, 1.02, 0.99, 1.03, 0.98], 0.975, Verdict::Pass),
            ([0.94, 0.90, 1.02, 0.88, 0.97], 0.95, Verdict::Fail),
        ] {
            let limit = Limit::AtLeast(limit);
            let Verdict::CantTell { more_pairs: Some(more) } = verdict(&few, limit) else {
                panic!("{:?}", verdict(&few, limit));
            };
            assert!((1..60).contains(&more), "{more}");
            let many: Vec<_> = few.into_iter().cycle().take(5 + 2 * more).collect();
            assert_eq!(verdict(&many, limit), then);
        }
    }

    #[test]
    fn no_number_of_pairs_tells_a_ratio_from_the_limit_that_it_lies_on_but_a_loss_is_found_there() {
        let nearly = question(&[0.90, 0.95001, 1.003], Limit::AtLeast(0.95));
        let beyond = Question { null: Null::LossWithinLimit, ..nearly };
        assert_eq!(judge(&[beyond], Look::ONLY)[0].1, Verdict::CantTell { more_pairs: None });
        for ratios in [[0.90, 0.95001, 1.003], [0.90, 0.9502, 1.004]] {
            let verdict = verdict(&ratios, Limit::AtLeast(0.95));
            let Verdict::CantTell { more_pairs: Some(more) } = verdict else { panic!("{verdict:?}") };
            assert!((5..40).contains(&more), "{more}: that it is a loss is told long before how large it is");
        }
    }

    #[test]
    fn one_pair_decides_nothing() {
        let (estimate, verdict) = judge(&[question(&[0.5], Limit::AtLeast(0.95))], Look::ONLY)[0];
        assert_eq!((estimate.ratio, estimate.high), (0.5, f64::INFINITY));
        assert_eq!(verdict, Verdict::CantTell { more_pairs: Some(4) });
    }

    #[test]
    fn alike_different_and_unknown_are_told_apart() {
        let relation = |ratios: &[f64]| {
            let Question { kind, sample, .. } = question(ratios, Limit::AtLeast(0.95));
            relations(&[(kind, sample, 0.0)], 0.05)[0]
        };
        assert_eq!(relation(&[1.0, 1.01, 0.99, 1.0, 1.0]), Relation::Alike);
        assert_eq!(relation(&[2.0, 2.1, 2.0, 1.9, 2.0]), Relation::More);
        assert_eq!(relation(&[0.5, 0.52, 0.5, 0.49, 0.5]), Relation::Less);
        assert_eq!(relation(&[1.0, 1.2, 0.9, 1.1, 1.0]), Relation::Unknown);
    }

    #[test]
    fn discoveries_are_those_of_benjamini_and_hochberg() {
        // Their own example (1995, section 3.2), at 5 %: four of fifteen.
        let p_values = [
            0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528,
            0.7590, 1.0,
        ];
        assert_eq!(discoveries(&p_values, 0.05).iter().filter(|one| **one).count(), 4);
        assert!(discoveries(&[], 0.05).is_empty());
    }
}
