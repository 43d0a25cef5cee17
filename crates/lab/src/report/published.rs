//! Figures that others published, with ours beside them where the plan measured the same.

use std::collections::BTreeMap;

use csv::StringRecord;

use super::tables::{self, Grid, Link, interval};
use crate::analysis::profile::Profiles;
use crate::analysis::{Analysis, CellKey, counterpart, difference, figure};
use crate::plan::{Bytes, Load, Metric, Published, Subject};
use crate::statistics::{mean, median};

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
            Self::S0Iops | Self::S0Cpu | Self::S1Window => {
                Some("Theirs are a guest's on their hardware: compare the differences, not the rates.")
            }
            Self::S1Weight => Some(
                "Means over 1, 4 and 8 jobs, each on 1 and on 8 I/O threads. Theirs are a guest's on their hardware, and over two types of storage: ours are of one.",
            ),
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

/// The lines of the plan, that of the baseline first; but for those of the weights, which have loads and tables of their own.
fn lines<'a>(analysis: &'a Analysis<'_>) -> Vec<&'a str> {
    let plan = &analysis.run.plan;
    let baseline = plan.subjects.iter().filter(|subject| subject.name == plan.baseline());
    let mut lines: Vec<&str> = Vec::new();
    for line in baseline.chain(&plan.subjects).filter_map(|subject| subject.line.as_deref()) {
        if !lines.contains(&line) && line.split(' ').next() != Some("weight") {
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
            // Under the weights' loads not every line is.
            let loads = analysis.loads.iter().copied().filter(|load| load.bs != WEIGHED);
            let cpus = loads.filter_map(|load| {
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

/// The length of a request under which weights were compared.
const WEIGHED: Bytes = Bytes(4096);
/// The jobs and the I/O threads over which the published means of weights are, and how many cells that makes of four patterns.
const JOBS: [u16; 3] = [1, 4, 8];
const IO_THREADS: [u32; 2] = [1, 8];
const CELLS: usize = 4 * JOBS.len() * IO_THREADS.len();

/// The cells of a `poll-weight` on so many I/O threads, as it was published: of 4k with eight in flight, each with what it is
/// compared with, which has no weight and as many I/O threads.
fn of_weight<'a>(
    analysis: &'a Analysis<'_>,
    weight: &str,
    iothreads: &[u32],
) -> Vec<(&'a Load, &'a Subject, &'a Subject)> {
    let plan = &analysis.run.plan;
    let poll_weight = |one: &Subject| one.iothread.get("poll-weight").map(ToString::to_string);
    let mut all = Vec::new();
    for load in analysis.loads.iter().copied().filter(|load| load.bs == WEIGHED && load.iodepth == 8) {
        for subject in plan.subjects.iter().filter(|one| load.is_put_on(&one.name)) {
            let replaced = counterpart(plan, load, &subject.name).and_then(|name| plan.subject(name));
            let is_weight = poll_weight(subject).is_some_and(|of| of == weight);
            if let Some(replaced) = replaced.filter(|_| is_weight && iothreads.contains(&subject.iothreads))
                && poll_weight(replaced).is_none()
                && replaced.iothreads == subject.iothreads
            {
                all.push((load, subject, replaced));
            }
        }
    }
    all
}

/// What the weights differ by from what they replaced, as it was published: the mean over the patterns, and the range, each over
/// the jobs and the numbers of I/O threads. CPU is the I/O threads', and not that of a request.
fn s1_weight<'a>(analysis: &'a Analysis<'_>) -> Vec<Column<'a>> {
    let column = |metric: Metric| -> Column<'a> {
        let value = move |row: &Row<'_>| {
            let mut all = of_weight(analysis, row.field("weight"), &IO_THREADS);
            all.retain(|(load, ..)| JOBS.contains(&load.numjobs));
            let mut patterns: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
            for &(load, subject, replaced) in &all {
                let key = |one: &'a Subject| CellKey { load: &load.name, subject: &one.name, point: 0 };
                let logs = analysis.table.log_ratios(key(subject), key(replaced), metric);
                let log = mean(&logs.into_iter().map(|(_, log)| log).collect::<Vec<_>>());
                log.into_iter().for_each(|log| patterns.entry(&load.rw).or_default().push(log));
            }
            let logs: Vec<f64> = patterns.values().filter_map(|logs| mean(logs)).collect();
            let (low, high) = (logs.iter().copied().reduce(f64::min)?, logs.iter().copied().reduce(f64::max)?);
            let [all_of_them, low, high] = [mean(&logs)?, low, high].map(|log| difference(log.exp()));
            let cells = match patterns.values().map(Vec::len).sum::<usize>() {
                CELLS => String::new(),
                some => format!(", {some} of {CELLS} cells"),
            };
            let text = match logs.len() {
                1 => format!("{all_of_them} (one pattern{cells})"),
                several => format!("{all_of_them}, from {low} to {high} ({several} patterns{cells})"),
            };
            let &(load, subject, _) = all.first()?;
            Some(Here { text, load: &load.name, subject: &subject.name })
        };
        (format!("{}, difference to the baseline: mean and range over the patterns", metric.name()), Box::new(value))
    };
    [Metric::Iops, Metric::IoThreads].map(column).into()
}

fn s1_window<'a>(analysis: &'a Analysis<'_>) -> Vec<Column<'a>> {
    let column = |metric: Metric| -> Column<'a> {
        let value = move |row: &Row<'_>| {
            let of_two = of_weight(analysis, row.field("weight"), &[2]);
            let (load, subject, _) = of_two.into_iter().find(|(load, ..)| load.rw == "randread")?;
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

    /// A run of a built-in plan, in which every cell comes to what `measure` says: so many requests and so much CPU time of the I/O
    /// threads in a second, or nothing.
    fn run(plan: &str, measure: impl Fn(&Load, &Subject) -> Option<[u64; 2]>) -> Run {
        let plan = Plan::named(plan).unwrap();
        let mut run = Run { plan, ..Run::of("name='p'\ntitle='t'\nsubject=[]\nload=[]\ndisk.type='null'") };
        for load in run.plan.loads.iter() {
            for subject in run.plan.subjects.iter().filter(|subject| load.is_put_on(&subject.name)) {
                for repetition in 0..5 {
                    let outcome = match measure(load, subject) {
                        None => Outcome::Failed { reason: "it crashed".into(), log: Vec::new() },
                        Some([requests, io_threads]) => {
                            let reads = Some(Operations { requests, bytes: 4096 * requests, ..Operations::default() });
                            let cpu = Ledger { io_thread_work: Some(io_threads), ..Ledger::default() };
                            let measured = Measurement { seconds: 1.0, reads, cpu, ..Measurement::default() };
                            Outcome::Measured(Box::new(measured))
                        }
                    };
                    let id = CellId { load: load.name.clone(), subject: subject.name.clone(), repetition, point: 0 };
                    run.cells.push(Cell { id, started: 0, outcome });
                }
            }
        }
        run
    }

    /// What stands here in a row of a published table.
    fn here(table: Published, run: &Run, first: &str) -> Vec<String> {
        let beside = beside(table, &Analysis::new(run)).unwrap();
        let row = beside.grid.rows.into_iter().find(|row| row.cells[0] == first).unwrap();
        let plain = |text: &String| text.replace('\u{2212}', "-").replace(['\u{202f}', '\u{a0}'], " ");
        row.cells[3..].iter().map(plain).collect()
    }

    #[test]
    fn a_weight_is_compared_over_the_jobs_and_the_io_threads_that_were_published_and_under_no_other_load() {
        for plan in ["qemu", "polling"] {
            // Weight 3 loses half of the IOPS of reads on eight I/O threads, and takes a tenth less CPU, whatever was done in it.
            let weight_3 = |fails: fn(&Load, &Subject) -> bool| {
                let run = run(plan, |load, subject| {
                    let is_published = load.bs == WEIGHED && JOBS.contains(&load.numjobs);
                    let is_weight_3 = subject.name.starts_with("weight 3, ");
                    let requests = match (is_published, is_weight_3, subject.iothreads) {
                        (false, _, 2) => 2000,
                        (true, true, 8) if load.rw == "read" => 500,
                        // What eight threads do is to be compared with what eight do.
                        (true, _, 8) => 1000,
                        _ => 3000,
                    };
                    let cpu = if is_weight_3 { 900_000_000 } else { 1_000_000_000 };
                    (!(is_weight_3 && fails(load, subject))).then_some([requests, cpu])
                });
                here(Published::S1Weight, &run, "3")
            };
            // The root of a half for reads, and of the four patterns the fourth root of that.
            let iops = "-8.3 %, from -29.3 % to +0.0 % (4 patterns";
            let cpu = "-10.0 %, from -10.0 % to -10.0 % (4 patterns";
            assert_eq!(weight_3(|_, _| false), [iops, cpu].map(|text| format!("{text})")), "{plan}");
            let is_one =
                |load: &Load, subject: &Subject| (load.rw.as_str(), load.numjobs, subject.iothreads) == ("write", 4, 1);
            assert_eq!(weight_3(is_one), [iops, cpu].map(|text| format!("{text}, 23 of 24 cells)")), "{plan}");
            assert_eq!(weight_3(|load, _| load.rw != "read")[0], "-29.3 % (one pattern, 6 of 24 cells)", "{plan}");
            assert_eq!(weight_3(|_, _| true), ["not measured", "not measured"], "{plan}");
        }
    }

    #[test]
    fn beside_a_published_change_of_polling_stand_no_weights_and_nothing_of_the_loads_that_are_theirs() {
        let lines =
            [("qemu", ["before", "after", "Egret"]), ("polling", ["weighted", "per-source window", "low-regret"])];
        for (plan, lines) in lines {
            let run = run(plan, |load, _| {
                let cpu = match (load.bs, load.writes()) {
                    (WEIGHED, _) => 900_000_000,
                    (_, true) => 600_000_000,
                    (_, false) => 400_000_000,
                };
                Some([1000, cpu])
            });
            let of_lines = super::lines(&Analysis::new(&run)).into_iter().map(str::to_owned).collect::<Vec<_>>();
            assert_eq!(of_lines[..3], lines);
            assert!(!of_lines.iter().any(|line| line.starts_with("weight ")), "{plan}: {of_lines:?}");
            assert_eq!(here(Published::S0Cpu, &run, "1")[..3], ["50.0 %"; 3], "{plan}");
        }
    }
}
