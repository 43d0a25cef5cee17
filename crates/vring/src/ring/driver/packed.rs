//! The driver's half of a packed ring.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::super::RingError;
use super::super::chain::{INDIRECT, NEXT};
use super::super::packed::Areas;
use super::super::packed::area::{Descriptor, EventFlags, OWNER, Position};
use super::{DriverConfig, Full, Home, Piece, Used};
use crate::memory::GuestMemory;

/// What the driver remembers of a chain, by its buffer ID.
#[derive(Clone, Copy)]
struct Slot {
    token: u64,
    /// How many descriptors it takes of the ring; zero when it is not out.
    taken: u16,
}

pub(super) struct Driver {
    pub(super) home: Home,
    areas: Areas,
    /// How many descriptors are free.
    free: u16,
    ids: Vec<u16>,
    slots: Box<[Slot]>,
    pub(super) next_avail: Position,
    /// Up to where the device can see.
    published: Position,
    /// The flags of the first descriptor behind, which show all there are when they are written.
    first: Option<u16>,
    /// How many descriptors there are behind.
    batch: u16,
    pub(super) next_used: Position,
    calls_suppressed: bool,
}

// SAFETY: the pointers in the areas are into the mappings that `memory` keeps, which are good from any thread.
unsafe impl Send for Driver {}

impl Driver {
    pub(super) fn new(memory: &Arc<GuestMemory>, at: u64, config: DriverConfig) -> Result<Self, RingError> {
        let DriverConfig { size, base, .. } = config;
        // SAFETY: the driver keeps `memory` as long as the areas.
        let areas = unsafe { Areas::locate(&config.queue(at), memory) }?;
        let base = Position::new(base, size)?;
        let home = Home::new(memory, at, config)?;
        // As a lap that ended here has left them: everything used.
        let Areas { ring, driver, device } = &areas;
        let mut place = base;
        for _ in 0..size {
            let last_lap = place.advance(size, size);
            ring.set_flags(place.slot(), last_lap.used());
            place = place.advance(1, size);
        }
        driver.set(if config.event_idx { EventFlags::Desc(base) } else { EventFlags::Enable });
        device.set(if config.event_idx { EventFlags::Desc(base) } else { EventFlags::Enable });
        Ok(Self {
            home,
            areas,
            free: size,
            ids: (0..size).rev().collect(),
            slots: vec![Slot { token: 0, taken: 0 }; usize::from(size)].into(),
            next_avail: base,
            published: base,
            first: None,
            batch: 0,
            next_used: base,
            calls_suppressed: false,
        })
    }

    pub(super) fn free(&self) -> usize {
        self.free.into()
    }

    /// [`add`](super::Driver::add), of `count` buffers with the flags of their descriptors.
    pub(super) fn add<'a>(
        &mut self,
        count: usize,
        buffers: impl Iterator<Item = (&'a Piece, u16)>,
        token: u64,
    ) -> Result<(), Full> {
        let taken = match self.home.config.indirect {
            Some(most) if count > usize::from(most) => return Err(Full),
            // One buffer goes without a table, and takes as many.
            Some(_) => 1,
            None => count,
        };
        if taken > usize::from(self.free) {
            return Err(Full);
        }
        // A chain that is out has a descriptor at least, so there are as many names as there are free descriptors.
        let id = self.ids.pop().ok_or(Full)?;
        if taken < count {
            let table = self.fill_table(id, buffers);
            self.put(Descriptor { addr: table.addr, len: table.len, id, flags: INDIRECT });
        } else {
            for (at, (&Piece { addr, len }, flags)) in (1..).zip(buffers) {
                let flags = if at < count { flags | NEXT } else { flags };
                self.put(Descriptor { addr, len, id, flags });
            }
        }
        self.slots[usize::from(id)] = Slot { token, taken: taken as u16 };
        Ok(())
    }

    /// Makes a descriptor available. The device does not look at it before it has seen the first of the batch, whose
    /// flags are written last.
    fn put(&mut self, descriptor: Descriptor) {
        let at = self.next_avail;
        self.areas.ring.set(at.slot(), descriptor);
        let flags = descriptor.flags | at.available();
        if self.first.is_none() {
            self.first = Some(flags);
        } else {
            self.areas.ring.set_flags(at.slot(), flags);
        }
        self.batch += 1;
        self.free -= 1;
        self.next_avail = at.advance(1, self.home.config.size);
    }

    /// Writes buffers to the indirect table of a chain; returns where that is.
    fn fill_table<'a>(&self, id: u16, buffers: impl Iterator<Item = (&'a Piece, u16)>) -> Piece {
        let Ok((at, table)) = self.home.table(id) else { return Piece { addr: 0, len: 0 } };
        let mut len = 0;
        for (index, (&Piece { addr, len: bytes }, flags)) in (0..).zip(buffers) {
            table.set(index, Descriptor { addr, len: bytes, id: 0, flags }.into());
            len += 16;
        }
        Piece { addr: at, len }
    }

    pub(super) fn publish(&mut self) -> bool {
        let Some(flags) = self.first.take() else { return false };
        self.areas.ring.set_flags(self.published.slot(), flags);
        self.published = self.next_avail;
        let batch = mem::take(&mut self.batch);
        // The mirror of the fence in the device's `arm_kicks`: either it sees the flags, or we see that it wants a kick.
        fence(Ordering::SeqCst);
        match self.areas.device.get(self.home.config.event_idx) {
            EventFlags::Enable => true,
            EventFlags::Disable => false,
            EventFlags::Desc(event) => event.is_passed(self.published, batch, self.home.config.size),
        }
    }

    #[inline]
    pub(super) fn has_used(&self) -> bool {
        self.areas.ring.flags(self.next_used.slot()) & OWNER == self.next_used.used()
    }

    pub(super) fn reap(&mut self) -> Result<Option<Used>, RingError> {
        if !self.has_used() {
            return Ok(None);
        }
        let Descriptor { id, len: written, .. } = self.areas.ring.get(self.next_used.slot());
        let slot = self.slots.get_mut(usize::from(id)).filter(|slot| slot.taken > 0);
        let slot = slot.ok_or(RingError::NotAvailable(id.into()))?;
        let (token, taken) = (slot.token, mem::take(&mut slot.taken));
        self.ids.push(id);
        self.free += taken;
        self.next_used = self.next_used.advance(taken, self.home.config.size);
        Ok(Some(Used { token, written }))
    }

    pub(super) fn suppress_calls(&mut self) {
        if !mem::replace(&mut self.calls_suppressed, true) {
            self.areas.driver.set(EventFlags::Disable);
        }
    }

    pub(super) fn arm_calls(&mut self) -> bool {
        self.calls_suppressed = false;
        self.areas.driver.set(if self.home.config.event_idx {
            EventFlags::Desc(self.next_used)
        } else {
            EventFlags::Enable
        });
        // The mirror of the fence in the device's `publish`.
        fence(Ordering::SeqCst);
        !self.has_used()
    }
}
