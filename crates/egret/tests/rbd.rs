//! Disks in a Ceph cluster: under load through the loss of each of its daemons, and of our own.
//!
//! `EGRET_RBD_KILLS` says how often the daemon is killed; `make soak` asks for more.

mod support;

use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use egret_needs::{Ceph, Part};
use egret_vring::vhost_user::BACKEND_CONFIG_CHANGE;
use serde_json::json;

use support::guest::Guest;
use support::http::get;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};
use support::survivor::{BLOCK, BLOCKS, Client, content};
use support::wire::SET_BACKEND_REQ_FD;
use support::{PATIENCE, await_that};

/// The cluster of tests that leave it alone.
fn shared() -> Option<&'static Ceph> {
    static CLUSTER: OnceLock<Option<Ceph>> = OnceLock::new();
    CLUSTER.get_or_init(Ceph::start).as_ref()
}

/// A disk in a cluster, exported at a socket.
fn serve(ceph: &Ceph, image: &str, more: &str, socket: &Path) -> Options {
    let conf = ceph.conf();
    let disk = format!("rbd,node-name=d0,pool=rbd,image={image},conf={}{more}", conf.display());
    Options::new().iothread("io0", "").words(["--blockdev", &disk]).export(
        "e0",
        "d0",
        socket,
        "writable=on,iothread=io0",
    )
}

/// What a command says that fails.
fn fails(options: &Options) -> String {
    let output = Program::egret().command().args(options.as_words()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stderr).unwrap()
}

/// Compares an image with what a client has written to it.
fn holds_what_was_written(ceph: &Ceph, image: &str, client: &Client) {
    let copy = ceph.dir().join(format!("{image}.copy"));
    let _ = std::fs::remove_file(&copy);
    ceph.run(&format!("rbd export --no-progress rbd/{image} {}", copy.display()));
    let holds = std::fs::read(copy).unwrap();
    for (block, bytes) in holds.chunks(BLOCK).take(BLOCKS).enumerate() {
        assert!(bytes == content(block, client.versions[block]), "block {block} is as written");
    }
}

#[test]
fn a_guest_sees_a_slow_disk_where_an_osd_or_the_monitor_is_away_and_everybody_else_sees_nothing() {
    let Some(ceph) = Ceph::start() else { return };
    ceph.run("rbd create disk --size 16M");
    let scratch = Scratch::new();
    let (socket, other, monitor) = (scratch.path("rbd"), scratch.path("other"), scratch.path("qmp"));
    let options = serve(&ceph, "disk", ",connect-timeout=3", &socket)
        .disk("d1", &scratch.image("other.img", 1 << 20), "")
        .export("e1", "d1", &other, "writable=on,iothread=io0")
        .monitor("m", &monitor)
        .metrics(&scratch.path("metrics"))
        .words(["--shutdown-timeout=2"]);
    let mut server = Server::start(&Program::egret(), &options);
    let mut client = Client::new(false);
    client.connect(&socket);
    client.load(300);
    for part in [Part::Osd, Part::Mon] {
        ceph.kill(part);
        // The monitor is not needed for requests while its map holds.
        let waits = part == Part::Osd;
        let load = std::thread::spawn(move || {
            client.load(300);
            client
        });
        let mut guest = Guest::boot(&other);
        guest.read_honestly();
        drop(guest);
        let mut qmp = Qmp::connect(&monitor);
        assert!(qmp.run("query-named-block-nodes", json!({})).is_array());
        assert!(get(&scratch.path("metrics"), "/metrics").unwrap().1.contains("egret_"));
        assert!(!waits || !load.is_finished(), "there is nobody to do it");
        ceph.revive(part);
        client = load.join().unwrap();
    }
    assert_eq!(server.complaints(), Vec::<String>::new());
    client.drain();
    holds_what_was_written(&ceph, "disk", &client);
    // Nothing waits for a cluster that is away at the end either, and what is left behind is named.
    ceph.kill(Part::Osd);
    client.load(0);
    assert_eq!(server.end().code(), Some(1));
    let said = server.complaints().join("\n");
    assert!(said.contains("export 'e0': 32 requests have not ended in 2 s; blockdev 'd0'"), "{said}");
    assert!(!other.exists());
    // The next daemon does what this one has left behind, when there is somebody to do it.
    ceph.revive(Part::Osd);
    // It takes its time to be there for all.
    ceph.run("rbd info disk");
    client.finish(&options, &socket);
    holds_what_was_written(&ceph, "disk", &client);
}

