//! Sets of descriptors that were handed over, and the images that are opened through them: `/dev/fdset/N`.
//!
//! A daemon that may open nothing itself is handed what it is to serve. Opening such an image duplicates one of the set's
//! descriptors, as QEMU does. It cannot be opened anew (through `/proc/self/fd`), because that asks for the path and for
//! permissions once more, which is what the daemon may lack.
//!
//! A duplicate shares its open file description, to which an image's locks and O_DIRECT belong. So each descriptor is
//! used for one open image at a time, and a set that is to be opened twice, as it is for a moment when a blockdev is
//! reopened, has two that were opened apart.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Weak};

use egret_disk::{Disk, Driver, Options};
use egret_vocabulary::schema::{Blockdev, FdSetNumber};
use rustix::fs::{OFlags, fcntl_getfl};

use super::{Daemon, StartError};

/// Descriptors that all sets may have together.
const MOST: usize = 4096;

/// What was handed over.
#[derive(Debug, Default)]
pub(super) struct FdSets(BTreeMap<FdSetNumber, FdSet>);

#[derive(Debug, Default)]
struct FdSet {
    fds: Vec<Member>,
    /// The daemon was started with it, and no client of a monitor has to do with it.
    stays: bool,
}

#[derive(Debug)]
struct Member {
    fd: OwnedFd,
    opaque: Option<String>,
    /// The disk that is open through it, or was.
    user: RefCell<Weak<Disk>>,
}

/// A set, to be shown: each descriptor's number, and what was said of it.
#[derive(Clone, Debug)]
pub struct FdSetShown {
    /// The set's number.
    pub id: FdSetNumber,
    /// Its descriptors.
    pub fds: Vec<(RawFd, Option<String>)>,
}

/// Why a set is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FdSetError {
    /// There is none of this number.
    #[error("there is no fdset {0}; hand one over with add-fd")]
    Missing(FdSetNumber),
    /// It has nothing to open for this.
    #[error("fdset {id} has no descriptor that is open for {access}; hand one over with add-fd{hint}")]
    Access {
        /// The set.
        id: FdSetNumber,
        /// Reading, or reading and writing.
        access: &'static str,
        /// What else would help.
        hint: &'static str,
    },
    /// It has, but all of them are in use.
    #[error("fdset {0} has descriptors for this, and images are open through all of them; add another, opened anew")]
    InUse(FdSetNumber),
    /// The system has no descriptor to spare.
    #[error("fdset {0}: {1}")]
    System(FdSetNumber, String),
    /// To be removed, and not there; in QEMU's words.
    #[error("File descriptor named 'fdset-id:{0}' not found")]
    NoSet(FdSetNumber),
    /// Likewise.
    #[error("File descriptor named 'fdset-id:{0}, fd:{1}' not found")]
    NoDescriptor(FdSetNumber, u64),
    /// There are enough.
    #[error("there are {MOST} descriptors in sets already; remove-fd gives them back")]
    TooMany,
}

impl FdSets {
    fn add(&mut self, id: FdSetNumber, fd: OwnedFd, opaque: Option<String>) -> &mut FdSet {
        let set = self.0.entry(id).or_default();
        set.fds.push(Member { fd, opaque, user: RefCell::default() });
        set
    }

    fn remove(&mut self, id: FdSetNumber, number: Option<u64>) -> Result<(), FdSetError> {
        let set = self.0.get_mut(&id).ok_or(FdSetError::NoSet(id))?;
        if let Some(number) = number {
            let is_it = |member: &Member| u64::try_from(member.fd.as_raw_fd()) == Ok(number);
            let at = set.fds.iter().position(is_it).ok_or(FdSetError::NoDescriptor(id, number))?;
            set.fds.remove(at);
        }
        if number.is_none() || set.fds.is_empty() {
            self.0.remove(&id);
        }
        Ok(())
    }

