//! Descriptors that a peer sent, which may be of any kind of file.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::fs::fcntl_get_seals;

use crate::protocol_error::{ProtocolError, invalid};

/// Closes for one session thread that may be under way at a time. Whoever sends more waits for them.
const MOST_CLOSING: u32 = 4;

thread_local! {
    /// How many descriptors of this session thread's are being closed by others.
    static CLOSING: Arc<AtomicU32> = Arc::default();
}

/// A descriptor that a peer sent.
///
/// To close a file of a file system that the peer runs (FUSE), or that cannot be reached (NFS), may take for ever, as may
/// `fstat` and nearly everything else. So what is not known to be the kernel's own is closed by a thread that nobody
/// waits for.
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

    /// Takes a socket.
    pub(crate) fn into_socket(self) -> Result<OwnedFd, ProtocolError> {
        match self.link()?.as_str() {
            link if link.starts_with("socket:") => Ok(self.into_fd()),
            other => invalid(format!("'{other}' as a channel; it must be a socket")),
        }
    }

    fn into_fd(mut self) -> OwnedFd {
        self.0.take().expect("nothing takes it but this, and dropping it")
    }

    /// What the kernel calls it. The file is not asked.
    fn link(&self) -> io::Result<String> {
        let fd = self.0.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        Ok(std::fs::read_link(format!("/proc/self/fd/{fd}"))?.to_string_lossy().into_owned())
    }

    /// Whether closing it asks nobody: memory (which alone has seals), or what has no name in any file system.
    fn is_the_kernels_own(&self) -> bool {
        let is_nameless =
            |link: String| ["anon_inode:[eventfd]", "socket:", "pipe:"].iter().any(|own| link.starts_with(own));
        self.0.as_ref().is_none_or(|fd| fcntl_get_seals(fd).is_ok()) || self.link().is_ok_and(is_nameless)
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("nothing takes it but `into_fd`, and dropping it").as_fd()
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        if self.is_the_kernels_own() {
            return;
        }
        let closing = CLOSING.with(Arc::clone);
        if closing.fetch_add(1, Ordering::Relaxed) >= MOST_CLOSING {
            closing.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        let Some(fd) = self.0.take() else { return };
        let close = move || {
            drop(fd);
            closing.fetch_sub(1, Ordering::Relaxed);
        };
        // Where no thread can be had `close` is dropped, and what it holds is closed here.
        let _ = thread::Builder::new().name("peer-close".to_owned()).stack_size(64 << 10).spawn(close);
    }
}
