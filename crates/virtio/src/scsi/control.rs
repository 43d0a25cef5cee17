//! The control queue: task management and asynchronous notification (virtio 1.3, 5.6.6.2).

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;
use std::task::Waker;

use egret_vring::memory::{GuestMemory, IoVec};
use egret_vring::ring::Chain;
use virtio_bindings::bindings::virtio_scsi::{
    VIRTIO_SCSI_S_BAD_TARGET, VIRTIO_SCSI_S_FUNCTION_REJECTED, VIRTIO_SCSI_S_FUNCTION_SUCCEEDED,
    VIRTIO_SCSI_S_INCORRECT_LUN, VIRTIO_SCSI_S_OK, VIRTIO_SCSI_T_AN_QUERY, VIRTIO_SCSI_T_AN_SUBSCRIBE,
    VIRTIO_SCSI_T_TMF, VIRTIO_SCSI_T_TMF_ABORT_TASK, VIRTIO_SCSI_T_TMF_ABORT_TASK_SET,
    VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET, VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET, VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET,
    VIRTIO_SCSI_T_TMF_QUERY_TASK, VIRTIO_SCSI_T_TMF_QUERY_TASK_SET,
};

use super::Scsi;
use super::address::Addressed;
use super::luns::Lun;
use super::tasks::{Abort, About, EndedFunctions, Ending, Function};
use crate::model::{Completed, ControlModel, Malformed, Status};

/// `struct virtio_scsi_ctrl_tmf` up to its response: type, subtype, lun, id.
const TMF: usize = 24;
/// `struct virtio_scsi_ctrl_an` up to its answer: type, lun, event_requested.
const AN: usize = 16;

/// The response of a function that was done.
const FUNCTION_COMPLETE: u32 = VIRTIO_SCSI_S_OK;

/// How many functions are in progress at a time; others stay in the ring. Every request queue searches its commands for
/// each function, and each command keeps a reference to every function that waits for it.
pub(super) const FUNCTIONS: usize = 16;

/// A function that was passed on to the request queues. One that aborts commands is complete when they are used and that is
/// published, since the driver may reuse their memory from then on.
struct Waiting {
    response: Vec<IoVec>,
    then: Then,
}

/// What is done when all queues have dropped the function.
enum Then {
    Complete,
    /// A query: the response says whether a command was found.
    Answer,
    ResetUnit(Arc<Lun>),
    ResetNexus(Vec<Arc<Lun>>),
    /// There is no such unit, which is the response unless one was taken away that still had commands.
    SayGone(u32),
}

/// What a request on the control queue leads to.
enum Outcome {
    Respond(u32),
    Ask(About, Option<Abort>, Then),
}

/// The model of the control queue. It may allocate, because functions are rare.
pub(super) struct ControlQueue {
    scsi: Arc<Scsi>,
    waiting: HashMap<u16, Waiting>,
    ended: Arc<EndedFunctions>,
    /// Those whose commands were left to the record, or may have been left in a ring.
    left: Vec<(u16, Ending)>,
}

impl ControlQueue {
    pub(super) fn new(scsi: Arc<Scsi>) -> Self {
        Self { scsi, waiting: HashMap::new(), ended: Arc::default(), left: Vec::new() }
    }

    fn manage(&self, request: &[u8; TMF]) -> Outcome {
        let word = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| <[u8; 8]>::try_from(&request[at..at + 8]).expect("eight bytes");
        let (function, tag) = (word(4), u64::from_le_bytes(long(16)));
        let Addressed::Unit(address) = Addressed::parse(long(8)) else {
            return Outcome::Respond(VIRTIO_SCSI_S_BAD_TARGET);
        };
        let (_, table) = self.scsi.snapshot();
        let (target, lun) = (table.of_target(address.target), table.find(address));
        let gone = if target.is_empty() { VIRTIO_SCSI_S_BAD_TARGET } else { VIRTIO_SCSI_S_INCORRECT_LUN };
        let (one, all) = (About::Task(address, tag), About::Unit(address));
        let then = if lun.is_some() { Then::Complete } else { Then::SayGone(gone) };
        match function {
            // It is about the whole target, and need not name one of its units.
            VIRTIO_SCSI_T_TMF_I_T_NEXUS_RESET => {
                let then = if target.is_empty() { then } else { Then::ResetNexus(target.to_vec()) };
                Outcome::Ask(About::Target(address.target), Some(Abort::Reset), then)
            }
            VIRTIO_SCSI_T_TMF_ABORT_TASK => Outcome::Ask(one, Some(Abort::Task), then),
            // Each nexus has a task set of its own, as the control mode page says.
            VIRTIO_SCSI_T_TMF_ABORT_TASK_SET | VIRTIO_SCSI_T_TMF_CLEAR_TASK_SET => {
                Outcome::Ask(all, Some(Abort::Task), then)
            }
            VIRTIO_SCSI_T_TMF_LOGICAL_UNIT_RESET => {
                let then = lun.map_or(then, |lun| Then::ResetUnit(Arc::clone(lun)));
                Outcome::Ask(all, Some(Abort::Reset), then)
            }
            _ if lun.is_none() => Outcome::Respond(gone),
            VIRTIO_SCSI_T_TMF_QUERY_TASK => Outcome::Ask(one, None, Then::Answer),
            VIRTIO_SCSI_T_TMF_QUERY_TASK_SET => Outcome::Ask(all, None, Then::Answer),
            // CLEAR ACA among them: no unit has auto contingent allegiance.
            _ => Outcome::Respond(VIRTIO_SCSI_S_FUNCTION_REJECTED),
        }
    }

