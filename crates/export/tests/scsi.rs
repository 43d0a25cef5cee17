//! An export of a virtio-scsi device, whose units come, go and grow while a front-end drives its rings.

mod machine;
mod peer;

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use egret_disk::{Aio, Disk, Driver, Options};
use egret_event_loop::Nanos;
use egret_export::{Address, Exchange, Export, ExportError, LogicalUnit, LunConfig, Pause, ScsiExportConfig, exchange};
use egret_virtio::memory::Region;
use egret_virtio::ring::{InflightConfig, PACKED_BASE};
use egret_virtio::scsi::{LunAddress, ScsiConfig};

use machine::{CONTROL, DATA, EVENTS, Layout, Machine, REQUESTS, SET_VRING_CALL, SET_VRING_KICK, await_signal, longs};
use peer::{IoThread, RING_PACKED, words};

const GET_VRING_BASE: u32 = 11;
const SET_INFLIGHT_FD: u32 = 32;

const MIB: u64 = 1 << 20;

const FIRST: LunAddress = LunAddress { target: 0, lun: 0 };
const LATE: LunAddress = LunAddress { target: 3, lun: 400 };

fn disk(latency: Nanos) -> Arc<Disk> {
    let driver = Driver::Null { size: 64 * MIB, latency, read_zeroes: true };
    Arc::new(Disk::open(&Options::new("null", driver)).unwrap())
}

fn unit(serial: &str) -> Arc<LogicalUnit> {
    let config = LunConfig { capacity_bytes: 64 * MIB, serial: serial.into(), ..LunConfig::default() };
    Arc::new(LogicalUnit::new(config).unwrap())
}

fn started(io: &IoThread, latency: Nanos) -> (Machine, Export) {
    started_with(io, disk(latency), Layout::Split)
}

fn started_with(io: &IoThread, disk: Arc<Disk>, layout: Layout) -> (Machine, Export) {
    let (ours, export) = listening(io, disk);
    (Machine::boot(ours, layout), export)
}

fn listening(io: &IoThread, disk: Arc<Disk>) -> (UnixStream, Export) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let config = ScsiExportConfig {
        id: "e0".into(),
        address: Address::Fd(theirs.into()),
        device: ScsiConfig { num_queues: 1, queue_size: 128 },
        luns: vec![(FIRST, unit("first"), disk)],
    };
    (ours, Export::start_scsi(config, vec![io.0.clone()]).unwrap())
}

const ABORT_TASK: u8 = 0;
const TEST_UNIT_READY: [u8; 6] = [0; 6];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0];
const POWER_ON: (u8, u8, u8) = (0, 2, 0x29);
const GOOD: (u8, u8, u8) = (0, 0, 0);
const BAD_TARGET: (u8, u8, u8) = (3, 0, 0);

#[test]
fn a_unit_that_comes_while_the_queues_run_is_told_of_served_resized_and_taken_away_again() {
    let io = IoThread::start();
    let (mut machine, export) = started(&io, Nanos::ZERO);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    assert_eq!(machine.command(LATE, &TEST_UNIT_READY, 0), BAD_TARGET);

    machine.offer_event();
    export.add_lun(LATE, unit("late"), disk(Nanos::ZERO)).unwrap();
    assert!(matches!(export.add_lun(LATE, unit("late"), disk(Nanos::ZERO)), Err(ExportError::Lun(..))));
    assert_eq!(export.luns(), [FIRST, LATE]);
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
    assert!(matches!(export.remove_lun(LATE), Err(ExportError::NoLun(..))));
    assert_eq!(machine.event(), (1, 3, 2), "transport reset, removed");
    assert_eq!(machine.command(LATE, &READ, 4096), BAD_TARGET);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    assert!(export.stats().total().requests > 6);
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
    let (mut machine, _export) = started(&io, Nanos::from_millis(50));
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    machine.send(FIRST, &READ, 4096);
    // The request is on its way when the task is found: wait for that, by asking.
    let tmf = |machine: &mut Machine, function: u8| {
        machine.manage(function);
        machine.managed()
    };
    while tmf(&mut machine, 6) != 10 {}
    assert_eq!(tmf(&mut machine, 5), 0);
    assert!(machine.rings[REQUESTS as usize].driver.has_used(), "its commands come first");
    assert_eq!(machine.answer(), (4, 0, 0));
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
}

