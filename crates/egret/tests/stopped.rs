//! Exports that wait where others tell their guest of an error (`rerror`, `werror`): nothing is lost, nothing fails, and
//! whatever is done to the export meanwhile is done.

mod support;

use std::fs;
use std::io::{ErrorKind, Read as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use egret_faultdisk::{Effect, ErrnoName, Fault, IoType, Order, Survivors};
use egret_lab::disks::LoopDevice;
use egret_loadgen::client::{Client, ClientOptions};
use egret_loadgen::load::{self, Span, Spec};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use support::disk::Disk;
use support::http::get;
use support::qmp::Qmp;
use support::scratch::{Scratch, is_root_or_skips};
use support::server::{Options, Program, Server};
use support::small::SmallFileSystem;
use support::{Finished, await_that};

const MIB: u64 = 1 << 20;
/// Where files end for [`Program::egret_with_small_files`], at most.
const BEYOND: u64 = 4 * MIB;

/// Lets a daemon that was to have small files have large ones.
fn allow_large_files(server: &Server) {
    let pid = Pid::from_raw(server.pid() as i32);
    prlimit(pid, Resource::Fsize, Rlimit { current: None, maximum: None }).expect("what the test limited");
}

fn io_status(qmp: &mut Qmp) -> Value {
    qmp.run("query-block-exports", json!({}))[0]["io-status"].take()
}

fn resume(qmp: &mut Qmp) {
    qmp.run("block-export-resume", json!({"id": "e0"}));
}

/// The value of a metric that has one sample.
fn metric(socket: &Path, name: &str) -> f64 {
    let (_, page) = get(socket, "/metrics").expect("metrics");
    let line = page.lines().find(|line| line.starts_with(name)).expect("the metric");
    line.rsplit_once(' ').expect("a value").1.parse().expect("a number")
}

#[test]
fn a_write_that_fails_waits_with_all_that_comes_after_it_until_the_export_is_resumed() {
    for aio in ["threads", "io_uring"] {
        let scratch = Scratch::new();
        let (monitor, socket, metrics) = (scratch.path("qmp"), scratch.path("disk"), scratch.path("metrics"));
        let options = Options::new()
            .monitor("m", &monitor)
            .metrics(&metrics)
            .disk("d0", &scratch.image("disk", 16 * MIB), &format!("aio={aio}"))
            .export("e0", "d0", &socket, "writable=on,werror=stop");
        let server = Server::start(&Program::egret_with_small_files(), &options);
        let mut qmp = Qmp::connect(&monitor);
        let mut disk = Disk::connect(&socket).unwrap();
        disk.first().write(0, &[1; 4096]).unwrap();
        assert_eq!(io_status(&mut qmp), "ok");

        std::thread::scope(|scope| {
            let client = scope.spawn(|| {
                disk.first().write_pattern(BEYOND..BEYOND + 2 * MIB, 5).unwrap();
                disk.first().flush().unwrap();
                disk.first().verify_pattern(BEYOND..BEYOND + 2 * MIB, 5).unwrap();
                disk.first().read(0, 4096).unwrap()
            });
            let told = json!({
                "device": "e0", "node-name": "d0", "qom-path": "", "operation": "write", "action": "stop",
                "nospace": false, "reason": "File too large",
            });
            for stops in 1..=2 {
                assert_eq!(qmp.event("BLOCK_IO_ERROR"), told, "{aio}");
                assert_eq!(io_status(&mut qmp), "failed");
                await_that("all that is in flight to wait", || metric(&metrics, "egret_export_waiting{") == 16.0);
                assert_eq!(metric(&metrics, "egret_export_stopped{"), 1.0);
                assert_eq!(metric(&metrics, "egret_export_stops_total{"), f64::from(stops));
                assert!(!client.is_finished());
                if stops == 2 {
                    allow_large_files(&server);
                }
                // The first time it fails again.
                resume(&mut qmp);
            }
            assert_eq!(client.join().unwrap(), [1; 4096]);
        });
        assert_eq!(io_status(&mut qmp), "ok");
        assert_eq!((metric(&metrics, "egret_export_waiting{"), metric(&metrics, "egret_export_stopped{")), (0.0, 0.0));
        let stats = qmp.run("query-blockstats", json!({}));
        assert_eq!(stats[0]["stats"]["failed_wr_operations"], 0, "{aio}");
        // What is not stopped goes on as it was.
        resume(&mut qmp);
        assert!(qmp.fail("block-export-resume", json!({"id": "e1"})).contains("'e1'"));
        await_that("both to be told", || server.complaints().len() >= 2);
        assert_eq!(server.complaints().len(), 2, "{:?}", server.complaints());
        assert!(server.complaints()[0].ends_with("; export 'e0' waits for block-export-resume"));
    }
}

#[test]
fn what_is_to_be_ignored_or_is_no_lack_of_space_is_told_and_does_not_wait() {
    let scratch = Scratch::new();
    let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
    for (werror, action) in [("ignore", "ignore"), ("enospc", "report"), ("report", "report")] {
        let options = Options::new().monitor("m", &monitor).disk("d0", &scratch.image("disk", 16 * MIB), "").export(
            "e0",
            "d0",
            &socket,
            &format!("writable=on,rerror=stop,werror={werror}"),
        );
        let _server = Server::start(&Program::egret_with_small_files(), &options);
        let mut qmp = Qmp::connect(&monitor);
        let mut disk = Disk::connect(&socket).unwrap();
        assert_eq!(disk.first().write(BEYOND, &[1; 4096]).is_ok(), action == "ignore");
        let told = qmp.event("BLOCK_IO_ERROR");
        assert_eq!((&told["action"], &told["nospace"]), (&json!(action), &json!(false)));
        assert_eq!(io_status(&mut qmp), "ok");
        disk.first().read(BEYOND, 4096).unwrap();
    }
}

/// Runs `act` while clients write all over the disk at `socket`, on so many queues, and then has them find what they wrote.
/// None of their requests may fail.
fn under_load(socket: &Path, queues: u16, act: impl FnOnce()) {
    let rw = "randrw".parse().unwrap();
    let spec = Spec { rw, iodepth: 16, numjobs: queues, verify: Some(7), ..Spec::default() };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let client = Client::connect(socket, ClientOptions::default()).unwrap();
            let mut jobs = spec.jobs(client.start(spec.shape()).unwrap()).unwrap();
            // Nothing ends while the export is stopped.
            jobs.iter_mut().for_each(|job| job.set_patience(2 * support::PATIENCE));
            let span = Span { ramp: Duration::ZERO, length: Duration::from_millis(20) };
            while !done.load(Ordering::Relaxed) {
                load::run(&mut jobs, span, &mut |_| ()).expect("no request fails, none comes back wrong");
            }
            jobs.iter_mut().map(|job| job.verify().expect("what was written is there")).sum::<u64>()
        });
        let finished = Finished(&done);
        act();
        drop(finished);
        assert!(load.join().expect("the load is content") > 0);
    });
}

