//! The report's tables, for the page and the text alike.

use super::Raw;
use crate::analysis::chart::{Figure, anchor, runs_of};
use crate::analysis::ledger::PARTS;
use crate::analysis::profile::Profiles;
use crate::analysis::{Analysis, CellKey, Judged, difference, differences, figure};
use crate::plan::{Asks, Form, Metric};
use crate::results::{Cell, Outcome, place};
use crate::runner::CALL_GRAPH;
use crate::statistics::{Estimate, Verdict};

/// A table.
#[derive(Debug, Default)]
pub struct Grid {
    /// Headings; those that begin with `#` are over numbers.
    pub columns: Vec<String>,
    /// Rows.
    pub rows: Vec<Row>,
}

/// A row.
#[derive(Debug, Default)]
pub struct Row {
    /// In links.
    pub anchor: Option<String>,
    /// A word for how it looks: `pass`, `fail`, `cant-tell`, `undecided`.
    pub kind: &'static str,
    /// Its texts.
    pub cells: Vec<String>,
    /// Where they lead to, on the page: mostly the runs that the row is made of.
    pub links: Vec<Link>,
}

/// Where a cell of a table leads to.
#[derive(Debug)]
pub struct Link {
    /// Which of the row's.
    pub column: usize,
    /// Behind the cell's text; without it the text itself leads there.
    pub text: Option<String>,
    /// An anchor of the page, or a file beside it.
    pub to: String,
}

impl Link {
    /// To the runs of a subject under a load, if it has any.
    pub fn runs(analysis: &Analysis<'_>, column: usize, load: &str, subject: &str) -> Vec<Self> {
        let has_some = analysis.table.keys().any(|key| (key.load, key.subject) == (load, subject));
        let link = has_some.then(|| Self { column, text: None, to: format!("#{}", runs_of(load, subject)) });
        link.into_iter().collect()
    }
}

impl Grid {
    pub fn new(columns: &[&str]) -> Self {
        Self { columns: columns.iter().map(|name| (*name).to_owned()).collect(), rows: Vec::new() }
    }

    pub fn push(&mut self, cells: Vec<String>) {
        self.rows.push(Row { cells, ..Row::default() });
    }
}

/// `−3.1 % [−5.0 %, −1.2 %]`.
pub fn interval(estimate: &Estimate) -> String {
    match estimate.pairs {
        1 => format!("{} (one pair)", difference(estimate.ratio)),
        _ => differences([estimate.ratio, estimate.low, estimate.high]),
    }
}

/// A verdict in words, and the kind of its row.
pub fn verdict(judged: &Judged) -> (&'static str, String) {
    let (kind, text) = match &judged.decision {
        Ok(Verdict::Pass) => ("pass", "pass".into()),
        Ok(Verdict::Fail) => ("fail", judged.fail.into()),
        Ok(Verdict::CantTell { more_pairs: None }) if judged.note.is_some() => ("cant-tell", "can't tell".into()),
        Ok(Verdict::CantTell { more_pairs: Some(more) }) => (
            "cant-tell",
            format!("can't tell; about {more} more {} would decide", if *more == 1 { "pair" } else { "pairs" }),
        ),
        Ok(Verdict::CantTell { more_pairs: None }) => {
            ("cant-tell", "can't tell; too close to the threshold for more pairs to help".into())
        }
        Err(why) => ("undecided", why.clone()),
    };
    (kind, judged.note.as_ref().map_or(text.clone(), |note| format!("{text}; {note}")))
}

impl Judged {
    /// The load, and of a curve its point.
    pub fn place(&self) -> String {
        place(&self.load, self.point)
    }

    /// The comparison in a sentence.
    pub fn sentence(&self) -> String {
        let difference = self.ratio.as_ref().map_or("–".into(), interval);
        format!("{} {difference} beside {}: {}", self.metric.name(), self.baseline, verdict(self).1)
    }
}

/// The anchor of a comparison's row: the first one of a load is what advice leads to.
fn verdict_anchor(analysis: &Analysis<'_>, index: usize) -> String {
    let judged = &analysis.judged[index];
    let is_first = index == 0 || analysis.judged[index - 1].load != judged.load;
    let more = || format!("{}--{}--{}", judged.place(), judged.subject, judged.metric.name());
    anchor("verdict", &if is_first { judged.load.clone() } else { more() })
}

