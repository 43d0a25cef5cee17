//! What the server sends, taken apart as it comes.
//!
//! Headers and small replies come into a buffer of ours, many at a time. What is left of a large reply's data when its header
//! has been read goes straight to its request's memory.

#![allow(unsafe_code)]

use egret_vring::memory::IoVec;
use rustix::io::Errno;

use super::commands::{Command, Commands};
use crate::channel::{Channel, ChannelError, Received};
use crate::handshake::Export;
use crate::memory;
use crate::protocol::{LONGEST_STRING, Reply, ReplyError, chunk, errno, take_u32, take_u64};
use crate::socket::MOST_PIECES;

/// Bytes that are read ahead of what is known.
const AHEAD: usize = 64 << 10;
/// The same while large replies are to come, whose data is not to be read ahead.
const LITTLE_AHEAD: usize = 512;
/// Work in bytes, beside what is received: a reply of a few bytes may say that megabytes are zeroes.
const MOST_WORK: u64 = 1 << 20;
/// What a header counts as: a server may send as many as it likes, about a byte each or about nothing.
const HEADER_WORK: u64 = 512;
/// What a piece of a request's memory counts as, each time that a place is looked for among them from the first one on.
const PIECE_WORK: u64 = 8;
/// Bytes of what belongs to an error besides its message.
const LONGEST_ERROR: u64 = LONGEST_STRING as u64 + 64;