#[test]
fn a_guest_sees_no_error_where_each_node_of_three_is_killed_and_comes_back() {
    let Some(ceph) = Ceph::start_nodes() else { return };
    ceph.run("rbd create disk --size 16M");
    let scratch = Scratch::new();
    let socket = scratch.path("socket");
    let mut server = Server::start(&Program::egret(), &serve(&ceph, "disk", "", &socket));
    let mut client = Client::new(false);
    client.connect(&socket);
    let during = |mut client: Client, what: &dyn Fn()| {
        let load = std::thread::spawn(move || {
            client.load(2000);
            client
        });
        what();
        load.join().unwrap()
    };
    for node in Ceph::NODES {
        client = during(client, &|| ceph.kill(node));
        client.load(300);
        client = during(client, &|| ceph.revive(node));
    }
    client.drain();
    client.wire = None;
    assert_eq!(server.complaints(), Vec::<String>::new());
    assert_eq!(server.end().code(), Some(0));
    holds_what_was_written(&ceph, "disk", &client);
}

#[test]
fn a_daemon_killed_under_load_is_taken_over_by_the_next_and_nothing_old_lands_on_top() {
    let Some(ceph) = shared() else { return };
    let kills = std::env::var("EGRET_RBD_KILLS").map_or(4, |kills| kills.parse().unwrap());
    ceph.run("rbd create killed --size 16M");
    let scratch = Scratch::new();
    let socket = scratch.path("socket");
    let options = serve(ceph, "killed", "", &socket);
    let mut client = Client::new(false);
    for kill in 0..kills {
        let server = Server::start(&Program::egret(), &options);
        client.connect(&socket);
        client.load(200);
        let says =
            || server.complaints().iter().any(|line| line.contains("breaking the exclusive lock of 127.0.0.1:0/"));
        if kill > 0 {
            await_that("it to say whose lock it breaks", says);
        }
        assert_eq!(says(), kill > 0, "{:?}", server.complaints());
        // Dropping it is SIGKILL.
        drop(server);
    }
    client.finish(&options, &socket);
    holds_what_was_written(ceph, "killed", &client);
    let blocked = ceph.run("ceph osd blocklist ls");
    assert!(blocked.lines().filter(|line| line.starts_with("127.0.0.1:0/")).count() >= kills, "{blocked}");
    assert_eq!(ceph.run("rbd lock ls killed"), "", "the last one gave it back");
}

