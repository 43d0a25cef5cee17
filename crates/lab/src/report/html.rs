//! `report.html`: one file.

use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde::Serialize;

use super::tables::{Grid, Link, Row};
use super::{Raw, machine, published, tables};
use crate::analysis::chart::{Figure, Mark};
use crate::analysis::choice::{Advice, OperatingPoint, PERHAPS, Related, Tails};
use crate::analysis::ledger::{PARTS, Spent};
use crate::analysis::{Analysis, CellKey, Status, figure};
use crate::plan::{Form, Load, Metric, Stack};
use crate::results::Warning;
use crate::statistics::Overall;

const ECHARTS: &str = include_str!("../../assets/echarts/echarts.min.js");
const SCRIPT: &str = include_str!("../../assets/report.js");
const FOLD: &str = include_str!("../../assets/fold.js");
const STYLE: &str = include_str!("../../assets/report.css");

/// The page's sections, in their order.
const SECTIONS: [(&str, &str); 8] = [
    ("choose", "Choose"),
    ("verdicts", "Verdicts"),
    ("charts", "Charts"),
    ("cpu", "CPU"),
    ("wrong", "What went wrong"),
    ("runs", "Runs"),
    ("machine", "Machine"),
    ("method", "Method"),
];

/// What the script draws.
#[derive(Serialize)]
struct Data<'a> {
    subjects: &'a [&'a str],
    /// Of them, those that the others are held against: fio on the host.
    hosts: Vec<&'a str>,
    figures: &'a [Figure],
    points: &'a [OperatingPoint],
    relations: Vec<Related>,
    tails: Vec<Tails>,
    parts: &'a [&'a str],
    ledgers: Vec<Spent>,
}

/// The page.
pub fn page(analysis: &Analysis<'_>, raw: &Raw) -> String {
    let (run, figures, points) = (analysis.run, analysis.figures(), analysis.operating_points());
    let data = Data {
        subjects: &analysis.subjects,
        hosts: analysis.subjects.iter().copied().filter(|name| analysis.stack(name) == Some(Stack::Host)).collect(),
        figures: &figures,
        points: &points,
        relations: analysis.relations(),
        tails: analysis.tails(),
        parts: &PARTS,
        ledgers: analysis.ledgers(),
    };
    let body = html! {
        (head(analysis))
        (contents(&SECTIONS))
        main {
            (choice(analysis, &points))
            (verdicts(analysis))
            section #charts { h2 { "Charts" } @for figure in &figures { (chart(figure, analysis)) } }
            (ledger(analysis, raw))
            (wrong(analysis))
            (runs(analysis, raw))
            section #machine { h2 { "The machine" } (grid(&machine::fingerprint(run))) }
            (method(analysis))
        }
        script type="application/json" id="data" { (PreEscaped(json(&data))) }
        script { (PreEscaped(ECHARTS)) }
        script { (PreEscaped(SCRIPT)) }
    };
    document(&format!("{} – Egret lab", run.plan.title), &body)
}

/// A whole page that needs nothing else.
pub(super) fn document(title: &str, body: &Markup) -> String {
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                link rel="icon" href="data:,";
                style { (PreEscaped(STYLE)) }
            }
            body { (body) script { (PreEscaped(FOLD)) } }
        }
    };
    markup.into_string()
}

/// JSON that cannot end the element that it is in: whatever a name in a plan is, no `<` is left.
fn json(data: &Data<'_>) -> String {
    serde_json::to_string(data).unwrap_or_else(|_| "null".into()).replace('<', "\\u003c")
}

/// How a verdict looks.
pub(super) fn kind(overall: Overall) -> &'static str {
    match overall {
        Overall::Pass => "pass",
        Overall::Fail => "fail",
        Overall::CantTell | Overall::NotComparable => "cant-tell",
    }
}

/// Whether some guest ran without KVM.
fn is_emulated(analysis: &Analysis<'_>) -> bool {
    analysis.table.keys().any(|key| analysis.table.is_functional_only(key))
}

