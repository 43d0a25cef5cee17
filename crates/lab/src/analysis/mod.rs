//! What a run says: ratios with their intervals, verdicts, who spent CPU time, and what to choose.
//!
//! All of it is computed from a [`Run`], and nothing is measured here.
//!
//! | module | holds |
//! |---|---|
//! | [`table`] | the cells by load, subject and point |
//! | `metric` | names, units, and which way is better |
//! | [`chart`] | what the charts of the plan show |
//! | [`ledger`] | CPU time per I/O, by who spent it |
//! | [`choice`] | "which option should I choose?" |

pub mod chart;
pub mod choice;
pub mod ledger;
mod metric;
pub mod table;

use serde::Serialize;

use crate::plan::{Application, Load, Metric, Stack};
use crate::results::{Bottleneck, Run};
use crate::runner::AGAIN;
use crate::statistics::{self, Estimate, Family, Verdict, deviation, median};

pub use metric::{difference, differences, figure};
pub use table::{CellKey, Status, Table, counterpart};

/// A run, understood.
#[derive(Debug)]
pub struct Analysis<'a> {
    /// What it is of.
    pub run: &'a Run,
    /// Its cells.
    pub table: Table<'a>,
    /// Its loads, in the plan's order, of which some cell has ended.
    pub loads: Vec<&'a Load>,
    /// Its subjects' names, in the plan's order.
    pub subjects: Vec<&'a str>,
    /// Each comparison with a baseline, and what it decides.
    pub judged: Vec<Judged>,
}

/// Some values, and what they scatter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// How many.
    pub count: usize,
    /// Their median.
    pub median: f64,
    /// The least.
    pub low: f64,
    /// The most.
    pub high: f64,
}

/// A comparison with the baseline.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// Under which load.
    pub load: String,
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
}

impl Summary {
    /// Of some values, if there are any.
    pub fn of(values: &[f64]) -> Option<Self> {
        let low = values.iter().copied().reduce(f64::min)?;
        let high = values.iter().copied().reduce(f64::max)?;
        Some(Self { count: values.len(), median: median(values.to_vec()), low, high })
    }
}

impl<'a> Analysis<'a> {
    /// Understands a run.
    pub fn new(run: &'a Run) -> Self {
        let table = Table::new(run);
        let seen = |name: &str| table.keys().any(|key| key.load == name);
        let loads = run.plan.loads.iter().filter(|load| seen(&load.name)).collect();
        let named = run.plan.subjects.iter().map(|subject| subject.name.as_str());
        let mut subjects: Vec<&str> = named.filter(|name| table.keys().any(|key| key.subject == *name)).collect();
        if subjects.len() == 1 {
            // The baseline beside itself is then what the run is about.
            subjects.extend(table.keys().map(|key| key.subject).find(|name| name.ends_with(AGAIN)));
        }
        let mut new = Self { run, table, loads, subjects, judged: Vec::new() };
        new.judged = new.judge();
        new
    }

    /// A metric of the cells with a key.
    pub fn summary(&self, key: CellKey<'_>, metric: Metric) -> Option<Summary> {
        Summary::of(&self.table.values(key, metric))
    }

    /// The ratios of a load's baseline to itself.
    fn beside_itself(&self, load: &Load, metric: Metric) -> Vec<f64> {
        let baseline = self.run.plan.baseline_under(load);
        let again = format!("{baseline}{AGAIN}");
        let key = |subject| CellKey { load: &load.name, subject, point: 0 };
        self.table.ratios(key(&again), key(baseline), metric)
    }

    /// How much pairs of the baseline and itself deviate in a metric, typically over the loads; 0 where nobody looked.
    pub fn noise(&self, metric: Metric) -> f64 {
        let deviations = self.loads.iter().map(|load| deviation(&self.beside_itself(load, metric)));
        let known: Vec<f64> = deviations.filter(|deviation| *deviation > 0.0).collect();
        if known.is_empty() { 0.0 } else { median(known) }
    }

