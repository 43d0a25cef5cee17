//! One request queue of a virtio-scsi device: chains in, SCSI commands on their way (virtio 1.3, 5.6.6.1).

mod header;

use std::cmp;
use std::collections::VecDeque;
use std::mem;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;

use egret_disk::{Completion, Op, Request, RequestToken};
use egret_scsi::{
    Attention, Command, DataOut, DiskOp, Done, Key, Memory, Nexus, Sense, Status as ScsiStatus, Step, Task, absent,
};
use egret_vring::memory::{Buffers, GuestMemory, IoVec, iovecs};
use egret_vring::ring::Chain;
use virtio_bindings::bindings::virtio_scsi::{
    VIRTIO_SCSI_S_ABORTED, VIRTIO_SCSI_S_BAD_TARGET, VIRTIO_SCSI_S_FAILURE, VIRTIO_SCSI_S_OK, VIRTIO_SCSI_S_OVERRUN,
    VIRTIO_SCSI_S_RESET,
};

use self::header::{FIXED, Header};
use super::address::Addressed;
use super::luns::View;
use super::tasks::{Abort, About, Function, Inbox};
use super::waiting::{Bell, Needy, Scratch, Waiting};
use super::{Scsi, config};
use crate::model::{Completed, DiskKey, Malformed, Next, RequestModel, RequestType, Status, keep};

/// The response up to its sense data: sense_len, residual, status_qualifier, status, response.
const RESPONSE: usize = 12;
const LONGEST_SENSE: usize = *config::SENSE_SIZES.end() as usize;

/// The operation code that alone needs to know all units.
const REPORT_LUNS: u8 = 0xa0;

/// How many functions a queue looks through its commands for in one turn.
pub(super) const FUNCTIONS_A_TURN: usize = 4;

/// How many commands that wait for overlapping ones are tried again in one turn: a try looks at all locks of the unit, and at
/// some of those who wait there.
pub(super) const TRIES_A_TURN: usize = 128;

/// The longest lists of a chain's iovecs that a slot keeps.
const KEEP_SLOT_IOVECS: usize = 8;

/// The outcome of a request that reached no logical unit.
const NOT_DONE: Done = Done { status: ScsiStatus::Good, sense: None, moved: 0 };

/// A chain, and the command that it carries.
///
/// The order of the fields matters: a READ or WRITE touches only the beginning of the slot and of its command.
#[derive(Default)]
#[repr(C)]
struct Slot {
    /// Where the response goes, if nothing else of the chain is needed. Otherwise it is at the beginning of `writable`.
    response: Option<IoVec>,
    /// Bytes of data in either direction.
    data_in: u32,
    data_out: u32,
    /// What it asked of the disk, of what it counts as.
    bytes: u64,
    /// The command's identifier (`id`), which the driver chose.
    tag: u64,
    /// The command's logical unit, as an index of the view, while the command is in progress.
    unit: Option<u32>,
    request_type: Option<RequestType>,
    /// Why it is to be aborted, if it is.
    ends: Option<Abort>,
    command: Command,
    /// The chain's iovecs, all of them, where more than the response is needed.
    readable: Vec<IoVec>,
    writable: Vec<IoVec>,
    /// How much scratch memory its disk operation holds, in bytes.
    scratch: u64,
    /// The task management functions that wait until it is used and published.
    functions: Vec<Arc<Function>>,
}

