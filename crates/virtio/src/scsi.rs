//! virtio-scsi (virtio 1.3, 5.6).
//!
//! A [`Scsi`] is what the queues of an export have in common: its logical units, its configuration space, what its
//! driver is to be told. What a command does is [`egret_scsi`]'s; here it is carried.
//!
//! | queue | model | carries |
//! |---|---|---|
//! | 0 | control | task management, asynchronous notification |
//! | 1 | events | logical units that come, go and change their size |
//! | 2 and up | requests | commands |
//!
//! | a driver | is told |
//! |---|---|
//! | addresses a target that has no logical units | `BAD_TARGET` |
//! | addresses another logical unit of a target that has some | what SCSI says of it: LOGICAL UNIT NOT SUPPORTED |
//! | gives buffers that are shorter than what the CDB moves | `OVERRUN`, and nothing is moved |
//! | gives buffers for both directions | `FAILURE`: no command moves data in both |
//! | sends a request without header or room for the response | nothing: its queue is broken |
//!
//! All task attributes are simple (5.6.6.1 leaves that to the device).

mod address;
mod config;
mod control;
mod events;
mod luns;
mod queue;
mod state;
mod tasks;
mod waiting;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use egret_scsi::{Attention, LogicalUnit, NexusId};
use egret_vring::ring::Inflight;
use thiserror::Error;
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
use virtio_bindings::bindings::virtio_scsi::{
    VIRTIO_SCSI_CDB_DEFAULT_SIZE, VIRTIO_SCSI_F_CHANGE, VIRTIO_SCSI_F_HOTPLUG, VIRTIO_SCSI_SENSE_DEFAULT_SIZE,
};

pub use address::{LunAddress, MAX_LUN};
pub use config::{MAX_REQUEST_QUEUES, ScsiConfig, ScsiError};
pub use luns::Lun;
pub use queue::ScsiQueue;

use crate::device::{Device, DriverError, EVENT_IDX, RING_PACKED, read_space};
use crate::model::{DiskKey, Model};
use crate::state::{Origin, StateError};
use control::ControlQueue;
use events::{Event, EventQueue, Events, What};
use luns::Table;
use tasks::{Inbox, Inboxes};

/// The queues before the first request queue.
const FIXED_QUEUES: u16 = 2;

const HOTPLUG: u64 = 1 << VIRTIO_SCSI_F_HOTPLUG;
const CHANGE: u64 = 1 << VIRTIO_SCSI_F_CHANGE;
const FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_INDIRECT_DESC | EVENT_IDX | RING_PACKED | HOTPLUG | CHANGE;

/// Why a logical unit cannot be added.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LunError {
    /// Its number.
    #[error("lun must be 0..={MAX_LUN}, got {0}")]
    Number(u16),
    /// Another has its address.
    #[error("{0} is there already")]
    Taken(LunAddress),
}

/// One virtio-scsi device, as all of its queues and its session see it.
#[derive(Debug)]
pub struct Scsi {
    config: ScsiConfig,
    /// The driver as an initiator, which may share units with those of other devices. It keeps its name, and so its
    /// registrations, when it disconnects and connects again.
    nexus: NexusId,
    acked: AtomicU64,
    cdb_size: AtomicU32,
    sense_size: AtomicU32,
    luns: Mutex<Luns>,
    /// The version of the table in `luns`, so that queues need not take the lock to see whether it has changed.
    version: AtomicU64,
    events: Events,
    /// Of each request queue, for task management functions; and the waker of them all, which its units have.
    inboxes: Arc<Inboxes>,
    holder: Waker,
    /// Where it is noted that a unit has no write cache, while there is a record. Taken before `luns`.
    record: Mutex<Option<Inflight>>,
    /// By which it knows a record that it has noted its choices in, and no other device does, whichever process it is in.
    name: u64,
}

