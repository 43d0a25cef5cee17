//! The same rings through virtio-queue, whose device's half nobody here wrote.

use std::sync::Arc;

use proptest::prelude::*;
use proptest::sample::Index;
use virtio_queue::desc::{RawDescriptor, split::Descriptor};
use virtio_queue::mock::MockSplitQueue;
use virtio_queue::{DescriptorChain, Queue as TheirQueue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

use crate::memory::IoVec;

use crate::memory::{GuestMemory, Region};
use crate::ring::{Chain, Driver, DriverConfig, Piece, Queue, QueueConfig};
use crate::testing::{RING, piece};

/// A chain as either side sees it: its head, and its buffers that are not empty.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    head: u16,
    readable: Vec<Piece>,
    writable: Vec<Piece>,
}

/// One memory, mapped by both.
struct Memory {
    ours: Arc<GuestMemory>,
    theirs: GuestMemoryMmap,
    starts: Vec<(u64, u64)>,
}

impl Memory {
    fn new(regions: &[(u64, u64)]) -> Self {
        let mut ours = GuestMemory::empty();
        let mut ranges = Vec::new();
        for &(start, size) in regions {
            let region = Region::anonymous(start, size).unwrap();
            let file = region.file.try_clone().unwrap();
            ranges.push((GuestAddress(start), size as usize, Some(FileOffset::new(file, 0))));
            ours = ours.with(region).unwrap();
        }
        let theirs = GuestMemoryMmap::from_ranges_with_files(&ranges).unwrap();
        Self { ours: Arc::new(ours), theirs, starts: regions.to_vec() }
    }

    /// A piece of ours as a guest address.
    fn address(&self, at: &IoVec) -> Piece {
        let host = at.base() as u64;
        let found = self.starts.iter().find_map(|&(start, size)| {
            let base = self.ours.slice(start, 1)?.base() as u64;
            (base..base + size).contains(&host).then(|| start + (host - base))
        });
        piece(found.expect("pieces are inside the map"), at.len() as u32)
    }

    fn our_view(&self, chain: &Chain) -> Seen {
        let all = |pieces: &[IoVec]| pieces.iter().map(|at| self.address(at)).collect();
        Seen { head: chain.head(), readable: all(chain.readable()), writable: all(chain.writable()) }
    }
}

fn their_view(chain: DescriptorChain<&GuestMemoryMmap>) -> Seen {
    let head = chain.head_index();
    let (writable, readable): (Vec<_>, Vec<_>) = chain.filter(|at| at.len() > 0).partition(|at| at.is_write_only());
    let all = |these: Vec<Descriptor>| these.iter().map(|at| piece(at.addr().raw_value(), at.len())).collect();
    Seen { head, readable: all(readable), writable: all(writable) }
}

/// Their queue on the ring of `config`.
fn their_queue(config: QueueConfig) -> TheirQueue {
    let mut queue = TheirQueue::new(config.size).unwrap();
    let halves = |addr: u64| (Some(addr as u32), Some((addr >> 32) as u32));
    let (low, high) = halves(config.desc);
    queue.set_desc_table_address(low, high);
    let (low, high) = halves(config.avail);
    queue.set_avail_ring_address(low, high);
    let (low, high) = halves(config.used);
    queue.set_used_ring_address(low, high);
    queue.set_event_idx(config.event_idx);
    queue.set_next_avail(config.base as u16);
    queue.set_next_used(config.base as u16);
    queue.set_ready(true);
    queue
}

/// What happens between two looks at the rings.
#[derive(Clone, Debug)]
struct Batch {
    /// Lengths of the readable and the writable buffers of each chain to add.
    chains: Vec<(Vec<u32>, Vec<u32>)>,
    /// How many of the chains in flight to use, and each which of those left.
    used: Vec<Index>,
    driver_arms: bool,
    device_arms: bool,
}

