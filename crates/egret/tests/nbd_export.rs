//! Disks over NBD: what others' clients make of them, what every request does, and what clients cannot do.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use egret_nbd::protocol::{Headers, answer, command, command_flag, export_flag, option};
use rustix::process::Signal;
use serde_json::{Value, json};
use support::disk::{BLOCK, Disk};
use support::nbd_client::{NbdClient, greet, haggle, send_option, string};
use support::neighbour::Neighbour;
use support::port::Port;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use support::{Finished, await_that};

const MIB: u64 = 1 << 20;
const ALL: [Headers; 3] = [Headers::Simple, Headers::Structured, Headers::Extended];
// Errors as they are sent.
const PERM: u32 = 1;
const IO: u32 = 5;
const INVAL: u32 = 22;
const NOSPC: u32 = 28;
const OVERFLOW: u32 = 75;

/// A daemon whose disk of 32 MiB is exported over NBD, and over vhost-user.
struct Deployment {
    server: Server,
    qmp: Qmp,
    nbd: PathBuf,
    vhost: PathBuf,
    image: PathBuf,
    scratch: Scratch,
}

impl Deployment {
    /// With `more` keys of the export over NBD, and of its server.
    fn new(more: &str, of_server: &str) -> Self {
        Self::with_disk(more, of_server, "cache.direct=on,discard=unmap")
    }

    fn with_disk(more: &str, of_server: &str, of_disk: &str) -> Self {
        let scratch = Scratch::new();
        let (nbd, vhost, monitor) = (scratch.path("nbd"), scratch.path("vhost"), scratch.path("qmp"));
        let image = scratch.image("disk", 32 * MIB);
        let options = Self::options(&scratch, more, of_server, of_disk).monitor("m", &monitor);
        let server = Server::start(&Program::egret(), &options);
        Self { server, qmp: Qmp::connect(&monitor), nbd, vhost, image, scratch }
    }

    fn options(scratch: &Scratch, more: &str, of_server: &str, of_disk: &str) -> Options {
        let nbd = scratch.path("nbd");
        Options::new()
            .iothread("io0", "fd-monitor=io_uring")
            .iothread("io1", "fd-monitor=epoll")
            .iothread("io2", "fd-monitor=ppoll")
            .disk("d0", &scratch.image_path("disk"), of_disk)
            .export("v0", "d0", &scratch.path("vhost"), "writable=on,iothread=io0")
            .words(["--nbd-server".to_owned(), format!("addr.type=unix,addr.path={}{of_server}", nbd.display())])
            .words(["--export".to_owned(), format!("nbd,id=e0,node-name=d0,name=disk{more}")])
            .listening(&nbd)
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.nbd.display())
    }

    fn connect(&self, headers: Headers) -> NbdClient {
        NbdClient::connect(&self.nbd, "disk", headers)
    }

    /// What the image has there.
    fn on_disk(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        std::fs::File::open(&self.image).unwrap().read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    fn stats(&mut self) -> Value {
        let all = self.qmp.run("query-blockstats", json!({}));
        let of = |export: &&Value| export["device"] == "e0";
        all.as_array().unwrap().iter().find(of).unwrap()["stats"].clone()
    }
}

/// Runs a program that succeeds; what it printed. `None` if it is not here.
fn run(program: &str, arguments: &[&str]) -> Option<String> {
    match Command::new(program).args(arguments).output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{program} {arguments:?}: {said}");
            Some(String::from_utf8(output.stdout).expect("text"))
        }
        Err(_) => {
            egret_needs::this_test_lacks(program);
            None
        }
    }
}

