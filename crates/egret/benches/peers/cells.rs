//! The cells: disks, depths, idle disks beside, contenders.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use egret_loadgen::machine::{self, Cores};
use egret_loadgen::random::Shuffle;

use crate::disk::Disk;
use crate::load::{self, Load, Outcome, Tally};
use crate::support::disk::{Client, Disk as Connection};
use crate::support::scratch::Scratch;
use crate::support::server::{Options, Program, Server};

/// Exports that do nothing, beside the one that does.
const COMPANY: usize = 100;
/// Into how many slices a measurement is cut.
pub const SLICES: u32 = 10;
/// The time before measuring.
pub const WARM_UP: Duration = Duration::from_millis(200);
/// How long a daemon is watched doing nothing.
const WATCH: Duration = Duration::from_secs(2);

/// What part a contender has in the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The server in question, without spinning.
    Subject,
    /// The server in question, as it comes.
    Polling,
    /// The server that it is compared with, without spinning.
    Peer,
}

/// A server and its I/O thread's options.
#[derive(Clone, Debug)]
pub struct Contender {
    pub name: String,
    pub role: Role,
    pub program: Program,
    pub iothread: &'static str,
}

/// One row of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The engine under the disk; `None` is a disk that reads nothing.
    engine: Option<&'static str>,
    depth: usize,
    company: usize,
}

impl Cell {
    /// What the table and `--only` call it.
    pub fn name(&self) -> String {
        let engine = self.engine.unwrap_or("null");
        let company = if self.company == 0 { "alone".into() } else { format!("beside {}", self.company) };
        format!("{engine} QD{} {company}", self.depth)
    }

    /// Whether `contender` runs here: a null disk shows egret's own path, and a peer's is another.
    pub fn admits(&self, contender: &Contender) -> bool {
        self.engine.is_some() || contender.role != Role::Peer
    }
}

/// Every cell.
pub fn all() -> Vec<Cell> {
    let mut cells = Vec::new();
    for engine in [Some("native"), Some("io_uring")] {
        for depth in [1, 64] {
            for company in [0, COMPANY] {
                cells.push(Cell { engine, depth, company });
            }
        }
    }
    cells.extend([1, 64].map(|depth| Cell { engine: None, depth, company: 0 }));
    cells
}

/// What all cells share.
pub struct How<'a> {
    pub disk: &'a Disk,
    pub cores: &'a Cores,
    /// Whether the client polls.
    pub poll: bool,
    /// How long each contender is loaded in each cell.
    pub length: Duration,
}

/// One measurement of one contender in one cell.
pub struct Measured {
    pub cell: Cell,
    pub contender: Contender,
    pub pair: usize,
    pub sample: Outcome,
}

/// An idle daemon.
pub struct Idle {
    pub contender: String,
    pub exports: usize,
    pub wakeups_per_second: f64,
    pub resident: u64,
}

/// A started daemon with its busy export's socket and its idle exports' clients.
struct Deployment {
    _idle: Vec<Connection>,
    busy: PathBuf,
    server: Server,
    _scratch: Scratch,
}

/// Starts a fresh daemon on its core, with `company` idle exports whose clients are connected.
fn deploy(
    contender: &Contender,
    cores: &Cores,
    company: usize,
    disk: impl FnOnce(Options) -> Options,
) -> io::Result<Deployment> {
    let scratch = Scratch::new();
    let (busy, idle) = (scratch.path("busy"), |n: usize| scratch.path(&format!("idle{n}")));
    let mut options = disk(Options::new().iothread("io0", contender.iothread));
    options = options.export("e", "d", &busy, "iothread=io0");
    for n in 0..company {
        let node = format!("idle{n}");
        options = options.null(&node, "").export(&node, &node, &idle(n), "iothread=io0");
    }
    let server = cores.on_the_servers(|| Server::start(&contender.program, &options));
    let connected: io::Result<_> = (0..company).map(|n| connect(&idle(n), false, 4096)).collect();
    Ok(Deployment { _idle: connected?, busy, server, _scratch: scratch })
}

