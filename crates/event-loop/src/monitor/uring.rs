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
    /// Descriptors by key. Looked up only when a multishot poll has ended: it must be added again unless it was removed.
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
        let mut ring = self.ring.borrow_mut();
        ring.poll_remove(key.0);
        // That it has ended is no news, and its key may be another's by the next wait.
        ring.forget_poll(key.0);
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
            // The kernel ends a multishot poll when its completion queue is full, or it has no memory: begin again. Something
            // may have come meanwhile.
            let ended = if done.more { None } else { self.watched.get(&done.data) };
            if done.is_ready() || ended.is_some() {
                ready.push(Key(done.data));
            }
            let Some(&fd) = ended else { continue };
            if done.result < 0 && !matches!(-done.result, libc::ECANCELED | libc::ENOMEM) {
                return Err(io::Error::from_raw_os_error(-done.result));
            }
            ring.poll_add(fd, done.data);
            // Whoever spins submits nothing.
            ring.flush()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::time::{Duration, Instant};

    use io_uring::{opcode, types};

    use super::super::{MonitorChoice, Opened, open};
    use super::*;
    use crate::EventNotifier;
    use crate::ring::COMPLETIONS;

    type Watching = (Box<dyn Monitor>, SharedRing, [EventNotifier; 2]);

    /// A monitor that watches the first of two, as it is known to the kernel.
    fn watching() -> Option<Watching> {
        let Opened { mut monitor, ring, .. } = match open(MonitorChoice::IoUring, "test") {
            Err(e) => {
                egret_needs::this_test_lacks(format_args!("io_uring: {e}"));
                return None;
            }
            opened => opened.unwrap(),
        };
        let events = [(); 2].map(|()| EventNotifier::new().unwrap());
        monitor.add(events[0].as_raw_fd(), Key(1)).unwrap();
        let ring = ring.unwrap();
        for _ in 0..2 {
            assert_eq!((told_now(&mut monitor), ring.borrow().enters()), (vec![], 1), "to look takes no system call");
        }
        Some((monitor, ring, events))
    }

    fn told_now(monitor: &mut Box<dyn Monitor>) -> Vec<Key> {
        let mut ready = Vec::new();
        monitor.wait(Some(Nanos::ZERO), &mut ready).unwrap();
        ready
    }

    /// The same as soon as something is told of.
    fn told(monitor: &mut Box<dyn Monitor>) -> Vec<Key> {
        let (begin, mut ready) = (Instant::now(), Vec::new());
        while ready.is_empty() {
            assert!(begin.elapsed() < Duration::from_secs(30), "it tells of nothing");
            monitor.wait(Some(Nanos::from_millis(100)), &mut ready).unwrap();
        }
        ready
    }

    /// Fills the queue of completions, so that a poll that fires ends.
    fn fill(ring: &SharedRing) {
        for _ in 0..COMPLETIONS {
            // It fails at once.
            let nothing = opcode::Write::new(types::Fixed(0), std::ptr::null(), 0).build();
            // SAFETY: it points at nothing.
            #[allow(unsafe_code)]
            unsafe {
                ring.borrow_mut().push(nothing, 0);
            }
            ring.borrow_mut().flush().unwrap();
        }
    }

    #[test]
    fn a_poll_that_the_kernel_has_ended_is_told_of_and_goes_on() {
        let Some((mut monitor, ring, [event, _])) = watching() else { return };
        for ends_with_an_event in [true, false] {
            if ends_with_an_event {
                fill(&ring);
                event.set();
            } else {
                // As before Linux 6.1 one does that cannot tell of its event.
                ring.borrow_mut().poll_remove(1);
            }
            assert_eq!(told(&mut monitor), [Key(1)]);
            assert!(ring.borrow_mut().is_flushed(), "whoever spins submits nothing");
            // It may have been ready when it was added again.
            event.clear();
            told_now(&mut monitor);
            assert_eq!(told_now(&mut monitor), []);
            event.set();
            assert_eq!(told(&mut monitor), [Key(1)]);
            event.clear();
        }
    }

    #[test]
    fn what_ended_before_it_was_removed_is_not_told_of_and_what_has_its_key_then_is_what_is_watched() {
        for ends_by_itself in [true, false] {
            let Some((mut monitor, ring, [old, new])) = watching() else { return };
            if ends_by_itself {
                fill(&ring);
                old.set();
            }
            monitor.remove(old.as_raw_fd(), Key(1));
            monitor.add(new.as_raw_fd(), Key(1)).unwrap();
            old.set();
            assert_eq!([(); 3].map(|()| told_now(&mut monitor)), [[], [], []]);
            new.set();
            assert_eq!(told(&mut monitor), [Key(1)]);
        }
    }

    #[test]
    fn a_descriptor_that_cannot_be_watched_is_an_error() {
        let Some((mut monitor, ..)) = watching() else { return };
        monitor.add(RawFd::MAX, Key(2)).unwrap();
        let error = (0..2).find_map(|_| monitor.wait(Some(Nanos::ZERO), &mut Vec::new()).err());
        assert_eq!(error.and_then(|e| e.raw_os_error()), Some(libc::EBADF));
    }
}
