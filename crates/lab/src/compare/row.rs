//! One cell of both sides.

use std::collections::{BTreeMap, BTreeSet};

use crate::analysis::bound::{self, Bound, Decided, of_most};
use crate::analysis::{CellKey, Table};
use crate::plan::Metric;
use crate::results::{Cell, DISTURBS, Measurement, Outcome, Run, shortfall};
use crate::runner::AGAIN;
use crate::statistics::{self, Estimate, Limit, Look, Null, Question, Sample, Verdict, deviation, mean, median};

/// A metric of one subject under one load, on both sides.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The load.
    pub load: String,
    /// The subject.
    pub subject: String,
    /// Of a curve: its point; the closed loop's peak is 0.
    pub point: u32,
    /// What is compared.
    pub metric: Metric,
    /// The median of the first side, where it has one.
    pub a: Option<f64>,
    /// The median of the second.
    pub b: Option<f64>,
    /// The second as a ratio of the first, where both were measured.
    pub ratio: Option<Estimate>,
    /// What it decides, or why it decides nothing.
    pub decision: Result<Verdict, String>,
    /// What is to be said beside that.
    pub note: Option<String>,
}

/// What is compared: what was asked for is no result, so open loops are judged by latency and closed ones by IOPS. CPU
/// is normalised to one request; how busy the host was is beside it, as others publish that.
pub(crate) const METRICS: [Metric; 9] = [
    Metric::Iops,
    Metric::Latency,
    Metric::LatencyP99,
    Metric::LatencyP999,
    Metric::CpuPerIo,
    Metric::LoadCpu,
    Metric::Duration,
    Metric::Transactions,
    Metric::HostBusy,
];

impl Row {
    fn key(&self) -> CellKey<'_> {
        CellKey { load: &self.load, subject: &self.subject, point: self.point }
    }
}

/// What became of one key's cells in all runs of a side. The baseline's second measurements are further ones of the
/// baseline.
#[derive(Default)]
struct Side<'a> {
    /// By run and repetition.
    measured: BTreeMap<(usize, u32), Vec<&'a Measurement>>,
    failures: Vec<&'a str>,
    tried: usize,
    /// By run: the repetitions that were measured or failed.
    ended: BTreeMap<usize, BTreeSet<u32>>,
    impossible: Option<&'a str>,
}

impl Side<'_> {
    fn all(&self) -> impl Iterator<Item = &Measurement> {
        self.measured.values().flatten().copied()
    }

    fn values(&self, metric: Metric) -> Vec<f64> {
        self.all().filter_map(|one| value(metric, one)).collect()
    }

    /// The logarithms of what is independent of each other: of several runs each run's mean, of a single one its
    /// repetitions.
    fn logs(&self, metric: Metric, runs: usize) -> Vec<f64> {
        let mut logs: BTreeMap<(usize, u32), Vec<f64>> = BTreeMap::new();
        for ((run, repetition), measured) in &self.measured {
            let key = if runs > 1 { (*run, 0) } else { (*run, *repetition) };
            let values: Vec<f64> = measured.iter().filter_map(|one| value(metric, one)).map(f64::ln).collect();
            logs.entry(key).or_default().extend(mean(&values));
        }
        logs.values().filter_map(|logs| mean(logs)).collect()
    }

    /// What others used of a machine of so many processors, or a hypervisor took of it, typically, if that disturbs.
    fn disturbed(&self, processors: usize) -> Option<f64> {
        let capacity = |one: &Measurement| one.seconds.max(1e-9) * 1e9 * processors.max(1) as f64;
        let stolen = |one: &Measurement| one.cpu.stolen.map_or(0.0, |stolen| stolen as f64 / capacity(one));
        let shares = self.all().filter_map(|one| Some(one.others(processors)? + stolen(one)));
        let shares: Vec<f64> = shares.collect();
        (!shares.is_empty()).then(|| median(shares)).filter(|share| *share > DISTURBS)
    }

    /// How many measurements make one such value.
    fn measurements_each(&self, runs: usize) -> f64 {
        let units: BTreeSet<_> =
            self.measured.keys().map(|(run, repetition)| (*run, if runs > 1 { 0 } else { *repetition })).collect();
        self.all().count() as f64 / units.len().max(1) as f64
    }

    fn failed(&self) -> Option<String> {
        let reason = self.failures.last()?;
        Some(format!("failed in {} of {} repetitions: {reason}", self.failures.len(), self.tried))
    }
}

