//! One window per I/O thread (QEMU up to 9.2).

use super::window_rule::WindowRule;
use crate::{Nanos, Parameters, Policy, Slot, Standing, Wait};

/// Grows while waits end a little too late for the window, shrinks when they are hopeless.
pub(crate) struct SharedWindow {
    rule: WindowRule,
    window: Nanos,
}

impl SharedWindow {
    pub(crate) fn new(parameters: &Parameters) -> Self {
        Self { rule: WindowRule::new(parameters), window: Nanos::ZERO }
    }
}

impl Policy for SharedWindow {
    fn window(&mut self, _before: &Standing) -> Nanos {
        self.window
    }

    fn observe(&mut self, wait: &Wait<'_>) {
        self.window = self.rule.next(self.window, wait.length);
    }

    fn forget(&mut self, _slot: Slot) {}

    fn window_now(&self) -> Nanos {
        self.window
    }

    fn observes_every_turn(&self) -> bool {
        true
    }

    fn resets(&self) -> u64 {
        self.rule.resets()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policies::testing::windows;

    #[test]
    fn a_window_starts_at_4_us_and_doubles_up_to_the_maximum() {
        let mut policy = SharedWindow::new(&Parameters::default());
        assert_eq!(windows(&mut policy, &[30_000; 5]), [4_000, 8_000, 16_000, 32_000, 32_000]);
        assert_eq!(windows(&mut policy, &[32_500; 2]), [32_768, 32_768]);
    }

    #[test]
    fn a_wait_within_the_window_keeps_it() {
        let mut policy = SharedWindow::new(&Parameters::default());
        assert_eq!(windows(&mut policy, &[3_000, 3_000, 4_000, 4_001]), [4_000, 4_000, 4_000, 8_000]);
    }

    #[test]
    fn a_hopeless_wait_resets_the_window_when_poll_shrink_is_unset_or_zero() {
        for shrink in [None, Some(0)] {
            let mut policy = SharedWindow::new(&Parameters { shrink, ..Parameters::default() });
            assert_eq!(windows(&mut policy, &[9_000, 9_000, 32_769, 9_000]), [4_000, 8_000, 0, 4_000]);
            assert_eq!((policy.window(&Standing::default()), policy.resets()), (Nanos(4_000), 1));
        }
    }

    #[test]
    fn where_spinning_is_switched_off_nothing_is_reset() {
        let mut policy = SharedWindow::new(&Parameters { max: Some(Nanos::ZERO), ..Parameters::default() });
        assert_eq!(windows(&mut policy, &[10_000, 300_000, 10_000]), [0; 3]);
        assert_eq!(policy.resets(), 0);
    }

    #[test]
    fn a_wait_as_long_as_the_maximum_neither_grows_a_window_nor_shrinks_it() {
        let mut policy = SharedWindow::new(&Parameters::default());
        assert_eq!(windows(&mut policy, &[32_768, 9_000, 32_768, 32_767]), [0, 4_000, 4_000, 8_000]);
    }

    #[test]
    fn there_is_nothing_to_learn_from_an_event_that_was_there_already() {
        let mut policy = SharedWindow::new(&Parameters::default());
        assert_eq!(windows(&mut policy, &[0, 9_000, 0, 0]), [0, 4_000, 4_000, 4_000]);
    }

    #[test]
    fn a_hopeless_wait_divides_the_window_when_poll_shrink_is_set() {
        for (shrink, after) in [(1, 8_000), (2, 4_000), (4, 2_000)] {
            let parameters = Parameters { shrink: Some(shrink), ..Parameters::default() };
            let mut policy = SharedWindow::new(&parameters);
            assert_eq!(windows(&mut policy, &[9_000, 9_000, 32_769]), [4_000, 8_000, after]);
            assert_eq!(policy.resets(), 0);
        }
    }

    #[test]
    fn a_window_never_starts_above_the_maximum() {
        let parameters = Parameters { max: Some(Nanos(3_000)), ..Parameters::default() };
        assert_eq!(windows(&mut SharedWindow::new(&parameters), &[2_000, 2_000]), [3_000, 3_000]);
    }
}
