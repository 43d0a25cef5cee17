//! The way of one attached disk's requests past its limits.

use std::collections::VecDeque;

use egret_event_loop::Nanos;

use super::buckets::Direction;
use super::group::Throttle;
use super::queue::{Place, ThrottledQueue};
use crate::request::{PartOf, Request, RequestToken};

/// See the module's description.
#[derive(Default)]
pub(crate) struct ThrottledSlot {
    /// Where requests wait, if the disk is limited.
    queue: Option<Box<ThrottledQueue>>,
    /// Requests that need not wait any longer.
    released: VecDeque<Request>,
    /// Turns of requests that were taken back, the oldest first. They have been counted, and so outlast the queue.
    turns: VecDeque<Place>,
    /// The slot is being drained, and nothing waits for limits.
    limits_disabled: bool,
}

impl ThrottledSlot {
    /// Takes a request in, which waits if it has a direction to be limited in, unless it has had its turn.
    pub(crate) fn enqueue(
        &mut self,
        throttle: &Throttle,
        direction: Option<Direction>,
        request: Request,
        part: PartOf,
    ) {
        let Self { queue, released, turns, .. } = self;
        let limited = direction.and_then(|direction| {
            let queue = ThrottledQueue::current(queue, throttle, released, turns)?;
            Some((direction, queue))
        });
        match limited {
            Some((direction, queue)) if !take_turn(turns, direction, &request) => {
                queue.push(direction, request, part);
            }
            _ => released.push_back(request),
        }
    }

    /// Releases requests that have their turn. Returns when to ask again; `None` if nothing waits.
    pub(crate) fn release(&mut self, throttle: &Throttle, now: Nanos) -> Option<Nanos> {
        let Self { queue, released, turns, limits_disabled } = self;
        if queue.is_none() {
            return None;
        }
        let again = ThrottledQueue::current(queue, throttle, released, turns)?.release(now, released, turns);
        // The rest has no turn yet, but has asked: so it is owed.
        match queue.take_if(|queue| *limits_disabled && queue.has_asked()) {
            Some(queue) => {
                queue.release_all(released, turns);
                None
            }
            None => again,
        }
    }

    /// The oldest request that was released.
    pub(crate) fn pop_released(&mut self) -> Option<Request> {
        self.released.pop_front()
    }

    pub(crate) fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// The next [`release`](Self::release) releases all that wait, and so on; says whether something may wait.
    pub(crate) fn disable_limits(&mut self) -> bool {
        self.limits_disabled = true;
        self.queue.is_some()
    }

    /// Gives back all that has not begun.
    pub(crate) fn withdraw(&mut self) -> Vec<Request> {
        let mut requests = Vec::from(std::mem::take(&mut self.released));
        if let Some(queue) = self.queue.take() {
            queue.withdraw(&mut requests);
        }
        requests
    }

    /// Gives back some of those that wait yet, and keeps their places. What the limits let through begins soon.
    pub(crate) fn withdraw_some(
        &mut self,
        throttle: &Throttle,
        now: Nanos,
        is_wanted: impl FnMut(&Request) -> bool,
    ) -> Vec<Request> {
        self.release(throttle, now);
        let mut requests = Vec::new();
        if let Some(queue) = &mut self.queue {
            queue.withdraw_some(is_wanted, &mut requests);
        }
        requests
    }

    /// Gives the places and turns of requests up that do not come again. Says whether some are left.
    pub(crate) fn keep_places(&mut self, mut comes_again: impl FnMut(RequestToken) -> bool) -> bool {
        self.turns.retain(|turn| comes_again(turn.token));
        let has_places = self.queue.as_mut().is_some_and(|queue| queue.keep_places(comes_again));
        has_places || !self.turns.is_empty()
    }

    /// Requests wait again.
    pub(crate) fn enable_limits(&mut self) {
        self.limits_disabled = false;
    }
}

/// Whether a request has had its turn while it was taken back, which is over then.
fn take_turn(turns: &mut VecDeque<Place>, direction: Direction, request: &Request) -> bool {
    let place = Place::of(direction, request);
    turns.iter().position(|turn| *turn == place).and_then(|at| turns.remove(at)).is_some()
}

#[cfg(test)]
mod tests;