fn collect<'a>(runs: &[&'a Run]) -> BTreeMap<CellKey<'a>, Side<'a>> {
    let mut sides: BTreeMap<CellKey<'_>, Side<'_>> = BTreeMap::new();
    for (number, run) in runs.iter().enumerate() {
        for Cell { id, outcome, .. } in &run.cells {
            let subject = id.subject.strip_suffix(AGAIN).unwrap_or(&id.subject);
            let side = sides.entry(CellKey { subject, ..CellKey::of(id) }).or_default();
            side.tried += 1;
            if !matches!(outcome, Outcome::Impossible { .. }) {
                side.ended.entry(number).or_default().insert(id.repetition);
            }
            match outcome {
                Outcome::Measured(one) => side.measured.entry((number, id.repetition)).or_default().push(one),
                Outcome::Failed { reason, .. } => side.failures.push(reason),
                Outcome::Impossible { reason } => side.impossible = Some(reason),
            }
        }
    }
    sides
}

/// What was measured on the first side and is missing in part from the second: of each cell repetitions, as far as the
/// first run's plan asks for them, and metrics that decide. What is missing as a whole has a row of its own.
pub(super) fn gaps(a: &[&Run], b: &[&Run]) -> Vec<String> {
    let (first, second) = (collect(a), collect(b));
    let asked = a.first().map_or(0, |run| run.plan.repetitions as usize);
    let mut gaps = Vec::new();
    for (key, theirs) in &first {
        let Some(ours) = second.get(key).filter(|ours| !ours.measured.is_empty()) else { continue };
        let what = format!("{}, {}", key.subject, row(*key).place());
        let repetitions = |side: &Side<'_>, run| side.ended.get(&run).map_or(0, BTreeSet::len);
        let most = (0..a.len()).map(|run| repetitions(theirs, run)).max().unwrap_or(0).min(asked);
        let least = (0..b.len()).map(|run| repetitions(ours, run)).min().unwrap_or(0);
        if least < most {
            let place = if b.len() > 1 { "one of the second runs" } else { "the second run" };
            gaps.push(format!("{least} of {most} repetitions of {what} in {place}"));
        }
        let is_untold = |metric: &Metric| {
            let [is_theirs, is_ours] = [theirs, ours].map(|side| !side.values(*metric).is_empty());
            is_theirs && !is_ours && decides(*metric, theirs, ours).is_ok()
        };
        let untold = METRICS.into_iter().filter(is_untold);
        gaps.extend(untold.map(|metric| format!("no {} of {what} in the second run", metric.name())));
    }
    gaps
}

/// All rows, and the cells that only the second side has.
pub(super) fn rows(a: &[&Run], b: &[&Run], threshold: f64) -> (Vec<Row>, Vec<String>) {
    let (first, second) = (collect(a), collect(b));
    let runs = a.len().max(b.len());
    // How far two runs of the same thing lie apart nobody knows of one run each, nor how far two boots do of one boot each:
    // the limit is their margin.
    let null = if runs > 1 && !are_of_two_boots(a, b) { Null::NoLoss } else { Null::LossWithinLimit };
    let nobody = Side::default();
    let (mut rows, mut questions) = (Vec::new(), Vec::new());
    let keys: BTreeSet<CellKey<'_>> = first.keys().chain(second.keys()).copied().collect();
    for key in keys {
        let [theirs, ours] = [&first, &second].map(|sides| sides.get(&key).unwrap_or(&nobody));
        rows.extend(broken(key, theirs, ours));
        let rates_differ = rates_differ(theirs, ours);
        for metric in METRICS {
            let logs = |side: &Side<'_>| side.logs(metric, runs);
            let Some(sample) = Sample::of_groups(&logs(ours), &logs(theirs)) else { continue };
            let open = Verdict::CantTell { more_pairs: None };
            let (decision, note) = match decides(metric, theirs, ours) {
                Err(why) => (Err(why), None),
                Ok(_) if rates_differ => (Ok(open), Some("their rates differ".into())),
                // A placeholder, until the family is judged.
                Ok(bound) => bound.leaves(open),
            };
            let values = |side: &Side<'_>| Some(median(side.values(metric)));
            let question = Question {
                kind: metric.name(),
                sample,
                floor: noise(&[a, b].concat(), metric).powi(2)
                    / 2.0
                    / ours.measurements_each(runs).min(theirs.measurements_each(runs)),
                limit: Limit::for_loss(threshold, metric.more_is_better()),
                null,
                decided: None,
            };
            questions.push(Asked { row: rows.len(), question, decides: decision.is_ok() && !rates_differ });
            rows.push(Row { metric, a: values(theirs), b: values(ours), decision, note, ..row(key) });
        }
    }
    judge(&mut rows, &questions, runs, |row, verdict| {
        let sides = [&second, &first].map(|sides| sides.get(&row.key()));
        let short = sides.map(|side| shortfall(side?.all()));
        let [ours, theirs] = sides.map(|side| side.and_then(limit));
        bound::left(verdict, row.metric, short, Bound::of(row.metric, ours.as_ref(), theirs.as_ref()))
    });
    // Within a run subjects take turns, and others' work is in all of them. Between two runs it makes the difference.
    let processors = [a, b].map(|runs| runs.first().map_or(1, |run| run.host.cpu.processors()));
    for asked in &questions {
        let row = &mut rows[asked.row];
        let [first, second] = [(&first, processors[0]), (&second, processors[1])]
            .map(|(sides, processors)| sides.get(&row.key())?.disturbed(processors));
        if let Ok(verdict) = row.decision
            && let Some(note) = disturbed(verdict, [first, second], runs)
        {
            row.decision = Ok(Verdict::CantTell { more_pairs: None });
            row.note = Some(note);
        }
    }
    let new = second
        .iter()
        .filter(|(key, side)| !side.measured.is_empty() && first.get(*key).is_none_or(|one| one.measured.is_empty()));
    let mut new: Vec<String> = new.map(|(CellKey { load, subject, .. }, _)| format!("{subject}, {load}")).collect();
    new.dedup();
    (rows, new)
}

