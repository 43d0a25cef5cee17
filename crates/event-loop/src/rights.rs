//! Descriptors that come in messages to who has no use for them.
//!
//! What is received without room for them the kernel closes, by the thread that receives: and that may
//! [take long](crate::closer). Linux since 6.16 can refuse them for a socket, so that their sender is told. Before that
//! they are taken in, for the [closer](crate::closer), and it is an error that they came.

#![allow(unsafe_code)]

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use rustix::io::Errno;

use crate::closer::FromPeer;

/// From asm-generic/socket.h.
const SO_PASSRIGHTS: libc::c_int = 83;
/// The most descriptors of one message (`SCM_MAX_FD`).
pub const MOST_SENT: usize = 253;
/// Room for so many, with the header before them, where it lies as it has to.
const ROOM: usize = size_of::<libc::cmsghdr>().div_ceil(8) + MOST_SENT.div_ceil(2);

/// Has a UNIX socket, and those that it accepts from here on, take no descriptors, where the kernel can.
pub fn refuse(socket: impl AsFd) {
    let none: libc::c_int = 0;
    // That older kernels do not know the option, and sockets of other families do not have it, is no error: `receive` is
    // for them.
    // SAFETY: the value is an `int`, and is read before this returns.
    unsafe {
        let (value, len) = ((&raw const none).cast(), size_of_val(&none) as libc::socklen_t);
        libc::setsockopt(socket.as_fd().as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, value, len);
    }
}

/// Fills `pieces` with what has come, without waiting; returns how many bytes that was.
///
/// # Errors
/// `EPROTO` where descriptors came along, and what the system says.
pub fn receive(socket: impl AsFd, pieces: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
    // SAFETY: an `IoSliceMut` is laid out as an `iovec` is, and is borrowed for as long as this takes, by nobody else.
    unsafe { receive_into(socket, pieces.as_mut_ptr().cast(), pieces.len()) }
}

/// As [`receive`].
///
/// # Errors
/// Likewise.
///
/// # Safety
///
/// There must be so many pieces; their memory must be mapped, and nobody may refer to it.
pub unsafe fn receive_into(socket: impl AsFd, pieces: *mut libc::iovec, count: usize) -> Result<usize, Errno> {
    let mut room = [MaybeUninit::<u64>::uninit(); ROOM];
    // SAFETY: it is made of numbers and pointers, for which zeroes say that there is nothing.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (pieces, count as _);
    (message.msg_control, message.msg_controllen) = (room.as_mut_ptr().cast(), size_of_val(&room) as _);
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the pieces are as the caller promises, and the room is as large as is said.
    let received = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
    let Ok(received) = usize::try_from(received) else {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    };
    if message.msg_controllen == 0 && message.msg_flags & libc::MSG_CTRUNC == 0 {
        return Ok(received);
    }
    // SAFETY: the kernel has filled so much of the room as the message says.
    unsafe { close_all(&message) };
    Err(Errno::PROTO)
}

/// Has the descriptors of a message closed.
///
/// # Safety
///
/// `recvmsg` has filled it, and its descriptors are nobody's yet.
#[cold]
unsafe fn close_all(message: &libc::msghdr) {
    // SAFETY: headers and descriptors are where these find them, as the kernel has put them there.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            let len = ((*header).cmsg_len as usize).saturating_sub(libc::CMSG_LEN(0) as usize);
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let fds = libc::CMSG_DATA(header).cast::<libc::c_int>();
                for at in 0..len / size_of::<libc::c_int>() {
                    drop(FromPeer::from(OwnedFd::from_raw_fd(ptr::read_unaligned(fds.add(at)))));
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{IoSlice, Read, Write};
    use std::os::unix::net::UnixStream;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    /// Sends a byte, and descriptors beside it.
    fn send_fds(socket: &UnixStream, fds: &[std::os::fd::BorrowedFd<'_>]) -> Result<usize, Errno> {
        let mut space = vec![MaybeUninit::uninit(); SendAncillaryMessage::ScmRights(fds).size()];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        sendmsg(socket, &[IoSlice::new(&[0])], &mut control, SendFlags::empty())
    }

    pub(crate) fn send_fd(socket: &UnixStream, fd: impl AsFd) {
        assert_eq!(send_fds(socket, &[fd.as_fd()]), Ok(1));
    }

    /// Whether the kernel has the option: since Linux 6.16.
    fn is_known(socket: &UnixStream) -> bool {
        let mut value: libc::c_int = 0;
        let mut len = size_of_val(&value) as libc::socklen_t;
        // SAFETY: the value is an `int`, as long as is said, and is written before this returns.
        unsafe {
            let (value, len) = ((&raw mut value).cast(), &raw mut len);
            libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, value, len) == 0
        }
    }

    #[test]
    fn descriptors_that_nobody_asked_for_are_closed_and_an_error() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (sent, mut other) = UnixStream::pair().unwrap();
        let mut byte = [0; 4];
        assert_eq!(receive(&ours, &mut [IoSliceMut::new(&mut byte)]), Err(Errno::AGAIN));
        for count in [1, 2, MOST_SENT] {
            send_fds(&theirs, &vec![sent.as_fd(); count]).unwrap();
            assert_eq!(receive(&ours, &mut [IoSliceMut::new(&mut byte)]), Err(Errno::PROTO), "{count}");
        }
        drop(sent);
        assert_eq!(other.read(&mut [0]).unwrap(), 0, "nobody has it any more");
        theirs.write_all(b"word").unwrap();
        assert_eq!(receive(&ours, &mut [IoSliceMut::new(&mut byte)]), Ok(4));
        assert_eq!(&byte, b"word");
        drop(theirs);
        assert_eq!(receive(&ours, &mut [IoSliceMut::new(&mut byte)]), Ok(0));
    }

    #[test]
    fn a_socket_that_refuses_descriptors_takes_everything_else() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        refuse(&ours);
        if is_known(&ours) {
            assert_eq!(send_fds(&theirs, &[theirs.as_fd()]), Err(Errno::PERM));
        } else {
            assert_eq!(send_fds(&theirs, &[theirs.as_fd()]), Ok(1));
            assert_eq!(receive(&ours, &mut [IoSliceMut::new(&mut [0])]), Err(Errno::PROTO));
        }
        theirs.write_all(&[7]).unwrap();
        assert_eq!(receive(&ours, &mut [IoSliceMut::new(&mut [0])]), Ok(1));
    }
}
