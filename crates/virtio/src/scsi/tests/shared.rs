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
    select_of(line, FIRST, write_cache);
}

fn select_of(line: &mut Line, at: LunAddress, write_cache: bool) {
    while line.done(at, &[0], &[], &[]).status == CHECK_CONDITION {}
    line.guest.write(BUFFER, &[&[0, 0, 0, 0, 8, 18, u8::from(write_cache) << 2][..], &[0; 17]].concat());
    let cdb = [0x15, 0x10, 0, 0, 24, 0];
    let told = match line.command(at, 1, &cdb, &[piece(BUFFER, 24)], &[]).unwrap() {
        Next::Submit(_, flush) => line.ended(flush, Ok(())),
        Next::Complete(ended) => line.told(ended),
        Next::Wait => panic!("nobody is in the way"),
    };
    assert_eq!(told.status, GOOD);
}

/// The byte of the caching page that says whether there is a write cache.
fn sensed(line: &mut Line) -> u8 {
    sensed_of(line, FIRST)
}

fn sensed_of(line: &mut Line, at: LunAddress) -> u8 {
    while line.done(at, &[0], &[], &[]).status == CHECK_CONDITION {}
    assert_eq!(line.done(at, &[0x1a, 8, 8, 0, 24, 0], &[], &[piece(BUFFER, 24)]).status, GOOD);
    line.guest.read::<24>(BUFFER)[6]
}

/// Whether a write is to be stable when it ends.
fn is_stable(line: &mut Line, at: LunAddress) -> bool {
    let (_, write) = line.submitted(at, 1, &write10(0, 1), &[piece(BUFFER, 512)], &[]);
    let is_stable = write.op == Op::Write { fua: true };
    line.ended(write, Ok(()));
    is_stable
}

/// A guest's device with units of its own, `FIRST` and `FAR`.
fn alone() -> Arc<Scsi> {
    let scsi = Scsi::new(ScsiConfig { num_queues: 1, queue_size: 64 }, "one").unwrap();
    for at in [FIRST, FAR] {
        scsi.add(scsi.prepare(at, unit()).unwrap()).unwrap();
    }
    scsi.set_features(FEATURES).unwrap();
    scsi
}

/// As a session takes a record in.
fn take_in(scsi: &Scsi, record: &Inflight) {
    if let Some(choices) = record.choices().filter(|_| !scsi.has_noted(record)) {
        scsi.choose(choices);
    }
    scsi.note_choices(record);
}

#[test]
fn whoever_is_told_that_there_is_no_write_cache_has_that_in_its_record_and_another_daemon_has_writes_stable() {
    let [one, two] = devices();
    let records = [record(), record()];
    one.note_choices(&records[0]);
    two.note_choices(&records[1]);
    let (mut a, mut b) = (Line::requests(&one), Line::requests(&two));
    let noted = || records.each_ref().map(|record| record.choices().unwrap());
    assert_eq!(noted(), [CACHE_ON; 2]);
    select(&mut a, false);
    let both = CACHE_ON | CACHE_OFF;
    assert_eq!((noted(), sensed(&mut b), noted()), ([CACHE_OFF, CACHE_ON], 0, [CACHE_OFF, both]));

    // All units of the next daemon go without, whichever it was.
    let next = devices();
    next[1].choose(noted()[1]);
    let [mut a_next, mut b_next] = next.each_ref().map(Line::requests);
    let stable = [(&mut a_next, FIRST), (&mut b_next, FIRST)].map(|(line, at)| is_stable(line, at));
    assert_eq!((stable, is_stable(&mut b_next, FAR)), ([true; 2], true));
    // What the other has written before is not known to be stable: it is told to flush until somebody has.
    assert_eq!((sensed(&mut a_next), sensed(&mut b_next)), (4, 4));
    next[1].note_choices(&records[1]);
    assert_eq!(noted()[1], both);
    select(&mut b_next, false);
    assert_eq!((sensed(&mut a_next), sensed(&mut b_next)), (0, 0));

    // Where nobody went without, nobody goes without.
    let next = devices();
    for choices in [0, CACHE_ON] {
        next[1].choose(choices);
        let mut line = Line::requests(&next[1]);
        assert_eq!((is_stable(&mut line, FAR), sensed(&mut line)), (false, 4), "{choices}");
    }

    // On again, as far as each is told.
    select(&mut a, true);
    assert_eq!(noted()[0], CACHE_ON);
    assert_eq!(sensed(&mut b), 4);
    two.reset();
    select(&mut b, false);
    assert_eq!(noted()[0], CACHE_ON, "it has asked for nothing since");
}

/// QEMU hands its record over whenever the guest starts again, to the daemon that has had it all the time.
#[test]
fn a_device_that_is_given_its_own_record_again_has_its_units_go_on_as_they_were() {
    let (scsi, record) = (alone(), record());
    take_in(&scsi, &record);
    let mut line = Line::requests(&scsi);
    select(&mut line, false);
    for resets in [false, true] {
        if resets {
            scsi.reset();
        }
        take_in(&scsi, &record);
        let mut line = Line::requests(&scsi);
        assert_eq!((sensed(&mut line), sensed_of(&mut line, FAR)), (0, 4));
        assert!(is_stable(&mut line, FIRST) && !is_stable(&mut line, FAR));
    }
    // Back from a daemon on another host, where the other was turned off, too.
    let there = alone();
    take_in(&there, &record);
    select_of(&mut Line::requests(&there), FAR, false);
    take_in(&scsi, &record);
    assert!(is_stable(&mut Line::requests(&scsi), FAR));
}

/// What has been written to the others by way of the dead daemon may be in the host's cache.
#[test]
fn units_that_had_a_write_cache_beside_one_without_report_it_in_the_next_daemon_until_it_is_flushed() {
    let record = record();
    let before = alone();
    take_in(&before, &record);
    select(&mut Line::requests(&before), false);
    // Nor has the one that follows the next one flushed.
    for _ in 0..2 {
        let next = alone();
        take_in(&next, &record);
        let mut line = Line::requests(&next);
        assert_eq!((sensed(&mut line), sensed_of(&mut line, FAR)), (4, 4));
        assert!(is_stable(&mut line, FIRST) && is_stable(&mut line, FAR));
    }
    let next = alone();
    take_in(&next, &record);
    let mut line = Line::requests(&next);
    for at in [FIRST, FAR] {
        select_of(&mut line, at, false);
        assert_eq!(sensed_of(&mut line, at), 0);
    }
    // All of them are without one, of which nothing is to be flushed.
    let last = alone();
    take_in(&last, &record);
    let mut line = Line::requests(&last);
    assert_eq!((sensed(&mut line), sensed_of(&mut line, FAR)), (0, 0));
}

#[test]
fn a_unit_that_comes_with_a_write_cache_is_noted_before_its_first_command_is_answered() {
    let (scsi, record) = (alone(), record());
    take_in(&scsi, &record);
    let mut line = Line::requests(&scsi);
    [FIRST, FAR].into_iter().for_each(|at| select_of(&mut line, at, false));
    assert_eq!(record.choices(), Some(CACHE_OFF));
    scsi.add(scsi.prepare(NEW, unit()).unwrap()).unwrap();
    line.done(NEW, &[0], &[], &[]);
    assert_eq!(record.choices(), Some(CACHE_ON | CACHE_OFF));
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
    one.detach(&first);
    let second = one.prepare(NEW, shared).unwrap();
    assert!(!Arc::ptr_eq(&first.nexus, &second.nexus));
}
