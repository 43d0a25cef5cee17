//! Sockets that wait for an hour when they are closed, sent along to whoever may close them: in messages of every kind, on
//! sockets of every kind.

#[path = "../../../event-loop/tests/lingering/mod.rs"]
mod socket;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use egret_nbd::protocol::{ANSWER_MAGIC, Headers, answer, command, option};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_linger;
use rustix::process::{Signal, geteuid};
use serde_json::json;
use socket::lingering;

use crate::scene::MIB;
use crate::support::http::get;
use crate::support::nbd_client::{NbdClient, greet};
use crate::support::qmp::Qmp;
use crate::support::scratch::Scratch;
use crate::support::server::{Options, Program, Reaped, Server, activated};
use crate::support::wire::*;
use crate::support::{PATIENCE, await_that, reset_is_end};

/// A TCP socket with data that nobody reads, which it waits for to be read when it is closed, and its other end.
struct Lingering {
    socket: TcpStream,
    peer: TcpStream,
}

impl Lingering {
    fn new() -> Self {
        let (socket, peer) = lingering();
        Self { socket, peer }
    }

    /// Sends it with some bytes, unless that is refused, and closes it here. The other end is to be kept.
    fn leave_in(self, stream: impl AsFd, bytes: &[u8]) -> TcpStream {
        leave_in(stream, bytes, vec![self]).remove(0)
    }
}

/// As [`Lingering::leave_in`].
fn leave_in(stream: impl AsFd, bytes: &[u8], sockets: Vec<Lingering>) -> Vec<TcpStream> {
    let fds: Vec<_> = sockets.iter().map(|one| one.socket.as_fd()).collect();
    match send_with(stream, bytes, &fds) {
        Ok(_) => {}
        // The best of answers. We are not to wait for ours either.
        Err(Errno::PERM) => {
            sockets.iter().for_each(|one| set_socket_linger(&one.socket, None).expect("our own socket"))
        }
        Err(e) => panic!("it is sent, or refused: {e}"),
    }
    sockets.into_iter().map(|one| one.peer).collect()
}

/// A daemon with a socket of every kind. What is sent while it stands still is in its way, or closed there, when it goes
/// on, and nobody else has it.
struct Everything {
    server: Server,
    scratch: Scratch,
    size: u64,
    /// They are read by nobody.
    peers: Vec<TcpStream>,
}

