//! Outside of what it tests, which `tests/write_fence.rs` has in a crate of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::thread;

use crate::testing::{Woken, await_wake, waker_of_this_thread};
use crate::write_fence::*;

/// Two places where commands may wait.
fn places() -> [(Arc<Woken>, Waker); 2] {
    [(); 2].map(|()| Arc::<Woken>::default()).map(|woken| (Arc::clone(&woken), woken.into()))
}

#[test]
fn a_lock_keeps_out_who_overlaps_and_nobody_else() {
    let fence = WriteFence::default();
    let ticket = fence.lock(10..20, Waker::noop()).unwrap();
    assert!(fence.enter(0, &(19..30), Waker::noop()).is_none());
    fence.release(fence.lock(0..11, Waker::noop()).unwrap_err());
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
fn one_wait_serves_all_who_had_a_ticket_when_it_began_and_outliving_a_lock_is_another_matter() {
    let fence = WriteFence::default();
    let within = fence.enter(0, &(0..5), Waker::noop()).unwrap();
    let (first, second) = (fence.lock(10..20, Waker::noop()).unwrap(), fence.queue());
    assert!(!fence.drained(first, Waker::noop()));
    fence.leave(within);
    assert!(fence.drained(second, Waker::noop()), "though the first has not been seen to end");
    assert!(!fence.outlived(second, Waker::noop()));
    fence.release(first);
    let newer = fence.lock(20..30, Waker::noop()).unwrap();
    assert!(fence.drained(second, Waker::noop()));
    assert!(fence.outlived(second, Waker::noop()), "the lock came later");
    fence.release(second);
    fence.release(newer);
}

#[test]
fn who_is_kept_out_by_a_lock_is_woken_when_it_goes_and_a_place_once_for_all_who_wait_there() {
    let (fence, [(a, waker_a), (b, waker_b)]) = (WriteFence::default(), places());
    let ticket = fence.lock(10..20, Waker::noop()).unwrap();
    for _ in 0..3 {
        assert!(fence.enter(0, &(19..30), &waker_a).is_none());
    }
    let place = fence.lock(0..11, &waker_b).unwrap_err();
    fence.leave(fence.enter(1, &(20..30), &waker_b).unwrap());
    assert_eq!((a.take(), b.take()), (0, 0), "the lock is still there");
    fence.release(ticket);
    assert_eq!((a.take(), b.take()), (1, 1));
    fence.release(fence.lock_in_turn(place, &waker_b).unwrap());
    fence.release(fence.lock(0..1, Waker::noop()).unwrap());
    assert_eq!((a.take(), b.take()), (0, 0), "nobody waits any more");
}

#[test]
fn who_waits_for_those_within_is_woken_by_the_last_of_a_lane_and_by_no_newcomer_and_all_by_who_sees_that_they_have_left()
 {
    let (fence, [(a, waker_a), (b, waker_b)]) = (WriteFence::default(), places());
    let early = [0, 1].map(|lane| fence.enter(lane, &(0..5), Waker::noop()).unwrap());
    let first = fence.lock(10..20, &waker_a).unwrap();
    assert!(!fence.drained(first, &waker_a));
    let second = fence.queue();
    assert!(!fence.drained(second, &waker_b));
    fence.leave(fence.enter(2, &(30..40), Waker::noop()).unwrap());
    assert_eq!((a.take(), b.take()), (0, 0), "a newcomer is in nobody's way");
    let [one, other] = early;
    fence.leave(one);
    assert_eq!((a.take(), b.take()), (1, 1), "it was the last in its lane");
    assert!(!fence.drained(first, &waker_a) && !fence.drained(second, &waker_b));
    fence.leave(other);
    assert_eq!((a.take(), b.take()), (1, 1));
    assert!(fence.drained(second, &waker_b) && fence.drained(first, &waker_a));
    assert!(!fence.outlived(second, &waker_b));
    fence.release(first);
    assert!(b.take() == 1 && fence.outlived(second, &waker_b));
    fence.leave(fence.enter(0, &(0..5), Waker::noop()).unwrap());
    assert_eq!((a.take(), b.take()), (0, 0), "nobody waits any more");
}

#[test]
fn a_holder_is_called_once_for_each_half_that_is_waited_for_and_for_older_locks_and_knows_who_holds_up_others() {
    let (fence, [(a, waker_a), (_, waker_b)]) = (WriteFence::default(), places());
    let (holder, waker) = (Arc::<Woken>::default(), Waker::from(Arc::<Woken>::default()));
    let holds = Waker::from(Arc::clone(&holder));
    fence.add_holder(holds.clone());
    fence.add_holder(waker.clone());
    let [early, beside] = [0, 1].map(|lane| fence.enter(lane, &(0..5), Waker::noop()).unwrap());
    assert!(!fence.holds_up(&early), "nobody waits");
    let first = fence.lock(10..20, &waker_a).unwrap();
    for _ in 0..2 {
        assert!(!fence.drained(first, &waker_a));
    }
    assert_eq!(holder.take(), 1);
    assert!(fence.holds_up(&early) && fence.holds_up(&beside));
    let late = fence.enter(0, &(30..40), Waker::noop()).unwrap();
    assert!(!fence.holds_up(&late), "it came later");
    // Who waits for that one too has the others called when it comes to it.
    let second = fence.queue();
    assert!(!fence.drained(second, &waker_b));
    assert_eq!(holder.take(), 0);
    fence.leave(early);
    fence.leave(beside);
    assert!(fence.drained(first, &waker_a) && !fence.drained(second, &waker_b));
    assert_eq!((holder.take(), fence.holds_up(&late)), (1, true));
    fence.leave(late);
    assert!(fence.drained(second, &waker_b));
    // The lock is older.
    assert!(!fence.is_outlived(first));
    for _ in 0..2 {
        assert!(!fence.outlived(second, &waker_b));
    }
    assert_eq!((holder.take(), fence.is_outlived(first)), (1, true));
    let newer = fence.lock(30..40, &waker_a).unwrap();
    assert!(!fence.is_outlived(newer));
    fence.release(first);
    assert!(fence.outlived(second, &waker_b));
    fence.remove_holder(&holds);
    let within = fence.enter(0, &(0..5), Waker::noop()).unwrap();
    assert!(!fence.drained(newer, &waker_a) && holder.take() == 0, "it has gone");
    fence.leave(within);
    assert!(a.take() > 0);
}

/// One who always has two of them, and asks for the next before anybody else asks, keeps nobody waiting.
#[test]
fn a_wait_that_another_begins_out_of_turn_is_for_all_who_have_waited_longer() {
    let (fence, [(a, waker_a), (_, waker_b)]) = (WriteFence::default(), places());
    let early = fence.enter(0, &(30..40), Waker::noop()).unwrap();
    let first = fence.lock(0..1, &waker_b).unwrap();
    assert!(!fence.drained(first, &waker_b));
    let (waits, next) = (fence.lock(1..2, &waker_a).unwrap(), fence.lock(2..3, &waker_b).unwrap());
    assert!(!fence.drained(waits, &waker_a) && !fence.drained(next, &waker_b));
    let within = fence.enter(0, &(30..40), Waker::noop()).unwrap();
    fence.leave(early);
    assert!(fence.drained(first, &waker_b) && !fence.drained(next, &waker_b));
    let newcomer = fence.enter(0, &(30..40), Waker::noop()).unwrap();
    fence.leave(within);
    assert!(fence.drained(next, &waker_b));
    assert!(a.take() > 0 && fence.drained(waits, &waker_a), "the newcomer came after it");
    fence.leave(newcomer);
}

#[test]
fn a_wait_that_is_given_up_wakes_the_others_who_go_on_with_it_and_is_not_woken_any_more() {
    let (fence, [(a, waker_a), (b, waker_b)]) = (WriteFence::default(), places());
    let within = fence.enter(0, &(0..5), Waker::noop()).unwrap();
    let first = fence.lock(10..20, &waker_a).unwrap();
    assert!(!fence.drained(first, &waker_a));
    let second = fence.lock(20..30, &waker_b).unwrap();
    assert!(!fence.drained(second, &waker_b));
    fence.release(first);
    assert!(a.take() == 1 && b.take() == 1 && !fence.drained(second, &waker_b));
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
    let place = lock(LOCKS).unwrap_err();
    assert_eq!(a.take(), 0);
    for _ in 0..3 * WAKERS {
        let elsewhere = Waker::from(Arc::<Woken>::default());
        assert!(fence.enter(0, &(0..1), &elsewhere).is_none());
        assert!(fence.book().waiting.len() <= WAKERS);
    }
    assert_eq!(a.take(), 1, "it has been told to leave its waker anew");
    assert!(fence.lock_in_turn(place, &waker_a).is_none());
    fence.release(tickets[7]);
    assert!(a.take() == 1 && lock(LOCKS + 1).is_err(), "whoever has come later");
    assert!(fence.lock_in_turn(place, &waker_a).is_some());
}

#[test]
fn who_waits_for_a_lock_has_it_before_whoever_wants_some_of_it_later_and_keeps_out_nobody_else() {
    let (fence, [(a, waker_a), _]) = (WriteFence::default(), places());
    let first = fence.lock(0..10, Waker::noop()).unwrap();
    let waits = fence.lock(5..15, Waker::noop()).unwrap_err();
    let later = [0..5, 10..20].map(|range| fence.lock(range, &waker_a).unwrap_err());
    fence.release(fence.lock(20..30, Waker::noop()).unwrap());
    fence.leave(fence.enter(0, &(10..20), Waker::noop()).unwrap());
    fence.release(first);
    let before = fence.lock_in_turn(later[0], &waker_a).unwrap();
    assert!(fence.lock_in_turn(later[1], &waker_a).is_none());
    fence.release(fence.lock_in_turn(waits, Waker::noop()).unwrap());
    assert!(a.take() > 0 && fence.lock_in_turn(later[1], &waker_a).is_some());
    let [gives_up, goes_on] = [0..3, 2..10].map(|range| fence.lock(range, &waker_a).unwrap_err());
    fence.release(before);
    assert!(fence.lock_in_turn(goes_on, &waker_a).is_none());
    a.take();
    fence.release(gives_up);
    assert!(a.take() == 1 && fence.lock_in_turn(goes_on, &waker_a).is_some());
}

#[test]
fn who_waits_behind_many_looks_at_some_of_them_a_time_and_never_again_at_those_who_are_not_in_its_way() {
    let (fence, [(a, waker_a), (b, waker_b)]) = (WriteFence::default(), places());
    let [_held, elsewhere] = [0..1, 7..8].map(|range| fence.lock(range, Waker::noop()).unwrap());
    let many: Vec<_> = (0..3 * LOOKS).map(|_| fence.lock(0..1, &waker_b).unwrap_err()).collect();
    let spans = fence.lock(0..2, &waker_b).unwrap_err();
    assert_eq!(b.take(), 0, "the first that they look at is in their way");
    let waits = fence.lock(1..2, &waker_a).unwrap_err();
    for _ in 0..3 {
        assert_eq!(a.take(), 1, "it has not looked at all of them");
        assert!(fence.lock_in_turn(waits, &waker_a).is_none());
    }
    assert_eq!(a.take(), 0, "it has found who is in its way");
    // Whatever it is woken for, it looks at the one that it has found, and so do the others.
    fence.release(elsewhere);
    assert_eq!((a.take(), b.take()), (1, 1));
    assert!(fence.lock_in_turn(waits, &waker_a).is_none());
    assert!(many.iter().all(|place| fence.lock_in_turn(*place, &waker_b).is_none()));
    assert_eq!((a.take(), b.take()), (0, 0));
    fence.release(spans);
    assert_eq!((a.take(), b.take()), (1, 1));
    assert!(fence.lock_in_turn(waits, &waker_a).is_some(), "nobody else wants some of it");
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
                    let mut locked = fence.lock(at..at + 2, &waker);
                    let ticket = loop {
                        match locked {
                            Ok(ticket) => break ticket,
                            Err(place) if round % 32 == 1 => break place,
                            Err(place) => {
                                await_wake();
                                locked = fence.lock_in_turn(place, &waker).ok_or(place);
                            }
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
    assert!(fence.book().locks.is_empty());
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
                let ticket = fence.lock(0..1, Waker::noop()).unwrap();
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
