//! When a source that has no events is left to the monitor, in the loop and in a replay alike.
//!
//! QEMU's `remove_idle_poll_handlers` (`util/aio-posix.c` of 10.0.2) has the same limit, 7 s to the nanosecond. It looks at the end
//! of each spin, and so never while a thread does not spin; here somebody looks four times in that time, spinning or not.

use crate::Nanos;

/// `poll-idle-ms`, and when somebody last looked.
#[derive(Clone, Copy, Debug)]
pub struct Idleness {
    after: Nanos,
    looked: Nanos,
}

impl Idleness {
    /// `poll-idle-ms` where it is left unset.
    pub const DEFAULT: Nanos = Nanos::from_millis(7_000);

    /// A source is idle when it has had no event for `after`.
    pub const fn new(after: Nanos) -> Self {
        Self { after, looked: Nanos::ZERO }
    }

    /// Whether to look for idle sources `now`; says so once for each time that it is due.
    pub fn is_due(&mut self, now: Nanos) -> bool {
        let is_due = now - self.looked >= Nanos(self.after.0 / 4);
        if is_due {
            self.looked = now;
        }
        is_due
    }

    /// Whether a source is idle `now` that had its last event at `last_event`.
    pub fn is_idle(&self, last_event: Nanos, now: Nanos) -> bool {
        now - last_event >= self.after
    }

    /// Another `poll-idle-ms`.
    pub const fn set_after(&mut self, after: Nanos) {
        self.after = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_idle_seven_seconds_after_its_last_event_to_the_nanosecond() {
        let idleness = Idleness::new(Idleness::DEFAULT);
        for (last_event, now, is_idle) in [
            (0, 6_999_999_999, false),
            (0, 7_000_000_000, true),
            (1, 7_000_000_000, false),
            (5_000_000_000, 11_999_999_999, false),
            (5_000_000_000, 12_000_000_000, true),
        ] {
            assert_eq!(idleness.is_idle(Nanos(last_event), Nanos(now)), is_idle, "{last_event} {now}");
        }
    }

    #[test]
    fn somebody_looks_four_times_in_that_time() {
        let mut idleness = Idleness::new(Nanos(4_000));
        let due = [999, 1_000, 1_001, 1_999, 2_000, 9_000, 9_999].map(|now| idleness.is_due(Nanos(now)));
        assert_eq!(due, [false, true, false, false, true, true, false]);
        idleness.set_after(Nanos::ZERO);
        assert!(idleness.is_due(Nanos(9_999)) && idleness.is_idle(Nanos(9_999), Nanos(9_999)));
    }
}
