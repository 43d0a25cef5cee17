//! An export of a virtio-scsi device, whose units come, go and grow while a front-end drives its rings.

mod limited;
mod live;
mod machine;
#[path = "../peer/mod.rs"]
mod peer;
mod stopped;
mod throttled;
mod turns;
mod waiting;

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use egret_disk::{Disk, Driver, Options};
use egret_event_loop::Nanos;
use egret_export::{
    Change, Export, ExportError, Keeper, Keeping, KeptSession, LogicalUnit, LunConfig, OpStats, QueueStats, Registered,
};
use egret_virtio::RequestType;
use egret_virtio::scsi::LunAddress;
use egret_vring::memory::Region;
use egret_vring::ring::{InflightConfig, PACKED_BASE, Piece};

use machine::*;
use peer::gate::Gate;
use peer::{GET_VRING_BASE, IoThread, RESET_DEVICE, RING_PACKED, SET_INFLIGHT_FD, longs, words};
use stopped::{RESERVATION_CONFLICT, reserve_out};
use waiting::{await_waiting, manage_to_wait};

#[test]
fn a_unit_that_comes_while_the_queues_run_is_told_of_served_resized_and_taken_away_again() {
    let io = IoThread::start();
    let (mut machine, export) = started(&io, Nanos::ZERO);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    assert_eq!(machine.command(LATE, &TEST_UNIT_READY, 0), BAD_TARGET);

    machine.offer_event();
    add_late(&export, disk(Nanos::ZERO)).unwrap();
    assert!(matches!(add_late(&export, disk(Nanos::ZERO)), Err(ExportError::Lun(..))));
    assert_eq!(export.luns(), [FIRST, LATE]);
    assert!(export.lun(LATE).is_some());
    assert_eq!(machine.event(), (1, 3, 1), "transport reset, rescan");
    assert_eq!(machine.command(LATE, &TEST_UNIT_READY, 0), POWER_ON);
    assert_eq!(machine.command(LATE, &READ, 4096), GOOD);

    // An event before there is a buffer for it waits for one.
    assert!(export.resize_lun(LATE, 32 * MIB).unwrap());
    machine.offer_event();
    assert_eq!(machine.event(), (3, 3, 0x092a), "parameter change: capacity data has changed");
    assert_eq!(machine.command(LATE, &TEST_UNIT_READY, 0), (0, 2, 0x2a));

    machine.offer_event();
    export.remove_lun(LATE).unwrap();
    assert!(matches!(export.remove_lun(LATE), Err(ExportError::NoLun(..))) && export.lun(LATE).is_none());
    assert_eq!(machine.event(), (1, 3, 2), "transport reset, removed");
    assert_eq!(machine.command(LATE, &READ, 4096), BAD_TARGET);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    assert!(export.stats().total().requests > 6);
}

#[test]
fn what_was_counted_for_a_unit_s_disk_is_of_that_unit_alone_and_goes_with_it() {
    let io = IoThread::start();
    let (mut machine, export) = started(&io, Nanos::ZERO);
    let null = Driver::Null { size: 64 * MIB, latency: Nanos::ZERO, read_zeroes: true };
    let reads = |node: &str| {
        let mut sum = QueueStats::default();
        export.queues().iter().for_each(|queue| queue.add_of_disk_to(node, &mut sum));
        sum.op(RequestType::Read)
    };
    let read = |times| OpStats { requests: times, bytes: 4096 * times, errors: 0 };
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    for times in [2, 1] {
        add_late(&export, Arc::new(Disk::open(&Options::new("late", null.clone())).unwrap())).unwrap();
        while machine.command(LATE, &TEST_UNIT_READY, 0) != GOOD {}
        (0..times).for_each(|_| assert_eq!(machine.command(LATE, &READ, 4096), GOOD));
        assert_eq!([reads("null"), reads("late")], [read(1), read(times)]);
        drop(export.remove_lun(LATE).unwrap().wait());
        assert_eq!(reads("late"), read(0));
    }
}

