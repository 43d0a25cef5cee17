//! Everything one I/O thread runs requests on.

#![forbid(unsafe_code)]

mod engines;
mod options;
mod page_cache;
mod slot;

use std::collections::VecDeque;
use std::mem;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use egret_event_loop::{Backend, Nanos};
use rustix::io::Errno;

use self::engines::Engines;
pub use self::options::EngineOptions;
use self::page_cache::PageCacheProbe;
use self::slot::Attached;
pub use self::slot::DiskSlot;
use crate::disk::Disk;
use crate::engine::Pinning;
use crate::engine_kind::EngineKind;
use crate::error::EngineError;
use crate::job::{Job, Jobs};
use crate::request::{Completion, Ended, FailedRequest, Op, PartOf, Request, RequestToken};
use crate::stats::Counters;
use crate::triage::{self, Verdict};

/// Of requests that waited for limits one slot starts so many bytes or pieces in a turn, and one request at most beyond
/// that. More may be released at a time, and an engine may copy all of it before the loop goes on. A queue takes in as
/// much in a turn.
const TURN_BYTES: u64 = 1 << 20;
const TURN_PIECES: usize = 1024;

/// Everything one I/O thread runs requests on.
///
/// A request is looked at once, then run by its disk's engine, or by worker threads where the engine cannot, and comes
/// out of [`reap`](Backend::reap) exactly once. Requests run side by side and complete in any order, as virtio has it:
/// only what a guest has seen complete comes before what it asks for then.
///
/// Dropping it waits for what is in flight, because the kernel uses the requests' memory until then.
pub struct EngineSet {
    engines: Engines,
    slots: Vec<Option<Attached>>,
    /// Completions without an engine.
    answers: VecDeque<(u32, Ended)>,
    /// Jobs on their way from an engine that refused them to the workers, or from those to the engine that does the rest;
    /// empty between calls.
    refused: Jobs,
    /// A read that began alone, kept until the batch is complete.
    alone: Option<Box<Job>>,
    /// Boxes of jobs that have ended, for the next ones.
    spare: Jobs,
    in_flight: u32,
    /// Whether a disk was let go of when the last of its requests ended, and so perhaps an engine.
    left: bool,
    /// When to release throttled requests, if there are some.
    throttle_timer: Option<Nanos>,
    counters: Arc<Counters>,
}

impl EngineSet {
    /// No engine yet: each is made by the first disk that needs it.
    pub fn new(options: EngineOptions) -> Self {
        Self {
            engines: Engines::new(options),
            slots: Vec::new(),
            answers: VecDeque::new(),
            refused: Vec::new(),
            alone: None,
            spare: Vec::new(),
            in_flight: 0,
            left: false,
            throttle_timer: None,
            counters: Arc::default(),
        }
    }

    /// Makes the ring of an io_uring engine ahead, if that would be its own: a thread that is confined makes none. A disk
    /// that needs it is told why it could not be had.
    pub fn make_ring_ahead(&mut self) {
        self.engines.make_ring_ahead();
    }

    /// Makes the engines that `disk` needs, as far as they are not there, so that whoever will attach it hears now that they
    /// cannot be had.
    ///
    /// # Errors
    ///
    /// As [`attach`](Self::attach).
    pub fn make_engines(&mut self, disk: &Arc<Disk>) -> Result<(), EngineError> {
        Attached::new(disk).engines().try_for_each(|kind| self.engines.make(kind, &self.counters))
    }

    /// Lets requests for `disk` be pushed. It may bring in an engine, and with it a descriptor.
    ///
    /// # Errors
    ///
    /// The disk's engine cannot be had, for the reason that the error names.
    pub fn attach(&mut self, disk: &Arc<Disk>) -> Result<DiskSlot, EngineError> {
        // Before anything else can fail halfway.
        self.make_engines(disk)?;
        let attached = Attached::new(disk);
        let slot = self.slots.iter().position(Option::is_none).unwrap_or(self.slots.len());
        for kind in attached.engines() {
            if let Some(engine) = self.engines.get(kind) {
                engine.attach(slot as u32, disk)?;
            }
        }
        self.slots.resize_with(self.slots.len().max(slot + 1), || None);
        self.slots[slot] = Some(attached);
        self.count_disks();
        Ok(DiskSlot(slot as u32))
    }

