//! Commands that have begun when their nexus is preempted, and change what the nexuses share.

use super::*;

/// SPC-5, PREEMPT AND ABORT service action: who is preempted changes nothing when that has ended.
#[test]
fn a_medium_is_not_ejected_by_a_nexus_that_was_preempted_while_it_wrote_the_cache() {
    for comes_back in [false, true] {
        let (rig, a, b) = reserved();
        let mut eject = Command::new();
        assert!(is_disk(begin(&rig, &mut eject, &a, &[0x1b, 0, 0, 0, 2, 0], &[]), Op::Flush));
        assert!(good(reserve_out(&rig, &mut Command::new(), &b, 5, 5, [2, 1])));
        if comes_back {
            come_back(&rig, &a);
        }
        assert_eq!(step(&rig, &mut eject, &a, &[]), Step::refused(Status::ReservationConflict, None));
        assert!(good(begin(&rig, &mut Command::new(), &b, &[0; 6], &[])), "it is there");
    }
    // Who was not is not kept from it, nor is anybody from loading it again.
    let (rig, a, b) = reserved();
    let mut eject = Command::new();
    assert!(is_disk(begin(&rig, &mut eject, &a, &[0x1b, 0, 0, 0, 2, 0], &[]), Op::Flush));
    assert!(good(step(&rig, &mut eject, &a, &[])));
    assert!(good(reserve_out(&rig, &mut Command::new(), &b, 5, 5, [2, 1])));
    a.take_attention();
    assert!(good(begin(&rig, &mut Command::new(), &a, &[0x1b, 0, 0, 0, 3, 0], &[])));
    assert!(good(begin(&rig, &mut Command::new(), &b, &[0; 6], &[])));
}

/// What a nexus gives, which is preempted by another when it is read.
struct Preempts<'a> {
    rig: &'a Rig,
    by: &'a Nexus,
    list: &'a [u8],
}

impl DataOut for Preempts<'_> {
    fn read_at(&self, at: u64, into: &mut [u8]) {
        assert!(good(reserve_out(self.rig, &mut Command::new(), self.by, 5, 5, [2, 1])));
        self.list.read_at(at, into);
    }
}

#[test]
fn no_mode_is_changed_by_a_nexus_that_is_preempted_when_its_command_has_begun() {
    let (rig, a, b) = reserved();
    let (cdb, data_out) = (mode_select(&WRITE_PROTECT), WRITE_PROTECT.len() as u64);
    let task = Task { cdb: &cdb, nexus: &a, luns: &[], data_in: 0, data_out, lane: 1, waker: Waker::noop() };
    let list = Preempts { rig: &rig, by: &b, list: &WRITE_PROTECT };
    let begun = rig.unit.begin(&mut Command::new(), &task, &list);
    assert_eq!(begun, Step::refused(Status::ReservationConflict, None));
    assert!(!rig.unit.write_protect());
}
