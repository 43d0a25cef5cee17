//! Commands that wait for their disk's limits, and others' that wait for them.

use std::sync::Arc;

use egret_disk::{Disk, Driver, Limit, Limits, Options, Rates, ThrottleGroup};
use egret_event_loop::Nanos;
use egret_export::{ExportError, IoStatus};
use rustix::io::Errno;

use crate::machine::*;
use crate::peer::await_that;
use crate::peer::gate::Gate;
use crate::stopped::{
    COMPARE_AND_WRITE, RESERVATION_CONFLICT, Shared, WRITE, failing_writes, reserve_out, run_with, send_with, status,
};
use crate::waiting::{Sent, response, send, written};

/// So many writes, as a ring has room for.
const MANY: u64 = 5;

/// A write of one block.
fn write(lba: u8) -> [u8; 10] {
    let mut cdb = WRITE;
    cdb[5] = lba;
    cdb
}

/// Two guests of one disk, registered, of which the first has a command that writes, and writes, which would wait for minutes.
fn limited(command: &[u8], data: &[u8]) -> Shared {
    let disk = disk(Nanos::ZERO);
    let mut shared = Shared::of(disk, tempfile::tempfile().unwrap(), false);
    for (machine, key) in shared.machines.iter_mut().zip(1..) {
        let (register, list) = reserve_out(0, 0, key);
        assert_eq!(run_with(machine, &register, &list), 0);
    }
    // One after the other, once in eight minutes and a half.
    let bytes = Rates { write: Limit { average: 1, ..Limit::default() }, ..Rates::default() };
    set_limits(&shared, Some(Limits { bytes, ..Limits::default() }));
    let ([first, _], [one, _]) = (&mut shared.machines, &shared.exports);
    send_with(first, 0, &write(0), &[0; 512]);
    first.reap(REQUESTS);
    assert_eq!(status(first, 0), 0, "there is room for one");
    send_with(first, 1, command, data);
    for place in 2..MANY {
        send_with(first, place, &write(place as u8), &[0; 512]);
    }
    // Its loop has had turns in which to do what it can do.
    await_that("the others to wait", || one.stats().in_flight == MANY - 1);
    shared
}

fn set_limits(shared: &Shared, limits: Option<Limits>) {
    shared.disk.set_throttle_group(limits.map(|limits| ThrottleGroup::new("g", limits)).as_ref());
    for io in &shared.io {
        io.0.call(|target| target.backend().restart_throttled()).unwrap();
    }
}

/// The writes that wait end like this.
fn end_alike(shared: &mut Shared, expected: u8) {
    let [first, _] = &mut shared.machines;
    for _ in 1..MANY {
        first.reap(REQUESTS);
    }
    assert_eq!([1, 2, 3, 4].map(|place| status(first, place)), [expected; MANY as usize - 1]);
    assert_eq!(shared.exports[0].stats().in_flight, 0);
}

#[test]
fn a_guest_is_fenced_at_once_however_long_its_writes_would_wait_for_limits_and_they_are_not_done() {
    // The one has a place in the fence, and the other a lock.
    for (command, data) in [(&write(1)[..], &[0; 512][..]), (&COMPARE_AND_WRITE, &[0; 1024])] {
        let mut shared = limited(command, data);
        let (reserve, list) = reserve_out(1, 2, 0);
        assert_eq!(run_with(&mut shared.machines[1], &reserve, &list), 0);
        let (preempt_and_abort, list) = reserve_out(5, 2, 1);
        assert_eq!(run_with(&mut shared.machines[1], &preempt_and_abort, &list), 0);
        end_alike(&mut shared, RESERVATION_CONFLICT);
    }
}

#[test]
fn a_function_ends_what_waits_for_limits_without_waiting_for_them() {
    let mut shared = limited(&write(1), &[0; 512]);
    let [first, _] = &mut shared.machines;
    first.manage(ABORT_TASK_SET);
    assert_eq!(first.managed(), 0);
    for _ in 1..MANY {
        first.reap(REQUESTS);
    }
    assert_eq!([1, 2, 3, 4].map(|place| response(first, REQUESTS, place)), [2; MANY as usize - 1]);
}

#[test]
fn a_compare_and_write_compares_before_writes_that_wait_for_limits_and_those_are_done_when_there_are_none() {
    const MISCOMPARE: u8 = 2;
    let mut shared = limited(&write(1), &[0; 512]);
    // Of other blocks and of the same, more often than there are halves to empty.
    for lba in [0, 9, 1, 3, 9] {
        let mut alone = COMPARE_AND_WRITE;
        alone[9] = lba;
        assert_eq!(run_with(&mut shared.machines[1], &alone, &[1; 1024]), MISCOMPARE);
    }
    assert_eq!(shared.exports[0].stats().in_flight, MANY - 1);
    set_limits(&shared, None);
    end_alike(&mut shared, 0);
}

