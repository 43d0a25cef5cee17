//! What a test needs and this machine may not have: root, a program, a device.
//!
//! One rule for all tests: a user who lacks something reads which tests were left out, and why; continuous integration,
//! where nobody reads what a test that passes has to say, fails.

#![forbid(unsafe_code)]

mod ceph;

use std::fmt::Display;
use std::io::Write as _;

pub use ceph::{Ceph, Part};

/// Says that the test that this thread runs is left out, because it needs something: `root for a loop device`, `strace`.
///
/// # Panics
/// Where `CI` is set.
pub fn this_test_lacks(what: impl Display) {
    let thread = std::thread::current();
    let line = format!("{}: skipped: it needs {what}", thread.name().unwrap_or("a test"));
    assert!(std::env::var_os("CI").is_none(), "{line}");
    // Not by `eprintln!`, which the test harness keeps to itself.
    let _ = writeln!(std::io::stderr(), "{line}");
}
