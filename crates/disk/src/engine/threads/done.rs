//! Jobs on their way back from the workers: a list that the loop takes whole with one atomic exchange, so that a worker
//! that loses its processor at a bad moment holds up nobody, and an eventfd for a loop that sleeps.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

use rustix::io::Errno;

use crate::disk::Disk;
use crate::job::Job;
use crate::sync::{AtomicBool, AtomicPtr, EventNotifier, Ordering, fence};

/// A job, and what is needed to run it, on its way to a worker and back.
pub(super) struct Node {
    /// There is one on the way.
    pub(super) job: Option<Box<Job>>,
    pub(super) disk: *const Disk,
    /// Bytes of it that have been run.
    pub(super) done: u64,
    pub(super) result: Result<(), Errno>,
    /// The next on the list of those that are done.
    next: *mut Node,
}

impl Node {
    pub(super) const fn new(job: Box<Job>, disk: *const Disk) -> Self {
        Self { job: Some(job), disk, done: 0, result: Ok(()), next: ptr::null_mut() }
    }
}

/// A node that the workers have.
pub(super) struct JobPtr(*mut Node);

// SAFETY: a node is used by one thread at a time: the one that took it from the queue or from the list. `Disk` is
// `Sync`, and outlives the node because the engine keeps a disk attached while it has jobs.
unsafe impl Send for JobPtr {}

impl JobPtr {
    pub(super) fn new(node: Box<Node>) -> Self {
        Self(Box::into_raw(node))
    }

    /// The node. The holder of the pointer is its only user.
    pub(super) fn node(&mut self) -> &mut Node {
        // SAFETY: made by `Box::into_raw`, and neither cloned nor copied: who has this has the node.
        unsafe { &mut *self.0 }
    }
}

/// See the module's description.
pub(super) struct DoneList {
    /// The last one that was done; each names the one before.
    newest: AtomicPtr<Node>,
    /// Whether the loop is about to block, and wants to be told of the next one that is done.
    armed: AtomicBool,
    pub(super) event: EventNotifier,
}

impl DoneList {
    /// An empty one, whose event is `event`.
    pub(super) fn new(event: EventNotifier) -> Self {
        Self { newest: AtomicPtr::new(ptr::null_mut()), armed: AtomicBool::new(false), event }
    }

    /// Puts a node on the list, and wakes the loop if it asked for that.
    ///
    /// Nothing is lost: this writes `newest`, fences and reads `armed`; `arm` writes `armed`, fences and reads `newest`.
    /// Of two such sequences at least one sees what the other wrote: either the loop finds the node and does not block,
    /// or the worker finds the flag and writes the event.
    pub(super) fn push(&self, JobPtr(node): JobPtr) {
        let mut newest = self.newest.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node is ours until it is on the list.
            unsafe { (*node).next = newest };
            match self.newest.compare_exchange_weak(newest, node, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => newest = now,
            }
        }
        fence(Ordering::SeqCst);
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::Relaxed) {
            self.event.set();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.newest.load(Ordering::Relaxed).is_null()
    }

    /// Takes all nodes, the oldest first.
    pub(super) fn take(&self, mut each: impl FnMut(Box<Node>)) {
        let mut newest = self.newest.swap(ptr::null_mut(), Ordering::Acquire);
        let mut oldest: *mut Node = ptr::null_mut();
        while !newest.is_null() {
            // SAFETY: the list was taken whole, so its nodes are ours.
            let next = unsafe { std::mem::replace(&mut (*newest).next, oldest) };
            oldest = newest;
            newest = next;
        }
        while !oldest.is_null() {
            // SAFETY: made by `Box::into_raw` in `JobPtr::new`, and taken from the list once.
            let node = unsafe { Box::from_raw(oldest) };
            oldest = node.next;
            each(node);
        }
    }

    /// From here on the next node is announced; false if there are some already.
    pub(super) fn arm(&self) -> bool {
        self.armed.store(true, Ordering::Relaxed);
        // See `push`.
        fence(Ordering::SeqCst);
        self.is_empty()
    }

    pub(super) fn disarm(&self) {
        self.armed.store(false, Ordering::Relaxed);
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}
