//! Descriptors that a peer sent, which may be of any kind of file.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread;

use egret_event_loop::Signals;
use egret_event_loop::closer::{self, Allowance, FromPeer};
use rustix::io::Result as Answer;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};

use crate::protocol_error::{ProtocolError, invalid};

/// Closes for one session thread that may be under way at a time. Whoever sends more waits for them.
const MOST_CLOSING: usize = 4;
/// What a channel is.
const UNIX_STREAM: (Answer<AddressFamily>, Answer<SocketType>) = (Ok(AddressFamily::UNIX), Ok(SocketType::STREAM));

thread_local! {
    /// How many descriptors of this session thread's are being closed by others.
    static CLOSING: Arc<Allowance> = Arc::default();
}

/// A descriptor that a peer sent.
///
/// To close a file of a file system that the peer runs (FUSE), or that cannot be reached (NFS), may take for ever, as may
/// `fstat` and nearly everything else. So what may be such a file is closed by a thread that nobody waits for; and the rest
/// by the [`closer`], for sockets may take long, too, and whatever the peer has in an epoll set. A session thread is to drop
/// them, who has others' work to do is not: it would wait for the peer when many are being closed.
#[derive(Debug)]
pub(crate) struct PeerFd(Option<OwnedFd>);

/// What a driver is called by.
#[derive(Debug)]
pub(crate) struct Call {
    fd: PeerFd,
    is_socket: bool,
}

impl Call {
    /// Has it signalled at the end of the turn.
    pub(crate) fn signal(&self, signals: &mut Signals) {
        if self.is_socket { signals.push_socket(self.fd.as_fd()) } else { signals.push(self.fd.as_fd()) }
    }
}

impl From<Call> for PeerFd {
    fn from(call: Call) -> Self {
        call.fd
    }
}

impl PeerFd {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }

    /// Has one closed that is no file, by the [`closer`], without waiting for others that this thread has dropped.
    pub(crate) fn close_uncounted(mut self) {
        drop(self.0.take().map(FromPeer::from));
    }

    /// Takes an eventfd: an I/O thread watches or signals it, and knows of no other file that it never sleeps in.
    pub(crate) fn into_eventfd(self) -> Result<Self, ProtocolError> {
        match self.link()?.as_str() {
            "anon_inode:[eventfd]" => Ok(self),
            other => invalid(format!("'{other}' to signal with; it must be an eventfd")),
        }
    }

    /// Takes what a driver is called by: an eventfd, or where that may be the UNIX stream socket that user-mode Linux has in its
    /// place.
    pub(crate) fn into_call(self, may_be_socket: bool) -> Result<Call, ProtocolError> {
        let is_socket = may_be_socket && self.is_unix_stream(&self.link()?);
        Ok(Call { fd: if is_socket { self } else { self.into_eventfd()? }, is_socket })
    }

    /// Takes a socket that never waits when it is told not to.
    pub(crate) fn into_channel(self) -> Result<Self, ProtocolError> {
        let link = self.link()?;
        if self.is_unix_stream(&link) {
            return Ok(self);
        }
        invalid(format!("'{link}' as a channel; it must be a UNIX stream socket"))
    }

    /// Whether it is a socket that never waits when it is told not to: others may, for whoever else has them.
    fn is_unix_stream(&self, link: &str) -> bool {
        link.starts_with("socket:") && (socket_domain(self), socket_type(self)) == UNIX_STREAM
    }

    /// What the kernel calls it. The file is not asked.
    fn link(&self) -> io::Result<String> {
        let fd = self.as_fd().as_raw_fd();
        Ok(std::fs::read_link(format!("/proc/self/fd/{fd}"))?.to_string_lossy().into_owned())
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("nothing takes it but dropping it").as_fd()
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        let Some(fd) = self.0.take() else { return };
        let counted = CLOSING.with(Arc::clone).take(MOST_CLOSING);
        // The file is not asked.
        if closer::asks_nobody(&fd) {
            return closer::close(fd, counted);
        }
        let close = move || {
            drop(fd);
            drop(counted);
        };
        // Where no thread can be had `close` is dropped, and what it holds is closed here.
        let _ = thread::Builder::new().name("peer-close".to_owned()).stack_size(64 << 10).spawn(close);
    }
}
