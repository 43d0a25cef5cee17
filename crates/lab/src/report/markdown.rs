//! `report.md`: the page's tables, for a mail or a commit.

use super::tables::Grid;
use super::{Raw, machine, published, tables};
use crate::analysis::Analysis;

/// The text.
pub fn text(analysis: &Analysis<'_>) -> String {
    let run = analysis.run;
    let said = [run.plan.title.as_str(), run.plan.about.trim(), run.plan.answers.trim(), &machine::line(run)]
        .map(str::to_owned);
    let mut text = format!("# {}\n", said.into_iter().filter(|said| !said.is_empty()).collect::<Vec<_>>().join("\n\n"));
    text += &format!("\n**{}**\n", analysis.verdict());
    for said in tables::headlines(analysis) {
        text += &format!("\n> **{said}**\n");
    }
    for warning in &run.host.warnings {
        text += &format!("\n> **{}**: {}\n", warning.about, warning.text);
    }
    let advice = analysis.advice();
    if !advice.is_empty() {
        text += "\n## Which option should I choose?\n\n";
        for one in &advice {
            text += &format!("- **{}**: {}. {}.\n", one.aim, one.choice, one.reasons.join("; "));
        }
    }
    section(&mut text, "Verdicts", &tables::summary(analysis));
    section(&mut text, "Every comparison", &tables::verdicts(analysis));
    for figure in analysis.figures() {
        section(&mut text, &format!("{}: {}", figure.id, figure.title), &tables::chart(&figure, analysis));
        if let Some(beside) = figure.published.and_then(|table| published::beside(table, analysis)) {
            section(&mut text, beside.title, &beside.grid);
            beside.remark.iter().for_each(|remark| text += &format!("\n{remark}\n"));
        }
    }
    section(&mut text, "CPU time per I/O", &tables::ledger(analysis));
    section(&mut text, "Hottest symbols", &tables::symbols(analysis, &Raw::default()));
    section(&mut text, "What went wrong", &tables::unmeasured(analysis));
    section(&mut text, "Incidents", &tables::incidents(analysis));
    section(&mut text, "The machine", &machine::fingerprint(run));
    text
}

/// A heading and a table; nothing of an empty one.
fn section(text: &mut String, title: &str, grid: &Grid) {
    if grid.rows.is_empty() {
        return;
    }
    *text += &format!("\n## {title}\n\n");
    let line =
        |cells: &[String]| format!("| {} |\n", cells.iter().map(|cell| escaped(cell)).collect::<Vec<_>>().join(" | "));
    let names: Vec<String> = grid.columns.iter().map(|name| name.trim_start_matches('#').to_owned()).collect();
    let rules: Vec<String> =
        grid.columns.iter().map(|name| if name.starts_with('#') { "---:" } else { "---" }.to_owned()).collect();
    *text += &line(&names);
    *text += &format!("|{}|\n", rules.join("|"));
    grid.rows.iter().for_each(|row| *text += &line(&row.cells));
}

/// Text in a cell of a table.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('|', "\\|").replace('<', "&lt;").replace(['\n', '\r'], " ")
}