#[test]
fn a_thin_image_on_a_full_file_system_waits_under_load_and_goes_on_by_itself_when_space_is_freed() {
    if !is_root_or_skips("for a file system that is full") {
        return;
    }
    for (aio, werror) in [("threads", "enospc"), ("io_uring", "stop"), ("native,cache.direct=on", "enospc")] {
        let scratch = Scratch::new();
        let small = SmallFileSystem::mount(&scratch, 12 * MIB);
        let image = small.path().join("thin");
        fs::File::create(&image).and_then(|file| file.set_len(8 * MIB)).unwrap();
        let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
        let options = Options::new()
            .monitor("m", &monitor)
            .iothread("io0", "")
            .iothread("io1", "")
            .disk("d0", &image, &format!("aio={aio}"))
            .export("e0", "d0", &socket, &format!("writable=on,num-queues=2,iothread=io0,werror={werror}"));
        let server = Server::start(&Program::egret(), &options);
        let mut qmp = Qmp::connect(&monitor);
        let ballast = small.fill(7 * MIB);
        under_load(&socket, 2, || {
            let told = qmp.event("BLOCK_IO_ERROR");
            assert_eq!((&told["action"], &told["nospace"]), (&json!("stop"), &json!(true)), "{aio}");
            assert_eq!(io_status(&mut qmp), "nospace");
            // Whatever is done to it meanwhile is done, though nothing of it ends.
            let reopened = json!({"driver": "file", "node-name": "d0", "filename": image, "aio": "threads"});
            qmp.run("egret-map-queues", json!({"id": "e0", "iothread": ["io0", "io1"]}));
            qmp.run("blockdev-reopen", json!({"options": [reopened]}));
            qmp.run("block_resize", json!({"node-name": "d0", "size": 8 * MIB + 4096}));
            qmp.run("egret-map-queues", json!({"id": "e0", "iothread": "io1"}));
            assert_eq!(io_status(&mut qmp), "nospace");
            // It tries by itself, and finds nothing yet.
            let tried = |qmp: &mut Qmp| {
                qmp.run("egret-query-stats", json!({}))["iothreads"][1]["engines"][0]["requests"].take()
            };
            let before = tried(&mut qmp);
            await_that("a try", || tried(&mut qmp) != before);
            assert_eq!(io_status(&mut qmp), "nospace");
            fs::remove_file(&ballast).unwrap();
            await_that("space to be found", || io_status(&mut qmp) == "ok");
        });
        let stats = qmp.run("query-blockstats", json!({}));
        assert_eq!(stats[0]["stats"]["failed_wr_operations"], 0, "{aio}");
        assert!(server.terminate().success());
    }
}

