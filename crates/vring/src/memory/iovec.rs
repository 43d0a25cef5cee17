//! One piece of memory.

use std::fmt;

/// One piece of memory that data is moved to and from, usually guest memory: the kernel's `iovec`.
///
/// It keeps nothing mapped. What moves data by it looks whether a map [holds](super::GuestMemory::holds) it, or has it
/// [lent](super::Lent).
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct IoVec(libc::iovec);

// SAFETY: an `IoVec` is an address and a length; what moves data by it knows from elsewhere that it is mapped, on
// whichever thread that is.
unsafe impl Send for IoVec {}

impl IoVec {
    /// Describes `len` bytes at `base`.
    ///
    /// # Safety
    ///
    /// The memory must be mapped, readable and writable whenever data is moved by the iovec. Others (the guest) may write
    /// to it at any time: it is never turned into a reference.
    #[inline]
    pub const unsafe fn new(base: *mut u8, len: usize) -> Self {
        Self(libc::iovec { iov_base: base.cast(), iov_len: len })
    }

    /// Where the iovec begins.
    #[inline]
    pub const fn base(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Its length in bytes.
    #[inline]
    pub const fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Whether it is of no length.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }
}

impl fmt::Debug for IoVec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}+{}", self.base(), self.len())
    }
}
