//! virtio-blk (virtio 1.3, 5.2).
//!
//! A [`Blk`] is what the queues of an export have in common: its configuration space, the features its driver took, the
//! cache mode. A [`BlkQueue`] is the [`RequestModel`](crate::RequestModel) of one queue.
//!
//! | the driver asks for | and is told |
//! |---|---|
//! | a range past the end of the disk, or no multiple of 512 bytes | `IOERR` |
//! | a write to a disk that is read-only | `IOERR`, and nothing is written |
//! | a request of a type that is unknown or not offered | `UNSUPP` |
//! | a discard or write-zeroes with unknown flags, or of more segments than allowed | `UNSUPP` |
//! | a request without header or room for a status | nothing: its queue is broken |
//!
//! `SIZE_MAX` is not offered: the disk takes segments of any size.

mod config;
mod queue;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use egret_vring::ring::Inflight;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_ID_BYTES,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

pub use config::{BlkConfig, BlkError, DiscardLimits, WriteZeroesLimits};
pub use queue::BlkQueue;

use crate::device::{Device, DriverError, EVENT_IDX, RING_PACKED, read_space};
use crate::model::{DiskKey, Model};
use crate::state::{DeviceId, Origin, StateError, pack, unpack};

/// Sectors are 512 bytes, whatever the block size (5.2.6).
pub const SECTOR: u64 = 512;

/// The length of a serial number (5.2.6).
pub const SERIAL_BYTES: usize = VIRTIO_BLK_ID_BYTES as usize;

const fn bit(feature: u32) -> u64 {
    1 << feature
}

/// One virtio-blk device, as all of its queues and its session see it.
#[derive(Debug)]
pub struct Blk {
    config: BlkConfig,
    features: u64,
    serial: [u8; SERIAL_BYTES],
    sectors: AtomicU64,
    acked: AtomicU64,
    /// The cache mode that the driver is told: as configured until one chooses, and then for as long as the front-end is
    /// there. A front-end may answer its drivers from a copy of the space, which features and resets leave as it is: QEMU's
    /// vhost-user-blk and cloud-hypervisor's do (`s->blkcfg` in `hw/block/vhost-user-blk.c`; `self.config` in
    /// `virtio-devices/src/vhost_user/blk.rs`). A driver that reads there that the cache is off flushes no more.
    writeback: AtomicBool,
    /// What `acked` and `writeback` together mean for a write: kept ready, because every write asks.
    write_through: AtomicBool,
}

impl Blk {
    /// A device whose driver has not said anything yet.
    ///
    /// # Errors
    ///
    /// What is wrong with `config`.
    pub fn new(config: BlkConfig) -> Result<Arc<Self>, BlkError> {
        let serial = config.check()?;
        let mut features = bit(VIRTIO_F_VERSION_1)
            | bit(VIRTIO_RING_F_INDIRECT_DESC)
            | EVENT_IDX
            | RING_PACKED
            | bit(VIRTIO_BLK_F_SEG_MAX)
            | bit(VIRTIO_BLK_F_BLK_SIZE)
            | bit(VIRTIO_BLK_F_TOPOLOGY)
            | bit(VIRTIO_BLK_F_FLUSH)
            | bit(VIRTIO_BLK_F_CONFIG_WCE)
            | bit(VIRTIO_BLK_F_MQ);
        if config.read_only {
            features |= bit(VIRTIO_BLK_F_RO);
        } else {
            features |= config.discard.map_or(0, |_| bit(VIRTIO_BLK_F_DISCARD));
            features |= config.write_zeroes.map_or(0, |_| bit(VIRTIO_BLK_F_WRITE_ZEROES));
        }
        Ok(Arc::new(Self {
            features,
            serial,
            sectors: AtomicU64::new(config.sectors_of(config.capacity_bytes)),
            acked: AtomicU64::new(0),
            writeback: AtomicBool::new(!config.writethrough),
            write_through: AtomicBool::new(true),
            config,
        }))
    }

    fn has_taken(&self, feature: u32) -> bool {
        self.acked.load(Ordering::Relaxed) & bit(feature) != 0
    }