#[test]
fn libnbds_and_qemus_tools_read_what_a_guest_writes_while_it_goes_on() {
    let deployment = Deployment::new("", "");
    let (uri, image) = (deployment.uri(), deployment.image.display().to_string());
    let mut guest = Disk::connect(&deployment.vhost).unwrap();
    let queue = &mut guest.queues[0];
    queue.write_pattern(4 * MIB..12 * MIB, 1).unwrap();
    queue.flush().unwrap();
    let Some(map) = run("nbdinfo", &["--map", &uri]) else { return };
    let extents: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().collect()).collect();
    let expected = [["0", "4194304", "3", "hole,zero"], ["4194304", "8388608", "0", "data"]];
    assert_eq!(extents[..2], expected, "{map}");
    assert!(run("nbdinfo", &["--list", &uri]).unwrap().contains("export=\"disk\":"));
    let copy = deployment.scratch.image_path("copy").display().to_string();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // The guest goes on elsewhere.
        let guest = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                queue.write_pattern(16 * MIB..20 * MIB, 2).unwrap();
                queue.verify_pattern(4 * MIB..5 * MIB, 1).unwrap();
            }
            queue.write_pattern(16 * MIB..20 * MIB, 3).unwrap();
        });
        let finished = Finished(&done);
        let copied = run("nbdcopy", &[&uri, &copy]);
        drop(finished);
        guest.join().unwrap();
        assert!(copied.is_some());
    });
    let of = |path: &str| std::fs::read(path).unwrap();
    let (copied, written) = (of(&copy), of(&image));
    assert!(copied[..16 << 20] == written[..16 << 20] && copied[20 << 20..] == written[20 << 20..]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &uri, &image]);
    // By another server, which is a client.
    let again = deployment.scratch.image_path("again").display().to_string();
    let (plugin, copies) = (format!("uri={uri}"), format!("nbdcopy \"$uri\" {again}"));
    run("nbdkit", &["-U", "-", "nbd", &plugin, "--run", &copies]);
    assert!(of(&again) == written);
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]).unwrap();
    let map: Value = serde_json::from_str(&map).unwrap();
    assert_eq!((&map[0]["length"], &map[0]["data"]), (&json!(4 * MIB), &json!(false)), "{map}");
    drop(guest);
    assert_eq!(deployment.server.complaints(), [""; 0]);
}

#[test]
fn what_libnbds_and_qemus_tools_write_a_guest_reads() {
    let deployment = Deployment::new(",writable=on,iothread.0=io0,iothread.1=io1,iothread.2=io2", "");
    let uri = deployment.uri();
    let source = deployment.scratch.image("source", 32 * MIB);
    let file = std::fs::File::options().write(true).open(&source).unwrap();
    let bytes: Vec<u8> = (0..8 << 20).map(|at: u32| (at / 4096 % 251 + 1) as u8).collect();
    file.write_all_at(&bytes, 3 * MIB).unwrap();
    let Some(_) = run("nbdcopy", &[source.to_str().unwrap(), &uri]) else { return };
    assert!(std::fs::read(&source).unwrap() == std::fs::read(&deployment.image).unwrap());
    let mut guest = Disk::connect(&deployment.vhost).unwrap();
    assert_eq!(guest.queues[0].read(3 * MIB, 4096).unwrap(), [1; 4096]);
    drop(guest);
    let commands = ["write -P 7 0 3M", "write -f -P 5 20M 512", "write -z -u 1M 1M", "discard 8M 8M", "flush"];
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let checks = ["-c", "read -P 7 0 1M", "-c", "read -P 0 1M 1M", "-c", "read -P 7 2M 1M", "-c", "read -P 5 20M 512"];
    let arguments: Vec<&str> = ["-f", "raw"].into_iter().chain(commands).chain(checks).chain([&*uri]).collect();
    let said = run("qemu-io", &arguments).unwrap();
    assert!(!said.contains("failed"), "{said}");
    assert_eq!(deployment.server.complaints(), [""; 0]);
}

