//! Where the requests of one disk wait, on one loop.

use std::collections::VecDeque;
use std::sync::Arc;

use egret_event_loop::Nanos;

use super::buckets::{Cost, Direction};
use super::group::{Throttle, ThrottleGroupMember};
use super::schedule::{ByDirection, QueueId};
use crate::request::Request;

/// Requests that wait for their turn, the oldest first.
pub(crate) struct ThrottledQueue {
    member: Arc<ThrottleGroupMember>,
    version: u64,
    id: QueueId,
    waiting: ByDirection<VecDeque<Request>>,
    /// How many of those that wait have a ticket.
    asked: ByDirection<usize>,
    /// What the others count as.
    costs: ByDirection<Vec<Cost>>,
}

impl ThrottledQueue {
    /// The queue to wait in: `queue`, unless the disk's limits are others by now. What waited under those that are gone
    /// goes to `released`.
    pub(crate) fn current<'a>(
        queue: &'a mut Option<Box<Self>>,
        throttle: &Throttle,
        released: &mut VecDeque<Request>,
    ) -> Option<&'a mut Self> {
        if queue.as_ref().is_none_or(|queue| queue.version != throttle.version()) {
            if let Some(old) = queue.take() {
                old.release_all(released);
            }
            *queue = throttle.member().map(|(member, version)| Box::new(Self::open(member, version)));
        }
        queue.as_deref_mut()
    }

    fn open(member: Arc<ThrottleGroupMember>, version: u64) -> Self {
        let id = member.group.lock().open();
        let (waiting, asked, costs) = Default::default();
        Self { member, version, id, waiting, asked, costs }
    }

    /// Takes a request in.
    pub(crate) fn push(&mut self, direction: Direction, request: Request, is_first: bool) {
        self.costs[direction as usize].push(Cost { bytes: request.len, is_first });
        self.waiting[direction as usize].push_back(request);
    }

    /// Gives those to `released` that have their turn. Returns when to ask again; `None` if nothing waits.
    pub(crate) fn release(&mut self, now: Nanos, released: &mut VecDeque<Request>) -> Option<Nanos> {
        let Self { member, id, waiting, asked, costs, .. } = self;
        let mut schedule = member.group.lock();
        schedule.pay(now);
        for direction in Direction::BOTH {
            for cost in costs[direction as usize].drain(..) {
                schedule.ask(member.disk, *id, direction, cost);
            }
            asked[direction as usize] = waiting[direction as usize].len();
        }
        schedule.grant(now);
        let granted = schedule.take(*id);
        let mut again = None;
        for direction in Direction::BOTH {
            let at = direction as usize;
            released.extend(waiting[at].drain(..granted[at]));
            asked[at] -= granted[at];
            if asked[at] > 0 {
                let next = schedule.next(direction, now);
                again = Some(again.map_or(next, |again: Nanos| again.min(next)));
            }
        }
        again
    }

    /// Gives all that wait back: the limits do not count them.
    pub(crate) fn withdraw(mut self, into: &mut Vec<Request>) {
        self.waiting.iter_mut().for_each(|waiting| into.extend(waiting.drain(..)));
        self.member.group.lock().forget(self.member.disk, self.id);
    }

    /// Gives some of those that wait back: the limits do not count them, and the others keep their turns. Those that have had theirs
    /// since the last [`release`](Self::release) go to `released`: other loops grant turns as well.
    pub(crate) fn withdraw_some(
        &mut self,
        mut is_wanted: impl FnMut(&Request) -> bool,
        released: &mut VecDeque<Request>,
        into: &mut Vec<Request>,
    ) {
        let Self { member, id, waiting, asked, .. } = self;
        // Asked without the lock, which others wait for.
        let wanted = Direction::BOTH
            .map(|direction| -> Vec<bool> { waiting[direction as usize].iter().map(&mut is_wanted).collect() });
        // What is granted and what is forgotten are one step: a ticket that goes in between would be counted as both.
        let mut schedule = member.group.lock();
        let granted = schedule.take(*id);
        for direction in Direction::BOTH {
            let at = direction as usize;
            released.extend(waiting[at].drain(..granted[at]));
            asked[at] -= granted[at];
            let wanted = &wanted[at][granted[at]..];
            let mut tickets = wanted.iter();
            schedule.forget_some(member.disk, *id, direction, || tickets.next() == Some(&true));
            asked[at] -= wanted[..asked[at]].iter().filter(|is_wanted| **is_wanted).count();
            let mut wanted = wanted.iter();
            let (taken, left): (VecDeque<_>, _) = waiting[at].drain(..).partition(|_| wanted.next() == Some(&true));
            waiting[at] = left;
            into.extend(taken);
        }
    }

    /// Gives all that wait to `released`, whatever the limits say. The disk owes those that have asked by the last
    /// [`release`](Self::release).
    pub(crate) fn release_all(mut self, released: &mut VecDeque<Request>) {
        self.waiting.iter_mut().for_each(|waiting| released.extend(waiting.drain(..)));
    }
}

impl Drop for ThrottledQueue {
    fn drop(&mut self) {
        self.member.group.lock().close(self.member.disk, self.id);
    }
}
