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
    to.restore(B, &UnitState::from_bytes(&from.save(A).to_bytes()).unwrap())
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
    assert_eq!(to.check(B, &from.save(A)), Err(UnitStateError::Reserved));
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
            unit.restore(B, &state).unwrap();
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
    to.restore(B, &to.save(B)).unwrap();
    assert_eq!(memory.0.lock().unwrap().len(), 1);
    assert_eq!(to.check(A, &to.save(A)), Ok(()));
    to.state().keeping.busy = true;
    assert_eq!(moved(&from, &to), Err(UnitStateError::Busy));
}