    /// Works out whether a write must be stable when it completes (5.2.6.2, the conditions of a stable write): also for a
    /// driver that cannot flush, whatever one before it has chosen.
    fn settle(&self) {
        let write_through = !self.has_taken(VIRTIO_BLK_F_FLUSH)
            || match self.has_taken(VIRTIO_BLK_F_CONFIG_WCE) {
                true => !self.writeback.load(Ordering::Relaxed),
                false => self.config.writethrough,
            };
        self.write_through.store(write_through, Ordering::Relaxed);
    }

    /// The cache mode, as the byte that the driver writes.
    fn choices(&self) -> u8 {
        self.writeback.load(Ordering::Relaxed).into()
    }

    fn set_writeback(&self, writeback: u8) {
        self.writeback.store(writeback != 0, Ordering::Relaxed);
        self.settle();
    }

    /// Whether a write completes only when it is on stable storage.
    #[inline]
    pub fn is_write_through(&self) -> bool {
        self.write_through.load(Ordering::Relaxed)
    }

    /// The disk's size, in sectors.
    #[inline]
    pub fn sectors(&self) -> u64 {
        self.sectors.load(Ordering::Relaxed)
    }

    /// The model of one of its queues, which has `size` descriptors.
    pub fn queue(self: &Arc<Self>, size: u16) -> BlkQueue {
        BlkQueue::new(Arc::clone(self), size)
    }
}

impl Device for Blk {
    fn num_queues(&self) -> u16 {
        self.config.num_queues
    }

    fn diskless_queues(&self) -> u16 {
        0
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn set_features(&self, acked: u64) -> Result<(), DriverError> {
        let unknown = acked & !self.features;
        if unknown != 0 {
            return Err(DriverError::NotOffered(unknown));
        }
        self.acked.store(acked, Ordering::Relaxed);
        self.settle();
        Ok(())
    }

    /// Forgets the driver: no features taken.
    fn reset(&self) {
        self.acked.store(0, Ordering::Relaxed);
        self.settle();
    }

    fn forget_choices(&self) {
        self.writeback.store(!self.config.writethrough, Ordering::Relaxed);
        self.settle();
    }

    fn read_config(&self, offset: u64, into: &mut [u8]) {
        // 5.2.5.2: with CONFIG_WCE but without FLUSH it is 0.
        let cannot_flush = self.has_taken(VIRTIO_BLK_F_CONFIG_WCE) && !self.has_taken(VIRTIO_BLK_F_FLUSH);
        let writeback = self.writeback.load(Ordering::Relaxed) && !cannot_flush;
        read_space(&self.config.space(self.sectors(), writeback), offset, into);
    }

    /// Writes to the configuration space: `writeback`, and nothing else. Some front-ends write the word that it begins.
    fn write_config(&self, offset: u64, bytes: &[u8]) -> Result<(), DriverError> {
        match bytes {
            &[writeback] | &[writeback, _, _, _] if offset == config::WRITEBACK as u64 => {
                self.set_writeback(writeback);
                Ok(())
            }
            _ => Err(DriverError::ReadOnly { offset, len: bytes.len() }),
        }
    }

    fn resize(&self, _disk: DiskKey, bytes: u64) -> bool {
        let sectors = self.config.sectors_of(bytes);
        self.sectors.swap(sectors, Ordering::Relaxed) != sectors
    }

    fn tells_size(&self) -> bool {
        true
    }

    fn choose(&self, writeback: u8) {
        self.set_writeback(writeback);
    }

    /// It chooses in the configuration space, and nothing by requests.
    fn note_choices(&self, record: &Inflight) {
        record.set_choices(self.choices());
    }

    fn save(&self) -> Vec<u8> {
        pack(DeviceId::Blk, &[self.choices()])
    }

    fn load(&self, state: &[u8], _origin: Origin) -> Result<(), StateError> {
        match unpack(state, DeviceId::Blk)? {
            &[choices @ (0 | 1)] => {
                self.choose(choices);
                Ok(())
            }
            _ => Err(StateError::invalid("a cache mode that there is not")),
        }
    }

    fn model(self: Arc<Self>, _index: u16, size: u16) -> Model {
        Model::Request(Box::new(self.queue(size)))
    }
}

#[cfg(test)]
mod tests;
