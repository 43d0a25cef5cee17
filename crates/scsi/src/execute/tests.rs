mod fenced;

use std::sync::{Arc, Mutex};
use std::thread;

use egret_disk::Op;
use proptest::prelude::*;

use super::*;
use crate::command::{KEEP_DATA, KEEP_EXTENTS};
use crate::step::MAX_SCRATCH;
use crate::testing::{BLOCK, BLOCKS, Rig, await_wake, cdb10, cdb16, config, nexus, waker_of_this_thread};
use crate::{Attention, Done, Key, LunConfig, Memory, Status};

/// Begins a command that is not run to its end.
fn begin(rig: &Rig, command: &mut Command, nexus: &Nexus, cdb: &[u8], out: &[u8]) -> Step {
    let data_out = out.len() as u64;
    let task = Task { cdb, nexus, luns: &[], data_in: 1 << 20, data_out, lane: 1, waker: Waker::noop() };
    rig.unit.begin(command, &task, &out)
}

/// Goes on with a command whose operation has ended well.
fn step(rig: &Rig, command: &mut Command, nexus: &Nexus, out: &[u8]) -> Step {
    rig.unit.step(command, OK, &out, nexus, Waker::noop())
}

fn is_disk(step: Step, op: Op) -> bool {
    matches!(step, Step::Disk(disk) if disk.op == op)
}

fn good(step: Step) -> bool {
    matches!(step, Step::Done(Done { status: Status::Good, .. }))
}

/// COMPARE AND WRITE of one block.
fn compare_and_write(lba: u64) -> [u8; 16] {
    let mut cdb = cdb16(0x89, 0, lba, 0);
    cdb[13] = 1;
    cdb
}

const WRITE: Op = Op::Write { fua: false };
const OK: Result<(), Errno> = Ok(());

/// SAM-5, unit attention conditions.
#[test]
fn a_new_nexus_is_told_of_the_power_on_by_any_command_but_three() {
    let mut rig = Rig::new(config());
    let power_on = Sense::new(Key::UnitAttention, Code::POWER_ON);
    let mut initiator = 10;
    for cdb in [&[0; 6][..], &cdb10(0x28, 0, 0, 1), &[0xff], &[], &[0x00, 0, 0, 0, 0, 0x04]] {
        initiator += 1;
        let new = rig.unit.attach(nexus(initiator));
        rig.run_as(&new, &[0x12, 0, 0, 0, 36, 0], &[], 36).good();
        rig.run_as(&new, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], &[], 16).good();
        assert_eq!(rig.run_as(&new, cdb, &[], BLOCK).sense(), power_on, "{cdb:02x?}");
        rig.run_as(&new, &[0; 6], &[], 0).good();
    }
    let new = rig.unit.attach(nexus(9));
    assert_eq!(rig.run_as(&new, &[3, 0, 0, 0, 18, 0], &[], 18).good(), power_on.to_bytes());
    rig.run_as(&new, &[0; 6], &[], 0).good();
}

/// SAM-5, LOGICAL UNIT RESET and I_T NEXUS RESET.
#[test]
fn a_reset_tells_those_whom_it_concerns_and_undoes_what_a_power_on_would() {
    let mut rig = Rig::new(LunConfig { removable: true, ..config() });
    let other = rig.other(2);
    rig.run(&[0x15, 0x10, 0, 0, 24, 0], &[&[0, 0, 0, 0, 8, 18][..], &[0; 18]].concat(), 0).good();
    rig.run(&[0x1b, 0, 0, 0, 2, 0], &[], 0).good();
    other.take_attention();
    rig.unit.reset();
    assert!(!rig.unit.write_cache(), "whoever turned it off does not flush");
    for nexus in [rig.nexus.clone(), other.clone()] {
        assert_eq!(rig.run_as(&nexus, &[0; 6], &[], 0).sense().code, Code::UNIT_RESET);
        rig.run_as(&nexus, &[0; 6], &[], 0).good();
    }
    rig.unit.reset_nexus(other.id());
    assert_eq!(rig.run_as(&other, &[0; 6], &[], 0).sense().code, Code::NEXUS_LOSS);
    rig.run(&[0; 6], &[], 0).good();
    rig.unit.attend(Attention::CommandsCleared, Some(other.id()));
    assert_eq!(rig.run(&[0; 6], &[], 0).sense().code, Code::COMMANDS_CLEARED);
    rig.run_as(&other, &[0; 6], &[], 0).good();
}

/// SAM-5, I_T nexus loss and LOGICAL UNIT RESET.
#[test]
fn an_initiator_that_is_reset_takes_a_unit_from_nobody_who_shares_it() {
    let mut rig = Rig::new(LunConfig { removable: true, ..config() });
    rig.run(&[0x1b, 0, 0, 0, 2, 0], &[], 0).good();
    rig.unit.reset_initiator(rig.nexus.id());
    assert_eq!(rig.run(&[0; 6], &[], 0).sense().code, Code::UNIT_RESET, "nobody else is there");
    rig.run(&[0; 6], &[], 0).good();

    let other = rig.other(2);
    rig.run_as(&other, &[0x1e, 0, 0, 0, 1, 0], &[], 0).good();
    rig.unit.reset_initiator(rig.nexus.id());
    assert_eq!(rig.run(&[0; 6], &[], 0).sense().code, Code::NEXUS_LOSS);
    rig.run_as(&other, &[0; 6], &[], 0).good();
    assert_eq!(rig.run(&[0x1b, 0, 0, 0, 2, 0], &[], 0).sense(), Sense::illegal(Code::REMOVAL_PREVENTED));
}

