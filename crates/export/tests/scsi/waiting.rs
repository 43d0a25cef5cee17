//! Functions and commands that wait for what another I/O thread runs: nobody polls for them, so one that nobody wakes is
//! never answered, and its test ends when the driver's patience does.

use std::sync::Arc;

use egret_disk::Disk;
use egret_event_loop::Nanos;
use egret_export::Export;
use egret_virtio::scsi::LunAddress;
use egret_vring::ring::Piece;

use crate::machine::*;
use crate::peer::gate::Gate;
use crate::peer::{GET_VRING_BASE, IoThread, await_that, words};

/// The second request queue, which is on the second thread; control and the first are on the first.
pub const ELSEWHERE: u32 = REQUESTS + 1;

fn two_queues(io: &[IoThread; 2], disk: Arc<Disk>) -> (Machine, Export) {
    queues(io, 2, disk)
}

fn queues(io: &[IoThread; 2], count: u16, disk: Arc<Disk>) -> (Machine, Export) {
    let (ours, export) = listening_on(&[&io[0], &io[1]], count, disk);
    let mut machine = Machine::boot(ours, Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    (machine, export)
}

pub fn two_threads() -> [IoThread; 2] {
    [IoThread::start(), IoThread::start()]
}

/// A command that no other has a part of memory in common with, of those that are under way.
pub struct Sent<'a> {
    pub queue: u32,
    pub place: u64,
    pub at: LunAddress,
    pub cdb: &'a [u8],
    pub data_out: u32,
    pub data_in: u32,
}

pub fn send(machine: &mut Machine, sent: &Sent<'_>) {
    let (readable, writable) = written(machine, sent);
    machine.offer(sent.queue, &readable, &writable);
}

/// What the device reads of a command, and what it writes; it is in memory, and not offered yet.
pub fn written(machine: &Machine, sent: &Sent<'_>) -> (Vec<Piece>, Vec<Piece>) {
    let Sent { queue, place, at, cdb, data_out, data_in } = *sent;
    let header = DATA + 0x1_0000 * u64::from(queue) + 0x1000 * place;
    let mut bytes = [0; 51];
    let [high, low] = at.lun.to_be_bytes();
    bytes[..4].copy_from_slice(&[1, at.target, 0x40 | high, low]);
    bytes[8] = 9;
    bytes[19..19 + cdb.len()].copy_from_slice(cdb);
    assert!(machine.memory.write(header, &bytes));
    // The data is all zeroes, as is the disk.
    let data = |len: u32| Some(Piece { addr: header + 0x200, len }).filter(|piece| piece.len > 0);
    let readable = [Piece { addr: header, len: 51 }].into_iter().chain(data(data_out)).collect();
    let writable = [Piece { addr: header + 0x80, len: 108 }].into_iter().chain(data(data_in)).collect();
    (readable, writable)
}

pub fn response(machine: &Machine, queue: u32, place: u64) -> u8 {
    machine.read::<12>(DATA + 0x1_0000 * u64::from(queue) + 0x1000 * place + 0x80)[11]
}

fn read(queue: u32) -> Sent<'static> {
    Sent { queue, place: 0, at: FIRST, cdb: &[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], data_out: 0, data_in: 512 }
}

pub fn ask(machine: &mut Machine, function: u8) -> u8 {
    machine.manage(function);
    machine.managed()
}

/// Waits until the function that was sent waits for the command that it ends, which is with a disk.
pub fn await_waiting(machine: &mut Machine, export: &Export) {
    await_that("the function to be taken in", || export.queues()[CONTROL as usize].in_flight.get() == 1);
    // A queue looks at one after another.
    assert_eq!(ask(machine, QUERY_TASK), 10);
}

/// Has a function wait for the command that it ends.
pub fn manage_to_wait(machine: &mut Machine, export: &Export, function: u8) {
    machine.manage(function);
    await_waiting(machine, export);
}

#[test]
fn a_function_is_answered_after_a_command_of_another_thread_that_it_ends() {
    let io = two_threads();
    for (function, ended) in [(ABORT_TASK, 2), (UNIT_RESET, 4)] {
        let gate = Gate::new();
        let (mut machine, export) = two_queues(&io, gate.disk());
        send(&mut machine, &read(ELSEWHERE));
        gate.await_kept(1);
        manage_to_wait(&mut machine, &export, function);
        gate.open();
        assert_eq!(machine.managed(), 0);
        assert!(machine.rings[ELSEWHERE as usize].driver.has_used(), "the command comes first");
        machine.reap(ELSEWHERE);
        assert_eq!(response(&machine, ELSEWHERE, 0), ended);
        assert_eq!(ask(&mut machine, QUERY_TASK_SET), 0);
    }
}

