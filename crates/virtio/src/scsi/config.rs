//! What a virtio-scsi device is, and the configuration space that tells its driver (virtio 1.3, 5.6.4).

use std::ops::RangeInclusive;

use thiserror::Error;

use super::address::MAX_LUN;
use super::events::EVENT;

/// How many request queues there can be: a vhost-user message has eight bits for a queue's number, and two are taken.
pub const MAX_REQUEST_QUEUES: u16 = 254;

/// What there is to say about a device, apart from its logical units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScsiConfig {
    /// How many request queues there are.
    pub num_queues: u16,
    /// The most descriptors a queue can have: a power of two of at least 4.
    pub queue_size: u16,
}

/// What is wrong with a [`ScsiConfig`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ScsiError {
    /// None, or too many.
    #[error("num-queues must be 1..={MAX_REQUEST_QUEUES}, got {0}")]
    Queues(u16),
    /// Too small for a request of header, data and response, too large, or not a power of two.
    #[error("queue-size must be a power of two from 4 to 32768, got {0}")]
    QueueSize(u16),
}

/// `struct virtio_scsi_config`.
const SPACE: usize = 36;
pub(super) const SENSE_SIZE: u64 = 20;
pub(super) const CDB_SIZE: u64 = 24;

/// As much sense data as SPC-5 knows of.
pub(super) const SENSE_SIZES: RangeInclusive<u32> = 0..=252;
/// From the longest CDB that is understood to the longest that there is.
pub(super) const CDB_SIZES: RangeInclusive<u32> = 16..=260;

/// In units of 512 bytes; nothing here needs a limit, and this is what QEMU says.
const MAX_SECTORS: u32 = 0xffff;

impl ScsiConfig {
    pub(super) fn check(&self) -> Result<(), ScsiError> {
        if !(1..=MAX_REQUEST_QUEUES).contains(&self.num_queues) {
            return Err(ScsiError::Queues(self.num_queues));
        }
        if !self.queue_size.is_power_of_two() || !(4..=egret_vring::ring::MAX_SIZE).contains(&self.queue_size) {
            return Err(ScsiError::QueueSize(self.queue_size));
        }
        Ok(())
    }

    /// The space, with `sense_size` and `cdb_size`.
    pub(super) fn space(&self, [sense_size, cdb_size]: [u32; 2]) -> [u8; SPACE] {
        let mut space = [0; SPACE];
        let words = [
            self.num_queues.into(),
            // seg_max: a header and a response go with the data.
            u32::from(self.queue_size - 2),
            MAX_SECTORS,
            // cmd_per_lun
            self.queue_size.into(),
            EVENT as u32,
            sense_size,
            cdb_size,
            // max_channel, and max_target above it.
            u32::from(u8::MAX) << 16,
            MAX_LUN.into(),
        ];
        for (field, word) in space.chunks_exact_mut(4).zip(words) {
            field.copy_from_slice(&word.to_le_bytes());
        }
        space
    }
}
