//! An eventfd by which threads tell one another that there is something to look at.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

/// Readable from the time that somebody has set it until it is cleared. Clones are the same one.
#[derive(Clone, Debug)]
pub struct EventNotifier(Arc<OwnedFd>);

impl EventNotifier {
    /// One that is not set.
    ///
    /// # Errors
    ///
    /// No descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Sets it. Who watches it edge by edge is told, even if it was set before.
    pub fn set(&self) {
        // It fails only when the counter is full, and then it is set.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Clears it; says whether it was set. To be called before one looks, lest what comes meanwhile goes untold.
    pub fn clear(&self) -> bool {
        rustix::io::read(&*self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for EventNotifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for EventNotifier {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_set_is_clear_once_it_was_cleared_however_often_it_was_set() {
        let notifier = EventNotifier::new().unwrap();
        assert!(!notifier.clear());
        let theirs = notifier.clone();
        theirs.set();
        theirs.set();
        assert!(notifier.clear());
        assert!(!notifier.clear());
    }
}
