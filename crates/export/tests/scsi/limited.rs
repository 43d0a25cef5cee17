//! Units whose limits have no room for what was asked of them: what their rings do when they stop, and afterwards.
//!
//! The limits are so low that what waits for them waits for longer than any test, unless something else lets it go.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::channel;

use egret_disk::{Debt, Disk, Driver, Limit, Limits, Options, Rates, ThrottleGroup};
use egret_event_loop::Nanos;
use egret_export::Export;
use egret_virtio::scsi::LunAddress;
use egret_vring::memory::Region;
use egret_vring::ring::InflightConfig;

use crate::machine::*;
use crate::peer::lines::{lines, record_lines};
use crate::peer::{
    ADD_MEM_REG, GET_VRING_BASE, IoThread, NEED_REPLY, REM_MEM_REG, SET_INFLIGHT_FD, SET_VRING_ENABLE, await_that,
    longs, words,
};
use crate::waiting::{ELSEWHERE, Sent, ask, response, two_threads, written};

const BLOCK: u64 = 512;
const READ_BLOCK: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
/// As many as a ring has room for, beside one of another unit.
const READS: usize = 4;
const QUEUES: [u32; 3] = [CONTROL, EVENTS, REQUESTS];

/// A disk that is locked while rings run, and may do a block at once and then a byte a second.
fn limited() -> Arc<Disk> {
    let driver = Driver::Null { size: 64 * MIB, latency: Nanos::ZERO, read_zeroes: true };
    let disk = Arc::new(Disk::open(&Options { allow_inactive: true, ..Options::new("limited", driver) }).unwrap());
    disk.set_throttle_group(Some(&ThrottleGroup::new("g", limits())));
    disk
}

fn limits() -> Limits {
    let total = Limit { average: 1, burst: BLOCK, burst_seconds: 1 };
    Limits { bytes: Rates { total, ..Rates::default() }, ..Limits::default() }
}

/// What a front-end does when memory is plugged in.
fn plug_memory(machine: &mut Machine, at: u64) {
    let plugged = Region::anonymous(0, MIB).unwrap();
    machine.peer.say(ADD_MEM_REG, NEED_REPLY, &memory_at(at), &[plugged.file.as_fd()]);
    assert_eq!(machine.peer.hear(), Some(longs(&[0])));
}

/// And when it is taken away.
fn unplug_memory(machine: &mut Machine, at: u64) {
    assert_eq!(machine.peer.order(REM_MEM_REG, &memory_at(at)), Some(0));
}

fn memory_at(at: u64) -> Vec<u8> {
    longs(&[0, at << 30, MIB, at << 30, 0])
}

/// Has a queue take reads in.
fn read(machine: &mut Machine, export: &Export, at: LunAddress) {
    read_of(machine, export, REQUESTS, [at; READS]);
}

fn read_of(machine: &mut Machine, export: &Export, queue: u32, units: impl IntoIterator<Item = LunAddress>) {
    for (place, at) in (0..).zip(units) {
        let sent = Sent { queue, place, at, cdb: &READ_BLOCK, data_out: 0, data_in: BLOCK as u32 };
        let (readable, writable) = written(machine, &sent);
        machine.rings[queue as usize].driver.add(&readable, &writable, 0).unwrap();
    }
    let ring = &mut machine.rings[queue as usize];
    // All at once, and so they are in one turn.
    if ring.driver.publish() {
        ring.kick();
    }
    // Where this thread is late, limits may have let all of them through by now.
    let driver = &machine.rings[queue as usize].driver;
    await_that("reads to be taken in", || export.stats().in_flight > 0 || driver.has_used());
}

fn reap(machine: &mut Machine) {
    for place in 0..READS as u64 {
        machine.reap(REQUESTS);
        assert_eq!(response(machine, REQUESTS, place), 0);
    }
}

/// What a front-end does when its guest stops and goes on.
fn stop_and_go_on(machine: &mut Machine) {
    stop(machine);
    go_on(machine);
}

