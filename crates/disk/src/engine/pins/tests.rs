use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::rc::Rc;
use std::time::{Duration, Instant};

use egret_vring::memory::{MemoryFiles, MemoryRules, Region as GuestRegion};
use io_uring::{opcode, types};

use super::*;
use crate::tests::pinned::{piece, pinning, present};

const PAGES: u64 = 4096;

/// A ring, what is registered with it, and what a client was told.
struct Rig {
    ring: Ring,
    pins: Pins,
    counters: EngineCounters,
    file: File,
}

impl Rig {
    fn new() -> Self {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[7; 4096], 0).unwrap();
        Self { ring: Ring::new().unwrap(), pins: Pins::new(), counters: EngineCounters::default(), file }
    }

    fn pinned(&self) -> u64 {
        self.counters.pinned.get()
    }

    fn step(&mut self) {
        self.pins.step(&self.ring, &self.counters);
    }

    /// Steps until there is nothing to be done.
    fn settle(&mut self) {
        let begun = Instant::now();
        while self.pins.wanted || self.pins.leaving {
            self.step();
            assert!(begun.elapsed() < Duration::from_secs(60));
        }
    }

    /// Wants what `piece` is of until it is registered, and says by which buffer it is.
    fn await_buffer(&mut self, map: PinnedMap, piece: &IoVec) -> u16 {
        let begun = Instant::now();
        loop {
            if let Some(buffer) = self.pins.buffer(map, piece) {
                return buffer;
            }
            self.step();
            assert!(begun.elapsed() < Duration::from_secs(60));
        }
    }

    /// What comes of a read to `piece` by a buffer.
    fn read(&mut self, piece: &IoVec, buffer: u16) -> i32 {
        let fd = types::Fd(self.file.as_raw_fd());
        let read = opcode::ReadFixed::new(fd, piece.base(), piece.len() as u32, buffer).build();
        // SAFETY: the kernel writes to no memory but a buffer's, which is guest memory.
        unsafe { self.ring.push(read, 0) };
        loop {
            self.ring.wait(None).unwrap();
            self.ring.sort();
            if let Some(done) = self.ring.next_op() {
                return done.result;
            }
        }
    }
}

/// Whether anything is mapped there.
fn is_mapped(piece: &IoVec) -> bool {
    let mut page = [0];
    // SAFETY: it asks about one page, whatever that is.
    unsafe { libc::mincore(piece.base().cast(), 4096, page.as_mut_ptr()) == 0 }
}

#[test]
fn a_chunk_is_pinned_when_requests_come_to_it_and_no_other() {
    let mut rig = Rig::new();
    let len = (2 * CHUNK + 4096) as u64;
    let memory = present(&[len]);
    let map = rig.pins.enter(&rig.ring, pinning(&memory)).unwrap();
    let last = piece(&memory, len, 2 * CHUNK, 4096);
    assert_eq!(rig.pins.buffer(map, &last), None);
    rig.settle();
    assert_eq!(rig.pinned(), 4096);
    let buffer = rig.await_buffer(map, &last);
    assert_eq!(rig.read(&last, buffer), 4096);
    let mut data = [0; 4096];
    memory.gather(&[last], &mut data);
    assert_eq!(data, [7; 4096]);
    rig.await_buffer(map, &piece(&memory, len, CHUNK, 512));
    assert_eq!(rig.pinned(), 4096 + CHUNK as u64);
    rig.settle();
    let border = piece(&memory, len, CHUNK - 512, 1024);
    assert_eq!(rig.pins.buffer(map, &border), None);
    assert!(!rig.pins.wanted, "no chunk has all of it");
}

