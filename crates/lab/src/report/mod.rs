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

use std::collections::BTreeSet;
use std::path::Path;
use std::{fs, io};

use crate::analysis::Analysis;
use crate::results::{CellId, Run};
use crate::runner::{RAW, raw_name};

/// The page's name in a run's directory.
pub const PAGE: &str = "report.html";

/// Writes all three into a directory that is there.
///
/// # Errors
///
/// What the file system says.
pub fn write(run: &Run, directory: &Path) -> io::Result<()> {
    let analysis = Analysis::new(run);
    let raw = Raw::beside(directory);
    fs::write(directory.join(PAGE), html::page(&analysis, &raw))?;
    fs::write(directory.join("report.md"), markdown::text(&analysis))?;
    cells::write(run, fs::File::create(directory.join("cells.csv"))?)
}

/// The names of the files that a run's cells have left beside its report.
#[derive(Debug, Default)]
struct Raw(BTreeSet<String>);

impl Raw {
    /// Those that are there; none of a run that was copied without them.
    fn beside(directory: &Path) -> Self {
        let entries = fs::read_dir(directory.join(RAW)).into_iter().flatten().flatten();
        Self(entries.filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A cell's: of what kind they are, and where, seen from the page.
    fn of(&self, id: &CellId) -> impl Iterator<Item = (&str, String)> {
        let name = format!("{}.", raw_name(id));
        let from = self.0.range(name.clone()..);
        from.map_while(move |file| Some((file.strip_prefix(&name)?, format!("{RAW}/{file}"))))
    }
}
