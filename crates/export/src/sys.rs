//! The system call that no safe crate has.

#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::fd::AsFd;

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
}
