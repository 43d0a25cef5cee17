//! The turn.
//!
//! ```text
//! loop {
//!     wait       spin while the policy says so, then arm everything, look once more, block in the monitor
//!     reap       completions go to their sources
//!     dispatch   every ready source: pop, parse, push
//!     submit     the engines, once
//!     notify     the guests, once per touched source
//! }
//! ```
//!
//! What keeps the hot path free of allocation: every list is emptied, never dropped, and grows only with the number
//! of sources. What keeps it free of locks and system calls: a mailbox is opened only when its doorbell rang, and the
//! monitor is called only to block, or where it alone can tell that an idle source has work.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc;

use egret_polling::{Active, Kind, LastWait, Nanos, Policy, Slot, Standing, Wait};

use crate::mailbox::Mailbox;
use crate::monitor::{self, Key, Monitor, MonitorChoice};
use crate::ring::SharedRing;
use crate::source::Command;
use crate::timers::Timers;
use crate::{Backend, LoopStats, Source, SourceId, Turn, clock};

/// How long a loop that always finds work may leave the monitor unasked, where only the monitor sees idle sources.
const MONITOR_AT_LEAST_EVERY: Nanos = Nanos::from_micros(50);
/// How many looks go by between two readings of the clock while spinning.
const LOOKS_PER_CLOCK_READ: u32 = 8;

const MAILBOX: u32 = u32::MAX;
const BACKEND: u32 = u32::MAX - 1;
/// A key carries an index and this much of a generation.
const GENERATIONS: u32 = 1 << 24;

/// How a loop is to be.
pub struct LoopOptions {
    /// Its name, for the log; its thread's name where it has one of its own.
    pub name: String,
    /// The monitor to use.
    pub monitor: MonitorChoice,
    /// Decides how long it spins.
    pub policy: Box<dyn Policy>,
    /// The largest window the policy may choose; only counted against.
    pub window_max: Nanos,
    /// A source without an event for so long is left to the monitor.
    pub idle_after: Nanos,
}

struct Entry<S> {
    source: S,
    fd: Option<RawFd>,
    generation: u32,
    /// On the active list.
    active: bool,
    /// Its events show on its descriptor.
    armed: bool,
    /// On the ready list.
    ready: bool,
    /// On the touched list.
    touched: bool,
    last_event: Nanos,
    timer: Option<Nanos>,
    /// Where it goes when it is drained.
    leaving: Option<mpsc::Sender<S>>,
}

