//! Queues that move to other loops, and disks that are exchanged, under commands in flight.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::thread;

use egret_disk::{Aio, Disk, Driver, Limit, Limits, Options, Rates, ThrottleGroup};
use egret_event_loop::{Nanos, clock};
use egret_export::{DiskSwap, Export, ExportError, Pause, reopen};
use egret_virtio::scsi::LunAddress;
use egret_vring::memory::Region;
use egret_vring::ring::Piece;

use crate::machine::*;
use crate::peer::gate::Gate;
use crate::peer::{
    ADD_MEM_REG, GET_VRING_BASE, IoThread, NEED_REPLY, REM_MEM_REG, SET_VRING_ENABLE, Stuck, await_that, longs, words,
};
use crate::waiting::{ELSEWHERE, Sent, response, send};

/// A pause is a part of the time that a change took, and the drain a part of that.
fn assert_sound(pause: Pause, begun: Nanos) {
    let Pause { whole, drain } = pause;
    assert!(whole > Nanos::ZERO && drain <= whole && whole <= clock::now() - begun, "{pause:?}");
}

#[test]
fn queues_that_move_between_loops_lose_neither_commands_nor_kicks_nor_events() {
    let loops = [IoThread::start(), IoThread::start(), IoThread::start()];
    [Layout::Split, Layout::Packed].into_iter().for_each(|layout| move_queues(&loops, layout));
}

