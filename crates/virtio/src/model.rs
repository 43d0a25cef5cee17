//! What a queue worker asks of a device model.

use egret_disk::{Completion, Request, Token};
use thiserror::Error;

use crate::memory::GuestMemory;
use crate::ring::Chain;

/// One queue's half of a device: makes a disk request of a chain, and a used element of its completion.
///
/// The worker pops a chain and calls [`begin`](Self::begin). A request that comes of it goes to the disk, and its
/// completion to [`end`](Self::end); either way an [`Ended`] says what to add to the used ring. The model writes the
/// chain's status itself, before it says so.
///
/// `memory` is the map that the chain was popped with ([`Queue::memory`](crate::ring::Queue::memory)), in both calls:
/// a queue does not change maps while a chain is in flight. What the model reads and writes is checked against it.
pub trait Model: Send {
    /// Looks at a chain, once. It may take the chain's buffers; the next pop fills them anew.
    ///
    /// The request's token is `base` with the chain's head in its low 16 bits (see [`head_of`]); the other bits are the
    /// worker's own.
    fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain, base: Token) -> Begin;

    /// Ends a request of [`begin`](Self::begin)'s: writes its status, keeps its buffers for another.
    ///
    /// # Panics
    ///
    /// When the token is not of a request that is out: completed twice, or another queue's.
    fn end(&mut self, memory: &GuestMemory, completion: Completion) -> Ended;

    /// How many requests are out.
    fn in_flight(&self) -> usize;
}

/// What became of a chain.
#[derive(Debug)]
pub enum Begin {
    /// It is the disk's now.
    Submit(Request),
    /// It is done, without the disk: add it to the used ring.
    Done(Ended),
    /// Nothing can be made of it, and it cannot be told so: the queue is broken. The chain is not used; the worker
    /// [abandons](crate::ring::Queue::abandon) it.
    Broken(Malformed),
}

/// A chain that can be added to the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which one.
    pub head: u16,
    /// How many bytes of it were written, its status included.
    pub written: u32,
    /// What it asked for.
    pub kind: Kind,
    /// How many bytes of the disk it asked for.
    pub bytes: u64,
    /// What it was told.
    pub status: Status,
}

/// What a request asked for, as statistics have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Data from the disk.
    Read,
    /// Data to the disk.
    Write,
    /// Stable storage.
    Flush,
    /// A range given back.
    Discard,
    /// A range zeroed.
    WriteZeroes,
    /// Anything else.
    Other,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// As it should.
    Ok,
    /// The device or the driver made an error.
    IoError,
    /// It is not a request that this device knows.
    Unsupported,
}

/// Why nothing can be made of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Malformed {
    /// Nothing in it is writable, so there is no room for the status.
    #[error("request without room for its status")]
    NoStatus,
    /// Its readable part is shorter than the header.
    #[error("request with {len} bytes of a header of {needed}")]
    ShortHeader {
        /// How many bytes there are.
        len: u32,
        /// How many there should be.
        needed: u32,
    },
}

/// The token for the chain at `head`: `base`, and the head in the low 16 bits.
#[inline]
pub const fn token_of(base: Token, head: u16) -> Token {
    Token(base.0 & !0xffff | head as u64)
}

/// The head that [`token_of`] put in.
#[inline]
pub const fn head_of(token: Token) -> u16 {
    token.0 as u16
}
