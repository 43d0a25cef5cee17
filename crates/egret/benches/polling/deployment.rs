//! Daemons side by side, of which one is awake at a time.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use egret_lab::cpu_meter::CpuMeter;
use egret_loadgen::client::{Client, ClientOptions, Connection, Shape};
use egret_loadgen::load::{Edge, Job, LoadError, Span, Spec, Tally};
use egret_loadgen::machine::{self, Cores};
use egret_loadgen::random::Shuffle;
use rustix::process::Signal;
use serde_json::json;

use crate::cells::{Cell, Placement};
use crate::support::qmp::Qmp;
use crate::support::scratch::Scratch;
use crate::support::server::{Options, Program, Server};

/// The I/O thread's name, and its thread's.
const IO_THREAD: &str = "io0";
/// The time before measuring, at each turn but the first. To a daemon that was stopped the world has changed, and a change of
/// the load is to be followed within so long.
const RAMP: Duration = Duration::from_millis(100);

/// How long each daemon is loaded.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    /// Before its first turn counts.
    pub warm_up: Duration,
    /// In all turns.
    pub length: Duration,
    /// Into how many turns that is cut.
    pub turns: u32,
}

/// Egret with options of its I/O thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contender {
    /// What the table calls it.
    pub name: String,
    /// The I/O thread's properties.
    pub iothread: String,
}

impl Contender {
    /// By what is written after `poll-policy=`: `weighted`, or `low-regret,poll-price=4`.
    pub fn of_policy(text: &str) -> Self {
        Self { name: text.to_owned(), iothread: format!("poll-policy={text}") }
    }
}

/// What came of one contender in one cell.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub iops: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    /// From when a request was to be made until it was answered, on average.
    pub mean_us: f64,
    /// Of the I/O thread, per request.
    pub cpu_us: f64,
    /// Of the I/O thread: how much of a core it kept busy.
    pub cores: f64,
    /// Of the daemon with all its threads, per request.
    pub daemon_cpu_us: f64,
    /// Of the kernel's threads, per request: who serves a loop device is one of them.
    pub kernel_cpu_us: f64,
    /// Of the load, per request.
    pub load_cpu_us: f64,
    /// The share of time with each habit of `low-regret`.
    pub habits: BTreeMap<String, f64>,
    /// Why the load, and not the server, was measured, if it was.
    pub limit: Option<String>,
}

/// A started daemon, which has nothing to do except during its turns.
pub struct Deployment {
    /// Whether it is stopped otherwise: one that spins for good would disturb the next.
    is_parked: bool,
    server: Server,
    job: Job,
    tally: Tally,
    cpu: CpuTimes,
    monitor: Qmp,
    /// How long each habit was in use, in nanoseconds.
    habits: BTreeMap<String, u64>,
    _idle: Vec<Connection>,
    _scratch: Scratch,
}

/// What a daemon has used, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct CpuTimes {
    io_thread: u64,
    daemon: u64,
    /// Of the kernel's threads meanwhile.
    kernel: u64,
}

impl CpuTimes {
    fn of(pid: u32) -> Self {
        Self {
            io_thread: machine::named_threads_cpu_time_ns(pid, IO_THREAD).expect("our child's I/O thread, counted"),
            daemon: machine::cpu_time_ns(pid).expect("our child lives"),
            kernel: 0,
        }
    }

    fn add(&mut self, before: Self, after: Self) {
        self.io_thread += after.io_thread.saturating_sub(before.io_thread);
        self.daemon += after.daemon.saturating_sub(before.daemon);
    }
}

/// The parameters of a deployment.
pub struct Plan<'a> {
    pub contender: &'a Contender,
    pub cores: &'a Cores,
    pub spec: Spec,
    /// How many disks are loaded: nodes `d0`, `d1` and so on, which `blockdevs` makes.
    pub disks: usize,
    /// How many disks of [`IDLE_QUEUES`] queues each are connected and do nothing.
    pub company: usize,
    /// Whether the daemon is stopped between its turns.
    pub park: bool,
}

/// Queues of every idle disk.
pub const IDLE_QUEUES: u16 = 32;

