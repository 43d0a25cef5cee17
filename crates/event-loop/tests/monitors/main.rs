//! What a loop promises, whichever monitor it sleeps in and whether it spins or not.

mod bell;
mod lists;
#[path = "../refuse/mod.rs"]
mod refuse;
mod replayed;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use egret_event_loop::ring::{Ring, RingError};
use egret_event_loop::{ClockReads, EventLoop, LoopHandle, LoopOptions, MonitorChoice, Phase, Source, SourceId, spawn};
use egret_polling::{EventKind, Nanos};
use rustix::event::{EventfdFlags, eventfd};

use bell::{
    Bell, Echo, Heard, PATIENCE, Told, Until, Weighing, bell, every_turn, fixed, hear_work, monitors, on_every_loop,
    options,
};
use refuse::refuse;

#[test]
fn work_that_comes_while_the_loop_sleeps_or_spins_is_dispatched() {
    on_every_loop(|handle| {
        let (bell, outside, hear) = bell();
        handle.attach(bell).unwrap();
        for _ in 0..200 {
            outside.ring();
            hear_work(&hear, 1);
        }
    });
}

#[test]
fn work_that_was_there_before_the_source_came_is_dispatched() {
    on_every_loop(|handle| {
        let (bell, outside, hear) = bell();
        outside.ring();
        handle.attach(bell).unwrap();
        hear_work(&hear, 1);
    });
}

#[test]
fn nothing_is_lost_between_the_last_look_and_the_block() {
    // Every ring lands at another moment of the loop's turn: some just before it sleeps.
    on_every_loop(|handle| {
        let (bell, outside, hear) = bell();
        handle.attach(bell).unwrap();
        for round in 0..2_000_u32 {
            outside.ring();
            for _ in 0..round % 97 {
                std::hint::spin_loop();
            }
            if round % 3 == 0 {
                outside.ring();
                hear_work(&hear, 2);
            } else {
                hear_work(&hear, 1);
            }
        }
    });
}

#[test]
fn what_a_source_pushed_is_submitted_and_completed_before_it_is_notified() {
    on_every_loop(|handle| {
        let (bell, outside, hear) = bell();
        let id = handle.attach(bell).unwrap();
        outside.ring();
        hear_work(&hear, 1);
        assert_eq!(hear.recv_timeout(PATIENCE).unwrap(), Heard::Notified);
        let drained = handle.call(move |target| target.source(id).unwrap().is_drained()).unwrap();
        assert!(drained);
    });
}

#[test]
fn what_engines_take_up_again_is_submitted_before_the_loop_sleeps() {
    on_every_loop(|handle| {
        let (mut bell, outside, hear) = bell();
        bell.halves = 1;
        handle.attach(bell).unwrap();
        // It has been left to the monitor, and is dispatched once for each ring.
        handle.call(|_| ()).unwrap();
        outside.ring();
        hear_work(&hear, 1);
        // When it was dispatched, and when it has ended.
        for _ in 0..2 {
            assert_eq!(hear.recv_timeout(PATIENCE), Ok(Heard::Notified));
        }
    });
}

#[test]
fn a_completion_that_leaves_more_to_do_has_its_source_dispatched() {
    on_every_loop(|handle| {
        let (mut bell, outside, hear) = bell();
        bell.unfinished = 1;
        let id = handle.attach(bell).unwrap();
        outside.ring();
        hear_work(&hear, 1);
        while hear.recv_timeout(PATIENCE).unwrap() != (Heard::Dispatched { work: 0 }) {}
        handle.detach(id).wait().unwrap();
    });
}

#[test]
fn a_source_that_is_woken_is_dispatched() {
    on_every_loop(|handle| {
        let (bell, _outside, hear) = bell();
        let id = handle.attach(bell).unwrap();
        // The first is by being attached.
        for _ in 0..2 {
            while hear.recv_timeout(PATIENCE).unwrap() != (Heard::Dispatched { work: 0 }) {}
            handle.send(move |target| target.wake(id));
        }
        while hear.recv_timeout(PATIENCE).unwrap() != (Heard::Dispatched { work: 0 }) {}
        handle.detach(id).wait().unwrap();
        handle.send(move |target| target.wake(id));
        handle.call(|_| ()).unwrap();
    });
}

#[test]
fn a_loop_that_has_ended_tells_who_asks_it_and_who_had_asked_it() {
    let auto = options(MonitorChoice::Auto, Nanos::ZERO);
    let (handle, io) = spawn(auto, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
    let ((begin, begun), (end, ends), (answer, answered), (tell, told)) = (channel(), channel(), channel(), channel());
    handle.send(move |target: &mut EventLoop<Bell>| {
        target.stop();
        begin.send(()).unwrap();
        ends.recv().unwrap();
    });
    // What comes during its last turn is for the next.
    begun.recv().unwrap();
    handle.send(move |_| answer.send(()).unwrap());
    end.send(()).unwrap();
    io.join().unwrap();
    assert_eq!(answered.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected));
    thread::spawn(move || tell.send(handle.call(|_| ()).is_err()));
    assert_eq!(told.recv_timeout(PATIENCE), Ok(true));
}