#[test]
fn every_request_does_what_it_says_whatever_headers_were_agreed_on() {
    use command_flag::{FAST_ZERO, FUA, NO_HOLE, REQ_ONE};
    let mut deployment = Deployment::new(",writable=on,iothread=io1", "");
    for headers in ALL {
        let mut client = deployment.connect(headers);
        assert_eq!(client.size, 32 * MIB);
        assert!(
            client.flags & (export_flag::CAN_MULTI_CONN | export_flag::SEND_FAST_ZERO) > export_flag::CAN_MULTI_CONN
        );
        // A write and a read of several parts, at an odd place.
        let data: Vec<u8> = (0..3 * MIB as usize + 512).map(|at| (at / 512 % 250 + 1) as u8).collect();
        client.call(FUA, command::WRITE, 512, data.len() as u64, &data).unwrap();
        assert!(deployment.on_disk(512, data.len()) == data);
        assert!(client.read(512, data.len()) == data);
        assert_eq!(client.read(30 * MIB, 4096), [0; 4096]);
        client.call(0, command::FLUSH, 0, 0, &[]).unwrap();
        client.call(NO_HOLE | FUA, command::WRITE_ZEROES, 4096, 8192, &[]).unwrap();
        client.call(FAST_ZERO, command::WRITE_ZEROES, 16384, 8192, &[]).unwrap();
        assert_eq!(client.read(4096, 8192), [0; 8192]);
        assert_eq!(client.read(16384, 8192), [0; 8192]);
        client.call(FUA, command::TRIM, MIB, MIB, &[]).unwrap();
        assert_eq!(deployment.on_disk(MIB, 4096), [0; 4096]);
        client.call(0, command::CACHE, 0, MIB, &[]).unwrap();
        client.call(0, command::READ, 0, 0, &[]).unwrap();
        for (error, command, offset, length) in [
            (INVAL, command::READ, 32 * MIB, 512),
            (INVAL, command::READ, u64::MAX - 511, 512),
            (INVAL, command::READ, 1, 512),
            (NOSPC, command::WRITE_ZEROES, 32 * MIB - 512, 1024),
            (INVAL, command::TRIM, 32 * MIB - 512, 1024),
            (INVAL, command::FLUSH, 512, 0),
            (INVAL, 99, 0, 512),
        ] {
            assert_eq!(client.call(0, command, offset, length, &[]), Err(error), "{command} {offset} {length}");
        }
        assert_eq!(client.call(0, command::WRITE, 32 * MIB, 512, &[1; 512]), Err(NOSPC));
        assert_eq!(client.call(1 << 14, command::WRITE, 0, 512, &[1; 512]), Err(INVAL));
        let status = client.call(0, command::BLOCK_STATUS, 0, 32 * MIB, &[]);
        if headers == Headers::Simple {
            assert_eq!(status, Err(INVAL));
        } else {
            let (_, contexts) = status.unwrap();
            let sum: u64 = contexts[0].1.iter().map(|(len, _)| len).sum();
            assert_eq!((contexts[0].0, sum), (1, 32 * MIB));
            let last = contexts[0].1.last().unwrap();
            assert_eq!(last.1, 3, "a hole");
            assert_eq!(contexts[1], (2, vec![(32 * MIB, 1)]));
            let (_, contexts) = client.call(REQ_ONE, command::BLOCK_STATUS, 16 * MIB, MIB, &[]).unwrap();
            assert_eq!(contexts[0].1, [(MIB, 3)]);
            assert_eq!(client.call(command_flag::DF, command::READ, 0, 2 * MIB, &[]), Err(OVERFLOW));
            assert!(client.call(command_flag::DF, command::READ, 512, 3584, &[]).unwrap().0 == data[..3584]);
        }
        // Nothing is answered to a farewell.
        client.ask(0, command::DISCONNECT, 0, 0, &[]);
        assert!(client.is_hung_up_on());
        client = deployment.connect(headers);
        client.write(0, &vec![0; 4 << 20]);
    }
    let stats = deployment.stats();
    assert!(stats["rd_operations"].as_u64() > Some(10), "{stats}");
    let refused = ["rd", "wr", "flush", "unmap"].map(|op| stats[format!("failed_{op}_operations")].as_u64().unwrap());
    assert_eq!(refused, [3 * 3 + 2, 3 * 3, 3, 3], "{stats}");
    assert_eq!(deployment.server.complaints(), [""; 0]);
}

#[test]
fn many_requests_at_once_are_answered_each_once_and_in_any_order() {
    let deployment = Deployment::new(",writable=on,iothread=io2", "");
    for headers in ALL {
        let mut client = deployment.connect(headers);
        let mut writer = UnixWriter::of(&mut client);
        // More than what may be in flight, in one go.
        let requests: Vec<u64> = (0..1000).collect();
        writer.write_all(
            &requests.iter().flat_map(|at| raw(headers, command::WRITE, *at, at % 64 * 4096)).collect::<Vec<_>>(),
        );
        let mut seen = vec![false; 1000];
        for _ in 0..1000 {
            let cookie = writer.cookie(headers);
            assert!(!std::mem::replace(&mut seen[cookie as usize], true));
        }
        assert_eq!(deployment.on_disk(63 * 4096, 4096), [63; 4096]);
    }
}

