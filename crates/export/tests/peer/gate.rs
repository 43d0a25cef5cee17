//! A disk that keeps what it is given until its test lets it go, however long that takes.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use egret_disk::{
    BlockLimits, Blocks, Disk, Driver, Engine, EngineError, FlushError, Job, Jobs, Op, OpenCause, Options, Remote,
    RemoteDisk, RemoteKind, Shape,
};
use egret_event_loop::{Nanos, clock};
use rustix::io::Errno;

use super::await_that;

const MIB: u64 = 1 << 20;
/// Bytes of its disk.
pub const SIZE: u64 = 64 * MIB;

/// How often an engine looks whether it may let go.
const LOOK_EVERY: Nanos = Nanos::from_millis(1);

/// When it opens by itself: what belongs to a test that has failed waits for requests, and must end.
const LONGEST: Duration = Duration::from_secs(100);

/// Shut at first.
#[derive(Clone, Debug)]
pub struct Gate(Arc<State>);

#[derive(Debug)]
struct State {
    is_open: AtomicBool,
    made: Instant,
    is_full: AtomicBool,
    /// By all engines together.
    kept: AtomicUsize,
    /// What engines were given to do since that was last asked for.
    given: Mutex<Vec<Op>>,
    /// How often it was flushed by no engine.
    flushed: AtomicUsize,
    /// Whether that waits until it is open, too.
    keeps_flushes: AtomicBool,
    /// Whether that fails.
    fails_flushes: AtomicBool,
    /// Whether another host has taken its lock away.
    is_lost: AtomicBool,
    /// How often it was to be locked.
    locked: AtomicUsize,
    /// Whether that waits until it is open, too.
    keeps_locks: AtomicBool,
}

impl Gate {
    pub fn new() -> Self {
        Self(Arc::new(State {
            is_open: AtomicBool::default(),
            made: Instant::now(),
            is_full: AtomicBool::default(),
            kept: AtomicUsize::default(),
            given: Mutex::default(),
            flushed: AtomicUsize::default(),
            keeps_flushes: AtomicBool::default(),
            fails_flushes: AtomicBool::default(),
            is_lost: AtomicBool::default(),
            locked: AtomicUsize::default(),
            keeps_locks: AtomicBool::default(),
        }))
    }

    /// A disk behind it, of zeroes: a read leaves its memory as it is.
    pub fn disk(&self) -> Arc<Disk> {
        Arc::new(Disk::open(&self.options()).unwrap())
    }

    /// Likewise one that is locked while rings run.
    pub fn lockable_disk(&self) -> Arc<Disk> {
        Arc::new(Disk::open(&Options { allow_inactive: true, ..self.options() }).unwrap())
    }

    /// What it is opened with.
    pub fn options(&self) -> Options {
        Options::new("gated", Driver::Remote(RemoteDisk::new(self.clone())))
    }

    /// Lets go of everything, and keeps nothing from here on.
    pub fn open(&self) {
        self.0.is_open.store(true, Ordering::Relaxed);
    }

