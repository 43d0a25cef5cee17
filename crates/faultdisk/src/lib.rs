//! A disk that fails as it is told to, and loses what was not flushed when its power goes.
//!
//! It is a file, `disk`, in a FUSE file system of its own; a loop device over that is a block device. It has a volatile
//! write cache, as disks do: what was written is read back at once, but is there after a loss of power only if a flush
//! (`fsync`, or the loop device's) or the write itself (`O_DSYNC`, `RWF_DSYNC`) made it stable. [`Order`]s say which
//! requests fail and how, and when the power goes and comes back.

#![forbid(unsafe_code)]

mod control;
mod disk;
mod faults;
mod record;
mod store;

pub use control::serve;
pub use disk::{FaultDisk, Order, Status, attributes};
pub use faults::{Asked, Effect, ErrnoName, Fault, IoType};
pub use record::Ran;
pub use store::{SECTOR, Store, Survivors};
