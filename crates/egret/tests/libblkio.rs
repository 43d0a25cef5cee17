//! The daemon as libblkio sees it: every engine under every monitor, and how sessions and processes begin and end.

mod support;

use std::fs;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use blkio::ReqFlags;
use egret_lab::disks::LoopDevice;
use egret_vocabulary::schema::{Aio, MonitorChoice, words};
use serde_json::json;

use support::await_that;
use support::disk::{Client, Disk, pattern};
use support::guest::{BUFFER_AT, DATA, Guest, HEADER_AT, NEXT, REGION, STATUS_AT, Share, WRITE};
use support::qmp::Qmp;
use support::scratch::{Scratch, is_root_or_skips};
use support::server::{Options, Program, Server};
use support::wire::{ADD_MEM_REG, u32s};

const MIB: u64 = 1 << 20;

/// The engines of an image, by their words.
fn engines() -> Vec<&'static str> {
    words::<Aio>()
}

/// What makes an I/O thread use each monitor; a peer has no choice to give.
fn monitors() -> Vec<String> {
    if Program::under_test().is_egret() {
        words::<MonitorChoice>().iter().map(|word| format!("fd-monitor={word}")).collect()
    } else {
        vec![String::new()]
    }
}

fn direct(engine: &str) -> String {
    format!("cache.direct=on,aio={engine}")
}

/// Serves `image` at `socket` with four queues on one I/O thread.
fn serve(image: &Path, socket: &Path, disk: &str, iothread: &str) -> Server {
    let options = Options::new().disk("d0", image, disk).iothread("io0", iothread).export(
        "e0",
        "d0",
        socket,
        "writable=on,num-queues=4,iothread=io0",
    );
    Server::start(&Program::under_test(), &options)
}

/// Serves a new image of 16 MiB and connects to it.
fn serve_and_connect(scratch: &Scratch, disk: &str) -> (Server, Disk) {
    let (image, socket) = (scratch.image("disk", 16 * MIB), scratch.path("socket"));
    let server = serve(&image, &socket, disk, "");
    let disk = Disk::connect(&socket).expect("a connection");
    (server, disk)
}

/// Four queues write a quarter each, at once; each quarter is then read through another queue.
fn write_and_verify_on_four_queues(socket: &Path, len: u64, seed: u64) {
    let mut disk = Disk::connect_as(socket, Client { queues: 4, ..Client::default() }).expect("a connection");
    let quarter = |index: usize| (index as u64 % 4) * (len / 4)..(index as u64 % 4 + 1) * (len / 4);
    std::thread::scope(|scope| {
        for (index, queue) in disk.queues.iter_mut().enumerate() {
            scope.spawn(move || queue.write_pattern(quarter(index), seed).expect("writes"));
        }
    });
    std::thread::scope(|scope| {
        for (index, queue) in disk.queues.iter_mut().enumerate() {
            scope.spawn(move || queue.verify_pattern(quarter(index + 1), seed).expect("reads"));
        }
    });
    disk.first().flush().expect("a flush");
}

#[test]
fn what_is_written_through_any_engine_reads_back_under_every_monitor() {
    for engine in engines() {
        for monitor in monitors() {
            let scratch = Scratch::new();
            let (image, socket) = (scratch.image("disk", 16 * MIB), scratch.path("socket"));
            let _server = serve(&image, &socket, &direct(engine), &monitor);
            write_and_verify_on_four_queues(&socket, 16 * MIB, 1);
            let on_host = fs::read(&image).expect("the image");
            assert!(on_host == pattern(1, 0, on_host.len()), "{engine}, {monitor}: the image holds what was written");
        }
    }
}

#[test]
fn a_block_device_is_served_like_a_file_by_every_engine() {
    if !is_root_or_skips("for a loop device") {
        return;
    }
    for (seed, engine) in engines().into_iter().enumerate() {
        let scratch = Scratch::new();
        let image = scratch.image("disk", 16 * MIB);
        let device = LoopDevice::over(&image).expect("a loop device");
        let socket = scratch.path("socket");
        let _server = serve(device.path(), &socket, &direct(engine), "");
        write_and_verify_on_four_queues(&socket, 16 * MIB, seed as u64);
        assert_eq!(Disk::connect(&socket).and_then(|disk| disk.capacity()).expect("its size"), 16 * MIB, "{engine}");
    }
}

