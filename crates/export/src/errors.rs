//! What an export does about requests that its disks fail: `rerror` and `werror`, as QEMU's drives have them.
//!
//! ```text
//!            a request is to wait                       resume, or there is space again
//!   Ok ──────────────────────────▶ NoSpace, Failed ──────────────────────────────────────▶ Ok
//! ```
//!
//! While an export is stopped its queues keep what fails and what is new, and tell nobody of either: the guest sees a
//! slow disk. Whoever keeps something waits here to be woken (`worker/stopped.rs`). It is stopped for as long as a queue
//! keeps what failed: when the last has nothing of that left, because it was aborted say, the export goes on.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::task::Waker;

use egret_disk::{Action, FailedRequest, Op};
use egret_event_loop::{EventNotifier, Nanos};
use rustix::io::Errno;

use crate::queues::lock;

/// What is done when a request fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The guest is told.
    #[default]
    Report,
    /// The guest is told that it succeeded.
    Ignore,
    /// The export stops if there is no space left, and the guest is told of any other error.
    Enospc,
    /// The export stops.
    Stop,
}

/// What an export does when requests fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// If they read.
    pub rerror: OnError,
    /// If they do anything else.
    pub werror: OnError,
    /// How long a request may take before that is told, if it is to be told at all.
    pub timeout: Option<Nanos>,
}

impl ErrorPolicy {
    pub(crate) fn action(self, failed: &FailedRequest) -> Action {
        match if failed.op == Op::Read { self.rerror } else { self.werror } {
            OnError::Stop => Action::Stop,
            OnError::Enospc if is_nospace(failed.errno) => Action::Stop,
            OnError::Enospc | OnError::Report => Action::Report,
            OnError::Ignore => Action::Ignore,
        }
    }
}

/// Whether there is no room left: on the file system, or for the image's owner.
pub fn is_nospace(errno: Errno) -> bool {
    errno == Errno::NOSPC || errno == Errno::DQUOT
}

/// Whether an export is stopped, and why: QEMU's `BlockDeviceIoStatus`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoStatus {
    /// It is not.
    Ok,
    /// There is no space left. It looks once a second whether there is some.
    NoSpace,
    /// Another error; it waits until it is resumed.
    Failed,
}

impl IoStatus {
    /// As QEMU says it: `ok`, `nospace` or `failed`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::NoSpace => "nospace",
            Self::Failed => "failed",
        }
    }
}

/// What an export does about errors, and whether it is stopped for one. Its queues share it.
#[derive(Debug)]
pub struct ErrorHandling {
    pub(crate) export: Arc<str>,
    pub(crate) policy: ErrorPolicy,
    /// An [`IoStatus`]; changed under the lock of `waiting` alone.
    status: AtomicU8,
    stops: AtomicU64,
    waiting: Mutex<Waiting>,
    /// How many queues have requests that are overdue; and how old the oldest was when there were some, until somebody
    /// asks.
    overdue: Mutex<(u32, Option<Nanos>)>,
    /// Why queues have broken, by their numbers, until somebody asks.
    broken: Mutex<BTreeMap<usize, String>>,
    bell: OnceLock<EventNotifier>,
}

/// Who waits for an export to go on.
#[derive(Debug, Default)]
struct Waiting {
    /// How many queues have what failed.
    holds: usize,
    /// Wake the queues that keep requests, by their numbers: one that stops and starts has another each time.
    wakers: BTreeMap<usize, Waker>,
}

/// A queue has what failed, so that its export stays stopped until it is resumed, or nobody has one.
#[derive(Debug)]
pub(crate) struct Hold(Arc<ErrorHandling>);

impl Drop for Hold {
    fn drop(&mut self) {
        let mut waiting = lock(&self.0.waiting);
        waiting.holds -= 1;
        if waiting.holds == 0 {
            self.0.go_on(waiting);
        }
    }
}

impl ErrorHandling {
    pub(crate) fn new(export: &str, policy: ErrorPolicy) -> Arc<Self> {
        let status = AtomicU8::new(IoStatus::Ok as u8);
        Arc::new(Self {
            export: export.into(),
            policy,
            status,
            stops: AtomicU64::new(0),
            waiting: Mutex::default(),
            overdue: Mutex::default(),
            broken: Mutex::default(),
            bell: OnceLock::new(),
        })
    }

    /// Whether the export is stopped, and why.
    pub fn status(&self) -> IoStatus {
        [IoStatus::Ok, IoStatus::NoSpace, IoStatus::Failed][usize::from(self.status.load(Ordering::Relaxed))]
    }

