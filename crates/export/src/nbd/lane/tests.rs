//! A TRIM with FUA ends with a flush, which a lane gives to its engines a while after the discard has ended.

use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use egret_disk::{DebugEvent, DebugRules, Driver, EngineOptions, InjectError, IoType, Options};
use egret_event_loop::{ClockReads, EventLoop, LoopOptions, MonitorChoice};
use egret_nbd::Channel;
use egret_nbd::protocol::{Headers, Request, command, command_flag};
use egret_polling::{Parameters, PolicyKind};

use super::super::client::Contexts;
use super::super::server::Place;
use super::*;

const EIO: u8 = 5;

/// A lane that runs on a loop, of a disk whose flushes fail.
struct Fixture {
    io: EventLoop<Worker>,
    id: SourceId,
    inbox: Arc<Inbox>,
}

impl Fixture {
    fn new() -> Self {
        let error = InjectError {
            event: DebugEvent::FlushToDisk,
            state: None,
            iotype: Some(IoType::Flush),
            errno: Errno::IO,
            sector: None,
            once: false,
        };
        let blkdebug = DebugRules { inject_error: vec![error], set_state: Vec::new() };
        let null = Driver::Null { size: 1 << 20, latency: Nanos::ZERO, read_zeroes: false };
        let disk = Arc::new(Disk::open(&Options { blkdebug, ..Options::new("null", null) }).unwrap());
        let options = LoopOptions {
            name: "io".into(),
            monitor: MonitorChoice::Ppoll,
            policy: egret_polling::build(PolicyKind::Off, &Parameters::default()).unwrap(),
            window_max: Nanos::ZERO,
            idle_after: Nanos::MAX,
            clock_reads: ClockReads::ByPhase,
        };
        let engines = |ring| EngineSet::new(EngineOptions { ring, ..EngineOptions::default() });
        let mut io = EventLoop::<Worker>::new(options, engines).unwrap();
        let terms = Terms { export: "e".into(), writable: true, writethrough: false };
        let (inbox, queries) = (Arc::<Inbox>::default(), Arc::new(Queries::new().unwrap()));
        let log = Arc::new(PeerLog::new("e"));
        let lane = Lane::new(terms, log, disk, Arc::default(), queries, Arc::clone(&inbox)).unwrap();
        let mut worker = Worker::from(lane);
        worker.set_home(LoopHandle::new(&io));
        let id = io.attach(worker).map_err(|(_, e)| e).unwrap();
        Self { io, id, inbox }
    }

    /// A client that has sent these already.
    fn connect(&self, input: Vec<u8>) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        self.inbox.post(Letter::Client(Box::new(NewClient {
            channel: Channel::new(theirs.into()),
            headers: Headers::Simple,
            contexts: Contexts::default(),
            input,
            output: Vec::new(),
            place: Place::nowhere(),
        })));
        ours
    }
}

fn request(flags: u16, command: u16, length: u64) -> Vec<u8> {
    let mut bytes = [0; 32];
    let len = Request { flags, command, cookie: 7, offset: 0, length }.write(Headers::Simple, &mut bytes);
    bytes[..len].to_vec()
}

/// What a client is told: the error of the reply that is there.
fn told(client: &mut UnixStream) -> Option<u8> {
    let mut reply = [0; 16];
    match client.read_exact(&mut reply) {
        Ok(()) => Some(reply[7]),
        Err(e) if e.kind() == ErrorKind::WouldBlock => None,
        Err(e) => panic!("{e}"),
    }
}

#[test]
fn the_flush_of_a_client_that_has_gone_ends_nothing_of_the_one_that_comes_in_its_place() {
    let mut fixture = Fixture::new();
    // It has so many answers to come that it is not read from, and so it is found gone when it is sent them.
    let trim = request(command_flag::FUA, command::TRIM, 4096);
    let gone = fixture.connect([trim, request(0, command::READ, 0).repeat(255)].concat());
    drop(gone);
    fixture.io.turn().unwrap();
    // The first request of each has the same number.
    let write = [request(0, command::WRITE, 512), vec![1; 512]].concat();
    let mut next = fixture.connect(write);
    let told = loop {
        fixture.io.turn().unwrap();
        if let Some(told) = told(&mut next) {
            break told;
        }
    };
    assert_eq!(told, 0, "its write did not fail");
}

#[test]
fn a_lane_is_drained_when_the_flush_has_ended_that_follows_what_had() {
    let mut fixture = Fixture::new();
    let mut client = fixture.connect(request(command_flag::FUA, command::TRIM, 4096));
    let is_drained = Arc::new(AtomicBool::new(false));
    let (id, drained) = (fixture.id, Arc::clone(&is_drained));
    // A turn runs this when it has dispatched, before it submits: the discard ends on a lane that is stopped.
    LoopHandle::new(&fixture.io).send(move |io| io.quiesce(id, move |_| drained.store(true, Ordering::Relaxed)));
    while !is_drained.load(Ordering::Relaxed) {
        fixture.io.turn().unwrap();
    }
    assert_eq!(told(&mut client), Some(EIO));
}