fn stop(machine: &mut Machine) {
    for queue in QUEUES {
        assert!(machine.peer.ask(GET_VRING_BASE, &words(&[queue, 0])).is_some());
    }
}

fn go_on(machine: &mut Machine) {
    QUEUES.into_iter().for_each(|queue| machine.start_ring_again(queue));
    assert_eq!(machine.peer.order(SET_VRING_ENABLE, &words(&[REQUESTS, 1])), Some(0));
}

/// Interrupts the queues until they do not start again at once, because what waits goes each time; so many times in vain.
fn interrupt_until_rings_wait(
    machine: &mut Machine,
    export: &Export,
    at: LunAddress,
    mut interrupt: impl FnMut(&mut Machine),
) -> u64 {
    let in_vain = (0..4).find(|_| {
        read(machine, export, at);
        interrupt(machine);
        reap(machine);
        !export.has_running_queues()
    });
    in_vain.expect("what is let go each time is more than the limits")
}

/// An export of `FIRST`, which is not limited, and of `LATE`, which is; both have told their news.
fn beside_a_limited(io: &IoThread) -> (Machine, Export, Arc<Disk>) {
    beside_a_limited_on(&[io])
}

/// Likewise, with a queue on each of these threads.
fn beside_a_limited_on(io: &[&IoThread]) -> (Machine, Export, Arc<Disk>) {
    let (ours, export) = listening_on(io, io.len() as u16, disk(Nanos::ZERO));
    let limited = limited();
    add_late(&export, Arc::clone(&limited)).unwrap();
    let mut machine = Machine::boot(ours, Layout::Split);
    for at in [FIRST, LATE] {
        while machine.command(at, &TEST_UNIT_READY, 0) != GOOD {}
    }
    (machine, export, limited)
}

#[test]
fn what_one_unit_owes_holds_up_no_other_when_memory_is_unplugged_or_the_guest_stops_and_goes_on() {
    let io = IoThread::start();
    let interrupts: [fn(&mut Machine); 2] = [|machine| unplug_memory(machine, 1), stop_and_go_on];
    for interrupt in interrupts {
        let (mut machine, export, limited) = beside_a_limited(&io);
        plug_memory(&mut machine, 1);
        read(&mut machine, &export, LATE);
        interrupt(&mut machine);
        reap(&mut machine);
        assert!(limited.limits_debt().owed > 0);
        assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
        assert_eq!(ask(&mut machine, QUERY_TASK), 0);
    }
}

#[test]
fn memory_that_is_plugged_in_lets_nothing_go_past_limits() {
    let io = IoThread::start();
    let (mut machine, export, limited) = beside_a_limited(&io);
    read(&mut machine, &export, LATE);
    for at in 1..=5 {
        plug_memory(&mut machine, at);
    }
    assert_eq!(limited.limits_debt(), Debt::default());
    assert!(export.stats().in_flight > 0);
    limited.set_throttle_group(None);
    io.0.call(|target| target.backend().restart_throttled()).unwrap();
    reap(&mut machine);
}

#[test]
fn a_queue_whose_drains_have_let_go_past_limits_twice_waits_for_them_and_so_do_functions() {
    let io = IoThread::start();
    let (mut machine, export, limited) = beside_a_limited(&io);
    assert_eq!(interrupt_until_rings_wait(&mut machine, &export, LATE, stop_and_go_on), 1);
    let Debt { owed, .. } = limited.limits_debt();
    machine.manage(QUERY_TASK);
    machine.send(FIRST, &READ, 4096);
    stop_and_go_on(&mut machine);
    assert!(!export.has_running_queues() && export.is_in_use());
    assert_eq!(limited.limits_debt().owed, owed);
    limited.set_throttle_group(None);
    assert_eq!(machine.answer(), GOOD);
    assert_eq!(machine.managed(), 0);
}

