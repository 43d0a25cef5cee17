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

    /// Forgets the deadlines of a source that leaves: one that comes and goes would have one more each time, for as long as they
    /// are away.
    pub(crate) fn forget(&mut self, id: SourceId) {
        self.heap.retain(|Reverse((_, index, _))| *index != id.index);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bell::{Bell, Echo, bell, options};
    use crate::{EventLoop, LoopHandle, MonitorChoice};

    #[test]
    fn sources_that_come_and_go_leave_no_deadlines_behind_and_others_keep_theirs() {
        let mut target = EventLoop::new(options(MonitorChoice::Auto, Nanos::ZERO), |_ring| Echo::default()).unwrap();
        let handle = LoopHandle::new(&target);
        let attach = |target: &mut EventLoop<Bell>| {
            let (mut bell, ..) = bell();
            bell.act = Some(Box::new(|turn| turn.set_timer(turn.now() + Nanos::from_millis(3_600_000))));
            let id = target.attach(bell).map_err(|(_, e)| e).unwrap();
            target.turn().unwrap();
            id
        };
        attach(&mut target);
        for _ in 0..100 {
            let id = attach(&mut target);
            assert_eq!(target.timers.heap.len(), 2);
            handle.send(move |target| target.detach(id, drop));
            target.turn().unwrap();
        }
        assert_eq!(target.timers.heap.len(), 1);
    }
}
