//! What a worker does before its turn is over.

mod functions;

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::channel;

use egret_disk::{
    Action, DebugEvent, DebugRules, Driver as DiskDriver, EngineOptions, Failure, FailureLog, InjectError, Options,
};
use egret_event_loop::{EventLoop, EventNotifier, LoopOptions, MonitorChoice};
use egret_polling::{EventKind, Parameters, PolicyKind};
use egret_virtio::blk::{Blk, BlkConfig};
use egret_virtio::{Device, RequestType};
use egret_vring::memory::{MemoryRules, Region};
use egret_vring::ring::{Driver, DriverConfig, Inflight, InflightConfig, Piece};

use super::*;
use crate::errors::{ErrorPolicy, IoStatus, OnError};

const HEADER: u64 = 0x1_0000;
const ANSWERS: u64 = 0x2_0000;
/// A read.
const IN: u32 = 0;
/// GET_ID, which needs no disk.
const GET_ID: u32 = 8;
const SIZE: u64 = 1 << 20;

/// A queue with a driver, in memory of their own.
pub(crate) struct Guest {
    memory: Arc<GuestMemory>,
    /// What is behind that.
    file: File,
    driver: Driver,
    pub(crate) worker: QueueWorker,
}

impl Guest {
    pub(crate) fn new(packed: bool, disks: Vec<Option<Arc<Disk>>>) -> Self {
        Self::of(ErrorHandling::new("e", Default::default()), packed, disks)
    }

    /// One of the guest's queues whose export does this about errors.
    fn of(errors: Arc<ErrorHandling>, packed: bool, disks: Vec<Option<Arc<Disk>>>) -> Self {
        Self::shaped(shape(packed), errors, disks)
    }

    /// One with a ring of this kind.
    fn shaped(config: DriverConfig, errors: Arc<ErrorHandling>, disks: Vec<Option<Arc<Disk>>>) -> Self {
        let size = config.size;
        let blk = BlkConfig { capacity_bytes: SIZE, queue_size: size, serial: "worker".into(), ..BlkConfig::default() };
        Self::with(Blk::new(blk).unwrap().model(0, size), config, errors, disks)
    }

    /// The queue of another device.
    fn with(model: Model, config: DriverConfig, errors: Arc<ErrorHandling>, disks: Vec<Option<Arc<Disk>>>) -> Self {
        let region = Region::anonymous(0, 0x10_0000).unwrap();
        let file = region.file.try_clone().unwrap();
        let memory = Arc::new(GuestMemory::empty().with(region).unwrap());
        let driver = Driver::new(&memory, 0, config).unwrap();
        let queue = driver.queue().start(&memory).unwrap();
        let log = Arc::new(PeerLog::new("e"));
        let info = QueueInfo { log, index: 0, kickless: Kickless::default(), unpinned: channel().0 };
        let disks = Disks::new(disks);
        let worker = QueueWorker::new(info, queue, model, disks, VringFds::default(), errors, Arc::default());
        Self { memory, file, driver, worker }
    }

    /// Makes so many requests available, all at once, whose answers have `len` bytes with their status.
    fn ask(&mut self, what: u32, many: u64, len: u32) {
        assert!(self.memory.write(HEADER, &[&what.to_le_bytes()[..], &[0; 12]].concat()));
        for slot in 0..many {
            let answer = Piece { addr: ANSWERS + 1024 * slot, len };
            self.driver.add(&[Piece { addr: HEADER, len: 16 }], &[answer], slot).unwrap();
        }
        self.driver.publish();
    }
}

/// What rings are here, mostly.
fn shape(packed: bool) -> DriverConfig {
    DriverConfig { size: 64, packed, event_idx: true, indirect: None, base: if packed { 0x8000 } else { 0 } }
}

/// One whose requests end in the turn in which they begin.
fn null_disk() -> Arc<Disk> {
    let null = DiskDriver::Null { size: SIZE, latency: Nanos::ZERO, read_zeroes: false };
    Arc::new(Disk::open(&Options::new("null", null)).unwrap())
}

fn event_loop(clock_reads: ClockReads) -> EventLoop<Worker> {
    let options = LoopOptions {
        name: "io".into(),
        monitor: MonitorChoice::Ppoll,
        policy: egret_polling::build(PolicyKind::Off, &Parameters::default()).unwrap(),
        window_max: Nanos::ZERO,
        idle_after: Nanos::MAX,
        clock_reads,
    };
    let engines = |ring| EngineSet::new(EngineOptions { ring, ..EngineOptions::default() });
    EventLoop::new(options, engines).unwrap()
}

#[test]
fn a_driver_has_the_first_of_many_chains_before_the_others_have_ended() {
    for (packed, left) in [(false, 4), (false, 0), (true, 4), (true, 0)] {
        let mut guest = Guest::new(packed, Vec::new());
        let mut engines = EngineSet::new(EngineOptions::default());
        guest.ask(GET_ID, u64::from(PUBLISH_AFTER) + left, 21);
        let Guest { mut driver, mut worker, .. } = guest;
        worker.take_in(&mut engines, || Nanos::ZERO);
        let reap = |driver: &mut Driver| std::iter::from_fn(|| driver.reap().unwrap()).count() as u64;
        assert_eq!(reap(&mut driver), u64::from(PUBLISH_AFTER), "packed: {packed}, left: {left}");
        // It wants to be called for the rest, too: that is one call.
        driver.arm_calls();
        worker.notify(&mut Signals::new().unwrap());
        assert_eq!(reap(&mut driver), left, "packed: {packed}, left: {left}");
        // What was published on the way is signalled then, whether something is left or not.
        assert_eq!(worker.counters.calls.get(), 1, "packed: {packed}, left: {left}");
        assert_eq!(worker.counters.calls_spared.get(), 0, "packed: {packed}, left: {left}");
        // Where nothing was used there is nobody to call, and nothing was spared.
        worker.notify(&mut Signals::new().unwrap());
        assert_eq!((worker.counters.calls.get(), worker.counters.calls_spared.get()), (1, 0));
    }
}

