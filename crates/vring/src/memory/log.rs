//! The dirty log: which pages of guest memory the device has written to, for a front-end that copies the memory meanwhile.
//!
//! It is a bitmap in memory of the front-end's, with a bit for each page of 4 KiB by its guest address (vhost-user,
//! "Migration"). The device sets bits, after it has written; the front-end takes them, and copies their pages again. So a
//! page that is written while it is copied is copied once more.
//!
//! A log is part of a [`GuestMemory`](super::GuestMemory), so that whoever writes through the map is logged without knowing
//! it. What is left are the fields of a ring, and memory that is lent to a disk: a [`Queue`](crate::ring::Queue) logs both.

use std::fmt;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, Ordering};

use super::mapping::Mapping;
use super::{MemoryError, MemoryRules, Region};

/// What a bit is about, in bytes: `VHOST_LOG_PAGE`.
pub const LOG_PAGE: u64 = 4096;

/// A log, as its front-end has handed it over.
pub struct DirtyLog {
    bits: Mapping,
}

impl DirtyLog {
    /// Maps the log that begins at `offset` in `file` and has `size` bytes. It is under the same `rules` as memory.
    ///
    /// # Errors
    ///
    /// As with a region of guest memory, of which it says that it is at 0.
    pub fn map(file: impl AsFd, offset: u64, size: u64, rules: &MemoryRules) -> Result<Self, MemoryError> {
        let region = Region { guest_addr: 0, size, user_addr: 0, file, offset };
        region.check()?;
        Ok(Self { bits: Mapping::new(region, rules)? })
    }

    /// Up to which guest address it has bits.
    pub fn end(&self) -> u64 {
        self.bits.size.saturating_mul(8 * LOG_PAGE)
    }

    /// Whether the front-end took its memory away.
    pub(super) fn is_truncated(&self) -> bool {
        self.bits.is_truncated()
    }

    /// Notes that the device has written `len` bytes at a guest address. What is behind the end of the log is not noted.
    ///
    /// The bits are set after what was written is visible: who takes them and copies the pages copies that.
    pub(crate) fn mark(&self, guest_addr: u64, len: u64) {
        if len == 0 {
            return;
        }
        let last = guest_addr.saturating_add(len - 1).min(self.end() - 1) / LOG_PAGE;
        let mut page = guest_addr / LOG_PAGE;
        while page <= last {
            let (byte, from) = (page / 8, page % 8);
            let to = (last - byte * 8).min(7);
            // SAFETY: `byte` is no more than that of `last`, which is in the log; a byte is aligned, and all that this
            // process does to it is atomic.
            let bits = unsafe { AtomicU8::from_ptr(self.bits.base().add(byte as usize)) };
            bits.fetch_or(0xff << from & 0xff >> (7 - to), Ordering::Release);
            page = (byte + 1) * 8;
        }
    }
}

impl fmt::Debug for DirtyLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DirtyLog(up to {:#x})", self.end())
    }
}