/// Why a server cannot be believed any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum Lie {
    #[error(transparent)]
    NoReply(#[from] ReplyError),
    #[error("it answers what it was not asked, or has answered (cookie {0:#x})")]
    Cookie(u64),
    #[error("it answers a {0} by chunk {1:#06x} of {2} bytes")]
    Chunk(&'static str, u16, u64),
    #[error("of {wanted} bytes that were asked for it sends {got}")]
    Short { wanted: u64, got: u64 },
    #[error("it sends {len} bytes at {offset}, where {wanted} bytes at {begin} were asked for")]
    Outside { offset: u64, len: u64, begin: u64, wanted: u64 },
    #[error("it calls something an error that is none")]
    NoError,
}

/// What comes next.
enum Expect {
    Header,
    /// Bytes of a request's memory.
    Data {
        place: u32,
        at: u64,
        left: u64,
        is_last: bool,
    },
    /// Bytes that mean nothing.
    Skip {
        place: u32,
        left: u64,
        is_last: bool,
    },
}

/// See the module's description.
pub(super) struct Incoming {
    buffer: Box<[u8]>,
    /// What was read and not taken apart.
    start: usize,
    end: usize,
    expect: Expect,
    /// What was done since it was last begun to take apart, as so many bytes.
    work: u64,
    pieces: Vec<IoVec>,
}

impl Incoming {
    pub(super) fn new() -> Self {
        let buffer = vec![0; AHEAD].into_boxed_slice();
        Self { buffer, start: 0, end: 0, expect: Expect::Header, work: 0, pieces: Vec::with_capacity(MOST_PIECES) }
    }

    /// Receives once; `None` if nothing is there.
    ///
    /// # Errors
    /// The connection has failed; `None` if it has ended.
    pub(super) fn receive(
        &mut self,
        channel: &mut Channel,
        commands: &mut Commands,
    ) -> Result<Option<Received>, Option<ChannelError>> {
        // What is left in the buffer is less than a header.
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        self.pieces.clear();
        let mut direct = 0;
        if let Expect::Data { place, at, left, .. } = self.expect
            && let Some(command) = commands.get(place)
        {
            memory::append(&command.job.request.buffers, at, left, &mut self.pieces);
            self.pieces.truncate(MOST_PIECES - 1);
            direct = self.pieces.iter().map(|piece| piece.len() as u64).sum();
        }
        if !matches!(self.expect, Expect::Data { left, .. } if direct < left) {
            let ahead = if commands.awaits_large_reads() { LITTLE_AHEAD } else { AHEAD };
            let end = (self.end + ahead).min(self.buffer.len());
            memory::append_room(&mut self.buffer[self.end..end], &mut self.pieces);
        }
        // SAFETY: the pieces are of the request's memory, which is lent to the command, and of the buffer.
        let received = match unsafe { channel.receive_lent(&self.pieces) } {
            Ok(Received { bytes: 0, more: false }) => return Err(None),
            Ok(received) => received,
            Err(ChannelError::System(Errno::AGAIN)) => return Ok(None),
            Err(ChannelError::System(Errno::INTR)) => return Ok(Some(Received { bytes: 0, more: true })),
            // The guest has taken its memory away: its data is nobody's.
            Err(ChannelError::System(Errno::FAULT)) if direct > 0 => {
                if let Expect::Data { place, left, is_last, .. } = self.expect {
                    self.expect = Expect::Skip { place, left, is_last };
                    commands.get_mut(place).into_iter().for_each(|command| command.error = Some(Errno::FAULT));
                }
                return Ok(Some(Received { bytes: 0, more: true }));
            }
            Err(e) => return Err(Some(e)),
        };
        let to_memory = direct.min(received.bytes as u64);
        if let Expect::Data { at, left, .. } = &mut self.expect {
            (*at, *left) = (*at + to_memory, *left - to_memory);
        }
        self.end += received.bytes - to_memory as usize;
        Ok(Some(received))
    }

    /// What [`digest`](Self::digest) has done, as so many bytes, beside those that were received.
    pub(super) const fn work(&self) -> u64 {
        self.work
    }

    /// Whether [`digest`](Self::digest) has done as much as a turn has time for, and is to go on before more is received.
    pub(super) const fn is_full(&self) -> bool {
        self.work >= MOST_WORK
    }

    /// Takes apart what was received. `answered` is told of each command whose reply is complete.
    ///
    /// # Errors
    /// The server breaks the protocol.
    pub(super) fn digest(
        &mut self,
        commands: &mut Commands,
        export: &Export,
        mut answered: impl FnMut(&mut Commands, u32),
    ) -> Result<(), Lie> {
        // What it was received into is a list that was made for it.
        self.work = pieces_work(&self.pieces);
        while !self.is_full() {
            let (place, is_last) = match &mut self.expect {
                Expect::Header => match self.header(commands, export)? {
                    Some(Some(ended)) => (ended, true),
                    Some(None) => continue,
                    None => return Ok(()),
                },
                Expect::Data { place, at, left, is_last } => {
                    let take = (self.end - self.start).min(usize::try_from(*left).unwrap_or(usize::MAX));
                    if let Some(command) = commands.get(*place) {
                        let bytes = &self.buffer[self.start..self.start + take];
                        memory::scatter(&command.job.request.buffers, *at, bytes);
                        self.work += pieces_work(&command.job.request.buffers);
                    }
                    (self.start, *at, *left) = (self.start + take, *at + take as u64, *left - take as u64);
                    if *left > 0 {
                        return Ok(());
                    }
                    (*place, *is_last)
                }
                Expect::Skip { place, left, is_last } => {
                    let take = (self.end - self.start).min(usize::try_from(*left).unwrap_or(usize::MAX));
                    (self.start, *left) = (self.start + take, *left - take as u64);
                    if *left > 0 {
                        return Ok(());
                    }
                    (*place, *is_last)
                }
            };
            self.expect = Expect::Header;
            if is_last {
                if let Some(command) = commands.get(place)
                    && command.is_read()
                    && command.error.is_none()
                    && command.got != command.part
                {
                    return Err(Lie::Short { wanted: command.part, got: command.got });
                }
                answered(commands, place);
            }
        }
        Ok(())
    }

    /// Reads a header, and what is of a known length behind it; none if not all of that is there. Says whose reply is
    /// complete with it, if one is.
    fn header(&mut self, commands: &mut Commands, export: &Export) -> Result<Option<Option<u32>>, Lie> {
        let bytes = &self.buffer[self.start..self.end];
        let Some((reply, len)) = Reply::read(export.headers, bytes)? else { return Ok(None) };
        self.work += HEADER_WORK;
        let mut rest = &bytes[len..];
        let taken = |rest: &[u8]| bytes.len() - rest.len();
        let (kind, cookie, length, is_last, offset) = match reply {
            Reply::Simple { error, cookie } => {
                let (place, command) = commands.of_cookie(cookie).ok_or(Lie::Cookie(cookie))?;
                self.start += len;
                if error != 0 {
                    command.error = Some(errno(error));
                } else if command.is_read() {
                    // Where replies have chunks, data comes in those ("Simple reply message").
                    if export.headers != crate::protocol::Headers::Simple {
                        return Err(Lie::Short { wanted: command.part, got: 0 });
                    }
                    command.got = command.part;
                    self.expect = Expect::Data { place, at: command.done, left: command.part, is_last: true };
                    return Ok(Some(None));
                }
                return Ok(Some(Some(place)));
            }
            Reply::Chunk { flags, kind, cookie, offset, length } => {
                (kind, cookie, length, flags & chunk::FLAG_DONE != 0, offset)
            }
        };
        let (place, command) = commands.of_cookie(cookie).ok_or(Lie::Cookie(cookie))?;
        if offset.is_some_and(|offset| offset != command.part_offset()) {
            return Err(Lie::Cookie(cookie));
        }
        let name = if command.is_read() { "read" } else { "request that is no read" };
        let wrong = || Lie::Chunk(name, kind, length);
        let left = match kind {
            chunk::NONE if length == 0 && is_last => 0,
            chunk::OFFSET_DATA if command.is_read() && length > 8 => {
                let Some(offset) = take_u64(&mut rest) else { return Ok(None) };
                let at = within(command, offset, length - 8)?;
                self.expect = Expect::Data { place, at, left: length - 8, is_last };
                self.start += taken(rest);
                return Ok(Some(None));
            }
            chunk::OFFSET_HOLE if command.is_read() && length == 12 => {
                let Some((offset, len)) = take_u64(&mut rest).zip(take_u32(&mut rest)) else { return Ok(None) };
                if len == 0 {
                    return Err(wrong());
                }
                let at = within(command, offset, len.into())?;
                memory::zero(&command.job.request.buffers, at, len.into());
                self.work += u64::from(len) + pieces_work(&command.job.request.buffers);
                0
            }
            // Whatever else it says: the message, and where ("Structured reply types").
            _ if kind & chunk::IS_ERROR != 0 && (6..=LONGEST_ERROR).contains(&length) => {
                let Some(error) = take_u32(&mut rest) else { return Ok(None) };
                if error == 0 {
                    return Err(Lie::NoError);
                }
                command.error = command.error.or(Some(errno(error)));
                length - 4
            }
            _ => return Err(wrong()),
        };
        self.start += taken(rest);
        if left > 0 {
            self.expect = Expect::Skip { place, left, is_last };
            return Ok(Some(None));
        }
        Ok(Some(is_last.then_some(place)))
    }
}

const fn pieces_work(pieces: &[IoVec]) -> u64 {
    pieces.len() as u64 * PIECE_WORK
}

/// Where in a request's memory a part of the disk belongs, which must be of what was asked for. It counts as having come.
fn within(command: &mut Command, offset: u64, len: u64) -> Result<u64, Lie> {
    let (begin, wanted) = (command.part_offset(), command.part);
    let at = match offset.checked_sub(begin) {
        Some(at) if at.checked_add(len).is_some_and(|end| end <= wanted) => at,
        _ => return Err(Lie::Outside { offset, len, begin, wanted }),
    };
    command.got += len;
    // What comes twice is not all of it, and might come for ever.
    if command.got > wanted { Err(Lie::Outside { offset, len, begin, wanted }) } else { Ok(command.done + at) }
}
