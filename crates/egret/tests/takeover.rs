//! A daemon that is killed under load, and the next one, which goes on where it was.
//!
//! The client keeps its memory, its ring and the record of what is in flight, as a virtual machine monitor does that
//! connects again.

mod support;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use egret_vring::memory::{GuestMemory, Region};
use egret_vring::ring::{Driver, DriverConfig, PACKED_BASE, Piece};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use support::PATIENCE;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use support::wire::*;

const BLOCK: usize = 4096;
const BLOCKS: usize = 512;
const SIZE: u16 = 128;
const DEPTH: usize = 32;

/// Where the ring is, in the memory that client and daemon share.
const RING: u64 = 0x1000_0000;
/// Where the slots are, each with a header, a status byte behind it, and on the next page a block of data.
const SLOTS: u64 = RING + 0x10_0000;
const SLOT: u64 = 2 * BLOCK as u64;
const STATUS: u64 = 16;
const DATA: u64 = BLOCK as u64;
const MEMORY: u64 = 0x10_0000 + DEPTH as u64 * SLOT;

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;

#[derive(Clone, Copy)]
struct Sent {
    kind: u32,
    block: usize,
    version: u32,
}

/// A client that survives its daemon.
struct Client {
    memory: Arc<GuestMemory>,
    memory_file: File,
    driver: Driver,
    wire: Option<Wire>,
    kick: OwnedFd,
    call: OwnedFd,
    record: Option<(Vec<u8>, OwnedFd)>,
    slots: Vec<Option<Sent>>,
    /// What each block holds, or will when what is in flight has ended.
    versions: Vec<u32>,
    random: u64,
    sent: u64,
    done: u64,
}

impl Client {
    fn new(packed: bool) -> Self {
        let region = Region::anonymous(RING, MEMORY).expect("memory");
        let memory_file = region.file.try_clone().expect("a descriptor");
        let memory = Arc::new(GuestMemory::empty().with(region).expect("a mapping"));
        let (indirect, base) = if packed { (None, PACKED_BASE as u16) } else { (Some(4), 65500) };
        let config = DriverConfig { size: SIZE, packed, event_idx: true, indirect, base };
        let driver = Driver::new(&memory, RING, config).expect("a ring");
        let [kick, call] = [(); 2].map(|()| eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
        let (slots, versions) = (vec![None; DEPTH], vec![0; BLOCKS]);
        Self {
            memory,
            memory_file,
            driver,
            wire: None,
            kick,
            call,
            record: None,
            slots,
            versions,
            random: 1,
            sent: 0,
            done: 0,
        }
    }

    /// Connects, hands over memory and record, and starts the queue, knowing no more of it than the ring says. A packed one
    /// says nothing, and is told to begin where it once began.
    fn connect(&mut self, socket: &Path) {
        assert!(self.is_let_in(socket), "the daemon takes the queue in");
    }

    /// As [`connect`](Self::connect), with a record that the daemon may not like.
    fn is_let_in(&mut self, socket: &Path) -> bool {
        let queue = self.driver.queue();
        let packed = if queue.packed { F_RING_PACKED } else { 0 };
        let mut wire = Wire::agree(socket, F_VERSION_1 | F_INDIRECT_DESC | F_EVENT_IDX | packed);
        let record = self.record.get_or_insert_with(|| {
            let (message, file) = wire.ask_inflight(1, SIZE).expect("an answer");
            (message, file.expect("a record"))
        });
        let mut used = [0; 2];
        assert!(self.memory.read(queue.used + 2, &mut used));
        let base = if queue.packed { queue.base } else { u16::from_le_bytes(used).into() };
        let mut must = |request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]| {
            assert_eq!(wire.order(request, payload, fds).expect("an answer"), 0, "request {request} is fine");
        };
        must(SET_INFLIGHT_FD, &record.0, &[record.1.as_fd()]);
        must(ADD_MEM_REG, &u64s(&[0, RING, MEMORY, RING, 0]), &[self.memory_file.as_fd()]);
        must(SET_VRING_NUM, &u32s(&[0, SIZE.into()]), &[]);
        must(SET_VRING_BASE, &u32s(&[0, base]), &[]);
        must(SET_VRING_ADDR, &u64s(&[0, queue.desc, queue.used, queue.avail, 0]), &[]);
        must(SET_VRING_CALL, &u64s(&[0]), &[self.call.as_fd()]);
        must(SET_VRING_KICK, &u64s(&[0]), &[self.kick.as_fd()]);
        let is_let_in = !wire.refuses(SET_VRING_ENABLE, &u32s(&[0, 1]), &[]);
        self.wire = Some(wire);
        is_let_in
    }

    /// The record's file.
    fn record_file(&self) -> File {
        let (_, file) = self.record.as_ref().expect("it has connected");
        file.try_clone().expect("a descriptor").into()
    }

    /// As a null disk does.
    fn forget_what_was_written(&mut self) {
        self.versions.fill(0);
        self.slots.iter_mut().flatten().for_each(|sent| sent.version = 0);
    }

    fn random(&mut self, below: usize) -> usize {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % below
    }

