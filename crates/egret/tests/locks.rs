//! Whose an image is that several daemons have, each for a guest that is here or there: `allow-inactive`.

mod support;

use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use egret_faultdisk::{Effect, ErrnoName, FaultDisk, IoType, Order};
use egret_lab::disks::LoopDevice;
use egret_vring::vhost_user::BACKEND_CONFIG_CHANGE;
use serde_json::{Value, json};

use support::PATIENCE;
use support::attacker::{Ask, Attacker, DATA, Device, Variant};
use support::disk::Disk;
use support::fate::Fate;
use support::guest::{Guest, REGION, Share};
use support::nbd::{NbdServer, has_servers_or_skips};
use support::qmp::Qmp;
use support::scratch::{Scratch, is_root_or_skips};
use support::server::{Options, Program, Server};
use support::wire::{
    ADD_MEM_REG, F_VERSION_1, GET_VRING_BASE, REM_MEM_REG, SET_BACKEND_REQ_FD, SET_VRING_BASE, SET_VRING_ENABLE,
    SET_VRING_KICK, Wire, u32s,
};
use support::{await_some, await_that};

const MIB: u64 = 1 << 20;

/// A daemon with an image that others have, too.
struct Host {
    server: Server,
    qmp: Qmp,
    socket: PathBuf,
}

impl Host {
    /// One with the export `e0` of the node `d0`.
    fn start(scratch: &Scratch, name: &str, image: &Path) -> Self {
        Self::start_of(scratch, name, image, &Program::egret())
    }

    /// The same, of a program of its own.
    fn start_of(scratch: &Scratch, name: &str, image: &Path, program: &Program) -> Self {
        let socket = scratch.path(&format!("{name}-e0"));
        let export = |options: Options| options.export("e0", "d0", &socket, "writable=on,allow-inactive=on");
        Self::start_as(scratch, name, image, program, export)
    }

    /// One whose export is a SCSI device with the unit 0, of `d0`; with more for the export.
    fn start_with_a_unit(scratch: &Scratch, name: &str, image: &Path, more: &str) -> Self {
        let socket = scratch.path(&format!("{name}-e0"));
        Self::start_as(scratch, name, image, &Program::egret(), |options| export_unit(options, &socket, more))
    }

    /// A guest of that device.
    fn boot_scsi(&self) -> Attacker {
        Attacker::boot(&self.socket, Variant { device: Device::Scsi, packed: false }, REGION)
    }

    fn start_as(
        scratch: &Scratch,
        name: &str,
        image: &Path,
        program: &Program,
        export: impl FnOnce(Options) -> Options,
    ) -> Self {
        Self::start_cached(scratch, name, image, "cache.direct=on", program, export)
    }

    /// With more for the blockdev `d0`.
    fn start_cached(
        scratch: &Scratch,
        name: &str,
        image: &Path,
        cache: &str,
        program: &Program,
        export: impl FnOnce(Options) -> Options,
    ) -> Self {
        let (socket, monitor) = (scratch.path(&format!("{name}-e0")), scratch.path(&format!("{name}-qmp")));
        let options = export(Options::new().disk("d0", image, cache)).monitor("m", &monitor);
        let server = Server::start(program, &options);
        Self { server, qmp: Qmp::connect(&monitor), socket }
    }

    fn node(&mut self) -> Value {
        self.qmp.run("query-named-block-nodes", json!({}))[0].take()
    }

    fn is_active(&mut self) -> bool {
        self.node()["active"].as_bool().expect("a flag")
    }

    /// Has a guest refused, because somebody else has the image locked.
    fn refuses_a_guest(&mut self) {
        let before = self.server.complaints().len();
        assert!(Guest::try_boot(&self.socket).is_none(), "the image is somebody else's");
        await_that("a line in the log", || self.server.complaints().len() > before);
        let said = self.server.complaints()[before].clone();
        assert!(said.contains("the client's session is ended: blockdev 'd0': '"), "{said}");
        assert!(said.contains("is locked: another process"), "{said}");
        assert!(!self.is_active());
    }
}

fn export_unit(options: Options, socket: &Path, more: &str) -> Options {
    options.export_scsi("e0", socket, &format!("writable=on,luns.0.lun=0,luns.0.node-name=d0{more}"))
}

fn two_hosts(scratch: &Scratch) -> ([Host; 2], PathBuf) {
    let image = scratch.image("disk", 16 * MIB);
    (["here", "there"].map(|name| Host::start(scratch, name, &image)), image)
}

