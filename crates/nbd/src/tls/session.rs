//! One connection's records: from and to its socket, whatever memory the data is in.
//!
//! ```text
//!   pieces ─▶ scratch ─▶ records ─▶ socket          socket ─▶ input ─▶ records ─▶ pieces
//! ```
//!
//! What it keeps is bounded, whatever the other end sends or does not read: so many bytes of records that wait to be sent,
//! one that is not complete, and the data of the last.

#![allow(unsafe_code)]

use std::io::{self, BufRead as _, IoSlice, IoSliceMut, Write};
use std::os::fd::AsFd;

use egret_event_loop::rights;
use egret_vring::memory::{IoVec, volatile};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use rustls::Connection;

use crate::channel::{ChannelError, Received};

/// Bytes of a full record.
const RECORD: usize = 16 << 10;
/// Bytes that are encrypted before the socket is asked to take them.
const BATCH: usize = 8 * RECORD;
/// Bytes that are received at a time.
const INPUT: usize = 4 * RECORD;
/// How often the socket is asked by one call: records may hold nothing, or a byte, and come in pieces as small as the other end
/// likes.
const MOST_READS: u32 = 4;

/// See the module's description.
#[derive(Debug)]
pub struct Session {
    tls: Connection,
    scratch: Box<[u8]>,
    input: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Session {
    pub(super) fn new(mut tls: Connection) -> Self {
        // What is kept is bounded by who flushes before there is more.
        tls.set_buffer_limit(None);
        let room = |bytes| vec![0; bytes].into_boxed_slice();
        Self { tls, scratch: room(RECORD), input: room(INPUT), start: 0, end: 0 }
    }

    pub(crate) fn is_shaking_hands(&self) -> bool {
        self.tls.is_handshaking()
    }

    pub(crate) fn shake_hands(&mut self, socket: impl AsFd) -> Result<(), ChannelError> {
        loop {
            self.flush(&socket)?;
            if !self.is_shaking_hands() {
                return Ok(());
            }
            match self.tls.reader().fill_buf() {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Ok(_) | Err(_) => return Err(ChannelError::Truncated),
            }
            self.take_in(&socket)?;
        }
    }

    pub(crate) fn is_flushed(&self) -> bool {
        !self.tls.wants_write()
    }

    pub(crate) fn flush(&mut self, socket: impl AsFd) -> Result<(), ChannelError> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Records(&socket)) {
                Ok(_) => {}
                Err(e) => return Err(Errno::from_io_error(&e).unwrap_or(Errno::IO).into()),
            }
        }
        Ok(())
    }

    /// As [`Channel::send`](crate::Channel::send).
    ///
    /// # Safety
    ///
    /// The pieces' memory must be mapped.
    pub(crate) unsafe fn send(&mut self, socket: impl AsFd, pieces: &[IoVec]) -> Result<usize, ChannelError> {
        self.flush(&socket)?;
        if self.is_shaking_hands() {
            return Err(Errno::AGAIN.into());
        }
        let mut pieces = Cursor { pieces, at: 0 };
        let (mut sent, mut batch) = (0, 0);
        loop {
            let mut filled = 0;
            while filled < RECORD
                && let Some((base, len)) = pieces.next(RECORD - filled)
            {
                // SAFETY: a part of a piece, which is mapped.
                unsafe { volatile::copy_from(base, &mut self.scratch[filled..filled + len]) };
                filled += len;
            }
            (sent, batch) = (sent + filled, batch + filled);
            self.tls.writer().write_all(&self.scratch[..filled]).map_err(|_| Errno::IO)?;
            if filled < RECORD || batch >= BATCH {
                batch = 0;
                match self.flush(&socket) {
                    Ok(()) if filled == RECORD => {}
                    Ok(()) | Err(ChannelError::System(Errno::AGAIN | Errno::INTR)) => return Ok(sent),
                    Err(e) => return Err(e),
                }
            }
        }
    }

    /// As [`Channel::receive`](crate::Channel::receive).
    ///
    /// # Safety
    ///
    /// The pieces' memory must be mapped, and nobody may refer to it.
    pub(crate) unsafe fn receive(&mut self, socket: impl AsFd, pieces: &[IoVec]) -> Result<Received, ChannelError> {
        let wanted: usize = pieces.iter().map(IoVec::len).sum();
        let mut pieces = Cursor { pieces, at: 0 };
        let (mut bytes, mut reads) = (0, 0);
        while bytes < wanted {
            let mut reader = self.tls.reader();
            match reader.fill_buf() {
                Ok([]) => return Ok(Received { bytes, more: false }),
                Ok(mut chunk) => {
                    let before = chunk.len();
                    while let Some((base, len)) = pieces.next(chunk.len()) {
                        let part = chunk.split_off(..len).expect("it is no longer than was asked for");
                        // SAFETY: a part of a piece, which is mapped, and which nobody refers to.
                        unsafe { volatile::copy_to(base, part) };
                    }
                    let used = before - chunk.len();
                    reader.consume(used);
                    bytes += used;
                    continue;
                }
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof && bytes == 0 => {
                    return Err(ChannelError::Truncated);
                }
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => break,
                Err(_) => {}
            }
            if self.start == self.end {
                if reads == MOST_READS {
                    break;
                }
                reads += 1;
            }
            match self.take_in(&socket) {
                Ok(()) => {}
                Err(ChannelError::System(Errno::AGAIN)) if bytes > 0 => return Ok(Received { bytes, more: false }),
                Err(e) => return Err(e),
            }
        }
        Ok(Received { bytes, more: true })
    }

    /// Gives records to TLS, and takes them from the socket if there are none.
    fn take_in(&mut self, socket: impl AsFd) -> Result<(), ChannelError> {
        if self.start == self.end {
            let count = match rights::receive(&socket, &mut [IoSliceMut::new(&mut self.input)]) {
                Ok(count) => count,
                Err(Errno::INTR) => return Ok(()),
                Err(e) => return Err(e.into()),
            };
            (self.start, self.end) = (0, count);
        }
        let mut records = &self.input[self.start..self.end];
        // At the connection's end it is told so by nothing.
        let count = self.tls.read_tls(&mut records).map_err(|_| Errno::PROTO)?;
        self.start += count;
        let processed = self.tls.process_new_packets();
        // Answers of TLS's own: they are sent with what follows if there is no room now.
        match (self.flush(&socket), processed) {
            (_, Err(e)) => Err(e.into()),
            (Ok(()) | Err(ChannelError::System(Errno::AGAIN | Errno::INTR)), Ok(_)) => Ok(()),
            (Err(e), Ok(_)) => Err(e),
        }
    }

    pub(crate) fn say_goodbye(&mut self, socket: impl AsFd) {
        self.tls.send_close_notify();
        let _ = self.flush(socket);
    }
}

/// Where in a list of pieces one is.
struct Cursor<'a> {
    pieces: &'a [IoVec],
    at: usize,
}

impl Cursor<'_> {
    /// The next bytes that are in one place, of which there are no more than `most`; none where there are none left.
    fn next(&mut self, most: usize) -> Option<(*mut u8, usize)> {
        while most > 0
            && let Some(first) = self.pieces.first()
        {
            let len = (first.len() - self.at).min(most);
            if len == 0 {
                (self.pieces, self.at) = (&self.pieces[1..], 0);
                continue;
            }
            let base = first.base().wrapping_add(self.at);
            self.at += len;
            return Some((base, len));
        }
        None
    }
}

/// Where records go.
struct Records<S>(S);

impl<S: AsFd> Write for Records<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        Ok(sendmsg(&self.0, pieces, &mut SendAncillaryBuffer::default(), flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
