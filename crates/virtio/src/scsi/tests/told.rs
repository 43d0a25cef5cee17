//! Units that come, go and change, and the events about it.

use super::*;

/// The next event: kind, address, reason.
fn event(line: &mut Line) -> (u32, [u8; 8], u32) {
    let next = line.offer(&[], &[piece(BUFFER, 16)]);
    assert!(matches!(next, Ok(Next::Complete(Completed { written: 16, .. }))));
    let bytes: [u8; 16] = line.guest.read(BUFFER);
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    (word(0), bytes[4..12].try_into().unwrap(), word(12))
}

const NO_EVENT: u32 = 0;
const MISSED: u32 = 1 << 31;
const TRANSPORT_RESET: u32 = 1;
const PARAM_CHANGE: u32 = 3;
const RESCAN: u32 = 1;
const REMOVED: u32 = 2;
const NEW: LunAddress = LunAddress { target: 0, lun: 7 };

#[test]
fn what_comes_goes_and_changes_is_told_in_order_and_only_when_there_is_a_buffer() {
    let scsi = device();
    let mut line = Line::new(&scsi, 1);
    assert_eq!((scsi.events.len(), line.model.takes_chains()), (0, false));
    scsi.add(scsi.prepare(NEW, unit()).unwrap()).unwrap();
    assert!(line.model.takes_chains());
    assert_eq!(scsi.resize(NEW, 1 << 20), Some(true));
    assert_eq!(scsi.resize(NEW, 1 << 20), Some(false));
    assert_eq!(scsi.remove(NEW).unwrap().address, NEW);
    assert!(scsi.remove(NEW).is_none() && scsi.resize(NEW, 1 << 20).is_none());
    assert_eq!(scsi.events.len(), 3);
    assert_eq!(event(&mut line), (TRANSPORT_RESET, NEW.to_bytes(), RESCAN));
    assert_eq!(event(&mut line), (PARAM_CHANGE, NEW.to_bytes(), 0x092a));
    assert_eq!(event(&mut line), (TRANSPORT_RESET, NEW.to_bytes(), REMOVED));
    assert_eq!(scsi.events.len(), 0);
}

#[test]
fn a_disk_that_grows_is_news_of_the_units_that_have_it_and_none_of_the_configuration_space() {
    let scsi = device();
    let mut line = Line::new(&scsi, 1);
    let disk = scsi.lun(FAR).unwrap().disk;
    for events in [1, 1] {
        assert!(!Device::resize(&*scsi, disk, 1 << 20));
        assert_eq!(scsi.events.len(), events);
    }
    assert_eq!(event(&mut line), (PARAM_CHANGE, FAR.to_bytes(), 0x092a));
    assert!(!Device::resize(&*scsi, DiskKey(7), 1 << 21));
    assert_eq!(scsi.events.len(), 0);
}

#[test]
fn a_driver_that_lags_behind_hears_what_was_kept_and_then_that_it_has_missed_something() {
    let scsi = device();
    let mut line = Line::new(&scsi, 1);
    for bytes in 1..=100 {
        scsi.resize(if bytes % 2 == 0 { FIRST } else { FAR }, bytes << 20);
    }
    let some_were_missed = (NO_EVENT | MISSED, [0; 8], 0);
    assert_eq!(scsi.events.len(), 64 + 1);
    for _ in 0..64 {
        assert_eq!(event(&mut line).0, PARAM_CHANGE);
    }
    assert!(line.model.takes_chains(), "whenever it has a buffer again");
    assert_eq!(event(&mut line), some_were_missed);
    assert_eq!(scsi.events.len(), 0);
    // A buffer that is too small is one event less.
    for bytes in 101..=103 {
        scsi.resize(if bytes % 2 == 0 { FIRST } else { FAR }, bytes << 20);
    }
    let next = line.offer(&[], &[piece(BUFFER, 15)]);
    assert!(matches!(next, Ok(Next::Complete(Completed { written: 0, .. }))));
    assert_eq!([(); 3].map(|()| event(&mut line).0), [PARAM_CHANGE, PARAM_CHANGE, NO_EVENT | MISSED]);
    scsi.resize(FIRST, 104 << 20);
    scsi.reset();
    assert_eq!(scsi.events.len(), 0);
}

