//! Disks that fail, and who is told.

mod support;

use std::time::{Duration, Instant};

use egret_faultdisk::{Effect, ErrnoName, FaultDisk, IoType, Order, Survivors};
use egret_lab::disks::LoopDevice;
use serde_json::{Value, json};
use support::attacker::{Ask, Attacker, DATA, Variant};
use support::await_that;
use support::disk::Disk;
use support::fate::Fate;
use support::qmp::Qmp;
use support::scratch::{Scratch, is_root_or_skips};
use support::server::{Options, Program, Server};

const MIB: u64 = 1 << 20;

#[test]
fn a_write_that_fails_is_told_to_monitors_once_a_second_and_to_the_guest_each_time() {
    for aio in ["threads", "io_uring"] {
        let scratch = Scratch::new();
        let (image, monitor, socket) = (scratch.image("disk", 16 * MIB), scratch.path("qmp"), scratch.path("disk"));
        let options = Options::new().monitor("m", &monitor).disk("d0", &image, &format!("aio={aio}")).export(
            "e0",
            "d0",
            &socket,
            "writable=on",
        );
        let mut server = Server::start(&Program::egret_with_small_files(), &options);
        let mut qmp = Qmp::connect(&monitor);
        let mut disk = Disk::connect(&socket).unwrap();
        disk.first().write(0, &[1; 4096]).unwrap();

        let mut fail = || {
            disk.first().write(8 * MIB, &[1; 4096]).unwrap_err();
        };
        let begun = Instant::now();
        fail();
        let told = json!({
            "device": "e0", "node-name": "d0", "qom-path": "", "operation": "write", "action": "report",
            "nospace": false, "reason": "File too large",
        });
        assert_eq!(qmp.event("BLOCK_IO_ERROR"), told, "{aio}");
        (1..50).for_each(|_| fail());
        // Of the other 49 the newest, when a second is over, and then no more.
        assert_eq!(qmp.event("BLOCK_IO_ERROR"), told, "{aio}");
        let taken = begun.elapsed();
        assert!(taken >= Duration::from_millis(900), "{aio}: {taken:?}");
        let stats = qmp.run("query-blockstats", json!({}));
        assert_eq!(stats[0]["stats"]["failed_wr_operations"], 50, "{aio}");

        // It goes on, and what can be done is done.
        disk.first().write(4096, &[2; 4096]).unwrap();
        assert!(disk.first().read(8 * MIB, 4096).unwrap().iter().all(|byte| *byte == 0));
        assert!(server.is_alive());
        await_that("a thread of its own to write the log", || server.complaints().len() >= 2);
        let complaints = server.complaints();
        assert!(complaints.len() < 50, "{complaints:?}");
        assert!(complaints[0].contains("blockdev 'd0': a write failed: File too large"), "{complaints:?}");
    }
}

#[test]
fn a_flush_that_failed_stays_failed_until_the_disk_is_reopened_where_the_page_cache_may_have_been_in_between() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    for (is_device, direct, is_lost) in [(true, true, false), (true, false, true), (false, true, true)] {
        let scratch = Scratch::new();
        let faulty = scratch.fault_disk(MIB);
        let device = is_device.then(|| LoopDevice::over(&faulty.path()).unwrap());
        let image = device.as_ref().map_or_else(|| faulty.path(), |device| device.path().to_owned());
        let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
        let cache = if direct { "cache.direct=on" } else { "cache.direct=off" };
        let options = Options::new()
            .monitor("m", &monitor)
            .disk("d0", &image, cache)
            .disk("d1", &scratch.image("other", MIB), "")
            .words(["--blockdev", "driver=raw,node-name=top,file=d0"])
            .export("e0", "top", &socket, "writable=on");
        let server = Server::start(&Program::egret(), &options);
        let mut qmp = Qmp::connect(&monitor);
        let mut disk = Disk::connect(&socket).unwrap();
        disk.first().write(0, &[1; 4096]).unwrap();
        inject(&faulty, IoType::Flush, ErrnoName::Eio, 1);
        disk.first().flush().unwrap_err();
        let consequence = "; writes may be lost, so no flush succeeds before blockdev-reopen";
        let reason = format!("Input/output error{}", if is_lost { consequence } else { "" });
        assert_eq!(qmp.event("BLOCK_IO_ERROR")["reason"], json!(reason));

        // The kernel has nothing against it any more.
        disk.first().write(4096, &[2; 4096]).unwrap();
        assert_eq!(disk.first().flush().is_err(), is_lost, "{cache} of {image:?}");
        assert_eq!(disk.first().flush().is_err(), is_lost, "{cache} of {image:?}");
        // To name another node lifts nothing; to name the one below does.
        let other = json!({"driver": "file", "node-name": "d1", "filename": scratch.image_path("other"),
                           "detect-zeroes": "on"});
        qmp.run("blockdev-reopen", json!({"options": [other]}));
        assert_eq!(disk.first().flush().is_err(), is_lost, "{cache} of {image:?}");
        let driver = if is_device { "host_device" } else { "file" };
        let node = json!({"driver": driver, "node-name": "d0", "filename": image,
                          "cache": {"direct": direct}});
        qmp.run("blockdev-reopen", json!({"options": [node]}));
        disk.first().flush().unwrap();
        drop(disk);
        assert!(server.terminate().success());
    }
}

