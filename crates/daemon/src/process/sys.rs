//! The system calls that have no safe wrapper in our dependencies.

#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use egret_event_loop::Nanos;

/// Which side of a fork this is.
pub(super) enum Forked {
    Parent,
    Child,
}

/// Forks, if this is the only thread.
///
/// # Errors
/// There are other threads, or the kernel refuses.
pub(super) fn fork() -> io::Result<Forked> {
    check_alone()?;
    // SAFETY: this thread is the only one (checked above, and only it could start another), so no lock is held by a
    // thread that the child lacks, and the child may go on as any program.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Forked::Child),
        _ => Ok(Forked::Parent),
    }
}

/// That this is the only thread.
fn check_alone() -> io::Result<()> {
    match std::fs::read_dir("/proc/self/task")?.count() {
        1 => Ok(()),
        _ => Err(io::Error::other("there are other threads already")),
    }
}

/// Removes variables from the environment, if this is the only thread.
///
/// # Errors
/// There are other threads.
pub(super) fn remove_variables(names: &[&str]) -> io::Result<()> {
    check_alone()?;
    for name in names {
        // SAFETY: no other thread reads the environment meanwhile, because there is none (checked above).
        unsafe { std::env::remove_var(name) };
    }
    Ok(())
}

/// Ends the process here, without what `exit` would run a second time in a forked copy.
pub(super) fn exit_now(status: i32) -> ! {
    // SAFETY: `_exit` takes any status and does not return.
    unsafe { libc::_exit(status) }
}

/// Ignores a signal, in the whole process.
pub(super) fn ignore(signal: libc::c_int) {
    // SAFETY: no handler of ours is set, and ignoring runs no code at all.
    unsafe { libc::signal(signal, libc::SIG_IGN) };
}

/// Has a signal do what it does unless somebody chose otherwise, in the whole process.
pub(super) fn heed(signal: libc::c_int) {
    // SAFETY: no handler of ours is set, and the default runs no code of ours.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// Lets `signals` through to this thread, which ends the process if one has come and nothing else was to become of it.
pub(super) fn unblock(signals: &[libc::c_int]) -> io::Result<()> {
    mask(libc::SIG_UNBLOCK, signals).map(|_| ())
}

/// Changes what this thread blocks, and those do that it starts from now on; the set of `signals`.
fn mask(how: libc::c_int, signals: &[libc::c_int]) -> io::Result<libc::sigset_t> {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` initialises the set it is given, and the calls that follow only see it initialised; the
    // signal numbers are libc's constants. `pthread_sigmask` may be asked not to tell the old mask.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for &signal in signals {
            libc::sigaddset(set.as_mut_ptr(), signal);
        }
        let set = set.assume_init();
        match libc::pthread_sigmask(how, &set, std::ptr::null_mut()) {
            0 => Ok(set),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Blocks `signals` in this thread, and in those that it starts from now on; the descriptor reads them.
pub(super) fn signal_descriptor(signals: &[libc::c_int]) -> io::Result<OwnedFd> {
    let set = mask(libc::SIG_BLOCK, signals)?;
    // SAFETY: -1 asks for a new descriptor, and the set is initialised.
    let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// How long a thread of this process has run on a processor; `None` if it has ended.
pub(crate) fn thread_cpu_time(thread_id: i32) -> Option<Nanos> {
    // How the kernel spells such a clock, and what `pthread_getcpuclockid` returns (linux/posix-timers_types.h).
    const PER_THREAD_SCHED: libc::clockid_t = 4 | 2;
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: the call writes a timespec where it is told to, or fails: no number of a clock is unsound.
    if unsafe { libc::clock_gettime((!thread_id << 3) | PER_THREAD_SCHED, time.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so it has been written.
    let time = unsafe { time.assume_init() };
    Some(Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64))
}

/// Takes over a descriptor that the process was started with, and keeps it from processes that it might start.
///
/// # Errors
/// It is not open.
pub(super) fn inherit(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_SETFD takes flags, and does nothing to a number that is not open.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, and whoever started us named it as ours. `Inherited`, the only caller, takes each
    // over once, and before anything here opens descriptors.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A user's numbers.
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

/// A user, wherever the system has its users from; `None` if there is none of this name.
pub(super) fn user(name: &str) -> io::Result<Option<User>> {
    // SAFETY: `getpwnam_r` is what `look_up` wants of its caller.
    unsafe { look_up(name, libc::getpwnam_r, |user: &libc::passwd| User { uid: user.pw_uid, gid: user.pw_gid }) }
}

/// The groups that a user is in, `gid` among them.
pub(super) fn groups_of(user: &str, gid: u32) -> io::Result<Vec<u32>> {
    let user = std::ffi::CString::new(user)?;
    let mut groups = vec![0; 64];
    loop {
        let mut count = groups.len() as libc::c_int;
        // SAFETY: the name ends with a zero, and there is room for `count` groups, which the call sets to how many it
        // wrote or would have written.
        let found = unsafe { libc::getgrouplist(user.as_ptr(), gid, groups.as_mut_ptr(), &raw mut count) };
        let (room, count) = (groups.len(), usize::try_from(count).unwrap_or(0));
        groups.resize(count.max(if found < 0 { room * 2 } else { 0 }), 0);
        if found >= 0 {
            return Ok(groups);
        }
    }
}

/// The number of a group, wherever the system has its groups from; `None` if there is none of this name.
pub(crate) fn group_id(name: &str) -> io::Result<Option<u32>> {
    // SAFETY: `getgrnam_r` is what `look_up` wants of its caller.
    unsafe { look_up(name, libc::getgrnam_r, |group: &libc::group| group.gr_gid) }
}

/// The number of a user, likewise.
pub(crate) fn user_id(name: &str) -> io::Result<Option<u32>> {
    Ok(user(name)?.map(|user| user.uid))
}

/// A function that looks an entry up by its name: fills the entry in, and the strings that it leads to, as many as fit.
type LookUp<T> =
    unsafe extern "C" fn(*const libc::c_char, *mut T, *mut libc::c_char, libc::size_t, *mut *mut T) -> libc::c_int;

/// # Safety
/// `call` has the contract of getpwnam_r(3).
unsafe fn look_up<T, R>(name: &str, call: LookUp<T>, take: impl Fn(&T) -> R) -> io::Result<Option<R>> {
    let Ok(name) = std::ffi::CString::new(name) else { return Ok(None) };
    let mut entry = MaybeUninit::<T>::uninit();
    let mut found = std::ptr::null_mut();
    // A group's members come too, and there may be many.
    let mut strings = vec![0; 1 << 10];
    loop {
        // SAFETY: the name ends with a zero, and the other pointers are to what the call writes, of the length it is
        // told.
        let error = unsafe {
            let (entry, strings, len) = (entry.as_mut_ptr(), strings.as_mut_ptr(), strings.len());
            call(name.as_ptr(), entry, strings, len, &raw mut found)
        };
        match error {
            0 if found.is_null() => return Ok(None),
            // SAFETY: it points to `entry`, which the call has filled in.
            0 => return Ok(Some(take(unsafe { &*found }))),
            libc::ERANGE if strings.len() < 1 << 24 => strings.resize(strings.len() * 2, 0),
            // What these mean depends on where groups come from; none is of this name.
            libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM => return Ok(None),
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}
