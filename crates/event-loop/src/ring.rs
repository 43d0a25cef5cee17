//! The io_uring that a loop's monitor and its disk engine share.
//!
//! One ring per I/O thread carries multishot polls, disk requests and the blocking wait, so that a turn that blocks
//! costs one `io_uring_enter`. Completions of both kinds arrive in one queue: [`Ring::sort`] moves them to two lists,
//! and each side takes its own.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use egret_confine::rules::register;
use egret_polling::Nanos;
use io_uring::register::Restriction;
use io_uring::{EnterFlags, IoUring, Parameters, cqueue, opcode, squeue, types};

/// A ring shared by the loop's monitor and an engine, both on one thread.
pub type SharedRing = Rc<RefCell<Ring>>;

/// Submission entries of a ring: more than one turn's batch ever needs; a fuller batch is flushed on the way.
const ENTRIES: u32 = 512;
/// Completion entries: a request in flight beyond this waits in the kernel's overflow list, none is lost.
pub(crate) const COMPLETIONS: u32 = 4096;

/// What the loop and the disks' engine submit.
const OPERATIONS: [u8; 8] = [
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::ReadFixed::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::WriteFixed::CODE,
];

/// The bits of `user_data` that say whose completion it is; the rest is that side's own.
const OWNER: u64 = 0xff << 56;
const POLL: u64 = 1 << 56;
const NOBODY: u64 = 2 << 56;
/// How often the kernel is asked for the end of a poll at most. It takes 20 notes in between (`IO_LOCAL_TW_DEFAULT_MAX`), or all,
/// and each poll and each request has one at a time: this is for more of them than there can be.
const REMOVAL_TRIES: u32 = 1 << 15;

/// Why a ring could not be had.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RingError {
    /// The administrator switched io_uring off.
    #[error("io_uring is switched off by sysctl kernel.io_uring_disabled={0}; set it to 0 to allow io_uring")]
    Sysctl(u8),
    /// A seccomp filter or security module refuses the system call.
    #[error("io_uring is refused to this process (seccomp filter or security module); allow io_uring_setup")]
    Refused,
    /// Not enough lockable memory.
    #[error("io_uring may not lock memory: raise RLIMIT_MEMLOCK (ulimit -l)")]
    Memlock,
    /// No such system call.
    #[error("this kernel has no io_uring")]
    Missing,
    /// Older than what the loop needs.
    #[error("this kernel's io_uring lacks {0}")]
    TooOld(&'static str),
    /// Anything else.
    #[error("io_uring_setup: {0}")]
    Other(#[source] Arc<io::Error>),
}

impl From<io::Error> for RingError {
    fn from(e: io::Error) -> Self {
        Self::Other(Arc::new(e))
    }
}

/// What an io_uring operation pushed by an engine came to.
#[derive(Clone, Copy, Debug)]
pub struct OpDone {
    /// The `user_data` given to [`Ring::push`].
    pub data: u64,
    /// Bytes moved, or a negated errno.
    pub result: i32,
}

/// What a poll of a descriptor came to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PollDone {
    /// The `data` given to [`Ring::poll_add`].
    pub data: u64,
    /// The events that it fired for, or a negated errno: why it only ended.
    pub result: i32,
    /// Whether the kernel goes on watching; if not, it wants adding again.
    pub more: bool,
}

impl PollDone {
    /// Whether the poll fired; false when it only ended.
    pub(crate) fn is_ready(&self) -> bool {
        self.result > 0
    }
}

/// How far the flag TASKRUN is believed.
///
/// It may stay raised with nothing behind it: the kernel leaves a note first and raises the flag then, and a task that is
/// just entering takes the note in between. It is lowered with the next note that is taken, which may be hours away, and
/// until then every look would make a system call and no wait would sleep (seen on Linux 6.18, once in some hundred thousand
/// waits). So it is doubted for a while when it was wrong. No wait misses anything by that: the kernel looks for notes
/// before it sleeps.
#[derive(Debug, Default)]
struct Taskrun {
    /// For so many looks it is not.
    doubt: u32,
}

