//! The turn.
//!
//! ```text
//! loop {
//!     wait       spin while the policy says so, then arm everything, look once more, block in the monitor
//!     reap       completions go to their sources
//!     dispatch   every ready source: pop, parse, push
//!     submit     the engines, once
//!     notify     the guests, once per touched source
//!     learn      from the wait, now that nobody waits for it
//! }
//! ```
//!
//! What keeps the hot path free of allocation: every list is emptied, never dropped, and grows only with the number
//! of sources. What keeps it free of locks and system calls: a mailbox is opened only when its doorbell rang, and the
//! monitor is called only to block, or where it alone can tell that an idle source has work.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use egret_polling::trace::Trace;
use egret_polling::{BlockCost, Idleness, Nanos, Policy};

use crate::calibrate::Strain;
use crate::entry::{Entry, MAILBOX, backend_key, key, slot};
use crate::mailbox::Mailbox;
use crate::monitor::{self, Key, Monitor, MonitorChoice};
use crate::polling::Polling;
use crate::ring::SharedRing;
use crate::source::Command;
use crate::sources::Sources;
use crate::timers::Timers;
use crate::{Backend, Calibration, ClockReads, LoopCounters, Phase, Signals, Source, SourceId, Turn, clock};

/// How a loop is to be.
pub struct LoopOptions {
    /// Its name, for the log; its thread's name where it has one of its own.
    pub name: String,
    /// The monitor to use.
    pub monitor: MonitorChoice,
    /// Decides how long it spins. If it weighs what blocking costs, a thread of the loop's own finds that out before its
    /// first turn.
    pub policy: Box<dyn Policy>,
    /// The largest window the policy may choose; only counted against.
    pub window_max: Nanos,
    /// A source without an event for so long is left to the monitor.
    pub idle_after: Nanos,
    /// How often it reads the clock for its sources' requests.
    pub clock_reads: ClockReads,
}

/// One thread's loop: its sources, the engines they share, and how it waits.
pub struct EventLoop<S: Source> {
    name: String,
    pub(crate) backend: S::Backend,
    backend_fds: Vec<RawFd>,
    pub(crate) monitor: Box<dyn Monitor>,
    monitor_name: MonitorChoice,
    pub(crate) monitor_asked: Nanos,
    pub(crate) ring: Option<SharedRing>,
    pub(crate) polling: Polling,
    idleness: Idleness,
    clock_reads: ClockReads,
    pub(crate) mailbox: Arc<Mailbox<Command<S>>>,
    pub(crate) timers: Timers,
    pub(crate) sources: Sources<S>,
    signals: Signals,
    pub(crate) completed: bool,
    pub(crate) reports: Vec<Key>,
    pub(crate) now: Nanos,
    stopping: bool,
}

impl<S: Source> Drop for EventLoop<S> {
    fn drop(&mut self) {
        self.mailbox.close();
    }
}

impl<S: Source> EventLoop<S> {
    /// Makes a loop on the calling thread, which is to run it. `backend` is given the loop's ring, if it has one.
    ///
    /// # Errors
    ///
    /// No descriptors left, or a monitor was asked for that does not work here.
    pub fn new(options: LoopOptions, backend: impl FnOnce(Option<SharedRing>) -> S::Backend) -> io::Result<Self> {
        let opened = monitor::open(options.monitor, &options.name)?;
        let mailbox = Arc::new(Mailbox::new()?);
        let mut new = Self {
            name: options.name,
            backend: backend(opened.ring.clone()),
            backend_fds: Vec::new(),
            monitor: opened.monitor,
            monitor_name: opened.name,
            monitor_asked: Nanos::ZERO,
            ring: opened.ring,
            polling: Polling::new(options.policy, options.window_max),
            idleness: Idleness::new(options.idle_after),
            clock_reads: options.clock_reads,
            mailbox,
            timers: Timers::default(),
            sources: Sources::new(),
            signals: Signals::new()?,
            completed: false,
            reports: Vec::new(),
            now: clock::now(),
            stopping: false,
        };
        new.monitor.add(new.mailbox.wake.as_raw_fd(), key(MAILBOX, 0))?;
        new.watch_backend()?;
        Ok(new)
    }

    /// The monitor in use, never [`MonitorChoice::Auto`].
    pub const fn monitor_name(&self) -> MonitorChoice {
        self.monitor_name
    }

    /// The engines.
    pub const fn backend(&mut self) -> &mut S::Backend {
        &mut self.backend
    }

    /// The loop's counters; any thread may read them.
    pub fn counters(&self) -> &Arc<LoopCounters> {
        &self.polling.counters
    }

    /// A source on this loop.
    pub fn source(&mut self, id: SourceId) -> Option<&mut S> {
        self.sources.get(id).map(|entry| &mut entry.source)
    }

    /// Every source on this loop.
    pub fn sources(&self) -> impl Iterator<Item = &S> {
        self.sources.iter()
    }

    /// Waits are decided by `policy` from here on, which begins with nothing learned.
    pub fn set_policy(&mut self, policy: Box<dyn Policy>, window_max: Nanos) {
        self.polling.set_policy(policy, window_max);
    }

