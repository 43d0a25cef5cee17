//! Disks on queues: vhost-user sessions, and the workers that run their queues.
//!
//! ```text
//!   client ═socket═▶ Export (a thread of its own)          I/O threads (one loop each)
//!                      listener ─▶ session ──mailbox──▶  Worker  Worker  Worker
//!                                   │                       │ chain → model → engines
//!                                   └ memory map, rings     └ used, call
//! ```
//!
//! A session describes queues; a queue that is described, started and enabled becomes a [`Worker`] and moves, by
//! value, to an I/O thread. To change it the session takes it back, drained; from outside it is moved to another I/O
//! thread (`moves.rs`) or given another disk (`reopen.rs`), and the session does not notice.
//!
//! The session speaks for itself and not through `vhost`'s request handler, because that one has no way to announce a
//! changed configuration, and waits for the rest of half a message with no way to be stopped.

#![deny(unsafe_code)]

mod alarm;
mod budget;
mod device_state;
mod errors;
mod export;
mod kept;
mod latency;
#[cfg(test)]
#[path = "../../event-loop/tests/lingering/mod.rs"]
mod lingering;
mod listener;
mod luns;
mod memory_file;
mod moves;
mod nbd;
mod peer_fd;
mod peer_log;
mod protocol;
mod protocol_error;
mod queues;
mod reopen;
mod session;
mod socket;
mod source;
mod stats;
mod sys;
mod vring;
mod worker;

pub use errors::{ErrorHandling, ErrorPolicy, IoStatus, OnError, is_nospace};
pub use export::{Export, ExportConfig, ExportError, Keeping, Rings};
pub use kept::{Kept, KeptSession};
pub use latency::Latencies;
pub use listener::{Address, ListenError};
pub use luns::{
    Change, ConfigError, DiscardConfig, Keeper, LeavingDisk, LogicalUnit, LunConfig, Naa, NexusId, Registered,
};
pub use moves::Pause;
#[doc(hidden)]
pub use nbd::{Haggled, haggle};
pub use nbd::{NbdAddress, NbdOptions, NbdServer, NbdServerConfig, NbdServerError};
pub use peer_log::PeerLog;
pub use reopen::{DiskSwap, reopen};
pub use session::MAX_MAPPINGS;
pub use socket::{Access, BindError, MAX_SOCKET_PATH, Rights, UnixSocket, keep_from_blocking};
pub use source::Worker;
pub use stats::{OpStats, QueueCounters, QueueStats};
pub use worker::Kickless;
