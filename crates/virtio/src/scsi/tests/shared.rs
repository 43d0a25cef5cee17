//! A unit that two devices have.

use super::*;

const NEW: LunAddress = LunAddress { target: 0, lun: 7 };
const CONFLICT: u8 = 0x18;
const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const NEXUS_LOSS: Option<(u8, u8, u8)> = Some((6, 0x29, 7));

/// Two guests' devices, which have `FIRST` in common; the second has another unit beside it.
fn devices() -> [Arc<Scsi>; 2] {
    let shared = unit();
    let devices = ["one", "two"].map(|initiator| {
        let scsi = Scsi::new(ScsiConfig { num_queues: 1, queue_size: 64 }, initiator).unwrap();
        scsi.add(scsi.prepare(FIRST, Arc::clone(&shared)).unwrap()).unwrap();
        scsi.set_features(FEATURES).unwrap();
        scsi
    });
    devices[1].add(devices[1].prepare(FAR, unit()).unwrap()).unwrap();
    devices
}

/// PERSISTENT RESERVE OUT with key 1 where it asks for one; the status.
fn persist(line: &mut Line, action: u8, key: u64, new: u64) -> u8 {
    line.guest.write(BUFFER, &[&key.to_be_bytes()[..], &new.to_be_bytes(), &[0; 8]].concat());
    let write_exclusive = 1;
    let cdb = [0x5f, action, write_exclusive, 0, 0, 0, 0, 0, 24, 0];
    line.done(FIRST, &cdb, &[piece(BUFFER, 24)], &[]).status
}

/// The status of a write, which the disk does if it gets there.
fn write(line: &mut Line) -> u8 {
    match line.command(FIRST, 1, &write10(0, 1), &[piece(BUFFER, 512)], &[]).unwrap() {
        Next::Complete(ended) => line.told(ended).status,
        Next::Submit(_, request) => line.ended(request, Ok(())).status,
        Next::Wait => panic!("nobody is in the way"),
    }
}

#[test]
fn what_one_guest_reserves_keeps_the_other_out_even_when_it_reboots_until_it_is_preempted() {
    let [one, two] = devices();
    let (mut a, mut b) = (Line::requests(&one), Line::requests(&two));
    assert_eq!(persist(&mut a, REGISTER, 0, 1), GOOD);
    assert_eq!(persist(&mut b, REGISTER, 0, 2), GOOD);
    assert_eq!(persist(&mut a, RESERVE, 1, 0), GOOD);
    assert_eq!((write(&mut a), write(&mut b)), (GOOD, CONFLICT));
    one.reset();
    assert_eq!(write(&mut b), CONFLICT, "the reservation outlasts who made it");
    assert_eq!(a.done(FIRST, &[0], &[], &[]).sense, NEXUS_LOSS);
    let preempt = 4;
    assert_eq!(persist(&mut b, preempt, 2, 1), GOOD);
    assert_eq!((write(&mut a), write(&mut b)), (CONFLICT, GOOD));
}

#[test]
fn a_guest_that_reboots_or_resets_its_nexus_is_no_news_to_the_other_and_gives_up_what_it_reserved_for_itself() {
    let [one, two] = devices();
    let (mut a, mut b) = (Line::requests(&one), Line::requests(&two));
    let reserve = [0x16, 0, 0, 0, 0, 0];
    assert_eq!(a.done(FIRST, &reserve, &[], &[]).status, GOOD);
    assert_eq!((write(&mut a), write(&mut b)), (GOOD, CONFLICT));
    one.reset();
    assert_eq!(write(&mut b), GOOD);
    assert_eq!(b.done(FIRST, &[0], &[], &[]).sense, None);
    assert_eq!(a.done(FIRST, &[0], &[], &[]).sense, NEXUS_LOSS);
}

#[test]
fn a_compare_and_write_of_one_guest_holds_up_the_other_s_writes_of_the_same_blocks() {
    let [one, two] = devices();
    let (mut a, mut b) = (Line::requests(&one), Line::requests(&two));
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x89, 1);
    let (_, request) = a.submitted(FIRST, 1, &cdb, &[piece(BUFFER, 1024)], &[]);
    let next = b.command(FIRST, 1, &write10(0, 1), &[piece(BUFFER, 512)], &[]).unwrap();
    assert!(matches!(next, Next::Wait));
    assert_eq!(a.ended(request, Err(Errno::IO)).status, CHECK_CONDITION);
    let Next::Submit(_, request) = b.resumed() else { panic!("it is free") };
    assert_eq!(b.ended(request, Ok(())).status, GOOD);
}

#[test]
fn each_guest_is_told_of_another_size_and_of_its_own_target_s_units_alone() {
    let [one, two] = devices();
    let (mut a, mut b) = (Line::requests(&one), Line::requests(&two));
    let before = [one.events.len(), two.events.len()];
    assert_eq!(one.resize(FIRST, 1 << 20), Some(true));
    assert_eq!(two.resize(FIRST, 1 << 20), Some(true), "it is news to this one, too");
    assert_eq!(two.resize(FIRST, 1 << 20), Some(false));
    assert_eq!([one.events.len(), two.events.len()], before.map(|count| count + 1));
    for line in [&mut a, &mut b] {
        assert_eq!(line.done(FIRST, &[0], &[], &[]).sense, Some((6, 0x2a, 9)));
        assert_eq!(line.done(FIRST, &[0], &[], &[]).sense, None);
    }
    one.add(one.prepare(NEW, unit()).unwrap()).unwrap();
    assert_eq!(a.done(FIRST, &[0], &[], &[]).sense, Some((6, 0x3f, 0x0e)));
    assert_eq!(b.done(FIRST, &[0], &[], &[]).sense, None);
}

#[test]
fn a_device_that_goes_away_leaves_its_registration_and_nothing_else() {
    let [one, two] = devices();
    let (mut a, mut b) = (Line::requests(&one), Line::requests(&two));
    let reserve = [0x16, 0, 0, 0, 0, 0];
    assert_eq!(a.done(FIRST, &reserve, &[], &[]).status, GOOD);
    one.remove(FIRST).unwrap();
    assert_eq!(write(&mut b), GOOD);
    assert_eq!(persist(&mut b, REGISTER, 0, 2), GOOD);
    assert_eq!(persist(&mut b, RESERVE, 2, 0), GOOD);
    let unit = Arc::clone(&two.lun(FIRST).unwrap().unit);
    drop((b, two));
    one.add(one.prepare(FIRST, unit).unwrap()).unwrap();
    assert_eq!(a.done(FIRST, &[0], &[], &[]).sense, Some((6, 0x29, 0)), "it is new to the unit");
    assert_eq!(write(&mut a), CONFLICT);
}

#[test]
fn what_a_guest_s_device_kept_from_others_is_theirs_when_the_device_is_gone() {
    let [one, two] = devices();
    let (mut a, mut b) = (Line::requests(&one), Line::requests(&two));
    assert_eq!(a.done(FIRST, &[0x16, 0, 0, 0, 0, 0], &[], &[]).status, GOOD);
    assert_eq!(write(&mut b), CONFLICT);
    drop((a, one));
    assert_eq!(write(&mut b), GOOD);
}

#[test]
fn a_unit_that_was_prepared_and_abandoned_knows_nothing_of_the_driver() {
    let ([one, _], shared) = (devices(), unit());
    let first = one.prepare(NEW, Arc::clone(&shared)).unwrap();
    one.abandon(&first);
    let second = one.prepare(NEW, shared).unwrap();
    assert!(!Arc::ptr_eq(&first.nexus, &second.nexus));
}