/// How many chains a turn takes in that need no disk, and so have ended when it has.
fn ended_in_a_turn(guest: &mut Guest, engines: &mut EngineSet, signals: &mut Signals) -> usize {
    guest.worker.take_in(engines, || Nanos::ZERO);
    guest.worker.notify(signals);
    std::iter::from_fn(|| guest.driver.reap().unwrap()).count()
}

#[test]
fn a_turn_takes_in_so_many_iovecs_however_few_bytes_they_have() {
    const OF_EACH: u32 = 128;
    for packed in [false, true] {
        let errors = ErrorHandling::new("e", ErrorPolicy::default());
        let mut guest = Guest::shaped(DriverConfig { size: 2048, ..shape(packed) }, errors, Vec::new());
        assert!(guest.memory.write(HEADER, &[0; 16]));
        // None of them goes on where another ends.
        let data = (0..u64::from(OF_EACH) - 2).map(|at| Piece { addr: ANSWERS + 1024 * at, len: 512 });
        let answer: Vec<Piece> = data.chain([Piece { addr: ANSWERS + 0x4_0000, len: 1 }]).collect();
        for token in 0..16 {
            guest.driver.add(&[Piece { addr: HEADER, len: 16 }], &answer, token).unwrap();
        }
        guest.driver.publish();
        let (mut engines, mut signals) = (EngineSet::new(EngineOptions::default()), Signals::new().unwrap());
        for turn in 0..2 {
            let taken = ended_in_a_turn(&mut guest, &mut engines, &mut signals) as u32;
            assert_eq!(taken, TURN_STEPS / OF_EACH, "packed: {packed}, turn {turn}");
            assert_eq!(guest.worker.has_caught_up(), turn == 1, "packed: {packed}, turn {turn}");
            assert_eq!(guest.worker.iovecs, 0, "none of them is in flight");
        }
    }
}

#[test]
fn a_turn_takes_in_no_chain_behind_a_mebibyte_however_few_chains_that_is() {
    for packed in [false, true] {
        let mut guest = Guest::new(packed, Vec::new());
        assert!(guest.memory.write(HEADER, &[0; 16]));
        // Exactly so much, with its header.
        let half = TURN_BYTES as u32 / 2;
        let answer = [half, half - 16].map(|len| Piece { addr: ANSWERS, len });
        for token in 0..2 {
            guest.driver.add(&[Piece { addr: HEADER, len: 16 }], &answer, token).unwrap();
        }
        guest.driver.publish();
        let (mut engines, mut signals) = (EngineSet::new(EngineOptions::default()), Signals::new().unwrap());
        for turn in 0..2 {
            let taken = ended_in_a_turn(&mut guest, &mut engines, &mut signals);
            assert_eq!(taken, 1, "packed: {packed}, turn {turn}");
        }
    }
}

#[test]
fn a_queue_that_was_full_takes_more_in_when_something_has_ended_though_nobody_kicks_it_then() {
    let null = DiskDriver::Null { size: SIZE, latency: Nanos::from_millis(1), read_zeroes: false };
    let slow = Arc::new(Disk::open(&Options::new("slow", null)).unwrap());
    let errors = ErrorHandling::new("e", ErrorPolicy::default());
    let (mut io, mut queues) = reading_with(&errors, true, [slow]);
    let (mut driver, id) = queues.pop().unwrap();
    while queue(&mut io, id).queue.in_flight() == 0 {
        io.turn().unwrap();
    }
    // As many iovecs as there may be, of which its one chain has some.
    queue(&mut io, id).iovecs = MOST_IOVECS;
    driver.add(&[Piece { addr: HEADER, len: 16 }], &[Piece { addr: ANSWERS + 1024, len: 513 }], 1).unwrap();
    driver.publish();
    // It is left to its descriptor, and that is not looked at for as long as it is full.
    io.set_idle_after(Nanos::ZERO);
    io.wake(id);
    io.turn().unwrap();
    for _ in 0..2 {
        while driver.reap().unwrap().is_none() {
            io.turn().unwrap();
        }
    }
}

#[test]
fn a_driver_kicks_a_queue_that_waits_for_it_and_none_that_looks_by_itself() {
    for packed in [false, true] {
        let errors = ErrorHandling::new("e", ErrorPolicy::default());
        let mut guest = Guest::shaped(DriverConfig { event_idx: false, ..shape(packed) }, errors, Vec::new());
        for waits in [false, true, false] {
            if waits {
                assert!(guest.worker.arm());
            } else {
                guest.worker.suppress();
            }
            let answer = Piece { addr: ANSWERS, len: 21 };
            guest.driver.add(&[Piece { addr: HEADER, len: 16 }], &[answer], 0).unwrap();
            assert_eq!(guest.driver.publish(), waits, "packed: {packed}");
            guest.worker.take_in(&mut EngineSet::new(EngineOptions::default()), || Nanos::ZERO);
        }
    }
}