#[test]
fn a_function_that_a_dead_daemon_left_behind_comes_after_the_commands_that_it_left_behind_with_it() {
    let io = IoThread::start();
    let (stream, _export) = listening(&io, disk(Nanos::from_millis(50)));
    let mut machine = Machine::new(stream, Layout::Split);
    // The first command is told of the power on; the second is there to be aborted.
    machine.send(FIRST, &READ, 4096);
    machine.send(FIRST, &READ, 4096);
    machine.manage(ABORT_TASK);
    let record = Region::anonymous(0, InflightConfig { queues: 3, queue_size: 16, packed: false }.bytes()).unwrap();
    let left_behind = |queue: u32, head: u64| {
        // Each queue's part has 16 bytes and 16 states of 16, and ends with a line of 64.
        let at = u64::from(queue) * 320;
        let version_and_length = [1u16.to_ne_bytes(), 16u16.to_ne_bytes()].concat();
        record.file.write_all_at(&version_and_length, at + 8).unwrap();
        record.file.write_all_at(&[1], at + 16 + 16 * head).unwrap();
        record.file.write_all_at(&head.to_ne_bytes(), at + 16 + 16 * head + 8).unwrap();
    };
    left_behind(CONTROL, 0);
    left_behind(REQUESTS, 0);
    left_behind(REQUESTS, 3);
    let message = longs(&[record.size, 0, 16 << 16 | 3]);
    machine.peer.say(SET_INFLIGHT_FD, 0, &message, &[record.file.as_fd()]);
    // The control queue is the first.
    machine.start_rings();
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
fn queues_that_move_between_loops_lose_neither_commands_nor_kicks_nor_events() {
    let loops = [IoThread::start(), IoThread::start(), IoThread::start()];
    [Layout::Split, Layout::Packed].into_iter().for_each(|layout| move_queues(&loops, layout));
}

fn move_queues(loops: &[IoThread; 3], layout: Layout) {
    let (mut machine, export) = started_with(&loops[0], disk(Nanos::from_micros(200)), layout);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    for round in 1..=60 {
        let to = &loops[round % 3].0;
        // In flight, between two moves, and idle.
        machine.send(FIRST, &READ, 4096);
        assert!(export.run_on(std::slice::from_ref(to)).unwrap().whole > Nanos::ZERO);
        assert_eq!(machine.answer(), GOOD);
        assert_eq!(export.run_on(std::slice::from_ref(to)).unwrap(), Pause::default(), "it is there");
        machine.offer_event();
        assert!(export.resize_lun(FIRST, MIB * (round as u64 % 64 + 1)).unwrap());
        assert_eq!(machine.event(), (3, 0, 0x092a));
        assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), (0, 2, 0x2a));
    }
    let commands = 1 + 60 * 2;
    assert_eq!(export.stats().total().requests, commands + 60, "each was counted once, on whichever loop");

    // A stop knows where the queue went, and where it stands.
    export.run_on(&[loops[1].0.clone()]).unwrap();
    let base = machine.peer.ask(GET_VRING_BASE, &words(&[REQUESTS, 0]));
    let expected = match layout {
        Layout::Split => commands as u32,
        // Tests of the unit have two descriptors, and reads have three: so many laps, and a rest.
        Layout::Packed => 0x1_0001 * place_after(2 + 60 * (2 + 3), 16),
    };
    assert_eq!(base, Some(words(&[REQUESTS, expected])));
    export.run_on(&[loops[2].0.clone()]).unwrap();
    let ring = &machine.rings[REQUESTS as usize];
    // The kick starts it: what it has done by then nobody would be told of.
    machine.peer.say(SET_VRING_CALL, 0, &longs(&[REQUESTS.into()]), &[ring.call.as_fd()]);
    machine.peer.say(SET_VRING_KICK, 0, &longs(&[REQUESTS.into()]), &[ring.kick.as_fd()]);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
}

