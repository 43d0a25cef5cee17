//! What an export answers to NBD clients, and what its server makes of those who come: on threads of this process.

#[path = "../../egret/tests/support/nbd_client.rs"]
#[allow(dead_code, unreachable_pub, reason = "the daemon's tests use more of it")]
mod nbd_client;
mod peer;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use egret_disk::{
    DebugEvent, DebugRules, Discard, Disk, Driver, InjectError, IoType, Limit, Limits, Locking, Op, Options, Rates,
    ThrottleGroup,
};
use egret_event_loop::clock;
use egret_export::{
    Access, DiskSwap, Export, ExportError, NbdAddress, NbdOptions, NbdServer, NbdServerConfig, NbdServerError, OpStats,
    reopen,
};
use egret_nbd::protocol::{Headers, answer, command, command_flag, export_flag, option};
use egret_virtio::RequestType;
use nbd_client::{NbdClient, greet, haggle, send_option, string};
use peer::gate::Gate;
use peer::{IoThread, await_that};
use rustix::io::Errno;

const PATIENCE: Duration = Duration::from_secs(60);
const ALL: [Headers; 3] = [Headers::Simple, Headers::Structured, Headers::Extended];
const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;

/// A server with a disk of its own in a file.
struct Served {
    folder: tempfile::TempDir,
    file: File,
    disk: Arc<Disk>,
    server: NbdServer,
}

impl Served {
    fn new() -> Self {
        Self::with(0, Duration::ZERO, DebugRules::default())
    }

    fn with(max_connections: u32, handshake_max: Duration, blkdebug: DebugRules) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = folder.path().join("image");
        let file = File::options().read(true).write(true).create_new(true).open(&image).unwrap();
        file.set_len(SIZE).unwrap();
        let disk = disk(image, blkdebug);
        let address = NbdAddress::Unix(folder.path().join("socket"), Access::default());
        let config = NbdServerConfig { address, max_connections, handshake_max, tls: None };
        let server = NbdServer::start(config).unwrap();
        Self { folder, file, disk, server }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn export(&self, options: NbdOptions, io: &[&IoThread]) -> Result<Export, ExportError> {
        let loops: Vec<_> = io.iter().map(|io| io.0.clone()).collect();
        Export::start_nbd("e0".into(), options, &self.server, Arc::clone(&self.disk), &loops)
    }

    fn connect(&self, headers: Headers) -> NbdClient {
        NbdClient::connect(&self.socket(), "disk", headers)
    }

    fn on_disk(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }
}

fn disk(filename: PathBuf, blkdebug: DebugRules) -> Arc<Disk> {
    let file = Driver::File { filename };
    Arc::new(
        Disk::open(&Options { discard: Discard::Unmap, locking: Locking::Off, blkdebug, ..Options::new("disk", file) })
            .unwrap(),
    )
}

/// Of a disk that clients call so.
fn named(name: &str) -> NbdOptions {
    NbdOptions { name: name.into(), description: None, writable: true, writethrough: false, max_connections: 0 }
}

fn error(errno: Errno) -> u32 {
    errno.raw_os_error() as u32
}

