//! A loop's dealings with its policy: asks it before each wait, tells it after, and keeps count.

use std::sync::Arc;

use egret_polling::trace::{Record, Recorder};
use egret_polling::{Active, BlockCost, Done, EventKind, HabitTimes, LastWait, Nanos, Policy, Slot, Standing, Wait};

use crate::calibrate::{Calibration, Strain, thread_cpu};
use crate::cost::RunningCost;
use crate::{LoopCounters, clock};

/// The policy, what it was told about the last wait, and counters of what came of its windows.
pub(crate) struct Polling {
    policy: Box<dyn Policy>,
    window_max: Nanos,
    before: Standing,
    /// The policy is told of turns without a wait, too.
    every_turn: bool,
    /// What the policy had counted by the last turn.
    resets: u64,
    /// How long it had had which habit when that was last told.
    habits: HabitTimes,
    /// The window of this wait is near the largest.
    near_max: bool,
    /// Requests that came back since the last wait, and when that ended.
    pub(crate) completed: u32,
    ended: Nanos,
    observed: Vec<Active>,
    /// The wait that has ended in this turn, of which nothing has been learned yet.
    fresh: Option<Ended>,
    /// What of its spinning was counted while it lasted.
    vain: Nanos,
    cost: Option<RunningCost>,
    recorder: Option<Recorder>,
    pub(crate) counters: Arc<LoopCounters>,
}

/// How a wait came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    /// Spinning found something to do.
    Found,
    /// Something slipped in, or could be told of by nobody, before the loop slept.
    Awake,
    Asleep,
}

/// A wait that has ended.
struct Ended {
    length: Nanos,
    spun: Nanos,
    end: WaitEnd,
}

impl Polling {
    pub(crate) fn new(policy: Box<dyn Policy>, window_max: Nanos) -> Self {
        Self {
            every_turn: policy.observes_every_turn(),
            resets: 0,
            habits: HabitTimes::default(),
            near_max: false,
            policy,
            window_max,
            before: Standing::default(),
            completed: 0,
            ended: clock::now(),
            observed: Vec::new(),
            fresh: None,
            vain: Nanos::ZERO,
            cost: None,
            recorder: None,
            counters: Arc::default(),
        }
    }

    /// Replaces the policy by one that has learned nothing.
    pub(crate) fn set_policy(&mut self, mut policy: Box<dyn Policy>, window_max: Nanos) {
        if let Some(cost) = self.block_cost() {
            policy.set_block_cost(cost);
        }
        self.every_turn = policy.observes_every_turn();
        self.resets = 0;
        self.habits = HabitTimes::default();
        self.policy = policy;
        self.window_max = window_max;
    }

    /// Whether the policy, or a recording, is to be told of turns without a wait.
    pub(crate) fn observes_every_turn(&self) -> bool {
        self.every_turn || self.recorder.is_some()
    }

    /// Tells the policy what a block costs, and keeps an eye on it from here on.
    pub(crate) fn set_calibration(&mut self, calibration: Calibration, strain: Strain) {
        self.cost = Some(RunningCost::new(calibration, strain));
        self.policy.set_block_cost(calibration.cost);
    }

    /// What a block costs, as far as it is known.
    pub(crate) fn block_cost(&self) -> Option<BlockCost> {
        self.cost.as_ref().map(RunningCost::cost)
    }

    /// Keeps the newest `capacity` waits from here on.
    pub(crate) fn record(&mut self, capacity: usize) {
        self.recorder = Some(Recorder::new(capacity));
    }

    pub(crate) fn take_recording(&mut self) -> Option<Recorder> {
        self.recorder.take()
    }

    pub(crate) fn forget(&mut self, slot: Slot) {
        self.policy.forget(slot);
    }

    /// How long to spin before the coming wait blocks.
    pub(crate) fn window(&mut self, now: Nanos, in_flight: u32) -> Nanos {
        self.before.in_flight = in_flight;
        self.before.cpu = self.policy.wants_cpu_time().then(thread_cpu);
        self.before.done = Done { requests: std::mem::take(&mut self.completed), took: now - self.ended };
        let window = self.policy.window(&self.before);
        if self.before.cpu.is_some() {
            self.count_habits();
        }
        let counters = &self.counters;
        counters.window.set(window.0);
        counters.window_sum.add_time(window.min(Nanos::from_millis(1_000)));
        self.near_max = window.is_near(self.window_max);
        window
    }

    /// Counts a part of the wait that goes on, in which spinning has found nothing.
    pub(crate) fn count_vain(&mut self, spun: Nanos) {
        self.counters.spin_wasted.add_time(spun);
        self.vain += spun;
    }

