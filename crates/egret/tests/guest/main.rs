//! The daemon as a Linux guest sees it: a kernel's own driver, a file system, a reboot.
//!
//! `docs/testing.md` tells what these tests need. Without QEMU or without a kernel for the guest they skip themselves,
//! and say so; where `CI=true` that is a failure.
//!
//! [`failing`] has disks that fill up or lose their power under a guest, and [`conformance`] suites of SCSI commands.

mod conformance;
mod console;
mod failing;
#[path = "../support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use console::{Guest, hash};
use serde_json::json;
use support::announced::Announced;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use support::vm::can_boot_or_skips;

/// The size of a disk in bytes: what the scripts in the guest ask for, and more than they need.
const DISK: u64 = 64 << 20;

/// `VIRTIO_F_RING_PACKED`.
const RING_PACKED: usize = 34;

#[test]
fn two_disks_of_one_daemon_keep_what_a_guest_writes_over_its_reboot() {
    if !can_boot_or_skips() {
        return;
    }
    let two = TwoDisks {
        iothreads: ["fd-monitor=io_uring", "fd-monitor=epoll"],
        disks: ["aio=io_uring,cache.direct=on,discard=unmap", "aio=native,cache.direct=on,discard=unmap"],
        exports: ["", ""],
        properties: ["", "packed=on"],
    };
    let guest = two.survive_a_guest();
    for disk in ["vda", "vdb"] {
        assert_eq!(guest.fact(disk, "queues"), "2");
        assert_eq!(guest.fact(disk, "bytes"), DISK.to_string());
        assert_eq!(guest.fact(disk, "logical_block_size"), "512");
        assert_eq!(guest.fact(disk, "cache-type"), "write back");
    }
}

#[test]
fn large_blocks_write_through_and_interrupts_by_flag_suit_a_guest_as_well() {
    if !can_boot_or_skips() {
        return;
    }
    let two = TwoDisks {
        iothreads: ["fd-monitor=ppoll,poll-max-ns=0", "fd-monitor=epoll,poll-policy=low-regret"],
        disks: ["aio=threads,discard=unmap,detect-zeroes=unmap", "aio=io_uring"],
        exports: ["logical-block-size=4096,writethrough=on,serial=first", "logical-block-size=4096,serial=second"],
        properties: ["event_idx=off", "event_idx=off,packed=on"],
    };
    let guest = two.survive_a_guest();
    for disk in ["vda", "vdb"] {
        assert_eq!(guest.fact(disk, "logical_block_size"), "4096");
    }
    assert_eq!(guest.fact("vda", "cache-type"), "write through");
    assert_eq!([guest.fact("vda", "serial"), guest.fact("vdb", "serial")], ["first", "second"]);
}

#[test]
fn user_mode_linux_has_back_what_it_wrote_to_two_disks() {
    if !can_boot_or_skips() {
        return;
    }
    // Its memory is a file there, which its programs run from. Containers often have it so that nothing may.
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("proc");
    if mounts.lines().any(|line| line.contains(" /dev/shm ") && line.contains("noexec")) {
        return egret_needs::this_test_lacks(format_args!("/dev/shm without noexec: mount it anew"));
    }
    let (scratch, mut options, mut attach) = (Scratch::new(), Options::new(), vec!["--accel".to_owned(), "uml".into()]);
    let images = [("disk0", "aio=io_uring,cache.direct=on,discard=unmap"), ("disk1", "aio=threads,discard=unmap")].map(
        |(node, disk)| {
            let (image, socket) = (scratch.image(node, DISK), scratch.path(&format!("{node}.sock")));
            let so_far = std::mem::take(&mut options);
            options = so_far.disk(node, &image, disk).export(node, node, &socket, "writable=on,user-mode-linux=on");
            attach.extend(["--disk".into(), socket.to_str().expect("our own path").into()]);
            image
        },
    );
    let server = Server::start(&Program::egret(), &options);
    let guest = Guest::run(&attach.iter().map(String::as_str).collect::<Vec<_>>(), &["files.sh"]);
    assert_eq!(server.complaints(), Vec::<String>::new());
    assert_eq!(server.terminate().code(), Some(0));
    for (disk, image) in ["vda", "vdb"].into_iter().zip(images) {
        assert_eq!(guest.last_hash(disk), hash(&image), "the guest and the host see the same bytes of {disk}");
    }
}

