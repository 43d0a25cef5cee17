//! One policy on one trace.

use crate::trace::{Ready, Trace};
use crate::{Active, EventKind, Idleness, LastWait, Nanos, Policy, Standing, Wait};

/// What a policy's windows came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) waits: u64,
    pub(super) spin_found: Nanos,
    pub(super) spin_wasted: Nanos,
    pub(super) blocks: u64,
}

impl Tally {
    /// Adds a wait of `length` under a window of `window`; returns whether it blocked.
    pub(super) fn add(&mut self, length: Nanos, window: Nanos) -> bool {
        let blocked = length > window;
        self.waits += 1;
        if blocked {
            self.spin_wasted += window;
            self.blocks += 1;
        } else {
            self.spin_found += length;
        }
        blocked
    }
}

/// Runs `policy` over `trace`; a block delays what the policy sees, as on the real thread, by `wakeup`. `chosen` is told of each
/// wait's window and of the wait's length.
pub(super) fn run(
    policy: &mut dyn Policy,
    trace: &Trace,
    wakeup: Nanos,
    mut chosen: impl FnMut(Nanos, Nanos),
) -> Tally {
    let mut tally = Tally::default();
    let mut active = ActiveList::default();
    let mut last = LastWait::default();
    for (record, length) in trace.waits.iter().zip(trace.true_lengths()) {
        let list = active.after(length, &record.ready);
        if record.length > Nanos::ZERO {
            let in_flight = record.in_flight;
            let window = policy.window(&Standing { in_flight, last, ..Standing::default() });
            chosen(window, length);
            let blocked = tally.add(length, window);
            let seen = if blocked { length + wakeup } else { length };
            policy.observe(&Wait { length: seen, spun: length.min(window), blocked, active: list });
            last = LastWait { kind: record.ended_by, length: seen };
        } else if policy.observes_every_turn() {
            // No wait, and no more than the loop tells of it.
            policy.observe(&Wait { length, spun: length, blocked: false, active: list });
        }
        active.demote_idle();
    }
    tally
}

/// The active list, followed through a trace.
///
/// A guest's queue is on it from its first event until it is idle, and engines are always, which is what the loop does too.
struct ActiveList {
    sources: Vec<Active>,
    /// When each of `sources` was last ready.
    last_ready: Vec<Nanos>,
    clock: Nanos,
    idleness: Idleness,
}

impl Default for ActiveList {
    fn default() -> Self {
        Self {
            sources: Vec::new(),
            last_ready: Vec::new(),
            clock: Nanos::ZERO,
            idleness: Idleness::new(Idleness::DEFAULT),
        }
    }
}

impl ActiveList {
    /// The list at the end of a wait of `length` that `ready` ended.
    fn after(&mut self, length: Nanos, ready: &Ready) -> &[Active] {
        self.clock += length;
        self.sources.iter_mut().for_each(|source| source.ready = false);
        for (slot, kind) in ready.iter() {
            let ready = Active { slot, kind, ready: true };
            match self.sources.iter().position(|source| source.slot == slot) {
                Some(index) => {
                    self.sources[index] = ready;
                    self.last_ready[index] = self.clock;
                }
                None => {
                    self.sources.push(ready);
                    self.last_ready.push(self.clock);
                }
            }
        }
        &self.sources
    }

