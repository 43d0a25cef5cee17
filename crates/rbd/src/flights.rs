//! Requests that librbd has. It reads and writes their memory on threads of its own until it has completed them, and
//! cannot be told to stop: so a request is kept here until then, and for good if nobody waits for it.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::mem;
use std::ptr;
use std::sync::Arc;

use egret_disk::{Job, Op, Slab};
use egret_vring::memory::{IoVec, iovecs};
use rustix::io::Errno;

use crate::image::{Image, Kept};
use crate::sys::{Handle, THICK};

/// Bytes that librbd moves for one request at a time: it may copy what is written before it returns, and takes as much
/// memory for what is read.
const PART: u64 = 2 << 20;

/// Bytes that librbd moves for one engine at a time: what a guest may have in flight is for the guest to say, and its copy is
/// in the daemon's memory.
const MOST_MOVING: u64 = 32 << 20;

/// A completion of librbd's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Whose request it was.
    pub(crate) engine: u32,
    place: u32,
    result: isize,
}

/// The most completions that one look finds.
const MOST: usize = 32;

impl Image {
    /// Adds what has completed since the last look, of all engines, to `events`. Does not wait, and makes no system call.
    pub(crate) fn poll(&self, events: &mut Vec<Event>) {
        let mut found: [Handle; MOST] = [ptr::null_mut(); MOST];
        loop {
            // SAFETY: the image is open, and there is room for as many completions as is said.
            let count = unsafe { (self.ceph.rbd.rbd_poll_io_events)(self.handle, found.as_mut_ptr(), MOST as c_int) };
            let count = usize::try_from(count).unwrap_or(0);
            for &completion in &found[..count] {
                // SAFETY: librbd has handed this completion over, once; nobody has it afterwards.
                events.push(unsafe {
                    let tag = (self.ceph.rbd.rbd_aio_get_arg)(completion) as u64;
                    let result = (self.ceph.rbd.rbd_aio_get_return_value)(completion);
                    (self.ceph.rbd.rbd_aio_release)(completion);
                    Event { engine: (tag >> 32) as u32, place: tag as u32, result }
                });
            }
            if count < MOST {
                return;
            }
        }
    }
}

/// The requests of one engine.
pub(crate) struct Flights {
    image: Arc<Kept>,
    engine: u32,
    places: Slab<Flight>,
    /// Bytes of the parts that librbd reads or writes.
    moving: u64,
    /// Lists of pieces, for use in other requests.
    spare: Vec<Vec<IoVec>>,
}

struct Flight {
    job: Box<Job>,
    /// Bytes that are done.
    done: u64,
    /// Bytes of the part that librbd has.
    part: u64,
    /// The pieces of that part, where it is not all of the request. librbd has its address.
    pieces: Vec<IoVec>,
    /// Whether everything is written, and is being made stable.
    flushes: bool,
}

impl Flight {
    /// Bytes that librbd reads or writes for it at present.
    fn moves(&self) -> u64 {
        match self.job.request.op {
            Op::Read | Op::Write { .. } => self.part,
            Op::Flush | Op::Discard | Op::WriteZeroes { .. } => 0,
        }
    }
}

impl Flights {
    pub(crate) fn new(image: Arc<Kept>, engine: u32) -> Self {
        Self { image, engine, places: Slab::default(), moving: 0, spare: Vec::new() }
    }

    /// Whether librbd is to be given another request now.
    pub(crate) fn has_room(&self) -> bool {
        self.moving < MOST_MOVING
    }

    /// Whether librbd has nothing.
    pub(crate) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Gives a request to librbd; gives it back if librbd does not take it.
    pub(crate) fn start(&mut self, job: Box<Job>) -> Option<Box<Job>> {
        let pieces = self.spare.pop().unwrap_or_default();
        let place = self.places.insert(Flight { job, done: 0, part: 0, pieces, flushes: false });
        self.go_on(place)
    }

    /// Goes on with the request of a completion of this engine's; gives it back when it is over.
    pub(crate) fn advance(&mut self, event: Event) -> Option<Box<Job>> {
        let flight = self.places.get_mut(event.place)?;
        self.moving -= flight.moves();
        if event.result < 0 {
            return self.end(event.place, Err(Errno::from_raw_os_error(-event.result as i32)));
        }
        let request = &flight.job.request;
        // Beyond the end of an image that has shrunk meanwhile: zeroes there would be data that nobody wrote. Of what it has cut
        // from a write there librbd says nothing.
        if request.op == Op::Read && (event.result as u64) < flight.part {
            return self.end(event.place, Err(Errno::IO));
        }
        flight.done += flight.part;
        let is_stable = match request.op {
            Op::Write { fua } | Op::WriteZeroes { fua, .. } => !fua || flight.flushes,
            Op::Read | Op::Flush | Op::Discard => true,
        };
        if flight.done == request.len && is_stable {
            return self.end(event.place, Ok(()));
        }
        self.go_on(event.place)
    }

