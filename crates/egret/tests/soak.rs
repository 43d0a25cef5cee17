//! Everything that may happen to a daemon, at random and under verification, for as long as `EGRET_SOAK_SECONDS` says: a
//! second where it says nothing, so that the driver itself is tested. `make soak HOURS=` asks for more. `make proof` goes
//! on until the daemon was killed `EGRET_SOAK_KILLS` times, and the disk has lost its power `EGRET_SOAK_LOSSES` times.
//!
//! A machine keeps 32 requests in flight on a disk that fails, another as many on a disk that grows, and each verifies every
//! block that it reads; a request that never ends is the end of the run, and so is a block that holds anything else than
//! what was written last. One that fails is counted, and there must be none. Between two of their bursts one thing happens, while their requests are in flight. To
//! have another happen add an [`Act`].

mod support;
#[path = "migration/vm.rs"]
#[allow(dead_code, reason = "a machine that does not move after all is not among these")]
mod vm;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use egret_faultdisk::{Effect, ErrnoName, Fault, FaultDisk, IoType, Order, Survivors};
use egret_lab::disks::LoopDevice;
use egret_loadgen::random::Random;
use rustix::process::Signal;
use serde_json::json;

use support::attacker::{Attacker, Variant};
use support::qmp::Qmp;
use support::scratch::{Scratch, is_root_or_skips};
use support::server::{Options, Program, Server};
use vm::{BLOCK, BLOCKS, Machine, Vm, content};

/// Requests between two acts.
const BURST: u64 = 200;
const QUEUES: u16 = 4;
/// Two places for a daemon, with one disk: the machine is on one of them.
const PLACES: [&str; 2] = ["a", "b"];
/// The exports that machines are on: of the disk that fails, and of the one that grows.
const EXPORTS: [&str; 2] = ["e0", "e1"];

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    /// A queue runs on another I/O thread from here on.
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
    /// A write finds no room, and waits likewise.
    Fill,
    /// Requests hang, while the other machine goes on.
    Hang,
    /// A neighbour on the same I/O thread breaks its ring.
    Attack,
    /// The other machine's disk grows.
    Resize,
    /// The machines move to another daemon.
    Migrate,
    /// The disk loses its power, and what was not flushed to it, and comes back.
    LosePower,
}

impl Act {
    const COUNT: usize = 15;
    const ALL: [Self; Self::COUNT] = [
        Self::Move,
        Self::Reopen,
        Self::Kill,
        Self::Replace,
        Self::Fail,
        Self::Tear,
        Self::Shorten,
        Self::Delay,
        Self::Reorder,
        Self::Fill,
        Self::Hang,
        Self::Attack,
        Self::Resize,
        Self::Migrate,
        Self::LosePower,
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
            Self::Fill => "faults: ENOSPC",
            Self::Hang => "faults: hung",
            Self::Attack => "hostile neighbours",
            Self::Resize => "disks grown",
            Self::Migrate => "machines migrated",
            Self::LosePower => "losses of power",
        }
    }
}

/// What a round is of.
#[derive(Clone, Copy, Debug)]
struct Kind {
    machine: Machine,
    is_write_through: bool,
    /// What the disk that fails has now.
    aio: &'static str,
}

impl Kind {
    /// Rounds that follow one another differ; after 24 of them all kinds have been.
    fn of(round: u64) -> Self {
        let is = |bit: u32| round >> bit & 1 == 1;
        let aio = ["threads", "io_uring", "native"][(round % 3) as usize];
        Self { machine: Machine { scsi: is(1), packed: is(2), queues: QUEUES }, is_write_through: is(0), aio }
    }
}

/// A daemon that is replaced again and again, its disks and its machines.
struct Soak {
    scratch: Scratch,
    /// Over the disk: of a file a flush that fails would have lost writes, which a machine has to hear of.
    device: LoopDevice,
    disk: FaultDisk,
    kind: Kind,
    /// Where the machines are.
    at: usize,
    server: Option<Server>,
    qmp: Qmp,
    vms: [Vm; 2],
    random: Random,
    grown: u64,
}

