//! Linux AIO contexts: what `aio=native` runs requests on, and what signals peers' event descriptors.
//!
//! Completions are read from the kernel's ring in user space, so that looking for them costs a few loads.

#![allow(unsafe_code)]

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

// From linux/aio_abi.h.
/// `IOCB_CMD_PREAD`.
pub const PREAD: u16 = 0;
/// `IOCB_CMD_PREADV`.
pub const PREADV: u16 = 7;
/// `IOCB_CMD_PWRITEV`.
pub const PWRITEV: u16 = 8;
/// `IOCB_FLAG_RESFD`: the completion is also counted on the eventfd `resfd`.
pub const RESFD: u32 = 1;
const RING_MAGIC: u32 = 0xa10a_10a1;

/// `struct iocb`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's own fields: io_submit(2)")]
pub struct Iocb {
    pub data: u64,
    #[cfg(target_endian = "little")]
    pub key: u32,
    pub rw_flags: i32,
    #[cfg(target_endian = "big")]
    pub key: u32,
    pub opcode: u16,
    pub reqprio: i16,
    pub fd: u32,
    pub buf: u64,
    pub nbytes: u64,
    pub offset: i64,
    pub reserved: u64,
    pub flags: u32,
    pub resfd: u32,
}

/// `struct io_event`.
#[derive(Clone, Copy)]
#[repr(C)]
#[expect(missing_docs, reason = "the kernel's own fields: io_getevents(2)")]
pub struct IoEvent {
    pub data: u64,
    pub obj: u64,
    pub res: i64,
    pub res2: i64,
}

/// `struct aio_ring`, which the kernel maps where the context's handle points; the events follow it.
#[repr(C)]
struct RingHeader {
    id: u32,
    nr: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compat_features: u32,
    incompat_features: u32,
    header_length: u32,
}

/// Why a context could not be had.
#[derive(Debug, thiserror::Error)]
pub enum AioError {
    /// The system's limit is used up.
    #[error("the system has no room for another AIO context of {requests} requests; raise /proc/sys/fs/aio-max-nr")]
    MaxNr {
        /// How many requests the context was to hold.
        requests: u32,
    },
    /// A kernel whose completion ring cannot be read in user space.
    #[error("this kernel's AIO completion ring has an unknown layout")]
    Ring,
    /// Anything else.
    #[error("io_setup: {0}")]
    Other(#[source] io::Error),
}

/// An AIO context and its completion ring.
pub struct Context {
    ring: *const RingHeader,
    /// Events that the ring holds.
    size: u32,
}

// SAFETY: a context is the process's; any of its threads may submit to it and take completions out of its ring, one at a
// time.
unsafe impl Send for Context {}

impl Context {
    /// A context for `requests` in the kernel at a time, which count against `/proc/sys/fs/aio-max-nr`.
    ///
    /// # Errors
    ///
    /// As [`AioError`] lists them.
    pub fn new(requests: u32) -> Result<Self, AioError> {
        let mut handle: libc::c_ulong = 0;
        // SAFETY: the second argument is where the call puts the handle, zero before as it must be.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, requests, &raw mut handle) };
        if result < 0 {
            let e = io::Error::last_os_error();
            return Err(match e.raw_os_error() {
                Some(libc::EAGAIN) => AioError::MaxNr { requests },
                _ => AioError::Other(e),
            });
        }
        let ring = handle as *const RingHeader;
        let mut context = Self { ring, size: 0 };
        let header = context.header();
        let known = header.magic == RING_MAGIC
            && header.incompat_features == 0
            && header.header_length as usize == size_of::<RingHeader>();
        if !known {
            return Err(AioError::Ring);
        }
        context.size = header.nr;
        Ok(context)
    }

    fn header(&self) -> &RingHeader {
        // SAFETY: the kernel mapped the ring at the handle's address, readable and writable, until `io_destroy`. What
        // changes in it is read through atomics.
        unsafe { &*self.ring }
    }

    fn handle(&self) -> libc::c_ulong {
        self.ring as libc::c_ulong
    }

    /// Whether there is no completion to take: two loads.
    pub fn is_empty(&self) -> bool {
        let header = self.header();
        header.head.load(Ordering::Relaxed) == header.tail.load(Ordering::Relaxed)
    }

    /// Takes the oldest completion. Only this thread moves the head; the kernel moves the tail after it has written
    /// what it points past.
    #[expect(clippy::should_implement_trait, reason = "an iterator ends; the ring only happens to be empty")]
    pub fn next(&mut self) -> Option<IoEvent> {
        let header = self.header();
        let head = header.head.load(Ordering::Relaxed);
        if head == header.tail.load(Ordering::Acquire) || head >= self.size {
            return None;
        }
        // SAFETY: the ring has `size` events behind its header, and `head` is one that the kernel has written.
        let event = unsafe { self.ring.add(1).cast::<IoEvent>().add(head as usize).read() };
        header.head.store(if head + 1 == self.size { 0 } else { head + 1 }, Ordering::Release);
        Some(event)
    }

    /// Gives requests to the kernel and returns how many it took, or why it did not take the first.
    ///
    /// # Errors
    ///
    /// What `io_submit` says of the first request.
    ///
    /// # Safety
    ///
    /// Each pointer is to an iocb that lives through the call, and the memory that the iocb names stays mapped until the
    /// request completes.
    pub unsafe fn submit(&self, iocbs: &mut [*mut Iocb]) -> Result<usize, Errno> {
        // SAFETY: the caller's promise.
        let taken = unsafe { libc::syscall(libc::SYS_io_submit, self.handle(), iocbs.len(), iocbs.as_mut_ptr()) };
        if taken >= 0 {
            return Ok(taken as usize);
        }
        Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the handle is one of `io_setup`'s; the call waits until the kernel is done with every request.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.handle()) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn completions_are_taken_once_as_often_as_the_ring_goes_round() {
        let mut context = Context::new(4).unwrap();
        let empty = File::open("/dev/null").unwrap();
        assert!(context.is_empty() && context.next().is_none());
        for data in 0..1000 {
            let mut iocb = Iocb { data, opcode: PREAD, fd: empty.as_raw_fd() as u32, ..Iocb::default() };
            // SAFETY: the iocb lives through the call, and a read of no bytes touches no memory.
            assert_eq!(unsafe { context.submit(&mut [&raw mut iocb]) }, Ok(1));
            assert!(!context.is_empty());
            assert_eq!(context.next().map(|event| (event.data, event.res)), Some((data, 0)));
            assert!(context.is_empty() && context.next().is_none());
        }
    }

    #[test]
    fn a_context_that_is_dropped_is_gone() {
        // Another thread's may come to be at the same address, but not each time.
        let gone = (0..100).any(|_| {
            let context = Context::new(1).unwrap();
            let at = format!("{:x}-", context.handle());
            let is_mapped = || {
                let maps = fs::read_to_string("/proc/self/maps").unwrap();
                maps.lines().any(|line| line.starts_with(&at) && line.contains("[aio]"))
            };
            assert!(is_mapped());
            drop(context);
            !is_mapped()
        });
        assert!(gone);
    }
}
