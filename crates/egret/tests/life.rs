//! How a daemon ends: in time, whatever its disks do, and by itself when it cannot go on.

mod support;

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use egret_faultdisk::{Effect, IoType, Order};
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock};
use rustix::pipe::PipeFlags;
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::json;

use support::disk::Disk;
use support::fate::Fate;
use support::guest::Guest;
use support::http::get;
use support::qmp::Qmp;
use support::scratch::{Scratch, is_root_or_skips};
use support::server::{Options, Program, Reaped, Server};
use support::{PATIENCE, await_some, await_that};

const MIB: u64 = 1 << 20;
/// A disk that does not answer.
const HUNG: &str = "latency-ns=3600000000000";

/// The lines of a daemon's last words that complain.
fn complaints(server: &Server) -> String {
    server.complaints().join("\n")
}

/// A guest with two reads in flight that do not end.
fn hung_guest(socket: &Path) -> Guest {
    let mut guest = Guest::boot(socket);
    for head in [0, 3] {
        guest.describe_read_at(head, 4096);
        guest.offer(head);
    }
    await_that("the daemon to take the reads", || guest.is_taken_up());
    guest
}

#[test]
fn a_daemon_of_a_thousand_exports_ends_without_looking_at_each_for_each() {
    let scratch = Scratch::new();
    let of = |options: Options, number: usize| {
        let [disk, export] = [format!("d{number}"), format!("e{number}")];
        options.null(&disk, "").export(&export, &disk, &scratch.path(&export), "")
    };
    let options = (0..1000).fold(Options::new().words(["--shutdown-timeout=0"]), of);
    let mut server = Server::start(&Program::egret(), &options);
    assert_eq!(server.end().code(), Some(0));
}

