//! What wakes a queue from any thread: for commands that wait for another queue's, and functions that wait for commands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;

use egret_event_loop::{LoopHandle, Source, SourceId};

/// Has a queue dispatched by the loop that it is on. Every stay on a loop has an alarm of its own: one that rings for a
/// queue which has left does nothing, and need do nothing, because a queue is dispatched when it comes to a loop, and
/// looks at what waits.
pub(crate) struct Alarm<S: Source> {
    on: LoopHandle<S>,
    id: SourceId,
    /// It has rung, and the queue has not looked yet. So there is at most one command in the loop's mailbox.
    rung: AtomicBool,
}

impl<S: Source> Alarm<S> {
    pub(crate) fn new(on: LoopHandle<S>, id: SourceId) -> Arc<Self> {
        Arc::new(Self { on, id, rung: AtomicBool::new(false) })
    }

    /// Whether it has rung since the last call. What it rang for must be looked at after this call, not before.
    pub(crate) fn answer(&self) -> bool {
        self.rung.load(Ordering::Relaxed) && self.rung.swap(false, Ordering::AcqRel)
    }
}

impl<S: Source + 'static> Wake for Alarm<S> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // If it has rung already, the queue's next look sees what this thread did before, too: both swaps are of one
        // value, with acquire and release.
        if !self.rung.swap(true, Ordering::AcqRel) {
            let id = self.id;
            self.on.send(move |target| target.wake(id));
        }
    }
}
