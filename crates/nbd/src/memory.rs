//! A request's memory, which is usually a guest's: nobody refers to it, and it may change at any time.

#![allow(unsafe_code)]

use egret_vring::memory::iovecs::{self, pieces};
use egret_vring::memory::{IoVec, Lent, volatile};

/// Copies `from` to `lent`, beginning at its byte `at`.
pub(crate) fn scatter(lent: &Lent, at: u64, mut from: &[u8]) {
    pieces(lent, at, from.len() as u64, |base, len| {
        let part = from.split_off(..len).expect("the pieces are not longer than was asked for");
        // SAFETY: a part of a piece of memory that is lent, which is mapped.
        unsafe { volatile::copy_to(base, part) };
    });
}

/// Fills bytes `at..at + len` of `lent` with zeroes.
pub(crate) fn zero(lent: &Lent, at: u64, len: u64) {
    pieces(lent, at, len, |base, len| {
        // SAFETY: a part of a piece of memory that is lent, which is mapped.
        unsafe { volatile::zero(base, len) };
    });
}

/// Adds to `list` the pieces of `lent` that hold its bytes `at..at + len`.
pub(crate) fn append(lent: &Lent, at: u64, len: u64, list: &mut Vec<IoVec>) {
    iovecs::append_range(lent, at as usize, len as usize, list);
}

/// Adds to `list` the bytes themselves, which must stay where they are for as long as the list is used.
pub(crate) fn append_bytes(bytes: &[u8], list: &mut Vec<IoVec>) {
    if !bytes.is_empty() {
        // SAFETY: the caller keeps them, and has them sent only.
        list.push(unsafe { IoVec::new(bytes.as_ptr().cast_mut(), bytes.len()) });
    }
}

/// Adds to `list` the bytes themselves, to be written to: they must stay where they are for as long as the list is used.
pub(crate) fn append_room(bytes: &mut [u8], list: &mut Vec<IoVec>) {
    if !bytes.is_empty() {
        // SAFETY: the caller keeps them, and leaves them alone until they have been written to.
        list.push(unsafe { IoVec::new(bytes.as_mut_ptr(), bytes.len()) });
    }
}
