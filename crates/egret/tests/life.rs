//! How a daemon ends: in time, whatever its disks do, and by itself when it cannot go on.

mod support;

use serde_json::json;

use support::await_that;
use support::fate::Fate;
use support::guest::Guest;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};

const MIB: u64 = 1 << 20;
/// A disk that does not answer.
const HUNG: &str = "latency-ns=3600000000000";

/// The lines of a daemon's last words that complain.
fn complaints(server: &Server) -> String {
    server.complaints().join("\n")
}

/// A guest with two reads in flight that do not end.
fn hung_guest(socket: &std::path::Path) -> Guest {
    let mut guest = Guest::boot(socket);
    for head in [0, 3] {
        guest.describe_read_at(head, 4096);
        guest.offer(head);
    }
    await_that("the daemon to take the reads", || guest.is_taken_up());
    guest
}

#[test]
fn requests_that_do_not_end_are_named_and_the_daemon_ends_without_them() {
    let scratch = Scratch::new();
    let (socket, pidfile) = (scratch.path("hung"), scratch.path("pid"));
    let words = [format!("--pidfile={}", pidfile.display()), "--shutdown-timeout=1".to_owned()];
    let options = Options::new().null("d0", HUNG).export("e0", "d0", &socket, "writable=on").words(words);
    for _ in 0..2 {
        let mut server = Server::start(&Program::egret(), &options);
        let _guest = hung_guest(&socket);
        server.ask_to_end();
        assert_eq!(server.await_end().code(), Some(1));
        let said = complaints(&server);
        assert!(said.contains("export 'e0': 2 requests have not ended in 1 s; blockdev 'd0'"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(!pidfile.exists());
        // The socket is left, and the next daemon takes it over.
    }
}

#[test]
fn a_disk_that_hangs_keeps_no_other_export_from_a_clean_end_and_a_second_signal_ends_the_daemon_at_once() {
    let scratch = Scratch::new();
    let (hung, other) = (scratch.path("hung"), scratch.path("other"));
    // What was written to the other disk is to be made stable, which here shows by failing.
    let program = Program::egret().with(Fate::fails(libc::SYS_fdatasync, libc::EDQUOT));
    let options = Options::new()
        .iothread("io0", "")
        .null("d0", HUNG)
        .disk("d1", &scratch.image("disk", MIB), "")
        .export("e0", "d0", &hung, "writable=on,iothread=io0")
        .export("e1", "d1", &other, "writable=on,iothread=io0")
        .words(["--shutdown-timeout=0"]);
    let mut server = Server::start(&program, &options);
    let _hung = hung_guest(&hung);
    let mut guest = Guest::boot(&other);
    guest.read_honestly();
    server.ask_to_end();
    await_that("the other client to be let go", || guest.is_over());
    await_that("the other disk to be made stable", || {
        complaints(&server).contains("blockdev 'd1': the last flush failed")
    });
    assert!(!other.exists());
    assert!(server.is_alive(), "it waits for the disk that hangs, as long as it takes");
    server.ask_to_end();
    assert_eq!(server.await_end().code(), Some(1));
    let said = complaints(&server);
    assert!(said.contains("export 'e0': 2 requests have not ended before another signal came"), "{said}");
    assert_eq!(said.lines().count(), 2, "{said}");
}

#[test]
fn a_flush_that_does_not_end_does_not_keep_the_daemon_from_ending() {
    let scratch = Scratch::new();
    let socket = scratch.path("disk");
    let program = Program::egret().with(Fate::never(libc::SYS_fdatasync));
    let options = Options::new()
        .disk("d0", &scratch.image("disk", MIB), "")
        .export("e0", "d0", &socket, "writable=on")
        .words(["--shutdown-timeout=1"]);
    let mut server = Server::start(&program, &options);
    Guest::boot(&socket).read_honestly();
    server.ask_to_end();
    assert_eq!(server.await_end().code(), Some(1));
    let said = complaints(&server);
    assert!(said.contains("blockdev 'd0': fdatasync has not ended in 1 s"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!socket.exists());
}

#[test]
fn a_change_that_does_not_end_does_not_keep_the_daemon_from_ending() {
    let scratch = Scratch::new();
    let (socket, monitor) = (scratch.path("disk"), scratch.path("qmp"));
    let program = Program::egret().with(Fate::never(libc::SYS_ftruncate));
    let options = Options::new()
        .disk("d0", &scratch.image("disk", MIB), "")
        .export("e0", "d0", &socket, "writable=on")
        .monitor("m", &monitor)
        .words(["--shutdown-timeout=1"]);
    let mut server = Server::start(&program, &options);
    let mut qmp = Qmp::connect(&monitor);
    let order = json!({ "execute": "block_resize", "arguments": { "node-name": "d0", "size": 2 * MIB } });
    qmp.send(order.to_string().as_bytes());
    await_that("the change to hang", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
        let calls = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("syscall")).ok());
        calls.into_iter().any(|call| call.starts_with(&format!("{} ", libc::SYS_ftruncate)))
    });
    server.ask_to_end();
    assert_eq!(server.await_end().code(), Some(1));
    let said = complaints(&server);
    assert!(said.contains("block_resize: what a monitor ordered has not ended in 1 s"), "{said}");
}
