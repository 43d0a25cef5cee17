//! A queue worker: one guest's queue, run by one loop.

mod limited;
mod overdue;
mod stopped;

use std::collections::VecDeque;
use std::fmt::Display;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::task::Wake;

use egret_disk::{Completion, Disk, DiskSlot, Ended, EngineError, EngineSet, Op, Pinning, Request, RequestToken};
use egret_event_loop::{ClockReads, LoopHandle, Nanos, Signals, SourceId, Turn, clock};
use egret_virtio::{Completed, DiskKey, Model, Next};
use egret_vring::memory::{Buffers, GuestMemory};
use egret_vring::ring::{Chain, Queue};
use rustix::io::Errno;

use self::overdue::Overdue;
use self::stopped::Stopped;
use crate::alarm::Alarm;
use crate::errors::ErrorHandling;
use crate::peer_fd::{Call, PeerFd};
use crate::peer_log::PeerLog;
use crate::source::Worker;
use crate::stats::{DiskCounters, QueueCounters};

/// The descriptors by which a queue's two sides signal each other: eventfds mostly, which the peer owns as much as we do. How long it
/// takes to close one is for the peer to say, so no I/O thread does.
#[derive(Default)]
pub(crate) struct VringFds {
    /// The driver signals it after it has made chains available. Without one the queue is polled.
    pub kick: Option<PeerFd>,
    call: Option<Call>,
    /// Is signalled when the queue breaks.
    pub err: Option<PeerFd>,
    /// Is signalled when the dirty log has changed, where there is one.
    pub log: Option<Arc<PeerFd>>,
    /// Signal `call` at the end of the next turn, even if the driver's event suppression says not to.
    owes_call: bool,
    /// The queue broke and `err` is not signalled yet.
    owes_err: bool,
}

impl VringFds {
    /// Sets the descriptor by which the driver is called, and calls it once at the end of the next turn: elements that were
    /// used earlier may have been signalled on another descriptor, or not at all by a daemon that died before it could. Returns
    /// the one that there was.
    #[must_use]
    pub(crate) fn set_call(&mut self, fd: Option<Call>) -> Option<Call> {
        self.owes_call = true;
        mem::replace(&mut self.call, fd)
    }

    /// Likewise the one that is signalled when the queue breaks.
    #[must_use]
    pub(crate) fn set_err(&mut self, fd: Option<PeerFd>) -> Option<PeerFd> {
        mem::replace(&mut self.err, fd)
    }

    /// Those for kicks, for calls and for errors.
    pub(crate) fn into_parts(self) -> (Option<PeerFd>, Option<PeerFd>, Option<PeerFd>) {
        (self.kick, self.call.map(PeerFd::from), self.err)
    }

    /// Of all that there is the one that is signalled when the queue breaks.
    pub(crate) fn take_err(&mut self) -> Self {
        Self { err: self.err.take(), ..Self::default() }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// Pops no more chains but those that [`recovers`](QueueWorker::recovers) is about; those in flight end.
    Stopping,
    /// The driver broke the rules of the ring: nothing is served until it sets the queue up anew.
    Broken,
}

/// What becomes of a queue whose client gives no kick descriptor, by which vhost-user asks for polling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kickless {
    /// It is looked at once a millisecond at least.
    #[default]
    Timer,
    /// Its I/O thread does not sleep while it runs.
    Busy,
}

/// What a queue that is drained for good may leave to the record of what is in flight, if it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// Nothing but what waits for a disk that fails, unless the guest moves: then the record may not move along.
    Nothing,
    /// What no engine has, for another back-end that has the record. What an engine has may be the kernel's: late, it would
    /// write to memory that is not logged any more, or to the disk over what the other back-end has written.
    NotBegun,
}

/// A queue that has stopped.
pub(crate) struct AtRest {
    /// Where in its ring: see [`QueueConfig::base`](egret_vring::ring::QueueConfig::base).
    pub base: u32,
    /// What it was given.
    pub fds: VringFds,
    /// Whether it has left requests to the record of what is in flight.
    pub has_left: bool,
}