#[test]
fn an_image_of_two_daemons_is_that_one_s_whose_rings_run() {
    let scratch = Scratch::new();
    let ([mut here, mut there], image) = two_hosts(&scratch);
    assert!(!here.is_active() && !there.is_active());
    let mut guest = Guest::boot(&here.socket);
    assert!(here.is_active() && !there.is_active());
    there.refuses_a_guest();
    guest.read_honestly();
    // Somebody who locks what he opens finds it locked, too.
    let third = Options::new().disk("d0", &image, "").export("e0", "d0", &scratch.path("third"), "writable=on");
    let refused = Program::egret().command().args(third.as_words()).output().expect("it ends");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is locked"), "{refused:?}");

    guest.stop();
    assert!(!here.is_active());
    let mut moved = Guest::boot(&there.socket);
    moved.read_honestly();
    assert!(there.is_active());
    // The guest that has moved away is not to go on here.
    assert!(!guest.try_start());
    moved.stop();
    let mut back = Guest::boot(&here.socket);
    back.read_honestly();
    // A client that leaves without a word.
    drop(back);
    await_that("its image to be let go of", || !here.is_active());
    assert!(moved.try_start());
    moved.read_honestly();
    assert_eq!(here.server.terminate().code(), Some(0));
    assert_eq!(there.server.terminate().code(), Some(0));
}

#[test]
fn a_guest_that_comes_too_early_waits_until_the_other_one_s_rings_are_disabled() {
    let scratch = Scratch::new();
    let ([here, there], _) = two_hosts(&scratch);
    let mut guest = Guest::boot(&here.socket);
    let mut turn = |on: u32| guest.wire.order(SET_VRING_ENABLE, &u32s(&[0, on]), &[]).expect("an answer");
    let mut refused = 0;
    await_that("a guest to be let in that does not wait for too long", || {
        let is_let_in = std::thread::scope(|scope| {
            // Its session looks every now and then; before that it sleeps no more often than a guest has messages.
            let threads = || there.server.sleeps().into_iter();
            let sleeps = || threads().find(|(name, _)| name == "e0").map_or(0, |(_, count)| count);
            let before = sleeps();
            let early = scope.spawn(|| Guest::try_boot(&there.socket).map(|mut early| early.read_honestly()).is_some());
            await_that("the other guest to wait", || sleeps() > before + 50 || early.is_finished());
            assert_eq!(turn(0), 0);
            early.join().expect("it reads")
        });
        // The other has gone, and its session may be about to end.
        assert_eq!(turn(1), 0);
        refused += usize::from(!is_let_in);
        is_let_in
    });
    guest.read_honestly();
    assert_eq!(here.server.complaints(), Vec::<String>::new());
    assert!(refused > 0 || there.server.complaints().is_empty(), "{:?}", there.server.complaints());
}

#[test]
fn a_guest_keeps_its_image_when_its_memory_or_a_descriptor_changes() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 16 * MIB);
    // It says so when it cannot let go of the image.
    let broken = Program::egret().with(Fate::fails(libc::SYS_fdatasync, libc::EIO));
    let here = Host::start_of(&scratch, "here", &image, &broken);
    let mut guest = Guest::boot(&here.socket);
    let more = Share::new(0x8000_0000, REGION);
    let message = more.message();
    guest.wire.must(ADD_MEM_REG, &message, &[more.file.as_fd()]);
    guest.wire.must(REM_MEM_REG, &message, &[]);
    assert!(guest.try_kick_anew());
    guest.read_honestly();
    assert_eq!(here.server.complaints(), Vec::<String>::new());
    guest.stop();
    await_that("it to let go, or to say so", || !here.server.complaints().is_empty());
}

#[test]
fn a_daemon_that_is_told_to_end_or_killed_leaves_the_image_to_the_other() {
    let scratch = Scratch::new();
    for kill in [false, true] {
        let ([here, there], _) = two_hosts(&scratch);
        let mut guest = Guest::boot(&here.socket);
        guest.read_honestly();
        match kill {
            true => drop(here),
            false => assert_eq!(here.server.terminate().code(), Some(0)),
        }
        Guest::boot(&there.socket).read_honestly();
        assert_eq!(there.server.complaints(), Vec::<String>::new());
    }
}

#[test]
fn an_image_whose_last_writes_could_not_be_written_out_is_left_to_nobody() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 16 * MIB);
    let broken = Program::egret().with(Fate::fails(libc::SYS_fdatasync, libc::EIO));
    let mut here = Host::start_of(&scratch, "here", &image, &broken);
    let mut there = Host::start(&scratch, "there", &image);
    let mut guest = Guest::boot(&here.socket);
    guest.stop();
    assert!(here.is_active());
    let said = await_some("a line in the log", || Some(here.server.complaints()).filter(|said| !said.is_empty()));
    assert!(said[0].contains("blockdev 'd0' stays locked: the last flush failed"), "{said:?}");
    there.refuses_a_guest();
    assert!(guest.try_start(), "who has it goes on");
    guest.read_honestly();
}

