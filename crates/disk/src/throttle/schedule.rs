//! Whose turn it is in a group.
//!
//! Requests that wait are known here by tickets: what each counts as, and on which queue (one disk's requests on one I/O
//! thread's queue) it waits. As soon as the buckets have room tickets are granted, one disk after the other, so that of
//! two disks with something to do neither gets more for having more of it waiting; and one direction after the other,
//! as far as both are limited. Among the tickets of one disk the oldest is the first.
//!
//! What begins without its turn, because a drain does not wait for limits, is owed by its disk: the tickets stay, and have
//! their turns like those of requests that wait. So nobody but that disk waits for them, and what it does comes to no more
//! in the long run.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::ops::Bound;

use egret_event_loop::Nanos;

use super::buckets::{Buckets, Cost, Direction};
use super::limits::Limits;

/// So many of the turns that are owed are had in one look.
const PAID_AT_A_TIME: usize = 256;

/// A disk of the group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DiskId(u64);

/// Where requests of a disk wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct QueueId(u64);

/// For reads and for writes.
pub(super) type ByDirection<T> = [T; 2];

struct Ticket {
    /// One that is closed has begun what this is for.
    queue: QueueId,
    cost: Cost,
}

/// What a disk waits for and what it owes.
#[derive(Default)]
struct Tickets {
    /// The oldest first.
    of: ByDirection<VecDeque<Ticket>>,
    debt: Debt,
}

/// How many requests of a disk drains have let go that its limits had no room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Debt {
    /// Those that they have no room for yet.
    pub owed: u64,
    /// Those that they have had room for since.
    pub made_up: u64,
}

/// The order in which the requests of a group begin. Time is passed in and nothing waits here.
pub(super) struct Schedule {
    limits: Limits,
    buckets: Buckets,
    disks: BTreeMap<DiskId, Tickets>,
    /// What was granted and not yet taken, of each queue that is open.
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

    /// Sets limits and empties the buckets, and nothing is owed; the tickets of what waits stay.
    pub(super) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        self.buckets = Buckets::new(&limits);
        for disk in self.disks.values_mut() {
            disk.of.iter_mut().for_each(|tickets| tickets.retain(|ticket| self.granted.contains_key(&ticket.queue)));
            disk.debt.made_up += mem::take(&mut disk.debt.owed);
        }
    }

    pub(super) fn join(&mut self) -> DiskId {
        let id = DiskId(self.new_id());
        self.disks.insert(id, Tickets::default());
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
        let tickets = self.disks.get_mut(&disk).into_iter().flat_map(|disk| &mut disk.of);
        tickets.for_each(|tickets| tickets.retain(|ticket| ticket.queue != queue));
    }

    /// The same of some of a queue's requests in one direction, which are asked about from the oldest on.
    pub(super) fn forget_some(
        &mut self,
        disk: DiskId,
        queue: QueueId,
        direction: Direction,
        mut is_forgotten: impl FnMut() -> bool,
    ) {
        if let Some(disk) = self.disks.get_mut(&disk) {
            disk.of[direction as usize].retain(|ticket| ticket.queue != queue || !is_forgotten());
        }
    }

    /// A queue's requests begin without having been granted: of as many as have `asked` and were not [taken](Self::take), its disk
    /// owes the tickets that are left.
    pub(super) fn close(&mut self, disk: DiskId, queue: QueueId, asked: usize) {
        let granted: usize = self.granted.remove(&queue).unwrap_or_default().into_iter().sum();
        if let Some(disk) = self.disks.get_mut(&disk) {
            disk.debt.owed += asked.saturating_sub(granted) as u64;
        }
    }

    /// What a disk owes: requests have begun whose turn is yet to come, or has come and is not [paid](Self::pay).
    pub(super) fn debt(&mut self, disk: DiskId, now: Nanos) -> Debt {
        self.pay(now);
        self.disks.get(&disk).map(|disk| disk.debt).unwrap_or_default()
    }

    /// A request waits from here on.
    pub(super) fn ask(&mut self, disk: DiskId, queue: QueueId, direction: Direction, cost: Cost) {
        if let Some(disk) = self.disks.get_mut(&disk) {
            disk.of[direction as usize].push_back(Ticket { queue, cost });
        }
    }

    /// Grants what there was room for until `now`, as if somebody had looked each time, if anything is owed: nobody waits
    /// for that, and it is to take no more time than what somebody waits for. To be called before more asks, which would
    /// have turns otherwise from before it came. Says whether that is all: others of the group wait meanwhile, who are to have
    /// their turns however much is owed.
    pub(super) fn pay(&mut self, now: Nanos) -> bool {
        for _ in 0..PAID_AT_A_TIME {
            if !self.disks.values().any(|disk| disk.debt.owed > 0) {
                return true;
            }
            let Some(at) = self.next_turn().filter(|at| *at <= now) else { return true };
            self.buckets.leak(at);
            self.grant_next();
        }
        false
    }

    /// When there is room for one of the tickets.
    fn next_turn(&mut self) -> Option<Nanos> {
        let wait = |direction| self.next_disk(direction).map(|_| self.buckets.wait(direction));
        let wait = Direction::BOTH.into_iter().filter_map(wait).min()?;
        Some(self.buckets.leaked() + wait)
    }

    /// Grants what there is room for.
    pub(super) fn grant(&mut self, now: Nanos) {
        self.buckets.leak(now);
        while self.grant_next().is_some() {}
    }

    /// Grants the next ticket, if there is room for it.
    fn grant_next(&mut self) -> Option<()> {
        let order = [self.last_direction.other(), self.last_direction];
        let (direction, disk) = { order }.into_iter().find_map(|direction| {
            let disk = self.next_disk(direction)?;
            (self.buckets.wait(direction) == Nanos::ZERO).then_some((direction, disk))
        })?;
        self.last[direction as usize] = disk;
        self.last_direction = direction;
        let Tickets { of, debt } = self.disks.get_mut(&disk)?;
        let Ticket { queue, cost } = of[direction as usize].pop_front()?;
        self.buckets.account(direction, cost);
        match self.granted.get_mut(&queue) {
            Some(granted) => granted[direction as usize] += 1,
            None => {
                debt.owed -= 1;
                debt.made_up += 1;
            }
        }
        Some(())
    }

    /// How many of its oldest requests in each direction have no tickets any more, and were not [taken](Self::take).
    pub(super) fn granted(&self, queue: QueueId) -> ByDirection<usize> {
        self.granted.get(&queue).copied().unwrap_or_default()
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
        let waits = |(_, disk): &(_, &Tickets)| !disk.of[direction as usize].is_empty();
        after.chain(self.disks.range(..=last)).find(waits).map(|(disk, _)| *disk)
    }

    const fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

#[cfg(test)]
mod tests;