/// Connects with one queue; exports are read-only here, as nothing writes.
fn connect(socket: &Path, poll: bool, buffer: usize) -> io::Result<Connection> {
    let client = Client { queues: usize::from(!poll), poll_queues: usize::from(poll), read_only: true, buffer };
    Connection::connect_as(socket, client)
}

/// A contender's deployment, and its results so far.
struct Running<'a> {
    contender: &'a Contender,
    connection: Connection,
    deployment: Deployment,
    tally: Tally,
}

/// Measures `contenders` in one cell, each for `length` in all.
///
/// All are deployed at once, and in turn each is loaded for a slice of its time while the others sleep: what disturbs
/// this machine for longer than a slice disturbs all alike. A contender that fails is missing from the answer.
pub fn measure(
    cell: &Cell,
    contenders: Vec<&Contender>,
    how: &How<'_>,
    shuffle: &mut Shuffle,
) -> Vec<(Contender, Outcome)> {
    let failed = |contender: &Contender, error: &dyn std::fmt::Display| {
        println!("failed: {} with {}: {error}", cell.name(), contender.name);
    };
    let mut running = Vec::new();
    for contender in contenders {
        // The output of a server that does not start was printed with the panic.
        match catch_unwind(AssertUnwindSafe(|| enter(cell, contender, how))) {
            Ok(Ok(entered)) => running.push(entered),
            Ok(Err(error)) => failed(contender, &error),
            Err(_) => failed(contender, &"it did not start"),
        }
    }
    for slice in 0..SLICES {
        running = shuffle.of(running);
        running.retain_mut(|one| {
            let capacity = one.connection.capacity().unwrap_or_default();
            let warm_up = if slice == 0 { WARM_UP } else { WARM_UP / 10 };
            let load = Load { depth: cell.depth, capacity, warm_up, length: how.length / SLICES };
            let cpu_time = || machine::cpu_time_ns(one.deployment.server.pid()).expect("the server lives");
            let run = how.cores.on_the_clients(|| load.run(one.connection.first(), cpu_time, &mut one.tally));
            run.inspect_err(|error| failed(one.contender, error)).is_ok()
        });
    }
    running.into_iter().map(|one| (one.contender.clone(), one.tally.outcome())).collect()
}

fn enter<'a>(cell: &Cell, contender: &'a Contender, how: &How<'_>) -> io::Result<Running<'a>> {
    let deployment = deploy(contender, how.cores, cell.company, |options| match cell.engine {
        Some(engine) => options.disk("d", how.disk.path(), &format!("read-only=on,cache.direct=on,aio={engine}")),
        None => options.null("d", ""),
    })?;
    let connection = connect(&deployment.busy, how.poll, cell.depth * load::REQUEST)?;
    Ok(Running { contender, connection, deployment, tally: Tally::default() })
}

/// Watches one contender idle, with one export and with many.
pub fn measure_idle(contender: &Contender, cores: &Cores) -> Vec<Idle> {
    [0, COMPANY]
        .into_iter()
        .filter_map(|company| {
            let deployment = deploy(contender, cores, company, |options| options.null("d", "")).ok()?;
            let mut connection = connect(&deployment.busy, false, 4096).ok()?;
            connection.first().read(0, 4096).ok()?;
            let sleeps = || deployment.server.sleeps().iter().map(|(_, sleeps)| sleeps).sum::<u64>();
            // What the read has stirred up may settle first.
            std::thread::sleep(WATCH / 2);
            let before = sleeps();
            std::thread::sleep(WATCH);
            Some(Idle {
                contender: contender.name.clone(),
                exports: company + 1,
                wakeups_per_second: (sleeps() - before) as f64 / WATCH.as_secs_f64(),
                resident: deployment.server.resident(),
            })
        })
        .collect()
}