#[test]
fn what_is_lost_when_an_export_goes_is_told_to_who_has_the_next_and_lifted_by_a_reopening_alone() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let mut failing = Failing::start("");
    failing.disk.first().write(0, &[1; 4096]).unwrap();
    inject(&failing.faulty, IoType::Flush, ErrnoName::Eio, 1);
    failing.delete_export();
    failing.export("d0");
    let failed = "blockdev 'd0': the last flush failed";
    await_that("a line in the log", || failing.server.complaints().iter().any(|line| line.contains(failed)));
    for _ in 0..2 {
        failing.disk.first().flush().unwrap_err();
    }
    // That it was told lifts nothing either.
    failing.delete_export();
    failing.export("d0");
    failing.disk.first().flush().unwrap_err();
    failing.reopen(json!({}), "off");
    failing.disk.first().flush().unwrap();
    failing.delete_export();
    failing.export("d0");
    failing.disk.first().flush().unwrap();
    failing.end();
}

#[test]
fn what_is_lost_is_told_to_who_has_the_image_next_by_a_layer_that_was_laid_over_its_node_or_taken_away() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let mut failing = Failing::start("");
    failing.disk.first().write(0, &[1; 4096]).unwrap();
    inject(&failing.faulty, IoType::Flush, ErrnoName::Eio, 1);
    failing.delete_export();
    failing.qmp.run("blockdev-add", json!({"driver": "raw", "node-name": "r", "file": "d0"}));
    failing.export("r");
    failing.disk.first().flush().unwrap_err();
    failing.delete_export();
    failing.qmp.run("blockdev-del", json!({"node-name": "r"}));
    failing.export("d0");
    failing.disk.first().flush().unwrap_err();
    failing.reopen(json!({}), "off");
    failing.disk.first().flush().unwrap();
    failing.end();
}

#[test]
fn a_stable_write_that_failed_lets_no_flush_succeed_that_might_have_told_of_more() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    for aio in ["threads", "io_uring"] {
        let scratch = Scratch::new();
        let faulty = scratch.fault_disk(MIB);
        let device = LoopDevice::over(&faulty.path()).unwrap();
        let socket = scratch.path("disk");
        let options = Options::new().disk("d0", device.path(), &format!("aio={aio},cache.direct=off"));
        let _server =
            Server::start(&Program::egret(), &options.export("e0", "d0", &socket, "writable=on,writethrough=on"));
        let mut disk = Disk::connect(&socket).unwrap();
        inject(&faulty, IoType::Write, ErrnoName::Eio, 1);
        disk.first().write(0, &[1; 4096]).unwrap_err();
        disk.first().flush().unwrap_err();
    }
}

