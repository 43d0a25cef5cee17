//! How long queues wait when they move, when their disk is reopened, and when another daemon goes on with them, under load.
//!
//! `make bench-live`, or `cargo bench -p egret --bench live -- --help`. The daemon reports each pause, and the part
//! of it that was draining requests in flight; the rest is Egret's. The client's own latencies stand beside them, of a
//! time with changes and of one without just before: what a pause can be at best is what the disk takes for a request.

#[path = "../shared/disk.rs"]
mod disk;
#[path = "../../tests/support/mod.rs"]
mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Parser;
use egret_loadgen::client::{Client, ClientOptions};
use egret_loadgen::load::{self, Job, Rw, Span, Spec, Tally, Waiting};
use egret_loadgen::machine::{self, Cores};
use serde_json::{Value, json};

use disk::Disk;
use support::keeper::Keeper;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Server};

/// How long the load is left alone between two changes.
const BREATH: Duration = Duration::from_millis(5);
/// No pause should be as long.
const GOAL: Duration = Duration::from_millis(10);
const QUEUES: u16 = 2;

/// Measures how long queues wait when what carries them changes.
#[derive(Debug, Parser)]
struct Arguments {
    /// Load each cell for so long with changes, and for so long without
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Measure a null disk too, whose requests take so many microseconds: only the daemon works for it
    #[arg(long, value_name = "US", default_value_t = 100)]
    null: u64,
    /// Requests in flight on each of two queues
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64])]
    depths: Vec<u16>,
    /// What cargo passes to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

/// What is changed.
#[derive(Clone, Copy)]
enum Change {
    Move,
    Map,
    Reopen,
}

impl Change {
    const ALL: [Self; 3] = [Self::Move, Self::Map, Self::Reopen];

    fn name(self) -> &'static str {
        match self {
            Self::Move => "one queue moved",
            Self::Map => "both queues moved",
            Self::Reopen => "disk reopened",
        }
    }

    /// Runs the change for the `round`th time.
    fn run(self, qmp: &mut Qmp, subject: &Subject<'_>, round: usize) -> Pause {
        let to = ["io1", "io0"][round % 2];
        let answer = match self {
            Self::Move => qmp.run("egret-move-queue", json!({"id": "e0", "queue": 0, "iothread": to})),
            Self::Map => qmp.run("egret-map-queues", json!({"id": "e0", "iothread": to})),
            Self::Reopen => qmp.run("blockdev-reopen", json!({"options": [subject.otherwise(round)]})),
        };
        let time = |key: &str| Duration::from_nanos(answer[key].as_u64().expect("every change says it"));
        Pause { whole: time("pause-ns"), drain: time("drain-ns") }
    }
}

/// How long a queue waited, and how much of that for requests in flight.
struct Pause {
    whole: Duration,
    drain: Duration,
}

/// The disk under load.
enum Subject<'a> {
    Image(&'a Path),
    /// A null disk of this latency, in nanoseconds.
    Null(u64),
}

impl Subject<'_> {
    fn name(&self) -> String {
        match self {
            Self::Image(_) => "loop".to_owned(),
            Self::Null(latency) => format!("null, {} us", latency / 1000),
        }
    }

    fn options(&self) -> Options {
        match self {
            Self::Image(image) => Options::new().disk("d0", image, "aio=io_uring,cache.direct=on"),
            Self::Null(latency) => Options::new().null("d0", &format!("latency-ns={latency}")),
        }
    }

    /// How it is to be opened for the `round`th time: with another engine, or another latency that is hardly another.
    fn otherwise(&self, round: usize) -> Value {
        match self {
            Self::Image(image) => {
                let driver = if image.starts_with("/dev") { "host_device" } else { "file" };
                let aio = ["native", "threads", "io_uring"][round % 3];
                json!({"driver": driver, "node-name": "d0", "filename": image, "aio": aio, "cache": {"direct": true}})
            }
            Self::Null(latency) => json!({"driver": "null-co", "node-name": "d0", "size": 1 << 30,
                                          "latency-ns": latency + 1 + round as u64 % 2}),
        }
    }
}

fn main() -> std::io::Result<()> {
    let arguments = Arguments::parse();
    println!("{}", machine::fingerprint());
    let cores = Cores::of_this_machine();
    println!("{}", cores.describe());
    let disk = Disk::for_this_machine()?;
    println!("load: 4 KiB, random, 70 % reads, {QUEUES} queues\n");
    println!("times in milliseconds: p50, p99, longest; of requests p99, p99.9, longest\n");
    println!(
        "| disk | in flight | change | times | pause | of it drain | the rest | 10 ms or more | requests | without |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for subject in [Subject::Null(arguments.null * 1000), Subject::Image(disk.path())] {
        for &depth in &arguments.depths {
            measure(&cores, &subject, depth, Duration::from_secs_f64(arguments.seconds));
        }
    }
    println!("\n{}", machine::fingerprint());
    Ok(())
}

