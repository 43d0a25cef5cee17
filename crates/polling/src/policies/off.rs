//! Never spins.

use crate::{Nanos, Policy, Slot, Standing, Wait};

/// Blocks at once, always: the frugal end of the scale.
pub(crate) struct Off;

impl Policy for Off {
    fn window(&mut self, _before: &Standing) -> Nanos {
        Nanos::ZERO
    }

    fn observe(&mut self, _wait: &Wait<'_>) {}

    fn forget(&mut self, _slot: Slot) {}

    fn window_now(&self) -> Nanos {
        Nanos::ZERO
    }

    fn weighs_block_cost(&self) -> bool {
        false
    }
}
