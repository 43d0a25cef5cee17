//! Where monitors and metrics are found: a UNIX socket, a TCP port, or a socket that the daemon inherits.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::options;
use crate::schema::{Access, Descriptor, LONGEST_SOCKET_PATH, Mode, Problem, ValueType};

/// Who may connect where nobody says: the daemon's own user.
const DEFAULT_MODE: Mode = Mode(0o600);

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

impl Address {
    /// Where the socket is made, if a UNIX socket is.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Unix { path, .. } => Some(path),
            Self::Tcp { .. } | Self::Inherited { .. } => None,
        }
    }
}

options! {
    /// The keys that say where to listen: `path` and what goes with it, `host` and `port`, or `fd`.
    pub struct Listen {
        /// Path of the UNIX socket to make.
        path: Option<String>, ValueType::Text(1, LONGEST_SOCKET_PATH), unset "none";
        /// Who may connect.
        #[serde(flatten)]
        access: Access => &Access::keys(&DEFAULT_MODE);
        /// Address to listen on over TCP, on loopback, or `localhost`; another name only without a sandbox.
        host: Option<String>, ValueType::Text(1, 255), unset "none";
        /// TCP port to listen on.
        port: Option<u16>, ValueType::Number(1, 65535, ""), unset "none";
        /// A socket that listens already, which the daemon is started with: its number, or the name that systemd gave it.
        fd: Option<Descriptor>, ValueType::Descriptor, unset "none";
        /// Listen on an address that other hosts reach, though whoever connects may do everything. Egret's own.
        force_remote: Option<bool>, ValueType::Flag, unset "off";
    }
}

impl Listen {
    /// The place that the keys name, which have been checked one by one.
    ///
    /// # Errors
    /// They name no place, or two.
    pub(crate) fn address(self) -> Result<Address, Problem> {
        let given = serde_json::to_value(&self).map_err(|e| Problem::Together(e.to_string()))?;
        let strangers = |these: &[&str], place: &str| match these.iter().find(|key| given.get(key).is_some()) {
            Some(key) => Err(Problem::Together(format!("{key} does not go with {place}"))),
            None => Ok(()),
        };
        let Self { path, mut access, host, port, fd, force_remote } = self;
        if let Some(path) = path {
            strangers(&["fd"], "path: there is one place")?;
            strangers(&["host", "port", "force-remote"], "path: it is about TCP")?;
            access.mode.get_or_insert(DEFAULT_MODE);
            return Ok(Address::Unix { path: path.into(), access });
        }
        let remote = force_remote == Some(true);
        if let Some(fd) = fd {
            strangers(&["mode", "user", "group", "host", "port"], "fd: it is about sockets that are made here")?;
            return Ok(Address::Inherited { fd, access, remote });
        }
        strangers(&["mode", "user", "group", "allow-uid"], "host: it is about UNIX sockets")?;
        match (host, port) {
            (Some(host), Some(port)) => Ok(Address::Tcp { host, port, remote }),
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
