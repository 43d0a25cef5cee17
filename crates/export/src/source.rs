//! What a loop of I/O threads runs: queues of virtual machines, and lanes of NBD clients.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use egret_disk::{Disk, DiskSlot, Ended, EngineSet};
use egret_event_loop::{LoopHandle, Nanos, Signals, Source, SourceId, Turn};
use egret_virtio::DiskKey;

use crate::nbd::Lane;
use crate::worker::{Leave, QueueWorker};

/// What an export has on a loop, owned by that loop.
pub struct Worker(Kind);

#[expect(clippy::large_enum_variant, reason = "queues are what there is most of, and each is in its loop's table")]
enum Kind {
    Queue(QueueWorker),
    Lane(Box<Lane>),
}

/// One of them does it, the one that it is.
macro_rules! either {
    ($of:expr, $worker:ident => $what:expr) => {
        match &mut $of.0 {
            Kind::Queue($worker) => $what,
            Kind::Lane($worker) => $what,
        }
    };
}

impl From<QueueWorker> for Worker {
    fn from(queue: QueueWorker) -> Self {
        Self(Kind::Queue(queue))
    }
}

impl From<Lane> for Worker {
    fn from(lane: Lane) -> Self {
        Self(Kind::Lane(Box::new(lane)))
    }
}

impl Worker {
    /// A virtual machine's queue, if it is one.
    pub(crate) const fn queue(&mut self) -> Option<&mut QueueWorker> {
        match &mut self.0 {
            Kind::Queue(queue) => Some(queue),
            Kind::Lane(_) => None,
        }
    }

    /// What an I/O thread has of an export over NBD, if it is that.
    #[cfg(test)]
    pub(crate) const fn lane(&mut self) -> Option<&mut Lane> {
        match &mut self.0 {
            Kind::Queue(_) => None,
            Kind::Lane(lane) => Some(lane),
        }
    }

    /// Likewise, for good.
    pub(crate) fn into_queue(self) -> Option<QueueWorker> {
        match self.0 {
            Kind::Queue(queue) => Some(queue),
            Kind::Lane(_) => None,
        }
    }

    /// Says which loop it is going to be attached to.
    pub(crate) fn set_home(&mut self, home: LoopHandle<Self>) {
        match &mut self.0 {
            Kind::Queue(queue) => queue.set_home(home),
            Kind::Lane(lane) => lane.set_home(home),
        }
    }

    /// It is going to be drained for good.
    pub(crate) fn leave(&mut self, leave: Leave) {
        match &mut self.0 {
            Kind::Queue(queue) => queue.leave(leave),
            Kind::Lane(_) => {}
        }
    }

    /// No loop has it any more, and nobody serves it until its client stops it: what others wait for it does not do.
    pub(crate) fn strand(&mut self) {
        match &mut self.0 {
            Kind::Queue(queue) => queue.let_go(),
            Kind::Lane(_) => {}
        }
    }

    /// Gives it another disk, which `engines` have at `slot`; returns where the old one was, for them to let go of it.
    pub(crate) fn replace_disk(&mut self, key: DiskKey, disk: Arc<Disk>, slot: DiskSlot) -> Option<DiskSlot> {
        match &mut self.0 {
            Kind::Queue(queue) => queue.replace_disk(key, disk, slot),
            Kind::Lane(lane) => lane.replace_disk(disk, slot),
        }
    }
}

impl Source for Worker {
    type Backend = EngineSet;

    fn route(ended: &Ended) -> u32 {
        ended.completion.token.source()
    }

    fn attached(&mut self, id: SourceId, engines: &mut EngineSet) -> io::Result<()> {
        either!(self, worker => worker.attached(id, engines))
    }

    fn detached(&mut self, engines: &mut EngineSet) {
        either!(self, worker => worker.detached(engines));
    }

    fn poll(&mut self) -> bool {
        either!(self, worker => worker.poll())
    }

    fn sees_all(&self) -> bool {
        match &self.0 {
            Kind::Queue(_) => true,
            // It asks the kernel which of its clients have sent something, when it is dispatched.
            Kind::Lane(_) => false,
        }
    }

    fn dispatch(&mut self, engines: &mut EngineSet, turn: &mut Turn) {
        match &mut self.0 {
            Kind::Queue(queue) => queue.dispatch(engines, turn),
            Kind::Lane(lane) => lane.dispatch(engines, turn.now()),
        }
    }

    fn complete(&mut self, ended: Ended, now: Nanos) -> bool {
        either!(self, worker => worker.complete(ended, now))
    }

    fn notify(&mut self, signals: &mut Signals) {
        match &mut self.0 {
            Kind::Queue(queue) => queue.notify(signals),
            Kind::Lane(lane) => lane.notify(),
        }
    }

    fn suppress(&mut self) {
        match &mut self.0 {
            Kind::Queue(queue) => queue.suppress(),
            // It hears of its clients by its descriptor, whether it is looked at or not.
            Kind::Lane(_) => {}
        }
    }

    fn arm(&mut self) -> bool {
        match &mut self.0 {
            Kind::Queue(queue) => queue.arm(),
            Kind::Lane(lane) => !lane.poll(),
        }
    }

    fn stop(&mut self, engines: &mut EngineSet) {
        either!(self, worker => worker.stop(engines));
    }

    fn resume(&mut self, engines: &mut EngineSet) {
        match &mut self.0 {
            Kind::Queue(queue) => queue.resume_queue(engines),
            Kind::Lane(lane) => lane.resume(engines),
        }
    }

    fn is_drained(&self) -> bool {
        match &self.0 {
            Kind::Queue(queue) => queue.is_drained(),
            Kind::Lane(lane) => lane.is_drained(),
        }
    }

    fn descriptor(&self) -> Option<RawFd> {
        match &self.0 {
            Kind::Queue(queue) => queue.descriptor(),
            Kind::Lane(lane) => Some(lane.descriptor().as_raw_fd()),
        }
    }
}
