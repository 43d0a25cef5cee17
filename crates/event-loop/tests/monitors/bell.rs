//! A source in the likeness of a queue, engines that echo, and loops of every kind to put them on.

use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use std::{fmt, io};

use egret_event_loop::ring::{Ring, RingError};
use egret_event_loop::{
    Backend, ClockReads, EventLoop, LoopHandle, LoopOptions, MonitorChoice, Signals, Source, SourceId, Turn, spawn,
};
use egret_polling::{Active, BlockCost, EventKind, Nanos, Parameters, Policy, PolicyKind, Slot, Standing, Wait, build};
use rustix::event::{EventfdFlags, eventfd};

/// A policy with one window for ever.
pub fn fixed(window: Nanos) -> Box<dyn Policy> {
    // Unset it never ends.
    let max = (window < Nanos::MAX).then_some(window);
    build(PolicyKind::Fixed, &Parameters { max, ..Parameters::default() }).unwrap()
}

/// A policy that weighs what blocking costs, and passes on what it is told of that.
pub struct Weighing(pub Sender<BlockCost>);

impl Policy for Weighing {
    fn window(&mut self, _before: &Standing) -> Nanos {
        Nanos::ZERO
    }
    fn observe(&mut self, _wait: &Wait<'_>) {}
    fn forget(&mut self, _slot: Slot) {}
    fn window_now(&self) -> Nanos {
        Nanos::ZERO
    }
    fn weighs_block_cost(&self) -> bool {
        true
    }
    fn set_block_cost(&mut self, cost: BlockCost) {
        let _ = self.0.send(cost);
    }
}

/// What a policy was told of a turn.
pub struct Told {
    /// Before the last wait there was.
    pub in_flight: u32,
    pub length: Nanos,
    pub blocked: bool,
    pub active: Vec<Active>,
}

impl Told {
    /// Of each source of a kind that is active, whether it had an event.
    pub fn ready(&self, kind: EventKind) -> Vec<bool> {
        self.active.iter().filter(|source| source.kind == kind).map(|source| source.ready).collect()
    }
}

/// A policy in the likeness of QEMU's, which passes on what it is told.
pub fn every_turn(tell: Sender<Told>) -> Box<dyn Policy> {
    Box::new(EveryTurn { tell, in_flight: 0 })
}

struct EveryTurn {
    tell: Sender<Told>,
    in_flight: u32,
}

impl Policy for EveryTurn {
    fn window(&mut self, before: &Standing) -> Nanos {
        self.in_flight = before.in_flight;
        Nanos::ZERO
    }
    fn observe(&mut self, wait: &Wait<'_>) {
        let Wait { length, blocked, .. } = *wait;
        let _ = self.tell.send(Told { in_flight: self.in_flight, length, blocked, active: wait.active.to_vec() });
    }
    fn forget(&mut self, _slot: Slot) {}
    fn window_now(&self) -> Nanos {
        Nanos::ZERO
    }
    fn observes_every_turn(&self) -> bool {
        true
    }
}

/// What ends requests that engines keep.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// One of them announces something.
    Announced,
    /// They are asked to announce what ends, which is too late for this.
    Armed,
    /// So much time has gone by since the last was submitted, which nothing announces.
    After(Nanos),
}

/// Engines that finish what they are given when it is submitted, unless they are to keep it. Its lower half says how often they have to take it up again,
/// as what is done by halves.
#[derive(Default)]
pub struct Echo {
    pushed: Vec<u64>,
    /// Requests are kept until this comes, once.
    pub keeps: Option<Until>,
    kept: Vec<u64>,
    due: Option<Nanos>,
    done: Vec<u64>,
    /// They have been told to announce what ends, and not yet that they need not.
    pub is_armed: bool,
    /// Engines that were brought in, and who hears of what they announce.
    pub brought_in: Vec<(OwnedFd, Sender<()>)>,
    /// Who is told, when an engine that has left with the next completion is closed, whether the descriptors were asked for
    /// meanwhile.
    pub leaves: Option<Sender<bool>>,
    left: Option<OwnedFd>,
    is_asked: Cell<bool>,
}

impl Echo {
    /// Ends what is kept.
    pub fn release(&mut self) {
        (self.keeps, self.due) = (None, None);
        self.done.append(&mut self.kept);
    }
}