    /// How often it has stopped.
    pub fn stops(&self) -> u64 {
        self.stops.load(Ordering::Relaxed)
    }

    #[inline]
    pub(crate) fn is_stopped(&self) -> bool {
        self.status.load(Ordering::Relaxed) != IoStatus::Ok as u8
    }

    /// Stops the export because of an error of a queue, which has what failed from here on; false if it was stopped for as
    /// much already.
    pub(crate) fn stop(self: &Arc<Self>, errno: Errno, hold: &mut Option<Hold>) -> bool {
        let mut waiting = lock(&self.waiting);
        if hold.is_none() {
            waiting.holds += 1;
            *hold = Some(Hold(Arc::clone(self)));
        }
        let status = if is_nospace(errno) { IoStatus::NoSpace } else { IoStatus::Failed };
        let is_news = self.status.load(Ordering::Relaxed) < status as u8;
        if is_news {
            self.status.store(status as u8, Ordering::Relaxed);
            self.stops.fetch_add(1, Ordering::Relaxed);
        }
        is_news
    }

    /// Has the export go on, if it is stopped: what waits is tried again.
    pub fn resume(&self) {
        self.go_on(lock(&self.waiting));
    }

    /// Has the export go on if it is stopped for lack of space, and for nothing else.
    pub(crate) fn find_space(&self) {
        let waiting = lock(&self.waiting);
        if self.status() == IoStatus::NoSpace {
            self.go_on(waiting);
        }
    }

    fn go_on(&self, mut waiting: MutexGuard<'_, Waiting>) {
        self.status.store(IoStatus::Ok as u8, Ordering::Relaxed);
        let woken = std::mem::take(&mut waiting.wakers);
        drop(waiting);
        woken.into_values().for_each(Waker::wake);
    }

    /// Has a notifier set when requests are overdue or a queue has broken, from here on; the first one to be named is.
    pub fn watch(&self, bell: &EventNotifier) {
        let _ = self.bell.set(bell.clone());
    }

    /// How old the oldest request was when the first were found overdue: once each time that there are some after there
    /// were none.
    pub fn take_overdue(&self) -> Option<Nanos> {
        lock(&self.overdue).1.take()
    }

    /// A queue has requests that are overdue.
    pub(crate) fn begin_overdue(&self, oldest: Nanos) {
        let mut overdue = lock(&self.overdue);
        overdue.0 += 1;
        if overdue.0 == 1 {
            overdue.1 = Some(oldest);
            self.bell.get().into_iter().for_each(EventNotifier::set);
        }
    }

    /// It has none any more.
    pub(crate) fn end_overdue(&self) {
        lock(&self.overdue).0 -= 1;
    }

    /// Why queues have broken since this was last asked, by their numbers: of each the last time.
    pub fn take_broken(&self) -> BTreeMap<usize, String> {
        std::mem::take(&mut lock(&self.broken))
    }

    /// The guest has broken a queue.
    pub(crate) fn note_broken(&self, queue: usize, why: String) {
        lock(&self.broken).insert(queue, why);
        self.bell.get().into_iter().for_each(EventNotifier::set);
    }

