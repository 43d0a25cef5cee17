//! Limited disks: what waits, and what lets it go.
//!
//! The limits here are so low that what waits for them waits for more than an hour, unless something else lets it go.

use super::*;
use crate::{Debt, Discard, Limit, Limits, Rates, ThrottleGroup};

const BLOCK: u64 = 4096;

/// So many blocks at once, and then a byte a second.
fn blocks_at_once(blocks: u64) -> Limits {
    let limit = Limit { average: 1, burst: blocks * BLOCK, burst_seconds: 1 };
    Limits { bytes: Rates { total: limit, ..Rates::default() }, ..Limits::default() }
}

fn rig() -> Rig {
    Rig::new(&Options::new("null0", Driver::Null { size: 1 << 30, latency: Nanos::ZERO, read_zeroes: false }))
}

/// Pushes so many reads, and returns how many have ended by the end of the turn after.
fn read(rig: &mut Rig, blocks: u64) -> usize {
    let before = rig.done.len();
    for block in 0..blocks {
        rig.push_read(block * BLOCK, Memory::new(BLOCK as usize, 0));
    }
    rig.engines.submit(clock::now());
    rig.reap();
    rig.done.len() - before
}

#[test]
fn a_burst_goes_at_once_and_what_is_beyond_waits() {
    let mut rig = rig();
    rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", blocks_at_once(10))));
    // Over the brim is what comes when it is over it already.
    assert_eq!(read(&mut rig, 5), 5);
    assert_eq!(read(&mut rig, 15), 6);
    let again = rig.engines.deadline().unwrap() - clock::now();
    assert!(again > Nanos(3600 * 1_000_000_000), "{again}");
    assert_eq!(rig.engines.in_flight(), 9);
}

#[test]
fn what_keeps_a_disk_busy_is_limited_and_flushes_are_not() {
    // As QEMU's throttle filter has it: zeroes and discards are writes; a discard that does nothing counts nowhere.
    for (discard, discards_wait) in [(Discard::Unmap, true), (Discard::Ignore, false)] {
        let driver = Driver::Null { size: 1 << 30, latency: Nanos::ZERO, read_zeroes: false };
        let mut rig = Rig::new(&Options { discard, ..Options::new("null0", driver) });
        let write = Limit { average: 1, burst: BLOCK, burst_seconds: 1 };
        let bytes = Rates { write, ..Rates::default() };
        rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", Limits { bytes, ..Limits::default() })));
        let write = |rig: &mut Rig| rig.push_write(0, Memory::new(BLOCK as usize, 0));
        let gone =
            [write(&mut rig), write(&mut rig), rig.push(Op::Flush, 0, 0, None), rig.push_read(0, Memory::new(512, 0))];
        let wait = [write(&mut rig), rig.push(Op::WriteZeroes { unmap: false, fua: false }, 0, BLOCK, None)];
        let discard = rig.push(Op::Discard, 0, BLOCK, None);
        rig.engines.submit(clock::now());
        rig.reap();
        assert!(gone.iter().all(|token| rig.done.contains_key(token)));
        assert!(wait.iter().all(|token| !rig.done.contains_key(token)));
        assert_eq!(!rig.done.contains_key(&discard), discards_wait);
    }
}

#[test]
fn a_discard_counts_with_all_its_bytes_and_as_one_request() {
    for (requests, more) in [(false, 0), (true, 2)] {
        let driver = Driver::Null { size: 1 << 30, latency: Nanos::ZERO, read_zeroes: false };
        let mut rig = Rig::new(&Options { discard: Discard::Unmap, ..Options::new("null0", driver) });
        // Three requests, or as many bytes as one discard has.
        let burst = if requests { 2 } else { 1 << 20 };
        let rates = Rates { total: Limit { average: 1, burst, burst_seconds: 1 }, ..Rates::default() };
        let limits = match requests {
            true => Limits { requests: rates, ..Limits::default() },
            false => Limits { bytes: rates, ..Limits::default() },
        };
        rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", limits)));
        let discard = rig.push(Op::Discard, 0, 2 << 20, None);
        rig.engines.submit(clock::now());
        rig.reap();
        assert!(rig.done.contains_key(&discard));
        assert_eq!(read(&mut rig, 5), more);
    }
}

