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

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::mpsc::sync_channel;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

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
/// Threads that close a file each. Beyond them files stay open until one of them is done.
const MOST_THREADS: usize = 16;

struct Closer {
    state: Mutex<State>,
    has_work: Condvar,
    has_room: Condvar,
}

struct State {
    waiting: VecDeque<OwnedFd>,
    /// Those of them that are files, and wait for a thread.
    files: VecDeque<OwnedFd>,
    /// How many threads close one.
    threads: usize,
    has_begun: bool,
}

static CLOSER: Closer = Closer {
    state: Mutex::new(State { waiting: VecDeque::new(), files: VecDeque::new(), threads: 0, has_begun: false }),
    has_work: Condvar::new(),
    has_room: Condvar::new(),
};

/// Has the thread there from here on. Before that, what is dropped is closed by whoever drops it. To be called before the
/// calling thread is confined.
///
/// # Errors
/// There is no room for a thread or a timer.
pub fn begin() -> io::Result<()> {
    let mut state = CLOSER.lock();
    if state.has_begun {
        return Ok(());
    }
    let (sender, made) = sync_channel(1);
    let bounds = Bounds::of_this_thread();
    let closer = move || {
        // A timer sends its signals to one thread, the one that makes it.
        let timer = Timer::new();
        bounds.narrow(ThreadKind::Closer);
        match timer {
            Ok(timer) => {
                drop(sender.send(Ok(())));
                CLOSER.run(&timer);
            }
            Err(e) => drop(sender.send(Err(e))),
        }
    };
    thread::Builder::new().name("egret-closer".to_owned()).stack_size(64 << 10).spawn(closer)?;
    made.recv().unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))?;
    state.has_begun = true;
    Ok(())
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
        let mut state = CLOSER.lock();
        if state.has_begun {
            state.waiting.push_back(fd);
            drop(state);
            CLOSER.has_work.notify_one();
        }
    }
}

impl Closer {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, timer: &Timer) {
        loop {
            match self.next() {
                Work::Descriptor(fd) if asks_nobody(&fd) => {
                    timer.set(LONGEST);
                    drop(fd);
                    timer.set(Duration::ZERO);
                }
                Work::Descriptor(fd) => self.lock().files.push_back(fd),
                Work::File(file) => {
                    let place = Place;
                    // Where no thread can be had this is dropped, and both with it.
                    let close = move || {
                        drop(file);
                        drop(place);
                    };
                    let thread = thread::Builder::new().name("peer-close".to_owned()).stack_size(64 << 10);
                    drop(thread.spawn(close));
                }
            }
        }
    }

    fn next(&self) -> Work {
        let mut state = self.lock();
        loop {
            if state.threads < MOST_THREADS
                && let Some(file) = state.files.pop_front()
            {
                state.threads += 1;
                return Work::File(file);
            }
            if let Some(fd) = state.waiting.pop_front() {
                self.has_room.notify_all();
                return Work::Descriptor(fd);
            }
            state = self.has_work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// What the closer does next.
enum Work {
    Descriptor(OwnedFd),
    /// There is a place for a thread that closes it.
    File(OwnedFd),
}

/// The place of a thread that closes a file.
struct Place;

impl Drop for Place {
    fn drop(&mut self) {
        CLOSER.lock().threads -= 1;
        CLOSER.has_work.notify_one();
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

/// Sends [`SIGNAL`] to the thread that has made it, as long as it is set.
struct Timer(libc::timer_t);

// SAFETY: it is a name for a timer of the kernel's, which any thread may use.
unsafe impl Send for Timer {}

impl Timer {
    fn new() -> io::Result<Self> {
        extern "C" fn ignore(_: libc::c_int) {}
        // SAFETY: it is made of numbers, pointers and a set, for which zeroes say that there is nothing.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        // SAFETY: the handler does nothing, which may be done at any moment.
        if unsafe { libc::sigaction(SIGNAL, &raw const action, ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: as above.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = SIGNAL;
        event.sigev_notify_thread_id = rustix::thread::gettid().as_raw_nonzero().get();
        let mut timer = ptr::null_mut();
        // SAFETY: both are read and written before it returns.
        match unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) } {
            0 => Ok(Self(timer)),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Signals come every so often; never, if that is no time.
    fn set(&self, every: Duration) {
        let every = libc::timespec { tv_sec: 0, tv_nsec: every.subsec_nanos().into() };
        let times = libc::itimerspec { it_interval: every, it_value: every };
        // SAFETY: the timer is there for as long as the process, and the times are read before it returns.
        let set = unsafe { libc::timer_settime(self.0, 0, &raw const times, ptr::null_mut()) };
        debug_assert_eq!(set, 0, "{}", io::Error::last_os_error());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use rustix::io::Errno;
    use rustix::net::sockopt::set_socket_linger;

    use super::*;
    use crate::rights::tests::send_fd;

    /// A socket that waits for an hour when it is closed, and its other end.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let theirs = listener.accept().unwrap().0;
        ours.set_nonblocking(true).unwrap();
        while let Ok(1..) = (&ours).write(&[0; 1 << 16]) {}
        set_socket_linger(&ours, Some(Duration::from_secs(3600))).unwrap();
        (ours, theirs)
    }

    /// What is dropped after it is closed.
    fn goes_on() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        drop(FromPeer::from(ours));
        assert_eq!(theirs.read(&mut [0]).map_err(|e| Errno::from_io_error(&e)), Ok(0), "it was closed");
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
    fn each_file_takes_a_thread_of_its_own_and_waits_where_there_are_as_many_as_may_be() {
        let file = || OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
        let made = |threads, waiting: Vec<OwnedFd>, files: Vec<OwnedFd>| Closer {
            state: Mutex::new(State { waiting: waiting.into(), files: files.into(), threads, has_begun: true }),
            has_work: Condvar::new(),
            has_room: Condvar::new(),
        };
        let (socket, _other) = UnixStream::pair().unwrap();
        let closer = made(MOST_THREADS - 1, vec![socket.into()], vec![file(), file()]);
        assert!(matches!(closer.next(), Work::File(_)));
        assert_eq!(closer.lock().threads, MOST_THREADS);
        assert!(matches!(closer.next(), Work::Descriptor(_)), "the other has to wait");

        // Nobody ends this one, which sleeps when it has done its work.
        let (socket, mut other) = UnixStream::pair().unwrap();
        let closer: &Closer = Box::leak(Box::new(made(MOST_THREADS, vec![file(), socket.into()], vec![])));
        thread::spawn(|| closer.run(&Timer::new().unwrap()));
        other.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        assert_eq!(other.read(&mut [0]).unwrap(), 0, "it goes on with what no file system has");
        assert_eq!(closer.lock().files.len(), 1, "the thread that closes all others closes no file");
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
