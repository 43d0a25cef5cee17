//! How other threads talk to a loop: commands in a box, and a doorbell.

use std::sync::PoisonError;

use crate::EventNotifier;
use crate::doorbell::Doorbell;
use crate::sync::Mutex;

/// A box that any thread puts things into and one loop empties, and closes at its end.
///
/// The lock is the senders' business: the loop takes it only when the doorbell rang, which no request does.
pub(crate) struct Mailbox<T> {
    /// None when it is closed.
    letters: Mutex<Option<Vec<T>>>,
    pub(crate) bell: Doorbell,
    /// What the loop sleeps on.
    pub(crate) wake: EventNotifier,
}

impl<T> Mailbox<T> {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { letters: Mutex::new(Some(Vec::new())), bell: Doorbell::default(), wake: EventNotifier::new()? })
    }

    /// Puts a letter in. Where the box is closed it is dropped.
    pub(crate) fn send(&self, letter: T) {
        match &mut *self.letters.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(letters) => letters.push(letter),
            None => return,
        }
        if self.bell.ring() {
            self.wake.set();
        }
    }

    /// Empties the box, if the bell rang.
    pub(crate) fn take(&self) -> Vec<T> {
        if !self.bell.answer() {
            return Vec::new();
        }
        self.letters.lock().unwrap_or_else(PoisonError::into_inner).as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Drops what is in the box, and what will be sent: whoever waits for an answer to it hears that there is none.
    pub(crate) fn close(&self) {
        let left = self.letters.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(left);
    }
}
