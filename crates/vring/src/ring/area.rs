//! The three areas of a split ring as they lie in memory (virtio 1.3, 2.7.5 to 2.7.8).
//!
//! Both halves use these; each stores only what is its to store. The other side writes at any time, so every field is
//! read and written whole: the indices, flags and events atomically, with the ordering that the protocol needs and that
//! is named here once, the rest volatile. What is read is only ever a number.

use std::sync::atomic::{AtomicU16, Ordering};

use super::{Area, RingError};
use crate::memory::{GuestMemory, volatile};

/// A descriptor (`struct virtq_desc`, 2.7.5), copied out of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) flags: u16,
    pub(super) next: u16,
}

impl Descriptor {
    pub(super) const BYTES: usize = 16;

    #[inline]
    pub(super) fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let word = u128::from_le_bytes(bytes);
        Self::from_words(word as u64, (word >> 64) as u64)
    }

    #[inline]
    fn from_words(addr: u64, rest: u64) -> Self {
        Self { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }

    #[inline]
    fn to_words(self) -> (u64, u64) {
        (self.addr, u64::from(self.len) | u64::from(self.flags) << 32 | u64::from(self.next) << 48)
    }
}

/// Finds `len` bytes of `area` at `addr` in `memory`.
pub(super) fn locate(
    memory: &GuestMemory,
    area: Area,
    addr: u64,
    len: usize,
    align: u64,
) -> Result<*mut u8, RingError> {
    let base = memory.slice(addr, len).ok_or(RingError::AreaOutside { area, addr, len })?.base();
    // A region may begin anywhere, so an aligned guest address need not be aligned here, where it matters to us.
    if !addr.is_multiple_of(align) || !(base as u64).is_multiple_of(align) {
        return Err(RingError::Alignment { area, addr, align });
    }
    Ok(base)
}

/// A table of descriptors: a queue's own, or an indirect one.
#[derive(Clone, Copy)]
pub(super) struct Descriptors {
    base: *mut u8,
    len: u32,
}

impl Descriptors {
    /// # Safety
    ///
    /// `memory` must be kept for as long as the table is used.
    pub(super) unsafe fn locate(memory: &GuestMemory, addr: u64, size: u16) -> Result<Self, RingError> {
        let base = locate(memory, Area::Descriptors, addr, Descriptor::BYTES * usize::from(size), 16)?;
        Ok(Self { base, len: u32::from(size) })
    }

    /// A table of `len` descriptors at `base`, aligned or not.
    ///
    /// # Safety
    ///
    /// It must be mapped for as long as the table is used.
    pub(super) unsafe fn at(base: *mut u8, len: u32) -> Self {
        Self { base, len }
    }

    /// Copies a descriptor out, reading each byte once.
    #[inline]
    pub(super) fn get(&self, index: u16) -> Result<Descriptor, RingError> {
        if u32::from(index) >= self.len {
            return Err(RingError::NoSuchDescriptor { index, len: self.len });
        }
        let entry = self.entry(index);
        if !entry.is_aligned() {
            // SAFETY: `entry` is inside the table, and an array of bytes needs no alignment.
            return Ok(Descriptor::from_bytes(unsafe { entry.cast::<[u8; Descriptor::BYTES]>().read_volatile() }));
        }
        // SAFETY: `entry` is inside the table, has two words, and is aligned to them.
        let (addr, rest) = unsafe { (entry.read_volatile(), entry.add(1).read_volatile()) };
        Ok(Descriptor::from_words(u64::from_le(addr), u64::from_le(rest)))
    }

    /// Asks the processor for a descriptor and those after it, up to a line of its cache; nothing happens outside the table.
    #[inline]
    pub(super) fn prefetch(&self, index: u16) {
        if u32::from(index) < self.len {
            volatile::prefetch(self.entry(index).cast());
        }
    }

    /// Stores a descriptor; the driver's half only, whose tables are aligned. Nothing happens outside the table.
    #[inline]
    pub(super) fn set(&self, index: u16, descriptor: Descriptor) {
        let entry = self.entry(index);
        if u32::from(index) < self.len && entry.is_aligned() {
            let (addr, rest) = descriptor.to_words();
            // SAFETY: `entry` is inside the table, has two words, and is aligned to them.
            unsafe {
                entry.write_volatile(addr.to_le());
                entry.add(1).write_volatile(rest.to_le());
            }
        }
    }

    /// Where the descriptor's two words are; good only for an index in the table.
    #[inline]
    fn entry(&self, index: u16) -> *mut u64 {
        self.base.wrapping_add(Descriptor::BYTES * usize::from(index)).cast()
    }
}

/// The available ring (2.7.6): the driver writes, the device reads. Its event is `used_event`, the used index at which the
/// driver wants to be told.
pub(super) type Available = Ring<2>;

/// The used ring (2.7.8): the device writes, the driver reads. Its event is `avail_event`, the available index at which the
/// device wants to be kicked.
pub(super) type UsedRing = Ring<8>;