/// One thread's loop: its sources, the engines they share, and how it waits.
pub struct EventLoop<S: Source> {
    name: String,
    backend: S::Backend,
    backend_fds: Vec<RawFd>,
    monitor: Box<dyn Monitor>,
    monitor_name: MonitorChoice,
    monitor_asked: Nanos,
    ring: Option<SharedRing>,
    policy: Box<dyn Policy>,
    window_max: Nanos,
    idle_after: Nanos,
    swept: Nanos,
    mailbox: Arc<Mailbox<Command<S>>>,
    timers: Timers,
    sources: Vec<Option<Entry<S>>>,
    vacant: Vec<u32>,
    next_generation: u32,
    active: Vec<u32>,
    ready: Vec<u32>,
    touched: Vec<u32>,
    completed: bool,
    reports: Vec<Key>,
    later: Vec<Command<S>>,
    observed: Vec<Active>,
    last_wait: LastWait,
    stats: LoopStats,
    now: Nanos,
    stopping: bool,
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
            policy: options.policy,
            window_max: options.window_max,
            idle_after: options.idle_after,
            swept: Nanos::ZERO,
            mailbox,
            timers: Timers::default(),
            sources: Vec::new(),
            vacant: Vec::new(),
            next_generation: 0,
            active: Vec::new(),
            ready: Vec::new(),
            touched: Vec::new(),
            completed: false,
            reports: Vec::new(),
            later: Vec::new(),
            observed: Vec::new(),
            last_wait: LastWait::default(),
            stats: LoopStats::default(),
            now: clock::now(),
            stopping: false,
        };
        new.monitor.add(new.mailbox.as_raw_fd(), key(MAILBOX, 0))?;
        new.watch_backend()?;
        Ok(new)
    }

    pub(crate) fn mailbox(&self) -> &Arc<Mailbox<Command<S>>> {
        &self.mailbox
    }

    /// The loop's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The monitor in use, never [`MonitorChoice::Auto`].
    pub const fn monitor_name(&self) -> MonitorChoice {
        self.monitor_name
    }

    /// The engines.
    pub const fn backend(&mut self) -> &mut S::Backend {
        &mut self.backend
    }

    /// The loop's counters.
    pub const fn stats(&self) -> &LoopStats {
        &self.stats
    }

    /// A source on this loop.
    pub fn source(&mut self, id: SourceId) -> Option<&mut S> {
        self.entry(id).map(|entry| &mut entry.source)
    }

    /// Every source on this loop.
    pub fn sources(&self) -> impl Iterator<Item = &S> {
        self.sources.iter().flatten().map(|entry| &entry.source)
    }

    /// Waits are decided by `policy` from here on, which begins with nothing learned.
    pub fn set_policy(&mut self, policy: Box<dyn Policy>, window_max: Nanos) {
        self.policy = policy;
        self.window_max = window_max;
    }

    /// Sources without an event for so long are left to the monitor from here on.
    pub const fn set_idle_after(&mut self, idle_after: Nanos) {
        self.idle_after = idle_after;
    }

    /// Takes a source in.
    ///
    /// # Errors
    ///
    /// What the source or its descriptor will not do; the source comes back as it was.
    pub fn attach(&mut self, mut source: S) -> Result<SourceId, (S, io::Error)> {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.sources.push(None);
            (self.sources.len() - 1) as u32
        });
        self.next_generation = (self.next_generation + 1) % GENERATIONS;
        let id = SourceId { index, generation: self.next_generation };
        if let Err(e) = source.attached(id, &mut self.backend) {
            self.vacant.push(index);
            return Err((source, e));
        }
        let fd = source.descriptor();
        if let Some(Err(e)) = fd.map(|fd| self.monitor.add(fd, key(index, id.generation))) {
            source.detached(&mut self.backend);
            self.vacant.push(index);
            return Err((source, e));
        }
        self.sources[index as usize] = Some(Entry {
            source,
            fd,
            generation: id.generation,
            active: false,
            armed: false,
            ready: false,
            touched: false,
            last_event: self.now,
            timer: None,
            leaving: None,
        });
        // What the outside did before this moment may have gone untold: look at the source once, by itself.
        self.mark_ready(index);
        Ok(id)
    }

    /// Lets go of a source when it is drained; what is in flight ends first. The source is sent to `to`; nothing is
    /// if there is no such source.
    pub fn detach(&mut self, id: SourceId, to: mpsc::Sender<S>) {
        let Some(entry) = self.entry(id) else { return };
        entry.source.stop();
        entry.leaving = Some(to);
        self.touch(id.index);
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
        self.stats.turns += 1;
        self.reap();
        self.dispatch();
        self.backend.submit(self.now);
        // An engine that completes in its submission is not worth a turn of its own.
        if self.backend.has_completions() {
            self.reap();
        }
        self.notify();
        self.sweep();
        Ok(())
    }

    /// Looks at everything that can be seen without a system call.
    fn look(&mut self) -> bool {
        for at in 0..self.active.len() {
            let index = self.active[at];
            let Some(entry) = &mut self.sources[index as usize] else { continue };
            if !entry.ready && entry.source.poll() {
                entry.ready = true;
                self.ready.push(index);
            }
        }
        self.completed = self.backend.has_completions();
        self.completed || !self.ready.is_empty() || self.mailbox.bell().rang() || self.monitor.has_reports()
    }

    fn deadline(&self) -> Option<Nanos> {
        match (self.timers.next(), self.backend.deadline()) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    fn is_due(&self, now: Nanos) -> bool {
        self.deadline().is_some_and(|deadline| deadline <= now)
    }

    /// Ends when there is something to do.
    fn wait(&mut self) -> io::Result<()> {
        let start = clock::now();
        self.now = start;
        if self.look() || self.is_due(start) {
            self.flush()?;
            return self.ask_monitor();
        }
        let before = Standing { in_flight: self.backend.in_flight(), last: self.last_wait };
        let window = self.policy.window(&before);
        self.count_window(window);
        let found = window > Nanos::ZERO && self.spin(start, window)?;
        let spun = self.now - start;
        let slept = !found && self.block()?;
        self.observe(start, spun, slept, before.in_flight > 0);
        Ok(())
    }

    /// Spins until there is something to do, or the window is over; says which.
    fn spin(&mut self, start: Nanos, window: Nanos) -> io::Result<bool> {
        self.flush()?;
        for at in 0..self.active.len() {
            if let Some(entry) = &mut self.sources[self.active[at] as usize] {
                entry.suppress();
            }
        }
        let end = start + window;
        loop {
            for _ in 0..LOOKS_PER_CLOCK_READ {
                if self.look() {
                    self.now = clock::now();
                    self.ask_monitor()?;
                    return Ok(true);
                }
                std::hint::spin_loop();
            }
            self.now = clock::now();
            self.ask_monitor()?;
            if self.is_due(self.now) || !self.ready.is_empty() {
                return Ok(true);
            }
            if self.now >= end {
                return Ok(false);
            }
        }
    }

    /// Arms everything, looks once more, and sleeps; says whether it came to that.
    fn block(&mut self) -> io::Result<bool> {
        for at in 0..self.active.len() {
            let index = self.active[at];
            let Some(entry) = &mut self.sources[index as usize] else { continue };
            if !entry.arm() && !entry.ready {
                entry.ready = true;
                self.ready.push(index);
            }
        }
        let clear = self.backend.arm() & self.mailbox.bell().arm() & self.ready.is_empty();
        let timeout = if clear { self.deadline().map(|deadline| deadline - self.now) } else { Some(Nanos::ZERO) };
        let waited = self.monitor.wait(timeout, &mut self.reports);
        self.backend.suppress();
        self.mailbox.bell().disarm();
        let before = self.now;
        self.now = clock::now();
        self.monitor_asked = self.now;
        if clear {
            self.stats.blocks += 1;
            self.stats.asleep += self.now - before;
        }
        self.take_reports();
        self.completed = self.backend.has_completions();
        waited.map(|()| clear)
    }

    /// Sends what engines pushed to the shared ring, where no wait is going to do it.
    fn flush(&self) -> io::Result<()> {
        self.ring.as_ref().map_or(Ok(()), |ring| ring.borrow_mut().flush())
    }

    /// Asks the monitor without sleeping: when it has reports, and now and then where only it can tell, so that a busy
    /// source does not starve the idle ones.
    fn ask_monitor(&mut self) -> io::Result<()> {
        let blind = self.ring.is_none() && self.now - self.monitor_asked >= MONITOR_AT_LEAST_EVERY;
        if blind || self.monitor.has_reports() {
            self.monitor_asked = self.now;
            self.monitor.wait(Some(Nanos::ZERO), &mut self.reports)?;
            self.take_reports();
            self.completed = self.backend.has_completions();
        }
        Ok(())
    }

    fn take_reports(&mut self) {
        while let Some(Key(report)) = self.reports.pop() {
            let (index, generation) = (report as u32, (report >> 32) as u32);
            let known = self.sources.get(index as usize).and_then(Option::as_ref);
            if known.is_some_and(|entry| entry.generation == generation) {
                self.mark_ready(index);
            }
        }
    }

    fn observe(&mut self, start: Nanos, spun: Nanos, blocked: bool, in_flight: bool) {
        let length = self.now - start;
        self.stats.waits += 1;
        if blocked {
            self.stats.spin_wasted += spun;
        } else {
            self.stats.hits += 1;
            self.stats.spin_found += spun;
        }
        self.observed.clear();
        let sources = &self.sources;
        self.observed.extend(self.active.iter().filter_map(|&index| {
            let ready = sources[index as usize].as_ref()?.ready;
            Some(Active { slot: slot(index), kind: Kind::Queue, ready })
        }));
        if in_flight || self.completed {
            self.observed.push(Active { slot: slot(BACKEND), kind: Kind::Completion, ready: self.completed });
        }
        let kind = match (self.completed, self.ready.is_empty()) {
            (true, _) => Kind::Completion,
            (false, false) => Kind::Queue,
            (false, true) => Kind::Other,
        };
        self.last_wait = LastWait { kind, length };
        self.policy.observe(&Wait { length, spun, blocked, active: &self.observed });
    }

    fn count_window(&mut self, window: Nanos) {
        self.stats.window = window;
        self.stats.window_sum += window.min(Nanos::from_millis(1000));
        self.stats.window_zero += u64::from(window == Nanos::ZERO);
        let near = Nanos(self.window_max.0 - self.window_max.0 / 8);
        self.stats.window_near_max += u64::from(window > Nanos::ZERO && window >= near);
    }

    fn reap(&mut self) {
        let Self { backend, sources, touched, now, .. } = self;
        backend.reap(*now, &mut |completion| {
            let index = S::route(&completion);
            if let Some(Some(entry)) = sources.get_mut(index as usize) {
                entry.source.complete(completion, *now);
                if !entry.touched {
                    entry.touched = true;
                    touched.push(index);
                }
            }
        });
        self.completed = false;
    }

    fn dispatch(&mut self) {
        while let Some((id, deadline)) = self.timers.expire(self.now) {
            if let Some(entry) = self.entry(id)
                && entry.timer == Some(deadline)
            {
                entry.timer = None;
                self.mark_ready(id.index);
            }
        }
        for at in 0..self.ready.len() {
            let index = self.ready[at];
            let Some(entry) = &mut self.sources[index as usize] else { continue };
            entry.ready = false;
            entry.last_event = self.now;
            entry.suppress();
            let mut turn = Turn { now: self.now, timer: None, later: &mut self.later };
            entry.source.dispatch(&mut self.backend, &mut turn);
            if let Some(deadline) = turn.timer {
                entry.timer = Some(deadline);
                self.timers.set(SourceId { index, generation: entry.generation }, deadline);
            }
            if !entry.touched {
                entry.touched = true;
                self.touched.push(index);
            }
        }
        self.ready.clear();
        if self.mailbox.bell().rang() || !self.later.is_empty() {
            self.obey();
        }
    }

    #[cold]
    fn obey(&mut self) {
        let mut commands = std::mem::take(&mut self.later);
        commands.append(&mut self.mailbox.take());
        for command in commands {
            command(self);
        }
        if let Err(e) = self.watch_backend() {
            tracing::error!("iothread '{}': cannot watch an engine's completions: {e}", self.name);
        }
    }

    fn notify(&mut self) {
        let mut drained = false;
        for at in 0..self.touched.len() {
            let Some(entry) = &mut self.sources[self.touched[at] as usize] else { continue };
            entry.touched = false;
            entry.source.notify();
            drained |= entry.leaving.is_some() && entry.source.is_drained();
        }
        if drained {
            self.release();
        }
        self.touched.clear();
    }

    /// Hands over the sources that were to leave and are drained.
    #[cold]
    fn release(&mut self) {
        for at in 0..self.touched.len() {
            let index = self.touched[at];
            let gone = |entry: &mut Entry<S>| entry.leaving.is_some() && entry.source.is_drained();
            let Some(entry) = self.sources[index as usize].take_if(gone) else { continue };
            if let Some(fd) = entry.fd {
                self.monitor.remove(fd, key(index, entry.generation));
            }
            self.active.retain(|&other| other != index);
            self.ready.retain(|&other| other != index);
            self.policy.forget(slot(index));
            self.vacant.push(index);
            let mut source = entry.source;
            source.detached(&mut self.backend);
            if let Some(to) = entry.leaving {
                let _ = to.send(source);
            }
        }
    }

    /// Leaves sources without events to the monitor, so that a turn costs what the active ones cost.
    fn sweep(&mut self) {
        if self.now - self.swept < Nanos(self.idle_after.0 / 4) {
            return;
        }
        self.swept = self.now;
        let Self { active, sources, policy, now, idle_after, .. } = self;
        active.retain(|&index| {
            let Some(entry) = &mut sources[index as usize] else { return false };
            let stays = *now - entry.last_event < *idle_after || !entry.arm();
            if !stays {
                entry.active = false;
                policy.forget(slot(index));
            }
            stays
        });
    }

    fn entry(&mut self, id: SourceId) -> Option<&mut Entry<S>> {
        let entry = self.sources.get_mut(id.index as usize)?.as_mut()?;
        (entry.generation == id.generation).then_some(entry)
    }

    fn mark_ready(&mut self, index: u32) {
        let Some(entry) = &mut self.sources[index as usize] else { return };
        if !entry.active {
            entry.active = true;
            self.active.push(index);
        }
        if !entry.ready {
            entry.ready = true;
            self.ready.push(index);
        }
    }

    fn touch(&mut self, index: u32) {
        let Some(entry) = &mut self.sources[index as usize] else { return };
        if !entry.touched {
            entry.touched = true;
            self.touched.push(index);
        }
    }

    fn watch_backend(&mut self) -> io::Result<()> {
        let fds = self.backend.descriptors();
        for gone in self.backend_fds.iter().filter(|fd| !fds.contains(fd)) {
            self.monitor.remove(*gone, backend_key(*gone));
        }
        for new in fds.iter().filter(|fd| !self.backend_fds.contains(fd)) {
            self.monitor.add(*new, backend_key(*new))?;
        }
        self.backend_fds = fds;
        Ok(())
    }
}

impl<S: Source> Entry<S> {
    fn suppress(&mut self) {
        if self.armed {
            self.armed = false;
            self.source.suppress();
        }
    }

    fn arm(&mut self) -> bool {
        if !self.armed {
            self.armed = self.source.arm();
        }
        self.armed
    }
}

const fn key(index: u32, generation: u32) -> Key {
    Key(((generation as u64) << 32) | index as u64)
}

const fn backend_key(fd: RawFd) -> Key {
    key(BACKEND, fd.cast_unsigned() % GENERATIONS)
}

/// The policy's name for a source; the engines together are one.
const fn slot(index: u32) -> Slot {
    Slot(if index == BACKEND { 0 } else { index + 1 })
}