/// Tells which thread drops it.
struct Dropped(Sender<ThreadId>);

impl Drop for Dropped {
    fn drop(&mut self) {
        let _ = self.0.send(thread::current().id());
    }
}

#[test]
fn a_source_that_is_refused_comes_back_and_is_dropped_on_no_loop() {
    on_every_loop(|handle| {
        let ((mut refused, ..), (tell, told)) = (bell(), channel());
        let last = Dropped(tell);
        refused.refuses = true;
        refused.when_armed = Some(Box::new(move || drop(last)));
        assert!(handle.attach(refused).is_err());
        assert_eq!(told.recv(), Ok(thread::current().id()));
    });
}

#[test]
fn a_source_comes_back_by_value_and_is_heard_no_more() {
    on_every_loop(|handle| {
        let (bell, outside, hear) = bell();
        let id = handle.attach(bell).unwrap();
        outside.ring();
        let back = handle.detach(id).wait().expect("the source comes back");
        let seen = back.seen;
        while hear.try_recv().is_ok() {}
        outside.ring();
        handle.call(|_| ()).unwrap();
        assert!(hear.try_recv().is_err());
        assert!(handle.detach(id).wait().is_none(), "it is gone");
        // Moved, not remade: on the next loop it goes on where it was.
        assert!(seen <= 1);
        handle.attach(back).unwrap();
        hear_work(&hear, 2 - seen);
    });
}

#[test]
fn a_source_that_was_quiesced_is_drained_where_it_is_and_goes_on_with_what_came_meanwhile() {
    on_every_loop(|handle| {
        let (bell, outside, hear) = bell();
        let id = handle.attach(bell).unwrap();
        outside.ring();
        let (tell, quiet) = channel();
        handle.send(move |target| {
            target.quiesce(id, move |target| {
                let bell = target.source(id).expect("it is still here");
                tell.send((bell.seen, bell.in_flight)).unwrap();
            });
        });
        let (seen, in_flight) = quiet.recv_timeout(PATIENCE).expect("it is drained");
        assert_eq!(in_flight, 0);
        outside.ring();
        assert_eq!(handle.call(move |target| target.source(id).map(|bell| bell.seen)).unwrap(), Some(seen));
        assert!(handle.call(move |target| target.resume(id)).unwrap());
        hear_work(&hear, 2);
        outside.ring();
        hear_work(&hear, 1);
        handle.detach(id).wait().unwrap();
        assert!(!handle.call(move |target| target.resume(id)).unwrap(), "it is gone");
    });
}

#[test]
fn an_engine_that_comes_when_a_source_is_drained_is_heard() {
    on_every_loop(|handle| {
        let (mut first, outside, _hear) = bell();
        let engine = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (tell, heard) = channel();
        let (came, has_come) = channel();
        let brings = Arc::new(Mutex::new(Some((engine.try_clone().unwrap(), tell))));
        let (name, named) = channel::<SourceId>();
        let on_loop = handle.clone();
        first.act = Some(Box::new(move |_turn| {
            let Ok(id) = named.try_recv() else { return };
            let (brings, came) = (Arc::clone(&brings), came.clone());
            // What it has just pushed is in flight, so that it is drained at the end of a turn, and not at once.
            on_loop.send(move |target| {
                target.quiesce(id, move |target| {
                    let (mut second, ..) = bell();
                    second.brings = brings.lock().unwrap().take();
                    target.attach(second).map_err(|(_, e)| e).unwrap();
                    came.send(()).unwrap();
                });
            });
        }));
        let id = handle.attach(first).unwrap();
        name.send(id).unwrap();
        outside.ring();
        has_come.recv_timeout(PATIENCE).expect("it is drained");
        for _ in 0..2 {
            rustix::io::write(&engine, &1u64.to_ne_bytes()).unwrap();
            heard.recv_timeout(PATIENCE).expect("the loop watches the engine");
            // A command may have brought in others, and this one is not among those that are gone.
            handle.call(|_| ()).unwrap();
        }
    });
}

#[test]
fn an_engine_that_leaves_with_a_completion_is_not_watched_any_more_when_it_is_closed() {
    on_every_loop(|handle| {
        let (mut only, outside, _hear) = bell();
        let (tell, _heard) = channel();
        let (leaves, closed) = channel();
        only.brings = Some((eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap(), tell));
        only.leaves = Some(leaves);
        let _id = handle.attach(only).unwrap();
        outside.ring();
        assert!(closed.recv_timeout(PATIENCE).expect("it is closed"), "its number may be another's by now");
    });
}

