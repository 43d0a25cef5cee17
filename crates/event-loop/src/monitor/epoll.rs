//! The monitor for kernels, or sandboxes, without io_uring.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use egret_polling::Nanos;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{CreateFlags, Event, EventData, EventFlags, add, create, delete, wait};
use rustix::io::Errno;

use super::ppoll::timespec;
use super::{Key, Monitor};

/// Edge-triggered epoll: an eventfd reports every write, and nobody has to read it.
pub(super) struct Epoll {
    epoll: OwnedFd,
    events: Vec<Event>,
}

impl Epoll {
    /// # Errors
    ///
    /// `ENOSYS` where the kernel has no `epoll_pwait2` (Linux 5.11): without nanosecond timeouts ppoll is better.
    pub(super) fn new() -> io::Result<Self> {
        let mut new = Self { epoll: create(CreateFlags::CLOEXEC)?, events: Vec::with_capacity(128) };
        wait(&new.epoll, spare_capacity(&mut new.events), Some(&timespec(Nanos::ZERO)))?;
        Ok(new)
    }
}

impl Monitor for Epoll {
    fn add(&mut self, fd: RawFd, key: Key) -> io::Result<()> {
        // SAFETY: the descriptor is open during this call, which is the caller's promise.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        Ok(add(&self.epoll, fd, EventData::new_u64(key.0), EventFlags::IN | EventFlags::ET)?)
    }

    fn remove(&mut self, fd: RawFd, _key: Key) {
        // SAFETY: the descriptor is still open, which is this trait's contract.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let _ = delete(&self.epoll, fd);
    }

    fn has_reports(&mut self) -> bool {
        false
    }

    fn wait(&mut self, timeout: Option<Nanos>, ready: &mut Vec<Key>) -> io::Result<()> {
        let timeout = timeout.map(timespec);
        self.events.clear();
        match wait(&self.epoll, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        ready.extend(self.events.iter().map(|event| Key(event.data.u64())));
        Ok(())
    }
}
