//! Units whose limits have no room for what was asked of them: what their rings do when they stop, and afterwards.
//!
//! The limits are so low that what waits for them waits for longer than any test, unless something else lets it go.

use std::os::fd::AsFd;
use std::sync::Arc;

use egret_disk::{Disk, Driver, Limit, Limits, Options, Rates, ThrottleGroup};
use egret_event_loop::Nanos;
use egret_export::Export;
use egret_virtio::scsi::LunAddress;
use egret_vring::memory::Region;

use crate::machine::*;
use crate::peer::{ADD_MEM_REG, IoThread, NEED_REPLY, SET_VRING_ENABLE, await_that, longs, words};
use crate::waiting::{Sent, response, written};

const BLOCK: u64 = 512;
const READ_BLOCK: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
/// As many as a ring has room for, beside one of another unit.
const READS: u64 = 4;

/// A disk that is locked while rings run, and may do a block at once and then a byte a second.
fn limited() -> Arc<Disk> {
    let driver = Driver::Null { size: 64 * MIB, latency: Nanos::ZERO, read_zeroes: true };
    let disk = Arc::new(Disk::open(&Options { allow_inactive: true, ..Options::new("limited", driver) }).unwrap());
    let total = Limit { average: 1, burst: BLOCK, burst_seconds: 1 };
    let limits = Limits { bytes: Rates { total, ..Rates::default() }, ..Limits::default() };
    disk.set_throttle_group(Some(&ThrottleGroup::new("g", limits)));
    disk
}

/// What a front-end does when memory is plugged in.
fn plug_memory(machine: &mut Machine, at: u64) {
    let plugged = Region::anonymous(0, MIB).unwrap();
    let row = longs(&[0, at << 30, MIB, at << 30, 0]);
    machine.peer.say(ADD_MEM_REG, NEED_REPLY, &row, &[plugged.file.as_fd()]);
    assert_eq!(machine.peer.hear(), Some(longs(&[0])));
}

/// Has a queue take reads in.
fn read(machine: &mut Machine, export: &Export, at: LunAddress) {
    for place in 0..READS {
        let sent = Sent { queue: REQUESTS, place, at, cdb: &READ_BLOCK, data_out: 0, data_in: BLOCK as u32 };
        let (readable, writable) = written(machine, &sent);
        machine.rings[REQUESTS as usize].driver.add(&readable, &writable, 0).unwrap();
    }
    let ring = &mut machine.rings[REQUESTS as usize];
    // All at once, and so they are in one turn.
    if ring.driver.publish() {
        ring.kick();
    }
    await_that("reads to wait", || export.stats().in_flight > 0);
}

fn reap(machine: &mut Machine) {
    for place in 0..READS {
        machine.reap(REQUESTS);
        assert_eq!(response(machine, REQUESTS, place), 0);
    }
}

/// Memory is plugged in again and again, and what waits goes each time, until the rings do not start again at once.
fn plug_memory_until_rings_wait(machine: &mut Machine, export: &Export) {
    for at in 1..=3 {
        read(machine, export, FIRST);
        plug_memory(machine, at);
        reap(machine);
        if !export.has_running_queues() {
            return;
        }
    }
    panic!("what is let go each time is more than the limits");
}

#[test]
fn a_disk_is_left_to_others_when_rings_are_disabled_that_wait_to_start() {
    let io = IoThread::start();
    let (mut machine, export) = started_with(&io, limited(), Layout::Split);
    assert_eq!(machine.command(FIRST, &TEST_UNIT_READY, 0), POWER_ON);
    plug_memory_until_rings_wait(&mut machine, &export);
    for queue in [CONTROL, EVENTS, REQUESTS] {
        assert!(export.has_active_disks(), "one is to run as soon as it may");
        assert_eq!(machine.peer.order(SET_VRING_ENABLE, &words(&[queue, 0])), Some(0));
    }
    assert!(!export.has_active_disks());
}