/// Why others' work leaves nothing of a verdict, by what they used of the machine in each side's runs where that disturbs.
/// A first side that they slowed down hides a loss, a second one looks as if it had one. Of one run each nobody knows by how
/// much; of several that shows in how far they lie apart, unless it was on one side alone.
fn disturbed(verdict: Verdict, [first, second]: [Option<f64>; 2], runs: usize) -> Option<String> {
    let in_first = first.map(|share| ("first", share));
    let in_second = second.map(|share| ("second", share));
    let (which, share) = match verdict {
        Verdict::Pass if runs == 1 || second.is_none() => in_first,
        Verdict::Fail if runs == 1 => in_first.or(in_second),
        Verdict::Fail if first.is_none() => in_second,
        Verdict::Pass | Verdict::Fail | Verdict::CantTell { .. } => None,
    }?;
    Some(format!(
        "others used {:.0} % of the machine in the {which} run{}",
        share * 100.0,
        if runs > 1 { "s" } else { "" }
    ))
}

/// Whether each side's runs are all of one boot, and not both of the same.
fn are_of_two_boots(a: &[&Run], b: &[&Run]) -> bool {
    let boots = |runs: &[&Run]| runs.iter().map(|run| run.host.boot_id.clone()).collect::<BTreeSet<_>>();
    let [a, b] = [boots(a), boots(b)];
    [&a, &b].iter().all(|boots| boots.len() == 1 && !boots.contains(&None)) && a != b
}

/// What is asked of a row.
#[derive(Clone, Copy)]
struct Asked {
    row: usize,
    question: Question,
    /// Whether the answer decides, or is shown alone.
    decides: bool,
}

/// Judges what decides as one family, and gives the rest an interval of its own. `decided` says what is left of a verdict.
fn judge(rows: &mut [Row], questions: &[Asked], runs: usize, decided: impl Fn(&Row, Verdict) -> Decided) {
    let judge = |family: &[Question]| match runs {
        0 | 1 => statistics::judge(family, Look::ONLY),
        _ => statistics::judge_runs(family),
    };
    let (deciding, shown): (Vec<&Asked>, Vec<&Asked>) = questions.iter().partition(|asked| asked.decides);
    let family: Vec<Question> = deciding.iter().map(|asked| asked.question).collect();
    for (asked, (estimate, verdict)) in deciding.iter().zip(judge(&family)) {
        let row = &mut rows[asked.row];
        row.ratio = Some(estimate);
        (row.decision, row.note) = decided(row, verdict);
    }
    for asked in shown {
        rows[asked.row].ratio = judge(&[asked.question]).first().map(|(estimate, _)| *estimate);
    }
}

fn row(CellKey { load, subject, point }: CellKey<'_>) -> Row {
    Row {
        load: load.into(),
        subject: subject.into(),
        point,
        metric: Metric::Iops,
        a: None,
        b: None,
        ratio: None,
        decision: Err(String::new()),
        note: None,
    }
}

