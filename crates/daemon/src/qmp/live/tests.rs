use std::path::Path;
use std::sync::Arc;

use egret_disk::Disk;
use egret_vocabulary::Config;
use serde_json::json;

use super::*;
use crate::Daemon;
use crate::process::Inherited;
use crate::qmp::Descriptors;
use crate::qmp::commands::COMMANDS;

fn run(daemon: &mut Daemon, command: &str, arguments: Value) -> Result<Value, String> {
    let Value::Object(arguments) = arguments else { panic!("{arguments} are no arguments") };
    let command = COMMANDS.find(command).expect("the command is there");
    command
        .call(&mut Context { daemon, descriptors: &mut Descriptors::default(), commands: &COMMANDS }, arguments)
        .map_err(|e| e.text)
}

fn file(node: &str, place: &Path) -> Value {
    json!({"driver": "file", "node-name": node, "filename": place.join(format!("{node}.img"))})
}

/// Three I/O threads; the export `e0`, of four queues on the first two, writes to the file `d0`.
fn daemon(place: &Path) -> Daemon {
    let mut daemon = Daemon::start(&Config::empty(), &mut Inherited::default()).unwrap();
    for id in ["io0", "io1", "io2"] {
        run(&mut daemon, "object-add", json!({"qom-type": "iothread", "id": id})).unwrap();
    }
    std::fs::File::create(place.join("d0.img")).unwrap().set_len(1 << 20).unwrap();
    run(&mut daemon, "blockdev-add", file("d0", place)).unwrap();
    run(&mut daemon, "block-export-add", export("e0", "d0", place, true)).unwrap();
    daemon
}

fn export(id: &str, node: &str, place: &Path, writable: bool) -> Value {
    json!({"type": "vhost-user-blk", "id": id, "node-name": node, "writable": writable, "num-queues": 4,
           "iothread": ["io0", "io1"], "addr": {"type": "unix", "path": place.join(id)}})
}

fn mapping(daemon: &mut Daemon) -> Value {
    run(daemon, "query-block-exports", json!({})).unwrap()[0]["iothread-vq-mapping"].take()
}

#[test]
fn a_mapping_in_force_is_shown_and_decides_which_threads_can_go() {
    let place = tempfile::tempdir().unwrap();
    let mut daemon = daemon(place.path());
    let (of, in_use) = (|id: &str, vqs: &[u16]| json!({"iothread": id, "vqs": vqs}), "is in use, can not be deleted");
    assert_eq!(mapping(&mut daemon), json!([of("io0", &[0, 2]), of("io1", &[1, 3])]));
    let moves = [
        (0, "io2", json!([of("io2", &[0]), of("io1", &[1, 3]), of("io0", &[2])])),
        (2, "io1", json!([of("io2", &[0]), of("io1", &[1, 2, 3])])),
        (2, "io1", json!([of("io2", &[0]), of("io1", &[1, 2, 3])])),
    ];
    for (queue, to, expected) in moves {
        let moved = run(&mut daemon, "egret-move-queue", json!({"id": "e0", "queue": queue, "iothread": to}));
        assert_eq!(moved, Ok(json!({"pause-ns": 0, "drain-ns": 0})), "no client, and so nobody waited");
        assert_eq!(mapping(&mut daemon), expected);
    }
    run(&mut daemon, "object-del", json!({"id": "io0"})).unwrap();
    let refused = run(&mut daemon, "object-del", json!({"id": "io2"})).unwrap_err();
    assert!(refused.ends_with(in_use), "{refused}");
    run(&mut daemon, "egret-map-queues", json!({"id": "e0", "iothread": "io2"})).unwrap();
    assert_eq!(mapping(&mut daemon), json!([of("io2", &[0, 1, 2, 3])]));
    run(&mut daemon, "object-del", json!({"id": "io1"})).unwrap();
    let spread = json!([{"iothread": "io2", "vqs": [1]}]);
    assert!(run(&mut daemon, "egret-map-queues", json!({"id": "e0", "iothread-vq-mapping": spread})).is_err());
    run(&mut daemon, "object-add", json!({"qom-type": "iothread", "id": "io3"})).unwrap();
    let dealt = json!([{"iothread": "io3"}, {"iothread": "io2"}]);
    run(&mut daemon, "egret-map-queues", json!({"id": "e0", "iothread-vq-mapping": dealt})).unwrap();
    assert_eq!(mapping(&mut daemon), json!([of("io3", &[0, 2]), of("io2", &[1, 3])]));
}

