//! Commands at run time: what a monitor can do to a daemon that serves, and what a hostile one cannot.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use support::attacker::{Ask, Attacker, DATA, Device, Variant};
use support::disk::Disk;
use support::port::Port;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use support::{await_some, await_that};

const MIB: u64 = 1 << 20;

/// A daemon with a monitor and nothing else, and a client of it.
fn bare(scratch: &Scratch) -> (Server, Qmp) {
    let socket = scratch.path("qmp");
    let server = Server::start(&Program::egret(), &Options::new().monitor("m", &socket));
    let qmp = Qmp::connect(&socket);
    (server, qmp)
}

fn file(node: &str, image: &Path) -> Value {
    json!({"driver": "file", "node-name": node, "filename": image})
}

fn export(id: &str, node: &str, socket: &Path) -> Value {
    json!({"type": "vhost-user-blk", "id": id, "node-name": node, "writable": true,
           "addr": {"type": "unix", "path": socket}})
}

/// A thread, a disk of `size` and its export, all made by commands.
fn with_disk(scratch: &Scratch, qmp: &mut Qmp, size: u64) {
    let image = scratch.image("disk", size);
    qmp.run("object-add", json!({"qom-type": "iothread", "id": "io0"}));
    qmp.run("blockdev-add", file("d0", &image));
    let mut object = export("e0", "d0", &scratch.path("disk"));
    object["iothread"] = "io0".into();
    qmp.run("block-export-add", object);
}

#[test]
fn a_daemon_without_objects_is_given_a_disk_that_serves_and_loses_it_again() {
    let scratch = Scratch::new();
    let (server, mut qmp) = bare(&scratch);
    with_disk(&scratch, &mut qmp, 4 * MIB);
    let mut disk = Disk::connect(&scratch.path("disk")).unwrap();
    disk.first().write_zeroes(0..MIB, blkio::ReqFlags::empty()).unwrap();
    disk.first().write_pattern(0..4 * MIB, 1).unwrap();
    disk.first().verify_pattern(0..4 * MIB, 1).unwrap();

    let exports = qmp.run("query-block-exports", json!({}));
    assert_eq!(
        exports,
        json!([{"id": "e0", "type": "vhost-user-blk", "node-name": "d0", "shutting-down": false, "io-status": "ok",
                "iothread-vq-mapping": [{"iothread": "io0", "vqs": [0]}]}])
    );
    let stats = qmp.run("query-blockstats", json!({"query-nodes": true}));
    // Zeroes are writes, as QEMU counts them.
    assert_eq!((&stats[0]["node-name"], &stats[0]["stats"]["wr_bytes"]), (&json!("d0"), &json!(5 * MIB)));
    let nodes = qmp.run("query-named-block-nodes", json!({}));
    assert_eq!((&nodes[0]["image"]["virtual-size"], &nodes[0]["ro"]), (&json!(4 * MIB), &json!(false)));

    // What is in use stays.
    assert_eq!(qmp.fail("blockdev-del", json!({"node-name": "d0"})), "Node d0 is in use");
    assert_eq!(qmp.fail("object-del", json!({"id": "io0"})), "object 'io0' is in use, can not be deleted");
    assert_eq!(qmp.fail("block-export-del", json!({"id": "e0"})), "export 'e0' still in use");
    disk.first().verify_pattern(0..4 * MIB, 1).unwrap();

    qmp.run("block-export-del", json!({"id": "e0", "mode": "hard"}));
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "e0"}));
    qmp.run("blockdev-del", json!({"node-name": "d0"}));
    qmp.run("object-del", json!({"id": "io0"}));
    assert_eq!(qmp.run("query-block-exports", json!({})), json!([]));
    assert_eq!(qmp.run("query-iothreads", json!({})), json!([]));
    assert_eq!(scratch.left_behind(), ["qmp"], "the export's socket is gone");
    drop(server);
}

