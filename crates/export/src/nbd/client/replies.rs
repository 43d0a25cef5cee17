//! What a client is told: replies, as its requests come to their ends, and their way out.

use std::io::IoSlice;

use egret_disk::Extent;
use egret_event_loop::Nanos;
use egret_nbd::ChannelError;
use egret_nbd::protocol::{Headers, Request};
use egret_vring::memory::Buffers;
use rustix::io::Errno;

use super::{
    ALLOCATION_DEPTH, ANSWER, BASE_ALLOCATION, CALL_WORK, Client, Command, Contexts, Current, Data, Piece, TURN_BYTES,
    describe,
};
use crate::nbd::kind::Kind;
use crate::nbd::lane::{Core, Part};
use crate::nbd::reply::{Head, ReplyTo};

/// Pieces that one system call sends.
const PIECES: usize = 32;
/// `NBD_STATE_HOLE` and `NBD_STATE_ZERO`.
const HOLE: u32 = 3;

impl Client {
    /// A part has come back.
    ///
    /// # Errors
    ///
    /// The client cannot be told, so that it is to be hung up on.
    pub(in crate::nbd) fn complete(
        &mut self,
        core: &mut Core,
        part: Part,
        result: Result<(), Errno>,
        buffers: Buffers,
        now: Nanos,
    ) -> Result<(), Option<String>> {
        self.in_flight -= 1;
        let data = buffers.bytes().len();
        let Some(command) = self.commands.get_mut(part.command) else {
            core.pool.give_back(buffers);
            return Ok(());
        };
        command.parts -= 1;
        command.failed = command.failed.or(result.err());
        if self.channel.is_none() {
            // Nobody is told, and no more of it is done.
            command.count_if_over(core, now);
            core.pool.give_back(buffers);
            return Ok(());
        }
        let (to, is_last) = (command.to, command.has_ended());
        if command.kind != Kind::Read {
            self.memory -= data;
            core.pool.give_back(buffers);
            return self.end_if_done(core, part.command, now);
        }
        let is_first = part.offset == to.offset;
        let head = match (to.headers, result) {
            (Headers::Simple, Ok(())) => is_first.then(|| to.done()),
            (Headers::Simple, Err(why)) if is_first => {
                // Its other parts are not asked for.
                if !std::mem::replace(&mut command.is_cut, true) {
                    self.current = Current::Header;
                }
                Some(to.failed(why))
            }
            (Headers::Simple, Err(why)) => {
                let why = std::io::Error::from(why);
                return Err(Some(format!("a read failed of which it has a part already: {why}")));
            }
            (_, Ok(())) => Some(to.data(is_last, part.offset, data)),
            (_, Err(why)) => Some(to.failed_at(is_last, why, part.offset)),
        };
        if result.is_ok() {
            let may_be_hole = to.headers != Headers::Simple;
            let if_zero = may_be_hole.then(|| to.hole(is_last, part.offset, part.len));
            self.output.push_back(Piece { head, data: Data::Pages(buffers), if_zero });
        } else {
            self.memory -= data;
            core.pool.give_back(buffers);
            self.output.push_back(Piece { head, data: Data::None, if_zero: None });
        }
        self.end_if_done(core, part.command, now)
    }

    /// Answers a command that has come to its end, but for a read, which has been.
    fn end_if_done(&mut self, core: &mut Core, index: u32, now: Nanos) -> Result<(), Option<String>> {
        let Some(command) = self.commands.get_mut(index).filter(|command| command.has_ended()) else { return Ok(()) };
        if command.kind == (Kind::Trim { fua: true }) && command.failed.is_none() {
            // A discard knows no FUA.
            command.kind = Kind::Trim { fua: false };
            command.parts = 1;
            self.in_flight += 1;
            core.flush_later(self.id, index);
            return Ok(());
        }
        let Some(Command { to, kind, len, failed, begun, .. }) = self.commands.remove(index) else { return Ok(()) };
        core.counters.count_op(kind.request_type(), len, failed.is_none(), now - begun);
        core.count_requests(-1);
        if kind != Kind::Read {
            self.tell(failed.map_or_else(|| to.done(), |why| to.failed(why)), Data::None);
        }
        Ok(())
    }

    pub(super) fn tell(&mut self, head: Head, data: Data) {
        self.output.push_back(Piece { head: Some(head), data, if_zero: None });
    }

    /// Asks what is allocated, which the export's thread finds out.
    pub(super) fn ask_extents(&mut self, core: &mut Core, request: &Request, to: ReplyTo, one: bool, now: Nanos) {
        let len = request.length;
        let kind = Kind::Status { one };
        let new = Command { to, kind, len, cut: len, parts: 1, is_cut: true, failed: None, begun: now };
        let command = self.commands.insert(new);
        core.count_requests(1);
        self.answers += ANSWER;
        if !self.contexts.allocation {
            return self.tell_extents(core, command, &[Extent { len, is_hole: false }]);
        }
        core.ask_extents(self.id, command, request.offset, len, one);
    }

