//! Disks that NBD servers have: data, outages, and what becomes of everything else meanwhile.

mod support;

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, bind, socket};
use serde_json::json;

use support::disk::{Client, Disk};
use support::guest::Guest;
use support::nbd::{NbdServer, Reference, has_servers_or_skips, outages_cost_time_alone, use_it};
use support::port::Port;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use support::{await_that, http};

const MIB: u64 = 1 << 20;

/// A disk behind a UNIX socket, exported writable from one I/O thread.
fn over(server: &Path, export: &Path, more: &str) -> Options {
    Options::new().iothread("io0", "").nbd("d0", server, more).export("e0", "d0", export, "writable=on,iothread=io0")
}

#[test]
fn a_port_of_a_test_s_own_is_nobody_else_s_while_its_server_comes_and_goes() {
    let port = Port::new();
    let address = SocketAddr::from(([127, 0, 0, 1], port.number()));
    let connect = || TcpStream::connect(address).map(drop).map_err(|e| e.kind());
    for _ in 0..2 {
        // A program that another test starts has the server before until it runs.
        await_that("nobody to be there", || connect() == Err(ErrorKind::ConnectionRefused));
        // As somebody who takes no port over.
        let other = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        assert_eq!(bind(&other, &address), Err(Errno::ADDRINUSE));
        let _server = TcpListener::bind(address).unwrap();
        assert_eq!(connect(), Ok(()));
    }
}

#[test]
fn data_is_what_was_written_whatever_the_server_can_do() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("image", 16 * MIB);
    let file = format!("file={}", image.display());
    let nbdkit: [&[&str]; 7] = [
        &["memory", "16M"],
        &["file", &file],
        &["--filter=fua", "file", &file, "fuamode=emulate"],
        &["--filter=fua", "file", &file, "fuamode=discard"],
        &["--filter=nozero", "file", &file, "zeromode=none"],
        &["--filter=delay", "memory", "16M", "rdelay=1ms", "wdelay=1ms", "delay-trim=1ms"],
        &[
            "--no-sr",
            "--filter=blocksize-policy",
            "memory",
            "16M",
            "blocksize-minimum=4096",
            "blocksize-maximum=64K",
            "blocksize-error-policy=error",
        ],
    ];
    for (at, words) in nbdkit.into_iter().enumerate() {
        let [socket, export] = [format!("n{at}"), format!("e{at}")].map(|name| scratch.path(&name));
        let _nbd = NbdServer::nbdkit(&socket, words);
        let block = if words.contains(&"blocksize-minimum=4096") { 4096 } else { 512 };
        let options = Options::new().iothread("io0", "").nbd("d0", &socket, "discard=unmap").export(
            "e0",
            "d0",
            &export,
            &format!("writable=on,iothread=io0,logical-block-size={block}"),
        );
        let server = Server::start(&Program::egret(), &options);
        use_it(&mut Disk::connect(&export).unwrap(), block);
        assert_eq!(server.complaints(), [""; 0], "{words:?}");
        assert_eq!(server.terminate().code(), Some(0), "{words:?}");
    }
    Disk::open(&image, false).unwrap().first().verify_pattern(0..MIB, 1).unwrap();
}

