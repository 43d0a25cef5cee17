//! The three areas of a packed ring as they lie in memory (virtio 1.3, 2.8.13 and 2.8.14).
//!
//! Both halves use these; each stores only what is its to store. As with a split ring's areas, what is read is only ever a
//! number, and read whole: flags and events atomically, the rest volatile.

use std::sync::atomic::{AtomicU16, Ordering};

use virtio_bindings::bindings::virtio_ring::{
    VRING_PACKED_DESC_F_AVAIL, VRING_PACKED_DESC_F_USED, VRING_PACKED_EVENT_FLAG_DESC, VRING_PACKED_EVENT_FLAG_DISABLE,
    VRING_PACKED_EVENT_FLAG_ENABLE,
};

use super::super::area;
use super::super::area::locate;
use super::super::{Area, RingError};
use crate::memory::GuestMemory;

const AVAIL: u16 = 1 << VRING_PACKED_DESC_F_AVAIL;
pub(in crate::ring) const USED: u16 = 1 << VRING_PACKED_DESC_F_USED;
/// The flags that say whose a descriptor is.
pub(in crate::ring) const OWNER: u16 = AVAIL | USED;

const ENABLE: u16 = VRING_PACKED_EVENT_FLAG_ENABLE as u16;
const DISABLE: u16 = VRING_PACKED_EVENT_FLAG_DISABLE as u16;
const DESC: u16 = VRING_PACKED_EVENT_FLAG_DESC as u16;

/// The bit of a position that is the wrap counter.
const WRAP: u16 = 1 << 15;

/// A place in the ring, of either lap: a slot, and the wrap counter in bit 15 (2.8.1). Events and the vring's base are
/// written so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ring) struct Position(u16);

impl Position {
    /// A place in a ring of `size`.
    ///
    /// # Errors
    ///
    /// It has no such slot.
    pub(in crate::ring) fn new(bits: u16, size: u16) -> Result<Self, RingError> {
        let place = Self(bits);
        if place.slot() < size { Ok(place) } else { Err(RingError::Base { slot: place.slot(), size }) }
    }

    #[inline]
    pub(in crate::ring) fn bits(self) -> u16 {
        self.0
    }

    #[inline]
    pub(in crate::ring) fn slot(self) -> u16 {
        self.0 & !WRAP
    }

    /// The wrap counter.
    #[inline]
    pub(in crate::ring) fn wrap(self) -> u8 {
        (self.0 >> 15) as u8
    }

    /// The place `by` slots on, which is no more than `size`.
    #[inline]
    pub(in crate::ring) fn advance(self, by: u16, size: u16) -> Self {
        let (slot, wrap) = (self.slot() + by, self.0 & WRAP);
        if slot < size { Self(slot | wrap) } else { Self((slot - size) | (wrap ^ WRAP)) }
    }

    /// What is in the [`OWNER`] flags of a descriptor here that is available.
    #[inline]
    pub(in crate::ring) fn available(self) -> u16 {
        if self.0 & WRAP != 0 { AVAIL } else { USED }
    }

    /// What is in the [`OWNER`] flags of a descriptor here that is used.
    #[inline]
    pub(in crate::ring) fn used(self) -> u16 {
        if self.0 & WRAP != 0 { OWNER } else { 0 }
    }

    /// Whether this is among the `count` places before `end`: whether who waits for it is to be told (2.8.10).
    #[inline]
    pub(in crate::ring) fn is_passed(self, end: Self, count: u16, size: u16) -> bool {
        let lap = if (self.0 ^ end.0) & WRAP == 0 { 0 } else { i32::from(size) };
        let behind = i32::from(end.slot()) + lap - i32::from(self.slot());
        (1..=i32::from(count)).contains(&behind)
    }
}

/// A descriptor (`struct pvirtq_desc`, 2.8.13), copied out of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ring) struct Descriptor {
    pub(in crate::ring) addr: u64,
    pub(in crate::ring) len: u32,
    pub(in crate::ring) id: u16,
    pub(in crate::ring) flags: u16,
}

impl From<area::Descriptor> for Descriptor {
    /// The same bytes: the ID is where a split ring has the flags, and the flags are where it has the next.
    #[inline]
    fn from(area::Descriptor { addr, len, flags, next }: area::Descriptor) -> Self {
        Self { addr, len, id: flags, flags: next }
    }
}