    /// Keeps every slot busy until so many more requests have ended.
    fn load(&mut self, requests: u64) {
        let until = self.done + requests;
        loop {
            for slot in 0..DEPTH {
                if self.slots[slot].is_none() {
                    self.send(slot);
                }
            }
            if self.driver.publish() {
                rustix::io::write(&self.kick, &1u64.to_ne_bytes()).expect("our own eventfd");
            }
            if self.done >= until {
                return;
            }
            self.reap();
        }
    }

    /// Waits until nothing is in flight.
    fn drain(&mut self) {
        while self.slots.iter().any(Option::is_some) {
            self.reap();
        }
        assert_eq!(self.done, self.sent, "each request has ended once");
    }

    fn send(&mut self, slot: usize) {
        let block = self.random(BLOCKS);
        let is_taken = self.slots.iter().flatten().any(|other| other.kind != FLUSH && other.block == block);
        let kind = if is_taken { FLUSH } else { [READ, WRITE, WRITE, WRITE][self.random(4)] };
        if kind == WRITE {
            self.versions[block] += 1;
        }
        let version = self.versions[block];
        let at = SLOTS + slot as u64 * SLOT;
        let header = [u64::from(kind), (block * BLOCK / 512) as u64].map(u64::to_le_bytes).concat();
        let data = if kind == WRITE { content(block, version) } else { vec![0xee; BLOCK] };
        for (offset, bytes) in [(0, &header[..]), (STATUS, &[0xff]), (DATA, &data)] {
            assert!(self.memory.write(at + offset, bytes));
        }
        let piece = |offset, len| Piece { addr: at + offset, len };
        let (header, data, status) = (piece(0, 16), piece(DATA, BLOCK as u32), piece(STATUS, 1));
        let added = match kind {
            READ => self.driver.add(&[header], &[data, status], slot as u64),
            WRITE => self.driver.add(&[header, data], &[status], slot as u64),
            _ => self.driver.add(&[header], &[status], slot as u64),
        };
        added.expect("there are more descriptors than slots");
        self.slots[slot] = Some(Sent { kind, block, version });
        self.sent += 1;
    }

    /// Waits until something has ended, and looks at it.
    fn reap(&mut self) {
        if self.driver.arm_calls() {
            let mut polled = [PollFd::new(&self.call, PollFlags::IN)];
            let patience = Timespec::try_from(PATIENCE).expect("a short time");
            assert!(poll(&mut polled, Some(&patience)).expect("poll") > 0, "waited {PATIENCE:?} to be called");
            rustix::io::read(&self.call, &mut [0; 8]).expect("our own eventfd");
        }
        while let Some(used) = self.driver.reap().expect("nothing ends twice") {
            let sent = self.slots[used.token as usize].take().expect("it was in flight");
            let at = SLOTS + used.token * SLOT;
            let (mut status, mut data) = ([0xff], vec![0; BLOCK]);
            assert!(self.memory.read(at + STATUS, &mut status) && self.memory.read(at + DATA, &mut data));
            assert_eq!(status, [0], "it succeeds");
            assert!(sent.kind != READ || data == content(sent.block, sent.version), "block {} as written", sent.block);
            self.done += 1;
        }
    }
}

/// What a block holds when it has been written so often.
fn content(block: usize, version: u32) -> Vec<u8> {
    if version == 0 { vec![0; BLOCK] } else { u64s(&vec![(block as u64) << 32 | u64::from(version); BLOCK / 8]) }
}

#[test]
fn a_daemon_killed_under_load_is_taken_over_by_the_next_and_no_request_notices() {
    let disks = ["aio=io_uring,cache.direct=on", "aio=native,cache.direct=on", "aio=threads"];
    for (disk, packed) in disks.into_iter().flat_map(|disk| [(disk, false), (disk, true)]) {
        let scratch = Scratch::new();
        let (image, socket) = (scratch.image("disk", (BLOCK * BLOCKS) as u64), scratch.path("socket"));
        let options = Options::new().iothread("io0", "").disk("d0", &image, disk).export(
            "e0",
            "d0",
            &socket,
            "writable=on,iothread=io0",
        );
        let mut client = Client::new(packed);
        for _ in 0..6 {
            let server = Server::start(&Program::egret(), &options);
            client.connect(&socket);
            client.load(300);
            assert_eq!(server.complaints(), Vec::<String>::new());
            // Dropping it is SIGKILL.
            drop(server);
        }
        let server = Server::start(&Program::egret(), &options);
        client.connect(&socket);
        client.drain();
        client.wire = None;
        assert_eq!(server.terminate().code(), Some(0));
        let holds = std::fs::read(&image).expect("our own image");
        for (block, bytes) in holds.chunks(BLOCK).enumerate() {
            assert!(bytes == content(block, client.versions[block]), "{disk}, {packed}: block {block} is as written");
        }
    }
}

