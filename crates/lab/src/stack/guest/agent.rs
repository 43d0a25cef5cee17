//! The host's end of the guest's agent: scripts in, what they print out, and marks in between.
//!
//! `scripts/guest-agent` is the other end and says what goes over the line. What comes from there is a guest's and may be
//! anything, or nothing: every wait has an end, and every length a bound.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// The longest line of an honest agent is far below this.
const LONGEST_LINE: usize = 4096;
/// The longest output: a thousand times what fio prints of one job.
const LONGEST_OUTPUT: usize = 32 << 20;
/// How much longer than its time a job may take to be reported as done.
const GRACE: Duration = Duration::from_secs(20);

/// A guest that does not do what it should.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// It may hang.
    #[error("the guest has said nothing for {} s", .0.as_secs())]
    Silent(Duration),
    /// It ended.
    #[error("the guest is gone")]
    Gone,
    /// It speaks, and not as an agent does.
    #[error("the guest's agent has sent {0}")]
    Nonsense(String),
    /// What it runs took too long.
    #[error("the load in the guest was not done after {} s", .0.as_secs())]
    Late(Duration),
    /// What it runs has failed.
    #[error("the load in the guest ended with status {0}")]
    Failed(u8),
}

impl From<io::Error> for AgentError {
    /// Whatever a local socket complains of, there is nobody at its other end.
    fn from(_: io::Error) -> Self {
        Self::Gone
    }
}

/// An agent that waits for jobs.
#[derive(Debug)]
pub struct Agent {
    stream: UnixStream,
    /// What has come and was not looked at yet.
    pending: Vec<u8>,
    jobs: u64,
    /// The guest's kernel, by its release.
    pub kernel: String,
}

impl Agent {
    /// Waits for the guest to have booted.
    ///
    /// # Errors
    /// It does not, in so long.
    pub fn greet(stream: UnixStream, patience: Duration) -> Result<Self, AgentError> {
        let mut agent = Self { stream, pending: Vec::new(), jobs: 0, kernel: String::new() };
        let line = agent.line(Instant::now() + patience, patience)?;
        let kernel = line.strip_prefix("hello ").ok_or_else(|| nonsense(&line))?;
        agent.kernel = kernel.to_owned();
        Ok(agent)
    }

    /// Runs a script, at most so long, and returns what it has printed. `mark` learns of what it reports meanwhile, when it
    /// does.
    ///
    /// After an error the agent is of no use any more, but for [`Failed`](AgentError::Failed) and
    /// [`Late`](AgentError::Late).
    ///
    /// # Errors
    /// A guest that hangs, ends or raves; a script that does not end with status 0, or not in time.
    pub fn run(&mut self, script: &str, limit: Duration, mut mark: impl FnMut(&str)) -> Result<String, AgentError> {
        self.jobs += 1;
        let (number, patience) = (self.jobs, limit + GRACE);
        let deadline = Instant::now() + patience;
        self.stream.set_write_timeout(Some(patience))?;
        write!(self.stream, "job {number} {} {}\n{script}", limit.as_secs().max(1), script.len())?;
        let mark_of_this = format!("mark {number} ");
        let done_with_this = format!("done {number} ");
        loop {
            let line = self.line(deadline, patience)?;
            if let Some(what) = line.strip_prefix(&mark_of_this) {
                mark(what);
            } else if let Some(rest) = line.strip_prefix(&done_with_this) {
                let (status, len) = read_done(rest).ok_or_else(|| nonsense(&line))?;
                let output = self.bytes(len, deadline, patience)?;
                return match status {
                    0 => String::from_utf8(output).map_err(|_| AgentError::Nonsense("bytes that are no text".into())),
                    137 => Err(AgentError::Late(limit)),
                    _ => Err(AgentError::Failed(status)),
                };
            } else {
                return Err(nonsense(&line));
            }
        }
    }