#[test]
fn data_is_what_was_written_over_each_server_that_there_is() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let [one, other] = ["one", "other"].map(|name| scratch.image(name, 16 * MIB));
    let socket = scratch.path("nbd");
    let _qemu = NbdServer::qemu(&socket, &one, 4, &["--export-name=disk"]);
    let port = Port::new();
    let _reference = Reference::start(&scratch.path(""), &port, &other, "");
    for monitor in ["io_uring", "epoll", "ppoll"] {
        let monitor = format!("fd-monitor={monitor}");
        let options = Options::new()
            .iothread("io0", &monitor)
            .iothread("io1", &monitor)
            .nbd("d0", &socket, "export=disk,discard=unmap")
            .export("e0", "d0", &scratch.path("e0"), "writable=on,num-queues=2,iothread.0=io0,iothread.1=io1")
            .words(["--blockdev".to_owned(), format!("nbd,node-name=d1,filename=nbd://localhost:{port}/disk")])
            .export("e1", "d1", &scratch.path("e1"), "writable=on,iothread=io1");
        let server = Server::start(&Program::egret(), &options);
        let two = Client { queues: 2, ..Client::default() };
        use_it(&mut Disk::connect_as(&scratch.path("e0"), two).unwrap(), 512);
        use_it(&mut Disk::connect(&scratch.path("e1")).unwrap(), 512);
        assert_eq!(server.complaints(), [""; 0], "{monitor}");
        assert_eq!(server.terminate().code(), Some(0), "{monitor}");
    }
    for image in [one, other] {
        Disk::open(&image, false).unwrap().first().verify_pattern(0..MIB, 1).unwrap();
    }
}

#[test]
fn a_server_that_is_killed_under_load_costs_time_and_nothing_else() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("image", 16 * MIB);
    let (socket, export) = (scratch.path("nbd"), scratch.path("e0"));
    let mut nbd = NbdServer::nbdkit(&socket, &["file", &format!("file={}", image.display())]);
    let program = Program::egret().with_env("EGRET_LOG", "info");
    let server = Server::start(&program, &over(&socket, &export, "reconnect-delay=60"));
    outages_cost_time_alone(&server, &export, &image, || {
        nbd.kill();
        nbd.start_again();
    });
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn without_a_reconnect_delay_the_guest_sees_errors_until_the_server_is_back() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let (socket, export) = (scratch.path("nbd"), scratch.path("e0"));
    let mut nbd = NbdServer::nbdkit(&socket, &["memory", "16M"]);
    let server = Server::start(&Program::egret(), &over(&socket, &export, ""));
    let mut disk = Disk::connect(&export).unwrap();
    let disk = disk.first();
    disk.write(0, &[1; 4096]).unwrap();
    nbd.kill();
    let failed = disk.read(0, 4096).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::EIO));
    nbd.start_again();
    // What was in memory is gone, which is that server's way.
    await_that("reads to succeed", || disk.read(0, 4096).is_ok_and(|data| data == vec![0; 4096]));
    await_that("it to be told", || !server.complaints().is_empty());
    let said = server.complaints();
    assert!(said[0].ends_with("blockdev 'd0': the server has ended the connection"), "{said:?}");
    assert!(said.len() < 10, "{said:?}");
}

#[test]
fn a_server_that_says_nothing_holds_up_its_own_disk_alone() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let socket = scratch.path("nbd");
    let nbd = NbdServer::nbdkit(&socket, &["memory", "16M"]);
    let paths = ["e0", "e1", "qmp", "metrics"].map(|name| scratch.path(name));
    let options = over(&socket, &paths[0], "reconnect-delay=60")
        .disk("d1", &scratch.image("image", 16 * MIB), "")
        .export("e1", "d1", &paths[1], "writable=on,iothread=io0")
        .monitor("m", &paths[2])
        .metrics(&paths[3])
        .words(["--shutdown-timeout=1"]);
    let mut server = Server::start(&Program::egret(), &options);
    let mut guest = Guest::boot(&paths[0]);
    guest.read_honestly();
    nbd.hang(true);
    guest.describe_read_at(0, 4096);
    guest.offer(0);
    await_that("the daemon to take the read", || guest.is_taken_up());
    // The other disk of the same I/O thread, monitors and metrics go on.
    use_it(&mut Disk::connect(&paths[1]).unwrap(), 512);
    let shown = Qmp::connect(&paths[2]).run("query-named-block-nodes", json!({}));
    let file = format!("nbd+unix:///?socket={}", socket.display());
    assert!(shown.as_array().unwrap().iter().any(|node| node["file"] == file && node["drv"] == "nbd"), "{shown}");
    let (_, metrics) = http::get(&paths[3], "/metrics").unwrap();
    assert!(metrics.contains("engine=\"nbd\""), "{metrics}");
    assert_eq!(server.end().code(), Some(1));
    let said = server.complaints().join("\n");
    assert!(said.contains("export 'e0': a request has not ended in 1 s; blockdev 'd0'"), "{said}");
    nbd.hang(false);
}

