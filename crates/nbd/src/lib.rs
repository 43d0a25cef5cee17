//! The NBD protocol, and disks that an NBD server has.
//!
//! | module | what it is |
//! |---|---|
//! | [`protocol`] | numbers and headers, for clients and for servers |
//! | [`handshake`] | a client's half of the haggling, over any stream |

pub mod handshake;
pub mod protocol;
