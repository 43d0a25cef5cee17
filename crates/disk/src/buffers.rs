//! Moving bytes in and out of a request's memory, which is usually a guest's and may change at any time.
//!
//! All access is by raw pointers, because a reference would promise that nobody else writes. What is read while the
//! guest changes it is whatever it is; nothing here decides anything by it except what goes to the guest's own disk.

use std::alloc::{self, Layout};
use std::ptr::{self, NonNull};

use crate::request::IoVec;

/// Calls `each` with the pieces of `buffers` that hold bytes `at..at + len` of them.
fn pieces(buffers: &[IoVec], mut at: u64, mut len: u64, mut each: impl FnMut(*mut u8, usize)) {
    for piece in buffers {
        if len == 0 {
            return;
        }
        let whole = piece.len() as u64;
        if at >= whole {
            at -= whole;
            continue;
        }
        let take = (whole - at).min(len);
        // `at` is within the piece.
        each(piece.base().wrapping_add(at as usize), take as usize);
        len -= take;
        at = 0;
    }
}

/// Replaces `rest` by what is left of `buffers` after their first `skip` bytes.
pub(crate) fn tail(buffers: &[IoVec], skip: u64, rest: &mut Vec<IoVec>) {
    rest.clear();
    pieces(buffers, skip, u64::MAX, |base, len| {
        // SAFETY: a part of a piece that is promised to stay mapped until the request completes.
        rest.push(unsafe { IoVec::new(base, len) });
    });
}

/// Fills `buffers` with zeroes from byte `at` to their end.
pub(crate) fn zero(buffers: &[IoVec], at: u64) {
    pieces(buffers, at, u64::MAX, |base, len| {
        // SAFETY: `IoVec::new` was promised that the piece is mapped and writable; zero is a value of every byte.
        unsafe { ptr::write_bytes(base, 0, len) }
    });
}

/// Copies `from` to `buffers`, beginning at their byte `at`.
pub(crate) fn scatter(buffers: &[IoVec], at: u64, from: &[u8]) {
    let mut done = 0;
    pieces(buffers, at, from.len() as u64, |base, len| {
        let part = &from[done..done + len];
        // SAFETY: `IoVec::new` was promised that the piece is mapped and writable; `from` is memory of ours.
        unsafe { ptr::copy_nonoverlapping(part.as_ptr(), base, len) }
        done += len;
    });
}

/// Fills `to` from `buffers`, beginning at their byte `at`.
pub(crate) fn gather(buffers: &[IoVec], at: u64, to: &mut [u8]) {
    let mut done = 0;
    pieces(buffers, at, to.len() as u64, |base, len| {
        let part = &mut to[done..done + len];
        // SAFETY: `IoVec::new` was promised that the piece is mapped and readable; `to` is memory of ours.
        unsafe { ptr::copy_nonoverlapping(base, part.as_mut_ptr(), len) }
        done += len;
    });
}

/// Whether there is nothing but zeroes in `buffers`; looks no further than the first byte that says no.
pub(crate) fn is_zero(buffers: &[IoVec]) -> bool {
    buffers.iter().all(|piece| {
        let (base, len) = (piece.base(), piece.len());
        let words = len / 8;
        // SAFETY: `IoVec::new` was promised that the piece is mapped and readable; `i < words`, so it ends within.
        let word = |i: usize| unsafe { base.cast::<u64>().add(i).read_unaligned() };
        // SAFETY: as above, with `i < len`.
        let byte = |i: usize| unsafe { base.add(i).read() };
        // Data mostly says at once that it is not zero; what does not is looked at eight words at a time.
        let groups = words / 8;
        (0..groups).all(|g| (0..8).fold(0, |all, i| all | word(g * 8 + i)) == 0)
            && (groups * 8..words).all(|i| word(i) == 0)
            && (words * 8..len).all(|i| byte(i) == 0)
    })
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

    fn split(memory: &mut [u8], at: usize) -> [IoVec; 2] {
        let (left, right) = memory.split_at_mut(at);
        // SAFETY: the memory outlives the pieces in every test here.
        unsafe { [IoVec::new(left.as_mut_ptr(), left.len()), IoVec::new(right.as_mut_ptr(), right.len())] }
    }

    #[test]
    fn bytes_scattered_over_pieces_gather_to_the_same_bytes() {
        let mut memory = [0u8; 100];
        let buffers = split(&mut memory, 33);
        let data: Vec<u8> = (1..=50).collect();
        scatter(&buffers, 20, &data);
        let mut back = [0u8; 50];
        gather(&buffers, 20, &mut back);
        assert_eq!(back.as_slice(), data);
        assert!(memory[..20].iter().all(|&b| b == 0) && memory[70..].iter().all(|&b| b == 0));
    }

    #[test]
    fn the_tail_of_pieces_begins_where_it_was_told() {
        let mut memory = [7u8; 100];
        let buffers = split(&mut memory, 33);
        let mut rest = Vec::new();
        tail(&buffers, 10, &mut rest);
        assert_eq!(rest.iter().map(IoVec::len).collect::<Vec<_>>(), [23, 67]);
        tail(&buffers, 33, &mut rest);
        assert_eq!(rest.iter().map(IoVec::len).collect::<Vec<_>>(), [67]);
        tail(&buffers, 100, &mut rest);
        assert!(rest.is_empty());
        zero(&buffers, 40);
        assert!(memory[..40].iter().all(|&b| b == 7) && memory[40..].iter().all(|&b| b == 0));
    }

    #[test]
    fn one_byte_anywhere_makes_memory_not_zero() {
        let mut memory = [0u8; 211];
        assert!(is_zero(&split(&mut memory, 37)));
        for at in 0..memory.len() {
            memory[at] = 1;
            assert!(!is_zero(&split(&mut memory, 37)), "byte {at}");
            memory[at] = 0;
        }
        assert!(is_zero(&[]));
    }

    #[test]
    fn aligned_memory_is_aligned_and_zero() {
        let mut memory = Aligned::zeroed(8192, 4096);
        assert_eq!(memory.bytes().as_ptr() as usize % 4096, 0);
        assert!(memory.bytes().iter().all(|&b| b == 0));
    }
}
