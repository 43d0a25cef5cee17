//! Nothing is allocated per request, by either half or the model: in a process of its own, whose allocator counts.

mod counting;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use counting::ALLOCATIONS;
use egret_disk::{Completion, Token};
use egret_virtio::blk::{Blk, BlkConfig};
use egret_virtio::memory::{GuestMemory, Region};
use egret_virtio::ring::{Chain, Driver, DriverConfig, Inflight, InflightConfig, Piece};
use egret_virtio::{Model, Next};

const RING: u64 = 0;
const HEADER: u64 = 0x1_0000;
const DATA: u64 = 0x2_0000;

#[test]
fn nothing_is_allocated_per_request() {
    for (packed, indirect, is_recorded) in
        [(false, None, true), (false, Some(8), false), (true, None, true), (true, Some(8), false)]
    {
        let memory = Arc::new(GuestMemory::empty().with(Region::anonymous(0, 0x10_0000).unwrap()).unwrap());
        let config =
            DriverConfig { size: 64, packed, event_idx: true, indirect, base: if packed { 0x8000 } else { 0 } };
        let mut driver = Driver::new(&memory, RING, config).unwrap();
        let record = is_recorded.then(|| {
            let config = InflightConfig { queues: 1, queue_size: 64, packed };
            let file = Region::anonymous(0, config.bytes()).unwrap().file;
            Inflight::map(file, 0, config.bytes(), config).unwrap().queue(0).unwrap()
        });
        let mut queue = driver.queue().start_recorded(&memory, record).unwrap();
        let blk = Blk::new(BlkConfig {
            capacity_bytes: 1 << 20,
            logical_block_size: 512,
            physical_block_size: 512,
            num_queues: 1,
            queue_size: 64,
            read_only: false,
            serial: "counted".into(),
            writethrough: false,
            discard: None,
            write_zeroes: None,
        })
        .unwrap();
        let mut model = blk.queue(64);
        // A read, a write, a flush and a GET_ID.
        let types = [0u32, 1, 4, 8];
        for (slot, request) in (0..).zip(types) {
            assert!(memory.write(HEADER + 64 * slot, &request.to_le_bytes()));
        }
        let (mut chain, mut completions) = (Chain::new(), Vec::with_capacity(64));
        let mut round = || {
            for slot in 0..types.len() as u64 {
                let header = Piece { addr: HEADER + 64 * slot, len: 16 };
                let status = Piece { addr: header.addr + 32, len: 1 };
                let data = [0, 512, 1024].map(|offset| Piece { addr: DATA + offset, len: 512 });
                match slot {
                    1 => driver.add(&[header, data[0], data[1], data[2]], &[status], slot).unwrap(),
                    _ => driver.add(&[header], &[data[0], data[1], data[2], status], slot).unwrap(),
                }
            }
            driver.publish();
            while queue.pop(&mut chain).unwrap() {
                match model.begin(&memory, &mut chain, Token(0)) {
                    Ok(Next::Submit(_, request)) => {
                        let (token, buffers) = (request.token, request.buffers);
                        completions.push(Completion { token, result: Ok(()), buffers });
                    }
                    Ok(Next::Done(ended)) => queue.add_used(ended.head, ended.written),
                    other => panic!("neither submitted nor done: {other:?}"),
                }
            }
            for completion in completions.drain(..) {
                let Next::Done(ended) = model.end(&memory, completion) else { panic!("a request is one operation") };
                queue.add_used(ended.head, ended.written);
            }
            queue.publish();
            while driver.reap().unwrap().is_some() {}
        };
        (0..100).for_each(|_| round());
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        (0..1000).for_each(|_| round());
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0);
    }
}
