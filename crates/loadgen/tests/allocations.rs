//! Nothing is allocated while a load runs: in a process of its own, whose allocator counts.

#[path = "../../virtio/tests/counting/mod.rs"]
mod counting;
mod support;

use std::sync::atomic::Ordering;
use std::time::Duration;

use counting::ALLOCATIONS;
use egret_loadgen::load::{Edge, Rate, RateProcess, Span, Spec, Waiting};
use support::{Device, Puppet, PuppetOptions, job};

#[test]
fn nothing_is_allocated_while_a_load_runs() {
    let open = Some(Rate { iops: 2_000.0, process: RateProcess::Poisson });
    for rate_iops in [None, open] {
        for waiting in [Waiting::Polling, Waiting::Blocking] {
            // The server is in this process, and allocates nothing either.
            let puppet = Puppet::with(PuppetOptions::default(), Device::serve);
            let rw = "randwrite".parse().unwrap();
            let spec = Spec { rw, iodepth: 8, waiting, rate_iops, verify: Some(3), ..Spec::default() };
            let mut job = job(&puppet, &spec);
            let mut tally = job.tally();
            let span = Span { ramp: Duration::from_millis(10), length: Duration::from_millis(20) };
            // How much comes of one run depends on who else wants the cores; and whenever more is in flight than ever before the
            // server grows the buffers that it uses again.
            let (mut before, mut made) = (0, 0);
            while before == 0 || tally.requests() < before + 500 {
                if before == 0 {
                    before = tally.requests();
                }
                let mut counts = [0, 0];
                job.run(span, &mut tally, &mut |edge| {
                    counts[usize::from(edge == Edge::End)] = ALLOCATIONS.load(Ordering::Relaxed);
                })
                .unwrap();
                made += if before > 0 { counts[1] - counts[0] } else { 0 };
            }
            assert!(made < 50, "{rate_iops:?}, {waiting:?}: {made} allocations in 500 requests");
        }
    }
}
