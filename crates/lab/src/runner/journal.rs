//! The journal: results so far, on stable storage before the next cell begins.
//!
//! | file | what it is |
//! |---|---|
//! | `cells.jsonl` | the journal: a line for each cell that has ended and each incident, on disk before the next begins |
//! | `result.json` | the [`Run`]: written when it begins, and whole at its end and when it is interrupted |
//!
//! A line that was cut short, by a crash in the middle of it, does not count.

use std::fs::{self, File};
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::results::{Cell, FORMAT, Incident, Outcome, Run};

/// The journal's name.
pub const JOURNAL: &str = "cells.jsonl";
/// The name of the whole run.
pub const RESULT: &str = "result.json";

/// A line.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Entry {
    Cell(Cell),
    Incident(Incident),
}

/// A run's directory.
pub struct Journal {
    directory: PathBuf,
    lines: File,
    /// Keeps other labs out of the directory.
    _lock: File,
}

impl Journal {
    /// A new run in a directory that has none.
    ///
    /// # Errors
    /// There is one, or it cannot be written.
    pub fn create(directory: &Path, run: &Run) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
        let lock = lock(directory)?;
        if directory.join(RESULT).exists() {
            let error = format!("{} holds a run already", directory.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, error));
        }
        write(directory, run)?;
        let lines = File::options().append(true).create(true).open(directory.join(JOURNAL))?;
        lines.set_len(0)?;
        Ok(Self { directory: directory.into(), lines, _lock: lock })
    }

    /// A run that was interrupted, with every cell that had ended.
    ///
    /// # Errors
    /// There is none, or a newer lab wrote it, or another one is writing it now.
    pub fn resume(directory: &Path) -> io::Result<(Self, Run)> {
        let run = read(directory)?;
        let lock = lock(directory)?;
        let path = directory.join(JOURNAL);
        let text = fs::read_to_string(&path)?;
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let mut lines = File::options().read(true).write(true).open(&path)?;
        lines.set_len(whole as u64)?;
        lines.seek(SeekFrom::End(0))?;
        Ok((Self { directory: directory.into(), lines, _lock: lock }, run))
    }

    fn append(&mut self, entry: &Entry) -> io::Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        self.lines.write_all(&line)?;
        self.lines.sync_data()
    }

    /// Keeps a cell.
    ///
    /// # Errors
    /// It could not be written.
    pub fn cell(&mut self, cell: &Cell) -> io::Result<()> {
        self.append(&Entry::Cell(cell.clone()))
    }

    /// Keeps an incident.
    ///
    /// # Errors
    /// It could not be written.
    pub fn incident(&mut self, incident: &Incident) -> io::Result<()> {
        self.append(&Entry::Incident(incident.clone()))
    }

    /// Writes `result.json`.
    ///
    /// # Errors
    /// It could not be written.
    pub fn result(&self, run: &Run) -> io::Result<()> {
        write(&self.directory, run)
    }
}

/// A run as far as it has come: from the journal, where that knows more than `result.json`.
///
/// # Errors
/// There is none, it is broken, or a newer lab wrote it.
pub fn read(directory: &Path) -> io::Result<Run> {
    let path = directory.join(RESULT);
    let told = |error: &dyn std::fmt::Display| io::Error::other(format!("{}: {error}", path.display()));
    let text = fs::read_to_string(&path).map_err(|error| told(&error))?;
    let format = serde_json::from_str::<serde_json::Value>(&text).map_err(|error| told(&error))?["format"].as_u64();
    match format {
        Some(format) if format > FORMAT.into() => {
            let error = format!("a newer egret wrote it (format {format}); this one reads up to {FORMAT}");
            return Err(told(&error));
        }
        Some(_) => {}
        None => return Err(told(&"it is no result of egret bench")),
    }
    let mut run: Run = serde_json::from_str(&text).map_err(|error| told(&error))?;
    let lines = fs::read_to_string(directory.join(JOURNAL)).unwrap_or_default();
    let (mut cells, mut incidents) = (Vec::new(), Vec::new());
    for line in lines.lines() {
        match serde_json::from_str(line) {
            Ok(Entry::Cell(cell)) => cells.push(cell),
            Ok(Entry::Incident(incident)) => incidents.push(incident),
            Err(_) => break,
        }
    }
    if cells.len() > run.cells.len() {
        (run.cells, run.incidents) = (cells, incidents);
    }
    // An older lab told of who completes nothing as measured.
    for cell in &mut run.cells {
        if let Outcome::Measured(measured) = &mut cell.outcome {
            cell.outcome = std::mem::take(&mut **measured).into();
        }
    }
    Ok(run)
}

