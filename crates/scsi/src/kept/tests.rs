use std::sync::Arc;

use super::*;
use crate::testing::{Reply, Rig, Woken, config, nexus};
use crate::{Command, LogicalUnit, Nexus, Sense, Status, Step, Task};

const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const REGISTER_AND_IGNORE: u8 = 6;
const APTPL: u8 = 1;
const WRITE_EXCLUSIVE: u8 = 1;

/// A keeper whose tests say when what is stored.
#[derive(Debug, Default)]
struct Shelf(Mutex<Vec<(Registered, Change)>>);

impl Keeper for Shelf {
    fn store(&self, table: Registered, change: Change) {
        self.0.lock().unwrap().push((table, change));
    }
}

impl Shelf {
    /// The one table that is to be stored.
    fn take(&self) -> (Registered, Change) {
        let mut waiting = self.0.lock().unwrap();
        assert_eq!(waiting.len(), 1, "one table at a time");
        waiting.remove(0)
    }
}

struct Kept {
    rig: Rig,
    shelf: Arc<Shelf>,
    woken: Arc<Woken>,
    waker: Waker,
}

impl Kept {
    fn new(registered: &Registered) -> Self {
        let (shelf, woken) = (Arc::<Shelf>::default(), Arc::<Woken>::default());
        let unit = LogicalUnit::kept(config(), registered, Arc::clone(&shelf) as Arc<dyn Keeper>).unwrap();
        Self { rig: Rig::of(unit), shelf, waker: Arc::clone(&woken).into(), woken }
    }

    /// The first step of a PERSISTENT RESERVE OUT.
    fn begin(&self, nexus: &Nexus, command: &mut Command, action: u8, keys: [u64; 2], flags: u8) -> Step {
        let list = [&keys[0].to_be_bytes()[..], &keys[1].to_be_bytes(), &[0, 0, 0, 0, flags, 0, 0, 0]].concat();
        let cdb = [0x5f, action, WRITE_EXCLUSIVE, 0, 0, 0, 0, 0, 24, 0];
        let task = Task { cdb: &cdb, nexus, luns: &[0], data_in: 0, data_out: 24, lane: 0, waker: &self.waker };
        self.rig.unit.begin(command, &task, &&list[..])
    }

    fn retry(&self, nexus: &Nexus, command: &mut Command) -> Step {
        self.rig.unit.retry(command, nexus, &self.waker)
    }

    /// A PERSISTENT RESERVE OUT whose table is stored. Returns the table.
    fn stored(&self, nexus: &Nexus, action: u8, keys: [u64; 2], flags: u8) -> Registered {
        let mut command = Command::new();
        assert_eq!(self.begin(nexus, &mut command, action, keys, flags), Step::Wait);
        let (table, change) = self.shelf.take();
        change.is_stored();
        assert_eq!(self.retry(nexus, &mut command), Step::good(24));
        table
    }

    fn capabilities(&mut self) -> [u8; 2] {
        let data = self.rig.run(&[0x5e, 2, 0, 0, 0, 0, 0, 0, 255, 0], &[], 255).good();
        [data[2], data[3]]
    }

