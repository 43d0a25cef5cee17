//! Keeps whole-block writes and sub-block writes of one disk apart.
//!
//! Direct I/O moves whole blocks. A write of less is done by reading the block, changing a part of it and writing it
//! back, and another write that lands in between would be undone. So a sub-block write needs its blocks for itself,
//! while ordinary writes run side by side as they like. They may come from any I/O thread.
//!
//! Ranges are coarse: the disk is striped over a few counters. An ordinary write costs an atomic addition per stripe
//! and never waits: where it cannot enter it is sent to a worker, which can. Disks that have no blocks larger than a
//! sector have no gate.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

const STRIPES: usize = 64;
/// Bytes of neighbouring disk that share a stripe.
const STRIPE_BYTES: u64 = 1 << 20;
/// Somebody wants the stripe, or has it, for himself.
const ALONE: u32 = 1 << 31;

/// See the module's description.
#[derive(Default)]
pub(crate) struct Gate {
    /// Per stripe: how many are inside together, and whether somebody is, or waits to be, alone.
    stripes: Stripes,
    sleepers: Mutex<()>,
    changed: Condvar,
}

struct Stripes([AtomicU32; STRIPES]);

impl Default for Stripes {
    fn default() -> Self {
        Self([const { AtomicU32::new(0) }; STRIPES])
    }
}

/// The stripes of a range of bytes, ascending and each once; ascending order is what keeps two waiters from waiting
/// for each other.
fn stripes(bytes: &Range<u64>) -> impl Iterator<Item = usize> + use<> {
    let first = bytes.start / STRIPE_BYTES;
    let count = (bytes.end.saturating_sub(1) / STRIPE_BYTES).saturating_sub(first) + 1;
    let start = (first % STRIPES as u64) as usize;
    let count = count.min(STRIPES as u64) as usize;
    // A range that wraps around covers a beginning and an end of the table.
    let wrapped = (start + count).saturating_sub(STRIPES);
    (0..wrapped).chain(start..(start + count).min(STRIPES))
}

impl Gate {
    /// Enters together with others; false if somebody is alone in there. Never waits.
    pub(crate) fn try_enter(&self, bytes: &Range<u64>) -> bool {
        for (entered, stripe) in stripes(bytes).enumerate() {
            if self.stripes.0[stripe].fetch_add(1, Ordering::Acquire) & ALONE != 0 {
                for stripe in stripes(bytes).take(entered + 1) {
                    self.leave_stripe(stripe);
                }
                return false;
            }
        }
        true
    }

    /// Enters together with others, after waiting for whoever is alone in there.
    pub(crate) fn enter(&self, bytes: &Range<u64>) {
        while !self.try_enter(bytes) {
            self.sleep_while(|| stripes(bytes).any(|s| self.stripes.0[s].load(Ordering::Relaxed) & ALONE != 0));
        }
    }

    /// Takes back one [`try_enter`](Self::try_enter) that was true, or one [`enter`](Self::enter).
    pub(crate) fn leave(&self, bytes: &Range<u64>) {
        for stripe in stripes(bytes) {
            self.leave_stripe(stripe);
        }
    }

    fn leave_stripe(&self, stripe: usize) {
        if self.stripes.0[stripe].fetch_sub(1, Ordering::Release) == ALONE + 1 {
            self.wake();
        }
    }

    /// Enters alone: waits for the others to leave, and keeps new ones out.
    pub(crate) fn enter_alone(&self, bytes: &Range<u64>) {
        for stripe in stripes(bytes) {
            let stripe = &self.stripes.0[stripe];
            while stripe.fetch_or(ALONE, Ordering::Acquire) & ALONE != 0 {
                self.sleep_while(|| stripe.load(Ordering::Relaxed) & ALONE != 0);
            }
            self.sleep_while(|| stripe.load(Ordering::Acquire) != ALONE);
        }
    }

    /// Takes back [`enter_alone`](Self::enter_alone).
    pub(crate) fn leave_alone(&self, bytes: &Range<u64>) {
        for stripe in stripes(bytes) {
            self.stripes.0[stripe].fetch_and(!ALONE, Ordering::Release);
        }
        self.wake();
    }

    /// Sleeps as long as `busy` says so. It is asked under the lock that [`wake`](Self::wake) takes after each change,
    /// so that no change falls between asking and sleeping.
    fn sleep_while(&self, busy: impl Fn() -> bool) {
        let mut guard = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        while busy() {
            guard = self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn wake(&self) {
        drop(self.sleepers.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_enter_together_and_none_while_one_is_alone() {
        let gate = Gate::default();
        assert!(gate.try_enter(&(0..4096)));
        assert!(gate.try_enter(&(512..1024)));
        gate.leave(&(0..4096));
        gate.leave(&(512..1024));
        gate.enter_alone(&(0..4096));
        assert!(!gate.try_enter(&(0..512)));
        assert!(gate.try_enter(&(STRIPE_BYTES..2 * STRIPE_BYTES)));
        gate.leave_alone(&(0..4096));
        assert!(gate.try_enter(&(0..512)));
    }

    #[test]
    fn a_refused_entry_leaves_nothing_behind() {
        let gate = Gate::default();
        gate.enter_alone(&(STRIPE_BYTES..STRIPE_BYTES + 512));
        assert!(!gate.try_enter(&(0..3 * STRIPE_BYTES)));
        gate.leave_alone(&(STRIPE_BYTES..STRIPE_BYTES + 512));
        for stripe in &gate.stripes.0 {
            assert_eq!(stripe.load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn a_range_names_each_of_its_stripes_once_in_ascending_order() {
        for (range, expected) in [
            (0..1, vec![0]),
            (STRIPE_BYTES - 1..STRIPE_BYTES + 1, vec![0, 1]),
            (63 * STRIPE_BYTES..65 * STRIPE_BYTES, vec![0, 63]),
            (5..1000 * STRIPE_BYTES, (0..64).collect()),
        ] {
            assert_eq!(stripes(&range).collect::<Vec<_>>(), expected, "{range:?}");
        }
    }

    #[test]
    fn one_alone_excludes_all_others_in_other_threads() {
        let gate = Gate::default();
        let inside = AtomicU32::new(0);
        std::thread::scope(|scope| {
            for worker in 0..4u64 {
                let (gate, inside) = (&gate, &inside);
                scope.spawn(move || {
                    for round in 0..500 {
                        let start = (round % 3) * STRIPE_BYTES;
                        let range = start..start + 2 * STRIPE_BYTES;
                        if (worker + round) % 2 == 0 {
                            gate.enter_alone(&(STRIPE_BYTES..3 * STRIPE_BYTES));
                            assert_eq!(inside.swap(1000, Ordering::Relaxed), 0);
                            inside.store(0, Ordering::Relaxed);
                            gate.leave_alone(&(STRIPE_BYTES..3 * STRIPE_BYTES));
                        } else {
                            gate.enter(&range);
                            assert!(inside.fetch_add(1, Ordering::Relaxed) < 1000);
                            inside.fetch_sub(1, Ordering::Relaxed);
                            gate.leave(&range);
                        }
                    }
                });
            }
        });
    }
}