/// Waits until the daemon has taken up all that is in flight: it asks, before it sleeps, to be kicked for the next.
fn await_taken_up(client: &Client) {
    support::await_that("the daemon to take all of it up", || {
        let mut event = [0; 2];
        let queue = client.driver.queue();
        // In a packed ring it asks by descriptor, in a split one by chain.
        let (at, taken) = match queue.packed {
            true => (queue.used, SIZE - client.driver.free() as u16),
            false => (queue.used + 4 + 8 * u64::from(SIZE), DEPTH as u16),
        };
        assert!(client.memory.read(at, &mut event));
        u16::from_le_bytes(event) == (queue.base as u16).wrapping_add(taken)
    });
}

#[test]
fn a_record_that_somebody_has_written_to_costs_its_session_and_no_more() {
    // The features, the version, the length, and the used index, which may not be where the ring has none.
    for (packed, fields) in [(false, [0, 8, 10, 14]), (true, [0, 8, 10, 16])] {
        spoil_a_record(packed, fields);
    }
}

fn spoil_a_record(packed: bool, fields: [u64; 4]) {
    let scratch = Scratch::new();
    let socket = scratch.path("socket");
    let disk = |latency: &str| Options::new().iothread("io0", "").null("d0", latency);
    let serve =
        |disk: Options| Server::start(&Program::egret(), &disk.export("e0", "d0", &socket, "writable=on,iothread=io0"));
    let mut client = Client::new(packed);
    let slow = serve(disk("latency-ns=3600000000000,read-zeroes=on"));
    client.connect(&socket);
    client.load(0);
    await_taken_up(&client);
    drop(slow);
    client.forget_what_was_written();

    let fast = serve(disk("read-zeroes=on"));
    let record = client.record_file();
    assert!(record.set_len(0).is_err(), "what the daemon makes cannot be taken from under it");
    for (complaints, at) in (1..).zip(fields) {
        let mut was = [0; 2];
        record.read_exact_at(&mut was, at).expect("our own memory");
        record.write_all_at(&0x7777u16.to_ne_bytes(), at).expect("our own memory");
        assert!(!client.is_let_in(&socket), "a record with something else at {at}");
        support::await_that("a line in the log", || fast.complaints().len() >= complaints);
        let said = fast.complaints();
        assert!(said.len() == complaints && said[complaints - 1].contains("in-flight record of "), "{said:?}");
        record.write_all_at(&was, at).expect("our own memory");
    }
    client.connect(&socket);
    client.drain();
}

#[test]
fn what_a_daemon_had_no_time_for_is_done_by_the_next() {
    let scratch = Scratch::new();
    let socket = scratch.path("socket");
    let serve = |latency: &str| {
        let disk = Options::new().iothread("io0", "").null("d0", &format!("read-zeroes=on,latency-ns={latency}"));
        Server::start(&Program::egret(), &disk.export("e0", "d0", &socket, "writable=on,iothread=io0"))
    };
    for packed in [false, true] {
        let mut client = Client::new(packed);
        let slow = serve("3600000000000");
        client.connect(&socket);
        client.load(0);
        await_taken_up(&client);
        drop(slow);
        client.forget_what_was_written();
        let fast = serve("0");
        client.connect(&socket);
        client.drain();
        assert_eq!(fast.complaints(), Vec::<String>::new());
    }
}

#[test]
fn requests_that_waited_because_others_had_failed_are_done_by_the_next_daemon_however_the_first_ended() {
    type End = fn(Server, &mut Client, &Path);
    let ends: [(&str, End); 4] = [
        // Dropping it is SIGKILL.
        ("killed", |server, _, _| drop(server)),
        ("asked to end", |server, _, _| assert_eq!(server.terminate().code(), Some(0))),
        ("left by its client, who comes back", |server, client, socket| {
            client.wire = None;
            client.connect(socket);
            await_taken_up(client);
            drop(server);
        }),
        ("asked where the queue stands", |server, client, _| {
            let wire = client.wire.as_mut().expect("it is connected");
            wire.ask(GET_VRING_BASE, &u32s(&[0, 0])).expect("the queue stops");
            drop(server);
        }),
    ];
    for ((how, end), packed) in ends.into_iter().flat_map(|end| [(end, false), (end, true)]) {
        let scratch = Scratch::new();
        let (image, socket) = (scratch.image("disk", (BLOCK * BLOCKS) as u64), scratch.path("socket"));
        let options = Options::new().iothread("io0", "").disk("d0", &image, "").export(
            "e0",
            "d0",
            &socket,
            "writable=on,iothread=io0,werror=stop",
        );
        let mut client = Client::new(packed);
        // Half of the disk, or a quarter.
        let server = Server::start(&Program::egret_with_files_of(1024), &options);
        client.connect(&socket);
        client.load(0);
        support::await_that("a write that fails", || !server.complaints().is_empty());
        await_taken_up(&client);
        end(server, &mut client, &socket);

        let server = Server::start(&Program::egret(), &options);
        client.connect(&socket);
        client.load(300);
        client.drain();
        client.wire = None;
        assert_eq!((server.terminate().code(), how), (Some(0), how));
        let holds = std::fs::read(&image).expect("our own image");
        for (block, bytes) in holds.chunks(BLOCK).enumerate() {
            assert!(bytes == content(block, client.versions[block]), "{how}, {packed}: block {block} is as written");
        }
    }
}
