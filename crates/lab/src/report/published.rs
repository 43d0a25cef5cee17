//! Figures that others published, with ours beside them where the plan measured the same.

use std::collections::BTreeMap;

use csv::StringRecord;

use super::tables::{self, Grid, Link, interval};
use crate::analysis::profile::Profiles;
use crate::analysis::{Analysis, CellKey, difference, figure};
use crate::plan::{Bytes, Load, Metric, Published, Subject};
use crate::statistics::median;

impl Published {
    fn title(self) -> &'static str {
        match self {
            Self::S0Iops => "QEMU's adaptive polling, old against new policy (mailing list, 2026): IOPS",
            Self::S0Cpu => "QEMU's adaptive polling, old against new policy (mailing list, 2026): CPU of an I/O thread",
            Self::S1Weight => "QEMU's poll-weight (cover letter of the same series)",
            Self::S1Window => {
                "QEMU's poll-weight, first version of the series: 4k random reads, depth 8, two I/O threads"
            }
            Self::S3Busy => "A plug around every bio, Linux, 2026: change of the host's busy time",
            Self::S3Symbols => "A plug around every bio, Linux, 2026: the hottest symbols",
            Self::S4Devices => "QEMU with 1 and 100 devices, one of them busy",
        }
    }

    fn csv(self) -> &'static str {
        match self {
            Self::S0Iops => include_str!("../../assets/published/s0_iops.csv"),
            Self::S0Cpu => include_str!("../../assets/published/s0_cpu.csv"),
            Self::S1Weight => include_str!("../../assets/published/s1_weight.csv"),
            Self::S1Window => include_str!("../../assets/published/s1_window.csv"),
            Self::S3Busy => include_str!("../../assets/published/s3_busy.csv"),
            Self::S3Symbols => include_str!("../../assets/published/s3_symbols.csv"),
            Self::S4Devices => include_str!("../../assets/published/s4_devices.csv"),
        }
    }

    /// What is to be said of the comparison.
    fn remark(self) -> Option<&'static str> {
        match self {
            Self::S0Iops | Self::S0Cpu | Self::S1Weight | Self::S1Window => {
                Some("Theirs are a guest's on their hardware: compare the differences, not the rates.")
            }
            Self::S3Busy => Some(
                "A difference between two kernels needs a run on each of them: egret compare A B shows ours, as host busy of fio on the host.",
            ),
            Self::S3Symbols => Some("Ours are means over all loads, and how much those differ is in the intervals."),
            Self::S4Devices => None,
        }
    }

    /// Our columns beside it.
    fn ours<'a>(self, analysis: &'a Analysis<'_>) -> Vec<Column<'a>> {
        match self {
            Self::S0Iops => s0_iops(analysis),
            Self::S0Cpu => s0_cpu(analysis),
            Self::S1Weight => s1_weight(analysis),
            Self::S1Window => s1_window(analysis),
            Self::S3Busy => Vec::new(),
            Self::S3Symbols => s3_symbols(analysis),
            Self::S4Devices => s4_devices(analysis),
        }
    }
}

/// A published table with our columns, its title, and what is to be said of the comparison.
pub struct Beside {
    pub title: &'static str,
    pub grid: Grid,
    pub remark: Option<&'static str>,
}

/// The table beside ours; `None` of one that cannot be read.
pub fn beside(table: Published, analysis: &Analysis<'_>) -> Option<Beside> {
    let mut reader = csv::Reader::from_reader(table.csv().as_bytes());
    let columns = reader.headers().ok()?.clone();
    let ours = table.ours(analysis);
    let theirs = columns.iter().map(|column| format!("#Published: {}", column.replace('_', " ")));
    let columns_here = ours.iter().map(|(heading, _)| format!("#Here: {heading}"));
    let mut grid = Grid { columns: theirs.chain(columns_here).collect(), rows: Vec::new() };
    for fields in reader.records() {
        let row = Row { columns: &columns, fields: &fields.ok()? };
        let shown = row.fields.iter().map(|field| if field.is_empty() { "–" } else { field }.to_owned());
        let mut cells: Vec<String> = shown.collect();
        let mut links = Vec::new();
        for here in ours.iter().map(|(_, value)| value(&row)) {
            links.extend(here.iter().flat_map(|here| Link::runs(analysis, cells.len(), here.load, here.subject)));
            cells.push(here.map_or("not measured".into(), |here| here.text));
        }
        grid.rows.push(tables::Row { cells, links, ..tables::Row::default() });
    }
    Some(Beside { title: table.title(), grid, remark: table.remark() })
}