    /// What blocking costs on this thread, as far as it is known.
    pub fn block_cost(&self) -> Option<BlockCost> {
        self.polling.block_cost()
    }

    /// Tells the policy what blocking costs, and keeps correcting it from here on by how this loop's thread fares.
    pub(crate) fn set_calibration(&mut self, calibration: Calibration, strain: Strain) {
        self.polling.set_calibration(calibration, strain);
    }

    /// Records waits from here on: the newest `capacity` of them, in memory that is taken now.
    pub fn record_waits(&mut self, capacity: usize) {
        self.polling.record(capacity);
    }

    /// Ends the recording and returns it, with a line about where it was made.
    pub fn take_recording(&mut self, note: String) -> Option<Trace> {
        let block = self.block_cost().unwrap_or_default();
        Some(self.polling.take_recording()?.into_trace(note, block))
    }

    /// Sources without an event for so long are left to the monitor from here on.
    pub const fn set_idle_after(&mut self, idle_after: Nanos) {
        self.idleness.set_after(idle_after);
    }

    /// How often the clock is read for requests.
    pub const fn clock_reads(&self) -> ClockReads {
        self.clock_reads
    }

    /// The clock is read so often for requests from here on.
    pub const fn set_clock_reads(&mut self, reads: ClockReads) {
        self.clock_reads = reads;
    }

    /// Takes a source in.
    ///
    /// # Errors
    ///
    /// What the source or its descriptor will not do; the source comes back as it was.
    pub fn attach(&mut self, mut source: S) -> Result<SourceId, (S, io::Error)> {
        let id = self.sources.reserve();
        if let Err(e) = source.attached(id, &mut self.backend) {
            self.sources.give_back(id);
            return Err((source, e));
        }
        let fd = source.descriptor();
        if let Some(Err(e)) = fd.map(|fd| self.monitor.add(fd, key(id.index, id.generation))) {
            source.detached(&mut self.backend);
            self.sources.give_back(id);
            return Err((source, e));
        }
        self.sources.insert(id, source, fd, self.now);
        // What the outside did before this moment may have gone untold: look at the source once, by itself.
        self.sources.mark_ready(id.index);
        Ok(id)
    }

    /// Has a source take nothing more in, and runs `then` when nothing of it is in flight. Replaces what was to run
    /// before; runs nothing if there is no such source.
    pub fn quiesce(&mut self, id: SourceId, then: impl FnOnce(&mut Self) + Send + 'static) {
        let Some(entry) = self.sources.get(id) else { return };
        entry.source.stop(&mut self.backend);
        entry.drained = Some(Box::new(then));
        self.sources.touch(id.index);
    }

    /// Takes back a [`quiesce`](Self::quiesce), whether it has come to its end or not: the source goes on. False if it
    /// is not here any more.
    pub fn resume(&mut self, id: SourceId) -> bool {
        let Some(entry) = self.sources.get(id) else { return false };
        entry.drained = None;
        entry.source.resume(&mut self.backend);
        self.sources.mark_ready(id.index);
        true
    }

    /// Lets go of a source when it is drained, and gives it to `to`; what is in flight ends first. Nothing happens if
    /// there is no such source.
    pub fn detach(&mut self, id: SourceId, to: impl FnOnce(S) + Send + 'static) {
        self.quiesce(id, move |target| {
            if let Some(source) = target.take(id) {
                to(source);
            }
        });
    }

    /// Has a source dispatched, for a reason that shows neither on its descriptor nor to its poll.
    pub fn wake(&mut self, id: SourceId) {
        if self.sources.get(id).is_some() {
            self.sources.mark_ready(id.index);
        }
    }

    /// The loop returns from [`run`](Self::run) at the end of this turn.
    pub const fn stop(&mut self) {
        self.stopping = true;
    }

    /// Takes turns until stopped.
    ///
    /// # Errors
    ///
    /// Only what a monitor cannot recover from.
    pub fn run(&mut self) -> io::Result<()> {
        while !self.stopping {
            self.turn()?;
        }
        Ok(())
    }