#[test]
fn an_image_whose_last_writes_could_not_be_written_out_is_left_to_nobody_whoever_comes_and_leaves_without_rings() {
    let scratch = Scratch::new();
    for stops in [false, true] {
        let image = scratch.image("disk", 16 * MIB);
        let broken = Program::egret().with(Fate::fails(libc::SYS_fdatasync, libc::EIO));
        let mut here = Host::start_of(&scratch, "here", &image, &broken);
        let mut there = Host::start(&scratch, "there", &image);
        let mut guest = Guest::boot(&here.socket);
        if stops {
            guest.stop();
            assert!(here.is_active());
            let more = Share::new(0x8000_0000, REGION);
            guest.wire.must(ADD_MEM_REG, &more.message(), &[more.file.as_fd()]);
            assert!(here.is_active());
        }
        drop(guest);
        // Others that only look: each is answered when the session before it is over.
        for _ in 0..3 {
            let _looks = Wire::agree(&here.socket, F_VERSION_1);
            assert!(here.is_active());
        }
        there.refuses_a_guest();
    }
}

#[test]
fn an_image_that_could_not_be_written_out_is_left_to_others_when_its_daemon_has_ended_and_tried_that_again() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    // Where flushes are ignored, too, and where the daemon has it because its export has gone.
    for (no_flush, is_gone) in [("off", false), ("on", false), ("off", true)] {
        let scratch = Scratch::new();
        let disk = Sick::new(&scratch);
        let cache = format!("cache.direct=on,cache.no-flush={no_flush}");
        let socket = scratch.path("here-e0");
        let export = |options: Options| {
            let options = options.export("e0", "d0", &socket, "writable=on,allow-inactive=on");
            options.words(["--shutdown-timeout=0"])
        };
        let mut here = Host::start_cached(&scratch, "here", disk.path(), &cache, &Program::egret(), export);
        let mut there = Host::start(&scratch, "there", disk.path());
        let mut guest = Guest::boot(&here.socket);
        fail_flushes(&disk.faulty, (!is_gone).then_some(1));
        if is_gone {
            here.qmp.run("block-export-del", json!({"id": "e0", "mode": "hard"}));
            here.qmp.event("BLOCK_EXPORT_DELETED");
        } else {
            guest.stop();
        }
        assert!(here.is_active());
        be_well(&disk.faulty);
        disk.faulty.inject(IoType::Flush, None, Effect::Never);
        here.server.ask_to_end();
        await_that("its last flush", || disk.faulty.tell(Order::Status).expect("it listens").waiting == 1);
        there.refuses_a_guest();
        be_well(&disk.faulty);
        assert_eq!(here.server.await_end().code(), Some(0));
        Guest::boot(&there.socket).read_honestly();
    }
}

/// A device whose disk fails as it is told to. Of a device nothing is lost when a flush past the page cache has failed.
struct Sick {
    device: LoopDevice,
    faulty: FaultDisk,
}

impl Sick {
    fn new(scratch: &Scratch) -> Self {
        let faulty = scratch.fault_disk(MIB);
        Self { device: LoopDevice::over(&faulty.path()).expect("a loop device"), faulty }
    }

    fn path(&self) -> &Path {
        self.device.path()
    }

    /// A daemon that has it, by an export of its own, through the page cache.
    fn host(&self, scratch: &Scratch, no_flush: &str, export: impl FnOnce(Options) -> Options) -> Host {
        let cache = format!("cache.direct=off,cache.no-flush={no_flush}");
        Host::start_cached(scratch, "here", self.device.path(), &cache, &Program::egret(), export)
    }

    /// Has a guest write what the page cache then loses.
    fn lose_what_is_written_by(&self, guest: &mut Attacker) {
        self.faulty.inject(IoType::Write, Some(1), Effect::Errno(ErrnoName::Eio));
        assert_eq!(ended(guest, Ask::Write { at: 4096 }, &[(DATA, 4096)]), 0, "it is in the page cache");
    }

    /// Has it opened once more, as one whose flushes count.
    fn reopen(&self, host: &mut Host) {
        let node = json!({"driver": "host_device", "node-name": "d0", "filename": self.device.path(),
                          "cache": {"direct": false}});
        host.qmp.run("blockdev-reopen", json!({"options": [node]}));
    }
}

/// The status that something ends with.
fn ended(guest: &mut Attacker, ask: Ask, buffers: &[(u64, u32)]) -> u8 {
    guest.ask(ask, buffers);
    guest.publish();
    guest.await_all();
    guest.status()
}

#[test]
fn a_loss_that_is_found_when_rings_stop_is_told_to_the_guest_before_a_reopening_lifts_it() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    for no_flush in ["off", "on"] {
        let scratch = Scratch::new();
        let disk = Sick::new(&scratch);
        let socket = scratch.path("here-e0");
        let export = |options: Options| options.export("e0", "d0", &socket, "writable=on,allow-inactive=on");
        let mut here = disk.host(&scratch, no_flush, export);
        let mut guest = Attacker::boot_flushing(&here.socket, Variant::PLAIN, REGION);
        disk.lose_what_is_written_by(&mut guest);
        is_told_of_what_is_lost_when_its_rings_stop(&mut guest, &mut here, |here| disk.reopen(here));
    }
}