#[test]
fn a_driver_need_not_kick_a_queue_that_came_to_its_loop_with_requests_once_those_are_taken_in() {
    for packed in [false, true] {
        let errors = ErrorHandling::new("e", ErrorPolicy::default());
        let mut guest = Guest::shaped(DriverConfig { event_idx: false, ..shape(packed) }, errors, Vec::new());
        guest.ask(GET_ID, 1, 21);
        let Guest { mut driver, worker, .. } = guest;
        let mut io = event_loop(ClockReads::ByPhase);
        io.attach(worker.into()).map_err(|(_, e)| e).unwrap();
        io.turn().unwrap();
        assert!(driver.reap().unwrap().is_some(), "packed: {packed}");
        let answer = Piece { addr: ANSWERS, len: 21 };
        driver.add(&[Piece { addr: HEADER, len: 16 }], &[answer], 0).unwrap();
        assert!(!driver.publish(), "packed: {packed}");
    }
}

#[test]
fn a_wait_that_a_kick_for_nothing_has_ended_was_ended_by_no_queue_as_far_as_policies_are_told() {
    let mut guest = Guest::new(false, Vec::new());
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
    let kick = rustix::event::eventfd(0, flags).unwrap();
    guest.worker.fds().kick = Some(PeerFd::new(kick.try_clone().unwrap()));
    let mut io = event_loop(ClockReads::ByPhase);
    let id = io.attach(guest.worker.into()).map_err(|(_, e)| e).unwrap();
    io.wake(id);
    io.turn().unwrap();
    io.record_waits(10);
    rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
    io.turn().unwrap();
    let waits = io.take_recording(String::new()).unwrap().waits;
    let kinds: Vec<_> = waits.iter().map(|wait| wait.ended_by).collect();
    assert_eq!(kinds, [EventKind::Other]);
}

#[test]
fn a_queue_whose_memory_is_taken_away_is_broken_once() {
    for packed in [false, true] {
        let mut guest = Guest::new(packed, Vec::new());
        let mut engines = EngineSet::new(EngineOptions::default());
        guest.ask(GET_ID, 1, 21);
        guest.file.set_len(0).unwrap();
        // Whoever looks for what is available finds out.
        assert!(!guest.worker.poll());
        for _ in 0..2 {
            guest.worker.take_in(&mut engines, || Nanos::ZERO);
            assert_eq!(guest.worker.counters.broken.get(), 1, "packed: {packed}");
        }
        assert!(guest.worker.phase == Phase::Broken && guest.worker.is_drained());
    }
}

#[test]
fn a_turn_takes_no_chain_in_behind_one_whose_memory_is_gone() {
    for packed in [false, true] {
        let mut guest = Guest::new(packed, Vec::new());
        let mut engines = EngineSet::new(EngineOptions::default());
        guest.ask(GET_ID, 3, 21);
        guest.file.set_len(ANSWERS).unwrap();
        guest.worker.take_in(&mut engines, || Nanos::ZERO);
        guest.worker.notify(&mut Signals::new().unwrap());
        let answered = std::iter::from_fn(|| guest.driver.reap().unwrap()).count();
        assert_eq!(answered, 1, "packed: {packed}");
        guest.worker.take_in(&mut engines, || Nanos::ZERO);
        assert!(guest.worker.phase == Phase::Broken && guest.worker.is_drained());
    }
}

/// What GET_ID asks for is answered when it is popped, so that by phase it takes no time. Reads of a null disk end in the turn
/// in which they begin.
#[test]
fn requests_of_a_turn_begin_and_end_at_one_time_or_each_at_its_own_as_its_loop_reads_the_clock() {
    const MANY: u64 = 32;
    for reads in [ClockReads::ByPhase, ClockReads::ByRequest] {
        let asked = clock::now();
        let mut io = event_loop(reads);
        let mut guest = Guest::new(false, vec![Some(null_disk())]);
        guest.ask(IN, MANY, 513);
        let (counters, begun) = (Arc::clone(&guest.worker.counters), guest.worker.begun.clone());
        assert!(begun.iter().all(|begun| begun.at == Nanos::ZERO));
        let id = io.attach(guest.worker.into()).map_err(|(_, e)| e).unwrap();
        io.turn().unwrap();
        let worker = io.source(id).unwrap().queue().unwrap();
        let mut begun: Vec<_> = worker.begun.iter().map(|begun| begun.at).filter(|at| *at > Nanos::ZERO).collect();
        assert_eq!(begun.len() as u64, MANY);
        begun.dedup();
        assert_eq!(begun.len() == 1, reads == ClockReads::ByPhase, "{reads:?}: {begun:?}");
        let stats = counters.read();
        let latencies = stats.latency_of(RequestType::Read).unwrap();
        let are_alike = latencies.sum().0 == MANY * latencies.longest().0;
        assert_eq!((latencies.count(), are_alike), (MANY, reads == ClockReads::ByPhase), "{reads:?}: {latencies:?}");
        assert!(latencies.longest() <= clock::now() - asked);

        let mut guest = Guest::new(false, Vec::new());
        guest.ask(GET_ID, MANY, 21);
        let counters = Arc::clone(&guest.worker.counters);
        io.attach(guest.worker.into()).map_err(|(_, e)| e).unwrap();
        io.turn().unwrap();
        let stats = counters.read();
        let latencies = stats.latency_of(RequestType::Other).unwrap();
        let took_none = latencies.sum() == Nanos::ZERO;
        assert_eq!((latencies.count(), took_none), (MANY, reads == ClockReads::ByPhase), "{reads:?}: {latencies:?}");
    }
}

