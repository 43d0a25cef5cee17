//! Comparisons with the baseline, and what they decide.

use super::bound::{self, Bound, Decided};
use super::table::counterpart;
use super::{Analysis, CellKey, Status, Summary, difference};
use crate::plan::{Application, Asks, Load, Metric, Stack};
use crate::runner::{AGAIN, subject_called};
use crate::statistics::{
    self, Count, Estimate, Limit, Look, Looks, Null, Question, Sample, Verdict, deviation, median, trimmed,
};

/// A comparison with the baseline.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// Under which load.
    pub load: String,
    /// Of a curve: at which point; 0 is the closed loop.
    pub point: u32,
    /// Who is compared.
    pub subject: String,
    /// With whom.
    pub baseline: String,
    /// In what.
    pub metric: Metric,
    /// The subject's values.
    pub ours: Option<Summary>,
    /// The baseline's.
    pub theirs: Option<Summary>,
    /// The ratio; none where no repetition has both.
    pub ratio: Option<Estimate>,
    /// The baseline beside itself under the same load: the noise floor.
    pub floor: Option<Estimate>,
    /// What it decides, or why it decides nothing.
    pub decision: Result<Verdict, String>,
    /// What a fail is called.
    pub fail: &'static str,
    /// What is to be said beside that.
    pub note: Option<String>,
}

/// What is compared with what.
#[derive(Clone, Copy)]
struct Pair<'a> {
    load: &'a Load,
    point: u32,
    subject: &'a str,
    baseline: &'a str,
    metric: Metric,
}

impl<'a> Pair<'a> {
    fn key(self, subject: &'a str) -> CellKey<'a> {
        CellKey { load: &self.load.name, subject, point: self.point }
    }

    fn ours(self) -> CellKey<'a> {
        self.key(self.subject)
    }

    fn theirs(self) -> CellKey<'a> {
        self.key(self.baseline)
    }
}

/// Whether a load asks for a rate.
fn is_open(load: &Load, point: u32) -> bool {
    load.keys.rate_iops.is_some() || point > 0
}

/// Whether two rates are one but for how they were rounded.
pub(super) fn is_one_rate([one, other]: [f64; 2]) -> bool {
    (one / other - 1.0).abs() <= 0.01
}

/// Logarithms of ratios, each with its repetition.
type Logs = Vec<(u32, f64)>;

/// The pairs of the first `before` repetitions.
pub(super) fn sample(logs: &Logs, before: u32) -> Option<Sample> {
    let logs: Vec<f64> = logs.iter().filter(|(repetition, _)| *repetition < before).map(|(_, log)| *log).collect();
    Sample::of_pairs(&logs)
}

/// Pairs that a trimmed mean leaves out and that lost more than the limit, by more than chance.
#[derive(Clone, Debug, PartialEq)]
struct LeftOut {
    text: String,
    /// Whether the baseline has measurements that are as far off.
    is_the_machines: bool,
}

impl LeftOut {
    /// What they leave of a decision: a stall that only the subject had may be its own.
    fn leaves(self, (decision, note): Decided) -> Decided {
        let decision = match decision {
            Ok(Verdict::Pass) if !self.is_the_machines => Ok(Verdict::CantTell { more_pairs: None }),
            decision => decision,
        };
        let as_well = if self.is_the_machines { ", and the baseline stalled as well" } else { "" };
        let text = self.text + as_well;
        (decision, Some(note.map_or(text.clone(), |note| format!("{note}; {text}"))))
    }
}

impl<'a> Analysis<'a> {
    /// How many comparisons came out how: the verdict of the whole plan.
    pub fn count(&self) -> Count {
        Count::of(self.judged.iter().map(|one| &one.decision))
    }

    /// How much the logarithms of pairs of the baseline and itself deviate in a metric, typically over the loads; 0 where
    /// nobody looked.
    pub fn noise(&self, metric: Metric) -> f64 {
        self.noise_before(u32::MAX, metric)
    }

    /// The same in the first repetitions, so many.
    fn noise_before(&self, before: u32, metric: Metric) -> f64 {
        let deviations = self.loads.iter().map(|load| {
            let logs = self.beside_itself(load, metric).into_iter().filter(|(of, _)| *of < before);
            deviation(&logs.map(|(_, log)| log).collect::<Vec<_>>())
        });
        let known: Vec<f64> = deviations.filter(|deviation| *deviation > 0.0).collect();
        if known.is_empty() { 0.0 } else { median(known) }
    }

