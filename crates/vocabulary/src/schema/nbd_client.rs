//! A disk that an NBD server has: where that is, in keys or as a URI.

use std::fmt::Write as _;

use super::Problem;
use super::blockdev::LONGEST_PATH;
use super::export::LONGEST_SOCKET_PATH;
use super::key::{Foreign, Harmless, Shape, ValueType};
use crate::{options, variants};

/// IANA's for NBD.
const PORT: u16 = 10809;
/// NBD's limit of a string.
const LONGEST_EXPORT: usize = 4096;
/// Days, in seconds.
const LONGEST_DELAY: u64 = 30 * 24 * 3600;

options! {
    /// A disk that an NBD server has.
    pub struct Nbd {
        /// Where the server listens (`server.type=unix,server.path=/run/nbd.sock`).
        server: Option<ServerAddr>, ValueType::Object(&SERVER), unset "filename says it";
        /// The export's name.
        export: Option<String>, ValueType::Text(0, LONGEST_EXPORT), unset "what filename says, or the server's default export";
        /// Server and export as a URI, in the place of both: `nbd+unix:///NAME?socket=PATH` or `nbd://HOST:PORT/NAME`; `nbds`
        /// in the place of `nbd` insists on `tls-creds`.
        filename: Option<String>, ValueType::Text(1, LONGEST_PATH), unset "server says it";
        /// The `tls-creds-x509` with which all is encrypted; without them nothing is, and with them nothing goes without.
        tls_creds: Option<String>, ValueType::Name(usize::MAX), unset "no encryption";
        /// Whom the server's certificate is to be for; needs `tls-creds`.
        tls_hostname: Option<String>, ValueType::Text(1, 255), unset "its host; at a UNIX socket whoever it is for";
        /// How long requests wait for a new connection when theirs has ended, in seconds, before they fail; until there is
        /// one, later ones fail at once. With 0 all of them do.
        reconnect_delay: u32, ValueType::Number(0, LONGEST_DELAY, "seconds"), default 0;
        /// How long it is tried to open the disk, in seconds; with 0 once.
        open_timeout: u32, ValueType::Number(0, LONGEST_DELAY, "seconds"), default 0;
    }
}

variants! {
    /// Where an NBD server listens.
    pub enum ServerAddr by "type", "Kind of address." {
        /// A UNIX socket.
        "unix" => Unix(SocketPath);
        /// A TCP port.
        "inet" => Inet(TcpAddr);
    }
    foreign &["fd", "vsock"], because "Egret connects to NBD servers by UNIX sockets and TCP"
}

options! {
    /// A UNIX socket that somebody listens on.
    pub struct SocketPath {
        /// Path of the server's UNIX socket.
        path: String, ValueType::Text(1, LONGEST_SOCKET_PATH);
    }
}

options! {
    /// A TCP port that somebody listens on.
    pub struct TcpAddr {
        /// The server's address, or `localhost`; another name only without a sandbox.
        host: String, ValueType::Text(1, 255);
        /// The server's TCP port; text, as in QEMU.
        port: String, ValueType::Text(1, 5);
    }
}

/// The keys of a server's address.
static SERVER: Shape = Shape {
    keys: &[],
    variants: Some(ServerAddr::VARIANTS),
    foreign: &[
        Foreign { name: "abstract", harmless: Harmless::Off, because: "a server's socket is found by its path" },
        Foreign { name: "tight", harmless: Harmless::Any, because: "it concerns abstract addresses" },
        Foreign { name: "numeric", harmless: Harmless::Any, because: "host and port are taken as they are" },
        Foreign { name: "keep-alive", harmless: Harmless::On, because: "it is always on" },
        Foreign { name: "to", harmless: Harmless::Any, because: "it concerns those who listen" },
        Foreign { name: "ipv4", harmless: Harmless::Any, because: "host says it: 127.0.0.1, or ::1" },
        Foreign { name: "ipv6", harmless: Harmless::Any, because: "host says it: 127.0.0.1, or ::1" },
        Foreign { name: "mptcp", harmless: Harmless::Off, because: "plain TCP is spoken" },
    ],
};

