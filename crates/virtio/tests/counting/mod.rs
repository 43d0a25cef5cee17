//! An allocator that counts, for a test that is a process of its own.
#![allow(unreachable_pub, reason = "a test's own module")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

/// How often memory was asked for, since the process began.
pub static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// How often this thread has asked for memory: that of the test harness does so whenever it gets to run.
    pub static ALLOCATIONS_HERE: Cell<usize> = const { Cell::new(0) };
}

/// How much memory there is that was asked for and not given back, in bytes.
pub static LIVE: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        ALLOCATIONS_HERE.set(ALLOCATIONS_HERE.get() + 1);
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is the system allocator's condition.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is the system allocator's condition.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
