//! Disks over NBD.
//!
//! ```text
//!   client ═socket═▶ NbdServer (one thread)            I/O threads (one loop each)
//!                      accept ─▶ handshake ──inbox──▶  Lane  Lane
//!                                   │                    │ request → parts → engines
//!                                   └ which export       └ replies
//!                                                        ▲ extents
//!                    an export's thread ─────────────────┘
//! ```
//!
//! With TLS all of it goes on inside of a [`Channel`](egret_nbd::Channel) from the first option on.
//!
//! One server has all exports of this kind. Its thread speaks with clients until they have chosen one; from then on a
//! client is one of those of a [`Lane`], of which an export has one on each of its I/O threads. A lane is to an export what
//! a queue is to one over vhost-user: it moves to another I/O thread, and gets another disk, by the same means.
//!
//! The specification is doc/proto.md of the NetworkBlockDevice project.

#![forbid(unsafe_code)]

mod client;
mod export;
mod extents;
mod haggle;
mod handshake;
mod inbox;
mod kind;
mod lane;
mod pool;
mod reply;
mod server;

pub use export::NbdOptions;
pub(crate) use export::Offer;
pub use haggle::{Haggled, haggle};
pub(crate) use lane::Lane;
pub use server::{NbdAddress, NbdServer, NbdServerConfig, NbdServerError};
