//! Limits on disks: set by a monitor while a client is connected, or those of the configuration.
//!
//! They are so low that what waits for them waits for hours, unless something else lets it go.

mod support;

use std::mem::MaybeUninit;

use blkio::ReqFlags;
use serde_json::{Value, json};
use support::disk::Disk;
use support::guest::Guest;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use support::wire::{GET_VRING_BASE, SET_VRING_ENABLE, u32s};
use support::{PATIENCE, await_that};

const BLOCK: usize = 4096;

/// A daemon with the disks `d0` and `d1`, on a thread each, and a client of it.
fn two_disks(scratch: &Scratch) -> (Server, Qmp) {
    let mut options = Options::new().monitor("m", &scratch.path("qmp"));
    for n in 0..2 {
        let (thread, node, export) = (format!("io{n}"), format!("d{n}"), format!("e{n}"));
        options = options.iothread(&thread, "").null(&node, "").export(
            &export,
            &node,
            &scratch.path(&export),
            &format!("writable=on,iothread={thread}"),
        );
    }
    let server = Server::start(&Program::egret(), &options);
    (server, Qmp::connect(&scratch.path("qmp")))
}

/// All limits zero, but for those of `some`.
fn limits(node: &str, some: Value) -> Value {
    let mut all = json!({"id": node, "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
    all.as_object_mut().unwrap().append(&mut some.as_object().unwrap().clone());
    all
}

/// So many blocks at once, and then a byte a second.
fn blocks_at_once(blocks: usize) -> Value {
    json!({"bps": 1, "bps_max": blocks * BLOCK})
}

/// Has so many reads begin, and waits for none.
fn begin_reads(disk: &mut Disk, count: usize) {
    let (queue, buffer) = disk.first().parts();
    for slot in 0..count {
        // SAFETY: the buffer is larger than these blocks together.
        let at = unsafe { buffer.add(slot * BLOCK) };
        queue.read((slot * BLOCK) as u64, at, BLOCK, slot, ReqFlags::empty());
    }
    queue.do_io(&mut [], 0, None, None).unwrap();
}

/// Waits for so many to end well.
fn end_reads(disk: &mut Disk, count: usize) {
    let (queue, _) = disk.first().parts();
    let mut completions: Vec<_> = (0..count).map(|_| MaybeUninit::uninit()).collect();
    let ended = queue.do_io(&mut completions, count, Some(&mut PATIENCE.clone()), None).unwrap();
    assert_eq!(ended, count);
    // SAFETY: `do_io` has filled all of them.
    assert!(completions.iter().all(|completion| unsafe { completion.assume_init_ref() }.ret == 0));
}

fn reads_of(qmp: &mut Qmp, export: &str) -> u64 {
    let stats = qmp.run("query-blockstats", json!({}));
    let of = stats.as_array().unwrap().iter().find(|entry| entry["device"] == export);
    of.unwrap()["stats"]["rd_operations"].as_u64().unwrap()
}

#[test]
fn a_burst_passes_and_the_rest_waits_until_the_limit_is_lifted() {
    let scratch = Scratch::new();
    let (_server, mut qmp) = two_disks(&scratch);
    let mut disk = Disk::connect(&scratch.path("e0")).unwrap();
    qmp.run("block_set_io_throttle", limits("d0", blocks_at_once(4)));
    begin_reads(&mut disk, 16);
    // One begins as long as the burst is not over its brim.
    end_reads(&mut disk, 5);
    qmp.run("block_set_io_throttle", limits("d0", blocks_at_once(3)));
    end_reads(&mut disk, 4);
    qmp.run("block_set_io_throttle", limits("d0", json!({})));
    end_reads(&mut disk, 7);
    assert_eq!(reads_of(&mut qmp, "e0"), 16);
}

#[test]
fn what_waits_goes_when_its_time_has_come_whatever_the_loop_sleeps_in() {
    for monitor in ["io_uring", "epoll", "ppoll"] {
        let scratch = Scratch::new();
        let (qmp, socket) = (scratch.path("qmp"), scratch.path("disk"));
        let options = Options::new()
            .monitor("m", &qmp)
            .iothread("io0", &format!("fd-monitor={monitor}"))
            .null("d0", "")
            .export("e0", "d0", &socket, "writable=on,iothread=io0");
        let _server = Server::start(&Program::egret(), &options);
        let mut disk = Disk::connect(&socket).unwrap();
        Qmp::connect(&qmp).run("block_set_io_throttle", limits("d0", json!({"iops": 500})));
        // 51 at once, and one every other millisecond.
        for _ in 0..4 {
            begin_reads(&mut disk, 50);
            end_reads(&mut disk, 50);
        }
    }
}

#[test]
fn the_disks_of_a_group_share_its_limits_and_others_have_their_own() {
    let scratch = Scratch::new();
    let (_server, mut qmp) = two_disks(&scratch);
    let shown = |qmp: &mut Qmp, key: &str| {
        let nodes = qmp.run("query-named-block-nodes", json!({}));
        nodes.as_array().unwrap().iter().map(|node| node[key].clone()).collect::<Vec<_>>()
    };
    let mut disks = ["e0", "e1"].map(|export| Disk::connect(&scratch.path(export)).unwrap());
    for node in ["d0", "d1"] {
        qmp.run("block_set_io_throttle", limits(node, json!({"bps": 1, "bps_max": 10 * BLOCK, "group": "g"})));
    }
    assert_eq!(shown(&mut qmp, "group"), ["g", "g"]);
    assert_eq!(shown(&mut qmp, "bps_max"), [10 * BLOCK, 10 * BLOCK]);
    disks.iter_mut().for_each(|disk| begin_reads(disk, 8));
    await_that("both to have used their burst up", || reads_of(&mut qmp, "e0") + reads_of(&mut qmp, "e1") == 11);
    // One that is taken into a group of its own leaves the other with its limits.
    qmp.run("block_set_io_throttle", limits("d1", json!({"iops": 7, "group": "h"})));
    end_reads(&mut disks[1], 8);
    assert_eq!(shown(&mut qmp, "group"), ["g", "h"]);
    assert_eq!(shown(&mut qmp, "iops"), [0, 7]);
    qmp.run("block_set_io_throttle", limits("d0", json!({})));
    end_reads(&mut disks[0], 8);
    assert_eq!(shown(&mut qmp, "group"), [Value::Null, json!("h")]);
}

#[test]
fn requests_that_wait_for_a_limit_hold_up_no_deletion_and_no_end() {
    let scratch = Scratch::new();
    let (server, mut qmp) = two_disks(&scratch);
    let mut disks = ["e0", "e1"].map(|export| Disk::connect(&scratch.path(export)).unwrap());
    for (node, disk) in ["d0", "d1"].into_iter().zip(&mut disks) {
        qmp.run("block_set_io_throttle", limits(node, blocks_at_once(1)));
        begin_reads(disk, 16);
        end_reads(disk, 2);
    }
    qmp.run("block-export-del", json!({"id": "e0", "mode": "hard"}));
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "e0"}));
    end_reads(&mut disks[0], 14);
    assert!(server.terminate().success());
    end_reads(&mut disks[1], 14);
}

