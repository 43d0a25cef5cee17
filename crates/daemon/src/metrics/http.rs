//! As much of an HTTP/1.1 server as a scrape needs: `GET /metrics`, one answer a connection.
//!
//! Clients are strangers: each has a little memory and a little time, and one that dawdles loses its place to one that
//! waits for it. So however many dawdle, the next waits for a moment and not for them.

use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use egret_event_loop::{EventNotifier, FromPeer, rights};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::text::CONTENT_TYPE;
use crate::listen::Socket;

/// Clients that are served at a time; more wait to be let in. Each may have a page of its own that it does not read.
const MOST_CLIENTS: usize = 16;
/// How long a client has its place for itself; a scrape takes a few milliseconds. After that the one that
/// has been there longest makes room when all places are taken and somebody waits.
const UNDISTURBED: Duration = Duration::from_millis(250);
/// Bytes of a request's head.
const LONGEST_HEAD: usize = 8 << 10;
/// How long a client may take, from being let in to having read its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it rests where a client could not be let in (no descriptors left, say).
const REST: Duration = Duration::from_secs(1);

/// A conversation of one request.
struct Client {
    stream: FromPeer,
    since: Instant,
    state: State,
}

enum State {
    /// So much of its head has come.
    Asking(Vec<u8>),
    /// The answer, and how much of it has been sent.
    Reading(Vec<u8>, usize),
    /// Everything was said. To hang up on what it still sends would take the answer back, so that is read and forgotten:
    /// so many bytes of it.
    Leaving(usize),
    Over,
}

/// Serves `page` to those who ask for it, until `stop` is readable.
pub(super) fn serve(socket: &Socket, stop: &EventNotifier, page: &dyn Fn() -> String) {
    // In the order in which they came.
    let mut clients: Vec<Client> = Vec::new();
    let mut resting_until: Option<Instant> = None;
    loop {
        let now = Instant::now();
        resting_until = resting_until.filter(|end| *end > now);
        let room_at = clients.first().filter(|_| clients.len() >= MOST_CLIENTS).map(|first| first.since + UNDISTURBED);
        let room_at = room_at.filter(|at| *at > now);
        let open = resting_until.is_none() && room_at.is_none();
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        fds.extend(clients.iter().map(|client| PollFd::new(&client.stream, client.interest())));
        if open {
            fds.push(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN));
        }
        let end = clients.iter().map(|client| client.since + PATIENCE).chain(resting_until).chain(room_at).min();
        let timeout = end.and_then(|end| Timespec::try_from(end.saturating_duration_since(now)).ok());
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return tracing::error!("metrics are no longer served: {e}"),
        }
        if !fds[0].revents().is_empty() {
            return;
        }
        drop(fds);
        let now = Instant::now();
        clients.iter_mut().for_each(|client| client.go_on(page));
        clients.retain(|client| client.since + PATIENCE > now && !matches!(client.state, State::Over));
        if open {
            match socket.accept() {
                Ok(None) => {}
                Ok(Some(stream)) => {
                    if clients.len() >= MOST_CLIENTS {
                        clients.remove(0);
                    }
                    clients.push(Client { stream, since: now, state: State::Asking(Vec::new()) });
                }
                Err(e) => {
                    tracing::warn!("a client of the metrics cannot be let in: {e}");
                    resting_until = Some(now + REST);
                }
            }
        }
    }
}

impl Client {
    const fn interest(&self) -> PollFlags {
        match self.state {
            State::Reading(..) => PollFlags::OUT,
            _ => PollFlags::IN,
        }
    }

    /// Goes as far as it can without waiting.
    fn go_on(&mut self, page: &dyn Fn() -> String) {
        if let State::Asking(head) = &mut self.state {
            match listen(&self.stream, head) {
                Ok(None) => return,
                Ok(Some(answer)) => self.state = State::Reading(answer.bytes(page), 0),
                Err(_) => self.state = State::Over,
            }
        }
        if let State::Reading(answer, sent) = &mut self.state {
            match send(&self.stream, answer, sent) {
                Ok(false) => return,
                Ok(true) => {
                    let _ = rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Write);
                    self.state = State::Leaving(LONGEST_HEAD);
                }
                Err(_) => self.state = State::Over,
            }
        }
        if let State::Leaving(left) = &mut self.state {
            match rights::receive(&self.stream, &mut [IoSliceMut::new(&mut [0; 1024])]) {
                Ok(len @ 1..) if len < *left => *left -= len,
                Err(Errno::AGAIN | Errno::INTR) => {}
                _ => self.state = State::Over,
            }
        }
    }
}