/// Where things are in a chain.
#[derive(Clone, Copy)]
struct Layout {
    /// Length of the header, after which data-out begins.
    header: usize,
    /// Length of the response, after which data-in begins.
    response: usize,
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
    /// By head.
    slots: Box<[Slot]>,
    /// Buffers of completed requests, for the next ones.
    spare: Vec<Vec<IoVec>>,
    /// Where responses are assembled. The sense data is zeroed again after each use.
    response: [u8; RESPONSE + LONGEST_SENSE],
    inbox: Arc<Inbox>,
    /// Functions to apply when the queue has caught up with its driver.
    asked: VecDeque<Arc<Function>>,
    /// How many of these, from the first on, have not looked since a command was popped or another function came; and where the
    /// ring was then.
    unapplied: usize,
    popped: u16,
    /// Functions to release when everything used is published.
    due: Vec<Arc<Function>>,
    /// Some requests that wait for limits may hold up others' commands.
    takes_back: bool,
    /// Some command is to be aborted, and may be waiting.
    ends: bool,
    /// Commands that wait for overlapping ones, the next to be tried again first; and what is rung when they are worth that.
    waiting: VecDeque<Waiting>,
    bell: Arc<Bell>,
    /// How many of them have not been tried since.
    untried: usize,
    /// The bell's.
    waker: Waker,
    scratch: Scratch,
}

impl ScsiQueue {
    pub(super) fn new(scsi: Arc<Scsi>, index: u16, inbox: Arc<Inbox>, size: u16) -> Self {
        let layout = Layout {
            header: FIXED + scsi.cdb_size.load(Ordering::Relaxed) as usize,
            response: RESPONSE + scsi.sense_size.load(Ordering::Relaxed) as usize,
        };
        let bell = Bell::new(Waker::noop().clone());
        Self {
            lane: index.into(),
            layout,
            view: View::new(&scsi),
            slots: (0..size).map(|_| Slot::default()).collect(),
            spare: Vec::with_capacity(size.into()),
            response: [0; RESPONSE + LONGEST_SENSE],
            inbox,
            asked: VecDeque::new(),
            unapplied: 0,
            popped: 0,
            due: Vec::new(),
            takes_back: false,
            ends: false,
            waiting: VecDeque::new(),
            waker: Arc::clone(&bell).into(),
            bell,
            untried: 0,
            scratch: Scratch::new(scsi.config.num_queues),
            scsi,
        }
    }

    /// Begins a READ or WRITE whose response lies in one iovec, as nearly always. `None`, and nothing has changed, for
    /// every other command.
    ///
    /// The request is made directly of the chain, whose lists stay with the chain and are filled by the next pop.
    #[inline(always)]
    fn begin_transfer(&mut self, token: RequestToken, unit: usize, header: &Header, chain: &Chain) -> Option<Next> {
        let head = token.slot();
        let slot = &mut self.slots[usize::from(head)];
        let lun = self.view.lun(unit);
        let (data_in, data_out) = (slot.data_in.into(), slot.data_out.into());
        let (cdb, nexus, waker) = (&header.cdb, &lun.nexus, &self.waker);
        let task = Task { cdb, nexus, luns: &[], data_in, data_out, lane: self.lane, waker };
        let response = iovecs::first(chain.writable(), self.layout.response)?;
        let DiskOp { op, offset, len, .. } = lun.unit.begin_transfer(&mut slot.command, &task)?;
        slot.response = Some(response);
        let (request_type, from, skip) = match op {
            Op::Read => (RequestType::Read, chain.writable(), self.layout.response),
            _ => (RequestType::Write, chain.readable(), self.layout.header),
        };
        (slot.request_type, slot.bytes) = (Some(request_type), len);
        // Filled in place: to move a vector whose fields were just stored costs a store-forwarding stall.
        if self.spare.is_empty() {
            self.spare.push(Vec::new());
        }
        if let Some(buffers) = self.spare.last_mut() {
            iovecs::append_range(from, skip, len as usize, buffers);
        }
        let disk = lun.disk;
        self.enter(head, header.tag, unit);
        let buffers = self.spare.pop().unwrap_or_default();
        Some(Next::Submit(disk, Request { op, offset, len, buffers: buffers.into(), token }))
    }

