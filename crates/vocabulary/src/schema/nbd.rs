//! `--nbd-server`: where the clients of exports over NBD connect.

use serde_json::Value;

use super::access::Access;
use super::export::UnixAddr;
use super::key::{Foreign, Harmless, Shape, ValueType};
use super::object::read_options;
use super::{Problem, Spelling};
use crate::{options, variants};

options! {
    /// The server that has all exports of type `nbd`.
    pub struct NbdServer {
        /// Where it listens.
        addr: NbdAddr, ValueType::Object(&ADDR);
        /// Who may connect.
        #[serde(flatten)]
        access: Access => Access::KEYS;
        /// Clients of its exports that it has at a time, those of all together; 0 is any number. Who comes then waits.
        max_connections: u32, ValueType::Number(0, u32::MAX as u64, "clients"), default 100;
        /// The `tls-creds-x509` with which all is encrypted; a client that does not encrypt is told that it must, and of
        /// exports it is told nothing.
        tls_creds: Option<String>, ValueType::Name(usize::MAX), unset "no encryption";
        /// How long a client may take to choose an export; 0 is as long as it likes.
        handshake_max_seconds: u32, ValueType::Number(0, u32::MAX as u64, "seconds"), default 10;
    }
}

variants! {
    /// Where it listens.
    pub enum NbdAddr by "type", "Kind of address." {
        /// A UNIX socket, made by the daemon.
        "unix" => Unix(UnixAddr);
        /// A TCP port.
        "inet" => Inet(InetAddr);
    }
    foreign &["fd", "vsock"], because "Egret serves NBD on sockets that it makes itself, UNIX and TCP"
}

options! {
    /// A TCP port.
    pub struct InetAddr {
        /// Address of this host to listen on, or `localhost`; another name only without a sandbox. Whoever reaches it may
        /// read and, of exports that are writable, write, unless `tls-creds` ask for a certificate.
        host: String, ValueType::Text(1, 255);
        /// TCP port to listen on; text, as in QEMU.
        port: String, ValueType::Text(1, 5);
    }
}

/// The keys of the server.
pub static NBD_SERVER: Shape = Shape {
    keys: NbdServer::KEYS,
    variants: None,
    foreign: &[Foreign { name: "tls-authz", harmless: Harmless::No, because: NO_AUTHZ }],
};

/// Why lists of users are refused.
pub const NO_AUTHZ: &str =
    "who has a certificate of the CA's is let in (tls-creds with verify-peer=on); let the CA sign for those alone";

static ADDR: Shape = Shape { keys: &[], variants: Some(NbdAddr::VARIANTS), foreign: FOREIGN_NBD_ADDR };

/// What QEMU's addresses have beside.
pub const FOREIGN_NBD_ADDR: &[Foreign] = &[
    Foreign { name: "abstract", harmless: Harmless::Off, because: "clients find a socket by its path" },
    Foreign { name: "tight", harmless: Harmless::Any, because: "it concerns abstract addresses" },
    Foreign { name: "numeric", harmless: Harmless::Any, because: "host and port are taken as they are" },
    Foreign { name: "to", harmless: Harmless::No, because: "one port is listened on" },
    Foreign { name: "ipv4", harmless: Harmless::Any, because: "host says it: 0.0.0.0, or ::" },
    Foreign { name: "ipv6", harmless: Harmless::Any, because: "host says it: 0.0.0.0, or ::" },
    Foreign { name: "keep-alive", harmless: Harmless::On, because: "it is always on" },
    Foreign { name: "mptcp", harmless: Harmless::Off, because: "plain TCP is spoken" },
];

impl NbdServer {
    /// Reads what the keys say.
    ///
    /// # Errors
    /// The first thing that is wrong with them.
    pub fn from_value(value: Value, spelling: Spelling) -> Result<Self, Problem> {
        let read: Self = read_options(value, &NBD_SERVER, spelling)?;
        if let NbdAddr::Inet(inet) = &read.addr {
            inet.number()?;
            let whose = (!read.access.allow_uid.is_empty()).then_some("allow-uid");
            if let Some(key) = read.access.about_its_file().chain(whose).next() {
                return Err(Problem::Together(format!(
                    "{key} does not go with addr.type=inet: it is about UNIX sockets"
                )));
            }
        }
        Ok(read)
    }
}

impl InetAddr {
    /// The port.
    ///
    /// # Errors
    /// It is no number of a port.
    pub fn number(&self) -> Result<u16, Problem> {
        let number = self.port.parse().ok().filter(|port| *port > 0);
        number.ok_or_else(|| Problem::must("addr.port", "1..=65535", format!("'{}'", self.port)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, ConfigFile, effective};
    use crate::keyval;
    use crate::schema::{Object as _, TlsCreds};
    use serde_json::json;

    fn read(text: &str) -> Result<NbdServer, String> {
        let (value, spelling) = keyval::read(text, "").unwrap();
        NbdServer::from_value(value, spelling).map_err(|problem| problem.to_string())
    }

    fn creds() -> TlsCreds {
        let creds = json!({"id": "t", "dir": "/tls", "endpoint": "server"});
        TlsCreds::from_value(creds, Spelling::Typed).unwrap()
    }

    #[test]
    fn a_server_reads_back_from_a_file_as_itself() {
        for text in [
            "addr.type=unix,addr.path=/s,mode=0660,group=kvm,user=a,allow-uid=7,max-connections=0,tls-creds=t,handshake-max-seconds=3",
            "addr.type=inet,addr.host=::1,addr.port=10809,addr.keep-alive=on,addr.ipv6=off",
        ] {
            let server = read(text).unwrap();
            let (nbd_server, tls_creds) = (Some(server.clone()), vec![creds()]);
            let config = Config { nbd_server, tls_creds, ..Config::empty() };
            let back = ConfigFile::read("f", &effective(&config)).unwrap();
            assert_eq!(back.config().unwrap().nbd_server, Some(server));
        }
        let least = read("addr.type=unix,addr.path=/s").unwrap();
        assert_eq!((least.max_connections, least.handshake_max_seconds), (100, 10));
    }

    #[test]
    fn what_is_no_server_is_said_in_one_line() {
        for (text, line) in [
            ("addr.type=inet,addr.host=h,addr.port=0", "addr.port must be 1..=65535, got '0'"),
            ("addr.type=inet,addr.host=h,addr.port=http", "addr.port must be 1..=65535, got 'http'"),
            ("addr.type=unix", "addr.path is missing"),
            ("max-connections=1", "addr is missing"),
            (
                "addr.type=inet,addr.host=h,addr.port=1,mode=0600",
                "mode does not go with addr.type=inet: it is about UNIX sockets",
            ),
            (
                "addr.type=inet,addr.host=h,addr.port=1,allow-uid=7",
                "allow-uid does not go with addr.type=inet: it is about UNIX sockets",
            ),
        ] {
            assert_eq!(read(text).unwrap_err(), line, "{text}");
        }
        assert!(read("addr.type=unix,addr.path=/s,tls-authz=t").unwrap_err().contains("certificate of the CA's"));
        assert!(read("addr.type=fd,addr.str=s").unwrap_err().contains("sockets that it makes itself"));
        let file = "[nbd-server]\naddr = { type = \"unix\" }\n";
        assert_eq!(ConfigFile::read("f", file).unwrap_err().to_string(), "f:1: nbd-server: addr.path is missing");
    }
}
