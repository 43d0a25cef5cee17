use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::LunConfig;
use crate::nexus::{Flags, Nexus};
use crate::testing::{BLOCK, BLOCKS, config};

const A: NexusId = NexusId { initiator: 1, port: 1 };
const B: NexusId = NexusId { initiator: 2, port: 1 };

/// Its medium is removable.
fn unit(nexus: NexusId) -> (LogicalUnit, Arc<Nexus>) {
    let unit = LogicalUnit::new(LunConfig { removable: true, ..config() }).unwrap();
    let nexus = unit.attach(nexus);
    (unit, nexus)
}

/// What a nexus has elsewhere after it was handed over as bytes.
fn moved(from: &LogicalUnit, to: &LogicalUnit) -> Result<(), UnitStateError> {
    to.restore(B, &UnitState::from_bytes(&from.save(A).to_bytes()).unwrap(), Origin::Elsewhere)
}

#[test]
fn a_nexus_that_moves_is_told_what_it_was_not_told_yet_and_nothing_else() {
    let ((from, before), (to, after)) = (unit(A), unit(B));
    assert_eq!(before.take_attention().unwrap().code, crate::Code::POWER_ON);
    moved(&from, &to).unwrap();
    assert_eq!(after.take_attention(), None, "of no power on either");
    before.attend(Attention::ModeChanged);
    before.attend(Attention::LunsChanged);
    moved(&from, &to).unwrap();
    assert!(after.flags().has(Flags::ATTENTION));
    assert_eq!(after.take_attention().unwrap().code, crate::Code::LUNS_CHANGED);
    assert_eq!(after.take_attention().unwrap().code, crate::Code::MODE_CHANGED);
    assert_eq!(after.take_attention(), None);
}

#[test]
fn a_nexus_that_moves_is_told_that_the_unit_has_another_size_there() {
    let ((from, before), (to, after)) = (unit(A), unit(B));
    before.take_attention();
    to.set_capacity((BLOCKS * BLOCK / 2) as u64);
    moved(&from, &to).unwrap();
    assert_eq!(after.take_attention().unwrap().code, crate::Code::CAPACITY_CHANGED);
    assert_eq!(after.take_attention(), None);
}

#[test]
fn a_registration_and_the_reservation_that_it_holds_move_along() {
    let ((from, _), (to, _)) = (unit(A), unit(B));
    for kind in Type::ALL {
        let mut state = from.state();
        state.reservations = Default::default();
        state.reservations.register(A, 0, 7).unwrap();
        state.reservations.reserve(A, 7, Some(kind)).unwrap();
        drop(state);
        let stranger = to.attach(NexusId { initiator: 9, port: 1 });
        to.state().reservations = Default::default();
        moved(&from, &to).unwrap();
        let state = to.state();
        assert_eq!(state.reservations.key_of(B), Some(7));
        assert!(state.reservations.holds(B));
        assert_eq!(state.reservations.generation(), 1);
        assert!(stranger.flags().has(Flags::NO_WRITE), "{kind:?} keeps others out");
    }
}

#[test]
fn what_reserve_has_reserved_and_what_is_prevented_move_along() {
    let ((from, _), (to, _)) = (unit(A), unit(B));
    from.state().reservations.reserve_unit(A).unwrap();
    from.state().preventing.push(A);
    from.state().set_ejected(true);
    from.set_write_cache(&from.state(), false);
    from.set_write_protect(true);
    moved(&from, &to).unwrap();
    let state = to.state();
    assert!(state.reservations.has_reserved_unit(B));
    assert_eq!((&state.preventing[..], state.ejected), (&[B][..], true));
    drop(state);
    assert!(!to.write_cache() && to.write_protect());
    // A second time, as after a failed attempt.
    from.state().reservations.release_unit(A).unwrap();
    from.state().preventing.clear();
    moved(&from, &to).unwrap();
    let state = to.state();
    assert!(!state.reservations.has_reserved_unit(B) && state.preventing.is_empty());
}

#[test]
fn a_medium_that_is_not_removable_is_there_whatever_a_state_says() {
    let ((from, _), to) = (unit(A), LogicalUnit::new(config()).unwrap());
    let nexus = to.attach(B);
    from.state().set_ejected(true);
    moved(&from, &to).unwrap();
    assert!(!to.state().ejected && !nexus.flags().has(Flags::NOT_READY));
}

