//! What the daemon may still do when it serves: its files, its users and its system calls, and that it makes use of all
//! that it may.

mod support;

use std::fs::{File, Permissions};
use std::io::Read;
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use blkio::ReqFlags;
use egret_lab::disks::LoopDevice;
use egret_nbd::protocol::{Headers, command};
use egret_needs::Ceph;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Signal, getegid, geteuid};
use serde_json::{Value, json};

use support::calls::Calls;
use support::disk::Disk;
use support::guest::Guest;
use support::nbd::{NbdServer, has_servers_or_skips};
use support::nbd_client::NbdClient;
use support::port::Port;
#[cfg(target_arch = "x86_64")]
use support::puppet::Puppet;
use support::qmp::Qmp;
use support::scratch::{Scratch, is_root, is_root_or_skips};
use support::server::{Options, Program, Server};
use support::wire::{F_VERSION_1, GET_INFLIGHT_FD, SET_BACKEND_REQ_FD, SET_VRING_CALL, Wire, inflight};
use support::{PATIENCE, await_some, await_that, has_or_skips, http};

const MIB: u64 = 1 << 20;
/// How often the watchdog wakes up under `--watchdog 1`, at least.
const LOOKS_A_SECOND: u64 = 4;

/// A daemon with an I/O thread for each monitor, which keep a worker when they have had one, a disk, metrics and a monitor, under whatever `program` adds.
fn daemon(scratch: &Scratch, program: &Program) -> (Server, Qmp) {
    let image = scratch.image("d0", 16 * MIB);
    let uid = format!("allow-uid={}", geteuid().as_raw());
    let options = Options::new()
        .iothread("io0", "fd-monitor=io_uring,thread-pool-min=1")
        .iothread("io1", "fd-monitor=epoll,thread-pool-min=1")
        .iothread("io2", "fd-monitor=ppoll,thread-pool-min=1")
        .disk("d0", &image, "aio=io_uring,cache.direct=on,discard=unmap")
        .export(
            "e0",
            "d0",
            &scratch.path("e0"),
            "writable=on,num-queues=3,iothread.0=io0,iothread.1=io1,iothread.2=io2,pin-memory=on",
        )
        .null("null", "")
        .export_scsi(
            "e-scsi",
            &scratch.path("e-scsi"),
            &format!("luns.0.lun=0,luns.0.node-name=null,luns.0.pr-file={}", scratch.path("pr").display()),
        )
        .listening(&scratch.path("qmp"))
        .listening(&scratch.path("metrics"))
        .words([
            "--chardev".to_owned(),
            format!("socket,id=m,path={},server=on,wait=off,{uid}", scratch.path("qmp").display()),
        ])
        .words(["--monitor".to_owned(), "m".to_owned()])
        .words(["--metrics".to_owned(), format!("unix:{},{uid}", scratch.path("metrics").display())])
        .words(["--watchdog", "1", "--record-waits", scratch.path("waits").to_str().unwrap()]);
    let server = Server::start(program, &options);
    let qmp = Qmp::connect(&scratch.path("qmp"));
    (server, qmp)
}

fn set(qmp: &mut Qmp, iothread: &str, property: &str, value: Value) {
    qmp.run("qom-set", json!({"path": format!("/objects/{iothread}"), "property": property, "value": value}));
}

fn reopen(qmp: &mut Qmp, image: &Path, aio: &str, direct: bool) {
    let options = json!({"driver": "file", "node-name": "d0", "filename": image, "aio": aio, "discard": "unmap",
                         "cache": {"direct": direct}});
    qmp.run("blockdev-reopen", json!({"options": [options]}));
}

/// Every operation, on each queue.
fn use_disk(disk: &mut Disk) {
    for queue in &mut disk.queues {
        queue.write_pattern(0..MIB, 1).unwrap();
        queue.verify_pattern(0..MIB, 1).unwrap();
        queue.write_with(0, &[1; 4096], ReqFlags::FUA).unwrap();
        // Alone: first looked for in the page cache.
        queue.read(0, 4096).unwrap();
        queue.flush().unwrap();
        queue.discard(4096..64 << 10).unwrap();
        queue.write_zeroes(512..4096, ReqFlags::empty()).unwrap();
        queue.write_zeroes(512..4096, ReqFlags::NO_UNMAP).unwrap();
        let (raw, buffer) = queue.parts();
        // SAFETY: within the queue's buffer, and nothing is in flight; odd, so that workers copy it.
        let odd = unsafe { std::slice::from_raw_parts_mut(buffer.add(4097), 1024) };
        raw.write(512, odd.as_ptr(), odd.len(), 0, ReqFlags::empty());
        queue.finish().unwrap();
    }
}