/// A front-end that does not move the record along has nothing but the base to go on with.
#[test]
fn a_queue_that_stops_for_good_begins_all_of_its_record_before_and_nothing_else() {
    const MANY: u64 = 8;
    // Two of them are what a turn takes in.
    const LEN: u32 = TURN_BYTES as u32 / 2;
    for packed in [false, true] {
        let config = InflightConfig { queues: 1, queue_size: 64, packed };
        let record = Region::anonymous(0, config.bytes()).unwrap().file;
        let mut guest = Guest::new(packed, vec![Some(null_disk())]);
        guest.ask(IN, MANY, LEN + 1);
        let start = |guest: &Guest| {
            let record = Inflight::map(&record, 0, config.bytes(), config).unwrap().queue(0);
            guest.driver.queue().start_recorded(&guest.memory, record).unwrap()
        };
        // A daemon that is killed when it has used one of the last.
        let mut killed = start(&guest);
        let mut chain = Chain::default();
        let heads: Vec<u16> = std::iter::from_fn(|| killed.pop(&mut chain).unwrap().then(|| chain.head())).collect();
        killed.add_used(heads[5], 0);
        killed.publish_used();
        drop(killed);
        guest.worker.queue = start(&guest);
        let late = Piece { addr: ANSWERS, len: LEN + 1 };
        guest.driver.add(&[Piece { addr: HEADER, len: 16 }], &[late], MANY).unwrap();
        guest.driver.publish();

        let Guest { mut driver, worker, .. } = guest;
        let mut io = event_loop(ClockReads::ByPhase);
        let id = io.attach(worker.into()).map_err(|(_, e)| e).unwrap();
        io.turn().unwrap();
        let worker = io.source(id).unwrap().queue().unwrap();
        assert!(worker.queue.has_recovered(), "packed: {packed}");
        // One that goes on elsewhere, or leaves the rest to who has the record next, does not.
        worker.phase = Phase::Stopping;
        for (leaving, recovers) in [(None, false), (Some(Leave::NotBegun), false), (Some(Leave::Nothing), true)] {
            worker.stopped.leaving = leaving;
            assert_eq!(worker.recovers(), recovers, "packed: {packed}, {leaving:?}");
        }
        (worker.phase, worker.stopped.leaving) = (Phase::Running, None);
        worker.leave(Leave::Nothing);
        io.wake(id);
        let (to, stopped) = channel();
        io.detach(id, move |worker| to.send(worker).unwrap());
        let stopped = loop {
            match stopped.try_recv() {
                Ok(worker) => break worker.into_queue().unwrap(),
                Err(_) => io.turn().unwrap(),
            }
        };
        // Chains have two descriptors.
        let base = if packed { 0x1_0001 * (0x8000 + 2 * MANY as u32) } else { MANY as u32 };
        let rest = stopped.into_rest();
        assert_eq!((rest.base, rest.has_left), (base, false), "packed: {packed}");
        let mut used: Vec<_> = std::iter::from_fn(|| driver.reap().unwrap()).map(|used| used.token).collect();
        used.sort_unstable();
        assert!(
            used.into_iter().eq(0..MANY),
            "packed: {packed}: each once, and not the one that came after the record"
        );
    }
}

/// A disk that fails once, and takes so long when it does not.
fn sick_disk(errno: Errno, latency: Nanos) -> Arc<Disk> {
    let once = InjectError { event: DebugEvent::ReadAio, state: None, iotype: None, errno, sector: None, once: true };
    let blkdebug = DebugRules { inject_error: vec![once], set_state: Vec::new() };
    let driver = DiskDriver::Null { size: SIZE, latency, read_zeroes: false };
    Arc::new(Disk::open(&Options { blkdebug, ..Options::new("sick", driver) }).unwrap())
}

fn stopping(timeout: Option<Nanos>) -> Arc<ErrorHandling> {
    ErrorHandling::new("e", ErrorPolicy { rerror: OnError::Stop, werror: OnError::Stop, timeout })
}

/// An export of queues, each with a read of its disk, on one loop. Its queues are given back with what finds them there.
fn reading(
    errors: &Arc<ErrorHandling>,
    disks: impl IntoIterator<Item = Arc<Disk>>,
) -> (EventLoop<Worker>, Vec<(Driver, SourceId)>) {
    reading_with(errors, false, disks)
}

/// Likewise, with descriptors by which they are kicked.
fn reading_with(
    errors: &Arc<ErrorHandling>,
    are_kicked: bool,
    disks: impl IntoIterator<Item = Arc<Disk>>,
) -> (EventLoop<Worker>, Vec<(Driver, SourceId)>) {
    let mut io = event_loop(ClockReads::ByPhase);
    let queues = disks.into_iter().map(|disk| {
        let mut guest = Guest::of(Arc::clone(errors), false, vec![Some(disk)]);
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        guest.worker.fds().kick = are_kicked.then(|| PeerFd::new(rustix::event::eventfd(0, flags).unwrap()));
        guest.ask(IN, 1, 513);
        let Guest { driver, worker, .. } = guest;
        (driver, io.attach(worker.into()).map_err(|(_, e)| e).unwrap())
    });
    let queues = queues.collect();
    (io, queues)
}

fn queue(io: &mut EventLoop<Worker>, id: SourceId) -> &mut QueueWorker {
    io.source(id).unwrap().queue().unwrap()
}

