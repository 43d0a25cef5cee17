use std::os::unix::net::UnixDatagram;

use egret_event_loop::LoopCounters;

use super::*;
use crate::daemon::IoThreadCounters;
use crate::refuse::refuse;

const EVERY: Duration = Duration::from_secs(5);
const INTERRUPTIBLE: fn(i32) -> bool = |_| false;

/// A loop, as it shows itself.
struct Loop(Arc<LoopCounters>, Watched);

impl Loop {
    fn new() -> Self {
        let turns = Arc::<LoopCounters>::default();
        let mut watched = Watched::default();
        let counters = IoThreadCounters {
            thread_id: 7,
            turns: Arc::clone(&turns),
            engines: Arc::default(),
            stalls: Arc::default(),
        };
        watched.io_threads.insert("io0".to_owned(), counters);
        Self(turns, watched)
    }

    fn begin_turn(&self, phase: Phase) {
        self.0.turns.add(1);
        self.0.enter(phase);
    }

    fn stalls(&self) -> u64 {
        self.1.io_threads["io0"].stalls.get()
    }
}

fn stall(phase: Phase, looks: u32, over: bool) -> Vec<Stall> {
    vec![Stall { id: "io0".to_owned(), thread_id: 7, phase, stood: EVERY * looks, over }]
}

#[test]
fn a_loop_that_stands_still_is_told_of_once_and_so_is_that_it_goes_on() {
    let (watched, mut looks) = (Loop::new(), Looks::default());
    let mut look = |watched: &Loop| looks.look(&watched.1, EVERY, INTERRUPTIBLE);
    for round in 1..=2 {
        watched.begin_turn(Phase::Dispatching);
        for _ in 0..LOOKS {
            assert_eq!(look(&watched), []);
        }
        assert_eq!(look(&watched), stall(Phase::Dispatching, LOOKS, false));
        assert_eq!(look(&watched), [], "once");
        assert_eq!(watched.stalls(), round);
        // It may have come only a little further.
        watched.0.enter(Phase::Submitting);
        assert_eq!(look(&watched), stall(Phase::Dispatching, LOOKS + 1, true));
    }
    assert_eq!(watched.stalls(), 2);
}

#[test]
fn a_loop_that_waits_spins_or_gets_on_slowly_is_not_stuck() {
    let (watched, mut looks) = (Loop::new(), Looks::default());
    for _ in 0..10 * LOOKS {
        assert_eq!(looks.look(&watched.1, EVERY, INTERRUPTIBLE), [], "it may wait for ever");
    }
    for turn in 0..10 * LOOKS {
        if turn.is_multiple_of(LOOKS - 1) {
            watched.begin_turn(Phase::Submitting);
        }
        assert_eq!(looks.look(&watched.1, EVERY, INTERRUPTIBLE), []);
    }
    assert!(!looks.any_stuck());
}

#[test]
fn a_loop_that_sleeps_in_its_wait_as_nothing_waits_for_an_event_is_stuck() {
    let (watched, mut looks) = (Loop::new(), Looks::default());
    let found: Vec<_> = (0..=LOOKS).flat_map(|_| looks.look(&watched.1, EVERY, |id| id == 7)).collect();
    assert_eq!(found, stall(Phase::Waiting, LOOKS, false));
    assert!(looks.any_stuck());
    assert_eq!(looks.look(&watched.1, EVERY, INTERRUPTIBLE), stall(Phase::Waiting, LOOKS, true));
    assert!(!looks.any_stuck());
}

#[test]
fn a_thread_that_takes_the_name_of_one_that_was_stuck_begins_anew() {
    let (mut watched, mut looks) = (Loop::new(), Looks::default());
    watched.begin_turn(Phase::Reaping);
    (0..=LOOKS).for_each(|_| drop(looks.look(&watched.1, EVERY, INTERRUPTIBLE)));
    assert!(looks.any_stuck());
    let counters = watched.1.io_threads.remove("io0").unwrap();
    assert_eq!(looks.look(&watched.1, EVERY, INTERRUPTIBLE), [], "it is gone, and nobody waits for it");
    assert!(!looks.any_stuck());
    watched.1.io_threads.insert("io0".to_owned(), counters);
    assert_eq!(looks.look(&watched.1, EVERY, INTERRUPTIBLE), []);
}

#[test]
fn what_is_found_rings_until_it_is_heard() {
    let stalls = Stalls::new().unwrap();
    let rings = || {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&stalls, PollFlags::IN)], Some(&at_once)).unwrap() == 1
    };
    assert!(!rings());
    stalls.push(stall(Phase::Notifying, LOOKS, false));
    assert!(rings());
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| stalls.await_heard(Duration::MAX));
        let mut heard = Vec::new();
        stalls.hear(|stall| heard.push(stall));
        assert_eq!(heard, stall(Phase::Notifying, LOOKS, false));
        waits.join().unwrap();
    });
    assert!(!rings());
}

#[test]
fn the_service_manager_hears_that_the_daemon_is_well_though_there_are_no_descriptors_left() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let (stalls, stop) = (Stalls::new().unwrap(), EventNotifier::new().unwrap());
    let heard = std::thread::scope(|scope| {
        scope.spawn(|| {
            let heartbeat = Heartbeat::new(Duration::from_millis(1), path.into()).unwrap();
            refuse(libc::SYS_socket, libc::EMFILE);
            watch(&CounterRegistry::default(), &stalls, &stop, None, Some(&heartbeat), OnStall::Report);
        });
        let mut text = [0; 64];
        let heard = [(); 2].map(|()| manager.recv(&mut text).map(|len| text[..len].to_vec()).ok());
        stop.set();
        heard
    });
    assert_eq!(heard, [(); 2].map(|()| Some(b"WATCHDOG=1\n".to_vec())));
}
