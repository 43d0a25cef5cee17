//! What the device's half does for a driver that keeps to the rules.

use std::sync::Arc;

use proptest::prelude::*;

use super::super::area::{Descriptor, Descriptors};
use super::super::need_event;
use crate::memory::{Access, Buffers, GuestMemory, IoVec, Region, iovecs};
use crate::ring::{Chain, Driver, DriverConfig, Full, Piece, QueueConfig, RingError, Used};
use crate::testing::{DATA, Guest, RING, descriptor, memory, piece};

/// All eight kinds of ring. The split ones begin at `base`, the packed ones as far into the ring.
fn configs(base: u16) -> impl Iterator<Item = DriverConfig> {
    let kinds = [(false, None), (false, Some(8)), (true, None), (true, Some(8))];
    let both = [(false, base), (true, 0x8000 | (base % 16))];
    both.into_iter().flat_map(move |(packed, base)| {
        let config = move |(event_idx, indirect)| DriverConfig { size: 16, packed, event_idx, indirect, base };
        kinds.into_iter().map(config)
    })
}

#[test]
fn a_chain_comes_out_as_it_was_put_in() {
    for config in configs(0) {
        let mut guest = Guest::new(config);
        let mut chain = Chain::new();
        assert!(!guest.queue.is_available());
        assert!(!guest.queue.pop(&mut chain).unwrap());
        let readable = [piece(DATA, 16), piece(DATA + 100, 7)];
        let writable = [piece(DATA + 0x1000, 4096), piece(DATA + 0x3001, 1)];
        guest.driver.add(&readable, &writable, 99).unwrap();
        assert!(!guest.queue.is_available(), "not before it is published");
        assert!(guest.driver.publish());
        assert!(guest.queue.is_available());
        assert!(guest.queue.pop(&mut chain).unwrap());
        let host = |Piece { addr, len }: Piece| guest.memory.slice(addr, len as usize).unwrap();
        let same = |ours: &[IoVec], theirs: &[Piece]| {
            let theirs = theirs.iter().map(|&piece| host(piece));
            assert!(ours.iter().map(|p| (p.base(), p.len())).eq(theirs.map(|p| (p.base(), p.len()))));
        };
        same(chain.readable(), &readable);
        same(chain.writable(), &writable);
        assert_eq!((chain.readable_len(), chain.writable_len(), chain.bytes()), (23, 4097, 4120));
        assert_eq!(chain.iovecs(), 4);
        assert_eq!(chain.writable_mut().split_off(1).len(), 1);
        assert_eq!((chain.writable().len(), chain.writable_len()), (1, 4097), "as it was popped");
        assert_eq!(guest.queue.in_flight(), 1);
        assert!((0..=16).all(|head| guest.queue.is_in_flight(head) == (head == chain.head())));
        assert!(!guest.queue.pop(&mut chain).unwrap());

        guest.queue.add_used(chain.head(), 4097);
        assert_eq!(guest.queue.in_flight(), 0);
        assert!(!guest.queue.is_in_flight(chain.head()));
        assert!(!guest.driver.has_used(), "not before it is published");
        assert!(guest.queue.publish_used());
        assert!(guest.driver.has_used());
        assert!(!guest.queue.publish_used(), "nothing new");
        assert_eq!(guest.driver.reap().unwrap(), Some(Used { token: 99, written: 4097 }));
        assert_eq!(guest.driver.reap().unwrap(), None);
        assert_eq!(guest.driver.free(), 16);
    }
}

#[test]
fn indices_wrap_any_number_of_times() {
    for config in configs(65530) {
        let mut guest = Guest::new(config);
        let mut chain = Chain::new();
        let mut heads = Vec::new();
        let (mut added, mut reaped) = (0u64, 0);
        while reaped < if cfg!(miri) { 50 } else { 150_000 } {
            // Batches of one to five, used in reverse, so that they come back out of order.
            for _ in 0..1 + added % 5 {
                let data = piece(DATA + added % 1000, 8);
                guest.driver.add(&[data], &[piece(DATA + 4096, 1)], added).unwrap();
                added += 1;
            }
            guest.driver.publish();
            while guest.queue.pop(&mut chain).unwrap() {
                let at = chain.readable()[0].base() as u64 - guest.memory.slice(DATA, 1).unwrap().base() as u64;
                heads.push((chain.head(), at));
            }
            heads.reverse();
            for (head, at) in heads.drain(..) {
                guest.queue.add_used(head, at as u32);
            }
            guest.queue.publish_used();
            while let Some(Used { token, written }) = guest.driver.reap().unwrap() {
                assert_eq!(token % 1000, u64::from(written));
                reaped += 1;
            }
        }
        assert_eq!((reaped, guest.driver.free()), (added, 16));
    }
}