    /// Takes note of a wait that has just ended, with these sources active, to [learn](Self::learn) from it when there is time.
    pub(crate) fn note(
        &mut self,
        start: Nanos,
        now: Nanos,
        spun: Nanos,
        end: WaitEnd,
        active: impl Iterator<Item = Active>,
    ) {
        self.ended = now;
        self.observed.clear();
        self.observed.extend(active);
        self.fresh = Some(Ended { length: now - start, spun, end });
    }

    /// Learns from the wait of this turn, if there was one, when the guests have what they waited for.
    pub(crate) fn learn(&mut self, now: Nanos) {
        let Some(Ended { length, spun, end }) = self.fresh.take() else { return };
        let counters = &self.counters;
        let turn = self.before.done.took + length;
        counters.elapsed.add_time(turn);
        if self.near_max {
            counters.near_max.add_time(turn);
        }
        counters.waits.add(1);
        let uncounted = spun - std::mem::take(&mut self.vain);
        if end == WaitEnd::Found {
            counters.hits.add(1);
            counters.spin_found.add_time(uncounted);
        } else {
            counters.spin_wasted.add_time(uncounted);
        }
        let ended = |kind| self.observed.iter().any(|source| source.ready && source.kind == kind);
        let kind = [EventKind::Completion, EventKind::Queue].into_iter().find(|&kind| ended(kind)).unwrap_or_default();
        let wait = Wait { length, spun, blocked: end == WaitEnd::Asleep, active: &self.observed };
        self.policy.observe(&wait);
        if let Some(recorder) = &mut self.recorder {
            recorder.push(Record::new(&self.before, &wait, kind));
        }
        self.before.last = LastWait { kind, length };
        self.count_resets();
        self.look_at_strain(now);
    }

    /// Learns that these sources are active, and that there was nothing to wait for.
    pub(crate) fn observe_no_wait(&mut self, active: impl Iterator<Item = Active>) {
        self.observed.clear();
        self.observed.extend(active);
        let wait = Wait { length: Nanos::ZERO, spun: Nanos::ZERO, blocked: false, active: &self.observed };
        if self.every_turn {
            self.policy.observe(&wait);
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.push(Record::new(&self.before, &wait, EventKind::Other));
        }
        self.count_resets();
    }

    /// QEMU's policies are those that reset something.
    fn count_resets(&mut self) {
        if self.every_turn {
            let resets = self.policy.resets();
            self.counters.resets.add(resets - self.resets);
            self.resets = resets;
        }
    }

    /// Once in a slice.
    fn count_habits(&mut self) {
        let Some(times) = self.policy.habits() else { return };
        for (counter, (now, before)) in self.counters.habits.iter().zip(times.iter().zip(&self.habits)) {
            counter.add_time(*now - *before);
        }
        self.habits = times;
    }

