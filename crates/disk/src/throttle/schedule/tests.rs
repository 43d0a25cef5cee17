//! Limits and fairness, in virtual time.

use super::*;
use crate::request::PartOf;
use crate::throttle::{Limit, Rates};

const WHOLE: Cost = Cost { bytes: 4096, part: PartOf::all(4096) };

fn limits(requests: Limit) -> Limits {
    Limits { requests: Rates { total: requests, ..Rates::default() }, ..Limits::default() }
}

fn average(average: u64) -> Limit {
    Limit { average, ..Limit::default() }
}

/// A queue of a disk on which as many requests of 4 KiB as began wait at all times.
struct Load {
    disk: DiskId,
    queue: QueueId,
    direction: Direction,
    begun: u64,
}

fn load(schedule: &mut Schedule, disk: DiskId, direction: Direction, depth: u64) -> Load {
    let queue = schedule.open();
    (0..depth).for_each(|_| schedule.ask(disk, queue, direction, WHOLE));
    Load { disk, queue, direction, begun: 0 }
}

/// Lets `seconds` of virtual time go by; each load looks when it was told to.
fn run(schedule: &mut Schedule, loads: &mut [Load], seconds: u64) {
    let end = Nanos(seconds * 1_000_000_000);
    let mut looks = vec![Nanos::ZERO; loads.len()];
    loop {
        let Some((at, now)) = looks.iter().copied().enumerate().min_by_key(|(_, look)| *look) else { return };
        if now >= end {
            return;
        }
        let load = &mut loads[at];
        schedule.grant(now);
        let taken = schedule.take(load.queue)[load.direction as usize];
        load.begun += taken as u64;
        (0..taken).for_each(|_| schedule.ask(load.disk, load.queue, load.direction, WHOLE));
        // One that has just begun some has others waiting at once, and a look at the same moment serves those.
        looks[at] = schedule.next(load.direction, now).max(now + Nanos(u64::from(taken > 0)));
    }
}

/// What a disk owes when all that it could have paid is.
fn paid(schedule: &mut Schedule, disk: DiskId, now: Nanos) -> Debt {
    while !schedule.pay(now) {}
    schedule.debt(disk, now)
}

fn is_near(count: u64, expected: u64) -> bool {
    count.abs_diff(expected) <= 2
}

#[test]
fn a_limit_holds_to_the_request_over_a_minute() {
    for rate in [1, 7, 100, 2345] {
        let mut schedule = Schedule::new(limits(average(rate)));
        let disk = schedule.join();
        let mut loads = [load(&mut schedule, disk, Direction::Read, 32)];
        run(&mut schedule, &mut loads, 60);
        // What may come at once comes on top of it.
        assert!(is_near(loads[0].begun, 60 * rate + rate / 10), "{rate}: {}", loads[0].begun);
    }
}

#[test]
fn a_burst_is_granted_at_its_rate_and_then_the_average() {
    let mut schedule = Schedule::new(limits(Limit { average: 100, burst: 1000, burst_seconds: 3 }));
    let disk = schedule.join();
    let mut loads = [load(&mut schedule, disk, Direction::Write, 64)];
    run(&mut schedule, &mut loads, 2);
    assert!(is_near(loads[0].begun, 2 * 1000 + 100), "{}", loads[0].begun);
    let mut schedule = Schedule::new(limits(Limit { average: 100, burst: 1000, burst_seconds: 3 }));
    let disk = schedule.join();
    let mut loads = [load(&mut schedule, disk, Direction::Write, 64)];
    run(&mut schedule, &mut loads, 60);
    assert!(is_near(loads[0].begun, 3 * 1000 + 60 * 100), "{}", loads[0].begun);
}

#[test]
fn disks_of_a_group_share_evenly_however_deep_their_queues_are() {
    let mut schedule = Schedule::new(limits(average(900)));
    let disks = [schedule.join(), schedule.join(), schedule.join()];
    let depths = [1, 8, 256];
    let mut loads: Vec<Load> = Vec::new();
    for (disk, depth) in disks.into_iter().zip(depths) {
        loads.push(load(&mut schedule, disk, Direction::Read, depth));
    }
    run(&mut schedule, &mut loads, 60);
    assert!(loads.iter().all(|load| load.begun.abs_diff(60 * 300 + 30) <= 90), "{:?}", begun(&loads));
}

#[test]
fn a_disk_with_many_queues_gets_no_more_than_one_with_one() {
    let mut schedule = Schedule::new(limits(average(1000)));
    let (many, one) = (schedule.join(), schedule.join());
    let mut loads: Vec<Load> = (0..8).map(|_| load(&mut schedule, many, Direction::Read, 4)).collect();
    loads.push(load(&mut schedule, one, Direction::Read, 4));
    run(&mut schedule, &mut loads, 60);
    let many: u64 = loads[..8].iter().map(|load| load.begun).sum();
    assert!(many.abs_diff(loads[8].begun) <= 100, "{:?}", begun(&loads));
}