    /// What is compared under a load: how fast it is, and what a request costs, where there are requests.
    fn metrics(load: &Load) -> &'static [Metric] {
        match load.keys.application {
            Some(Application::Pgbench) => &[Metric::Transactions, Metric::CpuPerIo],
            Some(Application::Rsync) => &[Metric::Duration],
            // An open loop gets what it asks for; how long that takes is the question.
            None if load.keys.rate_iops.is_some() => &[Metric::Latency, Metric::CpuPerIo],
            None => &[Metric::Iops, Metric::CpuPerIo],
        }
    }

    fn judge(&self) -> Vec<Judged> {
        let pairs = self.loads.iter().copied().flat_map(|load| {
            let on = self.subjects.iter().filter(|subject| load.is_put_on(subject) || subject.ends_with(AGAIN));
            let compared = on.filter_map(|subject| Some((*subject, counterpart(&self.run.plan, load, subject)?)));
            compared.map(move |(subject, baseline)| (load, subject, baseline))
        });
        let compared: Vec<_> =
            pairs.flat_map(|pair| Self::metrics(pair.0).iter().map(move |metric| (pair, *metric))).collect();
        let comparable = |((load, subject, baseline), metric): &((&Load, &str, &str), Metric)| {
            let key = |subject| CellKey { load: &load.name, subject, point: 0 };
            !self.table.ratios(key(subject), key(baseline), *metric).is_empty()
        };
        let comparisons = compared.iter().filter(|one| comparable(one)).count();
        compared.into_iter().map(|(pair, metric)| self.judge_one(pair, metric, comparisons)).collect()
    }

    fn judge_one(&self, (load, subject, baseline): (&Load, &str, &str), metric: Metric, comparisons: usize) -> Judged {
        let key = |subject| CellKey { load: &load.name, subject, point: 0 };
        let family = Family { comparisons, noise: self.noise(metric) };
        let floor = self.beside_itself(load, metric);
        let ratio = Estimate::of_pairs(&self.table.ratios(key(subject), key(baseline), metric), family);
        let limit = statistics::Limit::for_loss(self.run.plan.threshold, metric.more_is_better());
        let decision = match (self.why_not(load, subject, baseline), ratio) {
            (Some(reason), _) => Err(reason),
            (None, Some(ratio)) => Ok(ratio.judge(limit)),
            (None, None) => Err("no repetition has both".into()),
        };
        Judged {
            load: load.name.clone(),
            subject: subject.into(),
            baseline: baseline.into(),
            metric,
            ours: self.summary(key(subject), metric),
            theirs: self.summary(key(baseline), metric),
            ratio,
            floor: Estimate::of_pairs(&floor, Family::alone()),
            decision,
        }
    }

    /// Why a comparison decides nothing, whatever its figures are.
    fn why_not(&self, load: &Load, subject: &str, baseline: &str) -> Option<String> {
        let keys = [subject, baseline].map(|subject| CellKey { load: &load.name, subject, point: 0 });
        for key in keys {
            match self.table.status(key) {
                Status::Measured => {}
                Status::Failed(reason, _) => return Some(format!("{} failed: {reason}", key.subject)),
                Status::Impossible(reason) => return Some(format!("{}: {reason}", key.subject)),
                Status::Missing => return Some(format!("{} was not measured", key.subject)),
            }
        }
        if keys.iter().any(|key| self.table.is_functional_only(*key)) {
            return Some("functional only: emulated".into());
        }
        let is_host = |name: &str| self.stack(name) == Some(Stack::Host);
        if is_host(subject) || is_host(baseline) {
            return Some("the reference".into());
        }
        let limits = keys.map(|key| self.table.limit(key));
        match (limits[0], limits[1]) {
            (Some(Bottleneck::Load(why)), _) | (_, Some(Bottleneck::Load(why))) => Some(format!("load-bound: {why}")),
            (Some(Bottleneck::Device(why)), Some(Bottleneck::Device(_))) => Some(format!("device-bound: {why}")),
            _ => None,
        }
    }

    /// A subject's stack.
    pub fn stack(&self, name: &str) -> Option<Stack> {
        self.run.plan.subjects.iter().find(|subject| subject.name == name).map(|subject| subject.stack)
    }

    /// Places of closed loops that ended without a measurement, and what became of them.
    pub fn unmeasured(&self) -> Vec<(CellKey<'a>, Status<'a>)> {
        let statuses = self.table.keys().map(|key| (key, self.table.status(key)));
        statuses.filter(|(_, status)| *status != Status::Measured).collect()
    }
}