fn batch() -> impl Strategy<Value = Batch> {
    let lengths = || prop::collection::vec(prop_oneof![9 => 1u32..8192, 1 => Just(0u32)], 0..4);
    let chain = (lengths(), lengths()).prop_map(|(readable, writable)| match (readable.len(), writable.len()) {
        (0, 0) => (vec![1], writable),
        _ => (readable, writable),
    });
    let chains = prop::collection::vec(chain, 0..6);
    (chains, prop::collection::vec(any::<Index>(), 0..8), any::<bool>(), any::<bool>())
        .prop_map(|(chains, used, driver_arms, device_arms)| Batch { chains, used, driver_arms, device_arms })
}

proptest! {
    /// A driver of ours before a queue of ours, and its twin before one of theirs: the same chains, the same used ring to
    /// the byte, the same wishes and the same notifications.
    #[test]
    fn our_queue_does_what_theirs_does(
        event_idx: bool,
        indirect: bool,
        base in prop_oneof![Just(0u16), 65500u16..=65535, any::<u16>()],
        batches in prop::collection::vec(batch(), 1..60),
    ) {
        let config = DriverConfig { size: 16, packed: false, event_idx, indirect: indirect.then_some(8), base };
        let (a, b) = (Memory::new(&[(RING, 0x40_0000)]), Memory::new(&[(RING, 0x40_0000)]));
        let mut our_driver = Driver::new(&a.ours, RING, config).unwrap();
        let mut their_driver = Driver::new(&b.ours, RING, config).unwrap();
        let mut ours: Queue = our_driver.queue().start(&a.ours).unwrap();
        let mut theirs = their_queue(their_driver.queue());
        let mut chain = Chain::new();
        let mut in_flight = Vec::new();
        let mut token = 0;

        for Batch { chains, used, driver_arms, device_arms } in batches {
            for (readable, writable) in chains {
                let at = |lens: Vec<u32>, from: u64| -> Vec<Piece> {
                    (from..).step_by(8192).zip(lens).map(|(addr, len)| piece(addr + token % 7, len)).collect()
                };
                let (readable, writable) = (at(readable, RING + 0x10_0000), at(writable, RING + 0x20_0000));
                let added = our_driver.add(&readable, &writable, token);
                prop_assert_eq!(added, their_driver.add(&readable, &writable, token));
                token += 1;
            }
            prop_assert_eq!(our_driver.publish(), their_driver.publish());

            loop {
                let popped = ours.pop(&mut chain).unwrap();
                let their_chain = theirs.pop_descriptor_chain(&b.theirs);
                prop_assert_eq!(popped, their_chain.is_some());
                let Some(their_chain) = their_chain else { break };
                let seen = a.our_view(&chain);
                prop_assert_eq!(&seen, &their_view(their_chain));
                in_flight.push(seen.head);
            }
            for which in used {
                if in_flight.is_empty() {
                    break;
                }
                let head = in_flight.swap_remove(which.index(in_flight.len()));
                ours.add_used(head, token as u32);
                theirs.add_used(&b.theirs, head, token as u32).unwrap();
            }
            let anything = ours.next_used() != used_index(&a, &our_driver.queue());
            let notify = ours.publish_used();
            if anything && event_idx {
                // Without EVENT_IDX theirs does not look at the driver's flag.
                prop_assert_eq!(notify, theirs.needs_notification(&b.theirs).unwrap());
            }
            if device_arms {
                let slipped_in = theirs.enable_notification(&b.theirs).unwrap();
                prop_assert_eq!(ours.arm_kicks(), !slipped_in);
            } else {
                ours.suppress_kicks();
                theirs.disable_notification(&b.theirs).unwrap();
            }
            prop_assert_eq!(used_ring(&a, &our_driver.queue()), used_ring(&b, &their_driver.queue()));
            if driver_arms {
                prop_assert_eq!(our_driver.arm_calls(), their_driver.arm_calls());
            }
            loop {
                let reaped = our_driver.reap().unwrap();
                prop_assert_eq!(reaped, their_driver.reap().unwrap());
                if reaped.is_none() {
                    break;
                }
            }
        }
        in_flight.into_iter().for_each(|head| ours.abandon(head));
    }

    /// Their mock of a driver before both queues: any descriptors at all. What ours takes, it takes as theirs does.
    #[test]
    fn a_mocked_driver_is_understood_as_they_understand_it(
        table in prop::collection::vec(
            (0u64..0x4000, 0u32..0x100, prop_oneof![6 => 0u16..4, 1 => 4u16..8], 0u16..66),
            64,
        ),
        nested in prop::collection::vec((0u64..0x4000, 0u32..0x100, 0u16..4, 0u16..18), 0..16),
    ) {
        let memory = Memory::new(&[(RING, 0x10_0000), (0x3000_0000, 0x10_0000)]);
        let mock = MockSplitQueue::create(&memory.theirs, GuestAddress(RING), 64);
        let indirect = 4u16;
        let descriptors: Vec<RawDescriptor> = table.iter().map(|&(offset, len, flags, next)| {
            let (addr, len) = match flags & indirect {
                0 => (RING + 0x1_0000 + offset, len),
                _ => (RING + 0x2_0000, 16 * nested.len() as u32),
            };
            RawDescriptor::from(Descriptor::new(addr, len, flags, next))
        }).collect();
        for (at, &(offset, len, flags, next)) in (0u64..).zip(&nested) {
            let nested = RawDescriptor::from(Descriptor::new(RING + 0x1_0000 + offset, len, flags, next));
            memory.theirs.write_obj(nested, GuestAddress(RING + 0x2_0000 + 16 * at)).unwrap();
        }
        // No more heads than 32, and nothing is used: the mock lays its used ring over the second half of the available
        // one.
        for (index, descriptor) in (0u16..).zip(&descriptors) {
            mock.desc_table().store(index, *descriptor).unwrap();
        }
        for head in 0..32 {
            mock.avail().ring().ref_at(head).unwrap().store(u16::to_le(2 * head as u16));
        }
        mock.avail().idx().store(u16::to_le(32));

        let mut theirs: TheirQueue = mock.create_queue().unwrap();
        let their_chains: Vec<Seen> = theirs.iter(&memory.theirs).unwrap().map(their_view).collect();
        prop_assert_eq!(their_chains.len(), 32);
        // A broken queue stays broken, so every head has a new one.
        for (base, their_chain) in (0..).zip(their_chains) {
            let mut ours = QueueConfig { base, ..mock_config(&mock) }.start(&memory.ours).unwrap();
            let mut chain = Chain::new();
            if ours.pop(&mut chain).is_ok() {
                prop_assert_eq!(memory.our_view(&chain), their_chain);
                ours.abandon(chain.head());
            }
        }
    }
}