#[test]
fn what_others_have_reserved_is_theirs() {
    let ((from, _), (to, _)) = (unit(A), unit(B));
    let other = NexusId { initiator: 9, port: 1 };
    from.state().reservations.register(A, 0, 7).unwrap();
    from.state().reservations.reserve(A, 7, Some(Type::WriteExclusive)).unwrap();
    to.attach(other);
    to.state().reservations.register(other, 0, 8).unwrap();
    moved(&from, &to).unwrap_or_else(|_| panic!("others may be registered"));
    to.state().reservations = Default::default();
    to.state().reservations.register(other, 0, 8).unwrap();
    to.state().reservations.reserve(other, 8, Some(Type::WriteExclusive)).unwrap();
    assert_eq!(moved(&from, &to), Err(UnitStateError::Reserved));
    assert_eq!(to.check(B, &from.save(A), Origin::Elsewhere), Err(UnitStateError::Reserved));
    assert_eq!(to.state().reservations.key_of(B), None, "nothing has changed");
    to.state().set_ejected(true);
    from.state().reservations = Default::default();
    from.state().reservations.reserve_unit(A).unwrap();
    assert_eq!(moved(&from, &to), Err(UnitStateError::Reserved), "a unit has either kind of reservations");
    from.state().reservations.release_unit(A).unwrap();
    moved(&from, &to).unwrap();
    assert!(to.state().ejected, "it is the other's, too");
    to.detach(other);
    moved(&from, &to).unwrap();
    assert!(to.state().reservations.is_registered(other));
    assert!(!to.state().ejected, "who has gone does not use it");
}

/// SPC-5, unregistering: every registrant holds a reservation that is for all of them.
#[test]
fn a_reservation_that_is_for_all_stays_while_others_hold_it_though_its_maker_moves_in_anew_and_goes_with_the_last() {
    let ((from, _), (to, _)) = (unit(A), unit(B));
    let (other, stranger) = (NexusId { initiator: 9, port: 1 }, NexusId { initiator: 10, port: 1 });
    to.attach(other);
    let stranger = to.attach(stranger);
    let all = Some(Type::WriteExclusiveAll);
    to.state().reservations.register(B, 0, 7).unwrap();
    to.state().reservations.register(other, 0, 8).unwrap();
    to.state().reservations.reserve(B, 7, all).unwrap();
    moved(&from, &to).unwrap();
    assert_eq!(to.state().reservations.key_of(B), None);
    assert!(to.state().reservations.holds(other) && stranger.flags().has(Flags::NO_WRITE));

    // The last registrant, of a reservation that another has made.
    to.state().reservations = Default::default();
    to.state().reservations.register(other, 0, 8).unwrap();
    to.state().reservations.reserve(other, 8, all).unwrap();
    to.state().reservations.register(B, 0, 7).unwrap();
    to.state().reservations.register(other, 8, 0).unwrap();
    assert!(to.state().reservations.holds(B));
    moved(&from, &to).unwrap();
    assert_eq!(to.state().reservations.reservation(), None);
    assert!(!stranger.flags().has(Flags::NO_WRITE), "nobody could release it");
}

#[test]
fn a_reservation_that_is_for_all_is_joined_where_there_is_one_of_the_same_type_and_no_other() {
    let other = NexusId { initiator: 9, port: 1 };
    for theirs in Type::ALL {
        for own in Type::ALL {
            let ((from, _), (to, _)) = (unit(A), unit(B));
            for (unit, nexus, kind) in [(&from, A, own), (&to, other, theirs)] {
                unit.attach(nexus);
                unit.state().reservations.register(nexus, 0, 7).unwrap();
                unit.state().reservations.reserve(nexus, 7, Some(kind)).unwrap();
            }
            let joins = own == theirs && matches!(own, Type::WriteExclusiveAll | Type::ExclusiveAccessAll);
            assert_eq!(moved(&from, &to).is_ok(), joins, "{own:?} where there is {theirs:?}");
            assert_eq!(to.state().reservations.holds(B), joins);
        }
    }
}

