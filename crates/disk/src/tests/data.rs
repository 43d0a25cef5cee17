//! What was written is what is read.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::task::Poll;

use egret_faultdisk::{Effect, ErrnoName, IoType};
use proptest::prelude::*;

use super::*;
use crate::blocking::{self, PART, Scratch};
use crate::job::Job;
use crate::{Discard, Extent};

#[test]
fn what_was_written_is_read_back() {
    everywhere(1 << 20, |rig| {
        let data = pattern(65536, 1);
        rig.write(4096, &data).unwrap();
        assert_eq!(rig.read(4096, 65536), data);
        assert_eq!(rig.read(0, 4096), vec![0; 4096]);
        rig.run(Op::Flush, 0, 0).unwrap();
    });
}

#[test]
fn many_requests_at_once_each_find_their_own_data() {
    everywhere(4 << 20, |rig| {
        for i in 0..256u64 {
            rig.push_write(i * 16384, Memory::pieces(&[4096, 8192, 4096], 0).filled(&pattern(16384, i)));
        }
        rig.settle();
        assert!(rig.done.drain().all(|(_, result)| result.is_ok()));
        rig.memory.clear();
        let reads: Vec<u64> = (0..256u64).map(|i| rig.push_read(i * 16384, Memory::new(16384, 0))).collect();
        for (i, token) in reads.into_iter().enumerate() {
            let (result, memory) = rig.finish(token);
            assert_eq!(result, Ok(()));
            assert!(memory.unwrap().data() == pattern(16384, i as u64), "request {i}");
        }
    });
}

#[test]
fn a_flush_makes_stable_what_was_written_before_it() {
    on_a_disk_that_tells(
        1 << 20,
        |_| {},
        |rig, unflushed| {
            for round in 1..=2 {
                rig.write(round * 8192, &pattern(8192, round)).unwrap();
                assert_eq!(unflushed(), 16, "a write alone makes nothing stable");
                rig.run(Op::Flush, 0, 0).unwrap();
                assert_eq!(unflushed(), 0);
            }
        },
    );
}

/// Runs a test in all [`ways`] on a disk of which the first request of this kind fails.
fn where_the_first_fails(iotype: IoType, errno: ErrnoName, test: impl Fn(&mut Rig)) {
    where_the_first(iotype, Effect::Errno(errno), test);
}

/// The same, where that becomes of it.
fn where_the_first(iotype: IoType, effect: Effect, test: impl Fn(&mut Rig)) {
    let (image, folder) = (tempfile::tempfile().unwrap(), tempfile::tempdir().unwrap());
    image.set_len(1 << 20).unwrap();
    let disk = match FaultDisk::mount(image, folder.path()) {
        Ok(disk) => disk,
        Err(why) => return egret_needs::this_test_lacks(format_args!("root and FUSE, for a disk that fails: {why}")),
    };
    for (name, options, shared) in ways(&Options::new("disk0", Driver::File { filename: disk.path() })) {
        println!("{name}");
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
        disk.inject(iotype, Some(1), effect);
        test(&mut rig);
        disk.tell(Order::Clear).unwrap();
    }
}

#[test]
fn what_a_flush_of_a_file_loses_is_lost_for_good() {
    where_the_first_fails(IoType::Flush, ErrnoName::Eio, |rig| {
        rig.write(0, &pattern(4096, 1)).unwrap();
        for _ in 0..2 {
            assert_eq!(rig.run(Op::Flush, 0, 0), Err(Errno::IO));
            assert!(rig.disk.has_lost_writes());
        }
    });
}

#[test]
fn a_lack_of_space_is_told_as_what_it_is() {
    where_the_first_fails(IoType::Write, ErrnoName::Enospc, |rig| {
        assert_eq!(rig.write(4096, &pattern(4096, 1)), Err(Errno::NOSPC));
        assert!(rig.failed.len() == 1 && rig.failed[0].errno == Errno::NOSPC);
        assert_eq!(rig.write(4096, &pattern(4096, 1)), Ok(()));
    });
}

