//! Sockets that somebody else makes and hands over, as systemd does.

mod support;

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};

use serde_json::json;

use support::disk::Disk;
use support::http::get_tcp;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Reaped, binary};
use support::{await_that, has_or_skips};

/// Two descriptors become 3 and 4, and none is 5, whatever whoever runs the tests has open. They are this process's unless
/// `LISTEN_PID` says otherwise already: the shell's number is that of the program that it becomes.
const HAND_OVER: &str = "exec 3<&0 4>&1 5>&- </dev/null >/dev/null; \
                         LISTEN_FDS=2 LISTEN_PID=${LISTEN_PID:-$$} exec \"$0\" \"$@\"";

/// Egret, to be started with two sockets of these names.
fn with_sockets(names: &str, sockets: [OwnedFd; 2], options: &Options) -> Command {
    let mut command = Command::new("sh");
    let [first, second] = sockets;
    command.args(["-c", HAND_OVER, &binary(), "serve"]).args(options.as_words());
    command.env("LISTEN_FDNAMES", names).env_remove("LISTEN_PID").stdin(first).stdout(second).stderr(Stdio::piped());
    command
}

/// A UNIX socket that listens.
fn unix(scratch: &Scratch, name: &str) -> OwnedFd {
    UnixListener::bind(scratch.path(name)).unwrap().into()
}

/// A null disk on the socket `disk`, and a monitor on the socket `qmp`.
fn disk_and_monitor() -> Options {
    Options::new().null("d0", "").words([
        "--export=vhost-user-blk,id=e0,node-name=d0,addr.type=fd,addr.str=disk,writable=on",
        "--chardev=socket,id=m,fd=qmp,server=on,wait=off",
        "--monitor=m",
    ])
}

#[test]
fn a_client_that_came_before_the_daemon_is_served_and_the_sockets_outlive_it() {
    let scratch = Scratch::new();
    let sockets = [unix(&scratch, "disk"), unix(&scratch, "qmp")];
    let kept = sockets.each_ref().map(|socket| socket.try_clone().unwrap());
    let mut early = Qmp::connect_only(&scratch.path("qmp"));
    for _ in 0..2 {
        let sockets = kept.each_ref().map(|socket| socket.try_clone().unwrap());
        let mut child = Reaped(with_sockets("disk:qmp", sockets, &disk_and_monitor()).spawn().unwrap());
        assert!(early.read().unwrap()["QMP"].is_object());
        let mut late = Qmp::connect(&scratch.path("qmp"));
        assert_eq!(late.run("query-block-exports", json!({}))[0]["id"], "e0");
        let mut disk = Disk::connect(&scratch.path("disk")).unwrap();
        disk.first().write_pattern(0..4096, 1).unwrap();
        drop(disk);
        late.run("quit", json!({}));
        assert!(child.0.wait().unwrap().success());
        // Nobody serves, and the next daemon will serve who connects now.
        early = Qmp::connect_only(&scratch.path("qmp"));
        assert!(scratch.path("disk").exists());
    }
}

#[test]
fn only_users_that_are_named_are_let_in_on_sockets_that_somebody_else_made() {
    let uid = rustix::process::geteuid().as_raw();
    for (allowed, is_let_in) in [(uid, true), (uid + 1, false)] {
        let scratch = Scratch::new();
        let sockets = [unix(&scratch, "disk"), unix(&scratch, "qmp")];
        let options = Options::new().null("d0", "").words([
            format!(
                "--export=vhost-user-blk,id=e0,node-name=d0,addr.type=fd,addr.str=disk,writable=on,allow-uid={allowed}"
            ),
            format!("--chardev=socket,id=m,fd=qmp,server=on,wait=off,allow-uid={allowed}"),
            "--monitor=m".to_owned(),
        ]);
        let _child = Reaped(with_sockets("disk:qmp", sockets, &options).spawn().unwrap());
        assert_eq!(Qmp::connect_only(&scratch.path("qmp")).read().is_some(), is_let_in);
        assert_eq!(Disk::connect(&scratch.path("disk")).is_ok(), is_let_in);
    }
}

#[test]
fn a_client_that_another_process_took_is_not_waited_for() {
    let scratch = Scratch::new();
    let (disk, qmp) = (UnixListener::bind(scratch.path("disk")).unwrap(), unix(&scratch, "qmp"));
    let shared = disk.try_clone().unwrap();
    let mut child = Reaped(with_sockets("disk:qmp", [disk.into(), qmp], &disk_and_monitor()).spawn().unwrap());
    let mut monitor = Qmp::connect(&scratch.path("qmp"));
    // Whoever is faster takes them: the daemon is woken up for some that are gone, and goes on. Its flag stays taken back.
    shared.set_nonblocking(false).unwrap();
    for _ in 0..200 {
        let _client = UnixStream::connect(scratch.path("disk")).unwrap();
        shared.set_nonblocking(true).unwrap();
        let _ = shared.accept();
        shared.set_nonblocking(false).unwrap();
    }
    monitor.run("quit", json!({}));
    assert!(child.0.wait().unwrap().success());
}

