//! Linux AIO: the engine of `aio=native`.
//!
//! Completions are read from the kernel's ring in user space, so that looking for them costs a few loads; the kernel
//! also counts each on an eventfd, which the loop watches and nobody reads.
//!
//! `io_submit` blocks where the request cannot go to the device at once, which is why the engine serves direct I/O
//! only, and why the time inside it is measured.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

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

// From linux/aio_abi.h.
const IOCB_CMD_FDSYNC: u16 = 3;
const IOCB_CMD_PREADV: u16 = 7;
const IOCB_CMD_PWRITEV: u16 = 8;
const IOCB_FLAG_RESFD: u32 = 1;
const RING_MAGIC: u32 = 0xa10a_10a1;

/// `struct iocb`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Iocb {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    reqprio: i16,
    fd: u32,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

/// `struct io_event`.
#[derive(Clone, Copy)]
#[repr(C)]
struct IoEvent {
    data: u64,
    obj: u64,
    res: i64,
    res2: i64,
}

/// `struct aio_ring`, which the kernel maps where the context's handle points; the events follow it.
#[repr(C)]
struct RingHeader {
    id: u32,
    nr: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compat_features: u32,
    incompat_features: u32,
    header_length: u32,
}

/// An AIO context and its completion ring.
struct Context {
    ring: *const RingHeader,
    /// Events that the ring holds.
    size: u32,
}

impl Context {
    fn new(requests: u32) -> Result<Self, EngineError> {
        let mut handle: libc::c_ulong = 0;
        // SAFETY: the second argument is where the call puts the handle, zero before as it must be.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, requests, &raw mut handle) };
        if result < 0 {
            let e = io::Error::last_os_error();
            return Err(match e.raw_os_error() {
                Some(libc::EAGAIN) => EngineError::AioMaxNr { requests },
                _ => EngineError::Native(e),
            });
        }
        let ring = handle as *const RingHeader;
        let mut context = Self { ring, size: 0 };
        let header = context.header();
        let known = header.magic == RING_MAGIC
            && header.incompat_features == 0
            && header.header_length as usize == size_of::<RingHeader>();
        if !known {
            return Err(EngineError::AioRing);
        }
        context.size = header.nr;
        Ok(context)
    }

    fn header(&self) -> &RingHeader {
        // SAFETY: the kernel mapped the ring at the handle's address, readable and writable, until `io_destroy`. What
        // changes in it is read through atomics.
        unsafe { &*self.ring }
    }

    fn handle(&self) -> libc::c_ulong {
        self.ring as libc::c_ulong
    }

    fn is_empty(&self) -> bool {
        let header = self.header();
        header.head.load(Ordering::Relaxed) == header.tail.load(Ordering::Relaxed)
    }

    /// Takes the oldest completion. Only this thread moves the head; the kernel moves the tail after it has written
    /// what it points past.
    fn next(&mut self) -> Option<IoEvent> {
        let header = self.header();
        let head = header.head.load(Ordering::Relaxed);
        if head == header.tail.load(Ordering::Acquire) || head >= self.size {
            return None;
        }
        // SAFETY: the ring has `size` events behind its header, and `head` is one that the kernel has written.
        let event = unsafe { self.ring.add(1).cast::<IoEvent>().add(head as usize).read() };
        header.head.store(if head + 1 == self.size { 0 } else { head + 1 }, Ordering::Release);
        Some(event)
    }

    /// Gives requests to the kernel and returns how many it took, or why it took none.
    fn submit(&self, iocbs: &mut [*mut Iocb]) -> Result<usize, Errno> {
        // SAFETY: each pointer is to an iocb that lives through the call, whose buffers are promised to stay mapped
        // until it completes.
        let taken = unsafe { libc::syscall(libc::SYS_io_submit, self.handle(), iocbs.len(), iocbs.as_mut_ptr()) };
        if taken >= 0 {
            return Ok(taken as usize);
        }
        Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the handle is one of `io_setup`'s; the call waits until the kernel is done with every request.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.handle()) };
    }
}

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
        let mut iocb = Iocb {
            data: u64::from(place),
            flags: IOCB_FLAG_RESFD,
            resfd: self.event.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let Some(transfer) = self.flying.get_mut(place) else { return iocb };
        iocb.fd = self.disks[transfer.slot() as usize].0 as u32;
        iocb.opcode = match transfer.op() {
            Op::Read => IOCB_CMD_PREADV,
            Op::Write { .. } => IOCB_CMD_PWRITEV,
            _ => IOCB_CMD_FDSYNC,
        };
        if iocb.opcode != IOCB_CMD_FDSYNC {
            let buffers = transfer.buffers();
            iocb.buf = buffers.as_ptr() as u64;
            iocb.nbytes = buffers.len() as u64;
            iocb.offset = transfer.offset() as i64;
        }
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
        let taken = self.context.submit(&mut self.pointers[..count]);
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
