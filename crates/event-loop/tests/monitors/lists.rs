//! Where sources are: their places and names, and the list of those that are looked at in every turn.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Instant;

use egret_event_loop::{EventLoop, LoopOptions, MonitorChoice, spawn};
use egret_polling::{EventKind, Nanos};

use crate::bell::{Bell, Echo, Heard, PATIENCE, bell, every_turn, fixed, hear_work, on_every_loop, options};

#[test]
fn a_place_is_another_s_when_its_source_has_left_or_was_refused_and_its_name_is_not() {
    let mut target = EventLoop::new(options(MonitorChoice::Auto, Nanos::ZERO), |_ring| Echo::default()).unwrap();
    let (mut refused, ..) = bell();
    refused.refuses = true;
    assert!(target.attach(refused).is_err());
    let attach = |target: &mut EventLoop<Bell>| target.attach(bell().0).map_err(|(_, e)| e).unwrap();
    let first = attach(&mut target);
    let (to, left) = channel();
    target.detach(first, move |bell| drop(to.send(bell)));
    target.turn().unwrap();
    left.try_recv().expect("it has left");
    let second = attach(&mut target);
    assert_eq!((first.index(), second.index()), (0, 0));
    assert!(target.source(first).is_none() && !target.resume(first));
    assert!(target.source(second).is_some());
}

#[test]
fn a_source_that_leaves_takes_no_other_along() {
    on_every_loop(|handle| {
        handle.call(|target| target.set_idle_after(Nanos::from_millis(3_600_000))).unwrap();
        let [(first, ..), (second, outside, hear)] = [(); 2].map(|()| {
            let (bell, outside, hear) = bell();
            // There before it comes, so that it comes on the list.
            outside.ring();
            let id = handle.attach(bell).unwrap();
            hear_work(&hear, 1);
            (id, outside, hear)
        });
        handle.call(|_| ()).unwrap();
        while hear.try_recv().is_ok() {}
        // One leaves while the other is to be dispatched, and both are looked at.
        let (to, left) = channel();
        handle.send(move |target| {
            target.wake(second);
            target.detach(first, move |bell| drop(to.send(bell)));
        });
        left.recv_timeout(PATIENCE).expect("it leaves");
        while hear.recv_timeout(PATIENCE).expect("the other is dispatched") != (Heard::Dispatched { work: 0 }) {}
        outside.ring();
        hear_work(&hear, 1);
    });
}