/// The place in a packed ring after so many descriptors: its slot, and the wrap counter in bit 15.
fn place_after(descriptors: u32, size: u32) -> u32 {
    (descriptors % size) | if (descriptors / size).is_multiple_of(2) { 0x8000 } else { 0 }
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
    assert_ne!(start(Some(&record)), Some(0), "one that is new says nothing");
    // Each queue's part has 32 bytes and 16 states of 32, and ends with a line of 64.
    let part = u64::from(REQUESTS) * 576;
    record.file.write_all_at(&[1u16.to_ne_bytes(), 16u16.to_ne_bytes()].concat(), part + 8).unwrap();
    record.file.write_all_at(&[1, 0, 1, 0, 1, 1], part + 16).unwrap();
    for entry in 0..16 {
        record.file.write_all_at(&(entry as u16 + 1).to_ne_bytes(), part + 32 * (1 + entry) + 2).unwrap();
    }
    assert_eq!(start(Some(&record)), Some(0), "behind the first descriptor");
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
fn a_disk_that_is_exchanged_is_let_go_of_by_every_queue() {
    let io = IoThread::start();
    let (mut machine, export) = started(&io, Nanos::ZERO);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    let late = disk(Nanos::from_micros(200));
    export.add_lun(LATE, unit("late"), Arc::clone(&late)).unwrap();
    assert_eq!(machine.command(LATE, &TEST_UNIT_READY, 0), POWER_ON);
    let mut old = late;
    for _ in 0..20 {
        machine.send(LATE, &READ, 4096);
        let new = disk(Nanos::from_micros(200));
        let change = Exchange { old: Arc::clone(&old), new: Arc::clone(&new) };
        assert!(exchange(&[&export], &[change]).unwrap().whole > Nanos::ZERO);
        assert_eq!(machine.answer(), GOOD);
        assert_eq!(Arc::strong_count(&old), 1, "nobody uses it any more");
        old = new;
    }
    // One that nobody uses changes nothing, and stops nobody.
    let (stray, new) = (disk(Nanos::ZERO), disk(Nanos::ZERO));
    assert_eq!(exchange(&[&export], &[Exchange { old: stray, new }]).unwrap(), Pause::default());
    export.remove_lun(LATE).unwrap();
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    assert_eq!(Arc::strong_count(&old), 1);
}

#[test]
fn what_an_io_thread_cannot_run_stays_as_it_was_everywhere() {
    // More than the system lets anybody have.
    let loops = [IoThread::start(), IoThread::with_aio_depth(u32::MAX / 2)];
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    image.as_file().set_len(64 * MIB).unwrap();
    let driver = Driver::File { filename: image.path().to_owned() };
    let threads = Options { direct: true, ..Options::new("disk", driver) };
    let native = Options { aio: Aio::Native, ..threads.clone() };
    let old = Arc::new(Disk::open(&threads).unwrap());
    let (mut machine, export) = started_with(&loops[1], Arc::clone(&old), Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);

    let new = Arc::new(old.reopen(&native).unwrap());
    let change = [Exchange { old: Arc::clone(&old), new: Arc::clone(&new) }];
    let refused = exchange(&[&export], &change).unwrap_err().to_string();
    assert!(refused.starts_with("export 'e0': aio=native: "), "{refused}");
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);

    // Where it can be had it is had, and then it is the queue that cannot go back.
    export.run_on(&[loops[0].0.clone()]).unwrap();
    exchange(&[&export], &change).unwrap();
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    let refused = export.run_on(&[loops[1].0.clone()]).unwrap_err().to_string();
    assert!(refused.starts_with("export 'e0': aio=native: "), "{refused}");
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    assert_eq!(export.run_on(&[loops[0].0.clone()]).unwrap(), Pause::default(), "it never left");
}

#[test]
fn a_request_that_does_not_end_makes_a_change_fail_and_keeps_the_queue_where_it_was() {
    let loops = [IoThread::start(), IoThread::start()];
    let (mut machine, export) = started(&loops[0], Nanos::from_millis(10_000));
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    machine.send(FIRST, &READ, 4096);
    let to = [loops[1].0.clone()];
    assert!(matches!(export.run_on(&to), Err(ExportError::Busy(id)) if id == "e0"));
    // It goes on there, and can be moved when the request has ended.
    machine.offer_event();
    assert!(export.resize_lun(FIRST, MIB).unwrap());
    assert_eq!(machine.event(), (3, 0, 0x092a));
    assert_eq!(machine.answer(), GOOD);
    assert!(export.run_on(&to).unwrap().whole > Nanos::ZERO);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), (0, 2, 0x2a));
}
