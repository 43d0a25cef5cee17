//! What a device writes to an area of its ring, as the dirty log has it.

use std::sync::Arc;

use crate::memory::{DirtyLog, GuestMemory};

/// An area whose writes are noted.
pub(super) struct AreaLog {
    log: Arc<DirtyLog>,
    /// Where the area begins, as the log has it.
    addr: u64,
}

impl AreaLog {
    /// Of an area that begins at `addr`, and notes that `len` bytes from there on have been written.
    pub(super) fn begin(memory: &GuestMemory, addr: u64, len: u64) -> Option<Self> {
        let new = Self { log: Arc::clone(memory.log()?), addr };
        new.mark(0, len);
        Some(new)
    }

    /// Notes that `len` bytes at `offset` have been written.
    #[cold]
    pub(super) fn mark(&self, offset: u64, len: u64) {
        self.log.mark(self.addr.saturating_add(offset), len);
    }

    /// Likewise `count` of the `size` elements of `bytes` bytes that begin at `offset`: from the element `from` on, and
    /// round the ring.
    #[cold]
    pub(super) fn mark_elements(&self, offset: u64, bytes: u64, from: u16, count: u16, size: u16) {
        let before_end = count.min(size - from);
        let [from, before_end, behind] = [from, before_end, count - before_end].map(u64::from);
        self.mark(offset + bytes * from, bytes * before_end);
        self.mark(offset, bytes * behind);
    }
}
