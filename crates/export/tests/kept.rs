//! A client's session that ends with one export and goes on with another, whose client neither connects again nor notices.

#[allow(dead_code, reason = "another test uses the rest of it")]
#[path = "dirty_log/vm.rs"]
mod vm;

mod peer;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use egret_disk::{Disk, Driver, Options};
use egret_export::{Access, Address, Export, ExportConfig, Keeping, KeptSession};
use egret_vring::memory::Region;
use egret_vring::ring::{InflightConfig, PACKED_BASE, Piece};
use egret_vring::vhost_user::{F_LOG_ALL, NO_FD};

use peer::gate::Gate;
use peer::*;
use rustix::event::{EventfdFlags, eventfd};
use vm::*;

const MIB: u64 = 1 << 20;
const QUEUES: u16 = 2;
/// What a request has for a header, and where.
const HEADER: u64 = DATA;
const BUFFER: u64 = DATA + 4096;
const STATUS: u64 = DATA + 2 * 4096;

/// An image that is there for as long as its exports.
struct Image(tempfile::NamedTempFile, IoThread);

impl Image {
    fn new() -> Self {
        let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        file.as_file().set_len(MIB).unwrap();
        Self(file, IoThread::start())
    }

    fn export(&self, config: ExportConfig) -> Export {
        let file = Driver::File { filename: self.0.path().to_owned() };
        let disk = Arc::new(Disk::open(&Options::new("disk", file)).unwrap());
        Export::start(config, blk_config(MIB, QUEUES), disk, vec![self.1.0.clone()]).unwrap()
    }

    /// One whose client's session may be kept.
    fn begin(&self) -> (UnixStream, Export) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (ours, self.export(ExportConfig { keeping: Keeping::Keeps, ..export_config(Address::Fd(theirs.into())) }))
    }

    /// One that waits for a session.
    fn next(&self, dir: &tempfile::TempDir, access: Access) -> Export {
        let address = Address::Path(dir.path().join("socket"));
        self.export(ExportConfig { keeping: Keeping::Kept, access, ..export_config(address) })
    }

    /// Ends an export, and has another go on.
    fn replace(&self, export: Export) -> Export {
        let kept = end(export);
        let mut next = self.next(&tempfile::tempdir().unwrap(), Access::default());
        assert!(next.go_on_with(Some(kept.take().unwrap())).is_none());
        next
    }
}

/// A front-end that has agreed, and was heard.
fn agreed(stream: UnixStream) -> Peer {
    let mut peer = Peer(stream);
    peer.agree();
    assert_eq!(peer.ask_u64(GET_QUEUE_NUM), QUEUES.into());
    peer
}

/// What is kept of the session of an export's client.
fn end(export: Export) -> KeptSession {
    let (unwritten, sockets) = export.end_and_keep();
    assert!(unwritten.is_empty());
    let mut found = KeptSession::gather(sockets.expect("it is kept"));
    assert_eq!((found.len(), found[0].export()), (1, "e0"));
    found.remove(0)
}

impl Vm {
    /// Makes a request available, of a sector's data or none.
    fn request(&mut self, queue: u32, kind: u32, sector: u64) {
        let header = [u64::from(kind).to_le_bytes(), sector.to_le_bytes()].concat();
        self.write(HEADER, &header);
        self.write(STATUS, &[0xff]);
        let piece = |addr, len| Piece { addr, len };
        let (header, data, status) = (piece(HEADER, 16), piece(BUFFER, 512), piece(STATUS, 1));
        match kind {
            0 => self.add(queue, &[header], &[data, status]),
            _ => self.add(queue, &[header, data], &[status]),
        }
        self.publish();
    }

    fn ends_well(&mut self, queue: u32) {
        self.reap(queue, 1);
        let mut status = [0xff];
        assert!(self.memory.read(STATUS, &mut status));
        assert_eq!(status, [0]);
    }

    /// A sector of a disk, as a queue reads it.
    fn reads(&mut self, queue: u32, sector: u64) -> u8 {
        self.write(BUFFER, &[0xee; 512]);
        self.request(queue, 0, sector);
        self.ends_well(queue);
        let mut data = [0];
        assert!(self.memory.read(BUFFER, &mut data));
        data[0]
    }
}

