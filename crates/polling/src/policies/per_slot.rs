//! One number per source.

use crate::{Nanos, Slot};

/// Nanoseconds by slot; a slot never written holds zero.
#[derive(Default)]
pub(crate) struct PerSlot(Vec<Nanos>);

impl PerSlot {
    pub(crate) fn get(&self, slot: Slot) -> Nanos {
        self.0.get(slot.0 as usize).copied().unwrap_or_default()
    }

    /// Allocates at most when `slot` is higher than any before.
    pub(crate) fn set(&mut self, slot: Slot, value: Nanos) {
        let index = slot.0 as usize;
        if index >= self.0.len() {
            self.0.resize(index + 1, Nanos::ZERO);
        }
        self.0[index] = value;
    }

    pub(crate) fn forget(&mut self, slot: Slot) {
        if let Some(value) = self.0.get_mut(slot.0 as usize) {
            *value = Nanos::ZERO;
        }
    }
}
