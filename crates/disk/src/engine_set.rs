//! Everything one I/O thread runs requests on.

#![forbid(unsafe_code)]

mod cached;

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use egret_event_loop::ring::{Ring, RingError, SharedRing};
use egret_event_loop::{Backend, Nanos};
use rustix::io::Errno;

use self::cached::Trial;
use crate::disk::{Backing, Disk};
use crate::engine::{Engine, Native, Null, Threads, Uring, WorkerLimits, native};
use crate::error::EngineError;
use crate::job::{Finished, Job};
use crate::options::Aio;
use crate::request::{Completion, Request};
use crate::stats::{Counters, ENGINES};
use crate::throttle::Lane;
use crate::triage::{self, Verdict};

/// How the engines of an I/O thread are made.
#[derive(Clone)]
pub struct EngineOptions {
    /// The loop's ring; without it an io_uring engine makes its own.
    pub ring: Option<SharedRing>,
    /// Worker threads that stay.
    pub thread_pool_min: u32,
    /// The most worker threads.
    pub thread_pool_max: u32,
    /// How long a worker thread beyond the minimum waits for work before it leaves.
    pub thread_pool_idle: Nanos,
    /// The most requests that `aio=native` gives to the kernel in one system call; 0 leaves it to the engine.
    pub aio_max_batch: u32,
    /// Requests of `aio=native` in the kernel at a time; more wait in user space. Contexts count against
    /// `/proc/sys/fs/aio-max-nr` with it.
    pub aio_depth: u32,
}

impl EngineOptions {
    fn workers(&self) -> WorkerLimits {
        let Self { thread_pool_min: min, thread_pool_max: max, thread_pool_idle: idle, .. } = *self;
        WorkerLimits { min, max, idle: idle.into() }
    }
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            ring: None,
            thread_pool_min: 0,
            thread_pool_max: 64,
            thread_pool_idle: Nanos::from_millis(10_000),
            aio_max_batch: 0,
            aio_depth: native::DEPTH,
        }
    }
}

/// Of requests that waited for limits one slot starts so many bytes or pieces in a turn, and one request at most beyond
/// that, should more be free to go at a time: its engine may copy them before the loop goes on. A queue takes in as much.
const TURN_BYTES: u64 = 1 << 20;
const TURN_PIECES: usize = 1024;

/// A disk attached to an I/O thread's engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiskSlot(u32);

/// Which engine; also its place in the list.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Null,
    Threads,
    Native,
    Uring,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Threads => "threads",
            Self::Native => "native",
            Self::Uring => "io_uring",
        }
    }
}

/// The engines that run a disk's requests: its own, and workers for what that cannot.
fn kinds(own: Kind, disk: &Disk) -> impl Iterator<Item = Kind> + use<> {
    let workers = (own != Kind::Threads && disk.needs_workers()).then_some(Kind::Threads);
    [own].into_iter().chain(workers)
}

struct Attached {
    disk: Arc<Disk>,
    kind: Kind,
    in_flight: u32,
    /// Detached while it had requests in flight: freed when the last one is reaped.
    leaving: bool,
    /// Where requests wait, if the disk is limited.
    lane: Option<Box<Lane>>,
    /// Requests that need not wait any longer.
    free: VecDeque<Request>,
    /// Whether its reads are tried on the page cache; none where that never answers.
    cache: Option<Trial>,
    /// It drains, and nothing waits for limits.
    unlimited: bool,
    /// Dropped when it is freed, for who waits for that.
    held: Option<Sender<()>>,
}

/// Everything one I/O thread runs requests on.
///
/// A request is looked at once, then run by its disk's engine, or by worker threads where the engine cannot, and comes
/// out of [`reap`](Backend::reap) exactly once. Requests run side by side and complete in any order, as virtio has it:
/// only what a guest has seen complete comes before what it asks for then.
///
/// Dropping it waits for what is in flight, because the kernel uses the requests' memory until then.
pub struct EngineSet {
    /// By [`Kind`]; made when a disk first needs them. Dropped before the disks.
    list: [Option<Box<dyn Engine>>; ENGINES],
    slots: Vec<Option<Attached>>,
    /// Completions without an engine.
    answers: VecDeque<(u32, Completion)>,
    /// Jobs on their way from an engine that refused them to the workers; empty between calls.
    refused: Vec<Job>,
    /// A read that began alone, kept until the batch is complete.
    alone: Option<Job>,
    in_flight: u32,
    /// When to look at the lanes, if requests wait in one.
    look: Option<Nanos>,
    /// For an io_uring engine without the loop's ring, made ahead.
    own_ring: Option<Result<Ring, RingError>>,
    options: EngineOptions,
    counters: Arc<Counters>,
}