#[test]
fn a_second_daemon_is_refused_and_told_who_writes() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create one --size 16M");
    let scratch = Scratch::new();
    let first = Server::start(&Program::egret(), &serve(ceph, "one", "", &scratch.path("first")));
    let second = serve(ceph, "one", "", &scratch.path("second"));
    let said = fails(&second);
    assert!(said.contains("cannot open 'rbd/one': its exclusive lock is held by 127.0.0.1:0/"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    // Another program is refused as well.
    let mut bench = Command::new("timeout");
    bench.args(["20", "rbd", "bench", "--io-type", "write", "--io-size", "4K", "--io-total", "4K", "one"]);
    assert!(!bench.env("CEPH_CONF", ceph.conf()).output().unwrap().status.success());
    assert_eq!(first.terminate().code(), Some(0));
    Server::start(&Program::egret(), &second);
}

#[test]
fn a_guest_whose_lock_was_taken_away_waits_until_its_disk_is_opened_anew() {
    let Some(ceph) = shared() else { return };
    for (image, more) in [("taken", ""), ("moved", ",allow-inactive=on")] {
        ceph.run(&format!("rbd create {image} --size 16M"));
        let scratch = Scratch::new();
        let (socket, monitor) = (scratch.path("socket"), scratch.path("qmp"));
        let disk = json!({"driver": "rbd", "node-name": "d0", "pool": "rbd", "image": image, "conf": ceph.conf()});
        let options = Options::new().words(["--blockdev", &disk.to_string()]).monitor("m", &monitor);
        let options = options.export("e0", "d0", &socket, &format!("writable=on{more}"));
        let mut server = Server::start(&Program::egret(), &options);
        let (mut client, mut qmp) = (Client::new(false), Qmp::connect(&monitor));
        client.connect(&socket);
        client.load(200);
        let locks: serde_json::Value =
            serde_json::from_str(&ceph.run(&format!("rbd lock ls {image} --format json"))).unwrap();
        let [id, locker] = ["id", "locker"].map(|name| locks[0][name].as_str().unwrap().to_owned());
        let is_removed = Arc::new(AtomicBool::new(false));
        let load = std::thread::spawn({
            let is_removed = Arc::clone(&is_removed);
            move || {
                // However fast it is beside the command that takes the lock away.
                while !is_removed.load(Ordering::Relaxed) {
                    client.load(100);
                }
                client.load(1000);
                client
            }
        });
        let mut remove = Command::new("rbd");
        remove.args(["lock", "remove", image, &id, &locker]).env("CEPH_CONF", ceph.conf());
        let removed = remove.status();
        is_removed.store(true, Ordering::Relaxed);
        assert!(removed.unwrap().success());
        let mut status = || qmp.run("query-block-exports", json!({}))[0]["io-status"].take();
        await_that("the export to stop", || status() == "failed");
        // Nothing goes on by itself, and not on the connection that there was.
        qmp.run("block-export-resume", json!({"id": "e0"}));
        let mut status = || qmp.run("query-block-exports", json!({}))[0]["io-status"].take();
        await_that("it to stop again", || status() == "failed");
        assert!(!load.is_finished());
        qmp.run("blockdev-reopen", json!({"options": [disk]}));
        qmp.run("block-export-resume", json!({"id": "e0"}));
        let mut client = load.join().unwrap();
        client.drain();
        client.wire = None;
        assert_eq!(server.end().code(), Some(0), "{:?}", server.log());
        let said = server.complaints().join("\n");
        assert!(said.contains(&format!("'rbd/{image}': another client has taken its exclusive lock")), "{said}");
        assert_eq!(ceph.run(&format!("rbd lock ls {image}")), "");
        holds_what_was_written(ceph, image, &client);
    }
}

#[test]
fn a_guest_is_told_of_another_size_whoever_has_changed_it() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create grown --size 16M");
    let scratch = Scratch::new();
    let (socket, monitor) = (scratch.path("socket"), scratch.path("qmp"));
    let server = Server::start(&Program::egret(), &serve(ceph, "grown", "", &socket).monitor("m", &monitor));
    let mut guest = Guest::boot(&socket);
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    guest.wire.must(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    let mut told = || {
        let mut message = [0; 12];
        ours.read_exact(&mut message).unwrap();
        assert_eq!(message[..4], BACKEND_CONFIG_CHANGE.to_le_bytes());
    };
    ceph.run("rbd resize --no-progress grown --size 24M");
    told();
    let mut qmp = Qmp::connect(&monitor);
    let size = |qmp: &mut Qmp| {
        let nodes = qmp.run("query-named-block-nodes", json!({}));
        nodes[0]["image"]["virtual-size"].as_u64().unwrap()
    };
    ceph.run("rbd resize --no-progress grown --size 32M");
    await_that("the size to be known", || size(&mut qmp) == 32 << 20);
    qmp.run("block_resize", json!({ "node-name": "d0", "size": 64 << 20 }));
    assert_eq!(size(&mut qmp), 64 << 20);
    assert!(ceph.run("rbd info grown").contains("size 64 MiB"));
    drop(server);
}

#[test]
fn a_disk_is_named_by_secrets_monitors_and_settings_alone_and_a_snapshot_is_read() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd namespace create rbd/tenant");
    ceph.run("rbd create rbd/tenant/disk --size 16M");
    ceph.run("rbd snap create rbd/tenant/disk@then");
    let key = Command::new("ceph")
        .args(["auth", "get-or-create-key", "client.guest", "mon", "profile rbd", "osd", "profile rbd pool=rbd"])
        .env("CEPH_CONF", ceph.conf())
        .output()
        .unwrap();
    let key = String::from_utf8(key.stdout).unwrap().trim().to_owned();
    let conf = std::fs::read_to_string(ceph.conf()).unwrap();
    let port = conf.lines().find_map(|line| line.strip_prefix("mon_host = v2:127.0.0.1:")).unwrap();
    let scratch = Scratch::new();
    std::fs::write(scratch.path("key"), &key).unwrap();
    std::fs::write(scratch.path("empty.conf"), "[global]\nkeyring = /dev/null\n").unwrap();
    let secret = format!("secret,id=key,format=base64,file={}", scratch.path("key").display());
    let named = |more: &str, socket: &Path, writable: &str| {
        let disk = format!(
            "rbd,node-name=d0,pool=rbd,namespace=tenant,image=disk,user=guest,key-secret=key,conf={},server.0.host=127.0.0.1,\
             server.0.port={port},auth-client-required.0=cephx,settings.rados_osd_op_timeout=60{more}",
            scratch.path("empty.conf").display()
        );
        let export = Options::new().words(["--object", &secret, "--blockdev", &disk]);
        export.export("e0", "d0", socket, writable)
    };
    let now = Server::start(&Program::egret(), &named("", &scratch.path("now"), "writable=on"));
    Guest::boot(&scratch.path("now")).read_honestly();
    let then = Server::start(&Program::egret(), &named(",snapshot=then", &scratch.path("then"), "writable=off"));
    Guest::boot(&scratch.path("then")).read_honestly();
    assert!(fails(&named(",snapshot=then", &scratch.path("no"), "writable=on")).contains("read-only=on"));
    assert_eq!((now.terminate().code(), then.terminate().code()), (Some(0), Some(0)));
    // A key that is another's.
    std::fs::write(scratch.path("key"), key.chars().rev().collect::<String>()).unwrap();
    let said = fails(&named("", &scratch.path("no"), "writable=on"));
    assert!(said.lines().count() == 1, "{said}");
}