fn move_queues(loops: &[IoThread; 3], layout: Layout) {
    let moved = disk(Nanos::from_micros(200));
    let (mut machine, export) = started_with(&loops[0], Arc::clone(&moved), layout);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    for round in 1..=60 {
        let to = &loops[round % 3].0;
        // In flight, between two moves, and idle.
        machine.send(FIRST, &READ, 4096);
        let begun = clock::now();
        assert_sound(export.run_on(std::slice::from_ref(to)).unwrap(), begun);
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
    machine.start_ring_again(REQUESTS);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    drop((machine, export));
    await_that("no loop to have the disk", || Arc::strong_count(&moved) == 1);
}

/// The place in a packed ring after so many descriptors: its slot, and the wrap counter in bit 15.
fn place_after(descriptors: u32, size: u32) -> u32 {
    (descriptors % size) | if (descriptors / size).is_multiple_of(2) { 0x8000 } else { 0 }
}

#[test]
fn memory_that_is_plugged_in_is_there_while_what_is_in_flight_goes_on() {
    const PLUGGED: u64 = 1 << 30;
    for layout in [Layout::Split, Layout::Packed] {
        let (io, gate) = (IoThread::start(), Gate::new());
        let (mut machine, _export) = started_with(&io, gate.disk(), layout);
        assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
        machine.send(FIRST, &READ, 4096);
        gate.await_kept(1);
        let plugged = Region::anonymous(PLUGGED, 4096).unwrap();
        let row = longs(&[0, PLUGGED, plugged.size, PLUGGED, 0]);
        machine.peer.say(ADD_MEM_REG, NEED_REPLY, &row, &[plugged.file.as_fd()]);
        assert_eq!(machine.peer.hear(), Some(longs(&[0])));
        assert!(!machine.rings[REQUESTS as usize].driver.has_used());
        // INQUIRY, into what was plugged in.
        let mut header = [0; 51];
        (header[0], header[2], header[8], header[19], header[23]) = (1, 0x40, 1, 0x12, 36);
        assert!(machine.memory.write(DATA + 0x5000, &header));
        let writable = [Piece { addr: DATA + 0x5800, len: 108 }, Piece { addr: PLUGGED, len: 36 }];
        machine.offer(REQUESTS, &[Piece { addr: DATA + 0x5000, len: 51 }], &writable);
        machine.reap(REQUESTS);
        let mut data = [0; 36];
        plugged.file.read_exact_at(&mut data, 0).unwrap();
        assert_eq!(&data[8..14], b"EGRET ");
        gate.open();
        assert_eq!(machine.answer(), GOOD);
        // And it may be taken away again.
        assert_eq!(machine.peer.order(REM_MEM_REG, &row), Some(0));
        assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    }
}

#[test]
fn a_disk_that_is_exchanged_is_let_go_of_by_every_queue() {
    let io = IoThread::start();
    let (mut machine, export) = started(&io, Nanos::ZERO);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    let late = disk(Nanos::from_micros(200));
    add_late(&export, Arc::clone(&late)).unwrap();
    assert_eq!(machine.command(LATE, &TEST_UNIT_READY, 0), POWER_ON);
    let mut old = late;
    for _ in 0..20 {
        machine.send(LATE, &READ, 4096);
        let new = disk(Nanos::from_micros(200));
        let change = DiskSwap { old: Arc::clone(&old), new: Arc::clone(&new) };
        let begun = clock::now();
        assert_sound(reopen(&[&export], &[change]).unwrap(), begun);
        assert_eq!(machine.answer(), GOOD);
        assert_eq!(Arc::strong_count(&old), 1, "nobody uses it any more");
        old = new;
    }
    // One that nobody uses changes nothing, and stops nobody.
    let (stray, new) = (disk(Nanos::ZERO), disk(Nanos::ZERO));
    assert_eq!(reopen(&[&export], &[DiskSwap { old: stray, new }]).unwrap(), Pause::default());
    export.remove_lun(LATE).unwrap();
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    assert_eq!(Arc::strong_count(&old), 1);
}

#[test]
fn a_disk_that_comes_while_another_is_being_locked_is_active_with_it_and_one_that_is_exchanged_then_in_its_place() {
    for is_exchanged in [false, true] {
        let (io, slow) = (IoThread::start(), Gate::new());
        slow.keep_locks();
        let [first, other] = [&slow, &Gate::new()].map(Gate::lockable_disk);
        let (ours, export) = listening(&io, Arc::clone(&first));
        let mut machine = Machine::new(ours, Layout::Split);
        machine.start_ring_disabled(REQUESTS);
        machine.peer.say(SET_VRING_ENABLE, NEED_REPLY, &words(&[REQUESTS, 1]), &[]);
        await_that("the first one to be locked", || slow.locked() == 1);
        if is_exchanged {
            reopen(&[&export], &[DiskSwap { old: Arc::clone(&first), new: Arc::clone(&other) }]).unwrap();
        } else {
            add_late(&export, Arc::clone(&other)).unwrap();
        }
        slow.open();
        assert_eq!(machine.peer.hear(), Some(longs(&[0])));
        assert_eq!((first.is_active(), other.is_active()), (!is_exchanged, true));
    }
}

/// What an exchange comes to that is tried again where requests have not ended within the time that it waits for them.
fn reopened(export: &Export, change: DiskSwap) -> Pause {
    let mut pause = None;
    await_that("the disk to be exchanged", || {
        pause = match reopen(&[export], std::slice::from_ref(&change)) {
            Err(ExportError::Busy(_)) => None,
            ended => Some(ended.unwrap()),
        };
        pause.is_some()
    });
    change.new.let_go_of_predecessor().unwrap();
    pause.unwrap()
}

#[test]
fn a_disk_is_not_exchanged_before_a_queue_that_stops_has_let_go_of_it() {
    let io = IoThread::start();
    let (gate, old, mut machine, export) = stopping(&io);
    let change = DiskSwap { old: Arc::clone(&old), new: disk(Nanos::ZERO) };
    gate.open_later();
    assert_eq!(reopened(&export, change), Pause::default(), "none of them runs");
    assert!(machine.rings[REQUESTS as usize].driver.has_used());
    assert!(machine.peer.hear().is_some());
    await_that("nobody to have the old one", || Arc::strong_count(&old) == 1);
}

#[test]
fn a_disk_is_not_exchanged_before_the_last_of_its_queues_is_drained() {
    let io = [IoThread::start(), IoThread::start()];
    let gate = Gate::new();
    let slow = gate.disk();
    let (ours, export) = listening_on(&[&io[0], &io[1]], 2, Arc::clone(&slow));
    let mut machine = Machine::boot(ours, Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    machine.send(FIRST, &READ, 4096);
    gate.await_kept(1);
    let change = DiskSwap { old: Arc::clone(&slow), new: disk(Nanos::ZERO) };
    gate.open_later();
    reopened(&export, change);
    assert!(machine.rings[REQUESTS as usize].driver.has_used());
    assert_eq!(Arc::strong_count(&slow), 1);
    assert_eq!(machine.answer(), GOOD);
}

/// An I/O thread like any other, and one that no disk of Linux AIO can be had on.
fn loops_of_which_the_second_has_no_linux_aio() -> [IoThread; 2] {
    // More than the system lets anybody have.
    [IoThread::start(), IoThread::with_aio_depth(u32::MAX / 2)]
}

/// A disk by threads, and the same by Linux AIO.
fn threads_and_native(image: &tempfile::NamedTempFile) -> [Options; 2] {
    image.as_file().set_len(64 * MIB).unwrap();
    let driver = Driver::File { filename: image.path().to_owned() };
    let threads = Options { direct: true, ..Options::new("disk", driver) };
    [threads.clone(), Options { aio: Aio::Native, ..threads }]
}

#[test]
fn what_an_io_thread_cannot_run_is_found_out_before_a_queue_stops_for_that_and_of_no_queue_that_does_not_run() {
    let (loops, gate) = (loops_of_which_the_second_has_no_linux_aio(), Gate::new());
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [_, native] = threads_and_native(&image);
    let (ours, export) = listening_on(&[&loops[0]], 2, Arc::new(Disk::open(&native).unwrap()));
    add_late(&export, gate.disk()).unwrap();
    let to = [loops[0].0.clone(), loops[1].0.clone()];
    assert_eq!(export.run_on(&to).unwrap(), Pause::default());
    assert_eq!(export.run_on(&to[..1]).unwrap(), Pause::default());
    let mut machine = Machine::boot(ours, Layout::Split);
    assert_eq!(machine.command(LATE, &TEST_UNIT_READY, 0), POWER_ON);
    let sent = Sent { queue: ELSEWHERE, place: 0, at: LATE, cdb: &READ_BLOCK, data_out: 0, data_in: 512 };
    send(&mut machine, &sent);
    gate.await_kept(1);
    // The other queue may go wherever it likes.
    let third = IoThread::start();
    for other in [&loops[0], &third] {
        let refused = export.run_on(&[other.0.clone(), to[1].clone()]).unwrap_err().to_string();
        assert!(refused.starts_with("export 'e0': aio=native: "), "{refused}");
    }
    gate.open();
    machine.reap(ELSEWHERE);
    assert_eq!(response(&machine, ELSEWHERE, 0), 0);
}

#[test]
fn what_an_io_thread_cannot_run_stays_as_it_was_everywhere() {
    let loops = loops_of_which_the_second_has_no_linux_aio();
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [threads, native] = threads_and_native(&image);
    let old = Arc::new(Disk::open(&threads).unwrap());
    let (mut machine, export) = started_with(&loops[1], Arc::clone(&old), Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);

    let new = Arc::new(old.reopen(&native).unwrap());
    let change = [DiskSwap { old: Arc::clone(&old), new: Arc::clone(&new) }];
    let refused = reopen(&[&export], &change).unwrap_err().to_string();
    assert!(refused.starts_with("export 'e0': aio=native: "), "{refused}");
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);

    // Where it can be had it is had, and then it is the queue that cannot go back.
    export.run_on(&[loops[0].0.clone()]).unwrap();
    reopen(&[&export], &change).unwrap();
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    let refused = export.run_on(&[loops[1].0.clone()]).unwrap_err().to_string();
    assert!(refused.starts_with("export 'e0': aio=native: "), "{refused}");
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    assert_eq!(export.run_on(&[loops[0].0.clone()]).unwrap(), Pause::default(), "it never left");
}

#[test]
fn a_request_that_does_not_end_makes_a_change_fail_and_keeps_the_queue_where_it_was() {
    let loops = [IoThread::start(), IoThread::start()];
    let gate = Gate::new();
    let slow = gate.disk();
    let (mut machine, export) = started_with(&loops[0], Arc::clone(&slow), Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    machine.send(FIRST, &READ, 4096);
    gate.await_kept(1);
    let to = [loops[1].0.clone()];
    assert!(matches!(export.run_on(&to), Err(ExportError::Busy(id)) if id == "e0"));
    let new = disk(Nanos::ZERO);
    let change = [DiskSwap { old: Arc::clone(&slow), new: Arc::clone(&new) }];
    assert!(matches!(reopen(&[&export], &change), Err(ExportError::Busy(id)) if id == "e0"));
    drop(change);
    assert_eq!(Arc::strong_count(&new), 1, "no loop has it, which would have to close it then");
    // It goes on there, and can be moved when the request has ended.
    machine.offer_event();
    assert!(export.resize_lun(FIRST, MIB).unwrap());
    assert_eq!(machine.event(), (3, 0, 0x092a));
    gate.open();
    assert_eq!(machine.answer(), GOOD);
    assert_eq!(Arc::strong_count(&new), 1, "nobody has come to use it since");
    assert!(export.run_on(&to).unwrap().whole > Nanos::ZERO);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), (0, 2, 0x2a));
}

