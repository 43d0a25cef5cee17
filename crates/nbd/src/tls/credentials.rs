//! Certificates and keys, in files that QEMU names.
//!
//! | file | server | client |
//! |---|---|---|
//! | `ca-cert.pem` | whose clients are let in (`verify-peer`) | whose servers are believed (`verify-peer`) |
//! | `ca-crl.pem` | which of those are not, if it is there | likewise |
//! | `server-cert.pem`, `server-key.pem` | who it is | |
//! | `client-cert.pem`, `client-key.pem` | | who it is, if they are there |

#![forbid(unsafe_code)]

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use egret_confine::{Use, refusal};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection, SupportedCipherSuite};

use super::session::Session;
use super::verifier::Verifier;

const CA: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

/// Why there are none.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be read.
    #[error("'{0}': {1}")]
    File(PathBuf, #[source] io::Error),
    /// The sandbox forbids it.
    #[error("'{0}': {1}")]
    Confined(PathBuf, String),
    /// A file does not hold what it should.
    #[error("'{0}' holds no {1} in PEM{2}")]
    Pem(PathBuf, &'static str, &'static str),
    /// What is in the files does not go together, or is of a kind that is not spoken.
    #[error("what is in '{0}' is of no use: {1}")]
    Unusable(PathBuf, String),
    /// Half of what says who a client is.
    #[error("'{0}' is there, and '{1}' is not: a client has both or none")]
    Half(PathBuf, &'static str),
}

/// What a server's connections are begun with.
#[derive(Clone)]
pub struct ServerCredentials {
    config: Arc<ServerConfig>,
    verifies_peers: bool,
}

/// What a client's connections are begun with.
#[derive(Clone)]
pub struct ClientCredentials {
    /// For servers that are to have a name.
    named: Arc<ClientConfig>,
    /// For those that may have any.
    nameless: Arc<ClientConfig>,
}

impl ServerCredentials {
    /// Reads what `dir` has for a server, which lets in those clients alone that have a certificate of its CA's if
    /// `verify_peer` says so.
    ///
    /// # Errors
    /// A file is not there, or does not hold what it should.
    pub fn read(dir: &Path, verify_peer: bool) -> Result<Self, CredentialsError> {
        let unusable = |e: &dyn fmt::Display| CredentialsError::Unusable(dir.to_owned(), e.to_string());
        let provider = provider();
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().map_err(|e| unusable(&e))?;
        let builder = if verify_peer {
            let revoked = revoked(dir)?;
            let verifier = WebPkiClientVerifier::builder_with_provider(authorities(dir)?, provider);
            let verifier = verifier.with_crls(revoked).allow_unknown_revocation_status();
            builder.with_client_cert_verifier(verifier.build().map_err(|e| unusable(&e))?)
        } else {
            builder.with_no_client_auth()
        };
        let (certificates, key) = identity(dir, "server-cert.pem", "server-key.pem")?;
        let mut config = builder.with_single_cert(certificates, key).map_err(|e| unusable(&e))?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), verifies_peers: verify_peer })
    }

    /// Whether clients need a certificate.
    pub const fn verifies_peers(&self) -> bool {
        self.verifies_peers
    }

    /// Begins a connection, in which the client speaks first.
    ///
    /// # Errors
    /// What rustls says.
    pub fn session(&self) -> Result<Session, rustls::Error> {
        Ok(Session::new(ServerConnection::new(Arc::clone(&self.config))?.into()))
    }
}