#[test]
fn what_a_disk_moves_of_a_request_is_gone_on_from_and_what_ends_within_a_block_has_ended() {
    let data = pattern(65536, 4);
    where_the_first(IoType::Read, Effect::Short(8192), |rig| {
        if rig.disk.options().direct {
            assert_eq!(rig.write(4096, &data), Ok(()));
            assert!(rig.read(4096, data.len()) == data);
        }
    });
    where_the_first(IoType::Write, Effect::Short(8192), |rig| {
        // Any other that is short Linux's FUSE calls EIO.
        if rig.disk.options().direct && rig.disk.options().aio == Aio::Threads {
            assert_eq!(rig.write(4096, &data), Ok(()));
            assert!(rig.read(4096, data.len()) == data);
        }
    });
    for moved in [0, 1000] {
        where_the_first(IoType::Read, Effect::Short(moved), |rig| {
            if rig.disk.options().direct {
                let read = rig.push_read(4096, Memory::new(data.len(), 0));
                assert_eq!(rig.finish(read).0, Err(Errno::IO), "{moved}");
            }
        });
    }
}

#[test]
fn a_write_through_that_is_refused_for_what_it_is_is_tried_once_more_without_and_one_that_fails_is_not() {
    let image = Image::new(1 << 20);
    // Linux takes no flags for files of this kind, and this one takes numbers only.
    let refuses = File::options().write(true).open("/proc/self/oom_score_adj").unwrap();
    let fails = File::open(&image.path).unwrap();
    for (file, runs, is_possible) in [
        (refuses, &[Poll::Pending, Poll::Ready(Err(Errno::INVAL))][..], false),
        (fails, &[Poll::Ready(Err(Errno::BADF))], true),
    ] {
        let disk = Disk::open(&Options { direct: true, ..image.options() }).unwrap();
        // SAFETY: replaces a descriptor that stays open; nobody else knows it.
        assert!(unsafe { libc::dup2(file.as_raw_fd(), disk.fd()) } >= 0);
        let mut memory = Memory::new(4096, 0).filled(&pattern(4096, 1));
        let (op, buffers, token) = (Op::Write { fua: true }, memory.iovecs(), RequestToken(0));
        let mut job = Job::new(0, Request { op, offset: 0, len: 4096, buffers, token });
        let (mut done, mut scratch) = (0, Scratch::default());
        for ran in runs {
            assert_eq!(blocking::run(&disk, &mut job, &mut done, PART, &mut scratch), *ran);
        }
        assert_eq!(disk.able.write_through.load(Ordering::Relaxed), is_possible, "{runs:?}");
    }
}

/// Writes through, and finds that it is so.
fn write_through(rig: &mut Rig, is_stable: &dyn Fn() -> bool) {
    let memory = Memory::new(8192, 0).filled(&pattern(8192, 3));
    let token = rig.push(Op::Write { fua: true }, 8192, 8192, Some(memory));
    assert_eq!(rig.finish(token).0, Ok(()));
    assert!(is_stable());
    assert_eq!(rig.read(8192, 8192), pattern(8192, 3));
}

#[test]
fn what_was_written_through_is_stable() {
    everywhere_and_stably(1 << 20, |_| {}, write_through);
}

#[test]
fn what_was_written_through_to_a_device_is_stable_by_whatever_engine() {
    let Some((_folder, faulty)) = fault_disk(1 << 20) else { return };
    let unflushed = || faulty.tell(Order::Status).unwrap().unflushed;
    for (name, options, shared) in ways(&Options::new("disk0", Driver::File { filename: faulty.path() })) {
        if !options.direct {
            continue;
        }
        println!("{name}");
        let mut disk = Disk::open(&options).unwrap();
        // Of a file no engine makes anything stable.
        disk.become_a_device();
        let ring = shared.then(shared_ring);
        let mut rig = Rig::over(Arc::new(disk), EngineOptions { ring, ..EngineOptions::default() });
        rig.write(0, &pattern(4096, 1)).unwrap();
        assert_eq!(unflushed(), 8, "a write alone makes nothing stable");
        rig.run(Op::Flush, 0, 0).unwrap();
        write_through(&mut rig, &|| unflushed() == 0);
        // Two writes and a read, and with threads the flush.
        let own = if options.aio == Aio::Threads { 4 } else { 3 };
        assert_eq!(rig.requests_of(options.aio.as_str()), own, "{name}");
        assert!(rig.disk.able.write_through.load(Ordering::Relaxed));
    }
}

#[test]
fn a_write_through_that_the_kernel_does_not_know_is_synced_instead() {
    let test = |rig: &mut Rig, is_stable: &dyn Fn() -> bool| {
        rig.disk.able.write_through.store(false, Ordering::Relaxed);
        write_through(rig, is_stable);
        assert!(rig.requests_of("threads") > 0);
    };
    everywhere_and_stably(1 << 20, |_| {}, test);
}

