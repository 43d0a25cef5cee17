//! The wake-up protocol: how another thread makes sure that a loop sees something, at the price of a system call only
//! when the loop sleeps.
//!
//! Both sides store, then look at the other's flag, with a full fence between (Dekker's pattern):
//!
//! ```text
//! ringer:  pending = true;  fence;  if sleeping { write the eventfd }
//! loop:    sleeping = true; fence;  if !pending { block on the eventfd }
//! ```
//!
//! In any order at least one of the two sees the other's store, so nothing is lost between the last look and the
//! block. `tests/doorbell.rs` walks through all interleavings with loom.

use crate::sync::{AtomicBool, Ordering, fence};

/// Two flags between a loop and those who ring for it.
#[derive(Debug)]
pub struct Doorbell {
    pending: AtomicBool,
    sleeping: AtomicBool,
}

impl Default for Doorbell {
    fn default() -> Self {
        Self { pending: AtomicBool::new(false), sleeping: AtomicBool::new(false) }
    }
}

impl Doorbell {
    /// Any thread: says that there is something to see. Returns whether the loop sleeps and must be woken.
    ///
    /// Whatever is to be seen must have been stored before.
    pub fn ring(&self) -> bool {
        self.pending.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        self.sleeping.load(Ordering::Relaxed)
    }

    /// The loop: whether somebody rang. One load.
    pub fn rang(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }

    /// The loop: takes note of the ringing. What was stored before it is visible from here on.
    pub fn answer(&self) -> bool {
        self.pending.swap(false, Ordering::AcqRel)
    }

    /// The loop: about to block. False if somebody rang first, and it must not.
    pub fn arm(&self) -> bool {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        !self.rang()
    }

    /// The loop: awake again.
    pub fn disarm(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }
}