    fn write(&mut self, nexus: &Arc<Nexus>) -> Reply {
        self.rig.run_as(nexus, &[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[0; 512], 0)
    }
}

#[test]
fn a_change_takes_effect_and_its_command_ends_when_it_is_stored_and_not_before() {
    let mut kept = Kept::new(&Registered::default());
    let (a, b) = (kept.rig.nexus.clone(), kept.rig.other(2));
    kept.stored(&a, REGISTER, [0, 1], 0);
    let mut command = Command::new();
    assert_eq!(kept.begin(&a, &mut command, RESERVE, [1, 0], 0), Step::Wait);
    assert_eq!(kept.retry(&a, &mut command), Step::Wait);
    kept.write(&b).good();
    let (table, change) = kept.shelf.take();
    assert_eq!(table.reservation, Some((WRITE_EXCLUSIVE, a.id())));
    assert_eq!(table.registrations, [(a.id(), 1)]);
    kept.woken.take();
    change.is_stored();
    assert_eq!(kept.woken.take(), 1);
    assert_eq!(kept.write(&b).status, Status::ReservationConflict);
    assert_eq!(kept.retry(&a, &mut command), Step::good(24));
}

#[test]
fn a_change_that_cannot_be_stored_is_a_hardware_error_and_has_not_happened() {
    let mut kept = Kept::new(&Registered::default());
    let (a, b) = (kept.rig.nexus.clone(), kept.rig.other(2));
    kept.stored(&a, REGISTER, [0, 1], 0);
    let mut command = Command::new();
    assert_eq!(kept.begin(&a, &mut command, RESERVE, [1, 0], 0), Step::Wait);
    drop(kept.shelf.take());
    let failed = Sense::new(crate::Key::HardwareError, crate::Code::TARGET_FAILURE);
    assert_eq!(kept.retry(&a, &mut command), failed.into());
    kept.write(&b).good();
    assert_eq!(kept.stored(&a, RESERVE, [1, 0], 0).reservation, Some((WRITE_EXCLUSIVE, a.id())));
}

#[test]
fn changes_are_stored_one_at_a_time_and_the_second_knows_the_first() {
    let kept = Kept::new(&Registered::default());
    let (a, b) = (kept.rig.nexus.clone(), kept.rig.other(2));
    let [mut first, mut second] = [Command::new(), Command::new()];
    assert_eq!(kept.begin(&a, &mut first, REGISTER, [0, 1], 0), Step::Wait);
    assert_eq!(kept.begin(&b, &mut second, REGISTER, [0, 2], 0), Step::Wait);
    assert_eq!(kept.retry(&b, &mut second), Step::Wait);
    kept.shelf.take().1.is_stored();
    assert_eq!(kept.retry(&b, &mut second), Step::Wait);
    let (table, change) = kept.shelf.take();
    assert_eq!(table.registrations, [(a.id(), 1), (b.id(), 2)]);
    change.is_stored();
    assert_eq!(kept.retry(&a, &mut first), Step::good(24));
    assert_eq!(kept.retry(&b, &mut second), Step::good(24));
}

/// As by one who is to be preempted, and has always some of its own under way.
#[test]
fn nexuses_have_their_turns_and_each_one_s_changes_are_stored_in_the_order_in_which_they_came_whoever_is_tried_first() {
    let kept = Kept::new(&Registered::default());
    let (a, b) = (kept.rig.nexus.clone(), kept.rig.other(2));
    let mut waiting: Vec<_> = [(&b, 1), (&b, 2), (&b, 3), (&a, 4), (&b, 5)]
        .into_iter()
        .map(|(nexus, key)| {
            let mut command = Command::new();
            assert_eq!(kept.begin(nexus, &mut command, REGISTER_AND_IGNORE, [0, key], 0), Step::Wait);
            (nexus, key, command)
        })
        .collect();
    let (of_a, of_b) = (|key| (a.id(), key), |key| (b.id(), key));
    for (stored, expected) in [
        (1, vec![of_b(1)]),
        (2, vec![of_b(2)]),
        (4, vec![of_b(2), of_a(4)]),
        (3, vec![of_b(3), of_a(4)]),
        (5, vec![of_b(5), of_a(4)]),
    ] {
        let (table, change) = kept.shelf.take();
        assert_eq!(table.registrations, expected);
        kept.woken.take();
        change.is_stored();
        assert_eq!(kept.woken.take(), 1);
        waiting.reverse();
        let ended = waiting.extract_if(.., |(nexus, _, command)| kept.retry(nexus, command) == Step::good(24));
        assert_eq!(ended.map(|(_, key, _)| key).collect::<Vec<_>>(), [stored]);
    }
}

#[test]
fn who_is_refused_or_aborted_when_it_is_its_turn_has_had_it() {
    let kept = Kept::new(&Registered::default());
    let (a, b) = (kept.rig.nexus.clone(), kept.rig.other(2));
    let conflict = Step::refused(Status::ReservationConflict, None);
    for is_aborted in [false, true] {
        let [mut stored, mut first, mut second, mut third, mut other] = [(); 5].map(|()| Command::new());
        assert_eq!(kept.begin(&b, &mut stored, REGISTER_AND_IGNORE, [0, 2], 0), Step::Wait);
        for command in [&mut first, &mut second, &mut third] {
            assert_eq!(kept.begin(&b, command, CLEAR, [7, 0], 0), Step::Wait);
        }
        assert_eq!(kept.begin(&a, &mut other, REGISTER_AND_IGNORE, [0, 1], 0), Step::Wait);
        kept.shelf.take().1.is_stored();
        assert_eq!(kept.retry(&b, &mut stored), Step::good(24));
        assert_eq!(kept.retry(&b, &mut third), Step::Wait);
        kept.woken.take();
        kept.rig.unit.abort(&mut second);
        assert_eq!(kept.woken.take(), 0, "nobody has waited for it");
        if is_aborted {
            kept.rig.unit.abort(&mut first);
        } else {
            assert_eq!(kept.retry(&b, &mut first), conflict);
        }
        assert_eq!((kept.woken.take(), kept.retry(&b, &mut third)), (1, Step::Wait));
        assert_eq!(kept.retry(&a, &mut other), Step::Wait);
        kept.shelf.take().1.is_stored();
        assert_eq!([kept.retry(&a, &mut other), kept.retry(&b, &mut third)], [Step::good(24), conflict]);
    }
}

#[test]
fn who_gives_up_its_turn_or_may_not_do_what_it_asks_for_wakes_the_next() {
    let kept = Kept::new(&Registered::default());
    let (a, b) = (kept.rig.nexus.clone(), kept.rig.other(2));
    let [mut first, mut gives_up, mut wrong, mut last] = [(); 4].map(|()| Command::new());
    assert_eq!(kept.begin(&a, &mut first, REGISTER, [0, 1], 0), Step::Wait);
    assert_eq!(kept.begin(&b, &mut gives_up, REGISTER, [0, 2], 0), Step::Wait);
    assert_eq!(kept.begin(&b, &mut wrong, CLEAR, [7, 0], 0), Step::Wait);
    assert_eq!(kept.begin(&b, &mut last, REGISTER, [0, 2], 0), Step::Wait);
    kept.shelf.take().1.is_stored();
    assert_eq!(kept.retry(&a, &mut first), Step::good(24));
    assert_eq!([&mut wrong, &mut last].map(|command| kept.retry(&b, command)), [Step::Wait; 2]);
    kept.woken.take();
    kept.rig.unit.abort(&mut gives_up);
    assert_eq!((kept.woken.take(), kept.retry(&b, &mut last)), (1, Step::Wait));
    let conflict = Step::refused(Status::ReservationConflict, None);
    assert_eq!((kept.retry(&b, &mut wrong), kept.woken.take()), (conflict, 1));
    assert_eq!(kept.retry(&b, &mut last), Step::Wait);
    kept.shelf.take().1.is_stored();
    assert_eq!(kept.retry(&b, &mut last), Step::good(24));
}

#[test]
fn a_command_that_is_aborted_while_its_change_is_stored_leaves_the_way_free() {
    let kept = Kept::new(&Registered::default());
    let a = kept.rig.nexus.clone();
    let mut command = Command::new();
    assert_eq!(kept.begin(&a, &mut command, REGISTER, [0, 1], 0), Step::Wait);
    kept.rig.unit.abort(&mut command);
    kept.shelf.take().1.is_stored();
    assert_eq!(kept.stored(&a, CLEAR, [1, 0], 0).registrations, []);
}

/// SPC-2, RESERVE(10) command: who has registered keeps it out, and so does who is about to.
#[test]
fn reserve_is_kept_out_while_somebody_registers() {
    let mut kept = Kept::new(&Registered::default());
    let (a, b) = (kept.rig.nexus.clone(), kept.rig.other(2));
    let mut command = Command::new();
    assert_eq!(kept.begin(&a, &mut command, REGISTER, [0, 1], 0), Step::Wait);
    assert_eq!(kept.rig.run_as(&b, &[0x16, 0, 0, 0, 0, 0], &[], 0).status, Status::ReservationConflict);
    kept.shelf.take().1.is_stored();
    assert_eq!(kept.retry(&a, &mut command), Step::good(24));
}

/// SPC-5, REPORT CAPABILITIES service action, and the APTPL bit.
#[test]
fn capabilities_say_whether_reservations_outlast_the_power_as_the_last_who_registered_wanted() {
    let mut kept = Kept::new(&Registered::default());
    let a = kept.rig.nexus.clone();
    assert_eq!(kept.capabilities(), [0x11, 0x80]);
    assert!(kept.stored(&a, REGISTER, [0, 1], APTPL).aptpl);
    assert_eq!(kept.capabilities(), [0x11, 0x81]);
    // The bit counts where somebody registers, and there alone.
    assert!(kept.stored(&a, RESERVE, [1, 0], 0).aptpl);
    assert_eq!(kept.capabilities(), [0x11, 0x81]);
    assert!(!kept.stored(&a, REGISTER, [1, 3], 0).aptpl);
    assert_eq!(kept.capabilities(), [0x11, 0x80]);
}

/// SPC-5, registering: it does nothing.
#[test]
fn to_register_no_key_by_who_has_none_changes_nothing_for_those_who_have() {
    let mut kept = Kept::new(&Registered::default());
    let (a, b) = (kept.rig.nexus.clone(), kept.rig.other(2));
    let before = kept.stored(&a, REGISTER, [0, 1], APTPL);
    assert_eq!(kept.stored(&b, REGISTER, [0, 0], 0), before);
    assert_eq!(kept.stored(&b, REGISTER_AND_IGNORE, [5, 0], 0), before);
    assert_eq!(kept.capabilities(), [0x11, 0x81]);
    // Who has a key and gives it up is asked once more.
    assert!(!kept.stored(&a, REGISTER, [1, 0], 0).aptpl);
}

#[test]
fn what_was_stored_holds_from_the_beginning() {
    let before = Kept::new(&Registered::default());
    let (a, b) = (before.rig.nexus.clone(), before.rig.other(2));
    before.stored(&a, REGISTER, [0, 1], APTPL);
    before.stored(&b, REGISTER, [0, 2], APTPL);
    before.stored(&b, RESERVE, [2, 0], 0);
    let table = before.stored(&b, PREEMPT, [2, 1], 0);
    let told = a.take_attention().map(|sense| sense.code);
    assert_eq!(told, Some(crate::Code::REGISTRATIONS_PREEMPTED));
    let mut after = Kept::new(&table);
    let (a, b) = (after.rig.nexus.clone(), after.rig.other(2));
    assert_eq!(after.capabilities(), [0x11, 0x81]);
    assert_eq!(after.write(&a).status, Status::ReservationConflict);
    after.write(&b).good();
    assert_eq!(after.stored(&b, CLEAR, [2, 0], 0), Registered { aptpl: true, ..Registered::default() });
    after.write(&a).good();
}

#[test]
fn a_table_that_there_cannot_be_is_refused() {
    let (a, b) = (nexus(1), nexus(2));
    let one = vec![(a, 1)];
    for (registrations, reservation) in [
        (vec![(a, 0)], None),
        (vec![(a, 1), (a, 2)], None),
        (one.clone(), Some((2, a))),
        (one.clone(), Some((WRITE_EXCLUSIVE, b))),
        (vec![], Some((7, a))),
    ] {
        let table = Registered { aptpl: true, registrations, reservation };
        let error = LogicalUnit::kept(config(), &table, Arc::<Shelf>::default()).unwrap_err();
        assert_eq!(error, crate::ConfigError::Reservations, "{table:?}");
    }
    // Whoever made one that is for all registrants may have gone.
    let table = Registered { aptpl: true, registrations: one, reservation: Some((7, b)) };
    assert!(LogicalUnit::kept(config(), &table, Arc::<Shelf>::default()).is_ok());
}
