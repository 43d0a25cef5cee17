//! What is allocated of a disk: looked up on the export's own thread, because a file system may take its time.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use egret_disk::{Disk, Extent};
use egret_event_loop::EventNotifier;

use super::inbox::{Inbox, Letter};
use super::lane::ClientId;
use crate::queues::lock;

/// The most extents that one reply tells.
const MOST: usize = 1024;

/// A question, and whom to answer.
pub(super) struct Query {
    pub(super) inbox: Arc<Inbox>,
    pub(super) client: ClientId,
    pub(super) command: u32,
    pub(super) disk: Arc<Disk>,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// One extent will do.
    pub(super) one: bool,
}

/// Questions that are to be answered, in their order.
pub(super) struct Queries {
    waiting: Mutex<VecDeque<Query>>,
    bell: EventNotifier,
}

impl Queries {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self { waiting: Mutex::default(), bell: EventNotifier::new()? })
    }

    /// Readable when there are some.
    pub(super) const fn bell(&self) -> &EventNotifier {
        &self.bell
    }

    pub(super) fn ask(&self, query: Query) {
        lock(&self.waiting).push_back(query);
        self.bell.set();
    }

    /// Answers the first, if there is one.
    pub(super) fn answer(&self) -> bool {
        let Some(query) = lock(&self.waiting).pop_front() else { return false };
        let Query { inbox, client, command, disk, offset, len, one } = query;
        let extents: Vec<Extent> = disk.extents(offset..offset + len, if one { 1 } else { MOST });
        inbox.post(Letter::Extents { client, command, extents });
        true
    }

    /// Forgets those that nobody waits for any more.
    pub(super) fn clear(&self) {
        lock(&self.waiting).clear();
    }
}
