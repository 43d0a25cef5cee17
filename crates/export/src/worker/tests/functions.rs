//! Task management of virtio-scsi, as the worker of a queue looks at it.

use egret_disk::{Limit, Limits, Rates, ThrottleGroup};
use egret_scsi::{LogicalUnit, LunConfig};
use egret_virtio::scsi::{LunAddress, Scsi, ScsiConfig};

use super::*;

const UNIT: LunAddress = LunAddress { target: 0, lun: 0 };
/// LUN 0 of target 0, as a header has it.
const LUN: [u8; 8] = [1, 0, 0x40, 0, 0, 0, 0, 0];
const ABORT_TASK: u8 = 0;
const ABORT_TASK_SET: u8 = 1;
const QUERY_TASK: u8 = 6;
/// The responses.
const OK: u8 = 0;
const FOUND: u8 = 10;
const ABORTED: u8 = 2;
/// What a function is answered with before it is.
const NOTHING: u8 = 0xee;

/// The control queue and a request queue of a device with one unit, on one loop.
struct Machine {
    io: EventLoop<Worker>,
    control: (Arc<GuestMemory>, Driver),
    requests: (Arc<GuestMemory>, Driver),
    /// The one, and the other.
    control_id: SourceId,
    id: SourceId,
}

impl Machine {
    fn new(disk: Arc<Disk>) -> Self {
        Self::with(&ErrorHandling::new("e", ErrorPolicy::default()), disk)
    }

    /// One whose export does this about errors.
    fn with(errors: &Arc<ErrorHandling>, disk: Arc<Disk>) -> Self {
        Self::made(64, None, errors, disk, None)
    }

    /// One whose command 2 does.
    fn with_a_command_that_waits_for_limits() -> Self {
        let mut machine = Self::new(limited_disk());
        machine.read(1);
        assert_eq!(machine.await_used(), 1, "there is room for one");
        machine.read(2);
        machine.turns();
        machine
    }

    /// One with a record of what is in flight.
    fn recorded(disk: Arc<Disk>, inflight: &Inflight) -> Self {
        Self::made(64, None, &ErrorHandling::new("e", ErrorPolicy::default()), disk, Some(inflight))
    }

    /// One with rings of so many descriptors, perhaps an event descriptor that requests are kicked by, without which a timer has
    /// them looked at, and perhaps a record.
    fn made(
        queue_size: u16,
        kick: Option<PeerFd>,
        errors: &Arc<ErrorHandling>,
        disk: Arc<Disk>,
        inflight: Option<&Inflight>,
    ) -> Self {
        let scsi = Scsi::new(ScsiConfig { num_queues: 1, queue_size }, "e").unwrap();
        let unit =
            LogicalUnit::new(LunConfig { capacity_bytes: SIZE, serial: "e".into(), ..LunConfig::default() }).unwrap();
        scsi.add(scsi.prepare(UNIT, Arc::new(unit)).unwrap()).unwrap();
        let mut io = event_loop(ClockReads::ByPhase);
        let mut queue = |index, kick, disks| {
            let model = Arc::clone(&scsi).model(index, queue_size);
            let shape = DriverConfig { size: queue_size, ..shape(false) };
            let mut guest = Guest::with(model, shape, Arc::clone(errors), disks);
            guest.worker.fds().kick = kick;
            guest.worker.set_home(LoopHandle::new(&io));
            let record = inflight.and_then(|inflight| inflight.queue(index));
            guest.worker.queue = guest.driver.queue().start_recorded(&guest.memory, record).unwrap();
            let id = io.attach(guest.worker.into()).map_err(|(_, e)| e).unwrap();
            ((guest.memory, guest.driver), id)
        };
        let (control, control_id) = queue(0, None, Vec::new());
        let (requests, id) = queue(2, kick, vec![Some(disk)]);
        let mut machine = Self { io, control, requests, control_id, id };
        // TEST UNIT READY: a unit attention.
        machine.send(0, &[0; 6]);
        machine.await_used();
        machine
    }

