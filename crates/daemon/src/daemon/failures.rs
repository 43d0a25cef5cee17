//! What disks could not do, and which queues guests have broken, told to monitors: of each disk of each export the first
//! failure, and then the newest once a second; of each queue likewise.
//!
//! Nobody needs the daemon for it, so they are told while a change is in work.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use egret_disk::{Action, Failure, FailureLog, Op};
use egret_event_loop::{EventNotifier, Nanos};
use egret_export::is_nospace;

use super::{CounterRegistry, Daemon};

/// The least time between two failures of one disk of an export that are told, as in QEMU.
const REST: Duration = Duration::from_secs(1);

/// So many stops of an export are told at once, and then one in each [`REST`]: a guest whose disk fails may abort what waits, which
/// has the export go on, and have it stop again as often as it likes.
const STOPS: u32 = 8;

/// A request that failed in a disk's engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskFailure {
    /// The blockdev.
    pub node_name: String,
    /// What failed.
    pub failure: Failure,
}

impl DiskFailure {
    /// What follows from it, if anything does, to be added to what the system says.
    pub const fn consequence(&self) -> &'static str {
        if self.failure.has_lost_writes {
            "; writes may be lost, so no flush succeeds before blockdev-reopen"
        } else {
            ""
        }
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

/// A queue that its guest has broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokenQueue {
    /// The export.
    pub export: String,
    /// Its number.
    pub queue: usize,
    /// What the guest has done.
    pub reason: String,
}

/// What is known of failures.
pub struct Failures {
    bell: EventNotifier,
    /// The lock is between the daemon and who tells: no I/O thread takes it.
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// By blockdev. A log may outlive its disk, and its disk's successor has the same.
    logs: BTreeMap<String, Arc<FailureLog>>,
    /// When each disk of an export may be told of again, of those that were told of less than a second ago.
    resting: BTreeMap<(String, Arc<str>), Instant>,
    /// Until when it would have been told of its stops, one in each [`REST`].
    stops: BTreeMap<(String, Arc<str>), Instant>,
    /// What is to be told then: of each the newest, and a stop rather than what is none.
    later: BTreeMap<(String, Arc<str>), Failure>,
    /// When each queue of an export may be told of again, and what is to be told then.
    broken: BTreeMap<(String, usize), (Instant, Option<String>)>,
}

