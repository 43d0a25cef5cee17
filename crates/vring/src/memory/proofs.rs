//! What holds of all addresses and lengths that a peer can name: proofs for Kani (`make kani`).

use std::mem;

use super::{Region, Span};

/// Bytes of the largest region here: its addresses are any, and its memory is really there.
const LARGEST: usize = 16;

/// A region of up to [`LARGEST`] bytes, somewhere.
fn any_span(host: &mut [u8; LARGEST]) -> Span {
    let (guest, size): (u64, u64) = (kani::any(), kani::any());
    kani::assume((1..=LARGEST as u64).contains(&size) && guest.checked_add(size).is_some());
    Span { guest, size, host: host.as_mut_ptr() }
}

#[kani::proof]
fn a_region_is_taken_exactly_if_it_ends_inside_all_that_it_is_in() {
    let region: Region<()> =
        Region { guest_addr: kani::any(), size: kani::any(), user_addr: kani::any(), file: (), offset: kani::any() };
    let fits = |start: u64, limit: u64| u128::from(start) + u128::from(region.size) <= u128::from(limit);
    let is_sound = region.size > 0
        && fits(region.guest_addr, u64::MAX)
        && fits(region.user_addr, u64::MAX)
        && fits(region.offset, i64::MAX as u64);
    let checked = region.check();
    assert_eq!(checked.is_ok(), is_sound);
    // The error of a system call, which it is not, would be looked at.
    mem::forget(checked);
}

#[kani::proof]
fn a_region_hands_out_exactly_what_is_inside_it() {
    let mut host = Default::default();
    let span = any_span(&mut host);
    let (addr, len): (u64, u64) = (kani::any(), kani::any());
    let end = span.guest + span.size;
    let is_inside = (span.guest..end).contains(&addr) && u128::from(addr) + u128::from(len) <= u128::from(end);
    let iovec = span.iovec(addr, len);
    assert_eq!(iovec.is_some(), is_inside);
    if let Some(iovec) = iovec {
        assert_eq!(iovec.base(), span.host.wrapping_add((addr - span.guest) as usize));
        assert_eq!(iovec.len() as u64, len);
        assert!(span.holds(&iovec));
    }
}

#[kani::proof]
fn nothing_is_in_no_region() {
    let (addr, len) = (kani::any(), kani::any());
    assert!(Span::NONE.iovec(addr, len).is_none());
}