#[test]
fn discarded_blocks_are_given_back_and_read_as_zeroes() {
    for engine in engines() {
        let scratch = Scratch::new();
        let (_server, mut disk) = serve_and_connect(&scratch, &format!("{},discard=unmap", direct(engine)));
        let image = scratch.image_path("disk");
        let queue = disk.first();
        queue.write_pattern(0..8 * MIB, 1).expect("writes");
        queue.flush().expect("a flush");
        let before = fs::metadata(&image).expect("the image").blocks();
        queue.discard(MIB..5 * MIB).expect("a discard");
        let after = fs::metadata(&image).expect("the image").blocks();
        assert!(before - after >= 4 * MIB / 512, "{engine}: {before} blocks became {after}");
        assert_eq!(queue.read(2 * MIB, 4096).expect("a read"), [0; 4096], "{engine}");
        queue.verify_pattern(0..MIB, 1).expect("what lies before is untouched");
        queue.verify_pattern(5 * MIB..8 * MIB, 1).expect("what lies behind is untouched");
    }
}

#[test]
fn zeroed_blocks_read_as_zeroes_and_their_neighbours_do_not() {
    for engine in engines() {
        let scratch = Scratch::new();
        let (_server, mut disk) = serve_and_connect(&scratch, &format!("{},discard=unmap", direct(engine)));
        let queue = disk.first();
        for flags in [ReqFlags::empty(), ReqFlags::NO_UNMAP] {
            queue.write_pattern(0..MIB, 2).expect("writes");
            queue.write_zeroes(4096 + 512..3 * 4096 - 512, flags).expect("write zeroes");
            let mut expected = pattern(2, 0, 4 * 4096);
            expected[4096 + 512..3 * 4096 - 512].fill(0);
            assert!(queue.read(0, 4 * 4096).expect("a read") == expected, "{engine}, {flags:?}");
        }
    }
}

#[test]
fn direct_io_takes_buffers_at_any_address() {
    for engine in engines() {
        let scratch = Scratch::new();
        let (_server, mut disk) = serve_and_connect(&scratch, &direct(engine));
        let queue = disk.first();
        queue.write_pattern(0..MIB, 3).expect("writes");
        let (raw, buffer) = queue.parts();
        // Two requests whose memory begins at an odd byte: one is written, the other read back over it.
        // SAFETY: both stay within the queue's buffer, and nothing is in flight.
        let odd = unsafe { std::slice::from_raw_parts_mut(buffer.add(4097), 1024) };
        odd.copy_from_slice(&pattern(4, 512, 1024));
        raw.write(512, odd.as_ptr(), odd.len(), 0, ReqFlags::empty());
        queue.finish().expect("a write");
        odd.fill(0);
        let (raw, _) = queue.parts();
        raw.read(512, odd.as_mut_ptr(), odd.len(), 0, ReqFlags::empty());
        queue.finish().expect("a read");
        assert!(odd == pattern(4, 512, 1024), "{engine}: the odd buffer holds what was written");
        let expected = [pattern(3, 0, 512), pattern(4, 512, 1024), pattern(3, 1536, 2560)].concat();
        assert!(queue.read(0, 4096).expect("a read") == expected, "{engine}: its neighbours are untouched");
    }
}

#[test]
fn flushes_and_forced_writes_succeed_on_every_engine() {
    for engine in engines() {
        let scratch = Scratch::new();
        let (_server, mut disk) = serve_and_connect(&scratch, &direct(engine));
        let queue = disk.first();
        queue.write_with(4096, &[0x5A; 4096], ReqFlags::FUA).expect("a forced write");
        queue.flush().expect("a flush");
        assert_eq!(queue.read(4096, 4096).expect("a read"), [0x5A; 4096], "{engine}");
    }
}