impl EngineSet {
    /// No engine yet: each is made by the first disk that needs it.
    pub fn new(options: EngineOptions) -> Self {
        Self {
            list: [const { None }; ENGINES],
            slots: Vec::new(),
            answers: VecDeque::new(),
            refused: Vec::new(),
            alone: None,
            in_flight: 0,
            look: None,
            own_ring: None,
            options,
            counters: Arc::default(),
        }
    }

    /// Makes the ring of an io_uring engine ahead, if that would be its own: a thread that is confined makes none. A disk
    /// that needs it is told why it could not be had.
    pub fn make_ring_ahead(&mut self) {
        if self.options.ring.is_none() {
            self.own_ring = Some(Ring::new());
        }
    }

    /// Lets requests for `disk` be pushed. It may bring in an engine, and with it a descriptor.
    ///
    /// # Errors
    ///
    /// The disk's engine cannot be had, for the reason that the error names.
    pub fn attach(&mut self, disk: &Arc<Disk>) -> Result<DiskSlot, EngineError> {
        let kind = match (&disk.backing, disk.options.aio) {
            (Backing::Null { .. }, _) => Kind::Null,
            (_, Aio::Threads) => Kind::Threads,
            (_, Aio::Native) => Kind::Native,
            (_, Aio::IoUring) => Kind::Uring,
        };
        // Before anything else can fail halfway.
        for kind in kinds(kind, disk) {
            self.make(kind)?;
        }
        let slot = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        for kind in kinds(kind, disk) {
            if let Some(engine) = &mut self.list[kind as usize] {
                engine.attach(slot as u32, disk);
            }
        }
        self.slots.resize_with(self.slots.len().max(slot + 1), || None);
        self.slots[slot] = Some(Attached {
            disk: Arc::clone(disk),
            kind,
            in_flight: 0,
            leaving: false,
            lane: None,
            free: VecDeque::new(),
            cache: Trial::of(disk),
            unlimited: false,
            held: None,
        });
        Ok(DiskSlot(slot as u32))
    }

    fn make(&mut self, kind: Kind) -> Result<(), EngineError> {
        let place = &mut self.list[kind as usize];
        if place.is_some() {
            return Ok(());
        }
        let options = &self.options;
        let counters = self.counters.engine(kind as usize, kind.name());
        *place = Some(match kind {
            Kind::Null => Box::new(Null::new(counters)),
            Kind::Threads => Box::new(Threads::new(options.workers(), counters)?),
            Kind::Native => Box::new(Native::new(options.aio_depth.max(1), options.aio_max_batch, counters)?),
            Kind::Uring => match (options.ring.clone(), self.own_ring.take()) {
                (Some(shared), _) => Box::new(Uring::shared(shared, counters)),
                (None, None) => Box::new(Uring::alone(Ring::new()?, counters)?),
                (None, Some(Ok(own))) => Box::new(Uring::alone(own, counters)?),
                (None, Some(Err(why))) => {
                    self.own_ring = Some(Err(why.clone()));
                    return Err(why.into());
                }
            },
        });
        Ok(())
    }

    /// How many worker threads stay, and how many there may be at most, from here on; those that are too many leave when
    /// they have done what they are at.
    pub fn set_thread_pool(&mut self, min: u32, max: u32) {
        (self.options.thread_pool_min, self.options.thread_pool_max) = (min, max);
        let limits = self.options.workers();
        self.list.iter_mut().flatten().for_each(|engine| engine.limit_workers(limits));
    }

    /// The most requests of `aio=native` that one system call takes to the kernel, from here on; 0 leaves it to the
    /// engine.
    pub fn set_aio_max_batch(&mut self, most: u32) {
        self.options.aio_max_batch = most;
        self.list.iter_mut().flatten().for_each(|engine| engine.limit_batch(most));
    }

    /// Lets go of a disk. None of its requests should be in flight; where some are, the disk is let go of when the
    /// last one has been reaped.
    pub fn detach(&mut self, slot: DiskSlot) {
        self.lift_limits(slot);
        let Some(Some(attached)) = self.slots.get_mut(slot.0 as usize) else { return };
        attached.leaving = true;
        self.free_if_left(slot.0);
    }

    /// As [`detach`](Self::detach); `held` is dropped when the disk has been let go of.
    pub fn detach_telling(&mut self, slot: DiskSlot, held: Sender<()>) {
        if let Some(Some(attached)) = self.slots.get_mut(slot.0 as usize) {
            attached.held = Some(held);
        }
        self.detach(slot);
    }

