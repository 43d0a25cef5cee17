//! QEMU's monitor: who its threads are, and stopping a guest while others are measured.

use std::collections::BTreeSet;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Value, json};

/// QEMU answers at once or is in trouble.
const PATIENCE: Duration = Duration::from_secs(30);
/// No answer that is asked for here is longer.
const LONGEST_LINE: u64 = 1 << 20;

/// A connection to it.
pub struct Monitor {
    stream: BufReader<UnixStream>,
    /// QEMU's version.
    pub version: String,
}

/// Threads of QEMU that have a part, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Threads {
    /// The guest's processors, in order.
    pub vcpus: Vec<u32>,
    /// I/O threads, in the order in which they were made.
    pub iothreads: Vec<u32>,
}

impl Threads {
    /// Whether it is one of the I/O threads.
    pub fn is_iothread(&self, thread: u32) -> bool {
        self.iothreads.contains(&thread)
    }
}

impl Monitor {
    /// Takes up QEMU's greeting.
    ///
    /// # Errors
    /// It does not greet, or not as QEMU does.
    pub fn greet(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut monitor = Self { stream: BufReader::new(stream), version: String::new() };
        let greeting = monitor.read()?;
        let version = &greeting["QMP"]["version"]["qemu"];
        let part = |name: &str| version[name].as_u64().ok_or_else(|| unexpected(&greeting));
        monitor.version = format!("{}.{}.{}", part("major")?, part("minor")?, part("micro")?);
        monitor.ask("qmp_capabilities")?;
        Ok(monitor)
    }

    /// The threads of processors and of I/O.
    ///
    /// # Errors
    /// QEMU does not say.
    pub fn threads(&mut self) -> io::Result<Threads> {
        let vcpus = self.ask("query-cpus-fast")?;
        let iothreads = self.ask("query-iothreads")?;
        Ok(Threads { vcpus: numbers(&vcpus)?, iothreads: numbers(&iothreads)? })
    }

    /// Runs a command without arguments and returns what it returns.
    ///
    /// # Errors
    /// QEMU refuses, or is gone.
    pub fn ask(&mut self, command: &str) -> io::Result<Value> {
        writeln!(self.stream.get_mut(), "{}", json!({ "execute": command }))?;
        loop {
            let mut answer = self.read()?;
            if let Some(error) = answer.get("error") {
                let reason = error["desc"].as_str().unwrap_or("no reason");
                return Err(io::Error::other(format!("QEMU refused {command}: {reason}")));
            }
            // Everything else is an event.
            if let Some(returned) = answer.get_mut("return") {
                return Ok(returned.take());
            }
        }
    }

    fn read(&mut self) -> io::Result<Value> {
        let mut line = String::new();
        if self.stream.by_ref().take(LONGEST_LINE).read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        serde_json::from_str(&line).map_err(io::Error::other)
    }
}

/// The `thread-id` of each, which are all different.
fn numbers(list: &Value) -> io::Result<Vec<u32>> {
    let all: Option<Vec<u32>> = list
        .as_array()
        .and_then(|list| list.iter().map(|one| u32::try_from(one["thread-id"].as_u64()?).ok()).collect());
    let all = all.ok_or_else(|| unexpected(list))?;
    let different: BTreeSet<_> = all.iter().collect();
    if different.len() == all.len() { Ok(all) } else { Err(unexpected(list)) }
}

fn unexpected(answer: &Value) -> io::Error {
    io::Error::other(format!("QEMU's monitor has said '{answer}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A QEMU that answers line by line, whatever it is asked.
    fn saying(lines: &'static [&'static str]) -> io::Result<Monitor> {
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
        Monitor::greet(host)
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
        ])
        .unwrap();
        assert_eq!(monitor.version, "10.0.2");
        let threads = monitor.threads().unwrap();
        assert_eq!(threads, Threads { vcpus: vec![11, 12], iothreads: vec![9] });
        assert!(threads.is_iothread(9) && !threads.is_iothread(11));
    }

    #[test]
    fn a_refusal_is_told_in_qemus_words() {
        let mut monitor =
            saying(&[GREETING, r#"{"return":{}}"#, r#"{"error":{"class":"GenericError","desc":"not now"}}"#]).unwrap();
        assert_eq!(monitor.ask("stop").unwrap_err().to_string(), "QEMU refused stop: not now");
    }

    #[test]
    fn what_is_no_monitor_is_told_from_one() {
        for line in ["", "hello", r#"{"QMP":{}}"#, "[]"] {
            let lines: &'static [&'static str] = Vec::leak(vec![line]);
            assert!(saying(lines).is_err(), "{line}");
        }
    }
}