fn head(analysis: &Analysis<'_>) -> Markup {
    let run = analysis.run;
    let emulated = is_emulated(analysis);
    let is_said = run.host.warnings.iter().any(|warning| warning.about == "emulation");
    html! {
        header {
            p.eyebrow { "Egret lab · " @if run.plan.experiments.is_empty() { "a plan of its own" } @else { "experiments " (run.plan.experiments.join(", ")) } }
            h1 { (run.plan.title) }
            p.about { (run.plan.about.trim()) }
            @if !run.plan.answers.is_empty() { p.about { (run.plan.answers.trim()) } }
            p.meta { (machine::line(run)) }
            p.verdict.(kind(analysis.overall())) { (analysis.verdict()) " " a href="#verdicts" { "Verdicts" } }
            @for said in tables::headlines(analysis) { p.incident { (said) " " a href="#wrong" { "What went wrong" } } }
            @if emulated || !run.host.warnings.is_empty() {
                ul.warnings {
                    @if emulated && !is_said { li { strong { "emulated. " } "Cells marked “functional only” ran in a guest without KVM: they show that it works, and nothing of speed." } }
                    @for warning in &run.host.warnings { li.grave[["not-preconditioned", "drift"].contains(&warning.about.as_str())] { strong { (warning.about) ". " } (warning.text) } }
                }
            }
        }
    }
}

/// The parts of a page by their anchors, to go to.
pub(super) fn contents(parts: &[(impl AsRef<str>, &str)]) -> Markup {
    html! { nav aria-label="Contents" { @for (anchor, text) in parts { a href={ "#" (anchor.as_ref()) } { (text) } } } }
}

/// Answers that are shown at once; more of them are not read.
const AT_ONCE: usize = 12;

/// Rows of a table that is shown at once.
const LONGEST: usize = 60;

fn cards(advice: &[Advice]) -> Markup {
    html! {
        ul.advice {
            @for one in advice {
                li {
                    p.aim { (one.aim) }
                    p.pick { @if let Some(name) = one.choice.strip_prefix(PERHAPS) { span.perhaps { (PERHAPS) } (name) } @else { (one.choice) } }
                    @for reason in &one.reasons { p.reason { (reason) } }
                    p.evidence { @for (text, anchor) in &one.evidence { a href={ "#" (anchor) } { (text) } " " } }
                }
            }
        }
    }
}

fn choice(analysis: &Analysis<'_>, points: &[OperatingPoint]) -> Markup {
    let advice = analysis.advice();
    let emulated = is_emulated(analysis);
    let (first, more) = advice.split_at(advice.len().min(AT_ONCE));
    html! {
        section #choose {
            h2 { "Which option should I choose?" }
            @if advice.is_empty() && emulated { p.quiet { "Nobody can tell here: guests without KVM show that a thing works, and nothing of speed." } }
            @else if advice.is_empty() { p.quiet { "Too little was measured to say." } }
            (cards(first))
            @if !more.is_empty() { details { summary { (more.len()) " more, by load" } (cards(more)) } }
            @if !points.is_empty() {
                div.card #constraints {
                    h3 { "Under your constraints" }
                    div.controls hidden {
                        label { span { "Workload" } select #workload {} }
                        label { span { "CPUs I may spend: " output #cores-shown {} } input #cores type="range" min="0" max="100" value="100"; }
                        label { span { "Mean latency I need: " output #latency-shown {} } input #latency type="range" min="0" max="100" value="100"; }
                    }
                    p #answer aria-live="polite" {}
                    div.scroll { table #recommended hidden { thead { tr {
                        th { "Option" } th.number { "IOPS" } th.number { "Mean latency, µs" } th.number { "p99, µs" } th.number { "p99.9, µs" }
                        th.number { "CPUs" } th.number { "CPU per I/O, µs" } th { "At" }
                    } } tbody {} } }
                    div.chart #front role="img" aria-label="Latency against IOPS of every option; its size is the CPUs it keeps busy" {}
                    p.quiet { "Size: CPUs kept busy. Ringed: on the Pareto front of latency, p99, IOPS and CPUs, as each other point is known to be worse in one of them: under one load by what was measured in pairs, of two loads by ranges of five repetitions and more. Faded: outside your constraints." }
                    details { summary { "All operating points" } (grid(&operating_points(points, analysis))) }
                }
            }
        }
    }
}

