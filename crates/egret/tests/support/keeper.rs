//! A service manager that keeps descriptors from one daemon to the next, as systemd does.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::PATIENCE;
use super::scratch::Scratch;
use super::server::Program;

/// One of daemons with one client each.
pub struct Keeper {
    socket: UnixDatagram,
    place: String,
}

impl Keeper {
    pub fn new(scratch: &Scratch) -> Self {
        let place = scratch.path("notify");
        let socket = UnixDatagram::bind(&place).expect("our own directory");
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
        Self { socket, place: place.display().to_string() }
    }

    /// A daemon that knows of it.
    pub fn program(&self) -> Program {
        Program::egret().with_env("NOTIFY_SOCKET", &self.place).with_env("FDSTORE", "16")
    }

    /// The next one, with what the last has left, as soon as it has.
    ///
    /// # Panics
    /// When it does not.
    pub fn successor(&self) -> Program {
        let kept = self.hears("FDSTORE=1\nFDNAME=egret-session\nFDPOLL=0\n").pop();
        self.program().with_socket("egret-session", kept.expect("a socket"))
    }

    /// Waits until it is told what begins like this, and returns what it is given with it.
    ///
    /// # Panics
    /// When it is not.
    pub fn hears(&self, what: &str) -> Vec<OwnedFd> {
        loop {
            let (mut text, mut space) = ([0; 256], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))]);
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut text)];
            recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).expect("it is told");
            let rights = control.drain().filter_map(|part| match part {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            });
            let fds = rights.flatten().collect();
            if text.starts_with(what.as_bytes()) {
                return fds;
            }
        }
    }
}
