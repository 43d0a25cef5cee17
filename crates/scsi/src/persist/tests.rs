use std::sync::Arc;

use super::*;
use crate::testing::{BLOCK, Reply, Rig, cdb10, cdb16, config};
use crate::{Attention, LunConfig, Nexus, Status};

fn out(rig: &mut Rig, nexus: &Arc<Nexus>, action: u8, kind: u8, key: u64, new: u64) -> Reply {
    let list = [&key.to_be_bytes()[..], &new.to_be_bytes(), &[0; 8]].concat();
    rig.run_as(nexus, &[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list, 0)
}

fn read(rig: &mut Rig, action: u8) -> Vec<u8> {
    rig.run(&[0x5e, action, 0, 0, 0, 0, 0, 0, 255, 0], &[], 255).good()
}

/// A, B and C, of which A and B are registered, with keys 1 and 2.
fn three(config: LunConfig) -> (Rig, [Arc<Nexus>; 3]) {
    let mut rig = Rig::new(config);
    let nexuses = [rig.nexus.clone(), rig.other(2), rig.other(3)];
    out(&mut rig, &nexuses[0], REGISTER, 0, 0, 1).good();
    out(&mut rig, &nexuses[1], REGISTER, 0, 0, 2).good();
    (rig, nexuses)
}

/// SPC-5, registering: REGISTER wants the key that is there, REGISTER AND IGNORE EXISTING KEY does not.
#[test]
fn a_register_with_another_key_than_the_registered_one_conflicts_and_one_that_ignores_it_does_not() {
    let (mut rig, [a, ..]) = three(config());
    assert_eq!(out(&mut rig, &a, REGISTER, 0, 7, 8).status, Status::ReservationConflict);
    assert_eq!(read(&mut rig, 0)[8..16], 1_u64.to_be_bytes());
    out(&mut rig, &a, 6, 0, 7, 8).good();
    assert_eq!(read(&mut rig, 0)[8..16], 8_u64.to_be_bytes());
}

/// SPC-5, basic PERSISTENT RESERVE OUT parameter list: eight bytes, the most significant first.
#[test]
fn a_key_is_all_of_its_eight_bytes() {
    let mut rig = Rig::new(config());
    let nexus = rig.nexus.clone();
    for (before, key) in [(0, 0x0102_0304_0506_0708), (0x0102_0304_0506_0708, 0xff00_0000_0000_0000)] {
        out(&mut rig, &nexus, REGISTER, 0, before, key).good();
        assert_eq!(read(&mut rig, 0)[8..16], key.to_be_bytes());
    }
    assert_eq!(out(&mut rig, &nexus, RESERVE, 1, 0, 0).status, Status::ReservationConflict);
}

/// SPC-5, READ KEYS service action.
#[test]
fn read_keys_returns_generation_and_keys_as_far_as_there_is_room() {
    let (mut rig, _) = three(config());
    let keys = [&[0, 0, 0, 2, 0, 0, 0, 16][..], &1_u64.to_be_bytes(), &2_u64.to_be_bytes()].concat();
    assert_eq!(read(&mut rig, 0), keys);
    assert_eq!(rig.run(&[0x5e, 0, 0, 0, 0, 0, 0, 0, 8, 0], &[], 8).good(), keys[..8]);
}

/// SPC-5, READ RESERVATION service action.
#[test]
fn read_reservation_returns_key_and_type_of_what_there_is() {
    let (mut rig, [a, ..]) = three(config());
    assert_eq!(read(&mut rig, 1), [0, 0, 0, 2, 0, 0, 0, 0]);
    out(&mut rig, &a, RESERVE, 5, 1, 0).good();
    let held = [&[0, 0, 0, 2, 0, 0, 0, 16][..], &1_u64.to_be_bytes(), &[0, 0, 0, 0, 0, 5, 0, 0]].concat();
    assert_eq!(read(&mut rig, 1), held);
    out(&mut rig, &a, RELEASE, 5, 1, 0).good();
    out(&mut rig, &a, RESERVE, 8, 1, 0).good();
    assert_eq!(read(&mut rig, 1)[8..], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0]);
}

