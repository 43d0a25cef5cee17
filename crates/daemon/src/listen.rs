//! Sockets on which the daemon is told and asked things: where they are, and who may connect.
//!
//! A UNIX socket has its group and mode before it listens, so nobody can connect earlier who could not later. A TCP
//! socket has neither, and whoever reaches it may do everything: it is on a loopback address unless that is forced.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::ioctl_fionbio;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use serde_json::{Map, Value};

use crate::process::Inherited;
use crate::process::sys::group_id;
use crate::schema::{Descriptor, Key, Kind, LONGEST_SOCKET_PATH, Problem};

/// Clients that may wait to be let in.
const BACKLOG: i32 = 16;

/// Who may connect where nobody says: the daemon's own user.
const DEFAULT_MODE: u32 = 0o600;

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A UNIX socket that is made at this path, and removed at the end.
    Unix {
        /// The path.
        path: PathBuf,
        /// Its permissions; to connect takes the right to write.
        mode: u32,
        /// The group it belongs to, by name or number; `None`: whichever files that the daemon makes belong to.
        group: Option<String>,
    },
    /// A TCP port.
    Tcp {
        /// A name or an address of this host.
        host: String,
        /// The port.
        port: u16,
        /// Whether others than this host may reach it.
        remote: bool,
    },
    /// A socket that listens already, which the daemon was started with. It stays when the daemon ends.
    Inherited {
        /// Which.
        fd: Descriptor,
        /// Whether others than this host may reach it.
        remote: bool,
    },
}

/// The keys that say where to listen: `path` and what goes with it, `host` and `port`, or `fd`.
pub(crate) mod keys {
    use super::{Key, Kind, LONGEST_SOCKET_PATH};

    pub const PATH: Key =
        Key::optional("path", Kind::Text(1, LONGEST_SOCKET_PATH), "none", "Path of the UNIX socket to make.");
    pub const MODE: Key = Key::optional(
        "mode",
        Kind::Mode,
        "0600",
        "Permissions of the UNIX socket: who may write may connect. Egret's own.",
    );
    pub const GROUP: Key = Key::optional(
        "group",
        Kind::Text(1, 255),
        "the daemon's",
        "Group of the UNIX socket, by name or number; goes with a `mode` of `0660`, say. Egret's own.",
    );
    pub const HOST: Key =
        Key::optional("host", Kind::Text(1, 255), "none", "Address or name to listen on over TCP, on loopback.");
    pub const PORT: Key = Key::optional("port", Kind::Number(1, 65535, ""), "none", "TCP port to listen on.");
    pub const FD: Key = Key::optional(
        "fd",
        Kind::Descriptor,
        "none",
        "A socket that listens already, which the daemon is started with: its number, or the name that systemd gave it.",
    );
    pub const FORCE_REMOTE: Key = Key::optional(
        "force-remote",
        Kind::Flag,
        "off",
        "Listen on an address that other hosts reach, though whoever connects may do everything. Egret's own.",
    );
}

impl Address {
    /// What the [`keys`] that were given come to; they have been checked one by one.
    ///
    /// # Errors
    /// They name no place, or two.
    pub(crate) fn from_keys(given: &Map<String, Value>) -> Result<Self, Problem> {
        let text = |key: &str| given.get(key).and_then(Value::as_str).map(str::to_owned);
        let strangers = |these: &[&str], place: &str| match these.iter().find(|key| given.contains_key(**key)) {
            Some(key) => Err(Problem::Together(format!("{key} does not go with {place}"))),
            None => Ok(()),
        };
        if let Some(path) = text("path") {
            strangers(&["fd"], "path: there is one place")?;
            strangers(&["host", "port", "force-remote"], "path: it is about TCP")?;
            let mode = text("mode").and_then(|mode| u32::from_str_radix(&mode, 8).ok()).unwrap_or(DEFAULT_MODE);
            return Ok(Self::Unix { path: path.into(), mode, group: text("group") });
        }
        let remote = given.get("force-remote") == Some(&Value::Bool(true));
        if let Some(fd) = text("fd").and_then(|fd| fd.parse().ok()) {
            strangers(&["mode", "group", "host", "port"], "fd: it is about sockets that are made here")?;
            return Ok(Self::Inherited { fd, remote });
        }
        strangers(&["mode", "group"], "host: it is about UNIX sockets")?;
        match (text("host"), given.get("port").and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok())) {
            (Some(host), Some(port)) => Ok(Self::Tcp { host, port, remote }),
            (Some(_), None) => Err(Problem::Missing { key: "port".to_owned() }),
            (None, Some(_)) => Err(Problem::Missing { key: "host".to_owned() }),
            (None, None) => Err(Problem::Missing { key: "path".to_owned() }),
        }
    }
}

/// As messages name it.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix { path, .. } => write!(f, "socket '{}'", path.display()),
            Self::Tcp { host, port, .. } => write!(f, "host '{host}', port {port}"),
            Self::Inherited { fd: Descriptor::Number(number), .. } => write!(f, "descriptor {number}"),
            Self::Inherited { fd: Descriptor::Name(name), .. } => write!(f, "inherited socket '{name}'"),
        }
    }
}

