//! Where the requests of one disk wait, on one loop.
//!
//! One that is taken back and comes again is no later for it, or who is taken back again and again would wait for ever. Its place is
//! kept, with its ticket; and if it has its turn meanwhile, that is kept for it. A place is for one operation of one token,
//! in one direction and of one length: so whatever comes in the place of what was taken back, no more begins than limits have
//! counted. Whoever takes requests back says which do not come again: for these nobody is to wait.

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;

use egret_event_loop::Nanos;

use super::buckets::{Cost, Direction};
use super::group::{Throttle, ThrottleGroupMember};
use super::schedule::{ByDirection, QueueId};
use crate::request::{PartOf, Request, RequestToken};

/// Requests that wait for their turn, the oldest first.
pub(crate) struct ThrottledQueue {
    member: Arc<ThrottleGroupMember>,
    version: u64,
    id: QueueId,
    waiting: ByDirection<VecDeque<Waiting>>,
    /// How many of those that wait have a ticket.
    asked: ByDirection<usize>,
    /// How many places are kept.
    kept: usize,
    /// Behind the last place that was taken again: the next one is probably there.
    taken_again: ByDirection<usize>,
}

enum Waiting {
    /// It may be of several that are one request to whoever asked for them: of these the first alone counts as a request.
    Here { request: Request, part: PartOf },
    /// It was taken back, and has a ticket.
    Kept(Place),
}

/// What a request that was taken back is known by when it comes again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) token: RequestToken,
    direction: Direction,
    bytes: u64,
}

impl Place {
    pub(super) const fn of(direction: Direction, request: &Request) -> Self {
        Self { token: request.token, direction, bytes: request.len }
    }
}

impl Waiting {
    const fn cost(&self) -> Cost {
        match self {
            Self::Here { request, part } => Cost { bytes: request.len, part: *part },
            Self::Kept(place) => Cost { bytes: place.bytes, part: PartOf::all(place.bytes) },
        }
    }

    fn here(self) -> Option<Request> {
        match self {
            Self::Here { request, .. } => Some(request),
            Self::Kept(_) => None,
        }
    }
}

