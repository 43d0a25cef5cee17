//! What it means to a comparison that the disk or the load was the bottleneck.

use crate::plan::Metric;
use crate::results::Bottleneck;
use crate::statistics::{Relation, Verdict};

/// A verdict or why there is none, and what is to be said beside it.
pub type Decided = (Result<Verdict, String>, Option<String>);

/// What the bottlenecks of both sides leave of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bound {
    /// It decides.
    None,
    /// Both are at the same bound: their figures are that of the disk or of the load, and decide nothing.
    Both(String),
    /// The load held the baseline back, and not what is compared with it: the baseline is better than it looks, so that a
    /// fail stands and a pass does not.
    Baseline(String),
}

impl Bound {
    /// Of a comparison of `ours` with `theirs`, which is the baseline. A bound is one of speed: what a request costs is
    /// compared all the same.
    pub fn of(metric: Metric, ours: Option<&Bottleneck>, theirs: Option<&Bottleneck>) -> Self {
        match (ours, theirs) {
            _ if is_cost(metric) => Self::None,
            (Some(bound @ Bottleneck::Load(_)), Some(Bottleneck::Load(_)))
            | (Some(bound @ Bottleneck::Device(_)), Some(Bottleneck::Device(_))) => Self::Both(bound.to_string()),
            (_, Some(bound @ Bottleneck::Load(_))) => Self::Baseline(format!("the baseline is {bound}")),
            _ => Self::None,
        }
    }

    /// What it leaves of a verdict, and what is to be said beside that.
    pub fn leaves(self, verdict: Verdict) -> Decided {
        match self {
            Self::None => (Ok(verdict), None),
            Self::Both(why) => (Err(why), None),
            Self::Baseline(why) if verdict == Verdict::Pass => (Ok(Verdict::CantTell { more_pairs: None }), Some(why)),
            Self::Baseline(why) => (Ok(verdict), Some(why)),
        }
    }
}

/// What is left of a relation of two in speed of which the load held some back: who it did may be faster still, so that they
/// are not known to be alike, and of two nothing is known.
pub fn leaves_of_relation(relation: Relation, held_back: [bool; 2]) -> Relation {
    match (relation, held_back) {
        (_, [true, true]) | (Relation::Alike, [true, false] | [false, true]) => Relation::Unknown,
        (relation, _) => relation,
    }
}

/// What is left of a verdict beside a bound and where a rate was not reached, and what is to be said beside that.
pub fn left(verdict: Verdict, metric: Metric, short: [Option<f64>; 2], bound: Bound) -> Decided {
    let short = short_of_rate(metric, verdict, short);
    let (verdict, short) = short.map_or((verdict, None), |(verdict, note)| (verdict, Some(note)));
    let (decision, bound) = bound.leaves(verdict);
    let notes: Vec<String> = [short, bound].into_iter().flatten().collect();
    (decision, (!notes.is_empty()).then(|| notes.join("; ")))
}

/// What is left of a verdict on an open loop's latency or rate where `ours` or `theirs`, which is the baseline, fell short of
/// the rate, each by its share of it; nothing where neither did. Who makes fewer requests has less to wait for: then
/// neither a better latency is a pass nor a worse one than the baseline's a fail. How much of the rate was reached is
/// compared by itself.
fn short_of_rate(metric: Metric, verdict: Verdict, [ours, theirs]: [Option<f64>; 2]) -> Option<(Verdict, String)> {
    let percent = |share: f64| format!("{:.0} % of the rate", share * 100.0);
    let note = match (ours, theirs) {
        (None, None) => return None,
        (Some(ours), None) => format!("reached {}", percent(ours)),
        (None, Some(theirs)) => format!("the baseline reached {}", percent(theirs)),
        (Some(ours), Some(theirs)) => {
            format!("reached {}, and the baseline {:.0} %", percent(ours), theirs * 100.0)
        }
    };
    let is_hollow = match verdict {
        Verdict::Pass => ours.is_some(),
        Verdict::Fail => theirs.is_some(),
        Verdict::CantTell { .. } => false,
    };
    match metric {
        Metric::Iops | Metric::Transactions => Some((verdict, note)),
        Metric::Latency if is_hollow => Some((Verdict::CantTell { more_pairs: None }, note)),
        Metric::Latency => Some((verdict, note)),
        _ => None,
    }
}

