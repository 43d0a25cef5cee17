//! The engines of one I/O thread, each made when a disk first needs it.

use egret_event_loop::ring::{Ring, RingError};

use super::options::EngineOptions;
use crate::engine::{Native, Null, Remotes, SharedEngine, Threads, Uring};
use crate::engine_kind::EngineKind;
use crate::error::EngineError;
use crate::job::Job;
use crate::options::Aio;
use crate::stats::Counters;

/// See the module's description.
pub(super) struct Engines {
    /// By [`EngineKind::index`].
    list: [Option<Box<dyn SharedEngine>>; EngineKind::COUNT],
    /// For an io_uring engine without the loop's ring, made ahead.
    own_ring: Option<Result<Ring, RingError>>,
    options: EngineOptions,
}

impl Engines {
    pub(super) const fn new(options: EngineOptions) -> Self {
        Self { list: [const { None }; EngineKind::COUNT], own_ring: None, options }
    }

    /// See [`EngineSet::make_ring_ahead`](super::EngineSet::make_ring_ahead).
    pub(super) fn make_ring_ahead(&mut self) {
        if self.options.ring.is_none() {
            self.own_ring = Some(Ring::new());
        }
    }

    /// Makes an engine if it is not there yet.
    pub(super) fn make(&mut self, kind: EngineKind, counters: &Counters) -> Result<(), EngineError> {
        let Self { list, own_ring, options } = self;
        let place = &mut list[kind.index()];
        if place.is_some() {
            return Ok(());
        }
        let counters = counters.engine(kind);
        *place = Some(match kind {
            EngineKind::Null => Box::new(Null::new(counters)),
            EngineKind::Remote(_) => Box::new(Remotes::new(counters)),
            EngineKind::Aio(Aio::Threads) => Box::new(Threads::new(options.workers(), counters)?),
            EngineKind::Aio(Aio::Native) => {
                Box::new(Native::new(options.aio_depth.max(1), options.aio_max_batch, counters)?)
            }
            EngineKind::Aio(Aio::IoUring) => match (options.ring.clone(), own_ring.take()) {
                (Some(shared), _) => Box::new(Uring::shared(shared, counters)),
                (None, None) => Box::new(Uring::alone(Ring::new()?, counters)?),
                (None, Some(Ok(own))) => Box::new(Uring::alone(own, counters)?),
                (None, Some(Err(why))) => {
                    *own_ring = Some(Err(why.clone()));
                    return Err(why.into());
                }
            },
        });
        Ok(())
    }

    pub(super) fn get(&mut self, kind: EngineKind) -> Option<&mut Box<dyn SharedEngine>> {
        self.list[kind.index()].as_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &dyn SharedEngine> {
        self.list.iter().flatten().map(|engine| &**engine)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn SharedEngine>> {
        self.list.iter_mut().flatten()
    }

    pub(super) fn set_thread_pool(&mut self, min: u32, max: u32) {
        (self.options.thread_pool_min, self.options.thread_pool_max) = (min, max);
        let limits = self.options.workers();
        self.iter_mut().for_each(|engine| engine.limit_workers(limits));
    }

    pub(super) fn set_aio_max_batch(&mut self, most: u32) {
        self.options.aio_max_batch = most;
        self.iter_mut().for_each(|engine| engine.limit_batch(most));
    }

    /// Ends all of them, and waits until none touches a job's memory; those that the kernel had are given to `left`.
    pub(super) fn end(&mut self, left: &mut dyn FnMut(Box<Job>)) {
        // The workers last: they may be waiting for a write of the others to leave a disk's block range lock.
        for kind in EngineKind::ALL.into_iter().filter(|kind| kind.runs_in_kernel()) {
            if let Some(engine) = self.list[kind.index()].take() {
                engine.end(left);
            }
        }
        self.list = [const { None }; EngineKind::COUNT];
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;
    use crate::EngineSet;

    #[test]
    fn engines_that_are_made_later_have_what_was_set_before() {
        let mut engines = EngineSet::new(EngineOptions::default());
        engines.set_thread_pool(2, 3);
        engines.set_aio_max_batch(5);
        let EngineOptions { thread_pool_min, thread_pool_max, aio_max_batch, .. } = engines.engines.options;
        assert_eq!((thread_pool_min, thread_pool_max, aio_max_batch), (2, 3, 5));
        assert!(engines.engines.own_ring.is_none());
        engines.make_ring_ahead();
        assert!(engines.engines.own_ring.is_some());
    }

    #[test]
    fn a_ring_is_made_ahead_and_used_where_the_loop_lends_none() {
        let ring = Rc::new(RefCell::new(Ring::new().unwrap()));
        for (ring, is_made) in [(None, true), (Some(ring), false)] {
            let mut engines = Engines::new(EngineOptions { ring, ..EngineOptions::default() });
            engines.make_ring_ahead();
            assert_eq!(engines.own_ring.is_some(), is_made);
            engines.make(EngineKind::Aio(Aio::IoUring), &Counters::default()).unwrap();
            assert!(engines.own_ring.is_none() && engines.get(EngineKind::Aio(Aio::IoUring)).is_some());
        }
    }
}
