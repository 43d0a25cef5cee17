//! A run for people and for programs: `report.html`, `report.md` and `cells.csv`.
//!
//! The page is one file that asks the network for nothing: its script, ECharts and the figures are in it. What it says is
//! computed here and is in its tables; the script draws it, and answers the reader's constraints.

mod cells;
mod history;
mod html;
mod machine;
mod mail;
mod markdown;
mod published;
mod tables;

pub use history::page as over_time;
pub use mail::text as mail;

use std::path::Path;
use std::{fs, io};

use crate::analysis::Analysis;
use crate::results::Run;

/// The page's name in a run's directory.
pub const PAGE: &str = "report.html";

/// Writes all three into a directory that is there.
///
/// # Errors
///
/// What the file system says.
pub fn write(run: &Run, directory: &Path) -> io::Result<()> {
    let analysis = Analysis::new(run);
    fs::write(directory.join(PAGE), html::page(&analysis))?;
    fs::write(directory.join("report.md"), markdown::text(&analysis))?;
    cells::write(run, fs::File::create(directory.join("cells.csv"))?)
}