    /// Has the memory pinned of which all requests of `slot` are, in the course of time, where its engine is the better for
    /// it: io_uring's. To do so again changes nothing.
    pub fn pin(&mut self, slot: DiskSlot, pinning: Pinning) {
        let Some(Some(attached)) = self.slots.get(slot.0 as usize) else { return };
        if let Some(engine) = self.engines.get(attached.kind) {
            engine.pin(slot.0, pinning);
        }
    }

    /// How many worker threads stay, and how many there may be at most, from here on; those that are too many leave when
    /// they have done what they are at.
    pub fn set_thread_pool(&mut self, min: u32, max: u32) {
        self.engines.set_thread_pool(min, max);
    }

    /// The most requests of `aio=native` that one system call takes to the kernel, from here on; 0 leaves it to the
    /// engine.
    pub fn set_aio_max_batch(&mut self, most: u32) {
        self.engines.set_aio_max_batch(most);
    }

    /// Lets go of a disk. None of its requests should be in flight; where some are, the disk is let go of when the
    /// last one has been reaped.
    pub fn detach(&mut self, slot: DiskSlot) {
        self.disable_limits(slot);
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
        for kind in attached.engines() {
            if let Some(engine) = self.engines.get(kind) {
                engine.detach(slot);
            }
        }
        self.count_disks();
    }

    /// Tells the engines whether there are several disks.
    fn count_disks(&mut self) {
        let mut disks = self.slots.iter().flatten().map(|attached| Arc::as_ptr(&attached.disk));
        let first = disks.next();
        let several = disks.any(|other| Some(other) != first);
        self.engines.iter_mut().for_each(|engine| engine.set_beside_others(several));
    }

    /// Takes a request; it starts at the next [`submit`](Backend::submit), unless the disk has limits: then it may wait for
    /// them, and this returns whether that is so. Makes no system call, and allocates nothing in the steady state.
    ///
    /// A request that makes no sense completes with an error: `EINVAL` outside the disk or not made of whole 512-byte
    /// sectors, `EROFS` where a read-only disk would change.
    ///
    /// # Panics
    ///
    /// If `slot` is not attached.
    #[inline]
    pub fn push(&mut self, slot: DiskSlot, request: Request) -> bool {
        let part = PartOf::all(request.len);
        self.push_part(slot, request, part)
    }

    /// As [`push`](Self::push), of a part of what was asked for, which counts against limits as one request.
    ///
    /// # Panics
    ///
    /// If `slot` is not attached.
    #[inline]
    pub fn push_part(&mut self, slot: DiskSlot, request: Request, part: PartOf) -> bool {
        let attached = self.slots[slot.0 as usize].as_mut().expect("the slot is attached");
        attached.in_flight += 1;
        self.in_flight += 1;
        // All that limits cost a disk without them.
        if attached.disk.throttle.version() != 0 {
            self.throttle(slot.0, request, part);
            return true;
        }
        self.start(slot.0, request);
        false
    }

    /// Has a request run: by an engine, by workers, or by answering it.
    #[inline]
    fn start(&mut self, slot: u32, request: Request) {
        self.end_alone();
        let attached = self.slots[slot as usize].as_ref().expect("the slot is attached");
        if let Some(blkdebug) = &attached.disk.blkdebug
            && let Some(errno) = blkdebug.strike(&request)
        {
            return self.answers.push_back((slot, injected(slot, request, errno)));
        }
        let mut job = match self.spare.pop() {
            Some(mut spare) => {
                spare.reuse(slot, request);
                spare
            }
            None => Job::new(slot, request),
        };
        let kind = match triage::triage(&attached.disk, &mut job) {
            Verdict::Engine if self.in_flight == 1 && attached.probe.is_some() && PageCacheProbe::suits(&job) => {
                return self.alone = Some(job);
            }
            Verdict::Engine if !attached.kind.runs_in_kernel() || triage::try_lock(&attached.disk, &job) => {
                attached.kind
            }
            Verdict::Engine | Verdict::Worker => {
                self.counters.fallbacks.add(u64::from(attached.kind != EngineKind::THREADS));
                EngineKind::THREADS
            }
            Verdict::Bounce => {
                self.counters.bounced.add(1);
                EngineKind::THREADS
            }
            Verdict::Answered(result) => {
                self.counters.answered.add(1);
                let completion = completion(job.ended(result), &mut self.spare);
                self.answers.push_back((slot, Ended { completion, failed: None }));
                return;
            }
            Verdict::Lost(errno) => return self.refuse(job, errno),
        };
        self.give(kind, job);
    }

