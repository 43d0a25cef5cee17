//! The monitor that works everywhere.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{BorrowedFd, RawFd};

use egret_polling::Nanos;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use super::{Key, Monitor};

/// `ppoll(2)` over all descriptors, each time.
#[derive(Default)]
pub(super) struct Ppoll {
    fds: Vec<PollFd<'static>>,
    keys: Vec<Key>,
}

impl Monitor for Ppoll {
    fn add(&mut self, fd: RawFd, key: Key) -> io::Result<()> {
        // SAFETY: the descriptor stays open until `remove`, which is this trait's contract.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        self.fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        self.keys.push(key);
        Ok(())
    }

    fn remove(&mut self, _fd: RawFd, key: Key) {
        if let Some(at) = self.keys.iter().position(|k| *k == key) {
            self.fds.swap_remove(at);
            self.keys.swap_remove(at);
        }
    }

    fn has_reports(&mut self) -> bool {
        false
    }

    fn wait(&mut self, timeout: Option<Nanos>, ready: &mut Vec<Key>) -> io::Result<()> {
        let timeout = timeout.map(timespec);
        match poll(&mut self.fds, timeout.as_ref()) {
            Ok(0) | Err(Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(e) => return Err(e.into()),
        }
        for (fd, key) in self.fds.iter_mut().zip(&self.keys) {
            if fd.revents().is_empty() {
                continue;
            }
            ready.push(*key);
            // Level-triggered: what is not read is reported for ever. NOWAIT, because whoever shares the descriptor
            // may have read it first, and must not hang this thread; an error (a ring's descriptor, say, which is
            // emptied elsewhere) does no harm.
            let mut counter = [0; 8];
            let _ = preadv2(&*fd, &mut [io::IoSliceMut::new(&mut counter)], u64::MAX, ReadWriteFlags::NOWAIT);
        }
        Ok(())
    }
}

pub(super) fn timespec(length: Nanos) -> Timespec {
    Timespec { tv_sec: (length.0 / 1_000_000_000).cast_signed(), tv_nsec: (length.0 % 1_000_000_000) as i64 }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_descriptor_that_blocks_and_has_been_read_meanwhile_holds_nobody_up() {
        let (tell, told) = channel();
        std::thread::spawn(move || {
            let (mut ppoll, event) = (Ppoll::default(), eventfd(0, EventfdFlags::CLOEXEC).unwrap());
            // The first to be told of has read it when it comes to the second.
            for key in [1, 2] {
                ppoll.add(event.as_raw_fd(), Key(key)).unwrap();
            }
            rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
            let mut ready = Vec::new();
            ppoll.wait(None, &mut ready).unwrap();
            tell.send(ready).unwrap();
        });
        assert_eq!(told.recv_timeout(Duration::from_secs(30)), Ok(vec![Key(1), Key(2)]));
    }

    #[test]
    fn a_second_has_a_thousand_million_nanoseconds() {
        for (nanos, tv_sec, tv_nsec) in [(0, 0, 0), (999_999_999, 0, 999_999_999), (3_000_000_007, 3, 7)] {
            assert_eq!(timespec(Nanos(nanos)), Timespec { tv_sec, tv_nsec });
        }
    }
}
