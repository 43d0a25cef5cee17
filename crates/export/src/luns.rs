//! Exports of virtio-scsi devices, whose logical units come and go.
//!
//! A disk reaches the I/O threads before its logical unit is shown to the driver, and leaves them after the unit is
//! gone.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use egret_disk::{Active, Disk};
use egret_event_loop::{LoopHandle, SourceId};
use egret_virtio::DiskKey;
use egret_virtio::scsi::{Lun, LunAddress, Scsi, ScsiConfig};

use crate::export::{DeviceType, Export, ExportConfig, ExportError};
use crate::peer_log::PeerLog;
use crate::queues::{RunningQueue, lock, write_out_last};
use crate::source::Worker;
use crate::stats::DiskCounters;

pub use egret_scsi::{Change, ConfigError, DiscardConfig, Keeper, LogicalUnit, LunConfig, Naa, NexusId, Registered};

/// The event queue's number.
const EVENTS: usize = 1;

impl Export {
    /// Begins to listen, with some logical units, which other exports of the same disks may have, too. Request queue `i` runs on
    /// the loop `i % loops.len()`, and what else there is on the first.
    ///
    /// # Errors
    ///
    /// The address or one of the logical units cannot be had; nothing is left behind.
    ///
    /// # Panics
    ///
    /// If there is no loop.
    pub fn start_scsi(
        config: ExportConfig,
        device: ScsiConfig,
        luns: Vec<(LunAddress, Arc<LogicalUnit>, Arc<Disk>)>,
        loops: Vec<LoopHandle<Worker>>,
    ) -> Result<Self, ExportError> {
        let id = &config.id;
        let scsi = Scsi::new(device, id).map_err(|e| ExportError::Scsi(id.clone(), e))?;
        let mut disks = Vec::new();
        for (at, unit, disk) in luns {
            let added = scsi.prepare(at, unit).and_then(|lun| {
                put(&mut disks, lun.disk, Some(disk));
                scsi.add(lun)
            });
            added.map_err(|e| ExportError::Lun(id.clone(), e))?;
        }
        let device = Arc::clone(&scsi) as _;
        Self::listen(config, DeviceType::Scsi(scsi), device, disks, loops)
    }

    /// Adds a logical unit, and tells the client. `activate` has the disk active, if a client's rings run.
    ///
    /// # Errors
    ///
    /// This is no virtio-scsi device, the address is taken, the disk cannot be active, or an I/O thread cannot run it, or is
    /// stuck with a queue that starts. Nothing has changed.
    pub fn add_lun<E: From<ExportError>>(
        &self,
        at: LunAddress,
        unit: Arc<LogicalUnit>,
        disk: Arc<Disk>,
        activate: impl Fn(&Arc<Disk>) -> Result<Active, E>,
    ) -> Result<(), E> {
        // Without the lock, which others wait for: it may take as long as the disk does not answer.
        let mut active = None;
        let mut queues = loop {
            let queues = self.shared.lock_started()?;
            if queues.active.is_none() || active.is_some() {
                break queues;
            }
            drop(queues);
            active = Some(activate(&disk)?);
        };
        let lun_error = |e| ExportError::Lun(self.shared.id.clone(), e);
        let scsi = self.scsi(at)?;
        let lun = scsi.prepare(at, unit).map_err(lun_error)?;
        let key = lun.disk;
        let mut attached = Vec::new();
        for queue in queues.running_queues(self.shared.counts.diskless) {
            let (theirs, id) = (Arc::clone(&disk), queue.id);
            let counters = self.shared.counters()[queue.queue].of_disk(disk.node_name());
            let asked = queue.on.call(move |target| attach(target, id, key, theirs, counters));
            match asked.map_err(std::io::Error::other).and_then(|attached| attached) {
                Ok(()) => attached.push(queue),
                Err(e) => {
                    detach(&attached, key);
                    self.forget(&disk);
                    scsi.detach(&lun);
                    return Err(ExportError::System(self.shared.id.clone(), e).into());
                }
            }
        }
        match scsi.add(lun) {
            Ok(()) => {
                put(&mut queues.disks, key, Some(disk));
                if let (Some(all), Some(mut active)) = (&mut queues.active, active) {
                    active.serve();
                    all.push((key, active));
                }
            }
            Err(e) => {
                detach(&attached, key);
                self.forget(&disk);
                return Err(lun_error(e).into());
            }
        }
        drop(queues);
        self.notify_event_queue();
        Ok(())
    }

