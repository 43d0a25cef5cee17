//! A client's bytes: read as far as its answers are taken, and kept within bounds both ways.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use egret_event_loop::{FromPeer, rights};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::Value;

use super::Descriptors;
use super::event::Event;
use super::frame::Framer;
use super::session::{Heard, Order, Session};
use crate::process::Output;

/// Bytes that are read in one go.
const GULP: usize = 16 << 10;
/// A client whose answers wait for it to read gives no more commands beyond this many bytes.
const PATIENT: usize = 64 << 10;
/// A client that lets so many bytes of events pile up is cut off.
const MOST_UNREAD: usize = 1 << 20;
/// Descriptors that are kept of one message.
const MOST_KEPT: usize = 16;

/// A conversation and the streams that it travels on.
pub(super) struct Client {
    stream: Stream,
    /// The place where it was let in, if it came over a socket.
    place: Option<usize>,
    framer: Framer,
    session: Session,
    /// What it has sent beside its commands.
    descriptors: Descriptors,
    /// Read, and not yet looked at.
    input: Vec<u8>,
    /// Said, and not yet taken.
    output: Vec<u8>,
    /// Bytes of events that were said since all had been taken.
    events: usize,
    pretty: bool,
    /// It says nothing more.
    ended: bool,
    /// It has given an order, and gives no other before it has its answer.
    waits: bool,
}

enum Stream {
    Socket(FromPeer),
    Stdio(io::Stdin, Output),
}

impl Client {
    pub(super) fn socket(stream: FromPeer, place: usize, pretty: bool) -> Self {
        Self::new(Stream::Socket(stream), Some(place), pretty)
    }

    pub(super) fn stdio(output: Output, pretty: bool) -> Self {
        Self::new(Stream::Stdio(io::stdin(), output), None, pretty)
    }

    fn new(stream: Stream, place: Option<usize>, pretty: bool) -> Self {
        let (session, greeting) = Session::begin();
        let mut new = Self {
            stream,
            place,
            framer: Framer::default(),
            session,
            descriptors: Descriptors::default(),
            input: Vec::new(),
            output: Vec::new(),
            events: 0,
            pretty,
            ended: false,
            waits: false,
        };
        new.say(&greeting);
        new
    }

    /// What it is waited for, and on which descriptors.
    pub(super) fn interest(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        let listens = !self.ended && !self.waits && self.output.len() <= PATIENT;
        let (read, write) = match &self.stream {
            Stream::Socket(stream) => (stream.as_fd(), stream.as_fd()),
            Stream::Stdio(input, output) => (input.as_fd(), output.as_fd()),
        };
        let mut interest = Vec::new();
        if listens {
            interest.push((read, PollFlags::IN));
        }
        if !self.output.is_empty() {
            interest.push((write, PollFlags::OUT));
        }
        interest
    }

    /// Whether a command that has arrived can run without waiting for anything.
    pub(super) fn is_ready(&self) -> bool {
        !self.waits && !self.input.is_empty() && self.output.len() <= PATIENT
    }

    /// Reads what there is, up to a bound.
    pub(super) fn read(&mut self) {
        // What was read last is looked at first.
        if !self.input.is_empty() || self.ended {
            return;
        }
        if let Stream::Stdio(input, _) = &self.stream
            && !has_input_now(input.as_fd())
        {
            return;
        }
        self.input.resize(GULP, 0);
        let read = match &self.stream {
            Stream::Socket(stream) => receive(stream, &mut self.input, &mut self.descriptors),
            Stream::Stdio(input, _) => rustix::io::read(input, self.input.as_mut_slice()),
        };
        self.input.truncate(read.unwrap_or(0));
        self.ended = match read {
            Ok(0) => true,
            Ok(_) => false,
            Err(e) => !matches!(e, rustix::io::Errno::AGAIN | rustix::io::Errno::INTR),
        };
    }

    /// Takes at most one message of those that have arrived; the order that it gives, which is to be
    /// [answered](Self::answer).
    pub(super) fn hear(&mut self) -> Option<Order> {
        if !self.is_ready() {
            return None;
        }
        let mut rest = self.input.as_slice();
        let message = self.framer.take(&mut rest);
        let left = rest.len();
        self.input.drain(..self.input.len() - left);
        match self.session.hear(message?) {
            Heard::Answer(answer) => {
                self.say(&answer);
                None
            }
            Heard::Order(order) => {
                self.waits = true;
                Some(order)
            }
        }
    }

    /// What it has sent beside its commands, which goes with an order and is [put back](Self::put_back) after it.
    pub(super) fn take_descriptors(&mut self) -> Descriptors {
        std::mem::take(&mut self.descriptors)
    }

    /// Gives back what an order has left.
    pub(super) fn put_back(&mut self, descriptors: Descriptors) {
        self.descriptors.put_back(descriptors);
    }

    /// Tells what came of its order.
    pub(super) fn answer(&mut self, answer: &Value) {
        self.waits = false;
        self.say(answer);
    }

