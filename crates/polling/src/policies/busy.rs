//! Never blocks.

use crate::{Nanos, Policy, Slot, Standing, Wait};

/// Spins until there is work, always: the fast end of the scale, at a core per I/O thread.
pub(crate) struct Busy {
    window: Nanos,
}

impl Busy {
    /// A `max` of zero means "never spin" to every policy, to this one too.
    pub(crate) fn new(max: Nanos) -> Self {
        Self { window: if max == Nanos::ZERO { Nanos::ZERO } else { Nanos::MAX } }
    }
}

impl Policy for Busy {
    fn window(&mut self, _before: &Standing) -> Nanos {
        self.window
    }

    fn observe(&mut self, _wait: &Wait<'_>) {}

    fn forget(&mut self, _slot: Slot) {}

    fn window_now(&self) -> Nanos {
        self.window
    }

    fn weighs_block_cost(&self) -> bool {
        false
    }
}
