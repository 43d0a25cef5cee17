//! What becomes of a lane's clients, turn by turn.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use egret_disk::{
    BlockLimits, Blocks, DebugEvent, DebugRules, Driver, Engine, EngineError, EngineOptions, FlushError, InjectError,
    IoType, Limit, Limits, OpenCause, Options, Rates, Remote, RemoteDisk, RemoteKind, Shape, ThrottleGroup,
};
use egret_event_loop::{Backend, ClockReads, EventLoop, LoopOptions, MonitorChoice, clock};
use egret_nbd::Channel;
use egret_nbd::protocol::{DEFAULT_PAYLOAD, Headers, Request, command, command_flag};
use egret_polling::{EventKind, Parameters, PolicyKind};
use egret_virtio::RequestType;
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, poll};

use super::super::client::{Contexts, PART};
use super::super::extents;
use super::super::haggle::haggle;
use super::super::handshake::tests::said;
use super::super::kind::Kind;
use super::super::server::Place;
use super::*;
use crate::peer_log::tests::recorded;

const EIO: u8 = 5;

/// A lane that runs on a loop.
struct Fixture {
    io: EventLoop<Worker>,
    id: SourceId,
    inbox: Arc<Inbox>,
    queries: Arc<Queries>,
}

impl Fixture {
    /// Of a disk whose flushes fail.
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
        Self::of(&Options { blkdebug, ..Options::new("null", null) })
    }

    /// Of a disk of zeroes, which takes so long for each request.
    fn of_zeroes(latency: Nanos) -> Self {
        Self::of(&Options::new("null", Driver::Null { size: 64 << 20, latency, read_zeroes: true }))
    }

    fn of(disk: &Options) -> Self {
        let disk = Arc::new(Disk::open(disk).unwrap());
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
        let lane = Lane::new(terms, log, disk, Arc::default(), Arc::clone(&queries), Arc::clone(&inbox)).unwrap();
        let mut worker = Worker::from(lane);
        worker.set_home(LoopHandle::new(&io));
        let id = io.attach(worker).map_err(|(_, e)| e).unwrap();
        Self { io, id, inbox, queries }
    }

    /// Has so many requests begin at once, and then one a second.
    fn limit_requests(&mut self, burst: u64) {
        self.limit_requests_of(0, burst);
    }

    /// The same, where so many bytes are a request.
    fn limit_requests_of(&mut self, request_bytes: u64, burst: u64) {
        let total = Limit { average: 1, burst, burst_seconds: 1 };
        let limits = Limits { requests: Rates { total, ..Rates::default() }, request_bytes, ..Limits::default() };
        self.lane().core.disk.set_throttle_group(Some(&ThrottleGroup::new("g", limits)));
    }

    /// A client that has sent these already.
    fn connect(&self, input: Vec<u8>) -> UnixStream {
        self.connect_with(Headers::Simple, input)
    }

    fn connect_with(&self, headers: Headers, input: Vec<u8>) -> UnixStream {
        self.connect_and_tell(headers, input, Vec::new())
    }

    fn connect_and_tell(&self, headers: Headers, input: Vec<u8>, output: Vec<u8>) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        self.inbox.post(Letter::Client(Box::new(NewClient {
            channel: Channel::new(theirs.into()),
            headers,
            contexts: Contexts { allocation: headers != Headers::Simple, depth: false },
            input,
            output,
            place: Place::nowhere(),
        })));
        ours
    }

    fn lane(&mut self) -> &mut Lane {
        self.io.source(self.id).unwrap().lane().unwrap()
    }

    /// Until so many clients are there.
    fn await_clients(&mut self, count: usize) {
        while self.lane().clients.len() < count {
            self.io.turn().unwrap();
        }
    }

    /// Whether its sockets have anything to tell it, by so many seconds from now.
    fn hears(&mut self, seconds: i64) -> bool {
        let patience = Timespec { tv_sec: seconds, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.lane().descriptor(), PollFlags::IN)], Some(&patience)).unwrap() > 0
    }

    /// A turn, if the lane has something to do in one.
    fn goes_on(&mut self) -> bool {
        let goes_on = self.lane().poll();
        if goes_on {
            self.io.turn().unwrap();
        }
        goes_on
    }
}

fn request(flags: u16, command: u16, length: u64) -> Vec<u8> {
    request_at(0, flags, command, length)
}

