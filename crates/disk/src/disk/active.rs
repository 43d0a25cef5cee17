//! When an image is locked.
//!
//! By default that is for as long as it is open. With [`allow_inactive`](crate::Options::allow_inactive) it is while somebody
//! has it *active*: a guest that moves to another daemon leaves its image inactive here, and finds it unlocked there.
//!
//! ```text
//!   inactive ── locks, drops the page cache, looks at the size ──▶ active, by one [`Active`] or more
//!       ▲                                                             │
//!       └───────── the last of them is gone: gives the locks back ────┘
//! ```
//!
//! Before that what was written is written out, by the last of those through which requests came.

use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};

use rustix::fs::{Advice, fadvise};

use super::open::usage;
use super::{Backing, Disk};
use crate::error::{OpenCause, OpenError};
use crate::lock::{self, Usage};
use crate::options::{Driver, Locking};

/// Keeps a disk active until it is dropped.
#[derive(Debug)]
pub struct Active {
    disk: Arc<Disk>,
    serves: bool,
}

/// Who has a disk active.
#[derive(Debug, Default)]
pub(super) struct Users {
    all: usize,
    /// Of those, who has it written out when it leaves, or leaves that to another of them.
    serving: usize,
}

/// What of a disk changes without its owner's doing, for those who only look: it does not keep the disk open.
#[derive(Debug, Default)]
pub struct Standing {
    pub(super) size: AtomicU64,
    /// Changed by who has the disk's `users`. A disk that takes another's place is active before it has users.
    pub(super) is_active: AtomicBool,
}

impl Standing {
    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Whether its image is locked, as far as it is to be locked at all.
    pub fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Acquire)
    }
}

impl Disk {
    /// Has the disk active: its image is locked, and what another host has written to it is seen. Tries once.
    ///
    /// # Errors
    ///
    /// Somebody else has the image locked: [`OpenError::is_locked`] says so, and it may help to try again. Or the system
    /// cannot do it.
    pub fn activate(self: &Arc<Self>) -> Result<Active, OpenError> {
        let mut users = self.users();
        if !self.is_active() {
            self.become_active().map_err(|cause| self.error(cause))?;
            self.standing.is_active.store(true, Ordering::Release);
        }
        users.all += 1;
        drop(users);
        Ok(Active { disk: Arc::clone(self), serves: false })
    }

    /// Whether its image is locked, as far as it is to be locked at all.
    pub fn is_active(&self) -> bool {
        self.standing.is_active()
    }

    /// What may change of it at any time.
    pub fn standing(&self) -> &Arc<Standing> {
        &self.standing
    }

    /// Locks the image as `old` has it locked, if it has, to be used in its place: nobody else can lock it in between.
    ///
    /// # Errors
    ///
    /// Its options differ in a way that somebody else's locks are in the way of.
    pub fn share_locks_of(&self, old: &Self) -> Result<(), OpenError> {
        if !self.options.allow_inactive || !old.is_active() {
            return Ok(());
        }
        let taken = if let Backing::Remote(remote) = &self.backing {
            remote.lock()
        } else if let (Some(file), Some(theirs), Some(path)) = (self.file(), old.file(), self.path()) {
            lock::take_over(theirs, usage(&old.options), file, path, usage(&self.options))
        } else {
            return Ok(());
        };
        taken.map_err(|cause| self.error(cause))?;
        self.standing.is_active.store(true, Ordering::Release);
        Ok(())
    }

    /// Locks the image of a disk that is open [without locks](Locking::Off), as `locking` says, for something that is done to it
    /// in passing. Tries once.
    ///
    /// # Errors
    ///
    /// As [`activate`](Self::activate).
    pub fn lock_for_now(&self, locking: Locking) -> Result<LockedForNow<'_>, OpenError> {
        let usage = Usage { read_only: self.options.read_only, locking };
        let locked = self.file().zip(self.path()).map_or(Ok(()), |(file, path)| lock::try_lock(file, path, usage));
        locked.map(|()| LockedForNow(self)).map_err(|cause| self.error(cause))
    }

    /// Has everything written so far on the disk, where flushes are ignored too, for whoever has the image active next.
    ///
    /// # Errors
    ///
    /// As [`flush`](Self::flush).
    pub fn write_out(&self) -> std::io::Result<()> {
        let synced = if self.options.read_only { self.settle() } else { self.sync_unasked() };
        synced.map_err(Into::into)
    }

    fn become_active(&self) -> Result<(), OpenCause> {
        if let Backing::Remote(remote) = &self.backing {
            remote.lock()?;
            let looked = self.refresh_size().map(|_| ()).inspect_err(|_| remote.unlock());
            let failed = |e| OpenCause::Remote { name: remote.name().to_owned(), why: format!("its size: {e}") };
            return looked.map_err(failed);
        }
        let (Some(file), Some(path)) = (self.file(), self.path()) else { return Ok(()) };
        let failed = |what| move |source| OpenCause::Io { what, path: path.to_owned(), source };
        lock::try_lock(file, path, usage(&self.options))?;
        let mut looked = Ok(());
        if self.options.drop_cache && !self.options.direct {
            looked = fadvise(file, 0, None, Advice::DontNeed).map_err(|e| failed("drop the page cache of")(e.into()));
        }
        // Whoever had it active may have made it longer.
        let looked = looked.and_then(|()| self.refresh_size().map_err(failed("find the size of")));
        looked.map(|_| ()).inspect_err(|_| lock::unlock(file))
    }

    fn error(&self, cause: OpenCause) -> OpenError {
        OpenError { node_name: self.options.node_name.clone(), cause }
    }

    fn path(&self) -> Option<&std::path::Path> {
        match &self.options.driver {
            Driver::File { filename } | Driver::HostDevice { filename } => Some(filename),
            Driver::Null { .. } | Driver::Remote(_) => None,
        }
    }

    fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An image that is locked for as long as this lives, whose disk is open without locks.
#[derive(Debug)]
#[must_use = "who drops it gives the locks back"]
pub struct LockedForNow<'a>(&'a Disk);

impl Drop for LockedForNow<'_> {
    fn drop(&mut self) {
        self.0.unlock();
    }
}

impl Active {
    /// The disk.
    pub const fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// Requests come from here on, until it [leaves](Self::leave).
    pub fn serve(&mut self) {
        if !mem::replace(&mut self.serves, true) {
            self.disk.users().serving += 1;
        }
    }

    /// Whether requests come from here, and it has not [left](Self::leave).
    pub const fn serves(&self) -> bool {
        self.serves
    }

    /// The last of its requests has ended. Returns whether the disk is to be [written out](Disk::write_out) before this is
    /// dropped; if not, somebody serves it still who will be the one to do that.
    #[must_use = "nobody else has it written out"]
    pub fn leave(&mut self) -> bool {
        let mut users = self.disk.users();
        users.serving -= usize::from(mem::take(&mut self.serves));
        users.serving == 0
    }

    /// Has a disk active that takes this one's place, and serves it if this one is served. If that cannot be, this stays.
    pub fn hand_over(&mut self, to: &Arc<Disk>) {
        let Ok(mut next) = to.activate() else { return };
        if self.serves {
            next.serve();
        }
        *self = next;
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        let Self { disk, serves } = self;
        let mut users = disk.users();
        users.all -= 1;
        users.serving -= usize::from(*serves);
        if users.all == 0 && disk.options.allow_inactive {
            disk.unlock();
            disk.standing.is_active.store(false, Ordering::Release);
        }
    }
}
