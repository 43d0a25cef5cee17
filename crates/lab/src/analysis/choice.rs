//! "Which option should I choose?"

use serde::Serialize;

use super::chart::anchor;
use super::{Analysis, CellKey, Status, difference};
use crate::plan::{Form, Load, Metric, Stack};
use crate::results::Bottleneck;
use crate::statistics::{Estimate, Family};

/// How a choice begins that others may equal.
pub const PERHAPS: &str = "Perhaps ";

/// What a subject did under a load: a point that a reader can choose.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperatingPoint {
    /// What is asked of it, however many at once: `randread 4k`.
    pub workload: String,
    /// Under which load.
    pub load: String,
    /// The load's point on its curve.
    pub point: u32,
    /// Who.
    pub subject: String,
    /// Requests per second.
    pub iops: f64,
    /// Least and most of them.
    pub iops_range: [f64; 2],
    /// Mean latency, in microseconds.
    pub latency: f64,
    /// Latency of one request in a hundred, in microseconds.
    pub p99: f64,
    /// CPUs kept busy by all but the load.
    pub cpus: f64,
    /// CPU time per request, in microseconds.
    pub cpu_per_io: f64,
    /// Whether no other point of the workload is as good in all three and better in one.
    pub on_front: bool,
    /// What limited it.
    pub limit: Option<String>,
}

/// How one subject compares with another under a load, in one metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relation {
    Alike,
    Better,
    Worse,
    Unknown,
}

/// Two options of which it is known whether they are alike in speed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Related {
    /// Under which load.
    pub load: String,
    /// Which two.
    pub options: [String; 2],
    /// Whether they are.
    pub alike: bool,
}

/// Advice, with what it rests on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// What for.
    pub aim: String,
    /// Whom to choose, or that it does not matter.
    pub choice: String,
    /// Why, and what of the others.
    pub reasons: Vec<String>,
    /// Where the figures are: a text, and an anchor in the report.
    pub evidence: Vec<(String, String)>,
}

/// What is asked of a disk by a load, without how many at once, and what else makes rates that nobody can choose between.
fn workload(load: &Load, stack: Option<Stack>) -> String {
    let mix = if load.rw.ends_with("rw") { load.rwmixread.to_string() } else { String::new() };
    let mut workload = format!("{}{mix} {}", load.rw, load.bs);
    if load.idle_disks > 0 {
        workload += &format!(", {} idle disks", load.idle_disks);
    }
    if stack == Some(Stack::Guest) {
        workload += ", in a guest";
    }
    workload
}

/// The closed loop of a subject.
fn at<'a>(load: &'a Load, subject: &'a str) -> CellKey<'a> {
    CellKey { load: &load.name, subject, point: 0 }
}

fn in_flight(load: &Load) -> u32 {
    u32::from(load.iodepth) * u32::from(load.numjobs) * u32::from(load.disks)
}