#[test]
fn a_full_ring_takes_no_more_and_loses_nothing() {
    for config in configs(0) {
        let mut guest = Guest::new(config);
        let (mut chain, mut added) = (Chain::new(), 0);
        let three = [piece(DATA, 1), piece(DATA, 2), piece(DATA, 3)];
        while guest.driver.add(&three, &[], added).is_ok() {
            added += 1;
        }
        assert_eq!(added, if config.indirect.is_some() { 16 } else { 5 });
        guest.driver.publish();
        let mut popped = 0;
        while guest.queue.pop(&mut chain).unwrap() {
            assert_eq!(iovecs::total(chain.readable()), 6);
            guest.queue.add_used(chain.head(), 0);
            popped += 1;
        }
        guest.queue.publish_used();
        assert_eq!(popped, added);
        for token in 0..added {
            assert_eq!(guest.driver.reap().unwrap().unwrap().token, token);
        }
        let nine = [piece(DATA, 1); 9];
        let too_long = guest.driver.add(&nine, &[], 0);
        assert_eq!(too_long, if config.indirect.is_some() { Err(Full) } else { Ok(()) });
    }
}

#[test]
fn a_batch_is_published_and_notified_of_once() {
    for config in configs(0) {
        let mut guest = Guest::new(config);
        let mut chain = Chain::new();
        for token in 0..4 {
            guest.driver.add(&[piece(DATA, 1)], &[], token).unwrap();
        }
        assert!(guest.driver.publish());
        assert!(!guest.driver.publish());
        for used in 0..4 {
            assert!(guest.queue.pop(&mut chain).unwrap());
            guest.queue.add_used(chain.head(), used);
            assert!(!guest.driver.has_used());
        }
        assert!(guest.queue.publish_used());
        assert!(!guest.queue.publish_used());
        assert_eq!((0..4).map(|_| guest.driver.reap().unwrap().unwrap().written).collect::<Vec<_>>(), [0, 1, 2, 3]);
    }
}

/// Sends one chain there and back; whether the device was kicked, and the driver notified.
fn round(guest: &mut Guest) -> (bool, bool) {
    guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
    let kicked = guest.driver.publish();
    let mut chain = Chain::new();
    assert!(guest.queue.pop(&mut chain).unwrap());
    guest.queue.add_used(chain.head(), 0);
    let notified = guest.queue.publish_used();
    assert!(guest.driver.reap().unwrap().is_some());
    (kicked, notified)
}

#[test]
fn kicks_and_notifications_come_only_when_asked_for() {
    for config in configs(65533) {
        let mut guest = Guest::new(config);
        assert_eq!(round(&mut guest), (true, true), "a ring begins armed");
        guest.queue.suppress_kicks();
        guest.driver.suppress_calls();
        for _ in 0..20 {
            assert_eq!(round(&mut guest), (false, false));
        }
        assert!(guest.queue.arm_kicks());
        assert_eq!(round(&mut guest), (true, false));
        guest.queue.suppress_kicks();
        assert!(guest.driver.arm_calls());
        assert_eq!(round(&mut guest), (false, true));
    }
}

#[test]
fn arming_sees_what_slipped_in() {
    for config in configs(0) {
        let mut guest = Guest::new(config);
        guest.queue.suppress_kicks();
        guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
        guest.driver.publish();
        assert!(!guest.queue.arm_kicks());
        let mut chain = Chain::new();
        assert!(guest.queue.pop(&mut chain).unwrap());
        assert!(guest.queue.arm_kicks());
        guest.queue.add_used(chain.head(), 0);
        guest.queue.publish_used();
        assert!(!guest.driver.arm_calls());
    }
}

