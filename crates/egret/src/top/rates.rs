//! What happens each second: the difference of two snapshots.

use std::collections::BTreeMap;

use egret_daemon::snapshot::{Export, IoThread, Queue, Snapshot};

/// What happened between two snapshots.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// Each I/O thread.
    pub threads: Vec<ThreadRates>,
    /// Each export, all its queues together.
    pub exports: Vec<Flow>,
    /// The queues of the export that was asked for by name.
    pub queues: Vec<Flow>,
}

/// What an I/O thread did. Shares are of the time between the snapshots.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ThreadRates {
    pub id: String,
    pub policy: String,
    pub poll_max_ns: u64,
    /// The window of its last wait.
    pub window_ns: u64,
    /// On a processor, and not spinning.
    pub work: f64,
    /// Spinning, until there was work.
    pub found: f64,
    /// Spinning that found nothing.
    pub wasted: f64,
    /// Not on a processor.
    pub sleep: f64,
    /// Waits that spinning ended, of all waits; `None` if there was none.
    pub hits: Option<f64>,
    /// Kicks a second.
    pub kicks: f64,
}

/// What went through an export or a queue.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Flow {
    pub name: String,
    /// The I/O threads that run it.
    pub iothread: String,
    /// How many queues it has.
    pub queues: u16,
    /// Requests a second.
    pub iops: f64,
    /// Bytes a second.
    pub bytes: f64,
    /// Requests now.
    pub in_flight: u64,
    /// Whether some of them wait because the export is stopped for an error.
    pub stopped: bool,
    /// How long requests took, in nanoseconds; `None` if none ended.
    pub p50_ns: Option<u64>,
    pub p99_ns: Option<u64>,
    /// Errors a second.
    pub errors: f64,
}

/// What happened from `before` to `now`; nothing of what was not there before.
pub fn rates(before: &Snapshot, now: &Snapshot) -> Rates {
    let seconds = since(now.time_ns, before.time_ns) / 1e9;
    let threads = now.iothreads.iter().map(|thread| {
        let earlier = before.iothreads.iter().find(|earlier| earlier.id == thread.id).unwrap_or(thread);
        thread_rates(earlier, thread, seconds)
    });
    let find = |id: &str| before.exports.iter().find(|export| export.id == id);
    let exports = now.exports.iter().map(|export| {
        let earlier = find(&export.id).unwrap_or(export);
        Flow { queues: export.num_queues, ..flow(&export.id, &earlier.total, &export.total, seconds) }
    });
    let queues = now.exports.iter().flat_map(|export| {
        let earlier: &[Queue] = find(&export.id).map_or(&[], |earlier: &Export| &earlier.queues);
        export.queues.iter().enumerate().map(move |(index, queue)| {
            flow(&format!("{} {index}", export.id), earlier.get(index).unwrap_or(queue), queue, seconds)
        })
    });
    Rates { threads: threads.collect(), exports: exports.collect(), queues: queues.collect() }
}

/// The difference of two counts; none where an object went and came back between them, and counts anew.
fn since(now: u64, before: u64) -> f64 {
    now.saturating_sub(before) as f64
}

fn over(amount: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { amount / seconds } else { 0.0 }
}

fn thread_rates(before: &IoThread, now: &IoThread, seconds: f64) -> ThreadRates {
    let share = |of: fn(&IoThread) -> u64| over(since(of(now), of(before)) / 1e9, seconds);
    let (cpu, found, wasted) =
        (share(|thread| thread.cpu_ns), share(|thread| thread.spin_found_ns), share(|thread| thread.spin_wasted_ns));
    // Spinning is measured in wall-clock time, which includes times when the thread was preempted.
    let (found, wasted) = match found + wasted {
        spun if spun > cpu => (found * cpu / spun, wasted * cpu / spun),
        _ => (found, wasted),
    };
    let waits = since(now.waits, before.waits);
    ThreadRates {
        id: now.id.clone(),
        policy: now.poll_policy.clone(),
        poll_max_ns: now.poll_max_ns,
        window_ns: now.window_ns,
        work: (cpu - found - wasted).max(0.0),
        found,
        wasted,
        sleep: (1.0 - cpu).max(0.0),
        hits: (waits > 0.0).then(|| since(now.hits, before.hits) / waits),
        kicks: over(since(now.kicks, before.kicks), seconds),
    }
}

fn flow(name: &str, before: &Queue, now: &Queue, seconds: f64) -> Flow {
    let (then, sum) = (before.sum(), now.sum());
    let latency = Latency::between(&before.latency, &now.latency);
    Flow {
        name: name.to_owned(),
        iothread: now.iothread.clone(),
        queues: 1,
        iops: over(since(sum.requests, then.requests), seconds),
        bytes: over(since(sum.bytes, then.bytes), seconds),
        in_flight: now.in_flight,
        stopped: now.waiting > 0,
        p50_ns: latency.quantile(0.5),
        p99_ns: latency.quantile(0.99),
        errors: over(since(sum.errors, then.errors), seconds),
    }
}