#[test]
fn what_a_server_fails_at_is_the_guests_to_know() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let (socket, export) = (scratch.path("nbd"), scratch.path("e0"));
    let words = ["--filter=error", "memory", "16M", "error-pwrite-rate=100%", "error=ENOSPC"];
    let _nbd = NbdServer::nbdkit(&socket, &words);
    let server = Server::start(&Program::egret(), &over(&socket, &export, "reconnect-delay=60"));
    let mut disk = Disk::connect(&export).unwrap();
    assert!(disk.first().write(0, &[1; 4096]).is_err());
    assert_eq!(disk.first().read(0, 4096).unwrap(), vec![0; 4096]);
    drop(disk);
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_guest_is_told_when_the_export_has_grown() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("image", 16 * MIB);
    let [socket, export, qmp] = ["nbd", "e0", "qmp"].map(|name| scratch.path(name));
    let _nbd = NbdServer::nbdkit(&socket, &["file", &format!("file={}", image.display())]);
    let options = over(&socket, &export, "").monitor("m", &qmp);
    let _server = Server::start(&Program::egret(), &options);
    let mut disk = Disk::connect(&export).unwrap();
    let mut qmp = Qmp::connect(&qmp);
    let refused = qmp.fail("block_resize", json!({"node-name": "d0", "size": 32 * MIB}));
    assert!(refused.contains("only its owner can make it longer"), "{refused}");
    OpenOptions::new().write(true).open(&image).unwrap().set_len(32 * MIB).unwrap();
    // nbdkit goes by what there was when a client connected: the guest's requests go over another connection by then.
    qmp.run("block_resize", json!({"node-name": "d0", "size": 32 * MIB}));
    assert_eq!(disk.capacity().unwrap(), 32 * MIB);
    disk.first().write_pattern(24 * MIB..32 * MIB, 9).unwrap();
    disk.first().verify_pattern(24 * MIB..32 * MIB, 9).unwrap();
}