impl Backend for Echo {
    type Completion = u64;
    fn has_completions(&mut self) -> bool {
        !self.done.is_empty()
    }
    fn reap(&mut self, now: Nanos, done: &mut dyn FnMut(u64)) {
        if self.due.is_some_and(|due| due <= now) {
            self.release();
        }
        for work in self.done.drain(..) {
            if work as u32 > 0 {
                self.pushed.push(work - 1)
            } else {
                done(work)
            }
            if self.leaves.is_some()
                && let Some((engine, _)) = self.brought_in.pop()
            {
                self.left = Some(engine);
                self.is_asked.set(false);
            }
        }
    }
    fn takes_leave(&mut self) -> bool {
        self.left.is_some()
    }
    fn submit(&mut self, now: Nanos) {
        if self.left.take().is_some()
            && let Some(told) = self.leaves.take()
        {
            told.send(self.is_asked.get()).unwrap();
        }
        match self.keeps {
            None => self.done.append(&mut self.pushed),
            Some(until) => {
                if let Until::After(length) = until
                    && !self.pushed.is_empty()
                {
                    self.due = Some(now + length);
                }
                self.kept.append(&mut self.pushed);
            }
        }
    }
    fn in_flight(&self) -> u32 {
        (self.pushed.len() + self.kept.len() + self.done.len()) as u32
    }
    fn deadline(&self) -> Option<Nanos> {
        self.due
    }
    fn arm(&mut self) -> bool {
        self.is_armed = true;
        if self.keeps == Some(Until::Armed) && !self.kept.is_empty() {
            self.release();
        }
        self.done.is_empty()
    }
    fn suppress(&mut self) {
        self.is_armed = false;
    }
    fn descriptors(&self) -> Vec<RawFd> {
        self.is_asked.set(true);
        self.brought_in.iter().map(|(fd, _)| fd.as_raw_fd()).collect()
    }
    fn announced(&mut self, fd: RawFd) {
        for (_, heard) in self.brought_in.iter().filter(|(own, _)| own.as_raw_fd() == fd) {
            let _ = heard.send(());
        }
        if self.keeps == Some(Until::Announced) {
            self.release();
        }
    }
}

/// What a test hears from its source, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    Dispatched { work: u64 },
    Notified,
}

pub type Act = Box<dyn FnMut(&mut Turn) + Send>;

/// A source in the likeness of a queue: a counter in memory and an eventfd, which is written only when armed.
pub struct Bell {
    outside: Arc<Outside>,
    pub seen: u64,
    pub in_flight: u64,
    index: u32,
    heard: Sender<Heard>,
    pub act: Option<Act>,
    /// How many of its completions leave it with more to do.
    pub unfinished: u64,
    /// How often the engines take up again what it pushes.
    pub halves: u32,
    /// When its completions came, as it was told.
    pub times: Vec<Nanos>,
    /// What it brings in when it is attached.
    pub brings: Option<(OwnedFd, Sender<()>)>,
    /// Has what it brought in leave with the next completion: see [`Echo::leaves`].
    pub leaves: Option<Sender<bool>>,
    /// Whether it will not be attached.
    pub refuses: bool,
    /// What happens when it is armed next.
    pub when_armed: Option<Box<dyn FnOnce() + Send>>,
    /// Whether it sees its work only when it is dispatched.
    pub is_blind: bool,
    stopped: bool,
}

pub struct Outside {
    work: AtomicU64,
    /// How often the loop looked.
    pub looks: AtomicU64,
    /// As with a ring, until it is told otherwise.
    armed: AtomicU64,
    pub fd: OwnedFd,
}

impl Outside {
    pub fn is_armed(&self) -> bool {
        self.armed.load(Ordering::SeqCst) == 1
    }
    /// A ring has been taken from since it was armed: what comes next does not show.
    pub fn be_taken_from(&self) {
        self.armed.store(0, Ordering::SeqCst);
    }
    /// Adds work that nobody is told of.
    pub fn add(&self) {
        self.work.fetch_add(1, Ordering::SeqCst);
    }
    pub fn ring(&self) {
        self.add();
        if self.is_armed() {
            rustix::io::write(&self.fd, &1u64.to_ne_bytes()).unwrap();
        }
    }
}

pub fn bell() -> (Bell, Arc<Outside>, Receiver<Heard>) {
    let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let outside = Arc::new(Outside { work: AtomicU64::new(0), looks: AtomicU64::new(0), armed: AtomicU64::new(1), fd });
    let (heard, hear) = channel();
    let mine = Arc::clone(&outside);
    let bell = Bell {
        outside: mine,
        seen: 0,
        in_flight: 0,
        index: 0,
        heard,
        act: None,
        unfinished: 0,
        halves: 0,
        times: Vec::new(),
        brings: None,
        leaves: None,
        refuses: false,
        when_armed: None,
        is_blind: false,
        stopped: false,
    };
    (bell, outside, hear)
}

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a bell")
    }
}

