//! Disks that are replaced under running queues.
//!
//! ```text
//!   who asks             loops, one for each queue
//!   prepare ───────────▶ their engines take the new disks in
//!   stop ──────────────▶ stop, drain ─┐
//!                                     └─ the last one to be drained tells all: the new disks, go on
//!   ◀──────────────────────────────────  how long nobody served them
//! ```
//!
//! All queues of all exports stop, because requests that run side by side on the old disk and on the new would not know
//! of each other: a block that is read, changed and written back keeps other writers out by its disk.

use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};

use egret_disk::{Disk, DiskSlot};
use egret_event_loop::{EventLoop, Nanos, clock};
use egret_virtio::DiskKey;

use crate::export::{DeviceType, Export, ExportError};
use crate::moves::{PATIENCE, Pause, take_in};
use crate::queues::{Queues, RunningQueue, lock};
use crate::source::Worker;

/// A disk, and the one that takes its queue.
#[derive(Clone, Debug)]
pub struct DiskSwap {
    /// What is in use.
    pub old: Arc<Disk>,
    /// What is to be: the same image.
    pub new: Arc<Disk>,
}

/// Gives the queues of `exports`, which must be all that use the old disks, the new ones, at a moment when none of them
/// has a request in flight. Returns the longest time that a queue was not served. What was written through the old ones is
/// made stable by the first flush of the new ones, or by who [lets go](Disk::let_go_of_predecessor) of them. A new one is
/// locked where its old one was, also if nobody has it active: the caller activates it then, and lets it go.
///
/// # Errors
///
/// A loop cannot run one of the new disks, requests in flight do not end, or a queue does not come to start. The old ones stay
/// in use everywhere.
pub fn reopen(exports: &[&Export], disks: &[DiskSwap]) -> Result<Pause, ExportError> {
    // One that stops could still have requests for a disk that is replaced.
    let locked = exports.iter().map(|export| export.shared.lock_when(|queues| queues.stopping == 0));
    let mut locked = locked.collect::<Result<Vec<_>, _>>()?;
    // Sessions may be locking old ones meanwhile, or giving them back; they look again which disks there are.
    for DiskSwap { old, new } in disks {
        let id = || exports.first().map_or_else(String::new, |export| export.id().to_owned());
        new.share_locks_of(old).map_err(|e| ExportError::Disk(id(), e.into()))?;
        new.follow(old);
    }
    let mut swaps = Vec::new();
    for (export, queues) in exports.iter().zip(&locked) {
        let system = |e| ExportError::System(export.id().to_owned(), e);
        let changes = changes(queues, disks);
        for queue in queues.running_queues(export.shared.counts.diskless) {
            if !changes.is_empty() {
                swaps.push(QueueSwap::prepare(queue, &changes).map_err(system)?);
            }
        }
    }
    let busy = || ExportError::Busy(exports.first().map_or_else(String::new, |export| export.id().to_owned()));
    let pause = DrainBarrier::run(swaps).ok_or_else(busy)?;
    for (export, queues) in exports.iter().zip(&mut locked) {
        for (key, disk) in changes(queues, disks) {
            if let DeviceType::Nbd(offer) = &export.device {
                offer.set_disk(&disk);
            }
            for (_, active) in queues.active_disks().filter(|(of, _)| *of == key) {
                active.hand_over(&disk);
            }
            queues.disks[key.0 as usize] = Some(disk);
        }
    }
    Ok(pause)
}

/// What changes for an export: disks, by their keys.
fn changes(queues: &Queues, disks: &[DiskSwap]) -> Vec<(DiskKey, Arc<Disk>)> {
    let new =
        |disk: &Arc<Disk>| disks.iter().find(|swap| Arc::ptr_eq(&swap.old, disk)).map(|swap| Arc::clone(&swap.new));
    queues.disks_by_key().filter_map(|(key, disk)| Some((key, new(disk)?))).collect()
}

/// A queue, and the disks that it is to have, which its loop's engines keep for it until this is dropped.
struct QueueSwap {
    queue: RunningQueue,
    disks: Vec<(DiskKey, Arc<Disk>, DiskSlot)>,
}

