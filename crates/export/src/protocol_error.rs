//! What ends a session.

#![forbid(unsafe_code)]

use std::io;
use std::time::Duration;

use egret_disk::OpenError;
use rustix::io::Errno;

/// How long a message may take to arrive, once it has begun to.
pub(crate) const MESSAGE_TIME: Duration = Duration::from_secs(5);

/// What a peer did wrong, or what became of the connection; either ends the session.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProtocolError {
    #[error("{0}")]
    Invalid(String),
    #[error("hung up in the middle of a message")]
    HungUp,
    #[error("paused for {} s in the middle of a message", MESSAGE_TIME.as_secs())]
    Late,
    #[error(transparent)]
    Disk(#[from] OpenError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

pub(crate) fn invalid<T>(what: impl Into<String>) -> Result<T, ProtocolError> {
    Err(ProtocolError::Invalid(what.into()))
}

impl From<Errno> for ProtocolError {
    fn from(e: Errno) -> Self {
        Self::Io(e.into())
    }
}
