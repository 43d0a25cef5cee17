//! A lane: the clients of one export that one I/O thread serves.
//!
//! Its descriptor is an epoll instance with all their sockets, watched edge by edge, so that one system call tells which
//! of them have something to do. Data goes through memory of the lane's own.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::task::Wake;

use egret_disk::{
    Action, Completion, Disk, DiskSlot, Ended, EngineSet, Failure, Op, PartOf, Request, RequestToken, Slab,
};
use egret_event_loop::{LoopHandle, Nanos, SourceId};
use egret_vring::memory::{Buffers, Lent};
use rustix::event::Timespec;
use rustix::event::epoll::{CreateFlags, Event, EventData, add, create, wait};
use rustix::io::Errno;

use super::client::{Client, INTEREST, NewClient, Ran};
use super::extents::{Queries, Query};
use super::inbox::{Inbox, Letter};
use super::pool::Pool;
use crate::alarm::Alarm;
use crate::peer_log::PeerLog;
use crate::source::Worker;
use crate::stats::QueueCounters;

/// What is done in one turn of what there is to take in, and likewise to send, in bytes; the loop's other sources wait
/// meanwhile.
const TURN_BYTES: usize = 1 << 20;
/// Sockets of which one turn hears. They may be ready again as fast as it is told of them.
const EVENTS: usize = 32;
/// Clients that one lane serves at most: each may have 256 requests in flight, and a request's number has 16 bits.
pub(super) const MOST_CLIENTS: usize = 255;

/// A client, while it is on its lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientId {
    index: u32,
    generation: u32,
}

impl ClientId {
    pub(super) const fn key(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }
}

/// What an export allows its clients, and what it calls itself.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub(crate) export: Arc<str>,
    pub(crate) writable: bool,
    /// Writes complete when they are stable.
    pub(crate) writethrough: bool,
}

/// See the module's description.
pub(crate) struct Lane {
    clients: Vec<Option<Client>>,
    generations: u32,
    /// Clients that have something to do.
    runnable: VecDeque<u32>,
    /// Clients that have something to send.
    senders: VecDeque<u32>,
    epoll: OwnedFd,
    home: Option<LoopHandle<Worker>>,
    alarm: Option<Arc<Alarm<Worker>>>,
    /// The inbox is to be looked at, though the alarm has not rung.
    looks: bool,
    is_stopped: bool,
    /// More sockets may be ready than it has heard of.
    hears_more: bool,
    core: Core,
}

/// What clients share.
pub(super) struct Core {
    pub(super) terms: Terms,
    pub(super) log: Arc<PeerLog>,
    pub(super) disk: Arc<Disk>,
    slot: Option<DiskSlot>,
    source: u32,
    parts: Slab<Part>,
    pub(super) pool: Pool,
    pub(super) counters: Arc<QueueCounters>,
    pub(super) queries: Arc<Queries>,
    pub(super) inbox: Arc<Inbox>,
    /// Requests of all clients that are not answered yet.
    pub(super) requests: u64,
    /// Flushes that follow what has ended, by client and command: a completion has no engines at hand. Their clients have
    /// them in flight already, and so stay where they are.
    flushes: Vec<(ClientId, u32)>,
}

/// A part of a client's request, while an engine has it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    client: u32,
    pub(super) command: u32,
    pub(super) offset: u64,
    pub(super) len: u32,
}

impl Core {
    /// Gives a part of a client's request to the engines.
    pub(super) fn push(
        &mut self,
        engines: &mut EngineSet,
        (client, command): (ClientId, u32),
        op: Op,
        bytes: Range<u64>,
        buffers: Buffers,
        part: PartOf,
    ) {
        let Some(slot) = self.slot else { return };
        let (offset, len) = (bytes.start, bytes.end - bytes.start);
        let place = self.parts.insert(Part { client: client.index, command, offset, len: len as u32 });
        let token = RequestToken::new(self.source, place as u16);
        engines.push_part(slot, Request { op, offset, len, buffers: Lent::of_pages(buffers), token }, part);
    }

    /// Asks the export's thread what is allocated.
    pub(super) fn ask_extents(&self, client: ClientId, command: u32, offset: u64, len: u64, one: bool) {
        let (inbox, disk) = (Arc::clone(&self.inbox), Arc::clone(&self.disk));
        self.queries.ask(Query { inbox, client, command, disk, offset, len, one });
    }

    /// Has what a request has written made stable, at the next dispatch.
    pub(super) fn flush_later(&mut self, client: ClientId, command: u32) {
        self.flushes.push((client, command));
    }

    pub(super) fn count_requests(&mut self, change: i64) {
        self.requests = self.requests.wrapping_add_signed(change);
        self.counters.in_flight.set(self.requests);
    }
}