/// A guest whose image cannot be written out when its rings stop is told of that when they run again, whoever has opened the
/// image once more before that.
fn is_told_of_what_is_lost_when_its_rings_stop(guest: &mut Attacker, here: &mut Host, reopen: impl Fn(&mut Host)) {
    guest.wire.ask(GET_VRING_BASE, &guest.which()).expect("its base");
    await_that("a line in the log", || !here.server.complaints().is_empty());
    let said = here.server.complaints();
    assert!(said[0].contains("blockdev 'd0' stays locked: the last flush failed"), "{said:?}");

    reopen(here);
    let base = u32s(&[0, guest.made() as u32]);
    guest.wire.must(SET_VRING_BASE, &base, &[]);
    let kick = guest.signals.kick.as_ref().expect("it kicks").as_fd();
    guest.wire.must(SET_VRING_KICK, &guest.which(), &[kick]);
    assert_ne!(ended(guest, Ask::Flush, &[]), 0, "no flush has failed yet");
    assert_ne!(ended(guest, Ask::Flush, &[]), 0, "nor has it been lifted");
    reopen(here);
    assert_eq!(ended(guest, Ask::Flush, &[]), 0);
}

#[test]
fn what_an_nbd_server_refuses_to_flush_when_rings_stop_is_told_to_the_guest_though_the_server_says_so_once() {
    if !has_servers_or_skips() {
        return;
    }
    let scratch = Scratch::new();
    let [nbd, socket, monitor, sick] = ["nbd", "here-e0", "here-qmp", "sick"].map(|name| scratch.path(name));
    let flush = format!("flush=if rm {} 2>/dev/null; then echo EIO >&2; exit 1; fi", sick.display());
    let writes = ["can_write=exit 0", "pwrite=cat >/dev/null", "can_flush=exit 0", &flush];
    let words = [&["eval", "get_size=echo 16M", "pread=head -c $3 /dev/zero"], &writes[..]].concat();
    let _nbd = NbdServer::nbdkit(&nbd, &words);
    let options = Options::new().nbd("d0", &nbd, "").export("e0", "d0", &socket, "writable=on,allow-inactive=on");
    let server = Server::start(&Program::egret(), &options.monitor("m", &monitor));
    let mut here = Host { server, qmp: Qmp::connect(&monitor), socket };
    let mut guest = Attacker::boot_flushing(&here.socket, Variant::PLAIN, REGION);
    assert_eq!(ended(&mut guest, Ask::Write { at: 4096 }, &[(DATA, 4096)]), 0);
    File::create(&sick).expect("a mark");
    is_told_of_what_is_lost_when_its_rings_stop(&mut guest, &mut here, |here| {
        let node = json!({"driver": "nbd", "node-name": "d0", "server": {"type": "unix", "path": nbd}});
        here.qmp.run("blockdev-reopen", json!({"options": [node]}));
    });
}

#[test]
fn a_disk_that_has_grown_elsewhere_has_its_new_size_when_the_guest_is_here() {
    let scratch = Scratch::new();
    let ([mut here, mut there], image) = two_hosts(&scratch);
    let sectors = |guest: &mut Guest| {
        let answer = guest.wire.ask_config(8).expect("its configuration");
        u64::from_le_bytes(answer.try_into().expect("eight bytes"))
    };
    let mut guest = Guest::boot(&there.socket);
    guest.stop();
    let (mut ours, theirs) = UnixStream::pair().expect("a channel");
    ours.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    guest.wire.must(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);

    let mut other = Guest::boot(&here.socket);
    let refused = there.qmp.fail("block_resize", json!({"node-name": "d0", "size": 32 * MIB}));
    assert!(refused.contains("is locked"), "{refused}");
    here.qmp.run("block_resize", json!({"node-name": "d0", "size": 32 * MIB}));
    assert_eq!(File::open(&image).and_then(|file| file.metadata()).expect("an image").len(), 32 * MIB);
    other.stop();
    assert_eq!(sectors(&mut guest), 16 * MIB / 512, "nobody has looked");
    assert!(guest.try_start());
    let mut message = [0; 12];
    ours.read_exact(&mut message).expect("the news");
    assert_eq!(message[..4], BACKEND_CONFIG_CHANGE.to_le_bytes());
    assert_eq!(sectors(&mut guest), 32 * MIB / 512);
    assert_eq!(there.node()["image"]["virtual-size"], 32 * MIB);
    guest.read_honestly();
}

