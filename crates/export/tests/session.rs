//! What an export answers, message by message, to a front-end that minds the protocol, and to one that does not.
//!
//! Requests that go through rings are tested with real clients and hostile guests beside the command.

#[path = "../../event-loop/tests/lingering/mod.rs"]
mod lingering;
mod peer;

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egret_disk::{Disk, Driver, LOCK_PATIENCE, Options};
use egret_event_loop::{Nanos, closer};
use egret_export::{Access, Address, BindError, Export, ExportConfig, ExportError, ListenError, MAX_MAPPINGS, Rings};
use egret_virtio::blk::BlkConfig;
use egret_vring::memory::{MemoryBudget, MemoryLimits, MemoryRules, Region};
use egret_vring::ring::{Inflight, InflightConfig};
use egret_vring::vhost_user::F_LOG_ALL;

use lingering::lingering;
use peer::gate::{Gate, SIZE};
use peer::*;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

const REPLY_ACK: u64 = 1 << 3;
const F_PROTOCOL_FEATURES: u64 = 1 << 30;

const MIB: u64 = 1 << 20;

fn export(io: &IoThread, address: Address) -> Result<Export, ExportError> {
    export_as(io, export_config(address))
}

fn export_as(io: &IoThread, config: ExportConfig) -> Result<Export, ExportError> {
    let driver = Driver::Null { size: 64 * MIB, latency: Nanos::ZERO, read_zeroes: true };
    let disk = Arc::new(Disk::open(&Options::new("null", driver)).unwrap());
    Export::start(config, blk_config(disk.size(), 3), disk, vec![io.0.clone()])
}

/// A front-end connected to a new export.
fn peer(io: &IoThread) -> (Peer, Export) {
    peer_as(io, |config| config)
}

/// One that is not as usual.
fn peer_as(io: &IoThread, change: impl FnOnce(ExportConfig) -> ExportConfig) -> (Peer, Export) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Peer(ours), export_as(io, change(export_config(Address::Fd(theirs.into())))).unwrap())
}

/// One that has agreed on acknowledgements.
fn agreed(io: &IoThread) -> (Peer, Export) {
    let (mut peer, export) = peer(io);
    peer.agree();
    (peer, export)
}

/// A request for `size` bytes of configuration at `offset`.
fn config(offset: u32, size: u32) -> Vec<u8> {
    [words(&[offset, size, 0]), vec![0; size as usize]].concat()
}

#[test]
fn what_is_offered_is_what_the_device_was_made_as() {
    let io = IoThread::start();
    let (mut peer, _export) = peer(&io);
    assert_eq!(peer.ask_u64(GET_FEATURES) & (F_PROTOCOL_FEATURES | F_LOG_ALL), F_PROTOCOL_FEATURES | F_LOG_ALL);
    let offered = [0, 1, 3, 5, 9, 12, 13, 15, 19, 20, 23].map(|bit| 1u64 << bit);
    assert_eq!(peer.ask_u64(GET_PROTOCOL_FEATURES), offered.into_iter().sum());
    assert_eq!(peer.ask_u64(GET_QUEUE_NUM), 3);
    assert_eq!(peer.ask_u64(GET_MAX_MEM_SLOTS), 64);
    // What was not offered is nothing to agree on, whatever else is.
    assert_eq!(peer.order(SET_PROTOCOL_FEATURES, &(REPLY_ACK | 1 << 2).to_ne_bytes()), None);
}

/// A front-end of an export for user-mode Linux, or of another.
fn peer_of(io: &IoThread, user_mode_linux: bool) -> (Peer, Export) {
    peer_as(io, |config| ExportConfig { rings: Rings { user_mode_linux, ..config.rings }, ..config })
}

#[test]
fn packed_rings_are_offered_but_to_user_mode_linux() {
    let io = IoThread::start();
    for is_uml in [false, true] {
        let (mut peer, _export) = peer_of(&io, is_uml);
        let features = peer.ask_u64(GET_FEATURES);
        assert_eq!(features & RING_PACKED == 0, is_uml);
        peer.agree();
        assert_eq!(peer.order(SET_FEATURES, &longs(&[features | RING_PACKED])), Some(u64::from(is_uml)), "{is_uml}");
    }
}

#[test]
fn an_order_is_acknowledged_where_that_was_agreed_on_and_asked_for_and_by_whether_it_was_carried_out() {
    let io = IoThread::start();
    for (is_agreed, flags, is_acknowledged) in
        [(true, NEED_REPLY, true), (true, 0, false), (false, NEED_REPLY, false), (false, 0, false)]
    {
        let (mut peer, _export) = peer(&io);
        if is_agreed {
            peer.agree();
        }
        peer.say(SET_VRING_BASE, flags, &words(&[2, 1]), &[]);
        if is_acknowledged {
            assert_eq!(peer.hear(), Some(longs(&[0])));
        }
        // What is heard next is the answer to this, so that there was none before it.
        assert_eq!(peer.ask(GET_VRING_BASE, &words(&[2, 0])), Some(words(&[2, 1])), "{is_agreed} {flags}");
        peer.say(SET_VRING_BASE, flags, &words(&[3, 1]), &[]);
        assert_eq!(peer.hear(), is_acknowledged.then(|| longs(&[1])), "{is_agreed} {flags}");
    }
}

#[test]
fn the_message_that_agrees_on_acknowledgements_has_one_if_it_asks_for_that() {
    let io = IoThread::start();
    for is_agreed in [true, false] {
        let (mut peer, _export) = peer(&io);
        let features = peer.ask_u64(GET_PROTOCOL_FEATURES);
        let features = if is_agreed { features } else { features & !REPLY_ACK };
        peer.say(SET_PROTOCOL_FEATURES, NEED_REPLY, &longs(&[features]), &[]);
        // What is answered next, so that nobody waits where there is no acknowledgement.
        peer.say(GET_VRING_BASE, 0, &words(&[2, 0]), &[]);
        if is_agreed {
            assert_eq!(peer.hear(), Some(longs(&[0])));
        }
        assert_eq!(peer.hear(), Some(words(&[2, 0])), "{is_agreed}");
    }
}

