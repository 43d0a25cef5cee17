//! A device that dies at any step, and the next one on the same ring with the record of what was in flight.

mod packed;
mod split;

use std::fs::File;
use std::mem;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use proptest::prelude::*;

use super::super::inflight::crash;
use crate::memory::{GuestMemory, Region};
use crate::ring::{
    Chain, Driver, DriverConfig, Inflight, InflightConfig, InflightError, Queue, QueueConfig, RecordError, RingError,
};
use crate::testing::{DATA, RING, memory, piece};

const SIZE: u16 = 8;
/// Where the first lap of a packed ring begins.
const LAP: u16 = 0x8000;
/// Fields of a queue's record in either layout, as their offsets.
const VERSION: u64 = 8;
const DESC_NUM: u64 = 10;

/// A record for rings of `SIZE`.
fn config(packed: bool, queues: u16) -> InflightConfig {
    InflightConfig { queues, queue_size: SIZE, packed }
}

/// The memory of a record, which outlives devices.
fn record(config: InflightConfig) -> File {
    Region::anonymous(0, config.bytes()).unwrap().file
}

fn map(file: &File, config: InflightConfig) -> Inflight {
    Inflight::map(file.try_clone().unwrap(), 0, config.bytes(), config).unwrap()
}

/// A driver whose device dies now and then.
struct Guest {
    memory: Arc<GuestMemory>,
    driver: Driver,
    record: File,
    queue: Queue,
    /// Heads popped and not used, and their tokens.
    popped: Vec<(u16, u64)>,
    added: u64,
    /// The tokens that have come back, in order.
    reaped: Vec<u64>,
    /// How far each device comes, from the one after the next on.
    lives: Vec<u64>,
}

impl Guest {
    fn new(packed: bool, base: u16, lives: Vec<u64>) -> Self {
        Self::on(&memory(), packed, base, lives)
    }

    /// Has a device go on while somebody scribbles over its record, byte by byte, with `meanwhile` after each; returns how
    /// many chains are in flight once all that were popped have been used.
    fn go_on(&mut self, mut queue: Queue, scribbled: Vec<(u64, u8)>, meanwhile: impl Fn(&mut Self)) -> u16 {
        let (mut chain, mut popped) = (Chain::new(), Vec::new());
        for (at, byte) in scribbled {
            self.record.write_all_at(&[byte], at).unwrap();
            if queue.pop(&mut chain) == Ok(true) {
                popped.push(chain.head());
            }
            if byte % 2 == 0
                && let Some(head) = popped.pop()
            {
                queue.add_used(head, 0);
            }
            if byte % 4 == 0 {
                queue.publish_used();
            }
            meanwhile(self);
        }
        popped.into_iter().for_each(|head| queue.add_used(head, 0));
        queue.publish_used();
        queue.in_flight()
    }

    fn on(memory: &Arc<GuestMemory>, packed: bool, base: u16, mut lives: Vec<u64>) -> Self {
        let memory = Arc::clone(memory);
        let driver = DriverConfig { size: SIZE, packed, event_idx: true, indirect: None, base };
        let driver = Driver::new(&memory, RING, driver).unwrap();
        let record = record(config(packed, 1));
        let queue = driver.queue().start_recorded(&memory, map(&record, config(packed, 1)).queue(0)).unwrap();
        crash::die(lives.pop().unwrap_or(u64::MAX));
        Self { memory, driver, record, queue, popped: Vec::new(), added: 0, reaped: Vec::new(), lives }
    }

    /// The record as it is handed to the next device.
    fn handed_over(&self) -> Inflight {
        map(&self.record, config(self.driver.queue().packed, 1))
    }

    fn add(&mut self) {
        self.add_chain(1);
    }

    /// Adds a request of so many descriptors; its first says which it is.
    fn add_chain(&mut self, descriptors: usize) {
        let mut pieces = vec![piece(DATA, 1); descriptors];
        pieces[0].addr += self.added;
        if self.driver.add(&pieces, &[], self.added).is_ok() {
            self.driver.publish();
            self.added += 1;
        }
    }

    fn reap(&mut self) {
        while let Some(used) = self.driver.reap().expect("nothing is used twice") {
            self.reaped.push(used.token);
        }
    }

    /// Has the device do something; says whether it survived. If not, there is another one in its place.
    fn device(&mut self, act: impl FnOnce(&mut Queue, &mut Vec<(u16, u64)>)) -> bool {
        let alive = catch_unwind(AssertUnwindSafe(|| act(&mut self.queue, &mut self.popped))).is_ok();
        if !alive {
            self.replace_device();
        }
        alive
    }

