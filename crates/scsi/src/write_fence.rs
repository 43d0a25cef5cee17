//! Keeps commands that change the medium apart where they must not overlap.
//!
//! COMPARE AND WRITE reads, compares and writes as if nothing happened in between (SBC-4). So it *locks* its range:
//!
//! 1. A command that begins to change the medium while the lock is held, and overlaps it, waits.
//! 2. Before it reads, the lock's holder waits for every command that was changing the medium already.
//!
//! Commands that change the medium *enter* and *leave*, anew for each of their operations: nobody waits for all of a long one.
//! This costs them two additions to a counter which few threads share, and a load of a number that hardly ever changes. The
//! counters do not say which blocks are being changed, so the second wait is for all commands that have entered, whatever their
//! range. It is not for those that enter later: each counter has two halves, and newcomers count in the one while the other
//! empties.
//!
//! PREEMPT AND ABORT uses the second wait alone: when it ends, no write of the preempted nexus is in progress any more.
//!
//! A wait is for all who had a ticket when newcomers were sent to the other half: whoever begins the next one, and however
//! many others want one, nobody waits for more than two.
//!
//! Nothing is polled. A command that has to wait leaves a waker, and waits for one of two things:
//!
//! - An entry in the book: an overlapping lock, or, for another lock, an older wait. It is looked at and the waker is
//!   left under the book's mutex. It is removed under the same mutex, and the wakers are taken with it. So either the entry is
//!   gone when it is looked at, or the waker is there when it is removed.
//! - A half of the counters, which empties without the mutex. Who waits first stores in `drains` which half it waits for, and
//!   then loads the counters. A command that leaves first decrements its counter, then loads `drains`, and wakes who waits if
//!   it was the last in its lane. All four accesses are `SeqCst`, so either who waits sees the counter at zero, or the
//!   command that leaves sees that its half is awaited. Whoever sees the half empty wakes the others, which have one to wait
//!   for no more.
//!
//! `tests/write_fence.rs` walks through the interleavings with loom.
//!
//! Somebody within may have an operation that is a long way from its disk: one that waits for the disk's limits. Whoever may have
//! such a one is a *holder*, and is woken when a wait begins. It looks which of them hold somebody up, has those leave, and
//! enters anew with them, where nobody waits for it.
//!
//! A wake does not promise success. One waker stands for all commands that wait in one queue, and all of them are retried. So
//! that their number is what this costs and not its square, who waits in the line knows how far it has looked through those
//! before it: nobody ever comes in between, so it looks at each of them once, but for the one that is in its way.

use std::collections::BTreeMap;
use std::mem;
use std::ops::Range;
use std::sync::PoisonError;
use std::task::Waker;

use crate::sync::{AtomicU32, AtomicUsize, LANES, Mutex, MutexGuard, Ordering};

/// The most locks at a time. While there are any, every change of the medium searches all of them, so that their number is a
/// cost to the other initiators of the unit. The last one is for who has waited longest.
pub(crate) const LOCKS: usize = 256;

/// How many of those before it in the line who waits looks at in one try: what a try may cost those who wait for the book.
pub(crate) const LOOKS: usize = 256;

/// The most wakers that are kept. A queue in which no command waits any more leaves its waker behind.
pub(crate) const WAKERS: usize = 1024;

/// Nobody waits for either half.
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
    /// The half that somebody waits for, or `NO_DRAIN`.
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
    last: Ticket,
    pub(crate) locks: Vec<(Ticket, Range<u64>)>,
    /// Those who wait for a lock, or for one to go, by their places.
    line: BTreeMap<Ticket, Waiter>,
    /// The last ticket that there was when newcomers were sent to the other half.
    turned: Ticket,
    /// Tickets up to this one wait for nobody within any more.
    drained: Ticket,
    /// The wakers of queues in which commands wait for a lock to be removed, one for each queue.
    pub(crate) waiting: Vec<Waker>,
    /// Likewise for a half to empty.
    draining: Vec<Waker>,
    /// Those of holders, and whether they have been woken for the half that is waited for.
    holders: Vec<Waker>,
    called: bool,
    /// The last ticket that has waited for older locks to go.
    outliving: Ticket,
}

#[derive(Debug)]
struct Waiter {
    range: Range<u64>,
    /// Of those before it, nobody whose place is before this one wants some of it.
    seen: Ticket,
}

