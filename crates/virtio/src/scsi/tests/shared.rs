//! A unit that two devices have.

use egret_vring::memory::Region;
use egret_vring::ring::{Inflight, InflightConfig};

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

/// A record for the device's queues.
fn record() -> Inflight {
    let config = InflightConfig { queues: 3, queue_size: 64, packed: false };
    let Region { file, offset, size, .. } = Region::anonymous(0, config.bytes()).unwrap();
    Inflight::map(file, offset, size, config).unwrap()
}

/// Has the write cache be on or off.
fn select(line: &mut Line, write_cache: bool) {
    while line.done(FIRST, &[0], &[], &[]).status == CHECK_CONDITION {}
    line.guest.write(BUFFER, &[&[0, 0, 0, 0, 8, 18, u8::from(write_cache) << 2][..], &[0; 17]].concat());
    let cdb = [0x15, 0x10, 0, 0, 24, 0];
    let told = match line.command(FIRST, 1, &cdb, &[piece(BUFFER, 24)], &[]).unwrap() {
        Next::Submit(_, flush) => line.ended(flush, Ok(())),
        Next::Complete(ended) => line.told(ended),
        Next::Wait => panic!("nobody is in the way"),
    };
    assert_eq!(told.status, GOOD);
}

/// The byte of the caching page that says whether there is a write cache.
fn sensed(line: &mut Line) -> u8 {
    while line.done(FIRST, &[0], &[], &[]).status == CHECK_CONDITION {}
    assert_eq!(line.done(FIRST, &[0x1a, 8, 8, 0, 24, 0], &[], &[piece(BUFFER, 24)]).status, GOOD);
    line.guest.read::<24>(BUFFER)[6]
}

#[test]
fn whoever_is_told_that_there_is_no_write_cache_has_that_in_its_record_and_another_daemon_has_writes_stable() {
    let [one, two] = devices();
    let records = [record(), record()];
    one.note_choices(&records[0]);
    two.note_choices(&records[1]);
    let (mut a, mut b) = (Line::requests(&one), Line::requests(&two));
    let noted = || records.each_ref().map(|record| record.choices().unwrap());
    assert_eq!(noted(), [0, 0]);
    select(&mut a, false);
    assert_eq!((noted(), sensed(&mut b), noted()), ([1, 0], 0, [1, 1]));

    // All units of the next daemon go without, whichever it was.
    let next = devices();
    next[1].choose(noted()[1]);
    let [mut a_next, mut b_next] = next.each_ref().map(Line::requests);
    let writes = [(&mut a_next, FIRST), (&mut b_next, FIRST)].map(|(line, at)| {
        let (_, write) = line.submitted(at, 1, &write10(0, 1), &[piece(BUFFER, 512)], &[]);
        let op = write.op;
        line.ended(write, Ok(()));
        op
    });
    assert_eq!(writes, [Op::Write { fua: true }; 2]);
    let (_, far) = b_next.submitted(FAR, 1, &write10(0, 1), &[piece(BUFFER, 512)], &[]);
    assert_eq!(far.op, Op::Write { fua: true });
    b_next.ended(far, Ok(()));
    // What the other has written before is not known to be stable: it is told to flush until somebody has.
    assert_eq!((sensed(&mut a_next), sensed(&mut b_next)), (4, 4));
    next[1].note_choices(&records[1]);
    assert_eq!(noted()[1], 1);
    select(&mut b_next, false);
    assert_eq!((sensed(&mut a_next), sensed(&mut b_next)), (0, 0));

    // On again, as far as each is told.
    select(&mut a, true);
    assert_eq!(noted()[0], 0);
    assert_eq!(sensed(&mut b), 4);
    two.reset();
    select(&mut b, false);
    assert_eq!(noted()[0], 0, "it has asked for nothing since");
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
