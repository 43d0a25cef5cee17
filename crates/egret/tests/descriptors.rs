//! Images and sockets that are handed over as descriptors: a daemon that may open nothing serves what it is given.

mod support;

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl};
use serde_json::{Value, json};

use support::await_that;
use support::disk::Disk;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Reaped, Server, activated};

const MIB: u64 = 1 << 20;

fn open(path: &Path, write: bool) -> File {
    File::options().read(true).write(write).open(path).unwrap()
}

/// A daemon with a monitor and nothing else.
fn bare(scratch: &Scratch) -> (Server, Qmp) {
    let monitor = scratch.path("qmp");
    let server = Server::start(&Program::egret(), &Options::new().monitor("m", &monitor));
    (server, Qmp::connect(&monitor))
}

fn image(node: &str, set: u64) -> Value {
    json!({"driver": "file", "node-name": node, "filename": format!("/dev/fdset/{set}"), "locking": "on"})
}

fn export_on(socket: &str, node: &str) -> Value {
    json!({"type": "vhost-user-blk", "id": format!("of-{node}"), "node-name": node, "writable": true,
           "addr": {"type": "fd", "str": socket}})
}

#[test]
fn a_disk_is_served_whose_image_and_socket_the_daemon_could_not_have_opened() {
    let scratch = Scratch::new();
    let (_server, mut qmp) = bare(&scratch);
    let path = scratch.image("disk", MIB);
    let (ours, theirs) = (open(&path, true), open(&path, true));
    // No path leads to it any more.
    std::fs::remove_file(&path).unwrap();
    let listener = UnixListener::bind(scratch.path("disk")).unwrap();
    assert_eq!(qmp.run_with("add-fd", json!({"fdset-id": 3}), &theirs)["fdset-id"], 3);
    qmp.run("blockdev-add", image("d0", 3));
    qmp.run_with("getfd", json!({"fdname": "socket"}), &listener);
    qmp.run("block-export-add", export_on("socket", "d0"));
    drop((theirs, listener));
    for seed in 1..3 {
        let mut disk = Disk::connect(&scratch.path("disk")).unwrap();
        disk.first().write_pattern(0..MIB, seed).unwrap();
        disk.first().verify_pattern(0..MIB, seed).unwrap();
    }
    let mut bytes = vec![0; MIB as usize];
    ours.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().any(|byte| *byte != 0), "it is that file that was written to");
    // The name was given away, and so another socket may have it.
    assert_eq!(
        qmp.fail("block-export-add", export_on("socket", "d0")),
        "File descriptor named 'socket' has not been found"
    );
    qmp.run("block-export-del", json!({"id": "of-d0", "mode": "hard"}));
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "of-d0"}));
    assert!(scratch.path("disk").exists(), "who made the socket removes it");
    let listener = UnixListener::bind(scratch.path("again")).unwrap();
    qmp.run_with("getfd", json!({"fdname": "socket"}), &listener);
    // It keeps its name until there is an export that has it.
    let refused = qmp.fail("block-export-add", export_on("socket", "d9"));
    assert_eq!(refused, "Cannot find device='' nor node-name='d9'");
    qmp.run("block-export-add", export_on("socket", "d0"));
    Disk::connect(&scratch.path("again")).unwrap();
}