/// QEMU's key that is not done.
pub(super) const BITMAP: Foreign =
    Foreign { name: "x-dirty-bitmap", harmless: Harmless::No, because: "a server's metadata is not read" };

/// An export, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdPlace {
    /// Where the server listens.
    pub server: NbdEndpoint,
    /// The export's name.
    pub export: String,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdEndpoint {
    /// A UNIX socket, by its path.
    Unix(String),
    /// A host, and the port there.
    Inet(String, u16),
}

impl Nbd {
    /// Where the export is, as either of the two ways says it.
    ///
    /// # Errors
    /// Neither says it, or both, or the URI is none; or what is said of encryption does not go together.
    pub fn place(&self) -> Result<NbdPlace, Problem> {
        let together = |line: &str| Err(Problem::Together(line.to_owned()));
        if self.tls_creds.is_none() {
            if self.tls_hostname.is_some() {
                return together("tls-hostname needs tls-creds");
            }
            if self.filename.as_ref().is_some_and(|uri| uri.starts_with("nbds")) {
                return together("filename=nbds... needs tls-creds: an object tls-creds-x509 with endpoint=client");
            }
        }
        match (&self.server, &self.filename) {
            (None, None) => together("server or filename is missing: where the NBD server listens"),
            (Some(_), Some(_)) => together("server and filename say the same thing twice: use one of them"),
            (None, Some(_)) if self.export.is_some() => {
                together("export does not go with filename, whose path is the export: use one of them")
            }
            (None, Some(uri)) => place_of(uri).map_err(|why| Problem::must("filename", why, format!("'{uri}'"))),
            (Some(server), None) => {
                let export = self.export.clone().unwrap_or_default();
                let server = match server {
                    ServerAddr::Unix(SocketPath { path }) => NbdEndpoint::Unix(path.clone()),
                    ServerAddr::Inet(TcpAddr { host, port }) => {
                        let number = port.parse().ok().filter(|port| *port > 0);
                        let wrong = || Problem::must("server.port", "1..=65535", format!("'{port}'"));
                        NbdEndpoint::Inet(host.clone(), number.ok_or_else(wrong)?)
                    }
                };
                Ok(NbdPlace { server, export })
            }
        }
    }

    /// The URI of the export.
    pub fn uri(&self) -> String {
        let uri = self.place().map(|place| place.to_string()).unwrap_or_default();
        if self.tls_creds.is_some() { uri.replacen("nbd", "nbds", 1) } else { uri }
    }

    /// Whom the server's certificate is to be for, if not for anybody.
    pub fn certified_name(&self) -> Option<String> {
        self.tls_hostname.clone().or_else(|| match self.place().ok()?.server {
            NbdEndpoint::Inet(host, _) => Some(host),
            NbdEndpoint::Unix(_) => None,
        })
    }
}

/// Its URI.
impl std::fmt::Display for NbdPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let export = encoded(&self.export);
        match &self.server {
            NbdEndpoint::Unix(path) => write!(f, "nbd+unix:///{export}?socket={}", encoded(path)),
            NbdEndpoint::Inet(host, port) if host.contains(':') => write!(f, "nbd://[{host}]:{port}/{export}"),
            NbdEndpoint::Inet(host, port) => write!(f, "nbd://{host}:{port}/{export}"),
        }
    }
}