    /// One turn.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn turn(&mut self) -> io::Result<()> {
        self.wait()?;
        self.polling.counters.turns.add(1);
        self.reap();
        self.dispatch();
        self.polling.counters.enter(Phase::Submitting);
        self.backend.submit(self.now);
        // An engine that completes in its submission is not worth a turn of its own.
        if self.backend.has_completions() {
            // The submission is part of the time that they took.
            self.now = clock::now();
            self.reap();
            // What they take up again by themselves, or give to one another, nobody would hand on while the loop sleeps.
            self.polling.counters.enter(Phase::Submitting);
            self.backend.submit(self.now);
        }
        self.notify();
        self.polling.learn(self.now);
        self.demote_idle();
        self.polling.counters.enter(Phase::Waiting);
        Ok(())
    }

    fn reap(&mut self) {
        self.polling.counters.enter(Phase::Reaping);
        let now = self.now;
        // Compiled apart, so that the choice costs a branch in a phase and none in a request.
        match self.clock_reads {
            ClockReads::ByPhase => self.reap_at(|| now),
            ClockReads::ByRequest => self.reap_at(clock::now),
        }
        self.completed = false;
        if self.backend.takes_leave() {
            self.look_for_engines();
        }
    }

    /// Gives their completions to the sources, each with the time that `clock` shows.
    fn reap_at(&mut self, clock: impl Fn() -> Nanos) {
        let Self { backend, sources, polling, now, .. } = self;
        let Sources { entries, active, ready, touched, .. } = sources;
        backend.reap(*now, &mut |completion| {
            polling.completed = polling.completed.saturating_add(1);
            let index = S::route(&completion);
            if let Some(Some(entry)) = entries.get_mut(index as usize) {
                if entry.source.complete(completion, clock()) {
                    entry.mark_ready(index, active, ready);
                }
                entry.touch(index, touched);
            }
        });
    }

    fn dispatch(&mut self) {
        self.polling.counters.enter(Phase::Dispatching);
        while let Some((id, deadline)) = self.timers.expire(self.now) {
            if let Some(entry) = self.sources.get(id)
                && entry.timer == Some(deadline)
            {
                entry.timer = None;
                self.sources.mark_ready(id.index);
            }
        }
        let Sources { entries, active, ready, touched, .. } = &mut self.sources;
        for index in ready.drain(..) {
            let Some(entry) = &mut entries[index as usize] else { continue };
            entry.ready = false;
            if entry.active {
                entry.last_event = self.now;
                entry.suppress();
            }
            let mut turn = Turn { now: self.now, clock_reads: self.clock_reads, timer: None };
            entry.source.dispatch(&mut self.backend, &mut turn);
            if let Some(deadline) = turn.timer {
                entry.timer = Some(deadline);
                self.timers.set(SourceId { index, generation: entry.generation }, deadline);
            }
            entry.touch(index, touched);
            // An idle source was reported ready: it becomes active only if there is more work by the time it is rearmed.
            if !entry.active && !entry.rearm() {
                entry.active = true;
                entry.last_event = self.now;
                active.push(index);
            }
        }
        if self.mailbox.bell.rang() {
            self.run_commands();
        }
    }

    #[cold]
    fn run_commands(&mut self) {
        let commands = self.mailbox.take();
        self.run_all(commands);
    }

    /// Runs commands, which may bring engines in or have them leave, change the policy, or take sources away that the last
    /// wait is to be learned of.
    fn run_all(&mut self, commands: Vec<Command<S>>) {
        self.polling.learn(self.now);
        commands.into_iter().for_each(|command| command(self));
        self.look_for_engines();
    }

    #[cold]
    fn look_for_engines(&mut self) {
        if let Err(e) = self.watch_backend() {
            tracing::error!("iothread '{}': cannot watch an engine's completions: {e}", self.name);
        }
    }

    fn notify(&mut self) {
        self.polling.counters.enter(Phase::Notifying);
        loop {
            let drained = self.sources.notify(&mut self.signals);
            // Before a source can go, and its descriptors with it.
            self.signals.submit();
            if !drained {
                break;
            }
            // Which may touch others that are drained.
            self.end_drains();
        }
        self.sources.touched.clear();
    }

    /// Runs what was left by [`quiesce`](Self::quiesce) for sources that are drained now.
    #[cold]
    fn end_drains(&mut self) {
        let Sources { entries, touched, .. } = &mut self.sources;
        let drained = touched.drain(..).filter_map(|index| {
            let entry = entries[index as usize].as_mut()?;
            if entry.source.is_drained() { entry.drained.take() } else { None }
        });
        let commands: Vec<Command<S>> = drained.collect();
        self.run_all(commands);
    }

    /// Takes out a source that is drained.
    fn take(&mut self, id: SourceId) -> Option<S> {
        let Entry { mut source, fd, .. } = self.sources.remove(id)?;
        if let Some(fd) = fd {
            self.monitor.remove(fd, key(id.index, id.generation));
        }
        self.polling.forget(slot(id.index));
        self.timers.forget(id);
        source.detached(&mut self.backend);
        Some(source)
    }

    fn demote_idle(&mut self) {
        if self.idleness.is_due(self.now) {
            self.sources.demote_idle(self.now, &self.idleness);
        }
    }

    /// Watches the engines that there are. One that cannot be watched keeps no other from it, and is tried again next time.
    fn watch_backend(&mut self) -> io::Result<()> {
        let Self { backend, backend_fds, monitor, .. } = self;
        let fds = backend.descriptors();
        // What is on the list is what is watched, whatever fails: another may have the number of one that has gone.
        for gone in backend_fds.extract_if(.., |fd| !fds.contains(fd)) {
            monitor.remove(gone, backend_key(gone));
        }
        let mut watched = Ok(());
        for new in fds {
            if backend_fds.contains(&new) {
                continue;
            }
            match monitor.add(new, backend_key(new)) {
                Ok(()) => backend_fds.push(new),
                Err(e) => watched = Err(e),
            }
        }
        watched
    }
}
