//! What a request costs on its way through the engines: push, submit, reap, without a loop around it.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use egret_disk::{Aio, Disk, DiskSlot, Driver, EngineOptions, EngineSet, Op, Options, Request, RequestToken};
use egret_event_loop::{Backend, Nanos, clock};
use egret_vring::memory::{IoVec, Lent};

const BLOCK: usize = 4096;

/// Memory for one request, aligned for direct I/O.
#[repr(align(4096))]
struct Block([u8; BLOCK]);

/// Runs a batch of reads to its end, spinning, and keeps the buffers for the next one.
fn batch(engines: &mut EngineSet, slot: DiskSlot, spare: &mut Vec<Lent>, blocks: u64) {
    let now = clock::now();
    for (i, buffers) in spare.drain(..).enumerate() {
        let offset = (i as u64 * 7919) % blocks * BLOCK as u64;
        let token = RequestToken(i as u64);
        engines.push(slot, Request { op: Op::Read, offset, len: BLOCK as u64, buffers, token });
    }
    engines.submit(now);
    while engines.in_flight() > 0 {
        if engines.has_completions() {
            engines.reap(now, &mut |done| {
                black_box(done.completion.result).expect("reads succeed");
                spare.push(done.completion.buffers);
            });
        }
    }
}

fn bench(criterion: &mut Criterion, name: &str, options: &Options) {
    let disk = Arc::new(Disk::open(options).expect("it opens"));
    let mut engines = EngineSet::new(EngineOptions::default());
    let slot = engines.attach(&disk).expect("it attaches");
    let mut group = criterion.benchmark_group(name);
    for depth in [1usize, 64] {
        let mut memory: Vec<Block> = (0..depth).map(|_| Block([0; BLOCK])).collect();
        // SAFETY: the memory outlives every batch, each of which runs to its end.
        let piece = |block: &mut Block| unsafe { Lent::assume(vec![IoVec::new(block.0.as_mut_ptr(), BLOCK)]) };
        let mut spare: Vec<_> = memory.iter_mut().map(piece).collect();
        group.throughput(Throughput::Elements(depth as u64));
        group.bench_function(BenchmarkId::from_parameter(depth), |b| {
            b.iter(|| batch(&mut engines, slot, &mut spare, disk.size() / BLOCK as u64));
        });
    }
}

fn engines(criterion: &mut Criterion) {
    let null = Driver::Null { size: 1 << 30, latency: Nanos::ZERO, read_zeroes: false };
    bench(criterion, "null", &Options::new("null0", null));

    let dir = tempfile::tempdir().expect("a directory");
    let filename = dir.path().join("disk.img");
    std::fs::write(&filename, vec![1; 64 << 20]).expect("an image");
    let file = Options::new("disk0", Driver::File { filename });
    for &aio in Aio::ALL {
        bench(criterion, &format!("{aio}, direct"), &Options { aio, direct: true, ..file.clone() });
    }
    bench(criterion, "io_uring, cached", &Options { aio: Aio::IoUring, ..file.clone() });
    bench(criterion, "threads, cached", &Options { aio: Aio::Threads, ..file });
}

criterion_group!(benches, engines);
criterion_main!(benches);