#[test]
fn the_lines_that_are_printed_for_qemu_attach_the_disk_for_longer_than_the_daemon_lives() {
    if can_boot_or_skips() {
        outlive_five_daemons(|lines| lines);
    }
}

#[test]
fn a_guest_with_packed_rings_sees_nothing_of_a_daemon_that_is_killed() {
    if can_boot_or_skips() {
        let guest = outlive_five_daemons(|lines| lines.replace("num-queues=4", "num-queues=4,packed=on"));
        assert!(guest.has_feature("vda", RING_PACKED));
    }
}

/// Attaches a disk to a guest as the daemon says, but for what `amend` changes, and kills daemon after daemon under load.
fn outlive_five_daemons(amend: impl FnOnce(String) -> String) -> Guest {
    let scratch = Scratch::new();
    // A name that a shell and QEMU would both like to take apart.
    let (image, socket) = (scratch.image("disk", DISK), scratch.path("one disk, 'quoted'"));
    let mut daemon = Some(Announced::start(&image, &socket));
    let lines = amend(daemon.as_ref().map(|daemon| daemon.lines_for("QEMU")).expect("it has started"));
    let mut kills = 0;
    let guest = Guest::run_asking(&["--attach", &lines], &["one-disk.sh"], |asked| {
        assert_eq!(asked, "kill");
        // Dropping it is SIGKILL.
        daemon = None;
        daemon = Some(Announced::start(&image, &socket));
        kills += 1;
    });
    assert_eq!(kills, 5);
    assert_eq!(guest.fact("vda", "bytes"), DISK.to_string());
    // QEMU has set up the four queues that the line says; a driver takes as many as it has processors.
    assert_eq!(guest.fact("vda", "queues"), "2");
    assert_eq!(daemon.map(|daemon| daemon.terminate().code()), Some(Some(0)));
    assert_eq!(guest.last_hash("vda"), hash(&image), "the guest and the host see the same bytes");
    assert_eq!(scratch.left_behind(), Vec::<String>::new());
    guest
}

/// What scsi.sh wants: two logical units behind one device, on two engines, with two I/O threads there for its queues.
fn two_units(images: &[PathBuf; 2], socket: &Path, placement: &str) -> Options {
    let units = "luns.0.lun=0,luns.0.node-name=disk0,luns.0.wwn=0x5000c50015ea71ac,\
                 luns.1.lun=1,luns.1.node-name=disk1,luns.1.serial=second";
    Options::new()
        .iothread("io0", "fd-monitor=io_uring")
        .iothread("io1", "fd-monitor=epoll")
        .disk("disk0", &images[0], "aio=io_uring,cache.direct=on,discard=unmap")
        .disk("disk1", &images[1], "aio=native,cache.direct=on,discard=unmap")
        .export_scsi("scsi", socket, &format!("writable=on,num-queues=2,{placement},{units}"))
}

#[test]
fn two_units_of_a_scsi_device_do_all_that_a_guest_asks_of_them() {
    if !can_boot_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let (images, socket) = (["first", "second"].map(|name| scratch.image(name, DISK)), scratch.path("socket"));
    let options = two_units(&images, &socket, "iothread.0=io0,iothread.1=io1");
    let server = Server::start(&Program::egret(), &options);
    let attach = ["--scsi", socket.to_str().expect("our own path"), "--num-queues", "2"];
    let guest = Guest::run(&attach, &["scsi.sh"]);
    assert_eq!(server.complaints(), Vec::<String>::new(), "there is nothing to complain about");
    assert_eq!(server.terminate().code(), Some(0));
    for (disk, image) in ["lun0", "lun1"].into_iter().zip(images) {
        assert_eq!(guest.fact(disk, "queues"), "2");
        assert_eq!(guest.fact(disk, "bytes"), DISK.to_string());
        assert_eq!(guest.fact(disk, "cache-type"), "write back");
        assert_eq!(guest.last_hash(disk), hash(&image), "the guest and the host see the same bytes of {disk}");
    }
    assert_eq!(scratch.left_behind(), Vec::<String>::new());
}

