//! Guest memory that is registered with a ring, so that the kernel need not look up and hold its pages for each request.
//!
//! Memory is registered in chunks, each a buffer of the ring's table, when requests come to it, and in the background: a
//! turn of the loop does one step, and then rests for a multiple of the time that it took. So pinning and unpinning take a
//! small share of the thread's time, whatever clients do.
//!
//! ```text
//!   a request comes to a chunk ─▶ is the next slice there? map it ─▶ ... ─▶ register the chunk ─▶ requests use its buffer
//!                                        │ no
//!                                        └─▶ later
//! ```
//!
//! Only memory that is there is pinned, with some pages between: a sparse file stays sparse.
//!
//! **A buffer never stands for other memory than its addresses do.** Whoever has registered a map keeps it mapped until the
//! last of its chunks is unregistered, so that nothing else can be where that was; and the kernel refuses a request whose
//! addresses are not the buffer's own.

#![allow(unsafe_code)]

use std::cmp::Reverse;
use std::io;
use std::ptr;
use std::sync::Arc;

use egret_event_loop::ring::Ring;
use egret_event_loop::{Nanos, clock};
use egret_vring::memory::{GuestMemory, IoVec};
use rustix::io::Errno;

use crate::stats::EngineCounters;

/// What a buffer is registered for. With pages of 4 KiB that were mapped before, the kernel takes a fifth of a millisecond for
/// it; a request that does not lie in one of them goes without.
pub(crate) const CHUNK: usize = 8 << 20;
/// What is mapped in a step, which takes as long.
const SLICE: usize = 1 << 20;
/// Buffers of a ring: the kernel has no more (`IORING_MAX_REG_BUFFERS`).
const BUFFERS: u16 = 1 << 14;
/// After a step of pinning the thread has so many times as long for other things.
const REST: u64 = 7;
/// Likewise after unpinning, which somebody may wait for, and which is never more than was pinned before.
const REST_AFTER_RELEASE: u64 = 3;
/// How long a map waits when it was found not to be there, at first and at most.
const PATIENCE: Nanos = Nanos::from_millis(1);
const MOST_PATIENCE: Nanos = Nanos::from_millis(1000);
/// No chunk has fewer bytes than a page, and of how many a slice has tells `mincore` one by one.
const PAGE: usize = 4096;

/// A client's memory, for disks to pin.
pub struct Pinning {
    /// What may be pinned.
    pub memory: Arc<GuestMemory>,
    /// Is told why it cannot be, once.
    pub tell: Box<dyn FnOnce(Errno)>,
    /// Is given a map of the same memory when none of it is pinned any more. To unmap it may take long.
    pub give_back: Box<dyn FnOnce(Arc<GuestMemory>)>,
}

/// A place in [`Pins`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PinnedMap(u32);

/// What is registered with a ring.
pub(crate) struct Pins {
    table: Table,
    maps: Vec<Option<Map>>,
    /// The map whose turn it is.
    next: usize,
    /// A request has come to memory that is not registered.
    wanted: bool,
    /// There may be something to be released.
    leaving: bool,
    /// The next step is not before this.
    rest_until: Nanos,
}

/// The ring's table of buffers.
enum Table {
    /// Nobody has asked for it.
    Unmade,
    /// The kernel has none for us.
    Missing(Errno),
    /// The buffers that are free.
    Made(Vec<u16>),
}

/// A client's memory.
struct Map {
    /// Keeps mapped what is registered. It logs nothing, so that it keeps no log.
    memory: Arc<GuestMemory>,
    tell: Option<Box<dyn FnOnce(Errno)>>,
    give_back: Box<dyn FnOnce(Arc<GuestMemory>)>,
    /// The largest first.
    regions: Vec<Region>,
    /// By the number of the chunk: one more than its buffer, or 0.
    buffers: Vec<u16>,
    /// How many chunks are registered.
    registered: usize,
    /// None of them has this number or a higher one.
    end: usize,
    /// How many slots use it.
    users: u32,
    /// Nothing more is pinned of it.
    has_failed: bool,
    /// The chunk that a request last came to in vain.
    wanted: Option<usize>,
    /// The chunk that is being mapped, and how many bytes of it are.
    begun: Option<(usize, usize)>,
    /// Nothing is tried before this, and next time for so long.
    not_before: Nanos,
    patience: Nanos,
}

