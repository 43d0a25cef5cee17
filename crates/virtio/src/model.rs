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
    /// Functions about requests of other queues, which need no disk.
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

    /// As [`Model::suspend`].
    fn suspend(&mut self, _request: &mut Request<Buffers>) {}

    /// As [`Model::readmit`].
    fn readmit(&mut self, _memory: &GuestMemory, key: DiskKey, request: Request<Buffers>) -> Next {
        Next::Submit(key, request)
    }

    /// As [`Model::set_waker`].
    fn set_waker(&mut self, _waker: Option<Waker>) {}

    /// As [`Model::resume`].
    fn resume(&mut self, _memory: &GuestMemory, _into: &mut Vec<Next>) {}

    /// As [`Model::published`].
    fn published(&mut self) {}

    /// As [`Model::is_full`].
    fn is_full(&mut self, _popped: u16) {}

    /// As [`Model::leave_functions`].
    fn leave_functions(&mut self) {}

    /// As [`Model::caught_up`].
    fn caught_up(&mut self) {}

    /// As [`Model::may_wait`].
    fn may_wait(&mut self, _head: u16) {}

    /// As [`Model::takes_back`].
    fn takes_back(&mut self) -> bool {
        false
    }

    /// As [`Model::holds_up`].
    fn holds_up(&self, _head: u16) -> bool {
        false
    }

    /// As [`Model::waiting`].
    fn waiting(&self) -> usize {
        0
    }

    /// As [`Model::is_aborted`].
    fn is_aborted(&self, _head: u16) -> bool {
        false
    }

    /// As [`Model::let_go`].
    fn let_go(&mut self) {}

    /// As [`Model::look_for_disks`].
    fn look_for_disks(&mut self) {}
}

/// What a control queue's worker asks of its model.
pub trait ControlModel: Send {
    /// Looks at a chain, once. `None`: it waits for other queues.
    ///
    /// # Errors
    ///
    /// As [`Model::begin`].
    fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<Option<Completed>, Malformed>;

    /// Whether another function may begin.
    fn has_room(&self) -> bool;

    /// As [`Model::set_waker`].
    fn set_waker(&mut self, waker: Option<Waker>);

    /// The chains that need not wait any more.
    fn resume(&mut self, memory: &GuestMemory) -> Vec<Completed>;

    /// As [`Model::left`].
    fn left(&self) -> usize;

    /// Ends the chains that are [left](Self::left).
    fn end_left(&mut self, memory: &GuestMemory) -> Vec<Completed>;
}

/// What an event queue's worker asks of its model.
pub trait EventModel: Send {
    /// Whether there is an event to put in a buffer. Other threads raise events.
    fn has_event(&self) -> bool;

    /// Puts the next event in a chain's buffer.
    fn begin(&mut self, memory: &GuestMemory, chain: &Chain) -> Completed;
}

