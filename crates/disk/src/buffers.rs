//! Moving bytes in and out of a request's memory, which is usually a guest's and may change at any time.
//!
//! All access is [`volatile`]. Nothing here decides anything by what is read except what goes to the guest's own disk.

#![allow(unsafe_code)]

use std::alloc::{self, Layout};
use std::ptr::NonNull;

use egret_vring::memory::iovecs::{self, pieces};
use egret_vring::memory::{IoVec, volatile};

/// Replaces `list` by the pieces of the `len` bytes of `buffers` that follow their first `skip`; fewer if they end earlier.
pub(crate) fn cut(buffers: &[IoVec], skip: u64, len: u64, list: &mut Vec<IoVec>) {
    list.clear();
    iovecs::append_range(buffers, skip as usize, len as usize, list);
}

/// Fills `buffers` with zeroes from byte `at` to their end.
pub(crate) fn zero(buffers: &[IoVec], at: u64) {
    pieces(buffers, at, u64::MAX, |base, len| {
        // SAFETY: the piece is of a request that is not over, whose memory is lent, and this is a part of it.
        unsafe { volatile::zero(base, len) };
    });
}

/// Copies `from` to `buffers`, beginning at their byte `at`.
pub(crate) fn scatter(buffers: &[IoVec], at: u64, mut from: &[u8]) {
    pieces(buffers, at, from.len() as u64, |base, len| {
        let part = from.split_off(..len).expect("the pieces are not longer than was asked for");
        // SAFETY: the piece is of a request that is not over, whose memory is lent, and this is a part of it.
        unsafe { volatile::copy_to(base, part) };
    });
}

/// Fills `to` from `buffers`, beginning at their byte `at`.
pub(crate) fn gather(buffers: &[IoVec], at: u64, mut to: &mut [u8]) {
    pieces(buffers, at, to.len() as u64, |base, len| {
        let part = to.split_off_mut(..len).expect("the pieces are not longer than was asked for");
        // SAFETY: the piece is of a request that is not over, whose memory is lent, and this is a part of it.
        unsafe { volatile::copy_from(base, part) };
    });
}

/// Whether there is nothing but zeroes in the first `len` bytes of `buffers`; looks little further than the first byte
/// that says no.
pub(crate) fn is_zero(buffers: &[IoVec], len: u64) -> bool {
    let mut zero = true;
    pieces(buffers, 0, len, |base, len| {
        // SAFETY: the piece is of a request that is not over, whose memory is lent, and this is a part of it.
        zero = zero && unsafe { volatile::is_zero(base, len) };
    });
    zero
}

/// Memory as direct I/O likes it.
pub(crate) struct Aligned {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory, like a `Box<[u8]>`.
unsafe impl Send for Aligned {}

impl Aligned {
    /// `len` zeroed bytes at a multiple of `align`, which is a power of two.
    pub(crate) fn zeroed(len: usize, align: usize) -> Self {
        let layout = Layout::from_size_align(len.max(1), align).expect("an alignment is a power of two");
        // SAFETY: the layout is not of size zero.
        let base = unsafe { alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else { alloc::handle_alloc_error(layout) };
        Self { base, layout }
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.layout.size()
    }

    /// What it is aligned to, in bytes.
    pub(crate) fn align(&self) -> usize {
        self.layout.align()
    }

    /// All of it.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this size, initialised, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.layout.size()) }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { alloc::dealloc(self.base.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split_at(memory: &mut [u8], at: usize) -> [IoVec; 2] {
        let (left, right) = memory.split_at_mut(at);
        // SAFETY: the memory outlives the pieces in every test here.
        unsafe { [IoVec::new(left.as_mut_ptr(), left.len()), IoVec::new(right.as_mut_ptr(), right.len())] }
    }

    /// Pages of this process's memory, whether or not anything is behind them.
    fn pages() -> u64 {
        let sizes = std::fs::read_to_string("/proc/self/statm").unwrap();
        sizes.split(' ').next().unwrap().parse().unwrap()
    }

    #[test]
    fn memory_that_is_dropped_is_given_back() {
        let before = pages();
        // 64 GiB in all, which nobody touches: more than other tests have meanwhile.
        (0..1024).for_each(|_| drop(Aligned::zeroed(64 << 20, 8)));
        assert!(pages() < before + (32 << 30) / 4096);
    }

    #[test]
    fn bytes_scattered_over_pieces_gather_to_the_same_bytes() {
        // Pieces that begin and end at every place in a word, short ones among them.
        for (at, len) in (0..24).flat_map(|at| (0..50).map(move |len| (at, len))) {
            let mut memory = [0u8; 100];
            let buffers = split_at(&mut memory, 33);
            let data: Vec<u8> = (1..=len).collect();
            scatter(&buffers, at, &data);
            let mut back = vec![0u8; data.len()];
            gather(&buffers, at, &mut back);
            assert_eq!(back, data);
            let at = at as usize;
            assert_eq!(memory[at..at + data.len()], data);
            assert!(memory[..at].iter().chain(&memory[at + data.len()..]).all(|&b| b == 0));
        }
    }

    #[test]
    fn pieces_are_cut_where_it_was_told() {
        let mut memory = [7u8; 100];
        let buffers = split_at(&mut memory, 33);
        let mut list = Vec::new();
        let mut lengths = |skip, len| {
            cut(&buffers, skip, len, &mut list);
            list.iter().map(IoVec::len).collect::<Vec<_>>()
        };
        assert_eq!(lengths(10, u64::MAX), [23, 67]);
        assert_eq!(lengths(33, u64::MAX), [67]);
        assert_eq!(lengths(10, 23), [23]);
        assert_eq!(lengths(10, 30), [23, 7]);
        assert_eq!(lengths(50, 30), [30]);
        assert_eq!(lengths(100, u64::MAX), [0; 0]);
        zero(&buffers, 40);
        assert!(memory[..40].iter().all(|&b| b == 7) && memory[40..].iter().all(|&b| b == 0));
    }

    #[test]
    fn one_byte_anywhere_makes_memory_not_zero() {
        let mut memory = [0u8; 211];
        assert!(is_zero(&split_at(&mut memory, 37), u64::MAX));
        for at in 0..memory.len() {
            memory[at] = 1;
            assert!(!is_zero(&split_at(&mut memory, 37), u64::MAX), "byte {at}");
            assert!(is_zero(&split_at(&mut memory, 37), at as u64), "before byte {at}");
            memory[at] = 0;
        }
        assert!(is_zero(&[], u64::MAX));
    }

    #[test]
    fn aligned_memory_is_aligned_and_zero() {
        let mut memory = Aligned::zeroed(8192, 4096);
        assert_eq!(memory.bytes().as_ptr() as usize % 4096, 0);
        assert!(memory.bytes().iter().all(|&b| b == 0));
    }
}
