//! The dirty log has every page that the device writes, whatever it writes it by.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;

use super::super::log::AreaLog;
use super::super::*;
use crate::memory::{Access, DirtyLog, GuestMemory, IoVec, LOG_PAGE, MemoryRules, Region};
use crate::testing::{DATA, Guest, RING, piece};

/// What is looked at: the ring, and where the buffers are.
const PLACES: [Range<u64>; 2] = [RING..RING + 0x1_0000, DATA..END];
const END: u64 = DATA + 0x4_0000;

/// A guest whose front-end has its memory logged.
struct Logged {
    guest: Guest,
    log: File,
}

/// A log of `bytes` of guest memory, and the file that it is in.
fn log_of(bytes: u64) -> (Arc<DirtyLog>, File) {
    let size = bytes.div_ceil(8 * LOG_PAGE);
    let file = Region::anonymous(0, size).unwrap().file;
    (Arc::new(DirtyLog::map(&file, 0, size, &MemoryRules::default()).unwrap()), file)
}

/// Takes what is in a log.
fn take(log: &File) -> BTreeSet<u64> {
    let len = log.metadata().unwrap().len() as usize;
    let mut bytes = vec![0; len];
    assert_eq!(rustix::io::pread(log, &mut bytes, 0), Ok(len));
    assert_eq!(rustix::io::pwrite(log, &vec![0; len], 0), Ok(len));
    let set = |page: &u64| bytes[*page as usize / 8] >> (page % 8) & 1 != 0;
    (0..8 * len as u64).filter(set).collect()
}

fn pages(range: Range<u64>) -> BTreeSet<u64> {
    (range.start / LOG_PAGE..range.end.div_ceil(LOG_PAGE)).collect()
}

impl Logged {
    fn new(config: DriverConfig) -> Self {
        let mut guest = Guest::new(config);
        let (log, file) = log_of(END);
        let mut new = Self {
            log: file,
            guest: {
                guest.memory = Arc::new(guest.memory.logging(Some(log)));
                guest
            },
        };
        new.guest.queue.extend_memory(&new.guest.memory, Some(new.guest.driver.queue().used));
        assert_eq!(take(&new.log), new.ring(), "all of it, at the beginning");
        new
    }

    /// The pages of what the device writes of its ring.
    fn ring(&self) -> BTreeSet<u64> {
        let QueueConfig { size, desc, used, packed, event_idx, .. } = self.guest.driver.queue();
        let size = u64::from(size);
        match packed {
            false => pages(used..used + 4 + 8 * size + if event_idx { 2 } else { 0 }),
            true => &pages(desc..desc + 16 * size) | &pages(used..used + 4),
        }
    }

    /// What is in each page.
    fn pages(&self) -> BTreeMap<u64, Vec<u8>> {
        let content = |page| {
            let mut bytes = vec![0; LOG_PAGE as usize];
            assert!(self.guest.memory.read(page * LOG_PAGE, &mut bytes));
            (page, bytes)
        };
        PLACES.into_iter().flat_map(pages).map(content).collect()
    }

    /// Has the device do something, and compares what has changed with the log, which has no more than `allowed`.
    fn does<T>(&mut self, allowed: &BTreeSet<u64>, what: impl FnOnce(&mut Guest) -> T) -> T {
        let before = self.pages();
        let done = what(&mut self.guest);
        let (after, logged) = (self.pages(), take(&self.log));
        let changed: BTreeSet<u64> =
            after.into_iter().filter(|(at, page)| *page != before[at]).map(|(at, _)| at).collect();
        assert!(changed.is_subset(&logged), "{changed:x?} were written, and {logged:x?} logged");
        assert!(logged.is_subset(allowed), "{logged:x?} were logged, of {allowed:x?}");
        done
    }
}

/// What a disk does to memory that is lent to it, without the map.
fn fill(iovecs: &[IoVec], byte: u8) {
    for iovec in iovecs {
        // SAFETY: the queue has lent the iovec.
        unsafe { crate::memory::volatile::copy_to(iovec.base(), &vec![byte; iovec.len()]) };
    }
}

/// How the device fills a chain's buffers.
#[derive(Clone, Copy, Debug)]
enum By {
    Disk,
    Scatter,
    ScatterAfter(usize),
    Write,
    /// It reads them only: a disk that is written to.
    Nothing,
}

fn by() -> impl Strategy<Value = By> {
    prop_oneof![
        Just(By::Disk),
        Just(By::Scatter),
        (0..9000usize).prop_map(By::ScatterAfter),
        Just(By::Write),
        Just(By::Nothing)
    ]
}