    /// The next device begins where the ring says that the last one was; it may die of that too. A packed ring does not
    /// say, and it is told where the first one began.
    fn replace_device(&mut self) {
        self.popped.clear();
        loop {
            crash::die(self.lives.pop().unwrap_or(u64::MAX));
            let mut config = self.driver.queue();
            if !config.packed {
                let mut base = [0; 2];
                assert!(self.memory.read(config.used + 2, &mut base));
                config.base = u16::from_le_bytes(base).into();
            }
            let inflight = self.handed_over();
            let begun = catch_unwind(AssertUnwindSafe(|| config.start_recorded(&self.memory, inflight.queue(0))));
            if let Ok(queue) = begun {
                self.queue = queue.unwrap();
                return;
            }
        }
    }

    fn pop(&mut self) -> bool {
        let data = self.memory.slice(DATA, 1).unwrap().base() as u64;
        self.device(|queue, popped| {
            let mut chain = Chain::new();
            if queue.pop(&mut chain).unwrap() {
                popped.push((chain.head(), chain.readable()[0].base() as u64 - data));
            }
        })
    }

    fn use_one(&mut self, which: usize) -> bool {
        self.device(|queue, popped| {
            if !popped.is_empty() {
                let (head, _) = popped.swap_remove(which % popped.len());
                queue.add_used(head, 0);
            }
        })
    }

    fn publish(&mut self) -> bool {
        self.device(|queue, _| {
            queue.publish_used();
        })
    }

    /// What the driver still waits for comes in the order in which it was asked for; then all of it is done.
    fn finish(mut self) {
        crash::die(u64::MAX);
        self.lives.clear();
        self.replace_device();
        while self.queue.is_available() {
            self.pop();
        }
        self.reap();
        let missing: Vec<u64> = (0..self.added).filter(|token| !self.reaped.contains(token)).collect();
        assert_eq!(self.popped.iter().map(|(_, token)| *token).collect::<Vec<_>>(), missing);
        while !self.popped.is_empty() {
            self.use_one(0);
        }
        self.publish();
        self.reap();
        self.reaped.sort_unstable();
        assert_eq!(self.reaped, (0..self.added).collect::<Vec<_>>(), "each of them once");
        assert_eq!(self.driver.free(), usize::from(SIZE));
        assert!(!self.handed_over().queue(0).unwrap().is_busy());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add(usize),
    Pop,
    Use(usize),
    Publish,
    Reap,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..4usize).prop_map(Step::Add),
        3 => Just(Step::Pop),
        3 => (0..8usize).prop_map(Step::Use),
        1 => Just(Step::Publish),
        1 => Just(Step::Reap),
    ]
}

proptest! {
    #[test]
    fn each_request_completes_once_whatever_the_device_was_doing_when_it_died(
        packed in any::<bool>(),
        base in prop_oneof![Just(0), Just(65533), any::<u16>()],
        steps in proptest::collection::vec(step(), 1..200),
        lives in proptest::collection::vec(0..40u64, 0..20),
    ) {
        let base = if packed { (base & LAP) | (base % SIZE) } else { base };
        let mut guest = Guest::new(packed, base, lives);
        for step in steps {
            match step {
                Step::Add(descriptors) => guest.add_chain(descriptors),
                Step::Pop => _ = guest.pop(),
                Step::Use(which) => _ = guest.use_one(which),
                Step::Publish => _ = guest.publish(),
                Step::Reap => guest.reap(),
            }
        }
        guest.finish();
    }
}

/// Two batches out of order, with others in flight between them and after. Says whether the device survived.
fn two_batches(guest: &mut Guest) -> bool {
    (0..4).all(|_| guest.pop())
        && guest.use_one(2)
        && guest.use_one(0)
        && guest.publish()
        && (0..2).all(|_| guest.pop())
        && guest.use_one(1)
        && guest.use_one(2)
        && guest.publish()
}

/// How many steps a device can die at; the next may die at any of its first ones.
fn deaths(packed: bool, base: u16, chains: [usize; 6]) -> u64 {
    // One for all of them: a queue that goes away with chains in flight leaves its memory behind for good.
    let memory = memory();
    for died in 0.. {
        for next in 0..24 {
            let mut guest = Guest::on(&memory, packed, base, vec![next, died]);
            chains.iter().for_each(|&descriptors| guest.add_chain(descriptors));
            let survived = two_batches(&mut guest);
            guest.finish();
            if survived {
                return died;
            }
        }
    }
    unreachable!("some device survives")
}

#[test]
fn each_request_completes_once_at_whatever_steps_devices_died() {
    // Two stores a pop, two a use; a publication has the ring's, one for each chain, one more, and a look before.
    assert_eq!(deaths(false, 65533, [1; 6]), 6 * 2 + 4 * 2 + 2 * (2 + 2 + 1));
    // Four stores for each descriptor, and six a pop; to show a chain takes six, and the ring's.
    for base in [LAP, LAP | 5, 6] {
        assert_eq!(deaths(true, base, [1; 6]), 6 * (4 + 6) + 4 * 7);
        assert_eq!(deaths(true, base, [2, 1, 1, 2, 1, 1]), (8 * 4 + 6 * 6) + 4 * 7);
    }
}

