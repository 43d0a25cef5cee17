//! A daemon with an export to attack and a neighbour on the same I/O thread, and what must be the same afterwards.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use egret_loadgen::client::{Client, ClientOptions, Op, Shape};

use crate::support::attacker::{Ask, Attacker, DATA, Device, SIZE, Variant};
use crate::support::await_that;
use crate::support::disk::Disk;
use crate::support::guest::MEMORY_NAME;
use crate::support::http::get;
use crate::support::neighbour::{EXTENT, Neighbour};
use crate::support::scratch::Scratch;
use crate::support::server::{Options, Program, Server};
use crate::support::wire::{F_VERSION_1, GET_FEATURES, Wire};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// What a disk is attacked on.
pub enum Victim<'a> {
    /// An image of so many bytes, and options of its blockdev.
    Image(u64, &'a str),
    /// An image that is there already.
    At(&'a Path, &'a str),
    /// No disk at all, of so many bytes.
    Null(u64, &'a str),
}

/// A small disk past the page cache.
pub const DIRECT: Victim<'_> = Victim::Image(MIB, "aio=io_uring,cache.direct=on");

/// What a daemon has; none of it may be more because of an attack that is over.
#[derive(Debug)]
struct Footprint {
    maps: usize,
    descriptors: usize,
    threads: usize,
    resident: u64,
    logged: usize,
}

/// How much more it may be: worker threads stay for a while, each with a stack and an arena of the allocator.
const MORE_THREADS: usize = 4;
const MORE_MAPS: usize = 24;
const MORE_RESIDENT: u64 = 64 * MIB;
const MORE_LOGGED: usize = 8 << 10;

/// The socket of a daemon's metrics, in its scratch folder.
const METRICS: &str = "metrics";

/// A daemon, an export to attack, and a neighbour that writes and verifies.
pub struct Scene {
    pub neighbour: Neighbour,
    pub server: Server,
    pub victim: PathBuf,
    pub variant: Variant,
    before: Footprint,
    scratch: Scratch,
}

/// Every device and layout that the program under test has.
pub fn variants() -> impl Iterator<Item = Variant> {
    let is_egret = Program::under_test().is_egret();
    Variant::ALL.into_iter().filter(move |variant| is_egret || *variant == Variant::PLAIN)
}

impl Scene {
    pub fn open(variant: Variant, victim: &Victim<'_>) -> Self {
        Self::open_beside(variant, victim, "aio=io_uring,cache.direct=on", None)
    }

    /// [`open`](Self::open), with options of the neighbour's disk, and with a standard error that is not looked at.
    pub fn open_beside(variant: Variant, victim: &Victim<'_>, neighbour: &str, stderr: Option<Stdio>) -> Self {
        let scratch = Scratch::new();
        let program = Program::under_test();
        let sockets = ["victim", "neighbour"].map(|name| scratch.path(name));
        let options = Options::new().iothread("io0", "thread-pool-max=4");
        let options = match *victim {
            Victim::Image(len, more) => options.disk("d0", &scratch.image("victim", len), more),
            Victim::At(image, more) => options.disk("d0", image, more),
            Victim::Null(len, more) => {
                let more = if more.is_empty() { String::new() } else { format!(",{more}") };
                options.words(["--blockdev".into(), format!("driver=null-co,node-name=d0,size={len}{more}")])
            }
        };
        let options = match variant.device {
            Device::Blk => options.export("e0", "d0", &sockets[0], "writable=on,iothread=io0"),
            Device::Scsi => {
                let unit = "writable=on,iothread=io0,luns.0.lun=0,luns.0.node-name=d0";
                options.export_scsi("e0", &sockets[0], unit)
            }
        };
        let options = options.disk("d1", &scratch.image("neighbour", EXTENT), neighbour).export(
            "e1",
            "d1",
            &sockets[1],
            "writable=on,iothread=io0",
        );
        let options = if program.is_egret() { options.metrics(&scratch.path(METRICS)) } else { options };
        let server = match stderr {
            Some(stderr) => Server::start_logging_to(stderr, &program, &options),
            None => Server::start(&program, &options),
        };
        let [victim, socket] = sockets;
        let neighbour = Neighbour::start(&socket);
        neighbour.await_progress();
        let before = Footprint::of(&server);
        let mut scene = Self { neighbour, server, victim, variant, before, scratch };
        // What is made once, for the first requests, is not held against an attack.
        drop(scene.attacker(MIB));
        // Whose session is over when another's begins.
        let mut next = Wire::agree(&scene.victim, F_VERSION_1);
        next.ask(GET_FEATURES, &[]).expect("an answer");
        scene.before = Footprint::of(&scene.server);
        scene.before.descriptors -= 1;
        drop(next);
        scene
    }

    /// An attacker with so many bytes of data whose queue works.
    pub fn attacker(&self, len: u64) -> Attacker {
        let mut attacker = Attacker::boot(&self.victim, self.variant, len);
        attacker.read_honestly();
        attacker
    }

    /// How often the I/O thread's loop has come round; other programs do not say that.
    pub fn turns(&self) -> Option<u64> {
        Program::under_test().is_egret().then(|| {
            let (_, page) = get(&self.scratch.path(METRICS), "/metrics").expect("metrics");
            let sample =
                page.lines().find_map(|line| line.strip_prefix("egret_iothread_turns_total{iothread=\"io0\"} "));
            sample.and_then(|turns| turns.parse().ok()).expect("a number of turns")
        })
    }

    /// Checks everything that must not have suffered from an attack that is over.
    pub fn suffered_nothing_of(&mut self, what: &str) {
        let what = format!("{what}, {:?}", self.variant);
        assert!(self.server.is_alive(), "the daemon outlives {what}");
        self.neighbour.await_progress();
        self.serves_the_next(&what);
        self.neighbour.await_progress();
        let Footprint { maps, descriptors, threads, resident, logged } = self.before;
        await_that(&format!("the attacker's memory to be unmapped after {what}"), || {
            !self.server.maps().iter().any(|line| line.contains(MEMORY_NAME))
        });
        await_that(&format!("no more than {descriptors} descriptors after {what}"), || {
            self.server.descriptors() <= descriptors
        });
        await_that(&format!("about {threads} threads after {what}"), || {
            self.server.threads() <= threads + MORE_THREADS
        });
        await_that(&format!("about {maps} maps after {what}"), || self.server.maps().len() <= maps + MORE_MAPS);
        await_that(&format!("about {resident} bytes resident after {what}"), || {
            self.server.resident() <= resident + MORE_RESIDENT
        });
        if Program::under_test().is_egret() {
            let log = self.server.log();
            assert!(bytes(&log) <= logged + MORE_LOGGED, "{what} is not worth {} bytes: {log:#?}", bytes(&log));
        }
    }

    /// Whether a new client of the attacked export is served.
    fn serves_the_next(&self, what: &str) {
        match self.variant.device {
            Device::Blk => {
                let read = Disk::connect(&self.victim).and_then(|mut disk| disk.first().read(0, 4096));
                read.unwrap_or_else(|error| panic!("after {what}: {error}"));
            }
            Device::Scsi => {
                let options = ClientOptions { patience: crate::support::PATIENCE, ..ClientOptions::default() };
                let disk = Client::start_scsi(&self.victim, options, Shape::default());
                let mut queue = disk.unwrap_or_else(|error| panic!("after {what}: {error}")).queues.remove(0);
                queue.submit(0, Op::Read, 0, 4096);
                queue.publish().expect("our own eventfd");
                await_that("a read", || queue.has_completed());
                assert!(queue.reap().expect("our chain").is_some_and(|completed| completed.is_ok()), "after {what}");
            }
        }
    }

    /// An attack and [`suffered_nothing_of`](Self::suffered_nothing_of) it.
    pub fn survives(&mut self, what: &str, attack: impl FnOnce(&Self)) {
        attack(self);
        self.suffered_nothing_of(what);
    }

    /// The end: the daemon obeys, in time, and is content.
    pub fn close(self) {
        let variant = self.variant;
        let (status, log) = self.end();
        assert_eq!(status.code(), Some(0), "the daemon ends as it should, {variant:?}: {log:#?}");
    }

    /// The end: the daemon obeys, in time. What it says, and has said.
    pub fn end(self) -> (ExitStatus, Vec<String>) {
        let Self { neighbour, mut server, .. } = self;
        drop(neighbour);
        let status = server.end();
        (status, server.log())
    }
}

impl Footprint {
    fn of(server: &Server) -> Self {
        Self {
            maps: server.maps().len(),
            descriptors: server.descriptors(),
            threads: server.threads(),
            resident: server.resident(),
            logged: bytes(&server.log()),
        }
    }
}

/// The length of lines in a file.
fn bytes(log: &[String]) -> usize {
    log.iter().map(|line| line.len() + 1).sum()
}

#[test]
fn a_client_that_behaves_takes_nothing_with_it() {
    for variant in variants() {
        let mut scene = Scene::open(variant, &DIRECT);
        scene.survives("honest reads", |scene| {
            let mut attacker = scene.attacker(MIB);
            // Three times round the ring.
            for _ in 0..3 {
                (0..SIZE).for_each(|_| attacker.ask(Ask::Read { at: 0 }, &[(DATA, 4096)]));
                attacker.publish();
                attacker.await_all();
                assert_eq!(attacker.status(), 0);
            }
        });
        scene.close();
    }
}