#[test]
fn what_is_wrong_with_a_server_is_said_in_a_line_when_its_disk_is_opened() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let [socket, read_only, coarse, none, export] =
        ["nbd", "ro", "coarse", "none", "e0"].map(|name| scratch.path(name));
    let image = scratch.image("image", MIB);
    let _nbd = NbdServer::qemu(&socket, &image, 1, &["--export-name=disk"]);
    let _read_only = NbdServer::nbdkit(&read_only, &["-r", "memory", "1M"]);
    let blocks = ["--filter=blocksize-policy", "memory", "1M", "blocksize-minimum=4096"];
    let _coarse = NbdServer::nbdkit(&coarse, &blocks);
    let talks = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = talks.local_addr().unwrap().port();
    let _babbles = std::thread::spawn(move || {
        while let Ok((mut stream, _)) = talks.accept() {
            let _ = std::io::Write::write_all(&mut stream, b"220 mail.example.org ESMTP\r\n");
        }
    });
    let said = |blockdev: &str, more: &str| {
        let words = format!("type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={}", export.display());
        let mut command = Program::egret().command();
        let output = command.args(["--blockdev", &format!("nbd,node-name=d0,{blockdev}"), "--export"]);
        let output = output.arg(format!("{words}{more}")).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{blockdev}");
        let lines = String::from_utf8(output.stderr).unwrap();
        lines.lines().last().unwrap_or_default().to_owned()
    };
    let unix = |path: &Path| format!("server.type=unix,server.path={}", path.display());
    let line = said(&format!("{},export=dsik", unix(&socket)), "");
    assert!(line.contains("the server has no export 'dsik'"), "{line}");
    let line = said(&unix(&read_only), ",writable=on");
    assert!(line.contains("the server has it for reading only; use read-only=on"), "{line}");
    let line = said(&unix(&coarse), "");
    let expected = "logical-block-size must be at least 4096, the smallest block of blockdev 'd0'";
    assert!(line.contains(expected) && line.ends_with("got 512"), "{line}");
    let line = said(&unix(&none), "");
    assert!(line.contains("cannot connect: No such file or directory"), "{line}");
    let line = said(&format!("filename=nbd://127.0.0.1:{port}"), "");
    assert!(line.contains("what listens there is no NBD server"), "{line}");
    let nobody = Port::new();
    let line = said(&format!("filename=nbd://127.0.0.1:{nobody}"), "");
    assert!(line.contains("cannot connect: Connection refused"), "{line}");
    // For reading it can be had.
    let options = Options::new().nbd("d0", &read_only, "").export("e0", "d0", &export, "writable=off");
    let server = Server::start(&Program::egret(), &options);
    let reads = Client { read_only: true, ..Client::default() };
    Disk::connect_as(&export, reads).unwrap().first().read(0, 4096).unwrap();
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_server_that_has_one_client_at_a_time_is_left_before_its_disk_is_opened_otherwise() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let [socket, export, qmp] = ["nbd", "e", "qmp"].map(|name| scratch.path(name));
    let _nbd = NbdServer::qemu(&socket, &scratch.image("image", 16 * MIB), 1, &[]);
    // To read, as long as nobody writes.
    let options = Options::new().iothread("io0", "").nbd("d0", &socket, "open-timeout=20").monitor("m", &qmp);
    let server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&qmp);
    let addr = json!({"type": "unix", "path": export});
    let to_write = json!({"type": "vhost-user-blk", "id": "e0", "node-name": "d0", "addr": addr, "writable": true});
    qmp.run("block-export-add", to_write);
    let mut disk = Disk::connect(&export).unwrap();
    disk.first().write(0, &[1; 4096]).unwrap();
    drop((qmp, disk));
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn queues_move_between_io_threads_where_the_server_allows_it_and_stay_where_not() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    for (clients, moves) in [(4, true), (1, false)] {
        let [socket, export, qmp] = ["nbd", "e", "qmp"].map(|name| scratch.path(&format!("{name}{clients}")));
        let image = scratch.image(&format!("image{clients}"), 16 * MIB);
        let _nbd = NbdServer::qemu(&socket, &image, clients, &[]);
        let options = over(&socket, &export, "discard=unmap").iothread("io1", "").monitor("m", &qmp);
        let server = Server::start(&Program::egret(), &options);
        let mut qmp = Qmp::connect(&qmp);
        let mut disk = Disk::connect(&export).unwrap();
        use_it(&mut disk, 512);
        let to = json!({"id": "e0", "queue": 0, "iothread": "io1"});
        match qmp.try_run("egret-move-queue", to) {
            Ok(_) => assert!(moves),
            Err(line) => assert!(!moves && line.contains("NBD_FLAG_CAN_MULTI_CONN"), "{line}"),
        }
        use_it(&mut disk, 512);
        drop((qmp, disk));
        assert_eq!(server.terminate().code(), Some(0));
    }
}

/// The changes and flushes that nbdkit's log has, in the order in which they have ended: each with its connection.
fn changes_logged(log: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(log).unwrap();
    let ended = |line: &str| {
        let (connection, what) = line.split_once("connection=")?.1.split_once(' ')?;
        let what = what.strip_prefix("...").and_then(|what| what.split(' ').next());
        what.filter(|what| ["Write", "Flush"].contains(what)).map(|what| format!("{what} {connection}"))
    };
    text.lines().filter_map(ended).collect()
}

