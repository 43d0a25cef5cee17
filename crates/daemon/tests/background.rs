//! Going into the background, and taking over what the process is started with, seen from outside.
//!
//! Both want a process with one thread, which the usual test harness is not. So this program is its own harness:
//! run plainly it starts itself once for each role below and looks at what becomes of it.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, ExitCode, Output, Stdio};

use egret_daemon::process::{Inherited, Pidfile, Side, Signal, Signals, background};

type Test = fn(&Path);

const ROLE: &str = "EGRET_TEST_ROLE";
const PLACE: &str = "EGRET_TEST_PLACE";

fn main() -> ExitCode {
    if let Ok(role) = std::env::var(ROLE) {
        return play(&role);
    }
    let tests: [(&str, Test); 5] = [
        ("the_launcher_ends_when_the_daemon_serves_and_a_signal_ends_the_daemon", serves),
        ("a_daemon_that_fails_hands_its_line_to_the_launcher", fails),
        ("a_daemon_that_dies_without_a_word_is_reported", dies),
        ("a_process_with_threads_does_not_fork", threads),
        ("what_is_handed_over_goes_no_further", inherits),
    ];
    for (name, test) in tests {
        let place = tempfile::tempdir().unwrap();
        test(place.path());
        println!("test {name} ... ok");
    }
    ExitCode::SUCCESS
}

/// What a command line tool would do.
fn play(role: &str) -> ExitCode {
    let place = std::env::var_os(PLACE).unwrap();
    if role == "threads" {
        std::thread::spawn(std::thread::park);
    }
    if role == "inherits" {
        let inherited = Inherited::take_over([]).unwrap();
        assert_eq!(inherited.unused().collect::<Vec<_>>(), ["s"]);
        let status = Command::new("sh").args(["-c", "env; ls -l /proc/self/fd"]).status().unwrap();
        return if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let readiness = match background() {
        Err(error) => return complain(&error),
        Ok(Side::Launcher(launched)) => match launched.wait() {
            Ok(()) => return ExitCode::SUCCESS,
            Err(error) => return complain(&error),
        },
        Ok(Side::Daemon(readiness)) => readiness,
    };
    match role {
        "fails" => readiness.failed("disk.img: no such file"),
        "serves" => {
            let signals = Signals::block().unwrap();
            let pidfile = Pidfile::create(&Path::new(&place).join("pid")).unwrap();
            readiness.ready().unwrap();
            assert_eq!(signals.wait().unwrap(), Signal::Terminate);
            drop(pidfile);
        }
        _ => {}
    }
    ExitCode::SUCCESS
}

fn complain(error: &dyn std::fmt::Display) -> ExitCode {
    eprintln!("{error}");
    ExitCode::FAILURE
}

fn start(role: &str, place: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(ROLE, role).env(PLACE, place).stdin(Stdio::null());
    command
}

fn complaint(role: &str, place: &Path) -> String {
    let Output { status, stderr, .. } = start(role, place).output().unwrap();
    assert_eq!(status.code(), Some(1));
    String::from_utf8(stderr).unwrap()
}

fn serves(place: &Path) {
    // The daemon inherits this pipe and nobody else keeps it, so its end is the daemon's end.
    let (mut alive, inherited) = std::io::pipe().unwrap();
    let status = start("serves", place).stdin(inherited.try_clone().unwrap()).stdout(inherited).status().unwrap();
    assert!(status.success());
    // Its streams lead to /dev/null by now, or this would wait for it to end.
    assert_eq!(alive.read(&mut [0]).unwrap(), 0);

    let pidfile = place.join("pid");
    let number: i32 = std::fs::read_to_string(&pidfile).unwrap().trim().parse().unwrap();
    let daemon = rustix::process::Pid::from_raw(number).unwrap();
    assert_ne!(session_of(&number.to_string()), session_of("self"));
    let handle = rustix::process::pidfd_open(daemon, rustix::process::PidfdFlags::empty()).unwrap();
    rustix::process::kill_process(daemon, rustix::process::Signal::TERM).unwrap();
    let mut ended = [rustix::event::PollFd::new(&handle, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut ended, None).unwrap();
    assert!(!pidfile.exists());
}

/// The session's leader as `/proc/PID/stat` has it, which may be 0: in a container the leader is often outside of it, and
/// rustix's `getsid` takes that for impossible.
fn session_of(process: &str) -> i32 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // After the name, which ends with the last parenthesis: state, parent, process group, session.
    let (_, fields) = stat.rsplit_once(')').unwrap();
    fields.split_whitespace().nth(3).unwrap().parse().unwrap()
}

fn fails(place: &Path) {
    assert_eq!(complaint("fails", place), "disk.img: no such file\n");
}

fn dies(place: &Path) {
    assert_eq!(complaint("dies", place), "the daemon ended before it served\n");
}

fn threads(place: &Path) {
    assert_eq!(complaint("threads", place), "cannot go into the background: there are other threads already\n");
}

fn inherits(place: &Path) {
    let socket = UnixListener::bind(place.join("s")).unwrap();
    // The number of the process is that of the shell, which becomes it.
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=s exec \"$0\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(std::env::current_exe().unwrap());
    shell.env(ROLE, "inherits").env(PLACE, place).stdin(OwnedFd::from(socket));
    let Output { status, stdout, stderr } = shell.output().unwrap();
    let seen = String::from_utf8(stdout).unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    assert!(!seen.contains("LISTEN_") && !seen.contains("socket:"), "{seen}");
}