#[test]
fn a_state_that_no_unit_writes_is_none() {
    let (from, _) = unit(A);
    let good = from.save(A).to_bytes();
    let wrong: [(&str, &[(usize, u8)]); 10] = [
        ("flag", &[(22, 1 << 7)]),
        ("unit attention", &[(21, 1 << 2)]),
        ("field", &[(24, 1)]),
        ("field", &[(31, 1)]),
        // One that nobody holds; held without a type, and without one that there is; held, and reserved, by who may not.
        ("reservation", &[(8, 7), (23, 1)]),
        ("reservation", &[(8, 7), (23, 2)]),
        ("reservation", &[(8, 7), (22, HOLDS), (23, 2)]),
        ("reservation", &[(8, 7), (22, HOLDS)]),
        ("reservation", &[(22, HOLDS), (23, 1)]),
        ("reservation", &[(8, 7), (22, RESERVED)]),
    ];
    for (what, changes) in wrong {
        let mut bytes = good;
        changes.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        assert_eq!(UnitState::from_bytes(&bytes), Err(UnitStateError::Field(what)), "{changes:02x?}");
    }
}

proptest! {
    #[test]
    fn what_is_read_is_what_would_be_written(bytes in any::<[u8; UnitState::BYTES]>(), sane: bool) {
        let mut bytes = bytes;
        if sane {
            bytes[21] &= 3;
            bytes[22] &= 0x7f;
            bytes[23] &= 7;
            bytes[24..].fill(0);
        }
        if let Ok(state) = UnitState::from_bytes(&bytes) {
            prop_assert_eq!(state.to_bytes(), bytes);
            let (unit, _nexus) = unit(B);
            unit.restore(B, &state, Origin::Elsewhere).unwrap();
            let saved = unit.save(B);
            prop_assert_eq!((saved.key, saved.held, saved.reserved), (state.key, state.held, state.reserved));
        }
    }
}

/// Stores at once, and remembers what.
#[derive(Debug, Default)]
struct Memory(std::sync::Mutex<Vec<crate::Registered>>);

impl crate::Keeper for Memory {
    fn store(&self, table: crate::Registered, change: Change) {
        self.0.lock().unwrap().push(table);
        change.is_stored();
    }
}

#[test]
fn what_moves_is_stored_where_it_arrives() {
    let (from, _) = unit(A);
    let memory = Arc::<Memory>::default();
    let to = LogicalUnit::kept(config(), &crate::Registered::default(), Arc::clone(&memory) as _).unwrap();
    to.attach(B);
    moved(&from, &to).unwrap();
    assert!(memory.0.lock().unwrap().is_empty(), "nothing has changed");
    from.state().reservations.register(A, 0, 7).unwrap();
    from.state().reservations.reserve(A, 7, Some(Type::WriteExclusive)).unwrap();
    from.state().reservations.aptpl = true;
    moved(&from, &to).unwrap();
    let stored = crate::Registered { aptpl: true, registrations: vec![(B, 7)], reservation: Some((1, B)) };
    assert_eq!(memory.0.lock().unwrap()[..], [stored]);
    to.state().keeping.busy = false;
    // Who goes on where it was, before others, has nothing stored anew.
    to.attach(A);
    to.state().reservations.register(A, 0, 9).unwrap();
    to.restore(B, &to.save(B), Origin::Elsewhere).unwrap();
    assert_eq!(memory.0.lock().unwrap().len(), 1);
    assert_eq!(to.check(A, &to.save(A), Origin::Elsewhere), Ok(()));
    to.state().keeping.busy = true;
    assert_eq!(moved(&from, &to), Err(UnitStateError::Busy));
}

/// A unit whose reservations are kept, as they are, and which A has.
fn kept(registrations: &[(NexusId, u64)], reservation: Option<(u8, NexusId)>) -> (LogicalUnit, Arc<Memory>) {
    let registered = crate::Registered { aptpl: true, registrations: registrations.to_vec(), reservation };
    let memory = Arc::<Memory>::default();
    let unit = LogicalUnit::kept(config(), &registered, Arc::clone(&memory) as _).unwrap();
    unit.attach(A);
    (unit, memory)
}