#[test]
fn what_the_kernel_cannot_do_asynchronously_is_done_by_a_worker_and_lost_by_nobody() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    // What a device's kernel may not know is a write that is to be stable; what is to be stable of a file is a worker's anyhow.
    let errors = [(ErrnoName::Eagain, "off"), (ErrnoName::Eopnotsupp, "on")];
    for (aio, (errno, through)) in ["native", "io_uring"].into_iter().flat_map(|aio| errors.map(|error| (aio, error))) {
        let scratch = Scratch::new();
        let faulty = scratch.fault_disk(MIB);
        let device = (through == "on").then(|| LoopDevice::over(&faulty.path()).unwrap());
        let image = device.as_ref().map_or_else(|| faulty.path(), |device| device.path().to_owned());
        let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
        let options = Options::new().monitor("m", &monitor).iothread("io0", "");
        let options = options.disk("d0", &image, &format!("aio={aio},cache.direct=on"));
        let export = format!("writable=on,writethrough={through},iothread=io0");
        let export = options.export("e0", "d0", &socket, &export);
        let _server = Server::start(&Program::egret(), &export);
        let mut disk = Disk::connect(&socket).unwrap();
        inject(&faulty, IoType::Write, errno, 1);
        disk.first().write(4096, &[7; 4096]).unwrap();
        let unflushed = faulty.tell(Order::Status).unwrap().unflushed;
        assert_eq!(unflushed == 0, through == "on", "{aio}, {errno:?}: it is stable");
        assert_eq!(disk.first().read(4096, 4096).unwrap(), [7; 4096]);
        let stats = Qmp::connect(&monitor).run("egret-query-stats", json!({}));
        // io_uring may try again by itself, and hand on nothing.
        if aio == "native" {
            assert_eq!(stats["iothreads"][0]["fallbacks"], 1, "{errno:?}");
        }
    }
}

/// Has a guest read and write so many blocks at a time, in one batch, until they have all ended well.
fn read_and_write(attacker: &mut Attacker, count: u64) {
    let [written, read] = [DATA, DATA + MIB];
    let data: Vec<u8> = (0..count).flat_map(|block| vec![block as u8 + 1; 4096]).collect();
    attacker.data[0].put(written, &data);
    for (is_write, memory) in [(true, written), (false, read)] {
        let first = attacker.made();
        for at in (0..count).map(|block| block * 4096) {
            let ask = if is_write { Ask::Write { at } } else { Ask::Read { at } };
            attacker.ask(ask, &[(memory + at, 4096)]);
        }
        attacker.publish();
        attacker.await_all();
        assert!((first..attacker.made()).all(|number| attacker.status_of(number) == 0), "all end well");
    }
    for at in (0..data.len()).step_by(4096) {
        assert_eq!(attacker.data[0].get::<4096>(read + at as u64)[..], data[at..at + 4096], "byte {at}");
    }
}

#[test]
fn what_the_kernel_does_not_take_is_done_by_workers_where_there_is_nothing_to_wait_for() {
    let scratch = Scratch::new();
    let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
    let options = Options::new()
        .monitor("m", &monitor)
        .iothread("io0", "")
        .disk("d0", &scratch.image("disk", MIB), "aio=native,cache.direct=on")
        .export("e0", "d0", &socket, "writable=on,iothread=io0");
    // The guest is not called either, and looks for itself.
    let program = Program::egret().with(Fate::fails(libc::SYS_io_submit, libc::EAGAIN));
    let server = Server::start(&program, &options);
    let mut attacker = Attacker::boot(&socket, Variant::PLAIN, 2 * MIB);
    read_and_write(&mut attacker, 16);
    let stats = Qmp::connect(&monitor).run("egret-query-stats", json!({}));
    assert_eq!(stats["iothreads"][0]["fallbacks"], 32);
    drop(attacker);
    assert!(server.terminate().success());
}

