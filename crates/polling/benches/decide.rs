//! What a policy costs per wait: one `window` and one `observe`, averaged over a generated trace.
#![allow(missing_docs)]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use egret_polling::builtin::Builtin;
use egret_polling::{
    Active, BlockCost, Done, EventKind, LastWait, Nanos, Parameters, Policy, PolicyKind, Slot, Standing, Wait,
};

/// Two sources, as at one disk: its queue and its completions.
const ACTIVE: [Active; 2] = [
    Active { slot: Slot(0), kind: EventKind::Queue, ready: false },
    Active { slot: Slot(1), kind: EventKind::Completion, ready: true },
];

/// What the loop did between two waits.
const DONE: Done = Done { requests: 1, took: Nanos(2_000) };

/// Length, requests in flight, and what ended it, of every wait.
fn waits(trace: Builtin) -> Vec<(Nanos, u32, EventKind)> {
    trace.generate().waits.iter().map(|wait| (wait.length, wait.in_flight, wait.ended_by)).collect()
}

fn run(policy: &mut dyn Policy, waits: &[(Nanos, u32, EventKind)]) {
    let mut last = LastWait::default();
    for &(length, in_flight, kind) in waits {
        let window = policy.window(&Standing { in_flight, done: DONE, last, ..Standing::default() });
        let blocked = length > window;
        policy.observe(&Wait { length, spun: length.min(window), blocked, active: black_box(&ACTIVE) });
        last = LastWait { kind, length };
    }
}

fn decide(c: &mut Criterion) {
    for trace in [Builtin::Mixture, Builtin::Bursts, Builtin::HeavyTail] {
        let waits = waits(trace);
        let mut group = c.benchmark_group(trace.name());
        group.throughput(Throughput::Elements(waits.len() as u64));
        for &kind in PolicyKind::ALL {
            let mut policy = egret_polling::build(kind, &Parameters::default()).expect("the defaults are in range");
            policy.set_block_cost(BlockCost::default());
            group.bench_function(kind.as_str(), |b| b.iter(|| run(policy.as_mut(), &waits)));
        }
        group.finish();
    }
}

criterion_group!(benches, decide);
criterion_main!(benches);
