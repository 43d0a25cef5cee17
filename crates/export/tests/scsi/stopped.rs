//! Commands that wait because a disk fails: they end when they are aborted, tried again, or nobody could do either.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use egret_disk::{DebugEvent, DebugRules, Disk, Driver, InjectError, IoType, Options};
use egret_event_loop::Nanos;
use egret_export::{Address, DiskSwap, ErrorPolicy, Export, ExportConfig, IoStatus, OnError, reopen};
use egret_virtio::scsi::ScsiConfig;
use egret_vring::memory::Region;
use egret_vring::ring::{InflightConfig, Piece};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;

use crate::machine::*;
use crate::peer::gate::Gate;
use crate::peer::lines::{lines, record_lines};
use crate::peer::{
    ADD_MEM_REG, GET_VRING_BASE, IoThread, NEED_REPLY, REM_MEM_REG, SET_INFLIGHT_FD, SET_LOG_BASE, SET_VRING_ENABLE,
    await_that, export_config, longs, words,
};
use crate::waiting::{ELSEWHERE, Sent, ask, await_waiting, response, send, two_threads, written};

pub const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
pub const COMPARE_AND_WRITE: [u8; 16] = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];

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

/// A write on one thread fails, and three commands come after it: the same write on the other thread, a COMPARE AND WRITE
/// of the same block, and a read.
fn stop(machine: &mut Machine, export: &Export) {
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    let write = |queue| Sent { queue, place: 0, at: FIRST, cdb: &WRITE, data_out: 512, data_in: 0 };
    send(machine, &write(REQUESTS));
    await_kept(export, 1);
    send(machine, &write(ELSEWHERE));
    let queue = ELSEWHERE;
    send(machine, &Sent { queue, place: 1, at: FIRST, cdb: &COMPARE_AND_WRITE, data_out: 1024, data_in: 0 });
    send(machine, &Sent { queue, place: 2, at: FIRST, cdb: &READ, data_out: 0, data_in: 4096 });
    await_kept(export, 4);
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
    // The others were tried again then, but for the read.
    await_kept(export, 2);
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
        assert_eq!((ask(&mut machine, QUERY_TASK), export.stats().waiting), (10, 4));
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
    await_kept(&export, 4);
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
fn what_fails_because_another_host_has_taken_the_disk_waits_whatever_is_done_about_errors() {
    let (io, gate) = (IoThread::start(), Gate::new());
    gate.open();
    gate.set_full(true);
    let (ours, export) = listening_with(OnError::Report, &[&io], 1, gate.disk());
    let mut machine = Machine::boot(ours, Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    assert_eq!(run_with(&mut machine, &WRITE, &[0; 512]), CHECK_CONDITION);
    gate.lose();
    send_with(&mut machine, 0, &WRITE, &[0; 512]);
    await_that("the write to wait", || export.stats().waiting == 1);
    gate.set_full(false);
    export.errors().resume();
    machine.reap(REQUESTS);
    assert_eq!(status(&machine, 0), 0);
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
    assert!(export.remove_lun(FIRST).unwrap().wait().is_none());
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
    // The others go on, and the same error stops the first of them, and the one that was to wait for it.
    await_kept(&export, 2);
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
fn functions_about_what_a_record_keeps_hold_up_no_session_and_are_done_by_who_has_the_record_next() {
    const FUNCTIONS: u64 = 8;
    let io = two_threads();
    for (function, done, kept) in [(QUERY_TASK, 10, 2), (ABORT_TASK, 0, 1)] {
        let (sick, _file) = memory_disk(false);
        let (ours, export) = listening_on(&[&io[0], &io[1]], 3, sick);
        let mut machine = Machine::new(ours, Layout::Split);
        let record = Region::anonymous(0, InflightConfig { queues: 5, queue_size: 16, packed: false }.bytes()).unwrap();
        machine.peer.say(SET_INFLIGHT_FD, 0, &longs(&[record.size, 0, 16 << 16 | 5]), &[record.file.as_fd()]);
        machine.start_rings();
        assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
        // The queue on the second thread has what the functions are about, and the one after it, on the first, something else.
        let last = ELSEWHERE + 1;
        for (already, (queue, tag)) in (1..).zip([(ELSEWHERE, 9), (last, 8u64)]) {
            let sent = Sent { queue, place: 0, at: FIRST, cdb: &WRITE, data_out: 512, data_in: 0 };
            let (readable, writable) = written(&machine, &sent);
            assert!(machine.memory.write(readable[0].addr + 8, &tag.to_le_bytes()));
            machine.offer(queue, &readable, &writable);
            await_kept(&export, already);
        }
        let begun = Instant::now();
        let await_in_flight = |queue: u32, many| {
            while export.queues()[queue as usize].in_flight.get() != many {
                assert!(begun.elapsed() < Duration::from_secs(30), "{many} are in flight on queue {queue}");
                std::thread::yield_now();
            }
        };
        let more = Region::anonymous(0x100_0000, 4096).unwrap();
        let region = longs(&[0, more.guest_addr, more.size, more.guest_addr, 0]);
        machine.peer.say(ADD_MEM_REG, NEED_REPLY, &region, &[more.file.as_fd()]);
        assert_eq!(machine.peer.hear(), Some(longs(&[0])));
        // The second thread does nothing until the session has told all queues to stop.
        let (go_on, may_go_on) = channel::<()>();
        io[1].0.send(move |_| assert!(may_go_on.recv().is_err()));
        let mut request = [0; 24];
        (request[4], request[8], request[10], request[16]) = (function, 1, 0x40, 9);
        assert!(machine.memory.write(DATA + 0x4000, &request));
        let ring = &mut machine.rings[CONTROL as usize];
        for at in 0..FUNCTIONS {
            let answer = Piece { addr: DATA + 0x4100 + at, len: 1 };
            ring.driver.add(&[Piece { addr: DATA + 0x4000, len: 24 }], &[answer], at).unwrap();
        }
        ring.driver.publish();
        ring.kick();
        await_in_flight(CONTROL, FUNCTIONS);
        machine.peer.say(REM_MEM_REG, NEED_REPLY, &region, &[]);
        await_in_flight(last, 0);
        drop(go_on);
        machine.peer.0.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        assert_eq!(machine.peer.hear(), Some(longs(&[0])), "the session waits for functions that nobody looks at");
        for _ in 0..FUNCTIONS {
            machine.reap(CONTROL);
        }
        assert_eq!(machine.read::<{ FUNCTIONS as usize }>(DATA + 0x4100), [done; FUNCTIONS as usize]);
        if function == ABORT_TASK {
            assert!(machine.rings[ELSEWHERE as usize].driver.has_used(), "its command comes first");
            machine.reap(ELSEWHERE);
            assert_eq!(response(&machine, ELSEWHERE, 0), 2);
        }
        await_kept(&export, kept);
    }
}

/// Its loop is told of the function and to stop before it has looked at its ring, in which the command was before both.
#[test]
fn a_function_about_a_command_in_the_ring_of_a_queue_that_stops_comes_after_it_when_the_queue_has_started_again() {
    let io = two_threads();
    for layout in [Layout::Split, Layout::Packed] {
        let gate = Gate::new();
        let (ours, export) = listening_on(&[&io[0], &io[1]], 2, gate.disk());
        let mut machine = Machine::new(ours, layout);
        let config = InflightConfig { queues: 4, queue_size: 16, packed: layout == Layout::Packed };
        let record = Region::anonymous(0, config.bytes()).unwrap();
        machine.peer.say(SET_INFLIGHT_FD, 0, &longs(&[record.size, 0, 16 << 16 | 4]), &[record.file.as_fd()]);
        machine.start_rings();
        assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
        let more = Region::anonymous(0x100_0000, 4096).unwrap();
        let region = longs(&[0, more.guest_addr, more.size, more.guest_addr, 0]);
        machine.peer.say(ADD_MEM_REG, NEED_REPLY, &region, &[more.file.as_fd()]);
        assert_eq!(machine.peer.hear(), Some(longs(&[0])));
        let ((go_on, may_go_on), (begun, has_begun)) = (channel::<()>(), channel::<()>());
        io[1].0.send(move |_| {
            drop(begun);
            assert!(may_go_on.recv().is_err());
        });
        assert!(has_begun.recv().is_err());
        let sent = Sent { queue: ELSEWHERE, place: 0, at: FIRST, cdb: &READ, data_out: 0, data_in: 4096 };
        let (readable, writable) = written(&machine, &sent);
        let driver = &mut machine.rings[ELSEWHERE as usize].driver;
        driver.add(&readable, &writable, 0).unwrap();
        // It would look for a kick, which another loop may see later than what it is told.
        driver.publish();
        machine.manage(ABORT_TASK);
        await_that("the function to be taken in", || export.queues()[CONTROL as usize].in_flight.get() == 1);
        machine.peer.say(REM_MEM_REG, NEED_REPLY, &region, &[]);
        await_that("all queues to be stopping", || !export.has_running_queues());
        drop(go_on);
        assert_eq!(machine.peer.hear(), Some(longs(&[0])), "{layout:?}");
        gate.await_kept(1);
        assert!(!machine.rings[CONTROL as usize].driver.has_used(), "{layout:?}: the command is under way");
        await_waiting(&mut machine, &export);
        gate.open();
        assert_eq!(machine.managed(), 0);
        assert!(machine.rings[ELSEWHERE as usize].driver.has_used(), "{layout:?}: its command comes first");
        machine.reap(ELSEWHERE);
        assert_eq!(response(&machine, ELSEWHERE, 0), 2, "{layout:?}");
    }
}

/// So many writes fail, or all.
pub fn failing_writes(errno: Errno, times: Option<usize>) -> DebugRules {
    let error = InjectError {
        event: DebugEvent::WriteAio,
        state: None,
        iotype: Some(IoType::Write),
        errno,
        sector: None,
        once: times.is_some(),
    };
    DebugRules { inject_error: vec![error; times.unwrap_or(1)], set_state: Vec::new() }
}

#[test]
fn what_failed_goes_on_in_the_order_in_which_it_did_however_often_it_was_tried_in_vain() {
    let io = two_threads();
    let driver = Driver::Null { size: 64 * MIB, latency: Nanos::ZERO, read_zeroes: true };
    // There is no space for the three commands, nor when the first of them is tried again.
    let blkdebug = failing_writes(Errno::NOSPC, Some(4));
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
    let begun = Instant::now();
    let ring = &mut machine.rings[REQUESTS as usize];
    ring.driver.publish();
    ring.kick();
    assert_eq!([(); 3].map(|()| machine.reap(REQUESTS).token), [0, 1, 2]);
    assert!(begun.elapsed() >= Duration::from_secs(2), "it looks for space once a second");
    assert_eq!([0, 1, 2].map(|place| response(&machine, REQUESTS, place)), [0; 3]);
    assert_eq!((export.errors().stops(), export.stats().waiting), (1, 0));
}

/// Another command for the same unit, and what it is given; its data is in memory, and it is on the only request queue.
pub fn send_with(machine: &mut Machine, place: u64, cdb: &[u8], data: &[u8]) {
    let sent = Sent { queue: REQUESTS, place, at: FIRST, cdb, data_out: data.len() as u32, data_in: 0 };
    let (readable, writable) = written(machine, &sent);
    assert!(machine.memory.write(readable[1].addr, data));
    machine.offer(REQUESTS, &readable, &writable);
}

/// The status of a command that has been answered.
pub fn status(machine: &Machine, place: u64) -> u8 {
    machine.read::<12>(DATA + 0x1_0000 * u64::from(REQUESTS) + 0x1000 * place + 0x80)[10]
}

/// As [`send_with`], to its end.
pub fn run_with(machine: &mut Machine, cdb: &[u8], data: &[u8]) -> u8 {
    send_with(machine, 15, cdb, data);
    machine.reap(REQUESTS);
    status(machine, 15)
}

const CHECK_CONDITION: u8 = 2;
pub const RESERVATION_CONFLICT: u8 = 0x18;

/// PERSISTENT RESERVE OUT for registrants only, and its list.
pub fn reserve_out(action: u8, key: u8, new: u8) -> ([u8; 10], [u8; 24]) {
    let mut list = [0; 24];
    (list[7], list[15]) = (key, new);
    ([0x5f, action, 5, 0, 0, 0, 0, 0, 24, 0], list)
}

/// Two exports of one unit, whose disk is in memory, and to which the first few writes fail, or all.
pub struct Shared {
    pub machines: [Machine; 2],
    pub exports: [Export; 2],
    pub disk: Arc<Disk>,
    file: File,
    pub io: [IoThread; 2],
}

impl Shared {
    fn new(errno: Errno, failing: Option<usize>) -> Self {
        let (_, file) = memory_disk(true);
        let blkdebug = failing_writes(errno, failing);
        let driver = Driver::File { filename: format!("/proc/self/fd/{}", file.as_raw_fd()).into() };
        let disk = Arc::new(Disk::open(&Options { blkdebug, ..Options::new("sick", driver) }).unwrap());
        Self::of(disk, file, false)
    }

    /// Of that disk; with records of what is in flight or without.
    pub fn of(disk: Arc<Disk>, file: File, recorded: bool) -> Self {
        let (io, unit) = (two_threads(), unit("shared"));
        let begun = [("one", &io[0]), ("other", &io[1])].map(|(id, io)| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let errors = ErrorPolicy { rerror: OnError::Stop, werror: OnError::Stop, timeout: None };
            let address = Address::Fd(theirs.into());
            let config = ExportConfig { errors, id: id.to_owned(), ..export_config(address) };
            let device = ScsiConfig { num_queues: 1, queue_size: 128 };
            let luns = vec![(FIRST, Arc::clone(&unit), Arc::clone(&disk))];
            let export = Export::start_scsi(config, device, luns, vec![io.0.clone()]).unwrap();
            let mut machine = Machine::new(ours, Layout::Split);
            if recorded {
                let config = InflightConfig { queues: 3, queue_size: 16, packed: false };
                let record = Region::anonymous(0, config.bytes()).unwrap();
                let said = longs(&[record.size, 0, 16 << 16 | 3]);
                machine.peer.say(SET_INFLIGHT_FD, 0, &said, &[record.file.as_fd()]);
            }
            machine.start_rings();
            assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
            (machine, export)
        });
        let [(first, one), (second, other)] = begun;
        Self { machines: [first, second], exports: [one, other], disk, file, io }
    }
}

#[test]
fn what_one_export_keeps_holds_up_nothing_of_another_of_the_same_unit_and_is_not_done_if_it_was_preempted() {
    let compare = [0; 1024];
    for (cdb, data) in [(&WRITE[..], &compare[..512]), (&COMPARE_AND_WRITE, &compare)] {
        for preempts in [false, true] {
            let mut shared = Shared::new(Errno::IO, Some(1));
            let ([first, second], [one, other]) = (&mut shared.machines, &shared.exports);
            for (machine, key) in [(&mut *first, 1), (&mut *second, 2)] {
                let (register, list) = reserve_out(0, 0, key);
                assert_eq!(run_with(machine, &register, &list), 0);
            }
            let (reserve, list) = reserve_out(1, 2, 0);
            assert_eq!(run_with(second, &reserve, &list), 0);
            send_with(first, 0, cdb, data);
            await_kept(one, 1);
            send_with(first, 1, &WRITE, &data[..512]);
            await_kept(one, 2);
            // Of other blocks, and of the same.
            let mut beside = COMPARE_AND_WRITE;
            beside[8] = 0x10;
            for cdb in [beside, COMPARE_AND_WRITE] {
                assert_eq!(run_with(second, &cdb, &compare), 0);
            }
            if preempts {
                let (preempt_and_abort, list) = reserve_out(5, 2, 1);
                assert_eq!(run_with(second, &preempt_and_abort, &list), 0);
            }
            let new = crate::machine::disk(Nanos::ZERO);
            reopen(&[one, other], &[DiskSwap { old: Arc::clone(&shared.disk), new }]).unwrap();
            one.errors().resume();
            let expected = if preempts { RESERVATION_CONFLICT } else { 0 };
            for _ in 0..2 {
                first.reap(REQUESTS);
            }
            assert_eq!([0, 1].map(|place| status(first, place)), [expected; 2], "{cdb:02x?}");
            assert_eq!((one.errors().status(), one.stats().waiting, one.stats().in_flight), (IoStatus::Ok, 0, 0));
        }
    }
}

#[test]
fn commands_that_were_to_wait_for_memory_of_what_is_kept_are_kept_too_and_all_are_done() {
    const MANY: u64 = 5;
    let mut shared = Shared::new(Errno::IO, Some(1));
    let ([first, second], [one, _]) = (&mut shared.machines, &shared.exports);
    // Of 64 KiB each, which is a quarter of what a queue has for all of them.
    let write_same = |place: u64| [0x41, 0, 0, 0, 1 + place as u8, 0, 0, 0, 128, 0];
    for place in 0..MANY {
        send_with(first, place, &write_same(place), &[1 + place as u8; 512]);
        await_kept(one, place + 1);
    }
    assert_eq!(run_with(second, &COMPARE_AND_WRITE, &[0; 1024]), 0);
    one.errors().resume();
    for _ in 0..MANY {
        first.reap(REQUESTS);
    }
    for place in 0..MANY {
        let mut there = vec![0; 64 << 10];
        shared.file.read_exact_at(&mut there, (1 + place) << 17).unwrap();
        let is_done = there.iter().all(|byte| u64::from(*byte) == 1 + place);
        assert!(is_done && status(first, place) == 0, "{place}");
    }
    assert_eq!(one.stats().total().bytes, MANY << 16);
}

#[test]
fn a_compare_and_write_that_is_tried_again_compares_again_and_its_export_goes_on_however_it_ends() {
    for is_changed in [false, true] {
        let mut shared = Shared::new(Errno::NOSPC, if is_changed { None } else { Some(2) });
        let ([first, _], [one, _]) = (&mut shared.machines, &shared.exports);
        send_with(first, 0, &COMPARE_AND_WRITE, &[[0; 512], [5; 512]].concat());
        let begun = Instant::now();
        // It waits for a second, and that it has stopped is known for good.
        while one.errors().stops() == 0 {
            assert!(begun.elapsed() < Duration::from_secs(30));
            std::thread::yield_now();
        }
        if is_changed {
            // There is no space for its write however often it is tried, and it need not come to that.
            shared.file.write_all_at(&[7; 512], 0).unwrap();
        }
        first.reap(REQUESTS);
        assert_eq!(status(first, 0), if is_changed { CHECK_CONDITION } else { 0 });
        while one.errors().status() != IoStatus::Ok || one.stats().waiting != 0 {
            assert!(begun.elapsed() < Duration::from_secs(30));
            std::thread::yield_now();
        }
        assert_eq!(one.errors().stops(), 1, "of a try that fails nothing is told");
    }
}

#[test]
fn an_export_goes_on_when_a_write_has_found_space_that_is_stable_now_because_the_write_cache_was_turned_off() {
    let full = |sector, once| {
        let (event, iotype, sector) = (DebugEvent::None, Some(IoType::Write), Some(sector));
        InjectError { event, state: None, iotype, errno: Errno::NOSPC, sector, once }
    };
    // There is space for the first write when it is tried again, and none for the other however often it is tried.
    let blkdebug = DebugRules { inject_error: vec![full(0, true), full(8, false)], set_state: Vec::new() };
    let (_, file) = memory_disk(true);
    let driver = Driver::File { filename: format!("/proc/self/fd/{}", file.as_raw_fd()).into() };
    let disk = Arc::new(Disk::open(&Options { blkdebug, ..Options::new("full", driver) }).unwrap());
    let mut shared = Shared::of(disk, file, false);
    let ([first, second], [one, _]) = (&mut shared.machines, &shared.exports);
    for (place, block) in [(0, 0), (1, 8)] {
        let mut cdb = WRITE;
        cdb[5] = block;
        let sent = Sent { queue: REQUESTS, place, at: FIRST, cdb: &cdb, data_out: 512, data_in: 0 };
        let (readable, writable) = written(first, &sent);
        first.rings[REQUESTS as usize].driver.add(&readable, &writable, place).unwrap();
    }
    let ring = &mut first.rings[REQUESTS as usize];
    ring.driver.publish();
    ring.kick();
    let begun = Instant::now();
    let await_it = |is: &dyn Fn() -> bool| {
        while !is() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{} wait", one.stats().waiting);
            std::thread::yield_now();
        }
    };
    // Both wait for a second: where this thread is later than that, the first has found space already, and the other none.
    await_it(&|| one.stats().waiting == 2 || one.errors().stops() == 2);
    // MODE SELECT (6) of the caching page.
    let mut list = [0; 24];
    (list[4], list[5]) = (8, 18);
    assert_eq!(run_with(second, &[0x15, 0x10, 0, 0, 24, 0], &list), 0);
    first.reap(REQUESTS);
    assert_eq!(status(first, 0), 0);
    // It went on, and so has stopped again: of a try that fails nothing is told.
    await_it(&|| one.errors().stops() == 2);
}

#[test]
fn a_queue_that_its_guest_broke_is_not_said_to_have_requests_that_wait_for_a_disk() {
    record_lines();
    let io = IoThread::start();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let config = ExportConfig { id: "broken".to_owned(), ..export_config(Address::Fd(theirs.into())) };
    let luns = vec![(FIRST, unit("first"), disk(Nanos::ZERO))];
    let device = ScsiConfig { num_queues: 1, queue_size: 128 };
    let _export = Export::start_scsi(config, device, luns, vec![io.0.clone()]).unwrap();
    let mut machine = Machine::new(ours, Layout::Split);
    let record = Region::anonymous(0, InflightConfig { queues: 3, queue_size: 16, packed: false }.bytes()).unwrap();
    machine.peer.say(SET_INFLIGHT_FD, 0, &longs(&[record.size, 0, 16 << 16 | 3]), &[record.file.as_fd()]);
    machine.start_rings();
    // Without a whole header.
    machine.offer(CONTROL, &[Piece { addr: DATA, len: 2 }], &[]);
    await_signal(&machine.rings[CONTROL as usize].err);
    machine.peer.ask(GET_VRING_BASE, &words(&[CONTROL, 0])).expect("it has stopped");
    let mut is_in_flight = [0];
    record.file.read_exact_at(&mut is_in_flight, 16).unwrap();
    assert_eq!(is_in_flight, [1], "the record has what broke it");
    let told =
        ["queue 0: the guest broke the queue", "queue 0 stops"].map(|what| lines(&format!("export 'broken': {what}")));
    assert_eq!(told, [1, 0]);
}

#[test]
fn an_export_does_not_stay_stopped_by_a_queue_that_stops_while_it_tries_its_only_failed_request() {
    record_lines();
    // QEMU disables a queue before it stops it.
    for (warned, (recorded, disables)) in [(false, false), (true, false), (true, true)].into_iter().enumerate() {
        // There is no space for what is written.
        let gate = Gate::new();
        gate.set_full(true);
        let mut shared = Shared::of(gate.disk(), memory_disk(true).1, recorded);
        let ([first, second], [one, _]) = (&mut shared.machines, &shared.exports);
        for queue in [CONTROL, EVENTS] {
            assert!(first.peer.ask(GET_VRING_BASE, &words(&[queue, 0])).is_some());
        }
        send_with(first, 0, &WRITE, &[0; 512]);
        let begun = Instant::now();
        let await_waiting = |many| {
            while one.stats().waiting != many {
                assert!(begun.elapsed() < Duration::from_secs(30), "{many} wait: {:?}", one.stats());
                std::thread::yield_now();
            }
        };
        await_waiting(1);
        assert_eq!(one.errors().status(), IoStatus::NoSpace);
        // Another guest's COMPARE AND WRITE is under way when there is a try, which waits for that.
        send_with(second, 0, &COMPARE_AND_WRITE, &[0; 1024]);
        gate.await_kept(1);
        // What was tried before is waiting again.
        shared.io[0].0.call(|_| ()).unwrap();
        await_waiting(0);
        assert_eq!(one.errors().status(), IoStatus::NoSpace);
        gate.set_full(false);
        let (stop, flags) = if disables { (SET_VRING_ENABLE, NEED_REPLY) } else { (GET_VRING_BASE, 0) };
        first.peer.say(stop, flags, &words(&[REQUESTS, 0]), &[]);
        await_that("the last queue to be stopping", || !one.has_running_queues());
        if !recorded {
            gate.open();
        }
        first.peer.hear().expect("the queue stops");
        gate.open();
        // Once more is once too often, and changes nothing.
        first.peer.ask(GET_VRING_BASE, &words(&[REQUESTS, 0])).expect("it has stopped");
        assert_eq!(one.errors().status(), IoStatus::Ok, "recorded: {recorded}");
        // Whoever saves the guest now is warned of what only the record has.
        let warning = "export 'one': queue 2 stops with requests that wait because a disk failed";
        assert_eq!(lines(warning), warned, "disabled: {disables}");
        second.reap(REQUESTS);
        if recorded {
            assert!(!first.rings[REQUESTS as usize].driver.has_used(), "it is left to the record");
            first.rings[REQUESTS as usize].kick();
            assert_eq!(first.start_ring(REQUESTS), Some(0));
        }
        first.reap(REQUESTS);
        assert_eq!([status(first, 0), status(second, 0)], [0; 2]);
    }
}
