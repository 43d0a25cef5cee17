//! What the commands of a queue wait for: memory of the device's own, and others that are in their way.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use egret_disk::RequestToken;
use egret_scsi::{DiskOp, MAX_SCRATCH};

use crate::model::DiskKey;

/// The scratch memory of a device, in bytes, which its queues have in equal parts; but each has room for one operation,
/// and none for more than [`OPERATIONS`] of the longest, as many as may have something compared in one turn.
const SCRATCH: u64 = 1 << 20;
const OPERATIONS: u64 = 4;

/// An operation that needs scratch memory.
pub(super) struct Needy {
    pub(super) token: RequestToken,
    pub(super) disk: DiskKey,
    pub(super) op: DiskOp,
}

/// The scratch memory of a queue: how much of it is free, and which operations wait for some.
///
/// It is not the memory but the leave to have it, which [`Command::scratch`](egret_scsi::Command::scratch) takes and the
/// step after the operation gives back: a queue without such commands has none. The oldest goes first, and none overtakes it; a command's next operation
/// is at the end again. So whoever waits has its turn: nobody who has memory waits for anything but the disk.
pub(super) struct Scratch {
    pub(super) free: u64,
    pub(super) waiting: VecDeque<Needy>,
}

impl Scratch {
    pub(super) fn new(queues: u16) -> Self {
        let free = (SCRATCH / u64::from(queues)).clamp(MAX_SCRATCH, OPERATIONS * MAX_SCRATCH);
        Self { free, waiting: VecDeque::new() }
    }

    /// Takes memory for the oldest that waits, if there is enough.
    pub(super) fn next(&mut self) -> Option<Needy> {
        self.free = self.free.checked_sub(self.waiting.front()?.op.len)?;
        self.waiting.pop_front()
    }
}

/// What wakes commands that wait for others: says that it was them, and wakes their queue.
pub(super) struct Bell {
    pub(super) rung: AtomicBool,
    pub(super) queue: Waker,
}

impl Bell {
    pub(super) fn new(queue: Waker) -> Arc<Self> {
        Arc::new(Self { rung: AtomicBool::new(false), queue })
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Said first: the queue looks when it has been woken.
        self.rung.store(true, Ordering::Release);
        self.queue.wake_by_ref();
    }
}