#[test]
fn a_secret_is_added_and_forgotten_and_nobody_is_shown_what_it_holds() {
    let scratch = Scratch::new();
    let socket = scratch.path("qmp");
    let server = Server::start(&Program::egret().with_env("EGRET_LOG", "debug"), &Options::new().monitor("m", &socket));
    let mut qmp = Qmp::connect(&socket);
    let with = |mut keys: Value| {
        keys["qom-type"] = "secret".into();
        keys
    };
    // The same in base64.
    let hidden = ["hunter2", "aHVudGVyMg=="];
    qmp.run("object-add", with(json!({"id": "s", "data": hidden[0]})));
    qmp.run("object-add", with(json!({"id": "t", "data": hidden[1], "format": "base64"})));
    let mut said = Vec::new();
    for (keys, line) in [
        (json!({"id": "s", "data": "hunter2"}), "attempt to add duplicate property 's' to object (type 'container')"),
        (json!({"id": "u"}), "secret 'u': one of data and file is needed, and not both"),
        (
            json!({"id": "u", "data": "hunter2", "file": "/x"}),
            "secret 'u': one of data and file is needed, and not both",
        ),
        (json!({"id": "u", "data": "hunter2!", "format": "base64"}), "secret 'u': it is not base64: "),
        (
            json!({"id": "u", "data": ["hunter2"]}),
            "secret 'u': data must be text of at most 65536 bytes, got something",
        ),
        (json!({"id": "u", "datum": "hunter2"}), "Parameter 'datum' is unexpected; "),
        (json!({"data": "hunter2"}), "Parameter 'id' is missing"),
    ] {
        said.push(qmp.fail("object-add", with(keys)));
        assert!(said.last().unwrap().starts_with(line), "{said:#?}");
    }
    let known = qmp.run("query-commands", json!({}));
    let names = known.as_array().unwrap().iter().filter_map(|command| command["name"].as_str());
    for query in names.filter(|name| name.starts_with("query-")) {
        said.push(qmp.run(query, json!({})).to_string());
    }
    assert_eq!(qmp.run("qom-list", json!({"path": "/objects/s"})), json!([{"name": "type", "type": "string"}]));
    for property in ["data", "file", "format"] {
        let refused = qmp.fail("qom-get", json!({"path": "/objects/s", "property": property}));
        assert_eq!(refused, format!("Property 'secret.{property}' not found"));
    }
    for id in ["s", "t"] {
        said.push(qmp.run("qom-list", json!({"path": "/objects"})).to_string());
        qmp.run("object-del", json!({"id": id}));
        assert_eq!(qmp.fail("object-del", json!({"id": id})), format!("object '{id}' not found"));
    }
    said.extend(server.log());
    let shown = said.iter().filter(|said| hidden.iter().any(|hidden| said.contains(hidden)));
    assert_eq!(shown.collect::<Vec<_>>(), [""; 0]);
    assert!(server.terminate().success());
}