#[test]
fn rings_that_are_not_kicked_go_on_without_being_kicked() {
    for shape in Rings::all() {
        let image = Image::new();
        let (ours, export) = image.begin();
        let mut vm = Vm::boot_recorded(ours, shape, None);
        for queue in 0..QUEUES {
            assert_eq!(vm.peer.order(SET_VRING_KICK, &longs(&[u64::from(queue) | NO_FD])), Some(0));
        }
        let _export = image.replace(export);
        assert_eq!([vm.reads(0, 0), vm.reads(1, 0)], [0; 2], "{shape:?}");
    }
}

#[test]
fn a_session_goes_on_with_its_rings_memory_record_and_log_and_its_client_is_not_told() {
    for shape in Rings::all() {
        for has_record in [false, true] {
            let image = Image::new();
            let (ours, mut export) = image.begin();
            let config = InflightConfig { queues: QUEUES, queue_size: 1024, packed: shape.packed };
            let record = Region::anonymous(0, config.bytes()).unwrap();
            let mut vm = Vm::boot_recorded(ours, shape, has_record.then_some(&record));
            for turn in 0..5_u8 {
                // Twice round a ring of 16 that is packed, where nothing of it tells where it is.
                for sector in 0..u64::from(turn) * 3 {
                    vm.write(BUFFER, &[turn; 512]);
                    vm.request(0, 1, sector);
                    vm.ends_well(0);
                }
                let kept = end(export);
                // A kick for whoever comes.
                vm.write(BUFFER, &[100 + turn; 512]);
                vm.request(1, 1, 100);
                export = image.next(&tempfile::tempdir().unwrap(), Access::default());
                assert!(export.go_on_with(Some(kept.take().unwrap())).is_none());
                vm.ends_well(1);
                assert_eq!([vm.reads(0, 100), vm.reads(1, 100)], [100 + turn; 2], "{shape:?}");
                assert_eq!(vm.peer.ask_u64(GET_QUEUE_NUM), QUEUES.into());
            }
            // The used index of the first queue, which a record of this kind has there.
            let used = || {
                let mut used = [0; 2];
                record.file.read_exact_at(&mut used, if shape.packed { 16 } else { 14 }).unwrap();
                used
            };
            let before = used();
            vm.reads(0, 100);
            // The record is told after the guest.
            vm.sync();
            assert_eq!(used() != before, has_record, "{shape:?}");
            vm.start_logging();
            let logged = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            vm.peer.say(SET_LOG_FD, NEED_REPLY, &[], &[logged.as_fd()]);
            assert_eq!(vm.peer.hear(), Some(longs(&[0])));
            let export = image.replace(export);
            vm.clear_log();
            vm.reads(0, 100);
            vm.sync();
            let written = read_log(&vm.log);
            assert!(written.is_superset(&pages(BUFFER..BUFFER + 512)), "{shape:?}");
            assert!(!written.is_disjoint(&vm.ring_pages(0)), "{shape:?}");
            rustix::io::read(&logged, &mut [0; 8]).expect("its front-end is told");
            vm.stop_logging();
            // What was said of rings is known: they stop, and go on where they were.
            vm.stop();
            (0..vm.queues()).for_each(|index| vm.start_again(index));
            assert_eq!(vm.reads(1, 100), 104);
            drop(export);
            assert_eq!(vm.peer.0.read(&mut [0]).unwrap(), 0, "one that nobody keeps is over");
        }
    }
}

#[test]
fn a_packed_ring_that_stopped_where_it_once_began_is_known_to_have_run() {
    let image = Image::new();
    let (ours, export) = image.begin();
    let mut vm = Vm::boot(ours, Rings { packed: true, event_idx: true, size: 16 });
    // Two laps: ten of three descriptors, and one of two.
    for _ in 0..10 {
        vm.reads(0, 0);
    }
    let piece = |addr, len| Piece { addr, len };
    vm.write(HEADER, &4u128.to_le_bytes());
    vm.add(0, &[piece(HEADER, 16)], &[piece(STATUS, 1)]);
    vm.publish();
    vm.ends_well(0);
    let _next = image.replace(export);
    vm.reads(0, 0);
}

