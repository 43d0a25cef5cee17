//! Sectors that are smaller than what direct I/O moves, and memory that is not where it wants it.

use super::*;

/// Ways to run direct I/O on a device of 4096-byte sectors.
fn large_sectors(test: impl Fn(&Options, bool)) {
    let Some(device) = LoopDevice::new(1 << 20, 4096) else { return };
    for (name, options, shared) in ways(&device.options()) {
        if options.direct {
            println!("{name}");
            test(&options, shared);
        }
    }
}

#[test]
fn whoever_runs_a_write_locks_its_blocks_meanwhile() {
    for (name, options, shared) in ways(&Image::new(65536).options()) {
        let mut disk = Disk::open(&options).unwrap();
        disk.block_range_lock = Some(Default::default());
        let ring = shared.then(shared_ring);
        let mut rig = Rig::over(Arc::new(disk), EngineOptions { ring, ..EngineOptions::default() });
        let disk = Arc::clone(&rig.disk);
        let lock = disk.block_range_lock.as_ref().unwrap();
        let write = |rig: &mut Rig| rig.push_write(0, Memory::new(4096, 0).filled(&pattern(4096, 1)));
        // What runs in the kernel could not wait for the lock there: a worker does.
        lock.lock_exclusive(&(0..4096));
        let locked_out = write(&mut rig);
        rig.engines.submit(clock::now());
        let of_workers = u64::from(options.aio != Aio::Threads);
        assert_eq!(rig.engines.counters().read().fallbacks, of_workers, "{name}");
        lock.unlock_exclusive(&(0..4096));
        assert_eq!(rig.finish(locked_out).0, Ok(()), "{name}");
        assert_eq!(rig.requests_of(options.aio.as_str()), 1 - of_workers, "{name}");
        let free = write(&mut rig);
        assert_eq!(rig.finish(free).0, Ok(()), "{name}");
        assert!(lock.is_free(), "{name}");
    }
}

#[test]
fn a_device_of_large_sectors_is_described_as_one() {
    large_sectors(|options, _| {
        let disk = Disk::open(options).unwrap();
        assert_eq!((disk.logical_block_size(), disk.offset_alignment()), (4096, 4096));
        assert!(disk.physical_block_size() >= 4096 && disk.size() == 1 << 20);
    });
}

#[test]
fn what_a_device_may_be_asked_to_discard_is_what_the_kernel_says_in_whole_blocks() {
    for sector in [512, 4096] {
        let Some(device) = LoopDevice::new(1 << 20, sector) else { return };
        let disk = Disk::open(&device.options()).unwrap();
        let says = |name: &str| {
            let queue = Path::new("/sys/block").join(device.path.file_name().unwrap()).join("queue");
            std::fs::read_to_string(queue.join(name)).unwrap().trim().parse::<u64>().unwrap()
        };
        let block = u64::from(sector);
        assert_eq!(disk.max_discard_bytes(), says("discard_max_bytes").min(1 << 30) / block * block);
        assert_eq!(u64::from(disk.discard_granularity()), says("discard_granularity").max(block));
        assert_eq!((disk.max_write_zeroes_bytes(), disk.optimal_io_size()), (1 << 30, 0));
    }
}

#[test]
fn sub_block_writes_in_flight_together_keep_each_others_data() {
    large_sectors(|options, shared| {
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(options, EngineOptions { ring, ..EngineOptions::default() });
        let data = pattern(65536, 7);
        for round in 0..8 {
            // Every sector of every block, in an order in which neighbours are far apart.
            let order: Vec<u64> = (0..128).map(|i| (i * 37 + round) % 128).collect();
            rig.run(Op::WriteZeroes { unmap: false, fua: false }, 0, 65536).unwrap();
            for &sector in &order {
                let from = sector as usize * 512;
                rig.push_write(sector * 512, Memory::new(512, 0).filled(&data[from..from + 512]));
            }
            rig.settle();
            assert!(rig.done.drain().all(|(_, result)| result.is_ok()));
            assert!(rig.read(0, 65536) == data, "round {round}");
        }
        assert!(rig.engines.counters().read().bounced >= 8 * 128);
    });
}

#[test]
fn whole_blocks_and_parts_of_their_neighbours_keep_each_others_data() {
    large_sectors(|options, shared| {
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(options, EngineOptions { ring, ..EngineOptions::default() });
        let data = pattern(65536, 8);
        for _ in 0..16 {
            rig.run(Op::WriteZeroes { unmap: false, fua: false }, 0, 65536).unwrap();
            // Whole blocks, and around each the sectors from the middle of one block to the middle of the next.
            for block in 0..8usize {
                let whole = block * 8192;
                rig.push_write(whole as u64, Memory::new(4096, 0).filled(&data[whole..whole + 4096]));
                for at in [whole + 4096, whole + 4096 + 1536] {
                    let len = if at % 4096 == 0 { 1536 } else { 2560 };
                    rig.push_write(at as u64, Memory::new(len, 0).filled(&data[at..at + len]));
                }
            }
            rig.settle();
            assert!(rig.read(0, 65536) == data);
        }
    });
}

#[test]
fn two_io_threads_keep_each_others_parts_of_a_block() {
    large_sectors(|options, shared| {
        let disk = Arc::new(Disk::open(options).unwrap());
        let data = pattern(16384, 9);
        std::thread::scope(|scope| {
            for thread in 0..2usize {
                let (disk, data) = (Arc::clone(&disk), &data);
                scope.spawn(move || {
                    let ring = shared.then(shared_ring);
                    let mut rig = Rig::over(disk, EngineOptions { ring, ..EngineOptions::default() });
                    for _ in 0..16 {
                        for sector in (thread..32).step_by(2) {
                            let from = sector * 512;
                            rig.push_write(from as u64, Memory::new(512, 0).filled(&data[from..from + 512]));
                        }
                        rig.settle();
                    }
                });
            }
        });
        let ring = shared.then(shared_ring);
        let mut rig = Rig::over(disk, EngineOptions { ring, ..EngineOptions::default() });
        assert!(rig.read(0, 16384) == data);
    });
}

#[test]
fn memory_of_any_alignment_is_read_and_written() {
    everywhere(1 << 20, |rig| {
        for shift in [1, 4, 255, 511] {
            let data = pattern(12288, shift as u64);
            let lens = [100, 5000, 12288 - 5100];
            let token = rig.push_write(4096, Memory::pieces(&lens, shift).filled(&data));
            assert_eq!(rig.finish(token).0, Ok(()));
            let token = rig.push_read(4096, Memory::pieces(&lens, shift));
            let (result, memory) = rig.finish(token);
            assert_eq!(result, Ok(()));
            assert!(memory.unwrap().data() == data);
        }
        let bounced = rig.engines.counters().read().bounced;
        assert_eq!(bounced > 0, rig.disk.alignment.memory > 1 || rig.disk.offset_alignment() > 1);
    });
}

#[test]
fn a_request_larger_than_a_workers_memory_is_copied_in_parts() {
    let image = Image::new(8 << 20);
    let mut rig = Rig::new(&Options { direct: true, ..image.options() });
    let data = pattern(5 << 20, 11);
    let token = rig.push_write(512, Memory::new(data.len(), 3).filled(&data));
    assert_eq!(rig.finish(token).0, Ok(()));
    assert!(image.content()[512..512 + data.len()] == data);
    let token = rig.push_read(512, Memory::new(data.len(), 5));
    let (result, memory) = rig.finish(token);
    assert!(result == Ok(()) && memory.unwrap().data() == data);
}