impl Failures {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { bell: EventNotifier::new()?, known: Mutex::default() })
    }

    pub(super) const fn bell(&self) -> &EventNotifier {
        &self.bell
    }

    /// Where failures of a blockdev are noted.
    pub(super) fn log_of(&self, name: &str) -> Arc<FailureLog> {
        let new = || Arc::new(FailureLog::new(&self.bell));
        Arc::clone(self.lock().logs.entry(name.to_owned()).or_insert_with(new))
    }

    /// When [`take`](Self::take) should be asked again without the bell: a disk that is not to be told of yet may have
    /// failed meanwhile.
    pub fn due(&self) -> Option<Instant> {
        let known = self.lock();
        let broken = known.broken.values().map(|(end, _)| end);
        known.resting.values().chain(broken).min().copied()
    }

    /// The queues that are to be told of at `now`, of those that have broken since this was last asked and before: one that
    /// its guest breaks again and again waits until it is a second after the time before.
    pub fn take_broken(&self, newer: impl IntoIterator<Item = BrokenQueue>, now: Instant) -> Vec<BrokenQueue> {
        self.lock().broken_due(newer, now)
    }

    /// The failures that are to be told at `now`; a disk's newest waits until it is a second after the one before. That
    /// an export has stopped is told at once, but to one that does nothing else.
    pub fn take(&self, now: Instant) -> Vec<DiskFailure> {
        self.bell.clear();
        let mut known = self.lock();
        let mut newer = Vec::new();
        known.logs.retain(|name, log| {
            let is_used = Arc::strong_count(log) > 1;
            newer.extend(log.take().into_iter().map(|failure| (name.clone(), failure)));
            is_used
        });
        let due = known.due(newer, now);
        due.into_iter().map(|((node_name, _), failure)| DiskFailure { node_name, failure }).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Readable when there may be news of failures, [of requests that are overdue](CounterRegistry::request_timeouts), or [of
/// queues that have broken](CounterRegistry::broken_queues).
impl AsFd for Failures {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Known {
    /// What is to be told at `now`, of what is new and of what has waited.
    fn due(
        &mut self,
        newer: impl IntoIterator<Item = (String, Failure)>,
        now: Instant,
    ) -> Vec<((String, Arc<str>), Failure)> {
        let Self { resting, stops, later, .. } = self;
        for (name, failure) in newer {
            let key = (name, Arc::clone(&failure.export));
            let is_stop = |failure: &Failure| failure.action == Action::Stop;
            if is_stop(&failure) || !later.get(&key).is_some_and(is_stop) {
                later.insert(key, failure);
            }
        }
        resting.retain(|_, end| *end > now);
        stops.retain(|_, end| *end > now);
        let mut due = Vec::new();
        later.retain(|key, failure| {
            let is_stop = failure.action == Action::Stop;
            // A stop that waits is due when the disk has rested, at the latest.
            let waits = match stops.get(key) {
                Some(end) if is_stop => *end > now + REST * (STOPS - 1),
                _ => !is_stop && resting.contains_key(key),
            };
            if !waits {
                resting.insert(key.clone(), now + REST);
                if is_stop {
                    *stops.entry(key.clone()).or_insert(now) += REST;
                }
                due.push((key.clone(), failure.clone()));
            }
            waits
        });
        due
    }

    fn broken_due(&mut self, newer: impl IntoIterator<Item = BrokenQueue>, now: Instant) -> Vec<BrokenQueue> {
        for BrokenQueue { export, queue, reason } in newer {
            self.broken.entry((export, queue)).or_insert((now, None)).1 = Some(reason);
        }
        let mut due = Vec::new();
        self.broken.retain(|(export, queue), (end, newest)| {
            if *end > now {
                return true;
            }
            *end = now + REST;
            let told = newest.take().map(|reason| BrokenQueue { export: export.clone(), queue: *queue, reason });
            let rests = told.is_some();
            due.extend(told);
            rests
        });
        due
    }
}

impl CounterRegistry {
    /// The exports that have requests that are overdue, since this was last asked.
    pub fn request_timeouts(&self) -> Vec<RequestTimeout> {
        let watched = self.read();
        let told = watched.errors.iter().filter_map(|(id, errors)| {
            let oldest = errors.take_overdue()?;
            let queues = watched.exports.get(id).into_iter().flatten();
            let requests = queues.map(|queue| queue.read().overdue).sum();
            Some(RequestTimeout { export: id.clone(), requests, oldest })
        });
        told.collect()
    }

    /// The queues that have broken since this was last asked.
    pub fn broken_queues(&self) -> Vec<BrokenQueue> {
        let mut broken = Vec::new();
        for (export, errors) in &self.read().errors {
            let of = |(queue, reason)| BrokenQueue { export: export.clone(), queue, reason };
            broken.extend(errors.take_broken().into_iter().map(of));
        }
        broken
    }
}

impl Daemon {
    /// What is known of failures, for whoever tells of them.
    pub const fn failures(&self) -> &Arc<Failures> {
        &self.failures
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_failure_waits_for_the_second_after_the_one_before_and_a_stop_only_after_many() {
        let mut failures = Known::default();
        let begun = Instant::now();
        let mut actions = |action: &[Action], after: Duration| -> Vec<Action> {
            let failed = |&action| {
                let failure =
                    Failure { export: "e0".into(), op: Op::Flush, errno: Errno::IO, action, has_lost_writes: false };
                ("d0".to_owned(), failure)
            };
            failures.due(action.iter().map(failed), begun + after).into_iter().map(|(_, told)| told.action).collect()
        };
        let almost = REST - Duration::from_nanos(1);
        assert_eq!(actions(&[Action::Report], Duration::ZERO), [Action::Report]);
        assert_eq!(actions(&[Action::Ignore, Action::Report], almost), vec![]);
        assert_eq!(actions(&[], REST), [Action::Report], "the newest");
        assert_eq!(actions(&[], 3 * REST), vec![], "it was told");
        for _ in 0..2 {
            assert_eq!(actions(&[Action::Stop], 3 * REST), [Action::Stop], "one is not like another");
        }
        assert_eq!(actions(&[Action::Report], 3 * REST + almost), vec![]);

        // One that stops and goes on and stops, a thousand times.
        let begun = 20 * REST;
        let told: usize = (0..1000).map(|_| actions(&[Action::Stop], begun).len()).sum();
        assert_eq!(told, STOPS as usize);
        assert_eq!(actions(&[Action::Report], begun + almost), vec![], "it does not take the place of a stop");
        for second in 1..4 {
            assert_eq!(actions(&[], begun + second * REST), [Action::Stop], "the one that waits");
            assert_eq!(actions(&[Action::Stop], begun + second * REST), vec![]);
        }
        assert_eq!(actions(&[], begun + 4 * REST), [Action::Stop]);
        assert_eq!(actions(&[], begun + 5 * REST), vec![], "it was told");
    }

    #[test]
    fn of_a_queue_that_breaks_again_and_again_the_newest_reason_is_told_once_a_second_and_of_others_at_once() {
        let failures = Failures::new().unwrap();
        let begun = Instant::now();
        let told = |newer: &[(usize, &str)], after: Duration| -> Vec<(usize, String)> {
            let broken = |(queue, reason): &(usize, &str)| BrokenQueue {
                export: "e0".to_owned(),
                queue: *queue,
                reason: (*reason).to_owned(),
            };
            let due = failures.take_broken(newer.iter().map(broken), begun + after);
            due.into_iter().map(|BrokenQueue { queue, reason, .. }| (queue, reason)).collect()
        };
        let almost = REST - Duration::from_nanos(1);
        assert_eq!(told(&[(0, "a")], Duration::ZERO), [(0, "a".to_owned())]);
        assert_eq!(told(&[(0, "b"), (0, "c"), (1, "d")], almost), [(1, "d".to_owned())]);
        assert_eq!(failures.due(), Some(begun + REST), "whoever tells is awake then");
        assert_eq!(told(&[], REST), [(0, "c".to_owned())], "the newest");
        assert_eq!(told(&[], 3 * REST), [], "they were told");
        assert_eq!(failures.due(), None, "nothing is kept of them");
        assert_eq!(told(&[(0, "e")], 3 * REST), [(0, "e".to_owned())]);
    }

    #[test]
    fn whoever_tells_of_failures_is_awake_when_a_stop_that_waits_is_due() {
        let failures = Failures::new().unwrap();
        let now = Instant::now();
        let stop = Failure {
            export: "e0".into(),
            op: Op::Flush,
            errno: Errno::IO,
            action: Action::Stop,
            has_lost_writes: false,
        };
        let stopped = || failures.lock().due([("d0".to_owned(), stop.clone())], now).len();
        (0..STOPS).for_each(|_| assert_eq!(stopped(), 1));
        assert_eq!((stopped(), failures.due()), (0, Some(now + REST)));
        assert_eq!(failures.take(now + REST).len(), 1);
    }
}
