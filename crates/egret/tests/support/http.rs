//! As much of an HTTP client as the tests need: one request a connection.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

use super::PATIENCE;

/// GETs `path` from a server at a UNIX socket: the status line and the body.
pub fn get(socket: &Path, path: &str) -> io::Result<(String, String)> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    ask(stream, path)
}

/// GETs `path` from a server at this host's `port`.
pub fn get_tcp(port: u16, path: &str) -> io::Result<(String, String)> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    ask(stream, path)
}

/// Sends `request` unchanged, and returns the response.
pub fn say(mut stream: impl Read + Write, request: &[u8]) -> io::Result<String> {
    stream.write_all(request)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    String::from_utf8(answer).map_err(io::Error::other)
}

fn ask(stream: impl Read + Write, path: &str) -> io::Result<(String, String)> {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    let answer = say(stream, request.as_bytes())?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or_else(|| io::Error::other(answer.clone()))?;
    Ok((head.lines().next().unwrap_or_default().to_owned(), body.to_owned()))
}

/// The sum of a metric of all threads and engines, from the page at `metrics`.
pub fn sum(metrics: &Path, metric: &str) -> f64 {
    let (_, page) = get(metrics, "/metrics").expect("a page");
    let of = page.lines().filter_map(|line| line.strip_prefix(metric)?.rsplit_once(' '));
    of.map(|(_, value)| value.parse::<f64>().expect("a number")).sum()
}