#[test]
fn a_move_that_makes_no_sense_says_why_and_changes_nothing() {
    let place = tempfile::tempdir().unwrap();
    let mut daemon = daemon(place.path());
    let fixed = json!({"type": "vhost-user-blk", "id": "e1", "node-name": "null", "fixed-iothread": true,
                       "iothread": "io0", "addr": {"type": "unix", "path": place.path().join("e1")}});
    run(&mut daemon, "blockdev-add", json!({"driver": "null-co", "node-name": "null"})).unwrap();
    run(&mut daemon, "block-export-add", fixed).unwrap();
    let before = daemon.config().clone();
    let of = |id: &str, vqs: &[u16]| json!({"iothread": id, "vqs": vqs});
    let map = |mapping: Value| ("egret-map-queues", json!({"id": "e0", "iothread-vq-mapping": mapping}));
    let attempts = [
        (map(json!([of("io0", &[0, 1, 2])])), "export 'e0': iothread-vq-mapping gives queue 3 to no iothread"),
        (
            map(json!([of("io0", &[0, 1, 2, 3]), of("io1", &[1])])),
            "export 'e0': iothread-vq-mapping gives queue 1 to two iothreads",
        ),
        (map(json!([of("io0", &[0, 0, 1, 2, 3])])), "export 'e0': iothread-vq-mapping gives queue 0 to two iothreads"),
        (
            map(json!([of("io0", &[0, 1]), {"iothread": "io1"}])),
            "export 'e0': iothread-vq-mapping: iothread 'io1' has no vqs, and others have",
        ),
        (
            map(json!([of("io0", &[0, 1]), of("io0", &[2, 3])])),
            "export 'e0': iothread-vq-mapping names iothread 'io0' twice",
        ),
        (
            map(json!([of("io0", &[0, 1, 2, 4])])),
            "export 'e0': iothread-vq-mapping: vqs must be 0..=3 (num-queues=4), got 4",
        ),
        (map(json!([of("io9", &[0, 1, 2, 3])])), "iothread \"io9\" not found"),
        (map(json!([])), "Parameter 'iothread-vq-mapping' is missing"),
        (("egret-map-queues", json!({"id": "e0"})), "Parameter 'iothread-vq-mapping' is missing"),
        (
            ("egret-map-queues", json!({"id": "e0", "iothread": "io0", "iothread-vq-mapping": [{"iothread": "io1"}]})),
            "export 'e0': iothread and iothread-vq-mapping say the same thing twice",
        ),
        (("egret-map-queues", json!({"id": "e9", "iothread": "io0"})), "Export 'e9' is not found"),
        (
            ("egret-map-queues", json!({"id": "e1", "iothread": "io1"})),
            "export 'e1': fixed-iothread=on keeps it on iothread 'io0'",
        ),
        (
            ("egret-move-queue", json!({"id": "e1", "queue": 0, "iothread": "io1"})),
            "export 'e1': fixed-iothread=on keeps it on iothread 'io0'",
        ),
        (
            ("egret-move-queue", json!({"id": "e0", "queue": 4, "iothread": "io1"})),
            "export 'e0': queue must be 0..=3 (num-queues=4), got 4",
        ),
        (("egret-move-queue", json!({"id": "e0", "queue": 0, "iothread": "io9"})), "iothread \"io9\" not found"),
        (("egret-move-queue", json!({"id": "e9", "queue": 0, "iothread": "io0"})), "Export 'e9' is not found"),
        (("egret-move-queue", json!({"id": "e0", "iothread": "io0"})), "Parameter 'queue' is missing"),
    ];
    for ((command, arguments), line) in attempts {
        let error = run(&mut daemon, command, arguments.clone()).unwrap_err();
        assert!(error.starts_with(line), "{command} {arguments}: {error}");
        assert_eq!(*daemon.config(), before, "{line}");
    }
}

