//! Polling policies side by side: the same egret, the same disks, the same load, in turns and in random order.
//!
//! `make bench-polling`, or `cargo bench -p egret --bench polling -- --help`. For every cell each policy gets a fresh
//! daemon. All of them are there at once and take turns, the others stopped meanwhile; what one
//! repetition measures is compared within that repetition only. `--quick` takes a few minutes, by measuring fewer cells
//! too; `--only ladder` is one busy disk among idle ones.
//!
//! | module | what it is |
//! |---|---|
//! | `arguments` | arguments that benchmarks share |
//! | `cells` | what is measured: disks, clients, loads, placement |
//! | `deployment` | daemons side by side, one of them awake |
//! | `disk` | the disk under test, which benchmarks share |
//! | `ladder` | one busy disk beside many idle ones |
//! | `report` | the tables, and every sample as JSON |
//! | `goals` | what the figures add up to |

#[path = "../shared/arguments.rs"]
mod arguments;
mod cells;
mod deployment;
#[path = "../shared/disk.rs"]
mod disk;
mod goals;
mod ladder;
mod report;
#[path = "../../tests/support/mod.rs"]
mod support;

use std::time::{Duration, Instant};

use clap::Parser;
use egret_loadgen::machine::{self, Cores};
use egret_loadgen::random::Shuffle;

use arguments::CommonArguments;
use cells::{Cell, Under};
use deployment::{Contender, Times};
use disk::Disk;
use report::Measured;

/// Measures polling policies beside each other.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    common: CommonArguments,
    /// A policy, with more of the I/O thread's properties behind commas if you like; give several
    #[arg(long = "policy", value_name = "POLICY", default_values = [
        "off", "busy", "shared-window", "per-source-window", "weighted", "fixed,poll-max-ns=4000",
        "fixed,poll-max-ns=16000", "fixed,poll-max-ns=64000", "low-regret"
    ])]
    policies: Vec<String>,
    /// Load each daemon for so long before anything counts: policies that learn have had that long to do so
    #[arg(long, value_name = "SECONDS", default_value_t = 0.2)]
    warm_up: f64,
    /// Into how many turns a measurement is cut: one is the quickest, where many repetitions are to even out what changes meanwhile
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    turns: u32,
    /// Name the cells, and measure nothing
    #[arg(long)]
    list: bool,
}

fn main() -> std::io::Result<()> {
    let arguments = Arguments::parse();
    let common = &arguments.common;
    // Some words choose among all cells, those of a long run too.
    let is_asked_for =
        |cell: &Cell| common.chooses(&cell.name()) && (common.only.is_some() || !common.quick || cell.is_quick());
    let mut cells: Vec<Cell> = cells::all().into_iter().filter(is_asked_for).collect();
    if arguments.list {
        cells.iter().for_each(|cell| println!("{}", cell.name()));
        return Ok(());
    }
    println!("{}", machine::fingerprint());
    match Cores::of_this_machine().pair() {
        Some((client, server)) => println!("cores: apart is client on {client}, server on {server}"),
        None => println!("missing: a second core; client and server share one, unpinned"),
    }
    let needs_a_loop = cells.iter().any(|cell| cell.under == Under::Loop);
    let disk = if needs_a_loop {
        Disk::in_memory().inspect_err(|error| println!("skipped: every loop cell, which needs root ({error})")).ok()
    } else {
        None
    };
    cells.retain(|cell| cell.under != Under::Loop || disk.is_some());
    let loop_device = disk.as_ref().map(Disk::path);
    let contenders: Vec<_> = arguments.policies.iter().map(|policy| Contender::of_policy(policy)).collect();

    let pairs = common.pairs();
    let times = Times {
        warm_up: Duration::from_secs_f64(arguments.warm_up),
        length: common.length(1.0, 0.5),
        turns: arguments.turns,
    };
    machine::allow_many_descriptors();
    let begin = Instant::now();
    let mut shuffle = Shuffle::seeded_by_the_clock();
    let mut measured = Vec::new();
    for pair in 0..pairs {
        for (number, cell) in shuffle.of(cells.clone()).into_iter().enumerate() {
            let outcomes = deployment::measure(&cell, &contenders, loop_device, times, &mut shuffle);
            measured.extend(outcomes.into_iter().map(|(contender, outcome)| Measured {
                cell,
                contender,
                pair,
                outcome,
            }));
            if number % 10 == 9 {
                eprintln!("cell {} of {}, {} s", number + 1, cells.len(), begin.elapsed().as_secs());
            }
        }
        eprintln!("repetition {} of {} is over, {} s", pair + 1, pairs, begin.elapsed().as_secs());
    }
    let wants_the_ladder = common.only.as_ref().map_or(!common.quick, |pattern| pattern == "ladder");
    let (rungs, idle) = if wants_the_ladder {
        let subject = contenders.last().map_or("low-regret", |contender| contender.name.as_str());
        ladder::measure(["off", subject], pairs, times, &mut shuffle)
    } else {
        (Vec::new(), Vec::new())
    };

    report::print(&cells, &contenders, &measured);
    report::print_ladder(&rungs, &idle);
    goals::print(&cells, &contenders, &measured);
    println!("{}", machine::fingerprint());
    if let Some(path) = &common.json {
        std::fs::write(path, report::json(&measured, &rungs, &idle))?;
        println!("every sample: {}", path.display());
    }
    Ok(())
}
