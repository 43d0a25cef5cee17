//! A run in the form in which changes of polling are argued about on a mailing list: before and after by pattern, length
//! of a request, jobs and I/O threads; an I/O thread's CPU; averages over the jobs. Text of one width, for `egret report --mail`.

use std::collections::BTreeMap;

use comfy_table::{CellAlignment, Table, presets};

use super::{machine, published, tables};
use crate::analysis::{Analysis, CellKey, Status, counterpart};
use crate::plan::{Bytes, Load, Metric, Published, Subject};
use crate::statistics::{Estimate, mean};

/// A cell after the change, beside the one before it.
struct Change<'a> {
    load: &'a Load,
    baseline: &'a str,
    iothreads: u32,
    /// IOPS, in the median.
    before: Option<f64>,
    /// The difference, or why there is none.
    iops: Result<Estimate, &'static str>,
    /// Of an I/O thread, in percent of a CPU: before and after.
    cpu: Option<[f64; 2]>,
    /// What is to be said beside that.
    note: String,
}

/// The text: the line of the plan's baseline is what was before, and each other line is what came after.
///
/// # Errors
/// The plan's subjects are on no lines, or too few; in one line.
pub fn text(analysis: &Analysis<'_>) -> Result<String, String> {
    let plan = &analysis.run.plan;
    let line_of = |name: &str| plan.subject(name).and_then(|one| one.line.as_deref());
    let before = line_of(plan.baseline());
    let mut lines: Vec<&str> = Vec::new();
    for line in plan.subjects.iter().filter_map(|subject| subject.line.as_deref()) {
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    let changes = lines.iter().map(|line| (*line, changes(analysis, line)));
    let changes: Vec<_> = changes.filter(|(_, changes)| !changes.is_empty()).collect();
    let Some(before) = before.filter(|_| !changes.is_empty()) else {
        return Err(format!(
            "a mail is of lines, beside the baseline's, and nothing that was measured in {} is on one: see 'line' in docs/lab.md",
            plan.name
        ));
    };
    let mut text = format!("{}\n{}\n{}\n", plan.title, machine::line(analysis.run), analysis.verdict());
    for component in &analysis.run.host.components {
        text += &format!("{}: {}, {}\n", component.name, component.version, component.path);
    }
    tables::headlines(analysis).into_iter().for_each(|line| text += &format!("! {line}\n"));
    for warning in &analysis.run.host.warnings {
        text += &format!("! {}: {}\n", warning.about, warning.text);
    }
    for (after, changes) in &changes {
        let before = changes.first().and_then(|one| line_of(one.baseline)).unwrap_or(before);
        text += &format!("\n{after}, with {before} before it\n\n{}\n", cells(changes));
        text += &format!("\nCPU of an I/O thread, average over all cells\n\n{}\n", cpu(changes));
        text += &format!("\nAverages over the jobs, and their range over the patterns\n\n{}\n", averages(changes));
    }
    Ok(text)
}

fn changes<'a>(analysis: &'a Analysis<'_>, line: &str) -> Vec<Change<'a>> {
    let plan = &analysis.run.plan;
    let on_line: Vec<&Subject> = plan.subjects.iter().filter(|one| one.line.as_deref() == Some(line)).collect();
    let is_fios = |load: &&&Load| load.keys.application.is_none() && load.keys.jobfile.is_none();
    let mut all = Vec::new();
    // What was left out of the run has no cell in it.
    let is_there = |one: &&&Subject| analysis.subjects.contains(&one.name.as_str());
    for load in analysis.loads.iter().filter(is_fios) {
        for subject in on_line.iter().filter(is_there).filter(|one| load.is_put_on(&one.name)) {
            let Some(before) = counterpart(plan, load, &subject.name) else { continue };
            let key = |name| CellKey { load: &load.name, subject: name, point: 0 };
            let of = |name, metric| analysis.summary(key(name), metric).map(|found| found.median);
            // Two numbers of I/O threads are no change of what they do.
            if plan.subjects.iter().any(|one| one.name == before && one.iothreads != subject.iothreads) {
                continue;
            }
            let missing = match [before, subject.name.as_str()].map(|name| analysis.table.status(key(name))) {
                [Status::Measured, Status::Measured] => "no pair",
                [_, Status::Failed(..)] => "failed",
                [Status::Failed(..), _] => "failed before",
                _ => "not measured",
            };
            let mut judged = analysis.judged.iter();
            let judged =
                judged.find(|one| (&one.load, &one.subject, one.metric) == (&load.name, &subject.name, Metric::Iops));
            let each =
                |name| of(name, Metric::IoThreads).map(|cpus| cpus * 100.0 / f64::from(subject.iothreads.max(1)));
            all.push(Change {
                load,
                baseline: before,
                iothreads: subject.iothreads,
                before: of(before, Metric::Iops),
                iops: judged.and_then(|one| one.ratio).ok_or(missing),
                cpu: each(before).zip(each(&subject.name)).map(<[f64; 2]>::from),
                note: judged.and_then(|one| one.note.clone()).unwrap_or_default(),
            });
        }
    }
    all
}

/// A row for each cell, with what was published of the same one.
fn cells(changes: &[Change<'_>]) -> String {
    let mut rows = Vec::new();
    for change in changes {
        let load = change.load;
        let keys = [load.rw.clone(), load.bs.to_string(), load.numjobs.to_string(), change.iothreads.to_string()];
        let asked: Vec<(&str, &str)> =
            ["rw", "bs", "numjobs", "iothreads"].into_iter().zip(keys.each_ref().map(String::as_str)).collect();
        // Theirs had eight in flight.
        let theirs = |column| published::field(Published::S0Iops, &asked, column).filter(|_| load.iodepth == 8);
        let disks = if load.disks == 1 { String::new() } else { load.disks.to_string() };
        let ours = match change.iops {
            Ok(one) => [signed(one.ratio), format!("{} .. {}", signed(one.low), signed(one.high))],
            Err(why) => [why.to_owned(), String::new()],
        };
        let cpu = change.cpu.map_or([String::new(), String::new()], |both| both.map(|cpu| format!("{cpu:.1}")));
        let theirs = ["iops", "diff_percent"].map(|column| theirs(column).unwrap_or_default());
        let iops = change.before.map_or(String::new(), |iops| format!("{iops:.0}"));
        let words = keys.into_iter().chain([disks, iops]).chain(ours).chain(cpu).chain(theirs);
        rows.push(words.chain([change.note.clone()]).collect());
    }
    let columns = [
        "rw",
        "bs",
        "numjobs",
        "iothreads",
        "disks",
        "iops",
        "diff%",
        "95 %",
        "cpu%",
        "after",
        "published iops",
        "diff%",
        "note",
    ];
    table(&columns, rows)
}

/// By the number of I/O threads.
fn cpu(changes: &[Change<'_>]) -> String {
    let mut by: BTreeMap<u32, Vec<&Change<'_>>> = BTreeMap::new();
    changes.iter().for_each(|one| by.entry(one.iothreads).or_default().push(one));
    let rows = by.iter().map(|(iothreads, changes)| {
        let cpu: Vec<[f64; 2]> = changes.iter().filter_map(|one| one.cpu).collect();
        let ours = [0, 1].map(|side| mean(&cpu.iter().map(|both| both[side]).collect::<Vec<_>>()));
        let ours = ours.map(|cpu| cpu.map_or(String::new(), |cpu| format!("{cpu:.2}")));
        let number = iothreads.to_string();
        let theirs = ["before_percent", "after_percent"]
            .map(|column| published::field(Published::S0Cpu, &[("iothreads", &number)], column).unwrap_or_default());
        std::iter::once(number.clone()).chain(ours).chain(theirs).chain([incomplete(changes)]).collect()
    });
    table(&["iothreads", "before%", "after%", "published before%", "after%", "note"], rows.collect())
}

/// What is to be said of an average of which some cells are missing.
fn incomplete(changes: &[&Change<'_>]) -> String {
    let (all, there) = (changes.len(), changes.iter().filter(|one| one.iops.is_ok()).count());
    if there == all { String::new() } else { format!("incomplete: {there} of {all} cells") }
}

/// Logarithms of ratios, of IOPS and CPU, by pattern.
type Patterns<'a> = BTreeMap<&'a str, Vec<[Option<f64>; 2]>>;

/// The geometric mean over the jobs for each pattern; and over the patterns their mean, the least and the most.
fn averages(changes: &[Change<'_>]) -> String {
    let mut by: BTreeMap<(u32, u64), Vec<&Change<'_>>> = BTreeMap::new();
    changes.iter().for_each(|one| by.entry((one.iothreads, one.load.bs.0)).or_default().push(one));
    let rows = by.into_iter().map(|((iothreads, bs), changes)| {
        let mut patterns = Patterns::new();
        for change in &changes {
            let cpu = change.cpu.map(|[before, after]| (after / before).ln()).filter(|log| log.is_finite());
            let iops = change.iops.ok().map(|one| one.ratio.ln());
            patterns.entry(&change.load.rw).or_default().push([iops, cpu]);
        }
        let of = |side: usize| {
            let means =
                patterns.values().filter_map(|logs| mean(&logs.iter().filter_map(|log| log[side]).collect::<Vec<_>>()));
            let means: Vec<f64> = means.collect();
            let Some(over_all) = mean(&means) else { return [String::new(), String::new()] };
            let [least, most] = [f64::min, f64::max].map(|end| means.iter().copied().fold(over_all, end));
            [signed(over_all.exp()), format!("{} .. {}", signed(least.exp()), signed(most.exp()))]
        };
        let averages = [iothreads.to_string(), Bytes(bs).to_string()].into_iter().chain(of(0)).chain(of(1));
        averages.chain([incomplete(&changes)]).collect()
    });
    table(&["iothreads", "bs", "throughput%", "range", "cpu%", "range", "note"], rows.collect())
}

/// A ratio as a difference in percent.
fn signed(ratio: f64) -> String {
    format!("{:+.1}", (ratio - 1.0) * 100.0)
}

/// Columns of one width; what stands under the first is a word, and all else a number.
fn table(columns: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(columns);
    for row in rows {
        table.add_row(row);
    }
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}