/// A socket that listens.
#[derive(Debug)]
pub(crate) enum Socket {
    /// With its path, to be removed at the end, if it was made here.
    Unix(UnixListener, Option<PathBuf>),
    Tcp(TcpListener),
}

impl Socket {
    /// Listens at `address`, which may be a socket of what is `inherited`.
    ///
    /// # Errors
    /// Somebody else listens there, there is no such group, host or socket, or what the system says.
    pub(crate) fn open(address: &Address, inherited: &mut Inherited) -> io::Result<Self> {
        match address {
            Address::Unix { path, mode, group } => open_unix(path, *mode, group.as_deref()),
            Address::Tcp { host, port, remote } => open_tcp(host, *port, *remote),
            Address::Inherited { fd, remote } => adopt(inherited.take(fd).map_err(io::Error::other)?, *remote),
        }
    }

    /// The next client, if there is one; reading and writing do not block.
    pub(crate) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        let client = match self {
            Self::Unix(listener, _) => listener.accept().and_then(|(client, _)| {
                client.set_nonblocking(true)?;
                Ok(client.into())
            }),
            Self::Tcp(listener) => listener.accept().and_then(|(client, _)| prepare(client)),
        };
        match client {
            Ok(client) => Ok(Some(client)),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener, _) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Self::Unix(_, Some(path)) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn open_unix(path: &Path, mode: u32, group: Option<&str>) -> io::Result<Socket> {
    let group = group.map(find_group).transpose()?;
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
    let new = Socket::Unix(socket.into(), Some(path.to_owned()));
    // Nobody can connect before it listens.
    if let Some((name, id)) = group {
        std::os::unix::fs::lchown(path, None, Some(id))
            .map_err(|e| io::Error::new(e.kind(), format!("cannot give it to group '{name}': {e}")))?;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    listen(&new, BACKLOG)?;
    Ok(new)
}

/// A group by its name, or else by its number.
fn find_group(name: &str) -> io::Result<(&str, u32)> {
    let known = group_id(name)?.or_else(|| name.parse().ok());
    Ok((name, known.ok_or_else(|| io::Error::other(format!("there is no group '{name}'")))?))
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

fn open_tcp(host: &str, port: u16, remote: bool) -> io::Result<Socket> {
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    addresses.iter().try_for_each(|address| check_reach(address, remote))?;
    let listener = TcpListener::bind(addresses.as_slice())?;
    listener.set_nonblocking(true)?;
    Ok(Socket::Tcp(listener))
}

/// That whoever connects at `address` is on this host, or may be elsewhere.
fn check_reach(address: &SocketAddr, remote: bool) -> io::Result<()> {
    if remote || address.ip().is_loopback() {
        return Ok(());
    }
    let why = format!("other hosts reach {}; use path, or host=localhost, or add force-remote=on", address.ip());
    Err(io::Error::other(why))
}

/// Listens on a socket that somebody else made.
fn adopt(socket: OwnedFd, remote: bool) -> io::Result<Socket> {
    let listens = socket_acceptconn(&socket).map_err(|_| io::Error::other("it is not a socket"))?;
    if !listens {
        return Err(io::Error::other("it does not listen"));
    }
    let adopted = match socket_domain(&socket)? {
        AddressFamily::UNIX => Socket::Unix(socket.into(), None),
        AddressFamily::INET | AddressFamily::INET6 => {
            let listener = TcpListener::from(socket);
            check_reach(&listener.local_addr()?, remote)?;
            Socket::Tcp(listener)
        }
        _ => return Err(io::Error::other("it is neither a UNIX socket nor one of TCP")),
    };
    ioctl_fionbio(&adopted, true)?;
    Ok(adopted)
}

fn prepare(client: TcpStream) -> io::Result<OwnedFd> {
    client.set_nonblocking(true)?;
    // An answer should not wait for the next; without that it is late, and right.
    let _ = client.set_nodelay(true);
    Ok(client.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn open(path: &Path, mode: u32, group: Option<&str>) -> Result<Socket, String> {
        let address = Address::Unix { path: path.to_owned(), mode, group: group.map(str::to_owned) };
        Socket::open(&address, &mut Inherited::default()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_socket_has_its_mode_and_group_and_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let group = rustix::process::getgid().as_raw();
        let socket = open(&path, 0o660, Some(&group.to_string())).unwrap();
        let found = std::fs::metadata(&path).unwrap();
        assert_eq!((found.mode() & 0o7777, found.gid()), (0o660, group));
        assert!(open(&path, 0o600, None).unwrap_err().contains("in use by a running server"));
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_group_is_known_by_its_name() {
        assert_eq!(find_group("root").unwrap(), ("root", 0));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert_eq!(open(&path, 0o660, Some("no such group")).unwrap_err(), "there is no group 'no such group'");
        assert!(!path.exists());
    }

    #[test]
    fn tcp_stays_on_this_host_unless_it_is_forced_out() {
        let open = |host: &str, remote| {
            Socket::open(&Address::Tcp { host: host.to_owned(), port: 0, remote }, &mut Inherited::default())
        };
        assert!(open("127.0.0.1", false).is_ok());
        assert!(open("0.0.0.0", true).is_ok());
        let refused = open("0.0.0.0", false).unwrap_err().to_string();
        assert_eq!(refused, "other hosts reach 0.0.0.0; use path, or host=localhost, or add force-remote=on");
    }
}
