//! What can go wrong with a cluster or an image.

#![forbid(unsafe_code)]

use std::time::Duration;

use rustix::io::Errno;

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
    /// Another client writes to the image.
    #[error(
        "its exclusive lock is held by {owner}: end that client first; if its host is gone, the lock is free some 30 s \
         after that, or when it is broken with: rbd lock remove"
    )]
    Locked {
        /// Its address.
        owner: String,
    },
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
            Self::NoAnswer { .. } => Errno::TIMEDOUT,
            Self::Locked { .. } => Errno::BUSY,
            Self::Load(_) | Self::Unlockable { .. } | Self::Confined | Self::Thread(_) => Errno::IO,
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
