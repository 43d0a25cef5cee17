//! A device that dies at any step, and the next one on the same ring with the record of what was in flight.

use std::fs::File;
use std::mem;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use proptest::prelude::*;

use super::super::inflight::crash;
use crate::memory::{GuestMemory, Region};
use crate::ring::{Chain, Driver, DriverConfig, Inflight, InflightError, Queue, QueueConfig, RecordError, RingError};
use crate::testing::{DATA, RING, memory, piece};

const SIZE: u16 = 8;
/// Fields of a queue's record, as their offsets.
const VERSION: u64 = 8;
const DESC_NUM: u64 = 10;
const LAST_BATCH_HEAD: u64 = 12;
const USED_IDX: u64 = 14;
const STATES: u64 = 16;

/// The memory of a record, which outlives devices.
fn record(queues: u16) -> File {
    Region::anonymous(0, Inflight::bytes(queues, SIZE)).unwrap().file
}

fn map(file: &File, queues: u16) -> Inflight {
    Inflight::map(file.try_clone().unwrap(), 0, Inflight::bytes(queues, SIZE), queues, SIZE).unwrap()
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
    fn new(base: u16, mut lives: Vec<u64>) -> Self {
        let memory = memory();
        let config = DriverConfig { size: SIZE, packed: false, event_idx: true, indirect: None, base };
        let driver = Driver::new(&memory, RING, config).unwrap();
        let record = record(1);
        let queue = driver.queue().start_recorded(&memory, map(&record, 1).queue(0)).unwrap();
        crash::die(lives.pop().unwrap_or(u64::MAX));
        Self { memory, driver, record, queue, popped: Vec::new(), added: 0, reaped: Vec::new(), lives }
    }

    fn add(&mut self) {
        if self.driver.add(&[piece(DATA + self.added, 1)], &[], self.added).is_ok() {
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

    /// The next device begins where the ring says that the last one was; it may die of that too.
    fn replace_device(&mut self) {
        self.popped.clear();
        loop {
            crash::die(self.lives.pop().unwrap_or(u64::MAX));
            let used = self.driver.queue().used;
            let mut base = [0; 2];
            assert!(self.memory.read(used + 2, &mut base));
            let config = QueueConfig { base: u16::from_le_bytes(base).into(), ..self.driver.queue() };
            let inflight = map(&self.record, 1);
            let begun = catch_unwind(AssertUnwindSafe(|| config.start_recorded(&self.memory, inflight.queue(0))));
            if let Ok(queue) = begun {
                mem::forget(mem::replace(&mut self.queue, queue.unwrap()));
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
            queue.publish();
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
        assert!(!map(&self.record, 1).queue(0).unwrap().is_busy());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add,
    Pop,
    Use(usize),
    Publish,
    Reap,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Add),
        3 => Just(Step::Pop),
        3 => (0..8usize).prop_map(Step::Use),
        1 => Just(Step::Publish),
        1 => Just(Step::Reap),
    ]
}

proptest! {
    #[test]
    fn each_request_completes_once_whatever_the_device_was_doing_when_it_died(
        base in prop_oneof![Just(0), Just(65533), any::<u16>()],
        steps in proptest::collection::vec(step(), 1..200),
        lives in proptest::collection::vec(0..40u64, 0..20),
    ) {
        let mut guest = Guest::new(base, lives);
        for step in steps {
            match step {
                Step::Add => guest.add(),
                Step::Pop => _ = guest.pop(),
                Step::Use(which) => _ = guest.use_one(which),
                Step::Publish => _ = guest.publish(),
                Step::Reap => guest.reap(),
            }
        }
        guest.finish();
    }
}

#[test]
fn each_request_completes_once_at_whatever_step_the_device_died() {
    let mut died = 0;
    for after in 0.. {
        let mut guest = Guest::new(65533, vec![after]);
        (0..6).for_each(|_| guest.add());
        // Two batches out of order, with others in flight between them and after.
        let survived = (0..4).all(|_| guest.pop())
            && guest.use_one(2)
            && guest.use_one(0)
            && guest.publish()
            && (0..2).all(|_| guest.pop())
            && guest.use_one(1)
            && guest.use_one(2)
            && guest.publish();
        died += u64::from(!survived);
        guest.finish();
        if survived {
            break;
        }
    }
    // Two stores a pop, two a use; a publication has the ring's, one for each chain, one more, and a look before.
    assert_eq!(died, 6 * 2 + 4 * 2 + 2 * (2 + 2 + 1));
}

/// A record with a batch of one that has not been taken out of flight, and one chain more in flight.
fn left_behind() -> Guest {
    let mut guest = Guest::new(0, Vec::new());
    (0..3).for_each(|_| guest.add());
    guest.pop();
    guest.pop();
    guest.use_one(0);
    guest.lives = Vec::new();
    // Right behind the ring's used index.
    crash::die(1);
    let queue = &mut guest.queue;
    assert!(catch_unwind(AssertUnwindSafe(|| queue.publish())).is_err());
    guest
}

/// Whether the next device would take the record in after `bytes` were written to it at `at`.
fn after(at: u64, bytes: &[u8]) -> Result<u16, RingError> {
    let guest = left_behind();
    guest.record.write_all_at(bytes, at).unwrap();
    let Guest { memory, driver, record, queue, .. } = guest;
    mem::forget(queue);
    let mut again = driver.queue().start_recorded(&memory, map(&record, 1).queue(0))?;
    let mut chain = Chain::new();
    assert!(again.pop(&mut chain)?);
    let head = chain.head();
    again.abandon(head);
    Ok(head)
}

#[test]
fn a_record_that_makes_no_sense_is_refused_whoever_wrote_it() {
    let wrong = |at, bytes: &[u8]| match after(at, bytes) {
        Err(RingError::Record(why)) => why,
        other => panic!("{other:?}"),
    };
    assert_eq!(after(VERSION, &1u16.to_ne_bytes()), Ok(1), "the second chain's head");
    assert_eq!(wrong(VERSION, &2u16.to_ne_bytes()), RecordError::Unknown { version: 2, features: 0 });
    assert_eq!(wrong(0, &1u64.to_ne_bytes()), RecordError::Unknown { version: 1, features: 1 });
    assert_eq!(wrong(DESC_NUM, &16u16.to_ne_bytes()), RecordError::Length { desc_num: 16, size: SIZE });
    assert_eq!(wrong(USED_IDX, &9u16.to_ne_bytes()), RecordError::Batch { recorded: 9, used: 1, ring: SIZE });
    assert_eq!(wrong(LAST_BATCH_HEAD, &8u16.to_ne_bytes()), RecordError::NoSuchHead { head: 8, ring: SIZE });
    let next_of_first = STATES + 6;
    assert_eq!(after(next_of_first, &u16::MAX.to_ne_bytes()), Ok(1), "a batch of one ends with the first");
}

#[test]
fn a_record_is_for_rings_no_longer_than_itself() {
    let memory = memory();
    let driver = |size| {
        Driver::new(&memory, RING, DriverConfig { size, packed: false, event_idx: false, indirect: None, base: 0 })
            .unwrap()
            .queue()
    };
    let start = |size: u16| driver(size).start_recorded(&memory, map(&record(1), 1).queue(0)).map(|queue| queue.size());
    assert_eq!(start(4).unwrap(), 4);
    assert_eq!(start(SIZE).unwrap(), SIZE);
    let too_small = RecordError::TooSmall { size: SIZE, ring: 16 };
    assert_eq!(start(16).unwrap_err(), RingError::Record(too_small));
    // A longer ring's record on a shorter one: its chains may begin where this one has no descriptors.
    let file = record(1);
    let mut guest = driver(SIZE).start_recorded(&memory, map(&file, 1).queue(0)).unwrap();
    guest.publish();
    file.write_all_at(&[1], STATES + 16 * 7).unwrap();
    let refused = driver(4).start_recorded(&memory, map(&file, 1).queue(0)).unwrap_err();
    assert_eq!(refused, RingError::Record(RecordError::NoSuchHead { head: 7, ring: 4 }));
}

#[test]
fn each_queue_has_a_part_of_its_own() {
    let file = record(3);
    let inflight = map(&file, 3);
    assert!(inflight.queue(3).is_none());
    for queue in 0..3 {
        inflight.queue(queue).unwrap().begin(queue);
    }
    let busy: Vec<u64> = (0..Inflight::bytes(3, SIZE)).filter(|at| byte(&file, *at) != 0).collect();
    // 16 bytes and 8 states of 16 make 144; the next line begins at 192.
    assert_eq!(busy, [STATES, 192 + STATES + 16, 2 * 192 + STATES + 32]);
}

fn byte(file: &File, at: u64) -> u8 {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    byte[0]
}

#[test]
fn a_record_must_be_as_long_as_it_is_said_to_be() {
    let file = || record(1);
    let map = |offset, size, queues| Inflight::map(file(), offset, size, queues, SIZE);
    // The last line is our own.
    let bytes = Inflight::bytes(1, SIZE) - 64;
    assert!(matches!(map(0, bytes - 1, 1), Err(InflightError::Short { .. })));
    assert!(matches!(map(0, bytes, 2), Err(InflightError::Short { .. })));
    assert!(matches!(map(4, bytes, 1), Err(InflightError::Offset(4))));
    assert!(matches!(map(72, bytes, 1), Err(InflightError::Memory(_))), "its file ends before it");
    assert!(matches!(map(u64::MAX - 7, bytes, 1), Err(InflightError::Memory(_))));
    assert!(Inflight::map(file(), 0, u64::MAX, u16::MAX, u16::MAX).is_err());
    assert!(map(0, u64::MAX, 1).is_ok(), "no more of it is mapped than is used");
}

#[test]
fn what_the_driver_chose_is_noted_where_there_is_room() {
    let file = record(1);
    assert_eq!(map(&file, 1).choices(), None);
    for choices in [0, 1, 255] {
        map(&file, 1).set_choices(choices);
        assert_eq!(map(&file, 1).choices(), Some(choices));
    }
    let of_another = Inflight::map(file, 0, Inflight::bytes(1, SIZE) - 64, 1, SIZE).unwrap();
    of_another.set_choices(1);
    assert_eq!(of_another.choices(), None);
}

#[test]
fn a_record_whose_memory_is_taken_away_is_torn_and_nothing_else_happens() {
    let mut guest = Guest::new(0, Vec::new());
    guest.add();
    assert!(!guest.queue.is_torn());
    guest.record.set_len(0).unwrap();
    assert!(guest.pop());
    assert!(guest.queue.is_torn());
    guest.use_one(0);
    guest.publish();
    guest.reap();
    assert_eq!(guest.reaped, [0]);
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
        let mut guest = Guest::new(0, Vec::new());
        (0..4).for_each(|_| guest.add());
        let fields = [version, desc_num, last_batch_head, 0u16.wrapping_sub(behind)];
        let fields = fields.map(u16::to_ne_bytes).concat();
        guest.record.write_all_at(&fields, VERSION).unwrap();
        for (at, byte) in states {
            guest.record.write_all_at(&[byte], STATES + at).unwrap();
        }
        let started = guest.driver.queue().start_recorded(&guest.memory, map(&guest.record, 1).queue(0));
        let Ok(mut queue) = started else { return Ok(()) };
        let (mut chain, mut popped) = (Chain::new(), Vec::new());
        for (at, byte) in scribbled {
            guest.record.write_all_at(&[byte], at).unwrap();
            if queue.pop(&mut chain) == Ok(true) {
                popped.push(chain.head());
            }
            if byte % 2 == 0 && let Some(head) = popped.pop() {
                queue.add_used(head, 0);
            }
            if byte % 4 == 0 {
                queue.publish();
            }
        }
        popped.into_iter().for_each(|head| queue.add_used(head, 0));
        queue.publish();
        prop_assert_eq!(queue.in_flight(), 0);
    }
}
