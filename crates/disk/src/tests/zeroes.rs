//! Discards, zeroes, and zeroes that are found in writes.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::Ordering;

use super::cached::evict;
use super::*;
use crate::{DetectZeroes, Discard};

const MIB: u64 = 1 << 20;
/// The same everywhere; libc does not have it.
const SYS_CACHESTAT: libc::c_long = 451;

fn unmap(options: &mut Options) {
    options.discard = Discard::Unmap;
}

#[test]
fn a_discard_gives_a_files_storage_back() {
    let image = Image::of(&pattern(4 * MIB as usize, 1));
    for (name, mut options, shared) in ways(&image.options()) {
        println!("{name}");
        unmap(&mut options);
        std::fs::write(&image.path, pattern(4 * MIB as usize, 1)).unwrap();
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
        rig.run(Op::Flush, 0, 0).unwrap();
        let before = allocated(&image.path);
        rig.run(Op::Discard, MIB, 2 * MIB).unwrap();
        assert!(!rig.disk.able.discard.load(Ordering::Relaxed) || allocated(&image.path) <= before - 2 * MIB);
        assert_eq!(rig.read(0, 4096), pattern(4 * MIB as usize, 1)[..4096]);
    }
}

#[test]
fn a_discard_that_is_to_be_ignored_leaves_the_data() {
    everywhere(MIB, |rig| {
        rig.write(0, &pattern(65536, 2)).unwrap();
        rig.run(Op::Discard, 0, 65536).unwrap();
        assert_eq!(rig.read(0, 65536), pattern(65536, 2));
        assert_eq!(rig.engines.counters().read().answered, 1);
        assert!(!rig.disk.supports_discard());
    });
}

#[test]
fn a_discard_that_is_impossible_succeeds() {
    everywhere_with(MIB, unmap, |rig| {
        rig.disk.able.discard.store(false, Ordering::Relaxed);
        rig.write(0, &pattern(65536, 2)).unwrap();
        rig.run(Op::Discard, 0, 65536).unwrap();
        assert_eq!(rig.read(0, 65536), pattern(65536, 2));
    });
}

#[test]
fn a_discard_keeps_what_shares_a_block_with_it() {
    everywhere_with(MIB, unmap, |rig| {
        rig.write(0, &pattern(65536, 2)).unwrap();
        rig.run(Op::Discard, 512, 512).unwrap();
        rig.run(Op::Discard, 3 * 512, 16384).unwrap();
        let read = rig.read(0, 65536);
        assert_eq!(read[..512], pattern(65536, 2)[..512]);
        assert_eq!(read[1024..1536], pattern(65536, 2)[1024..1536]);
        assert_eq!(read[3 * 512 + 16384..], pattern(65536, 2)[3 * 512 + 16384..]);
    });
}

#[test]
fn zeroes_are_written_however_the_image_can_do_it() {
    everywhere_with(MIB, unmap, |rig| {
        for (punch_hole, zero_range) in [(true, true), (false, true), (false, false)] {
            let able = &rig.disk.able;
            able.punch_hole.fetch_and(punch_hole, Ordering::Relaxed);
            able.zero_range.fetch_and(zero_range, Ordering::Relaxed);
            for unmap in [false, true] {
                for (offset, len) in [(4096, 32768), (512, 512), (3584, 1024), (512, 40448)] {
                    rig.write(0, &pattern(65536, 2)).unwrap();
                    rig.run(Op::WriteZeroes { unmap, fua: false }, offset, len).unwrap();
                    let mut expected = pattern(65536, 2);
                    expected[offset as usize..(offset + len) as usize].fill(0);
                    assert!(rig.read(0, 65536) == expected, "{offset}+{len} unmap={unmap} {punch_hole} {zero_range}");
                }
            }
        }
    });
}

/// How many pages of a file the page cache has, those among them that are to be written; `None`, and a line that says so,
/// where the kernel does not say (Linux 6.5).
fn pages_kept(path: &Path) -> Option<u64> {
    let file = File::open(path).unwrap();
    let (all, mut told) = ([0_u64; 2], [0_u64; 5]);
    // SAFETY: the kernel reads a range, which is two numbers, and writes a `struct cachestat`, which is five.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), all.as_ptr(), told.as_mut_ptr(), 0) };
    if result != 0 {
        egret_needs::this_test_lacks(format_args!("cachestat: {}", std::io::Error::last_os_error()));
        return None;
    }
    Some(told[0])
}