impl ClientCredentials {
    /// Reads what `dir` has for a client, which believes those servers alone that have a certificate of its CA's if
    /// `verify_peer` says so.
    ///
    /// # Errors
    /// A file is not there, or does not hold what it should.
    pub fn read(dir: &Path, verify_peer: bool) -> Result<Self, CredentialsError> {
        let unusable = |e: &dyn fmt::Display| CredentialsError::Unusable(dir.to_owned(), e.to_string());
        let provider = provider();
        let believed = if verify_peer {
            let verifier = WebPkiServerVerifier::builder_with_provider(authorities(dir)?, Arc::clone(&provider));
            let verifier = verifier.with_crls(revoked(dir)?).allow_unknown_revocation_status();
            Some(verifier.build().map_err(|e| unusable(&e))?)
        } else {
            None
        };
        let (certificate, key) = ("client-cert.pem", "client-key.pem");
        let identity = match (dir.join(certificate).exists(), dir.join(key).exists()) {
            (false, false) => None,
            (true, true) => Some(identity(dir, certificate, key)?),
            (true, false) => return Err(CredentialsError::Half(dir.join(certificate), key)),
            (false, true) => return Err(CredentialsError::Half(dir.join(key), certificate)),
        };
        let config = |is_named: bool| -> Result<_, CredentialsError> {
            let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
            let builder = builder.with_safe_default_protocol_versions().map_err(|e| unusable(&e))?;
            let verifier = Verifier::new(believed.clone(), is_named, &provider);
            let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
            let mut config = match &identity {
                Some((certificates, key)) => {
                    builder.with_client_auth_cert(certificates.clone(), key.clone_key()).map_err(|e| unusable(&e))?
                }
                None => builder.with_no_client_auth(),
            };
            config.resumption = Resumption::disabled();
            config.enable_sni = is_named;
            Ok(Arc::new(config))
        };
        Ok(Self { named: config(true)?, nameless: config(false)? })
    }

    /// Begins a connection to a server whose certificate is to be for `name`, if one is given.
    ///
    /// # Errors
    /// It is no name of a host, nor an address.
    pub fn session(&self, name: Option<&str>) -> Result<Session, rustls::Error> {
        let config = if name.is_some() { &self.named } else { &self.nameless };
        let name = ServerName::try_from(name.unwrap_or("localhost").to_owned());
        let name = name.map_err(|_| rustls::Error::General("tls-hostname is no name of a host".to_owned()))?;
        Ok(Session::new(ClientConnection::new(Arc::clone(config), name)?.into()))
    }
}

impl PartialEq for ClientCredentials {
    /// Whether they were read at once.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.named, &other.named)
    }
}

impl Eq for ClientCredentials {}

impl fmt::Debug for ClientCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCredentials").finish_non_exhaustive()
    }
}

impl fmt::Debug for ServerCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerCredentials").finish_non_exhaustive()
    }
}

/// Ciphers whose keys last as long as a connection: in TLS 1.3 they change on the way, and in TLS 1.2, where they cannot, those
/// of AES are good for 2^24 records.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    provider.cipher_suites.retain(|suite| match suite {
        SupportedCipherSuite::Tls12(suite) => suite.common.confidentiality_limit == u64::MAX,
        SupportedCipherSuite::Tls13(_) => true,
    });
    Arc::new(provider)
}

fn bytes(path: &Path) -> Result<Vec<u8>, CredentialsError> {
    std::fs::read(path).map_err(|e| {
        let denied = e.kind() == io::ErrorKind::PermissionDenied;
        match denied.then(|| refusal(path, Use::Image)).flatten() {
            Some(why) => CredentialsError::Confined(path.to_owned(), why),
            None => CredentialsError::File(path.to_owned(), e),
        }
    })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes(path)?).collect();
    let found = found.ok().filter(|found| !found.is_empty());
    found.ok_or_else(|| CredentialsError::Pem(path.to_owned(), "certificate", ""))
}

fn authorities(dir: &Path) -> Result<Arc<RootCertStore>, CredentialsError> {
    let path = dir.join(CA);
    let mut store = RootCertStore::empty();
    for certificate in certificates(&path)? {
        store.add(certificate).map_err(|e| CredentialsError::Unusable(path.clone(), e.to_string()))?;
    }
    Ok(Arc::new(store))
}

fn revoked(dir: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, CredentialsError> {
    let path = dir.join(REVOKED);
    if !path.exists() {
        return Ok(Vec::new());
    }
    let found: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(&bytes(&path)?).collect();
    let found = found.ok().filter(|found| !found.is_empty());
    found.ok_or(CredentialsError::Pem(path, "list of revoked certificates", ""))
}

type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn identity(dir: &Path, certificate: &str, key: &str) -> Result<Identity, CredentialsError> {
    let certificates = certificates(&dir.join(certificate))?;
    let path = dir.join(key);
    let key = PrivateKeyDer::from_pem_slice(&bytes(&path)?);
    let none = |_| CredentialsError::Pem(path, "private key", "; one that is encrypted is not read (passwordid)");
    Ok((certificates, key.map_err(none)?))
}