/// Whether a metric says what is spent, and not how fast it goes.
pub(crate) fn is_cost(metric: Metric) -> bool {
    matches!(metric, Metric::CpuPerIo | Metric::IoThreadCpu | Metric::ServerCpu | Metric::LoadCpu)
}

/// The bound of most of some measurements, if they have one; a minority of them may have met it by chance.
pub fn of_most<'a>(limits: &[Option<&'a Bottleneck>]) -> Option<&'a Bottleneck> {
    let limited = limits.iter().flatten().count();
    (2 * limited > limits.len()).then(|| limits.iter().flatten().next().copied()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_excuses_only_where_both_are_at_it() {
        let (load, disk) = (Bottleneck::Load("l".into()), Bottleneck::Device("d".into()));
        let of = |ours, theirs| Bound::of(Metric::Iops, ours, theirs);
        assert_eq!(of(Some(&load), Some(&load)), Bound::Both("load-bound: l".into()));
        assert_eq!(of(Some(&disk), Some(&disk)), Bound::Both("device-bound: d".into()));
        for (ours, theirs) in [(Some(&load), None), (Some(&disk), None), (None, Some(&disk)), (None, None)] {
            assert_eq!(of(ours, theirs), Bound::None);
        }
        for cost in [Metric::CpuPerIo, Metric::IoThreadCpu, Metric::ServerCpu, Metric::LoadCpu] {
            assert_eq!(Bound::of(cost, Some(&load), Some(&load)), Bound::None);
        }
    }

    #[test]
    fn a_baseline_that_the_load_held_back_lets_a_fail_stand_and_no_pass() {
        let (load, disk) = (Bottleneck::Load("l".into()), Bottleneck::Device("d".into()));
        for ours in [None, Some(&disk)] {
            let bound = || Bound::of(Metric::Iops, ours, Some(&load));
            assert_eq!(bound().leaves(Verdict::Fail).0, Ok(Verdict::Fail));
            assert_eq!(bound().leaves(Verdict::Pass).0, Ok(Verdict::CantTell { more_pairs: None }));
        }
    }

    #[test]
    fn beside_a_baseline_that_the_load_held_back_nothing_passes_though_it_fell_short_of_its_rate() {
        let load = || Bottleneck::Load("l".into());
        let of =
            |verdict, short| left(verdict, Metric::Latency, short, Bound::of(Metric::Latency, None, Some(&load())));
        let open = Verdict::CantTell { more_pairs: None };
        let note = "the baseline reached 80 % of the rate; the baseline is load-bound: l";
        assert_eq!(of(Verdict::Pass, [None, Some(0.8)]), (Ok(open), Some(note.into())));
        assert_eq!(of(Verdict::Fail, [None, Some(0.8)]), (Ok(open), Some(note.into())), "it made fewer requests");
        assert_eq!(of(Verdict::Fail, [None; 2]).0, Ok(Verdict::Fail));
        assert_eq!(left(Verdict::Pass, Metric::Latency, [None; 2], Bound::None), (Ok(Verdict::Pass), None));
    }

    #[test]
    fn one_repetition_at_a_bound_is_no_bound() {
        let disk = Bottleneck::Device("d".into());
        assert_eq!(of_most(&[Some(&disk), None, None]), None);
        assert_eq!(of_most(&[Some(&disk), None]), None, "half of them are not most");
        assert_eq!(of_most(&[Some(&disk), Some(&disk), None]), Some(&disk));
        assert_eq!(of_most(&[]), None);
    }
}
