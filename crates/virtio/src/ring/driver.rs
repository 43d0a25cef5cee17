//! The driver's half of a split ring: what a guest does, for tests and load generators.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use thiserror::Error;
use virtio_bindings::bindings::virtio_ring::{VRING_AVAIL_F_NO_INTERRUPT, VRING_USED_F_NO_NOTIFY};

use super::area::{Available, Descriptor, Descriptors, UsedRing};
use super::chain::{INDIRECT, NEXT, WRITE};
use super::{QueueConfig, RingError, need_event};
use crate::memory::GuestMemory;

const NO_INTERRUPT: u16 = VRING_AVAIL_F_NO_INTERRUPT as u16;
const NO_NOTIFY: u16 = VRING_USED_F_NO_NOTIFY as u16;
/// Areas begin on cache lines of their own, so that the halves do not share more than they must.
const LINE: u64 = 64;

/// How a driver sets its ring up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverConfig {
    /// Descriptors in the table: a power of two.
    pub size: u16,
    /// Whether `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// The most descriptors of a chain that goes through an indirect table, for which each head has one; or none, and
    /// chains take descriptors from the ring's own table.
    pub indirect: Option<u16>,
    /// Where both indices begin: 0 after a reset.
    pub base: u16,
}

/// Where the areas go, as offsets, and how long they are together.
struct Layout {
    used: u64,
    avail: u64,
    tables: u64,
    end: u64,
}

impl DriverConfig {
    fn layout(&self) -> Layout {
        let size = u64::from(self.size);
        let used = (16 * size).next_multiple_of(LINE);
        let avail = (used + 6 + 8 * size).next_multiple_of(LINE);
        let tables = (avail + 6 + 2 * size).next_multiple_of(LINE);
        let end = tables + 16 * size * u64::from(self.indirect.unwrap_or(0));
        Layout { used, avail, tables, end }
    }

    /// How much memory the ring takes, in bytes.
    pub fn bytes(&self) -> u64 {
        self.layout().end
    }

    /// What to start the device's half with, for a ring at `at`.
    pub fn queue(&self, at: u64) -> QueueConfig {
        let layout = self.layout();
        QueueConfig {
            size: self.size,
            desc: at,
            avail: at + layout.avail,
            used: at + layout.used,
            base: self.base,
            event_idx: self.event_idx,
        }
    }
}

/// A buffer in guest memory, as a descriptor has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its guest address.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u32,
}

/// A chain that the device has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// What [`Driver::add`] was given.
    pub token: u64,
    /// How many bytes the device says it wrote.
    pub written: u32,
}

/// There are not enough free descriptors for a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("not enough free descriptors")]
pub struct Full;

/// What the driver remembers of a descriptor.
#[derive(Clone, Copy)]
struct Slot {
    token: u64,
    /// The next descriptor of its chain.
    next: u16,
    /// For a head, how many descriptors its chain takes of the ring's table; zero when it is nobody's head.
    taken: u16,
}

/// The driver's half of a ring, which owns the ring's memory. Allocates nothing after it is made.
pub struct Driver {
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
    /// Lays a ring out in `config.bytes()` bytes at `at`, a guest address, and resets it.
    ///
    /// # Errors
    ///
    /// The size is no power of two, `at` not a multiple of 16, or the memory not there.
    pub fn new(memory: &Arc<GuestMemory>, at: u64, config: DriverConfig) -> Result<Self, RingError> {
        let DriverConfig { size, event_idx, indirect, base } = config;
        if !size.is_power_of_two() || size > super::MAX_SIZE {
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
        let tables = Piece { addr: at + config.layout().tables, len: 16 * u32::from(indirect.unwrap_or(0)) };
        for table in 0..u64::from(size) {
            let (addr, len) = (tables.addr + table * u64::from(tables.len), tables.len);
            memory.slice(addr, len as usize).ok_or(RingError::TableOutside { addr, len })?;
        }
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

    /// The memory that the ring is in.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// What to start the device's half with.
    pub fn queue(&self) -> QueueConfig {
        self.config.queue(self.at)
    }

    /// How many descriptors are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Makes a chain of `readable` and then `writable` buffers; the device sees it after [`publish`](Self::publish).
    /// It comes back from [`reap`](Self::reap) with `token`.
    ///
    /// With indirect tables, a chain of one buffer goes without, as Linux has it.
    ///
    /// # Errors
    ///
    /// Not enough free descriptors, or more buffers than an indirect table holds. Nothing has changed.
    ///
    /// # Panics
    ///
    /// When there are no buffers at all.
    pub fn add(&mut self, readable: &[Piece], writable: &[Piece], token: u64) -> Result<(), Full> {
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
        let bytes = 16 * u32::from(most);
        let addr = self.at + self.config.layout().tables + u64::from(head) * u64::from(bytes);
        let Some(table) = self.memory.slice(addr, bytes as usize) else { return };
        // SAFETY: the piece has room for `most` descriptors, and is of the memory that the driver keeps.
        let table = unsafe { Descriptors::at(table.base(), u32::from(most)) };
        for (index, (&Piece { addr, len }, flags)) in (0..count).zip(buffers) {
            let (flags, next) = if index + 1 < count { (flags | NEXT, index + 1) } else { (flags, 0) };
            table.set(index, Descriptor { addr, len, flags, next });
        }
        self.desc.set(head, Descriptor { addr, len: 16 * u32::from(count), flags: INDIRECT, next: 0 });
    }

    /// Shows the device the chains added since the last time; returns whether it wants a kick (2.7.13.4).
    pub fn publish(&mut self) -> bool {
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

    /// Whether there is a used chain to reap: one load.
    #[inline]
    pub fn has_used(&self) -> bool {
        self.next_used != self.used.index()
    }

    /// Takes the next used chain, if there is one, and frees its descriptors.
    ///
    /// # Errors
    ///
    /// The device used a chain that it does not have.
    pub fn reap(&mut self) -> Result<Option<Used>, RingError> {
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

    /// Tells the device that it need not notify: a hint.
    pub fn suppress_calls(&mut self) {
        if !self.config.event_idx && !mem::replace(&mut self.calls_suppressed, true) {
            self.avail.set_flags(NO_INTERRUPT);
        }
    }

    /// Asks the device to notify of the next used chain. False if one is there already: reap instead of waiting.
    pub fn arm_calls(&mut self) -> bool {
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