    /// Makes a command available that has a place and a tag of its own.
    fn send(&mut self, tag: u64, cdb: &[u8]) {
        self.send_with_room(tag, cdb, 512);
    }

    /// The same with room for so much data.
    fn send_with_room(&mut self, tag: u64, cdb: &[u8], len: u32) {
        self.add(tag, cdb, &[], len);
    }

    /// The same with data, instead of room for some.
    fn send_with(&mut self, tag: u64, cdb: &[u8], data: &[u8]) {
        self.add(tag, cdb, data, 0);
    }

    fn add(&mut self, tag: u64, cdb: &[u8], data: &[u8], room: u32) {
        let (memory, driver) = &mut self.requests;
        let mut header = [0; 51];
        header[..8].copy_from_slice(&LUN);
        header[8..16].copy_from_slice(&tag.to_le_bytes());
        header[19..19 + cdb.len()].copy_from_slice(cdb);
        let at = HEADER + 0x400 * tag;
        assert!(memory.write(at, &header) && memory.write(at + 0x200, data));
        let [header, response] = [Piece { addr: at, len: 51 }, Piece { addr: at + 0x80, len: 108 }];
        let given = Piece { addr: at + 0x200, len: data.len() as u32 };
        match data.is_empty() {
            true => driver.add(&[header], &[response, Piece { len: room, ..given }], tag).unwrap(),
            false => driver.add(&[header, given], &[response], tag).unwrap(),
        }
        driver.publish();
    }

