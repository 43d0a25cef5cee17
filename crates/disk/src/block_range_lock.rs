//! A lock on ranges of a disk's blocks, which keeps whole-block writes and sub-block writes apart.
//!
//! Direct I/O moves whole blocks. A write of less is done by reading the block, changing a part of it and writing it
//! back, and another write that lands in between would be undone. So a sub-block write locks its blocks exclusively,
//! while whole-block writes share theirs. They may come from any I/O thread.
//!
//! Ranges are coarse: the disk is striped over a few counters. A whole-block write costs an atomic addition per stripe
//! and never waits: where the lock is not to be had it is sent to a worker, which can wait. Disks that have no blocks
//! larger than a sector have no lock. `tests/block_range_lock.rs` walks through the interleavings with loom.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::PoisonError;

use crate::sync::{AtomicU32, Condvar, Mutex, Ordering};

const STRIPES: usize = 64;
/// Bytes of neighbouring disk that share a stripe.
pub(crate) const STRIPE_BYTES: u64 = 1 << 20;
/// A stripe is locked exclusively, or about to be.
const EXCLUSIVE: u32 = 1 << 31;

/// See the module's description.
#[derive(Default)]
pub(crate) struct BlockRangeLock {
    /// Per stripe: how many share it, and [`EXCLUSIVE`].
    stripes: Stripes,
    sleepers: Mutex<()>,
    changed: Condvar,
}

struct Stripes([AtomicU32; STRIPES]);

impl Default for Stripes {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

/// The stripes of a range of bytes, ascending and each once; ascending order is what keeps two waiters from waiting
/// for each other.
pub(crate) fn stripes(bytes: &Range<u64>) -> impl Iterator<Item = usize> + use<> {
    let first = bytes.start / STRIPE_BYTES;
    let count = (bytes.end.saturating_sub(1) / STRIPE_BYTES).saturating_sub(first) + 1;
    let start = (first % STRIPES as u64) as usize;
    let count = count.min(STRIPES as u64) as usize;
    // A range that wraps around covers a beginning and an end of the table.
    let wrapped = (start + count).saturating_sub(STRIPES);
    (0..wrapped).chain(start..(start + count).min(STRIPES))
}

impl BlockRangeLock {
    /// Locks `bytes` together with others; false if they are locked exclusively. Never waits.
    pub(crate) fn try_lock_shared(&self, bytes: &Range<u64>) -> bool {
        for (locked, stripe) in stripes(bytes).enumerate() {
            if self.stripes.0[stripe].fetch_add(1, Ordering::Acquire) & EXCLUSIVE != 0 {
                for stripe in stripes(bytes).take(locked + 1) {
                    self.unlock_stripe(stripe);
                }
                return false;
            }
        }
        true
    }

    /// As [`try_lock_shared`](Self::try_lock_shared), but waits until it can.
    pub(crate) fn lock_shared(&self, bytes: &Range<u64>) {
        while !self.try_lock_shared(bytes) {
            self.sleep_while(|| stripes(bytes).any(|s| self.stripes.0[s].load(Ordering::Relaxed) & EXCLUSIVE != 0));
        }
    }

    /// Takes back one [`lock_shared`](Self::lock_shared), or one [`try_lock_shared`](Self::try_lock_shared) that was true.
    pub(crate) fn unlock_shared(&self, bytes: &Range<u64>) {
        for stripe in stripes(bytes) {
            self.unlock_stripe(stripe);
        }
    }

    fn unlock_stripe(&self, stripe: usize) {
        if self.stripes.0[stripe].fetch_sub(1, Ordering::Release) == EXCLUSIVE + 1 {
            self.wake();
        }
    }

    /// Locks `bytes` for one alone: keeps new ones out, and waits until those that share them have unlocked them.
    pub(crate) fn lock_exclusive(&self, bytes: &Range<u64>) {
        for stripe in stripes(bytes) {
            let stripe = &self.stripes.0[stripe];
            while stripe.fetch_or(EXCLUSIVE, Ordering::Acquire) & EXCLUSIVE != 0 {
                self.sleep_while(|| stripe.load(Ordering::Relaxed) & EXCLUSIVE != 0);
            }
            self.sleep_while(|| stripe.load(Ordering::Acquire) != EXCLUSIVE);
        }
    }

    /// Takes back [`lock_exclusive`](Self::lock_exclusive).
    pub(crate) fn unlock_exclusive(&self, bytes: &Range<u64>) {
        for stripe in stripes(bytes) {
            self.stripes.0[stripe].fetch_and(!EXCLUSIVE, Ordering::Release);
        }
        self.wake();
    }

    #[cfg(test)]
    pub(crate) fn is_free(&self) -> bool {
        self.stripes.0.iter().all(|stripe| stripe.load(Ordering::Relaxed) == 0)
    }

    /// Runs `what` with `bytes` locked together with others, where there is a lock.
    pub(crate) fn shared<T>(lock: &Option<Self>, bytes: &Range<u64>, what: impl FnOnce() -> T) -> T {
        let Some(lock) = lock else { return what() };
        lock.lock_shared(bytes);
        let result = what();
        lock.unlock_shared(bytes);
        result
    }

    /// Runs `what` with `bytes` locked exclusively, where there is a lock.
    pub(crate) fn exclusive<T>(lock: &Option<Self>, bytes: &Range<u64>, what: impl FnOnce() -> T) -> T {
        let Some(lock) = lock else { return what() };
        lock.lock_exclusive(bytes);
        let result = what();
        lock.unlock_exclusive(bytes);
        result
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
