//! What a queue worker asks of a device model.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::task::Waker;

use egret_disk::{Completion, Request};
use egret_vring::memory::{Buffers, GuestMemory, IoVec};
use egret_vring::ring::Chain;
use thiserror::Error;

/// One queue's half of a device: makes disk requests of a chain, and a used element when it is done with it.
///
/// The worker pops a chain and calls [`begin`](Self::begin), and does what the [`Next`] says until the chain is done: a
/// request that comes of it goes to a disk and its completion to [`end`](Self::end); a chain that waits is the model's,
/// which [wakes](Self::set_waker) the worker and goes on with it in [`resume`](Self::resume). The model writes the
/// chain's status itself, before it says that it is done.
///
/// `memory` is the map that the chain was popped with ([`Queue::memory`](egret_vring::ring::Queue::memory)), in all
/// calls: a queue does not change maps while a chain is in flight. What the model reads and writes is checked against it.
pub trait Model: Send {
    /// Looks at a chain, once. It may take the chain's buffers; the next pop fills them anew.
    ///
    /// A request's token has `source`, the worker's index on its loop, and the chain's head as its slot.
    ///
    /// # Errors
    ///
    /// Nothing can be made of the chain, and it cannot be told so: the queue is broken. The chain is not used; the
    /// worker [abandons](egret_vring::ring::Queue::abandon) it.
    fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain, source: u32) -> Result<Next, Malformed>;

    /// Goes on after a request; keeps its buffers for another.
    ///
    /// # Panics
    ///
    /// When the token is not of a request that is out: completed twice, or another queue's.
    fn end(&mut self, memory: &GuestMemory, completion: Completion<Buffers>) -> Next;

    /// How the worker is woken, from any thread, when there is something for [`resume`](Self::resume); before the first
    /// chain begins. `None` when it is to run nowhere: nothing is in flight then, and the driver has been shown all that
    /// was done, so that nobody need wait for this queue.
    fn set_waker(&mut self, _waker: Option<Waker>) {}

    /// Goes on with the chains that wait and need not any more, and appends what becomes of them. To be called when the
    /// worker has been woken. Its work in one call is bounded; if there is more, it wakes the worker anew.
    fn resume(&mut self, _memory: &GuestMemory, _into: &mut Vec<Next>) {}

    /// The worker has shown the driver all that was done, and has taken in all chains that the driver had made available
    /// when the turn began.
    fn shown(&mut self) {}

    /// How many chains are in flight.
    fn in_flight(&self) -> usize;

    /// How many chains there is a use for now, on a queue whose chains are for the device to send something with, or
    /// that has only so many under way at a time. `None` on all others, which want every chain.
    fn wanted(&self) -> Option<Arc<AtomicU32>> {
        None
    }
}

/// The longest list of pieces that is kept for another request.
pub(crate) const KEEP_PIECES: usize = 128;

/// Keeps a request's buffers for another, unless they have grown to a list that is rarely needed: a driver that has sent
/// the longest chains once would otherwise have their memory for as long as its queue runs. Only those allocate anew.
#[inline]
pub(crate) fn keep(spare: &mut Vec<Vec<IoVec>>, mut buffers: Vec<IoVec>) {
    if buffers.capacity() <= KEEP_PIECES {
        buffers.clear();
        spare.push(buffers);
    }
}

/// Names a disk of the device: small numbers, and 0 where there is only one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DiskKey(pub u32);

/// What becomes of a chain.
#[derive(Debug)]
pub enum Next {
    /// This request goes to the disk.
    Submit(DiskKey, Request<Buffers>),
    /// Others are in its way: [`resume`](Model::resume) has more of it.
    Wait,
    /// It is done: add it to the used ring.
    Done(Ended),
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

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 6] = [Self::Read, Self::Write, Self::Flush, Self::Discard, Self::WriteZeroes, Self::Other];

    /// Its name: `read`, `write`, `flush`, `discard`, `write_zeroes` or `other`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write_zeroes",
            Self::Other => "other",
        }
    }
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