fn chain_of_buffers() -> impl Strategy<Value = Vec<Piece>> {
    let buffer = (DATA..END - 0x4000, 1..0x4000u32).prop_map(|(addr, len)| piece(addr, len));
    prop::collection::vec(buffer, 1..4)
}

#[derive(Clone, Debug)]
enum Step {
    Chains(Vec<(Vec<Piece>, By)>),
    Arm,
    Suppress,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => prop::collection::vec((chain_of_buffers(), by()), 1..6).prop_map(Step::Chains),
        1 => Just(Step::Arm),
        1 => Just(Step::Suppress),
    ]
}

/// Ends a chain's flight, with its buffers filled.
fn end(guest: &mut Guest, chain: &Chain, buffers: &[Piece], by: By, byte: u8) {
    let len = chain.writable_len() as usize;
    let written = match by {
        By::Disk | By::Nothing => {
            let access = if matches!(by, By::Disk) { Access::Write } else { Access::Read };
            let lent = guest.queue.lend(chain.writable().to_vec().into(), access).unwrap();
            if access == Access::Write {
                fill(&lent, byte);
            }
            guest.queue.take_back(lent);
            len
        }
        By::Scatter => guest.memory.scatter(chain.writable(), &vec![byte; len]),
        By::ScatterAfter(skip) => guest.memory.scatter_after(chain.writable(), skip, &vec![byte; len]),
        By::Write => {
            assert!(guest.memory.write(buffers[0].addr, &vec![byte; buffers[0].len as usize]));
            len
        }
    };
    guest.queue.add_used(chain.head(), written as u32);
}

