//! Everything that may happen to a daemon, at random and under verification, for as long as `EGRET_SOAK_SECONDS` says: a
//! second where it says nothing, so that the driver itself is tested. `make soak HOURS=` asks for more.
//!
//! A client keeps 32 requests in flight on a disk that fails, and verifies each block that it reads; a request that fails
//! or never ends is the end of the run, and so is a block that holds anything else than what was written last. Between two
//! of its bursts one thing happens, while its requests are in flight. To have another happen add an [`Act`].

mod support;

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use egret_faultdisk::{Effect, ErrnoName, Fault, FaultDisk, Order};
use egret_loadgen::random::Random;
use rustix::process::Signal;
use serde_json::json;

use support::attacker::{Attacker, Variant};
use support::qmp::Qmp;
use support::scratch::{Scratch, is_root_or_skips};
use support::server::{Options, Program, Server};
use support::survivor::{BLOCK, BLOCKS, Client, content};

/// Requests between two acts.
const BURST: u64 = 200;

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    /// The queue runs on another I/O thread from here on.
    Move,
    /// The disk is opened again, with another engine.
    Reopen,
    /// The daemon dies, and the next takes over.
    Kill,
    /// The daemon is stopped, and the next takes over.
    Replace,
    /// A request of the disk fails; the export waits (`rerror`, `werror`) until it is told to go on.
    Fail,
    /// A write is torn, and fails.
    Tear,
    /// A read or write moves a part.
    Shorten,
    /// Requests take 20 ms longer.
    Delay,
    /// Requests overtake one another.
    Reorder,
    /// A neighbour on the same I/O thread breaks its ring.
    Attack,
    /// Another disk grows.
    Resize,
}

impl Act {
    const ALL: [Self; 11] = [
        Self::Move,
        Self::Reopen,
        Self::Kill,
        Self::Replace,
        Self::Fail,
        Self::Tear,
        Self::Shorten,
        Self::Delay,
        Self::Reorder,
        Self::Attack,
        Self::Resize,
    ];

    /// What the table calls it.
    fn name(self) -> &'static str {
        match self {
            Self::Move => "queues moved",
            Self::Reopen => "disks reopened",
            Self::Kill => "daemons killed",
            Self::Replace => "daemons replaced",
            Self::Fail => "faults: EIO",
            Self::Tear => "faults: torn writes",
            Self::Shorten => "faults: short",
            Self::Delay => "faults: late",
            Self::Reorder => "faults: reordered",
            Self::Attack => "hostile neighbours",
            Self::Resize => "disks grown",
        }
    }
}

/// A daemon that is replaced again and again, its disks and its client.
struct Soak {
    scratch: Scratch,
    disk: FaultDisk,
    options: Options,
    server: Option<Server>,
    qmp: Qmp,
    client: Client,
    random: Random,
    grown: u64,
}

impl Soak {
    fn new(packed: bool, seed: u64) -> Self {
        let scratch = Scratch::new();
        let disk = scratch.fault_disk((BLOCK * BLOCKS) as u64);
        let other = scratch.image("other", 1 << 20);
        let options = Options::new()
            .iothread("io0", "")
            .iothread("io1", "fd-monitor=epoll")
            .disk("d0", &disk.path(), "aio=threads,cache.direct=on")
            .disk("d1", &other, "")
            .null("d2", "")
            .export("e0", "d0", &scratch.path("e0"), "writable=on,iothread=io0,rerror=stop,werror=stop")
            .export("e1", "d1", &scratch.path("e1"), "writable=on,iothread=io1")
            .export("e2", "d2", &scratch.path("e2"), "writable=on,iothread=io0")
            .monitor("m", &scratch.path("qmp"));
        let server = Server::start(&Program::egret(), &options);
        let qmp = Qmp::connect(&scratch.path("qmp"));
        let mut client = Client::new(packed);
        client.connect(&scratch.path("e0"));
        Self { scratch, disk, options, server: Some(server), qmp, client, random: Random::new(seed), grown: 1 << 20 }
    }

    /// A burst of requests, with an export that is told to go on wherever it was stopped.
    fn burst(&mut self) {
        let Self { client, qmp, .. } = self;
        std::thread::scope(|scope| {
            let load = scope.spawn(|| client.load(BURST));
            while !load.is_finished() {
                qmp.run("block-export-resume", json!({"id": "e0"}));
                std::thread::sleep(Duration::from_millis(2));
            }
            load.join().expect("every request is served, and what is read is what was written");
        });
    }

