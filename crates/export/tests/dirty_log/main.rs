//! Every page that a device writes is in its front-end's dirty log, and no other: by comparison of all of the guest's
//! memory, of each device, layout and engine.

mod left;
#[path = "../peer/mod.rs"]
mod peer;
mod vm;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use egret_disk::{Aio, Disk, Driver, Locking, Options};
use egret_event_loop::Nanos;
use egret_export::{Address, Export, LogicalUnit, LunConfig};
use egret_virtio::scsi::{LunAddress, ScsiConfig};
use egret_vring::memory::GuestMemory;
use egret_vring::ring::Piece;

use peer::{
    CHECK_DEVICE_STATE, IoThread, NEED_REPLY, SET_DEVICE_STATE_FD, SET_LOG_FD, blk_config, export_config, longs, words,
};
use rustix::event::{EventfdFlags, eventfd};
use vm::*;

const MIB: u64 = 1 << 20;
const DISK: u64 = 4 * MIB;
const FIRST: LunAddress = LunAddress { target: 0, lun: 0 };

/// Each engine, with the page cache and without.
fn disks(image: &Path) -> Vec<(String, Arc<Disk>)> {
    let ways =
        [(Aio::Threads, false), (Aio::Threads, true), (Aio::Native, true), (Aio::IoUring, false), (Aio::IoUring, true)];
    let mut disks = Vec::new();
    for (aio, direct) in ways {
        let file = Driver::File { filename: image.to_owned() };
        let options = Options { aio, direct, locking: Locking::Off, ..Options::new("disk", file) };
        disks.push((format!("aio={aio} direct={direct}"), Arc::new(Disk::open(&options).unwrap())));
    }
    let null = Driver::Null { size: DISK, latency: Nanos::ZERO, read_zeroes: true };
    disks.push(("null".to_owned(), Arc::new(Disk::open(&Options::new("disk", null)).unwrap())));
    disks
}

/// An image of noise.
fn image() -> tempfile::NamedTempFile {
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::write(image.path(), Random(1).bytes(DISK as usize)).unwrap();
    image
}

fn blk(io: &IoThread, disk: Arc<Disk>) -> (UnixStream, Export) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let config = export_config(Address::Fd(theirs.into()));
    (ours, Export::start(config, blk_config(DISK, 2), disk, vec![io.0.clone()]).unwrap())
}

fn scsi(io: &IoThread, disk: Arc<Disk>) -> (UnixStream, Export) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let unit = LunConfig { capacity_bytes: DISK, serial: "first".into(), ..LunConfig::default() };
    let luns = vec![(FIRST, Arc::new(LogicalUnit::new(unit).unwrap()), disk)];
    let device = ScsiConfig { num_queues: 2, queue_size: 128 };
    let config = export_config(Address::Fd(theirs.into()));
    (ours, Export::start_scsi(config, device, luns, vec![io.0.clone()]).unwrap())
}

/// Has a guest for each engine and each kind of rings.
fn everywhere(export: fn(&IoThread, Arc<Disk>) -> (UnixStream, Export), mut test: impl FnMut(&mut Vm, Rings, &Export)) {
    let image = image();
    for (name, disk) in disks(image.path()) {
        for shape in Rings::all() {
            println!("{name} {shape:?}");
            let io = IoThread::start();
            let (ours, export) = export(&io, Arc::clone(&disk));
            test(&mut Vm::boot(ours, shape), shape, &export);
        }
    }
}

/// A chain to be made available: what the device reads, and what it may write.
struct Chain {
    queue: u32,
    header: Vec<u8>,
    data_out: u32,
    writable: Vec<u32>,
}

/// A request of virtio-blk, valid or not.
fn blk_request(random: &mut Random) -> Chain {
    const SECTORS: u64 = DISK / 512;
    let sectors = random.below(40) as u32;
    let (kind, data_out, data_in): (u32, u32, u32) = match random.below(10) {
        0..=4 => (0, 0, 512 * sectors),
        5 => (1, 512 * sectors, 0),
        6 => (4, 0, 0),
        7 => (8, 0, 20),
        // Not a whole number of sectors; a request that there is not.
        8 => (0, 0, 100),
        _ => (77, 0, 512),
    };
    // Some are beyond the end.
    let sector = random.below(SECTORS + 20);
    let header = [u64::from(kind).to_le_bytes(), sector.to_le_bytes()].concat();
    let mut writable = split(random, data_in);
    writable.push(1);
    Chain { queue: random.below(2) as u32, header, data_out, writable }
}

