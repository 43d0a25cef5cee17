//! Where a disk is, and how it is asked for.

#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::time::Duration;

use crate::tls::ClientCredentials;

/// Everything that is needed to reach an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// What messages call the disk.
    pub node_name: String,
    /// What messages call the export.
    pub uri: String,
    /// Where its server listens.
    pub address: Address,
    /// How all that is said there is encrypted, if it is.
    pub encryption: Option<Encryption>,
    /// The export's name; empty for the one that the server thinks of.
    pub export: String,
    /// Whether nothing is to be written.
    pub read_only: bool,
    /// How long requests wait for a connection that has ended; those that have waited longer fail, and the others fail at
    /// once until there is one.
    pub reconnect_delay: Duration,
    /// For how long it is tried to open the disk; once, if that is nothing.
    pub open_timeout: Duration,
}

/// What a connection is encrypted by, without which there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encryption {
    /// Who the client is, and whom it believes.
    pub credentials: ClientCredentials,
    /// Whom the server's certificate is to be for, if not for anybody.
    pub name: Option<String>,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// At a UNIX socket of this machine's.
    Unix(PathBuf),
    /// At a TCP port.
    Inet {
        /// A name, or an address.
        host: String,
        /// The port.
        port: u16,
    },
}
