//! Looks whether the I/O threads get on, and tells when one does not.
//!
//! A loop shows its turns and the phase of the one that it is in, by a store at each. One that shows the same at every look
//! of a span, and does not wait for events, is **stuck**: a handler that does not return, a system call, a page of guest
//! memory that never comes. One that waits may do so for ever, asleep or spinning; but where it sleeps in the kernel as
//! nothing that waits for an event does (`D`), what it gave to the kernel along with its wait is stuck there.
//!
//! The span is counted in looks and not by a clock: a process that was stopped, or a machine that slept, has not stood
//! still, however late it is afterwards.
//!
//! Sessions, worker threads and monitors are not watched: what they wait for holds up nobody but who asked for it.

mod position;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use egret_confine::{Bounds, ThreadKind};
use egret_event_loop::{EventNotifier, Phase};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::daemon::{CounterRegistry, Watched};
use crate::process::{Heartbeat, abort};

/// Looks in the span that a loop may stand still.
const LOOKS: u32 = 4;
/// How long monitors may take to hear of a loop that is stuck before the process ends for it.
const HEARING: Duration = Duration::from_secs(1);

/// What is done about a loop that is stuck, beside telling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStall {
    /// Nothing.
    #[default]
    Report,
    /// The process ends, by SIGABRT, for its supervisor to start another.
    Abort,
}

/// A loop that is stuck, or is not any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The I/O thread.
    pub id: String,
    /// The number of its thread.
    pub thread_id: i32,
    /// What it is at, or was.
    pub phase: Phase,
    /// How long it has stood still at least; how long it did, if it is over.
    pub stood: Duration,
    /// It goes on.
    pub over: bool,
}

/// One line for the log.
impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, thread_id, phase, stood, over } = self;
        let (seconds, phase) = (stood.as_secs_f64(), phase.word());
        if *over {
            return write!(f, "iothread '{id}' goes on; it was stuck for at least {seconds} s, in '{phase}'");
        }
        let position = position::of(*thread_id);
        write!(
            f,
            "iothread '{id}' (thread {thread_id}) is stuck: no turn in {seconds} s; it is in '{phase}', {position}"
        )
    }
}

/// A thread that watches I/O threads. Dropping it ends it.
#[derive(Debug)]
pub struct Watchdog {
    stalls: Stalls,
    stop: EventNotifier,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches what `registry` has: a loop may stand still for `limit`, or for ever if there is none. Tells the service
    /// manager, if that asks for it (`$WATCHDOG_USEC`, as in sd_watchdog_enabled(3)), that the daemon is well as long as no
    /// loop is stuck.
    ///
    /// # Errors
    /// There is no thread or descriptor to be had.
    pub fn start(registry: Arc<CounterRegistry>, limit: Option<Duration>, on_stall: OnStall) -> io::Result<Self> {
        let stalls = Stalls::new()?;
        let stop = EventNotifier::new()?;
        let heartbeat = Heartbeat::asked_for()?;
        if limit.is_none() && heartbeat.is_none() {
            return Ok(Self { stalls, stop, thread: None });
        }
        let (their_stalls, their_stop) = (stalls.clone(), stop.clone());
        let bounds = Bounds::of_this_thread();
        let watch = move || {
            bounds.narrow(ThreadKind::Watchdog);
            watch(&registry, &their_stalls, &their_stop, limit, heartbeat.as_ref(), on_stall);
        };
        let thread = std::thread::Builder::new().name("egret-watchdog".to_owned()).stack_size(256 << 10);
        Ok(Self { stalls, stop, thread: Some(thread.spawn(watch)?) })
    }

