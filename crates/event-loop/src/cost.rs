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
        Some((contention, self.reconsider(&before, &look, contention)))
    }

    /// What a block costs, if that has changed from what was told by the second of two looks.
    fn reconsider(&mut self, before: &Look, look: &Look, contention: Contention) -> Option<BlockCost> {
        let blocks = look.blocks - before.blocks;
        // The first look has nothing to compare with.
        if blocks < ENOUGH_BLOCKS || before.at == Nanos::ZERO {
            return None;
        }
        if contention.preempted == 0 {
            self.own = Nanos((self.own.0 * 3 + own_cpu(before, look).0 / blocks) / 4);
        }
        // A thread that wakes up to a busy core waits for it, and that is part of what blocking costs here and now. Not
        // all of it: who wants the core for long has it from a thread that spins, too.
        let Calibration { cost, waking } = self.calibration;
        let queued = Nanos(contention.delayed.0 / blocks).min(cost.latency + cost.latency);
        let cost = BlockCost { cpu: self.own + waking, latency: cost.latency.max(queued) };
        let moved = differ(cost.cpu, self.told.cpu) || differ(cost.latency, self.told.latency);
        moved.then(|| {
            self.told = cost;
            cost
        })
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

    /// A block takes 10 us of CPU time, 4 of them of whoever wakes, and 20 us in all.
    fn running() -> RunningCost {
        let us = Nanos::from_micros;
        let calibration = Calibration { cost: BlockCost { cpu: us(10), latency: us(20) }, waking: us(4) };
        RunningCost::new(calibration, Strain::of(rustix::thread::gettid()).unwrap())
    }

    /// Asleep for a tenth of a second but for `blocks`, each of which took so much CPU time, and waited so long for the core.
    fn reconsidered(running: &mut RunningCost, blocks: u64, each: Nanos, queued: Nanos) -> Option<BlockCost> {
        let before = Look { at: Nanos::from_millis(100), cpu: Nanos(5), asleep: Nanos(7), blocks: 3 };
        let look = Look {
            at: Nanos::from_millis(200),
            cpu: Nanos(5 + blocks * each.0),
            asleep: Nanos::from_millis(100) + Nanos(7),
            blocks: 3 + blocks,
        };
        running.reconsider(&before, &look, Contention { delayed: Nanos(blocks * queued.0), ..Contention::default() })
    }

    #[test]
    fn a_block_that_costs_more_than_was_told_is_told_again_bit_by_bit() {
        let us = Nanos::from_micros;
        let mut running = running();
        assert_eq!(running.cost(), BlockCost { cpu: us(10), latency: us(20) });
        assert_eq!(reconsidered(&mut running, 101, us(6), us(20)), None, "as it was");
        let dearer = BlockCost { cpu: us(12), latency: us(20) };
        assert_eq!(reconsidered(&mut running, 101, us(14), us(3)), Some(dearer), "a quarter of 8 us more");
        assert_eq!(running.cost(), dearer);
        let slower = |latency| Some(BlockCost { cpu: us(12), latency });
        assert_eq!(reconsidered(&mut running, 101, us(8), us(30)), slower(us(30)), "it waits for the core");
        assert_eq!(reconsidered(&mut running, 101, us(8), us(500)), slower(us(40)), "no more than that");
        assert_eq!(reconsidered(&mut running, 101, us(8), us(0)), slower(us(20)));
    }

    #[test]
    fn few_blocks_and_the_first_look_and_preemption_say_nothing_of_what_one_costs() {
        let us = Nanos::from_micros;
        let mut running = running();
        assert_eq!(reconsidered(&mut running, 15, us(1000), us(1000)), None);
        assert!(reconsidered(&mut running, 16, us(1000), us(0)).is_some());
        let look = Look { at: Nanos::from_millis(100), cpu: Nanos::from_millis(100), asleep: Nanos::ZERO, blocks: 100 };
        let mut running = self::running();
        assert_eq!(running.reconsider(&Look::default(), &look, Contention::default()), None);
        let before = Look { at: Nanos(1), ..Look::default() };
        let preempted = Contention { preempted: 1, ..Contention::default() };
        let look = Look { cpu: Nanos::from_millis(1000), ..look };
        assert_eq!(running.reconsider(&before, &look, preempted), None);
        assert!(running.reconsider(&before, &look, Contention::default()).is_some());
    }

    #[test]
    fn the_kernel_is_asked_ten_times_a_second() {
        let mut running = running();
        let counters = LoopCounters::default();
        let asked: Vec<_> = [99, 100, 101, 199, 200, 201, 350, 449, 450]
            .into_iter()
            .filter(|&ms| running.look(Nanos::from_millis(ms), &counters).is_some())
            .collect();
        assert_eq!(asked, [100, 200, 350, 450]);
    }

    #[test]
    fn small_differences_are_none() {
        assert!(!differ(Nanos(10_000), Nanos(11_000)));
        assert!(differ(Nanos(10_000), Nanos(12_000)));
        assert!(!differ(Nanos::ZERO, Nanos::ZERO));
    }
}
