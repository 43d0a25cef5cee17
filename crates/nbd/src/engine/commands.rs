//! What is in flight: jobs, and how far each has come.

#![forbid(unsafe_code)]

use egret_disk::{Job, Op, Slab};
use rustix::io::Errno;

use crate::handshake::Export;
use crate::protocol::{Headers, Request, command, command_flag, export_flag};

/// Bytes of what has no payload that are asked for at a time, where lengths have 32 bits.
const LONGEST_EFFECT: u64 = 1 << 30;
/// Bytes of data that are asked for at a time, or sent: what zeroes of it cost the loop is little.
const LONGEST_PAYLOAD: u32 = 2 << 20;
/// Bytes of zeroes that are sent at a time to a server that cannot write zeroes by itself.
pub(super) const ZEROES: u64 = 1 << 20;
/// A reply with more bytes is not worth being copied.
const LARGE: u64 = 16 << 10;

/// A job, and how far it has come.
pub(super) struct Command {
    pub(super) job: Box<Job>,
    /// Jobs are sent again in this order.
    order: u64,
    /// Bytes that are done, in parts that were answered before.
    pub(super) done: u64,
    /// Bytes of the part that is asked for now.
    pub(super) part: u64,
    /// Of those, bytes that have come.
    pub(super) got: u64,
    /// What the server says went wrong.
    pub(super) error: Option<Errno>,
    /// Whether all of it was sent.
    pub(super) is_sent: bool,
    /// Whether all parts are done, and it is being made stable.
    is_flushing: bool,
    pub(super) cookie: u64,
    header: [u8; 32],
    header_len: u8,
    pub(super) payload: Payload,
}

/// What follows a request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Payload {
    Nothing,
    /// The part's bytes.
    Data,
    /// As many zeroes.
    Zeroes,
}

/// What becomes of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It is to be sent.
    Send,
    /// It is over.
    Over,
}

impl Command {
    pub(super) fn header(&self) -> &[u8] {
        &self.header[..self.header_len.into()]
    }

    /// Bytes to be sent.
    pub(super) fn message_len(&self) -> u64 {
        let payload = if self.payload == Payload::Nothing { 0 } else { self.part };
        u64::from(self.header_len) + payload
    }

    pub(super) fn is_read(&self) -> bool {
        self.job.request.op == Op::Read
    }

    /// Where on the disk the part begins that is asked for now.
    pub(super) fn part_offset(&self) -> u64 {
        if self.is_flushing { 0 } else { self.job.request.offset + self.done }
    }

    pub(super) fn is_large_read(&self) -> bool {
        self.is_read() && self.part > LARGE
    }

    /// Makes the header of what is to be sent next, for a server that can do what `export` says.
    fn prepare(&mut self, export: &Export, cookie: u64) -> Next {
        let request = &self.job.request;
        let left = request.len - self.done;
        // Rounded down, so that parts begin where blocks do.
        let payload = u64::from(export.blocks.maximum.min(LONGEST_PAYLOAD));
        let payload = payload - payload % u64::from(export.blocks.minimum.max(512)).min(payload);
        let effect = if export.headers == Headers::Extended { u64::MAX } else { LONGEST_EFFECT };
        let stable = |fua| if fua && export.has(export_flag::SEND_FUA) { command_flag::FUA } else { 0 };
        let (command, flags, most, carries) = match request.op {
            Op::Flush => (command::FLUSH, 0, 0, Payload::Nothing),
            _ if self.is_flushing => (command::FLUSH, 0, 0, Payload::Nothing),
            Op::Read => (command::READ, 0, payload, Payload::Nothing),
            Op::Write { fua } => (command::WRITE, stable(fua), payload, Payload::Data),
            Op::Discard => (command::TRIM, 0, effect, Payload::Nothing),
            Op::WriteZeroes { unmap, fua } if export.has(export_flag::SEND_WRITE_ZEROES) => {
                let takes_storage = if unmap { 0 } else { command_flag::NO_HOLE };
                (command::WRITE_ZEROES, stable(fua) | takes_storage, effect, Payload::Nothing)
            }
            Op::WriteZeroes { fua, .. } => (command::WRITE, stable(fua), payload.min(ZEROES), Payload::Zeroes),
        };
        let is_known = match command {
            command::FLUSH => export.has(export_flag::SEND_FLUSH),
            command::TRIM => export.has(export_flag::SEND_TRIM),
            _ => true,
        };
        if !is_known {
            // Who cannot flush has nothing to flush, and a discard is a hint.
            return Next::Over;
        }
        self.part = left.min(most);
        (self.got, self.error, self.is_sent) = (0, None, false);
        (self.cookie, self.payload) = (cookie, carries);
        let header = Request { flags, command, cookie, offset: self.part_offset(), length: self.part };
        self.header_len = header.write(export.headers, &mut self.header) as u8;
        Next::Send
    }

