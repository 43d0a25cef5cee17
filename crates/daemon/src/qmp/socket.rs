//! A monitor's socket: made with its permissions before anybody can connect, and removed at the end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};

/// Clients that may wait to be let in.
const BACKLOG: i32 = 16;

/// A socket that listens.
#[derive(Debug)]
pub(super) struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    pub(super) fn open(path: &Path, mode: u32) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let address = SocketAddrUnix::new(path)?;
        if let Err(e) = bind(&socket, &address) {
            if e != rustix::io::Errno::ADDRINUSE {
                return Err(e.into());
            }
            remove_if_left_behind(path)?;
            bind(&socket, &address)?;
        }
        // Nobody can connect before it listens.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
        let new = Self { listener: socket.into(), path: path.to_owned() };
        listen(&new.listener, BACKLOG)?;
        Ok(new)
    }

    /// The next client, if there is one.
    pub(super) fn accept(&self) -> io::Result<Option<UnixStream>> {
        match self.listener.accept() {
            Ok((client, _)) => client.set_nonblocking(true).map(|()| Some(client)),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Makes room where a server that was killed left its socket.
fn remove_if_left_behind(path: &Path) -> io::Result<()> {
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(io::Error::other("it exists and is not a socket; choose another path"));
    }
    match UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        _ => Err(io::Error::other("it is in use by a running server; stop that one or choose another path")),
    }
}
