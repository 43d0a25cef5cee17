//! Whose turn it is in a group.
//!
//! Requests that wait are known here by tickets: how large each is, and on which queue (one disk's requests on one I/O
//! thread's queue) it waits. As soon as the buckets have room tickets are granted, one disk after the other, so that of
//! two disks with something to do neither gets more for having more of it waiting; and one direction after the other,
//! as far as both are limited. Among the tickets of one disk the oldest is the first.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use egret_event_loop::Nanos;

use super::buckets::{Buckets, Direction};
use super::limits::Limits;

/// A disk of the group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DiskId(u64);

/// Where requests of a disk wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueueId(u64);

/// For reads and for writes.
pub(super) type ByDirection<T> = [T; 2];

struct Ticket {
    queue: QueueId,
    bytes: u64,
}

/// The order in which the requests of a group begin. Time is passed in and nothing waits here.
pub(super) struct Schedule {
    limits: Limits,
    buckets: Buckets,
    disks: BTreeMap<DiskId, ByDirection<VecDeque<Ticket>>>,
    /// What was granted and not yet taken.
    granted: BTreeMap<QueueId, ByDirection<usize>>,
    /// The disk and the direction that had the last turn.
    last: ByDirection<DiskId>,
    last_direction: Direction,
    next_id: u64,
}

impl Schedule {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            limits,
            buckets: Buckets::new(&limits),
            disks: BTreeMap::new(),
            granted: BTreeMap::new(),
            last: ByDirection::default(),
            last_direction: Direction::Write,
            next_id: 1,
        }
    }

    pub(super) const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Sets limits and empties the buckets; tickets stay.
    pub(super) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        self.buckets = Buckets::new(&limits);
    }

    pub(super) fn join(&mut self) -> DiskId {
        let id = DiskId(self.new_id());
        self.disks.insert(id, ByDirection::default());
        id
    }

    /// How many disks have joined and not left.
    #[cfg(test)]
    pub(super) fn members(&self) -> usize {
        self.disks.len()
    }

    pub(super) fn leave(&mut self, disk: DiskId) {
        self.disks.remove(&disk);
    }

    pub(super) fn open(&mut self) -> QueueId {
        let id = QueueId(self.new_id());
        self.granted.insert(id, ByDirection::default());
        id
    }

    /// A queue's requests that have not been granted are not going to begin here: it has no tickets any more.
    pub(super) fn forget(&mut self, disk: DiskId, queue: QueueId) {
        let tickets = self.disks.get_mut(&disk).into_iter().flatten();
        tickets.for_each(|tickets| tickets.retain(|ticket| ticket.queue != queue));
    }

    /// A queue's requests begin without having been granted: they count nevertheless, and it has no tickets any more.
    pub(super) fn close(&mut self, disk: DiskId, queue: QueueId) {
        let Self { disks, buckets, .. } = self;
        for direction in Direction::BOTH {
            let Some(tickets) = disks.get_mut(&disk).map(|disk| &mut disk[direction as usize]) else { continue };
            tickets.retain(|ticket| {
                let stays = ticket.queue != queue;
                if !stays {
                    buckets.account(direction, ticket.bytes);
                }
                stays
            });
        }
        self.granted.remove(&queue);
    }

    /// A request waits from here on.
    pub(super) fn ask(&mut self, disk: DiskId, queue: QueueId, direction: Direction, bytes: u64) {
        if let Some(disk) = self.disks.get_mut(&disk) {
            disk[direction as usize].push_back(Ticket { queue, bytes });
        }
    }

    /// Grants what there is room for.
    pub(super) fn grant(&mut self, now: Nanos) {
        self.buckets.leak(now);
        loop {
            let order = [self.last_direction.other(), self.last_direction];
            let next = { order }.into_iter().find_map(|direction| {
                let disk = self.next_disk(direction)?;
                (self.buckets.wait(direction) == Nanos::ZERO).then_some((direction, disk))
            });
            let Some((direction, disk)) = next else { return };
            let ticket = self.disks.get_mut(&disk).and_then(|disk| disk[direction as usize].pop_front());
            let Some(Ticket { queue, bytes }) = ticket else { return };
            self.buckets.account(direction, bytes);
            self.last[direction as usize] = disk;
            self.last_direction = direction;
            if let Some(granted) = self.granted.get_mut(&queue) {
                granted[direction as usize] += 1;
            }
        }
    }

    /// How many of its oldest requests in each direction a queue may begin now.
    pub(super) fn take(&mut self, queue: QueueId) -> ByDirection<usize> {
        self.granted.get_mut(&queue).map(std::mem::take).unwrap_or_default()
    }

    /// When [`grant`](Self::grant) is worth another call, to one who waits in this direction. It may turn out to have
    /// been too early, when others had their turn meanwhile, but never too late: what is granted only fills buckets.
    pub(super) fn next(&mut self, direction: Direction, now: Nanos) -> Nanos {
        now + self.buckets.wait(direction)
    }

    /// The first disk after the one that had the last turn which has requests that wait.
    fn next_disk(&self, direction: Direction) -> Option<DiskId> {
        let last = self.last[direction as usize];
        let after = self.disks.range((Bound::Excluded(last), Bound::Unbounded));
        let waits = |(_, tickets): &(_, &ByDirection<VecDeque<_>>)| !tickets[direction as usize].is_empty();
        after.chain(self.disks.range(..=last)).find(waits).map(|(disk, _)| *disk)
    }

    const fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

#[cfg(test)]
mod tests;
