//! Keeps commands that change the medium apart where they must not overlap.
//!
//! COMPARE AND WRITE reads, compares and writes as if nothing happened in between (SBC-4). So it *locks* its range:
//!
//! 1. A command that begins to change the medium while the lock is held, and overlaps it, waits.
//! 2. Before it reads, the lock's holder waits for every command that was changing the medium already.
//!
//! Commands that change the medium *enter* and *leave*. This costs them two additions to a counter which few threads share,
//! and a load of a number that hardly ever changes. The counters do not say which blocks are being changed, so the second
//! wait is for all commands that have entered, whatever their range. It is not for those that enter later: each counter has
//! two halves, and newcomers count in the one while the other empties.
//!
//! PREEMPT AND ABORT uses the second wait alone: when it ends, no write of the preempted nexus is in progress any more.
//!
//! Nothing is polled. A command that has to wait leaves a waker, and waits for one of two things:
//!
//! - An entry in the book: an overlapping lock, or the drain of another command. The entry is looked at and the waker is left
//!   under the book's mutex. The entry is removed under the same mutex, and the wakers are taken with it. So either the entry
//!   is gone when it is looked at, or the waker is there when it is removed.
//! - A half of the counters, which empties without the mutex. The drain first stores in `drains` which half it waits for, and
//!   then loads the counters. A command that leaves first decrements its counter, then loads `drains`, and wakes the drain if
//!   it was the last in its lane. All four accesses are `SeqCst`, so either the drain sees the counter at zero, or the
//!   command that leaves sees that its half is awaited.
//!
//! `tests/write_fence.rs` walks through the interleavings with loom.
//!
//! A wake does not promise success. One waker stands for all commands that wait in one queue, and all of them are retried.

use std::ops::Range;
use std::sync::PoisonError;
use std::task::Waker;

use crate::sync::{AtomicU32, AtomicUsize, LANES, Mutex, MutexGuard, Ordering};

/// The most locks at a time. While there are any, every change of the medium searches all of them, so that their number is a
/// cost to the other initiators of the unit.
pub(crate) const LOCKS: usize = 256;

/// The most wakers that are kept. A queue in which no command waits any more leaves its waker behind.
pub(crate) const WAKERS: usize = 1024;

/// No drain waits for either half.
const NO_DRAIN: usize = usize::MAX;

/// Two halves of a counter, on cache lines that no other counter is on.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Lane([AtomicUsize; 2]);

/// See the module's documentation. Ranges are in bytes.
#[derive(Debug)]
pub(crate) struct WriteFence {
    lanes: [Lane; LANES],
    /// Its lowest bit says in which half newcomers count.
    epoch: AtomicUsize,
    /// How many locks there are. While it is zero the book is not looked at.
    locked: AtomicU32,
    /// The half that a drain waits for, or `NO_DRAIN`.
    drains: AtomicUsize,
    book: Mutex<Book>,
}

