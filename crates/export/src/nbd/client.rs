//! A client of an export, once it has chosen it: its requests in, replies out.
//!
//! ```text
//!   socket ─▶ input ─▶ header ─▶ a command ─▶ its parts, of a mebibyte at most ─▶ engines
//!   socket ◀─ output ◀───────────── replies, or chunks of them ◀───────────────────┘
//! ```
//!
//! A client's data takes so much memory and no more, from the moment that it is read until it is sent: one that asks for
//! more, or does not take its replies, is read from no further. A lane never waits for it.
//!
//! What a client has done in a turn is counted in bytes: those that are copied, those that there is to be memory for, and
//! so many for what costs time whatever its length. A few bytes can ask for much.

mod replies;

use std::collections::VecDeque;
use std::io::IoSliceMut;
use std::os::fd::OwnedFd;

use egret_disk::{EngineSet, Op, PartOf, Slab};
use egret_event_loop::{Nanos, clock};
use egret_nbd::protocol::{DEFAULT_PAYLOAD, Headers, Request, command, command_flag};
use egret_nbd::{Channel, ChannelError, Received};
use egret_vring::memory::Buffers;
use rustix::event::epoll::{EventData, EventFlags, modify};
use rustix::io::Errno;

use super::extents;
use super::kind::Kind;
use super::lane::{ClientId, Core};
use super::reply::{Head, ReplyTo};
use super::server::Place;

/// Bytes that are received at a time, beside a write's data.
const INPUT: usize = 16 << 10;
/// Data that an engine is given at a time.
pub(super) const PART: u64 = 1 << 20;
/// Data of one client's that takes memory.
const WINDOW: usize = 4 << 20;
/// Data of all clients of a lane's that takes memory, but for a part of each: who has none in memory may have that.
const LANE_WINDOW: usize = 16 << 20;
/// What an answer about what is allocated takes, at most.
const ANSWER: usize = 16 * extents::MOST;
/// Answers of one client's about that which are not sent, or not known yet.
const ANSWERS: usize = 8 * ANSWER;
/// Requests of one client's that are not answered, and replies that are not sent, are no more than this.
const MOST_REQUESTS: usize = 256;
/// What is done for one client in a turn of its lane's, in bytes, or sent to it.
const TURN_BYTES: u64 = 256 << 10;
/// What a request counts as beside its bytes, and each of its parts.
const REQUEST_WORK: u64 = 512;
/// What a system call counts as.
const CALL_WORK: u64 = 4 << 10;

/// Numbers of contexts of metadata.
pub(super) const BASE_ALLOCATION: u32 = 1;
pub(super) const ALLOCATION_DEPTH: u32 = 2;

/// The contexts of metadata that a client has chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Contexts {
    pub(super) allocation: bool,
    pub(super) depth: bool,
}

/// A client whose handshake is over.
pub(super) struct NewClient {
    pub(super) channel: Channel,
    pub(super) headers: Headers,
    pub(super) contexts: Contexts,
    /// What it has sent already of its first requests; no more than [`INPUT`].
    pub(super) input: Vec<u8>,
    /// What it was told last and has not been sent yet.
    pub(super) output: Vec<u8>,
    pub(super) place: Place,
}

/// What a lane hears of a client's socket. Of room only where the client waits for it: a UNIX socket tells of that whenever
/// its other end has read, so that each reply would wake the I/O thread once more.
pub(super) const INTEREST: EventFlags = EventFlags::IN.union(EventFlags::RDHUP).union(EventFlags::ET);

/// How a client's run ended.
pub(super) enum Ran {
    /// There is more to do, in another turn.
    More,
    /// It waits for its socket, or for what it has asked for before.
    Waits,
    /// It is to be hung up on, for this reason if not by its own wish.
    Ends(Option<String>),
}

/// One step of a run.
enum Step {
    Done,
    /// More input is needed.
    Starved,
    /// There is too much of it already.
    HeldUp,
}

type Stepped = Result<Step, Option<String>>;

/// What is done with what comes in.
enum Current {
    /// A request's header is awaited.
    Header,
    /// Parts of a command are to be given to the engines.
    Cut(u32),
    /// The data of a part of a write is being received.
    Receive { command: u32, buffers: Buffers, filled: usize },
    /// The data of a write that was refused is passed over.
    Skip(u64),
}

