//! The system calls that no safe crate has.

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd};

use rustix::io;
use rustix::ioctl::{Getter, ioctl};

/// `SIOCOUTQ`, from linux/sockios.h.
const SIOCOUTQ: rustix::ioctl::Opcode = 0x5411;

/// How many bytes that were sent on a UNIX socket, as the kernel counts them, the peer has not received.
///
/// # Errors
///
/// It is no socket.
pub(crate) fn unreceived(socket: impl AsFd) -> io::Result<c_int> {
    // SAFETY: SIOCOUTQ of a socket stores an `int`, which is what the getter has room for.
    unsafe { ioctl(socket, Getter::<SIOCOUTQ, c_int>::new()) }
}

/// The user that the peer was when it connected.
///
/// rustix has this call with a type that has no room for what the kernel says of a peer in another PID namespace, which
/// is that its process has the number 0.
///
/// # Errors
///
/// It is no socket.
pub(crate) fn peer_uid(stream: impl AsFd) -> std::io::Result<u32> {
    let mut peer = MaybeUninit::<libc::ucred>::uninit();
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open for as long as `stream` is borrowed, and the kernel writes at most `len` bytes where
    // `peer` has that many.
    let done = unsafe {
        let (level, option) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        libc::getsockopt(stream.as_fd().as_raw_fd(), level, option, peer.as_mut_ptr().cast(), &raw mut len)
    };
    if done != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so it has been written: the kernel writes all of it or fails.
    Ok(unsafe { peer.assume_init() }.uid)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_a_peer_has_not_received_is_known() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        assert_eq!(unreceived(&ours), Ok(0));
        ours.write_all(&[1; 12]).unwrap();
        assert!(unreceived(&ours).unwrap() > 0);
        theirs.read_exact(&mut [0; 12]).unwrap();
        assert_eq!(unreceived(&ours), Ok(0));
        ours.write_all(&[1; 12]).unwrap();
        drop(theirs);
        assert_eq!(unreceived(&ours), Ok(0), "what a peer that is gone had not received is gone with it");
    }

    #[test]
    fn a_peer_is_the_user_that_it_was_when_it_connected() {
        // Who may become another does so, on a thread of its own: the system call knows of no other.
        let connect = || {
            const NOBODY: u32 = 65534;
            // SAFETY: it takes numbers.
            let is_another = unsafe { libc::syscall(libc::SYS_setresuid, -1, NOBODY, -1) } == 0;
            let expected = if is_another { NOBODY } else { rustix::process::geteuid().as_raw() };
            let (ours, _theirs) = UnixStream::pair().unwrap();
            assert_eq!(peer_uid(&ours).unwrap(), expected);
        };
        std::thread::spawn(connect).join().unwrap();
    }
}
