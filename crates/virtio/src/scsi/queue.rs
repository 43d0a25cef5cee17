//! One request queue of a virtio-scsi device: chains in, SCSI commands on their way (virtio 1.3, 5.6.6.1).

use std::mem;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use egret_disk::{Completion, IoVec, Op, Request, Token};
use egret_scsi::{Command, DataOut, DiskOp, Done, Key, Memory, Sense, Status as ScsiStatus, Step, Task, absent};
use virtio_bindings::bindings::virtio_scsi::{
    VIRTIO_SCSI_S_ABORTED, VIRTIO_SCSI_S_BAD_TARGET, VIRTIO_SCSI_S_FAILURE, VIRTIO_SCSI_S_OK, VIRTIO_SCSI_S_OVERRUN,
    VIRTIO_SCSI_S_RESET,
};

use super::address::Addressed;
use super::luns::{Table, View};
use super::tasks::{Abort, Tasks};
use super::{Scsi, config};
use crate::memory::{GuestMemory, pieces};
use crate::model::{Ended, Kind, Malformed, Model, Next, Progress, Status, head_of, token_of};
use crate::ring::Chain;

/// `struct virtio_scsi_req_cmd` up to its CDB: lun, id, task_attr, prio, crn.
const FIXED: usize = 19;
/// As much of a CDB as is looked at: no command is longer, and a header has room for no less.
const CDB: usize = *config::CDB_SIZES.start() as usize;
/// The response up to its sense data: sense_len, residual, status_qualifier, status, response.
const RESPONSE: usize = 12;
const LONGEST_SENSE: usize = *config::SENSE_SIZES.end() as usize;

/// The operation code that alone needs to know all units.
const REPORT_LUNS: u8 = 0xa0;

/// A nothing that was done: for requests that no logical unit has seen.
const NOT_DONE: Done = Done { status: ScsiStatus::Good, sense: None, moved: 0 };

/// A chain, and the command that it carries.
///
/// In this order, because a READ or WRITE touches no more than its beginning and the command's.
#[derive(Default)]
#[repr(C)]
struct Slot {
    /// Where the response goes, while nothing else of the chain is needed; otherwise `writable` says it.
    response: Option<IoVec>,
    /// Bytes of data in either direction.
    data_in: u32,
    data_out: u32,
    /// What it asked of the disk.
    bytes: u64,
    /// The command's unit, as the view has it, while the command is under way.
    unit: Option<u32>,
    kind: Option<Kind>,
    command: Command,
    /// The chain's pieces, all of them.
    readable: Vec<IoVec>,
    writable: Vec<IoVec>,
}

/// Where things are in a chain.
#[derive(Clone, Copy)]
struct Layout {
    /// Length of the header, after which data-out begins.
    header: usize,
    /// Length of the response, after which data-in begins.
    response: usize,
}

/// What a header says, as far as it is looked at.
struct Header {
    lun: [u8; 8],
    tag: u64,
    cdb: [u8; CDB],
}

impl Header {
    /// Words that have all of it.
    const WORDS: usize = (FIXED + CDB).div_ceil(8);

    /// Reads the header at the beginning of `pieces`. In words, and from where it nearly always is: a copy of it would have
    /// to be waited for, because its fields are wider than what a copy stores at a time.
    #[inline(always)]
    fn read(memory: &GuestMemory, pieces: &[IoVec]) -> Option<Self> {
        let words = pieces.first().and_then(|piece| memory.words(piece));
        let [lun, tag, a, b, c] = match words {
            Some(words) => words,
            None => Self::gather(memory, pieces)?,
        };
        // The CDB begins at the fourth byte of the third word.
        let cdb = u128::from(a >> 24) | u128::from(b) << 40 | u128::from(c) << 104;
        Some(Self { lun: lun.to_le_bytes(), tag, cdb: cdb.to_le_bytes() })
    }