    /// Has a queue woken when the export goes on; at once if it is not stopped.
    pub(crate) fn wake_when_resumed(&self, queue: usize, waker: Waker) {
        let mut waiting = lock(&self.waiting);
        if self.is_stopped() {
            waiting.wakers.insert(queue, waker);
        } else {
            drop(waiting);
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use egret_disk::DiskSlot;

    use super::*;

    fn action(on_error: OnError, op: Op, errno: Errno) -> Action {
        let other = if op == Op::Read { OnError::Stop } else { OnError::Report };
        let (rerror, werror) = if op == Op::Read { (on_error, other) } else { (other, on_error) };
        let failed = FailedRequest { slot: DiskSlot::default(), op, offset: 0, len: 512, errno };
        ErrorPolicy { rerror, werror, timeout: None }.action(&failed)
    }

    #[test]
    fn each_word_does_what_qemus_drives_do_and_reads_have_a_word_of_their_own() {
        let writes = [Op::Write { fua: false }, Op::Flush, Op::Discard, Op::WriteZeroes { unmap: true, fua: true }];
        for op in writes.into_iter().chain([Op::Read]) {
            for (errno, when_full) in
                [(Errno::NOSPC, Action::Stop), (Errno::DQUOT, Action::Stop), (Errno::IO, Action::Report)]
            {
                assert_eq!(action(OnError::Report, op, errno), Action::Report);
                assert_eq!(action(OnError::Ignore, op, errno), Action::Ignore);
                assert_eq!(action(OnError::Stop, op, errno), Action::Stop);
                assert_eq!(action(OnError::Enospc, op, errno), when_full, "{op:?}, {errno}");
            }
        }
    }

    #[test]
    fn whether_an_export_is_stopped_is_said_in_the_words_that_qemu_has_for_it() {
        let all = [IoStatus::Ok, IoStatus::NoSpace, IoStatus::Failed];
        assert_eq!(all.map(IoStatus::name), ["ok", "nospace", "failed"]);
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_stop_is_news_once_and_whoever_waits_is_woken_once_when_it_is_over_or_at_once() {
        let (errors, count) = (ErrorHandling::new("e0", ErrorPolicy::default()), Arc::<Count>::default());
        let woken = || count.0.load(Ordering::Relaxed);
        let mut hold = None;
        assert_eq!(
            [Errno::NOSPC, Errno::NOSPC, Errno::IO, Errno::NOSPC].map(|e| errors.stop(e, &mut hold)),
            [true, false, true, false]
        );
        assert_eq!((errors.status(), errors.stops()), (IoStatus::Failed, 2));
        errors.wake_when_resumed(0, Arc::clone(&count).into());
        errors.wake_when_resumed(0, Arc::clone(&count).into());
        assert_eq!(woken(), 0);
        errors.resume();
        errors.resume();
        assert_eq!((errors.status(), woken()), (IoStatus::Ok, 1));
        errors.wake_when_resumed(0, Arc::clone(&count).into());
        assert_eq!(woken(), 2);
        assert!(errors.stop(Errno::NOSPC, &mut hold));
    }

    #[test]
    fn of_a_queue_that_comes_again_and_again_the_last_stay_is_woken_and_nothing_else_is_kept() {
        let errors = ErrorHandling::new("e0", ErrorPolicy::default());
        let stays = [(); 1000].map(|()| Arc::<Count>::default());
        let mut hold = None;
        errors.stop(Errno::IO, &mut hold);
        stays.iter().for_each(|stay| errors.wake_when_resumed(1, Arc::clone(stay).into()));
        assert_eq!(stays.iter().filter(|stay| Arc::strong_count(stay) > 1).count(), 1);
        errors.resume();
        let woken = stays.map(|stay| stay.0.load(Ordering::Relaxed));
        assert!(woken[..999].iter().all(|woken| *woken == 0) && woken[999] == 1, "{woken:?}");
    }

    #[test]
    fn an_export_goes_on_when_space_is_found_or_when_nobody_has_what_failed_any_more() {
        let errors = ErrorHandling::new("e0", ErrorPolicy::default());
        let (mut one, mut other) = (None, None);
        for errno in [Errno::NOSPC, Errno::IO] {
            assert!(errors.stop(errno, &mut one));
            errors.stop(Errno::NOSPC, &mut other);
            errors.find_space();
            assert_eq!(errors.is_stopped(), errno == Errno::IO);
        }
        drop(one);
        assert_eq!(errors.status(), IoStatus::Failed);
        drop(other);
        assert_eq!(errors.status(), IoStatus::Ok);
    }

    #[test]
    fn overdue_requests_are_told_once_until_no_queue_has_any() {
        let (errors, bell) = (ErrorHandling::new("e0", ErrorPolicy::default()), EventNotifier::new().unwrap());
        errors.watch(&bell);
        for round in 1..=2 {
            errors.begin_overdue(Nanos(round));
            errors.begin_overdue(Nanos(100));
            assert_eq!((bell.clear(), errors.take_overdue(), errors.take_overdue()), (true, Some(Nanos(round)), None));
            errors.end_overdue();
            errors.begin_overdue(Nanos(200));
            assert_eq!((bell.clear(), errors.take_overdue()), (false, None), "another queue has some all the time");
            errors.end_overdue();
            errors.end_overdue();
        }
    }

    #[test]
    fn of_each_queue_that_breaks_the_last_time_is_told_and_once() {
        let (errors, bell) = (ErrorHandling::new("e0", ErrorPolicy::default()), EventNotifier::new().unwrap());
        errors.watch(&bell);
        for (queue, why) in [(1, "one"), (0, "other"), (1, "another")] {
            errors.note_broken(queue, why.to_owned());
        }
        assert!(bell.clear());
        let expected = [(0, "other"), (1, "another")].map(|(queue, why)| (queue, why.to_owned()));
        assert_eq!(errors.take_broken().into_iter().collect::<Vec<_>>(), expected);
        assert_eq!((bell.clear(), errors.take_broken().len()), (false, 0));
    }
}