#[derive(Clone, Copy)]
struct Region {
    base: *mut u8,
    len: usize,
    /// The number of its first chunk.
    first: usize,
}

impl Map {
    fn new(Pinning { memory, tell, give_back }: Pinning) -> Self {
        let memory = Arc::new(memory.logging(None));
        let mut chunks = 0;
        let region = |iovec: IoVec| {
            let first = chunks;
            chunks += iovec.len().div_ceil(CHUNK);
            Region { base: iovec.base(), len: iovec.len(), first }
        };
        let mut regions: Vec<Region> = memory.mapped().map(region).collect();
        regions.sort_by_key(|region| Reverse(region.len));
        Self {
            memory,
            tell: Some(tell),
            give_back,
            regions,
            buffers: vec![0; chunks],
            registered: 0,
            end: 0,
            users: 1,
            has_failed: false,
            wanted: None,
            begun: None,
            not_before: Nanos::ZERO,
            patience: PATIENCE,
        }
    }

    /// Where a chunk is.
    fn chunk(&self, number: usize) -> (*mut u8, usize) {
        let has = |region: &&Region| number >= region.first && (number - region.first) * CHUNK < region.len;
        self.regions.iter().find(has).map_or((ptr::null_mut(), 0), |region| {
            let offset = (number - region.first) * CHUNK;
            (region.base.wrapping_add(offset), CHUNK.min(region.len - offset))
        })
    }

    /// The number of the chunk that has all of `piece`.
    #[inline]
    fn number(&self, piece: &IoVec) -> Option<usize> {
        let (base, len) = (piece.base().addr(), piece.len());
        self.regions.iter().find_map(|region| {
            let offset = base.wrapping_sub(region.base.addr());
            let is_within = offset < region.len && len > 0 && len <= region.len - offset;
            (is_within && offset / CHUNK == (offset + len - 1) / CHUNK).then(|| region.first + offset / CHUNK)
        })
    }

    fn set_buffer(&mut self, number: usize, buffer: u16, counters: &EngineCounters) {
        self.buffers[number] = buffer + 1;
        self.registered += 1;
        self.end = self.end.max(number + 1);
        counters.pinned.set(counters.pinned.get() + self.chunk(number).1 as u64);
    }

    /// The last chunk that is registered, and its buffer.
    fn last(&mut self) -> Option<(usize, u16)> {
        self.end = self.buffers[..self.end].iter().rposition(|&buffer| buffer > 0).map_or(0, |at| at + 1);
        let number = self.end.checked_sub(1)?;
        Some((number, self.buffers[number] - 1))
    }

    fn forget(&mut self, number: usize, counters: &EngineCounters) {
        self.buffers[number] = 0;
        self.registered -= 1;
        counters.pinned.set(counters.pinned.get().saturating_sub(self.chunk(number).1 as u64));
    }

    /// Tries no more for a while.
    fn wait(&mut self, now: Nanos) {
        (self.begun, self.wanted) = (None, None);
        self.not_before = now + self.patience;
        self.patience = Nanos((self.patience.0 * 2).min(MOST_PATIENCE.0));
    }
}

impl Pins {
    pub(crate) const fn new() -> Self {
        Self { table: Table::Unmade, maps: Vec::new(), next: 0, wanted: false, leaving: false, rest_until: Nanos::ZERO }
    }

