//! What somebody may have written to the record of a packed ring, and what another daemon may have left.

use std::os::unix::fs::FileExt;

use proptest::prelude::*;

use super::{Guest, LAP, SIZE, VERSION, after, config, map, record, ring};
use crate::ring::{Chain, InflightConfig, MAX_SIZE, Queue, RecordError, RingError};
use crate::testing::memory;

/// Fields of a queue's record, as their offsets.
const FREE_HEAD: u64 = 12;
const USED_IDX: u64 = 16;
const USED_WRAP: u64 = 20;

/// Fields of the state of an entry.
const INFLIGHT: u64 = 0;
const NEXT: u64 = 2;
const LAST: u64 = 4;
const NUM: u64 = 6;
const ID: u64 = 16;
const FLAGS: u64 = 18;
const LEN: u64 = 20;
const ADDR: u64 = 24;

/// Where an entry's field is.
fn state(entry: u64, field: u64) -> u64 {
    32 * (1 + entry) + field
}

#[test]
fn a_record_that_makes_no_sense_is_refused_whoever_wrote_it() {
    let wrong = |at, value: u16| match after(true, at, &value.to_ne_bytes()) {
        Err(RingError::Record(why)) => why,
        other => panic!("{other:?}"),
    };
    // The first chain, in entry 0, is free again; the second is in entry 1, and the driver's first buffer IDs are 0 and 1.
    assert_eq!(after(true, state(1, LAST), &5u16.to_ne_bytes()), Ok(1), "how many they are says where a list ends");
    let old_used_idx = USED_IDX + 2;
    assert_eq!(wrong(USED_IDX, 8), RecordError::NoSuchSlot { slot: 8, ring: SIZE });
    assert_eq!(wrong(old_used_idx, LAP), RecordError::NoSuchSlot { slot: LAP, ring: SIZE });
    let lists = RecordError::Lists(SIZE);
    assert_eq!(wrong(FREE_HEAD, 3), lists, "an entry is lost");
    assert_eq!(wrong(FREE_HEAD, 8), lists, "none is free");
    assert_eq!(wrong(state(7, NEXT), 3), lists, "the free ones go round");
    assert_eq!(wrong(state(7, NEXT), 1), lists, "and that by way of a chain in flight");
    assert_eq!(wrong(state(1, NUM), 0), lists, "a chain without descriptors");
    assert_eq!(wrong(state(1, NUM), 2), lists, "a chain that goes on where it is free");
    assert_eq!(after(true, state(2, INFLIGHT), &[1]), Ok(1), "what is free is not in flight");
}

#[test]
fn a_record_of_the_longest_ring_has_no_slot_behind_its_last() {
    let config = InflightConfig { queues: 1, queue_size: MAX_SIZE, packed: true };
    let (memory, queue) = ring(true, MAX_SIZE);
    let file = record(config);
    let start = || queue.start_recorded(&memory, map(&file, config).queue(0)).map(drop);
    start().unwrap();
    for (slot, expected) in [(MAX_SIZE - 1, Ok(())), (MAX_SIZE, Err(())), (u16::MAX, Err(()))] {
        for at in [USED_IDX + 2, USED_IDX] {
            file.write_all_at(&slot.to_ne_bytes(), at).unwrap();
        }
        let no_such_slot = RingError::Record(RecordError::NoSuchSlot { slot, ring: MAX_SIZE });
        assert_eq!(start(), expected.map_err(|()| no_such_slot));
    }
}

#[test]
fn a_chain_in_a_record_is_as_good_as_one_in_the_ring() {
    assert_eq!(after(true, state(1, ID), &8u16.to_le_bytes()), Err(RingError::NoSuchBuffer { id: 8, size: SIZE }));
    assert_eq!(after(true, state(1, ADDR), &[0xff; 8]), Err(RingError::BufferOutside { addr: u64::MAX, len: 1 }));
    assert_eq!(after(true, state(1, LEN), &[0xff; 3]).map_err(drop), Err(()), "a buffer longer than memory");
    assert_eq!(after(true, state(1, FLAGS), &1u16.to_le_bytes()), Err(RingError::TooLong { limit: 1 }), "NEXT");
    let two_of_them = {
        let mut guest = Guest::new(true, LAP, Vec::new());
        (0..2).for_each(|_| guest.add());
        (0..2).for_each(|_| assert!(guest.pop()));
        guest.record.write_all_at(&0u16.to_le_bytes(), state(1, ID)).unwrap();
        let mut queue = next(&guest);
        assert!(queue.pop(&mut Chain::new()).unwrap());
        queue.pop(&mut Chain::new())
    };
    assert_eq!(two_of_them, Err(RingError::Duplicate(0)));
}

/// The next device.
fn next(guest: &Guest) -> Queue {
    guest.driver.queue().start_recorded(&guest.memory, guest.handed_over().queue(0)).unwrap()
}