    /// Begins any other command, of a chain that is kept.
    #[inline(never)]
    fn begin_other(
        &mut self,
        memory: &GuestMemory,
        token: RequestToken,
        unit: usize,
        Header { cdb, tag, .. }: &Header,
    ) -> Next {
        let head = token.slot();
        let slot = &mut self.slots[usize::from(head)];
        let lun = self.view.lun(unit);
        let task = Task {
            cdb,
            nexus: &lun.nexus,
            luns: if cdb[0] == REPORT_LUNS { self.view.table().numbers(lun.address.target) } else { &[] },
            data_in: slot.data_in.into(),
            data_out: slot.data_out.into(),
            lane: self.lane,
            waker: &self.waker,
        };
        let given = Given { memory, readable: &slot.readable, header: self.layout.header };
        let step = lun.unit.begin(&mut slot.command, &task, &given);
        if cdb[0] == REPORT_LUNS {
            self.tell_if_old(&lun.nexus);
        }
        let next = self.proceed(memory, token, unit, step);
        if !matches!(next, Next::Complete(_)) {
            self.enter(head, *tag, unit);
        }
        next
    }

    /// Answers what is no command for a unit that is there, of a chain that is kept.
    #[cold]
    fn begin_nowhere(&mut self, memory: &GuestMemory, head: u16, Header { lun, cdb, .. }: &Header) -> Completed {
        let Slot { data_in, data_out, .. } = self.slots[usize::from(head)];
        if data_in > 0 && data_out > 0 {
            return self.finish(memory, head, VIRTIO_SCSI_S_FAILURE, NOT_DONE);
        }
        let table = self.view.table();
        let (neighbour, numbers) = match Addressed::parse(*lun) {
            Addressed::Unit(address) => (table.of_target(address.target).first(), table.numbers(address.target)),
            Addressed::ReportLuns => (table.all().first(), table.addresses()),
            Addressed::Nothing => (None, &[][..]),
        };
        let Some(neighbour) = neighbour else { return self.finish(memory, head, VIRTIO_SCSI_S_BAD_TARGET, NOT_DONE) };
        let slot = &mut self.slots[usize::from(head)];
        let task = Task {
            cdb,
            nexus: &neighbour.nexus,
            luns: numbers,
            data_in: slot.data_in.into(),
            data_out: slot.data_out.into(),
            lane: self.lane,
            waker: &self.waker,
        };
        let given = Given { memory, readable: &slot.readable, header: self.layout.header };
        let step = absent(&mut slot.command, &task, &given);
        if cdb[0] == REPORT_LUNS {
            self.tell_if_old(&neighbour.nexus);
        }
        match step {
            Step::Done(done) => self.finish(memory, head, VIRTIO_SCSI_S_OK, done),
            _ => self.finish(memory, head, VIRTIO_SCSI_S_OVERRUN, NOT_DONE),
        }
    }

    /// Who has been given a list of units need not be told that it has changed: unless it has since this queue looked, which
    /// may be what was to be told.
    fn tell_if_old(&self, nexus: &Nexus) {
        if !self.view.is_current(&self.scsi) {
            nexus.attend(Attention::LunsChanged);
        }
    }

    /// Does what a command's step says.
    fn proceed(&mut self, memory: &GuestMemory, token: RequestToken, unit: usize, step: Step) -> Next {
        let head = token.slot();
        match step {
            Step::Disk(op) if op.memory == Memory::Scratch => {
                self.scratch.waiting.push_back(Needy { token, disk: self.view.lun(unit).disk, op });
                // The oldest operation goes first. If that is another one, the release of memory wakes the queue for it.
                match self.scratch.waiting.len() {
                    1 => self.next_with_scratch(memory).unwrap_or(Next::Wait),
                    _ => Next::Wait,
                }
            }
            Step::Disk(op) => Next::Submit(self.view.lun(unit).disk, self.request(memory, token, op)),
            Step::Wait => {
                self.waiting.push_back(Waiting::Begun(token));
                Next::Wait
            }
            Step::Done(done) => {
                self.scsi.note_cache(self.view.lun(unit));
                Next::Complete(self.finish(memory, head, VIRTIO_SCSI_S_OK, done))
            }
            Step::Overrun { .. } => Next::Complete(self.finish(memory, head, VIRTIO_SCSI_S_OVERRUN, NOT_DONE)),
        }
    }