    /// Tells what is allocated.
    pub(in crate::nbd) fn tell_extents(&mut self, core: &mut Core, index: u32, extents: &[Extent]) {
        if self.channel.is_none() {
            return;
        }
        let Some(Command { to, len, .. }) = self.commands.remove(index) else { return };
        core.count_requests(-1);
        self.answers -= ANSWER;
        let Contexts { allocation, depth } = self.contexts;
        if allocation {
            let flags = |hole: bool| if hole { HOLE } else { 0 };
            let extents: Vec<_> = extents.iter().map(|extent| (extent.len, flags(extent.is_hole))).collect();
            let (head, bytes) = to.status(!depth, BASE_ALLOCATION, &extents);
            self.answer(head, bytes);
        }
        if depth {
            // There is one image, and no other below it.
            let (head, bytes) = to.status(true, ALLOCATION_DEPTH, &[(len, 1)]);
            self.answer(head, bytes);
        }
    }

    fn answer(&mut self, head: Head, bytes: Vec<u8>) {
        self.answers += bytes.len();
        self.tell(head, Data::Bytes(bytes));
    }

    /// Sends what there is to send, of which `left` bytes fit into the turn. Says whether it goes on with what it was held up
    /// with.
    ///
    /// # Errors
    ///
    /// The client takes nothing more.
    pub(in crate::nbd) fn send(&mut self, core: &mut Core, left: &mut usize) -> Result<bool, Option<String>> {
        let mut has_sent = false;
        while self.has_output() && *left > 0 {
            let mut slices = [IoSlice::new(&[]); 2 * PIECES];
            let mut count = 0;
            let mut skip = self.sent;
            let mut room = (*left).min(TURN_BYTES as usize);
            let (pieces, looked_at) = self.look_for_zeroes(core, room);
            *left = left.saturating_sub(looked_at + CALL_WORK as usize);
            for piece in self.output.iter().take(pieces) {
                for bytes in [piece.head(), piece.data.bytes()] {
                    let begun = skip.min(bytes.len());
                    skip -= begun;
                    let some = &bytes[begun..][..room.min(bytes.len() - begun)];
                    if !some.is_empty() {
                        slices[count] = IoSlice::new(some);
                        (count, room) = (count + 1, room - some.len());
                    }
                }
            }
            let Some(channel) = &mut self.channel else { return Ok(false) };
            match channel.send(&slices[..count]) {
                Ok(sent) => {
                    *left = left.saturating_sub(sent);
                    has_sent = true;
                    self.sent += sent;
                }
                Err(ChannelError::System(Errno::AGAIN)) => self.is_writable = false,
                Err(ChannelError::System(Errno::INTR)) => {}
                // It may have left without a word, as it may.
                Err(ChannelError::System(Errno::PIPE | Errno::CONNRESET)) => return Err(None),
                Err(e) => return Err(Some(format!("cannot send: {}", describe(e)))),
            }
            self.forget_sent(core);
        }
        Ok(has_sent && std::mem::take(&mut self.is_held_up))
    }

    /// Looks at the first pieces, of `room` bytes together, for data that need not be sent. Says how many pieces that are,
    /// and at how many bytes of them it has looked.
    fn look_for_zeroes(&mut self, core: &mut Core, room: usize) -> (usize, usize) {
        let (mut pieces, mut bytes, mut looked_at) = (0, 0, 0);
        for piece in self.output.iter_mut().take(PIECES) {
            if let Some(hole) = piece.if_zero.take() {
                let (data, zeroes) = (piece.data.bytes().len(), leading_zeroes(piece.data.bytes()));
                looked_at += zeroes;
                if zeroes == data
                    && let Data::Pages(buffers) = std::mem::replace(&mut piece.data, Data::None)
                {
                    piece.head = Some(hole);
                    self.memory -= data;
                    core.pool.give_back(buffers);
                }
            }
            (pieces, bytes) = (pieces + 1, bytes + piece.len());
            if bytes + looked_at >= room {
                break;
            }
        }
        (pieces, looked_at)
    }

    fn forget_sent(&mut self, core: &mut Core) {
        while let Some(first) = self.output.front()
            && first.len() <= self.sent
        {
            self.sent -= first.len();
            match self.output.pop_front().map(|piece| piece.data) {
                Some(Data::Pages(buffers)) => {
                    self.memory -= buffers.bytes().len();
                    core.pool.give_back(buffers);
                }
                Some(Data::Bytes(bytes)) => self.answers -= bytes.len(),
                Some(Data::None) | None => {}
            }
        }
    }
}

/// How many zeroes there are before what is none, but for less than a page. To look for them costs less than to send them.
fn leading_zeroes(bytes: &[u8]) -> usize {
    static ZEROES: [u8; 4096] = [0; 4096];
    let zeroes = bytes.chunks(ZEROES.len()).take_while(|chunk| **chunk == ZEROES[..chunk.len()]);
    zeroes.map(<[u8]>::len).sum()
}
