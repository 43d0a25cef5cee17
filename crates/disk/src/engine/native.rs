//! Linux AIO: the engine of `aio=native`.
//!
//! The kernel counts each completion on an eventfd, which the loop watches edge by edge and never reads; completions are read from
//! the context's ring.
//!
//! `io_submit` blocks where the request cannot go to the device at once, which is why the engine serves direct I/O
//! only, and why the time inside it is measured.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, RawFd};
use std::ptr;
use std::sync::Arc;

use egret_event_loop::aio::{self, Context, Iocb};
use egret_event_loop::{EventNotifier, Nanos, clock};
use rustix::io::Errno;

use super::transfer::{Next, Transfer};
use super::turns::Turns;
use super::{Engine, SharedEngine};
use crate::disk::Disk;
use crate::error::EngineError;
use crate::job::Job;
use crate::request::Op;
use crate::slab::Slab;
use crate::stats::EngineCounters;

/// Requests in the kernel at a time; more wait here.
pub(crate) const DEPTH: u32 = 1024;

/// How a disk's requests go to the kernel.
#[derive(Clone, Copy)]
struct File {
    fd: RawFd,
    /// What direct I/O moves, in bytes.
    block: u32,
    /// Where they wait.
    line: usize,
}

const NO_FILE: File = File { fd: -1, block: 1, line: 0 };

/// See the module's description.
pub(crate) struct Native {
    /// Dropped first: the kernel uses the memory of its transfers until then.
    context: Context,
    event: EventNotifier,
    /// By slot.
    disks: Vec<File>,
    flying: Slab<Transfer>,
    /// Places in the table of what waits for `io_submit`; the kernel has as many in its own.
    pending: Turns<u32>,
    /// What goes to the kernel in one call, and the lines that it was in.
    going: Vec<(usize, u32)>,
    /// Of what waits: how many were never tried.
    fresh: u64,
    /// What the kernel would not take.
    refused: Vec<(u32, Errno)>,
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
        let event = EventNotifier::new().map_err(EngineError::Event)?;
        let context = Context::new(depth)?;
        let mut new = Self {
            context,
            event,
            disks: Vec::new(),
            flying: Slab::with_capacity(depth as usize),
            pending: Turns::new(depth),
            going: Vec::new(),
            fresh: 0,
            refused: Vec::new(),
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
        iocb.fd = self.disks[transfer.slot() as usize].fd as u32;
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
        self.pending.begin_batch();
        while self.going.len() < self.batch
            && let Some(next) = self.pending.take()
        {
            self.going.push(next);
        }
        let count = self.going.len();
        if count == 0 {
            return false;
        }
        for i in 0..count {
            let iocb = self.iocb(self.going[i].1);
            self.iocbs[i] = iocb;
        }
        for (pointer, iocb) in self.pointers.iter_mut().zip(&mut self.iocbs) {
            *pointer = iocb;
        }
        let begun = clock::now();
        // SAFETY: the iocbs are this engine's and live through the call; the requests' memory stays mapped until they
        // complete, as lent memory does, and their lists of buffers are owned by transfers in the table.
        let taken = unsafe { self.context.submit(&mut self.pointers[..count]) };
        self.counters.took(clock::now() - begun);
        self.counters.submission(taken.unwrap_or(0) as u64);
        // Before what goes back to its lines has left its places.
        let others_are_there = self.pending.taken() as usize > count;
        let (gone, goes_on) = match taken {
            Ok(taken) => (taken, taken > 0),
            // There will be room when something completes.
            Err(Errno::AGAIN) if others_are_there => (0, false),
            Err(Errno::INTR) => (0, true),
            // The first of them is at fault.
            Err(e) => {
                let (line, place) = self.going[0];
                self.pending.leave(line);
                self.refused.push((place, e));
                (1, true)
            }
        };
        for (line, place) in self.going.drain(gone..).rev() {
            self.pending.leave(line);
            self.pending.put_first(line, place);
        }
        self.going.clear();
        goes_on
    }
}

impl Engine for Native {
    fn push(&mut self, job: Box<Job>) {
        let line = self.disks[job.slot as usize].line;
        let place = self.flying.insert(Transfer::new(job));
        self.pending.put(line, place);
        self.fresh += 1;
    }

