//! Going into the background, with a launcher that waits until the daemon serves.

use std::fs::File;
use std::io::{self, Read, Write};

use rustix::fs::Mode;
use rustix::pipe::PipeFlags;
use thiserror::Error;

use super::sys::{self, Forked};

/// What the daemon tells its launcher when it serves; anything else is why it does not.
const READY: &[u8] = b"\0";

/// Which of the two processes this is.
#[derive(Debug)]
pub enum Side {
    /// The one that was started, and has only to [`wait`](Launched::wait).
    Launcher(Launched),
    /// The daemon, in a session of its own.
    Daemon(Readiness),
}

/// It cannot go into the background.
#[derive(Debug, Error)]
#[error("cannot go into the background: {0}")]
pub struct BackgroundError(#[from] io::Error);

/// Splits the process in two: a launcher that stays, and a daemon that leaves the terminal.
///
/// The daemon keeps its standard streams and its working directory until it is [ready](Readiness::ready), so it can
/// still complain and relative paths mean what they did. Its umask is 027, as with QEMU's `--daemonize`.
///
/// # Errors
/// There are other threads already, which a fork would lose, or the kernel refuses.
pub fn background() -> Result<Side, BackgroundError> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from)?;
    io::stdout().flush()?;
    if let Forked::Parent = sys::fork()? {
        return Ok(Side::Launcher(Launched { reader: reader.into() }));
    }
    drop(reader);
    let readiness = Readiness { writer: writer.into() };
    if let Err(error) = detach() {
        readiness.failed(&BackgroundError(error).to_string());
        sys::exit_now(1);
    }
    Ok(Side::Daemon(readiness))
}

/// Leaves the terminal's session; a second fork gives up the right to lead one, and with it to get a terminal.
fn detach() -> io::Result<()> {
    rustix::process::setsid()?;
    if let Forked::Parent = sys::fork()? {
        sys::exit_now(0);
    }
    rustix::process::umask(Mode::WGRP | Mode::RWXO);
    Ok(())
}

/// The launcher's end.
#[derive(Debug)]
pub struct Launched {
    reader: File,
}

/// Why there is no daemon.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LaunchError {
    /// It said so.
    #[error("{0}")]
    Failed(String),
    /// It ended without a word.
    #[error("the daemon ended before it served")]
    Died,
}

impl Launched {
    /// Waits until the daemon serves.
    ///
    /// # Errors
    /// It does not, for the reason that it gave.
    pub fn wait(mut self) -> Result<(), LaunchError> {
        let mut word = Vec::new();
        // An error of ours to read is as good as silence.
        let _ = self.reader.read_to_end(&mut word);
        match word.as_slice() {
            READY => Ok(()),
            b"" => Err(LaunchError::Died),
            line => Err(LaunchError::Failed(String::from_utf8_lossy(line).into_owned())),
        }
    }
}

/// The daemon's end: one word to its launcher. Dropped without one, the launcher reports that it died.
#[derive(Debug)]
#[must_use = "the launcher waits for it"]
pub struct Readiness {
    writer: File,
}

impl Readiness {
    /// Lets the launcher end, and lets go of the terminal: the standard streams lead to `/dev/null` from now on.
    ///
    /// # Errors
    /// There is no `/dev/null`.
    pub fn ready(mut self) -> io::Result<()> {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        rustix::stdio::dup2_stderr(&null)?;
        // A launcher that was killed is no reason not to serve.
        let _ = self.writer.write_all(READY);
        Ok(())
    }

    /// Tells the launcher, in one line, why there will be no daemon.
    pub fn failed(mut self, line: &str) {
        let _ = self.writer.write_all(line.as_bytes());
    }
}