#[test]
fn a_flush_that_lost_writes_waits_until_its_disk_is_reopened_and_nothing_else_lets_it_go_on() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let scratch = Scratch::new();
    let faulty = scratch.fault_disk(MIB);
    let device = LoopDevice::over(&faulty.path()).unwrap();
    let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
    let options = Options::new().monitor("m", &monitor).disk("d0", device.path(), "cache.direct=off").export(
        "e0",
        "d0",
        &socket,
        "writable=on,werror=stop",
    );
    let _server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&monitor);
    let mut disk = Disk::connect(&socket).unwrap();
    disk.first().write(0, &[1; 4096]).unwrap();
    faulty.inject(IoType::Flush, Some(1), Effect::Errno(ErrnoName::Eio));
    std::thread::scope(|scope| {
        let client = scope.spawn(|| disk.first().flush().unwrap());
        // The second time for what the first has lost: the disk itself is well.
        for _ in 0..2 {
            let told = qmp.event("BLOCK_IO_ERROR");
            assert_eq!((&told["action"], &told["operation"]), (&json!("stop"), &json!("write")));
            assert!(told["reason"].as_str().unwrap().contains("no flush succeeds before blockdev-reopen"), "{told}");
            resume(&mut qmp);
        }
        qmp.event("BLOCK_IO_ERROR");
        let node = json!({"driver": "host_device", "node-name": "d0", "filename": device.path()});
        qmp.run("blockdev-reopen", json!({"options": [node]}));
        assert!(!client.is_finished());
        resume(&mut qmp);
        client.join().unwrap();
    });
}

