//! Descriptors of a file system whose process does not answer: what looks at them, reads them or closes them waits for as
//! long as it likes.

use std::ffi::OsStr;
use std::fs::File;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{ptr, slice, thread};

use egret_faultdisk::attributes;
use egret_nbd::protocol::{Headers, command};
use egret_vring::vhost_user::F_LOG_ALL;
use fuser::{
    BackgroundSession, Filesystem, MountOption, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyStatfs, Request,
    spawn_mount2,
};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;
use serde_json::json;

use crate::changes::await_change;
use crate::scene::{DIRECT, GIB, MIB, Scene};
use crate::support::attacker::{Attacker, DATA, Device, Variant, new_eventfd};
use crate::support::await_that;
use crate::support::guest::Share;
use crate::support::nbd_client::NbdClient;
use crate::support::qmp::Qmp;
use crate::support::scratch::{Scratch, is_root_or_skips};
use crate::support::server::{Options, Program, Server, await_stopped};
use crate::support::wire::*;

/// The one file.
const FILE: u64 = 2;

/// A file system of one file, whose contents never come. While it is told to be silent it answers nothing at all: who has
/// asked then waits, and not even SIGKILL ends that.
#[derive(Clone, Default)]
struct Silent {
    is_silent: Arc<AtomicBool>,
    /// It has spoken again: what is read fails from then on.
    is_over: Arc<AtomicBool>,
    /// Questions that are kept, because one that is dropped is answered.
    unanswered: Arc<Mutex<Vec<Box<dyn Send>>>>,
    /// How many were kept but for closes: each program that another test starts closes the file before it begins.
    asked: Arc<AtomicUsize>,
}

impl Silent {
    fn is_silent(&self) -> bool {
        self.is_silent.load(Ordering::SeqCst)
    }

    fn keep(&self, question: impl Send + 'static) {
        let mut unanswered = self.unanswered.lock().expect("no holder panics");
        // It may have spoken again since it was looked at: what is dropped here is answered.
        if !self.is_over.load(Ordering::SeqCst) {
            unanswered.push(Box::new(question));
        }
    }

    fn keep_and_count(&self, question: impl Send + 'static) {
        self.keep(question);
        self.asked.fetch_add(1, Ordering::SeqCst);
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    fn fall_silent(&self) {
        self.is_silent.store(true, Ordering::SeqCst);
    }

    /// Answers what it was asked, with an error, and what it will be.
    fn speak_again(&self) {
        let mut unanswered = self.unanswered.lock().expect("no holder panics");
        self.is_over.store(true, Ordering::SeqCst);
        self.is_silent.store(false, Ordering::SeqCst);
        unanswered.clear();
    }
}

impl Filesystem for Silent {
    fn lookup(&mut self, _: &Request<'_>, _: u64, _: &OsStr, reply: ReplyEntry) {
        reply.entry(&Duration::ZERO, &attributes(FILE, MIB), 0);
    }

    fn getattr(&mut self, _: &Request<'_>, inode: u64, _: Option<u64>, reply: ReplyAttr) {
        if self.is_silent() { self.keep_and_count(reply) } else { reply.attr(&Duration::ZERO, &attributes(inode, MIB)) }
    }

    fn statfs(&mut self, _: &Request<'_>, _: u64, reply: ReplyStatfs) {
        if self.is_silent() { self.keep_and_count(reply) } else { reply.statfs(0, 0, 0, 0, 0, 512, 255, 0) }
    }

