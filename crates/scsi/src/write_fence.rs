//! What keeps commands that change the medium apart where they must be.
//!
//! COMPARE AND WRITE reads, compares and writes as if nothing happened in between (SBC-4). So it *locks* its range:
//!
//! 1. A command that begins to change the medium while the lock is held, and overlaps it, waits.
//! 2. Before it reads, the lock's holder waits for every command that was changing the medium already.
//!
//! Commands that change the medium *enter* and *leave*, and that is all that they pay: two additions to a counter which
//! few threads share, and a look at a number that hardly ever changes. The counters do not say what is being changed,
//! so the second wait is for all of them, wherever they are; but not for those that enter later, which is what the two
//! halves of each counter are for: newcomers count in the one, while the other empties.
//!
//! PREEMPT AND ABORT uses the second wait alone: when it ends, nothing that the preempted nexus wrote is still under
//! way.
//!
//! Nobody polls. Whoever is kept waiting leaves a waker, and what it waits for is one of two things:
//!
//! - An entry in the book: a lock that is in the way, or another's drain. Both are looked at, and the waker is left, with
//!   the book at hand; whoever takes the entry out does so with the book at hand too, and takes the wakers along. So
//!   either the entry was gone when it was looked at, or the waker was there when it went.
//! - The drain's half of the counters, which is emptied without the book. So the drain says in `drains` which half it
//!   waits for, and looks at the counters *after that*; who leaves counts down, and looks at `drains` *after that*, and
//!   wakes if it was the last in its lane. In the one order that all four have (`SeqCst`) the drain sees the counter at
//!   zero, or the one who leaves sees that half awaited.
//!
//! To be woken is no promise. A waker is its holder's for all that waits in one place, one of it is enough, and all that
//! waits there is tried again.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

/// How many counters there are. More than these threads on one logical unit share some.
const LANES: usize = 16;

/// The most locks at a time. Every change looks through all of them while there is one, so that they cost those who
/// share the unit with who has them.
const LOCKS: usize = 256;

/// The most wakers that are kept. Places where nobody waits any more leave theirs behind.
const WAKERS: usize = 1024;

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
    /// How many locks there are. While it is zero nobody looks at the book.
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
struct Book {
    next: u64,
    locks: Vec<(Ticket, Range<u64>)>,
    draining: Option<Drain>,
    /// Who waits for one of these to go: one waker for each place where somebody does.
    waiting: Vec<Waker>,
}

/// A wait for those who are within.
#[derive(Debug)]
struct Drain {
    ticket: Ticket,
    /// The half that has to empty.
    half: usize,
    /// Whether the other one has been empty before.
    second: bool,
    waker: Waker,
}

/// Says where its holder has been counted.
#[derive(Debug)]
#[must_use = "whoever enters must leave"]
pub(crate) struct Pass {
    lane: u8,
    half: u8,
}

/// Names a lock, or a wait without one. Older ones are less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(u64);

impl WriteFence {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets in who changes `range`, unless a lock has some of it; then `waker` is woken when it is worth another try.
    /// `lane` says which counter to use.
    #[inline]
    pub(crate) fn enter(&self, lane: usize, range: &Range<u64>, waker: &Waker) -> Option<Pass> {
        let pass = Pass { lane: (lane % LANES) as u8, half: (self.epoch.load(Ordering::Relaxed) % 2) as u8 };
        // Counted first and looked second, and `lock` in the other order: one of the two sees the other.
        self.counter(&pass).fetch_add(1, Ordering::SeqCst);
        if self.locked.load(Ordering::SeqCst) == 0 || self.book().admits(range, waker) {
            return Some(pass);
        }
        self.leave(pass);
        None
    }

    /// Ends what `enter` began: the change is done. Beside the subtraction this is one look at a number that hardly ever
    /// changes, by whoever is the last in its lane.
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use super::*;
    use crate::testing::{Woken, await_wake, waker_of_this_thread};

    /// Two places where commands may wait.
    fn places() -> [(Arc<Woken>, Waker); 2] {
        [(); 2].map(|()| Arc::<Woken>::default()).map(|woken| (Arc::clone(&woken), woken.into()))
    }