#[test]
fn what_is_let_go_at_a_time_begins_in_turns_of_bounded_length() {
    // Half of the bytes, and half of the pieces, that begin in a turn.
    let halves: [fn() -> Memory; 2] = [|| Memory::new(512 << 10, 0), || Memory::pieces(&[512; 512], 0)];
    for half in halves {
        let mut rig = rig();
        rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", blocks_at_once(1))));
        assert_eq!(read(&mut rig, 2), 2);
        for _ in 0..10 {
            rig.push_read(0, half());
        }
        rig.engines.submit(clock::now());
        rig.engines.disable_limits(rig.slot);
        let mut turns = Vec::new();
        while rig.engines.in_flight() > 0 {
            let before = rig.done.len();
            rig.engines.submit(clock::now());
            let is_left = rig.engines.in_flight() > 2;
            assert_eq!(rig.engines.deadline().is_some(), is_left, "the loop comes back for the rest");
            rig.reap();
            turns.push(rig.done.len() - before);
        }
        assert_eq!(turns, [2; 5]);
    }
}

#[test]
fn what_limits_have_let_through_is_not_taken_back_with_what_waits_for_them() {
    const MIB: u64 = 1 << 20;
    let mut rig = rig();
    rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", blocks_at_once(10 * MIB / BLOCK))));
    // One goes over the brim, as always; and what begins in a turn is one.
    for _ in 0..14 {
        rig.push_read(0, Memory::new(MIB as usize, 0));
    }
    rig.engines.submit(clock::now());
    let withdrawn = rig.engines.withdraw_some(rig.slot, clock::now(), |_| true);
    assert_eq!((withdrawn.len(), rig.engines.in_flight()), (3, 11));
    rig.settle();
    assert_eq!((rig.done.len(), rig.engines.in_flight()), (11, 0));
}

/// Two rigs over one disk that does a byte a second, of which the first waits with so many blocks, and then the other with some.
fn wait(blocks: u64, beside: u64) -> [Rig; 2] {
    let mut rig = rig();
    let mut other = Rig::over(Arc::clone(&rig.disk), EngineOptions::default());
    rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", blocks_at_once(1))));
    // Two begin, as one goes over the brim.
    assert_eq!((read(&mut rig, 2 + blocks), read(&mut other, beside)), (2, 0));
    [rig, other]
}

/// How many of each begin by the time at which so many blocks have had their turn.
fn begun_by(rigs: &mut [Rig; 2], blocks: u64) -> [usize; 2] {
    let now = clock::now() + Nanos((blocks * BLOCK + BLOCK / 2) * 1_000_000_000);
    rigs.each_mut().map(|rig| {
        let before = rig.done.len();
        rig.engines.submit(now);
        rig.reap();
        rig.done.len() - before
    })
}

fn take_back(rig: &mut Rig, is_wanted: impl FnMut(&Request) -> bool) -> Vec<Request> {
    rig.engines.withdraw_some(rig.slot, clock::now(), is_wanted)
}

#[test]
fn a_disk_of_which_all_that_waited_was_taken_back_is_let_go_of_at_once() {
    let mut rig = rig();
    rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", blocks_at_once(1))));
    assert_eq!(read(&mut rig, 5), 2);
    assert_eq!(take_back(&mut rig, |_| true).len(), 3);
    rig.engines.detach(rig.slot);
    assert_eq!(Arc::strong_count(&rig.disk), 1, "nothing of it is in flight");
}

#[test]
fn what_has_its_turn_by_the_time_at_which_others_are_taken_back_begins_at_once() {
    let [mut rig, _] = wait(2, 0);
    let later = clock::now() + Nanos((BLOCK + BLOCK / 2) * 1_000_000_000);
    assert!(rig.engines.withdraw_some(rig.slot, later, |_| false).is_empty());
    assert!(rig.engines.deadline().unwrap() <= clock::now(), "nor does the loop wait for the turn of the next one");
    rig.engines.submit(clock::now());
    rig.reap();
    assert_eq!((rig.done.len(), rig.engines.in_flight()), (3, 1));
}

#[test]
fn what_is_taken_back_and_comes_again_has_the_turn_that_it_would_have_had_in_whatever_order_it_does() {
    let mut rigs = wait(4, 4);
    let mut taken = take_back(&mut rigs[0], |request| request.token.0 % 2 == 0);
    assert_eq!((taken.len(), rigs[0].engines.in_flight()), (2, 2));
    taken.reverse();
    for request in taken {
        assert!(rigs[0].engines.push(rigs[0].slot, request));
    }
    assert!(!rigs[0].engines.keep_places(rigs[0].slot, |_| true), "each is there again");
    assert_eq!(read(&mut rigs[0], 1), 0);
    // All that waits for a byte a second has its turn, one after another, and what came last has it last.
    let begun: Vec<_> = (1..=9).map(|block| begun_by(&mut rigs, block)).collect();
    assert_eq!(begun, [&[[1, 0]; 4][..], &[[0, 1]; 4], &[[1, 0]]].concat());
}

