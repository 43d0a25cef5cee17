//! Runs of fio made elsewhere, as results.
//!
//! Each file is a subject and each group of jobs in it a load, so that files with the same jobs can be compared.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::UNIX_EPOCH;

use crate::plan::Plan;
use crate::results::{Cell, CellId, FORMAT, Host, Outcome, Run, Warning};
use crate::runner::brief;
use crate::stack::fio;

/// What the warning of an imported run is about.
const IMPORTED: &str = "imported";

/// Brings in some files of `fio --output-format=json`, each `FILE` or `NAME=FILE`. Several of one name are repetitions.
///
/// # Errors
/// A file does not exist, or is no output of fio's.
pub fn import(files: &[String]) -> Result<Run, String> {
    let mut cells: Vec<Cell> = Vec::new();
    let (mut subjects, mut repetitions) = (Vec::new(), BTreeMap::<String, u32>::new());
    for word in files {
        let (name, path) = match word.split_once('=') {
            Some((name, path)) if !name.contains('/') => (name.to_owned(), Path::new(path)),
            _ => (stem(Path::new(word)), Path::new(word)),
        };
        let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let text = fs::read_to_string(path).map_err(|error| told(&error))?;
        let groups = fio::groups(&text).map_err(|error| told(&error))?;
        let modified = fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
        let started = modified.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |time| time.as_secs());
        let repetition = repetitions.entry(name.clone()).or_insert(0);
        let mut loads = BTreeMap::<String, u32>::new();
        for group in &groups {
            // fio lets two jobs have one name.
            let seen = loads.entry(group.name.clone()).or_insert(0);
            let load = if *seen == 0 { group.name.clone() } else { format!("{} {}", group.name, *seen + 1) };
            *seen += 1;
            let outcome = match fio::measurement(std::slice::from_ref(group)) {
                Some(measurement) => Outcome::Measured(Box::new(measurement)),
                None => Outcome::Failed { reason: "fio did nothing in this job".into(), log: Vec::new() },
            };
            let id = CellId { load, subject: name.clone(), repetition: *repetition, point: 0 };
            cells.push(Cell { id, started, outcome });
        }
        *repetition += 1;
        if !subjects.contains(&name) {
            subjects.push(name);
        }
    }
    let (first, last) = (cells.iter().map(|cell| cell.started).min(), cells.iter().map(|cell| cell.started).max());
    let most = repetitions.values().copied().max().unwrap_or(1);
    let plan = plan(&subjects, &cells, most)?;
    let warnings = std::iter::once(unknown()).chain(brief(&plan, &cells)).collect();
    Ok(Run {
        format: FORMAT,
        plan,
        scale: 1.0,
        seed: 0,
        only: None,
        peaks: BTreeMap::new(),
        job_files: BTreeMap::new(),
        started: first.unwrap_or(0),
        ended: Some(last.unwrap_or(0)),
        host: Host { warnings, ..Host::default() },
        cells,
        incidents: Vec::new(),
    })
}

/// `randread` of `/tmp/randread.json`.
fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

fn unknown() -> Warning {
    let text = "fio's own results, made elsewhere: nobody here saw the machine, nor who spent its CPU time";
    Warning { about: IMPORTED.into(), text: text.into() }
}

/// Whether a run was imported from fio: only the names of its loads are known.
pub fn is_imported(run: &Run) -> bool {
    run.host.warnings.iter().any(|warning| warning.about == IMPORTED)
}

