//! Nothing is allocated per request, by either half or the model: in a process of its own, whose allocator counts.

mod counting;

use std::sync::Arc;
use std::task::Waker;

use counting::ALLOCATIONS_HERE;
use egret_disk::{Completion, Request};
use egret_scsi::{LogicalUnit, LunConfig};
use egret_virtio::blk::{Blk, BlkConfig};
use egret_virtio::scsi::{LunAddress, Scsi, ScsiConfig};
use egret_virtio::{Device, Model, Next};
use egret_vring::memory::{DirtyLog, GuestMemory, MemoryRules, Region};
use egret_vring::ring::{Chain, Driver, DriverConfig, Inflight, InflightConfig, Piece, QueueConfig};

const RING: u64 = 0;
const HEADER: u64 = 0x1_0000;
const DATA: u64 = 0x2_0000;

/// A device, and requests of it: how each is described, and whether data goes to the disk.
struct Case {
    model: Model,
    requests: Vec<(Vec<u8>, bool)>,
    answer: u32,
}

/// A read, a write, a flush and a GET_ID.
fn blk() -> Case {
    let blk = Blk::new(BlkConfig {
        capacity_bytes: 1 << 20,
        queue_size: 64,
        serial: "counted".into(),
        ..BlkConfig::default()
    })
    .unwrap();
    let header = |kind: u32| [&kind.to_le_bytes()[..], &[0; 12]].concat();
    let requests = [0u32, 1, 4, 8].map(|kind| (header(kind), kind == 1)).into();
    Case { model: blk.model(0, 64), requests, answer: 1 }
}

/// TEST UNIT READY, which a unit that is new answers with news at first, then a read, a write and SYNCHRONIZE CACHE.
fn scsi() -> Case {
    let scsi = Scsi::new(ScsiConfig { num_queues: 1, queue_size: 64 }, "guest").unwrap();
    let config = LunConfig { capacity_bytes: 1 << 20, serial: "counted".into(), ..LunConfig::default() };
    let unit = Arc::new(LogicalUnit::new(config).unwrap());
    scsi.add(scsi.prepare(LunAddress { target: 0, lun: 0 }, unit).unwrap()).unwrap();
    let header = |code: u8| {
        let mut header = vec![0; 51];
        (header[0], header[2], header[19], header[27]) = (1, 0x40, code, if code == 0 { 0 } else { 3 });
        header
    };
    let requests = [0, 0x28, 0x2a, 0x35].map(|code| (header(code), code == 0x2a)).into();
    let mut model = scsi.model(2, 64);
    model.set_waker(Some(Waker::noop().clone()));
    Case { model, requests, answer: 108 }
}

#[test]
fn nothing_is_allocated_per_request() {
    for (packed, indirect, is_recorded) in
        [(false, None, true), (false, Some(8), false), (true, None, true), (true, Some(8), false)]
    {
        for is_logged in [false, true] {
            for case in [blk(), scsi()] {
                count(case, packed, indirect, is_recorded, is_logged);
            }
        }
    }
}

fn count(case: Case, packed: bool, indirect: Option<u16>, is_recorded: bool, is_logged: bool) {
    let Case { mut model, requests, answer } = case;
    let memory = GuestMemory::empty().with(Region::anonymous(0, 0x10_0000).unwrap()).unwrap();
    let log = is_logged.then(|| {
        let file = Region::anonymous(0, 4096).unwrap().file;
        Arc::new(DirtyLog::map(file, 0, 4096, &MemoryRules::default()).unwrap())
    });
    let memory = Arc::new(memory.logging(log));
    let config = DriverConfig { size: 64, packed, event_idx: true, indirect, base: if packed { 0x8000 } else { 0 } };
    let mut driver = Driver::new(&memory, RING, config).unwrap();
    let record = is_recorded.then(|| {
        let config = InflightConfig { queues: 1, queue_size: 64, packed };
        let file = Region::anonymous(0, config.bytes()).unwrap().file;
        Inflight::map(file, 0, config.bytes(), config).unwrap().queue(0).unwrap()
    });
    let config = driver.queue();
    let config = QueueConfig { log: is_logged.then_some(config.used), ..config };
    let mut queue = config.start_recorded(&memory, record).unwrap();
    for (slot, (header, _)) in (0..).zip(&requests) {
        assert!(memory.write(HEADER + 256 * slot, header));
    }
    let (mut chain, mut completions) = (Chain::new(), Vec::with_capacity(64));
    let mut round = || {
        for (slot, (header, is_out)) in (0..).zip(&requests) {
            let header = Piece { addr: HEADER + 256 * slot, len: header.len() as u32 };
            let answer = Piece { addr: header.addr + 64, len: answer };
            let [a, b, c] = [0, 512, 1024].map(|offset| Piece { addr: DATA + offset, len: 512 });
            match (is_out, answer.len) {
                (true, _) => driver.add(&[header, a, b, c], &[answer], slot).unwrap(),
                // A status comes last, and a response first.
                (false, 1) => driver.add(&[header], &[a, b, c, answer], slot).unwrap(),
                (false, _) => driver.add(&[header], &[answer, a, b, c], slot).unwrap(),
            }
        }
        driver.publish();
        while queue.pop(&mut chain).unwrap() {
            match model.begin(&memory, &mut chain, 0) {
                Ok(Next::Submit(_, request)) => {
                    let Request { op, token, buffers, .. } = request;
                    let buffers = queue.lend(buffers, op.access()).unwrap();
                    completions.push(Completion { token, result: Ok(()), buffers });
                }
                Ok(Next::Complete(ended)) => queue.add_used(ended.head, ended.written),
                other => panic!("neither submitted nor done: {other:?}"),
            }
        }
        let submitted = completions.len();
        for Completion { token, result, buffers } in completions.drain(..) {
            let completion = Completion { token, result, buffers: queue.take_back(buffers) };
            let Next::Complete(ended) = model.end(&memory, completion) else { panic!("a request is one operation") };
            queue.add_used(ended.head, ended.written);
        }
        queue.publish_used();
        model.caught_up();
        while driver.reap().unwrap().is_some() {}
        submitted
    };
    (0..100).for_each(|_| assert_eq!(round(), 3));
    let before = ALLOCATIONS_HERE.get();
    (0..1000).for_each(|_| assert_eq!(round(), 3));
    assert_eq!(ALLOCATIONS_HERE.get() - before, 0);
}
