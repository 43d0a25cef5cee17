//! Rings that stop and leave requests to the record of what is in flight, which moves along.

use egret_disk::{Limit, Limits, Rates, ThrottleGroup};
use egret_vring::memory::Region;
use egret_vring::ring::{Inflight, InflightConfig};
use egret_vring::vhost_user::protocol_feature;

use super::*;
use crate::peer::{
    GET_PROTOCOL_FEATURES, GET_VRING_BASE, GET_VRING_BASE_SKIP_DRAIN, SET_PROTOCOL_FEATURES, await_that, longs, words,
};

const READS: u64 = 5;

/// Lets one read through at once, and the next in hours.
fn limit(disk: &Disk) {
    let limit = Limit { average: 1, burst: 512, burst_seconds: 1 };
    let limits = Limits { bytes: Rates { total: limit, ..Rates::default() }, ..Limits::default() };
    disk.set_throttle_group(Some(&ThrottleGroup::new("g", limits)));
}

/// How a ring is stopped, and whether it leaves requests then.
fn check(shape: Rings, recorded: bool, dropped: u64, request: u32, leaves: bool) {
    let io = IoThread::start();
    let image = image();
    let disk = disks(image.path()).swap_remove(3).1;
    limit(&disk);
    let (ours, export) = blk(&io, Arc::clone(&disk));
    let config = InflightConfig { queues: 2, queue_size: shape.size, packed: shape.packed };
    let record = Region::anonymous(0, config.bytes()).unwrap();
    let mut vm = Vm::boot_recorded(ours, shape, recorded.then_some(&record));
    let features = vm.peer.ask_u64(GET_PROTOCOL_FEATURES) & !dropped;
    assert_eq!(vm.peer.order(SET_PROTOCOL_FEATURES, &longs(&[features])), Some(0));
    vm.start_logging();
    for read in 0..READS {
        let at = DATA + read * 0x1000;
        vm.write(at, &[[0; 8], read.to_le_bytes()].concat());
        let (data, status) = (Piece { addr: at + 512, len: 512 }, Piece { addr: at + 16, len: 1 });
        vm.add(0, &[Piece { addr: at, len: 16 }], &[data, status]);
    }
    vm.publish();
    await_that("the reads to be taken in", || export.stats().in_flight >= READS - 2);
    let answer = vm.peer.ask(request, &words(&[0, 0])).unwrap();
    assert_eq!(answer[..4], 0u32.to_ne_bytes());
    let is_busy = recorded && {
        let inflight = Inflight::map(&record.file, 0, record.size, config).unwrap();
        inflight.queue(0).unwrap().is_busy()
    };
    assert_eq!((is_busy, export.stats().in_flight), (leaves, 0), "{shape:?} {request}");
    if leaves {
        vm.clear_log();
        vm.sync();
        // The other ring runs.
        assert!(read_log(&vm.log).is_subset(&vm.ring_pages(1)), "nothing is written any more");
        disk.set_throttle_group(None);
        vm.start_again(0);
    }
    vm.reap(0, READS as usize);
    let noise = Random(1).bytes(512 * READS as usize);
    for (read, sector) in noise.chunks(512).enumerate() {
        let mut bytes = [0; 512];
        assert!(vm.memory.read(DATA + read as u64 * 0x1000 + 512, &mut bytes));
        assert!(bytes == *sector, "read {read}, {shape:?} {request}");
    }
}

#[test]
fn a_ring_that_need_not_be_drained_leaves_what_waits_for_limits_to_the_record() {
    for shape in Rings::all() {
        check(shape, true, 0, GET_VRING_BASE_SKIP_DRAIN, true);
        // The feature alone, as QEMU had it first.
        check(shape, true, protocol_feature::GET_VRING_BASE_SKIP_DRAIN, GET_VRING_BASE, true);
    }
}

#[test]
fn a_ring_that_is_drained_or_has_no_record_leaves_nothing() {
    for shape in Rings::all() {
        check(shape, true, 0, GET_VRING_BASE, false);
        check(shape, false, 0, GET_VRING_BASE_SKIP_DRAIN, false);
    }
}

#[test]
fn a_ring_that_waits_for_its_disk_alone_lets_its_thread_sleep() {
    for shape in Rings::all() {
        let io = IoThread::start();
        let driver = Driver::Null { size: DISK, latency: Nanos::from_millis(1000), read_zeroes: true };
        let (ours, export) = blk(&io, Arc::new(Disk::open(&Options::new("slow", driver)).unwrap()));
        let config = InflightConfig { queues: 2, queue_size: shape.size, packed: shape.packed };
        let record = Region::anonymous(0, config.bytes()).unwrap();
        let mut vm = Vm::boot_recorded(ours, shape, Some(&record));
        vm.start_logging();
        vm.write(DATA, &[0; 16]);
        let (data, status) = (Piece { addr: DATA + 512, len: 512 }, Piece { addr: DATA + 16, len: 1 });
        vm.add(0, &[Piece { addr: DATA, len: 16 }], &[data, status]);
        vm.publish();
        // Where it has ended by then, this shows nothing.
        await_that("the read to be taken in", || export.stats().in_flight > 0 || vm.rings[0].driver.has_used());
        let before = io.0.counters().turns.get();
        vm.peer.ask(GET_VRING_BASE_SKIP_DRAIN, &words(&[0, 0])).unwrap();
        let turns = io.0.counters().turns.get() - before;
        assert!(turns < 100, "{turns} turns, {shape:?}");
        vm.reap(0, 1);
    }
}
