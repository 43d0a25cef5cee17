//! Signals to event descriptors that peers own, without ever sleeping in one.
//!
//! A `write` to an eventfd sleeps while its counter is full, unless O_NONBLOCK is set. That flag belongs to the open file
//! description, which the peer shares: it can clear the flag and fill the counter at any moment, also between a check and
//! the `write` behind it. So the loop does not write to them. A request that completes at once (a read of no bytes) goes to the kernel
//! with the descriptor as the one that its completion is counted on (`IOCB_FLAG_RESFD`, io_submit(2)): the kernel's
//! `eventfd_signal` adds to the counter if there is room, wakes who waits, and returns in either case. That takes the longer the
//! more there are who wait, of which a peer may have as many as it likes: SECURITY.md says what comes of that.
//!
//! What a peer has in an eventfd's place is a stream socket (Linux's virtio_uml does): that is sent the eight bytes of a `write` to an eventfd, by a
//! system call of its own, which never sleeps where it is told not to. Where they do not fit there are others to be read.
//!
//! One `io_submit` signals all descriptors of a turn. Alone it takes some 150 ns longer than a `write`, and in a batch of
//! eight 80 ns longer for each (2 x AMD EPYC, Linux 6.18, November 2026, a loop of a million calls of either kind).

#![allow(unsafe_code)]

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use crate::aio::{self, AioError, Context, Iocb};

/// Descriptors that one system call signals.
const BATCH: usize = 64;
/// How often a signal is tried that the kernel has no memory for.
const TRIES: u32 = 16;

/// How often the first of the signals that are left was tried.
#[derive(Default)]
struct Tries(u32);

impl Tries {
    /// How many of those that are left are done with, one way or another.
    fn taken(&mut self, submitted: Result<usize, Errno>) -> usize {
        let taken = match submitted {
            Ok(taken) => taken,
            Err(Errno::AGAIN | Errno::INTR | Errno::NOMEM) if self.0 < TRIES => 0,
            // The first is no eventfd, or closed: its owner's loss.
            Err(_) => 1,
        };
        self.0 = if taken == 0 { self.0 + 1 } else { 0 };
        taken
    }
}

/// Signals event descriptors, those of a turn together.
///
/// Nothing is allocated after it was made.
pub struct Signals {
    /// There until it is dropped.
    context: Option<Context>,
    /// The file that the requests read from, at its end: they complete at once.
    empty: OwnedFd,
    iocbs: Box<[Iocb; BATCH]>,
    pending: usize,
    /// Sockets to signal, no more than a batch.
    sockets: Vec<RawFd>,
}

impl Signals {
    /// Needs an AIO context of the kernel's.
    ///
    /// # Errors
    ///
    /// No context or descriptor left; the message says what to raise.
    pub fn new() -> io::Result<Self> {
        let spare = spare().pop();
        let context = spare.map_or_else(|| Context::new(BATCH as u32), Ok).map_err(|e| match e {
            AioError::Other(source) => {
                io::Error::new(source.kind(), format!("no AIO context to signal guests with, whatever aio says: {source}; allow io_setup, in a kernel with CONFIG_AIO"))
            }
            other => io::Error::other(other),
        })?;
        let empty = rustix::fs::memfd_create("egret-signals", MemfdFlags::CLOEXEC)?;
        Ok(Self {
            context: Some(context),
            empty,
            iocbs: Box::new([Iocb::default(); BATCH]),
            pending: 0,
            sockets: Vec::with_capacity(BATCH),
        })
    }

    /// Has `fd` signalled at the next [`submit`](Self::submit), which must come before `fd` is closed: in the same turn's
    /// notify phase. A descriptor that is no eventfd is ignored.
    #[inline]
    pub fn push(&mut self, fd: BorrowedFd<'_>) {
        if self.pending == BATCH {
            self.submit();
        }
        self.iocbs[self.pending] = Iocb {
            opcode: aio::PREAD,
            fd: self.empty.as_raw_fd() as u32,
            flags: aio::RESFD,
            resfd: fd.as_raw_fd() as u32,
            ..Iocb::default()
        };
        self.pending += 1;
    }

    /// Likewise with a stream socket, which must not be closed before, either.
    pub fn push_socket(&mut self, socket: BorrowedFd<'_>) {
        if self.sockets.len() == BATCH {
            self.submit_sockets();
        }
        self.sockets.push(socket.as_raw_fd());
    }

    /// Signals what was pushed: one system call for all event descriptors and one for each socket, or none if nothing was.
    #[inline]
    pub fn submit(&mut self) {
        if self.pending > 0 {
            self.submit_pending();
        }
        if !self.sockets.is_empty() {
            self.submit_sockets();
        }
    }