#[test]
fn every_request_is_done_answered_and_counted_whatever_headers_were_agreed_on() {
    use command_flag::{FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE};
    let (served, io) = (Served::new(), IoThread::start());
    let export = served.export(named("disk"), &[&io]).unwrap();
    served.server.open();
    let (mut bytes_read, begun) = (0, clock::now());
    for (round, headers) in (1..).zip(ALL) {
        let mut client = served.connect(headers);
        assert!(export.is_in_use());
        let has_length = if headers == Headers::Extended { PAYLOAD_LEN } else { 0 };
        // Of several parts, at an odd place: each block has its number in it.
        let data: Vec<u8> = (0..3 * MIB as usize + 512).map(|at| (at / 512 % 251 + 1) as u8).collect();
        client.call(FUA | has_length, command::WRITE, 512, data.len() as u64, &data).unwrap();
        assert!(served.on_disk(512, data.len()) == data);
        assert!(client.read(512, data.len()) == data);
        // Long and short ones, asked for at once; with chunks no longer than one is, so that they do not come mixed.
        let longest = if headers == Headers::Simple { 3 << 20 } else { 1 << 20 };
        let reads = [(0, longest), (512, 4096), (MIB as usize, 1 << 20), (0, longest - 512)];
        let cookies = reads.map(|(at, len)| client.ask(0, command::READ, 512 + at as u64, len as u64, &[]));
        let mut answered = Vec::new();
        for _ in reads {
            let (cookie, outcome) = client.hear().unwrap();
            let (at, len) = reads[cookies.iter().position(|asked| *asked == cookie).unwrap()];
            assert!(outcome.unwrap().0 == data[at..at + len], "{headers:?}: {len} bytes at {at}");
            answered.push(cookie);
        }
        answered.sort_unstable();
        assert_eq!(answered, cookies);
        // Data of what is refused is passed over, and what is asked for behind it is done.
        for (error, flags, at) in [(Errno::NOSPC, 0, SIZE), (Errno::INVAL, 1 << 14, 0)] {
            let refused = client.ask(flags | has_length, command::WRITE, at, 100 << 10, &vec![7; 100 << 10]);
            let read = client.ask(0, command::READ, 512, 512, &[]);
            assert_eq!(client.hear().unwrap(), (refused, Err(self::error(error))));
            assert_eq!(client.hear().unwrap(), (read, Ok((data[..512].to_vec(), Vec::new()))));
        }
        // So is what comes with a request that takes none, where its header can say that there is some.
        let payload = vec![7; if headers == Headers::Extended { 512 } else { 0 }];
        let refused = client.ask(PAYLOAD_LEN, command::READ, 0, 512, &payload);
        let read = client.ask(0, command::READ, 512, 512, &[]);
        assert_eq!(client.hear().unwrap(), (refused, Err(error(Errno::INVAL))));
        assert_eq!(client.hear().unwrap(), (read, Ok((data[..512].to_vec(), Vec::new()))));
        // What is refused and has none is followed by the next request.
        assert_eq!(client.call(1 << 14, command::TRIM, 0, 512, &[]), Err(error(Errno::INVAL)));
        assert_eq!(client.call(0, command::READ, 0, 0, &[]), Ok((Vec::new(), Vec::new())));
        client.call(0, command::FLUSH, 0, 0, &[]).unwrap();
        client.call(0, command::CACHE, 0, 2 * MIB, &[]).unwrap();
        client.call(NO_HOLE | FUA, command::WRITE_ZEROES, 4096, 8192, &[]).unwrap();
        client.call(FAST_ZERO, command::WRITE_ZEROES, 16384, 8192, &[]).unwrap();
        client.call(FUA, command::TRIM, 2 * MIB, MIB, &[]).unwrap();
        for (at, len) in [(4096, 8192), (16384, 8192), (2 * MIB, MIB as usize)] {
            assert!(served.on_disk(at, len).iter().all(|byte| *byte == 0), "{headers:?}: {at}");
            assert!(client.read(at, len).iter().all(|byte| *byte == 0), "{headers:?}: {at}");
        }
        assert_eq!(client.read(3 * MIB, 1024), data[3 * MIB as usize - 512..][..1024]);
        if headers != Headers::Simple {
            // Data, a hole, what is left of the data, and a hole up to the end.
            let (_, contexts) = client.call(0, command::BLOCK_STATUS, MIB, SIZE - MIB, &[]).unwrap();
            let extents = &contexts[0].1;
            assert_eq!((contexts[0].0, &extents[..2]), (1, &[(MIB, 0), (MIB, 3)][..]));
            assert_eq!((extents[2].1, extents[3].1, extents.len()), (0, 3, 4));
            assert_eq!(extents.iter().map(|(len, _)| len).sum::<u64>(), SIZE - MIB);
            assert_eq!(contexts[1..], [(2, vec![(SIZE - MIB, 1)])]);
            let (_, contexts) = client.call(REQ_ONE, command::BLOCK_STATUS, MIB, SIZE - MIB, &[]).unwrap();
            assert_eq!(contexts[0], (1, vec![(MIB, 0)]));
            let (_, contexts) = client.call(0, command::BLOCK_STATUS, MIB, MIB / 2, &[]).unwrap();
            assert_eq!(contexts, [(1, vec![(MIB / 2, 0)]), (2, vec![(MIB / 2, 1)])], "no more than was asked about");
        }
        // Nothing is answered to a farewell, but what was asked for before it.
        let read = client.ask(0, command::READ, 0, 2 * MIB, &[]);
        client.ask(0, command::DISCONNECT, 0, 0, &[]);
        assert_eq!(client.hear().unwrap().0, read);
        assert!(client.is_hung_up_on());
        await_that("the client to be gone", || !export.is_in_use());
        let stats = export.stats();
        assert_eq!(stats.in_flight, 0);
        bytes_read += data.len() as u64
            + reads.map(|(_, len)| len as u64).iter().sum::<u64>()
            + 3 * 512
            + 2 * 8192
            + MIB
            + 1024
            + 2 * MIB;
        // The errors are what was refused.
        for (of, requests, bytes, errors) in [
            (RequestType::Read, 14, bytes_read, 1),
            (RequestType::Write, 3, round * data.len() as u64, 2),
            (RequestType::Flush, 1, 0, 0),
            (RequestType::Discard, 2, round * MIB, 1),
            (RequestType::WriteZeroes, 2, round * 2 * 8192, 0),
            (RequestType::Other, 1, round * 2 * MIB, 0),
        ] {
            let expected = OpStats { requests: round * requests, bytes, errors: round * errors };
            assert_eq!(stats.op(of), expected, "{headers:?} {of:?}");
            let latency = stats.latency_of(of).unwrap();
            assert_eq!(latency.count(), round * requests);
            assert!(latency.longest() <= clock::now() - begun);
        }
        // The next one finds what this one has found.
        served.file.set_len(0).and_then(|()| served.file.set_len(SIZE)).unwrap();
    }
}

