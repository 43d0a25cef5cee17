//! What can go wrong with a cluster or an image.

#![forbid(unsafe_code)]

use std::time::Duration;

use rustix::io::Errno;

use crate::calls::MOST;
use crate::sys::LoadError;

/// What went wrong, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RbdError {
    /// The libraries.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// What a library's function says.
    #[error("cannot {what}: {errno}{hint}")]
    Call {
        /// What was being done.
        what: String,
        /// What it came to.
        errno: Errno,
        /// What may help.
        hint: &'static str,
    },
    /// The cluster does not answer.
    #[error(
        "the cluster has not answered for {} s ({what}); see that its monitors and OSDs can be reached, or give it longer \
         with connect-timeout",
        .patience.as_secs()
    )]
    NoAnswer {
        /// What was asked.
        what: &'static str,
        /// How long it was waited for.
        patience: Duration,
    },
    /// There is no room for a call that might hang.
    #[error(
        "{MOST} calls of clusters that do not answer have not ended, and there is no room for another; try again when one of \
         those clusters is well"
    )]
    OthersHang,
    /// Another client writes to the image.
    #[error(
        "its exclusive lock is held by {owner}: end that client first; if its host is gone, the lock is free some 30 s \
         after that, or when it is broken with: rbd lock remove"
    )]
    Locked {
        /// Its address.
        owner: String,
    },
    /// Another handle of this daemon's writes to the image.
    #[error(
        "this daemon has its exclusive lock already: another blockdev is the same image, or this one is to be opened with other \
         options of its connection, which it is when no export has it"
    )]
    LockedHere,
    /// Another daemon has written to the image since its lock was lost.
    #[error(
        "another daemon has had its exclusive lock since this one lost it, and may have written to it: what waits here is \
         not to be written over that; end the guest and the export, and add the export again"
    )]
    Overtaken,
    /// Writes that librbd's cache has acknowledged may be lost with the lock.
    #[error(
        "librbd's cache (rbd_cache) may have acknowledged writes that are lost with its lock: end the guest and the export, \
         and add the export again"
    )]
    CacheLost,
    /// An image that cannot be locked.
    #[error(
        "it has not the feature exclusive-lock; enable it with: rbd feature enable {image} exclusive-lock, or use locking=off"
    )]
    Unlockable {
        /// The image.
        image: String,
    },
    /// The sandbox has begun without it.
    #[error(
        "the sandbox leaves no network to a daemon that is started without a disk of driver=rbd; start egret with one, or with --sandbox=off"
    )]
    Confined,
    /// No thread could be had.
    #[error("there is no thread for librbd: {0}")]
    Thread(String),
}

impl RbdError {
    /// What it is for who knows numbers only.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Call { errno, .. } => *errno,
            Self::NoAnswer { .. } | Self::OthersHang => Errno::TIMEDOUT,
            Self::Locked { .. } | Self::LockedHere => Errno::BUSY,
            Self::Overtaken
            | Self::CacheLost
            | Self::Load(_)
            | Self::Unlockable { .. }
            | Self::Confined
            | Self::Thread(_) => Errno::IO,
        }
    }
}

/// Makes an error of what a function returned, if it is one.
pub(crate) fn check(returned: i32, what: impl FnOnce() -> (String, &'static str)) -> Result<i32, RbdError> {
    if returned >= 0 {
        return Ok(returned);
    }
    let (what, hint) = what();
    Err(RbdError::Call { what, errno: Errno::from_raw_os_error(-returned), hint })
}
