//! What a monitor has to wait for, and what not.

mod support;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::Path;

use blkio::ReqFlags;
use serde_json::json;
use support::disk::Disk;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Reaped, Server};
use support::{await_some, await_that};

const MIB: u64 = 1 << 20;

/// From asm-generic/fcntl.h.
const F_SETSIG: libc::c_int = 10;

/// A lease on a file: whoever opens it waits until it is given back.
struct Lease(File);

impl Lease {
    fn take(path: &Path) -> Self {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let order = |command, number: libc::c_int| {
            // SAFETY: these commands take a number and touch no memory.
            let done = unsafe { libc::fcntl(file.as_raw_fd(), command, number) };
            if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // What tells us that somebody waits, and would end us if it were not this.
        order(F_SETSIG, libc::SIGURG).unwrap();
        // A process that is just being started by another test has our descriptors open for a moment.
        await_that("nobody else to have it open", || match order(libc::F_SETLEASE, libc::F_WRLCK) {
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => false,
            taken => taken.map(|()| true).unwrap(),
        });
        Self(file)
    }

    fn is_waited_for(&self) -> bool {
        // SAFETY: this command takes nothing and touches no memory.
        let left = unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_GETLEASE) };
        left != libc::F_WRLCK
    }
}

#[test]
fn what_only_looks_is_answered_while_a_change_waits_for_a_file() {
    let scratch = Scratch::new();
    let (image, monitor) = (scratch.image("disk", MIB), scratch.path("qmp"));
    let lease = Lease::take(&image);
    let _server = Server::start(&Program::egret(), &Options::new().monitor("m", &monitor).null("n0", ""));
    let (mut slow, mut other) = (Qmp::connect(&monitor), Qmp::connect(&monitor));
    let add = json!({"driver": "file", "node-name": "d0", "filename": image});
    slow.send(json!({"execute": "blockdev-add", "arguments": add}).to_string().as_bytes());
    await_that("the daemon to open the file", || lease.is_waited_for());

    for query in ["query-version", "query-commands", "query-block-exports", "qom-list"] {
        let arguments = if query == "qom-list" { json!({"path": "/objects"}) } else { json!({}) };
        other.run(query, arguments);
    }
    let nodes = |qmp: &mut Qmp| qmp.run("query-named-block-nodes", json!({})).as_array().unwrap().len();
    assert_eq!(nodes(&mut other), 1);
    // Somebody new is let in, and another change waits for its turn.
    assert_eq!(nodes(&mut Qmp::connect(&monitor)), 1);
    other.send(json!({"execute": "blockdev-del", "arguments": {"node-name": "d0"}}).to_string().as_bytes());
    assert_eq!(nodes(&mut Qmp::connect(&monitor)), 1);

    drop(lease);
    assert_eq!(slow.read().unwrap(), json!({"return": {}}));
    assert_eq!(other.read().unwrap(), json!({"return": {}}));
    assert_eq!(nodes(&mut slow), 1);
}

#[test]
fn clients_that_fill_one_monitor_hold_up_no_other() {
    let scratch = Scratch::new();
    let (first, second) = (scratch.path("first"), scratch.path("second"));
    let options = Options::new().null("n0", "").monitor("m", &first).monitor("n", &second);
    let _server = Server::start(&Program::egret(), &options);
    let mut silent: Vec<Qmp> = (0..100).map(|_| Qmp::connect_only(&first)).collect();
    // So many are let in.
    silent[..32].iter_mut().for_each(|client| assert!(client.read().unwrap()["QMP"].is_object()));
    let mut other = Qmp::connect(&second);
    assert_eq!(other.run("query-named-block-nodes", json!({})).as_array().unwrap().len(), 1);
    // Who waits at the first is let in when others leave.
    silent.drain(..99);
    assert!(silent[0].read().unwrap()["QMP"].is_object());
}