/// Reads a URI (NBD's doc/uri.md).
fn place_of(uri: &str) -> Result<NbdPlace, &'static str> {
    const FORM: &str = "nbd+unix:///NAME?socket=PATH or nbd://HOST:PORT/NAME";
    let (scheme, rest) = uri.split_once("://").ok_or(FORM)?;
    let scheme = scheme.strip_prefix("nbds").map_or(scheme.to_owned(), |rest| format!("nbd{rest}"));
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, export) = rest.split_once('/').unwrap_or((rest, ""));
    let export = decoded(export).filter(|export| export.len() <= LONGEST_EXPORT).ok_or(FORM)?;
    let server = match scheme.as_str() {
        "nbd+unix" => {
            let socket = query.strip_prefix("socket=").filter(|path| !path.contains('&')).ok_or(FORM)?;
            let path = decoded(socket).filter(|path| (1..=LONGEST_SOCKET_PATH).contains(&path.len())).ok_or(FORM)?;
            if !authority.is_empty() {
                return Err(FORM);
            }
            NbdEndpoint::Unix(path)
        }
        "nbd" | "nbd+tcp" => {
            let (host, port) = match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
                Some((host, port)) => (host, port.strip_prefix(':').or(port.is_empty().then_some("")).ok_or(FORM)?),
                None => authority.split_once(':').unwrap_or((authority, "")),
            };
            let port = match port {
                "" => Some(PORT),
                port => port.parse().ok().filter(|port| *port > 0),
            };
            if host.is_empty() || host.contains('@') || !query.is_empty() {
                return Err(FORM);
            }
            NbdEndpoint::Inet(host.to_owned(), port.ok_or(FORM)?)
        }
        _ => return Err(FORM),
    };
    Ok(NbdPlace { server, export })
}

/// Without `%xx`; `None` if that is not what it should be.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || (rest.next()? as char).to_digit(16);
                (digit()? * 16 + digit()?) as u8
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
}

/// With `%xx` for what would mean something else.
fn encoded(text: &str) -> String {
    let mut all = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => all.push(byte.into()),
            byte => {
                let _ = write!(all, "%{byte:02x}");
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyval;
    use crate::schema::{Blockdev, Driver, Object as _};

    fn nbd(keys: &str) -> Result<Nbd, String> {
        let (value, spelling) = keyval::read(&format!("nbd,node-name=d,{keys}"), "driver").unwrap();
        let blockdev = Blockdev::from_value(value, spelling).map_err(|e| e.to_string())?;
        let Driver::Nbd(nbd) = blockdev.driver else { panic!("it is nbd") };
        Ok(nbd)
    }

    #[test]
    fn a_uri_says_what_keys_say() {
        for (uri, keys) in [
            ("nbd+unix:///?socket=/run/x", "server.type=unix,server.path=/run/x"),
            ("nbd+unix:///a/b%20c?socket=/run/x%3fy", "server.type=unix,server.path=/run/x?y,export=a/b c"),
            ("nbd://10.0.0.1", "server.type=inet,server.host=10.0.0.1,server.port=10809"),
            ("nbd+tcp://h:7/e", "server.type=inet,server.host=h,server.port=7,export=e"),
            ("nbd://[::1]:99/", "server.type=inet,server.host=::1,server.port=99"),
        ] {
            let [by_uri, by_keys] =
                [format!("filename={uri}"), keys.to_owned()].map(|keys| nbd(&keys).unwrap().place().unwrap());
            assert_eq!(by_uri, by_keys);
            assert_eq!(place_of(&by_keys.to_string()).unwrap(), by_keys, "and it is said as such a one");
        }
    }

    #[test]
    fn what_says_where_a_server_is_says_it_once_and_as_it_should() {
        let refused = |keys: &str| nbd(keys).unwrap_err();
        assert_eq!(refused("export=x"), "blockdev 'd': server or filename is missing: where the NBD server listens");
        assert!(refused("filename=nbd://h,server.type=unix,server.path=/x").contains("twice"));
        assert!(refused("filename=nbd://h,export=x").contains("does not go with filename"));
        assert!(
            refused("server.type=inet,server.host=h,server.port=0").contains("server.port must be 1..=65535, got '0'")
        );
        for wrong in [
            "/dev/nbd0",
            "nbd://",
            "nbd://h:0",
            "nbd://h:x",
            "nbd://u@h",
            "nbd://h?x=1",
            "nbd+unix:///x",
            "nbd+unix://h/?socket=/x",
            "nbd://h/%0",
            "nbd://h/%00",
            "http://h",
        ] {
            assert!(
                refused(&format!("filename={wrong}")).contains("filename must be nbd+unix:///NAME?socket=PATH"),
                "{wrong}"
            );
        }
    }
}
