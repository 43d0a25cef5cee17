//! The metrics: a table, from which a scrape and the reference in `docs/watching.md` are made.

use std::fmt::Write as _;
use std::sync::Arc;

use egret_disk::BATCH_CLASSES;
use egret_event_loop::{LoopStats, Nanos};
use egret_export::{ErrorHandling, IoStatus, Latencies, QueueCounters};
use egret_virtio::RequestType;

use super::text::{Labels, MetricType, Samples, Seconds};
use crate::daemon::{Time, Watched};

/// The octaves of nanoseconds in which the latencies' buckets end: 1 us to 8.6 s.
const OCTAVES: std::ops::RangeInclusive<u32> = 10..=33;

/// A metric.
pub struct Family {
    /// Its name, which ends in its unit, and in `_total` if it only grows.
    pub name: &'static str,
    /// What kind of number it is.
    pub kind: MetricType,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// What it is, in one sentence.
    pub help: &'static str,
    samples: fn(&View, &mut Samples<'_>),
}

const QUEUE: &[&str] = &["export", "queue"];
const OPERATION: &[&str] = &["export", "queue", "operation"];
const THREAD: &[&str] = &["iothread"];
const HABIT: &[&str] = &["iothread", "habit"];
const ENGINE: &[&str] = &["iothread", "engine"];

/// Every metric, in the order of a scrape.
pub static FAMILIES: &[Family] = &[
    Family {
        name: "egret_build_info",
        kind: MetricType::Gauge,
        labels: &["version"],
        help: "Always 1; the label says which Egret this is.",
        samples: |_, out| out.put(&Labels::default().and("version", env!("CARGO_PKG_VERSION")), 1),
    },
    Family {
        name: "egret_export_requests_total",
        kind: MetricType::Counter,
        labels: OPERATION,
        help: "Requests that ended.",
        samples: |view, out| view.operations(out, |queue, op| queue.op(op).requests),
    },
    Family {
        name: "egret_export_bytes_total",
        kind: MetricType::Counter,
        labels: OPERATION,
        help: "Bytes that requests moved, discarded or zeroed.",
        samples: |view, out| view.operations(out, |queue, op| queue.op(op).bytes),
    },
    Family {
        name: "egret_export_errors_total",
        kind: MetricType::Counter,
        labels: OPERATION,
        help: "Requests that ended with an error.",
        samples: |view, out| view.operations(out, |queue, op| queue.op(op).errors),
    },
    Family {
        name: "egret_export_in_flight",
        kind: MetricType::Gauge,
        labels: QUEUE,
        help: "Requests taken in and not ended.",
        samples: |view, out| view.queues(out, |queue| queue.in_flight.get()),
    },
    Family {
        name: "egret_export_waiting",
        kind: MetricType::Gauge,
        labels: QUEUE,
        help: "Of those, requests that wait because the export is stopped: one failed (`rerror`, `werror`).",
        samples: |view, out| view.queues(out, |queue| queue.waiting.get()),
    },
    Family {
        name: "egret_export_overdue",
        kind: MetricType::Gauge,
        labels: QUEUE,
        help: "Of those in flight, requests that take longer than the export's `request-timeout`.",
        samples: |view, out| view.queues(out, |queue| queue.overdue.get()),
    },
    Family {
        name: "egret_export_stopped",
        kind: MetricType::Gauge,
        labels: &["export"],
        help: "1 while the export is stopped because a request failed.",
        samples: |view, out| view.errors(out, |errors| (errors.status() != IoStatus::Ok).into()),
    },
    Family {
        name: "egret_export_stops_total",
        kind: MetricType::Counter,
        labels: &["export"],
        help: "Times the export was stopped because a request failed.",
        samples: |view, out| view.errors(out, ErrorHandling::stops),
    },
    Family {
        name: "egret_export_calls_total",
        kind: MetricType::Counter,
        labels: QUEUE,
        help: "Notifications sent to the client.",
        samples: |view, out| view.queues(out, |queue| queue.calls.get()),
    },
    Family {
        name: "egret_export_calls_suppressed_total",
        kind: MetricType::Counter,
        labels: QUEUE,
        help: "Batches of ended requests that the client did not want to be notified of.",
        samples: |view, out| view.queues(out, |queue| queue.calls_spared.get()),
    },
    Family {
        name: "egret_export_broken_queues_total",
        kind: MetricType::Counter,
        labels: QUEUE,
        help: "Times the client broke the rules of the ring and the queue was stopped.",
        samples: |view, out| view.queues(out, |queue| queue.broken.get()),
    },
    Family {
        name: "egret_export_request_duration_seconds",
        kind: MetricType::Histogram,
        labels: &["export", "operation"],
        help: "How long requests took, from the turn that took them in to the turn that saw them end.",
        samples: View::durations,
    },
    Family {
        name: "egret_iothread_turns_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Turns of the event loop.",
        samples: |view, out| view.threads(out, |stats| stats.turns),
    },
    Family {
        name: "egret_iothread_waits_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Times there was nothing to do, and the loop waited.",
        samples: |view, out| view.threads(out, |stats| stats.waits),
    },
    Family {
        name: "egret_iothread_hits_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Waits that spinning ended.",
        samples: |view, out| view.threads(out, |stats| stats.hits),
    },
    Family {
        name: "egret_iothread_blocks_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Times the loop slept.",
        samples: |view, out| view.threads(out, |stats| stats.blocks),
    },
    Family {
        name: "egret_iothread_kicks_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Kicks that clients sent, as the file descriptor monitor reported them.",
        samples: |view, out| view.threads(out, |stats| stats.kicks),
    },
    Family {
        name: "egret_iothread_kicks_suppressed_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Times a look at a queue found requests that no client had to kick for.",
        samples: |view, out| view.threads(out, |stats| stats.kicks_spared),
    },
    Family {
        name: "egret_iothread_cpu_seconds_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Time on a processor, spinning included.",
        samples: |view, out| view.times(out, |time, _| time.cpu),
    },
    Family {
        name: "egret_iothread_spin_found_seconds_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Time spun in waits that spinning ended; of a longer spin, the last 10 ms at most.",
        samples: |view, out| view.times(out, |time, _| time.spin_found),
    },
    Family {
        name: "egret_iothread_spin_wasted_seconds_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Time spun in waits that spinning did not end, and for 10 ms or more without an end in others.",
        samples: |view, out| view.times(out, |time, _| time.spin_wasted),
    },
    Family {
        name: "egret_iothread_asleep_seconds_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Time asleep; a sleep is counted when it ends.",
        samples: |view, out| view.times(out, |time, _| time.asleep),
    },
    Family {
        name: "egret_iothread_window_seconds",
        kind: MetricType::Gauge,
        labels: THREAD,
        help: "How long the last wait was allowed to spin.",
        samples: |view, out| view.times(out, |_, stats| stats.window),
    },
    Family {
        name: "egret_iothread_window_seconds_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "How long all waits together were allowed to spin, each counted as at most a second.",
        samples: |view, out| view.times(out, |_, stats| stats.window_sum),
    },
    Family {
        name: "egret_iothread_habit_seconds_total",
        kind: MetricType::Counter,
        labels: HABIT,
        help: "How long `low-regret` served with each of the habits that it compares, trials included; of a wait, 17 ms at most.",
        samples: |view, out| view.habits(out),
    },
    Family {
        name: "egret_iothread_stalls_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Times the loop was found stuck: it had not got on for as long as `--watchdog` allows.",
        samples: |view, out| view.threads.iter().for_each(|(labels, thread)| out.put(labels, thread.stalls)),
    },
    Family {
        name: "egret_engine_requests_total",
        kind: MetricType::Counter,
        labels: ENGINE,
        help: "Requests that an engine took.",
        samples: |view, out| view.engines(out, |engine| engine.requests),
    },
    Family {
        name: "egret_engine_submissions_total",
        kind: MetricType::Counter,
        labels: ENGINE,
        help: "Batches that an engine handed on.",
        samples: |view, out| view.engines(out, |engine| engine.submissions),
    },
    Family {
        name: "egret_engine_batch_requests",
        kind: MetricType::Histogram,
        labels: ENGINE,
        help: "Requests in a batch.",
        samples: View::batches,
    },
    Family {
        name: "egret_engine_submission_seconds_total",
        kind: MetricType::Counter,
        labels: ENGINE,
        help: "Time inside submissions; none where the loop's own wait submits, as io_uring's does.",
        samples: |view, out| view.engines(out, |engine| Seconds(engine.submitting)),
    },
    Family {
        name: "egret_engine_longest_submission_seconds",
        kind: MetricType::Gauge,
        labels: ENGINE,
        help: "The longest submission there has been.",
        samples: |view, out| view.engines(out, |engine| Seconds(engine.longest_submission)),
    },
    Family {
        name: "egret_engine_registered_requests_total",
        kind: MetricType::Counter,
        labels: ENGINE,
        help: "Requests, or parts of large ones, that an engine had moved to and from memory that was pinned already \
               (pin-memory).",
        samples: |view, out| view.engines(out, |engine| engine.registered),
    },
    Family {
        name: "egret_engine_pinned_bytes",
        kind: MetricType::Gauge,
        labels: ENGINE,
        help: "Guest memory that is pinned for an engine.",
        samples: |view, out| view.engines(out, |engine| engine.pinned),
    },
    Family {
        name: "egret_engine_fallbacks_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Requests that worker threads ran, because the disk's engine could not, or not without holding up its \
               I/O thread (more than 2 MiB).",
        samples: |view, out| view.disks(out, |stats| stats.fallbacks),
    },
    Family {
        name: "egret_engine_copied_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Requests that went through a copy, because direct I/O does not take their offset or their memory.",
        samples: |view, out| view.disks(out, |stats| stats.bounced),
    },
    Family {
        name: "egret_engine_answered_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Requests that were answered without an engine, because there was nothing to do for them.",
        samples: |view, out| view.disks(out, |stats| stats.answered),
    },
    Family {
        name: "egret_engine_cached_total",
        kind: MetricType::Counter,
        labels: THREAD,
        help: "Reads that the host's page cache answered at once, without an engine.",
        samples: |view, out| view.disks(out, |stats| stats.cached),
    },
];

/// Everything as it is now, in the format that Prometheus scrapes.
pub fn scrape(watched: &Watched) -> String {
    let view = View::new(watched);
    // About what comes of it, so that it does not grow page by page.
    let mut text = String::with_capacity((16 << 10) + view.queues.len() * 2048);
    for family in FAMILIES {
        let mut samples = Samples::begin(&mut text, family.name, family.kind, family.help);
        (family.samples)(&view, &mut samples);
    }
    text
}

/// The metrics as a Markdown table; `docs/watching.md` holds exactly this, and a test says so.
pub fn reference() -> String {
    let mut table = String::from("| metric | kind | labels | what |\n|---|---|---|---|\n");
    for Family { name, kind, labels, help, .. } in FAMILIES {
        let _ = writeln!(table, "| `{name}` | {} | {} | {help} |", kind.as_str(), labels.join(", "));
    }
    table
}

/// What there is to watch, with its labels made.
struct View {
    queues: Vec<(Labels, Arc<QueueCounters>)>,
    exports: Vec<(Labels, Vec<Arc<QueueCounters>>)>,
    errors: Vec<(Labels, Arc<ErrorHandling>)>,
    threads: Vec<(Labels, Thread)>,
}

struct Thread {
    stalls: u64,
    turns: LoopStats,
    time: Time,
    disks: egret_disk::Stats,
}

impl View {
    fn new(watched: &Watched) -> Self {
        let mut view = Self { queues: Vec::new(), exports: Vec::new(), errors: Vec::new(), threads: Vec::new() };
        for (id, queues) in &watched.exports {
            let labels = Labels::default().and("export", id);
            let numbered = queues.iter().enumerate();
            view.queues.extend(numbered.map(|(index, queue)| (labels.and("queue", index), Arc::clone(queue))));
            view.exports.push((labels, queues.clone()));
        }
        for (id, errors) in &watched.errors {
            view.errors.push((Labels::default().and("export", id), Arc::clone(errors)));
        }
        for (id, thread) in &watched.io_threads {
            let (stalls, turns) = (thread.stalls.get(), thread.turns.read());
            let thread = Thread { stalls, turns, time: thread.time(), disks: thread.engines.read() };
            view.threads.push((Labels::default().and("iothread", id), thread));
        }
        view
    }