#[test]
fn a_client_that_stops_its_ring_again_and_again_has_what_fills_it_twice_and_then_no_more_than_the_limits() {
    const READS: u16 = 5;
    let scratch = Scratch::new();
    let (_server, mut qmp) = two_disks(&scratch);
    qmp.run("block_set_io_throttle", limits("d0", blocks_at_once(2)));
    let boot = || {
        let guest = Guest::boot(&scratch.path("e0"));
        (0..READS).for_each(|read| guest.describe_read_at(3 * read, BLOCK as u32));
        guest
    };
    let offer = |guest: &mut Guest| (0..READS).for_each(|read| guest.offer(3 * read));
    let mut guest = boot();
    offer(&mut guest);
    await_that("one over the brim, and the rest to wait", || guest.used() == 3 && guest.is_taken_up());
    // A drain does not wait for limits, and the first is made up for while the ring runs.
    guest.stop();
    assert_eq!(guest.used(), READS);
    offer(&mut guest);
    assert!(guest.try_kick_anew());
    await_that("the rest to wait", || guest.is_taken_up());
    guest.stop();
    assert_eq!(guest.used(), 2 * READS);
    offer(&mut guest);
    for _ in 0..20 {
        assert!(guest.try_kick_anew(), "it is to go on when its time has come");
        for enabled in [0, 1] {
            guest.wire.must(SET_VRING_ENABLE, &u32s(&[0, enabled]), &[]);
        }
        assert!(guest.try_kick_anew());
        guest.wire.ask(GET_VRING_BASE, &u32s(&[0, 0])).unwrap();
    }
    assert_eq!(guest.used(), 2 * READS);
    drop(guest);
    // It finds what it owes when it comes again, and nobody takes its export for idle.
    let mut again = boot();
    offer(&mut again);
    assert_eq!(qmp.fail("block-export-del", json!({"id": "e0"})), "export 'e0' still in use");
    again.wire.ask(GET_VRING_BASE, &u32s(&[0, 0])).unwrap();
    assert_eq!(again.used(), 0);
    assert!(again.try_kick_anew());
    qmp.run("block_set_io_throttle", limits("d0", json!({})));
    await_that("all of them", || again.used() == READS);
}