#[test]
fn a_disk_is_reopened_as_it_is_active_or_not() {
    let scratch = Scratch::new();
    let ([mut here, mut there], image) = two_hosts(&scratch);
    let reopen = |host: &mut Host, aio: &str| {
        let options = json!({"driver": "file", "node-name": "d0", "filename": image, "aio": aio,
                             "cache": {"direct": true}});
        host.qmp.run("blockdev-reopen", json!({"options": [options]}));
    };
    let mut guest = Guest::boot(&here.socket);
    for aio in ["io_uring", "native", "threads"] {
        reopen(&mut here, aio);
        // One who is inactive may be reopened whoever has the image.
        reopen(&mut there, aio);
        guest.read_honestly();
        assert!(here.is_active());
        there.refuses_a_guest();
    }
    guest.stop();
    assert!(!here.is_active());
    reopen(&mut here, "io_uring");
    assert!(!here.is_active());
    let mut moved = Guest::boot(&there.socket);
    moved.read_honestly();
    assert!(!guest.try_start());
}

#[test]
fn each_export_of_a_blockdev_keeps_it_active_and_all_of_them_agree_on_that() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 16 * MIB);
    let exports = |options: Options| {
        let more = "writable=on,allow-inactive=on";
        options.export("e0", "d0", &scratch.path("here-e0"), more).export("e1", "d0", &scratch.path("here-e1"), more)
    };
    let mut here = Host::start_as(&scratch, "here", &image, &Program::egret(), exports);
    let mut there = Host::start(&scratch, "there", &image);
    let mut guests = ["here-e0", "here-e1"].map(|name| Guest::boot(&scratch.path(name)));
    guests[0].stop();
    there.refuses_a_guest();
    guests[1].stop();
    assert!(!here.is_active());
    let addr = json!({"type": "unix", "path": scratch.path("here-e2")});
    let refused = here
        .qmp
        .fail("block-export-add", json!({"type": "vhost-user-blk", "id": "e2", "node-name": "d0", "addr": addr}));
    assert_eq!(
        refused,
        "export 'e2': allow-inactive=off, and export 'e0' of blockdev 'd0' has on: all exports of one blockdev have the \
         same"
    );
    let _there = Guest::boot(&there.socket);
}

#[test]
fn units_that_come_and_go_are_locked_while_the_device_s_rings_run() {
    let scratch = Scratch::new();
    let [first, second] = ["first", "second"].map(|name| scratch.image(name, 16 * MIB));
    let mut here = Host::start_with_a_unit(&scratch, "here", &first, ",allow-inactive=on");
    let mut there = Host::start(&scratch, "there", &second);
    here.qmp.run("blockdev-add", json!({"driver": "file", "node-name": "d1", "filename": second}));
    let lun = json!({"id": "e0", "lun": 1, "node-name": "d1"});
    let gone = |here: &mut Host| {
        here.qmp.run("egret-lun-del", json!({"id": "e0", "lun": 1}));
        here.qmp.event("EGRET_LUN_DELETED");
    };
    let mut guest = Guest::boot(&here.socket);
    let other = Guest::boot(&there.socket);
    let refused = here.qmp.fail("egret-lun-add", lun.clone());
    assert!(refused.contains("blockdev 'd1': '") && refused.contains("is locked"), "{refused}");
    drop(other);
    await_that("the other to be gone", || !there.is_active());
    here.qmp.run("egret-lun-add", lun.clone());
    there.refuses_a_guest();
    gone(&mut here);
    drop(Guest::boot(&there.socket));
    await_that("the other to be gone", || !there.is_active());
    // One that is there before the rings start.
    guest.stop();
    here.qmp.run("egret-lun-add", lun);
    drop(Guest::boot(&there.socket));
    await_that("the other to be gone", || !there.is_active());
    assert!(guest.try_start());
    there.refuses_a_guest();
}

/// Has the disk hang with a read.
fn ask_for_what_does_not_come(guest: &mut Attacker, faulty: &FaultDisk) {
    faulty.inject(IoType::Read, None, Effect::Never);
    guest.ask(Ask::Read { at: 0 }, &[(DATA, 4096)]);
    guest.publish();
    await_that("the read to reach the disk", || faulty.tell(Order::Status).expect("it listens").waiting == 1);
}

/// Has a disk fail so many flushes, or all.
fn fail_flushes(faulty: &FaultDisk, times: Option<u64>) {
    faulty.inject(IoType::Flush, times, Effect::Errno(ErrnoName::Eio));
}

/// Has a disk that hangs answer, and hang no more.
fn be_well(faulty: &FaultDisk) {
    faulty.tell(Order::Clear).expect("it listens");
    faulty.tell(Order::Release).expect("it listens");
}