#[test]
fn a_unit_s_blockdev_has_counted_what_was_asked_of_it_and_not_of_the_units_beside() {
    let scratch = Scratch::new();
    let (monitor, socket) = (scratch.path("qmp"), scratch.path("disk"));
    let units = "writable=on,luns.0.lun=0,luns.0.node-name=d0,luns.1.lun=1,luns.1.node-name=d1";
    let options = Options::new().iothread("io0", "").null("d0", "").null("d1", "");
    let options = options.export_scsi("s0", &socket, units).monitor("m", &monitor);
    let _server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&monitor);
    let mut guest = Attacker::boot(&socket, Variant { device: Device::Scsi, packed: false }, MIB);
    let mut write = |times: u32| {
        let mut done = 0;
        while done < times {
            guest.ask(Ask::Write { at: 0 }, &[(DATA, 4096)]);
            guest.publish();
            guest.await_all();
            // A unit may have something to tell before.
            done += u32::from(guest.status() == 0);
        }
    };
    let counted = |qmp: &mut Qmp, by_node: bool| -> Vec<[Value; 3]> {
        let stats = qmp.run("query-blockstats", json!({"query-nodes": by_node}));
        let of =
            |one: &Value| ["wr_operations", "wr_bytes", "rd_operations"].map(|member| one["stats"][member].clone());
        stats.as_array().unwrap().iter().map(of).collect()
    };
    let writes = |count: u64| [count, count * 4096, 0].map(Value::from);
    write(3);
    assert_eq!(counted(&mut qmp, true), [writes(3), writes(0)]);
    // Of one that came later, and of the same with another engine.
    for lun in [0, 1] {
        qmp.run("egret-lun-del", json!({"id": "s0", "lun": lun}));
        qmp.event("EGRET_LUN_DELETED");
    }
    qmp.run("egret-lun-add", json!({"id": "s0", "lun": 0, "node-name": "d1"}));
    write(2);
    qmp.run("blockdev-reopen", json!({"options": [{"driver": "null-co", "node-name": "d1", "read-zeroes": true}]}));
    write(2);
    assert_eq!(counted(&mut qmp, true), [writes(0), writes(4)]);
    assert_eq!(counted(&mut qmp, false), [writes(7)]);
}

#[test]
fn what_a_command_adds_that_is_probably_not_meant_is_warned_of() {
    let scratch = Scratch::new();
    let (server, mut qmp) = bare(&scratch);
    with_disk(&scratch, &mut qmp, MIB);
    let addr = |name: &str| json!({"type": "unix", "path": scratch.path(name)});
    let scsi = json!({"type": "vhost-user-scsi", "id": "s0", "writable": true, "addr": addr("s0")});
    qmp.run("block-export-add", scsi);
    let lines = |about: &str| server.complaints().iter().filter(|line| line.contains(about)).count();
    qmp.run("egret-lun-add", json!({"id": "s0", "lun": 0, "node-name": "d0"}));
    let second = "export 's0': export 'e0' writes to blockdev 'd0' too; its guests must know of each other";
    await_that("a line of the unit", || lines(second) == 1);
    let blk = json!({"type": "vhost-user-blk", "id": "e2", "node-name": "d0", "writable": true, "addr": addr("e2")});
    qmp.run("block-export-add", blk);
    await_that("a line of the export", || lines("export 'e2': export 'e0' writes to blockdev 'd0' too") == 1);
    assert_eq!(lines(second), 1, "it is said once");
}

#[test]
fn commands_change_a_loaded_daemon_and_no_request_fails() {
    let scratch = Scratch::new();
    let (_server, mut qmp) = bare(&scratch);
    with_disk(&scratch, &mut qmp, 4 * MIB);
    let (socket, done) = (scratch.path("disk"), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut disk = Disk::connect(&socket).unwrap();
            let mut rounds = 0;
            while !done.load(Ordering::Relaxed) || rounds == 0 {
                disk.first().write_pattern(0..4 * MIB, rounds).unwrap();
                disk.first().verify_pattern(0..4 * MIB, rounds).unwrap();
                rounds += 1;
            }
            rounds
        });
        let set = |qmp: &mut Qmp, property: &str, value: Value| {
            qmp.run("qom-set", json!({"path": "/objects/io0", "property": property, "value": value}));
        };
        for round in 0..10 {
            for policy in ["off", "busy", "shared-window", "per-source-window", "weighted", "low-regret"] {
                set(&mut qmp, "poll-policy", json!(policy));
                set(&mut qmp, "poll-max-ns", json!(round * 1000));
            }
            set(&mut qmp, "poll-idle-ms", json!(1 + round));
            for query in [
                "query-blockstats",
                "query-named-block-nodes",
                "query-block-exports",
                "query-iothreads",
                "query-qmp-schema",
                "query-version",
                "query-commands",
            ] {
                qmp.run(query, json!({}));
            }
            let extra = format!("x{round}");
            qmp.run("object-add", json!({"qom-type": "iothread", "id": extra}));
            qmp.run("blockdev-add", json!({"driver": "null-co", "node-name": extra, "size": MIB}));
            let mut object = export(&extra, &extra, &scratch.path(&extra));
            object["iothread"] = json!(["io0", extra]);
            object["num-queues"] = json!(2);
            qmp.run("block-export-add", object);
            let mut beside = Disk::connect(&scratch.path(&extra)).unwrap();
            beside.first().write(0, &[7; 512]).unwrap();
            qmp.run("block-export-del", json!({"id": extra, "mode": "hard"}));
            assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": extra}));
            qmp.run("blockdev-del", json!({"node-name": extra}));
            qmp.run("object-del", json!({"id": extra}));
        }
        done.store(true, Ordering::Relaxed);
        assert!(load.join().expect("no request failed") > 0);
    });
}