    fn read(&mut self, _: &Request<'_>, _: u64, _: u64, _: i64, _: u32, _: i32, _: Option<u64>, reply: ReplyData) {
        if self.is_over.load(Ordering::SeqCst) {
            reply.error(Errno::IO.raw_os_error())
        } else {
            self.keep_and_count(reply)
        }
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
    fn or_skips() -> Option<Self> {
        if !is_root_or_skips("for a file system of its own") {
            return None;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let silent = Silent::default();
        let session = spawn_mount2(silent.clone(), folder.path(), &[MountOption::RW]);
        let session = session.inspect_err(|error| egret_needs::this_test_lacks(format_args!("FUSE: {error}"))).ok()?;
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
    let Some(mounted) = Mounted::or_skips() else { return };
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
        let Some(mounted) = Mounted::or_skips() else { return };
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
    let Some(mounted) = Mounted::or_skips() else { return };
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

#[test]
fn a_client_that_has_left_descriptors_that_do_not_answer_and_a_record_unreceived_holds_up_no_end_of_its_export() {
    let scratch = Scratch::new();
    let [monitor, socket] = ["qmp", "disk"].map(|name| scratch.path(name));
    let options = Options::new().monitor("m", &monitor).disk("d0", &scratch.image("disk", MIB), "");
    let server = Server::start(&Program::egret(), &options.export("e0", "d0", &socket, ""));
    let Some(mounted) = Mounted::or_skips() else { return };
    let mut qmp = Qmp::connect(&monitor);
    let wire = Wire::agree(&socket, F_VERSION_1);
    mounted.silent.fall_silent();
    // As many as a session does not wait for.
    wire.send(SET_OWNER, &[], &[mounted.share.file.as_fd(); 4]).expect("the socket takes it");
    wire.send(GET_INFLIGHT_FD, &inflight(0, 0, 1, 128), &[]).expect("the socket takes it");
    wire.send(u32::MAX, &[], &[]).expect("the socket takes it");
    await_that("the session to be over", || !server.complaints().is_empty());
    qmp.run("block-export-del", json!({"id": "e0"}));
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "e0"}));
    await_change(&mut qmp);
    drop((mounted, wire));
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn an_image_that_does_not_answer_when_it_is_to_be_locked_holds_up_no_change_of_others() {
    let Some(mounted) = Mounted::or_skips() else { return };
    let image = mounted.folder.path().join("memory");
    let scratch = Scratch::new();
    let [monitor, socket] = ["qmp", "disk"].map(|name| scratch.path(name));
    let options = Options::new().monitor("m", &monitor).disk("d0", &image, "cache.direct=off");
    let options = options.export("e0", "d0", &socket, "writable=on,allow-inactive=on").null("d1", "");
    let (units, other) = ("writable=on,allow-inactive=on,luns.0.lun=0,luns.0.node-name=d1", scratch.path("other"));
    let options = options.export_scsi("e1", &other, units);
    let server = Server::start(&Program::egret(), &options);
    let mut qmp = Qmp::connect(&monitor);
    let mut running = Attacker::boot(&other, Variant { device: Device::Scsi, packed: false }, MIB);
    running.read_honestly();
    mounted.silent.fall_silent();
    let guest = thread::spawn(move || Attacker::boot(&socket, Variant::PLAIN, MIB));
    await_that("the daemon to ask how long the image is", || mounted.silent.asked() > 0);
    // By hand, and for a guest that runs.
    for (command, arguments) in [
        ("blockdev-set-active", json!({"node-name": "d0", "active": true})),
        ("egret-lun-add", json!({"id": "e1", "lun": 1, "node-name": "d0"})),
    ] {
        let refused = qmp.fail(command, arguments);
        assert!(refused.contains("does not answer: it could not be locked in 5 s"), "{command}: {refused}");
    }
    qmp.run("block-export-del", json!({"id": "e0", "mode": "hard"}));
    await_change(&mut qmp);
    drop(mounted);
    // It may find that it came to nothing.
    drop(guest.join());
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "e0"}));
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn what_a_client_over_nbd_that_has_gone_has_asked_of_an_image_that_does_not_answer_holds_up_no_change() {
    let Some(mounted) = Mounted::or_skips() else { return };
    let scratch = Scratch::new();
    let [monitor, socket] = ["qmp", "nbd"].map(|name| scratch.path(name));
    let options = Options::new()
        .monitor("m", &monitor)
        .disk("d0", &mounted.folder.path().join("memory"), "cache.direct=off")
        .words(["--nbd-server".to_owned(), format!("addr.type=unix,addr.path={}", socket.display())])
        .words(["--export", "nbd,id=e0,node-name=d0,name=disk"])
        .listening(&socket);
    let server = Server::start(&Program::egret(), &options);
    // Whatever happens it speaks again before the daemon's end is waited for.
    let mounted = mounted;
    let mut qmp = Qmp::connect(&monitor);
    let mut client = NbdClient::connect(&socket, "disk", Headers::Structured);
    mounted.silent.fall_silent();
    client.ask(0, command::BLOCK_STATUS, 0, MIB, &[]);
    await_that("the daemon to ask what is allocated", || mounted.silent.asked() > 0);
    drop(client);
    await_that("the export to be in use no more", || qmp.try_run("block-export-del", json!({"id": "e0"})).is_ok());
    await_change(&mut qmp);
    assert_eq!(qmp.run("query-block-exports", json!({}))[0]["shutting-down"], true);
    drop(mounted);
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "e0"}));
    assert_eq!(server.terminate().code(), Some(0));
}

/// An epoll set with this in it that stays locked: the kernel copies an event to a page of the file, which does not come
/// before the file system speaks again. Who closes `fd` last waits for that.
fn lock_set_of(fd: &impl AsFd, mounted: &Mounted) -> JoinHandle<()> {
    let set = epoll::create(epoll::CreateFlags::CLOEXEC).expect("a set");
    let ready = eventfd(1, EventfdFlags::CLOEXEC).expect("an eventfd");
    for fd in [ready.as_fd(), fd.as_fd()] {
        epoll::add(&set, fd, EventData::new_u64(0), EventFlags::IN).expect("our own set");
    }
    let file = mounted.share.file.try_clone().expect("a descriptor");
    let before = mounted.silent.asked();
    let thread = thread::spawn(move || {
        let _ready = ready;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, of a file that nobody cuts off, and nobody else knows of it.
        let page = unsafe { mmap(ptr::null_mut(), 4096, protection, MapFlags::PRIVATE, &file, 0) }.expect("a page");
        // SAFETY: it is as long, and is written by the kernel alone, which says so if it cannot.
        let events = unsafe { slice::from_raw_parts_mut(page.cast::<MaybeUninit<epoll::Event>>(), 16) };
        let waited = epoll::wait(&set, events, None).map(|_| ());
        assert_eq!(waited, Err(Errno::FAULT), "the page has not come");
        // SAFETY: nobody uses it any more.
        unsafe { munmap(page, 4096) }.expect("our own page");
    });
    await_that("the kernel to ask for the page", || mounted.silent.asked() > before);
    thread
}