impl Taskrun {
    /// Looks for which it is doubted: a system call in so many takes next to nothing. Who spins for longer makes several, and
    /// spins on.
    const DOUBT: u32 = 256;

    /// Whether there is a note, as far as the flag tells.
    fn tells(&mut self, raised: bool) -> bool {
        let doubt = self.doubt;
        self.doubt = if raised { doubt.saturating_sub(1) } else { 0 };
        raised && doubt == 0
    }

    /// Somebody believed it, and has found this; it is raised still, or not.
    fn found(&mut self, anything: bool, raised: bool) {
        if raised && !anything {
            self.doubt = Self::DOUBT;
        }
    }
}

/// An io_uring with a list of completions for each of its two users.
pub struct Ring {
    uring: IoUring,
    no_iowait: bool,
    ops: VecDeque<OpDone>,
    polls: VecDeque<PollDone>,
    /// What the last cancellation of a poll came to, when that is known.
    removed: Option<i32>,
    taskrun: Taskrun,
    enters: u64,
}

impl Ring {
    /// Makes a ring for the calling thread, which alone may use it.
    ///
    /// # Errors
    ///
    /// Says which of sysctl, seccomp, `RLIMIT_MEMLOCK` or the kernel's age stands in the way.
    pub fn new() -> Result<Self, RingError> {
        let build = |tuned: bool| -> io::Result<IoUring> {
            let mut builder = IoUring::builder();
            // Disabled until it is restricted; whoever enables it is its single issuer.
            builder.setup_clamp().setup_cqsize(COMPLETIONS).setup_r_disabled();
            if tuned {
                builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
            }
            let uring = builder.build(ENTRIES)?;
            restrict(&uring)?;
            uring.submitter().register_enable_rings()?;
            Ok(uring)
        };
        let uring = match build(true) {
            // Kernels before 6.1 do not know these flags.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => build(false),
            other => other,
        }
        .map_err(explain)?;
        let params = uring.params();
        if !params.is_feature_ext_arg() {
            return Err(RingError::TooOld("timed waits (Linux 5.11)"));
        }
        if !params.is_feature_nodrop() || !params.is_feature_submit_stable() {
            return Err(RingError::TooOld("stable submission (Linux 5.5)"));
        }
        let no_iowait = params.is_feature_no_iowait();
        Ok(Self {
            uring,
            no_iowait,
            ops: VecDeque::with_capacity(COMPLETIONS as usize),
            polls: VecDeque::with_capacity(ENTRIES as usize),
            removed: None,
            taskrun: Taskrun::default(),
            enters: 0,
        })
    }