/// A buffer for an event, or one that is too short for any.
fn event_buffer(random: &mut Random) -> Chain {
    Chain { queue: 1, header: Vec::new(), data_out: 0, writable: vec![8 + 8 * random.below(2) as u32] }
}

/// A command, or a function, valid or not.
fn scsi_request(random: &mut Random) -> Chain {
    match [0, 2, 3][random.below(3) as usize] {
        queue @ 0 => {
            let mut header = vec![0; 24];
            (header[4], header[8], header[10], header[16]) = (random.below(9) as u8, 1, 0x40, 9);
            Chain { queue, header, data_out: 0, writable: vec![1] }
        }
        queue => {
            let blocks = random.below(40) as u16;
            let [high, low] = blocks.to_be_bytes();
            let [_, b, c, d] = (random.below(DISK / 512 + 20) as u32).to_be_bytes();
            let (cdb, data_out, data_in): (Vec<u8>, u32, u32) = match random.below(10) {
                0..=4 => (vec![0x28, 0, 0, b, c, d, 0, high, low, 0], 0, 512 * u32::from(blocks)),
                5 => (vec![0x2a, 0, 0, b, c, d, 0, high, low, 0], 512 * u32::from(blocks), 0),
                6 => (vec![0x12, 0, 0, 0, 96, 0], 0, 96),
                7 => (vec![0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], 0, 8),
                8 => (vec![0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0], 0, 256),
                _ => (vec![0xee, 0, 0, 0, 0, 0], 0, 512),
            };
            let mut header = vec![0; 51];
            // Some for a target that is not there.
            let target = if random.below(10) == 0 { 7 } else { 0 };
            header[..4].copy_from_slice(&[1, target, 0x40, 0]);
            header[19..19 + cdb.len()].copy_from_slice(&cdb);
            let mut writable = vec![108];
            writable.extend(split(random, data_in));
            Chain { queue, header, data_out, writable }
        }
    }
}

/// Cuts `len` bytes into one or two buffers.
fn split(random: &mut Random, len: u32) -> Vec<u32> {
    let first = random.below(u64::from(len) + 1) as u32;
    [first, len - first].into_iter().filter(|len| *len > 0).collect()
}

/// Makes chains available, has them served, and compares what has changed with the log.
fn serve(vm: &mut Vm, random: &mut Random, chains: Vec<Chain>, meanwhile: impl FnOnce()) {
    let mut allowed: BTreeSet<u64> = (0..vm.queues()).flat_map(|queue| vm.ring_pages(queue)).collect();
    let mut counts = vec![0; vm.queues() as usize];
    // Buffers lie one behind the other, begin anywhere, and mostly are not aligned as direct I/O wants it.
    let mut at = DATA;
    let mut place = |random: &mut Random, len: u32| {
        at += [0, 1, 512, 3000][random.below(4) as usize];
        let addr = at;
        at += u64::from(len);
        assert!(at <= DATA + DATA_BYTES, "room for all buffers");
        Piece { addr, len }
    };
    for chain in chains {
        let mut readable = Vec::new();
        if !chain.header.is_empty() {
            readable.push(place(random, chain.header.len() as u32));
            vm.write(readable[0].addr, &chain.header);
        }
        if chain.data_out > 0 {
            let piece = place(random, chain.data_out);
            vm.write(piece.addr, &random.bytes(piece.len as usize));
            readable.push(piece);
        }
        let writable: Vec<Piece> = chain.writable.iter().map(|&len| place(random, len)).collect();
        for &Piece { addr, len } in &writable {
            // The device's data is not likely to be the same.
            vm.write(addr, &random.bytes(len as usize));
            allowed.extend(pages(addr..addr + u64::from(len)));
        }
        vm.add(chain.queue, &readable, &writable);
        counts[chain.queue as usize] += 1;
    }
    vm.clear_log();
    let before = vm.pages();
    vm.publish();
    meanwhile();
    for (queue, count) in (0..).zip(counts) {
        vm.reap(queue, count);
    }
    let after = vm.pages();
    vm.sync();
    let logged = read_log(&vm.log);
    let changed: BTreeSet<u64> = after.into_iter().filter(|(at, page)| *page != before[at]).map(|(at, _)| at).collect();
    assert!(!changed.is_empty());
    assert!(changed.is_subset(&logged), "{changed:x?} were written, and {logged:x?} logged");
    assert!(logged.is_subset(&allowed), "{logged:x?} were logged, of {allowed:x?}");
}

