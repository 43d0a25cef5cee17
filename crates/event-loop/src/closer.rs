//! The thread that closes what a peer can make slow to close.
//!
//! Who closes the last descriptor of a TCP socket waits until its peer has acknowledged all data, for as long as the
//! socket is to linger (SO_LINGER): hours, whether it blocks or not. Such a socket may come to us in a message
//! (SCM_RIGHTS), in a socket that comes in one, or stay unreceived in a socket of ours: the kernel closes it when that is
//! closed, and whoever closed that waits. A signal ends the wait. So sockets through which a peer may send descriptors,
//! and descriptors that a peer sent, are [`FromPeer`]: one thread closes them, with a timer that sends it a signal again
//! and again until that is done. It takes a fraction of a millisecond for the most hostile of them.
//!
//! No signal helps where a file system waits for the process that runs it (FUSE), or for another machine. What may be of
//! one is closed by a thread of its own.
//!
//! Nor does one where a peer has what can be polled, an eventfd say, in an epoll set of its own: who closes it last waits
//! for that set's lock, and the kernel holds the lock while it copies events to memory of the peer's, which may be a page
//! that never comes. Every eventfd, pipe or socket may be such a one, and most are not. So a second thread stands by, and
//! closes what is left when the first has been at one for too long.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use egret_confine::{Bounds, ThreadKind};
use rustix::fs::fcntl_get_seals;

/// How long a socket may linger.
const LONGEST: Duration = Duration::from_micros(100);
/// Nobody else sends this one, and a process that has no handler ignores it.
const SIGNAL: libc::c_int = libc::SIGURG;
/// Descriptors that may wait to be closed before those who let peers in are to [wait](await_room).
const MOST_WAITING: usize = 64;
/// How long they wait at most.
const PATIENCE: Duration = Duration::from_millis(1);
/// Threads that close a file each. Beyond them files stay open until one of them is done. So do other descriptors that
/// nobody has an [`Allowance`] for, if so many threads are being kept by some.
const MOST_THREADS: usize = 16;
/// When one tries again to have a thread, where there was no room for it.
const AGAIN: Duration = Duration::from_millis(100);
/// For how long the thread that closes one after the other may be at one, while others wait, before another goes on with them.
const TOO_LONG: Duration = Duration::from_millis(10);
const NAME: &str = "egret-closer";
const STACK: usize = 64 << 10;

struct Closer {
    state: Mutex<State>,
    has_work: Condvar,
    has_room: Condvar,
    /// There may be somebody to take over from.
    is_late: Condvar,
}

struct State {
    waiting: VecDeque<Left>,
    /// Those of them that are files, and wait for a thread.
    files: VecDeque<OwnedFd>,
    /// How many threads close one.
    threads: usize,
    /// There was no room for another: until when none is tried.
    is_short_until: Option<Instant>,
    /// How many others are being closed that nobody has an allowance for: by the thread whose turn it is, and by those whose
    /// turn it was when they began.
    unallowed: usize,
    has_begun: bool,
    /// How many threads have had their turn to close one after the other. The last has it still.
    turns: u64,
    /// Since when that thread has been closing one.
    since: Option<Instant>,
    /// A thread is there that takes over.
    stands_by: bool,
    /// It looks by itself when it is time to.
    watches: bool,
}

/// What is to be closed, and what it counts for until it is.
struct Left {
    fd: OwnedFd,
    counted: Option<UnderWay>,
}

impl Closer {
    const fn new() -> Self {
        let state = State {
            waiting: VecDeque::new(),
            files: VecDeque::new(),
            threads: 0,
            is_short_until: None,
            unallowed: 0,
            has_begun: false,
            turns: 0,
            since: None,
            stands_by: false,
            watches: false,
        };
        Self { state: Mutex::new(state), has_work: Condvar::new(), has_room: Condvar::new(), is_late: Condvar::new() }
    }
}

impl State {
    /// Where the first is that may be closed now, by the thread whose turn it is.
    fn first(&self) -> Option<usize> {
        self.waiting.iter().position(|left| left.counted.is_some() || self.unallowed < MOST_THREADS)
    }

