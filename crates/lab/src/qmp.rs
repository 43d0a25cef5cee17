//! A client of QMP, the monitor protocol that QEMU, `qemu-storage-daemon` and Egret share.

use std::collections::BTreeSet;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// How long a server may take for a command that takes no time on an idle machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// No answer that is asked for here is longer.
const LONGEST: u64 = 16 << 20;

/// What is said of who does not greet.
const GREETS_NOT: &str =
    "it does not greet: is it a monitor's socket? If so, its daemon hangs, or has its 32 clients already";

/// A connection to a monitor.
pub struct Qmp {
    stream: BufReader<UnixStream>,
    /// The server's version, as it greets with it.
    pub version: String,
}

impl Qmp {
    /// Connects to the monitor at `socket`, and gets through the greeting, as [`greet`](Self::greet) does.
    ///
    /// # Errors
    /// Nobody listens there, or what does is no monitor; says where.
    pub fn connect(socket: &Path, patience: Option<Duration>) -> io::Result<Self> {
        let connected = UnixStream::connect(socket).and_then(|stream| Self::greet(stream, patience));
        connected
            .map_err(|error| io::Error::new(error.kind(), format!("cannot connect to '{}': {error}", socket.display())))
    }

    /// Gets through the greeting. The server may take `patience` for each answer, now and later; as long as it likes
    /// without one.
    ///
    /// # Errors
    /// It does not greet, or not as a monitor does.
    pub fn greet(stream: UnixStream, patience: Option<Duration>) -> io::Result<Self> {
        stream.set_read_timeout(patience)?;
        stream.set_write_timeout(patience)?;
        let mut new = Self { stream: BufReader::new(stream), version: String::new() };
        let greeting = new.read().map_err(|error| match error.kind() {
            io::ErrorKind::TimedOut => io::Error::new(error.kind(), GREETS_NOT),
            _ => error,
        })?;
        let version = &greeting["QMP"]["version"]["qemu"];
        let part = |name: &str| version[name].as_u64().ok_or_else(foreign);
        new.version = format!("{}.{}.{}", part("major")?, part("minor")?, part("micro")?);
        new.run("qmp_capabilities", json!({}))?;
        Ok(new)
    }

    /// Lets the server take as long as it likes from here on.
    ///
    /// # Errors
    /// The socket refuses.
    pub fn wait_as_long_as_it_takes(&self) -> io::Result<()> {
        self.stream.get_ref().set_read_timeout(None)?;
        self.stream.get_ref().set_write_timeout(None)
    }

    /// Runs a command: what it returns.
    ///
    /// # Errors
    /// The server refuses it, or has closed the connection.
    pub fn run(&mut self, command: &str, arguments: Value) -> io::Result<Value> {
        let asked = format!("{}\n", json!({ "execute": command, "arguments": arguments }));
        self.stream.get_mut().write_all(asked.as_bytes()).map_err(told_apart)?;
        loop {
            let mut answer = self.read()?;
            if let Some(error) = answer.get("error") {
                let reason = error["desc"].as_str().unwrap_or("no reason");
                return Err(io::Error::other(format!("{command}: {reason}")));
            }
            // Everything else is an event.
            if let Some(returned) = answer.get_mut("return") {
                return Ok(returned.take());
            }
        }
    }

    /// The numbers of the threads that `command` lists, which are all different, in its order.
    ///
    /// # Errors
    /// The server does not say.
    pub fn threads(&mut self, command: &str) -> io::Result<Vec<u32>> {
        let list = self.run(command, json!({}))?;
        let number = |thread: &Value| u32::try_from(thread["thread-id"].as_u64()?).ok();
        let all: Option<Vec<u32>> = list.as_array().and_then(|list| list.iter().map(number).collect());
        let all = all.ok_or_else(|| unexpected(&list))?;
        let different: BTreeSet<_> = all.iter().collect();
        if different.len() == all.len() { Ok(all) } else { Err(unexpected(&list)) }
    }

    fn read(&mut self) -> io::Result<Value> {
        let mut message = String::new();
        self.read_line(&mut message)?;
        // One that is written for people takes several lines, of which none but the last begins with this bracket.
        if message.trim_end() == "{" {
            while self.read_line(&mut message)? != b'}' {}
        }
        serde_json::from_str(&message).map_err(|_| foreign())
    }