impl From<Descriptor> for area::Descriptor {
    #[inline]
    fn from(Descriptor { addr, len, id, flags }: Descriptor) -> Self {
        Self { addr, len, flags: id, next: flags }
    }
}

impl Descriptor {
    /// As a split ring would have it, with a `next` to go on to.
    #[inline]
    pub(in crate::ring) fn linked(self, next: u16) -> area::Descriptor {
        area::Descriptor { addr: self.addr, len: self.len, flags: self.flags, next }
    }
}

/// The descriptor ring.
///
/// Invariant: `base` is aligned to 16, and `size` descriptors are mapped there.
#[derive(Clone, Copy)]
pub(in crate::ring) struct Slots {
    base: *mut u8,
    size: u16,
}

impl Slots {
    pub(in crate::ring) const BYTES: usize = area::Descriptor::BYTES;

    /// # Safety
    ///
    /// `memory` must be kept for as long as the ring is used.
    pub(in crate::ring) unsafe fn locate(memory: &GuestMemory, addr: u64, size: u16) -> Result<Self, RingError> {
        let base = locate(memory, Area::Ring, addr, Self::BYTES * usize::from(size), 16)?;
        Ok(Self { base, size })
    }

    /// How many there are.
    #[inline]
    pub(in crate::ring) fn size(&self) -> u16 {
        self.size
    }

    /// Where a slot's fields are.
    ///
    /// # Panics
    ///
    /// When there is no such slot.
    #[inline]
    fn slot(&self, slot: u16) -> *mut u8 {
        assert!(slot < self.size, "slot {slot} of a ring of {}", self.size);
        // SAFETY: the slot is in the ring, which the invariant says is mapped.
        unsafe { self.base.add(Self::BYTES * usize::from(slot)) }
    }

    #[inline]
    fn flags_at(&self, slot: u16) -> &AtomicU16 {
        // SAFETY: the slot is in the ring and aligned to 16, so that its last two bytes are aligned.
        unsafe { AtomicU16::from_ptr(self.slot(slot).add(14).cast()) }
    }

    /// A slot's flags. Acquire: what was written before they were is visible with them.
    #[inline]
    pub(in crate::ring) fn flags(&self, slot: u16) -> u16 {
        u16::from_le(self.flags_at(slot).load(Ordering::Acquire))
    }

    /// Release: whoever sees the flags sees what was written before.
    #[inline]
    pub(in crate::ring) fn set_flags(&self, slot: u16, flags: u16) {
        self.flags_at(slot).store(flags.to_le(), Ordering::Release);
    }

    /// Copies a descriptor out, reading each field once, and the flags before the others.
    #[inline]
    pub(in crate::ring) fn get(&self, slot: u16) -> Descriptor {
        self.rest(slot, self.flags(slot))
    }

    /// Copies out what goes with the flags of a descriptor, which have been read. Before they say that it is available the
    /// driver may be at its fields.
    #[inline]
    pub(in crate::ring) fn rest(&self, slot: u16, flags: u16) -> Descriptor {
        let at = self.slot(slot);
        // SAFETY: the slot is in the ring and aligned to 16, so that its fields are aligned.
        let (addr, len, id) = unsafe {
            (
                at.cast::<u64>().read_volatile(),
                at.add(8).cast::<u32>().read_volatile(),
                at.add(12).cast::<u16>().read_volatile(),
            )
        };
        Descriptor { addr: u64::from_le(addr), len: u32::from_le(len), id: u16::from_le(id), flags }
    }

    /// Stores all but the flags of a descriptor that is made available.
    #[inline]
    pub(in crate::ring) fn set(&self, slot: u16, Descriptor { addr, len, id, .. }: Descriptor) {
        // SAFETY: the slot is in the ring and aligned to 16.
        unsafe { self.slot(slot).cast::<u64>().write_volatile(addr.to_le()) };
        self.set_used(slot, id, len);
    }

    /// Stores all but the flags of a used descriptor, which has no address.
    #[inline]
    pub(in crate::ring) fn set_used(&self, slot: u16, id: u16, len: u32) {
        let at = self.slot(slot);
        // SAFETY: the slot is in the ring and aligned to 16, so that its fields are aligned.
        unsafe {
            at.add(8).cast::<u32>().write_volatile(len.to_le());
            at.add(12).cast::<u16>().write_volatile(id.to_le());
        }
    }
}