#[test]
fn a_request_that_fails_while_its_disk_is_reopened_is_told_of_like_others() {
    if !is_root_or_skips("for a disk that hangs") {
        return;
    }
    let scratch = Scratch::new();
    let faulty = scratch.fault_disk(MIB);
    let [monitor, socket] = ["qmp", "disk"].map(|name| scratch.path(name));
    let options = Options::new().monitor("m", &monitor).disk("d0", &faulty.path(), "aio=threads").export(
        "e0",
        "d0",
        &socket,
        "writable=on,werror=stop",
    );
    let server = Server::start(&Program::egret(), &options);
    let (mut qmp, mut changes) = (Qmp::connect(&monitor), Qmp::connect(&monitor));
    faulty.inject(IoType::Write, Some(1), Effect::Never);
    let mut disk = Disk::connect(&socket).unwrap();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| disk.first().write(0, &[1; 4096]).unwrap());
        // Not in the daemon alone: it would fail with the power, and hang when it is tried again.
        await_that("the disk to have the write", || faulty.tell(Order::Status).unwrap().waiting == 1);
        let descriptors = format!("/proc/{}/fd", server.pid());
        let times_open = || {
            let links = fs::read_dir(&descriptors).unwrap().flatten().map(|one| fs::read_link(one.path()));
            links.flatten().filter(|target| *target == faulty.path()).count()
        };
        let node = json!({"driver": "file", "node-name": "d0", "filename": faulty.path(), "discard": "unmap"});
        let options = json!({"options": [node]});
        // It waits for the write, though not for ever.
        let reopen = scope.spawn(move || {
            await_that("the image to be reopened", || changes.try_run("blockdev-reopen", options.clone()).is_ok());
        });
        await_that("the image to be open once more", || times_open() == 2);
        faulty.tell(Order::PowerOff).unwrap();
        reopen.join().unwrap();
        assert_eq!(qmp.event("BLOCK_IO_ERROR")["action"], "stop");
        faulty.tell(Order::PowerOn(Survivors::All)).unwrap();
        resume(&mut qmp);
        client.join().unwrap();
    });
}

#[test]
fn what_fails_is_told_and_exports_are_resumed_while_a_change_of_something_else_does_not_end() {
    let scratch = Scratch::new();
    let [monitor, socket, slow, nowhere] = ["qmp", "disk", "slow", "nbd"].map(|name| scratch.path(name));
    let options = Options::new()
        .monitor("m", &monitor)
        .disk("d0", &scratch.image("disk", 16 * MIB), "")
        .words(["--blockdev", "driver=null-co,node-name=d1,size=1M,latency-ns=1000000000000"])
        .export("e0", "d0", &socket, "writable=on,werror=stop")
        .export("e1", "d1", &slow, "writable=on,request-timeout=1");
    let server = Server::start(&Program::egret_with_small_files(), &options);
    let (mut qmp, mut changes) = (Qmp::connect(&monitor), Qmp::connect(&monitor));
    // A server of NBD that lets its clients in, and says nothing.
    let silent = UnixListener::bind(&nowhere).unwrap();
    let node = json!({"driver": "nbd", "node-name": "d2", "server": {"type": "unix", "path": nowhere},
                      "open-timeout": 3600});
    changes.send(json!({"execute": "blockdev-add", "arguments": node}).to_string().as_bytes());
    let _let_in = silent.accept().unwrap();
    std::thread::scope(|scope| {
        let (mut disk, mut hung) = (Disk::connect(&socket).unwrap(), Disk::connect(&slow).unwrap());
        // Nobody waits for it.
        std::thread::spawn(move || hung.first().read(0, 4096));
        let client = scope.spawn(move || disk.first().write(BEYOND, &[1; 4096]).unwrap());
        assert_eq!(qmp.event("BLOCK_IO_ERROR")["action"], "stop");
        assert_eq!(qmp.event("EGRET_REQUEST_TIMEOUT")["id"], "e1");
        allow_large_files(&server);
        resume(&mut qmp);
        client.join().unwrap();
        assert!(qmp.fail("block-export-resume", json!({"id": "e2"})).contains("'e2'"));
        changes.stream().set_nonblocking(true).unwrap();
        let mut said = Vec::new();
        assert_eq!(changes.stream().read_to_end(&mut said).unwrap_err().kind(), ErrorKind::WouldBlock);
        let said = String::from_utf8(said).unwrap();
        assert!(!said.contains("\"return\"") && !said.contains("\"error\""), "it is in work still: {said}");
        drop(server);
    });
}

