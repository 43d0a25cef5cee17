//! Requests that would hold up the loop, or other disks, in an engine: workers run them, and what is large in parts.

use std::cell::RefCell;
use std::rc::Rc;

use proptest::prelude::*;

use super::*;
use crate::blocking::PART;
use crate::{DetectZeroes, Discard};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

/// Requests that the disk's engine has taken, and those that workers ran in its stead.
fn taken(rig: &Rig) -> (u64, u64) {
    let counted = rig.engines.counters().read();
    (rig.requests_of(rig.disk.options().aio.as_str()), counted.fallbacks + counted.bounced)
}

fn is_threads(rig: &Rig) -> bool {
    rig.disk.options().aio == Aio::Threads
}

#[test]
fn what_is_large_is_for_workers_whatever_the_engine() {
    everywhere(8 * MIB, |rig| {
        let data = pattern((PART + BLOCK) as usize, 1);
        assert_eq!(rig.write(BLOCK, &data[..PART as usize]), Ok(()));
        assert!(rig.read(BLOCK, PART as usize) == data[..PART as usize]);
        assert_eq!(taken(rig), (2, 0), "as much as an engine may have at a time");
        assert_eq!(rig.write(BLOCK, &data), Ok(()));
        assert!(rig.read(BLOCK, data.len()) == data);
        assert_eq!(taken(rig), if is_threads(rig) { (4, 0) } else { (2, 2) });
    });
}

/// What the kernel copies holds up the loop, so each disk's requests are copied a part a turn where there are several disks.
#[test]
fn a_cached_read_that_is_large_does_not_hold_up_another_disk() {
    let data = pattern(PART as usize + 512, 5);
    let image = Image::beside_the_build(&data);
    let another = Image::beside_the_build(&vec![0; MIB as usize]);
    if !super::cached::reads_without_waiting(&image.path) {
        return;
    }
    let null = Driver::Null { size: MIB, latency: Nanos::ZERO, read_zeroes: false };
    // What counts is that it has the same thread, and not the same engine.
    for other in [Options { aio: Aio::IoUring, ..another.options() }, Options::new("null", null)] {
        let Ok(ring) = Ring::new() else { return egret_needs::this_test_lacks("io_uring") };
        let ring = EngineOptions { ring: Some(Rc::new(RefCell::new(ring))), ..EngineOptions::default() };
        let mut rig = Rig::with(&Options { aio: Aio::IoUring, ..image.options() }, ring);
        let other = rig.engines.attach(&Arc::new(Disk::open(&other).unwrap())).unwrap();
        let pieces = || Memory::pieces(&[PART as usize - 512, 512], 0);
        let large: Vec<u64> = (0..4).map(|_| rig.push_read(512, pieces())).collect();
        rig.slot = other;
        let small = rig.push_read(0, Memory::new(4096, 0));
        let mut ended = Vec::new();
        while rig.engines.in_flight() > 0 {
            rig.turn();
            let new = rig.done.keys().copied().filter(|token| !ended.contains(token));
            ended.extend(new.collect::<Vec<_>>());
        }
        assert_eq!(ended, [vec![small], large].concat(), "one after the other, and none with the small one");
        assert_eq!(rig.engines.deadline(), None, "nothing is left to be copied");
        for token in &ended[1..] {
            let (result, memory) = rig.finish(*token);
            assert_eq!(result, Ok(()));
            assert!(memory.unwrap().data() == &data[512..]);
        }
    }
}

#[test]
fn all_that_comes_at_once_begins_at_once_unless_the_kernel_copies_it_while_another_disk_may_wait() {
    let null = Options::new("null", Driver::Null { size: MIB, latency: Nanos::ZERO, read_zeroes: false });
    let null = Arc::new(Disk::open(&null).unwrap());
    everywhere(8 * MIB, |rig| {
        let begun = clock::now();
        for is_alone in [true, false] {
            if !is_alone {
                rig.engines.attach(&null).unwrap();
            }
            for at in 0..4 {
                rig.push_read(at * PART, Memory::new(PART as usize, 0));
            }
            rig.engines.submit(clock::now());
            let copies = rig.disk.options().aio == Aio::IoUring && !rig.disk.options().direct;
            assert_eq!(rig.engines.deadline().is_some(), copies && !is_alone, "alone: {is_alone}");
            rig.settle();
            let engines = rig.engines.counters().read().engines;
            assert!(engines.iter().all(|engine| engine.submitting <= clock::now() - begun), "{engines:?}");
        }
    });
}

