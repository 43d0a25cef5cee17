//! Guests that migrate from daemon to daemon, each with the same image.
//!
//! `EGRET_MIGRATIONS` says how often each of them does, where that is to be more often than a test has time for.

mod guests;
mod rbd;
#[path = "../support/mod.rs"]
mod support;
mod vm;

use std::path::PathBuf;

use egret_needs::Ceph;
use serde_json::{Value, json};

use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use vm::{BLOCK, BLOCKS, Machine, SIZE, Vm, content};

/// The variable that says how often each combination moves.
const TIMES: &str = "EGRET_MIGRATIONS";

fn moves(usual: usize) -> usize {
    std::env::var(TIMES).map_or(usual, |times| times.parse().expect("EGRET_MIGRATIONS is a number"))
}

/// A daemon of two that have one image.
struct Host {
    server: Option<Server>,
    qmp: Qmp,
    options: Options,
    socket: PathBuf,
    monitor: PathBuf,
}

impl Host {
    fn start(scratch: &Scratch, name: &str, blockdev: &str, machine: Machine) -> Self {
        let [socket, monitor] = ["socket", "qmp"].map(|what| scratch.path(&format!("{name}-{what}")));
        let queues = machine.queues;
        let export = format!("writable=on,allow-inactive=on,num-queues={queues},iothread.0=io0,iothread.1=io1");
        let options = Options::new()
            .iothread("io0", "fd-monitor=io_uring")
            .iothread("io1", "fd-monitor=epoll")
            .words(["--blockdev", blockdev])
            .monitor("m", &monitor);
        let options = match machine.scsi {
            true => options.export_scsi("e0", &socket, &format!("{export},luns.0.lun=0,luns.0.node-name=d0")),
            false => options.export("e0", "d0", &socket, &export),
        };
        let server = Server::start(&Program::egret(), &options);
        Self { server: Some(server), qmp: Qmp::connect(&monitor), options, socket, monitor }
    }

    /// Kills the daemon, and starts another in its place.
    fn restart(&mut self) {
        // Dropping it is SIGKILL.
        self.server = None;
        self.server = Some(Server::start(&Program::egret(), &self.options));
        self.qmp = Qmp::connect(&self.monitor);
    }

    fn is_active(&mut self) -> bool {
        self.qmp.run("query-named-block-nodes", json!({}))[0]["active"].as_bool().expect("a flag")
    }
}

/// What both daemons have.
#[derive(Clone)]
enum Image {
    File(PathBuf),
    /// One of a cluster.
    Rbd(&'static Ceph, String),
}

impl Image {
    fn content(&self) -> Vec<u8> {
        match self {
            Self::File(path) => std::fs::read(path).expect("our own image"),
            Self::Rbd(ceph, name) => {
                let copy = ceph.dir().join(format!("{name}.copy"));
                ceph.run(&format!("rbd export --no-progress rbd/{name} {}", copy.display()));
                std::fs::read(copy).expect("our own copy")
            }
        }
    }
}

/// Two daemons with one image, and a machine on the first.
struct Pair {
    hosts: [Host; 2],
    at: usize,
    vm: Vm,
    image: Image,
    _scratch: Scratch,
}

impl Pair {
    fn new(machine: Machine, disk: &str) -> Self {
        let scratch = Scratch::new();
        let image = scratch.image("disk", (BLOCK * BLOCKS) as u64);
        let blockdev = format!("file,node-name=d0,filename={},{disk}", image.display());
        Self::with(machine, scratch, Image::File(image), &blockdev)
    }

    fn with(machine: Machine, scratch: Scratch, image: Image, blockdev: &str) -> Self {
        let hosts = ["a", "b"].map(|name| Host::start(&scratch, name, blockdev, machine));
        let mut vm = Vm::new(machine);
        vm.connect(&hosts[0].socket);
        Self { hosts, at: 0, vm, image, _scratch: scratch }
    }

    fn here(&mut self) -> &mut Host {
        &mut self.hosts[self.at]
    }

    /// Moves the machine to the other daemon under load; `meanwhile` is done while it runs here, and is logged.
    fn migrate(&mut self, meanwhile: impl FnOnce(&mut Self)) {
        self.vm.load(40);
        self.vm.begin_to_move();
        self.vm.load(40);
        meanwhile(self);
        self.vm.copy_once_more();
        self.vm.load(20);
        self.vm.stop();
        self.at = 1 - self.at;
        let socket = self.here().socket.clone();
        self.vm.arrive(&socket);
        assert_eq!([0, 1].map(|host| self.hosts[host].is_active()), [self.at == 0, self.at == 1]);
    }