#[test]
fn what_is_taken_back_while_others_go_begins_when_it_comes_if_it_had_its_turn() {
    let mut rigs = wait(2, 2);
    let taken = take_back(&mut rigs[0], |_| true);
    let tokens: Vec<u64> = taken.iter().map(|request| request.token.0).collect();
    // Its turns are kept, and nobody has more for that.
    assert_eq!([1, 2, 3].map(|blocks| begun_by(&mut rigs, blocks)), [[0, 0], [0, 0], [0, 1]]);
    // One comes as it was, and the other as a longer one, of which a part alone was counted.
    let mut taken = taken.into_iter();
    let (one, other) = (taken.next().unwrap(), taken.next().unwrap());
    let mut longer = Memory::new(2 * BLOCK as usize, 0);
    let other = Request { len: 2 * BLOCK, buffers: longer.iovecs(), ..other };
    [one, other].into_iter().for_each(|request| assert!(rigs[0].engines.push(rigs[0].slot, request)));
    assert_eq!(begun_by(&mut rigs, 3), [1, 0]);
    assert!(rigs[0].done.contains_key(&tokens[0]));
    assert_eq!([4, 5].map(|blocks| begun_by(&mut rigs, blocks)), [[0, 1], [1, 0]]);
}

#[test]
fn what_another_loop_grants_while_places_are_kept_or_given_up_is_one_turn() {
    let [mut rig, mut beside] = wait(4, 1);
    // By then one more has its turn.
    let later = clock::now() + Nanos((BLOCK + BLOCK / 2) * 1_000_000_000);
    let mut asked = 0;
    let taken = take_back(&mut rig, |_| {
        if asked == 0 {
            beside.engines.submit(later);
        }
        asked += 1;
        asked <= 2
    });
    assert_eq!((asked, taken.len(), rig.engines.in_flight()), (4, 2, 2));
    // The first has its turn, and both have none of their own any more.
    assert!(rig.engines.keep_places(rig.slot, |_| false));
    let mut rigs = [rig, beside];
    assert_eq!(begun_by(&mut rigs, 1), [0, 0]);
    assert!(!rigs[0].engines.keep_places(rigs[0].slot, |_| false));
    assert_eq!([2, 3, 4].map(|blocks| begun_by(&mut rigs, blocks)), [[1, 0], [1, 0], [0, 1]]);
}

#[test]
fn nobody_waits_for_what_was_taken_back_and_does_not_come_again_nor_is_it_owed() {
    type End = fn(&mut EngineSet, DiskSlot, &[Request]);
    let ends: [(&str, End); 3] = [
        ("is given up", |engines, slot, taken| {
            assert!(engines.keep_places(slot, |token| token == taken[0].token));
            assert!(!engines.keep_places(slot, |_| false));
        }),
        ("is let go", |engines, slot, _| engines.disable_limits(slot)),
        ("is detached", |engines, slot, _| engines.detach(slot)),
    ];
    for (what, end) in ends {
        let mut rigs = wait(4, 2);
        let slot = rigs[0].slot;
        let taken = take_back(&mut rigs[0], |_| true);
        assert_eq!(taken.len(), 4);
        end(&mut rigs[0].engines, slot, &taken);
        rigs[0].engines.submit(clock::now());
        assert_eq!(rigs[0].disk.limits_debt(), Debt::default(), "{what}");
        assert_eq!(begun_by(&mut rigs, 1), [0, 1], "{what}");
    }
}

#[test]
fn a_turn_that_was_had_while_its_request_was_taken_back_is_had_in_a_drain_too_and_not_owed() {
    let mut rigs = wait(4, 0);
    let taken = take_back(&mut rigs[0], |_| true);
    assert_eq!([1, 2, 3].map(|blocks| begun_by(&mut rigs, blocks)), [[0, 0]; 3]);
    let [rig, _] = &mut rigs;
    rig.engines.disable_limits(rig.slot);
    rig.engines.submit(clock::now());
    for request in taken {
        rig.engines.push(rig.slot, request);
    }
    rig.settle();
    assert_eq!((rig.engines.in_flight(), rig.disk.limits_debt()), (0, Debt { owed: 1, made_up: 0 }));
    assert!(!rig.engines.keep_places(rig.slot, |_| true));
}

