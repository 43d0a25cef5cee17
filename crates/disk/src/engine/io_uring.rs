//! io_uring: the engine of `aio=io_uring`.
//!
//! On the loop's own ring a submission costs nothing: the loop's wait takes it along. On a ring of its own it costs a
//! system call a batch.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use egret_event_loop::ring::{Ring, RingError, SharedRing};
use egret_event_loop::{EventNotifier, Nanos, clock};
use io_uring::{opcode, squeue, types};

use super::pins::{PinnedMap, Pinning, Pins};
use super::transfer::{Next, Transfer};
use super::{Engine, SharedEngine};
use crate::blocking::SHARED_PART;
use crate::disk::Disk;
use crate::error::EngineError;
use crate::job::Job;
use crate::request::Op;
use crate::slab::Slab;
use crate::stats::EngineCounters;

/// Descriptors that are registered with the ring, which saves looking them up for each request; the disks beyond this
/// are served without.
const FILES: u32 = 512;
/// Room for requests in flight before the table grows.
const DEPTH: usize = 256;

/// How the ring knows a disk.
#[derive(Clone, Copy)]
struct File {
    fd: RawFd,
    /// Whether it is registered, under its slot's number.
    fixed: bool,
    /// What direct I/O moves, in bytes.
    block: u32,
    /// Whether the kernel copies what it moves, in the loop's own time, wherever the page cache has it.
    copies: bool,
    /// What is pinned of the memory of its requests.
    pinned: Option<PinnedMap>,
}

const NO_FILE: File = File { fd: -1, fixed: false, block: 1, copies: false, pinned: None };

/// See the module's description.
pub(crate) struct Uring {
    ring: SharedRing,
    /// What announces completions, if the ring is ours alone; the loop watches its own ring itself.
    event: Option<EventNotifier>,
    /// Whether the ring has a table of registered files.
    table: bool,
    /// By slot.
    files: Vec<File>,
    flying: Slab<Transfer>,
    pins: Pins,
    /// By slot: transfers that the kernel is to copy, where several disks share the thread. A submission begins so many bytes
    /// of each slot's, and the other disks' requests wait no longer for them.
    copies: Vec<VecDeque<u32>>,
    /// How many they are.
    waiting: usize,
    beside_others: bool,
    /// Pushed since the last submission.
    fresh: u64,
    counters: Arc<EngineCounters>,
}

impl Uring {
    /// An engine on the loop's ring.
    pub(crate) fn shared(ring: SharedRing, counters: Arc<EngineCounters>) -> Self {
        Self::on(ring, None, counters)
    }

    /// An engine on a ring of its own.
    pub(crate) fn alone(mut ring: Ring, counters: Arc<EngineCounters>) -> Result<Self, EngineError> {
        let event = EventNotifier::new().map_err(EngineError::Event)?;
        ring.announce_on(event.as_fd()).map_err(RingError::from)?;
        Ok(Self::on(Rc::new(RefCell::new(ring)), Some(event), counters))
    }

    fn on(ring: SharedRing, event: Option<EventNotifier>, counters: Arc<EngineCounters>) -> Self {
        // Kernels before 5.19 cannot; others may be short of descriptors.
        let table = ring.borrow().submitter().register_files_sparse(FILES).is_ok();
        Self {
            ring,
            event,
            table,
            files: Vec::new(),
            flying: Slab::with_capacity(DEPTH),
            pins: Pins::new(),
            copies: Vec::new(),
            waiting: 0,
            beside_others: false,
            fresh: 0,
            counters,
        }
    }

    /// Waits until the kernel has done what it was given, because it is others' memory that it uses.
    fn wait(&mut self, left: &mut dyn FnMut(Box<Job>)) {
        for place in self.copies.iter_mut().flat_map(|copies| copies.drain(..)) {
            self.flying.remove(place).into_iter().for_each(|transfer| left(transfer.into_job()));
        }
        let mut ring = self.ring.borrow_mut();
        loop {
            // First what was sorted out before: nothing would end the wait for it.
            while let Some(done) = ring.next_op() {
                if let Some(transfer) = self.flying.remove(done.data as u32) {
                    left(transfer.into_job());
                }
            }
            if self.flying.is_empty() || ring.wait(None).is_err() {
                return;
            }
            ring.sort();
        }
    }

