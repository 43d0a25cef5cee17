//! The device's half of a packed ring (virtio 1.3, 2.8).
//!
//! Driver and device write to the same ring of descriptors: the device writes used descriptors over available ones that it
//! has read. Two flags of a descriptor say whose it is, and their sense changes with each lap of the ring.
//!
//! ```text
//!          next_used                 next_avail
//!   ┌─────────┬──────────┬──────────────┬──────────────┐
//!   │ used    │ popped   │ popped       │ available,   │   a lap later, the driver makes
//!   │         │ and used │ (in flight)  │ or free      │   what was used available again
//!   └─────────┴──────────┴──────────────┴──────────────┘
//!         published
//! ```
//!
//! A chain's head, in the interface of [`Queue`](super::Queue), is its buffer ID, which must be less than the queue's size.

pub(super) mod area;

use std::mem;
use std::sync::atomic::{Ordering, fence};

use self::area::{EventFlags, Events, Position, Slots};
use super::area::Descriptor;
use super::chain::{Chain, INDIRECT, NEXT, WRITE};
use super::chains::Chains;
use super::inflight::Record;
use super::inflight::packed::{Entries, Tracker};
use super::log::AreaLog;
use super::{Area, MAX_SIZE, PACKED_BASE, QueueConfig, RingError};
use crate::memory::GuestMemory;

impl QueueConfig {
    /// Whether a packed ring that is to start at its beginning has been used before. Without a record it must not start:
    /// when a device dies, its front-end does not know where in the ring it was. The descriptors at the beginning may have
    /// been used long ago, and to repeat an old write would undo newer ones.
    ///
    /// This is for a ring that has not stopped in this session: one that stopped after exactly two laps looks the same.
    ///
    /// # Errors
    ///
    /// The ring cannot be located, as with [`start`](Self::start).
    pub fn has_lost_its_place(&self, memory: &GuestMemory) -> Result<bool, RingError> {
        if !self.packed || self.base != PACKED_BASE {
            return Ok(false);
        }
        // SAFETY: the memory is borrowed for as long as the areas are used.
        let ring = unsafe { Areas::locate(self, memory) }?.ring;
        Ok((0..self.size).any(|slot| ring.flags(slot) & area::USED != 0))
    }

    /// [`start_recorded`](Self::start_recorded), for a packed ring.
    pub(super) fn start_packed(self, memory: &GuestMemory, record: Option<Record>) -> Result<Ring, RingError> {
        // SAFETY: the queue has its ring next to the `Arc` of this memory.
        let areas = unsafe { Areas::locate(&self, memory) }?;
        let place = |half: u32| Position::new(half as u16, self.size);
        let (mut next_avail, mut next_used) = (place(self.base)?, place(self.base >> 16)?);
        let is_used = record.as_ref().is_some_and(|record| !record.is_new());
        let record = record.map(|record| Tracker::start(record, &areas.ring, next_used)).transpose()?;
        if let (Some(record), true) = (&record, is_used) {
            // The chains in flight lie between the two positions, and are popped again before those behind them.
            next_used = record.used();
            next_avail = next_used;
        }
        let log = Log::of(&self, memory);
        Ok(Ring {
            areas,
            log,
            size: self.size,
            event_idx: self.event_idx,
            next_avail,
            record,
            next_used,
            published: next_used,
            first: None,
            batch: 0,
            free: self.size,
            ever_published: false,
            kicks_suppressed: false,
        })
    }

    /// [`is_available`](Self::is_available), for a packed ring.
    pub(super) fn is_packed_available(&self, memory: &GuestMemory, record: Option<&Record>) -> Result<bool, RingError> {
        // SAFETY: the memory is borrowed for as long as the areas are used.
        let ring = unsafe { Areas::locate(self, memory) }?.ring;
        let next = match record.filter(|record| !record.is_new()) {
            Some(record) => Tracker::place(record, &ring)?.0,
            None => Position::new(self.base as u16, self.size)?,
        };
        Ok(ring.flags(next.slot()) & area::OWNER == next.available())
    }
}

/// Where the areas are in this process, for either half.
pub(super) struct Areas {
    pub(super) ring: Slots,
    pub(super) driver: Events,
    pub(super) device: Events,
}

impl Areas {
    /// # Safety
    ///
    /// `memory` must be kept for as long as the areas are used.
    pub(super) unsafe fn locate(config: &QueueConfig, memory: &GuestMemory) -> Result<Self, RingError> {
        let QueueConfig { size, desc, avail, used, .. } = *config;
        if !(1..=MAX_SIZE).contains(&size) {
            return Err(RingError::PackedSize(size));
        }
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Self {
                ring: Slots::locate(memory, desc, size)?,
                driver: Events::locate(memory, Area::DriverEvents, avail)?,
                device: Events::locate(memory, Area::DeviceEvents, used)?,
            })
        }
    }
}

/// Where it is noted what the device writes: used descriptors, in the ring itself, and events.
struct Log {
    ring: AreaLog,
    events: AreaLog,
}

