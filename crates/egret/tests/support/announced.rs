//! `egret serve DISK`, and what it prints for the operator.

use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::mpsc;

use rustix::process::{Pid, Signal, kill_process};

use super::server::{Program, Reaped};
use super::{PATIENCE, await_some};

/// A daemon that was given just a disk.
pub struct Announced {
    process: Reaped,
    text: String,
}

impl Announced {
    /// Starts `egret serve IMAGE --socket SOCKET`, and waits until it has printed everything: then it serves.
    ///
    /// What it complains of goes to this process's own standard error.
    ///
    /// # Panics
    /// When it ends instead.
    pub fn start(image: &Path, socket: &Path) -> Self {
        let mut command = Program::egret().command();
        command.arg(image).arg("--socket").arg(socket).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut process = Reaped(command.spawn().expect("the daemon's program starts"));
        let mut printed = BufReader::new(process.0.stdout.take().expect("stdout is piped"));
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            while printed.read_line(&mut line).is_ok_and(|read| read > 0) && send.send(line.clone()).is_ok() {
                line.clear();
            }
            // Whatever it prints later must not end it.
            let _ = io::copy(&mut printed, &mut io::sink());
        });
        let mut text = String::new();
        // The last monitor's last line is the last of all.
        while !text.contains("--disk") {
            text += &lines.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{error}; it has printed {text:?}"));
        }
        Self { process, text }
    }

    /// The process's number.
    pub fn pid(&self) -> u32 {
        self.process.0.id()
    }

    /// All that it has printed.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The lines that it has printed for a virtual machine monitor.
    ///
    /// # Panics
    /// When there are none.
    pub fn lines_for(&self, monitor: &str) -> String {
        let head = format!("  {monitor}");
        let is_head = |line: &str| line.starts_with(&head) && line.ends_with(':');
        let lines = self.text.lines().skip_while(|line| !is_head(line)).skip(1).take_while(|line| !line.is_empty());
        let lines = lines.collect::<Vec<_>>().join("\n");
        assert!(!lines.is_empty(), "nothing is printed for {monitor}: {}", self.text);
        lines
    }

    /// Asks the daemon to end, and waits for it.
    pub fn terminate(mut self) -> ExitStatus {
        kill_process(Pid::from_child(&self.process.0), Signal::TERM).expect("our child");
        await_some("the daemon to end", || self.process.0.try_wait().expect("our child"))
    }
}