    #[cold]
    fn gather(memory: &GuestMemory, pieces: &[IoVec]) -> Option<[u64; Self::WORDS]> {
        let mut bytes = [0; 8 * Self::WORDS];
        let header = &mut bytes[..FIXED + CDB];
        if memory.gather(pieces, header) != header.len() {
            return None;
        }
        let (words, _) = bytes.as_chunks();
        Some(std::array::from_fn(|at| u64::from_le_bytes(words[at])))
    }
}

/// The data-out of a chain.
struct Given<'a> {
    memory: &'a GuestMemory,
    readable: &'a [IoVec],
    header: usize,
}

impl DataOut for Given<'_> {
    fn read_at(&self, at: u64, into: &mut [u8]) {
        let len = self.memory.gather_after(self.readable, self.header + at as usize, into);
        into[len..].fill(0);
    }
}

/// The model of one request queue. Its worker owns it.
pub struct ScsiQueue {
    scsi: Arc<Scsi>,
    lane: usize,
    layout: Layout,
    view: View,
    tasks: Arc<Tasks>,
    /// By head.
    slots: Box<[Slot]>,
    in_flight: usize,
    /// Buffers of completed requests, for the next ones.
    spare: Vec<Vec<IoVec>>,
    /// Where responses are made; without sense data between two of them.
    response: [u8; RESPONSE + LONGEST_SENSE],
}

impl ScsiQueue {
    pub(super) fn new(scsi: Arc<Scsi>, index: u16, tasks: Arc<Tasks>, size: u16) -> Self {
        let layout = Layout {
            header: FIXED + scsi.cdb_size.load(Ordering::Relaxed) as usize,
            response: RESPONSE + scsi.sense_size.load(Ordering::Relaxed) as usize,
        };
        Self {
            lane: index.into(),
            layout,
            view: View::new(&scsi),
            tasks,
            slots: (0..size).map(|_| Slot::default()).collect(),
            in_flight: 0,
            spare: Vec::with_capacity(size.into()),
            response: [0; RESPONSE + LONGEST_SENSE],
            scsi,
        }
    }

    /// Begins a command as a transfer, with a response in one piece, which nearly all are. `None`, and nothing has
    /// happened, if it is none.
    ///
    /// It goes from the chain to the request without a stop, and the chain keeps its buffers for the next one.
    #[inline(always)]
    fn begin_transfer(&mut self, token: Token, unit: usize, header: &Header, chain: &Chain) -> Option<Next> {
        let head = head_of(token);
        let slot = &mut self.slots[usize::from(head)];
        let lun = self.view.lun(unit);
        let (data_in, data_out) = (slot.data_in.into(), slot.data_out.into());
        let task = Task { cdb: &header.cdb, nexus: &lun.nexus, luns: &[], data_in, data_out, lane: self.lane };
        let response = pieces::first(&chain.writable, self.layout.response)?;
        let DiskOp { op, offset, len, .. } = lun.unit.begin_transfer(&mut slot.command, &task)?;
        slot.response = Some(response);
        let (kind, from, skip) = match op {
            Op::Read => (Kind::Read, &chain.writable, self.layout.response),
            _ => (Kind::Write, &chain.readable, self.layout.header),
        };
        (slot.kind, slot.bytes) = (Some(kind), len);
        // Filled where it lies: one that has just been filled is one to wait for when it is moved.
        if self.spare.is_empty() {
            self.spare.push(Vec::new());
        }
        if let Some(buffers) = self.spare.last_mut() {
            pieces::append_range(from, skip, len as usize, buffers);
        }
        let disk = lun.disk;
        self.enter(head, header.tag, unit);
        let buffers = self.spare.pop().unwrap_or_default();
        Some(Next::Submit(disk, Request { op, offset, len, buffers, token }))
    }

