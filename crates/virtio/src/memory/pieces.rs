//! Narrowing and copying pieces of guest memory.

use egret_disk::IoVec;

/// The sum of the pieces' lengths in bytes.
pub fn total(pieces: &[IoVec]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

/// Takes the last byte off the end of `pieces`, and off them every empty piece behind it.
pub fn take_last_byte(pieces: &mut Vec<IoVec>) -> Option<IoVec> {
    while let Some(last) = pieces.last_mut() {
        let Some(keep) = last.len().checked_sub(1) else {
            pieces.pop();
            continue;
        };
        // SAFETY: the last byte of a piece is as mapped as the piece.
        let byte = unsafe { IoVec::new(last.base().add(keep), 1) };
        if keep == 0 {
            pieces.pop();
        } else {
            // SAFETY: the first bytes of a piece are as mapped as the piece.
            *last = unsafe { IoVec::new(last.base(), keep) };
        }
        return Some(byte);
    }
    None
}

/// Appends to `into` what is left of `pieces` without their first `skip` bytes.
pub fn append_after(pieces: &[IoVec], mut skip: usize, into: &mut Vec<IoVec>) {
    for (at, piece) in pieces.iter().enumerate() {
        if skip < piece.len() {
            // SAFETY: `skip` is inside the piece, and the rest of a piece is as mapped as the piece.
            into.push(unsafe { IoVec::new(piece.base().add(skip), piece.len() - skip) });
            into.extend_from_slice(&pieces[at + 1..]);
            return;
        }
        skip -= piece.len();
    }
}

/// Copies `into.len()` bytes from guest memory.
///
/// Volatile, because the guest may be writing to them: what is read may be any mixture, but it is read once.
///
/// # Safety
///
/// `from` must be mapped for that many bytes.
#[inline]
pub(super) unsafe fn copy_from(from: *const u8, into: &mut [u8]) {
    let mut from = from;
    let mut chunks = into.chunks_exact_mut(8);
    for chunk in &mut chunks {
        // SAFETY: the caller's promise covers these eight bytes; an array of bytes needs no alignment.
        chunk.copy_from_slice(&unsafe { from.cast::<[u8; 8]>().read_volatile() });
        // SAFETY: still inside, or one past the end of, what the caller promised.
        from = unsafe { from.add(8) };
    }
    for byte in chunks.into_remainder() {
        // SAFETY: the caller's promise covers this byte.
        *byte = unsafe { from.read_volatile() };
        // SAFETY: still inside, or one past the end of, what the caller promised.
        from = unsafe { from.add(1) };
    }
}

/// Copies `bytes` to guest memory.
///
/// # Safety
///
/// `to` must be mapped for that many bytes.
#[inline]
pub(super) unsafe fn copy_to(to: *mut u8, bytes: &[u8]) {
    let mut to = to;
    let (chunks, rest) = bytes.as_chunks::<8>();
    for chunk in chunks {
        // SAFETY: the caller's promise covers these eight bytes; an array of bytes needs no alignment.
        unsafe { to.cast::<[u8; 8]>().write_volatile(*chunk) };
        // SAFETY: still inside, or one past the end of, what the caller promised.
        to = unsafe { to.add(8) };
    }
    for &byte in rest {
        // SAFETY: the caller's promise covers this byte.
        unsafe { to.write_volatile(byte) };
        // SAFETY: still inside, or one past the end of, what the caller promised.
        to = unsafe { to.add(1) };
    }
}