/// When one side wants to be notified by the other (`RING_EVENT_FLAGS`, 2.8.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ring) enum EventFlags {
    Enable,
    Disable,
    /// When the descriptor at this position becomes available or used; with EVENT_IDX only. The other side may have written
    /// a slot that does not exist.
    Desc(Position),
}

/// Event suppression (`struct pvirtq_event_suppress`, 2.8.14): the driver's, or the device's.
///
/// Invariant: `base` is aligned to 4, and four bytes are mapped there.
#[derive(Clone, Copy)]
pub(in crate::ring) struct Events {
    base: *mut u8,
}

impl Events {
    pub(in crate::ring) const BYTES: usize = 4;

    /// # Safety
    ///
    /// `memory` must be kept for as long as this is used.
    pub(in crate::ring) unsafe fn locate(memory: &GuestMemory, area: Area, addr: u64) -> Result<Self, RingError> {
        Ok(Self { base: locate(memory, area, addr, Self::BYTES, 4)? })
    }

    #[inline]
    fn place(&self) -> &AtomicU16 {
        // SAFETY: the invariant covers the first two bytes.
        unsafe { AtomicU16::from_ptr(self.base.cast()) }
    }

    #[inline]
    fn flags(&self) -> &AtomicU16 {
        // SAFETY: the invariant covers the last two bytes.
        unsafe { AtomicU16::from_ptr(self.base.add(2).cast()) }
    }

    /// What the other side has set. The position is stored before the flag that refers to it, and loaded after it.
    #[inline]
    pub(in crate::ring) fn get(&self, event_idx: bool) -> EventFlags {
        match u16::from_le(self.flags().load(Ordering::Acquire)) {
            DISABLE => EventFlags::Disable,
            DESC if event_idx => EventFlags::Desc(Position(u16::from_le(self.place().load(Ordering::Relaxed)))),
            // Other values are reserved. To notify too often is safe, and not to notify is not.
            _ => EventFlags::Enable,
        }
    }

    #[inline]
    pub(in crate::ring) fn set(&self, flags: EventFlags) {
        let flags = match flags {
            EventFlags::Enable => ENABLE,
            EventFlags::Disable => DISABLE,
            EventFlags::Desc(place) => {
                self.place().store(place.bits().to_le(), Ordering::Relaxed);
                DESC
            }
        };
        self.flags().store(flags.to_le(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where one is who has gone so far: the counter begins at 1 and changes with each lap (2.8.1).
    fn after(steps: u32, size: u16) -> Position {
        let (lap, slot) = (steps / u32::from(size), steps % u32::from(size));
        Position(slot as u16 | if lap.is_multiple_of(2) { WRAP } else { 0 })
    }

    /// All sizes that a small ring can have, powers of two or not, and the largest: every place of two laps, every distance.
    #[test]
    #[cfg_attr(miri, ignore = "millions of cases, and no memory")]
    fn a_position_goes_round_its_ring_and_its_wrap_counter_with_it_from_anywhere_by_anything() {
        for size in (1..=64).chain([255, 256, 1024]) {
            for steps in 0..2 * u32::from(size) {
                let here = after(steps, size);
                assert_eq!(Position::new(here.bits(), size), Ok(here));
                assert_eq!(here.available() == AVAIL, here.wrap() == 1);
                assert_eq!(here.used() == OWNER, here.wrap() == 1);
                for by in 0..=size {
                    assert_eq!(
                        here.advance(by, size),
                        after(steps + u32::from(by), size),
                        "{steps} and {by} of {size}"
                    );
                }
            }
        }
    }

    /// Likewise: whoever waits for one of the last `count` places is told, and nobody else (2.8.10).
    #[test]
    #[cfg_attr(miri, ignore = "millions of cases, and no memory")]
    fn a_place_is_passed_by_exactly_the_batches_that_it_is_in() {
        for size in 1..=24 {
            for end in 0..2 * u32::from(size) {
                for count in 0..=size {
                    // Two laps on a place has the same bits.
                    let steps = end + 2 * u32::from(size);
                    let batch = steps - u32::from(count)..steps;
                    for place in 0..2 * u32::from(size) {
                        let place = after(place, size);
                        let expected = batch.clone().any(|steps| after(steps, size) == place);
                        assert_eq!(
                            place.is_passed(after(end, size), count, size),
                            expected,
                            "{place:?} {end} {count} {size}"
                        );
                    }
                }
            }
        }
    }
}