/// SPC-5, registering: a registration outlasts who has made it.
#[test]
fn an_initiator_that_is_reset_has_a_unit_alone_though_one_that_has_gone_is_still_registered() {
    let (mut rig, a, b) = reserved();
    rig.unit.detach(b.id());
    rig.run(&[0x15, 0x10, 0, 0, 16, 0], &[0, 0, 0, 0, 10, 10, 0x20, 0x10, 8, 0, 0, 0, 0xff, 0xff, 0, 0], 0).good();
    rig.run(&[0x1b, 0, 0, 0, 2, 0], &[], 0).good();
    rig.unit.reset_initiator(a.id());
    assert_eq!(rig.run(&[0; 6], &[], 0).sense().code, Code::UNIT_RESET);
    rig.run(&[0; 6], &[], 0).good();
    rig.run(&cdb10(0x2a, 0, 0, 1), &[0; BLOCK], 0).good();
}

/// SBC-4, COMPARE AND WRITE command.
#[test]
fn a_write_that_overlaps_a_compare_and_write_waits_for_its_end_and_others_do_not() {
    let rig = Rig::new(config());
    let (mut alone, mut over, mut beside) = (Command::new(), Command::new(), Command::new());
    let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
    assert!(is_disk(begin(&rig, &mut alone, &rig.nexus, &compare_and_write(5), &data), Op::Read));
    let write = cdb10(0x2a, 0, 0, 6);
    assert_eq!(begin(&rig, &mut over, &rig.nexus, &write, &[1; 6 * BLOCK]), Step::Wait);
    assert_eq!(rig.unit.retry(&mut over, &rig.nexus, Waker::noop()), Step::Wait);
    assert!(is_disk(begin(&rig, &mut beside, &rig.nexus, &cdb10(0x2a, 0, 6, 1), &[1; BLOCK]), WRITE));
    assert!(good(step(&rig, &mut beside, &rig.nexus, &[1; BLOCK])));
    // Another one of the same block waits, too; a read does not.
    assert_eq!(begin(&rig, &mut beside, &rig.nexus, &compare_and_write(5), &data), Step::Wait);
    rig.unit.abort(&mut beside);
    assert!(is_disk(begin(&rig, &mut beside, &rig.nexus, &cdb10(0x28, 0, 5, 1), &[]), Op::Read));

    alone.scratch(&&data[..]).copy_from_slice(&data[..BLOCK]);
    assert!(is_disk(step(&rig, &mut alone, &rig.nexus, &data), WRITE));
    assert_eq!(rig.unit.retry(&mut over, &rig.nexus, Waker::noop()), Step::Wait);
    assert!(good(step(&rig, &mut alone, &rig.nexus, &data)));
    assert!(is_disk(rig.unit.retry(&mut over, &rig.nexus, Waker::noop()), WRITE));
    assert!(good(step(&rig, &mut over, &rig.nexus, &[1; 6 * BLOCK])));
}

/// SBC-4, COMPARE AND WRITE command.
#[test]
fn a_compare_and_write_waits_for_whatever_was_changing_the_medium_before_it() {
    let rig = Rig::new(config());
    let (mut write, mut alone) = (Command::new(), Command::new());
    let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
    assert!(is_disk(begin(&rig, &mut write, &rig.nexus, &cdb10(0x2a, 0, 5, 1), &data), WRITE));
    assert_eq!(begin(&rig, &mut alone, &rig.nexus, &compare_and_write(5), &data), Step::Wait);
    assert!(good(step(&rig, &mut write, &rig.nexus, &data)));
    assert!(is_disk(rig.unit.retry(&mut alone, &rig.nexus, Waker::noop()), Op::Read));
    rig.unit.abort(&mut alone);
    assert!(is_disk(begin(&rig, &mut write, &rig.nexus, &cdb10(0x2a, 0, 5, 1), &data), WRITE));
    rig.unit.abort(&mut write);
}

/// SBC-4, COMPARE AND WRITE command.
#[test]
fn one_that_waits_and_is_aborted_holds_nobody_up() {
    let rig = Rig::new(config());
    let (mut write, mut first, mut second) = (Command::new(), Command::new(), Command::new());
    let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
    assert!(is_disk(begin(&rig, &mut write, &rig.nexus, &cdb10(0x2a, 0, 9, 1), &data), WRITE));
    assert_eq!(begin(&rig, &mut first, &rig.nexus, &compare_and_write(5), &data), Step::Wait);
    rig.unit.abort(&mut first);
    assert_eq!(begin(&rig, &mut second, &rig.nexus, &compare_and_write(5), &data), Step::Wait);
    assert!(good(step(&rig, &mut write, &rig.nexus, &data)));
    assert!(is_disk(rig.unit.retry(&mut second, &rig.nexus, Waker::noop()), Op::Read));
    rig.unit.abort(&mut second);
}