/// Reads from the disk without a pause until it is to stop, with requests in flight then. Returns the pages that the driver
/// has written itself.
fn load(rings: &mut [Ring], memory: &GuestMemory, stop: &AtomicBool, mut random: Random) -> BTreeSet<u64> {
    /// A header, a page that is written nowhere else; then what the device writes.
    const EACH: u64 = 0x4000;
    const DEEP: u64 = 5;
    let mut written = BTreeSet::new();
    let mut out = vec![0; rings.len()];
    while !stop.load(Ordering::Relaxed) {
        for (index, ring) in rings.iter_mut().enumerate() {
            let ring_at = ring.driver.queue();
            while ring.driver.reap().unwrap().is_some() {
                out[index] -= 1;
            }
            while out[index] < DEEP {
                // Requests that are out at the same time may have the same buffer: a page with either's data is right.
                let at = DATA + (index as u64 * DEEP + random.below(DEEP)) * EACH;
                let len = 512 * (1 + random.below(20)) as u32;
                assert!(memory.write(at, &[[0; 8], random.below(DISK / 512 - 20).to_le_bytes()].concat()));
                written.extend(pages(at..at + 16));
                let status = Piece { addr: at + EACH - 1, len: 1 };
                ring.driver
                    .add(&[Piece { addr: at, len: 16 }], &[Piece { addr: at + 0x1001, len }, status], 0)
                    .unwrap();
                out[index] += 1;
            }
            written.extend(pages(ring_at.desc..ring_at.desc + 16 * u64::from(ring_at.size)));
            if !ring_at.packed {
                written.extend(pages(ring_at.avail..ring_at.avail + 6 + 2 * u64::from(ring_at.size)));
            }
            ring.publish();
        }
    }
    written
}

#[test]
fn a_guest_that_is_copied_under_load_by_its_log_is_what_it_was_when_its_rings_stopped() {
    everywhere(blk, |vm, _, _| {
        let mut rings = std::mem::take(&mut vm.rings);
        let (memory, stop) = (Arc::clone(&vm.memory), AtomicBool::new(false));
        let copied = std::thread::scope(|scope| {
            let driver = scope.spawn(|| load(&mut rings, &memory, &stop, Random(7)));
            // One that is cancelled.
            vm.start_logging();
            vm.stop_logging();
            vm.start_logging();
            let mut copy = vm.pages();
            for _ in 0..10 {
                let log = vm.set_log();
                copy_pages(vm, &mut copy, read_log(&log));
            }
            stop.store(true, Ordering::Relaxed);
            let by_driver = driver.join().unwrap();
            vm.stop();
            let by_device = read_log(&vm.log);
            copy_pages(vm, &mut copy, by_device);
            copy_pages(vm, &mut copy, by_driver);
            copy
        });
        let differ = vm.pages().into_iter().filter(|(at, page)| *page != copied[at]).map(|(at, _)| at);
        assert_eq!(differ.collect::<Vec<_>>(), [0; 0]);
    });
}

#[test]
fn a_device_whose_rings_run_has_no_state_to_give_and_takes_none() {
    let io = IoThread::start();
    let image = image();
    let (ours, _export) = blk(&io, disks(image.path()).remove(0).1);
    let mut vm = Vm::boot(ours, Rings { packed: false, event_idx: true, size: 16 });
    let (pipe, _reader) = UnixStream::pair().unwrap();
    let ask = |vm: &mut Vm, direction: u32| {
        vm.peer.say(SET_DEVICE_STATE_FD, 0, &words(&[direction, 0]), &[pipe.as_fd()]);
        let (answer, fd) = vm.peer.hear_with().unwrap();
        (answer, fd.map(fs::File::from))
    };
    for direction in [0, 1] {
        let (answer, file) = ask(&mut vm, direction);
        assert_eq!((answer, file.is_none()), (0x101, true), "it failed, and there is no descriptor");
        assert_eq!(vm.peer.ask_u64(CHECK_DEVICE_STATE), 1);
    }
    vm.stop();
    let mut state = Vec::new();
    ask(&mut vm, 0).1.unwrap().read_to_end(&mut state).unwrap();
    assert_eq!(vm.peer.ask_u64(CHECK_DEVICE_STATE), 0);
    for runs in [false, true] {
        ask(&mut vm, 1).1.unwrap().write_all(&state).unwrap();
        if runs {
            vm.start_again(0);
        }
        assert_eq!(vm.peer.ask_u64(CHECK_DEVICE_STATE), u64::from(runs));
    }
}