/// A row that says that a cell failed on the second side, or that it is missing there and the first side has tried it.
fn broken(key: CellKey<'_>, theirs: &Side<'_>, ours: &Side<'_>) -> Option<Row> {
    let open = Verdict::CantTell { more_pairs: None };
    let (is_there, was_there) = (!ours.measured.is_empty(), !theirs.measured.is_empty());
    let (verdict, note) = match (ours.failed(), theirs.failed()) {
        (Some(failed), None) if was_there => (Verdict::Fail, failed),
        (Some(failed), None) => (open, format!("{failed}; the first run did not measure it")),
        // What worked mostly and works no more is a loss.
        (Some(failed), Some(before)) => {
            let worked = 2 * theirs.all().count() > theirs.tried;
            let verdict = if worked && !is_there { Verdict::Fail } else { open };
            (verdict, format!("{failed}; before, it {before}"))
        }
        (None, before) if (was_there || before.is_some()) && !is_there => {
            let why = ours
                .impossible
                .map_or("missing from the second run".into(), |why| format!("impossible in the second run: {why}"));
            (open, why)
        }
        (None, _) => return None,
    };
    let known = |side: &Side<'_>, metric| Some(side.values(metric)).filter(|values| !values.is_empty()).map(median);
    let metric = METRICS.into_iter().find(|metric| known(theirs, *metric).or(known(ours, *metric)).is_some());
    let metric = metric.unwrap_or(Metric::Iops);
    let (a, b) = (known(theirs, metric), known(ours, metric));
    Some(Row { metric, a, b, decision: Ok(verdict), note: Some(note), ..row(key) })
}

/// How much the logarithms of pairs of a baseline and itself deviate, typically over the loads and the runs: the noise
/// floor; 0 where nobody looked.
fn noise(runs: &[&Run], metric: Metric) -> f64 {
    let mut deviations = Vec::new();
    for run in runs {
        let table = Table::new(run);
        for load in run.plan.loads.iter() {
            let baseline = CellKey { load: &load.name, subject: run.plan.baseline_under(load), point: 0 };
            let logs = table.beside_itself(baseline, metric);
            deviations.push(deviation(&logs.into_iter().map(|(_, log)| log).collect::<Vec<_>>()));
        }
    }
    deviations.retain(|deviation| *deviation > 0.0);
    if deviations.is_empty() { 0.0 } else { median(deviations) }
}

/// A load's duration is the plan's; a piece of work takes what it takes. What the load spends is compared where it goes the
/// path by itself: fio on the host, whom nobody serves, and fio in a guest, through the guest's kernel.
fn value(metric: Metric, measurement: &Measurement) -> Option<f64> {
    let is_served = measurement.cpu.all_of_server().is_some();
    let is_guest = measurement.cpu.guest.is_some();
    let is_compared = match metric {
        Metric::Duration => measurement.requests() == 0,
        Metric::LoadCpu => is_guest || !is_served,
        Metric::HostBusy => !is_guest && !is_served,
        _ => true,
    };
    metric.of(measurement).filter(|_| is_compared)
}

/// Rates that lie apart by more than this share of the least are not one rate.
const SAME_RATE: f64 = 0.01;

/// Whether what was measured was not all at one rate: the points of a curve are shares of each run's own peak.
fn rates_differ(a: &Side<'_>, b: &Side<'_>) -> bool {
    let rates = || a.all().chain(b.all()).map(|one| one.offered_iops);
    let least = rates().flatten().fold(f64::INFINITY, f64::min);
    let most = rates().flatten().fold(0.0, f64::max);
    // Who asks for no rate has one of its own.
    most > least * (1.0 + SAME_RATE) || (most > 0.0 && rates().any(|rate| rate.is_none()))
}

/// The bound of most of a side's measurements.
fn limit(side: &Side<'_>) -> Option<crate::results::Bottleneck> {
    of_most(&side.all().map(|one| one.limit.as_ref()).collect::<Vec<_>>()).cloned()
}

/// Whether a metric decides and within which bound, and else why not.
fn decides(metric: Metric, a: &Side<'_>, b: &Side<'_>) -> Result<Bound, String> {
    let all = || a.all().chain(b.all());
    let open = all().any(|measurement| measurement.offered_iops.is_some());
    if all().any(|measurement| measurement.functional_only) {
        return Err("under emulation".into());
    }
    match metric {
        Metric::Iops | Metric::Transactions if open && [a, b].iter().all(|side| shortfall(side.all()).is_none()) => {
            Err("offered, not found".into())
        }
        Metric::Latency | Metric::LatencyP99 | Metric::LatencyP999 if !open => Err("IOPS say it".into()),
        // A pair of tails in a run of seconds says too little.
        Metric::LatencyP99 | Metric::LatencyP999 => Err("shown only".into()),
        // Who does more is busier.
        Metric::HostBusy => Err("shown only".into()),
        // By its own clock, which goes on where it waits for a processor.
        Metric::LoadCpu if all().any(|measurement| measurement.cpu.guest.is_some()) => Err("shown only".into()),
        _ => match Bound::of(metric, limit(b).as_ref(), limit(a).as_ref()) {
            Bound::Both(why) => Err(why),
            bound => Ok(bound),
        },
    }
}
