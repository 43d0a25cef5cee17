//! What is to be sent: all that a turn has pushed in one system call, as far as the socket takes it.

use std::collections::VecDeque;

use egret_vring::memory::IoVec;

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
    pieces: Vec<IoVec>,
}

impl Outgoing {
    pub(super) fn push(&mut self, place: u32) {
        self.queue.push_back(place);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The message that is sent now.
    pub(super) fn first(&self) -> Option<u32> {
        self.queue.front().copied()
    }

    /// Sends once; returns how many bytes that was.
    ///
    /// # Errors
    /// `EAGAIN` where the socket takes no more, or what has ended the connection.
    pub(super) fn send(&mut self, channel: &mut Channel, commands: &mut Commands) -> Result<u64, ChannelError> {
        self.pieces.clear();
        let mut skip = self.sent;
        for place in &self.queue {
            if self.pieces.len() >= MOST_PIECES {
                break;
            }
            let Some(command) = commands.get(*place) else { continue };
            let header = command.header();
            memory::append_bytes(header.get(skip as usize..).unwrap_or_default(), &mut self.pieces);
            let skipped = skip.saturating_sub(header.len() as u64);
            match command.payload {
                Payload::Nothing => {}
                Payload::Data => {
                    let (at, len) = (command.done + skipped, command.part - skipped);
                    memory::append(&command.job.request.buffers, at, len, &mut self.pieces);
                }
                Payload::Zeroes => {
                    let mut left = (command.part - skipped) as usize;
                    while left > 0 {
                        let some = &SOME_ZEROES[..left.min(SOME_ZEROES.len())];
                        memory::append_bytes(some, &mut self.pieces);
                        left -= some.len();
                    }
                }
            }
            skip = 0;
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
        }
        Ok(sent)
    }
}