    /// Reads another line of a message; the byte that it begins with.
    fn read_line(&mut self, message: &mut String) -> io::Result<u8> {
        let begin = message.len();
        match (&mut self.stream).take(LONGEST - begin as u64).read_line(message) {
            Ok(0) => Err(hung_up()),
            Ok(_) => Ok(message.as_bytes()[begin]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "the server does not answer"))
            }
            Err(error) => Err(told_apart(error)),
        }
    }
}

fn hung_up() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the server has hung up")
}

/// An error of the socket; one who has hung up is said to have, however that shows.
fn told_apart(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => hung_up(),
        _ => error,
    }
}

fn foreign() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it does not speak QMP")
}

fn unexpected(answer: &Value) -> io::Error {
    io::Error::other(format!("a monitor has said '{answer}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that answers line by line, whatever it is asked.
    fn saying(lines: &'static [&'static str]) -> io::Result<Qmp> {
        let (host, qemu) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut asked = BufReader::new(&qemu);
            for line in lines {
                let _ = writeln!(&qemu, "{line}");
                if !line.contains("event") {
                    let _ = asked.read_line(&mut String::new());
                }
            }
        });
        Qmp::greet(host, Some(PATIENCE))
    }

    const GREETING: &str = r#"{"QMP":{"version":{"qemu":{"micro":2,"minor":0,"major":10}},"capabilities":["oob"]}}"#;

    #[test]
    fn threads_are_told_by_their_numbers_with_events_in_between() {
        let mut monitor = saying(&[
            GREETING,
            r#"{"return":{}}"#,
            r#"{"event":"NIC_RX_FILTER_CHANGED","data":{}}"#,
            r#"{"return":[{"thread-id":11,"cpu-index":0},{"thread-id":12,"cpu-index":1}]}"#,
            r#"{"return":[{"thread-id":9,"id":"io0"}]}"#,
            r#"{"return":[{"thread-id":9,"id":"io0"},{"thread-id":9,"id":"io1"}]}"#,
        ])
        .unwrap();
        assert_eq!(monitor.version, "10.0.2");
        assert_eq!(monitor.threads("query-cpus-fast").unwrap(), [11, 12]);
        assert_eq!(monitor.threads("query-iothreads").unwrap(), [9]);
        assert!(monitor.threads("query-iothreads").is_err(), "one thread is not two");
    }

    #[test]
    fn a_monitor_that_writes_for_people_is_understood() {
        let line: Value = serde_json::from_str(GREETING).unwrap();
        let mut monitor = saying(Vec::leak(vec![
            String::leak(format!("{line:#}\r")),
            "{\r\n    \"return\": {\r\n    }\r\n}\r",
            "{\n  \"return\": {\n    \"a\": {}\n  }\n}",
        ]))
        .unwrap();
        assert_eq!(monitor.run("stop", json!({})).unwrap(), json!({"a": {}}));
    }

    #[test]
    fn a_refusal_is_told_in_the_servers_words() {
        let mut monitor =
            saying(&[GREETING, r#"{"return":{}}"#, r#"{"error":{"class":"GenericError","desc":"not now"}}"#]).unwrap();
        assert_eq!(monitor.run("stop", json!({})).unwrap_err().to_string(), "stop: not now");
    }

    #[test]
    fn a_server_that_has_hung_up_is_said_to_have_by_who_asks_it_as_by_who_reads() {
        let (stream, server) = UnixStream::pair().unwrap();
        drop(server);
        let mut monitor = Qmp { stream: BufReader::new(stream), version: String::new() };
        assert_eq!(monitor.run("stop", json!({})).unwrap_err().to_string(), "the server has hung up");
    }

    #[test]
    fn what_is_no_monitor_is_told_from_one() {
        for line in ["", "hello", r#"{"QMP":{}}"#, "[]"] {
            let lines: &'static [&'static str] = Vec::leak(vec![line]);
            assert!(saying(lines).is_err(), "{line}");
        }
    }
}