    fn has_file(&self) -> bool {
        let is_short = self.is_short_until.is_some_and(|until| Instant::now() < until);
        self.threads < MOST_THREADS && !self.files.is_empty() && !is_short
    }

    fn has_work(&self) -> bool {
        self.has_file() || self.first().is_some()
    }
}

static CLOSER: Closer = Closer::new();

/// Has the threads there from here on. Before that, what is dropped is closed by whoever drops it. To be called before the
/// calling thread is confined.
///
/// # Errors
/// There is no room for the threads or a timer.
pub fn begin() -> io::Result<()> {
    CLOSER.begin()
}

/// Lets a moment go by where many descriptors wait to be closed. So strangers are let in and hung up on no faster than what
/// they leave is closed, and never have more than a few of our descriptors.
pub fn await_room() {
    let state = CLOSER.lock();
    let is_full = |state: &mut State| state.waiting.len() >= MOST_WAITING;
    drop(CLOSER.has_room.wait_timeout_while(state, PATIENCE, is_full));
}

/// A descriptor that a peer sent, or through which it may send others. Who drops it does not wait for it to be closed.
#[derive(Debug)]
pub struct FromPeer(ManuallyDrop<OwnedFd>);

impl FromPeer {
    /// The descriptor, to be closed by whoever drops it.
    pub fn into_fd(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: it is taken once: `this` is neither dropped nor used again.
        unsafe { ManuallyDrop::take(&mut this.0) }
    }
}

impl From<OwnedFd> for FromPeer {
    fn from(fd: OwnedFd) -> Self {
        Self(ManuallyDrop::new(fd))
    }
}

impl From<UnixStream> for FromPeer {
    fn from(stream: UnixStream) -> Self {
        OwnedFd::from(stream).into()
    }
}

impl AsFd for FromPeer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for FromPeer {
    fn drop(&mut self) {
        // SAFETY: it is taken once: nobody uses what is being dropped again.
        let fd = unsafe { ManuallyDrop::take(&mut self.0) };
        CLOSER.leave(Left { fd, counted: None });
    }
}

