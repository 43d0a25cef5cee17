//! What the commands of a queue wait for: scratch memory, and overlapping commands.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use egret_disk::{Request, RequestToken};
use egret_scsi::{DiskOp, MAX_SCRATCH};
use egret_vring::memory::Buffers;

use crate::model::DiskKey;

/// The scratch memory of a device, in bytes. Its queues have equal shares, each of at least one operation's, and of at most
/// [`OPERATIONS`] of the longest operation's: as many as may compare data in one turn.
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
/// This is a quota: [`Command::scratch`](egret_scsi::Command::scratch) allocates, and the step after the operation frees. A
/// queue without such commands has no scratch memory allocated. Operations are served in their order, and a command's next
/// operation queues up again. So each gets its turn: an operation that holds memory waits for nothing but the disk.
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

/// A command that waits for overlapping ones.
pub(super) enum Waiting {
    Begun(RequestToken),
    /// It was suspended, and this is the request that it is to go on with. Few ever are.
    Readmitted(Box<(DiskKey, Request<Buffers>)>),
}

impl Waiting {
    pub(super) fn token(&self) -> &RequestToken {
        match self {
            Self::Begun(token) => token,
            Self::Readmitted(readmitted) => &readmitted.1.token,
        }
    }
}

/// The waker of commands that wait for overlapping ones: it notes that it was woken, and wakes the queue.
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
        // Stored before the wake: the queue reads it afterwards.
        self.rung.store(true, Ordering::Release);
        self.queue.wake_by_ref();
    }
}
