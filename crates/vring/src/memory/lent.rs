//! Memory in flight: what a disk moves data to and from, and what keeps it mapped meanwhile.
//!
//! An iovec is an address and a length, and keeps nothing mapped. Safe code may make lists of iovecs, narrow and copy them;
//! what reads or writes through one has to show what keeps it mapped. A [`GuestMemory`](super::GuestMemory) looks whether
//! it holds the iovec, for the time of a call. A disk, which takes longer, takes only [`Lent`] memory:
//!
//! ```text
//!   model ── Buffers ──▶ Queue::lend ── Lent ──▶ the disk's engines ── Lent ──▶ Queue::take_back ── Buffers ──▶ model
//! ```
//!
//! A queue lends only iovecs of its own map, and counts what is lent. While the count is not zero it keeps the map: it
//! accepts no other, and if it is dropped it leaks the map. Lent memory that is dropped is never counted back, which costs
//! address space, but no late transfer can write to what is mapped there next. The count belongs to the queue, so that a
//! request needs no clone, lock or allocation for it.
//!
//! Memory of our own moves into the [`Buffers`], and so into what is lent.
//!
//! Whoever has [`Lent`] memory may have the kernel move data to and from it for as long as it has that, and no longer: it
//! drops it, or gives it back, when the kernel is done.

use std::fmt;
use std::ops::Deref;

use super::IoVec;

/// A list of iovecs for a request to be made with.
#[derive(Default)]
pub struct Buffers {
    iovecs: Vec<IoVec>,
    /// What the one iovec is of, where it is not the guest's. Boxed, because it rarely is.
    own: Option<Box<Own>>,
}

enum Own {
    Bytes(Vec<u8>),
    Pages(Vec<Page>),
}

/// As direct I/O likes memory.
#[derive(Clone, Copy)]
#[repr(align(4096))]
struct Page(#[expect(dead_code, reason = "it is read and written through an iovec")] [u8; PAGE]);

const PAGE: usize = 4096;

impl Buffers {
    /// Whole pages that go along with the list, for requests again and again: [`of_pages`](Lent::of_pages) lends them, and
    /// [`into_pages`](Lent::into_pages) is how they come back. They hold nothing yet.
    pub fn pages() -> Self {
        Self { iovecs: Vec::with_capacity(1), own: Some(Box::new(Own::Pages(Vec::new()))) }
    }

    /// Has the list be the first `len` bytes of its pages, of which there are more from here on if there must be. They
    /// hold what they held.
    ///
    /// # Panics
    ///
    /// If it has no [`pages`](Self::pages).
    pub fn resize(&mut self, len: usize) {
        let Some(Own::Pages(pages)) = self.own.as_deref_mut() else { panic!("the memory is pages of one's own") };
        if pages.len() * PAGE < len {
            pages.resize(len.div_ceil(PAGE), Page([0; PAGE]));
        }
        self.iovecs.clear();
        // SAFETY: the pages stay where they are until they are resized, which makes the iovec anew, and they go where the
        // iovec goes.
        self.iovecs.push(unsafe { IoVec::new(pages.as_mut_ptr().cast(), len) });
    }

    /// What its [`pages`](Self::pages) hold, as far as the list goes.
    pub fn bytes(&self) -> &[u8] {
        match (self.own.as_deref(), self.iovecs.first()) {
            // SAFETY: the iovec is within pages that are this list's own, and nobody writes to them while it is borrowed.
            (Some(Own::Pages(_)), Some(iovec)) => unsafe { std::slice::from_raw_parts(iovec.base(), iovec.len()) },
            _ => &[],
        }
    }

    /// Likewise, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match (self.own.as_deref(), self.iovecs.first()) {
            // SAFETY: as for `bytes`, and nobody else has the list.
            (Some(Own::Pages(_)), Some(iovec)) => unsafe { std::slice::from_raw_parts_mut(iovec.base(), iovec.len()) },
            _ => &mut [],
        }
    }

    /// How many bytes its pages take.
    pub fn capacity(&self) -> usize {
        match self.own.as_deref() {
            Some(Own::Pages(pages)) => pages.capacity() * PAGE,
            _ => 0,
        }
    }

    /// Memory that goes along with the list. It is all of `iovecs` then, whose old content is forgotten.
    pub fn own(mut bytes: Vec<u8>, mut iovecs: Vec<IoVec>) -> Self {
        iovecs.clear();
        // SAFETY: the bytes stay where they are while the vector is not touched, and it goes where the iovec goes.
        iovecs.push(unsafe { IoVec::new(bytes.as_mut_ptr(), bytes.len()) });
        Self { iovecs, own: Some(Box::new(Own::Bytes(bytes))) }
    }

    /// The list, for another request, and the memory that went along.
    #[inline]
    pub fn into_parts(self) -> (Vec<IoVec>, Option<Vec<u8>>) {
        let bytes = self.own.and_then(|own| match *own {
            Own::Bytes(bytes) => Some(bytes),
            Own::Pages(_) => None,
        });
        (self.iovecs, bytes)
    }

    /// Whether the memory goes along with the list.
    #[inline]
    pub fn is_own(&self) -> bool {
        self.own.is_some()
    }
}

