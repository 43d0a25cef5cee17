//! Disks that fail, and who is told.

mod support;

use std::time::{Duration, Instant};

use egret_faultdisk::{Effect, ErrnoName, Fault, FaultDisk, IoType, Order};
use egret_lab::disks::LoopDevice;
use serde_json::json;
use support::await_that;
use support::disk::Disk;
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

        let begun = Instant::now();
        for _ in 0..50 {
            disk.first().write(8 * MIB, &[1; 4096]).unwrap_err();
        }
        let told = json!({
            "device": "e0", "node-name": "d0", "qom-path": "", "operation": "write", "action": "report",
            "nospace": false, "reason": "File too large",
        });
        assert_eq!(qmp.event("BLOCK_IO_ERROR"), told, "{aio}");
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
fn a_flush_that_failed_stays_failed_until_the_disk_is_reopened_where_the_page_cache_was_in_between() {
    let test = "a_flush_that_failed_stays_failed_until_the_disk_is_reopened_where_the_page_cache_was_in_between";
    if !is_root_or_skips(test, "for a disk that fails") {
        return;
    }
    for (direct, is_lost) in [(true, false), (false, true)] {
        let scratch = Scratch::new();
        let faulty = scratch.fault_disk(MIB);
        let device = LoopDevice::over(&faulty.path()).unwrap();
        let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
        let cache = if direct { "cache.direct=on" } else { "cache.direct=off" };
        let options = Options::new()
            .monitor("m", &monitor)
            .disk("d0", device.path(), cache)
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
        assert_eq!(disk.first().flush().is_err(), is_lost, "{cache}");
        assert_eq!(disk.first().flush().is_err(), is_lost, "{cache}");
        // To name another node lifts nothing; to name the one below does.
        let other = json!({"driver": "file", "node-name": "d1", "filename": scratch.image_path("other"),
                           "detect-zeroes": "on"});
        qmp.run("blockdev-reopen", json!({"options": [other]}));
        assert_eq!(disk.first().flush().is_err(), is_lost, "{cache}");
        let node = json!({"driver": "host_device", "node-name": "d0", "filename": device.path(),
                          "cache": {"direct": direct}});
        qmp.run("blockdev-reopen", json!({"options": [node]}));
        disk.first().flush().unwrap();
        drop(disk);
        assert!(server.terminate().success());
    }
}

#[test]
fn a_stable_write_that_failed_lets_no_flush_succeed_that_might_have_told_of_more() {
    let test = "a_stable_write_that_failed_lets_no_flush_succeed_that_might_have_told_of_more";
    if !is_root_or_skips(test, "for a disk that fails") {
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
    let test = "what_the_kernel_cannot_do_asynchronously_is_done_by_a_worker_and_lost_by_nobody";
    if !is_root_or_skips(test, "for a disk that fails") {
        return;
    }
    let errors = [ErrnoName::Eagain, ErrnoName::Eopnotsupp];
    for (aio, errno) in ["native", "io_uring"].into_iter().flat_map(|aio| errors.map(|errno| (aio, errno))) {
        let scratch = Scratch::new();
        let faulty = scratch.fault_disk(MIB);
        let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
        let options = Options::new().monitor("m", &monitor).iothread("io0", "");
        let options = options.disk("d0", &faulty.path(), &format!("aio={aio},cache.direct=on"));
        let export = options.export("e0", "d0", &socket, "writable=on,writethrough=on,iothread=io0");
        let _server = Server::start(&Program::egret(), &export);
        let mut disk = Disk::connect(&socket).unwrap();
        inject(&faulty, IoType::Write, errno, 1);
        disk.first().write(4096, &[7; 4096]).unwrap();
        assert_eq!(faulty.tell(Order::Status).unwrap().unflushed, 0, "{aio}, {errno:?}: it is stable");
        assert_eq!(disk.first().read(4096, 4096).unwrap(), [7; 4096]);
        let stats = Qmp::connect(&monitor).run("egret-query-stats", json!({}));
        // io_uring may try again by itself, and hand on nothing.
        if aio == "native" {
            assert_eq!(stats["iothreads"][0]["fallbacks"], 1, "{errno:?}");
        }
    }
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
    let test = "of_flushes_at_once_none_succeeds_where_the_page_cache_has_lost_a_write";
    if !is_root_or_skips(test, "for a disk that fails") {
        return;
    }
    let scratch = Scratch::new();
    let faulty = scratch.fault_disk(MIB);
    let device = LoopDevice::over(&faulty.path()).unwrap();
    let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
    let options = Options::new().monitor("m", &monitor).disk("d0", device.path(), "cache.direct=off");
    let _server = Server::start(&Program::egret(), &options.export("e0", "d0", &socket, "writable=on"));
    let mut qmp = Qmp::connect(&monitor);
    let mut disk = Disk::connect(&socket).unwrap();
    // Linux tells one of them; which, and how many ask before it does, is not the same each time.
    for round in 0..20 {
        disk.first().write(0, &[round; 4096]).unwrap();
        inject(&faulty, IoType::Write, ErrnoName::Eio, 1);
        assert_eq!(flush_at_once(&mut disk), [-5; 8], "in round {round}");
        let node = json!({"driver": "host_device", "node-name": "d0", "filename": device.path(),
                          "cache": {"direct": false}});
        qmp.run("blockdev-reopen", json!({"options": [node]}));
        assert_eq!(flush_at_once(&mut disk), [0; 8], "after round {round}");
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
    let effect = Effect::Errno(errno);
    disk.tell(Order::Inject(Fault { iotype: Some(iotype), sectors: None, after: 0, times: Some(times), effect }))
        .unwrap();
}