#[test]
fn a_flush_is_for_workers_whatever_the_engine() {
    everywhere(MIB, |rig| {
        assert_eq!(rig.run(Op::Flush, 0, 0), Ok(()));
        assert_eq!(taken(rig), if is_threads(rig) { (1, 0) } else { (0, 1) });
    });
}

#[test]
fn a_large_write_is_on_stable_storage_if_it_asked_for_it() {
    let test = |rig: &mut Rig, is_stable: &dyn Fn() -> bool| {
        for write_through in [true, false] {
            rig.disk.able.write_through.fetch_and(write_through, std::sync::atomic::Ordering::Relaxed);
            let data = pattern((2 * PART + BLOCK) as usize, 2);
            for (offset, shift) in [(BLOCK, 0), (512, 1)] {
                let memory = Memory::new(data.len(), shift).filled(&data);
                let token = rig.push(Op::Write { fua: true }, offset, data.len() as u64, Some(memory));
                assert_eq!(rig.finish(token).0, Ok(()));
                assert!(is_stable());
                assert!(rig.read(offset, data.len()) == data);
            }
        }
    };
    everywhere_and_stably(8 * MIB, |_| {}, test);
}

#[test]
fn a_large_read_past_the_end_of_an_image_that_shrank_fails() {
    let image = Image::new(8 * MIB);
    let data = pattern(8 * MIB as usize, 3);
    for (name, options, shared) in ways(&image.options()) {
        println!("{name}");
        std::fs::write(&image.path, &data).unwrap();
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
        let end = 3 * MIB as usize + 5000;
        File::options().write(true).open(&image.path).unwrap().set_len(end as u64).unwrap();
        let read = rig.push_read(BLOCK, Memory::new(data.len() - BLOCK as usize, 0));
        assert_eq!(rig.finish(read).0, Err(Errno::IO));
    }
}

#[test]
fn a_large_write_past_the_end_of_a_device_that_shrank_fails_once() {
    let Some(device) = LoopDevice::new(8 * MIB, 512) else { return };
    for (name, options, shared) in ways(&device.options()) {
        println!("{name}");
        device.resize(8 * MIB);
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
        device.resize(5 * MIB);
        let data = pattern(7 * MIB as usize, 4);
        assert_eq!(rig.write(0, &data), Err(Errno::IO));
        assert_eq!(rig.failed.len(), 1);
        assert!(rig.read(0, 5 * MIB as usize) == data[..5 * MIB as usize]);
    }
}

#[test]
fn a_null_disk_fills_what_is_large_on_a_worker() {
    let options = Options::new("null0", Driver::Null { size: 1 << 30, latency: Nanos::ZERO, read_zeroes: true });
    let mut rig = Rig::new(&options);
    assert!(rig.read(0, PART as usize).iter().all(|&b| b == 0));
    assert_eq!(rig.requests_of("threads"), 0);
    assert!(rig.read(512, 2 * PART as usize + 512).iter().all(|&b| b == 0));
    assert_eq!(rig.requests_of("threads"), 1);
    assert_eq!(rig.write(0, &pattern(2 * PART as usize, 1)), Ok(()));
    assert_eq!(rig.requests_of("null"), 2);
}

#[test]
fn the_loop_looks_for_zeroes_in_the_beginning_of_a_write_only() {
    const LOOKED_AT: usize = 64 << 10;
    let on = |options: &mut Options| options.detect_zeroes = DetectZeroes::On;
    everywhere_with(MIB, on, |rig| {
        for (at, by_workers) in [(0, 0), (LOOKED_AT - 1, 0), (LOOKED_AT, 1), (2 * LOOKED_AT - 1, 2)] {
            assert_eq!(rig.write(0, &pattern(2 * LOOKED_AT, 5)), Ok(()));
            let mut data = vec![0; 2 * LOOKED_AT];
            data[at] = 1;
            assert_eq!(rig.write(0, &data), Ok(()));
            assert!(rig.read(0, data.len()) == data, "{at}");
            if !is_threads(rig) {
                assert_eq!(taken(rig).1, by_workers, "{at}");
            }
        }
    });
}