/// 2.7.10, of every event and every batch that a queue can have. Where the batch begins makes no difference, but for where
/// the indices overflow: it begins at the ends of that, and in between.
#[test]
#[cfg_attr(miri, ignore = "millions of cases, and no memory")]
fn of_all_events_those_are_due_whose_entries_are_in_the_batch() {
    for old in [0, 1, 0x7fff, 0x8000, u16::MAX - 1024, u16::MAX] {
        for count in (0..=64).chain([1023, 1024]) {
            for ahead in 0..=u16::MAX {
                let event = old.wrapping_add(ahead);
                assert_eq!(need_event(event, old.wrapping_add(count), old), ahead < count, "{event} {old} {count}");
            }
        }
    }
}

proptest! {
    /// 2.7.10: notify if and only if `event` is among the entries just published.
    #[test]
    fn an_event_is_due_when_its_entry_is_passed(event: u16, old: u16, count in 0u16..=4096) {
        let passed = (0..count).any(|at| old.wrapping_add(at) == event);
        prop_assert_eq!(need_event(event, old.wrapping_add(count), old), passed);
    }

    /// Over any run of batches with the driver re-arming now and then, the device notifies for exactly those batches in
    /// which the used index passes the driver's event, and without EVENT_IDX for those with the flag clear.
    #[test]
    fn notifications_are_as_the_driver_asked(
        event_idx: bool,
        base: u16,
        batches in prop::collection::vec((1u16..=16, 0u16..40, any::<bool>()), 1..40),
    ) {
        let mut guest = Guest::new(DriverConfig { size: 16, packed: false, event_idx, indirect: None, base });
        let (mut chain, mut used, mut first) = (Chain::new(), base, true);
        let config = guest.driver.queue();
        for (count, ahead, quiet) in batches {
            let event = used.wrapping_add(ahead).wrapping_sub(4);
            let expected = if event_idx {
                guest.write(config.avail + 4 + 2 * 16, &event.to_le_bytes());
                // Nobody knows what the driver was told before the first batch.
                first || (0..count).any(|at| used.wrapping_add(at) == event)
            } else {
                guest.write(config.avail, &u16::from(quiet).to_le_bytes());
                !quiet
            };
            for _ in 0..count {
                guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
            }
            guest.driver.publish();
            while guest.queue.pop(&mut chain).unwrap() {
                guest.queue.add_used(chain.head(), 0);
            }
            prop_assert_eq!(guest.queue.publish_used(), expected);
            used = used.wrapping_add(count);
            first = false;
            while guest.driver.reap().unwrap().is_some() {}
        }
    }
}

#[test]
fn a_queue_that_stops_goes_on_where_it_was() {
    for config in configs(65535) {
        let mut guest = Guest::new(config);
        round(&mut guest);
        let at_rest = guest.queue.stop();
        assert_eq!(at_rest, QueueConfig { base: 0, ..guest.driver.queue() });
        guest.driver.add(&[piece(DATA, 1)], &[], 5).unwrap();
        guest.driver.publish();
        guest.queue = at_rest.start(&guest.memory).unwrap();
        assert_eq!((guest.queue.next_available(), guest.queue.next_used()), (0, 0));
        assert!(guest.queue.is_available());
        let mut chain = Chain::new();
        assert!(guest.queue.pop(&mut chain).unwrap());
        guest.queue.add_used(chain.head(), 1);
        assert!(guest.queue.publish_used(), "nobody knows what the driver was told before");
        assert_eq!(guest.driver.reap().unwrap(), Some(Used { token: 5, written: 1 }));
    }
}