impl Lane {
    /// # Errors
    ///
    /// No descriptor left, or a kernel without `epoll_pwait2` (Linux 5.11).
    pub(super) fn new(
        terms: Terms,
        log: Arc<PeerLog>,
        disk: Arc<Disk>,
        counters: Arc<QueueCounters>,
        queries: Arc<Queries>,
        inbox: Arc<Inbox>,
    ) -> io::Result<Self> {
        let mut new = Self {
            clients: Vec::new(),
            generations: 0,
            runnable: VecDeque::new(),
            senders: VecDeque::new(),
            epoll: create(CreateFlags::CLOEXEC)?,
            home: None,
            alarm: None,
            looks: true,
            is_stopped: false,
            hears_more: false,
            core: Core {
                terms,
                log,
                disk,
                slot: None,
                source: 0,
                parts: Slab::default(),
                pool: Pool::default(),
                counters,
                queries,
                inbox,
                requests: 0,
                flushes: Vec::new(),
            },
        };
        new.ask_sockets()?;
        Ok(new)
    }

    pub(crate) fn set_home(&mut self, home: LoopHandle<Worker>) {
        self.home = Some(home);
    }

    /// Has another disk, which the engines have at `slot`; returns where the old one was.
    pub(crate) fn replace_disk(&mut self, disk: Arc<Disk>, slot: DiskSlot) -> Option<DiskSlot> {
        self.core.disk = disk;
        self.core.slot.replace(slot)
    }

    pub(crate) fn attached(&mut self, id: SourceId, engines: &mut EngineSet) -> io::Result<()> {
        self.core.slot = Some(engines.attach(&self.core.disk).map_err(io::Error::other)?);
        self.core.source = id.index();
        self.alarm = self.home.clone().map(|home| Alarm::new(home, id));
        self.core.inbox.set_alarm(self.alarm.clone());
        self.looks = true;
        self.resume(engines);
        Ok(())
    }

    pub(crate) fn detached(&mut self, engines: &mut EngineSet) {
        self.core.inbox.set_alarm(None);
        self.alarm = None;
        if let Some(slot) = self.core.slot.take() {
            engines.detach(slot);
        }
    }

    pub(crate) fn poll(&self) -> bool {
        let has_to_end = !self.core.flushes.is_empty() || !self.senders.is_empty();
        has_to_end || self.hears_more || !self.is_stopped && !self.runnable.is_empty()
    }

    pub(crate) fn dispatch(&mut self, engines: &mut EngineSet, now: Nanos) {
        if std::mem::take(&mut self.looks) | self.alarm.as_ref().is_some_and(|alarm| alarm.answer()) {
            self.read_letters();
        }
        if let Err(e) = self.ask_sockets() {
            self.core.log.warn(format_args!("cannot wait for clients: {e}"));
        }
        // A lane that is stopped does them, too: they are the ends of what has begun, and this disk has to have them.
        while let Some(of) = self.core.flushes.pop() {
            self.core.push(engines, of, Op::Flush, 0..0, Buffers::default(), PartOf::all(0));
        }
        if self.is_stopped {
            return;
        }
        let mut left = TURN_BYTES;
        // Each once: who has more to do is last in line.
        for _ in 0..self.runnable.len() {
            if left == 0 {
                break;
            }
            let Some(index) = self.runnable.pop_front() else { break };
            let Some(client) = self.clients[index as usize].as_mut() else { continue };
            client.is_runnable = false;
            let before = client.work;
            match client.run(&mut self.core, engines, now) {
                Ran::More => self.make_runnable(index),
                Ran::Waits => {}
                Ran::Ends(why) => self.end(index, why),
            }
            let after = self.clients[index as usize].as_ref().map_or(before, |client| client.work);
            left = left.saturating_sub((after - before) as usize);
            self.will_send(index);
        }
    }

    pub(crate) fn complete(&mut self, Ended { completion, failed }: Ended, now: Nanos) -> bool {
        let Completion { token, result, buffers } = completion;
        let Some(part) = self.core.parts.remove(token.slot().into()) else { return false };
        if let Some(failed) = failed {
            let (export, op, errno) = (Arc::clone(&self.core.terms.export), failed.op, failed.errno);
            let has_lost_writes = self.core.disk.has_lost_writes();
            self.core.disk.note_failure(Failure { export, op, errno, action: Action::Report, has_lost_writes });
        }
        if let Some(client) = self.clients[part.client as usize].as_mut()
            && let Err(why) = client.complete(&mut self.core, part, result, buffers.into_pages(), now)
        {
            self.end(part.client, why);
        }
        self.went_on(part.client);
        !self.runnable.is_empty() || !self.core.flushes.is_empty()
    }

    /// Something of a client's has ended, which may let it take more in, or go.
    fn went_on(&mut self, index: u32) {
        let Some(client) = self.clients[index as usize].as_mut() else { return };
        if client.is_gone() {
            return self.remove(index);
        }
        let was_held_up = std::mem::take(&mut client.is_held_up);
        if was_held_up {
            self.make_runnable(index);
        }
        self.will_send(index);
    }