#[test]
fn a_node_is_reopened_as_all_of_its_options_say() {
    let place = tempfile::tempdir().unwrap();
    let mut daemon = daemon(place.path());
    let with = |more: Value| {
        let mut options = file("d0", place.path());
        options.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        json!({"options": [options]})
    };
    let more = json!({"aio": "io_uring", "cache": {"no-flush": true}, "discard": "unmap", "detect-zeroes": "unmap"});
    assert_eq!(
        run(&mut daemon, "blockdev-reopen", with(more)),
        Ok(json!({"pause-ns": 0, "drain-ns": 0})),
        "nobody waited"
    );
    let shown = |daemon: &mut Daemon| run(daemon, "query-named-block-nodes", json!({})).unwrap()[0].take();
    let node = shown(&mut daemon);
    assert_eq!((&node["cache"]["no-flush"], &node["detect_zeroes"]), (&json!(true), &json!("unmap")));
    let options = daemon.disks_by_name()["d0"].options().clone();
    assert_eq!((options.aio.as_str(), options.discard.as_str(), options.read_only), ("io_uring", "unmap", false));
    // What is not said is not kept.
    run(&mut daemon, "blockdev-reopen", with(json!({}))).unwrap();
    let node = shown(&mut daemon);
    assert_eq!((&node["cache"]["no-flush"], &node["detect_zeroes"]), (&json!(false), &json!("off")));

    // Nobody writes any more: it may be read-only, and then is, for those who would.
    run(&mut daemon, "block-export-del", json!({"id": "e0"})).unwrap();
    daemon.take_torn_down();
    run(&mut daemon, "blockdev-reopen", with(json!({"read-only": true}))).unwrap();
    let refused = run(&mut daemon, "block-export-add", export("e0", "d0", place.path(), true)).unwrap_err();
    assert!(refused.contains("read-only=on"), "{refused}");
    run(&mut daemon, "blockdev-reopen", with(json!({}))).unwrap();
    run(&mut daemon, "block-export-add", export("e0", "d0", place.path(), true)).unwrap();
}