fn used_index(memory: &Memory, config: &QueueConfig) -> u16 {
    memory.theirs.read_obj(GuestAddress(config.used + 2)).unwrap()
}

/// Every byte of the used ring, the event included.
fn used_ring(memory: &Memory, config: &QueueConfig) -> Vec<u8> {
    let mut bytes = vec![0; 4 + 8 * usize::from(config.size) + if config.event_idx { 2 } else { 0 }];
    memory.theirs.read_slice(&mut bytes, GuestAddress(config.used)).unwrap();
    bytes
}

#[test]
fn chains_that_their_mock_makes_come_out() {
    for (len, indirect) in [(1, false), (5, false), (64, false), (1, true), (3, true), (64, true), (200, true)] {
        let memory = Memory::new(&[(0x1000, 0x1000), (RING, 0x10_0000), (0x3000_0000, 0x10_0000)]);
        let mut mock = MockSplitQueue::create(&memory.theirs, GuestAddress(RING), 64);
        match indirect {
            true => mock.add_indirect_chain(len).unwrap(),
            false => mock.add_chain(len).unwrap(),
        }
        let mut queue = mock_config(&mock).start(&memory.ours).unwrap();
        let mut chain = Chain::new();
        assert!(queue.pop(&mut chain).unwrap());
        assert_eq!(memory.our_view(&chain).readable, vec![piece(0x1000, 0x1000); usize::from(len)]);
        queue.abandon(chain.head());
    }
}

fn mock_config(mock: &MockSplitQueue<'_, GuestMemoryMmap>) -> QueueConfig {
    QueueConfig {
        size: 64,
        desc: mock.desc_table_addr().raw_value(),
        avail: mock.avail_addr().raw_value(),
        used: mock.used_addr().raw_value(),
        base: 0,
        packed: false,
        event_idx: false,
        log: None,
    }
}
