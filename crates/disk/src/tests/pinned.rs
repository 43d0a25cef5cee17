//! Requests through memory that is registered with the ring, beside those that are not.

use std::os::unix::fs::FileExt;

use egret_vring::memory::{GuestMemory, MemoryRules, Region};

use super::*;
use crate::Pinning;
use crate::engine::pins::CHUNK;

const SIZE: usize = 1 << 20;
/// A chunk, one that is not whole, and of another region a page.
const REGIONS: [u64; 2] = [(CHUNK + (1 << 20)) as u64, 4096];

/// Memory in regions of these lengths, all of which is there.
pub(crate) fn present(lens: &[u64]) -> Arc<GuestMemory> {
    let rules = MemoryRules { pin: true, ..MemoryRules::default() };
    let add = |memory: GuestMemory, (at, len): (usize, &u64)| {
        let region = Region::anonymous((at as u64) << 32, *len).unwrap();
        // Written to: what is only reserved is not there.
        region.file.write_all_at(&vec![0; *len as usize], 0).unwrap();
        memory.with(region).unwrap()
    };
    Arc::new(lens.iter().enumerate().fold(GuestMemory::under(rules), add))
}

/// `len` bytes at `offset` of the map's region of so many bytes.
pub(crate) fn piece(memory: &GuestMemory, region: u64, offset: usize, len: usize) -> IoVec {
    let whole = memory.mapped().find(|iovec| iovec.len() as u64 == region).unwrap();
    assert!(offset + len <= whole.len());
    // SAFETY: within the region, which every test here keeps mapped for longer than a request.
    unsafe { IoVec::new(whole.base().add(offset), len) }
}

/// As an export has it; what goes wrong is an error.
pub(crate) fn pinning(memory: &Arc<GuestMemory>) -> Pinning {
    Pinning {
        memory: Arc::clone(memory),
        tell: Box::new(|why| panic!("memory is pinned, and not {why}")),
        give_back: Box::new(drop),
    }
}

fn io_uring(rig: &Rig) -> (u64, u64) {
    let engines = rig.engines.counters().read().engines;
    engines.iter().find(|stats| stats.engine == "io_uring").map_or((0, 0), |stats| (stats.registered, stats.pinned))
}

/// Moves data to or from memory, and says whether that was pinned.
fn move_data(rig: &mut Rig, op: Op, offset: u64, pieces: &[IoVec]) -> bool {
    let before = io_uring(rig).0;
    let token = rig.next;
    rig.next += 1;
    // SAFETY: the memory is there for as long as the test.
    let buffers = unsafe { Lent::assume(pieces.to_vec()) };
    let len = pieces.iter().map(IoVec::len).sum::<usize>() as u64;
    rig.engines.push(rig.slot, Request { op, offset, len, buffers, token: RequestToken(token) });
    assert_eq!(rig.finish(token).0, Ok(()));
    io_uring(rig).0 > before
}

/// Reads until all of `memory` is pinned.
fn await_pinned(rig: &mut Rig, memory: &Arc<GuestMemory>) {
    rig.engines.pin(rig.slot, pinning(memory));
    let begun = std::time::Instant::now();
    let whole: u64 = memory.mapped().map(|iovec| iovec.len() as u64).sum();
    while io_uring(rig).1 < whole {
        assert!(begun.elapsed() < HANGS, "{:?}", rig.engines.counters().read());
        for region in memory.mapped() {
            for offset in (0..region.len()).step_by(CHUNK) {
                let first = piece(memory, region.len() as u64, offset, 4096);
                move_data(rig, Op::Read, 0, &[first]);
            }
        }
    }
}

/// Every way that io_uring has. Through the page cache a read that is alone needs no engine.
fn with_io_uring(test: impl Fn(&mut Rig)) {
    everywhere(SIZE as u64, |rig| {
        if rig.disk.options().aio == Aio::IoUring && rig.disk.options().direct {
            test(rig);
        }
    });
}

#[test]
fn data_is_what_it_was_wherever_in_pinned_memory_it_is_moved_to_and_from() {
    with_io_uring(|rig| {
        let memory = present(&REGIONS);
        await_pinned(rig, &memory);
        let [first, second] = REGIONS;
        let at = |offset, len| piece(&memory, first, offset, len);
        let last = first as usize - 4096;
        for (what, to, from, is_pinned) in [
            ("one piece", vec![at(0, 65536)], vec![at(131072, 65536)], true),
            ("the end of a chunk", vec![at(CHUNK - 8192, 8192)], vec![at(CHUNK, 8192)], true),
            ("the end of a region", vec![at(last, 4096)], vec![piece(&memory, second, 0, 4096)], true),
            ("over a border", vec![at(CHUNK - 4096, 8192)], vec![at(CHUNK - 4096, 8192)], false),
            ("two pieces", vec![at(0, 4096), at(CHUNK, 4096)], vec![at(4096, 4096), at(8192, 4096)], false),
        ] {
            let len: usize = to.iter().map(IoVec::len).sum();
            let data = pattern(len, 7 + len as u64);
            assert_eq!(memory.scatter(&to, &data), len);
            // What is to be stable of a file is for workers.
            let write = Op::Write { fua: !rig.disk.may_be_cached() };
            assert_eq!(move_data(rig, write, 65536, &to), is_pinned, "{what}: the write");
            memory.scatter(&to, &vec![0; len]);
            assert_eq!(move_data(rig, Op::Read, 65536, &from), is_pinned, "{what}: the read");
            let mut read = vec![0; len];
            assert_eq!(memory.gather(&from, &mut read), len);
            assert!(read == data, "{what}");
        }
        // Memory of others'.
        let data = pattern(4096, 3);
        let counted = io_uring(rig).0;
        assert_eq!(rig.write(0, &data), Ok(()));
        assert!(rig.read(0, 4096) == data);
        assert_eq!(io_uring(rig).0, counted);
    });
}

#[test]
fn memory_is_let_go_of_when_the_last_disk_that_uses_it_is_detached() {
    with_io_uring(|rig| {
        let memory = present(&REGIONS);
        await_pinned(rig, &memory);
        let other = rig.engines.attach(&Arc::clone(&rig.disk)).unwrap();
        rig.engines.pin(other, pinning(&memory));
        rig.engines.detach(rig.slot);
        rig.slot = other;
        rig.engines.submit(clock::now());
        assert!(move_data(rig, Op::Read, 0, &[piece(&memory, REGIONS[0], 0, 4096)]), "the other has it still");
        rig.engines.detach(other);
        // The loop comes back for this without a request.
        while let Some(at) = rig.engines.deadline() {
            rig.engines.submit(at.max(clock::now()));
        }
        assert_eq!(io_uring(rig).1, 0);
        rig.slot = rig.engines.attach(&Arc::clone(&rig.disk)).unwrap();
    });
}