    /// Begins any other command, of a chain that is kept.
    #[inline(never)]
    fn begin_other(
        &mut self,
        memory: &GuestMemory,
        token: Token,
        unit: usize,
        Header { cdb, tag, .. }: &Header,
    ) -> Next {
        let head = head_of(token);
        let slot = &mut self.slots[usize::from(head)];
        let lun = self.view.lun(unit);
        let numbers = if cdb[0] == REPORT_LUNS { numbers(self.view.table(), lun.address.target) } else { Vec::new() };
        let task = Task {
            cdb,
            nexus: &lun.nexus,
            luns: &numbers,
            data_in: slot.data_in.into(),
            data_out: slot.data_out.into(),
            lane: self.lane,
        };
        let given = Given { memory, readable: &slot.readable, header: self.layout.header };
        let step = lun.unit.begin(&mut slot.command, &task, &given);
        let next = self.proceed(memory, token, unit, step);
        if !matches!(next, Next::Done(_)) {
            self.enter(head, *tag, unit);
        }
        next
    }

    /// Answers what is no command for a unit that is there, of a chain that is kept.
    #[cold]
    fn begin_nowhere(&mut self, memory: &GuestMemory, head: u16, Header { lun, cdb, .. }: &Header) -> Ended {
        let Slot { data_in, data_out, .. } = self.slots[usize::from(head)];
        if data_in > 0 && data_out > 0 {
            return self.finish(memory, head, VIRTIO_SCSI_S_FAILURE, NOT_DONE);
        }
        let table = self.view.table();
        let (neighbour, numbers) = match Addressed::parse(*lun) {
            Addressed::Unit(address) => (table.of_target(address.target).first(), numbers(table, address.target)),
            Addressed::ReportLuns => {
                // The whole device's, as a driver addresses them.
                let numbers = table.all().iter().map(|lun| u64::from_be_bytes(lun.address.to_bytes())).collect();
                (table.all().first(), numbers)
            }
            Addressed::Nothing => (None, Vec::new()),
        };
        let Some(neighbour) = neighbour else { return self.finish(memory, head, VIRTIO_SCSI_S_BAD_TARGET, NOT_DONE) };
        let slot = &mut self.slots[usize::from(head)];
        let task = Task {
            cdb,
            nexus: &neighbour.nexus,
            luns: &numbers,
            data_in: slot.data_in.into(),
            data_out: slot.data_out.into(),
            lane: self.lane,
        };
        let given = Given { memory, readable: &slot.readable, header: self.layout.header };
        match absent(&mut slot.command, &task, &given) {
            Step::Done(done) => self.finish(memory, head, VIRTIO_SCSI_S_OK, done),
            _ => self.finish(memory, head, VIRTIO_SCSI_S_OVERRUN, NOT_DONE),
        }
    }

    /// Does what a step says.
    fn proceed(&mut self, memory: &GuestMemory, token: Token, unit: usize, step: Step) -> Next {
        let head = head_of(token);
        match step {
            Step::Disk(op) => Next::Submit(self.view.lun(unit).disk, self.request(token, op)),
            Step::Wait => Next::Wait,
            Step::Done(done) => Next::Done(self.finish(memory, head, VIRTIO_SCSI_S_OK, done)),
            Step::Overrun { .. } => Next::Done(self.finish(memory, head, VIRTIO_SCSI_S_OVERRUN, NOT_DONE)),
        }
    }

    /// Makes a request of one operation of a command whose chain is kept.
    fn request(&mut self, token: Token, DiskOp { op, offset, len, memory }: DiskOp) -> Request {
        let slot = &mut self.slots[usize::from(head_of(token))];
        let mut buffers = self.spare.pop().unwrap_or_default();
        match memory {
            Memory::None => {}
            Memory::DataIn => pieces::append_range(&slot.writable, self.layout.response, len as usize, &mut buffers),
            Memory::DataOut(at) => {
                pieces::append_range(&slot.readable, self.layout.header + at as usize, len as usize, &mut buffers);
            }
            Memory::Scratch => buffers.push(pieces::own(slot.command.scratch())),
        }
        slot.kind.get_or_insert(match op {
            Op::Read => Kind::Read,
            Op::Write { .. } => Kind::Write,
            Op::Flush => Kind::Flush,
            Op::Discard => Kind::Discard,
            Op::WriteZeroes { .. } => Kind::WriteZeroes,
        });
        slot.bytes += len;
        Request { op, offset, len, buffers, token }
    }