/// Where a command that has entered is counted.
#[derive(Debug)]
#[must_use = "whoever enters must leave"]
pub(crate) struct Pass {
    lane: u8,
    half: u8,
}

/// Identifies a lock, a wait without one, or a place among those who wait for one. Older ones are less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
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
            self.wake_draining();
        }
    }

    /// Has who waits look at its half again.
    #[cold]
    fn wake_draining(&self) {
        // They may wait for the other half by now: then they are woken once for nothing.
        let draining = mem::take(&mut self.book().draining);
        draining.into_iter().for_each(Waker::wake);
    }

    #[inline]
    fn counter(&self, Pass { lane, half }: &Pass) -> &AtomicUsize {
        &self.lanes[usize::from(*lane)].0[usize::from(*half)]
    }

    /// Locks `range`, unless another lock has some of it, or somebody who waits for one wants some of it, or there are too
    /// many; then it fails with a place among those who wait, and `waker` is woken when it is worth another try
    /// [from there](Self::lock_in_turn). Those who were within already still are: [`drained`](Self::drained) says when they
    /// have left.
    pub(crate) fn lock(&self, range: Range<u64>, waker: &Waker) -> Result<Ticket, Ticket> {
        let mut book = self.book();
        let place = book.ticket();
        self.lock_from(&mut book, place, Waiter::new(range), waker).ok_or(place)
    }

    /// A place for who waits, also [to enter](Self::enter): nobody who comes later locks some of `range` before it is released.
    pub(crate) fn line_up(&self, range: Range<u64>) -> Ticket {
        let mut book = self.book();
        let place = book.ticket();
        book.line.insert(place, Waiter::new(range));
        place
    }

    /// As [`lock`](Self::lock), for who has a place: who came later is behind it.
    pub(crate) fn lock_in_turn(&self, place: Ticket, waker: &Waker) -> Option<Ticket> {
        let mut book = self.book();
        let waiter = book.line.remove(&place).expect("who has a place is in the line");
        self.lock_from(&mut book, place, waiter, waker)
    }

    /// Locks, or has the waiter take its place.
    fn lock_from(&self, book: &mut Book, place: Ticket, mut waiter: Waiter, waker: &Waker) -> Option<Ticket> {
        if !book.is_free(place, &mut waiter, waker) {
            book.line.insert(place, waiter);
            return None;
        }
        let ticket = book.ticket();
        book.locks.push((ticket, waiter.range));
        self.locked.fetch_add(1, Ordering::SeqCst);
        Some(ticket)
    }

    /// A ticket to wait with.
    pub(crate) fn queue(&self) -> Ticket {
        self.book().ticket()
    }

    /// Has `waker` woken whenever a wait begins that those within may [hold up](Self::holds_up).
    pub(crate) fn add_holder(&self, waker: Waker) {
        self.book().holders.push(waker);
    }

    /// Takes one such waker back.
    pub(crate) fn remove_holder(&self, waker: &Waker) {
        let holders = &mut self.book().holders;
        if let Some(at) = holders.iter().position(|other| other.will_wake(waker)) {
            holders.swap_remove(at);
        }
    }

    /// Whether somebody waits for who has this pass to leave.
    pub(crate) fn holds_up(&self, pass: &Pass) -> bool {
        // Stored before the counters are loaded by who waits, and loaded here after this one was counted.
        self.drains.load(Ordering::SeqCst) == usize::from(pass.half)
    }

    /// Likewise for a lock.
    pub(crate) fn is_outlived(&self, ticket: Ticket) -> bool {
        self.book().outliving > ticket
    }

    /// Whether everybody has left who was within when the ticket was given out; if not, `waker` is woken when it is worth
    /// another try.
    pub(crate) fn drained(&self, ticket: Ticket, waker: &Waker) -> bool {
        let mut book = self.book();
        while book.drained < ticket {
            // Newcomers do not count there, but for those who looked where before the last turn.
            let idle = (self.epoch.load(Ordering::Relaxed) + 1) % 2;
            if !self.awaits(idle) {
                wait(&mut book.draining, waker);
                let called = if mem::replace(&mut book.called, true) { Vec::new() } else { book.holders.clone() };
                // So that who is woken need not wait for the book.
                drop(book);
                called.into_iter().for_each(Waker::wake);
                return false;
            }
            book.called = false;
            if book.drained < book.turned {
                book.drained = book.turned;
                self.end_drain(&mut book);
            } else {
                book.turned = book.last;
                self.epoch.fetch_add(1, Ordering::SeqCst);
            }
        }
        true
    }

    /// Whether a half is empty. If it is not, who leaves it last wakes the drain: said before the look, as who leaves
    /// counts down before the look whether anybody waits.
    fn awaits(&self, half: usize) -> bool {
        self.drains.store(half, Ordering::SeqCst);
        self.lanes.iter().all(|lane| lane.0[half].load(Ordering::SeqCst) == 0)
    }

    /// Who still waits for a half says so anew.
    fn end_drain(&self, book: &mut Book) {
        self.drains.store(NO_DRAIN, Ordering::SeqCst);
        book.called = false;
        book.draining.drain(..).for_each(Waker::wake);
    }

    /// Whether no lock is left that is older than the ticket; if one is, `waker` is woken when it is worth another try.
    pub(crate) fn outlived(&self, ticket: Ticket, waker: &Waker) -> bool {
        let mut book = self.book();
        let outlived = book.locks.iter().all(|(other, _)| *other > ticket);
        if !outlived {
            wait(&mut book.waiting, waker);
            if book.outliving < ticket {
                book.outliving = ticket;
                let called = book.holders.clone();
                drop(book);
                called.into_iter().for_each(Waker::wake);
            }
        }
        outlived
    }

    /// Gives a ticket back, and what it locked, or the place.
    pub(crate) fn release(&self, ticket: Ticket) {
        let mut book = self.book();
        if let Some(at) = book.locks.iter().position(|(other, _)| *other == ticket) {
            book.locks.swap_remove(at);
            self.locked.fetch_sub(1, Ordering::SeqCst);
        }
        if book.line.remove(&ticket).is_none() && book.drained < ticket {
            // It may be the only one that waits.
            self.end_drain(&mut book);
        }
        let waiting = mem::take(&mut book.waiting);
        // So that who is woken need not wait for the book.
        drop(book);
        waiting.into_iter().for_each(Waker::wake);
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Leaves a waker among others.
pub(crate) fn wait(wakers: &mut Vec<Waker>, waker: &Waker) {
    if wakers.iter().any(|other| other.will_wake(waker)) {
        return;
    }
    if wakers.len() == WAKERS {
        // Who still waits will leave its waker anew.
        wakers.drain(..).for_each(Waker::wake);
    }
    wakers.push(waker.clone());
}

impl Waiter {
    fn new(range: Range<u64>) -> Self {
        Self { range, seen: Ticket::default() }
    }
}

impl Book {
    fn ticket(&mut self) -> Ticket {
        self.last.0 += 1;
        self.last
    }

    /// Whether no lock has some of `range`; if one has, `waker` is woken when a lock goes.
    fn admits(&mut self, range: &Range<u64>, waker: &Waker) -> bool {
        let overlaps = self.locks.iter().any(|(_, other)| overlap(range, other));
        if overlaps {
            wait(&mut self.waiting, waker);
        }
        !overlaps
    }

    /// Whether the waiter, who is not in the line now, may lock from its place; if not, `waker` is woken when it is worth
    /// another try.
    fn is_free(&mut self, place: Ticket, waiter: &mut Waiter, waker: &Waker) -> bool {
        let is_first = self.line.first_key_value().is_none_or(|(other, _)| *other > place);
        let room = if is_first { LOCKS } else { LOCKS - 1 };
        let overlaps = |other: &Range<u64>| overlap(&waiter.range, other);
        let mut before = self.line.range(waiter.seen..place);
        let in_its_way = before.by_ref().take(LOOKS).find(|(_, other)| overlaps(&other.range));
        let next = in_its_way.or_else(|| before.next());
        let is_free = next.is_none() && self.locks.len() < room && !self.locks.iter().any(|(_, other)| overlaps(other));
        waiter.seen = next.map_or(place, |(other, _)| *other);
        if next.is_some() && in_its_way.is_none() {
            // It goes on from there when others have had their turns.
            waker.wake_by_ref();
        } else if !is_free {
            wait(&mut self.waiting, waker);
        }
        is_free
    }
}
