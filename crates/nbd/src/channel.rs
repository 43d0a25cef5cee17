//! A connected socket, and what encrypts it, if something does.

#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::slice;

use egret_event_loop::FromPeer;
use egret_vring::memory::IoVec;
use rustix::io::Errno;

use crate::socket;
use crate::tls::Session;

/// Characters of what is wrong with TLS that are worth telling.
const SHOWN: usize = 300;

/// See the module's description. It never waits.
#[derive(Debug)]
pub struct Channel {
    socket: FromPeer,
    tls: Option<Box<Session>>,
}

/// Why nothing goes through.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// What the system says: with `EAGAIN`, not now.
    #[error("{0}")]
    System(#[from] Errno),
    /// What TLS says.
    #[error("TLS: {0}")]
    Tls(String),
    /// It has ended, and nobody said in TLS that it would: anybody on the way could have ended it.
    #[error("the connection was cut off inside of TLS")]
    Truncated,
}

impl From<rustls::Error> for ChannelError {
    /// On one line that is no longer than it may be, though the other end's certificate is quoted.
    fn from(error: rustls::Error) -> Self {
        Self::Tls(error.to_string().chars().take(SHOWN).flat_map(char::escape_debug).collect())
    }
}

/// What came of receiving once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes; none, and none to come, where the other end has said that it sends nothing more.
    pub bytes: usize,
    /// There may be more, of which no event will tell.
    pub more: bool,
}

impl Channel {
    /// One that is not encrypted.
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket: socket.into(), tls: None }
    }

    /// Encrypts everything from here on.
    pub fn encrypt(&mut self, session: Session) {
        self.tls = Some(Box::new(session));
    }

    /// Whether it is.
    pub const fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether TLS has not agreed on keys yet.
    pub fn is_shaking_hands(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_shaking_hands())
    }

    /// Goes on with that, as far as it does not have to be waited for.
    ///
    /// # Errors
    /// `EAGAIN` where it is not done, or what has ended the connection.
    pub fn shake_hands(&mut self) -> Result<(), ChannelError> {
        self.tls.as_mut().map_or(Ok(()), |tls| tls.shake_hands(&self.socket))
    }

    /// Whether all that [`send`](Self::send) has taken is the system's; otherwise [`flush`](Self::flush) goes on with it.
    pub fn is_flushed(&self) -> bool {
        self.tls.as_ref().is_none_or(|tls| tls.is_flushed())
    }

    /// Has the socket take what is encrypted.
    ///
    /// # Errors
    /// `EAGAIN` where it takes no more.
    pub fn flush(&mut self) -> Result<(), ChannelError> {
        self.tls.as_mut().map_or(Ok(()), |tls| tls.flush(&self.socket))
    }

    /// Sends what `pieces` hold, as far as it is taken at once; returns how many bytes that was.
    ///
    /// # Errors
    /// `EAGAIN` where nothing is, or what has ended the connection.
    pub fn send(&mut self, pieces: &[IoSlice<'_>]) -> Result<usize, ChannelError> {
        // SAFETY: an `IoSlice` is laid out as an `iovec` is, and so is an `IoVec`.
        let pieces = unsafe { slice::from_raw_parts(pieces.as_ptr().cast::<IoVec>(), pieces.len()) };
        // SAFETY: the slices are borrowed for as long as this takes.
        unsafe { self.send_lent(pieces) }
    }

    /// Fills `pieces` with what has come.
    ///
    /// # Errors
    /// `EAGAIN` where nothing has, or what has ended the connection.
    pub fn receive(&mut self, pieces: &mut [IoSliceMut<'_>]) -> Result<Received, ChannelError> {
        // SAFETY: an `IoSliceMut` is laid out as an `iovec` is, and so is an `IoVec`.
        let pieces = unsafe { slice::from_raw_parts(pieces.as_ptr().cast::<IoVec>(), pieces.len()) };
        // SAFETY: the slices are borrowed for as long as this takes, and by nobody else.
        unsafe { self.receive_lent(pieces) }
    }

    /// As [`send`](Self::send).
    ///
    /// # Safety
    ///
    /// The pieces' memory must be mapped.
    pub(crate) unsafe fn send_lent(&mut self, pieces: &[IoVec]) -> Result<usize, ChannelError> {
        match &mut self.tls {
            // SAFETY: as the caller promises.
            None => Ok(unsafe { socket::send(&self.socket, pieces) }?),
            // SAFETY: likewise.
            Some(tls) => unsafe { tls.send(&self.socket, pieces) },
        }
    }

    /// As [`receive`](Self::receive).
    ///
    /// # Safety
    ///
    /// The pieces' memory must be mapped, and nobody may refer to it.
    pub(crate) unsafe fn receive_lent(&mut self, pieces: &[IoVec]) -> Result<Received, ChannelError> {
        match &mut self.tls {
            None => {
                // SAFETY: as the caller promises.
                let bytes = unsafe { socket::receive(&self.socket, pieces) }?;
                Ok(Received { bytes, more: bytes > 0 && bytes == pieces.iter().map(IoVec::len).sum() })
            }
            // SAFETY: likewise.
            Some(tls) => unsafe { tls.receive(&self.socket, pieces) },
        }
    }

    /// Says, where it is encrypted, that nothing more is sent; if that takes no time.
    pub fn say_goodbye(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.say_goodbye(&self.socket);
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