#[test]
fn an_export_goes_on_without_being_told_to_when_no_queue_has_what_failed_any_more_and_not_before() {
    for leaves in [false, true] {
        let errors = stopping(None);
        let sick = || sick_disk(Errno::IO, Nanos::ZERO);
        let (mut io, mut queues) = reading(&errors, [sick(), sick()]);
        while queues.iter().any(|(_, id)| queue(&mut io, *id).counters.waiting.get() == 0) {
            io.turn().unwrap();
        }
        assert_eq!((errors.status(), errors.stops()), (IoStatus::Failed, 1));
        let (other, last) = (queues.pop().unwrap(), queues.pop().unwrap());
        for ((mut driver, id), left) in [(other, IoStatus::Failed), (last, IoStatus::Ok)] {
            if leaves {
                queue(&mut io, id).leave(Leave::Nothing);
                io.detach(id, |_| ());
            } else {
                // As where its unit is taken away.
                let worker = queue(&mut io, id);
                worker.remove_disk(DiskKey(0));
            }
            io.wake(id);
            while driver.reap().unwrap().is_none() {
                io.turn().unwrap();
            }
            assert_eq!((errors.status(), errors.stops()), (left, 1), "leaves: {leaves}");
        }
    }
}

#[test]
fn a_disk_s_log_has_what_was_done_about_a_request_that_failed() {
    for (rerror, action) in
        [(OnError::Stop, Action::Stop), (OnError::Ignore, Action::Ignore), (OnError::Report, Action::Report)]
    {
        let errors = ErrorHandling::new("e", ErrorPolicy { rerror, ..ErrorPolicy::default() });
        let sick = sick_disk(Errno::IO, Nanos::ZERO);
        let log = Arc::new(FailureLog::new(&EventNotifier::new().unwrap()));
        sick.log_failures(Arc::clone(&log));
        let (mut io, mut queues) = reading(&errors, [sick]);
        let (driver, id) = queues.pop().unwrap();
        while !driver.has_used() && queue(&mut io, id).counters.waiting.get() == 0 {
            io.turn().unwrap();
        }
        let failure = Failure { export: "e".into(), op: Op::Read, errno: Errno::IO, action, has_lost_writes: false };
        assert_eq!(log.take(), [failure], "{rerror:?}");
    }
}

#[test]
fn a_queue_that_stops_while_its_export_is_stopped_keeps_what_comes_unless_nobody_could_try_that_again() {
    for (leaving, keeps) in [(None, true), (Some(Leave::Nothing), false)] {
        let (errors, mut hold) = (stopping(None), None);
        assert!(errors.stop(Errno::IO, &mut hold), "as another queue would");
        let mut guest = Guest::of(errors, false, Vec::new());
        guest.worker.stopped.leaving = leaving;
        guest.worker.stop(&mut EngineSet::new(EngineOptions::default()));
        assert_eq!(guest.worker.stopped.is, keeps, "{leaving:?}");
    }
}

#[test]
fn what_fails_for_another_reason_than_want_of_space_is_not_tried_before_its_export_is_resumed() {
    let errors = stopping(None);
    let (mut io, mut queues) = reading(&errors, [sick_disk(Errno::IO, Nanos::ZERO)]);
    let (mut driver, id) = queues.pop().unwrap();
    while queue(&mut io, id).counters.waiting.get() == 0 {
        io.turn().unwrap();
    }
    // Were it to be tried now and then, it would be time.
    queue(&mut io, id).stopped.probe_at = Nanos::ZERO;
    for _ in 0..3 {
        io.wake(id);
        io.turn().unwrap();
    }
    assert_eq!((errors.status(), driver.reap().unwrap()), (IoStatus::Failed, None));
    errors.resume();
    while driver.reap().unwrap().is_none() {
        io.turn().unwrap();
    }
}

#[test]
fn what_is_tried_for_want_of_space_has_no_export_go_on_that_has_stopped_for_more_since() {
    let errors = stopping(None);
    let (mut io, mut queues) = reading(&errors, [sick_disk(Errno::NOSPC, Nanos::from_millis(100))]);
    let (mut driver, id) = queues.pop().unwrap();
    while errors.status() == IoStatus::Ok || queue(&mut io, id).counters.waiting.get() == 1 {
        io.turn().unwrap();
    }
    let mut other = None;
    assert!(errors.stop(Errno::IO, &mut other), "as another queue would");
    while driver.reap().unwrap().is_none() {
        io.turn().unwrap();
    }
    assert_eq!((errors.status(), errors.stops()), (IoStatus::Failed, 2));
}

#[test]
fn when_one_request_has_found_space_all_go_on_that_had_found_none() {
    let errors = stopping(None);
    let once = InjectError {
        event: DebugEvent::ReadAio,
        state: None,
        iotype: None,
        errno: Errno::NOSPC,
        sector: None,
        once: true,
    };
    let blkdebug = DebugRules { inject_error: vec![once; 2], set_state: Vec::new() };
    let null = DiskDriver::Null { size: SIZE, latency: Nanos::ZERO, read_zeroes: false };
    let full = Arc::new(Disk::open(&Options { blkdebug, ..Options::new("full", null) }).unwrap());
    let mut guest = Guest::of(Arc::clone(&errors), false, vec![Some(full)]);
    guest.ask(IN, 2, 513);
    let Guest { mut driver, worker, .. } = guest;
    let mut io = event_loop(ClockReads::ByPhase);
    let id = io.attach(worker.into()).map_err(|(_, e)| e).unwrap();
    while queue(&mut io, id).counters.waiting.get() < 2 {
        io.turn().unwrap();
    }
    while driver.reap().unwrap().is_none() {
        assert_eq!(errors.status(), IoStatus::NoSpace);
        io.turn().unwrap();
    }
    assert_eq!(errors.status(), IoStatus::Ok);
}

