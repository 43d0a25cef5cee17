//! The monitor on the loop's own ring.

use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;

use egret_polling::Nanos;

use super::{Key, Monitor};
use crate::ring::SharedRing;

/// Multishot polls: a descriptor's readiness is a completion in memory, seen without a system call.
pub(super) struct Uring {
    ring: SharedRing,
    /// Descriptors by key. Looked up only when the kernel ends a multishot poll by itself and it must be added again.
    watched: HashMap<u64, RawFd>,
}

impl Uring {
    pub(super) fn new(ring: SharedRing) -> Self {
        Self { ring, watched: HashMap::new() }
    }
}

impl Monitor for Uring {
    fn add(&mut self, fd: RawFd, key: Key) -> io::Result<()> {
        self.watched.insert(key.0, fd);
        self.ring.borrow_mut().poll_add(fd, key.0);
        Ok(())
    }

    fn remove(&mut self, _fd: RawFd, key: Key) {
        self.watched.remove(&key.0);
        self.ring.borrow_mut().poll_remove(key.0);
    }

    fn has_reports(&mut self) -> bool {
        self.ring.borrow_mut().has_reports()
    }

    fn wait(&mut self, timeout: Option<Nanos>, ready: &mut Vec<Key>) -> io::Result<()> {
        let mut ring = self.ring.borrow_mut();
        match timeout {
            Some(Nanos::ZERO) => ring.flush()?,
            _ => ring.wait(timeout)?,
        }
        ring.sort();
        while let Some(done) = ring.next_poll() {
            if done.ready {
                ready.push(Key(done.data));
            }
            // The kernel ends a multishot poll when its completion queue overflows: begin again, unless the poll
            // failed, or ended because it was removed.
            if let (false, true, Some(&fd)) = (done.more, done.ready, self.watched.get(&done.data)) {
                ring.poll_add(fd, done.data);
            }
        }
        Ok(())
    }
}
