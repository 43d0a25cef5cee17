//! Which system calls each kind of thread makes, and what for. The table is the whole of it: `filter` adds nothing.
//!
//! A thread inherits the filter of the one that starts it, and its own comes on top: what a thread may do is what *all*
//! filters allow. So a kind is allowed what the kinds are that it [starts](ThreadKind::starts).
//!
//! A test runs the daemon through all that it can do and fails for a rule that nothing used
//! (`crates/egret/tests/sandbox.rs`); what a rule is missing for is an error there, too.

#![forbid(unsafe_code)]

use std::fmt;

use libc::c_long;
use strum::VariantArray;

/// What a thread is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
pub enum ThreadKind {
    /// Serves monitors, makes what they order, and ends it: the main thread, the one of changes, those of teardowns.
    Control,
    /// Runs a loop.
    Io,
    /// Runs requests that block, for an I/O thread.
    Worker,
    /// Speaks with an export's clients.
    Session,
    /// Serves metrics.
    Metrics,
    /// Watches I/O threads.
    Watchdog,
    /// Writes the log.
    Log,
    /// Keeps the reservations of a logical unit in their file.
    Reservations,
    /// Connects to a disk's server.
    Connector,
    /// Calls of librbd that wait for a cluster, and what librbd itself starts.
    Rbd,
    /// Closes what peers have sent.
    Closer,
}

impl ThreadKind {
    /// Every kind.
    pub const ALL: [Self; Self::VARIANTS.len()] = *Self::VARIANTS.first_chunk().expect("all of them");

    /// The kinds of threads that threads of this kind start.
    pub const fn starts(self) -> &'static [Self] {
        match self {
            // What reaches other machines has a `Starter`.
            Self::Control => &[
                Self::Control,
                Self::Io,
                Self::Worker,
                Self::Session,
                Self::Metrics,
                Self::Watchdog,
                Self::Log,
                Self::Reservations,
            ],
            Self::Io | Self::Worker => &[Self::Worker],
            Self::Session
            | Self::Metrics
            | Self::Watchdog
            | Self::Log
            | Self::Reservations
            | Self::Connector
            | Self::Rbd
            | Self::Closer => &[],
        }
    }

    /// The word for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Io => "I/O",
            Self::Worker => "worker",
            Self::Session => "session",
            Self::Metrics => "metrics",
            Self::Watchdog => "watchdog",
            Self::Log => "log",
            Self::Reservations => "reservations",
            Self::Connector => "connector",
            Self::Rbd => "rbd",
            Self::Closer => "closer",
        }
    }
}

impl fmt::Display for ThreadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A call that threads of some kinds make.
#[derive(Debug)]
pub struct Rule {
    /// Its name.
    pub call: &'static str,
    /// Its number.
    pub number: c_long,
    /// What its arguments must be, all of them; none: it is allowed whatever they are.
    pub when: &'static [Argument],
    /// The same for people.
    pub shown: &'static str,
    /// Who makes it.
    pub who: &'static [ThreadKind],
    /// What for.
    pub why: &'static str,
}

impl Rule {
    /// Whether threads of a kind may make the call, or those that they start.
    pub fn is_for(&self, kind: ThreadKind) -> bool {
        self.who.iter().any(|who| *who == kind || kind.starts().contains(who))
    }

    /// Whether it allows a call with these arguments in a process of this number.
    pub fn admits(&self, arguments: &[u64], process: u32) -> bool {
        let admits = |Argument { index, mask, value }: &Argument| {
            arguments.get(usize::from(*index)).is_some_and(|argument| argument & mask == value.get(process))
        };
        self.when.iter().all(admits)
    }
}

/// What an argument of a call must be.
#[derive(Clone, Copy, Debug)]
pub struct Argument {
    /// Which, from 0 on.
    pub(crate) index: u8,
    /// The bits that count.
    pub(crate) mask: u64,
    /// What they must be.
    pub(crate) value: Value,
}