    /// Takes a logical unit away, and tells the client. What is in flight ends; the disk is let go of when it has.
    ///
    /// # Errors
    ///
    /// There is no such logical unit, or the I/O thread of a queue that starts is stuck. Nothing has changed.
    pub fn remove_lun(&self, at: LunAddress) -> Result<LeavingDisk, ExportError> {
        let mut queues = self.shared.lock_started()?;
        let gone = self.scsi(at)?.remove(at).ok_or_else(|| ExportError::NoLun(self.shared.id.clone(), at))?;
        if let Some(disk) = queues.disks[gone.disk.0 as usize].take() {
            self.forget(&disk);
        }
        let active = queues.take_active(gone.disk);
        let (left, held) = detach(&queues.running_queues(self.shared.counts.diskless), gone.disk);
        // A queue that stops keeps the disk until it has.
        if queues.stopping > 0 {
            queues.awaited.push(held);
        }
        drop(queues);
        self.notify_event_queue();
        Ok(LeavingDisk { left, active, log: self.shared.shared_log() })
    }

    /// The disk of a logical unit has `bytes` now: tells the client. Returns whether that makes a difference.
    ///
    /// # Errors
    ///
    /// There is no such logical unit.
    pub fn resize_lun(&self, at: LunAddress, bytes: u64) -> Result<bool, ExportError> {
        let changed = self.scsi(at)?.resize(at, bytes);
        let changed = changed.ok_or_else(|| ExportError::NoLun(self.shared.id.clone(), at))?;
        self.notify_event_queue();
        Ok(changed)
    }

    /// The logical units that there are.
    pub fn luns(&self) -> Vec<LunAddress> {
        match &self.device {
            DeviceType::Scsi(scsi) => scsi.addresses(),
            DeviceType::Blk(_) | DeviceType::Nbd(_) => Vec::new(),
        }
    }

    /// The logical unit at an address.
    pub fn lun(&self, at: LunAddress) -> Option<Arc<Lun>> {
        self.scsi(at).ok()?.lun(at)
    }

    fn scsi(&self, at: LunAddress) -> Result<&Scsi, ExportError> {
        match &self.device {
            DeviceType::Scsi(scsi) => Ok(scsi),
            DeviceType::Blk(_) | DeviceType::Nbd(_) => Err(ExportError::NoLun(self.shared.id.clone(), at)),
        }
    }

    /// What was counted for a disk goes with it.
    fn forget(&self, disk: &Disk) {
        self.queues().iter().for_each(|queue| queue.forget_disk(disk.node_name()));
    }

    /// Has the event queue look at what there is to tell.
    fn notify_event_queue(&self) {
        if let Some(RunningQueue { on, id, .. }) = lock(&self.shared.queues).running_queue(EVENTS) {
            on.send(move |target| target.wake(id));
        }
    }
}

/// The disk of a logical unit that was taken away, which may have requests in flight.
#[derive(Debug)]
pub struct LeavingDisk {
    left: Receiver<()>,
    /// It stays locked until then.
    active: Option<Active>,
    log: Arc<PeerLog>,
}

impl LeavingDisk {
    /// Waits until the last of its requests has ended, and no queue has the disk any more. Then it is written out, for whoever
    /// has it next, unless others serve it still. If that fails it is returned as it is, active, because that one would not find
    /// what was written.
    #[must_use]
    pub fn wait(self) -> Option<Active> {
        // Nobody sends: it is over when every sender has been dropped.
        let _ = self.left.recv();
        self.active.and_then(|active| write_out_last(active, &self.log))
    }
}

type Loop = egret_event_loop::EventLoop<Worker>;

/// Gives a disk to a worker, on its loop.
fn attach(
    target: &mut Loop,
    id: SourceId,
    key: DiskKey,
    disk: Arc<Disk>,
    counters: Arc<DiskCounters>,
) -> std::io::Result<()> {
    let slot = target.backend().attach(&disk).map_err(std::io::Error::other)?;
    match target.source(id).and_then(Worker::queue) {
        Some(worker) => {
            worker.add_disk(key, disk, slot);
            worker.count_disk(key, counters);
            let pinning = worker.pinning();
            pinning.into_iter().for_each(|pinning| target.backend().pin(slot, pinning));
        }
        // It stops, and comes back with all disks.
        None => target.backend().detach(slot),
    }
    Ok(())
}

/// Takes a disk from queues. Each loop holds a sender until no request of that disk is left on it; who else has such may
/// have the one that is returned.
fn detach(queues: &[RunningQueue], key: DiskKey) -> (Receiver<()>, Sender<()>) {
    let (held, left) = channel::<()>();
    for &RunningQueue { ref on, id, .. } in queues {
        let held = held.clone();
        on.send(move |target| {
            if let Some(slot) = target.source(id).and_then(Worker::queue).and_then(|worker| worker.remove_disk(key)) {
                target.backend().detach_telling(slot, held);
                // It may keep requests for that disk.
                target.wake(id);
            }
        });
    }
    (left, held)
}

fn put(disks: &mut Vec<Option<Arc<Disk>>>, DiskKey(key): DiskKey, disk: Option<Arc<Disk>>) {
    let at = key as usize;
    if at >= disks.len() {
        disks.resize(at + 1, None);
    }
    disks[at] = disk;
}
