//! One region's pages in this process.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{FileType, MemfdFlags, fcntl_get_seals, fstat, memfd_create};

use super::budget::Charge;
use super::fault::{Range, Watch};
use super::{MemoryError, MemoryFiles, MemoryRules, Region};

/// A region, mapped; unmapped when dropped.
pub(super) struct Mapping {
    /// First, and so dropped before the pages are unmapped: the addresses may be somebody else's the moment after.
    watch: Option<Watch>,
    pages: Pages,
    /// Behind the pages: what they took is given back when they are gone.
    _charge: Option<Charge>,
    /// Where in `pages` the region begins.
    lead: usize,
    pub(super) guest_addr: u64,
    pub(super) size: u64,
    pub(super) user_addr: u64,
}

impl Mapping {
    /// Maps `region`, whose numbers have been checked for overflow.
    pub(super) fn new<F: AsFd>(region: Region<F>, rules: &MemoryRules) -> Result<Self, MemoryError> {
        let Region { guest_addr, size, user_addr, ref file, offset } = region;
        let file = file.as_fd();
        let failed = |what| move |source| MemoryError::System { what, guest_addr, source };

        // First of all that is done with a peer's file. Seals are what shared memory has and nothing else, and the kernel
        // tells of them without asking the file system. Even `fstat` asks, and a server of FUSE or NFS may never answer.
        if rules.files == MemoryFiles::SharedMemory && fcntl_get_seals(file).is_err() {
            return Err(MemoryError::NotShared { guest_addr });
        }
        let about = fstat(file).map_err(|e| failed("look at")(e.into()))?;
        // A device (DAX) has no length to compare with; mapping it is then what fails.
        let is_device =
            matches!(FileType::from_raw_mode(about.st_mode), FileType::CharacterDevice | FileType::BlockDevice);
        let file_len = u64::try_from(about.st_size).unwrap_or(0);
        if !is_device && file_len < offset + size {
            return Err(MemoryError::ShortFile { guest_addr, needed: offset + size, file: file_len });
        }

        // Huge pages are mapped and unmapped whole, and a file on hugetlbfs says so in its block size. Elsewhere the
        // block size may be anything, and a power of two below the page size serves nobody.
        let page = page_size();
        let page = match u64::try_from(about.st_blksize).unwrap_or(0) {
            huge if huge > page && huge.is_power_of_two() && huge <= 1 << 34 => huge,
            _ => page,
        };
        let lead = offset % page;
        let len = (lead + size).div_ceil(page).checked_mul(page).and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or(MemoryError::Overflow { guest_addr, size, space: "address space" })?;
        let charge = rules.budget.as_ref().map(|budget| budget.charge(len as u64)).transpose();
        let charge = charge.map_err(|why| MemoryError::OverBudget { guest_addr, why })?;
        let pages = Pages::map(file, offset - lead, len).map_err(failed("map"))?;
        let watch = Watch::new(Range { start: pages.base.as_ptr() as usize, len, page: page as usize })
            .map_err(failed("watch"))?
            .ok_or(MemoryError::TooMany { limit: Watch::LIMIT })?;
        Ok(Self { watch: Some(watch), pages, _charge: charge, lead: lead as usize, guest_addr, size, user_addr })
    }

    /// `size` bytes of this process's own, which nobody takes away.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn allocated(guest_addr: u64, size: u64) -> Self {
        let pages = Pages::allocate(size as usize);
        Self { watch: None, pages, _charge: None, lead: 0, guest_addr, size, user_addr: guest_addr }
    }

    /// Where the region's first byte is.
    pub(super) fn base(&self) -> *mut u8 {
        // SAFETY: `lead` is less than a page, and at least one page is mapped.
        unsafe { self.pages.base.as_ptr().add(self.lead) }
    }

    /// Whether it has been replaced after a SIGBUS.
    pub(super) fn is_truncated(&self) -> bool {
        self.watch.as_ref().is_some_and(Watch::is_truncated)
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x} (user {:#x}) at {:p}", self.guest_addr, self.size, self.user_addr, self.base())
    }
}

/// `len` bytes of address space that belong to nobody else in this process.
struct Pages {
    base: NonNull<u8>,
    len: usize,
    /// It is an allocation, and no mapping.
    #[cfg(any(test, feature = "testing"))]
    is_allocated: bool,
}

// SAFETY: a mapping is good from any thread; this type only unmaps it.
unsafe impl Send for Pages {}
// SAFETY: as above; a shared reference gives no more than the address.
unsafe impl Sync for Pages {}

impl Pages {
    fn map(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        // SAFETY: a mapping at an address of the kernel's choice disturbs no other memory of the process.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, file.as_raw_fd(), offset as libc::off_t) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A core dump of the daemon is about the daemon. Refused for some files, and no matter then.
        // SAFETY: `len` bytes at `base` were mapped just above; the advice does not touch their content.
        unsafe { libc::madvise(base, len, libc::MADV_DONTDUMP) };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self {
            base,
            len,
            #[cfg(any(test, feature = "testing"))]
            is_allocated: false,
        })
    }

    #[cfg(any(test, feature = "testing"))]
    fn allocate(len: usize) -> Self {
        // SAFETY: the layout is not of size zero.
        let base = unsafe { std::alloc::alloc_zeroed(Self::layout(len)) };
        Self { base: NonNull::new(base).expect("there is memory"), len, is_allocated: true }
    }

    #[cfg(any(test, feature = "testing"))]
    fn layout(len: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len.max(1), 4096).expect("a page is a power of two")
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        #[cfg(any(test, feature = "testing"))]
        if self.is_allocated {
            // SAFETY: allocated by `allocate` with this layout; otherwise as below.
            return unsafe { std::alloc::dealloc(self.base.as_ptr(), Self::layout(self.len)) };
        }
        // SAFETY: mapped by `map` and nobody else's; a `Mapping` goes with the last map that holds it, and pieces of it
        // are kept only by those that keep such a map.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn page_size() -> u64 {
    // SAFETY: no memory is involved.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

/// A file of memory, of no length yet.
pub(super) fn memfd() -> io::Result<File> {
    Ok(File::from(memfd_create("egret-guest", MemfdFlags::CLOEXEC)?))
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    /// Most files say themselves how large their pages are. Where one does not, nothing else is looked at.
    #[test]
    fn the_system_says_how_large_a_page_is() {
        let page = page_size();
        assert!(page.is_power_of_two() && page >= 4096, "{page}");
    }
}
