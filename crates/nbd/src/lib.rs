//! The NBD protocol, and disks that an NBD server has.
//!
//! | module | what it is |
//! |---|---|
//! | [`protocol`] | numbers and headers, for clients and for servers |
//! | [`handshake`] | a client's half of the haggling, over any stream |
//! | `connect` | from an address to an export that takes requests |
//! | `connector` | the thread that does it again when a connection has ended |
//! | `channel` | a socket, encrypted or not |
//! | [`tls`] | what encrypts it: credentials, and records |
//! | `engine` | one I/O thread's connection: requests go to it and replies come from it, on the loop |
//! | `disk` | what the engines of a disk share |
//!
//! `unsafe` is in `socket` and `memory`, and where the engine and `channel` call them: the kernel moves data from and to
//! guests' memory, and for what is encrypted `tls/session.rs` copies it.

#![deny(unsafe_code)]

mod channel;
mod connect;
mod connector;
mod disk;
mod engine;
pub mod handshake;
mod memory;
pub mod protocol;
mod socket;
mod target;
pub mod tls;

pub use channel::{Channel, ChannelError, Received};
pub use connect::look_up;
pub use connector::start;
pub use disk::{NbdDisk, engine_over};
pub use target::{Address, Encryption, Target};