/// One row for each change.
fn measure(cores: &Cores, subject: &Subject<'_>, depth: u16, length: Duration) {
    let scratch = Scratch::new();
    let (socket, monitor) = (scratch.path("socket"), scratch.path("qmp"));
    let options = subject
        .options()
        .iothread("io0", "")
        .iothread("io1", "")
        .export("e0", "d0", &socket, &format!("writable=on,num-queues={QUEUES},iothread=io0"))
        .monitor("m", &monitor);
    let keeper = Keeper::new(&scratch);
    let mut server = cores.on_the_servers(|| Server::start(&keeper.program(), &options));
    let mut qmp = Qmp::connect(&monitor);
    let rw = Rw { reads: true, writes: true, random: true };
    let cpus_allowed = cores.pair().map(|(client, _)| client).into_iter().collect();
    let (iodepth, numjobs, waiting) = (depth, QUEUES, Waiting::Blocking);
    let spec = Spec { rw, iodepth, numjobs, rwmixread: 70, waiting, cpus_allowed, ..Spec::default() };
    let connected = Client::connect(&socket, ClientOptions::default()).and_then(|client| client.start(spec.shape()));
    let mut jobs = spec.jobs(connected.expect("the daemon serves")).expect("the load suits the disk");
    for change in Change::ALL {
        let left_alone = run(&mut jobs, length, &mut || ());
        let mut pauses = Vec::new();
        let tally = run(&mut jobs, length, &mut || {
            pauses.push(change.run(&mut qmp, subject, pauses.len()));
        });
        println!(
            "| {} | {depth} | {} | {} | {} | {} | {} | {} | {} | {} |",
            subject.name(),
            change.name(),
            pauses.len(),
            spread(pauses.iter().map(|pause| pause.whole)),
            spread(pauses.iter().map(|pause| pause.drain)),
            spread(pauses.iter().map(|pause| pause.whole - pause.drain)),
            pauses.iter().filter(|pause| pause.whole >= GOAL).count(),
            latencies(&tally),
            latencies(&left_alone),
        );
    }
    // Another daemon, as often as one can start.
    let left_alone = run(&mut jobs, length, &mut || ());
    let mut pauses = Vec::new();
    let tally = run(&mut jobs, length, &mut || {
        let begun = Instant::now();
        server.end();
        server = cores.on_the_servers(|| Server::start(&keeper.successor(), &options));
        keeper.hears("READY=1");
        pauses.push(begun.elapsed());
    });
    println!(
        "| {} | {depth} | daemon restarted | {} | {} | | | {} | {} | {} |",
        subject.name(),
        pauses.len(),
        spread(pauses.iter().copied()),
        pauses.iter().filter(|pause| **pause >= GOAL).count(),
        latencies(&tally),
        latencies(&left_alone),
    );
    drop(jobs);
    // One that is killed may hold its locks for a moment longer.
    server.terminate();
}

/// Loads the disk for `length`, and calls `act` repeatedly during that.
fn run(jobs: &mut [Job], length: Duration, act: &mut dyn FnMut()) -> Tally {
    let span = Span { ramp: Duration::from_millis(200), length };
    std::thread::scope(|scope| {
        let load = scope.spawn(|| load::run(jobs, span, &mut |_| ()).expect("no request fails"));
        let end = Instant::now() + span.ramp + length;
        while Instant::now() + BREATH < end && !load.is_finished() {
            act();
            std::thread::sleep(BREATH);
        }
        load.join().expect("the load ends").expect("there are jobs")
    })
}

/// The median, the 99th percentile and the longest.
fn spread(times: impl Iterator<Item = Duration>) -> String {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let at = |share: usize| ms(times[(times.len() - 1) * share / 100]);
    format!("{}, {}, {}", at(50), at(99), at(100))
}

fn latencies(tally: &Tally) -> String {
    let at = |quantile| ms(Duration::from_nanos(tally.lat.value_at_quantile(quantile)));
    format!("{}, {}, {}", at(0.99), at(0.999), at(1.0))
}

fn ms(duration: Duration) -> String {
    format!("{:.2}", duration.as_secs_f64() * 1e3)
}
