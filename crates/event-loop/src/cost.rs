//! What a block costs this thread: calibrated when it starts, corrected from what the kernel counts while it runs.

use egret_polling::{BlockCost, Contention, Nanos};

use crate::LoopCounters;
use crate::calibrate::{Calibration, Strain, thread_cpu};

/// How often the kernel is asked, while the thread takes turns at all.
const LOOK_EVERY: Nanos = Nanos::from_millis(100);
/// Sleeps that make an average.
const ENOUGH_BLOCKS: u64 = 16;

/// The price of a block, and what it is derived from.
pub(crate) struct RunningCost {
    calibration: Calibration,
    strain: Strain,
    /// CPU time of one block on this thread, averaged over the last few looks.
    own: Nanos,
    told: BlockCost,
    last: Look,
}

/// What stood on the meters.
#[derive(Clone, Copy, Default)]
struct Look {
    at: Nanos,
    cpu: Nanos,
    asleep: Nanos,
    blocks: u64,
}

impl RunningCost {
    /// Of the thread that `strain` is of.
    pub(crate) fn new(calibration: Calibration, strain: Strain) -> Self {
        let Calibration { cost, waking } = calibration;
        Self { calibration, strain, own: cost.cpu - waking, told: cost, last: Look::default() }
    }

    /// What is known now.
    pub(crate) fn cost(&self) -> BlockCost {
        self.told
    }

    /// Ten times a second: how contended this core is, and what a block costs if that has changed.
    ///
    /// Two small reads from `/proc` and a clock, ten times a second.
    pub(crate) fn look(&mut self, now: Nanos, counters: &LoopCounters) -> Option<(Contention, Option<BlockCost>)> {
        if now - self.last.at < LOOK_EVERY {
            return None;
        }
        let look = Look { at: now, cpu: thread_cpu(), asleep: counters.asleep.time(), blocks: counters.blocks.get() };
        let before = std::mem::replace(&mut self.last, look);
        let contention = self.strain.since_last().ok()?;
        let blocks = look.blocks - before.blocks;
        // The first look has nothing to compare with.
        if blocks < ENOUGH_BLOCKS || before.at == Nanos::ZERO {
            return Some((contention, None));
        }
        if contention.preempted == 0 {
            self.own = Nanos((self.own.0 * 3 + own_cpu(&before, &look).0 / blocks) / 4);
        }
        // A thread that wakes up to a busy core waits for it, and that is part of what blocking costs here and now. Not
        // all of it: who wants the core for long has it from a thread that spins, too.
        let Calibration { cost, waking } = self.calibration;
        let queued = Nanos(contention.delayed.0 / blocks).min(cost.latency + cost.latency);
        let cost = BlockCost { cpu: self.own + waking, latency: cost.latency.max(queued) };
        let moved = differ(cost.cpu, self.told.cpu) || differ(cost.latency, self.told.latency);
        if moved {
            self.told = cost;
        }
        Some((contention, moved.then_some(cost)))
    }
}

/// What going to sleep and waking up took of this thread's CPU time between two looks: the CPU time less the time that it
/// was awake and not preempted.
fn own_cpu(before: &Look, now: &Look) -> Nanos {
    let awake = (now.at - before.at) - (now.asleep - before.asleep);
    (now.cpu - before.cpu) - awake
}

/// By more than an eighth: less is noise, and every window would have to be reconsidered.
fn differ(one: Nanos, other: Nanos) -> bool {
    one.0.abs_diff(other.0) > one.0.max(other.0) / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_block_took_is_the_cpu_time_that_being_awake_does_not_explain() {
        let us = Nanos::from_micros;
        let before = Look { at: us(100_000), cpu: us(5_000), asleep: us(80_000), blocks: 10 };
        // Awake for 30 ms of 100, and 31 ms on the core.
        let now = Look { at: us(200_000), cpu: us(36_000), asleep: us(150_000), blocks: 110 };
        assert_eq!(own_cpu(&before, &now), us(1_000));
        let stolen = Look { cpu: us(20_000), ..now };
        assert_eq!(own_cpu(&before, &stolen), Nanos::ZERO);
    }

    #[test]
    fn small_differences_are_none() {
        assert!(!differ(Nanos(10_000), Nanos(11_000)));
        assert!(differ(Nanos(10_000), Nanos(12_000)));
        assert!(!differ(Nanos::ZERO, Nanos::ZERO));
    }
}
