//! The newest request of a disk that failed, and a notifier that is set when there is one.
//!
//! I/O threads note failures here. Only the newest is kept, so that failures take no memory however many there are. A request that succeeds comes nowhere near.

#![forbid(unsafe_code)]

use std::sync::{Mutex, OnceLock, PoisonError};

use egret_event_loop::EventNotifier;
use rustix::io::Errno;

use crate::request::Op;

/// A request that failed in its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What was asked for.
    pub op: Op,
    /// What the system says.
    pub errno: Errno,
}

#[derive(Default)]
pub(crate) struct Failures {
    newest: Mutex<Option<Failure>>,
    bell: OnceLock<EventNotifier>,
}

impl Failures {
    /// Has a notifier set by failures from here on; the first one to be named is.
    pub(crate) fn watch(&self, bell: &EventNotifier) {
        let _ = self.bell.set(bell.clone());
    }

    #[cold]
    pub(crate) fn note(&self, op: Op, errno: Errno) {
        let before = self.newest.lock().unwrap_or_else(PoisonError::into_inner).replace(Failure { op, errno });
        if let (None, Some(bell)) = (before, self.bell.get()) {
            bell.set();
        }
    }

    pub(crate) fn take(&self) -> Option<Failure> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bell_rings_once_until_the_newest_failure_is_taken() {
        let bell = EventNotifier::new().unwrap();
        let failures = Failures::default();
        failures.watch(&bell);
        for round in 0..2 {
            assert_eq!((failures.take(), bell.clear()), (None, false), "{round}");
            failures.note(Op::Write { fua: false }, Errno::IO);
            assert!(bell.clear());
            failures.note(Op::Write { fua: false }, Errno::NOSPC);
            assert!(!bell.clear());
            assert_eq!(failures.take().map(|failure| failure.errno), Some(Errno::NOSPC));
        }
    }
}
