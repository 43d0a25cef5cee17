//! What I/O threads run an image's requests on: each has an engine of its own, and all of them the image's one handle,
//! because the exclusive lock is a handle's.
//!
//! ```text
//!  engine ──start──▶ librbd ──its threads──▶ list of completions, and an eventfd
//!     ▲                                            │ poll: whoever looks
//!     └──── inbox ◀── another engine that found it ┘
//! ```
//!
//! librbd announces completions on one eventfd for each image: that of the engine that is there longest. Any engine finds
//! all completions where it looks, and passes on what is not its own. A disk on one thread has nobody to pass anything to.

#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egret_disk::{Engine, EngineError, Job, Jobs, Op};
use egret_event_loop::{EventNotifier, Nanos};
use rustix::io::Errno;

use crate::flights::{self, Event, Flights};
use crate::image::Kept;

/// An image, and the engines that there are for it.
pub(crate) struct Shared {
    pub(crate) name: String,
    pub(crate) image: Arc<Kept>,
    members: Mutex<Members>,
    /// Whether completions may be another engine's.
    several: AtomicBool,
    /// Whether another client has taken the lock away.
    fenced: AtomicBool,
}

#[derive(Default)]
struct Members {
    /// By their numbers; the first one is where completions are announced.
    list: Vec<(u32, Arc<Inbox>)>,
    /// Numbers are not used again: what an engine has left behind completes one day.
    next: u32,
}

/// Completions that other engines found.
struct Inbox {
    events: Mutex<Vec<Event>>,
    has_some: AtomicBool,
    bell: EventNotifier,
}

impl Inbox {
    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    pub(crate) fn new(name: String, image: Kept) -> Self {
        Self {
            name,
            image: Arc::new(image),
            members: Mutex::default(),
            several: AtomicBool::new(false),
            fenced: AtomicBool::new(false),
        }
    }

    /// Whether another client writes to the image, and this one never will again.
    pub(crate) fn is_lost(&self) -> bool {
        self.fenced.load(Ordering::Relaxed)
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn engine(self: &Arc<Self>) -> Result<RbdEngine, EngineError> {
        let bell = EventNotifier::new().map_err(EngineError::Event)?;
        let inbox = Arc::new(Inbox { events: Mutex::default(), has_some: AtomicBool::new(false), bell });
        let mut members = self.members();
        if members.list.is_empty() {
            self.image.announce_on(&inbox.bell).map_err(|e| EngineError::Event(e.into()))?;
        }
        let number = members.next;
        members.next += 1;
        members.list.push((number, Arc::clone(&inbox)));
        self.several.store(members.next > 1, Ordering::Release);
        drop(members);
        Ok(RbdEngine {
            flights: Flights::new(Arc::clone(&self.image), number),
            shared: Arc::clone(self),
            number,
            inbox,
            pushed: VecDeque::new(),
            events: Vec::new(),
            done: Vec::new(),
        })
    }

    fn leave(&self, number: u32) {
        let mut members = self.members();
        let was_first = members.list.first().is_some_and(|(first, _)| *first == number);
        members.list.retain(|(member, _)| *member != number);
        if let (true, Some((_, next))) = (was_first, members.list.first()) {
            if let Err(e) = self.image.announce_on(&next.bell) {
                tracing::error!("'{}': completions are not announced any more: {e}", self.name);
            }
            // Some may have been announced to nobody.
            next.bell.set();
        }
    }

    #[cold]
    fn pass_on(&self, event: Event) {
        let members = self.members();
        // What an engine left behind is nobody's.
        let Some((_, inbox)) = members.list.iter().find(|(number, _)| *number == event.engine) else { return };
        inbox.events().push(event);
        inbox.has_some.store(true, Ordering::Release);
        inbox.bell.set();
    }

    /// Notes whether a request failed because another client has the lock now, and has kept this one from writing.
    #[cold]
    fn look_for_fence(&self, op: Op, errno: Errno) {
        match op {
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard | Op::Flush if errno == Errno::ROFS => {
                self.lose(errno);
            }
            _ => self.look_for_block(errno),
        }
    }

    /// As [`look_for_fence`](Self::look_for_fence), of anything that failed: this is what a client is told that is on the
    /// block list.
    pub(crate) fn look_for_block(&self, errno: Errno) {
        if errno == Errno::SHUTDOWN {
            self.lose(errno);
        }
    }

    fn lose(&self, errno: Errno) {
        if !self.fenced.swap(true, Ordering::Relaxed) {
            self.image.give_connection_up();
            tracing::error!(
                "'{}': another client has taken its exclusive lock ({errno}); requests wait until this disk is opened anew \
                 (blockdev-reopen, and then block-export-resume)",
                self.name
            );
        }
    }
}

/// See the module's description.
pub(crate) struct RbdEngine {
    shared: Arc<Shared>,
    number: u32,
    inbox: Arc<Inbox>,
    pushed: VecDeque<Box<Job>>,
    flights: Flights,
    /// Completions that were found and not looked at.
    events: Vec<Event>,
    done: Jobs,
}

impl RbdEngine {
    /// Looks for completions, whoever's they are.
    fn look(&mut self) {
        let several = self.shared.several.load(Ordering::Relaxed);
        if several && self.inbox.has_some.load(Ordering::Acquire) {
            let mut inbox = self.inbox.events();
            self.inbox.has_some.store(false, Ordering::Relaxed);
            self.events.append(&mut inbox);
        }
        if !several && self.flights.is_empty() {
            return;
        }
        let known = self.events.len();
        self.shared.image.poll(&mut self.events);
        // Whether there are several or not: another engine may have come, and had something done, since that was looked at.
        flights::take_others(&mut self.events, known, self.number, |event| self.shared.pass_on(event));
    }

    fn finish(&mut self, finished: Box<Job>) {
        if let Err(errno) = finished.result {
            self.shared.look_for_fence(finished.request.op, errno);
        }
        self.done.push(finished);
    }
}

impl Engine for RbdEngine {
    fn push(&mut self, job: Box<Job>) {
        self.pushed.push_back(job);
    }

    fn submit(&mut self, _now: Nanos) {
        // What waits is begun at the end of the turn that has found a completion.
        while self.flights.has_room()
            && let Some(job) = self.pushed.pop_front()
        {
            if let Some(finished) = self.flights.start(job) {
                self.finish(finished);
            }
        }
    }

    fn has_completions(&mut self) -> bool {
        if self.events.is_empty() && self.done.is_empty() {
            self.look();
        }
        !self.events.is_empty() || !self.done.is_empty()
    }

    fn reap(&mut self, _now: Nanos, done: &mut dyn FnMut(Box<Job>)) {
        self.look();
        while let Some(event) = self.events.pop() {
            if let Some(finished) = self.flights.advance(event) {
                self.finish(finished);
            }
        }
        self.done.drain(..).for_each(done);
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.inbox.bell.as_raw_fd())
    }

    /// Does not wait: what librbd has it keeps, with its memory.
    fn end(mut self: Box<Self>, left: &mut dyn FnMut(Box<Job>)) {
        self.pushed.drain(..).for_each(&mut *left);
        self.done.drain(..).for_each(left);
    }
}

impl Drop for RbdEngine {
    fn drop(&mut self) {
        self.shared.leave(self.number);
    }
}