#[test]
fn one_thread_completes_a_connections_requests_unless_a_setting_says_otherwise() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create threads --size 16M");
    let scratch = Scratch::new();
    for (setting, expected) in [("", 1), (",settings.librados_thread_count=3", 3)] {
        let socket = scratch.path(&format!("socket{expected}"));
        let server = Server::start(&Program::egret(), &serve(ceph, "threads", setting, &socket));
        // A thread takes its name itself, when it comes to run.
        await_that(&format!("{expected} threads with '{setting}'"), || {
            let names = server.each_thread("comm");
            names.iter().filter(|name| name.starts_with("io_context_pool")).count() == expected
        });
        assert_eq!(server.terminate().code(), Some(0));
    }
}

#[test]
fn an_encrypted_image_is_read_with_its_passphrase_and_refused_without() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create sealed --size 64M");
    let scratch = Scratch::new();
    std::fs::write(scratch.path("pass"), "open").unwrap();
    std::fs::write(scratch.path("wrong"), "shut").unwrap();
    ceph.run(&format!("rbd encryption format rbd/sealed luks2 {}", scratch.path("pass").display()));
    let sealed = |pass: &str, socket: &Path| {
        let secret = format!("secret,id=pass,file={}", scratch.path(pass).display());
        serve(ceph, "sealed", ",encrypt.format=luks2,encrypt.key-secret=pass", socket).words(["--object", &secret])
    };
    let (socket, monitor) = (scratch.path("socket"), scratch.path("qmp"));
    let server = Server::start(&Program::egret(), &sealed("pass", &socket).monitor("m", &monitor));
    Guest::boot(&socket).read_honestly();
    // Nor does it come to be read without while a guest has it.
    let bare = json!({"driver": "rbd", "node-name": "d0", "pool": "rbd", "image": "sealed", "conf": ceph.conf()});
    let refused = Qmp::connect(&monitor).fail("blockdev-reopen", json!({"options": [bare]}));
    assert!(refused.starts_with("Cannot change the option 'encrypt'"), "{refused}");
    assert_eq!(server.terminate().code(), Some(0));
    let said = fails(&sealed("wrong", &scratch.path("no")));
    assert!(said.contains("the passphrase of encrypt.key-secret does not open it"), "{said}");
}