#[test]
fn a_queue_goes_on_when_all_that_its_drains_let_go_before_the_last_has_been_made_up_for_and_no_sooner() {
    let io = IoThread::start();
    let (mut machine, export, limited) = beside_a_limited(&io);
    // One, over the brim, and then two a second.
    let total = Limit { average: 2 * BLOCK, ..Limit::default() };
    let limits = Limits { bytes: Rates { total, ..Rates::default() }, ..Limits::default() };
    limited.set_throttle_group(Some(&ThrottleGroup::new("h", limits)));
    read(&mut machine, &export, LATE);
    reap(&mut machine);
    // Now there is room for none.
    read(&mut machine, &export, LATE);
    stop_and_go_on(&mut machine);
    reap(&mut machine);
    let Debt { owed, made_up } = limited.limits_debt();
    let before = owed + made_up;
    read_of(&mut machine, &export, REQUESTS, [LATE]);
    stop_and_go_on(&mut machine);
    machine.reap(REQUESTS);
    let Debt { owed, made_up } = limited.limits_debt();
    // Where this thread was late there was room for it, and nothing is shown.
    let waits = owed + made_up > before;
    await_that("the rings to run", || {
        let runs = export.has_running_queues();
        let Debt { made_up, .. } = limited.limits_debt();
        assert!(!waits || !runs || made_up >= before, "{made_up} of {before}");
        runs
    });
    stop_and_go_on(&mut machine);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
}

#[test]
fn a_queue_does_not_wait_for_what_drains_of_another_queue_of_its_export_have_let_go() {
    let [first, second] = two_threads();
    let (mut machine, export, _) = beside_a_limited_on(&[&first, &second]);
    // From the second time on it waits.
    for _ in 0..2 {
        read_of(&mut machine, &export, ELSEWHERE, [LATE; READS]);
        assert!(machine.peer.ask(GET_VRING_BASE, &words(&[ELSEWHERE, 0])).is_some());
        for _ in 0..READS {
            machine.reap(ELSEWHERE);
        }
        machine.start_ring_again(ELSEWHERE);
    }
    assert!(machine.peer.ask(GET_VRING_BASE, &words(&[REQUESTS, 0])).is_some());
    machine.start_ring_again(REQUESTS);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
}

