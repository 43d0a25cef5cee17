//! Sleeping until a server calls, and noticing when it will not.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

use crate::client::{ClientError, Queue};

const CALL: u64 = 0;
const ERR: u64 = 1;
const SESSION: u64 = 2;

/// How many events are taken at once: any one of them ends the wait.
const EVENTS: usize = 8;

/// Watches the queues of a job.
pub(super) struct Waiter {
    epoll: OwnedFd,
}

impl Waiter {
    pub(super) fn new<'a>(queues: impl Iterator<Item = &'a Queue>) -> Result<Self, ClientError> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        for queue in queues {
            // Edge-triggered, so that a call needs no read to be forgotten: one system call for each sleep.
            for (kind, fd, flags) in [
                (CALL, queue.call(), EventFlags::IN | EventFlags::ET),
                (ERR, queue.err(), EventFlags::IN),
                (SESSION, queue.session(), EventFlags::IN | EventFlags::RDHUP),
            ] {
                match epoll::add(&epoll, fd, EventData::new_u64(kind), flags) {
                    // Queues of one session share its socket.
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
        }
        Ok(Self { epoll })
    }

    /// Sleeps until a server calls or `timeout_ns` is over.
    ///
    /// # Errors
    /// A server has hung up, or has broken a queue.
    pub(super) fn wait(&self, timeout_ns: u64) -> Result<(), ClientError> {
        let timeout = Timespec::try_from(Duration::from_nanos(timeout_ns)).ok();
        let mut space = [const { MaybeUninit::uninit() }; EVENTS];
        let events = match epoll::wait(&self.epoll, &mut space, timeout.as_ref()) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        for event in &*events {
            match event.data.u64() {
                ERR => return Err(ClientError::Broken),
                SESSION => return Err(ClientError::HungUp("under load")),
                _ => {}
            }
        }
        Ok(())
    }
}