    #[cold]
    fn submit_sockets(&mut self) {
        for socket in self.sockets.drain(..) {
            // SAFETY: whoever has pushed it keeps it open until now.
            let socket = unsafe { BorrowedFd::borrow_raw(socket) };
            let (signal, nothing) = (1u64.to_ne_bytes(), &mut SendAncillaryBuffer::default());
            // A socket that is full is read some day, and one that nobody has the other end of is its owner's loss.
            let _ = sendmsg(socket, &[IoSlice::new(&signal)], nothing, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    fn submit_pending(&mut self) {
        let Some(context) = &mut self.context else { return };
        let mut pointers = [ptr::null_mut(); BATCH];
        for (pointer, iocb) in pointers.iter_mut().zip(&mut self.iocbs[..self.pending]) {
            *pointer = ptr::from_mut(iocb);
        }
        let mut left = &mut pointers[..self.pending];
        let mut tries = Tries::default();
        while !left.is_empty() {
            // The requests have completed when the call returns; their completions carry no news.
            while context.next().is_some() {}
            // SAFETY: the iocbs are this object's and live through the call; a read of no bytes touches no memory.
            let taken = tries.taken(unsafe { context.submit(left) });
            left = &mut left[taken..];
        }
        self.pending = 0;
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        spare().extend(self.context.take());
    }
}

/// Contexts of loops that have ended, for the next ones: to destroy one takes tens of milliseconds, in which an I/O thread
/// that is deleted would not be gone. Nothing is in flight in them.
fn spare() -> MutexGuard<'static, Vec<Context>> {
    static SPARE: Mutex<Vec<Context>> = Mutex::new(Vec::new());
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{read, write};

    use super::*;
    use crate::refuse::refuse;

    fn count(fd: &OwnedFd) -> u64 {
        let mut value = [0; 8];
        read(fd, &mut value).map_or(0, |_| u64::from_ne_bytes(value))
    }

    #[test]
    fn each_descriptor_that_was_pushed_is_signalled_once() {
        let mut signals = Signals::new().unwrap();
        let fds: Vec<_> = (0..3 * BATCH + 1).map(|_| eventfd(0, EventfdFlags::NONBLOCK).unwrap()).collect();
        for _ in 0..100 {
            fds.iter().for_each(|fd| signals.push(fd.as_fd()));
            assert_eq!(signals.iocbs[0].fd, signals.empty.as_raw_fd() as u32, "nothing of anybody's is read");
            signals.submit();
            assert!(fds.iter().all(|fd| count(fd) == 1));
        }
        signals.submit();
        assert!(fds.iter().all(|fd| count(fd) == 0));
    }

    #[test]
    fn a_full_counter_that_would_have_a_write_sleep_does_not_hold_up_the_others() {
        let mut signals = Signals::new().unwrap();
        // Without O_NONBLOCK, and full: a write would never return.
        let full = eventfd(0, EventfdFlags::empty()).unwrap();
        write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let other = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        for _ in 0..3 {
            for fd in [&full, &other, &full] {
                signals.push(fd.as_fd());
            }
            signals.submit();
            assert_eq!(count(&other), 1);
        }
        assert_eq!(count(&full), u64::MAX);
    }

    #[test]
    fn a_signal_is_tried_sixteen_times_more_where_the_kernel_has_no_room_and_once_where_it_is_refused() {
        let mut tries = Tries::default();
        for again in [Errno::AGAIN, Errno::INTR, Errno::NOMEM] {
            assert!((0..TRIES).all(|_| tries.taken(Err(again)) == 0));
            assert_eq!(tries.taken(Err(again)), 1, "it is passed over");
            assert_eq!(tries.taken(Err(again)), 0, "the next one has as many");
            assert_eq!(tries.taken(Ok(3)), 3);
        }
        assert_eq!(tries.taken(Err(Errno::BADF)), 1);
    }

    #[test]
    fn contexts_of_those_who_are_gone_are_there_for_others() {
        // More than the other tests have at a time.
        let all: Vec<_> = (0..64).map(|_| Signals::new().unwrap()).collect();
        drop(all);
        assert!(!spare().is_empty());
    }

    #[test]
    fn a_signal_that_the_kernel_never_takes_is_given_up() {
        for errno in [libc::EAGAIN, libc::EINTR, libc::ENOMEM, libc::EIO] {
            let other = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut signals = Signals::new().unwrap();
                    refuse(libc::SYS_io_submit, errno);
                    for _ in 0..BATCH + 1 {
                        signals.push(other.as_fd());
                    }
                    signals.submit();
                    assert_eq!(signals.pending, 0);
                });
            });
            assert_eq!(count(&other), 0);
        }
    }

    #[test]
    fn sockets_are_signalled_as_well_and_one_that_is_full_or_that_nobody_reads_holds_up_nobody() {
        let mut signals = Signals::new().unwrap();
        let (full, unread) = UnixStream::pair().unwrap();
        full.set_nonblocking(true).unwrap();
        while (&full).write(&[0; 4096]).is_ok() {}
        // Without O_NONBLOCK a write would never return.
        full.set_nonblocking(false).unwrap();
        let (left, _) = UnixStream::pair().unwrap();
        let pairs: Vec<_> = (0..2 * BATCH + 1).map(|_| UnixStream::pair().unwrap()).collect();
        let other = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        for _ in 0..2 {
            for socket in pairs.iter().map(|(ours, _)| ours).chain([&full, &left]) {
                signals.push_socket(socket.as_fd());
            }
            signals.push(other.as_fd());
            signals.submit();
        }
        assert_eq!(count(&other), 2);
        for (_, theirs) in &pairs {
            let mut read = [0; 64];
            assert_eq!((&*theirs).read(&mut read).unwrap(), 16);
            assert_eq!(read[..8], 1u64.to_ne_bytes());
        }
        drop(unread);
    }

    #[test]
    fn what_is_no_eventfd_is_passed_over() {
        let mut signals = Signals::new().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let other = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        for fd in [&writer, &other, &reader, &other] {
            signals.push(fd.as_fd());
        }
        signals.submit();
        assert_eq!(count(&other), 2);
    }
}
