//! Reads that the page cache answers before an engine sees them, and those that it does not.

use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::{Advice, MemfdFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::*;

/// Runs a test on an image of this content, on every engine that reads through the page cache, and on a device where
/// one can be made.
fn through_the_cache(content: &[u8], test: impl Fn(&mut Rig)) {
    let image = Image::beside_the_build(content);
    let device = LoopDevice::new(content.len() as u64, 512);
    let file = reads_without_waiting(&image.path).then(|| (&image.path, image.options()));
    let device = device.as_ref().map(|device| (&device.path, device.options()));
    for (path, options) in file.into_iter().chain(device) {
        for (aio, shared) in [(Aio::Threads, false), (Aio::IoUring, false), (Aio::IoUring, true)] {
            println!("{:?} aio={aio} shared={shared}", options.driver);
            let ring = shared.then(shared_ring);
            let options = Options { aio, ..options.clone() };
            let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
            // What was written is in the cache, of a device as long as somebody has it open.
            std::fs::write(path, content).unwrap();
            test(&mut rig);
        }
    }
}

/// Whether a file's system knows `RWF_NOWAIT`; a line says so where it does not.
pub(super) fn reads_without_waiting(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    let mut byte = [0; 1];
    let piece = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    // SAFETY: one piece, of memory of ours.
    let result = unsafe { libc::preadv2(file.as_raw_fd(), &raw const piece, 1, 0, libc::RWF_NOWAIT) };
    let can = result >= 0 || Errno::from_io_error(&std::io::Error::last_os_error()) == Some(Errno::AGAIN);
    if !can {
        egret_needs::this_test_lacks("a file system for the build that can read without waiting (RWF_NOWAIT)");
    }
    can
}

/// Takes a file's content out of the page cache; false, and a line that says so, where it stays there.
pub(super) fn evict(path: &Path) -> bool {
    let file = File::open(path).unwrap();
    // A page that the kernel has in its hands at the moment stays, once.
    let gone = (0..100).any(|_| {
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        cached_pages(path) == 0
    });
    if !gone {
        egret_needs::this_test_lacks("a file system for the build whose files leave the page cache");
    }
    gone
}

/// How many pages of a file the page cache has.
pub(super) fn cached_pages(path: &Path) -> usize {
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len() as usize;
    let mut pages = vec![0u8; len.div_ceil(rustix::param::page_size())];
    // SAFETY: a new mapping, of nothing that anybody uses, that is gone before its length is forgotten.
    let told = unsafe {
        let base = rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &file, 0).unwrap();
        let told = libc::mincore(base, len, pages.as_mut_ptr());
        rustix::mm::munmap(base, len).unwrap();
        told
    };
    assert_eq!(told, 0, "mincore");
    pages.into_iter().filter(|page| page & 1 == 1).count()
}

impl Rig {
    /// Submits what was pushed; whether all of it has been answered when that returns.
    fn answers_at_once(&mut self) -> bool {
        self.engines.submit(clock::now());
        if self.engines.has_completions() {
            self.reap();
        }
        self.engines.in_flight() == 0
    }

    fn cached(&self) -> u64 {
        self.engines.counters().read().cached
    }

    /// Requests that engines have taken.
    fn taken(&self) -> u64 {
        self.engines.counters().read().engines.iter().map(|engine| engine.requests).sum()
    }
}

#[test]
fn a_cached_read_is_answered_in_the_turn_that_asked_for_it() {
    let content = pattern(1 << 20, 1);
    through_the_cache(&content, |rig| {
        for round in 0..20 {
            let at = round * 40960;
            let read = rig.push_read(at as u64, Memory::new(4096, 0));
            assert!(!rig.engines.has_completions(), "nothing happens before a submission");
            assert!(rig.answers_at_once());
            let (result, memory) = rig.finish(read);
            assert!(result == Ok(()) && memory.unwrap().data() == &content[at..][..4096]);
        }
        assert_eq!((rig.cached(), rig.taken()), (20, 0));
        assert!(rig.engines.counters().read().engines.iter().all(|engine| engine.submissions == 0));
    });
}

