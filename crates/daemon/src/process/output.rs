//! Standard output, for a thread that is not to wait for whoever reads it.

use std::io::IsTerminal as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::PIPE_BUF;
use rustix::stdio::stdout;

/// Standard output, to which a write is what there is room for and never a wait.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// A terminal that has room for a byte may keep whoever writes more waiting. It is opened a second time so as not to, which
    /// others that use it do not notice.
    terminal: Option<Arc<OwnedFd>>,
}

impl Output {
    /// Standard output as it is now. To be called before the process is confined, which keeps it from terminals. One that
    /// is somebody else's, and may not be opened, is used as it is.
    pub fn open() -> Self {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let again = || rustix::fs::open("/proc/self/fd/1", flags, Mode::empty()).ok().map(Arc::new);
        Self { terminal: stdout().is_terminal().then(again).flatten() }
    }

    /// Writes what there is room for; says how much that was.
    ///
    /// # Errors
    /// There is no room (`EAGAIN`), or nobody reads any more.
    pub fn write(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        write(self.as_fd(), bytes)
    }
}

impl AsFd for Output {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.terminal.as_ref().map_or_else(|| stdout(), |terminal| terminal.as_fd())
    }
}

fn write(fd: BorrowedFd<'_>, bytes: &[u8]) -> rustix::io::Result<usize> {
    let ready = poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::OUT)], Some(&Timespec::default()))?;
    if ready == 0 {
        return Err(rustix::io::Errno::AGAIN);
    }
    // A pipe that takes anything takes so much without a wait.
    rustix::io::write(fd, &bytes[..bytes.len().min(PIPE_BUF)])
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn what_a_pipe_has_no_room_for_is_left_out_and_not_waited_for() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let text = "0123456789abcdef".repeat(1 << 16);
        let mut taken = 0;
        let error = loop {
            match write(writer.as_fd(), &text.as_bytes()[taken..]) {
                Ok(count) => taken += count,
                Err(error) => break error,
            }
        };
        drop(writer);
        let mut said = String::new();
        reader.read_to_string(&mut said).unwrap();
        assert_eq!((error, said.len()), (Errno::AGAIN, taken));
        assert!(taken >= PIPE_BUF && text.starts_with(&said), "{taken}");
    }
}