fn request_at(offset: u64, flags: u16, command: u16, length: u64) -> Vec<u8> {
    let mut bytes = [0; 32];
    let len = Request { flags, command, cookie: 7, offset, length }.write(Headers::Simple, &mut bytes);
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

#[test]
fn a_lane_that_nobody_looks_at_does_the_flush_that_follows_what_has_ended() {
    let mut fixture = Fixture::new();
    // It has nothing to do, so that its loop looks at it when it hears of it, and at no other time.
    fixture.io.turn().unwrap();
    let mut client = fixture.connect(request(command_flag::FUA, command::TRIM, 4096));
    let told = loop {
        fixture.io.turn().unwrap();
        if let Some(told) = told(&mut client) {
            break told;
        }
    };
    assert_eq!(told, EIO);
}

#[test]
fn a_lane_that_is_stopped_begins_nothing_until_it_goes_on() {
    let mut fixture = Fixture::of_zeroes(NEVER);
    let mut client = fixture.connect(Vec::new());
    fixture.await_clients(1);
    fixture.io.quiesce(fixture.id, |_| ());
    client.write_all(&request(0, command::READ, 512)).unwrap();
    let look = |fixture: &mut Fixture| {
        for _ in 0..3 {
            fixture.io.wake(fixture.id);
            fixture.io.turn().unwrap();
        }
        fixture.lane().core.requests
    };
    assert_eq!(look(&mut fixture), 0);
    fixture.io.resume(fixture.id);
    assert_eq!(look(&mut fixture), 1);
}

/// What there is to hear.
fn heard(client: &mut UnixStream) -> usize {
    let (mut room, mut heard) = ([0; 1 << 16], 0);
    loop {
        match client.read(&mut room) {
            Ok(len) => heard += len,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return heard,
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn of_each_client_that_goes_one_line_says_so_and_why_it_is_hung_up_on() {
    const MIDDLE: &str = "'s connection is ended: it ended in the middle of a request";
    let write = request(0, command::WRITE, 4096);
    for (said, hangs_up, expected) in [
        (Vec::new(), true, " left"),
        (request(0, command::READ, 512), true, " left"),
        (request(0, command::DISCONNECT, 0), false, " left"),
        ([request(0, command::READ, 512), request(0, command::DISCONNECT, 0)].concat(), false, " left"),
        (request(0, command::READ, 512)[..10].to_vec(), true, MIDDLE),
        (write.clone(), true, MIDDLE),
        ([&write[..], &[1; 512]].concat(), true, MIDDLE),
        (vec![0; 28], false, "'s connection is ended: "),
    ] {
        let lines = recorded(|| {
            let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
            let client = fixture.connect(said);
            if hangs_up {
                client.shutdown(Shutdown::Write).unwrap();
            }
            fixture.await_clients(1);
            while fixture.lane().clients.iter().any(Option::is_some) {
                fixture.io.turn().unwrap();
            }
        });
        let told: Vec<_> = lines.iter().filter_map(|(_, line)| line.strip_prefix("export 'e': a client")).collect();
        assert!(told.len() == 1 && told[0].starts_with(expected), "{told:?}");
    }
}

const MIB: usize = 1 << 20;
/// Longer than any test.
const NEVER: Nanos = Nanos::from_millis(1 << 40);

#[test]
fn a_client_that_says_something_and_is_gone_at_once_is_found_gone() {
    // Something that is answered, and something that is not.
    for len in [28, 10] {
        let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
        let mut client = fixture.connect(Vec::new());
        fixture.await_clients(1);
        while fixture.goes_on() {}
        // One event tells of both.
        client.write_all(&request(0, command::READ, 0)[..len]).unwrap();
        drop(client);
        while fixture.lane().clients.iter().any(Option::is_some) {
            fixture.io.turn().unwrap();
        }
    }
}

#[test]
fn a_client_that_takes_its_reply_gives_its_lane_nothing_to_do() {
    let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
    let mut client = fixture.connect(Vec::new());
    fixture.await_clients(1);
    while fixture.goes_on() {}
    for _ in 0..10 {
        client.write_all(&request(0, command::READ, 512)).unwrap();
        let mut left = 16 + 512;
        while left > 0 {
            fixture.io.turn().unwrap();
            left -= heard(&mut client);
        }
        while fixture.goes_on() {}
        assert!(!fixture.hears(0));
    }
}

#[test]
fn a_client_that_takes_its_replies_late_has_the_rest_as_soon_as_there_is_room_and_then_nobody_is_told_of_room_any_more()
{
    let data = Driver::Null { size: 64 << 20, latency: Nanos::ZERO, read_zeroes: false };
    let mut fixture = Fixture::of(&Options::new("null", data));
    let mut client = fixture.connect(request(0, command::READ, PART).repeat(3));
    fixture.await_clients(1);
    for _ in 0..2 {
        let mut left = 3 * (16 + MIB);
        while left > 0 {
            while fixture.goes_on() {}
            assert!(!fixture.hears(0), "there is no room yet");
            left -= heard(&mut client);
            if left > 0 {
                assert!(fixture.hears(30), "there is room");
                fixture.io.turn().unwrap();
            }
        }
        while fixture.goes_on() {}
        assert!(!fixture.hears(0), "there is nothing to send");
        client.write_all(&request(0, command::READ, PART).repeat(3)).unwrap();
        fixture.io.turn().unwrap();
    }
}

#[test]
fn a_wait_that_a_client_s_request_has_ended_was_ended_by_a_queue_as_far_as_policies_are_told() {
    let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
    let mut client = fixture.connect(Vec::new());
    fixture.await_clients(1);
    while fixture.goes_on() {}
    // Whatever is to be dispatched has been.
    fixture.io.wake(fixture.id);
    fixture.io.turn().unwrap();
    fixture.io.record_waits(10);
    for _ in 0..3 {
        client.write_all(&request(0, command::READ, 512)).unwrap();
        let mut left = 16 + 512;
        while left > 0 {
            fixture.io.turn().unwrap();
            left -= heard(&mut client);
        }
    }
    let waits = fixture.io.take_recording(String::new()).unwrap().waits;
    let kinds: Vec<_> = waits.iter().filter(|wait| wait.blocked).map(|wait| wait.ended_by).collect();
    assert_eq!(kinds, [EventKind::Queue; 3]);
}

#[test]
fn what_was_asked_for_before_a_farewell_is_answered_though_nothing_more_can_come() {
    let mut fixture = Fixture::of_zeroes(Nanos::from_millis(1));
    let mut client = fixture.connect([request(0, command::READ, 512), request(0, command::DISCONNECT, 0)].concat());
    client.shutdown(Shutdown::Write).unwrap();
    fixture.await_clients(1);
    while fixture.lane().clients.iter().any(Option::is_some) {
        fixture.io.turn().unwrap();
    }
    let mut answer = Vec::new();
    // Who closes it need not have done that yet.
    client.set_nonblocking(false).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.len(), 16 + 512);
}

#[test]
fn requests_that_are_not_answered_and_answers_that_are_not_sent_are_so_many_together() {
    const UNANSWERED: usize = 200;
    const MOST: usize = 256;
    let mut fixture = Fixture::of_zeroes(NEVER);
    // Those of no length are answered at once, and the answers are sent at the end of a turn.
    let input = [request(0, command::FLUSH, 0).repeat(UNANSWERED), request(0, command::READ, 0).repeat(300)];
    let mut client = fixture.connect(input.concat());
    let mut answered = Vec::new();
    while answered.iter().sum::<usize>() < 300 {
        fixture.io.turn().unwrap();
        answered.push(heard(&mut client) / 16);
    }
    assert_eq!(answered.iter().max(), Some(&(MOST - UNANSWERED)), "{answered:?}");
    assert_eq!(fixture.lane().core.requests, UNANSWERED as u64);
}

#[test]
fn a_long_read_is_done_part_by_part_and_alone_where_its_data_comes_without_its_place() {
    let (short, part, long) = (512, PART, 3 * PART);
    for (headers, asked, parts) in [
        (Headers::Simple, vec![long], 1),
        (Headers::Simple, vec![short, long], 1),
        (Headers::Simple, vec![long, short], 1),
        (Headers::Simple, vec![short, part, short], 3),
        (Headers::Structured, vec![long], 3),
        (Headers::Structured, vec![short, long], 4),
    ] {
        let mut fixture = Fixture::of_zeroes(NEVER);
        let input: Vec<u8> = asked.iter().flat_map(|len| request(0, command::READ, *len)).collect();
        let _client = fixture.connect_with(headers, input);
        fixture.await_clients(1);
        while fixture.goes_on() {}
        assert_eq!(fixture.lane().core.parts.len(), parts, "{headers:?} {asked:?}");
    }
}

#[test]
fn a_request_that_is_done_in_parts_counts_once_against_limits() {
    const PARTS: usize = 32;
    const BYTES: usize = PARTS * MIB;
    for (command, answer) in [(command::READ, 16 + BYTES), (command::CACHE, 16)] {
        for request_bytes in [0, BYTES as u64] {
            let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
            fixture.limit_requests_of(request_bytes, PARTS as u64);
            let others = request(0, command::READ, 512).repeat(PARTS);
            let mut client = fixture.connect([request(0, command, BYTES as u64), others].concat());
            let mut left = answer + PARTS * (16 + 512);
            while left > 0 {
                fixture.io.turn().unwrap();
                left -= heard(&mut client);
                // With what it counts as more the last of the others would be over the brim.
                let waits = fixture.io.backend().deadline().is_some_and(|at| at > clock::now());
                assert!(!waits, "{command} where {request_bytes} bytes are one");
            }
        }
    }
}

#[test]
fn requests_of_one_part_count_against_limits_whatever_they_ask_for_and_wherever() {
    const MANY: usize = 16;
    let write = [request(0, command::WRITE, 512), vec![1; 512]].concat();
    let cache = request_at(512, 0, command::CACHE, 512);
    for (asked, answer) in [(request(0, command::READ, 512), 16 + 512), (write, 16), (cache, 16)] {
        let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
        // Four, one over the brim, and then one a second.
        fixture.limit_requests(4);
        let mut client = fixture.connect(asked.repeat(MANY));
        for _ in 0..8 {
            fixture.io.wake(fixture.id);
            fixture.io.turn().unwrap();
        }
        let answered = heard(&mut client) / answer;
        assert!((1..MANY).contains(&answered), "{answered} were answered");
    }
}

#[test]
fn what_a_client_has_cached_counts_as_so_many_of_the_longest_reads() {
    const LONGEST: u64 = DEFAULT_PAYLOAD as u64;
    let null = Driver::Null { size: 64 * LONGEST, latency: Nanos::ZERO, read_zeroes: false };
    let mut fixture = Fixture::of(&Options::new("null", null));
    fixture.limit_requests(2);
    let mut client = fixture.connect(request(0, command::CACHE, 64 * LONGEST));
    // Two at once, and one that goes over the brim; a minute would go by before the last.
    let waits = loop {
        fixture.io.turn().unwrap();
        let waits = fixture.io.backend().deadline().is_some_and(|at| at > clock::now());
        if waits || heard(&mut client) > 0 {
            break waits;
        }
    };
    assert!(waits);
}

#[test]
fn nothing_is_begun_behind_a_read_whose_data_comes_without_its_place_before_the_last_of_it_is_back() {
    // Longer than turns are, in which a client has so much work and no more.
    let slow = Driver::Null { size: 64 << 20, latency: Nanos::from_millis(20), read_zeroes: false };
    let mut fixture = Fixture::of(&Options::new("null", slow));
    let mut client = fixture.connect([2 * PART, 512].map(|len| request(0, command::READ, len)).concat());
    fixture.await_clients(1);
    let mut left = 2 * PART as usize + 512 + 2 * 16;
    while left > 0 {
        fixture.io.turn().unwrap();
        assert!(fixture.lane().core.parts.len() <= 1, "what ends first would come first");
        left -= heard(&mut client);
    }
}

#[test]
fn the_data_of_a_client_and_of_all_of_a_lane_takes_so_much_memory_and_each_has_a_part_of_its_own() {
    for (clients, mib) in [(1, 4), (2, 8), (4, 16), (8, 16), (20, 20)] {
        let mut fixture = Fixture::of_zeroes(NEVER);
        let asked = request(0, command::READ, 32 << 20);
        let _clients: Vec<_> = (0..clients).map(|_| fixture.connect_with(Headers::Structured, asked.clone())).collect();
        fixture.await_clients(clients);
        while fixture.goes_on() {}
        assert_eq!(fixture.lane().core.pool.taken(), mib * MIB, "{clients} clients");
    }
}

#[test]
fn what_takes_no_memory_waits_for_none() {
    const CLIENTS: usize = 20;
    let mut fixture = Fixture::of_zeroes(NEVER);
    let asked = [request(0, command::READ, PART), request(0, command::FLUSH, 0)].concat();
    let _clients: Vec<_> = (0..CLIENTS).map(|_| fixture.connect(asked.clone())).collect();
    fixture.await_clients(CLIENTS);
    while fixture.goes_on() {}
    assert_eq!(fixture.lane().core.parts.len(), 2 * CLIENTS);
}

#[test]
fn the_memory_of_a_client_is_given_back_however_its_requests_end_and_whatever_it_is_told() {
    let null = |read_zeroes| Driver::Null { size: 64 << 20, latency: Nanos::ZERO, read_zeroes };
    let error = |iotype| InjectError {
        event: DebugEvent::None,
        state: None,
        iotype: Some(iotype),
        errno: Errno::IO,
        sector: Some(0),
        once: false,
    };
    let inject_error = [IoType::Read, IoType::Write].map(error).into();
    let sick =
        Options { blkdebug: DebugRules { inject_error, set_state: Vec::new() }, ..Options::new("n", null(true)) };
    for (what, disk) in
        [("holes", Options::new("n", null(true))), ("data", Options::new("n", null(false))), ("errors", sick)]
    {
        for headers in [Headers::Simple, Headers::Structured] {
            let mut fixture = Fixture::of(&disk);
            let data = vec![1; MIB + 512];
            let write = [request(0, command::WRITE, data.len() as u64), data].concat();
            let asked = [write, request(0, command::READ, 3 << 20), request(0, command::CACHE, 3 << 20)].concat();
            let mut client = fixture.connect_with(headers, asked);
            fixture.await_clients(1);
            let settle = |fixture: &mut Fixture, client: &mut UnixStream| {
                while fixture.lane().core.requests > 0 || fixture.lane().core.pool.taken() > 0 {
                    heard(client);
                    fixture.io.wake(fixture.id);
                    fixture.io.turn().unwrap();
                }
                assert_eq!(fixture.lane().clients[0].as_ref().unwrap().memory, 0, "{what}, {headers:?}");
            };
            settle(&mut fixture, &mut client);
            // So is that of a single part.
            client.write_all(&request(0, command::READ, 4096)).unwrap();
            fixture.io.turn().unwrap();
            settle(&mut fixture, &mut client);
        }
    }
}

/// How many requests have succeeded, how many bytes that were, and how many have failed, by their types.
fn counted(fixture: &mut Fixture) -> Vec<(RequestType, u64, u64, u64)> {
    let counters = Arc::clone(&fixture.lane().core.counters);
    let all = RequestType::ALL.map(|of| (of, counters.op(of)));
    let some = all.into_iter().filter(|(_, stats)| stats.requests > 0);
    some.map(|(of, stats)| (of, stats.succeeded(), stats.bytes, stats.errors)).collect()
}

#[test]
fn what_is_done_for_a_client_that_does_not_wait_for_it_is_counted() {
    let write = |len: usize, sent: usize| [request(0, command::WRITE, len as u64), vec![1; sent]].concat();
    let trim = request(command_flag::FUA, command::TRIM, 4096);
    for (asked, requests, bytes) in [
        // All of it is in flight when it goes; or a part is, and another will never come whole; or none is any more.
        (write(4096, 4096).repeat(3), 3, 3 * 4096),
        (write(3 * MIB, MIB + 512), 1, MIB),
        (write(3 * MIB, 2 * MIB), 1, 2 * MIB),
        (write(4096, 512), 0, 0),
    ] {
        for latency in [Nanos::ZERO, Nanos::from_millis(50)] {
            let begun = clock::now();
            let mut fixture = Fixture::of_zeroes(latency);
            let mut client = fixture.connect(asked.clone());
            fixture.await_clients(1);
            while fixture.goes_on() && latency == Nanos::ZERO {}
            heard(&mut client);
            drop(client);
            while fixture.lane().clients.iter().any(Option::is_some) {
                fixture.io.turn().unwrap();
            }
            let expected = (requests > 0).then_some((RequestType::Write, requests, bytes as u64, 0));
            assert_eq!(counted(&mut fixture), Vec::from_iter(expected), "{requests} of {bytes}, {latency}");
            let longest = fixture.lane().core.counters.read().latency().map_or(Nanos::ZERO, |all| all.longest());
            assert!(longest <= clock::now() - begun, "{longest}");
        }
    }
    let mut fixture = Fixture::of_zeroes(Nanos::from_millis(50));
    drop(fixture.connect(trim));
    fixture.await_clients(1);
    while fixture.lane().clients.iter().any(Option::is_some) {
        fixture.io.turn().unwrap();
    }
    assert_eq!(counted(&mut fixture), [(RequestType::Discard, 1, 4096, 0)]);
}

#[test]
fn what_is_refused_counts_as_failed() {
    let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
    let asked = [command::READ, command::TRIM, command::WRITE_ZEROES, command::FLUSH, command::CACHE, 99];
    let asked = asked.map(|command| request(0, command, 511));
    let write = [request(0, command::WRITE, 511), vec![1; 511]].concat();
    let mut client = fixture.connect([asked.concat(), write].concat());
    let mut left = 7 * 16;
    while left > 0 {
        fixture.io.turn().unwrap();
        left -= heard(&mut client);
    }
    let expected = RequestType::ALL.map(|of| (of, 0, 0, if of == RequestType::Other { 2 } else { 1 }));
    assert_eq!(counted(&mut fixture), expected);
}

/// A disk of which only its shape is asked for.
#[derive(Debug)]
struct Far;

impl Remote for Far {
    fn kind(&self) -> RemoteKind {
        RemoteKind::Nbd
    }

    fn name(&self) -> &str {
        "far"
    }

    fn open(&self) -> Result<Shape, OpenCause> {
        let limits = BlockLimits {
            max_discard: MIB as u64,
            discard_granularity: 512,
            max_write_zeroes: MIB as u64,
            optimal_io: 0,
        };
        Ok(Shape { size: MIB as u64, blocks: Blocks { logical: 512, physical: 512 }, limits })
    }

    fn engine(&self) -> Result<Box<dyn Engine>, EngineError> {
        unimplemented!("nothing is asked of it")
    }

    fn ask_size(&self) -> std::io::Result<u64> {
        Ok(MIB as u64)
    }

    fn flush(&self) -> Result<(), FlushError> {
        Ok(())
    }
}

#[test]
fn zeroes_that_are_to_be_fast_or_not_at_all_are_refused_where_they_may_be_slow_and_others_are_not() {
    use command_flag::{FAST_ZERO, FUA, NO_HOLE};
    use egret_nbd::protocol::{export_flag, option};
    let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
    let core = &mut fixture.lane().core;
    core.disk = Arc::new(Disk::open(&Options::new("far", Driver::Remote(RemoteDisk::new(Far)))).unwrap());
    assert!(!core.disk.zeroes_fast(true));
    for flags in [0, NO_HOLE, FUA, NO_HOLE | FUA] {
        let ask = |flags| {
            let asked = Request { flags, command: command::WRITE_ZEROES, cookie: 7, offset: 0, length: 512 };
            Kind::of(&asked, Headers::Simple, Contexts::default(), core)
        };
        assert_eq!(ask(flags), Ok(Kind::WriteZeroes { unmap: flags & NO_HOLE == 0, fua: flags & FUA != 0 }));
        assert_eq!(ask(flags | FAST_ZERO), Err(Errno::OPNOTSUPP));
    }
    let chosen = said(option::EXPORT_NAME, b"disk");
    let (told, _) = haggle(&core.disk, false, &[&3_u32.to_be_bytes(), &chosen]);
    let flags = u16::from_be_bytes(*told.last_chunk().unwrap());
    assert_ne!(flags & export_flag::SEND_FAST_ZERO, 0, "whoever is told that may ask, and is told why not");
}

#[test]
fn what_is_allocated_is_told_to_who_has_asked_and_to_nobody_who_has_come_in_his_place() {
    let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
    let ask = |fixture: &mut Fixture| {
        let client = fixture.connect_with(Headers::Structured, request(0, command::BLOCK_STATUS, 4096));
        while fixture.lane().core.requests == 0 {
            fixture.io.turn().unwrap();
        }
        (client, fixture.lane().clients[0].as_ref().unwrap().id)
    };
    let (gone, of_gone) = ask(&mut fixture);
    drop(gone);
    while fixture.lane().core.requests > 0 {
        fixture.io.turn().unwrap();
    }
    // Both have the same place, and so have their questions.
    let (mut client, id) = ask(&mut fixture);
    let tell = |fixture: &mut Fixture, client| {
        let extents = vec![egret_disk::Extent { len: 4096, is_hole: true }];
        fixture.inbox.post(Letter::Extents { client, command: 0, extents });
        fixture.io.wake(fixture.id);
        fixture.io.turn().unwrap();
    };
    tell(&mut fixture, of_gone);
    assert_eq!((heard(&mut client), fixture.lane().core.requests), (0, 1));
    tell(&mut fixture, id);
    assert_eq!((heard(&mut client), fixture.lane().core.requests), (20 + 4 + 8, 0));
}

#[test]
fn events_of_a_client_s_socket_are_not_taken_for_those_of_who_has_its_place_while_that_is_being_closed() {
    let keys = [(0, 1), (0, 2), (1, 1)].map(|(index, generation)| ClientId { index, generation }.key());
    assert_eq!(keys.map(|key| key as u32), [0, 0, 1]);
    assert_ne!(keys[0], keys[1]);
}

#[test]
fn who_asks_what_is_allocated_and_does_not_listen_has_few_answers_kept_and_all_of_them_when_he_does() {
    const QUESTIONS: usize = 256;
    let extents: Vec<_> = (0..extents::MOST).map(|n| egret_disk::Extent { len: 512, is_hole: n % 2 == 0 }).collect();
    let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
    let questions = request(0, command::BLOCK_STATUS, 512 * extents::MOST as u64).repeat(QUESTIONS);
    let mut client = fixture.connect_with(Headers::Structured, questions);
    fixture.await_clients(1);
    let id = fixture.lane().clients[0].as_ref().unwrap().id;
    let kept = |fixture: &mut Fixture| fixture.lane().clients[0].as_ref().unwrap().answers;
    // Answers whatever is asked.
    let answer = |fixture: &mut Fixture| {
        loop {
            while fixture.goes_on() {}
            let asked = fixture.lane().core.requests;
            assert!(asked <= 8 && kept(fixture) <= 9 * (16 << 10), "{asked} asked, {} kept", kept(fixture));
            if asked == 0 {
                return;
            }
            for command in 0..8 {
                fixture.inbox.post(Letter::Extents { client: id, command, extents: extents.clone() });
            }
            fixture.io.wake(fixture.id);
            fixture.io.turn().unwrap();
        }
    };
    answer(&mut fixture);
    assert!(kept(&mut fixture) > 0, "it has taken all of it");
    let (len, mut heard_of) = (20 + 4 + 8 * extents::MOST, 0);
    while heard_of < QUESTIONS * len {
        heard_of += heard(&mut client);
        fixture.io.wake(fixture.id);
        fixture.io.turn().unwrap();
        answer(&mut fixture);
    }
    assert_eq!((heard_of, kept(&mut fixture)), (QUESTIONS * len, 0));
}

#[test]
fn questions_are_forgotten_of_the_client_that_is_gone_and_not_of_another_lane_s_or_the_next() {
    let null = Driver::Null { size: 512, latency: Nanos::ZERO, read_zeroes: true };
    let disk = Arc::new(Disk::open(&Options::new("null", null)).unwrap());
    let inboxes = [(); 2].map(|()| Arc::<Inbox>::default());
    let ids = [1, 2].map(|generation| ClientId { index: 0, generation });
    let queries = Queries::new().unwrap();
    for (inbox, client) in inboxes.iter().flat_map(|inbox| ids.map(|client| (inbox, client))) {
        let (inbox, disk) = (Arc::clone(inbox), Arc::clone(&disk));
        queries.ask(Query { inbox, client, command: 0, disk, offset: 0, len: 512, one: true });
    }
    queries.forget(&inboxes[0], ids[0]);
    let is_answering = queries.is_answering();
    assert!(!is_answering.load(Ordering::Acquire));
    assert_eq!(queries.in_order(), [ids[1], ids[0], ids[1]]);
    assert!(is_answering.load(Ordering::Acquire), "one of these, as far as others are told");
}

#[test]
fn a_turn_takes_in_so_much_work_however_few_bytes_ask_for_it() {
    for (asked, requests, bytes) in [
        (request(0, command::READ, 32 << 20).repeat(4), 10, 2 * MIB),
        (request(0, command::READ, 4096).repeat(200), 300, 2 * MIB),
        (request(0, command::TRIM, 4096).repeat(200), 1300, 0),
        (request(0, command::WRITE, 32 << 20), 10, 2 * MIB),
    ] {
        let mut fixture = Fixture::of_zeroes(NEVER);
        let clients: Vec<_> = (0..40).map(|_| fixture.connect_with(Headers::Structured, asked.clone())).collect();
        fixture.await_clients(clients.len());
        let (mut had_requests, mut had_bytes) = (0, 0);
        loop {
            let core = &fixture.lane().core;
            let (has_requests, has_bytes) = (core.requests, core.pool.taken());
            assert!(has_requests - had_requests <= requests, "{} requests", has_requests - had_requests);
            assert!(has_bytes - had_bytes <= bytes, "{} bytes", has_bytes - had_bytes);
            (had_requests, had_bytes) = (has_requests, has_bytes);
            if !fixture.goes_on() {
                break;
            }
        }
        // Whatever others have in memory, each has something.
        assert!(had_requests >= 40, "{had_requests} requests");
        assert!(bytes == 0 || (40 * 4096..=(16 + 40) * MIB).contains(&had_bytes), "{had_bytes} bytes");
    }
}

#[test]
fn a_turn_looks_for_zeroes_in_so_much_and_every_client_has_its_turns() {
    const CHUNK: usize = 32;
    let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
    let asked = request(0, command::READ, 32 << 20);
    // What they are told first does not fit into their sockets: by the time that it is heard there are many zeroes behind it.
    let connect = |_| fixture.connect_and_tell(Headers::Structured, asked.clone(), vec![0; MIB]);
    let mut clients: Vec<_> = (0..10).map(connect).collect();
    fixture.await_clients(clients.len());
    while fixture.goes_on() {}
    assert!(fixture.lane().core.pool.taken() >= 16 * MIB);
    let mut told = vec![0; clients.len()];
    let mut holes = vec![0; clients.len()];
    while holes.iter().any(|holes| *holes < 32) {
        let before: usize = holes.iter().sum();
        for ((client, told), holes) in clients.iter_mut().zip(&mut told).zip(&mut holes) {
            *told += heard(client);
            *holes = told.saturating_sub(MIB) / CHUNK;
        }
        let now = holes.iter().sum::<usize>() - before;
        assert!(now <= 2, "{now} holes of a MiB each, in a turn");
        let (least, most) = (holes.iter().min().unwrap(), holes.iter().max().unwrap());
        assert!(most - least <= 4, "{holes:?}");
        if *least < 32 {
            fixture.io.turn().unwrap();
        }
    }
}

#[test]
fn a_turn_answers_every_client_whose_answer_takes_little_whatever_was_done_for_them_before() {
    const HOLE: usize = 32;
    let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
    let asked = request(0, command::READ, MIB as u64);
    let mut clients: Vec<_> = (0..10).map(|_| fixture.connect_with(Headers::Structured, asked.clone())).collect();
    for client in &mut clients {
        while heard(client) == 0 {
            fixture.io.turn().unwrap();
        }
    }
    while fixture.goes_on() {}
    clients.iter_mut().for_each(|client| client.write_all(&request(0, command::READ, 4096)).unwrap());
    fixture.io.turn().unwrap();
    let heard: Vec<_> = clients.iter_mut().map(heard).collect();
    assert_eq!(heard, [HOLE; 10]);
}

#[test]
fn what_is_sent_at_a_time_fits_into_what_is_left_of_the_turn_however_many_replies_there_are() {
    const REPLY: usize = 16 + 4096;
    let data = Driver::Null { size: 1 << 20, latency: Nanos::ZERO, read_zeroes: false };
    let mut fixture = Fixture::of(&Options::new("null", data));
    // More than its socket takes.
    let mut client = fixture.connect(request(0, command::READ, 4096).repeat(256));
    fixture.await_clients(1);
    while fixture.goes_on() {}
    let rest_of_one = REPLY - heard(&mut client) % REPLY;
    let Lane { clients, core, .. } = fixture.lane();
    let its = clients[0].as_mut().unwrap();
    for left in [rest_of_one, 10_000] {
        assert!(its.note(EventFlags::OUT), "there is more");
        its.send(core, &mut { left }).unwrap();
        assert_eq!(heard(&mut client), left);
    }
}

#[test]
fn a_turn_hears_of_so_many_sockets_and_the_next_of_the_rest() {
    let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
    let mut clients: Vec<_> = (0..100).map(|_| fixture.connect(Vec::new())).collect();
    fixture.await_clients(clients.len());
    while fixture.goes_on() {}
    // It is answered at once, because there is nothing to read.
    clients.iter_mut().for_each(|client| client.write_all(&request(0, command::READ, 0)).unwrap());
    fixture.io.turn().unwrap();
    let mut answered = 0;
    loop {
        let now = clients.iter_mut().filter_map(told).count();
        assert!(now <= EVENTS, "{now} were heard of in a turn");
        answered += now;
        if !fixture.goes_on() {
            break;
        }
    }
    answered += clients.iter_mut().filter_map(told).count();
    assert_eq!(answered, clients.len());
}

#[test]
fn who_asks_about_holes_gets_his_turn_however_many_others_have_asked_and_gone() {
    let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
    let ask = |fixture: &mut Fixture, count: usize| {
        let client = fixture.connect_with(Headers::Structured, request(0, command::BLOCK_STATUS, 4096).repeat(count));
        let before = fixture.lane().core.requests;
        while fixture.lane().core.requests < before + count as u64 {
            fixture.io.turn().unwrap();
        }
        client
    };
    for _ in 0..20 {
        drop(ask(&mut fixture, 8));
        while fixture.lane().core.requests > 0 {
            fixture.io.turn().unwrap();
        }
    }
    let _greedy = ask(&mut fixture, 8);
    let _modest = ask(&mut fixture, 1);
    let ids: Vec<_> = fixture.lane().clients.iter().flatten().map(|client| client.id).collect();
    let order = fixture.queries.in_order();
    assert_eq!(order.len(), 9);
    assert_eq!(order[..2], ids);
}

#[test]
fn a_request_is_done_where_its_flags_its_place_and_the_export_allow_it_and_refused_as_the_specification_says() {
    use Headers::{Extended, Simple, Structured};
    use command::{BLOCK_STATUS, CACHE, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES};
    use command_flag::{DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE};
    const SIZE: u64 = 64 << 20;
    const MOST: u64 = DEFAULT_PAYLOAD as u64;
    let all = Contexts { allocation: true, depth: true };
    let mut fixture = Fixture::of_zeroes(Nanos::ZERO);
    let core = &mut fixture.lane().core;
    let ask = |core: &Core, headers, contexts, (flags, command, offset, length)| {
        Kind::of(&Request { flags, command, cookie: 7, offset, length }, headers, contexts, core)
    };
    let (inval, nospc) = (Err(Errno::INVAL), Err(Errno::NOSPC));
    let zeroes = |unmap, fua| Ok(Kind::WriteZeroes { unmap, fua });
    for headers in [Simple, Structured, Extended] {
        let is_simple = headers == Simple;
        let unless_simple = |kind| if is_simple { inval } else { kind };
        for (asked, expected) in [
            ((0, READ, 512, 4096), Ok(Kind::Read)),
            ((FUA, READ, SIZE - 512, 512), Ok(Kind::Read)),
            ((0, READ, SIZE, 512), inval),
            ((0, READ, SIZE - 512, 1024), inval),
            ((0, READ, u64::MAX - 511, 512), inval),
            ((0, READ, 256, 512), inval),
            ((0, READ, 512, 256), inval),
            ((0, READ, 256, 256), inval),
            ((0, READ, 0, MOST), Ok(Kind::Read)),
            ((0, READ, 0, MOST + 512), inval),
            ((DF, READ, 0, PART), unless_simple(Ok(Kind::Read))),
            ((DF, READ, 0, PART + 512), unless_simple(Err(Errno::OVERFLOW))),
            ((NO_HOLE, READ, 0, 512), inval),
            ((0, WRITE, 0, 512), Ok(Kind::Write { fua: false })),
            ((FUA, WRITE, 0, 512), Ok(Kind::Write { fua: true })),
            ((PAYLOAD_LEN, WRITE, 0, 512), if headers == Extended { Ok(Kind::Write { fua: false }) } else { inval }),
            ((DF, WRITE, 0, 512), inval),
            ((0, WRITE, SIZE, 512), nospc),
            ((0, WRITE, 1, 512), inval),
            ((0, FLUSH, 0, 0), Ok(Kind::Flush)),
            ((FUA, FLUSH, 0, 0), Ok(Kind::Flush)),
            ((DF, FLUSH, 0, 0), inval),
            ((0, FLUSH, 512, 0), inval),
            ((0, FLUSH, 512, 512), inval),
            ((0, FLUSH, 0, 512), inval),
            ((0, TRIM, 0, SIZE), Ok(Kind::Trim { fua: false })),
            ((FUA, TRIM, 0, 512), Ok(Kind::Trim { fua: true })),
            ((NO_HOLE, TRIM, 0, 512), inval),
            ((0, TRIM, SIZE, 512), inval),
            ((0, WRITE_ZEROES, 0, SIZE), zeroes(true, false)),
            ((NO_HOLE | FUA, WRITE_ZEROES, 0, 512), zeroes(false, true)),
            ((FAST_ZERO, WRITE_ZEROES, 0, 512), zeroes(true, false)),
            ((DF, WRITE_ZEROES, 0, 512), inval),
            ((0, WRITE_ZEROES, SIZE - 512, 1024), nospc),
            ((0, CACHE, 0, SIZE), Ok(Kind::Cache)),
            ((REQ_ONE, CACHE, 0, 512), inval),
            ((0, CACHE, SIZE, 512), inval),
            ((0, BLOCK_STATUS, 0, SIZE), unless_simple(Ok(Kind::Status { one: false }))),
            ((REQ_ONE, BLOCK_STATUS, 0, 512), unless_simple(Ok(Kind::Status { one: true }))),
            ((DF, BLOCK_STATUS, 0, 512), inval),
            ((0, BLOCK_STATUS, 0, 0), inval),
            ((0, BLOCK_STATUS, SIZE, 512), inval),
            ((0, 99, 0, 512), inval),
        ] {
            assert_eq!(ask(core, headers, all, asked), expected, "{headers:?} {asked:?}");
        }
        // One context is enough.
        for (allocation, depth) in [(true, false), (false, true), (false, false)] {
            let expected = if allocation || depth { unless_simple(Ok(Kind::Status { one: false })) } else { inval };
            let asked = (0, BLOCK_STATUS, 0, 512);
            assert_eq!(ask(core, headers, Contexts { allocation, depth }, asked), expected, "{headers:?}");
        }
    }
    core.terms.writethrough = true;
    for (asked, expected) in [
        ((0, WRITE, 0, 512), Ok(Kind::Write { fua: true })),
        ((0, TRIM, 0, 512), Ok(Kind::Trim { fua: true })),
        ((0, WRITE_ZEROES, 0, 512), zeroes(true, true)),
    ] {
        assert_eq!(ask(core, Simple, all, asked), expected, "{asked:?}");
    }
    core.terms.writable = false;
    for command in [WRITE, TRIM, WRITE_ZEROES] {
        assert_eq!(ask(core, Simple, all, (0, command, 0, 512)), Err(Errno::PERM), "{command}");
    }
    assert_eq!(ask(core, Simple, all, (0, READ, 0, 512)), Ok(Kind::Read));
    let kinds = [Kind::Read, Kind::Write { fua: true }, Kind::Flush, Kind::Trim { fua: true }, Kind::Cache];
    let types = [RequestType::Read, RequestType::Write, RequestType::Flush, RequestType::Discard, RequestType::Other];
    assert_eq!(kinds.map(Kind::request_type), types);
    assert_eq!(Kind::Status { one: false }.request_type(), RequestType::Other);
    assert_eq!(Kind::WriteZeroes { unmap: true, fua: true }.request_type(), RequestType::WriteZeroes);
}
