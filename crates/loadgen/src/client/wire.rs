//! The front-end's half of the vhost-user wire: requests out, replies in, none of them trusted and none waited for
//! longer than a client's patience.
//!
//! Layouts are those of QEMU's `docs/interop/vhost-user.rst`.

use std::io::{self, IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use egret_vring::vhost_user::flag;
use egret_vring::vhost_user::request::{self, GET_CONFIG};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    connect, sendmsg, socket_with,
};

use super::ClientError;

/// No reply that we ask for is longer: configuration space with its header.
const MOST: u32 = 4096;

/// One connection.
pub(super) struct Wire {
    stream: UnixStream,
    /// Whether REPLY_ACK was negotiated: every request is acknowledged.
    pub(super) acknowledged: bool,
}

impl Wire {
    /// Connects, and sends nothing yet.
    pub(super) fn connect(path: &Path, patience: Duration) -> Result<Self, ClientError> {
        let connected = || -> rustix::io::Result<UnixStream> {
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            // Before connecting: a listener whose backlog is full would block us forever.
            set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
            set_socket_timeout(&socket, Timeout::Recv, Some(patience))?;
            connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(socket.into())
        };
        match connected() {
            Ok(stream) => Ok(Self { stream, acknowledged: false }),
            Err(errno) => Err(ClientError::Connect { path: path.display().to_string(), why: errno.into() }),
        }
    }

    /// The socket, once everything has been said.
    pub(super) fn into_stream(self) -> UnixStream {
        self.stream
    }

    /// Sends a request that has no reply of its own; waits for the acknowledgement if REPLY_ACK was negotiated.
    pub(super) fn request(&mut self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        let flags = if self.acknowledged { flag::NEED_REPLY } else { 0 };
        self.send(request, flags, payload, fds)?;
        if !self.acknowledged {
            return Ok(());
        }
        match self.number(request)? {
            0 => Ok(()),
            code => Err(ClientError::Refused { request: request::name(request), code }),
        }
    }

    /// Sends a request whose reply is a number.
    pub(super) fn ask(&mut self, request: u32) -> Result<u64, ClientError> {
        self.send(request, 0, &[], &[])?;
        self.number(request)
    }

    /// Reads `into.len()` bytes of configuration space from its beginning.
    pub(super) fn config(&mut self, into: &mut [u8]) -> Result<(), ClientError> {
        let mut payload = u32s(&[0, into.len() as u32, 0]);
        payload.resize(12 + into.len(), 0);
        self.send(GET_CONFIG, 0, &payload, &[])?;
        let body = self.answer(GET_CONFIG)?;
        match body.get(12..) {
            Some(bytes) if bytes.len() == into.len() => into.copy_from_slice(bytes),
            _ => return nonsense(GET_CONFIG, format!("{} bytes", body.len())),
        }
        Ok(())
    }

    fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), ClientError> {
        let mut message = u32s(&[request, flag::VERSION | flags, payload.len() as u32]);
        message.extend(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        match sendmsg(&self.stream, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) if sent == message.len() => Ok(()),
            Ok(_) | Err(Errno::AGAIN) => Err(ClientError::Silent(request::name(request))),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(ClientError::HungUp(request::name(request))),
            Err(errno) => Err(errno.into()),
        }
    }

    fn number(&mut self, request: u32) -> Result<u64, ClientError> {
        let body = self.answer(request)?;
        match body.as_slice().try_into() {
            Ok(bytes) => Ok(u64::from_ne_bytes(bytes)),
            Err(_) => nonsense(request, format!("{} bytes instead of a number", body.len())),
        }
    }

    fn answer(&mut self, request: u32) -> Result<Vec<u8>, ClientError> {
        let mut header = [0; 12];
        self.fill(request, &mut header)?;
        let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|byte| header[at + byte]));
        let (number, flags, size) = (word(0), word(4), word(8));
        if number != request || flags & 3 != flag::VERSION || flags & flag::REPLY == 0 || size > MOST {
            return nonsense(request, format!("request {number}, flags {flags:#x}, {size} bytes"));
        }
        let mut body = vec![0; size as usize];
        self.fill(request, &mut body)?;
        Ok(body)
    }

    fn fill(&mut self, request: u32, into: &mut [u8]) -> Result<(), ClientError> {
        self.stream.read_exact(into).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ClientError::Silent(request::name(request)),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                ClientError::HungUp(request::name(request))
            }
            _ => error.into(),
        })
    }
}

fn nonsense<T>(request: u32, what: String) -> Result<T, ClientError> {
    Err(ClientError::Nonsense { request: request::name(request), what })
}

/// A payload of 32-bit words, in the host's byte order as all of them.
pub(super) fn u32s(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// A payload of 64-bit words.
pub(super) fn u64s(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}
