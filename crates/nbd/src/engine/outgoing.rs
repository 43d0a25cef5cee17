//! What is to be sent: all that a turn has pushed in one system call, as far as the socket takes it.

#![allow(unsafe_code)]

use std::collections::VecDeque;

use egret_vring::memory::IoVec;
use rustix::io::Errno;

use super::commands::{Commands, Payload, ZEROES};
use crate::channel::{Channel, ChannelError};
use crate::memory;
use crate::socket::MOST_PIECES;

/// Zeroes for a server that cannot write them by itself; each of them is sent several times.
static SOME_ZEROES: [u8; ZEROES as usize / 16] = [0; ZEROES as usize / 16];

/// Messages that are to be sent, in order.
#[derive(Default)]
pub(super) struct Outgoing {
    queue: VecDeque<u32>,
    /// Bytes of the first that were sent.
    sent: u64,
    /// How many are sent one by one, so that it is seen whose memory is not there any more.
    alone: usize,
    pieces: Vec<IoVec>,
}

impl Outgoing {
    pub(super) fn push(&mut self, place: u32) {
        self.queue.push_back(place);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Leaves all but what is begun, which has to be ended.
    pub(super) fn keep_begun(&mut self) {
        self.queue.truncate(usize::from(self.sent > 0));
        self.alone = self.alone.min(self.queue.len());
    }

    /// Sends once, of the data no more than `most` bytes; returns how many bytes that was.
    ///
    /// # Errors
    /// `EAGAIN` where the socket takes no more, `EFAULT` where memory is not there any more, which is for
    /// [`give_up`](Self::give_up), or what has ended the connection.
    pub(super) fn send(
        &mut self,
        channel: &mut Channel,
        commands: &mut Commands,
        most: u64,
    ) -> Result<u64, ChannelError> {
        self.pieces.clear();
        let (mut skip, mut room) = (self.sent, most);
        for place in self.queue.iter().take(if self.alone > 0 { 1 } else { usize::MAX }) {
            if self.pieces.len() >= MOST_PIECES {
                break;
            }
            let Some(command) = commands.get(*place) else { continue };
            let header = command.header();
            memory::append_bytes(header.get(skip as usize..).unwrap_or_default(), &mut self.pieces);
            let skipped = skip.saturating_sub(header.len() as u64);
            let data = command.message_len() - header.len() as u64 - skipped;
            let len = data.min(room);
            match command.payload {
                Payload::Nothing => {}
                Payload::Data => {
                    memory::append(&command.job.request.buffers, command.done + skipped, len, &mut self.pieces);
                }
                Payload::Zeroes => {
                    let mut left = len as usize;
                    while left > 0 {
                        let some = &SOME_ZEROES[..left.min(SOME_ZEROES.len())];
                        memory::append_bytes(some, &mut self.pieces);
                        left -= some.len();
                    }
                }
            }
            if len < data {
                break;
            }
            (skip, room) = (0, room - len);
        }
        self.pieces.truncate(MOST_PIECES);
        // SAFETY: the pieces are of headers, which are the commands' own, of their memory, which is lent to them, and of
        // zeroes; all of it stays where it is during this call.
        let sent = unsafe { channel.send_lent(&self.pieces) }? as u64;
        self.sent += sent;
        while let Some(place) = self.queue.front()
            && let len = commands.get(*place).map_or(0, |command| command.message_len())
            && self.sent >= len
        {
            self.sent -= len;
            commands.sent(*place);
            self.queue.pop_front();
            self.alone = self.alone.saturating_sub(1);
        }
        Ok(sent)
    }

    /// A guest has taken away memory that was to be sent, which is to cost its own request and nobody else's. Returns the
    /// command that has failed and is not sent, if it is known by now which, and nothing of it was sent.
    #[cold]
    pub(super) fn give_up(&mut self, commands: &mut Commands) -> Option<u32> {
        if self.alone == 0 {
            self.alone = self.queue.len();
            return None;
        }
        if self.sent == 0 {
            self.alone -= 1;
            return self.queue.pop_front();
        }
        // A message that is begun has to be ended: by what there always is.
        let command = self.queue.front().and_then(|place| commands.get_mut(*place))?;
        (command.payload, command.error) = (Payload::Zeroes, Some(Errno::FAULT));
        None
    }
}