    /// Leaves those out of the next wait that have become idle; the loop does it at the end of a turn, when its policy has
    /// learned from the wait.
    fn demote_idle(&mut self) {
        if !self.idleness.is_due(self.clock) {
            return;
        }
        let mut index = 0;
        while index < self.sources.len() {
            let is_engine = self.sources[index].kind == EventKind::Completion;
            if !is_engine && self.idleness.is_idle(self.last_ready[index], self.clock) {
                self.sources.swap_remove(index);
                self.last_ready.swap_remove(index);
            } else {
                index += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::Record;
    use crate::{BlockCost, Parameters, PolicyKind, Slot, build};

    fn ready(slots: &[u32]) -> Ready {
        let mut ready = Ready::default();
        slots.iter().for_each(|&slot| ready.push(Slot(slot), EventKind::Queue));
        ready
    }

    /// Slots on the list, those ready marked.
    fn seen(list: &[Active]) -> Vec<(u32, bool)> {
        list.iter().map(|source| (source.slot.0, source.ready)).collect()
    }

    #[test]
    fn a_source_joins_the_list_at_its_first_event_and_leaves_it_after_the_wait_in_which_it_became_idle() {
        let mut list = ActiveList::default();
        let mut after = |milliseconds, slots: &[u32]| {
            let seen = seen(list.after(Nanos::from_millis(milliseconds), &ready(slots)));
            list.demote_idle();
            seen
        };
        assert_eq!(after(1_000, &[3]), [(3, true)]);
        assert_eq!(after(1_000, &[5]), [(3, false), (5, true)]);
        assert_eq!(after(6_500, &[5]), [(3, false), (5, true)]);
        assert_eq!(after(1_000, &[]), [(5, false)]);
    }

    #[test]
    fn a_source_that_became_idle_counts_once_more_and_then_no_longer() {
        let wait = |nanos, slot| Record { length: Nanos(nanos), ready: ready(&[slot]), ..Record::default() };
        let long = 8_000_000_000;
        let waits = vec![wait(3_000, 0), wait(long, 1), wait(long, 1), wait(long, 1)];
        let block = BlockCost { cpu: Nanos::ZERO, latency: Nanos::ZERO };
        let trace = Trace { note: String::new(), block, lost: 0, waits };
        let mut policy = build(PolicyKind::PerSourceWindow, &Parameters::default()).unwrap();
        let mut windows = Vec::new();
        run(policy.as_mut(), &trace, Nanos::ZERO, |window, _length| windows.push(window.0));
        assert_eq!(windows, [0, 4_000, 4_000, 0]);
    }

    /// Length of a wait, what of it was spun, whether it blocked; slots on the list, those ready marked.
    type Noted = (u64, u64, bool, Vec<(u32, bool)>);

    /// Spins for so long, and notes what it is told.
    struct Noting {
        window: Nanos,
        every_turn: bool,
        before: Vec<(u32, LastWait)>,
        waits: Vec<Noted>,
    }

    impl Policy for Noting {
        fn window(&mut self, before: &Standing) -> Nanos {
            self.before.push((before.in_flight, before.last));
            self.window
        }
        fn observe(&mut self, wait: &Wait<'_>) {
            self.waits.push((wait.length.0, wait.spun.0, wait.blocked, seen(wait.active)));
        }
        fn forget(&mut self, _slot: Slot) {}
        fn window_now(&self) -> Nanos {
            self.window
        }
        fn observes_every_turn(&self) -> bool {
            self.every_turn
        }
    }

    #[test]
    fn a_policy_is_told_of_a_replay_what_a_loop_would_tell_it() {
        let record = |length, spun, blocked, in_flight, ended_by, slot| Record {
            length: Nanos(length),
            spun: Nanos(spun),
            blocked,
            in_flight,
            ended_by,
            ready: ready(&[slot]),
        };
        // A wait within the window, one as long, one that nobody had to wait for, one longer, and one that blocked when it was
        // recorded, which made it longer by 20.
        let waits = vec![
            record(50, 50, false, 1, EventKind::Queue, 0),
            record(100, 100, false, 2, EventKind::Completion, 1),
            record(0, 0, false, 9, EventKind::Queue, 0),
            record(101, 101, false, 3, EventKind::Other, 1),
            record(150, 10, true, 4, EventKind::Queue, 0),
        ];
        let block = BlockCost { cpu: Nanos(1), latency: Nanos(20) };
        let trace = Trace { note: String::new(), block, lost: 0, waits };
        for every_turn in [false, true] {
            let mut policy = Noting { window: Nanos(100), every_turn, before: Vec::new(), waits: Vec::new() };
            let tally = run(&mut policy, &trace, Nanos(7), |_window, _length| {});
            let last = |kind, length| LastWait { kind, length: Nanos(length) };
            let expected = [
                (1, LastWait::default()),
                (2, last(EventKind::Queue, 50)),
                (3, last(EventKind::Completion, 100)),
                (4, last(EventKind::Other, 108)),
            ];
            assert_eq!(policy.before, expected);
            let list = |first, second| vec![(0, first), (1, second)];
            let mut expected = vec![
                (50, 50, false, vec![(0, true)]),
                (100, 100, false, list(false, true)),
                (0, 0, false, list(true, false)),
                (108, 100, true, list(false, true)),
                (137, 100, true, list(true, false)),
            ];
            if !every_turn {
                expected.remove(2);
            }
            assert_eq!(policy.waits, expected);
            let (spin_found, spin_wasted) = (Nanos(150), Nanos(200));
            assert_eq!(tally, Tally { waits: 4, spin_found, spin_wasted, blocks: 2 });
        }
    }

    #[test]
    fn an_engine_is_never_idle_and_a_queue_that_had_an_event_is_not_yet() {
        let mut list = ActiveList::default();
        let mut both = ready(&[3, 4]);
        both.push(Slot(1), EventKind::Completion);
        list.after(Nanos(1), &both);
        list.after(Nanos::from_millis(3_500), &ready(&[4]));
        list.demote_idle();
        list.after(Nanos::from_millis(3_500), &ready(&[]));
        list.demote_idle();
        assert_eq!(seen(list.after(Nanos(1), &ready(&[]))), [(1, false), (4, false)]);
        assert_eq!(list.last_ready, [Nanos(1), Nanos(3_500_000_001)]);
    }
}
