//! One region's pages in this process.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::ptr::{self, NonNull};

use super::fault::Watch;
use super::{MemoryError, Region};

/// A region, mapped; unmapped when dropped.
pub(super) struct Mapping {
    /// First, and so dropped before the pages are unmapped: the addresses may be somebody else's the moment after.
    watch: Watch,
    pages: Pages,
    /// Where in `pages` the region begins.
    lead: usize,
    pub(super) guest_addr: u64,
    pub(super) size: u64,
    pub(super) user_addr: u64,
}

impl Mapping {
    /// Maps `region`, whose numbers have been checked for overflow. Its file is closed: the mapping is enough.
    pub(super) fn new(region: Region) -> Result<Self, MemoryError> {
        let Region { guest_addr, size, user_addr, file, offset } = region;
        let failed = |what| move |source| MemoryError::System { what, guest_addr, source };

        let about = file.metadata().map_err(failed("look at"))?;
        // A device (DAX) has no length to compare with; mapping it is then what fails.
        let is_device = about.file_type().is_char_device() || about.file_type().is_block_device();
        if !is_device && about.len() < offset + size {
            return Err(MemoryError::ShortFile { guest_addr, needed: offset + size, file: about.len() });
        }

        // Huge pages are mapped and unmapped whole, and a file on hugetlbfs says so in its block size. Elsewhere the
        // block size may be anything, and a power of two below the page size serves nobody.
        let page = page_size();
        let page = match about.blksize() {
            huge if huge > page && huge.is_power_of_two() && huge <= 1 << 34 => huge,
            _ => page,
        };
        let lead = offset % page;
        let len = (lead + size).div_ceil(page).checked_mul(page).and_then(|len| usize::try_from(len).ok());
        let len = len.ok_or(MemoryError::Overflow { guest_addr, size, space: "address space" })?;
        let pages = Pages::map(&file, offset - lead, len).map_err(failed("map"))?;
        let watch = Watch::new(pages.base.as_ptr() as usize, len)
            .map_err(failed("watch"))?
            .ok_or(MemoryError::TooMany { limit: Watch::LIMIT })?;
        Ok(Self { watch, pages, lead: lead as usize, guest_addr, size, user_addr })
    }

    /// Where the region's first byte is.
    pub(super) fn base(&self) -> *mut u8 {
        // SAFETY: `lead` is less than a page, and at least one page is mapped.
        unsafe { self.pages.base.as_ptr().add(self.lead) }
    }

    /// Whether it has been replaced after a SIGBUS.
    pub(super) fn is_torn(&self) -> bool {
        self.watch.is_torn()
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
}

// SAFETY: a mapping is good from any thread; this type only unmaps it.
unsafe impl Send for Pages {}
// SAFETY: as above; a shared reference gives no more than the address.
unsafe impl Sync for Pages {}

impl Pages {
    fn map(file: &impl AsRawFd, offset: u64, len: usize) -> io::Result<Self> {
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
        Ok(Self { base, len })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
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
    // SAFETY: the name is a C string, and no other memory is involved.
    let fd = unsafe { libc::memfd_create(c"egret-guest".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call just above opened it, and nobody else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}
