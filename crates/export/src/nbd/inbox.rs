//! What other threads have for a lane, wherever it is: clients that have come, and answers to its questions.

use std::sync::{Arc, Mutex};
use std::task::Wake;

use egret_disk::Extent;

use super::client::NewClient;
use super::lane::ClientId;
use crate::alarm::Alarm;
use crate::queues::lock;
use crate::source::Worker;

/// Something for a lane.
pub(super) enum Letter {
    /// A client whose handshake is over.
    Client(Box<NewClient>),
    /// What is allocated of a range that a client asked about.
    Extents { client: ClientId, command: u32, extents: Vec<Extent> },
}

/// A box that any thread puts letters into, and the lane empties. The lane takes its lock only when its alarm has rung.
#[derive(Default)]
pub(super) struct Inbox(Mutex<Letters>);

#[derive(Default)]
struct Letters {
    waiting: Vec<Letter>,
    /// Rings where the lane is.
    alarm: Option<Arc<Alarm<Worker>>>,
}

impl Inbox {
    /// Puts a letter in, and has the lane dispatched. A lane that is nowhere at present looks when it comes to a loop.
    pub(super) fn post(&self, letter: Letter) {
        let mut letters = lock(&self.0);
        letters.waiting.push(letter);
        let alarm = letters.alarm.clone();
        drop(letters);
        alarm.iter().for_each(Wake::wake_by_ref);
    }

    pub(super) fn take(&self) -> Vec<Letter> {
        std::mem::take(&mut lock(&self.0).waiting)
    }

    pub(super) fn set_alarm(&self, alarm: Option<Arc<Alarm<Worker>>>) {
        lock(&self.0).alarm = alarm;
    }
}