#[test]
fn what_is_to_happen_first_wakes_a_queue_whatever_asked_to_be_woken_before() {
    // It tries again in a second, and looks at what is in flight before that, or long after.
    for (timeout, first) in [(40, 10), (400_000, 1_000)] {
        let errors = stopping(Some(Nanos::from_millis(timeout)));
        let sick = sick_disk(Errno::NOSPC, Nanos::from_millis(1_000_000));
        let (mut io, mut queues) = reading_with(&errors, true, [sick]);
        let (_driver, id) = queues.pop().unwrap();
        while queue(&mut io, id).counters.waiting.get() == 0 {
            io.turn().unwrap();
        }
        io.wake(id);
        io.turn().unwrap();
        assert_eq!(errors.status(), IoStatus::NoSpace);
        assert!(queue(&mut io, id).timer <= clock::now() + Nanos::from_millis(first));
    }
}

#[test]
fn a_queue_that_nobody_kicks_is_looked_at_though_something_else_is_to_wake_it_much_later() {
    // It looks at what is in flight in hours.
    let errors = stopping(Some(Nanos::from_millis(1 << 30)));
    let null = DiskDriver::Null { size: SIZE, latency: Nanos::from_millis(1 << 40), read_zeroes: false };
    let slow = Arc::new(Disk::open(&Options::new("slow", null)).unwrap());
    let mut guest = Guest::of(errors, false, vec![Some(slow)]);
    guest.ask(IN, 1, 513);
    let Guest { memory, mut driver, worker, file: _file } = guest;
    let mut io = event_loop(ClockReads::ByPhase);
    let id = io.attach(worker.into()).map_err(|(_, e)| e).unwrap();
    while queue(&mut io, id).counters.in_flight.get() == 0 {
        io.turn().unwrap();
    }
    // The next one is there when the loop waits already, and is found though nothing tells of it.
    io.turn().unwrap();
    let (header, answer) = (HEADER + 16, ANSWERS + 1024);
    assert!(memory.write(header, &[&GET_ID.to_le_bytes()[..], &[0; 12]].concat()));
    driver.add(&[Piece { addr: header, len: 16 }], &[Piece { addr: answer, len: 21 }], 1).unwrap();
    driver.publish();
    while driver.reap().unwrap().is_none() {
        io.turn().unwrap();
    }
}

#[test]
fn no_request_is_overdue_for_what_it_waited_while_its_export_was_stopped() {
    const TIMEOUT: Nanos = Nanos::from_millis(10_000);
    for (errno, what) in [(Errno::IO, "goes on"), (Errno::NOSPC, "is tried")] {
        let errors = stopping(Some(TIMEOUT));
        let (mut io, mut queues) = reading(&errors, [sick_disk(errno, Nanos::from_millis(1_000_000))]);
        let (_driver, id) = queues.pop().unwrap();
        while errors.status() == IoStatus::Ok {
            io.turn().unwrap();
        }
        // For as long as this machine runs.
        queue(&mut io, id).begun.iter_mut().for_each(|begun| begun.at = Nanos::ZERO);
        assert!(clock::now() > TIMEOUT);
        if errno == Errno::IO {
            let worker = queue(&mut io, id);
            worker.look_for_overdue(clock::now());
            assert_eq!((worker.counters.overdue.get(), errors.take_overdue()), (0, None), "it waits");
            errors.resume();
            io.wake(id);
        }
        while queue(&mut io, id).counters.waiting.get() == 1 {
            io.turn().unwrap();
        }
        let taken_up = clock::now();
        let worker = queue(&mut io, id);
        worker.look_for_overdue(taken_up);
        assert_eq!((worker.counters.overdue.get(), errors.take_overdue()), (0, None), "{what}");
        worker.look_for_overdue(taken_up + TIMEOUT);
        assert_eq!(worker.counters.overdue.get(), 1, "{what}");
        assert!(errors.take_overdue().is_some_and(|oldest| oldest < TIMEOUT + TIMEOUT), "{what}");
    }
}

#[test]
fn a_queue_finds_out_by_itself_that_a_request_is_overdue_and_that_it_is_so_no_longer() {
    assert!(is_found_overdue(false, None) && is_found_overdue(true, None));
    // One that had ended when this thread came to look shows nothing.
    assert!((0..30).any(|_| is_found_overdue(true, Some(Nanos::from_millis(1000)))));
}

/// Whether the queue finds out before its request ends, which takes so long, or for ever.
fn is_found_overdue(are_kicked: bool, latency: Option<Nanos>) -> bool {
    const TIMEOUT: Nanos = Nanos::from_millis(20);
    const NEVER: Nanos = Nanos::from_millis(1 << 40);
    let errors = ErrorHandling::new("e", ErrorPolicy { timeout: Some(TIMEOUT), ..ErrorPolicy::default() });
    let null = DiskDriver::Null { size: SIZE, latency: latency.unwrap_or(NEVER), read_zeroes: false };
    let slow = Arc::new(Disk::open(&Options::new("slow", null)).unwrap());
    let (mut io, mut queues) = reading_with(&errors, are_kicked, [slow]);
    let (mut driver, id) = queues.pop().unwrap();
    // A turn that nobody wakes ends when the queue has asked for that.
    while queue(&mut io, id).counters.overdue.get() == 0 {
        io.turn().unwrap();
        if driver.has_used() {
            return false;
        }
        // It looks four times as often as requests may take.
        let timer = queue(&mut io, id).timer;
        assert!(timer <= clock::now() + Nanos(TIMEOUT.0 / 4), "kicked: {are_kicked}");
    }
    assert_eq!(queue(&mut io, id).counters.overdue.get(), 1);
    assert!(errors.take_overdue().is_some_and(|oldest| oldest >= TIMEOUT));
    if latency.is_some() {
        while queue(&mut io, id).counters.overdue.get() > 0 {
            io.turn().unwrap();
        }
        assert!(driver.reap().unwrap().is_some());
        // Who is overdue next is told of again.
        errors.begin_overdue(TIMEOUT);
        assert_eq!(errors.take_overdue(), Some(TIMEOUT));
    }
    let left = u64::from(latency.is_none());
    assert_eq!(queue(&mut io, id).counters.in_flight.get(), left, "kicked: {are_kicked}");
    true
}