    fn submit(&mut self, _now: Nanos) {
        self.counters.requests.add(std::mem::take(&mut self.fresh));
        while self.submit_some() {}
    }

    fn has_completions(&mut self) -> bool {
        !self.context.is_empty() || !self.refused.is_empty()
    }

    fn reap(&mut self, _now: Nanos, done: &mut dyn FnMut(Box<Job>)) {
        while let Some((place, e)) = self.refused.pop() {
            if let Some(transfer) = self.flying.remove(place) {
                done(transfer.finish(Err(e)));
            }
        }
        while let Some(event) = self.context.next() {
            let place = event.data as u32;
            let Some(transfer) = self.flying.get_mut(place) else { continue };
            let File { block, line, .. } = self.disks[transfer.slot() as usize];
            self.pending.leave(line);
            match transfer.advance(event.res, block) {
                // It has waited once: it goes first.
                Next::Again => self.pending.put_first(line, place),
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

    fn end(self: Box<Self>, left: &mut dyn FnMut(Box<Job>)) {
        let Self { context, flying, .. } = *self;
        drop(context);
        flying.into_values().for_each(|transfer| left(transfer.into_job()));
    }
}

impl SharedEngine for Native {
    fn attach(&mut self, slot: u32, disk: &Arc<Disk>) -> Result<(), EngineError> {
        let slot = slot as usize;
        self.disks.resize(self.disks.len().max(slot + 1), NO_FILE);
        let line = self.pending.open(disk);
        self.pending.limit_batches(line, disk.options().aio_max_batch);
        self.disks[slot] = File { fd: disk.fd(), block: disk.offset_alignment(), line };
        Ok(())
    }

    fn detach(&mut self, slot: u32) {
        let file = std::mem::replace(&mut self.disks[slot as usize], NO_FILE);
        self.pending.close(file.line);
    }

    fn limit_batch(&mut self, most: u32) {
        self.batch = if most == 0 { self.depth } else { most.min(self.depth) } as usize;
        self.iocbs.resize(self.batch, Iocb::default());
        self.pointers.resize(self.batch, ptr::null_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::Aligned;
    use crate::request::{Request, RequestToken};
    use crate::{Driver, Options};
    use egret_vring::memory::{IoVec, Lent};
    use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};

    /// An engine with two disks, which are read to one place.
    struct Reading {
        native: Native,
        /// Dropped after the engine, which waits for its requests.
        memory: Aligned,
        _disks: [Arc<Disk>; 2],
    }

    impl Reading {
        /// An engine of `depth` and `max_batch`; the first disk has so many requests in a batch at most.
        fn new((depth, max_batch): (u32, u32), aio_max_batch: u32) -> Self {
            let image = tempfile::NamedTempFile::new().unwrap();
            image.as_file().set_len(1 << 20).unwrap();
            let driver = Driver::File { filename: image.path().to_owned() };
            let any = Options { direct: true, read_only: true, ..Options::new("disk0", driver) };
            let mut native = Native::new(depth, max_batch, Arc::default()).unwrap();
            let disks = [Options { aio_max_batch, ..any.clone() }, any].map(|of| Arc::new(Disk::open(&of).unwrap()));
            disks.iter().zip(0..).for_each(|(disk, slot)| native.attach(slot, disk).unwrap());
            Self { native, memory: Aligned::zeroed(4096, 4096), _disks: disks }
        }

        /// Has a block read of the disk at each of these slots.
        fn submit(&mut self, slots: impl IntoIterator<Item = u32>) {
            let base = self.memory.bytes().as_mut_ptr();
            for slot in slots {
                // SAFETY: the memory outlives the engine.
                let buffers = unsafe { Lent::assume(vec![IoVec::new(base, 4096)]) };
                let request = Request { op: Op::Read, offset: 0, len: 4096, buffers, token: RequestToken(slot.into()) };
                self.native.push(Job::new(slot, request));
            }
            self.native.submit(Nanos::ZERO);
        }

        fn await_completion(&mut self) {
            while !self.native.has_completions() {
                std::thread::yield_now();
            }
        }

        /// What has ended: the slot, and what came of it.
        fn reap(&mut self) -> Vec<(u32, Result<(), Errno>)> {
            let mut ended = Vec::new();
            self.native.reap(Nanos::ZERO, &mut |job| ended.push((job.slot, job.result)));
            ended
        }
    }

    /// Submits reads of two disks, the first with so many requests in a batch at most, by an engine of `depth` and
    /// `max_batch`: one for each slot that is named.
    fn submitted(
        shape: (u32, u32),
        aio_max_batch: u32,
        slots: impl IntoIterator<Item = u32>,
        look: impl FnOnce(&mut Native),
    ) {
        let mut reading = Reading::new(shape, aio_max_batch);
        reading.submit(slots);
        look(&mut reading.native);
    }

    #[test]
    fn a_disk_with_many_requests_leaves_places_in_the_kernel_to_another() {
        submitted((8, 3), 0, std::iter::repeat_n(0, 100).chain([1]), |native| {
            // The second disk's only request and half of what the first may have at most, and no more until they are
            // reaped.
            assert_eq!(native.pending.taken(), 5);
            let waiting: Vec<u32> = native.pending.drain().collect();
            assert_eq!(waiting.len(), 96);
            assert!(waiting.iter().all(|&place| native.flying.get_mut(place).unwrap().slot() == 0));
        });
    }

    #[test]
    fn a_disk_that_is_let_go_of_leaves_its_places_to_the_other() {
        let mut reading = Reading::new((8, 0), 0);
        reading.native.detach(1);
        reading.submit([0; 100]);
        assert_eq!(reading.native.pending.taken(), 7, "all but one, for a disk that may come");
    }

    #[test]
    fn a_disks_own_batches_are_as_small_as_it_asks_for_and_another_disks_are_not() {
        let batches = |max_batch, aio_max_batch| {
            let mut batches = 0;
            let slots = std::iter::repeat_n(0, 6).chain([1; 6]);
            submitted((64, max_batch), aio_max_batch, slots, |native| {
                assert_eq!(native.pending.taken(), 12);
                batches = native.counters.read().submissions;
            });
            batches
        };
        assert_eq!(batches(0, 0), 1);
        assert_eq!(batches(0, 2), 3, "2 and all of the other's, 2, 2");
        assert_eq!(batches(2, 4), 6, "the smaller counts");
    }

    /// `IOCB_CMD_POLL`.
    const POLL: u16 = 5;

    /// Takes up all that a context has room for, and gives it back with the context only.
    fn fill(context: &Context, nobody_signals: &EventNotifier) {
        let never = nobody_signals.as_raw_fd() as u32;
        let mut poll = Iocb { data: u64::MAX, opcode: POLL, fd: never, buf: libc::POLLIN as u64, ..Iocb::default() };
        // SAFETY: the iocb lives through each call, and touches no memory.
        while let Ok(taken) = unsafe { context.submit(&mut [&raw mut poll]) } {
            assert_eq!(taken, 1);
        }
    }

    #[test]
    fn what_the_kernel_has_no_room_for_waits_for_what_it_has_of_the_engine_s_and_fails_if_that_is_nothing() {
        let again = Errno::AGAIN;
        // Each processor has some room set aside.
        let mut here = CpuSet::new();
        here.set(sched_getcpu());
        sched_setaffinity(None, &here).unwrap();
        let mut reading = Reading::new((8, 0), 0);
        let nobody_signals = EventNotifier::new().unwrap();
        reading.submit([0]);
        fill(&reading.native.context, &nobody_signals);
        // Not even one of them is taken, and they wait in the order in which they came.
        reading.submit([1, 1]);
        assert_eq!((reading.native.pending.taken(), reading.native.refused.len()), (1, 0));
        reading.await_completion();
        assert_eq!(reading.reap(), [(0, Ok(()))]);
        // There is room for one again.
        reading.submit([]);
        assert_eq!(reading.native.pending.taken(), 1);
        reading.await_completion();
        assert_eq!(reading.reap(), [(1, Ok(()))]);
        // Now others have all of it, and nothing of the engine's ends any more.
        fill(&reading.native.context, &nobody_signals);
        reading.submit([0]);
        let mut ended = reading.reap();
        ended.sort_by_key(|(slot, _)| *slot);
        assert_eq!(ended, [(0, Err(again)), (1, Err(again))]);
        assert_eq!(reading.native.pending.taken(), 0);
    }
}
