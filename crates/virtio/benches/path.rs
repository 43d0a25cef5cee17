//! What one request costs on its way through this crate, in one thread: the driver's half makes it available, the
//! queue pops it, virtio-blk or virtio-scsi makes a disk request of it, the disk "completes" it at once, and it is used and reaped.
//!
//! A batch of as many requests as are in flight is the unit; the figure to look at is the time for each element.
#![allow(missing_docs)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use egret_disk::{Completion, Request};
use egret_scsi::{LogicalUnit, LunConfig};
use egret_virtio::blk::{Blk, BlkConfig, BlkQueue};
use egret_virtio::scsi::{LunAddress, Scsi, ScsiConfig, ScsiQueue};
use egret_virtio::{Next, RequestModel};
use egret_vring::memory::{GuestMemory, Region};
use egret_vring::ring::{Chain, Driver, DriverConfig, Piece, Queue};

const RING: u64 = 0x10_0000;
const HEADERS: u64 = 0x100_0000;
/// From one header to the next; the response is behind it.
const STRIDE: u64 = 256;
const DATA: u64 = 0x200_0000;

/// Which device the reads go to.
#[derive(Clone, Copy)]
enum Kind {
    Blk,
    Scsi,
}

/// How chains get to the device.
#[derive(Clone, Copy)]
struct Ring {
    name: &'static str,
    packed: bool,
    indirect: Option<u16>,
}

const RINGS: [Ring; 4] = [
    Ring { name: "direct", packed: false, indirect: None },
    Ring { name: "indirect", packed: false, indirect: Some(8) },
    Ring { name: "packed direct", packed: true, indirect: None },
    Ring { name: "packed indirect", packed: true, indirect: Some(8) },
];

/// A guest with 4 KiB reads to make.
struct Guest<M> {
    kind: Kind,
    memory: Arc<GuestMemory>,
    driver: Driver,
    queue: Queue,
    model: M,
    chain: Chain,
    completions: Vec<Completion>,
}

impl Guest<BlkQueue> {
    fn blk(ring: Ring) -> Self {
        let blk = Blk::new(BlkConfig {
            capacity_bytes: 1 << 30,
            physical_block_size: 4096,
            queue_size: 256,
            ..BlkConfig::default()
        })
        .unwrap();
        Self::new(Kind::Blk, ring, blk.queue(256))
    }
}

impl Guest<ScsiQueue> {
    fn scsi(ring: Ring) -> Self {
        let scsi = Scsi::new(ScsiConfig { num_queues: 1, queue_size: 256 }, "guest").unwrap();
        let config = LunConfig { capacity_bytes: 1 << 30, serial: "s".into(), ..LunConfig::default() };
        let unit = Arc::new(LogicalUnit::new(config).unwrap());
        scsi.add(scsi.prepare(LunAddress { target: 0, lun: 0 }, unit).unwrap()).unwrap();
        let mut guest = Self::new(Kind::Scsi, ring, scsi.request_queue(0, 256));
        // The first command hears of the power on.
        guest.add(1);
        while guest.queue.pop(&mut guest.chain).unwrap() {
            match guest.model.begin(&guest.memory, &mut guest.chain, 1) {
                Ok(Next::Complete(ended)) => guest.queue.add_used(ended.head, ended.written),
                other => panic!("not done: {other:?}"),
            }
        }
        guest.queue.publish_used();
        guest.reap();
        guest
    }
}

impl<M: RequestModel> Guest<M> {
    fn new(kind: Kind, Ring { packed, indirect, .. }: Ring, model: M) -> Self {
        // Three regions, as QEMU has them.
        let memory = GuestMemory::empty().with(Region::anonymous(0, 0xa_0000).unwrap()).unwrap();
        let memory = memory.with(Region::anonymous(0xc_0000, 0x400_0000).unwrap()).unwrap();
        let memory = Arc::new(memory.with(Region::anonymous(1 << 32, 0x10_0000).unwrap()).unwrap());
        for slot in 0..256 {
            let mut header = [0; 51];
            match kind {
                Kind::Blk => header[8..16].copy_from_slice(&(slot * 8u64).to_le_bytes()),
                Kind::Scsi => {
                    (header[0], header[2], header[19], header[27]) = (1, 0x40, 0x28, 8);
                    header[21..25].copy_from_slice(&(slot as u32 * 8).to_be_bytes());
                }
            }
            assert!(memory.write(HEADERS + slot * STRIDE, &header));
        }
        let config =
            DriverConfig { size: 256, packed, event_idx: true, indirect, base: if packed { 0x8000 } else { 0 } };
        let driver = Driver::new(&memory, RING, config).unwrap();
        let queue = driver.queue().start(&memory).unwrap();
        Self { kind, memory, driver, queue, model, chain: Chain::new(), completions: Vec::with_capacity(256) }
    }