    /// The least variance that is believed of pairs of two subjects under a load: that of the baseline beside itself. The
    /// mean of two measurements has half of one's variance. As the first `before` repetitions know it: what is decided at a
    /// look stays so, whatever is measured of others after it.
    pub(super) fn floor(&self, before: u32, load: &Load, metric: Metric, pair: [&str; 2]) -> f64 {
        let measured = |subject: &str| if self.has_again(load, subject) { 0.5 } else { 1.0 };
        self.noise_before(before, metric).powi(2) * pair.map(measured).iter().sum::<f64>() / 2.0
    }

    /// Whether a subject was measured twice in each round.
    fn has_again(&self, load: &Load, subject: &str) -> bool {
        let again = format!("{subject}{AGAIN}");
        self.table.has(CellKey { load: &load.name, subject: &again, point: 0 })
    }

    /// A load's baseline beside itself.
    fn beside_itself(&self, load: &Load, metric: Metric) -> Logs {
        let subject = self.run.plan.baseline_under(load);
        self.table.beside_itself(CellKey { load: &load.name, subject, point: 0 }, metric)
    }

    /// What is compared under a load: how fast it is, and what a request costs, where there are requests.
    pub(super) fn metrics(load: &Load, point: u32) -> &'static [Metric] {
        match load.keys.application {
            Some(Application::Rsync) => &[Metric::Duration],
            // An open loop gets what it asks for; how long that takes is the question.
            _ if is_open(load, point) => &[Metric::Latency, Metric::CpuPerIo],
            Some(Application::Pgbench) => &[Metric::Transactions, Metric::CpuPerIo],
            None => &[Metric::Iops, Metric::CpuPerIo],
        }
    }

    /// The same; where two go the kernel's path by themselves also what fio spends on it: what nobody serves has the cost
    /// of a request in its own CPU time, and so has a guest whose kernel does other things than the other's; and how much of
    /// a rate was reached, where one of them fell short of it.
    fn metrics_of(&self, load: &Load, point: u32, pair: [&str; 2]) -> Vec<Metric> {
        let is_loads = match pair.map(|name| subject_called(&self.run.plan, name)) {
            [Some(one), Some(other)] if one.stack == Stack::Host => other.stack == Stack::Host,
            [Some(one), Some(other)] if one.stack == Stack::Guest => {
                other.stack == Stack::Guest && one.scheduler != other.scheduler
            }
            _ => false,
        };
        let is_fio = load.keys.application.is_none();
        let loads = (is_loads && is_fio).then_some(Metric::LoadCpu);
        let reached = self.reached(load, point, pair);
        Self::metrics(load, point).iter().copied().chain(loads).chain(reached).collect()
    }

    /// In what two are compared beside that at a rate that one of them does not reach: what is reached of it is a result.
    pub(super) fn reached(&self, load: &Load, point: u32, pair: [&str; 2]) -> Option<Metric> {
        let key = |subject| CellKey { load: &load.name, subject, point };
        let is_short = pair.iter().any(|subject| self.table.shortfall(key(subject)).is_some());
        let reached = if load.keys.application.is_some() { Metric::Transactions } else { Metric::Iops };
        (is_open(load, point) && is_short).then_some(reached)
    }

    fn pairs(&self) -> Vec<Pair<'a>> {
        let mut all = Vec::new();
        for load in self.loads.iter().copied() {
            let on = self.subjects.iter().filter(|subject| load.is_put_on(subject) || subject.ends_with(AGAIN));
            for subject in on.copied() {
                let Some(baseline) = counterpart(&self.run.plan, load, subject) else { continue };
                for point in 0..=load.points() {
                    let metrics = self.metrics_of(load, point, [subject, baseline]).into_iter();
                    all.extend(metrics.map(|metric| Pair { load, point, subject, baseline, metric }));
                }
            }
        }
        all
    }

    pub(super) fn judge(&self) -> Vec<Judged> {
        let pairs = self.pairs();
        let logs: Vec<Logs> =
            pairs.iter().map(|pair| self.table.log_ratios(pair.ours(), pair.theirs(), pair.metric)).collect();
        let excuses: Vec<_> = pairs.iter().map(|pair| self.why_not(*pair)).collect();
        // A family is of what can decide: the reference, and what is at a bound, would only make the others less sure.
        let members: Vec<usize> =
            (0..pairs.len()).filter(|index| excuses[*index].is_none() && !logs[*index].is_empty()).collect();
        let family: Vec<_> = members.iter().map(|index| (pairs[*index], &logs[*index])).collect();
        let (found, left_out) = (self.verdicts(&family), self.left_out(&family));
        let mut stalls: Vec<Option<LeftOut>> = vec![None; pairs.len()];
        members.iter().zip(left_out).for_each(|(index, one)| stalls[*index] = one);
        let mut estimates = vec![None; pairs.len()];
        members.into_iter().zip(found).for_each(|(index, found)| estimates[index] = Some(found));
        // What decides nothing has an interval of its own all the same.
        let alone = |(pair, logs): (&Pair<'_>, &Logs)| Some(self.verdicts(&[(*pair, logs)]).first()?.0);
        let shown = estimates.iter().zip(pairs.iter().zip(&logs));
        let shown: Vec<_> = shown.map(|(found, one)| found.map_or_else(|| alone(one), |found| Some(found.0))).collect();
        let floors = self.floors();
        let judged = pairs.iter().zip(excuses).zip(estimates).zip(shown).zip(stalls);
        let judged = judged.map(|((((pair, excuse), found), ratio), stall)| {
            let decided = self.decide(*pair, excuse, found.map(|(_, verdict)| verdict));
            let (decision, note) = match stall {
                Some(stall) => stall.leaves(decided),
                None => decided,
            };
            let floor = floors.iter().find(|one| (one.0, one.1) == (pair.load.name.as_str(), pair.metric));
            Judged {
                load: pair.load.name.clone(),
                point: pair.point,
                subject: pair.subject.into(),
                baseline: pair.baseline.into(),
                metric: pair.metric,
                ours: self.summary(pair.ours(), pair.metric),
                theirs: self.summary(pair.theirs(), pair.metric),
                ratio,
                floor: floor.filter(|_| pair.point == 0).map(|one| one.2),
                decision,
                fail: self.word_for_fail(*pair),
                note,
            }
        });
        judged.collect()
    }

    /// The estimates and verdicts of a family, look by look: what is decided at one is not looked at again.
    fn verdicts(&self, family: &[(Pair<'_>, &Logs)]) -> Vec<(Estimate, Verdict)> {
        let plan = &self.run.plan;
        let measured = family.iter().flat_map(|(_, logs)| logs.iter()).map(|(repetition, _)| repetition + 1).max();
        let mut found: Vec<Option<(Estimate, Verdict)>> = vec![None; family.len()];
        let mut before = 0;
        for look in Looks::new(plan.repetitions, plan.most_repetitions()).all() {
            // A run that was interrupted in its first round has an interval too.
            if before > 0 && measured.is_none_or(|measured| measured <= before) {
                break;
            }
            let question = |((pair, logs), found): (&(Pair<'_>, &Logs), &Option<_>)| {
                let Pair { load, subject, baseline, metric, .. } = *pair;
                Some(Question {
                    kind: metric.name(),
                    sample: sample(logs, look.after)?,
                    floor: self.floor(look.after, load, metric, [subject, baseline]),
                    limit: Limit::for_loss(plan.threshold, metric.more_is_better()),
                    null: Null::NoLoss,
                    decided: match found {
                        Some((_, verdict @ (Verdict::Pass | Verdict::Fail))) => Some(*verdict),
                        _ if logs.iter().any(|(repetition, _)| *repetition >= before) => None,
                        // Without anything new there is nothing to look at.
                        _ => Some(Verdict::CantTell { more_pairs: None }),
                    },
                })
            };
            let questions: Vec<_> = family.iter().zip(&found).map(question).collect();
            let asked = (0..family.len()).filter_map(|index| Some((index, questions[index]?.decided.is_none())));
            let asked: Vec<_> = asked.collect();
            let judged = statistics::judge(&questions.into_iter().flatten().collect::<Vec<_>>(), look);
            for ((index, _), judged) in asked.into_iter().zip(judged).filter(|((_, is_open), _)| *is_open) {
                found[index] = Some(self.in_enough_repetitions(judged));
            }
            before = look.after;
        }
        found.into_iter().flatten().collect()
    }

    /// Of each comparison of a family the pairs that its mean leaves out though they tell of a loss.
    fn left_out(&self, family: &[(Pair<'_>, &Logs)]) -> Vec<Option<LeftOut>> {
        let samples = family.iter().filter_map(|(pair, logs)| {
            let floor = self.floor(u32::MAX, pair.load, pair.metric, [pair.subject, pair.baseline]);
            Some((pair.metric.name(), sample(logs, u32::MAX)?, floor))
        });
        let samples: Vec<_> = samples.collect();
        let reaches = statistics::reaches(&samples);
        let left_out = |((&(pair, logs), (_, sample, _)), reach): ((&(Pair<'_>, &Logs), &(_, Sample, _)), f64)| {
            let limit = Limit::for_loss(self.run.plan.threshold, pair.metric.more_is_better());
            // How much more each lost than the mean.
            let lost = |log: f64| limit.sign_of_loss() * (log - sample.log_ratio);
            let mut logs: Vec<f64> = logs.iter().map(|(_, log)| *log).collect();
            logs.sort_by(|one, other| lost(*other).total_cmp(&lost(*one)));
            let is_stall = |log: &&f64| lost(**log) > reach && !limit.holds_for(log.exp());
            let stalls: Vec<&f64> = logs.iter().take(trimmed(logs.len())).filter(is_stall).collect();
            let worst = difference(stalls.first()?.exp());
            let text = match stalls.len() {
                1 => format!("one of {} pairs left out: {worst}", logs.len()),
                some => format!("{some} of {} pairs left out, the worst: {worst}", logs.len()),
            };
            let beside_itself = self.table.beside_itself(pair.theirs(), pair.metric);
            let is_the_machines =
                logs.iter().any(|log| lost(*log) < -reach) || beside_itself.iter().any(|(_, log)| log.abs() > reach);
            Some(LeftOut { text, is_the_machines })
        };
        family.iter().zip(&samples).zip(reaches).map(left_out).collect()
    }

    /// What is left of a verdict: what was measured in fewer repetitions than the plan asks for passes nothing, however much
    /// the others tell of its scatter.
    fn in_enough_repetitions(&self, (estimate, verdict): (Estimate, Verdict)) -> (Estimate, Verdict) {
        match (self.run.plan.repetitions as usize).checked_sub(estimate.pairs) {
            Some(missing @ 1..) if verdict == Verdict::Pass => {
                (estimate, Verdict::CantTell { more_pairs: Some(missing) })
            }
            _ => (estimate, verdict),
        }
    }

    /// Of each load and metric: the baseline beside itself.
    fn floors(&self) -> Vec<(&'a str, Metric, Estimate)> {
        let metrics = |load: &Load| Self::metrics(load, 0).iter().copied().chain([Metric::LoadCpu]).collect::<Vec<_>>();
        let loads = self.loads.iter().flat_map(|load| metrics(load).into_iter().map(move |metric| (*load, metric)));
        let known = loads.filter_map(|(load, metric)| {
            let logs = self.beside_itself(load, metric);
            let question = Question {
                kind: metric.name(),
                sample: sample(&logs, u32::MAX)?,
                floor: 0.0,
                limit: Limit::for_loss(self.run.plan.threshold, metric.more_is_better()),
                null: Null::NoLoss,
                decided: None,
            };
            Some((load.name.as_str(), metric, question))
        });
        let (names, questions): (Vec<_>, Vec<_>) = known.map(|(load, metric, one)| ((load, metric), one)).unzip();
        let estimates = statistics::judge(&questions, Look::ONLY);
        names.into_iter().zip(estimates).map(|((load, metric), (estimate, _))| (load, metric, estimate)).collect()
    }

    /// What a subject's failures decide, whatever was measured: it fails where the baseline works, and where the baseline mostly
    /// does and it never. A reference that fails is no candidate.
    fn fails(&self, pair: Pair<'_>) -> Option<String> {
        let ours = self.table.failures(pair.ours())?;
        let is_measured = |key| self.table.status(key) == Status::Measured;
        let works = match self.table.failures(pair.theirs()) {
            None => is_measured(pair.theirs()),
            Some(_) => self.table.mostly_works(pair.theirs()) && !is_measured(pair.ours()),
        };
        (works && !self.is_reference(pair.subject, pair.baseline)).then_some(ours)
    }

    /// What failed is a fail whatever the other repetitions say, and beside a baseline that failed nothing passes.
    fn decide(&self, pair: Pair<'_>, excuse: Option<String>, verdict: Option<Verdict>) -> Decided {
        let is_speed = Self::metrics(pair.load, pair.point)[0] == pair.metric;
        // No bound of the disk or the load makes anybody fail.
        if let Some(failed) = self.fails(pair).filter(|_| is_speed) {
            return (Ok(Verdict::Fail), Some(failed));
        }
        if let Some(why) = excuse {
            return (Err(why), None);
        }
        let keys = [pair.ours(), pair.theirs()];
        let decided = verdict.map(|verdict| {
            let short = keys.map(|key| self.table.shortfall(key));
            bound::left(verdict, pair.metric, short, self.bound(pair))
        });
        match (keys.into_iter().find_map(|key| self.table.failures(key)).filter(|_| is_speed), decided) {
            (Some(failed), Some((Ok(Verdict::Fail), _))) => (Ok(Verdict::Fail), Some(failed)),
            (Some(failed), _) => (Ok(Verdict::CantTell { more_pairs: None }), Some(failed)),
            (None, Some(decided)) => decided,
            // Who does not tell it passes no better for that than who tells it now and then.
            (None, None) if self.is_untold(pair) => {
                (Ok(Verdict::CantTell { more_pairs: None }), Some(format!("{} does not tell it", pair.subject)))
            }
            (None, None) => (Err("no repetition has both".into()), None),
        }
    }

    /// Whether the subject was measured, and the baseline alone has the figure.
    fn is_untold(&self, pair: Pair<'_>) -> bool {
        let [is_ours, is_theirs] = [pair.ours(), pair.theirs()].map(|key| self.summary(key, pair.metric).is_some());
        is_theirs && !is_ours && self.table.status(pair.ours()) == Status::Measured
    }

    /// Of a plan that asks which option to choose a loss is no fail; what crashes always is.
    fn word_for_fail(&self, pair: Pair<'_>) -> &'static str {
        match self.run.plan.asks {
            Asks::Which if bound::is_cost(pair.metric) => "more CPU",
            Asks::Which if self.table.failures(pair.ours()).is_none() => "slower",
            Asks::Which | Asks::Whether => "fail",
        }
    }

    fn bound(&self, pair: Pair<'_>) -> Bound {
        Bound::of(pair.metric, self.table.limit(pair.ours()), self.table.limit(pair.theirs()))
    }

    /// Whether `one` is fio on the host, for reference, and `other` is not. Where both are they are what is compared, as in
    /// runs that were imported.
    fn is_reference(&self, one: &str, other: &str) -> bool {
        let [one, other] = [one, other].map(|name| self.stack(name) == Some(Stack::Host));
        one && !other
    }

    /// Why a comparison decides nothing, whatever its figures are.
    fn why_not(&self, pair: Pair<'_>) -> Option<String> {
        let keys = [pair.ours(), pair.theirs()];
        for key in keys {
            match self.table.status(key) {
                Status::Measured | Status::Failed(..) => {}
                Status::Impossible(reason) => return Some(format!("{}: {reason}", key.subject)),
                Status::Missing => return Some(format!("{} was not measured", key.subject)),
            }
        }
        if keys.iter().any(|key| self.table.is_functional_only(*key)) {
            return Some("functional only: emulated".into());
        }
        if self.is_reference(pair.subject, pair.baseline) || self.is_reference(pair.baseline, pair.subject) {
            return Some("the reference".into());
        }
        let offered = keys.map(|key| self.table.offered(key));
        if let [Some(ours), Some(theirs)] = offered
            && !is_one_rate([ours, theirs])
        {
            return Some("their rates differ".into());
        }
        match self.bound(pair) {
            Bound::Both(why) => Some(why),
            Bound::None | Bound::Baseline(_) => None,
        }
    }
}
