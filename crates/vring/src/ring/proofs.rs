//! What holds of all numbers, in the arithmetic of both kinds of ring: proofs for Kani (`make kani`).

use super::packed::area::Position;
use super::{MAX_SIZE, need_event};

fn any_size() -> u16 {
    let size = kani::any();
    kani::assume((1..=MAX_SIZE).contains(&size));
    size
}

fn any_place(size: u16) -> Position {
    let place = Position::new(kani::any(), size);
    kani::assume(place.is_ok());
    place.unwrap()
}

/// How far one has gone who is here, of the two laps that can be told apart: the counter begins at 1 (2.8.1).
fn steps(place: Position, size: u16) -> u32 {
    u32::from(place.slot()) + if place.wrap() == 1 { 0 } else { u32::from(size) }
}

/// As many steps in the first two laps.
fn in_two_laps(steps: u32, size: u16) -> u32 {
    let laps = 2 * u32::from(size);
    if steps < laps { steps } else { steps - laps }
}

#[kani::proof]
fn an_index_tells_of_exactly_the_events_that_it_has_moved_past() {
    let (event, old, moved): (u16, u16, u16) = (kani::any(), kani::any(), kani::any());
    // 2.7.10: among the entries from `old` up to but not including `new`.
    let expected = event.wrapping_sub(old) < moved;
    assert_eq!(need_event(event, old.wrapping_add(moved), old), expected);
}

#[kani::proof]
fn a_position_goes_round_its_ring_and_its_wrap_counter_with_it() {
    let size = any_size();
    let (here, by) = (any_place(size), kani::any());
    kani::assume(by <= size);
    let there = here.advance(by, size);
    assert!(there.slot() < size);
    assert_eq!(steps(there, size), in_two_laps(steps(here, size) + u32::from(by), size));
}

#[kani::proof]
fn a_place_is_passed_by_exactly_the_batches_that_it_is_in() {
    let size = any_size();
    let (place, end, count) = (any_place(size), any_place(size), kani::any());
    kani::assume(count <= size);
    let behind = in_two_laps(steps(end, size) + 2 * u32::from(size) - steps(place, size), size);
    assert_eq!(place.is_passed(end, count, size), (1..=u32::from(count)).contains(&behind));
}

/// The other side may have written any place, of any ring.
#[kani::proof]
fn a_place_that_is_not_in_the_ring_does_no_harm() {
    let size = any_size();
    let (end, count) = (any_place(size), kani::any());
    kani::assume(count <= size);
    let elsewhere = Position::new(kani::any(), MAX_SIZE);
    kani::assume(elsewhere.is_ok());
    assert!(count > 0 || !elsewhere.unwrap().is_passed(end, count, size));
}