#[test]
fn zeroes_are_found_in_the_parts_of_a_large_write() {
    let image = Image::new(8 * MIB);
    for (name, mut options, shared) in ways(&image.options()) {
        println!("{name}");
        (options.discard, options.detect_zeroes) = (Discard::Unmap, DetectZeroes::Unmap);
        std::fs::write(&image.path, pattern(8 * MIB as usize, 6)).unwrap();
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
        rig.run(Op::Flush, 0, 0).unwrap();
        let before = allocated(&image.path);
        let mut data = vec![0; 8 * MIB as usize];
        data[3 * MIB as usize] = 1;
        for fua in [true, false] {
            let token = rig.push(Op::Write { fua }, 0, 8 * MIB, Some(Memory::new(data.len(), 0).filled(&data)));
            assert_eq!(rig.finish(token).0, Ok(()));
        }
        rig.run(Op::Flush, 0, 0).unwrap();
        let punches = rig.disk.able.punch_hole.load(std::sync::atomic::Ordering::Relaxed);
        assert!(!punches || allocated(&image.path) <= before - 6 * MIB);
        assert!(image.content() == data);
    }
}

#[test]
fn what_is_discarded_or_zeroed_in_parts_keeps_its_surroundings() {
    let image = Image::new(0);
    let size = 200 * MIB;
    File::options().write(true).open(&image.path).unwrap().set_len(size).unwrap();
    let mut rig = Rig::new(&Options { discard: Discard::Unmap, ..image.options() });
    let patch = pattern(MIB as usize, 7);
    for op in [Op::Discard, Op::WriteZeroes { unmap: true, fua: false }] {
        // What begins and ends in the middle of each.
        let (first, last) = (10 * MIB, 180 * MIB);
        let patches = [first, 64 * MIB - 512, 100 * MIB, 128 * MIB - 512, last];
        for at in patches {
            assert_eq!(rig.write(at, &patch), Ok(()));
        }
        let half = MIB as usize / 2;
        assert_eq!(rig.run(op, first + half as u64, last - first), Ok(()));
        assert!(rig.read(first, half) == patch[..half]);
        assert!(rig.read(last + half as u64, half) == patch[half..]);
        if op != Op::Discard || rig.disk.able.discard.load(std::sync::atomic::Ordering::Relaxed) {
            for at in [first + half as u64, patches[1], patches[2], patches[3], last + half as u64 - MIB] {
                assert!(rig.read(at, half).iter().all(|&b| b == 0), "{op:?} {at}");
            }
        }
    }
}

/// Bytes of the disks that the sequences are run on.
const SIZE: u64 = 7 * MIB;

/// Where parts meet, and a little off.
fn place() -> impl Strategy<Value = u64> {
    (0..=SIZE / MIB, -9i64..9).prop_map(|(mib, sectors)| (mib * MIB).saturating_add_signed(sectors * 512).min(SIZE))
}

/// A kind of request, its range, and how far its memory is from where direct I/O wants it.
fn requests() -> impl Strategy<Value = Vec<(u8, u64, u64, usize)>> {
    let shift = prop_oneof![Just(0usize), Just(512), 1usize..600];
    prop::collection::vec((0..3u8, place(), place(), shift), 1..8)
}

/// Runs them one after the other on a disk and on plain memory, and compares.
fn compare(rig: &mut Rig, requests: &[(u8, u64, u64, usize)]) {
    // Of parts that the kernel zeroes and of such as are written.
    rig.disk.able.zero_range.store(requests.len().is_multiple_of(2), std::sync::atomic::Ordering::Relaxed);
    let mut model = vec![0; SIZE as usize];
    for &(kind, one, other, shift) in requests {
        let (start, end) = (one.min(other), one.max(other));
        let part = &mut model[start as usize..end as usize];
        // Two pieces, the second of which begins where no part does.
        let memory = match part.len() {
            0 => continue,
            512 => Memory::new(512, shift),
            len => Memory::pieces(&[len / 1024 * 512, len - len / 1024 * 512], shift),
        };
        match kind {
            0 => {
                part.copy_from_slice(&pattern(part.len(), start));
                let token = rig.push_write(start, memory.filled(part));
                assert_eq!(rig.finish(token).0, Ok(()));
            }
            1 => {
                let token = rig.push_read(start, memory);
                let (result, memory) = rig.finish(token);
                assert_eq!(result, Ok(()));
                assert!(memory.unwrap().data() == part);
            }
            _ => {
                part.fill(0);
                assert_eq!(rig.run(Op::WriteZeroes { unmap: false, fua: false }, start, end - start), Ok(()));
            }
        }
    }
    assert!(rig.read(0, model.len()) == model);
}