#[test]
fn a_unit_that_is_taken_away_is_locked_until_the_last_of_its_requests_has_ended() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let scratch = Scratch::new();
    let faulty = scratch.fault_disk(MIB);
    let mut here = Host::start_with_a_unit(&scratch, "here", &faulty.path(), ",allow-inactive=on");
    let mut there = Host::start(&scratch, "there", &faulty.path());
    let mut guest = here.boot_scsi();
    guest.read_honestly();
    ask_for_what_does_not_come(&mut guest, &faulty);
    here.qmp.run("egret-lun-del", json!({"id": "e0", "lun": 0}));
    there.refuses_a_guest();
    // One who would have the disk until then finds that it is on its way out, and that it is not given back.
    assert!(here.qmp.fail("blockdev-del", json!({"node-name": "d0"})).contains("in use"));
    let inactive = json!({"node-name": "d0", "active": false});
    assert!(here.qmp.fail("blockdev-set-active", inactive).contains("on its way out"));
    be_well(&faulty);
    guest.await_all();
    here.qmp.event("EGRET_LUN_DELETED");
    Guest::boot(&there.socket).read_honestly();
}

#[test]
fn a_unit_that_is_taken_away_while_its_queues_stop_is_locked_until_the_last_of_its_requests_has_ended() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let scratch = Scratch::new();
    let faulty = scratch.fault_disk(MIB);
    let export = |options: Options| {
        let options = options.iothread("io0", "").iothread("io1", "");
        export_unit(options, &scratch.path("here-e0"), ",allow-inactive=on,iothread=io0")
    };
    let mut here = Host::start_as(&scratch, "here", &faulty.path(), &Program::egret(), export);
    let mut there = Host::start(&scratch, "there", &faulty.path());
    let mut guest = here.boot_scsi();
    guest.read_honestly();
    ask_for_what_does_not_come(&mut guest, &faulty);
    drop(guest);
    // A queue that runs cannot move, for its request does not end. One that stops need not.
    let moved = json!({"id": "e0", "iothread": "io1"});
    await_that("the queues to stop", || here.qmp.try_run("egret-map-queues", moved.clone()).is_ok());
    here.qmp.run("egret-lun-del", json!({"id": "e0", "lun": 0}));
    there.refuses_a_guest();
    assert!(here.qmp.fail("blockdev-del", json!({"node-name": "d0"})).contains("in use"));
    be_well(&faulty);
    here.qmp.event("EGRET_LUN_DELETED");
    Guest::boot(&there.socket).read_honestly();
}

#[test]
fn a_unit_that_is_taken_away_twice_while_its_disk_hangs_holds_up_no_change_of_others() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let scratch = Scratch::new();
    let faulty = scratch.fault_disk(MIB);
    let mut here = Host::start_with_a_unit(&scratch, "here", &faulty.path(), "");
    let mut guest = here.boot_scsi();
    guest.read_honestly();
    ask_for_what_does_not_come(&mut guest, &faulty);
    here.qmp.run("egret-lun-del", json!({"id": "e0", "lun": 0}));
    here.qmp.run("egret-lun-add", json!({"id": "e0", "lun": 0, "node-name": "d0"}));
    here.qmp.run("egret-lun-del", json!({"id": "e0", "lun": 0}));
    // The second has nothing to wait for.
    here.qmp.event("EGRET_LUN_DELETED");
    here.qmp.run("object-add", json!({"qom-type": "iothread", "id": "other"}));
    here.qmp.run("object-del", json!({"id": "other"}));
    be_well(&faulty);
    here.qmp.event("EGRET_LUN_DELETED");
}

#[test]
fn an_export_that_is_deleted_and_whose_last_writes_could_not_be_written_out_leaves_its_image_to_nobody() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    for is_there in [true, false] {
        let scratch = Scratch::new();
        let disk = Sick::new(&scratch);
        let mut here = Host::start(&scratch, "here", disk.path());
        let mut there = Host::start(&scratch, "there", disk.path());
        let mut guest = Guest::boot(&here.socket);
        guest.read_honestly();
        fail_flushes(&disk.faulty, None);
        let guest = Some(guest).filter(|_| is_there);
        if !is_there {
            await_that("the session to be over", || !here.server.complaints().is_empty());
        }
        here.qmp.run("block-export-del", json!({"id": "e0", "mode": "hard"}));
        here.qmp.event("BLOCK_EXPORT_DELETED");
        assert!(here.is_active());
        there.refuses_a_guest();
        // Nor by being opened otherwise.
        let addr = json!({"type": "unix", "path": here.socket});
        let export = json!({"type": "vhost-user-blk", "id": "e1", "node-name": "d0", "addr": addr});
        let refused = here.qmp.fail("block-export-add", export);
        assert!(refused.starts_with("blockdev 'd0' stays locked as it was open"), "{refused}");
        let give_back = json!({"node-name": "d0", "active": false});
        let refused = here.qmp.fail("blockdev-set-active", give_back.clone());
        assert!(refused.starts_with("blockdev 'd0': it stays locked: the last flush failed"), "{refused}");
        there.refuses_a_guest();
        be_well(&disk.faulty);
        here.qmp.run("blockdev-set-active", give_back);
        Guest::boot(&there.socket).read_honestly();
        drop(guest);
    }
}