    #[test]
    fn a_lock_keeps_out_who_overlaps_and_nobody_else() {
        let fence = WriteFence::default();
        let ticket = fence.lock(10..20, Waker::noop()).unwrap();
        assert!(fence.enter(0, &(19..30), Waker::noop()).is_none());
        assert!(fence.lock(0..11, Waker::noop()).is_none());
        let beside = fence.enter(0, &(20..30), Waker::noop()).unwrap();
        let other = fence.lock(0..10, Waker::noop()).unwrap();
        fence.release(ticket);
        fence.release(other);
        fence.leave(fence.enter(0, &(0..30), Waker::noop()).unwrap());
        fence.leave(beside);
    }

    #[test]
    fn a_lock_waits_for_those_within_and_not_for_newcomers() {
        let fence = WriteFence::default();
        let early = fence.enter(3, &(0..5), Waker::noop()).unwrap();
        let ticket = fence.lock(10..20, Waker::noop()).unwrap();
        assert!(!fence.drained(ticket, Waker::noop()));
        let late = fence.enter(4, &(30..40), Waker::noop()).unwrap();
        fence.leave(early);
        assert!(fence.drained(ticket, Waker::noop()));
        fence.release(ticket);
        fence.leave(late);
    }

    #[test]
    fn one_wait_follows_another_and_an_abandoned_one_holds_nobody_up() {
        let fence = WriteFence::default();
        let within = fence.enter(0, &(0..5), Waker::noop()).unwrap();
        let (first, second) = (fence.lock(10..20, Waker::noop()).unwrap(), fence.queue());
        assert!(!fence.drained(first, Waker::noop()));
        fence.leave(within);
        assert!(!fence.drained(second, Waker::noop()), "the first wait has not been seen to end");
        assert!(!fence.outlived(second, Waker::noop()));
        fence.release(first);
        assert!(fence.drained(second, Waker::noop()));
        assert!(fence.outlived(second, Waker::noop()));
    }

    #[test]
    fn who_is_kept_out_by_a_lock_is_woken_when_it_goes_and_a_place_once_for_all_who_wait_there() {
        let (fence, [(a, waker_a), (b, waker_b)]) = (WriteFence::default(), places());
        let ticket = fence.lock(10..20, Waker::noop()).unwrap();
        for _ in 0..3 {
            assert!(fence.enter(0, &(19..30), &waker_a).is_none());
        }
        assert!(fence.lock(0..11, &waker_b).is_none());
        fence.leave(fence.enter(1, &(20..30), &waker_b).unwrap());
        assert_eq!((a.take(), b.take()), (0, 0), "the lock is still there");
        fence.release(ticket);
        assert_eq!((a.take(), b.take()), (1, 1));
        fence.release(fence.lock(0..1, Waker::noop()).unwrap());
        assert_eq!((a.take(), b.take()), (0, 0), "nobody waits any more");
    }

    #[test]
    fn a_drain_is_woken_by_who_leaves_last_and_by_no_newcomer_and_the_next_one_by_its_end() {
        let (fence, [(a, waker_a), (b, waker_b)]) = (WriteFence::default(), places());
        let early = [0, 1].map(|lane| fence.enter(lane, &(0..5), Waker::noop()).unwrap());
        let (first, second) = (fence.lock(10..20, &waker_a).unwrap(), fence.queue());
        assert!(!fence.drained(first, &waker_a) && !fence.drained(second, &waker_b));
        fence.leave(fence.enter(2, &(30..40), Waker::noop()).unwrap());
        assert_eq!((a.take(), b.take()), (0, 0), "a newcomer is in nobody's way");
        let [one, other] = early;
        fence.leave(one);
        assert!(a.take() == 1 && !fence.drained(first, &waker_a), "it was the last in its lane");
        fence.leave(other);
        assert!(a.take() == 1 && b.take() == 0);
        assert!(fence.drained(first, &waker_a));
        assert_eq!((a.take(), b.take()), (0, 1), "it is the next one's turn");
        assert!(fence.drained(second, &waker_b) && !fence.outlived(second, &waker_b));
        fence.release(first);
        assert!(b.take() == 1 && fence.outlived(second, &waker_b));
        fence.leave(fence.enter(0, &(0..5), Waker::noop()).unwrap());
        assert_eq!((a.take(), b.take()), (0, 0));
    }

