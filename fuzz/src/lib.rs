//! What a hostile guest can send, made up by a fuzzer.
//!
//! Each target is a function of bytes, which it takes for a program of what a guest does; it panics when something is
//! not as it must be. `docs/testing.md` tells how to run them, for ten minutes with `cargo fuzz` or for a moment with
//! `cargo test`.
//!
//! | target | drives | and holds them to |
//! |---|---|---|
//! | [`scsi_commands()`] | CDBs and parameter lists at a logical unit, several at a time | operations within disk and buffers, an answer to each, none that waits for ever |
//! | [`scsi_queues()`] | control, event and request queues of a virtio-scsi device whose units come and go | the same, and each chain used once |
//! | [`blk_ring()`] | a split or packed ring that is written over at random, and a virtio-blk device behind it | no access outside the guest's memory or the disk |

#![forbid(unsafe_code)]

mod blk_ring;
mod input;
mod scsi_commands;
mod scsi_queues;
mod seeds;
mod woken;

pub use blk_ring::blk_ring;
pub use scsi_commands::scsi_commands;
pub use scsi_queues::scsi_queues;
pub use seeds::mutants;