/// A request by its bytes: a write of a block of the number of the block.
fn raw(headers: Headers, command: u16, cookie: u64, offset: u64) -> Vec<u8> {
    let request = egret_nbd::protocol::Request { flags: 0, command, cookie, offset, length: 4096 };
    let mut bytes = [0; 32];
    let len = request.write(headers, &mut bytes);
    let data = if command == command::WRITE { vec![(offset / 4096) as u8; 4096] } else { Vec::new() };
    [&bytes[..len], &data].concat()
}

/// Writes on one thread what is answered on another.
struct UnixWriter {
    stream: std::os::unix::net::UnixStream,
    writing: Option<std::thread::JoinHandle<()>>,
}

impl UnixWriter {
    fn of(client: &mut NbdClient) -> Self {
        Self { stream: client.stream().try_clone().unwrap(), writing: None }
    }

    fn write_all(&mut self, bytes: &[u8]) {
        let (mut stream, bytes) = (self.stream.try_clone().unwrap(), bytes.to_vec());
        self.writing = Some(std::thread::spawn(move || stream.write_all(&bytes).unwrap()));
    }

    /// The cookie of the next reply, which carries no data and no error.
    fn cookie(&mut self, headers: Headers) -> u64 {
        let mut header = vec![0; headers.reply_len()];
        self.stream.read_exact(&mut header).unwrap();
        let (reply, _) = egret_nbd::protocol::Reply::read(headers, &header).unwrap().unwrap();
        match reply {
            egret_nbd::protocol::Reply::Simple { error: 0, cookie } => cookie,
            egret_nbd::protocol::Reply::Chunk { flags: 1, kind: 0, cookie, length: 0, .. } => cookie,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn who_asks_for_tls_where_there_is_none_is_told_so_and_may_go_on_without() {
    let deployment = Deployment::new(",writable=on", "");
    for headers in ALL {
        let mut stream = greet(&deployment.nbd);
        assert_eq!(haggle(&mut stream, option::STARTTLS, &[])[0].0, answer::UNSUPPORTED);
        let mut client = NbdClient::choose(stream, "disk", headers);
        client.write(0, &[5; 512]);
        assert_eq!(client.read(0, 512), [5; 512]);
    }
}

#[test]
fn an_export_that_is_not_writable_refuses_whatever_writes() {
    let deployment = Deployment::new("", "");
    for headers in ALL {
        let mut client = deployment.connect(headers);
        assert_ne!(client.flags & export_flag::READ_ONLY, 0);
        assert_eq!(client.call(0, command::WRITE, 0, 512, &[1; 512]), Err(PERM));
        assert_eq!(client.call(0, command::TRIM, 0, 512, &[]), Err(PERM));
        assert_eq!(client.call(0, command::WRITE_ZEROES, 0, 512, &[]), Err(PERM));
        client.call(0, command::FLUSH, 0, 0, &[]).unwrap();
        assert_eq!(client.read(0, 512), [0; 512]);
    }
    assert_eq!(deployment.on_disk(0, 512), [0; 512]);
}

#[test]
fn a_request_that_its_disk_fails_is_told_to_the_client_and_to_monitors() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 32 * MIB);
    let (nbd, monitor) = (scratch.path("nbd"), scratch.path("qmp"));
    let disk = format!(
        "driver=blkdebug,node-name=d0,image.driver=file,image.filename={},inject-error.0.event=none,\
         inject-error.0.sector=4096,inject-error.0.iotype=read",
        image.display()
    );
    let options = Options::new()
        .words(["--blockdev".to_owned(), disk])
        .words(["--nbd-server".to_owned(), format!("addr.type=unix,addr.path={}", nbd.display())])
        .words(["--export", "nbd,id=e0,node-name=d0,name=disk"])
        .listening(&nbd)
        .monitor("m", &monitor);
    let _server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&monitor);
    for headers in ALL {
        let mut client = NbdClient::connect(&nbd, "disk", headers);
        assert_eq!(client.read(0, 4096), [0; 4096]);
        assert_eq!(client.call(0, command::READ, 2 * MIB, 4096, &[]), Err(IO));
        assert_eq!(client.read(4 * MIB, 4096), [0; 4096]);
        if headers == Headers::Simple {
            // The first part of it is there already: there is no other way to say that the rest is not.
            client.ask(0, command::READ, MIB, 2 * MIB, &[]);
            assert!(client.is_hung_up_on());
        } else {
            assert_eq!(client.call(0, command::READ, MIB, 2 * MIB, &[]), Err(IO));
        }
    }
    let event = qmp.event("BLOCK_IO_ERROR");
    assert_eq!(
        (&event["device"], &event["operation"], &event["action"]),
        (&json!("e0"), &json!("read"), &json!("report"))
    );
}

