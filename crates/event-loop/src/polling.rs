//! A loop's dealings with its policy: asks it before each wait, tells it after, and keeps count.

use std::io;
use std::sync::Arc;

use egret_polling::trace::{Record, Recorder};
use egret_polling::{Active, BlockCost, Kind, LastWait, Nanos, Policy, Slot, Standing, Wait};

use crate::LoopCounters;
use crate::calibrate::Strain;

/// How often the thread's struggle for its core is looked at, while it takes turns at all.
const LOOK_AT_STRAIN_EVERY: Nanos = Nanos::from_millis(100);
/// Sleeps that make an average of what one is delayed by.
const ENOUGH_BLOCKS: u64 = 16;

/// The policy, what it has been told, and what came of it.
pub(crate) struct Polling {
    policy: Box<dyn Policy>,
    window_max: Nanos,
    before: Standing,
    observed: Vec<Active>,
    cost: Option<Measured>,
    recorder: Option<Recorder>,
    pub(crate) counters: Arc<LoopCounters>,
}

/// The price of a block as it was calibrated, and what has happened since.
struct Measured {
    calibrated: BlockCost,
    strain: Strain,
    at: Nanos,
    blocks: u64,
}

impl Polling {
    pub(crate) fn new(policy: Box<dyn Policy>, window_max: Nanos) -> Self {
        Self {
            policy,
            window_max,
            before: Standing::default(),
            observed: Vec::new(),
            cost: None,
            recorder: None,
            counters: Arc::default(),
        }
    }

    /// Replaces the policy by one that has learned nothing.
    pub(crate) fn set_policy(&mut self, mut policy: Box<dyn Policy>, window_max: Nanos) {
        if let Some(measured) = &self.cost {
            policy.set_block_cost(measured.calibrated);
        }
        self.policy = policy;
        self.window_max = window_max;
    }

    /// Tells the policy what a block costs, and keeps an eye on it from here on. On the loop's own thread.
    pub(crate) fn set_block_cost(&mut self, calibrated: BlockCost) -> io::Result<()> {
        let strain = Strain::of_this_thread()?;
        self.policy.set_block_cost(calibrated);
        self.cost = Some(Measured { calibrated, strain, at: Nanos::ZERO, blocks: self.counters.blocks.get() });
        Ok(())
    }

    pub(crate) fn block_cost(&self) -> Option<BlockCost> {
        self.cost.as_ref().map(|measured| measured.calibrated)
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
    pub(crate) fn window(&mut self, in_flight: u32) -> Nanos {
        self.before.in_flight = in_flight;
        let window = self.policy.window(&self.before);
        let counters = &self.counters;
        counters.window.set(window.0);
        counters.window_sum.add_time(window.min(Nanos::from_millis(1_000)));
        counters.window_zero.add(u64::from(window == Nanos::ZERO));
        let near = Nanos(self.window_max.0 - self.window_max.0 / 8);
        counters.window_near_max.add(u64::from(window > Nanos::ZERO && window >= near));
        window
    }

    /// Learns from a wait that has just ended, with these sources active.
    pub(crate) fn observe(&mut self, length: Nanos, spun: Nanos, blocked: bool, active: impl Iterator<Item = Active>) {
        let counters = &self.counters;
        counters.waits.add(1);
        if blocked {
            counters.spin_wasted.add_time(spun);
        } else {
            counters.hits.add(1);
            counters.spin_found.add_time(spun);
        }
        self.observed.clear();
        self.observed.extend(active);
        let ended = |kind| self.observed.iter().any(|source| source.ready && source.kind == kind);
        let kind = [Kind::Completion, Kind::Queue].into_iter().find(|&kind| ended(kind)).unwrap_or_default();
        let wait = Wait { length, spun, blocked, active: &self.observed };
        self.policy.observe(&wait);
        if let Some(recorder) = &mut self.recorder {
            recorder.push(Record::new(&self.before, &wait, kind));
        }
        self.before.last = LastWait { kind, length };
    }

    /// Now and then: whether somebody else wants this core, and what that does to the price of a block.
    ///
    /// Two small reads from `/proc` ten times a second; none for policies that were told no price.
    pub(crate) fn look_at_strain(&mut self, now: Nanos) {
        let Some(measured) = &mut self.cost else { return };
        if now - measured.at < LOOK_AT_STRAIN_EVERY {
            return;
        }
        measured.at = now;
        let Ok(evidence) = measured.strain.since_last() else { return };
        self.policy.contend(evidence);
        let total = self.counters.blocks.get();
        let blocks = total - measured.blocks;
        measured.blocks = total;
        if blocks >= ENOUGH_BLOCKS {
            // A thread that wakes up to a busy core waits for it: that is part of what blocking costs here and now.
            let queued = Nanos(evidence.delayed.0 / blocks);
            let BlockCost { cpu, latency } = measured.calibrated;
            self.policy.set_block_cost(BlockCost { cpu, latency: latency.max(queued) });
        }
    }
}