/// Every comparison.
pub fn verdicts(analysis: &Analysis<'_>) -> Grid {
    let has_tails = analysis.judged.iter().any(|judged| judged.metric == Metric::Latency);
    let mut columns = vec!["Load", "Subject", "What", "#Median", "#Baseline"];
    if has_tails {
        columns.extend(["#p99 (baseline’s), µs", "#p99.9 (baseline’s), µs"]);
    }
    columns.extend(["#Difference [95 %]", "#Noise floor [95 %]", "#Pairs", "Verdict"]);
    let mut grid = Grid::new(&columns);
    for (index, judged) in analysis.judged.iter().enumerate() {
        let (kind, verdict) = verdict(judged);
        let median = |summary: &Option<crate::analysis::Summary>| {
            summary.map_or("–".into(), |summary| judged.metric.say(summary.median))
        };
        let anchor = Some(verdict_anchor(analysis, index));
        let mut cells = vec![
            judged.place(),
            judged.subject.clone(),
            judged.metric.name().into(),
            median(&judged.ours),
            median(&judged.theirs),
        ];
        if has_tails {
            // Where mean latency is what is compared, its tail stands beside it.
            let tail = |metric, subject| {
                let key = CellKey { load: &judged.load, subject, point: judged.point };
                let known = analysis.summary(key, metric).filter(|_| judged.metric == Metric::Latency);
                known.map_or("–".into(), |known| figure(known.median))
            };
            let both = |metric| match (tail(metric, &judged.subject), tail(metric, &judged.baseline)) {
                (ours, theirs) if [&ours, &theirs] == ["–"; 2] => ours,
                (ours, theirs) => format!("{ours} ({theirs})"),
            };
            cells.extend([Metric::LatencyP99, Metric::LatencyP999].map(both));
        }
        cells.extend([
            judged.ratio.as_ref().map_or("–".into(), interval),
            judged.floor.as_ref().map_or("–".into(), interval),
            judged.ratio.map_or(0, |ratio| ratio.pairs).to_string(),
            verdict,
        ]);
        let links = Link::runs(analysis, 1, &judged.load, &judged.subject);
        grid.rows.push(Row { anchor, kind, cells, links });
    }
    grid
}

/// Every cell that has ended, by load and subject, with its files: what all other tables are made of.
pub fn runs(analysis: &Analysis<'_>, raw: &Raw) -> Grid {
    let metrics = [
        Metric::Iops,
        Metric::Latency,
        Metric::LatencyP99,
        Metric::LatencyP999,
        Metric::CpuPerIo,
        Metric::IoThreadCpu,
        Metric::ServerCpu,
        Metric::HostBusy,
        Metric::Duration,
        Metric::Transactions,
    ];
    let values = |cell: &Cell| metrics.map(|metric| metric.of(cell.measured()?));
    let shown: Vec<usize> = (0..metrics.len())
        .filter(|metric| analysis.run.cells.iter().any(|cell| values(cell)[*metric].is_some()))
        .collect();
    let mut columns = ["Load", "Subject", "#Repetition"].map(str::to_owned).to_vec();
    columns.extend(shown.iter().map(|metric| format!("#{}", capital(&metrics[*metric].label()))));
    columns.push("Note".into());
    if !raw.is_empty() {
        columns.push("Files".into());
    }
    let mut grid = Grid { columns, rows: Vec::new() };
    let mut cells: Vec<&Cell> = analysis.run.cells.iter().collect();
    cells.sort_by_key(|cell| &cell.id);
    let mut last = String::new();
    for cell in cells {
        let id = &cell.id;
        let here = runs_of(&id.load, &id.subject);
        let note = match &cell.outcome {
            Outcome::Measured(measured) => match &measured.limit {
                Some(bound) => bound.to_string(),
                None if measured.unstarted > 0 => format!("{} requests never started", measured.unstarted),
                None => String::new(),
            },
            Outcome::Failed { reason, .. } => format!("failed: {reason}"),
            Outcome::Impossible { reason } => reason.clone(),
        };
        let mut texts = vec![id.place(), id.subject.clone(), (id.repetition + 1).to_string()];
        let values = values(cell);
        texts.extend(shown.iter().map(|metric| values[*metric].map_or("–".into(), figure)));
        texts.push(note);
        let anchor = (here != last).then(|| here.clone());
        let kind = if cell.failure().is_some() { "fail" } else { "" };
        last = here;
        let mut links = Vec::new();
        if !raw.is_empty() {
            links.extend(raw.of(id).map(|(kind, to)| Link { column: texts.len(), text: Some(kind.to_owned()), to }));
            texts.push(String::new());
        }
        grid.rows.push(Row { anchor, kind, cells: texts, links });
    }
    grid
}

