//! What the charts of a plan show.

use serde::Serialize;

use super::{Analysis, CellKey, Status, Summary};
use crate::plan::{Across, Application, Chart, Form, Load, Metric, Published};

/// A chart with its figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// In links.
    pub anchor: String,
    /// What the plan calls it.
    pub id: String,
    /// Above it.
    pub title: String,
    /// Its form.
    pub form: Form,
    /// What is shown.
    pub metric: &'static str,
    /// In what unit.
    pub unit: &'static str,
    /// Both, as an axis has them.
    pub label: String,
    /// Of what the horizontal axis is.
    pub across: &'static str,
    /// Which way is better, where one is.
    pub better: Option<&'static str>,
    /// The table published with the experiment.
    pub published: Option<Published>,
    /// Where the vertical axis of lines ends, in multiples of the least value.
    pub zoom: Option<f64>,
    /// Loads of bars and tables, lines of curves and ladders.
    pub groups: Vec<Group>,
}

/// Bars that stand together, or a line.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// The load.
    pub load: String,
    /// Of a line: what it is called.
    pub line: Option<String>,
    /// Bars, or points.
    pub marks: Vec<Mark>,
}

/// A bar, or a point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mark {
    /// Whose.
    pub subject: String,
    /// Of a point: where it stands on the horizontal axis.
    pub x: Option<f64>,
    /// Of a curve: whether it is its closed loop, and not a point of it.
    pub closed: bool,
    /// Its value; none where it was not measured.
    pub value: Option<Summary>,
    /// Where mean latency is shown: the medians of p99 and p99.9 beside it.
    pub tail: Option<[Option<f64>; 2]>,
    /// The ratio to the baseline with its interval, where the chart compares.
    pub ratio: Option<[f64; 3]>,
    /// What a reader should know: why there is no value, or what limits it.
    pub note: Option<String>,
    /// Its load, where not all of a line have one.
    pub load: Option<String>,
}

/// A name for a link: letters and digits of any script, and dashes. [`Plan::named`](crate::plan::Plan::named) sees to it that a
/// plan's are distinct.
pub fn anchor(kind: &str, name: &str) -> String {
    let plain = name.chars().map(|c| if c.is_alphanumeric() { c.to_ascii_lowercase() } else { '-' });
    format!("{kind}-{}", plain.collect::<String>())
}

/// The anchor of the runs of a subject under a load.
pub fn runs_of(load: &str, subject: &str) -> String {
    anchor("runs", &format!("{load}--{subject}"))
}

/// What is shown where a plan asks for nothing.
fn usual() -> [Chart; 3] {
    [(Metric::Latency, "Latency"), (Metric::Iops, "IOPS"), (Metric::CpuPerIo, "CPU per I/O")].map(|(metric, title)| {
        Chart {
            id: title.to_lowercase(),
            title: title.into(),
            form: Form::Bars,
            metric,
            loads: Vec::new(),
            under: None,
            subjects: Vec::new(),
            published: None,
            across: Across::Place,
            zoom: None,
        }
    })
}

