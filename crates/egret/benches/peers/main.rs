//! Egret beside a peer: the same client, the same disk, the same options, in turns and in random order.
//!
//! `make bench`, or `cargo bench -p egret --bench peers -- --help`. With `--quick` it takes under 90 seconds. Each
//! measurement starts a fresh daemon pinned to one core, loads it from another with libblkio, and accounts the daemon's
//! CPU time per request. The contenders of a cell take turns of a fraction of a second, and what one repetition
//! measures is compared within that repetition only, so that a machine that slows down slows all.
//!
//! | module | what it is |
//! |---|---|
//! | `arguments` | arguments that benchmarks share |
//! | `cells` | what is measured: disks, depths, company, contenders |
//! | `devices` | virtio-scsi beside virtio-blk and vhost-device-scsi, with the lab's load |
//! | `load` | the client: random 4 KiB reads, so many in flight |
//! | `disk` | the disk under test |
//! | `report` | medians, ratios, the table and its JSON copy |

#[path = "../shared/arguments.rs"]
mod arguments;
mod cells;
mod devices;
#[path = "../shared/disk.rs"]
mod disk;
#[path = "../shared/load.rs"]
mod load;
mod report;
#[path = "../../tests/support/mod.rs"]
mod support;

use std::time::Instant;

use clap::Parser;

use arguments::CommonArguments;
use cells::{Cell, Contender, How, Measured, Role};
use disk::Disk;
use egret_loadgen::machine::{self, Cores};
use egret_loadgen::random::Shuffle;
use support::server::Program;

/// Measures egret beside a peer.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(flatten)]
    common: CommonArguments,
    /// Put another server in egret's place: the peer itself finds the noise
    #[arg(long, value_name = "COMMAND")]
    server_a: Option<String>,
    /// The peer
    #[arg(long, value_name = "COMMAND", default_value = "qemu-storage-daemon")]
    server_b: String,
    /// The server that virtio-scsi is compared with
    #[arg(long, value_name = "COMMAND", default_value = "vhost-device-scsi")]
    scsi_peer: String,
    /// Let the client poll for completions instead of waiting for them
    #[arg(long)]
    poll: bool,
}

impl Arguments {
    fn contenders(&self) -> Vec<Contender> {
        let subject = self.server_a.as_deref().map_or_else(Program::egret, Program::peer);
        let peer = Program::peer(&self.server_b);
        let mut name = self.server_a.clone().unwrap_or_else(|| "egret".into());
        if name == self.server_b {
            name += " (A)";
        }
        let mut contenders = vec![
            Contender { name: name.clone(), role: Role::Subject, program: subject.clone(), iothread: "poll-max-ns=0" },
            Contender { name: format!("{name}, polling"), role: Role::Polling, program: subject, iothread: "" },
        ];
        match disk::version_of(&peer) {
            Ok(version) => {
                println!("peer: {version}");
                let name = self.server_b.clone();
                contenders.push(Contender { name, role: Role::Peer, program: peer, iothread: "poll-max-ns=0" });
            }
            Err(error) => println!("missing: the peer {} ({error}); nothing to compare with", self.server_b),
        }
        contenders
    }
}

fn main() -> std::io::Result<()> {
    let arguments = Arguments::parse();
    // Paths are those of whoever called, and cargo runs a benchmark in its crate's folder.
    if let Some(place) = std::env::var_os("PWD") {
        std::env::set_current_dir(place)?;
    }
    println!("{}", machine::fingerprint());
    let contenders = arguments.contenders();
    let disk = Disk::for_this_machine()?;
    let cores = Cores::of_this_machine();
    println!("{}", cores.describe());
    let common = &arguments.common;
    let cells: Vec<Cell> = cells::all().into_iter().filter(|cell| common.chooses(&cell.name())).collect();

    let how = How { disk: &disk, cores: &cores, poll: arguments.poll, length: common.length(2.0, 0.7) };
    machine::allow_many_descriptors();
    let begin = Instant::now();
    let mut shuffle = Shuffle::seeded_by_the_clock();
    let mut measured = Vec::new();
    for pair in 0..common.pairs() {
        for cell in shuffle.of(cells.clone()) {
            let admitted = contenders.iter().filter(|contender| cell.admits(contender)).collect();
            for (contender, sample) in cells::measure(&cell, admitted, &how, &mut shuffle) {
                measured.push(Measured { cell: cell.clone(), contender, pair, sample });
            }
        }
        eprintln!("repetition {} of {} is over, {} s", pair + 1, common.pairs(), begin.elapsed().as_secs());
    }
    let idle = contenders.iter().filter(|contender| common.only.is_none() && contender.role != Role::Polling);
    let idle: Vec<_> = idle.flat_map(|contender| cells::measure_idle(contender, &cores)).collect();

    report::print(&cells, &contenders, &measured);
    report::print_idle(&idle);
    devices::compare(common, &arguments.scsi_peer, how.length, &cores, &mut shuffle);
    if let Some(path) = &common.json {
        std::fs::write(path, report::json(&measured, &idle))?;
        println!("every sample: {}", path.display());
    }
    Ok(())
}