#[test]
fn the_page_cache_is_used_where_direct_io_is_off() {
    for engine in ["threads", "io_uring"] {
        let scratch = Scratch::new();
        let (_server, mut disk) = serve_and_connect(&scratch, &format!("aio={engine}"));
        disk.first().write_pattern(0..16 * MIB, 5).expect("writes");
        disk.first().verify_pattern(0..16 * MIB, 5).expect("reads");
    }
}

#[test]
fn a_request_beyond_the_end_fails_and_the_next_one_does_not() {
    let scratch = Scratch::new();
    let (_server, mut disk) = serve_and_connect(&scratch, &direct("io_uring"));
    assert_eq!(disk.capacity().expect("its size"), 16 * MIB);
    disk.first().read(16 * MIB, 512).expect_err("nothing is there");
    disk.first().write(16 * MIB - 512, &[1; 1024]).expect_err("half of it is not there");
    disk.first().read(16 * MIB - 512, 512).expect("the last sector");
}

#[test]
fn a_read_only_export_refuses_writes() {
    let scratch = Scratch::new();
    let (image, socket) = (scratch.image("disk", MIB), scratch.path("socket"));
    let options = Options::new().disk("d0", &image, "read-only=on").export("e0", "d0", &socket, "");
    let _server = Server::start(&Program::under_test(), &options);

    let refused = Disk::connect(&socket).map(drop).expect_err("libblkio heeds the feature bit");
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
    let reader = Client { read_only: true, ..Client::default() };
    let mut disk = Disk::connect_as(&socket, reader).expect("a reader may connect");
    assert_eq!(disk.first().read(0, 512).expect("a read"), [0; 512]);
    drop(disk);

    // A driver that never looked at the bit.
    let mut guest = Guest::boot(&socket);
    guest.data.put(HEADER_AT, &u32s(&[1, 0, 0, 0]));
    guest.data.put(STATUS_AT, &[0xFF]);
    guest.describe(0, HEADER_AT, 16, NEXT, 1);
    guest.describe(1, BUFFER_AT, 512, NEXT, 2);
    guest.describe(2, STATUS_AT, 1, WRITE, 0);
    guest.offer(0);
    await_that("the write's answer", || guest.used() == 1);
    assert_eq!(guest.data_byte(STATUS_AT), 1, "VIRTIO_BLK_S_IOERR");
    guest.read_honestly();
}

#[test]
fn an_export_listens_again_when_its_client_has_left() {
    let scratch = Scratch::new();
    let (image, socket) = (scratch.image("disk", MIB), scratch.path("socket"));
    let _server = serve(&image, &socket, &direct("io_uring"), "");
    for round in 0..5 {
        let mut disk = Disk::connect(&socket).expect("a connection");
        if round > 0 {
            disk.first().verify_pattern(0..MIB, round - 1).expect("what the client before has written");
        }
        disk.first().write_pattern(0..MIB, round).expect("writes");
    }
}

#[test]
fn many_exports_of_one_process_keep_to_their_own_disks() {
    let scratch = Scratch::new();
    let mut options = Options::new().iothread("io0", "");
    let exports: Vec<_> = (0..16).map(|n| (n, scratch.path(&format!("socket{n}")))).collect();
    for (n, socket) in &exports {
        let image = scratch.image(&format!("disk{n}"), MIB);
        options = options.disk(&format!("d{n}"), &image, &direct("io_uring")).export(
            &format!("e{n}"),
            &format!("d{n}"),
            socket,
            "writable=on,iothread=io0",
        );
    }
    let _server = Server::start(&Program::under_test(), &options);
    let mut disks: Vec<_> =
        exports.iter().map(|(n, socket)| (*n, Disk::connect(socket).expect("a connection"))).collect();
    for (n, disk) in &mut disks {
        disk.first().write_pattern(0..MIB, *n).expect("writes");
    }
    for (n, disk) in &mut disks {
        disk.first().verify_pattern(0..MIB, *n).expect("reads");
    }
}