#[test]
fn a_ring_goes_on_by_itself_when_what_its_drain_let_go_has_been_made_up_for() {
    let scratch = Scratch::new();
    let (_server, mut qmp) = two_disks(&scratch);
    let mut guest = Guest::boot(&scratch.path("e0"));
    // Two at once, and then ten a second.
    qmp.run("block_set_io_throttle", limits("d0", json!({"bps": 10 * BLOCK})));
    for ended in [5, 10, 15] {
        (0..5).for_each(|read| guest.describe_read_at(3 * read, BLOCK as u32));
        (0..5).for_each(|read| guest.offer(3 * read));
        assert!(guest.try_kick_anew());
        await_that("all of them", || guest.used() == ended);
    }
}

#[test]
fn a_ring_that_waits_to_start_holds_up_no_deletion_and_no_end() {
    let scratch = Scratch::new();
    let (server, mut qmp) = two_disks(&scratch);
    let mut guests = ["e0", "e1"].map(|export| Guest::boot(&scratch.path(export)));
    for (node, guest) in ["d0", "d1"].into_iter().zip(&mut guests) {
        qmp.run("block_set_io_throttle", limits(node, blocks_at_once(1)));
        (0..4).for_each(|read| guest.describe_read_at(3 * read, BLOCK as u32));
        for ended in [4, 8] {
            (0..4).for_each(|read| guest.offer(3 * read));
            await_that("all but one over the brim to wait", || guest.is_taken_up());
            assert!(guest.try_kick_anew());
            assert_eq!(guest.used(), ended);
        }
    }
    qmp.run("block-export-del", json!({"id": "e0", "mode": "hard"}));
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "e0"}));
    assert!(server.terminate().success());
}

#[test]
fn limits_stay_with_a_disk_that_is_opened_anew() {
    let scratch = Scratch::new();
    let socket = scratch.path("qmp");
    let _server = Server::start(&Program::egret(), &Options::new().monitor("m", &socket));
    let mut qmp = Qmp::connect(&socket);
    qmp.run("blockdev-add", json!({"driver": "null-co", "node-name": "d0", "size": 1 << 20}));
    qmp.run("block_set_io_throttle", limits("d0", blocks_at_once(1)));
    // It was open for reading alone.
    qmp.run(
        "block-export-add",
        json!({"type": "vhost-user-blk", "id": "e0", "node-name": "d0", "writable": true,
               "addr": {"type": "unix", "path": scratch.path("e0")}}),
    );
    let mut disk = Disk::connect(&scratch.path("e0")).unwrap();
    begin_reads(&mut disk, 3);
    end_reads(&mut disk, 2);
    qmp.run("block_set_io_throttle", limits("d0", json!({})));
    end_reads(&mut disk, 1);
}

#[test]
fn limits_of_the_configuration_hold_in_the_daemon_that_follows_one_that_was_killed() {
    let scratch = Scratch::new();
    let (monitor, file) = (scratch.path("qmp"), scratch.path("limits.toml"));
    let sockets = ["e0", "e1"].map(|export| scratch.path(export));
    let mut text =
        format!("[[throttle-group]]\nid = \"g\"\nlimits = {{ bps-total = 1, bps-total-max = {} }}\n", 4 * BLOCK);
    for (n, socket) in sockets.iter().enumerate() {
        text += &format!(
            "[[blockdev]]\nnode-name = \"d{n}\"\ndriver = \"throttle\"\nthrottle-group = \"g\"\n\
             file = {{ driver = \"null-co\", size = 1048576 }}\n\
             [[export]]\ntype = \"vhost-user-blk\"\nid = \"e{n}\"\nnode-name = \"d{n}\"\n\
             addr = {{ type = \"unix\", path = {socket:?} }}\nwritable = true\n"
        );
    }
    std::fs::write(&file, text).unwrap();
    let options = Options::new().words(["--config", file.to_str().unwrap()]).monitor("m", &monitor);
    let options = sockets.iter().fold(options, |options, socket| options.listening(socket));
    for _ in 0..2 {
        let server = Server::start(&Program::egret(), &options);
        let mut qmp = Qmp::connect(&monitor);
        let nodes = qmp.run("query-named-block-nodes", json!({}));
        assert_eq!(nodes.as_array().unwrap().len(), 2);
        for node in nodes.as_array().unwrap() {
            let shown = ["drv", "group", "bps", "bps_max"].map(|key| node[key].clone());
            assert_eq!(shown, [json!("throttle"), json!("g"), json!(1), json!(4 * BLOCK)]);
        }
        let mut disks = sockets.each_ref().map(|socket| Disk::connect(socket).unwrap());
        disks.iter_mut().for_each(|disk| begin_reads(disk, 8));
        // They share them: one begins as long as the burst is not over its brim.
        await_that("both to have used their burst up", || reads_of(&mut qmp, "e0") + reads_of(&mut qmp, "e1") == 5);
        drop(server);
    }
}

