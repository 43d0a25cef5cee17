//! What becomes of what waits while other loops look at the group as well.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use egret_vring::memory::Lent;

use super::*;
use crate::request::Op;
use crate::throttle::buckets::Cost;
use crate::throttle::{Debt, Limit, Limits, Rates, ThrottleGroup};

const SECOND: Nanos = Nanos(1_000_000_000);

/// A group with one disk, which does so many requests a second, a tenth of them at once.
fn limited(average: u64) -> (Arc<ThrottleGroup>, Throttle) {
    let requests = Rates { total: Limit { average, ..Limit::default() }, ..Rates::default() };
    let group = ThrottleGroup::new("g", Limits { requests, ..Limits::default() });
    let throttle = Throttle::default();
    throttle.set_group(Some(&group));
    (group, throttle)
}

fn read_of(token: u64) -> Request {
    Request { op: Op::Read, offset: 0, len: 512, buffers: Lent::default(), token: RequestToken(token) }
}

/// What waits of so many reads that come then.
fn waiting(throttle: &Throttle, reads: u64, now: Nanos) -> ThrottledSlot {
    let mut slot = ThrottledSlot::default();
    for token in 0..reads {
        slot.enqueue(throttle, Some(Direction::Read), read_of(token), PartOf::all(512));
    }
    slot.release(throttle, now);
    slot
}

fn begin(slot: &mut ThrottledSlot) -> usize {
    std::iter::from_fn(|| slot.pop_released()).count()
}

#[test]
fn a_turn_that_another_loop_grants_when_a_drain_or_another_group_lets_all_go_is_kept_for_what_was_taken_back() {
    for is_drain in [true, false] {
        let (group, throttle) = limited(1);
        let mut slot = waiting(&throttle, 4, Nanos::ZERO);
        assert_eq!(begin(&mut slot), 1);
        assert_eq!(slot.withdraw_some(&throttle, Nanos::ZERO, |_| true).len(), 3);
        group.lock().grant(SECOND);
        if is_drain {
            let queue = slot.queue.take().unwrap();
            queue.release_all(&mut slot.released, &mut slot.turns);
        } else {
            throttle.set_group(Some(&ThrottleGroup::new("h", Limits::default())));
            slot.release(&throttle, SECOND);
        }
        assert_eq!((slot.turns.len(), begin(&mut slot)), (1, 0), "{is_drain}");
        assert_eq!(throttle.debt(SECOND), Debt::default());
    }
}

#[test]
fn when_to_look_again_is_told_by_the_direction_in_which_something_waits_and_by_no_other() {
    let read = Limit { average: 1, ..Limit::default() };
    let limits = Limits { requests: Rates { read, ..Rates::default() }, ..Limits::default() };
    let throttle = Throttle::default();
    throttle.set_group(Some(&ThrottleGroup::new("g", limits)));
    let mut slot = ThrottledSlot::default();
    let again = [0, 1].map(|token| {
        slot.enqueue(&throttle, Some(Direction::Read), read_of(token), PartOf::all(512));
        slot.release(&throttle, Nanos::ZERO)
    });
    assert_eq!(again, [None, Some(Nanos::from_millis(900))]);
}

#[test]
fn a_disk_with_nothing_that_waits_does_not_ask_for_the_group_that_others_look_at() {
    let (group, throttle) = limited(1);
    let mut slot = waiting(&throttle, 1, Nanos::ZERO);
    assert!(slot.queue.is_some());
    let (done, is_done) = channel();
    let looks = group.lock();
    let waits = thread::scope(|scope| {
        scope.spawn(|| done.send(slot.release(&throttle, SECOND)));
        let told = is_done.recv_timeout(Duration::from_secs(30));
        drop(looks);
        told
    });
    assert_ne!(waits, Err(RecvTimeoutError::Timeout));
}

#[test]
fn what_waits_while_much_is_paid_that_is_owed_has_no_turn_before_and_is_taken_back_and_let_go_as_ever() {
    const OWED: usize = 5000;
    const COST: Cost = Cost { bytes: 512, part: PartOf::all(512) };
    let (group, throttle) = limited(1000);
    let (member, _) = throttle.member().unwrap();
    let mut schedule = group.lock();
    let closed = schedule.open();
    (0..OWED).for_each(|_| schedule.ask(member.disk, closed, Direction::Read, COST));
    schedule.close(member.disk, closed, OWED);
    drop(schedule);
    // All of it is due by then.
    let now = Nanos(3600 * SECOND.0);
    let mut slot = waiting(&throttle, 500, now);
    assert_eq!(slot.release(&throttle, now), Some(now), "the rest is paid in the next turns");
    assert_eq!(slot.withdraw_some(&throttle, now, |read| read.token.0 < 300).len(), 300);
    slot.disable_limits();
    assert_eq!((slot.release(&throttle, now), slot.has_released()), (Some(now), false));
    while slot.release(&throttle, now).is_some() {}
    // There is room for a hundred at once, and for one that goes over the brim; the others are owed.
    assert_eq!((begin(&mut slot), throttle.debt(now)), (200, Debt { owed: 99, made_up: OWED as u64 }));
}
