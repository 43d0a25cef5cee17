//! A monitor's client: one command and its answer at a time.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Map, Value, json};

/// A conversation with a daemon.
pub struct Qmp {
    stream: BufReader<UnixStream>,
    socket: String,
}

impl Qmp {
    /// Connects to the monitor at `socket`, and agrees on capabilities.
    ///
    /// # Errors
    /// Nobody listens there, or what does is no monitor.
    pub fn connect(socket: &Path) -> Result<Self> {
        let name = socket.display().to_string();
        let stream = UnixStream::connect(socket).with_context(|| format!("cannot connect to '{name}'"))?;
        let mut new = Self { stream: BufReader::new(stream), socket: name };
        if new.read()?["QMP"].is_null() {
            bail!("'{}' does not speak QMP", new.socket);
        }
        new.run("qmp_capabilities", Value::Object(Map::new()))?;
        Ok(new)
    }

    /// Gives up on an answer that does not come within `patience`.
    ///
    /// # Errors
    /// As the socket.
    pub fn set_patience(&self, patience: Duration) -> Result<()> {
        Ok(self.stream.get_ref().set_read_timeout(Some(patience))?)
    }

    /// Runs a command: what it returns.
    ///
    /// # Errors
    /// What the daemon says against it, or that it is gone.
    pub fn run(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let message = json!({ "execute": command, "arguments": arguments });
        self.stream.get_mut().write_all(message.to_string().as_bytes())?;
        let mut message = self.read()?;
        // Events may come in between.
        while !message["event"].is_null() {
            message = self.read()?;
        }
        match message["error"]["desc"].as_str() {
            Some(error) => bail!("{command}: {error}"),
            None => Ok(message["return"].take()),
        }
    }

    fn read(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).with_context(|| format!("'{}'", self.socket))? == 0 {
            bail!("the daemon at '{}' hung up", self.socket);
        }
        serde_json::from_str(&line).with_context(|| format!("'{}' does not speak QMP", self.socket))
    }
}