    /// Passes a function on to all request queues. If none runs, the function is complete at once.
    fn ask(&self, head: u16, about: About, ends: Option<Abort>) {
        let function = Function::new(head, about, ends, &self.ended);
        self.scsi.inboxes().iter().for_each(|inbox| inbox.post(&function));
    }

    /// Does what is to be done when no queue has the function any more, and answers it.
    fn complete(&mut self, memory: &GuestMemory, head: u16, ending: Ending) -> Option<Completed> {
        let Waiting { response, then } = self.waiting.remove(&head)?;
        let told = match then {
            Then::Answer if ending == Ending::Found => VIRTIO_SCSI_S_FUNCTION_SUCCEEDED,
            Then::SayGone(gone) if matches!(ending, Ending::FoundNothing | Ending::Left { found: false }) => gone,
            _ => FUNCTION_COMPLETE,
        };
        match then {
            Then::Complete | Then::Answer | Then::SayGone(_) => {}
            Then::ResetUnit(lun) => lun.unit.reset(),
            Then::ResetNexus(luns) => luns.iter().for_each(|lun| lun.unit.reset_nexus(lun.nexus.id())),
        }
        Some(respond(memory, head, &response, &[told as u8]))
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

fn respond(memory: &GuestMemory, head: u16, room: &[IoVec], response: &[u8]) -> Completed {
    Completed::other(head, memory.scatter(room, response) as u32, Status::Ok)
}

impl ControlModel for ControlQueue {
    fn begin(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<Option<Completed>, Malformed> {
        let head = chain.head();
        let mut request = [0; TMF];
        let len = memory.gather(chain.readable(), &mut request);
        let kind = u32::from_le_bytes([request[0], request[1], request[2], request[3]]);
        let (needed, room) = match kind {
            VIRTIO_SCSI_T_TMF => (TMF, 1),
            VIRTIO_SCSI_T_AN_QUERY | VIRTIO_SCSI_T_AN_SUBSCRIBE => (AN, 5),
            // Of an unknown type, so that the place of the response is unknown, too.
            _ => (4, 0),
        };
        if len < needed {
            return Err(Malformed::ShortHeader { len: chain.readable_len(), needed: needed as u32 });
        }
        if (chain.writable_len() as usize) < room {
            return Err(Malformed::NoStatus);
        }
        match kind {
            VIRTIO_SCSI_T_TMF => match self.manage(&request) {
                Outcome::Respond(response) => Ok(Some(respond(memory, head, chain.writable(), &[response as u8]))),
                Outcome::Ask(about, ends, then) => {
                    let response = mem::take(chain.writable_mut());
                    self.waiting.insert(head, Waiting { response, then });
                    self.ask(head, about, ends);
                    Ok(None)
                }
            },
            VIRTIO_SCSI_T_AN_QUERY | VIRTIO_SCSI_T_AN_SUBSCRIBE => {
                Ok(Some(respond(memory, head, chain.writable(), &self.notification(&request))))
            }
            _ => Ok(Some(Completed::other(head, 0, Status::Unsupported))),
        }
    }

    fn has_room(&self) -> bool {
        self.waiting.len() < FUNCTIONS
    }

    fn set_waker(&mut self, waker: Option<Waker>) {
        self.ended.set_waker(waker.unwrap_or_else(|| Waker::noop().clone()));
    }

    fn resume(&mut self, memory: &GuestMemory) -> Vec<Completed> {
        let mut completed = Vec::new();
        for (head, ending) in self.ended.take() {
            match ending {
                Ending::Left { .. } => self.left.push((head, ending)),
                Ending::Found | Ending::FoundNothing => completed.extend(self.complete(memory, head, ending)),
            }
        }
        completed
    }

    fn left(&self) -> usize {
        self.left.len()
    }

    fn end_left(&mut self, memory: &GuestMemory) -> Vec<Completed> {
        let left = mem::take(&mut self.left);
        left.into_iter().filter_map(|(head, ending)| self.complete(memory, head, ending)).collect()
    }
}
