//! Sockets on which the daemon is told and asked things: where they are, and who may connect.
//!
//! A UNIX socket has its owner and mode before it listens, so nobody can connect earlier who could not later. A TCP
//! socket has neither, and whoever reaches it may do everything: it is on a loopback address unless that is forced.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use egret_export::{Arrival, UnixSocket, keep_from_blocking};
use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use serde_json::{Map, Value};

use crate::process::Inherited;
use crate::schema::{Access, Descriptor, Key, Kind, LONGEST_SOCKET_PATH, Problem, access};

/// Who may connect where nobody says: the daemon's own user.
const DEFAULT_MODE: u32 = 0o600;

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A UNIX socket that is made at this path, and removed at the end.
    Unix {
        /// The path.
        path: PathBuf,
        /// Who may connect.
        access: Access,
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
        /// Who may connect to a UNIX socket, beside what its maker has said.
        access: Access,
        /// Whether others than this host may reach it.
        remote: bool,
    },
}

/// The keys that say where to listen: `path` and what goes with it, `host` and `port`, or `fd`.
pub(crate) mod keys {
    use super::{Key, Kind, LONGEST_SOCKET_PATH, access};

    pub const PATH: Key =
        Key::optional("path", Kind::Text(1, LONGEST_SOCKET_PATH), "none", "Path of the UNIX socket to make.");
    pub const MODE: Key = access::mode("0600");
    pub(crate) use access::{ALLOW_UID, GROUP, USER};
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
        let read = |given: &Map<String, Value>| serde_json::from_value::<Access>(given.clone().into());
        let mut access = read(given).map_err(|e| Problem::Together(e.to_string()))?;
        if let Some(path) = text("path") {
            strangers(&["fd"], "path: there is one place")?;
            strangers(&["host", "port", "force-remote"], "path: it is about TCP")?;
            access.mode.get_or_insert(DEFAULT_MODE);
            return Ok(Self::Unix { path: path.into(), access });
        }
        let remote = given.get("force-remote") == Some(&Value::Bool(true));
        if let Some(fd) = text("fd").and_then(|fd| fd.parse().ok()) {
            strangers(&["mode", "user", "group", "host", "port"], "fd: it is about sockets that are made here")?;
            return Ok(Self::Inherited { fd, access, remote });
        }
        strangers(&["mode", "user", "group", "allow-uid"], "host: it is about UNIX sockets")?;
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
    /// With its name, for the log.
    Unix(UnixSocket, String),
    Tcp(TcpListener),
}

impl Socket {
    /// Listens at `address`, which may be a socket of what is `inherited`.
    ///
    /// # Errors
    /// Somebody else listens there, there is no such group, host or socket, or what the system says.
    pub(crate) fn open(address: &Address, inherited: &mut Inherited) -> io::Result<Self> {
        match address {
            Address::Unix { path, access } => {
                let socket = UnixSocket::bind(path, &access.resolve()?).map_err(io::Error::other)?;
                Ok(Self::Unix(socket, address.to_string()))
            }
            Address::Tcp { host, port, remote } => open_tcp(host, *port, *remote),
            Address::Inherited { fd, access, remote } => {
                let socket = inherited.take(fd).map_err(io::Error::other)?;
                adopt(socket, address.to_string(), access, *remote)
            }
        }
    }

    /// The next client, if there is one that is let in; reading and writing do not block.
    pub(crate) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        match self {
            Self::Unix(socket, name) => Ok(match socket.accept()? {
                Arrival::Client(client) => Some(client.into()),
                Arrival::Refused(uid) => {
                    tracing::warn!("{name}: a client of user {uid} is not let in: allow-uid does not name it");
                    None
                }
                Arrival::Nobody => None,
            }),
            Self::Tcp(listener) => match listener.accept() {
                Ok((client, _)) => prepare(client).map(Some),
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => Ok(None),
                Err(e) => Err(e),
            },
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket, _) => socket.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
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
fn adopt(socket: OwnedFd, name: String, access: &Access, remote: bool) -> io::Result<Socket> {
    let listens = socket_acceptconn(&socket).map_err(|_| io::Error::other("it is not a socket"))?;
    if !listens {
        return Err(io::Error::other("it does not listen"));
    }
    match socket_domain(&socket)? {
        AddressFamily::UNIX => Ok(Socket::Unix(UnixSocket::adopt(socket, access.resolve()?.uids)?, name)),
        AddressFamily::INET | AddressFamily::INET6 if access.allow_uid.is_empty() => {
            let listener = TcpListener::from(socket);
            check_reach(&listener.local_addr()?, remote)?;
            keep_from_blocking(&listener)?;
            Ok(Socket::Tcp(listener))
        }
        AddressFamily::INET | AddressFamily::INET6 => {
            Err(io::Error::other("it is no UNIX socket, and allow-uid is about those"))
        }
        _ => Err(io::Error::other("it is neither a UNIX socket nor one of TCP")),
    }
}

fn prepare(client: TcpStream) -> io::Result<OwnedFd> {
    client.set_nonblocking(true)?;
    // An answer should not wait for the next; without that it is late, and right.
    let _ = client.set_nodelay(true);
    Ok(client.into())
}

#[cfg(test)]
mod tests {
    use super::*;

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