impl From<Vec<IoVec>> for Buffers {
    #[inline]
    fn from(iovecs: Vec<IoVec>) -> Self {
        Self { iovecs, own: None }
    }
}

impl Deref for Buffers {
    type Target = [IoVec];

    #[inline]
    fn deref(&self) -> &[IoVec] {
        &self.iovecs
    }
}

impl fmt::Debug for Buffers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iovecs.fmt(f)
    }
}

/// Memory that stays mapped, readable and writable until it has been given back, or dropped. The guest may write to it at
/// any time.
#[derive(Default)]
pub struct Lent {
    buffers: Buffers,
    by: Lender,
}

/// Who counts lent memory, and whether the disk writes to it. One word, because requests are moved about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lender(u64);

impl Lender {
    /// Nobody has to.
    pub(crate) const NOBODY: Self = Self(0);

    /// The queue of this number, which is not 0.
    #[inline]
    pub(crate) const fn queue(number: u64, access: Access) -> Self {
        Self(number << 1 | matches!(access, Access::Write) as u64)
    }

    #[inline]
    pub(crate) const fn is_queue(self, number: u64) -> bool {
        self.0 >> 1 == number
    }

    #[inline]
    pub(crate) const fn writes(self) -> bool {
        self.0 & 1 != 0
    }
}

/// What a disk does to memory that is lent to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Data comes from there.
    Read,
    /// Data goes there.
    Write,
}

impl Lent {
    /// Memory that somebody answers for.
    ///
    /// # Safety
    ///
    /// The iovecs must stay mapped, readable and writable until what this returns is dropped.
    pub unsafe fn assume(iovecs: Vec<IoVec>) -> Self {
        Self { buffers: iovecs.into(), by: Lender::NOBODY }
    }

    /// [`Buffers::pages`], which are lent by nobody: they go along.
    ///
    /// # Panics
    ///
    /// If the list has none, and is not empty.
    pub fn of_pages(buffers: Buffers) -> Self {
        assert!(buffers.is_empty() || matches!(buffers.own.as_deref(), Some(Own::Pages(_))), "its memory goes along");
        Self { buffers, by: Lender::NOBODY }
    }

    /// The pages again, or an empty list if that is not what was lent.
    pub fn into_pages(self) -> Buffers {
        if matches!(self.buffers.own.as_deref(), Some(Own::Pages(_))) { self.buffers } else { Buffers::default() }
    }

    /// What `by` lends, or what answers for itself.
    ///
    /// # Safety
    ///
    /// The iovecs must stay mapped until [`take_back`](Self::take_back) returns them, if they do not belong to `buffers`.
    #[inline]
    pub(crate) unsafe fn new(buffers: Buffers, by: Lender) -> Self {
        Self { buffers, by }
    }

    /// What was lent, and who counts it.
    #[inline]
    pub(crate) fn take_back(self) -> (Buffers, Lender) {
        (self.buffers, self.by)
    }
}

impl Deref for Lent {
    type Target = [IoVec];

    #[inline]
    fn deref(&self) -> &[IoVec] {
        &self.buffers
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.buffers.fmt(f)
    }
}