    /// What newer kernels have and this one does without.
    pub fn lacks(&self) -> Vec<&'static str> {
        let later = [
            (self.uring.params().is_setup_single_issuer(), "completions that interrupt no thread (Linux 6.1)"),
            (self.no_iowait, "idle waits that do not count as iowait (Linux 6.15)"),
        ];
        later.into_iter().filter(|(has, _)| !has).map(|(_, what)| what).collect()
    }

    /// Makes one that can [watch descriptors](Self::poll_add) besides.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub(crate) fn for_monitor() -> Result<Self, RingError> {
        let new = Self::new()?;
        if !has_multishot_polls(new.uring.params()) {
            return Err(RingError::TooOld("multishot polls (Linux 5.13)"));
        }
        Ok(new)
    }

    /// Queues an engine's operation; nothing reaches the kernel before [`flush`](Self::flush) or a wait.
    ///
    /// `data` comes back in [`OpDone::data`]; its top byte must be zero.
    ///
    /// # Safety
    ///
    /// Whatever `entry` points at must stay valid until the operation's completion was taken; what only its
    /// submission reads (iovecs) until the next flush.
    pub unsafe fn push(&mut self, entry: squeue::Entry, data: u64) {
        debug_assert_eq!(data & OWNER, 0, "the top byte of user_data is the ring's own");
        // SAFETY: the caller's promise is the one that is asked for here.
        unsafe { self.push_raw(entry.user_data(data & !OWNER)) }
    }

    /// Watches `fd` for input until removed, edge by edge.
    pub(crate) fn poll_add(&mut self, fd: RawFd, data: u64) {
        let entry = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).multi(true).build();
        // SAFETY: a poll refers to no memory of ours; a descriptor closed early costs only an error completion.
        unsafe { self.push_raw(entry.user_data(POLL | (data & !OWNER))) }
    }

    /// Ends the poll that was added with `data`; the kernel has let go of the descriptor when this returns.
    ///
    /// Otherwise it would let go of it later, on this thread, and if its owner has closed it by then close it: that takes as
    /// long as a peer likes. With DEFER_TASKRUN a poll's end is a note to this task, as is that it has fired; it lies behind
    /// those of all others. So the poll is cancelled until there is none.
    ///
    /// Cancelled, and not removed (`POLL_REMOVE`): a poll whose note lies there cannot be removed, and there is always one
    /// while a peer signals without end. One that is cancelled fires no more, whatever it does.
    pub(crate) fn poll_remove(&mut self, data: u64) {
        for _ in 0..REMOVAL_TRIES {
            let entry = opcode::AsyncCancel::new(POLL | (data & !OWNER)).build().user_data(NOBODY);
            self.removed = None;
            // SAFETY: refers to no memory.
            unsafe { self.push_raw(entry) }
            let _ = self.flush();
            self.take_notes();
            self.sort();
            if self.removed == Some(-libc::ENOENT) {
                return;
            }
        }
    }

    /// # Safety
    ///
    /// As [`push`](Self::push).
    unsafe fn push_raw(&mut self, entry: squeue::Entry) {
        // SAFETY: passed on from the caller.
        while unsafe { self.uring.submission().push(&entry) }.is_err() {
            // A full queue is flushed on the way; EBUSY or EAGAIN ends when completions have been sorted away.
            let _ = self.flush();
            self.sort();
        }
    }

    /// Submits everything that was pushed, without waiting; one system call, none if there is nothing.
    ///
    /// # Errors
    ///
    /// What `io_uring_enter` says; the entries stay queued and go with the next call.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.uring.submission().is_empty() {
            return Ok(());
        }
        self.enters += 1;
        match self.uring.submit() {
            Ok(_) => Ok(()),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Whether the kernel has everything that was pushed.
    pub fn is_flushed(&mut self) -> bool {
        self.uring.submission().is_empty()
    }

    /// Submits everything that was pushed and sleeps until a completion is there or `timeout` is over (`None`: no
    /// limit), in one system call.
    ///
    /// # Errors
    ///
    /// What `io_uring_enter` says, except for an interruption or the end of the time, which are no errors.
    pub fn wait(&mut self, timeout: Option<Nanos>) -> io::Result<()> {
        let spec;
        let mut args = types::SubmitArgs::new();
        if let Some(Nanos(ns)) = timeout {
            spec = types::Timespec::from(Duration::from_nanos(ns));
            args = args.timespec(&spec);
        }
        // An idle disk is not a waiting one: without this flag the kernel counts every sleep here as iowait.
        let idle = if self.no_iowait { EnterFlags::NO_IOWAIT } else { EnterFlags::empty() };
        let flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG | idle;
        self.enters += 1;
        let queued = self.uring.submission().len() as u32;
        // SAFETY: the one argument lives until the call returns, and EXT_ARG says that it is one of these.
        let entered = unsafe { self.uring.submitter().enter(queued, 1, flags.bits(), Some(&args)) };
        match entered {
            Ok(_) => Ok(()),
            Err(e) => match e.raw_os_error() {
                Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN) => Ok(()),
                _ => Err(e),
            },
        }
    }

    /// Whether polls have fired, or completions wait to be sorted: a few loads, no system call.
    pub(crate) fn has_reports(&mut self) -> bool {
        !self.polls.is_empty() || self.has_unsorted()
    }

    fn has_unsorted(&mut self) -> bool {
        !self.uring.completion().is_empty() || self.wants_enter()
    }

    /// Whether completions exist that only an enter brings into the queue. With DEFER_TASKRUN a finished request may
    /// still be a note to this task; the kernel raises TASKRUN to say so. And what did not fit into the queue waits in
    /// the kernel, with CQ_OVERFLOW raised, even after the queue has been emptied.
    fn wants_enter(&mut self) -> bool {
        let submission = self.uring.submission();
        submission.cq_overflow() || self.taskrun.tells(submission.taskrun())
    }

    /// Moves every completion to the list of the side that it belongs to.
    pub fn sort(&mut self) {
        if self.wants_enter() {
            self.take_notes();
            let is_raised = self.uring.submission().taskrun();
            self.taskrun.found(!self.uring.completion().is_empty(), is_raised);
        }
        for done in self.uring.completion() {
            let data = done.user_data() & !OWNER;
            match done.user_data() & OWNER {
                0 => self.ops.push_back(OpDone { data, result: done.result() }),
                POLL => {
                    self.polls.push_back(PollDone { data, result: done.result(), more: cqueue::more(done.flags()) })
                }
                _ => self.removed = Some(done.result()),
            }
        }
    }

    /// Brings into the queue what only an enter does.
    fn take_notes(&mut self) {
        self.enters += 1;
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no argument is passed.
        let _ = unsafe { self.uring.submitter().enter::<libc::sigset_t>(0, 0, flags, None) };
    }

    /// The next finished operation of the engine's; [`sort`](Self::sort) first.
    pub fn next_op(&mut self) -> Option<OpDone> {
        self.ops.pop_front()
    }

    /// The next poll that fired or ended; [`sort`](Self::sort) first.
    pub(crate) fn next_poll(&mut self) -> Option<PollDone> {
        self.polls.pop_front()
    }

    /// Drops what is left to be taken of the poll that was added with `data`.
    pub(crate) fn forget_poll(&mut self, data: u64) {
        self.polls.retain(|done| done.data != data & !OWNER);
    }

    /// Whether an engine's operations are in reach without a system call, as far as can be told before sorting.
    pub fn has_ops(&mut self) -> bool {
        !self.ops.is_empty() || self.has_unsorted()
    }

    /// Has completions announced on `event`, an eventfd, while [`arm_event`](Self::arm_event) is in force; for a ring
    /// that somebody else's wait must watch.
    ///
    /// The ring's own descriptor is not good enough for that: with DEFER_TASKRUN a finished request does not wake
    /// whoever polls it, and is found only by looking (observed on Linux 6.18; the kernel's `io_req_local_work_add`
    /// signals a registered eventfd and nothing else).
    ///
    /// # Errors
    ///
    /// What `io_uring_register` says.
    pub fn announce_on(&mut self, event: BorrowedFd<'_>) -> io::Result<()> {
        self.suppress_event();
        self.uring.submitter().register_eventfd(event.as_raw_fd())
    }

    /// From here on the eventfd announces completions; those that are there already are sorted: look for some before
    /// waiting for it.
    pub fn arm_event(&mut self) {
        self.uring.completion().enable_eventfd();
        // The kernel publishes a completion before it looks whether to announce it; whoever looks for completions
        // after this has published first that it wants to be told. One of the two sees the other.
        fence(Ordering::SeqCst);
        // A note from before this is announced by nothing but TASKRUN, which must be believed once more.
        self.taskrun = Taskrun::default();
        self.sort();
    }

    /// Completions need not be announced on the eventfd any more.
    pub fn suppress_event(&mut self) {
        self.uring.completion().disable_eventfd();
    }

    /// For registering files and buffers, and asking what the kernel can do.
    pub fn submitter(&self) -> io_uring::Submitter<'_> {
        self.uring.submitter()
    }

    /// `io_uring_enter` calls so far.
    pub fn enters(&self) -> u64 {
        self.enters
    }
}