/// Writes until nobody reads any more, which is no timeout.
fn until_hung_up(write: impl FnMut() -> std::io::Result<()>) {
    let end = std::iter::repeat_with(write).find_map(Result::err).map(|e| e.kind());
    assert!(matches!(end, Some(ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)), "{end:?}");
}

#[test]
fn no_client_costs_another_anything_whatever_it_says() {
    let deployment = Deployment::new(",writable=on,iothread=io0", ",handshake-max-seconds=60,max-connections=20");
    let neighbour = Neighbour::start(&deployment.vhost);
    let garbage: Vec<u8> = (0..100_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let connect = |socket: &Path| {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(support::PATIENCE)).unwrap();
        stream.set_write_timeout(Some(support::PATIENCE)).unwrap();
        stream
    };
    let hung_up = |mut stream: UnixStream| {
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).or_else(support::reset_is_end).expect("it is hung up on");
        rest
    };
    // In the handshake: nonsense, and too much.
    for _ in 0..3 {
        let mut stream = connect(&deployment.nbd);
        let _ = stream.write_all(&garbage);
        hung_up(stream);
        let mut stream = greet(&deployment.nbd);
        let _ = stream.write_all(&garbage);
        hung_up(stream);
        let mut stream = greet(&deployment.nbd);
        let _ = stream.write_all(&[&b"IHAVEOPT"[..], &[0, 0, 0, 7, 0xff, 0xff, 0xff, 0xff]].concat());
        hung_up(stream);
    }
    // Another daemon has less patience: with nothing at all, and with who does not come to an end.
    let hasty = Deployment::new("", ",handshake-max-seconds=3");
    let idle = connect(&hasty.nbd);
    let (agreed, list) = (3u32.to_be_bytes(), [&b"IHAVEOPT"[..], &option::LIST.to_be_bytes(), &[0; 4]].concat());
    // Who names options and does not hear the answers is not answered for ever.
    let mut stream = connect(&hasty.nbd);
    let _ = stream.write_all(&agreed);
    until_hung_up(|| stream.write_all(&list));
    // One byte at a time is too slow.
    let mut dripping = connect(&hasty.nbd);
    let _ = dripping.write_all(&agreed);
    let mut bytes = list.iter().cycle();
    until_hung_up(|| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        dripping.write_all(&[*bytes.next().unwrap()])
    });
    assert_eq!(hung_up(idle).len(), 18, "it has the greeting");
    for headers in ALL {
        let mut client = deployment.connect(headers);
        client.stream().write_all(&[0x99; 64]).unwrap();
        assert!(client.is_hung_up_on());
        // More data than any request has.
        let mut client = deployment.connect(headers);
        client.ask(0, command::WRITE, 0, u32::MAX.into(), &[]);
        assert!(client.is_hung_up_on());
        // Gone in the middle of its data, and with requests in flight.
        let mut client = deployment.connect(headers);
        client.ask(0, command::WRITE, MIB, 4096, &[1; 100]);
        drop(client);
        let mut client = deployment.connect(headers);
        for at in 0..100 {
            client.ask(0, command::READ, at * 4096, 4096, &[]);
        }
        drop(client);
    }
    // Who does not take replies is read from no further, and has no more memory than its share.
    let before = deployment.server.resident();
    let mut deaf: Vec<NbdClient> = (0..8).map(|at| deployment.connect(ALL[at % 3])).collect();
    for client in &mut deaf {
        client.stream().set_write_timeout(Some(std::time::Duration::from_millis(100))).unwrap();
        let _ = client.try_ask(0, command::WRITE, MIB, 30 * MIB, &vec![7; 30 << 20]);
        while client.try_ask(0, command::READ, 0, 31 * MIB, &[]).is_ok() {}
    }
    let grown = deployment.server.resident().saturating_sub(before);
    assert!(grown < 100 * MIB, "{grown}");
    neighbour.await_progress();
    assert_eq!(deployment.connect(Headers::Structured).read(31 * MIB, 4096), [0; 4096]);
    drop(deaf);
    // Names of exports are as long as NBD has them, and the log has less of them.
    for _ in 0..60 {
        let mut stream = greet(&deployment.nbd);
        let _ = send_option(&mut stream, option::EXPORT_NAME, &[1; 4096]);
        hung_up(stream);
    }
    // What they all have had the log say is within its budget.
    let log = [deployment.server.log(), hasty.server.log()].concat();
    assert!(log.len() < 200 && log.concat().len() < 60_000, "{} bytes", log.concat().len());
}