#[test]
fn what_is_wrong_with_descriptors_is_said_as_qemu_says_it() {
    let scratch = Scratch::new();
    let (_server, mut qmp) = bare(&scratch);
    let path = scratch.image("disk", MIB);
    let (reading, writing) = (open(&path, false), open(&path, true));
    // Each was sent to qemu-system-x86_64 10.0, which answers with this text.
    let missing = "No file descriptor supplied via SCM_RIGHTS";
    assert_eq!(qmp.fail("getfd", json!({"fdname": "a"})), missing);
    assert_eq!(qmp.fail("add-fd", json!({})), missing);
    assert_eq!(
        qmp.try_run_with("getfd", json!({"fdname": "1a"}), &reading).unwrap_err(),
        "Parameter 'fdname' expects a name not starting with a digit"
    );
    for _ in 0..2 {
        assert_eq!(qmp.run_with("getfd", json!({"fdname": "a"}), &reading), json!({}));
    }
    assert_eq!(qmp.fail("closefd", json!({"fdname": "b"})), "File descriptor named 'b' not found");
    assert_eq!(qmp.run("closefd", json!({"fdname": "a"})), json!({}));
    assert_eq!(qmp.fail("closefd", json!({"fdname": "a"})), "File descriptor named 'a' not found");
    let first = qmp.run_with("add-fd", json!({"opaque": "x"}), &reading);
    assert_eq!(first["fdset-id"], 0);
    let second = qmp.run_with("add-fd", json!({"fdset-id": 0, "opaque": "y"}), &writing);
    let third = qmp.run_with("add-fd", json!({"fdset-id": 7}), &reading);
    let sets = json!([
        {"fdset-id": 0, "fds": [{"fd": first["fd"], "opaque": "x"}, {"fd": second["fd"], "opaque": "y"}]},
        {"fdset-id": 7, "fds": [{"fd": third["fd"]}]},
    ]);
    assert_eq!(qmp.run("query-fdsets", json!({})), sets);
    assert_eq!(qmp.fail("remove-fd", json!({"fdset-id": 9})), "File descriptor named 'fdset-id:9' not found");
    let error = "File descriptor named 'fdset-id:7, fd:999' not found";
    assert_eq!(qmp.fail("remove-fd", json!({"fdset-id": 7, "fd": 999})), error);
    qmp.run("remove-fd", json!({"fdset-id": 0, "fd": first["fd"]}));
    qmp.run("remove-fd", json!({"fdset-id": 7}));
    let left = json!([{"fdset-id": 0, "fds": [{"fd": second["fd"], "opaque": "y"}]}]);
    assert_eq!(qmp.run("query-fdsets", json!({})), left);
    let no_socket = qmp.fail("block-export-add", export_on("nope", "d0"));
    assert_eq!(no_socket, "File descriptor named 'nope' has not been found");
}

#[test]
fn an_image_takes_a_descriptor_of_its_set_that_was_opened_for_what_is_done_to_it() {
    let scratch = Scratch::new();
    let (_server, mut qmp) = bare(&scratch);
    let path = scratch.image("disk", MIB);
    qmp.run("blockdev-add", json!({"driver": "null-co", "node-name": "n0"}));
    assert_eq!(
        qmp.fail("blockdev-add", image("d0", 5)),
        "blockdev 'd0': there is no fdset 5; hand one over with add-fd"
    );
    qmp.run_with("add-fd", json!({"fdset-id": 5}), open(&path, false));
    qmp.run("blockdev-add", image("d0", 5));
    // Nobody writes to it yet, and then somebody does.
    let export = json!({"type": "vhost-user-blk", "id": "e0", "node-name": "d0", "writable": true,
                        "addr": {"type": "unix", "path": scratch.path("e0")}});
    assert_eq!(
        qmp.fail("block-export-add", export.clone()),
        "blockdev 'd0': fdset 5 has no descriptor that is open for reading and writing; hand one over with add-fd, or \
         use read-only=on"
    );
    qmp.run_with("add-fd", json!({"fdset-id": 5}), open(&path, true));
    qmp.run("block-export-add", export);
    let mut disk = Disk::connect(&scratch.path("e0")).unwrap();
    disk.first().write_pattern(0..MIB, 1).unwrap();
    // Only one image at a time is open through it, because its locks and its flags are one.
    qmp.run("blockdev-add", image("d1", 5));
    assert!(qmp.fail("blockdev-add", image("d2", 5)).contains("add another, opened anew"));
    for (wrong, line) in [
        (File::options().write(true).open(&path).unwrap(), "has no descriptor that is open for reading;"),
        (File::open(scratch.path(".")).unwrap(), "is a directory"),
        (File::open("/dev/null").unwrap(), "is neither a regular file nor a block device"),
    ] {
        let set = qmp.run_with("add-fd", json!({}), &wrong)["fdset-id"].as_u64().unwrap();
        let error = qmp.fail("blockdev-add", image("w", set));
        assert!(error.contains(line), "{error}");
    }
}

