//! What happens when guest memory is not there any more.
//!
//! The file behind a region belongs to the peer as much as to us. A peer that truncates it makes our next access raise
//! SIGBUS, whose default is to end the process and with it every other guest's disk. So a handler, installed with the
//! first region, looks the address up in a table of regions. Inside one, it marks the region as truncated, puts anonymous
//! memory in the place of what is not there, and returns: the access goes through and reads zeroes. The worker sees the mark
//! and breaks the queue. A fault that is nobody's restores whatever was installed before, and happens again.
//!
//! A page alone takes 10 µs. All of the region takes 50 ms for each GiB that has been touched, in which all others that are
//! served by the thread would wait. But each page of its own splits the mapping, and a peer that has us touch every other page
//! would soon have used up the mappings that a process may have (`vm.max_map_count`): the next fault could then not be mended by
//! anybody. So a region has a page replaced for each MiB that it has, and no more than [`MOST_PAGES`], and then it is replaced as
//! a whole, in one mapping. An I/O thread looks for the mark before each chain, and a chain has 1026 pieces at most: one alone does
//! not reach that in a region that is larger than a GiB.
//!
//! The handler may interrupt anything, so it takes no lock and allocates nothing: the table is static and its slots are
//! read as a sequence lock is. A kernel access (the disk reading into the memory) raises no signal; it fails with
//! EFAULT, and the request with it.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// `len` bytes at `start`, mapped in pages of `page` bytes.
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) page: usize,
}

impl Range {
    /// Where the page begins that has `addr`. They follow each other from the start, which is aligned to pages of memory,
    /// but not to the blocks of every file system that says it has large ones.
    fn page_with(self, addr: usize) -> usize {
        addr - (addr - self.start) % self.page
    }
}

/// One watched range of addresses. `sequence` is odd while the other fields change.
struct Slot {
    sequence: AtomicUsize,
    start: AtomicUsize,
    /// Zero when the slot is free.
    len: AtomicUsize,
    page: AtomicUsize,
    truncated: AtomicBool,
    /// For how many faults a page was to be replaced by itself.
    faults: AtomicUsize,
}

impl Slot {
    const fn free() -> Self {
        Self {
            sequence: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            truncated: AtomicBool::new(false),
            faults: AtomicUsize::new(0),
        }
    }

    /// Only under [`WRITERS`].
    fn set(&self, Range { start, len, page }: Range) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        self.truncated.store(false, Ordering::Relaxed);
        self.faults.store(0, Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// The range that the slot watches, if `addr` is in it.
    ///
    /// A slot caught while it changes watches nothing yet, or nothing any more: nobody touches memory whose watch is
    /// being set up or taken down.
    fn range_with(&self, addr: usize) -> Option<Range> {
        let sequence = self.sequence.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        let page = self.page.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        if sequence % 2 == 1 || self.sequence.load(Ordering::Relaxed) != sequence {
            return None;
        }
        addr.checked_sub(start).is_some_and(|offset| offset < len).then_some(Range { start, len, page })
    }

    /// Whether one more page of the range may be replaced by itself.
    fn may_be_split(&self, len: usize) -> bool {
        let most = (len / BYTES_FOR_A_PAGE).min(MOST_PAGES);
        self.faults
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |faults| (faults < most).then_some(faults + 1))
            .is_ok()
            && SPLITS.fetch_add(1, Ordering::Relaxed) < MOST_SPLITS
    }
}

/// A region may have one page replaced by itself for so much of it: to replace all of that takes as long as some faults.
const BYTES_FOR_A_PAGE: usize = 1 << 20;
/// More than the pieces of a chain, and the pages of rings and tables that are read for it.
const MOST_PAGES: usize = 2048;
/// Such pages of all regions. Each is two mappings more; a quarter of what Linux lets a process have by default is for that.
const MOST_SPLITS: usize = 8192;

/// As many as Linux lets a process have mappings, by default. Pages of the table that were never used cost nothing.
const LIMIT: usize = 1 << 16;

static SLOTS: [Slot; LIMIT] = [const { Slot::free() }; LIMIT];
/// Slots at and above this have never been used: what the handler need not look at.
static USED: AtomicUsize = AtomicUsize::new(0);
/// How many pages were to be replaced by themselves, in regions that are watched.
static SPLITS: AtomicUsize = AtomicUsize::new(0);
/// How often memory was found to be gone.
static TRUNCATIONS: AtomicUsize = AtomicUsize::new(0);
/// The slots below [`USED`] that are free. Held by whoever changes a slot; never by the handler.
static WRITERS: Mutex<Vec<usize>> = Mutex::new(Vec::new());
/// The disposition before ours; never freed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

fn writers() -> MutexGuard<'static, Vec<usize>> {
    WRITERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often memory of a region was found to be gone: as long as that is what it was, none has been since.
#[inline]
pub(super) fn truncations() -> usize {
    TRUNCATIONS.load(Ordering::Relaxed)
}

/// A range of addresses whose faults are ours, until dropped.
pub(super) struct Watch {
    at: usize,
}

impl Watch {
    /// How many ranges can be watched at a time.
    pub(super) const LIMIT: usize = LIMIT;

    /// Watches a range, which is whole pages and one mapping. `None` when the table is full.
    ///
    /// # Errors
    ///
    /// The system's refusal to install the handler.
    pub(super) fn new(range: Range) -> io::Result<Option<Self>> {
        install()?;
        let mut free = writers();
        let at = match free.pop() {
            Some(at) => at,
            None => USED.load(Ordering::Relaxed),
        };
        let Some(slot) = SLOTS.get(at) else { return Ok(None) };
        slot.set(range);
        USED.fetch_max(at + 1, Ordering::Release);
        Ok(Some(Self { at }))
    }