/// How many requests took how long at most, and longer than the entry before.
struct Latency(BTreeMap<u64, u64>);

impl Latency {
    fn between(before: &[(u64, u64)], now: &[(u64, u64)]) -> Self {
        let mut counts: BTreeMap<u64, u64> = now.iter().copied().collect();
        for (length, count) in before {
            // What has no end is told by the longest, which may have been shorter then.
            if let Some((_, total)) = counts.range_mut(length..).next() {
                *total = total.saturating_sub(*count);
            }
        }
        Self(counts)
    }

    fn quantile(&self, quantile: f64) -> Option<u64> {
        let total: u64 = self.0.values().sum();
        let rank = ((total as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        self.0.iter().find_map(|(length, count)| {
            seen += count;
            (seen >= rank).then_some(*length)
        })
    }
}

#[cfg(test)]
pub mod tests {
    use egret_daemon::snapshot::Operations;

    use super::*;

    /// A snapshot of one thread and two exports, after `seconds` of steady load.
    pub fn snapshot(seconds: u64) -> Snapshot {
        let ns = |share: u64| share * 10_000_000 * seconds;
        let thread = IoThread {
            id: "io0".into(),
            poll_policy: "low-regret".into(),
            poll_max_ns: 50_000,
            window_ns: 12_000,
            waits: 1000 * seconds,
            hits: 750 * seconds,
            kicks: 20 * seconds,
            cpu_ns: ns(60),
            spin_found_ns: ns(25),
            spin_wasted_ns: ns(5),
            ..IoThread::default()
        };
        let queue = |iops: u64| Queue {
            iothread: "io0".into(),
            in_flight: 7,
            operations: [(
                "read".to_owned(),
                Operations { requests: iops * seconds, bytes: iops * 4096 * seconds, errors: 0 },
            )]
            .into(),
            latency: vec![(10_000, iops * seconds * 6 / 10), (90_000, iops * seconds * 4 / 10)],
            ..Queue::default()
        };
        let export = |id: &str, iops: u64| Export {
            id: id.into(),
            node_names: vec!["d0".into()],
            num_queues: 2,
            total: queue(iops),
            queues: vec![queue(iops), queue(0)],
        };
        Snapshot {
            time_ns: 5 + seconds * 1_000_000_000,
            iothreads: vec![thread],
            exports: vec![export("e0", 1000), export("e1", 20_000)],
        }
    }

    #[test]
    fn rates_are_differences_over_the_time_between() {
        let rates = rates(&snapshot(10), &snapshot(12));
        let thread = &rates.threads[0];
        let shares = [thread.work, thread.found, thread.wasted, thread.sleep].map(|share| (share * 100.0).round());
        assert_eq!(shares, [30.0, 25.0, 5.0, 40.0]);
        assert_eq!((thread.hits, thread.kicks, thread.window_ns), (Some(0.75), 20.0, 12_000));
        let flow = &rates.exports[1];
        assert_eq!((flow.iops, flow.bytes, flow.in_flight), (20_000.0, 20_000.0 * 4096.0, 7));
        assert_eq!((flow.p50_ns, flow.p99_ns, flow.queues), (Some(10_000), Some(90_000), 2));
        assert_eq!((rates.queues.len(), &*rates.queues[3].name), (4, "e1 1"));
        assert_eq!((rates.queues[3].iops, rates.queues[3].p50_ns), (0.0, None));
    }

    #[test]
    fn a_longest_request_is_new_and_those_that_were_long_before_are_not() {
        let longer = Latency::between(&[(10_000, 5), (70_000_000_000, 3)], &[(10_000, 9), (80_000_000_000, 4)]);
        assert_eq!(longer.0, [(10_000, 4), (80_000_000_000, 1)].into());
    }

    #[test]
    fn a_thread_that_was_preempted_while_it_spun_did_not_spin_longer_than_it_ran() {
        let mut now = snapshot(2);
        now.iothreads[0].cpu_ns = snapshot(1).iothreads[0].cpu_ns + 200_000_000;
        let thread = &rates(&snapshot(1), &now).threads[0];
        let parts = [thread.work, thread.found, thread.wasted, thread.sleep];
        let percent = parts.map(|part| (part * 1000.0).round() / 10.0);
        assert_eq!(percent, [0.0, 16.7, 3.3, 80.0]);
    }

    #[test]
    fn what_is_new_and_what_began_anew_has_no_rate_yet() {
        let new = rates(&Snapshot::default(), &snapshot(3));
        assert_eq!((new.exports[0].iops, new.threads[0].work, new.threads[0].hits), (0.0, 0.0, None));
        let anew = Snapshot { time_ns: 20_000_000_000, ..snapshot(1) };
        assert_eq!(rates(&snapshot(10), &anew).exports[1].iops, 0.0);
        assert_eq!(rates(&snapshot(3), &snapshot(3)).exports[0].iops, 0.0, "no time has passed");
    }
}