#[test]
fn a_queue_waits_for_nothing_that_another_export_of_its_disk_has_let_go() {
    let io = IoThread::start();
    let (mut machine, export, shared) = beside_a_limited(&io);
    let (ours, beside) = listening(&io, shared);
    let mut other = Machine::boot(ours, Layout::Split);
    assert_eq!(other.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    interrupt_until_rings_wait(&mut machine, &export, LATE, stop_and_go_on);
    for time in 0..3 {
        stop_and_go_on(&mut other);
        assert!(beside.has_running_queues(), "{time}");
    }
}

#[test]
fn what_one_disk_has_made_up_for_stands_in_for_nothing_that_another_owes() {
    let io = IoThread::start();
    let made_up = limited();
    let (ours, export) = listening(&io, Arc::clone(&made_up));
    add_late(&export, limited()).unwrap();
    let mut machine = Machine::boot(ours, Layout::Split);
    let use_up = |machine: &mut Machine, at| {
        let mut goes = 0;
        while goes < 2 {
            goes += usize::from(machine.command(at, &READ_BLOCK, BLOCK as u32) == GOOD);
        }
    };
    use_up(&mut machine, LATE);
    let in_vain = (0..4).find(|_| {
        use_up(&mut machine, FIRST);
        read_of(&mut machine, &export, REQUESTS, [FIRST, FIRST, LATE, LATE]);
        stop(&mut machine);
        made_up.throttle_group().unwrap().set_limits(limits());
        go_on(&mut machine);
        reap(&mut machine);
        !export.has_running_queues()
    });
    assert_eq!(in_vain, Some(1));
}

#[test]
fn what_drains_have_let_go_past_the_limits_of_a_group_counts_together_whichever_of_its_disks_it_was_for() {
    let io = IoThread::start();
    let [first, late] = [(); 2].map(|()| limited());
    late.set_throttle_group(first.throttle_group().as_ref());
    let (ours, export) = listening(&io, first);
    add_late(&export, late).unwrap();
    let mut machine = Machine::boot(ours, Layout::Split);
    for (at, runs) in [(FIRST, true), (LATE, false)] {
        read(&mut machine, &export, at);
        stop_and_go_on(&mut machine);
        reap(&mut machine);
        assert_eq!(export.has_running_queues(), runs, "{at:?}");
    }
}

#[test]
fn functions_that_a_queue_has_left_are_not_said_to_wait_because_a_disk_failed() {
    record_lines();
    let io = two_threads();
    let (ours, export) = listening_on(&[&io[0], &io[1]], 2, disk(Nanos::ZERO));
    add_late(&export, limited()).unwrap();
    let mut machine = Machine::new(ours, Layout::Split);
    let record = Region::anonymous(0, InflightConfig { queues: 4, queue_size: 16, packed: false }.bytes()).unwrap();
    machine.peer.say(SET_INFLIGHT_FD, 0, &longs(&[record.size, 0, 16 << 16 | 4]), &[record.file.as_fd()]);
    machine.start_rings();
    for at in [FIRST, LATE] {
        while machine.command(at, &TEST_UNIT_READY, 0) != GOOD {}
    }
    [1, 2].into_iter().for_each(|at| plug_memory(&mut machine, at));
    // From the second time on it waits.
    read_of(&mut machine, &export, ELSEWHERE, [LATE; READS]);
    unplug_memory(&mut machine, 1);
    for _ in 0..READS {
        machine.reap(ELSEWHERE);
    }
    read_of(&mut machine, &export, ELSEWHERE, [LATE; READS]);
    // The second thread does nothing until all queues have been told to stop.
    let (go_on, may_go_on) = channel::<()>();
    io[1].0.send(move |_| assert!(may_go_on.recv().is_err()));
    machine.manage(ABORT_TASK);
    await_that("the function to be taken in", || export.queues()[CONTROL as usize].in_flight.get() == 1);
    machine.peer.say(REM_MEM_REG, NEED_REPLY, &memory_at(2), &[]);
    await_that("all queues to be stopping", || !export.has_running_queues());
    drop(go_on);
    assert_eq!(machine.peer.hear(), Some(longs(&[0])));
    assert!(!export.has_running_queues() && !machine.rings[CONTROL as usize].driver.has_used());
    assert!(machine.peer.ask(GET_VRING_BASE, &words(&[CONTROL, 0])).is_some());
    assert_eq!(lines("export 'e0': queue 0 stops"), 0);
}

#[test]
fn a_command_of_many_operations_ends_between_two_of_them_when_its_ring_stops_and_may_be_tried_again() {
    // All of the disk.
    const VERIFY: [u8; 16] = [0x8f, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0];
    const BUSY: u8 = 8;
    let io = IoThread::start();
    let (mut machine, export, limited) = beside_a_limited(&io);
    machine.send(LATE, &VERIFY, 0);
    await_that("the command to wait for limits", || export.stats().in_flight > 0);
    stop_and_go_on(&mut machine);
    let (response, status, _) = machine.answer();
    assert_eq!((response, status), (0, BUSY));
    assert!(limited.limits_debt().owed <= 1, "{:?}", limited.limits_debt());
    // One that waits for nothing is done.
    limited.set_throttle_group(None);
    machine.send(LATE, &VERIFY, 0);
    stop_and_go_on(&mut machine);
    assert_eq!(machine.answer(), GOOD);
}

#[test]
fn a_disk_is_left_to_others_when_rings_are_disabled_that_wait_to_start() {
    let io = IoThread::start();
    let (mut machine, export) = started_with(&io, limited(), Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    let mut plugged = 1..5;
    plugged.clone().for_each(|at| plug_memory(&mut machine, at));
    interrupt_until_rings_wait(&mut machine, &export, FIRST, |machine| unplug_memory(machine, plugged.next().unwrap()));
    for queue in QUEUES {
        assert!(export.has_active_disks(), "one is to run as soon as it may");
        assert_eq!(machine.peer.order(SET_VRING_ENABLE, &words(&[queue, 0])), Some(0));
    }
    assert!(!export.has_active_disks());
}