#[test]
fn a_cached_read_finds_every_piece_of_its_memory() {
    let content = pattern(1 << 20, 2);
    through_the_cache(&content, |rig| {
        let read = rig.push_read(1536, Memory::pieces(&[512, 4096, 3, 1533], 7));
        assert!(rig.answers_at_once());
        assert_eq!(rig.finish(read).1.unwrap().data(), &content[1536..][..6144]);
        assert_eq!((rig.cached(), rig.taken()), (1, 0));
    });
}

#[test]
fn a_read_that_is_not_cached_comes_by_the_engine() {
    let content = pattern(1 << 20, 3);
    for (aio, shared) in [(Aio::Threads, false), (Aio::IoUring, false), (Aio::IoUring, true)] {
        let image = Image::beside_the_build(&content);
        if !reads_without_waiting(&image.path) || !evict(&image.path) {
            return;
        }
        let options = Options { aio, ..image.options() };
        // The kernel reads ahead although it may not wait, and a disk that is fast enough has the pages there before it
        // has looked: then once more.
        let rig = (0..100).find_map(|_| {
            if !evict(&image.path) {
                return None;
            }
            let ring = shared.then(shared_ring);
            let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
            assert_eq!(rig.read(512 << 10, 65536), &content[512 << 10..][..65536]);
            assert_eq!(rig.cached() + rig.taken(), 1);
            (rig.taken() == 1).then_some(rig)
        });
        // Where it is so each time, a read of which only the beginning is there comes by the engine as well.
        let mut rig = rig.unwrap_or_else(|| {
            let ring = shared.then(shared_ring);
            let mut rig = Rig::with(&options, EngineOptions { ring, ..EngineOptions::default() });
            let file = File::options().write(true).open(&image.path).unwrap();
            file.set_len((512 << 10) + 4096).unwrap();
            let read = rig.push_read(512 << 10, Memory::new(65536, 0));
            assert_eq!((rig.finish(read).0, rig.cached(), rig.taken()), (Err(Errno::IO), 0, 1));
            file.set_len(1 << 20).unwrap();
            rig
        });
        // The next one is not tried, although it would be found; the one after it is.
        for cached in [0, 1] {
            assert_eq!(rig.read(512 << 10, 4096), &content[512 << 10..][..4096]);
            assert_eq!(rig.cached(), cached);
        }
    }
}

#[test]
fn a_write_is_seen_by_the_cached_read_that_follows_it() {
    through_the_cache(&pattern(1 << 20, 4), |rig| {
        for round in 0..20 {
            let data = pattern(4096, 100 + round);
            rig.write(round % 3 * 4096, &data).unwrap();
            assert_eq!(rig.read(round % 3 * 4096, 4096), data);
        }
        assert_eq!(rig.cached(), 20);
    });
}

#[test]
fn reads_that_come_together_go_to_the_engine_together() {
    let content = pattern(1 << 20, 5);
    through_the_cache(&content, |rig| {
        let reads = [0, 8192, 4096].map(|at| (at as usize, rig.push_read(at, Memory::new(4096, 0))));
        for (at, read) in reads {
            let (result, memory) = rig.finish(read);
            assert!(result == Ok(()) && memory.unwrap().data() == &content[at..][..4096]);
        }
        let stats = rig.engines.counters().read();
        let engine = stats.engines.iter().find(|engine| engine.requests > 0).unwrap();
        assert_eq!((stats.cached, engine.requests, engine.submissions), (0, 3, 1));
    });
}

#[test]
fn a_read_beside_others_in_flight_goes_to_the_engine() {
    through_the_cache(&pattern(1 << 20, 6), |rig| {
        let driver = Driver::Null { size: 1 << 20, latency: Nanos(1), read_zeroes: false };
        let slow = Arc::new(Disk::open(&Options::new("null0", driver)).unwrap());
        let slow = rig.engines.attach(&slow).unwrap();
        let cached = std::mem::replace(&mut rig.slot, slow);
        rig.push_read(0, Memory::new(512, 0));
        rig.engines.submit(clock::now());
        rig.slot = cached;
        let read = rig.push_read(0, Memory::new(4096, 0));
        assert_eq!(rig.finish(read).0, Ok(()));
        assert_eq!((rig.cached(), rig.taken()), (0, 2));
    });
}