    /// What it finds.
    pub fn stalls(&self) -> Stalls {
        self.stalls.clone()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn watch(
    registry: &CounterRegistry,
    stalls: &Stalls,
    stop: &EventNotifier,
    limit: Option<Duration>,
    heartbeat: Option<&Heartbeat>,
    on_stall: OnStall,
) {
    let (every, interval) = (limit.map(|limit| limit / LOOKS), heartbeat.map(|heartbeat| heartbeat.every));
    let mut looks = Looks::default();
    let (mut look_at, mut notify_at) = (due(every), due(interval));
    loop {
        let now = Instant::now();
        if notify_at.is_some_and(|at| at <= now) {
            if let Some(heartbeat) = heartbeat.filter(|_| !looks.any_stuck()) {
                heartbeat.beat();
            }
            notify_at = due(interval);
        }
        let next = look_at.into_iter().chain(notify_at).min();
        let timeout = next.and_then(|next| Timespec::try_from(next.saturating_duration_since(now)).ok());
        match poll(&mut [PollFd::new(stop, PollFlags::IN)], timeout.as_ref()) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return,
            Err(e) => return tracing::error!("I/O threads are no longer watched: {e}"),
        }
        let Some(every) = every.filter(|_| look_at.is_some_and(|at| at <= Instant::now())) else { continue };
        look_at = due(Some(every));
        let found = looks.look(&registry.read(), every, position::is_uninterruptible);
        let mut last_words = None;
        for stall in &found {
            match on_stall {
                _ if stall.over => tracing::warn!("{stall}"),
                OnStall::Report => tracing::error!("{stall}"),
                // The log is written by another thread, which may not come to it any more.
                OnStall::Abort => last_words = Some(format!("{stall}; --on-stall=abort ends the process")),
            }
        }
        if !found.is_empty() {
            stalls.push(found);
        }
        if let Some(last_words) = last_words {
            stalls.await_heard(HEARING);
            abort(last_words);
        }
    }
}

fn due(after: Option<Duration>) -> Option<Instant> {
    Instant::now().checked_add(after?)
}

/// What a loop showed at the last look.
struct Shown {
    thread_id: i32,
    turns: u64,
    phase: Phase,
    /// How many looks in a row have found it as it was before.
    same: u32,
}

impl Shown {
    const fn is_stuck(&self) -> bool {
        self.same >= LOOKS
    }
}

/// What each loop has shown.
#[derive(Default)]
struct Looks(BTreeMap<String, Shown>);

impl Looks {
    /// Looks once more, `every` so long: the loops that have been found stuck, and those that go on. `is_asleep_for_good`
    /// says of a thread whether it sleeps as nothing that waits for an event does.
    fn look(&mut self, watched: &Watched, every: Duration, is_asleep_for_good: impl Fn(i32) -> bool) -> Vec<Stall> {
        self.0.retain(|id, _| watched.io_threads.contains_key(id));
        let mut found = Vec::new();
        for (id, counters) in &watched.io_threads {
            let thread_id = counters.thread_id;
            let (turns, phase) = (counters.turns.read().turns, counters.turns.phase());
            let fresh = Shown { thread_id, turns, phase, same: 0 };
            let Some(shown) = self.0.get_mut(id) else {
                self.0.insert(id.clone(), fresh);
                continue;
            };
            let is_same = (shown.thread_id, shown.turns, shown.phase) == (thread_id, turns, phase);
            if is_same && (phase != Phase::Waiting || is_asleep_for_good(thread_id)) {
                shown.same = shown.same.saturating_add(1);
                if shown.same == LOOKS {
                    counters.stalls.add(1);
                    found.push(Stall { id: id.clone(), thread_id, phase, stood: every * LOOKS, over: false });
                }
            } else {
                if shown.is_stuck() {
                    let (stood, phase) = (every * shown.same, shown.phase);
                    found.push(Stall { id: id.clone(), thread_id: shown.thread_id, phase, stood, over: true });
                }
                *shown = fresh;
            }
        }
        found
    }

    fn any_stuck(&self) -> bool {
        self.0.values().any(Shown::is_stuck)
    }
}

/// What a watchdog has found and nobody has heard yet.
#[derive(Clone, Debug)]
pub struct Stalls(Arc<News>);

#[derive(Debug)]
struct News {
    bell: EventNotifier,
    untold: Mutex<Vec<Stall>>,
    heard: Condvar,
}

impl Stalls {
    fn new() -> io::Result<Self> {
        let bell = EventNotifier::new()?;
        Ok(Self(Arc::new(News { bell, untold: Mutex::default(), heard: Condvar::new() })))
    }

    fn push(&self, found: Vec<Stall>) {
        self.lock().extend(found);
        self.0.bell.set();
    }

    /// Hands what is new to `hear`.
    pub(crate) fn hear(&self, hear: impl FnMut(Stall)) {
        self.0.bell.clear();
        let mut untold = self.lock();
        untold.drain(..).for_each(hear);
        self.0.heard.notify_all();
    }

    fn await_heard(&self, at_most: Duration) {
        let untold = self.lock();
        let _ = self.0.heard.wait_timeout_while(untold, at_most, |untold| !untold.is_empty());
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Stall>> {
        self.0.untold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Readable when there is something to hear.
impl AsFd for Stalls {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.bell.as_fd()
    }
}

#[cfg(test)]
mod tests;