#[test]
fn a_disk_that_hangs_holds_up_no_change_of_another() {
    let scratch = Scratch::new();
    let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
    let options = Options::new()
        .monitor("m", &monitor)
        .iothread("io0", "")
        .null("d0", "latency-ns=3600000000000")
        .export("e0", "d0", &socket, "iothread=io0");
    let _server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&monitor);
    let mut disk = Disk::connect_as(&socket, support::disk::Client { read_only: true, ..Default::default() }).unwrap();
    let (queue, buffer) = disk.first().parts();
    queue.read(0, buffer, 4096, 0, ReqFlags::empty());
    queue.do_io(&mut [], 0, None, None).unwrap();
    drop(disk);

    // Its client has left or is about to; what it asked for is in flight for an hour.
    for _ in 0..100 {
        assert_eq!(qmp.fail("block-export-del", json!({"id": "e0"})), "export 'e0' still in use");
    }
    qmp.run("block-export-del", json!({"id": "e0", "mode": "hard"}));
    let exports = qmp.run("query-block-exports", json!({}));
    assert_eq!((&exports[0]["id"], &exports[0]["shutting-down"]), (&json!("e0"), &json!(true)));
    assert_eq!(qmp.fail("blockdev-del", json!({"node-name": "d0"})), "Node d0 is in use");
    qmp.run("blockdev-add", json!({"driver": "null-co", "node-name": "d1"}));
    let export = json!({"type": "vhost-user-blk", "id": "e1", "node-name": "d1",
                        "addr": {"type": "unix", "path": scratch.path("e1")}});
    qmp.run("block-export-add", export);
    qmp.run("block-export-del", json!({"id": "e1"}));
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "e1"}));
    qmp.run("blockdev-del", json!({"node-name": "d1"}));
}

/// A terminal's two ends: who reads it, and what a program has for its streams. It passes bytes on as they are.
fn terminal() -> (File, File) {
    let (mut ours, mut theirs) = (-1, -1);
    // SAFETY: all zeroes is a valid value of this plain structure.
    let mut how: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: it writes to this structure alone.
    unsafe { libc::cfmakeraw(&raw mut how) };
    // As most terminals it looks at what a program writes, and takes as much as it has room for.
    how.c_oflag = libc::OPOST;
    // SAFETY: it writes two numbers and reads `how`; a null pointer stands for what is not said.
    let made = unsafe {
        libc::openpty(&raw mut ours, &raw mut theirs, std::ptr::null_mut(), &raw const how, std::ptr::null())
    };
    assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: both were just opened, and are nobody else's.
    unsafe { (File::from_raw_fd(ours), File::from_raw_fd(theirs)) }
}

#[test]
fn a_terminal_that_nobody_reads_holds_up_neither_another_monitor_nor_the_end() {
    let scratch = Scratch::new();
    let socket = scratch.path("qmp");
    let (mut reader, theirs) = terminal();
    let mut command = Program::egret().command();
    command.args(Options::new().monitor("m", &socket).words(["--monitor", "stdio"]).as_words());
    command.stdin(theirs.try_clone().unwrap()).stdout(theirs);
    let mut daemon = Reaped(command.spawn().unwrap());
    drop(command);
    let mut said = BufReader::new(reader.try_clone().unwrap());
    let mut line = || {
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        serde_json::from_str::<serde_json::Value>(&line).unwrap()
    };
    assert!(line()["QMP"].is_object());
    reader.write_all(b"{\"execute\":\"qmp_capabilities\"}\n").unwrap();
    assert_eq!(line(), json!({"return": {}}));
    reader.write_all(b"{\"execute\":\"query-qmp-schema\"}\n".repeat(2).as_slice()).unwrap();
    // An answer has begun to come, and is more than a terminal holds.
    rustix::event::poll(&mut [rustix::event::PollFd::new(&reader, rustix::event::PollFlags::IN)], None).unwrap();
    let mut other = Qmp::connect(&socket);
    // With each of these goes a piece of what the terminal is to have.
    let schema = other.run("query-qmp-schema", json!({}));
    assert!(schema.to_string().len() > 32 << 10);
    for _ in 0..40 {
        other.run("query-version", json!({}));
        // This makes room for less than there is to say.
        assert!(reader.read(&mut [0; 512]).unwrap() > 0);
        other.run("query-version", json!({}));
    }
    let pid = rustix::process::Pid::from_child(&daemon.0);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = await_some("the daemon to end", || daemon.0.try_wait().unwrap());
    assert!(status.success(), "{status}");
}