#[test]
fn the_queues_of_an_export_are_spread_over_its_iothreads() {
    if !Program::under_test().is_egret() {
        return;
    }
    let scratch = Scratch::new();
    let (image, socket) = (scratch.image("disk", 16 * MIB), scratch.path("socket"));
    let threads = "writable=on,num-queues=4,iothread.0=io0,iothread.1=io1";
    let options = Options::new()
        .disk("d0", &image, &direct("io_uring"))
        .iothread("io0", "")
        .iothread("io1", "")
        .export("e0", "d0", &socket, threads);
    let server = Server::start(&Program::under_test(), &options);
    let sleeps_of = |name: &str| -> u64 {
        let sleeps = server.sleeps();
        assert!(sleeps.iter().any(|(thread, _)| thread.contains(name)), "a thread is named {name}: {sleeps:?}");
        sleeps.iter().filter(|(thread, _)| thread.contains(name)).map(|(_, sleeps)| sleeps).sum()
    };
    let before = ["io0", "io1"].map(sleeps_of);
    write_and_verify_on_four_queues(&socket, 16 * MIB, 6);
    await_that("both to have worked", || {
        let after = ["io0", "io1"].map(sleeps_of);
        before[0] < after[0] && before[1] < after[1]
    });
}

#[test]
fn a_daemon_told_to_end_leaves_nothing_behind() {
    let scratch = Scratch::new();
    let (image, socket) = (scratch.image("disk", 16 * MIB), scratch.path("socket"));
    let pidfile = scratch.path("pid");
    let options = Options::new()
        .disk("d0", &image, &direct("io_uring"))
        .iothread("io0", "")
        .export("e0", "d0", &socket, "writable=on,iothread=io0")
        .words(["--pidfile", pidfile.to_str().expect("our own path")]);
    let server = Server::start(&Program::under_test(), &options);
    let pid = fs::read_to_string(&pidfile).expect("a pidfile");
    assert_eq!(pid.trim(), server.pid().to_string());

    let mut disk = Disk::connect(&socket).expect("a connection");
    disk.first().write_pattern(0..16 * MIB, 7).expect("writes");
    let status = server.terminate();
    assert_eq!(status.code(), Some(0));
    assert_eq!(scratch.left_behind(), Vec::<String>::new());
    let on_host = fs::read(&image).expect("the image");
    assert!(on_host == pattern(7, 0, on_host.len()), "what was acknowledged is in the image");
}

/// A disk that takes a fifth of a second for everything, so that there is time to do something meanwhile.
fn a_slow_disk(socket: &Path) -> Server {
    let options = Options::new().null("d0", "latency-ns=200000000").iothread("io0", "");
    let options = options.export("e0", "d0", socket, "writable=on,iothread=io0");
    Server::start(&Program::under_test(), &options)
}

#[test]
fn a_daemon_told_to_end_answers_what_is_in_flight_first() {
    let scratch = Scratch::new();
    let socket = scratch.path("socket");
    let server = a_slow_disk(&socket);
    let mut guest = Guest::boot(&socket);
    // The answer to the first read proves that the queue runs, so the second is seen at its kick.
    guest.read_honestly();
    guest.describe_read(4096);
    guest.offer(0);
    await_that("the daemon to take up the read", || guest.is_taken_up());
    assert_eq!(server.terminate().code(), Some(0));
    assert_eq!((guest.used(), guest.data_byte(STATUS_AT)), (2, 0));
}

#[test]
fn memory_added_under_a_request_in_flight_disturbs_nothing() {
    let scratch = Scratch::new();
    let socket = scratch.path("socket");
    let _server = a_slow_disk(&socket);
    let mut guest = Guest::boot(&socket);
    guest.describe_read(4096);
    guest.offer(0);
    await_that("the daemon to take up the read", || guest.is_taken_up());
    let more = Share::new(DATA + (1 << 30), REGION);
    guest.wire.must(ADD_MEM_REG, &more.message(), &[more.file.as_fd()]);
    await_that("the read in flight", || guest.used() == 1);
    assert_eq!(guest.data_byte(STATUS_AT), 0, "the read in flight succeeds");

    // And the next one may use what was added.
    guest.describe_read(4096);
    guest.describe(1, DATA + (1 << 30), 4096, NEXT | WRITE, 2);
    guest.offer(0);
    await_that("a read into the new memory", || guest.used() == 2);
    assert_eq!(guest.data_byte(STATUS_AT), 0, "the read into the new memory succeeds");
}