/// SPC-5, REPORT CAPABILITIES service action.
#[test]
fn report_capabilities_has_all_six_types_gets_along_with_reserve_and_has_no_extras() {
    let (mut rig, _) = three(config());
    assert_eq!(read(&mut rig, 2), [0, 8, 0x10, 0x80, 0xea, 0x01, 0, 0]);
}

/// SPC-5, READ FULL STATUS service action.
#[test]
fn read_full_status_has_every_registrant_with_port_and_transport_id() {
    let (mut rig, [_, b, _]) = three(config());
    out(&mut rig, &b, RESERVE, 1, 2, 0).good();
    let data = read(&mut rig, 3);
    assert_eq!(data[..8], [0, 0, 0, 2, 0, 0, 0, 96]);
    let (first, second) = data[8..].split_at(48);
    assert_eq!(first[..24], [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 24]);
    assert_eq!(first[24..], rig.nexus.id().transport_id());
    assert_eq!(second[..24], [0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 24]);
    assert_eq!(second[24..], b.id().transport_id());
}

/// SPC-5, READ FULL STATUS service action.
#[test]
fn every_registrant_holds_a_reservation_that_is_for_all() {
    let (mut rig, [a, ..]) = three(config());
    out(&mut rig, &a, RESERVE, 7, 1, 0).good();
    let data = read(&mut rig, 3);
    assert_eq!((&data[8 + 12..8 + 14], &data[56 + 12..56 + 14]), (&[1, 7][..], &[1, 7][..]));
}

/// SPC-5, PERSISTENT RESERVE OUT command.
#[test]
fn a_parameter_list_of_another_length_is_an_error_of_its_length() {
    let mut rig = Rig::new(config());
    for len in [0, 8, 23, 25] {
        let cdb = [0x5f, 0, 0, 0, 0, 0, 0, 0, len, 0];
        assert_eq!(rig.run(&cdb, &[0; 32], 0).sense(), Sense::illegal(Code::PARAMETER_LIST_LENGTH));
    }
    assert_eq!(rig.overrun(&[0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0], &[0; 23], 0), 24);
}

/// SPC-5, basic PERSISTENT RESERVE OUT parameter list.
#[test]
fn what_capabilities_does_not_list_is_refused_when_registering_and_ignored_otherwise() {
    let (mut rig, [a, ..]) = three(config());
    for (flag, bit) in [(0x08, 3), (0x04, 2), (0x01, 0)] {
        for (action, fails) in [(REGISTER, true), (6, true), (CLEAR, false)] {
            let mut list = [0; 24];
            (list[7], list[15], list[20]) = (1, 1, flag);
            let reply = rig.run(&[0x5f, action, 0, 0, 0, 0, 0, 0, 24, 0], &list, 0);
            if fails {
                assert_eq!(reply.sense(), Sense::list(20).bit(bit));
            } else {
                reply.good();
                out(&mut rig, &a, REGISTER, 0, 0, 1).good();
            }
        }
    }
}

/// SPC-5, persistent reservations scope and type.
#[test]
fn a_scope_or_type_that_there_is_not_is_an_invalid_field_where_it_matters() {
    let (mut rig, [a, ..]) = three(config());
    for kind in [0, 2, 4, 9, 0x11, 0xf5] {
        assert_eq!(out(&mut rig, &a, RESERVE, kind, 1, 0).sense(), Sense::cdb(2), "{kind:#x}");
    }
    out(&mut rig, &a, RESERVE, 1, 1, 0).good();
    assert_eq!(out(&mut rig, &a, PREEMPT, 2, 1, 1).sense(), Sense::cdb(2));
    assert_eq!(out(&mut rig, &a, PREEMPT, 1, 1, 0).sense(), Sense::list(8));
    assert_eq!(out(&mut rig, &a, RELEASE, 3, 1, 0).sense(), Sense::illegal(Code::INVALID_RELEASE));
    assert_eq!(out(&mut rig, &a, 7, 0, 1, 0).sense(), Sense::cdb(1).bit(4), "REGISTER AND MOVE");
}

