//! Narrowing pieces of guest memory.

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
