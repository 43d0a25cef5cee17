//! Requests that wait for their disk's limits while other commands wait for theirs, or functions that are to end it.
//!
//! ```text
//!   called ──▶ taken back, suspended: nobody waits for them ──some a turn──▶ readmitted ──▶ the limits again, or refused
//! ```
//!
//! What is suspended and readmitted may be another request of its command then, or none: that of a guest which has been
//! preempted meanwhile is not done, nor what is aborted. One that comes to the limits again as it was has its turn there as if it
//! had stayed, however often others go before it; of one that does not come again its place is given up.
//!
//! None of this runs where no disk has limits.

use egret_disk::{DiskSlot, EngineSet, Request};
use egret_event_loop::Nanos;
use egret_virtio::DiskKey;

use super::QueueWorker;

/// How many requests are taken up again in one turn.
const TAKEN_UP_A_TURN: usize = 128;

impl QueueWorker {
    /// Takes those requests back that hold up others. The rest wait on, each in its turn.
    #[cold]
    pub(super) fn take_back(&mut self, engines: &mut EngineSet, now: Nanos) {
        for key in (0..self.disks.slots.len() as u32).map(DiskKey) {
            let Some(slot) = self.disks.slot(key) else { continue };
            let mut left = Vec::new();
            let taken = engines.withdraw_some(slot, now, |request| {
                let head = request.token.slot();
                let holds_up = self.model.holds_up(head);
                left.extend((!holds_up).then_some(head));
                holds_up
            });
            // They are to be told of the next who waits, as they were of this one.
            left.into_iter().for_each(|head| self.model.may_wait(head));
            self.keeps_places |= !taken.is_empty();
            for request in taken {
                let Request { op, offset, len, buffers, token } = request;
                let mut request = Request { op, offset, len, buffers: self.queue.take_back(buffers), token };
                self.model.suspend(&mut request);
                self.taken_back.push_back((key, request));
            }
        }
    }

    /// Goes on with them, some a turn.
    #[cold]
    pub(super) fn take_up_again(&mut self, engines: &mut EngineSet, now: Nanos) {
        for _ in 0..TAKEN_UP_A_TURN {
            let Some((key, request)) = self.taken_back.pop_front() else { break };
            self.take_up(engines, key, request, now);
        }
        if !self.taken_back.is_empty() {
            self.dispatch_again();
        }
    }

    /// Gives up the places of those whose commands have ended.
    #[cold]
    pub(super) fn give_up_places(&mut self, engines: &mut EngineSet) {
        let Self { queue, disks, .. } = self;
        let mut keeps = |slot: &DiskSlot| engines.keep_places(*slot, |token| queue.is_in_flight(token.slot()));
        self.keeps_places = disks.slots.iter().flatten().filter(|slot| keeps(slot)).count() > 0;
    }
}
