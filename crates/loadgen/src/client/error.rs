//! Errors of a connection.

use std::io;

use egret_vring::memory::MemoryError;
use egret_vring::ring::RingError;
use thiserror::Error;

/// Why a connection could not be made, or ended.
#[derive(Debug, Error)]
pub enum ClientError {
    /// Nobody listens there.
    #[error("cannot connect to {path}: {why}")]
    Connect {
        /// The socket.
        path: String,
        /// Why not.
        why: io::Error,
    },
    /// The server did not answer in time.
    #[error("the server did not answer {0}")]
    Silent(&'static str),
    /// The server closed the connection.
    #[error("the server hung up {0}")]
    HungUp(&'static str),
    /// The server answered with an error.
    #[error("the server refused {request} ({code})")]
    Refused {
        /// What was asked.
        request: &'static str,
        /// What it said.
        code: u64,
    },
    /// The server does not speak the protocol.
    #[error("the server answered {request} with {what}")]
    Nonsense {
        /// What was asked.
        request: &'static str,
        /// What came back.
        what: String,
    },
    /// The server lacks what this client needs.
    #[error("the server does not offer {0}")]
    Lacks(&'static str),
    /// More queues than there are, or deeper ones than there can be.
    #[error("{asked} {what} asked for, and the disk has {most} at most")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many were asked for.
        asked: u64,
        /// How many there can be.
        most: u64,
    },
    /// The server stopped a queue, and signalled its error eventfd.
    #[error("the server broke the queue")]
    Broken,
    /// No request in flight completed in time.
    #[error("no request completed in {0} s")]
    Stuck(u64),
    /// The server used the ring wrongly.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// Our own memory could not be set up.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A system call failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<rustix::io::Errno> for ClientError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::Io(errno.into())
    }
}