#[test]
fn who_comes_when_all_places_are_taken_waits_for_one() {
    let deployment = Deployment::new("", ",max-connections=2");
    let first = deployment.connect(Headers::Structured);
    let _second = deployment.connect(Headers::Structured);
    let mut third = UnixStream::connect(&deployment.nbd).unwrap();
    third.set_read_timeout(Some(std::time::Duration::from_millis(200))).unwrap();
    assert!(third.read(&mut [0; 18]).is_err());
    drop(first);
    third.set_read_timeout(Some(support::PATIENCE)).unwrap();
    third.read_exact(&mut [0; 18]).unwrap();
}

#[test]
fn an_export_has_as_many_clients_as_it_may_and_others_have_the_rest_of_the_places() {
    let mut deployment = Deployment::new(",max-connections=2", ",max-connections=3");
    deployment.qmp.run("block-export-add", json!({"type": "nbd", "id": "e1", "node-name": "d0", "name": "other"}));
    let first = deployment.connect(Headers::Structured);
    let _second = deployment.connect(Headers::Simple);
    let mut third = greet(&deployment.nbd);
    let chosen = [&string("disk")[..], &[0, 0]].concat();
    let choose = |third: &mut _| haggle(third, option::GO, &chosen).last().unwrap().0;
    assert_eq!(choose(&mut third), answer::POLICY);
    assert_eq!(haggle(&mut third, option::INFO, &chosen).last().unwrap().0, answer::ACK);
    // Where there is no answer to it there is an end.
    let mut old = greet(&deployment.nbd);
    send_option(&mut old, option::EXPORT_NAME, b"disk").unwrap();
    assert_eq!(old.read(&mut [0]).unwrap(), 0);
    // It is refused, and may choose another.
    let mut other = NbdClient::choose(third, "other", Headers::Simple);
    assert_eq!(other.read(0, 4096), [0; 4096]);
    drop((first, other));
    await_that("a place", || choose(&mut greet(&deployment.nbd)) == answer::ACK);
}

#[test]
fn who_says_nothing_takes_nobodys_place_and_makes_room_for_who_does() {
    let deployment = Deployment::new("", ",max-connections=2,handshake-max-seconds=0");
    let silent: Vec<_> = (0..100).map(|_| UnixStream::connect(&deployment.nbd).unwrap()).collect();
    let mut first = deployment.connect(Headers::Structured);
    let mut second = deployment.connect(Headers::Structured);
    assert_eq!(first.read(0, 4096), second.read(0, 4096));
    drop(silent);
}