#[test]
fn a_driver_that_knows_no_event_indices_is_called_for_each_answer() {
    let io = IoThread::start();
    for layout in [Layout::Split, Layout::Packed] {
        let (ours, _export) = listening(&io, disk(Nanos::ZERO));
        let mut machine = Machine::with(ours, layout, false);
        machine.start_rings();
        assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
        for _ in 0..4 {
            machine.send(FIRST, &READ, 4096);
            let call = &machine.rings[REQUESTS as usize].call;
            await_signal(call);
            rustix::io::read(call, &mut [0; 8]).unwrap();
            assert_eq!(machine.answer(), GOOD);
        }
    }
}

#[test]
fn buffers_for_events_stay_in_the_ring_when_the_queue_stops() {
    let io = IoThread::start();
    for (layout, bases) in [(Layout::Split, [0, 1]), (Layout::Packed, [PACKED_BASE, PACKED_BASE + 0x2_0002])] {
        let (mut machine, _export) = started_with(&io, disk(Nanos::ZERO), layout);
        machine.offer_event();
        assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
        for (queue, base) in [EVENTS, REQUESTS].into_iter().zip(bases) {
            assert_eq!(machine.peer.ask(GET_VRING_BASE, &words(&[queue, 0])), Some(words(&[queue, base])));
        }
    }
}