    fn queues(&self, out: &mut Samples<'_>, value: impl Fn(&QueueCounters) -> u64) {
        self.queues.iter().for_each(|(labels, queue)| out.put(labels, value(queue)));
    }

    fn errors(&self, out: &mut Samples<'_>, value: impl Fn(&ErrorHandling) -> u64) {
        self.errors.iter().for_each(|(labels, errors)| out.put(labels, value(errors)));
    }

    fn operations(&self, out: &mut Samples<'_>, value: impl Fn(&QueueCounters, RequestType) -> u64) {
        for (labels, queue) in &self.queues {
            for op in RequestType::ALL {
                out.put_with(labels, "operation", op.name(), value(queue, op));
            }
        }
    }

    /// Of an export as a whole, and of the operations that there were: a histogram for each operation of each queue
    /// would be most of a scrape.
    fn durations(&self, out: &mut Samples<'_>) {
        for (labels, queues) in &self.exports {
            for op in RequestType::ALL {
                let mut sum: Option<Latencies> = None;
                queues.iter().for_each(|queue| queue.add_latency_to(op, &mut sum));
                if let Some(latencies) = sum {
                    let labels = labels.and("operation", op.name());
                    let buckets = latencies.shorter_than_octaves(OCTAVES).map(|(limit, seen)| (Seconds(limit), seen));
                    out.put_histogram(&labels, buckets, latencies.count(), Seconds(latencies.sum()));
                }
            }
        }
    }