#[test]
fn a_queue_that_stops_says_where() {
    for config in configs(3) {
        let mut guest = Guest::new(config);
        round(&mut guest);
        let (base, next) = if config.packed { (0x8004_8004, 0x8004) } else { (4, 4) };
        assert_eq!((guest.queue.next_available(), guest.queue.next_used()), (next, next));
        assert_eq!(guest.queue.stop(), QueueConfig { base, ..guest.driver.queue() });
    }
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn memory_is_replaced_only_when_nothing_is_in_flight() {
    for config in configs(0) {
        let mut guest = Guest::new(config);
        let mut chain = Chain::new();
        guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
        guest.driver.publish();
        assert!(guest.queue.pop(&mut chain).unwrap());
        let more = Arc::new(guest.memory.with(Region::anonymous(0, 4096).unwrap()).unwrap());
        assert_eq!(guest.queue.replace_memory(&more), Err(RingError::InFlight(1)));
        assert_eq!(guest.queue.broken(), None);
        guest.queue.add_used(chain.head(), 0);
        guest.queue.replace_memory(&more).unwrap();
        assert!(Arc::ptr_eq(guest.queue.memory(), &more));
        guest.queue.publish_used();
        guest.driver.reap().unwrap().unwrap();
        // Buffers in the new region are seen now.
        guest.driver.add(&[piece(0, 4096)], &[], 0).unwrap();
        guest.driver.publish();
        assert!(guest.queue.pop(&mut chain).unwrap());
        guest.queue.add_used(chain.head(), 0);

        let elsewhere = Arc::new(GuestMemory::empty());
        assert!(matches!(guest.queue.replace_memory(&elsewhere), Err(RingError::AreaOutside { .. })));
        assert!(guest.queue.broken().is_some());
        assert!(!guest.queue.is_available());
        guest.queue.publish_used();
    }
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn a_ring_is_where_the_map_of_its_queue_has_it() {
    for config in configs(0) {
        let mut guest = Guest::new(config);
        guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
        guest.driver.publish();
        assert!(guest.queue.is_available());
        let other = memory();
        let mut driver = Driver::new(&other, RING, config).unwrap();
        guest.queue.replace_memory(&other).unwrap();
        assert!(!guest.queue.is_available());
        driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
        driver.publish();
        assert!(guest.queue.is_available());
    }
}

#[test]
fn a_queue_dropped_with_memory_lent_leaves_it_mapped() {
    let mut guest = Guest::new(DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 });
    let mut chain = Chain::new();
    guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
    guest.driver.publish();
    assert!(guest.queue.pop(&mut chain).unwrap());
    let lent = guest.queue.lend(chain.readable().to_vec().into(), Access::Read).unwrap();
    let holders = Arc::strong_count(&guest.memory);
    drop(guest.queue);
    assert_eq!(Arc::strong_count(&guest.memory), holders, "for good");

    let mut again = guest.driver.queue().start(&guest.memory).unwrap();
    let own = again.lend(chain.readable().to_vec().into(), Access::Read).unwrap();
    again.take_back(lent);
    assert_eq!(again.replace_memory(&guest.memory), Err(RingError::InFlight(1)), "that was another's");
    again.take_back(own);
    drop(again);
    assert_eq!(Arc::strong_count(&guest.memory), holders);
}

#[test]
fn a_queue_keeps_its_map_while_memory_of_it_is_lent_even_if_no_chain_is_in_flight() {
    let mut guest = Guest::new(DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 });
    let mut chain = Chain::new();
    guest.driver.add(&[piece(DATA, 1)], &[], 0).unwrap();
    guest.driver.publish();
    assert!(guest.queue.pop(&mut chain).unwrap());
    let lent = guest.queue.lend(chain.readable().to_vec().into(), Access::Read).unwrap();
    guest.queue.add_used(chain.head(), 0);
    let other = memory();
    assert_eq!(guest.queue.replace_memory(&other), Err(RingError::InFlight(1)));
    guest.queue.take_back(lent);
    assert_eq!(guest.queue.replace_memory(&other), Ok(()));
}

#[test]
fn a_queue_lends_nothing_but_its_own_map_s_memory_and_what_goes_along() {
    let mut guest = Guest::new(DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 });
    let ours = guest.memory.slice(DATA, 8).unwrap();
    let theirs = memory().slice(DATA, 8).unwrap();
    let own = Buffers::own(vec![7; 16], vec![ours]);
    let of_own = own.to_vec();
    for pieces in [vec![theirs], vec![ours, theirs], of_own] {
        let count = pieces.len();
        assert_eq!(guest.queue.lend(pieces.into(), Access::Read).unwrap_err().len(), count, "they come back");
    }
    let lent = guest.queue.lend(own, Access::Read).unwrap();
    assert_eq!(lent.iter().map(IoVec::len).collect::<Vec<_>>(), [16]);
    let (pieces, bytes) = guest.queue.take_back(lent).into_parts();
    assert_eq!((pieces.len(), bytes), (1, Some(vec![7; 16])));
}