#[test]
fn while_a_queue_starts_on_a_thread_that_is_stuck_its_export_is_in_use_and_whoever_changes_its_queues_is_refused() {
    let io = [IoThread::start(), IoThread::start()];
    let old = disk(Nanos::ZERO);
    let (ours, export) = listening(&io[0], Arc::clone(&old));
    let mut machine = Machine::new(ours, Layout::Split);
    let stuck = Stuck::begin(&io[0].0);
    machine.start_ring_disabled(REQUESTS);
    machine.peer.say(SET_VRING_ENABLE, NEED_REPLY, &words(&[REQUESTS, 1]), &[]);
    await_that("a queue to be starting", || export.is_in_use());
    // Who looks, or tells the guest something, does not wait.
    assert_eq!((export.has_active_disks(), export.has_running_queues()), (true, false));
    assert!(!export.resize_lun(FIRST, 64 * MIB).unwrap());
    let swap = || DiskSwap { old: Arc::clone(&old), new: disk(Nanos::ZERO) };
    let changes: [&(dyn Fn() -> Result<(), ExportError> + Sync); 4] = [
        &|| export.run_on(&[io[1].0.clone()]).map(drop),
        &|| reopen(&[&export], &[swap()]).map(drop),
        &|| add_late(&export, disk(Nanos::ZERO)),
        &|| export.remove_lun(FIRST).map(drop),
    ];
    thread::scope(|scope| {
        for refused in changes.map(|change| scope.spawn(change)) {
            assert!(matches!(refused.join().unwrap(), Err(ExportError::Starts(id)) if id == "e0"));
        }
    });
    assert!(stuck.is(), "somebody has waited for it");
    drop(stuck);
    assert_eq!(machine.peer.hear(), Some(longs(&[0])));
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    changes.into_iter().for_each(|change| change().unwrap());
    assert_eq!(export.luns(), [LATE]);
    assert_eq!(machine.command(LATE, &TEST_UNIT_READY, 0), POWER_ON);
}

