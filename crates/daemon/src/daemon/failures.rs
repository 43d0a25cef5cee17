//! What disks could not do, told to monitors: of each disk the first failure, and then the newest once a second.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use egret_disk::{Failure, Op};
use egret_event_loop::EventNotifier;
use egret_vocabulary::schema::Export;

use super::Daemon;

/// The least time between two failures of one disk that are told, as in QEMU.
const REST: Duration = Duration::from_secs(1);

/// A request that failed in a disk's engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskFailure {
    /// The blockdev.
    pub node_name: String,
    /// The export that has it, if it is only one.
    pub export: Option<String>,
    /// What failed.
    pub failure: Failure,
    /// Whether the page cache has lost writes.
    pub has_lost_writes: bool,
}

impl DiskFailure {
    /// What follows from it, if anything does, to be added to what the system says.
    pub const fn consequence(&self) -> &'static str {
        if self.has_lost_writes { "; writes may be lost, so no flush succeeds before blockdev-reopen" } else { "" }
    }
}

/// One line for the log.
impl fmt::Display for DiskFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.failure.op {
            Op::Read => "read",
            Op::Write { .. } => "write",
            Op::Flush => "flush",
            Op::Discard => "discard",
            Op::WriteZeroes { .. } => "write of zeroes",
        };
        let (why, consequence) = (io::Error::from(self.failure.errno), self.consequence());
        write!(f, "blockdev '{}': a {what} failed: {why}{consequence}", self.node_name)
    }
}

/// What is known of failures.
pub(super) struct Failures {
    bell: EventNotifier,
    /// When each disk may be told of again, of those that were told of less than a second ago.
    resting: BTreeMap<String, Instant>,
}

impl Failures {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { bell: EventNotifier::new()?, resting: BTreeMap::new() })
    }

    pub(super) const fn bell(&self) -> &EventNotifier {
        &self.bell
    }
}

impl Daemon {
    /// Readable when [`failures`](Self::failures) may have news.
    pub fn failures_bell(&self) -> BorrowedFd<'_> {
        self.failures.bell.as_fd()
    }

    /// When [`failures`](Self::failures) should be asked again without the bell: a disk that is not to be told of yet
    /// may have failed meanwhile.
    pub fn failures_due(&self) -> Option<Instant> {
        self.failures.resting.values().min().copied()
    }

    /// The failures that are to be told at `now`; a disk's newest waits until it is a second after the one before.
    pub fn failures(&mut self, now: Instant) -> Vec<DiskFailure> {
        self.failures.bell.clear();
        self.failures.resting.retain(|_, end| *end > now);
        let mut told = Vec::new();
        for (name, disk) in &self.disks {
            if self.failures.resting.contains_key(name) {
                continue;
            }
            let Some(failure) = disk.take_failure() else { continue };
            self.failures.resting.insert(name.clone(), now + REST);
            let mut exports = self.config.exports.iter().filter(|export| export.has_node(name));
            let export = match (exports.next(), exports.next()) {
                (Some(Export { id, .. }), None) => Some(id.clone()),
                _ => None,
            };
            let has_lost_writes = disk.has_lost_writes();
            told.push(DiskFailure { node_name: name.clone(), export, failure, has_lost_writes });
        }
        told
    }
}