/// SBC-4, COMPARE AND WRITE command.
#[test]
fn several_threads_count_with_compare_and_write_and_lose_nothing_though_they_are_put_off() {
    const THREADS: u8 = 4;
    const EACH: u64 = 50;
    let rig = Rig::new(config());
    let (unit, nexus) = (&rig.unit, &rig.nexus);
    let disk = &Mutex::new(vec![0; 4 * BLOCK]);
    let run = |command: &mut Command, cdb: &[u8], data: &[u8], lane: u8| {
        let waker = &waker_of_this_thread();
        let task = Task { cdb, nexus, luns: &[], data_in: 0, data_out: data.len() as u64, lane: lane.into(), waker };
        let mut step = unit.begin(command, &task, &data);
        let mut put_off = [false, true, false, true].into_iter();
        loop {
            step = match step {
                // It is put off now and then.
                Step::Disk(op) if put_off.next() == Some(true) => {
                    let mut op = op;
                    unit.suspend(command, lane.into(), &op);
                    thread::yield_now();
                    loop {
                        match unit.readmit(command, nexus, &mut op, waker) {
                            Some(Step::Wait) => await_wake(),
                            Some(next) => break next,
                            None => break Step::Disk(op),
                        }
                    }
                }
                Step::Disk(op) => {
                    let (at, len) = (op.offset as usize, op.len as usize);
                    let mut disk = disk.lock().unwrap();
                    match op.memory {
                        Memory::Scratch => command.scratch(&data).copy_from_slice(&disk[at..at + len]),
                        Memory::DataOut(from) => disk[at..at + len].copy_from_slice(&data[from as usize..][..len]),
                        _ => panic!("{op:?}"),
                    }
                    drop(disk);
                    thread::yield_now();
                    unit.step(command, OK, &data, nexus, waker)
                }
                Step::Wait => {
                    await_wake();
                    unit.retry(command, nexus, waker)
                }
                Step::Done(done) => return done,
                Step::Overrun { .. } => panic!("the buffers are long enough"),
            }
        }
    };
    thread::scope(|scope| {
        for lane in 0..THREADS {
            scope.spawn(move || {
                let mut command = Command::new();
                let (mut counted, mut seen) = (0, 0_u64);
                while counted < EACH {
                    let mut data = [0; 2 * BLOCK];
                    data[..8].copy_from_slice(&seen.to_le_bytes());
                    data[BLOCK..BLOCK + 8].copy_from_slice(&(seen + 1).to_le_bytes());
                    match run(&mut command, &compare_and_write(1), &data, lane).sense {
                        None => counted += 1,
                        Some(sense) => assert_eq!(sense.key, Key::Miscompare),
                    }
                    // A neighbour, so that there is something to wait for.
                    run(&mut command, &cdb10(0x2a, 0, 2, 1), &[lane; BLOCK], lane);
                    seen = u64::from_le_bytes(disk.lock().unwrap()[BLOCK..BLOCK + 8].try_into().unwrap());
                }
            });
        }
    });
    let counted = u64::from_le_bytes(disk.lock().unwrap()[BLOCK..BLOCK + 8].try_into().unwrap());
    assert_eq!(counted, u64::from(THREADS) * EACH);
}

