//! The `tls-creds-x509` object: certificates and keys, by a name.

use super::Problem;
use super::key::{Foreign, Harmless, Shape, ValueType};
use super::object::object;
use crate::{choices, options};

options! {
    /// Certificates and keys for TLS, by a name.
    #[serde(remote = "Self")]
    pub struct TlsCreds {
        /// Name of the object.
        id: String, ValueType::Name(usize::MAX);
        /// Directory of `ca-cert.pem`, `ca-crl.pem`, `server-cert.pem` and `server-key.pem`, or `client-cert.pem` and
        /// `client-key.pem`. They are read once: when the daemon starts, or by object-add.
        dir: String, ValueType::Text(1, super::blockdev::LONGEST_PATH);
        /// Which side of connections they are for.
        endpoint: Endpoint, ValueType::Word(Endpoint::words), default Endpoint::Client;
        /// Whether the other side needs a certificate that one of `ca-cert.pem` has signed. Without that a connection is
        /// encrypted, and nobody knows with whom.
        verify_peer: bool, ValueType::Flag, default "on";
    }
}

choices! {
    /// A side of connections.
    pub enum Endpoint {
        /// It connects: `driver=nbd`.
        "client" => Client;
        /// It is connected to: the NBD server.
        "server" => Server;
    }
}

static SHAPE: Shape = Shape {
    keys: TlsCreds::KEYS,
    variants: None,
    foreign: &[
        Foreign {
            name: "priority",
            harmless: Harmless::No,
            because: "it is in GnuTLS' words; TLS 1.3 is spoken, and 1.2 with ChaCha20",
        },
        Foreign {
            name: "passwordid",
            harmless: Harmless::No,
            because: "keys that are encrypted are not read; let nobody else read the file",
        },
        Foreign {
            name: "sanity-check",
            harmless: Harmless::Any,
            because: "certificates are checked by whom they are shown to",
        },
    ],
};

object!(TlsCreds, "tls-creds-x509", "id", &SHAPE);

impl TlsCreds {
    fn own_name(&self) -> &str {
        &self.id
    }

    const fn check(&self) -> Result<(), Problem> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, ConfigFile, effective};
    use crate::keyval;
    use crate::schema::{Blockdev, IoThread, NbdServer, Object as _, untagged};

    fn read(text: &str) -> Result<TlsCreds, String> {
        let (value, spelling) = keyval::read(text, "qom-type").unwrap();
        untagged::<TlsCreds>(value, spelling).map_err(|error| error.to_string())
    }

    #[test]
    fn credentials_are_spelled_as_qemu_spells_them() {
        let least = read("tls-creds-x509,id=t,dir=/tls").unwrap();
        assert_eq!((least.endpoint, least.verify_peer), (Endpoint::Client, true));
        let all = read("tls-creds-x509,id=t,dir=/tls,endpoint=server,verify-peer=off,sanity-check=off").unwrap();
        assert_eq!((all.endpoint, all.verify_peer), (Endpoint::Server, false));
        for (more, line) in [
            ("", "tls-creds-x509 't': dir is missing"),
            (",dir=/x,endpoint=peer", "tls-creds-x509 't': endpoint must be client or server, got 'peer'"),
        ] {
            assert_eq!(read(&format!("tls-creds-x509,id=t{more}")).unwrap_err(), line);
        }
        assert!(read("tls-creds-x509,id=t,dir=/x,priority=NORMAL").unwrap_err().contains("GnuTLS"));
        assert!(read("tls-creds-x509,id=t,dir=/x,passwordid=s").unwrap_err().contains("encrypted"));
        for other in ["tls-creds-psk", "tls-creds-anon"] {
            let (value, spelling) = keyval::read(&format!("{other},id=t,dir=/x"), "qom-type").unwrap();
            let line = IoThread::from_user_object(value, spelling).unwrap_err().to_string();
            assert!(line.ends_with("use tls-creds-x509"), "{line}");
        }
    }

    #[test]
    fn who_names_credentials_names_those_of_its_side() {
        let with = |nbd: &str, server: &str| {
            let (value, spelling) = keyval::read(&format!("nbd,node-name=d,{nbd}"), "driver").unwrap();
            let blockdevs = vec![Blockdev::from_value(value, spelling).map_err(|error| error.to_string())?];
            let (value, spelling) = keyval::read(&format!("addr.type=unix,addr.path=/s{server}"), "").unwrap();
            let nbd_server = Some(NbdServer::from_value(value, spelling).unwrap());
            let tls_creds = ["c,endpoint=client", "s,endpoint=server"].map(|text| read(&format!("dir=/x,id={text}")));
            let tls_creds = tls_creds.into_iter().collect::<Result<_, _>>()?;
            Config { tls_creds, blockdevs, nbd_server, ..Config::empty() }.checked().map_err(|error| error.to_string())
        };
        let address = "server.type=unix,server.path=/n";
        let good = with(&format!("{address},tls-creds=c,tls-hostname=h"), ",tls-creds=s").unwrap();
        assert_eq!(ConfigFile::read("f", &effective(&good)).unwrap().config().unwrap(), good.filled_in());
        for (nbd, server, line) in [
            ("tls-creds=x", "", "blockdev 'd': tls-creds: there is no tls-creds-x509 'x'; known are c, s"),
            ("tls-creds=s", "", "blockdev 'd': tls-creds: 's' has endpoint=server, and endpoint=client is needed"),
            ("tls-hostname=h", "", "blockdev 'd': tls-hostname needs tls-creds"),
            ("", ",tls-creds=c", "nbd-server: tls-creds: 'c' has endpoint=client, and endpoint=server is needed"),
        ] {
            assert_eq!(with(format!("{address},{nbd}").trim_end_matches(','), server).unwrap_err(), line);
        }
        let uri = "filename=nbds://h/e";
        assert!(with(uri, "").unwrap_err().contains("needs tls-creds"), "who asks for TLS gets nothing less");
        with(&format!("{uri},tls-creds=c"), "").unwrap();
    }
}
