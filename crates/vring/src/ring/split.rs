//! The device's half of a split ring.

use std::mem;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};

use super::area::{Available, Descriptors, UsedRing};
use super::chain::Chain;
use super::chains::Chains;
use super::inflight::split::Tracker;
use super::inflight::{Record, crash};
use super::log::AreaLog;
use super::{MAX_SIZE, QueueConfig, RingError, need_event};
use crate::memory::GuestMemory;

pub(super) const NO_INTERRUPT: u16 = VRING_AVAIL_F_NO_INTERRUPT as u16;
pub(super) const NO_NOTIFY: u16 = VRING_USED_F_NO_NOTIFY as u16;

impl QueueConfig {
    /// [`start_recorded`](Self::start_recorded), for a split ring.
    pub(super) fn start_split(self, memory: &GuestMemory, record: Option<Record>) -> Result<Ring, RingError> {
        // SAFETY: the queue has its ring next to the `Arc` of this memory, and uses the events with EVENT_IDX only.
        let areas = unsafe { Areas::locate(&self, memory) }?;
        let next_used = areas.used.index();
        let (record, recovered) = match record {
            Some(record) => {
                let (tracker, recovered) = Tracker::start(record, next_used, self.size)?;
                (Some(tracker), recovered)
            }
            None => (None, None),
        };
        // The recovered chains are popped in place of the first entries of the available ring that were not used: there
        // were as many, but the driver may have other chains there by now.
        let next_avail = if recovered.is_some() { next_used } else { self.base as u16 };
        let mut recovered = recovered.unwrap_or_default();
        recovered.reverse();
        areas.used.set_flags(0);
        let log = log_of(&self, memory);
        Ok(Ring {
            areas,
            log,
            size: self.size,
            event_idx: self.event_idx,
            next_avail,
            seen_avail: next_avail.wrapping_add(recovered.len() as u16),
            recovered,
            record,
            next_used,
            published: next_used,
            ever_published: false,
            kicks_suppressed: false,
        })
    }

    /// [`is_available`](Self::is_available), for a split ring.
    pub(super) fn is_split_available(&self, memory: &GuestMemory) -> Result<bool, RingError> {
        // SAFETY: the memory is borrowed for as long as the areas are used, and the events are not.
        let areas = unsafe { Areas::locate(self, memory) }?;
        Ok(areas.avail.index() != areas.used.index())
    }
}

/// Where the areas are in this process, for either half.
pub(super) struct Areas {
    pub(super) desc: Descriptors,
    pub(super) avail: Available,
    pub(super) used: UsedRing,
}

impl Areas {
    /// # Safety
    ///
    /// `memory` must be kept for as long as the areas are used, and the events not be used without EVENT_IDX.
    pub(super) unsafe fn locate(config: &QueueConfig, memory: &GuestMemory) -> Result<Self, RingError> {
        let QueueConfig { size, desc, avail, used, event_idx, .. } = *config;
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Err(RingError::Size(size));
        }
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Self {
                desc: Descriptors::locate(memory, desc, size)?,
                avail: Available::locate(memory, avail, size, event_idx)?,
                used: UsedRing::locate(memory, used, size, event_idx)?,
            })
        }
    }
}

/// The log of the used ring, all of which is noted.
fn log_of(config: &QueueConfig, memory: &GuestMemory) -> Option<AreaLog> {
    let len = UsedRing::ELEMENTS + UsedRing::ELEMENT * u64::from(config.size) + if config.event_idx { 2 } else { 0 };
    AreaLog::begin(memory, config.log?, len)
}

/// The ring of a running queue.
pub(super) struct Ring {
    areas: Areas,
    log: Option<AreaLog>,
    size: u16,
    event_idx: bool,
    /// The next available index to pop.
    next_avail: u16,
    /// The driver's available index when last read: up to it, popping needs no look.
    seen_avail: u16,
    /// The heads that the record had in flight, which are popped before all others; the next one is last.
    recovered: Vec<u16>,
    record: Option<Tracker>,
    /// The next used index to fill.
    next_used: u16,
    /// The used index as it was last published.
    published: u16,
    /// Until the first batch the driver is always notified: an earlier device may have died before it did so.
    ever_published: bool,
    kicks_suppressed: bool,
}

// SAFETY: the pointers in `areas` are into mappings that the queue keeps, which are good from any thread.
unsafe impl Send for Ring {}

impl Ring {
    /// The vring's base, should it stop now.
    pub(super) fn base(&self) -> u32 {
        self.next_avail.into()
    }

    pub(super) fn has_record(&self) -> bool {
        self.record.is_some()
    }

    pub(super) fn has_recovered(&self) -> bool {
        !self.recovered.is_empty()
    }

    /// Whether the peer took the record's memory away.
    #[inline]
    pub(super) fn is_record_truncated(&self) -> bool {
        self.record.as_ref().is_some_and(Tracker::is_truncated)
    }

    /// The available index that the next pop takes: the vring's base, should it stop now.
    pub(super) fn next_available(&self) -> u16 {
        self.next_avail
    }

    /// The used index that the next [`publish_used`](Self::publish_used) makes visible.
    pub(super) fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Whether there is a chain to pop: at most one load of the driver's index.
    #[inline]
    pub(super) fn is_available(&self) -> bool {
        self.next_avail != self.seen_avail || self.next_avail != self.areas.avail.index()
    }