    /// Ends a flush of a disk that has lost writes.
    #[cold]
    fn refuse(&mut self, mut job: Box<Job>, errno: Errno) {
        self.counters.answered.add(1);
        let slot = job.slot;
        job.result = Err(errno);
        let failed = failure(&self.slots, &mut job, errno);
        self.answers.push_back((slot, Ended { completion: completion(job, &mut self.spare), failed }));
    }

    #[inline]
    fn give(&mut self, kind: EngineKind, job: Box<Job>) {
        if let Some(engine) = self.engines.get(kind) {
            engine.push(job);
        }
    }

    /// Runs a read that has stayed alone until its batch was complete.
    #[inline]
    fn run_alone(&mut self, job: Box<Job>) {
        let slot = job.slot;
        let Some(attached) = &mut self.slots[slot as usize] else { return };
        let kind = attached.kind;
        if PageCacheProbe::read(&mut attached.probe, &attached.disk, &job.request) {
            self.counters.cached.add(1);
            let completion = completion(job.ended(Ok(())), &mut self.spare);
            self.answers.push_back((slot, Ended { completion, failed: None }));
        } else {
            self.give(kind, job);
        }
    }

    /// Gives a read that was alone to its engine, since another request follows it.
    #[inline]
    fn end_alone(&mut self) {
        if let Some(job) = self.alone.take()
            && let Some(attached) = &self.slots[job.slot as usize]
        {
            self.give(attached.kind, job);
        }
    }

    /// Has a request of a limited disk wait for its turn, which may be this one.
    #[cold]
    fn throttle(&mut self, slot: u32, request: Request, part: PartOf) {
        let Some(Attached { disk, throttled, .. }) = &mut self.slots[slot as usize] else { return };
        throttled.enqueue(&disk.throttle, disk.throttled(request.op), request, part);
        self.throttle_timer = Some(Nanos::ZERO);
    }

    /// Starts those throttled requests that need not wait any longer, at the end of the batch.
    #[cold]
    fn start_throttled(&mut self, now: Nanos) {
        self.throttle_timer = None;
        for slot in 0..self.slots.len() {
            let Some(Attached { disk, throttled, .. }) = &mut self.slots[slot] else { continue };
            let next = throttled.release(&disk.throttle, now);
            self.throttle_timer = self.throttle_timer.into_iter().chain(next).min();
            self.start_released(slot);
        }
    }

    /// Starts as much as one slot may in a turn, and has the loop come back for the rest.
    fn start_released(&mut self, slot: usize) {
        let (mut bytes, mut pieces) = (0, 0);
        while bytes < TURN_BYTES
            && pieces < TURN_PIECES
            && let Some(request) = self.slots[slot].as_mut().and_then(|attached| attached.throttled.pop_released())
        {
            bytes += request.len;
            pieces += request.buffers.len();
            self.start(slot as u32, request);
        }
        if self.slots[slot].as_ref().is_some_and(|attached| attached.throttled.has_released()) {
            self.throttle_timer = Some(Nanos::ZERO);
        }
    }

    /// Limits have changed: throttled requests that they let through start at the end of this batch.
    pub fn restart_throttled(&mut self) {
        self.throttle_timer = Some(Nanos::ZERO);
    }

    /// Throttled requests of a slot start at the next submit, and so does what is pushed from here on: the slot is being
    /// drained, and limits must not hold that up. What they have no room for the disk [owes](Disk::limits_debt).
    pub fn disable_limits(&mut self, slot: DiskSlot) {
        let Some(Some(attached)) = self.slots.get_mut(slot.0 as usize) else { return };
        if attached.throttled.disable_limits() {
            self.throttle_timer = Some(Nanos::ZERO);
        }
    }