#[test]
fn what_a_disk_fails_is_told_once_and_as_its_own_and_what_is_asked_for_beside_it_is_done() {
    const BAD: u64 = 3 * MIB;
    let fail = |iotype, sector| InjectError {
        event: DebugEvent::None,
        state: None,
        iotype: Some(iotype),
        errno: Errno::IO,
        sector: Some(sector),
        once: false,
    };
    let inject_error = [IoType::Read, IoType::Write, IoType::Discard].map(|iotype| fail(iotype, BAD / 512));
    let blkdebug = DebugRules { inject_error: inject_error.into(), set_state: Vec::new() };
    let (served, io) = (Served::with(0, Duration::ZERO, blkdebug), IoThread::start());
    let export = served.export(named("disk"), &[&io]).unwrap();
    served.server.open();
    let failed = Err(error(Errno::IO));
    for (round, headers) in (1..).zip(ALL) {
        let mut client = served.connect(headers);
        let has_length = if headers == Headers::Extended { command_flag::PAYLOAD_LEN } else { 0 };
        assert_eq!(client.call(has_length, command::WRITE, MIB, 3 * MIB, &vec![5; 3 << 20]), failed);
        assert_eq!(client.call(command_flag::FUA, command::TRIM, BAD, MIB, &[]), failed);
        assert_eq!(client.call(0, command::READ, BAD, 4096, &[]), failed);
        assert_eq!(client.read(MIB, 4096), [5; 4096]);
        // It is the first part that fails, and the rest of it is nothing to a client with simple headers.
        assert_eq!(client.call(0, command::READ, BAD, 3 * MIB, &[]), failed);
        assert_eq!(client.read(2 * MIB, 4096), [5; 4096]);
        let stats = export.stats();
        let expected = [(RequestType::Write, 1, 1), (RequestType::Discard, 1, 1), (RequestType::Read, 4, 2)];
        for (of, requests, errors) in expected {
            let OpStats { requests: had, errors: failed, .. } = stats.op(of);
            // The last read of a round before is one that failed, that too which was never answered.
            let more = if of == RequestType::Read { round - 1 } else { 0 };
            assert_eq!((had, failed), (round * requests + more, round * errors + more), "{headers:?} {of:?}");
        }
        if headers == Headers::Simple {
            // It has the first part already: there is no other way to say that the rest does not come.
            client.ask(0, command::READ, 2 * MIB, 2 * MIB, &[]);
            assert!(client.is_hung_up_on());
        } else {
            assert_eq!(client.call(0, command::READ, 2 * MIB, 2 * MIB, &[]), failed);
        }
    }
}