/// A number that may be known only when the daemon runs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value {
    Is(u64),
    ThisProcess,
}

impl Value {
    pub(crate) fn get(self, process: u32) -> u64 {
        match self {
            Self::Is(value) => value,
            Self::ThisProcess => process.into(),
        }
    }
}

/// An `int`: the upper half of the register is undefined.
const fn int(index: u8, value: i64) -> Argument {
    Argument { index, mask: u32::MAX as u64, value: Value::Is(value as u64 & u32::MAX as u64) }
}

const fn without(index: u8, bits: libc::c_int) -> Argument {
    Argument { index, mask: bits as u64, value: Value::Is(0) }
}

/// The type of a socket: with protocol 0 it is one of TCP, whose ports Landlock knows. It knows none of UDP, nor of what else
/// is spoken over IP.
const STREAM: Argument = Argument {
    index: 1,
    mask: !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) as u64 & u32::MAX as u64,
    value: Value::Is(libc::SOCK_STREAM as u64),
};

const fn rule(call: &'static str, number: c_long, who: &'static [ThreadKind], why: &'static str) -> Rule {
    Rule { call, number, when: &[], shown: "", who, why }
}

/// With a condition.
const fn only(rule: Rule, shown: &'static str, when: &'static [Argument]) -> Rule {
    Rule { when, shown, ..rule }
}

/// A call by its name in libc, which is its name in the table.
macro_rules! call {
    ($name:ident, $who:expr, $why:expr) => {
        rule(stringify!($name).split_at(4).1, libc::$name, $who, $why)
    };
    ($name:ident, $who:expr, $why:expr, $shown:expr, $($when:expr),+) => {
        only(call!($name, $who, $why), $shown, &[$($when),+])
    };
}

/// The same of one argument that is a constant, by its name.
macro_rules! by {
    ($name:ident, $who:expr, $why:expr, $index:literal, $of:ident::$constant:ident) => {
        call!($name, $who, $why, stringify!($constant), int($index, $of::$constant as i64))
    };
}

/// The same of an option of a socket.
macro_rules! option {
    ($name:ident, $who:expr, $why:expr, $level:ident, $option:ident) => {
        call!($name, $who, $why, stringify!($option), int(1, libc::$level as i64), int(2, libc::$option as i64))
    };
}

use ThreadKind::{Closer, Connector, Control, Io, Log, Metrics, Rbd, Reservations, Session, Watchdog, Worker};

const ANY: &[ThreadKind] = &ThreadKind::ALL;
const STARTERS: &[ThreadKind] = &[Control, Io, Worker, Session, Log, Connector, Rbd, Closer];
const CONFINERS: &[ThreadKind] = &[Control, Io];

/// How the C library starts a thread: with all that threads of a process share, and in no namespace of its own.
const THREAD: i64 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID) as i64;

/// What may be registered with a ring (linux/io_uring.h).
pub mod register {
    /// Ends `FILES2`.
    pub const UNREGISTER_FILES: u8 = 3;
    /// Registers what announces completions.
    pub const EVENTFD: u8 = 4;
    /// A file of the table.
    pub const FILES_UPDATE: u8 = 6;
    /// Before a ring is enabled: what it may do then.
    pub(crate) const RESTRICTIONS: u8 = 11;
    /// Ends its being made.
    pub(crate) const ENABLE_RINGS: u8 = 12;
    /// A table of files.
    pub const FILES2: u8 = 13;
    /// A table of buffers.
    pub const BUFFERS2: u8 = 15;
    /// A buffer of the table.
    pub const BUFFERS_UPDATE: u8 = 16;

    /// What an enabled ring is still used for.
    pub const OF_A_RING: [u8; 6] = [UNREGISTER_FILES, EVENTFD, FILES_UPDATE, FILES2, BUFFERS2, BUFFERS_UPDATE];
}