#[test]
fn flushes_that_are_to_be_ignored_reach_no_engine() {
    everywhere_with(
        1 << 20,
        |options| options.no_flush = true,
        |rig| {
            rig.run(Op::Flush, 0, 0).unwrap();
            assert_eq!(rig.engines.counters().read().answered, 1);
            let memory = Memory::new(4096, 0).filled(&pattern(4096, 3));
            let token = rig.push(Op::Write { fua: true }, 0, 4096, Some(memory));
            assert_eq!(rig.finish(token).0, Ok(()));
        },
    );
}

#[test]
fn more_pieces_than_a_system_call_takes_are_moved_all_the_same() {
    everywhere(2 << 20, |rig| {
        let data = pattern(1500 * 512, 9);
        rig.push_write(4096, Memory::pieces(&[512; 1500], 0).filled(&data));
        rig.settle();
        assert_eq!(rig.read(4096, data.len() - 512 * 4), data[..data.len() - 512 * 4]);
    });
}

#[test]
fn a_read_past_the_end_of_an_image_that_shrank_fails() {
    for end in [0, 65536, 65536 + 4096, 65536 + 5000] {
        let image = Image::of(&pattern(1 << 20, 5));
        for (name, options, shared) in ways(&image.options()) {
            println!("{name}, {end} bytes left");
            std::fs::write(&image.path, pattern(1 << 20, 5)).unwrap();
            let ring = shared.then(shared_ring);
            let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
            File::options().write(true).open(&image.path).unwrap().set_len(end).unwrap();
            let past_the_end = rig.push_read(65536, Memory::new(65536, 0));
            assert_eq!(rig.finish(past_the_end).0, Err(Errno::IO));
            let left = (end / 4096 * 4096) as usize;
            assert!(rig.read(0, left) == pattern(1 << 20, 5)[..left]);
        }
    }
}

#[test]
fn what_was_cut_off_an_image_is_not_said_to_be_a_hole() {
    let image = Image::new(65536);
    let disk = Disk::open(&image.options()).unwrap();
    for (data, end) in [(0, 0), (5000, 5000), (32768, 32768), (16384, 32768)] {
        std::fs::write(&image.path, vec![1; data as usize]).unwrap();
        File::options().write(true).open(&image.path).unwrap().set_len(end).unwrap();
        let (mut at, mut holes) = (0, 0);
        while at < disk.size() {
            for extent in disk.extents(at..disk.size(), 4) {
                at += extent.len;
                holes += if extent.is_hole { extent.len } else { 0 };
            }
        }
        assert_eq!(holes, end - data, "of {end} bytes");
    }
}

#[test]
fn what_is_allocated_of_an_image_is_told_in_extents_from_where_it_is_asked_for() {
    const K: u64 = 1024;
    let image = Image::new(0);
    let file = File::options().write(true).open(&image.path).unwrap();
    file.set_len(K * K).unwrap();
    for at in [128 * K, 512 * K] {
        file.write_all_at(&[1; 64 << 10], at).unwrap();
    }
    let disk = Disk::open(&image.options()).unwrap();
    let all =
        [(128, true), (64, false), (320, true), (64, false), (448, true)].map(|(len, is_hole)| (len * K, is_hole));
    let cases = [
        (0..K * K, 10, all.to_vec()),
        (0..K * K, 5, all.to_vec()),
        (0..K * K, 4, all[..4].to_vec()),
        (0..K * K, 1, all[..1].to_vec()),
        // One there is at least.
        (0..K * K, 0, vec![(K * K, false)]),
        (160 * K..512 * K + 512, 10, vec![(32 * K, false), all[2], (512, false)]),
        (192 * K..512 * K, 10, vec![all[2]]),
        (64 * K + 512..96 * K, 10, vec![(31 * K + 512, true)]),
        (130 * K..131 * K, 10, vec![(K, false)]),
        (K * K - 512..K * K, 10, vec![(512, true)]),
    ];
    for (range, most, expected) in cases {
        let told = disk.extents(range.clone(), most).into_iter().map(|extent| (extent.len, extent.is_hole));
        assert_eq!(told.collect::<Vec<_>>(), expected, "{range:?}, at most {most}");
    }
    let null = |read_zeroes| {
        let driver = Driver::Null { size: K * K, latency: Nanos::ZERO, read_zeroes };
        Disk::open(&Options::new("null", driver)).unwrap().extents(K..3 * K, 2)
    };
    assert_eq!([true, false].map(null), [true, false].map(|is_hole| vec![Extent { len: 2 * K, is_hole }]));
}