/// SPC-5 and SBC-4, commands that are allowed in the presence of persistent reservations.
#[test]
fn a_reservation_keeps_out_the_commands_that_the_tables_say_and_no_others() {
    let mut compare_and_write = cdb16(0x89, 0, 0, 0);
    compare_and_write[13] = 1;
    // The command, and whether a write exclusive and an exclusive access reservation conflict with it.
    let table: [(&[u8], bool, bool); 25] = [
        (&[0x00, 0, 0, 0, 0, 0], false, false),
        (&[0x03, 0, 0, 0, 18, 0], false, false),
        (&[0x12, 0, 0, 0, 36, 0], false, false),
        (&[0x1a, 0, 0x3f, 0, 255, 0], true, true),
        (&[0x15, 0x10, 0, 0, 0, 0], true, true),
        (&[0x1b, 0, 0, 0, 1, 0], false, false),
        (&[0x1b, 0, 0, 0, 0, 0], true, true),
        (&[0x1b, 0, 0, 0, 0x11, 0], true, true),
        (&[0x1d, 4, 0, 0, 0, 0], true, true),
        (&[0x1e, 0, 0, 0, 0, 0], false, false),
        (&[0x1e, 0, 0, 0, 1, 0], true, true),
        (&cdb10(0x25, 0, 0, 0), false, false),
        (&cdb10(0x28, 0, 0, 1), false, true),
        (&cdb10(0x2a, 0, 0, 1), true, true),
        (&cdb10(0x2e, 0, 0, 1), true, true),
        (&cdb10(0x2f, 0, 0, 1), false, true),
        (&cdb10(0x35, 0, 0, 0), true, true),
        (&cdb10(0x41, 0, 0, 1), true, true),
        (&cdb10(0x42, 0, 0, 0), true, true),
        (&cdb10(0x4d, 0, 0, 255), false, false),
        (&cdb10(0x5e, 0, 0, 255), false, false),
        (&compare_and_write, true, true),
        (&cdb16(0x9e, 0x10, 0, 32), false, false),
        (&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0], false, false),
        (&[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0], false, false),
    ];
    for (kind, registrants) in [(1, false), (3, false), (5, true), (6, true), (7, true), (8, true)] {
        let (mut rig, [a, b, c]) = three(LunConfig { removable: true, ..config() });
        out(&mut rig, &a, RESERVE, kind, 1, 0).good();
        for (cdb, by_write, by_access) in table {
            let conflicts = if matches!(kind, 3 | 6 | 8) { by_access } else { by_write };
            let mut conflict = |nexus| {
                let reply = rig.run_as(nexus, cdb, &[0; 2 * BLOCK], 4096);
                let medium = rig.run_as(&a, &[0x1b, 0, 0, 0, 1, 0], &[], 0);
                assert_eq!(medium.status, Status::Good);
                reply.status == Status::ReservationConflict
            };
            assert!(!conflict(&a), "{kind} {cdb:02x?}");
            assert_eq!(conflict(&b), conflicts && !registrants, "{kind} {cdb:02x?}");
            assert_eq!(conflict(&c), conflicts, "{kind} {cdb:02x?}");
        }
    }
}

