//! Where an export is found: a socket of its own, or one that was handed over.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};

/// The longest path of a UNIX socket, in bytes: `sun_path` less its terminating zero.
pub const MAX_SOCKET_PATH: usize = 107;

/// Where clients connect.
#[derive(Debug)]
pub enum Address {
    /// A UNIX socket that is made at this path and removed again.
    Path(PathBuf),
    /// A descriptor that was inherited: a listening UNIX socket, or one connected client.
    Fd(OwnedFd),
}

/// Why nobody can connect.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The path does not fit `sun_path`.
    #[error("socket path '{0}' is {1} bytes long; the system allows at most {MAX_SOCKET_PATH}")]
    TooLong(PathBuf, usize),
    /// Somebody answers on it.
    #[error("socket '{0}' is in use by a running server; stop that one or choose another path")]
    InUse(PathBuf),
    /// Something else is in the way.
    #[error("'{0}' exists and is not a socket; choose another path")]
    NotASocket(PathBuf),
    /// What the system says.
    #[error("cannot listen on socket '{0}': {1}")]
    Bind(PathBuf, #[source] io::Error),
    /// The descriptor is no socket, or one that carries no descriptors.
    #[error("the inherited descriptor is not a UNIX socket")]
    BadFd,
}

/// A place to take clients from.
pub(crate) enum Listener {
    Socket {
        socket: UnixListener,
        /// To be removed at the end, if it was made here.
        path: Option<PathBuf>,
    },
    /// One client, and no other after it.
    Connected(Option<UnixStream>),
}

impl Listener {
    pub(crate) fn open(address: Address) -> Result<Self, ListenError> {
        match address {
            Address::Path(path) => {
                let socket = bind(&path)?;
                Ok(Self::Socket { socket, path: Some(path) })
            }
            Address::Fd(fd) if socket_domain(&fd) != Ok(AddressFamily::UNIX) => Err(ListenError::BadFd),
            Address::Fd(fd) if socket_acceptconn(&fd) == Ok(true) => Ok(Self::Socket { socket: fd.into(), path: None }),
            Address::Fd(fd) => Ok(Self::Connected(Some(fd.into()))),
        }
    }

    /// The next client; `None` when there is none to come, or it is time to stop.
    pub(crate) fn accept(&mut self, stop: BorrowedFd<'_>) -> io::Result<Option<UnixStream>> {
        match self {
            Self::Connected(client) => Ok(client.take()),
            Self::Socket { socket, .. } => {
                while crate::protocol::wait_readable(socket.as_fd(), stop)? {
                    match socket.accept() {
                        Ok((client, _)) => return Ok(Some(client)),
                        // It left before it was let in.
                        Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
                        Err(e) => return Err(e),
                    }
                }
                Ok(None)
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Socket { path: Some(path), .. } = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn bind(path: &Path) -> Result<UnixListener, ListenError> {
    let length = path.as_os_str().len();
    if length > MAX_SOCKET_PATH {
        return Err(ListenError::TooLong(path.into(), length));
    }
    match UnixListener::bind(path) {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
            let is_socket = |found: std::fs::Metadata| found.file_type().is_socket();
            if !std::fs::symlink_metadata(path).is_ok_and(is_socket) {
                return Err(ListenError::NotASocket(path.into()));
            }
            // A socket on which nobody listens was left behind by a server that was killed.
            match UnixStream::connect(path) {
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {}
                _ => return Err(ListenError::InUse(path.into())),
            }
            let fresh = std::fs::remove_file(path).and_then(|()| UnixListener::bind(path));
            fresh.map_err(|e| ListenError::Bind(path.into(), e))
        }
        other => other.map_err(|e| ListenError::Bind(path.into(), e)),
    }
}