#[test]
fn clients_notice_nothing_when_their_threads_and_their_disk_change_under_them() {
    let mut deployment = Deployment::new(",writable=on,iothread.0=io0,iothread.1=io1", "");
    let (nbd, done) = (deployment.nbd.clone(), AtomicBool::new(false));
    let rounds_of = [0; 4].map(AtomicU64::new);
    std::thread::scope(|scope| {
        let (done, nbd, rounds_of) = (&done, &nbd, &rounds_of);
        let clients: Vec<_> = (0..4u64)
            .map(|number| {
                scope.spawn(move || {
                    let mut client = NbdClient::connect(nbd, "disk", ALL[number as usize % 3]);
                    let mut rounds = 0;
                    while !done.load(Ordering::Relaxed) {
                        for at in 0..32 {
                            client.write(number * MIB + at * 8192, &[(rounds + at) as u8; 8192]);
                        }
                        for at in 0..32 {
                            assert_eq!(client.read(number * MIB + at * 8192, 8192), [(rounds + at) as u8; 8192]);
                        }
                        rounds += 1;
                        rounds_of[number as usize].store(rounds, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let (image, finished) = (deployment.image.clone(), Finished(done));
        for round in 0..6 {
            let before = rounds_of.each_ref().map(|rounds| rounds.load(Ordering::Relaxed));
            await_that("each client to go on", || {
                rounds_of.iter().zip(before).all(|(rounds, before)| rounds.load(Ordering::Relaxed) > before)
            });
            for queue in [0, 1] {
                let to = ["io0", "io1", "io2"][(round + queue) % 3];
                deployment.qmp.run_in_time("egret-move-queue", json!({"id": "e0", "queue": queue, "iothread": to}));
            }
            let aio = ["threads", "io_uring"][round % 2];
            let reopened = json!({"driver": "file", "node-name": "d0", "filename": image, "aio": aio});
            deployment.qmp.run_in_time("blockdev-reopen", json!({"options": [reopened]}));
        }
        drop(finished);
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
    // A new size is told to who comes then, of the disk as it was opened last.
    deployment.qmp.run("block_resize", json!({"node-name": "d0", "size": 33 * MIB}));
    assert_eq!(deployment.connect(Headers::Structured).size, 33 * MIB);
    let shown = deployment.qmp.run("query-block-exports", json!({}));
    let shown = shown.as_array().unwrap().iter().find(|export| export["id"] == "e0").unwrap().clone();
    assert_eq!((&shown["type"], &shown["node-name"]), (&json!("nbd"), &json!("d0")), "{shown}");
    deployment.qmp.run("egret-map-queues", json!({"id": "e0", "iothread": ["io2", "io0"]}));
    let refused = deployment.qmp.fail("egret-map-queues", json!({"id": "e0", "iothread": "io2"}));
    assert!(refused.contains("as many names as it has had"), "{refused}");
    assert_eq!(deployment.server.complaints(), [""; 0]);
}

#[test]
fn monitors_start_and_stop_the_server_and_offer_disks_in_qemus_words() {
    let scratch = Scratch::new();
    let monitor = scratch.path("qmp");
    let options =
        Options::new().disk("d0", &scratch.image("d0", MIB), "").disk("d1", &scratch.image("d1", MIB), "read-only=on");
    let server = Server::start(
        &Program::egret().with_words(["--sandbox-dir", scratch.path("").to_str().unwrap()]),
        &options.monitor("m", &monitor),
    );
    let mut qmp = Qmp::connect(&monitor);
    let nbd = scratch.path("nbd");
    let start = json!({"addr": {"type": "unix", "data": {"path": nbd}}, "max-connections": 3});
    let export = json!({"type": "nbd", "id": "e0", "node-name": "d0", "name": "disk", "writable": true});
    assert_eq!(qmp.fail("block-export-add", export.clone()), "NBD server not running");
    assert_eq!(qmp.fail("nbd-server-stop", json!({})), "NBD server not running");
    qmp.run("nbd-server-start", start.clone());
    assert_eq!(qmp.fail("nbd-server-start", start.clone()), "NBD server already running");
    qmp.run("block-export-add", export.clone());
    let again = json!({"type": "nbd", "id": "e1", "node-name": "d0", "name": "disk"});
    assert_eq!(qmp.fail("block-export-add", again), "NBD server already has export named 'disk'");
    qmp.run("nbd-server-add", json!({"device": "d0", "name": "again"}));
    // As in QEMU, a disk that is read-only is exported so.
    qmp.run("nbd-server-add", json!({"device": "d1", "writable": true, "description": "the other"}));
    let mut client = NbdClient::connect(&nbd, "disk", Headers::Extended);
    assert_ne!(NbdClient::connect(&nbd, "d1", Headers::Structured).flags & export_flag::READ_ONLY, 0);
    let mut stream = greet(&nbd);
    let listed: Vec<_> = haggle(&mut stream, option::LIST, &[]).into_iter().map(|(_, data)| data).collect();
    let described = [&string("d1")[..], b"the other"].concat();
    assert_eq!(listed, [string("again"), described, string("disk"), vec![]]);
    let told = haggle(&mut stream, option::INFO, &[&string("nothing")[..], &[0, 0]].concat());
    assert_eq!(told[0].0, answer::UNKNOWN);
    drop(stream);
    await_that("the other clients to have left", || qmp.try_run("nbd-server-remove", json!({"name": "d1"})).is_ok());
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED")["id"], "d1");
    assert_eq!(qmp.fail("nbd-server-remove", json!({"name": "d1"})), "Export 'd1' is not found");
    assert_eq!(qmp.fail("nbd-server-remove", json!({"name": "e0"})), "export 'e0' still in use");
    client.write(0, &[3; 4096]);
    qmp.run("nbd-server-remove", json!({"name": "e0", "mode": "hard"}));
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED")["id"], "e0");
    assert!(client.is_hung_up_on());
    qmp.run("nbd-server-stop", json!({}));
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED")["id"], "again");
    assert!(!nbd.exists());
    qmp.run("nbd-server-start", start);
    qmp.run("block-export-add", export);
    assert_eq!(NbdClient::connect(&nbd, "disk", Headers::Simple).read(0, 4096), [3; 4096]);
    let wrong = json!({"addr": {"type": "unix", "data": {"path": nbd}}, "tls-authz": "a"});
    assert!(qmp.fail("nbd-server-start", wrong).contains("who has a certificate"));
    drop(qmp);
    assert!(server.terminate().success());
    assert!(!nbd.exists());
}

#[test]
fn a_server_that_stops_has_what_is_in_flight_end_and_hangs_up() {
    let mut deployment = Deployment::with_disk(",writable=on", "", "cache.direct=on,aio=threads");
    let limits = json!({"id": "d0", "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 20});
    deployment.qmp.run("block_set_io_throttle", limits);
    let mut client = deployment.connect(Headers::Structured);
    for at in 0..50 {
        client.ask(0, command::WRITE, at * 4096, 4096, &[9; 4096]);
    }
    client.hear().unwrap().1.unwrap();
    deployment.qmp.run("nbd-server-stop", json!({}));
    assert_eq!(deployment.qmp.event("BLOCK_EXPORT_DELETED")["id"], "e0");
    let mut answered = 1;
    while let Ok((_, outcome)) = client.hear() {
        outcome.unwrap();
        answered += 1;
    }
    // What was taken in was done, and said so before it hung up.
    let written = (0..50).take_while(|at| deployment.on_disk(at * 4096, 4096) == [9; 4096]).count();
    assert!(written >= answered, "{written} {answered}");
    let mut guest = Disk::connect(&deployment.vhost).unwrap();
    assert_eq!(guest.queues[0].read(0, BLOCK).unwrap()[..8], [9; 8]);
}

#[test]
fn a_daemon_that_was_killed_leaves_a_socket_that_the_next_replaces() {
    let mut deployment = Deployment::new(",writable=on", "");
    let mut client = deployment.connect(Headers::Extended);
    client.write(MIB, &[4; 4096]);
    deployment.server.send(Signal::KILL);
    deployment.server.await_end();
    assert!(client.is_hung_up_on() && deployment.nbd.exists());
    let options = Deployment::options(&deployment.scratch, "", "", "cache.direct=on");
    deployment.server = Server::start(&Program::egret(), &options);
    assert_eq!(deployment.connect(Headers::Simple).read(MIB, 4096), [4; 4096]);
}

#[test]
fn a_disk_is_offered_over_tcp_where_the_command_line_says_so() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", MIB);
    let port = Port::new();
    let options = Options::new()
        .disk("d0", &image, "")
        .export("v0", "d0", &scratch.path("vhost"), "")
        .words(["--nbd-server".to_owned(), format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port}")])
        .words(["--export", "nbd,id=e0,node-name=d0"]);
    let server = Server::start(&Program::egret(), &options);
    let uri = format!("nbd://127.0.0.1:{port}/d0");
    let Some(size) = run("nbdinfo", &["--size", &uri]) else { return };
    assert_eq!(size.trim(), MIB.to_string());
    let copy = scratch.image_path("copy").display().to_string();
    run("nbdcopy", &[&uri, &copy]);
    assert!(std::fs::read(Path::new(&copy)).unwrap() == std::fs::read(&image).unwrap());
    assert_eq!(server.complaints(), [""; 0]);
}