    /// Writes a chain's response, and its data where the disk has not done that.
    fn finish(&mut self, memory: &GuestMemory, head: u16, response: u32, done: Done) -> Ended {
        self.respond(memory, head, response, done)
    }

    /// As [`finish`](Self::finish); inlined where it is known that all went well, which leaves little of it.
    #[inline(always)]
    fn respond(&mut self, memory: &GuestMemory, head: u16, response: u32, done: Done) -> Ended {
        let slot = &mut self.slots[usize::from(head)];
        let Layout { response: room, .. } = self.layout;
        let Done { status, sense, moved } = done;
        let data = slot.command.data_in();
        if slot.data_in > 0 && status == ScsiStatus::Good && moved > 0 && !data.is_empty() {
            memory.scatter_after(&slot.writable, room, data);
        }
        let residual = u64::from(slot.data_in + slot.data_out).saturating_sub(moved);
        let sense_len = if sense.is_some() { Sense::LEN.min(room - RESPONSE) } else { 0 };
        let bytes = &mut self.response;
        // In words, as they are about to be read: a word that was stored in parts would have to be waited for.
        bytes[..8].copy_from_slice(&(sense_len as u64 | residual << 32).to_le_bytes());
        bytes[8..16].copy_from_slice(&((status as u64) << 16 | u64::from(response) << 24).to_le_bytes());
        if let Some(sense) = sense {
            bytes[RESPONSE..RESPONSE + sense_len].copy_from_slice(&sense.to_bytes()[..sense_len]);
        }
        let place = slot.response.as_ref().map_or(&slot.writable[..], slice::from_ref);
        memory.scatter(place, &bytes[..room]);
        if sense.is_some() {
            bytes[RESPONSE..].fill(0);
        }
        let written = room as u64 + if slot.data_in > 0 { moved } else { 0 };
        let kind = slot.kind.take().unwrap_or(Kind::Other);
        let bytes = mem::take(&mut slot.bytes);
        let ended = Ended { head, written: written as u32, kind, bytes, status: told(response, &done) };
        self.tasks.progress.advance();
        if let Some(unit) = slot.unit.take() {
            self.tasks.end(head);
            self.view.leave(unit as usize);
            self.in_flight -= 1;
        }
        ended
    }

    /// Ends a command that was under way, because it was told to.
    #[cold]
    fn abort(&mut self, memory: &GuestMemory, head: u16, unit: usize, how: Abort) -> Ended {
        self.view.lun(unit).unit.abort(&mut self.slots[usize::from(head)].command);
        let response = match how {
            Abort::Task => VIRTIO_SCSI_S_ABORTED,
            Abort::Reset => VIRTIO_SCSI_S_RESET,
        };
        self.finish(memory, head, response, NOT_DONE)
    }

    fn unit_of(&self, head: u16) -> usize {
        let slot = self.slots.get(usize::from(head));
        slot.and_then(|slot| slot.unit).expect("only a command that is under way goes on") as usize
    }
}

impl Slot {
    /// Takes a chain's buffers: more than its response will be needed.
    fn keep(&mut self, chain: &mut Chain) {
        self.response = None;
        mem::swap(&mut self.readable, &mut chain.readable);
        mem::swap(&mut self.writable, &mut chain.writable);
    }
}

/// The units of a target, for REPORT LUNS.
fn numbers(table: &Table, target: u8) -> Vec<u64> {
    table.of_target(target).iter().map(|lun| lun.address.number()).collect()
}