/// Takes in what has come; the answer, once there is one to give.
fn listen(stream: &FromPeer, head: &mut Vec<u8>) -> io::Result<Option<Answer>> {
    let mut buffer = [0; 1024];
    loop {
        match rights::receive(stream, &mut [IoSliceMut::new(&mut buffer)]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => head.extend_from_slice(&buffer[..len]),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
        if let Some(end) = head.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            return Ok(Some(Answer::to(&head[..end])));
        }
        if head.len() > LONGEST_HEAD {
            return Ok(Some(Answer::TooLong));
        }
    }
}

/// Sends what the client takes; says whether that was the rest.
fn send(stream: &FromPeer, answer: &[u8], sent: &mut usize) -> io::Result<bool> {
    while *sent < answer.len() {
        match rustix::net::send(stream, &answer[*sent..], rustix::net::SendFlags::NOSIGNAL) {
            Ok(len) => *sent += len,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(false),
            Err(e) => return Err(e.into()),
        }
    }
    Ok(true)
}

/// What a request comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Page,
    PageHead,
    NotFound,
    NotAllowed,
    Malformed,
    TooLong,
}

impl Answer {
    /// To a request of this head (RFC 9112, 3): its first line says all that matters here.
    fn to(head: &[u8]) -> Self {
        let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
        let Ok(line) = std::str::from_utf8(line) else { return Self::Malformed };
        let words: Vec<&str> = line.split(' ').collect();
        let [method, target, version] = words[..] else { return Self::Malformed };
        if !version.starts_with("HTTP/1.") {
            return Self::Malformed;
        }
        let path = target.split('?').next().unwrap_or_default();
        match (method, path) {
            ("GET", "/metrics") => Self::Page,
            ("HEAD", "/metrics") => Self::PageHead,
            ("GET" | "HEAD", _) => Self::NotFound,
            _ => Self::NotAllowed,
        }
    }

    fn bytes(self, page: &dyn Fn() -> String) -> Vec<u8> {
        let (status, kind, body) = match self {
            Self::Page | Self::PageHead => ("200 OK", CONTENT_TYPE, page()),
            Self::NotFound => ("404 Not Found", "text/plain", "metrics are at /metrics\n".to_owned()),
            Self::NotAllowed => ("405 Method Not Allowed\r\nAllow: GET, HEAD", "text/plain", "GET it\n".to_owned()),
            Self::Malformed => ("400 Bad Request", "text/plain", "this is not HTTP/1.1\n".to_owned()),
            Self::TooLong => ("431 Request Header Fields Too Large", "text/plain", "too long\n".to_owned()),
        };
        let length = body.len();
        let mut answer = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
        );
        if self != Self::PageHead {
            answer.push_str(&body);
        }
        answer.into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_get_of_the_metrics_gets_them() {
        for (head, answer) in [
            ("GET /metrics HTTP/1.1\r\nHost: x", Answer::Page),
            ("GET /metrics?x=y HTTP/1.0", Answer::Page),
            ("HEAD /metrics HTTP/1.1", Answer::PageHead),
            ("GET / HTTP/1.1", Answer::NotFound),
            ("GET /metrics/ HTTP/1.1", Answer::NotFound),
            ("POST /metrics HTTP/1.1", Answer::NotAllowed),
            ("GET /metrics HTTP/2", Answer::Malformed),
            ("GET /metrics", Answer::Malformed),
            ("GET  /metrics HTTP/1.1", Answer::Malformed),
            ("", Answer::Malformed),
        ] {
            assert_eq!(Answer::to(head.as_bytes()), answer, "{head}");
        }
        assert_eq!(Answer::to(b"GET /\xff HTTP/1.1"), Answer::Malformed);
    }

    #[test]
    fn an_answer_says_how_long_it_is_and_that_it_is_the_last() {
        let page = || "egret 1\n".to_owned();
        let text = String::from_utf8(Answer::Page.bytes(&page)).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{text}");
        assert!(text.ends_with("\r\nContent-Length: 8\r\nConnection: close\r\n\r\negret 1\n"), "{text}");
        let head = String::from_utf8(Answer::PageHead.bytes(&page)).unwrap();
        assert_eq!(head, text.strip_suffix("egret 1\n").unwrap());
    }
}
