//! What somebody may have written to the record of a split ring.

use std::os::unix::fs::FileExt;

use proptest::prelude::*;

use super::{Guest, SIZE, VERSION, after, config, crash, map, record, ring};
use crate::ring::{RecordError, RingError};

/// Fields of a queue's record, as their offsets.
const LAST_BATCH_HEAD: u64 = 12;
const USED_IDX: u64 = 14;
const STATES: u64 = 16;

#[test]
fn a_record_that_makes_no_sense_is_refused_whoever_wrote_it() {
    let wrong = |at, bytes: &[u8]| match after(false, at, bytes) {
        Err(RingError::Record(why)) => why,
        other => panic!("{other:?}"),
    };
    assert_eq!(after(false, VERSION, &1u16.to_ne_bytes()), Ok(1), "the second chain's head");
    assert_eq!(wrong(USED_IDX, &9u16.to_ne_bytes()), RecordError::Batch { recorded: 9, used: 1, ring: SIZE });
    assert_eq!(wrong(LAST_BATCH_HEAD, &8u16.to_ne_bytes()), RecordError::NoSuchHead { head: 8, ring: SIZE });
    let next_of_first = STATES + 6;
    assert_eq!(after(false, next_of_first, &u16::MAX.to_ne_bytes()), Ok(1), "a batch of one ends with the first");
}

#[test]
fn chains_of_a_longer_ring_may_begin_where_this_one_has_no_descriptors() {
    let (file, config) = (record(config(false, 1)), config(false, 1));
    let start = |size| {
        let (memory, queue) = ring(false, size);
        queue.start_recorded(&memory, map(&file, config).queue(0))
    };
    start(SIZE).unwrap();
    file.write_all_at(&[1], STATES + 16 * 7).unwrap();
    assert_eq!(start(4).unwrap_err(), RingError::Record(RecordError::NoSuchHead { head: 7, ring: 4 }));
}

proptest! {
    #[test]
    fn nothing_in_a_record_makes_anything_panic(
        version in prop_oneof![6 => Just(1), 1 => any::<u16>()],
        desc_num in prop_oneof![6 => Just(SIZE), 1 => any::<u16>()],
        last_batch_head in 0..SIZE + 2,
        behind in 0..SIZE + 2,
        states in proptest::collection::vec((0..u64::from(SIZE) * 16, any::<u8>()), 0..64),
        scribbled in proptest::collection::vec((0..STATES + u64::from(SIZE) * 16, any::<u8>()), 0..64),
    ) {
        let mut guest = Guest::new(false, 0, Vec::new());
        (0..4).for_each(|_| guest.add());
        let fields = [version, desc_num, last_batch_head, 0u16.wrapping_sub(behind)];
        let fields = fields.map(u16::to_ne_bytes).concat();
        guest.record.write_all_at(&fields, VERSION).unwrap();
        for (at, byte) in states {
            guest.record.write_all_at(&[byte], STATES + at).unwrap();
        }
        let started = guest.driver.queue().start_recorded(&guest.memory, guest.handed_over().queue(0));
        let Ok(queue) = started else { return Ok(()) };
        prop_assert_eq!(guest.go_on(queue, scribbled, |_| ()), 0);
    }
}

#[test]
fn all_of_a_ring_may_be_one_batch_whose_device_died_when_the_driver_had_seen_it() {
    let mut guest = Guest::new(false, 0, Vec::new());
    (0..SIZE).for_each(|_| guest.add());
    (0..SIZE).for_each(|_| assert!(guest.pop() && guest.use_one(0)));
    crash::die(1);
    assert!(!guest.publish(), "behind the used index");
    guest.finish();
}