/// SAM-5, status precedence.
#[test]
fn a_reservation_conflict_is_told_before_a_unit_attention_which_stays() {
    let (mut rig, [a, _, c]) = three(config());
    out(&mut rig, &a, RESERVE, 1, 1, 0).good();
    rig.unit.attend(Attention::CapacityChanged, None);
    let write = cdb10(0x2a, 0, 0, 1);
    assert_eq!(rig.run_as(&c, &write, &[0; BLOCK], 0).status, Status::ReservationConflict);
    assert_eq!(rig.run_as(&c, &[0; 6], &[], 0).sense().code, Code::CAPACITY_CHANGED);
}

/// SPC-5, preempting persistent reservations.
#[test]
fn whoever_is_preempted_is_told_and_kept_out() {
    let (mut rig, [a, b, _]) = three(config());
    out(&mut rig, &a, RESERVE, 5, 1, 0).good();
    out(&mut rig, &b, PREEMPT, 5, 2, 1).good();
    let write = cdb10(0x2a, 0, 0, 1);
    assert_eq!(rig.run_as(&a, &write, &[0; BLOCK], 0).status, Status::ReservationConflict);
    assert_eq!(rig.run_as(&a, &[0; 6], &[], 0).sense().code, Code::REGISTRATIONS_PREEMPTED);
    rig.run_as(&b, &write, &[0; BLOCK], 0).good();
}

/// SPC-5, persistent reservations.
#[test]
fn registration_and_reservation_outlast_a_connection_and_a_reset() {
    let (mut rig, [a, b, c]) = three(config());
    out(&mut rig, &b, RESERVE, 1, 2, 0).good();
    rig.unit.detach(b.id());
    rig.unit.detach(c.id());
    rig.unit.reset();
    for nexus in [&a, &b] {
        assert_eq!(rig.run_as(nexus, &[0; 6], &[], 0).sense().code, Code::UNIT_RESET);
    }
    let (again, new) = (rig.unit.attach(b.id()), rig.unit.attach(c.id()));
    assert!(Arc::ptr_eq(&again, &b) && !Arc::ptr_eq(&new, &c));
    let write = cdb10(0x2a, 0, 0, 1);
    rig.run_as(&again, &write, &[0; BLOCK], 0).good();
    assert_eq!(rig.run_as(&a, &write, &[0; BLOCK], 0).status, Status::ReservationConflict);
    assert_eq!(rig.run_as(&new, &write, &[0; BLOCK], 0).status, Status::ReservationConflict);
}

