//! The host's hottest symbols while a cell is measured, where `perf` is there.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::process::{Process, ProcessReaper};
use crate::results::Symbol;

/// How many symbols are kept.
const SYMBOLS: usize = 40;

/// A recording.
pub struct Recording {
    perf: Process,
    file: std::path::PathBuf,
}

/// Starts recording all processors, after `ramp`.
///
/// By the clock, which a virtual machine has too; and 99 times a second, which disturbs little and in step with nothing.
///
/// # Errors
/// There is no `perf`, in one line.
pub fn record(reaper: &Arc<ProcessReaper>, ramp: Duration, raw: &Path) -> Result<Recording, String> {
    if crate::stack::find("perf").is_none() {
        return Err("no profiles: perf is not installed: it comes with the package linux-perf".into());
    }
    let file = raw.with_extension("perf");
    let mut command = Command::new("perf");
    command.args(["record", "-q", "-a", "-e", "cpu-clock", "-F", "99", "-D", &ramp.as_millis().to_string(), "-o"]);
    command.arg(&file).stdout(Stdio::piped());
    let perf = reaper.start(command).map_err(|error| format!("no profiles: perf: {error}"))?;
    Ok(Recording { perf, file })
}

impl Recording {
    /// Ends it, and tells the hottest symbols.
    ///
    /// # Errors
    /// `perf` has recorded nothing, mostly because it was not allowed to look: what it said, in one line.
    pub fn symbols(self) -> Result<Vec<Symbol>, String> {
        let (_, said) = self.perf.end();
        let mut report = Command::new("perf");
        report.args(["report", "--stdio", "-q", "--no-children", "-g", "none", "-s", "symbol", "-i"]).arg(&self.file);
        let output = report.stdin(Stdio::null()).output();
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        // What it was made of is large, and of no use on another machine.
        let _ = std::fs::remove_file(&self.file);
        let symbols = symbols(&text);
        if symbols.is_empty() { Err(complaint(&said)) } else { Ok(symbols) }
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

/// Lines such as `     2.41%  [k] cpupri_set`; what is no line of the table has no percent sign first.
fn symbols(report: &str) -> Vec<Symbol> {
    let line = |line: &str| {
        let (percent, rest) = line.trim().split_once('%')?;
        let name = rest.trim_start().split_once("] ").map_or(rest, |(_, name)| name).trim();
        // Newer ones have columns behind it, of what this report does not ask for.
        let name = name.split("  ").next().unwrap_or(name);
        Some(Symbol { name: name.to_owned(), percent: percent.trim().parse().ok()? })
    };
    report.lines().filter_map(line).filter(|symbol| !symbol.name.is_empty()).take(SYMBOLS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_a_list_of_symbols() {
        let report = "# Samples: 5\n\n     2.41%  [k] cpupri_set\n     0.75%  [.] a::b<c>      -      -\n";
        let symbol = |name: &str, percent| Symbol { name: name.into(), percent };
        assert_eq!(symbols(report), [symbol("cpupri_set", 2.41), symbol("a::b<c>", 0.75)]);
    }

    #[test]
    fn a_perf_that_may_not_look_says_so() {
        let said = ["Error:", "Access to performance monitoring and observability operations is limited."];
        let complaint = complaint(&said.map(str::to_owned));
        assert!(complaint.starts_with("no profiles: Access to performance monitoring"), "{complaint}");
        assert!(super::complaint(&[]).starts_with("no profiles: perf recorded nothing"));
    }
}
