//! A weighted interval per source and one window (QEMU 11.1, `poll-weight`).

use super::per_slot::PerSlot;
use crate::{Nanos, Parameters, Policy, PolicyKind, Slot, Standing, Wait};

/// Follows, per source, a moving average of the time between events, and spins for the largest that is not hopeless.
pub(crate) struct Weighted {
    max: Nanos,
    grow: u64,
    shrink: u64,
    weight: u32,
    intervals: PerSlot,
    window: Nanos,
    /// How often an interval has been forgotten.
    resets: u64,
}

impl Weighted {
    pub(crate) fn new(parameters: &Parameters) -> Self {
        Self {
            max: parameters.max_for(PolicyKind::Weighted),
            grow: parameters.grow_or_default(),
            shrink: parameters.shrink_or_default(),
            weight: parameters.weight_or_default(),
            intervals: PerSlot::default(),
            window: Nanos::ZERO,
            resets: 0,
        }
    }

    /// An interval longer than any window will be is forgotten: waiting for it is the monitor's business.
    fn keep(&mut self, slot: Slot, interval: Nanos) -> Nanos {
        let is_hopeless = interval > self.max;
        self.resets += u64::from(is_hopeless);
        let kept = if is_hopeless { Nanos::ZERO } else { interval };
        self.intervals.set(slot, kept);
        kept
    }
}

impl Policy for Weighted {
    fn window(&mut self, _before: &Standing) -> Nanos {
        self.window
    }

    fn observe(&mut self, wait: &Wait<'_>) {
        if self.max == Nanos::ZERO {
            // Spinning is switched off: QEMU adjusts nothing then, and nothing is started over.
            return;
        }
        let mut longest_ready: Option<Nanos> = None;
        for source in wait.active {
            let interval = self.intervals.get(source.slot);
            if source.ready {
                let interval = if interval == Nanos::ZERO {
                    wait.length
                } else {
                    Nanos(interval.0 - (interval.0 >> self.weight)) + Nanos(wait.length.0 >> self.weight)
                };
                longest_ready = longest_ready.max(Some(self.keep(source.slot, interval)));
            } else if interval != Nanos::ZERO {
                self.keep(source.slot, interval + wait.length);
            }
        }
        let Some(adjusted) = longest_ready else {
            return;
        };
        if adjusted > self.window {
            self.window = adjusted.max(Nanos(self.window.0.saturating_mul(self.grow))).min(self.max);
        } else if adjusted.0 < self.window.0 / self.shrink {
            self.window.0 /= self.shrink;
        }
    }

    fn forget(&mut self, slot: Slot) {
        self.intervals.forget(slot);
    }

    fn window_now(&self) -> Nanos {
        self.window
    }

    fn observes_every_turn(&self) -> bool {
        true
    }