impl Everything {
    fn start() -> Self {
        let scratch = Scratch::new();
        let path = |name| scratch.path(name);
        let nobody = format!("allow-uid={}", geteuid().as_raw() + 1);
        let monitor = |id: &str, name, more: &str| {
            let chardev = format!("socket,id={id},path={},server=on,wait=off,{more}", path(name).display());
            ["--chardev".to_owned(), chardev, "--monitor".to_owned(), id.to_owned()]
        };
        let over_nbd = |name: &str| {
            let export = format!("nbd,id=nbd-{name},node-name={name},name={name},writable=on,iothread=io0");
            ["--export".to_owned(), export]
        };
        let options = Options::new()
            .iothread("io0", "")
            .disk("a", &scratch.image("a", MIB), "")
            .disk("b", &scratch.image("b", MIB), "")
            .export("ours", "a", &path("ours"), "iothread=io0")
            .export("not-ours", "a", &path("not-ours"), &format!("iothread=io0,{nobody}"))
            .words(["--nbd-server".to_owned(), format!("addr.type=unix,addr.path={}", path("nbd").display())])
            .words(over_nbd("a"))
            .words(over_nbd("b"))
            .listening(&path("nbd"))
            .listening(&path("monitor"))
            .listening(&path("monitor-not-ours"))
            .words(monitor("m0", "monitor", ""))
            .words(monitor("m1", "monitor-not-ours", &nobody))
            .metrics(&path("metrics"));
        let server = Server::start(&Program::egret(), &options);
        Self { server, scratch, size: MIB, peers: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }

    /// Leaves so many sockets in a message.
    fn leave(&mut self, count: usize, stream: impl AsFd, bytes: &[u8]) {
        let sockets = (0..count).map(|_| Lingering::new()).collect();
        self.peers.extend(self.server.while_stopped(|| leave_in(stream, bytes, sockets)));
    }

    /// Connects to a socket, whoever is let in there, leaves one in a message and hangs up, before anybody looks.
    fn leave_at(&mut self, name: &str, bytes: &[u8]) {
        self.peers.push(self.server.while_stopped(|| {
            let stream = UnixStream::connect(self.path(name)).expect("there is room for those who wait");
            Lingering::new().leave_in(&stream, bytes)
        }));
    }

    /// Whether everybody else is served, and the daemon ends when it is told to.
    fn ends_well(mut self) {
        self.serves();
        let status = self.server.end();
        assert_eq!(status.code(), Some(0), "{:#?}", self.server.log());
    }

    fn serves(&mut self) {
        let mut qmp = Qmp::connect(&self.path("monitor"));
        self.size += MIB;
        qmp.run("block_resize", json!({"node-name": "a", "size": self.size}));
        assert_eq!(NbdClient::connect(&self.path("nbd"), "b", Headers::Simple).read(0, 4096), [0; 4096]);
        let mut wire = Wire::connect(&self.path("ours"));
        wire.ask(GET_FEATURES, &[]).expect("an answer");
        assert!(get(&self.path("metrics"), "/metrics").expect("a page").0.contains("200"));
    }
}

#[test]
fn a_client_over_nbd_that_sends_a_socket_that_lingers_holds_up_nobody_else() {
    let mut daemon = Everything::start();
    let mut client = NbdClient::connect(&daemon.path("nbd"), "a", Headers::Simple);
    assert_eq!(client.read(0, 512), [0; 512]);
    // The beginning of a request.
    daemon.leave(1, client.stream(), &0x2560_9513_u32.to_be_bytes());
    daemon.serves();
    // And one that never looks.
    drop(client);
    daemon.leave_at("nbd", b"x");
    daemon.ends_well();
}

#[test]
fn who_sends_descriptors_where_nobody_has_a_use_for_them_is_told_so_by_the_kernel() {
    let daemon = Everything::start();
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut version = kernel.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    // Before that it cannot.
    let can = (version.next(), version.next()) >= (Some(6), Some(16));
    for (name, are_refused) in [("nbd", can), ("metrics", can), ("monitor", false), ("ours", false)] {
        // Before it is let in and afterwards.
        let stream = daemon.server.while_stopped(|| {
            let stream = UnixStream::connect(daemon.path(name)).expect("there is room for those who wait");
            assert_eq!(send_with(&stream, b"x", &[stream.as_fd()]) == Err(Errno::PERM), are_refused, "{name}");
            stream
        });
        if are_refused {
            assert_eq!(send_with(&stream, b"x", &[stream.as_fd()]), Err(Errno::PERM), "{name}");
        }
    }
    // A server that the daemon is the client of.
    let listener = UnixListener::bind(daemon.path("hostile")).expect("a name");
    let mut qmp = Qmp::connect(&daemon.path("monitor"));
    let sent = std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let (stream, _) = listener.accept().expect("the daemon connects");
            daemon.server.while_stopped(|| send_with(&stream, b"x", &[stream.as_fd()]))
        });
        let address = json!({"type": "unix", "path": daemon.path("hostile")});
        qmp.fail("blockdev-add", json!({"driver": "nbd", "node-name": "n", "server": address}));
        server.join().expect("no panic")
    });
    assert_eq!(sent == Err(Errno::PERM), can, "{sent:?}");
}

#[test]
fn a_handshake_with_a_socket_that_lingers_holds_up_no_other() {
    let mut daemon = Everything::start();
    let stream = greet(&daemon.path("nbd"));
    daemon.leave(1, &stream, b"IHAV");
    daemon.ends_well();
}