/// What a worker knows of its queue beside the ring.
pub(crate) struct QueueInfo {
    /// Where it logs what its guest does wrong.
    pub log: Arc<PeerLog>,
    /// Its number on the device.
    pub index: usize,
    pub kickless: Kickless,
    /// Who is given memory that was pinned, when it is not any more.
    pub unpinned: Sender<Arc<GuestMemory>>,
}

/// How many bytes, and how many [steps](Chain::steps), of chains a queue pops in one turn; it stops after the chain that reaches
/// either. The cost of a chain grows with both, and the loop's other queues wait meanwhile. So the length of a turn is bounded by
/// the number of queues on the loop, whatever their drivers ask for.
const TURN_BYTES: u64 = 1 << 20;
const TURN_STEPS: u32 = 1024;

/// A queue pops no chains while those in flight have this many iovecs. This bounds the memory of its lists of them to
/// 1 MiB, and is twice what Linux has in flight on a queue with requests of 128 iovecs.
const MOST_IOVECS: u32 = 65536;

/// So many chains that end in one turn are published together, and the rest at its end: a driver that looks goes on with some
/// while others are still being ended, and the line of memory with the index goes from processor to processor less often than
/// for each.
const PUBLISH_AFTER: u16 = 16;

/// How often a queue without a kick descriptor is polled, at least.
const LOOK_EVERY: Nanos = Nanos::from_millis(1);

/// A chain in flight.
#[derive(Clone, Copy, Default)]
struct Begun {
    /// When it was popped.
    at: Nanos,
    /// How many iovecs it has.
    iovecs: u32,
}

/// A queue, its device model and its disks, owned by exactly one loop at a time.
///
/// Nothing on the path from kick to call allocates, locks or logs: the buffers of chains and requests are reused, and
/// no other thread writes to the worker's counters.
pub(crate) struct QueueWorker {
    info: QueueInfo,
    queue: Queue,
    model: Model,
    disks: Disks,
    /// Its index on its loop, while it is on one.
    source: u32,
    fds: VringFds,
    chain: Chain,
    /// The chains in flight, by their heads. The queue knows how many there are.
    begun: Vec<Begun>,
    /// The sum of their iovecs.
    iovecs: u32,
    /// Requests that completions led to. They are pushed at the next dispatch, because a completion has no engines at hand.
    follow_ups: Vec<(DiskKey, Request<Buffers>)>,
    /// Requests that held up others while they waited for limits, to be taken up again.
    taken_back: VecDeque<(DiskKey, Request<Buffers>)>,
    /// The limits may keep places of such requests.
    keeps_places: bool,
    /// The loop that it is to be attached to.
    home: Option<LoopHandle<Worker>>,
    /// Rings when waiting chains may go on; there is one while the worker is attached.
    alarm: Option<Arc<Alarm<Worker>>>,
    phase: Phase,
    /// The last dispatch left available chains in the ring.
    is_behind: bool,
    /// When a queue without a kick descriptor is polled again.
    look_at: Nanos,
    /// Used elements that were added in this turn.
    used: u16,
    /// What was published of them before the end of the turn is to be signalled there.
    wants_call: bool,
    /// What the export does about errors, and what the queue keeps while it is stopped for one.
    errors: Arc<ErrorHandling>,
    stopped: Stopped,
    /// What it knows of requests that are overdue, if there is a time for them.
    overdue: Option<Overdue>,
    /// The loop's timer for it, in the past if there is none. One for a queue without a kick descriptor is apart.
    timer: Nanos,
    counters: Arc<QueueCounters>,
}