#[test]
fn requests_that_do_not_end_are_named_and_the_daemon_ends_without_them() {
    let scratch = Scratch::new();
    let (socket, pidfile) = (scratch.path("hung"), scratch.path("pid"));
    let words = [format!("--pidfile={}", pidfile.display()), "--shutdown-timeout=1".to_owned()];
    let options = Options::new().null("d0", HUNG).export("e0", "d0", &socket, "writable=on").words(words);
    for _ in 0..2 {
        let mut server = Server::start(&Program::egret(), &options);
        let _guest = hung_guest(&socket);
        assert_eq!(server.end().code(), Some(1));
        let said = complaints(&server);
        assert!(said.contains("export 'e0': 2 requests have not ended in 1 s; blockdev 'd0'"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(!said.contains('\x1b'), "colours are for terminals: {said:?}");
        assert!(!pidfile.exists());
        // The socket is left, and the next daemon takes it over.
    }
}

#[test]
fn a_daemon_serves_and_ends_as_it_should_though_nobody_reads_any_more_what_it_prints() {
    let scratch = Scratch::new();
    let (disk, socket) = (scratch.image("disk.img", MIB), scratch.path("socket"));
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
    let mut command = Program::egret_alone().command();
    command.arg("--stats").arg(disk).arg("--socket").arg(&socket).stdout(writer);
    let mut daemon = Reaped(command.spawn().unwrap());
    // Ours went with the command.
    drop(command);
    assert!(rustix::io::read(&reader, &mut [0; 16]).unwrap() > 0, "it says how to attach the disk");
    drop(reader);
    Guest::boot(&socket).read_honestly();
    rustix::process::kill_process(rustix::process::Pid::from_child(&daemon.0), rustix::process::Signal::TERM).unwrap();
    let status = await_some("the daemon to end", || daemon.0.try_wait().unwrap());
    assert!(status.success(), "{status}");
    assert!(!socket.exists());
}

#[test]
fn a_daemon_whose_announcement_cannot_be_printed_serves_and_ends_as_it_should() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    // Its reader has gone.
    let (_, closed) = std::io::pipe().unwrap();
    // Its reader does not read.
    let (_reader, stuffed) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
    while rustix::io::write(&stuffed, &[0; 4096]).is_ok() {}
    for stdout in [Stdio::from(full), closed.into(), stuffed.into()] {
        let scratch = Scratch::new();
        let (disk, socket, pidfile) = (scratch.image("disk.img", MIB), scratch.path("socket"), scratch.path("pid"));
        let program = Program::egret_alone();
        let mut command = program.command();
        command.arg(disk).arg("--socket").arg(&socket).arg("--pidfile").arg(&pidfile).stdout(stdout);
        let mut daemon = Reaped(command.spawn().unwrap());
        // It is there before anybody may connect.
        let listens = || UnixStream::connect(&socket).is_ok();
        await_that("the daemon to listen or to end", || listens() || daemon.0.try_wait().unwrap().is_some());
        Guest::boot(&socket).read_honestly();
        rustix::process::kill_process(rustix::process::Pid::from_child(&daemon.0), rustix::process::Signal::TERM)
            .unwrap();
        let status = await_some("the daemon to end", || daemon.0.try_wait().unwrap());
        assert!(status.success(), "{status}");
        assert!(!socket.exists() && !pidfile.exists());
        let mut said = String::new();
        daemon.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains("WARN cannot print all of how disks are attached: "), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_daemon_whose_warnings_cannot_be_written_serves_all_the_same() {
    let scratch = Scratch::new();
    // Two that write to one disk.
    let [e0, e1] = ["e0", "e1"].map(|name| scratch.path(name));
    let options =
        Options::new().null("d0", "").export("e0", "d0", &e0, "writable=on").export("e1", "d0", &e1, "writable=on");
    let full = File::options().write(true).open("/dev/full").unwrap();
    let server = Server::start_logging_to(full, &Program::egret(), &options);
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_daemon_may_have_as_many_descriptors_as_its_hard_limit_says() {
    let scratch = Scratch::new();
    let options = Options::new().null("d0", "").export("e0", "d0", &scratch.path("e0"), "");
    let program = Program::egret().after(["sh", "-c", "ulimit -S -n 256; exec \"$0\" \"$@\""]);
    let server = Server::start(&program, &options);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.pid())).unwrap();
    let files = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let limits: Vec<_> = files.split_whitespace().take(2).collect();
    assert_eq!(limits[0], limits[1], "the soft limit and the hard one");
}

#[test]
fn a_daemon_that_waits_for_a_disk_before_it_serves_is_ended_by_a_signal() {
    let scratch = Scratch::new();
    let (server, pidfile) = (scratch.path("server"), scratch.path("pid"));
    let listener = UnixListener::bind(&server).unwrap();
    let options = Options::new()
        .nbd("d0", &server, "open-timeout=600")
        .export("e0", "d0", &scratch.path("e0"), "")
        .words([format!("--pidfile={}", pidfile.display())]);
    // Also one that it was started to ignore.
    let deaf = Program::egret().after(["sh", "-c", "trap '' HUP; exec \"$0\" \"$@\""]);
    let signals = [rustix::process::Signal::TERM, rustix::process::Signal::HUP];
    for (program, signal) in [Program::egret(), deaf].into_iter().zip(signals) {
        let mut daemon = Reaped(program.command().args(options.as_words()).spawn().unwrap());
        // It has a connection, and hears nothing.
        let _connection = listener.accept().unwrap();
        rustix::process::kill_process(rustix::process::Pid::from_child(&daemon.0), signal).unwrap();
        let status = await_some("the daemon to end", || daemon.0.try_wait().unwrap());
        assert_eq!(status.signal(), Some(signal.as_raw()), "{status}");
        assert!(!pidfile.exists());
    }
}

#[test]
fn a_daemon_that_is_the_first_process_of_a_container_and_waits_for_a_disk_is_ended_by_a_signal() {
    if !is_root_or_skips("for a namespace of processes") {
        return;
    }
    let scratch = Scratch::new();
    let (server, pidfile) = (scratch.path("server"), scratch.path("pid"));
    let listener = UnixListener::bind(&server).unwrap();
    let options = Options::new().nbd("d0", &server, "open-timeout=600").export("e0", "d0", &scratch.path("e0"), "");
    let options = options.words([format!("--pidfile={}", pidfile.display())]);
    let program = Program::egret().after(["unshare", "--pid", "--fork", "--kill-child"]);
    let mut outside = Reaped(program.command().args(options.as_words()).spawn().unwrap());
    // It has a connection, and hears nothing.
    let _connection = listener.accept().unwrap();
    let parent = format!("PPid:\t{}\n", outside.0.id());
    let is_child = |number: &i32| {
        std::fs::read_to_string(format!("/proc/{number}/status")).is_ok_and(|status| status.contains(&parent))
    };
    let mut all =
        std::fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let first = rustix::process::Pid::from_raw(all.find(is_child).unwrap()).unwrap();
    rustix::process::kill_process(first, rustix::process::Signal::TERM).unwrap();
    let status = await_some("the daemon to end", || outside.0.try_wait().unwrap());
    assert_eq!(status.code(), Some(1), "{status}");
    assert!(!pidfile.exists());
}

#[test]
fn a_daemon_that_waits_for_a_file_that_is_read_before_it_serves_is_ended_by_a_signal() {
    let scratch = Scratch::new();
    let secret = scratch.path("secret");
    rustix::fs::mknodat(rustix::fs::CWD, &secret, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let object = format!("secret,id=s,file={}", secret.display());
    let options = Options::new().monitor("m", &scratch.path("qmp")).words(["--object", &object]);
    let mut daemon = Reaped(Program::egret().command().args(options.as_words()).spawn().unwrap());
    // It reads, and nobody writes.
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let _writer = await_some("somebody to read", || rustix::fs::open(&secret, flags, Mode::empty()).ok());
    let signal = rustix::process::Signal::TERM;
    rustix::process::kill_process(rustix::process::Pid::from_child(&daemon.0), signal).unwrap();
    let status = await_some("the daemon to end", || daemon.0.try_wait().unwrap());
    assert_eq!(status.signal(), Some(signal.as_raw()), "{status}");
}

#[test]
fn a_daemon_that_cannot_start_ends_within_its_limit_or_by_a_signal_though_a_guest_has_a_disk_that_hangs() {
    let term = rustix::process::Signal::TERM;
    for (limit, signal, said) in [(1, None, "in 1 s"), (0, Some(term), "before another signal came")] {
        let (scratch, monitors) = (Scratch::new(), Scratch::new());
        let socket = scratch.path("hung");
        let options = Options::new().null("d0", HUNG).export("e0", "d0", &socket, "writable=on");
        let names: Vec<_> = (0..30).map(|at| format!("m{at}")).collect();
        let options = names.iter().fold(options, |options, name| options.monitor(name, &monitors.path(name)));
        let options = options.words([format!("--shutdown-timeout={limit}")]);
        // The last place is taken. For each the daemon waits a while for whoever makes sockets in the same directory.
        let _taken = UnixListener::bind(monitors.path("m29")).unwrap();
        let directory = File::open(monitors.path("")).unwrap();
        flock(&directory, FlockOperation::LockExclusive).unwrap();
        let mut command = Program::egret().command();
        let mut daemon = Reaped(command.args(options.as_words()).stderr(Stdio::piped()).spawn().unwrap());
        await_that("the export to listen", || UnixStream::connect(&socket).is_ok());
        let _guest = hung_guest(&socket);
        drop(directory);
        if let Some(signal) = signal {
            rustix::process::kill_process(rustix::process::Pid::from_child(&daemon.0), signal).unwrap();
        }
        let status = await_some("the daemon to end", || daemon.0.try_wait().unwrap());
        assert_eq!(status.code(), Some(1), "{status}");
        let mut lines = String::new();
        daemon.0.stderr.take().unwrap().read_to_string(&mut lines).unwrap();
        assert!(lines.contains(&format!("export 'e0': 2 requests have not ended {said}")), "{lines}");
        assert!(lines.contains("chardev 'm29': cannot listen"), "{lines}");
    }
}

#[test]
fn a_pidfile_that_cannot_be_written_is_not_there() {
    let scratch = Scratch::new();
    let (image, pidfile) = (scratch.image("disk", MIB), scratch.path("pid"));
    let options = Options::new().disk("d0", &image, "").export("e0", "d0", &scratch.path("e0"), "");
    let options = options.words([format!("--pidfile={}", pidfile.display())]);
    let mut command = Program::egret_with_files_of(0).command();
    let mut daemon = Reaped(command.args(options.as_words()).spawn().unwrap());
    let status = await_some("the daemon to end", || daemon.0.try_wait().unwrap());
    assert_eq!(status.code(), Some(1), "{status}");
    let mut said = String::new();
    daemon.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains(&pidfile.display().to_string()), "{said}");
    assert!(!pidfile.exists());
}

#[test]
fn a_disk_that_hangs_keeps_no_other_export_from_a_clean_end_and_a_second_signal_ends_the_daemon_at_once() {
    let scratch = Scratch::new();
    let (hung, other) = (scratch.path("hung"), scratch.path("other"));
    // What was written to the other disk is to be made stable, which here shows by failing.
    let program = Program::egret().with(Fate::fails(libc::SYS_fdatasync, libc::EDQUOT));
    let options = Options::new()
        .iothread("io0", "")
        .null("d0", HUNG)
        .disk("d1", &scratch.image("disk", MIB), "")
        .export("e0", "d0", &hung, "writable=on,iothread=io0")
        .export("e1", "d1", &other, "writable=on,iothread=io0")
        .words(["--shutdown-timeout=0"]);
    let mut server = Server::start(&program, &options);
    let _hung = hung_guest(&hung);
    let mut guest = Guest::boot(&other);
    guest.read_honestly();
    server.ask_to_end();
    await_that("the other client to be let go", || guest.is_over());
    await_that("the other disk to be made stable", || {
        complaints(&server).contains("blockdev 'd1': the last flush failed")
    });
    assert!(!other.exists());
    assert!(server.is_alive(), "it waits for the disk that hangs, as long as it takes");
    assert_eq!(server.end().code(), Some(1));
    let said = complaints(&server);
    assert!(said.contains("export 'e0': 2 requests have not ended before another signal came"), "{said}");
    assert_eq!(said.lines().count(), 2, "{said}");
}

#[test]
fn a_signal_after_quit_leaves_what_is_in_flight_its_time() {
    let scratch = Scratch::new();
    let (slow, monitor) = (scratch.path("slow"), scratch.path("qmp"));
    let options = Options::new().null("d0", "latency-ns=1000000000").export("e0", "d0", &slow, "writable=on");
    let options = options.monitor("m", &monitor).words(["--shutdown-timeout=0"]);
    let mut server = Server::start(&Program::egret(), &options);
    let _guest = hung_guest(&slow);
    Qmp::connect(&monitor).run("quit", json!({}));
    assert_eq!(server.end().code(), Some(0), "{}", complaints(&server));
}

#[test]
fn a_flush_that_does_not_end_does_not_keep_the_daemon_from_ending() {
    let scratch = Scratch::new();
    let socket = scratch.path("disk");
    let program = Program::egret().with(Fate::never(libc::SYS_fdatasync));
    let options = Options::new()
        .disk("d0", &scratch.image("disk", MIB), "")
        .export("e0", "d0", &socket, "writable=on")
        .words(["--shutdown-timeout=10"]);
    let mut server = Server::start(&program, &options);
    Guest::boot(&socket).read_honestly();
    assert_eq!(server.end().code(), Some(1));
    let said = complaints(&server);
    assert!(said.contains("blockdev 'd0': fdatasync has not ended in 10 s"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!socket.exists());
}

/// Whether anybody has locks on a file.
fn is_locked(path: &Path) -> bool {
    let file = path.metadata().expect("it is there");
    let (major, minor) = (rustix::fs::major(file.dev()), rustix::fs::minor(file.dev()));
    let named = format!(" {major:02x}:{minor:02x}:{} ", file.ino());
    std::fs::read_to_string("/proc/locks").expect("procfs").contains(&named)
}

/// Whether a thread is in uninterruptible sleep.
fn is_in_the_kernel(server: &Server) -> bool {
    server.each_thread("status").iter().any(|status| status.contains("State:\tD"))
}

#[test]
fn a_disk_that_hangs_in_the_kernel_is_named_all_else_is_done_and_the_process_is_gone_when_the_kernel_lets_it() {
    if !is_root_or_skips("for a disk that hangs") {
        return;
    }
    for aio in ["threads", "io_uring", "native"] {
        let (scratch, beside) = (Scratch::new(), Scratch::new());
        let (faulty, well) = (scratch.fault_disk(MIB), beside.fault_disk(MIB));
        let (hung, other, pidfile) = (scratch.path("hung"), scratch.path("other"), scratch.path("pid"));
        let words = [format!("--pidfile={}", pidfile.display()), "--shutdown-timeout=10".to_owned()];
        let options = Options::new()
            .iothread("io0", "")
            .disk("d0", &faulty.path(), &format!("aio={aio},cache.direct=on"))
            .disk("d1", &well.path(), "")
            .export("e0", "d0", &hung, "writable=on,iothread=io0")
            .export("e1", "d1", &other, "writable=on,iothread=io0")
            .words(words);
        let mut server = Server::start(&Program::egret(), &options);
        let mut disk = Disk::connect(&other).unwrap();
        disk.first().write(0, &[1; 4096]).unwrap();
        let unflushed = || well.tell(Order::Status).unwrap().unflushed;
        assert_eq!(unflushed(), 8);
        faulty.inject(IoType::Read, None, Effect::Never);
        let _hung = hung_guest(&hung);
        await_that("the disk to hang", || faulty.tell(Order::Status).unwrap().waiting == 2);

        server.ask_to_end();
        await_that("what hangs to be told", || !complaints(&server).is_empty());
        assert_eq!(unflushed(), 0, "{aio}");
        await_that("the pidfile to be gone", || !pidfile.exists());
        assert!(!other.exists());
        // What an io_uring has in flight the kernel ends by itself; the rest it ends before the process.
        if aio == "io_uring" {
            assert_eq!(server.await_end().code(), Some(1));
        } else {
            await_that("the process to wait for the kernel", || is_in_the_kernel(&server));
            assert!(server.is_alive(), "{aio}");
        }
        assert!(is_locked(&faulty.path()), "{aio}: nobody else has the disk before it has answered");
        faulty.tell(Order::Release).unwrap();
        assert_eq!(server.await_end().code(), Some(1), "{aio}");
        await_that("the disk to be free", || !is_locked(&faulty.path()));
        let said = complaints(&server);
        assert!(said.contains("export 'e0': 2 requests have not ended in 10 s; blockdev 'd0'"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn a_change_that_does_not_end_keeps_neither_clients_from_a_clean_end_nor_the_daemon() {
    let scratch = Scratch::new();
    let (socket, monitor) = (scratch.path("disk"), scratch.path("qmp"));
    let program = Program::egret().with(Fate::never(libc::SYS_ftruncate));
    let options = Options::new()
        .disk("d0", &scratch.image("disk", MIB), "")
        .export("e0", "d0", &socket, "writable=on")
        .monitor("m", &monitor)
        .words(["--shutdown-timeout=0"]);
    let mut server = Server::start(&program, &options);
    let mut guest = Guest::boot(&socket);
    guest.read_honestly();
    let mut qmp = Qmp::connect(&monitor);
    let order = json!({ "execute": "block_resize", "arguments": { "node-name": "d0", "size": 2 * MIB } });
    qmp.send(order.to_string().as_bytes());
    await_that("the change to hang", || {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
        let calls = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("syscall")).ok());
        calls.into_iter().any(|call| call.starts_with(&format!("{} ", libc::SYS_ftruncate)))
    });
    server.ask_to_end();
    await_that("the client to be let go", || guest.is_over());
    await_that("the export to be gone", || !socket.exists());
    assert!(server.is_alive());
    assert_eq!(server.end().code(), Some(1));
    let said = complaints(&server);
    assert!(said.contains("block_resize: what a monitor ordered has not ended before another signal came"), "{said}");
}

/// What ends by SIGABRT leaves no core file behind, here.
fn no_core_files() {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    setrlimit(Resource::Core, none).unwrap();
}

/// What a daemon says that ends by itself, by SIGABRT.
fn aborted(command: &mut Command) -> String {
    let mut child = Reaped(command.spawn().unwrap());
    let status = await_some("the daemon to end", || child.0.try_wait().unwrap());
    assert_eq!(status.signal(), Some(libc::SIGABRT));
    let mut said = String::new();
    child.0.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    said
}

/// A daemon whose I/O thread is to be stuck as soon as a guest asks for something.
fn stuck(scratch: &Scratch, more: &[&str]) -> (Program, Options) {
    let program = Program::egret().with(Fate::never(libc::SYS_preadv2));
    let options = Options::new()
        .iothread("io0", "")
        .disk("d0", &scratch.image("disk", MIB), "")
        .export("e0", "d0", &scratch.path("disk.sock"), "writable=on,iothread=io0")
        .monitor("m", &scratch.path("qmp"))
        .metrics(&scratch.path("metrics"))
        .words([format!("--pidfile={}", scratch.path("pid").display())])
        .words(["--watchdog=5"])
        .words(more.iter().copied());
    (program, options)
}

/// A guest that asks for what does not come.
fn ask(scratch: &Scratch) -> Guest {
    let mut guest = Guest::boot(&scratch.path("disk.sock"));
    guest.describe_read(4096);
    guest.offer(0);
    guest
}

#[test]
fn an_iothread_that_is_stuck_is_told_of_everywhere_and_the_daemon_still_ends_in_time() {
    let scratch = Scratch::new();
    let manager = UnixDatagram::bind(scratch.path("notify")).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let heard = |socket: &UnixDatagram| {
        let mut buffer = [0; 256];
        socket.recv(&mut buffer).map(|len| String::from_utf8(buffer[..len].to_vec()).unwrap())
    };
    let (program, options) = stuck(&scratch, &["--shutdown-timeout=1"]);
    let program = program.with_env("NOTIFY_SOCKET", &scratch.path("notify").display().to_string());
    let mut server = Server::start(&program.with_env("WATCHDOG_USEC", "20000"), &options);
    // Before that it serves no monitor, and may have to wait for room among its heartbeats.
    while !heard(&manager).unwrap().starts_with("READY=1\n") {}
    let mut qmp = Qmp::connect(&scratch.path("qmp"));
    for _ in 0..3 {
        assert_eq!(heard(&manager).unwrap(), "WATCHDOG=1\n");
    }
    let stalls = || get(&scratch.path("metrics"), "/metrics").unwrap().1;
    assert!(stalls().contains("egret_iothread_stalls_total{iothread=\"io0\"} 0\n"));

    let _guest = ask(&scratch);
    let told = qmp.event("EGRET_IOTHREAD_STALLED");
    assert_eq!((&told["id"], &told["phase"]), (&json!("io0"), &json!("submit")));
    assert!(stalls().contains("egret_iothread_stalls_total{iothread=\"io0\"} 1\n"));
    let call = format!("no turn in 5 s; it is in 'submit', in system call {} (preadv2)", libc::SYS_preadv2);
    await_that("a line in the log", || complaints(&server).contains(&call));
    // The manager hears no more of it, but what was on its way.
    manager.set_nonblocking(true).unwrap();
    while heard(&manager).is_ok() {}
    manager.set_nonblocking(false).unwrap();
    manager.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(heard(&manager).is_err());

    let said = qmp.fail("qom-set", json!({"path": "io0", "property": "poll-max-ns", "value": 0}));
    assert!(said.starts_with("iothread 'io0': it is stuck"), "{said}");
    assert_eq!(server.end().code(), Some(1));
    let said = complaints(&server);
    assert!(said.contains("export 'e0': "), "{said}");
}

#[test]
fn an_iothread_that_is_stuck_ends_the_daemon_where_asked_for_and_the_next_one_takes_over() {
    no_core_files();
    let scratch = Scratch::new();
    let (program, options) = stuck(&scratch, &["--on-stall=abort"]);
    let mut server = Server::start(&program, &options);
    let mut qmp = Qmp::connect(&scratch.path("qmp"));
    let _guest = ask(&scratch);
    // It does not wait long for whoever tells of it.
    let told = std::iter::from_fn(|| qmp.read()).find(|told| told["event"] == "EGRET_IOTHREAD_STALLED");
    assert!(told.is_none_or(|told| told["data"]["id"] == "io0"));
    assert_eq!(server.await_end().signal(), Some(libc::SIGABRT));
    let said = server.log();
    let last = said.last().unwrap();
    assert!(last.starts_with("egret: iothread 'io0' (thread ") && last.contains("(preadv2)"), "{last}");
    assert!(last.ends_with("; --on-stall=abort ends the process"), "{last}");
    assert!(scratch.path("pid").exists() && scratch.path("disk.sock").exists(), "nobody cleaned up");

    let next = Server::start(&Program::egret(), &options);
    Guest::boot(&scratch.path("disk.sock")).read_honestly();
    assert_eq!(next.terminate().code(), Some(0));
}

#[test]
fn an_iothread_that_cannot_go_on_ends_the_daemon_with_one_line() {
    no_core_files();
    let scratch = Scratch::new();
    // Its sleep: until something happens.
    let program = Program::egret().with(Fate::fails(libc::SYS_epoll_pwait2, libc::EIO).where_is(3, 0));
    let options = Options::new().iothread("io0", "fd-monitor=epoll").null("d0", "").export(
        "e0",
        "d0",
        &scratch.path("disk"),
        "iothread=io0",
    );
    assert_eq!(
        aborted(program.command().args(options.as_words())),
        "egret: iothread 'io0' cannot go on: Input/output error (os error 5)\n"
    );
}

#[test]
fn a_panic_ends_the_daemon_with_one_line() {
    no_core_files();
    let scratch = Scratch::new();
    // A library's own: there is no thread to write the log. It is started by one that is confined, and C libraries start
    // threads of those by this call and others by another.
    let mut command = Program::egret().with(Fate::fails(libc::SYS_clone, libc::EAGAIN)).command();
    command.arg(scratch.image("disk", MIB)).arg("--socket").arg(scratch.path("socket"));
    let said = aborted(&mut command);
    assert!(said.starts_with("egret: thread 'log' panicked at ") && said.lines().count() == 1, "{said}");
}
