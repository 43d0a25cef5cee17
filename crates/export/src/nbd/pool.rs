//! Memory for data on its way between sockets and disks: a lane's own, and used again.

use std::collections::VecDeque;

use egret_vring::memory::Buffers;

/// What a lane keeps of it while nothing is in flight, in bytes.
const KEPT: usize = 8 << 20;

/// How many of the buffers that were used last are looked at for one that suits.
const LOOKED_AT: usize = 8;
/// Memory comes in such pieces.
const PAGE: usize = 4096;

/// Buffers that nobody uses.
#[derive(Default)]
pub(super) struct Pool {
    /// Those that were used last are last.
    free: VecDeque<Buffers>,
    capacity: usize,
    /// What the buffers take that are used.
    taken: usize,
}

impl Pool {
    /// A buffer of `len` bytes, which hold anything. It takes about as much: who asks for little holds nobody's large buffer.
    pub(super) fn take(&mut self, len: usize) -> Buffers {
        let suits = |buffers: &Buffers| (len..=len.max(PAGE) * 2).contains(&buffers.capacity());
        let last = self.free.len().saturating_sub(LOOKED_AT)..self.free.len();
        let found = last.rev().find(|&at| suits(&self.free[at]));
        let mut buffers = found.and_then(|at| self.free.remove(at)).unwrap_or_else(Buffers::pages);
        self.capacity -= buffers.capacity();
        buffers.resize(len);
        self.taken += buffers.capacity();
        buffers
    }

    pub(super) fn give_back(&mut self, buffers: Buffers) {
        let capacity = buffers.capacity();
        self.taken -= capacity;
        if capacity == 0 || capacity > KEPT {
            return;
        }
        // What was used last is likelier to suit than what was used long ago.
        while self.capacity + capacity > KEPT {
            self.capacity -= self.free.pop_front().map_or(0, |oldest| oldest.capacity());
        }
        self.capacity += capacity;
        self.free.push_back(buffers);
    }

    /// Bytes that data on its way takes.
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
        assert_eq!((small.bytes().len(), large.bytes().len()), (4096, MIB));
        let (page, capacity) = (small.capacity(), large.capacity());
        assert_eq!(pool.taken(), page + capacity);
        pool.give_back(large);
        assert_eq!((pool.taken(), pool.free.len(), pool.capacity), (page, 1, capacity));
        let again = pool.take(MIB - 512);
        assert_eq!((again.bytes().len(), again.capacity(), pool.taken()), (MIB - 512, capacity, page + capacity));
        assert_eq!((pool.free.len(), pool.capacity), (0, 0));
        // What has no memory is nothing to keep.
        pool.give_back(Buffers::default());
        assert!(pool.free.is_empty());
        pool.give_back(again);
        pool.give_back(small);
        pool.clear();
        let out: Vec<_> = (0..12).map(|_| pool.take(MIB)).collect();
        assert_eq!((pool.taken(), pool.free.len(), pool.capacity), (12 * capacity, 0, 0));
        out.into_iter().for_each(|buffers| pool.give_back(buffers));
        assert_eq!(pool.taken(), 0);
        let (most, kept) = (KEPT / capacity, pool.free.len());
        assert_eq!((kept, pool.capacity), (most, most * capacity));
        pool.clear();
        assert_eq!((pool.free.len(), pool.capacity), (0, 0));
    }

    #[test]
    fn who_asks_for_little_gets_little_however_much_others_have_given_back() {
        let mut pool = Pool::default();
        let out: Vec<_> = (0..4).map(|_| pool.take(MIB)).collect();
        out.into_iter().for_each(|buffers| pool.give_back(buffers));
        for len in [1, 512, 4096, 64 << 10] {
            let buffers = pool.take(len);
            assert!(buffers.capacity() <= 2 * len.max(PAGE), "{len}: {}", buffers.capacity());
            assert_eq!(pool.taken(), buffers.capacity());
            pool.give_back(buffers);
        }
        assert_eq!(pool.free.len(), 4 + 2, "one page did for three of them");
    }

    #[test]
    fn what_is_kept_is_what_was_used_last() {
        let mut pool = Pool::default();
        let give = |pool: &mut Pool, lens: &[usize]| {
            let out: Vec<_> = lens.iter().map(|len| pool.take(*len)).collect();
            out.into_iter().for_each(|buffers| pool.give_back(buffers));
        };
        give(&mut pool, &[MIB; 12]);
        give(&mut pool, &[64 << 10; 32]);
        let of = |pool: &Pool, least: usize| pool.free.iter().filter(|buffers| buffers.capacity() >= least).count();
        assert_eq!((of(&pool, MIB), of(&pool, 64 << 10)), (6, 6 + 32));
        assert!(pool.capacity <= KEPT);
        let huge = pool.take(2 * KEPT);
        pool.give_back(huge);
        assert_eq!((of(&pool, MIB), pool.taken()), (6, 0), "what is larger than all that is kept displaces nothing");
        let all = pool.take(KEPT);
        assert_eq!(all.capacity(), KEPT);
        pool.give_back(all);
        assert_eq!((pool.free.len(), pool.capacity), (1, KEPT), "what is as large as that is kept alone");
    }
}