/// All that a daemon can be asked for, in one life.
fn live_fully(scratch: &Scratch, program: &Program) {
    let (server, mut qmp) = daemon(scratch, program);
    let image = scratch.image_path("d0");
    let three = support::disk::Client { queues: 3, ..Default::default() };
    let connect = || Disk::connect_as(&scratch.path("e0"), three).unwrap();
    for (aio, direct) in [("io_uring", true), ("io_uring", false), ("threads", true), ("native", true)] {
        reopen(&mut qmp, &image, aio, direct);
        use_disk(&mut connect());
    }
    // The engine pins memory in the course of time, when all of it has been used.
    reopen(&mut qmp, &image, "io_uring", true);
    let mut disk = connect();
    disk.queues.iter_mut().for_each(|queue| queue.write_pattern(0..MIB, 1).unwrap());
    await_that("pinned memory", || {
        disk.queues.iter_mut().for_each(|queue| drop(queue.read(0, 4096).unwrap()));
        let (_, page) = http::get(&scratch.path("metrics"), "/metrics").unwrap();
        page.lines().any(|line| line.starts_with("egret_engine_pinned_bytes") && !line.ends_with(" 0"))
    });
    drop(disk);
    reopen(&mut qmp, &image, "native", true);
    // How I/O threads wait and where, with another that comes and goes, as do a disk and its export.
    for cpus in [json!("0"), Value::Null] {
        set(&mut qmp, "io0", "cpu-affinity", cpus);
    }
    // A message that takes more memory as it comes, before a recording goes and leaves it as much.
    let id = "long".repeat(100_000);
    qmp.send(json!({"execute": "query-version", "id": id}).to_string().as_bytes());
    assert_eq!(qmp.read().unwrap()["id"], id);
    for monitor in ["io_uring", "epoll"] {
        let io3 = json!({"qom-type": "iothread", "id": "io3", "fd-monitor": monitor, "poll-policy": "off"});
        qmp.run("object-add", io3);
        set(&mut qmp, "io3", "poll-policy", json!("low-regret"));
        qmp.run("object-del", json!({"id": "io3"}));
    }
    scratch.image("d1", MIB);
    let mut d1 = json!({"driver": "file", "node-name": "d1", "filename": scratch.image_path("d1"), "aio": "threads"});
    qmp.run("blockdev-add", d1.clone());
    leave_a_socket(&scratch.path("e1"));
    let [ours, group] = [geteuid().as_raw(), getegid().as_raw()];
    let addr = json!({"type": "unix", "path": scratch.path("e1")});
    let export = json!({"type": "vhost-user-blk", "id": "e1", "node-name": "d1", "addr": addr, "writable": true,
                        "writethrough": true, "allow-inactive": true, "mode": "0660", "user": ours.to_string(), "group": group.to_string(),
                        "allow-uid": [ours]});
    // Another process makes sockets in the same directory, and is waited for.
    let directory = File::open(scratch.path("e1").parent().unwrap()).unwrap();
    flock(&directory, FlockOperation::LockExclusive).unwrap();
    qmp.run("block-export-add", export);
    drop(directory);
    use_disk(&mut Disk::connect(&scratch.path("e1")).unwrap());
    // While it is active.
    d1["cache"] = json!({"direct": true});
    qmp.run("blockdev-reopen", json!({"options": [d1]}));
    use_disk(&mut Disk::connect(&scratch.path("e1")).unwrap());
    qmp.run("block_resize", json!({"node-name": "d1", "size": 2 * MIB}));
    // A client that is cut off departs by itself.
    let mut client = Guest::boot(&scratch.path("e1"));
    client.read_honestly();
    client.wire.ask_inflight(1, 128).unwrap();
    qmp.run("block-export-del", json!({"id": "e1", "mode": "hard"}));
    qmp.event("BLOCK_EXPORT_DELETED");
    qmp.run("blockdev-del", json!({"node-name": "d1"}));
    use_a_device(&mut qmp, scratch);
    be_handed_descriptors(&mut qmp, scratch);
    use_nbd(&mut qmp, scratch);
    use_a_server(&mut qmp, scratch);
    // A path that begins where the daemon was started.
    qmp.run("blockdev-add", json!({"driver": "null-co", "node-name": "null1"}));
    qmp.run("egret-lun-add", json!({"id": "e-scsi", "lun": 1, "node-name": "null1", "pr-file": "pr1"}));
    assert!(scratch.path("pr1").exists());
    let elsewhere = json!({"driver": "file", "node-name": "d3", "filename": env!("CARGO_BIN_EXE_egret")});
    qmp.fail("blockdev-add", elsewhere);
    // Files that nothing has taken.
    let file = File::open(&image).unwrap();
    (0..2).for_each(|_| qmp.send_descriptors(&[file.as_fd(), file.as_fd()]));
    qmp.run("query-version", json!({}));
    // A client with a channel.
    let mut client = Wire::agree(&scratch.path("e0"), F_VERSION_1);
    let (channel, _other) = UnixStream::pair().unwrap();
    client.must(SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]);
    drop(client);
    // A file that is no eventfd, and may take its time to be closed.
    let client = Guest::boot(&scratch.path("e0"));
    let file = File::open(&image).unwrap();
    client.wire.send(SET_VRING_CALL, &0_u64.to_ne_bytes(), &[file.as_fd()]).unwrap();
    await_that("the session to end", || client.is_over());
    // A client that does not receive what it asks for.
    let client = Guest::boot(&scratch.path("e0"));
    let ask = || client.wire.send(GET_INFLIGHT_FD, &inflight(0, 0, 1, 128), &[]);
    await_that("the session to end", || ask().is_err());
    drop(client);
    // What each thread sleeps in goes on after a stop. The kernel has to be asked for that only where it was for a time, as
    // workers do that have had something to do a moment ago.
    use_disk(&mut Disk::connect(&scratch.path("e4")).unwrap());
    server.while_stopped(|| ());
    // A guest that takes its memory away.
    let mut guest = Guest::boot(&scratch.path("e0"));
    guest.read_honestly();
    guest.rings.file.set_len(0).unwrap();
    await_that("the queue or the session to end", || {
        guest.kick();
        guest.is_over()
    });
    drop(guest);
    // One that is there still when the daemon ends.
    let _stays = Guest::boot(&scratch.path("e0"));
    http::get(&scratch.path("metrics"), "/metrics").unwrap();
    // The watchdog asks the kernel about threads that have done nothing since it last looked.
    let looks = || server.sleeps().into_iter().find(|(name, _)| name == "egret-watchdog").unwrap().1;
    let before = looks();
    await_that("the watchdog to look", || looks() > before + 2 * LOOKS_A_SECOND);
    drop(qmp);
    assert_eq!(server.terminate().code(), Some(0));
}