#[test]
fn a_client_has_so_many_regions_of_memory_and_may_have_another_when_it_has_taken_one_away() {
    let io = IoThread::start();
    let (mut peer, _export) = agreed(&io);
    let region = Region::anonymous(0, 4096).unwrap();
    let row = |at: u64| longs(&[0, at * 4096, 4096, at * 4096, 0]);
    let add = |peer: &mut Peer, at: u64| {
        peer.say(ADD_MEM_REG, NEED_REPLY, &row(at), &[region.file.as_fd()]);
        peer.hear()
    };
    for at in 0..64 {
        assert_eq!(add(&mut peer, at), Some(longs(&[0])), "{at}");
    }
    assert_eq!(peer.order(REM_MEM_REG, &row(7)), Some(0));
    assert_eq!(add(&mut peer, 64), Some(longs(&[0])));
    assert_eq!(add(&mut peer, 65), Some(longs(&[1])));
    assert!(peer.hear().is_none());
    let (mut peer, _export) = agreed(&io);
    assert_eq!(peer.order(REM_MEM_REG, &row(7)), Some(1), "it was never there");
}

#[test]
fn a_record_is_for_queues_that_there_are_of_a_length_that_they_may_have_and_none_of_them_runs() {
    let io = IoThread::start();
    let record = Region::anonymous(0, MIB).unwrap();
    for (queues, size, is_right) in [
        (0, 128, false),
        (1, 1, true),
        (3, 128, true),
        (4, 128, false),
        (3, 0, false),
        (3, 1024, true),
        (3, 1025, false),
    ] {
        let what = format!("{queues} queues of {size}");
        let message = |len| longs(&[len, 0, size << 16 | queues]);
        let (mut peer, _export) = agreed(&io);
        assert_eq!(peer.ask(GET_INFLIGHT_FD, &message(0)).is_some(), is_right, "{what}");
        let (mut peer, _export) = agreed(&io);
        peer.say(SET_INFLIGHT_FD, NEED_REPLY, &message(MIB), &[record.file.as_fd()]);
        assert_eq!(peer.hear(), Some(longs(&[u64::from(!is_right)])), "{what}");
    }
    let (mut peer, _export) = agreed(&io);
    let _ring = start_ring(&mut peer, 0);
    peer.say(SET_INFLIGHT_FD, NEED_REPLY, &longs(&[MIB, 0, 128 << 16 | 3]), &[record.file.as_fd()]);
    assert_eq!(peer.hear(), Some(longs(&[1])));
}

#[test]
fn the_configuration_is_read_at_offset_0_and_at_the_old_0x100() {
    let io = IoThread::start();
    let (mut peer, _export) = agreed(&io);
    for base in [0, 0x100] {
        let reply = peer.ask(GET_CONFIG, &config(base, 60)).unwrap();
        assert_eq!(reply.len(), 72, "a header of three words, and what was asked for");
        assert_eq!(reply[..12], words(&[base, 60, 0]));
        assert_eq!(reply[12..20], (64 * MIB / 512).to_le_bytes(), "capacity comes first");
        assert_eq!(reply[12 + 34..][..2], 3u16.to_le_bytes(), "num_queues is at 34");
    }
}

#[test]
fn only_the_cache_mode_can_be_written_to_the_configuration() {
    let io = IoThread::start();
    let (mut peer, _export) = agreed(&io);
    let write = |offset, byte| [words(&[offset, 1, 0]), vec![byte]].concat();
    for (byte, offset) in [(0, 32), (1, 0x100 + 32)] {
        assert_eq!(peer.order(SET_CONFIG, &write(offset, byte)), Some(0));
        assert_eq!(peer.ask(GET_CONFIG, &config(32, 1)).unwrap()[12], byte);
    }
    assert_eq!(peer.order(SET_CONFIG, &write(0, 1)), Some(1), "refused");
    assert!(peer.hear().is_none(), "and the session is over");
}

#[test]
fn the_cache_mode_that_a_driver_chose_is_kept_with_its_record_of_what_is_in_flight() {
    let io = IoThread::start();
    let record = InflightConfig { queues: 3, queue_size: 128, packed: true };
    let record = Region::anonymous(0, record.bytes()).unwrap();
    let hand_over = |peer: &mut Peer| {
        let message: Vec<u8> = [record.size, 0, 128 << 16 | 3].into_iter().flat_map(u64::to_ne_bytes).collect();
        peer.say(SET_INFLIGHT_FD, 0, &message, &[record.file.as_fd()]);
        peer.ask(GET_CONFIG, &config(32, 1)).unwrap()[12]
    };
    let (mut peer, first) = agreed(&io);
    assert_eq!(hand_over(&mut peer), 1, "a record that is new says nothing");
    assert_eq!(peer.order(SET_CONFIG, &[words(&[32, 1, 0]), vec![0]].concat()), Some(0));
    drop((peer, first));
    let (mut peer, _second) = agreed(&io);
    assert_eq!(hand_over(&mut peer), 0);
}

#[test]
fn a_record_is_as_long_as_the_layout_of_the_rings_asks_for() {
    let io = IoThread::start();
    let asked: Vec<u8> = [0, 4096, 128 << 16 | 3].into_iter().flat_map(u64::to_ne_bytes).collect();
    for (unwanted, packed) in [(RING_PACKED, false), (0, true)] {
        let (mut peer, _export) = peer(&io);
        // For the longest rings, and at the beginning, whatever it was asked for.
        let place = |packed| {
            let size = InflightConfig { queues: 3, queue_size: 1024, packed }.bytes();
            [size.to_ne_bytes(), [0; 8]].concat()
        };
        assert_eq!(peer.ask(GET_INFLIGHT_FD, &asked).unwrap()[..16], place(true), "before it is known which");
        peer.agree_but(unwanted);
        assert_eq!(peer.ask(GET_INFLIGHT_FD, &asked).unwrap()[..16], place(packed));
    }
}

/// A dirty log of so many bytes, and the message that hands it over.
fn dirty_log(size: u64) -> (Region, Vec<u8>) {
    (Region::anonymous(0, size).unwrap(), longs(&[size, 0]))
}

