//! Progress on a terminal: a bar, and a line for each cell; elsewhere what failed, and why.

use std::time::Duration;

use egret_lab::results::{Cell, CellId, Measurement, Outcome};
use egret_lab::runner::{Progress, Runner};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar on the terminal.
pub(super) struct Bar {
    bar: ProgressBar,
    is_shown: bool,
}

impl Bar {
    pub(super) fn new(runner: &Runner, is_shown: bool) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        if is_shown {
            bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(4));
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {prefix}: {wide_msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_prefix("beginning");
            bar.set_length(runner.total() as u64);
            bar.set_position(runner.run().cells.len() as u64);
        }
        for warning in runner.run().host.warnings.iter().filter(|_| is_shown) {
            eprintln!("warning: {}", warning.text);
        }
        Self { bar, is_shown }
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

impl Progress for Bar {
    fn measuring(&mut self, id: &CellId) {
        self.bar.set_message(name(id));
    }

    fn ended(&mut self, cell: &Cell, done: usize, total: usize, left: Duration) {
        self.bar.set_length(total as u64);
        self.bar.set_position(done as u64);
        self.bar.set_prefix(time_left(left));
        match cell.outcome {
            // Who watches no terminal is to know why, too.
            Outcome::Failed { .. } => self.bar.suspend(|| eprintln!("{}", line(cell))),
            _ => self.says(&line(cell)),
        }
    }

    fn says(&mut self, text: &str) {
        if self.is_shown {
            self.bar.suspend(|| eprintln!("{text}"));
        }
    }
}

fn name(id: &CellId) -> String {
    format!("{}, {}, repetition {}", id.place(), id.subject, id.repetition + 1)
}

fn line(cell: &Cell) -> String {
    let what = match &cell.outcome {
        Outcome::Measured(measurement) => figures(measurement),
        Outcome::Failed { reason, .. } => format!("failed: {reason}"),
        Outcome::Impossible { reason } => format!("impossible here: {reason}"),
    };
    format!("{}: {what}", name(&cell.id))
}

fn figures(measurement: &Measurement) -> String {
    let seconds = measurement.seconds.max(1e-9);
    let mut parts = vec![format!("{:.0} IOPS", measurement.requests() as f64 / seconds)];
    if measurement.bytes() > measurement.requests() * 65_536 {
        parts.push(format!("{:.0} MB/s", measurement.bytes() as f64 / seconds / 1e6));
    }
    parts.extend(measurement.mean_latency().map(|mean| format!("{:.1} us", mean / 1e3)));
    if let (Some(cpu), 1..) = (measurement.cpu.serving(), measurement.requests()) {
        parts.push(format!("{:.2} us CPU per I/O", cpu as f64 / 1e3 / measurement.requests() as f64));
    }
    parts.join(", ")
}

fn time_left(left: Duration) -> String {
    match left.as_secs() {
        seconds @ 0..60 => format!("{seconds} s left"),
        seconds => format!("{}:{:02} left", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use egret_lab::results::{Latency, Ledger, Operations};

    use super::*;

    #[test]
    fn a_cell_is_one_line_whatever_became_of_it() {
        let id = CellId { load: "randread 4k QD1".into(), subject: "egret".into(), repetition: 0, point: 0 };
        let latency = Latency { mean: 99_900.0, ..Latency::default() };
        let reads = Some(Operations { requests: 1000, bytes: 4_096_000, latency });
        let cpu = Ledger { server: Some(5_000_000), ..Ledger::default() };
        let measurement = Measurement { seconds: 2.0, reads, cpu, ..Measurement::default() };
        let mut cell = Cell { id, started: 0, outcome: Outcome::Measured(Box::new(measurement)) };
        let begin = "randread 4k QD1, egret, repetition 1: ";
        assert_eq!(line(&cell), format!("{begin}500 IOPS, 99.9 us, 5.00 us CPU per I/O"));
        cell.outcome = Outcome::Failed { reason: "no".into(), log: Vec::new() };
        assert_eq!(line(&cell), format!("{begin}failed: no"));
        assert_eq!(time_left(Duration::from_secs(125)), "2:05 left");
    }
}