#[test]
fn a_source_is_on_the_list_of_those_that_are_looked_at_once_if_it_has_had_work() {
    let (tell, told) = channel();
    let options = LoopOptions {
        policy: every_turn(tell),
        idle_after: Nanos::from_millis(3_600_000),
        ..options(MonitorChoice::Auto, Nanos::ZERO)
    };
    let (handle, thread) = spawn::<Bell>(options, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
    let queues = || {
        handle.call(|_| ()).unwrap();
        told.try_iter().last().expect("a turn").ready(EventKind::Queue).len()
    };
    let (mut bell, outside, hear) = bell();
    bell.unfinished = 10;
    let id = handle.attach(bell).unwrap();
    handle.send(move |target| target.wake(id));
    // It is dispatched in the turn after the one in which it is woken.
    handle.call(|_| ()).unwrap();
    assert_eq!(queues(), 0, "nothing was there when it came, nor when it was woken");
    for _ in 0..20 {
        outside.ring();
        hear_work(&hear, 1);
        // What it has dispatched it puts on the list in the same turn, the end of which this is.
        while hear.recv_timeout(PATIENCE).expect("the turn ends") != Heard::Notified {}
        assert_eq!(queues(), 1);
    }
    handle.send(EventLoop::stop);
    thread.join().unwrap();
}

#[test]
fn what_the_monitor_tells_of_a_source_is_an_event_if_only_a_dispatch_sees_work_and_otherwise_if_a_look_does() {
    for (is_blind, works, expected) in
        [(false, false, [].as_slice()), (false, true, &[true]), (true, false, &[true]), (true, true, &[true])]
    {
        let (tell, told) = channel();
        let options = LoopOptions {
            policy: every_turn(tell),
            idle_after: Nanos::from_millis(3_600_000),
            ..options(MonitorChoice::Auto, Nanos::ZERO)
        };
        let mut target = EventLoop::new(options, |_ring| Echo::default()).unwrap();
        let (mut bell, outside, hear) = bell();
        bell.is_blind = is_blind;
        target.attach(bell).map_err(|(_, e)| e).unwrap();
        target.turn().unwrap();
        while hear.try_recv().is_ok() {}
        if works {
            outside.add();
        }
        rustix::io::write(&outside.fd, &1u64.to_ne_bytes()).unwrap();
        // It has turns for other reasons, too.
        while hear.try_recv().is_err() {
            target.turn().unwrap();
        }
        let ready = told.try_iter().last().expect("a turn").ready(EventKind::Queue);
        assert_eq!(
            (ready.as_slice(), target.counters().kicks.get()),
            (expected, 1),
            "blind: {is_blind}, works: {works}"
        );
    }
}

#[test]
fn a_source_stays_on_the_list_until_it_has_been_idle_for_so_long() {
    let (tell, told) = channel();
    let options = LoopOptions {
        policy: every_turn(tell),
        idle_after: Nanos::from_millis(60_000),
        ..options(MonitorChoice::Auto, Nanos::ZERO)
    };
    let mut target = EventLoop::new(options, |_ring| Echo::default()).unwrap();
    let (bell, outside, _hear) = bell();
    outside.ring();
    let id = target.attach(bell).map_err(|(_, e)| e).unwrap();
    let queues = |target: &mut EventLoop<Bell>| {
        target.wake(id);
        target.turn().unwrap();
        told.try_iter().last().expect("a turn").ready(EventKind::Queue).len()
    };
    // The first turn is one in which idle sources are looked for.
    assert_eq!([queues(&mut target), queues(&mut target)], [1, 1]);
    target.set_idle_after(Nanos::ZERO);
    queues(&mut target);
    assert!(outside.is_armed());
    assert_eq!(queues(&mut target), 0);
}

#[test]
fn a_source_that_is_looked_at_need_not_ring() {
    on_every_loop(|handle| {
        let (mut bell, outside, hear) = bell();
        let (tell, told) = channel();
        let inside = Arc::clone(&outside);
        bell.act = Some(Box::new(move |_| {
            let _ = tell.send(inside.is_armed());
        }));
        handle.attach(bell).unwrap();
        told.recv_timeout(PATIENCE).expect("it is dispatched when it comes");
        // The turn is over: it has been left to the monitor.
        handle.call(|_| ()).unwrap();
        assert!(outside.is_armed());
        outside.ring();
        hear_work(&hear, 1);
        assert_eq!(told.recv_timeout(PATIENCE), Ok(false), "it is dispatched");
    });
}

#[test]
fn a_source_that_comes_with_work_need_not_ring_any_more_when_that_is_dispatched() {
    let mut target = EventLoop::new(options(MonitorChoice::Auto, Nanos::MAX), |_ring| Echo::default()).unwrap();
    let (bell, outside, hear) = bell();
    outside.ring();
    target.attach(bell).map_err(|(_, e)| e).unwrap();
    target.turn().unwrap();
    hear_work(&hear, 1);
    assert!(!outside.is_armed());
}

#[test]
fn a_source_whose_work_slips_in_while_it_is_armed_need_not_ring_any_more_when_that_is_dispatched() {
    let idle_after = Nanos::from_millis(3_600_000);
    let options = LoopOptions { idle_after, ..options(MonitorChoice::Auto, Nanos::ZERO) };
    let mut target = EventLoop::new(options, |_ring| Echo::default()).unwrap();
    let (mut bell, outside, _hear) = bell();
    let (tell, told) = channel();
    let theirs = Arc::clone(&outside);
    bell.when_armed = Some(Box::new(move || {
        theirs.ring();
        tell.send(()).unwrap();
    }));
    // There before it comes, so that it comes on the list.
    outside.ring();
    target.attach(bell).map_err(|(_, e)| e).unwrap();
    while told.try_recv().is_err() {
        target.turn().unwrap();
    }
    assert!(!outside.is_armed());
}

#[test]
fn a_source_that_only_the_monitor_tells_of_is_armed_anew_after_each_dispatch() {
    let mut target = EventLoop::new(options(MonitorChoice::Auto, Nanos::ZERO), |_ring| Echo::default()).unwrap();
    let (mut bell, outside, hear) = bell();
    let theirs = Arc::clone(&outside);
    bell.act = Some(Box::new(move |_| theirs.be_taken_from()));
    let id = target.attach(bell).map_err(|(_, e)| e).unwrap();
    for _ in 0..3 {
        target.turn().unwrap();
        assert!(hear.try_iter().any(|heard| heard == Heard::Dispatched { work: 0 }));
        assert!(outside.is_armed());
        target.wake(id);
    }
}

#[test]
fn while_a_loop_spins_no_source_need_ring() {
    let options = options(MonitorChoice::Auto, Nanos::ZERO);
    let (handle, thread) = spawn::<Bell>(options, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
    handle.call(|target| target.set_idle_after(Nanos::from_millis(3_600_000))).unwrap();
    let (bell, outside, hear) = bell();
    // There before it comes, so that it comes on the list.
    outside.ring();
    handle.attach(bell).unwrap();
    hear_work(&hear, 1);
    let becomes = |armed: bool| {
        let begin = Instant::now();
        while outside.is_armed() != armed {
            assert!(begin.elapsed() < PATIENCE, "armed: {armed}");
        }
    };
    becomes(true);
    handle.set_policy(fixed(Nanos::MAX), Nanos::MAX).unwrap();
    becomes(false);
    handle.send(EventLoop::stop);
    thread.join().unwrap();
}

#[test]
fn work_that_is_found_by_looking_counts_as_a_kick_that_was_spared() {
    let options = LoopOptions { idle_after: Nanos::from_millis(60_000), ..options(MonitorChoice::Auto, Nanos::ZERO) };
    let mut target = EventLoop::new(options, |_ring| Echo::default()).unwrap();
    let bells = [(); 2].map(|()| bell());
    for (_, outside, _) in &bells {
        outside.add();
    }
    let both = bells.map(|(bell, outside, _)| (target.attach(bell).map_err(|(_, e)| e).unwrap(), outside));
    for spared in [0, 2, 4] {
        target.turn().unwrap();
        let counted = target.counters().read();
        assert_eq!((counted.kicks_spared, counted.kicks), (spared, 0));
        both.iter().for_each(|(_, outside)| outside.ring());
    }
}

#[test]
fn a_wait_that_a_look_before_the_sleep_has_ended_is_no_hit_of_a_loop_that_does_not_spin() {
    let idle_after = Nanos::from_millis(3_600_000);
    let options = LoopOptions { idle_after, ..options(MonitorChoice::Auto, Nanos::ZERO) };
    let mut target = EventLoop::new(options, |_ring| Echo::default()).unwrap();
    let (mut bell, outside, hear) = bell();
    let theirs = Arc::clone(&outside);
    bell.when_armed = Some(Box::new(move || theirs.ring()));
    // There before it comes, so that it comes on the list.
    outside.ring();
    target.attach(bell).map_err(|(_, e)| e).unwrap();
    let mut work = 0;
    while work < 2 {
        target.turn().unwrap();
        work += hear.try_iter().map(|heard| if let Heard::Dispatched { work } = heard { work } else { 0 }).sum::<u64>();
    }
    let counted = target.counters().read();
    assert!(counted.waits > counted.blocks, "{counted:?}");
    assert_eq!(counted.hits, 0);
}

#[test]
fn a_loop_counts_how_long_it_has_spun_and_slept() {
    for window in [Nanos::ZERO, Nanos::from_millis(2)] {
        let begin = Instant::now();
        let mut target = EventLoop::new(options(MonitorChoice::Auto, window), |_ring| Echo::default()).unwrap();
        let (mut bell, _outside, hear) = bell();
        bell.act = Some(Box::new(|turn| turn.set_timer(turn.now() + Nanos::from_millis(5))));
        target.attach(bell).map_err(|(_, e)| e).unwrap();
        // The machine may take the thread's processor for so long that there is nothing left to wait for.
        let counted = loop {
            while hear.try_recv().is_ok() {}
            target.turn().unwrap();
            let counted = target.counters().read();
            if counted.blocks > 0 {
                break counted;
            }
        };
        let took = Nanos::from(begin.elapsed());
        assert_eq!(counted.blocks, 1);
        assert_eq!(hear.try_recv(), Ok(Heard::Dispatched { work: 0 }), "it sleeps until the timer fires");
        assert!(!target.backend().is_armed, "who is awake looks by itself");
        assert!(counted.asleep > Nanos::ZERO, "{counted:?}");
        assert!(counted.spin_wasted >= window, "it spins for so long before it sleeps: {counted:?}");
        assert!(counted.spin_wasted + counted.spin_found + counted.asleep <= took, "{took:?} {counted:?}");
        assert!(window > Nanos::ZERO || counted.spin_wasted + counted.spin_found == Nanos::ZERO, "{counted:?}");
    }
}

#[test]
fn a_spin_that_goes_on_is_counted_while_it_lasts_and_once() {
    let begin = Instant::now();
    let never_sleeps = options(MonitorChoice::Auto, Nanos::MAX);
    let (handle, thread) = spawn(never_sleeps, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
    let long = Nanos::from_millis(50);
    while handle.counters().read().spin_wasted < long {
        assert!(begin.elapsed() < PATIENCE, "{:?}", handle.counters().read());
        std::thread::yield_now();
    }
    handle.send(EventLoop::<Bell>::stop);
    thread.join().unwrap();
    let (counted, took) = (handle.counters().read(), Nanos::from(begin.elapsed()));
    assert_eq!((counted.hits, counted.blocks), (1, 0), "that it is to stop is found by looking");
    assert!(counted.spin_wasted + counted.spin_found <= took, "{took:?} {counted:?}");
}

#[test]
fn a_spin_has_wasted_what_is_counted_every_10_ms_and_found_its_end_in_the_rest() {
    let step = Nanos::from_millis(10);
    for (length, wastes) in [(2, false), (25, true)] {
        let is_counted_so = || {
            let never_sleeps = options(MonitorChoice::Auto, Nanos::MAX);
            let mut target = EventLoop::new(never_sleeps, |_ring| Echo::default()).unwrap();
            let (mut bell, ..) = bell();
            bell.act = Some(Box::new(move |turn| turn.set_timer(turn.now() + Nanos::from_millis(length))));
            target.attach(bell).map_err(|(_, e)| e).unwrap();
            while target.counters().waits.get() == 0 {
                target.turn().unwrap();
            }
            let counted = target.counters().read();
            assert_eq!((counted.hits, counted.blocks), (1, 0), "the timer ends it");
            let wasted = counted.spin_wasted;
            let is_so = if wastes { wasted >= step } else { wasted == Nanos::ZERO };
            is_so && counted.spin_found > Nanos::ZERO && counted.spin_found < step
        };
        // The machine may take the thread's processor for as long as it likes.
        assert!((0..100).any(|_| is_counted_so()), "{length} ms");
    }
}

#[test]
fn a_window_that_is_over_has_seen_many_sources_once_and_few_of_them_some_times() {
    let idle_after = Nanos::from_millis(3_600_000);
    for (sources, most) in [(1, 8), (64, 1)] {
        let options = LoopOptions { idle_after, ..options(MonitorChoice::Ppoll, Nanos(1)) };
        let mut target = EventLoop::new(options, |_ring| Echo::default()).unwrap();
        let all: Vec<_> = (0..sources).map(|_| bell()).collect();
        let outsides: Vec<_> = all.iter().map(|(_, outside, _)| Arc::clone(outside)).collect();
        // There before they come, so that they come on the list.
        outsides.iter().for_each(|outside| outside.ring());
        let ids: Vec<_> = all.into_iter().map(|(bell, ..)| target.attach(bell).map_err(|(_, e)| e).unwrap()).collect();
        while ids.iter().any(|id| target.source(*id).unwrap().times.is_empty()) {
            target.turn().unwrap();
        }
        // Until a wait comes to its end, where everything is armed.
        let mut is_over = false;
        while !is_over {
            let last = outsides[0].looks.load(Ordering::Relaxed);
            let (outside, (tell, told)) = (Arc::clone(&outsides[0]), channel());
            let ends = move || {
                outside.ring();
                tell.send(()).unwrap();
            };
            target.source(ids[0]).unwrap().when_armed = Some(Box::new(ends));
            target.turn().unwrap();
            is_over = told.try_recv().is_ok();
            let looks = outsides[0].looks.load(Ordering::Relaxed) - last;
            // One before it, and one when it is armed.
            assert!(looks <= 2 + most, "{looks} looks at each of {sources}");
            assert!(!is_over || looks == 2 + most, "{looks} looks at each of {sources}");
        }
    }
}
