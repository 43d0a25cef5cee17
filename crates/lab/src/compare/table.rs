//! A comparison in words, for a terminal or a mail.

use std::fmt::Write as _;

use comfy_table::{Table, presets};

use super::{Comparison, Difference, Role, Row};
use crate::analysis::figure;
use crate::analysis::profile::Share;
use crate::results::place;
use crate::statistics::{Estimate, Verdict};

impl Comparison {
    /// The whole comparison as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        self.write_differences(&mut text);
        self.write_rows(&mut text);
        self.write_symbols(&mut text);
        for cell in &self.new {
            let _ = writeln!(text, "measured in the second run alone: {cell}");
        }
        if self.runs.iter().all(|runs| *runs < 2) {
            text.push_str(
                "one run each: what differs from one boot or layout to the next is in no interval; several runs show it: \
                 egret compare A1 A2 A3 -- B1 B2 B3\n",
            );
        }
        for (which, of_one_boot) in ["first", "second"].into_iter().zip(self.of_one_boot) {
            if of_one_boot {
                let _ = writeln!(
                    text,
                    "the {which} runs are all of one boot: what differs from one boot to the next is in no interval"
                );
            }
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
            let shown = |value: Option<f64>| value.map_or("-".into(), figure);
            let ratio = row.ratio.as_ref();
            table.add_row([
                row.place(),
                row.subject.clone(),
                row.metric.label(),
                shown(row.a),
                shown(row.b),
                ratio.map_or("-".into(), |ratio| format!("{:.3}", ratio.ratio)),
                ratio.map_or("-".into(), interval),
                row.word(),
            ]);
        }
        let _ = writeln!(text, "\n{table}\n");
    }

    fn write_symbols(&self, text: &mut String) {
        for moved in &self.symbols.moved {
            let share = |share: Option<Share>| share.map_or_else(|| "-".into(), |share| share.text());
            let (a, b, [by, low, high]) = (share(moved.a), share(moved.b), moved.by);
            let comms = moved.comms.iter().map(|comm| format!(", in {comm}")).collect::<String>();
            let _ = writeln!(
                text,
                "{}: {a} -> {b} of samples, {by:+.2} [{low:+.2}, {high:+.2}] ({}, {}{comms})",
                moved.symbol, moved.subject, moved.load
            );
        }
        if let (Some([a, b]), Some(least)) = (self.symbols.samples, self.symbols.least_seen()) {
            let _ = writeln!(
                text,
                "profiles of {a} and {b} samples or more: of a symbol with 1 % of them a move by {least:.2} % can be seen; \
                 more repetitions see less"
            );
        }
    }
}

fn interval(ratio: &Estimate) -> String {
    if ratio.high.is_finite() { format!("{:.3}..{:.3}", ratio.low, ratio.high) } else { "unknown".into() }
}

impl Row {
    /// The load, and of a curve its point.
    pub(super) fn place(&self) -> String {
        place(&self.load, self.point)
    }

    /// The verdict in a word or two, or why there is none.
    fn word(&self) -> String {
        let word = match &self.decision {
            Ok(Verdict::Pass) => "pass".into(),
            Ok(Verdict::Fail) => "FAIL".into(),
            Ok(Verdict::CantTell { more_pairs: Some(more) }) if self.note.is_none() => {
                format!("can't tell ({more} more would)")
            }
            Ok(Verdict::CantTell { .. }) => "can't tell".into(),
            Err(why) => format!("- ({why})"),
        };
        self.note.as_ref().map_or(word.clone(), |note| format!("{word}: {note}"))
    }

    /// The row in a sentence.
    pub(super) fn sentence(&self) -> String {
        let Self { metric, a, b, ratio, .. } = self;
        let (Some(a), Some(b), Some(ratio)) = (a, b, ratio) else {
            return format!("{}: {}", metric.name(), self.word());
        };
        format!(
            "{} {} -> {}, ratio {:.3} ({}): {}",
            metric.name(),
            figure(*a),
            metric.say(*b),
            ratio.ratio,
            interval(ratio),
            self.word()
        )
    }
}