/// Leaves a ring the operations that the loop and the disks' engine have for it, and no others: to the kernel a ring is a
/// second way to call it, past every filter of system calls.
fn restrict(uring: &IoUring) -> io::Result<()> {
    let [files, fixed_file] = [squeue::Flags::empty(), squeue::Flags::FIXED_FILE].map(|flags| flags.bits());
    let operations = OPERATIONS.map(Restriction::sqe_op);
    let registers = register::OF_A_RING.map(Restriction::register_op);
    let flags = Restriction::sqe_flags_allowed(files | fixed_file);
    let mut all: Vec<Restriction> = operations.into_iter().chain(registers).chain([flags]).collect();
    uring.submitter().register_restrictions(&mut all)
}

fn explain(e: io::Error) -> RingError {
    match e.raw_os_error() {
        Some(libc::ENOSYS) => RingError::Missing,
        Some(libc::ENOMEM) => RingError::Memlock,
        Some(libc::EPERM | libc::EACCES) => {
            refused(&std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default())
        }
        _ => e.into(),
    }
}

/// By whom, where the sysctl says this.
fn refused(disabled: &str) -> RingError {
    match disabled.trim().parse() {
        Ok(value @ 1..) => RingError::Sysctl(value),
        _ => RingError::Refused,
    }
}

