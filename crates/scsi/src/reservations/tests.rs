use super::*;

const A: NexusId = NexusId { initiator: 1, port: 1 };
const B: NexusId = NexusId { initiator: 2, port: 1 };
const C: NexusId = NexusId { initiator: 3, port: 1 };
const BOTH: u8 = Flags::NO_READ | Flags::NO_WRITE;

/// A with key 1, B with 2, C with 3.
fn registered() -> Reservations {
    let mut table = Reservations::default();
    for (nexus, key) in [(A, 1), (B, 2), (C, 3)] {
        assert_eq!(table.register(nexus, 0, key), Ok(vec![]));
    }
    table
}

fn held(kind: Type) -> Reservations {
    let mut table = registered();
    assert_eq!(table.reserve(A, 1, Some(kind)), Ok(vec![]));
    table
}

/// SPC-5, basic PERSISTENT RESERVE OUT parameter list.
#[test]
fn register_demands_the_key_that_is_registered() {
    let mut table = Reservations::default();
    assert_eq!(table.register(A, 7, 1), Err(Refused::Conflict));
    assert_eq!(table.register(A, 0, 1), Ok(vec![]));
    assert_eq!(table.register(A, 0, 2), Err(Refused::Conflict));
    assert_eq!(table.register(A, 1, 2), Ok(vec![]));
    assert_eq!(table.registrations(), [Registration { nexus: A, key: 2 }]);
    assert_eq!(table.generation(), 2);
}

/// SPC-5, registering.
#[test]
fn register_and_ignore_existing_key_demands_none() {
    let mut table = registered();
    assert_eq!(table.register_anyway(A, 9), vec![]);
    assert_eq!(table.registrations()[0].key, 9);
    let generation = table.generation();
    assert_eq!(table.register_anyway(NexusId { initiator: 4, port: 1 }, 0), vec![]);
    assert_eq!(table.generation(), generation, "nothing was registered and nothing is");
}

#[test]
fn whoever_is_not_registered_conflicts_in_every_other_service_action() {
    let mut table = Reservations::default();
    let kind = Some(Type::WriteExclusive);
    assert_eq!(table.reserve(A, 0, kind), Err(Refused::Conflict));
    assert_eq!(table.release(A, 0, kind), Err(Refused::Conflict));
    assert_eq!(table.clear(A, 0), Err(Refused::Conflict));
    assert_eq!(table.preempt(A, 0, 1, kind), Err(Refused::Conflict));
    assert_eq!(table.generation(), 0);
}

/// SPC-5, persistent reservations type.
#[test]
fn each_type_keeps_out_whom_the_table_of_types_says() {
    // What the registered B and the unregistered D may not do while A has the reservation.
    for (kind, registrant, stranger) in [
        (Type::WriteExclusive, Flags::NO_WRITE, Flags::NO_WRITE),
        (Type::ExclusiveAccess, BOTH, BOTH),
        (Type::WriteExclusiveRegistrants, 0, Flags::NO_WRITE),
        (Type::ExclusiveAccessRegistrants, 0, BOTH),
        (Type::WriteExclusiveAll, 0, Flags::NO_WRITE),
        (Type::ExclusiveAccessAll, 0, BOTH),
    ] {
        let table = held(kind);
        assert_eq!(table.denied(A), 0, "{kind:?}");
        assert_eq!(table.denied(B), registrant, "{kind:?}");
        assert_eq!(table.denied(NexusId { initiator: 4, port: 1 }), stranger, "{kind:?}");
        assert_eq!(table.denied(NexusId { initiator: 1, port: 2 }), stranger, "another port is another nexus");
    }
}

/// SPC-5, reserving.
#[test]
fn reserve_again_succeeds_for_the_holder_alone_and_the_same_type_alone() {
    let mut table = held(Type::WriteExclusive);
    assert_eq!(table.reserve(A, 1, Some(Type::WriteExclusive)), Ok(vec![]));
    assert_eq!(table.reserve(A, 1, Some(Type::ExclusiveAccess)), Err(Refused::Conflict));
    assert_eq!(table.reserve(B, 2, Some(Type::WriteExclusive)), Err(Refused::Conflict));
    let mut table = held(Type::WriteExclusiveAll);
    assert_eq!(table.reserve(B, 2, Some(Type::WriteExclusiveAll)), Ok(vec![]));
    assert_eq!(table.reserve(B, 2, None), Err(Refused::NoSuchType));
}

/// SPC-5, releasing.
#[test]
fn release_tells_registrants_of_a_reservation_they_had_part_in() {
    for (kind, told) in [
        (Type::WriteExclusive, vec![]),
        (Type::ExclusiveAccess, vec![]),
        (Type::ExclusiveAccessRegistrants, vec![B, C]),
        (Type::WriteExclusiveAll, vec![B, C]),
    ] {
        let mut table = held(kind);
        assert_eq!(table.release(A, 1, None), Err(Refused::NotThatOne));
        let told = told.into_iter().map(|n| (n, Attention::ReservationsReleased)).collect();
        assert_eq!(table.release(A, 1, Some(kind)), Ok(told));
        assert_eq!(table.reservation(), None);
    }
}