    /// Makes a request of the oldest operation that waits for scratch memory, if there is enough.
    fn next_with_scratch(&mut self, memory: &GuestMemory) -> Option<Next> {
        let Needy { token, disk, op } = self.scratch.next()?;
        self.slots[usize::from(token.slot())].scratch = op.len;
        Some(Next::Submit(disk, self.request(memory, token, op)))
    }

    /// Makes a request of one operation of a command whose chain is kept.
    fn request(&mut self, memory: &GuestMemory, token: RequestToken, op: DiskOp) -> Request<Buffers> {
        let DiskOp { op, offset, len, memory: which } = op;
        let slot = &mut self.slots[usize::from(token.slot())];
        let mut list = self.spare.pop().unwrap_or_default();
        let buffers = match which {
            Memory::None => list.into(),
            Memory::DataIn => {
                iovecs::append_range(&slot.writable, self.layout.response, len as usize, &mut list);
                list.into()
            }
            Memory::DataOut(at) => {
                iovecs::append_range(&slot.readable, self.layout.header + at as usize, len as usize, &mut list);
                list.into()
            }
            // The memory comes back with the completion, in `end`.
            Memory::Scratch => {
                let given = Given { memory, readable: &slot.readable, header: self.layout.header };
                Buffers::own(mem::take(slot.command.scratch(&given)), list)
            }
        };
        let request_type = type_of(op);
        match slot.request_type.map(weight).cmp(&Some(weight(request_type))) {
            cmp::Ordering::Less => (slot.request_type, slot.bytes) = (Some(request_type), len),
            cmp::Ordering::Equal => slot.bytes += len,
            cmp::Ordering::Greater => {}
        }
        Request { op, offset, len, buffers, token }
    }

    /// Writes a chain's response, and its data where the disk has not done that.
    fn finish(&mut self, memory: &GuestMemory, head: u16, response: u32, done: Done) -> Completed {
        let completed = self.respond(memory, head, response, done);
        self.slots[usize::from(head)].forget();
        completed
    }

    /// As [`finish`](Self::finish); inlined where it is known that all went well, which leaves little of it.
    #[inline(always)]
    fn respond(&mut self, memory: &GuestMemory, head: u16, response: u32, done: Done) -> Completed {
        let slot = &mut self.slots[usize::from(head)];
        let Layout { response: room, .. } = self.layout;
        let Done { status, sense, moved } = done;
        let data = slot.command.data_in();
        if status == ScsiStatus::Good && moved > 0 && !data.is_empty() {
            memory.scatter_after(&slot.writable, room, data);
        }
        let residual = u64::from(slot.data_in + slot.data_out).saturating_sub(moved);
        let sense_len = if sense.is_some() { Sense::LEN.min(room - RESPONSE) } else { 0 };
        let bytes = &mut self.response;
        // Stored in words, because `scatter` reads words: a load that spans smaller stores waits for all of them.
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
        let request_type = slot.request_type.take().unwrap_or(RequestType::Other);
        let bytes = mem::take(&mut slot.bytes);
        let disk = slot.unit.take().map(|unit| {
            let disk = self.view.lun(unit as usize).disk;
            self.view.leave(unit as usize);
            disk
        });
        let status = told(response, &done);
        Completed { head, written: written as u32, request_type, bytes, status, disk }
    }