#[test]
fn a_dirty_log_is_taken_with_the_answer_that_front_ends_wait_for() {
    let io = IoThread::start();
    let (mut peer, _export) = agreed(&io);
    let (log, message) = dirty_log(4096);
    for _ in 0..3 {
        peer.say(SET_LOG_BASE, NEED_REPLY, &message, &[log.file.as_fd()]);
        assert_eq!(peer.hear(), Some(message.clone()), "one answer, which is no acknowledgement");
    }
    let signal = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    peer.say(SET_LOG_FD, NEED_REPLY, &[], &[signal.as_fd()]);
    assert_eq!(peer.hear(), Some(longs(&[0])));
}

#[test]
fn a_dirty_log_that_cannot_be_one_ends_the_session() {
    let io = IoThread::start();
    let (log, _) = dirty_log(4096);
    let (pipe, _writer) = UnixStream::pair().unwrap();
    let eventfd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(4096).unwrap();
    let wrong: [(&str, Vec<u8>, &[BorrowedFd<'_>]); 10] = [
        ("of no length", longs(&[0, 0]), &[log.file.as_fd()]),
        ("longer than its file", longs(&[4097, 0]), &[log.file.as_fd()]),
        ("behind the end of its file", longs(&[4096, 4096]), &[log.file.as_fd()]),
        ("of an offset that wraps round", longs(&[4096, u64::MAX]), &[log.file.as_fd()]),
        ("of all the bytes that there could be", longs(&[u64::MAX, 0]), &[log.file.as_fd()]),
        ("without a descriptor", longs(&[4096, 0]), &[]),
        ("described by its address alone", longs(&[4096]), &[log.file.as_fd()]),
        ("in a socket", longs(&[4096, 0]), &[pipe.as_fd()]),
        ("in a counter", longs(&[4096, 0]), &[eventfd.as_fd()]),
        ("on a disk", longs(&[4096, 0]), &[file.as_fd()]),
    ];
    for (what, message, fds) in wrong {
        let (mut peer, _export) = agreed(&io);
        peer.say(SET_LOG_BASE, NEED_REPLY, &message, fds);
        // What its answer would be otherwise is longer than an acknowledgement.
        assert!(peer.hear().is_none_or(|answer| answer == longs(&[1])), "{what}");
        assert!(peer.hear().is_none(), "{what}");
    }
    let (mut peer, _export) = agreed(&io);
    peer.say(SET_LOG_FD, NEED_REPLY, &[], &[pipe.as_fd()]);
    assert_eq!((peer.hear(), peer.hear()), (Some(longs(&[1])), None), "a log is signalled by eventfds");
}

/// Has a device's state transferred, with a channel of the front-end's that cannot be one.
fn transfer(peer: &mut Peer, direction: u32) -> Option<(u64, Option<File>)> {
    let (pipe, _reader) = UnixStream::pair().unwrap();
    peer.say(SET_DEVICE_STATE_FD, 0, &words(&[direction, 0]), &[pipe.as_fd()]);
    peer.hear_with().map(|(answer, fd)| (answer, fd.map(File::from)))
}

fn save(peer: &mut Peer) -> Vec<u8> {
    let (answer, file) = transfer(peer, 0).unwrap();
    assert_eq!(answer, 0);
    let mut state = Vec::new();
    file.unwrap().read_to_end(&mut state).unwrap();
    assert_eq!(peer.ask_u64(CHECK_DEVICE_STATE), 0);
    state
}

fn load(peer: &mut Peer, state: &[u8]) -> u64 {
    let (answer, file) = transfer(peer, 1).unwrap();
    assert_eq!(answer, 0);
    file.unwrap().write_all(state).unwrap();
    peer.ask_u64(CHECK_DEVICE_STATE)
}

#[test]
fn a_device_s_state_moves_to_another_which_has_what_the_driver_has_chosen() {
    let io = IoThread::start();
    let (mut source, _first) = agreed(&io);
    let (mut destination, _second) = agreed(&io);
    for writeback in [0, 1, 0] {
        assert_eq!(source.order(SET_CONFIG, &[words(&[32, 1, 0]), vec![writeback]].concat()), Some(0));
        let state = save(&mut source);
        assert_eq!(load(&mut destination, &state), 0);
        assert_eq!(destination.ask(GET_CONFIG, &config(32, 1)).unwrap()[12], writeback);
    }
}

#[test]
fn a_cache_mode_that_comes_before_the_features_is_the_one_that_queues_and_records_begin_with() {
    let io = IoThread::start();
    let (mut source, _first) = agreed(&io);
    assert_eq!(source.order(SET_CONFIG, &[words(&[32, 1, 0]), vec![0]].concat()), Some(0));
    let state = save(&mut source);

    // As cloud-hypervisor has it: the features are said when the guest is there.
    let (mut destination, _second) = peer(&io);
    let protocol = destination.ask_u64(GET_PROTOCOL_FEATURES);
    destination.say(SET_PROTOCOL_FEATURES, 0, &protocol.to_ne_bytes(), &[]);
    assert_eq!(load(&mut destination, &state), 0);
    destination.agree();
    assert_eq!(destination.ask(GET_CONFIG, &config(32, 1)).unwrap()[12], 0);
    let record = InflightConfig { queues: 3, queue_size: 128, packed: false };
    let record = Region::anonymous(0, record.bytes()).unwrap();
    destination.say(SET_INFLIGHT_FD, 0, &longs(&[record.size, 0, 128 << 16 | 3]), &[record.file.as_fd()]);
    assert_eq!(destination.ask(GET_CONFIG, &config(32, 1)).unwrap()[12], 0);
    drop(destination);

    // A daemon in this one's place has it of the record, before the features too.
    let (mut next, _third) = peer(&io);
    next.say(SET_INFLIGHT_FD, 0, &longs(&[record.size, 0, 128 << 16 | 3]), &[record.file.as_fd()]);
    next.agree();
    assert_eq!(next.ask(GET_CONFIG, &config(32, 1)).unwrap()[12], 0);
}

#[test]
fn a_write_cache_that_was_turned_off_is_off_for_the_next_driver_and_in_its_record_until_the_client_has_gone() {
    let io = IoThread::start();
    let access = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = access.path().join("e0");
    let _export = export(&io, Address::Path(path.clone())).unwrap();
    let connect = || {
        let mut peer = Peer(UnixStream::connect(&path).unwrap());
        peer.agree();
        peer
    };
    let told = |peer: &mut Peer| peer.ask(GET_CONFIG, &config(32, 1)).unwrap()[12];
    let (flush, config_wce) = (1 << 9, 1 << 11);

    let mut peer = connect();
    let system = peer.ask_u64(GET_FEATURES) & !RING_PACKED;
    assert_eq!(peer.order(SET_CONFIG, &[words(&[32, 1, 0]), vec![0]].concat()), Some(0));
    // A front-end need not say that a guest has begun again. Its firmware takes what it knows.
    for (request, body) in [
        (RESET_DEVICE, longs(&[])),
        (RESET_OWNER, longs(&[])),
        (SET_FEATURES, longs(&[system & !(flush | config_wce)])),
        (SET_FEATURES, longs(&[system & !config_wce])),
    ] {
        assert_eq!(peer.order(request, &body), Some(0));
        assert_eq!(peer.order(SET_FEATURES, &longs(&[system])), Some(0));
        assert_eq!(told(&mut peer), 0, "after {request}");
    }
    let config = InflightConfig { queues: 3, queue_size: 1024, packed: false };
    let record = Region::anonymous(0, config.bytes()).unwrap();
    peer.say(SET_INFLIGHT_FD, NEED_REPLY, &longs(&[record.size, 0, 1024 << 16 | 3]), &[record.file.as_fd()]);
    assert_eq!(peer.hear(), Some(longs(&[0])));
    assert_eq!(Inflight::map(&record.file, 0, record.size, config).unwrap().choices(), Some(0));
    drop(peer);
    assert_eq!(told(&mut connect()), 1, "another front-end asks");
}

#[test]
fn a_state_that_is_not_one_is_refused_and_the_session_goes_on() {
    let io = IoThread::start();
    let (mut peer, _export) = agreed(&io);
    assert_eq!(peer.ask_u64(CHECK_DEVICE_STATE), 1, "nobody has asked for one");
    assert_eq!(peer.order(SET_CONFIG, &[words(&[32, 1, 0]), vec![0]].concat()), Some(0));
    let good = save(&mut peer);
    let with = |at: usize, byte: u8| {
        let mut state = good.clone();
        state[at] = byte;
        state
    };
    let bad = [
        ("nothing", Vec::new()),
        ("garbage", vec![0xaa; 100]),
        ("half of it", good[..9].to_vec()),
        ("of the future", with(8, 2)),
        ("of another device", with(10, 8)),
        ("longer than it is", with(12, 2)),
        ("longer than any", with(15, 0xff)),
        ("a cache mode that there is not", with(16, 2)),
    ];
    for (what, state) in bad {
        assert_eq!(load(&mut peer, &state), 1, "{what}");
        assert_eq!(peer.ask(GET_CONFIG, &config(32, 1)).unwrap()[12], 0, "{what}");
    }
    let (_, file) = transfer(&mut peer, 1).unwrap();
    let mut file = file.unwrap();
    assert!(file.write_all(&vec![0; 2 << 20]).is_err(), "there is an end to it");
    assert_eq!(peer.ask_u64(CHECK_DEVICE_STATE), 1);
    assert_eq!(load(&mut peer, &good), 0);
    // A phase or a direction that there is not ends the session.
    for wrong in [[2, 0], [0, 1]] {
        let (mut peer, _export) = agreed(&io);
        let (pipe, _reader) = UnixStream::pair().unwrap();
        peer.say(SET_DEVICE_STATE_FD, 0, &words(&wrong), &[pipe.as_fd()]);
        assert!(peer.hear().is_none());
    }
}

#[test]
fn a_resized_disk_is_announced_on_the_channel_the_client_gave() {
    let io = IoThread::start();
    let (mut peer, export) = agreed(&io);
    assert!(!export.resize(65 * MIB), "nobody to tell yet");
    let (ours, theirs) = UnixStream::pair().unwrap();
    peer.say(SET_BACKEND_REQ_FD, NEED_REPLY, &0u64.to_ne_bytes(), &[theirs.as_fd()]);
    assert!(peer.hear().is_some());
    assert!(export.resize(128 * MIB));
    let mut change = [0; 12];
    (&ours).read_exact(&mut change).unwrap();
    assert_eq!(change[..], words(&[2, 1, 0]), "CONFIG_CHANGE_MSG, which has no body");
    assert_eq!(peer.ask(GET_CONFIG, &config(0, 8)).unwrap()[12..], (128 * MIB / 512).to_le_bytes());
}

#[test]
fn a_disk_that_grows_by_part_of_a_block_has_so_many_whole_blocks_to_its_client() {
    let io = IoThread::start();
    let driver = Driver::Null { size: 64 * MIB, latency: Nanos::ZERO, read_zeroes: true };
    let disk = Arc::new(Disk::open(&Options::new("null", driver)).unwrap());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let block = BlkConfig { logical_block_size: 4096, physical_block_size: 4096, ..blk_config(disk.size(), 1) };
    let export = Export::start(export_config(Address::Fd(theirs.into())), block, disk, vec![io.0.clone()]).unwrap();
    let mut peer = Peer(ours);
    peer.agree();
    export.resize(64 * MIB + 4096 + 512);
    let sectors = (64 * MIB + 4096) / 512;
    assert_eq!(peer.ask(GET_CONFIG, &config(0, 8)).unwrap()[12..], sectors.to_le_bytes());
}

#[test]
fn a_record_that_was_made_here_is_long_enough_for_rings_that_are_longer_than_was_asked_for() {
    let io = IoThread::start();
    let (mut peer, _export) = agreed(&io);
    let of = |size| [size, 0, 1 << 16 | 3].into_iter().flat_map(u64::to_ne_bytes).collect::<Vec<u8>>();
    peer.say(GET_INFLIGHT_FD, 0, &of(0), &[]);
    let (size, record) = peer.hear_with().unwrap();
    peer.0.read_exact(&mut [0; 16]).unwrap();
    peer.say(SET_INFLIGHT_FD, 0, &of(size), &[record.unwrap().as_fd()]);
    let _ring = start_ring(&mut peer, 0);
}

#[test]
fn a_ring_that_is_kicked_waits_to_be_enabled_by_a_front_end_that_can_say_so_and_runs_where_it_cannot() {
    let io = IoThread::start();
    for (unwanted, runs) in [(0, false), (F_PROTOCOL_FEATURES, true)] {
        let (mut peer, export) = peer(&io);
        let features = peer.ask_u64(GET_FEATURES) & !(RING_PACKED | unwanted);
        peer.say(SET_FEATURES, 0, &features.to_ne_bytes(), &[]);
        let _ring = kick_ring(&mut peer, 0);
        // When this is answered all before it is done.
        assert_eq!(peer.ask_u64(GET_QUEUE_NUM), 3);
        assert_eq!(export.is_in_use(), runs, "{unwanted:#x}");
    }
}

#[test]
fn a_size_that_was_announced_before_rings_run_is_announced_again_when_one_does_unless_it_was_read() {
    let io = IoThread::start();
    let (mut peer, export) = agreed(&io);
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    peer.say(SET_BACKEND_REQ_FD, NEED_REPLY, &0u64.to_ne_bytes(), &[theirs.as_fd()]);
    assert!(peer.hear().is_some());
    let is_told = || (&ours).read(&mut [0; 12]).is_ok_and(|len| len == 12);
    let read = |peer: &mut Peer| peer.ask(GET_CONFIG, &config(0, 60)).unwrap();
    let stop = |peer: &mut Peer| peer.ask(GET_VRING_BASE, &words(&[0, 0])).unwrap();

    // What an earlier connection has read may be of long ago.
    let _ring = start_ring(&mut peer, 0);
    assert!(is_told());
    stop(&mut peer);
    read(&mut peer);
    let _ring = start_ring(&mut peer, 0);
    assert!(!is_told(), "it knows");
    stop(&mut peer);

    assert!(export.resize(128 * MIB) && is_told());
    let _ring = start_ring(&mut peer, 0);
    assert!(is_told(), "QEMU has not listened before");
    let _other = start_ring(&mut peer, 1);
    assert!(!is_told());
    stop(&mut peer);
    assert!(export.resize(256 * MIB) && is_told());
    read(&mut peer);
    let _ring = start_ring(&mut peer, 0);
    assert!(!is_told(), "it has read it");
}

#[test]
fn a_client_whose_channel_comes_when_its_rings_run_is_told_then() {
    let io = IoThread::start();
    let (mut peer, _export) = agreed(&io);
    let _ring = start_ring(&mut peer, 0);
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    peer.say(SET_BACKEND_REQ_FD, NEED_REPLY, &0u64.to_ne_bytes(), &[theirs.as_fd()]);
    assert_eq!(peer.hear(), Some(longs(&[0])));
    assert!((&ours).read(&mut [0; 12]).is_ok_and(|len| len == 12));
}

#[test]
fn all_memory_that_a_client_may_have_fits_one_table_and_there_is_room_for_a_log_beside_the_one_before_it() {
    let io = IoThread::start();
    let limits = MemoryLimits { bytes: 65 * MIB, regions: MAX_MAPPINGS };
    let memory = MemoryRules { budget: Some(MemoryBudget::new(limits, "export", "it")), ..MemoryRules::default() };
    let (mut peer, _export) = peer_as(&io, |config| ExportConfig { memory, ..config });
    peer.agree();
    let regions: Vec<_> = (0..64).map(|slot| Region::anonymous(slot * MIB, MIB).unwrap()).collect();
    let files: Vec<_> = regions.iter().map(|region| region.file.as_fd()).collect();
    let places = (0..64).flat_map(|slot| [slot * MIB, MIB, slot * MIB, 0]).collect::<Vec<_>>();
    peer.say(SET_MEM_TABLE, NEED_REPLY, &[words(&[64, 0]), longs(&places)].concat(), &files);
    assert_eq!(peer.hear(), Some(longs(&[0])));
    let (log, message) = dirty_log(4096);
    for _ in 0..3 {
        peer.say(SET_LOG_BASE, NEED_REPLY, &message, &[log.file.as_fd()]);
        assert_eq!(peer.hear(), Some(message.clone()));
    }
    // In the last of them.
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let rings = [0x1000, 0x2000, 0x3000, 0].map(|at| if at > 0 { 63 * MIB + at } else { 0 });
    peer.say(SET_VRING_NUM, 0, &words(&[0, 16]), &[]);
    peer.say(SET_VRING_ADDR, 0, &[words(&[0, 0]), longs(&rings)].concat(), &[]);
    peer.say(SET_VRING_KICK, 0, &longs(&[0]), &[kick.as_fd()]);
    assert_eq!(peer.order(SET_VRING_ENABLE, &words(&[0, 1])), Some(0));
}

/// An image of a MiB, and how it is opened so that it may be inactive.
fn may_be_inactive() -> (tempfile::NamedTempFile, Options) {
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    image.as_file().set_len(MIB).unwrap();
    let driver = Driver::File { filename: image.path().to_owned() };
    let options = Options { allow_inactive: true, ..Options::new("disk", driver) };
    (image, options)
}

#[test]
fn a_disk_that_may_be_inactive_is_active_while_rings_run_and_its_client_is_told_what_others_have_made_of_it() {
    let io = IoThread::start();
    let (image, options) = may_be_inactive();
    let disk = Arc::new(Disk::open(&options).unwrap());
    let (ours, theirs) = UnixStream::pair().unwrap();
    let address = Address::Fd(theirs.into());
    let export =
        Export::start(export_config(address), blk_config(MIB, 3), Arc::clone(&disk), vec![io.0.clone()]).unwrap();
    let mut peer = Peer(ours);
    peer.agree();
    let (channel, theirs) = UnixStream::pair().unwrap();
    channel.set_nonblocking(true).unwrap();
    peer.say(SET_BACKEND_REQ_FD, NEED_REPLY, &0u64.to_ne_bytes(), &[theirs.as_fd()]);
    assert!(peer.hear().is_some());
    let is_told = || (&channel).read(&mut [0; 12]).is_ok_and(|len| len == 12);
    let capacity = |peer: &mut Peer| peer.ask(GET_CONFIG, &config(0, 8)).unwrap()[12..].to_vec();
    assert_eq!(capacity(&mut peer), (MIB / 512).to_le_bytes());
    for (mib, is_news) in [(2, true), (2, false), (3, true)] {
        image.as_file().set_len(mib * MIB).unwrap();
        let _ring = start_ring(&mut peer, 0);
        assert_eq!((disk.is_active(), export.has_active_disks(), is_told()), (true, true, is_news), "{mib} MiB");
        assert_eq!(capacity(&mut peer), (mib * MIB / 512).to_le_bytes());
        // The other is all that runs.
        let _other = start_ring(&mut peer, 1);
        peer.ask(GET_VRING_BASE, &words(&[0, 0])).unwrap();
        assert!(disk.is_active());
        peer.ask(GET_VRING_BASE, &words(&[1, 0])).unwrap();
        assert_eq!((disk.is_active(), export.has_active_disks()), (false, false));
        let elsewhere = Arc::new(Disk::open(&options).unwrap());
        drop(elsewhere.activate().expect("nobody has it locked"));
    }
}

#[test]
fn a_disk_of_two_exports_is_written_out_by_the_one_whose_rings_are_the_last_to_stop() {
    let io = IoThread::start();
    let gate = Gate::new();
    let disk = Arc::new(Disk::open(&Options { allow_inactive: true, ..gate.options() }).unwrap());
    let mut guests = [(); 2].map(|()| {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let config = export_config(Address::Fd(theirs.into()));
        let export = Export::start(config, blk_config(SIZE, 3), Arc::clone(&disk), vec![io.0.clone()]).unwrap();
        let mut peer = Peer(ours);
        peer.agree();
        (peer, export)
    });
    for (round, [first, last]) in [(1, [0, 1]), (2, [1, 0])] {
        let _rings = guests.each_mut().map(|(peer, _)| start_ring(peer, 0));
        guests[first].0.ask(GET_VRING_BASE, &words(&[0, 0])).unwrap();
        assert_eq!((gate.flushed(), disk.is_active()), (round - 1, true));
        guests[last].0.ask(GET_VRING_BASE, &words(&[0, 0])).unwrap();
        assert_eq!((gate.flushed(), disk.is_active()), (round, false));
    }
}

#[test]
fn a_ring_waits_for_a_disk_that_another_has_locked_and_its_session_ends_when_that_takes_too_long() {
    let io = IoThread::start();
    let (_image, options) = may_be_inactive();
    let other = Arc::new(Disk::open(&options).unwrap());
    let gives_up = |is_given_up: bool| {
        let locked = other.activate().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let disk = Arc::new(Disk::open(&options).unwrap());
        let config = export_config(Address::Fd(theirs.into()));
        let _export = Export::start(config, blk_config(MIB, 3), disk, vec![io.0.clone()]).unwrap();
        let mut peer = Peer(ours);
        peer.agree();
        let begun = Instant::now();
        let _ring = kick_ring(&mut peer, 0);
        peer.say(SET_VRING_ENABLE, NEED_REPLY, &words(&[0, 1]), &[]);
        let locked = is_given_up.then_some(locked);
        let gives_up = peer.hear().expect("an answer") != longs(&[0]);
        assert!(!gives_up || begun.elapsed() >= LOCK_PATIENCE);
        drop(locked);
        gives_up
    };
    assert!(gives_up(true));
    // The other may not come to let go in time, but not again and again.
    assert!((0..10).any(|_| !gives_up(false)));
}

#[test]
fn an_export_is_in_use_and_has_its_disk_active_while_a_ring_is_to_run_and_no_longer() {
    let io = IoThread::start();
    let (mut peer, export) = agreed(&io);
    let is = |export: &Export| (export.is_in_use(), export.has_active_disks());
    assert_eq!((export.id(), is(&export)), ("e0", (false, false)));
    let _ring = start_ring(&mut peer, 0);
    let (region, kick) = start_ring(&mut peer, 1);
    assert_eq!(is(&export), (true, true));
    for enabled in [false, true, false, true] {
        assert_eq!(peer.order(SET_VRING_ENABLE, &words(&[0, enabled.into()])), Some(0));
        assert_eq!(is(&export), (true, true), "the other runs");
    }
    peer.ask(GET_VRING_BASE, &words(&[0, 0])).unwrap();
    assert_eq!(is(&export), (true, true), "the other runs");
    for enabled in [false, true, false] {
        assert_eq!(peer.order(SET_VRING_ENABLE, &words(&[1, enabled.into()])), Some(0));
        assert_eq!(is(&export), (enabled, enabled));
    }
    assert_eq!(peer.order(SET_VRING_ENABLE, &words(&[1, 1])), Some(0));
    // Memory that changes stops it and has it go on.
    let table = [words(&[1, 0]), longs(&[0, region.size, 0, 0])].concat();
    peer.say(SET_MEM_TABLE, NEED_REPLY, &table, &[region.file.as_fd()]);
    assert_eq!((peer.hear(), is(&export)), (Some(longs(&[0])), (true, true)));
    for reset in [RESET_DEVICE, RESET_OWNER] {
        assert_eq!(peer.order(reset, &[]), Some(0));
        assert_eq!(is(&export), (false, false));
        peer.say(SET_VRING_KICK, NEED_REPLY, &longs(&[1]), &[kick.as_fd()]);
        assert_eq!((peer.hear(), is(&export)), (Some(longs(&[0])), (false, false)), "nothing else is known of it");
        let _ring = start_ring(&mut peer, 0);
        assert_eq!(is(&export), (true, true));
    }
}

#[test]
fn a_vring_keeps_its_base_over_a_stop() {
    let io = IoThread::start();
    let (mut peer, _export) = agreed(&io);
    for base in [77, 0xffff] {
        assert_eq!(peer.order(SET_VRING_BASE, &words(&[2, base])), Some(0));
        assert_eq!(peer.ask(GET_VRING_BASE, &words(&[2, 0])), Some(words(&[2, base])));
    }
}

#[test]
fn a_packed_vring_begins_on_its_first_lap_and_keeps_both_places_over_a_stop() {
    let io = IoThread::start();
    let (mut peer, _export) = peer(&io);
    peer.agree_but(0);
    assert_eq!(peer.ask(GET_VRING_BASE, &words(&[0, 0])), Some(words(&[0, 0x8000_8000])));
    assert_eq!(peer.order(SET_VRING_BASE, &words(&[2, 0x0007_8003])), Some(0));
    assert_eq!(peer.ask(GET_VRING_BASE, &words(&[2, 0])), Some(words(&[2, 0x0007_8003])));
}

#[test]
fn a_ring_has_a_size_that_is_a_power_of_two_unless_it_is_packed_and_no_more_than_there_is_room_for() {
    let io = IoThread::start();
    for (size, split, packed) in [
        (0, false, false),
        (1, true, true),
        (100, false, true),
        (1000, false, true),
        (1024, true, true),
        (1025, false, false),
        (2048, false, false),
        (0x1_0010, false, false),
    ] {
        for (unwanted, is_right) in [(0, packed), (RING_PACKED, split)] {
            let (mut peer, _export) = peer(&io);
            peer.agree_but(unwanted);
            assert_eq!(peer.order(SET_VRING_NUM, &words(&[0, size])), Some(u64::from(!is_right)), "{size}");
        }
    }
}

#[test]
fn a_message_in_pieces_is_put_together() {
    let io = IoThread::start();
    let message = [words(&[GET_QUEUE_NUM, 1, 0]), words(&[SET_VRING_BASE, 1, 8, 1, 5])].concat();
    // A message may take only so long, and this thread may not run meanwhile; but not again and again.
    let is_put_together = |_| {
        let (mut peer, _export) = peer(&io);
        if !message.iter().all(|byte| peer.0.write_all(&[*byte]).is_ok()) {
            return false;
        }
        let Some(queues) = peer.hear() else { return false };
        assert_eq!(queues, 3u64.to_ne_bytes());
        let Some(base) = peer.ask(GET_VRING_BASE, &words(&[1, 0])) else { return false };
        assert_eq!(base, words(&[1, 5]));
        true
    };
    assert!((0..10).any(is_put_together));
}

#[test]
fn what_breaks_the_protocol_ends_the_session() {
    let io = IoThread::start();
    let wrong: [(&str, Vec<u8>); 9] = [
        ("a reply out of the blue", words(&[GET_FEATURES, 1 | 4, 0])),
        ("another version", words(&[GET_FEATURES, 2, 0])),
        ("a body too large to be true", words(&[GET_FEATURES, 1, u32::MAX])),
        ("a body of the wrong size", words(&[GET_FEATURES, 1, 4, 0])),
        ("a request that nobody offered", words(&[999, 1, 0])),
        ("a queue that is not there", words(&[SET_VRING_BASE, 1, 8, 3, 0])),
        ("features that were not offered", words(&[SET_FEATURES, 1, 8, 0x8000_0000, 0])),
        ("a base beyond an index", words(&[SET_VRING_BASE, 1, 8, 0, 65_536])),
        ("a descriptor that is not there", words(&[SET_VRING_CALL, 1, 8, 0, 0])),
    ];
    for (what, bytes) in wrong {
        let (mut peer, _export) = peer(&io);
        peer.0.write_all(&bytes).unwrap();
        assert!(peer.hear().is_none(), "{what}");
    }
}

#[test]
fn a_message_has_as_many_bytes_and_descriptors_as_any_may_have_and_no_more() {
    let io = IoThread::start();
    for (count, answer) in [(64, Some(longs(&[0]))), (65, None)] {
        let (mut peer, _export) = agreed(&io);
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        peer.say(SET_OWNER, NEED_REPLY, &[], &vec![eventfd.as_fd(); count]);
        assert_eq!(peer.hear(), answer, "{count} descriptors");
    }
    for (len, answer) in [(4096, Some(longs(&[0]))), (4097, None)] {
        let (mut peer, _export) = agreed(&io);
        let (_ours, theirs) = UnixStream::pair().unwrap();
        // What this one says beside its descriptor is nothing to us.
        peer.say(SET_BACKEND_REQ_FD, NEED_REPLY, &vec![0; len], &[theirs.as_fd()]);
        assert_eq!(peer.hear(), answer, "{len}");
    }
}

#[test]
fn what_is_to_be_signalled_is_an_eventfd_or_what_calls_user_mode_linux_a_unix_stream() {
    let io = IoThread::start();
    let stream: OwnedFd = UnixStream::pair().unwrap().0.into();
    let datagrams: OwnedFd = UnixDatagram::pair().unwrap().0.into();
    let listener: OwnedFd = TcpListener::bind("127.0.0.1:0").unwrap().into();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    for (is_uml, request, fd, is_right) in [
        (true, SET_VRING_CALL, &stream, true),
        (false, SET_VRING_CALL, &stream, false),
        (true, SET_VRING_CALL, &datagrams, false),
        (true, SET_VRING_CALL, &listener, false),
        (true, SET_VRING_CALL, &pipe, false),
        (true, SET_VRING_KICK, &stream, false),
        (true, SET_VRING_ERR, &stream, false),
    ] {
        let (mut peer, _export) = peer_of(&io, is_uml);
        peer.agree();
        peer.say(request, NEED_REPLY, &0u64.to_ne_bytes(), &[fd.as_fd()]);
        assert_eq!(peer.hear(), Some(u64::from(!is_right).to_ne_bytes().to_vec()), "{is_uml}: {request} with {fd:?}");
        assert!(is_right || peer.hear().is_none());
    }
}

#[test]
fn a_descriptor_of_a_client_s_that_takes_long_to_close_holds_up_nobody() {
    closer::begin().unwrap();
    let io = IoThread::start();
    let (socket, _reads_nothing) = lingering();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut peer = Peer(ours);
    peer.say(SET_VRING_CALL, 0, &longs(&[0]), &[socket.as_fd()]);
    // Who receives it has the last of it.
    drop(socket);
    let _export = export(&io, Address::Fd(theirs.into())).unwrap();
    assert!(peer.hear().is_none());
}

#[test]
fn a_channel_that_is_no_stream_of_unix_ends_the_session() {
    let io = IoThread::start();
    let eventfd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let (datagram, _other) = UnixDatagram::pair().unwrap();
    let tcp = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    for (what, fd) in [("eventfd", eventfd.as_fd()), ("datagram", datagram.as_fd()), ("TCP", tcp.as_fd())] {
        let (mut peer, _export) = agreed(&io);
        peer.say(SET_BACKEND_REQ_FD, NEED_REPLY, &longs(&[0]), &[fd]);
        assert_eq!((peer.hear(), peer.hear()), (Some(longs(&[1])), None), "{what}");
    }
}

#[test]
fn an_inherited_descriptor_is_a_unix_socket_that_listens_or_is_one_client_s_and_of_the_right_user() {
    let io = IoThread::start();
    let tcp = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let eventfd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    for wrong in [OwnedFd::from(tcp), eventfd] {
        assert!(matches!(export(&io, Address::Fd(wrong)), Err(ExportError::Listen(_, ListenError::BadFd))));
    }
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("socket");
    let first = export(&io, Address::Fd(UnixListener::bind(&path).unwrap().into())).unwrap();
    for _ in 0..2 {
        assert_eq!(Peer(UnixStream::connect(&path).unwrap()).ask_u64(GET_QUEUE_NUM), 3);
    }
    drop(first);
    assert!(path.exists(), "it is somebody else's to remove");
    let own = rustix::process::geteuid().as_raw();
    for (uids, is_let_in) in [(vec![], true), (vec![own + 1, own], true), (vec![own + 1], false)] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let access = Access { uids, ..Access::default() };
        let config = ExportConfig { access, ..export_config(Address::Fd(theirs.into())) };
        let null = Driver::Null { size: MIB, latency: Nanos::ZERO, read_zeroes: true };
        let disk = Arc::new(Disk::open(&Options::new("null", null)).unwrap());
        let _export = Export::start(config, blk_config(MIB, 3), disk, vec![io.0.clone()]).unwrap();
        let mut peer = Peer(ours);
        let _ = peer.0.write_all(&words(&[GET_QUEUE_NUM, 1, 0]));
        assert_eq!(peer.hear(), is_let_in.then(|| longs(&[3])));
    }
}

#[test]
fn a_client_that_pauses_in_the_middle_of_a_message_loses_its_session() {
    let io = IoThread::start();
    let (mut peer, _export) = peer(&io);
    peer.0.write_all(&words(&[SET_FEATURES, 1])).unwrap();
    assert!(peer.hear().is_none(), "it is hung up on, and the next one is served");
}

#[test]
fn a_client_that_takes_no_answers_is_hung_up_on_and_not_waited_for() {
    let io = IoThread::start();
    let (mut peer, _export) = peer(&io);
    let question = words(&[GET_QUEUE_NUM, 1, 0]);
    while peer.0.write_all(&question).is_ok() {}
}

#[test]
fn a_client_that_never_pauses_is_listened_to_at_a_pace() {
    let io = IoThread::start();
    let (mut peer, _export) = agreed(&io);
    let begun = Instant::now();
    // Beyond what it may order at once it may give an order each millisecond.
    (0..4096 + 200).for_each(|_| peer.say(SET_OWNER, 0, &[], &[]));
    assert_eq!(peer.ask_u64(GET_QUEUE_NUM), 3);
    // Never faster than that, on however slow a machine.
    assert!(begun.elapsed() >= Duration::from_millis(198));
}

#[test]
fn records_that_nobody_receives_are_not_sent_for_ever() {
    let io = IoThread::start();
    let asked: Vec<u8> = [0, 0, 128 << 16 | 3].into_iter().flat_map(u64::to_ne_bytes).collect();
    let (mut peer, _export) = agreed(&io);
    for _ in 0..5 {
        peer.say(GET_INFLIGHT_FD, 0, &asked, &[]);
    }
    // Nothing is received before the session has ended.
    let patience = Timespec { tv_sec: 30, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&peer.0, PollFlags::RDHUP)], Some(&patience)), Ok(1), "it ends");
    assert_eq!(std::iter::from_fn(|| peer.hear()).count(), 4);
    // Who receives them may have any number.
    let (mut peer, _export) = agreed(&io);
    assert!((0..100).all(|_| peer.ask(GET_INFLIGHT_FD, &asked).is_some()));
}

