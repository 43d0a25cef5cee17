//! What disks could not do, told to monitors: of each disk of each export the first failure, and then the newest once a
//! second.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use egret_disk::{Action, Failure, Op};
use egret_event_loop::{EventNotifier, Nanos};
use egret_export::{Export, is_nospace};

use super::Daemon;

/// The least time between two failures of one disk of an export that are told, as in QEMU.
const REST: Duration = Duration::from_secs(1);

/// A request that failed in a disk's engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskFailure {
    /// The blockdev.
    pub node_name: String,
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

    fn action(&self) -> String {
        match self.failure.action {
            Action::Report => String::new(),
            Action::Ignore => "; the guest is told that it succeeded".to_owned(),
            Action::Stop if is_nospace(self.failure.errno) => {
                format!("; export '{}' waits for space, or block-export-resume", self.failure.export)
            }
            Action::Stop => format!("; export '{}' waits for block-export-resume", self.failure.export),
        }
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
        write!(f, "blockdev '{}': a {what} failed: {why}{consequence}{}", self.node_name, self.action())
    }
}

/// Requests that take longer than their export's `request-timeout`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestTimeout {
    /// The export.
    pub export: String,
    /// How many requests.
    pub requests: u64,
    /// For how long the oldest has been in flight.
    pub oldest: Nanos,
}

/// One line for the log.
impl fmt::Display for RequestTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { export, requests, oldest } = self;
        let seconds = Duration::from(*oldest).as_secs_f64();
        write!(f, "export '{export}': {requests} requests do not end, the oldest for {seconds:.1} s")
    }
}

/// What is known of failures.
pub(super) struct Failures {
    bell: EventNotifier,
    /// When each disk of an export may be told of again, of those that were told of less than a second ago.
    resting: BTreeMap<(String, Arc<str>), Instant>,
    /// What is to be told then: of each the newest.
    later: BTreeMap<(String, Arc<str>), Failure>,
}

impl Failures {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { bell: EventNotifier::new()?, resting: BTreeMap::new(), later: BTreeMap::new() })
    }

    pub(super) const fn bell(&self) -> &EventNotifier {
        &self.bell
    }
}

impl Daemon {
    /// The exports that have requests that are overdue, since this was last asked.
    pub fn request_timeouts(&self) -> Vec<RequestTimeout> {
        let told = |(id, export): (&String, &Export)| {
            let oldest = export.errors().take_overdue()?;
            Some(RequestTimeout { export: id.clone(), requests: export.stats().overdue, oldest })
        };
        self.exports.iter().filter_map(told).collect()
    }

    /// Readable when [`failures`](Self::failures) or [`request_timeouts`](Self::request_timeouts) may have news.
    pub fn failures_bell(&self) -> BorrowedFd<'_> {
        self.failures.bell.as_fd()
    }

    /// When [`failures`](Self::failures) should be asked again without the bell: a disk that is not to be told of yet
    /// may have failed meanwhile.
    pub fn failures_due(&self) -> Option<Instant> {
        self.failures.resting.values().min().copied()
    }

    /// The failures that are to be told at `now`; a disk's newest waits until it is a second after the one before. That
    /// an export has stopped is told at once: it does so once, and then waits.
    pub fn failures(&mut self, now: Instant) -> Vec<DiskFailure> {
        let Failures { bell, resting, later } = &mut self.failures;
        bell.clear();
        for (name, disk) in &self.disks {
            let newer = disk.take_failures().into_iter();
            later.extend(newer.map(|failure| ((name.clone(), Arc::clone(&failure.export)), failure)));
        }
        resting.retain(|_, end| *end > now);
        let mut told = Vec::new();
        later.retain(|key, failure| {
            let waits = failure.action != Action::Stop && resting.contains_key(key);
            if !waits {
                resting.insert(key.clone(), now + REST);
                let has_lost_writes = self.disks.get(&key.0).is_some_and(|disk| disk.has_lost_writes());
                told.push(DiskFailure { node_name: key.0.clone(), failure: failure.clone(), has_lost_writes });
            }
            waits
        });
        told
    }
}
