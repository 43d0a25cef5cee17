//! The loop's clock.

use egret_polling::Nanos;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// The monotonic clock now; about 20 ns, so a phase of the turn reads it once and hands it down.
pub fn now() -> Nanos {
    nanos(clock_gettime(ClockId::Monotonic))
}

/// How often a loop reads the clock for the requests of its sources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClockReads {
    /// Once for a phase of the turn: all its requests have the same time.
    #[default]
    ByPhase,
    /// For each request that begins, and for each that ends, which so has a time of its own. Only to measure what that costs.
    ByRequest,
}

/// What a clock shows.
pub(crate) fn nanos(time: Timespec) -> Nanos {
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_a_thousand_million_nanoseconds() {
        assert_eq!(nanos(Timespec { tv_sec: 3, tv_nsec: 7 }), Nanos(3_000_000_007));
    }
}