const RESERVE_6: [u8; 6] = [0x16, 0, 0, 0, 0, 0];
const RELEASE_6: [u8; 6] = [0x17, 0, 0, 0, 0, 0];
const RESERVE_10: [u8; 10] = [0x56, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const RELEASE_10: [u8; 10] = [0x57, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn conflicts(rig: &mut Rig, nexus: &Arc<Nexus>, cdb: &[u8]) -> bool {
    let mut list = [0; 2 * BLOCK];
    // A key, for what looks like registering.
    list[15] = 1;
    rig.run_as(nexus, cdb, &list, 4096).status == Status::ReservationConflict
}

/// SPC-2, RESERVE(10) and RELEASE(10) commands.
#[test]
fn reserve_is_for_one_nexus_until_it_releases_and_others_cannot_release_it() {
    let mut rig = Rig::new(config());
    let (a, b) = (rig.nexus.clone(), rig.other(2));
    for (reserve, release) in [(&RESERVE_6[..], &RELEASE_6[..]), (&RESERVE_10, &RELEASE_10), (&RESERVE_6, &RELEASE_10)]
    {
        rig.run(release, &[], 0).good();
        rig.run(reserve, &[], 0).good();
        rig.run(reserve, &[], 0).good();
        assert!(conflicts(&mut rig, &b, reserve));
        rig.run_as(&b, release, &[], 0).good();
        assert!(conflicts(&mut rig, &b, &cdb10(0x28, 0, 0, 1)), "it is still reserved");
        rig.run_as(&a, release, &[], 0).good();
        rig.run_as(&b, reserve, &[], 0).good();
        rig.run_as(&b, release, &[], 0).good();
    }
}

/// SPC-2, RESERVE(10) command: what is obsolete.
#[test]
fn third_parties_extents_and_lists_of_them_are_invalid_fields() {
    let mut rig = Rig::new(config());
    for code in [0x16, 0x17] {
        assert_eq!(rig.run(&[code, 0x10, 0, 0, 0, 0], &[], 0).sense(), Sense::cdb(1).bit(4));
        assert_eq!(rig.run(&[code, 0x01, 0, 0, 0, 0], &[], 0).sense(), Sense::cdb(1).bit(0));
        rig.run(&[code, 0, 7, 0, 0, 0], &[], 0).good();
    }
    for code in [0x56, 0x57] {
        assert_eq!(rig.run(&cdb10(code, 0x10, 0, 0), &[], 0).sense(), Sense::cdb(1).bit(4));
        assert_eq!(rig.run(&cdb10(code, 0x02, 0, 0), &[], 0).sense(), Sense::cdb(1).bit(1));
        assert_eq!(rig.run(&cdb10(code, 0, 0, 8), &[0; 8], 0).sense(), Sense::cdb(8).bit(3));
        rig.run(&[code, 0, 7, 0, 0, 0, 0, 0, 0, 0], &[], 0).good();
    }
}

/// SPC-2, tables of commands that are allowed in the presence of various reservations.
#[test]
fn a_reserved_unit_answers_others_what_the_tables_say_and_nothing_else() {
    let table: [(&[u8], bool); 21] = [
        (&[0x00, 0, 0, 0, 0, 0], true),
        (&[0x03, 0, 0, 0, 18, 0], false),
        (&[0x12, 0, 0, 0, 36, 0], false),
        (&[0x15, 0x10, 0, 0, 0, 0], true),
        (&[0x1a, 0, 0x3f, 0, 255, 0], true),
        (&RESERVE_6, true),
        (&RELEASE_6, false),
        (&[0x1b, 0, 0, 0, 1, 0], false),
        (&[0x1b, 0, 0, 0, 0, 0], true),
        (&[0x1d, 4, 0, 0, 0, 0], true),
        (&[0x1e, 0, 0, 0, 0, 0], false),
        (&[0x1e, 0, 0, 0, 1, 0], true),
        (&cdb10(0x25, 0, 0, 0), false),
        (&cdb10(0x28, 0, 0, 1), true),
        (&cdb10(0x2a, 0, 0, 1), true),
        (&cdb10(0x2f, 0, 0, 1), true),
        (&cdb10(0x35, 0, 0, 0), true),
        (&cdb10(0x4d, 0, 0, 255), false),
        (&RESERVE_10, true),
        (&RELEASE_10, false),
        (&[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0], false),
    ];
    let mut rig = Rig::new(LunConfig { removable: true, ..config() });
    let (a, b) = (rig.nexus.clone(), rig.other(2));
    for (cdb, conflict) in table {
        rig.run(&RESERVE_10, &[], 0).good();
        assert_eq!(conflicts(&mut rig, &b, cdb), conflict, "{cdb:02x?}");
        assert!(!conflicts(&mut rig, &a, cdb), "{cdb:02x?}");
        rig.run(&[0x1b, 0, 0, 0, 1, 0], &[], 0).good();
    }
}

/// SBC-4, PREVENT ALLOW MEDIUM REMOVAL command.
#[test]
fn who_is_preempted_by_preempt_and_abort_or_clear_prevents_the_medium_s_removal_no_more() {
    for (action, is_prevented) in [(PREEMPT, true), (PREEMPT_AND_ABORT, false), (CLEAR, false)] {
        let (mut rig, [a, b, c]) = three(LunConfig { removable: true, ..config() });
        let eject = |rig: &mut Rig| rig.run_as(&b, &[0x1b, 0, 0, 0, 2, 0], &[], 0);
        rig.run_as(&a, &[0x1e, 0, 0, 0, 1, 0], &[], 0).good();
        out(&mut rig, &b, action, 1, 2, 1).good();
        if is_prevented {
            assert_eq!(eject(&mut rig).sense(), Sense::illegal(Code::REMOVAL_PREVENTED), "{action}");
            continue;
        }
        // Who was not registered has lost nothing.
        rig.run_as(&c, &[0x1e, 0, 0, 0, 1, 0], &[], 0).good();
        assert_eq!(eject(&mut rig).sense(), Sense::illegal(Code::REMOVAL_PREVENTED), "{action}");
        rig.run_as(&c, &[0x1e, 0, 0, 0, 0, 0], &[], 0).good();
        eject(&mut rig).good();
    }
}

/// SPC-2, reservations overview.
#[test]
fn while_a_unit_is_reserved_there_are_no_persistent_reservations_even_for_its_holder() {
    let mut rig = Rig::new(config());
    let (a, b) = (rig.nexus.clone(), rig.other(2));
    rig.run(&RESERVE_6, &[], 0).good();
    for nexus in [&a, &b] {
        for action in [REGISTER, RESERVE, CLEAR, 6] {
            assert!(conflicts(&mut rig, nexus, &[0x5f, action, 0, 0, 0, 0, 0, 0, 24, 0]));
        }
        for action in 0..=3 {
            assert!(conflicts(&mut rig, nexus, &[0x5e, action, 0, 0, 0, 0, 0, 0, 255, 0]));
        }
    }
    rig.run(&RELEASE_6, &[], 0).good();
    assert_eq!(read(&mut rig, 0), [0; 8], "nobody has registered");
}

/// SPC-2, reservations overview; SPC-4, exceptions to SPC-2 RESERVE and RELEASE behavior.
#[test]
fn reserve_conflicts_where_anybody_is_registered_unless_a_persistent_reservation_gives_as_much() {
    // Whether the holder, another registrant and a stranger conflict.
    for (kind, expected) in [
        (None, [true, true, true]),
        (Some(1), [false, true, true]),
        (Some(3), [false, true, true]),
        (Some(5), [false, false, true]),
        (Some(6), [false, false, true]),
        (Some(7), [false, false, true]),
        (Some(8), [false, false, true]),
    ] {
        let (mut rig, nexuses) = three(config());
        if let Some(kind) = kind {
            out(&mut rig, &nexuses[0], RESERVE, kind, 1, 0).good();
        }
        let before = read(&mut rig, 1);
        for (nexus, expected) in nexuses.iter().zip(expected) {
            for cdb in [&RESERVE_6[..], &RESERVE_10, &RELEASE_6, &RELEASE_10] {
                assert_eq!(conflicts(&mut rig, nexus, cdb), expected, "{kind:?} {:?} {cdb:02x?}", nexus.id());
            }
        }
        assert_eq!(read(&mut rig, 1), before, "nothing has changed");
    }
}

/// SAM-5, LOGICAL UNIT RESET and I_T NEXUS RESET.
#[test]
fn a_reset_or_the_loss_of_the_nexus_frees_a_reserved_unit() {
    let frees: [fn(&Rig); 3] =
        [|rig| rig.unit.reset(), |rig| rig.unit.reset_nexus(rig.nexus.id()), |rig| rig.unit.detach(rig.nexus.id())];
    for free in frees {
        let mut rig = Rig::new(config());
        let b = rig.other(2);
        rig.run(&RESERVE_6, &[], 0).good();
        rig.unit.reset_nexus(b.id());
        assert!(conflicts(&mut rig, &b, &RESERVE_6), "another's loss changes nothing");
        free(&rig);
        while b.take_attention().is_some() {}
        rig.run_as(&b, &cdb10(0x2a, 0, 0, 1), &[0; BLOCK], 0).good();
        rig.run_as(&b, &RESERVE_6, &[], 0).good();
    }
}