#[test]
fn a_session_whose_packed_ring_has_lost_its_place_is_not_kept_for_a_daemon_that_would_not_know() {
    let image = Image::new();
    for has_run in [true, false] {
        let (ours, export) = image.begin();
        let mut vm = Vm::boot(ours, Rings { packed: true, event_idx: true, size: 16 });
        if has_run {
            vm.reads(0, 0);
        }
        drop(export);
        // As it comes back to a daemon that knows nothing of its ring, which it does not let run yet.
        let (ours, export) = image.begin();
        vm.peer = Peer(ours);
        let features = vm.peer.ask_u64(GET_FEATURES) & !F_LOG_ALL;
        vm.peer.say(SET_FEATURES, 0, &features.to_ne_bytes(), &[]);
        let protocol = vm.peer.ask_u64(GET_PROTOCOL_FEATURES);
        vm.peer.say(SET_PROTOCOL_FEATURES, 0, &longs(&[protocol]), &[]);
        share(&vm.peer, &vm.files.each_ref());
        vm.peer.say(SET_VRING_NUM, 0, &words(&[0, 16]), &[]);
        vm.peer.say(SET_VRING_BASE, 0, &words(&[0, PACKED_BASE]), &[]);
        vm.address(0, None);
        vm.peer.say(SET_VRING_KICK, 0, &longs(&[0]), &[eventfd(0, EventfdFlags::NONBLOCK).unwrap().as_fd()]);
        assert_eq!(vm.peer.order(SET_VRING_ENABLE, &words(&[0, 0])), Some(0));
        assert_eq!(export.end_and_keep().1.is_none(), has_run);
    }
}

#[test]
fn rings_and_memory_are_what_the_client_has_said_last() {
    let image = Image::new();
    let (ours, export) = image.begin();
    let mut vm = Vm::boot(ours, Rings { packed: false, event_idx: false, size: 16 });
    // Another table in the place of the first, memory that comes and goes, and a ring that is not to run.
    share(&vm.peer, &vm.files.each_ref());
    let other = Region::anonymous(1 << 40, 1 << 20).unwrap();
    let row = longs(&[0, other.guest_addr, other.size, 1 << 40, 0]);
    let add = |vm: &mut Vm| {
        vm.peer.say(ADD_MEM_REG, NEED_REPLY, &row, &[other.file.as_fd()]);
        assert_eq!(vm.peer.hear(), Some(longs(&[0])));
    };
    add(&mut vm);
    assert_eq!(vm.peer.order(SET_VRING_ENABLE, &words(&[1, 0])), Some(0));
    let export = image.replace(export);
    vm.request(1, 0, 0);
    vm.sync();
    assert!(!vm.rings[1].driver.has_used(), "it was disabled");
    assert_eq!(vm.peer.order(SET_VRING_ENABLE, &words(&[1, 1])), Some(0));
    vm.ends_well(1);
    // It is there still, and then is not.
    assert_eq!(vm.peer.order(REM_MEM_REG, &row), Some(0));
    let _next = image.replace(export);
    add(&mut vm);
}

#[test]
fn what_a_driver_chose_and_how_its_client_is_told_of_news_outlive_the_export() {
    const CONFIG_WCE: u32 = 32;
    let image = Image::new();
    let (ours, export) = image.begin();
    let mut peer = agreed(ours);
    let (mut heard, channel) = UnixStream::pair().unwrap();
    peer.say(SET_BACKEND_REQ_FD, 0, &[], &[channel.as_fd()]);
    drop(channel);
    assert_eq!(peer.order(SET_CONFIG, &[words(&[CONFIG_WCE, 1, 0]), vec![0]].concat()), Some(0));
    let next = image.replace(export);
    let told = peer.ask(GET_CONFIG, &[words(&[CONFIG_WCE, 1, 0]), vec![0]].concat()).unwrap();
    assert_eq!(told.last(), Some(&0), "its write cache is off still");
    assert!(next.resize(2 * MIB), "there is somebody to tell");
    heard.read_exact(&mut [0; 12]).unwrap();
}