#[test]
fn a_monitor_adds_the_secret_that_an_image_is_attached_with_and_takes_it_back() {
    let Some(ceph) = shared() else { return };
    ceph.run("rbd create before --size 16M");
    ceph.run("rbd create later --size 64M");
    let scratch = Scratch::new();
    let [pass, socket, monitor] = ["pass", "socket", "qmp"].map(|name| scratch.path(name));
    std::fs::write(&pass, "open").unwrap();
    ceph.run(&format!("rbd encryption format rbd/later luks2 {}", pass.display()));
    // Without a disk in a cluster the sandbox would leave it no network.
    let options = serve(ceph, "before", "", &scratch.path("before")).monitor("m", &monitor);
    let server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&monitor);
    let encrypt = json!({"format": "luks2", "key-secret": "pass"});
    let disk = json!({"driver": "rbd", "node-name": "d1", "pool": "rbd", "image": "later", "conf": ceph.conf(), "encrypt": encrypt});
    let refused = qmp.fail("blockdev-add", disk.clone());
    assert!(refused.contains("encrypt.key-secret: there is no secret 'pass'"), "{refused}");
    qmp.run("object-add", json!({"qom-type": "secret", "id": "pass", "data": "open"}));
    qmp.run("blockdev-add", disk);
    let addr = json!({"type": "unix", "path": socket});
    qmp.run(
        "block-export-add",
        json!({"type": "vhost-user-blk", "id": "e1", "node-name": "d1", "writable": true, "addr": addr}),
    );
    Guest::boot(&socket).read_honestly();
    assert_eq!(qmp.fail("object-del", json!({"id": "pass"})), "object 'pass' is in use, can not be deleted");
    qmp.run("block-export-del", json!({"id": "e1", "mode": "hard"}));
    qmp.event("BLOCK_EXPORT_DELETED");
    qmp.run("blockdev-del", json!({"node-name": "d1"}));
    qmp.run("object-del", json!({"id": "pass"}));
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_daemon_that_is_confined_without_a_cluster_says_so_where_a_monitor_adds_one() {
    let scratch = Scratch::new();
    let (monitor, disk) = (scratch.path("qmp"), json!({"driver": "rbd", "node-name": "d1", "pool": "p", "image": "i"}));
    let options = Options::new().null("d0", "").monitor("m", &monitor);
    let _server = Server::start(&Program::egret(), &options);
    let said = Qmp::connect(&monitor).fail("blockdev-add", disk);
    let line = "blockdev 'd1': cannot open 'p/i': the sandbox leaves no network to a daemon that is started without a disk of \
                driver=rbd; start egret with one, or with --sandbox=off";
    assert_eq!(said, line);
}
