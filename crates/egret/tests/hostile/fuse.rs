//! Descriptors of a file system whose process does not answer: what looks at them, reads them or closes them waits for as
//! long as it likes.

use std::ffi::OsStr;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egret_faultdisk::attributes;
use fuser::{
    BackgroundSession, Filesystem, MountOption, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyStatfs, Request,
    spawn_mount2,
};
use serde_json::json;

use crate::changes::await_change;
use crate::scene::{DIRECT, MIB, Scene};
use crate::support::attacker::{DATA, Share, Variant};
use crate::support::await_that;
use crate::support::qmp::Qmp;
use crate::support::scratch::{Scratch, is_root_or_skips};
use crate::support::server::{Options, Program, Server};
use crate::support::wire::*;

/// The one file.
const FILE: u64 = 2;

/// A file system of one file, whose contents never come. While it is told to be silent it answers nothing at all: who has
/// asked then waits, and not even SIGKILL ends that.
#[derive(Clone, Default)]
struct Silent {
    is_silent: Arc<AtomicBool>,
    /// Questions that are kept, because one that is dropped is answered.
    unanswered: Arc<Mutex<Vec<Box<dyn Send>>>>,
}

impl Silent {
    fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::SeqCst)
    }

    fn keep(&self, question: impl Send + 'static) {
        self.unanswered.lock().expect("no holder panics").push(Box::new(question));
    }

    fn fall_silent(&self) {
        self.is_silent.store(true, Ordering::SeqCst);
    }

    /// Answers what it was asked, with an error, and what it will be.
    fn speak_again(&self) {
        self.is_silent.store(false, Ordering::SeqCst);
        self.unanswered.lock().expect("no holder panics").clear();
    }
}

impl Filesystem for Silent {
    fn lookup(&mut self, _: &Request<'_>, _: u64, _: &OsStr, reply: ReplyEntry) {
        reply.entry(&Duration::ZERO, &attributes(FILE, MIB), 0);
    }

    fn getattr(&mut self, _: &Request<'_>, inode: u64, _: Option<u64>, reply: ReplyAttr) {
        if self.is_silent() { self.keep(reply) } else { reply.attr(&Duration::ZERO, &attributes(inode, MIB)) }
    }

    fn statfs(&mut self, _: &Request<'_>, _: u64, reply: ReplyStatfs) {
        if self.is_silent() { self.keep(reply) } else { reply.statfs(0, 0, 0, 0, 0, 512, 255, 0) }
    }

    fn read(&mut self, _: &Request<'_>, _: u64, _: u64, _: i64, _: u32, _: i32, _: Option<u64>, reply: ReplyData) {
        self.keep(reply);
    }

    // What a close waits for.
    fn flush(&mut self, _: &Request<'_>, _: u64, _: u64, _: u64, reply: ReplyEmpty) {
        if self.is_silent() { self.keep(reply) } else { reply.ok() }
    }
}

/// The file system, mounted, and its file.
struct Mounted {
    silent: Silent,
    share: Share,
    /// Its end would wait for everybody who has the file.
    _session: ManuallyDrop<BackgroundSession>,
    folder: tempfile::TempDir,
}

impl Mounted {
    /// `None`, and a word under the test's name, without root and FUSE.
    fn or_skips(test: &str) -> Option<Self> {
        if !is_root_or_skips(test, "for a file system of its own") {
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let silent = Silent::default();
        let session = spawn_mount2(silent.clone(), folder.path(), &[MountOption::RW]);
        let session = session.inspect_err(|error| egret_needs::lacks(test, format_args!("FUSE: {error}"))).ok()?;
        let file = File::options().read(true).write(true).open(folder.path().join("memory")).expect("our own file");
        let share = Share { file, guest: DATA, len: MIB };
        Some(Self { silent, share, _session: ManuallyDrop::new(session), folder })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Before anything else: nobody must be left who waits.
        self.silent.speak_again();
        let unmounted = Command::new("umount").arg("--lazy").arg(self.folder.path()).status();
        assert!(unmounted.is_ok_and(|status| status.success()) || std::thread::panicking(), "it is unmounted");
    }
}

#[test]
fn guest_memory_on_fuse_is_refused() {
    if !Program::under_test().is_egret() {
        return;
    }
    let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
    let Some(mounted) = Mounted::or_skips("guest_memory_on_fuse_is_refused") else { return };
    scene.survives("memory whose pages never come", |scene| {
        let mut wire = Wire::agree(&scene.victim, F_VERSION_1);
        assert!(wire.refuses(ADD_MEM_REG, &mounted.share.message(), &[mounted.share.file.as_fd()]));
    });
    scene.close();
}

#[test]
fn a_descriptor_that_does_not_answer_holds_up_its_own_session_alone() {
    let which = u64s(&[0]);
    let region = u64s(&[0, DATA, MIB, DATA, 0]);
    let table = [u32s(&[1, 0]), region[8..].to_vec()].concat();
    for (what, request, payload) in [
        ("as memory", ADD_MEM_REG, region),
        ("as all memory", SET_MEM_TABLE, table),
        ("as a record", SET_INFLIGHT_FD, inflight(8192, 0, 1, 128)),
        ("as a log", SET_LOG_BASE, u64s(&[4096, 0])),
        ("for a device's state", SET_DEVICE_STATE_FD, u32s(&[0, 0])),
        ("to be kicked by", SET_VRING_KICK, which.clone()),
        ("to be called by", SET_VRING_CALL, which),
        ("as the channel", SET_BACKEND_REQ_FD, Vec::new()),
        ("for nothing", SET_OWNER, Vec::new()),
    ] {
        let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
        let test = "a_descriptor_that_does_not_answer_holds_up_its_own_session_alone";
        let Some(mounted) = Mounted::or_skips(test) else { return };
        scene.survives(what, |scene| {
            let wire = Wire::agree(&scene.victim, F_VERSION_1);
            mounted.silent.fall_silent();
            wire.send(request, &payload, &[mounted.share.file.as_fd()]).expect("the socket takes it");
            scene.neighbour.await_progress();
            drop(wire);
            scene.neighbour.await_progress();
            drop(mounted);
        });
        scene.close();
    }
}

#[test]
fn descriptors_that_do_not_answer_hold_up_no_change_of_others() {
    let scratch = Scratch::new();
    let [monitor, socket] = ["qmp", "disk"].map(|name| scratch.path(name));
    let options = Options::new().monitor("m", &monitor).disk("d0", &scratch.image("disk", MIB), "").export(
        "e0",
        "d0",
        &socket,
        "writable=on",
    );
    let server = Server::start(&Program::egret(), &options);
    let Some(mounted) = Mounted::or_skips("descriptors_that_do_not_answer_hold_up_no_change_of_others") else { return };
    let mut qmp = Qmp::connect(&monitor);
    let wire = Wire::agree(&socket, F_VERSION_1);
    mounted.silent.fall_silent();
    wire.send(SET_OWNER, &[], &[mounted.share.file.as_fd(); 8]).expect("the socket takes it");
    // As many as others close for a session; it waits for them before it goes on.
    let closing = || server.sleeps().iter().filter(|(name, _)| name == "peer-close").count();
    await_that("four of them to be closed", || closing() == 4);
    qmp.run("block-export-del", json!({"id": "e0"}));
    await_change(&mut qmp);
    assert_eq!(qmp.run("query-block-exports", json!({}))[0]["shutting-down"], true);
    drop(mounted);
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "e0"}));
    assert_eq!(server.terminate().code(), Some(0));
}