/// What a chart shows.
pub fn chart(shown: &Figure, analysis: &Analysis<'_>) -> Grid {
    let value = format!("#{}", capital(&shown.label));
    let across = format!("#{}", shown.across);
    let mut columns = match shown.form {
        Form::Curve => vec!["Load", "Subject", &across],
        Form::Ladder => vec!["Load", "Line", &across],
        Form::Bars | Form::Table => vec!["Load", "Subject"],
    };
    columns.push(&value);
    let has_tail = shown.groups.iter().flat_map(|group| &group.marks).any(|mark| mark.tail.is_some());
    if has_tail {
        columns.extend(["#p99, µs", "#p99.9, µs"]);
    }
    columns.push("#Range");
    if !matches!(shown.form, Form::Curve) {
        columns.push("#Difference to baseline [95 %]");
    }
    columns.push("Note");
    let mut grid = Grid::new(&columns);
    for group in &shown.groups {
        for mark in &group.marks {
            let load = mark.load.as_ref().unwrap_or(&group.load);
            let mut cells = vec![load.clone(), group.line.clone().unwrap_or_else(|| mark.subject.clone())];
            if matches!(shown.form, Form::Curve | Form::Ladder) {
                cells.push(mark.x.map_or("–".into(), plain));
            }
            cells.push(mark.value.map_or("–".into(), |value| figure(value.median)));
            if has_tail {
                let tail = mark.tail.unwrap_or_default();
                cells.extend(tail.map(|value| value.map_or("–".into(), figure)));
            }
            cells
                .push(mark.value.map_or("–".into(), |value| format!("{} … {}", figure(value.low), figure(value.high))));
            if !matches!(shown.form, Form::Curve) {
                cells.push(mark.ratio.map_or("–".into(), differences));
            }
            cells.push(mark.note.clone().unwrap_or_default());
            let links = Link::runs(analysis, 1, load, &mark.subject);
            grid.rows.push(Row { cells, links, ..Row::default() });
        }
    }
    grid
}

