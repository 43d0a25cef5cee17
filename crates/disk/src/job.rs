//! Requests on their way through an engine.

#![forbid(unsafe_code)]

use std::ops::Range;

use egret_vring::memory::Lent;
use rustix::io::Errno;

use crate::request::{Op, Request, RequestToken};

/// A request on its way through an engine.
#[derive(Debug)]
pub struct Job {
    /// Which of the attached disks it is for.
    pub(crate) slot: u32,
    /// Whether the disk is synced before it completes, because nothing that is done for it does so.
    pub(crate) sync_after: bool,
    /// Whether a worker looks for zeroes in what is written: there are some at its beginning.
    pub(crate) maybe_zero: bool,
    /// What is asked for. An engine gives it back as it was.
    pub request: Request,
}

impl Job {
    pub(crate) const fn new(slot: u32, request: Request) -> Self {
        Self { slot, sync_after: false, maybe_zero: false, request }
    }

    /// The part of the disk that it touches.
    pub(crate) fn bytes(&self) -> Range<u64> {
        self.request.offset..self.request.offset + self.request.len
    }

    /// What is left in the place of a job that was taken out of it.
    pub(crate) fn nothing() -> Self {
        let request = Request { op: Op::Flush, offset: 0, len: 0, buffers: Lent::default(), token: RequestToken(0) };
        Self::new(0, request)
    }
}

/// A job that has ended.
#[derive(Debug)]
pub struct Finished {
    /// As it was pushed.
    pub job: Job,
    /// All of it, or an error.
    pub result: Result<(), Errno>,
}