    /// Gives the transfer at `place` to the ring, or, where the kernel would copy while other disks wait, puts it in its slot's
    /// line.
    fn run(&mut self, place: u32, put: fn(&mut VecDeque<u32>, u32)) {
        let Some(transfer) = self.flying.get_mut(place) else { return };
        let slot = transfer.slot() as usize;
        if self.beside_others && self.files[slot].copies {
            put(&mut self.copies[slot], place);
            self.waiting += 1;
        } else {
            let buffer = Self::buffer(&mut self.pins, &self.counters, self.files[slot], transfer);
            Self::start(&mut self.ring.borrow_mut(), self.files[slot], transfer, place, buffer);
        }
    }

    /// Begins to copy, for each slot what it may copy in a turn.
    fn start_copies(&mut self) {
        for slot in 0..self.copies.len() {
            let mut begun = 0;
            while begun < SHARED_PART
                && let Some(place) = self.copies[slot].pop_front()
            {
                self.waiting -= 1;
                let Some(transfer) = self.flying.get_mut(place) else { continue };
                // What goes through the page cache is made stable by a worker, and so no write in parts by itself.
                if transfer.left() > SHARED_PART {
                    transfer.cut(SHARED_PART);
                }
                begun += transfer.left();
                let buffer = Self::buffer(&mut self.pins, &self.counters, self.files[slot], transfer);
                Self::start(&mut self.ring.borrow_mut(), self.files[slot], transfer, place, buffer);
            }
        }
    }

    /// The ring's buffer that has all of a transfer's memory.
    #[inline]
    fn buffer(pins: &mut Pins, counters: &EngineCounters, file: File, transfer: &Transfer) -> Option<u16> {
        let [piece] = transfer.buffers() else { return None };
        let buffer = pins.buffer(file.pinned?, piece)?;
        counters.registered.add(1);
        Some(buffer)
    }

    /// Gives the transfer at `place` to the ring.
    fn start(ring: &mut Ring, file: File, transfer: &Transfer, place: u32, buffer: Option<u16>) {
        // SAFETY: the request's memory stays mapped until it completes, as lent memory does; its list of
        // buffers is owned by the transfer, which stays in the table as long, and is changed only when the ring has
        // given it back. The descriptor is open while the disk is attached.
        unsafe { ring.push(entry(file, transfer, buffer), u64::from(place)) };
    }
}

fn entry(file: File, transfer: &Transfer, buffer: Option<u16>) -> squeue::Entry {
    let fd = types::Fd(if file.fixed { transfer.slot() as i32 } else { file.fd });
    let offset = transfer.offset();
    let buffers = transfer.buffers();
    let (iovecs, count) = (buffers.as_ptr().cast::<libc::iovec>(), buffers.len() as u32);
    // One piece of memory needs no list.
    let single = match buffers {
        [piece] => u32::try_from(piece.len()).ok().map(|len| (piece.base(), len)),
        _ => None,
    };
    let entry = match (transfer.op(), single, buffer) {
        (Op::Read, Some((base, len)), None) => opcode::Read::new(fd, base, len).offset(offset).build(),
        (Op::Read, Some((base, len)), Some(buffer)) => {
            opcode::ReadFixed::new(fd, base, len, buffer).offset(offset).build()
        }
        (Op::Read, None, _) => opcode::Readv::new(fd, iovecs, count).offset(offset).build(),
        (op, Some((base, len)), None) => opcode::Write::new(fd, base, len).offset(offset).rw_flags(through(op)).build(),
        (op, Some((base, len)), Some(buffer)) => {
            opcode::WriteFixed::new(fd, base, len, buffer).offset(offset).rw_flags(through(op)).build()
        }
        (op, None, _) => opcode::Writev::new(fd, iovecs, count).offset(offset).rw_flags(through(op)).build(),
    };
    if file.fixed { entry.flags(squeue::Flags::FIXED_FILE) } else { entry }
}