/// A device of the host, where one can be made.
fn use_a_device(qmp: &mut Qmp, scratch: &Scratch) {
    if !is_root() {
        return;
    }
    let image = scratch.image("device", MIB);
    let device = LoopDevice::over(&image).unwrap();
    // Past the page cache workers make writes to devices stable by themselves.
    let d2 = json!({"driver": "host_device", "node-name": "d2", "filename": device.path(), "discard": "unmap",
                    "cache": {"direct": true}});
    qmp.run("blockdev-add", d2);
    let addr = json!({"type": "unix", "path": scratch.path("e2")});
    qmp.run(
        "block-export-add",
        json!({"type": "vhost-user-blk", "id": "e2", "node-name": "d2", "addr": addr, "writable": true,
               "writethrough": true, "allow-inactive": true}),
    );
    let mut disk = Disk::connect(&scratch.path("e2")).unwrap();
    disk.first().write(0, &[1; 4096]).unwrap();
    disk.first().discard(0..MIB / 2).unwrap();
    disk.first().write_zeroes(0..MIB / 2, ReqFlags::empty()).unwrap();
    // It is taken away.
    File::options().write(true).open(image).and_then(|file| file.set_len(0)).unwrap();
    device.take_size().unwrap();
    disk.first().write(0, &[1; 4096]).unwrap_err();
    drop(disk);
    qmp.run("block-export-del", json!({"id": "e2", "mode": "hard"}));
    qmp.event("BLOCK_EXPORT_DELETED");
    qmp.run("blockdev-del", json!({"node-name": "d2"}));
}

