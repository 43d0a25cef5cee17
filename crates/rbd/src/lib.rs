//! Disks in a Ceph cluster: images of RBD, through librbd, which is loaded when the first of them is opened.
//!
//! ```text
//!  RbdDisk ──call──▶ threads that may wait ──▶ librbd: open, lock, resize, flush, close
//!  engines ────────────────────────────────▶ librbd: requests, and what has completed
//! ```
//!
//! | module | has | unsafe |
//! |---|---|---|
//! | `disk` | a disk's life, and who may write to it | |
//! | `engine` | its requests, as I/O threads run them | |
//! | `calls` | the threads of what waits for a cluster | |
//! | `cluster`, `image` | the libraries' objects, as types | their functions |
//! | `flights` | requests that librbd has, with their memory | their functions |
//! | `sys` | the libraries' functions, and how they are loaded | how they are loaded |
//!
//! A request that librbd has cannot be taken back, so its memory is librbd's until it completes, or for good. What waits
//! for a cluster waits as long as its options say; nothing else of the daemon's waits with it.

#![deny(unsafe_code)]

mod calls;
mod cluster;
mod disk;
mod engine;
mod error;
mod flights;
mod image;
mod sys;

pub use calls::{is_started, leave_at_once, start};
pub use cluster::{ClusterOptions, Secret};
pub use disk::{RbdDisk, RbdOptions};
pub use error::RbdError;
pub use image::{ImageOptions, Luks};
pub use sys::load;