/// Flags of a write that is, or is not, on stable storage when it completes.
fn through(op: Op) -> i32 {
    if op == (Op::Write { fua: true }) { libc::RWF_DSYNC } else { 0 }
}

impl Engine for Uring {
    fn push(&mut self, job: Box<Job>) {
        let place = self.flying.insert(Transfer::new(job));
        self.run(place, VecDeque::push_back);
        self.fresh += 1;
    }

    fn submit(&mut self, now: Nanos) {
        if self.waiting > 0 {
            self.start_copies();
        }
        let fresh = std::mem::take(&mut self.fresh);
        if fresh > 0 {
            self.counters.batch(fresh);
        }
        let has_step = self.pins.is_due(now);
        if self.event.is_none() && !has_step {
            return;
        }
        let mut ring = self.ring.borrow_mut();
        let (enters, begun) = (ring.enters(), if fresh > 0 { clock::now() } else { Nanos::ZERO });
        // What is not taken now stays queued and goes with the next call.
        let _ = ring.flush();
        if fresh > 0 && ring.enters() > enters {
            self.counters.took(clock::now() - begun);
        }
        // Behind the batch, which does not wait for it.
        if has_step && ring.is_flushed() {
            self.pins.step(&ring, &self.counters);
        }
    }

    fn has_completions(&mut self) -> bool {
        // With nothing of its own in there it need not look at the ring.
        !self.flying.is_empty() && self.ring.borrow_mut().has_ops()
    }

    fn reap(&mut self, _now: Nanos, done: &mut dyn FnMut(Box<Job>)) {
        self.ring.borrow_mut().sort();
        loop {
            let Some(op) = self.ring.borrow_mut().next_op() else { return };
            let place = op.data as u32;
            let Some(transfer) = self.flying.get_mut(place) else { continue };
            let file = self.files[transfer.slot() as usize];
            match transfer.advance(i64::from(op.result), file.block) {
                Next::Again => self.run(place, VecDeque::push_front),
                Next::Over(result) => {
                    if let Some(transfer) = self.flying.remove(place) {
                        done(transfer.finish(result));
                    }
                }
            }
        }
    }

    fn deadline(&self) -> Option<Nanos> {
        // What is to be copied next, which nothing announces.
        let copies = (self.waiting > 0).then_some(Nanos::ZERO);
        copies.into_iter().chain(self.pins.deadline()).min()
    }

    fn arm(&mut self) -> bool {
        if self.event.is_some() {
            self.ring.borrow_mut().arm_event();
        }
        !self.has_completions()
    }

    fn suppress(&mut self) {
        if self.event.is_some() {
            self.ring.borrow_mut().suppress_event();
        }
    }

    fn descriptor(&self) -> Option<RawFd> {
        self.event.as_ref().map(AsRawFd::as_raw_fd)
    }

    fn end(mut self: Box<Self>, left: &mut dyn FnMut(Box<Job>)) {
        self.wait(left);
    }
}

impl SharedEngine for Uring {
    fn attach(&mut self, slot: u32, disk: &Arc<Disk>) -> Result<(), EngineError> {
        let fd = disk.fd();
        let fixed = self.table
            && slot < FILES
            && self.ring.borrow().submitter().register_files_update(slot, &[fd]).is_ok_and(|updated| updated == 1);
        let place = slot as usize;
        self.files.resize(self.files.len().max(place + 1), NO_FILE);
        self.files[place] =
            File { fd, fixed, block: disk.offset_alignment(), copies: !disk.options.direct, pinned: None };
        self.copies.resize_with(self.files.len(), VecDeque::new);
        Ok(())
    }