#[test]
fn a_reset_of_a_unit_is_answered_after_the_commands_that_it_ends() {
    let io = IoThread::start();
    let gate = Gate::new();
    let (mut machine, export) = started_with(&io, gate.disk(), Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    machine.send(FIRST, &READ, 4096);
    gate.await_kept(1);
    manage_to_wait(&mut machine, &export, UNIT_RESET);
    gate.open();
    assert_eq!(machine.managed(), 0);
    assert!(machine.rings[REQUESTS as usize].driver.has_used(), "its commands come first");
    assert_eq!(machine.answer(), (4, 0, 0));
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
}

#[test]
fn a_function_that_a_dead_daemon_left_behind_comes_after_the_commands_that_it_left_behind_with_it() {
    // Taken up by the dead daemon, or sent when it was dead.
    for is_in_flight in [true, false] {
        let io = IoThread::start();
        let gate = Gate::new();
        let (mut machine, export) = two_commands_and_a_function_that_aborts_one(&io, &gate, Layout::Split);
        let record = InflightConfig { queues: 3, queue_size: 16, packed: false };
        let record = Region::anonymous(0, record.bytes()).unwrap();
        let left_behind = |queue: u32, head: u64| {
            // Each queue's part has 16 bytes and 16 states of 16, and ends with a line of 64.
            let at = u64::from(queue) * 320;
            let version_and_length = [1u16.to_ne_bytes(), 16u16.to_ne_bytes()].concat();
            record.file.write_all_at(&version_and_length, at + 8).unwrap();
            record.file.write_all_at(&[1], at + 16 + 16 * head).unwrap();
            record.file.write_all_at(&head.to_ne_bytes(), at + 16 + 16 * head + 8).unwrap();
        };
        if is_in_flight {
            left_behind(CONTROL, 0);
        }
        left_behind(REQUESTS, 0);
        left_behind(REQUESTS, 3);
        let message = longs(&[record.size, 0, 16 << 16 | 3]);
        machine.peer.say(SET_INFLIGHT_FD, 0, &message, &[record.file.as_fd()]);
        // The control queue is the first.
        machine.start_rings();
        await_aborted(&mut machine, &export, &gate);
    }
}

#[test]
fn a_function_that_was_sent_while_no_daemon_was_there_comes_after_the_commands_that_were_sent_with_it() {
    for layout in [Layout::Split, Layout::Packed] {
        let io = IoThread::start();
        let gate = Gate::new();
        let (mut machine, export) = two_commands_and_a_function_that_aborts_one(&io, &gate, layout);
        machine.start_rings_and_enable_them_then();
        await_aborted(&mut machine, &export, &gate);
    }
}

#[test]
fn a_function_that_was_sent_while_a_session_was_kept_comes_after_the_command_that_was_sent_with_it() {
    let io = IoThread::start();
    let gate = Gate::new();
    let (mut machine, export) = recorded(&io);
    let kept = KeptSession::gather(export.end_and_keep().1.unwrap()).remove(0);
    machine.send(FIRST, &READ, 4096);
    machine.manage(ABORT_TASK);
    let (_, mut next) = listening_and(Keeping::Kept, &io, gate.disk());
    assert!(next.go_on_with(Some(kept.take().unwrap())).is_none());
    await_waiting(&mut machine, &next);
    gate.open();
    assert_eq!(machine.managed(), 0);
    assert!(machine.rings[REQUESTS as usize].driver.has_used(), "its command comes first");
    // Nor is it told of another power on: its unit has gone on as it was.
    assert_eq!(machine.answer().0, 2, "it is aborted");
    // Somewhere that is no memory.
    machine.offer(REQUESTS, &[Piece { addr: 0, len: 51 }], &[Piece { addr: DATA + 0x800, len: 108 }]);
    await_signal(&machine.rings[REQUESTS as usize].err);
}

/// A machine with a record of what is in flight, whose session is kept when its export ends.
fn recorded(io: &IoThread) -> (Machine, Export) {
    let (stream, export) = listening_and(Keeping::Keeps, io, disk(Nanos::ZERO));
    let mut machine = Machine::new(stream, Layout::Split);
    let record = InflightConfig { queues: 3, queue_size: 16, packed: false };
    let record = Region::anonymous(0, record.bytes()).unwrap();
    machine.peer.say(SET_INFLIGHT_FD, 0, &longs(&[record.size, 0, 16 << 16 | 3]), &[record.file.as_fd()]);
    machine.start_rings();
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    (machine, export)
}

/// Where others have taken its registration away meanwhile, and that is on stable storage.
#[derive(Debug)]
struct Fenced;

impl Keeper for Fenced {
    fn store(&self, _table: Registered, _change: Change) {}
}

#[test]
fn who_was_fenced_while_its_session_was_kept_stays_fenced() {
    let io = IoThread::start();
    let (mut machine, export) = recorded(&io);
    let (register, keys) = reserve_out(0, 0, 7);
    machine.send_with(FIRST, &register, &keys, 0);
    assert_eq!(machine.answer(), GOOD);
    let kept = KeptSession::gather(export.end_and_keep().1.unwrap()).remove(0);
    let config = LunConfig { capacity_bytes: 64 * MIB, serial: "first".into(), ..LunConfig::default() };
    let unit = Arc::new(LogicalUnit::kept(config, &Registered::default(), Arc::new(Fenced)).unwrap());
    let (_, mut next) = listening_of(unit, Keeping::Kept, &io, disk(Nanos::ZERO));
    assert!(next.go_on_with(Some(kept.take().unwrap())).is_none());
    // That its registration was preempted.
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), (0, 2, 0x2a));
    let (reserve, keys) = reserve_out(1, 7, 0);
    machine.send_with(FIRST, &reserve, &keys, 0);
    assert_eq!(machine.answer(), (0, RESERVATION_CONFLICT, 0));
}

#[test]
fn a_session_whose_functions_may_be_answered_without_their_commands_is_not_kept() {
    let io = IoThread::start();
    let (stream, export) = listening_and(Keeping::Keeps, &io, disk(Nanos::ZERO));
    let _machine = Machine::boot(stream, Layout::Split);
    assert!(export.end_and_keep().1.is_none(), "it has no record");
}

