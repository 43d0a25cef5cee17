//! The chains that a queue has popped and not used yet, by their heads.

use std::mem;

use super::RingError;

pub(super) struct Chains {
    /// How many descriptors of the ring each takes; 0 when it is not in flight.
    taken: Box<[u16]>,
    count: u16,
}

impl Chains {
    pub(super) fn new(size: u16) -> Self {
        Self { taken: vec![0; size.into()].into(), count: 0 }
    }

    pub(super) fn count(&self) -> u16 {
        self.count
    }

    pub(super) fn is_in_flight(&self, head: u16) -> bool {
        self.taken.get(usize::from(head)).is_some_and(|taken| *taken > 0)
    }

    /// The chain at `head`, which is less than the queue's size, takes `taken` descriptors: one at least.
    #[inline]
    pub(super) fn begin(&mut self, head: u16, taken: u16) -> Result<(), RingError> {
        let entry = &mut self.taken[usize::from(head)];
        if *entry > 0 {
            return Err(RingError::Duplicate(head));
        }
        *entry = taken;
        self.count += 1;
        Ok(())
    }

    /// Ends a chain's flight; returns how many descriptors it takes.
    ///
    /// # Panics
    ///
    /// When it is not in flight.
    #[inline]
    pub(super) fn end(&mut self, head: u16) -> u16 {
        let taken = self.taken.get_mut(usize::from(head)).map_or(0, mem::take);
        assert!(taken > 0, "descriptor chain {head} is not in flight");
        self.count -= 1;
        taken
    }
}