    fn resets(&self) -> u64 {
        self.resets
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::testing::{active, wait, windows};

    /// Feeds `waits` to one source; returns its interval and the window after each.
    fn one_source(waits: &[u64]) -> (Vec<u64>, Vec<u64>) {
        let mut policy = Weighted::new(&Parameters::default());
        waits
            .iter()
            .map(|&length| {
                policy.observe(&wait(length, &[active(0, true)]));
                (policy.intervals.get(Slot(0)).0, policy.window.0)
            })
            .unzip()
    }

    #[test]
    fn a_steady_source_settles_at_its_interval() {
        let (intervals, windows) = one_source(&[10_000; 3]);
        assert_eq!(intervals, [10_000; 3]);
        assert_eq!(windows, [10_000; 3]);
    }

    #[test]
    fn a_slowing_source_pulls_the_window_after_it() {
        let (intervals, windows) = one_source(&[8_000, 16_000, 40_000, 40_000]);
        assert_eq!(intervals, [8_000, 9_000, 12_875, 16_266]);
        assert_eq!(windows, [8_000, 16_000, 16_000, 32_000]);
    }

    #[test]
    fn events_that_were_there_already_pull_the_interval_down_and_the_window_after_it() {
        let (intervals, windows) = one_source(&[16_000, 0, 0, 0, 0, 0, 0]);
        assert_eq!(intervals, [16_000, 14_000, 12_250, 10_719, 9_380, 8_208, 7_182]);
        assert_eq!(windows, [16_000, 16_000, 16_000, 16_000, 16_000, 16_000, 8_000]);
    }

    #[test]
    fn an_interval_that_is_forgotten_is_a_reset_and_a_window_that_shrinks_is_none() {
        let mut policy = Weighted::new(&Parameters::default());
        for (length, resets) in [(16_000, 0), (40_000, 0), (300_000, 1), (300_000, 2), (1_000, 2)] {
            policy.observe(&wait(length, &[active(0, true)]));
            assert_eq!(policy.resets(), resets);
        }
    }

    #[test]
    fn where_spinning_is_switched_off_nothing_is_forgotten() {
        let mut policy = Weighted::new(&Parameters { max: Some(Nanos::ZERO), ..Parameters::default() });
        assert_eq!(windows(&mut policy, &[10_000, 300_000, 10_000]), [0; 3]);
        assert_eq!(policy.resets(), 0);
    }

    #[test]
    fn a_first_wait_beyond_the_maximum_is_forgotten() {
        let (intervals, windows) = one_source(&[40_000, 5_000]);
        assert_eq!(intervals, [0, 5_000]);
        assert_eq!(windows, [0, 5_000]);
    }

    #[test]
    fn a_few_short_waits_do_not_shrink_the_window() {
        let (intervals, windows) = one_source(&[20_000, 1_000, 1_000]);
        assert_eq!(intervals, [20_000, 17_625, 15_547]);
        assert_eq!(windows, [20_000, 20_000, 20_000]);
    }

    /// The window after one source was seen at `first` and, with its interval forgotten, at `second`.
    fn window_after(first: u64, second: u64) -> u64 {
        let mut policy = Weighted::new(&Parameters::default());
        policy.observe(&wait(first, &[active(0, true)]));
        policy.forget(Slot(0));
        policy.observe(&wait(second, &[active(0, true)]));
        policy.window.0
    }

    #[test]
    fn an_interval_as_long_as_the_maximum_is_kept_and_one_above_it_is_not() {
        assert_eq!(one_source(&[32_768]), (vec![32_768], vec![32_768]));
        assert_eq!(one_source(&[32_769]), (vec![0], vec![0]));
        let mut policy = Weighted::new(&Parameters::default());
        let mut ages = |length, a, b| {
            policy.observe(&wait(length, &[active(0, a), active(1, b)]));
            policy.intervals.get(Slot(0)).0
        };
        assert_eq!(ages(4_000, true, false), 4_000);
        assert_eq!(ages(28_768, false, true), 32_768);
        assert_eq!(ages(1, false, true), 0);
    }

    #[test]
    fn a_window_grows_for_an_interval_above_it_and_not_for_one_as_long() {
        assert_eq!(window_after(10_000, 10_000), 10_000);
        assert_eq!(window_after(10_000, 10_001), 20_000);
        assert_eq!(window_after(10_000, 20_000), 20_000);
        assert_eq!(window_after(10_000, 20_001), 20_001);
        assert_eq!(window_after(20_000, 20_001), 32_768);
    }

    #[test]
    fn a_window_shrinks_for_an_interval_below_its_half_and_not_for_one_of_half_its_length() {
        assert_eq!(window_after(10_000, 5_000), 10_000);
        assert_eq!(window_after(10_000, 4_999), 5_000);
        assert_eq!(window_after(10_001, 5_000), 10_001);
    }

    #[test]
    fn grow_shrink_and_weight_are_what_was_asked_for() {
        let parameters =
            Parameters { grow: Some(3), shrink: Some(4), weight: Some(1), max: Some(Nanos(100_000)), price: None };
        let mut policy = Weighted::new(&parameters);
        let mut after = |length| {
            policy.observe(&wait(length, &[active(0, true)]));
            (policy.intervals.get(Slot(0)).0, policy.window.0)
        };
        assert_eq!(after(8_000), (8_000, 8_000));
        assert_eq!(after(10_000), (9_000, 24_000));
        assert_eq!(after(4_000), (6_500, 24_000));
        assert_eq!(after(4_000), (5_250, 6_000));
    }

    #[test]
    fn a_source_without_an_event_ages_by_the_wait() {
        let mut policy = Weighted::new(&Parameters::default());
        let mut after = |length, a, b| {
            policy.observe(&wait(length, &[active(0, a), active(1, b)]));
            (policy.intervals.get(Slot(0)).0, policy.intervals.get(Slot(1)).0, policy.window.0)
        };
        assert_eq!(after(4_000, true, false), (4_000, 0, 4_000));
        assert_eq!(after(20_000, false, true), (24_000, 20_000, 20_000));
        assert_eq!(after(4_000, true, false), (21_500, 24_000, 32_768));
    }

    #[test]
    fn a_wait_that_no_active_source_ended_leaves_the_window_alone() {
        let mut policy = Weighted::new(&Parameters::default());
        policy.observe(&wait(10_000, &[active(0, true)]));
        policy.observe(&wait(1_000_000, &[active(0, false)]));
        assert_eq!(policy.window_now(), Nanos(10_000));
        policy.observe(&wait(1_000_000, &[]));
        assert_eq!(policy.window_now(), Nanos(10_000));
        assert_eq!(policy.window(&Standing::default()), Nanos(10_000));
    }

    #[test]
    fn a_forgotten_slot_starts_over() {
        let mut policy = Weighted::new(&Parameters::default());
        policy.observe(&wait(20_000, &[active(0, true)]));
        policy.forget(Slot(0));
        policy.observe(&wait(8_000, &[active(0, true)]));
        assert_eq!(policy.intervals.get(Slot(0)), Nanos(8_000));
    }
}