#[test]
fn what_the_kernel_does_not_take_waits_for_what_it_has() {
    if !is_root_or_skips("for a disk that takes its time") {
        return;
    }
    let scratch = Scratch::new();
    let faulty = scratch.fault_disk(MIB);
    let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
    let options = Options::new()
        .monitor("m", &monitor)
        .iothread("io0", "")
        .disk("d0", &faulty.path(), "aio=native,cache.direct=on")
        .export("e0", "d0", &socket, "writable=on,iothread=io0");
    // As where the kernel has no room for sixteen at a time.
    let program = Program::egret().with(Fate::fails(libc::SYS_io_submit, libc::EAGAIN).where_is(1, 16));
    let _server = Server::start(&program, &options);
    let mut attacker = Attacker::boot_flushing(&socket, Variant::PLAIN, 2 * MIB);
    faulty.inject(IoType::Read, Some(1), Effect::Never);
    attacker.ask(Ask::Read { at: 0 }, &[(DATA + MIB, 512)]);
    attacker.publish();
    await_that("the disk to have it", || faulty.tell(Order::Status).unwrap().waiting == 1);
    // While the kernel has that, it does not take these.
    let first = attacker.made();
    for block in 0..16 {
        attacker.ask(Ask::Read { at: block * 4096 }, &[(DATA + block * 4096, 4096)]);
    }
    attacker.publish();
    let mut qmp = Qmp::connect(&monitor);
    let mut stats = || qmp.run("egret-query-stats", json!({}))["iothreads"][0].clone();
    let tries = |stats: &Value| {
        let native = stats["engines"].as_array().unwrap().iter().find(|engine| engine["engine"] == "native");
        native.unwrap()["submissions"].as_u64().unwrap()
    };
    await_that("the daemon to have tried", || tries(&stats()) > 1);
    assert_eq!(stats()["fallbacks"], 0);
    assert!((first..attacker.made()).all(|number| !attacker.has_status(number)), "they wait");
    faulty.tell(Order::Release).unwrap();
    attacker.await_all();
    assert!((first - 1..attacker.made()).all(|number| attacker.status_of(number) == 0), "all end well");
    // Then there was nothing to wait for, and without the first of them it takes the others.
    assert_eq!(stats()["fallbacks"], 1);
    read_and_write(&mut attacker, 15);
    assert_eq!(stats()["fallbacks"], 1);
}

#[test]
fn errors_are_injected_where_they_are_asked_for_until_the_disk_is_reopened_without_them() {
    let scratch = Scratch::new();
    let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
    let sick = "driver=blkdebug,node-name=sick,image=d0,inject-error.0.event=none,inject-error.0.iotype=write,\
                inject-error.0.sector=8,inject-error.0.errno=28,inject-error.0.once=on,\
                inject-error.1.event=flush_to_disk,inject-error.1.iotype=read";
    let options = Options::new()
        .monitor("m", &monitor)
        .disk("d0", &scratch.image("disk", MIB), "")
        .words(["--blockdev", sick])
        .export("e0", "sick", &socket, "writable=on,werror=enospc");
    let _server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&monitor);
    let mut disk = Disk::connect(&socket).unwrap();
    disk.first().write(0, &[1; 4096]).unwrap();
    // It finds no space, and tries again by itself.
    disk.first().write(4096, &[2; 4096]).unwrap();
    let told = qmp.event("BLOCK_IO_ERROR");
    assert_eq!((&told["action"], &told["node-name"]), (&json!("stop"), &json!("sick")));
    assert_eq!(disk.first().read(4096, 4096).unwrap(), [2; 4096]);
    disk.first().flush().unwrap();
    disk.first().read(0, 4096).unwrap_err();
    disk.first().flush().unwrap();
    let told = qmp.event("BLOCK_IO_ERROR");
    assert_eq!((&told["action"], &told["reason"]), (&json!("report"), &json!("Input/output error")));
    let well = json!({"driver": "blkdebug", "node-name": "sick", "image": "d0"});
    qmp.run("blockdev-reopen", json!({"options": [well]}));
    disk.first().flush().unwrap();
    assert_eq!(disk.first().read(0, 4096).unwrap(), [1; 4096]);
    let wrong = json!({"driver": "blkdebug", "node-name": "w", "image": "d0", "inject-error": [{"event": "l2_load"}]});
    let refused = qmp.fail("blockdev-add", wrong);
    assert!(refused.contains("l2_load") && refused.contains("flush_to_disk"), "{refused}");
}

#[test]
fn of_flushes_at_once_none_succeeds_where_the_page_cache_has_lost_a_write() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let mut failing = Failing::start("cache.direct=off");
    // Linux tells one of them; which, and how many ask before it does, is not the same each time.
    for round in 0..20 {
        // First, because Linux may write back what is cached at any time.
        inject(&failing.faulty, IoType::Write, ErrnoName::Eio, 1);
        failing.disk.first().write(0, &[round; 4096]).unwrap();
        assert_eq!(flush_at_once(&mut failing.disk), [-5; 8], "in round {round}");
        failing.reopen(json!({"direct": false}), "off");
        assert_eq!(flush_at_once(&mut failing.disk), [0; 8], "after round {round}");
    }
}