/// A disk that an NBD server has, at a UNIX socket, which dies meanwhile.
fn use_a_server(qmp: &mut Qmp, scratch: &Scratch) {
    let mut nbd = NbdServer::nbdkit(&scratch.path("nbd"), &["memory", "16M"]);
    let server = json!({"type": "unix", "path": scratch.path("nbd")});
    qmp.run(
        "blockdev-add",
        json!({"driver": "nbd", "node-name": "d5", "server": server, "reconnect-delay": 60, "discard": "unmap"}),
    );
    let addr = json!({"type": "unix", "path": scratch.path("e5")});
    qmp.run(
        "block-export-add",
        json!({"type": "vhost-user-blk", "id": "e5", "node-name": "d5", "addr": addr, "writable": true, "num-queues": 2,
               "iothread": ["io0", "io1"]}),
    );
    let two = support::disk::Client { queues: 2, ..Default::default() };
    let mut disk = Disk::connect_as(&scratch.path("e5"), two).unwrap();
    disk.queues.iter_mut().for_each(|queue| queue.write_pattern(0..MIB, 1).unwrap());
    nbd.kill();
    nbd.start_again();
    disk.queues.iter_mut().for_each(|queue| queue.write_pattern(0..MIB, 1).unwrap());
    drop(disk);
    qmp.run("block-export-del", json!({"id": "e5", "mode": "hard"}));
    qmp.event("BLOCK_EXPORT_DELETED");
    qmp.run("blockdev-del", json!({"node-name": "d5"}));
    // No port that the configuration did not name.
    let elsewhere = json!({"driver": "nbd", "node-name": "d6", "filename": "nbd://127.0.0.1:9"});
    let refused = qmp.fail("blockdev-add", elsewhere);
    assert!(refused.contains("Connection refused") || refused.contains("the sandbox lets egret connect"), "{refused}");
}

/// An image and a socket that somebody else opened.
fn be_handed_descriptors(qmp: &mut Qmp, scratch: &Scratch) {
    let image = File::options().read(true).write(true).open(scratch.image("d4", MIB)).unwrap();
    qmp.run_with("add-fd", json!({"fdset-id": 4}), &image);
    qmp.run(
        "blockdev-add",
        json!({"driver": "file", "node-name": "d4", "filename": "/dev/fdset/4", "cache": {"direct": true}}),
    );
    let listener = UnixListener::bind(scratch.path("e4")).unwrap();
    qmp.run_with("getfd", json!({"fdname": "socket"}), &listener);
    let addr = json!({"type": "fd", "str": "socket"});
    qmp.run(
        "block-export-add",
        json!({"type": "vhost-user-blk", "id": "e4", "node-name": "d4", "addr": addr, "writable": true}),
    );
    use_disk(&mut Disk::connect(&scratch.path("e4")).unwrap());
}

/// A client over NBD, on each monitor.
fn use_nbd(qmp: &mut Qmp, scratch: &Scratch) {
    let nbd = scratch.path("nbd");
    qmp.run("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": nbd}}}));
    let iothreads = ["io0", "io1", "io2"];
    qmp.run(
        "block-export-add",
        json!({"type": "nbd", "id": "e-nbd", "node-name": "d0", "name": "disk", "writable": true, "iothread": iothreads}),
    );
    for _ in iothreads {
        let mut client = NbdClient::connect(&nbd, "disk", Headers::Extended);
        client.write(0, &[1; 4096]);
        assert_eq!(client.read(0, 4096), [1; 4096]);
        client.call(0, command::BLOCK_STATUS, 0, MIB, &[]).unwrap();
    }
    qmp.run("nbd-server-stop", json!({}));
    qmp.event("BLOCK_EXPORT_DELETED");
}

/// A disk, and a monitor and NBD at TCP ports.
fn on_tcp(scratch: &Scratch, monitor: &Port, nbd: &Port) -> Options {
    let chardev = format!("socket,id=m,host=127.0.0.1,port={monitor},server=on,wait=off");
    let image = scratch.image("d0", MIB);
    let options = Options::new().iothread("io0", "").disk("d0", &image, "").export(
        "e0",
        "d0",
        &scratch.path("e0"),
        "iothread=io0,writable=on",
    );
    let server = format!("addr.type=inet,addr.host=127.0.0.1,addr.port={nbd}");
    let options = options.words(["--nbd-server", &server, "--export", "nbd,id=e-nbd,node-name=d0"]);
    options.words(["--chardev", &chardev, "--monitor", "m"])
}

/// What a daemon that was killed leaves behind.
fn leave_a_socket(path: &Path) {
    drop(UnixListener::bind(path).unwrap());
}

