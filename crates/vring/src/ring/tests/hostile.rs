//! What a driver must not do, one by one: each breaks the queue, says why, and leaves every other queue alone.

use std::sync::Arc;

use crate::memory::{GuestMemory, Region};
use crate::ring::{Area, Chain, Driver, DriverConfig, QueueConfig, RingError};
use crate::testing::{DATA, DATA_LEN, Guest, RING, descriptor, piece};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A guest with two rings in one memory, the second of which does as it should.
struct Pair {
    bad: Guest,
    good: Guest,
}

impl Pair {
    fn new() -> Self {
        let config = DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 };
        let bad = Guest::new(config);
        let driver = Driver::new(&bad.memory, RING + 0x10_0000, config).unwrap();
        let queue = driver.queue().start(&bad.memory).unwrap();
        let good = Guest { memory: Arc::clone(&bad.memory), driver, queue };
        Self { bad, good }
    }

    /// The bad queue breaks for this reason, stays broken, and the good one goes on.
    fn breaks(mut self, reason: RingError) {
        let mut chain = Chain::new();
        let (available, in_flight) = (self.bad.queue.next_available(), self.bad.queue.in_flight());
        assert_eq!(self.bad.queue.pop(&mut chain), Err(reason));
        assert_eq!(self.bad.queue.broken(), Some(reason));
        assert_eq!(self.bad.queue.pop(&mut chain), Err(reason), "for good");
        assert!(!self.bad.queue.is_available(), "nothing to spin for");
        assert!(self.bad.queue.arm_kicks(), "nor to stay awake for");
        assert!(!self.bad.queue.publish_used(), "and nothing to tell");
        assert_eq!((self.bad.queue.next_available(), self.bad.queue.in_flight()), (available, in_flight));

        self.good.driver.add(&[piece(DATA, 1)], &[], 7).unwrap();
        self.good.driver.publish();
        assert!(self.good.queue.pop(&mut chain).unwrap());
        self.good.queue.add_used(chain.head(), 0);
        assert!(self.good.queue.publish_used());
        assert_eq!(self.good.driver.reap().unwrap().unwrap().token, 7);
    }
}

#[test]
fn an_index_that_runs_ahead_breaks_the_queue_and_nothing_else() {
    for ahead in [17, 18, 1000, 32768, 65535] {
        let pair = Pair::new();
        let avail = pair.bad.driver.queue().avail;
        pair.bad.write(avail + 2, &u16::to_le_bytes(ahead));
        pair.breaks(RingError::IndexAhead { available: ahead, popped: 0, size: 16 });
    }
}

#[test]
fn an_index_as_far_ahead_as_there_are_descriptors_is_none_too_far() {
    let mut pair = Pair::new();
    (0..16).for_each(|index| pair.bad.describe(index, DATA, 1, 0, 0));
    pair.bad.offer(&(0..16).collect::<Vec<_>>());
    let mut chain = Chain::new();
    for head in 0..16 {
        assert!(pair.bad.queue.pop(&mut chain).unwrap());
        assert_eq!(chain.head(), head);
    }
    assert!(!pair.bad.queue.pop(&mut chain).unwrap());
    (0..16).for_each(|head| pair.bad.queue.abandon(head));
}

#[test]
fn a_head_that_does_not_exist_breaks_the_queue_and_nothing_else() {
    for head in [16, 17, 255, 65535] {
        let pair = Pair::new();
        pair.bad.offer(&[head]);
        pair.breaks(RingError::NoSuchDescriptor { index: head, len: 16 });
    }
}

#[test]
fn a_next_that_does_not_exist_breaks_the_queue_and_nothing_else() {
    for next in [16, 65535] {
        let pair = Pair::new();
        pair.bad.describe(0, DATA, 1, NEXT, next);
        pair.bad.offer(&[0]);
        pair.breaks(RingError::NoSuchDescriptor { index: next, len: 16 });
    }
}

#[test]
fn a_chain_that_loops_breaks_the_queue_and_nothing_else() {
    let pair = Pair::new();
    pair.bad.describe(0, DATA, 1, NEXT, 0);
    pair.bad.offer(&[0]);
    pair.breaks(RingError::TooLong { limit: 16 });

    let pair = Pair::new();
    (0..16).for_each(|index| pair.bad.describe(index, DATA, 1, NEXT, (index + 1) % 16));
    pair.bad.offer(&[5]);
    pair.breaks(RingError::TooLong { limit: 16 });
}

