//! The cells: disks, clients, loads, and placement on cores.

use std::time::Duration;

use egret_loadgen::load::{Rate, RateProcess, Spec, Waiting};
use egret_loadgen::machine::Cores;

use crate::support::server::Options;

/// Requests that an open loop may have in flight: more than it ever needs.
const ROOM: u16 = 64;

/// The export's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Under {
    /// Nothing, after so many microseconds.
    Null(u32),
    /// A loop device over memory, with direct I/O.
    Loop,
}

/// How much is asked of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Demand {
    /// So many requests in flight on each disk.
    Depth(u16),
    /// So many requests a second altogether, at random times.
    PerSecond(u32),
}

/// The placement of client and server on cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The client on one core, the server on the other.
    Apart,
    /// Client, server and the kernel's threads wherever the scheduler puts them.
    Contended,
    /// The same, and another process wants half of each core.
    Beside,
}

/// One row of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub under: Under,
    pub waiting: Waiting,
    pub demand: Demand,
    pub disks: usize,
    pub placement: Placement,
}

impl Cell {
    /// What the table and `--only` call it: words, each of which can be asked for.
    pub fn name(&self) -> String {
        let under = match self.under {
            Under::Null(latency_us) => format!("null{latency_us}"),
            Under::Loop => "loop".into(),
        };
        let client = match self.waiting {
            Waiting::Polling => "polling",
            Waiting::Blocking => "blocking",
        };
        let demand = match self.demand {
            Demand::Depth(depth) => format!("QD{depth}"),
            Demand::PerSecond(rate) => format!("{}k/s", rate / 1000),
        };
        let placement = match self.placement {
            Placement::Apart => "apart",
            Placement::Contended => "contended",
            Placement::Beside => "beside",
        };
        format!("{under} {client} {demand} x{} {placement}", self.disks)
    }

    /// Whether the demand leaves the server with little to do.
    pub fn is_light(&self) -> bool {
        matches!(self.demand, Demand::PerSecond(_))
    }

    /// Whether `--quick` measures it.
    pub fn is_quick(&self) -> bool {
        let disk = matches!(self.under, Under::Loop | Under::Null(0 | 10));
        let load = match self.placement {
            Placement::Apart => matches!(self.demand, Demand::Depth(1 | 64) | Demand::PerSecond(5000)),
            Placement::Contended => matches!(self.demand, Demand::Depth(8)),
            Placement::Beside => false,
        };
        disk && load && self.disks == 1
    }

    /// The disks of a daemon's command line: nodes `d0`, `d1` and so on.
    pub fn blockdevs(&self, mut options: Options, loop_device: Option<&std::path::Path>) -> Options {
        for disk in 0..self.disks {
            let node = format!("d{disk}");
            options = match (self.under, loop_device) {
                (Under::Null(latency_us), _) => options.null(&node, &format!("latency-ns={}", latency_us * 1000)),
                (Under::Loop, Some(device)) => options.disk(&node, device, "read-only=on,cache.direct=on,aio=io_uring"),
                (Under::Loop, None) => options,
            };
        }
        options
    }

    /// The load: random reads of 4 KiB.
    pub fn spec(&self, cores: &Cores) -> Spec {
        let (iodepth, rate_iops) = match self.demand {
            Demand::Depth(depth) => (depth, None),
            Demand::PerSecond(rate) => (ROOM, Some(Rate { iops: rate.into(), process: RateProcess::Poisson })),
        };
        Spec {
            iodepth,
            rate_iops,
            waiting: self.waiting,
            cpus_allowed: cores.pair().map(|(client, _)| client).into_iter().collect(),
            ramp_time: Duration::ZERO,
            ..Spec::default()
        }
    }
}

/// Every cell.
pub fn all() -> Vec<Cell> {
    let mut cells = Vec::new();
    let unders = [Under::Null(0), Under::Null(10), Under::Null(100), Under::Loop];
    let depths = [1, 4, 8, 16, 64].map(Demand::Depth);
    let rates = [3000, 5000, 20_000].map(Demand::PerSecond);
    for waiting in [Waiting::Blocking, Waiting::Polling] {
        for under in unders {
            let cell = |demand, disks, placement| Cell { under, waiting, demand, disks, placement };
            for placement in [Placement::Apart, Placement::Contended] {
                for disks in [1, 24] {
                    cells.extend(depths.map(|demand| cell(demand, disks, placement)));
                }
                cells.extend(rates.map(|demand| cell(demand, 1, placement)));
            }
            if under == Under::Loop {
                cells.extend(depths.into_iter().chain(rates).map(|demand| cell(demand, 1, Placement::Beside)));
            }
        }
    }
    cells
}
