//! Requests on their way through an engine.

#![forbid(unsafe_code)]

use std::ops::Range;

use rustix::io::Errno;

use crate::request::Request;

/// A request on its way through an engine. It stays where it is, in a box that is used again, while its box goes from hand to
/// hand: some hundred bytes that are copied as soon as they are written make a processor wait, each time.
#[derive(Debug)]
pub struct Job {
    /// Which of the attached disks it is for.
    pub(crate) slot: u32,
    /// Whether it was asked to be stable when it completes, whatever is made of that.
    pub(crate) is_to_be_stable: bool,
    /// Whether the disk is synced before it completes, because nothing that is done for it does so.
    pub(crate) sync_after: bool,
    /// A flush of which a worker does what is owed for the disk before; the rest is its disk's own engine's to do.
    pub(crate) settles: bool,
    /// Whether a worker looks for zeroes in what is written: there are some at its beginning.
    pub(crate) maybe_zero: bool,
    /// What is asked for. An engine gives it back as it was.
    pub request: Request,
    /// What came of it: an error until it has ended.
    pub result: Result<(), Errno>,
}

impl Job {
    pub(crate) fn new(slot: u32, request: Request) -> Box<Self> {
        Box::new(Self::of(slot, request))
    }

    #[inline]
    const fn of(slot: u32, request: Request) -> Self {
        let [is_to_be_stable, sync_after, settles, maybe_zero] = [false; 4];
        Self { slot, is_to_be_stable, sync_after, settles, maybe_zero, request, result: Err(Errno::IO) }
    }

    /// Another request, in the box of one that has ended.
    #[inline]
    pub(crate) fn reuse(&mut self, slot: u32, request: Request) {
        *self = Self::of(slot, request);
    }

    /// It has ended: done in full, or with an error.
    #[inline]
    pub fn ended(mut self: Box<Self>, result: Result<(), Errno>) -> Box<Self> {
        self.result = result;
        self
    }

    /// The part of the disk that it touches.
    pub(crate) fn bytes(&self) -> Range<u64> {
        self.request.offset..self.request.offset + self.request.len
    }
}

/// Jobs in their boxes.
pub type Jobs = Vec<Box<Job>>;

#[cfg(test)]
mod tests {
    use egret_vring::memory::Lent;

    use super::*;
    use crate::request::{Op, RequestToken};

    #[test]
    fn a_job_touches_what_its_request_is_about() {
        let (buffers, token) = (Lent::default(), RequestToken(0));
        let job = Job::new(0, Request { op: Op::Discard, offset: 4096, len: 512, buffers, token });
        assert_eq!(job.bytes(), 4096..4608);
    }
}
