//! Linux AIO: the engine of `aio=native`.
//!
//! The kernel counts each completion on an eventfd, which the loop watches and nobody reads; what completed is read from
//! the context's ring.
//!
//! `io_submit` blocks where the request cannot go to the device at once, which is why the engine serves direct I/O
//! only, and why the time inside it is measured.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;

use egret_event_loop::aio::{self, Context, Iocb};
use egret_event_loop::{Nanos, clock};
use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::slab::Slab;
use super::transfer::{Next, Transfer};
use super::{Engine, Finished, Job};
use crate::disk::Disk;
use crate::error::EngineError;
use crate::request::Op;
use crate::stats::EngineCounters;

/// Requests in the kernel at a time; more wait here.
pub(crate) const DEPTH: u32 = 1024;

/// See the module's description.
pub(crate) struct Native {
    /// Dropped before what it works on.
    context: Context,
    event: OwnedFd,
    /// Descriptor and block size of the disks, by slot.
    disks: Vec<(RawFd, u32)>,
    flying: Slab<Transfer>,
    /// Places of what waits for `io_submit`.
    pending: VecDeque<u32>,
    /// Of what waits: how many were never tried.
    fresh: u64,
    /// What the kernel would not take.
    refused: Vec<(u32, Errno)>,
    in_kernel: u32,
    depth: u32,
    batch: usize,
    iocbs: Vec<Iocb>,
    pointers: Vec<*mut Iocb>,
    counters: Arc<EngineCounters>,
}

impl Native {
    /// An engine with `depth` requests in the kernel at a time, and at most `max_batch` (0: no limit) of them in one
    /// `io_submit`.
    pub(crate) fn new(depth: u32, max_batch: u32, counters: Arc<EngineCounters>) -> Result<Self, EngineError> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| EngineError::Event(e.into()))?;
        let context = Context::new(depth)?;
        let mut new = Self {
            context,
            event,
            disks: Vec::new(),
            flying: Slab::with_capacity(depth as usize),
            pending: VecDeque::with_capacity(depth as usize),
            fresh: 0,
            refused: Vec::new(),
            in_kernel: 0,
            depth,
            batch: 0,
            iocbs: Vec::new(),
            pointers: Vec::new(),
            counters,
        };
        new.limit_batch(max_batch);
        Ok(new)
    }

    fn iocb(&mut self, place: u32) -> Iocb {
        let mut iocb =
            Iocb { data: u64::from(place), flags: aio::RESFD, resfd: self.event.as_raw_fd() as u32, ..Iocb::default() };
        let Some(transfer) = self.flying.get_mut(place) else { return iocb };
        iocb.fd = self.disks[transfer.slot() as usize].0 as u32;
        iocb.opcode = if transfer.op() == Op::Read { aio::PREADV } else { aio::PWRITEV };
        let buffers = transfer.buffers();
        iocb.buf = buffers.as_ptr() as u64;
        iocb.nbytes = buffers.len() as u64;
        iocb.offset = transfer.offset() as i64;
        if transfer.op() == (Op::Write { fua: true }) {
            iocb.rw_flags = libc::RWF_DSYNC;
        }
        iocb
    }

    /// One `io_submit`; false when nothing more can be done now.
    fn submit_some(&mut self) -> bool {
        let count = self.pending.len().min((self.depth - self.in_kernel) as usize).min(self.batch);
        if count == 0 {
            return false;
        }
        for i in 0..count {
            let iocb = self.iocb(self.pending[i]);
            self.iocbs[i] = iocb;
        }
        for (pointer, iocb) in self.pointers.iter_mut().zip(&mut self.iocbs) {
            *pointer = iocb;
        }
        let begun = clock::now();
        // SAFETY: the iocbs are this engine's and live through the call; the requests' memory stays mapped until they
        // complete, as `IoVec::new` was promised, and their lists of buffers are owned by transfers in the table.
        let taken = unsafe { self.context.submit(&mut self.pointers[..count]) };
        self.counters.took(clock::now() - begun);
        self.counters.submission(taken.unwrap_or(0) as u64);
        match taken {
            Ok(taken) => {
                self.pending.drain(..taken);
                self.in_kernel += taken as u32;
                taken > 0
            }
            // There will be room when something completes.
            Err(Errno::AGAIN) if self.in_kernel > 0 => false,
            Err(Errno::INTR) => true,
            // The first of them is at fault.
            Err(e) => {
                if let Some(place) = self.pending.pop_front() {
                    self.refused.push((place, e));
                }
                true
            }
        }
    }
}

impl Engine for Native {
    fn attach(&mut self, slot: u32, disk: &Arc<Disk>) {
        let slot = slot as usize;
        self.disks.resize(self.disks.len().max(slot + 1), (-1, 1));
        self.disks[slot] = (disk.fd(), disk.offset_alignment());
    }

    fn detach(&mut self, slot: u32) {
        self.disks[slot as usize] = (-1, 1);
    }

    fn push(&mut self, job: Job) {
        let place = self.flying.insert(Transfer::new(job));
        self.pending.push_back(place);
        self.fresh += 1;
    }

    fn submit(&mut self, _now: Nanos) {
        self.counters.requests.add(std::mem::take(&mut self.fresh));
        while self.submit_some() {}
    }

    fn has_completions(&mut self) -> bool {
        !self.context.is_empty() || !self.refused.is_empty()
    }

    fn reap(&mut self, _now: Nanos, done: &mut dyn FnMut(Finished)) {
        while let Some((place, e)) = self.refused.pop() {
            if let Some(transfer) = self.flying.remove(place) {
                done(transfer.finish(Err(e)));
            }
        }
        while let Some(event) = self.context.next() {
            self.in_kernel -= 1;
            let place = event.data as u32;
            let Some(transfer) = self.flying.get_mut(place) else { continue };
            let block = self.disks[transfer.slot() as usize].1;
            match transfer.advance(event.res, block) {
                // It has waited once: it goes first.
                Next::Again => self.pending.push_front(place),
                Next::Over(result) => {
                    if let Some(transfer) = self.flying.remove(place) {
                        done(transfer.finish(result));
                    }
                }
            }
        }
    }

    fn descriptor(&self) -> Option<RawFd> {
        Some(self.event.as_raw_fd())
    }

    fn end(self: Box<Self>, left: &mut dyn FnMut(Job)) {
        let Self { context, flying, .. } = *self;
        drop(context);
        flying.into_values().for_each(|transfer| left(transfer.into_job()));
    }

    fn limit_batch(&mut self, most: u32) {
        self.batch = if most == 0 { self.depth } else { most.min(self.depth) } as usize;
        self.iocbs.resize(self.batch, Iocb::default());
        self.pointers.resize(self.batch, ptr::null_mut());
    }
}
