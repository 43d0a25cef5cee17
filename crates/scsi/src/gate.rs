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

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many counters there are. More than these threads on one logical unit share some.
const LANES: usize = 16;

/// Two halves of a counter, on cache lines that no other counter is on.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Lane([AtomicUsize; 2]);

/// See the module's documentation. Ranges are in bytes.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    lanes: [Lane; LANES],
    /// Its lowest bit says in which half newcomers count.
    epoch: AtomicUsize,
    /// How many locks there are. While it is zero nobody looks at the book.
    locked: AtomicU32,
    book: Mutex<Book>,
}

#[derive(Debug, Default)]
struct Book {
    next: u64,
    locks: Vec<(Ticket, Range<u64>)>,
    draining: Option<Drain>,
}

/// A wait for those who are within.
#[derive(Debug)]
struct Drain {
    ticket: Ticket,
    /// The half that has to empty.
    half: usize,
    /// Whether the other one has been empty before.
    second: bool,
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

impl Gate {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets in who changes `range`, unless a lock has some of it. `lane` says which counter to use.
    #[inline]
    pub(crate) fn enter(&self, lane: usize, range: &Range<u64>) -> Option<Pass> {
        let pass = Pass { lane: (lane % LANES) as u8, half: (self.epoch.load(Ordering::Relaxed) % 2) as u8 };
        // Counted first and looked second, and `lock` in the other order: one of the two sees the other.
        self.counter(&pass).fetch_add(1, Ordering::SeqCst);
        if self.locked.load(Ordering::SeqCst) == 0 || !self.book().overlaps(range) {
            return Some(pass);
        }
        self.leave(pass);
        None
    }

    /// Ends what `enter` began: the change is done.
    #[inline]
    pub(crate) fn leave(&self, pass: Pass) {
        self.counter(&pass).fetch_sub(1, Ordering::Release);
    }

    #[inline]
    fn counter(&self, Pass { lane, half }: &Pass) -> &AtomicUsize {
        &self.lanes[usize::from(*lane)].0[usize::from(*half)]
    }

    /// Locks `range`, unless another lock has some of it. Those who were within already still are:
    /// [`drained`](Self::drained) says when they have left.
    pub(crate) fn lock(&self, range: Range<u64>) -> Option<Ticket> {
        let mut book = self.book();
        if book.overlaps(&range) {
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

    /// Whether everybody has left who was within when it was first asked for this ticket. One ticket's wait ends before
    /// the next begins.
    pub(crate) fn drained(&self, ticket: Ticket) -> bool {
        let mut book = self.book();
        // Who is in the half that newcomers do not use came before the last wait ended: that half is first.
        let idle = (self.epoch.load(Ordering::Relaxed) + 1) % 2;
        let drain = book.draining.get_or_insert(Drain { ticket, half: idle, second: false });
        if drain.ticket != ticket || !self.is_empty(drain.half) {
            return false;
        }
        if !drain.second {
            self.epoch.fetch_add(1, Ordering::SeqCst);
            (drain.half, drain.second) = (1 - drain.half, true);
            if !self.is_empty(drain.half) {
                return false;
            }
        }
        book.draining = None;
        true
    }

    /// Whether no lock is left that is older than the ticket.
    pub(crate) fn outlived(&self, ticket: Ticket) -> bool {
        self.book().locks.iter().all(|(other, _)| *other > ticket)
    }

    /// Gives a ticket back, and what it locked.
    pub(crate) fn release(&self, ticket: Ticket) {
        let mut book = self.book();
        if book.draining.as_ref().is_some_and(|drain| drain.ticket == ticket) {
            book.draining = None;
        }
        if let Some(at) = book.locks.iter().position(|(other, _)| *other == ticket) {
            book.locks.swap_remove(at);
            self.locked.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn is_empty(&self, half: usize) -> bool {
        self.lanes.iter().all(|lane| lane.0[half].load(Ordering::SeqCst) == 0)
    }
}

impl Book {
    fn ticket(&mut self) -> Ticket {
        self.next += 1;
        Ticket(self.next)
    }

    fn overlaps(&self, range: &Range<u64>) -> bool {
        self.locks.iter().any(|(_, other)| other.start < range.end && range.start < other.end)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use super::*;

    #[test]
    fn a_lock_keeps_out_who_overlaps_and_nobody_else() {
        let gate = Gate::default();
        let ticket = gate.lock(10..20).unwrap();
        assert!(gate.enter(0, &(19..30)).is_none());
        assert!(gate.lock(0..11).is_none());
        let beside = gate.enter(0, &(20..30)).unwrap();
        let other = gate.lock(0..10).unwrap();
        gate.release(ticket);
        gate.release(other);
        gate.leave(gate.enter(0, &(0..30)).unwrap());
        gate.leave(beside);
    }

    #[test]
    fn a_lock_waits_for_those_within_and_not_for_newcomers() {
        let gate = Gate::default();
        let early = gate.enter(3, &(0..5)).unwrap();
        let ticket = gate.lock(10..20).unwrap();
        assert!(!gate.drained(ticket));
        let late = gate.enter(4, &(30..40)).unwrap();
        gate.leave(early);
        assert!(gate.drained(ticket));
        gate.release(ticket);
        gate.leave(late);
    }

    #[test]
    fn one_wait_follows_another_and_an_abandoned_one_holds_nobody_up() {
        let gate = Gate::default();
        let within = gate.enter(0, &(0..5)).unwrap();
        let (first, second) = (gate.lock(10..20).unwrap(), gate.queue());
        assert!(!gate.drained(first));
        gate.leave(within);
        assert!(!gate.drained(second), "the first wait has not been seen to end");
        assert!(!gate.outlived(second));
        gate.release(first);
        assert!(gate.drained(second));
        assert!(gate.outlived(second));
    }

    #[test]
    fn nothing_changes_a_locked_range_between_its_holder_s_read_and_write() {
        let (gate, cell) = (Gate::default(), [AtomicU64::new(0), AtomicU64::new(0)]);
        let (gate, cell) = (&gate, &cell);
        thread::scope(|scope| {
            for lane in 0..2u64 {
                scope.spawn(move || {
                    for i in 0..2000 {
                        let Some(pass) = gate.enter(lane as usize, &(0..1)) else {
                            thread::yield_now();
                            continue;
                        };
                        cell[lane as usize].store(i, Ordering::Relaxed);
                        gate.leave(pass);
                    }
                });
            }
            scope.spawn(move || {
                for _ in 0..500 {
                    let Some(ticket) = gate.lock(0..1) else { continue };
                    while !gate.drained(ticket) {
                        thread::yield_now();
                    }
                    let seen = [&cell[0], &cell[1]].map(|c| c.load(Ordering::Acquire));
                    thread::yield_now();
                    assert_eq!(seen, [&cell[0], &cell[1]].map(|c| c.load(Ordering::Acquire)));
                    gate.release(ticket);
                }
            });
        });
    }
}