    /// Gives back the requests of a slot that wait for its disk's limits: no engine has them, and none will.
    pub fn withdraw(&mut self, slot: DiskSlot) -> Vec<Request> {
        let Some(Some(attached)) = self.slots.get_mut(slot.0 as usize) else { return Vec::new() };
        let requests = attached.throttled.withdraw();
        attached.in_flight -= requests.len() as u32;
        self.in_flight -= requests.len() as u32;
        requests
    }

    /// As [`withdraw`](Self::withdraw), of some of them, which keep their places: one that is pushed again, with its token, of its
    /// length and in its direction, has the turn that it would have had. Whoever takes requests back [says](Self::keep_places)
    /// which of them are not pushed again. What the limits let through already is not given back.
    pub fn withdraw_some(
        &mut self,
        slot: DiskSlot,
        now: Nanos,
        is_wanted: impl FnMut(&Request) -> bool,
    ) -> Vec<Request> {
        let Some(Some(attached)) = self.slots.get_mut(slot.0 as usize) else { return Vec::new() };
        let requests = attached.throttled.withdraw_some(&attached.disk.throttle, now, is_wanted);
        // Some that have their turn are to begin.
        self.throttle_timer = Some(Nanos::ZERO);
        attached.in_flight -= requests.len() as u32;
        self.in_flight -= requests.len() as u32;
        requests
    }

    /// Keeps no places of requests that do not come again, by their tokens. Says whether some are left.
    pub fn keep_places(&mut self, slot: DiskSlot, comes_again: impl FnMut(RequestToken) -> bool) -> bool {
        let Some(Some(attached)) = self.slots.get_mut(slot.0 as usize) else { return false };
        attached.throttled.keep_places(comes_again)
    }

    /// The slot goes on after a drain, under its disk's limits.
    pub fn enable_limits(&mut self, slot: DiskSlot) {
        if let Some(Some(attached)) = self.slots.get_mut(slot.0 as usize) {
            attached.throttled.enable_limits();
        }
    }

    /// The counters of all engines; any thread may read them.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }
}

impl Backend for EngineSet {
    type Completion = Ended;

    fn has_completions(&mut self) -> bool {
        !self.answers.is_empty() || self.engines.iter_mut().any(|engine| engine.has_completions())
    }

    fn reap(&mut self, now: Nanos, done: &mut dyn FnMut(Ended)) {
        let Self { engines, slots, answers, refused, spare, in_flight, counters, .. } = self;
        let mut left = None;
        let mut settle = |slots: &mut [Option<Attached>], slot: u32| {
            *in_flight -= 1;
            let Some(attached) = &mut slots[slot as usize] else { return };
            attached.in_flight -= 1;
            if attached.leaving && attached.in_flight == 0 {
                left = Some(slot);
            }
        };
        while let Some((slot, ended)) = answers.pop_front() {
            settle(slots, slot);
            done(ended);
        }
        for kind in EngineKind::ALL {
            let Some(engine) = engines.get(kind) else { continue };
            let mut end = |slots: &mut [Option<Attached>], mut job: Box<Job>| {
                let failed = job.result.err().and_then(|errno| failure(slots, &mut job, errno));
                settle(slots, job.slot);
                done(Ended { completion: completion(job, spare), failed });
            };
            if !kind.runs_in_kernel() {
                let is_remote = matches!(kind, EngineKind::Remote(_));
                engine.reap(now, &mut |mut job| {
                    if job.settles && job.result.is_ok() {
                        return refused.push(job);
                    }
                    // It is done, and stable. But its guest may never flush, and is to be told what is lost.
                    if is_remote
                        && job.is_to_be_stable
                        && job.result.is_ok()
                        && let Some(Attached { disk, .. }) = &slots[job.slot as usize]
                        && !disk.ignores_flushes()
                    {
                        job.result = disk.tell_loss();
                    }
                    end(slots, job);
                });
                continue;
            }
            engine.reap(now, &mut |job| {
                if let Some(attached) = &slots[job.slot as usize] {
                    triage::unlock(&attached.disk, &job);
                    if let Err(errno) = job.result
                        && triage::deserves_a_worker(job.request.op, errno)
                    {
                        counters.fallbacks.add(1);
                        refused.push(job);
                        return;
                    }
                }
                end(slots, job);
            });
        }
        for mut job in refused.drain(..) {
            let own = slots[job.slot as usize].as_ref().map(|attached| attached.kind);
            let kind = if mem::take(&mut job.settles) { own } else { Some(EngineKind::THREADS) };
            if let Some(engine) = kind.and_then(|kind| engines.get(kind)) {
                engine.push(job);
            }
        }
        // Two that leave in one go are rare enough to look for the other.
        if left.is_some() {
            for slot in 0..self.slots.len() as u32 {
                self.free_if_left(slot);
            }
            self.left = true;
        }
    }