#[test]
fn functions_do_not_wait_for_commands_in_a_ring_that_is_stopped() {
    let io = IoThread::start();
    let (stream, _export) = listening(&io, disk(Nanos::ZERO));
    let mut machine = Machine::new(stream, Layout::Split);
    machine.send(FIRST, &READ, 4096);
    machine.manage(QUERY_TASK);
    machine.start_ring_disabled(REQUESTS);
    machine.start_ring(CONTROL);
    assert!(!machine.rings[CONTROL as usize].driver.has_used());
    assert!(machine.peer.ask(GET_VRING_BASE, &words(&[REQUESTS, 0])).is_some());
    assert_eq!(machine.managed(), 0, "nobody has the command");
}

/// A machine whose rings have not started: the first command is told of the power on, the second is there to be aborted.
fn two_commands_and_a_function_that_aborts_one(io: &IoThread, gate: &Gate, layout: Layout) -> (Machine, Export) {
    let (stream, export) = listening(io, gate.disk());
    let mut machine = Machine::new(stream, layout);
    machine.send(FIRST, &READ, 4096);
    machine.send(FIRST, &READ, 4096);
    machine.manage(ABORT_TASK);
    (machine, export)
}

fn await_aborted(machine: &mut Machine, export: &Export, gate: &Gate) {
    await_waiting(machine, export);
    gate.open();
    assert_eq!(machine.managed(), 0);
    let requests = &mut machine.rings[REQUESTS as usize].driver;
    assert!(requests.reap().unwrap().is_some() && requests.reap().unwrap().is_some(), "its commands come first");
    assert_eq!(machine.read::<12>(DATA + 0x800)[11], 2, "the second is aborted");
}

#[test]
fn a_unit_that_goes_away_with_commands_in_flight_ends_them_and_the_session_ends_drained() {
    let io = IoThread::start();
    let (mut machine, export) = started(&io, Nanos::from_millis(20));
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    machine.send(FIRST, &READ, 4096);
    export.remove_lun(FIRST).unwrap();
    let (response, status, _) = machine.answer();
    // Taken in before the unit went, or after.
    assert!([GOOD.0, BAD_TARGET.0].contains(&response) && status == 0, "{response} {status}");
    drop(machine);
    drop(export);
}

#[test]
fn who_waits_for_the_disk_of_a_unit_that_was_taken_away_waits_for_a_queue_that_stops_with_it() {
    let io = IoThread::start();
    let (gate, slow, mut machine, export) = stopping(&io);
    gate.open_later();
    drop(export.remove_lun(FIRST).unwrap().wait());
    assert!(machine.rings[REQUESTS as usize].driver.has_used() && Arc::strong_count(&slow) == 1);
    assert!(machine.peer.hear().is_some());
}

#[test]
fn a_packed_ring_that_a_dead_daemon_left_behind_is_not_begun_anew_unless_a_record_says_where_it_was() {
    const USED_ON_THE_FIRST_LAP: u16 = 1 << 7 | 1 << 15;
    let record = InflightConfig { queues: 3, queue_size: 16, packed: true };
    let record = Region::anonymous(0, record.bytes()).unwrap();
    let io = IoThread::start();
    let start = |record: Option<&Region>| {
        let (stream, _export) = listening(&io, disk(Nanos::ZERO));
        let mut machine = Machine::new(stream, Layout::Packed);
        let flags = machine.rings[REQUESTS as usize].driver.queue().desc + 14;
        assert!(machine.memory.write(flags, &USED_ON_THE_FIRST_LAP.to_le_bytes()));
        if let Some(record) = record {
            machine.peer.say(SET_INFLIGHT_FD, 0, &longs(&[record.size, 0, 16 << 16 | 3]), &[record.file.as_fd()]);
        }
        assert_eq!(machine.start_ring(CONTROL), Some(0));
        machine.start_ring(REQUESTS)
    };
    assert_ne!(start(None), Some(0));
    assert_eq!(start(Some(&record)), Some(0), "no daemon has died that had one which is new: its guest has migrated");
    // Each queue's part has 32 bytes and 16 states of 32, and ends with a line of 64.
    let part = u64::from(REQUESTS) * 576;
    record.file.write_all_at(&[1u16.to_ne_bytes(), 16u16.to_ne_bytes()].concat(), part + 8).unwrap();
    record.file.write_all_at(&[1, 0, 1, 0, 1, 1], part + 16).unwrap();
    for entry in 0..16 {
        record.file.write_all_at(&(entry as u16 + 1).to_ne_bytes(), part + 32 * (1 + entry) + 2).unwrap();
    }
    assert_eq!(start(Some(&record)), Some(0), "behind the first descriptor");
}

