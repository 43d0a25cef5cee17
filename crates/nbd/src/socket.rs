//! A stream's two system calls, with memory that nobody may refer to.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

use egret_event_loop::rights;
use egret_vring::memory::IoVec;
use rustix::io::Errno;

/// The most pieces of one call (`UIO_MAXIOV`).
pub(crate) const MOST_PIECES: usize = 1024;

/// Sends what `pieces` hold, as far as the socket takes it at once; returns how many bytes that was.
///
/// # Safety
///
/// Their memory must be mapped.
pub(crate) unsafe fn send(socket: impl AsFd, pieces: &[IoVec]) -> Result<usize, Errno> {
    let message = message(pieces);
    // SAFETY: the message is of pieces that are mapped, as the caller promises, and an `IoVec` is an `iovec`. It is read
    // before this returns.
    let sent = unsafe {
        libc::sendmsg(socket.as_fd().as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    usize::try_from(sent).map_err(|_| errno())
}

/// Fills `pieces` with what has come; returns how many bytes that was, 0 where nothing more will. With descriptors, for which
/// NBD has no use, it is an error.
///
/// # Safety
///
/// Their memory must be mapped, and nobody may refer to it.
pub(crate) unsafe fn receive(socket: impl AsFd, pieces: &[IoVec]) -> Result<usize, Errno> {
    // SAFETY: as for `send`; they are written to before this returns.
    unsafe { rights::receive_into(socket, pieces.as_ptr().cast_mut().cast(), pieces.len()) }
}

fn message(pieces: &[IoVec]) -> libc::msghdr {
    // SAFETY: it is made of numbers and pointers, for which zeroes say that there is nothing.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut().cast();
    message.msg_iovlen = pieces.len() as _;
    message
}

fn errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