/// Written to another name and renamed, so that `result.json` is always complete.
fn write(directory: &Path, run: &Run) -> io::Result<()> {
    let part = directory.join("result.json.part");
    let mut file = File::create(&part)?;
    serde_json::to_writer_pretty(&mut file, run)?;
    file.sync_all()?;
    fs::rename(part, directory.join(RESULT))
}

fn lock(directory: &Path) -> io::Result<File> {
    let lock = File::create(directory.join(".lock"))?;
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| io::Error::other(format!("another egret bench is at work in {}", directory.display())))?;
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{CellId, Measurement, Operations};

    fn run() -> Run {
        Run::of("name = 'p'\ntitle = 't'\nsubject = []\nload = []\n[disk]\ntype = 'null'\n")
    }

    fn cell(repetition: u32) -> Cell {
        let id = CellId { load: "l".into(), subject: "s".into(), repetition, point: 0 };
        Cell { id, started: 1, outcome: Outcome::Impossible { reason: "r".into() } }
    }

    #[test]
    fn what_was_kept_is_there_after_a_crash_even_in_the_middle_of_a_line() {
        let place = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(place.path(), &run()).unwrap();
        journal.cell(&cell(0)).unwrap();
        journal.cell(&cell(1)).unwrap();
        drop(journal);
        let path = place.path().join(JOURNAL);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, format!("{text}{}", &text[..20])).unwrap();

        let (mut journal, run) = Journal::resume(place.path()).unwrap();
        assert_eq!(run.cells, [cell(0), cell(1)]);
        journal.cell(&cell(2)).unwrap();
        assert_eq!(read(place.path()).unwrap().cells, [cell(0), cell(1), cell(2)]);
    }

    #[test]
    fn what_an_older_lab_has_measured_of_who_completes_nothing_has_failed() {
        let place = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(place.path(), &run()).unwrap();
        for requests in [0, 1] {
            let reads = Some(Operations { requests, ..Operations::default() });
            let measured = Measurement { seconds: 1.0, reads, ..Measurement::default() };
            journal.cell(&Cell { outcome: Outcome::Measured(Box::new(measured)), ..cell(requests as u32) }).unwrap();
        }
        let cells = read(place.path()).unwrap().cells;
        assert_eq!([0, 1].map(|at: usize| cells[at].failure()), [Some("no request was completed"), None]);
    }

    /// A run is resumed only if its rates are those asked for, to the last digit.
    #[test]
    fn rates_are_read_as_they_were_written() {
        let place = tempfile::tempdir().unwrap();
        let peaks = (1..1_000).map(|at| (at.to_string(), 1e9 / f64::from(at) / 3.7)).collect();
        let run = Run { peaks, ..run() };
        drop(Journal::create(place.path(), &run).unwrap());
        assert_eq!(read(place.path()).unwrap().peaks, run.peaks);
    }

    #[test]
    fn two_labs_do_not_write_one_run() {
        let place = tempfile::tempdir().unwrap();
        let journal = Journal::create(place.path(), &run()).unwrap();
        let error = Journal::resume(place.path()).err().unwrap().to_string();
        assert!(error.starts_with("another egret bench is at work"), "{error}");
        drop(journal);
        let error = Journal::create(place.path(), &run()).err().unwrap().to_string();
        assert!(error.ends_with("holds a run already"), "{error}");
    }

    #[test]
    fn a_result_from_a_newer_version_is_not_guessed_at() {
        let place = tempfile::tempdir().unwrap();
        drop(Journal::create(place.path(), &Run { format: FORMAT + 1, ..run() }).unwrap());
        let error = read(place.path()).unwrap_err().to_string();
        assert!(error.ends_with("a newer egret wrote it (format 3); this one reads up to 2"), "{error}");
        fs::write(place.path().join(RESULT), "{}").unwrap();
        assert!(read(place.path()).unwrap_err().to_string().ends_with("it is no result of egret bench"));
    }
}
