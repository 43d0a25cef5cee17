//! Where an export is found: a socket of its own, or one that was handed over.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use egret_event_loop::FromPeer;
use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};

use crate::peer_log::PeerLog;
use crate::socket::{Access, BindError, Rights, UnixSocket, admit};

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
    /// There is no socket at the path.
    #[error("cannot listen on socket '{0}': {1}")]
    Bind(PathBuf, #[source] BindError),
    /// The descriptor is no socket, or one that carries no descriptors.
    #[error("the inherited descriptor is not a UNIX socket")]
    BadFd,
    /// The descriptor cannot be listened on.
    #[error("cannot listen on the inherited descriptor: {0}")]
    Fd(#[source] io::Error),
}

/// A place to take clients from.
pub(crate) enum Listener {
    Socket(UnixSocket),
    /// One client, and no other after it; of these users alone.
    Connected(Option<FromPeer>, Vec<u32>),
}

impl Listener {
    pub(crate) fn open(address: Address, access: Access) -> Result<Self, ListenError> {
        match address {
            Address::Path(path) => UnixSocket::bind(&path, &access, Rights::Taken)
                .map(Self::Socket)
                .map_err(|e| ListenError::Bind(path, e)),
            Address::Fd(fd) if socket_domain(&fd) != Ok(AddressFamily::UNIX) => Err(ListenError::BadFd),
            Address::Fd(fd) if socket_acceptconn(&fd) == Ok(true) => {
                UnixSocket::adopt(fd, access.uids, Rights::Taken).map(Self::Socket).map_err(ListenError::Fd)
            }
            Address::Fd(fd) => Ok(Self::Connected(Some(fd.into()), access.uids)),
        }
    }

    /// A client that another daemon has let in, if it is let in here.
    pub(crate) fn readmit(&self, client: FromPeer, log: &PeerLog) -> io::Result<Option<FromPeer>> {
        match self {
            Self::Connected(_, uids) => admit(client, uids, log),
            Self::Socket(socket) => socket.admit(client, log),
        }
    }

    /// The next client; `None` when there is none to come, or it is time to stop. Who is not let in is told to `log`.
    pub(crate) fn accept(&mut self, log: &PeerLog, stop: BorrowedFd<'_>) -> io::Result<Option<FromPeer>> {
        loop {
            let arrived = match self {
                Self::Connected(client, uids) => match client.take() {
                    Some(client) => admit(client, uids, log)?,
                    None => return Ok(None),
                },
                Self::Socket(socket) => match crate::protocol::wait_readable(socket.as_fd(), stop)? {
                    true => socket.accept(log)?,
                    false => return Ok(None),
                },
            };
            if arrived.is_some() {
                return Ok(arrived);
            }
        }
    }
}