#[test]
fn a_server_over_nbd_that_sends_a_socket_that_lingers_holds_up_nobody_else() {
    let mut daemon = Everything::start();
    let listener = UnixListener::bind(daemon.path("hostile")).expect("a name");
    let mut qmp = Qmp::connect(&daemon.path("monitor"));
    let peer = std::thread::scope(|scope| {
        let server = scope.spawn(|| {
            let (stream, _) = listener.accept().expect("the daemon connects");
            serve_until_it_is_read(&stream);
            // The beginning of an answer.
            daemon.server.while_stopped(|| Lingering::new().leave_in(&stream, &0x6744_6698_u32.to_be_bytes()))
        });
        let address = json!({"type": "unix", "path": daemon.path("hostile")});
        qmp.run("blockdev-add", json!({"driver": "nbd", "node-name": "n", "server": address}));
        let export = json!({"type": "nbd", "id": "nbd-n", "node-name": "n", "iothread": "io0"});
        qmp.run("block-export-add", export);
        let mut client = NbdClient::connect(&daemon.path("nbd"), "n", Headers::Simple);
        client.ask(0, command::READ, 0, 512, &[]);
        server.join().expect("it has sent")
    });
    daemon.peers.push(peer);
    daemon.ends_well();
}

/// A server of a MiB whose client asks for no more than it is offered.
fn serve_until_it_is_read(mut stream: &UnixStream) {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").expect("it reads");
    stream.read_exact(&mut [0; 4]).expect("its flags");
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header).expect("an option");
        let [option, len] = [8, 12].map(|at| u32::from_be_bytes(header[at..at + 4].try_into().expect("four bytes")));
        stream.read_exact(&mut vec![0; len as usize]).expect("its data");
        let mut say = |kind: u32, data: &[u8]| {
            let mut bytes = ANSWER_MAGIC.to_be_bytes().to_vec();
            bytes.extend([option, kind, data.len() as u32].into_iter().flat_map(u32::to_be_bytes));
            bytes.extend(data);
            stream.write_all(&bytes).expect("it reads");
        };
        if option == option::GO {
            say(answer::INFO, &[&[0, 0], &MIB.to_be_bytes()[..], &[0, 1]].concat());
            say(answer::ACK, &[]);
            break;
        }
        say(answer::UNSUPPORTED, &[]);
    }
    stream.read_exact(&mut [0; 28]).expect("a request");
}

#[test]
fn a_reader_of_metrics_that_sends_a_socket_that_lingers_holds_up_no_other() {
    let mut daemon = Everything::start();
    daemon.leave_at("metrics", b"GET");
    daemon.serves();
    let stream = UnixStream::connect(daemon.path("metrics")).expect("it listens");
    daemon.leave(1, &stream, b"GET");
    daemon.ends_well();
}

#[test]
fn what_was_sent_before_the_daemon_could_refuse_it_holds_up_nobody_either() {
    let scratch = Scratch::new();
    let path = scratch.path("metrics");
    let listener = UnixListener::bind(&path).expect("a name");
    let mut early = ["GET", "G"].map(|said| {
        let stream = UnixStream::connect(&path).expect("it listens");
        let peer = Lingering::new().leave_in(&stream, said.as_bytes());
        (stream, peer)
    });
    let chardev = format!("socket,id=m,path={},server=on,wait=off", scratch.path("monitor").display());
    let words = ["serve", "--metrics", "fd:metrics", "--chardev", &chardev, "--monitor", "m"];
    // What is started from is gone with the line: the daemon alone has the socket.
    let child = activated("metrics", OwnedFd::from(listener)).args(words).spawn().expect("it starts");
    let mut daemon = Reaped(child);
    assert!(get(&path, "/metrics").expect("a page").0.contains("200"));
    for (stream, _) in &mut early {
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let read = stream.read(&mut [0]).or_else(reset_is_end).expect("who sends descriptors is hung up on");
        assert_eq!(read, 0, "and told nothing");
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&daemon.0), Signal::TERM).expect("our child");
    await_that("the daemon to end", || daemon.0.try_wait().expect("our child").is_some());
}

