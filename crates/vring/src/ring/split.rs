//! The device's half of a split ring.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};

use super::area::{Available, Descriptors, UsedRing};
use super::chain::Chain;
use super::inflight::split::Tracker;
use super::inflight::{Record, crash};
use super::{MAX_SIZE, QueueConfig, RingError, need_event};
use crate::memory::GuestMemory;

const NO_INTERRUPT: u16 = VRING_AVAIL_F_NO_INTERRUPT as u16;
const NO_NOTIFY: u16 = VRING_USED_F_NO_NOTIFY as u16;

impl QueueConfig {
    /// [`start_recorded`](Self::start_recorded), for a split ring.
    pub(super) fn start_split(self, memory: &Arc<GuestMemory>, record: Option<Record>) -> Result<Queue, RingError> {
        let areas = Areas::locate(&self, memory)?;
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
        let mut queue = Queue {
            memory: Arc::clone(memory),
            areas,
            config: self,
            next_avail,
            seen_avail: next_avail.wrapping_add(recovered.len() as u16),
            recovered,
            record,
            next_used,
            published: next_used,
            ever_published: false,
            kicks_suppressed: false,
            broken: None,
            in_flight: vec![0; usize::from(self.size).div_ceil(64)].into(),
            in_flight_count: 0,
        };
        queue.arm_kicks();
        Ok(queue)
    }
}

/// Where the areas are in this process.
struct Areas {
    desc: Descriptors,
    avail: Available,
    used: UsedRing,
}

impl Areas {
    fn locate(config: &QueueConfig, memory: &Arc<GuestMemory>) -> Result<Self, RingError> {
        let QueueConfig { size, desc, avail, used, event_idx, .. } = *config;
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Err(RingError::Size(size));
        }
        // SAFETY: a queue has its areas next to the `Arc` of the memory they were found in, replaces both together, and
        // uses the events with EVENT_IDX only.
        unsafe {
            Ok(Self {
                desc: Descriptors::locate(memory, desc, size)?,
                avail: Available::locate(memory, avail, size, event_idx)?,
                used: UsedRing::locate(memory, used, size, event_idx)?,
            })
        }
    }
}

/// A running queue, the device's half: owned by one worker.
///
/// Drain it before it is dropped or stopped. Pieces of chains in flight are in the hands of a disk engine, and the
/// kernel writes to them; should a queue go away first, it leaves its memory map behind for good.
pub struct Queue {
    memory: Arc<GuestMemory>,
    areas: Areas,
    config: QueueConfig,
    /// The next available index to pop.
    next_avail: u16,
    /// The driver's available index when last read: up to it, popping needs no look.
    seen_avail: u16,
    /// What is popped before anything else: the heads that the record had in flight, the next one last.
    recovered: Vec<u16>,
    record: Option<Tracker>,
    /// The next used index to fill.
    next_used: u16,
    /// The used index that the driver can see.
    published: u16,
    /// Until the first batch nobody knows what the driver was last told.
    ever_published: bool,
    kicks_suppressed: bool,
    broken: Option<RingError>,
    /// A bit for each head: popped and not used yet.
    in_flight: Box<[u64]>,
    in_flight_count: u16,
}

// SAFETY: the pointers in `areas` are into the mappings that `memory` keeps, which are good from any thread.
unsafe impl Send for Queue {}

impl Queue {
    pub fn at_rest(&self) -> QueueConfig {
        QueueConfig { base: self.next_avail.into(), ..self.config }
    }

    /// Descriptors in the table.
    pub fn size(&self) -> u16 {
        self.config.size
    }

    /// The memory that its chains point into.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Whether the peer took away memory that the queue needs. A few loads, whatever other peers do: cheap enough to ask
    /// before each batch of completions.
    #[inline]
    pub fn is_torn(&self) -> bool {
        self.memory.is_torn() || self.record.as_ref().is_some_and(Tracker::is_torn)
    }

    /// The available index that the next pop takes: the vring's base, should it stop now.
    pub fn next_available(&self) -> u16 {
        self.next_avail
    }

    /// The used index that the next [`publish`](Self::publish) makes visible.
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// How many chains were popped and not used yet.
    pub fn in_flight(&self) -> u16 {
        self.in_flight_count
    }

    /// What broke the queue. It stays broken: it pops no more, but takes used chains.
    pub fn broken(&self) -> Option<RingError> {
        self.broken
    }

    /// Whether there is a chain to pop: at most one load of the driver's index. Never when broken.
    #[inline]
    pub fn is_available(&self) -> bool {
        (self.next_avail != self.seen_avail || self.next_avail != self.areas.avail.index()) && self.broken.is_none()
    }