#[test]
#[cfg_attr(miri, ignore = "maps files")]
fn buffers_and_indirect_tables_may_cross_adjacent_regions() {
    let seam = RING + 0x10_0000;
    let memory = GuestMemory::empty().with(Region::anonymous(RING, seam - RING).unwrap()).unwrap();
    let memory = Arc::new(memory.with(Region::anonymous(seam, 0x1000).unwrap()).unwrap());
    let mut driver =
        Driver::new(&memory, RING, DriverConfig { size: 4, packed: false, event_idx: false, indirect: None, base: 0 })
            .unwrap();
    let mut queue = driver.queue().start(&memory).unwrap();
    let mut chain = Chain::new();
    driver.add(&[piece(seam - 10, 30)], &[], 0).unwrap();
    driver.publish();
    assert!(queue.pop(&mut chain).unwrap());
    assert_eq!(chain.readable().iter().map(|p| p.len()).collect::<Vec<_>>(), [10, 20]);
    assert_eq!(chain.readable_len, 30);
    queue.add_used(chain.head(), 0);

    // A table of three whose middle descriptor lies across the seam, at an odd address besides.
    let table = seam - 16 - 7;
    let all = [descriptor(RING, 1, 1, 1), descriptor(RING, 2, 1, 2), descriptor(RING, 3, 2, 0)].concat();
    assert!(memory.write(table, &all));
    assert!(memory.write(driver.queue().desc + 16, &descriptor(table, 48, 4, 0)));
    assert!(memory.write(driver.queue().avail + 4 + 2, &1u16.to_le_bytes()));
    assert!(memory.write(driver.queue().avail + 2, &2u16.to_le_bytes()));
    assert!(queue.pop(&mut chain).unwrap());
    assert_eq!((chain.readable_len, chain.writable_len), (3, 3));
    queue.abandon(1);

    // Of such a table, too, a chain goes on no further than there are descriptors.
    assert!(memory.write(table, &descriptor(RING, 1, 1, 3)));
    assert!(memory.write(driver.queue().avail + 4 + 4, &1u16.to_le_bytes()));
    assert!(memory.write(driver.queue().avail + 2, &3u16.to_le_bytes()));
    assert_eq!(queue.pop(&mut chain), Err(RingError::NoSuchDescriptor { index: 3, len: 3 }));
}

#[test]
fn a_driver_lays_its_areas_out_one_behind_the_other_each_on_a_line_of_its_own() {
    let config = |packed, size, indirect| DriverConfig { size, packed, event_idx: true, indirect, base: 0 };
    for (config, [used, avail, bytes]) in [
        (config(false, 1, None), [64, 128, 192]),
        (config(false, 16, None), [256, 448, 512]),
        (config(false, 64, Some(3)), [1024, 1024 + 576, 1024 + 576 + 192 + 16 * 64 * 3]),
        (config(true, 3, None), [64, 128, 192]),
        (config(true, 20, Some(5)), [320, 384, 448 + 16 * 20 * 5]),
    ] {
        let queue = config.queue(RING);
        assert_eq!((queue.desc, queue.used, queue.avail), (RING, RING + used, RING + avail), "{config:?}");
        assert_eq!(config.bytes(), bytes, "{config:?}");
        // It has that memory to the last byte that it is going to use.
        let needed = if config.indirect.is_some() { bytes } else { bytes - 64 + 1 };
        let on = |bytes| Driver::new(&Arc::new(GuestMemory::allocated(RING, bytes)), RING, config).map(drop);
        assert_eq!(on(bytes), Ok(()), "{config:?}");
        assert!(on(needed - 1).is_err(), "{config:?}");
    }
}

#[test]
fn a_driver_has_a_table_for_two_buffers_and_none_for_one() {
    const INDIRECT: u16 = 4;
    for config in configs(0).filter(|config| config.indirect.is_some()) {
        for (buffers, is_indirect) in [(1, false), (2, true), (8, true)] {
            let mut guest = Guest::new(config);
            guest.driver.add(&vec![piece(DATA, 1); buffers], &[], 0).unwrap();
            guest.driver.publish();
            let first = if config.packed { u64::from(config.base & 0x7fff) } else { 0 };
            let flags_at = if config.packed { 14 } else { 12 };
            let flags = u16::from_le_bytes(guest.read(RING + 16 * first + flags_at));
            assert_eq!(flags & INDIRECT != 0, is_indirect, "{buffers} of {config:?}");
            let mut chain = Chain::new();
            assert!(guest.queue.pop(&mut chain).unwrap());
            assert_eq!(chain.iovecs() as usize, buffers);
            guest.queue.add_used(chain.head(), 0);
        }
    }
}

