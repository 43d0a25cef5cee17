//! `--metrics`, and `[metrics]` in a file: where metrics are served.

use std::fmt::Write as _;

use serde_json::Value;
use thiserror::Error;

use crate::address::{Address, Listen};
use crate::keyval::{self, KeyvalError};
use crate::schema::{Access, Problem, Shape, Spelling, read_options};

/// What says where metrics are served.
pub static SHAPE: &Shape = &Shape::of(Listen::KEYS);

/// Why `--metrics` names no address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MetricsError {
    /// The text is none of `key=value,...` and JSON.
    #[error("--metrics {0}: {1}")]
    Syntax(String, KeyvalError),
    /// A key or value.
    #[error("--metrics {0}: {1}")]
    Problem(String, Problem),
    /// A word that may have been meant for a port, a host or a file.
    #[error("--metrics {0}: write unix:{0} for a socket of this name, HOST:PORT, or fd:NAME")]
    Word(String),
}

/// The address that `--metrics` names: `unix:PATH`, `fd:NAME` or `HOST:PORT`, with more keys behind it, or keys alone.
///
/// # Errors
/// It names none.
pub fn address(argument: &str) -> Result<Address, MetricsError> {
    let word = argument.split(',').next().unwrap_or_default();
    if !word.contains([':', '=', '/', '{']) {
        return Err(MetricsError::Word(word.to_owned()));
    }
    let text = spelled_out(argument);
    let (value, spelling) =
        keyval::read(&text, "path").map_err(|error| MetricsError::Syntax(argument.to_owned(), error))?;
    from_keys(value, spelling).map_err(|problem| MetricsError::Problem(argument.to_owned(), problem))
}

/// The address that keys name.
///
/// # Errors
/// They name none.
pub(crate) fn from_keys(given: Value, spelling: Spelling) -> Result<Address, Problem> {
    read_options::<Listen>(given, SHAPE, spelling)?.address()
}

/// An address as a file has it, read back by [`ConfigFile`](crate::config::ConfigFile).
pub fn table(address: &Address) -> String {
    let mut text = String::from("[metrics]\n");
    let _ = match address {
        Address::Unix { path, access } => {
            let path = toml::Value::from(path.to_string_lossy().into_owned());
            write!(text, "path = {path}\n{}\n", who(access))
        }
        Address::Tcp { host, port, remote } => {
            let host = toml::Value::from(host.as_str());
            write!(text, "host = {host}\nport = {port}\nforce-remote = {remote}\n\n")
        }
        Address::Inherited { fd, access, remote } => {
            let fd = toml::Value::from(fd.to_string());
            write!(text, "fd = {fd}\nforce-remote = {remote}\n{}\n", who(access))
        }
    };
    text
}

fn who(access: &Access) -> String {
    toml::to_string(access).expect("texts and lists of them are TOML")
}

/// The short forms as keys.
fn spelled_out(argument: &str) -> String {
    for (short, key) in [("unix:", "path"), ("fd:", "fd")] {
        if let Some(rest) = argument.strip_prefix(short) {
            return format!("{key}={rest}");
        }
    }
    let (head, rest) = argument.split_at(argument.find(',').unwrap_or(argument.len()));
    match head.rsplit_once(':') {
        Some((host, port)) if !head.contains(['=', '/', '{']) => {
            format!("host={},port={port}{rest}", host.trim_matches(['[', ']']))
        }
        _ => argument.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigFile;
    use crate::schema::Mode;

    fn tcp(host: &str, port: u16, remote: bool) -> Address {
        Address::Tcp { host: host.to_owned(), port, remote }
    }

    fn inherited(fd: &str, remote: bool) -> Address {
        Address::Inherited { fd: fd.parse().unwrap(), access: Access::default(), remote }
    }

    fn unix(path: &str, mode: u32) -> Address {
        Address::Unix { path: path.into(), access: Access { mode: Some(Mode(mode)), ..Access::default() } }
    }

    #[test]
    fn an_address_is_a_path_or_a_port_in_short_or_in_full() {
        for (argument, expected) in [
            ("unix:/run/m", unix("/run/m", 0o600)),
            ("unix:/run/m,mode=0660", unix("/run/m", 0o660)),
            ("/run/m:1", unix("/run/m:1", 0o600)),
            ("path=/run/m,mode=0666", unix("/run/m", 0o666)),
            ("127.0.0.1:9107", tcp("127.0.0.1", 9107, false)),
            ("[::1]:9107", tcp("::1", 9107, false)),
            ("0.0.0.0:9107,force-remote=on", tcp("0.0.0.0", 9107, true)),
            ("host=localhost,port=9107", tcp("localhost", 9107, false)),
            ("fd:metrics", inherited("metrics", false)),
            ("fd=3,force-remote=on", inherited("3", true)),
            ("{\"host\": \"localhost\", \"port\": 1}", tcp("localhost", 1, false)),
        ] {
            assert_eq!(address(argument), Ok(expected), "{argument}");
        }
    }

    #[test]
    fn an_address_reads_back_from_a_file_as_itself() {
        for argument in [
            "unix:/run/a\"b,mode=0660,group=kvm,user=a,allow-uid=7",
            "fd:m,allow-uid.0=a,allow-uid.1=7",
            "unix:/run/m",
            "0.0.0.0:9107,force-remote=on",
            "fd:3",
        ] {
            let read = address(argument).unwrap();
            assert_eq!(ConfigFile::read("f", &table(&read)).unwrap().metrics, Some(read));
        }
    }

    #[test]
    fn what_is_no_address_is_said_in_one_line() {
        for (argument, line) in [
            ("localhost:0", "--metrics localhost:0: port must be 1..=65535, got 0"),
            ("localhost:http", "--metrics localhost:http: port must be 1..=65535, got 'http'"),
            ("9107", "--metrics 9107: write unix:9107 for a socket of this name, HOST:PORT, or fd:NAME"),
            ("localhost,mode=0600", "--metrics localhost: write unix:localhost for a socket of this name"),
            ("unix:", "--metrics unix:: path must be text of 1..=107 bytes, got ''"),
            ("unix:/m,mod=0600", "--metrics unix:/m,mod=0600: unknown key 'mod'; did you mean 'mode'?"),
            ("localhost:1,allow-uid=1", "allow-uid does not go with host: it is about UNIX sockets"),
            ("fd:m,user=root", "user does not go with fd: it is about sockets that are made here"),
            ("localhost:1,mode=0600", "mode does not go with host: it is about UNIX sockets"),
            ("fd:m,mode=0600", "mode does not go with fd: it is about sockets that are made here"),
            (
                "fd:",
                "--metrics fd:: fd must be the number of an open file descriptor, or a name of $LISTEN_FDNAMES, got",
            ),
        ] {
            let error = address(argument).unwrap_err().to_string();
            assert!(error.contains(line), "{error}");
        }
    }
}