#[test]
fn a_table_that_loops_breaks_the_queue_and_nothing_else() {
    let pair = Pair::new();
    pair.bad.describe(0, DATA, 32, INDIRECT, 0);
    pair.bad.write(DATA, &descriptor(DATA, 1, NEXT, 1));
    pair.bad.write(DATA + 16, &descriptor(DATA, 1, NEXT, 0));
    pair.bad.offer(&[0]);
    pair.breaks(RingError::TooLong { limit: 2 });
}

#[test]
#[cfg_attr(miri, ignore = "takes long")]
fn an_endless_table_is_followed_only_so_far() {
    let pair = Pair::new();
    pair.bad.describe(0, DATA, 65535 * 16, INDIRECT, 0);
    for index in 0..65535 {
        pair.bad.write(DATA + 16 * u64::from(index), &descriptor(DATA, 1, NEXT, index + 1));
    }
    pair.bad.offer(&[0]);
    pair.breaks(RingError::TooLong { limit: 1024 });
}

#[test]
fn a_next_outside_its_table_breaks_the_queue_and_nothing_else() {
    let pair = Pair::new();
    pair.bad.describe(0, DATA, 32, INDIRECT, 0);
    pair.bad.write(DATA, &descriptor(DATA, 1, NEXT, 2));
    pair.bad.offer(&[0]);
    pair.breaks(RingError::NoSuchDescriptor { index: 2, len: 2 });
}

#[test]
fn a_buffer_outside_memory_breaks_the_queue_and_nothing_else() {
    let end = DATA + DATA_LEN;
    for (addr, len) in
        [(0, 1), (RING - 1, 1), (RING - 1, 2), (end, 1), (end - 1, 2), (DATA, u32::MAX), (u64::MAX, 1), (u64::MAX, 2)]
    {
        for flags in [0, WRITE] {
            let pair = Pair::new();
            pair.bad.describe(0, addr, len, flags, 0);
            pair.bad.offer(&[0]);
            pair.breaks(RingError::BufferOutside { addr, len });
        }
    }
}

#[test]
fn a_table_outside_memory_breaks_the_queue_and_nothing_else() {
    let end = DATA + DATA_LEN;
    for (addr, len) in [(0, 16), (end - 15, 16), (end, 16), (u64::MAX - 3, 32)] {
        let pair = Pair::new();
        pair.bad.describe(0, addr, len, INDIRECT, 0);
        pair.bad.offer(&[0]);
        pair.breaks(RingError::TableOutside { addr, len });
    }
}

#[test]
fn a_table_of_no_good_length_breaks_the_queue_and_nothing_else() {
    for len in [0, 1, 15, 17, 0x10_0000, 0xffff_fff0, u32::MAX] {
        let pair = Pair::new();
        pair.bad.describe(0, DATA, len, INDIRECT, 0);
        pair.bad.offer(&[0]);
        pair.breaks(RingError::TableLength(len));
    }
}

#[test]
fn a_table_in_a_table_breaks_the_queue_and_nothing_else() {
    let pair = Pair::new();
    pair.bad.describe(0, DATA, 16, INDIRECT, 0);
    pair.bad.write(DATA, &descriptor(DATA, 16, INDIRECT, 0));
    pair.bad.offer(&[0]);
    pair.breaks(RingError::IndirectInIndirect);
}

#[test]
fn a_table_with_a_next_breaks_the_queue_and_nothing_else() {
    let pair = Pair::new();
    pair.bad.describe(0, DATA, 16, INDIRECT | NEXT, 1);
    pair.bad.offer(&[0]);
    pair.breaks(RingError::IndirectWithNext);
}

