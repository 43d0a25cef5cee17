//! What a virtio-blk device is, and the configuration space that tells its driver (virtio 1.3, 5.2.4).

use thiserror::Error;

use super::{SECTOR, SERIAL_BYTES};

/// What there is to say about a disk to a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlkConfig {
    /// The disk's size. A last part of less than a logical block is not shown.
    pub capacity_bytes: u64,
    /// The unit of addressing: a power of two of at least 512.
    pub logical_block_size: u32,
    /// The unit that is written without reading: a power of two of at least the logical block.
    pub physical_block_size: u32,
    /// What long requests should best be multiples of, in bytes; 0 where there is nothing to say.
    pub optimal_io_size: u32,
    /// How many queues there are.
    pub num_queues: u16,
    /// The most descriptors a queue can have: a power of two of at least 4.
    pub queue_size: u16,
    /// Whether writes are refused.
    pub read_only: bool,
    /// What `GET_ID` answers: at most 20 bytes of ASCII.
    pub serial: String,
    /// Whether the device begins without a volatile cache: every write is stable when it completes, unless the driver
    /// turns `writeback` on.
    pub writethrough: bool,
    /// Whether and how ranges can be discarded.
    pub discard: Option<DiscardLimits>,
    /// Whether and how ranges can be zeroed.
    pub write_zeroes: Option<WriteZeroesLimits>,
}

impl Default for BlkConfig {
    /// A disk of no size and no name that can write and has nothing special, with one queue.
    fn default() -> Self {
        Self {
            capacity_bytes: 0,
            logical_block_size: 512,
            physical_block_size: 512,
            optimal_io_size: 0,
            num_queues: 1,
            queue_size: 128,
            read_only: false,
            serial: String::new(),
            writethrough: false,
            discard: None,
            write_zeroes: None,
        }
    }
}

/// What a discard may ask for. It is always of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardLimits {
    /// The longest range, in sectors.
    pub max_sectors: u32,
    /// What a range should begin and end at a multiple of, in sectors.
    pub alignment: u32,
}

/// What a write-zeroes may ask for. It is always of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteZeroesLimits {
    /// The longest range, in sectors.
    pub max_sectors: u32,
    /// Whether one with `unmap` may give the storage back.
    pub may_unmap: bool,
}

/// What is wrong with a [`BlkConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BlkError {
    /// Not a power of two, or less than a sector.
    #[error("logical-block-size must be a power of two of at least 512, got {0}")]
    LogicalBlockSize(u32),
    /// Not a power of two, less than the logical block, or more than 65535 of them.
    #[error("physical block size must be a power of two of 1 to 32768 logical blocks of {logical}, got {physical}")]
    PhysicalBlockSize {
        /// The logical block size in bytes.
        logical: u32,
        /// The physical block size in bytes.
        physical: u32,
    },
    /// None.
    #[error("num-queues must be at least 1")]
    NoQueues,
    /// Too small for a request of header, data and status, too large, or not a power of two.
    #[error("queue-size must be a power of two from 4 to 32768, got {0}")]
    QueueSize(u16),
    /// Too long, or not ASCII.
    #[error("serial must be at most 20 ASCII characters, got '{0}'")]
    Serial(String),
}

/// Up to the end of `write_zeroes_may_unmap` and its padding; all that follows belongs to features not offered.
pub(super) const SPACE: usize = 60;
/// Where `writeback` is.
pub(super) const WRITEBACK: usize = 32;

/// The most segments that are offered, as of a queue of 512. Windows' driver has requests of up to so many pages, whatever the
/// number, and gives no more than 513 pieces of one to the device, without an error: what is in the others is taken for
/// written (`NumberOfPhysicalBreaks` and `VirtIoBuildIo` in virtio-win's `viostor/virtio_stor.c`).
const MAX_SEGMENTS: u32 = 510;

impl BlkConfig {
    /// Checks it, and makes the answer to `GET_ID` of it.
    pub(super) fn check(&self) -> Result<[u8; SERIAL_BYTES], BlkError> {
        let (logical, physical) = (self.logical_block_size, self.physical_block_size);
        if !logical.is_power_of_two() || u64::from(logical) < SECTOR {
            return Err(BlkError::LogicalBlockSize(logical));
        }
        if !physical.is_power_of_two() || !(1..=1 << 15).contains(&(physical / logical)) {
            return Err(BlkError::PhysicalBlockSize { logical, physical });
        }
        if self.num_queues == 0 {
            return Err(BlkError::NoQueues);
        }
        if !self.queue_size.is_power_of_two() || !(4..=egret_vring::ring::MAX_SIZE).contains(&self.queue_size) {
            return Err(BlkError::QueueSize(self.queue_size));
        }
        if !self.serial.is_ascii() || self.serial.len() > SERIAL_BYTES {
            return Err(BlkError::Serial(self.serial.clone()));
        }
        let mut serial = [0; SERIAL_BYTES];
        serial[..self.serial.len()].copy_from_slice(self.serial.as_bytes());
        Ok(serial)
    }

    /// The size that is shown of a disk of `bytes`.
    pub(super) fn sectors_of(&self, bytes: u64) -> u64 {
        (bytes - bytes % u64::from(self.logical_block_size)) / SECTOR
    }

    /// `struct virtio_blk_config`. Offsets are the structure's; what is not set belongs to features not offered.
    pub(super) fn space(&self, sectors: u64, writeback: bool) -> [u8; SPACE] {
        let mut space = [0; SPACE];
        let mut put = |offset: usize, field: &[u8]| space[offset..offset + field.len()].copy_from_slice(field);
        let blocks = self.physical_block_size / self.logical_block_size;
        put(0, &sectors.to_le_bytes());
        // seg_max: a header and a status go with the data.
        put(12, &u32::from(self.queue_size - 2).min(MAX_SEGMENTS).to_le_bytes());
        put(20, &self.logical_block_size.to_le_bytes());
        // topology: physical_block_exp, alignment_offset, min_io_size, opt_io_size; the last two in logical blocks.
        put(24, &[blocks.trailing_zeros() as u8, 0]);
        put(26, &(blocks as u16).to_le_bytes());
        put(28, &(self.optimal_io_size / self.logical_block_size).to_le_bytes());
        put(WRITEBACK, &[u8::from(writeback)]);
        put(34, &self.num_queues.to_le_bytes());
        if let Some(DiscardLimits { max_sectors, alignment }) = self.discard.filter(|_| !self.read_only) {
            put(36, &max_sectors.to_le_bytes());
            put(40, &1u32.to_le_bytes());
            put(44, &alignment.to_le_bytes());
        }
        if let Some(WriteZeroesLimits { max_sectors, may_unmap }) = self.write_zeroes.filter(|_| !self.read_only) {
            put(48, &max_sectors.to_le_bytes());
            put(52, &1u32.to_le_bytes());
            put(56, &[u8::from(may_unmap)]);
        }
        space
    }
}