#[test]
fn what_was_written_over_a_connection_is_flushed_over_it_before_it_is_closed_for_another() {
    if !has_servers_or_skips() {
        return;
    }
    for (several, does) in [("disable", "flush"), ("disable", "end"), ("auto", "end"), ("disable", "resize")] {
        let scratch = Scratch::new();
        let [socket, export, qmp, log] = ["nbd", "e0", "qmp", "log"].map(|name| scratch.path(name));
        let (several, logs) = (format!("multi-conn-mode={several}"), format!("logfile={}", log.display()));
        let words = ["--filter=log", "--filter=multi-conn", "memory", "16M", &several, &logs];
        let _nbd = NbdServer::nbdkit(&socket, &words);
        let server = Server::start(&Program::egret(), &over(&socket, &export, "").monitor("m", &qmp));
        let mut qmp = Qmp::connect(&qmp);
        let mut disk = Disk::connect(&export).unwrap();
        disk.first().write(MIB, &[1; 4096]).unwrap();
        let written = changes_logged(&log).pop().unwrap();
        let connection = written.strip_prefix("Write ").unwrap();
        let flushed = |log| changes_logged(log).contains(&format!("Flush {connection}"));
        match does {
            // Whoever has no client asks over a connection that is new.
            "resize" => {
                drop(disk);
                await_that("the old connection to be closed", || {
                    qmp.run("block_resize", json!({"node-name": "d0", "size": 16 * MIB}));
                    let closed = format!("connection={connection} Disconnect");
                    std::fs::read_to_string(&log).unwrap().contains(&closed)
                });
                assert!(flushed(&log), "{does}, {several}: {:?}", changes_logged(&log));
            }
            _ => {
                let server = json!({"type": "unix", "path": socket});
                let node = json!({"driver": "nbd", "node-name": "d0", "server": server, "reconnect-delay": 7});
                qmp.run("blockdev-reopen", json!({"options": [node]}));
                if does == "flush" {
                    disk.first().flush().unwrap();
                    assert!(flushed(&log), "{does}, {several}: {:?}", changes_logged(&log));
                    let last = changes_logged(&log).pop().unwrap();
                    assert!(last.starts_with("Flush ") && !last.ends_with(connection), "{last}, after {connection}");
                }
                drop(disk);
            }
        }
        assert_eq!(server.terminate().code(), Some(0), "{does}, {several}");
        let all = changes_logged(&log);
        assert!(all.iter().any(|change| change.starts_with("Flush ")), "{does}, {several}: {all:?}");
    }
}

#[test]
fn to_reopen_a_disk_that_is_here_asks_nothing_of_a_server_and_to_reopen_a_server_s_connects_anew() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let [socket, export, qmp, file] = ["nbd", "e0", "qmp", "e1"].map(|name| scratch.path(name));
    let mut nbd = NbdServer::nbdkit(&socket, &["memory", "16M"]);
    let image = scratch.image("disk", 1 << 20);
    let options = over(&socket, &export, "").disk("d1", &image, "").export("e1", "d1", &file, "").monitor("m", &qmp);
    let server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&qmp);
    nbd.kill();
    let here = json!({"driver": "file", "node-name": "d1", "filename": image, "cache": {"no-flush": true}});
    qmp.run("blockdev-reopen", json!({"options": [here]}));
    let place = json!({"type": "unix", "path": socket});
    let there = json!({"driver": "nbd", "node-name": "d0", "server": place});
    let refused = qmp.fail("blockdev-reopen", json!({"options": [there.clone()]}));
    assert!(refused.contains("d0"), "{refused}");
    // What has less than guests know of is another disk.
    let mut smaller = NbdServer::nbdkit(&socket, &["memory", "8M"]);
    let refused = qmp.fail("blockdev-reopen", json!({"options": [there.clone()]}));
    assert!(refused.contains("it has 8388608 bytes now, and had 16777216"), "{refused}");
    smaller.kill();
    nbd.start_again();
    qmp.run("blockdev-reopen", json!({"options": [there]}));
    assert_eq!(server.terminate().code(), Some(0));
}