/// So many exports with one queue and a connected client each, none of which does anything.
fn idle_exports(scratch: &Scratch, count: u64) -> (Server, Vec<Disk>) {
    let mut options = Options::new().iothread("io0", "");
    let sockets: Vec<_> = (0..count).map(|n| scratch.path(&format!("socket{n}"))).collect();
    for (n, socket) in sockets.iter().enumerate() {
        let (node, id) = (format!("d{n}"), format!("e{n}"));
        options = options.null(&node, "").export(&id, &node, socket, "writable=on,iothread=io0");
    }
    let server = Server::start(&Program::under_test(), &options);
    let disks = sockets.iter().map(|socket| Disk::connect(socket).expect("a connection")).collect();
    (server, disks)
}

#[test]
fn a_hundred_idle_exports_take_little_memory() {
    let scratch = Scratch::new();
    // Whatever the program itself has in memory, one export has it, too. Each takes 54 KiB, and 73 without optimisation.
    let resident = [1, 100].map(|count| idle_exports(&scratch, count).0.resident_without_files());
    let (more, allowed) = (resident[1].saturating_sub(resident[0]), 99 * (80 << 10));
    assert!(!Program::under_test().is_egret() || more < allowed, "{more} bytes more are resident, not {allowed}");
}

#[test]
fn a_daemon_with_nothing_to_do_sleeps_through() {
    let scratch = Scratch::new();
    let (server, mut disks) = idle_exports(&scratch, 100);
    for disk in &mut disks {
        disk.first().read(0, 4096).expect("a read");
    }
    await_that("a second in which no thread wakes up", || {
        let before = server.sleeps();
        // Not a wait for something: this is the length of the observation.
        std::thread::sleep(Duration::from_secs(1));
        server.sleeps() == before
    });
}

#[test]
fn fifty_clients_one_after_another_leave_no_descriptor_open() {
    let scratch = Scratch::new();
    let (image, socket) = (scratch.image("disk", MIB), scratch.path("socket"));
    let server = serve(&image, &socket, &direct("io_uring"), "");
    let connect = || {
        let client = Client { queues: 4, ..Client::default() };
        let mut disk = Disk::connect_as(&socket, client).expect("a connection");
        for queue in &mut disk.queues {
            queue.read(0, 4096).expect("a read");
        }
        disk
    };
    // The first client may make the daemon open what it then keeps.
    drop(connect());
    let second = connect();
    let with_a_client = server.descriptors();
    drop(second);
    for _ in 2..50 {
        drop(connect());
    }
    let _last = connect();
    await_that("the descriptors of clients that left to be closed", || server.descriptors() <= with_a_client);
}

#[test]
fn how_an_iothread_waited_is_written_when_the_daemon_ends() {
    let scratch = Scratch::new();
    let (socket, trace) = (scratch.path("socket"), scratch.path("waits"));
    let options = Options::new()
        .null("d0", "")
        .iothread("io0", "poll-policy=low-regret")
        .export("e0", "d0", &socket, "writable=on,iothread=io0")
        .monitor("m0", &scratch.path("monitor"))
        .words(["--record-waits", trace.to_str().expect("our own path")]);
    let server = Server::start(&Program::egret(), &options);
    // There is a monitor when waits are recorded.
    let mut monitor = Qmp::connect(&scratch.path("monitor"));
    let mut waits = || {
        let stats = monitor.run("egret-query-stats", json!({}));
        stats["iothreads"][0]["waits"].as_u64().expect("a count")
    };
    let before = waits();
    let mut disk = Disk::connect(&socket).expect("a disk");
    await_that("the thread to have waited often", || {
        disk.first().read(0, 4096).expect("a read");
        waits() >= before + 100
    });
    let waited = waits() - before;
    drop(disk);
    assert_eq!(server.terminate().code(), Some(0));
    let trace = fs::read_to_string(&trace).expect("a trace");
    assert!(trace.starts_with("egret-waits 1\nnote iothread io0: Linux"), "{}", &trace[..200.min(trace.len())]);
    let written = trace.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit())).count();
    assert!(written as u64 >= waited, "{written} waits of {waited} are written");
}