    fn act(&mut self, act: Act) {
        let one_of = |random: &mut Random, words: &[&'static str]| words[random.below(words.len() as u64) as usize];
        let path = self.disk.path();
        match act {
            Act::Move => {
                let iothread = one_of(&mut self.random, &["io0", "io1"]);
                self.qmp.run("egret-move-queue", json!({"id": "e0", "queue": 0, "iothread": iothread}));
            }
            Act::Reopen => {
                let aio = one_of(&mut self.random, &["threads", "native", "io_uring"]);
                let options = json!({"driver": "file", "node-name": "d0", "filename": path, "aio": aio,
                                     "cache": {"direct": true}});
                self.qmp.run("blockdev-reopen", json!({"options": [options]}));
            }
            Act::Kill => self.replace(Signal::KILL),
            Act::Replace => self.replace(Signal::TERM),
            Act::Fail => self.inject(Effect::Errno(ErrnoName::Eio)),
            Act::Tear => self.inject(Effect::Torn(512)),
            Act::Shorten => self.inject(Effect::Short(512)),
            Act::Delay => self.inject(Effect::LateMs(20)),
            Act::Reorder => self.inject(Effect::Reordered(4)),
            Act::Attack => {
                let variant = Variant { packed: self.random.below(2) == 1, ..Variant::PLAIN };
                let mut attacker = Attacker::boot(&self.scratch.path("e2"), variant, 1 << 20);
                attacker.read_honestly();
                attacker.chain_that_breaks();
                attacker.publish();
                attacker.await_end();
            }
            Act::Resize => {
                self.grown += 1 << 20;
                self.qmp.run("block_resize", json!({"node-name": "d1", "size": self.grown}));
            }
        }
    }

    fn inject(&mut self, effect: Effect) {
        let (after, times) = (self.random.below(BURST / 2), Some(1 + self.random.below(3)));
        self.disk.tell(Order::Inject(Fault { iotype: None, sectors: None, after, times, effect })).expect("it listens");
    }

    fn replace(&mut self, signal: Signal) {
        // What waits because it failed would wait beyond the end.
        self.qmp.run("block-export-resume", json!({"id": "e0"}));
        self.disk.tell(Order::Clear).expect("it listens");
        if let Some(mut server) = self.server.take() {
            server.send(signal);
            server.await_end();
        }
        self.server = Some(Server::start(&Program::egret(), &self.options));
        self.qmp = Qmp::connect(&self.scratch.path("qmp"));
        self.client.connect(&self.scratch.path("e0"));
    }

    /// Ends the daemon, and compares the disk with what was written. Returns how many bytes that is.
    fn end(mut self) -> u64 {
        self.disk.tell(Order::Clear).expect("it listens");
        self.qmp.run("block-export-resume", json!({"id": "e0"}));
        self.client.drain();
        self.client.wire = None;
        assert_eq!(self.server.take().expect("a daemon").terminate().code(), Some(0));
        let holds = std::fs::read(self.disk.path()).expect("our own disk");
        for (block, bytes) in holds.chunks(BLOCK).enumerate() {
            assert!(bytes == content(block, self.client.versions[block]), "block {block} is as written");
        }
        holds.len() as u64
    }
}

/// What a run came to.
#[derive(Default)]
struct Table {
    seconds: u64,
    requests: u64,
    verified: u64,
    acts: [u64; Act::ALL.len()],
    injected: u64,
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| in {} s | |\n|---|---|", self.seconds)?;
        writeln!(f, "| requests | {} |", self.requests)?;
        for (act, count) in Act::ALL.iter().zip(self.acts) {
            writeln!(f, "| {} | {count} |", act.name())?;
        }
        writeln!(f, "| requests of the disk that a fault has met | {} |", self.injected)?;
        writeln!(f, "| errors seen by the client | 0 |\n| bytes verified | {} |", self.verified)
    }
}

#[test]
fn whatever_happens_to_a_daemon_no_request_fails_and_no_byte_is_another() {
    if !is_root_or_skips(
        "whatever_happens_to_a_daemon_no_request_fails_and_no_byte_is_another",
        "for a disk that fails",
    ) {
        return;
    }
    let seconds = std::env::var("EGRET_SOAK_SECONDS").map_or(1, |value| value.parse().expect("a number of seconds"));
    let seed = std::env::var("EGRET_SOAK_SEED").map_or(1, |value| value.parse().expect("a number"));
    let (begun, mut table) = (Instant::now(), Table::default());
    let (mut random, mut round) = (Random::new(seed), 0);
    loop {
        round += 1;
        let mut soak = Soak::new(round % 2 == 0, seed + round);
        // Everything once, and then by chance.
        for step in 0..4 * Act::ALL.len() {
            let at = if step < Act::ALL.len() { step } else { random.below(Act::ALL.len() as u64) as usize };
            soak.act(Act::ALL[at]);
            table.acts[at] += 1;
            soak.burst();
        }
        table.requests += soak.client.done;
        table.verified += soak.client.verified;
        table.injected += soak.disk.tell(Order::Clear).expect("it listens").struck;
        table.verified += soak.end();
        if begun.elapsed() > Duration::from_secs(seconds) {
            break;
        }
    }
    table.seconds = begun.elapsed().as_secs();
    println!("{table}");
    let place = std::env::var_os("EGRET_SOAK_TABLE").map(PathBuf::from);
    if let Some(place) = place {
        std::fs::write(place, table.to_string()).expect("a file for the table");
    }
}