#[test]
fn what_is_not_there_is_not_made_and_is_pinned_when_it_is_there() {
    let mut rig = Rig::new();
    let region = GuestRegion::anonymous(0, PAGES << 12).unwrap();
    let file = region.file.try_clone().unwrap();
    let memory = Arc::new(GuestMemory::empty().with(region).unwrap());
    file.write_all_at(&[1; 4096], 0).unwrap();
    let map = rig.pins.enter(&rig.ring, pinning(&memory)).unwrap();
    let first = piece(&memory, PAGES << 12, 0, 4096);
    for _ in 0..5 {
        assert_eq!(rig.pins.buffer(map, &first), None);
        rig.settle();
    }
    assert_eq!((rig.pinned(), file.metadata().unwrap().blocks()), (0, 8));
    file.write_all_at(&vec![1; (PAGES << 12) as usize], 0).unwrap();
    rig.await_buffer(map, &first);
}

#[test]
fn a_buffer_stands_for_no_other_memory_and_for_nothing_when_it_is_released() {
    let mut rig = Rig::new();
    let len = 2 * CHUNK as u64;
    let memory = present(&[len]);
    let pieces = [0, CHUNK].map(|at| piece(&memory, len, at, 4096));
    let unmapped = Rc::new(RefCell::new(None));
    let keeps = Rc::clone(&unmapped);
    let give_back = Box::new(move |memory| *keeps.borrow_mut() = Some(memory));
    let map = rig.pins.enter(&rig.ring, Pinning { give_back, ..pinning(&memory) }).unwrap();
    let buffers = pieces.map(|piece| rig.await_buffer(map, &piece));
    assert_eq!(rig.read(&pieces[0], buffers[0]), 4096);
    assert_eq!(rig.read(&pieces[0], buffers[1]), -libc::EFAULT, "another chunk's");
    drop(memory);
    rig.pins.leave(map);
    while rig.pinned() > 0 {
        assert!(unmapped.borrow().is_none() && pieces.iter().all(is_mapped), "as long as there are buffers of it");
        rig.step();
    }
    rig.settle();
    for (piece, buffer) in pieces.iter().zip(buffers) {
        assert_eq!(rig.read(piece, buffer), -libc::EFAULT);
    }
    // Whoever is given it has the last of it.
    let kept = unmapped.borrow_mut().take().unwrap();
    assert!(Arc::strong_count(&kept) == 1 && pieces.iter().all(is_mapped));
}

#[test]
fn all_buffers_are_there_again_when_maps_have_come_and_gone() {
    let mut rig = Rig::new();
    for round in 0..3 {
        let lens = [4096 << round, 2 << 20];
        let memory = present(&lens);
        let map = rig.pins.enter(&rig.ring, pinning(&memory)).unwrap();
        for len in lens {
            rig.await_buffer(map, &piece(&memory, len, 0, 512));
        }
        rig.pins.leave(map);
        rig.settle();
        let Table::Made(free) = &rig.pins.table else { panic!("there is a table") };
        let numbers: std::collections::BTreeSet<_> = free.iter().collect();
        assert_eq!((free.len(), numbers.len(), rig.pinned()), (BUFFERS.into(), BUFFERS.into(), 0));
    }
}

#[test]
fn who_comes_back_before_all_is_released_finds_what_is_left() {
    let mut rig = Rig::new();
    let len = 2 * CHUNK as u64;
    let memory = present(&[len]);
    let map = rig.pins.enter(&rig.ring, pinning(&memory)).unwrap();
    let pieces = [0, CHUNK].map(|at| piece(&memory, len, at, 4096));
    for piece in &pieces {
        rig.await_buffer(map, piece);
    }
    rig.pins.leave(map);
    rig.step();
    assert_eq!(rig.pinned(), CHUNK as u64);
    // The same regions, of which another map is made when a log begins.
    let again = rig.pins.enter(&rig.ring, pinning(&Arc::new(memory.logging(None)))).unwrap();
    assert_eq!(again, map);
    rig.settle();
    assert_eq!(rig.pinned(), CHUNK as u64);
    for piece in &pieces {
        let buffer = rig.await_buffer(again, piece);
        assert_eq!(rig.read(piece, buffer), 4096);
    }
}