/// A request that is not answered yet.
struct Command {
    to: ReplyTo,
    kind: Kind,
    len: u64,
    /// How much of it was given to the engines.
    cut: u64,
    /// Parts that have not come back; for a question, its answer.
    parts: u32,
    /// Whether there is more to give.
    is_cut: bool,
    failed: Option<Errno>,
    begun: Nanos,
}

impl Command {
    const fn has_ended(&self) -> bool {
        self.is_cut && self.parts == 0
    }

    /// What of it begins there on the disk.
    const fn part_at(&self, offset: u64) -> PartOf {
        PartOf { whole: self.len, is_first: offset == self.to.offset }
    }

    /// Counts what was done of it for a client that is gone, when no more of it is to come back.
    fn count_if_over(&self, core: &Core, now: Nanos) {
        if self.parts == 0 {
            core.counters.count_op(self.kind.request_type(), self.cut, self.failed.is_none(), now - self.begun);
        }
    }

    /// A read whose data comes in one go, in its order, and with nothing in between.
    fn is_in_order(&self) -> bool {
        self.to.headers == Headers::Simple && self.kind == Kind::Read && self.len > PART
    }
}

/// Something to be sent.
struct Piece {
    head: Option<Head>,
    data: Data,
    /// What is sent instead where the data is nothing but zeroes, until that was looked at.
    if_zero: Option<Head>,
}

enum Data {
    None,
    Pages(Buffers),
    Bytes(Vec<u8>),
}

impl Data {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::Pages(buffers) => buffers.bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl Piece {
    fn head(&self) -> &[u8] {
        self.head.as_ref().map_or(&[], Head::bytes)
    }

    fn len(&self) -> usize {
        self.head().len() + self.data.bytes().len()
    }
}

/// See the module's description.
pub(super) struct Client {
    pub(super) id: ClientId,
    /// It is on its lane's list of those that have something to do.
    pub(super) is_runnable: bool,
    /// Likewise of those that have something to send.
    pub(super) is_sender: bool,
    /// It has something to do when something of it has ended.
    pub(super) is_held_up: bool,
    /// What was done for it, in bytes.
    pub(super) work: u64,
    /// There until it is hung up on.
    channel: Option<Channel>,
    _place: Place,
    headers: Headers,
    contexts: Contexts,
    input: Box<[u8]>,
    start: usize,
    end: usize,
    /// The socket may have more to read.
    is_readable: bool,
    is_writable: bool,
    /// Its lane is told when its socket has room.
    asks_for_room: bool,
    /// Its other end sends nothing more: what it has sent is to be read to its end.
    has_hung_up: bool,
    /// It wants to leave when everything is answered.
    leaves: bool,
    current: Current,
    commands: Slab<Command>,
    /// Parts that engines have, and flushes that they are to have.
    in_flight: u32,
    output: VecDeque<Piece>,
    /// How much of the first piece was sent.
    sent: usize,
    /// Memory that its data takes.
    pub(super) memory: usize,
    /// Memory that answers take which are no data, with what those may take that are not known yet.
    pub(super) answers: usize,
}

impl Client {
    pub(super) fn new(id: ClientId, new: NewClient) -> Self {
        let NewClient { channel, headers, contexts, input: first, output, place } = new;
        let mut input = vec![0; INPUT.max(first.len())].into_boxed_slice();
        input[..first.len()].copy_from_slice(&first);
        let answers = output.len();
        let output = (!output.is_empty()).then_some(Piece { head: None, data: Data::Bytes(output), if_zero: None });
        Self {
            id,
            is_runnable: false,
            is_sender: false,
            is_held_up: false,
            work: 0,
            channel: Some(channel),
            _place: place,
            headers,
            contexts,
            input,
            start: 0,
            end: first.len(),
            is_readable: true,
            is_writable: true,
            asks_for_room: false,
            has_hung_up: false,
            leaves: false,
            current: Current::Header,
            commands: Slab::default(),
            in_flight: 0,
            output: output.into_iter().collect(),
            sent: 0,
            memory: 0,
            answers,
        }
    }

    /// What its socket has become; says whether it may have room for what waits.
    pub(super) fn note(&mut self, flags: EventFlags) -> bool {
        self.has_hung_up |= flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
        self.is_readable |= flags.contains(EventFlags::IN) || self.has_hung_up;
        self.is_writable |= flags.contains(EventFlags::OUT) || self.has_hung_up;
        self.has_output()
    }