#[test]
fn what_is_to_be_stable_when_it_is_answered_is_asked_of_the_disk_so_and_nothing_else_is() {
    use command_flag::{FUA, PAYLOAD_LEN};
    let (gate, io) = (Gate::new(), IoThread::start());
    gate.open();
    let served = Served { disk: gate.disk(), ..Served::new() };
    served.server.open();
    for writethrough in [false, true] {
        let export = served.export(NbdOptions { writethrough, ..named("disk") }, &[&io]).unwrap();
        for headers in ALL {
            let mut client = served.connect(headers);
            let has_length = if headers == Headers::Extended { PAYLOAD_LEN } else { 0 };
            for flags in [0, FUA] {
                let fua = flags != 0 || writethrough;
                let mut given = |flags, command, len, data: &[u8]| {
                    client.call(flags, command, 0, len, data).unwrap();
                    gate.take_given()
                };
                let case = format!("writethrough {writethrough}, {headers:?}, flags {flags}");
                // Each part of those that are done in parts.
                let written = given(flags | has_length, command::WRITE, 2 * MIB, &vec![7; 2 << 20]);
                assert_eq!(written, [Op::Write { fua }; 2], "{case}");
                let zeroed = given(flags, command::WRITE_ZEROES, 2 * MIB, &[]);
                // Nothing is discarded of this disk.
                assert_eq!(zeroed, [Op::WriteZeroes { unmap: false, fua }; 2], "{case}");
                assert_eq!(given(flags, command::TRIM, 2 * MIB, &[]), vec![Op::Flush; fua.into()], "{case}");
                assert_eq!(given(flags, command::FLUSH, 0, &[]), [Op::Flush], "{case}");
                assert_eq!(given(flags, command::READ, 4096, &[]), [Op::Read], "{case}");
            }
        }
        drop(export);
    }
}

#[test]
fn clients_are_dealt_out_to_threads_and_neither_these_nor_the_disk_are_what_they_notice_a_change_of() {
    let (served, io) = (Served::new(), [IoThread::start(), IoThread::start()]);
    let export = served.export(named("disk"), &[&io[0], &io[1]]).unwrap();
    served.server.open();
    let mut clients = [Headers::Simple, Headers::Structured].map(|headers| served.connect(headers));
    let requests = || [0, 1].map(|queue| export.queues()[queue].op(RequestType::Write).requests);
    clients[0].write(0, &[1; 4096]);
    clients[1].write(4096, &[2; 4096]);
    assert_eq!(requests(), [1, 1]);
    export.run_on(&[io[1].0.clone()]).unwrap();
    clients[0].write(8192, &[3; 4096]);
    let old = Arc::downgrade(&served.disk);
    let new = disk(served.folder.path().join("image"), DebugRules::default());
    let Served { disk, server, folder, file } = served;
    reopen(&[&export], &[DiskSwap { old: disk, new: Arc::clone(&new) }]).unwrap();
    new.let_go_of_predecessor().unwrap();
    await_that("the old disk to be closed", || old.strong_count() == 0);
    clients[1].write(12288, &[4; 4096]);
    assert_eq!(requests(), [2, 2]);
    // Who comes later has the new one, too.
    clients[0] = NbdClient::connect(&folder.path().join("socket"), "disk", Headers::Extended);
    for (client, block) in clients.iter_mut().zip([3, 1]) {
        for at in [0, 1, 2, 3, block] {
            assert_eq!(client.read(at * 4096, 4096), [at as u8 + 1; 4096]);
        }
    }
    assert_eq!(file.metadata().unwrap().len(), SIZE);
    drop((export, server));
}

