//! What a hostile tenant costs its neighbour on the same I/O thread.
//!
//! `make bench-neighbours`, or `cargo bench -p egret --bench neighbours -- --help`. The neighbour reads 4 KiB at random from a
//! disk of its own, in turns alone and beside an attack, so that a machine that slows down slows both; each row is the
//! median of the turns. The first row is no attack: a tenant that reads like the neighbour, with more requests in flight.
//!
//! How many requests it has is measured as fast as it can, and how long they take at a rate: who waits for one request before
//! it makes the next has hardly any in a stall, however long that is.
//!
//! The goals: a p99 of at most twice what it is alone, and at least half of the requests, for there are two tenants.

#[path = "../shared/disk.rs"]
mod disk;
#[path = "../../tests/support/mod.rs"]
mod support;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::Parser;
use egret_lab::statistics::median;
use egret_loadgen::client::{Client, ClientOptions};
use egret_loadgen::load::{self, Job, LoadError, Rate, RateProcess, Span, Spec, Tally, Waiting};
use egret_loadgen::machine::{self, Cores};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use disk::Disk;
use support::attacker::{Ask, Attacker, DATA, Device, SIZE, Signals, Variant, stuff};
use support::guest::Share;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use support::wire::{F_VERSION_1, Wire};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The share of the requests that it makes alone at which the neighbour's p99 is measured: half of what the goal leaves it.
const RATE: f64 = 0.25;
/// A buffer of a large chain; all of its buffers are the same memory.
const BUFFER: u64 = 4 * MIB;

/// Measures what a hostile tenant costs its neighbour on the same I/O thread.
#[derive(Debug, Parser)]
struct Arguments {
    /// Measure so long at a time
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Turns alone and beside each attack
    #[arg(long, default_value_t = 5)]
    turns: usize,
    /// Two short turns
    #[arg(long)]
    quick: bool,
    /// Attacks whose names have this in them
    #[arg(long, default_value = "")]
    only: String,
    /// The neighbour's requests in flight
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16])]
    depths: Vec<u16>,
    /// Let the neighbour read from a disk that answers after 20 us and takes no processor, as hardware does; a loop device's
    /// requests are done by a thread of the kernel
    #[arg(long)]
    no_kernel_thread: bool,
    /// What cargo passes to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

/// What the other tenant does.
struct Attack {
    name: &'static str,
    variant: Variant,
    disk: AttackedDisk,
    /// How the neighbour's disk is opened.
    neighbour: &'static str,
    /// One round, with the client of the round before if it is still connected.
    round: fn(&Scene<'_>, Option<Attacker>) -> Option<Attacker>,
}

#[derive(Clone, Copy)]
enum AttackedDisk {
    Null,
    /// An image of so many bytes, and options of its blockdev.
    Image(u64, &'static str),
    /// The same in memory, where the file system knows no zeroes but holes.
    InMemory(u64, &'static str),
}

/// What an attack can reach.
struct Scene<'a> {
    socket: &'a Path,
    variant: Variant,
    over: &'a AtomicBool,
}

impl Scene<'_> {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn attacker(&self) -> Attacker {
        let mut attacker = Attacker::boot(self.socket, self.variant, BUFFER);
        attacker.read_honestly();
        attacker
    }