#[test]
fn what_waits_for_the_limits_of_an_object_goes_when_those_change_or_its_blockdev_is_in_another() {
    let scratch = Scratch::new();
    let (monitor, socket) = (scratch.path("qmp"), scratch.path("e0"));
    let group =
        |id: &str| ["--object".to_owned(), format!("throttle-group,id={id},x-bps-total=1,x-bps-total-max=4096")];
    let options = Options::new().words(group("g")).words(group("h")).null("d0", "");
    let options =
        options.words(["--blockdev", "throttle,node-name=t0,throttle-group=g,file=d0"]).monitor("m", &monitor);
    let _server = Server::start(&Program::egret(), &options.export("e0", "t0", &socket, "writable=on"));
    let mut qmp = Qmp::connect(&monitor);
    let mut disk = Disk::connect(&socket).unwrap();
    begin_reads(&mut disk, 16);
    end_reads(&mut disk, 2);
    assert_eq!(reads_of(&mut qmp, "e0"), 2);
    let set = |limits: Value| json!({"path": "/objects/g", "property": "limits", "value": limits});
    qmp.run("qom-set", set(json!({"bps-total-max": 3 * BLOCK})));
    end_reads(&mut disk, 4);
    assert_eq!(reads_of(&mut qmp, "e0"), 6);
    let other = json!({"driver": "throttle", "node-name": "t0", "throttle-group": "h", "file": "d0"});
    qmp.run("blockdev-reopen", json!({"options": [other]}));
    end_reads(&mut disk, 10);
    // It is in that one no more.
    begin_reads(&mut disk, 8);
    end_reads(&mut disk, 2);
    qmp.run("qom-set", set(json!({"bps-total-max": 100 * BLOCK})));
    assert_eq!(reads_of(&mut qmp, "e0"), 18);
    qmp.run("object-del", json!({"id": "g"}));
    qmp.run("qom-set", json!({"path": "h", "property": "limits", "value": {"bps-total": 0, "bps-total-max": 0}}));
    end_reads(&mut disk, 6);
}

#[test]
fn limits_that_make_no_sense_are_refused_in_qemus_words() {
    let scratch = Scratch::new();
    let (_server, mut qmp) = two_disks(&scratch);
    for (node, some, error) in [
        ("d9", json!({"bps": 1}), "Device 'd9' not found"),
        ("", json!({"bps": 1}), "Need exactly one of 'device' and 'id'"),
        ("d0", json!({"device": "d0"}), "Need exactly one of 'device' and 'id'"),
        (
            "d0",
            json!({"bps": 1, "bps_rd": 1}),
            "bps/iops/max total values and read/write values cannot be used at the same time",
        ),
        ("d0", json!({"iops_max": 1}), "bps_max/iops_max require corresponding bps/iops values"),
        ("d0", json!({"iops": 2, "iops_max": 1}), "bps_max/iops_max cannot be lower than bps/iops"),
        ("d0", json!({"iops": 2, "iops_max_length": 9}), "burst length set without burst rate"),
        ("d0", json!({"iops": 2, "iops_max": 9, "iops_max_length": 0}), "the burst length cannot be 0"),
        ("d0", json!({"bps": 2, "iops_size": 9}), "iops size requires an iops value to be set"),
        ("d0", json!({"iops": -1}), "Parameter 'iops' must be 0..=1000000000000000, got -1"),
    ] {
        assert_eq!(qmp.fail("block_set_io_throttle", limits(node, some)), error);
    }
    assert_eq!(qmp.fail("block_set_io_throttle", json!({"id": "d0"})), "Parameter 'bps' is missing");
    assert!(qmp.run("query-named-block-nodes", json!({}))[0]["group"].is_null());
}