/// A plan with the subjects and loads that were found, for the report.
fn plan(subjects: &[String], cells: &[Cell], repetitions: u32) -> Result<Plan, String> {
    let names = |names: Vec<&str>| -> Vec<toml::Value> {
        let table = |name: &str| toml::Table::from_iter([("name".to_owned(), name.into())]);
        names.into_iter().map(|name| table(name).into()).collect()
    };
    let mut loads: Vec<&str> = Vec::new();
    for cell in cells {
        if !loads.contains(&cell.id.load.as_str()) {
            loads.push(&cell.id.load);
        }
    }
    let mut subjects = names(subjects.iter().map(String::as_str).collect());
    for subject in subjects.iter_mut().filter_map(toml::Value::as_table_mut) {
        subject.insert("stack".into(), "host".into());
    }
    let mut plan = toml::Table::new();
    plan.insert("name".into(), "import".into());
    plan.insert("title".into(), "What fio measured elsewhere".into());
    plan.insert("repetitions".into(), i64::from(repetitions).into());
    plan.insert("noise-floor".into(), false.into());
    plan.insert("disk".into(), toml::Table::from_iter([("type".to_owned(), toml::Value::from("file"))]).into());
    plan.insert("subject".into(), subjects.into());
    plan.insert("load".into(), names(loads).into());
    plan.try_into().map_err(|error: toml::de::Error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(job: &str, ios: u64) -> String {
        format!(
            r#"{{ "jobs": [ {{ "jobname": "{job}", "error": 0, "job_runtime": 1000, "usr_cpu": 1, "sys_cpu": 1,
            "read": {{ "io_bytes": 4096, "runtime": 1000, "total_ios": {ios}, "clat_ns": {{ "mean": 7.0, "max": 9,
            "percentile": {{ "50.000000": 6 }} }} }}, "write": {{ "total_ios": 0 }} }} ] }}"#
        )
    }

    #[test]
    fn files_are_subjects_and_those_of_one_name_repetitions() {
        let place = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = place.path().join(name);
            fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let (old, new) = (file("old.json", &output("a", 10)), file("new.json", &output("a", 20)));
        let again = file("again.json", &output("a", 11));
        let run = import(&[old, new, format!("old={again}")]).unwrap();
        let ids: Vec<_> = run.cells.iter().map(|cell| (cell.id.subject.as_str(), cell.id.repetition)).collect();
        assert_eq!(ids, [("old", 0), ("new", 0), ("old", 1)]);
        let Outcome::Measured(measurement) = &run.cells[1].outcome else { panic!("{:?}", run.cells[1]) };
        assert_eq!((measurement.requests(), measurement.latency(|latency| latency.p50)), (20, Some(6.0)));
        assert_eq!((run.plan.subjects.len(), run.plan.loads.len(), run.plan.repetitions), (2, 1, 2));
        assert_eq!(run.host.warnings.len(), 1);
        let short = file("short.json", &output("a", 4096).replace("\"runtime\": 1000", "\"runtime\": 1"));
        let warned = import(&[short]).unwrap().host.warnings.remove(1).text;
        assert!(warned.starts_with("1 cells were over within 50 ms, such as 'short' under a after 1 ms: "), "{warned}");
    }

    #[test]
    fn a_job_that_only_a_later_file_has_is_missing_in_the_others() {
        let place = tempfile::tempdir().unwrap();
        let file = |name: &str, jobs: &[&str]| {
            let of =
                |job: &&str| output(job, 10).split_once('[').unwrap().1.trim_end().trim_end_matches("] }").to_owned();
            let path = place.path().join(name);
            let jobs = jobs.iter().map(of).collect::<Vec<_>>().join(", ");
            fs::write(&path, format!("{{ \"jobs\": [ {jobs} ] }}")).unwrap();
            path.display().to_string()
        };
        let words =
            [("old", "1", &["a"][..]), ("old", "2", &["a", "b"]), ("new", "3", &["a"]), ("new", "4", &["a", "b"])];
        let words = words.map(|(subject, name, jobs)| format!("{subject}={}", file(name, jobs)));
        let run = import(&words).unwrap();
        let names: Vec<_> = run.plan.loads.iter().map(|load| load.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        let gaps = crate::analysis::Analysis::new(&run).gaps();
        assert_eq!(gaps, "; old under b was measured in 1 of 2 repetitions only, as in 1 other places");
    }

    #[test]
    fn what_is_not_fios_is_named() {
        let error = import(&["/nowhere/x.json".into()]).unwrap_err();
        assert!(error.starts_with("/nowhere/x.json: No such file"), "{error}");
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "hello").unwrap();
        let error = import(&[file.path().display().to_string()]).unwrap_err();
        assert!(error.ends_with(": it has no JSON"), "{error}");
    }
}
