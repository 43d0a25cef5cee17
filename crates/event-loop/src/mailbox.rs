//! How other threads talk to a loop: commands in a box, and a doorbell.

use std::sync::PoisonError;

use crate::EventNotifier;
use crate::doorbell::Doorbell;
use crate::sync::Mutex;

/// A box that any thread puts things into and one loop empties.
///
/// The lock is the senders' business: the loop takes it only when the doorbell rang, which no request does.
pub(crate) struct Mailbox<T> {
    letters: Mutex<Vec<T>>,
    bell: Doorbell,
    /// What the loop sleeps on.
    pub(crate) wake: EventNotifier,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { letters: Mutex::new(Vec::new()), bell: Doorbell::default(), wake: EventNotifier::new()? })
    }

    pub(crate) fn send(&self, letter: T) {
        self.letters.lock().unwrap_or_else(PoisonError::into_inner).push(letter);
        if self.bell.ring() {
            self.wake.set();
        }
    }

    pub(crate) const fn bell(&self) -> &Doorbell {
        &self.bell
    }

    /// Empties the box, if the bell rang.
    pub(crate) fn take(&self) -> Vec<T> {
        if !self.bell.answer() {
            return Vec::new();
        }
        std::mem::take(&mut *self.letters.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
