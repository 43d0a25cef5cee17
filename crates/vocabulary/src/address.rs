//! Where monitors and metrics are found: a UNIX socket, a TCP port, or a socket that the daemon inherits.

use std::fmt;
use std::path::PathBuf;

use serde_json::{Map, Value};

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
        Key::optional("path", Kind::Text(1, LONGEST_SOCKET_PATH), &"none", "Path of the UNIX socket to make.");
    pub const MODE: Key = access::mode(&"0600");
    pub(crate) use access::{ALLOW_UID, GROUP, USER};
    pub const HOST: Key =
        Key::optional("host", Kind::Text(1, 255), &"none", "Address or name to listen on over TCP, on loopback.");
    pub const PORT: Key = Key::optional("port", Kind::Number(1, 65535, ""), &"none", "TCP port to listen on.");
    pub const FD: Key = Key::optional(
        "fd",
        Kind::Descriptor,
        &"none",
        "A socket that listens already, which the daemon is started with: its number, or the name that systemd gave it.",
    );
    pub const FORCE_REMOTE: Key = Key::optional(
        "force-remote",
        Kind::Flag,
        &"off",
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
