//! "Which option should I choose?"

use std::collections::BTreeMap;

use serde::Serialize;

use super::chart::{anchor, runs_of};
use super::judge::{is_one_rate, sample};
use super::{Analysis, CellKey, Status, bound, difference};
use crate::plan::{Form, Load, Metric, Stack};
use crate::results::{Bottleneck, place};
use crate::statistics::{self, ENOUGH, median};

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
    /// The rate that the load asked for, where it was reached: how many requests there were is then the load's doing.
    pub rate: Option<f64>,
    /// Mean latency, in microseconds.
    pub latency: f64,
    /// Latency of one request in a hundred, in microseconds.
    pub p99: Option<f64>,
    /// Latency of one request in a thousand, in microseconds.
    pub p999: Option<f64>,
    /// CPUs kept busy by all but the load.
    pub cpus: f64,
    /// CPU time per request, in microseconds.
    pub cpu_per_io: f64,
    /// Whether it is known to be better than each other point of the workload in latency, p99, CPUs or IOPS.
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

/// By load, point, metric and both options.
type RelationKey = (String, u32, Metric, [String; 2]);

/// What two options are to each other.
pub(super) type Relations = BTreeMap<RelationKey, statistics::Relation>;

/// The options of a load, from the best on, and what is known of the others beside that.
struct Ranking<'a> {
    leader: &'a str,
    best: f64,
    alike: Vec<String>,
    unknown: Vec<String>,
    /// Better than the leader, where each is worse than somebody.
    better: Vec<String>,
    worse: Vec<String>,
    /// The leader and those that are alike.
    equals: Vec<&'a str>,
    /// Who is better than the leader in p99, where somebody is.
    better_tail: Option<&'a str>,
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

/// Two options of which it is known whose tail is better.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tails {
    /// Under which load.
    pub load: String,
    /// At which point of it.
    pub point: u32,
    /// Whose p99 is better.
    pub better: String,
    /// Whose is worse.
    pub worse: String,
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