#[test]
fn whatever_ends_a_limit_lets_everything_go() {
    let limits = Limits::default();
    type End = fn(&mut Rig, &ThrottleGroup, Limits);
    let ends: [(&str, End); 4] = [
        ("no group", |rig, _, _| {
            rig.disk.set_throttle_group(None);
            rig.engines.restart_throttled();
        }),
        ("another group", |rig, _, _| {
            rig.disk.set_throttle_group(Some(&ThrottleGroup::new("h", blocks_at_once(1))));
            rig.engines.restart_throttled();
        }),
        ("other limits", |rig, group, limits| {
            group.set_limits(limits);
            rig.engines.restart_throttled();
        }),
        ("a drain", |rig, _, _| rig.engines.disable_limits(rig.slot)),
    ];
    for (what, end) in ends {
        let mut rig = rig();
        let group = ThrottleGroup::new("g", blocks_at_once(1));
        rig.disk.set_throttle_group(Some(&group));
        assert_eq!(read(&mut rig, 20), 2);
        end(&mut rig, &group, limits);
        rig.settle();
        assert_eq!(rig.done.len(), 20, "{what}");
        assert_eq!(rig.engines.deadline(), None, "{what}");
    }
}

#[test]
fn a_disk_that_is_detached_is_let_go_of_with_everything_that_waited() {
    let mut rig = rig();
    rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", blocks_at_once(1))));
    assert_eq!(read(&mut rig, 20), 2);
    rig.engines.detach(rig.slot);
    rig.settle();
    assert_eq!(rig.done.len(), 20);
    assert_eq!(Arc::strong_count(&rig.disk), 1);
}

#[test]
fn what_is_pushed_while_a_disk_drains_waits_for_nothing() {
    let mut rig = rig();
    rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", blocks_at_once(1))));
    rig.engines.disable_limits(rig.slot);
    assert_eq!(read(&mut rig, 20), 20);
    rig.engines.enable_limits(rig.slot);
    assert!(read(&mut rig, 20) < 20, "it goes on under its limits");
}

#[test]
fn what_a_drain_lets_go_counts_all_the_same() {
    let mut rig = rig();
    rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", blocks_at_once(1))));
    assert_eq!(read(&mut rig, 20), 2);
    rig.engines.disable_limits(rig.slot);
    rig.settle();
    rig.engines.enable_limits(rig.slot);
    assert_eq!(rig.disk.limits_debt(), Debt { owed: 18, made_up: 0 });
    assert_eq!(read(&mut rig, 1), 0);
    // All but one of the twenty are over the brim, at a byte a second.
    let (now, second) = (clock::now(), 1_000_000_000);
    for (blocks, done) in [(18, 20), (20, 21)] {
        rig.engines.submit(now + Nanos(blocks * BLOCK * second));
        rig.reap();
        assert_eq!(rig.done.len(), done);
    }
    assert_eq!(rig.disk.limits_debt(), Debt { owed: 0, made_up: 18 });
}

#[test]
fn what_comes_to_a_disk_that_drains_counts_as_what_has_waited_does() {
    let mut rig = rig();
    rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", blocks_at_once(1))));
    rig.engines.disable_limits(rig.slot);
    assert_eq!(read(&mut rig, 1), 1);
    assert_eq!(rig.disk.limits_debt().owed, 0, "there was room for it");
    assert_eq!(read(&mut rig, 20), 20);
    assert!(rig.disk.limits_debt().owed > 0);
    rig.disk.set_throttle_group(None);
    assert_eq!(rig.disk.limits_debt().owed, 0);
}

#[test]
fn a_disk_of_a_group_does_not_wait_for_what_a_drain_of_another_lets_go() {
    let (mut drained, mut beside) = (rig(), rig());
    let group = ThrottleGroup::new("g", blocks_at_once(1));
    [&drained, &beside].into_iter().for_each(|rig| rig.disk.set_throttle_group(Some(&group)));
    assert_eq!(read(&mut drained, 1000), 2);
    drained.engines.disable_limits(drained.slot);
    drained.settle();
    assert_eq!(beside.disk.limits_debt().owed, 0);
    // It waits for the one block that is over the brim, and for one of the other's.
    assert_eq!(read(&mut beside, 1), 0);
    beside.engines.submit(clock::now() + Nanos(3 * BLOCK * 1_000_000_000));
    beside.reap();
    assert_eq!(beside.done.len(), 1);
}