/// A field of the row of a published table that has these values in these columns.
pub fn field(table: Published, asked: &[(&str, &str)], column: &str) -> Option<String> {
    let mut reader = csv::Reader::from_reader(table.csv().as_bytes());
    let columns = reader.headers().ok()?.clone();
    let mut rows = reader.records().flatten();
    let fields = rows.find(|fields| {
        let row = Row { columns: &columns, fields };
        asked.iter().all(|(column, value)| row.field(column) == *value)
    })?;
    Some(Row { columns: &columns, fields: &fields }.field(column).to_owned())
}

/// A row of a published table.
struct Row<'a> {
    columns: &'a StringRecord,
    fields: &'a StringRecord,
}

impl Row<'_> {
    fn field(&self, column: &str) -> &str {
        self.columns.iter().position(|one| one == column).map_or("", |index| &self.fields[index])
    }
}

/// A figure of ours, and one of the loads and the subject whose runs it is made of.
struct Here<'a> {
    text: String,
    load: &'a str,
    subject: &'a str,
}

type Column<'a> = (String, Box<dyn Fn(&Row<'_>) -> Option<Here<'a>> + 'a>);

/// The lines of the plan, that of the baseline first; but for that of the weights, which has tables of its own.
fn lines<'a>(analysis: &'a Analysis<'_>) -> Vec<&'a str> {
    let plan = &analysis.run.plan;
    let baseline = plan.subjects.iter().filter(|subject| subject.name == plan.baseline());
    let mut lines: Vec<&str> = Vec::new();
    for line in baseline.chain(&plan.subjects).filter_map(|subject| subject.line.as_deref()) {
        if !lines.contains(&line) && line != "weight" {
            lines.push(line);
        }
    }
    lines
}

fn on_line<'a>(analysis: &'a Analysis<'_>, line: &str, iothreads: &str) -> Option<&'a Subject> {
    let mut subjects = analysis.run.plan.subjects.iter();
    subjects.find(|one| one.line.as_deref() == Some(line) && one.iothreads.to_string() == iothreads)
}

/// The difference of a subject to its baseline under a load.
fn judged<'a>(analysis: &Analysis<'_>, load: &'a str, subject: &'a str, metric: Metric) -> Option<Here<'a>> {
    let mut judged = analysis.judged.iter();
    let judged = judged.find(|one| one.load == load && one.subject == subject && one.metric == metric)?;
    Some(Here { text: judged.ratio.as_ref().map(interval)?, load, subject })
}

/// The median of a subject's closed loop.
fn median_of<'a>(analysis: &Analysis<'_>, load: &'a str, subject: &'a str, metric: Metric) -> Option<Here<'a>> {
    let summary = analysis.summary(CellKey { load, subject, point: 0 }, metric)?;
    Some(Here { text: figure(summary.median), load, subject })
}

fn s0_iops<'a>(analysis: &'a Analysis<'_>) -> Vec<Column<'a>> {
    let lines = lines(analysis);
    let baseline = lines.first().copied().unwrap_or_default();
    let column = |line: &'a str| -> Column<'a> {
        let is_first = line == baseline;
        let heading = if is_first { format!("{line}, IOPS") } else { format!("{line}, difference to {baseline}") };
        let value = move |row: &Row<'_>| {
            let same = |load: &&Load| {
                let keys = [load.rw.clone(), load.bs.to_string(), load.numjobs.to_string()];
                keys == [row.field("rw"), row.field("bs"), row.field("numjobs")] && load.iodepth == 8
            };
            let load = analysis.loads.iter().copied().find(same)?;
            let subject = on_line(analysis, line, row.field("iothreads"))?;
            if !is_first {
                return judged(analysis, &load.name, &subject.name, Metric::Iops);
            }
            median_of(analysis, &load.name, &subject.name, Metric::Iops)
        };
        (heading, Box::new(value))
    };
    lines.iter().copied().map(column).collect()
}