/// They have no flag of their own, and came with what has this one. Before that each is refused when it is submitted, and
/// nothing would ever wake the loop.
fn has_multishot_polls(params: &Parameters) -> bool {
    params.is_feature_resource_tagging()
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::atomic::{AtomicBool, AtomicU32};
    use std::thread;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

    use super::*;
    use crate::refuse::refuse;

    const DISBELIEF: Taskrun = Taskrun { doubt: u32::MAX };

    fn new_event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC).unwrap()
    }

    fn write(event: &OwnedFd) {
        rustix::io::write(event.as_fd(), &1u64.to_ne_bytes()).unwrap();
    }

    #[test]
    fn a_loop_sleeps_on_no_ring_of_a_kernel_before_multishot_polls() {
        for (kernel, features, expected) in
            [("5.11", 0x1ff, false), ("5.12", 0x3ff, false), ("5.13", 0x7ff, true), ("6.18", 0x3_ffff, true)]
        {
            let mut params = [0_u32; size_of::<Parameters>() / size_of::<u32>()];
            // Behind the numbers of entries, flags and the poller's two.
            params[5] = features;
            // SAFETY: it is a struct of integers, and of this size.
            let params = unsafe { std::mem::transmute_copy(&params) };
            assert_eq!(has_multishot_polls(&params), expected, "Linux {kernel}");
        }
    }

    #[test]
    fn a_ring_that_the_administrator_has_switched_off_says_so() {
        for disabled in ["1\n", "2\n"] {
            let error = refused(disabled).to_string();
            assert!(error.contains(&format!("io_uring_disabled={}", disabled.trim())), "{error}");
        }
        for disabled in ["0\n", ""] {
            assert!(matches!(refused(disabled), RingError::Refused), "{disabled:?}");
        }
    }

    #[test]
    fn a_ring_says_what_newer_kernels_have() {
        let mut ring = Ring::new().unwrap();
        for (has, expected) in [(false, 1), (true, 0)] {
            ring.no_iowait = has;
            let lacks = ring.lacks().into_iter().filter(|what| what.contains("iowait")).count();
            assert_eq!(lacks, expected);
        }
    }

    #[test]
    fn a_flag_that_was_wrong_is_doubted_until_it_is_lowered_or_has_been_looked_at_often() {
        let mut taskrun = Taskrun::default();
        assert!(taskrun.tells(true) && taskrun.tells(true) && !taskrun.tells(false));
        for (anything, raised) in [(true, true), (true, false), (false, false)] {
            taskrun.found(anything, raised);
            assert!(taskrun.tells(true), "anything: {anything}, raised: {raised}");
        }
        taskrun.found(false, true);
        assert!((0..Taskrun::DOUBT).all(|_| !taskrun.tells(true)));
        assert!(taskrun.tells(true));
        taskrun.found(false, true);
        assert!(!taskrun.tells(true) && !taskrun.tells(false) && taskrun.tells(true));
    }

    #[test]
    fn whoever_doubts_the_flag_misses_nothing_for_it_looks_again_in_its_sleep() {
        const EVENTS: u32 = 2_000;
        let (mut ring, event, seen) = (Ring::new().unwrap(), new_event(), AtomicU32::new(0));
        ring.poll_add(event.as_raw_fd(), 7);
        thread::scope(|scope| {
            // Each is written when the last was seen, somewhere on the way from a look to sleep.
            scope.spawn(|| {
                for sent in 0..EVENTS {
                    while seen.load(Ordering::Acquire) < sent {
                        thread::yield_now();
                    }
                    (0..sent % 500).for_each(|_| std::hint::spin_loop());
                    write(&event);
                }
            });
            while seen.load(Ordering::Relaxed) < EVENTS {
                ring.taskrun = DISBELIEF;
                if !ring.has_reports() {
                    ring.wait(None).unwrap();
                }
                ring.sort();
                while let Some(poll) = ring.next_poll() {
                    assert!(poll.is_ready() && poll.more);
                    seen.fetch_add(1, Ordering::Release);
                }
            }
        });
    }

    #[test]
    fn what_a_doubted_flag_tells_of_is_found_before_somebody_else_waits_for_the_ring() {
        let (mut ring, event, announced) = (Ring::new().unwrap(), new_event(), new_event());
        ring.announce_on(announced.as_fd()).unwrap();
        ring.poll_add(event.as_raw_fd(), 7);
        ring.flush().unwrap();
        ring.taskrun = DISBELIEF;
        write(&event);
        ring.arm_event();
        let mut fds = [PollFd::new(&announced, PollFlags::IN)];
        assert!(ring.has_reports() || poll(&mut fds, None).unwrap() == 1);
        ring.sort();
        assert!(ring.next_poll().is_some_and(|poll| poll.is_ready()));
    }

    /// What comes back for each of `entries`.
    fn results(entries: impl IntoIterator<Item = squeue::Entry>) -> Vec<i32> {
        let mut ring = Ring::new().unwrap();
        let run = |entry| {
            // SAFETY: what the entries point at is static.
            unsafe { ring.push(entry, 0) };
            loop {
                ring.wait(None).unwrap();
                ring.sort();
                if let Some(done) = ring.next_op() {
                    return done.result;
                }
            }
        };
        entries.into_iter().map(run).collect()
    }

    #[test]
    fn what_the_kernel_has_no_room_or_time_for_is_no_error_and_stays_queued_and_the_rest_is_one() {
        for (errno, flush, wait) in [
            (libc::EINTR, true, true),
            (libc::EBUSY, true, true),
            (libc::EAGAIN, true, true),
            (libc::ETIME, false, true),
            (libc::EIO, false, false),
        ] {
            let enter = move || {
                let (mut ring, event) = (Ring::new().unwrap(), new_event());
                assert!(ring.is_flushed());
                ring.poll_add(event.as_raw_fd(), 7);
                assert!(!ring.is_flushed());
                refuse(libc::SYS_io_uring_enter, errno);
                let error = |result: io::Result<()>| result.err().map(|e| e.raw_os_error());
                let found = [error(ring.flush()), error(ring.wait(None))];
                assert_eq!(found, [flush, wait].map(|is_fine| (!is_fine).then_some(Some(errno))), "{errno}");
                assert!(!ring.is_flushed());
            };
            thread::spawn(enter).join().unwrap();
        }
    }

    #[test]
    fn each_side_is_told_of_its_own_completions_and_each_system_call_is_counted() {
        const DATA: u64 = !OWNER;
        let (mut ring, event) = (Ring::new().unwrap(), new_event());
        assert!(!ring.has_ops() && !ring.has_reports() && ring.enters() == 0);
        ring.flush().unwrap();
        assert_eq!(ring.enters(), 0, "there was nothing");
        ring.poll_add(event.as_raw_fd(), DATA - 1);
        ring.flush().unwrap();
        assert!(ring.is_flushed() && ring.enters() == 1);
        assert!(!ring.has_ops() && !ring.has_reports());

        // It fails at once. With a registered file: this flag is one that the engine uses.
        let nothing = opcode::Write::new(types::Fixed(0), std::ptr::null(), 0).build();
        // SAFETY: it points at nothing.
        unsafe { ring.push(nothing, DATA) };
        ring.wait(None).unwrap();
        assert_eq!(ring.enters(), 2);
        assert!(ring.has_ops());
        ring.sort();
        assert!(ring.has_ops() && !ring.has_reports());
        let done = ring.next_op().unwrap();
        assert_eq!((done.data, done.result), (DATA, -libc::EBADF));
        assert!(!ring.has_ops() && ring.next_op().is_none() && ring.next_poll().is_none());

        write(&event);
        assert!(ring.has_reports(), "it shows without a system call");
        let enters = ring.enters() + u64::from(ring.wants_enter());
        ring.sort();
        assert_eq!(ring.enters(), enters);
        assert!(ring.has_reports() && !ring.has_ops());
        let poll = ring.next_poll().unwrap();
        assert!(poll.is_ready() && poll.more && poll.data == DATA - 1);
        assert!(!ring.has_reports() && ring.next_op().is_none());

        ring.poll_remove(DATA - 1);
        let poll = ring.next_poll().expect("it has ended when this returns");
        assert!(!poll.is_ready() && !poll.more && poll.data == DATA - 1);
        assert!(ring.next_poll().is_none() && ring.next_op().is_none(), "that it was removed is nobody's");
    }

    #[test]
    fn completions_are_announced_while_somebody_waits_for_that() {
        // No eventfd: what one tells of the kernel does not announce on another there and then.
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let tell = || assert_eq!(rustix::io::write(&theirs, &[0]), Ok(1));
        let (mut ring, announced) = (Ring::new().unwrap(), new_event());
        let is_announced = |tv_sec| {
            let timeout = rustix::event::Timespec { tv_sec, tv_nsec: 0 };
            poll(&mut [PollFd::new(&announced, PollFlags::IN)], Some(&timeout)).unwrap() == 1
        };
        let find = |ring: &mut Ring| {
            ring.wait(None).unwrap();
            ring.sort();
            assert!(ring.next_poll().is_some_and(|poll| poll.is_ready()));
        };
        ring.announce_on(announced.as_fd()).unwrap();
        ring.poll_add(ours.as_raw_fd(), 7);
        ring.flush().unwrap();
        for _ in 0..3 {
            tell();
            find(&mut ring);
            assert!(!is_announced(0), "nobody waits for it");
            ring.arm_event();
            tell();
            assert!(is_announced(30));
            ring.suppress_event();
            rustix::io::read(announced.as_fd(), &mut [0; 8]).unwrap();
            find(&mut ring);
        }
    }

    #[test]
    fn a_ring_lacks_what_its_kernel_is_too_old_for() {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        let numbers: Vec<u32> = release.split(['.', '-']).map_while(|number| number.parse().ok()).take(2).collect();
        let later = [[6, 1], [6, 15]].into_iter().filter(|since| numbers[..] < since[..]).count();
        // Vendors bring some to older kernels.
        assert!(Ring::new().unwrap().lacks().len() <= later, "{release}");
    }

    #[test]
    fn who_cannot_have_a_ring_is_told_what_stands_in_the_way() {
        let is_off = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
        let refused = match is_off.as_deref().map(str::trim) {
            Ok(off @ ("1" | "2")) => format!("io_uring is switched off by sysctl kernel.io_uring_disabled={off}; "),
            _ => "io_uring is refused to this process ".to_owned(),
        };
        for (errno, expected) in [
            (libc::ENOSYS, "this kernel has no io_uring"),
            (libc::ENOMEM, "io_uring may not lock memory: raise RLIMIT_MEMLOCK"),
            (libc::EPERM, &refused),
            (libc::EACCES, &refused),
            (libc::EMFILE, "io_uring_setup: Too many open files"),
        ] {
            let error = explain(io::Error::from_raw_os_error(errno)).to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn a_ring_opens_connects_executes_and_sends_nothing() {
        let path = c"/etc/passwd".as_ptr();
        let socket = types::Fd(0);
        let open_now = opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path).build();
        let attacks = [
            open_now.clone(),
            opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
            opcode::Connect::new(socket, std::ptr::null(), 0).build(),
            opcode::Send::new(socket, std::ptr::null(), 0).build(),
            opcode::SendMsg::new(socket, std::ptr::null()).build(),
            opcode::UnlinkAt::new(types::Fd(libc::AT_FDCWD), path).build(),
            opcode::ProvideBuffers::new(std::ptr::null_mut(), 0, 0, 0, 0).build(),
            opcode::Nop::new().build(),
            opcode::Close::new(socket).build(),
            // Flushes are left to threads.
            opcode::Fsync::new(socket).build(),
            // A flag that nothing here has: after another.
            opcode::Write::new(socket, std::ptr::null(), 0).build().flags(squeue::Flags::IO_LINK),
        ];
        for (number, result) in results(attacks).into_iter().enumerate() {
            assert_eq!(result, -libc::EACCES, "attack {number}");
        }
    }

    #[test]
    fn a_ring_that_is_enabled_takes_no_personalities_or_other_restrictions() {
        let ring = Ring::new().unwrap();
        let submitter = ring.submitter();
        let refused = |result: io::Result<()>| assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EACCES));
        refused(submitter.register_personality().map(drop));
        refused(submitter.unregister_buffers());
        refused(submitter.register_restrictions(&mut []));
        refused(submitter.register_probe(&mut io_uring::Probe::new()));
        assert!(submitter.register_files_sparse(4).is_ok());
    }

    #[test]
    fn a_descriptor_whose_poll_was_removed_is_closed_when_its_owner_closes_it_whether_the_poll_has_fired_or_not() {
        use std::io::{ErrorKind, Read, Write};
        use std::os::unix::net::UnixStream;
        for has_fired in [false, true] {
            let mut ring = Ring::new().unwrap();
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            ring.poll_add(ours.as_raw_fd(), 7);
            ring.flush().unwrap();
            if has_fired {
                theirs.write_all(b"x").unwrap();
            }
            ring.poll_remove(7);
            drop(ours);
            theirs.set_nonblocking(true).unwrap();
            let read = theirs.read(&mut [0]).map_err(|e| e.kind());
            assert!(matches!(read, Ok(0) | Err(ErrorKind::ConnectionReset)), "fired: {has_fired}: {read:?}");
        }
    }

    /// Whether the removal of a poll that has fired ends it.
    fn ends(ring: &mut Ring, data: u64) -> bool {
        ring.poll_remove(data);
        let mut polls = std::iter::from_fn(|| ring.next_poll());
        polls.any(|poll| poll.data == data && !poll.more)
    }

    #[test]
    fn a_poll_whose_peer_signals_without_end_has_ended_when_it_has_been_removed() {
        const ROUNDS: usize = 10_000;
        let (mut ring, event, is_over) = (Ring::new().unwrap(), new_event(), AtomicBool::new(false));
        let ended = thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    write(&event);
                }
            });
            let rounds = (0..ROUNDS).filter(|_| {
                ring.poll_add(event.as_raw_fd(), 7);
                let _ = ring.flush();
                ends(&mut ring, 7)
            });
            let ended = rounds.count();
            is_over.store(true, Ordering::Relaxed);
            ended
        });
        assert_eq!(ended, ROUNDS);
    }

    #[test]
    fn a_poll_that_has_fired_behind_thousands_of_others_has_ended_when_it_has_been_removed() {
        let (mut ring, event) = (Ring::new().unwrap(), new_event());
        (0..3_000).for_each(|data| ring.poll_add(event.as_raw_fd(), data));
        ring.flush().unwrap();
        for data in [2_999, 0, 1_500] {
            write(&event);
            assert!(ends(&mut ring, data), "{data}");
        }
    }
}