/// A number of things, or a rate.
fn plain(value: f64) -> String {
    if value.fract() == 0.0 && value < 1000.0 { format!("{value}") } else { figure(value) }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

/// CPU time per I/O.
pub fn ledger(analysis: &Analysis<'_>) -> Grid {
    let spent = analysis.ledgers();
    let shown: Vec<usize> =
        (0..PARTS.len()).filter(|part| spent.iter().any(|one| one.parts[*part].is_some())).collect();
    let mut columns = vec!["Load".to_owned(), "Subject".to_owned()];
    columns.extend(shown.iter().map(|part| format!("#{}, µs", capital(PARTS[*part]))));
    let mut grid = Grid { columns, rows: Vec::new() };
    for one in &spent {
        let mut cells = vec![one.load.clone(), one.subject.clone()];
        cells.extend(shown.iter().map(|part| one.parts[*part].map_or("–".into(), |value| format!("{value:.2}"))));
        let links = Link::runs(analysis, 1, &one.load, &one.subject);
        grid.rows.push(Row { cells, links, ..Row::default() });
    }
    grid
}

/// How many symbols are shown of a subject under a load.
const HOTTEST: usize = 10;

/// The host's hottest symbols while each subject was measured under each load, over all repetitions, and the call graphs
/// among the run's files.
pub fn symbols(analysis: &Analysis<'_>, raw: &Raw) -> Grid {
    let names = ["Load", "Subject", "Symbol", "Run by", "#Share of samples [95 %]", "#Samples"];
    let mut grid = Grid::new(&names);
    for load in &analysis.loads {
        for subject in &analysis.subjects {
            let cells = analysis.run.cells.iter();
            let cells = cells.filter(|cell| cell.id.load == load.name && cell.id.subject == *subject);
            let profiles = Profiles::of(cells.clone());
            let graph = |cell: &Cell| {
                let file = raw.of(&cell.id).find(|(kind, _)| *kind == CALL_GRAPH)?;
                let number = place(&(cell.id.repetition + 1).to_string(), cell.id.point);
                Some(Link { column: names.len(), text: Some(number), to: file.1 })
            };
            let mut graphs: Vec<Link> = cells.filter_map(graph).collect();
            for name in profiles.hottest(HOTTEST) {
                let Some(share) = profiles.share(name) else { continue };
                let samples = if profiles.samples > 0 { figure(profiles.samples as f64) } else { "–".into() };
                let texts = [&load.name, *subject, name, &profiles.comms(name).join(", "), &share.text(), &samples];
                let mut links = Link::runs(analysis, 1, &load.name, subject);
                // Those of all the subject's symbols, at the first.
                links.append(&mut graphs);
                grid.rows.push(Row { cells: texts.map(str::to_owned).into(), links, ..Row::default() });
            }
        }
    }
    let has_graphs = |row: &Row| row.links.iter().any(|link| link.column == names.len());
    if grid.rows.iter().any(has_graphs) {
        grid.columns.push("Call graphs, by repetition".into());
        grid.rows.iter_mut().for_each(|row| row.cells.push(String::new()));
    }
    grid
}

/// What a reader must know before anything else, in a line each: cells that failed, and what the kernel said.
pub fn headlines(analysis: &Analysis<'_>) -> Vec<String> {
    let mut lines = Vec::new();
    let failed = analysis.run.cells.iter().filter(|cell| cell.failure().is_some());
    let mut subjects: Vec<&str> = failed.map(|cell| cell.id.subject.as_str()).collect();
    let cells = subjects.len();
    subjects.sort_unstable();
    subjects.dedup();
    if cells > 0 {
        lines.push(format!("{cells} cells failed, of {}.", subjects.join(", ")));
    }
    let incidents = &analysis.run.incidents;
    if let Some(first) = incidents.first() {
        let more = if incidents.len() > 1 { format!(", and {} more", incidents.len() - 1) } else { String::new() };
        lines.push(format!("{}: {}{more}.", first.source, first.text));
    }
    lines
}

/// What failed, if only once, and what this machine cannot do.
pub fn unmeasured(analysis: &Analysis<'_>) -> Grid {
    let mut grid = Grid::new(&["Load", "Subject", "What happened", "Why", "Last lines"]);
    for cell in &analysis.run.cells {
        let Outcome::Failed { reason, log } = &cell.outcome else { continue };
        let what = format!("failed in repetition {}", cell.id.repetition + 1);
        let cells = vec![cell.id.place(), cell.id.subject.clone(), what, reason.clone(), log.join("\n")];
        let links = Link::runs(analysis, 1, &cell.id.load, &cell.id.subject);
        grid.rows.push(Row { kind: "fail", cells, links, ..Row::default() });
    }
    for key in analysis.table.keys() {
        let (ended, impossible) = analysis.table.impossible(key);
        let Some(reason) = impossible.last() else { continue };
        let what = match impossible.len() {
            all if all == ended => "cannot run here".to_owned(),
            some => format!("cannot run here, in {some} of {ended} repetitions"),
        };
        let cells = vec![place(key.load, key.point), key.subject.into(), what, (*reason).into(), String::new()];
        let links = Link::runs(analysis, 1, key.load, key.subject);
        grid.rows.push(Row { kind: "undecided", cells, links, ..Row::default() });
    }
    grid
}

/// What the kernel or a server said.
pub fn incidents(analysis: &Analysis<'_>) -> Grid {
    let mut grid = Grid::new(&["#Second of the run", "Cell", "Who", "What"]);
    for incident in &analysis.run.incidents {
        let cell = incident.cell.as_ref();
        let links = cell.map_or_else(Vec::new, |id| Link::runs(analysis, 1, &id.load, &id.subject));
        let cell =
            cell.map_or("–".into(), |id| format!("{}, {}, repetition {}", id.load, id.subject, id.repetition + 1));
        let at = incident.at.saturating_sub(analysis.run.started).to_string();
        let cells = vec![at, cell, incident.source.clone(), incident.text.clone()];
        grid.rows.push(Row { cells, links, ..Row::default() });
    }
    grid
}

/// How many comparisons each subject passed, by what was compared.
pub fn summary(analysis: &Analysis<'_>) -> Grid {
    let [pass, fail] = match analysis.run.plan.asks {
        Asks::Whether => ["#Pass", "#Fail"],
        Asks::Which => ["#No worse", "#Worse"],
    };
    let mut grid = Grid::new(&["Subject", "What", pass, fail, "#Can't tell", "#Decides nothing"]);
    let mut seen: Vec<(&str, &str)> = Vec::new();
    for (index, judged) in analysis.judged.iter().enumerate() {
        let key = (judged.subject.as_str(), judged.metric.name());
        if seen.contains(&key) {
            continue;
        }
        seen.push(key);
        let alike = analysis.judged.iter().filter(|one| (one.subject.as_str(), one.metric.name()) == key);
        let kinds: Vec<&str> = alike.map(|one| verdict(one).0).collect();
        let count = |kind: &str| kinds.iter().filter(|one| **one == kind).count();
        let kind = match (count("fail"), count("cant-tell"), count("pass")) {
            (1.., _, _) => "fail",
            (_, 1.., _) => "cant-tell",
            (_, _, 1..) => "pass",
            _ => continue, // the reference
        };
        let counts = ["pass", "fail", "cant-tell", "undecided"].map(|kind| count(kind).to_string());
        let cells = [key.0.to_owned(), key.1.to_owned()].into_iter().chain(counts).collect();
        // To the first that makes the row what it is.
        let told = |one: &&Judged| (one.subject.as_str(), one.metric.name()) == key && verdict(one).0 == kind;
        let first = analysis.judged.iter().position(|one| told(&one)).unwrap_or(index);
        let links = vec![Link { column: 1, text: None, to: format!("#{}", verdict_anchor(analysis, first)) }];
        grid.rows.push(Row { kind, cells, links, ..Row::default() });
    }
    grid
}