fn s0_cpu<'a>(analysis: &'a Analysis<'_>) -> Vec<Column<'a>> {
    let column = |line: &'a str| -> Column<'a> {
        let value = move |row: &Row<'_>| {
            let iothreads = row.field("iothreads");
            let subject = on_line(analysis, line, iothreads)?;
            let cpus = analysis.loads.iter().copied().filter_map(|load| {
                let key = CellKey { load: &load.name, subject: &subject.name, point: 0 };
                analysis.summary(key, Metric::IoThreads).map(|summary| (load, summary.median))
            });
            let cpus: Vec<(&Load, f64)> = cpus.collect();
            let threads: f64 = iothreads.parse().ok()?;
            let (first, _) = cpus.first()?;
            let median = median(cpus.iter().map(|(_, cpu)| *cpu).collect());
            let text = format!("{:.1} %", median * 100.0 / threads);
            Some(Here { text, load: &first.name, subject: &subject.name })
        };
        (format!("{line}, median over the loads, per I/O thread"), Box::new(value))
    };
    lines(analysis).into_iter().map(column).collect()
}

/// The subject that has a `poll-weight`, and the loads under which weights are compared as they were published: of 4k,
/// beside a baseline without one. Under another load that subject is compared with something else.
fn of_weight<'a>(analysis: &'a Analysis<'_>, weight: &str) -> Option<(Vec<&'a Load>, &'a Subject)> {
    let plan = &analysis.run.plan;
    let poll_weight = |one: &Subject| one.iothread.get("poll-weight").map(ToString::to_string);
    let subject = plan.subjects.iter().find(|one| poll_weight(one).is_some_and(|of| of == weight))?;
    let is_without = |name: &str| plan.subjects.iter().any(|one| one.name == name && poll_weight(one).is_none());
    let is_published =
        |load: &&Load| load.bs == Bytes(4096) && load.is_put_on(&subject.name) && is_without(plan.baseline_under(load));
    Some((analysis.loads.iter().copied().filter(is_published).collect(), subject))
}

/// What the weights differ by from what they replaced, as it was published: the mean over the patterns, and the range. CPU
/// is the I/O threads', and not that of a request.
fn s1_weight<'a>(analysis: &'a Analysis<'_>) -> Vec<Column<'a>> {
    let column = |metric: Metric| -> Column<'a> {
        let value = move |row: &Row<'_>| {
            let (loads, subject) = of_weight(analysis, row.field("weight"))?;
            let mean = |logs: &[f64]| logs.iter().sum::<f64>() / logs.len() as f64;
            let mut patterns: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
            for load in &loads {
                let key = |subject| CellKey { load: &load.name, subject, point: 0 };
                let baseline = analysis.run.plan.baseline_under(load);
                let logs = analysis.table.log_ratios(key(&subject.name), key(baseline), metric);
                let logs: Vec<f64> = logs.into_iter().map(|(_, log)| log).collect();
                if !logs.is_empty() {
                    patterns.entry(&load.rw).or_default().push(mean(&logs));
                }
            }
            let logs: Vec<f64> = patterns.values().map(|logs| mean(logs)).collect();
            let (low, high) = (logs.iter().copied().reduce(f64::min)?, logs.iter().copied().reduce(f64::max)?);
            let [all, low, high] = [mean(&logs), low, high].map(|log| difference(log.exp()));
            let text = match logs.len() {
                1 => format!("{all} (one pattern)"),
                several => format!("{all}, from {low} to {high} ({several} patterns)"),
            };
            Some(Here { text, load: &loads.first()?.name, subject: &subject.name })
        };
        (format!("{}, difference to the baseline: mean and range over the patterns", metric.name()), Box::new(value))
    };
    [Metric::Iops, Metric::IoThreads].map(column).into()
}

fn s1_window<'a>(analysis: &'a Analysis<'_>) -> Vec<Column<'a>> {
    let column = |metric: Metric| -> Column<'a> {
        let value = move |row: &Row<'_>| {
            let (loads, subject) = of_weight(analysis, row.field("weight"))?;
            let load = loads.into_iter().find(|load| load.rw == "randread")?;
            median_of(analysis, &load.name, &subject.name, metric)
        };
        (format!("{}, {}", metric.name(), metric.unit()), Box::new(value))
    };
    [Metric::Window, Metric::WindowsReset, Metric::WindowsNearMax].map(column).into()
}

