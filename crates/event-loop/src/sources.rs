//! The sources of a loop: a table, and lists of those that have something to do.
//!
//! The lists are emptied, never dropped, and are as long as there are sources at most: a turn allocates nothing.

use std::os::fd::RawFd;

use egret_polling::{Idleness, Nanos};

use crate::entry::{Entry, GENERATIONS};
use crate::{Signals, Source, SourceId};

/// See the module's description. Sources are known by their index in the table here, and lists hold those.
pub(crate) struct Sources<S: Source> {
    pub(crate) entries: Vec<Option<Entry<S>>>,
    vacant: Vec<u32>,
    next_generation: u32,
    /// Looked at in every turn; the others are left to the monitor.
    pub(crate) active: Vec<u32>,
    /// Dispatched in this turn.
    pub(crate) ready: Vec<u32>,
    /// Dispatched or completed in this turn: they notify at its end.
    pub(crate) touched: Vec<u32>,
}

impl<S: Source> Sources<S> {
    pub(crate) const fn new() -> Self {
        Self {
            entries: Vec::new(),
            vacant: Vec::new(),
            next_generation: 0,
            active: Vec::new(),
            ready: Vec::new(),
            touched: Vec::new(),
        }
    }

    /// A name for a source that is to be [inserted](Self::insert), or whose place is [given back](Self::give_back).
    pub(crate) fn reserve(&mut self) -> SourceId {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.entries.push(None);
            (self.entries.len() - 1) as u32
        });
        self.next_generation = (self.next_generation + 1) % GENERATIONS;
        SourceId { index, generation: self.next_generation }
    }

    pub(crate) fn give_back(&mut self, id: SourceId) {
        self.vacant.push(id.index);
    }

    pub(crate) fn insert(&mut self, id: SourceId, source: S, fd: Option<RawFd>, now: Nanos) {
        self.entries[id.index as usize] = Some(Entry {
            source,
            fd,
            generation: id.generation,
            active: false,
            armed: false,
            may_ring: true,
            ready: false,
            touched: false,
            last_event: now,
            timer: None,
            drained: None,
        });
    }

    /// Takes a source out, and off the lists that may outlast the turn.
    pub(crate) fn remove(&mut self, SourceId { index, generation }: SourceId) -> Option<Entry<S>> {
        let is_it = |entry: &mut Entry<S>| entry.generation == generation;
        let entry = self.entries.get_mut(index as usize)?.take_if(is_it)?;
        self.active.retain(|&other| other != index);
        self.ready.retain(|&other| other != index);
        self.vacant.push(index);
        Some(entry)
    }

    pub(crate) fn get(&mut self, id: SourceId) -> Option<&mut Entry<S>> {
        let entry = self.entries.get_mut(id.index as usize)?.as_mut()?;
        (entry.generation == id.generation).then_some(entry)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &S> {
        self.entries.iter().flatten().map(|entry| &entry.source)
    }

    /// The active ones, and whether they are ready.
    pub(crate) fn active(&self) -> impl Iterator<Item = (u32, bool)> {
        self.active.iter().filter_map(|&index| Some((index, self.entries[index as usize].as_ref()?.ready)))
    }

    /// Has a source dispatched; it becomes active only if there is work, or a hundred idle disks that have just been
    /// connected would be looked at every turn.
    pub(crate) fn mark_ready(&mut self, index: u32) {
        let Some(entry) = &mut self.entries[index as usize] else { return };
        entry.mark_ready(index, &mut self.active, &mut self.ready);
    }

    /// Likewise one of which the monitor has told.
    pub(crate) fn mark_reported(&mut self, index: u32) {
        let Some(entry) = &mut self.entries[index as usize] else { return };
        entry.mark_reported(index, &mut self.active, &mut self.ready);
    }

    pub(crate) fn touch(&mut self, index: u32) {
        let Some(entry) = &mut self.entries[index as usize] else { return };
        entry.touch(index, &mut self.touched);
    }

    /// Looks at the active ones, and returns how many have got something to do.
    pub(crate) fn poll(&mut self) -> u64 {
        let Self { entries, active, ready, .. } = self;
        let mut found = 0;
        for &index in &*active {
            let Some(entry) = &mut entries[index as usize] else { continue };
            if !entry.ready && entry.source.poll() {
                entry.ready = true;
                ready.push(index);
                found += 1;
            }
        }
        found
    }

    /// The active ones' events need not show on their descriptors: they are looked at.
    pub(crate) fn suppress(&mut self) {
        let Self { entries, active, .. } = self;
        for &index in &*active {
            if let Some(entry) = &mut entries[index as usize] {
                entry.suppress();
            }
        }
    }

    /// Has the active ones' events show on their descriptors. Those that have something to do by then are ready.
    pub(crate) fn arm(&mut self) {
        let Self { entries, active, ready, .. } = self;
        for &index in &*active {
            let Some(entry) = &mut entries[index as usize] else { continue };
            if !entry.arm() && !entry.ready {
                entry.ready = true;
                ready.push(index);
            }
        }
    }

    /// Leaves those to the monitor that have had no event for so long, so that a turn costs what the active ones cost.
    pub(crate) fn demote_idle(&mut self, now: Nanos, idleness: &Idleness) {
        let Self { entries, active, .. } = self;
        active.retain(|&index| {
            let Some(entry) = &mut entries[index as usize] else { return false };
            let stays = !idleness.is_idle(entry.last_event, now) || !entry.arm();
            if !stays {
                entry.active = false;
            }
            stays
        });
    }

    /// Has each that was touched notify; says whether one is drained that was to do something then.
    pub(crate) fn notify(&mut self, signals: &mut Signals) -> bool {
        let Self { entries, touched, .. } = self;
        let mut drained = false;
        for &index in &*touched {
            let Some(entry) = &mut entries[index as usize] else { continue };
            entry.touched = false;
            entry.source.notify(signals);
            drained |= entry.drained.is_some() && entry.source.is_drained();
        }
        drained
    }
}