    /// Aborts a command that is in progress and has no disk operation in flight.
    #[cold]
    fn abort(&mut self, memory: &GuestMemory, head: u16, how: Abort) -> Completed {
        let unit = self.unit_of(head);
        let slot = &mut self.slots[usize::from(head)];
        self.view.lun(unit).unit.abort(&mut slot.command);
        slot.ends = None;
        // The functions are complete only when the driver can see that the command has ended.
        self.due.append(&mut slot.functions);
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
    /// Copies a chain's buffers, because more than the response will be needed. The lists are copied and not taken: the
    /// chain's own are as long as the queue's chains usually are.
    fn keep(&mut self, chain: &Chain) {
        self.response = None;
        self.readable.extend_from_slice(chain.readable());
        self.writable.extend_from_slice(chain.writable());
    }

    /// Releases most of the memory of a command that has ended: there are as many slots as descriptors.
    fn forget(&mut self) {
        self.command.recycle();
        for iovecs in [&mut self.readable, &mut self.writable] {
            iovecs.clear();
            iovecs.shrink_to(KEEP_SLOT_IOVECS);
        }
    }
}

const fn type_of(op: Op) -> RequestType {
    match op {
        Op::Read => RequestType::Read,
        Op::Write { .. } => RequestType::Write,
        Op::Flush => RequestType::Flush,
        Op::Discard => RequestType::Discard,
        Op::WriteZeroes { .. } => RequestType::WriteZeroes,
    }
}

/// A command counts as what it is for, and the bytes of that alone: of all that it does the first change, or else the first read; a
/// flush is only the way to the rest, where there is one.
const fn weight(of: RequestType) -> u8 {
    match of {
        RequestType::Flush => 0,
        RequestType::Read => 1,
        _ => 2,
    }
}

/// What a request asks of the disk, but for the memory.
const fn asked_by(request: &Request<Buffers>) -> DiskOp {
    DiskOp { op: request.op, offset: request.offset, len: request.len, memory: Memory::None }
}

/// The status of a command for statistics.
#[inline]
fn told(response: u32, done: &Done) -> Status {
    match (response, done.status) {
        (VIRTIO_SCSI_S_OK, ScsiStatus::Good) => Status::Ok,
        (VIRTIO_SCSI_S_OK, ScsiStatus::CheckCondition) => match done.sense.map(|sense| sense.key) {
            // Neither is an error: the one is a notification, the other the result of a comparison.
            Some(Key::UnitAttention | Key::Miscompare) => Status::Ok,
            Some(Key::IllegalRequest) => Status::Unsupported,
            _ => Status::IoError,
        },
        _ => Status::IoError,
    }
}

impl RequestModel for ScsiQueue {
    #[inline]
    fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain, source: u32) -> Result<Next, Malformed> {
        let head = chain.head();
        let Layout { header: header_len, response: response_len } = self.layout;
        let header =
            (chain.readable_len() as usize >= header_len).then(|| Header::read(memory, chain.readable())).flatten();
        let Some(header) = header else {
            return Err(Malformed::ShortHeader { len: chain.readable_len(), needed: header_len as u32 });
        };
        if (chain.writable_len() as usize) < response_len {
            return Err(Malformed::NoStatus);
        }
        let slot = &mut self.slots[usize::from(head)];
        debug_assert!(slot.unit.is_none(), "a queue pops no head twice");
        slot.data_out = chain.readable_len() - header_len as u32;
        slot.data_in = chain.writable_len() - response_len as u32;
        let both = slot.data_in > 0 && slot.data_out > 0;
        self.view.refresh(&self.scsi);
        let unit = self.view.find(header.lun).filter(|_| !both);
        let token = RequestToken::new(source, head);
        if let Some(unit) = unit
            && let Some(next) = self.begin_transfer(token, unit, &header, chain)
        {
            return Ok(next);
        }
        self.slots[usize::from(head)].keep(chain);
        Ok(match unit {
            Some(unit) => self.begin_other(memory, token, unit, &header),
            None => Next::Complete(self.begin_nowhere(memory, head, &header)),
        })
    }