#[test]
fn a_device_that_is_taken_away_stops_who_reads_and_has_no_lack_of_space_for_who_writes() {
    if !is_root_or_skips("for a device") {
        return;
    }
    for aio in ["threads", "io_uring", "native,cache.direct=on", "io_uring,cache.direct=on"] {
        let scratch = Scratch::new();
        let image = scratch.image("device", MIB);
        let device = LoopDevice::over(&image).unwrap();
        let resize = |len| {
            std::fs::File::options().write(true).open(&image).and_then(|file| file.set_len(len)).unwrap();
            device.take_size().unwrap();
        };
        let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
        let options = Options::new().monitor("m", &monitor).disk("d0", device.path(), &format!("aio={aio}"));
        let export = options.export("e0", "d0", &socket, "writable=on,rerror=stop,werror=enospc");
        let server = Server::start(&Program::egret(), &export);
        let mut qmp = Qmp::connect(&monitor);
        let mut disk = Disk::connect(&socket).unwrap();
        let told = |qmp: &mut Qmp, operation: &str, action: &str| {
            let told = qmp.event("BLOCK_IO_ERROR");
            assert_eq!([&told["operation"], &told["action"]], [operation, action], "{aio}");
            assert_eq!((&told["nospace"], &told["reason"]), (&json!(false), &json!("Input/output error")), "{aio}");
        };
        disk.first().write(0, &[1; 4096]).unwrap();
        // As Linux does it to a disk that is pulled.
        resize(0);
        disk.first().write(4096, &[2; 4096]).unwrap_err();
        told(&mut qmp, "write", "report");
        std::thread::scope(|scope| {
            let client = scope.spawn(|| disk.first().read(MIB - 4096, 4096).unwrap());
            told(&mut qmp, "read", "stop");
            resize(MIB);
            qmp.run("block-export-resume", json!({"id": "e0"}));
            assert_eq!(client.join().unwrap(), [0; 4096]);
        });
        drop(disk);
        assert!(server.terminate().success());
    }
}

#[test]
fn a_device_that_is_full_and_has_all_that_it_had_lacks_space() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let mut failing = Failing::start("cache.direct=on");
    inject(&failing.faulty, IoType::Write, ErrnoName::Enospc, 1);
    failing.disk.first().write(MIB - 4096, &[1; 4096]).unwrap_err();
    assert_eq!(failing.qmp.event("BLOCK_IO_ERROR")["nospace"], true);
}

#[test]
fn what_is_found_lost_when_its_image_is_closed_and_did_not_answer_is_told_to_who_has_the_image_next() {
    if !is_root_or_skips("for a disk that hangs") {
        return;
    }
    for reopens in [false, true] {
        let mut failing = Failing::start("");
        failing.disk.first().write(0, &[1; 4096]).unwrap();
        failing.faulty.inject(IoType::Flush, None, Effect::Never);
        failing.delete_export();
        let layer = json!({"driver": "raw", "node-name": "r", "file": "d0"});
        let again = json!({"options": [failing.node(json!({}), "off")]});
        let mut refused = vec![failing.qmp.fail("blockdev-add", layer.clone())];
        // It is closed by now.
        refused.extend(reopens.then(|| failing.qmp.fail("blockdev-reopen", again.clone())));
        for refused in refused {
            assert!(refused.contains("what was written to it before is not stable yet"), "{refused}");
        }

        await_that("the disk to have a flush", || failing.faulty.tell(Order::Status).unwrap().waiting > 0);
        // They end as the path is given up: that of the export, and that of the image when it was closed.
        for order in [Order::Clear, Order::PowerOff, Order::PowerOn(Survivors::All)] {
            failing.faulty.tell(order).unwrap();
        }
        let is_loss = |line: &&String| line.contains("blockdev 'd0': the last flush failed");
        await_that("both to have ended", || failing.server.complaints().iter().filter(is_loss).count() == 2);
        if reopens {
            failing.qmp.run("blockdev-reopen", again);
            failing.export("d0");
        } else {
            failing.qmp.run("blockdev-add", layer);
            failing.export("r");
        }
        for _ in 0..2 {
            failing.disk.first().flush().unwrap_err();
        }
        failing.reopen(json!({}), "off");
        failing.disk.first().flush().unwrap();
        failing.end();
    }
}

