//! The end of a daemon that cannot go on: one line, and SIGABRT, so that whoever supervises it starts another.
//!
//! A thread that is gone takes with it what it served, and nobody else notices; and what it left half done nobody can
//! trust. What is in flight is in the clients' records, from which the next daemon goes on.

use std::fmt::{self, Display};
use std::panic::{self, PanicHookInfo};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::PIPE_BUF;

/// How long whoever reads the log may take to make room for a line.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// From here on a panic, of whichever thread, ends the process with a line that says where. The release profile's panics
/// do not unwind in any case; with this those of others do not either, and neither prints more than a line.
pub fn abort_on_panic() {
    panic::set_hook(Box::new(|info| abort(Panic(info))));
}

/// Ends the process, and says why.
pub(crate) fn abort(why: impl Display) -> ! {
    say(&line(why));
    std::process::abort()
}

fn line(why: impl Display) -> String {
    let mut line = format!("egret: {why}").replace(char::is_control, " ");
    let end = (0..PIPE_BUF.min(line.len() + 1)).rev().find(|end| line.is_char_boundary(*end));
    line.truncate(end.unwrap_or(0));
    line.push('\n');
    line
}

/// Past every lock that another thread may hold, and not if it would have to wait for long: what must end does.
fn say(line: &str) {
    let stderr = rustix::stdio::stderr();
    if matches!(poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], Some(&PATIENCE)), Ok(1)) {
        let _ = rustix::io::write(stderr, line.as_bytes());
    }
}

/// A panic in a line.
struct Panic<'a>(&'a PanicHookInfo<'a>);

impl Display for Panic<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let payload = self.0.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("it says no more");
        let thread = std::thread::current();
        write!(f, "thread '{}' panicked", thread.name().unwrap_or("?"))?;
        if let Some(at) = self.0.location() {
            write!(f, " at {at}")?;
        }
        write!(f, ": {text}")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn last_words_are_one_line_that_fits_a_pipe() {
        assert_eq!(line("iothread 'io0'\nis\tgone"), "egret: iothread 'io0' is gone\n");
        let long = line("\u{e9}".repeat(PIPE_BUF));
        assert!(long.len() <= PIPE_BUF && long.ends_with("\u{e9}\n"));
    }

    /// A copy of this program, which runs the next test alone and does there what would end all the others.
    fn run(how: &str, stderr: Stdio) -> std::process::Child {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "--nocapture", "process::abort::tests::a_child_of_the_tests_below"]);
        child.env("EGRET_TEST_ABORT", how).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().unwrap()
    }

    #[test]
    fn a_child_of_the_tests_below() {
        let Some(how) = std::env::var_os("EGRET_TEST_ABORT") else { return };
        // No core file for what is meant to happen.
        rustix::process::setrlimit(
            rustix::process::Resource::Core,
            rustix::process::Rlimit { current: Some(0), maximum: Some(0) },
        )
        .unwrap();
        abort_on_panic();
        if how == "abort" {
            abort("iothread 'io0' has failed");
        }
        let thread = std::thread::Builder::new().name("io0".to_owned());
        let _ = thread.spawn(|| panic!("two\nlines")).unwrap().join();
    }

    #[test]
    fn a_panic_of_any_thread_ends_the_process_with_one_line() {
        let done = run("panic", Stdio::piped()).wait_with_output().unwrap();
        assert_eq!(done.status.signal(), Some(libc::SIGABRT));
        let said = String::from_utf8(done.stderr).unwrap();
        assert!(said.starts_with("egret: thread 'io0' panicked at crates/daemon/src/process/abort.rs:"), "{said}");
        assert!(said.ends_with(": two lines\n") && said.lines().count() == 1, "{said}");
    }

    #[test]
    fn a_log_that_nobody_reads_does_not_keep_the_process_from_ending() {
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        while rustix::io::write(&writer, &[b'.'; PIPE_BUF]).is_ok() {}
        rustix::io::ioctl_fionbio(&writer, false).unwrap();
        let status = run("abort", writer.into()).wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGABRT));
    }
}
