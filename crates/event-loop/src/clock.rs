//! The loop's clock.

use egret_polling::Nanos;

/// The monotonic clock now; about 20 ns, so a phase of the turn reads it once and hands it down.
pub fn now() -> Nanos {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}
