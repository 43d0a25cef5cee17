//! A loop's dealings with its policy: asks it before each wait, tells it after, and keeps count.

use std::sync::Arc;

use egret_polling::trace::{Record, Recorder};
use egret_polling::{Active, BlockCost, Done, EventKind, LastWait, Nanos, Policy, Slot, Standing, Wait};

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
    /// The window of this wait is near the largest.
    near_max: bool,
    /// Requests that came back since the last wait, and when that ended.
    pub(crate) completed: u32,
    ended: Nanos,
    observed: Vec<Active>,
    /// The wait that has ended in this turn, of which nothing has been learned yet.
    fresh: Option<Ended>,
    cost: Option<RunningCost>,
    recorder: Option<Recorder>,
    pub(crate) counters: Arc<LoopCounters>,
}

/// How a wait ended.
struct Ended {
    length: Nanos,
    spun: Nanos,
    blocked: bool,
}

impl Polling {
    pub(crate) fn new(policy: Box<dyn Policy>, window_max: Nanos) -> Self {
        Self {
            every_turn: policy.observes_every_turn(),
            resets: 0,
            near_max: false,
            policy,
            window_max,
            before: Standing::default(),
            completed: 0,
            ended: clock::now(),
            observed: Vec::new(),
            fresh: None,
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
        let counters = &self.counters;
        counters.window.set(window.0);
        counters.window_sum.add_time(window.min(Nanos::from_millis(1_000)));
        self.near_max = window.is_near(self.window_max);
        window
    }

    /// Takes note of a wait that has just ended, with these sources active, to [learn](Self::learn) from it when there is time.
    pub(crate) fn note(
        &mut self,
        start: Nanos,
        end: Nanos,
        spun: Nanos,
        blocked: bool,
        active: impl Iterator<Item = Active>,
    ) {
        self.ended = end;
        self.observed.clear();
        self.observed.extend(active);
        self.fresh = Some(Ended { length: end - start, spun, blocked });
    }

    /// Learns from the wait of this turn, if there was one, when the guests have what they waited for.
    pub(crate) fn learn(&mut self, now: Nanos) {
        let Some(Ended { length, spun, blocked }) = self.fresh.take() else { return };
        let counters = &self.counters;
        let turn = self.before.done.took + length;
        counters.elapsed.add_time(turn);
        if self.near_max {
            counters.near_max.add_time(turn);
        }
        counters.waits.add(1);
        if blocked {
            counters.spin_wasted.add_time(spun);
        } else {
            counters.hits.add(1);
            counters.spin_found.add_time(spun);
        }
        let ended = |kind| self.observed.iter().any(|source| source.ready && source.kind == kind);
        let kind = [EventKind::Completion, EventKind::Queue].into_iter().find(|&kind| ended(kind)).unwrap_or_default();
        let wait = Wait { length, spun, blocked, active: &self.observed };
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
