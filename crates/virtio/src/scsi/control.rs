//! The control queue: task management and asynchronous notification (virtio 1.3, 5.6.6.2).

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use egret_disk::{Completion, IoVec, Token};
use virtio_bindings::bindings::virtio_scsi::{
    VIRTIO_SCSI_S_BAD_TARGET, VIRTIO_SCSI_S_FUNCTION_REJECTED, VIRTIO_SCSI_S_FUNCTION_SUCCEEDED,
    VIRTIO_SCSI_S_INCORRECT_LUN, VIRTIO_SCSI_S_OK, VIRTIO_SCSI_T_AN_QUERY, VIRTIO_SCSI_T_AN_SUBSCRIBE,
    VIRTIO_SCSI_T_TMF, VIRTIO_SCSI_T_TMF_ABORT_TASK, VIRTIO_SCSI_T_TMF_ABORT_TASK_SET,
    VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET, VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET, VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET,
    VIRTIO_SCSI_T_TMF_QUERY_TASK, VIRTIO_SCSI_T_TMF_QUERY_TASK_SET,
};

use super::Scsi;
use super::address::{Addressed, LunAddress};
use super::luns::Lun;
use super::tasks::{Abort, TaskId, Tasks};
use crate::memory::GuestMemory;
use crate::model::{Ended, Kind, Malformed, Model, Next, Status, head_of};
use crate::ring::Chain;

/// `struct virtio_scsi_ctrl_tmf` up to its response: type, subtype, lun, id.
const TMF: usize = 24;
/// `struct virtio_scsi_ctrl_an` up to its answer: type, lun, event_requested.
const AN: usize = 16;

/// The response of a function that was done.
const FUNCTION_COMPLETE: u32 = VIRTIO_SCSI_S_OK;

/// A function that has ended commands, and waits until they have left and the driver has been shown that: it may give
/// their memory to others as soon as the function is complete.
struct Waiting {
    response: Vec<IoVec>,
    tasks: Vec<(Arc<Tasks>, TaskId)>,
    /// How far each queue had come when all of them had left.
    shown: Option<Vec<(Arc<Tasks>, u64)>>,
    then: Then,
}

/// What is done when they have.
enum Then {
    Nothing,
    ResetUnit(Arc<Lun>),
    ResetNexus(Vec<Arc<Lun>>),
}

/// What becomes of a function.
enum Outcome {
    Respond(u32),
    Wait(Vec<(Arc<Tasks>, TaskId)>, Then),
}

/// The model of the control queue. What it does is rare: it takes what memory it needs.
pub(super) struct ControlQueue {
    scsi: Arc<Scsi>,
    waiting: HashMap<u16, Waiting>,
}

impl ControlQueue {
    pub(super) fn new(scsi: Arc<Scsi>) -> Self {
        Self { scsi, waiting: HashMap::new() }
    }

    fn manage(&self, request: &[u8; TMF]) -> Outcome {
        let word = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| <[u8; 8]>::try_from(&request[at..at + 8]).expect("eight bytes");
        let (function, tag) = (word(4), u64::from_le_bytes(long(16)));
        let Addressed::Unit(address) = Addressed::parse(long(8)) else {
            return Outcome::Respond(VIRTIO_SCSI_S_BAD_TARGET);
        };
        let (_, table) = self.scsi.snapshot();
        let target = table.of_target(address.target);
        if target.is_empty() {
            return Outcome::Respond(VIRTIO_SCSI_S_BAD_TARGET);
        }
        // It is about the whole target, and need not name one of its units.
        if function == VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET {
            let tasks = self.find(|_, word| LunAddress::target_of(word) == address.target);
            return abort(tasks, Abort::Reset, Then::ResetNexus(target.to_vec()));
        }
        let Some(lun) = table.find(address) else { return Outcome::Respond(VIRTIO_SCSI_S_INCORRECT_LUN) };
        let unit = address.word();
        let one = || self.find(|its, word| its == tag && word == unit);
        let all = || self.find(|_, word| word == unit);
        let query = |tasks: Vec<_>| match tasks.is_empty() {
            true => Outcome::Respond(FUNCTION_COMPLETE),
            false => Outcome::Respond(VIRTIO_SCSI_S_FUNCTION_SUCCEEDED),
        };
        match function {
            VIRTIO_SCSI_T_TMF_ABORT_TASK => abort(one(), Abort::Task, Then::Nothing),
            // Each nexus has a task set of its own, as the control mode page says.
            VIRTIO_SCSI_T_TMF_ABORT_TASK_SET | VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET => {
                abort(all(), Abort::Task, Then::Nothing)
            }
            VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET => abort(all(), Abort::Reset, Then::ResetUnit(Arc::clone(lun))),
            VIRTIO_SCSI_T_TMF_QUERY_TASK => query(one()),
            VIRTIO_SCSI_T_TMF_QUERY_TASK_SET => query(all()),
            // CLEAR ACA among them: no unit has auto contingent allegiance.
            _ => Outcome::Respond(VIRTIO_SCSI_S_FUNCTION_REJECTED),
        }
    }

