//! Syncs of what the page cache may hold, or a server: in turns, so that each learns what it has lost.
//!
//! Linux marks pages clean that it could not write, and says so to each open file once. Of two syncs at the same time one
//! would be told, and the other that all is well; and nobody would ever write those pages again. So they go one after the
//! other, each looks at what those before it were told, and no sync succeeds once one has failed. QEMU does the same
//! (block/io.c, `bdrv_co_flush`; block/file-posix.c, `handle_aiocb_flush`). Nothing but a sync may have the kernel tell:
//! a write with `RWF_DSYNC` would, so there is none where the page cache may have anything.
//!
//! Those who wait for their turn need not take it: one sync serves all who asked before it began. `tests/syncs.rs` walks
//! through the interleavings with loom.

#![forbid(unsafe_code)]

use std::sync::PoisonError;

use rustix::io::Errno;

use crate::sync::{AtomicI32, AtomicU64, Mutex, Ordering};

/// What a sync says that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushError {
    /// Why.
    pub errno: Errno,
    /// Whether what was written is lost, so that another one that succeeds would say nothing of it.
    pub is_loss: bool,
}

impl FlushError {
    /// Another one is for all that this one was for.
    pub const fn again(errno: Errno) -> Self {
        Self { errno, is_loss: false }
    }
}

/// See the module's description.
#[derive(Default)]
pub(crate) struct Syncs {
    /// How many were asked for.
    asked: AtomicU64,
    /// How many of those were served, counted as they were asked for. Locked by the one whose turn it is.
    served: Mutex<u64>,
    /// What the sync said that lost something; 0 if none did.
    lost: AtomicI32,
}

impl Syncs {
    /// Has `sync` run, or learns what one said that began after this was asked for.
    ///
    /// # Errors
    ///
    /// What `sync` says, or said when it lost something once.
    pub(crate) fn run(&self, sync: impl FnOnce() -> Result<(), FlushError>) -> Result<(), Errno> {
        let own = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        let mut served = self.served.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(errno) = self.lost() {
            return Err(errno);
        }
        if *served >= own {
            return Ok(());
        }
        let asked = self.asked.load(Ordering::SeqCst);
        sync().map_err(|FlushError { errno, is_loss }| {
            if is_loss {
                self.lose(errno);
            }
            errno
        })?;
        *served = asked;
        Ok(())
    }

    /// Writes are lost that no sync here would tell of.
    pub(crate) fn lose(&self, errno: Errno) {
        self.lost.store(errno.raw_os_error(), Ordering::Release);
    }

    /// Why writes are lost, if some are.
    pub(crate) fn lost(&self) -> Option<Errno> {
        Some(self.lost.load(Ordering::Acquire)).filter(|errno| *errno != 0).map(Errno::from_raw_os_error)
    }
}
