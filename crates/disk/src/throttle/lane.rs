//! Where the requests of one disk wait, on one loop.

use std::collections::VecDeque;
use std::sync::Arc;

use egret_event_loop::Nanos;

use super::buckets::Direction;
use super::group::{Membership, Throttle};
use super::schedule::{ByDirection, LaneId, Schedule};
use crate::request::Request;

/// Requests that wait for their turn, the oldest first.
pub(crate) struct Lane {
    membership: Arc<Membership>,
    version: u64,
    id: LaneId,
    waiting: ByDirection<VecDeque<Request>>,
    /// How many of those that wait have a ticket.
    asked: ByDirection<usize>,
}

impl Lane {
    /// The lane to wait in: `lane`, unless the disk's limits are others by now. What waited under those that are gone
    /// goes to `free`.
    pub(crate) fn current<'a>(
        lane: &'a mut Option<Box<Self>>,
        throttle: &Throttle,
        free: &mut VecDeque<Request>,
    ) -> Option<&'a mut Self> {
        if lane.as_ref().is_none_or(|lane| lane.version != throttle.version()) {
            if let Some(old) = lane.take() {
                old.flush(free);
            }
            *lane = throttle.membership().map(|(membership, version)| Box::new(Self::open(membership, version)));
        }
        lane.as_deref_mut()
    }

    fn open(membership: Arc<Membership>, version: u64) -> Self {
        let id = membership.group.lock().open();
        Self { membership, version, id, waiting: ByDirection::default(), asked: ByDirection::default() }
    }

    /// Takes a request in.
    pub(crate) fn hold(&mut self, direction: Direction, request: Request) {
        self.waiting[direction as usize].push_back(request);
    }

    /// Gives those to `free` that have their turn. Returns when to ask again; `None` if nothing waits.
    pub(crate) fn release(&mut self, now: Nanos, free: &mut VecDeque<Request>) -> Option<Nanos> {
        let Self { membership, id, waiting, asked, .. } = self;
        let mut schedule = membership.group.lock();
        ask(&mut schedule, membership, *id, waiting, asked);
        schedule.grant(now);
        let granted = schedule.take(*id);
        let mut again = None;
        for direction in Direction::BOTH {
            let at = direction as usize;
            free.extend(waiting[at].drain(..granted[at]));
            asked[at] -= granted[at];
            if asked[at] > 0 {
                let next = schedule.next(direction, now);
                again = Some(again.map_or(next, |again: Nanos| again.min(next)));
            }
        }
        again
    }

    /// Gives all that wait to `free`, whatever the limits say; they count all the same.
    pub(crate) fn flush(mut self, free: &mut VecDeque<Request>) {
        let Self { membership, id, waiting, asked, .. } = &mut self;
        ask(&mut membership.group.lock(), membership, *id, waiting, asked);
        waiting.iter_mut().for_each(|waiting| free.extend(waiting.drain(..)));
    }
}

/// Gets tickets for those that have none.
fn ask(
    schedule: &mut Schedule,
    membership: &Membership,
    id: LaneId,
    waiting: &ByDirection<VecDeque<Request>>,
    asked: &mut ByDirection<usize>,
) {
    for direction in Direction::BOTH {
        let (waiting, asked) = (&waiting[direction as usize], &mut asked[direction as usize]);
        for request in waiting.range(*asked..) {
            schedule.ask(membership.disk, id, direction, request.len);
        }
        *asked = waiting.len();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.membership.group.lock().close(self.membership.disk, self.id);
    }
}
