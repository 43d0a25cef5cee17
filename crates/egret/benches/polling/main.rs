//! Polling policies side by side: the same egret, the same disks, the same load, in turns and in random order.
//!
//! `make bench-polling`, or `cargo bench -p egret --bench polling -- --help`. For every cell each policy gets a fresh
//! daemon. All of them are there at once and take turns of a tenth of a second, the others stopped meanwhile; what one
//! repetition measures is compared within that repetition only.
//!
//! | module | what it is |
//! |---|---|
//! | `cells` | what is measured: disks, clients, loads, placement |
//! | `stage` | daemons side by side, one of them awake |
//! | `ladder` | one busy disk beside many idle ones |
//! | `report` | the table, the goals, and every sample as JSON |

mod cells;
#[path = "../shared/disk.rs"]
mod disk;
mod goals;
mod ladder;
mod report;
mod stage;
#[path = "../../tests/support/mod.rs"]
mod support;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;
use egret_loadgen::machine::{self, Cores};
use egret_loadgen::random::Shuffle;

use cells::{Cell, Under};
use disk::Disk;
use report::Measured;
use stage::Contender;

/// Measures polling policies beside each other.
#[derive(Debug, Parser)]
struct Arguments {
    /// Take a few minutes: fewer cells, fewer and shorter measurements
    #[arg(long)]
    quick: bool,
    /// Repeat everything so often [default: 5]
    #[arg(long)]
    pairs: Option<usize>,
    /// Load each daemon in each cell for so long, in turns [default: 1]
    #[arg(long)]
    seconds: Option<f64>,
    /// Measure only cells whose name has all these words, such as "loop QD1 apart"; "ladder" is the idle disks
    #[arg(long, value_name = "WORDS")]
    only: Option<String>,
    /// A policy, with more of the I/O thread's properties behind commas if you like; give several
    #[arg(long = "policy", value_name = "POLICY", default_values = ["off", "weighted", "busy", "low-regret"])]
    policies: Vec<String>,
    /// Write every sample to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Name the cells, and measure nothing
    #[arg(long)]
    list: bool,
    /// What cargo passes to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

impl Arguments {
    fn pairs(&self) -> usize {
        self.pairs.unwrap_or(if self.quick { 2 } else { 5 }).max(1)
    }

    fn length(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(if self.quick { 0.5 } else { 1.0 }))
    }

    fn cells(&self) -> Vec<Cell> {
        let asked = |cell: &Cell| match &self.only {
            Some(pattern) => cell.is_called(pattern),
            None => !self.quick || cell.is_quick(),
        };
        cells::all().into_iter().filter(asked).collect()
    }
}

fn main() -> std::io::Result<()> {
    let arguments = Arguments::parse();
    let mut cells = arguments.cells();
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

    machine::allow_many_descriptors();
    let begin = Instant::now();
    let mut shuffle = Shuffle::seeded_by_the_clock();
    let mut measured = Vec::new();
    for pair in 0..arguments.pairs() {
        for (number, cell) in shuffle.of(cells.clone()).into_iter().enumerate() {
            let outcomes = stage::measure(&cell, &contenders, loop_device, arguments.length(), &mut shuffle);
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
        eprintln!("repetition {} of {} is over, {} s", pair + 1, arguments.pairs(), begin.elapsed().as_secs());
    }
    let wants_the_ladder = arguments.only.as_ref().map_or(!arguments.quick, |pattern| pattern == "ladder");
    let (rungs, idle) = if wants_the_ladder {
        let subject = contenders.last().map_or("low-regret", |contender| contender.name.as_str());
        ladder::measure(["off", subject], arguments.pairs(), arguments.length(), &mut shuffle)
    } else {
        (Vec::new(), Vec::new())
    };

    report::print(&cells, &contenders, &measured);
    report::print_ladder(&rungs, &idle);
    goals::print(&cells, &contenders, &measured);
    println!("{}", machine::fingerprint());
    if let Some(path) = &arguments.json {
        std::fs::write(path, report::json(&measured, &rungs, &idle))?;
        println!("every sample: {}", path.display());
    }
    Ok(())
}
