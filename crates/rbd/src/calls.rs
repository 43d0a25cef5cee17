//! Calls that wait for a cluster, each on a thread of its own: who makes one waits as long as its patience lasts.
//!
//! A call of librbd's that waits for a cluster that is away cannot be taken back. It goes on on its thread, and what it
//! would have returned is dropped there.
//!
//! librbd's own threads are what the thread is that opens an image. So the threads of calls have a [`Starter`].

use std::io;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use egret_confine::{Starter, ThreadKind};

use crate::error::RbdError;

/// So many calls hang, of those that open images or of those of one image, before no other of these is made any more but those that
/// end the use of an image. Each costs a thread, and may keep a connection, which has some of its own.
pub(crate) const MOST: usize = 8;

/// Calls that hang: nobody waits for them any more, and each has its own of these until it ends.
#[derive(Default)]
pub(crate) struct Hung(Mutex<Vec<Weak<()>>>);

impl Hung {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<()>>> {
        let mut hung = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        hung.retain(|call| call.strong_count() > 0);
        hung
    }
}

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
///
/// # Errors
///
/// What it returns, or nothing in time; or too many others hang.
pub(crate) fn call<R: Send + 'static>(
    hung: &Hung,
    what: &'static str,
    patience: Duration,
    call: impl FnOnce() -> Result<R, RbdError> + Send + 'static,
) -> Result<R, RbdError> {
    if hung.lock().len() >= MOST {
        return Err(RbdError::OthersHang);
    }
    last_call(hung, what, patience, call)
}

/// The same of a call by which the use of an image ends, however many others hang.
pub(crate) fn last_call<R: Send + 'static>(
    hung: &Hung,
    what: &'static str,
    patience: Duration,
    call: impl FnOnce() -> Result<R, RbdError> + Send + 'static,
) -> Result<R, RbdError> {
    start()?;
    let (sender, receiver) = channel();
    let going = Arc::new(());
    let hangs = Arc::downgrade(&going);
    run(move || {
        let _ = sender.send(call());
        drop(going);
    });
    match receiver.recv_timeout(patience) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => {
            hung.lock().push(hangs);
            Err(RbdError::NoAnswer { what, patience })
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_calls_may_hang_until_one_ends_and_what_ends_the_use_of_an_image_is_called_all_the_same() {
        let of_one = Hung::default();
        let hung: Vec<_> = (0..MOST)
            .map(|_| {
                let (well, is_well) = channel::<()>();
                let waits = move || {
                    let _ = is_well.recv();
                    Ok(())
                };
                let given_up = call(&of_one, "waiting", Duration::from_millis(1), waits);
                assert!(matches!(given_up, Err(RbdError::NoAnswer { .. })), "{given_up:?}");
                well
            })
            .collect();
        let refused = call(&of_one, "another", Duration::MAX, || Ok(())).unwrap_err().to_string();
        assert!(refused.starts_with("8 calls of clusters that do not answer have not ended"), "{refused}");
        assert_eq!(call(&Hung::default(), "another image's", Duration::MAX, || Ok(())), Ok(()));
        assert_eq!(last_call(&of_one, "the last", Duration::MAX, || Ok(())), Ok(()));
        drop(hung);
        while call(&of_one, "another", Duration::MAX, || Ok(())).is_err() {
            std::thread::yield_now();
        }
    }
}
