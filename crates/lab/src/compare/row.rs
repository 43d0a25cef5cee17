//! One cell of both runs.

use std::collections::BTreeMap;

use crate::plan::Metric;
use crate::results::{Bottleneck, Cell, Measurement, Outcome, Run};
use crate::statistics::{Estimate, Family, Limit, Verdict};

/// One of the two runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first, which is the baseline.
    A,
    /// The second.
    B,
}

/// A metric of one subject under one load, in both runs.
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
    /// The median of the first run.
    pub a: f64,
    /// The median of the second.
    pub b: f64,
    /// The second as a ratio of the first.
    pub ratio: Estimate,
    /// What it was judged by; `None` where it decides nothing, and then [`why`](Self::why) not.
    pub limit: Option<Limit>,
    /// Why it decides nothing.
    pub why: Option<&'static str>,
}

impl Row {
    /// What it says; `None` where it decides nothing.
    pub fn verdict(&self) -> Option<Verdict> {
        Some(self.ratio.judge(self.limit?))
    }
}

/// What is compared: what was asked for is no result, so open loops are judged by latency and closed ones by IOPS. CPU
/// is always normalised to one request.
const METRICS: [Metric; 6] =
    [Metric::Iops, Metric::Latency, Metric::LatencyP99, Metric::CpuPerIo, Metric::Duration, Metric::Transactions];

type Key<'a> = (&'a str, &'a str, u32);

/// All rows, and the cells that only one run has.
pub(super) fn rows(a: &Run, b: &Run, threshold: f64) -> (Vec<Row>, Vec<(String, Side)>) {
    let (ours, theirs) = (measured(a), measured(b));
    let mut samples = Vec::new();
    for (key, ours) in &ours {
        let Some(theirs) = theirs.get(key) else { continue };
        for metric in METRICS {
            let values = |of: &[&Measurement]| of.iter().filter_map(|one| value(metric, one)).collect::<Vec<_>>();
            let (a, b) = (values(ours), values(theirs));
            if !a.is_empty() && !b.is_empty() {
                samples.push((*key, metric, decides(metric, ours, theirs), a, b));
            }
        }
    }
    let comparisons = samples.iter().filter(|(_, _, decides, ..)| decides.is_ok()).count();
    let family = Family { comparisons, ..Family::alone() };
    let rows = samples.into_iter().filter_map(|((load, subject, point), metric, decides, a, b)| {
        Some(Row {
            load: load.into(),
            subject: subject.into(),
            point,
            metric,
            ratio: Estimate::of_samples(&b, &a, family)?,
            a: crate::statistics::median(a),
            b: crate::statistics::median(b),
            limit: decides.is_ok().then(|| Limit::for_loss(threshold, metric.more_is_better())),
            why: decides.err(),
        })
    });
    let rows = rows.collect();
    let only = |these: &BTreeMap<Key<'_>, _>, others: &BTreeMap<Key<'_>, _>, side| {
        let alone = these.keys().filter(|key| !others.contains_key(*key));
        alone.map(|(load, subject, _)| (format!("{subject}, {load}"), side)).collect::<Vec<_>>()
    };
    let mut unmatched = [only(&ours, &theirs, Side::A), only(&theirs, &ours, Side::B)].concat();
    unmatched.dedup();
    (rows, unmatched)
}

/// A load's duration is the plan's; a piece of work takes what it takes.
fn value(metric: Metric, measurement: &Measurement) -> Option<f64> {
    metric.of(measurement).filter(|_| metric != Metric::Duration || measurement.requests() == 0)
}

/// Whether a metric decides, and else why not.
fn decides(metric: Metric, ours: &[&Measurement], theirs: &[&Measurement]) -> Result<(), &'static str> {
    let all = || ours.iter().chain(theirs);
    let open = all().any(|measurement| measurement.offered_iops.is_some());
    if all().any(|measurement| measurement.functional_only) {
        return Err("under emulation");
    }
    match metric {
        Metric::Iops if open => Err("offered, not found"),
        Metric::Latency | Metric::LatencyP99 if !open => Err("IOPS say it"),
        // A pair of tails in a run of seconds says too little.
        Metric::LatencyP99 => Err("shown only"),
        _ if all().any(|measurement| matches!(measurement.limit, Some(Bottleneck::Load(_)))) => Err("load-bound"),
        Metric::Iops | Metric::Latency
            if all().any(|measurement| matches!(measurement.limit, Some(Bottleneck::Device(_)))) =>
        {
            Err("device-bound")
        }
        _ => Ok(()),
    }
}

/// What was measured, by cell. The baseline's second measurement is no subject of its own here.
fn measured(run: &Run) -> BTreeMap<Key<'_>, Vec<&Measurement>> {
    let mut cells: BTreeMap<Key<'_>, Vec<&Measurement>> = BTreeMap::new();
    for Cell { id, outcome, .. } in &run.cells {
        if let Outcome::Measured(measurement) = outcome {
            cells.entry((&id.load, &id.subject, id.point)).or_default().push(measurement);
        }
    }
    cells
}