#[test]
fn an_image_is_reopened_through_another_descriptor_and_locked_all_the_while() {
    let scratch = Scratch::new();
    let (_server, mut qmp) = bare(&scratch);
    let path = scratch.image("disk", MIB);
    // Who has it open for appending means the end; a guest means where it writes.
    let appending = File::options().read(true).append(true).open(&path).unwrap();
    qmp.run_with("add-fd", json!({"fdset-id": 0}), &appending);
    qmp.run("blockdev-add", image("d0", 0));
    let export = json!({"type": "vhost-user-blk", "id": "e0", "node-name": "d0", "writable": true,
                        "addr": {"type": "unix", "path": scratch.path("e0")}});
    qmp.run("block-export-add", export);
    let mut disk = Disk::connect(&scratch.path("e0")).unwrap();
    disk.first().write_pattern(0..MIB, 1).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB);
    let elsewhere = open(&path, true);
    let is_locked = || {
        // Whether a write lock on the byte of QEMU's write permission could be had.
        let mut lock = libc::flock { l_type: libc::F_WRLCK as _, l_whence: 0, l_start: 101, l_len: 1, l_pid: 0 };
        let fd = std::os::fd::AsRawFd::as_raw_fd(&elsewhere);
        // SAFETY: the descriptor is open and the argument is the structure that this command reads and writes.
        assert_ne!(unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut lock) }, -1);
        lock.l_type != libc::F_UNLCK as libc::c_short
    };
    assert!(is_locked());
    let otherwise = |aio: &str, direct: bool| {
        let mut node = image("d0", 0);
        (node["aio"], node["cache"]) = (aio.into(), json!({ "direct": direct }));
        json!({ "options": [node] })
    };
    let error = qmp.fail("blockdev-reopen", otherwise("io_uring", false));
    assert!(error.contains("add another, opened anew"), "{error}");
    let second = open(&path, true);
    qmp.run_with("add-fd", json!({"fdset-id": 0}), &second);
    // The two take turns from here on, and each is as the disk is to be.
    for (round, (aio, direct)) in [("native", true), ("threads", false), ("io_uring", true)].into_iter().enumerate() {
        qmp.run("blockdev-reopen", otherwise(aio, direct));
        assert!(is_locked(), "round {round}");
        let flags = fcntl_getfl([&second, &appending][round % 2]).unwrap();
        assert_eq!((flags.contains(OFlags::DIRECT), flags.contains(OFlags::APPEND)), (direct, false));
        disk.first().verify_pattern(0..MIB, 1 + round as u64).unwrap();
        disk.first().write_pattern(0..MIB, 2 + round as u64).unwrap();
    }
    // Another image is not taken for this one.
    qmp.run("remove-fd", json!({"fdset-id": 0}));
    assert!(qmp.fail("blockdev-reopen", otherwise("threads", false)).contains("there is no fdset 0"));
    qmp.run_with("add-fd", json!({"fdset-id": 0}), open(&scratch.image("other", MIB), true));
    let error = qmp.fail("blockdev-reopen", otherwise("threads", false));
    assert!(error.contains("another has taken its place"), "{error}");
    disk.first().verify_pattern(0..MIB, 4).unwrap();
}

