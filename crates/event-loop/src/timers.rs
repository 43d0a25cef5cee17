//! Deadlines of sources, the nearest first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use egret_polling::Nanos;

use crate::SourceId;

/// One deadline a source; setting it again replaces it.
///
/// A replaced deadline stays in the heap and is recognised as stale when it comes up, which keeps setting one cheap.
#[derive(Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Nanos, u32, u32)>>,
}

impl Timers {
    pub(crate) fn set(&mut self, id: SourceId, deadline: Nanos) {
        self.heap.push(Reverse((deadline, id.index, id.generation)));
    }

    /// The nearest deadline, which may turn out to be stale.
    pub(crate) fn next(&self) -> Option<Nanos> {
        self.heap.peek().map(|Reverse((deadline, ..))| *deadline)
    }

    /// Takes out one deadline that is over at `now`.
    pub(crate) fn expire(&mut self, now: Nanos) -> Option<(SourceId, Nanos)> {
        let Reverse((deadline, index, generation)) = *self.heap.peek()?;
        (deadline <= now).then(|| {
            self.heap.pop();
            (SourceId { index, generation }, deadline)
        })
    }
}