    #[inline]
    fn end(&mut self, memory: &GuestMemory, completion: Completion<Buffers>) -> Next {
        let Completion { token, result, buffers } = completion;
        let (list, scratch) = buffers.into_parts();
        keep(&mut self.spare, list);
        let head = token.slot();
        let unit = self.unit_of(head);
        if let Some(scratch) = scratch {
            self.slots[usize::from(head)].command.put_scratch(scratch);
        }
        if let Some(how) = self.slots[usize::from(head)].ends {
            self.give_scratch_back(head);
            return Next::Complete(self.abort(memory, head, how));
        }
        let slot = &mut self.slots[usize::from(head)];
        let lun = self.view.lun(unit);
        if result.is_ok() && slot.command.is_transfer() {
            let moved = lun.unit.end_transfer(&mut slot.command);
            return Next::Complete(self.respond(memory, head, VIRTIO_SCSI_S_OK, Done { moved, ..NOT_DONE }));
        }
        let given = Given { memory, readable: &slot.readable, header: self.layout.header };
        let step = lun.unit.step(&mut slot.command, result, &given, &lun.nexus, &self.waker);
        self.give_scratch_back(head);
        self.proceed(memory, token, unit, step)
    }

    fn suspend(&mut self, request: &mut Request<Buffers>) {
        let head = request.token.slot();
        let lun = self.view.lun(self.unit_of(head));
        let slot = &mut self.slots[usize::from(head)];
        if lun.unit.suspend(&mut slot.command, self.lane, &asked_by(request)) {
            (slot.request_type, slot.bytes) = (None, 0);
        } else if slot.scratch > 0 && slot.request_type.map(weight) == Some(weight(type_of(request.op))) {
            // It is asked for anew, and was counted.
            slot.bytes -= request.len;
        }
        if slot.scratch > 0 {
            keep(&mut self.spare, mem::take(&mut request.buffers).into_parts().0);
            self.give_scratch_back(head);
        }
    }

    fn readmit(&mut self, memory: &GuestMemory, key: DiskKey, mut request: Request<Buffers>) -> Next {
        let token = request.token;
        let unit = self.unit_of(token.slot());
        // Whatever would become of it: there are functions that wait for its end.
        if let Some(how) = self.slots[usize::from(token.slot())].ends {
            keep(&mut self.spare, request.buffers.into_parts().0);
            return Next::Complete(self.abort(memory, token.slot(), how));
        }
        let lun = self.view.lun(unit);
        let command = &mut self.slots[usize::from(token.slot())].command;
        let mut out = asked_by(&request);
        match lun.unit.readmit(command, &lun.nexus, &mut out, &self.waker) {
            None => {
                request.op = out.op;
                Next::Submit(key, request)
            }
            Some(Step::Wait) => {
                self.waiting.push_back(Waiting::Readmitted(Box::new((key, request))));
                Next::Wait
            }
            Some(step) => {
                keep(&mut self.spare, request.buffers.into_parts().0);
                self.proceed(memory, token, unit, step)
            }
        }
    }

    fn look_for_disks(&mut self) {
        self.view.refresh(&self.scsi);
    }

    fn set_waker(&mut self, waker: Option<Waker>) {
        match waker {
            Some(waker) => {
                // While it was between two loops nobody could tell it.
                self.look_for_disks();
                self.bell = Bell::new(waker.clone());
                self.waker = Arc::clone(&self.bell).into();
                self.inbox.open(waker);
                // Those who were to wake it have another bell, or none any more.
                if self.has_commands() {
                    self.waker.wake_by_ref();
                }
            }
            // Functions go on coming: what they are about may be in progress, or in the ring.
            None => {
                self.inbox.open(Waker::noop().clone());
                self.due.clear();
            }
        }
    }

