//! Objects (iothread, blockdev, export), their one vocabulary, and a daemon's life as a process.
//!
//! | module | owns |
//! |---|---|
//! | [`schema`] | the three objects: their keys, ranges and defaults, checked one by one |
//! | [`keyval`] | QEMU's `key=value,...` syntax, from text to a tree of values |
//! | [`config`] | a set of objects that fit together: [`Config`] |
//! | [`disk`] | what a blockdev comes to when it is looked at from an export |
//! | [`attach`] | the lines that attach an export in QEMU, libvirt and cloud-hypervisor |
//! | [`probe`] | which engine suits an image, where nobody chose |
//! | [`Daemon`] | a configuration brought to life |
//! | [`listen`] | control sockets: where they are, and who may connect |
//! | [`qmp`] | how programs talk to a running daemon |
//! | [`metrics`] | what monitoring scrapes |
//! | [`snapshot`] | every counter at one moment |
//! | [`watchdog`] | whether I/O threads get on |
//! | [`process`] | pidfile, going into the background, signals |

#![deny(unsafe_code)]

pub mod attach;
pub mod config;
pub(crate) mod daemon;
pub mod disk;
#[cfg(test)]
mod docs;
pub mod keyval;
pub mod listen;
pub mod metrics;
pub mod probe;
pub mod process;
pub mod qmp;
pub mod schema;
pub mod snapshot;
pub mod watchdog;

pub use config::Config;
pub use daemon::{
    Board, ChangeError, Daemon, Deletion, DiskFailure, DiskState, FdSetError, FdSetShown, StartError, Time, View,
    Watched,
};
pub use egret_export::QueueStats;