    fn threads(&self, out: &mut Samples<'_>, value: impl Fn(&LoopStats) -> u64) {
        self.threads.iter().for_each(|(labels, thread)| out.put(labels, value(&thread.turns)));
    }

    fn times(&self, out: &mut Samples<'_>, value: impl Fn(&Time, &LoopStats) -> Nanos) {
        self.threads.iter().for_each(|(labels, thread)| out.put(labels, Seconds(value(&thread.time, &thread.turns))));
    }

    fn habits(&self, out: &mut Samples<'_>) {
        for (labels, thread) in &self.threads {
            for (name, time) in thread.turns.named_habits() {
                out.put_with(labels, "habit", name, Seconds(time));
            }
        }
    }

    fn disks(&self, out: &mut Samples<'_>, value: impl Fn(&egret_disk::Stats) -> u64) {
        self.threads.iter().for_each(|(labels, thread)| out.put(labels, value(&thread.disks)));
    }

    fn engines<V: std::fmt::Display>(&self, out: &mut Samples<'_>, value: impl Fn(&egret_disk::EngineStats) -> V) {
        for (labels, thread) in &self.threads {
            for engine in &thread.disks.engines {
                out.put_with(labels, "engine", engine.engine, value(engine));
            }
        }
    }

    fn batches(&self, out: &mut Samples<'_>) {
        for (labels, thread) in &self.threads {
            for engine in &thread.disks.engines {
                let mut seen = 0;
                let classes = engine.batches[..BATCH_CLASSES - 1].iter().enumerate().map(|(class, count)| {
                    seen += count;
                    ((2_u64 << class) - 1, seen)
                });
                let count = engine.batches.iter().sum();
                out.put_histogram(&labels.and("engine", engine.engine), classes, count, engine.requests);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_say_their_unit_and_whether_they_only_grow() {
        let names: BTreeSet<&str> = FAMILIES.iter().map(|family| family.name).collect();
        assert_eq!(names.len(), FAMILIES.len());
        for Family { name, kind, help, .. } in FAMILIES {
            assert!(name.starts_with("egret_") && help.ends_with('.'), "{name}");
            assert_eq!(name.ends_with("_total"), *kind == MetricType::Counter, "{name}");
            for unit in ["_ns", "_us", "_ms", "_bps"] {
                assert!(!name.contains(unit), "{name} is not in a base unit");
            }
        }
    }

    #[test]
    fn the_reference_in_the_docs_is_the_table_of_metrics() {
        crate::docs::hold("watching.md", "from the table of metrics", &reference());
    }
}
