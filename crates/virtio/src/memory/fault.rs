//! What happens when guest memory is not there any more.
//!
//! The file behind a region belongs to the peer as much as to us. A peer that truncates it makes our next access raise
//! SIGBUS, whose default is to end the process and with it every other guest's disk. So a handler, installed with the
//! first region, looks the address up in a table of regions. Inside one, it maps an anonymous page there, marks the
//! region as torn and returns: the access goes through and reads zeroes. The worker sees the mark and ends the session.
//! A fault that is nobody's restores whatever was installed before, and happens again.
//!
//! The handler may interrupt anything, so it takes no lock and allocates nothing: the table is static and its slots are
//! read as a sequence lock is. A kernel access (the disk reading into the memory) raises no signal; it fails with
//! EFAULT, and the request with it.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};

/// One watched range of addresses. `sequence` is odd while the other fields change.
struct Slot {
    sequence: AtomicUsize,
    start: AtomicUsize,
    /// Zero when the slot is free.
    len: AtomicUsize,
    page: AtomicUsize,
    torn: AtomicBool,
}

impl Slot {
    const fn free() -> Self {
        Self {
            sequence: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            torn: AtomicBool::new(false),
        }
    }

    /// Only under [`WRITERS`].
    fn set(&self, start: usize, len: usize, page: usize) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(start, Ordering::Relaxed);
        self.len.store(len, Ordering::Relaxed);
        self.page.store(page, Ordering::Relaxed);
        self.torn.store(false, Ordering::Relaxed);
        self.sequence.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// The page that `addr` is on, as address and length, if the slot watches it.
    ///
    /// A slot caught while it changes watches nothing yet, or nothing any more: nobody touches memory whose watch is
    /// being set up or taken down.
    fn page_of(&self, addr: usize) -> Option<(usize, usize)> {
        let sequence = self.sequence.load(Ordering::Acquire);
        let start = self.start.load(Ordering::Relaxed);
        let len = self.len.load(Ordering::Relaxed);
        let page = self.page.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        if sequence % 2 == 1 || self.sequence.load(Ordering::Relaxed) != sequence {
            return None;
        }
        let offset = addr.checked_sub(start).filter(|&offset| offset < len)?;
        Some((start + (offset - offset % page), page))
    }
}

const LIMIT: usize = 8192;

static SLOTS: [Slot; LIMIT] = [const { Slot::free() }; LIMIT];
/// Slots at and above this have never been used: what the handler need not look at.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Whether any region was ever torn.
static TORN: AtomicBool = AtomicBool::new(false);
/// Held by whoever changes a slot; never by the handler.
static WRITERS: Mutex<()> = Mutex::new(());
/// The disposition before ours; never freed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

/// Whether any region of the process was ever torn.
#[inline]
pub(super) fn any() -> bool {
    TORN.load(Ordering::Relaxed)
}

/// A range of addresses whose faults are ours, until dropped.
pub(super) struct Watch {
    slot: &'static Slot,
}

impl Watch {
    /// How many ranges can be watched at a time.
    pub(super) const LIMIT: usize = LIMIT;

    /// Watches `len` bytes at `start`, mapped in pages of `page` bytes. `None` when the table is full.
    ///
    /// # Errors
    ///
    /// The system's refusal to install the handler.
    pub(super) fn new(start: usize, len: usize, page: usize) -> io::Result<Option<Self>> {
        install()?;
        let _writer = WRITERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let Some(at) = SLOTS.iter().position(|slot| slot.len.load(Ordering::Relaxed) == 0) else { return Ok(None) };
        SLOTS[at].set(start, len, page);
        USED.fetch_max(at + 1, Ordering::Release);
        Ok(Some(Self { slot: &SLOTS[at] }))
    }

    /// Whether a page of the range was replaced.
    pub(super) fn is_torn(&self) -> bool {
        self.slot.torn.load(Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _writer = WRITERS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        self.slot.set(0, 0, 0);
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

/// Puts an empty page where `addr` is, if that is in a watched range; says whether it did.
fn mend(addr: usize) -> bool {
    let used = USED.load(Ordering::Acquire).min(LIMIT);
    for slot in &SLOTS[..used] {
        let Some((page, len)) = slot.page_of(addr) else { continue };
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: the page is inside a range that is mapped by a region and by nothing else, and that stays so: the
        // thread that was interrupted in the middle of an access to it keeps the region alive.
        let mapped = unsafe { libc::mmap(page as *mut libc::c_void, len, prot, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return false;
        }
        slot.torn.store(true, Ordering::Relaxed);
        TORN.store(true, Ordering::Relaxed);
        return true;
    }
    false
}
