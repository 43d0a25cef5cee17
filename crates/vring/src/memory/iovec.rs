//! One piece of memory.

use std::fmt;

/// One piece of memory that data is moved to and from, usually guest memory: the kernel's `iovec`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct IoVec(libc::iovec);

// SAFETY: an `IoVec` is an address and a length; whoever made it promised (see `IoVec::new`) that the memory stays
// mapped until the request that carries it has come back, on whichever thread that is.
unsafe impl Send for IoVec {}

impl IoVec {
    /// Describes `len` bytes at `base`.
    ///
    /// # Safety
    ///
    /// The memory must stay mapped, readable and writable until the request that carries this piece has been handed
    /// back. Others (the guest) may write to it at any time: it is never turned into a reference.
    #[inline]
    pub const unsafe fn new(base: *mut u8, len: usize) -> Self {
        Self(libc::iovec { iov_base: base.cast(), iov_len: len })
    }

    /// Where the piece begins.
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