/// A record with a batch of one that the driver has been shown, the device having died right behind that; there is one
/// chain more in flight.
fn left_behind(packed: bool) -> Guest {
    let mut guest = Guest::new(packed, if packed { LAP } else { 0 }, Vec::new());
    (0..3).for_each(|_| guest.add());
    guest.pop();
    guest.pop();
    guest.use_one(0);
    crash::die(if packed { 3 } else { 1 });
    let queue = &mut guest.queue;
    assert!(catch_unwind(AssertUnwindSafe(|| queue.publish_used())).is_err());
    guest
}

/// Whether the next device would take in what was left behind after `bytes` were written to it at `at`; the head of what
/// it pops first.
fn after(packed: bool, at: u64, bytes: &[u8]) -> Result<u16, RingError> {
    let guest = left_behind(packed);
    guest.record.write_all_at(bytes, at).unwrap();
    let inflight = guest.handed_over();
    let Guest { memory, driver, queue, .. } = guest;
    mem::forget(queue);
    let mut again = driver.queue().start_recorded(&memory, inflight.queue(0))?;
    let mut chain = Chain::new();
    assert!(again.pop(&mut chain)?);
    let head = chain.head();
    again.abandon(head);
    Ok(head)
}

#[test]
fn a_record_of_something_else_is_refused() {
    for packed in [false, true] {
        let wrong = |at, bytes: &[u8]| match after(packed, at, bytes) {
            Err(RingError::Record(why)) => why,
            other => panic!("{other:?}"),
        };
        assert!(after(packed, VERSION, &1u16.to_ne_bytes()).is_ok());
        assert_eq!(wrong(VERSION, &2u16.to_ne_bytes()), RecordError::Unknown { version: 2, features: 0 });
        assert_eq!(wrong(0, &1u64.to_ne_bytes()), RecordError::Unknown { version: 1, features: 1 });
        assert_eq!(wrong(DESC_NUM, &16u16.to_ne_bytes()), RecordError::Length { desc_num: 16, size: SIZE });
        let guest = left_behind(packed);
        let other = config(!packed, 1);
        let started = guest.driver.queue().start_recorded(&guest.memory, map(&record(other), other).queue(0));
        assert_eq!(started.unwrap_err(), RingError::Record(RecordError::Layout));
    }
}

/// A driver's ring of so many descriptors, at rest.
fn ring(packed: bool, size: u16) -> (Arc<GuestMemory>, QueueConfig) {
    let memory = memory();
    let base = if packed { LAP } else { 0 };
    let config = DriverConfig { size, packed, event_idx: false, indirect: None, base };
    let queue = Driver::new(&memory, RING, config).unwrap().queue();
    (memory, queue)
}

#[test]
fn a_record_is_for_rings_no_longer_than_itself() {
    for packed in [false, true] {
        let start = |size: u16| {
            let (memory, queue) = ring(packed, size);
            let record = record(config(packed, 1));
            queue.start_recorded(&memory, map(&record, config(packed, 1)).queue(0)).map(|queue| queue.size())
        };
        assert_eq!(start(4).unwrap(), 4);
        assert_eq!(start(SIZE).unwrap(), SIZE);
        let too_small = RecordError::TooSmall { size: SIZE, ring: 16 };
        assert_eq!(start(16).unwrap_err(), RingError::Record(too_small));
    }
}

#[test]
fn each_queue_has_a_part_of_its_own() {
    // A header and eight states as long make 144 bytes, or 288; the next line begins at 192, or 320.
    for (packed, stride, part) in [(false, 16, 192), (true, 32, 320)] {
        let config = config(packed, 3);
        let file = record(config);
        let inflight = map(&file, config);
        assert!(inflight.queue(3).is_none());
        assert_eq!(config.bytes(), 3 * part + 64);
        for queue in 0..3 {
            assert!(!inflight.queue(queue).unwrap().is_busy());
            file.write_all_at(&[1], u64::from(queue) * part + 8 * stride).unwrap();
            assert!(inflight.queue(queue).unwrap().is_busy());
        }
    }
}

#[test]
fn a_record_has_parts_for_as_many_queues_as_it_is_for_however_short_they_are() {
    for packed in [false, true] {
        // A part is as long as the line behind all of them, which is no queue's.
        let config = InflightConfig { queues: 2, queue_size: 1, packed };
        assert_eq!(config.bytes(), 2 * 64 + 64);
        let inflight = map(&record(config), config);
        assert_eq!(inflight.is_packed(), packed);
        assert!(inflight.queue(1).is_some() && inflight.queue(2).is_none());
    }
}