    fn detach(&mut self, slot: u32) {
        let file = std::mem::replace(&mut self.files[slot as usize], NO_FILE);
        if file.fixed {
            // A descriptor that stays registered would keep the image open, and locked.
            let _ = self.ring.borrow().submitter().register_files_update(slot, &[-1]);
        }
        file.pinned.into_iter().for_each(|map| self.pins.leave(map));
    }

    fn pin(&mut self, slot: u32, pinning: Pinning) {
        let file = &mut self.files[slot as usize];
        if file.pinned.is_none() {
            file.pinned = self.pins.enter(&self.ring.borrow(), pinning);
        }
    }

    fn set_beside_others(&mut self, several: bool) {
        self.beside_others = several;
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.wait(&mut |_| {});
        self.pins.end(&self.ring.borrow());
        if self.table {
            let _ = self.ring.borrow().submitter().unregister_files();
        }
    }
}

#[cfg(test)]
mod tests {
    use egret_vring::memory::{IoVec, Lent};

    use super::*;
    use crate::request::{Request, RequestToken};
    use crate::tests::pinned::{piece, pinning, present};
    use crate::{Driver, Options};

    fn disk() -> (tempfile::NamedTempFile, Arc<Disk>) {
        let image = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(image.path(), [7; 4096]).unwrap();
        let options = Options::new("disk0", Driver::File { filename: image.path().to_owned() });
        let disk = Arc::new(Disk::open(&options).unwrap());
        (image, disk)
    }

    /// A request for all of `memory`, in so many pieces; it must be there until that has ended.
    fn job(slot: u32, op: Op, memory: &mut [u8], pieces: usize) -> Box<Job> {
        let len = memory.len();
        let piece = |part: &mut [u8]| {
            // SAFETY: as the caller sees to.
            unsafe { IoVec::new(part.as_mut_ptr(), part.len()) }
        };
        let pieces = memory.chunks_mut(len / pieces).map(piece).collect();
        // SAFETY: likewise.
        let buffers = unsafe { Lent::assume(pieces) };
        Job::new(slot, Request { op, offset: 0, len: len as u64, buffers, token: RequestToken(0) })
    }

    #[test]
    fn a_disk_is_registered_with_the_ring_if_the_table_has_a_place_for_it_and_served_in_any_case() {
        let (_image, disk) = disk();
        for has_table in [true, false] {
            let mut uring = Uring::alone(Ring::new().unwrap(), Arc::default()).unwrap();
            // Kernels before 5.19 have none.
            uring.table &= has_table;
            for slot in [0, 1, FILES - 1, FILES, FILES + 1] {
                uring.attach(slot, &disk).unwrap();
                assert_eq!(uring.files[slot as usize].fixed, uring.table && slot < FILES, "{slot}");
                let mut memory = [0u8; 4096];
                uring.push(job(slot, Op::Read, &mut memory, 1));
                uring.submit(Nanos::ZERO);
                let mut ended = None;
                while ended.is_none() {
                    uring.ring.borrow_mut().wait(None).unwrap();
                    uring.reap(Nanos::ZERO, &mut |job| ended = Some(job.result));
                }
                assert_eq!((ended, memory), (Some(Ok(())), [7; 4096]), "{slot}");
            }
            if uring.table {
                uring.detach(0);
                let nothing = opcode::Write::new(types::Fixed(0), std::ptr::null(), 0).build();
                let mut ring = uring.ring.borrow_mut();
                // SAFETY: it touches no memory. Its number is nobody's place.
                unsafe { ring.push(nothing, u64::from(u32::MAX)) };
                ring.wait(None).unwrap();
                ring.sort();
                let result = ring.next_op().map(|op| op.result);
                assert_eq!(result, Some(-libc::EBADF), "nothing else is in the place of a disk that is detached");
            }
        }
    }