#[test]
fn a_node_that_is_reopened_keeps_its_limits() {
    let place = tempfile::tempdir().unwrap();
    let mut daemon = daemon(place.path());
    let limits = json!({"id": "d0", "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 1000, "iops_rd": 0, "iops_wr": 0});
    run(&mut daemon, "block_set_io_throttle", limits).unwrap();
    let group = |daemon: &Daemon| daemon.disks_by_name()["d0"].throttle_group().expect("it is limited");
    let before = group(&daemon);
    let mut otherwise = file("d0", place.path());
    otherwise["discard"] = json!("unmap");
    run(&mut daemon, "blockdev-reopen", json!({"options": [otherwise]})).unwrap();
    assert!(Arc::ptr_eq(&before, &group(&daemon)));
}

/// A blockdev that a group of limits has over a null disk, which is written inside it.
fn throttle(node: &str, group: &str) -> Value {
    json!({"driver": "throttle", "node-name": node, "throttle-group": group, "file": {"driver": "null-co"}})
}

/// An object that is a group of limits.
fn group(id: &str, limits: Value) -> Value {
    json!({"qom-type": "throttle-group", "id": id, "limits": limits})
}

/// All limits of `block_set_io_throttle` zero, but for `iops`.
fn iops(node: &str, iops: u64) -> Value {
    json!({"id": node, "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": iops, "iops_rd": 0, "iops_wr": 0})
}

/// The groups of blockdevs, and their `iops`, as they are shown.
fn groups(daemon: &mut Daemon) -> Vec<(String, Value, Value)> {
    let nodes = run(daemon, "query-named-block-nodes", json!({})).unwrap();
    let of =
        |node: &Value| (node["node-name"].as_str().unwrap().to_owned(), node["group"].clone(), node["iops"].clone());
    nodes.as_array().unwrap().iter().map(of).collect()
}

fn is_in(node: &str, group: &str, iops: u64) -> (String, Value, Value) {
    (node.to_owned(), json!(group), json!(iops))
}

#[test]
fn a_group_of_limits_stays_while_a_blockdev_is_in_it_and_has_a_name_of_its_own() {
    let mut daemon = Daemon::start(&Config::empty(), &mut Inherited::default()).unwrap();
    run(&mut daemon, "object-add", group("g", json!({"iops-total": 500}))).unwrap();
    run(&mut daemon, "object-add", json!({"qom-type": "throttle-group", "id": "h", "x-iops-total": 7})).unwrap();
    run(&mut daemon, "blockdev-add", throttle("t0", "g")).unwrap();
    run(&mut daemon, "blockdev-add", json!({"driver": "raw", "node-name": "r0", "file": "t0"})).unwrap();
    run(&mut daemon, "blockdev-add", json!({"driver": "null-co", "node-name": "d0"})).unwrap();
    run(&mut daemon, "block_set_io_throttle", iops("d0", 3)).unwrap();
    let shown = groups(&mut daemon);
    assert_eq!(shown, [is_in("t0", "g", 500), is_in("r0", "g", 500), is_in("d0", "d0", 3)]);
    let before = daemon.config().clone();
    let of = |group: &str| throttle("t1", group);
    let inside = json!({"driver": "throttle", "node-name": "t1", "throttle-group": "h", "file": "r0"});
    let other_type = json!({"qom-type": "iothread", "id": "g"});
    let attempts = [
        (("object-del", json!({"id": "g"})), "object 'g' is in use, can not be deleted"),
        (("object-del", json!({"id": "x"})), "object 'x' not found"),
        (("object-add", group("g", json!({}))), "attempt to add duplicate property 'g' to object"),
        (("object-add", other_type), "attempt to add duplicate property 'g' to object"),
        (("object-add", group("d0", json!({}))), "A group with this name already exists"),
        (
            ("object-add", group("i", json!({"iops-total-max": 5}))),
            "throttle-group 'i': bps_max/iops_max require corresponding bps/iops values",
        ),
        (("object-add", group("i", json!({"iops": 5}))), "Parameter 'limits.iops' is unexpected"),
        (("object-add", json!({"qom-type": "throttle-group"})), "Parameter 'id' is missing"),
        (("blockdev-add", of("k")), "blockdev 't1': throttle-group: there is no throttle-group 'k'; "),
        (("blockdev-add", inside), "blockdev 't1': file leads to a second blockdev with driver=throttle"),
        (("blockdev-reopen", json!({"options": [throttle("t0", "k")]})), "blockdev 't0': throttle-group: there is no"),
        (("block_set_io_throttle", iops("r0", 5)), "blockdev 'r0' is limited by throttle-group 'g' (driver=throttle)"),
        (("block_set_io_throttle", iops("t0", 5)), "blockdev 't0' lies below another"),
    ];
    for ((command, arguments), line) in attempts {
        let error = run(&mut daemon, command, arguments.clone()).unwrap_err();
        assert!(error.starts_with(line), "{command} {arguments}: {error}");
        assert_eq!(groups(&mut daemon), shown, "{line}");
        assert_eq!(*daemon.config(), before, "{line}");
    }
    for (command, of) in [("blockdev-del", "r0"), ("blockdev-del", "t0"), ("object-del", "g"), ("object-del", "h")] {
        let key = if command == "object-del" { "id" } else { "node-name" };
        run(&mut daemon, command, json!({ key: of })).unwrap();
    }
    assert!(run(&mut daemon, "blockdev-add", throttle("t0", "g")).is_err());
}

#[test]
fn the_limits_of_a_group_change_together_while_its_disks_are_used() {
    let mut daemon = Daemon::start(&Config::empty(), &mut Inherited::default()).unwrap();
    run(&mut daemon, "object-add", group("g", json!({"iops-total": 500, "iops-total-max": 5000}))).unwrap();
    run(&mut daemon, "object-add", group("h", json!({"bps-read": 7}))).unwrap();
    for node in ["t0", "t1"] {
        run(&mut daemon, "blockdev-add", throttle(node, "g")).unwrap();
    }
    let get = |daemon: &mut Daemon, property: &str| {
        run(daemon, "qom-get", json!({"path": "/objects/g", "property": property}))
    };
    let set = |daemon: &mut Daemon, property: &str, value: Value| {
        run(daemon, "qom-set", json!({"path": "/objects/g", "property": property, "value": value}))
    };
    set(&mut daemon, "limits", json!({"iops-total": 600})).unwrap();
    assert_eq!(groups(&mut daemon), [is_in("t0", "g", 600), is_in("t1", "g", 600)]);
    let limits = get(&mut daemon, "limits").unwrap();
    assert_eq!(limits.as_object().unwrap().len(), 19);
    assert_eq!((&limits["iops-total"], &limits["iops-total-max"]), (&json!(600), &json!(5000)));
    assert_eq!(
        (get(&mut daemon, "x-iops-total"), get(&mut daemon, "type")),
        (Ok(json!(600)), Ok("throttle-group".into()))
    );
    for (property, value, line) in [
        ("limits", json!({"iops-total": 5001}), "throttle-group 'g': bps_max/iops_max cannot be lower than bps/iops"),
        ("limits", json!({"iops-total": true}), "throttle-group 'g': limits.iops-total must be 0..="),
        ("x-iops-total", json!(1), "Property cannot be set after initialization"),
        ("id", json!("x"), "Property 'throttle-group.id' is the object's name"),
        ("iops", json!(1), "Property 'throttle-group.iops' not found"),
    ] {
        let error = set(&mut daemon, property, value).unwrap_err();
        assert!(error.starts_with(line), "{property}: {error}");
        assert_eq!(get(&mut daemon, "limits").as_ref(), Ok(&limits));
    }
    // One of them goes to the other group.
    run(&mut daemon, "blockdev-reopen", json!({"options": [throttle("t1", "h")]})).unwrap();
    assert_eq!(groups(&mut daemon), [is_in("t0", "g", 600), is_in("t1", "h", 0)]);
    let group_of = |daemon: &Daemon, node: &str| daemon.disks_by_name()[node].throttle_group().unwrap();
    assert_eq!(group_of(&daemon, "t1").limits().bytes.read.average, 7);
    assert!(!Arc::ptr_eq(&group_of(&daemon, "t0"), &group_of(&daemon, "t1")));
}

#[test]
fn a_command_puts_a_disk_in_the_group_of_an_object_and_changes_its_limits_as_with_qemu() {
    let mut daemon = Daemon::start(&Config::empty(), &mut Inherited::default()).unwrap();
    run(&mut daemon, "object-add", group("g", json!({"iops-total": 500}))).unwrap();
    run(&mut daemon, "blockdev-add", throttle("t0", "g")).unwrap();
    run(&mut daemon, "blockdev-add", json!({"driver": "null-co", "node-name": "d0"})).unwrap();
    let mut joins = iops("d0", 600);
    joins["group"] = "g".into();
    run(&mut daemon, "block_set_io_throttle", joins).unwrap();
    assert_eq!(groups(&mut daemon), [is_in("t0", "g", 600), is_in("d0", "g", 600)]);
    let limits = json!({"path": "g", "property": "x-iops-total"});
    assert_eq!(run(&mut daemon, "qom-get", limits), Ok(json!(600)));
    run(&mut daemon, "blockdev-del", json!({"node-name": "t0"})).unwrap();
    assert!(run(&mut daemon, "object-del", json!({"id": "g"})).unwrap_err().contains("is in use"));
    run(&mut daemon, "block_set_io_throttle", iops("d0", 0)).unwrap();
    run(&mut daemon, "object-del", json!({"id": "g"})).unwrap();
}

#[test]
fn a_disk_that_was_locked_for_a_moment_alone_when_it_was_reopened_is_unlocked_unless_somebody_has_it_locked() {
    for is_held in [false, true] {
        let place = tempfile::tempdir().unwrap();
        let mut daemon = daemon(place.path());
        run(&mut daemon, "block-export-del", json!({"id": "e0"})).unwrap();
        daemon.take_torn_down();
        let mut lets_go = export("e1", "d0", place.path(), true);
        lets_go["allow-inactive"] = json!(true);
        run(&mut daemon, "block-export-add", lets_go).unwrap();
        let old = Arc::clone(&daemon.disks_by_name()["d0"]);
        // As by a session, which may go on to lock another disk, and fail.
        let for_a_moment = old.activate().unwrap();
        if is_held {
            run(&mut daemon, "blockdev-set-active", json!({"node-name": "d0", "active": true})).unwrap();
        }
        let mut otherwise = file("d0", place.path());
        otherwise["discard"] = json!("unmap");
        run(&mut daemon, "blockdev-reopen", json!({"options": [otherwise]})).unwrap();
        drop(for_a_moment);
        assert_eq!(daemon.disks_by_name()["d0"].is_active(), is_held);
        let elsewhere = Arc::new(Disk::open(old.options()).unwrap());
        assert_eq!(elsewhere.activate().is_ok(), !is_held);
    }
}

#[test]
fn a_layer_and_what_is_inside_it_are_reopened_by_their_names() {
    let place = tempfile::tempdir().unwrap();
    std::fs::File::create(place.path().join("f0.img")).unwrap().set_len(1 << 20).unwrap();
    let mut daemon = Daemon::start(&Config::empty(), &mut Inherited::default()).unwrap();
    let raw = |file: Value, unmap: &str| json!({"driver": "raw", "node-name": "r0", "file": file, "discard": unmap});
    run(&mut daemon, "blockdev-add", raw(file("f0", place.path()), "ignore")).unwrap();
    let discards = |daemon: &Daemon| daemon.disks_by_name()["r0"].options().discard.as_str();
    let reopen = |daemon: &mut Daemon, options: Value| run(daemon, "blockdev-reopen", json!({"options": [options]}));
    assert_eq!(discards(&daemon), "ignore");
    reopen(&mut daemon, raw(json!("f0"), "unmap")).unwrap();
    assert_eq!(discards(&daemon), "unmap", "its child is as it was");
    let mut child = file("f0", place.path());
    child["discard"] = json!("ignore");
    reopen(&mut daemon, child.clone()).unwrap();
    assert_eq!(discards(&daemon), "ignore", "the child does not let it through");
    reopen(&mut daemon, raw(file("f0", place.path()), "unmap")).unwrap();
    assert_eq!(discards(&daemon), "unmap");
    for (options, option) in
        [(raw(json!("f1"), "unmap"), "file"), (raw(file("f1", place.path()), "unmap"), "node-name")]
    {
        let error = reopen(&mut daemon, options).unwrap_err();
        assert!(error.starts_with(&format!("Cannot change the option '{option}'")), "{error}");
    }
}

#[test]
fn a_node_that_cannot_be_as_asked_stays_with_all_others_as_it_was() {
    let place = tempfile::tempdir().unwrap();
    let mut daemon = daemon(place.path());
    std::fs::File::create(place.path().join("d1.img")).unwrap().set_len(1 << 20).unwrap();
    run(&mut daemon, "blockdev-add", file("d1", place.path())).unwrap();
    run(&mut daemon, "blockdev-add", json!({"driver": "null-co", "node-name": "null", "size": 4096})).unwrap();
    let before = daemon.config().clone();
    let good =
        json!({"driver": "file", "node-name": "d1", "filename": place.path().join("d1.img"), "discard": "unmap"});
    let with = |key: &str, value: Value| {
        let mut options = file("d0", place.path());
        options[key] = value;
        options
    };
    let attempts = [
        (with("node-name", json!("d9")), "Failed to find node with node-name='d9'"),
        (json!({"driver": "null-co"}), "node-name not specified"),
        (json!({"driver": "null-co", "node-name": "d0"}), "Cannot change the option 'driver'"),
        (with("filename", json!("/elsewhere")), "Cannot change the option 'filename'"),
        (json!({"driver": "null-co", "node-name": "null", "size": 8192}), "Cannot change the option 'size'"),
        (with("read-only", json!(true)), "Read-only block node 'd0' cannot support read-write users"),
        (with("aio", json!("native")), "blockdev 'd0': aio=native needs cache.direct=on"),
        (with("detect-zeroes", json!("unmap")), "blockdev 'd0': detect-zeroes=unmap needs discard=unmap"),
        (with("colour", json!(1)), "Parameter 'options.1.colour' is unexpected"),
    ];
    for (bad, line) in attempts {
        let error = run(&mut daemon, "blockdev-reopen", json!({"options": [good, bad]})).unwrap_err();
        assert!(error.starts_with(line), "{bad}: {error}");
        assert_eq!(*daemon.config(), before, "{line}");
        assert_eq!(daemon.disks_by_name()["d1"].options().discard.as_str(), "ignore", "{line}");
    }
    // What cannot be opened is no reason to lose what is.
    std::fs::remove_file(place.path().join("d0.img")).unwrap();
    let error =
        run(&mut daemon, "blockdev-reopen", json!({"options": [good, with("aio", json!("io_uring"))]})).unwrap_err();
    assert!(error.contains("does not exist"), "{error}");
    assert_eq!(*daemon.config(), before);
    assert_eq!(daemon.disks_by_name()["d0"].options().aio.as_str(), "threads");
}