    // A function of its own for each layout, so that neither carries the other's registers.
    #[inline(never)]
    pub(super) fn pop(
        &mut self,
        chain: &mut Chain,
        chains: &mut Chains,
        memory: &GuestMemory,
    ) -> Result<bool, RingError> {
        let (popped, size) = (self.next_avail, self.size);
        if popped == self.seen_avail {
            let available = self.areas.avail.index();
            if available == popped {
                return Ok(false);
            }
            if available.wrapping_sub(popped) > size {
                return Err(RingError::IndexAhead { available, popped, size });
            }
            self.seen_avail = available;
        }
        self.prefetch(memory);
        if let Some(&head) = self.recovered.last() {
            // The record has this chain already, with the counter that says in which order it was popped.
            self.take(head, chain, chains, memory)?;
            self.recovered.pop();
        } else {
            let head = self.areas.avail.head(popped);
            self.take(head, chain, chains, memory)?;
            if let Some(record) = &mut self.record {
                record.begin(head);
            }
        }
        self.next_avail = popped.wrapping_add(1);
        Ok(true)
    }

    /// Asks the processor for what the chains after the next one are read from, which the driver's processor has: otherwise
    /// each chain waits for it. Two ahead it is their descriptors, and one ahead, whose descriptors are here by then, what
    /// the first of them points to: a request's header, or an indirect table.
    #[inline]
    fn prefetch(&self, memory: &GuestMemory) {
        let known = self.seen_avail.wrapping_sub(self.next_avail);
        if known > 2 {
            self.areas.desc.prefetch(self.areas.avail.head(self.next_avail.wrapping_add(2)));
        }
        if known > 1
            && let Ok(first) = self.areas.desc.get(self.areas.avail.head(self.next_avail.wrapping_add(1)))
        {
            memory.prefetch(first.addr);
        }
    }

    #[inline]
    fn take(&self, head: u16, chain: &mut Chain, chains: &mut Chains, memory: &GuestMemory) -> Result<(), RingError> {
        if head >= self.size {
            return Err(RingError::NoSuchDescriptor { index: head, len: u32::from(self.size) });
        }
        chains.begin(head, 1)?;
        chain.reset(head);
        chain.follow(&self.areas.desc, self.size, memory).inspect_err(|_| {
            chains.end(head);
        })
    }

    /// Puts a chain into the used ring, which the driver sees with the next [`publish_used`](Self::publish_used).
    #[inline]
    pub(super) fn add_used(&mut self, head: u16, written: u32) {
        self.areas.used.set_element(self.next_used, u32::from(head), written);
        if let Some(record) = &mut self.record {
            record.add_used(head);
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Publishes what was used since the last time; returns whether the driver wants to be notified (2.7.7.2).
    #[inline]
    pub(super) fn publish_used(&mut self) -> bool {
        let (new, old) = (self.next_used, self.published);
        if new == old {
            return false;
        }
        crash::point();
        self.areas.used.set_index(new);
        crash::point();
        self.log_used();
        self.published = new;
        let first = !mem::replace(&mut self.ever_published, true);
        // The driver stores its event or flag, fences, and looks at the index once more before it waits; we do the same
        // the other way round. With a full fence on either side one of the two sees the other.
        fence(Ordering::SeqCst);
        // Behind the fence, and so behind the used index.
        if let Some(record) = &mut self.record {
            record.publish(old, new);
        }
        if self.event_idx {
            first || need_event(self.areas.avail.event(), new, old)
        } else {
            self.areas.avail.flags() & NO_INTERRUPT == 0
        }
    }

    /// Notes what has been written to the used ring since the last time it was published.
    #[inline]
    pub(super) fn log_used(&self) {
        if let Some(log) = &self.log {
            let (from, count) = (self.published & (self.size - 1), self.next_used.wrapping_sub(self.published));
            log.mark(0, UsedRing::ELEMENTS);
            log.mark_elements(UsedRing::ELEMENTS, UsedRing::ELEMENT, from, count, self.size);
        }
    }

    /// Changes the log, and notes that all of the used ring has been written.
    pub(super) fn set_log(&mut self, config: &QueueConfig, memory: &GuestMemory) {
        self.log = log_of(config, memory);
    }

    fn set_flags(&self, flags: u16) {
        self.areas.used.set_flags(flags);
        if let Some(log) = &self.log {
            log.mark(0, UsedRing::ELEMENTS);
        }
    }

    fn set_event(&self, event: u16) {
        self.areas.used.set_event(event);
        if let Some(log) = &self.log {
            log.mark(UsedRing::ELEMENTS + UsedRing::ELEMENT * u64::from(self.size), 2);
        }
    }

    /// Tells the driver that it need not kick: somebody is looking anyway.
    ///
    /// A hint (2.7.10). With EVENT_IDX there is nothing to do: the event stays where it was last armed, behind the
    /// driver's index, which does not come past it again for 65536 chains.
    #[inline]
    pub(super) fn suppress_kicks(&mut self) {
        if !self.event_idx && !mem::replace(&mut self.kicks_suppressed, true) {
            self.set_flags(NO_NOTIFY);
        }
    }

    /// Asks the driver to kick for the next chain. False if one is there already: pop it instead of waiting.
    #[inline]
    pub(super) fn arm_kicks(&mut self) -> bool {
        if self.event_idx {
            self.set_event(self.next_avail);
        } else if mem::replace(&mut self.kicks_suppressed, false) {
            self.set_flags(0);
        }
        // The driver stores its index, fences, and reads what was just stored. Without the fence our load could come
        // before our store: the driver sees kicks suppressed, we see no chain, and both wait.
        fence(Ordering::SeqCst);
        !self.is_available()
    }

    /// Finds the areas in another memory map; with nothing in flight.
    pub(super) fn replace_memory(&mut self, config: &QueueConfig, memory: &GuestMemory) -> Result<(), RingError> {
        // SAFETY: as in `start_split`; the queue replaces its memory together with the areas.
        self.areas = unsafe { Areas::locate(config, memory) }?;
        self.set_log(config, memory);
        Ok(())
    }
}