/// What is asked of a disk by a load, without how many at once, and what else makes rates that nobody can choose between. Of a
/// job file nobody knows.
fn workload(load: &Load, stack: Option<Stack>) -> String {
    let mix = if load.rw.ends_with("rw") { load.rwmixread.to_string() } else { String::new() };
    let mut workload = match load.keys.jobfile {
        Some(_) => load.name.clone(),
        None => format!("{}{mix} {}", load.rw, load.bs),
    };
    if load.disks > 1 {
        workload += &format!(", {} disks", load.disks);
    }
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

/// How many requests a load has in flight. Of a job file nobody knows.
fn in_flight(load: &Load) -> Option<u32> {
    load.keys.jobfile.is_none().then(|| load.in_flight())
}

impl Analysis<'_> {
    /// Those that one can choose, and of which speed means something: the host is what they are measured against.
    fn options(&self) -> Vec<&str> {
        self.subjects.iter().copied().filter(|name| self.stack(name) != Some(Stack::Host)).collect()
    }

    /// All points that a reader can choose, with the Pareto front of each workload. Whoever failed anywhere has none.
    pub fn operating_points(&self) -> Vec<OperatingPoint> {
        let options = self.options();
        let fine: Vec<&str> = options.into_iter().filter(|option| self.failure(option).is_none()).collect();
        let usable = |key: &CellKey<'_>| fine.contains(&key.subject) && !self.table.is_functional_only(*key);
        let (keys, mut points): (Vec<CellKey<'_>>, Vec<OperatingPoint>) =
            self.table.keys().filter(usable).filter_map(|key| Some((key, self.operating_point(key)?))).unzip();
        for index in 0..points.len() {
            let rivals = (0..points.len()).filter(|other| *other != index);
            let mut rivals = rivals.filter(|other| points[*other].workload == points[index].workload);
            points[index].on_front = rivals.all(|other| self.is_better_in_one(keys[index], keys[other]));
        }
        points
    }

    /// Whether `one` is known to have less latency, a better p99, more IOPS or fewer CPUs than `other`.
    fn is_better_in_one(&self, one: CellKey<'_>, other: CellKey<'_>) -> bool {
        // At one load they were measured in pairs; of two loads there are ranges, which take values enough to be apart by
        // more than chance.
        let paired = |metric| {
            let load = self.loads.iter().find(|load| load.name == one.load)?;
            let is_pair =
                (one.load, one.point) == (other.load, other.point) && looked_at(load, one.point).contains(&metric);
            is_pair.then(|| self.relation(load, one.point, one.subject, other.subject, metric) == Relation::Better)
        };
        let apart = |metric: Metric| {
            let (Some(ours), Some(theirs)) = (self.summary(one, metric), self.summary(other, metric)) else {
                return false;
            };
            let are_enough = ours.count.min(theirs.count) >= ENOUGH;
            are_enough && if metric.more_is_better() { ours.low > theirs.high } else { ours.high < theirs.low }
        };
        let metrics = [Metric::Latency, Metric::LatencyP99, Metric::Iops, Metric::Cpus];
        metrics.into_iter().any(|metric| paired(metric).unwrap_or_else(|| apart(metric)))
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
            rate: self.reached_rate(key),
            latency: median(Metric::Latency)?,
            p99: median(Metric::LatencyP99),
            p999: median(Metric::LatencyP999),
            cpus: median(Metric::Cpus)?,
            cpu_per_io: median(Metric::CpuPerIo)?,
            on_front: false,
            limit: self.table.limit(key).map(|limit| match limit {
                Bottleneck::Load(_) => "load-bound".into(),
                Bottleneck::Device(_) => "device-bound".into(),
            }),
        })
    }

    /// The rate that an open loop asked for, where it was reached. Of all that were asked for the same but for fio's rounding
    /// it is one number.
    fn reached_rate(&self, key: CellKey<'_>) -> Option<f64> {
        let own = self.table.offered(key).filter(|_| self.table.shortfall(key).is_none())?;
        let mut rates = self.subjects.iter().filter_map(|subject| self.table.offered(CellKey { subject, ..key }));
        Some(rates.find(|rate| is_one_rate([own, *rate])).unwrap_or(own))
    }

    /// Every relation that advice may rest on: of all pairs of options, under every load and at every point, in all that
    /// is looked at. They are one family. Of a guest without KVM nothing is known.
    fn all_relations(&self) -> &Relations {
        self.relations.get_or_init(|| {
            let options = self.options();
            let (mut names, mut samples) = (Vec::new(), Vec::new());
            for load in self.loads.iter().copied() {
                for point in 0..=load.points() {
                    let tells = |name: &str| {
                        let key = CellKey { load: &load.name, subject: name, point };
                        load.is_put_on(name) && !self.table.is_functional_only(key)
                    };
                    let on: Vec<&str> = options.iter().copied().filter(|option| tells(option)).collect();
                    for (index, one) in on.iter().enumerate() {
                        for other in &on[index + 1..] {
                            let reached = self.reached(load, point, [one, other]);
                            for metric in looked_at(load, point).iter().copied().chain(reached) {
                                let key = |subject| CellKey { load: &load.name, subject, point };
                                let logs = self.table.log_ratios(key(one), key(other), metric);
                                let Some(sample) = sample(&logs, u32::MAX) else { continue };
                                let pair = [*one, *other];
                                names.push((load.name.clone(), point, metric, pair.map(str::to_owned)));
                                samples.push((metric.name(), sample, self.floor(u32::MAX, load, metric, pair)));
                            }
                        }
                    }
                }
            }
            let found = statistics::relations(&samples, self.run.plan.threshold);
            let left = |((load, point, metric, pair), found): (RelationKey, statistics::Relation)| {
                let is_bound = |subject: &String| {
                    let limit = self.table.limit(CellKey { load: &load, subject, point });
                    !bound::is_cost(metric) && matches!(limit, Some(Bottleneck::Load(_)))
                };
                let left = bound::leaves_of_relation(found, pair.each_ref().map(is_bound));
                ((load, point, metric, pair), left)
            };
            names.into_iter().zip(found).map(left).collect()
        })
    }

    /// How `one` compares with `other`.
    fn relation(&self, load: &Load, point: u32, one: &str, other: &str, metric: Metric) -> Relation {
        use statistics::Relation as Found;
        let of =
            |pair: [&str; 2]| self.all_relations().get(&(load.name.clone(), point, metric, pair.map(str::to_owned)));
        let (found, more) = match (of([one, other]), of([other, one])) {
            (Some(found), _) => (*found, Found::More),
            (None, Some(found)) => (*found, Found::Less),
            (None, None) => return Relation::Unknown,
        };
        match found {
            Found::Alike => Relation::Alike,
            Found::Unknown => Relation::Unknown,
            Found::More | Found::Less if (found == more) == metric.more_is_better() => Relation::Better,
            Found::More | Found::Less => Relation::Worse,
        }
    }

    /// Where an option failed, if it did: then it is no advice.
    fn failure(&self, option: &str) -> Option<String> {
        let keys = self.table.keys().filter(|key| key.subject == option);
        let mut failed = keys.filter_map(|key| Some(format!("under {}: {}", key.load, self.table.failures(key)?)));
        failed.next()
    }

    /// What to choose, aim by aim.
    pub fn advice(&self) -> Vec<Advice> {
        let loads = self.loads.iter().filter(|load| load.keys.application.is_none() && load.keys.rate_iops.is_none());
        let (known, own): (Vec<&Load>, Vec<&Load>) = loads.partition(|load| in_flight(load).is_some());
        let (single, deep): (Vec<&Load>, Vec<&Load>) = known.into_iter().partition(|load| in_flight(load) == Some(1));
        let aims = [
            ("Lowest latency, one request at a time", Metric::Latency, &single),
            ("Most IOPS, many at a time", Metric::Iops, &deep),
            ("Most IOPS", Metric::Iops, &own),
            ("Least CPU per request, one at a time", Metric::CpuPerIo, &single),
            ("Least CPU per request, many at a time", Metric::CpuPerIo, &deep),
            ("Least CPU per request", Metric::CpuPerIo, &own),
        ];
        let mut all: Vec<Advice> = aims
            .iter()
            .flat_map(|(aim, metric, loads)| loads.iter().filter_map(|load| self.best(aim, *metric, load)))
            .collect();
        all.extend(
            self.loads.iter().filter(|load| load.keys.curve.is_some()).filter_map(|load| self.as_load_rises(load)),
        );
        all.extend(self.applications());
        all.extend(self.failed());
        all.extend(self.dominated());
        all
    }

    fn applications(&self) -> Vec<Advice> {
        let loads = self.loads.iter().filter(|load| load.keys.application.is_some());
        let advice = loads.filter_map(|load| {
            let metric = Self::metrics(load, 0)[0];
            self.best(&format!("{}: {}", load.name, metric.name()), metric, load)
        });
        advice.collect()
    }

    /// The options under a load, from the best on, but for those that failed; nothing where there is no choice.
    fn ranking(&self, load: &Load, point: u32, metric: Metric) -> Option<Ranking<'_>> {
        let key = |subject| CellKey { load: &load.name, subject, point };
        let options = self.options().into_iter();
        let usable = options.filter(|name| !self.table.is_functional_only(key(name)) && self.failure(name).is_none());
        // Who cannot keep up with a rate is no candidate at it.
        let (short, usable): (Vec<&str>, Vec<&str>) =
            usable.partition(|name| self.table.shortfall(key(name)).is_some());
        let mut ranked = self.in_order(load, point, &usable, metric);
        if ranked.is_empty() || ranked.len() + short.len() < 2 {
            return None;
        }
        let relation = |one: &str, other: &str, metric| self.relation(load, point, one, other, metric);
        let is_beaten =
            |one: &str, by: &[&str], metric| by.iter().any(|by| relation(by, one, metric) == Relation::Better);
        // The first that nobody is known to be better than; and of those that are alike the first whose tail nobody's among
        // them is known to be better than.
        let unbeaten: Vec<&str> = ranked.iter().copied().filter(|name| !is_beaten(name, &ranked, metric)).collect();
        let first = unbeaten.first().copied().unwrap_or(ranked[0]);
        let is_peer = |name: &&str| *name == first || relation(name, first, metric) == Relation::Alike;
        let peers: Vec<&str> = unbeaten.into_iter().filter(is_peer).collect();
        let leads = peers.iter().copied().find(|name| !is_beaten(name, &peers, Metric::LatencyP99));
        let leader = leads.unwrap_or(first);
        ranked.retain(|name| *name != leader);
        let others = ranked;
        // As the pairs have it that relations are of.
        let beside = |name: &str, metric| {
            let [ours, theirs] = [name, leader].map(|subject| CellKey { load: &load.name, subject, point });
            let logs = self.table.log_ratios(ours, theirs, metric);
            let of_medians = || {
                let [ours, theirs] = [ours, theirs].map(|key| self.summary(key, metric).map(|of| of.median));
                ours.zip(theirs).map_or(f64::NAN, |(ours, theirs)| ours / theirs)
            };
            difference(sample(&logs, u32::MAX).map_or_else(of_medians, |sample| sample.log_ratio.exp()))
        };
        let (mut alike, mut unknown, mut better) = (Vec::new(), Vec::new(), Vec::new());
        let mut worse: Vec<String> = short.into_iter().map(|name| format!("{name} (does not keep up)")).collect();
        for name in others.iter().copied() {
            let named = || format!("{name} ({})", beside(name, metric));
            match relation(name, leader, metric) {
                Relation::Alike if relation(name, leader, Metric::LatencyP99) == Relation::Worse => {
                    worse.push(format!("{name} (p99 {})", beside(name, Metric::LatencyP99)));
                }
                Relation::Alike => alike.push(name.to_owned()),
                Relation::Worse => worse.push(named()),
                Relation::Better => better.push(named()),
                Relation::Unknown => unknown.push(named()),
            }
        }
        let best = self.summary(key(leader), metric)?.median;
        let tail = |name: &&str| relation(name, leader, Metric::LatencyP99) == Relation::Better;
        let better_tail = others.iter().copied().find(tail);
        let is_equal = |name: &&str| *name == leader || alike.iter().any(|one| one == name);
        let equals = self.options().into_iter().filter(is_equal).collect();
        Some(Ranking { leader, best, alike, unknown, better, worse, equals, better_tail })
    }

    /// Those of some subjects that have values, from the best on by the medians of the repetitions that all of them have: a
    /// machine that changes while only some are measured more would else put these ahead, or behind.
    fn in_order<'b>(&self, load: &Load, point: u32, subjects: &[&'b str], metric: Metric) -> Vec<&'b str> {
        let logs = |subject: &'b str| {
            let logs = self.table.logs(CellKey { load: &load.name, subject, point }, metric, true);
            (!logs.is_empty()).then_some((subject, logs))
        };
        let logs: Vec<_> = subjects.iter().copied().filter_map(logs).collect();
        let is_common = |repetition: &u32| logs.iter().all(|(_, logs)| logs.contains_key(repetition));
        let has_common = logs.first().is_some_and(|(_, logs)| logs.keys().any(is_common));
        let mut ranked: Vec<(&str, f64)> = logs
            .iter()
            .map(|(name, logs)| {
                let meant = logs.iter().filter(|(repetition, _)| !has_common || is_common(repetition));
                (*name, median(meant.map(|(_, log)| *log).collect()))
            })
            .collect();
        ranked.sort_by(|a, b| if metric.more_is_better() { b.1.total_cmp(&a.1) } else { a.1.total_cmp(&b.1) });
        ranked.into_iter().map(|(name, _)| name).collect()
    }

    /// Who is best under a load, and how the others compare with that.
    fn best(&self, aim: &str, metric: Metric, load: &Load) -> Option<Advice> {
        let ranking = self.ranking(load, 0, metric)?;
        let choice = ranking.choice();
        let Ranking { leader, best, alike, unknown, better, worse, better_tail, .. } = ranking;
        let tails = [(Metric::LatencyP99, "p99"), (Metric::LatencyP999, "p99.9")];
        let tails = tails.into_iter().filter(|_| metric == Metric::Latency).filter_map(|(tail, name)| {
            Some(format!(", {name} {}", tail.say(self.summary(at(load, leader), tail)?.median)))
        });
        let mut reasons = vec![format!("{leader}: {}{}", metric.say(best), tails.collect::<String>())];
        let lists =
            [("better", better), ("no meaningful difference", alike), ("can't tell", unknown), ("worse", worse)];
        reasons.extend(
            lists
                .iter()
                .filter(|(_, names)| !names.is_empty())
                .map(|(what, names)| format!("{what}: {}", names.join(", "))),
        );
        if let Some(other) = better_tail {
            let p99 = |name| {
                self.summary(at(load, name), Metric::LatencyP99)
                    .map_or("–".into(), |of| Metric::LatencyP99.say(of.median))
            };
            reasons.push(format!("p99: {} with {leader}, {} with {other}", p99(leader), p99(other)));
        }
        if let Some(limit) = self.table.limit(at(load, leader)) {
            reasons.push(match limit {
                Bottleneck::Load(why) => format!("load-bound, so that it may be better still: {why}"),
                Bottleneck::Device(why) => format!("device-bound, so that it is the disk's figure: {why}"),
            });
        }
        Some(Advice {
            aim: format!("{aim} ({})", load.name),
            choice,
            reasons,
            evidence: self.evidence(load, metric, &[leader]),
        })
    }

    /// Whose latency is lowest along a curve: one line for each stretch with one answer.
    fn as_load_rises(&self, load: &Load) -> Option<Advice> {
        let points = load.keys.curve?.points;
        let (mut stretches, mut leaders): (Vec<(f64, String)>, Vec<&str>) = Default::default();
        for point in 1..=points {
            let offered = self
                .options()
                .into_iter()
                .find_map(|subject| self.table.offered(CellKey { load: &load.name, subject, point }));
            let (Some(rate), Some(ranking)) = (offered, self.ranking(load, point, Metric::Latency)) else { continue };
            let choice = ranking.choice();
            if !leaders.contains(&ranking.leader) {
                leaders.push(ranking.leader);
            }
            match stretches.last_mut() {
                Some(last) if last.1 == choice => last.0 = rate,
                _ => stretches.push((rate, choice)),
            }
        }
        let (_, first) = stretches.first()?.clone();
        let choice = if stretches.len() == 1 { first } else { "It depends on the rate".to_owned() };
        let of = if load.keys.application.is_some() { Metric::Transactions } else { Metric::Iops };
        let say = |(rate, choice): &(f64, String)| format!("up to {}: {choice}", of.say(*rate));
        Some(Advice {
            aim: format!("Lowest latency as load rises ({})", load.name),
            choice,
            reasons: stretches.iter().map(say).collect(),
            evidence: self.evidence(load, Metric::Iops, &leaders),
        })
    }

    /// Who failed, and so is no answer to anything.
    fn failed(&self) -> impl Iterator<Item = Advice> {
        self.options().into_iter().filter_map(|option| {
            Some(Advice {
                aim: format!("Leave out {option}"),
                choice: "It failed".into(),
                reasons: vec![self.failure(option)?],
                evidence: vec![("what went wrong".into(), "wrong".into())],
            })
        })
    }

    fn evidence(&self, load: &Load, metric: Metric, leaders: &[&str]) -> Vec<(String, String)> {
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
        links.extend(leaders.iter().map(|name| (format!("runs of {name}"), runs_of(&load.name, name))));
        links
    }

    /// Who can be left out: somebody else was better in something and, for all that is known, worse in nothing.
    fn dominated(&self) -> Vec<Advice> {
        let options = self.options();
        let everywhere = |name: &&str| {
            if self.failure(name).is_some() {
                return false;
            }
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

    /// In what `winner` is better, if all that is not better is alike, and no tail is known to be worse.
    fn beats(&self, winner: &str, loser: &str) -> Option<Vec<String>> {
        let mut better = Vec::new();
        for load in self.loads_of(loser) {
            for point in 0..=load.points() {
                let place = place(&load.name, point);
                let is_short = |subject| self.table.shortfall(CellKey { load: &load.name, subject, point }).is_some();
                // Whoever does not reach a rate has less to wait for, and its latency says nothing; where neither does, what
                // each reached of it does.
                let speed = match (is_short(winner), is_short(loser)) {
                    (false, false) => true,
                    (true, false) => return None,
                    (false, true) => {
                        better.push(format!("the rate that it reaches under {place}"));
                        false
                    }
                    (true, true) => false,
                };
                let metrics = looked_at(load, point).iter().copied().filter(|metric| speed || bound::is_cost(*metric));
                let reached = self.reached(load, point, [winner, loser]).filter(|_| is_short(winner));
                for metric in metrics.chain(reached) {
                    match self.relation(load, point, winner, loser, metric) {
                        Relation::Better => better.push(format!("{} under {place}", metric.name())),
                        Relation::Alike => {}
                        Relation::Unknown if metric == Metric::LatencyP99 => {}
                        Relation::Worse | Relation::Unknown => return None,
                    }
                }
            }
        }
        (winner != loser && !better.is_empty()).then_some(better)
    }

    /// Pairs of options under a load of which it is known whether they are alike in speed: for who reads two of them side
    /// by side. Who does not reach the load's rate is not as fast as its latency is low, and is in none of them.
    pub fn relations(&self) -> Vec<Related> {
        let options = self.options();
        let mut all = Vec::new();
        for load in &self.loads {
            let speed = Self::metrics(load, 0)[0];
            for (index, one) in options.iter().enumerate() {
                for other in &options[index + 1..] {
                    let relation = self.relation(load, 0, one, other, speed);
                    let is_short = |subject: &&str| self.table.shortfall(at(load, subject)).is_some();
                    if relation != Relation::Unknown && ![one, other].into_iter().any(is_short) {
                        let options = [*one, *other].map(str::to_owned);
                        all.push(Related { load: load.name.clone(), options, alike: relation == Relation::Alike });
                    }
                }
            }
        }
        all
    }

    /// Pairs of options at a point of which it is known whose p99 is better.
    pub fn tails(&self) -> Vec<Tails> {
        use statistics::Relation as Found;
        let known = self.all_relations().iter().filter(|((_, _, metric, _), _)| *metric == Metric::LatencyP99);
        let tails = known.filter_map(|((load, point, _, [one, other]), found)| {
            let (better, worse) = match found {
                Found::Less => (one, other),
                Found::More => (other, one),
                Found::Alike | Found::Unknown => return None,
            };
            Some(Tails { load: load.clone(), point: *point, better: better.clone(), worse: worse.clone() })
        });
        tails.collect()
    }
}

impl Ranking<'_> {
    /// Whom to choose.
    fn choice(&self) -> String {
        let Self { leader, alike, unknown, better, worse, better_tail, .. } = self;
        match (alike.is_empty(), unknown.is_empty() && better.is_empty(), worse.is_empty()) {
            _ if better_tail.is_some() => {
                format!("A trade-off: {leader}, or {} for p99", better_tail.unwrap_or_default())
            }
            (_, true, true) => "No meaningful difference".to_owned(),
            (true, true, _) => (*leader).to_owned(),
            // In the plan's order: which of them was ahead is chance.
            (false, true, _) => self
                .equals
                .split_first()
                .map_or(String::new(), |(first, others)| format!("{first}, or {}", others.join(", "))),
            (_, false, _) => format!("{PERHAPS}{leader}"),
        }
    }
}

/// In what options are compared under a load: in its speed, in its tail, and in what a request costs.
fn looked_at(load: &Load, point: u32) -> &'static [Metric] {
    match *Analysis::metrics(load, point) {
        [Metric::Transactions, ..] => &[Metric::Transactions, Metric::LatencyP99, Metric::CpuPerIo],
        [Metric::Latency, ..] => &[Metric::Latency, Metric::LatencyP99, Metric::CpuPerIo],
        [Metric::Iops, ..] => &[Metric::Iops, Metric::Latency, Metric::LatencyP99, Metric::CpuPerIo],
        _ => Analysis::metrics(load, point),
    }
}
