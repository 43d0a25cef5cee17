//! The client: random 4 KiB reads through libblkio, a fixed number in flight.

use std::io;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use blkio::ReqFlags;
use egret_loadgen::random::Random;
use hdrhistogram::Histogram;

use crate::support::disk::DiskQueue;

/// The length of every read, in bytes.
pub const REQUEST: usize = 4096;

/// How long a server may complete nothing before the cell fails.
const SILENCE: Duration = Duration::from_secs(10);

/// What to ask of a disk.
pub struct Load {
    /// Requests in flight.
    pub depth: usize,
    /// The disk's size in bytes.
    pub capacity: u64,
    /// The time before measuring.
    pub warm_up: Duration,
    /// The measured time.
    pub length: Duration,
}

/// What came of it so far.
pub struct Tally {
    elapsed: Duration,
    cpu_ns: u64,
    latency: Histogram<u64>,
}

/// What came of it in the end.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    pub iops: f64,
    pub p50_us: f64,
    pub p99_us: f64,
    /// The server's user and system time per request.
    pub cpu_us: f64,
}

impl Default for Tally {
    fn default() -> Self {
        let latency = Histogram::new_with_bounds(1, SILENCE.as_nanos() as u64, 3).expect("good bounds");
        Self { elapsed: Duration::ZERO, cpu_ns: 0, latency }
    }
}

impl Tally {
    /// Sums it up.
    pub fn outcome(&self) -> Outcome {
        let requests = self.latency.len() as f64;
        Outcome {
            iops: requests / self.elapsed.as_secs_f64(),
            p50_us: self.latency.value_at_quantile(0.50) as f64 / 1e3,
            p99_us: self.latency.value_at_quantile(0.99) as f64 / 1e3,
            cpu_us: self.cpu_ns as f64 / 1e3 / requests,
        }
    }
}

impl Load {
    /// Runs, and adds to `tally`; `cpu_time_ns` returns the server's CPU time so far.
    pub fn run(&self, queue: &mut DiskQueue, cpu_time_ns: impl Fn() -> u64, tally: &mut Tally) -> io::Result<()> {
        let (queue, buffer) = queue.parts();
        let mut random = Random::new(self.capacity);
        let mut submit = |queue: &mut blkio::Blkioq, slot: usize| {
            let at = random.below(self.capacity / REQUEST as u64) * REQUEST as u64;
            queue.read(at, buffer.wrapping_add(slot * REQUEST), REQUEST, slot, ReqFlags::empty());
        };

        let begin = Instant::now();
        let mut submitted = vec![begin; self.depth];
        for slot in 0..self.depth {
            submit(queue, slot);
        }
        let mut in_flight = self.depth;
        let mut completions: Vec<_> = (0..self.depth).map(|_| MaybeUninit::uninit()).collect();
        let mut phase = Phase::WarmingUp;
        while in_flight > 0 {
            let count = queue.do_io(&mut completions, 1, Some(&mut SILENCE.clone()), None).map_err(io::Error::other)?;
            let now = Instant::now();
            match phase {
                Phase::WarmingUp if now - begin >= self.warm_up => phase = Phase::Measuring(now, cpu_time_ns()),
                Phase::Measuring(since, cpu_before) if now - since >= self.length => {
                    tally.elapsed += now - since;
                    tally.cpu_ns += cpu_time_ns() - cpu_before;
                    phase = Phase::Draining;
                }
                _ => {}
            }
            for completion in &completions[..count] {
                // SAFETY: `do_io` has filled the first `count`.
                let completion = unsafe { completion.assume_init_ref() };
                if completion.ret != 0 {
                    return Err(io::Error::from_raw_os_error(-completion.ret));
                }
                let slot = completion.user_data;
                if let Phase::Measuring(..) = phase {
                    tally.latency.saturating_record((now - submitted[slot]).as_nanos() as u64);
                }
                if let Phase::Draining = phase {
                    in_flight -= 1;
                } else {
                    submitted[slot] = now;
                    submit(queue, slot);
                }
            }
        }
        Ok(())
    }
}

enum Phase {
    WarmingUp,
    /// Since when, and the CPU time of the server then.
    Measuring(Instant, u64),
    /// Nothing new is submitted.
    Draining,
}