#[test]
fn a_readable_buffer_behind_a_writable_one_breaks_the_queue_and_nothing_else() {
    let pair = Pair::new();
    pair.bad.describe(0, DATA, 1, WRITE | NEXT, 1);
    pair.bad.describe(1, DATA, 1, 0, 0);
    pair.bad.offer(&[0]);
    pair.breaks(RingError::ReadableAfterWritable);
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn more_than_4_gib_in_a_chain_breaks_the_queue_and_nothing_else() {
    // The same gigabyte over and over: a file of it need not be there to be mapped.
    for (flags, limit) in [([0; 4], 4), ([0, 0, WRITE, WRITE], 4)] {
        let pair = Pair::new();
        let big = Region::anonymous(1 << 40, 1 << 30).unwrap();
        let memory = Arc::new(pair.bad.memory.with(big).unwrap());
        let mut pair = Pair { bad: Guest { memory: Arc::clone(&memory), ..pair.bad }, ..pair };
        pair.bad.queue.replace_memory(&memory).unwrap();
        for (index, flags) in (0..limit).zip(flags) {
            let flags = if index + 1 < limit { flags | NEXT } else { flags };
            pair.bad.describe(index, 1 << 40, 1 << 30, flags, index + 1);
        }
        pair.bad.offer(&[0]);
        pair.breaks(RingError::TooMuch);
    }
}

/// Where there are regions of one page each, and how many.
const PATCHED: u64 = 1 << 40;
const PATCHES: u64 = 100;

/// A pair whose bad half has memory that is in pieces.
fn patched() -> Pair {
    let pair = Pair::new();
    let patch = |patch| Region::anonymous(PATCHED + 4096 * patch, 4096).unwrap();
    let first = pair.bad.memory.with(patch(0)).unwrap();
    let memory = Arc::new((1..PATCHES).fold(first, |memory, at| memory.with(patch(at)).unwrap()));
    let mut pair = Pair { bad: Guest { memory: Arc::clone(&memory), ..pair.bad }, ..pair };
    pair.bad.queue.replace_memory(&memory).unwrap();
    pair
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn a_chain_of_more_pieces_than_are_taken_breaks_the_queue_and_nothing_else() {
    // Ten buffers across all regions, and one that makes it the most that are taken, or one more.
    let eleven = |last_pages: u32| {
        let pair = patched();
        for index in 0..10 {
            let flags = if index == 0 { NEXT } else { NEXT | WRITE };
            pair.bad.describe(index, PATCHED, 4096 * PATCHES as u32, flags, index + 1);
        }
        pair.bad.describe(10, PATCHED, 4096 * last_pages, WRITE, 0);
        pair.bad.offer(&[0]);
        pair
    };
    let mut good = eleven(26);
    let mut chain = Chain::new();
    assert!(good.bad.queue.pop(&mut chain).unwrap());
    assert_eq!((chain.readable().len(), chain.writable().len()), (100, 926));
    good.bad.queue.abandon(0);
    eleven(27).breaks(RingError::TooManyIoVecs { iovecs: 1027 });
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn a_chain_of_many_pieces_is_followed_no_further_than_it_may_be_long() {
    // A table whose buffers have 65,536 pieces together, of which it takes the first seventeen buffers to see that.
    let pair = patched();
    for index in 0..1024 {
        pair.bad.write(DATA + 16 * index, &descriptor(PATCHED, 4096 * 64, NEXT | WRITE, index as u16 + 1));
    }
    pair.bad.describe(0, DATA, 1024 * 16, INDIRECT, 0);
    pair.bad.offer(&[0]);
    pair.breaks(RingError::TooManyIoVecs { iovecs: 17 * 64 });

    // The ring's own descriptors count as do those of the table that they lead to.
    let pair = patched();
    (0..3).for_each(|index| pair.bad.describe(index, DATA, 1, NEXT, index + 1));
    for index in 0..1024 {
        pair.bad.write(DATA + 16 * index, &descriptor(DATA, 1, if index < 1023 { NEXT } else { 0 }, index as u16 + 1));
    }
    pair.bad.describe(3, DATA, 1024 * 16, INDIRECT, 0);
    pair.bad.offer(&[0]);
    pair.breaks(RingError::TooManyIoVecs { iovecs: 1027 });
}

#[test]
fn a_chain_made_available_while_in_flight_breaks_the_queue_and_nothing_else() {
    let mut pair = Pair::new();
    pair.bad.describe(4, DATA, 1, 0, 0);
    pair.bad.offer(&[4, 4]);
    let mut chain = Chain::new();
    assert!(pair.bad.queue.pop(&mut chain).unwrap());
    assert_eq!(pair.bad.queue.pop(&mut chain), Err(RingError::Duplicate(4)));
    // What was in flight still ends.
    pair.bad.queue.add_used(4, 0);
    assert!(pair.bad.queue.publish_used());
    pair.breaks(RingError::Duplicate(4));
}

#[test]
fn the_same_head_again_is_good_once_it_was_used() {
    let mut pair = Pair::new();
    pair.bad.describe(4, DATA, 1, 0, 0);
    pair.bad.offer(&[4, 4]);
    let mut chain = Chain::new();
    for _ in 0..2 {
        assert!(pair.bad.queue.pop(&mut chain).unwrap());
        pair.bad.queue.add_used(4, 0);
    }
}

#[test]
fn a_descriptor_changed_after_it_was_read_changes_nothing() {
    let mut pair = Pair::new();
    pair.bad.describe(0, DATA, 8, 0, 0);
    pair.bad.offer(&[0]);
    let mut chain = Chain::new();
    assert!(pair.bad.queue.pop(&mut chain).unwrap());
    pair.bad.describe(0, 0, u32::MAX, NEXT, 0);
    assert_eq!(chain.readable()[0].base(), pair.bad.memory.slice(DATA, 8).unwrap().base());
    assert_eq!(chain.readable()[0].len(), 8);
    pair.bad.queue.abandon(0);
}

#[test]
fn a_ring_that_cannot_be_does_not_start() {
    let guest = Guest::new(DriverConfig { size: 16, packed: false, event_idx: true, indirect: None, base: 0 });
    let good = guest.driver.queue();
    let refused = |config: QueueConfig| config.start(&guest.memory).unwrap_err();
    for size in [0, 3, 17, 65535] {
        assert_eq!(refused(QueueConfig { size, ..good }), RingError::Size(size));
    }
    let (desc, avail, used) = (good.desc + 8, good.avail + 1, good.used + 2);
    let misaligned = |area, addr, align| RingError::Alignment { area, addr, align };
    assert_eq!(refused(QueueConfig { desc, ..good }), misaligned(Area::Descriptors, desc, 16));
    assert_eq!(refused(QueueConfig { avail, ..good }), misaligned(Area::Available, avail, 2));
    assert_eq!(refused(QueueConfig { used, ..good }), misaligned(Area::Used, used, 4));
    let end = DATA + DATA_LEN;
    for addr in [0, end, end - 16, !15] {
        let outside = |area, len| RingError::AreaOutside { area, addr, len };
        assert_eq!(refused(QueueConfig { desc: addr, ..good }), outside(Area::Descriptors, 256));
        assert_eq!(refused(QueueConfig { avail: addr, ..good }), outside(Area::Available, 4 + 32 + 2));
        assert_eq!(refused(QueueConfig { used: addr, ..good }), outside(Area::Used, 4 + 128 + 2));
    }
    // To the last byte, the event included only where it is used.
    let avail = end - 4 - 32;
    assert!(QueueConfig { avail, event_idx: false, ..good }.start(&guest.memory).is_ok());
    assert!(matches!(refused(QueueConfig { avail, ..good }), RingError::AreaOutside { .. }));
}

#[test]
fn what_is_said_of_a_ring_names_the_area() {
    for (area, name) in [
        (Area::Descriptors, "descriptor table"),
        (Area::Available, "available ring"),
        (Area::Used, "used ring"),
        (Area::Ring, "descriptor ring"),
        (Area::DriverEvents, "driver event area"),
        (Area::DeviceEvents, "device event area"),
    ] {
        let told = RingError::AreaOutside { area, addr: 0x1000, len: 4 }.to_string();
        assert_eq!(told, format!("{name} at 0x1000 of 4 bytes is outside guest memory"));
    }
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn an_area_aligned_for_the_guest_alone_does_not_start() {
    let region = Region { offset: 1, size: 0xfff, ..Region::anonymous(0x1000, 0x1000).unwrap() };
    let memory = Arc::new(GuestMemory::empty().with(region).unwrap());
    let config = QueueConfig {
        size: 4,
        desc: 0x1000,
        avail: 0x1100,
        used: 0x1200,
        base: 0,
        packed: false,
        event_idx: false,
        log: None,
    };
    let error = config.start(&memory).unwrap_err();
    assert_eq!(error, RingError::Alignment { area: Area::Descriptors, addr: 0x1000, align: 16 });
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn a_ring_whose_memory_is_taken_away_is_read_as_zeroes_and_its_map_is_torn() {
    let region = Region::anonymous(RING, 0x10_0000).unwrap();
    let file = region.file.try_clone().unwrap();
    let memory = Arc::new(GuestMemory::empty().with(region).unwrap());
    let config = DriverConfig { size: 16, packed: false, event_idx: true, indirect: None, base: 0 };
    let mut driver = Driver::new(&memory, RING, config).unwrap();
    let mut queue = driver.queue().start(&memory).unwrap();
    driver.add(&[piece(RING, 1)], &[], 0).unwrap();
    driver.publish();
    file.set_len(0).unwrap();
    assert!(!queue.is_available());
    assert!(!queue.pop(&mut Chain::new()).unwrap());
    assert!(queue.arm_kicks());
    assert!(memory.is_truncated());
}