    fn resume(&mut self, memory: &GuestMemory, into: &mut Vec<Next>) {
        if mem::take(&mut self.ends) {
            self.end_early(memory, into);
            self.takes_back |= self.inbox.holds();
        }
        self.open_inbox();
        self.takes_back |= self.inbox.is_called();
        // Reset before the commands are retried, so that a ring during the retries wakes the queue again.
        if self.bell.rung.swap(false, Ordering::Acquire) {
            self.untried = self.waiting.len();
        }
        if self.untried > 0 {
            self.try_again(memory, into);
        }
        while let Some(next) = self.next_with_scratch(memory) {
            into.push(next);
        }
    }

    #[inline]
    fn published(&mut self) {
        if !self.due.is_empty() {
            self.due.clear();
        }
    }

    fn is_full(&mut self, popped: u16) {
        self.published();
        if mem::replace(&mut self.popped, popped) != popped {
            self.unapplied = self.asked.len();
        }
        for _ in 0..self.unapplied.min(FUNCTIONS_A_TURN) {
            let Some(function) = self.asked.pop_front() else { break };
            self.unapplied -= 1;
            if !self.has_all_of(&function) {
                self.asked.push_back(function);
            }
        }
        if self.ends || self.unapplied > 0 {
            self.bell.queue.wake_by_ref();
        }
    }

    fn leave_functions(&mut self) {
        self.published();
        self.apply_functions(Function::leave);
    }

    #[inline]
    fn caught_up(&mut self) {
        self.published();
        if !self.asked.is_empty() {
            self.apply_functions(|_| ());
        }
    }

    #[cold]
    fn may_wait(&mut self, head: u16) {
        self.inbox.hold();
        // The other half of what `Inbox::hold` says.
        if self.holds_up(head) {
            self.takes_back = true;
            self.bell.queue.wake_by_ref();
        }
    }

    fn takes_back(&mut self) -> bool {
        mem::take(&mut self.takes_back)
    }

    fn holds_up(&self, head: u16) -> bool {
        let slot = &self.slots[usize::from(head)];
        // A function waits for one that is to end.
        slot.ends.is_some() || self.view.lun(self.unit_of(head)).unit.holds_up(&slot.command)
    }

    fn waiting(&self) -> usize {
        self.waiting.len() + self.scratch.waiting.len()
    }

    fn is_aborted(&self, head: u16) -> bool {
        self.slots[usize::from(head)].ends.is_some()
    }

    fn let_go(&mut self) {
        // Nobody looks at the functions later: who waits for them would wait for ever.
        self.asked.extend(self.inbox.close());
        self.leave_functions();
        self.waiting.clear();
        self.scratch.waiting.clear();
        for slot in &mut self.slots {
            let Some(unit) = slot.unit.take() else { continue };
            self.view.lun(unit as usize).unit.abort(&mut slot.command);
            self.view.leave(unit as usize);
            slot.forget();
            // The command has not ended, and whoever serves the queue next does it.
            slot.functions.drain(..).for_each(|function| function.leave());
        }
    }
}

impl ScsiQueue {
    /// Whether commands are in progress. It looks for them, and is for when the queue comes or goes.
    fn has_commands(&self) -> bool {
        self.slots.iter().any(|slot| slot.unit.is_some())
    }

    /// Takes functions from the inbox, a limited number each turn.
    fn open_inbox(&mut self) {
        let (functions, more) = self.inbox.take(FUNCTIONS_A_TURN);
        if !functions.is_empty() {
            self.asked.extend(functions);
            self.unapplied = self.asked.len();
        }
        if more {
            self.bell.queue.wake_by_ref();
        }
    }

    /// Tries commands again that wait for overlapping ones, a limited number each turn.
    #[cold]
    fn try_again(&mut self, memory: &GuestMemory, into: &mut Vec<Next>) {
        // Some may have been aborted meanwhile.
        self.untried = self.untried.min(self.waiting.len());
        for _ in 0..self.untried.min(TRIES_A_TURN) {
            let Some(waiting) = self.waiting.pop_front() else { break };
            self.untried -= 1;
            let next = match waiting {
                Waiting::Begun(token) => self.retry(memory, token),
                Waiting::Readmitted(readmitted) => self.readmit(memory, readmitted.0, readmitted.1),
            };
            if !matches!(next, Next::Wait) {
                into.push(next);
            }
        }
        if self.untried > 0 {
            self.bell.queue.wake_by_ref();
        }
    }

