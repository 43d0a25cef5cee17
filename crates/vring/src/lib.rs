//! Guest memory, split and packed rings, and the record of what is in flight.
//!
//! ```text
//!   driver ── add ──▶ ring in GuestMemory ── pop ──▶ Chain, of pieces of the memory ──▶ a device model, a disk
//!      ▲                                                                                     │
//!      └── reap ◀──── ring in GuestMemory ◀── publish_used ◀── add_used ◀────────────────────┘
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`memory`] | the map from guest addresses to ours, and what keeps a truncated mapping from killing the daemon |
//! | [`ring`] | the device's half of a split or packed ring, and the driver's half for tests and load |
//! | [`vhost_user`] | numbers of messages, feature bits and flags |
//!
//! What a disk moves data to and from is [lent](memory::Lent) by a queue, which keeps it mapped meanwhile.
//!
//! It knows neither devices nor disks nor sockets: a daemon that serves a ring and a program that loads one both build
//! on it. Everything that the other side can write is read once, checked, and never read again. Nothing here allocates,
//! locks or logs per request.

pub mod memory;
pub mod ring;
pub mod vhost_user;

#[cfg(any(test, feature = "testing"))]
pub mod testing;