    /// Takes the next chain, if there is one, and copies it to `chain`.
    ///
    /// The driver can make chains available as fast as they are popped: whoever loops over this counts.
    ///
    /// # Errors
    ///
    /// What the driver did wrong. The queue is then broken for good, and the next pop says the same.
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        self.try_pop(chain).inspect_err(|&error| self.broken = Some(error))
    }

    // A function of its own for each layout, so that neither carries the other's registers.
    #[inline(never)]
    fn try_pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        let (popped, size) = (self.next_avail, self.config.size);
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
        if let Some(&head) = self.recovered.last() {
            // It is in the record, and stays there as it is.
            self.take(head, chain)?;
            self.recovered.pop();
        } else {
            let head = self.areas.avail.head(popped);
            self.take(head, chain)?;
            if let Some(record) = &mut self.record {
                record.begin(head);
            }
        }
        self.next_avail = popped.wrapping_add(1);
        Ok(true)
    }

    #[inline]
    fn take(&mut self, head: u16, chain: &mut Chain) -> Result<(), RingError> {
        if head >= self.config.size {
            return Err(RingError::NoSuchDescriptor { index: head, len: u32::from(self.config.size) });
        }
        if self.is_in_flight(head) {
            return Err(RingError::Duplicate(head));
        }
        chain.reset(head);
        chain.follow(&self.areas.desc, self.config.size, &self.memory)?;
        self.in_flight[usize::from(head / 64)] |= 1 << (head % 64);
        self.in_flight_count += 1;
        Ok(())
    }

    #[inline]
    fn is_in_flight(&self, head: u16) -> bool {
        self.in_flight.get(usize::from(head / 64)).is_some_and(|bits| bits & (1 << (head % 64)) != 0)
    }

    /// Ends a chain's flight. It goes to the driver with the next [`publish`](Self::publish).
    ///
    /// # Panics
    ///
    /// When `head` is not in flight: the caller has used it twice, or never popped it.
    #[inline]
    pub fn add_used(&mut self, head: u16, written: u32) {
        self.abandon(head);
        self.areas.used.set_element(self.next_used, u32::from(head), written);
        if let Some(record) = &mut self.record {
            record.add_used(head);
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Ends a chain's flight without giving it back: for one that the device model could make nothing of.
    ///
    /// # Panics
    ///
    /// When `head` is not in flight.
    #[inline]
    pub fn abandon(&mut self, head: u16) {
        assert!(self.is_in_flight(head), "descriptor chain {head} is not in flight");
        self.in_flight[usize::from(head / 64)] &= !(1 << (head % 64));
        self.in_flight_count -= 1;
    }

    /// Shows the driver what was used since the last time; returns whether it wants to be notified (2.7.7.2).
    #[inline]
    pub fn publish(&mut self) -> bool {
        let (new, old) = (self.next_used, self.published);
        if new == old {
            return false;
        }
        crash::point();
        self.areas.used.set_index(new);
        crash::point();
        self.published = new;
        let first = !mem::replace(&mut self.ever_published, true);
        // The driver stores its event or flag, fences, and looks at the index once more before it waits; we do the same
        // the other way round. With a full fence on either side one of the two sees the other.
        fence(Ordering::SeqCst);
        // Behind the fence, and so behind the used index.
        if let Some(record) = &mut self.record {
            record.publish(old, new);
        }
        if self.config.event_idx {
            first || need_event(self.areas.avail.event(), new, old)
        } else {
            self.areas.avail.flags() & NO_INTERRUPT == 0
        }
    }

    /// Tells the driver that it need not kick: somebody is looking anyway.
    ///
    /// A hint (2.7.10). With EVENT_IDX there is nothing to do: the event stays where it was last armed, behind the
    /// driver's index, which does not come past it again for 65536 chains.
    #[inline]
    pub fn suppress_kicks(&mut self) {
        if !self.config.event_idx && !mem::replace(&mut self.kicks_suppressed, true) {
            self.areas.used.set_flags(NO_NOTIFY);
        }
    }

    /// Asks the driver to kick for the next chain. False if one is there already: pop it instead of waiting.
    ///
    /// A broken queue is asked for nothing, and says that it may wait.
    #[inline]
    pub fn arm_kicks(&mut self) -> bool {
        if self.broken.is_some() {
            return true;
        }
        if self.config.event_idx {
            self.areas.used.set_event(self.next_avail);
        } else if mem::replace(&mut self.kicks_suppressed, false) {
            self.areas.used.set_flags(0);
        }
        // The driver stores its index, fences, and reads what was just stored. Without the fence our load could come
        // before our store: the driver sees kicks suppressed, we see no chain, and both wait.
        fence(Ordering::SeqCst);
        !self.is_available()
    }

    /// Finds the areas in another memory map; with nothing in flight.
    pub fn replace_memory(&mut self, memory: &Arc<GuestMemory>) -> Result<(), RingError> {
        self.areas = Areas::locate(&self.config, memory).inspect_err(|&error| self.broken = Some(error))?;
        self.memory = Arc::clone(memory);
        Ok(())
    }
}