/// The disks of a worker's device, by their keys: where they are on the worker's loop, while it is on one.
#[derive(Default)]
pub(crate) struct Disks {
    all: Vec<Option<Arc<Disk>>>,
    slots: Vec<Option<DiskSlot>>,
    /// What is counted for each, where there may be several.
    counters: Vec<Option<Arc<DiskCounters>>>,
}

impl Disks {
    /// To be attached.
    pub(crate) fn new(all: Vec<Option<Arc<Disk>>>) -> Self {
        Self { slots: vec![None; all.len()], all, counters: Vec::new() }
    }

    /// Counts for each disk what `counters` has for it.
    pub(crate) fn count_each(&mut self, counters: &QueueCounters) {
        let of = |disk: &Arc<Disk>| counters.of_disk(disk.node_name());
        self.counters = self.all.iter().map(|disk| disk.as_ref().map(of)).collect();
    }

    #[inline]
    fn slot(&self, DiskKey(key): DiskKey) -> Option<DiskSlot> {
        self.slots.get(key as usize).copied().flatten()
    }

    fn key_of(&self, slot: DiskSlot) -> Option<DiskKey> {
        self.slots.iter().position(|other| *other == Some(slot)).map(|key| DiskKey(key as u32))
    }

    fn attach(&mut self, engines: &mut EngineSet) -> Result<(), EngineError> {
        for at in 0..self.all.len() {
            let Some(disk) = &self.all[at] else { continue };
            match engines.attach(disk) {
                Ok(slot) => self.slots[at] = Some(slot),
                Err(e) => {
                    self.detach(engines);
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    fn detach(&mut self, engines: &mut EngineSet) {
        self.slots.iter_mut().filter_map(Option::take).for_each(|slot| engines.detach(slot));
    }
}

impl QueueWorker {
    pub(crate) fn new(
        info: QueueInfo,
        queue: Queue,
        model: Model,
        disks: Disks,
        fds: VringFds,
        errors: Arc<ErrorHandling>,
        counters: Arc<QueueCounters>,
    ) -> Self {
        let begun = vec![Begun::default(); queue.size().into()];
        Self {
            info,
            queue,
            model,
            disks,
            source: 0,
            fds,
            chain: Chain::default(),
            begun,
            iovecs: 0,
            follow_ups: Vec::new(),
            taken_back: VecDeque::new(),
            keeps_places: false,
            home: None,
            alarm: None,
            phase: Phase::Running,
            is_behind: false,
            look_at: Nanos::ZERO,
            used: 0,
            wants_call: false,
            overdue: errors.policy.timeout.map(Overdue::new),
            errors,
            stopped: Stopped::default(),
            timer: Nanos::ZERO,
            counters,
        }
    }

    /// Takes a disk in that `engines`, those of its loop, have at `slot`.
    pub(crate) fn add_disk(&mut self, DiskKey(key): DiskKey, disk: Arc<Disk>, slot: DiskSlot) {
        let at = key as usize;
        if at >= self.disks.all.len() {
            self.disks.all.resize(at + 1, None);
            self.disks.slots.resize(at + 1, None);
        }
        self.disks.all[at] = Some(disk);
        self.disks.slots[at] = Some(slot);
    }

    /// Counts for a disk that was added what is for it.
    pub(crate) fn count_disk(&mut self, DiskKey(key): DiskKey, counters: Arc<DiskCounters>) {
        let at = key as usize;
        self.disks.counters.resize(self.disks.counters.len().max(at + 1), None);
        self.disks.counters[at] = Some(counters);
    }

    /// As [`add_disk`](Self::add_disk), in the queue of another; returns where that was, for the engines to let go of it.
    pub(crate) fn replace_disk(&mut self, key: DiskKey, disk: Arc<Disk>, slot: DiskSlot) -> Option<DiskSlot> {
        let old = self.remove_disk(key);
        self.add_disk(key, disk, slot);
        old
    }

    /// What the engines may pin of the queue's memory.
    pub(crate) fn pinning(&self) -> Option<Pinning> {
        let memory = self.queue.memory();
        if !memory.may_be_pinned() {
            return None;
        }
        let (log, unpinned) = (Arc::clone(&self.info.log), self.info.unpinned.clone());
        Some(Pinning {
            memory: Arc::clone(memory),
            tell: Box::new(move |why| {
                log.warn(format_args!("guest memory cannot be pinned, and is used as without pin-memory: {why}"));
            }),
            // To unmap it takes time that no other queue is to wait for.
            give_back: Box::new(move |memory| drop(unpinned.send(memory))),
        })
    }

    /// Forgets a disk: requests for it fail with ENODEV from here on. Returns its slot, which the engines are to detach.
    pub(crate) fn remove_disk(&mut self, DiskKey(key): DiskKey) -> Option<DiskSlot> {
        self.model.look_for_disks();
        *self.disks.all.get_mut(key as usize)? = None;
        self.disks.slots[key as usize].take()
    }

    /// Stops a drained queue.
    pub(crate) fn into_rest(self) -> AtRest {
        // A record may have more in flight: what the guest broke the queue with.
        let has_left = self.queue.in_flight() > 0 && self.queue.has_record();
        AtRest { base: self.queue.stop().base, fds: self.fds, has_left }
    }

    /// It is going to be drained for good, not to be attached elsewhere.
    pub(crate) fn leave(&mut self, leave: Leave) {
        self.stopped.leaving = Some(leave);
    }

    /// Has the queue go on in another map, as [`Queue::extend_memory`] does, and signal what is logged. Returns what was
    /// signalled.
    #[must_use]
    pub(crate) fn extend_memory(
        &mut self,
        memory: &Arc<GuestMemory>,
        used: Option<u64>,
        signal: Option<Arc<PeerFd>>,
    ) -> Option<Arc<PeerFd>> {
        self.queue.extend_memory(memory, used);
        mem::replace(&mut self.fds.log, signal)
    }

    /// Says which loop it is going to be attached to: others wake it there.
    pub(crate) fn set_home(&mut self, home: LoopHandle<Worker>) {
        self.home = Some(home);
    }

    pub(crate) const fn fds(&mut self) -> &mut VringFds {
        &mut self.fds
    }

    /// Ends a chain: counts it, and hands it to the driver.
    fn end(&mut self, completed: &Completed, latency: Nanos) {
        self.counters.count(completed, latency);
        if let Some(DiskKey(key)) = completed.disk
            && let Some(Some(counters)) = self.disks.counters.get(key as usize)
        {
            counters.count(completed);
        }
        if self.phase == Phase::Broken {
            // A broken queue adds no used elements. The chain leaves the table, so that the queue can be drained.
            self.queue.abandon(completed.head);
        } else {
            self.queue.add_used(completed.head, completed.written);
            self.used = self.used.wrapping_add(1);
            if self.used.is_multiple_of(PUBLISH_AFTER) {
                self.wants_call |= self.queue.publish_used();
            }
        }
    }

    /// Whether another chain may be popped: the model has a use for it, and the limit on iovecs is not reached.
    #[inline]
    fn takes_chains(&self) -> bool {
        self.iovecs < MOST_IOVECS && self.model.takes_chains()
    }

    /// Counts a chain that is in flight from here on.
    #[inline]
    fn begin(&mut self, head: u16, iovecs: u32, now: Nanos) {
        self.begun[usize::from(head)] = Begun { at: now, iovecs };
        self.iovecs += iovecs;
    }

    /// Breaks the queue if the front-end truncated the file behind its memory.
    #[inline]
    fn check_truncation(&mut self) {
        if self.phase != Phase::Broken && self.queue.is_truncated() {
            self.break_queue(&"the front-end took its memory away (its file was truncated)");
        }
    }

    /// Gives a request to the engines, with its memory, which the queue lends. Inline always: to pass on a request by its
    /// address costs more than to give it away.
    #[inline(always)]
    fn push(&mut self, engines: &mut EngineSet, key: DiskKey, request: Request<Buffers>, now: Nanos) {
        let Some(slot) = self.disks.slot(key) else {
            return self.refuse(request.token, request.buffers, Errno::NODEV, now);
        };
        if self.stopped.is && !self.stopped.lets_pass(&request) {
            return self.keep(key, request);
        }
        let Request { op, offset, len, buffers, token } = request;
        let head = token.slot();
        match self.queue.lend(buffers, op.access()) {
            Ok(buffers) => {
                if engines.push(slot, Request { op, offset, len, buffers, token }) {
                    self.model.may_wait(head);
                }
            }
            Err(buffers) => self.refuse(token, buffers, Errno::FAULT, now),
        }
    }

    /// Ends a request for a disk that is gone, or one of memory that is not the queue's, as no model makes one.
    #[cold]
    fn refuse(&mut self, token: RequestToken, buffers: Buffers, why: Errno, now: Nanos) {
        self.end_request(Completion { token, result: Err(why), buffers }, now);
    }

    /// Takes available chains in. Each has begun when `clock` says so.
    #[inline]
    fn take_in(&mut self, engines: &mut EngineSet, clock: impl Fn() -> Nanos) {
        self.check_truncation();
        self.is_behind = false;
        match self.phase {
            Phase::Running => self.pop_while(engines, clock, |_| true),
            Phase::Stopping if self.recovers() => self.recover(engines, clock()),
            Phase::Stopping | Phase::Broken => {}
        }
    }

    /// Whether it stops, and has to pop what it found in its record before it has stopped. Whoever goes on without the record
    /// has to go on behind all of it: what is left of it need not be what lies there in the ring.
    fn recovers(&self) -> bool {
        self.phase == Phase::Stopping
            && self.stopped.leaving == Some(Leave::Nothing)
            && self.queue.has_recovered()
            && self.takes_chains()
    }

    #[cold]
    #[inline(never)]
    fn recover(&mut self, engines: &mut EngineSet, now: Nanos) {
        self.pop_while(engines, || now, Self::recovers);
    }

    /// Takes available chains in, for as long as `wants` says so.
    #[inline]
    fn pop_while(&mut self, engines: &mut EngineSet, clock: impl Fn() -> Nanos, wants: impl Fn(&Self) -> bool) {
        let (mut bytes, mut steps) = (0, 0);
        // Bounded, because a driver can make chains available as fast as they are popped. The next turn finds what is left:
        // the queue is polled before the loop waits. Where memory is gone each chain takes a fault or more, and so the first is
        // the last; to look for that is a few loads.
        while bytes < TURN_BYTES
            && steps < TURN_STEPS
            && self.takes_chains()
            && wants(self)
            && !self.queue.is_truncated()
        {
            match self.queue.pop(&mut self.chain) {
                Ok(true) => {}
                Ok(false) => return,
                Err(e) => return self.break_queue(&e),
            }
            let now = clock();
            let (head, of_chain) = (self.chain.head(), self.chain.iovecs());
            bytes += self.chain.bytes();
            // Descriptors of no length have a cost, too.
            steps += self.chain.steps();
            match self.model.begin(self.queue.memory(), &mut self.chain, self.source) {
                Ok(Next::Submit(key, request)) => {
                    self.begin(head, of_chain, now);
                    self.push(engines, key, request, now);
                }
                Ok(Next::Complete(completed)) => self.end(&completed, clock() - now),
                Ok(Next::Wait) => self.begin(head, of_chain, now),
                Err(why) => {
                    self.queue.abandon(head);
                    return self.break_queue(&why);
                }
            }
        }
        self.is_behind = self.queue.is_available() && wants(self);
    }

    /// The same with the clock read for each. Compiled apart, so that the choice costs a branch in a dispatch and none in a
    /// request.
    #[cold]
    #[inline(never)]
    fn take_in_by_the_clock(&mut self, engines: &mut EngineSet) {
        self.take_in(engines, clock::now);
    }

    /// Goes on with a chain whose request has ended.
    #[inline]
    fn end_request(&mut self, completion: Completion<Buffers>, now: Nanos) {
        // Before the status is written: in truncated memory it would go to a page of our own that the driver never sees.
        self.check_truncation();
        let next = self.model.end(self.queue.memory(), completion);
        self.go_on(next, now);
    }

    /// Goes on with a chain that has been in flight.
    #[inline]
    fn go_on(&mut self, next: Next, now: Nanos) {
        match next {
            Next::Complete(completed) => {
                let Begun { at, iovecs } = self.begun[usize::from(completed.head)];
                self.iovecs -= iovecs;
                self.end(&completed, now - at);
            }
            Next::Submit(key, request) => self.follow_ups.push((key, request)),
            // The model's, until the alarm rings.
            Next::Wait => {}
        }
    }

    /// Resumes waiting chains if the alarm has rung. No timer is needed: what a chain waits for wakes the queue when it
    /// ends. Where no chain waits this costs one load.
    #[inline]
    fn answer_alarm(&mut self, engines: &mut EngineSet, now: Nanos) {
        if self.alarm.as_ref().is_some_and(|alarm| alarm.answer()) {
            self.resume(now);
            if self.model.takes_back() {
                self.take_back(engines, now);
            }
        }
    }

    #[cold]
    fn resume(&mut self, now: Nanos) {
        // As for completions.
        self.check_truncation();
        let mut resumed = Vec::new();
        self.model.resume(self.queue.memory(), &mut resumed);
        if self.stopped.leaving.is_none() || self.gives_up() {
            // Nobody would come who could do them.
            self.model.end_left(self.queue.memory(), &mut resumed);
        }
        resumed.into_iter().for_each(|next| self.go_on(next, now));
    }

    /// Pushes what came of completions.
    #[cold]
    fn push_follow_ups(&mut self, engines: &mut EngineSet, now: Nanos) {
        // A request that is refused may leave another behind, until its command gives up.
        while let Some((key, request)) = self.follow_ups.pop() {
            if self.is_cut_short(key, &request) {
                self.refuse(request.token, request.buffers, Errno::AGAIN, now);
            } else {
                self.push_again(engines, key, request, now);
            }
        }
    }

    /// Whether a command ends in the place of its next operation, as one that is to be tried again. The queue is drained for good,
    /// which lets go past limits what waits for them: that is an operation of each command, and not all that they come to.
    fn is_cut_short(&self, DiskKey(key): DiskKey, request: &Request<Buffers>) -> bool {
        self.stopped.leaving.is_some()
            // Told to stop as well: until then its limits hold, and what it may leave to the record is there.
            && self.phase != Phase::Running
            && !self.stopped.is
            && request.op != Op::Flush
            && matches!(self.disks.all.get(key as usize), Some(Some(disk)) if disk.throttle_group().is_some())
    }

    /// Has the queue dispatched in the next turn.
    #[cold]
    fn dispatch_again(&self) {
        self.alarm.iter().for_each(|alarm| alarm.wake_by_ref());
    }

    /// Has the queue dispatched at `deadline`, or before: whoever asks for it asks again then.
    #[cold]
    fn wake_at(&mut self, turn: &mut Turn, deadline: Nanos) {
        // One that stops is not looked at any more, and has requests that do not end all the same.
        let is_polled =
            self.fds.kick.is_none() && self.info.kickless == Kickless::Timer && self.phase == Phase::Running;
        let is_set = self.timer > turn.now() && self.timer <= deadline;
        if !is_polled && !is_set {
            self.timer = deadline;
            turn.set_timer(deadline);
        }
    }

    /// Sets the timer by which a queue without a kick descriptor is polled.
    #[cold]
    fn look_again(&mut self, turn: &mut Turn) {
        if self.info.kickless == Kickless::Timer && self.phase == Phase::Running && turn.now() >= self.look_at {
            self.look_at = turn.now() + LOOK_EVERY;
            // In the place of whatever it was set to.
            self.timer = Nanos::ZERO;
            turn.set_timer(self.look_at);
        }
    }

    #[cold]
    fn break_queue(&mut self, why: &dyn Display) {
        self.phase = Phase::Broken;
        self.queue.log_unpublished();
        self.counters.broken.add(1);
        let QueueInfo { log, index, .. } = &self.info;
        log.warn(format_args!("queue {index}: the guest broke the queue, which is stopped: {why}"));
        self.errors.note_broken(*index, why.to_string());
        self.fds.owes_err = true;
    }
}

/// What a loop has it do, as a [`Source`](egret_event_loop::Source).
impl QueueWorker {
    pub(crate) fn attached(&mut self, id: SourceId, engines: &mut EngineSet) -> io::Result<()> {
        self.disks.attach(engines).map_err(io::Error::other)?;
        self.source = id.index();
        // The last loop's timer is not this one's.
        (self.look_at, self.timer) = (Nanos::ZERO, Nanos::ZERO);
        self.alarm = self.home.clone().map(|home| Alarm::new(home, id));
        self.model.set_waker(self.alarm.clone().map(Into::into));
        self.resume_queue(engines);
        Ok(())
    }

    pub(crate) fn detached(&mut self, engines: &mut EngineSet) {
        self.alarm = None;
        self.model.set_waker(None);
        if self.stopped.leaving.is_some() {
            self.let_go();
        }
        self.forget_overdue();
        self.disks.detach(engines);
    }

    pub(crate) fn poll(&mut self) -> bool {
        match self.phase {
            Phase::Running => self.queue.is_available() && self.takes_chains(),
            Phase::Stopping => self.recovers(),
            Phase::Broken => false,
        }
    }

    pub(crate) fn dispatch(&mut self, engines: &mut EngineSet, turn: &mut Turn) {
        self.answer_alarm(engines, turn.now());
        if self.stopped.is || self.errors.is_stopped() {
            self.attend_stop(engines, turn);
        }
        if !self.follow_ups.is_empty() || !self.taken_back.is_empty() {
            self.push_follow_ups(engines, turn.now());
            self.take_up_again(engines, turn.now());
            // What it tries may have ended there, and nothing else tells of that.
            if self.stopped.is {
                self.dispatch_again();
            }
        }
        // Before their heads are others'.
        if self.keeps_places {
            self.give_up_places(engines);
        }
        if self.fds.kick.is_none() {
            self.look_again(turn);
        }
        match turn.clock_reads() {
            ClockReads::ByPhase => {
                let now = turn.now();
                self.take_in(engines, || now);
            }
            ClockReads::ByRequest => self.take_in_by_the_clock(engines),
        }
        if self.overdue.is_some() {
            self.watch(turn);
        }
    }

    pub(crate) fn complete(&mut self, Ended { completion, failed }: Ended, now: Nanos) -> bool {
        let Completion { token, result, buffers } = completion;
        let buffers = self.queue.take_back(buffers);
        let mut completion = Completion { token, result, buffers };
        if failed.is_some() || self.stopped.is {
            match self.judge(completion, failed, now) {
                Some(judged) => completion = judged,
                // It is to be dispatched, because the queue is stopped now.
                None => return true,
            }
        }
        let was_full = !self.takes_chains();
        self.end_request(completion, now);
        // A queue that is stopped looks whether what it tries has ended, and one with places in limits whether that had one.
        !self.follow_ups.is_empty() || was_full || self.stopped.is || self.keeps_places
    }

    pub(crate) fn notify(&mut self, signals: &mut Signals) {
        // Before the driver is told: who has heard of its last request finds none here.
        self.counters.in_flight.set(self.queue.in_flight().into());
        let has_published = std::mem::take(&mut self.used) > 0;
        let wants_call =
            std::mem::take(&mut self.wants_call) | (self.phase != Phase::Broken && self.queue.publish_used());
        let owes_call = std::mem::take(&mut self.fds.owes_call);
        self.counters.calls_spared.add(u64::from(has_published && !wants_call));
        if self.has_caught_up() {
            self.model.caught_up();
        } else if self.leaves_its_ring() {
            self.model.leave_functions();
        } else if !self.takes_chains() {
            // It may be that nothing else makes room.
            self.model.is_full(self.queue.next_available());
        } else {
            self.model.published();
        }
        if has_published && let Some(log) = &self.fds.log {
            signals.push(log.as_fd());
        }
        if wants_call || owes_call {
            self.counters.calls.add(u64::from(wants_call));
            self.fds.call.iter().for_each(|call| call.signal(signals));
        }
        if std::mem::take(&mut self.fds.owes_err) {
            self.fds.err.iter().for_each(|err| signals.push(err.as_fd()));
        }
    }

    /// Whether the queue has popped every chain that was available, or is broken: then functions are looked at, which must find
    /// the commands that were made available before them.
    #[inline]
    fn has_caught_up(&self) -> bool {
        match self.phase {
            Phase::Running => !self.is_behind,
            // What is in its ring is popped when it goes on, with another disk or on another loop; or when it is started again.
            Phase::Stopping => false,
            Phase::Broken => true,
        }
    }

    /// Whether it stops for good, and leaves what is in its ring to whoever serves it next.
    fn leaves_its_ring(&self) -> bool {
        self.phase == Phase::Stopping && self.stopped.leaving.is_some() && !self.recovers()
    }

    pub(crate) fn suppress(&mut self) {
        self.queue.suppress_kicks();
    }

    pub(crate) fn arm(&mut self) -> bool {
        // The model has no use for chains, so kicks can be ignored; the queue is woken when it has.
        if !self.takes_chains() {
            return true;
        }
        match (self.phase, &self.fds.kick) {
            (Phase::Running, Some(_)) => self.queue.arm_kicks(),
            // Without a kick descriptor nothing wakes the loop: it polls on, as the peer asked for, or the timer fires.
            (Phase::Running, None) => self.info.kickless == Kickless::Timer && self.queue.arm_kicks(),
            (Phase::Stopping, _) => !self.recovers(),
            (Phase::Broken, _) => true,
        }
    }

    pub(crate) fn stop(&mut self, engines: &mut EngineSet) {
        if self.stopped.leaving == Some(Leave::NotBegun) && !self.gives_up() {
            self.withdraw(engines);
        }
        self.disks.slots.iter().flatten().for_each(|slot| engines.disable_limits(*slot));
        if self.phase == Phase::Running {
            self.phase = Phase::Stopping;
        }
        self.stopped.is |= self.errors.is_stopped() && !self.gives_up();
    }

    pub(crate) fn resume_queue(&mut self, engines: &mut EngineSet) {
        for slot in self.disks.slots.iter().flatten() {
            engines.enable_limits(*slot);
            // It may be a new one.
            self.pinning().into_iter().for_each(|pinning| engines.pin(*slot, pinning));
        }
        if self.phase == Phase::Stopping {
            self.phase = Phase::Running;
            // Whatever came meanwhile, until it has looked.
            self.is_behind = true;
            // While it stopped its timer was another's.
            self.look_at = Nanos::ZERO;
        }
    }

    pub(crate) fn is_drained(&self) -> bool {
        (self.queue.in_flight() == 0 || self.keeps_all() || self.leaves_all()) && !self.recovers()
    }

    pub(crate) fn descriptor(&self) -> Option<RawFd> {
        self.fds.kick.as_ref().map(|kick| kick.as_fd().as_raw_fd())
    }
}

#[cfg(test)]
pub(crate) mod tests;