#[test]
fn a_disk_that_grows_is_as_long_for_its_client() {
    let scratch = Scratch::new();
    let (_server, mut qmp) = bare(&scratch);
    with_disk(&scratch, &mut qmp, MIB);
    let told = qmp.run("block_resize", json!({"node-name": "d0", "size": 2 * MIB}));
    assert_eq!(told, json!({}), "there is nobody to be told");
    let mut disk = Disk::connect(&scratch.path("disk")).unwrap();
    assert_eq!(disk.capacity().unwrap(), 2 * MIB);
    disk.first().write(0, &[1; 512]).unwrap();
    let told = qmp.run("block_resize", json!({"node-name": "d0", "size": 3 * MIB}));
    assert_eq!(told, json!({"untold": ["e0"]}), "libblkio has no ear for it, and looks by itself");
    assert_eq!(disk.capacity().unwrap(), 3 * MIB);
    disk.first().write(3 * MIB - 512, &[2; 512]).unwrap();
    for (size, line) in [(MIB, "shrinking would lose data"), (3 * MIB + 1, "must be a multiple of 512")] {
        assert!(qmp.fail("block_resize", json!({"node-name": "d0", "size": size})).contains(line));
        assert_eq!(disk.capacity().unwrap(), 3 * MIB);
    }
}

#[test]
fn logical_units_come_and_go_while_their_device_serves() {
    let scratch = Scratch::new();
    let (server, mut qmp) = bare(&scratch);
    for name in ["d0", "d1"] {
        qmp.run("blockdev-add", file(name, &scratch.image(name, MIB)));
    }
    qmp.run(
        "block-export-add",
        json!({"type": "vhost-user-scsi", "id": "s0", "writable": true,
               "addr": {"type": "unix", "path": scratch.path("scsi")}}),
    );
    let mut round = || {
        qmp.run("egret-lun-add", json!({"id": "s0", "lun": 0, "node-name": "d0"}));
        qmp.run("egret-lun-add", json!({"id": "s0", "lun": 700, "target": 3, "node-name": "d1", "serial": "other"}));
        let shown = json!([{"id": "s0", "type": "vhost-user-scsi", "node-name": "", "shutting-down": false, "io-status": "ok",
            "iothread-vq-mapping": [{"iothread": "io", "vqs": [0]}],
            "luns": [
                {"target": 0, "lun": 0, "node-name": "d0", "serial": "d0"},
                {"target": 3, "lun": 700, "node-name": "d1", "serial": "other"},
            ],
        }]);
        assert_eq!(qmp.run("query-block-exports", json!({})), shown);

        // An address and a disk that are taken, and what is not there.
        for (arguments, line) in [
            (json!({"id": "s0", "lun": 0, "node-name": "d1"}), "export 's0': target 0, lun 0 is in use"),
            (json!({"id": "s0", "lun": 1, "node-name": "d1"}), "Node d1 is in use"),
            (json!({"id": "s0", "lun": 1, "node-name": "d9"}), "Cannot find device='' nor node-name='d9'"),
            (json!({"id": "s9", "lun": 1, "node-name": "d1"}), "Export 's9' is not found"),
            (json!({"id": "s0", "node-name": "d1"}), "Parameter 'lun' is missing"),
            (json!({"id": "s0", "lun": 16384, "node-name": "d1"}), "Parameter 'lun' must be 0..=16383, got 16384"),
        ] {
            assert_eq!(qmp.fail("egret-lun-add", arguments), line);
        }
        let nothing = qmp.fail("egret-lun-del", json!({"id": "s0", "lun": 3}));
        assert_eq!(nothing, "export 's0': there is nothing at target 0, lun 3");
        assert_eq!(qmp.fail("blockdev-del", json!({"node-name": "d1"})), "Node d1 is in use");

        qmp.run("block_resize", json!({"node-name": "d0", "size": MIB}));
        for (target, lun, node) in [(3, 700, "d1"), (0, 0, "d0")] {
            qmp.run("egret-lun-del", json!({"id": "s0", "target": target, "lun": lun}));
            let gone = json!({"id": "s0", "target": target, "lun": lun, "node-name": node});
            assert_eq!(qmp.event("EGRET_LUN_DELETED"), gone);
        }
    };
    round();
    let before = (server.descriptors(), server.threads());
    (0..20).for_each(|_| round());
    await_that("threads and descriptors to be gone", || is_no_more_than(&server, before));
    for name in ["d0", "d1"] {
        qmp.run("blockdev-del", json!({"node-name": name}));
    }
}