impl Deployment {
    /// Starts a fresh daemon and connects to all its exports.
    pub fn deploy(plan: &Plan<'_>, blockdevs: impl FnOnce(Options) -> Options) -> Result<Self, LoadError> {
        let scratch = Scratch::new();
        let socket = |kind: &str, n: usize| scratch.path(&format!("{kind}{n}"));
        let options = Options::new().iothread(IO_THREAD, &plan.contender.iothread);
        let mut options = blockdevs(options.monitor("qmp", &scratch.path("qmp")));
        for n in 0..plan.disks {
            options = options.export(
                &format!("e{n}"),
                &format!("d{n}"),
                &socket("busy", n),
                &format!("iothread={IO_THREAD}"),
            );
        }
        for n in 0..plan.company {
            let node = format!("idle{n}");
            let queues = format!("iothread={IO_THREAD},num-queues={IDLE_QUEUES}");
            options = options.null(&node, "").export(&node, &node, &socket("idle", n), &queues);
        }
        let server = plan.cores.on_the_servers(|| Server::start(&Program::egret(), &options));
        let connect = |path: &Path, shape| Client::connect(path, ClientOptions::default())?.start(shape);
        let idle = Shape { queues: IDLE_QUEUES, depth: 1, ..Shape::default() };
        let idle = (0..plan.company).map(|n| connect(&socket("idle", n), idle)).collect::<Result<Vec<_>, _>>()?;
        let mut disks = Vec::new();
        for n in 0..plan.disks {
            let Connection { info, queues } = connect(&socket("busy", n), plan.spec.shape())?;
            disks.extend(queues.into_iter().map(|queue| (info, queue)));
        }
        let job = Job::new(&plan.spec, 0, disks)?;
        let tally = job.tally();
        // Where the kernel does not count, that is said before anything is measured.
        CpuTimes::of(server.pid());
        let deployment = Self {
            is_parked: plan.park,
            server,
            job,
            tally,
            cpu: CpuTimes::default(),
            monitor: Qmp::connect(&scratch.path("qmp")),
            habits: BTreeMap::new(),
            _idle: idle,
            _scratch: scratch,
        };
        deployment.signal(Signal::STOP);
        Ok(deployment)
    }

    fn signal(&self, signal: Signal) {
        if self.is_parked {
            self.server.send(signal);
        }
    }

    /// Loads the daemon, and puts it to sleep again.
    pub fn take_turn(&mut self, span: Span) -> Result<(), LoadError> {
        self.signal(Signal::CONT);
        let pid = self.server.pid();
        let (mut before, mut after) = (CpuTimes::default(), CpuTimes::default());
        let mut meter = CpuMeter::new();
        let ran = self.job.run(span, &mut self.tally, &mut |edge| {
            let now = CpuTimes::of(pid);
            *if edge == Edge::Begin { &mut before } else { &mut after } = now;
            meter.edge(edge);
            let stats = self.monitor.run("egret-query-stats", json!({}));
            let threads = stats["iothreads"].as_array().expect("a list");
            let measured = threads.iter().find(|thread| thread["id"] == IO_THREAD).expect("our I/O thread");
            for (name, time) in measured["habits-ns"].as_object().expect("times by name") {
                let (sum, time) = (self.habits.entry(name.clone()).or_default(), time.as_u64().expect("a time"));
                // A difference, in two steps.
                *sum = if edge == Edge::Begin { sum.wrapping_sub(time) } else { sum.wrapping_add(time) };
            }
        });
        self.cpu.add(before, after);
        self.cpu.kernel += meter.ledger().kernel_threads.unwrap_or(0);
        self.signal(Signal::STOP);
        ran
    }

    /// The share of a core that the idle daemon takes.
    pub fn idle_cores(&self, watch: Duration) -> f64 {
        self.signal(Signal::CONT);
        // What came before may settle first.
        std::thread::sleep(watch / 2);
        let before = CpuTimes::of(self.server.pid()).daemon;
        std::thread::sleep(watch);
        let spent = CpuTimes::of(self.server.pid()).daemon - before;
        self.signal(Signal::STOP);
        spent as f64 / watch.as_nanos() as f64
    }

