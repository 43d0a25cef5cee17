//! What hostile guests and clients can do to a daemon, beside a neighbour on the same I/O thread.
//!
//! After each attack the neighbour's data verifies and it goes on, a new client of the attacked export is served, the
//! daemon has as many mappings, descriptors and threads as before and about as much memory, has logged little, and ends
//! with 0 when it is asked to. [`scene`] checks all of that; a file is a family of attacks.
//!
//! `EGRET_TEST_SERVER=qemu-storage-daemon cargo test -p egret --test hostile` attacks the peer, as far as it has what is
//! attacked: virtio-blk over split rings.

#[path = "../support/mod.rs"]
mod support;

mod broken;
mod budgets;
mod changes;
mod fuse;
mod lingering;
mod log;
mod migration;
mod scene;
mod scsi;
mod signals;
mod torn;
mod turns;