    fn line(&mut self, deadline: Instant, patience: Duration) -> Result<String, AgentError> {
        loop {
            if let Some(end) = self.pending.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).take(end).collect();
                return String::from_utf8(line).map_err(|_| AgentError::Nonsense("bytes that are no text".into()));
            }
            if self.pending.len() > LONGEST_LINE {
                return Err(AgentError::Nonsense("a line without an end".into()));
            }
            self.receive(deadline, patience)?;
        }
    }

    fn bytes(&mut self, len: usize, deadline: Instant, patience: Duration) -> Result<Vec<u8>, AgentError> {
        while self.pending.len() < len {
            self.receive(deadline, patience)?;
        }
        Ok(self.pending.drain(..len).collect())
    }

    fn receive(&mut self, deadline: Instant, patience: Duration) -> Result<(), AgentError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(AgentError::Silent(patience));
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut piece = [0; 16 << 10];
        match self.stream.read(&mut piece) {
            Ok(0) => Err(AgentError::Gone),
            Ok(len) => {
                self.pending.extend_from_slice(&piece[..len]);
                Ok(())
            }
            // The time was up, or somebody wanted to know something: see above.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// `STATUS BYTES`.
fn read_done(rest: &str) -> Option<(u8, usize)> {
    let (status, len) = rest.split_once(' ')?;
    Some((status.parse().ok()?, len.parse().ok().filter(|len| *len <= LONGEST_OUTPUT)?))
}

fn nonsense(line: &str) -> AgentError {
    AgentError::Nonsense(format!("'{}'", line.chars().take(80).collect::<String>().escape_debug()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(30);

    /// An agent whose guest is `guest`: a thread that ends when the agent is dropped.
    fn with_guest(guest: impl FnOnce(UnixStream) + Send + 'static) -> Result<Agent, AgentError> {
        let (host, other) = UnixStream::pair().unwrap();
        std::thread::spawn(move || guest(other));
        Agent::greet(host, LONG)
    }

    /// What a guest that greets and then sends `answer`, and holds the line, makes of a job.
    fn answered_with(answer: &'static [u8]) -> Result<String, AgentError> {
        let mut agent = with_guest(move |mut guest| {
            guest.write_all(b"hello 6.12\n").unwrap();
            guest.write_all(answer).unwrap();
            // Until the agent is dropped.
            let _ = io::copy(&mut guest, &mut io::sink());
        })?;
        agent.run("true", LONG, |_| {})
    }

    #[test]
    fn a_job_goes_out_whole_and_its_marks_and_output_come_back() {
        let mut agent = with_guest(|mut guest| {
            guest.write_all(b"hello 6.12.1-cloud\n").unwrap();
            let expected = b"job 1 30 9\necho done";
            let mut job = vec![0; expected.len()];
            guest.read_exact(&mut job).unwrap();
            assert_eq!(job, expected);
            // In pieces as odd as a serial port's.
            for piece in ["mark 1 be", "gin\nmark 1 end", "\ndone 1 0 7\nhe", "llo\n\n"] {
                guest.write_all(piece.as_bytes()).unwrap();
            }
            let _ = io::copy(&mut guest, &mut io::sink());
        })
        .unwrap();
        assert_eq!(agent.kernel, "6.12.1-cloud");
        let mut marks = Vec::new();
        let output = agent.run("echo done", LONG, |mark| marks.push(mark.to_owned())).unwrap();
        assert_eq!((output.as_str(), marks), ("hello\n\n", vec!["begin".to_owned(), "end".to_owned()]));
    }

    #[test]
    fn a_guest_that_never_boots_is_given_up() {
        let (host, _guest) = UnixStream::pair().unwrap();
        assert!(matches!(Agent::greet(host, SOON), Err(AgentError::Silent(SOON))));
    }

    #[test]
    fn a_guest_that_trickles_is_given_up_all_the_same() {
        let (host, mut guest) = UnixStream::pair().unwrap();
        std::thread::spawn(move || while guest.write_all(b"x").is_ok() {});
        // Whichever comes first: it is out of time, or its line is too long.
        let error = Agent::greet(host, SOON).unwrap_err();
        assert!(matches!(error, AgentError::Silent(_) | AgentError::Nonsense(_)), "{error}");
    }

    #[test]
    fn a_guest_that_ends_before_it_has_answered_is_gone() {
        let mut agent = with_guest(|mut guest| {
            guest.write_all(b"hello 6.12\n").unwrap();
            guest.read_exact(&mut [0; 8]).unwrap();
        })
        .unwrap();
        assert!(matches!(agent.run("true", LONG, |_| {}), Err(AgentError::Gone)));
    }

    #[test]
    fn a_job_that_fails_or_is_late_says_so() {
        assert!(matches!(answered_with(b"done 1 3 0\n"), Err(AgentError::Failed(3))));
        assert!(matches!(answered_with(b"done 1 137 2\nxx"), Err(AgentError::Late(LONG))));
    }

    #[test]
    fn what_no_agent_would_send_is_refused() {
        for answer in [
            &b"done 2 0 0\n"[..],
            b"done 1 0 33554433\n",
            b"done 1 0 18446744073709551616\n",
            b"done 1 0 -1\n",
            b"done 1 256 0\n",
            b"done 1\n",
            b"mark 7 begin\n",
            b"\n",
            b"\xff\xfe\n",
            b"done 1 0 2\n\xff\xfe",
        ] {
            let error = answered_with(answer).unwrap_err();
            assert!(matches!(error, AgentError::Nonsense(_)), "{answer:?}: {error}");
        }
        assert!(matches!(answered_with(&[b'x'; 100 << 10]), Err(AgentError::Nonsense(_))));
    }
}