    pub(crate) fn notify(&mut self) {
        let mut left = TURN_BYTES;
        for _ in 0..self.senders.len() {
            // Who is left is first in the next turn.
            if left == 0 {
                break;
            }
            let Some(index) = self.senders.pop_front() else { break };
            let Some(client) = self.clients[index as usize].as_mut() else { continue };
            client.is_sender = false;
            let sent = client.send(&mut self.core, &mut left);
            match sent.and_then(|goes_on| client.ask_for_room(&self.epoll).map(|()| goes_on)) {
                Ok(true) => self.make_runnable(index),
                Ok(false) => {}
                Err(why) => self.end(index, why),
            }
            self.will_send(index);
            if self.clients[index as usize].as_ref().is_some_and(Client::is_gone) {
                self.remove(index);
            }
        }
        // The loop may not look at it by itself: what has ended is no reason to.
        if !self.senders.is_empty()
            && let Some(alarm) = &self.alarm
        {
            alarm.wake_by_ref();
        }
    }

    pub(crate) fn stop(&mut self, engines: &mut EngineSet) {
        self.is_stopped = true;
        if let Some(slot) = self.core.slot {
            engines.disable_limits(slot);
        }
    }

    pub(crate) fn resume(&mut self, engines: &mut EngineSet) {
        self.is_stopped = false;
        if let Some(slot) = self.core.slot {
            engines.enable_limits(slot);
        }
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.core.parts.is_empty() && self.core.flushes.is_empty() && self.senders.is_empty()
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    #[cold]
    fn read_letters(&mut self) {
        for letter in self.core.inbox.take() {
            match letter {
                Letter::Client(client) => self.add(*client),
                Letter::Extents { client, command, extents } => {
                    let found = self.clients.get_mut(client.index as usize).and_then(Option::as_mut);
                    if let Some(found) = found.filter(|found| found.id == client) {
                        found.tell_extents(&mut self.core, command, &extents);
                        self.went_on(client.index);
                    }
                }
            }
        }
    }

    fn add(&mut self, new: NewClient) {
        let index = self.clients.iter().position(Option::is_none).unwrap_or(self.clients.len());
        if index >= MOST_CLIENTS {
            return self.core.log.warn(format_args!("a client is sent away: {MOST_CLIENTS} are on its I/O thread"));
        }
        self.generations += 1;
        let id = ClientId { index: index as u32, generation: self.generations };
        if let Err(e) = add(&self.epoll, &new.channel, EventData::new_u64(id.key()), INTEREST) {
            return self.core.log.warn(format_args!("a client is sent away: cannot wait for it: {e}"));
        }
        self.clients.resize_with(self.clients.len().max(index + 1), || None);
        self.clients[index] = Some(Client::new(id, new));
        self.make_runnable(id.index);
    }

    /// Learns which sockets have become ready.
    fn ask_sockets(&mut self) -> io::Result<()> {
        let mut room = [const { MaybeUninit::<Event>::uninit() }; EVENTS];
        self.hears_more = false;
        let events = match wait(&self.epoll, &mut room, Some(&Timespec::default())) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => {
                self.hears_more = true;
                return Ok(());
            }
            Err(e) => return Err(e.into()),
        };
        self.hears_more = events.len() == EVENTS;
        for &mut Event { data, flags } in events {
            let index = data.u64() as u32;
            let client = self.clients.get_mut(index as usize).and_then(Option::as_mut);
            let Some(client) = client.filter(|client| client.id.key() == data.u64()) else { continue };
            let can_send = client.note(flags);
            self.make_runnable(index);
            if can_send {
                self.will_send(index);
            }
        }
        Ok(())
    }

    fn make_runnable(&mut self, index: u32) {
        if let Some(client) = self.clients[index as usize].as_mut()
            && !std::mem::replace(&mut client.is_runnable, true)
        {
            self.runnable.push_back(index);
        }
    }

    fn will_send(&mut self, index: u32) {
        if let Some(client) = self.clients[index as usize].as_mut()
            && client.has_output()
            && !std::mem::replace(&mut client.is_sender, true)
        {
            self.senders.push_back(index);
        }
    }

    /// Hangs up on a client, for a reason if it gave one. What an engine has of it comes back to nobody.
    #[cold]
    fn end(&mut self, index: u32, why: Option<String>) {
        let Some(client) = self.clients[index as usize].as_mut() else { return };
        match why {
            Some(why) => self.core.log.warn(format_args!("a client's connection is ended: {why}")),
            None => self.core.log.info(format_args!("a client left")),
        }
        client.hang_up(&mut self.core);
        if client.is_gone() {
            self.remove(index);
        }
    }

    fn remove(&mut self, index: u32) {
        if let Some(mut client) = self.clients[index as usize].take() {
            if client.is_connected() {
                self.core.log.info(format_args!("a client left"));
            }
            client.hang_up(&mut self.core);
        }
        if self.clients.iter().all(Option::is_none) {
            self.core.pool.clear();
        }
    }
}

#[cfg(test)]
mod tests;