fn operating_points(points: &[OperatingPoint], analysis: &Analysis<'_>) -> Grid {
    let mut grid = Grid::new(&[
        "Load",
        "#Point",
        "Option",
        "#IOPS",
        "#Mean latency, µs",
        "#p99 latency, µs",
        "#p99.9 latency, µs",
        "#CPUs",
        "#CPU per I/O, µs",
        "Pareto front",
        "Limit",
    ]);
    for point in points {
        let figures =
            [Some(point.iops), Some(point.latency), point.p99, point.p999, Some(point.cpus), Some(point.cpu_per_io)];
        let mut cells = vec![point.load.clone(), point.point.to_string(), point.subject.clone()];
        cells.extend(figures.map(|value| value.map_or("–".into(), figure)));
        cells.push(if point.on_front { "on it" } else { "" }.into());
        cells.push(point.limit.clone().unwrap_or_default());
        let links = Link::runs(analysis, 2, &point.load, &point.subject);
        grid.rows.push(Row { cells, links, ..Row::default() });
    }
    grid
}

fn verdicts(analysis: &Analysis<'_>) -> Markup {
    let plan = &analysis.run.plan;
    let elsewhere = analysis.loads.iter().any(|load| !load.is_put_on(plan.baseline()));
    html! {
        section #verdicts {
            h2 { "Verdicts" }
            @if analysis.judged.is_empty() { p.quiet { "Nothing is compared: there is one subject." } }
            @else {
                p { "Against " strong { (plan.baseline()) } " (others with a line: against whoever is at their place on its line" @if elsewhere { "; under loads that it is not put on: against the first of theirs" } "). A loss is more than " (figure(plan.threshold * 100.0)) " %." }
                (grid(&tables::summary(analysis)))
                details open[analysis.judged.len() <= 24] {
                    summary { "Every comparison, with its interval and the noise floor beside it" }
                    (grid(&tables::verdicts(analysis)))
                }
            }
        }
    }
}

fn chart(shown: &Figure, analysis: &Analysis<'_>) -> Markup {
    let beside = shown.published.and_then(|table| published::beside(table, analysis));
    let table = tables::chart(shown, analysis);
    let drawn = !matches!(shown.form, Form::Table);
    let is_empty = !shown.groups.iter().flat_map(|group| &group.marks).any(|mark| mark.value.is_some());
    html! {
        article.card id=(shown.anchor) {
            h3 { span.id { (shown.id) } " " (shown.title) }
            p.quiet { (shown.label) @if let Some(better) = shown.better { "; " (better) } @if counts_from_submission(shown, analysis) { "; fio’s open loops counted from submission" } @for (style, load) in dashes(shown) { "; " (style) ": " (load) } @if shown.form == Form::Curve { "; diamonds: the closed loop’s peak" } }
            @if is_empty {
                p.quiet { "Nothing was measured that this could show: see " a href="#wrong" { "what went wrong" } "." }
                (grid(&table))
            } @else if drawn {
                div.chart data-figure=(shown.anchor) role="img" aria-label={ (shown.title) ": the figures are in the table below" } {}
                details { summary { "Figures" } (grid(&table)) }
            } @else if table.rows.len() > LONGEST { details { summary { "Figures" } (grid(&table)) } } @else { (grid(&table)) }
            @if let Some(beside) = beside {
                h4 { "Published: " (beside.title) }
                (grid(&beside.grid))
                @if let Some(remark) = beside.remark { p.quiet { (remark) } }
            }
        }
    }
}