/// With a time that has no end (asm-generic/socket.h).
const SO_RCVTIMEO_NEW: i64 = 66;
/// Likewise; since Linux 6.16.
const SO_PASSRIGHTS: i64 = 83;

/// From linux/fs.h; `libc` does not have them all.
mod ioctl {
    pub(super) const BLKROGET: i64 = 0x125e;
    pub(super) const BLKSSZGET: i64 = 0x1268;
    pub(super) const BLKDISCARD: i64 = 0x1277;
    pub(super) const BLKPBSZGET: i64 = 0x127b;
    pub(super) const BLKGETSIZE64: i64 = 0x8008_1272;
}

/// Every rule.
pub const RULES: &[Rule] = &[
    // What a thread is made of.
    call!(SYS_futex, ANY, "waiting for another thread"),
    call!(SYS_sched_yield, ANY, "waiting for another thread, or leaving it the processor"),
    call!(SYS_clock_gettime, ANY, "the time, where the vDSO cannot tell it; processor time of threads"),
    call!(SYS_ppoll, ANY, "waiting for descriptors; before the last words of a process that aborts"),
    call!(SYS_mmap, ANY, "memory; a guest's", "not executable", without(2, libc::PROT_EXEC)),
    call!(SYS_mprotect, ANY, "memory; the end of a stack", "not executable", without(2, libc::PROT_EXEC)),
    call!(SYS_munmap, ANY, "memory"),
    call!(SYS_mremap, ANY, "memory"),
    call!(SYS_madvise, ANY, "memory; none of a guest's in a core"),
    call!(SYS_brk, ANY, "memory"),
    call!(SYS_getrandom, ANY, "keys of hash tables"),
    call!(SYS_close, ANY, "descriptors"),
    call!(SYS_write, ANY, "bells, the log"),
    call!(SYS_rt_sigprocmask, ANY, "starts and ends of threads"),
    by!(SYS_rt_sigaction, ANY, "the SIGBUS handler", 0, libc::SIGBUS),
    call!(SYS_rt_sigreturn, ANY, "the end of the SIGBUS handler"),
    call!(SYS_restart_syscall, ANY, "waiting on after a stop"),
    call!(SYS_sigaltstack, ANY, "starts and ends of threads"),
    call!(SYS_sched_getaffinity, ANY, "starts of threads"),
    call!(SYS_gettid, ANY, "starts of threads"),
    call!(SYS_exit, ANY, "the end of a thread"),
    call!(SYS_getpid, ANY, "raising a signal"),
    call!(
        SYS_tgkill,
        ANY,
        "raising a signal",
        "in this process",
        Argument { index: 0, mask: u32::MAX as u64, value: Value::ThisProcess }
    ),
    // Starting threads, and confining them.
    call!(
        SYS_clone,
        STARTERS,
        "starting a thread",
        "a thread",
        Argument { index: 0, mask: u64::MAX, value: Value::Is(THREAD as u64) }
    ),
    call!(SYS_set_robust_list, STARTERS, "starting a thread"),
    call!(SYS_rseq, STARTERS, "starting a thread"),
    by!(SYS_prctl, STARTERS, "starting a thread", 0, libc::PR_SET_NAME),
    by!(SYS_prctl, CONFINERS, "confining a thread", 0, libc::PR_SET_NO_NEW_PRIVS),
    call!(
        SYS_seccomp,
        CONFINERS,
        "confining a thread",
        "SECCOMP_SET_MODE_FILTER, no flags",
        int(0, libc::SECCOMP_SET_MODE_FILTER as i64),
        int(1, 0)
    ),
    call!(SYS_capget, &[Control], "confining a thread"),
    call!(SYS_capset, &[Control], "confining a thread"),
    // I/O threads.
    call!(SYS_io_uring_enter, &[Io], "the ring: requests, waiting"),
    call!(SYS_epoll_pwait2, &[Io], "fd-monitor=epoll; which clients over NBD have something to say"),
    call!(SYS_epoll_ctl, &[Io], "fd-monitor=epoll; clients over NBD; connections to NBD servers"),
    call!(SYS_preadv2, &[Io], "reads that the page cache may answer"),
    call!(SYS_pread64, &[Io, Control], "how the thread fares; whether an image takes direct I/O"),
    call!(SYS_eventfd2, &[Io, Control, Rbd], "bells"),
    call!(SYS_dup3, &[Io], "which of several I/O threads hears of an image's completions"),
    call!(SYS_io_setup, &[Io], "aio=native"),
    call!(SYS_io_submit, &[Io], "aio=native"),
    call!(SYS_io_destroy, &[Io], "aio=native"),
    by!(SYS_io_uring_register, &[Io], "images as the ring's own files", 1, register::FILES2),
    by!(SYS_io_uring_register, &[Io], "images as the ring's own files", 1, register::FILES_UPDATE),
    by!(SYS_io_uring_register, &[Io], "images as the ring's own files", 1, register::UNREGISTER_FILES),
    by!(SYS_io_uring_register, &[Io], "aio=io_uring beside another monitor", 1, register::EVENTFD),
    by!(SYS_io_uring_register, &[Io], "pin-memory=on", 1, register::BUFFERS2),
    by!(SYS_io_uring_register, &[Io], "pin-memory=on", 1, register::BUFFERS_UPDATE),
    call!(SYS_mincore, &[Io], "pin-memory=on"),
    call!(SYS_sched_setaffinity, &[Io, Control], "cpu-affinity; calibrating", "of the thread itself", int(0, 0)),
    // An I/O thread starts with these, before it narrows itself.
    call!(SYS_io_uring_setup, &[Control], "an I/O thread's ring"),
    by!(SYS_io_uring_register, &[Control], "an I/O thread's ring", 1, register::RESTRICTIONS),
    by!(SYS_io_uring_register, &[Control], "an I/O thread's ring", 1, register::ENABLE_RINGS),
    call!(SYS_epoll_create1, &[Control, Io], "an I/O thread's monitor; clients over NBD; connections to NBD servers"),
    by!(SYS_prctl, &[Control], "an I/O thread's deadlines", 0, libc::PR_SET_TIMERSLACK),
    // Workers.
    call!(SYS_preadv, &[Worker], "reads of aio=threads, or that cannot be done otherwise"),
    call!(SYS_pwritev, &[Worker], "writes likewise"),
    call!(SYS_pwritev2, &[Worker], "writes that are to be stable"),
    call!(SYS_fdatasync, &[Worker, Session, Control], "flushes; closing an image, or leaving it to others"),
    call!(SYS_fallocate, &[Worker], "discards and zeroes in files"),
    by!(SYS_ioctl, &[Worker], "discards on devices", 1, ioctl::BLKDISCARD),
    // Sessions.
    call!(SYS_accept4, &[Session, Metrics, Control], "clients"),
    call!(
        SYS_recvmsg,
        &[Session, Control, Io, Connector, Metrics],
        "messages with descriptors, and where none are wanted; clients over NBD; replies of NBD servers"
    ),
    by!(SYS_socketpair, &[Session], "a session that is kept for the next daemon", 0, libc::AF_UNIX),
    call!(
        SYS_sendmsg,
        &[Session, Control, Io],
        "messages with descriptors; sessions that are kept; clients over NBD; requests to NBD servers; calls of user-mode Linux"
    ),
    // With MSG_FASTOPEN it would connect as well, to any port: Landlock is not asked.
    call!(SYS_sendmsg, &[Connector], "an NBD server's handshake", "no MSG_FASTOPEN", without(2, libc::MSG_FASTOPEN)),
    option!(SYS_getsockopt, &[Session, Metrics, Control], "who a client is", SOL_SOCKET, SO_PEERCRED),
    call!(SYS_statx, &[Session, Watchdog, Control], "what an image is, or a socket; how long a file is"),
    by!(SYS_ioctl, &[Session], "a peer that does not read", 1, libc::TIOCOUTQ),
    call!(SYS_fstat, &[Session], "what a peer's memory is"),
    call!(SYS_fadvise64, &[Session], "an image that others have written to"),
    call!(
        SYS_memfd_create,
        &[Session],
        "the record of requests in flight, the state of a device, a session that is kept"
    ),
    call!(
        SYS_ftruncate,
        &[Session, Control, Reservations],
        "the record of requests in flight; growing an image; a file of reservations"
    ),
    by!(SYS_fcntl, &[Session, Closer], "what a peer's descriptor is", 1, libc::F_GET_SEALS),
    by!(SYS_fcntl, &[Session], "the record of requests in flight", 1, libc::F_ADD_SEALS),
    // What peers have sent.
    call!(SYS_timer_create, &[Closer], "an end to waiting for a socket that lingers"),
    call!(SYS_timer_settime, &[Closer], "an end to waiting for a socket that lingers"),
    call!(SYS_timer_delete, &[Closer], "an end to waiting for a socket that lingers"),
    call!(
        SYS_setsockopt,
        &[Control, Connector],
        "sockets that take no descriptors",
        "SO_PASSRIGHTS",
        int(1, libc::SOL_SOCKET as i64),
        int(2, SO_PASSRIGHTS)
    ),
    option!(SYS_getsockopt, &[Session], "what a peer's channel is", SOL_SOCKET, SO_TYPE),
    // Metrics.
    call!(SYS_read, &[Session, Watchdog, Control, Io], "clients, files of the kernel's, bells"),
    call!(SYS_sendto, &[Metrics, Watchdog, Control], "answers; the service manager"),
    option!(SYS_setsockopt, &[Session, Metrics, Control], "clients over TCP", IPPROTO_TCP, TCP_NODELAY),
    option!(SYS_setsockopt, &[Session], "clients over TCP", SOL_SOCKET, SO_KEEPALIVE),
    call!(SYS_shutdown, &[Metrics, Session], "clients that were told off, or that do not receive"),
    by!(SYS_ioctl, &[Metrics, Control], "sockets that do not block", 1, libc::FIONBIO),
    // The watchdog.
    call!(
        SYS_openat,
        &[Watchdog],
        "where a thread is",
        "for reading",
        without(2, libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC)
    ),
    // Connectors.
    call!(SYS_socket, &[Connector], "NBD servers", "AF_INET over TCP", int(0, libc::AF_INET as i64), STREAM, int(2, 0)),
    call!(
        SYS_socket,
        &[Connector],
        "NBD servers",
        "AF_INET6 over TCP",
        int(0, libc::AF_INET6 as i64),
        STREAM,
        int(2, 0)
    ),
    by!(SYS_setsockopt, &[Connector], "NBD servers", 1, libc::IPPROTO_TCP),
    option!(SYS_setsockopt, &[Connector], "NBD servers", SOL_SOCKET, SO_KEEPALIVE),
    // Control.
    call!(SYS_openat, &[Control, Reservations], "images and files of reservations, within what Landlock leaves"),
    by!(SYS_fcntl, &[Session, Control], "image locks", 1, libc::F_OFD_SETLK),
    by!(SYS_fcntl, &[Session, Control], "image locks", 1, libc::F_OFD_GETLK),
    by!(SYS_ioctl, &[Io, Worker, Session, Control], "what a device is, or whether it is gone", 1, ioctl::BLKGETSIZE64),
    by!(SYS_ioctl, &[Control], "what a device is", 1, ioctl::BLKROGET),
    by!(SYS_ioctl, &[Control], "what a device is", 1, ioctl::BLKSSZGET),
    by!(SYS_ioctl, &[Control], "what a device is", 1, ioctl::BLKPBSZGET),
    by!(SYS_ioctl, &[Control], "whether a terminal is to see what happens", 1, libc::TCGETS),
    by!(SYS_socket, &[Control, Connector], "exports, monitors, the service manager, NBD servers", 0, libc::AF_UNIX),
    call!(SYS_bind, &[Control], "sockets of exports and monitors"),
    call!(SYS_listen, &[Control], "sockets of exports and monitors"),
    call!(SYS_connect, &[Control, Connector], "whether somebody listens at a socket that is there; NBD servers"),
    call!(
        SYS_flock,
        &[Control, Reservations],
        "making a socket while nobody else does; whose a file of reservations is"
    ),
    // Images in clusters: librbd's calls, and its own threads.
    call!(
        SYS_socket,
        &[Rbd],
        "a cluster's daemons",
        "AF_INET or AF_INET6 over TCP",
        // They are told apart by one bit.
        Argument {
            index: 0,
            mask: !(libc::AF_INET as u64 ^ libc::AF_INET6 as u64) & u32::MAX as u64,
            value: Value::Is(libc::AF_INET as u64)
        },
        STREAM,
        int(2, 0)
    ),
    call!(SYS_connect, &[Rbd], "a cluster's daemons"),
    call!(SYS_setsockopt, &[Rbd], "a cluster's daemons"),
    call!(SYS_sendmsg, &[Rbd], "a cluster's daemons"),
    call!(SYS_read, &[Rbd], "a cluster's daemons; its configuration and keyrings"),
    call!(SYS_shutdown, &[Rbd], "a cluster's daemons"),
    call!(SYS_fcntl, &[Rbd], "a cluster's daemons"),
    call!(SYS_getsockname, &[Rbd], "a cluster's daemons"),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_epoll_create, &[Rbd], "a cluster's daemons"),
    call!(SYS_epoll_ctl, &[Rbd], "a cluster's daemons"),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_epoll_wait, &[Rbd], "a cluster's daemons"),
    call!(SYS_pipe2, &[Rbd], "librbd's own threads"),
    call!(SYS_openat, &[Rbd], "a cluster's configuration and keyrings, within what Landlock leaves"),
    call!(SYS_newfstatat, &[Rbd], "a cluster's configuration and keyrings"),
    call!(SYS_fstat, &[Rbd], "the same by newer C libraries"),
    by!(SYS_prctl, &[Rbd], "what the log of newer Cephs calls a thread", 0, libc::PR_GET_NAME),
    call!(SYS_lseek, &[Rbd], "a cluster's configuration and keyrings"),
    call!(SYS_statx, &[Rbd], "whose numbers of processes these are"),
    call!(SYS_pidfd_open, &[Rbd], "whether the process is gone that has an image locked"),
    call!(SYS_uname, &[Rbd], "what a cluster is told of its client"),
    call!(SYS_sysinfo, &[Rbd], "what a cluster is told of its client"),
    call!(SYS_memfd_create, &[Rbd], "the header of an encrypted image"),
    call!(SYS_ftruncate, &[Rbd], "the header of an encrypted image"),
    call!(SYS_fstatfs, &[Rbd], "the header of an encrypted image"),
    call!(SYS_writev, &[Rbd], "the header of an encrypted image"),
    call!(SYS_flock, &[Rbd], "the header of an encrypted image"),
    call!(SYS_mlock, &[Rbd], "the key of an encrypted image"),
    call!(SYS_munlock, &[Rbd], "the key of an encrypted image"),
    // Files of reservations.
    call!(SYS_fsync, &[Reservations], "a file of reservations, and its directory"),
    call!(SYS_renameat, &[Reservations], "a file of reservations in the place of the one before"),
    call!(SYS_clock_nanosleep, &[Control], "making a socket while nobody else does"),
    option!(SYS_getsockopt, &[Control], "what a socket is", SOL_SOCKET, SO_ACCEPTCONN),
    option!(SYS_getsockopt, &[Session, Control], "what a socket is", SOL_SOCKET, SO_DOMAIN),
    call!(
        SYS_setsockopt,
        &[Control],
        "a socket that is shared",
        "SO_RCVTIMEO",
        int(1, libc::SOL_SOCKET as i64),
        int(2, SO_RCVTIMEO_NEW)
    ),
    by!(SYS_fcntl, &[Control], "a descriptor of a set", 1, libc::F_DUPFD_CLOEXEC),
    by!(SYS_fcntl, &[Control], "what a descriptor was opened for", 1, libc::F_GETFL),
    by!(SYS_fcntl, &[Control], "an image past the page cache", 1, libc::F_SETFL),
    call!(SYS_newfstatat, &[Control], "users and groups by name"),
    call!(SYS_lseek, &[Session, Control], "what of an image is allocated; users and groups by name"),
    call!(SYS_geteuid, &[Control], "whose a socket is"),
    call!(SYS_getcwd, &[Control], "where a path begins that is not absolute"),
    call!(SYS_uname, &[Control], "where --record-waits was recorded"),
    call!(SYS_exit_group, &[Control], "the end"),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_readlink, &[Session, Control, Closer], "what a descriptor is; where a path leads"),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_open, &[Control], "sockets, within what Landlock leaves"),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_chmod, &[Control], "who may connect", "no set-user-id", without(1, 0o7000)),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_chown, &[Control], "who may connect"),
    #[cfg(target_arch = "x86_64")]
    call!(SYS_unlink, &[Session, Control], "sockets, the pidfile"),
    #[cfg(not(target_arch = "x86_64"))]
    call!(SYS_readlinkat, &[Session, Control, Closer], "what a descriptor is; where a path leads"),
    #[cfg(not(target_arch = "x86_64"))]
    call!(SYS_fchmodat, &[Control], "who may connect", "no set-user-id", without(2, 0o7000)),
    #[cfg(not(target_arch = "x86_64"))]
    call!(SYS_fchownat, &[Control], "who may connect"),
    #[cfg(not(target_arch = "x86_64"))]
    call!(SYS_unlinkat, &[Session, Control], "sockets, the pidfile"),
    // The standard library of a debug build checks that a descriptor is open before it closes it.
    #[cfg(debug_assertions)]
    by!(SYS_fcntl, ANY, "closing, in a debug build", 1, libc::F_GETFD),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_call_that_a_request_needs_has_a_condition() {
        // The kernel allows the others without running a filter (Linux 5.11).
        let hot = [
            libc::SYS_io_uring_enter,
            libc::SYS_io_submit,
            libc::SYS_epoll_pwait2,
            libc::SYS_ppoll,
            libc::SYS_recvmsg,
            libc::SYS_sendmsg,
            libc::SYS_write,
            libc::SYS_preadv2,
            libc::SYS_preadv,
            libc::SYS_pwritev,
            libc::SYS_pwritev2,
            libc::SYS_fdatasync,
            libc::SYS_futex,
        ];
        for rule in RULES.iter().filter(|rule| hot.contains(&rule.number)) {
            let connects = rule.who == [Connector];
            assert!(rule.when.is_empty() || connects, "{} has a condition", rule.call);
        }
    }

    #[test]
    fn nobody_may_execute_trace_or_start_processes() {
        let never =
            ["execve", "execveat", "ptrace", "process_vm_readv", "process_vm_writev", "fork", "vfork", "clone3"];
        assert!(!RULES.iter().any(|rule| never.contains(&rule.call)));
        let may_clone = |flags: u64| RULES.iter().any(|rule| rule.call == "clone" && rule.admits(&[flags], 1));
        assert!(may_clone(THREAD as u64) && !may_clone(libc::SIGCHLD as u64));
    }
}
