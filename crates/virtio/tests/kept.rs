//! What a queue keeps of the memory that its driver made it take: in a process of its own, whose allocator counts.

mod counting;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use counting::LIVE;
use egret_disk::{Completion, Request};
use egret_scsi::{DiscardConfig, LogicalUnit, LunConfig};
use egret_virtio::blk::{Blk, BlkConfig};
use egret_virtio::scsi::{LunAddress, Scsi, ScsiConfig};
use egret_virtio::{Device, Model, Next};
use egret_vring::memory::{GuestMemory, Region};
use egret_vring::ring::{Chain, Driver, DriverConfig, Piece};

const HEADER: u64 = 0x30_0000;
const ANSWER: u64 = HEADER + 0x1000;
const DATA: u64 = HEADER + 0x2000;
const MEMORY: u64 = 0x80_0000;

/// Chains of a queue, and pieces of the longest chain.
const SIZE: u16 = 128;
const PIECES: u32 = 1000;

/// A header, bytes of answer, and which way the data goes.
type Chained = (Vec<u8>, u32, Way);

#[derive(Clone, Copy)]
enum Way {
    In,
    Out,
}

fn blk(kind: u32, way: Way) -> Chained {
    let mut header = vec![0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    (header, 1, way)
}

fn scsi(cdb: &[u8], way: Way) -> Chained {
    let mut header = vec![0; 51];
    (header[0], header[2]) = (1, 0x40);
    header[19..19 + cdb.len()].copy_from_slice(cdb);
    (header, 108, way)
}

/// Fills the queue with one chain, that many times, and lets all of them end when all are under way. Returns the most
/// memory that there was meanwhile.
fn storm(memory: &Arc<GuestMemory>, model: &mut Model, (header, answer, way): &Chained) -> usize {
    let config = DriverConfig { size: SIZE, packed: false, event_idx: false, indirect: Some(1024), base: 0 };
    let mut driver = Driver::new(memory, 0, config).unwrap();
    let mut queue = driver.queue().start(memory).unwrap();
    assert!(memory.write(HEADER, header));
    let header = Piece { addr: HEADER, len: header.len() as u32 };
    let answer = Piece { addr: ANSWER, len: *answer };
    let data = (0..PIECES).map(|i| Piece { addr: DATA + 0x200 * u64::from(i), len: 512 });
    for token in 0..u64::from(SIZE) {
        match way {
            Way::In => driver.add(&[header], &[answer].into_iter().chain(data.clone()).collect::<Vec<_>>(), token),
            Way::Out => driver.add(&[header].into_iter().chain(data.clone()).collect::<Vec<_>>(), &[answer], token),
        }
        .unwrap();
    }
    driver.publish();
    let (mut chain, mut requests, mut nexts) = (Chain::new(), Vec::new(), Vec::new());
    while queue.pop(&mut chain).unwrap() {
        nexts.push(model.begin(memory, &mut chain, 0).unwrap());
    }
    let mut most = LIVE.load(Ordering::Relaxed);
    loop {
        for next in nexts.drain(..) {
            match next {
                Next::Submit(_, request) => requests.push(request),
                Next::Complete(ended) => queue.add_used(ended.head, ended.written),
                Next::Wait => {}
            }
        }
        most = most.max(LIVE.load(Ordering::Relaxed));
        let Some(Request { token, buffers, .. }) = requests.pop() else { break };
        nexts.push(model.end(memory, Completion { token, result: Ok(()), buffers }));
        model.resume(memory, &mut nexts);
        model.caught_up();
    }
    assert_eq!(queue.in_flight(), 0);
    most
}

#[test]
fn a_queue_keeps_little_whatever_it_was_sent() {
    let memory = GuestMemory::empty().with(Region::anonymous(0, MEMORY).unwrap()).unwrap();
    let memory = Arc::new(memory);
    let disk = Blk::new(BlkConfig { capacity_bytes: 1 << 30, queue_size: SIZE, ..BlkConfig::default() }).unwrap();
    let controller = Scsi::new(ScsiConfig { num_queues: 1, queue_size: SIZE }, "guest").unwrap();
    let discard = DiscardConfig {
        max_bytes: 1 << 20,
        granularity_bytes: 512,
        alignment_bytes: 0,
        max_descriptors: 256,
        reads_zeroes: false,
    };
    let config = LunConfig {
        capacity_bytes: 1 << 30,
        serial: "s".into(),
        discard: Some(discard),
        max_compare_and_write_blocks: 255,
        ..LunConfig::default()
    };
    let unit = Arc::new(LogicalUnit::new(config).unwrap());
    controller.add(controller.prepare(LunAddress { target: 0, lun: 0 }, unit).unwrap()).unwrap();
    // UNMAP's list: as many ranges as there may be, of one block each.
    let list = [&[0, 0, 16, 0, 0, 0, 0, 0][..], &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0].repeat(256)].concat();
    assert!(memory.write(DATA, &list));
    let [read, write, verify, compare, same] =
        [0x28, 0x2a, 0x2f, 0x2f, 0x41].map(|code| [code, 0, 0, 0, 0, 0, 0, (PIECES >> 8) as u8, PIECES as u8, 0]);
    let compare = [&compare[..1], &[0x02], &compare[2..]].concat();
    let compare_and_write = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 255, 0, 0];
    let unmap = [0x42, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0];
    let opcodes = [0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0];
    let of_blk = vec![blk(0, Way::In), blk(1, Way::Out)];
    let of_scsi = vec![
        // News first: that the unit is there.
        scsi(&[0], Way::In),
        scsi(&read, Way::In),
        scsi(&write, Way::Out),
        scsi(&verify, Way::Out),
        scsi(&compare, Way::Out),
        scsi(&same, Way::Out),
        scsi(&compare_and_write, Way::Out),
        scsi(&unmap, Way::Out),
        scsi(&opcodes, Way::In),
    ];
    for (device, index, chains) in [(disk as Arc<dyn Device>, 0, of_blk), (controller, 2, of_scsi)] {
        let mut model = device.model(index, SIZE);
        model.set_waker(Some(std::task::Waker::noop().clone()));
        let before = LIVE.load(Ordering::Relaxed);
        for (at, chained) in chains.iter().enumerate() {
            let most = storm(&memory, &mut model, chained) - before;
            let kept = LIVE.load(Ordering::Relaxed).saturating_sub(before);
            // With all chains under way each has its list of pieces, and then some of them scratch memory.
            let lists = usize::from(SIZE) * PIECES as usize * 16;
            assert!(most < 2 * lists, "{index}, {at}: {most} bytes for {lists} of lists");
            assert!(kept < usize::from(SIZE) * 1024, "{index}, {at}: {kept} bytes kept of {most}");
        }
    }
}