#[test]
fn every_rule_is_needed_and_none_is_missing() {
    if !has_or_skips("strace") || !has_servers_or_skips() {
        return;
    }
    let mut calls = Calls::default();
    let scratch = Scratch::new();
    let record = scratch.path("calls");
    let manager = UnixDatagram::bind(scratch.path("notify")).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let heard = std::thread::spawn(move || {
        let mut text = [0; 256];
        while !text.starts_with(b"FDSTORE=") {
            manager.recv(&mut text).unwrap();
        }
    });
    let place = scratch.path("notify").display().to_string();
    let program = Program::egret()
        .with_env("NOTIFY_SOCKET", &place)
        .with_env("FDSTORE", "16")
        .with_env("WATCHDOG_USEC", "1000000")
        .with_words(["--sandbox-dir", "/dev"]);
    let here = scratch.path("").display().to_string();
    live_fully(&scratch, &program.recorded(&record).after(["env", "-C", &here]));
    heard.join().unwrap();
    calls.add(&record);

    // Over TCP, and ended by a signal that is none of the handler's.
    let scratch = Scratch::new();
    let record = scratch.path("calls");
    let [metrics, monitor, nbd, exported] = [(); 4].map(|()| Port::new());
    let _servers = ["127.0.0.1", "::1"].map(|host| NbdServer::nbdkit_tcp(host, &nbd, &["memory", "1M"]));
    let nbd = |node: &str, host: &str| format!("nbd,node-name={node},filename=nbd://{host}:{nbd}");
    let options = on_tcp(&scratch, &monitor, &exported);
    let options = options.words(["--blockdev", &nbd("n4", "127.0.0.1"), "--blockdev", &nbd("n6", "[::1]")]);
    let options = options.words(["--metrics".to_owned(), format!("127.0.0.1:{metrics}")]);
    let mut server = Server::start(&Program::egret().recorded(&record), &options);
    // When it has greeted somebody it is as it will be.
    TcpStream::connect(("127.0.0.1", monitor.number())).unwrap().read_exact(&mut [0; 1]).unwrap();
    http::get_tcp(metrics.number(), "/metrics").unwrap();
    TcpStream::connect(("127.0.0.1", exported.number())).unwrap().read_exact(&mut [0; 18]).unwrap();
    Disk::connect(&scratch.path("e0")).unwrap();
    // Rust's own handler takes one away.
    await_that("the daemon to end", || {
        server.send(Signal::BUS);
        !server.is_alive()
    });
    assert_eq!(server.await_end().signal(), Some(Signal::BUS.as_raw()));
    calls.add(&record);

    let has_cluster = live_in_a_cluster(&mut calls);

    assert_eq!(
        calls.refused.iter().collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "nothing that the daemon does is refused"
    );
    let mut unused = calls.unused();
    unused.retain(|rule| has_cluster || !rule.starts_with("rbd: ") && !rule.ends_with("dup3 "));
    assert_eq!(unused, Vec::<String>::new(), "nothing is allowed that the daemon does not do");
}

/// Images in a cluster, of which one is encrypted, and one was locked by a daemon that was killed; false where there is no
/// Ceph.
fn live_in_a_cluster(calls: &mut Calls) -> bool {
    let Some(ceph) = Ceph::start() else { return false };
    let scratch = Scratch::new();
    let (conf, pass, record) = (ceph.conf(), scratch.path("pass"), scratch.path("calls"));
    std::fs::write(&pass, "open").unwrap();
    ceph.run("rbd create plain --size 16M");
    ceph.run("rbd create sealed --size 64M");
    ceph.run(&format!("rbd encryption format rbd/sealed luks2 {}", pass.display()));
    let disk = |node: &str, image: &str, more: &str| {
        let disk = format!("rbd,node-name={node},pool=rbd,image={image},conf={}{more}", conf.display());
        ["--blockdev".to_owned(), disk]
    };
    let options = Options::new()
        .iothread("io0", "")
        .words(["--object".to_owned(), format!("secret,id=pass,file={}", pass.display())])
        .words(disk("d0", "plain", ""))
        .words(disk("d1", "sealed", ",encrypt.format=luks2,encrypt.key-secret=pass"))
        .export("e0", "d0", &scratch.path("e0"), "writable=on,iothread=io0")
        .export("e1", "d1", &scratch.path("e1"), "writable=on,iothread=io0");
    drop(Server::start(&Program::egret(), &options));
    let server = Server::start(&Program::egret().recorded(&record), &options);
    for export in ["e0", "e1"] {
        use_disk(&mut Disk::connect(&scratch.path(export)).unwrap());
    }
    assert_eq!(server.terminate().code(), Some(0));
    calls.add(&record);
    true
}