impl QueueSwap {
    fn prepare(queue: RunningQueue, changes: &[(DiskKey, Arc<Disk>)]) -> io::Result<Self> {
        let mut new = Self { queue, disks: Vec::new() };
        for (key, disk) in changes {
            let slot = take_in(&new.queue.on, Arc::clone(disk))?;
            new.disks.push((*key, Arc::clone(disk), slot));
        }
        Ok(new)
    }

    /// Gives the worker its disks, and has it go on. Runs on its loop.
    fn take(mut self, target: &mut EventLoop<Worker>) {
        let id = self.queue.id;
        for (key, disk, slot) in std::mem::take(&mut self.disks) {
            let worker = target.source(id);
            let old = worker.and_then(|worker| worker.replace_disk(key, disk, slot));
            old.into_iter().for_each(|slot| target.backend().detach(slot));
        }
        target.resume(id);
    }
}

impl Drop for QueueSwap {
    fn drop(&mut self) {
        let slots = std::mem::take(&mut self.disks).into_iter().map(|(_, _, slot)| slot).collect::<Vec<_>>();
        if !slots.is_empty() {
            // Waits, so that the loop is not the last to have a disk that nobody uses: to close it may take long.
            let on = &self.queue.on;
            let _ = on.call(move |target| slots.into_iter().for_each(|slot| target.backend().detach(slot)));
        }
    }
}

/// Stops queues, and resumes them together when the last of them is drained.
struct DrainBarrier {
    awaited: AtomicUsize,
    /// When the first of them stopped.
    begun: AtomicU64,
    /// Taken by the last queue to stop, or by the thread that gives up waiting for that.
    swaps: Mutex<Option<Vec<QueueSwap>>>,
    tell: Mutex<Sender<Pause>>,
}

impl DrainBarrier {
    /// The longest time that any of them was not served; `None` if one had requests that did not end.
    fn run(swaps: Vec<QueueSwap>) -> Option<Pause> {
        let (tell, told) = channel();
        let queues: Vec<RunningQueue> = swaps.iter().map(|swap| swap.queue.clone()).collect();
        let barrier = Arc::new(Self {
            awaited: AtomicUsize::new(queues.len()),
            begun: AtomicU64::new(u64::MAX),
            swaps: Mutex::new(Some(swaps)),
            tell: Mutex::new(tell),
        });
        for &RunningQueue { ref on, id, .. } in &queues {
            let barrier = Arc::clone(&barrier);
            on.send(move |target| {
                barrier.begun.fetch_min(clock::now().0, Ordering::Relaxed);
                target.quiesce(id, move |_| barrier.arrive());
            });
        }
        let mut pause = Pause::default();
        for _ in &queues {
            pause = pause.max(match told.recv_timeout(PATIENCE) {
                Ok(pause) => pause,
                Err(RecvTimeoutError::Timeout) if barrier.cancel(&queues) => return None,
                // All have stopped, and go on at this moment.
                Err(_) => told.recv().ok()?,
            });
        }
        Some(pause)
    }

    /// One more has stopped. Runs on its loop.
    fn arrive(&self) {
        if self.awaited.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let tell = lock(&self.tell).clone();
        let begun = Nanos(self.begun.load(Ordering::Relaxed));
        let drain = clock::now() - begun;
        for swap in lock(&self.swaps).take().into_iter().flatten() {
            let tell = tell.clone();
            swap.queue.on.clone().send(move |target| {
                swap.take(target);
                let _ = tell.send(Pause { whole: clock::now() - begun, drain });
            });
        }
    }

    /// Resumes all queues with their old disks; false if they are already resuming with the new ones.
    fn cancel(&self, queues: &[RunningQueue]) -> bool {
        let Some(swaps) = lock(&self.swaps).take() else { return false };
        for &RunningQueue { ref on, id, .. } in queues {
            on.send(move |target| {
                target.resume(id);
            });
        }
        drop(swaps);
        true
    }
}