#[test]
fn nobody_is_let_in_before_a_session_that_was_kept_goes_on_or_is_given_up() {
    for goes_on in [true, false] {
        let image = Image::new();
        let (ours, export) = image.begin();
        let mut first = agreed(ours);
        let kept = end(export);
        let dir = tempfile::tempdir().unwrap();
        let mut next = image.next(&dir, Access::default());
        let mut second = Peer(UnixStream::connect(dir.path().join("socket")).unwrap());
        second.say(GET_QUEUE_NUM, 0, &[], &[]);
        assert!(next.go_on_with(goes_on.then(|| kept.take().unwrap())).is_none());
        if goes_on {
            assert_eq!(first.ask_u64(GET_QUEUE_NUM), QUEUES.into());
            second.0.set_nonblocking(true).unwrap();
            assert!(second.hear().is_none(), "it waits for the first to leave");
            second.0.set_nonblocking(false).unwrap();
            drop(first);
        }
        assert_eq!(second.hear(), Some(longs(&[QUEUES.into()])));
    }
}

#[test]
fn what_lies_in_the_rings_of_a_client_that_has_died_before_its_session_goes_on_is_not_done() {
    let image = Image::new();
    let (ours, export) = image.begin();
    let mut vm = Vm::boot(ours, Rings { packed: false, event_idx: false, size: 16 });
    assert_eq!(vm.reads(0, 7), 0);
    let kept = end(export);
    // In the gap, and not the guest's last word: its monitor had begun another.
    vm.write(BUFFER, &[0xaa; 512]);
    vm.request(0, 1, 7);
    vm.peer.say(GET_QUEUE_NUM, 0, &[], &[]);
    drop(vm);
    let dir = tempfile::tempdir().unwrap();
    let mut next = image.next(&dir, Access::default());
    assert!(next.go_on_with(Some(kept.take().unwrap())).is_none());
    // Who comes next is let in when the first is over.
    agreed(UnixStream::connect(dir.path().join("socket")).unwrap());
    let mut sector = [0xff; 512];
    image.0.as_file().read_exact_at(&mut sector, 7 * 512).unwrap();
    assert_eq!(sector, [0; 512]);
}

#[test]
fn a_session_is_kept_between_two_messages_and_of_an_export_that_is_not_deleted() {
    let image = Image::new();
    // In the middle of a message.
    let (ours, theirs) = UnixStream::pair().unwrap();
    let unread = theirs.try_clone().unwrap();
    let export = image.export(ExportConfig { keeping: Keeping::Keeps, ..export_config(Address::Fd(theirs.into())) });
    let mut peer = agreed(ours);
    peer.0.write_all(&words(&[GET_FEATURES])).unwrap();
    await_that("half a message to be read", || rustix::io::ioctl_fionread(&unread).unwrap() == 0);
    assert!(export.end_and_keep().1.is_none());
    // Of one that is deleted.
    let (ours, export) = image.begin();
    let mut peer = agreed(ours);
    assert!(!export.ends_at_once());
    assert!(export.end_and_keep().1.is_none());
    assert_eq!(peer.0.read(&mut [0]).unwrap(), 0);
    // Where nobody keeps any.
    let (ours, theirs) = UnixStream::pair().unwrap();
    let export = image.export(export_config(Address::Fd(theirs.into())));
    let _peer = agreed(ours);
    assert!(export.end_and_keep().1.is_none());
}

#[test]
fn a_client_that_another_daemon_has_let_in_is_hung_up_on_by_one_that_does_not_know_its_user() {
    let image = Image::new();
    let (ours, export) = image.begin();
    let mut peer = agreed(ours);
    let kept = end(export);
    let ours = rustix::process::geteuid().as_raw();
    let dir = tempfile::tempdir().unwrap();
    let mut next = image.next(&dir, Access { uids: vec![ours + 1], ..Access::default() });
    assert!(next.go_on_with(Some(kept.take().unwrap())).is_none());
    assert_eq!(peer.0.read(&mut [0]).unwrap(), 0);
}