#[test]
#[cfg(target_arch = "x86_64")]
fn whoever_takes_over_a_thread_of_a_daemon_that_serves_gets_nowhere_by_it() {
    let scratch = Scratch::new();
    let (server, mut qmp) = daemon(&scratch, &Program::egret());
    // A worker, too, which stays for a while.
    reopen(&mut qmp, &scratch.image_path("d0"), "threads", true);
    let mut disk = Disk::connect(&scratch.path("e0")).unwrap();
    use_disk(&mut disk);
    await_confined(&server);
    let mut attacked = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap() {
        let task = task.unwrap();
        // It may be one that had something to do once.
        let Ok(name) = std::fs::read_to_string(task.path().join("comm")) else { continue };
        let name = name.trim().to_owned();
        let mut puppet = match Puppet::take(task.file_name().to_str().unwrap().parse().unwrap()) {
            Ok(puppet) => puppet,
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => continue,
            // Where tracing is not for everybody (Yama).
            Err(e) => return egret_needs::this_test_lacks(format_args!("the right to trace its own processes: {e}")),
        };
        for (what, result) in attack(&mut puppet) {
            let refused = [libc::EPERM, libc::EACCES].map(|errno| -i64::from(errno)).contains(&result);
            assert!(refused, "thread '{name}': {what}: {result}");
        }
        attacked.push(name);
    }
    let threads =
        ["egret", "log", "io0", "io1", "io2", "disk-worker", "e0", "egret-metrics", "egret-changes", "egret-watchdog"];
    assert!(threads.iter().all(|name| attacked.iter().any(|attacked| attacked == name)), "{attacked:?}");
    // The two capabilities of control threads, and none of the others, if it is root's daemon.
    for status in server.each_thread("status") {
        let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
        let is_control = ["egret", "egret-changes"].contains(&line("Name:").as_str());
        let kept = if is_root() && is_control { "3" } else { "0" };
        assert_eq!(
            [line("CapPrm:"), line("CapEff:")].map(|set| set.trim_start_matches('0').to_owned()),
            [kept.trim_start_matches('0'); 2],
            "{status}"
        );
        assert_eq!((line("CapBnd:").trim_start_matches('0'), line("NoNewPrivs:").as_str()), ("", "1"), "{status}");
    }
    // And it serves as before.
    use_disk(&mut disk);
    drop(disk);
    assert_eq!(server.terminate().code(), Some(0));
}

/// Waits until each thread has its filter, and gives up what it has no use for before it has that.
fn await_confined(server: &Server) {
    await_that("each thread to be confined", || {
        server.each_thread("status").iter().all(|status| status.contains("\nSeccomp:\t2"))
    });
}

/// What somebody would try first.
#[cfg(target_arch = "x86_64")]
fn attack(puppet: &mut Puppet) -> Vec<(&'static str, i64)> {
    let here = libc::AT_FDCWD as u64;
    let [stream, run] = [libc::SOCK_STREAM, libc::PROT_READ | libc::PROT_EXEC].map(|flags| flags as u64);
    let anonymous = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let shadow = puppet.put("/etc/shadow");
    let reading = puppet.call(libc::SYS_openat, [here, shadow, libc::O_RDONLY as u64, 0, 0, 0]);
    // 127.0.0.1, and a port that no disk is at: a thread that starts those that connect may make a socket.
    let address = puppet.put("\u{2}\0\u{9}\u{9}\u{7f}\0\0\u{1}\0\0\0\0\0\0\0\0");
    let tcp = match puppet.call(libc::SYS_socket, [libc::AF_INET as u64, stream, 0, 0, 0, 0]) {
        refused @ ..0 => refused,
        socket => puppet.call(libc::SYS_connect, [socket as u64, address, 16, 0, 0, 0]),
    };
    let program = puppet.put("/bin/true");
    let mut call = |number, arguments| puppet.call(number, arguments);
    vec![
        ("open", reading),
        ("open for writing", call(libc::SYS_openat, [here, program, libc::O_WRONLY as u64, 0, 0, 0])),
        ("connection over TCP", tcp),
        ("execve", call(libc::SYS_execve, [program, 0, 0, 0, 0, 0])),
        ("ptrace", call(libc::SYS_ptrace, [libc::PTRACE_SEIZE.into(), 1, 0, 0, 0, 0])),
        ("process_vm_readv", call(libc::SYS_process_vm_readv, [1, 0, 0, 0, 0, 0])),
        ("a process", call(libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0, 0, 0])),
        ("memory that runs", call(libc::SYS_mmap, [0, 4096, run, anonymous, u64::MAX, 0])),
        ("a signal to another process", call(libc::SYS_kill, [1, 0, 0, 0, 0, 0])),
    ]
}