    /// Opens it in a while: who does not wait for that is early, and found out.
    pub fn open_later(&self) {
        let gate = self.clone();
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            gate.open();
        });
    }

    /// Keeps what is to come.
    pub fn shut(&self) {
        self.0.is_open.store(false, Ordering::Relaxed);
    }

    /// Whether there is no space for what is written: such a write fails at once.
    pub fn set_full(&self, is_full: bool) {
        self.0.is_full.store(is_full, Ordering::Relaxed);
    }

    /// What it was given to do since this was last asked, in order.
    pub fn take_given(&self) -> Vec<Op> {
        std::mem::take(&mut *self.0.given.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Has flushes by no engine wait, too, until it is open.
    pub fn keep_flushes(&self) {
        self.0.keeps_flushes.store(true, Ordering::Relaxed);
    }

    /// Whether flushes by no engine fail.
    pub fn set_failing_flushes(&self, do_fail: bool) {
        self.0.fails_flushes.store(do_fail, Ordering::Relaxed);
    }

    /// Has another host take its lock away.
    pub fn lose(&self) {
        self.0.is_lost.store(true, Ordering::Relaxed);
    }

    /// How often it was flushed by no engine.
    pub fn flushed(&self) -> usize {
        self.0.flushed.load(Ordering::Relaxed)
    }

    /// Has locks wait, too, until it is open.
    pub fn keep_locks(&self) {
        self.0.keeps_locks.store(true, Ordering::Relaxed);
    }

    /// How often it was to be locked.
    pub fn locked(&self) -> usize {
        self.0.locked.load(Ordering::Relaxed)
    }

    /// Waits until it keeps so many requests.
    pub fn await_kept(&self, many: usize) {
        await_that("requests to be with the disk", || self.0.kept.load(Ordering::Relaxed) == many);
    }
}

impl Remote for Gate {
    fn kind(&self) -> RemoteKind {
        RemoteKind::Nbd
    }

    fn name(&self) -> &str {
        "gated"
    }

    fn open(&self) -> Result<Shape, OpenCause> {
        let limits = BlockLimits { max_discard: MIB, discard_granularity: 512, max_write_zeroes: MIB, optimal_io: 0 };
        Ok(Shape { size: SIZE, blocks: Blocks { logical: 512, physical: 512 }, limits })
    }

    fn engine(&self) -> Result<Box<dyn Engine>, EngineError> {
        let (pushed, kept, failed) = <(Jobs, Jobs, Jobs)>::default();
        Ok(Box::new(GateEngine { state: Arc::clone(&self.0), pushed, kept, failed }))
    }

    fn ask_size(&self) -> std::io::Result<u64> {
        Ok(SIZE)
    }

    fn flush(&self) -> Result<(), FlushError> {
        self.0.flushed.fetch_add(1, Ordering::Relaxed);
        if self.0.keeps_flushes.load(Ordering::Relaxed) {
            await_that("the gate to be opened", || self.0.is_open());
        }
        let fails = self.0.fails_flushes.load(Ordering::Relaxed);
        if fails { Err(FlushError { errno: Errno::IO, is_loss: false }) } else { Ok(()) }
    }

    fn is_lost(&self) -> bool {
        self.0.is_lost.load(Ordering::Relaxed)
    }

    fn lock(&self) -> Result<(), OpenCause> {
        self.0.locked.fetch_add(1, Ordering::Relaxed);
        if self.0.keeps_locks.load(Ordering::Relaxed) {
            await_that("the gate to be opened", || self.0.is_open());
        }
        Ok(())
    }
}

impl State {
    fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed) || self.made.elapsed() > LONGEST
    }
}

struct GateEngine {
    state: Arc<State>,
    pushed: Jobs,
    kept: Jobs,
    failed: Jobs,
}

impl Engine for GateEngine {
    fn push(&mut self, job: Box<Job>) {
        self.pushed.push(job);
    }

    fn submit(&mut self, _now: Nanos) {
        let is_full = self.state.is_full.load(Ordering::Relaxed);
        for job in self.pushed.drain(..) {
            self.state.given.lock().unwrap_or_else(PoisonError::into_inner).push(job.request.op);
            if is_full && matches!(job.request.op, Op::Write { .. }) {
                self.failed.push(job);
            } else {
                self.kept.push(job);
                self.state.kept.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn has_completions(&mut self) -> bool {
        !self.failed.is_empty() || !self.kept.is_empty() && self.state.is_open()
    }

    fn reap(&mut self, _now: Nanos, done: &mut dyn FnMut(Box<Job>)) {
        self.failed.drain(..).for_each(|job| done(job.ended(Err(Errno::NOSPC))));
        if self.state.is_open() {
            self.state.kept.fetch_sub(self.kept.len(), Ordering::Relaxed);
            self.kept.drain(..).for_each(|job| done(job.ended(Ok(()))));
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        (!self.kept.is_empty()).then(|| clock::now() + LOOK_EVERY)
    }

    fn descriptor(&self) -> Option<RawFd> {
        None
    }

    fn end(self: Box<Self>, left: &mut dyn FnMut(Box<Job>)) {
        let Self { pushed, kept, failed, .. } = *self;
        [pushed, kept, failed].into_iter().flatten().for_each(left);
    }
}
