//! Who may connect: the permissions of sockets, and whose processes are let in.

mod support;

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::process::{Uid, geteuid};
use rustix::thread::set_thread_res_uid;
use serde_json::json;

use support::await_that;
use support::disk::Disk;
use support::http::get;
use support::qmp::Qmp;
use support::scratch::{Scratch, is_root_or_skips};
use support::server::{Options, Program, Server};

/// A user and a group that need not exist.
const SOMEBODY: u32 = 54_321;

/// Runs `act` as another user, on a thread that is this user's alone.
fn as_user<T: Send>(uid: u32, act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            let uid = Uid::from_raw(uid);
            set_thread_res_uid(uid, uid, uid).unwrap();
            act()
        });
        thread.join().unwrap()
    })
}

/// Whether a client that says nothing is hung up on, and told nothing.
fn is_hung_up_on(socket: &Path) -> bool {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(support::PATIENCE)).unwrap();
    stream.read(&mut [0]).or_else(support::reset_is_end).unwrap() == 0
}

#[test]
fn nobody_but_the_users_that_are_named_is_served_and_who_is_not_is_in_the_log() {
    let scratch = Scratch::new();
    let ours = geteuid().as_raw();
    let (mine, not_mine) = (scratch.path("mine"), scratch.path("not-mine"));
    let options = Options::new()
        .null("d0", "")
        .export("e0", "d0", &mine, &format!("writable=on,allow-uid.0={},allow-uid.1={ours}", ours + 1))
        .export("e1", "d0", &not_mine, &format!("allow-uid={}", ours + 1));
    let server = Server::start(&Program::egret(), &options);
    for _ in 0..3 {
        assert!(is_hung_up_on(&not_mine));
    }
    let line = format!("export 'e1': a client of user {ours} is not let in: allow-uid does not name it");
    let told = || server.log().iter().filter(|said| said.contains(&line)).count();
    await_that("three lines in the log", || told() == 3);
    Disk::connect(&mine).unwrap();
    assert_eq!(server.complaints().len(), 3, "{:?}", server.log());
    assert!(server.terminate().success());
    assert_eq!(scratch.left_behind(), Vec::<String>::new());
}

#[test]
fn whoever_the_mode_lets_connect_is_still_asked_for_by_user() {
    if !is_root_or_skips("to be another user") {
        return;
    }
    let scratch = Scratch::new();
    std::fs::set_permissions(scratch.path("."), std::os::unix::fs::PermissionsExt::from_mode(0o711)).unwrap();
    let (disk, monitor, metrics) = (scratch.path("disk"), scratch.path("qmp"), scratch.path("metrics"));
    let allow = format!("mode=0666,allow-uid={SOMEBODY}");
    let chardev = format!("socket,id=m,path={},server=on,wait=off,{allow}", monitor.display());
    let options = Options::new()
        .null("d0", "")
        .export("e0", "d0", &disk, &format!("{allow},writable=on"))
        .listening(&monitor)
        .listening(&metrics)
        .words(["--chardev", &chardev, "--monitor", "m"])
        .words(["--metrics", &format!("unix:{},{allow}", metrics.display())]);
    let server = Server::start(&Program::egret(), &options);
    for socket in [&disk, &monitor, &metrics] {
        let socket_name = socket.file_name().unwrap();
        assert!(as_user(SOMEBODY + 1, || is_hung_up_on(socket)), "{socket_name:?}");
        assert!(is_hung_up_on(socket), "root is not named either: {socket_name:?}");
        let place = if *socket == disk { "export 'e0'".to_owned() } else { format!("socket '{}'", socket.display()) };
        for uid in [0, SOMEBODY + 1] {
            let line = format!("{place}: a client of user {uid} is not let in: allow-uid does not name it");
            await_that(&line, || server.log().iter().any(|said| said.contains(&line)));
        }
    }
    as_user(SOMEBODY, || {
        let exports = Qmp::connect(&monitor).run("query-block-exports", json!({}));
        assert_eq!(exports[0]["id"], "e0");
        assert!(get(&metrics, "/metrics").unwrap().0.contains("200"));
        Disk::connect(&disk).unwrap();
    });
}

