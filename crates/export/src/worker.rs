//! A queue worker: one guest's queue, run by one loop.

use std::fmt::Display;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use egret_disk::{Completion, Disk, DiskSlot, Engines, Token};
use egret_event_loop::{Nanos, Source, SourceId, Turn};
use egret_virtio::ring::{Chain, Queue, QueueConfig};
use egret_virtio::{Begin, Ended, Model, head_of};

use crate::stats::QueueStats;

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

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// Takes nothing more in.
    Stopping,
    /// The guest broke the rules of the ring: it gets no more service until it sets the queue up anew.
    Broken,
}

/// A queue, its device model and its disk, owned by exactly one loop at a time.
///
/// Nothing on its path from kick to call allocates, locks or logs: the chain's and the requests' buffers are reused,
/// and what is counted is counted in plain fields that nobody else reads.
pub struct Worker {
    name: String,
    queue: Queue,
    model: Box<dyn Model>,
    disk: Arc<Disk>,
    slot: Option<DiskSlot>,
    token_base: u64,
    signals: Signals,
    chain: Chain,
    /// When each request in flight was taken in, by its head.
    begun: Vec<Nanos>,
    in_flight: u32,
    phase: Phase,
    stats: QueueStats,
}

impl Worker {
    pub(crate) fn new(name: String, queue: Queue, model: Box<dyn Model>, disk: Arc<Disk>, signals: Signals) -> Self {
        let begun = vec![Nanos::ZERO; queue.size().into()];
        Self {
            name,
            queue,
            model,
            disk,
            slot: None,
            token_base: 0,
            signals,
            chain: Chain::default(),
            begun,
            in_flight: 0,
            phase: Phase::Running,
            stats: QueueStats::default(),
        }
    }

    /// What the queue has counted since it was set up.
    pub const fn stats(&self) -> &QueueStats {
        &self.stats
    }

    /// Stops a drained queue: what it was configured as and where it stands, and the descriptors it was given.
    pub(crate) fn into_parts(self) -> (QueueConfig, Signals, QueueStats) {
        (self.queue.stop(), self.signals, self.stats)
    }

    pub(crate) const fn signals(&mut self) -> &mut Signals {
        &mut self.signals
    }

    /// Ends a chain: counts it, and hands it to the driver.
    fn end(&mut self, ended: &Ended, latency: Nanos) {
        self.stats.count(ended, latency);
        if self.phase != Phase::Broken {
            self.queue.add_used(ended.head, ended.written);
        }
    }

    #[cold]
    fn break_queue(&mut self, why: &dyn Display) {
        self.phase = Phase::Broken;
        self.stats.broken += 1;
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
        self.slot = Some(engines.attach(&self.disk).map_err(io::Error::other)?);
        self.token_base = u64::from(id.index()) << HEAD_BITS;
        if self.phase == Phase::Stopping {
            self.phase = Phase::Running;
        }
        Ok(())
    }

    fn detached(&mut self, engines: &mut Engines) {
        if let Some(slot) = self.slot.take() {
            engines.detach(slot);
        }
    }

    fn poll(&mut self) -> bool {
        self.phase == Phase::Running && self.queue.is_available()
    }

    fn dispatch(&mut self, engines: &mut Engines, turn: &mut Turn<'_, Self>) {
        let (Phase::Running, Some(slot)) = (self.phase, self.slot) else { return };
        if self.queue.memory().is_torn() {
            self.break_queue(&"the front-end took its memory away (its file was truncated)");
            return;
        }
        // A driver can make chains available as fast as they are popped: one queue's worth a turn.
        for _ in 0..self.queue.size() {
            match self.queue.pop(&mut self.chain) {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => return self.break_queue(&e),
            }
            let head = self.chain.head();
            match self.model.begin(self.queue.memory(), &mut self.chain, Token(self.token_base)) {
                Begin::Submit(request) => {
                    self.begun[usize::from(head)] = turn.now();
                    self.in_flight += 1;
                    engines.push(slot, request);
                }
                Begin::Done(ended) => self.end(&ended, Nanos::ZERO),
                Begin::Broken(why) => {
                    self.queue.abandon(head);
                    return self.break_queue(&why);
                }
            }
        }
    }

    fn complete(&mut self, completion: Completion, now: Nanos) {
        self.in_flight -= 1;
        let begun = self.begun[usize::from(head_of(completion.token))];
        let ended = self.model.end(self.queue.memory(), completion);
        self.end(&ended, now - begun);
    }

    fn notify(&mut self) {
        if self.phase != Phase::Broken && self.queue.publish() {
            self.stats.calls += 1;
            signal(self.signals.call.as_ref());
        }
    }

    fn suppress(&mut self) {
        self.queue.suppress_kicks();
    }

    fn arm(&mut self) -> bool {
        match (self.phase, &self.signals.kick) {
            (Phase::Running, Some(_)) => self.queue.arm_kicks(),
            // Nobody will tell: look for ever, as the peer asked for.
            (Phase::Running, None) => false,
            _ => true,
        }
    }

    fn stop(&mut self) {
        if self.phase == Phase::Running {
            self.phase = Phase::Stopping;
        }
    }

    fn is_drained(&self) -> bool {
        self.in_flight == 0
    }

    fn descriptor(&self) -> Option<RawFd> {
        self.signals.kick.as_ref().map(AsRawFd::as_raw_fd)
    }
}