    fn free_if_left(&mut self, slot: u32) {
        let place = &mut self.slots[slot as usize];
        let Some(attached) = place.take_if(|attached| attached.leaving && attached.in_flight == 0) else { return };
        for kind in kinds(attached.kind, &attached.disk) {
            if let Some(engine) = &mut self.list[kind as usize] {
                engine.detach(slot);
            }
        }
    }

    /// Takes a request; it starts at the next [`submit`](Backend::submit). Makes no system call, and allocates nothing
    /// in the steady state.
    ///
    /// A request that makes no sense completes with an error: `EINVAL` outside the disk or not made of whole 512-byte
    /// sectors, `EROFS` where a read-only disk would change.
    ///
    /// # Panics
    ///
    /// If `slot` is not attached.
    pub fn push(&mut self, slot: DiskSlot, request: Request) {
        let attached = self.slots[slot.0 as usize].as_mut().expect("the slot is attached");
        attached.in_flight += 1;
        self.in_flight += 1;
        // All that limits cost a disk without them.
        if attached.disk.throttle.version() != 0 {
            return self.hold(slot.0, request);
        }
        self.start(slot.0, request);
    }

    /// Gives a request to who runs it.
    #[inline]
    fn start(&mut self, slot: u32, request: Request) {
        self.end_alone();
        let attached = self.slots[slot as usize].as_ref().expect("the slot is attached");
        let mut job = Job::new(slot, request);
        let kind = match triage::triage(&attached.disk, &mut job) {
            Verdict::Engine if self.in_flight == 1 && cached::suits(attached, &job) => return self.alone = Some(job),
            Verdict::Engine if attached.kind == Kind::Threads || triage::enter(&attached.disk, &job) => attached.kind,
            Verdict::Engine | Verdict::Worker => {
                self.counters.fallbacks.add(u64::from(attached.kind != Kind::Threads));
                Kind::Threads
            }
            Verdict::Bounce => {
                self.counters.bounced.add(1);
                Kind::Threads
            }
            Verdict::Answered(result) => {
                self.counters.answered.add(1);
                let Request { token, buffers, .. } = job.request;
                self.answers.push_back((slot, Completion { token, result, buffers }));
                return;
            }
        };
        self.give(kind, job);
    }

    #[inline]
    fn give(&mut self, kind: Kind, job: Job) {
        if let Some(engine) = &mut self.list[kind as usize] {
            engine.push(job);
        }
    }

    /// Has a request of a limited disk wait for its turn, which may be this one.
    #[cold]
    fn hold(&mut self, slot: u32, request: Request) {
        let Some(Attached { disk, lane, free, unlimited, .. }) = &mut self.slots[slot as usize] else { return };
        let limited = disk.throttled(request.op).filter(|_| !*unlimited);
        match limited.and_then(|direction| Some((direction, Lane::current(lane, &disk.throttle, free)?))) {
            Some((direction, lane)) => lane.hold(direction, request),
            None => free.push_back(request),
        }
        self.look = Some(Nanos::ZERO);
    }

    /// Starts what need not wait any longer, at the end of the batch.
    #[cold]
    fn look(&mut self, now: Nanos) {
        self.look = None;
        for slot in 0..self.slots.len() {
            let Self { slots, look, .. } = self;
            let Some(Attached { disk, lane, free, unlimited, .. }) = &mut slots[slot] else { continue };
            if !*unlimited
                && lane.is_some()
                && let Some(lane) = Lane::current(lane, &disk.throttle, free)
            {
                let next = lane.release(now, free);
                *look = (*look).into_iter().chain(next).min();
            }
            self.start_free(slot);
        }
    }

    /// Starts as much as one slot may in a turn, and has the loop come back for the rest.
    fn start_free(&mut self, slot: usize) {
        let (mut bytes, mut pieces) = (0, 0);
        while bytes < TURN_BYTES
            && pieces < TURN_PIECES
            && let Some(request) = self.slots[slot].as_mut().and_then(|attached| attached.free.pop_front())
        {
            bytes += request.len;
            pieces += request.buffers.len();
            self.start(slot as u32, request);
        }
        if self.slots[slot].as_ref().is_some_and(|attached| !attached.free.is_empty()) {
            self.look = Some(Nanos::ZERO);
        }
    }

    /// Limits have changed: looks at the end of this batch who may go.
    pub fn look_at_limits(&mut self) {
        self.look = Some(Nanos::ZERO);
    }

    /// What waits for its turn on a slot begins at the next submit, and what is pushed from here on waits for none: the
    /// slot is being drained, and limits must not hold that up.
    pub fn lift_limits(&mut self, slot: DiskSlot) {
        let Some(Some(attached)) = self.slots.get_mut(slot.0 as usize) else { return };
        attached.unlimited = true;
        if let Some(lane) = attached.lane.take() {
            lane.flush(&mut attached.free);
            self.look = Some(Nanos::ZERO);
        }
    }