/// What the two rings have in common: `flags`, `idx`, `size` elements, and the event.
///
/// Invariant: `base` is aligned to 2 and mapped up to and including the event field, or up to it when the queue goes
/// without EVENT_IDX, in which case the event is never touched.
#[derive(Clone, Copy)]
pub(super) struct Ring<const ELEMENT: usize> {
    base: *mut u8,
    mask: u16,
}

impl<const ELEMENT: usize> Ring<ELEMENT> {
    /// Where the elements begin, behind flags and index.
    pub(super) const ELEMENTS: u64 = 4;
    /// How long each is, in bytes.
    pub(super) const ELEMENT: u64 = ELEMENT as u64;

    /// # Safety
    ///
    /// `memory` must be kept for as long as the ring is used, and the event not be used without `event_idx`.
    unsafe fn of(
        memory: &GuestMemory,
        area: Area,
        addr: u64,
        size: u16,
        event_idx: bool,
        align: u64,
    ) -> Result<Self, RingError> {
        let bytes = 4 + ELEMENT * usize::from(size) + if event_idx { 2 } else { 0 };
        Ok(Self { base: locate(memory, area, addr, bytes, align)?, mask: size - 1 })
    }

    #[inline]
    fn field(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers pass the offset of a 16-bit field that the invariant covers, and all of them are even.
        unsafe { AtomicU16::from_ptr(self.base.add(offset).cast()) }
    }

    #[inline]
    fn event_field(&self) -> &AtomicU16 {
        self.field(4 + ELEMENT * (usize::from(self.mask) + 1))
    }

    #[inline]
    fn element_at(&self, index: u16) -> *mut u8 {
        // SAFETY: the masked index is less than the size, and the invariant covers that many elements.
        unsafe { self.base.add(4 + ELEMENT * usize::from(index & self.mask)) }
    }

    #[inline]
    pub(super) fn flags(&self) -> u16 {
        u16::from_le(self.field(0).load(Ordering::Relaxed))
    }

    #[inline]
    pub(super) fn set_flags(&self, flags: u16) {
        self.field(0).store(flags.to_le(), Ordering::Relaxed);
    }

    /// The writer's index. Acquire: what was stored before it is visible with it: elements, and what these are about.
    #[inline]
    pub(super) fn index(&self) -> u16 {
        u16::from_le(self.field(2).load(Ordering::Acquire))
    }

    /// Release: whoever sees the index sees what was stored before.
    #[inline]
    pub(super) fn set_index(&self, index: u16) {
        self.field(2).store(index.to_le(), Ordering::Release);
    }

    /// The other ring's index at which this ring's writer wants to be told.
    #[inline]
    pub(super) fn event(&self) -> u16 {
        u16::from_le(self.event_field().load(Ordering::Relaxed))
    }

    #[inline]
    pub(super) fn set_event(&self, event: u16) {
        self.event_field().store(event.to_le(), Ordering::Relaxed);
    }
}

impl Available {
    /// # Safety
    ///
    /// `memory` must be kept for as long as the ring is used, and the event not be used without `event_idx`.
    pub(super) unsafe fn locate(mem: &GuestMemory, addr: u64, size: u16, event_idx: bool) -> Result<Self, RingError> {
        // SAFETY: the caller's promise.
        unsafe { Self::of(mem, Area::Available, addr, size, event_idx, 2) }
    }

    /// The head at `index`, of whatever value.
    #[inline]
    pub(super) fn head(&self, index: u16) -> u16 {
        // SAFETY: `element_at` is inside the ring, and elements of two bytes behind an even offset are aligned.
        u16::from_le(unsafe { self.element_at(index).cast::<u16>().read_volatile() })
    }

    #[inline]
    pub(super) fn set_head(&self, index: u16, head: u16) {
        // SAFETY: as in `head`.
        unsafe { self.element_at(index).cast::<u16>().write_volatile(head.to_le()) }
    }
}

impl UsedRing {
    /// # Safety
    ///
    /// `memory` must be kept for as long as the ring is used, and the event not be used without `event_idx`.
    pub(super) unsafe fn locate(mem: &GuestMemory, addr: u64, size: u16, event_idx: bool) -> Result<Self, RingError> {
        // SAFETY: the caller's promise.
        unsafe { Self::of(mem, Area::Used, addr, size, event_idx, 4) }
    }

    /// The element at `index`: a chain's head, and how many bytes were written.
    #[inline]
    pub(super) fn element(&self, index: u16) -> (u32, u32) {
        let element = self.element_at(index).cast::<u32>();
        // SAFETY: `element` is inside the ring and has two words; the ring is aligned to 4 and so are they.
        let words = unsafe { (element.read_volatile(), element.add(1).read_volatile()) };
        (u32::from_le(words.0), u32::from_le(words.1))
    }

    #[inline]
    pub(super) fn set_element(&self, index: u16, head: u32, written: u32) {
        let element = self.element_at(index).cast::<u32>();
        // SAFETY: as in `element`.
        unsafe {
            element.write_volatile(head.to_le());
            element.add(1).write_volatile(written.to_le());
        }
    }
}