    fn read(&mut self, tag: u64) {
        self.send(tag, &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
    }

    fn response(&self, tag: u64) -> u8 {
        let mut response = [0; 108];
        assert!(self.requests.0.read(HEADER + 0x400 * tag + 0x80, &mut response));
        response[11]
    }

    fn await_used(&mut self) -> u64 {
        loop {
            if let Some(used) = self.requests.1.reap().unwrap() {
                return used.token;
            }
            self.io.turn().unwrap();
        }
    }

    /// Has a queue stop, and goes on until it has.
    fn await_stop(&mut self, id: SourceId) {
        let (to, stopped) = channel();
        self.io.detach(id, move |worker| to.send(worker).unwrap());
        while stopped.try_recv().is_err() {
            self.io.turn().unwrap();
        }
    }

    /// Makes a function available, and returns where its answer is to be.
    fn manage(&mut self, function: u8, tag: u64) -> u64 {
        let (memory, driver) = &mut self.control;
        let mut request = [0; 24];
        request[4] = function;
        request[8..16].copy_from_slice(&LUN);
        request[16..].copy_from_slice(&tag.to_le_bytes());
        let answer = HEADER + 0x20 * u64::from(function);
        let header = answer + 0x1000;
        assert!(memory.write(header, &request) && memory.write(answer, &[NOTHING]));
        driver.add(&[Piece { addr: header, len: 24 }], &[Piece { addr: answer, len: 1 }], 0).unwrap();
        driver.publish();
        answer
    }

    /// What it was answered, if it was.
    fn managed(&self, answer: u64) -> u8 {
        let mut answered = [0];
        assert!(self.control.0.read(answer, &mut answered));
        answered[0]
    }

    /// So many turns that whatever goes on by itself has.
    fn turns(&mut self) {
        for _ in 0..8 {
            [self.control_id, self.id].into_iter().for_each(|id| self.io.wake(id));
            self.io.turn().unwrap();
        }
    }
}

/// One that does not answer for much longer than some turns take.
fn slow_disk() -> Arc<Disk> {
    let null = DiskDriver::Null { size: SIZE, latency: Nanos::from_millis(2000), read_zeroes: false };
    Arc::new(Disk::open(&Options::new("slow", null)).unwrap())
}

/// One that has room for one request, and for the next when any test is over.
fn limited_disk() -> Arc<Disk> {
    let disk = null_disk();
    let total = Limit { average: 1, ..Limit::default() };
    let limits = Limits { bytes: Rates { total, ..Rates::default() }, ..Limits::default() };
    disk.set_throttle_group(Some(&ThrottleGroup::new("g", limits)));
    disk
}

#[test]
fn a_function_that_comes_while_a_queue_is_paused_finds_the_command_that_lies_in_its_ring() {
    for moves in [false, true] {
        let mut machine = Machine::new(slow_disk());
        let id = machine.id;
        let (to, stopped) = channel();
        if moves {
            machine.io.detach(id, move |worker| to.send(worker).unwrap());
        } else {
            machine.io.quiesce(id, |_| ());
        }
        machine.read(1);
        let answer = machine.manage(ABORT_TASK, 1);
        machine.turns();
        assert_eq!(machine.managed(answer), NOTHING, "moves: {moves}: it has not looked");
        if moves {
            let worker: Worker = stopped.try_recv().expect("nothing is in flight");
            machine.turns();
            machine.id = machine.io.attach(worker).map_err(|(_, e)| e).unwrap();
        } else {
            machine.io.resume(id);
        }
        machine.turns();
        assert_eq!(machine.managed(answer), NOTHING, "moves: {moves}: the command is with the disk");
        assert_eq!((machine.await_used(), machine.response(1)), (1, ABORTED), "moves: {moves}");
        machine.turns();
        assert_eq!(machine.managed(answer), OK, "moves: {moves}");
    }
}

/// What is done in a turn before it has looked at its ring is no reason to look at functions.
#[test]
fn a_queue_that_goes_on_has_not_caught_up_before_it_has_been_dispatched() {
    let mut machine = Machine::new(slow_disk());
    let id = machine.id;
    machine.read(1);
    machine.io.turn().unwrap();
    machine.io.quiesce(id, |_| ());
    machine.read(2);
    let answer = machine.manage(ABORT_TASK, 2);
    machine.turns();
    let worker = queue(&mut machine.io, id);
    worker.resume_queue(&mut EngineSet::new(EngineOptions::default()));
    worker.notify(&mut Signals::new().unwrap());
    machine.turns();
    assert_eq!(machine.managed(answer), NOTHING, "its command is with the disk by now");
    let ended = [machine.await_used(), machine.await_used()];
    assert_eq!((ended, machine.response(1), machine.response(2)), ([1, 2], OK, ABORTED));
}

#[test]
fn a_function_does_not_wait_for_a_queue_that_stops_for_good() {
    let mut machine = Machine::new(slow_disk());
    let id = machine.id;
    queue(&mut machine.io, id).leave(Leave::Nothing);
    machine.io.quiesce(id, |_| ());
    machine.read(1);
    for gone in [false, true] {
        if gone {
            machine.io.detach(id, std::mem::forget);
        }
        let answer = machine.manage(ABORT_TASK, 1);
        machine.turns();
        assert_eq!((machine.managed(answer), machine.response(1)), (OK, 0), "gone: {gone}");
    }
}

/// Or its driver would be told that the command is aborted, and whoever serves the queue next would do it.
#[test]
fn a_function_about_what_may_be_in_the_ring_of_a_queue_that_stops_for_good_is_left_to_the_record_with_it() {
    // It comes while what was popped ends, or when nothing is popped or looked at any more.
    for (looks, tag, expected) in [
        (true, 2, (NOTHING, true)),
        (false, 2, (NOTHING, true)),
        // No other command has its tag.
        (true, 1, (OK, false)),
    ] {
        let inflight = record();
        let mut machine = Machine::recorded(slow_disk(), &inflight);
        let (id, control_id) = (machine.id, machine.control_id);
        queue(&mut machine.io, control_id).leave(Leave::Nothing);
        let (to, stopped) = channel();
        if looks {
            machine.read(1);
            machine.turns();
            queue(&mut machine.io, id).leave(Leave::Nothing);
            machine.io.quiesce(id, |_| ());
        } else {
            machine.io.detach(id, move |worker| to.send(worker).unwrap());
            machine.turns();
        }
        machine.read(2);
        let answer = machine.manage(ABORT_TASK, tag);
        machine.turns();
        if let Ok(mut worker) = stopped.try_recv() {
            worker.queue().unwrap().let_go();
        }
        machine.turns();
        machine.await_stop(control_id);
        let is_left = inflight.queue(0).unwrap().is_busy();
        assert_eq!((machine.managed(answer), is_left), expected, "looks: {looks}, about {tag}");
    }
}

#[test]
fn a_command_of_many_operations_that_may_go_with_the_record_is_not_ended_before_its_queue_is_told_to_stop() {
    let inflight = record();
    let mut machine = Machine::recorded(limited_disk(), &inflight);
    let id = machine.id;
    // VERIFY of 128 KiB, without data: the first part of two begins.
    machine.send(1, &[0x2f, 0, 0, 0, 0, 0, 0, 1, 0, 0]);
    while queue(&mut machine.io, id).queue.in_flight() == 0 {
        machine.io.turn().unwrap();
    }
    queue(&mut machine.io, id).leave(Leave::NotBegun);
    machine.io.wake(id);
    machine.io.turn().unwrap();
    machine.await_stop(id);
    assert!(inflight.queue(2).unwrap().is_busy(), "the rest of it waits for limits");
}

/// A record of what is in flight in the queues of a machine.
fn record() -> Inflight {
    let config = InflightConfig { queues: 3, queue_size: 64, packed: false };
    let record = Region::anonymous(0, config.bytes()).unwrap().file;
    Inflight::map(&record, 0, config.bytes(), config).unwrap()
}

#[test]
fn a_function_does_not_wait_for_a_queue_that_no_loop_takes_back() {
    let mut machine = Machine::new(slow_disk());
    let (to, stopped) = channel();
    machine.io.detach(machine.id, move |worker| to.send(worker).unwrap());
    machine.read(1);
    let answer = machine.manage(ABORT_TASK, 1);
    machine.turns();
    assert_eq!(machine.managed(answer), NOTHING, "it may go on elsewhere");
    let mut worker: Worker = stopped.try_recv().expect("nothing is in flight");
    worker.strand();
    machine.turns();
    assert_eq!((machine.managed(answer), machine.response(1)), (OK, 0));
}

/// Nothing else makes room: the disk fails, and nobody has the export go on.
#[test]
fn a_function_ends_what_waits_for_a_failed_disk_though_there_is_no_room_to_pop_the_rest_of_its_ring() {
    let error = InjectError {
        event: DebugEvent::ReadAio,
        state: None,
        iotype: None,
        errno: Errno::IO,
        sector: None,
        once: false,
    };
    let driver = DiskDriver::Null { size: SIZE, latency: Nanos::ZERO, read_zeroes: false };
    let blkdebug = DebugRules { inject_error: vec![error], set_state: Vec::new() };
    let sick = || {
        Arc::new(Disk::open(&Options { blkdebug: blkdebug.clone(), ..Options::new("sick", driver.clone()) }).unwrap())
    };
    for (function, answered, ended, status) in [
        (ABORT_TASK_SET, [OK, FOUND], &[1, 2, 3][..], IoStatus::Ok),
        // The next one fails as well, and there is no room for the one after it.
        (ABORT_TASK, [OK, NOTHING], &[1], IoStatus::Failed),
    ] {
        let errors = stopping(None);
        let mut machine = Machine::with(&errors, sick());
        let id = machine.id;
        machine.read(1);
        while errors.status() == IoStatus::Ok {
            machine.io.turn().unwrap();
        }
        // As with that many pieces in it; when it has ended there is room for the next one alone.
        let pieces = queue(&mut machine.io, id).iovecs;
        queue(&mut machine.io, id).iovecs = MOST_IOVECS + pieces - 1;
        (2..4).for_each(|tag| machine.read(tag));
        machine.turns();
        assert_eq!(queue(&mut machine.io, id).counters.in_flight.get(), 1);
        let query = machine.manage(QUERY_TASK, 3);
        machine.turns();
        assert_eq!(machine.managed(query), NOTHING, "it may be in the ring, and is");
        let answer = machine.manage(function, 1);
        for tag in ended {
            machine.turns();
            let used = machine.requests.1.reap().unwrap().map(|used| used.token);
            assert_eq!((used, machine.response(*tag)), (Some(*tag), ABORTED));
        }
        machine.turns();
        let answers = [answer, query].map(|answer| machine.managed(answer));
        assert_eq!((answers, errors.status()), (answered, status));
    }
}

/// Nothing else makes room: what is in flight waits for its disk's limits, longer than any test.
#[test]
fn a_function_ends_what_waits_for_limits_though_there_is_no_room_to_pop_the_rest_of_its_ring() {
    let mut machine = Machine::with_a_command_that_waits_for_limits();
    let id = machine.id;
    queue(&mut machine.io, id).iovecs += MOST_IOVECS - 1;
    machine.read(3);
    machine.turns();
    assert_eq!(queue(&mut machine.io, id).counters.in_flight.get(), 1, "the other one is in the ring");
    let answer = machine.manage(ABORT_TASK_SET, 0);
    for tag in [2, 3] {
        assert_eq!((machine.await_used(), machine.response(tag)), (tag, ABORTED));
    }
    machine.turns();
    assert_eq!(machine.managed(answer), OK);
    assert!(!queue(&mut machine.io, id).keeps_places, "nobody waits for them in the limits");
}

/// Or a driver that always has more would have no answer.
#[test]
fn a_function_is_answered_when_its_command_has_ended_though_more_lies_in_the_ring_than_a_turn_takes() {
    // Two with room for so much are what a turn takes in.
    const LEN: u32 = TURN_BYTES as u32 / 2;
    let mut machine = Machine::with_a_command_that_waits_for_limits();
    let id = machine.id;
    let answer = machine.manage(ABORT_TASK, 2);
    // The queue has caught up, and looks which command that is about.
    machine.io.turn().unwrap();
    (3..13).for_each(|tag| machine.send_with_room(tag, &[0; 6], LEN));
    machine.io.turn().unwrap();
    assert_eq!((machine.response(2), machine.managed(answer)), (ABORTED, NOTHING));
    // The other queue hears of it, and answers.
    machine.io.turn().unwrap();
    machine.io.turn().unwrap();
    assert_eq!(machine.managed(answer), OK);
    assert!(queue(&mut machine.io, id).is_behind);
}

/// More than are taken up again in one turn, of a queue that nothing else wakes.
#[test]
fn a_function_ends_all_that_waits_for_limits_in_as_many_turns_as_that_takes_and_no_places_are_kept_for_it() {
    const MANY: u64 = 150;
    let kick = PeerFd::new(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap());
    let errors = ErrorHandling::new("e", ErrorPolicy::default());
    let mut machine = Machine::made(512, Some(kick), &errors, limited_disk(), None);
    let id = machine.id;
    (1..=MANY).for_each(|tag| machine.read(tag));
    machine.turns();
    assert_eq!(machine.requests.1.reap().unwrap().map(|used| used.token), Some(1), "there is room for one");
    assert_eq!(queue(&mut machine.io, id).counters.in_flight.get(), MANY - 1);
    let answer = machine.manage(ABORT_TASK_SET, 0);
    for _ in 0..8 {
        machine.io.wake(machine.control_id);
        machine.io.turn().unwrap();
    }
    assert_eq!(queue(&mut machine.io, id).counters.in_flight.get(), 0);
    assert_eq!(machine.managed(answer), OK);
    let worker = queue(&mut machine.io, id);
    let (keeps_places, slot) = (worker.keeps_places, worker.disks.slot(DiskKey(0)).unwrap());
    assert!(!keeps_places && !machine.io.backend().keep_places(slot, |_| true), "nobody waits for them");
}

#[test]
fn a_request_that_is_taken_back_from_limits_is_as_old_as_its_guest_has_waited() {
    const TIMEOUT: Nanos = Nanos::from_millis(10_000);
    let driver = DiskDriver::Null { size: SIZE, latency: Nanos::ZERO, read_zeroes: true };
    let disk = Arc::new(Disk::open(&Options::new("limited", driver)).unwrap());
    let write = Limit { average: 1, ..Limit::default() };
    let limits = Limits { bytes: Rates { write, ..Rates::default() }, ..Limits::default() };
    disk.set_throttle_group(Some(&ThrottleGroup::new("g", limits)));
    let errors = stopping(Some(TIMEOUT));
    let mut machine = Machine::with(&errors, disk);
    let id = machine.id;
    for tag in [1, 2] {
        machine.send_with(tag, &[0x2a, 0, 0, 0, 0, tag as u8, 0, 0, 1, 0], &[0; 512]);
    }
    assert_eq!(machine.await_used(), 1, "there is room for one");
    // For as long as this machine runs.
    queue(&mut machine.io, id).begun.iter_mut().for_each(|begun| begun.at = Nanos::ZERO);
    assert!(clock::now() > TIMEOUT);
    // It compares in vain, and need not write.
    let mut compare_and_write = [0; 16];
    (compare_and_write[0], compare_and_write[13]) = (0x89, 1);
    machine.send_with(3, &compare_and_write, &[1; 1024]);
    assert_eq!(machine.await_used(), 3);
    machine.turns();
    let worker = queue(&mut machine.io, id);
    worker.look_for_overdue(clock::now());
    assert_eq!(worker.counters.overdue.get(), 1);
    assert!(errors.take_overdue().is_some_and(|oldest| oldest > TIMEOUT));
}

#[test]
fn a_command_that_ends_has_its_queue_look_whose_places_limits_keep() {
    let slow = DiskDriver::Null { size: SIZE, latency: Nanos::from_millis(100), read_zeroes: false };
    let mut machine = Machine::new(Arc::new(Disk::open(&Options::new("slow", slow)).unwrap()));
    let id = machine.id;
    // It is looked at no more without a reason.
    let kick = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
    queue(&mut machine.io, id).fds().kick = Some(PeerFd::new(kick));
    while clock::now() <= queue(&mut machine.io, id).look_at {
        machine.io.turn().unwrap();
    }
    machine.turns();
    machine.read(1);
    machine.io.wake(id);
    while queue(&mut machine.io, id).queue.in_flight() == 0 {
        machine.io.turn().unwrap();
    }
    queue(&mut machine.io, id).keeps_places = true;
    assert_eq!(machine.await_used(), 1);
    assert!(!queue(&mut machine.io, id).keeps_places);
}

#[test]
fn what_a_queue_that_stops_for_good_asks_of_a_limited_disk_ends_early_but_flushes_and_what_it_keeps_for_the_record() {
    let mut machine = Machine::new(limited_disk());
    let worker = queue(&mut machine.io, machine.id);
    let write = Op::Write { fua: true };
    for (leaving, phase, keeps, op, expected) in [
        (Some(Leave::Nothing), Phase::Stopping, false, write, true),
        (Some(Leave::Nothing), Phase::Broken, false, write, true),
        (Some(Leave::Nothing), Phase::Running, false, write, false),
        (None, Phase::Stopping, false, write, false),
        (Some(Leave::Nothing), Phase::Stopping, true, write, false),
        // For which no limit is.
        (Some(Leave::Nothing), Phase::Stopping, false, Op::Flush, false),
    ] {
        worker.stopped.leaving = leaving;
        (worker.phase, worker.stopped.is) = (phase, keeps);
        let request = Request { op, offset: 0, len: 512, buffers: Buffers::default(), token: RequestToken(0) };
        assert_eq!(worker.is_cut_short(DiskKey(0), &request), expected, "{leaving:?}, {keeps}, {op:?}");
    }
    (worker.phase, worker.stopped.is, worker.stopped.leaving) = (Phase::Running, false, None);
}
