//! The host's hottest symbols while a cell is measured, where `perf` is there.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::process::{Process, ProcessReaper};
use crate::results::{SYMBOLS, Symbol};

/// How many comms of a symbol are told apart: the rest of it has none.
const COMMS: usize = 3;
/// How often it looks at each processor, in a second: in step with nothing.
const FREQUENCY: &str = "997";
/// What kind of a cell's files its call graphs are.
pub const CALL_GRAPH: &str = "callgraph";
/// What parts columns: no comm and no symbol has it.
const BETWEEN: &str = "\u{1}";

/// A recording.
pub struct Recording {
    perf: Process,
    file: PathBuf,
    /// A queue that it reads `enable` and `disable` from. Open for reading too, so that it has no end.
    pub control: File,
}

/// Starts a recording of all processors, which looks when it is told to, or `from_begin`. With call graphs.
///
/// By the clock, which a virtual machine has too.
///
/// # Errors
/// There is no `perf`, in one line.
pub fn record(reaper: &Arc<ProcessReaper>, from_begin: bool, raw: &Path) -> Result<Recording, String> {
    if crate::stack::find("perf").is_none() {
        return Err("no profiles: perf is not installed: it comes with the package linux-perf".into());
    }
    let (file, fifo) = (raw.with_extension("perf"), raw.with_extension("control"));
    let failed = |error: io::Error| format!("no profiles: perf: {error}");
    let control = queue(&fifo).map_err(failed)?;
    let mut command = Command::new("perf");
    command.args(["record", "-q", "-a", "-g", "-e", "cpu-clock", "-F", FREQUENCY]);
    command.args(["-D", if from_begin { "0" } else { "-1" }]);
    command.arg(format!("--control=fifo:{}", fifo.display())).arg("-o").arg(&file).stdout(Stdio::piped());
    let perf = reaper.start(command).map_err(failed);
    Ok(Recording { control, perf: perf?, file })
}

/// A new queue. A lab that was killed has left one.
fn queue(path: &Path) -> io::Result<File> {
    let _ = fs::remove_file(path);
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    File::options().read(true).write(true).open(path)
}

impl Recording {
    /// Ends it, and tells how many samples it has, and the hottest symbols. Call graphs are kept beside the cell's raw
    /// output.
    ///
    /// # Errors
    /// `perf` has recorded nothing, mostly because it was not allowed to look: what it said, in one line.
    pub fn profile(self) -> Result<(u64, Vec<Symbol>), String> {
        let (_, said) = self.perf.end();
        let report = |how: &[&str]| {
            let mut report = Command::new("perf");
            report.args(["report", "--stdio", "-q", "--no-children"]).args(how).arg("-i").arg(&self.file);
            let output = report.stdin(Stdio::null()).output();
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
        };
        let found = symbols(&report(&["-g", "none", "-F", "sample,comm,sym", "-t", BETWEEN]));
        // For people; failing to keep it does not fail the measurement.
        let graph = report(&["-g", "caller,0.5,callee", "--percent-limit", "1", "-s", "comm,sym"]);
        let _ = fs::write(self.file.with_extension(CALL_GRAPH), graph);
        // What they were made of is large, and of no use on another machine.
        let _ = fs::remove_file(&self.file);
        let _ = fs::remove_file(self.file.with_extension("control"));
        if found.1.is_empty() { Err(complaint(&said)) } else { Ok(found) }
    }
}

/// Why there is no symbol, from what perf has said.
fn complaint(said: &[String]) -> String {
    let why = said.iter().map(|line| line.trim()).find(|line| !line.is_empty() && *line != "Error:");
    let why = why.unwrap_or("perf recorded nothing");
    format!(
        "no profiles: {why} (as root, or with kernel.perf_event_paranoid=-1 and kernel.kptr_restrict=0, there are some)"
    )
}

