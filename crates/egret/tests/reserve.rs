//! Persistent reservations that are kept in a file (`pr-file`): who was fenced stays fenced, whatever becomes of the daemon.

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use support::attacker::{Ask, Attacker, DATA, Device, Variant};
use support::has_or_skips;
use support::qmp::Qmp;
use support::scratch::Scratch;
use support::server::{Options, Program, Server};

const MIB: u64 = 1 << 20;

const REGISTER: u8 = 0;
const PREEMPT: u8 = 4;
const REGISTER_AND_IGNORE: u8 = 6;
/// Write exclusive, registrants only: as clusters have it.
const KIND: u8 = 5;

const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;
const CONFLICT: u8 = 0x18;

/// A guest of one of the exports.
struct Guest(Attacker);

impl Guest {
    /// Connects, and hears of the power on.
    fn boot(scratch: &Scratch, name: &str) -> Self {
        let mut guest = Self(Attacker::boot(&scratch.path(name), Variant { device: Device::Scsi, packed: false }, MIB));
        assert_eq!(guest.ask(Ask::ReadKeys, 16), CHECK_CONDITION, "a power on is told");
        guest
    }

    fn ask(&mut self, ask: Ask, len: u32) -> u8 {
        self.0.ask(ask, &[(DATA, len)]);
        self.0.publish();
        self.0.await_all();
        self.0.status()
    }

    fn write(&mut self) -> u8 {
        self.ask(Ask::Write { at: 0 }, 512)
    }

    /// A PERSISTENT RESERVE OUT with these keys.
    fn reserve(&mut self, action: u8, keys: [u64; 2], aptpl: bool) -> u8 {
        let flags = [0, 0, 0, 0, u8::from(aptpl), 0, 0, 0];
        self.0.data[0].put(DATA, &[keys[0].to_be_bytes(), keys[1].to_be_bytes(), flags].concat());
        self.ask(Ask::Reserve { action, kind: KIND }, 24)
    }

    /// The one key that is registered, if any.
    fn key(&mut self) -> Option<u64> {
        self.0.data[0].put(DATA, &[0; 16]);
        assert_eq!(self.ask(Ask::ReadKeys, 16), GOOD);
        let answer: [u8; 16] = self.0.data[0].get(DATA);
        let (header, key) = answer.split_at(8);
        (header[7] == 8).then(|| u64::from_be_bytes(key.try_into().expect("8 bytes")))
    }
}

/// A disk that two exports have, whose reservations are kept.
fn two_exports(scratch: &Scratch) -> Options {
    let options = Options::new().iothread("io0", "").null("d0", "");
    let unit = format!("writable=on,luns.0.lun=0,luns.0.node-name=d0,luns.0.pr-file={}", scratch.path("pr").display());
    { ["a", "b"] }.into_iter().fold(options, |options, name| options.export_scsi(name, &scratch.path(name), &unit))
}

fn start(options: &Options) -> Server {
    Server::start(&Program::egret(), options)
}

#[test]
fn a_node_that_was_fenced_stays_fenced_however_the_daemon_ends() {
    for (signal, aptpl) in [(Signal::KILL, true), (Signal::KILL, false), (Signal::TERM, true), (Signal::TERM, false)] {
        let scratch = Scratch::new();
        let options = two_exports(&scratch);
        let mut server = start(&options);
        let [mut a, mut b] = ["a", "b"].map(|name| Guest::boot(&scratch, name));
        assert_eq!((a.reserve(REGISTER, [0, 1], aptpl), b.reserve(REGISTER, [0, 2], aptpl)), (GOOD, GOOD));
        assert_eq!(a.reserve(1, [1, 0], false), GOOD);
        assert_eq!((a.write(), b.write()), (GOOD, GOOD));
        assert_eq!(b.reserve(PREEMPT, [2, 1], false), GOOD);
        for _ in 0..2 {
            server.send(signal);
            server.await_end();
            drop((a, b));
            server = start(&options);
            (a, b) = (Guest::boot(&scratch, "a"), Guest::boot(&scratch, "b"));
            assert_eq!((a.write(), b.write()), (CONFLICT, GOOD), "{signal:?}, APTPL {aptpl}");
            assert_eq!(a.reserve(REGISTER, [1, 3], aptpl), CONFLICT, "its key is gone");
        }
    }
}