#[test]
fn a_driver_that_knows_no_events_gets_none() {
    let scsi = device();
    scsi.set_features(FEATURES & !HOTPLUG & !CHANGE).unwrap();
    scsi.add(scsi.prepare(NEW, unit()).unwrap()).unwrap();
    scsi.resize(NEW, 1 << 20);
    assert_eq!(scsi.events.len(), 0);
    assert_eq!(scsi.set_features(1 << 3), Err(DriverError::NotOffered(1 << 3)));
}

#[test]
fn a_unit_that_goes_away_ends_its_commands_as_usual_and_its_disk_s_key_is_not_another_s_meanwhile() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let (disk, request) = line.submitted(FAR, 1, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    scsi.remove(FAR).unwrap();
    assert_eq!(line.done(FAR, &[0], &[], &[]).response, BAD_TARGET);
    let next = scsi.prepare(FAR, unit()).unwrap();
    assert_ne!(next.disk, disk);
    assert_eq!(line.ended(request, Ok(())).status, GOOD);
    drop(next);
    assert_eq!(scsi.prepare(FAR, unit()).unwrap().disk, disk, "now nobody knows of it");
}

#[test]
fn a_unit_that_goes_away_without_commands_leaves_its_disk_s_key_to_the_next() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let disk = scsi.remove(FIRST).unwrap().disk;
    assert_eq!(line.done(FAR, &[0], &[], &[]).status, GOOD);
    assert_eq!(scsi.prepare(FIRST, unit()).unwrap().disk, disk);
}

#[test]
fn units_that_come_are_found_and_their_neighbours_say_that_they_have_come() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let lun = scsi.prepare(NEW, unit()).unwrap();
    assert_eq!(scsi.prepare(FIRST, unit()).unwrap_err(), LunError::Taken(FIRST));
    assert_eq!(scsi.prepare(LunAddress { target: 0, lun: 16384 }, unit()).unwrap_err(), LunError::Number(16384));
    assert!(scsi.prepare(LunAddress { target: 0, lun: 16383 }, unit()).is_ok());
    assert_eq!(line.done(NEW, &[0], &[], &[]).sense, Some((5, 0x25, 0)));
    scsi.add(lun).unwrap();
    let told = line.done(NEW, &[0], &[], &[]);
    assert_eq!(told.sense, Some((6, 0x29, 0)), "it is powered on");
    assert_eq!(told.ended.status, crate::Status::Ok, "which is no error");
    assert_eq!(line.done(FIRST, &[0], &[], &[]).sense, Some((6, 0x3f, 0x0e)));
    assert_eq!(line.done(FAR, &[0], &[], &[]).sense, None, "another target's units are not its business");
}

#[test]
fn a_queue_to_which_nothing_comes_does_not_go_on_having_a_unit_that_was_taken_away() {
    let scsi = device();
    let mut line = Line::requests(&scsi);
    let [far, first] = [FAR, FIRST].map(|at| Arc::downgrade(&scsi.lun(at).unwrap().unit));
    let (_, request) = line.submitted(FAR, 1, &read10(0, 1), &[], &[piece(BUFFER, 512)]);
    scsi.remove(FAR).unwrap();
    line.model.look_for_disks();
    assert!(far.upgrade().is_some(), "it has a command of it");
    assert_eq!(line.ended(request, Ok(())).status, 0);
    assert!(far.upgrade().is_none());
    // One that is on its way from one loop to another.
    line.model.set_waker(None);
    scsi.remove(FIRST).unwrap();
    line.model.set_waker(Some(Arc::clone(&line.woken).into()));
    assert!(first.upgrade().is_none());
}
