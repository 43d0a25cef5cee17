//! A monitor's client: one command at a time, and the events in between.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::wire::send_with;
use super::{PATIENCE, await_some, reset_is_end};

/// A client that has agreed on capabilities.
pub struct Qmp {
    stream: BufReader<UnixStream>,
    events: Vec<Value>,
}

impl Qmp {
    /// Connects and negotiates.
    ///
    /// # Panics
    /// When the other end is no QMP server.
    pub fn connect(socket: &Path) -> Self {
        let mut new = Self::connect_only(socket);
        assert!(new.read().expect("a greeting")["QMP"].is_object());
        new.run("qmp_capabilities", json!({}));
        new
    }

    /// Connects, without reading or sending.
    pub fn connect_only(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("the monitor listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Self { stream: BufReader::new(stream), events: Vec::new() }
    }

    /// As long is waited for answers and events from here on.
    pub fn with_patience(self, patience: Duration) -> Self {
        self.stream.get_ref().set_read_timeout(Some(patience)).expect("a timeout");
        self
    }

    /// Runs a command.
    ///
    /// # Panics
    /// When it fails.
    pub fn run(&mut self, command: &str, arguments: Value) -> Value {
        self.try_run(command, arguments.clone()).unwrap_or_else(|error| panic!("{command} {arguments}: {error}"))
    }

    /// As [`run`](Self::run), again where this machine takes longer than the daemon waits for requests in flight, or for a thread.
    pub fn run_in_time(&mut self, command: &str, arguments: Value) -> Value {
        let is_late = ["have not ended in 5 s; nothing has changed", "no turn in 5 s; try again when it goes on"];
        await_some(command, || match self.try_run(command, arguments.clone()) {
            Err(error) if is_late.iter().any(|late| error.ends_with(late)) => None,
            ran => Some(ran.unwrap_or_else(|error| panic!("{command} {arguments}: {error}"))),
        })
    }

    /// Runs a command that fails, and returns its error.
    ///
    /// # Panics
    /// When it succeeds.
    pub fn fail(&mut self, command: &str, arguments: Value) -> String {
        self.try_run(command, arguments).expect_err("the command should fail")
    }

    /// Runs a command, and returns its result or its error.
    pub fn try_run(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        self.send(json!({ "execute": command, "arguments": arguments, "id": command }).to_string().as_bytes());
        loop {
            let mut message = self.read().expect("an answer");
            if !message["event"].is_null() {
                self.events.push(message);
                continue;
            }
            assert_eq!(message["id"], command);
            return match message["error"]["desc"].as_str() {
                Some(error) => Err(error.to_owned()),
                None => Ok(message["return"].take()),
            };
        }
    }

    /// Sends descriptors, with the white space before a command: where they come is all the same.
    pub fn send_descriptors(&mut self, descriptors: &[BorrowedFd<'_>]) {
        send_with(self.stream.get_ref(), b" ", descriptors).expect("the daemon reads");
    }

    /// As [`try_run`](Self::try_run), with a descriptor.
    pub fn try_run_with(&mut self, command: &str, arguments: Value, descriptor: impl AsFd) -> Result<Value, String> {
        self.send_descriptors(&[descriptor.as_fd()]);
        self.try_run(command, arguments)
    }

    /// As [`run`](Self::run), with a descriptor.
    ///
    /// # Panics
    /// When it fails.
    pub fn run_with(&mut self, command: &str, arguments: Value, descriptor: impl AsFd) -> Value {
        self.try_run_with(command, arguments, descriptor).unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// Waits for an event of this name, unless it has come already: its data.
    pub fn event(&mut self, name: &str) -> Value {
        loop {
            if let Some(at) = self.events.iter().position(|event| event["event"] == name) {
                return self.events.remove(at)["data"].take();
            }
            let message = self.read().expect("an event");
            self.events.push(message);
        }
    }

    /// How many events of this name have come that nobody has waited for.
    pub fn unheard(&self, name: &str) -> usize {
        self.events.iter().filter(|event| event["event"] == name).count()
    }

    /// Sends bytes that need not be a message.
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).expect("the daemon reads");
    }

    /// The stream itself, for a client that misbehaves.
    pub fn stream(&mut self) -> &mut UnixStream {
        self.stream.get_mut()
    }

    /// The next message; `None` when the daemon has hung up.
    pub fn read(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.stream.read_line(&mut line).or_else(reset_is_end) {
            Ok(0) => None,
            Ok(_) => Some(serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line}: {error}"))),
            Err(error) => panic!("the daemon should have answered: {error}"),
        }
    }
}
