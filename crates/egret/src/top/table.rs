//! Rates as cells of a table, on a screen or as plain text.

use super::rates::{Flow, Rates, ThreadRates};

/// The values of an I/O thread's columns.
pub const THREADS: [&str; 10] =
    ["iothread", "policy", "max us", "window us", "work %", "found %", "wasted %", "sleep %", "hits %", "kicks/s"];

/// The values of the columns of exports and queues.
pub const FLOWS: [&str; 9] =
    ["export", "queues", "iothread", "IOPS", "MB/s", "in flight", "p50 us", "p99 us", "errors/s"];

pub fn thread_cells(thread: &ThreadRates) -> [String; THREADS.len()] {
    let percent = |share: f64| format!("{:.1}", 100.0 * share);
    [
        thread.id.clone(),
        thread.policy.clone(),
        micros(Some(thread.poll_max_ns)),
        micros(Some(thread.window_ns)),
        percent(thread.work),
        percent(thread.found),
        percent(thread.wasted),
        percent(thread.sleep),
        thread.hits.map_or_else(|| "-".to_owned(), percent),
        format!("{:.0}", thread.kicks),
    ]
}

pub fn flow_cells(flow: &Flow) -> [String; FLOWS.len()] {
    [
        flow.name.clone(),
        flow.queues.to_string(),
        flow.iothread.clone(),
        format!("{:.0}", flow.iops),
        format!("{:.1}", flow.bytes / 1e6),
        // Which is wider than what stands above it, so that it is seen.
        if flow.stopped { format!("{} stopped", flow.in_flight) } else { flow.in_flight.to_string() },
        micros(flow.p50_ns),
        micros(flow.p99_ns),
        format!("{:.0}", flow.errors),
    ]
}

fn micros(ns: Option<u64>) -> String {
    match ns {
        None => "-".to_owned(),
        // What `busy` has for a window is no length.
        Some(ns) if ns >= u64::MAX / 2 => "always".to_owned(),
        Some(ns) => format!("{:.1}", ns as f64 / 1e3),
    }
}

/// Columns of numbers end where those above and below them end; names begin there.
pub const fn is_number(column: usize, columns: &[&str]) -> bool {
    !matches!(columns[column].as_bytes(), b"iothread" | b"policy" | b"export")
}

/// Two tables, for programs and for paper.
pub fn plain(rates: &Rates) -> String {
    let threads: Vec<_> = rates.threads.iter().map(thread_cells).collect();
    let flows: Vec<_> = rates.exports.iter().map(flow_cells).collect();
    format!("{}\n{}", lines(&THREADS, &threads), lines(&FLOWS, &flows))
}

fn lines<const N: usize>(heads: &[&str; N], rows: &[[String; N]]) -> String {
    let heads_row = heads.map(str::to_owned);
    let all = || std::iter::once(&heads_row).chain(rows);
    let widths: Vec<usize> =
        (0..N).map(|at| all().map(|row| row[at].chars().count()).max().unwrap_or_default()).collect();
    let line = |row: &[String; N]| {
        let cells = row.iter().enumerate().map(|(at, cell)| {
            let width = widths[at];
            if is_number(at, heads) { format!("{cell:>width$}") } else { format!("{cell:width$}") }
        });
        format!("{}\n", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    all().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::rates::{rates, tests::snapshot};

    #[test]
    fn plain_text_has_a_line_for_each_thread_and_each_export() {
        let text = plain(&rates(&snapshot(1), &snapshot(2)));
        let expected = "\
iothread  policy      max us  window us  work %  found %  wasted %  sleep %  hits %  kicks/s
io0       low-regret    50.0       12.0    30.0     25.0       5.0     40.0    75.0       20

export  queues  iothread   IOPS  MB/s  in flight  p50 us  p99 us  errors/s
e0           2  io0        1000   4.1          7    10.0    90.0         0
e1           2  io0       20000  81.9          7    10.0    90.0         0
";
        assert_eq!(text, expected);
    }
}