/// SPC-5, releasing.
#[test]
fn release_by_who_does_not_hold_it_is_good_and_does_nothing() {
    let mut table = held(Type::WriteExclusive);
    assert_eq!(table.release(B, 2, Some(Type::WriteExclusive)), Ok(vec![]));
    assert_eq!(table.reservation(), Some((Type::WriteExclusive, 1)));
}

/// SPC-5, unregistering.
#[test]
fn unregistering_the_holder_ends_the_reservation() {
    let mut table = held(Type::WriteExclusiveRegistrants);
    let released = Attention::ReservationsReleased;
    assert_eq!(table.register(A, 1, 0), Ok(vec![(B, released), (C, released)]));
    assert_eq!(table.reservation(), None);
}

/// SPC-5, unregistering.
#[test]
fn a_reservation_for_all_registrants_ends_with_the_last_of_them() {
    let mut table = held(Type::ExclusiveAccessAll);
    assert_eq!(table.register(A, 1, 0), Ok(vec![]));
    assert_eq!(table.register(C, 3, 0), Ok(vec![]));
    assert_eq!(table.reservation(), Some((Type::ExclusiveAccessAll, 0)));
    assert_eq!(table.register(B, 2, 0), Ok(vec![]));
    assert_eq!(table.reservation(), None);
}

/// SPC-5, clearing.
#[test]
fn clear_tells_all_other_registrants() {
    let mut table = held(Type::WriteExclusive);
    let preempted = Attention::ReservationsPreempted;
    assert_eq!(table.clear(B, 2), Ok(vec![(A, preempted), (C, preempted)]));
    assert_eq!((table.reservation(), table.registrations()), (None, &[][..]));
    assert_eq!(table.generation(), 4);
}

/// SPC-5, preempting persistent reservations.
#[test]
fn preempting_the_holder_takes_the_reservation_over() {
    let mut table = held(Type::WriteExclusive);
    let told = table.preempt(B, 2, 1, Some(Type::WriteExclusive));
    assert_eq!(told, Ok(vec![(A, Attention::RegistrationsPreempted)]));
    assert_eq!(table.reservation(), Some((Type::WriteExclusive, 2)));
    assert_eq!(table.denied(A), Flags::NO_WRITE);
    assert!(table.holds(B) && !table.is_registered(A));
}

/// SPC-5, preempting persistent reservations.
#[test]
fn taking_over_with_another_type_tells_registrants_that_the_old_one_is_gone_whatever_it_was() {
    for (before, after) in [
        (Type::WriteExclusiveRegistrants, Type::ExclusiveAccess),
        (Type::WriteExclusive, Type::ExclusiveAccess),
        (Type::ExclusiveAccess, Type::WriteExclusiveRegistrants),
    ] {
        let mut table = held(before);
        let told = table.preempt(B, 2, 1, Some(after));
        let (removed, released) = (Attention::RegistrationsPreempted, Attention::ReservationsReleased);
        assert_eq!(told, Ok(vec![(A, removed), (C, released)]), "{before:?}");
        assert_eq!(table.reservation(), Some((after, 2)));
    }
}

/// SPC-5, preempting persistent reservations.
#[test]
fn a_holder_may_preempt_itself_to_change_the_type_and_stays_registered() {
    let mut table = held(Type::WriteExclusive);
    let released = Attention::ReservationsReleased;
    assert_eq!(table.preempt(A, 1, 1, Some(Type::ExclusiveAccess)), Ok(vec![(B, released), (C, released)]));
    assert_eq!(table.reservation(), Some((Type::ExclusiveAccess, 1)));
    assert!(table.is_registered(A));
}

/// SPC-5, removing registrations.
#[test]
fn preempting_another_registrant_leaves_the_reservation_alone() {
    let mut table = held(Type::WriteExclusive);
    assert_eq!(table.preempt(B, 2, 3, None), Ok(vec![(C, Attention::RegistrationsPreempted)]));
    assert_eq!(table.reservation(), Some((Type::WriteExclusive, 1)));
    assert_eq!(table.preempt(B, 2, 3, None), Err(Refused::Conflict), "nobody has that key now");
    assert_eq!(table.preempt(B, 2, 0, None), Err(Refused::ZeroKey));
}

/// SPC-5, preempting persistent reservations.
#[test]
fn preempting_key_zero_takes_a_reservation_for_all_registrants_from_all() {
    let mut table = held(Type::WriteExclusiveAll);
    let removed = Attention::RegistrationsPreempted;
    assert_eq!(table.preempt(B, 2, 0, Some(Type::WriteExclusive)), Ok(vec![(A, removed), (C, removed)]));
    assert_eq!(table.registrations(), [Registration { nexus: B, key: 2 }]);
    assert_eq!(table.reservation(), Some((Type::WriteExclusive, 2)));
}

/// SPC-5, removing registrations.
#[test]
fn preempting_one_key_of_a_reservation_for_all_registrants_removes_that_one() {
    let mut table = held(Type::WriteExclusiveAll);
    assert_eq!(table.preempt(B, 2, 1, None), Ok(vec![(A, Attention::RegistrationsPreempted)]));
    assert_eq!(table.reservation(), Some((Type::WriteExclusiveAll, 0)));
    assert_eq!(table.denied(A), Flags::NO_WRITE);
}
