//! Objects (iothread, blockdev, export) brought to life, and a daemon's life as a process.
//!
//! | module | owns |
//! |---|---|
//! | [`attach`] | the lines that attach an export in QEMU, libvirt, cloud-hypervisor, crosvm and Firecracker |
//! | [`probe`] | what there is here, and which engine suits an image where nobody chose |
//! | [`Daemon`] | a configuration brought to life |
//! | [`listen`] | control sockets: where they are, and who may connect |
//! | [`qmp`] | how programs talk to a running daemon |
//! | [`metrics`] | what monitoring scrapes |
//! | [`snapshot`] | every counter at one moment |
//! | [`watchdog`] | whether I/O threads get on |
//! | [`process`] | pidfile, going into the background, signals |

#![deny(unsafe_code)]

mod access;
pub mod attach;
pub(crate) mod daemon;
#[cfg(test)]
mod docs;
pub mod listen;
pub mod metrics;
pub mod probe;
pub mod process;
pub mod qmp;
#[cfg(test)]
#[path = "../../event-loop/tests/refuse/mod.rs"]
mod refuse;
pub mod snapshot;
pub mod watchdog;

pub use daemon::{
    BrokenQueue, ChangeError, CounterRegistry, Credentials, Daemon, Deletion, DiskFailure, DiskState, Failures,
    FdSetError, FdSetShown, RequestTimeout, StartError, Time, View, Watched,
};
pub use egret_export::QueueStats;