/// A client and a monitor of a daemon, over a device whose disk fails as it is told to.
struct Failing {
    disk: Disk,
    qmp: Qmp,
    server: Server,
    device: LoopDevice,
    faulty: FaultDisk,
    scratch: Scratch,
}

impl Failing {
    /// With more for the blockdev `d0`.
    fn start(blockdev: &str) -> Self {
        let scratch = Scratch::new();
        let faulty = scratch.fault_disk(MIB);
        let device = LoopDevice::over(&faulty.path()).unwrap();
        let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
        let options = Options::new().monitor("m", &monitor).disk("d0", device.path(), blockdev);
        let server = Server::start(&Program::egret(), &options.export("e0", "d0", &socket, "writable=on"));
        let (qmp, disk) = (Qmp::connect(&monitor), Disk::connect(&socket).unwrap());
        Self { disk, qmp, server, device, faulty, scratch }
    }

    fn node(&self, cache: Value, detect_zeroes: &str) -> Value {
        json!({"driver": "host_device", "node-name": "d0", "filename": self.device.path(), "cache": cache,
               "detect-zeroes": detect_zeroes})
    }

    fn reopen(&mut self, cache: Value, detect_zeroes: &str) {
        let node = self.node(cache, detect_zeroes);
        self.qmp.run("blockdev-reopen", json!({"options": [node]}));
    }

    fn delete_export(&mut self) {
        self.qmp.run("block-export-del", json!({"id": "e0", "mode": "hard"}));
        self.qmp.event("BLOCK_EXPORT_DELETED");
    }

    /// Has another, of this node, with a client of its own.
    fn export(&mut self, node: &str) {
        let socket = self.scratch.path("disk");
        let addr = json!({"type": "unix", "path": socket});
        let export = json!({"type": "vhost-user-blk", "id": "e0", "node-name": node, "addr": addr, "writable": true});
        self.qmp.run("block-export-add", export);
        self.disk = Disk::connect(&socket).unwrap();
    }

    /// Ends the daemon, which is well.
    fn end(self) {
        drop(self.disk);
        assert!(self.server.terminate().success());
    }

    fn unflushed(&self) -> u64 {
        self.faulty.tell(Order::Status).unwrap().unflushed
    }
}

/// Has so many flushes in flight at once, and says how each ended.
fn flush_at_once<const N: usize>(disk: &mut Disk) -> [i32; N] {
    let (queue, _) = disk.first().parts();
    (0..N).for_each(|at| queue.flush(at, blkio::ReqFlags::empty()));
    let (mut ends, mut ended) = ([1; N], 0);
    while ended < N {
        let mut completions = [const { std::mem::MaybeUninit::uninit() }; N];
        let count = queue.do_io(&mut completions, 1, Some(&mut support::PATIENCE.clone()), None).unwrap();
        for completion in &completions[..count] {
            // SAFETY: `do_io` has filled the first `count`.
            let completion = unsafe { completion.assume_init_ref() };
            ends[completion.user_data] = completion.ret;
        }
        ended += count;
    }
    ends
}

/// Has the next such requests fail.
fn inject(disk: &FaultDisk, iotype: IoType, errno: ErrnoName, times: u64) {
    disk.inject(iotype, Some(times), Effect::Errno(errno));
}