    /// Has `epoll` tell of room in its socket where that is waited for, and only there.
    ///
    /// # Errors
    ///
    /// It would not be told, so that it is to be hung up on.
    pub(super) fn ask_for_room(&mut self, epoll: &OwnedFd) -> Result<(), Option<String>> {
        let waits = !self.is_writable;
        if waits == self.asks_for_room {
            return Ok(());
        }
        let Some(channel) = &self.channel else { return Ok(()) };
        self.asks_for_room = waits;
        let flags = if waits { INTEREST | EventFlags::OUT } else { INTEREST };
        let watched = modify(epoll, channel, EventData::new_u64(self.id.key()), flags);
        watched.map_err(|e| Some(format!("cannot wait for it: {e}")))
    }

    /// Whether nothing is left of it but a place.
    pub(super) fn is_gone(&self) -> bool {
        let is_done = self.leaves && self.commands.is_empty() && self.is_sent();
        (is_done || self.channel.is_none()) && self.in_flight == 0
    }

    pub(super) const fn is_connected(&self) -> bool {
        self.channel.is_some()
    }

    /// Whether all that it was told is on its way.
    fn is_sent(&self) -> bool {
        self.output.is_empty() && self.channel.as_ref().is_none_or(Channel::is_flushed)
    }

    pub(super) fn has_output(&self) -> bool {
        self.is_writable && !self.is_sent()
    }

    /// Closes its socket. What an engine has is the engine's until it comes back.
    pub(super) fn hang_up(&mut self, core: &mut Core) {
        let Some(mut channel) = self.channel.take() else { return };
        channel.say_goodbye();
        core.count_requests(-(self.commands.len() as i64));
        core.queries.forget(&core.inbox, self.id);
        self.leaves = true;
        for piece in std::mem::take(&mut self.output) {
            if let Data::Pages(buffers) = piece.data {
                core.pool.give_back(buffers);
            }
        }
        let current = match std::mem::replace(&mut self.current, Current::Header) {
            Current::Receive { command, buffers, .. } => {
                if let Some(command) = self.commands.get_mut(command) {
                    command.cut -= buffers.bytes().len() as u64;
                }
                core.pool.give_back(buffers);
                command
            }
            Current::Cut(command) => command,
            Current::Header | Current::Skip(_) => return,
        };
        if let Some(command) = self.commands.get_mut(current).filter(|command| command.cut > 0) {
            command.count_if_over(core, clock::now());
        }
    }

    /// Does what there is to do, as much as fits into a turn.
    pub(super) fn run(&mut self, core: &mut Core, engines: &mut EngineSet, now: Nanos) -> Ran {
        let until = self.work + TURN_BYTES;
        while self.work < until {
            let stepped = match self.current {
                Current::Header => self.take_header(core, now),
                Current::Cut(command) => self.cut(command, core, engines),
                Current::Receive { .. } => self.receive(core, engines),
                Current::Skip(_) => self.skip(),
            };
            match stepped.and_then(|step| if matches!(step, Step::Starved) { self.fill() } else { Ok(step) }) {
                Ok(Step::Done) => {}
                Ok(Step::Starved) => return Ran::Waits,
                Ok(Step::HeldUp) => {
                    self.is_held_up = true;
                    return Ran::Waits;
                }
                Err(why) => return Ran::Ends(why),
            }
        }
        Ran::More
    }

    fn buffered(&self) -> &[u8] {
        &self.input[self.start..self.end]
    }

    fn consume(&mut self, bytes: usize) {
        self.start += bytes;
        self.work += bytes as u64;
    }