/// Closes that may be under way for somebody. Who has one waits rather than have more.
#[derive(Debug, Default)]
pub struct Allowance {
    under_way: Mutex<usize>,
    ended: Condvar,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub struct UnderWay(Arc<Allowance>);

impl Allowance {
    /// Waits until fewer than `most` are under way, and counts another.
    pub fn take(self: &Arc<Self>, most: usize) -> UnderWay {
        let under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        let are_most = |under_way: &mut usize| *under_way >= most;
        *self.ended.wait_while(under_way, are_most).unwrap_or_else(PoisonError::into_inner) += 1;
        UnderWay(Arc::clone(self))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        *self.0.under_way.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_one();
    }
}

/// Has a descriptor closed of which [nobody is asked](asks_nobody). It counts until it is.
pub fn close(fd: OwnedFd, counted: UnderWay) {
    CLOSER.leave(Left { fd, counted: Some(counted) });
}

impl Closer {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&'static self) -> io::Result<()> {
        let mut state = self.lock();
        if state.has_begun {
            return Ok(());
        }
        handle_signal()?;
        let (sender, made) = sync_channel(1);
        let bounds = Bounds::of_this_thread();
        let closer = move || {
            bounds.narrow(ThreadKind::Closer);
            // Relief from the start: later there may be no room for it, and somebody who does not come back.
            drop(sender.send(Timer::start().map(drop).and_then(|()| self.relieve())));
            self.run();
        };
        thread::Builder::new().name(NAME.to_owned()).stack_size(STACK).spawn(closer)?;
        made.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))?;
        (state.has_begun, state.stands_by) = (true, true);
        Ok(())
    }

    fn leave(&self, left: Left) {
        let mut state = self.lock();
        if state.has_begun {
            state.waiting.push_back(left);
            self.has_more(&state);
        }
    }

    /// Wakes who is to see that there is more to do.
    fn has_more(&self, state: &State) {
        if state.since.is_none() {
            self.has_work.notify_one();
        } else if !state.watches {
            self.is_late.notify_one();
        }
    }

    /// What a thread does: it waits for its turn, and has it until another takes over. When it comes back from what took
    /// it too long it is not needed any more.
    fn run(&'static self) {
        let turn = self.await_turn();
        while let Some(work) = self.next(turn) {
            match work {
                Work::Descriptor(left) if asks_nobody(&left.fd) => {
                    self.have_relief();
                    let is_unallowed = left.counted.is_none();
                    // Without one it may linger; then it is taken over from.
                    let timer = Timer::start();
                    drop(left);
                    drop(timer);
                    self.closed(turn, is_unallowed);
                }
                Work::Descriptor(Left { fd, counted }) => {
                    self.lock().files.push_back(fd);
                    self.closed(turn, counted.is_none());
                }
                Work::File(file) => {
                    let place = Place(self);
                    // What no thread can be had for is dropped here: not the file, which may never be closed.
                    let (give, given) = sync_channel::<OwnedFd>(1);
                    let close = move || {
                        drop(given.recv());
                        drop(place);
                    };
                    let thread = thread::Builder::new().name("peer-close".to_owned()).stack_size(STACK);
                    if thread.spawn(close).is_ok() {
                        self.lock().is_short_until = None;
                        drop(give.send(file));
                    } else {
                        let mut state = self.lock();
                        state.files.push_front(file);
                        state.is_short_until = Some(Instant::now() + AGAIN);
                    }
                }
            }
        }
    }

    /// Waits until the thread whose turn it is has been at one for too long while there are others, or there is none.
    fn await_turn(&self) -> u64 {
        let mut state = self.lock();
        while state.turns > 0 {
            let late = state.since.filter(|_| state.has_work()).map(|since| since.elapsed());
            state.watches = late.is_some();
            state = match late {
                Some(late) if late >= TOO_LONG => break,
                Some(late) => {
                    let waited = self.is_late.wait_timeout(state, TOO_LONG - late);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                // A file may have to wait for longer than for the one that is being closed.
                None if state.since.is_some() && !state.files.is_empty() => {
                    let waited = self.is_late.wait_timeout(state, AGAIN);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.is_late.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        // The first takes over from nobody.
        state.stands_by &= state.turns == 0;
        (state.since, state.watches) = (None, false);
        state.turns += 1;
        state.turns
    }

    /// Has a thread there that takes over.
    fn have_relief(&'static self) {
        if !std::mem::replace(&mut self.lock().stands_by, true) && self.relieve().is_err() {
            // There may be room for it when there is something else to close.
            self.lock().stands_by = false;
        }
    }

    fn relieve(&'static self) -> io::Result<()> {
        thread::Builder::new().name(NAME.to_owned()).stack_size(STACK).spawn(move || self.run()).map(drop)
    }

    /// What to do next, if it is this thread's turn still.
    fn next(&self, turn: u64) -> Option<Work> {
        let mut state = self.lock();
        while state.turns == turn {
            if state.has_file()
                && let Some(file) = state.files.pop_front()
            {
                state.threads += 1;
                return Some(Work::File(file));
            }
            if let Some(left) = state.first().and_then(|at| state.waiting.remove(at)) {
                state.unallowed += usize::from(left.counted.is_none());
                state.since = Some(Instant::now());
                if state.has_work() {
                    self.has_more(&state);
                }
                self.has_room.notify_all();
                return Some(Work::Descriptor(left));
            }
            state = if state.is_short_until.is_some() && !state.files.is_empty() {
                self.has_work.wait_timeout(state, AGAIN).unwrap_or_else(PoisonError::into_inner).0
            } else {
                self.has_work.wait(state).unwrap_or_else(PoisonError::into_inner)
            };
        }
        None
    }

    /// A thread has closed what it was given in its turn.
    fn closed(&self, turn: u64, is_unallowed: bool) {
        let mut state = self.lock();
        state.unallowed -= usize::from(is_unallowed);
        if state.turns == turn {
            state.since = None;
        } else if state.has_work() {
            self.has_more(&state);
        }
    }
}

/// What the closer does next.
enum Work {
    Descriptor(Left),
    /// There is a place for a thread that closes it.
    File(OwnedFd),
}

/// The place of a thread that closes a file.
struct Place(&'static Closer);

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.threads -= 1;
        self.0.has_more(&state);
    }
}

/// Whether no file system is asked when it is closed: memory (which alone has seals), or what has no name in one. It is not
/// asked for that either.
pub fn asks_nobody(fd: impl AsFd) -> bool {
    let fd = fd.as_fd();
    let is_nameless = |link: &str| ["anon_inode:", "socket:", "pipe:"].iter().any(|kind| link.starts_with(kind));
    fcntl_get_seals(fd).is_ok()
        || std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
            .is_ok_and(|link| link.to_str().is_some_and(is_nameless))
}

/// Has [`SIGNAL`] end waits, and do nothing else.
fn handle_signal() -> io::Result<()> {
    extern "C" fn ignore(_: libc::c_int) {}
    // SAFETY: it is made of numbers, pointers and a set, for which zeroes say that there is nothing.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
    action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: the handler does nothing, which may be done at any moment.
    match unsafe { libc::sigaction(SIGNAL, &raw const action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends [`SIGNAL`] to the thread that has started it, again and again until it is dropped.
struct Timer(libc::timer_t);

impl Timer {
    fn start() -> io::Result<Self> {
        // SAFETY: it is made of numbers and pointers, for which zeroes say that there is nothing.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = SIGNAL;
        event.sigev_notify_thread_id = rustix::thread::gettid().as_raw_nonzero().get();
        let mut timer = ptr::null_mut();
        // SAFETY: both are read and written before it returns.
        if unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let timer = Self(timer);
        let every = libc::timespec { tv_sec: 0, tv_nsec: LONGEST.subsec_nanos().into() };
        let times = libc::itimerspec { it_interval: every, it_value: every };
        // SAFETY: the timer is there, and the times are read before it returns.
        match unsafe { libc::timer_settime(timer.0, 0, &raw const times, ptr::null_mut()) } {
            0 => Ok(timer),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: it is there until here, and nobody has its name after this.
        unsafe { libc::timer_delete(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::io::Errno;

    use super::*;
    use crate::lingering::lingering;
    use crate::refuse::refuse;
    use crate::rights::tests::send_fd;

    /// What is dropped after it is closed.
    fn goes_on() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        drop(FromPeer::from(ours));
        assert_eq!(theirs.read(&mut [0]).map_err(|e| Errno::from_io_error(&e)), Ok(0), "it was closed");
    }

    #[test]
    fn what_somebody_has_an_allowance_for_is_closed_and_then_he_may_have_the_next() {
        let allowance: Arc<Allowance> = Arc::default();
        for _ in 0..3 {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            close(ours.into(), allowance.take(1));
            assert_eq!(theirs.read(&mut [0]).map_err(|e| Errno::from_io_error(&e)), Ok(0), "it was closed");
        }
    }

    #[test]
    fn sockets_that_linger_hold_up_neither_who_drops_them_nor_what_is_dropped_after_them() {
        begin().unwrap();
        let mut peers = Vec::new();
        for _ in 0..100 {
            let (socket, peer) = lingering();
            drop(FromPeer::from(OwnedFd::from(socket)));
            peers.push(peer);
        }
        goes_on();
    }

    #[test]
    fn sockets_that_linger_inside_of_others_hold_up_nobody_either() {
        begin().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let peers = [(); 20].map(|()| {
            let (socket, peer) = lingering();
            send_fd(&theirs, &socket);
            peer
        });
        let (outer, inner) = UnixStream::pair().unwrap();
        send_fd(&inner, &ours);
        drop((ours, theirs, inner));
        drop(FromPeer::from(outer));
        goes_on();
        drop(peers);
    }

    #[test]
    fn files_are_closed_however_many_there_are() {
        begin().unwrap();
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let files: Vec<_> = (0..4 * MOST_THREADS).map(|_| std::fs::File::open(&path).unwrap()).collect();
        let numbers: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        files.into_iter().for_each(|file| drop(FromPeer::from(OwnedFd::from(file))));
        let is_open =
            |number: &i32| std::fs::read_link(format!("/proc/self/fd/{number}")).is_ok_and(|link| link == path);
        let end = std::time::Instant::now() + Duration::from_secs(30);
        while numbers.iter().any(is_open) {
            assert!(std::time::Instant::now() < end, "all are closed");
            thread::yield_now();
        }
    }

    #[test]
    fn a_timer_that_is_dropped_is_there_no_more() {
        let timer = Timer::start().unwrap();
        let name = timer.0;
        let is_there = || {
            // SAFETY: it is made of numbers.
            let mut left: libc::itimerspec = unsafe { std::mem::zeroed() };
            // SAFETY: what is left is written before it returns, and a name that nobody has any more is an error.
            unsafe { libc::timer_gettime(name, &raw mut left) == 0 }
        };
        assert!(is_there());
        drop(timer);
        assert!(!is_there());
    }

    fn file() -> OwnedFd {
        std::fs::File::open("/proc/self/status").unwrap().into()
    }

    fn left(fd: impl Into<OwnedFd>) -> Left {
        Left { fd: fd.into(), counted: None }
    }

    /// One that has begun, with this to do. Its threads never end.
    fn made(state: impl FnOnce(&mut State)) -> &'static Closer {
        let closer: &Closer = Box::leak(Box::new(Closer::new()));
        let mut begun = closer.lock();
        begun.has_begun = true;
        state(&mut begun);
        drop(begun);
        closer
    }

    fn is_closed(mut other: UnixStream) -> bool {
        other.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        other.read(&mut [0]).is_ok_and(|read| read == 0)
    }

    #[test]
    fn each_file_takes_a_thread_of_its_own_and_waits_where_there_are_as_many_as_may_be() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let closer = made(|state| {
            state.threads = MOST_THREADS - 1;
            state.waiting.push_back(left(socket));
            state.files.extend([file(), file()]);
        });
        assert!(matches!(closer.next(0), Some(Work::File(_))));
        assert_eq!(closer.lock().threads, MOST_THREADS);
        assert!(matches!(closer.next(0), Some(Work::Descriptor(_))), "the other has to wait");

        let (socket, other) = UnixStream::pair().unwrap();
        let closer = made(|state| {
            state.threads = MOST_THREADS;
            state.waiting.extend([left(file()), left(socket)]);
        });
        thread::spawn(move || closer.run());
        assert!(is_closed(other), "it goes on with what no file system has");
        assert_eq!(closer.lock().files.len(), 1, "the thread that closes all others closes no file");
    }

    #[test]
    fn where_no_thread_can_be_had_files_wait_and_nothing_else() {
        handle_signal().unwrap();
        let [(before, other_before), (after, other_after)] = [(); 2].map(|()| UnixStream::pair().unwrap());
        let closer = made(|state| {
            state.files.push_back(file());
            state.waiting.push_back(left(before));
        });
        thread::spawn(move || {
            for call in [libc::SYS_clone, libc::SYS_clone3] {
                refuse(call, libc::EAGAIN);
            }
            closer.run();
        });
        assert!(is_closed(other_before));
        let state = closer.lock();
        assert_eq!((state.files.len(), state.threads), (1, 0), "it is not closed by who closes everything");
        drop(state);
        closer.leave(left(after));
        assert!(is_closed(other_after));
        // Nor is it forgotten.
        let (thread, is_there) = sync_channel(0);
        thread::spawn(move || {
            let mut state = closer.lock();
            (state.turns, state.since) = (2, None);
            drop(state);
            thread.send(matches!(closer.next(2), Some(Work::File(_)))).unwrap();
        });
        assert_eq!(is_there.recv_timeout(Duration::from_secs(30)), Ok(true));
    }

    /// As if a thread had its turn that never comes back.
    fn be_stuck(state: &mut State) {
        (state.turns, state.since, state.unallowed) = (1, Some(Instant::now()), 1);
    }

    #[test]
    fn another_thread_goes_on_when_one_does_not_come_back_and_closes_what_is_left_later_too() {
        handle_signal().unwrap();
        let (before, other_before) = UnixStream::pair().unwrap();
        let closer = made(|state| {
            be_stuck(state);
            state.waiting.push_back(left(before));
        });
        thread::spawn(move || closer.run());
        assert!(is_closed(other_before));
        let (after, other_after) = UnixStream::pair().unwrap();
        closer.leave(left(after));
        assert!(is_closed(other_after));

        // Stood by before there was anything to do.
        let closer = made(be_stuck);
        thread::spawn(move || closer.run());
        let (after, other_after) = UnixStream::pair().unwrap();
        closer.leave(left(after));
        assert!(is_closed(other_after));
    }

    #[test]
    fn somebody_stands_by_from_the_start_and_again_when_he_has_taken_over() {
        let closer: &Closer = Box::leak(Box::new(Closer::new()));
        closer.begin().unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        for turns in 1..=3 {
            // Whose turn it is has nothing to do; from here on it is as if it never came back.
            let mut state = closer.lock();
            while state.turns < turns || state.since.is_some() {
                drop(state);
                assert!(Instant::now() < end, "turn {turns}");
                thread::yield_now();
                state = closer.lock();
            }
            assert!(turns > 1 || state.stands_by, "there is no need of another");
            state.since = Some(Instant::now());
            drop(state);
            // It is closed by who takes over, who first has another stand by.
            let (socket, other) = UnixStream::pair().unwrap();
            closer.leave(left(socket));
            assert!(is_closed(other), "turn {turns}");
        }
    }

    #[test]
    fn another_thread_goes_on_with_a_file_that_there_was_no_thread_for_when_one_does_not_come_back() {
        handle_signal().unwrap();
        let closer = made(|state| {
            be_stuck(state);
            state.files.push_back(file());
            state.is_short_until = Some(Instant::now() + TOO_LONG);
        });
        thread::spawn(move || closer.run());
        let end = Instant::now() + Duration::from_secs(30);
        while !closer.lock().files.is_empty() {
            assert!(Instant::now() < end, "nothing else is left to be closed");
            thread::yield_now();
        }
    }

    #[test]
    fn who_does_not_come_back_from_what_nobody_has_an_allowance_for_leaves_threads_to_what_somebody_has() {
        handle_signal().unwrap();
        let [(stranger, theirs), (own, ours)] = [(); 2].map(|()| UnixStream::pair().unwrap());
        let closer = made(|state| {
            be_stuck(state);
            state.unallowed = MOST_THREADS;
            state.waiting.push_back(left(stranger));
        });
        thread::spawn(move || closer.run());
        let allowance = Arc::new(Allowance::default());
        closer.leave(Left { fd: own.into(), counted: Some(allowance.take(1)) });
        // It waits until the last one was closed.
        drop(allowance.take(1));
        assert!(is_closed(ours));
        theirs.set_nonblocking(true).unwrap();
        assert!((&theirs).read(&mut [0]).is_err(), "it is open still");
        // One of those threads comes back.
        closer.closed(1, true);
        assert!(is_closed({
            theirs.set_nonblocking(false).unwrap();
            theirs
        }));
    }

    #[test]
    fn who_lets_peers_in_waits_until_few_descriptors_are_left_to_be_closed_or_for_a_moment() {
        begin().unwrap();
        let (mut others, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..100 {
            // It takes a while to close, so that what comes after it is there for some time.
            let (socket, peer) = lingering();
            peers.push(peer);
            let (ours, theirs) = UnixStream::pair().unwrap();
            theirs.set_nonblocking(true).unwrap();
            others.push((theirs, [FromPeer::from(OwnedFd::from(socket)), FromPeer::from(ours)]));
        }
        let others: Vec<_> = others.into_iter().map(|(theirs, _dropped)| theirs).collect();
        let begin = std::time::Instant::now();
        await_room();
        let waited = begin.elapsed();
        // They are closed in this order. One is in hand, and before each there is one that lingers.
        let closed = others.iter().take_while(|other| (&**other).read(&mut [0]).is_ok()).count();
        assert!(waited >= PATIENCE || 2 * (others.len() - closed) <= MOST_WAITING + 2, "{closed} in {waited:?}");
    }

    #[test]
    fn files_are_told_from_what_no_file_system_has() {
        let (socket, _other) = UnixStream::pair().unwrap();
        assert!(asks_nobody(&socket));
        assert!(asks_nobody(rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap()));
        assert!(asks_nobody(crate::EventNotifier::new().unwrap()));
        assert!(!asks_nobody(std::fs::File::open("/proc/self/status").unwrap()));
    }
}