#[test]
fn an_indirect_table_may_lie_anywhere() {
    let mut guest = Guest::new(DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 });
    let mut chain = Chain::new();
    for at in 0..16 {
        let table = DATA + 0x1000 + at;
        guest.write(table, &descriptor(DATA + 3, 0x11, 1, 1));
        guest.write(table + 16, &descriptor(DATA + 0x100, 0x2233, 2, 0));
        guest.describe(0, table, 32, 4, 0);
        guest.offer(&[0]);
        assert!(guest.queue.pop(&mut chain).unwrap());
        let lens = |pieces: &[IoVec]| pieces.iter().map(IoVec::len).collect::<Vec<_>>();
        assert_eq!((lens(chain.readable()), lens(chain.writable())), (vec![0x11], vec![0x2233]), "{at}");
        guest.queue.add_used(0, 0);
    }
}

#[test]
fn a_descriptor_is_stored_in_its_table_or_nowhere() {
    let guest = memory();
    let base = guest.slice(DATA, 64).unwrap().base();
    let stored = Descriptor { addr: 1, len: 2, flags: 3, next: 4 };
    let found = || {
        let mut found = [0; 64];
        assert!(guest.read(DATA, &mut found));
        found
    };
    // SAFETY: the memory stays, and has room for as many.
    let (table, odd) = unsafe { (Descriptors::at(base, 2), Descriptors::at(base.wrapping_add(1), 2)) };
    table.set(2, stored);
    odd.set(0, stored);
    odd.set(2, stored);
    assert_eq!(found(), [0; 64]);
    table.set(1, stored);
    assert_eq!((&found()[..16], &found()[16..32]), (&[0; 16][..], &descriptor(1, 2, 3, 4)[..]));
    assert_eq!(table.get(1), Ok(stored));
    assert!(table.get(2).is_err());
}

#[test]
fn a_chain_may_begin_in_the_ring_and_go_on_in_a_table() {
    // 2.7.5.3.2: normal descriptors, and then a single indirect one. The write flag means nothing on that.
    let mut guest = Guest::new(DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 });
    guest.describe(3, DATA, 16, 1, 5);
    guest.describe(5, DATA + 0x100, 32, 4 | 2, 0);
    guest.write(DATA + 0x100, &descriptor(DATA, 8, 1, 1));
    guest.write(DATA + 0x110, &descriptor(DATA, 4, 2, 0));
    guest.offer(&[3]);
    let mut chain = Chain::new();
    assert!(guest.queue.pop(&mut chain).unwrap());
    assert_eq!((chain.head(), chain.readable_len, chain.writable_len), (3, 24, 4));
    guest.queue.abandon(3);
}

#[test]
fn empty_buffers_are_left_out_wherever_they_point() {
    let mut guest = Guest::new(DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 });
    let mut chain = Chain::new();
    let nowhere = piece(u64::MAX, 0);
    guest.driver.add(&[nowhere, piece(DATA, 1), nowhere], &[nowhere, piece(DATA, 2)], 0).unwrap();
    guest.driver.publish();
    assert!(guest.queue.pop(&mut chain).unwrap());
    assert_eq!((chain.readable().len(), chain.writable().len()), (1, 1));
    guest.queue.abandon(chain.head());
}

#[test]
#[should_panic(expected = "is not in flight")]
fn a_chain_is_used_once() {
    let mut guest = Guest::new(DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 });
    round(&mut guest);
    guest.queue.add_used(0, 0);
}

#[test]
fn the_driver_takes_back_only_what_is_out() {
    let mut guest = Guest::new(DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 });
    let used = guest.driver.queue().used;
    for id in [0u32, 16, 0x1_0000, u32::MAX] {
        guest.write(used + 4, &id.to_le_bytes());
        guest.write(used + 2, &1u16.to_le_bytes());
        assert_eq!(guest.driver.reap(), Err(RingError::NotAvailable(id)));
    }
}