#[test]
fn users_who_are_not_let_in_have_so_many_lines_of_the_log_and_the_rest_are_counted() {
    let scratch = Scratch::new();
    let allow = format!("allow-uid={}", geteuid().as_raw() + 1);
    let (monitor, metrics) = (scratch.path("qmp"), scratch.path("metrics"));
    let chardev = format!("socket,id=m,path={},server=on,wait=off,{allow}", monitor.display());
    let options = Options::new()
        .null("d0", "")
        .listening(&monitor)
        .listening(&metrics)
        .words(["--chardev", &chardev, "--monitor", "m"])
        .words(["--metrics", &format!("unix:{},{allow}", metrics.display())]);
    let mut server = Server::start(&Program::egret(), &options);
    for socket in [&monitor, &metrics] {
        for _ in 0..500 {
            assert!(is_hung_up_on(socket));
        }
    }
    assert!(server.end().success());
    let log = server.log();
    for socket in [&monitor, &metrics] {
        let about = format!("socket '{}': ", socket.display());
        let lines: Vec<_> = log.iter().filter(|line| line.contains(&about)).collect();
        assert!(lines.len() < 100, "{} lines", lines.len());
        let told = lines.iter().filter(|line| line.contains("is not let in")).count();
        let counted =
            lines.iter().filter_map(|line| line.split_once("and ")?.1.split_once(" more")?.0.parse::<usize>().ok());
        assert_eq!(told + counted.sum::<usize>(), 500, "{lines:#?}");
    }
}

#[test]
fn a_socket_has_the_permissions_that_its_export_asks_for() {
    let is_root = geteuid().is_root();
    let (user, group) = match is_root {
        true => (SOMEBODY, SOMEBODY),
        false => (geteuid().as_raw(), rustix::process::getegid().as_raw()),
    };
    let scratch = Scratch::new();
    let (first, second, third) = (scratch.path("first"), scratch.path("second"), scratch.path("third"));
    let monitor = scratch.path("qmp");
    let wanted = format!("mode=0660,user={user},group={group}");
    let options = Options::new()
        .null("d0", "")
        .export("e0", "d0", &first, &format!("{wanted},writable=on"))
        .export_scsi("e1", &second, &wanted)
        .monitor("m", &monitor);
    let _server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&monitor);
    let later = json!({"type": "vhost-user-blk", "id": "e2", "node-name": "d0", "mode": "0660", "user": user.to_string(),
                       "group": group.to_string(), "allow-uid": [geteuid().as_raw()],
                       "addr": {"type": "unix", "path": third}});
    qmp.run("block-export-add", later);
    for socket in [&first, &second, &third] {
        let found = std::fs::metadata(socket).unwrap();
        assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (0o660, user, group));
    }
    Disk::connect(&first).unwrap();
    let found = std::fs::metadata(&monitor).unwrap();
    assert_eq!((found.mode() & 0o7777, found.uid()), (0o600, geteuid().as_raw()));
}

#[test]
fn a_user_or_group_that_is_not_there_is_named_and_nothing_is_left_behind() {
    let scratch = Scratch::new();
    let monitor = scratch.path("qmp");
    let _server = Server::start(&Program::egret(), &Options::new().null("d0", "").monitor("m", &monitor));
    let mut qmp = Qmp::connect(&monitor);
    for (key, value, line) in [
        ("user", "nobody here", "export 'e0': there is no user 'nobody here'"),
        ("group", "nobody here", "export 'e0': there is no group 'nobody here'"),
        ("allow-uid", "nobody here", "export 'e0': there is no user 'nobody here'"),
        ("mode", "rw", "export 'e0': mode must be octal permissions (0600), got 'rw'"),
    ] {
        let mut export = json!({"type": "vhost-user-blk", "id": "e0", "node-name": "d0",
                                "addr": {"type": "unix", "path": scratch.path("disk")}});
        export[key] = value.into();
        assert_eq!(qmp.fail("block-export-add", export), line);
        assert_eq!(scratch.left_behind(), ["qmp"]);
    }
}

#[test]
fn a_socket_that_took_the_place_of_the_daemons_own_is_left_alone() {
    let scratch = Scratch::new();
    let (disk, monitor) = (scratch.path("disk"), scratch.path("qmp"));
    let options = Options::new().null("d0", "").export("e0", "d0", &disk, "").monitor("m", &monitor);
    let server = Server::start(&Program::egret(), &options);
    let mut theirs = Vec::new();
    for socket in [&disk, &monitor] {
        std::fs::remove_file(socket).unwrap();
        theirs.push(std::os::unix::net::UnixListener::bind(socket).unwrap());
    }
    assert!(server.terminate().success());
    for socket in [&disk, &monitor] {
        assert!(UnixStream::connect(socket).is_ok(), "{}", socket.display());
    }
}
