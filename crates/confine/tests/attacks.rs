//! What somebody who has taken over a thread gains by it: each kind of thread attacks, and nothing succeeds.

use std::ffi::CString;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::Path;

use egret_confine::{Bounds, Confinement, Files, ThreadKind};
use libc::c_long;

/// What came of a call: zero or more, or a negated errno, which the next call may change.
fn outcome(result: c_long) -> c_long {
    if result < 0 { -c_long::from(std::io::Error::last_os_error().raw_os_error().unwrap()) } else { result }
}

/// A system call, and what came of it.
macro_rules! syscall {
    ($($argument:expr),+) => {
        outcome(libc::syscall($($argument),+))
    };
}

fn is_refused(outcome: c_long) -> bool {
    [libc::EPERM, libc::EACCES].contains(&-(outcome as i32))
}

fn open(path: &Path, flags: libc::c_int) -> c_long {
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path ends with a zero.
    unsafe { syscall!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0o600) }
}

fn set_mode(path: &Path, mode: libc::mode_t) -> c_long {
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path ends with a zero.
    unsafe { outcome(libc::chmod(path.as_ptr(), mode).into()) }
}

/// Connects to a port of this machine by sending something, with no call of `connect`.
fn fast_open(port: u16) -> c_long {
    // SAFETY: no pointers.
    let socket = unsafe { syscall!(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return socket;
    }
    // SAFETY: a plain structure, for which zeroes are valid.
    let mut to: libc::sockaddr_in = unsafe { std::mem::zeroed() };
    (to.sin_family, to.sin_port) = (libc::AF_INET as u16, port.to_be());
    to.sin_addr.s_addr = u32::from(std::net::Ipv4Addr::LOCALHOST).to_be();
    // SAFETY: as above.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = (&raw mut to).cast();
    message.msg_namelen = size_of_val(&to) as u32;
    // SAFETY: the message names an address that outlives the call, and nothing else; the socket is closed once.
    unsafe {
        let sent = outcome(libc::sendmsg(socket as i32, &raw const message, libc::MSG_FASTOPEN) as c_long);
        libc::close(socket as i32);
        sent
    }
}

/// What nobody may do, whatever it is.
fn attack(kind: ThreadKind, outside: &Path, port: u16) {
    let (program, here) = (c"/bin/true".as_ptr(), std::process::id());
    let none = std::ptr::null::<u8>();
    let [read, execute] = [libc::PROT_READ, libc::PROT_READ | libc::PROT_EXEC];
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a call that is refused does nothing, and one that is not fails the test; a copy of the process that gets
    // through ends at once. No pointer is to anything that is changed.
    let attacks: [(&str, c_long); 33] = unsafe {
        [
            ("open for reading", open(outside, libc::O_RDONLY)),
            ("open for writing", open(outside, libc::O_WRONLY)),
            ("create", open(&outside.with_file_name("new"), libc::O_WRONLY | libc::O_CREAT)),
            ("openat2", syscall!(libc::SYS_openat2, libc::AT_FDCWD, program, none, 0)),
            ("set-user-id", set_mode(outside, 0o4755)),
            ("a connection that TCP makes by itself", fast_open(port)),
            ("socket over TCP", syscall!(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0)),
            ("socket over IPv6", syscall!(libc::SYS_socket, libc::AF_INET6, libc::SOCK_STREAM, 0)),
            ("socket over UDP", syscall!(libc::SYS_socket, libc::AF_INET, libc::SOCK_DGRAM, 0)),
            ("socket over UDP and IPv6", syscall!(libc::SYS_socket, libc::AF_INET6, libc::SOCK_DGRAM, 0)),
            ("socket over MPTCP", syscall!(libc::SYS_socket, libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP)),
            ("raw socket", syscall!(libc::SYS_socket, libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_RAW)),
            ("netlink socket", syscall!(libc::SYS_socket, libc::AF_NETLINK, libc::SOCK_RAW, 0)),
            ("vsock", syscall!(libc::SYS_socket, libc::AF_VSOCK, libc::SOCK_STREAM, 0)),
            ("execve", syscall!(libc::SYS_execve, program, none, none)),
            ("execveat", syscall!(libc::SYS_execveat, libc::AT_FDCWD, program, none, none, 0)),
            ("ptrace", syscall!(libc::SYS_ptrace, libc::PTRACE_TRACEME, 0, none, none)),
            ("process_vm_readv", syscall!(libc::SYS_process_vm_readv, here, none, 0, none, 0, 0)),
            ("process_vm_writev", syscall!(libc::SYS_process_vm_writev, here, none, 0, none, 0, 0)),
            ("pidfd_getfd", syscall!(libc::SYS_pidfd_getfd, 0, 0, 0)),
            ("a process", or_end(syscall!(libc::SYS_clone, libc::SIGCHLD, none, none, none, 0))),
            ("a namespace", syscall!(libc::SYS_unshare, libc::CLONE_NEWUSER)),
            ("memory that runs", syscall!(libc::SYS_mmap, none, 4096, execute, anonymous, -1, 0)),
            ("memory that comes to run", {
                let memory = libc::mmap(std::ptr::null_mut(), 4096, read, anonymous, -1, 0);
                syscall!(libc::SYS_mprotect, memory, 4096, execute)
            }),
            ("a signal to another process", syscall!(libc::SYS_tgkill, 1, 1, 0)),
            ("a signal to any process", syscall!(libc::SYS_kill, 1, 0)),
            // The kernel lets a thread choose for those of its user that have no more capabilities.
            ("processors of one that is named", syscall!(libc::SYS_sched_setaffinity, libc::gettid(), 0, none)),
            ("another filter's listener", syscall!(libc::SYS_seccomp, 1, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER, none)),
            ("bpf", syscall!(libc::SYS_bpf, 0, none, 0)),
            ("perf_event_open", syscall!(libc::SYS_perf_event_open, none, 0, -1, -1, 0)),
            ("userfaultfd", syscall!(libc::SYS_userfaultfd, 0)),
            ("mount", syscall!(libc::SYS_mount, none, program, none, 0, none)),
            ("setuid", syscall!(libc::SYS_setresuid, 0, 0, 0)),
        ]
    };
    // Who is there to reach other machines has a way out. A cluster's daemons may be at any port.
    let is_way_out = |what: &str| match what {
        "socket over TCP" | "socket over IPv6" => matches!(kind, ThreadKind::Connector | ThreadKind::Rbd),
        "a connection that TCP makes by itself" => kind == ThreadKind::Rbd,
        _ => false,
    };
    for (what, result) in attacks.into_iter().filter(|(what, _)| !is_way_out(what)) {
        assert!(is_refused(result), "{kind}: {what}: {result}");
    }
    // Past the vDSO, as the time is asked for where it cannot tell.
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: there is room for what it writes.
    let time = unsafe { syscall!(libc::SYS_clock_gettime, libc::CLOCK_MONOTONIC, &raw mut now) };
    assert_eq!(time, 0, "{kind}: nothing goes on without the time");
    // SAFETY: it is refused.
    let clone3 = unsafe { syscall!(libc::SYS_clone3, none, 0) };
    assert_eq!(clone3, -c_long::from(libc::ENOSYS), "{kind}: C libraries go on with clone");
}

/// Sockets of somebody who is not confined, at addresses without a file: of which no path keeps anybody away.
struct Abstract {
    stream: SocketAddr,
    datagram: SocketAddr,
    _listening: (UnixListener, UnixDatagram),
}

impl Abstract {
    fn bind() -> io::Result<Self> {
        let address = |of| SocketAddr::from_abstract_name(format!("egret-attacks-{}-{of}", std::process::id()));
        let (stream, datagram) = (address("stream")?, address("datagram")?);
        let listening = (UnixListener::bind_addr(&stream)?, UnixDatagram::bind_addr(&datagram)?);
        Ok(Self { stream, datagram, _listening: listening })
    }

    /// Whoever may make sockets comes so far as to call.
    fn attack(&self, kind: ThreadKind) {
        let connected = UnixStream::connect_addr(&self.stream).map(drop);
        let sent = UnixDatagram::unbound().and_then(|socket| socket.send_to_addr(b"x", &self.datagram).map(drop));
        for (what, result) in [("connection", connected), ("datagram", sent)] {
            let refused = result.map_err(|e| e.kind());
            assert_eq!(refused, Err(io::ErrorKind::PermissionDenied), "{kind}: {what} to an address without a file");
        }
    }
}

/// The end of a copy that should not be there.
fn or_end(clone: c_long) -> c_long {
    if clone == 0 {
        // SAFETY: it ends.
        unsafe { libc::_exit(0) };
    }
    clone
}

/// What control threads may do and others may not, and whether it was refused.
fn privileges(inside: &Path) -> [(&'static str, bool); 4] {
    // SAFETY: no pointer is to anything that is changed.
    unsafe {
        [
            ("open inside", is_refused(open(inside, libc::O_RDWR))),
            ("a UNIX socket", is_refused(syscall!(libc::SYS_socket, libc::AF_UNIX, libc::SOCK_STREAM, 0))),
            ("a ring", is_refused(syscall!(libc::SYS_io_uring_setup, 0, std::ptr::null::<u8>()))),
            ("connect", is_refused(syscall!(libc::SYS_connect, -1, std::ptr::null::<u8>(), 0))),
        ]
    }
}

/// A thread of this kind, started as the daemon starts them.
fn as_kind<T: Send>(kind: ThreadKind, act: impl FnOnce() -> T + Send) -> T {
    let bounds = Bounds::of_this_thread();
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            bounds.narrow(kind);
            act()
        });
        thread.join().unwrap()
    })
}