#[test]
fn whoever_is_not_let_in_holds_up_nobody_by_sockets_that_linger() {
    let mut daemon = Everything::start();
    for _ in 0..3 {
        for name in ["monitor-not-ours", "not-ours"] {
            daemon.leave_at(name, b"x");
            daemon.serves();
        }
    }
    // Whose thread it would have been.
    let mut qmp = Qmp::connect(&daemon.path("monitor"));
    qmp.run("block-export-del", json!({"id": "not-ours"}));
    qmp.event("BLOCK_EXPORT_DELETED");
    drop(qmp);
    daemon.ends_well();
}

#[test]
fn whoever_waits_to_be_let_in_does_not_hold_up_the_end_of_an_export() {
    let mut daemon = Everything::start();
    let mut first = Wire::connect(&daemon.path("ours"));
    first.ask(GET_FEATURES, &[]).expect("an answer");
    let second = UnixStream::connect(daemon.path("ours")).expect("it listens");
    daemon.leave(1, &second, b"x");
    drop(second);
    let mut qmp = Qmp::connect(&daemon.path("monitor"));
    qmp.run("block-export-del", json!({"id": "ours", "mode": "hard"}));
    qmp.event("BLOCK_EXPORT_DELETED");
    assert_eq!(daemon.server.terminate().code(), Some(0));
}

#[test]
fn a_monitor_that_is_sent_sockets_that_linger_answers_others() {
    let mut daemon = Everything::start();
    let mut qmp = Qmp::connect(&daemon.path("monitor"));
    for count in [1, 20, 60] {
        daemon.leave(count, &*qmp.stream(), b" ");
        // That they were taken in, all others of which are closed.
        qmp.run("getfd", json!({"fdname": "last"}));
        daemon.serves();
    }
    qmp.run("closefd", json!({"fdname": "last"}));
    daemon.leave(1, &*qmp.stream(), b" ");
    qmp.run("getfd", json!({"fdname": "kept"}));
    daemon.leave_at("monitor", b"{");
    drop(qmp);
    daemon.ends_well();
}

/// What a client of `ours` does and leaves behind, after which the next one is served.
fn survives(what: &str, attack: impl FnOnce(&mut Everything, Wire)) {
    println!("{what}");
    let mut daemon = Everything::start();
    let wire = Wire::agree(&daemon.path("ours"), F_VERSION_1);
    attack(&mut daemon, wire);
    daemon.ends_well();
}

/// A message's header.
fn header(request: u32, len: u32) -> Vec<u8> {
    u32s(&[request, 1, len])
}

#[test]
fn a_session_with_sockets_that_linger_ends_as_others_do() {
    survives("for nothing", |daemon, wire| daemon.leave(1, wire, &header(SET_OWNER, 0)));
    survives("to be called by", |daemon, wire| {
        daemon.leave(1, wire, &[header(SET_VRING_CALL, 8), u64s(&[0])].concat());
    });
    survives("more of them than any message has", |daemon, wire| daemon.leave(60, wire, &header(SET_OWNER, 0)));
    survives("behind a message that ends the session", |daemon, mut wire| {
        daemon.peers.push(daemon.server.while_stopped(|| {
            wire.send_bytes(&[0xa5; 12]).expect("there is room");
            Lingering::new().leave_in(&wire, b"x")
        }));
    });
}

#[test]
fn a_channel_that_lingers_holds_up_no_change_of_others() {
    survives("itself", |daemon, wire| daemon.leave(1, wire, &header(SET_BACKEND_REQ_FD, 0)));
    survives("by what is in it", |daemon, mut wire| {
        let (channel, other) = UnixStream::pair().expect("a pair");
        daemon.peers.push(Lingering::new().leave_in(&other, b"x"));
        wire.must(SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]);
    });
}
