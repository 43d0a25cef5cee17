//! What the tests and benchmarks of the whole daemon share: real processes and real clients.
//!
//! | module | what it is |
//! |---|---|
//! | [`server`] | a daemon as a child process, its options and its log |
//! | [`announced`] | a daemon that was given just a disk, and its output |
//! | [`qmp`] | a monitor's client |
//! | [`certificates`] | what TLS needs |
//! | [`disk`] | a well-behaved client: libblkio |
//! | [`wire`] | vhost-user messages written by hand, as badly as a test likes |
//! | [`guest`] | a virtqueue in a memfd, driven over [`wire`] |
//! | [`nbd`] | servers that nobody here wrote |
//! | [`nbd_client`] | an NBD client written by hand, as badly as a test likes |
//! | [`port`] | TCP ports of a test's own |
//! | [`neighbour`] | a client that writes and verifies beside whatever a test does to others |
//! | [`attacker`] | a virtqueue of any layout and device, driven over [`wire`]: what a guest or a front end gone mad can do |
//! | [`vm`] | whether this machine can boot a Linux guest |
//! | [`http`] | a client that asks for a page |
//! | [`fate`] | system calls that fail, or never return |
//! | [`calls`] | the system calls of a daemon's threads, against what they may do |
//! | [`puppet`] | a thread of a daemon that does what a test wants |
//! | [`keeper`] | a service manager that keeps descriptors from one daemon to the next |
//! | [`survivor`] | a client that survives its daemon, and verifies what it reads |
//! | [`small`] | a file system that fills up |
//! | [`scratch`] | directories and images that vanish afterwards |
#![allow(dead_code, unreachable_pub, reason = "each test and benchmark uses its part of this")]

pub mod announced;
pub mod attacker;
pub mod calls;
pub mod certificates;
pub mod disk;
pub mod fate;
pub mod guest;
pub mod http;
pub mod keeper;
pub mod nbd;
pub mod nbd_client;
pub mod neighbour;
pub mod port;
pub mod puppet;
pub mod qmp;
pub mod scratch;
pub mod server;
pub mod small;
pub mod survivor;
pub mod vm;
pub mod wire;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long anything may take before a test gives up; generous, because only a failing test waits that long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// What a read comes to that failed, where that is an end of the stream: with something left unread, it is reset. A timeout is
/// none.
///
/// # Errors
/// The others.
pub fn reset_is_end(e: io::Error) -> io::Result<usize> {
    if e.kind() == io::ErrorKind::ConnectionReset { Ok(0) } else { Err(e) }
}

/// Whether a program is there; if not, says so under the test's name, and fails where everything should be.
pub fn has_or_skips(program: &str) -> bool {
    let found = egret_lab::stack::find(program).is_some();
    if !found {
        egret_needs::this_test_lacks(program);
    }
    found
}

/// Ends a load even where what it accompanied fails.
pub struct Finished<'a>(pub &'a AtomicBool);

impl Drop for Finished<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until `look` finds something; for what has no descriptor to wait on, such as another process's threads.
///
/// # Panics
/// After [`PATIENCE`], naming `what` was awaited.
pub fn await_some<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    await_within(PATIENCE, what, look)
}

/// [`await_some`] with another patience, which lasts longer where others want the processors as well.
pub fn await_within<T>(patience: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        let waited = begin.elapsed();
        assert!(waited < patience || waited < patience.mul_f64(crowd()), "waited {waited:?} for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// How many want each processor, at the average of the last minute: as many times longer takes what one could do alone.
fn crowd() -> f64 {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let wanting: f64 = load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(1.0);
    (wanting / std::thread::available_parallelism().map_or(1.0, |cpus| cpus.get() as f64)).clamp(1.0, 10.0)
}

/// [`await_some`] for a plain condition.
pub fn await_that(what: &str, mut holds: impl FnMut() -> bool) {
    await_some(what, || holds().then_some(()));
}