#[test]
fn a_log_that_is_too_small_ends_the_session_when_a_ring_would_need_it() {
    let shape = Rings { packed: false, event_idx: true, size: 16 };
    let io = IoThread::start();
    let image = image();
    let boot = |shape| {
        let (ours, export) = blk(&io, disks(image.path()).remove(0).1);
        (Vm::boot(ours, shape), export)
    };
    // One page less than there are; then the log is of no use to anybody.
    assert!(boot(shape).0.hand_over_log(LOG_BYTES - 1).is_none());
    // A used ring of so many bytes.
    let (packed, end) = (Rings { packed: true, ..shape }, 8 * 4096 * LOG_BYTES);
    for (shape, len) in [(shape, 6 + 8 * 16), (packed, 4)] {
        for (at, is_within) in
            [(end - 4096, true), (end - len, true), (end - len + 1, false), (end - 1, false), (u64::MAX, false)]
        {
            let (mut vm, _export) = boot(shape);
            assert_eq!(vm.logs_ring_at(at).is_some(), is_within, "{shape:?} at {at:#x}");
        }
    }
}

#[test]
fn a_log_is_signalled_when_it_has_changed_and_not_where_nothing_is_logged() {
    let io = IoThread::start();
    let image = image();
    for packed in [false, true] {
        let (ours, _export) = blk(&io, disks(image.path()).remove(0).1);
        let mut vm = Vm::boot(ours, Rings { packed, event_idx: true, size: 16 });
        let signal = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        vm.peer.say(SET_LOG_FD, NEED_REPLY, &[], &[signal.as_fd()]);
        assert_eq!(vm.peer.hear(), Some(longs(&[0])));
        let is_signalled = |vm: &mut Vm| {
            // Whatever came before is nothing to this.
            let _ = rustix::io::read(&signal, &mut [0; 8]);
            vm.write(DATA, &[0; 16]);
            let (data, status) = (Piece { addr: DATA + 512, len: 512 }, Piece { addr: DATA + 16, len: 1 });
            vm.add(0, &[Piece { addr: DATA, len: 16 }], &[data, status]);
            vm.publish();
            vm.reap(0, 1);
            vm.sync();
            rustix::io::read(&signal, &mut [0; 8]).is_ok()
        };
        assert!(!is_signalled(&mut vm), "packed: {packed}");
        vm.start_logging();
        assert!(is_signalled(&mut vm), "packed: {packed}");
        vm.stop_logging();
        assert!(!is_signalled(&mut vm), "packed: {packed}");
    }
}

/// Copies pages once more.
fn copy_pages(vm: &Vm, copy: &mut BTreeMap<u64, Vec<u8>>, which: BTreeSet<u64>) {
    copy.extend(vm.pages().into_iter().filter(|(at, _)| which.contains(at)));
}

#[test]
fn every_page_that_a_disk_of_virtio_blk_writes_is_logged_and_no_other() {
    everywhere(blk, |vm, shape, _| {
        vm.start_logging();
        let mut random = Random(u64::from(shape.size));
        for _ in 0..20 {
            let chains = (0..3).map(|_| blk_request(&mut random)).collect();
            serve(vm, &mut random, chains, || ());
        }
    });
}

#[test]
fn every_page_that_a_disk_of_virtio_scsi_writes_is_logged_and_no_other() {
    everywhere(scsi, |vm, shape, export| {
        vm.start_logging();
        let mut random = Random(u64::from(shape.size));
        for round in 0..20 {
            let mut chains: Vec<Chain> = (0..3).map(|_| scsi_request(&mut random)).collect();
            chains.push(event_buffer(&mut random));
            serve(vm, &mut random, chains, || {
                assert!(export.resize_lun(FIRST, DISK - 512 * ((round + 1) % 2)).unwrap());
            });
        }
    });
}
