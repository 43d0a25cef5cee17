//! Calls that wait for a cluster, each on a thread of its own: who makes one waits as long as its patience lasts.
//!
//! A call of librbd's that waits for a cluster that is away cannot be taken back. It goes on on its thread, and what it
//! would have returned is dropped there.
//!
//! librbd's own threads are what the thread is that opens an image. So the threads of calls are started by one that was
//! started before the daemon's others were confined, and that says what they are.

#![deny(unsafe_code)]

use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use egret_confine::{Bounds, ThreadKind};

use crate::error::RbdError;

type Call = Box<dyn FnOnce() + Send>;

static STARTER: OnceLock<Sender<Call>> = OnceLock::new();

/// Starts what starts threads for calls, bound as the calling thread is. To be called before that is confined; the first
/// call does it, too.
///
/// # Errors
///
/// There are no threads left.
pub fn start() -> Result<(), RbdError> {
    if STARTER.get().is_some() {
        return Ok(());
    }
    let bounds = Bounds::of_this_thread();
    if bounds.is_confined() {
        return Err(RbdError::Confined);
    }
    let (sender, receiver) = channel::<Call>();
    let starter = move || {
        bounds.narrow(ThreadKind::Rbd);
        let bounds = Bounds::of_this_thread();
        for call in receiver {
            let thread = move || {
                bounds.narrow(ThreadKind::Rbd);
                call();
            };
            if let Err(e) = std::thread::Builder::new().name("rbd-call".to_owned()).spawn(thread) {
                tracing::error!("there is no thread for librbd: {e}");
            }
        }
    };
    let started = std::thread::Builder::new().name("rbd".to_owned()).spawn(starter);
    started.map_err(|e| RbdError::Thread(e.to_string()))?;
    let _ = STARTER.set(sender);
    Ok(())
}

/// Whether calls can be made without starting what makes them.
pub fn is_started() -> bool {
    STARTER.get().is_some()
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
    if let Some(starter) = STARTER.get() {
        let _ = starter.send(Box::new(call));
    }
}