fn check(config: DriverConfig, steps: Vec<Step>) {
    let mut logged = Logged::new(config);
    let ring = logged.ring();
    let mut byte = 0u8;
    for step in steps {
        match step {
            Step::Chains(chains) => {
                for (buffers, _) in &chains {
                    logged.guest.driver.add(&[], buffers, 0).unwrap();
                }
                logged.guest.driver.publish();
                let mut buffers = BTreeSet::new();
                for (pieces, by) in &chains {
                    if !matches!(by, By::Nothing) {
                        buffers.extend(
                            pieces.iter().flat_map(|piece| pages(piece.addr..piece.addr + u64::from(piece.len))),
                        );
                    }
                }
                logged.does(&(&buffers | &ring), |guest| {
                    let mut chain = Chain::new();
                    for (pieces, by) in &chains {
                        byte = byte.wrapping_add(1);
                        assert!(guest.queue.pop(&mut chain).unwrap());
                        end(guest, &chain, pieces, *by, byte);
                    }
                    guest.queue.publish_used();
                });
                while logged.guest.driver.reap().unwrap().is_some() {}
            }
            Step::Arm => {
                logged.does(&ring, |guest| guest.queue.arm_kicks());
            }
            Step::Suppress => logged.does(&ring, |guest| guest.queue.suppress_kicks()),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Rings of several pages, which are gone round.
    #[test]
    fn every_page_that_a_device_writes_is_logged_and_no_other(
        packed: bool,
        event_idx: bool,
        large: bool,
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let size = if large { 1024 } else { 16 };
        let base = if packed { (size - 5) | (1 << 15) } else { 65530 };
        check(DriverConfig { size, packed, event_idx, indirect: None, base }, steps);
    }
}

#[test]
fn used_elements_that_are_not_published_are_logged_when_their_queue_breaks() {
    for packed in [false, true] {
        let base = if packed { PACKED_BASE as u16 } else { 0 };
        let mut logged = Logged::new(DriverConfig { size: 16, packed, event_idx: true, indirect: None, base });
        logged.guest.driver.add(&[], &[piece(DATA, 8)], 0).unwrap();
        logged.guest.driver.publish();
        let ring = logged.ring();
        logged.does(&ring, |guest| {
            let mut chain = Chain::new();
            assert!(guest.queue.pop(&mut chain).unwrap());
            guest.queue.add_used(chain.head(), 8);
            guest.queue.log_unpublished();
        });
    }
}

#[test]
fn a_ring_is_logged_by_the_address_that_its_front_end_has_for_that_or_not_at_all() {
    let config = DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 };
    let Logged { mut guest, log } = Logged::new(config);
    for (used, expected) in [(Some(0x7_0000 + 4090), vec![0x70, 0x71]), (None, vec![])] {
        guest.queue.extend_memory(&guest.memory, used);
        assert_eq!(take(&log), expected.iter().copied().collect());
        guest.driver.add(&[], &[piece(DATA, 8)], 0).unwrap();
        guest.driver.publish();
        let mut chain = Chain::new();
        assert!(guest.queue.pop(&mut chain).unwrap());
        guest.queue.add_used(chain.head(), 0);
        guest.queue.publish_used();
        assert_eq!(take(&log), expected.into_iter().collect());
        assert!(guest.driver.reap().unwrap().is_some());
    }
}

#[test]
fn an_event_is_logged_that_begins_where_a_page_does() {
    let config = DriverConfig { size: 16, packed: false, event_idx: true, indirect: None, base: 0 };
    let Logged { mut guest, log } = Logged::new(config);
    // Flags, index and elements are all that there is in the page before.
    guest.queue.extend_memory(&guest.memory, Some(0x7_1000 - (4 + 8 * 16)));
    assert_eq!(take(&log), [0x70, 0x71].into());
    guest.queue.arm_kicks();
    assert_eq!(take(&log), [0x71].into());
}

#[test]
fn elements_are_marked_from_where_they_begin_round_the_ring_and_no_others() {
    let (log, file) = log_of(64 * LOG_PAGE);
    let memory = GuestMemory::empty().logging(Some(log));
    // Each element is a page, and so is what is before the first.
    let area = AreaLog::begin(&memory, 3 * LOG_PAGE, 0).unwrap();
    for size in [1, 2, 8] {
        for (from, count) in (0..size).flat_map(|from| (0..=size).map(move |count| (from, count))) {
            area.mark_elements(LOG_PAGE, LOG_PAGE, from, count, size);
            let expected = (from..from + count).map(|at| u64::from(4 + at % size)).collect();
            assert_eq!(take(&file), expected, "{count} of {size} from {from}");
        }
    }
}

#[test]
fn a_disk_s_data_is_logged_where_the_log_is_when_it_is_done() {
    let config = DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 };
    let Logged { mut guest, log } = Logged::new(config);
    guest.driver.add(&[], &[piece(DATA, 2 * LOG_PAGE as u32)], 0).unwrap();
    guest.driver.publish();
    let mut chain = Chain::new();
    assert!(guest.queue.pop(&mut chain).unwrap());
    let lent = guest.queue.lend(chain.writable().to_vec().into(), Access::Write).unwrap();
    let (other, other_file) = log_of(END);
    guest.queue.extend_memory(&Arc::new(guest.memory.logging(Some(other))), None);
    guest.queue.take_back(lent);
    assert_eq!((take(&log).len(), take(&other_file)), (0, pages(DATA..DATA + 2 * LOG_PAGE)));
}

#[test]
#[should_panic(expected = "a queue goes to a map without its regions only when it is drained")]
fn a_log_brings_no_other_memory() {
    let config = DriverConfig { size: 16, packed: false, event_idx: false, indirect: None, base: 0 };
    Guest::new(config).queue.extend_memory(&Arc::new(GuestMemory::empty()), None);
}

#[test]
fn marks_are_in_the_log_or_nowhere() {
    let (log, file) = log_of(16 * LOG_PAGE);
    for (addr, len, expected) in [
        (0, 0, 0..0),
        (0, 1, 0..1),
        (LOG_PAGE - 1, 2, 0..2),
        (3 * LOG_PAGE, 10 * LOG_PAGE, 3..13),
        (7 * LOG_PAGE, LOG_PAGE, 7..8),
        (8 * LOG_PAGE, 1, 8..9),
        (0, 16 * LOG_PAGE, 0..16),
        (15 * LOG_PAGE, 100 * LOG_PAGE, 15..16),
        (16 * LOG_PAGE, 1, 0..0),
        (u64::MAX, u64::MAX, 0..0),
        (0, u64::MAX, 0..16),
    ] {
        log.mark(addr, len);
        assert_eq!(take(&file), expected.collect(), "{len} bytes at {addr:#x}");
    }
}

#[test]
fn a_log_that_is_truncated_is_as_bad_as_memory_that_is() {
    let Logged { mut guest, log } =
        Logged::new(DriverConfig { size: 16, packed: false, event_idx: true, indirect: None, base: 0 });
    assert!(!guest.queue.is_truncated());
    log.set_len(0).unwrap();
    guest.queue.arm_kicks();
    assert!(guest.queue.is_truncated());
}