    #[test]
    fn one_piece_of_memory_goes_without_a_list_and_by_a_buffer_that_is_registered_for_it() {
        let write = Op::Write { fua: false };
        for (op, pieces, buffer, code) in [
            (Op::Read, 1, None, opcode::Read::CODE),
            (Op::Read, 1, Some(3), opcode::ReadFixed::CODE),
            (Op::Read, 2, None, opcode::Readv::CODE),
            (write, 1, None, opcode::Write::CODE),
            (write, 1, Some(3), opcode::WriteFixed::CODE),
            (write, 2, None, opcode::Writev::CODE),
        ] {
            let mut memory = [0u8; 4096];
            let transfer = Transfer::new(job(0, op, &mut memory, pieces));
            assert_eq!(entry(NO_FILE, &transfer, buffer).get_opcode(), u32::from(code), "{op:?} {pieces} {buffer:?}");
        }
    }

    #[test]
    fn what_the_kernel_copies_beside_other_disks_begins_a_part_at_a_time() {
        let (_image, disk) = disk();
        let mut memory = vec![0u8; 3 * SHARED_PART as usize / 2];
        let mut uring = Uring::alone(Ring::new().unwrap(), Arc::default()).unwrap();
        uring.attach(0, &disk).unwrap();
        uring.set_beside_others(true);
        uring.push(job(0, Op::Read, &mut memory, 1));
        uring.submit(Nanos::ZERO);
        let begun: usize = uring.flying.get_mut(0).unwrap().buffers().iter().map(IoVec::len).sum();
        assert_eq!(begun as u64, SHARED_PART);
        for half in memory.chunks_mut(SHARED_PART as usize / 2) {
            uring.push(job(0, Op::Read, half, 1));
        }
        let left = [(); 2].map(|()| {
            uring.submit(Nanos::ZERO);
            uring.waiting
        });
        assert_eq!(left, [1, 0]);
    }

    #[test]
    fn an_engine_that_is_dropped_leaves_nothing_registered_with_the_loops_ring() {
        let (_image, disk) = disk();
        let ring = Rc::new(RefCell::new(Ring::new().unwrap()));
        let mut uring = Uring::shared(Rc::clone(&ring), Arc::default());
        if !uring.table {
            return egret_needs::this_test_lacks("a ring with a table of files");
        }
        uring.attach(0, &disk).unwrap();
        drop(uring);
        // A table that was there still would be in the way of another.
        ring.borrow().submitter().register_files_sparse(FILES).unwrap();
    }

    #[test]
    fn memory_is_pinned_by_steps_that_are_due_and_by_no_others() {
        let (_image, disk) = disk();
        let mut uring = Uring::alone(Ring::new().unwrap(), Arc::default()).unwrap();
        uring.attach(0, &disk).unwrap();
        let memory = present(&[4096]);
        uring.pin(0, pinning(&memory));
        let map = uring.files[0].pinned.unwrap();
        assert_eq!(uring.pins.buffer(map, &piece(&memory, 4096, 0, 4096)), None);
        // The first of two is due at the beginning of time, and the second when it has rested.
        (0..10).for_each(|_| uring.submit(Nanos::ZERO));
        assert_eq!(uring.counters.pinned.get(), 0);
        uring.submit(Nanos(u64::MAX));
        assert_eq!(uring.counters.pinned.get(), 4096);
    }

    #[test]
    fn what_the_ring_has_sorted_out_by_then_is_not_waited_for_at_the_end() {
        let (over, is_over) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let (_image, disk) = disk();
            let mut uring = Uring::alone(Ring::new().unwrap(), Arc::default()).unwrap();
            uring.attach(0, &disk).unwrap();
            let mut memory = [0u8; 4096];
            uring.push(job(0, Op::Read, &mut memory, 1));
            uring.submit(Nanos::ZERO);
            uring.ring.borrow_mut().wait(None).unwrap();
            // As a monitor does that shares the ring, when it is told to watch something no more.
            uring.ring.borrow_mut().sort();
            let mut left = 0;
            uring.wait(&mut |_| left += 1);
            over.send((left, memory)).unwrap();
        });
        assert_eq!(is_over.recv_timeout(std::time::Duration::from_secs(30)), Ok((1, [7; 4096])));
    }
}
