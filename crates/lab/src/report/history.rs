//! Runs of one plan over time, in one page: what a CI keeps.

use maud::{Markup, html};

use super::html::{contents, document, kind};
use super::machine::date;
use super::tables;
use crate::analysis::chart::{anchor, runs_of};
use crate::analysis::{Analysis, CellKey, Summary, figure};
use crate::compare::{Comparison, METRICS};
use crate::plan::Metric;
use crate::results::{Run, place};
use crate::statistics::Overall;

/// The size of a drawing, and its margin, in pixels.
const SIZE: [f64; 2] = [240.0, 48.0];
const MARGIN: f64 = 6.0;

/// The page of some runs, each with the place of its own report, the oldest first.
///
/// # Errors
/// They are not of one plan.
pub fn page(runs: &[(String, Run)]) -> Result<String, String> {
    let mut runs: Vec<&(String, Run)> = runs.iter().collect();
    runs.sort_by_key(|(_, run)| run.started);
    let mut plans: Vec<&str> = runs.iter().map(|(_, run)| run.plan.name.as_str()).collect();
    plans.dedup();
    let (&[plan], Some((_, last))) = (plans.as_slice(), runs.last()) else {
        return Err(format!("the runs are of several plans: {}; a page over time is of one", plans.join(", ")));
    };
    let analyses: Vec<Analysis<'_>> = runs.iter().map(|(_, run)| Analysis::new(run)).collect();
    let title = format!("{} – over time", last.plan.title);
    let loads: Vec<Cells<'_>> =
        last.plan.loads.iter().filter_map(|load| Cells::of(&load.name, &runs, &analyses)).collect();
    let links = loads.iter().map(|cells| (cells.anchor(), cells.load));
    let links: Vec<(String, &str)> = std::iter::once(("runs".into(), "Runs")).chain(links).collect();
    let body = html! {
        header { p.eyebrow { "Egret lab · plan " (plan) } h1 { (title) } }
        (contents(&links))
        main {
            section #runs { h2 { "Runs" } div.scroll { (table(&runs, &analyses)) } }
            section #cells { h2 { "Cells" }
                p.quiet { "Medians, with the range of all repetitions; each scale is its own, and does not begin at 0. A point leads to what it was made of, a cross to what failed." }
                @for cells in &loads { (cells.markup()) }
            }
        }
    };
    Ok(document(&title, &body))
}

fn table(runs: &[&(String, Run)], analyses: &[Analysis<'_>]) -> Markup {
    html! {
        table {
            thead { tr { th { "Run" } th { "Kernel" } th { "Programs" } th { "Verdict of the plan" } th { "What went wrong" } th { "Beside the run before" } } }
            tbody { @for (index, ((place, run), analysis)) in runs.iter().zip(analyses).enumerate() {
                @let before = index.checked_sub(1).map(|before| beside(&runs[before].1, run));
                tr {
                    td { a href=(place) { (date(run.started)) } }
                    td { (run.host.kernel) }
                    td { @for one in &run.host.components { (one.name) " " (one.version) " " code { (one.sha256.get(..8).unwrap_or_default()) } br; } }
                    td { span.verdict.(kind(analysis.overall())) { (analysis.overall().word()) } " " (analysis.count()) (analysis.gaps()) }
                    td { @for said in tables::headlines(analysis) { a.failed href={ (place) "#wrong" } { (said) } " " } }
                    td { @if let Some((overall, text)) = &before { span.verdict.(kind(*overall)) { (overall.word()) } " " (text) } @else { "–" } }
                }
            } }
        }
    }
}

/// What a run is beside the one before it.
fn beside(before: &Run, run: &Run) -> (Overall, String) {
    let comparison = Comparison::of(&[before], &[run], None);
    let overall = comparison.overall(false);
    let said = if comparison.objections.is_empty() { comparison.said() } else { comparison.objections.join("; ") };
    (overall, said)
}

/// The cells of a load.
struct Cells<'a> {
    load: &'a str,
    /// Closed loops first, and then a curve's points, one behind the other.
    keys: Vec<CellKey<'a>>,
    runs: &'a [&'a (String, Run)],
    analyses: &'a [Analysis<'a>],
}

