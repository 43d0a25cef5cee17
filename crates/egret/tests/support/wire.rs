//! vhost-user messages written by hand, as badly as a test likes.
//!
//! Layouts are those of QEMU's `docs/interop/vhost-user.rst`.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

pub use egret_vring::vhost_user::F_PROTOCOL_FEATURES;
use egret_vring::vhost_user::flag::{NEED_REPLY, REPLY, VERSION};
use egret_vring::vhost_user::protocol_feature;
pub use egret_vring::vhost_user::request::*;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use super::PATIENCE;

pub const F_VERSION_1: u64 = 1 << 32;
pub const F_INDIRECT_DESC: u64 = 1 << 28;
pub const F_EVENT_IDX: u64 = 1 << 29;
pub const F_RING_PACKED: u64 = 1 << 34;
/// `VIRTIO_BLK_F_FLUSH`.
pub const F_BLK_FLUSH: u64 = 1 << 9;

/// The length of a message's header: request, flags and payload length.
pub const HEADER: usize = 12;

/// A client's end of a vhost-user connection.
pub struct Wire {
    stream: UnixStream,
}

impl Wire {
    /// Connects, and sends nothing yet.
    pub fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("the daemon listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Self { stream }
    }

    /// Connects and agrees on `features` as far as they are offered, on acknowledged messages, memory slots, in-flight
    /// records, and what a migration asks for.
    pub fn agree(socket: &Path, features: u64) -> Self {
        let mut wire = Self::connect(socket);
        wire.send(SET_OWNER, &[], &[]).expect("a message");
        let offered = wire.ask(GET_FEATURES, &[]).expect("the features");
        wire.send(SET_FEATURES, &u64s(&[offered & (features | F_PROTOCOL_FEATURES)]), &[]).expect("a message");
        let protocol = wire.ask(GET_PROTOCOL_FEATURES, &[]).expect("the protocol features");
        let wanted = protocol_feature::MQ
            | protocol_feature::REPLY_ACK
            | protocol_feature::CONFIG
            | protocol_feature::INFLIGHT_SHMFD
            | protocol_feature::LOG_SHMFD
            | protocol_feature::DEVICE_STATE
            | protocol_feature::CONFIGURE_MEM_SLOTS;
        wire.send(SET_PROTOCOL_FEATURES, &u64s(&[protocol & wanted]), &[]).expect("a message");
        wire
    }

    /// Sends bytes that need not be a message.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends a message and asks for no answer.
    pub fn send(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_flagged(request, 0, payload, fds)
    }

    /// Sends a message and returns the number that answers it: for an order, zero is success.
    pub fn order(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<u64> {
        self.send_flagged(request, NEED_REPLY, payload, fds)?;
        self.answer(request)
    }

    /// Sends an order that is fine.
    #[track_caller]
    pub fn must(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.order(request, payload, fds).expect("an answer"), 0, "request {request} is fine");
    }

    /// Sends a question and returns the number that answers it.
    pub fn ask(&mut self, request: u32, payload: &[u8]) -> io::Result<u64> {
        self.send(request, payload, &[])?;
        self.answer(request)
    }

    /// Asks for so many bytes of the configuration space's beginning.
    pub fn ask_config(&mut self, size: u32) -> io::Result<Vec<u8>> {
        self.send(GET_CONFIG, &[u32s(&[0, size, 0]), vec![0; size as usize]].concat(), &[])?;
        // Behind what it repeats of the question.
        Ok(self.answer_bytes(GET_CONFIG)?.split_off(12))
    }

    /// Asks for an in-flight record for so many queues of so many descriptors; returns the message that describes it, and
    /// its file, if there is one.
    pub fn ask_inflight(&mut self, queues: u16, queue_size: u16) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
        self.send(GET_INFLIGHT_FD, &inflight(0, 0, queues, queue_size), &[])?;
        let mut message = vec![0; HEADER + 24];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(&self.stream, &mut [IoSliceMut::new(&mut message)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if got.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        assert_eq!(got.bytes, message.len(), "one message, whole");
        assert_eq!(message[..4], GET_INFLIGHT_FD.to_le_bytes(), "the answer is to the last request");
        let mut files = control.drain().filter_map(|part| match part {
            RecvAncillaryMessage::ScmRights(files) => files.last(),
            _ => None,
        });
        Ok((message.split_off(HEADER), files.next()))
    }

    /// Whether an order's answer was a refusal: an error code, or the end of the session.
    pub fn refuses(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        match self.order(request, payload, fds) {
            Ok(code) => code != 0,
            Err(error) => is_hangup(&error),
        }
    }

    /// Waits until the daemon ends the session; returns how many bytes were still to be read.
    ///
    /// # Panics
    /// When it does not.
    pub fn await_hangup(&mut self) -> usize {
        let (mut rest, mut count) = ([0; 256], 0);
        loop {
            match self.stream.read(&mut rest) {
                Ok(0) => return count,
                Ok(read) => count += read,
                Err(error) if is_hangup(&error) => return count,
                Err(error) => panic!("the daemon should have ended the session: {error}"),
            }
        }
    }

    fn send_flagged(&self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut message = u32s(&[request, VERSION | flags, payload.len() as u32]);
        message.extend(payload);
        let sent = send_with(&self.stream, &message, fds)?;
        assert_eq!(sent, message.len(), "a stream socket takes a message of this size whole");
        Ok(())
    }

    fn answer(&mut self, request: u32) -> io::Result<u64> {
        let payload = self.answer_bytes(request)?;
        Ok(u64::from_le_bytes(payload[..8].try_into().expect("a number")))
    }

    fn answer_bytes(&mut self, request: u32) -> io::Result<Vec<u8>> {
        let mut header = [0; HEADER];
        self.stream.read_exact(&mut header)?;
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        assert_eq!(word(0), request, "the answer is to the last request");
        assert_eq!(word(4) & REPLY, REPLY, "the answer is marked as one");
        let mut payload = vec![0; word(8) as usize];
        self.stream.read_exact(&mut payload)?;
        Ok(payload)
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Sends bytes, and descriptors with them.
pub fn send_with(stream: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "there is space for 64 descriptors");
    }
    sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
}

/// Whether `error` means that the peer closed the connection.
fn is_hangup(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// The payload of `GET_INFLIGHT_FD` and `SET_INFLIGHT_FD`, as QEMU pads it.
pub fn inflight(size: u64, offset: u64, queues: u16, queue_size: u16) -> Vec<u8> {
    u64s(&[size, offset, u64::from(queue_size) << 16 | u64::from(queues)])
}

/// A payload of 32-bit words.
pub fn u32s(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// A payload of 64-bit words.
pub fn u64s(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