    /// A part was answered: what comes next.
    fn advance(&mut self, export: &Export, cookie: u64) -> Next {
        if self.error.is_some() || self.is_flushing {
            return Next::Over;
        }
        self.done += self.part;
        if self.done < self.job.request.len {
            return self.prepare(export, cookie);
        }
        if self.wants_flush(export) {
            self.is_flushing = true;
            return self.prepare(export, cookie);
        }
        Next::Over
    }

    /// Whether it is to be stable, and the server cannot write it so.
    fn wants_flush(&self, export: &Export) -> bool {
        let fua = matches!(self.job.request.op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. });
        fua && !export.has(export_flag::SEND_FUA)
    }

    /// The connection is gone. A write is done again from its beginning, since the next server may not have what this one has
    /// answered: nobody was told of it, and the flush that comes after all of it is to cover all of it.
    fn rewind(&mut self) {
        // A reply over the next, before it is sent there, is a lie.
        self.is_sent = false;
        if matches!(self.job.request.op, Op::Write { .. } | Op::WriteZeroes { .. }) {
            (self.done, self.is_flushing) = (0, false);
        }
    }
}

/// All commands, under small numbers.
#[derive(Default)]
pub(super) struct Commands {
    places: Slab<Command>,
    /// How many there have been, and how many messages.
    order: u64,
    cookies: u32,
    /// How many were sent and not answered.
    awaited: u32,
    /// Of those, reads that are large.
    large: u32,
}

impl Commands {
    pub(super) fn insert(&mut self, job: Box<Job>) -> u32 {
        self.order += 1;
        self.places.insert(Command {
            job,
            order: self.order,
            done: 0,
            part: 0,
            got: 0,
            error: None,
            is_sent: false,
            is_flushing: false,
            cookie: 0,
            header: [0; 32],
            header_len: 0,
            payload: Payload::Nothing,
        })
    }

    pub(super) fn get(&self, place: u32) -> Option<&Command> {
        self.places.get(place)
    }

    pub(super) fn get_mut(&mut self, place: u32) -> Option<&mut Command> {
        self.places.get_mut(place)
    }

    /// The command that a reply is for: one that was sent, and is not answered.
    pub(super) fn of_cookie(&mut self, cookie: u64) -> Option<(u32, &mut Command)> {
        let place = cookie as u32;
        let command = self.get_mut(place).filter(|command| command.is_sent && command.cookie == cookie)?;
        Some((place, command))
    }

    /// Makes what is to be sent first.
    pub(super) fn begin(&mut self, place: u32, export: &Export) -> Next {
        let cookie = self.cookie(place);
        self.get_mut(place).map_or(Next::Over, |command| command.prepare(export, cookie))
    }

    /// A part was answered: makes what is to be sent next.
    pub(super) fn advance(&mut self, place: u32, export: &Export) -> Next {
        let cookie = self.cookie(place);
        let Some(command) = self.places.get_mut(place) else { return Next::Over };
        // Another reply to it is a lie, also where it stays: it may wait for another connection.
        command.is_sent = false;
        self.awaited -= 1;
        self.large -= u32::from(command.is_large_read());
        command.advance(export, cookie)
    }

    /// All of a message was sent.
    pub(super) fn sent(&mut self, place: u32) {
        let Some(command) = self.places.get_mut(place) else { return };
        command.is_sent = true;
        self.awaited += 1;
        self.large += u32::from(command.is_large_read());
    }

    fn cookie(&mut self, place: u32) -> u64 {
        self.cookies = self.cookies.wrapping_add(1);
        u64::from(self.cookies) << 32 | u64::from(place)
    }

    pub(super) fn remove(&mut self, place: u32) -> Option<Command> {
        self.places.remove(place)
    }

    /// Whether a reply is to come.
    pub(super) const fn awaits_replies(&self) -> bool {
        self.awaited > 0
    }

    /// Whether data is to come that is not worth being copied.
    pub(super) const fn awaits_large_reads(&self) -> bool {
        self.large > 0
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// The connection is gone: all are to be sent again, in this order.
    pub(super) fn rewind(&mut self) -> Vec<u32> {
        (self.awaited, self.large) = (0, 0);
        let mut all: Vec<(u64, u32)> = Vec::new();
        for (place, command) in self.places.iter_mut() {
            command.rewind();
            all.push((command.order, place));
        }
        all.sort_unstable();
        all.into_iter().map(|(_, place)| place).collect()
    }

    /// Every job that is left.
    pub(super) fn into_jobs(self) -> impl Iterator<Item = Box<Job>> {
        self.places.into_values().map(|command| command.job)
    }
}
