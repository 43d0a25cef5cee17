//! Every counter at one moment: what `egret-query-stats` answers, and `egret top` takes apart.
//!
//! Counters only grow, from the beginning of what they belong to; a rate is the difference of two snapshots, over the
//! difference of their times.

use std::collections::BTreeMap;

use egret_event_loop::{LoopStats, clock};
use egret_export::{OpStats, QueueStats};
use egret_virtio::RequestType;
use egret_vocabulary::schema;
use serde::{Deserialize, Serialize};

use crate::daemon::{DEFAULT_IOTHREAD, IoThreadCounters, View};

/// A daemon's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Snapshot {
    /// When they were read, on a clock that begins anywhere.
    pub time_ns: u64,
    /// Each I/O thread.
    pub iothreads: Vec<IoThread>,
    /// Each export.
    pub exports: Vec<Export>,
}

/// An I/O thread's counters, and how it polls.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct IoThread {
    /// Its name.
    pub id: String,
    /// Its polling policy.
    pub poll_policy: String,
    /// The longest that it may spin.
    pub poll_max_ns: u64,
    /// How long the last wait was allowed to spin.
    pub window_ns: u64,
    /// How long all waits together were allowed to spin, each counted as at most a second.
    pub window_sum_ns: u64,
    /// Times that the interval of a source, or a window, started over from nothing (QEMU's policies).
    pub windows_reset: u64,
    /// How long `low-regret` served with each of its habits, trials included.
    pub habits_ns: BTreeMap<String, u64>,
    /// Time during which waits were allowed at least 7/8 of the longest that they may spin.
    pub window_near_max_ns: u64,
    /// All time, from the first wait to the last.
    pub elapsed_ns: u64,
    /// Turns of its loop.
    pub turns: u64,
    /// Times there was nothing to do.
    pub waits: u64,
    /// Waits that spinning ended.
    pub hits: u64,
    /// Times it slept.
    pub blocks: u64,
    /// Kicks that clients sent.
    pub kicks: u64,
    /// Looks that found requests nobody had to kick for.
    pub kicks_suppressed: u64,
    /// Time on a processor.
    pub cpu_ns: u64,
    /// Time spun in waits that spinning ended; of a longer spin, the last 10 ms at most.
    pub spin_found_ns: u64,
    /// Time spun in waits that spinning did not end, and for 10 ms or more without an end in others.
    pub spin_wasted_ns: u64,
    /// Time asleep, in sleeps that are over.
    pub asleep_ns: u64,
    /// Each engine in use.
    pub engines: Vec<Engine>,
    /// Requests that worker threads ran, because the disk's engine could not.
    pub fallbacks: u64,
    /// Requests that went through a copy.
    pub copied: u64,
    /// Requests that were answered without an engine.
    pub answered: u64,
    /// Reads that the host's page cache answered at once, without an engine.
    pub cached: u64,
}

/// An engine's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Engine {
    /// Its name.
    pub engine: String,
    /// Requests it took.
    pub requests: u64,
    /// Batches it handed on.
    pub submissions: u64,
    /// Time inside submissions.
    pub submitting_ns: u64,
    /// The longest submission.
    pub longest_submission_ns: u64,
}

/// An export's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Export {
    /// Its name.
    pub id: String,
    /// Its disks.
    pub node_names: Vec<String>,
    /// How many queues for requests it has.
    pub num_queues: u16,
    /// All its queues together.
    pub total: Queue,
    /// Each queue; none unless this export was asked for by name.
    pub queues: Vec<Queue>,
}

/// The counters of a queue, or of several.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Queue {
    /// The I/O thread that runs it; of several, those that do, with commas between.
    pub iothread: String,
    /// Requests taken in and not ended.
    pub in_flight: u64,
    /// Of those, requests that wait because the export is stopped for an error.
    #[serde(default)]
    pub waiting: u64,
    /// Requests that ended, by kind; kinds that there were none of are left out.
    pub operations: BTreeMap<String, Operations>,
    /// How long requests took: so many nanoseconds at most, and more than the entry before; so many of them.
    pub latency: Vec<(u64, u64)>,
    /// Notifications sent to the client.
    pub calls: u64,
    /// Batches that the client did not want to be notified of.
    pub calls_suppressed: u64,
    /// Times the client broke the queue.
    pub broken: u64,
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Operations {
    /// Those that ended.
    pub requests: u64,
    /// Bytes they moved, discarded or zeroed.
    pub bytes: u64,
    /// Those that ended with an error.
    pub errors: u64,
}