#[test]
fn a_queue_that_nobody_kicks_finds_out_that_a_request_is_overdue_while_it_stops() {
    const TIMEOUT: Nanos = Nanos::from_millis(20);
    let errors = ErrorHandling::new("e", ErrorPolicy { timeout: Some(TIMEOUT), ..ErrorPolicy::default() });
    let never = DiskDriver::Null { size: SIZE, latency: Nanos::from_millis(1 << 40), read_zeroes: false };
    let (mut io, queues) = reading(&errors, [Arc::new(Disk::open(&Options::new("never", never)).unwrap())]);
    let id = queues[0].1;
    io.turn().unwrap();
    assert_eq!(queue(&mut io, id).counters.in_flight.get(), 1);
    io.wake(id);
    io.detach(id, drop);
    while queue(&mut io, id).counters.overdue.get() == 0 {
        io.turn().unwrap();
        assert_ne!(queue(&mut io, id).timer, Nanos::ZERO, "it would never be dispatched again");
    }
}

#[test]
fn nothing_of_a_queue_that_has_left_its_loop_is_overdue_any_more() {
    const TIMEOUT: Nanos = Nanos::from_millis(20);
    let errors = ErrorHandling::new("e", ErrorPolicy { timeout: Some(TIMEOUT), ..ErrorPolicy::default() });
    let never = DiskDriver::Null { size: SIZE, latency: Nanos::from_millis(1 << 40), read_zeroes: false };
    let (mut io, queues) = reading(&errors, [Arc::new(Disk::open(&Options::new("never", never)).unwrap())]);
    let id = queues[0].1;
    io.turn().unwrap();
    let worker = queue(&mut io, id);
    worker.look_for_overdue(clock::now() + TIMEOUT);
    assert_eq!((worker.counters.overdue.get(), errors.take_overdue().is_some()), (1, true));
    worker.forget_overdue();
    assert_eq!(worker.counters.overdue.get(), 0);
    // What is overdue next is the first again.
    errors.begin_overdue(TIMEOUT);
    assert_eq!(errors.take_overdue(), Some(TIMEOUT));
}

#[test]
fn a_queue_that_nobody_kicks_has_its_timer_set_anew_for_what_it_waits_for_when_it_stops_and_when_it_goes_on() {
    let timeout = Nanos::from_millis(1 << 30);
    let errors = ErrorHandling::new("e", ErrorPolicy { timeout: Some(timeout), ..ErrorPolicy::default() });
    let never = DiskDriver::Null { size: SIZE, latency: Nanos::from_millis(1 << 40), read_zeroes: false };
    let (mut io, queues) = reading(&errors, [Arc::new(Disk::open(&Options::new("never", never)).unwrap())]);
    let id = queues[0].1;
    io.turn().unwrap();
    let stops = |io: &mut EventLoop<Worker>| {
        io.quiesce(id, |_| ());
        io.wake(id);
        io.turn().unwrap();
    };
    for _ in 0..2 {
        stops(&mut io);
        let stopping = clock::now();
        assert!(queue(&mut io, id).timer > stopping, "it looks for what is overdue");
        io.resume(id);
        io.turn().unwrap();
        let (timer, look_at) = (queue(&mut io, id).timer, queue(&mut io, id).look_at);
        assert_eq!(timer, Nanos::ZERO, "nobody takes it for set");
        assert!(look_at <= clock::now() + LOOK_EVERY && look_at > stopping, "it looks whether there is more to do");
    }
}

#[test]
fn each_descriptor_of_a_queue_is_signalled_for_what_it_is_there_for_and_for_nothing_else() {
    use rustix::event::{EventfdFlags, eventfd};
    for (packed, by_socket) in [(false, false), (false, true), (true, false), (true, true)] {
        let mut guest = Guest::new(packed, Vec::new());
        let (mut engines, mut signals) = (EngineSet::new(EngineOptions::default()), Signals::new().unwrap());
        let mut fds = [(); 3].map(|()| eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap());
        let mut call = fds[0].try_clone().unwrap();
        if by_socket {
            let (ours, theirs) = UnixStream::pair().unwrap();
            theirs.set_nonblocking(true).unwrap();
            (call, fds[0]) = (ours.into(), theirs.into());
        }
        let theirs = |at: usize| Some(PeerFd::new(fds[at].try_clone().unwrap()));
        let fds_of = guest.worker.fds();
        assert!(fds_of.set_call(PeerFd::new(call).into_call(by_socket).ok()).is_none());
        (fds_of.log, fds_of.err) = (theirs(1).map(Arc::new), theirs(2));
        let mut told = |worker: &mut QueueWorker| {
            worker.notify(&mut signals);
            signals.submit();
            let is_signalled = [0, 1, 2].map(|at: usize| rustix::io::read(&fds[at], &mut [0; 8]).is_ok());
            (is_signalled, worker.counters.calls.get(), worker.counters.calls_spared.get())
        };
        let what = format!("packed: {packed}, by a socket: {by_socket}");
        // What was used before the descriptor was there may have been told of on another.
        assert_eq!(told(&mut guest.worker), ([true, false, false], 0, 0), "{what}");
        assert_eq!(told(&mut guest.worker), ([false, false, false], 0, 0), "{what}");
        for (round, arms) in (1..).zip([true, false]) {
            if arms {
                guest.driver.arm_calls();
            }
            guest.ask(GET_ID, 1, 21);
            guest.worker.take_in(&mut engines, || Nanos::ZERO);
            assert_eq!(told(&mut guest.worker), ([arms, true, false], 1, round - 1), "{what}, armed: {arms}");
            assert!(guest.driver.reap().unwrap().is_some());
        }
        guest.worker.break_queue(&"it is broken");
        assert_eq!(told(&mut guest.worker), ([false, false, true], 1, 1), "{what}");
        assert_eq!(told(&mut guest.worker), ([false, false, false], 1, 1), "{what}");
        assert_eq!(guest.worker.counters.broken.get(), 1);
        assert!(guest.worker.arm() && !guest.worker.poll());
    }
}