#[test]
fn what_is_no_read_or_a_long_one_goes_to_the_engine() {
    through_the_cache(&pattern(1 << 20, 7), |rig| {
        rig.write(0, &pattern(4096, 8)).unwrap();
        rig.run(Op::Flush, 0, 0).unwrap();
        rig.read(0, (64 << 10) + 512);
        assert_eq!((rig.cached(), rig.taken()), (0, 3));
        rig.read(0, 64 << 10);
        assert_eq!((rig.cached(), rig.taken()), (1, 3));
    });
}

#[test]
fn a_hole_reads_as_zeroes_whoever_answers() {
    for aio in [Aio::Threads, Aio::IoUring] {
        let image = Image::of(&[]);
        File::options().write(true).open(&image.path).unwrap().set_len(1 << 20).unwrap();
        let mut rig = Rig::new(&Options { aio, ..image.options() });
        for _ in 0..4 {
            assert_eq!(rig.read(65536, 8192), [0; 8192]);
        }
    }
}

#[test]
fn a_read_past_the_end_of_an_image_that_was_made_shorter_comes_by_the_engine() {
    let content = pattern(65536, 9);
    for aio in [Aio::Threads, Aio::IoUring] {
        let image = Image::of(&content);
        let mut rig = Rig::new(&Options { aio, ..image.options() });
        File::options().write(true).open(&image.path).unwrap().set_len(6144).unwrap();
        for at in [4096, 32768] {
            let read = rig.push_read(at, Memory::new(4096, 0));
            assert_eq!(rig.finish(read).0, Err(Errno::IO));
        }
        assert_eq!((rig.cached(), rig.taken()), (0, 2));
    }
}

#[test]
fn direct_reads_never_ask_the_page_cache() {
    let image = Image::of(&pattern(1 << 20, 10));
    for aio in [Aio::Threads, Aio::Native, Aio::IoUring] {
        let mut rig = Rig::new(&Options { aio, direct: true, ..image.options() });
        for _ in 0..4 {
            rig.read(0, 4096);
        }
        assert_eq!((rig.cached(), rig.taken()), (0, 4));
    }
}

#[test]
fn memory_that_its_owner_takes_away_fails_the_read_and_nothing_else() {
    through_the_cache(&pattern(1 << 20, 11), |rig| {
        let memory = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 8192).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which stays until the process ends.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 8192, access, MapFlags::SHARED, memory.as_fd(), 0) };
        rustix::fs::ftruncate(&memory, 0).unwrap();
        // SAFETY: mapped; nobody but the kernel touches it.
        let buffers = unsafe { Lent::assume(vec![IoVec::new(base.unwrap().cast(), 4096)]) };
        let request = Request { op: Op::Read, offset: 0, len: 4096, buffers, token: RequestToken(1 << 40) };
        rig.engines.push(rig.slot, request);
        assert_eq!(rig.finish(1 << 40).0, Err(Errno::FAULT));
        assert_eq!((rig.cached(), rig.taken(), rig.failed.len()), (0, 1, 0));
        assert_eq!(rig.read(4096, 512), &pattern(1 << 20, 11)[4096..][..512]);
    });
}

#[test]
fn a_disk_that_is_detached_before_its_read_is_answered_is_let_go_of_then() {
    through_the_cache(&pattern(1 << 20, 12), |rig| {
        let read = rig.push_read(0, Memory::new(4096, 0));
        let slot = rig.slot;
        rig.engines.detach(slot);
        assert!(Arc::strong_count(&rig.disk) > 1);
        assert!(rig.answers_at_once());
        assert_eq!(rig.finish(read).0, Ok(()));
        assert_eq!((Arc::strong_count(&rig.disk), rig.cached()), (1, 1));
    });
}
