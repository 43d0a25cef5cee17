//! A descriptor chain, followed once and copied out.

use virtio_bindings::bindings::virtio_ring::{VRING_DESC_F_INDIRECT, VRING_DESC_F_NEXT, VRING_DESC_F_WRITE};

use super::area::{Descriptor, Descriptors};
use super::{MAX_INDIRECT, MAX_IOVECS, RingError};
use crate::memory::{GuestMemory, IoVec};

pub(super) const NEXT: u16 = VRING_DESC_F_NEXT as u16;
pub(super) const WRITE: u16 = VRING_DESC_F_WRITE as u16;
pub(super) const INDIRECT: u16 = VRING_DESC_F_INDIRECT as u16;

/// A chain's buffers, in order and without their empty ones. Made once and filled by every
/// [`Queue::pop`](super::Queue::pop).
///
/// The iovecs are good while the queue that filled it keeps its memory, which it does until the chain is used.
#[derive(Debug, Default)]
pub struct Chain {
    pub(super) head: u16,
    pub(super) readable: Vec<IoVec>,
    pub(super) writable: Vec<IoVec>,
    /// The sums of the iovecs' lengths, as they were popped.
    pub(super) readable_len: u32,
    pub(super) writable_len: u32,
    /// How many descriptors were followed, those without a buffer too.
    descriptors: u32,
}

impl Chain {
    /// An empty one, to be filled.
    pub fn new() -> Self {
        Self::default()
    }

    /// The index of its first descriptor, or its buffer ID in a packed ring: its name until it is used.
    #[inline]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// What the device may read. A buffer that lies in two adjacent regions is two iovecs.
    #[inline]
    pub fn readable(&self) -> &[IoVec] {
        &self.readable
    }

    /// What the device may write.
    #[inline]
    pub fn writable(&self) -> &[IoVec] {
        &self.writable
    }

    /// What the device may write, for a device model that takes the list, or narrows it.
    #[inline]
    pub fn writable_mut(&mut self) -> &mut Vec<IoVec> {
        &mut self.writable
    }

    /// How many bytes the device may read, in the chain as it was popped.
    #[inline]
    pub fn readable_len(&self) -> u32 {
        self.readable_len
    }

    /// How many bytes the device may write, in the chain as it was popped.
    #[inline]
    pub fn writable_len(&self) -> u32 {
        self.writable_len
    }

    /// How many iovecs of guest memory it has.
    #[inline]
    pub fn iovecs(&self) -> u32 {
        (self.readable.len() + self.writable.len()) as u32
    }

    /// How much there was to follow: descriptors, of which those of no length add no iovec, or iovecs, whichever are more.
    #[inline]
    pub fn steps(&self) -> u32 {
        self.descriptors.max(self.iovecs())
    }

    /// How many bytes the iovecs have.
    #[inline]
    pub fn bytes(&self) -> u64 {
        u64::from(self.readable_len) + u64::from(self.writable_len)
    }

    pub(super) fn reset(&mut self, head: u16) {
        self.head = head;
        self.readable.clear();
        self.writable.clear();
        self.readable_len = 0;
        self.writable_len = 0;
        self.descriptors = 0;
    }

    /// Adds one buffer. Inline always: left to itself, the compiler calls it for each descriptor of either layout.
    #[inline(always)]
    fn push(&mut self, descriptor: Descriptor, memory: &GuestMemory) -> Result<(), RingError> {
        let Descriptor { addr, len, .. } = descriptor;
        let (iovecs, sum) = if descriptor.flags & WRITE != 0 {
            (&mut self.writable, &mut self.writable_len)
        } else if self.writable_len > 0 {
            return Err(RingError::ReadableAfterWritable);
        } else {
            (&mut self.readable, &mut self.readable_len)
        };
        if len > 0 && !memory.iovecs(addr, len as usize, iovecs) {
            return Err(RingError::BufferOutside { addr, len });
        }
        *sum = sum.checked_add(len).ok_or(RingError::TooMuch)?;
        // Checked after each descriptor, which adds at most as many iovecs as there are regions. So a chain exceeds the limit
        // by one descriptor's iovecs at most.
        match self.iovecs() {
            0..=MAX_IOVECS => Ok(()),
            iovecs => Err(RingError::TooManyIoVecs { iovecs }),
        }
    }

