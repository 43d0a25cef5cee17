//! `egret report`: a run's report anew, or runs over time.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use egret_lab::analysis::Analysis;
use egret_lab::{report, runner};

/// Write the report of a run anew, or a page of runs over time.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Of several runs each is put beside the one before it. docs/report.md explains the pages.")]
pub struct Report {
    /// Runs of one plan, by their directories
    #[arg(value_name = "DIR", required = true)]
    runs: Vec<PathBuf>,
    /// Print one run as mails about polling have it: before and after by pattern, length, jobs and I/O threads
    #[arg(long, conflicts_with = "output")]
    mail: bool,
    /// Where the page of runs over time goes, be it of one run [default: egret-report.html, of several]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Runs `egret report`.
pub fn run(asked: &Report) -> Result<()> {
    if asked.mail {
        let [directory] = asked.runs.as_slice() else { bail!("--mail is of one run, got {}", asked.runs.len()) };
        let run = runner::read(directory)?;
        return crate::print(&report::mail(&Analysis::new(&run)).map_err(anyhow::Error::msg)?);
    }
    if let ([directory], None) = (asked.runs.as_slice(), &asked.output) {
        report::write(&runner::read(directory)?, directory).with_context(|| directory.display().to_string())?;
        return crate::print(&format!("{}\n", directory.join(report::PAGE).display()));
    }
    let output = asked.output.as_deref().unwrap_or(Path::new("egret-report.html"));
    let read = |directory: &PathBuf| Ok((link(directory, output), runner::read(directory)?));
    let runs = asked.runs.iter().map(read).collect::<Result<Vec<_>>>()?;
    let page = report::over_time(&runs).map_err(anyhow::Error::msg)?;
    std::fs::write(output, page).with_context(|| output.display().to_string())?;
    crate::print(&format!("{}\n", output.display()))
}

/// Where a run's own report is, seen from the page: beside it if both are in one folder, and else by its whole path.
fn link(directory: &Path, page: &Path) -> String {
    let report = directory.join(report::PAGE);
    let folder = page.parent().unwrap_or(Path::new(""));
    match report.strip_prefix(folder) {
        Ok(relative) => relative.display().to_string(),
        Err(_) => std::path::absolute(&report).unwrap_or(report).display().to_string(),
    }
}