#[test]
fn a_client_with_as_much_memory_as_it_likes_leaves_buffers_to_others() {
    let mut rig = Rig::new();
    let lens = [4096, 8192, 12288, 16384, 20480, 24576];
    let greedy = present(&lens);
    let map = rig.pins.enter(&rig.ring, pinning(&greedy)).unwrap();
    rig.pins.table = Table::Made(vec![3, 2, 1, 0]);
    for len in lens {
        rig.pins.buffer(map, &piece(&greedy, len, 0, 512));
        rig.settle();
    }
    assert_eq!(rig.pins.maps[0].as_ref().unwrap().registered, 2);
    let modest = present(&[4096]);
    let other = rig.pins.enter(&rig.ring, pinning(&modest)).unwrap();
    rig.await_buffer(other, &piece(&modest, 4096, 0, 512));
}

#[test]
fn memory_that_cannot_be_pinned_is_told_of_once_and_not_tried_again() {
    let mut rig = Rig::new();
    // A file on a disk: the kernel pins no pages for writing that are to be written out.
    let test = std::env::current_exe().unwrap();
    let file = tempfile::tempfile_in(test.parent().unwrap()).unwrap();
    file.write_all_at(&[1; 8192], 0).unwrap();
    let rules = MemoryRules { files: MemoryFiles::Any, pin: true, ..MemoryRules::default() };
    let region = GuestRegion { guest_addr: 0, size: 8192, user_addr: 0, file, offset: 0 };
    let memory = [4096, 12288].into_iter().fold(GuestMemory::under(rules).with(region).unwrap(), |memory, len| {
        let other = GuestRegion::anonymous(len << 32, len).unwrap();
        other.file.write_all_at(&vec![1; len as usize], 0).unwrap();
        memory.with(other).unwrap()
    });
    let memory = Arc::new(memory);
    let told = Rc::new(Cell::new(0));
    let tells = Rc::clone(&told);
    let pinning = Pinning { tell: Box::new(move |_| tells.set(tells.get() + 1)), ..pinning(&memory) };
    let map = rig.pins.enter(&rig.ring, pinning).unwrap();
    rig.await_buffer(map, &piece(&memory, 4096, 0, 4096));
    assert_eq!(rig.pinned(), 4096);
    // What was pinned of it before is given back.
    assert_eq!(rig.pins.buffer(map, &piece(&memory, 8192, 0, 4096)), None);
    rig.step();
    for _ in 0..3 {
        assert_eq!(rig.pins.buffer(map, &piece(&memory, 12288, 0, 4096)), None);
        rig.settle();
        assert_eq!((told.get(), rig.pinned()), (1, 0));
    }
    assert_eq!(rig.pins.buffer(map, &piece(&memory, 8192, 0, 4096)), None);
    assert!(!rig.pins.wanted, "it is not tried again");
    rig.pins.leave(map);
    rig.settle();
    assert!(rig.pins.maps[0].is_none());
}

#[test]
fn a_step_is_followed_by_a_rest() {
    let mut rig = Rig::new();
    let memory = present(&[CHUNK as u64]);
    let map = rig.pins.enter(&rig.ring, pinning(&memory)).unwrap();
    let first = piece(&memory, CHUNK as u64, 0, 4096);
    rig.pins.buffer(map, &first);
    let (mut steps, mut rests) = (0, 0);
    loop {
        let now = clock::now();
        assert!(rig.pins.is_due(rig.pins.rest_until));
        rig.step();
        steps += 1;
        assert!(!rig.pins.is_due(now), "there is no next step in the same turn");
        // Unless somebody else had the processor for longer than that just now.
        rests += u32::from(!rig.pins.is_due(clock::now()));
        if rig.pins.buffer(map, &first).is_some() {
            break;
        }
    }
    assert!(rests > 0);
    assert_eq!(steps, CHUNK / SLICE + 1, "a slice at a time, and all of it when it is mapped");
}

#[test]
fn no_more_is_mapped_of_a_chunk_than_it_has() {
    let mut rig = Rig::new();
    let len = SLICE + 4096;
    let memory = present(&[len as u64]);
    let map = rig.pins.enter(&rig.ring, pinning(&memory)).unwrap();
    rig.pins.buffer(map, &piece(&memory, len as u64, 0, 4096));
    let mapped = [(); 2].map(|()| {
        rig.step();
        rig.pins.maps[0].as_ref().unwrap().begun
    });
    assert_eq!(mapped, [Some((0, SLICE)), Some((0, len))]);
}

