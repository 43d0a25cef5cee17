//! A window per source (QEMU 10.0 to 11.0).

use super::per_slot::PerSlot;
use super::window_rule::WindowRule;
use crate::{Nanos, Parameters, Policy, Slot, Standing, Wait};

/// Moves the window of each source that was ready, and spins for the largest on the active list.
pub(crate) struct PerSourceWindow {
    rule: WindowRule,
    windows: PerSlot,
    largest: Nanos,
}

impl PerSourceWindow {
    pub(crate) fn new(parameters: &Parameters) -> Self {
        Self { rule: WindowRule::new(parameters), windows: PerSlot::default(), largest: Nanos::ZERO }
    }
}

impl Policy for PerSourceWindow {
    fn window(&mut self, _before: &Standing) -> Nanos {
        self.largest
    }

    fn observe(&mut self, wait: &Wait<'_>) {
        let mut largest = Nanos::ZERO;
        for source in wait.active {
            let mut window = self.windows.get(source.slot);
            if source.ready {
                window = self.rule.next(window, wait.length);
                self.windows.set(source.slot, window);
            }
            largest = largest.max(window);
        }
        self.largest = largest;
    }

    fn forget(&mut self, slot: Slot) {
        self.windows.forget(slot);
    }

    fn window_now(&self) -> Nanos {
        self.largest
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
    use crate::policies::testing::{active, wait};

    #[test]
    fn only_a_ready_source_moves_its_window_and_the_largest_counts() {
        let mut policy = PerSourceWindow::new(&Parameters::default());
        let mut after = |length, list: &[_]| {
            policy.observe(&wait(length, list));
            policy.window_now().0
        };
        assert_eq!(after(9_000, &[active(0, true), active(1, false)]), 4_000);
        assert_eq!(after(9_000, &[active(0, true), active(1, false)]), 8_000);
        assert_eq!(after(9_000, &[active(0, false), active(1, true)]), 8_000);
        assert_eq!(after(50_000, &[active(0, true), active(1, false)]), 4_000);
        assert_eq!(after(50_000, &[active(0, false), active(1, true)]), 0);
        assert_eq!(policy.resets(), 2);
    }

    #[test]
    fn a_source_that_left_the_active_list_does_not_count() {
        let mut policy = PerSourceWindow::new(&Parameters::default());
        policy.observe(&wait(9_000, &[active(0, true), active(1, false)]));
        policy.observe(&wait(9_000, &[active(1, false)]));
        assert_eq!(policy.window_now(), Nanos::ZERO);
    }

    #[test]
    fn a_forgotten_slot_starts_over() {
        let mut policy = PerSourceWindow::new(&Parameters::default());
        policy.observe(&wait(9_000, &[active(0, true)]));
        policy.observe(&wait(9_000, &[active(0, true)]));
        policy.forget(Slot(0));
        policy.observe(&wait(9_000, &[active(0, true)]));
        assert_eq!(policy.window_now(), Nanos(4_000));
    }
}
