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

struct Own(Vec<u8>);

impl Buffers {
    /// Memory that goes along with the list. It is all of `iovecs` then, whose old content is forgotten.
    pub fn own(mut bytes: Vec<u8>, mut iovecs: Vec<IoVec>) -> Self {
        iovecs.clear();
        // SAFETY: the bytes stay where they are while the vector is not touched, and it goes where the iovec goes.
        iovecs.push(unsafe { IoVec::new(bytes.as_mut_ptr(), bytes.len()) });
        Self { iovecs, own: Some(Box::new(Own(bytes))) }
    }

    /// The list, for another request, and the memory that went along.
    #[inline]
    pub fn into_parts(self) -> (Vec<IoVec>, Option<Vec<u8>>) {
        (self.iovecs, self.own.map(|own| own.0))
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