    /// The commands in flight that `wanted` names, of all queues.
    fn find(&self, wanted: impl Fn(u64, u32) -> bool) -> Vec<(Arc<Tasks>, TaskId)> {
        let mut found = Vec::new();
        for tasks in self.scsi.tasks().iter() {
            found.extend(tasks.find(&wanted).map(|id| (Arc::clone(tasks), id)));
        }
        found
    }

    /// No unit has events to subscribe to.
    fn notification(&self, request: &[u8]) -> [u8; 5] {
        let lun = request[4..12].try_into().expect("eight bytes");
        let response = match Addressed::parse(lun) {
            Addressed::Unit(address) => {
                let (_, table) = self.scsi.snapshot();
                match (table.find(address), table.of_target(address.target)) {
                    (Some(_), _) => VIRTIO_SCSI_S_OK,
                    (None, []) => VIRTIO_SCSI_S_BAD_TARGET,
                    (None, _) => VIRTIO_SCSI_S_INCORRECT_LUN,
                }
            }
            _ => VIRTIO_SCSI_S_BAD_TARGET,
        };
        [0, 0, 0, 0, response as u8]
    }
}

fn abort(tasks: Vec<(Arc<Tasks>, TaskId)>, how: Abort, then: Then) -> Outcome {
    for (queue, id) in &tasks {
        queue.abort(*id, how);
    }
    Outcome::Wait(tasks, then)
}

fn respond(memory: &GuestMemory, head: u16, room: &[IoVec], response: &[u8]) -> Next {
    let written = memory.scatter(room, response) as u32;
    Next::Done(Ended { head, written, kind: Kind::Other, bytes: 0, status: Status::Ok })
}

impl Model for ControlQueue {
    fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain, base: Token) -> Result<Next, Malformed> {
        let head = chain.head;
        let mut request = [0; TMF];
        let len = memory.gather(&chain.readable, &mut request);
        let kind = u32::from_le_bytes([request[0], request[1], request[2], request[3]]);
        let (needed, room) = match kind {
            VIRTIO_SCSI_T_TMF => (TMF, 1),
            VIRTIO_SCSI_T_AN_QUERY | VIRTIO_SCSI_T_AN_SUBSCRIBE => (AN, 5),
            // Nobody knows where its response would go.
            _ => (4, 0),
        };
        if len < needed {
            return Err(Malformed::ShortHeader { len: chain.readable_len, needed: needed as u32 });
        }
        if (chain.writable_len as usize) < room {
            return Err(Malformed::NoStatus);
        }
        match kind {
            VIRTIO_SCSI_T_TMF => match self.manage(&request) {
                Outcome::Respond(response) => Ok(respond(memory, head, &chain.writable, &[response as u8])),
                Outcome::Wait(tasks, then) => {
                    let response = mem::take(&mut chain.writable);
                    self.waiting.insert(head, Waiting { response, tasks, shown: None, then });
                    Ok(self.retry(memory, crate::token_of(base, head)))
                }
            },
            VIRTIO_SCSI_T_AN_QUERY | VIRTIO_SCSI_T_AN_SUBSCRIBE => {
                Ok(respond(memory, head, &chain.writable, &self.notification(&request)))
            }
            _ => {
                let status = Status::Unsupported;
                Ok(Next::Done(Ended { head, written: 0, kind: Kind::Other, bytes: 0, status }))
            }
        }
    }

    fn end(&mut self, _memory: &GuestMemory, _completion: Completion) -> Next {
        unreachable!("no control request asks anything of a disk")
    }

    fn retry(&mut self, memory: &GuestMemory, token: Token) -> Next {
        let head = head_of(token);
        let waiting = self.waiting.get_mut(&head).expect("only what waits is tried again");
        waiting.tasks.retain(|(queue, id)| queue.has(*id));
        if !waiting.tasks.is_empty() {
            return Next::Wait;
        }
        let queues = || self.scsi.tasks().iter().map(|queue| (Arc::clone(queue), queue.progress.done())).collect();
        let shown: &mut Vec<_> = waiting.shown.get_or_insert_with(queues);
        shown.retain(|(queue, done)| !queue.progress.has_shown(*done));
        if !shown.is_empty() {
            return Next::Wait;
        }
        match mem::replace(&mut waiting.then, Then::Nothing) {
            Then::Nothing => {}
            Then::ResetUnit(lun) => lun.unit.reset(),
            Then::ResetNexus(luns) => luns.iter().for_each(|lun| lun.unit.reset_nexus(lun.nexus.id())),
        }
        let next = respond(memory, head, &waiting.response, &[FUNCTION_COMPLETE as u8]);
        self.waiting.remove(&head);
        next
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }
}
