//! Narrowing and copying pieces of guest memory.

use super::IoVec;

/// The sum of the pieces' lengths in bytes.
pub fn total(pieces: &[IoVec]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

/// The first `len` bytes of `pieces`, if they are in one piece.
#[inline]
pub fn first(pieces: &[IoVec], len: usize) -> Option<IoVec> {
    let piece = pieces.first().filter(|piece| len <= piece.len())?;
    // SAFETY: the first bytes of a piece are as mapped as the piece.
    Some(unsafe { IoVec::new(piece.base(), len) })
}

/// Takes the last byte off the end of `pieces`, and off them every empty piece behind it.
#[inline]
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
#[inline]
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

/// Appends to `into` the `len` bytes of `pieces` that follow their first `skip`; fewer if they end earlier.
#[inline(always)]
pub fn append_range(pieces: &[IoVec], mut skip: usize, mut len: usize, into: &mut Vec<IoVec>) {
    for piece in pieces {
        if skip >= piece.len() {
            skip -= piece.len();
            continue;
        }
        let part = len.min(piece.len() - skip);
        if part == 0 {
            return;
        }
        // SAFETY: `skip + part` is inside the piece, and a part of a piece is as mapped as the piece.
        into.push(unsafe { IoVec::new(piece.base().add(skip), part) });
        skip = 0;
        len -= part;
    }
}

/// Copies `into.len()` bytes from guest memory.
///
/// Volatile, because the guest may be writing to them: what is read may be any mixture, but it is read once. In words
/// where they are aligned, as a request's header is.
///
/// # Safety
///
/// `from` must be mapped for that many bytes.
#[inline]
pub(super) unsafe fn copy_from(from: *const u8, into: &mut [u8]) {
    let mut done = 0;
    if from.cast::<u64>().is_aligned() {
        for word in into.chunks_exact_mut(8) {
            // SAFETY: these eight bytes are among those promised, and eight at a time stay aligned.
            word.copy_from_slice(&unsafe { from.add(done).cast::<u64>().read_volatile() }.to_ne_bytes());
            done += 8;
        }
    }
    for (at, byte) in into.iter_mut().enumerate().skip(done) {
        // SAFETY: this byte is among those promised.
        *byte = unsafe { from.add(at).read_volatile() };
    }
}

/// Copies `bytes` to guest memory: volatile, and in words where they are aligned.
///
/// # Safety
///
/// `to` must be mapped for that many bytes.
#[inline]
pub(super) unsafe fn copy_to(to: *mut u8, bytes: &[u8]) {
    if bytes.len() > 8 && !to.cast::<u64>().is_aligned() {
        // SAFETY: the caller's promise.
        return unsafe { copy_to_unaligned(to, bytes) };
    }
    let (words, end) = bytes.as_chunks();
    let (halves, rest) = end.as_chunks();
    let mut done = 0;
    if to.cast::<u64>().is_aligned() {
        for word in words {
            // SAFETY: these eight bytes are among those promised, and eight at a time stay aligned.
            unsafe { to.add(done).cast::<u64>().write_volatile(u64::from_ne_bytes(*word)) };
            done += 8;
        }
        // The response of virtio-scsi has such an end.
        for half in halves {
            // SAFETY: likewise these four.
            unsafe { to.add(done).cast::<u32>().write_volatile(u32::from_ne_bytes(*half)) };
            done += 4;
        }
        debug_assert_eq!(done + rest.len(), bytes.len());
    }
    for (at, &byte) in bytes.iter().enumerate().skip(done) {
        // SAFETY: this byte is among those promised.
        unsafe { to.add(at).write_volatile(byte) };
    }
}

/// As [`copy_to`], more than a word to where a word ends before the next begins: Linux has room for a response of
/// virtio-scsi there.
///
/// # Safety
///
/// `to` must be mapped for that many bytes.
#[inline(never)]
unsafe fn copy_to_unaligned(to: *mut u8, bytes: &[u8]) {
    let (start, rest) = bytes.split_at(to.align_offset(8));
    for (at, &byte) in start.iter().enumerate() {
        // SAFETY: this byte is among those promised.
        unsafe { to.add(at).write_volatile(byte) };
    }
    // SAFETY: what is left of the bytes has what is left of the room, and that is aligned.
    unsafe { copy_to(to.add(start.len()), rest) };
}