#[test]
fn a_group_is_what_it_was_made_and_a_disk_that_is_in_it_keeps_its_place() {
    let group = ThrottleGroup::new("g", blocks_at_once(1));
    assert_eq!((group.name(), group.limits()), ("g", blocks_at_once(1)));
    let mut rig = rig();
    assert!(rig.disk.throttle_group().is_none());
    for _ in 0..2 {
        rig.disk.set_throttle_group(Some(&group));
        assert!(rig.disk.throttle_group().is_some_and(|now| Arc::ptr_eq(&now, &group)));
        // What waits goes on waiting, as it would not under another group.
        read(&mut rig, 5);
        assert_eq!(rig.done.len(), 2);
    }
    group.set_limits(blocks_at_once(100));
    assert_eq!(group.limits(), blocks_at_once(100));
    rig.engines.restart_throttled();
    rig.settle();
    rig.disk.set_throttle_group(None);
    assert!(rig.disk.throttle_group().is_none());
}

#[test]
fn disks_of_a_group_share_its_limits_across_loops() {
    let group = ThrottleGroup::new("g", blocks_at_once(10));
    let mut rigs = [rig(), rig()];
    for rig in &rigs {
        rig.disk.set_throttle_group(Some(&group));
    }
    assert_eq!(read(&mut rigs[0], 7), 7);
    assert_eq!(read(&mut rigs[1], 7), 4);
    assert_eq!(read(&mut rigs[0], 1), 0);
    group.set_limits(blocks_at_once(3));
    // One loop grants turns to both, and each disk has as many as the other.
    let waiting = rigs.each_ref().map(|rig| rig.engines.in_flight());
    assert_eq!(waiting, [1, 3]);
    for rig in &mut rigs {
        rig.engines.restart_throttled();
        rig.engines.submit(clock::now());
        rig.reap();
    }
    assert_eq!(rigs.each_ref().map(|rig| rig.engines.in_flight()), [0, 0]);
}

#[test]
fn requests_of_a_second_begin_in_the_seconds_after() {
    let mut rig = rig();
    let limit = Limit { average: 1000, ..Limit::default() };
    let limits = Limits { requests: Rates { total: limit, ..Rates::default() }, ..Limits::default() };
    rig.disk.set_throttle_group(Some(&ThrottleGroup::new("g", limits)));
    let begun = clock::now();
    assert_eq!(read(&mut rig, 300), 101);
    rig.settle();
    // Never faster than that, on however slow a machine.
    assert!(clock::now() - begun >= Nanos::from_millis(198));
}

#[test]
fn limited_disks_on_many_threads_all_come_to_an_end() {
    let limit = Limit { average: 20_000, ..Limit::default() };
    let limits = Limits { requests: Rates { total: limit, ..Rates::default() }, ..Limits::default() };
    let group = ThrottleGroup::new("g", limits);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut rig = rig();
                rig.disk.set_throttle_group(Some(&group));
                for _ in 0..10 {
                    read(&mut rig, 100);
                    rig.settle();
                }
                assert_eq!(rig.done.len(), 1000);
            });
        }
    });
}

#[test]
fn what_waits_for_limits_can_be_taken_back_and_limits_do_not_count_it() {
    let (mut rig, mut beside) = (rig(), rig());
    let group = ThrottleGroup::new("g", blocks_at_once(1));
    rig.disk.set_throttle_group(Some(&group));
    beside.disk.set_throttle_group(Some(&group));
    // One over the brim, as always.
    assert_eq!(read(&mut rig, 5), 2);
    let withdrawn = rig.engines.withdraw(rig.slot);
    assert_eq!((withdrawn.len(), rig.engines.in_flight()), (3, 0));
    assert!(rig.engines.withdraw(rig.slot).is_empty());
    assert_eq!(rig.disk.limits_debt(), Debt::default());
    // Another disk of the group waits for that one block to leak, a byte a second.
    assert_eq!(read(&mut beside, 1), 0);
    let again = beside.engines.deadline().unwrap() - clock::now();
    assert!(again <= Nanos(BLOCK * 1_000_000_000), "{again}");
    rig.disk.set_throttle_group(None);
    withdrawn.into_iter().for_each(|request| assert!(!rig.engines.push(rig.slot, request)));
    rig.engines.submit(clock::now());
    rig.reap();
    assert_eq!((rig.done.len(), rig.engines.in_flight()), (5, 0));
    rig.engines.detach(rig.slot);
    assert_eq!(Arc::strong_count(&rig.disk), 1, "nothing of it is in flight");
}