/// A guest that has turned the write cache off flushes no more, and is not told that another daemon is there.
#[test]
fn a_write_cache_that_was_turned_off_is_off_in_the_daemon_that_follows_one_that_was_killed_and_on_if_it_was_turned_on_again()
 {
    let io = IoThread::start();
    let config = InflightConfig { queues: 3, queue_size: 16, packed: false };
    let message = longs(&[config.bytes(), 0, 16 << 16 | 3]);
    // Of the queues nothing is left to be done; behind them a record has a line for the device.
    let at = config.bytes() - 64;
    let start = |line: &[u8; 64]| {
        let record = Region::anonymous(0, config.bytes()).unwrap();
        record.file.write_all_at(line, at).unwrap();
        let (stream, export) = listening(&io, disk(Nanos::ZERO));
        let mut machine = Machine::new(stream, Layout::Split);
        machine.peer.say(SET_INFLIGHT_FD, 0, &message, &[record.file.as_fd()]);
        machine.start_rings();
        assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
        (machine, export, record)
    };
    let mut line = [0; 64];
    for wanted in [0, 4] {
        let (mut machine, _export, record) = start(&line);
        select_write_cache(&mut machine, wanted);
        // As the front-end has it when the daemon is dead.
        record.file.read_exact_at(&mut line, at).unwrap();
        let (mut machine, _export, _record) = start(&line);
        assert_eq!(write_cache(&mut machine, FIRST), wanted);
    }
}

fn select_write_cache(machine: &mut Machine, wanted: u8) {
    let caching = [&[0, 0, 0, 0, 8, 18, wanted][..], &[0; 17]].concat();
    machine.send_with(FIRST, &[0x15, 0x10, 0, 0, 24, 0], &caching, 0);
    assert_eq!(machine.answer(), GOOD);
}

fn write_cache(machine: &mut Machine, at: LunAddress) -> u8 {
    assert_eq!(machine.command(at, &[0x1a, 8, 8, 0, 24, 0], 24), GOOD);
    machine.read::<24>(DATA + 0x1000)[6]
}

/// As QEMU does at each `stop` and `cont`.
#[test]
fn a_front_end_that_stops_and_starts_with_its_record_finds_each_unit_s_write_cache_as_it_was() {
    let io = IoThread::start();
    let (stream, export) = listening(&io, disk(Nanos::ZERO));
    add_late(&export, disk(Nanos::ZERO)).unwrap();
    let mut machine = Machine::new(stream, Layout::Split);
    let record = InflightConfig { queues: 3, queue_size: 16, packed: false };
    let record = Region::anonymous(0, record.bytes()).unwrap();
    let hand_over = |machine: &mut Machine| {
        machine.peer.say(SET_INFLIGHT_FD, 0, &longs(&[record.size, 0, 16 << 16 | 3]), &[record.file.as_fd()]);
    };
    hand_over(&mut machine);
    machine.start_rings();
    for at in [FIRST, LATE] {
        while machine.command(at, &TEST_UNIT_READY, 0) != GOOD {}
    }
    select_write_cache(&mut machine, 0);
    for queue in [CONTROL, EVENTS, REQUESTS] {
        assert!(machine.peer.ask(GET_VRING_BASE, &words(&[queue, 0])).is_some());
    }
    hand_over(&mut machine);
    for queue in [CONTROL, EVENTS, REQUESTS] {
        machine.start_ring_again(queue);
    }
    assert_eq!([FIRST, LATE].map(|at| write_cache(&mut machine, at)), [0, 4]);
    assert!(export.lun(LATE).unwrap().unit.write_cache(), "and its writes are as fast");
}