#[test]
fn what_a_monitor_names_elsewhere_is_refused_with_the_option_that_would_allow_it() {
    let scratch = Scratch::new();
    let elsewhere = Scratch::new();
    let file = |node: &str, image: &Path| json!({"driver": "file", "node-name": node, "filename": image});
    let export = |node: &str, socket: &Path| json!({"type": "vhost-user-blk", "id": node, "node-name": node, "addr": {"type": "unix", "path": socket}});
    let others = [elsewhere.image("other", MIB), elsewhere.path("other")];
    let [certificate, key] = ["ca-cert.pem", "key"].map(|name| elsewhere.image(name, 1));
    let dirs = others.each_ref().map(|path| path.parent().unwrap().to_str().unwrap());
    let options = Options::new().disk("d0", &scratch.image("d0", MIB), "").monitor("m", &scratch.path("qmp"));
    let run = |program: Program| {
        let server = Server::start(&program, &options);
        let mut qmp = Qmp::connect(&scratch.path("qmp"));
        let disk = qmp.try_run("blockdev-add", file("d1", &others[0]));
        let socket = qmp.try_run("block-export-add", export("d0", &others[1]));
        let credentials = json!({"qom-type": "tls-creds-x509", "id": "t0", "dir": dirs[0]});
        let credentials = qmp.fail("object-add", credentials);
        let secret = qmp.try_run("object-add", json!({"qom-type": "secret", "id": "s0", "file": key}));
        // What every daemon may read is within reach, whatever else is wrong with it.
        let read = json!({"qom-type": "secret", "id": "s1", "file": "/etc/passwd", "format": "base64"});
        let read = qmp.fail("object-add", read);
        assert!(!read.contains("the sandbox"), "{read}");
        // Beside its own there is room for more.
        qmp.run("blockdev-add", file("d2", &scratch.image("d2", MIB)));
        qmp.run("block-export-add", export("d2", &scratch.path("d2")));
        qmp.run("block-export-del", json!({"id": "d2"}));
        assert_eq!(server.terminate().code(), Some(0));
        ([disk, socket, secret], credentials)
    };
    let refusal = |dir: &str| format!("the sandbox keeps '{dir}' out of reach; start egret with --sandbox-dir {dir}");
    let (refused, credentials) = run(Program::egret_alone());
    let [disk, socket, secret] = refused.map(Result::unwrap_err);
    let of_no_use = format!("tls-creds-x509 't0': '{}'", certificate.display());
    assert_eq!(credentials, format!("{of_no_use}: {}", refusal(dirs[0])));
    assert_eq!(secret, format!("secret 's0': '{}': {}", key.display(), refusal(dirs[0])));
    assert_eq!(disk, format!("blockdev 'd1': cannot open '{}': {}", others[0].display(), refusal(dirs[0])));
    assert_eq!(socket, format!("export 'd0': cannot listen on socket '{}': {}", others[1].display(), refusal(dirs[1])));
    for words in [vec!["--sandbox-dir", dirs[0], "--sandbox-dir", dirs[1]], vec!["--sandbox=off"]] {
        let (done, credentials) = run(Program::egret_alone().with_words(words));
        done.into_iter().for_each(|done| drop(done.unwrap()));
        assert_eq!(credentials, format!("{of_no_use} holds no certificate in PEM"), "it was read");
    }
    assert!(elsewhere.left_behind().is_empty(), "sockets are removed wherever they were made");
}

#[test]
fn a_link_on_the_command_line_leads_to_a_file_that_is_within_reach() {
    let (scratch, elsewhere) = (Scratch::new(), Scratch::new());
    let waits = elsewhere.image("waits", 0);
    let [pr_link, waits_link] = ["pr", "waits"].map(|name| scratch.path(name));
    // It is there when a link leads to it.
    for pr_file in [elsewhere.path("pr"), pr_link.clone()] {
        let unit = format!("luns.0.lun=0,luns.0.node-name=d0,luns.0.pr-file={}", pr_file.display());
        let mut options = Options::new()
            .iothread("io0", "")
            .null("d0", "")
            .export_scsi("e0", &scratch.path("e0"), &format!("{unit},iothread=io0"))
            .words(["--record-waits", waits_link.to_str().unwrap()]);
        if pr_file == pr_link {
            std::os::unix::fs::symlink(elsewhere.path("pr"), &pr_link).unwrap();
            std::fs::remove_file(&waits_link).unwrap();
            std::os::unix::fs::symlink(&waits, &waits_link).unwrap();
        }
        for threads in ["io0", "io0 and io1"] {
            if threads != "io0" {
                options = options.iothread("io1", "");
            }
            let server = Server::start(&Program::egret_alone(), &options);
            assert_eq!(server.terminate().code(), Some(0), "{threads}");
        }
    }
    // Those of several are beside the link.
    assert!(["waits.io0", "waits.io1"].iter().all(|name| scratch.path(name).exists()));
    assert!(std::fs::metadata(waits).unwrap().len() > 1, "what was recorded is there");
    assert!(std::fs::symlink_metadata(pr_link).unwrap().is_symlink(), "it leads there still");
}

