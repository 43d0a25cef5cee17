//! Engines of other crates: one for each remote disk that an I/O thread serves.

#![forbid(unsafe_code)]

use std::os::fd::RawFd;
use std::sync::Arc;

use egret_event_loop::Nanos;

use super::{Engine, SharedEngine};
use crate::disk::{Backing, Disk};
use crate::error::EngineError;
use crate::job::Job;
use crate::options::RemoteKind;
use crate::remote::RemoteDisk;
use crate::stats::EngineCounters;

/// Gives each job to its disk's own engine.
pub(crate) struct Remotes {
    served: Vec<Option<Served>>,
    /// Places in `served`, by slot.
    places: Vec<usize>,
    /// Engines whose disks have left. They go with the next submission, or before the loop sleeps, when it watches their
    /// descriptors no more: a number that is free again must not be taken for one that is watched.
    left: Vec<Served>,
    counters: Arc<EngineCounters>,
}

/// A disk that has a slot, or several: each queue has one.
struct Served {
    disk: RemoteDisk,
    engine: Box<dyn Engine>,
    slots: usize,
    /// Pushed and not submitted.
    fresh: u64,
}

impl Remotes {
    pub(crate) fn new(counters: Arc<EngineCounters>) -> Self {
        Self { served: Vec::new(), places: Vec::new(), left: Vec::new(), counters }
    }

    fn engines(&mut self) -> impl Iterator<Item = &mut Box<dyn Engine>> {
        self.served.iter_mut().flatten().map(|served| &mut served.engine)
    }
}

impl Engine for Remotes {
    fn push(&mut self, job: Box<Job>) {
        let served = self.served[self.places[job.slot as usize]].as_mut().expect("a job is for an attached disk");
        served.fresh += 1;
        served.engine.push(job);
    }

    fn submit(&mut self, now: Nanos) {
        self.left.clear();
        for Served { engine, fresh, .. } in self.served.iter_mut().flatten() {
            engine.submit(now);
            if *fresh > 0 {
                self.counters.batch(std::mem::take(fresh));
            }
        }
    }

    fn has_completions(&mut self) -> bool {
        self.engines().any(|engine| engine.has_completions())
    }

    fn reap(&mut self, now: Nanos, done: &mut dyn FnMut(Box<Job>)) {
        self.engines().for_each(|engine| engine.reap(now, done));
    }

    fn deadline(&self) -> Option<Nanos> {
        // Who spins submits nothing, and those that have left would stay for as long.
        let leaving = (!self.left.is_empty()).then_some(Nanos::ZERO);
        self.served.iter().flatten().filter_map(|served| served.engine.deadline()).chain(leaving).min()
    }

    fn arm(&mut self) -> bool {
        // What is announced to one that nobody watches is heard by nobody, and its image stays open.
        self.left.clear();
        self.engines().all(|engine| engine.arm())
    }

    fn suppress(&mut self) {
        self.engines().for_each(|engine| engine.suppress());
    }

    fn end(self: Box<Self>, left: &mut dyn FnMut(Box<Job>)) {
        self.served.into_iter().flatten().for_each(|served| served.engine.end(left));
    }
}

impl SharedEngine for Remotes {
    fn attach(&mut self, slot: u32, disk: &Arc<Disk>) -> Result<(), EngineError> {
        let Backing::Remote(disk) = &disk.backing else { return Ok(()) };
        let is_it = |served: &Option<Served>| served.as_ref().is_some_and(|served| served.disk.is(disk));
        let place = match self.served.iter().position(is_it) {
            Some(place) => place,
            None => {
                // One that is about to leave stays, for an image of a cluster may have no second. A server's disk that is opened
                // anew has a connection of its own.
                let is_it = |left: &Served| match disk.kind() {
                    RemoteKind::Nbd => left.disk.is(disk),
                    RemoteKind::Rbd => left.disk == *disk,
                };
                let new = match self.left.iter().position(|left| is_it(left) && !left.disk.is_lost()) {
                    Some(left) => self.left.swap_remove(left),
                    None => Served { disk: disk.clone(), engine: disk.engine()?, slots: 0, fresh: 0 },
                };
                let place = self.served.iter().position(Option::is_none).unwrap_or(self.served.len());
                self.served.resize_with(self.served.len().max(place + 1), || None);
                self.served[place] = Some(new);
                place
            }
        };
        self.served[place].iter_mut().for_each(|served| served.slots += 1);
        let slot = slot as usize;
        self.places.resize(self.places.len().max(slot + 1), usize::MAX);
        self.places[slot] = place;
        Ok(())
    }

    fn detach(&mut self, slot: u32) {
        let place = std::mem::replace(&mut self.places[slot as usize], usize::MAX);
        let Some(served) = &mut self.served[place] else { return };
        served.slots -= 1;
        if served.slots == 0 {
            self.left.extend(self.served[place].take());
        }
    }

    fn announced_on(&mut self, fd: RawFd) {
        self.engines().filter(|engine| engine.descriptor() == Some(fd)).for_each(|engine| engine.announced());
    }

    fn descriptors(&self, all: &mut Vec<RawFd>) {
        all.extend(self.served.iter().flatten().filter_map(|served| served.engine.descriptor()));
    }
}
