//! A device that goes on in the place of another.

use egret_scsi::Attention;
use proptest::prelude::*;

use super::*;
use crate::state::{DeviceId, Origin, StateError, pack};

/// Another of the same kind, at the other end of a migration.
fn twin() -> Arc<Scsi> {
    let scsi = Scsi::new(ScsiConfig { num_queues: 2, queue_size: 64 }, "twin").unwrap();
    for address in [FIRST, FAR] {
        scsi.add(scsi.prepare(address, unit()).unwrap()).unwrap();
    }
    scsi
}

#[test]
fn a_driver_that_moves_is_told_what_it_was_not_told_yet_and_finds_the_sizes_that_it_has_chosen() {
    let (from, to) = (device(), twin());
    to.load(&from.save(), Origin::Elsewhere).unwrap();
    assert_eq!(to.events.len(), 0, "there was nothing to tell");
    from.write_config(config::SENSE_SIZE, &32u32.to_le_bytes()).unwrap();
    from.lun(FAR).unwrap().nexus.attend(Attention::ModeChanged);
    from.events.raise(Event { address: FAR, what: What::Resized });
    let state = from.save();
    to.load(&state, Origin::Elsewhere).unwrap();
    assert_eq!(to.sense_size.load(Ordering::Relaxed), 32);
    // Which events they were is not known any more; that there were some is.
    assert_eq!(to.events.len(), 1);
    // The same again: a driver that moves back finds everything.
    assert_eq!(to.save(), state);
}

#[test]
fn a_state_of_units_that_are_not_here_is_refused_and_changes_nothing() {
    let (from, to) = (device(), twin());
    from.write_config(config::SENSE_SIZE, &32u32.to_le_bytes()).unwrap();
    to.remove(FAR).unwrap();
    let before = to.save();
    assert_eq!(
        to.load(&from.save(), Origin::Elsewhere),
        Err(StateError::Invalid("target 9, lun 300 is not here".to_owned()))
    );
    assert_eq!(to.save(), before);
    let mut future = from.save();
    future[8] = 2;
    assert_eq!(to.load(&future, Origin::Elsewhere), Err(StateError::Version(2)));
    // One of virtio-blk.
    let mut other = from.save();
    other[10] = 2;
    assert_eq!(to.load(&other, Origin::Elsewhere), Err(StateError::Device { found: 2, expected: 8 }));
}

#[test]
fn a_state_of_sizes_or_of_a_length_that_cannot_be_is_refused() {
    let to = twin();
    let payload = device().save().split_off(16);
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut payload = payload.clone();
        change(&mut payload);
        to.load(&pack(DeviceId::Scsi, &payload), Origin::Elsewhere).unwrap_err()
    };
    // Of sense data, of a CDB, and whether events were missed.
    for (at, byte) in [(0, 253), (4, 15), (8, 2)] {
        let sizes = StateError::invalid("sizes that the configuration space does not take");
        assert_eq!(refused(&|payload| payload[at] = byte), sizes);
    }
    let length = |found, expected| StateError::Length { found, expected };
    assert_eq!(refused(&|payload| payload[12] = 1), length(72, 36));
    assert_eq!(refused(&|payload| payload.push(0)), length(73, 72));
    assert_eq!(refused(&|payload| payload.truncate(15)), length(15, 16));
}

/// Of one that is there twice the first part would be restored, and the second may be refused.
#[test]
fn a_state_of_units_that_are_there_twice_or_in_another_order_is_refused_and_changes_nothing() {
    let (from, to) = (device(), twin());
    from.lun(FAR).unwrap().nexus.attend(Attention::ModeChanged);
    let (payload, before) = (from.save().split_off(16), to.save());
    let (fixed, units) = payload.split_at(16);
    let (first, far) = units.split_at(36);
    for units in [[first, first], [far, far], [far, first]] {
        let state = pack(DeviceId::Scsi, &[fixed, units[0], units[1]].concat());
        assert_eq!(
            to.load(&state, Origin::Elsewhere),
            Err(StateError::invalid("units that are not in the order of their addresses"))
        );
        assert_eq!(to.save(), before);
    }
}

proptest! {
    #[test]
    fn whatever_is_taken_for_a_state_is_one(at in 0..104usize, byte: u8, cut in 0..105usize) {
        let (from, to) = (device(), twin());
        let mut state = from.save();
        prop_assert_eq!(state.len(), 104);
        state[at] = byte;
        state.truncate(cut.max(1));
        if to.load(&state, Origin::Elsewhere).is_ok() {
            prop_assert_eq!(to.save().len(), state.len());
        }
    }
}