#[test]
fn a_record_is_new_until_a_queue_keeps_it() {
    for packed in [false, true] {
        let file = record(config(packed, 1));
        let part = || map(&file, config(packed, 1)).queue(0);
        assert!(part().unwrap().is_new());
        let (memory, queue) = ring(packed, SIZE);
        let mut recorded = queue.start_recorded(&memory, part()).unwrap();
        assert!(recorded.has_record());
        assert!(!part().unwrap().is_new());
        assert!(!recorded.publish_used(), "nothing was used");
        assert!(!queue.start(&memory).unwrap().has_record());
    }
}

#[test]
fn what_is_available_is_seen_before_a_queue_starts_which_knows_from_the_record_where_that_is() {
    for packed in [false, true] {
        let config = config(packed, 1);
        let (memory, file) = (memory(), record(config));
        let base = if packed { LAP } else { 0 };
        let ring = DriverConfig { size: SIZE, packed, event_idx: true, indirect: None, base };
        let mut driver = Driver::new(&memory, RING, ring).unwrap();
        // As a front-end says that knows no better.
        let begins = driver.queue();
        let is_available = || {
            let record = map(&file, config).queue(0).unwrap();
            let is_seen = begins.is_available(&memory, Some(&record)).unwrap();
            assert!(!record.is_new() || begins.is_available(&memory, None).unwrap() == is_seen);
            is_seen
        };
        for lap in 0..3 {
            for at in 0..SIZE {
                assert!(!is_available(), "packed: {packed}, {at} of lap {lap}");
                driver.add(&[piece(DATA, 16)], &[], 0).unwrap();
                driver.publish();
                assert!(is_available(), "packed: {packed}, {at} of lap {lap}");
                let mut queue = begins.start_recorded(&memory, map(&file, config).queue(0)).unwrap();
                let mut chain = Chain::new();
                assert!(queue.pop(&mut chain).unwrap());
                queue.add_used(chain.head(), 0);
                queue.publish_used();
                assert!(driver.reap().unwrap().is_some());
            }
        }
    }
}

#[test]
fn a_record_must_be_as_long_as_it_is_said_to_be() {
    for packed in [false, true] {
        let map = |offset, size, queues| Inflight::map(record(config(packed, 1)), offset, size, config(packed, queues));
        // The last line is our own.
        let bytes = config(packed, 1).bytes() - 64;
        assert!(matches!(map(0, bytes - 1, 1), Err(InflightError::Short { .. })));
        assert!(matches!(map(0, bytes, 2), Err(InflightError::Short { .. })));
        assert!(matches!(map(4, bytes, 1), Err(InflightError::Offset(4))));
        assert!(matches!(map(72, bytes, 1), Err(InflightError::Memory(_))), "its file ends before it");
        assert!(matches!(map(u64::MAX - 7, bytes, 1), Err(InflightError::Memory(_))));
        let largest = InflightConfig { queues: u16::MAX, queue_size: u16::MAX, packed };
        assert!(Inflight::map(record(config(packed, 1)), 0, u64::MAX, largest).is_err());
        assert!(map(0, u64::MAX, 1).is_ok(), "no more of it is mapped than is used");
    }
}

#[test]
fn what_the_driver_chose_is_noted_with_the_name_of_who_notes_it_where_there_is_room() {
    for packed in [false, true] {
        let config = config(packed, 1);
        let file = record(config);
        assert_eq!(map(&file, config).choices(), None);
        for choices in [0, 1, 255] {
            map(&file, config).set_choices(choices);
            map(&file, config).set_keeper(u64::MAX - u64::from(choices));
            assert_eq!(map(&file, config).choices(), Some(choices));
            assert_eq!(map(&file, config).keeper(), Some(u64::MAX - u64::from(choices)));
        }
        let of_another = Inflight::map(file, 0, config.bytes() - 64, config).unwrap();
        of_another.set_choices(1);
        of_another.set_keeper(1);
        assert_eq!((of_another.choices(), of_another.keeper()), (None, None));
    }
}

#[test]
fn a_record_whose_memory_is_taken_away_is_torn_and_nothing_else_happens() {
    for packed in [false, true] {
        let mut guest = Guest::new(packed, if packed { LAP } else { 0 }, Vec::new());
        guest.add();
        assert!(!guest.queue.is_truncated());
        guest.record.set_len(0).unwrap();
        assert!(guest.pop());
        assert!(guest.queue.is_truncated());
        guest.use_one(0);
        guest.publish();
        guest.reap();
        assert_eq!(guest.reaped, [0]);
    }
}