#[test]
fn requests_of_many_parts_leave_a_disk_as_they_leave_memory() {
    let config = ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() };
    let image = Image::new(SIZE);
    let device = LoopDevice::new(SIZE, 4096);
    let options = [Some(image.options()), device.as_ref().map(LoopDevice::options)];
    proptest!(config, |(requests in requests())| {
        for (_, options, shared) in options.iter().flatten().flat_map(ways) {
            let ring = shared.then(shared_ring);
            let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
            rig.run(Op::WriteZeroes { unmap: true, fua: false }, 0, SIZE).unwrap();
            compare(&mut rig, &requests);
        }
    });
}

#[test]
fn large_writes_and_parts_of_the_blocks_where_they_meet_keep_each_others_data() {
    let Some(device) = LoopDevice::new(8 * MIB, 4096) else { return };
    for (name, options, shared) in ways(&device.options()) {
        println!("{name}");
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
        let borders = [512, 3 * MIB + 512, 3 * MIB + 1024, 3 * MIB + 4096 - 512, 6 * MIB - 1024];
        for round in 0..4 {
            let data = pattern(8 * MIB as usize, round);
            for border in borders.windows(2) {
                let part = &data[border[0] as usize..border[1] as usize];
                rig.push_write(border[0], Memory::new(part.len(), 0).filled(part));
            }
            rig.settle();
            let (start, end) = (borders[0], borders[4]);
            assert!(rig.read(start, (end - start) as usize) == data[start as usize..end as usize]);
        }
    }
}

#[test]
fn a_write_that_could_not_be_written_through_is_synced() {
    use std::os::fd::AsRawFd;
    use std::sync::atomic::Ordering;

    let image = Image::new(8 * MIB);
    for (name, mut options, shared) in ways(&image.options()) {
        for (no_flush, synced) in [(false, Err(Errno::INVAL)), (true, Ok(()))] {
            println!("{name} no_flush={no_flush}");
            (options.detect_zeroes, options.no_flush) = (DetectZeroes::On, no_flush);
            let disk = Arc::new(Disk::open(&options).unwrap());
            for able in [&disk.able.write_through, &disk.able.zero_range] {
                able.store(false, Ordering::Relaxed);
            }
            // Behind the disk's back its descriptor becomes one that takes all that is written, and cannot be synced.
            let zero = File::options().read(true).write(true).open("/dev/zero").unwrap();
            // SAFETY: replaces a descriptor that stays open; nobody else knows it.
            assert!(unsafe { libc::dup2(zero.as_raw_fd(), disk.fd()) } >= 0);
            let ring = shared.then(shared_ring);
            let mut rig = Rig::over(disk, EngineOptions { ring, ..EngineOptions::default() });
            for len in [BLOCK, 2 * PART + BLOCK] {
                for data in [pattern(len as usize, 1), vec![0; len as usize]] {
                    let token =
                        rig.push(Op::Write { fua: true }, 0, len, Some(Memory::new(data.len(), 0).filled(&data)));
                    assert_eq!(rig.finish(token).0, synced, "{len}");
                }
            }
        }
    }
}

#[test]
fn memory_that_its_owner_took_away_is_no_failure_of_the_disk() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    everywhere(8 * MIB, |rig| {
        let len = 5 * MIB as usize;
        let file = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a mapping of its own, which stays until the requests have ended.
        let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0).unwrap() };
        ftruncate(&file, 3 * MIB).unwrap();
        for op in [Op::Read, Op::Write { fua: false }, Op::Write { fua: true }] {
            // SAFETY: as above. What touches it is the kernel, and says so.
            let buffers = unsafe { Lent::assume(vec![IoVec::new(base.cast(), len)]) };
            let request = Request { op, offset: 0, len: len as u64, buffers, token: RequestToken(rig.next) };
            rig.next += 1;
            rig.engines.push(rig.slot, request);
            assert_eq!(rig.finish(rig.next - 1).0, Err(Errno::FAULT), "{op:?}");
            assert_eq!(rig.failed, []);
        }
        // SAFETY: nobody uses it any more.
        unsafe { munmap(base, len).unwrap() };
    });
}