#[test]
fn what_a_device_had_and_has_no_more_is_an_error_and_no_lack_of_space() {
    const SIZE: u64 = 1 << 20;
    let Some(device) = LoopDevice::new(SIZE, 512) else { return };
    for (name, options, shared) in ways(&device.options()) {
        for left in [0, SIZE / 2] {
            println!("{name}, {left} bytes left");
            device.resize(SIZE);
            let ring = shared.then(shared_ring);
            let options = Options { discard: Discard::Unmap, ..options.clone() };
            let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
            device.resize(left);
            let data = pattern(65536, 6);
            for at in [SIZE / 2 - 4096, SIZE / 2, SIZE - 65536] {
                let read = rig.push_read(at, Memory::new(65536, 0));
                assert_eq!(rig.finish(read).0, Err(Errno::IO));
                assert_eq!(rig.write(at, &data), Err(Errno::IO));
                for unmap in [false, true] {
                    assert_eq!(rig.run(Op::WriteZeroes { unmap, fua: false }, at, 65536), Err(Errno::IO));
                }
                assert_eq!(rig.run(Op::Discard, at, 65536), Err(Errno::IO));
            }
            assert!(rig.failed.len() == 15 && rig.failed.iter().all(|failed| failed.errno == Errno::IO));
            device.resize(SIZE);
            // Zeroes that end where the device does are all there.
            rig.run(Op::WriteZeroes { unmap: false, fua: false }, SIZE - 65536, 65536).unwrap();
            rig.write(SIZE / 2, &data).unwrap();
            assert!(rig.read(SIZE / 2, data.len()) == data);
        }
    }
}

#[test]
fn a_request_that_makes_no_sense_is_refused() {
    everywhere(1 << 20, |rig| {
        for (offset, len) in [(1 << 20, 512), ((1 << 20) - 512, 1024), (u64::MAX - 511, 512), (100, 512), (512, 100)] {
            let memory = Memory::new(len as usize, 0);
            let token = rig.push(Op::Read, offset, len, Some(memory));
            assert_eq!(rig.finish(token).0, Err(Errno::INVAL), "{offset}+{len}");
            assert_eq!(rig.run(Op::Discard, offset, len), Err(Errno::INVAL), "{offset}+{len}");
        }
        let token = rig.push_read(512, Memory::new(0, 0));
        assert_eq!(rig.finish(token).0, Ok(()));
    });
}

#[test]
fn a_read_only_disk_changes_nothing() {
    everywhere_with(
        1 << 20,
        |options| (options.read_only, options.discard) = (true, Discard::Unmap),
        |rig| {
            let token = rig.push_write(0, Memory::new(4096, 0));
            assert_eq!(rig.finish(token).0, Err(Errno::ROFS));
            assert_eq!(rig.run(Op::Discard, 0, 4096), Err(Errno::ROFS));
            assert_eq!(rig.run(Op::WriteZeroes { unmap: true, fua: false }, 0, 4096), Err(Errno::ROFS));
            assert_eq!(rig.read(0, 4096), vec![0; 4096]);
            rig.run(Op::Flush, 0, 0).unwrap();
        },
    );
}

#[test]
fn what_the_kernel_says_is_the_requests_result() {
    let image = Image::new(1 << 20);
    for (name, options, shared) in ways(&image.options()) {
        println!("{name}");
        let disk = Arc::new(Disk::open(&options).unwrap());
        // Behind the disk's back its descriptor becomes one that cannot be written.
        let readable = File::open(&image.path).unwrap();
        // SAFETY: replaces a descriptor that stays open; nobody else knows it.
        assert!(unsafe { libc::dup2(readable.as_raw_fd(), disk.fd()) } >= 0);
        let ring = shared.then(shared_ring);
        let mut rig = Rig::over(disk, EngineOptions { ring, ..EngineOptions::default() });
        let token = rig.push_write(0, Memory::new(4096, 0));
        assert_eq!(rig.finish(token).0, Err(Errno::BADF));
        assert_eq!(rig.read(0, 4096), vec![0; 4096]);
        assert_eq!(rig.run(Op::WriteZeroes { unmap: false, fua: false }, 0, 4096), Err(Errno::BADF));
        assert!(rig.disk.able.zero_range.load(Ordering::Relaxed), "it has failed, and is not impossible");
    }
}

