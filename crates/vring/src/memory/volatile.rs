//! Bytes in and out of memory that somebody else may be writing to.
//!
//! All access is by raw pointers and volatile, in words where they are aligned: a reference would promise that nobody
//! else writes, and a plain copy that what is read twice is the same. What is read while the other side changes it is
//! whatever it is, and is read once.
//!
//! Memory whose owner has taken it away makes such an access fault; the process's handler puts zeroes there, and the
//! access goes on.

/// Copies `into.len()` bytes at `from`.
///
/// # Safety
///
/// `from` must be mapped for that many bytes.
#[inline]
pub unsafe fn copy_from(from: *const u8, into: &mut [u8]) {
    if into.len() > 8 && !from.cast::<u64>().is_aligned() {
        // SAFETY: the caller's promise.
        return unsafe { copy_from_unaligned(from, into) };
    }
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

/// As [`copy_from`], more than a word from where a word ends before the next begins.
///
/// # Safety
///
/// `from` must be mapped for that many bytes.
#[inline(never)]
unsafe fn copy_from_unaligned(from: *const u8, into: &mut [u8]) {
    let (start, rest) = into.split_at_mut(from.align_offset(8));
    for (at, byte) in start.iter_mut().enumerate() {
        // SAFETY: this byte is among those promised.
        *byte = unsafe { from.add(at).read_volatile() };
    }
    // SAFETY: what is left of the room has what is left of the bytes, and these are aligned.
    unsafe { copy_from(from.add(start.len()), rest) };
}

/// Asks the processor to have the line of its cache with `at` when it is read. A hint: nothing is read, and no address faults.
#[inline]
pub fn prefetch(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: of SSE, which every x86-64 has.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

/// Copies `bytes` to `to`.
///
/// # Safety
///
/// `to` must be mapped for that many bytes.
#[inline]
pub unsafe fn copy_to(to: *mut u8, bytes: &[u8]) {
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

/// Fills `len` bytes at `at` with zeroes.
///
/// # Safety
///
/// `at` must be mapped for that many bytes.
pub unsafe fn zero(at: *mut u8, len: usize) {
    let (start, words, end) = split(at, len);
    for byte in start.each().chain(end.each()) {
        // SAFETY: this byte is among those promised.
        unsafe { byte.cast_mut().write_volatile(0) };
    }
    for word in words.each() {
        // SAFETY: these eight bytes are among those promised, and aligned.
        unsafe { word.cast_mut().write_volatile(0) };
    }
}

/// Whether the `len` bytes at `at` are nothing but zeroes; looks little further than the first byte that says no.
///
/// # Safety
///
/// `at` must be mapped for that many bytes.
pub unsafe fn is_zero(at: *const u8, len: usize) -> bool {
    let (start, words, end) = split(at, len);
    // SAFETY: this byte is among those promised.
    let byte_is_zero = |byte: *const u8| unsafe { byte.read_volatile() } == 0;
    // SAFETY: these eight bytes are among those promised, and aligned.
    let read = |word: *const u64| unsafe { word.read_volatile() };
    // Data mostly says at once that it is not zero; what does not is looked at eight words at a time.
    let part = |at, count| Span { base: words.base.wrapping_add(at), count }.each();
    let (grouped, rest) = (words.count / 8 * 8, words.count % 8);
    start.each().all(byte_is_zero)
        && (0..grouped).step_by(8).all(|at| part(at, 8).fold(0, |all, word| all | read(word)) == 0)
        && part(grouped, rest).all(|word| read(word) == 0)
        && end.each().all(byte_is_zero)
}

/// Values one behind the other, somewhere.
#[derive(Clone, Copy)]
struct Span<T> {
    base: *const T,
    count: usize,
}

impl<T> Span<T> {
    /// Where each is.
    fn each(self) -> impl Iterator<Item = *const T> {
        (0..self.count).map(move |at| self.base.wrapping_add(at))
    }
}

/// Bytes, aligned words and bytes again.
fn split(base: *const u8, len: usize) -> (Span<u8>, Span<u64>, Span<u8>) {
    let before = base.align_offset(8).min(len);
    let middle = base.wrapping_add(before);
    let (words, after) = ((len - before) / 8, (len - before) % 8);
    let end = middle.wrapping_add(words * 8);
    let (start, words) = (Span { base, count: before }, Span { base: middle.cast(), count: words });
    (start, words, Span { base: end, count: after })
}
