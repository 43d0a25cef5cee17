//! The one unit of time.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

/// A length of time, or a moment on the loop's own monotonic clock, in nanoseconds.
///
/// Arithmetic saturates: a clock that steps back or a sum that would overflow costs precision, never a panic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// No time at all.
    pub const ZERO: Self = Self(0);
    /// Longer than anything: a window of `MAX` never ends.
    pub const MAX: Self = Self(u64::MAX);

    /// `us` microseconds.
    pub const fn from_micros(us: u64) -> Self {
        Self(us.saturating_mul(1_000))
    }

    /// Whether this window is within an eighth of the largest, `max`: "near the maximum", where windows are reported.
    pub fn is_near(self, max: Self) -> bool {
        self > Self::ZERO && self >= max - Self(max.0 / 8)
    }

    /// `ms` milliseconds.
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000_000))
    }
}

impl Add for Nanos {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Nanos {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Nanos {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl From<Duration> for Nanos {
    fn from(length: Duration) -> Self {
        Self(u64::try_from(length.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl From<Nanos> for Duration {
    fn from(length: Nanos) -> Self {
        Self::from_nanos(length.0)
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ns", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_near_the_largest_in_its_last_eighth_and_none_is_near_nothing() {
        for (window, max, is_near) in [
            (28_672, 32_768, true),
            (28_671, 32_768, false),
            (32_768, 32_768, true),
            (u64::MAX, 32_768, true),
            (7, 7, true),
            (6, 7, false),
            (0, 7, false),
            (0, 0, false),
            (1, 0, true),
        ] {
            assert_eq!(Nanos(window).is_near(Nanos(max)), is_near, "{window} {max}");
        }
    }

    #[test]
    fn lengths_are_turned_into_nanoseconds_and_back_and_none_overflows() {
        assert_eq!((Nanos::from_micros(3), Nanos::from_millis(3)), (Nanos(3_000), Nanos(3_000_000)));
        assert_eq!((Nanos::from_micros(u64::MAX), Nanos::from_millis(u64::MAX)), (Nanos::MAX, Nanos::MAX));
        assert_eq!((Nanos::MAX + Nanos(1), Nanos(1) - Nanos(2)), (Nanos::MAX, Nanos::ZERO));
        let mut sum = Nanos(2);
        sum += Nanos(3);
        assert_eq!(sum, Nanos(5));
        assert_eq!(Nanos::from(Duration::MAX), Nanos::MAX);
        assert_eq!(Duration::from(Nanos::from(Duration::new(2, 3))), Duration::new(2, 3));
        assert_eq!(Nanos(12).to_string(), "12 ns");
    }
}