#[test]
fn an_image_that_stays_locked_though_its_guest_has_left_is_given_back_by_hand_when_it_can_be() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let scratch = Scratch::new();
    let disk = Sick::new(&scratch);
    let mut here = Host::start(&scratch, "here", disk.path());
    let mut there = Host::start(&scratch, "there", disk.path());
    let guest = Guest::boot(&here.socket);
    fail_flushes(&disk.faulty, Some(2));
    drop(guest);
    await_that("the session to be over", || !here.server.complaints().is_empty());
    let give_back = json!({"node-name": "d0", "active": false});
    let refused = here.qmp.fail("blockdev-set-active", give_back.clone());
    assert!(refused.starts_with("blockdev 'd0': it stays locked: the last flush failed"), "{refused}");
    assert!(here.is_active());
    there.refuses_a_guest();
    disk.faulty.inject(IoType::Flush, None, Effect::Never);
    let refused = here.qmp.fail("blockdev-set-active", give_back.clone());
    assert!(refused.contains("does not answer: what was written could not be made stable in 5 s"), "{refused}");
    assert!(here.is_active());
    be_well(&disk.faulty);
    here.qmp.run("blockdev-set-active", give_back);
    Guest::boot(&there.socket).read_honestly();
}

#[test]
fn a_unit_that_is_taken_away_and_whose_last_writes_could_not_be_written_out_is_left_to_nobody() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    for no_flush in ["off", "on"] {
        let scratch = Scratch::new();
        let disk = Sick::new(&scratch);
        let export = |options: Options| export_unit(options, &scratch.path("here-e0"), ",allow-inactive=on");
        let mut here = disk.host(&scratch, no_flush, export);
        let mut there = Host::start(&scratch, "there", disk.path());
        let mut guest = here.boot_scsi();
        guest.read_honestly();
        disk.lose_what_is_written_by(&mut guest);
        let take_away = |here: &mut Host| {
            here.qmp.run("egret-lun-del", json!({"id": "e0", "lun": 0}));
            here.qmp.event("EGRET_LUN_DELETED");
        };
        take_away(&mut here);
        await_that("a line in the log", || !here.server.complaints().is_empty());
        let said = here.server.complaints();
        assert!(said[0].contains("export 'e0': blockdev 'd0' stays locked: the last flush failed"), "{said:?}");
        there.refuses_a_guest();

        // Whatever becomes of other images.
        let other = scratch.image("other", MIB);
        here.qmp.run("blockdev-add", json!({"driver": "file", "node-name": "d1", "filename": other}));
        let give_back = json!({"node-name": "d0", "active": false});
        let refused = here.qmp.fail("blockdev-set-active", give_back);
        assert!(refused.starts_with("blockdev 'd0': it stays locked: the last flush failed"), "{refused}");
        disk.reopen(&mut here);
        there.refuses_a_guest();

        // Who has it again is told.
        here.qmp.run("egret-lun-add", json!({"id": "e0", "lun": 0, "node-name": "d0"}));
        await_that("the unit to be ready", || ended(&mut guest, Ask::Read { at: 0 }, &[(DATA, 512)]) == 0);
        assert_ne!(ended(&mut guest, Ask::Flush, &[]), 0, "its writes are lost");
        disk.reopen(&mut here);
        assert_eq!(ended(&mut guest, Ask::Flush, &[]), 0);
        there.refuses_a_guest();
        take_away(&mut here);
        Guest::boot(&there.socket).read_honestly();
    }
}

#[test]
fn a_unit_that_could_not_be_written_out_is_given_back_by_hand_when_it_can_be_or_closed() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    for (command, arguments) in [
        ("blockdev-set-active", json!({"node-name": "d0", "active": false})),
        ("blockdev-del", json!({"node-name": "d0"})),
    ] {
        let scratch = Scratch::new();
        let disk = Sick::new(&scratch);
        let mut here = Host::start_with_a_unit(&scratch, "here", disk.path(), ",allow-inactive=on");
        let mut there = Host::start(&scratch, "there", disk.path());
        let mut guest = here.boot_scsi();
        guest.read_honestly();
        fail_flushes(&disk.faulty, Some(1));
        here.qmp.run("egret-lun-del", json!({"id": "e0", "lun": 0}));
        here.qmp.event("EGRET_LUN_DELETED");
        assert!(here.is_active());
        there.refuses_a_guest();
        here.qmp.run(command, arguments);
        Guest::boot(&there.socket).read_honestly();
    }
}