    /// Fills the chain from the one that begins at its head in `ring`.
    #[inline]
    pub(super) fn follow(&mut self, ring: &Descriptors, size: u16, memory: &GuestMemory) -> Result<(), RingError> {
        self.follow_through(|index| ring.get(index), size, memory, |descriptor, _, _| descriptor)
    }

    /// Fills the chain from the one that begins at its head in a ring of `size` descriptors, which `get` reads.
    ///
    /// `in_table` makes what a split ring would have of a descriptor of an indirect table, its index there, and how many
    /// there are.
    #[inline]
    pub(super) fn follow_through(
        &mut self,
        get: impl FnMut(u16) -> Result<Descriptor, RingError>,
        size: u16,
        memory: &GuestMemory,
        in_table: impl Fn(Descriptor, u16, u32) -> Descriptor,
    ) -> Result<(), RingError> {
        if let Some(indirect) = self.follow_table(get, self.head, u32::from(size), memory)? {
            self.follow_indirect(indirect, memory, in_table)?;
        }
        // A driver adds no chain longer than 2^32 bytes, and `written` has to fit its 32 bits.
        self.readable_len.checked_add(self.writable_len).ok_or(RingError::TooMuch)?;
        Ok(())
    }

    /// Follows one table from `index` until the chain ends or an indirect descriptor takes it elsewhere.
    #[inline]
    fn follow_table(
        &mut self,
        mut get: impl FnMut(u16) -> Result<Descriptor, RingError>,
        mut index: u16,
        limit: u32,
        memory: &GuestMemory,
    ) -> Result<Option<Descriptor>, RingError> {
        for _ in 0..limit {
            let descriptor = get(index)?;
            self.descriptors += 1;
            if descriptor.flags & INDIRECT != 0 {
                return match descriptor.flags & NEXT {
                    0 => Ok(Some(descriptor)),
                    _ => Err(RingError::IndirectWithNext),
                };
            }
            self.push(descriptor, memory)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(None);
            }
            index = descriptor.next;
        }
        Err(RingError::TooLong { limit })
    }

    /// Follows an indirect table from its beginning (2.7.5.3).
    fn follow_indirect(
        &mut self,
        indirect: Descriptor,
        memory: &GuestMemory,
        in_table: impl Fn(Descriptor, u16, u32) -> Descriptor,
    ) -> Result<(), RingError> {
        let Descriptor { addr, len, .. } = indirect;
        let entries = len / Descriptor::BYTES as u32;
        if !len.is_multiple_of(Descriptor::BYTES as u32) || !(1..=u32::from(u16::MAX)).contains(&entries) {
            return Err(RingError::TableLength(len));
        }
        let limit = entries.min(u32::from(MAX_INDIRECT));
        let nested = match memory.slice(addr, len as usize) {
            Some(table) => {
                // SAFETY: the iovec is `entries` descriptors long, and `memory` is borrowed for longer than `table` is
                // used.
                let table = unsafe { Descriptors::at(table.base(), entries) };
                let get = |index| Ok(in_table(table.get(index)?, index, entries));
                self.follow_table(get, 0, limit, memory)?
            }
            None => {
                let get = |index| Ok(in_table(scattered(indirect, index, memory)?, index, entries));
                self.follow_table(get, 0, limit, memory)?
            }
        };
        nested.map_or(Ok(()), |_| Err(RingError::IndirectInIndirect))
    }
}

/// Reads a descriptor from an indirect table that lies in several regions, or outside all.
#[cold]
fn scattered(table: Descriptor, index: u16, memory: &GuestMemory) -> Result<Descriptor, RingError> {
    let Descriptor { addr, len, .. } = table;
    let offset = u64::from(index) * Descriptor::BYTES as u64;
    if offset >= u64::from(len) {
        return Err(RingError::NoSuchDescriptor { index, len: len / Descriptor::BYTES as u32 });
    }
    let mut bytes = [0; Descriptor::BYTES];
    match addr.checked_add(offset).is_some_and(|at| memory.read(at, &mut bytes)) {
        true => Ok(Descriptor::from_bytes(bytes)),
        false => Err(RingError::TableOutside { addr, len }),
    }
}