/// A thread that was joined may be listed for a moment yet, before and afterwards.
fn is_no_more_than(server: &Server, (descriptors, threads): (usize, usize)) -> bool {
    server.descriptors() <= descriptors && server.threads() <= threads
}

#[test]
fn a_thousand_exports_come_and_go_and_leave_no_descriptor_thread_or_memory() {
    let scratch = Scratch::new();
    let socket = scratch.path("qmp");
    // How many arenas there are at most is a matter of which threads have met.
    let program = Program::egret().with_env("MALLOC_ARENA_MAX", "1");
    let server = Server::start(&program, &Options::new().monitor("m", &socket));
    let mut qmp = Qmp::connect(&socket);
    let image = scratch.image("disk", MIB);
    let mut round = || {
        qmp.run("object-add", json!({"qom-type": "iothread", "id": "io0"}));
        qmp.run("blockdev-add", file("d0", &image));
        let mut object = export("e0", "d0", &scratch.path("disk"));
        object["iothread"] = "io0".into();
        qmp.run("block-export-add", object);
        qmp.run("block-export-del", json!({"id": "e0"}));
        qmp.run("blockdev-del", json!({"node-name": "d0"}));
        qmp.run("object-del", json!({"id": "io0"}));
        assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "e0"}));
    };
    // Allocators and caches reach their size.
    (0..100).for_each(|_| round());
    let before = (server.descriptors(), server.threads());
    let mut resident = server.resident_without_files();
    let mut grown = [(); 5].map(|()| {
        (0..200).for_each(|_| round());
        await_that("threads and descriptors to be gone", || is_no_more_than(&server, before));
        let less = std::mem::replace(&mut resident, server.resident_without_files());
        resident.saturating_sub(less)
    });
    // A leak would be some hundred bytes a round at the least, each time, but for what it finds room for. What an allocator has
    // at most becomes more at times, too, where threads meet as they never have before; not nearly each time.
    grown.sort_unstable();
    assert!(grown[1] < 16 << 10, "200 rounds left {grown:?} bytes behind");
}

