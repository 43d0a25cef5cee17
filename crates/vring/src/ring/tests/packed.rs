//! What only packed rings have: whose a descriptor is, places with wrap counters, and what a driver can do wrong there.

use proptest::prelude::*;
use proptest::sample::Index;

use crate::memory::iovecs;
use crate::ring::{Area, Chain, Driver, DriverConfig, PACKED_BASE, QueueConfig, RingError, Used};
use crate::testing::{DATA, DATA_LEN, Guest, RING, piece};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

const START: u16 = PACKED_BASE as u16;

fn config(size: u16) -> DriverConfig {
    DriverConfig { size, packed: true, event_idx: false, indirect: None, base: START }
}

/// `struct pvirtq_desc`.
fn descriptor(addr: u64, len: u32, id: u16, flags: u16) -> Vec<u8> {
    [&addr.to_le_bytes()[..], &len.to_le_bytes(), &id.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// The place that is `count` descriptors from the beginning.
fn place(count: u64, size: u16) -> u16 {
    let (slot, lap) = (count % u64::from(size), count / u64::from(size));
    slot as u16 | if lap.is_multiple_of(2) { 0x8000 } else { 0 }
}

impl Guest {
    /// Makes a descriptor available on the first lap, without the driver.
    fn lay(&self, slot: u16, addr: u64, len: u32, id: u16, flags: u16) {
        self.write(RING + 16 * u64::from(slot), &descriptor(addr, len, id, flags | AVAIL));
    }
}

/// Descriptors on the first lap of a ring of 16 break the queue for this reason, and it stays broken.
fn breaks(descriptors: &[(u64, u32, u16, u16)], reason: RingError) {
    let mut guest = Guest::new(config(16));
    for (slot, &(addr, len, id, flags)) in (0..).zip(descriptors) {
        guest.lay(slot, addr, len, id, flags);
    }
    let mut chain = Chain::new();
    assert!(guest.queue.is_available());
    assert_eq!(guest.queue.pop(&mut chain), Err(reason));
    assert_eq!(guest.queue.pop(&mut chain), Err(reason), "for good");
    assert_eq!(guest.queue.broken(), Some(reason));
    assert!(!guest.queue.is_available(), "nothing to spin for");
    assert!(guest.queue.arm_kicks(), "nor to stay awake for");
    assert!(!guest.queue.publish_used(), "and nothing to tell");
    assert_eq!((guest.queue.in_flight(), guest.queue.next_available()), (0, START));
}

#[test]
fn a_buffer_id_that_does_not_exist_breaks_the_queue() {
    for id in [16, 17, 65535] {
        breaks(&[(DATA, 1, id, 0)], RingError::NoSuchBuffer { id, size: 16 });
        breaks(&[(DATA, 1, 0, NEXT), (DATA, 1, id, 0)], RingError::NoSuchBuffer { id, size: 16 });
    }
}

#[test]
fn a_chain_without_an_end_breaks_the_queue() {
    breaks(&[(DATA, 1, 0, NEXT); 16], RingError::TooLong { limit: 16 });
}

#[test]
fn a_chain_into_descriptors_that_are_out_breaks_the_queue() {
    let mut guest = Guest::new(config(4));
    (0..4).for_each(|slot| guest.lay(slot, DATA, 1, slot, if slot > 1 { NEXT } else { 0 }));
    let mut chain = Chain::new();
    assert!(guest.queue.pop(&mut chain).unwrap() && guest.queue.pop(&mut chain).unwrap());
    guest.queue.add_used(1, 0);
    // One has been used, but the driver cannot know that yet.
    assert_eq!(guest.queue.pop(&mut chain), Err(RingError::NotUsed(0)));
    guest.queue.add_used(0, 0);
    assert!(guest.queue.publish_used());
}

#[test]
fn descriptors_made_available_a_lap_too_early_break_the_queue() {
    let mut guest = Guest::new(config(4));
    (0..4).for_each(|slot| guest.lay(slot, DATA, 1, slot, 0));
    let mut chain = Chain::new();
    (0..4).for_each(|_| assert!(guest.queue.pop(&mut chain).unwrap()));
    assert!(!guest.queue.pop(&mut chain).unwrap());
    guest.write(RING, &descriptor(DATA, 1, 0, USED));
    assert_eq!(guest.queue.pop(&mut chain), Err(RingError::NotUsed(0)));
    (0..4).for_each(|id| guest.queue.abandon(id));
}

#[test]
fn a_buffer_id_that_is_in_flight_breaks_the_queue() {
    let mut guest = Guest::new(config(16));
    guest.lay(0, DATA, 1, 7, 0);
    guest.lay(1, DATA, 1, 7, 0);
    let mut chain = Chain::new();
    assert!(guest.queue.pop(&mut chain).unwrap());
    assert_eq!(guest.queue.pop(&mut chain), Err(RingError::Duplicate(7)));
    // What was in flight still ends.
    guest.queue.add_used(7, 0);
    assert!(guest.queue.publish_used());
}

#[test]
fn buffers_and_tables_outside_memory_break_the_queue() {
    let end = DATA + DATA_LEN;
    for (addr, len) in [(0, 1), (RING - 1, 2), (end, 1), (end - 1, 2), (DATA, u32::MAX), (u64::MAX, 2)] {
        breaks(&[(addr, len, 0, WRITE)], RingError::BufferOutside { addr, len });
        breaks(&[(DATA, 1, 0, NEXT), (addr, len, 0, 0)], RingError::BufferOutside { addr, len });
    }
    for (addr, len) in [(0, 16), (end - 15, 16), (end, 16), (u64::MAX - 3, 32)] {
        breaks(&[(addr, len, 0, INDIRECT)], RingError::TableOutside { addr, len });
    }
    for len in [0, 1, 15, 17, 0x10_0000, u32::MAX] {
        breaks(&[(DATA, len, 0, INDIRECT)], RingError::TableLength(len));
    }
}

#[test]
fn a_readable_buffer_behind_a_writable_one_breaks_the_queue() {
    breaks(&[(DATA, 1, 0, WRITE | NEXT), (DATA, 1, 0, 0)], RingError::ReadableAfterWritable);
}

#[test]
fn a_table_is_the_whole_of_its_chain() {
    breaks(&[(DATA, 16, 0, INDIRECT | NEXT), (DATA, 1, 0, 0)], RingError::IndirectWithNext);
    breaks(&[(DATA, 1, 0, NEXT), (DATA, 16, 0, INDIRECT)], RingError::IndirectInChain);
}

#[test]
fn a_table_in_a_table_breaks_the_queue() {
    for at in 0..2 {
        let mut guest = Guest::new(config(16));
        guest.lay(0, DATA, 32, 0, INDIRECT);
        (0..2).for_each(|index| guest.write(DATA + 16 * index, &descriptor(DATA, 16, 0, 0)));
        guest.write(DATA + 16 * at, &descriptor(DATA, 16, 0, INDIRECT));
        assert_eq!(guest.queue.pop(&mut Chain::new()), Err(RingError::IndirectInIndirect));
    }
}

#[test]
fn an_endless_table_is_followed_only_so_far() {
    breaks(&[(DATA, 16 * 1025, 0, INDIRECT)], RingError::TooLong { limit: 1024 });
}

#[test]
fn in_a_table_descriptors_follow_each_other_whatever_their_ids_and_flags_say() {
    let mut guest = Guest::new(config(16));
    guest.lay(0, DATA, 48, 9, INDIRECT | WRITE);
    for (index, flags) in [(0, NEXT), (1, AVAIL | USED), (2, WRITE | NEXT)] {
        guest.write(DATA + 16 * index, &descriptor(DATA + 0x100 * index, 4, 0xffff, flags));
    }
    let mut chain = Chain::new();
    assert!(guest.queue.pop(&mut chain).unwrap());
    assert_eq!((chain.head(), chain.readable().len(), chain.writable().len()), (9, 2, 1));
    assert_eq!((chain.readable_len, chain.writable_len), (8, 4));
    guest.queue.abandon(9);
}

#[test]
fn a_descriptor_changed_after_it_was_read_changes_nothing() {
    let mut guest = Guest::new(config(16));
    guest.lay(0, DATA, 8, 3, 0);
    let mut chain = Chain::new();
    assert!(guest.queue.pop(&mut chain).unwrap());
    guest.lay(0, 0, u32::MAX, 4, NEXT);
    assert_eq!(chain.readable()[0].base(), guest.memory.slice(DATA, 8).unwrap().base());
    guest.queue.add_used(3, 0);
    assert_eq!(guest.queue.next_used(), START + 1);
}

#[test]
fn a_ring_that_cannot_be_does_not_start() {
    let guest = Guest::new(config(16));
    let good = guest.driver.queue();
    let refused = |config: QueueConfig| config.start(&guest.memory).unwrap_err();
    for size in [0, 32769, 65535] {
        assert_eq!(refused(QueueConfig { size, ..good }), RingError::PackedSize(size));
    }
    for (base, slot) in [(0x8000_8010, 16), (0x0010_8000, 16), (0x7fff_0000, 0x7fff)] {
        assert_eq!(refused(QueueConfig { base, ..good }), RingError::Base { slot, size: 16 });
    }
    let misaligned = |area, addr, align| RingError::Alignment { area, addr, align };
    let (desc, avail, used) = (good.desc + 8, good.avail + 2, good.used + 2);
    assert_eq!(refused(QueueConfig { desc, ..good }), misaligned(Area::Ring, desc, 16));
    assert_eq!(refused(QueueConfig { avail, ..good }), misaligned(Area::DriverEvents, avail, 4));
    assert_eq!(refused(QueueConfig { used, ..good }), misaligned(Area::DeviceEvents, used, 4));
    let end = DATA + DATA_LEN;
    for addr in [0, end, !15] {
        let outside = |area, len| RingError::AreaOutside { area, addr, len };
        assert_eq!(refused(QueueConfig { desc: addr, ..good }), outside(Area::Ring, 256));
        assert_eq!(refused(QueueConfig { avail: addr, ..good }), outside(Area::DriverEvents, 4));
        assert_eq!(refused(QueueConfig { used: addr, ..good }), outside(Area::DeviceEvents, 4));
    }
    assert!(QueueConfig { avail: end - 4, used: end - 8, ..good }.start(&guest.memory).is_ok(), "to the last byte");
}

#[test]
fn the_driver_takes_back_only_what_is_out() {
    let mut guest = Guest::new(config(16));
    for id in [0, 16, 65535] {
        guest.write(RING, &descriptor(0, 0, id, AVAIL | USED));
        assert_eq!(guest.driver.reap(), Err(RingError::NotAvailable(id.into())));
    }
}

#[test]
fn a_batch_is_shown_by_the_flags_of_its_first_descriptor() {
    let mut guest = Guest::new(config(16));
    for token in 0..3 {
        guest.driver.add(&[piece(DATA, 1)], &[piece(DATA, 1)], token).unwrap();
    }
    guest.driver.publish();
    let mut chain = Chain::new();
    while guest.queue.pop(&mut chain).unwrap() {}
    let memory = std::sync::Arc::clone(&guest.memory);
    let flags = |slot: u64| {
        let mut bytes = [0; 2];
        assert!(memory.read(RING + 16 * slot + 14, &mut bytes));
        u16::from_le_bytes(bytes) & (AVAIL | USED | WRITE)
    };
    guest.queue.add_used(2, 1);
    guest.queue.add_used(0, 1);
    assert_eq!((flags(0), flags(2)), (AVAIL, AVAIL | USED | WRITE), "the second is there, the first is not");
    assert!(guest.queue.publish_used());
    assert_eq!((flags(0), flags(2)), (AVAIL | USED | WRITE, AVAIL | USED | WRITE));
    guest.queue.add_used(1, 0);
    guest.queue.publish_used();
    assert_eq!(flags(4), AVAIL | USED, "nothing was written");
}

#[test]
fn a_place_is_told_with_its_wrap_counter() {
    for size in [1, 3, 16] {
        let mut guest = Guest::new(config(size));
        let mut chain = Chain::new();
        for count in 1..=3 * u64::from(size) {
            guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
            guest.driver.publish();
            assert!(guest.queue.pop(&mut chain).unwrap());
            let at = place(count, size);
            assert_eq!(guest.queue.next_available(), at);
            guest.queue.add_used(chain.head(), 0);
            guest.queue.publish_used();
            guest.driver.reap().unwrap().unwrap();
            let at_rest = guest.queue.stop();
            assert_eq!(at_rest.base, u32::from(at) << 16 | u32::from(at));
            guest.queue = at_rest.start(&guest.memory).unwrap();
        }
    }
}

#[test]
fn a_ring_that_has_been_used_is_told_from_one_that_begins() {
    for chains in 1..6 {
        let mut guest = Guest::new(config(4));
        assert!(!guest.driver.queue().has_lost_its_place(&guest.memory).unwrap());
        let mut chain = Chain::new();
        for _ in 0..chains {
            guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
            guest.driver.publish();
            assert!(guest.queue.pop(&mut chain).unwrap());
            guest.queue.add_used(chain.head(), 0);
            guest.queue.publish_used();
            guest.driver.reap().unwrap().unwrap();
        }
        let at_rest = guest.queue.stop();
        assert!(!at_rest.has_lost_its_place(&guest.memory).unwrap());
        let lost = QueueConfig { base: PACKED_BASE, ..at_rest };
        assert!(lost.has_lost_its_place(&guest.memory).unwrap(), "after {chains} chains");
    }
}

#[test]
fn what_was_used_but_not_shown_is_used_again_by_who_comes_after() {
    let mut guest = Guest::new(config(16));
    guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
    guest.driver.publish();
    let mut chain = Chain::new();
    assert!(guest.queue.pop(&mut chain).unwrap());
    guest.queue.add_used(chain.head(), 0);
    assert_eq!(guest.queue.stop().base, u32::from(START) << 16 | u32::from(START + 1));
}

#[test]
fn events_with_reserved_flags_or_without_their_feature_are_told() {
    for flags in [0, 2, 3, 0xffff] {
        let mut guest = Guest::new(config(16));
        let mut chain = Chain::new();
        guest.write(guest.driver.queue().avail + 2, &u16::to_le_bytes(flags));
        // The first batch is told in any case; of the second the place that is there is none.
        for batch in 0..2 {
            guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
            guest.driver.publish();
            assert!(guest.queue.pop(&mut chain).unwrap());
            guest.queue.add_used(chain.head(), 0);
            assert!(guest.queue.publish_used(), "flags {flags}, batch {batch}");
        }
    }
}

/// What happens between two looks at the ring.
#[derive(Clone, Debug)]
struct Batch {
    /// How many readable and writable buffers each chain to add has.
    chains: Vec<(usize, usize)>,
    /// How many of the chains in flight to use, and each which of those left.
    used: Vec<Index>,
    restarts: bool,
}

fn batch() -> impl Strategy<Value = Batch> {
    let chain = (0usize..4, 0usize..4).prop_map(|(readable, writable)| (readable.max(1), writable));
    let used = prop::collection::vec(any::<Index>(), 0..8);
    (prop::collection::vec(chain, 0..6), used, prop::bool::weighted(0.1)).prop_map(|(chains, used, restarts)| Batch {
        chains,
        used,
        restarts,
    })
}

proptest! {
    /// Any chains in any order, in rings of any size: each comes out as it was put in and back under its own name, and
    /// the driver sees used chains in the order in which they were used, after they were published.
    #[test]
    fn what_is_put_in_comes_out_and_back(
        size in 1u16..40,
        event_idx: bool,
        indirect: bool,
        start: u16,
        batches in prop::collection::vec(batch(), 1..if cfg!(miri) { 4 } else { 60 }),
    ) {
        let base = (start % size) | (start & 0x8000);
        let indirect = indirect.then_some(8);
        let mut guest = Guest::new(DriverConfig { size, packed: true, event_idx, indirect, base });
        let (mut chain, mut token) = (Chain::new(), 0);
        let (mut added, mut in_flight, mut back) = (Vec::new(), Vec::new(), Vec::new());
        for Batch { chains, used, restarts } in batches {
            for (readable, writable) in chains {
                let buffers = |count| vec![piece(DATA + token, 3); count];
                if guest.driver.add(&buffers(readable), &buffers(writable), token).is_ok() {
                    added.push((token, readable, writable));
                }
                token += 1;
            }
            prop_assert!(!guest.queue.is_available());
            guest.driver.publish();
            for (token, readable, writable) in added.drain(..) {
                prop_assert!(guest.queue.pop(&mut chain).unwrap());
                prop_assert_eq!((chain.readable().len(), chain.writable().len()), (readable, writable));
                prop_assert_eq!(iovecs::total(chain.writable()), 3 * writable as u64);
                let addr = guest.memory.slice(DATA + token, 1).unwrap().base();
                prop_assert_eq!(chain.readable()[0].base(), addr);
                in_flight.push((chain.head(), token));
            }
            prop_assert!(!guest.queue.pop(&mut chain).unwrap());
            for which in used {
                if in_flight.is_empty() {
                    break;
                }
                let (head, token) = in_flight.swap_remove(which.index(in_flight.len()));
                guest.queue.add_used(head, token as u32);
                back.push(Used { token, written: token as u32 });
            }
            prop_assert!(!guest.driver.has_used());
            guest.queue.publish_used();
            for used in back.drain(..) {
                prop_assert_eq!(guest.driver.reap().unwrap(), Some(used));
            }
            prop_assert_eq!(guest.driver.reap().unwrap(), None);
            if restarts && in_flight.is_empty() {
                guest.queue = guest.queue.stop().start(&guest.memory).unwrap();
            }
        }
        in_flight.into_iter().for_each(|(head, _)| guest.queue.abandon(head));
    }

    /// 2.8.10: a side is told of a batch if and only if the place that it waits for is among those of the batch.
    #[test]
    fn events_are_told_when_their_place_is_passed(
        size in 1u16..20,
        batches in prop::collection::vec((1u16..20, 0u64..40), 1..40),
    ) {
        let mut guest = Guest::new(DriverConfig { size, packed: true, event_idx: true, indirect: None, base: START });
        let (mut chain, mut count, mut first) = (Chain::new(), 0u64, true);
        let config = guest.driver.queue();
        for (batch, ahead) in batches {
            let batch = batch.min(size);
            // Up to a lap behind and ahead: further off, a place has the name of another.
            let lap = u64::from(size);
            let Some(event) = (count + ahead % (2 * lap)).checked_sub(lap / 2) else { continue };
            if event >= count + u64::from(batch) && event - count > lap {
                continue;
            }
            let end = count + u64::from(batch);
            let is_passed = (count..end).contains(&event);
            for area in [config.avail, config.used] {
                guest.write(area, &place(event, size).to_le_bytes());
                guest.write(area + 2, &2u16.to_le_bytes());
            }
            for _ in 0..batch {
                guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
            }
            prop_assert_eq!(guest.driver.publish(), is_passed);
            while guest.queue.pop(&mut chain).unwrap() {
                guest.queue.add_used(chain.head(), 0);
            }
            // Nobody knows what the driver was told before the first batch.
            prop_assert_eq!(guest.queue.publish_used(), is_passed || first);
            (count, first) = (end, false);
            while guest.driver.reap().unwrap().is_some() {}
        }
    }
}

#[test]
fn a_driver_s_ring_that_cannot_be_is_not_laid_out() {
    let memory = crate::testing::memory();
    let refused = |config| Driver::new(&memory, RING, config).unwrap_err();
    assert_eq!(refused(DriverConfig { size: 0, ..config(16) }), RingError::PackedSize(0));
    assert_eq!(refused(DriverConfig { base: 16, ..config(16) }), RingError::Base { slot: 16, size: 16 });
}
