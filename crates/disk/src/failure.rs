//! The newest request of a disk that failed, of each export, and a notifier that is set when there is one.
//!
//! I/O threads note failures here. Only the newest is kept, so that failures take no memory however many there are. A request that succeeds comes nowhere near.
//!
//! Who tells of failures has the log, and no disk: a disk may be in the hands of somebody who waits for it.

#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use egret_event_loop::EventNotifier;
use rustix::io::Errno;

use crate::request::Op;

/// A request that failed in its engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Whose guest asked for it.
    pub export: Arc<str>,
    /// What was asked for.
    pub op: Op,
    /// What the system says.
    pub errno: Errno,
    /// What was done about it.
    pub action: Action,
    /// Whether the disk [has lost writes](crate::Disk::has_lost_writes).
    pub has_lost_writes: bool,
}

/// What is done about a request that failed: QEMU's `BlockErrorAction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The guest is told that it succeeded.
    Ignore,
    /// The guest is told that it failed.
    Report,
    /// It waits until it may be tried again, and with it the export.
    Stop,
}

/// What of a disk has failed and was not told yet. A disk that takes another's place may have the same.
#[derive(Debug)]
pub struct FailureLog {
    newest: Mutex<Vec<Failure>>,
    bell: EventNotifier,
}

impl FailureLog {
    /// An empty one; the notifier is set by failures from here on.
    pub fn new(bell: &EventNotifier) -> Self {
        Self { newest: Mutex::default(), bell: bell.clone() }
    }

    /// A stop is kept until it is taken: there is one for each time that an export stops.
    #[cold]
    pub(crate) fn note(&self, failure: Failure) {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        let was_empty = newest.is_empty();
        match newest.iter_mut().find(|other| other.export == failure.export) {
            Some(other) if other.action == Action::Stop && failure.action != Action::Stop => {}
            Some(other) => *other = failure,
            None => newest.push(failure),
        }
        drop(newest);
        if was_empty {
            self.bell.set();
        }
    }

    /// Of each export the newest failure since this was last asked.
    pub fn take(&self) -> Vec<Failure> {
        std::mem::take(&mut self.newest.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(export: &str, errno: Errno, action: Action) -> Failure {
        Failure { export: export.into(), op: Op::Write { fua: false }, errno, action, has_lost_writes: false }
    }

    #[test]
    fn the_bell_rings_once_until_the_newest_failure_is_taken() {
        let bell = EventNotifier::new().unwrap();
        let failures = FailureLog::new(&bell);
        for round in 0..2 {
            assert_eq!((failures.take(), bell.clear()), (vec![], false), "{round}");
            failures.note(failure("e0", Errno::IO, Action::Report));
            assert!(bell.clear());
            failures.note(failure("e0", Errno::NOSPC, Action::Report));
            assert!(!bell.clear());
            assert_eq!(failures.take(), [failure("e0", Errno::NOSPC, Action::Report)]);
        }
    }

    #[test]
    fn each_export_has_a_newest_failure_and_that_it_stopped_is_not_forgotten_for_a_newer_one() {
        let failures = FailureLog::new(&EventNotifier::new().unwrap());
        failures.note(failure("e0", Errno::NOSPC, Action::Stop));
        failures.note(failure("e1", Errno::IO, Action::Report));
        failures.note(failure("e0", Errno::IO, Action::Report));
        assert_eq!(
            failures.take(),
            [failure("e0", Errno::NOSPC, Action::Stop), failure("e1", Errno::IO, Action::Report)]
        );
    }
}
