//! What one queue may make of a turn of its loop, and of its sleep.

use std::os::fd::AsFd;

use egret_event_loop::Nanos;
use egret_vring::ring::Piece;

use crate::machine::*;
use crate::peer::gate::Gate;
use crate::peer::{IoThread, SET_VRING_CALL, SET_VRING_ENABLE, SET_VRING_KICK, await_that, longs, words};
use crate::waiting::manage_to_wait;

/// Makes the last command available four times more, all at once, with a mebibyte of data each. Kicks nobody.
fn repeat_with_a_mebibyte(machine: &mut Machine) {
    let pieces = [(0x800, 108), (0x1000, 0xF_0000), (0x1000, 0x2_0000)];
    let pieces = pieces.map(|(at, len)| Piece { addr: DATA + at, len });
    let ring = &mut machine.rings[REQUESTS as usize];
    for _ in 0..4 {
        ring.driver.add(&[Piece { addr: DATA, len: 51 }], &pieces, 0).unwrap();
    }
    ring.driver.publish();
}

#[test]
fn chains_of_a_mebibyte_are_taken_in_one_a_turn_however_many_are_there() {
    let io = IoThread::start();
    for layout in [Layout::Split, Layout::Packed] {
        let (mut machine, _export) = started_with(&io, disk(Nanos::ZERO), layout);
        assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
        machine.command(FIRST, &READ, 4096);
        let turns = || io.0.counters().turns.get();
        let before = turns();
        repeat_with_a_mebibyte(&mut machine);
        machine.rings[REQUESTS as usize].kick();
        for _ in 0..4 {
            machine.answer();
        }
        // A turn counts before what it takes in is used.
        assert!(turns() - before >= 4, "{layout:?}: {} turns", turns() - before);
    }
}

#[test]
fn a_reset_ends_commands_that_were_available_before_it_and_took_more_than_a_turn_to_take_in() {
    let io = IoThread::start();
    for layout in [Layout::Split, Layout::Packed] {
        let gate = Gate::new();
        gate.open();
        let (mut machine, export) = started_with(&io, gate.disk(), layout);
        assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
        machine.command(FIRST, &READ, 4096);
        gate.shut();
        repeat_with_a_mebibyte(&mut machine);
        manage_to_wait(&mut machine, &export, UNIT_RESET);
        gate.open();
        assert_eq!(machine.managed(), 0);
        for _ in 0..4 {
            assert!(machine.rings[REQUESTS as usize].driver.has_used(), "{layout:?}: its commands come first");
            assert_eq!(machine.answer(), (4, 0, 0), "{layout:?}: ended by the reset");
        }
    }
}

#[test]
fn a_queue_without_a_kick_is_served_and_lets_its_thread_sleep() {
    let io = IoThread::start();
    for layout in [Layout::Split, Layout::Packed] {
        let (ours, _export) = listening(&io, disk(Nanos::ZERO));
        let mut machine = Machine::new(ours, layout);
        machine.start_rings();
        let unkicked = longs(&[u64::from(REQUESTS) | 1 << 8]);
        machine.peer.say(SET_VRING_KICK, 0, &unkicked, &[]);
        assert_eq!(machine.peer.order(SET_VRING_ENABLE, &words(&[REQUESTS, 1])), Some(0));
        for round in 0..20 {
            let expected = if round == 0 { POWER_ON } else { GOOD };
            assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), expected);
            let blocks = io.0.counters().blocks.get();
            await_that("the thread to sleep", || io.0.counters().blocks.get() >= blocks + 3);
        }
    }
}

#[test]
fn a_driver_that_fills_its_call_descriptor_is_not_waited_for() {
    let io = IoThread::start();
    for layout in [Layout::Split, Layout::Packed] {
        let (mut machine, _export) = started_with(&io, disk(Nanos::ZERO), layout);
        assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
        // A write to it would sleep from here on, and O_NONBLOCK is the driver's to clear.
        let full = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        machine.peer.say(SET_VRING_CALL, 0, &longs(&[REQUESTS.into()]), &[full.as_fd()]);
        for _ in 0..3 {
            machine.send(FIRST, &TEST_UNIT_READY, 0);
            await_that("an answer", || machine.rings[REQUESTS as usize].driver.has_used());
            assert_eq!(machine.answer(), GOOD);
        }
        // The loop is there for others.
        let (mut other, _export) = started_with(&io, disk(Nanos::ZERO), layout);
        assert_eq!(other.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    }
}