impl Log {
    /// The log of both areas, all of which is noted. The descriptors are noted by their guest address: there is one other
    /// address, and it is that of the area at `used`.
    fn of(config: &QueueConfig, memory: &GuestMemory) -> Option<Self> {
        let events = AreaLog::begin(memory, config.log?, Events::BYTES as u64)?;
        let ring = AreaLog::begin(memory, config.desc, Slots::BYTES as u64 * u64::from(config.size))?;
        Some(Self { ring, events })
    }
}

/// The ring of a running queue.
pub(super) struct Ring {
    areas: Areas,
    log: Option<Log>,
    size: u16,
    event_idx: bool,
    /// Where the next chain to pop begins.
    next_avail: Position,
    record: Option<Tracker>,
    /// Where the next chain is used.
    next_used: Position,
    /// Where the first chain of the unpublished batch was used, or will be.
    published: Position,
    /// The flags of that chain's used descriptor: to write them publishes the whole batch. With a record, the record has the
    /// flags of each chain instead.
    first: Option<u16>,
    /// How many descriptors the chains of the batch had.
    batch: u16,
    /// How many descriptors the driver may make available: all but those that were popped and are not
    /// published as used.
    free: u16,
    /// Until the first batch the driver is always notified: an earlier device may have died before it did so.
    ever_published: bool,
    kicks_suppressed: bool,
}

// SAFETY: the pointers in `areas` are into mappings that the queue keeps, which are good from any thread.
unsafe impl Send for Ring {}

/// A chain's name, and the descriptors that it takes of the ring.
struct Popped {
    id: u16,
    taken: u16,
}

impl Popped {
    /// Counts one more descriptor of the chain, the last of which has its name.
    #[inline]
    fn take(&mut self, descriptor: area::Descriptor) -> Result<(), RingError> {
        if self.taken > 0 && descriptor.flags & INDIRECT != 0 {
            return Err(RingError::IndirectInChain);
        }
        self.taken += 1;
        self.id = descriptor.id;
        Ok(())
    }
}

impl Ring {
    /// The vring's base, should it stop now.
    pub(super) fn base(&self) -> u32 {
        u32::from(self.next_avail.bits()) | u32::from(self.published.bits()) << 16
    }

    pub(super) fn has_record(&self) -> bool {
        self.record.is_some()
    }

    pub(super) fn has_recovered(&self) -> bool {
        self.record.as_ref().is_some_and(|record| record.recovered().is_some())
    }

    /// Whether the peer took the record's memory away.
    #[inline]
    pub(super) fn is_record_truncated(&self) -> bool {
        self.record.as_ref().is_some_and(Tracker::is_truncated)
    }

    pub(super) fn next_available(&self) -> u16 {
        self.next_avail.bits()
    }

    pub(super) fn next_used(&self) -> u16 {
        self.next_used.bits()
    }

    #[inline]
    pub(super) fn is_available(&self) -> bool {
        let is_owner = self.areas.ring.flags(self.next_avail.slot()) & area::OWNER == self.next_avail.available();
        is_owner || self.has_recovered()
    }

    // A function of its own for each layout, so that neither carries the other's registers.
    #[inline(never)]
    pub(super) fn pop(
        &mut self,
        chain: &mut Chain,
        chains: &mut Chains,
        memory: &GuestMemory,
    ) -> Result<bool, RingError> {
        let recovered = self.record.as_ref().and_then(|record| Some((record, record.recovered()?)));
        let Popped { id, taken } = match recovered {
            Some((record, entries)) => follow_recovered(record, entries, chain, memory)?,
            None => {
                let slot = self.next_avail.slot();
                let flags = self.areas.ring.flags(slot);
                if flags & area::OWNER != self.next_avail.available() {
                    return Ok(false);
                }
                self.follow(self.areas.ring.rest(slot, flags), chain, memory)?
            }
        };
        let size = self.size;
        if id >= size {
            return Err(RingError::NoSuchBuffer { id, size });
        }
        chains.begin(id, taken)?;
        if let Some(record) = &mut self.record {
            record.begin(id, taken);
        }
        chain.head = id;
        self.free -= taken;
        self.next_avail = self.next_avail.advance(taken, size);
        Ok(true)
    }

    /// Copies the chain that begins with `first` out, reading each of its other descriptors once.
    #[inline]
    fn follow(
        &mut self,
        first: area::Descriptor,
        chain: &mut Chain,
        memory: &GuestMemory,
    ) -> Result<Popped, RingError> {
        let (head, size, free) = (self.next_avail.slot(), self.size, self.free);
        let (ring, record) = (&self.areas.ring, &mut self.record);
        let mut popped = Popped { id: 0, taken: 0 };
        let get = |slot: u16| {
            // Of a ring that is all the driver's, nothing is asked for behind the last: a chain is no longer than the ring.
            if popped.taken == free {
                return Err(RingError::NotUsed(slot));
            }
            let descriptor = if popped.taken == 0 { first } else { ring.get(slot) };
            if let Some(record) = record {
                record.note(popped.taken, descriptor);
            }
            popped.take(descriptor)?;
            let next = if slot + 1 < size { slot + 1 } else { 0 };
            Ok(descriptor.linked(next))
        };
        chain.reset(head);
        chain.follow_through(get, size, memory, in_table)?;
        Ok(popped)
    }

