//! What a wait costs: the currency in which spinning and blocking are compared.

use crate::Nanos;

/// What it costs an I/O thread to block once instead of spinning on.
///
/// The loop measures it when a thread starts (a few hundred wake-up ping-pongs) and may correct it at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCost {
    /// CPU time of going to sleep and of being woken, in this thread and in whoever wakes it.
    pub cpu: Nanos,
    /// How much later than its event a blocked thread runs again.
    pub latency: Nanos,
}

impl BlockCost {
    /// K: the CPU time of a block plus `price` times the latency it adds.
    ///
    /// `price` is `poll-price`: how many nanoseconds of CPU one nanosecond of latency is worth. 0 says that latency is
    /// free, and K is the CPU time alone.
    pub fn total(self, price: u32) -> Nanos {
        self.cpu + Nanos(self.latency.0.saturating_mul(u64::from(price)))
    }

    /// A cost whose [`total`](Self::total) at price 1 is `k`, two fifths of it CPU.
    ///
    /// That is about the share measured for a wake-up between two pinned threads; it serves where only K is known.
    pub fn from_total(k: Nanos) -> Self {
        let cpu = Nanos(k.0 / 5 * 2);
        Self { cpu, latency: k - cpu }
    }
}

impl Default for BlockCost {
    /// 30 us, for a thread that could not be calibrated.
    fn default() -> Self {
        Self::from_total(Nanos::from_micros(30))
    }
}

/// What the kernel tells of an I/O thread's struggle for its core, since it was asked last.
///
/// On Linux: the first two fields of `/proc/PID/task/TID/schedstat` and the thread's involuntary context switches.
/// Asking ten times a second is plenty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contention {
    /// CPU time the thread got.
    pub ran: Nanos,
    /// Time it was runnable and somebody else had its core.
    pub delayed: Nanos,
    /// How often it was taken off its core while it wanted to go on.
    pub preempted: u64,
}

impl Contention {
    /// What one preemption can explain at most: a generous scheduler slice.
    const SLICE: u64 = 4_000_000;

    /// The delay that preemption explains, per `units` of run time.
    ///
    /// A thread that mostly sleeps is delayed a little at every wake-up and nobody wants its core for that: without
    /// preemptions there is no contention, whatever the delay says.
    pub(crate) fn delay_per(self, units: u64) -> u64 {
        let explained = self.preempted.saturating_mul(Self::SLICE).min(self.delayed.0);
        explained.saturating_mul(units) / self.ran.0.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn price_multiplies_latency_and_not_cpu() {
        let cost = BlockCost { cpu: Nanos(15_000), latency: Nanos(28_000) };
        assert_eq!(cost.total(0), Nanos(15_000));
        assert_eq!(cost.total(1), Nanos(43_000));
        assert_eq!(cost.total(3), Nanos(99_000));
    }

    #[test]
    fn a_total_splits_and_adds_up_again() {
        for k in [0, 1, 4, 5_000, 30_000, u64::MAX] {
            assert_eq!(BlockCost::from_total(Nanos(k)).total(1), Nanos(k));
        }
        assert_eq!(BlockCost::default(), BlockCost { cpu: Nanos(12_000), latency: Nanos(18_000) });
    }

    #[test]
    fn delay_without_preemption_is_not_contention() {
        let slow_wakeups = Contention { ran: Nanos(1_000_000), delayed: Nanos(500_000), preempted: 0 };
        assert_eq!(slow_wakeups.delay_per(16), 0);
        let shared_core = Contention { preempted: 1, ..slow_wakeups };
        assert_eq!(shared_core.delay_per(16), 8);
        // A preemption explains a slice, and not all that a thread is ever late.
        let late = Contention { ran: Nanos(8_000_000), delayed: Nanos(40_000_000), preempted: 2 };
        assert_eq!(late.delay_per(16), 16);
        assert_eq!(Contention { ran: Nanos::ZERO, ..late }.delay_per(2), 16_000_000);
    }
}
