//! A queue worker: one guest's queue, run by one loop.

use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use egret_disk::{Completion, Disk, DiskSlot, EngineError, EngineSet, Request, RequestToken};
use egret_event_loop::{LoopHandle, Nanos, Signals, Source, SourceId, Turn};
use egret_virtio::{DiskKey, Ended, Model, Next};
use egret_vring::memory::Buffers;
use egret_vring::ring::{Chain, Queue, QueueConfig};
use rustix::io::Errno;

use crate::alarm::Alarm;
use crate::peer_log::PeerLog;
use crate::stats::QueueCounters;

/// The descriptors by which a queue's two sides signal each other: eventfds, which the peer owns as much as we do.
#[derive(Default)]
pub(crate) struct VringFds {
    /// The guest made requests available. Without one the queue is looked at by itself.
    pub kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    /// The queue broke.
    pub err: Option<OwnedFd>,
    /// The driver is to be called at the end of the next turn, whatever it asked for.
    owes_call: bool,
    /// The queue broke, and `err` was not signalled yet.
    owes_err: bool,
}

impl VringFds {
    /// Calls the driver here from now on, with used buffers. Soon for the first time: of what was used before, it may have
    /// been told where nobody listened, or by a daemon that died before it did.
    pub(crate) fn set_call(&mut self, fd: Option<OwnedFd>) {
        self.call = fd;
        self.owes_call = true;
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// Takes nothing more in.
    Stopping,
    /// The guest broke the rules of the ring: it gets no more service until it sets the queue up anew.
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

/// What a worker is told of its queue beside the ring.
pub(crate) struct About {
    /// Where it says what its guest did.
    pub log: Arc<PeerLog>,
    /// Its number on the device.
    pub index: usize,
    pub kickless: Kickless,
}

/// A queue takes no more in in a turn when it has taken in chains of so many bytes, or of so many pieces of memory: what a
/// chain costs the loop grows with both, and the other queues of the loop wait meanwhile. So a turn is as long as the
/// loop's queues are many, whatever their drivers ask for: each takes in this much and one chain at most.
const TURN_BYTES: u64 = 1 << 20;
const TURN_PIECES: u32 = 1024;

/// Nor does a queue take chains in while those in flight have so many pieces of memory, which bounds its lists of them:
/// 1 MiB, and twice as many requests of 128 pieces as Linux has in flight on a queue.
const MOST_PIECES: u32 = 65536;

/// How often a queue without a kick descriptor is looked at, at least.
const LOOK_EVERY: Nanos = Nanos::from_millis(1);

/// A chain in flight.
#[derive(Clone, Copy, Default)]
struct Begun {
    /// When it was taken in.
    at: Nanos,
    /// Pieces of guest memory that it has.
    pieces: u32,
}

/// A queue, its device model and its disks, owned by exactly one loop at a time.
///
/// Nothing on its path from kick to call allocates, locks or logs: the chain's and the requests' buffers are reused,
/// and what is counted is counted in counters that nobody else writes.
pub struct Worker {
    about: About,
    queue: Queue,
    model: Model,
    disks: Disks,
    /// Its index on its loop, while it is on one.
    source: u32,
    fds: VringFds,
    chain: Chain,
    /// The chains in flight, by their heads. The queue knows how many there are.
    begun: Vec<Begun>,
    /// Pieces of guest memory that they have.
    pieces: u32,
    /// Requests that came of completions, to be pushed at the next dispatch.
    follow_ups: Vec<(DiskKey, Request<Buffers>)>,
    /// The loop that it is to be attached to.
    home: Option<LoopHandle<Self>>,
    /// Rings when chains that wait may go on, while it is attached.
    alarm: Option<Arc<Alarm<Self>>>,
    phase: Phase,
    /// The last dispatch has left chains in the ring.
    is_behind: bool,
    /// When a queue without a kick descriptor is looked at again.
    look_at: Nanos,
    /// Something was used that the driver has not been shown.
    news: bool,
    counters: Arc<QueueCounters>,
}

/// The disks of a worker's device, by their keys: where they are on the worker's loop, while it is on one.
#[derive(Default)]
pub(crate) struct Disks {
    all: Vec<Option<Arc<Disk>>>,
    slots: Vec<Option<DiskSlot>>,
}

impl Disks {
    /// To be attached.
    pub(crate) fn new(all: Vec<Option<Arc<Disk>>>) -> Self {
        Self { slots: vec![None; all.len()], all }
    }

    #[inline]
    fn slot(&self, DiskKey(key): DiskKey) -> Option<DiskSlot> {
        self.slots.get(key as usize).copied().flatten()
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

impl Worker {
    pub(crate) fn new(
        about: About,
        queue: Queue,
        model: Model,
        disks: Disks,
        fds: VringFds,
        counters: Arc<QueueCounters>,
    ) -> Self {
        let begun = vec![Begun::default(); queue.size().into()];
        Self {
            about,
            queue,
            model,
            disks,
            source: 0,
            fds,
            chain: Chain::default(),
            begun,
            pieces: 0,
            follow_ups: Vec::new(),
            home: None,
            alarm: None,
            phase: Phase::Running,
            is_behind: false,
            look_at: Nanos::ZERO,
            news: false,
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

    /// As [`add_disk`](Self::add_disk), in the place of another; returns where that was, for the engines to let go of it.
    pub(crate) fn replace_disk(&mut self, key: DiskKey, disk: Arc<Disk>, slot: DiskSlot) -> Option<DiskSlot> {
        let old = self.remove_disk(key);
        self.add_disk(key, disk, slot);
        old
    }

    /// Forgets a disk; what still asks for it is told that there is no such device. Returns where it was, for the
    /// engines to let go of it.
    pub(crate) fn remove_disk(&mut self, DiskKey(key): DiskKey) -> Option<DiskSlot> {
        *self.disks.all.get_mut(key as usize)? = None;
        self.disks.slots[key as usize].take()
    }

    /// Stops a drained queue: what it was configured as and where it stands, and the descriptors it was given.
    pub(crate) fn into_parts(self) -> (QueueConfig, VringFds) {
        (self.queue.stop(), self.fds)
    }

    /// Says which loop it is going to be attached to: others wake it there.
    pub(crate) fn set_home(&mut self, home: LoopHandle<Self>) {
        self.home = Some(home);
    }

    pub(crate) const fn fds(&mut self) -> &mut VringFds {
        &mut self.fds
    }

    /// Ends a chain: counts it, and hands it to the driver.
    fn end(&mut self, ended: &Ended, latency: Nanos) {
        self.counters.count(ended, latency);
        if self.phase == Phase::Broken {
            // Its driver is told nothing more. The queue lets go of the chain, and with the last one of the memory.
            self.queue.abandon(ended.head);
        } else {
            self.queue.add_used(ended.head, ended.written);
            self.news = true;
        }
    }

    /// Whether there is a use for another chain, and room for it.
    #[inline]
    fn takes_chains(&self) -> bool {
        self.pieces < MOST_PIECES && self.model.takes_chains()
    }

    /// Counts a chain that is in flight from here on.
    #[inline]
    fn begin(&mut self, head: u16, pieces: u32, now: Nanos) {
        self.begun[usize::from(head)] = Begun { at: now, pieces };
        self.pieces += pieces;
    }

    /// Breaks the queue if its memory was taken away.
    #[inline]
    fn look_for_tears(&mut self) {
        if self.phase != Phase::Broken && self.queue.is_torn() {
            self.break_queue(&"the front-end took its memory away (its file was truncated)");
        }
    }

    /// Gives a request to the engines, with its memory, which the queue lends.
    #[inline]
    fn push(&mut self, engines: &mut EngineSet, key: DiskKey, request: Request<Buffers>, now: Nanos) {
        let Request { op, offset, len, buffers, token } = request;
        let Some(slot) = self.disks.slot(key) else { return self.refuse(token, buffers, Errno::NODEV, now) };
        match self.queue.lend(buffers) {
            Ok(buffers) => engines.push(slot, Request { op, offset, len, buffers, token }),
            Err(buffers) => self.refuse(token, buffers, Errno::FAULT, now),
        }
    }

    /// Ends a request for a disk that is gone, or one of memory that is not the queue's, as no model makes one.
    #[cold]
    fn refuse(&mut self, token: RequestToken, buffers: Buffers, why: Errno, now: Nanos) {
        self.end_request(Completion { token, result: Err(why), buffers }, now);
    }

    /// Goes on with a chain whose request has ended.
    #[inline]
    fn end_request(&mut self, completion: Completion<Buffers>, now: Nanos) {
        // Its driver is told nothing more where memory was taken away: what would tell it is a page of our own by now.
        self.look_for_tears();
        let next = self.model.end(self.queue.memory(), completion);
        self.go_on(next, now);
    }

    /// Goes on with a chain that has been in flight.
    #[inline]
    fn go_on(&mut self, next: Next, now: Nanos) {
        match next {
            Next::Done(ended) => {
                let Begun { at, pieces } = self.begun[usize::from(ended.head)];
                self.pieces -= pieces;
                self.end(&ended, now - at);
            }
            Next::Submit(key, request) => self.follow_ups.push((key, request)),
            // The model's, until the alarm rings.
            Next::Wait => {}
        }
    }

    /// Goes on with chains that need not wait any more, where somebody says that there are some. No timer does: who is
    /// in a chain's way wakes the queue. Without chains that wait this is one look at the alarm.
    #[inline]
    fn answer_alarm(&mut self, now: Nanos) {
        if self.alarm.as_ref().is_some_and(|alarm| alarm.answer()) {
            self.resume(now);
        }
    }

    #[cold]
    fn resume(&mut self, now: Nanos) {
        // As for completions.
        self.look_for_tears();
        let mut resumed = Vec::new();
        self.model.resume(self.queue.memory(), &mut resumed);
        resumed.into_iter().for_each(|next| self.go_on(next, now));
    }

    /// Pushes what came of completions.
    #[cold]
    fn push_follow_ups(&mut self, engines: &mut EngineSet, now: Nanos) {
        // A request that is refused may leave another behind, until its command gives up.
        while let Some((key, request)) = self.follow_ups.pop() {
            self.push(engines, key, request, now);
        }
    }

    /// Has a queue that nobody kicks looked at again.
    #[cold]
    fn look_again(&mut self, turn: &mut Turn<'_, Self>) {
        if self.about.kickless == Kickless::Timer && self.phase == Phase::Running && turn.now() >= self.look_at {
            self.look_at = turn.now() + LOOK_EVERY;
            turn.set_timer(self.look_at);
        }
    }

    #[cold]
    fn break_queue(&mut self, why: &dyn Display) {
        self.phase = Phase::Broken;
        self.counters.broken.add(1);
        let About { log, index, .. } = &self.about;
        log.warn(format_args!("queue {index}: the guest broke the queue, which is stopped: {why}"));
        self.fds.owes_err = true;
    }
}

/// Has whoever waits for `fd` woken.
fn signal(signals: &mut Signals, fd: Option<&OwnedFd>) {
    if let Some(fd) = fd {
        signals.push(fd.as_fd());
    }
}

impl Source for Worker {
    type Backend = EngineSet;

    fn route(completion: &Completion) -> u32 {
        completion.token.source()
    }

    fn attached(&mut self, id: SourceId, engines: &mut EngineSet) -> io::Result<()> {
        self.disks.attach(engines).map_err(io::Error::other)?;
        self.source = id.index();
        // The last loop's timer is not this one's.
        self.look_at = Nanos::ZERO;
        self.alarm = self.home.clone().map(|home| Alarm::new(home, id));
        self.model.set_waker(self.alarm.clone().map(Into::into));
        Source::resume(self, engines);
        Ok(())
    }

    fn detached(&mut self, engines: &mut EngineSet) {
        self.alarm = None;
        self.model.set_waker(None);
        self.disks.detach(engines);
    }

    fn poll(&mut self) -> bool {
        self.phase == Phase::Running && self.queue.is_available() && self.takes_chains()
    }

    fn dispatch(&mut self, engines: &mut EngineSet, turn: &mut Turn<'_, Self>) {
        self.answer_alarm(turn.now());
        if !self.follow_ups.is_empty() {
            self.push_follow_ups(engines, turn.now());
        }
        if self.fds.kick.is_none() {
            self.look_again(turn);
        }
        self.look_for_tears();
        self.is_behind = false;
        if self.phase != Phase::Running {
            return;
        }
        let (mut bytes, mut pieces) = (0, 0);
        // Not until there is no more: a driver can make chains available as fast as they are popped. What is left is found
        // by the next turn, since the queue is polled before the loop waits.
        while bytes < TURN_BYTES && pieces < TURN_PIECES && self.takes_chains() {
            match self.queue.pop(&mut self.chain) {
                Ok(true) => {}
                Ok(false) => return,
                Err(e) => return self.break_queue(&e),
            }
            let (head, of_chain) = (self.chain.head(), self.chain.pieces());
            bytes += self.chain.bytes();
            // One that has none costs something, too.
            pieces += of_chain.max(1);
            match self.model.begin(self.queue.memory(), &mut self.chain, self.source) {
                Ok(Next::Submit(key, request)) => {
                    self.begin(head, of_chain, turn.now());
                    self.push(engines, key, request, turn.now());
                }
                Ok(Next::Done(ended)) => self.end(&ended, Nanos::ZERO),
                Ok(Next::Wait) => self.begin(head, of_chain, turn.now()),
                Err(why) => {
                    self.queue.abandon(head);
                    return self.break_queue(&why);
                }
            }
        }
        self.is_behind = self.queue.is_available();
    }

    fn complete(&mut self, completion: Completion, now: Nanos) -> bool {
        let Completion { token, result, buffers } = completion;
        let buffers = self.queue.take_back(buffers);
        let was_full = !self.takes_chains();
        self.end_request(Completion { token, result, buffers }, now);
        !self.follow_ups.is_empty() || was_full
    }

    fn notify(&mut self, signals: &mut Signals) {
        let has_news = std::mem::take(&mut self.news);
        let wants_call = self.phase != Phase::Broken && self.queue.publish();
        let owes_call = std::mem::take(&mut self.fds.owes_call);
        self.counters.in_flight.set(self.queue.in_flight().into());
        self.counters.calls_spared.add(u64::from(has_news && !wants_call));
        // A function about commands that the driver had made available before is to find them: they are taken in first, by a
        // queue that takes any in.
        if !(self.is_behind && self.phase == Phase::Running) {
            self.model.caught_up();
        }
        if wants_call || owes_call {
            self.counters.calls.add(u64::from(wants_call));
            signal(signals, self.fds.call.as_ref());
        }
        if std::mem::take(&mut self.fds.owes_err) {
            signal(signals, self.fds.err.as_ref());
        }
    }

    fn suppress(&mut self) {
        self.queue.suppress_kicks();
    }

    fn arm(&mut self) -> bool {
        // Whoever wants a chain wakes us: until then the driver's kicks are no news.
        if !self.takes_chains() {
            return true;
        }
        match (self.phase, &self.fds.kick) {
            (Phase::Running, Some(_)) => self.queue.arm_kicks(),
            // Nobody will tell: look for ever, as the peer asked for, or until the timer fires.
            (Phase::Running, None) => self.about.kickless == Kickless::Timer && self.queue.arm_kicks(),
            _ => true,
        }
    }

    fn stop(&mut self, engines: &mut EngineSet) {
        self.disks.slots.iter().flatten().for_each(|slot| engines.disable_limits(*slot));
        if self.phase == Phase::Running {
            self.phase = Phase::Stopping;
        }
    }

    fn resume(&mut self, engines: &mut EngineSet) {
        self.disks.slots.iter().flatten().for_each(|slot| engines.enable_limits(*slot));
        if self.phase == Phase::Stopping {
            self.phase = Phase::Running;
        }
    }

    fn is_drained(&self) -> bool {
        self.queue.in_flight() == 0
    }

    fn descriptor(&self) -> Option<RawFd> {
        self.fds.kick.as_ref().map(AsRawFd::as_raw_fd)
    }
}
