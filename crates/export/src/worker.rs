//! A queue worker: one guest's queue, run by one loop.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use egret_disk::{Completion, Disk, DiskSlot, EngineError, Engines, Request, Token};
use egret_event_loop::{Nanos, Source, SourceId, Turn};
use egret_virtio::ring::{Chain, Queue, QueueConfig};
use egret_virtio::{DiskKey, Ended, Model, Next, Progress, head_of, token_of};
use rustix::io::Errno;

use crate::stats::QueueCounters;

/// Bits of a token that name the request within its queue; the bits above name the worker.
const HEAD_BITS: u32 = 16;

/// The descriptors by which a queue's two sides call each other.
#[derive(Default)]
pub(crate) struct Signals {
    /// The guest made requests available. Without one the queue is polled for ever.
    pub kick: Option<OwnedFd>,
    /// Requests were used.
    pub call: Option<OwnedFd>,
    /// The queue broke.
    pub err: Option<OwnedFd>,
}

impl Signals {
    /// Calls the driver here from now on. At once for the first time: of what was used before, it may have been told
    /// where nobody listened, or by a daemon that died before it did.
    pub(crate) fn set_call(&mut self, fd: Option<OwnedFd>) {
        signal(fd.as_ref());
        self.call = fd;
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

/// Chains that wait are tried again so often, should nothing of the queue end meanwhile.
const RETRY: Nanos = Nanos::from_millis(1);

/// A queue, its device model and its disks, owned by exactly one loop at a time.
///
/// Nothing on its path from kick to call allocates, locks or logs: the chain's and the requests' buffers are reused,
/// and what is counted is counted in counters that nobody else writes.
pub struct Worker {
    name: String,
    queue: Queue,
    model: Box<dyn Model>,
    /// The model's [`wanted`](Model::wanted).
    wanted: Option<Arc<AtomicU32>>,
    /// The model's [`progress`](Model::progress).
    progress: Option<Arc<Progress>>,
    disks: Disks,
    token_base: u64,
    signals: Signals,
    chain: Chain,
    /// When each chain in flight was taken in, by its head.
    begun: Vec<Nanos>,
    /// Requests that came of completions, to be pushed at the next dispatch.
    follow_ups: Vec<(DiskKey, Request)>,
    /// Chains that wait, the oldest first.
    waiting: VecDeque<Token>,
    in_flight: u32,
    phase: Phase,
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

    fn attach(&mut self, engines: &mut Engines) -> Result<(), EngineError> {
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

    fn detach(&mut self, engines: &mut Engines) {
        self.slots.iter_mut().filter_map(Option::take).for_each(|slot| engines.detach(slot));
    }
}

impl Worker {
    pub(crate) fn new(
        name: String,
        queue: Queue,
        model: Box<dyn Model>,
        disks: Disks,
        signals: Signals,
        counters: Arc<QueueCounters>,
    ) -> Self {
        let begun = vec![Nanos::ZERO; queue.size().into()];
        Self {
            name,
            queue,
            wanted: model.wanted(),
            progress: model.progress(),
            model,
            disks,
            token_base: 0,
            signals,
            chain: Chain::default(),
            begun,
            follow_ups: Vec::new(),
            waiting: VecDeque::new(),
            in_flight: 0,
            phase: Phase::Running,
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
    pub(crate) fn into_parts(self) -> (QueueConfig, Signals) {
        (self.queue.stop(), self.signals)
    }

    pub(crate) const fn signals(&mut self) -> &mut Signals {
        &mut self.signals
    }

    /// Ends a chain: counts it, and hands it to the driver.
    fn end(&mut self, ended: &Ended, latency: Nanos) {
        self.counters.count(ended, latency);
        if self.phase != Phase::Broken {
            self.queue.add_used(ended.head, ended.written);
            self.news = true;
        }
    }

    /// Whether there is a use for another chain.
    #[inline]
    fn is_wanted(&self) -> bool {
        self.wanted.as_ref().is_none_or(|wanted| wanted.load(Ordering::Acquire) > 0)
    }

    /// Gives a request to the engines.
    #[inline]
    fn push(&mut self, engines: &mut Engines, key: DiskKey, request: Request, now: Nanos) {
        match self.disks.slot(key) {
            Some(slot) => engines.push(slot, request),
            None => self.refuse(request, now),
        }
    }

    /// Ends a request for a disk that is gone.
    #[cold]
    fn refuse(&mut self, request: Request, now: Nanos) {
        let Request { token, buffers, .. } = request;
        self.complete(Completion { token, result: Err(Errno::NODEV), buffers }, now);
    }

    /// Goes on with the chain of `token`, which has been in flight.
    #[inline]
    fn go_on(&mut self, token: Token, next: Next, now: Nanos) {
        match next {
            Next::Done(ended) => {
                self.in_flight -= 1;
                let begun = self.begun[usize::from(head_of(token))];
                self.end(&ended, now - begun);
            }
            Next::Submit(key, request) => self.follow_ups.push((key, request)),
            Next::Wait => self.waiting.push_back(token),
        }
    }

    /// Whether something is to be pushed or tried again.
    #[inline]
    fn has_more(&self) -> bool {
        !self.follow_ups.is_empty() || !self.waiting.is_empty()
    }

    /// Pushes what came of completions, and has another try at what waits.
    #[cold]
    fn resume(&mut self, engines: &mut Engines, turn: &mut Turn<'_, Self>) {
        let now = turn.now();
        for _ in 0..self.waiting.len() {
            let Some(token) = self.waiting.pop_front() else { break };
            let next = self.model.retry(self.queue.memory(), token);
            self.go_on(token, next, now);
        }
        // A request that is refused may leave another behind, until its command gives up.
        while let Some((key, request)) = self.follow_ups.pop() {
            self.push(engines, key, request, now);
        }
        if !self.waiting.is_empty() {
            turn.set_timer(now + RETRY);
        }
    }

    #[cold]
    fn break_queue(&mut self, why: &dyn Display) {
        self.phase = Phase::Broken;
        self.counters.broken.add(1);
        tracing::warn!("{}: the guest broke the queue, which is stopped: {why}", self.name);
        signal(self.signals.err.as_ref());
    }
}

/// Wakes whoever waits for `fd`, which was made non-blocking when the peer gave it.
fn signal(fd: Option<&OwnedFd>) {
    if let Some(fd) = fd {
        // It fails only when the counter is full, and then a wake-up is on its way.
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
    }
}

impl Source for Worker {
    type Backend = Engines;

    fn route(completion: &Completion) -> u32 {
        (completion.token.0 >> HEAD_BITS) as u32
    }

    fn attached(&mut self, id: SourceId, engines: &mut Engines) -> io::Result<()> {
        self.disks.attach(engines).map_err(io::Error::other)?;
        self.token_base = u64::from(id.index()) << HEAD_BITS;
        Source::resume(self, engines);
        Ok(())
    }

    fn detached(&mut self, engines: &mut Engines) {
        self.disks.detach(engines);
    }

    fn poll(&mut self) -> bool {
        self.phase == Phase::Running && self.queue.is_available() && self.is_wanted()
    }

    fn dispatch(&mut self, engines: &mut Engines, turn: &mut Turn<'_, Self>) {
        if self.has_more() {
            self.resume(engines, turn);
        }
        if self.phase != Phase::Running {
            return;
        }
        if self.queue.is_torn() {
            self.break_queue(&"the front-end took its memory away (its file was truncated)");
            return;
        }
        let waited = self.waiting.len();
        // A driver can make chains available as fast as they are popped: one queue's worth a turn.
        for _ in 0..self.queue.size() {
            if !self.is_wanted() {
                break;
            }
            match self.queue.pop(&mut self.chain) {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => return self.break_queue(&e),
            }
            let head = self.chain.head();
            match self.model.begin(self.queue.memory(), &mut self.chain, Token(self.token_base)) {
                Ok(Next::Submit(key, request)) => {
                    self.begun[usize::from(head)] = turn.now();
                    self.in_flight += 1;
                    self.push(engines, key, request, turn.now());
                }
                Ok(Next::Done(ended)) => self.end(&ended, Nanos::ZERO),
                Ok(Next::Wait) => {
                    self.begun[usize::from(head)] = turn.now();
                    self.in_flight += 1;
                    self.waiting.push_back(token_of(Token(self.token_base), head));
                }
                Err(why) => {
                    self.queue.abandon(head);
                    return self.break_queue(&why);
                }
            }
        }
        if self.waiting.len() > waited {
            turn.set_timer(turn.now() + RETRY);
        }
    }

    fn complete(&mut self, completion: Completion, now: Nanos) -> bool {
        let token = completion.token;
        let next = self.model.end(self.queue.memory(), completion);
        self.go_on(token, next, now);
        self.has_more()
    }

    fn notify(&mut self) {
        let has_news = std::mem::take(&mut self.news);
        let wants_call = self.phase != Phase::Broken && self.queue.publish();
        self.counters.in_flight.set(self.in_flight.into());
        self.counters.calls_spared.add(u64::from(has_news && !wants_call));
        if let Some(progress) = &self.progress {
            progress.show();
        }
        if wants_call {
            self.counters.calls.add(1);
            signal(self.signals.call.as_ref());
        }
    }

    fn suppress(&mut self) {
        self.queue.suppress_kicks();
    }

    fn arm(&mut self) -> bool {
        // Whoever wants a chain wakes us: until then the driver's kicks are no news.
        if !self.is_wanted() {
            return true;
        }
        match (self.phase, &self.signals.kick) {
            (Phase::Running, Some(_)) => self.queue.arm_kicks(),
            // Nobody will tell: look for ever, as the peer asked for.
            (Phase::Running, None) => false,
            _ => true,
        }
    }

    fn stop(&mut self, engines: &mut Engines) {
        self.disks.slots.iter().flatten().for_each(|slot| engines.lift_limits(*slot));
        if self.phase == Phase::Running {
            self.phase = Phase::Stopping;
        }
    }

    fn resume(&mut self, engines: &mut Engines) {
        self.disks.slots.iter().flatten().for_each(|slot| engines.limit_again(*slot));
        if self.phase == Phase::Stopping {
            self.phase = Phase::Running;
        }
    }

    fn is_drained(&self) -> bool {
        self.in_flight == 0
    }

    fn descriptor(&self) -> Option<RawFd> {
        self.signals.kick.as_ref().map(AsRawFd::as_raw_fd)
    }
}