impl Model {
    /// Whether another chain may begin now. A control queue limits the functions in progress; an event queue takes one
    /// buffer for each pending event.
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
    /// The chain has no valid header, or no room for a status that would say so: this breaks the queue. The chain is not
    /// used; the worker [abandons](egret_vring::ring::Queue::abandon) it.
    #[inline]
    pub fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain, source: u32) -> Result<Next, Malformed> {
        match self {
            Self::Request(model) => model.begin(memory, chain, source),
            Self::Control(model) => Ok(model.begin(memory, chain)?.map_or(Next::Wait, Next::Complete)),
            Self::Event(model) => Ok(Next::Complete(model.begin(memory, chain))),
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

    /// A request that is out is not to run for a while, and does not run now: no other chain waits for its chain meanwhile,
    /// on whatever queue. It is [readmitted](Self::readmit) before it runs; or it [ends](Self::end), and never has run.
    #[cold]
    pub fn suspend(&mut self, request: &mut Request<Buffers>) {
        if let Self::Request(model) = self {
            model.suspend(request);
        }
    }

    /// What becomes of a chain whose request was [suspended](Self::suspend): that request need not be what is next.
    #[cold]
    pub fn readmit(&mut self, memory: &GuestMemory, key: DiskKey, request: Request<Buffers>) -> Next {
        match self {
            Self::Request(model) => model.readmit(memory, key, request),
            Self::Control(_) | Self::Event(_) => Next::Submit(key, request),
        }
    }

    /// Sets the waker that any thread may use when there is work for [`resume`](Self::resume). It is set before the first
    /// chain begins. `None` when the queue is detached: no disk has a request of it then, and everything used is
    /// published. Chains that are in flight all the same go on when there is a waker again, and functions wait until then:
    /// they may be about chains that are in the ring. One that is never attached again [lets go](Self::let_go) of them.
    pub fn set_waker(&mut self, waker: Option<Waker>) {
        match self {
            Self::Request(model) => model.set_waker(waker),
            Self::Control(model) => model.set_waker(waker),
            // Whoever raises an event wakes the queue's worker by its loop.
            Self::Event(_) => {}
        }
    }

    /// Resumes chains whose wait is over, and appends what becomes of them. Called after the worker was woken. The work of
    /// one call is bounded; if more is left, the model wakes the worker again.
    pub fn resume(&mut self, memory: &GuestMemory, into: &mut Vec<Next>) {
        match self {
            Self::Request(model) => model.resume(memory, into),
            Self::Control(model) => into.extend(model.resume(memory).into_iter().map(Next::Complete)),
            Self::Event(_) => {}
        }
    }

    /// How many chains are functions about requests that their queue has left to the record of what is in flight, or may have
    /// left in its ring. They are not done, and can be left to the record as well.
    pub fn left(&self) -> usize {
        match self {
            Self::Control(model) => model.left(),
            Self::Request(_) | Self::Event(_) => 0,
        }
    }

    /// Ends the chains that are [left](Self::left), where they cannot be left to a record: it may be that what they are about is
    /// done all the same.
    pub fn end_left(&mut self, memory: &GuestMemory, into: &mut Vec<Next>) {
        if let Self::Control(model) = self {
            into.extend(model.end_left(memory).into_iter().map(Next::Complete));
        }
    }

    /// The chain's request may wait for its disk's limits.
    #[cold]
    pub fn may_wait(&mut self, head: u16) {
        if let Self::Request(model) = self {
            model.may_wait(head);
        }
    }

    /// Whether some requests that wait for limits [hold up](Self::holds_up) others, since the last call: those are to be taken
    /// back from their disks, [suspended](Self::suspend) and [readmitted](Self::readmit).
    #[cold]
    pub fn takes_back(&mut self) -> bool {
        match self {
            Self::Request(model) => model.takes_back(),
            Self::Control(_) | Self::Event(_) => false,
        }
    }

    /// Whether others wait for the chain at `head`, on whatever queue: chains, or functions that are to end it.
    pub fn holds_up(&self, head: u16) -> bool {
        match self {
            Self::Request(model) => model.holds_up(head),
            Self::Control(_) | Self::Event(_) => false,
        }
    }

    /// How many chains wait for other chains.
    pub fn waiting(&self) -> usize {
        match self {
            Self::Request(model) => model.waiting(),
            Self::Control(_) | Self::Event(_) => 0,
        }
    }

    /// Whether the driver has asked for an end of the chain at `head`, whose request need not be run any more.
    pub fn is_aborted(&self, head: u16) -> bool {
        match self {
            Self::Request(model) => model.is_aborted(head),
            Self::Control(_) | Self::Event(_) => false,
        }
    }

    /// Forgets the chains in flight, none of which has a request at a disk: others no longer wait for them. Functions about them
    /// are [left](Self::left), and so are those that may be about chains in the ring.
    pub fn let_go(&mut self) {
        if let Self::Request(model) = self {
            model.let_go();
        }
    }

    /// A disk was taken from the device, or another put in its place: a queue to which nothing comes does not go on having
    /// what is gone.
    pub fn look_for_disks(&mut self) {
        if let Self::Request(model) = self {
            model.look_for_disks();
        }
    }

    /// The worker has published all that was used. Chains that the driver has made available are still in the ring: more are
    /// than a turn takes, or the queue pops none for a while.
    #[inline]
    pub fn published(&mut self) {
        if let Self::Request(model) = self {
            model.published();
        }
    }

    /// Likewise, and none is popped before some in progress have ended, which wait for what may never come. Functions are to end
    /// those that they are about, though they may be about some in the ring as well. `popped` is where in the ring the next one is:
    /// where it was the last time, none has been popped since.
    #[cold]
    pub fn is_full(&mut self, popped: u16) {
        if let Self::Request(model) = self {
            model.is_full(popped);
        }
    }

    /// Likewise, and none is popped any more: whoever serves the queue next does that. Functions are to end those in progress
    /// that they are about, and are [left](Self::left), for they may be about some in the ring as well.
    #[cold]
    pub fn leave_functions(&mut self) {
        if let Self::Request(model) = self {
            model.leave_functions();
        }
    }

    /// Likewise, and has popped all chains that the driver had made available when the turn began, or is broken.
    #[inline]
    pub fn caught_up(&mut self) {
        if let Self::Request(model) = self {
            model.caught_up();
        }
    }
}

/// The longest list of iovecs that is kept for another request.
pub(crate) const KEEP_IOVECS: usize = 128;

/// Keeps a request's list of buffers for another request, unless it is longer than lists usually are. Otherwise a driver
/// that sends the longest chains once would occupy their memory for as long as its queue runs.
#[inline]
pub(crate) fn keep(spare: &mut Vec<Vec<IoVec>>, mut buffers: Vec<IoVec>) {
    if buffers.capacity() <= KEEP_IOVECS {
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
    /// It waits for other chains: [`resume`](Model::resume) returns what is next.
    Wait,
    /// It is complete: add it to the used ring.
    Complete(Completed),
}

/// A chain that can be added to the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// Which one.
    pub head: u16,
    /// How many bytes of it were written, its status included.
    pub written: u32,
    /// What it asked for.
    pub request_type: RequestType,
    /// How many bytes of the disk it asked for.
    pub bytes: u64,
    /// The status that the driver gets.
    pub status: Status,
    /// Which of the export's disks it was for, where there may be several.
    pub disk: Option<DiskKey>,
}

impl Completed {
    /// One that asked for nothing of a disk.
    pub(crate) const fn other(head: u16, written: u32, status: Status) -> Self {
        Self { head, written, request_type: RequestType::Other, bytes: 0, status, disk: None }
    }
}

/// What a request asked for, as statistics have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestType {
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

impl RequestType {
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
    /// It succeeded.
    Ok,
    /// It failed, by the disk's fault or the driver's.
    IoError,
    /// The device does not support it.
    Unsupported,
}

/// Why a chain breaks its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Malformed {
    /// It has no writable buffer, so there is no room for the status.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_type_of_request_has_the_name_that_statistics_have_for_it() {
        let names = ["read", "write", "flush", "discard", "write_zeroes", "other"];
        assert_eq!(RequestType::ALL.map(RequestType::name), names);
    }
}