#[test]
fn the_limits_of_a_disk_hold_again_when_its_clients_go_on_because_it_cannot_be_exchanged() {
    let (gate, io) = (Gate::new(), IoThread::start());
    let served = Served { disk: gate.disk(), ..Served::new() };
    // One read, one over the brim, and then a byte a second.
    let total = Limit { average: 1, burst: 4096, burst_seconds: 1 };
    let bytes = Rates { total, ..Rates::default() };
    served.disk.set_throttle_group(Some(&ThrottleGroup::new("g", Limits { bytes, ..Limits::default() })));
    let export = served.export(named("disk"), &[&io]).unwrap();
    served.server.open();
    let mut client = served.connect(Headers::Simple);
    let read = |client: &mut NbdClient| client.ask(0, command::READ, 0, 4096, &[]);
    let first = read(&mut client);
    gate.await_kept(1);
    let change = [DiskSwap { old: Arc::clone(&served.disk), new: gate.disk() }];
    assert!(matches!(reopen(&[&export], &change), Err(ExportError::Busy(_))));
    gate.open();
    let second = read(&mut client);
    assert_eq!([(); 2].map(|()| client.hear().unwrap().0), [first, second]);
    read(&mut client);
    // It would have ended by the time that these have.
    for _ in 0..2 {
        let flush = client.ask(0, command::FLUSH, 0, 0, &[]);
        assert_eq!(client.hear().unwrap().0, flush);
    }
}

#[test]
fn names_are_exports_of_their_own_until_these_end_and_nobody_is_let_in_before_the_server_is_opened() {
    let (served, io) = (Served::new(), IoThread::start());
    let mut early = UnixStream::connect(served.socket()).unwrap();
    early.set_nonblocking(true).unwrap();
    let export = served.export(named("disk"), &[&io]).unwrap();
    let other = served.export(named("other"), &[&io]).unwrap();
    assert!(matches!(served.export(named("disk"), &[&io]), Err(ExportError::NbdName(..))));
    assert!(["disk", "other"].into_iter().all(|name| served.server.has_export(name)));
    assert_eq!(early.read(&mut [0; 18]).map_err(|e| e.kind()), Err(ErrorKind::WouldBlock));
    served.server.open();
    early.set_nonblocking(false).unwrap();
    early.read_exact(&mut [0; 18]).unwrap();
    let names = |stream: &mut _| -> Vec<Vec<u8>> {
        let answers = haggle(stream, option::LIST, &[]);
        answers.into_iter().filter(|(kind, _)| *kind == answer::SERVER).map(|(_, name)| name).collect()
    };
    let mut guest = greet(&served.socket());
    assert_eq!(names(&mut guest), ["disk", "other"].map(string));
    let mut client = served.connect(Headers::Structured);
    drop(export);
    assert!(client.is_hung_up_on());
    assert!(!served.server.has_export("disk") && served.server.has_export("other"));
    assert_eq!(names(&mut guest), [string("other")]);
    let again = served.export(NbdOptions { writable: false, ..named("disk") }, &[&io]).unwrap();
    let client = NbdClient::choose(guest, "disk", Headers::Simple);
    assert_eq!((client.size, client.flags & export_flag::READ_ONLY), (SIZE, export_flag::READ_ONLY));
    assert!(!again.ends_at_once(), "it has a client");
    drop((client, again));
    assert!(other.ends_at_once());
    drop(other);
    // A socket that is taken is not taken over.
    let config = |address| NbdServerConfig { address, max_connections: 0, handshake_max: PATIENCE, tls: None };
    let unix = NbdAddress::Unix(served.socket(), Access::default());
    assert!(matches!(NbdServer::start(config(unix)), Err(NbdServerError::Bind(..))));
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let tcp = NbdAddress::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
    assert!(matches!(NbdServer::start(config(tcp)), Err(NbdServerError::Tcp(..))));
    let socket = served.socket();
    drop(served.server);
    assert!(UnixStream::connect(socket).is_err(), "it listens as long as it is there");
}

