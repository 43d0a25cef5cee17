//! What is allocated of a disk: looked up on the export's own thread, because a file system may take its time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use egret_disk::{Disk, Extent};
use egret_event_loop::EventNotifier;

use super::inbox::{Inbox, Letter};
use super::lane::ClientId;
use crate::queues::lock;

/// The most extents that one reply tells.
pub(super) const MOST: usize = 1024;

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

impl Query {
    fn is_of(&self, inbox: &Arc<Inbox>, client: ClientId) -> bool {
        self.client == client && Arc::ptr_eq(&self.inbox, inbox)
    }
}

/// Questions that are to be answered: in turns of those who ask, and each one's in their order.
pub(super) struct Queries {
    /// Of each client that has any, never none.
    waiting: Mutex<VecDeque<VecDeque<Query>>>,
    is_answering: Arc<AtomicBool>,
    bell: EventNotifier,
}

impl Queries {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self { waiting: Mutex::default(), is_answering: Arc::default(), bell: EventNotifier::new()? })
    }

    /// Whether one is being answered, though whoever has asked may be gone.
    pub(super) fn is_answering(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_answering)
    }

    /// Readable when there are some.
    pub(super) const fn bell(&self) -> &EventNotifier {
        &self.bell
    }

    pub(super) fn ask(&self, query: Query) {
        let mut waiting = lock(&self.waiting);
        match waiting.iter_mut().find(|of_one| of_one[0].is_of(&query.inbox, query.client)) {
            Some(of_one) => of_one.push_back(query),
            None => waiting.push_back(VecDeque::from([query])),
        }
        drop(waiting);
        self.bell.set();
    }

    /// Answers the next, if there is one.
    pub(super) fn answer(&self) -> bool {
        let Some(query) = self.next() else { return false };
        let Query { inbox, client, command, disk, offset, len, one } = query;
        let extents: Vec<Extent> = disk.extents(offset..offset + len, if one { 1 } else { MOST });
        self.is_answering.store(false, Ordering::Release);
        inbox.post(Letter::Extents { client, command, extents });
        true
    }

    fn next(&self) -> Option<Query> {
        let mut waiting = lock(&self.waiting);
        let mut of_one = waiting.pop_front()?;
        let query = of_one.pop_front()?;
        if !of_one.is_empty() {
            waiting.push_back(of_one);
        }
        // Under the lock: a client that has gone has either taken it back, or it is seen by now.
        self.is_answering.store(true, Ordering::Release);
        Some(query)
    }

    /// Forgets those of a client that has gone, so that no more wait than those who are here may ask.
    pub(super) fn forget(&self, inbox: &Arc<Inbox>, client: ClientId) {
        lock(&self.waiting).retain(|of_one| !of_one[0].is_of(inbox, client));
    }

    /// Whom they are of, in the order in which they are answered.
    #[cfg(test)]
    pub(super) fn in_order(&self) -> Vec<ClientId> {
        std::iter::from_fn(|| self.next()).map(|query| query.client).collect()
    }
}