impl Default for WriteFence {
    fn default() -> Self {
        Self {
            lanes: Default::default(),
            epoch: AtomicUsize::new(0),
            locked: AtomicU32::new(0),
            drains: AtomicUsize::new(NO_DRAIN),
            book: Mutex::default(),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Book {
    next: u64,
    pub(crate) locks: Vec<(Ticket, Range<u64>)>,
    pub(crate) draining: Option<Drain>,
    /// The wakers of queues in which commands wait for one of these to be removed, one for each queue.
    pub(crate) waiting: Vec<Waker>,
}

/// A wait for the commands that have entered.
#[derive(Debug)]
pub(crate) struct Drain {
    ticket: Ticket,
    /// The half that has to empty.
    half: usize,
    /// Whether the other one has been empty before.
    second: bool,
    waker: Waker,
}

/// Where a command that has entered is counted.
#[derive(Debug)]
#[must_use = "whoever enters must leave"]
pub(crate) struct Pass {
    lane: u8,
    half: u8,
}

/// Identifies a lock, or a wait without one. Older ones are less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

impl WriteFence {
    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a command that changes `range`. `None` if a lock overlaps it; then `waker` is woken when it is worth another
    /// try. `lane` says which counter to use.
    #[inline]
    pub(crate) fn enter(&self, lane: usize, range: &Range<u64>, waker: &Waker) -> Option<Pass> {
        let pass = Pass { lane: (lane % LANES) as u8, half: (self.epoch.load(Ordering::Relaxed) % 2) as u8 };
        // The count is stored before the locks are loaded, and `lock` does the reverse: one of the two sees the other.
        self.counter(&pass).fetch_add(1, Ordering::SeqCst);
        if self.locked.load(Ordering::SeqCst) == 0 || self.book().admits(range, waker) {
            return Some(pass);
        }
        self.leave(pass);
        None
    }

    /// Leaves: the change has ended. Beside the subtraction, the last command of a lane loads a number that hardly ever
    /// changes.
    #[inline]
    pub(crate) fn leave(&self, pass: Pass) {
        let was_last = self.counter(&pass).fetch_sub(1, Ordering::SeqCst) == 1;
        if was_last && self.drains.load(Ordering::SeqCst) == usize::from(pass.half) {
            self.wake_drain();
        }
    }

    /// Has the drain look at its half again.
    #[cold]
    fn wake_drain(&self) {
        // It may have ended meanwhile, or begun to wait for the other half: then it is woken once for nothing.
        let waker = self.book().draining.as_ref().map(|drain| drain.waker.clone());
        waker.into_iter().for_each(Waker::wake);
    }

    #[inline]
    fn counter(&self, Pass { lane, half }: &Pass) -> &AtomicUsize {
        &self.lanes[usize::from(*lane)].0[usize::from(*half)]
    }

    /// Locks `range`, unless another lock has some of it or there are too many; then `waker` is woken when it is worth
    /// another try. Those who were within already still are: [`drained`](Self::drained) says when they have left.
    pub(crate) fn lock(&self, range: Range<u64>, waker: &Waker) -> Option<Ticket> {
        let mut book = self.book();
        if book.locks.len() == LOCKS {
            book.wait(waker);
            return None;
        }
        if !book.admits(&range, waker) {
            return None;
        }
        let ticket = book.ticket();
        book.locks.push((ticket, range));
        self.locked.fetch_add(1, Ordering::SeqCst);
        Some(ticket)
    }

    /// A ticket to wait with.
    pub(crate) fn queue(&self) -> Ticket {
        self.book().ticket()
    }

    /// Whether everybody has left who was within when it was first asked for this ticket; if not, `waker` is woken when
    /// it is worth another try. One ticket's wait ends before the next begins.
    pub(crate) fn drained(&self, ticket: Ticket, waker: &Waker) -> bool {
        let mut book = self.book();
        // Who is in the half that newcomers do not use came before the last wait ended: that half is first.
        let idle = (self.epoch.load(Ordering::Relaxed) + 1) % 2;
        let drain =
            book.draining.get_or_insert_with(|| Drain { ticket, half: idle, second: false, waker: waker.clone() });
        if drain.ticket != ticket {
            book.wait(waker);
            return false;
        }
        drain.waker.clone_from(waker);
        if !self.awaits(drain.half) {
            return false;
        }
        if !drain.second {
            self.epoch.fetch_add(1, Ordering::SeqCst);
            (drain.half, drain.second) = (1 - drain.half, true);
            if !self.awaits(drain.half) {
                return false;
            }
        }
        self.end_drain(book);
        true
    }

    /// Whether a half is empty. If it is not, who leaves it last wakes the drain: said before the look, as who leaves
    /// counts down before the look whether anybody waits.
    fn awaits(&self, half: usize) -> bool {
        self.drains.store(half, Ordering::SeqCst);
        self.lanes.iter().all(|lane| lane.0[half].load(Ordering::SeqCst) == 0)
    }

    fn end_drain(&self, mut book: MutexGuard<'_, Book>) {
        book.draining = None;
        self.drains.store(NO_DRAIN, Ordering::SeqCst);
        wake(book);
    }

    /// Whether no lock is left that is older than the ticket; if one is, `waker` is woken when it is worth another try.
    pub(crate) fn outlived(&self, ticket: Ticket, waker: &Waker) -> bool {
        let mut book = self.book();
        let outlived = book.locks.iter().all(|(other, _)| *other > ticket);
        if !outlived {
            book.wait(waker);
        }
        outlived
    }

    /// Gives a ticket back, and what it locked.
    pub(crate) fn release(&self, ticket: Ticket) {
        let mut book = self.book();
        if let Some(at) = book.locks.iter().position(|(other, _)| *other == ticket) {
            book.locks.swap_remove(at);
            self.locked.fetch_sub(1, Ordering::SeqCst);
        }
        if book.draining.as_ref().is_some_and(|drain| drain.ticket == ticket) {
            self.end_drain(book);
        } else {
            wake(book);
        }
    }
}

/// Closes the book, and wakes all who wait for something in it to go.
fn wake(mut book: MutexGuard<'_, Book>) {
    let waiting = std::mem::take(&mut book.waiting);
    // So that who is woken need not wait for the book.
    drop(book);
    waiting.into_iter().for_each(Waker::wake);
}

impl Book {
    fn ticket(&mut self) -> Ticket {
        self.next += 1;
        Ticket(self.next)
    }

    /// Whether no lock has some of `range`; if one has, `waker` is woken when a lock goes.
    fn admits(&mut self, range: &Range<u64>, waker: &Waker) -> bool {
        let overlaps = self.locks.iter().any(|(_, other)| other.start < range.end && range.start < other.end);
        if overlaps {
            self.wait(waker);
        }
        !overlaps
    }

    fn wait(&mut self, waker: &Waker) {
        if self.waiting.iter().any(|other| other.will_wake(waker)) {
            return;
        }
        if self.waiting.len() == WAKERS {
            // Who still waits will leave its waker anew.
            self.waiting.drain(..).for_each(Waker::wake);
        }
        self.waiting.push(waker.clone());
    }
}
