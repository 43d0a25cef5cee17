//! The driver's half of a split ring.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};

use super::super::area::{Available, Descriptor, Descriptors, UsedRing};
use super::super::chain::{INDIRECT, NEXT, WRITE};
use super::super::{MAX_SIZE, QueueConfig, RingError, need_event};
use super::{DriverConfig, Full, Piece, Used};
use crate::memory::GuestMemory;

const NO_INTERRUPT: u16 = VRING_AVAIL_F_NO_INTERRUPT as u16;
const NO_NOTIFY: u16 = VRING_USED_F_NO_NOTIFY as u16;

/// What the driver remembers of a descriptor.
#[derive(Clone, Copy)]
struct Slot {
    token: u64,
    /// The next descriptor of its chain.
    next: u16,
    /// For a head, how many descriptors its chain takes of the ring's table; zero when it is nobody's head.
    taken: u16,
}

pub(super) struct Driver {
    memory: Arc<GuestMemory>,
    desc: Descriptors,
    avail: Available,
    used: UsedRing,
    config: DriverConfig,
    at: u64,
    free: Vec<u16>,
    slots: Box<[Slot]>,
    next_avail: u16,
    /// The available index that the device can see.
    published: u16,
    next_used: u16,
    calls_suppressed: bool,
}

// SAFETY: the pointers in the areas are into the mappings that `memory` keeps, which are good from any thread.
unsafe impl Send for Driver {}

impl Driver {
    pub(super) fn new(memory: &Arc<GuestMemory>, at: u64, config: DriverConfig) -> Result<Self, RingError> {
        let DriverConfig { size, event_idx, base, .. } = config;
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Err(RingError::Size(size));
        }
        let queue = config.queue(at);
        // SAFETY: the driver keeps `memory` as long as the areas, and uses the events with EVENT_IDX only.
        let (desc, avail, used) = unsafe {
            (
                Descriptors::locate(memory, queue.desc, size)?,
                Available::locate(memory, queue.avail, size, event_idx)?,
                UsedRing::locate(memory, queue.used, size, event_idx)?,
            )
        };
        config.check_tables(memory, at)?;
        avail.set_flags(0);
        used.set_flags(0);
        avail.set_index(base);
        used.set_index(base);
        if event_idx {
            avail.set_used_event(base);
            used.set_avail_event(base);
        }
        Ok(Self {
            memory: Arc::clone(memory),
            desc,
            avail,
            used,
            config,
            at,
            free: (0..size).rev().collect(),
            slots: vec![Slot { token: 0, next: 0, taken: 0 }; usize::from(size)].into(),
            next_avail: base,
            published: base,
            next_used: base,
            calls_suppressed: false,
        })
    }

    pub(super) fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    pub(super) fn queue(&self) -> QueueConfig {
        self.config.queue(self.at)
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn add(&mut self, readable: &[Piece], writable: &[Piece], token: u64) -> Result<(), Full> {
        let count = readable.len() + writable.len();
        assert!(count > 0, "a chain needs a buffer");
        let buffers = readable.iter().map(|piece| (piece, 0)).chain(writable.iter().map(|piece| (piece, WRITE)));
        let (head, taken) = match self.config.indirect {
            Some(most) if count > 1 => {
                if count > usize::from(most) {
                    return Err(Full);
                }
                let head = self.free.pop().ok_or(Full)?;
                self.fill_table(head, most, count as u16, buffers);
                (head, 1)
            }
            _ => {
                let rest = self.free.len().checked_sub(count).ok_or(Full)?;
                // The last of the free list is the head, as it would be for one descriptor at a time.
                let mut last = count;
                let head = self.free[rest + count - 1];
                for (&Piece { addr, len }, flags) in buffers {
                    last -= 1;
                    let index = self.free[rest + last];
                    let next = if last > 0 { self.free[rest + last - 1] } else { 0 };
                    let flags = if last > 0 { flags | NEXT } else { flags };
                    self.desc.set(index, Descriptor { addr, len, flags, next });
                    self.slots[usize::from(index)].next = next;
                }
                self.free.truncate(rest);
                (head, count as u16)
            }
        };
        let slot = &mut self.slots[usize::from(head)];
        slot.token = token;
        slot.taken = taken;
        self.avail.set_head(self.next_avail, head);
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(())
    }

    /// Writes `count` buffers to the indirect table of `head`, which has room for `most`, and the descriptor that leads
    /// there.
    fn fill_table<'a>(&self, head: u16, most: u16, count: u16, buffers: impl Iterator<Item = (&'a Piece, u16)>) {
        let Piece { addr, len } = self.config.table(self.at, head);
        let Some(table) = self.memory.slice(addr, len as usize) else { return };
        // SAFETY: the piece has room for `most` descriptors, and is of the memory that the driver keeps.
        let table = unsafe { Descriptors::at(table.base(), u32::from(most)) };
        for (index, (&Piece { addr, len }, flags)) in (0..count).zip(buffers) {
            let (flags, next) = if index + 1 < count { (flags | NEXT, index + 1) } else { (flags, 0) };
            table.set(index, Descriptor { addr, len, flags, next });
        }
        self.desc.set(head, Descriptor { addr, len: 16 * u32::from(count), flags: INDIRECT, next: 0 });
    }

    pub(super) fn publish(&mut self) -> bool {
        let (new, old) = (self.next_avail, self.published);
        if new == old {
            return false;
        }
        self.avail.set_index(new);
        self.published = new;
        // The mirror of the fence in the device's `arm_kicks`: either it sees the index, or we see its wish.
        fence(Ordering::SeqCst);
        if self.config.event_idx {
            need_event(self.used.avail_event(), new, old)
        } else {
            self.used.flags() & NO_NOTIFY == 0
        }
    }

    #[inline]
    pub(super) fn has_used(&self) -> bool {
        self.next_used != self.used.index()
    }

    pub(super) fn reap(&mut self) -> Result<Option<Used>, RingError> {
        if !self.has_used() {
            return Ok(None);
        }
        let (id, written) = self.used.element(self.next_used);
        let slot = usize::try_from(id).ok().and_then(|id| self.slots.get_mut(id));
        let slot = slot.filter(|slot| slot.taken > 0).ok_or(RingError::NotAvailable(id))?;
        let (token, taken) = (slot.token, mem::take(&mut slot.taken));
        // Back in reverse, so that the head is on top and the next chain of this length gets the same ones.
        let mut index = id as u16;
        let start = self.free.len();
        for _ in 0..taken {
            self.free.push(index);
            index = self.slots[usize::from(index)].next;
        }
        self.free[start..].reverse();
        self.next_used = self.next_used.wrapping_add(1);
        Ok(Some(Used { token, written }))
    }

    pub(super) fn suppress_calls(&mut self) {
        if !self.config.event_idx && !mem::replace(&mut self.calls_suppressed, true) {
            self.avail.set_flags(NO_INTERRUPT);
        }
    }

    pub(super) fn arm_calls(&mut self) -> bool {
        if self.config.event_idx {
            self.avail.set_used_event(self.next_used);
        } else if mem::replace(&mut self.calls_suppressed, false) {
            self.avail.set_flags(0);
        }
        // The mirror of the fence in the device's `publish`.
        fence(Ordering::SeqCst);
        !self.has_used()
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("queue", &self.queue())
            .field("next_avail", &self.next_avail)
            .field("next_used", &self.next_used)
            .field("free", &self.free.len())
            .finish_non_exhaustive()
    }
}