    /// Publishes what `attacker` was given, and waits until it is served, if it ever is.
    fn wait(&self, mut attacker: Attacker) -> Option<Attacker> {
        attacker.publish();
        loop {
            if attacker.is_over() || self.is_over() {
                return None;
            }
            if attacker.is_served() {
                return Some(attacker);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// `count` chains of `pieces` buffers each.
    fn ask(&self, attacker: Option<Attacker>, count: usize, ask: Ask, pieces: usize, len: u64) -> Option<Attacker> {
        let mut attacker = attacker.unwrap_or_else(|| self.attacker());
        let buffers = vec![(DATA, len as u32); pieces];
        (0..count).for_each(|_| attacker.ask(ask, &buffers));
        self.wait(attacker)
    }
}

/// As many chains as the ring has room for, of as many bytes as a chain may have. Only the first round writes their tables:
/// a client that were as busy as the I/O thread would take the neighbour's processor, on a machine with two.
fn endless(scene: &Scene<'_>, attacker: Option<Attacker>) -> Option<Attacker> {
    let Some(mut attacker) = attacker else {
        return scene.ask(None, SIZE.into(), Ask::Read { at: 0 }, 1022, BUFFER);
    };
    attacker.make_all_again();
    scene.wait(attacker)
}

/// Has an eventfd in 100 epoll sets 100 times each: whoever signals it tells each of them.
fn have_many_wait(eventfd: &OwnedFd) {
    static WAITING: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());
    let copies: Vec<_> = (0..100).map(|_| eventfd.try_clone().expect("a descriptor")).collect();
    let set = || {
        let set = epoll::create(CreateFlags::CLOEXEC).expect("a descriptor");
        for copy in &copies {
            epoll::add(&set, copy, EventData::new_u64(0), EventFlags::IN | EventFlags::ET).expect("our own eventfd");
        }
        set
    };
    let sets: Vec<_> = (0..100).map(|_| set()).collect();
    *WAITING.lock().unwrap_or_else(PoisonError::into_inner) = [copies, sets].into_iter().flatten().collect();
}

const SCSI: Variant = Variant { device: Device::Scsi, packed: false };
const PACKED: Variant = Variant { device: Device::Blk, packed: true };
const DIRECT: &str = "aio=io_uring,cache.direct=on";

const CHAINS_OF_4_GIB: Attack = Attack {
    name: "1024 chains of 4 GiB",
    variant: Variant::PLAIN,
    disk: AttackedDisk::Null,
    neighbour: DIRECT,
    round: endless,
};

const ATTACKS: &[Attack] = &[
    Attack {
        name: "none: reads of 4 KiB, 64 at a time",
        variant: Variant::PLAIN,
        disk: AttackedDisk::Image(64 * MIB, DIRECT),
        neighbour: DIRECT,
        round: |scene, attacker| scene.ask(attacker, 64, Ask::Read { at: 0 }, 1, 4 * KIB),
    },
    CHAINS_OF_4_GIB,
    Attack { name: "1024 chains of 4 GiB, packed", variant: PACKED, ..CHAINS_OF_4_GIB },
    Attack { name: "1024 chains of 4 GiB, SCSI", variant: SCSI, ..CHAINS_OF_4_GIB },
    Attack {
        name: "cached reads of 1 GiB, io_uring",
        variant: Variant::PLAIN,
        disk: AttackedDisk::Image(GIB, "aio=io_uring"),
        neighbour: DIRECT,
        round: |scene, attacker| scene.ask(attacker, 8, Ask::Read { at: 0 }, 256, BUFFER),
    },
    Attack {
        name: "cached reads of 2 MiB, io_uring",
        variant: Variant::PLAIN,
        disk: AttackedDisk::Image(64 * MIB, "aio=io_uring"),
        neighbour: DIRECT,
        round: |scene, attacker| scene.ask(attacker, 64, Ask::Read { at: 0 }, 1, 2 * MIB),
    },
    Attack {
        name: "direct reads of 64 MiB, native",
        variant: Variant::PLAIN,
        disk: AttackedDisk::Image(64 * MIB, "aio=native,cache.direct=on"),
        neighbour: DIRECT,
        round: |scene, attacker| scene.ask(attacker, 32, Ask::Read { at: 0 }, 16, BUFFER),
    },
    Attack {
        name: "zero detection over 1 GiB",
        variant: Variant::PLAIN,
        disk: AttackedDisk::Image(GIB, "aio=io_uring,detect-zeroes=on"),
        neighbour: DIRECT,
        round: |scene, attacker| scene.ask(attacker, 8, Ask::Write { at: 0 }, 256, BUFFER),
    },
    Attack {
        name: "64 zero-fills of 256 MiB",
        variant: Variant::PLAIN,
        disk: AttackedDisk::InMemory(256 * MIB, "aio=threads"),
        neighbour: "aio=threads,cache.direct=on",
        round: |scene, attacker| scene.ask(attacker, 64, Ask::WriteZeroes { at: 0, len: 256 * MIB }, 0, 0),
    },
    Attack {
        name: "1024 of VERIFY",
        variant: SCSI,
        disk: AttackedDisk::Image(MIB, DIRECT),
        neighbour: DIRECT,
        round: |scene, attacker| {
            let verify = Ask::Verify { at: 0, len: 256 * KIB, against_data: false };
            scene.ask(attacker, 1024, verify, 0, 0)
        },
    },
    Attack {
        name: "queues that break",
        variant: Variant::PLAIN,
        disk: AttackedDisk::Image(MIB, DIRECT),
        neighbour: DIRECT,
        round: |scene, _| {
            let mut attacker = scene.attacker();
            (0..8).for_each(|_| attacker.ask(Ask::Read { at: 0 }, &[(DATA, 4096)]));
            attacker.chain_that_breaks();
            drop(scene.wait(attacker));
            None
        },
    },
    Attack {
        name: "memory that is truncated",
        variant: Variant::PLAIN,
        disk: AttackedDisk::Image(MIB, DIRECT),
        neighbour: DIRECT,
        round: |scene, _| {
            let mut attacker = scene.attacker();
            let pieces: Vec<_> = (0..512).map(|piece| (DATA + 8 * KIB * piece + 1, 512)).collect();
            (0..16).for_each(|_| attacker.ask(Ask::Read { at: 0 }, &pieces));
            attacker.data[0].file.set_len(0).expect("our own memory");
            drop(scene.wait(attacker));
            None
        },
    },
    Attack {
        name: "a call descriptor that blocks",
        variant: Variant::PLAIN,
        disk: AttackedDisk::Image(MIB, DIRECT),
        neighbour: DIRECT,
        round: |scene, attacker| {
            let attacker = attacker.unwrap_or_else(|| scene.attacker());
            stuff(&attacker.signals.call);
            scene.ask(Some(attacker), 64, Ask::Read { at: 0 }, 1, 4 * KIB)
        },
    },
    Attack {
        name: "a call descriptor that 10,000 wait for",
        variant: Variant::PLAIN,
        disk: AttackedDisk::Image(MIB, DIRECT),
        neighbour: DIRECT,
        round: |scene, attacker| {
            let attacker = attacker.unwrap_or_else(|| {
                let attacker = scene.attacker();
                have_many_wait(&attacker.signals.call);
                attacker
            });
            scene.ask(Some(attacker), 64, Ask::Read { at: 0 }, 1, 4 * KIB)
        },
    },
    Attack {
        name: "a queue that nobody kicks",
        variant: Variant::PLAIN,
        disk: AttackedDisk::Image(MIB, DIRECT),
        neighbour: DIRECT,
        round: |scene, attacker| {
            let boot = || {
                let signals = Signals { kick: None, ..Signals::new() };
                Attacker::boot_with(scene.socket, scene.variant, vec![Share::new(DATA, BUFFER)], signals)
            };
            let attacker = attacker.unwrap_or_else(boot);
            std::thread::sleep(Duration::from_millis(1));
            Some(attacker)
        },
    },
];

fn main() -> std::io::Result<()> {
    let mut arguments = Arguments::parse();
    if arguments.quick {
        (arguments.seconds, arguments.turns) = (0.3, 2);
    }
    println!("{}", machine::fingerprint());
    let cores = Cores::of_this_machine();
    if cores.pair().is_none() {
        println!("missing: a second core; clients and daemon share one, unpinned");
    }
    let disk = Disk::for_this_machine()?;
    let on = if arguments.no_kernel_thread { "a null disk that takes 20 us" } else { "that disk" };
    println!("neighbour: random reads of 4 KiB from {on}; {} turns of {} s each", arguments.turns, arguments.seconds);
    println!("p99: when it reads at random times, {RATE} times as often as it can alone\n");
    println!("| beside | in flight | IOPS alone | beside | ratio | p99 alone, us | beside | ratio |");
    println!("|---|---|---|---|---|---|---|---|");
    for attack in ATTACKS.iter().filter(|attack| attack.name.contains(&arguments.only)) {
        for &depth in &arguments.depths {
            let row = match measure(&cores, &disk, attack, depth, &arguments) {
                Ok([alone, beside]) => format!(
                    "{:.0} | {:.0} | {:.2} | {:.0} | {:.0} | {:.2}",
                    alone.iops,
                    beside.iops,
                    beside.iops / alone.iops,
                    alone.p99_us,
                    beside.p99_us,
                    beside.p99_us / alone.p99_us
                ),
                Err(error) => format!("the neighbour lost its disk: {error}"),
            };
            println!("| {} | {depth} | {row} |", attack.name);
        }
    }
    println!("\n{}", machine::fingerprint());
    Ok(())
}

/// What the neighbour had, in the median.
struct Figures {
    iops: f64,
    p99_us: f64,
}

/// What the neighbour has alone, and beside the attack.
fn measure(
    cores: &Cores,
    disk: &Disk,
    attack: &Attack,
    depth: u16,
    arguments: &Arguments,
) -> Result<[Figures; 2], LoadError> {
    let scratch = Scratch::new();
    let [victim, neighbour] = ["victim", "neighbour"].map(|name| scratch.path(name));
    let in_memory = tempfile::tempdir_in("/dev/shm").map_err(egret_loadgen::client::ClientError::from)?;
    let options = attacked(attack, &scratch, in_memory.path().join("image")).iothread("io0", "");
    let options = if arguments.no_kernel_thread {
        options
            .words(["--blockdev", "driver=null-co,node-name=neighbour,size=256M,latency-ns=20000"].map(str::to_owned))
    } else {
        options.disk("neighbour", disk.path(), attack.neighbour)
    };
    let options = options.export("e1", "neighbour", &neighbour, "iothread=io0");
    let options = match attack.variant.device {
        Device::Blk => options.export("e0", "victim", &victim, "writable=on,iothread=io0"),
        Device::Scsi => {
            options.export_scsi("e0", &victim, "writable=on,iothread=io0,luns.0.lun=0,luns.0.node-name=victim")
        }
    };
    let server = cores.on_the_servers(|| Server::start(&Program::under_test(), &options));
    let cpus_allowed = cores.pair().map(|(client, _)| client).into_iter().collect();
    let spec = Spec { iodepth: depth, waiting: Waiting::Blocking, cpus_allowed, ..Spec::default() };
    let span = Span { ramp: Duration::from_millis(100), length: Duration::from_secs_f64(arguments.seconds) };
    let in_turns = |spec: &Spec, of: fn(&Tally) -> f64| -> Result<[f64; 2], LoadError> {
        let client = Client::connect(&neighbour, ClientOptions::default());
        let mut jobs = spec.jobs(client.and_then(|client| client.start(spec.shape()))?)?;
        let [mut alone, mut beside] = [Vec::new(), Vec::new()];
        for _ in 0..arguments.turns {
            alone.push(of(&run(&mut jobs, span)?));
            beside.push(of(&run_beside(&mut jobs, span, attack, &victim)?));
        }
        Ok([alone, beside].map(median))
    };
    let iops = in_turns(&spec, Tally::iops)?;
    let rate = Rate { iops: iops[0] * RATE, process: RateProcess::Poisson };
    let at_a_rate = Spec { rate_iops: Some(rate), ..spec };
    // Of all that was due, also of what never began.
    let p99_us = in_turns(&at_a_rate, |tally| tally.all_lat().value_at_quantile(0.99) as f64 / 1e3)?;
    // One that is killed may hold its locks for a moment longer.
    server.terminate();
    Ok([0, 1].map(|which| Figures { iops: iops[which], p99_us: p99_us[which] }))
}

fn run(jobs: &mut [Job], span: Span) -> Result<Tally, LoadError> {
    Ok(load::run(jobs, span, &mut |_| ())?.expect("there is a job"))
}

fn run_beside(jobs: &mut [Job], span: Span, attack: &Attack, socket: &Path) -> Result<Tally, LoadError> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let scene = Scene { socket, variant: attack.variant, over: &over };
            let mut attacker = None;
            while !scene.is_over() {
                attacker = (attack.round)(&scene, attacker);
            }
            // When the next client is answered, the attacker's session has ended.
            drop(attacker);
            drop(Wire::agree(socket, F_VERSION_1));
        });
        let tally = run(jobs, span);
        over.store(true, Ordering::Relaxed);
        tally
    })
}

/// Options with the attacked disk.
fn attacked(attack: &Attack, scratch: &Scratch, in_memory: PathBuf) -> Options {
    let options = Options::new();
    match attack.disk {
        AttackedDisk::Null => {
            options.words(["--blockdev".into(), format!("driver=null-co,node-name=victim,size={}", 8 * GIB)])
        }
        AttackedDisk::Image(len, more) => options.disk("victim", &scratch.image("victim", len), more),
        AttackedDisk::InMemory(len, more) => {
            std::fs::File::create(&in_memory).and_then(|file| file.set_len(len)).expect("an image");
            options.disk("victim", &in_memory, more)
        }
    }
}