impl Source for Bell {
    type Backend = Echo;
    fn route(completion: &u64) -> u32 {
        (*completion >> 32) as u32
    }
    fn attached(&mut self, id: SourceId, backend: &mut Echo) -> io::Result<()> {
        if self.refuses {
            return Err(io::Error::other("it was asked to refuse"));
        }
        self.index = id.index();
        self.stopped = false;
        backend.brought_in.extend(self.brings.take());
        backend.leaves = self.leaves.take().or(backend.leaves.take());
        Ok(())
    }
    fn detached(&mut self, _backend: &mut Echo) {}
    fn poll(&mut self) -> bool {
        self.outside.looks.fetch_add(1, Ordering::Relaxed);
        !self.is_blind && !self.stopped && self.outside.work.load(Ordering::SeqCst) != self.seen
    }
    fn sees_all(&self) -> bool {
        !self.is_blind
    }
    fn dispatch(&mut self, backend: &mut Echo, turn: &mut Turn) {
        let work = if self.stopped { 0 } else { self.outside.work.load(Ordering::SeqCst) - self.seen };
        self.seen += work;
        for _ in 0..work {
            backend.pushed.push(u64::from(self.index) << 32 | u64::from(self.halves));
        }
        self.in_flight += work;
        if let Some(act) = &mut self.act {
            act(turn);
        }
        let _ = self.heard.send(Heard::Dispatched { work });
    }
    fn complete(&mut self, _completion: u64, now: Nanos) -> bool {
        self.times.push(now);
        self.in_flight -= 1;
        let more = self.unfinished > 0;
        self.unfinished -= u64::from(more);
        more
    }
    fn notify(&mut self, _signals: &mut Signals) {
        let _ = self.heard.send(Heard::Notified);
    }
    fn suppress(&mut self) {
        self.outside.armed.store(0, Ordering::SeqCst);
    }
    fn arm(&mut self) -> bool {
        self.outside.armed.store(1, Ordering::SeqCst);
        if let Some(happens) = self.when_armed.take() {
            happens();
        }
        !self.poll()
    }
    fn stop(&mut self, _engines: &mut Self::Backend) {
        self.stopped = true;
    }
    fn resume(&mut self, _engines: &mut Self::Backend) {
        self.stopped = false;
    }
    fn is_drained(&self) -> bool {
        self.in_flight == 0
    }
    fn descriptor(&self) -> Option<RawFd> {
        Some(self.outside.fd.as_raw_fd())
    }
}

pub fn options(monitor: MonitorChoice, window: Nanos) -> LoopOptions {
    LoopOptions {
        name: format!("{monitor}"),
        monitor,
        policy: fixed(window),
        window_max: window,
        idle_after: Nanos::from_millis(1),
        clock_reads: ClockReads::default(),
    }
}

/// The monitors that there are here.
pub fn monitors() -> impl Iterator<Item = MonitorChoice> {
    let all = MonitorChoice::ALL[1..].iter().copied();
    all.filter(|&monitor| monitor != MonitorChoice::IoUring || has_io_uring())
}

/// Runs `test` on a loop of every kind: each monitor, without spinning, spinning a little, and never sleeping.
pub fn on_every_loop(test: impl Fn(&LoopHandle<Bell>)) {
    for monitor in monitors() {
        for window in [Nanos::ZERO, Nanos::from_micros(100), Nanos::MAX] {
            let (handle, thread) = spawn(options(monitor, window), |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
            test(&handle);
            handle.send(EventLoop::stop);
            thread.join().unwrap();
        }
    }
}

fn has_io_uring() -> bool {
    match Ring::new() {
        Ok(_) => true,
        Err(e @ (RingError::Sysctl(_) | RingError::Refused | RingError::Missing)) => {
            egret_needs::this_test_lacks(format_args!("io_uring: {e}"));
            false
        }
        Err(e) => panic!("{e}"),
    }
}

pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until so much work in all has been dispatched.
pub fn hear_work(hear: &Receiver<Heard>, expected: u64) {
    let mut work = 0;
    while work < expected {
        if let Heard::Dispatched { work: more } = hear.recv_timeout(PATIENCE).expect("the loop sees the work") {
            work += more;
        }
    }
    assert_eq!(work, expected, "no work is seen twice");
}