    /// The driver's part before: `batch` reads made available.
    fn add(&mut self, batch: u64) {
        for slot in 0..batch {
            let header = HEADERS + slot * STRIDE;
            let data = Piece { addr: DATA + slot * 4096, len: 4096 };
            let (len, writable) = match self.kind {
                Kind::Blk => (16, [data, Piece { addr: header + 64, len: 1 }]),
                Kind::Scsi => (51, [Piece { addr: header + 64, len: 108 }, data]),
            };
            let readable = [Piece { addr: header, len }];
            self.driver.add(&readable, &writable, slot).unwrap();
        }
        black_box(self.driver.publish());
    }

    /// The device's part: all of it.
    fn serve(&mut self) {
        self.serve_with(|| ());
    }

    /// The same, with `each` at the beginning of every request and at its end.
    fn serve_with(&mut self, mut each: impl FnMut()) {
        while self.queue.pop(&mut self.chain).unwrap() {
            match self.model.begin(&self.memory, &mut self.chain, 1) {
                Ok(Next::Submit(_, request)) => {
                    each();
                    let Request { op, token, buffers, .. } = black_box(request);
                    let buffers = self.queue.lend(buffers, op.access()).unwrap();
                    self.completions.push(Completion { token, result: Ok(()), buffers });
                }
                other => panic!("not a request for the disk: {other:?}"),
            }
        }
        for Completion { token, result, buffers } in self.completions.drain(..) {
            each();
            let buffers = self.queue.take_back(buffers);
            match self.model.end(&self.memory, Completion { token, result, buffers }) {
                Next::Complete(ended) => self.queue.add_used(ended.head, ended.written),
                other => panic!("not done: {other:?}"),
            }
        }
        black_box(self.queue.publish_used());
    }

    /// The driver's part after.
    fn reap(&mut self) {
        while let Some(used) = self.driver.reap().unwrap() {
            black_box(used);
        }
    }
}

fn path(criterion: &mut Criterion) {
    measure(criterion, "blk", Guest::blk);
    measure(criterion, "scsi", Guest::scsi);
    clock(criterion);
}

/// What the rule is worth that a phase of the turn reads the clock once: the same requests with two readings for all
/// of them, and with two for each.
fn clock(criterion: &mut Criterion) {
    let read = || {
        black_box(Instant::now());
    };
    let mut group = criterion.benchmark_group("clock, blk, direct, both halves");
    for batch in [1, 64] {
        group.throughput(Throughput::Elements(batch));
        group.bench_function(BenchmarkId::new("read by phase", batch), |bencher| {
            let mut guest = Guest::blk(RINGS[0]);
            bencher.iter(|| {
                guest.add(batch);
                read();
                read();
                guest.serve();
                guest.reap();
            });
        });
        group.bench_function(BenchmarkId::new("read by request", batch), |bencher| {
            let mut guest = Guest::blk(RINGS[0]);
            bencher.iter(|| {
                guest.add(batch);
                guest.serve_with(read);
                guest.reap();
            });
        });
    }
    group.finish();
}

fn measure<M: RequestModel>(criterion: &mut Criterion, device: &str, make: impl Fn(Ring) -> Guest<M>) {
    for ring in RINGS {
        let kind = ring.name;
        let mut group = criterion.benchmark_group(format!("{device}, {kind}, both halves"));
        for batch in [1, 16, 64] {
            group.throughput(Throughput::Elements(batch));
            group.bench_function(BenchmarkId::from_parameter(batch), |bencher| {
                let mut guest = make(ring);
                bencher.iter(|| {
                    guest.add(batch);
                    guest.serve();
                    guest.reap();
                });
            });
        }
        group.finish();

        let mut group = criterion.benchmark_group(format!("{device}, {kind}, device's half"));
        for batch in [16, 64] {
            group.throughput(Throughput::Elements(batch));
            group.bench_function(BenchmarkId::from_parameter(batch), |bencher| {
                let mut guest = make(ring);
                bencher.iter_custom(|batches| {
                    let mut spent = Duration::ZERO;
                    for _ in 0..batches {
                        guest.add(batch);
                        let began = Instant::now();
                        guest.serve();
                        spent += began.elapsed();
                        guest.reap();
                    }
                    spent
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, path);
criterion_main!(benches);
