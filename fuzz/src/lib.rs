//! What hostile guests and clients can send, made up by a fuzzer.
//!
//! Each target is a function of bytes, which it takes for a program of what a guest or a client does, or for what a client
//! says; it panics when something is not as it must be. `docs/testing.md` tells how to run them: for a moment with
//! `cargo test`, for longer with `make fuzz`.
//!
//! | target | drives | and holds them to |
//! |---|---|---|
//! | [`scsi_commands()`] | CDBs and parameter lists at a logical unit, several at a time | operations within disk and buffers, an answer to each, none that waits for ever |
//! | [`scsi_queues()`] | control, event and request queues of a virtio-scsi device whose units come and go | the same, and each chain used once |
//! | [`blk_ring()`] | a split or packed ring that is written over at random, and a virtio-blk device behind it | no access outside the guest's memory or the disk |
//! | [`scribbled_rings()`] | the same, by a second thread while the ring is served | the same |
//! | [`torn_memory()`] | the same, in memory that is truncated, grown and replaced meanwhile | the same, and no death by SIGBUS |
//! | [`inflight_record()`] | a ring with an in-flight record that is written over, and devices that go on where it says | the same, and no more in flight than there can be |
//! | [`session()`] | messages and descriptors over a socketpair, at an export whose queues run | threads that live, and nothing left of a peer that has gone |
//! | [`qmp()`] | bytes at a monitor | answers that are success or failure, however the bytes arrive |
//! | [`nbd_handshake()`] | what a client says to an NBD server before it has chosen an export | answers that are whole, the same however the bytes arrive, and refusals alone where TLS is due |
//! | [`nbd_replies()`] | a server's replies, true or not, to requests on a connection | each request back once, with its memory |
//! | [`config_file()`] | the text of a configuration file | errors with a line, and a configuration that reads back as itself |

#![forbid(unsafe_code)]

mod blk_ring;
mod config_file;
#[path = "../../crates/nbd/tests/engine/connected.rs"]
mod connected;
mod corpus;
mod driver;
mod inflight_record;
mod input;
mod nbd_handshake;
mod nbd_replies;
mod qmp;
mod scribbled_rings;
mod scsi_commands;
mod scsi_queues;
mod seeds;
mod session;
mod torn_memory;
mod woken;

pub use blk_ring::blk_ring;
pub use config_file::config_file;
pub use corpus::{corpus, mutants};
pub use driver::drive;
pub use inflight_record::inflight_record;
#[cfg(feature = "libfuzzer")]
pub use libfuzzer_sys;
pub use nbd_handshake::nbd_handshake;
pub use nbd_replies::nbd_replies;
pub use qmp::qmp;
pub use scribbled_rings::scribbled_rings;
pub use scsi_commands::scsi_commands;
pub use scsi_queues::scsi_queues;
pub use session::session;
pub use torn_memory::torn_memory;

/// A program that runs a target: under libFuzzer, or by itself where that is not to be had.
#[cfg(feature = "libfuzzer")]
#[macro_export]
macro_rules! target {
    ($target:ident) => {
        $crate::libfuzzer_sys::fuzz_target!(|data: &[u8]| $crate::$target(data));
    };
}

/// A program that runs a target: under libFuzzer, or by itself where that is not to be had.
#[cfg(not(feature = "libfuzzer"))]
#[macro_export]
macro_rules! target {
    ($target:ident) => {
        fn main() -> std::process::ExitCode {
            $crate::drive(stringify!($target), $crate::$target)
        }
    };
}
