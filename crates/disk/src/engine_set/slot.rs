//! A disk that is attached to the engines of one I/O thread.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use super::page_cache::PageCacheProbe;
use crate::disk::Disk;
use crate::engine_kind::EngineKind;
use crate::throttle::ThrottledSlot;

/// A disk attached to an I/O thread's engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DiskSlot(pub(super) u32);

/// What a slot stands for.
pub(super) struct Attached {
    pub(super) disk: Arc<Disk>,
    pub(super) kind: EngineKind,
    /// Whether workers run some of its requests.
    has_workers: bool,
    pub(super) in_flight: u32,
    /// Detached while it had requests in flight: freed when the last one is reaped.
    pub(super) leaving: bool,
    pub(super) throttled: ThrottledSlot,
    /// Whether its reads are tried on the page cache; none where that never answers.
    pub(super) probe: Option<PageCacheProbe>,
    /// Dropped with the slot, which its receiver waits for.
    pub(super) held: Option<Sender<()>>,
}

impl Attached {
    pub(super) fn new(disk: &Arc<Disk>) -> Self {
        Self {
            disk: Arc::clone(disk),
            kind: EngineKind::of(disk),
            has_workers: EngineKind::of(disk) != EngineKind::THREADS && disk.needs_workers(),
            in_flight: 0,
            leaving: false,
            throttled: ThrottledSlot::default(),
            probe: PageCacheProbe::of(disk),
            held: None,
        }
    }

    /// The engines that run its requests: its own, and worker threads for requests that its own cannot run.
    pub(super) fn engines(&self) -> impl Iterator<Item = EngineKind> + use<> {
        [self.kind].into_iter().chain(self.has_workers.then_some(EngineKind::THREADS))
    }
}
