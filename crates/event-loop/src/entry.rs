//! One source's place in its loop, and the names by which monitor and policy know it.

use std::os::fd::RawFd;

use egret_polling::{Nanos, Slot};

use crate::Source;
use crate::monitor::Key;
use crate::source::Command;

/// Stands for the mailbox where an index stands for a source.
pub(crate) const MAILBOX: u32 = u32::MAX;
/// Stands for the engines.
pub(crate) const BACKEND: u32 = u32::MAX - 1;
/// A key carries an index and this much of a generation.
pub(crate) const GENERATIONS: u32 = 1 << 24;

/// A source and what its loop knows of it.
pub(crate) struct Entry<S: Source> {
    pub source: S,
    pub fd: Option<RawFd>,
    pub generation: u32,
    /// On the active list.
    pub active: bool,
    /// Its events show on its descriptor, and it had none when it was asked for that.
    pub armed: bool,
    /// Its events may show on its descriptor: nobody has suppressed them since it came, or was armed, with success or not.
    pub may_ring: bool,
    /// On the ready list.
    pub ready: bool,
    /// On the touched list.
    pub touched: bool,
    pub last_event: Nanos,
    pub timer: Option<Nanos>,
    /// Runs when it is drained.
    pub drained: Option<Command<S>>,
}

impl<S: Source> Entry<S> {
    /// Puts the source, which is `index`, on the list of those that are dispatched, and on that of the active ones if
    /// there is work.
    pub(crate) fn mark_ready(&mut self, index: u32, active: &mut Vec<u32>, ready: &mut Vec<u32>) {
        if !self.active && self.source.poll() {
            self.active = true;
            active.push(index);
        }
        if !self.ready {
            self.ready = true;
            ready.push(index);
        }
    }

    /// Likewise one of which the monitor has told. That is an event, unless a look shows that there is nothing.
    pub(crate) fn mark_reported(&mut self, index: u32, active: &mut Vec<u32>, ready: &mut Vec<u32>) {
        if !self.active && !self.source.sees_all() {
            self.active = true;
            active.push(index);
        }
        self.mark_ready(index, active, ready);
    }

    /// Puts the source, which is `index`, on the list of those that notify.
    pub(crate) fn touch(&mut self, index: u32, touched: &mut Vec<u32>) {
        if !self.touched {
            self.touched = true;
            touched.push(index);
        }
    }

    pub(crate) fn suppress(&mut self) {
        if self.may_ring {
            (self.may_ring, self.armed) = (false, false);
            self.source.suppress();
        }
    }

    /// Arms it again after a dispatch, which may have consumed the event that it was armed for.
    pub(crate) fn rearm(&mut self) -> bool {
        self.armed = false;
        self.arm()
    }

    pub(crate) fn arm(&mut self) -> bool {
        if !self.armed {
            self.may_ring = true;
            self.armed = self.source.arm();
        }
        self.armed
    }
}

pub(crate) const fn key(index: u32, generation: u32) -> Key {
    Key(((generation as u64) << 32) | index as u64)
}

pub(crate) const fn backend_key(fd: RawFd) -> Key {
    key(BACKEND, fd.cast_unsigned() % GENERATIONS)
}

/// The policy's name for a source; the engines together are one.
pub(crate) const fn slot(index: u32) -> Slot {
    Slot(if index == BACKEND { 0 } else { index + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_has_another_s_name() {
        assert_ne!(BACKEND, MAILBOX);
        for (index, generation) in [(0, 0), (1, 0), (0, 1), (7, GENERATIONS - 1), (BACKEND, 5), (MAILBOX, 0)] {
            assert_eq!(key(index, generation).0, u64::from(generation) * (1 << 32) + u64::from(index));
        }
        assert_eq!(GENERATIONS, 0x100_0000, "three bytes of a word, whose rest is something else");
        let [first, second] = [backend_key(3).0, backend_key(4).0];
        assert_eq!((first, second), (key(BACKEND, 3).0, key(BACKEND, 4).0));
        assert_eq!(backend_key(0x100_0003).0, first, "no descriptor is so large");
        assert_eq!([BACKEND, 0, 1, 100].map(|index| slot(index).0), [0, 1, 2, 101]);
    }
}