    fn end(&mut self, place: u32, result: Result<(), Errno>) -> Option<Box<Job>> {
        let Flight { job, mut pieces, .. } = self.places.remove(place)?;
        pieces.clear();
        self.spare.push(pieces);
        Some(job.ended(result))
    }

    /// Has librbd do the next part of a request.
    fn go_on(&mut self, place: u32) -> Option<Box<Job>> {
        let tag = u64::from(self.engine) << 32 | u64::from(place);
        let flight = self.places.get_mut(place)?;
        let rbd = &self.image.ceph.rbd;
        let mut completion = ptr::null_mut();
        // SAFETY: the tag is a number that librbd gives back, and there is no callback.
        let made = unsafe { (rbd.rbd_aio_create_completion)(tag as *mut c_void, None, &raw mut completion) };
        if made < 0 {
            return self.end(place, Err(Errno::from_raw_os_error(-made)));
        }
        let request = &flight.job.request;
        let (image, offset, left) = (self.image.handle, request.offset + flight.done, request.len - flight.done);
        // SAFETY: the image stays open while there are flights (or for good, if they are left behind). The memory of a
        // flight's request, the list of its pieces and the flight's own list stay where they are until its completion has
        // been polled: a flight that is dropped earlier is forgotten, never freed.
        let begun = unsafe {
            match request.op {
                Op::Flush => (rbd.rbd_aio_flush)(image, completion),
                Op::Write { .. } | Op::WriteZeroes { .. } if left == 0 => {
                    (flight.part, flight.flushes) = (0, true);
                    (rbd.rbd_aio_flush)(image, completion)
                }
                Op::Read | Op::Write { .. } => {
                    flight.part = left.min(PART);
                    let list = if request.len <= PART {
                        &request.buffers[..]
                    } else {
                        flight.pieces.clear();
                        let (done, part) = (flight.done as usize, flight.part as usize);
                        iovecs::append_range(&request.buffers, done, part, &mut flight.pieces);
                        &flight.pieces[..]
                    };
                    let (iovecs, count) = (list.as_ptr().cast(), list.len() as c_int);
                    let run = if request.op == Op::Read { rbd.rbd_aio_readv } else { rbd.rbd_aio_writev };
                    run(image, iovecs, count, offset, completion)
                }
                Op::Discard => {
                    flight.part = left;
                    (rbd.rbd_aio_discard)(image, offset, left, completion)
                }
                Op::WriteZeroes { unmap, .. } => {
                    flight.part = left;
                    let thick = if unmap { 0 } else { THICK };
                    (rbd.rbd_aio_write_zeroes)(image, offset, left as usize, completion, thick, 0)
                }
            }
        };
        if begun < 0 {
            // SAFETY: librbd has not taken it.
            unsafe { (rbd.rbd_aio_release)(completion) };
            return self.end(place, Err(Errno::from_raw_os_error(-begun)));
        }
        self.moving += flight.moves();
        None
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        if !self.is_empty() {
            // librbd may use all of it for as long as it lives.
            mem::forget((mem::take(&mut self.places), Arc::clone(&self.image)));
        }
    }
}

/// Takes from `events`, from the one at `from` on, those that are not of the engine with the number `mine`.
pub(crate) fn take_others(events: &mut Vec<Event>, from: usize, mine: u32, mut pass_on: impl FnMut(Event)) {
    let mut at = from;
    while at < events.len() {
        if events[at].engine == mine {
            at += 1;
        } else {
            pass_on(events.swap_remove(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_completed_for_another_engine_ends_nothing_of_this_one_and_is_passed_on() {
        let event = |engine| Event { engine, place: 0, result: 0 };
        let mut events = vec![event(3), event(2), event(1), event(3), event(2)];
        let mut passed_on = Vec::new();
        take_others(&mut events, 1, 2, |event| passed_on.push(event.engine));
        passed_on.sort_unstable();
        let left: Vec<_> = events.iter().map(|event| event.engine).collect();
        assert_eq!((left, passed_on), (vec![3, 2, 2], vec![1, 3]), "what was known before is this one's");
    }
}