#[test]
fn chains_of_a_longer_ring_may_have_more_descriptors_than_this_one() {
    let (file, config) = (record(config(true, 1)), config(true, 1));
    let start = |size| {
        let (memory, queue) = ring(true, size);
        queue.start_recorded(&memory, map(&file, config).queue(0))
    };
    start(SIZE).unwrap();
    for entry in 0..5 {
        file.write_all_at(&[1], state(entry, INFLIGHT)).unwrap();
        file.write_all_at(&1u16.to_ne_bytes(), state(entry, NUM)).unwrap();
    }
    file.write_all_at(&[5u16, 5].map(u16::to_ne_bytes).concat(), FREE_HEAD).unwrap();
    assert_eq!(start(4).unwrap_err(), RingError::Record(RecordError::TooMuch(4)));
    assert_eq!(start(SIZE).unwrap().next_used(), LAP);
}

#[test]
fn a_batch_of_a_device_that_shows_several_chains_at_once_is_ended_or_taken_back() {
    for is_shown in [false, true] {
        let mut guest = Guest::new(true, LAP | 7, Vec::new());
        (0..3).for_each(|_| guest.add());
        (0..3).for_each(|_| assert!(guest.pop()));
        // The first chain is used and then the second: each goes before what was free, and both are shown at once.
        for (at, value) in [(state(0, NEXT), 3u16), (state(1, NEXT), 0), (FREE_HEAD, 1), (USED_IDX, 1)] {
            guest.record.write_all_at(&value.to_ne_bytes(), at).unwrap();
        }
        guest.record.write_all_at(&[0], USED_WRAP).unwrap();
        if is_shown {
            let flags = guest.driver.queue().desc + 16 * 7 + 14;
            assert!(guest.memory.write(flags, &[0x80, 0x80]));
        }
        let queue = next(&guest);
        assert_eq!(queue.next_used(), if is_shown { 1 } else { LAP | 7 });
        drop(queue);
        guest.replace_device();
        (0..3).for_each(|_| assert!(guest.pop()));
        let popped: Vec<u64> = guest.popped.iter().map(|(_, token)| *token).collect();
        assert_eq!(popped, if is_shown { vec![2] } else { vec![0, 1, 2] });
        while !guest.popped.is_empty() {
            guest.use_one(0);
        }
    }
}

#[test]
fn a_chain_that_takes_a_whole_lap_completes_once_at_whatever_step_the_device_died() {
    let memory = memory();
    for base in [LAP, LAP | 5, 3] {
        let mut died = 0;
        loop {
            let mut guest = Guest::on(&memory, true, base, vec![died]);
            guest.add_chain(SIZE.into());
            let survived = guest.pop() && guest.use_one(0) && guest.publish();
            guest.finish();
            if survived {
                break;
            }
            died += 1;
        }
        assert_eq!(died, u64::from(SIZE) * 4 + 6 + 7);
    }
}

#[test]
fn a_device_goes_on_where_the_record_says_however_far_the_ring_has_gone_round() {
    let mut guest = Guest::new(true, LAP, Vec::new());
    for round in 1..100 {
        guest.add_chain(1 + round % 3);
        assert!(guest.pop() && guest.use_one(0) && guest.publish());
        guest.reap();
        assert_eq!(guest.reaped.len(), round);
        let at = (guest.queue.next_available(), guest.queue.next_used());
        guest.replace_device();
        assert_eq!((guest.queue.next_available(), guest.queue.next_used()), at);
    }
    guest.finish();
}

proptest! {
    #[test]
    fn nothing_in_a_record_makes_anything_panic(
        version in prop_oneof![6 => Just(1u16), 1 => any::<u16>()],
        heads in proptest::option::of((0..SIZE + 2, 0..SIZE + 2)),
        used in proptest::option::of((0..SIZE + 2, 0..SIZE + 2, any::<bool>(), any::<bool>())),
        links in proptest::collection::vec((0..u64::from(SIZE), 0..SIZE + 2), 0..4),
        states in proptest::collection::vec((0..u64::from(SIZE) * 32, any::<u8>()), 0..16),
        scribbled in proptest::collection::vec((0..u64::from(SIZE + 1) * 32, any::<u8>()), 0..64),
    ) {
        let mut guest = Guest::new(true, LAP, Vec::new());
        (0..4).for_each(|_| guest.add());
        (0..3).for_each(|_| assert!(guest.pop()));
        let write = |at, bytes: &[u8]| guest.record.write_all_at(bytes, at).unwrap();
        write(VERSION, &version.to_ne_bytes());
        if let Some((free, old)) = heads {
            write(FREE_HEAD, &[free, old].map(u16::to_ne_bytes).concat());
        }
        if let Some((used, old, used_wrap, old_wrap)) = used {
            write(USED_IDX, &[used, old].map(u16::to_ne_bytes).concat());
            write(USED_WRAP, &[used_wrap.into(), old_wrap.into()]);
        }
        links.iter().for_each(|(entry, next)| write(state(*entry, NEXT), &next.to_ne_bytes()));
        states.iter().for_each(|(at, byte)| write(32 + at, &[*byte]));
        let started = guest.driver.queue().start_recorded(&guest.memory, guest.handed_over().queue(0));
        let popped_before = std::mem::take(&mut guest.popped);
        popped_before.iter().for_each(|(head, _)| guest.queue.abandon(*head));
        let Ok(queue) = started else { return Ok(()) };
        let in_flight = guest.go_on(queue, scribbled, |guest| {
            // As a driver does that goes on, whatever it is shown.
            while let Ok(Some(_)) = guest.driver.reap() {}
            guest.add();
        });
        prop_assert_eq!(in_flight, 0);
    }
}