#[test]
fn a_session_that_waits_for_a_turn_of_a_thread_that_is_stuck_has_nobody_wait_with_it() {
    let io = [IoThread::start(), IoThread::start()];
    let (ours, export) = listening_on(&[&io[0], &io[1]], 2, disk(Nanos::ZERO));
    let mut machine = Machine::new(ours, Layout::Split);
    [REQUESTS, REQUESTS + 1].into_iter().for_each(|queue| assert_eq!(machine.start_ring(queue), Some(0)));
    // Before it is answered, what is in the rings that run is taken in.
    machine.manage(QUERY_TASK);
    let stuck = Stuck::begin(&io[1].0);
    // The turns that it had left of the start.
    (0..2).for_each(|_| io[0].0.call(|_| ()).unwrap());
    let turns = || io[0].0.counters().read().turns;
    let before = turns();
    machine.start_ring_disabled(CONTROL);
    machine.peer.say(SET_VRING_ENABLE, NEED_REPLY, &words(&[CONTROL, 1]), &[]);
    // The one that is not stuck is asked first.
    await_that("a thread to be asked", || turns() > before);
    assert_eq!(io[0].0.call(|target| target.sources().count()).unwrap(), 1, "it has not started by then");
    assert!(export.is_in_use() && stuck.is(), "somebody has waited for it");
    drop(stuck);
    assert_eq!(machine.peer.hear(), Some(longs(&[0])));
    assert_eq!(machine.managed(), 0, "nobody has the command");
}

#[test]
fn a_queue_that_has_moved_and_cannot_go_back_is_where_it_is_said_to_be() {
    // Where the command for the idle queue comes too late, that one has gone back, and nothing is shown.
    await_that("a queue to be held where it went", has_queue_that_cannot_go_back);
}

