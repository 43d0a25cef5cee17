//! A disk's properties, from its configuration space.

use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
};

use super::bit;

/// Sectors are 512 bytes, whatever the block size (virtio 1.3, 5.2.6).
pub(super) const SECTOR: u64 = 512;

/// A disk, as its configuration space describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// Its size in bytes.
    pub capacity: u64,
    /// Its logical block size in bytes: requests are multiples of it.
    pub block_size: u32,
    /// The most segments of data that a request may have.
    pub most_segments: u32,
    /// How many queues it has.
    pub queues: u16,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Whether it takes flushes.
    pub flushes: bool,
}

impl Info {
    /// How much of `struct virtio_blk_config` is read: up to the end of what write-zeroes has there.
    pub(super) const SPACE: usize = 60;

    /// Before the device was asked.
    pub(super) const UNKNOWN: Self =
        Self { capacity: 0, block_size: 512, most_segments: 1, queues: 1, read_only: false, flushes: true };

    /// What a logical unit has answered to READ CAPACITY (16) (SBC-4): the last block, and the length of a block.
    pub(super) fn of_scsi(capacity: &[u8; 32], queues: u16) -> Self {
        let block_size = u32::from_be_bytes(std::array::from_fn(|byte| capacity[8 + byte])).max(SECTOR as u32);
        let last = u64::from_be_bytes(std::array::from_fn(|byte| capacity[byte]));
        let capacity = last.saturating_add(1).saturating_mul(block_size.into());
        Self { capacity, block_size, queues, ..Self::UNKNOWN }
    }

    /// Reads the fields that `features` says are there.
    pub(super) fn new(space: &[u8; Self::SPACE], features: u64) -> Self {
        fn field<const N: usize>(space: &[u8], at: usize) -> [u8; N] {
            std::array::from_fn(|byte| space[at + byte])
        }
        let has = |feature| features & bit(feature) != 0;
        Self {
            capacity: u64::from_le_bytes(field(space, 0)).saturating_mul(SECTOR),
            block_size: if has(VIRTIO_BLK_F_BLK_SIZE) { u32::from_le_bytes(field(space, 20)) } else { 512 },
            most_segments: if has(VIRTIO_BLK_F_SEG_MAX) { u32::from_le_bytes(field(space, 12)) } else { 1 },
            queues: if has(VIRTIO_BLK_F_MQ) { u16::from_le_bytes(field(space, 34)) } else { 1 },
            read_only: has(VIRTIO_BLK_F_RO),
            flushes: has(VIRTIO_BLK_F_FLUSH),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_counts_only_if_its_feature_was_agreed_on() {
        let mut space = [0; Info::SPACE];
        space[0] = 9;
        space[12] = 126;
        space[21] = 16;
        space[34] = 4;
        let bare = Info::new(&space, 0);
        assert_eq!((bare.capacity, bare.block_size, bare.most_segments, bare.queues), (9 * 512, 512, 1, 1));
        let full = Info::new(&space, bit(VIRTIO_BLK_F_BLK_SIZE) | bit(VIRTIO_BLK_F_SEG_MAX) | bit(VIRTIO_BLK_F_MQ));
        assert_eq!((full.block_size, full.most_segments, full.queues), (4096, 126, 4));
    }
}