/// A user and a group that need not exist.
const SOMEBODY: &str = "54321";

#[test]
fn a_daemon_that_gives_up_root_goes_on_with_what_is_open_and_leaves_nothing_behind() {
    if !is_root_or_skips("to give it up") {
        return;
    }
    for sandbox in ["--sandbox=on", "--sandbox=off"] {
        let scratch = Scratch::new();
        let somebody = Some(SOMEBODY.parse().unwrap());
        let directory = scratch.path("x").parent().unwrap().to_owned();
        std::os::unix::fs::chown(&directory, somebody, somebody).unwrap();
        let [image, pidfile] = [scratch.image("d0", MIB), scratch.path("pid")];
        std::fs::set_permissions(&image, Permissions::from_mode(0o600)).unwrap();
        let program = Program::egret_alone().with_words([sandbox, "--user", SOMEBODY, "--group", SOMEBODY]);
        let options = Options::new()
            .disk("d0", &image, "aio=threads")
            .export("e0", "d0", &scratch.path("e0"), "writable=on")
            .monitor("m", &scratch.path("qmp"))
            .words(["--pidfile", pidfile.to_str().unwrap()]);
        let server = Server::start(&program, &options);
        // It is somebody else before it hears of anybody.
        let mut qmp = Qmp::connect(&scratch.path("qmp"));
        qmp.run("query-version", json!({}));
        use_disk(&mut Disk::connect(&scratch.path("e0")).unwrap());
        if sandbox == "--sandbox=on" {
            await_confined(&server);
        }
        for status in server.each_thread("status") {
            let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned();
            let ids = [SOMEBODY; 4].join("\t");
            assert_eq!([line("Uid:"), line("Gid:")], [ids.clone(), ids], "{status}");
            assert_eq!(line("Groups:"), SOMEBODY);
            for rights in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
                assert_eq!(line(rights), "0".repeat(16), "{rights} {status}");
            }
            assert_eq!(line("NoNewPrivs:"), "1");
        }
        for made in [scratch.path("e0"), scratch.path("qmp"), pidfile] {
            assert_eq!(Some(std::fs::symlink_metadata(&made).unwrap().uid()), somebody, "{}", made.display());
        }
        // What is root's own is nothing to it any more.
        let again = json!({"driver": "file", "node-name": "d1", "filename": image});
        let refused = qmp.fail("blockdev-add", again);
        assert!(refused.contains("no permission to open"), "{refused}");
        drop(qmp);
        assert_eq!(server.terminate().code(), Some(0));
        assert_eq!(scratch.left_behind(), Vec::<String>::new());
    }
}

#[test]
fn a_service_manager_whose_socket_has_no_file_is_told_all_that_there_is_to_tell() {
    let scratch = Scratch::new();
    let name = format!("egret-manager-{}", std::process::id());
    let manager = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let hears = |what: &[u8]| {
        let mut text = [0; 256];
        while !text.starts_with(what) {
            manager.recv(&mut text).unwrap();
        }
    };
    let program = Program::egret().with_env("NOTIFY_SOCKET", &format!("@{name}")).with_env("WATCHDOG_USEC", "1000000");
    let options = Options::new().null("d0", "").export("e0", "d0", &scratch.path("e0"), "");
    let mut server = Server::start(&program, &options);
    hears(b"READY=1");
    await_confined(&server);
    // As the watchdog and as the main thread are by now.
    (0..2).for_each(|_| hears(b"WATCHDOG=1"));
    server.ask_to_end();
    hears(b"STOPPING=1");
    assert_eq!((server.await_end().code(), server.complaints()), (Some(0), Vec::new()));
}

#[test]
fn what_is_served_over_tcp_listens_on_localhost_by_its_name() {
    let ports = [(); 3].map(|()| Port::new());
    let [monitor, metrics, nbd] = &ports;
    let options = Options::new().words([
        format!("--chardev=socket,id=m,host=localhost,port={monitor},server=on,wait=off"),
        "--monitor=m".to_owned(),
        format!("--metrics=localhost:{metrics}"),
        format!("--nbd-server=addr.type=inet,addr.host=localhost,addr.port={nbd}"),
    ]);
    let mut server = Server::start(&Program::egret(), &options);
    for port in ports {
        await_some("the daemon to listen", || {
            assert!(server.is_alive(), "{:?}", server.log());
            TcpStream::connect(("127.0.0.1", port.number())).ok()
        });
    }
}