#[test]
fn an_export_ends_at_once_where_nobody_is_connected_and_lets_nobody_in_then() {
    let io = IoThread::start();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("socket");
    let used = export(&io, Address::Path(path.clone())).unwrap();
    let mut peer = Peer(UnixStream::connect(&path).unwrap());
    assert_eq!(peer.ask_u64(GET_QUEUE_NUM), 3);
    assert!(!used.ends_at_once(), "it has a client, which has nothing running");
    assert!(peer.hear().is_none());
    drop(used);
    let idle = export(&io, Address::Path(path.clone())).unwrap();
    assert!(idle.ends_at_once());
    let late = UnixStream::connect(&path);
    assert!(late.is_err() || Peer(late.unwrap()).hear().is_none());
}

#[test]
fn an_export_ends_while_its_client_is_in_the_middle_of_a_message() {
    let io = IoThread::start();
    let (mut peer, export) = peer(&io);
    peer.0.write_all(&words(&[SET_FEATURES, 1])).unwrap();
    drop(export);
    assert!(peer.hear().is_none());
}

#[test]
fn a_socket_is_taken_over_from_the_dead_and_from_nobody_else() {
    let io = IoThread::start();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("socket");
    let at = || export(&io, Address::Path(path.clone()));

    let first = at().unwrap();
    assert!(matches!(at(), Err(ExportError::Listen(_, ListenError::Bind(_, BindError::InUse)))));
    assert!(path.exists(), "the refused one left the other's socket alone");
    drop(first);
    assert!(!path.exists());

    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "left behind");
    drop(at().unwrap());

    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(at(), Err(ExportError::Listen(_, ListenError::Bind(_, BindError::NotASocket)))));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");

    let long = scratch.path().join("x".repeat(108));
    assert!(matches!(
        export(&io, Address::Path(long)),
        Err(ExportError::Listen(_, ListenError::Bind(_, BindError::TooLong(_))))
    ));
}

#[test]
fn the_next_client_is_served_when_one_has_left() {
    let io = IoThread::start();
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("socket");
    let _export = export(&io, Address::Path(path.clone())).unwrap();
    for _ in 0..3 {
        let mut peer = Peer(UnixStream::connect(&path).unwrap());
        assert_eq!(peer.ask_u64(GET_QUEUE_NUM), 3);
    }
}