    /// Whether any of the range was replaced.
    pub(super) fn is_truncated(&self) -> bool {
        SLOTS[self.at].truncated.load(Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut free = writers();
        SPLITS.fetch_sub(SLOTS[self.at].faults.load(Ordering::Relaxed), Ordering::Relaxed);
        SLOTS[self.at].set(Range { start: 0, len: 0, page: 0 });
        free.push(self.at);
    }
}

/// Installs the handler, once.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        let mut before = MaybeUninit::<libc::sigaction>::uninit();
        // SAFETY: asking for the present disposition; `before` has room for it.
        let got = unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr()) };
        if got != 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
        }
        // SAFETY: filled in by the call that succeeded just above.
        let before = unsafe { before.assume_init() };
        BEFORE.store(Box::into_raw(Box::new(before)), Ordering::Release);

        // SAFETY: a `sigaction` is plain data, and all zeroes is one.
        let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
        ours.sa_sigaction = on_fault as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: `ours` is complete, and `on_fault` does only what a signal handler may.
        match unsafe { libc::sigaction(libc::SIGBUS, &ours, ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL)),
        }
    });
    installed.map_err(io::Error::from_raw_os_error)
}

/// The SIGBUS handler: system calls and atomics, nothing else.
extern "C" fn on_fault(_signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: `errno` is this thread's own, and must be what the interrupted code left there.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes a filled-in `siginfo_t` to a handler installed with SA_SIGINFO.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    // A signal somebody sent (code zero or less) has no address; the sender's pid is in that place.
    let from_access = code > 0;
    if !(from_access && mend(addr)) {
        let before = BEFORE.load(Ordering::Acquire);
        // SAFETY: `before` was filled in before this handler was installed, and is never freed.
        unsafe { libc::sigaction(libc::SIGBUS, before, ptr::null_mut()) };
        if !from_access {
            // The access that faulted will fault again by itself when we return; this one has to be sent again.
            // SAFETY: no memory is involved.
            unsafe { libc::raise(libc::SIGBUS) };
        }
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Puts empty memory where `addr` is, if it is in a watched range; says whether it did.
fn mend(addr: usize) -> bool {
    let used = USED.load(Ordering::Acquire).min(LIMIT);
    let found = SLOTS[..used].iter().find_map(|slot| Some((slot, slot.range_with(addr)?)));
    let Some((slot, range)) = found else { return false };
    // Before the memory is replaced: another thread may read what is there now without a fault, and has to find the mark
    // when it looks afterwards.
    slot.truncated.store(true, Ordering::Relaxed);
    TRUNCATIONS.fetch_add(1, Ordering::Release);
    let replace_page = || replace(range.page_with(addr), range.page);
    // A system that grants memory strictly (`vm.overcommit_memory=2`) counts the whole range, and may refuse it. The page
    // then does for now.
    slot.may_be_split(range.len) && replace_page() || replace(range.start, range.len) || replace_page()
}

/// Puts empty memory in the place of a part of a watched range; says whether it did.
///
/// Two threads may fault in one region at once, and then the second replaces what the first has put there, with what was
/// written to it in between. That belongs to nobody: the guest's memory is gone. To wait for the first one is what a
/// handler must not do; and a fault in what has been replaced already, of failing hardware, is mended like any other.
fn replace(start: usize, len: usize) -> bool {
    let start = start as *mut libc::c_void;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range is mapped by a region and by nothing else, and that stays so: the thread that was interrupted in
    // the middle of an access to it keeps the region alive. `munmap` of the region later unmaps this instead.
    let mapped = unsafe { libc::mmap(start, len, prot, flags, -1, 0) };
    if mapped == libc::MAP_FAILED {
        return false;
    }
    // What little is still written here takes small pages, and is no business of a core dump. Refused, it is no matter.
    // SAFETY: mapped just above; the advice does not touch its content, and each is one system call.
    unsafe {
        libc::madvise(start, len, libc::MADV_NOHUGEPAGE);
        libc::madvise(start, len, libc::MADV_DONTDUMP);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_watches_the_addresses_of_its_range_and_none_while_it_changes() {
        let slot = Slot::free();
        assert!(slot.range_with(0).is_none());
        slot.set(Range { start: 0x5000, len: 0x2000, page: 0x1000 });
        for (addr, is_watched) in [(0x4fff, false), (0x5000, true), (0x6fff, true), (0x7000, false)] {
            assert_eq!(slot.range_with(addr).is_some(), is_watched, "{addr:#x}");
        }
        let Range { start, len, page } = slot.range_with(0x6000).unwrap();
        assert_eq!((start, len, page), (0x5000, 0x2000, 0x1000));
        let sequence = slot.sequence.fetch_add(1, Ordering::Relaxed);
        assert!(slot.range_with(0x6000).is_none(), "who changes it has just begun");
        slot.sequence.store(sequence, Ordering::Relaxed);
        slot.set(Range { start: 0, len: 0, page: 0 });
        assert!(slot.range_with(0).is_none() && slot.range_with(0x6000).is_none());
    }

    #[test]
    fn pages_are_counted_from_where_their_range_starts() {
        let range = Range { start: 0x5000, len: 0x8000, page: 0x4000 };
        for (addr, page) in [(0x5000, 0x5000), (0x8fff, 0x5000), (0x9000, 0x9000), (0xcfff, 0x9000)] {
            assert_eq!(range.page_with(addr), page, "{addr:#x}");
        }
    }
}