fn reserve_out(rig: &Rig, command: &mut Command, nexus: &Nexus, action: u8, kind: u8, keys: [u8; 2]) -> Step {
    let list = [&[0; 7][..], &[keys[0]], &[0; 7], &[keys[1]], &[0; 8]].concat();
    begin(rig, command, nexus, &[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list)
}

/// A and B, registered with keys 1 and 2; A has a write exclusive reservation for registrants.
fn reserved() -> (Rig, Arc<Nexus>, Arc<Nexus>) {
    let rig = Rig::new(LunConfig { removable: true, ..config() });
    let (a, b) = (rig.nexus.clone(), rig.other(2));
    let mut command = Command::new();
    assert!(good(reserve_out(&rig, &mut command, &a, 0, 0, [0, 1])));
    assert!(good(reserve_out(&rig, &mut command, &b, 0, 0, [0, 2])));
    assert!(good(reserve_out(&rig, &mut command, &a, 1, 5, [1, 0])));
    (rig, a, b)
}

/// SPC-5, PREEMPT AND ABORT service action.
#[test]
fn preempt_and_abort_ends_when_nothing_that_was_begun_before_it_can_write_any_more() {
    let (rig, a, b) = reserved();
    let (mut write, mut alone, mut preempt) = (Command::new(), Command::new(), Command::new());
    let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
    assert!(is_disk(begin(&rig, &mut alone, &a, &compare_and_write(5), &data), Op::Read));
    assert!(is_disk(begin(&rig, &mut write, &a, &cdb10(0x2a, 0, 0, 1), &data), WRITE));
    assert_eq!(reserve_out(&rig, &mut preempt, &b, 5, 5, [2, 1]), Step::Wait);
    assert!(good(step(&rig, &mut write, &rig.nexus, &data)));
    assert_eq!(rig.unit.retry(&mut preempt, &b, Waker::noop()), Step::Wait, "there is the other one");
    alone.scratch(&&data[..]).copy_from_slice(&data[..BLOCK]);
    assert!(is_disk(step(&rig, &mut alone, &rig.nexus, &data), WRITE));
    assert_eq!(rig.unit.retry(&mut preempt, &b, Waker::noop()), Step::Wait);
    assert!(good(step(&rig, &mut alone, &rig.nexus, &data)));
    assert!(good(rig.unit.retry(&mut preempt, &b, Waker::noop())));
}

/// SPC-5, PREEMPT AND ABORT service action.
#[test]
fn a_write_that_waits_when_its_nexus_is_preempted_conflicts_even_if_that_has_come_back_since() {
    for comes_back in [false, true] {
        let (rig, a, b) = reserved();
        let (mut alone, mut write, mut preempt) = (Command::new(), Command::new(), Command::new());
        let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
        assert!(is_disk(begin(&rig, &mut alone, &b, &compare_and_write(5), &data), Op::Read));
        assert_eq!(begin(&rig, &mut write, &a, &cdb10(0x2a, 0, 5, 1), &data), Step::Wait);
        assert!(good(reserve_out(&rig, &mut preempt, &b, 4, 5, [2, 1])));
        if comes_back {
            come_back(&rig, &a);
        }
        rig.unit.abort(&mut alone);
        let conflict = Step::refused(Status::ReservationConflict, None);
        assert_eq!(rig.unit.retry(&mut write, &a, Waker::noop()), conflict);
    }
}

/// SPC-5, CLEAR and PREEMPT service actions.
#[test]
fn one_that_has_gone_is_forgotten_when_its_registration_is_taken_away_and_what_it_had_waiting_is_fenced() {
    // CLEAR, and PREEMPT of what has not reserved anything.
    for (action, keys) in [(3, [1, 0]), (4, [1, 2])] {
        let (mut rig, a, b) = reserved();
        assert!(good(reserve_out(&rig, &mut Command::new(), &a, 2, 5, [1, 0])));
        let (mut alone, mut write) = (Command::new(), Command::new());
        let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
        b.take_attention();
        assert!(is_disk(begin(&rig, &mut alone, &a, &compare_and_write(5), &data), Op::Read));
        assert_eq!(begin(&rig, &mut write, &b, &cdb10(0x2a, 0, 5, 1), &data), Step::Wait);
        rig.unit.detach(b.id());
        assert!(good(reserve_out(&rig, &mut Command::new(), &a, action, 0, keys)));
        rig.unit.abort(&mut alone);
        let conflicts =
            rig.unit.retry(&mut write, &b, Waker::noop()) == Step::refused(Status::ReservationConflict, None);
        assert_eq!(conflicts, action == 4);
        rig.unit.abort(&mut write);
        rig.run(&[0x1b, 0, 0, 0, 2, 0], &[], 0).good();
        rig.unit.reset_initiator(a.id());
        assert_eq!(rig.run(&[0; 6], &[], 0).sense().code, Code::UNIT_RESET, "nobody else has it");
        rig.run(&[0; 6], &[], 0).good();
    }
}

/// A nexus that was preempted learns of it, and registers again.
fn come_back(rig: &Rig, nexus: &Nexus) {
    nexus.take_attention();
    assert!(good(reserve_out(rig, &mut Command::new(), nexus, 6, 0, [0, 1])));
    assert!(nexus.flags().is_clear());
}

/// A command whose first operation is out, as a transfer if it is one.
fn begun(rig: &Rig, nexus: &Nexus, cdb: &[u8], out: &[u8]) -> (Command, DiskOp) {
    let mut command = Command::new();
    let data_out = out.len() as u64;
    let task = Task { cdb, nexus, luns: &[], data_in: 1 << 20, data_out, lane: 1, waker: Waker::noop() };
    let op = rig.unit.begin_transfer(&mut command, &task).unwrap_or_else(|| {
        match rig.unit.begin(&mut command, &task, &out) {
            Step::Disk(op) => op,
            other => panic!("{other:?}"),
        }
    });
    (command, op)
}

/// Likewise, and it is put off.
fn suspended(rig: &Rig, nexus: &Nexus, cdb: &[u8], out: &[u8]) -> (Command, DiskOp) {
    let (mut command, op) = begun(rig, nexus, cdb, out);
    rig.unit.suspend(&mut command, 1, &op);
    (command, op)
}

/// SBC-4, COMPARE AND WRITE command.
#[test]
fn compare_and_writes_of_a_block_have_their_turns_in_the_order_in_which_they_came() {
    let rig = Rig::new(config());
    let other = rig.other(2);
    let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
    let [mut first, mut second, mut third] = [(); 3].map(|()| Command::new());
    assert!(is_disk(begin(&rig, &mut first, &rig.nexus, &compare_and_write(5), &data), Op::Read));
    assert_eq!(begin(&rig, &mut second, &other, &compare_and_write(5), &data), Step::Wait);
    assert_eq!(begin(&rig, &mut third, &rig.nexus, &compare_and_write(5), &data), Step::Wait);
    rig.unit.abort(&mut first);
    assert_eq!(rig.unit.retry(&mut third, &rig.nexus, Waker::noop()), Step::Wait, "whoever is tried first");
    assert!(is_disk(rig.unit.retry(&mut second, &other, Waker::noop()), Op::Read));
    assert_eq!(rig.unit.retry(&mut third, &rig.nexus, Waker::noop()), Step::Wait);
    rig.unit.abort(&mut second);
    assert!(is_disk(rig.unit.retry(&mut third, &rig.nexus, Waker::noop()), Op::Read));
    rig.unit.abort(&mut third);
}

/// SPC-5, PREEMPT AND ABORT service action.
#[test]
fn what_changes_the_medium_in_several_operations_ends_between_two_of_them_when_its_nexus_is_preempted() {
    let data = [[9; BLOCK]; 256].concat();
    let unmap_list = [
        &[0, 0, 0, 32, 0, 0, 0, 0][..],
        &[0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0, 0, 0],
        &[0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0],
    ]
    .concat();
    for (cdb, out) in [
        (&cdb16(0x93, 0, 0, 384)[..], &data),
        (&cdb16(0x93, 1, 0, 384), &data),
        (&cdb10(0x42, 0, 0, 40), &unmap_list),
        (&cdb16(0x8e, 2, 0, 256), &data),
    ] {
        for action in [4, 5] {
            let (rig, a, b) = reserved();
            let (mut change, op) = begun(&rig, &b, cdb, out);
            if op.memory == Memory::Scratch {
                change.scratch(&&out[..]);
            }
            let mut preempt = Command::new();
            let at_once = reserve_out(&rig, &mut preempt, &a, action, 5, [1, 2]);
            assert_eq!(at_once == Step::Wait, action == 5, "{cdb:02x?}");
            let conflict = Step::refused(Status::ReservationConflict, None);
            assert_eq!(step(&rig, &mut change, &b, out), conflict, "{cdb:02x?}");
            assert!(action == 4 || good(rig.unit.retry(&mut preempt, &a, Waker::noop())), "{cdb:02x?}");
        }
    }
}

/// SBC-4, COMPARE AND WRITE command.
#[test]
fn what_changes_the_medium_in_several_operations_lets_a_compare_and_write_have_its_turn_between_two_of_them() {
    let rig = Rig::new(config());
    let other = rig.other(2);
    let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
    let (mut fill, first) = begun(&rig, &rig.nexus, &cdb16(0x93, 0, 0, 384), &data[BLOCK..]);
    fill.scratch(&&data[BLOCK..]);
    let mut alone = Command::new();
    assert_eq!(begin(&rig, &mut alone, &other, &compare_and_write(5), &data), Step::Wait);
    assert_eq!(step(&rig, &mut fill, &rig.nexus, &data[BLOCK..]), Step::Wait);
    assert!(is_disk(rig.unit.retry(&mut alone, &other, Waker::noop()), Op::Read));
    assert_eq!(rig.unit.retry(&mut fill, &rig.nexus, Waker::noop()), Step::Wait);
    rig.unit.abort(&mut alone);
    let second = DiskOp { offset: first.len, ..first };
    assert_eq!(rig.unit.retry(&mut fill, &rig.nexus, Waker::noop()), Step::Disk(second));
    rig.unit.abort(&mut fill);
}

#[test]
fn a_write_that_waits_for_a_compare_and_write_is_let_in_before_a_later_one_of_the_same_blocks() {
    let rig = Rig::new(config());
    let other = rig.other(2);
    let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
    for is_given_up in [false, true] {
        let [mut first, mut write, mut later] = [(); 3].map(|()| Command::new());
        assert!(is_disk(begin(&rig, &mut first, &other, &compare_and_write(5), &data), Op::Read));
        assert_eq!(begin(&rig, &mut write, &rig.nexus, &cdb10(0x2a, 0, 5, 1), &data), Step::Wait);
        assert_eq!(begin(&rig, &mut later, &other, &compare_and_write(5), &data), Step::Wait);
        rig.unit.abort(&mut first);
        assert_eq!(rig.unit.retry(&mut later, &other, Waker::noop()), Step::Wait, "whoever is tried first");
        if is_given_up {
            rig.unit.abort(&mut write);
        } else {
            assert!(is_disk(rig.unit.retry(&mut write, &rig.nexus, Waker::noop()), WRITE));
            assert!(good(step(&rig, &mut write, &rig.nexus, &data)));
        }
        assert!(is_disk(rig.unit.retry(&mut later, &other, Waker::noop()), Op::Read));
        rig.unit.abort(&mut later);
    }
}

#[test]
fn nobody_waits_for_what_is_put_off_and_it_waits_for_others_when_it_goes_on() {
    let rig = Rig::new(config());
    let other = rig.other(2);
    let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
    let write_same = cdb16(0x93, 0, 5, 1);
    for cdb in [&cdb10(0x2a, 0, 5, 1)[..], &cdb16(0x8e, 0, 5, 1), &write_same, &compare_and_write(5)] {
        let (mut put_off, op) = suspended(&rig, &rig.nexus, cdb, &data);
        // What memory it had its caller may not know any more.
        let mut out = DiskOp { memory: Memory::None, ..op };
        let mut alone = Command::new();
        assert!(is_disk(begin(&rig, &mut alone, &other, &compare_and_write(5), &data), Op::Read), "{cdb:02x?}");
        let mut readmit = |command: &mut Command| rig.unit.readmit(command, &rig.nexus, &mut out, Waker::noop());
        assert_eq!(readmit(&mut put_off), Some(Step::Wait), "{cdb:02x?}");
        rig.unit.abort(&mut alone);
        let next = readmit(&mut put_off);
        assert_eq!(next, Some(Step::Disk(op)).filter(|_| op.memory == Memory::Scratch), "{cdb:02x?}");
        assert_eq!(out.op, op.op, "there is a write cache");
        // It is in again.
        assert_eq!(begin(&rig, &mut alone, &other, &compare_and_write(5), &data), Step::Wait, "{cdb:02x?}");
        rig.unit.abort(&mut put_off);
        rig.unit.abort(&mut alone);
    }
}

/// SPC-5, PREEMPT AND ABORT service action.
#[test]
fn a_write_that_is_put_off_when_its_nexus_is_preempted_conflicts_even_if_that_has_come_back_since() {
    for comes_back in [false, true] {
        let (rig, a, b) = reserved();
        let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
        // The last one ejects the medium, which needs the disk for a flush alone.
        let cdbs = [&cdb10(0x2a, 0, 5, 1)[..], &cdb16(0x8e, 0, 5, 1), &compare_and_write(5), &[0x1b, 0, 0, 0, 2, 0]];
        let put_off = cdbs.map(|cdb| suspended(&rig, &a, cdb, &data));
        let (mut read, mut read_op) = suspended(&rig, &a, &cdb10(0x28, 0, 5, 1), &[]);
        let mut command = Command::new();
        assert!(good(reserve_out(&rig, &mut command, &b, 5, 5, [2, 1])), "nothing of the other is in progress");
        if comes_back {
            come_back(&rig, &a);
        }
        let conflict = Step::refused(Status::ReservationConflict, None);
        for (mut command, mut op) in put_off {
            assert_eq!(rig.unit.readmit(&mut command, &a, &mut op, Waker::noop()), Some(conflict), "{op:?}");
            command.recycle();
        }
        assert_eq!(rig.unit.readmit(&mut read, &a, &mut read_op, Waker::noop()), None);
        rig.unit.abort(&mut read);
    }
}

/// SPC-5, PREEMPT AND ABORT service action, and which commands conflict with which reservation.
#[test]
fn a_read_that_is_put_off_conflicts_if_its_nexus_is_kept_from_reading_when_it_goes_on() {
    let (write_exclusive, exclusive) = (5, 6);
    for (kind, comes_back) in [(write_exclusive, false), (exclusive, false), (exclusive, true)] {
        let (rig, a, b) = reserved();
        let put_off = [&cdb10(0x28, 0, 5, 1)[..], &cdb10(0x2f, 0, 5, 1), &cdb10(0x35, 0, 0, 0)]
            .map(|cdb| suspended(&rig, &a, cdb, &[]));
        assert!(good(reserve_out(&rig, &mut Command::new(), &b, 5, kind, [2, 1])));
        if comes_back {
            come_back(&rig, &a);
        }
        let conflict = Step::refused(Status::ReservationConflict, None);
        for (mut command, mut op) in put_off {
            let next = rig.unit.readmit(&mut command, &a, &mut op, Waker::noop());
            let is_kept_out = kind == exclusive && !comes_back;
            assert_eq!(next == Some(conflict), is_kept_out, "{op:?} and type {kind}: {next:?}");
            rig.unit.abort(&mut command);
        }
    }
}

/// SPC-5, PREEMPT AND ABORT service action: it waits for a write that is then put off, and does not wait for it any more.
#[test]
fn a_write_that_is_put_off_after_its_nexus_was_preempted_and_has_come_back_conflicts() {
    let cdbs = [&cdb10(0x2a, 0, 5, 1)[..], &cdb16(0x8e, 0, 5, 1), &compare_and_write(5)];
    for cdb in cdbs {
        let (rig, a, b) = reserved();
        let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
        let (mut write, mut op) = begun(&rig, &a, cdb, &data);
        let mut preempt = Command::new();
        assert_eq!(reserve_out(&rig, &mut preempt, &b, 5, 5, [2, 1]), Step::Wait, "{cdb:02x?}");
        come_back(&rig, &a);
        rig.unit.suspend(&mut write, 1, &op);
        assert!(good(rig.unit.retry(&mut preempt, &b, Waker::noop())), "{cdb:02x?}");
        let conflict = Step::refused(Status::ReservationConflict, None);
        assert_eq!(rig.unit.readmit(&mut write, &a, &mut op, Waker::noop()), Some(conflict), "{cdb:02x?}");
    }
}

/// MODE SELECT (6) parameter lists that turn the write cache off, and that have all writes refused.
const WRITE_THROUGH: [u8; 24] = [0, 0, 0, 0, 8, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const WRITE_PROTECT: [u8; 16] = [0, 0, 0, 0, 10, 10, 0x20, 0x10, 0x08, 0, 0, 0, 0xff, 0xff, 0, 0];

const fn mode_select(list: &[u8]) -> [u8; 6] {
    [0x15, 0x10, 0, 0, list.len() as u8, 0]
}

/// Commands that write block 5: as it is, as itself or as zeroes, or if it is as before.
fn writes() -> [Vec<u8>; 4] {
    [
        cdb10(0x2a, 0, 5, 1).into(),
        cdb16(0x93, 0, 5, 1).into(),
        cdb16(0x93, 0x01, 5, 1).into(),
        compare_and_write(5).into(),
    ]
}

/// Runs a command to its end from a step on. Everything that it writes is to be stable.
#[track_caller]
fn writes_through(rig: &mut Rig, command: &mut Command, mut step: Step, data: &[u8]) {
    rig.ops.clear();
    while let Step::Disk(op) = step {
        let result = rig.disk(command, op, data, &mut []);
        step = rig.unit.step(command, result, &data, &rig.nexus, Waker::noop());
    }
    assert!(good(step), "{step:?}");
    let stable = |op: &Op| matches!(op, Op::Write { fua: true } | Op::WriteZeroes { fua: true, .. });
    let (written, read): (Vec<&Op>, Vec<&Op>) = rig.ops.iter().map(|(op, ..)| op).partition(|op| stable(op));
    assert!(!written.is_empty() && read.iter().all(|op| **op == Op::Read), "{:?}", rig.ops);
}

/// Who turns the cache off has what is in it flushed, and what comes later is in nobody's cache.
#[test]
fn a_write_that_is_put_off_when_the_write_cache_is_turned_off_is_stable_when_it_ends() {
    for cdb in writes() {
        let mut rig = Rig::new(config());
        let (a, b) = (rig.nexus.clone(), rig.other(2));
        let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
        let (mut write, mut op) = suspended(&rig, &a, &cdb, &data);
        rig.run_as(&b, &mode_select(&WRITE_THROUGH), &WRITE_THROUGH, 0).good();
        assert_eq!(rig.ops, [(Op::Flush, 0, 0)]);
        let next = rig.unit.readmit(&mut write, &a, &mut op, Waker::noop());
        writes_through(&mut rig, &mut write, next.unwrap_or(Step::Disk(op)), &data);
    }
}

#[test]
fn a_write_that_waits_when_the_write_cache_is_turned_off_is_stable_when_it_ends() {
    for cdb in writes() {
        let mut rig = Rig::new(config());
        let (a, b) = (rig.nexus.clone(), rig.other(2));
        let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
        let (mut alone, mut write, mut select) = (Command::new(), Command::new(), Command::new());
        assert!(is_disk(begin(&rig, &mut alone, &b, &compare_and_write(5), &data), Op::Read));
        assert_eq!(begin(&rig, &mut write, &a, &cdb, &data), Step::Wait, "{cdb:02x?}");
        assert_eq!(begin(&rig, &mut select, &b, &mode_select(&WRITE_THROUGH), &WRITE_THROUGH), Step::Wait);
        rig.unit.abort(&mut alone);
        assert!(is_disk(rig.unit.retry(&mut select, &b, Waker::noop()), Op::Flush));
        assert!(good(step(&rig, &mut select, &b, &WRITE_THROUGH)));
        let next = rig.unit.retry(&mut write, &a, Waker::noop());
        writes_through(&mut rig, &mut write, next, &data);
    }
}

/// SBC-4, software write protect.
#[test]
fn a_write_that_is_put_off_or_waits_when_all_writes_are_refused_is_refused() {
    let protected = Step::from(Sense::new(Key::DataProtect, Code::WRITE_PROTECTED));
    for cdb in writes() {
        let mut rig = Rig::new(config());
        let (a, b) = (rig.nexus.clone(), rig.other(2));
        let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
        let (mut put_off, mut op) = suspended(&rig, &a, &cdb, &data);
        let (mut alone, mut waits, mut select) = (Command::new(), Command::new(), Command::new());
        assert!(is_disk(begin(&rig, &mut alone, &b, &compare_and_write(5), &data), Op::Read));
        assert_eq!(begin(&rig, &mut waits, &a, &cdb, &data), Step::Wait, "{cdb:02x?}");
        assert_eq!(begin(&rig, &mut select, &b, &mode_select(&WRITE_PROTECT), &WRITE_PROTECT), Step::Wait);
        rig.unit.abort(&mut alone);
        assert!(is_disk(rig.unit.retry(&mut select, &b, Waker::noop()), Op::Flush));
        assert_eq!(rig.unit.retry(&mut waits, &a, Waker::noop()), protected, "{cdb:02x?}");
        assert_eq!(rig.unit.readmit(&mut put_off, &a, &mut op, Waker::noop()), Some(protected), "{cdb:02x?}");
        // What has them refused is not refused itself when its flush is put off.
        rig.unit.suspend(&mut select, 1, &DiskOp::FLUSH);
        assert_eq!(rig.unit.readmit(&mut select, &b, &mut { DiskOp::FLUSH }, Waker::noop()), None);
        assert!(good(step(&rig, &mut select, &b, &WRITE_PROTECT)));
        a.take_attention();
        rig.run(&cdb10(0x28, 0, 5, 1), &[], BLOCK).good();
        assert_eq!(rig.run(&cdb, &data, 0).sense().code, Code::WRITE_PROTECTED, "and nobody is left inside");
    }
}

#[test]
fn a_compare_and_write_that_is_put_off_compares_again() {
    let mut rig = Rig::new(config());
    let data = [rig.blocks(5, 1), &[9; BLOCK]].concat();
    let mut alone = Command::new();
    let nexus = rig.nexus.clone();
    let Step::Disk(read) = begin(&rig, &mut alone, &nexus, &compare_and_write(5), &data) else { panic!("it reads") };
    alone.scratch(&&data[..]).copy_from_slice(&data[..BLOCK]);
    let Step::Disk(write) = step(&rig, &mut alone, &rig.nexus, &data) else { panic!("it writes") };
    rig.unit.suspend(&mut alone, 1, &write);
    // Before it goes on the block becomes another.
    rig.run(&cdb10(0x2a, 0, 5, 1), &[7; BLOCK], 0).good();
    assert_eq!(rig.unit.readmit(&mut alone, &nexus, &mut { write }, Waker::noop()), Some(Step::Disk(read)));
    alone.scratch(&&data[..]).fill(7);
    let Step::Done(done) = step(&rig, &mut alone, &rig.nexus, &data) else { panic!("it is done") };
    assert_eq!(done.sense.map(|sense| sense.key), Some(Key::Miscompare));
}

#[test]
fn read_and_write_need_no_memory() {
    let mut rig = Rig::new(config());
    rig.run(&cdb10(0x28, 0, 0, 8), &[], 8 * BLOCK).good();
    rig.run(&cdb16(0x8a, 0, 0, 8), &[0; 8 * BLOCK], 0).good();
    let Command { response, scratch, extents, .. } = &rig.command;
    assert_eq!((response.capacity(), scratch.capacity(), extents.capacity()), (0, 0, 0));
}

/// A command is recycled whatever became of it, and keeps little memory.
#[test]
fn a_command_does_not_keep_what_only_one_needed() {
    let discard = config().discard.map(|discard| crate::DiscardConfig { max_descriptors: 100, ..discard });
    let mut rig = Rig::new(LunConfig { discard, ..config() });
    rig.run(&cdb10(0x2f, 0, 0, BLOCKS as u16), &[], 0).good();
    let all_opcodes = [0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
    assert!(rig.run(&all_opcodes, &[], 4096).good().len() > KEEP_DATA);
    let ranges = (0..100).flat_map(|lba| [0, 0, 0, 0, 0, 0, 0, lba, 0, 0, 0, 1, 0, 0, 0, 0]);
    let list: Vec<u8> = [0, 0, 6, 64, 0, 0, 0, 0].into_iter().chain(ranges).collect();
    rig.run(&cdb10(0x42, 0, 0, list.len() as u16), &list, 0).good();
    rig.command.recycle();
    let Command { response, scratch, extents, .. } = &rig.command;
    let kept = (response.capacity(), scratch.capacity(), extents.capacity());
    assert!(kept.0 <= KEEP_DATA && kept.1 == 0 && kept.2 <= KEEP_EXTENTS, "{kept:?}");
}

/// The memory of an operation is there for who runs it, and not before: that an initiator has many commands under way
/// takes none.
#[test]
fn memory_is_taken_when_an_operation_runs_and_given_back_when_it_has_ended() {
    let rig = Rig::new(config());
    let block = [7; BLOCK];
    for cdb in [cdb10(0x2f, 0, 0, 256), cdb10(0x2f, 0x06, 0, 256), cdb10(0x41, 0, 0, 256)] {
        let mut command = Command::new();
        let Step::Disk(op) = begin(&rig, &mut command, &rig.nexus, &cdb, &block) else { panic!("{cdb:02x?}") };
        assert_eq!((op.memory, op.len, command.scratch.capacity()), (Memory::Scratch, MAX_SCRATCH, 0));
        command.scratch(&&block[..]).iter_mut().for_each(|byte| *byte = 7);
        // Who runs it may have it elsewhere meanwhile.
        let taken = std::mem::take(command.scratch(&&block[..]));
        assert_eq!(taken.len() as u64, MAX_SCRATCH);
        command.put_scratch(taken);
        let is_next = matches!(step(&rig, &mut command, &rig.nexus, &block), Step::Disk(op) if op.len == MAX_SCRATCH);
        assert!(is_next && command.scratch.capacity() == 0, "{cdb:02x?}");
        command.scratch(&&block[..]);
        rig.unit.abort(&mut command);
        assert_eq!(command.scratch.capacity(), 0);
    }
}

/// Data of which it is known how much is looked at.
struct Counted<'a>(&'a [u8], std::cell::Cell<usize>);

impl DataOut for Counted<'_> {
    fn read_at(&self, at: u64, into: &mut [u8]) {
        self.1.set(self.1.get() + into.len());
        self.0.read_at(at, into);
    }
}

#[test]
fn of_a_parameter_list_no_more_is_read_than_can_mean_something() {
    let rig = Rig::new(config());
    let list = vec![0; 0xffff];
    let parameter_lists = [
        // UNMAP of at most four ranges, and MODE SELECT.
        (cdb10(0x42, 0, 0, 0xffff), 8 + 4 * 16),
        (cdb10(0x55, 0x10, 0, 0xffff), 256),
    ];
    for (cdb, most) in parameter_lists {
        let given = Counted(&list, std::cell::Cell::new(0));
        let (waker, data_out) = (Waker::noop(), list.len() as u64);
        let task = Task { cdb: &cdb, nexus: &rig.nexus, luns: &[], data_in: 0, data_out, lane: 1, waker };
        let step = rig.unit.begin(&mut Command::new(), &task, &given);
        assert!(matches!(step, Step::Done(_)) && given.1.get() <= most, "{step:?} {}", given.1.get());
    }
}

#[test]
#[should_panic(expected = "a command without an operation that is out")]
fn a_step_of_a_command_that_has_nothing_out_is_the_caller_s_mistake() {
    let rig = Rig::new(config());
    let _ = step(&rig, &mut Command::new(), &rig.nexus, &[]);
}

#[test]
#[should_panic(expected = "a command that is not waiting")]
fn to_try_a_command_again_that_does_not_wait_is_the_caller_s_mistake() {
    let rig = Rig::new(config());
    let _ = rig.unit.retry(&mut Command::new(), &rig.nexus, Waker::noop());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Whatever an initiator sends, it ends with a status that its transport can deliver.
    #[test]
    fn any_cdb_with_any_data_ends_with_a_status(
        cdbs in prop::collection::vec(any_cdb(), 1..8),
        out in any_data(),
        room in 0_usize..4096,
        fails in prop::option::of(0_usize..4),
        removable: bool,
    ) {
        let mut rig = Rig::new(LunConfig { removable, ..config() });
        rig.fails = fails.map(|from| (from, Errno::IO));
        for cdb in cdbs {
            let end = rig.try_run(&cdb, &out, room);
            if let Ok(reply) = end {
                prop_assert_eq!(reply.status == Status::CheckCondition, reply.sense.is_some());
                prop_assert!(reply.moved <= room.max(out.len()) as u64);
            }
        }
        // Nobody is left inside: a compare and write would wait for them.
        rig.fails = None;
        rig.unit.reset();
        rig.nexus.set_flags(Flags::NO_WRITE, 0);
        while rig.nexus.take_attention().is_some() {}
        let data = [rig.blocks(0, 1), rig.blocks(0, 1)].concat();
        rig.run(&compare_and_write(0), &data, 0).good();
    }
}

/// Bytes, of which the first ones could be a parameter list.
fn any_data() -> impl Strategy<Value = Vec<u8>> {
    (prop::collection::vec(prop_oneof![3 => Just(0), 1 => 0..40_u8, 1 => any::<u8>()], 0..64), 0_usize..2048).prop_map(
        |(mut data, len)| {
            data.resize(len, 0);
            data
        },
    )
}

/// Bytes, more often than not those of a command that there is.
fn any_cdb() -> impl Strategy<Value = Vec<u8>> {
    let random = prop::collection::vec(any::<u8>(), 0..40);
    let known = (0..crate::cdb::TABLE.len(), any::<[u8; 16]>(), any::<[bool; 16]>()).prop_map(|(i, bytes, small)| {
        let spec = &crate::cdb::TABLE[i];
        let masked = spec.usage.iter().zip(bytes).zip(small);
        // Small numbers, so that some of them fit.
        let mut cdb: Vec<u8> = masked.map(|((mask, byte), small)| if small { 0 } else { byte & mask }).collect();
        cdb[0] = spec.code;
        if let Some(action) = spec.action {
            cdb[1] = action;
        }
        cdb
    });
    prop_oneof![1 => random, 4 => known]
}
