//! Requests that take longer than the export's `request-timeout`.
//!
//! Nobody measures each request: when one was taken in is known, and the queue looks at those in flight four times in a
//! timeout. So a request is found when it is up to a quarter late.
//!
//! One that waited because its export was stopped is as old as the last time that it went on. One that was taken back while it
//! waited for limits keeps its age: its guest has waited all the time.

use egret_event_loop::{Nanos, Turn};

use super::QueueWorker;

/// When a queue looks for requests that are overdue.
pub(super) struct Overdue {
    timeout: Nanos,
    look_at: Nanos,
    /// Some were, when it looked last.
    found: bool,
    /// By head, when a request that was kept was taken up again; empty if none ever was.
    taken_up: Vec<Nanos>,
}

impl Overdue {
    pub(super) fn new(timeout: Nanos) -> Self {
        Self { timeout, look_at: Nanos::ZERO, found: false, taken_up: Vec::new() }
    }
}

impl QueueWorker {
    /// Looks for requests that are overdue, if it is time to, and has itself dispatched when it is the next time.
    pub(super) fn watch(&mut self, turn: &mut Turn) {
        let Some(overdue) = &mut self.overdue else { return };
        let (now, in_flight) = (turn.now(), self.queue.in_flight());
        let look_at = overdue.look_at;
        if now < look_at {
            if in_flight > 0 {
                self.wake_at(turn, look_at);
            }
            return;
        }
        overdue.look_at = now + Nanos(overdue.timeout.0 / 4);
        if in_flight > 0 || overdue.found {
            self.look_for_overdue(now);
        }
        if in_flight > 0 {
            self.watch(turn);
        }
    }

    #[cold]
    pub(super) fn look_for_overdue(&mut self, now: Nanos) {
        let Some(&Overdue { timeout, ref taken_up, .. }) = self.overdue.as_ref() else { return };
        let kept = self.stopped.kept_heads(self.queue.size());
        let in_flight =
            (0..self.queue.size()).filter(|head| self.queue.is_in_flight(*head) && !kept[usize::from(*head)]);
        let since = |head: u16| {
            let taken_up = taken_up.get(usize::from(head)).copied().unwrap_or(Nanos::ZERO);
            self.begun[usize::from(head)].at.max(taken_up)
        };
        let ages = in_flight.map(|head| now - since(head));
        let (mut late, mut oldest) = (0, Nanos::ZERO);
        for age in ages.filter(|age| *age >= timeout) {
            (late, oldest) = (late + 1, oldest.max(age));
        }
        self.tell_overdue(late, oldest);
    }

    /// A request goes on that was kept.
    pub(super) fn is_taken_up(&mut self, head: u16, now: Nanos) {
        let Some(Overdue { taken_up, .. }) = &mut self.overdue else { return };
        taken_up.resize(self.queue.size().into(), Nanos::ZERO);
        taken_up[usize::from(head)] = now;
    }

    /// So many are overdue, and the oldest is as old as that.
    fn tell_overdue(&mut self, late: u64, oldest: Nanos) {
        let Some(overdue) = &mut self.overdue else { return };
        self.counters.overdue.set(late);
        match (std::mem::replace(&mut overdue.found, late > 0), late > 0) {
            (false, true) => self.errors.begin_overdue(oldest),
            (true, false) => self.errors.end_overdue(),
            _ => {}
        }
    }

    /// The queue leaves its loop, with nothing at its disks.
    pub(super) fn forget_overdue(&mut self) {
        self.tell_overdue(0, Nanos::ZERO);
    }
}