#[test]
fn reads_and_writes_share_a_total() {
    let mut schedule = Schedule::new(limits(average(1000)));
    let disk = schedule.join();
    let mut loads = [load(&mut schedule, disk, Direction::Read, 32), load(&mut schedule, disk, Direction::Write, 32)];
    run(&mut schedule, &mut loads, 60);
    assert!(loads[0].begun.abs_diff(loads[1].begun) <= 32, "{:?}", begun(&loads));
}

#[test]
fn a_limit_on_writes_leaves_reads_alone() {
    let requests = Rates { write: average(10), ..Rates::default() };
    let mut schedule = Schedule::new(Limits { requests, ..Limits::default() });
    let disk = schedule.join();
    let queue = schedule.open();
    for direction in Direction::BOTH {
        (0..100).for_each(|_| schedule.ask(disk, queue, direction, WHOLE));
    }
    schedule.grant(Nanos::ZERO);
    assert_eq!(schedule.take(queue), [100, 2]);
}

#[test]
fn a_disk_that_is_alone_in_its_group_has_all_of_it() {
    let mut schedule = Schedule::new(limits(average(500)));
    let (busy, _idle) = (schedule.join(), schedule.join());
    let mut loads = [load(&mut schedule, busy, Direction::Read, 4)];
    run(&mut schedule, &mut loads, 10);
    assert!(is_near(loads[0].begun, 5050), "{:?}", begun(&loads));
}

#[test]
fn a_disk_that_drains_again_and_again_has_no_more_than_its_limits_beyond_what_the_first_drain_let_go() {
    let mut schedule = Schedule::new(limits(average(500)));
    let disk = schedule.join();
    let (mut begun, mut now) = (0, Nanos::ZERO);
    while now < Nanos(20 * 1_000_000_000) {
        if schedule.debt(disk, now).owed == 0 {
            let drained = load(&mut schedule, disk, Direction::Read, 1024);
            schedule.grant(now);
            let taken = schedule.take(drained.queue)[Direction::Read as usize];
            schedule.close(disk, drained.queue, 1024 - taken);
            begun += 1024;
        }
        now += Nanos::from_millis(1);
    }
    assert!((20 * 500..=20 * 500 + 50 + 1024 + 2).contains(&begun), "{begun}");
}

#[test]
fn nobody_but_the_disk_itself_waits_for_what_its_drain_let_go() {
    let mut schedule = Schedule::new(limits(average(1000)));
    let (drained, beside) = (schedule.join(), schedule.join());
    let closed = load(&mut schedule, drained, Direction::Read, 10_000);
    schedule.close(drained, closed.queue, 10_000);
    let mut loads = [load(&mut schedule, beside, Direction::Read, 4)];
    run(&mut schedule, &mut loads, 10);
    // Half of it, as beside a disk that does something.
    assert!(loads[0].begun.abs_diff(5000) <= 10, "{:?}", begun(&loads));
    assert!(paid(&mut schedule, drained, Nanos(10 * 1_000_000_000)).owed > 0);
    // And then all that is left, of which nobody has had a part.
    assert!(paid(&mut schedule, drained, Nanos(14_800_000_000)).owed > 0);
    assert_eq!(paid(&mut schedule, drained, Nanos(15_000_000_000)).owed, 0);
}

#[test]
fn what_is_owed_is_paid_while_nobody_looks_and_who_comes_then_has_no_turns_from_before() {
    let mut schedule = Schedule::new(limits(average(100)));
    let (drained, beside) = (schedule.join(), schedule.join());
    let closed = load(&mut schedule, drained, Direction::Write, 511);
    schedule.close(drained, closed.queue, 511);
    // Eleven at once and then a hundred a second; two of these seconds were too much.
    let now = Nanos(7 * 1_000_000_000);
    paid(&mut schedule, drained, now);
    let late = load(&mut schedule, beside, Direction::Write, 100);
    schedule.grant(now);
    assert_eq!(schedule.take(late.queue), [0, 11]);
    assert_eq!(schedule.debt(drained, now).owed, 0);
}

#[test]
fn however_much_is_owed_so_much_of_it_is_paid_at_a_time_as_others_can_wait_for() {
    const OWED: usize = 10 * PAID_AT_A_TIME;
    let rates = [Limit { average: 1000, ..Limit::default() }, Limit { average: 1, burst: 1 << 20, burst_seconds: 1 }];
    for rate in rates {
        let mut schedule = Schedule::new(limits(rate));
        let disk = schedule.join();
        let closed = load(&mut schedule, disk, Direction::Read, OWED as u64);
        schedule.close(disk, closed.queue, OWED);
        // All of it was due long ago, one by one or in one go.
        let now = Nanos(3600 * 1_000_000_000);
        let mut left = OWED;
        while left > 0 {
            assert!(!schedule.pay(now), "{rate:?}: {left}");
            let owed = schedule.disks[&disk].debt.owed as usize;
            assert!((1..=PAID_AT_A_TIME).contains(&(left - owed)), "{rate:?}: {left} {owed}");
            left = owed;
        }
        assert!(schedule.pay(now));
        assert_eq!(schedule.debt(disk, now), Debt { owed: 0, made_up: OWED as u64 }, "{rate:?}");
    }
}