impl Snapshot {
    /// Reads the counters of everything, without asking any I/O thread.
    pub fn of(view: &View) -> Self {
        let (watched, config) = (view.watched(), view.config());
        let io_thread = |object: &schema::IoThread| Some(IoThread::read(object, watched.io_threads.get(&object.id)?));
        let export = |object: &schema::Export| Some(Export::read(object, &view.export_stats(&object.id)?));
        Self {
            time_ns: clock::now().0,
            iothreads: config.iothreads.iter().filter_map(io_thread).collect(),
            exports: config.exports.iter().filter_map(export).collect(),
        }
    }

    /// Reads the counters of one export, queue by queue; `None` if there is none of this name.
    pub fn of_export(view: &View, id: &str) -> Option<Self> {
        let mut snapshot = Self { time_ns: clock::now().0, ..Self::default() };
        let object = view.config().exports.iter().find(|export| export.id == id)?;
        let mut export = Export::read(object, &view.export_stats(id)?);
        let queues = view.watched().exports.get(id)?;
        // The queues of a virtio-scsi device that have no disks come first, and run where the first of the others does.
        let diskless = queues.len() - usize::from(object.num_queues());
        let thread = |index: usize| thread_of(object, index.saturating_sub(diskless) as u16);
        let each = queues.iter().enumerate().map(|(index, queue)| Queue::read(&queue.read(), thread(index)));
        export.queues = each.collect();
        snapshot.exports.push(export);
        Some(snapshot)
    }
}

fn thread_of(export: &schema::Export, queue: u16) -> String {
    export.iothread_of(queue).unwrap_or(DEFAULT_IOTHREAD).to_owned()
}

impl IoThread {
    fn read(object: &schema::IoThread, counters: &IoThreadCounters) -> Self {
        let stats = counters.turns.read();
        let LoopStats { turns, waits, hits, blocks, kicks, kicks_spared, .. } = stats;
        let (time, disks) = (counters.time(), counters.engines.read());
        let engine = |engine: &egret_disk::EngineStats| Engine {
            engine: engine.engine.to_owned(),
            requests: engine.requests,
            submissions: engine.submissions,
            submitting_ns: engine.submitting.0,
            longest_submission_ns: engine.longest_submission.0,
        };
        Self {
            id: object.id.clone(),
            poll_policy: object.policy().to_string(),
            poll_max_ns: object.parameters().max_for(object.policy()).0,
            window_ns: stats.window.0,
            window_sum_ns: stats.window_sum.0,
            windows_reset: stats.resets,
            habits_ns: stats.named_habits().map(|(name, time)| (name.to_owned(), time.0)).collect(),
            window_near_max_ns: stats.near_max.0,
            elapsed_ns: stats.elapsed.0,
            turns,
            waits,
            hits,
            blocks,
            kicks,
            kicks_suppressed: kicks_spared,
            cpu_ns: time.cpu.0,
            spin_found_ns: time.spin_found.0,
            spin_wasted_ns: time.spin_wasted.0,
            asleep_ns: time.asleep.0,
            engines: disks.engines.iter().map(engine).collect(),
            fallbacks: disks.fallbacks,
            copied: disks.bounced,
            answered: disks.answered,
            cached: disks.cached,
        }
    }
}

impl Export {
    fn read(object: &schema::Export, stats: &QueueStats) -> Self {
        let mut threads: Vec<String> = (0..object.num_queues()).map(|queue| thread_of(object, queue)).collect();
        threads.sort_unstable();
        threads.dedup();
        Self {
            id: object.id.clone(),
            node_names: object.node_names().map(|(_, name)| name.to_owned()).collect(),
            num_queues: object.num_queues(),
            total: Queue::read(stats, threads.join(",")),
            queues: Vec::new(),
        }
    }
}

impl Queue {
    fn read(stats: &QueueStats, iothread: String) -> Self {
        let counted = |request_type: RequestType| {
            let OpStats { requests, bytes, errors } = stats.op(request_type);
            (requests > 0).then(|| (request_type.name().to_owned(), Operations { requests, bytes, errors }))
        };
        Self {
            iothread,
            in_flight: stats.in_flight,
            waiting: stats.waiting,
            operations: RequestType::ALL.into_iter().filter_map(counted).collect(),
            latency: stats.latency().iter().flat_map(|latency| latency.buckets()).collect(),
            calls: stats.calls,
            calls_suppressed: stats.calls_spared,
            broken: stats.broken,
        }
    }

    /// Requests of every kind together.
    pub fn sum(&self) -> Operations {
        self.operations.values().fold(Operations::default(), |sum, more| Operations {
            requests: sum.requests + more.requests,
            bytes: sum.bytes + more.bytes,
            errors: sum.errors + more.errors,
        })
    }
}