#[test]
fn several_clients_are_served_and_hear_the_same_events() {
    let scratch = Scratch::new();
    let (one, two) = (scratch.path("one"), scratch.path("two"));
    let options = Options::new().monitor("a", &one).monitor("b", &two);
    let mut server = Server::start(&Program::egret(), &options);
    let mut clients = [Qmp::connect(&one), Qmp::connect(&one), Qmp::connect(&two)];
    let mode = std::fs::metadata(&one).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "nobody else connects");
    for (number, client) in clients.iter_mut().enumerate() {
        client.run("blockdev-add", json!({"driver": "null-co", "node-name": format!("n{number}")}));
    }
    assert_eq!(clients[0].run("query-named-block-nodes", json!({})).as_array().unwrap().len(), 3);
    clients[1].run("quit", json!({}));
    for client in &mut clients {
        assert_eq!(client.event("SHUTDOWN"), json!({"guest": false, "reason": "host-qmp-quit"}));
    }
    await_that("the daemon to end", || !server.is_alive());
    assert_eq!(scratch.left_behind(), Vec::<String>::new());
}

#[test]
fn a_client_that_reads_nothing_or_sends_no_end_holds_up_nobody_and_costs_a_bounded_amount() {
    let scratch = Scratch::new();
    let (server, mut qmp) = bare(&scratch);
    let socket = scratch.path("qmp");
    let before = server.resident();

    // Asks for the longest answer there is, over and over, and reads none.
    let mut deaf = Qmp::connect(&socket);
    deaf.stream().set_nonblocking(true).unwrap();
    while deaf.stream().write(b"{\"execute\":\"query-qmp-schema\"}").is_ok_and(|sent| sent > 0) {
        qmp.run("query-version", json!({}));
    }
    // One message without an end, and brackets without end.
    for endless in ["{\"execute\":\"".to_owned() + &"x".repeat(8 << 20), "[".repeat(8 << 20)] {
        let mut babbler = Qmp::connect(&socket);
        babbler.send(endless.as_bytes());
        let error = babbler.read().expect("an error");
        assert_eq!(error["error"]["class"], "GenericError", "{error}");
        babbler.send(b"\n{\"execute\":\"query-version\",\"id\":1}");
        assert_eq!(babbler.read().expect("an answer")["id"], 1);
    }
    // More clients than are let in: those that are in are served.
    let crowd: Vec<Qmp> = (0..70).map(|_| Qmp::connect_only(&socket)).collect();
    qmp.run("query-version", json!({}));
    drop(crowd);
    drop(deaf);
    qmp.run("query-version", json!({}));
    let grown = server.resident().saturating_sub(before);
    assert!(grown < 32 * MIB, "the daemon grew by {grown} bytes");
}

#[test]
fn the_standard_streams_are_a_monitor() {
    let mut command: Command = Program::egret().command();
    command.args(["--monitor", "stdio"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"{\"execute\":\"qmp_capabilities\"}\n{\"execute\":\"quit\",\"id\":\"bye\"}\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let answers: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(answers[0]["QMP"].is_object());
    assert_eq!(answers[1], json!({"return": {}}));
    assert_eq!(answers[2], json!({"return": {}, "id": "bye"}));
    assert_eq!(answers[3]["event"], "SHUTDOWN");
    assert_eq!((output.status.code(), answers.len()), (Some(0), 4));
}

#[test]
fn a_monitor_is_on_a_tcp_port_of_this_host_if_it_is_asked_for() {
    let port = Port::new();
    let chardev = format!("socket,id=m,host=127.0.0.1,port={port},server=on,wait=off");
    let _server = Server::start(&Program::egret(), &Options::new().words(["--chardev", &chardev, "--monitor", "m"]));
    let stream = await_some("the daemon to listen", || TcpStream::connect(("127.0.0.1", port.number())).ok());
    let mut greeting = String::new();
    BufReader::new(stream).read_line(&mut greeting).unwrap();
    assert!(greeting.starts_with("{\"QMP\":"), "{greeting}");
}

#[test]
fn a_monitor_that_cannot_be_made_is_a_refusal() {
    let scratch = Scratch::new();
    let socket = scratch.path("qmp");
    std::fs::write(&socket, "not a socket").unwrap();
    let mut command = Program::egret().command();
    let output = command.args(Options::new().monitor("m", &socket).as_words()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("chardev 'm': cannot listen on socket") && said.contains("is not a socket"), "{said}");
    assert_eq!(said.lines().count(), 1);
}