#[test]
fn a_message_that_comes_as_the_export_ends_is_answered_once_by_one_or_by_the_next() {
    let image = Image::new();
    let (ours, mut export) = image.begin();
    let mut peer = agreed(ours);
    for _ in 0..50 {
        peer.say(GET_QUEUE_NUM, 0, &[], &[]);
        export = image.replace(export);
        assert_eq!(peer.hear(), Some(longs(&[QUEUES.into()])));
    }
    peer.0.set_nonblocking(true).unwrap();
    assert!(peer.hear().is_none());
}

#[test]
fn a_session_whose_rings_wait_for_a_disk_that_another_has_locked_is_kept_as_well() {
    let image = Image::new();
    let file = Driver::File { filename: image.0.path().to_owned() };
    let options = Options { allow_inactive: true, ..Options::new("disk", file) };
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let export = |keeping| {
        let config = ExportConfig { keeping, ..export_config(Address::Path(socket.clone())) };
        let disk = Arc::new(Disk::open(&options).unwrap());
        Export::start(config, blk_config(MIB, QUEUES), disk, vec![image.1.0.clone()]).unwrap()
    };
    let first = export(Keeping::Keeps);
    let mut vm = Vm::boot(UnixStream::connect(&socket).unwrap(), Rings { packed: false, event_idx: false, size: 16 });
    let mut kept = end(first);
    for is_locked in [true, false] {
        let other = Arc::new(Disk::open(&options).unwrap());
        let locked = is_locked.then(|| other.activate().unwrap());
        let mut next = export(Keeping::Kept);
        assert!(next.go_on_with(Some(kept.take().unwrap())).is_none());
        if !is_locked {
            vm.reads(0, 0);
        }
        kept = end(next);
        drop(locked);
    }
}

#[test]
fn what_lies_in_the_rings_of_a_client_that_dies_while_its_session_waits_for_a_lock_is_not_done() {
    let (image, gate, dir) = (Image::new(), Gate::new(), tempfile::tempdir().unwrap());
    let address = || Address::Path(dir.path().join("socket"));
    let connect = || UnixStream::connect(dir.path().join("socket")).unwrap();
    let export = |keeping| {
        let config = ExportConfig { keeping, ..export_config(address()) };
        Export::start(config, blk_config(MIB, QUEUES), gate.lockable_disk(), vec![image.1.0.clone()]).unwrap()
    };
    gate.open();
    let first = export(Keeping::Keeps);
    let mut vm = Vm::boot(connect(), Rings { packed: false, event_idx: false, size: 16 });
    vm.reads(0, 7);
    let kept = end(first);
    vm.request(0, 1, 7);
    let locked = gate.locked();
    gate.shut();
    gate.keep_locks();
    gate.take_given();
    let mut next = export(Keeping::Kept);
    assert!(next.go_on_with(Some(kept.take().unwrap())).is_none());
    await_that("its disk to be locked", || gate.locked() > locked);
    drop(vm);
    gate.open();
    agreed(connect());
    assert_eq!(gate.take_given(), []);
}

#[test]
fn what_is_left_of_rings_of_the_other_layout_does_not_keep_a_session_from_going_on() {
    let image = Image::new();
    let (ours, export) = image.begin();
    let mut peer = agreed(ours);
    let features = peer.ask_u64(GET_FEATURES);
    peer.say(SET_FEATURES, 0, &features.to_ne_bytes(), &[]);
    peer.say(SET_VRING_NUM, 0, &words(&[1, 100]), &[]);
    assert_eq!(peer.order(SET_VRING_BASE, &words(&[1, 0x8005_8005])), Some(0));
    peer.say(SET_FEATURES, 0, &(features & !RING_PACKED).to_ne_bytes(), &[]);
    let _next = image.replace(export);
    assert_eq!(peer.ask_u64(GET_QUEUE_NUM), QUEUES.into());
}
