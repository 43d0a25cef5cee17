//! One window for every wait.

use crate::{Nanos, Policy, Slot, Standing, Wait};

/// Spins for so long, always, and then blocks: what the lab draws the line with that learning has to beat. Its ends are the
/// frugal one, which never spins, and the fast one, which never blocks, at a core per I/O thread.
pub(crate) struct Fixed {
    window: Nanos,
}

impl Fixed {
    pub(crate) fn new(window: Nanos) -> Self {
        Self { window }
    }
}

impl Policy for Fixed {
    fn window(&mut self, _before: &Standing) -> Nanos {
        self.window
    }

    fn observe(&mut self, _wait: &Wait<'_>) {}

    fn forget(&mut self, _slot: Slot) {}

    fn window_now(&self) -> Nanos {
        self.window
    }
}