/// The choice that a record keeps: that some unit has no write cache.
///
/// One bit for all units is enough, because whoever restores it turns the cache off in each of them: a guest that flushes
/// although it need not loses nothing.
const CACHE_OFF: u8 = 1;

/// Beside it: some unit reports one. A guest that has written to it has to go on to flush, which it does as long as it is told of
/// a cache.
const CACHE_ON: u8 = 2;

#[derive(Debug, Default)]
struct Luns {
    table: Arc<Table>,
    /// The unit of each disk key. A key is reused only when no queue refers to its unit any more: a command that was in
    /// flight when its unit was removed must not continue on another disk.
    keys: Vec<Weak<Lun>>,
}

impl Scsi {
    /// A device without logical units. Those who have units in common know its driver by `initiator`.
    ///
    /// # Errors
    ///
    /// What is wrong with `config`.
    pub fn new(config: ScsiConfig, initiator: &str) -> Result<Arc<Self>, ScsiError> {
        config.check()?;
        let inboxes = Inboxes::new(config.num_queues);
        Ok(Arc::new(Self {
            nexus: NexusId::of_initiator(initiator),
            acked: AtomicU64::new(0),
            cdb_size: AtomicU32::new(VIRTIO_SCSI_CDB_DEFAULT_SIZE),
            sense_size: AtomicU32::new(VIRTIO_SCSI_SENSE_DEFAULT_SIZE),
            luns: Mutex::default(),
            version: AtomicU64::new(0),
            events: Events::default(),
            holder: Arc::clone(&inboxes).into(),
            inboxes,
            record: Mutex::default(),
            // Of nothing, but with keys that are drawn by lot.
            name: RandomState::new().build_hasher().finish(),
            config,
        }))
    }

    /// What it was made as.
    pub fn config(&self) -> &ScsiConfig {
        &self.config
    }

    /// A place for a logical unit, which the driver does not see yet, and the key that the unit's disk is to have:
    /// [`add`](Self::add) it when every queue has the disk.
    ///
    /// # Errors
    ///
    /// Its address cannot be had.
    pub fn prepare(&self, address: LunAddress, unit: Arc<LogicalUnit>) -> Result<Arc<Lun>, LunError> {
        if address.lun > MAX_LUN {
            return Err(LunError::Number(address.lun));
        }
        let mut luns = self.luns();
        if luns.table.find(address).is_some() {
            return Err(LunError::Taken(address));
        }
        let key = luns.keys.iter().position(|weak| weak.strong_count() == 0).unwrap_or(luns.keys.len());
        let (nexus, blocks) = (unit.attach(self.nexus), AtomicU64::new(unit.blocks()));
        let lun = Arc::new(Lun { address, disk: DiskKey(key as u32), unit, nexus, blocks, noted: AtomicU8::new(0) });
        if key == luns.keys.len() {
            luns.keys.push(Weak::new());
        }
        luns.keys[key] = Arc::downgrade(&lun);
        lun.unit.add_holder(self.holder.clone());
        Ok(lun)
    }

    /// The driver has nothing to do with a unit any more, or will not have: its place was prepared and is not going to be added.
    pub fn detach(&self, lun: &Lun) {
        lun.unit.detach(self.nexus);
        lun.unit.remove_holder(&self.holder);
    }

    /// Shows a unit to the driver, and tells it.
    ///
    /// # Errors
    ///
    /// Another has been faster.
    pub fn add(&self, lun: Arc<Lun>) -> Result<(), LunError> {
        let address = lun.address;
        let mut luns = self.luns();
        if luns.table.find(address).is_some() {
            return Err(LunError::Taken(address));
        }
        let before = Arc::clone(&luns.table);
        self.replace(&mut luns, |table| table.with(lun));
        // When it can be seen: who is told, and asks for the list, is not to be given the old one.
        for other in before.of_target(address.target) {
            other.nexus.attend(Attention::LunsChanged);
        }
        drop(luns);
        self.raise(HOTPLUG, Event { address, what: What::Added });
        Ok(())
    }