/// How statistics have it.
#[inline]
fn told(response: u32, done: &Done) -> Status {
    match (response, done.status) {
        (VIRTIO_SCSI_S_OK, ScsiStatus::Good) => Status::Ok,
        (VIRTIO_SCSI_S_OK, ScsiStatus::CheckCondition) => match done.sense.map(|sense| sense.key) {
            // News, and answers to a question.
            Some(Key::UnitAttention | Key::Miscompare) => Status::Ok,
            Some(Key::IllegalRequest) => Status::Unsupported,
            _ => Status::IoError,
        },
        _ => Status::IoError,
    }
}

impl Model for ScsiQueue {
    #[inline]
    fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain, base: Token) -> Result<Next, Malformed> {
        let head = chain.head;
        let Layout { header: header_len, response: response_len } = self.layout;
        let header =
            (chain.readable_len as usize >= header_len).then(|| Header::read(memory, &chain.readable)).flatten();
        let Some(header) = header else {
            return Err(Malformed::ShortHeader { len: chain.readable_len, needed: header_len as u32 });
        };
        if (chain.writable_len as usize) < response_len {
            return Err(Malformed::NoStatus);
        }
        let slot = &mut self.slots[usize::from(head)];
        debug_assert!(slot.unit.is_none(), "a queue pops no head twice");
        slot.data_out = chain.readable_len - header_len as u32;
        slot.data_in = chain.writable_len - response_len as u32;
        let both = slot.data_in > 0 && slot.data_out > 0;
        self.view.refresh(&self.scsi);
        let unit = self.view.find(header.lun).filter(|_| !both);
        let token = token_of(base, head);
        if let Some(unit) = unit
            && let Some(next) = self.begin_transfer(token, unit, &header, chain)
        {
            return Ok(next);
        }
        self.slots[usize::from(head)].keep(chain);
        Ok(match unit {
            Some(unit) => self.begin_other(memory, token, unit, &header),
            None => Next::Done(self.begin_nowhere(memory, head, &header)),
        })
    }

    #[inline]
    fn end(&mut self, memory: &GuestMemory, completion: Completion) -> Next {
        let Completion { token, result, mut buffers } = completion;
        buffers.clear();
        self.spare.push(buffers);
        let head = head_of(token);
        let unit = self.unit_of(head);
        if let Some(how) = self.tasks.aborted(head) {
            return Next::Done(self.abort(memory, head, unit, how));
        }
        let slot = &mut self.slots[usize::from(head)];
        let lun = self.view.lun(unit);
        if result.is_ok() && slot.command.is_transfer() {
            let moved = lun.unit.end_transfer(&mut slot.command);
            return Next::Done(self.respond(memory, head, VIRTIO_SCSI_S_OK, Done { moved, ..NOT_DONE }));
        }
        let given = Given { memory, readable: &slot.readable, header: self.layout.header };
        let step = lun.unit.step(&mut slot.command, result, &given);
        self.proceed(memory, token, unit, step)
    }

    fn retry(&mut self, memory: &GuestMemory, token: Token) -> Next {
        let head = head_of(token);
        let unit = self.unit_of(head);
        if let Some(how) = self.tasks.aborted(head) {
            return Next::Done(self.abort(memory, head, unit, how));
        }
        let lun = self.view.lun(unit);
        let step = lun.unit.retry(&mut self.slots[usize::from(head)].command, &lun.nexus);
        self.proceed(memory, token, unit, step)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn progress(&self) -> Option<Arc<Progress>> {
        Some(Arc::clone(&self.tasks.progress))
    }
}

impl ScsiQueue {
    /// A command is under way.
    #[inline(always)]
    fn enter(&mut self, head: u16, tag: u64, unit: usize) {
        self.slots[usize::from(head)].unit = Some(unit as u32);
        self.in_flight += 1;
        self.tasks.begin(head, tag, self.view.enter(unit));
    }
}

impl Drop for ScsiQueue {
    /// Should a queue go away before its requests have come back, which none does, their memory stays for good: the
    /// kernel may still write to it.
    fn drop(&mut self) {
        if self.in_flight > 0 {
            mem::forget(mem::take(&mut self.slots));
        }
    }
}