    /// Has memory registered, in the course of time, until it is [left](Self::leave).
    pub(crate) fn enter(&mut self, ring: &Ring, pinning: Pinning) -> Option<PinnedMap> {
        if matches!(self.table, Table::Unmade) {
            self.table = match ring.submitter().register_buffers_sparse(BUFFERS.into()) {
                Ok(()) => Table::Made((0..BUFFERS).rev().collect()),
                Err(e) => Table::Missing(errno(&e)),
            };
        }
        if let Table::Missing(why) = self.table {
            (pinning.tell)(why);
            return None;
        }
        let is_same = |map: &Map| map.memory.has_the_regions_of(&pinning.memory);
        // One that was on its way out stays, with what it still has.
        if let Some(at) = self.maps.iter().position(|map| map.as_ref().is_some_and(is_same)) {
            self.maps[at].as_mut()?.users += 1;
            return Some(PinnedMap(at as u32));
        }
        let at = self.maps.iter().position(Option::is_none).unwrap_or(self.maps.len());
        self.maps.resize_with(self.maps.len().max(at + 1), || None);
        self.maps[at] = Some(Map::new(pinning));
        Some(PinnedMap(at as u32))
    }

    /// None of the requests for which it was entered is in flight, and none will come.
    pub(crate) fn leave(&mut self, PinnedMap(at): PinnedMap) {
        if let Some(map) = &mut self.maps[at as usize] {
            map.users -= 1;
            if map.users == 0 {
                (map.begun, map.wanted) = (None, None);
                self.leaving = true;
            }
        }
    }

    /// The buffer that has all of `piece`. Where there is none there may be one later.
    #[inline]
    pub(crate) fn buffer(&mut self, PinnedMap(at): PinnedMap, piece: &IoVec) -> Option<u16> {
        let map = self.maps[at as usize].as_mut()?;
        let number = map.number(piece)?;
        let buffer = map.buffers[number].checked_sub(1);
        if buffer.is_none() && !map.has_failed {
            map.wanted = Some(number);
            self.wanted = true;
        }
        buffer
    }

    /// Whether there is a step to be done.
    #[inline]
    pub(crate) fn is_due(&self, now: Nanos) -> bool {
        (self.wanted || self.leaving) && now >= self.rest_until
    }

    /// When there is one that no request comes to.
    pub(crate) fn deadline(&self) -> Option<Nanos> {
        self.leaving.then_some(self.rest_until)
    }

    /// Does a step. Nothing that was pushed may be with the ring and not with the kernel: it may name a buffer that changes.
    pub(crate) fn step(&mut self, ring: &Ring, counters: &EngineCounters) {
        let begun = clock::now();
        let rest = match self.release(ring, counters) {
            true => Some(REST_AFTER_RELEASE),
            false => self.pin(ring, begun, counters).then_some(REST),
        };
        let now = clock::now();
        // Where nothing was to be done things may have changed by then.
        self.rest_until = now + rest.map_or(PATIENCE, |times| Nanos((now - begun).0 * times));
    }

    /// Unregisters a chunk of a map that is leaving, or lets go of a map; false if there is nothing to be released.
    fn release(&mut self, ring: &Ring, counters: &EngineCounters) -> bool {
        if !self.leaving {
            return false;
        }
        let is_next = |map: &Map| map.users == 0 || map.has_failed && map.registered > 0;
        let Some(place) = self.maps.iter_mut().find(|map| map.as_ref().is_some_and(is_next)) else {
            self.leaving = false;
            return false;
        };
        let Some(map) = place else { return false };
        if let Some((number, buffer)) = map.last() {
            // SAFETY: the chunk is replaced by nothing. The kernel keeps for requests in flight what they use.
            if unsafe { update(ring, buffer, ptr::null_mut(), 0) }.is_ok() {
                map.forget(number, counters);
                if let Table::Made(free) = &mut self.table {
                    free.push(buffer);
                }
            }
        }
        if map.users == 0
            && map.registered == 0
            && let Some(Map { memory, give_back, .. }) = place.take()
        {
            give_back(memory);
        }
        true
    }