    fn retry(&mut self, memory: &GuestMemory, token: RequestToken) -> Next {
        let unit = self.unit_of(token.slot());
        let lun = self.view.lun(unit);
        let step = lun.unit.retry(&mut self.slots[usize::from(token.slot())].command, &lun.nexus, &self.waker);
        self.proceed(memory, token, unit, step)
    }

    /// Applies functions to the commands that they are about. This happens when the queue has caught up with its driver:
    /// what was made available before the function has been popped, and what had ended has been published. Or it has not, and
    /// pops no more: then functions that may be about what is left have that said of them.
    #[cold]
    fn apply_functions(&mut self, may_lack_some: fn(&Function)) {
        self.unapplied = 0;
        for function in mem::take(&mut self.asked) {
            if !self.has_all_of(&function) {
                may_lack_some(&function);
            }
        }
        if self.ends {
            self.bell.queue.wake_by_ref();
        }
    }

    /// Applies a function, which may be about commands that are to come as well. Says if it is not.
    fn has_all_of(&mut self, function: &Arc<Function>) -> bool {
        // No other command has the tag of one that was found.
        self.apply(function) && matches!(function.about, About::Task(..))
    }

    /// Applies a function to the commands in progress. Says whether it is about some of them.
    fn apply(&mut self, function: &Arc<Function>) -> bool {
        let mut found = false;
        for slot in &mut self.slots {
            let Some(unit) = slot.unit else { continue };
            if !function.about.names(self.view.lun(unit as usize).address, slot.tag) {
                continue;
            }
            found = true;
            function.find();
            if function.ends.is_some() && !slot.functions.iter().any(|other| Arc::ptr_eq(other, function)) {
                slot.ends = function.ends;
                slot.functions.push(Arc::clone(function));
                self.ends = true;
            }
        }
        found
    }

    /// Aborts the waiting commands that are to be aborted. The others are aborted when their disk operation completes.
    fn end_early(&mut self, memory: &GuestMemory, into: &mut Vec<Next>) {
        let slots = &self.slots;
        let ends = |token: &RequestToken| slots[usize::from(token.slot())].ends.is_some();
        let mut ended: Vec<RequestToken> = Vec::new();
        ended.extend(self.waiting.iter().map(Waiting::token).filter(|token| ends(token)));
        ended.extend(self.scratch.waiting.iter().map(|needy| &needy.token).filter(|token| ends(token)));
        self.waiting.retain(|waiting| !ends(waiting.token()));
        self.scratch.waiting.retain(|needy| !ends(&needy.token));
        for token in ended {
            let head = token.slot();
            let how = self.slots[usize::from(head)].ends.unwrap_or(Abort::Task);
            into.push(Next::Complete(self.abort(memory, head, how)));
        }
    }

    /// Frees the scratch memory of a completed operation, and wakes the queue if another operation waits for some.
    fn give_scratch_back(&mut self, head: u16) {
        let scratch = mem::take(&mut self.slots[usize::from(head)].scratch);
        self.scratch.free += scratch;
        if scratch > 0 && !self.scratch.waiting.is_empty() {
            self.bell.queue.wake_by_ref();
        }
    }

    /// Marks a command as in progress.
    #[inline(always)]
    fn enter(&mut self, head: u16, tag: u64, unit: usize) {
        let slot = &mut self.slots[usize::from(head)];
        slot.unit = Some(unit as u32);
        slot.tag = tag;
        self.view.enter(unit);
    }
}

impl Drop for ScsiQueue {
    fn drop(&mut self) {
        self.let_go();
    }
}

#[cfg(test)]
mod tests;