impl Analysis<'_> {
    /// Those that one can choose, and of which speed means something: the host is what they are measured against.
    fn options(&self) -> Vec<&str> {
        self.subjects.iter().copied().filter(|name| self.stack(name) != Some(Stack::Host)).collect()
    }

    /// All points that a reader can choose, with the Pareto front of each workload.
    pub fn operating_points(&self) -> Vec<OperatingPoint> {
        let options = self.options();
        let mut points: Vec<OperatingPoint> = self
            .table
            .keys()
            .filter(|key| options.contains(&key.subject) && !self.table.is_functional_only(*key))
            .filter_map(|key| self.operating_point(key))
            .collect();
        let fronts: Vec<bool> = points.iter().map(|one| !points.iter().any(|other| dominates(other, one))).collect();
        points.iter_mut().zip(fronts).for_each(|(point, on_front)| point.on_front = on_front);
        points
    }

    fn operating_point(&self, key: CellKey<'_>) -> Option<OperatingPoint> {
        let load = self.loads.iter().find(|load| load.name == key.load && load.keys.application.is_none())?;
        let median = |metric| self.summary(key, metric).map(|summary| summary.median);
        let iops = self.summary(key, Metric::Iops)?;
        Some(OperatingPoint {
            workload: workload(load, self.stack(key.subject)),
            load: key.load.into(),
            point: key.point,
            subject: key.subject.into(),
            iops: iops.median,
            iops_range: [iops.low, iops.high],
            latency: median(Metric::Latency)?,
            p99: median(Metric::LatencyP99)?,
            cpus: median(Metric::Cpus)?,
            cpu_per_io: median(Metric::CpuPerIo)?,
            on_front: false,
            limit: self.table.limit(key).map(|limit| match limit {
                Bottleneck::Load(_) => "load-bound".into(),
                Bottleneck::Device(_) => "device-bound".into(),
            }),
        })
    }

    /// How `one` compares with `other`; every pair of options under every load might have been asked for.
    fn relation(&self, load: &str, one: &str, other: &str, metric: Metric) -> Relation {
        let options = self.options();
        let pairs = self.loads.iter().map(|load| {
            let on = options.iter().filter(|option| load.is_put_on(option)).count();
            on * on.saturating_sub(1) / 2
        });
        let comparisons = pairs.sum();
        let key = |subject| CellKey { load, subject, point: 0 };
        let family = Family { comparisons, noise: self.noise(metric) };
        let Some(ratio) = Estimate::of_pairs(&self.table.ratios(key(one), key(other), metric), family) else {
            return Relation::Unknown;
        };
        match ratio.is_about_one(self.run.plan.threshold) {
            Some(true) => Relation::Alike,
            Some(false) if (ratio.median > 1.0) == metric.more_is_better() => Relation::Better,
            Some(false) => Relation::Worse,
            None => Relation::Unknown,
        }
    }

    /// What to choose, aim by aim.
    pub fn advice(&self) -> Vec<Advice> {
        let loads = self.loads.iter().filter(|load| load.keys.application.is_none() && load.keys.rate_iops.is_none());
        let (single, deep): (Vec<&Load>, Vec<&Load>) = loads.partition(|load| in_flight(load) == 1);
        let aims = [
            ("Lowest latency, one request at a time", Metric::Latency, &single),
            ("Most IOPS, many at a time", Metric::Iops, &deep),
            ("Least CPU per request, one at a time", Metric::CpuPerIo, &single),
            ("Least CPU per request, many at a time", Metric::CpuPerIo, &deep),
        ];
        let mut all: Vec<Advice> = aims
            .iter()
            .flat_map(|(aim, metric, loads)| loads.iter().filter_map(|load| self.best(aim, *metric, load)))
            .collect();
        all.extend(self.applications());
        all.extend(self.dominated());
        all
    }

    fn applications(&self) -> Vec<Advice> {
        let loads = self.loads.iter().filter(|load| load.keys.application.is_some());
        let advice = loads.filter_map(|load| {
            let metric = Self::metrics(load)[0];
            self.best(&format!("{}: {}", load.name, metric.name()), metric, load)
        });
        advice.collect()
    }

    /// Who is best under a load, and how the others compare with that.
    fn best(&self, aim: &str, metric: Metric, load: &Load) -> Option<Advice> {
        let key = |subject| at(load, subject);
        let usable = |name: &&str| !self.table.is_functional_only(at(load, name));
        let mut ranked: Vec<(&str, f64)> = self
            .options()
            .into_iter()
            .filter(usable)
            .filter_map(|name| Some((name, self.summary(key(name), metric)?.median)))
            .collect();
        ranked.sort_by(|a, b| if metric.more_is_better() { b.1.total_cmp(&a.1) } else { a.1.total_cmp(&b.1) });
        let (&(leader, best), others) = ranked.split_first()?;
        if others.is_empty() {
            return None;
        }
        let (mut alike, mut unknown, mut worse) = (Vec::new(), Vec::new(), Vec::new());
        for (name, value) in others {
            match self.relation(&load.name, name, leader, metric) {
                Relation::Alike => alike.push((*name).to_owned()),
                Relation::Worse => worse.push(format!("{name} ({})", difference(value / best))),
                Relation::Better | Relation::Unknown => unknown.push(format!("{name} ({})", difference(value / best))),
            }
        }
        let choice = match (alike.is_empty(), unknown.is_empty(), worse.is_empty()) {
            (_, true, true) => "No meaningful difference".to_owned(),
            (true, true, _) => leader.to_owned(),
            (false, true, _) => format!("{leader}, or {}", alike.join(", ")),
            (_, false, _) => format!("{PERHAPS}{leader}"),
        };
        let mut reasons = vec![format!("{leader}: {}", metric.say(best))];
        let lists = [("no meaningful difference", alike), ("can't tell", unknown), ("worse", worse)];
        reasons.extend(
            lists
                .iter()
                .filter(|(_, names)| !names.is_empty())
                .map(|(what, names)| format!("{what}: {}", names.join(", "))),
        );
        if let Some(limit) = self.table.limit(key(leader)) {
            reasons.push(match limit {
                Bottleneck::Load(why) => format!("load-bound, so that it may be better still: {why}"),
                Bottleneck::Device(why) => format!("device-bound, so that it is the disk's figure: {why}"),
            });
        }
        Some(Advice { aim: format!("{aim} ({})", load.name), choice, reasons, evidence: self.evidence(load, metric) })
    }

    fn evidence(&self, load: &Load, metric: Metric) -> Vec<(String, String)> {
        // Under one load, of requests of one length, both are in the same order; a curve ends at the most IOPS.
        let same = match metric {
            Metric::Iops => Metric::Throughput,
            Metric::CpuPerIo => Metric::CpuPerGigabyte,
            other => other,
        };
        let figures = self.figures().into_iter();
        let shows = figures.filter(|figure| {
            let metrics = [metric.name(), same.name()];
            (metrics.contains(&figure.metric) || (figure.form == Form::Curve && metric == Metric::Iops))
                && figure.groups.iter().any(|group| group.load == load.name)
        });
        let mut links: Vec<_> = shows.map(|figure| (format!("chart {}", figure.id), figure.anchor)).collect();
        links.push(("verdicts".into(), anchor("verdict", &load.name)));
        links
    }

    /// Who can be left out: somebody else was better in something and, for all that is known, worse in nothing.
    fn dominated(&self) -> Vec<Advice> {
        let options = self.options();
        let everywhere = |name: &&str| {
            let status = |load: &Load| self.table.status(CellKey { load: &load.name, subject: name, point: 0 });
            self.loads_of(name).all(|load| status(load) == Status::Measured)
        };
        let measured: Vec<&str> = options.into_iter().filter(everywhere).collect();
        let mut all = Vec::new();
        for loser in &measured {
            let beaten = measured.iter().find_map(|winner| Some((winner, self.beats(winner, loser)?)));
            let Some((winner, better)) = beaten else { continue };
            all.push(Advice {
                aim: format!("Leave out {loser}"),
                choice: format!("{winner} instead"),
                reasons: vec![format!("nowhere slower or dearer, and better in {}", better.join(", "))],
                evidence: vec![("verdicts".into(), "verdicts".into())],
            });
        }
        all
    }

    fn loads_of(&self, subject: &str) -> impl Iterator<Item = &Load> {
        self.loads.iter().copied().filter(move |load| load.is_put_on(subject))
    }

    /// In what `winner` is better, if all that is not better is alike.
    fn beats(&self, winner: &str, loser: &str) -> Option<Vec<String>> {
        let mut better = Vec::new();
        for load in self.loads_of(loser) {
            for &metric in Self::metrics(load) {
                match self.relation(&load.name, winner, loser, metric) {
                    Relation::Better => better.push(format!("{} under {}", metric.name(), load.name)),
                    Relation::Alike => {}
                    Relation::Worse | Relation::Unknown => return None,
                }
            }
        }
        (winner != loser && !better.is_empty()).then_some(better)
    }

    /// Pairs of options under a load of which it is known whether they are alike in speed: for who reads two of them side
    /// by side.
    pub fn relations(&self) -> Vec<Related> {
        let options = self.options();
        let mut all = Vec::new();
        for load in &self.loads {
            let speed = Self::metrics(load)[0];
            for (index, one) in options.iter().enumerate() {
                for other in &options[index + 1..] {
                    let relation = self.relation(&load.name, one, other, speed);
                    if relation != Relation::Unknown {
                        let options = [*one, *other].map(str::to_owned);
                        all.push(Related { load: load.name.clone(), options, alike: relation == Relation::Alike });
                    }
                }
            }
        }
        all
    }
}

/// Whether `one` is nowhere worse than `other`, of the same workload, and somewhere better.
fn dominates(one: &OperatingPoint, other: &OperatingPoint) -> bool {
    let ordered = [(one.latency, other.latency), (one.cpus, other.cpus), (other.iops, one.iops)];
    one.workload == other.workload
        && ordered.iter().all(|(ours, theirs)| ours <= theirs)
        && ordered.iter().any(|(ours, theirs)| ours < theirs)
}