    fn takes_leave(&mut self) -> bool {
        mem::take(&mut self.left)
    }

    fn submit(&mut self, now: Nanos) {
        if self.throttle_timer.is_some_and(|at| at <= now) {
            self.start_throttled(now);
        }
        if let Some(job) = self.alone.take() {
            self.run_alone(job);
        }
        for engine in self.engines.iter_mut() {
            engine.submit(now);
        }
    }

    fn in_flight(&self) -> u32 {
        self.in_flight
    }

    fn deadline(&self) -> Option<Nanos> {
        self.engines.iter().filter_map(|engine| engine.deadline()).chain(self.throttle_timer).min()
    }

    fn arm(&mut self) -> bool {
        let quiet = self.answers.is_empty() && self.engines.iter_mut().all(|engine| engine.arm());
        if !quiet {
            self.suppress();
        }
        quiet
    }

    fn suppress(&mut self) {
        for engine in self.engines.iter_mut() {
            engine.suppress();
        }
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let mut all = Vec::new();
        self.engines.iter().for_each(|engine| engine.descriptors(&mut all));
        all
    }

    fn announced(&mut self, fd: RawFd) {
        self.engines.iter_mut().for_each(|engine| engine.announced_on(fd));
    }
}

impl Drop for EngineSet {
    /// Waits for requests in flight, and unlocks the blocks that their writes had locked.
    fn drop(&mut self) {
        self.engines.end(&mut |job| {
            if let Some(attached) = &self.slots[job.slot as usize] {
                triage::unlock(&attached.disk, &job);
            }
        });
    }
}

/// What is known of a request that failed. Nothing is where the guest took its memory away (`EFAULT`): the disk is well.
#[cold]
fn failure(slots: &[Option<Attached>], job: &mut Job, mut errno: Errno) -> Option<Box<FailedRequest>> {
    let Attached { disk, .. } = slots[job.slot as usize].as_ref().filter(|_| errno != Errno::FAULT)?;
    // Of a device that is gone, or has less than it had, Linux says that it has no space left, or no such blocks to discard.
    if matches!(errno, Errno::NOSPC | Errno::INVAL) && disk.has_shrunk_below(job.bytes().end) {
        errno = Errno::IO;
        job.result = Err(errno);
    }
    let Request { mut op, offset, len, .. } = job.request;
    // As it was asked for: triage leaves to a sync what nothing else makes stable, and who tries it again may not ignore
    // flushes any more.
    if let Op::Write { fua } | Op::WriteZeroes { fua, .. } = &mut op {
        *fua |= job.is_to_be_stable;
    }
    Some(Box::new(FailedRequest { slot: DiskSlot(job.slot), op, offset, len, errno }))
}

/// A request that ends with an error on purpose: its engine does not see it, and the page cache has lost nothing.
#[cold]
fn injected(slot: u32, request: Request, errno: Errno) -> Ended {
    let Request { op, offset, len, token, buffers } = request;
    let failed = FailedRequest { slot: DiskSlot(slot), op, offset, len, errno };
    Ended { completion: Completion { token, result: Err(errno), buffers }, failed: Some(Box::new(failed)) }
}

/// What comes of a job, whose box goes to the `spare` ones.
#[inline]
fn completion(mut job: Box<Job>, spare: &mut Jobs) -> Completion {
    let Job { request: Request { token, buffers, .. }, result, .. } = &mut *job;
    let completion = Completion { token: *token, result: *result, buffers: mem::take(buffers) };
    spare.push(job);
    completion
}
