//! Descriptors that a peer sent, which may be of any kind of file.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use egret_event_loop::{FromPeer, closer};
use rustix::io::Result as Answer;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};

use crate::protocol_error::{ProtocolError, invalid};

/// Closes for one session thread that may be under way at a time. Whoever sends more waits for them.
const MOST_CLOSING: u32 = 4;
/// What a channel is.
const UNIX_STREAM: (Answer<AddressFamily>, Answer<SocketType>) = (Ok(AddressFamily::UNIX), Ok(SocketType::STREAM));

thread_local! {
    /// How many descriptors of this session thread's are being closed by others.
    static CLOSING: Arc<AtomicU32> = Arc::default();
}

/// A descriptor that a peer sent.
///
/// To close a file of a file system that the peer runs (FUSE), or that cannot be reached (NFS), may take for ever, as may
/// `fstat` and nearly everything else. So what may be such a file is closed by a thread that nobody waits for; and the rest
/// by the [`closer`], for sockets may take long, too.
#[derive(Debug)]
pub(crate) struct PeerFd(Option<OwnedFd>);

impl PeerFd {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }

    /// Takes an eventfd: an I/O thread watches or signals it, and knows of no other file that it never sleeps in.
    pub(crate) fn into_eventfd(self) -> Result<OwnedFd, ProtocolError> {
        match self.link()?.as_str() {
            "anon_inode:[eventfd]" => Ok(self.into_fd()),
            other => invalid(format!("'{other}' to signal with; it must be an eventfd")),
        }
    }

    /// Takes a socket that never waits when it is told not to: others may, for whoever else has them.
    pub(crate) fn into_channel(self) -> Result<FromPeer, ProtocolError> {
        let link = self.link()?;
        if link.starts_with("socket:") && (socket_domain(&self), socket_type(&self)) == UNIX_STREAM {
            return Ok(self.into_fd().into());
        }
        invalid(format!("'{link}' as a channel; it must be a UNIX stream socket"))
    }

    fn into_fd(mut self) -> OwnedFd {
        self.0.take().expect("nothing takes it but this, and dropping it")
    }

    /// What the kernel calls it. The file is not asked.
    fn link(&self) -> io::Result<String> {
        let fd = self.0.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        Ok(std::fs::read_link(format!("/proc/self/fd/{fd}"))?.to_string_lossy().into_owned())
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("nothing takes it but `into_fd`, and dropping it").as_fd()
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        let Some(fd) = self.0.take() else { return };
        // The file is not asked.
        if closer::asks_nobody(&fd) {
            return drop(FromPeer::from(fd));
        }
        let closing = CLOSING.with(Arc::clone);
        if closing.fetch_add(1, Ordering::Relaxed) >= MOST_CLOSING {
            closing.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let close = move || {
            drop(fd);
            closing.fetch_sub(1, Ordering::Relaxed);
        };
        // Where no thread can be had `close` is dropped, and what it holds is closed here.
        let _ = thread::Builder::new().name("peer-close".to_owned()).stack_size(64 << 10).spawn(close);
    }
}