#[test]
fn what_was_written_before_a_disk_was_reopened_is_stable_after_its_next_flush_or_no_flush_succeeds() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    for (was_direct, is_direct) in [(false, true), (false, false), (true, false)] {
        let mut failing = Failing::start(if was_direct { "cache.direct=on" } else { "cache.direct=off" });
        let beside = std::fs::OpenOptions::new().write(true).open(failing.device.path()).unwrap();

        // Who ignores flushes from here on does not ignore what was written before.
        failing.disk.first().write(MIB / 2, &[1; 4096]).unwrap();
        failing.reopen(json!({"direct": is_direct, "no-flush": true}), "off");
        assert_eq!(failing.unflushed(), 0, "{was_direct} to {is_direct}");
        failing.reopen(json!({"direct": was_direct}), "off");

        // All is well.
        failing.disk.first().write(MIB / 2, &[1; 4096]).unwrap();
        failing.reopen(json!({"direct": is_direct}), "off");
        assert_eq!(flush_at_once(&mut failing.disk), [0; 8], "{was_direct} to {is_direct}");
        assert_eq!(failing.unflushed(), 0, "{was_direct} to {is_direct}");
        failing.reopen(json!({"direct": was_direct}), "off");

        // It cannot be written, and who was told first is somebody else: nobody (0), or whoever has the device open (1).
        for told in 0..2 {
            let case = format!("{was_direct} to {is_direct}, {told} told");
            let write = |disk: &mut Disk| disk.first().write(MIB / 2, &[2 + told; 4096]).unwrap();
            // Linux may write back what is cached at any time, and what is not cached is written at once.
            if was_direct {
                write(&mut failing.disk);
            }
            inject(&failing.faulty, IoType::Write, ErrnoName::Eio, 1);
            if !was_direct {
                write(&mut failing.disk);
            }
            if told == 1 {
                assert_eq!(beside.sync_data().is_err(), !was_direct, "{case}");
            }
            failing.reopen(json!({"direct": is_direct}), "on");
            failing.faulty.tell(Order::Clear).unwrap();
            let expected = if was_direct { 0 } else { -5 };
            // Who opens it once more before anybody was told lifts nothing.
            failing.reopen(json!({"direct": is_direct}), "off");
            assert_eq!(flush_at_once(&mut failing.disk), [expected; 8], "{case}");
            assert_eq!(flush_at_once(&mut failing.disk), [expected; 8], "{case}");
            failing.reopen(json!({"direct": is_direct}), "on");
            failing.disk.first().write(MIB / 2, &[3 + told; 4096]).unwrap();
            assert_eq!(flush_at_once(&mut failing.disk), [0; 8], "{case}");
            assert_eq!(failing.unflushed(), 0, "{case}");
            failing.reopen(json!({"direct": was_direct}), "off");
        }
        let Failing { server, disk, .. } = failing;
        drop(disk);
        let is_loss = |line: &&String| line.contains("none succeeds before it is reopened");
        let (lost, expected) = (|| server.complaints().iter().filter(is_loss).count(), if was_direct { 0 } else { 4 });
        await_that("all losses to be told", || lost() >= expected);
        assert_eq!(lost(), expected, "{was_direct} to {is_direct}");
        assert!(server.terminate().success());
    }
}

#[test]
fn a_disk_that_hangs_with_what_was_written_can_be_reopened_and_its_flushes_wait() {
    if !is_root_or_skips("for a disk that hangs") {
        return;
    }
    let mut failing = Failing::start("cache.direct=off");
    failing.faulty.inject(IoType::Write, None, Effect::Never);
    failing.disk.first().write(MIB / 2, &[1; 4096]).unwrap();
    for detect_zeroes in ["on", "off"] {
        failing.reopen(json!({}), detect_zeroes);
    }
    let Failing { server, mut qmp, mut disk, ref faulty, .. } = failing;
    await_that("the disk to hang", || faulty.tell(Order::Status).unwrap().waiting == 1);
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| {
            let flushed = disk.first().flush();
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            flushed
        });
        // Whoever asks is answered meanwhile.
        let shown = qmp.run("query-named-block-nodes", json!({}));
        assert_eq!(shown[0]["node-name"], "d0");
        let mut in_flight = || qmp.run("egret-query-stats", json!({}))["exports"][0]["total"]["in-flight"].take();
        await_that("the flush to be asked for", || in_flight() == 1);
        assert_eq!(in_flight(), 1);
        assert!(!done.load(std::sync::atomic::Ordering::Relaxed), "it waits");
        faulty.tell(Order::Clear).unwrap();
        faulty.tell(Order::Release).unwrap();
        flush.join().expect("no panic").unwrap();
    });
    assert_eq!(faulty.tell(Order::Status).unwrap().unflushed, 0);
    drop(disk);
    assert!(server.terminate().success());
}
