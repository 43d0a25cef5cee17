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

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn memory_is_used_again_counted_while_it_is_out_and_kept_up_to_a_limit() {
        let mut pool = Pool::default();
        let (small, large) = (pool.take(4096), pool.take(MIB));
        assert_eq!((small.bytes().len(), large.bytes().len(), pool.taken()), (4096, MIB, MIB + 4096));
        let capacity = large.capacity();
        pool.give_back(large);
        assert_eq!((pool.taken(), pool.free.len(), pool.capacity), (4096, 1, capacity));
        let again = pool.take(512);
        assert_eq!((again.bytes().len(), again.capacity(), pool.taken()), (512, capacity, 4096 + 512));
        assert_eq!((pool.free.len(), pool.capacity), (0, 0));
        // What has no memory is nothing to keep.
        pool.give_back(Buffers::default());
        assert!(pool.free.is_empty());
        pool.give_back(again);
        pool.give_back(small);
        pool.clear();
        let out: Vec<_> = (0..12).map(|_| pool.take(MIB)).collect();
        assert_eq!((pool.taken(), pool.free.len(), pool.capacity), (12 * MIB, 0, 0));
        out.into_iter().for_each(|buffers| pool.give_back(buffers));
        assert_eq!(pool.taken(), 0);
        let (most, kept) = (KEPT / capacity, pool.free.len());
        assert_eq!((kept, pool.capacity), (most, most * capacity));
        pool.clear();
        assert_eq!((pool.free.len(), pool.capacity), (0, 0));
    }
}