/// Starts a daemon at a place.
fn start(scratch: &Scratch, device: &LoopDevice, kind: Kind, at: usize) -> (Server, Qmp) {
    let path = |what: &str| scratch.path(&format!("{}-{what}", PLACES[at]));
    let cache = if kind.is_write_through { "on" } else { "off" };
    let mut options = Options::new()
        .iothread("io0", "")
        .iothread("io1", "fd-monitor=epoll")
        .disk("d0", device.path(), &format!("aio={},cache.direct=on", kind.aio))
        .disk("d1", &scratch.image_path("other"), "")
        .null("d2", "")
        .export("e2", "d2", &path("e2"), "writable=on,iothread=io0")
        .monitor("m", &path("qmp"));
    for ((export, disk), iothread) in EXPORTS.into_iter().zip(["d0", "d1"]).zip(["io0", "io1"]) {
        let more = format!(
            "writable=on,allow-inactive=on,num-queues={QUEUES},iothread={iothread},rerror=stop,werror=stop,writethrough={cache}"
        );
        options = match kind.machine.scsi {
            false => options.export(export, disk, &path(export), &more),
            true => options.export_scsi(export, &path(export), &format!("{more},luns.0.lun=0,luns.0.node-name={disk}")),
        };
    }
    (Server::start(&Program::egret(), &options), Qmp::connect(&path("qmp")))
}

impl Soak {
    fn new(kind: Kind, seed: u64) -> Self {
        let scratch = Scratch::new();
        let grown = (BLOCK * BLOCKS) as u64;
        let disk = scratch.fault_disk(grown);
        scratch.image("other", grown);
        let device = LoopDevice::over(&disk.path()).expect("a loop device");
        let (server, qmp) = start(&scratch, &device, kind, 0);
        let vms = EXPORTS.map(|_| Vm::new(kind.machine));
        let mut soak = Self {
            scratch,
            device,
            disk,
            kind,
            at: 0,
            server: Some(server),
            qmp,
            vms,
            random: Random::new(seed),
            grown,
        };
        soak.run(Vm::connect);
        soak
    }

    /// A socket of the daemon that the machine is on.
    fn path(&self, what: &str) -> PathBuf {
        self.scratch.path(&format!("{}-{what}", PLACES[self.at]))
    }

    /// Each machine does something, on an export that is told to go on wherever it was stopped, and a disk that has its
    /// power back soon. It is told the export's socket.
    fn run(&mut self, act: impl Fn(&mut Vm, &Path) + Sync) {
        let sockets = EXPORTS.map(|export| self.path(export));
        let Self { vms, qmp, disk, random, .. } = self;
        std::thread::scope(|scope| {
            let act = &act;
            let machines: Vec<_> =
                vms.iter_mut().zip(&sockets).map(|(vm, socket)| scope.spawn(move || act(vm, socket))).collect();
            while machines.iter().any(|machine| !machine.is_finished()) {
                restore_power(disk, qmp, random);
                qmp.run("block-export-resume", json!({"id": "e0"}));
                std::thread::sleep(Duration::from_millis(2));
            }
            for machine in machines {
                machine.join().expect("every request is served, and what is read is what was written");
            }
        });
    }

    fn burst(&mut self) {
        self.run(|vm, _| vm.load(BURST));
    }