#[test]
fn a_guest_sees_nothing_of_queues_that_move_and_disks_that_are_reopened() {
    if !can_boot_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let (images, socket) = (["first", "second"].map(|name| scratch.image(name, DISK)), scratch.path("socket"));
    let monitor = scratch.path("qmp");
    let options = two_units(&images, &socket, "iothread=io0").monitor("m", &monitor);
    let server = Server::start(&Program::egret(), &options);
    let socket = socket.to_str().expect("our own path");
    let attach = ["--props", "packed=on", "--scsi", socket, "--num-queues", "2"];
    let done = AtomicBool::new(false);
    let guest = std::thread::scope(|scope| {
        let changes = scope.spawn(|| {
            let mut qmp = Qmp::connect(&monitor);
            let mut round = 0;
            while !done.load(Ordering::Relaxed) {
                for queue in 0..2 {
                    let to = ["io0", "io1"][(round + round / 2 + queue) % 2];
                    qmp.run_in_time("egret-move-queue", json!({"id": "scsi", "queue": queue, "iothread": to}));
                }
                let reopened: Vec<_> = (0..2)
                    .map(|disk| {
                        let (aio, direct) =
                            [("io_uring", true), ("native", true), ("threads", false)][(round + disk) % 3];
                        json!({"driver": "file", "node-name": format!("disk{disk}"), "filename": images[disk],
                               "aio": aio, "cache": {"direct": direct}, "discard": "unmap"})
                    })
                    .collect();
                qmp.run_in_time("blockdev-reopen", json!({"options": reopened}));
                round += 1;
                // A guest without hardware help gets little done between two changes as it is.
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            round
        });
        let guest = std::panic::catch_unwind(|| Guest::run(&attach, &["scsi.sh"]));
        done.store(true, Ordering::Relaxed);
        assert!(changes.join().expect("no change fails") > 10);
        guest.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    assert!(guest.has_feature("scsi", RING_PACKED));
    assert_eq!(server.complaints(), Vec::<String>::new(), "there is nothing to complain about");
    assert_eq!(server.terminate().code(), Some(0));
    for (disk, image) in ["lun0", "lun1"].into_iter().zip(&images) {
        assert_eq!(guest.last_hash(disk), hash(image), "the guest and the host see the same bytes of {disk}");
    }
}

#[test]
fn sixty_four_units_of_one_device_are_all_found_and_again_after_a_reboot() {
    if !can_boot_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let socket = scratch.path("socket");
    let (mut options, mut units) = (Options::new().iothread("io0", ""), "writable=on,iothread=io0".to_owned());
    for at in 0..64 {
        options = options.null(&format!("disk{at}"), "read-zeroes=on");
        // Some on another target, and some beyond what eight bits number.
        let (target, lun) = (at / 48, if at % 48 < 40 { at % 48 } else { 300 + at });
        units += &format!(",luns.{at}.target={target},luns.{at}.lun={lun},luns.{at}.node-name=disk{at}");
    }
    let server = Server::start(&Program::egret(), &options.export_scsi("scsi", &socket, &units));
    let attach = ["--scsi", socket.to_str().expect("our own path")];
    Guest::run(&attach, &["many-units.sh", "many-units.sh"]);
    assert_eq!(server.complaints(), Vec::<String>::new(), "there is nothing to complain about");
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_disk_that_two_devices_have_is_reserved_by_one_of_them_from_the_other() {
    if !can_boot_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let sockets = ["one", "two"].map(|name| scratch.path(name));
    let pr = scratch.path("pr");
    let unit = format!("writable=on,iothread=io0,luns.0.lun=0,luns.0.node-name=disk0,luns.0.pr-file={}", pr.display());
    let options = Options::new()
        .iothread("io0", "")
        .null("disk0", "read-zeroes=on")
        .export_scsi("one", &sockets[0], &unit)
        .export_scsi("two", &sockets[1], &unit);
    let server = Server::start(&Program::egret(), &options);
    let [one, two] = sockets.each_ref().map(|socket| socket.to_str().expect("our own path"));
    Guest::run(&["--scsi", one, "--scsi", two], &["two-paths.sh"]);
    let complaints = server.complaints();
    assert!(complaints.iter().all(|line| line.contains("its guests must know of each other")), "{complaints:?}");
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_guest_sees_units_come_and_grow_and_go_and_nothing_of_a_daemon_that_is_killed() {
    if !can_boot_or_skips() {
        return;
    }
    const MIB: u64 = 1 << 20;
    let scratch = Scratch::new();
    let (socket, monitor) = (scratch.path("socket"), scratch.path("qmp"));
    let [keeper, first, second] =
        [("keeper", DISK), ("first", 8 * MIB), ("second", 8 * MIB)].map(|(name, size)| scratch.image(name, size));
    let options = Options::new()
        .iothread("io0", "")
        .iothread("io1", "")
        .disk("keeper", &keeper, "aio=io_uring")
        .disk("first", &first, "aio=io_uring,cache.direct=on")
        .disk("second", &second, "aio=threads")
        .export_scsi(
            "scsi",
            &socket,
            "writable=on,num-queues=2,iothread.0=io0,iothread.1=io1,luns.0.lun=0,luns.0.node-name=keeper",
        )
        .monitor("m", &monitor);
    let mut server = Some(Server::start(&Program::egret(), &options));
    let mut qmp = Qmp::connect(&monitor);
    let attach = ["--scsi", socket.to_str().expect("our own path"), "--num-queues", "2"];
    let guest = Guest::run_asking(&attach, &["hotplug.sh"], |asked| match asked.split_once(' ') {
        Some(("add", node)) => {
            qmp.run("egret-lun-add", json!({"id": "scsi", "lun": 1, "node-name": node}));
        }
        Some(("grow", node)) => {
            let told = qmp.run("block_resize", json!({"node-name": node, "size": 16 * MIB}));
            assert_eq!(told, json!({}), "the guest could be told");
        }
        Some(("remove", node)) => {
            qmp.run("egret-lun-del", json!({"id": "scsi", "lun": 1}));
            assert_eq!(qmp.event("EGRET_LUN_DELETED")["node-name"], node);
            qmp.run("blockdev-del", json!({"node-name": node}));
        }
        None if asked == "kill" => {
            server = None;
            server = Some(Server::start(&Program::egret(), &options));
        }
        _ => panic!("the guest asks for '{asked}'"),
    });
    let server = server.expect("it was started again");
    assert_eq!(server.complaints(), Vec::<String>::new(), "there is nothing to complain about");
    assert_eq!(server.terminate().code(), Some(0));
    for (name, image) in [("keeper", keeper), ("first", first), ("second", second)] {
        assert_eq!(guest.last_hash(name), hash(&image), "the guest and the host see the same bytes of {name}");
    }
    assert_eq!(scratch.left_behind(), Vec::<String>::new());
}

/// Two disks of one daemon, with two queues each, dealt out to its two I/O threads.
struct TwoDisks {
    iothreads: [&'static str; 2],
    disks: [&'static str; 2],
    exports: [&'static str; 2],
    /// Of QEMU's devices: the first has a split ring, the second a packed one.
    properties: [&'static str; 2],
}

impl TwoDisks {
    /// Serves the disks to a guest that exercises them, reboots and looks again; then compares the images with what
    /// the guest has read at the end.
    fn survive_a_guest(&self) -> Guest {
        let scratch = Scratch::new();
        let mut options = Options::new();
        for (number, iothread) in self.iothreads.iter().enumerate() {
            options = options.iothread(&format!("io{number}"), iothread);
        }
        let mut attach: Vec<String> = Vec::new();
        let images = [0, 1].map(|number| {
            let (node, socket) = (format!("disk{number}"), scratch.path(&format!("socket{number}")));
            let image = scratch.image(&node, DISK);
            let mut export = "writable=on,num-queues=2,iothread.0=io0,iothread.1=io1".to_owned();
            if !self.exports[number].is_empty() {
                export = format!("{export},{}", self.exports[number]);
            }
            let options_so_far = std::mem::take(&mut options);
            options = options_so_far.disk(&node, &image, self.disks[number]).export(&node, &node, &socket, &export);
            attach.extend(["--props".into(), self.properties[number].into()]);
            attach.extend(["--disk".into(), socket.to_str().expect("our own path").into()]);
            image
        });
        attach.extend(["--num-queues", "2"].map(Into::into));
        let attach: Vec<&str> = attach.iter().map(String::as_str).collect();

        let server = Server::start(&Program::egret(), &options);
        let guest = Guest::run(&attach, &["exercise.sh", "after-reboot.sh"]);
        assert_eq!(server.complaints(), Vec::<String>::new(), "there is nothing to complain about");
        assert_eq!(server.terminate().code(), Some(0));
        for (disk, image) in ["vda", "vdb"].into_iter().zip(images) {
            assert_eq!(guest.last_hash(disk), hash(&image), "the guest and the host see the same bytes of {disk}");
        }
        assert_eq!(["vda", "vdb"].map(|disk| guest.has_feature(disk, RING_PACKED)), [false, true]);
        assert_eq!(scratch.left_behind(), Vec::<String>::new());
        guest
    }
}