#[test]
fn what_was_not_there_is_looked_for_less_and_less_often_and_once_a_second_at_least() {
    let mut rig = Rig::new();
    rig.pins.enter(&rig.ring, pinning(&present(&[4096]))).unwrap();
    let map = rig.pins.maps[0].as_mut().unwrap();
    let waits: Vec<Nanos> = (0..12)
        .map(|now| {
            map.wait(Nanos(now));
            map.not_before - Nanos(now)
        })
        .collect();
    let expected = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 1000].map(Nanos::from_millis);
    assert_eq!(waits, expected);
}

#[test]
fn memory_is_mapped_if_three_quarters_of_it_are_there() {
    for (there, is_mapped) in [(16, true), (12, true), (11, false), (0, false)] {
        let region = GuestRegion::anonymous(0, 16 << 12).unwrap();
        region.file.write_all_at(&vec![1; there << 12], 0).unwrap();
        let memory = GuestMemory::empty().with(region).unwrap();
        let whole = memory.mapped().next().unwrap();
        assert_eq!(map_what_is_there(whole.base(), whole.len()), is_mapped, "{there} pages of 16");
    }
}

#[test]
fn a_region_that_ends_with_a_chunk_ends_there_and_a_piece_of_no_length_is_in_none() {
    let mut rig = Rig::new();
    let memory = present(&[CHUNK as u64, 4096]);
    let map = rig.pins.enter(&rig.ring, pinning(&memory)).unwrap();
    let other = piece(&memory, 4096, 0, 4096);
    let buffer = rig.await_buffer(map, &other);
    assert_eq!((rig.read(&other, buffer), rig.pinned()), (4096, 4096));
    rig.settle();
    assert_eq!(rig.pins.buffer(map, &piece(&memory, CHUNK as u64, 0, 0)), None);
    // SAFETY: nobody touches what is there.
    let over = unsafe { IoVec::new(other.base().wrapping_add(512), 4096) };
    assert_eq!(rig.pins.buffer(map, &over), None, "it ends behind the region");
    assert!(!rig.pins.wanted);
}

#[test]
fn who_wants_much_is_pinned_no_more_in_a_time_than_who_wants_little() {
    let mut rig = Rig::new();
    let lens = [4096, 8192, 12288, 16384];
    let (greedy, idle, modest) = (present(&lens), present(&[4096]), present(&[4096]));
    let [much, _, little] = [&greedy, &idle, &modest].map(|memory| rig.pins.enter(&rig.ring, pinning(memory)).unwrap());
    let wanted = piece(&modest, 4096, 0, 512);
    while rig.pins.buffer(little, &wanted).is_none() {
        for len in lens {
            rig.pins.buffer(much, &piece(&greedy, len, 0, 512));
        }
        rig.step();
    }
    assert!(rig.pins.maps[0].as_ref().unwrap().registered <= 1);
}

#[test]
fn when_it_ends_nothing_is_registered_and_all_memory_is_given_back() {
    let mut rig = Rig::new();
    let memory = present(&[4096, 8192]);
    let given_back = Rc::new(Cell::new(0));
    let counts = Rc::clone(&given_back);
    let give_back = Box::new(move |_| counts.set(counts.get() + 1));
    let map = rig.pins.enter(&rig.ring, Pinning { give_back, ..pinning(&memory) }).unwrap();
    let pieces = [4096, 8192].map(|len| piece(&memory, len, 0, 4096));
    let buffers = pieces.map(|piece| rig.await_buffer(map, &piece));
    rig.pins.end(&rig.ring);
    assert_eq!(given_back.get(), 1);
    for (piece, buffer) in pieces.iter().zip(buffers) {
        assert_eq!(rig.read(piece, buffer), -libc::EFAULT);
    }
}