    /// Receives more: what is missing of a write's data where that belongs, and what comes behind it.
    fn fill(&mut self) -> Stepped {
        if !self.is_readable || self.leaves {
            return Ok(Step::Starved);
        }
        self.input.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let Some(channel) = &mut self.channel else { return Ok(Step::Starved) };
        let data = match &mut self.current {
            Current::Receive { buffers, filled, .. } => &mut buffers.bytes_mut()[*filled..],
            _ => &mut [],
        };
        self.work += CALL_WORK;
        let missing = data.len();
        let room = &mut self.input[self.end..];
        let mut pieces = [IoSliceMut::new(data), IoSliceMut::new(room)];
        let pieces = if missing == 0 { &mut pieces[1..] } else { &mut pieces[..] };
        let Received { bytes: got, more } = match channel.receive(pieces) {
            Ok(received) => received,
            Err(ChannelError::System(Errno::AGAIN)) => {
                self.is_readable = false;
                return Ok(Step::Starved);
            }
            Err(ChannelError::System(Errno::INTR)) => return Ok(Step::Done),
            Err(e) => return Err(Some(format!("cannot receive: {}", describe(e)))),
        };
        if got == 0 && more {
            // Records of TLS that hold nothing take time, too.
            self.work += TURN_BYTES;
            return Ok(Step::Done);
        }
        if got == 0 {
            let is_orderly = self.buffered().is_empty() && matches!(self.current, Current::Header);
            return Err(if is_orderly { None } else { Some("it ended in the middle of a request".to_owned()) });
        }
        // What was there is read. Of anything that has come since, there is another event.
        self.is_readable = more || self.has_hung_up;
        if let Current::Receive { filled, .. } = &mut self.current {
            *filled += got.min(missing);
            self.work += got.min(missing) as u64;
        }
        self.end += got.saturating_sub(missing);
        Ok(Step::Done)
    }

    fn skip(&mut self) -> Stepped {
        let Current::Skip(left) = &mut self.current else { return Ok(Step::Done) };
        let here = (*left).min((self.end - self.start) as u64);
        *left -= here;
        if *left == 0 {
            self.current = Current::Header;
        } else if here == 0 {
            return Ok(Step::Starved);
        }
        self.consume(here as usize);
        Ok(Step::Done)
    }

    fn take_header(&mut self, core: &mut Core, now: Nanos) -> Stepped {
        if self.leaves {
            return if self.is_gone() { Err(None) } else { Ok(Step::Starved) };
        }
        if self.commands.len() + self.output.len() >= MOST_REQUESTS {
            return Ok(Step::HeldUp);
        }
        let read = Request::read(self.headers, self.buffered()).map_err(|e| Some(e.to_string()))?;
        let Some(request) = read else { return Ok(Step::Starved) };
        if request.command == command::BLOCK_STATUS && self.answers >= ANSWERS {
            return Ok(Step::HeldUp);
        }
        self.consume(self.headers.request_len());
        self.work += REQUEST_WORK;
        if request.command == command::DISCONNECT {
            self.leaves = true;
            return Ok(Step::Done);
        }
        // With extended headers a write has PAYLOAD_LEN, but for QEMU's (10.0), whose own server knows it by that.
        let says_so = self.headers == Headers::Extended && request.flags & command_flag::PAYLOAD_LEN != 0;
        let has_data = request.command == command::WRITE || says_so;
        let data = if has_data { request.length } else { 0 };
        if data > DEFAULT_PAYLOAD.into() {
            return Err(Some(format!("a request has {data} bytes of data, and {DEFAULT_PAYLOAD} are the most")));
        }
        let to = ReplyTo { headers: self.headers, cookie: request.cookie, offset: request.offset };
        match Kind::of(&request, self.headers, self.contexts, core) {
            Err(why) => {
                core.counters.count_op(Kind::request_type_of(request.command), 0, false, Nanos::ZERO);
                self.tell(to.failed(why), Data::None);
                self.current = if data > 0 { Current::Skip(data) } else { Current::Header };
            }
            Ok(Kind::Status { one }) => self.ask_extents(core, &request, to, one, now),
            Ok(kind) if request.length == 0 && kind != Kind::Flush => self.tell(to.done(), Data::None),
            Ok(kind) => {
                core.count_requests(1);
                let len = request.length;
                let new = Command { to, kind, len, cut: 0, parts: 0, is_cut: false, failed: None, begun: now };
                self.current = Current::Cut(self.commands.insert(new));
            }
        }
        Ok(Step::Done)
    }

