//! Disks that fill up, fail or lose their power under a guest.

use std::fs::File;
use std::ops::ControlFlow;
use std::time::Duration;

use egret_faultdisk::{Effect, Fault, IoType, Order, Survivors};
use egret_loadgen::random::Random;
use serde_json::{Value, json};

use crate::console::{Guest, hash};
use crate::support::await_within;
use crate::support::qmp::Qmp;
use crate::support::scratch::{Scratch, is_root_or_skips};
use crate::support::server::{Options, Program, Server};
use crate::support::small::SmallFileSystem;
use crate::support::vm::can_boot_or_skips;

const MIB: u64 = 1 << 20;

/// Waits as long as a guest without hardware help may take on a busy host.
fn await_guest(what: &str, mut holds: impl FnMut() -> bool) {
    await_within(Duration::from_secs(240), what, || holds().then_some(()));
}

fn can_boot_as_root_or_skips(what: &str) -> bool {
    can_boot_or_skips() && is_root_or_skips(what)
}

#[test]
fn a_guest_sees_nothing_of_disks_that_fill_up_or_fail_and_goes_on_when_they_are_well() {
    if !can_boot_as_root_or_skips("for a file system that is full") {
        return;
    }
    let scratch = Scratch::new();
    let small = SmallFileSystem::mount(&scratch, 64 * MIB);
    let (thin, sick) = (small.path().join("thin"), scratch.image("sick", 64 * MIB));
    File::create(&thin).and_then(|file| file.set_len(64 * MIB)).expect("an image");
    let [full, failing, monitor] = ["full", "failing", "qmp"].map(|name| scratch.path(name));
    let error =
        "inject-error.0.event=none,inject-error.0.iotype=write,inject-error.0.sector=40000,inject-error.0.once=on";
    let options = Options::new()
        .monitor("m", &monitor)
        .iothread("io0", "")
        .disk("thin", &thin, "aio=io_uring")
        .disk("healthy", &sick, "aio=native,cache.direct=on")
        .words(["--blockdev".to_owned(), format!("driver=blkdebug,node-name=sick,image=healthy,{error}")])
        .export("full", "thin", &full, "writable=on,iothread=io0,num-queues=2,werror=enospc")
        .export_scsi(
            "failing",
            &failing,
            "writable=on,iothread=io0,num-queues=2,rerror=stop,werror=stop,luns.0.lun=0,luns.0.node-name=sick",
        );
    let mut server = Some(Server::start(&Program::egret(), &options));
    let ballast = small.fill(40 * MIB);
    let [full, failing] = [&full, &failing].map(|socket| socket.to_str().expect("our own path"));
    let attach = ["--disk", full, "--scsi", failing, "--num-queues", "2"];
    let status = |qmp: &mut Qmp| -> [Value; 2] {
        let all = qmp.run("query-block-exports", json!({}));
        ["full", "failing"].map(|id| {
            let mut exports = all.as_array().expect("a list").iter();
            exports.find(|export| export["id"] == id).expect("it is there")["io-status"].clone()
        })
    };
    let guest = Guest::run_asking(&attach, &["full.sh"], |asked| {
        assert_eq!(asked, "help");
        let mut qmp = Qmp::connect(&monitor);
        await_guest("both to stop", || status(&mut qmp) == ["nospace", "failed"]);
        // Whoever comes next finds them in the record, and has the same trouble.
        server = None;
        server = Some(Server::start(&Program::egret(), &options));
        let mut qmp = Qmp::connect(&monitor);
        await_guest("both to stop again", || status(&mut qmp) == ["nospace", "failed"]);
        std::fs::remove_file(&ballast).expect("our own file");
        await_guest("space to be found", || status(&mut qmp) == ["ok", "failed"]);
        qmp.run("block-export-resume", json!({"id": "failing"}));
    });
    assert_eq!(server.map(|server| server.terminate().code()), Some(Some(0)));
    for (name, image) in [("full", &thin), ("failing", &sick)] {
        assert_eq!(guest.last_hash(name), hash(image), "the guest and the host see the same bytes of {name}");
    }
}

