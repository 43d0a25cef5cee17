//! Guest memory, rings and device models.
//!
//! ```text
//!   guest driver                                                     disk
//!        │  makes a chain available                                   ▲
//!        ▼                                                            │ Request
//!   ring::Queue ── pop ──▶ Chain (pieces of GuestMemory) ── begin ── Model
//!        ▲                                                            │ Completion
//!        └── publish ◀── add_used ◀────────── Ended ◀── end ──────────┘
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`memory`] | the map from guest addresses to ours, and what keeps a torn mapping from killing the daemon |
//! | [`ring`] | the device's half of a split or packed ring, and the driver's half for tests and load |
//! | [`blk`] | virtio-blk: chains in, disk requests out |
//! | [`scsi`] | virtio-scsi: chains in, SCSI commands on their way |
//!
//! Everything a guest can write is read once, checked, and never read again. Nothing here allocates, locks or logs per
//! request.

#![deny(unsafe_code)]

pub mod blk;
mod device;
#[allow(unsafe_code)]
pub mod memory;
mod model;
#[allow(unsafe_code)]
pub mod ring;
pub mod scsi;

pub use device::{Device, DriverError, EVENT_IDX, RING_PACKED};
pub use model::{DiskKey, Ended, Kind, Malformed, Model, Next, Status, head_of, token_of};

#[cfg(test)]
mod testing;