    /// Takes a step to registering a chunk of the next map that wants one; false if none does now.
    fn pin(&mut self, ring: &Ring, now: Nanos, counters: &EngineCounters) -> bool {
        let Self { table: Table::Made(free), maps, next, wanted, leaving, .. } = self else { return false };
        let wants = |map: &Map| map.begun.is_some() || map.wanted.is_some();
        let can = |map: &Option<Map>| map.as_ref().is_some_and(|map| wants(map) && now >= map.not_before);
        let (before, after) = maps.split_at((*next).min(maps.len()));
        let found = after.iter().position(can).map(|at| before.len() + at).or_else(|| before.iter().position(can));
        let Some(at) = found else {
            *wanted = maps.iter().flatten().any(wants);
            return false;
        };
        *next = at + 1;
        let Some(map) = &mut maps[at] else { return false };
        let begun = map.begun.take().or_else(|| map.wanted.take().map(|number| (number, 0)));
        let Some((number, mapped)) = begun.filter(|(number, _)| map.buffers[*number] == 0) else { return true };
        let (base, len) = map.chunk(number);
        if mapped < len {
            let slice = SLICE.min(len - mapped);
            if map_what_is_there(base.wrapping_add(mapped), slice) {
                map.begun = Some((number, mapped + slice));
            } else {
                map.wait(now);
            }
            return true;
        }
        // Who has as many as are left gets no more, so that there are always some for others.
        let buffer = if map.registered < free.len() { free.pop() } else { None };
        let Some(buffer) = buffer else {
            map.wait(now);
            return true;
        };
        // SAFETY: the map keeps the chunk mapped, and is not let go of before the buffer stands for nothing.
        match unsafe { update(ring, buffer, base, len) } {
            Ok(()) => {
                map.set_buffer(number, buffer, counters);
                map.patience = PATIENCE;
            }
            Err(why) => {
                free.push(buffer);
                (map.has_failed, map.wanted) = (true, None);
                *leaving = true;
                map.tell.take().into_iter().for_each(|tell| tell(why));
            }
        }
        true
    }

    /// Unregisters everything: the ring may be used by others.
    pub(crate) fn end(&mut self, ring: &Ring) {
        for mut map in self.maps.drain(..).flatten() {
            while let Some((number, buffer)) = map.last() {
                // SAFETY: as above.
                if unsafe { update(ring, buffer, ptr::null_mut(), 0) }.is_err() {
                    // What the ring may still use stays mapped for good.
                    std::mem::forget(Arc::clone(&map.memory));
                }
                map.buffers[number] = 0;
            }
            (map.give_back)(map.memory);
        }
    }
}

/// Maps `len` bytes at `base` for writing, if three quarters of it are there: what a guest has never used is not made for it,
/// and what was swapped out is not brought back, but for pages here and there.
fn map_what_is_there(base: *mut u8, len: usize) -> bool {
    let page = rustix::param::page_size();
    let lead = base.addr() % page;
    let (base, len) = (base.wrapping_sub(lead), (lead + len).next_multiple_of(page));
    let mut is_there = [0u8; SLICE / PAGE + 2];
    // SAFETY: the range is whole pages of a mapping, for which the array has a byte each. Their content is not touched.
    let asked = unsafe { libc::mincore(base.cast(), len, is_there.as_mut_ptr()) };
    let missing = is_there[..len / page].iter().filter(|&page| page & 1 == 0).count();
    if asked != 0 || missing * 4 > len / page {
        return false;
    }
    // What is not mapped now the kernel maps when it registers the chunk, which then takes longer.
    // SAFETY: as above.
    unsafe { libc::madvise(base.cast(), len, libc::MADV_POPULATE_WRITE) };
    true
}

fn errno(e: &io::Error) -> Errno {
    Errno::from_io_error(e).unwrap_or(Errno::IO)
}

/// Has a buffer of the ring's table stand for `len` bytes at `base`, or for nothing.
///
/// # Safety
///
/// The memory must stay mapped until the buffer stands for something else.
unsafe fn update(ring: &Ring, buffer: u16, base: *mut u8, len: usize) -> Result<(), Errno> {
    let iovec = libc::iovec { iov_base: base.cast(), iov_len: len };
    // SAFETY: passed on from the caller.
    unsafe { ring.submitter().register_buffers_update(buffer.into(), &[iovec], None) }.map_err(|e| errno(&e))
}

#[cfg(test)]
mod tests;
