//! What a disk's engine could not do, for whoever watches: the newest failure, and a bell for the first.
//!
//! An I/O thread leaves a failure here and goes on; it takes no memory, however many there are and however long nobody
//! looks. A request that succeeds comes nowhere near.

#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

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
    bell: OnceLock<Arc<OwnedFd>>,
}

impl Failures {
    /// Has an eventfd told of failures from here on; the first who asks for that is.
    pub(crate) fn watch(&self, bell: &Arc<OwnedFd>) {
        let _ = self.bell.set(Arc::clone(bell));
    }

    #[cold]
    pub(crate) fn note(&self, op: Op, errno: Errno) {
        let before = self.newest.lock().unwrap_or_else(PoisonError::into_inner).replace(Failure { op, errno });
        if let (None, Some(bell)) = (before, self.bell.get()) {
            // It fails only when the counter is full, and then it has been heard.
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
    }

    pub(crate) fn take(&self) -> Option<Failure> {
        self.newest.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn the_bell_rings_once_until_the_newest_failure_is_taken() {
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let rings = || {
            let mut count = [0; 8];
            rustix::io::read(&*bell, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
        };
        let failures = Failures::default();
        failures.watch(&bell);
        for round in 0..2 {
            assert_eq!((failures.take(), rings()), (None, 0), "{round}");
            for errno in [Errno::IO, Errno::NOSPC] {
                failures.note(Op::Write { fua: false }, errno);
            }
            assert_eq!(rings(), 1);
            assert_eq!(failures.take().map(|failure| failure.errno), Some(Errno::NOSPC));
        }
    }
}