    /// A descriptor that nobody uses: one for reading alone if that does.
    fn lend(&self, id: FdSetNumber, read_only: bool) -> Result<(File, &Member), FdSetError> {
        let set = self.0.get(&id).ok_or(FdSetError::Missing(id))?;
        let with = |mode| set.fds.iter().filter(move |member| access(&member.fd) == Some(mode));
        let reading = with(OFlags::RDONLY).filter(|_| read_only);
        let mut able = reading.chain(with(OFlags::RDWR)).peekable();
        if able.peek().is_none() {
            return Err(match read_only {
                true => FdSetError::Access { id, access: "reading", hint: "" },
                false => FdSetError::Access { id, access: "reading and writing", hint: ", or use read-only=on" },
            });
        }
        let free = able.find(|member| member.user.borrow().strong_count() == 0).ok_or(FdSetError::InUse(id))?;
        let file = free.fd.try_clone().map_err(|e| FdSetError::System(id, e.to_string()))?;
        Ok((file.into(), free))
    }
}

/// What a descriptor was opened for; nothing, if it only names its file.
fn access(fd: &OwnedFd) -> Option<OFlags> {
    let flags = fcntl_getfl(fd).ok().filter(|flags| !flags.contains(OFlags::PATH))?;
    Some(flags & OFlags::ACCMODE)
}

impl Daemon {
    /// Adds a descriptor to a set, or to a new one; returns the set's number and the descriptor's.
    ///
    /// # Errors
    /// There are too many.
    pub fn add_fd(
        &mut self,
        id: Option<FdSetNumber>,
        fd: OwnedFd,
        opaque: Option<String>,
    ) -> Result<(FdSetNumber, RawFd), FdSetError> {
        let FdSets(sets) = &self.fd_sets;
        if sets.values().map(|set| set.fds.len()).sum::<usize>() >= MOST {
            return Err(FdSetError::TooMany);
        }
        let free = || (0..).find(|id| !sets.contains_key(id)).expect("there are fewer sets than numbers");
        let (id, number) = (id.unwrap_or_else(free), fd.as_raw_fd());
        self.fd_sets.add(id, fd, opaque);
        Ok((id, number))
    }

    /// As [`add_fd`](Self::add_fd), for one that the daemon was started with: its set stays when monitors' clients leave.
    pub(super) fn keep_fd(&mut self, id: FdSetNumber, fd: OwnedFd, opaque: Option<String>) {
        self.fd_sets.add(id, fd, opaque).stays = true;
    }

    /// Removes a descriptor from its set, or the whole set. An image that is open through it stays so.
    ///
    /// # Errors
    /// There is no such set, or no such descriptor in it.
    pub fn remove_fd(&mut self, id: FdSetNumber, number: Option<u64>) -> Result<(), FdSetError> {
        self.fd_sets.remove(id, number)
    }

    /// Closes the sets that no blockdev names: whoever sent them has left, and nobody else knows of them.
    pub fn remove_forsaken_fd_sets(&mut self) {
        let used: BTreeSet<FdSetNumber> = self.config.layers().filter_map(Blockdev::fd_set).collect();
        self.fd_sets.0.retain(|id, set| set.stays || used.contains(id));
    }

    pub(super) fn shown_fd_sets(&self) -> Vec<FdSetShown> {
        let shown = |member: &Member| (member.fd.as_raw_fd(), member.opaque.clone());
        let sets = self.fd_sets.0.iter();
        sets.map(|(id, set)| FdSetShown { id: *id, fds: set.fds.iter().map(shown).collect() }).collect()
    }

    /// Opens a disk, in the place of `old` if there is one, by its path or through a set.
    pub(super) fn open_image(&self, options: &Options, old: Option<&Disk>) -> Result<Arc<Disk>, StartError> {
        let id = match &options.driver {
            Driver::File { filename } | Driver::HostDevice { filename } => {
                filename.to_str().and_then(egret_vocabulary::schema::fd_set_number)
            }
            Driver::Null { .. } | Driver::Remote(_) => None,
        };
        let explain = |e| StartError::FdSet(options.node_name.clone(), e);
        let (handed, member) = match id {
            Some(id) => self.fd_sets.lend(id, options.read_only).map(|(file, member)| (Some(file), Some(member))),
            None => Ok((None, None)),
        }
        .map_err(explain)?;
        let image = self.calls.open(options, handed)?;
        let disk = match old {
            None => Disk::of(options, image)?,
            Some(old) => old.reopen_as(options, image)?,
        };
        let disk = self.connected(&options.node_name, disk);
        if let Some(member) = member {
            *member.user.borrow_mut() = Arc::downgrade(&disk);
        }
        Ok(disk)
    }
}
