//! The engines: ways to have requests run while the loop goes on.
//!
//! ```text
//!               push            submit                 reap
//! EngineSet ──► triage ──► Engine ─────► kernel ─────► Engine ──► completion
//!                  │                                      │
//!                  └──────► Threads ◄── what the kernel ◄─┘
//!                                       would not take
//! ```
//!
//! | engine | runs requests by | says that one is done by |
//! |---|---|---|
//! | [`Threads`] | worker threads and blocking system calls | a list, and an eventfd while armed |
//! | [`Native`] | `io_submit` | a ring in user space, and an eventfd |
//! | [`Uring`] | `io_uring_enter`, its own or the loop's | a ring in user space, and its descriptor |
//! | [`Null`] | doing nothing | the passing of time |
//! | [`Remotes`] | a library or a protocol of another crate's, one [`Engine`] for each disk | that engine's descriptor |

mod io_uring;
pub(crate) mod native;
mod null;
pub(crate) mod pins;
pub(crate) mod remotes;
pub(crate) mod threads;
mod transfer;
mod turns;
#[cfg(test)]
#[path = "turns/tests.rs"]
mod turns_tests;

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use egret_event_loop::Nanos;

pub(crate) use self::io_uring::Uring;
pub(crate) use self::native::Native;
pub(crate) use self::null::Null;
pub use self::pins::Pinning;
pub(crate) use self::remotes::Remotes;
pub(crate) use self::threads::Threads;
use crate::disk::Disk;
use crate::error::EngineError;
use crate::job::Job;

/// How many workers there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WorkerLimits {
    /// This many stay.
    pub(crate) min: u32,
    /// There are never more.
    pub(crate) max: u32,
    /// The others leave after so long without work.
    pub(crate) idle: Duration,
}

/// Runs jobs.
///
/// All of it is called on one thread. In the steady state no method allocates, and only [`submit`](Self::submit) makes
/// system calls.
///
/// The caller has checked what only it knows: that a job is within its disk, allowed on it, and made of whole sectors.
/// In exchange each job comes back exactly once: done in full, or with an error. Its memory is valid until then.
pub trait Engine {
    /// Takes a job; nothing happens to it yet.
    fn push(&mut self, job: Box<Job>);

    /// Starts everything pushed since the last call, and what had to wait.
    fn submit(&mut self, now: Nanos);

    /// Whether [`reap`](Self::reap) may find something: a few loads.
    fn has_completions(&mut self) -> bool;

    /// Gives every finished job to `done`.
    fn reap(&mut self, now: Nanos, done: &mut dyn FnMut(Box<Job>));

    /// When a job finishes with no descriptor to announce it.
    fn deadline(&self) -> Option<Nanos> {
        None
    }

    /// From here on completions are announced on the descriptor; false if there are some already.
    fn arm(&mut self) -> bool {
        !self.has_completions()
    }

    /// Completions need not be announced any more.
    fn suppress(&mut self) {}

    /// What announces completions, edge by edge, if anything does: the same one for as long as the engine lives.
    fn descriptor(&self) -> Option<RawFd> {
        None
    }

    /// The descriptor has announced something: for who cannot see by a few loads what. Then [`reap`](Self::reap) makes system
    /// calls, too.
    fn announced(&mut self) {}

    /// Ends it: waits until nothing of it touches the jobs' memory any more, and gives back those that were in flight,
    /// whatever came of them. Dropping it waits as well.
    fn end(self: Box<Self>, left: &mut dyn FnMut(Box<Job>));
}

/// An engine that all disks of its kind on one I/O thread share.
///
/// Unless it is [`Threads`] its caller has also checked that direct I/O takes a job as it is, that it is a read or a write,
/// and that it moves no more than the kernel may copy or pin while the loop waits (`blocking::PART`). The kernel's own reason
/// to refuse the asynchronous way (`EAGAIN`, or `EOPNOTSUPP` and `EINVAL` for flags and operations that it does not know) is
/// an error like others; the caller may give the job to [`Threads`] then.
pub(crate) trait SharedEngine: Engine {
    /// Makes `slot` stand for `disk`; `slot` is free.
    ///
    /// # Errors
    ///
    /// The disk's own engine cannot be had.
    fn attach(&mut self, slot: u32, disk: &Arc<Disk>) -> Result<(), EngineError>;

    /// Frees `slot`; none of its jobs is in flight.
    fn detach(&mut self, slot: u32);

    /// Whether the I/O thread has several disks from here on, whichever engines they have: then nothing holds it up for long, nor
    /// the processor that it runs on.
    fn set_beside_others(&mut self, _several: bool) {}

    /// Has the memory pinned of which all requests of `slot` are, where that makes them cheaper. Once is enough.
    fn pin(&mut self, _slot: u32, _pinning: Pinning) {}

    /// Adds what announces completions to `all`.
    fn descriptors(&self, all: &mut Vec<RawFd>) {
        all.extend(self.descriptor());
    }

    /// Tells the engine whose descriptor it is that it has announced something.
    fn announced_on(&mut self, _fd: RawFd) {}

    /// How many jobs one system call takes to the kernel at most, from here on, where it has such a limit; 0 for none.
    fn limit_batch(&mut self, _most: u32) {}

    /// How many worker threads there may be from here on, where it has any.
    fn limit_workers(&mut self, _limits: WorkerLimits) {}
}