    /// Takes a unit away, and tells the driver. Commands that are under way end as they would have.
    pub fn remove(&self, address: LunAddress) -> Option<Arc<Lun>> {
        let mut luns = self.luns();
        let gone = luns.table.find(address).cloned()?;
        self.replace(&mut luns, |table| table.without(address));
        for other in luns.table.of_target(address.target) {
            other.nexus.attend(Attention::LunsChanged);
        }
        drop(luns);
        self.detach(&gone);
        self.raise(HOTPLUG, Event { address, what: What::Removed });
        Some(gone)
    }

    /// Changes a unit's size, in bytes, and tells the driver. Returns whether that makes a difference; `None` where
    /// there is no such unit.
    pub fn resize(&self, address: LunAddress, bytes: u64) -> Option<bool> {
        let lun = self.lun(address)?;
        lun.unit.set_capacity(bytes);
        // Another device that has the unit, too, may have changed it first.
        let blocks = lun.unit.blocks();
        let changed = lun.blocks.swap(blocks, Ordering::Relaxed) != blocks;
        if changed {
            // QEMU's vhost-user front-end offers CHANGE to its guest and does not say that the guest took it: whoever
            // takes HOTPLUG has an event queue too, and knows how to ignore what it does not know.
            self.raise(CHANGE | HOTPLUG, Event { address, what: What::Resized });
        }
        Some(changed)
    }

    /// The unit at an address.
    pub fn lun(&self, address: LunAddress) -> Option<Arc<Lun>> {
        self.luns().table.find(address).cloned()
    }

    /// The units that there are, by address.
    pub fn addresses(&self) -> Vec<LunAddress> {
        self.luns().table.all().iter().map(|lun| lun.address).collect()
    }

    fn luns(&self) -> MutexGuard<'_, Luns> {
        self.luns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the record say whether the unit has a write cache, before a driver is answered that may have been told so: a guest
    /// that knows of none flushes no more, and does not look again when another daemon is there.
    #[inline]
    fn note_cache(&self, lun: &Lun) {
        if lun.noted.load(Ordering::Relaxed) != lun.cache() {
            self.note(&self.record());
        }
    }

    /// Holding the record, so that what is noted last is how it is.
    #[cold]
    fn note(&self, record: &Option<Inflight>) {
        let mut choices = 0;
        for lun in self.luns().table.all() {
            let cache = lun.cache();
            lun.noted.store(cache, Ordering::Relaxed);
            choices |= cache;
        }
        if let Some(record) = record {
            record.set_choices(choices);
        }
    }

    fn record(&self) -> MutexGuard<'_, Option<Inflight>> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn replace(&self, luns: &mut Luns, change: impl FnOnce(&Table) -> Table) {
        luns.table = Arc::new(change(&luns.table));
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Tells the driver, if it has taken one of `features`.
    fn raise(&self, features: u64, event: Event) {
        if self.acked.load(Ordering::Relaxed) & features != 0 {
            self.events.raise(event);
        }
    }

    fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    fn snapshot(&self) -> (u64, Arc<Table>) {
        let luns = self.luns();
        (self.version(), Arc::clone(&luns.table))
    }

    fn inboxes(&self) -> MutexGuard<'_, Vec<Arc<Inbox>>> {
        self.inboxes.lock()
    }

    /// The model of a request queue, counted from 0, which has `size` descriptors.
    pub fn request_queue(self: &Arc<Self>, index: u16, size: u16) -> ScsiQueue {
        let inbox = Arc::<Inbox>::default();
        if let Some(place) = self.inboxes().get_mut(usize::from(index)) {
            *place = Arc::clone(&inbox);
        }
        ScsiQueue::new(Arc::clone(self), index, inbox, size)
    }
}

impl Drop for Scsi {
    /// The driver will not come back to units that others may have as well.
    fn drop(&mut self) {
        for lun in self.luns().table.all() {
            self.detach(lun);
        }
    }
}