/// Has the daemon, which serves an attacker, have a descriptor that is nobody else's, and let go of it.
type Leave = fn(&Scene, &mut Attacker, OwnedFd);
/// What it is for, how it is made, and how it is left.
type Way = (&'static str, fn() -> OwnedFd, Leave);

fn must(attacker: &mut Attacker, request: u32, payload: &[u8], fd: &OwnedFd) {
    attacker.wire.must(request, payload, &[fd.as_fd()]);
}

/// Sets a descriptor of the queue, and then another.
fn set_twice(request: u32, attacker: &mut Attacker, fd: OwnedFd) {
    let which = attacker.which();
    must(attacker, request, &which, &fd);
    drop(fd);
    attacker.wire.send(request, &which, &[new_eventfd().as_fd()]).expect("the socket takes it");
}

/// Leaves it in a message of which the daemon takes nothing.
fn leave_in_message(scene: &Scene, attacker: &mut Attacker, fd: OwnedFd) {
    // It has the descriptor for sure when it is closed here.
    scene.server.send(Signal::STOP);
    await_stopped(scene.server.pid());
    attacker.wire.send(SET_OWNER, &[], &[fd.as_fd()]).expect("the socket takes it");
    drop(fd);
    scene.server.send(Signal::CONT);
}

#[test]
fn a_descriptor_in_a_set_that_is_locked_holds_up_neither_neighbours_nor_what_others_have_left() {
    let eventfd: fn() -> OwnedFd = new_eventfd;
    let pipe = || pipe_with(PipeFlags::CLOEXEC).expect("a pipe").1;
    let socket = || UnixStream::pair().expect("a pair").0.into();
    let ways: [Way; 9] = [
        ("to be called by", eventfd, |_, attacker, fd| set_twice(SET_VRING_CALL, attacker, fd)),
        ("to be told of errors by", eventfd, |_, attacker, fd| set_twice(SET_VRING_ERR, attacker, fd)),
        ("to be kicked by", eventfd, |_, attacker, fd| set_twice(SET_VRING_KICK, attacker, fd)),
        ("to be kicked by until the queue stops", eventfd, |_, attacker, fd| {
            let which = attacker.which();
            must(attacker, SET_VRING_KICK, &which, &fd);
            // It has fired and nobody has looked.
            rustix::io::write(&fd, &1_u64.to_ne_bytes()).expect("our own eventfd");
            drop(fd);
            attacker.wire.ask(GET_VRING_BASE, &[which[..4].to_vec(), u32s(&[0])].concat()).expect("an answer");
        }),
        ("to be told of a log by", eventfd, |_, attacker, fd| {
            let features = attacker.features() | F_LOG_ALL;
            attacker.wire.must(SET_FEATURES, &u64s(&[features]), &[]);
            let log = Share::new(0, (DATA + GIB) / (8 * 4096));
            attacker.wire.order(SET_LOG_BASE, &u64s(&[log.len, 0]), &[log.file.as_fd()]).expect("an answer");
            must(attacker, SET_LOG_FD, &[], &fd);
            drop(fd);
            attacker.wire.send(SET_LOG_FD, &[], &[new_eventfd().as_fd()]).expect("the socket takes it");
        }),
        ("as a channel", socket, |_, attacker, fd| {
            must(attacker, SET_BACKEND_REQ_FD, &[], &fd);
            drop(fd);
            let (channel, _) = UnixStream::pair().expect("a pair");
            attacker.wire.send(SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]).expect("the socket takes it");
        }),
        ("an eventfd for nothing", eventfd, leave_in_message),
        ("a pipe for nothing", pipe, leave_in_message),
        ("a socket for nothing", socket, leave_in_message),
    ];
    for (what, make, leave) in ways {
        let mut scene = Scene::open(Variant::PLAIN, &DIRECT);
        let Some(mounted) = Mounted::or_skips() else { return };
        scene.survives(what, |scene| {
            let mut attacker = scene.attacker(MIB);
            let fd = make();
            let locked = lock_set_of(&fd, &mounted);
            leave(scene, &mut attacker, fd);
            scene.neighbour.await_progress();
            drop(attacker);
            scene.neighbour.await_progress();
            // And what the next client leaves is closed.
            let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).expect("a pipe");
            let wire = Wire::agree(&scene.victim, F_VERSION_1);
            wire.send(SET_OWNER, &[], &[writer.as_fd()]).expect("the socket takes it");
            drop(writer);
            await_that("what the next client has left to be closed", || read(&reader, &mut [0]) == Ok(0));
            drop(mounted);
            locked.join().expect("no panic");
        });
        scene.close();
    }
}