#[test]
fn a_record_is_forgotten_by_who_chooses_the_other_layout() {
    let io = IoThread::start();
    for (before, layout, now) in [(0, Layout::Split, RING_PACKED), (RING_PACKED, Layout::Packed, 0)] {
        let record = InflightConfig { queues: 3, queue_size: 16, packed: before == 0 };
        let record = Region::anonymous(0, record.bytes()).unwrap();
        let (stream, _export) = listening(&io, disk(Nanos::ZERO));
        let mut machine = Machine::new(stream, layout);
        machine.peer.agree_but(before);
        machine.peer.say(SET_INFLIGHT_FD, 0, &longs(&[record.size, 0, 16 << 16 | 3]), &[record.file.as_fd()]);
        machine.peer.agree_but(now);
        machine.start_rings();
        assert_eq!(machine.command(FIRST, &READ, 4096), POWER_ON);
        let mut bytes = vec![0; record.size as usize - 64];
        record.file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0), "nothing is written to it");
    }
}

#[test]
fn a_packed_ring_that_breaks_the_rules_costs_its_queue_and_nothing_else() {
    /// Address, length, buffer ID and flags.
    type Descriptor = (u64, u32, u16, u16);
    // Available on the first lap.
    const NEXT: u16 = 1 | 1 << 7;
    const LAST: u16 = 1 << 7;
    let wrong: [(&str, &[Descriptor]); 4] = [
        ("a buffer ID outside the ring", &[(DATA, 16, 16, LAST)]),
        ("a chain without an end", &[(DATA, 16, 0, NEXT); 16]),
        ("a buffer outside memory", &[(1 << 50, 16, 0, LAST)]),
        ("a table outside memory", &[(1 << 50, 16, 0, LAST | 4)]),
    ];
    let io = IoThread::start();
    for (what, descriptors) in wrong {
        let (mut machine, export) = started_with(&io, disk(Nanos::ZERO), Layout::Packed);
        let ring = &machine.rings[CONTROL as usize];
        for (at, &(addr, len, id, flags)) in (ring.driver.queue().desc..).step_by(16).zip(descriptors) {
            let bytes = [&addr.to_le_bytes()[..], &len.to_le_bytes(), &id.to_le_bytes(), &flags.to_le_bytes()].concat();
            assert!(machine.memory.write(at, &bytes));
        }
        ring.kick();
        await_signal(&ring.err);
        assert_eq!(export.queues()[CONTROL as usize].broken.get(), 1, "{what}");
        assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON, "{what}");
        assert_eq!(machine.command(FIRST, &READ, 4096), GOOD, "{what}");
    }
}

#[test]
fn a_queue_that_breaks_signals_the_descriptor_that_was_handed_over_before_it_was_stopped_or_reset() {
    let io = IoThread::start();
    let resets: [fn(&mut Machine); 2] = [
        |machine| {
            assert!(machine.peer.ask(GET_VRING_BASE, &words(&[CONTROL, 0])).is_some());
            machine.start_ring_again(CONTROL);
        },
        |machine| {
            assert_eq!(machine.peer.order(RESET_DEVICE, &[]), Some(0));
            machine.start_rings();
        },
    ];
    for reset in resets {
        let (mut machine, export) = started(&io, Nanos::ZERO);
        reset(&mut machine);
        let ring = &machine.rings[CONTROL as usize];
        // More is available than there are descriptors.
        assert!(machine.memory.write(ring.driver.queue().avail + 2, &17u16.to_le_bytes()));
        ring.kick();
        await_signal(&ring.err);
        assert_eq!(export.queues()[CONTROL as usize].broken.get(), 1);
    }
}