#[test]
fn metrics_are_served_on_a_port_that_somebody_else_opened() {
    let scratch = Scratch::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let options = Options::new().words(["--metrics=fd:metrics", "--chardev=socket,id=m,fd=3,server=on", "--monitor=m"]);
    let sockets = [unix(&scratch, "qmp"), listener.into()];
    let _child = Reaped(with_sockets("qmp:metrics", sockets, &options).spawn().unwrap());
    Qmp::connect(&scratch.path("qmp"));
    let (status, page) = get_tcp(port, "/metrics").unwrap();
    assert!(status.contains("200") && page.contains("egret_build_info"), "{status}");
}

#[test]
fn a_socket_that_cannot_be_had_is_named_in_one_line() {
    let scratch = Scratch::new();
    let of_chardev = |fd: &str| {
        let chardev = format!("--chardev=socket,id=m,fd={fd},server=on,wait=off");
        Options::new().words([chardev, "--monitor=m".to_owned()])
    };
    let of_export = |fd: &str| {
        let export = format!("--export=vhost-user-blk,id=e0,node-name=d0,addr.type=fd,addr.str={fd}");
        Options::new().null("d0", "").words([export])
    };
    let anywhere = || TcpListener::bind("0.0.0.0:0").unwrap().into();
    let file = || std::fs::File::open("/dev/null").unwrap().into();
    let connected = || UnixStream::pair().unwrap().0.into();
    let unknown = "no socket of this name was handed over (in $LISTEN_FDNAMES)";
    type Case = (&'static str, fn() -> OwnedFd, Options, String);
    let cases: [Case; 10] = [
        ("disk:x", anywhere, of_export("disc"), format!("export 'e0': addr.str disc: {unknown}; did you mean 'disk'?")),
        ("", anywhere, of_chardev("qmp"), format!("inherited socket 'qmp': {unknown}; there are none")),
        ("a:a", anywhere, of_chardev("a"), "several sockets of this name were handed over; give each".to_owned()),
        ("a:b", anywhere, of_chardev("5"), "chardev 'm': cannot listen on descriptor 5: it is not open".to_owned()),
        ("a:b", anywhere, of_chardev("0"), "descriptor 0: it is a standard stream".to_owned()),
        ("a:b", connected, of_chardev("b"), "inherited socket 'b': it does not listen".to_owned()),
        ("a:b", file, of_chardev("b"), "inherited socket 'b': it is not a socket".to_owned()),
        ("a:b", anywhere, of_chardev("b,force-remote=on,allow-uid=1"), "no UNIX socket, and allow-uid".to_owned()),
        ("a:b", anywhere, of_chardev("b"), "other hosts reach 0.0.0.0; use path".to_owned()),
        ("a:b", anywhere, of_export("b"), "export 'e0': the inherited descriptor is not a UNIX socket".to_owned()),
    ];
    for (at, (names, second, options, line)) in cases.into_iter().enumerate() {
        let sockets = [unix(&scratch, &at.to_string()), second()];
        let done = with_sockets(names, sockets, &options).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(1), "{said}");
        let once = said.matches(&line).count() == 1 && said.lines().count() == 1;
        assert!(once, "{said}");
    }
}

#[test]
fn sockets_of_another_process_are_not_taken() {
    let scratch = Scratch::new();
    let sockets = [unix(&scratch, "disk"), unix(&scratch, "qmp")];
    let done = with_sockets("disk:qmp", sockets, &disk_and_monitor()).env("LISTEN_PID", "1").output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(!done.status.success());
    assert!(said.contains("addr.str disk: no socket of this name was handed over"), "{said}");
}

#[test]
fn a_socket_that_nobody_serves_is_warned_of() {
    let scratch = Scratch::new();
    let sockets = [unix(&scratch, "qmp"), unix(&scratch, "forgotten")];
    let options = Options::new().words(["--chardev=socket,id=m,fd=qmp,server=on", "--monitor=m"]);
    let child = with_sockets("qmp:forgotten", sockets, &options).spawn().unwrap();
    Qmp::connect(&scratch.path("qmp")).run("quit", json!({}));
    let said = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    assert!(said.contains("socket 'forgotten' was handed over, and nobody serves who connects to it"), "{said}");
}

#[test]
fn systemds_own_tool_starts_it_for_the_first_client() {
    let tool = "systemd-socket-activate";
    if !has_or_skips(tool) {
        return;
    }
    let scratch = Scratch::new();
    let socket = scratch.path("qmp");
    let egret = Program::egret().command();
    let mut command = Command::new(tool);
    command.arg("--listen").arg(&socket).arg("--fdname=qmp").arg(egret.get_program()).args(egret.get_args());
    command.args(["--chardev=socket,id=m,fd=qmp,server=on", "--monitor=m"]).stderr(Stdio::null());
    let mut child = Reaped(command.spawn().unwrap());
    await_that("the tool to listen", || UnixStream::connect(&socket).is_ok());
    Qmp::connect(&socket).run("quit", json!({}));
    assert!(child.0.wait().unwrap().success());
}
