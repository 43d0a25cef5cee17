//! `egret replay`: recorded waits under every policy, as a table, as JSON or as a picture.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use egret_lab::replay::{Contender, Named, Nanos, PolicyKind, Row, Terms, generated};
use egret_vocabulary::nearest::did_you_mean;

/// Replay recorded waits under every polling policy, and show what each would have cost.
#[derive(Args, Clone, Debug, Default)]
#[command(after_help = "docs/polling.md explains the columns, and how to record your own waits.")]
pub struct Replay {
    /// Traces: files of egret serve --record-waits, builtin:NAME, or builtin:all
    #[arg(value_name = "FILE", required_unless_present = "list")]
    pub traces: Vec<String>,

    /// Only these policies [default: all but fixed, whose best has a row of its own]
    #[arg(long = "policy", value_name = "POLICY", value_delimiter = ',', value_parser = policy)]
    pub policies: Vec<PolicyKind>,
    /// Nanoseconds of CPU that one nanosecond of latency is worth (poll-price) [default: 1]
    #[arg(long, value_name = "N")]
    pub price: Option<u32>,
    /// What a block costs, at price 1 [default: what the trace says]
    #[arg(long, value_name = "NS")]
    pub k: Option<u64>,
    /// No wait spins longer than this [default: each policy's own]
    #[arg(long, value_name = "NS")]
    pub poll_max_ns: Option<u64>,
    /// Print every row as JSON instead of a table
    #[arg(long)]
    pub json: bool,
    /// Draw CPU against latency; of one trace
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Name the traces that ship with Egret
    #[arg(long, exclusive = true)]
    pub list: bool,
}

fn policy(name: &str) -> Result<PolicyKind, String> {
    let known = PolicyKind::ALL.iter().map(|kind| kind.as_str());
    name.parse().map_err(|error| format!("{error}{}", did_you_mean(name, known)))
}

/// Runs `egret replay`.
pub fn run(arguments: &Replay) -> Result<()> {
    if arguments.list {
        return crate::print(&generated().map(|(name, note)| format!("{name:<20}  {note}\n")).collect::<String>());
    }
    let traces = arguments.traces.iter().map(|word| Named::find(word)).collect::<Result<Vec<_>, _>>()?.concat();
    let terms = Terms {
        k: arguments.k.map(Nanos),
        price: arguments.price,
        max: arguments.poll_max_ns.map(Nanos),
        policies: arguments.policies.clone(),
    };
    let rows = traces.iter().map(|named| terms.replay(named)).collect::<Result<Vec<_>, _>>()?;
    if let Some(path) = &arguments.svg {
        let ([named], [rows]) = (&traces[..], &rows[..]) else {
            bail!("--svg draws one trace, and {} were given", traces.len());
        };
        std::fs::write(path, terms.picture(named, rows)).with_context(|| path.display().to_string())?;
    }
    if arguments.json {
        return crate::print(&format!("{:#}\n", serde_json::json!(rows.concat())));
    }
    let tables: Vec<_> = traces.iter().zip(&rows).map(|(named, rows)| table(named, rows)).collect();
    crate::print(&tables.join("\n"))
}

/// One trace's heading and its table.
fn table(named: &Named, rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header([
        "policy",
        "cost / optimum",
        "cost / best fixed",
        "spin found",
        "spin wasted",
        "blocks",
        "added latency",
    ]);
    for row in rows {
        let name = match (row.contender, row.window_ns) {
            (Contender::BestFixed(_), Some(window)) => format!("best-fixed ({})", time(window)),
            (contender, _) => contender.to_string(),
        };
        table.add_row([
            name,
            format!("{:.3}", row.competitive_ratio),
            format!("{:.3}", row.against_best_fixed),
            time(row.spin_found_ns),
            time(row.spin_wasted_ns),
            row.blocks.to_string(),
            time(row.added_latency_ns),
        ]);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if index > 0 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let Named { name, trace } = named;
    let mut text = name.clone();
    if let Some(row) = rows.first() {
        text += &format!(": {} waits, K = {} at poll-price {}", row.waits, time(row.k_ns), row.price);
        if let Some(max) = row.poll_max_ns {
            text += &format!(", poll-max-ns {}", time(max));
        }
    }
    if trace.lost > 0 {
        text += &format!("; {} older ones were lost", trace.lost);
    }
    if !trace.note.is_empty() {
        text += &format!("\n{}", trace.note);
    }
    let lines = table.lines().map(|line| line.trim_end().to_owned());
    text + "\n" + &lines.collect::<Vec<_>>().join("\n") + "\n"
}

/// A time in the unit that suits it.
fn time(ns: u64) -> String {
    let ns = ns as f64;
    match ns {
        _ if ns < 1e3 => format!("{ns} ns"),
        _ if ns < 1e6 => format!("{:.1} us", ns / 1e3),
        _ if ns < 1e9 => format!("{:.1} ms", ns / 1e6),
        _ => format!("{:.1} s", ns / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_in_the_unit_that_suits_them() {
        let shown = [0, 999, 1_000, 32_768, 1_500_000, 2_000_000_000].map(time);
        assert_eq!(shown, ["0 ns", "999 ns", "1.0 us", "32.8 us", "1.5 ms", "2.0 s"]);
    }
}
