//! Runs of one plan over time, in one page: what a CI keeps.

use maud::{Markup, html};

use super::html::{document, kind};
use super::machine::date;
use crate::analysis::{Analysis, CellKey, Summary, figure};
use crate::compare::{Comparison, METRICS};
use crate::plan::Metric;
use crate::results::Run;
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
    let body = html! {
        header { p.eyebrow { "Egret lab · plan " (plan) } h1 { (title) } }
        main {
            section #runs { h2 { "Runs" } div.scroll { (table(&runs, &analyses)) } }
            section #cells { h2 { "Cells" }
                p.quiet { "Medians, with the range of all repetitions; each scale is its own, and does not begin at 0." }
                @for load in last.plan.loads.iter() { (cells(&load.name, &runs, &analyses)) }
            }
        }
    };
    Ok(document(&title, &body))
}

fn table(runs: &[&(String, Run)], analyses: &[Analysis<'_>]) -> Markup {
    html! {
        table {
            thead { tr { th { "Run" } th { "Kernel" } th { "Programs" } th { "Verdict of the plan" } th { "Beside the run before" } } }
            tbody { @for (index, ((place, run), analysis)) in runs.iter().zip(analyses).enumerate() {
                @let before = index.checked_sub(1).map(|before| beside(&runs[before].1, run));
                tr {
                    td { a href=(place) { (date(run.started)) } }
                    td { (run.host.kernel) }
                    td { @for one in &run.host.components { (one.name) " " (one.version) " " code { (one.sha256.get(..8).unwrap_or_default()) } br; } }
                    td { span.verdict.(kind(analysis.overall())) { (analysis.overall().word()) } " " (analysis.count()) (analysis.gaps()) }
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
    let said = if comparison.objections.is_empty() {
        comparison.count().to_string()
    } else {
        comparison.objections.join("; ")
    };
    (overall, said)
}

fn cells(load: &str, runs: &[&(String, Run)], analyses: &[Analysis<'_>]) -> Markup {
    let mut subjects: Vec<&str> = analyses.iter().flat_map(|one| one.subjects.iter().copied()).collect();
    subjects.sort_unstable();
    subjects.dedup();
    let series = |subject: &str, metric: Metric| -> Vec<Option<Summary>> {
        let key = CellKey { load, subject, point: 0 };
        analyses.iter().map(|one| one.summary(key, metric)).collect()
    };
    let is_known =
        |metric: &Metric| subjects.iter().any(|subject| series(subject, *metric).iter().any(Option::is_some));
    let shown: Vec<Metric> = METRICS.into_iter().filter(is_known).collect();
    html! {
        @if !shown.is_empty() {
            article.card {
                h3 { (load) }
                div.scroll { table {
                    thead { tr { th { "Subject" } @for metric in &shown { th { (metric.label()) } } } }
                    tbody { @for subject in &subjects {
                        tr { td { (subject) } @for metric in &shown {
                            td { (drawing(&series(subject, *metric), *metric, runs)) }
                        } }
                    } }
                } }
            }
        }
    }
}

/// A line over the runs, with the range of each as a whisker, and the newest value.
fn drawing(series: &[Option<Summary>], metric: Metric, runs: &[&(String, Run)]) -> Markup {
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
    html! {
        @if let Some((_, newest)) = points.last() {
            svg width=(width) height=(height) role="img" aria-label={ (metric.name()) " over time" } {
                @for (index, one) in &points {
                    line x1=(x(*index)) x2=(x(*index)) y1=(y(one.low)) y2=(y(one.high)) stroke="currentColor" stroke-opacity=".4" {}
                }
                polyline points=(line.join(" ")) fill="none" stroke="var(--c0)" stroke-width="1.5" {}
                @for (index, one) in &points {
                    circle cx=(x(*index)) cy=(y(one.median)) r="3" fill="var(--c0)" {
                        title { (date(runs[*index].1.started)) ": " (metric.say(one.median)) " (" (figure(one.low)) " … " (figure(one.high)) ")" }
                    }
                }
            }
            " " (metric.say(newest.median))
        } @else { "–" }
    }
}