    fn act(&mut self, act: Act) {
        let one_of = |random: &mut Random, words: &[&'static str]| words[random.below(words.len() as u64) as usize];
        match act {
            Act::Move => {
                let queue = self.random.below(QUEUES.into());
                // It is on one of the two, and that is no move.
                let [first, then] = [["io0", "io1"], ["io1", "io0"]][self.random.below(2) as usize];
                let moves = [first, then].map(|iothread| {
                    let place = json!({"id": "e0", "queue": queue, "iothread": iothread});
                    self.qmp.run("egret-move-queue", place)["pause-ns"] != 0
                });
                assert!(moves.contains(&true), "queue {queue} has moved");
            }
            Act::Reopen => {
                let aio = one_of(&mut self.random, &["threads", "native", "io_uring"]);
                let options = json!({"driver": "host_device", "node-name": "d0", "filename": self.device.path(), "aio": aio,
                                     "cache": {"direct": true}});
                self.qmp.run("blockdev-reopen", json!({"options": [options]}));
                self.kind.aio = aio;
            }
            Act::Kill => self.replace(Signal::KILL),
            Act::Replace => self.replace(Signal::TERM),
            Act::Fail => self.inject_soon(Effect::Errno(ErrnoName::Eio)),
            Act::Tear => self.inject_soon(Effect::Torn(512)),
            Act::Shorten => self.inject_soon(Effect::Short(512)),
            Act::Delay => self.inject_soon(Effect::LateMs(20)),
            Act::Reorder => self.inject_soon(Effect::Reordered(4)),
            Act::Fill => {
                // As soon as that, because fewer than half of a burst are writes of data.
                let after = self.random.below(BURST / 8);
                let fault =
                    Fault { iotype: Some(IoType::Write), after, ..self.fault(Effect::Errno(ErrnoName::Enospc)) };
                self.inject(fault);
            }
            Act::Hang => self.hang(),
            Act::Attack => {
                let variant = Variant { packed: self.random.below(2) == 1, ..Variant::PLAIN };
                let mut attacker = Attacker::boot(&self.path("e2"), variant, 1 << 20);
                attacker.read_honestly();
                attacker.chain_that_breaks();
                attacker.publish();
                attacker.await_end();
            }
            Act::Resize => {
                self.grown += 1 << 20;
                self.qmp.run("block_resize", json!({"node-name": "d1", "size": self.grown}));
            }
            Act::Migrate => self.migrate(),
            Act::LosePower => self.lose_power(),
        }
    }

    /// How many requests of the disk a fault has met.
    fn struck(&self) -> u64 {
        self.disk.tell(Order::Status).expect("it listens").struck
    }

    fn inject(&self, fault: Fault) {
        self.disk.tell(Order::Inject(fault)).expect("it listens");
    }

    fn inject_soon(&mut self, effect: Effect) {
        let fault = self.fault(effect);
        self.inject(fault);
    }

    /// Of one to three requests of the next burst.
    fn fault(&mut self, effect: Effect) -> Fault {
        let (after, times) = (self.random.below(BURST / 2), Some(1 + self.random.below(3)));
        Fault { iotype: None, sectors: None, after, times, effect }
    }

    /// The disk is in nobody's way, nor in the monitor's; but that a submission to the kernel may wait where another request hangs,
    /// and the disk's queues may be on the other's I/O thread.
    fn hang(&mut self) {
        // What has ended and was not looked at has its slot still.
        self.run(|vm, _| vm.drain());
        let before = self.struck();
        let fault = Fault { after: 0, ..self.fault(Effect::Never) };
        self.inject(fault);
        self.vms[0].submit();
        support::await_that("a request to hang", || self.struck() > before);
        if self.kind.aio == "threads" {
            self.vms[1].load(BURST);
        }
        self.qmp.run("query-block-exports", json!({}));
        for order in [Order::Clear, Order::Release] {
            self.disk.tell(order).expect("it listens");
        }
    }

    /// Has the machines' requests in flight when the signal comes.
    fn replace(&mut self, signal: Signal) {
        // What waits because it failed would wait beyond the end; and what has ended has its slot until it is looked at.
        self.disk.tell(Order::Clear).expect("it listens");
        self.run(|vm, _| vm.drain());
        let mut server = self.server.take().expect("a daemon");
        self.vms.iter_mut().for_each(Vm::submit);
        server.send(signal);
        server.await_end();
        self.disk.tell(Order::Clear).expect("it listens");
        let (server, qmp) = start(&self.scratch, &self.device, self.kind, self.at);
        (self.server, self.qmp) = (Some(server), qmp);
        self.run(Vm::reconnect);
    }

    fn migrate(&mut self) {
        let to = 1 - self.at;
        let (server, qmp) = start(&self.scratch, &self.device, self.kind, to);
        let from = std::mem::replace(&mut self.at, to);
        self.run(|vm, socket| {
            vm.begin_to_move();
            vm.load(BURST / 2);
            vm.copy_once_more();
            vm.load(BURST / 2);
            vm.stop();
            vm.arrive(socket);
        });
        self.qmp = qmp;
        let left = self.server.replace(server).expect("a daemon");
        assert_eq!(left.terminate().code(), Some(0), "of place {}", PLACES[from]);
    }

    /// Nothing that was acknowledged is lost: it was written through, at whichever request the power went, or flushed before.
    fn lose_power(&mut self) {
        if self.kind.is_write_through {
            self.inject_soon(Effect::PowerOff);
            self.burst();
        } else {
            self.run(|vm, _| {
                vm.drain();
                vm.flush(1);
            });
            self.disk.tell(Order::PowerOff).expect("it listens");
        }
        self.disk.tell(Order::Clear).expect("it listens");
        restore_power(&self.disk, &mut self.qmp, &mut self.random);
    }

    /// Ends the daemon, and compares the disks with what was written. Returns how many bytes that is.
    fn end(mut self) -> u64 {
        self.disk.tell(Order::Clear).expect("it listens");
        self.run(|vm, _| vm.drain());
        self.vms.iter_mut().for_each(Vm::leave);
        assert_eq!(self.server.take().expect("a daemon").terminate().code(), Some(0));
        let images = [self.disk.path(), self.scratch.image_path("other")];
        for (vm, image) in self.vms.iter().zip(&images) {
            let holds = std::fs::read(image).expect("our own disk");
            assert!(holds.len() >= BLOCKS * BLOCK);
            for (block, bytes) in holds.chunks(BLOCK).take(BLOCKS).enumerate() {
                assert!(bytes == content(block, vm.versions[block]), "block {block} is as written");
            }
        }
        (images.len() * BLOCKS * BLOCK) as u64
    }
}

/// Gives the disk its power back if it has none; what was not flushed to it is there or not, by chance. What has been written
/// and is to be made stable yet must not find that the power is back, for no disk tells that it was away: so the queues
/// move before, and a queue that moves has nothing under way.
fn restore_power(disk: &FaultDisk, qmp: &mut Qmp, random: &mut Random) {
    if !disk.tell(Order::Status).expect("it listens").is_on {
        for iothread in ["io1", "io0"] {
            qmp.run("egret-map-queues", json!({"id": "e0", "iothread": iothread}));
        }
        disk.tell(Order::PowerOn(Survivors::Random(random.below(u64::MAX)))).expect("an image");
    }
}

/// What a run came to.
#[derive(Default)]
struct Table {
    seconds: u64,
    requests: u64,
    verified: u64,
    errors: u64,
    acts: [u64; Act::COUNT],
    injected: u64,
}

impl Table {
    /// What has not happened as often as it is to, and of that what lacks most.
    fn missing(&self, wanted: &[(Act, u64)]) -> Option<Act> {
        let lacks = |&(act, count): &(Act, u64)| count.saturating_sub(self.acts[act as usize]);
        wanted.iter().filter(|each| lacks(each) > 0).max_by_key(|each| lacks(each)).map(|(act, _)| *act)
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| in {} s | |\n|---|---|", self.seconds)?;
        writeln!(f, "| requests | {} |", self.requests)?;
        for (act, count) in Act::ALL.iter().zip(self.acts) {
            writeln!(f, "| {} | {count} |", act.name())?;
        }
        writeln!(f, "| requests of the disk that a fault has met | {} |", self.injected)?;
        writeln!(f, "| errors seen by the machines | {} |\n| bytes verified | {} |", self.errors, self.verified)
    }
}

#[test]
fn whatever_happens_to_a_daemon_no_request_fails_and_no_byte_is_another() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let number = |name: &str, otherwise| std::env::var(name).map_or(otherwise, |value| value.parse().expect(name));
    let (seconds, seed) = (number("EGRET_SOAK_SECONDS", 1), number("EGRET_SOAK_SEED", 1));
    let wanted = [(Act::Kill, number("EGRET_SOAK_KILLS", 0)), (Act::LosePower, number("EGRET_SOAK_LOSSES", 0))];
    let place = std::env::var_os("EGRET_SOAK_TABLE").map(PathBuf::from);
    let (begun, mut table) = (Instant::now(), Table::default());
    let (mut random, mut round) = (Random::new(seed), 0);
    loop {
        round += 1;
        let mut soak = Soak::new(Kind::of(round), seed + round);
        // Everything once, and then by chance.
        for step in 0..4 * Act::COUNT {
            let missing = table.missing(&wanted);
            let act = match (step, missing) {
                (0..Act::COUNT, _) => Act::ALL[step],
                // Half of what happens is what is to happen so often.
                (_, Some(act)) if random.below(2) == 0 => act,
                _ => Act::ALL[random.below(Act::COUNT as u64) as usize],
            };
            soak.act(act);
            table.acts[act as usize] += 1;
            soak.burst();
        }
        for vm in &soak.vms {
            table.requests += vm.done;
            table.verified += vm.verified;
            table.errors += vm.errors;
        }
        table.injected += soak.disk.tell(Order::Clear).expect("it listens").struck;
        table.verified += soak.end();
        table.seconds = begun.elapsed().as_secs();
        // After each round, so that a run that is cut off has counted for something.
        if let Some(place) = &place {
            std::fs::write(place, table.to_string()).expect("a file for the table");
        }
        if round > 1 && begun.elapsed() > Duration::from_secs(seconds) && table.missing(&wanted).is_none() {
            break;
        }
    }
    println!("{table}");
    assert_eq!(table.errors, 0, "requests that failed");
}