/// How often a database's disk loses its power.
fn losses() -> usize {
    std::env::var("EGRET_GUEST_POWER_LOSSES")
        .map_or(3, |times| times.parse().expect("EGRET_GUEST_POWER_LOSSES is a number"))
}

#[test]
fn a_database_has_every_transaction_that_it_has_committed_when_its_guest_s_power_was_cut() {
    if !can_boot_as_root_or_skips("for a disk that loses its power") {
        return;
    }
    const ENGINES: [&str; 5] = [
        "aio=io_uring,cache.direct=on",
        "aio=threads",
        "aio=native,cache.direct=on",
        "aio=io_uring",
        "aio=threads,cache.direct=on",
    ];
    let scratch = Scratch::new();
    let disk = scratch.fault_disk(64 * MIB);
    let mut random = Random::new(1);
    let (mut committed, mut acknowledged) = (0, 0);
    for loss in 0..=losses() {
        let socket = scratch.path(&format!("e{loss}"));
        let options = Options::new().iothread("io0", "").disk("d0", &disk.path(), ENGINES[loss % 5]);
        // In turns, and each of them with either device.
        let turn = (loss + loss / 4) % 4;
        let (is_write_through, block) = (turn == 1 || turn == 2, if turn < 2 { 512 } else { 4096 });
        let through = if is_write_through { "on" } else { "off" };
        let export = format!("writable=on,writethrough={through},logical-block-size={block},iothread=io0");
        let (options, way) = match loss % 2 {
            0 => (options.export("e0", "d0", &socket, &export), "--disk"),
            _ => {
                let unit = format!("{export},luns.0.lun=0,luns.0.node-name=d0");
                (options.export_scsi("e0", &socket, &unit), "--scsi")
            }
        };
        let server = Server::start(&Program::egret(), &options);
        let attach = [way, socket.to_str().expect("our own path")];
        let mut has_booted = false;
        let (guest, ended) = Guest::watch(&attach, &["database.sh"], |line| {
            if let Some(number) = line.strip_prefix("EGRET-HOLDS ") {
                let number: u64 = number.parse().expect("a number");
                assert!(number >= committed, "loss {loss}: {committed} was committed, and it has {number}");
                has_booted = true;
                if loss == losses() {
                    return ControlFlow::Break(());
                }
                // At a flush, if the guest needs any, or at any request; some of them early, while the journal is what is
                // written.
                let is_at_flush = random.below(2) == 0 && !is_write_through;
                let (iotype, most) = if is_at_flush { (Some(IoType::Flush), 60) } else { (None, 400) };
                let after = random.below(most);
                let fault = Fault { iotype, sectors: None, after, times: Some(1), effect: Effect::PowerOff };
                disk.tell(Order::Inject(fault)).expect("it listens");
            }
            if let Some(number) = line.strip_prefix("EGRET-COMMITTED ") {
                committed = number.parse().expect("a number");
                acknowledged += 1;
            }
            // What it reads is in its memory; nothing that it writes can succeed.
            if line == "EGRET-POWER-LOST" { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        assert!(ended.is_none() && has_booted, "loss {loss}: the guest has failed:\n{}", guest.console);
        if loss < losses() {
            let is_on = disk.tell(Order::Status).expect("it listens").is_on;
            assert!(!is_on, "loss {loss}: a request has failed of a disk that has its power:\n{}", guest.console);
        }
        drop(server);
        disk.tell(Order::PowerOn(Survivors::Random(random.below(u64::MAX)))).expect("an image");
        disk.tell(Order::Clear).expect("it listens");
    }
    println!("{} losses of power, {acknowledged} transactions", losses());
    assert!(acknowledged > 0, "something was promised");
}
