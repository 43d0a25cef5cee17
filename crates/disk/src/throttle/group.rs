//! Disks that share limits, and a disk's place among them.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egret_event_loop::Nanos;

use super::limits::Limits;
use super::schedule::{Debt, DiskId, Schedule};

/// Disks that share limits, on however many I/O threads they are.
pub struct ThrottleGroup {
    name: String,
    schedule: Mutex<Schedule>,
}

impl ThrottleGroup {
    /// A group without disks. The limits should be [valid](Limits::check).
    pub fn new(name: impl Into<String>, limits: Limits) -> Arc<Self> {
        Arc::new(Self { name: name.into(), schedule: Mutex::new(Schedule::new(limits)) })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it limits its disks to, together.
    pub fn limits(&self) -> Limits {
        *self.lock().limits()
    }

    /// Limits its disks to something else; what they have done so far counts no more. Loops that run them should
    /// [restart what is throttled](crate::EngineSet::restart_throttled).
    pub fn set_limits(&self, limits: Limits) {
        self.lock().set_limits(limits);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Schedule> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ThrottleGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottleGroup").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A disk's place in a group.
pub(crate) struct ThrottleGroupMember {
    pub(super) group: Arc<ThrottleGroup>,
    pub(super) disk: DiskId,
}

impl Drop for ThrottleGroupMember {
    fn drop(&mut self) {
        self.group.lock().leave(self.disk);
    }
}

/// What limits a disk, if anything.
#[derive(Default)]
pub(crate) struct Throttle {
    /// The number of the last change, and zero while there is no group: all that a disk without limits ever looks at.
    version: AtomicU64,
    /// How often the group has changed, and the place in it.
    changes: Mutex<(u64, Option<Arc<ThrottleGroupMember>>)>,
}

impl Throttle {
    /// Zero where nothing is limited, or else a number for the group that limits it, which it had never before.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Relaxed)
    }

    pub(crate) fn group(&self) -> Option<Arc<ThrottleGroup>> {
        self.lock().1.as_ref().map(|member| Arc::clone(&member.group))
    }

    /// What the disk has begun without its turn, in its present group.
    pub(crate) fn debt(&self, now: Nanos) -> Debt {
        let member = if self.version() == 0 { None } else { self.member() };
        member.map(|(member, _)| member.group.lock().debt(member.disk, now)).unwrap_or_default()
    }

    /// Limits the disk from here on; a group that it is in already keeps it as it is.
    pub(crate) fn set_group(&self, group: Option<&Arc<ThrottleGroup>>) {
        let mut guard = self.lock();
        let (changes, member) = &mut *guard;
        if member.as_ref().map(|now| Arc::as_ptr(&now.group)) == group.map(Arc::as_ptr) {
            return;
        }
        *changes += 1;
        *member =
            group.map(|group| Arc::new(ThrottleGroupMember { group: Arc::clone(group), disk: group.lock().join() }));
        self.version.store(if member.is_some() { *changes } else { 0 }, Ordering::Relaxed);
    }

    /// The disk's place in its group, and the version that it is of; `None` where nothing is limited any more.
    pub(super) fn member(&self) -> Option<(Arc<ThrottleGroupMember>, u64)> {
        let guard = self.lock();
        Some((Arc::clone(guard.1.as_ref()?), guard.0))
    }

    fn lock(&self) -> MutexGuard<'_, (u64, Option<Arc<ThrottleGroupMember>>)> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_in_its_group_until_it_is_in_another_or_gone() {
        let groups = ["one", "other"].map(|name| ThrottleGroup::new(name, Limits::default()));
        let members = || groups.each_ref().map(|group| group.lock().members());
        let throttle = Throttle::default();
        for (group, expected) in
            [(Some(0), [1, 0]), (Some(0), [1, 0]), (Some(1), [0, 1]), (None, [0, 0]), (Some(0), [1, 0])]
        {
            throttle.set_group(group.map(|at: usize| &groups[at]));
            assert_eq!(members(), expected);
        }
        drop(throttle);
        assert_eq!(members(), [0, 0]);
    }
}