/// Whether a chart has latencies that fio counted from the submission though requests were due before.
fn counts_from_submission(shown: &Figure, analysis: &Analysis<'_>) -> bool {
    let latencies = [Metric::Latency, Metric::LatencyP99, Metric::LatencyP999].map(Metric::name);
    let is_shown = |key: &CellKey<'_>| {
        let mut groups = shown.groups.iter().filter(|group| group.load == key.load);
        let is_its = |mark: &Mark| mark.subject == key.subject && mark.closed == (key.point == 0);
        groups.any(|group| group.marks.iter().any(is_its))
    };
    let mut keys = analysis.table.keys().filter(is_shown);
    latencies.contains(&shown.metric) && keys.any(|key| is_fios_open_loop(analysis, key))
}

/// How a chart of lines tells its loads apart, where there are several.
fn dashes(shown: &Figure) -> Vec<(&'static str, &str)> {
    let mut loads: Vec<&str> = shown.groups.iter().map(|group| group.load.as_str()).collect();
    loads.dedup();
    let lines = matches!(shown.form, Form::Curve | Form::Ladder) && loads.len() > 1;
    if lines { ["solid", "dashed", "dotted"].into_iter().cycle().zip(loads).collect() } else { Vec::new() }
}

fn ledger(analysis: &Analysis<'_>, raw: &Raw) -> Markup {
    let (table, symbols) = (tables::ledger(analysis), tables::symbols(analysis, raw));
    html! {
        section #cpu {
            h2 { "Who spends CPU time on a request" }
            @if table.rows.is_empty() { p.quiet { "No stack could tell." } }
            @else {
                div.card {
                    p.quiet { "CPU time per I/O, µs, medians. “Unaccounted” is what the host was busy with beside all that is named here; where it would dwarf the rest it is switched off at first, and the legend switches it on." }
                    p.quiet { "“CPU per I/O” elsewhere on this page is the server’s, the guest’s, and all of the host’s kernel threads and interrupts: nobody can tell whose request caused those, so that the load’s and other programs’ are among them. An interrupt that comes while a thread runs may be in both. The load, what is behind the disk and what is unaccounted are not in it." }
                    div.chart #ledger role="img" aria-label="CPU time per I/O by who spent it: the figures are in the table below" {}
                    details { summary { "Figures" } (grid(&table)) }
                }
            }
            @if !symbols.rows.is_empty() {
                div.card #symbols {
                    h3 { "Hottest symbols" }
                    p.quiet { "Shares of all samples that perf took of the host while a subject was measured, as means of the repetitions, with intervals of their scatter and at least of so many samples. By several programs: those that ran it most." }
                    @if symbols.rows.len() > LONGEST { details { summary { "Figures" } (grid(&symbols)) } } @else { (grid(&symbols)) }
                }
            } @else if analysis.run.plan.perf { p.quiet { "There are no profiles: the warnings at the top of the page say why." } }
        }
    }
}

fn wrong(analysis: &Analysis<'_>) -> Markup {
    let (unmeasured, incidents) = (tables::unmeasured(analysis), tables::incidents(analysis));
    let is_deaf = analysis.run.host.warnings.iter().any(|warning| warning.about == Warning::KERNEL_LOG);
    html! {
        section #wrong {
            h2 { "What went wrong" }
            @if unmeasured.rows.is_empty() && incidents.rows.is_empty() {
                p.quiet {
                    @if analysis.run.ended.is_some() { "Nothing: every cell was measured, " } @else { "Nothing so far: every cell that ended was measured, " }
                    @if is_deaf { "and no server complained. What the kernel said could not be read." } @else { "and neither this machine’s kernel nor a server complained." }
                }
            }
            (grid(&unmeasured))
            @if !incidents.rows.is_empty() { h3 { "Said meanwhile" } (grid(&incidents)) }
        }
    }
}

fn runs(analysis: &Analysis<'_>, raw: &Raw) -> Markup {
    html! {
        section #runs {
            h2 { "Every run" }
            p.quiet { "What the tables above are made of: their links lead here. Files are in " code { "raw/" } " beside this page: the load’s own output, and call graphs." }
            details { summary { (analysis.run.cells.len()) " cells" } (grid(&tables::runs(analysis, raw))) }
        }
    }
}