#[test]
fn what_was_registered_is_there_after_a_kill_at_any_moment() {
    let scratch = Scratch::new();
    let options = two_exports(&scratch);
    let (mut registered, mut interrupted) = (0, 0);
    let mut round = 0;
    while round < 20 || interrupted == 0 {
        assert!(round < 1000, "no change was interrupted");
        round += 1;
        let mut server = start(&options);
        let mut guest = Guest::boot(&scratch, "a");
        let found = guest.key().unwrap_or(0);
        assert!(found == registered || found == registered + 1, "{found}, and {registered} was acknowledged");
        registered = found;
        // One at least, however slow the machine is.
        assert_eq!(guest.reserve(REGISTER_AND_IGNORE, [0, registered + 1], true), GOOD);
        registered += 1;
        // Of each round another moment within the time that a change takes.
        let kills_at = Instant::now() + Duration::from_micros(3000 + round % 20 * 137);
        while guest.0.is_served() {
            if Instant::now() > kills_at {
                let next = (registered + 1).to_be_bytes();
                guest.0.data[0].put(DATA, &[[0; 8], next, [0, 0, 0, 0, 1, 0, 0, 0]].concat());
                guest.0.ask(Ask::Reserve { action: REGISTER_AND_IGNORE, kind: 0 }, &[(DATA, 24)]);
                guest.0.publish();
                // It may be at any point of the change, or past it.
                while Instant::now() < kills_at + Duration::from_micros(round % 20 * 53) {}
                break;
            }
            assert_eq!(guest.reserve(REGISTER_AND_IGNORE, [0, registered + 1], true), GOOD);
            registered += 1;
        }
        server.send(Signal::KILL);
        server.await_end();
        if guest.0.is_served() {
            registered += 1;
        } else {
            interrupted += 1;
        }
    }
    println!("{registered} changes, {interrupted} of them interrupted");
}

#[test]
fn a_change_is_on_stable_storage_before_it_takes_the_place_of_the_one_before_and_then_its_place_is() {
    if !has_or_skips("strace") {
        return;
    }
    let scratch = Scratch::new();
    let record = scratch.path("record");
    let server = Server::start(&Program::egret().recorded(&record), &two_exports(&scratch));
    assert_eq!(Guest::boot(&scratch, "a").reserve(REGISTER, [0, 1], true), GOOD);
    server.terminate();
    let text = std::fs::read_to_string(&record).expect("a record");
    let calls = text.lines().filter_map(|line| line.split_once("<egret-reserved> "));
    let calls = calls.filter_map(|(_, call)| call.trim_start().split_once('(')).map(|(call, _)| call);
    let calls: Vec<_> = calls.filter(|call| ["write", "fsync", "renameat"].contains(call)).collect();
    let one_change = ["write", "fsync", "renameat", "fsync"];
    // Behind the last is the bell of who waits, if its loop sleeps.
    assert_eq!(calls[..8], [one_change, one_change].concat(), "at the start, and the change");
}

#[test]
fn a_change_that_failed_when_the_new_file_was_in_place_already_has_not_happened_for_the_next_daemon_either() {
    if !has_or_skips("strace") {
        return;
    }
    // Its thread flushes a file and the directory at the start, with the first change, and with the second; then, so that
    // all is as before, a third time: the directory can be flushed again, or not.
    for fails in ["6", "6+2"] {
        let scratch = Scratch::new();
        let options = two_exports(&scratch);
        let (record, inject) = (scratch.path("record"), format!("inject=fsync:error=EIO:when={fails}"));
        let record = record.to_str().expect("our own path");
        let strace = ["strace", "-D", "-f", "-e", "signal=none", "-e", "trace=fsync", "-e", &inject, "-o", record];
        let mut server = Server::start(&Program::egret().after(strace), &options);
        let mut guest = Guest::boot(&scratch, "a");
        assert_eq!(guest.reserve(REGISTER, [0, 1], true), GOOD);
        assert_eq!(guest.reserve(REGISTER_AND_IGNORE, [0, 2], true), CHECK_CONDITION);
        assert_eq!(guest.key(), Some(1));
        server.send(Signal::KILL);
        server.await_end();
        drop(guest);
        let _server = start(&options);
        assert_eq!(Guest::boot(&scratch, "a").key(), Some(1), "{fails}");
    }
}