#[test]
fn a_queue_that_was_called_in_vain_for_another_unit_is_called_again_for_what_waits_for_limits() {
    const MISCOMPARE: u8 = 2;
    let (gate, beside) = (Gate::new(), unit("beside"));
    let kept = gate.disk();
    let mut shared = limited(&write(1), &[0; 512]);
    for export in &shared.exports {
        let activate = |disk: &Arc<Disk>| disk.activate().map_err(|e| ExportError::Disk("beside".to_owned(), e.into()));
        export.add_lun(LATE, Arc::clone(&beside), Arc::clone(&kept), activate).unwrap();
    }
    let [first, second] = &mut shared.machines;
    while first.command(LATE, &TEST_UNIT_READY, 0) != GOOD {}
    for at in [FIRST, LATE] {
        while second.command(at, &TEST_UNIT_READY, 0) != GOOD {}
    }
    // One waits with its disk, and the other for it; what waits for limits is of the first unit.
    send(first, &Sent { queue: REQUESTS, place: 6, at: LATE, cdb: &WRITE, data_out: 512, data_in: 0 });
    gate.await_kept(1);
    send(second, &Sent { queue: REQUESTS, place: 6, at: LATE, cdb: &COMPARE_AND_WRITE, data_out: 1024, data_in: 0 });
    await_that("it to wait", || shared.exports[1].stats().in_flight == 1);
    // The first guest's queue has looked.
    (0..2).for_each(|_| shared.io[0].0.call(|_| ()).unwrap());
    gate.open();
    for machine in [&mut *first, &mut *second] {
        machine.reap(REQUESTS);
    }
    assert_eq!(run_with(second, &COMPARE_AND_WRITE, &[1; 1024]), MISCOMPARE);
    set_limits(&shared, None);
    end_alike(&mut shared, 0);
}

#[test]
fn an_export_goes_on_when_what_it_tries_is_ended_while_that_waits_for_limits() {
    let blkdebug = failing_writes(Errno::NOSPC, Some(1));
    let driver = Driver::Null { size: 64 * MIB, latency: Nanos::ZERO, read_zeroes: true };
    let disk = Disk::open(&Options { blkdebug, ..Options::new("full", driver) }).unwrap();
    let mut shared = Shared::of(Arc::new(disk), tempfile::tempfile().unwrap(), false);
    let bytes = Rates { write: Limit { average: 1, ..Limit::default() }, ..Rates::default() };
    set_limits(&shared, Some(Limits { bytes, ..Limits::default() }));
    let ([first, _], [one, _]) = (&mut shared.machines, &shared.exports);
    send_with(first, 0, &WRITE, &[0; 512]);
    await_that("it to have failed and to be tried", || one.errors().stops() == 1 && one.stats().waiting == 0);
    first.manage(ABORT_TASK_SET);
    assert_eq!(first.managed(), 0);
    first.reap(REQUESTS);
    assert_eq!(response(first, REQUESTS, 0), 2);
    await_that("the export to go on", || one.errors().status() == IoStatus::Ok);
}

#[test]
fn a_write_that_waits_for_limits_has_its_turn_among_however_many_compare_and_writes() {
    const AT_A_TIME: u64 = 4;
    // Each waits for a lock of those before it, or for nobody.
    for lba in [|_| 0, |place: u64| 1 + place as u8] as [fn(u64) -> u8; 2] {
        let driver = Driver::Null { size: 64 * MIB, latency: Nanos::ZERO, read_zeroes: true };
        let disk = Arc::new(Disk::open(&Options::new("limited", driver)).unwrap());
        let mut shared = Shared::of(disk, tempfile::tempfile().unwrap(), false);
        let requests = Rates { write: Limit { average: 100, ..Limit::default() }, ..Rates::default() };
        set_limits(&shared, Some(Limits { requests, ..Limits::default() }));
        let [first, second] = &mut shared.machines;
        let send = |first: &mut Machine, place| {
            let mut cdb = COMPARE_AND_WRITE;
            cdb[9] = lba(place);
            let sent = Sent { queue: REQUESTS, place, at: FIRST, cdb: &cdb, data_out: 1024, data_in: 0 };
            let (readable, writable) = written(first, &sent);
            let ring = &mut first.rings[REQUESTS as usize];
            ring.driver.add(&readable, &writable, place).unwrap();
            if ring.driver.publish() {
                ring.kick();
            }
        };
        (0..AT_A_TIME).for_each(|place| send(first, place));
        let go_on = |first: &mut Machine| {
            let place = first.reap(REQUESTS).token;
            assert_eq!(status(first, place), 0);
            send(first, place);
        };
        // What may come at once has come by then.
        (0..20).for_each(|_| go_on(first));
        send_with(second, 0, &write(0), &[0; 512]);
        // Those before it are four, and its thread may be late.
        assert!((0..200).any(|_| {
            go_on(first);
            second.rings[REQUESTS as usize].driver.has_used()
        }));
        second.reap(REQUESTS);
        assert_eq!(status(second, 0), 0);
    }
}
