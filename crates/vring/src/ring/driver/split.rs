//! The driver's half of a split ring.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::super::area::Descriptor;
use super::super::chain::{INDIRECT, NEXT};
use super::super::split::{Areas, NO_INTERRUPT, NO_NOTIFY};
use super::super::{RingError, need_event};
use super::{DriverConfig, Full, Home, Piece, Used};
use crate::memory::GuestMemory;

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
    pub(super) home: Home,
    areas: Areas,
    free: Vec<u16>,
    slots: Box<[Slot]>,
    pub(super) next_avail: u16,
    /// The available index that the device can see.
    published: u16,
    pub(super) next_used: u16,
    calls_suppressed: bool,
}

// SAFETY: the pointers in the areas are into the mappings that `memory` keeps, which are good from any thread.
unsafe impl Send for Driver {}

impl Driver {
    pub(super) fn new(memory: &Arc<GuestMemory>, at: u64, config: DriverConfig) -> Result<Self, RingError> {
        let DriverConfig { size, event_idx, base, .. } = config;
        // SAFETY: the driver keeps `memory` as long as the areas, and uses the events with EVENT_IDX only.
        let areas = unsafe { Areas::locate(&config.queue(at), memory) }?;
        let home = Home::new(memory, at, config)?;
        let Areas { avail, used, .. } = &areas;
        avail.set_flags(0);
        used.set_flags(0);
        avail.set_index(base);
        used.set_index(base);
        if event_idx {
            avail.set_event(base);
            used.set_event(base);
        }
        Ok(Self {
            home,
            areas,
            free: (0..size).rev().collect(),
            slots: vec![Slot { token: 0, next: 0, taken: 0 }; usize::from(size)].into(),
            next_avail: base,
            published: base,
            next_used: base,
            calls_suppressed: false,
        })
    }

    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    /// [`add`](super::Driver::add), of `count` buffers with the flags of their descriptors.
    pub(super) fn add<'a>(
        &mut self,
        count: usize,
        buffers: impl Iterator<Item = (&'a Piece, u16)>,
        token: u64,
    ) -> Result<(), Full> {
        let (head, taken) = match self.home.config.indirect {
            Some(most) if count > 1 => {
                if count > usize::from(most) {
                    return Err(Full);
                }
                let head = self.free.pop().ok_or(Full)?;
                self.fill_table(head, count as u16, buffers);
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
                    self.areas.desc.set(index, Descriptor { addr, len, flags, next });
                    self.slots[usize::from(index)].next = next;
                }
                self.free.truncate(rest);
                (head, count as u16)
            }
        };
        let slot = &mut self.slots[usize::from(head)];
        slot.token = token;
        slot.taken = taken;
        self.areas.avail.set_head(self.next_avail, head);
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(())
    }

    /// Writes `count` buffers to the indirect table of `head`, and the descriptor that leads there.
    fn fill_table<'a>(&self, head: u16, count: u16, buffers: impl Iterator<Item = (&'a Piece, u16)>) {
        let Ok((at, table)) = self.home.table(head) else { return };
        for (index, (&Piece { addr, len }, flags)) in (0..count).zip(buffers) {
            let (flags, next) = if index + 1 < count { (flags | NEXT, index + 1) } else { (flags, 0) };
            table.set(index, Descriptor { addr, len, flags, next });
        }
        self.areas.desc.set(head, Descriptor { addr: at, len: 16 * u32::from(count), flags: INDIRECT, next: 0 });
    }

    pub(super) fn publish(&mut self) -> bool {
        let (new, old) = (self.next_avail, self.published);
        if new == old {
            return false;
        }
        self.areas.avail.set_index(new);
        self.published = new;
        // The mirror of the fence in the device's `arm_kicks`: either it sees the index, or we see its wish.
        fence(Ordering::SeqCst);
        if self.home.config.event_idx {
            need_event(self.areas.used.event(), new, old)
        } else {
            self.areas.used.flags() & NO_NOTIFY == 0
        }
    }

    #[inline]
    pub(super) fn has_used(&self) -> bool {
        self.next_used != self.areas.used.index()
    }

    pub(super) fn reap(&mut self) -> Result<Option<Used>, RingError> {
        if !self.has_used() {
            return Ok(None);
        }
        let (id, written) = self.areas.used.element(self.next_used);
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
        if !self.home.config.event_idx && !mem::replace(&mut self.calls_suppressed, true) {
            self.areas.avail.set_flags(NO_INTERRUPT);
        }
    }

    pub(super) fn arm_calls(&mut self) -> bool {
        if self.home.config.event_idx {
            self.areas.avail.set_event(self.next_used);
        } else if mem::replace(&mut self.calls_suppressed, false) {
            self.areas.avail.set_flags(0);
        }
        // The mirror of the fence in the device's `publish`.
        fence(Ordering::SeqCst);
        !self.has_used()
    }
}