/// Something to do to a disk of 64 sectors.
#[derive(Clone, Debug)]
enum Step {
    Write { sector: u64, cuts: Vec<usize>, shift: usize, seed: u64 },
    Read { sector: u64, cuts: Vec<usize>, shift: usize },
    Zero { sector: u64, sectors: u64, unmap: bool },
    Flush,
}

const SECTORS: u64 = 64;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Pieces of any length that add up to whole sectors.
    let cuts = prop::collection::vec(1usize..3000, 1..5).prop_map(|mut cuts| {
        let odd = cuts.iter().sum::<usize>() % 512;
        if odd > 0 {
            cuts.push(512 - odd);
        }
        cuts
    });
    let shift = prop_oneof![Just(0usize), Just(512), 0usize..600];
    let step =
        prop_oneof![
            (0..SECTORS, cuts.clone(), shift.clone(), any::<u64>())
                .prop_map(|(sector, cuts, shift, seed)| Step::Write { sector, cuts, shift, seed }),
            (0..SECTORS, cuts, shift).prop_map(|(sector, cuts, shift)| Step::Read { sector, cuts, shift }),
            (0..SECTORS, 1..20u64, any::<bool>()).prop_map(|(sector, sectors, unmap)| Step::Zero {
                sector,
                sectors,
                unmap
            }),
            Just(Step::Flush),
        ];
    prop::collection::vec(step, 1..24)
}

/// Runs steps one after the other on a disk and on plain memory, and compares.
fn compare(rig: &mut Rig, steps: &[Step]) {
    let mut model = vec![0; SECTORS as usize * 512];
    let fits = |sector: u64, len: usize| sector * 512 + len as u64 <= SECTORS * 512;
    for step in steps {
        match step {
            Step::Write { sector, cuts, shift, seed } => {
                let memory = Memory::pieces(cuts, *shift);
                let data = pattern(memory.len(), *seed);
                if fits(*sector, data.len()) {
                    let token = rig.push_write(sector * 512, memory.filled(&data));
                    assert_eq!(rig.finish(token).0, Ok(()), "{step:?}");
                    model[*sector as usize * 512..][..data.len()].copy_from_slice(&data);
                }
            }
            Step::Read { sector, cuts, shift } => {
                let memory = Memory::pieces(cuts, *shift);
                let len = memory.len();
                if fits(*sector, len) {
                    let token = rig.push_read(sector * 512, memory);
                    let (result, memory) = rig.finish(token);
                    assert_eq!(result, Ok(()), "{step:?}");
                    assert!(memory.unwrap().data() == &model[*sector as usize * 512..][..len], "{step:?}");
                }
            }
            Step::Zero { sector, sectors, unmap } => {
                let end = (sector + sectors).min(SECTORS);
                let len = (end - sector) * 512;
                assert_eq!(
                    rig.run(Op::WriteZeroes { unmap: *unmap, fua: false }, sector * 512, len),
                    Ok(()),
                    "{step:?}"
                );
                model[*sector as usize * 512..end as usize * 512].fill(0);
            }
            Step::Flush => assert_eq!(rig.run(Op::Flush, 0, 0), Ok(())),
        }
    }
    assert!(rig.read(0, model.len()) == model);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_requests_leaves_a_file_as_it_leaves_memory(steps in steps()) {
        let image = Image::new(SECTORS * 512);
        let options = Options { discard: Discard::Unmap, ..image.options() };
        for (_, options, shared) in ways(&options) {
            std::fs::write(&image.path, vec![0; SECTORS as usize * 512]).unwrap();
            let ring = shared.then(shared_ring);
            compare(&mut Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() }), &steps);
        }
    }
}

#[test]
fn any_sequence_of_requests_leaves_a_device_as_it_leaves_memory() {
    let config = ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() };
    for sector in [512, 4096] {
        let Some(device) = LoopDevice::new(SECTORS * 512, sector) else { return };
        let options = Options { discard: Discard::Unmap, ..device.options() };
        proptest!(config.clone(), |(steps in steps())| {
            for (_, options, shared) in ways(&options) {
                let ring = shared.then(shared_ring);
                let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
                rig.run(Op::WriteZeroes { unmap: true, fua: false }, 0, SECTORS * 512).unwrap();
                compare(&mut rig, &steps);
            }
        });
    }
}