    /// The slot goes on after a drain, under its disk's limits.
    pub fn limit_again(&mut self, slot: DiskSlot) {
        if let Some(Some(attached)) = self.slots.get_mut(slot.0 as usize) {
            attached.unlimited = false;
        }
    }

    /// The counters of all engines, for whoever wants to read them.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }
}

impl Backend for EngineSet {
    type Completion = Completion;

    fn has_completions(&mut self) -> bool {
        !self.answers.is_empty() || self.list.iter_mut().flatten().any(|engine| engine.has_completions())
    }

    fn reap(&mut self, now: Nanos, done: &mut dyn FnMut(Completion)) {
        let Self { list, slots, answers, refused, in_flight, counters, .. } = self;
        let mut left = None;
        let mut settle = |slots: &mut [Option<Attached>], slot: u32| {
            *in_flight -= 1;
            let Some(attached) = &mut slots[slot as usize] else { return };
            attached.in_flight -= 1;
            if attached.leaving && attached.in_flight == 0 {
                left = Some(slot);
            }
        };
        while let Some((slot, completion)) = answers.pop_front() {
            settle(slots, slot);
            done(completion);
        }
        for engine in [Kind::Null, Kind::Threads] {
            let Some(engine) = &mut list[engine as usize] else { continue };
            engine.reap(now, &mut |Finished { job, result }| {
                note_failure(slots, &job, result);
                settle(slots, job.slot);
                done(completion(job, result));
            });
        }
        for engine in [Kind::Native, Kind::Uring] {
            let Some(engine) = &mut list[engine as usize] else { continue };
            engine.reap(now, &mut |Finished { job, result }| {
                if let Some(attached) = &slots[job.slot as usize] {
                    triage::leave(&attached.disk, &job);
                    if let Err(errno) = result
                        && triage::deserves_a_worker(job.request.op, errno)
                    {
                        counters.fallbacks.add(1);
                        refused.push(job);
                        return;
                    }
                }
                note_failure(slots, &job, result);
                settle(slots, job.slot);
                done(completion(job, result));
            });
        }
        if let Some(threads) = &mut list[Kind::Threads as usize] {
            for job in refused.drain(..) {
                threads.push(job);
            }
        }
        // Two that leave in one go are rare enough to look for the other.
        if left.is_some() {
            for slot in 0..self.slots.len() as u32 {
                self.free_if_left(slot);
            }
        }
    }

    fn submit(&mut self, now: Nanos) {
        if self.look.is_some_and(|at| at <= now) {
            self.look(now);
        }
        if let Some(job) = self.alone.take() {
            self.run_alone(job);
        }
        for engine in self.list.iter_mut().flatten() {
            engine.submit(now);
        }
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }

    fn deadline(&self) -> Option<Nanos> {
        self.list.iter().flatten().filter_map(|engine| engine.deadline()).chain(self.look).min()
    }

    fn arm(&mut self) -> bool {
        let quiet = self.answers.is_empty() && self.list.iter_mut().flatten().all(|engine| engine.arm());
        if !quiet {
            self.suppress();
        }
        quiet
    }

    fn suppress(&mut self) {
        for engine in self.list.iter_mut().flatten() {
            engine.suppress();
        }
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.list.iter().flatten().filter_map(|engine| engine.descriptor()).collect()
    }
}

impl Drop for EngineSet {
    /// Waits for what is in flight, and lets those pass who wait for it.
    fn drop(&mut self) {
        // The workers last: they may be waiting for a write of the others to leave a disk's gate.
        for kind in [Kind::Native, Kind::Uring] {
            let Some(engine) = self.list[kind as usize].take() else { continue };
            engine.end(&mut |job| {
                if let Some(attached) = &self.slots[job.slot as usize] {
                    triage::leave(&attached.disk, &job);
                }
            });
        }
        self.list = [const { None }; ENGINES];
    }
}

/// Leaves word of a request that an engine could not run; memory that the guest has taken away is no failure of the disk.
fn note_failure(slots: &[Option<Attached>], job: &Job, result: Result<(), Errno>) {
    if let (Err(errno), Some(attached)) = (result, &slots[job.slot as usize])
        && errno != Errno::FAULT
    {
        attached.disk.failures.note(job.request.op, errno);
    }
}

fn completion(job: Job, result: Result<(), Errno>) -> Completion {
    Completion { token: job.request.token, result, buffers: job.request.buffers }
}