    /// Gives the next part of a command to the engines, or has its data received first.
    fn cut(&mut self, index: u32, core: &mut Core, engines: &mut EngineSet) -> Stepped {
        let others = self.commands.len().saturating_sub(1);
        let Some(command) = self.commands.get_mut(index) else {
            // The last part of what comes in one go is back.
            self.current = Current::Header;
            return Ok(Step::Done);
        };
        if command.is_in_order() && (others > 0 || command.parts > 0) || self.in_flight >= MOST_REQUESTS as u32 {
            return Ok(Step::HeldUp);
        }
        let (offset, left) = (command.to.offset + command.cut, command.len - command.cut);
        let most = match command.kind {
            Kind::Read | Kind::Write { .. } | Kind::Cache => PART,
            Kind::Trim { .. } => core.disk.max_discard_bytes(),
            Kind::WriteZeroes { .. } => core.disk.max_write_zeroes_bytes(),
            Kind::Flush | Kind::Status { .. } => 0,
        };
        // Where nothing can be discarded a discard succeeds at once.
        let len = if most == 0 { left } else { left.min(most) };
        let data = if matches!(command.kind, Kind::Read | Kind::Write { .. } | Kind::Cache) { len as usize } else { 0 };
        if data > 0 {
            let is_full = self.memory + data > WINDOW || core.pool.taken() + data > LANE_WINDOW;
            if self.memory > 0 && is_full {
                return Ok(Step::HeldUp);
            }
            self.memory += data;
        }
        self.work += REQUEST_WORK + data as u64;
        command.cut += len;
        let op = match command.kind {
            Kind::Write { .. } => {
                let buffers = core.pool.take(data);
                self.current = Current::Receive { command: index, buffers, filled: 0 };
                // What of it is here already is followed by nothing, or by another request.
                let Current::Receive { buffers, filled, .. } = &mut self.current else { return Ok(Step::Done) };
                let here = data.min(self.end - self.start);
                buffers.bytes_mut()[..here].copy_from_slice(&self.input[self.start..self.start + here]);
                *filled = here;
                self.consume(here);
                return Ok(Step::Done);
            }
            Kind::Read | Kind::Cache => Op::Read,
            Kind::Flush | Kind::Status { .. } => Op::Flush,
            Kind::Trim { .. } => Op::Discard,
            Kind::WriteZeroes { unmap, fua } => Op::WriteZeroes { unmap, fua },
        };
        command.parts += 1;
        command.is_cut = command.cut == command.len;
        // What would be begun now may have its reply before the last part of one that comes in one go.
        if command.is_cut && !command.is_in_order() {
            self.current = Current::Header;
        }
        self.in_flight += 1;
        let buffers = if data > 0 { core.pool.take(data) } else { Buffers::default() };
        let part = match command.kind {
            // It has no data, and so no length that is the most.
            Kind::Cache => {
                let (most, begun) = (u64::from(DEFAULT_PAYLOAD), offset - command.to.offset);
                let whole = (command.len - begun / most * most).min(most);
                PartOf { whole, is_first: begun.is_multiple_of(most) }
            }
            _ => command.part_at(offset),
        };
        core.push(engines, (self.id, index), op, offset..offset + len, buffers, part);
        Ok(Step::Done)
    }

    /// Gives the engines a part of a write, once its data is here.
    fn receive(&mut self, core: &mut Core, engines: &mut EngineSet) -> Stepped {
        let Current::Receive { command: index, buffers, filled } = &mut self.current else { return Ok(Step::Done) };
        if *filled < buffers.bytes().len() {
            return Ok(Step::Starved);
        }
        let (index, buffers) = (*index, std::mem::take(buffers));
        self.current = Current::Header;
        let Some(command) = self.commands.get_mut(index) else { return Ok(Step::Done) };
        let len = buffers.bytes().len() as u64;
        let offset = command.to.offset + command.cut - len;
        let Kind::Write { fua } = command.kind else { return Ok(Step::Done) };
        command.parts += 1;
        command.is_cut = command.cut == command.len;
        if !command.is_cut {
            self.current = Current::Cut(index);
        }
        self.in_flight += 1;
        let part = command.part_at(offset);
        core.push(engines, (self.id, index), Op::Write { fua }, offset..offset + len, buffers, part);
        Ok(Step::Done)
    }
}

/// What is wrong with a connection.
pub(super) fn describe(error: ChannelError) -> String {
    match error {
        ChannelError::System(e) => std::io::Error::from(e).to_string(),
        ChannelError::Tls(_) | ChannelError::Truncated => error.to_string(),
    }
}