    /// Sums up what was measured since the last time.
    pub fn outcome(&mut self) -> Outcome {
        let tally = std::mem::replace(&mut self.tally, self.job.tally());
        let CpuTimes { io_thread, daemon, kernel } = std::mem::take(&mut self.cpu);
        let habits = std::mem::take(&mut self.habits);
        let all = habits.values().sum::<u64>().max(1);
        let us_per_request = |ns: u64| ns as f64 / 1e3 / tally.requests().max(1) as f64;
        Outcome {
            iops: tally.iops(),
            p50_us: tally.lat_us(0.5),
            p99_us: tally.lat_us(0.99),
            mean_us: tally.all_lat().mean() / 1e3,
            cpu_us: us_per_request(io_thread),
            cores: io_thread as f64 / tally.elapsed.as_nanos() as f64,
            daemon_cpu_us: us_per_request(daemon),
            kernel_cpu_us: us_per_request(kernel),
            load_cpu_us: tally.cpu_us(),
            habits: habits.into_iter().map(|(name, time)| (name, time as f64 / all as f64)).collect(),
            limit: tally.limit(),
        }
    }
}

/// Lets some deployments take turns in random order until each has been loaded for as long as `times` say.
///
/// One that fails is left out from then on, and `failed` hears of it.
pub fn take_turns<T>(
    mut deployments: Vec<(T, Deployment)>,
    times: Times,
    shuffle: &mut Shuffle,
    mut failed: impl FnMut(&T, &LoadError),
) -> Vec<(T, Deployment)> {
    for turn in 0..times.turns {
        deployments = shuffle.of(deployments);
        let ramp = if turn == 0 { times.warm_up } else { RAMP };
        let span = Span { ramp, length: times.length / times.turns };
        deployments.retain_mut(|(name, deployment)| {
            deployment.take_turn(span).inspect_err(|error| failed(name, error)).is_ok()
        });
    }
    deployments
}

/// Measures every contender in one cell.
pub fn measure(
    cell: &Cell,
    contenders: &[Contender],
    loop_device: Option<&Path>,
    times: Times,
    shuffle: &mut Shuffle,
) -> Vec<(Contender, Outcome)> {
    let cores = match cell.placement {
        Placement::Apart => Cores::of_this_machine(),
        Placement::Contended | Placement::Beside => Cores::unpinned(),
    };
    let _neighbour = (cell.placement == Placement::Beside).then(Neighbour::start);
    let mut deployments = Vec::new();
    for contender in contenders {
        let plan =
            Plan { contender, cores: &cores, spec: cell.spec(&cores), disks: cell.disks, company: 0, park: true };
        match try_deploy(&plan, |options| cell.blockdevs(options, loop_device)) {
            Ok(deployment) => deployments.push((contender.clone(), deployment)),
            Err(error) => println!("failed: {} with {}: {error}", cell.name(), contender.name),
        }
    }
    let deployments = take_turns(deployments, times, shuffle, |contender, error| {
        println!("failed: {} with {}: {error}", cell.name(), contender.name);
    });
    deployments.into_iter().map(|(contender, mut deployment)| (contender, deployment.outcome())).collect()
}

/// Somebody who wants half of each core, five milliseconds at a time.
struct Neighbour {
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Neighbour {
    fn start() -> Self {
        const SLICE: Duration = Duration::from_millis(5);
        let ended = Arc::new(AtomicBool::new(false));
        let burn = |core: usize| {
            let ended = Arc::clone(&ended);
            std::thread::spawn(move || {
                machine::on_cores(&[core], || {
                    while !ended.load(Ordering::Relaxed) {
                        let since = Instant::now();
                        while since.elapsed() < SLICE {
                            std::hint::spin_loop();
                        }
                        std::thread::sleep(SLICE);
                    }
                });
            })
        };
        let threads = machine::allowed().map(burn).collect();
        Self { ended, threads }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}

/// [`Deployment::deploy`], and a daemon that does not even start is an error like any other.
pub fn try_deploy(plan: &Plan<'_>, blockdevs: impl FnOnce(Options) -> Options) -> io::Result<Deployment> {
    // Its output was printed with the panic.
    let deploy = catch_unwind(AssertUnwindSafe(|| Deployment::deploy(plan, blockdevs)));
    deploy.map_err(|_| io::Error::other("it did not start"))?.map_err(io::Error::other)
}
