//! Calls that wait for a cluster, each on a thread of its own: who makes one waits as long as its patience lasts.
//!
//! A call of librbd's that waits for a cluster that is away cannot be taken back. It goes on on its thread, and what it
//! would have returned is dropped there.
//!
//! librbd's own threads are what the thread is that opens an image. So the threads of calls have a [`Starter`].

use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use egret_confine::{Starter, ThreadKind};

use crate::error::RbdError;

static STARTER: Starter = Starter::new(ThreadKind::Rbd, "rbd");

/// Starts what starts threads for calls. To be called before the calling thread is confined; the first call does it, too.
///
/// # Errors
///
/// There are no threads left.
pub fn start() -> Result<(), RbdError> {
    STARTER.begin().map_err(|e| match e.kind() {
        io::ErrorKind::PermissionDenied => RbdError::Confined,
        _ => RbdError::Thread(e.to_string()),
    })
}

/// Whether calls can be made without starting what makes them.
pub fn is_started() -> bool {
    STARTER.has_begun()
}

/// Has `call` run, and waits for what it returns, as long as `patience` lasts.
pub(crate) fn call<R: Send + 'static>(
    what: &'static str,
    patience: Duration,
    call: impl FnOnce() -> Result<R, RbdError> + Send + 'static,
) -> Result<R, RbdError> {
    start()?;
    let (sender, receiver) = channel();
    run(move || {
        let _ = sender.send(call());
    });
    match receiver.recv_timeout(patience) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => Err(RbdError::NoAnswer { what, patience }),
        Err(RecvTimeoutError::Disconnected) => Err(RbdError::Thread("none could be started".to_owned())),
    }
}

/// Ends the process if librbd is in it: at once, because its threads may still run, and what would be undone at an
/// orderly end is what they use.
#[expect(unsafe_code, reason = "the one system call that ends a process and does nothing else")]
pub fn leave_at_once(status: u8) {
    if is_started() {
        // SAFETY: it does not return, and runs nothing of this process's.
        unsafe { libc::_exit(status.into()) }
    }
}

/// Has `call` run, and waits for nothing. Calls have been [started](start).
pub(crate) fn run(call: impl FnOnce() + Send + 'static) {
    let _ = STARTER.run(call);
}