#[test]
fn a_queue_has_something_to_do_while_it_runs_and_may_pop_what_is_there_and_waits_for_a_kick_otherwise() {
    for packed in [false, true] {
        let mut guest = Guest::new(packed, Vec::new());
        let mut engines = EngineSet::new(EngineOptions::default());
        let state = |guest: &mut Guest| (guest.worker.poll(), guest.worker.arm());
        assert_eq!(state(&mut guest), (false, true), "packed: {packed}: there is nothing");
        guest.ask(GET_ID, 1, 21);
        assert_eq!(state(&mut guest), (true, false), "packed: {packed}: there is something");
        // As many iovecs in flight as there may be.
        for (iovecs, expected) in [(MOST_IOVECS - 1, (true, false)), (MOST_IOVECS, (false, true)), (0, (true, false))] {
            guest.worker.iovecs = iovecs;
            assert_eq!(state(&mut guest), expected, "packed: {packed}, {iovecs} iovecs");
        }
        guest.worker.stop(&mut engines);
        assert_eq!((state(&mut guest), guest.worker.is_drained()), ((false, true), true), "packed: {packed}: it stops");
        guest.worker.take_in(&mut engines, || Nanos::ZERO);
        assert_eq!(guest.driver.reap().unwrap(), None, "packed: {packed}: it stops");
        guest.worker.resume_queue(&mut engines);
        assert_eq!(state(&mut guest), (true, false), "packed: {packed}: it goes on");
        guest.worker.take_in(&mut engines, || Nanos::ZERO);
        guest.worker.notify(&mut Signals::new().unwrap());
        assert!(guest.driver.reap().unwrap().is_some());
        // Who polls at all times does not wait, unless there is a kick to wait for.
        guest.worker.info.kickless = Kickless::Busy;
        assert_eq!(state(&mut guest), (false, false), "packed: {packed}: it is polled");
        let kick = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        guest.worker.fds().kick = Some(PeerFd::new(kick));
        assert_eq!(state(&mut guest), (false, true), "packed: {packed}: it has a kick");
        assert!(guest.worker.descriptor().is_some());
    }
}

#[test]
fn a_queue_has_each_disk_by_its_key_where_the_engines_have_it_until_it_is_taken_away() {
    let mut engines = EngineSet::new(EngineOptions::default());
    let mut worker = Guest::new(false, Vec::new()).worker;
    let slots = [(); 3].map(|()| {
        let disk = null_disk();
        (engines.attach(&disk).unwrap(), disk)
    });
    let has = |worker: &QueueWorker| [0, 1, 2, 3].map(|key| worker.disks.slot(DiskKey(key)));
    for (key, at) in [(2, 0), (0, 1)] {
        let (slot, disk) = &slots[at];
        worker.add_disk(DiskKey(key), Arc::clone(disk), *slot);
    }
    assert_eq!(has(&worker), [Some(slots[1].0), None, Some(slots[0].0), None]);
    let keys = [0, 1, 2].map(|at: usize| worker.disks.key_of(slots[at].0));
    assert_eq!(keys, [Some(DiskKey(2)), Some(DiskKey(0)), None]);
    let (slot, disk) = &slots[2];
    assert_eq!(worker.replace_disk(DiskKey(2), Arc::clone(disk), *slot), Some(slots[0].0));
    assert_eq!(has(&worker), [Some(slots[1].0), None, Some(*slot), None]);
    assert_eq!(Arc::strong_count(&slots[0].1), Arc::strong_count(disk) - 1);
    let gone = [2, 2, 1, 7].map(|key| worker.remove_disk(DiskKey(key)));
    assert_eq!(gone, [Some(*slot), None, None, None]);
    // What is left is taken to another loop, and let go of here.
    worker.disks.detach(&mut engines);
    assert_eq!(has(&worker), [None; 4]);
    assert!(worker.pinning().is_none(), "nobody allows that");
    let rules = MemoryRules { pin: true, ..MemoryRules::default() };
    let region = Region::anonymous(0, 0x10_0000).unwrap();
    let memory = Arc::new(GuestMemory::under(rules).with(region).unwrap());
    worker.queue = Driver::new(&memory, 0, shape(false)).unwrap().queue().start(&memory).unwrap();
    assert!(Arc::ptr_eq(&worker.pinning().expect("it is allowed").memory, &memory));
    worker.disks.attach(&mut engines).unwrap();
    assert!(worker.disks.slot(DiskKey(0)).is_some() && worker.disks.slot(DiskKey(2)).is_none());
}