/// Whether what was measured is an open loop of fio's own, which counts a request's time from its submission.
fn is_fios_open_loop(analysis: &Analysis<'_>, key: CellKey<'_>) -> bool {
    let asks = |load: &&&Load| load.name == key.load && load.keys.application.is_none();
    let load = analysis.loads.iter().find(asks);
    let is_open = load.is_some_and(|load| key.point > 0 || load.keys.rate_iops.is_some());
    let is_fios = analysis.stack(key.subject).is_some_and(Stack::is_fios);
    is_open && is_fios && analysis.table.status(key) == Status::Measured
}

fn method(analysis: &Analysis<'_>) -> Markup {
    let has_one =
        |subject: &&str| analysis.table.keys().any(|key| key.subject == *subject && is_fios_open_loop(analysis, key));
    let fios: Vec<&str> = analysis.subjects.iter().copied().filter(has_one).collect();
    html! {
        section #method {
            h2 { "Method" }
            p { "Subjects are measured in rounds, in an order drawn anew for each; a ratio is of two measurements of one round, and what is shown is the geometric mean of " (machine::repetitions(&analysis.run.plan)) " of them. The baseline is measured twice in a round, and the mean of both is what the others are compared with. Whiskers are the whole range." }
            p { "An interval of 95 % is Student’s, of the ratios’ logarithms. Its variance is moderated: comparisons of one kind tell each other how much such measurements scatter (Smyth 2004). It is never narrower than the noise floor makes it." }
            p { strong { "Pass" } ": no more was lost than the threshold allows; the interval excludes it. " strong { "Fail" } ": something was certainly lost, and perhaps more than the threshold, or it failed. Certain is what holds beside all other comparisons of the plan (Benjamini and Hochberg 1995). " strong { "Can’t tell" } ": neither. Where subject and baseline are both at the limit of the disk, or of the load, nothing is decided." }
            p { "The noise floor is the baseline beside itself. Latency of an open loop is counted from when a request was due" @if !fios.is_empty() { "; of " (fios.join(", ")) " from when fio submitted it, so that a stall shows less" } ". CPU time is of all but the load." }
        }
    }
}

/// A table, in a box of its own that scrolls; nothing of an empty one.
fn grid(grid: &Grid) -> Markup {
    let numeric = |index: usize| grid.columns[index].starts_with('#').then_some("number");
    html! {
        @if !grid.rows.is_empty() {
            div.scroll {
                table {
                    thead { tr { @for (index, name) in grid.columns.iter().enumerate() {
                        th scope="col" class=[numeric(index)] { (name.trim_start_matches('#')) }
                    } } }
                    tbody { @for row in &grid.rows {
                        tr id=[row.anchor.as_deref()] class=(row.kind) { @for (index, cell) in row.cells.iter().enumerate() {
                            td class=[numeric(index)] {
                                @if cell.contains('\n') { pre { (cell) } }
                                @else if let Some(link) = row.links.iter().find(|link| link.column == index && link.text.is_none()) { a.trace href=(link.to) { (cell) } }
                                @else { (cell) }
                                @for link in row.links.iter().filter(|link| link.column == index) { @if let Some(text) = &link.text { a.trace href=(link.to) { (text) } " " } }
                            }
                        } }
                    } }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_request_s_cpu_time_has_a_colour() {
        let hues = SCRIPT.split_once("const hues = [").unwrap().1.split_once(']').unwrap().0;
        let hues: Vec<&str> = hues.split(", ").collect();
        // The load and what nobody accounts for have their own, and all of it is not stacked.
        assert_eq!(PARTS[hues.len()..], ["the load", "unaccounted", "host busy"]);
        // By day and by night.
        assert!(hues.iter().all(|hue| STYLE.matches(&format!("--c{hue}:")).count() == 2), "{hues:?}");
    }
}
