//! QMP: how programs talk to a running daemon, in `qemu-storage-daemon`'s words.
//!
//! ```text
//!   client ═socket═▶ frame ─▶ session ─▶ command ─▶ Daemon
//!            ◀═════ bounded output ◀──── answer, events
//! ```
//!
//! | module | owns |
//! |---|---|
//! | [`frame`] | where one JSON value ends and the next begins; how much a client may send |
//! | [`session`] | one client's conversation: negotiation, then a command and its answer at a time |
//! | [`command`] | what a command is |
//! | [`commands`] | the table of commands; `own`, `objects`, `block`, `nbd`, `luns`, `descriptors`, `limits`, `live` and `stats` fill it |
//! | [`event`] | what happens without having been asked for |
//! | [`introspect`] | the table for programs |
//! | [`control`] | the thread that serves all monitors, with a bound on what each may cost |
//! | `changes` | the thread that changes objects |
//!
//! All monitors are served by one thread, which is none of the I/O threads, and never waits for a disk: what only looks
//! is answered at once. What changes something runs on a second thread, from its first to its last step before the next
//! change begins, whoever sent it, and reaches an I/O thread only through its mailbox.

mod block;
mod changes;
mod client;
pub mod command;
pub mod commands;
pub mod control;
mod descriptors;
mod error;
pub mod event;
pub mod frame;
pub mod introspect;
mod limits;
mod live;
mod luns;
mod nbd;
mod objects;
mod own;
pub mod reference;
pub mod session;
mod stats;

pub use control::{Control, Woken};
pub use descriptors::Descriptors;
pub use error::{Class, QmpError};