#[test]
fn past_the_page_cache_nothing_is_left_there_of_zeroes_and_discards_that_are_no_whole_blocks_of_a_file_system() {
    let data = pattern(65536, 1);
    let image = Image::beside_the_build(&data);
    let options = Options { direct: true, detect_zeroes: DetectZeroes::On, ..image.options() };
    let options = Options { discard: Discard::Unmap, ..options };
    let zeroes = |unmap| Op::WriteZeroes { unmap, fua: false };
    // Also where it does not say what its blocks are.
    for is_known in [true, false] {
        let mut disk = Disk::open(&options).unwrap();
        if !is_known {
            disk.blocks.physical = 512;
        }
        let mut rig = Rig::over(Arc::new(disk), EngineOptions::default());
        if !evict(&image.path) || pages_kept(&image.path).is_none() {
            return;
        }
        for op in [zeroes(false), zeroes(true), Op::Discard, Op::Write { fua: false }] {
            for (at, len) in [(512, 512), (3584, 1024), (1024, 32768), (8192, 7680), (65024, 512)] {
                // A page that the kernel has in its hands at the moment stays, once.
                let leaves_none = (0..10).any(|_| {
                    rig.write(0, &data).unwrap();
                    let memory = matches!(op, Op::Write { .. }).then(|| Memory::new(len, 0).filled(&vec![0; len]));
                    let token = rig.push(op, at as u64, len as u64, memory);
                    assert_eq!(rig.finish(token).0, Ok(()));
                    pages_kept(&image.path) == Some(0)
                });
                assert!(leaves_none, "{op:?} of {len} bytes at {at}");
                let found = rig.read(0, data.len());
                assert!(found[..at] == data[..at] && found[at + len..] == data[at + len..]);
                let is_kept = |at: usize| op == Op::Discard && found[at] == data[at];
                assert!((at..at + len).all(|at| found[at] == 0 || is_kept(at)), "{op:?} of {len} bytes at {at}");
            }
        }
    }
}

#[test]
fn zeroes_beyond_a_workers_memory_are_written_in_parts() {
    let image = Image::of(&pattern(4 * MIB as usize, 1));
    let mut rig = Rig::new(&image.options());
    rig.disk.able.zero_range.store(false, Ordering::Relaxed);
    rig.run(Op::WriteZeroes { unmap: false, fua: false }, 512, 3 * MIB).unwrap();
    let mut expected = pattern(4 * MIB as usize, 1);
    expected[512..512 + 3 * MIB as usize].fill(0);
    assert!(image.content() == expected);
}

#[test]
fn written_zeroes_are_found_and_unmapped() {
    let image = Image::of(&pattern(MIB as usize, 1));
    for (name, mut options, shared) in ways(&image.options()) {
        println!("{name}");
        unmap(&mut options);
        options.detect_zeroes = DetectZeroes::Unmap;
        std::fs::write(&image.path, pattern(MIB as usize, 1)).unwrap();
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
        rig.run(Op::Flush, 0, 0).unwrap();
        let before = allocated(&image.path);
        rig.write(0, &vec![0; MIB as usize / 2]).unwrap();
        let mut almost = vec![0; MIB as usize / 2];
        almost[100_000] = 1;
        rig.write(MIB / 2, &almost).unwrap();
        rig.run(Op::Flush, 0, 0).unwrap();
        assert!(!rig.disk.able.punch_hole.load(Ordering::Relaxed) || allocated(&image.path) <= before - MIB / 2);
        let content = image.content();
        assert!(content[..MIB as usize / 2].iter().all(|&b| b == 0) && content[MIB as usize / 2..] == almost);
    }
}

#[test]
fn zeroes_that_are_found_are_on_stable_storage_if_the_write_asked_for_it() {
    everywhere_and_stably(
        MIB,
        |options| options.detect_zeroes = DetectZeroes::On,
        |rig, is_stable| {
            rig.write(0, &pattern(8192, 2)).unwrap();
            let token = rig.push(Op::Write { fua: true }, 0, 4096, Some(Memory::new(4096, 0).filled(&[0; 4096])));
            assert_eq!(rig.finish(token).0, Ok(()));
            assert!(is_stable());
            assert_eq!(rig.read(0, 8192), [vec![0; 4096], pattern(8192, 2)[4096..].to_vec()].concat());
        },
    );
}

#[test]
fn zeroes_are_written_and_nothing_is_discarded_where_another_has_the_device_for_himself() {
    let Some(device) = LoopDevice::new(MIB, 512) else { return };
    let _holder = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&device.path).unwrap();
    for (name, options, shared) in ways(&device.options()) {
        println!("{name}");
        let options = Options { discard: Discard::Unmap, detect_zeroes: DetectZeroes::On, ..options };
        let ring = shared.then(shared_ring);
        let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
        for unmap in [None, Some(false), Some(true)] {
            // What the page cache has of it is not written yet.
            rig.write(0, &pattern(65536, 3)).unwrap();
            match unmap {
                None => rig.write(4096, &[0; 8192]).unwrap(),
                Some(unmap) => rig.run(Op::WriteZeroes { unmap, fua: false }, 4096, 8192).unwrap(),
            }
            let mut expected = pattern(65536, 3);
            expected[4096..12288].fill(0);
            assert!(rig.read(0, 65536) == expected, "{unmap:?}");
        }
        rig.write(0, &pattern(65536, 4)).unwrap();
        rig.run(Op::Discard, 4096, 8192).unwrap();
        let read = rig.read(0, 65536);
        assert!(read[..4096] == pattern(65536, 4)[..4096] && read[12288..] == pattern(65536, 4)[12288..]);
        assert!(rig.disk.able.discard.load(Ordering::Relaxed), "it may be given back");
    }
}
