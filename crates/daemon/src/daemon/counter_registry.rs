//! The counters of everything that runs: readers find them here, and ask neither the daemon nor its loops.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use egret_event_loop::{Counter, EventNotifier, LoopCounters, LoopStats, Nanos};
use egret_export::{ErrorHandling, Export, QueueCounters};

use crate::process::sys::thread_cpu_time;

/// The counters of the objects that there are now. The daemon registers an object when it starts, and unregisters it when
/// it goes.
///
/// The lock is between the daemon and readers: no I/O thread takes it.
#[derive(Debug, Default)]
pub struct CounterRegistry {
    watched: Mutex<Arc<Watched>>,
    /// What has each export end.
    stops: Mutex<BTreeMap<String, EventNotifier>>,
}

/// Everything that could be watched at one moment, by its name; the counters go on.
#[derive(Clone, Debug, Default)]
pub struct Watched {
    /// The I/O threads.
    pub io_threads: BTreeMap<String, IoThreadCounters>,
    /// The queues of each export.
    pub exports: BTreeMap<String, Vec<Arc<QueueCounters>>>,
    /// Whether each export is stopped for an error.
    pub errors: BTreeMap<String, Arc<ErrorHandling>>,
}

/// One I/O thread's counters.
#[derive(Clone, Debug)]
pub struct IoThreadCounters {
    /// The number of its thread.
    pub thread_id: i32,
    /// Its loop's.
    pub turns: Arc<LoopCounters>,
    /// Its engines'.
    pub engines: Arc<egret_disk::Counters>,
    /// How often it was found stuck; the watchdog's.
    pub stalls: Arc<Counter>,
}

impl IoThreadCounters {
    /// Where the thread's time has gone.
    pub fn time(&self) -> Time {
        let LoopStats { spin_found, spin_wasted, asleep, .. } = self.turns.read();
        let cpu = thread_cpu_time(self.thread_id).unwrap_or_default();
        Time { cpu, spin_found, spin_wasted, asleep }
    }
}

/// Where an I/O thread's time has gone since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Time {
    /// On a processor, whatever for.
    pub cpu: Nanos,
    /// Spinning, until there was work.
    pub spin_found: Nanos,
    /// Spinning in vain.
    pub spin_wasted: Nanos,
    /// Asleep.
    pub asleep: Nanos,
}

impl CounterRegistry {
    /// What is registered now.
    pub fn read(&self) -> Arc<Watched> {
        Arc::clone(&self.lock())
    }

    /// Has every export end, before any is waited for, and whoever has the daemon meanwhile.
    pub(crate) fn stop_exports(&self) {
        self.stops().values().for_each(EventNotifier::set);
    }

    pub(super) fn register_export(&self, export: &Export) {
        let queues = export.queues().to_vec();
        let mut lock = self.lock();
        let watched = Arc::make_mut(&mut lock);
        watched.exports.insert(export.id().to_owned(), queues);
        watched.errors.insert(export.id().to_owned(), Arc::clone(export.errors()));
        drop(lock);
        self.stops().insert(export.id().to_owned(), export.stop().clone());
    }

    pub(super) fn unregister_export(&self, id: &str) {
        let mut lock = self.lock();
        let watched = Arc::make_mut(&mut lock);
        watched.exports.remove(id);
        watched.errors.remove(id);
        drop(lock);
        self.stops().remove(id);
    }

    pub(super) fn register_io_thread(&self, id: &str, counters: IoThreadCounters) {
        Arc::make_mut(&mut self.lock()).io_threads.insert(id.to_owned(), counters);
    }

    pub(super) fn unregister_io_thread(&self, id: &str) {
        Arc::make_mut(&mut self.lock()).io_threads.remove(id);
    }

    fn lock(&self) -> MutexGuard<'_, Arc<Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stops(&self) -> MutexGuard<'_, BTreeMap<String, EventNotifier>> {
        self.stops.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
