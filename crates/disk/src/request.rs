//! What a device model asks of a disk, and what it gets back.

use std::fmt;

/// Names a request to whoever pushed it; engines carry it and never look inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(pub u64);

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fill the buffers from the disk.
    Read,
    /// Write the buffers to the disk.
    Write {
        /// Complete only when the data is on stable storage (force unit access).
        fua: bool,
    },
    /// Complete only when every write that completed before is on stable storage.
    Flush,
    /// The range's content is no longer needed; what it reads as afterwards is undefined.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// The storage behind the range may be given back.
        unmap: bool,
    },
}

/// One piece of a request's memory, usually guest memory: the kernel's `iovec`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct IoVec(libc::iovec);

// SAFETY: an `IoVec` is an address and a length; whoever made it promised (see `IoVec::new`) that the memory stays
// mapped until the request completes, on whichever thread that is.
unsafe impl Send for IoVec {}

impl IoVec {
    /// Describes `len` bytes at `base`.
    ///
    /// # Safety
    ///
    /// The memory must stay mapped, readable and writable until the request that carries this piece has been handed
    /// back in a [`Completion`]. Others (the guest) may write to it at any time: it is never turned into a reference.
    pub const unsafe fn new(base: *mut u8, len: usize) -> Self {
        Self(libc::iovec { iov_base: base.cast(), iov_len: len })
    }

    /// Where the piece begins.
    pub const fn base(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Its length in bytes.
    pub const fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Whether it is of no length.
    pub const fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }
}

impl fmt::Debug for IoVec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}+{}", self.base(), self.len())
    }
}

/// One request to one disk.
///
/// Its buffers travel with it and come back with its [`Completion`], so that a device model that recycles them
/// allocates nothing per request.
#[derive(Debug)]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How much of the disk it touches, in bytes: for `Read` and `Write` the sum of the buffers' lengths, for `Flush`
    /// zero.
    pub len: u64,
    /// The memory to fill or to write; empty for the other operations.
    pub buffers: Vec<IoVec>,
    /// Comes back with the completion.
    pub token: Token,
}

/// A request that has ended.
#[derive(Debug)]
pub struct Completion {
    /// The request's own.
    pub token: Token,
    /// Success, or the error that the guest's status is made from. `Ok` means all of it: a short transfer was
    /// continued or became an error.
    pub result: Result<(), rustix::io::Errno>,
    /// The request's buffers, for use in another.
    pub buffers: Vec<IoVec>,
}