#[test]
fn a_server_has_as_many_clients_as_it_may_and_each_export_as_many_as_it_may_and_who_leaves_makes_room() {
    let (served, io) = (Served::with(3, Duration::ZERO, DebugRules::default()), IoThread::start());
    let _export = served.export(NbdOptions { max_connections: 2, ..named("disk") }, &[&io]).unwrap();
    let _other = served.export(named("other"), &[&io]).unwrap();
    served.server.open();
    let disk = [&string("disk")[..], &[0, 0]].concat();
    let last = |stream: &mut _, option| haggle(stream, option, &disk).last().unwrap().0;
    let first = served.connect(Headers::Simple);
    let mut guest = greet(&served.socket());
    assert_eq!(last(&mut guest, option::INFO), answer::ACK);
    let second = served.connect(Headers::Simple);
    assert_eq!(last(&mut guest, option::GO), answer::POLICY);
    assert_eq!(last(&mut guest, option::INFO), answer::ACK);
    let mut late = greet(&served.socket());
    let third = NbdClient::choose(greet(&served.socket()), "other", Headers::Simple);
    // Nobody else is let in: the server has looked, by the time that it has answered who is there.
    let mut fourth = UnixStream::connect(served.socket()).unwrap();
    fourth.set_nonblocking(true).unwrap();
    for _ in 0..4 {
        haggle(&mut late, option::LIST, &[]);
    }
    assert_eq!(fourth.read(&mut [0; 18]).map_err(|e| e.kind()), Err(ErrorKind::WouldBlock));
    fourth.set_nonblocking(false).unwrap();
    // Who was let in before all places were taken, and chooses after that, is sent away.
    let other = [&string("other")[..], &[0, 0]].concat();
    send_option(&mut late, option::GO, &other).unwrap();
    assert_eq!(late.read(&mut [0]).unwrap(), 0);
    drop(third);
    fourth.read_exact(&mut [0; 18]).unwrap();
    drop(first);
    // It is refused until the one that has left is gone.
    await_that("room", || last(&mut greet(&served.socket()), option::GO) == answer::ACK);
    drop((second, fourth));
}

#[test]
fn who_chooses_nothing_makes_room_for_others_or_leaves_when_his_time_is_over() {
    let (served, io) = (Served::new(), IoThread::start());
    let _export = served.export(named("disk"), &[&io]).unwrap();
    served.server.open();
    let begun = Instant::now();
    // As many as there is room for; when all are in it, it is the first who has been there longest.
    let mut silent: Vec<_> = (0..64).map(|_| greet(&served.socket())).collect();
    let mut client = served.connect(Headers::Simple);
    assert_eq!(client.read(0, 512), [0; 512]);
    assert_eq!(silent[0].read(&mut [0]).unwrap(), 0);
    assert!(begun.elapsed() >= Duration::from_millis(250), "so long he has it for himself");
    for stream in &mut silent[1..] {
        assert_eq!(haggle(stream, option::LIST, &[]).last().unwrap().0, answer::ACK);
    }
    // Who has time left is there still when others have come and were answered.
    let served = Served::with(0, PATIENCE, DebugRules::default());
    served.server.open();
    let mut slow = greet(&served.socket());
    for _ in 0..3 {
        haggle(&mut greet(&served.socket()), option::LIST, &[]);
    }
    assert_eq!(haggle(&mut slow, option::LIST, &[]).last().unwrap().0, answer::ACK);
    let served = Served::with(0, Duration::from_millis(50), DebugRules::default());
    served.server.open();
    // Where the server is late his time is over before he is greeted, but not again and again.
    let is_greeted = (0..10).any(|_| {
        let mut silent = UnixStream::connect(served.socket()).unwrap();
        let mut greeting = Vec::new();
        silent.read_to_end(&mut greeting).unwrap();
        greeting == b"NBDMAGICIHAVEOPT\0\x03"
    });
    assert!(is_greeted);
}