#[test]
fn a_disk_that_hangs_with_what_is_read_of_it_to_be_opened_fails_that_change_alone_and_is_opened_when_it_is_well() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let scratch = Scratch::new();
    let faulty = scratch.fault_disk(8 * MIB);
    let [monitor, socket] = ["qmp", "disk"].map(|name| scratch.path(name));
    let options = Options::new()
        .monitor("m", &monitor)
        .disk("d0", &faulty.path(), "aio=threads,cache.direct=on")
        .disk("d1", &scratch.image("other", 8 * MIB), "")
        .export("e0", "d0", &socket, "writable=on,werror=stop,rerror=stop");
    let server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&monitor);
    let mut disk = Disk::connect(&socket).unwrap();
    disk.first().write_pattern(0..MIB, 5).unwrap();
    faulty.inject(IoType::Read, None, Effect::Never);

    let node = |name: &str, discard: &str| {
        json!({"driver": "file", "node-name": name, "filename": faulty.path(), "aio": "threads", "discard": discard,
               "cache": {"direct": true}})
    };
    let reopening = json!({"options": [node("d0", "unmap")]});
    let said = format!("'{}' does not answer: it could not be opened in 5 s", faulty.path().display());
    for _ in 0..2 {
        let failed = qmp.fail("blockdev-reopen", reopening.clone());
        assert!(failed.starts_with("blockdev 'd0': ") && failed.contains(&said), "{failed}");
    }
    let failed = qmp.fail("blockdev-add", node("d2", "ignore"));
    assert!(failed.starts_with("blockdev 'd2': ") && failed.contains(&said), "{failed}");
    // Others are changed as ever, and what needs no reading is done.
    let other =
        json!({"driver": "file", "node-name": "d1", "filename": scratch.image_path("other"), "discard": "unmap"});
    qmp.run("blockdev-reopen", json!({"options": [other]}));
    disk.first().write_pattern(MIB..2 * MIB, 5).unwrap();

    faulty.tell(Order::Clear).unwrap();
    faulty.tell(Order::Release).unwrap();
    qmp.run("blockdev-reopen", reopening);
    qmp.run("blockdev-add", node("d2", "ignore"));
    qmp.run("blockdev-del", json!({"node-name": "d2"}));
    disk.first().verify_pattern(0..2 * MIB, 5).unwrap();
    assert!(server.complaints().is_empty(), "{:?}", server.complaints());
    assert!(server.terminate().success());
}

#[test]
fn a_disk_that_hangs_is_neither_closed_nor_resized_and_others_are_until_it_is_well() {
    if !is_root_or_skips("for a disk that hangs") {
        return;
    }
    let scratch = Scratch::new();
    let (faulty, monitor) = (scratch.fault_disk(8 * MIB), scratch.path("qmp"));
    let reach = monitor.parent().unwrap().display();
    let options = Options::new().monitor("m", &monitor).words([format!("--sandbox-dir={reach}")]);
    let server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&monitor);
    let node = |name: &str, path: &Path| json!({"driver": "file", "node-name": name, "filename": path, "aio": "threads", "auto-read-only": false});
    qmp.run("blockdev-add", node("d0", &faulty.path()));
    faulty.inject(IoType::Flush, None, Effect::Never);
    let closing = json!({"node-name": "d0"});
    for (command, arguments, failed) in [
        ("blockdev-del", closing.clone(), "what was written could not be made stable"),
        // Whoever has it made stable has the file to himself.
        ("block_resize", json!({"node-name": "d0", "size": 16 * MIB}), "it could not be resized"),
    ] {
        let error = qmp.fail(command, arguments);
        let path = faulty.path().display().to_string();
        let expected =
            format!("blockdev 'd0': '{path}' does not answer: {failed} in 5 s; try again when its disk is well");
        assert_eq!(error, expected);
    }
    qmp.run("blockdev-add", node("d1", &scratch.image("other", MIB)));
    qmp.run("block_resize", json!({"node-name": "d1", "size": 2 * MIB}));
    qmp.run("blockdev-del", json!({"node-name": "d1"}));
    faulty.tell(Order::Clear).unwrap();
    faulty.tell(Order::Release).unwrap();
    qmp.run("blockdev-del", closing);
    assert!(server.complaints().is_empty(), "{:?}", server.complaints());
    assert!(server.terminate().success());
}