    #[inline]
    pub(super) fn add_used(&mut self, id: u16, taken: u16, written: u32) {
        let (at, ring) = (self.next_used, &self.areas.ring);
        ring.set_used(at.slot(), id, written);
        // In a used descriptor the flag says that something was written (2.8.1).
        let flags = at.used() | if written > 0 { WRITE } else { 0 };
        if let Some(record) = &mut self.record {
            record.add_used(id, flags);
        } else if self.first.is_none() {
            self.first = Some(flags);
        } else {
            ring.set_flags(at.slot(), flags);
        }
        self.batch += taken;
        self.next_used = at.advance(taken, self.size);
    }

    /// Publishes what was used since the last time. The driver reads used descriptors in order, so it sees none of this batch
    /// before the flags of the first, which are written last.
    #[inline]
    pub(super) fn publish_used(&mut self) -> bool {
        match (self.first.take(), &mut self.record) {
            (Some(flags), _) => self.areas.ring.set_flags(self.published.slot(), flags),
            (None, Some(record)) if self.batch > 0 => record.publish(&self.areas.ring),
            _ => return false,
        }
        self.log_used();
        self.published = self.next_used;
        let batch = mem::take(&mut self.batch);
        self.free += batch;
        let first = !mem::replace(&mut self.ever_published, true);
        // As for a split ring: the driver stores its event flags, fences, and looks at the ring once more before it waits.
        fence(Ordering::SeqCst);
        match self.areas.driver.get(self.event_idx) {
            EventFlags::Enable => true,
            EventFlags::Disable => false,
            EventFlags::Desc(event) => first || event.is_passed(self.published, batch, self.size),
        }
    }

    /// Notes what has been used since the last time it was published.
    #[inline]
    pub(super) fn log_used(&self) {
        if let Some(log) = &self.log {
            log.ring.mark_elements(0, Slots::BYTES as u64, self.published.slot(), self.batch, self.size);
        }
    }

    /// Changes the log, and notes that all of the ring has been written.
    pub(super) fn set_log(&mut self, config: &QueueConfig, memory: &GuestMemory) {
        self.log = Log::of(config, memory);
    }

    fn set_events(&self, flags: EventFlags) {
        self.areas.device.set(flags);
        if let Some(log) = &self.log {
            log.events.mark(0, Events::BYTES as u64);
        }
    }

    #[inline]
    pub(super) fn suppress_kicks(&mut self) {
        if !mem::replace(&mut self.kicks_suppressed, true) {
            self.set_events(EventFlags::Disable);
        }
    }

    #[inline]
    pub(super) fn arm_kicks(&mut self) -> bool {
        self.kicks_suppressed = false;
        let flags = if self.event_idx { EventFlags::Desc(self.next_avail) } else { EventFlags::Enable };
        self.set_events(flags);
        // The driver stores flags, fences, and reads what was just stored. Without the fence our load could come before
        // our store: the driver sees kicks suppressed, we see no chain, and both wait.
        fence(Ordering::SeqCst);
        !self.is_available()
    }

    /// Finds the areas in another memory map; with nothing in flight.
    pub(super) fn replace_memory(&mut self, config: &QueueConfig, memory: &GuestMemory) -> Result<(), RingError> {
        // SAFETY: as in `start_packed`; the queue replaces its memory together with the areas.
        self.areas = unsafe { Areas::locate(config, memory) }?;
        self.set_log(config, memory);
        Ok(())
    }
}

/// Copies out a chain that was in flight when an earlier device went away, and whose descriptors only the record has.
#[cold]
fn follow_recovered(
    record: &Tracker,
    Entries { head, num, .. }: Entries,
    chain: &mut Chain,
    memory: &GuestMemory,
) -> Result<Popped, RingError> {
    let mut popped = Popped { id: 0, taken: 0 };
    let get = |at: u16| {
        let (descriptor, next) = record.descriptor(at);
        popped.take(descriptor)?;
        Ok(descriptor.linked(next))
    };
    chain.reset(head);
    chain.follow_through(get, num, memory, in_table)?;
    // Whatever its flags say now, that is how many descriptors it had.
    Ok(Popped { taken: num, ..popped })
}

/// A descriptor of an indirect table, which a packed ring lays out as it does its own descriptors (2.8.7): in order, with
/// no flags that matter but one.
fn in_table(descriptor: Descriptor, index: u16, entries: u32) -> Descriptor {
    let descriptor = area::Descriptor::from(descriptor);
    let is_last = u32::from(index) + 1 == entries || descriptor.flags & INDIRECT != 0;
    let flags = descriptor.flags & (WRITE | INDIRECT) | if is_last { 0 } else { NEXT };
    // The index after the last is not followed.
    area::Descriptor { flags, ..descriptor }.linked(index.wrapping_add(1))
}
