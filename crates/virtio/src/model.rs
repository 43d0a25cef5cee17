//! What a queue worker asks of a device model.

use std::task::Waker;

use egret_disk::{Completion, Request};
use egret_vring::memory::{Buffers, GuestMemory, IoVec};
use egret_vring::ring::Chain;
use thiserror::Error;

/// The model of one queue, by what the queue's chains carry.
///
/// The worker pops a chain and calls [`begin`](Self::begin), and does what the [`Next`] says until the chain is done: a
/// request that comes of it goes to a disk and its completion to [`end`](Self::end); a chain that waits is the model's,
/// which [wakes](Self::set_waker) the worker and goes on with it in [`resume`](Self::resume). The model writes the
/// chain's status itself, before it says that it is done.
///
/// `memory` is the map that the chain was popped with ([`Queue::memory`](egret_vring::ring::Queue::memory)), in all
/// calls: a queue does not change maps while a chain is in flight. What the model reads and writes is checked against it.
pub enum Model {
    /// Requests of disks.
    Request(Box<dyn RequestModel>),
    /// Functions about requests of other queues. They ask nothing of a disk.
    Control(Box<dyn ControlModel>),
    /// The driver's buffers for what the device has to say.
    Event(Box<dyn EventModel>),
}

/// What a request queue's worker asks of its model.
pub trait RequestModel: Send {
    /// As [`Model::begin`].
    ///
    /// # Errors
    ///
    /// As [`Model::begin`].
    fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain, source: u32) -> Result<Next, Malformed>;

    /// As [`Model::end`].
    ///
    /// # Panics
    ///
    /// As [`Model::end`].
    fn end(&mut self, memory: &GuestMemory, completion: Completion<Buffers>) -> Next;

    /// As [`Model::set_waker`].
    fn set_waker(&mut self, _waker: Option<Waker>) {}

    /// As [`Model::resume`].
    fn resume(&mut self, _memory: &GuestMemory, _into: &mut Vec<Next>) {}

    /// As [`Model::caught_up`].
    fn caught_up(&mut self) {}
}

/// What a control queue's worker asks of its model.
pub trait ControlModel: Send {
    /// Looks at a chain, once. `None`: it waits for other queues.
    ///
    /// # Errors
    ///
    /// As [`Model::begin`].
    fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<Option<Ended>, Malformed>;

    /// Whether another function may begin.
    fn has_room(&self) -> bool;

    /// As [`Model::set_waker`].
    fn set_waker(&mut self, waker: Option<Waker>);

    /// The chains that need not wait any more.
    fn resume(&mut self, memory: &GuestMemory) -> Vec<Ended>;
}

/// What an event queue's worker asks of its model.
pub trait EventModel: Send {
    /// Whether there is an event to put in a buffer. Other threads raise events.
    fn has_event(&self) -> bool;

    /// Puts the next event in a chain's buffer.
    fn begin(&mut self, memory: &GuestMemory, chain: &Chain) -> Ended;
}

impl Model {
    /// Whether there is a use for another chain now: an event queue has one for each event, and a control queue has only so
    /// many functions under way.
    #[inline]
    pub fn takes_chains(&self) -> bool {
        match self {
            Self::Request(_) => true,
            Self::Control(model) => model.has_room(),
            Self::Event(model) => model.has_event(),
        }
    }

    /// Looks at a chain, once. It may take the chain's buffers; the next pop fills them anew.
    ///
    /// A request's token has `source`, the worker's index on its loop, and the chain's head as its slot.
    ///
    /// # Errors
    ///
    /// Nothing can be made of the chain, and it cannot be told so: the queue is broken. The chain is not used; the
    /// worker [abandons](egret_vring::ring::Queue::abandon) it.
    #[inline]
    pub fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain, source: u32) -> Result<Next, Malformed> {
        match self {
            Self::Request(model) => model.begin(memory, chain, source),
            Self::Control(model) => Ok(model.begin(memory, chain)?.map_or(Next::Wait, Next::Done)),
            Self::Event(model) => Ok(Next::Done(model.begin(memory, chain))),
        }
    }

    /// Goes on after a request; keeps its buffers for another.
    ///
    /// # Panics
    ///
    /// When the token is not of a request that is out: completed twice, or another queue's.
    #[inline]
    pub fn end(&mut self, memory: &GuestMemory, completion: Completion<Buffers>) -> Next {
        let Self::Request(model) = self else { panic!("a completion is of a request that is out") };
        model.end(memory, completion)
    }

    /// How the worker is woken, from any thread, when there is something for [`resume`](Self::resume); before the first
    /// chain begins. `None` when it is to run nowhere: nothing is in flight then, and the driver has been shown all that
    /// was done, so that nobody need wait for this queue.
    pub fn set_waker(&mut self, waker: Option<Waker>) {
        match self {
            Self::Request(model) => model.set_waker(waker),
            Self::Control(model) => model.set_waker(waker),
            // Whoever raises an event wakes the queue's worker by its loop.
            Self::Event(_) => {}
        }
    }

    /// Goes on with the chains that wait and need not any more, and appends what becomes of them. To be called when the
    /// worker has been woken. Its work in one call is bounded; if there is more, it wakes the worker anew.
    pub fn resume(&mut self, memory: &GuestMemory, into: &mut Vec<Next>) {
        match self {
            Self::Request(model) => model.resume(memory, into),
            Self::Control(model) => into.extend(model.resume(memory).into_iter().map(Next::Done)),
            Self::Event(_) => {}
        }
    }

    /// The worker has published all that was used, and has popped all chains that the driver had made available when the
    /// turn began.
    #[inline]
    pub fn caught_up(&mut self) {
        if let Self::Request(model) = self {
            model.caught_up();
        }
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
