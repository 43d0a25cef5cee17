//! Signals that ask the daemon to end, read like a file.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};

use super::sys;

/// A signal that asks the daemon to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// From a service manager, or `kill`.
    Terminate,
    /// Ctrl-C.
    Interrupt,
    /// The terminal is gone.
    HangUp,
}

impl Signal {
    const ALL: [(Self, libc::c_int); 3] =
        [(Self::Terminate, libc::SIGTERM), (Self::Interrupt, libc::SIGINT), (Self::HangUp, libc::SIGHUP)];

    /// Whether it hurries an end that another one has asked for. SIGHUP does not, and is not the other one either: it comes
    /// along with those, from a terminal or a service manager.
    pub const fn insists(self) -> bool {
        !matches!(self, Self::HangUp)
    }
}

/// The daemon's end-of-life signals: blocked, and delivered to whoever reads them.
///
/// As a descriptor it can be waited for beside others; nothing wakes up unless a signal has come.
#[derive(Debug)]
pub struct Signals {
    fd: OwnedFd,
}

impl Signals {
    /// Blocks SIGTERM, SIGINT and SIGHUP in this thread and in those that it starts from now on; ignores SIGXFSZ, so that
    /// a write beyond what the process's files may have is an error of that request and not the daemon's end.
    ///
    /// Call it before there are other threads: one that does not block them would be ended by them.
    ///
    /// # Errors
    /// The kernel has no descriptor to spare.
    pub fn block() -> io::Result<Self> {
        sys::ignore(libc::SIGXFSZ);
        let fd = sys::signal_descriptor(&Signal::ALL.map(|(_, number)| number))?;
        // A shell or `nohup` may have us ignore some. They are read all the same, but would end nobody in `end_during`.
        Signal::ALL.iter().for_each(|(_, number)| sys::heed(*number));
        Ok(Self { fd })
    }

    /// Does something that may take as long as others like. A signal that comes meanwhile ends the process, after `clean`, as
    /// it ends one that has nothing to lose, or else, as process 1, with status 1.
    ///
    /// # Errors
    /// There is no room for a thread, which waits for the signals meanwhile.
    pub fn end_during<T>(&self, act: impl FnOnce() -> T, clean: impl FnOnce() + Send) -> io::Result<T> {
        let (over, acting) = io::pipe()?;
        let watch = move || {
            let mut fds = [PollFd::new(&over, PollFlags::IN), PollFd::new(self, PollFlags::IN)];
            while poll(&mut fds, None).is_err() {}
            if fds[0].revents().is_empty() {
                clean();
                let _ = sys::unblock(&Signal::ALL.map(|(_, number)| number));
                // The first process of a container is ended by no signal that does what it does by default.
                sys::exit_now(1);
            }
        };
        thread::scope(|scope| {
            let watch = thread::Builder::new().name("egret-start".to_owned()).spawn_scoped(scope, watch)?;
            let done = act();
            drop(acting);
            // When it is gone the process has no thread that nobody knows of.
            let _ = watch.join();
            Ok(done)
        })
    }

    /// Sleeps until one of the signals comes.
    ///
    /// # Errors
    /// The descriptor cannot be read.
    pub fn wait(&self) -> io::Result<Signal> {
        // A record of the kernel's, whose first field is the signal's number.
        let mut record = [0_u8; size_of::<libc::signalfd_siginfo>()];
        loop {
            match rustix::io::read(&self.fd, &mut record) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let number = u32::from_ne_bytes([record[0], record[1], record[2], record[3]]);
            if let Some((signal, _)) = Signal::ALL.iter().find(|(_, known)| u32::try_from(*known) == Ok(number)) {
                return Ok(*signal);
            }
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A signal for one thread, so that the tests beside this one are left alone.
#[cfg(test)]
pub(super) fn send_to_this_thread(number: libc::c_int) {
    let (process, thread) = (std::process::id() as i32, rustix::thread::gettid().as_raw_nonzero().get());
    // rustix has no `tgkill`.
    #[allow(unsafe_code)]
    // SAFETY: `tgkill` takes three numbers; the thread is this one.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, number) };
    assert_eq!(result, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_sent_to_the_thread_that_blocks_it_is_read_and_does_not_end_it() {
        let signals = Signals::block().unwrap();
        for (signal, number) in Signal::ALL {
            send_to_this_thread(number);
            assert_eq!(signals.wait().unwrap(), signal);
        }
    }
}
