//! What wakes a queue from any thread: for commands that wait for another queue's, and functions that wait for commands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;

use egret_event_loop::{LoopHandle, Source, SourceId};

/// Has a queue dispatched by the loop that it is on. Every stay on a loop has an alarm of its own: one that rings for a
/// queue which has left does nothing, and need do nothing, because a queue leaves only when nothing of it waits.
pub(crate) struct Alarm<S: Source> {
    on: LoopHandle<S>,
    id: SourceId,
    /// It has rung, and the queue has not looked. So there is one letter to its loop at a time, whatever others do.
    rung: AtomicBool,
}

impl<S: Source> Alarm<S> {
    pub(crate) fn new(on: LoopHandle<S>, id: SourceId) -> Arc<Self> {
        Arc::new(Self { on, id, rung: AtomicBool::new(false) })
    }

    /// Whether it has rung. What is to be seen before the next ringing wakes the queue has to be looked at afterwards.
    pub(crate) fn answer(&self) -> bool {
        self.rung.load(Ordering::Relaxed) && self.rung.swap(false, Ordering::AcqRel)
    }
}

impl<S: Source + 'static> Wake for Alarm<S> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Who finds it rung has what it did before seen by the same look: both are exchanges of one value, and the look
        // is the next one.
        if !self.rung.swap(true, Ordering::AcqRel) {
            let id = self.id;
            self.on.send(move |target| target.wake(id));
        }
    }
}
