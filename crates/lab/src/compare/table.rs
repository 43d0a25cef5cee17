//! A comparison in words, for a terminal or a mail.

use std::fmt::Write as _;

use comfy_table::{Table, presets};

use super::{Comparison, Difference, Role, Row, Side};
use crate::analysis::figure;
use crate::statistics::Verdict;

impl Comparison {
    /// The whole comparison as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.write_differences(&mut text);
        self.write_rows(&mut text);
        self.write_symbols(&mut text);
        for (cell, side) in &self.unmatched {
            let only = if *side == Side::A { "the first" } else { "the second" };
            let _ = writeln!(text, "measured in {only} run alone: {cell}");
        }
        text
    }

    fn write_differences(&self, text: &mut String) {
        for Difference { about, a, b, role } in &self.differences {
            let mark = if *role == Role::Unlike { "unlike: " } else { "" };
            let _ = writeln!(text, "{mark}{about}: {a} -> {b}");
        }
        if self.differences.is_empty() {
            text.push_str("the same machine, programs and plan\n");
        }
    }

    fn write_rows(&self, text: &mut String) {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(["load", "subject", "metric", "A", "B", "B/A", "interval", "verdict"]);
        for row in &self.rows {
            let point = if row.point == 0 { String::new() } else { format!(", point {}", row.point) };
            let (low, high) = (row.ratio.together.low, row.ratio.together.high);
            table.add_row([
                format!("{}{point}", row.load),
                row.subject.clone(),
                row.metric.label(),
                figure(row.a),
                figure(row.b),
                format!("{:.3}", row.ratio.median),
                if high.is_finite() { format!("{low:.3}..{high:.3}") } else { "unknown".into() },
                row.word(),
            ]);
        }
        let _ = writeln!(text, "\n{table}\n");
    }

    fn write_symbols(&self, text: &mut String) {
        for moved in &self.symbols {
            let share = |share: Option<f64>| share.map_or_else(|| "-".into(), |share| format!("{share:.2} %"));
            let (a, b) = (share(moved.a), share(moved.b));
            let _ = writeln!(text, "{}: {a} -> {b} of samples ({}, {})", moved.symbol, moved.subject, moved.load);
        }
    }
}

impl Row {
    /// The verdict in a word or two, or why there is none.
    fn word(&self) -> String {
        match (self.verdict(), self.why) {
            (Some(Verdict::Pass), _) => "pass".into(),
            (Some(Verdict::Fail), _) => "FAIL".into(),
            (Some(Verdict::CantTell { more_pairs: Some(more) }), _) => format!("can't tell ({more} more would)"),
            (Some(Verdict::CantTell { more_pairs: None }), _) => "can't tell".into(),
            (None, why) => format!("- ({})", why.unwrap_or("decides nothing")),
        }
    }

    /// The row in a sentence.
    pub(super) fn sentence(&self) -> String {
        let Self { metric, a, b, ratio, .. } = self;
        format!(
            "{} {} -> {}, ratio {:.3} ({:.3}..{:.3}): {}",
            metric.name(),
            figure(*a),
            metric.say(*b),
            ratio.median,
            ratio.together.low,
            ratio.together.high,
            self.word()
        )
    }
}