/// Why a daemon does not start.
fn refused(options: &Options) -> String {
    let output = Program::egret().command().args(options.as_words()).output().expect("egret runs");
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).expect("text");
    let mut lines = said.lines().filter(|line| !line.contains("its guests must know of each other"));
    let line = lines.next().expect("a line").to_owned();
    assert_eq!(lines.next(), None, "one line says it");
    line
}

#[test]
fn a_disk_whose_reservations_cannot_be_trusted_is_refused_with_one_line() {
    let scratch = Scratch::new();
    let options = two_exports(&scratch);
    let pr = scratch.path("pr");
    start(&options).terminate();
    let whole = std::fs::read_to_string(&pr).expect("the file was made");
    let line = |contents: &str| {
        std::fs::write(&pr, contents).expect("our own file");
        refused(&options).replace(&pr.display().to_string(), "PR")
    };
    let damaged = line(&whole[..whole.len() / 2]);
    assert!(damaged.starts_with("egret: export 'a': target 0, lun 0: pr-file 'PR' is damaged (EOF"), "{damaged}");
    let future = line("{\"egret-reservations\": 7}");
    assert!(
        future
            .ends_with("pr-file 'PR' is of format 7, and this egret knows format 1 alone: start the one that wrote it")
    );
    std::fs::write(&pr, whole.replace("\"d0\"", "\"d1\"")).expect("our own file");
    assert!(refused(&options).contains("is damaged (its checksum is of something else)"));
    // A copy is as good.
    std::fs::write(&pr, whole).expect("our own file");
    start(&options).terminate();
}

#[test]
fn exports_of_one_disk_keep_its_reservations_in_one_file_and_no_other_disk_does() {
    let scratch = Scratch::new();
    let unit = |pr: &Path, more: &str| {
        format!("writable=on,luns.0.lun=0,luns.0.pr-file={},luns.0.node-name={more}", pr.display())
    };
    let [one, two] = ["one", "two"].map(|name| scratch.path(name));
    let options = |second: &str| {
        Options::new()
            .null("d0", "")
            .null("d1", "")
            .export_scsi("a", &scratch.path("a"), &unit(&one, "d0"))
            .export_scsi("b", &scratch.path("b"), second)
    };
    let without = "writable=on,luns.0.lun=0,luns.0.node-name=d0";
    for second in [unit(&two, "d0"), unit(&one, "d0,luns.0.serial=other"), without.to_owned()] {
        let line = refused(&options(&second));
        assert!(
            line.contains("export 'b': target 0, lun 0: guests of another export see blockdev 'd0' otherwise"),
            "{line}"
        );
    }
    let line = refused(&options(&unit(&one, "d1")));
    assert!(line.ends_with("is another unit's, of this daemon or another"), "{line}");
    start(&options(&unit(&two, "d1"))).terminate();
}

#[test]
fn a_unit_that_is_taken_away_leaves_its_file_to_another_though_its_guest_asks_for_nothing() {
    let scratch = Scratch::new();
    let socket = scratch.path("qmp");
    let pr = scratch.path("pr");
    let unit = format!("writable=on,luns.0.lun=0,luns.0.node-name=d0,luns.0.pr-file={}", pr.display());
    let options = Options::new().null("d0", "").export_scsi("a", &scratch.path("a"), &unit).monitor("m", &socket);
    let server = start(&options);
    let mut qmp = Qmp::connect(&socket);
    let mut guest = Guest::boot(&scratch, "a");
    assert_eq!(guest.write(), GOOD);
    qmp.run("egret-lun-del", json!({"id": "a", "lun": 0}));
    qmp.event("EGRET_LUN_DELETED");
    qmp.run("blockdev-del", json!({"node-name": "d0"}));
    qmp.run("blockdev-add", json!({"driver": "null-co", "node-name": "d0", "size": MIB}));
    qmp.run("egret-lun-add", json!({"id": "a", "lun": 0, "node-name": "d0", "pr-file": pr}));
    server.terminate();
}