impl ThrottledQueue {
    /// The queue to wait in: `queue`, unless the disk's limits are others by now. What waited under those that are gone
    /// goes to `released`, and the turns of what was taken back to `turns`.
    pub(super) fn current<'a>(
        queue: &'a mut Option<Box<Self>>,
        throttle: &Throttle,
        released: &mut VecDeque<Request>,
        turns: &mut VecDeque<Place>,
    ) -> Option<&'a mut Self> {
        if queue.as_ref().is_none_or(|queue| queue.version != throttle.version()) {
            if let Some(old) = queue.take() {
                old.release_all(released, turns);
            }
            *queue = throttle.member().map(|(member, version)| Box::new(Self::open(member, version)));
        }
        queue.as_deref_mut()
    }

    fn open(member: Arc<ThrottleGroupMember>, version: u64) -> Self {
        let id = member.group.lock().open();
        Self {
            member,
            version,
            id,
            waiting: ByDirection::default(),
            asked: ByDirection::default(),
            kept: 0,
            taken_again: ByDirection::default(),
        }
    }

    /// Takes a request in.
    pub(crate) fn push(&mut self, direction: Direction, request: Request, part: PartOf) {
        let place = Place::of(direction, &request);
        let one = Waiting::Here { request, part };
        if self.kept == 0 {
            return self.waiting[direction as usize].push_back(one);
        }
        let (waiting, taken_again) = (&mut self.waiting[direction as usize], &mut self.taken_again[direction as usize]);
        let from = waiting.len().min(*taken_again);
        let is_its = |at: &usize| matches!(waiting[*at], Waiting::Kept(other) if other == place);
        match (from..waiting.len()).chain(0..from).find(is_its) {
            Some(at) => {
                waiting[at] = one;
                *taken_again = at + 1;
                self.kept -= 1;
            }
            None => waiting.push_back(one),
        }
    }

    /// Gives those to `released` that have their turn, and the turns of those that were taken back to `turns`. Returns when to ask
    /// again; `None` if nothing waits.
    pub(super) fn release(
        &mut self,
        now: Nanos,
        released: &mut VecDeque<Request>,
        turns: &mut VecDeque<Place>,
    ) -> Option<Nanos> {
        let Self { member, id, waiting, asked, kept, taken_again, .. } = self;
        if waiting.iter().all(VecDeque::is_empty) {
            return None;
        }
        let mut schedule = member.group.lock();
        let is_paid = schedule.pay(now);
        if is_paid {
            for direction in Direction::BOTH {
                let (waiting, asked) = (&waiting[direction as usize], &mut asked[direction as usize]);
                for one in waiting.range(*asked..) {
                    schedule.ask(member.disk, *id, direction, one.cost());
                }
                *asked = waiting.len();
            }
            schedule.grant(now);
        }
        let granted = schedule.take(*id);
        let mut again = None;
        for direction in Direction::BOTH {
            let at = direction as usize;
            for one in waiting[at].drain(..granted[at]) {
                match one {
                    Waiting::Here { request, .. } => released.push_back(request),
                    Waiting::Kept(place) => {
                        *kept -= 1;
                        turns.push_back(place);
                    }
                }
            }
            asked[at] -= granted[at];
            taken_again[at] = taken_again[at].saturating_sub(granted[at]);
            if asked[at] > 0 {
                let next = schedule.next(direction, now);
                again = Some(again.map_or(next, |again: Nanos| again.min(next)));
            }
        }
        if is_paid { again } else { Some(now) }
    }

    /// Whether all that wait have asked by the last [`release`](Self::release), as is so unless too much is owed for one look.
    pub(super) fn has_asked(&self) -> bool {
        self.waiting.iter().zip(self.asked).all(|(waiting, asked)| waiting.len() == asked)
    }

    /// Gives all that wait back: the limits do not count them.
    pub(crate) fn withdraw(mut self, into: &mut Vec<Request>) {
        into.extend(self.waiting.iter_mut().flat_map(mem::take).filter_map(Waiting::here));
        self.member.group.lock().forget(self.member.disk, self.id);
        self.asked = ByDirection::default();
    }

    /// Gives some of those that wait back, and keeps the places of those that have asked.
    pub(crate) fn withdraw_some(&mut self, mut is_wanted: impl FnMut(&Request) -> bool, into: &mut Vec<Request>) {
        for direction in Direction::BOTH {
            let at = direction as usize;
            for one in self.waiting[at].range_mut(..self.asked[at]) {
                let Waiting::Here { request, .. } = one else { continue };
                if is_wanted(request) {
                    let place = Waiting::Kept(Place::of(direction, request));
                    into.extend(mem::replace(one, place).here());
                    self.kept += 1;
                }
            }
            self.taken_again[at] = 0;
            for one in self.waiting[at].split_off(self.asked[at]) {
                match one {
                    Waiting::Here { request, .. } if is_wanted(&request) => into.push(request),
                    one => self.waiting[at].push_back(one),
                }
            }
        }
    }

    /// Gives the places of requests up that do not come again: the limits do not count them. Says whether some are left.
    pub(crate) fn keep_places(&mut self, mut comes_again: impl FnMut(RequestToken) -> bool) -> bool {
        let Self { member, id, waiting, asked, kept, .. } = self;
        let mut is_gone = |one: &Waiting| matches!(one, Waiting::Kept(place) if !comes_again(place.token));
        for direction in Direction::BOTH {
            let (waiting, asked) = (&mut waiting[direction as usize], &mut asked[direction as usize]);
            if *kept == 0 || !waiting.iter().any(&mut is_gone) {
                continue;
            }
            let mut gone: Vec<bool> = waiting.iter().map(&mut is_gone).collect();
            let mut schedule = member.group.lock();
            // Other loops grant turns as well: these have no tickets any more.
            let granted = schedule.granted(*id)[direction as usize];
            gone[..granted].fill(false);
            let mut tickets = gone[granted..].iter();
            schedule.forget_some(member.disk, *id, direction, || tickets.next() == Some(&true));
            drop(schedule);
            let before = waiting.len();
            let mut gone = gone.into_iter();
            waiting.retain(|_| gone.next() != Some(true));
            *asked -= before - waiting.len();
            *kept -= before - waiting.len();
        }
        *kept > 0
    }

    /// Gives all that wait to `released`, whatever the limits say, and to `turns` those that others have granted since the last
    /// [`release`](Self::release) to what was taken back. The disk owes those that have asked by that, and have no turn yet.
    pub(super) fn release_all(mut self, released: &mut VecDeque<Request>, turns: &mut VecDeque<Place>) {
        self.keep_places(|_| false);
        for one in self.waiting.iter_mut().flat_map(mem::take) {
            match one {
                Waiting::Here { request, .. } => released.push_back(request),
                Waiting::Kept(place) => turns.push_back(place),
            }
        }
    }
}

impl Drop for ThrottledQueue {
    fn drop(&mut self) {
        self.keep_places(|_| false);
        self.member.group.lock().close(self.member.disk, self.id, self.asked.iter().sum());
    }
}