impl<'a> Cells<'a> {
    /// Those that some run has.
    fn of(load: &'a str, runs: &'a [&'a (String, Run)], analyses: &'a [Analysis<'a>]) -> Option<Self> {
        let is_shown =
            |key: &CellKey<'_>| key.load == load && analyses.iter().any(|one| one.subjects.contains(&key.subject));
        let mut keys: Vec<CellKey<'a>> = analyses.iter().flat_map(|one| one.table.keys()).filter(is_shown).collect();
        keys.sort_unstable_by_key(|key| (key.point, key.subject));
        keys.dedup();
        (!keys.is_empty()).then_some(Self { load, keys, runs, analyses })
    }

    fn anchor(&self) -> String {
        anchor("load", self.load)
    }

    fn markup(&self) -> Markup {
        let (closed, points) = self.keys.split_at(self.keys.partition_point(|key| key.point == 0));
        html! {
            article.card id=(self.anchor()) {
                h3 { (self.load) }
                (self.rows(closed))
                @if !points.is_empty() { details { summary { "Points of the curve" } (self.rows(points)) } }
            }
        }
    }

    fn rows(&self, keys: &[CellKey<'a>]) -> Markup {
        let is_known = |metric: &Metric| {
            keys.iter().any(|key| self.analyses.iter().any(|one| one.summary(*key, *metric).is_some()))
        };
        let shown: Vec<Metric> = METRICS.into_iter().filter(is_known).collect();
        html! {
            div.scroll { table {
                thead { tr { th { "Subject" } @for metric in &shown { th { (metric.label()) } } } }
                tbody { @for key in keys {
                    tr {
                        td { (place(key.subject, key.point)) (self.failed(*key)) }
                        @for metric in &shown { td { (self.drawing(*key, *metric)) } }
                    }
                } }
            } }
        }
    }

    /// When a cell failed last, and why.
    fn failed(&self, key: CellKey<'_>) -> Markup {
        let failures = self.runs.iter().zip(self.analyses).rev();
        let mut failures = failures.filter_map(|(run, one)| Some((run, one.table.failures(key)?)));
        let last = failures.next();
        let earlier = failures.count();
        html! {
            @if let Some(((place, run), why)) = last {
                p { a.failed href={ (place) "#wrong" } { (date(run.started)) ": " (why) @if earlier > 0 { "; and in " (earlier) @if earlier == 1 { " earlier run" } @else { " earlier runs" } } } }
            }
        }
    }

    /// A line over the runs, with the range of each as a whisker, a cross where one failed, and the newest value.
    fn drawing(&self, key: CellKey<'_>, metric: Metric) -> Markup {
        let series: Vec<Option<Summary>> = self.analyses.iter().map(|one| one.summary(key, metric)).collect();
        let has_failed: Vec<bool> = self.analyses.iter().map(|one| one.table.failures(key).is_some()).collect();
        let known = || series.iter().flatten();
        let least = known().map(|one| one.low).fold(f64::INFINITY, f64::min);
        let most = known().map(|one| one.high).fold(f64::NEG_INFINITY, f64::max);
        let [width, height] = SIZE;
        let x = |index: usize| MARGIN + (width - 2.0 * MARGIN) * (index as f64 + 0.5) / series.len() as f64;
        let y = |value: f64| {
            height - MARGIN - (height - 2.0 * MARGIN) * (value - least) / (most - least).max(f64::MIN_POSITIVE)
        };
        let points = series.iter().enumerate().filter_map(|(index, one)| Some((index, (*one)?)));
        let points: Vec<(usize, Summary)> = points.collect();
        let line: Vec<String> =
            points.iter().map(|(index, one)| format!("{:.1},{:.1}", x(*index), y(one.median))).collect();
        let when = |index: usize| date(self.runs[index].1.started);
        let place = |index: usize| &self.runs[index].0;
        html! {
            @if points.is_empty() && !has_failed.contains(&true) { "–" }
            @else {
                svg width=(width) height=(height) viewBox={ "0 0 " (width) " " (height) } role="img" aria-label={ (metric.name()) " over time" } {
                    @for (index, one) in &points {
                        line x1=(x(*index)) x2=(x(*index)) y1=(y(one.low)) y2=(y(one.high)) stroke="currentColor" stroke-opacity=".4" {}
                    }
                    polyline points=(line.join(" ")) fill="none" stroke="var(--c0)" stroke-width="1.5" {}
                    @for (index, one) in &points {
                        a href={ (place(*index)) "#" (runs_of(self.load, key.subject)) } {
                            circle cx=(x(*index)) cy=(y(one.median)) r="3" fill="var(--c0)" {
                                title { (when(*index)) ": " (metric.say(one.median)) " (" (figure(one.low)) " … " (figure(one.high)) ")" }
                            }
                        }
                    }
                    @for (index, _) in has_failed.iter().enumerate().filter(|(_, failed)| **failed) {
                        a href={ (place(index)) "#wrong" } {
                            text x=(x(index)) y=(height) text-anchor="middle" font-size="14" fill="var(--fail)" { "×" title { (when(index)) ": failed" } }
                        }
                    }
                }
                " " @match points.last() {
                    Some((index, newest)) if index + 1 == series.len() => (metric.say(newest.median)),
                    // What is older would look like news.
                    _ => "–",
                }
            }
        }
    }
}