#[test]
fn who_goes_on_where_it_was_is_as_fenced_as_what_is_kept_says_and_is_told() {
    for kind in Type::ALL {
        let all = [(A, 7), (B, 8)];
        let (before, _) = kept(&all, Some((kind as u8, A)));
        before.attach(B).take_attention();
        before.set_write_protect(true);
        before.state().preventing.push(B);
        let saved = before.save(B);

        // Preempted after it was saved, with the daemon that ends or before the next one has come to it.
        let (unit, memory) = kept(&all[..1], Some((kind as u8, A)));
        let nexus = unit.attach(B);
        assert_eq!(unit.check(B, &saved, Origin::Here), Ok(()));
        unit.restore(B, &saved, Origin::Here).unwrap();
        assert_eq!((unit.save(B).key, unit.save(B).held, unit.save(B).prevents), (0, None, false));
        assert!(nexus.flags().has(Flags::NO_WRITE), "{kind:?}");
        assert_eq!(nexus.take_attention().unwrap().code, crate::Code::REGISTRATIONS_PREEMPTED);
        assert_eq!(nexus.take_attention(), None, "of no power on");
        assert!(unit.write_protect(), "of the rest it has what it had");
        assert!(memory.0.lock().unwrap().is_empty(), "nothing has changed");
    }
}

#[test]
fn who_goes_on_where_it_was_has_the_reservation_that_is_kept_and_nothing_is_stored_anew() {
    for kind in Type::ALL {
        let (before, _) = kept(&[(A, 7), (B, 8)], Some((kind as u8, B)));
        before.attach(B).take_attention();
        before.state().reservations.register_anyway(B, 9);
        let saved = before.save(B);
        // Even while another's change is being stored.
        for busy in [false, true] {
            let (unit, memory) = kept(&[(A, 7), (B, 9)], Some((kind as u8, B)));
            let nexus = unit.attach(B);
            unit.state().keeping.busy = busy;
            unit.restore(B, &saved, Origin::Here).unwrap();
            let state = unit.state();
            assert_eq!((state.reservations.key_of(B), state.reservations.holds(B)), (Some(9), true), "{kind:?}");
            assert_eq!(state.reservations.generation(), 1, "as it has seen it");
            assert_eq!((nexus.take_attention(), nexus.flags().is_clear()), (None, true));
            assert!(memory.0.lock().unwrap().is_empty());
        }
    }
}

#[test]
fn what_reserve_has_reserved_is_kept_by_nobody_and_goes_on_where_it_was_unless_another_was_faster() {
    let (before, _) = kept(&[], None);
    before.attach(B).take_attention();
    before.state().reservations.reserve_unit(B).unwrap();
    let saved = before.save(B);
    let (unit, _) = kept(&[], None);
    unit.attach(B);
    for _ in 0..2 {
        unit.restore(B, &saved, Origin::Here).unwrap();
        assert!(unit.state().reservations.has_reserved_unit(B));
    }
    unit.state().keeping.busy = true;
    assert_eq!(unit.restore(B, &saved, Origin::Here), Err(UnitStateError::Busy), "it may be a registration");
    let (unit, _) = kept(&[(A, 7)], None);
    unit.attach(B);
    assert_eq!(unit.restore(B, &saved, Origin::Here), Err(UnitStateError::Reserved));
}

#[test]
fn what_others_have_done_to_who_goes_on_where_it_was_it_is_told_and_nothing_of_its_arrival() {
    let ((before, old), (unit, nexus)) = (unit(B), unit(B));
    old.take_attention();
    old.attend(Attention::ModeChanged);
    for attention in [Attention::LunsChanged, Attention::CapacityChanged, Attention::ReservationsPreempted] {
        nexus.attend(attention);
    }
    unit.restore(B, &before.save(B), Origin::Here).unwrap();
    assert_eq!(nexus.take_attention().unwrap().code, crate::Code::MODE_CHANGED);
    assert_eq!(nexus.take_attention().unwrap().code, crate::Code::RESERVATIONS_PREEMPTED);
    assert_eq!(nexus.take_attention(), None);
}

#[test]
fn who_goes_on_where_it_was_takes_its_registration_along_where_nobody_keeps_any() {
    let ((before, _), (to, _)) = (unit(B), unit(B));
    before.state().reservations.register(B, 0, 7).unwrap();
    before.state().reservations.reserve(B, 7, Some(Type::WriteExclusive)).unwrap();
    to.restore(B, &before.save(B), Origin::Here).unwrap();
    assert_eq!((to.save(B).key, to.save(B).held), (7, Some(Type::WriteExclusive)));
}