#[test]
fn what_clients_leave_behind_is_closed_and_what_is_used_stays() {
    let scratch = Scratch::new();
    let (server, mut qmp) = bare(&scratch);
    let path = scratch.image("disk", MIB);
    let (used, unused) = (open(&path, true), open(&path, true));
    qmp.run("query-fdsets", json!({}));
    let before = server.descriptors();
    // The first is taken, the others of its message are closed, and so are those that are too many for one.
    let many: Vec<File> = (0..40).map(|_| unused.try_clone().unwrap()).collect();
    qmp.send_descriptors(&many.iter().map(File::as_fd).collect::<Vec<_>>());
    qmp.run("getfd", json!({"fdname": "a"}));
    await_that("the others to be closed", || server.descriptors() == before + 1);
    // What no command took makes room for what comes next.
    for _ in 0..10 {
        qmp.send_descriptors(&[unused.as_fd(), unused.as_fd()]);
        qmp.run("query-fdsets", json!({}));
    }
    await_that("all but the last two to be closed", || server.descriptors() == before + 3);
    for at in 0..63 {
        qmp.run_with("getfd", json!({"fdname": format!("n{at}")}), &unused);
    }
    let error = qmp.try_run_with("getfd", json!({"fdname": "n64"}), &unused).unwrap_err();
    assert_eq!(error, "64 descriptors have names; closefd gives one back");
    qmp.run_with("add-fd", json!({"fdset-id": 1}), &used);
    qmp.run("blockdev-add", image("d0", 1));
    qmp.run_with("add-fd", json!({"fdset-id": 2}), &unused);

    // Another client has names of its own, and sets are everybody's.
    let mut other = Qmp::connect(&scratch.path("qmp"));
    assert_eq!(other.fail("closefd", json!({"fdname": "a"})), "File descriptor named 'a' not found");
    drop(qmp);
    let sets = |qmp: &mut Qmp| qmp.run("query-fdsets", json!({})).as_array().unwrap().len();
    await_that("the first client's names to go", || server.descriptors() <= before + 4);
    assert_eq!(sets(&mut other), 2);
    drop(other);
    await_that("the set that nobody uses to go", || sets(&mut Qmp::connect(&scratch.path("qmp"))) == 1);
    let mut qmp = Qmp::connect(&scratch.path("qmp"));
    qmp.run("blockdev-del", json!({"node-name": "d0"}));
    qmp.run("blockdev-add", image("d0", 1));
}

#[test]
fn a_descriptor_that_the_daemon_is_started_with_is_an_image_by_its_number_or_name() {
    for (fd, from_the_start) in [("3", true), ("disk0", false)] {
        let scratch = Scratch::new();
        let path = scratch.image("disk", MIB);
        let options =
            Options::new().words([format!("--add-fd=fd={fd},set=4,opaque=mine")]).monitor("m", &scratch.path("qmp"));
        let options = match from_the_start {
            true => options.words(["--blockdev=file,node-name=d0,filename=/dev/fdset/4"]),
            false => options,
        };
        let mut daemon = activated("disk0", open(&path, true).into());
        std::fs::remove_file(&path).unwrap();
        let _child = Reaped(daemon.arg("serve").args(options.as_words()).spawn().unwrap());
        await_that("the daemon to listen", || UnixStream::connect(scratch.path("qmp")).is_ok());
        // It stays, however many clients have come and gone.
        for _ in 0..3 {
            let shown = Qmp::connect(&scratch.path("qmp")).run("query-fdsets", json!({}));
            assert_eq!(shown, json!([{"fdset-id": 4, "fds": [{"fd": 3, "opaque": "mine"}]}]));
        }
        let mut qmp = Qmp::connect(&scratch.path("qmp"));
        if !from_the_start {
            qmp.run("blockdev-add", image("d0", 4));
        }
        let export = json!({"type": "vhost-user-blk", "id": "e0", "node-name": "d0", "writable": true,
                            "addr": {"type": "unix", "path": scratch.path("e0")}});
        qmp.run("block-export-add", export);
        let mut disk = Disk::connect(&scratch.path("e0")).unwrap();
        disk.first().write_pattern(0..MIB, 1).unwrap();
    }
}

#[test]
fn a_descriptor_that_cannot_be_had_is_a_refusal_in_one_line() {
    for (argument, line) in [
        ("fd=999,set=1", "--add-fd fd=999: it is not open"),
        ("fd=1,set=1", "--add-fd fd=1: it is a standard stream"),
        ("fd=3", "--add-fd fd=3: set is missing"),
    ] {
        let mut command = Program::egret().command();
        command.args(["--blockdev", "null-co,node-name=d0", "--monitor", "stdio", "--add-fd", argument]);
        let said = command.output().unwrap();
        let text = String::from_utf8(said.stderr).unwrap();
        assert!(!said.status.success() && text.contains(line) && text.lines().count() == 1, "{text}");
    }
}