    #[test]
    fn a_drain_that_is_given_up_wakes_the_next_and_is_not_woken_any_more() {
        let (fence, [(a, waker_a), (b, waker_b)]) = (WriteFence::default(), places());
        let within = fence.enter(0, &(0..5), Waker::noop()).unwrap();
        let (first, second) = (fence.lock(10..20, &waker_a).unwrap(), fence.lock(20..30, &waker_b).unwrap());
        assert!(!fence.drained(first, &waker_a) && !fence.drained(second, &waker_b));
        fence.release(first);
        assert!(b.take() == 1 && !fence.drained(second, &waker_b));
        fence.leave(within);
        assert_eq!((a.take(), b.take()), (0, 1));
        assert!(fence.drained(second, &waker_b));
        fence.release(second);
    }

    #[test]
    fn there_is_an_end_to_locks_and_to_wakers() {
        let (fence, [(a, waker_a), _]) = (WriteFence::default(), places());
        let lock = |at: usize| fence.lock(at as u64..at as u64 + 1, &waker_a);
        let tickets: Vec<_> = (0..LOCKS).map(|at| lock(at).unwrap()).collect();
        assert!(lock(LOCKS).is_none() && a.take() == 0);
        for _ in 0..3 * WAKERS {
            let elsewhere = Waker::from(Arc::<Woken>::default());
            assert!(fence.enter(0, &(0..1), &elsewhere).is_none());
            assert!(fence.book().waiting.len() <= WAKERS);
        }
        assert_eq!(a.take(), 1, "it has been told to leave its waker anew");
        assert!(lock(LOCKS).is_none());
        fence.release(tickets[7]);
        assert!(a.take() == 1 && lock(LOCKS).is_some());
    }

    /// Threads that sleep until they are woken: one that is forgotten ends the test.
    #[test]
    fn nobody_who_waits_is_forgotten_whoever_leaves_meanwhile() {
        const ROUNDS: usize = 3000;
        let fence = &WriteFence::default();
        thread::scope(|scope| {
            for lane in 0..2 {
                scope.spawn(move || {
                    let waker = waker_of_this_thread();
                    for round in 0..ROUNDS as u64 {
                        let range = round % 4..round % 4 + 2;
                        let pass = loop {
                            match fence.enter(lane, &range, &waker) {
                                Some(pass) => break pass,
                                None => await_wake(),
                            }
                        };
                        fence.leave(pass);
                    }
                });
            }
            for at in 0..2 {
                scope.spawn(move || {
                    let waker = waker_of_this_thread();
                    for round in 0..ROUNDS {
                        // Two that overlap, so that they wait for each other, too.
                        let ticket = loop {
                            match fence.lock(at..at + 2, &waker) {
                                Some(ticket) => break ticket,
                                None => await_wake(),
                            }
                        };
                        while !fence.drained(ticket, &waker) {
                            if round % 16 == 0 {
                                break;
                            }
                            await_wake();
                        }
                        fence.release(ticket);
                    }
                });
            }
        });
        let book = fence.book();
        assert!(book.locks.is_empty() && book.draining.is_none());
    }

    #[test]
    fn nothing_changes_a_locked_range_between_its_holder_s_read_and_write() {
        let (fence, cell) = (WriteFence::default(), [AtomicU64::new(0), AtomicU64::new(0)]);
        let (fence, cell) = (&fence, &cell);
        thread::scope(|scope| {
            for lane in 0..2u64 {
                scope.spawn(move || {
                    for i in 0..2000 {
                        let Some(pass) = fence.enter(lane as usize, &(0..1), Waker::noop()) else {
                            thread::yield_now();
                            continue;
                        };
                        cell[lane as usize].store(i, Ordering::Relaxed);
                        fence.leave(pass);
                    }
                });
            }
            scope.spawn(move || {
                for _ in 0..500 {
                    let Some(ticket) = fence.lock(0..1, Waker::noop()) else { continue };
                    while !fence.drained(ticket, Waker::noop()) {
                        thread::yield_now();
                    }
                    let seen = [&cell[0], &cell[1]].map(|c| c.load(Ordering::Acquire));
                    thread::yield_now();
                    assert_eq!(seen, [&cell[0], &cell[1]].map(|c| c.load(Ordering::Acquire)));
                    fence.release(ticket);
                }
            });
        });
    }
}