#[test]
fn an_image_that_a_deleted_export_could_not_write_out_is_let_go_of_when_the_guest_of_the_next_one_stops() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let scratch = Scratch::new();
    let disk = Sick::new(&scratch);
    let mut here = Host::start(&scratch, "here", disk.path());
    let mut there = Host::start(&scratch, "there", disk.path());
    let guest = Guest::boot(&here.socket);
    fail_flushes(&disk.faulty, None);
    here.qmp.run("block-export-del", json!({"id": "e0", "mode": "hard"}));
    here.qmp.event("BLOCK_EXPORT_DELETED");
    drop(guest);
    be_well(&disk.faulty);
    let addr = json!({"type": "unix", "path": here.socket});
    let export = json!({"type": "vhost-user-blk", "id": "e1", "node-name": "d0", "addr": addr, "writable": true,
                        "allow-inactive": true});
    here.qmp.run("block-export-add", export);
    assert!(here.is_active());
    there.refuses_a_guest();
    Guest::boot(&here.socket).stop();
    assert!(!here.is_active());
    Guest::boot(&there.socket).read_honestly();
}

#[test]
fn a_unit_that_could_not_be_written_out_is_let_go_of_when_the_next_guest_that_has_it_stops() {
    if !is_root_or_skips("for a disk that fails") {
        return;
    }
    let scratch = Scratch::new();
    let disk = Sick::new(&scratch);
    let mut here = Host::start_with_a_unit(&scratch, "here", disk.path(), ",allow-inactive=on");
    let mut there = Host::start(&scratch, "there", disk.path());
    let stop = |guest: &mut Attacker| guest.wire.ask(GET_VRING_BASE, &guest.which()).expect("its base");
    let mut guest = here.boot_scsi();
    fail_flushes(&disk.faulty, Some(1));
    here.qmp.run("egret-lun-del", json!({"id": "e0", "lun": 0}));
    here.qmp.event("EGRET_LUN_DELETED");
    stop(&mut guest);
    drop(guest);
    // When nothing runs.
    here.qmp.run("egret-lun-add", json!({"id": "e0", "lun": 0, "node-name": "d0"}));
    assert!(here.is_active());
    there.refuses_a_guest();
    stop(&mut here.boot_scsi());
    assert!(!here.is_active());
    Guest::boot(&there.socket).read_honestly();
}

#[test]
fn an_image_can_be_locked_by_hand_before_a_guest_comes_and_is_until_it_is_given_back() {
    let scratch = Scratch::new();
    let ([mut here, mut there], image) = two_hosts(&scratch);
    const SET: &str = "blockdev-set-active";
    let set = |active: bool| json!({"node-name": "d0", "active": active});
    here.qmp.run(SET, set(true));
    here.qmp.run(SET, set(true));
    assert!(here.is_active());
    there.refuses_a_guest();
    let refused = there.qmp.fail(SET, set(true));
    assert!(refused.starts_with("blockdev 'd0': '") && refused.contains("is locked: another process"), "{refused}");

    // A guest comes, and goes, and the disk is opened anew.
    let mut guest = Guest::boot(&here.socket);
    guest.read_honestly();
    let refused = here.qmp.fail(SET, set(false));
    assert_eq!(
        refused,
        "blockdev 'd0': rings of export 'e0' run until its guest stops; if it had stopped before the daemon was started, \
         until it has gone on and stops again, or its virtual machine monitor ends"
    );
    guest.stop();
    let reopened = json!({"driver": "file", "node-name": "d0", "filename": image, "aio": "io_uring"});
    here.qmp.run("blockdev-reopen", json!({"options": [reopened]}));
    assert!(here.is_active());
    there.refuses_a_guest();

    here.qmp.run(SET, set(false));
    assert!(!here.is_active());
    // All of them, where none is named.
    there.qmp.run(SET, json!({"active": true}));
    assert!(there.is_active() && !guest.try_start());
    // Whoever was refused may still be on the way out.
    let delete = |host: &mut Host| {
        host.qmp.run("block-export-del", json!({"id": "e0", "mode": "hard"}));
        host.qmp.event("BLOCK_EXPORT_DELETED");
    };
    // Nobody has locked what nobody exports.
    delete(&mut there);
    here.qmp.run(SET, set(true));
    assert!(there.qmp.fail(SET, json!({"node-name": "d9", "active": true})).contains("'d9'"));
    // What is gone has let go of its image.
    delete(&mut here);
    here.qmp.run("blockdev-del", json!({"node-name": "d0"}));
    let always = |options: Options| options.export("e0", "d0", &scratch.path("third-e0"), "writable=on");
    let mut third = Host::start_as(&scratch, "third", &image, &Program::egret(), always);
    third.qmp.run(SET, set(true));
    assert_eq!(third.qmp.fail(SET, set(false)), "blockdev 'd0': export 'e0' has allow-inactive=off");
}

#[test]
fn an_image_is_locked_from_the_start_unless_its_export_says_otherwise() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 16 * MIB);
    let mut late = Host::start(&scratch, "late", &image);
    let export = |options: Options| options.export("e0", "d0", &scratch.path("here-e0"), "writable=on");
    let mut here = Host::start_as(&scratch, "here", &image, &Program::egret(), export);
    assert!(here.is_active());
    late.refuses_a_guest();
    drop(Disk::connect(&here.socket).expect("a connection"));
    assert!(here.is_active());
}