/// Workers that start one another, so many generations of them; the last one does it.
fn worker<T: Send>(generations: u32, act: impl FnOnce() -> T + Send) -> T {
    as_kind(ThreadKind::Worker, || if generations == 0 { act() } else { worker_dyn(generations - 1, Box::new(act)) })
}

fn worker_dyn<'a, T: Send>(generations: u32, act: Box<dyn FnOnce() -> T + Send + 'a>) -> T {
    worker(generations, act)
}

#[test]
fn nobody_who_takes_over_a_thread_opens_connects_executes_or_traces_anything() {
    let place = tempfile::tempdir().unwrap();
    let [inside, outside] = ["inside", "outside"].map(|name| {
        std::fs::create_dir(place.path().join(name)).unwrap();
        let file = place.path().join(name).join("file");
        std::fs::write(&file, "").unwrap();
        file
    });
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let others = Abstract::bind().unwrap();
    let mut files = Files::default();
    files.image(&inside);
    let missing = Confinement { files: Some(files), identity: None }.begin().unwrap();
    if !missing.is_nothing() {
        return egret_needs::this_test_lacks(format_args!("a kernel that can confine all: {missing}"));
    }
    let attack_as = |kind| {
        attack(kind, &outside, port);
        others.attack(kind);
        for (what, refused) in privileges(&inside) {
            let is_allowed = match kind {
                ThreadKind::Control => true,
                ThreadKind::Reservations => what == "open inside",
                ThreadKind::Connector => ["a UNIX socket", "connect"].contains(&what),
                ThreadKind::Rbd => ["open inside", "connect"].contains(&what),
                _ => false,
            };
            assert_eq!(refused, !is_allowed, "{kind}: {what}");
        }
    };
    // From the main thread, and from a control thread.
    for kind in ThreadKind::ALL {
        as_kind(kind, || attack_as(kind));
        as_kind(ThreadKind::Control, || as_kind(kind, || attack_as(kind)));
    }
    as_kind(ThreadKind::Io, || worker(0, || attack_as(ThreadKind::Worker)));

    // A worker that workers have started has no more filters to go through than the first one.
    let (tell, told) = std::sync::mpsc::channel();
    let looked_at = std::sync::Barrier::new(2);
    let deep = {
        let looked_at = &looked_at;
        move || {
            tell.send(rustix::thread::gettid()).unwrap();
            looked_at.wait();
        }
    };
    let filters = std::thread::scope(|scope| {
        scope.spawn(move || as_kind(ThreadKind::Control, || as_kind(ThreadKind::Io, || worker(50, deep))));
        let status = format!("/proc/self/task/{}/status", told.recv().unwrap().as_raw_nonzero());
        let status = std::fs::read_to_string(status).unwrap();
        looked_at.wait();
        status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:\t").map(str::to_owned))
    });
    // Linux 5.10 tells.
    assert!(filters.is_none_or(|filters| filters == "3"));
}