impl Device for Scsi {
    fn num_queues(&self) -> u16 {
        self.config.num_queues + FIXED_QUEUES
    }

    fn diskless_queues(&self) -> u16 {
        FIXED_QUEUES
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn set_features(&self, acked: u64) -> Result<(), DriverError> {
        let unknown = acked & !FEATURES;
        if unknown != 0 {
            return Err(DriverError::NotOffered(unknown));
        }
        self.acked.store(acked, Ordering::Relaxed);
        Ok(())
    }

    /// Forgets the driver, for whom this is a reset of every logical unit that is its alone: persistent reservations
    /// stay.
    fn reset(&self) {
        self.acked.store(0, Ordering::Relaxed);
        self.cdb_size.store(VIRTIO_SCSI_CDB_DEFAULT_SIZE, Ordering::Relaxed);
        self.sense_size.store(VIRTIO_SCSI_SENSE_DEFAULT_SIZE, Ordering::Relaxed);
        self.events.clear();
        *self.record() = None;
        for lun in self.luns().table.all() {
            lun.unit.reset_initiator(self.nexus);
        }
    }

    fn read_config(&self, offset: u64, into: &mut [u8]) {
        let sizes = [&self.sense_size, &self.cdb_size].map(|size| size.load(Ordering::Relaxed));
        read_space(&self.config.space(sizes), offset, into);
    }

    /// Writes to the configuration space: `sense_size` and `cdb_size`, for queues that start later.
    fn write_config(&self, offset: u64, bytes: &[u8]) -> Result<(), DriverError> {
        let refused = DriverError::ReadOnly { offset, len: bytes.len() };
        let value = u32::from_le_bytes(bytes.try_into().map_err(|_| refused)?);
        let (size, sizes) = match offset {
            config::SENSE_SIZE => (&self.sense_size, config::SENSE_SIZES),
            config::CDB_SIZE => (&self.cdb_size, config::CDB_SIZES),
            _ => return Err(refused),
        };
        if !sizes.contains(&value) {
            return Err(DriverError::Value { offset, value });
        }
        size.store(value, Ordering::Relaxed);
        Ok(())
    }

    /// Whether some unit has no write cache, which the driver chooses by MODE SELECT.
    fn choose(&self, choices: u8) {
        if choices & CACHE_OFF == 0 {
            return;
        }
        for lun in self.luns().table.all() {
            if choices & CACHE_ON == 0 {
                lun.unit.go_on_without_cache(self.nexus);
            } else {
                lun.unit.go_on_with_stable_writes();
            }
        }
    }

    fn has_noted(&self, record: &Inflight) -> bool {
        record.keeper() == Some(self.name)
    }

    fn note_choices(&self, inflight: &Inflight) {
        let mut record = self.record();
        inflight.set_keeper(self.name);
        *record = Some(inflight.clone());
        self.note(&record);
    }

    fn save(&self) -> Vec<u8> {
        state::save(self)
    }

    fn load(&self, state: &[u8], origin: Origin) -> Result<(), StateError> {
        state::load(self, state, origin)
    }

    /// Tells the driver itself, by an event.
    fn resize(&self, disk: DiskKey, bytes: u64) -> bool {
        let addresses = self.luns().table.all().iter().filter(|lun| lun.disk == disk).map(|lun| lun.address).collect();
        let addresses: Vec<LunAddress> = addresses;
        addresses.into_iter().for_each(|address| {
            Self::resize(self, address, bytes);
        });
        false
    }

    fn model(self: Arc<Self>, index: u16, size: u16) -> Model {
        match index {
            0 => Model::Control(Box::new(ControlQueue::new(self))),
            1 => Model::Event(Box::new(EventQueue(self))),
            _ => Model::Request(Box::new(self.request_queue(index - FIXED_QUEUES, size))),
        }
    }
}

#[cfg(test)]
mod tests;
