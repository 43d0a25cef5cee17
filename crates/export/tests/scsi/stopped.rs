//! Commands that wait because a disk fails: they end when they are aborted, tried again, or nobody could do either.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egret_disk::{DebugEvent, DebugRules, Disk, Driver, InjectError, IoType, Options};
use egret_event_loop::Nanos;
use egret_export::{DiskSwap, Export, IoStatus, OnError, reopen};
use egret_vring::memory::Region;
use egret_vring::ring::InflightConfig;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;

use crate::machine::*;
use crate::peer::{GET_VRING_BASE, IoThread, SET_INFLIGHT_FD, SET_LOG_BASE, longs, words};
use crate::waiting::{ELSEWHERE, Sent, ask, response, send, two_threads, written};

const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const COMPARE_AND_WRITE: [u8; 16] = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];

/// A disk in memory, that fails to write if it is not well.
fn memory_disk(is_well: bool) -> (Arc<Disk>, File) {
    let file = File::from(memfd_create("disk", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
    file.set_len(64 * MIB).unwrap();
    if !is_well {
        fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
    }
    let driver = Driver::File { filename: format!("/proc/self/fd/{}", file.as_raw_fd()).into() };
    (Arc::new(Disk::open(&Options::new("memory", driver)).unwrap()), file)
}

/// Waits until the export is stopped and keeps so many requests.
fn await_kept(export: &Export, kept: u64) {
    let begun = Instant::now();
    while export.errors().status() != IoStatus::Failed || export.stats().waiting != kept {
        assert!(begun.elapsed() < Duration::from_secs(30), "{kept} are kept: {:?}", export.stats());
        std::thread::yield_now();
    }
}

/// A write on one thread fails, and three commands come after it: the same write on the other thread, one that waits for
/// both, and a read.
fn stop(machine: &mut Machine, export: &Export) {
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    let write = |queue| Sent { queue, place: 0, at: FIRST, cdb: &WRITE, data_out: 512, data_in: 0 };
    send(machine, &write(REQUESTS));
    await_kept(export, 1);
    send(machine, &write(ELSEWHERE));
    let queue = ELSEWHERE;
    send(machine, &Sent { queue, place: 1, at: FIRST, cdb: &COMPARE_AND_WRITE, data_out: 1024, data_in: 0 });
    send(machine, &Sent { queue, place: 2, at: FIRST, cdb: &READ, data_out: 0, data_in: 4096 });
    await_kept(export, 3);
    // What needs no disk is answered.
    send(machine, &Sent { queue: REQUESTS, place: 3, at: FIRST, cdb: &TEST_UNIT_READY, data_out: 0, data_in: 0 });
    machine.reap(REQUESTS);
}

/// A machine whose commands wait.
fn stopped(io: &[IoThread; 2], sick: Arc<Disk>) -> (Machine, Export) {
    let (ours, export) = listening_on(&[&io[0], &io[1]], 2, sick);
    let mut machine = Machine::boot(ours, Layout::Split);
    stop(&mut machine, &export);
    (machine, export)
}

/// Likewise, and a record says what is in flight.
fn stopped_with_record(io: &[IoThread; 2], sick: Arc<Disk>) -> (Machine, Export) {
    let (ours, export) = listening_on(&[&io[0], &io[1]], 2, sick);
    let mut machine = Machine::new(ours, Layout::Split);
    let record = Region::anonymous(0, InflightConfig { queues: 4, queue_size: 16, packed: false }.bytes()).unwrap();
    machine.peer.say(SET_INFLIGHT_FD, 0, &longs(&[record.size, 0, 16 << 16 | 4]), &[record.file.as_fd()]);
    machine.start_rings();
    stop(&mut machine, &export);
    (machine, export)
}

/// Stops the queue of the write that failed; its driver is told.
fn is_told_when_the_queue_stops(machine: &mut Machine, export: &Export) {
    machine.peer.ask(GET_VRING_BASE, &words(&[REQUESTS, 0])).expect("the queue stops");
    machine.reap(REQUESTS);
    // CHECK CONDITION.
    assert_eq!(machine.read::<12>(DATA + 0x1_0000 * u64::from(REQUESTS) + 0x80)[10], 2);
    // The others were tried again then.
    await_kept(export, 1);
}

/// The responses to the commands that were stopped, each of which has been answered.
fn responses(machine: &mut Machine) -> [u8; 4] {
    machine.reap(REQUESTS);
    for _ in 0..3 {
        machine.reap(ELSEWHERE);
    }
    [(REQUESTS, 0), (ELSEWHERE, 0), (ELSEWHERE, 1), (ELSEWHERE, 2)]
        .map(|(queue, place)| response(machine, queue, place))
}

#[test]
fn a_function_ends_commands_that_wait_for_a_disk_and_the_export_goes_on_without_them() {
    let io = two_threads();
    for (function, ended) in [(ABORT_TASK, 2), (ABORT_TASK_SET, 2), (UNIT_RESET, 4)] {
        let (sick, _file) = memory_disk(false);
        let (mut machine, export) = stopped(&io, sick);
        // To other threads they go along, and are found there.
        export.run_on(&[io[1].0.clone(), io[0].0.clone()]).unwrap();
        assert_eq!((ask(&mut machine, QUERY_TASK), export.stats().waiting), (10, 3));
        assert_eq!(ask(&mut machine, function), 0);
        let [rest @ .., read] = responses(&mut machine);
        assert_eq!(rest, [ended; 3]);
        // The other queue may have gone on, and have read, before it is told.
        assert!([0, ended].contains(&read), "{read}");
        assert_eq!((export.errors().status(), export.stats().in_flight), (IoStatus::Ok, 0));
        assert_eq!(ask(&mut machine, QUERY_TASK_SET), 0);
    }
}

#[test]
fn commands_that_wait_for_a_disk_are_done_by_another_wherever_their_queues_are_then() {
    let io = two_threads();
    let ((sick, _), (well, _file)) = (memory_disk(false), memory_disk(true));
    let (mut machine, export) = stopped(&io, Arc::clone(&sick));
    export.run_on(&[io[1].0.clone()]).unwrap();
    reopen(&[&export], &[DiskSwap { old: sick, new: well }]).unwrap();
    export.run_on(&[io[1].0.clone(), io[0].0.clone()]).unwrap();
    await_kept(&export, 3);
    export.errors().resume();
    assert_eq!(responses(&mut machine), [0; 4]);
    assert_eq!((export.errors().stops(), export.stats().waiting), (1, 0));
}

#[test]
fn where_no_record_keeps_what_waits_for_a_disk_its_driver_is_told_before_the_queue_stops() {
    let io = two_threads();
    let (sick, _file) = memory_disk(false);
    let (mut machine, export) = stopped(&io, sick);
    is_told_when_the_queue_stops(&mut machine, &export);
    drop((machine, export));
}

#[test]
fn an_error_that_is_ignored_is_hidden_from_a_read_and_not_from_a_comparison() {
    let io = two_threads();
    let driver = Driver::Null { size: 64 * MIB, latency: Nanos::ZERO, read_zeroes: true };
    let error = InjectError {
        event: DebugEvent::ReadAio,
        state: None,
        iotype: Some(IoType::Read),
        errno: Errno::IO,
        sector: None,
        once: false,
    };
    let blkdebug = DebugRules { inject_error: vec![error], set_state: Vec::new() };
    let sick = Disk::open(&Options { blkdebug, ..Options::new("sick", driver) }).unwrap();
    let (ours, _export) = listening_with(OnError::Ignore, &[&io[0]], 1, Arc::new(sick));
    let mut machine = Machine::boot(ours, Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    let (queue, place, at) = (REQUESTS, 1, FIRST);
    send(&mut machine, &Sent { queue, place, at, cdb: &COMPARE_AND_WRITE, data_out: 1024, data_in: 0 });
    machine.reap(queue);
    assert_eq!(machine.read::<12>(DATA + 0x1_0000 * u64::from(queue) + 0x1000 * place + 0x80)[10], 2);
}

#[test]
fn a_driver_whose_guest_migrates_is_told_what_waits_for_a_disk_because_its_record_may_not_move_along() {
    let io = two_threads();
    let (sick, _file) = memory_disk(false);
    let (mut machine, export) = stopped_with_record(&io, sick);
    let log = Region::anonymous(0, 4096).unwrap();
    machine.peer.say(SET_LOG_BASE, 0, &longs(&[log.size, 0]), &[log.file.as_fd()]);
    assert!(machine.peer.hear().is_some(), "it has agreed on LOG_ALL");
    is_told_when_the_queue_stops(&mut machine, &export);
    drop((machine, export));
}

#[test]
fn a_unit_that_is_taken_away_is_not_waited_for() {
    let io = two_threads();
    let (sick, _file) = memory_disk(false);
    let (mut machine, export) = stopped(&io, sick);
    export.remove_lun(FIRST).unwrap().wait();
    assert_eq!(responses(&mut machine), [0; 4]);
    assert_eq!((export.errors().status(), export.stats().in_flight), (IoStatus::Ok, 0));
}

#[test]
fn what_a_record_keeps_holds_up_no_command_of_another_queue_and_goes_on_when_its_queue_does() {
    let io = two_threads();
    let ((sick, _), (well, _file)) = (memory_disk(false), memory_disk(true));
    let (mut machine, export) = stopped_with_record(&io, Arc::clone(&sick));
    machine.peer.ask(GET_VRING_BASE, &words(&[REQUESTS, 0])).expect("the queue stops");
    assert!(!machine.rings[REQUESTS as usize].driver.has_used(), "nobody is told");
    // The others go on, and the same error stops the first of them.
    await_kept(&export, 1);
    reopen(&[&export], &[DiskSwap { old: sick, new: well }]).unwrap();
    export.errors().resume();
    for _ in 0..3 {
        machine.reap(ELSEWHERE);
    }
    assert_eq!([0, 1, 2].map(|place| response(&machine, ELSEWHERE, place)), [0; 3]);
    machine.rings[REQUESTS as usize].kick();
    assert_eq!(machine.start_ring(REQUESTS), Some(0));
    machine.reap(REQUESTS);
    assert_eq!(response(&machine, REQUESTS, 0), 0);
}

#[test]
fn what_failed_goes_on_in_the_order_in_which_it_did_however_often_it_was_tried_in_vain() {
    let io = two_threads();
    let driver = Driver::Null { size: 64 * MIB, latency: Nanos::ZERO, read_zeroes: true };
    // There is no space for the three commands, nor when the first of them is tried again.
    let full = InjectError {
        event: DebugEvent::WriteAio,
        state: None,
        iotype: Some(IoType::Write),
        errno: Errno::NOSPC,
        sector: None,
        once: true,
    };
    let blkdebug = DebugRules { inject_error: vec![full; 4], set_state: Vec::new() };
    let disk = Disk::open(&Options { blkdebug, ..Options::new("full", driver) }).unwrap();
    let (ours, export) = listening_on(&[&io[0]], 1, Arc::new(disk));
    let mut machine = Machine::boot(ours, Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    for place in 0..3 {
        let sent = Sent { queue: REQUESTS, place, at: FIRST, cdb: &WRITE, data_out: 512, data_in: 0 };
        let (readable, writable) = written(&machine, &sent);
        machine.rings[REQUESTS as usize].driver.add(&readable, &writable, place).unwrap();
    }
    // The device sees the three at once.
    let ring = &mut machine.rings[REQUESTS as usize];
    ring.driver.publish();
    ring.kick();
    assert_eq!([(); 3].map(|()| machine.reap(REQUESTS).token), [0, 1, 2]);
    assert_eq!([0, 1, 2].map(|place| response(&machine, REQUESTS, place)), [0; 3]);
    assert_eq!((export.errors().stops(), export.stats().waiting), (1, 0));
}