    /// Sends an event, if the client is to have any; false if it does not read what it is sent.
    pub(super) fn send_event(&mut self, event: &Event) -> bool {
        if self.session.hears_events() {
            let before = self.output.len();
            self.say(&event.to_json());
            self.events += self.output.len() - before;
        }
        // What waits of them is no more than that, and no more than waits of all.
        self.events.min(self.output.len()) <= MOST_UNREAD
    }

    fn say(&mut self, value: &Value) {
        let text = match self.pretty {
            true => format!("{value:#}"),
            false => value.to_string(),
        };
        // A server says all in ASCII (qmp-spec, "General Definitions"), and what is none stands in strings.
        for part in text.split_inclusive(|c: char| !c.is_ascii()) {
            let ascii = part.trim_end_matches(|c: char| !c.is_ascii());
            self.output.extend(ascii.as_bytes());
            for unit in part[ascii.len()..].encode_utf16() {
                self.output.extend(format!("\\u{unit:04x}").as_bytes());
            }
        }
        self.output.extend(b"\r\n");
    }

    /// Writes as much as is taken.
    pub(super) fn write(&mut self) {
        if self.output.is_empty() {
            return;
        }
        let written = match &self.stream {
            Stream::Socket(stream) => rustix::io::write(stream, &self.output),
            Stream::Stdio(_, output) => output.write(&self.output),
        };
        match written {
            Ok(count) => {
                self.output.drain(..count);
                if self.output.is_empty() {
                    self.events = 0;
                }
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(_) => {
                self.ended = true;
                self.output.clear();
                self.input.clear();
            }
        }
    }

    /// Whether it has left, and nothing is left to do or to say.
    pub(super) fn is_over(&self) -> bool {
        self.ended && !self.waits && self.input.is_empty() && self.output.is_empty()
    }

    /// Whether something waits for it to read.
    pub(super) fn is_owed(&self) -> bool {
        !self.output.is_empty()
    }

    /// Whether it was let in at this place.
    pub(super) fn is_at(&self, place: usize) -> bool {
        self.place == Some(place)
    }
}

/// Reads what there is, and the descriptors that came with it; more than [`MOST_KEPT`] are closed. There is room for all, or
/// the kernel would close them here, which may take long.
fn receive(stream: &FromPeer, input: &mut [u8], descriptors: &mut Descriptors) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(rights::MOST_SENT))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let read = recvmsg(stream, &mut [IoSliceMut::new(input)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let sent = |message| match message {
        RecvAncillaryMessage::ScmRights(received) => Some(received),
        _ => None,
    };
    let mut arrived: Vec<FromPeer> = control.drain().filter_map(sent).flatten().map(FromPeer::from).collect();
    arrived.truncate(MOST_KEPT);
    descriptors.arrive(arrived);
    Ok(read.bytes)
}

/// Whether a stream that is shared with others, and so left blocking, has something to read now.
fn has_input_now(fd: BorrowedFd<'_>) -> bool {
    matches!(poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&Timespec::default())), Ok(1))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_client_that_leaves_its_events_unread_is_given_up() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut client = Client::socket(ours.into(), 0, false);
        let event = Event::BlockExportDeleted { id: "e".repeat(10_000) };
        assert!(client.send_event(&event) && client.output.len() < 1_000, "before it commands it hears of no events");
        theirs.write_all(b"{\"execute\":\"qmp_capabilities\"}").unwrap();
        client.read();
        assert!(client.hear().is_none());
        let told = (0..1_000).take_while(|_| client.send_event(&event)).count();
        assert!(client.output.len() < MOST_UNREAD + 20_000 && (90..110).contains(&told), "{told} events piled up");
    }

    #[test]
    fn all_that_a_client_is_told_is_ascii() {
        for pretty in [false, true] {
            let (_theirs, ours) = UnixStream::pair().unwrap();
            let mut client = Client::socket(ours.into(), 0, pretty);
            client.output.clear();
            let value = serde_json::json!({"ä": ["böse", "\u{1f600}é", "\n\\"]});
            client.say(&value);
            assert!(client.output.is_ascii());
            assert_eq!(serde_json::from_slice::<Value>(&client.output).unwrap(), value);
        }
    }

    #[test]
    fn a_client_that_has_a_large_answer_to_read_is_not_given_up_for_an_event() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut client = Client::socket(ours.into(), 0, false);
        theirs.write_all(b"{\"execute\":\"qmp_capabilities\"}").unwrap();
        client.read();
        assert!(client.hear().is_none());
        let event = Event::BlockExportDeleted { id: "e".repeat(10_000) };
        for _ in 0..3 {
            client.answer(&Value::from("a".repeat(2 * MOST_UNREAD)));
            let told = (0..1_000).take_while(|_| client.send_event(&event)).count();
            assert!((90..110).contains(&told), "{told} events beside an answer");
            // It reads all of that, and is as good as new.
            while client.is_owed() {
                client.write();
                let _ = theirs.read(&mut [0; 1 << 16]).unwrap();
            }
        }
    }
}