/// All samples, and the hottest symbols, of lines such as `123 ^A fio ^A [k] cpupri_set`.
fn symbols(report: &str) -> (u64, Vec<Symbol>) {
    let line = |line: &str| {
        let mut words = line.split(BETWEEN).map(str::trim);
        let (count, comm, name) = (words.next()?.parse::<u64>().ok()?, words.next()?, words.next()?);
        let name = name.split_once("] ").map_or(name, |(_, name)| name).trim();
        Some((count, comm.to_owned(), name.to_owned()))
    };
    let mut by_name: BTreeMap<String, Vec<(u64, String)>> = BTreeMap::new();
    report
        .lines()
        .filter_map(line)
        .for_each(|(count, comm, name)| by_name.entry(name).or_default().push((count, comm)));
    let sum = |comms: &[(u64, String)]| comms.iter().map(|(count, _)| count).sum::<u64>();
    let all: u64 = by_name.values().map(|comms| sum(comms)).sum();
    let mut hottest: Vec<_> = by_name.into_iter().collect();
    hottest.sort_by_key(|(_, comms)| Reverse(sum(comms)));
    hottest.truncate(SYMBOLS);
    let symbols = hottest.into_iter().flat_map(|(name, mut comms)| {
        comms.sort_by_key(|(count, _)| Reverse(*count));
        let rest = comms.split_off(COMMS.min(comms.len()));
        comms.extend((!rest.is_empty()).then(|| (sum(&rest), String::new())));
        let percent = move |count: u64| count as f64 * 100.0 / all as f64;
        comms.into_iter().map(move |(count, comm)| Symbol { name: name.clone(), comm, percent: percent(count) })
    });
    (all, symbols.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_lab_that_was_killed_has_left_is_in_nobodys_way() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("cell.control");
        let left = queue(&path).unwrap();
        drop(queue(&path).unwrap());
        drop(left);
    }

    #[test]
    fn a_report_is_a_list_of_symbols_with_who_ran_them() {
        let report = "# a remark\n\n 1 \u{1}io0 \u{1}[.] a::b<c>\n 3  \u{1}kworker/0:1 \u{1}[k] cpupri_set\n";
        let symbol = |name: &str, comm: &str, percent| Symbol { name: name.into(), comm: comm.into(), percent };
        let expected = [symbol("cpupri_set", "kworker/0:1", 75.0), symbol("a::b<c>", "io0", 25.0)];
        assert_eq!(symbols(report), (4, expected.to_vec()));
    }

    #[test]
    fn a_symbol_that_many_threads_run_has_all_of_its_share() {
        let line = |thread: u64| format!("{} \u{1}t{thread} \u{1}[.] spread\n", thread + 1);
        let report: String =
            (0..300).map(line).chain((0..300).map(|other| format!("9 \u{1}x \u{1}[.] s{other}\n"))).collect();
        let (all, symbols) = symbols(&report);
        let of_it = |name: &str| symbols.iter().filter(|one| one.name == name).map(|one| one.percent).sum::<f64>();
        assert!((of_it("spread") - 45_150.0 * 100.0 / all as f64).abs() < 1e-9, "{symbols:?}");
        let comms: Vec<_> = symbols[..5].iter().map(|one| (one.name.as_str(), one.comm.as_str())).collect();
        assert_eq!(comms[..4], [("spread", "t299"), ("spread", "t298"), ("spread", "t297"), ("spread", "")]);
        assert_eq!((symbols.len(), comms[4].1), (SYMBOLS - 1 + 4, "x"));
    }

    #[test]
    fn a_perf_that_may_not_look_says_so() {
        let said = ["Error:", "Access to performance monitoring and observability operations is limited."];
        let complaint = complaint(&said.map(str::to_owned));
        assert!(complaint.starts_with("no profiles: Access to performance monitoring"), "{complaint}");
        assert!(super::complaint(&[]).starts_with("no profiles: perf recorded nothing"));
    }
}
