//! The commands that a queue has in flight, for task management to find.
//!
//! Task management comes in by the control queue, which another thread may run. It neither takes a command away from
//! its queue nor stops a disk operation: it marks the command, whose queue goes no further with it, and waits until it
//! has left, and the driver has been shown that it has. For the queue that is two stores when a command begins and a load
//! and two stores when it ends, to memory that nobody else touches as long as nothing is managed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::LunAddress;
use crate::model::Progress;

/// How a command is told that it was ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abort {
    /// By itself, or with all commands of its logical unit.
    Task = 1,
    /// By a reset.
    Reset = 2,
}

/// One queue's commands, by their heads.
#[derive(Debug)]
pub(super) struct Tasks {
    all: Box<[Task]>,
    pub(super) progress: Arc<Progress>,
}

#[derive(Debug, Default)]
struct Task {
    /// What the driver calls it.
    tag: AtomicU64,
    /// Which of the head's commands it is, in the upper half; the address of its unit in the lower one, or zero when it
    /// is over.
    now: AtomicU64,
    /// The upper half of the one that is to end early; and how.
    abort: AtomicU64,
}

const HALF: u32 = 32;

/// Names a command in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TaskId {
    head: usize,
    count: u64,
}

impl Tasks {
    pub(super) fn new(size: u16) -> Self {
        Self { all: (0..size).map(|_| Task::default()).collect(), progress: Arc::default() }
    }

    /// A command has begun.
    #[inline(always)]
    pub(super) fn begin(&self, head: u16, tag: u64, address: LunAddress) {
        let task = &self.all[usize::from(head)];
        let count = (task.now.load(Ordering::Relaxed) >> HALF) + 1;
        task.tag.store(tag, Ordering::Release);
        task.now.store(count << HALF | u64::from(address.word()), Ordering::Release);
    }

    /// How the command at `head` is to end early, if it is.
    #[inline]
    pub(super) fn aborted(&self, head: u16) -> Option<Abort> {
        let task = &self.all[usize::from(head)];
        let abort = task.abort.load(Ordering::Acquire);
        if abort >> HALF != task.now.load(Ordering::Relaxed) >> HALF {
            return None;
        }
        match abort as u32 {
            0 => None,
            1 => Some(Abort::Task),
            _ => Some(Abort::Reset),
        }
    }

    /// It has ended.
    #[inline]
    pub(super) fn end(&self, head: u16) {
        let now = &self.all[usize::from(head)].now;
        now.store(now.load(Ordering::Relaxed) >> HALF << HALF, Ordering::Release);
    }

    /// The commands in flight that `wanted` names, which is given a tag and the word of a unit's address.
    pub(super) fn find(&self, wanted: impl Fn(u64, u32) -> bool) -> impl Iterator<Item = TaskId> {
        self.all.iter().enumerate().filter_map(move |(head, task)| {
            let now = task.now.load(Ordering::Acquire);
            let tag = task.tag.load(Ordering::Acquire);
            // The tag is another command's if one has begun meanwhile.
            let same = task.now.load(Ordering::Acquire) == now;
            let (count, word) = (now >> HALF, now as u32);
            (word != 0 && same && wanted(tag, word)).then_some(TaskId { head, count })
        })
    }

    /// Has a command end early, if it has not ended.
    pub(super) fn abort(&self, id: TaskId, how: Abort) {
        self.all[id.head].abort.store(id.count << HALF | how as u64, Ordering::Release);
    }

    /// Whether it is still in flight.
    pub(super) fn has(&self, id: TaskId) -> bool {
        let now = self.all[id.head].now.load(Ordering::Acquire);
        now >> HALF == id.count && now as u32 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: LunAddress = LunAddress { target: 1, lun: 2 };

    #[test]
    fn a_command_is_found_until_it_ends_and_only_the_one_that_is_meant_is_aborted() {
        let tasks = Tasks::new(4);
        tasks.begin(2, 77, UNIT);
        let found: Vec<_> = tasks.find(|tag, word| tag == 77 && word == UNIT.word()).collect();
        let [id] = found[..] else { panic!("{found:?}") };
        assert!(tasks.has(id));
        assert_eq!(tasks.aborted(2), None);
        tasks.end(2);
        assert!(!tasks.has(id));
        // Too late: its successor is not meant.
        tasks.abort(id, Abort::Task);
        tasks.begin(2, 78, UNIT);
        assert_eq!(tasks.aborted(2), None);
        let id = tasks.find(|_, _| true).next().unwrap();
        tasks.abort(id, Abort::Reset);
        assert_eq!(tasks.aborted(2), Some(Abort::Reset));
        assert_eq!(tasks.find(|tag, _| tag == 77).count(), 0);
    }
}