    /// Ends everything, and compares the image with what was written.
    fn end(mut self) {
        self.vm.load(100);
        self.vm.drain();
        assert!(self.vm.verified > 0, "it has read");
        assert_eq!(self.vm.errors, 0, "no request has failed");
        self.vm.leave();
        for host in self.hosts {
            let mut server = host.server.expect("it runs");
            assert_eq!(server.end().code(), Some(0), "{:?}", server.log());
            let mut complaints = server.complaints();
            // A cluster waits a while for the answer of a client that was killed.
            let expected = ["breaking the exclusive lock", "is left behind open"];
            complaints.retain(|line| !expected.iter().any(|expected| line.contains(expected)));
            assert_eq!(complaints, Vec::<String>::new());
        }
        let holds = self.image.content();
        for (block, bytes) in holds.chunks(BLOCK).take(BLOCKS).enumerate() {
            assert!(bytes == content(block, self.vm.versions[block]), "block {block} is as written");
        }
    }
}

const ENGINES: [&str; 4] =
    ["aio=io_uring,cache.direct=on", "aio=native,cache.direct=on", "aio=threads", "aio=io_uring"];

/// All that a machine can be: its device, its rings, and how many.
fn machines() -> impl Iterator<Item = Machine> {
    let queues = [1, 3, 8];
    let kinds = [(false, false), (false, true), (true, false), (true, true)];
    kinds.into_iter().flat_map(move |(scsi, packed)| queues.map(|queues| Machine { scsi, packed, queues }))
}

const BLK: Machine = Machine { scsi: false, packed: false, queues: 2 };

fn moves_to_and_fro(disk: &str) {
    for machine in machines() {
        println!("{machine:?} {disk}");
        let mut pair = Pair::new(machine, disk);
        (0..moves(4)).for_each(|_| pair.migrate(|_| {}));
        pair.end();
    }
}

#[test]
fn machines_move_to_and_fro_with_io_uring_and_no_request_notices() {
    moves_to_and_fro(ENGINES[0]);
}

#[test]
fn machines_move_to_and_fro_with_linux_aio_and_no_request_notices() {
    moves_to_and_fro(ENGINES[1]);
}

#[test]
fn machines_move_to_and_fro_with_workers_and_no_request_notices() {
    moves_to_and_fro(ENGINES[2]);
}

#[test]
fn machines_move_to_and_fro_with_the_page_cache_and_no_request_notices() {
    moves_to_and_fro(ENGINES[3]);
}

#[test]
fn a_packed_ring_that_stopped_where_it_once_began_is_taken_for_what_it_is() {
    let mut pair = Pair::new(Machine { scsi: false, packed: true, queues: 1 }, ENGINES[0]);
    // Two descriptors each: two laps, after which both wrap counters are what they were.
    pair.vm.flush(SIZE);
    pair.vm.begin_to_move();
    pair.vm.stop();
    pair.at = 1;
    let socket = pair.here().socket.clone();
    pair.vm.arrive(&socket);
    pair.end();
}

#[test]
fn a_migration_that_is_cancelled_changes_nothing_whether_the_queues_had_stopped_or_not() {
    for machine in machines() {
        let mut pair = Pair::new(machine, ENGINES[0]);
        for has_stopped in [false, true, false, true] {
            pair.vm.begin_to_move();
            pair.vm.load(40);
            if has_stopped {
                pair.vm.stop();
                assert!(!pair.here().is_active());
                pair.vm.go_on();
            }
            pair.vm.stay();
            pair.vm.load(40);
            assert!(pair.here().is_active());
            pair.migrate(|_| {});
        }
        pair.end();
    }
}

#[test]
fn whichever_daemon_is_killed_at_whichever_point_the_machine_arrives() {
    for machine in machines().filter(|machine| machine.queues == 3) {
        let mut pair = Pair::new(machine, ENGINES[0]);
        (0..moves(2)).for_each(|_| pair.migrate_among_kills());
        pair.end();
    }
}

#[test]
fn a_disk_changes_in_every_way_while_its_machine_moves() {
    for (machine, disk) in [(BLK, ENGINES[2]), (Machine { scsi: true, packed: true, queues: 2 }, ENGINES[0])] {
        let mut pair = Pair::new(machine, disk);
        for round in 0..moves(12) {
            let Image::File(image) = pair.image.clone() else { unreachable!("it is one") };
            pair.migrate(|pair| {
                let size = ((BLOCKS + 1 + round) * BLOCK) as u64;
                let (aio, direct) = [("io_uring", true), ("native", true), ("threads", false)][round % 3];
                let reopened = json!({"driver": "file", "node-name": "d0", "filename": image, "aio": aio,
                                      "cache": {"direct": direct}});
                let here = pair.here();
                here.qmp.run("block_resize", json!({"node-name": "d0", "size": size}));
                pair.vm.load(20);
                let here = pair.here();
                let place = json!({"id": "e0", "queue": 0, "iothread": (["io1", "io0"][round % 2])});
                here.qmp.run_in_time("egret-move-queue", place);
                here.qmp.run_in_time("blockdev-reopen", json!({"options": [reopened]}));
                pair.vm.load(20);
                pair.limit(if round % 2 == 0 { 5000 } else { 0 });
                pair.vm.load(20);
            });
            let here = pair.here();
            let node = here.qmp.run("query-named-block-nodes", json!({}))[0].take();
            assert_eq!(node["image"]["virtual-size"], ((BLOCKS + 1 + round) * BLOCK) as u64);
        }
        pair.end();
    }
}

impl Pair {
    /// Moves the machine, and kills each daemon at each point.
    fn migrate_among_kills(&mut self) {
        // Where the machine is: before it begins to move, and while memory is copied.
        for is_moving in [false, true] {
            if is_moving {
                self.vm.begin_to_move();
            }
            self.vm.load(40);
            self.restart(self.at);
            self.vm.load(40);
        }
        // Where it goes, before it comes; where it was, when it has stopped; where it is now, at once and later.
        self.restart(1 - self.at);
        self.vm.stop();
        self.here().restart();
        self.at = 1 - self.at;
        let socket = self.here().socket.clone();
        self.vm.arrive(&socket);
        self.restart(self.at);
        self.vm.load(40);
        self.restart(self.at);
    }

    /// Kills a daemon, and starts another in its place; if the machine is there it connects again.
    fn restart(&mut self, host: usize) {
        self.hosts[host].restart();
        if host == self.at {
            let socket = self.here().socket.clone();
            self.vm.reconnect(&socket);
        }
    }

    fn limit(&mut self, iops: u64) {
        let mut limits: Value = json!({"id": "d0", "iops": iops});
        for key in ["bps", "bps_rd", "bps_wr", "iops_rd", "iops_wr"] {
            limits[key] = json!(0);
        }
        self.here().qmp.run("block_set_io_throttle", limits);
    }
}