#[test]
fn a_disk_that_hangs_and_then_fails_is_told_of_and_comes_back_while_its_guest_waits_and_others_are_served() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    // They wait most of the time.
    std::thread::scope(|scope| {
        for aio in ["threads", "io_uring", "native"] {
            scope.spawn(move || hangs_fails_and_comes_back(aio));
        }
    });
}

fn hangs_fails_and_comes_back(aio: &str) {
    let scratch = Scratch::new();
    let faulty = scratch.fault_disk(8 * MIB);
    let [monitor, metrics, hung, other] = ["qmp", "metrics", "hung", "other"].map(|name| scratch.path(name));
    let options = Options::new()
        .monitor("m", &monitor)
        .metrics(&metrics)
        .iothread("io0", "")
        .disk("d0", &faulty.path(), &format!("aio={aio},cache.direct=on"))
        .disk("d1", &scratch.image("other", 8 * MIB), &format!("aio={aio},cache.direct=on"))
        .export("e0", "d0", &hung, "writable=on,iothread=io0,werror=stop,rerror=stop,request-timeout=1")
        .export("e1", "d1", &other, "writable=on,iothread=io0,request-timeout=1");
    let server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&monitor);
    let never = Fault { iotype: Some(IoType::Write), sectors: None, after: 100, times: None, effect: Effect::Never };
    faulty.tell(Order::Inject(never)).unwrap();
    let overdue = || metric(&metrics, "egret_export_overdue{export=\"e0\"");
    let mut disk = Disk::connect(&hung).unwrap();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            disk.first().write_pattern(0..8 * MIB, 4).unwrap();
            disk.first().flush().unwrap();
            disk.first().verify_pattern(0..8 * MIB, 4).unwrap();
        });
        let told = qmp.event("EGRET_REQUEST_TIMEOUT");
        assert_eq!(told["id"], "e0");
        assert!(told["seconds"].as_f64() >= Some(1.0) && told["requests"].as_u64() > Some(0), "{told}");
        await_that("all in flight to be overdue", || overdue() == 16.0);

        // Whatever is about others goes on, and what is about this one says that it waits, and changes nothing.
        let mut beside = Disk::connect(&other).unwrap();
        beside.first().write_pattern(0..8 * MIB, 3).unwrap();
        let node = |direct: bool| {
            let aio = if direct { aio } else { "threads" };
            json!({"options": [{"driver": "file", "node-name": "d0", "filename": faulty.path(), "aio": aio,
                                "cache": {"direct": direct}}]})
        };
        let image = scratch.image_path("other");
        let reopened = json!({"driver": "file", "node-name": "d1", "filename": image, "aio": "threads"});
        qmp.run("blockdev-reopen", json!({"options": [reopened]}));
        qmp.run("block_resize", json!({"node-name": "d1", "size": 16 * MIB}));
        qmp.run("qom-set", json!({"path": "io0", "property": "poll-max-ns", "value": 1000}));
        assert!(qmp.fail("blockdev-reopen", node(false)).contains("requests in flight have not ended in 5 s"));
        beside.first().verify_pattern(0..8 * MIB, 3).unwrap();
        assert_eq!(io_status(&mut qmp), "ok");

        // They end as the path is given up, and wait for it here.
        faulty.tell(Order::Clear).unwrap();
        faulty.tell(Order::PowerOff).unwrap();
        assert_eq!(qmp.event("BLOCK_IO_ERROR")["action"], "stop");
        await_that("none to be overdue", || overdue() == 0.0);
        faulty.tell(Order::PowerOn(Survivors::All)).unwrap();
        qmp.run("blockdev-reopen", node(true));
        assert_eq!(io_status(&mut qmp), "failed");
        resume(&mut qmp);
        client.join().expect("no request fails, none comes back wrong");
    });
    assert_eq!(io_status(&mut qmp), "ok");
    let said = server.complaints();
    let told =
        said.iter().filter(|line| line.contains("export 'e0': ") && line.contains("requests do not end")).count();
    // Once for the 16 of them; and once each time that this machine takes so long for what has nothing to wait for.
    assert!((1..8).contains(&told), "{said:?}");
    assert!(server.terminate().success());
}