#[test]
fn functions_that_come_at_once_are_all_answered_whatever_a_queue_looks_at_in_a_turn() {
    let io = two_threads();
    let (mut machine, _export) = two_queues(&io, disk(Nanos::ZERO));
    let mut request = [0; 24];
    (request[4], request[8], request[10]) = (QUERY_TASK_SET, 1, 0x40);
    assert!(machine.memory.write(DATA, &request));
    for _ in 0..20 {
        let ring = &mut machine.rings[CONTROL as usize];
        for at in 0..8 {
            let answer = Piece { addr: DATA + 0x100 + at, len: 1 };
            ring.driver.add(&[Piece { addr: DATA, len: 24 }], &[answer], at).unwrap();
        }
        ring.driver.publish();
        ring.kick();
        for _ in 0..8 {
            assert_eq!(machine.reap(CONTROL).written, 1);
        }
    }
}

#[test]
fn a_queue_that_stops_breaks_or_is_left_behind_leaves_no_function_waiting() {
    let io = two_threads();
    type End = fn(&mut Machine);
    let ends: [End; 3] = [
        // It drains, which takes until the command that the function waits for has ended.
        |machine| machine.peer.say(GET_VRING_BASE, 0, &words(&[ELSEWHERE, 0]), &[]),
        // A request without a header.
        |machine| machine.offer(ELSEWHERE, &[Piece { addr: DATA, len: 1 }], &[Piece { addr: DATA, len: 108 }]),
        |_| {},
    ];
    for (at, end) in ends.iter().enumerate() {
        let gate = Gate::new();
        let (mut machine, export) = two_queues(&io, gate.disk());
        send(&mut machine, &read(ELSEWHERE));
        gate.await_kept(1);
        manage_to_wait(&mut machine, &export, ABORT_TASK);
        end(&mut machine);
        gate.open_later();
        if at == 2 {
            // Control is stopped first, and waits for the function, which waits for the other queue.
            drop(machine);
            drop(export);
            continue;
        }
        assert_eq!(machine.managed(), 0);
        if at == 0 {
            assert!(machine.peer.hear().is_some(), "the queue stops");
        }
        // It goes on without that queue.
        assert_eq!(ask(&mut machine, QUERY_TASK_SET), 0);
        assert_eq!(machine.command(FIRST, &READ, 4096), GOOD);
    }
}

#[test]
fn a_write_of_one_thread_goes_on_when_a_compare_and_write_of_another_has_ended() {
    let io = two_threads();
    let (mut machine, _export) = two_queues(&io, disk(Nanos::from_millis(5)));
    let compare_and_write = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    for _ in 0..20 {
        let alone = |queue| Sent { queue, place: 1, at: FIRST, cdb: &compare_and_write, data_out: 1024, data_in: 0 };
        let over = |queue| Sent { queue, place: 2, at: FIRST, cdb: &write, data_out: 512, data_in: 0 };
        for queue in [REQUESTS, ELSEWHERE] {
            send(&mut machine, &alone(queue));
            send(&mut machine, &over(queue));
        }
        for queue in [REQUESTS, ELSEWHERE] {
            machine.reap(queue);
            machine.reap(queue);
            assert_eq!([1, 2].map(|place| response(&machine, queue, place)), [0, 0]);
        }
    }
}

/// Everything that waits, at once, on queues that move, with units that come and go.
#[test]
fn whatever_waits_for_whatever_else_all_of_it_is_answered() {
    const ROUNDS: u64 = 300;
    let io = two_threads();
    let loops = [io[0].0.clone(), io[1].0.clone()];
    // So many that each has room for one long operation.
    let (mut machine, export) = queues(&io, 12, disk(Nanos::from_micros(20)));
    let compare_and_write = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    let write = [0x2a, 0, 0, 0, 0, 0, 0, 0, 2, 0];
    let verify = [0x2f, 0, 0, 0, 0, 0, 0, 4, 0, 0];
    let commands: [(&[u8], u32, u32); 5] =
        [(&write, 1024, 0), (&compare_and_write, 1024, 0), (&verify, 0, 0), (&write, 1024, 0), (&verify, 0, 0)];
    let functions = [ABORT_TASK_SET, QUERY_TASK_SET, UNIT_RESET, ABORT_TASK];
    for round in 0..ROUNDS {
        for (place, (cdb, data_out, data_in)) in (0..).zip(commands) {
            for queue in [REQUESTS, ELSEWHERE] {
                let at = if (place + round) % 4 == 0 { LATE } else { FIRST };
                send(&mut machine, &Sent { queue, place, at, cdb, data_out, data_in });
            }
            if place == round % 5 {
                machine.manage(functions[(round / 5) as usize % functions.len()]);
            }
        }
        match round % 16 {
            3 => add_late(&export, disk(Nanos::from_micros(20))).unwrap(),
            7 => drop(export.run_on(&[loops[1].clone(), loops[0].clone()]).unwrap()),
            11 => drop(export.remove_lun(LATE).unwrap()),
            15 => drop(export.run_on(&loops).unwrap()),
            _ => {}
        }
        assert!([0, 10].contains(&machine.managed()));
        for queue in [REQUESTS, ELSEWHERE] {
            for _ in commands {
                machine.reap(queue);
            }
        }
    }
}