fn s3_symbols<'a>(analysis: &'a Analysis<'_>) -> Vec<Column<'a>> {
    let column = |subject: &'a str| -> Column<'a> {
        let value = move |row: &Row<'_>| {
            let name = row.field("symbol");
            let mut cells = analysis.run.cells.iter().filter(|cell| cell.id.subject == subject);
            let share = Profiles::of(cells.clone()).share(name)?;
            Some(Here { text: share.text(), load: &cells.next()?.id.load, subject })
        };
        (subject.to_owned(), Box::new(value))
    };
    analysis.subjects.iter().map(|subject| column(subject)).collect()
}

fn s4_devices<'a>(analysis: &'a Analysis<'_>) -> Vec<Column<'a>> {
    let column = |subject: &'a str| -> Column<'a> {
        let value = move |row: &Row<'_>| {
            let devices: u16 = row.field("devices").parse().ok()?;
            let asks = |load: &Load| load.idle_disks + 1 == devices && load.rw == row.field("rw");
            let same = |load: &&Load| asks(load) && load.is_put_on(subject);
            let load = analysis.loads.iter().copied().find(same)?;
            median_of(analysis, &load.name, subject, Metric::Iops)
        };
        (format!("{subject}, IOPS"), Box::new(value))
    };
    analysis.subjects.iter().map(|subject| column(subject)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;
    use crate::results::{Cell, CellId, Ledger, Measurement, Operations, Outcome, Run};

    #[test]
    fn a_weight_is_compared_under_the_patterns_that_were_published_and_under_no_other_load() {
        let plan = Plan::named("polling").unwrap();
        let is_published = |load: &str| load.ends_with(" 4k QD8 2 jobs");
        assert_eq!(plan.loads.iter().filter(|load| is_published(&load.name)).count(), 4);
        let weight_3 = |fails: bool| {
            let mut run =
                Run { plan: plan.clone(), ..Run::of("name='p'\ntitle='t'\nsubject=[]\nload=[]\ndisk.type='null'") };
            for load in plan.loads.iter() {
                for subject in plan.subjects.iter().filter(|subject| load.is_put_on(&subject.name)) {
                    for repetition in 0..5 {
                        let is_weight_3 = subject.name == "weighted, 2 I/O threads";
                        let requests = match (is_published(&load.name), is_weight_3, load.rw.as_str()) {
                            (false, _, _) if subject.iothreads == 2 => 2000,
                            (true, true, "read") => 500,
                            _ => 1000,
                        };
                        let reads = Some(Operations { requests, bytes: 4096 * requests, ..Operations::default() });
                        // A tenth less CPU, whatever was done in it.
                        let io_threads = Some(if is_weight_3 { 900_000_000 } else { 1_000_000_000 });
                        let cpu = Ledger { io_thread_work: io_threads, ..Ledger::default() };
                        let measured = Measurement { seconds: 1.0, reads, cpu, ..Measurement::default() };
                        let outcome = match fails && is_published(&load.name) && is_weight_3 {
                            true => Outcome::Failed { reason: "it crashed".into(), log: Vec::new() },
                            false => Outcome::Measured(Box::new(measured)),
                        };
                        let (load, subject) = (load.name.clone(), subject.name.clone());
                        run.cells.push(Cell {
                            id: CellId { load, subject, repetition, point: 0 },
                            started: 0,
                            outcome,
                        });
                    }
                }
            }
            let beside = beside(Published::S1Weight, &Analysis::new(&run)).unwrap();
            let row = beside.grid.rows.into_iter().find(|row| row.cells[0] == "3").unwrap();
            row.cells[3..].to_vec()
        };
        let minus = |text: &str| text.replace('\u{2212}', "-").replace(['\u{202f}', '\u{a0}'], " ");
        let said: Vec<String> = weight_3(false).iter().map(|text| minus(text)).collect();
        assert_eq!(
            said,
            ["-15.9 %, from -50.0 % to +0.0 % (4 patterns)", "-10.0 %, from -10.0 % to -10.0 % (4 patterns)"]
        );
        assert_eq!(weight_3(true), ["not measured", "not measured"]);
    }
}
