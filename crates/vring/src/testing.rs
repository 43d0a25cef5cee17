//! A guest for tests: memory, a driver on a ring in it, and the device's half.

use std::sync::Arc;

use crate::memory::{GuestMemory, Region};
use crate::ring::{Driver, DriverConfig, Piece, Queue};

/// Where the ring is.
pub const RING: u64 = 0x10_0000;
/// Where buffers are.
pub const DATA: u64 = 0x40_0000;
/// Its length in bytes.
pub const DATA_LEN: u64 = 0x40_0000;

/// Ring and data in one region that begins at `RING`.
pub fn memory() -> Arc<GuestMemory> {
    let len = DATA + DATA_LEN - RING;
    Arc::new(if cfg!(miri) {
        GuestMemory::allocated(RING, len)
    } else {
        GuestMemory::empty().with(Region::anonymous(RING, len).unwrap()).unwrap()
    })
}

/// A buffer of a chain.
pub fn piece(addr: u64, len: u32) -> Piece {
    Piece { addr, len }
}

/// Both halves of a ring.
pub struct Guest {
    /// The memory that the ring and its buffers are in.
    pub memory: Arc<GuestMemory>,
    /// The driver's half.
    pub driver: Driver,
    /// The device's half.
    pub queue: Queue,
}

impl Guest {
    /// A ring at [`RING`].
    ///
    /// # Panics
    ///
    /// When it cannot be had, as in all that follows.
    pub fn new(config: DriverConfig) -> Self {
        let memory = memory();
        let driver = Driver::new(&memory, RING, config).unwrap();
        let queue = driver.queue().start(&memory).unwrap();
        Self { memory, driver, queue }
    }

    /// What is at `addr`.
    pub fn read<const N: usize>(&self, addr: u64) -> [u8; N] {
        let mut bytes = [0; N];
        assert!(self.memory.read(addr, &mut bytes));
        bytes
    }

    /// Writes to `addr`.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        assert!(self.memory.write(addr, bytes));
    }

    /// Writes a descriptor into the ring's table, without the driver.
    pub fn describe(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.write(self.driver.queue().desc + 16 * u64::from(index), &descriptor(addr, len, flags, next));
    }

    /// Makes chains available, whatever their heads are, without the driver.
    pub fn offer(&self, heads: &[u16]) {
        let config = self.driver.queue();
        let index = u16::from_le_bytes(self.read(config.avail + 2));
        for (at, head) in (0..).zip(heads) {
            let slot = u64::from(index.wrapping_add(at) % config.size);
            self.write(config.avail + 4 + 2 * slot, &head.to_le_bytes());
        }
        self.write(config.avail + 2, &index.wrapping_add(heads.len() as u16).to_le_bytes());
    }
}

/// `struct virtq_desc`.
pub fn descriptor(addr: u64, len: u32, flags: u16, next: u16) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&addr.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[12..14].copy_from_slice(&flags.to_le_bytes());
    bytes[14..].copy_from_slice(&next.to_le_bytes());
    bytes
}
