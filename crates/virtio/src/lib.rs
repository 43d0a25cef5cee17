//! Device models: virtio-blk and virtio-scsi.
//!
//! ```text
//!                                                                    disk
//!                                                                     ▲
//!                                                                     │ Request
//!   ring::Queue ── pop ──▶ Chain (pieces of GuestMemory) ── begin ── Model
//!        ▲                                                            │ Completion
//!        └── publish_used ◀── add_used ◀─ Completed ◀── end ──────────┘
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`blk`] | virtio-blk: chains in, disk requests out |
//! | [`scsi`] | virtio-scsi: chains in, SCSI commands on their way |
//!
//! Everything a guest can write is read once, checked, and never read again. Nothing here allocates, locks or logs per
//! request.

#![forbid(unsafe_code)]

pub mod blk;
mod device;
mod model;
pub mod scsi;
mod state;

pub use device::{Device, DriverError, EVENT_IDX, RING_PACKED};
pub use model::{
    Completed, ControlModel, DiskKey, EventModel, Malformed, Model, Next, RequestModel, RequestType, Status,
};
pub use state::{Origin, STATE_HEADER, StateError, state_len};