fn has_queue_that_cannot_go_back() -> bool {
    let loops = [IoThread::start(), IoThread::start()];
    let gate = Gate::new();
    let (ours, export) = listening_on(&[&loops[0]], 2, gate.disk());
    let mut machine = Machine::boot(ours, Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    machine.send(FIRST, &READ, 4096);
    gate.await_kept(1);
    let to = loops[1].0.clone();
    let sources = || to.call(|target| target.sources().count()).unwrap();
    let moved = thread::scope(|scope| {
        let moving = scope.spawn(|| export.run_on(std::slice::from_ref(&to)));
        await_that("the idle queues to move", || sources() == 3 || moving.is_finished());
        // The same again.
        let writable = [Piece { addr: DATA + 0x800, len: 108 }, Piece { addr: DATA + 0x1000, len: 4096 }];
        machine.offer(REQUESTS + 1, &[Piece { addr: DATA, len: 51 }], &writable);
        gate.await_kept(2);
        moving.join().unwrap()
    });
    let are_on = [0, 1].map(|queue| export.is_on(queue, &to));
    gate.open();
    match moved {
        Err(ExportError::Scattered(id)) => assert!(id == "e0" && are_on == [false, true]),
        Err(ExportError::Busy(id)) => assert!(id == "e0" && are_on == [false, false]),
        moved => panic!("{moved:?}"),
    }
    are_on[1]
}

/// Of the unit that comes late, a block.
const READ_BLOCK: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

#[test]
fn the_limits_of_a_disk_hold_again_when_its_queues_go_on_whatever_they_have_stopped_for() {
    let (loops, gate) = ([IoThread::start(), IoThread::start()], Gate::new());
    let limited = disk(Nanos::ZERO);
    // One read, one over the brim, and then a byte a second.
    let total = Limit { average: 1, burst: 4096, burst_seconds: 1 };
    let bytes = Rates { total, ..Rates::default() };
    limited.set_throttle_group(Some(&ThrottleGroup::new("g", Limits { bytes, ..Limits::default() })));
    let (mut machine, export) = started_with(&loops[0], limited, Layout::Split);
    let (old, new) = (gate.disk(), gate.disk());
    add_late(&export, Arc::clone(&old)).unwrap();
    [FIRST, LATE].iter().for_each(|unit| assert_eq!(machine.command(*unit, &TEST_UNIT_READY, 0), POWER_ON));
    (0..2).for_each(|_| assert_eq!(machine.command(FIRST, &READ, 4096), GOOD));
    let swap = |old: &Arc<Disk>, new: &Arc<Disk>| {
        reopen(&[&export], &[DiskSwap { old: Arc::clone(old), new: Arc::clone(new) }])
    };
    let is_busy = |ended| matches!(ended, Err(ExportError::Busy(_)));
    let changes: [(&str, u64, &dyn Fn()); 5] = [
        ("nothing", 0, &|| ()),
        ("another disk", 0, &|| assert!(swap(&old, &new).is_ok())),
        ("another loop", 0, &|| assert!(export.run_on(&[loops[1].0.clone()]).is_ok())),
        ("another disk that they do not get", 1, &|| assert!(is_busy(swap(&new, &old)))),
        ("another loop that they do not get to", 1, &|| assert!(is_busy(export.run_on(&[loops[0].0.clone()])))),
    ];
    let in_flight = || export.stats().in_flight;
    for (what, kept, change) in changes {
        if kept > 0 {
            gate.shut();
            machine.send(LATE, &READ_BLOCK, 512);
            gate.await_kept(1);
        }
        change();
        if what != "nothing" {
            assert_eq!(machine.reap(REQUESTS).written, 108 + 4096, "{what}: what waits for limits, a drain lets go");
        }
        machine.send(FIRST, &READ, 4096);
        let has_used = |machine: &Machine| machine.rings[REQUESTS as usize].driver.has_used();
        await_that("it to be taken in", || in_flight() == kept + 1 || has_used(&machine));
        gate.open();
        // It would have ended by the time that these have.
        for round in 0..2 {
            if round >= kept {
                machine.send(LATE, &READ_BLOCK, 512);
            }
            assert_eq!(machine.reap(REQUESTS).written, 108 + 512, "{what}");
        }
    }
}

#[test]
fn a_disk_that_is_left_while_another_is_written_out_stays_locked_for_who_could_not_and_is_written_out_for_who_comes() {
    const AGAIN: LunAddress = LunAddress { target: 5, lun: 0 };
    // It is kept, or comes again, or is kept and taken away.
    for (comes, goes) in [(false, false), (true, false), (false, true)] {
        let io = IoThread::start();
        let [slow, quick] = [Gate::new(), Gate::new()];
        let [first, late] = [&slow, &quick].map(Gate::lockable_disk);
        slow.keep_flushes();
        let (mut machine, export) = started_with(&io, first, Layout::Split);
        add_late(&export, Arc::clone(&late)).unwrap();
        let mut elsewhere = late.activate().unwrap();
        elsewhere.serve();
        for queue in [CONTROL, EVENTS] {
            assert!(machine.peer.ask(GET_VRING_BASE, &words(&[queue, 0])).is_some());
        }
        machine.peer.say(GET_VRING_BASE, 0, &words(&[REQUESTS, 0]), &[]);
        await_that("the first disk to be written out", || slow.flushed() == 1);
        if comes {
            let activate = |disk: &Arc<Disk>| disk.activate().map_err(|e| ExportError::Disk("late".into(), e.into()));
            export.add_lun(AGAIN, unit("again"), Arc::clone(&late), activate).unwrap();
            assert!(!elsewhere.leave(), "it is served here");
            drop(elsewhere);
        } else {
            assert!(elsewhere.leave(), "it is the last, and fails to have it written out");
            assert!(export.keep(elsewhere).is_none());
        }
        if goes {
            assert!(export.remove_lun(LATE).unwrap().wait().is_none());
            assert!(!late.is_active(), "nobody has it any more");
        }
        slow.open();
        assert!(machine.peer.hear().is_some());
        assert_eq!((quick.flushed(), late.is_active()), if comes || goes { (1, false) } else { (0, true) });
    }
}

#[test]
fn disks_that_could_not_be_written_out_are_kept_side_by_side_unless_they_are_served_here_until_they_are_let_go_of() {
    let (io, gates) = (IoThread::start(), [Gate::new(), Gate::new()]);
    let [first, late] = gates.each_ref().map(Gate::lockable_disk);
    let are_active = || [&first, &late].map(|disk| disk.is_active());
    let (mut machine, export) = started_with(&io, Arc::clone(&first), Layout::Split);
    assert!(export.keep(first.activate().unwrap()).is_none());
    add_late(&export, Arc::clone(&late)).unwrap();
    for queue in [CONTROL, EVENTS, REQUESTS] {
        assert!(machine.peer.ask(GET_VRING_BASE, &words(&[queue, 0])).is_some());
    }
    assert_eq!(are_active(), [false; 2], "whoever serves them has them written out");
    for disk in [&first, &late] {
        assert!(export.keep(disk.activate().unwrap()).is_none());
    }
    assert_eq!(are_active(), [true; 2]);
    export.let_go(&first);
    assert_eq!(are_active(), [false, true]);
    export.let_go(&late);
    assert!(!late.is_active());
    assert!(export.keep(disk(Nanos::ZERO).activate().unwrap()).is_some(), "it has no such disk");
}

#[test]
fn a_disk_that_cannot_be_written_out_when_its_rings_have_stopped_stays_locked_for_who_ends_its_export_or_tries_again_then()
 {
    for is_mended in [false, true] {
        let (io, gate) = (IoThread::start(), Gate::new());
        let disk = gate.lockable_disk();
        gate.set_failing_flushes(true);
        let (mut machine, export) = started_with(&io, Arc::clone(&disk), Layout::Split);
        for queue in [CONTROL, EVENTS, REQUESTS] {
            assert!(machine.peer.ask(GET_VRING_BASE, &words(&[queue, 0])).is_some());
        }
        assert_eq!((gate.flushed(), disk.is_active(), export.has_active_disks()), (1, true, false));
        gate.set_failing_flushes(!is_mended);
        let left = if is_mended { export.end_and_write_out() } else { export.end() };
        let expected = if is_mended { (0, 2, false) } else { (1, 1, true) };
        assert_eq!((left.len(), gate.flushed(), disk.is_active()), expected);
    }
}