    /// Now and then: tells the policy how the thread fares; nothing to policies that were told no price.
    fn look_at_strain(&mut self, now: Nanos) {
        let Some(running) = &mut self.cost else { return };
        let Some((contention, cost)) = running.look(now, &self.counters) else { return };
        self.policy.contend(contention);
        if let Some(cost) = cost {
            self.policy.set_block_cost(cost);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use egret_polling::Contention;

    use super::*;

    /// What a policy answers, and what it was told.
    #[derive(Default)]
    struct Told {
        window: Nanos,
        every_turn: bool,
        cpu: bool,
        habits: Option<HabitTimes>,
        resets: u64,
        standing: Vec<Standing>,
        /// How long, how much of it spinning, whether it slept, and how many sources were active.
        waits: Vec<(u64, u64, bool, usize)>,
        forgotten: Vec<Slot>,
        costs: Vec<BlockCost>,
        contended: usize,
    }

    #[derive(Clone, Default)]
    struct Confidant(Arc<Mutex<Told>>);

    impl Confidant {
        fn told(&self) -> MutexGuard<'_, Told> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    impl Policy for Confidant {
        fn window(&mut self, before: &Standing) -> Nanos {
            self.told().standing.push(*before);
            self.window_now()
        }
        fn observe(&mut self, wait: &Wait<'_>) {
            self.told().waits.push((wait.length.0, wait.spun.0, wait.blocked, wait.active.len()));
        }
        fn forget(&mut self, slot: Slot) {
            self.told().forgotten.push(slot);
        }
        fn window_now(&self) -> Nanos {
            self.told().window
        }
        fn weighs_block_cost(&self) -> bool {
            true
        }
        fn observes_every_turn(&self) -> bool {
            self.told().every_turn
        }
        fn resets(&self) -> u64 {
            self.told().resets
        }
        fn wants_cpu_time(&self) -> bool {
            self.told().cpu
        }
        fn habits(&self) -> Option<HabitTimes> {
            self.told().habits
        }
        fn set_block_cost(&mut self, cost: BlockCost) {
            self.told().costs.push(cost);
        }
        fn contend(&mut self, _evidence: Contention) {
            self.told().contended += 1;
        }
    }

    const MAX: Nanos = Nanos(1_000);

    fn polling(policy: &Confidant) -> Polling {
        Polling::new(Box::new(policy.clone()), MAX)
    }

    /// A queue and the engines, and whether each had an event.
    fn active(queue: bool, engines: bool) -> impl Iterator<Item = Active> {
        [(EventKind::Queue, 1, queue), (EventKind::Completion, 0, engines)]
            .map(|(kind, slot, ready)| Active { slot: Slot(slot), kind, ready })
            .into_iter()
    }

    #[test]
    fn a_wait_is_counted_by_how_it_ended_and_the_policy_is_told_of_it_once_and_before_the_next_what_came_between() {
        let policy = Confidant::default();
        let mut polling = polling(&policy);
        polling.ended = Nanos(500);
        polling.record(10);
        let (mut kinds, mut now) = (Vec::new(), Nanos(500));
        for (window, length, spun, end, (queue, engines), kind) in [
            (875, 200, 150, WaitEnd::Found, (true, false), EventKind::Queue),
            (874, 3_000, 874, WaitEnd::Asleep, (true, true), EventKind::Completion),
            (2_000_000_000, 40, 40, WaitEnd::Found, (false, false), EventKind::Other),
            (0, 7, 0, WaitEnd::Asleep, (false, true), EventKind::Completion),
            (20, 25, 20, WaitEnd::Awake, (true, false), EventKind::Queue),
            (0, 3, 0, WaitEnd::Awake, (true, false), EventKind::Queue),
        ] {
            policy.told().window = Nanos(window);
            polling.completed = 3;
            let start = now + Nanos(10);
            assert_eq!(polling.window(start, 9), Nanos(window));
            assert_eq!((polling.completed, polling.counters.read().window), (0, Nanos(window)));
            now = start + Nanos(length);
            polling.note(start, now, Nanos(spun), end, active(queue, engines));
            // There is nothing to learn the second time.
            polling.learn(now);
            polling.learn(now);
            kinds.push(kind);
        }
        let counted = polling.counters.read();
        assert_eq!((counted.waits, counted.hits), (6, 2));
        assert_eq!((counted.spin_found, counted.spin_wasted), (Nanos(190), Nanos(874 + 20)));
        assert_eq!(counted.elapsed, Nanos(210 + 3_010 + 50 + 17 + 35 + 13));
        assert_eq!(counted.near_max, Nanos(210 + 50), "an eighth less than all is near");
        assert_eq!(counted.window_sum, Nanos(875 + 874 + 1_000_000_000 + 20), "a second of each at most");
        let told = policy.told();
        let slept = [(3_000, 874, true, 2), (7, 0, true, 2)];
        let awake = [(200, 150, false, 2), (40, 40, false, 2), (25, 20, false, 2), (3, 0, false, 2)];
        assert_eq!(told.waits, [awake[0], slept[0], awake[1], slept[1], awake[2], awake[3]]);
        let lengths = [200, 3_000, 40, 7, 25].map(Nanos);
        let lasts = kinds.iter().zip(lengths).map(|(&kind, length)| LastWait { kind, length });
        for (standing, last) in told.standing.iter().zip([LastWait::default()].into_iter().chain(lasts)) {
            let done = Done { requests: 3, took: Nanos(10) };
            assert_eq!(*standing, Standing { in_flight: 9, done, cpu: None, last });
        }
        let recorded = polling.take_recording().unwrap().into_trace(String::new(), BlockCost::default());
        let recorded: Vec<_> = recorded.waits.iter().map(|wait| (wait.length.0, wait.ended_by)).collect();
        assert!(recorded.into_iter().eq([200, 3_000, 40, 7, 25, 3].into_iter().zip(kinds)));
    }

    #[test]
    fn turns_without_a_wait_are_for_policies_that_see_every_turn_and_for_recordings() {
        for (every_turn, records) in [(false, false), (false, true), (true, false), (true, true)] {
            let policy = Confidant::default();
            policy.told().every_turn = every_turn;
            let mut polling = polling(&policy);
            if records {
                polling.record(10);
            }
            assert_eq!(polling.observes_every_turn(), every_turn || records);
            polling.observe_no_wait(active(true, false));
            let expected: &[_] = if every_turn { &[(0, 0, false, 2)] } else { &[] };
            assert_eq!(policy.told().waits, expected);
            let recording = polling.take_recording();
            let recorded = recording.map(|recorder| recorder.into_trace(String::new(), BlockCost::default()).waits);
            assert_eq!(
                recorded.map(|waits| (waits.len(), waits[0].ended_by)),
                records.then_some((1, EventKind::Other))
            );
            assert_eq!(polling.observes_every_turn(), every_turn, "the recording has ended");
            assert_eq!(polling.counters.read().waits, 0);
        }
    }

    #[test]
    fn habits_are_counted_when_the_policy_is_told_the_cpu_time_and_go_on_growing_when_it_is_replaced() {
        let first = Confidant::default();
        let mut polling = polling(&first);
        let times = |scale: u64| Some([1, 2, 3, 4, 5].map(|habit| Nanos(scale * habit)));
        let counted = |polling: &mut Polling| {
            polling.window(Nanos(1), 0);
            Some(polling.counters.read().habits)
        };
        first.told().habits = times(10);
        assert_eq!(counted(&mut polling), times(0), "nothing of it has ended");
        first.told().cpu = true;
        assert_eq!(counted(&mut polling), times(10));
        first.told().habits = times(11);
        assert_eq!(counted(&mut polling), times(11));
        first.told().habits = None;
        assert_eq!(counted(&mut polling), times(11));

        let second = Confidant::default();
        second.told().cpu = true;
        second.told().habits = times(7);
        polling.set_policy(Box::new(second), MAX);
        assert_eq!(counted(&mut polling), times(18));
    }

    #[test]
    fn resets_are_those_of_all_policies_that_have_decided_and_that_reset_something() {
        let first = Confidant::default();
        first.told().every_turn = true;
        let mut polling = polling(&first);
        let wait = |polling: &mut Polling| {
            polling.note(Nanos(1), Nanos(2), Nanos::ZERO, WaitEnd::Asleep, active(true, false));
            polling.learn(Nanos(2));
        };
        let counted = |polling: &Polling| polling.counters.read().resets;
        first.told().resets = 5;
        wait(&mut polling);
        assert_eq!(counted(&polling), 5);
        first.told().resets = 7;
        polling.observe_no_wait(active(true, false));
        assert_eq!(counted(&polling), 7);

        let second = Confidant::default();
        second.told().every_turn = true;
        polling.set_policy(Box::new(second.clone()), MAX);
        second.told().resets = 2;
        wait(&mut polling);
        assert_eq!(counted(&polling), 9);

        let third = Confidant::default();
        polling.set_policy(Box::new(third.clone()), MAX);
        third.told().resets = 100;
        wait(&mut polling);
        assert_eq!(counted(&polling), 9);
    }

    #[test]
    fn a_policy_learns_what_a_block_costs_and_whenever_that_has_changed_and_its_successor_what_is_known_by_then() {
        let us = Nanos::from_micros;
        let (first, second) = (Confidant::default(), Confidant::default());
        let mut polling = polling(&first);
        assert_eq!(polling.block_cost(), None);
        // Who wakes is said to take more than all, so that what is found later differs, however this thread fares.
        let calibration = Calibration { cost: BlockCost { cpu: us(10), latency: us(20) }, waking: us(100) };
        polling.set_calibration(calibration, Strain::of(rustix::thread::gettid()).unwrap());
        assert_eq!((polling.block_cost(), &first.told().costs[..]), (Some(calibration.cost), &[calibration.cost][..]));
        for (at, contended) in [(100, 1), (199, 1), (200, 2)] {
            polling.counters.blocks.add(100);
            polling.note(Nanos(1), Nanos(2), Nanos::ZERO, WaitEnd::Asleep, active(true, false));
            polling.learn(Nanos::from_millis(at));
            assert_eq!(first.told().contended, contended, "{at}");
        }
        let [told, corrected] = first.told().costs[..] else { panic!("{:?}", first.told().costs) };
        assert_ne!(told.cpu, corrected.cpu);
        assert_eq!(polling.block_cost(), Some(corrected));
        polling.set_policy(Box::new(second.clone()), MAX);
        assert_eq!(second.told().costs, [corrected]);
    }

    #[test]
    fn a_policy_is_told_which_source_has_left_and_the_thread_s_time_if_it_wants_that() {
        let policy = Confidant::default();
        let mut polling = polling(&policy);
        polling.forget(Slot(7));
        policy.told().cpu = true;
        let before = thread_cpu();
        polling.window(Nanos(1), 0);
        let told = policy.told();
        assert_eq!(told.forgotten, [Slot(7)]);
        let cpu = told.standing[0].cpu.unwrap();
        assert!(before <= cpu && cpu <= thread_cpu(), "{cpu:?}");
    }
}
