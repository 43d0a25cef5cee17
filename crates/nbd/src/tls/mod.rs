//! TLS, for clients and for servers: who one is and whom one believes, and the records of one connection.
//!
//! | module | what it is |
//! |---|---|
//! | `credentials` | files of certificates and keys, as QEMU calls them, made into what connections are begun with |
//! | `verifier` | how far a server's certificate is believed |
//! | `session` | one connection's records, between its socket and memory |
//!
//! The protocol is rustls', with ring's cryptography: TLS 1.3, and 1.2 with ChaCha20; no renegotiation, no resumption, no compression.

mod credentials;
mod session;
mod verifier;

pub use credentials::{ClientCredentials, CredentialsError, ServerCredentials};
pub use session::Session;