#[test]
fn an_engine_that_has_left_is_heard_no_more_though_it_is_still_open() {
    on_every_loop(|handle| {
        let engine = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let ((tell, _heard), theirs) = (channel(), engine.try_clone().unwrap());
        let (first, outside, hear) = bell();
        let id = handle.attach(first).unwrap();
        handle.call(move |target| target.backend().brought_in.push((theirs, tell))).unwrap();
        let _still_open = handle.call(|target| target.backend().brought_in.pop()).unwrap();
        // Whatever an engine announces ends what is kept.
        handle.call(|target| target.backend().keeps = Some(Until::Announced)).unwrap();
        outside.ring();
        hear_work(&hear, 1);
        rustix::io::write(&engine, &1u64.to_ne_bytes()).unwrap();
        // Of one that has had no work yet only the monitor tells, which tells of the engine first.
        let (second, outside, hear) = bell();
        handle.attach(second).unwrap();
        handle.call(|_| ()).unwrap();
        outside.ring();
        hear_work(&hear, 1);
        let still_kept = handle.call(move |target| target.source(id).unwrap().in_flight).unwrap();
        assert_eq!(still_kept, 1);
        handle.call(|target| target.backend().release()).unwrap();
    });
}

#[test]
fn a_loop_answers_unless_it_is_stuck() {
    let auto = options(MonitorChoice::Auto, Nanos::ZERO);
    let (handle, thread) = spawn::<Bell>(auto, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
    assert!(handle.answers_within(PATIENCE));
    let (end, ends) = channel::<()>();
    handle.send(move |_| ends.recv().unwrap());
    assert!(!handle.answers_within(std::time::Duration::from_millis(1)));
    end.send(()).unwrap();
    assert!(handle.answers_within(PATIENCE));
    handle.send(EventLoop::stop);
    thread.join().unwrap();
}

#[test]
fn an_engine_that_cannot_be_watched_keeps_no_other_from_being_heard() {
    let epoll = options(MonitorChoice::Epoll, Nanos::ZERO);
    let (handle, thread) = spawn::<Bell>(epoll, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
    let engines = [(); 2].map(|()| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
    let ((tell, heard), [first, last]) = (channel(), engines.each_ref().map(|engine| engine.try_clone().unwrap()));
    // epoll takes none of these.
    let null = File::open("/dev/null").unwrap();
    let all = [first, null.into(), last].map(|engine| (engine, tell.clone()));
    handle.call(|target| target.backend().brought_in.extend(all)).unwrap();
    for _ in 0..2 {
        for engine in &engines {
            rustix::io::write(engine, &1u64.to_ne_bytes()).unwrap();
            heard.recv_timeout(PATIENCE).expect("the loop watches the engine");
        }
        handle.call(|_| ()).unwrap();
    }
    handle.send(EventLoop::stop);
    thread.join().unwrap();
}

#[test]
fn an_engine_is_heard_that_has_the_number_of_one_which_left_when_another_could_not_be_watched() {
    let epoll = options(MonitorChoice::Epoll, Nanos::ZERO);
    let (handle, thread) = spawn::<Bell>(epoll, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
    let [old, new] = [(); 2].map(|()| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
    let (tell, heard) = channel();
    // Those of the loop, one after the other.
    let replace = |engine: OwnedFd| {
        let with = vec![(engine, tell.clone())];
        handle.call(|target| std::mem::replace(&mut target.backend().brought_in, with)).unwrap().pop()
    };
    replace(old);
    let (mut old, _) = replace(File::open("/dev/null").unwrap().into()).expect("it leaves");
    // The loop has looked which there are.
    handle.call(|_| ()).unwrap();
    rustix::io::dup2(&new, &mut old).unwrap();
    replace(old);
    rustix::io::write(&new, &1u64.to_ne_bytes()).unwrap();
    heard.recv_timeout(PATIENCE).expect("the loop watches the engine");
    handle.send(EventLoop::stop);
    thread.join().unwrap();
}

#[test]
fn a_source_that_is_detached_when_another_is_drained_leaves_at_once() {
    on_every_loop(|handle| {
        let [first, second] = [(); 2].map(|()| handle.attach(bell().0).unwrap());
        let (to, left) = channel();
        handle.send(move |target| {
            target.quiesce(first, move |target| target.detach(second, move |bell| drop(to.send(bell))));
        });
        left.recv_timeout(PATIENCE).expect("nothing of it was in flight");
    });
}

#[test]
fn a_source_that_is_removed_while_it_is_ready_leaves_nothing_behind_for_its_successor() {
    on_every_loop(|handle| {
        for _ in 0..50 {
            let (first, outside, _hear) = bell();
            let id = handle.attach(first).unwrap();
            // Its descriptor is ready at the moment it is removed, and its slot is taken at once.
            rustix::io::write(&outside.fd, &1u64.to_ne_bytes()).unwrap();
            outside.ring();
            let leaving = handle.detach(id);
            let (second, their_outside, their_hear) = bell();
            let second = handle.attach(second).unwrap();
            leaving.wait().unwrap();
            their_outside.ring();
            hear_work(&their_hear, 1);
            handle.detach(second).wait().unwrap();
        }
    });
}

#[test]
fn sources_are_added_and_removed_from_inside_a_dispatch() {
    on_every_loop(|handle| {
        let (mut parent, outside, hear) = bell();
        let (added, hear_added) = channel();
        let (to, gone) = channel();
        let on_loop = handle.clone();
        parent.act = Some(Box::new(move |_turn| {
            let (added, to) = (added.clone(), to.clone());
            on_loop.send(move |target| {
                let (child, child_outside, child_hear) = bell();
                let id = target.attach(child).map_err(|(_, e)| e).unwrap();
                child_outside.ring();
                target.detach(id, move |child| drop(to.send(child)));
                // Nobody may be listening any more: the parent may be dispatched again.
                let _ = added.send((child_outside, child_hear));
            });
        }));
        handle.attach(parent).unwrap();
        outside.ring();
        hear_work(&hear, 1);
        hear_added.recv_timeout(PATIENCE).expect("the child was added");
        gone.recv_timeout(PATIENCE).expect("and removed");
    });
}

#[test]
fn a_source_may_remove_itself_from_inside_its_dispatch() {
    on_every_loop(|handle| {
        let (mut bell, outside, _hear) = bell();
        let (to, gone) = channel();
        let (name, named) = channel::<SourceId>();
        let on_loop = handle.clone();
        bell.act = Some(Box::new(move |_turn| {
            if let Ok(id) = named.try_recv() {
                let to = to.clone();
                on_loop.send(move |target| target.detach(id, move |bell| drop(to.send(bell))));
            }
        }));
        let id = handle.attach(bell).unwrap();
        name.send(id).unwrap();
        outside.ring();
        gone.recv_timeout(PATIENCE).expect("it left");
    });
}

#[test]
fn a_timer_fires_once_not_before_its_time_and_a_new_one_replaces_it() {
    on_every_loop(|handle| {
        let (mut bell, outside, hear) = bell();
        let (fired, hear_fired) = channel();
        let mut round = 0;
        let mut due = Nanos::MAX;
        bell.act = Some(Box::new(move |turn| {
            round += 1;
            match round {
                // Attaching dispatches once by itself.
                1 => turn.set_timer(turn.now() + Nanos::from_millis(60_000)),
                2 => {
                    due = turn.now() + Nanos::from_millis(2);
                    turn.set_timer(due);
                }
                _ => drop(fired.send((turn.now(), due))),
            }
        }));
        handle.attach(bell).unwrap();
        hear.recv_timeout(PATIENCE).unwrap();
        // The turn is over: it has been left to the monitor, and is dispatched once for each ring.
        handle.call(|_| ()).unwrap();
        outside.ring();
        let (now, due) = hear_fired.recv_timeout(PATIENCE).expect("the timer fires");
        assert!(now >= due);
    });
}

#[test]
fn a_wait_ends_when_the_first_of_timers_and_engines_is_due() {
    let [soon, late] = [2, 3_600_000].map(Nanos::from_millis);
    on_every_loop(|handle| {
        for (timer, engine) in [(None, soon), (Some(late), soon), (Some(soon), late)] {
            let (mut bell, outside, hear) = bell();
            if let Some(after) = timer {
                bell.act = Some(Box::new(move |turn| turn.set_timer(turn.now() + after)));
            }
            let id = handle.attach(bell).unwrap();
            handle.call(move |target| target.backend().keeps = Some(Until::After(engine))).unwrap();
            outside.ring();
            hear_work(&hear, 1);
            // When it has been dispatched, and when it has ended or the timer has fired.
            let then = if engine == soon { Heard::Notified } else { Heard::Dispatched { work: 0 } };
            for expected in [Heard::Notified, then] {
                while hear.recv_timeout(PATIENCE).expect("the wait ends") != expected {}
            }
            handle.call(|target| target.backend().release()).unwrap();
            handle.detach(id).wait().unwrap();
        }
    });
}

#[test]
fn what_is_due_is_done_without_a_wait() {
    let mut target = EventLoop::new(options(MonitorChoice::Auto, Nanos::ZERO), |_ring| Echo::default()).unwrap();
    let (mut bell, _outside, hear) = bell();
    bell.act = Some(Box::new(|turn| turn.set_timer(turn.now())));
    target.attach(bell).map_err(|(_, e)| e).unwrap();
    for _ in 0..3 {
        target.turn().unwrap();
        assert!(hear.try_iter().any(|heard| heard == Heard::Dispatched { work: 0 }));
    }
    assert_eq!(target.counters().waits.get(), 0);
}

#[test]
fn what_engines_announce_ends_a_wait() {
    on_every_loop(|handle| {
        let (bell, outside, hear) = bell();
        handle.attach(bell).unwrap();
        let engine = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let brings = (engine.try_clone().unwrap(), channel().0);
        let keep = move |target: &mut EventLoop<Bell>| {
            let engines = target.backend();
            engines.keeps = Some(Until::Announced);
            engines.brought_in.push(brings);
        };
        handle.call(keep).unwrap();
        outside.ring();
        hear_work(&hear, 1);
        // When it has been dispatched, and when it has ended.
        assert_eq!(hear.recv_timeout(PATIENCE), Ok(Heard::Notified));
        rustix::io::write(&engine, &1u64.to_ne_bytes()).unwrap();
        assert_eq!(hear.recv_timeout(PATIENCE), Ok(Heard::Notified));
    });
}

#[test]
fn what_engines_end_when_they_are_asked_to_announce_it_is_found_before_the_loop_sleeps() {
    let auto = options(MonitorChoice::Auto, Nanos::ZERO);
    let (handle, thread) = spawn(auto, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
    let (bell, outside, hear) = bell();
    handle.attach(bell).unwrap();
    handle.call(|target| target.backend().keeps = Some(Until::Armed)).unwrap();
    outside.ring();
    hear_work(&hear, 1);
    // When it was dispatched, and when it has ended.
    for _ in 0..2 {
        assert_eq!(hear.recv_timeout(PATIENCE), Ok(Heard::Notified));
    }
    handle.send(EventLoop::stop);
    thread.join().unwrap();
}

#[test]
fn commands_from_other_threads_are_all_obeyed_in_order() {
    on_every_loop(|handle| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let handle = handle.clone();
                std::thread::spawn(move || {
                    let (count, counted) = channel();
                    for i in 0..500 {
                        let count = count.clone();
                        handle.send(move |_| count.send(i).unwrap());
                        if i % 50 == 0 {
                            handle.call(|_| ()).unwrap();
                        }
                    }
                    drop(count);
                    assert!(counted.iter().eq(0..500));
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn handles_are_equal_that_speak_to_the_same_loop() {
    let options = || options(MonitorChoice::Auto, Nanos::ZERO);
    let [one, other] = [(); 2].map(|()| EventLoop::<Bell>::new(options(), |_ring| Echo::default()).unwrap());
    let handle = LoopHandle::new(&one);
    assert!(handle == handle.clone() && handle == LoopHandle::new(&one) && handle != LoopHandle::new(&other));
}

#[test]
fn a_command_that_comes_when_the_loop_has_looked_for_the_last_time_before_it_sleeps_is_obeyed() {
    let options =
        LoopOptions { idle_after: Nanos::from_millis(3_600_000), ..options(MonitorChoice::Auto, Nanos::ZERO) };
    let (handle, thread) = spawn::<Bell>(options, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
    let (mut bell, outside, _hear) = bell();
    let (tell, told) = channel();
    let theirs = handle.clone();
    bell.when_armed = Some(Box::new(move || theirs.send(move |_| tell.send(()).unwrap())));
    // There before it comes, so that it is armed when there is nothing else to do.
    outside.ring();
    handle.attach(bell).unwrap();
    told.recv_timeout(PATIENCE).expect("it is obeyed");
    handle.send(EventLoop::stop);
    thread.join().unwrap();
}

#[test]
fn an_idle_source_is_not_starved_by_one_that_always_has_work() {
    on_every_loop(|handle| {
        let (mut busy, busy_outside, _hear_busy) = bell();
        // It makes new work for itself each time: the loop never finds nothing to do.
        let again = Arc::clone(&busy_outside);
        busy.act = Some(Box::new(move |_| again.ring()));
        let (idle, outside, hear) = bell();
        let busy = handle.attach(busy).unwrap();
        busy_outside.ring();
        // That it is watched the loop has to say without a wait.
        handle.attach(idle).unwrap();
        // Idle long enough to be left to the monitor.
        handle.call(|target| target.set_idle_after(Nanos::ZERO)).unwrap();
        for _ in 0..20 {
            outside.ring();
            hear_work(&hear, 1);
        }
        handle.call(move |target| target.source(busy).unwrap().act = None).unwrap();
    });
}

#[test]
fn where_only_the_monitor_tells_of_idle_sources_it_is_asked_in_a_wait_and_50_us_after_it_was_asked_last() {
    for monitor in [MonitorChoice::Epoll, MonitorChoice::Ppoll] {
        let options = LoopOptions { idle_after: Nanos::from_millis(3_600_000), ..options(monitor, Nanos::ZERO) };
        let mut target = EventLoop::new(options, |_ring| Echo::default()).unwrap();
        let (tell, told) = channel();
        let [(busy, work), (idle, outside)] = [(); 2].map(|()| {
            let (mut bell, outside, _hear) = bell();
            let tell = tell.clone();
            bell.act = Some(Box::new(move |turn| tell.send(turn.now()).unwrap()));
            (bell, outside)
        });
        // There before it comes, so that it comes on the list.
        work.add();
        for bell in [busy, idle] {
            target.attach(bell).map_err(|(_, e)| e).unwrap();
        }
        let mut asked = Nanos::ZERO;
        for turn in 0..10_000 {
            // Now and then there is nothing but what the monitor tells of.
            if turn % 8 > 0 {
                work.add();
            }
            rustix::io::write(&outside.fd, &1u64.to_ne_bytes()).unwrap();
            let before = target.counters().read();
            target.turn().unwrap();
            let after = target.counters().read();
            let now = told.try_iter().last().expect("one of them is dispatched");
            let is_asked = after.waits > before.waits || now - asked >= Nanos::from_micros(50);
            assert_eq!(after.kicks - before.kicks, u64::from(is_asked), "{monitor}, {:?} later", now - asked);
            if is_asked {
                asked = now;
            }
        }
    }
}

#[test]
fn a_spin_goes_on_when_nothing_comes_of_what_the_monitor_tells() {
    for monitor in monitors() {
        let never_sleeps = options(monitor, Nanos::MAX);
        let (handle, thread) = spawn::<Bell>(never_sleeps, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
        let engine = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (tell, heard) = channel();
        let brings = (engine.try_clone().unwrap(), tell);
        handle.call(|target| target.backend().brought_in.push(brings)).unwrap();
        let before = handle.counters().read();
        rustix::io::write(&engine, &1u64.to_ne_bytes()).unwrap();
        heard.recv_timeout(PATIENCE).expect("it is watched from when the spin begins");
        let begin = std::time::Instant::now();
        while handle.counters().read().spin_wasted < before.spin_wasted + Nanos::from_millis(20) {
            assert!(begin.elapsed() < PATIENCE, "{:?}", handle.counters().read());
            thread::yield_now();
        }
        assert_eq!(handle.counters().read().waits, before.waits, "{monitor}");
        handle.send(EventLoop::stop);
        thread.join().unwrap();
    }
}

#[test]
fn a_source_that_never_had_work_is_not_looked_at() {
    on_every_loop(|handle| {
        handle.call(|target| target.set_idle_after(Nanos::from_millis(3_600_000))).unwrap();
        let (idle, idle_outside, idle_hear) = bell();
        let (busy, outside, hear) = bell();
        handle.attach(idle).unwrap();
        handle.attach(busy).unwrap();
        // Both have been dispatched once, because something might have been there.
        outside.ring();
        hear_work(&hear, 1);
        while idle_hear.try_recv().is_err() {}
        handle.call(|_| ()).unwrap();
        let looks = || idle_outside.looks.load(Ordering::Relaxed);
        let before = looks();
        for _ in 0..100 {
            outside.ring();
            hear_work(&hear, 1);
        }
        assert_eq!(looks(), before);
    });
}

#[test]
fn a_hundred_sources_are_all_heard() {
    on_every_loop(|handle| {
        let bells: Vec<_> = (0..100)
            .map(|_| {
                let (bell, outside, hear) = bell();
                handle.attach(bell).unwrap();
                (outside, hear)
            })
            .collect();
        for _ in 0..3 {
            bells.iter().for_each(|(outside, _)| outside.ring());
            bells.iter().for_each(|(_, hear)| hear_work(hear, 1));
        }
    });
}

#[test]
fn requests_that_end_together_have_one_time_or_each_its_own_as_the_loop_reads_the_clock() {
    const MANY: usize = 64;
    on_every_loop(|handle| {
        for (round, reads) in [ClockReads::ByPhase, ClockReads::ByRequest, ClockReads::ByPhase].into_iter().enumerate()
        {
            let (mut bell, outside, hear) = bell();
            let (tell, told) = channel();
            bell.act = Some(Box::new(move |turn| tell.send(turn.clock_reads()).unwrap()));
            let id = handle.attach(bell).unwrap();
            // They are there at once, so that one dispatch takes them all.
            let ring = move |target: &mut EventLoop<Bell>| {
                if round > 0 {
                    target.set_clock_reads(reads);
                }
                (0..MANY).for_each(|_| outside.ring());
            };
            handle.call(ring).unwrap();
            hear_work(&hear, MANY as u64);
            while hear.recv_timeout(PATIENCE).expect("the turn has an end") != Heard::Notified {}
            assert_eq!(handle.call(|target| target.clock_reads()).unwrap(), reads);
            let times = handle.call(move |target| target.source(id).unwrap().times.clone()).unwrap();
            assert_eq!((times.len(), told.try_iter().last()), (MANY, Some(reads)));
            assert!(times.is_sorted());
            assert_eq!(times[0] == times[MANY - 1], reads == ClockReads::ByPhase, "{reads:?}: {times:?}");
            handle.detach(id).wait().unwrap();
        }
    });
}

#[test]
fn a_policy_that_weighs_blocks_is_told_what_they_cost_and_for_others_nobody_measures() {
    let echo = |_ring| Echo::default();
    let (tell, told) = channel();
    let weighing =
        LoopOptions { policy: Box::new(Weighing(tell.clone())), ..options(MonitorChoice::Auto, Nanos::ZERO) };
    let (handle, thread) = spawn::<Bell>(weighing, echo, |e| panic!("{e}")).unwrap();
    told.recv_timeout(PATIENCE).expect("a loop that begins with it");
    handle.send(EventLoop::stop);
    thread.join().unwrap();

    let (handle, thread) = spawn::<Bell>(options(MonitorChoice::Auto, Nanos::ZERO), echo, |e| panic!("{e}")).unwrap();
    assert_eq!(handle.call(|target| target.block_cost()).unwrap(), None);
    handle.set_policy(fixed(Nanos(1)), Nanos(1)).unwrap();
    assert_eq!(handle.call(|target| target.block_cost()).unwrap(), None);
    handle.set_policy(Box::new(Weighing(tell)), Nanos::ZERO).unwrap();
    told.recv_timeout(PATIENCE).expect("a loop that is given it later");
    handle.send(EventLoop::stop);
    thread.join().unwrap();
}

#[test]
fn a_policy_of_qemu_sees_turns_without_a_wait_too_and_engines_from_the_first_of_them() {
    let (tell, told) = channel();
    let options = LoopOptions { policy: every_turn(tell), ..options(MonitorChoice::Auto, Nanos::ZERO) };
    let (handle, thread) = spawn::<Bell>(options, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
    let (bell, _outside, hear) = bell();
    let id = handle.attach(bell).unwrap();
    // What is woken within a turn is there before the next wait.
    handle.send(move |target| target.wake(id));
    let mut waits = std::iter::from_fn(|| told.recv_timeout(PATIENCE).ok());
    let is_none = |turn: &Told| {
        let engines = turn.ready(EventKind::Completion);
        assert_eq!(engines.len(), 1, "nothing is in flight, and engines are looked at all the same");
        turn.length == Nanos::ZERO
    };
    assert!(waits.any(|wait| is_none(&wait)), "a turn without a wait");
    drop(hear);
    handle.send(EventLoop::stop);
    thread.join().unwrap();
}

/// A loop whose policy tells of every turn, and looks at everything in each.
fn told_of_every_turn() -> (EventLoop<Bell>, Receiver<Told>) {
    let (tell, told) = channel();
    let idle_after = Nanos::from_millis(3_600_000);
    let options = LoopOptions { policy: every_turn(tell), idle_after, ..options(MonitorChoice::Auto, Nanos::ZERO) };
    (EventLoop::new(options, |_ring| Echo::default()).unwrap(), told)
}

#[test]
fn a_policy_is_told_how_many_requests_are_in_flight_and_whether_the_loop_slept() {
    let (mut target, told) = told_of_every_turn();
    let turn = |target: &mut EventLoop<Bell>| {
        target.turn().unwrap();
        told.try_iter().last().expect("a turn")
    };
    let (bell, outside, _hear) = bell();
    // There before it comes, so that it comes on the list.
    outside.add();
    let id = target.attach(bell).map_err(|(_, e)| e).unwrap();
    assert_eq!(turn(&mut target).length, Nanos::ZERO, "what comes is dispatched without a wait");
    let push = |target: &mut EventLoop<Bell>| {
        outside.add();
        target.backend().keeps = Some(Until::After(Nanos::from_millis(5)));
        turn(target);
    };
    // The machine may take the thread's processor for so long that there is nothing left to wait for.
    let slept = loop {
        push(&mut target);
        let slept = turn(&mut target);
        if slept.length > Nanos::ZERO {
            break slept;
        }
    };
    assert_eq!((slept.in_flight, slept.blocked), (1, true));

    let (theirs, (tell_slipped, slipped)) = (Arc::clone(&outside), channel());
    let slips = move || {
        theirs.add();
        tell_slipped.send(()).unwrap();
    };
    target.source(id).unwrap().when_armed = Some(Box::new(slips));
    push(&mut target);
    let awake = loop {
        let awake = turn(&mut target);
        if slipped.try_recv().is_ok() {
            break awake;
        }
    };
    assert!(awake.length > Nanos::ZERO && !awake.blocked);
    assert_eq!([EventKind::Queue, EventKind::Completion].map(|kind| awake.ready(kind)), [[true], [false]]);
}

#[test]
fn a_policy_is_told_that_engines_have_ended_what_they_announce_in_a_wait_or_before_it() {
    let (mut target, told) = told_of_every_turn();
    let engine = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let ((tell_heard, _heard), (mut bell, outside, _hear)) = (channel(), bell());
    bell.brings = Some((engine.try_clone().unwrap(), tell_heard));
    outside.add();
    target.attach(bell).map_err(|(_, e)| e).unwrap();
    // After a command it looks which engines there are.
    LoopHandle::new(&target).send(|_| ());
    // The kernel is told to watch one in the first wait after that; what a ring has by then is seen without one.
    for waits in [true, target.monitor_name() != MonitorChoice::IoUring] {
        target.backend().keeps = Some(Until::Announced);
        target.turn().unwrap();
        rustix::io::write(&engine, &1u64.to_ne_bytes()).unwrap();
        target.turn().unwrap();
        let ended = told.try_iter().last().expect("a turn");
        assert_eq!((ended.ready(EventKind::Completion), ended.length > Nanos::ZERO), (vec![true], waits));
        outside.add();
    }
}

#[test]
fn what_the_loop_waited_for_is_recorded_and_a_policy_is_changed_without_a_pause() {
    on_every_loop(|handle| {
        let (bell, outside, hear) = bell();
        handle.attach(bell).unwrap();
        handle.calibrate().unwrap();
        handle.call(|target| target.record_waits(64)).unwrap();
        for window in [0, 1_000, 0, 50_000] {
            let set = move |target: &mut EventLoop<Bell>| {
                target.set_policy(fixed(Nanos(window)), Nanos(window));
                target.counters().waits.get()
            };
            let before = handle.call(set).unwrap();
            outside.ring();
            hear_work(&hear, 1);
            // The loop waits as soon as it is left alone for a moment.
            while handle.call(|target| target.counters().waits.get()).unwrap() == before {}
        }
        let take = |target: &mut EventLoop<Bell>| (target.take_recording("a test".into()), target.block_cost());
        let (trace, cost) = handle.call(take).unwrap();
        let trace = trace.expect("it was recording");
        assert!(!trace.waits.is_empty());
        assert_eq!(Some(trace.block), cost);
        assert!(handle.call(|target| target.take_recording(String::new())).unwrap().is_none());
    });
}

#[test]
fn a_loop_that_stands_still_shows_where_and_one_that_waits_that_it_does() {
    on_every_loop(|handle| {
        let counters = Arc::clone(handle.counters());
        let (inside, entered) = channel();
        let (release, held) = channel::<()>();
        let (mut bell, outside, hear) = bell();
        bell.act = Some(Box::new(move |_| {
            let _ = (inside.send(()), held.recv());
        }));
        handle.attach(bell).unwrap();
        entered.recv_timeout(PATIENCE).expect("it is dispatched");
        let turns = counters.read().turns;
        // It has entered, and nobody lets it out.
        assert_eq!((counters.phase(), counters.read().turns), (Phase::Dispatching, turns));
        drop(release);
        outside.ring();
        hear_work(&hear, 1);
        let begin = std::time::Instant::now();
        while counters.phase() != Phase::Waiting {
            assert!(begin.elapsed() < PATIENCE, "it waits, spinning or asleep, when there is nothing to do");
        }
    });
}

/// What each monitor sleeps in.
const fn sleep_of(monitor: MonitorChoice) -> libc::c_long {
    match monitor {
        MonitorChoice::Auto | MonitorChoice::IoUring => libc::SYS_io_uring_enter,
        MonitorChoice::Epoll => libc::SYS_epoll_pwait2,
        MonitorChoice::Ppoll => libc::SYS_ppoll,
    }
}

#[test]
fn a_loop_whose_sleep_is_interrupted_goes_on() {
    for monitor in monitors() {
        let options = options(monitor, Nanos::ZERO);
        let (handle, thread) = spawn::<Bell>(options, |_ring| Echo::default(), |e| panic!("{e}")).unwrap();
        let interrupt = move |target: &mut EventLoop<Bell>| {
            refuse(sleep_of(monitor), libc::EINTR);
            target.counters().blocks.get()
        };
        let before = handle.call(interrupt).unwrap();
        let begin = std::time::Instant::now();
        while handle.counters().blocks.get() == before {
            assert!(begin.elapsed() < PATIENCE, "{monitor}: it sleeps");
        }
        handle.call(|_| ()).unwrap();
        handle.send(EventLoop::stop);
        thread.join().unwrap();
    }
}

#[test]
fn a_loop_that_cannot_go_on_tells_who_started_it_why() {
    for monitor in monitors() {
        let (tell, told) = channel();
        let made = spawn(options(monitor, Nanos::ZERO), |_ring| Echo::default(), move |e| tell.send(e).unwrap());
        let (handle, thread) = made.unwrap();
        let call = sleep_of(monitor);
        handle.send(move |_: &mut EventLoop<bell::Bell>| refuse(call, libc::EIO));
        let error = told.recv_timeout(PATIENCE).expect("it fails");
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{monitor}: {error}");
        thread.join().unwrap();
    }
}

/// Runs `test` on a thread to which the kernel refuses io_uring, as it does to containers.
fn without_io_uring(test: impl FnOnce() + Send + 'static) {
    let thread = std::thread::spawn(|| {
        refuse(libc::SYS_io_uring_setup, libc::EPERM);
        test();
    });
    thread.join().unwrap();
}

#[test]
fn a_ring_that_is_refused_says_by_whom() {
    without_io_uring(|| match Ring::new().err() {
        Some(RingError::Refused | RingError::Sysctl(_)) => {}
        other => panic!("{other:?}"),
    });
}

#[test]
fn the_best_monitor_is_io_uring_then_epoll_then_ppoll_and_a_forced_one_that_is_missing_is_an_error() {
    without_io_uring(|| {
        let made = |monitor| EventLoop::<Bell>::new(options(monitor, Nanos::ZERO), |_ring| Echo::default());
        assert_eq!(made(MonitorChoice::Auto).unwrap().monitor_name(), MonitorChoice::Epoll);
        assert_eq!(made(MonitorChoice::Ppoll).unwrap().monitor_name(), MonitorChoice::Ppoll);
        for refused in [made(MonitorChoice::IoUring).err(), MonitorChoice::IoUring.probe().err()] {
            let refused = refused.expect("it was forced").to_string();
            assert!(refused.contains("io_uring"), "{refused}");
        }
        MonitorChoice::Epoll.probe().unwrap();
        // As before Linux 5.11.
        refuse(libc::SYS_epoll_pwait2, libc::ENOSYS);
        assert_eq!(made(MonitorChoice::Auto).unwrap().monitor_name(), MonitorChoice::Ppoll);
        assert_eq!(made(MonitorChoice::Epoll).err().and_then(|e| e.raw_os_error()), Some(libc::ENOSYS));
    });
    let auto = EventLoop::<Bell>::new(options(MonitorChoice::Auto, Nanos::ZERO), |_ring| Echo::default()).unwrap();
    assert_eq!(Some(auto.monitor_name()), monitors().next(), "the best of those that there are");
}
