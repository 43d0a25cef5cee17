//! Narrowing iovecs of guest memory.

use super::IoVec;

/// The sum of the iovecs' lengths in bytes.
pub fn total(iovecs: &[IoVec]) -> u64 {
    iovecs.iter().map(|iovec| iovec.len() as u64).sum()
}

/// The first `len` bytes of `iovecs`, if they are in one iovec.
#[inline]
pub fn first(iovecs: &[IoVec], len: usize) -> Option<IoVec> {
    let iovec = iovecs.first().filter(|iovec| len <= iovec.len())?;
    // SAFETY: the first bytes of an iovec are as mapped as the iovec.
    Some(unsafe { IoVec::new(iovec.base(), len) })
}

/// Takes the last byte off the end of `iovecs`, and off them every empty iovec behind it.
#[inline]
pub fn take_last_byte(iovecs: &mut Vec<IoVec>) -> Option<IoVec> {
    while let Some(last) = iovecs.last_mut() {
        let Some(keep) = last.len().checked_sub(1) else {
            iovecs.pop();
            continue;
        };
        // SAFETY: the last byte of an iovec is as mapped as the iovec.
        let byte = unsafe { IoVec::new(last.base().add(keep), 1) };
        if keep == 0 {
            iovecs.pop();
        } else {
            // SAFETY: the first bytes of an iovec are as mapped as the iovec.
            *last = unsafe { IoVec::new(last.base(), keep) };
        }
        return Some(byte);
    }
    None
}

/// Appends to `into` what is left of `iovecs` without their first `skip` bytes.
#[inline]
pub fn append_after(iovecs: &[IoVec], mut skip: usize, into: &mut Vec<IoVec>) {
    for (at, iovec) in iovecs.iter().enumerate() {
        if skip < iovec.len() {
            // SAFETY: `skip` is inside the iovec, and the rest of an iovec is as mapped as the iovec.
            into.push(unsafe { IoVec::new(iovec.base().add(skip), iovec.len() - skip) });
            into.extend_from_slice(&iovecs[at + 1..]);
            return;
        }
        skip -= iovec.len();
    }
}

/// Appends to `into` the `len` bytes of `iovecs` that follow their first `skip`; fewer if they end earlier.
#[inline(always)]
pub fn append_range(iovecs: &[IoVec], mut skip: usize, mut len: usize, into: &mut Vec<IoVec>) {
    for iovec in iovecs {
        if skip >= iovec.len() {
            skip -= iovec.len();
            continue;
        }
        let part = len.min(iovec.len() - skip);
        if part == 0 {
            return;
        }
        // SAFETY: `skip + part` is inside the iovec, and a part of an iovec is as mapped as the iovec.
        into.push(unsafe { IoVec::new(iovec.base().add(skip), part) });
        skip = 0;
        len -= part;
    }
}

/// Calls `each` with the pieces of `iovecs` that hold bytes `at..at + len` of them.
pub fn pieces(iovecs: &[IoVec], mut at: u64, mut len: u64, mut each: impl FnMut(*mut u8, usize)) {
    for piece in iovecs {
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