#[test]
fn what_is_owed_already_is_not_looked_through_for_what_another_queue_owes() {
    const QUEUES: u64 = 200_000;
    let mut schedule = Schedule::new(limits(average(1)));
    let disk = schedule.join();
    // This takes minutes if it is.
    for _ in 0..QUEUES {
        let closed = load(&mut schedule, disk, Direction::Write, 1);
        schedule.close(disk, closed.queue, 1);
    }
    assert_eq!(schedule.debt(disk, Nanos::ZERO), Debt { owed: QUEUES - 1, made_up: 1 });
}

#[test]
fn where_nothing_is_owed_nobody_has_turns_of_a_time_at_which_nobody_looked() {
    // Two of them may come at once.
    let mut schedule = Schedule::new(limits(average(10)));
    let disk = schedule.join();
    let waits = load(&mut schedule, disk, Direction::Read, 50);
    schedule.grant(Nanos::ZERO);
    assert_eq!(schedule.take(waits.queue), [2, 0]);
    let now = Nanos(2 * 1_000_000_000);
    schedule.pay(now);
    schedule.grant(now);
    assert_eq!(schedule.take(waits.queue), [2, 0]);
}

#[test]
fn a_lane_that_is_closed_has_used_up_what_it_took_along() {
    let mut schedule = Schedule::new(limits(average(100)));
    let disk = schedule.join();
    let closed = load(&mut schedule, disk, Direction::Read, 111);
    schedule.close(disk, closed.queue, 111);
    let waits = load(&mut schedule, disk, Direction::Read, 1);
    schedule.grant(Nanos::ZERO);
    assert_eq!(schedule.take(waits.queue), [0, 0]);
    // Eleven of them at once.
    for (turn, expected) in [(99, 0), (102, 1)] {
        let now = Nanos::from_millis(turn * 10);
        schedule.pay(now);
        schedule.grant(now);
        assert_eq!(schedule.take(waits.queue), [expected, 0], "{turn}");
    }
}

#[test]
fn what_is_forgotten_of_a_queue_or_has_left_with_its_disk_takes_no_turn_of_others() {
    for disk_leaves in [false, true] {
        // Two of them may come at once.
        let mut schedule = Schedule::new(limits(average(10)));
        let disk = schedule.join();
        let beside = if disk_leaves { schedule.join() } else { disk };
        let gone = load(&mut schedule, disk, Direction::Write, 2);
        let stays = load(&mut schedule, beside, Direction::Write, 2);
        if disk_leaves {
            schedule.leave(disk);
        } else {
            schedule.forget(disk, gone.queue);
        }
        schedule.grant(Nanos::ZERO);
        assert_eq!((schedule.take(gone.queue), schedule.take(stays.queue)), ([0, 0], [0, 2]), "{disk_leaves}");
    }
}

#[test]
fn new_limits_begin_with_nothing_used_up() {
    let mut schedule = Schedule::new(limits(average(1)));
    let disk = schedule.join();
    let load = load(&mut schedule, disk, Direction::Read, 50);
    schedule.grant(Nanos::ZERO);
    assert_eq!(schedule.take(load.queue), [1, 0]);
    let closed = schedule.open();
    schedule.ask(disk, closed, Direction::Read, WHOLE);
    schedule.close(disk, closed, 1);
    assert!(schedule.debt(disk, Nanos::ZERO).owed > 0);
    schedule.set_limits(limits(average(200)));
    assert_eq!(schedule.debt(disk, Nanos::ZERO), Debt { owed: 0, made_up: 1 }, "nor is anything owed");
    schedule.grant(Nanos::ZERO);
    assert_eq!(schedule.take(load.queue), [21, 0]);
    schedule.set_limits(Limits::default());
    schedule.grant(Nanos::ZERO);
    assert_eq!(schedule.take(load.queue), [28, 0]);
}

fn begun(loads: &[Load]) -> Vec<u64> {
    loads.iter().map(|load| load.begun).collect()
}

#[test]
fn what_is_asked_for_in_parts_counts_as_one_request_and_with_all_its_bytes() {
    let parts = |limits: Limits| {
        let mut schedule = Schedule::new(limits);
        let (disk, queue) = (schedule.join(), schedule.open());
        let part = |is_first| PartOf { whole: 32 * 4096, is_first };
        for part in [[part(true)].as_slice(), &[part(false); 31], &[WHOLE.part; 2]].concat() {
            schedule.ask(disk, queue, Direction::Read, Cost { part, ..WHOLE });
        }
        schedule.grant(Nanos::ZERO);
        schedule.take(queue)[Direction::Read as usize]
    };
    // One goes over the brim, of requests and of bytes.
    assert_eq!(parts(limits(average(10))), 33);
    let bytes = Rates { total: average(10 * 4096), ..Rates::default() };
    assert_eq!(parts(Limits { bytes, ..Limits::default() }), 2);
    // Where so many bytes are a request of their own, those of parts are likewise.
    assert_eq!(parts(Limits { request_bytes: 2 * 4096, ..limits(average(60)) }), 13);
}