impl Analysis<'_> {
    /// The plan's charts, of which some cell has ended; bars of latency, IOPS and CPU per I/O where it has none.
    pub fn figures(&self) -> Vec<Figure> {
        let (charts, usual) = (&self.run.plan.charts, usual());
        let charts = if charts.is_empty() { &usual[..] } else { charts };
        let shows_all = |chart: &Chart| chart.loads.is_empty() && chart.under.is_none();
        let has_cells = |chart: &&Chart| shows_all(chart) || self.loads.iter().any(|load| chart.shows(load));
        charts.iter().filter(has_cells).map(|one| self.chart(one)).collect()
    }

    fn chart(&self, chart: &Chart) -> Figure {
        let wanted = |name: &&str| chart.subjects.is_empty() || chart.subjects.iter().any(|one| one == name);
        let loads: Vec<&Load> = self.loads.iter().copied().filter(|load| chart.shows(load)).collect();
        let subjects: Vec<&str> = self.subjects.iter().copied().filter(wanted).collect();
        let groups = match chart.form {
            Form::Bars | Form::Table => loads.iter().map(|load| self.bars(load, &subjects, chart.metric)).collect(),
            Form::Curve => self.each(&loads, &subjects, |load, subject| self.curve(load, subject, chart.metric)),
            Form::Ladder if chart.across == Across::Disks => self.over_disks(&loads, &subjects, chart.metric),
            Form::Ladder => loads.iter().flat_map(|load| self.ladder(load, &subjects, chart)).collect(),
        };
        let transactions = loads.iter().any(|load| load.keys.application == Some(Application::Pgbench));
        Figure {
            anchor: anchor("chart", &chart.id),
            id: chart.id.clone(),
            title: chart.title.clone(),
            form: chart.form,
            metric: chart.metric.name(),
            unit: chart.metric.unit(),
            label: chart.metric.label(),
            across: match chart.form {
                Form::Ladder if chart.across == Across::Cores => "physical cores of I/O threads",
                Form::Ladder if chart.across == Across::Disks => "disks, busy and idle",
                Form::Ladder if self.is_of_threads(&subjects) => "I/O threads",
                Form::Ladder => "place",
                _ if transactions => "transactions, 1/s",
                _ => "IOPS",
            },
            better: chart.metric.better(),
            published: chart.published,
            zoom: chart.zoom,
            groups,
        }
    }

    /// Whether a ladder's places are numbers of I/O threads.
    fn is_of_threads(&self, subjects: &[&str]) -> bool {
        let mut shown = self.run.plan.subjects.iter().filter(|subject| subjects.contains(&subject.name.as_str()));
        shown.all(|subject| subject.at.is_none_or(|at| at == f64::from(subject.iothreads)))
    }

    fn each(&self, loads: &[&Load], subjects: &[&str], of: impl Fn(&Load, &str) -> Option<Group>) -> Vec<Group> {
        loads.iter().flat_map(|load| subjects.iter().filter_map(|subject| of(load, subject))).collect()
    }

    fn mark(&self, key: CellKey<'_>, metric: Metric) -> Mark {
        let judged = self.judged.iter().find(|judged| {
            (judged.metric, judged.point) == (metric, key.point)
                && (judged.load.as_str(), judged.subject.as_str()) == (key.load, key.subject)
        });
        let ratio = judged.and_then(|judged| judged.ratio).map(|ratio| [ratio.ratio, ratio.low, ratio.high]);
        let value = self.summary(key, metric);
        let cannot = || Some(format!("this stack cannot tell its {}", metric.name()));
        let limit = || self.table.limit(key).map(ToString::to_string);
        let short =
            || self.table.shortfall(key).map(|share| format!("reached {:.0} % of the rate asked for", share * 100.0));
        let note = match self.table.status(key) {
            Status::Failed(reason, _) => Some(format!("failed: {reason}")),
            Status::Impossible(reason) => Some(reason.to_owned()),
            Status::Missing => Some("not measured".into()),
            Status::Measured if value.is_none() => cannot(),
            Status::Measured if self.table.is_functional_only(key) => Some("functional only: emulated".into()),
            Status::Measured => self.table.failures(key).or_else(short).or_else(limit),
        };
        let tail = (metric == Metric::Latency)
            .then(|| [Metric::LatencyP99, Metric::LatencyP999].map(|tail| Some(self.summary(key, tail)?.median)));
        Mark { subject: key.subject.into(), x: None, closed: key.point == 0, value, tail, ratio, note, load: None }
    }

    fn bars(&self, load: &Load, subjects: &[&str], metric: Metric) -> Group {
        let on = subjects.iter().filter(|subject| load.is_put_on(subject));
        let marks = on.map(|subject| self.mark(CellKey { load: &load.name, subject, point: 0 }, metric));
        Group { load: load.name.clone(), line: None, marks: marks.collect() }
    }

    /// A line of what was measured at each point, by what was reached there.
    fn curve(&self, load: &Load, subject: &str, metric: Metric) -> Option<Group> {
        let keys = self.table.keys().filter(|key| key.load == load.name && key.subject == subject);
        let across =
            if load.keys.application == Some(Application::Pgbench) { Metric::Transactions } else { Metric::Iops };
        let point = |key: CellKey<'_>| {
            let x = self.summary(key, across)?.median;
            Some(Mark { x: Some(x), ratio: None, ..self.mark(key, metric) })
        };
        let mut marks: Vec<Mark> = keys.filter_map(point).filter(|mark| mark.value.is_some()).collect();
        marks.sort_by(|a, b| a.x.unwrap_or(0.0).total_cmp(&b.x.unwrap_or(0.0)));
        (!marks.is_empty()).then(|| Group { load: load.name.clone(), line: Some(subject.into()), marks })
    }

    /// A line of each subject over the disks that loads have.
    fn over_disks(&self, loads: &[&Load], subjects: &[&str], metric: Metric) -> Vec<Group> {
        let disks = |load: &Load| u32::from(load.disks) + u32::from(load.idle_disks);
        let mut loads = loads.to_vec();
        loads.sort_by_key(|load| disks(load));
        let mark = |load: &Load, subject: &str| Mark {
            x: Some(f64::from(disks(load))),
            load: Some(load.name.clone()),
            ..self.mark(CellKey { load: &load.name, subject, point: 0 }, metric)
        };
        let line = |subject: &&str| {
            let on: Vec<&Load> = loads.iter().copied().filter(|load| load.is_put_on(subject)).collect();
            let marks = on.iter().map(|load| mark(load, subject)).collect();
            Some(Group { load: on.first()?.name.clone(), line: Some((*subject).into()), marks })
        };
        subjects.iter().filter_map(line).collect()
    }

    fn ladder(&self, load: &Load, subjects: &[&str], chart: &Chart) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for name in subjects.iter().filter(|name| load.is_put_on(name)) {
            let Some(subject) = self.run.plan.subject(name) else { continue };
            let line = subject.line.clone().unwrap_or_else(|| subject.name.clone());
            let key = CellKey { load: &load.name, subject: name, point: 0 };
            let x = match chart.across {
                Across::Place | Across::Disks => subject.at,
                Across::Cores => self.summary(key, Metric::IoThreadCores).map(|cores| cores.median),
            };
            let mark = Mark { x, ..self.mark(key, chart.metric) };
            match groups.iter_mut().find(|group| group.line.as_ref() == Some(&line)) {
                Some(group) => group.marks.push(mark),
                None => groups.push(Group { load: load.name.clone(), line: Some(line), marks: vec![mark] }),
            }
        }
        groups
    }
}
