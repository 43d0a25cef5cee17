//! Standard output, for a thread that is not to wait for whoever reads it.

use std::io::IsTerminal as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::PIPE_BUF;
use rustix::stdio::stdout;

/// How often one tries again, at most.
const TRY_EVERY: Duration = Duration::from_millis(5);

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

    /// Writes all of it. Waits for whoever reads, as long as `patience` in all and until `other` is readable.
    ///
    /// # Errors
    /// There was no room by then (`EAGAIN`), or nobody reads any more.
    pub fn write_all(&self, mut bytes: &[u8], patience: Duration, other: BorrowedFd<'_>) -> rustix::io::Result<()> {
        let begun = Instant::now();
        while !bytes.is_empty() {
            match self.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::AGAIN) => {
                    let left = patience.saturating_sub(begun.elapsed());
                    let mut fds = [PollFd::new(self, PollFlags::OUT), PollFd::from_borrowed_fd(other, PollFlags::IN)];
                    let waited = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
                    if left.is_zero() || !fds[1].revents().is_empty() {
                        return Err(Errno::AGAIN);
                    }
                    waited.map(|_| ()).or_else(is_interrupted)?;
                    // A terminal may have room, and yet not for what the next byte becomes: who asks at once spins.
                    std::thread::sleep(TRY_EVERY.min(left));
                }
                Err(error) => is_interrupted(error)?,
            }
        }
        Ok(())
    }
}

fn is_interrupted(error: Errno) -> rustix::io::Result<()> {
    if error == Errno::INTR { Ok(()) } else { Err(error) }
}

impl AsFd for Output {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.terminal.as_ref().map_or_else(|| stdout(), |terminal| terminal.as_fd())
    }
}

fn write(fd: BorrowedFd<'_>, bytes: &[u8]) -> rustix::io::Result<usize> {
    let ready = poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::OUT)], Some(&Timespec::default()))?;
    if ready == 0 {
        return Err(Errno::AGAIN);
    }
    // A pipe that takes anything takes so much without a wait.
    rustix::io::write(fd, &bytes[..bytes.len().min(PIPE_BUF)])
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read as _};
    use std::thread;

    use super::*;

    /// An output to a pipe that has no room left, and what is in there.
    fn full() -> (Output, PipeReader, usize) {
        let (reader, writer) = std::io::pipe().unwrap();
        let output = Output { terminal: Some(Arc::new(writer.into())) };
        let mut taken = 0;
        while let Ok(count) = output.write(&[b'-'; PIPE_BUF]) {
            taken += count;
        }
        (output, reader, taken)
    }

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

    #[test]
    fn what_a_pipe_has_no_room_for_at_once_is_written_when_its_reader_reads() {
        let (output, mut reader, taken) = full();
        let (quiet, _writer) = std::io::pipe().unwrap();
        let text = "0123456789abcdef".repeat(1 << 16);
        let said = thread::scope(|scope| {
            let said = scope.spawn(|| {
                let mut said = String::new();
                reader.read_to_string(&mut said).unwrap();
                said
            });
            output.write_all(text.as_bytes(), Duration::from_secs(30), quiet.as_fd()).unwrap();
            drop(output);
            said.join().unwrap()
        });
        assert!(said[taken..] == text, "{} of {} bytes", said.len() - taken, text.len());
    }

    #[test]
    fn a_pipe_that_nobody_reads_is_waited_for_as_long_as_it_may_take_and_not_beyond_what_else_there_is_to_do() {
        let (output, _reader, _) = full();
        let (bell, ringer) = std::io::pipe().unwrap();
        assert_eq!(output.write_all(b"text", Duration::from_millis(1), bell.as_fd()), Err(Errno::AGAIN));
        rustix::io::write(&ringer, b"!").unwrap();
        assert_eq!(output.write_all(b"text", Duration::MAX, bell.as_fd()), Err(Errno::AGAIN));
    }
}
