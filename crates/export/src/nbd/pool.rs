//! Memory for data on its way between sockets and disks: a lane's own, and used again.

use egret_vring::memory::Buffers;

/// What a lane keeps of it while nothing is in flight, in bytes.
const KEPT: usize = 8 << 20;

/// Buffers that nobody uses.
#[derive(Default)]
pub(super) struct Pool {
    free: Vec<Buffers>,
    capacity: usize,
    /// Bytes of data for which there are buffers elsewhere.
    taken: usize,
}

impl Pool {
    /// A buffer of `len` bytes, which hold anything.
    pub(super) fn take(&mut self, len: usize) -> Buffers {
        let mut buffers = self.free.pop().unwrap_or_else(Buffers::pages);
        self.capacity -= buffers.capacity();
        buffers.resize(len);
        self.taken += len;
        buffers
    }

    pub(super) fn give_back(&mut self, buffers: Buffers) {
        let capacity = buffers.capacity();
        self.taken -= buffers.bytes().len();
        if capacity > 0 && self.capacity + capacity <= KEPT {
            self.capacity += capacity;
            self.free.push(buffers);
        }
    }

    /// Bytes of data that are on their way.
    pub(super) const fn taken(&self) -> usize {
        self.taken
    }

    /// Gives all of it back to the system.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
