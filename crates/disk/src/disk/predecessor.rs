//! What a disk owes for the one whose place it has taken.
//!
//! Who [reopens](super::Disk::reopen) a disk has written through the old one what nobody has made stable yet, and nothing that
//! is done through the new one need be for that: of what the page cache loses the old file alone is told, and an NBD server
//! may have a flush be for the writes of its own connection. So no flush of the new disk succeeds before one of the old one
//! has. If that fails, writes are lost, and the new disk is as one whose page cache has lost them: no flush succeeds until
//! it is opened once more by somebody who can know of it.
//!
//! ```text
//! follow ──▶ owes ── the old one's flush ──┬─ succeeds ──▶ owes nothing
//!                                          └─ fails ─────▶ lost, and nobody told ── a flush ──▶ lost, as of a flush of its own
//! ```
//!
//! So it is with what the disk itself is found to have lost when nobody was told: when it is written out because rings have
//! stopped, say, and no guest has asked for that.
//!
//! A worker that runs a guest's flush may see to it, and does not drop the old disk: to unlock an image is not for workers.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::{Errno, retry_on_intr};

use super::{Backing, Disk};
use crate::lock;

/// See the module's description.
#[derive(Default)]
pub(super) struct Predecessor {
    /// Whether what was written through it may not be stable.
    is_owed: AtomicBool,
    /// Locked by who flushes it.
    disk: Mutex<Option<Owed>>,
    /// What is lost, of it or of the disk itself, was found when no guest had asked, and no flush has failed since. Looked at
    /// where something is lost.
    is_untold: AtomicBool,
}

struct Owed {
    disk: Arc<Disk>,
    /// What it had lost by then is known, and does not count.
    was_lost: bool,
}

/// That writes are lost, for another disk of the same image.
#[derive(Clone, Copy, Debug)]
pub struct Loss {
    errno: Errno,
    is_untold: bool,
}

impl Loss {
    /// Whether no guest has been told of it.
    pub const fn is_untold(&self) -> bool {
        self.is_untold
    }
}

impl Disk {
    /// What it has [lost](Self::has_lost_writes), if anything.
    pub fn loss(&self) -> Option<Loss> {
        // In this order: who finds a loss says first that nobody was told of it.
        let errno = self.syncs.lost()?;
        Some(Loss { errno, is_untold: self.predecessor.is_untold.load(Ordering::Acquire) })
    }

    /// Has lost what another disk of the same image had. To be called before anything is written through this one, and before
    /// it is attached to engines.
    pub fn lose(&self, Loss { errno, is_untold }: Loss) {
        if is_untold {
            self.keep_untold();
        }
        self.syncs.lose(errno);
    }

    /// Takes over what `old` has not made stable. To be called before anything is written through this disk, and before it is
    /// attached to engines. What a flush of `old` has told of is known, and does not count here.
    pub fn follow(&self, old: &Arc<Self>) {
        let Predecessor { is_owed, disk, .. } = &self.predecessor;
        let lost = old.loss();
        if let Some(loss) = lost.filter(Loss::is_untold) {
            self.lose(loss);
        }
        if old.predecessor.is_owed.load(Ordering::Acquire) || old.leaves_behind(self.ignores_flushes()) {
            let owed = Owed { disk: Arc::clone(old), was_lost: lost.is_some() };
            *disk.lock().unwrap_or_else(PoisonError::into_inner) = Some(owed);
            is_owed.store(true, Ordering::Release);
        }
    }

    /// Gives back the locks of a disk whose place another has, with locks of its own: to make it stable may take any time.
    pub fn leave_locks(&self) {
        if let Some(file) = self.file() {
            lock::unlock(file);
        }
    }

    /// Makes stable what the disk before has left behind, and lets go of that one.
    ///
    /// # Errors
    ///
    /// It cannot be made stable, or could not: no flush succeeds, and the next one tells.
    pub fn let_go_of_predecessor(&self) -> io::Result<()> {
        let settled = retry_on_intr(|| self.settle());
        // To close it may take any time, too.
        let old = self.predecessor.disk.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(old);
        Ok(settled?)
    }

    /// Whether what the disk before has left behind has to be seen to before a flush. Not any more, once it is not.
    pub(crate) fn is_owed(&self) -> bool {
        self.predecessor.is_owed.load(Ordering::Acquire)
    }

    /// Makes stable what the disk before has left behind, for a guest that flushes this one, and says whether anything is lost.
    pub(crate) fn sync_predecessor(&self) -> Result<(), Errno> {
        self.told(self.settle())
    }

    /// Says whether anything is known to be lost, to a guest that has something made stable here. Does not wait.
    pub(crate) fn tell_loss(&self) -> Result<(), Errno> {
        self.told(self.known_loss())
    }

    /// What a guest is told of is known.
    pub(super) fn told(&self, synced: Result<(), Errno>) -> Result<(), Errno> {
        if synced.is_err() {
            self.predecessor.is_untold.store(false, Ordering::Release);
        }
        synced
    }

    /// What is about to be lost nobody is told of, yet.
    pub(super) fn keep_untold(&self) {
        self.predecessor.is_untold.store(true, Ordering::Release);
    }

    /// Makes stable what the disk before has left behind; no guest has asked.
    pub(super) fn settle(&self) -> Result<(), Errno> {
        self.settle_owed()?;
        self.known_loss()
    }

    fn known_loss(&self) -> Result<(), Errno> {
        self.syncs.lost().map_or(Ok(()), Err)
    }

    /// The same, whatever was lost before.
    fn settle_owed(&self) -> Result<(), Errno> {
        let Predecessor { is_owed, disk, .. } = &self.predecessor;
        if !is_owed.load(Ordering::Acquire) {
            return Ok(());
        }
        let disk = disk.lock().unwrap_or_else(PoisonError::into_inner);
        // Who had the lock before may have done it.
        let Some(Owed { disk: old, was_lost }) = disk.as_ref().filter(|_| is_owed.load(Ordering::Acquire)) else {
            return Ok(());
        };
        let synced = match was_lost {
            // That one may owe something itself.
            true => old.settle_owed().and_then(|()| old.sync_once().map_err(|e| e.errno)),
            false => old.sync_unasked(),
        };
        // Nothing was told yet.
        if synced == Err(Errno::INTR) {
            return synced;
        }
        if let Err(errno) = synced {
            self.keep_untold();
            self.syncs.lose(errno);
        }
        is_owed.store(false, Ordering::Release);
        synced
    }

    /// Whether there may be something that no flush of the next disk makes stable.
    fn leaves_behind(&self, next_ignores_flushes: bool) -> bool {
        !self.options.read_only
            && match &self.backing {
                // What a device has in its own cache any flush of it makes stable.
                Backing::File(_) | Backing::Device(_) => self.may_be_cached() || next_ignores_flushes,
                Backing::Null { .. } => false,
                // Somebody else has the disk now, and who opens it anew knows that.
                Backing::Remote(remote) => !remote.is_lost(),
            }
    }
}
