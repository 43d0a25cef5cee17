//! Reading and writing guest memory by its addresses and by iovecs.
//!
//! All that this process writes through a map is written here, and so it is logged where there is a log.

use super::{DirtyLog, GuestMemory, IoVec, volatile};

impl GuestMemory {
    /// Copies guest memory at `guest_addr` to `into`. False, and nothing promised of `into`, when it is not all there.
    ///
    /// Allocates only where it lies in more than one region.
    #[inline]
    pub fn read(&self, guest_addr: u64, into: &mut [u8]) -> bool {
        if let Some(iovec) = self.slice(guest_addr, into.len()) {
            // SAFETY: this map has just said that it has the iovec, and keeps it mapped while it is borrowed.
            unsafe { volatile::copy_from(iovec.base(), into) };
            return true;
        }
        let mut iovecs = Vec::new();
        self.iovecs(guest_addr, into.len(), &mut iovecs) && self.gather(&iovecs, into) == into.len()
    }

    /// Copies `bytes` to guest memory at `guest_addr`. False, and nothing written, when it is not all there.
    ///
    /// Allocates only where it lies in more than one region.
    #[inline]
    pub fn write(&self, guest_addr: u64, bytes: &[u8]) -> bool {
        if let Some(iovec) = self.slice(guest_addr, bytes.len()) {
            // SAFETY: this map has just said that it has the iovec.
            unsafe { self.copy_to(iovec.base(), bytes) };
            return true;
        }
        let mut iovecs = Vec::new();
        self.iovecs(guest_addr, bytes.len(), &mut iovecs) && self.scatter(&iovecs, bytes) == bytes.len()
    }

    /// Asks the processor for what is at `guest_addr`, if it is in one of the largest regions.
    #[inline]
    pub(crate) fn prefetch(&self, guest_addr: u64) {
        if let Some(iovec) = self.largest.iter().find_map(|span| span.iovec(guest_addr, 0)) {
            volatile::prefetch(iovec.base());
        }
    }

    /// Whether all of `iovec` is mapped by this map.
    #[inline]
    pub fn holds(&self, iovec: &IoVec) -> bool {
        self.largest.iter().any(|span| span.holds(iovec)) || self.holds_in_a_lesser(iovec)
    }

    fn holds_in_a_lesser(&self, iovec: &IoVec) -> bool {
        let after = self.by_host.partition_point(|span| span.host <= iovec.base());
        after > 0 && self.by_host[after - 1].holds(iovec)
    }

    /// The first `N` words of an iovec, little-endian; `None` if it is shorter, not aligned to them, or not of this map.
    #[inline]
    pub fn words<const N: usize>(&self, iovec: &IoVec) -> Option<[u64; N]> {
        let from = iovec.base().cast::<u64>();
        if iovec.len() < 8 * N || !from.is_aligned() || !self.holds(iovec) {
            return None;
        }
        // SAFETY: this map holds the iovec, of which these words are a part and aligned.
        Some(std::array::from_fn(|at| u64::from_le(unsafe { from.add(at).read_volatile() })))
    }

    /// Copies from the beginning of `iovecs` until `into` is full or they end; returns how many bytes. Stops at an
    /// iovec that is not of this map.
    #[inline]
    pub fn gather(&self, iovecs: &[IoVec], into: &mut [u8]) -> usize {
        // Nearly always the first iovec has all of it.
        if let [iovec, ..] = iovecs
            && into.len() <= iovec.len()
            && self.holds(iovec)
        {
            // SAFETY: this map holds the iovec, and so keeps it mapped while it is borrowed.
            unsafe { volatile::copy_from(iovec.base(), into) };
            return into.len();
        }
        self.gather_after(iovecs, 0, into)
    }

    /// Likewise from behind the first `skip` bytes.
    pub fn gather_after(&self, iovecs: &[IoVec], mut skip: usize, into: &mut [u8]) -> usize {
        let mut done = 0;
        for iovec in iovecs {
            let from = skip.min(iovec.len());
            skip -= from;
            let len = (iovec.len() - from).min(into.len() - done);
            if len == 0 {
                continue;
            }
            if !self.holds(iovec) {
                break;
            }
            // SAFETY: this map holds the iovec, of which these bytes are a part, and so keeps them mapped while it is
            // borrowed.
            unsafe { volatile::copy_from(iovec.base().add(from), &mut into[done..done + len]) };
            done += len;
        }
        done
    }

    /// Copies `bytes` to the beginning of `iovecs` until either ends; returns how many bytes. Stops at an iovec that
    /// is not of this map.
    #[inline]
    pub fn scatter(&self, iovecs: &[IoVec], bytes: &[u8]) -> usize {
        // Nearly always the first iovec has room for all of it.
        if let [iovec, ..] = iovecs
            && bytes.len() <= iovec.len()
            && self.holds(iovec)
        {
            // SAFETY: this map holds the iovec.
            unsafe { self.copy_to(iovec.base(), bytes) };
            return bytes.len();
        }
        self.scatter_after(iovecs, 0, bytes)
    }

    /// Likewise to behind the first `skip` bytes.
    pub fn scatter_after(&self, iovecs: &[IoVec], mut skip: usize, bytes: &[u8]) -> usize {
        let mut done = 0;
        for iovec in iovecs {
            let from = skip.min(iovec.len());
            skip -= from;
            let len = (iovec.len() - from).min(bytes.len() - done);
            if len == 0 {
                continue;
            }
            if !self.holds(iovec) {
                break;
            }
            // SAFETY: this map holds the iovec, of which these bytes are a part.
            unsafe { self.copy_to(iovec.base().add(from), &bytes[done..done + len]) };
            done += len;
        }
        done
    }

    /// Notes that iovecs of this map were written to by somebody else: one branch if there is no log.
    #[inline]
    pub(crate) fn log_written(&self, iovecs: &[IoVec]) {
        if let Some(log) = &self.log {
            iovecs.iter().for_each(|iovec| self.mark(log, iovec.base(), iovec.len()));
        }
    }

    /// Notes that bytes of this map were written to.
    #[cold]
    fn mark(&self, log: &DirtyLog, host: *const u8, len: usize) {
        let after = self.by_host.partition_point(|span| span.host.cast_const() <= host);
        if let Some(span) = after.checked_sub(1).map(|at| self.by_host[at]) {
            log.mark(span.guest + (host as u64 - span.host as u64), len as u64);
        }
    }

    /// Writes to this map. Everything that does goes through here.
    ///
    /// # Safety
    ///
    /// This map must hold that many bytes at `to`.
    #[inline]
    unsafe fn copy_to(&self, to: *mut u8, bytes: &[u8]) {
        // SAFETY: the caller's promise; the map keeps them mapped while it is borrowed.
        unsafe { volatile::copy_to(to, bytes) };
        if let Some(log) = &self.log {
            self.mark(log, to, bytes.len());
        }
    }
}
