//! What the lab is to do: plans, as TOML files spell them.
//!
//! ```toml
//! name = "modes"
//! title = "Threads, native AIO or io_uring?"
//! about = "Every I/O mode at queue depths 1 and 64, beside fio on the host."
//! experiments = ["2a", "2b", "2c"]
//! baseline = "io_uring"             # the subject that the others are compared with
//!
//! [disk]
//! type = "file"
//! size = "1G"
//!
//! [[subject]]
//! name = "io_uring"
//! stack = "egret"
//! blockdev = { aio = "io_uring", "cache.direct" = true }
//! iothread = { poll-policy = "weighted" }
//!
//! [[load]]                          # lists make a matrix
//! rw = ["randread", "randwrite"]
//! bs = "4k"
//! iodepth = [1, 64]
//! runtime = "5s"
//!
//! [[chart]]
//! id = "2a"
//! title = "Latency, 4k, queue depth 1"
//! metric = "latency"
//! under = { iodepth = 1 }
//! ```
//!
//! A plan says nothing of results: [`results`](crate::results) hold the plan that made them.

mod columns;
mod load;
#[cfg(test)]
mod pages;
mod read;
mod subject;
mod units;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use strum::VariantArray;

pub use columns::Columns;
pub use load::{Application, Curve, Load, LoadKeys, Loads, RateProcess, expand};
pub use read::{BUILT_IN, PlanError};
pub(crate) use subject::nbd_place;
pub use subject::{Backend, DeviceModel, NO_SCHEDULER, Pages, QEMU, Server, Stack, Subject};
pub use units::{Bytes, OneOrMany, Seconds};

/// A plan: its subjects, under each of its loads, so many times.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Plan {
    /// What it is called on the command line.
    pub name: String,
    /// The question that it answers, in one line.
    pub title: String,
    /// What it does, in a few.
    #[serde(default)]
    pub about: String,
    /// The rows of the published experiments that it reproduces, such as `2a` or `S0`.
    #[serde(default)]
    pub experiments: Vec<String>,
    /// Which published figures it answers, what they were measured on, and what of them cannot be compared.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub answers: String,
    /// What its verdicts are about.
    #[serde(default)]
    pub asks: Asks,
    /// The subject that the others are compared with; the first if none is named.
    #[serde(default)]
    pub baseline: Option<String>,
    /// How often each cell is measured.
    #[serde(default = "five")]
    pub repetitions: u32,
    /// How often a cell is measured at most: more often than `repetitions` where that decides.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub most_repetitions: Option<u32>,
    /// How large a loss against the baseline may be before it is one, as a share of it.
    #[serde(default = "five_percent")]
    pub threshold: f64,
    /// Whether the baseline is measured twice in every round, as if it were two subjects: the noise floor.
    #[serde(default = "yes")]
    pub noise_floor: bool,
    /// Cores for the load, dealt out to its jobs; the lab chooses if there are none.
    #[serde(default)]
    pub load_cpus: Vec<usize>,
    /// Whether the host's hottest symbols are captured while each cell is measured, where `perf` is there.
    #[serde(default)]
    pub perf: bool,
    /// Whether it is looked, a thousand times in a second, how long I/O threads sleep in `io_submit`.
    #[serde(default)]
    pub io_submit: bool,
    /// Where `fio --server` waits, as `HOST[,PORT]`: every subject runs on each of them, as `SUBJECT @ HOST`. Then all
    /// subjects are of the stack `host`.
    #[serde(default)]
    pub hosts: Vec<String>,
    /// Other times for all of its loads, and another size of its disks, by what `--profile` calls them, such as those of who
    /// published.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", rename = "profile", default)]
    pub profiles: BTreeMap<String, Profile>,
    /// What all subjects serve.
    pub disk: DiskPlan,
    /// What is compared.
    #[serde(rename = "subject")]
    pub subjects: Vec<Subject>,
    /// What it is put under; lists of values make a matrix.
    #[serde(rename = "load")]
    pub loads: Loads,
    /// How the report shows it. Without any it shows bars of latency, IOPS and CPU per I/O.
    #[serde(rename = "chart", default)]
    pub charts: Vec<Chart>,
}

fn five() -> u32 {
    5
}

fn five_percent() -> f64 {
    0.05
}

fn yes() -> bool {
    true
}

/// What a plan wants to know, and so what its verdicts are called. How it ends is the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Asks {
    /// Whether something was lost: pass or fail.
    #[default]
    Whether,
    /// Which option to choose: some are slower, or take more CPU, and that is no fault of theirs.
    Which,
}

/// Times of all loads, and the size of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// What is not measured, at first.
    pub ramp_time: Seconds,
    /// What is.
    pub runtime: Seconds,
    /// How large each disk is that the lab makes, or how much is used of a device; as the plan has it without this.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub size: Option<Bytes>,
}

/// The disk under test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DiskPlan {
    /// What it is.
    #[serde(rename = "type")]
    pub kind: DiskKind,
    /// How large, where the lab makes it.
    #[serde(default)]
    pub size: Option<Bytes>,
    /// A device's path, or several devices'; or the directory of files.
    #[serde(default)]
    pub path: Option<OneOrMany<PathBuf>>,
    /// The data on the device may be lost. Without this a plan that writes refuses a device that is not empty.
    #[serde(default)]
    pub destroy: bool,
    /// The device was written full before, so that it is as fast as it stays.
    #[serde(default)]
    pub preconditioned: bool,
}

impl DiskPlan {
    /// Its path, or the first of several.
    pub fn place(&self) -> Option<&Path> {
        self.paths().first().map(PathBuf::as_path)
    }

    /// Its paths.
    pub fn paths(&self) -> &[PathBuf] {
        self.path.as_ref().map_or(&[], OneOrMany::all)
    }
}

/// What the disk under test is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskKind {
    /// A file that the lab makes, fills and removes.
    File,
    /// A loop device over a file in memory, which needs root; a file where that is missing.
    Loop,
    /// A block device of the user's.
    Device,
    /// Nothing: a server's own null device. For the path alone.
    Null,
}

/// What a chart shows of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, VariantArray)]
#[serde(rename_all = "kebab-case")]
pub enum Metric {
    /// Mean latency, in microseconds.
    Latency,
    /// The latency of one request in a hundred, in microseconds.
    LatencyP99,
    /// The latency of one request in a thousand, in microseconds.
    LatencyP999,
    /// Requests per second.
    Iops,
    /// Megabytes (of 10^6 bytes) per second.
    Throughput,
    /// CPU time per request of all but the load, in microseconds: also milliseconds of CPU per 1000 requests.
    CpuPerIo,
    /// CPU time per request of the server's I/O threads, in microseconds.
    IoThreadCpu,
    /// CPU time per request of all of the server's threads, in microseconds.
    ServerCpu,
    /// CPU time per request of what serves the disk to the server, in microseconds: an NBD server, or Ceph's OSDs, where
    /// they are on this host.
    BackendCpu,
    /// CPU time per request of the load itself, in microseconds: of fio on the host the price of its path.
    LoadCpu,
    /// CPUs that were busy on the whole host, as mpstat counts them: with the load, and with all else.
    HostBusy,
    /// CPU time per gigabyte of all but the load, in seconds: also CPUs per 1 GB/s.
    CpuPerGigabyte,
    /// CPUs that all but the load kept busy.
    Cpus,
    /// Physical cores that the server's I/O threads could use, all together.
    IoThreadCores,
    /// The share of the time that I/O threads slept in `io_submit`, in percent.
    InIoSubmit,
    /// CPUs that the server's I/O threads kept busy.
    IoThreads,
    /// How long a piece of work took, in seconds.
    Duration,
    /// Transactions per second, of a database.
    Transactions,
    /// How long Egret's I/O threads meant to spin before they slept, in nanoseconds: the mean over their waits.
    Window,
    /// How often the interval of a source, or a window, started over from 0 (QEMU's policies), in percent of all waits.
    WindowsReset,
    /// The share of the time that the window was near the largest allowed, in percent.
    WindowsNearMax,
}

/// How the report shows some cells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Chart {
    /// The published figure that it reproduces, such as `2a`.
    pub id: String,
    /// Above it.
    pub title: String,
    /// Its form.
    #[serde(default)]
    pub form: Form,
    /// What it shows; of a curve, its vertical axis.
    pub metric: Metric,
    /// The loads, by name; all if there are none.
    #[serde(default)]
    pub loads: Vec<String>,
    /// Of these, the ones that ask for this; all without it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub under: Option<Columns>,
    /// The subjects, by name; all if there are none.
    #[serde(default)]
    pub subjects: Vec<String>,
    /// The published table that is shown beside ours.
    #[serde(default)]
    pub published: Option<Published>,
    /// Of a ladder: what its horizontal axis is.
    #[serde(default)]
    pub across: Across,
    /// Of lines: where the vertical axis ends, in multiples of the least value; without it all is shown.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub zoom: Option<f64>,
}

/// What the horizontal axis of a ladder is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Across {
    /// The subjects' places, [`at`](Subject::at).
    #[default]
    Place,
    /// Physical cores that the server's I/O threads could use: two processors of one core are one.
    Cores,
    /// Disks that a load has, busy and idle: its loads are the points of each subject's line.
    Disks,
}

/// A table that others published, which a chart can have beside it: `assets/published` has their figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Published {
    /// QEMU's adaptive polling, old policy and new: IOPS.
    S0Iops,
    /// QEMU's adaptive polling, old policy and new: CPU.
    S0Cpu,
    /// QEMU's `poll-weight`.
    S1Weight,
    /// What `poll-weight` did to the window.
    S1Window,
    /// A plug around every bio: the host's busy time.
    S3Busy,
    /// A plug around every bio: the hottest symbols.
    S3Symbols,
    /// One busy device among idle ones.
    S4Devices,
}

impl Chart {
    /// Whether it shows what was measured under a load.
    pub fn shows(&self, load: &Load) -> bool {
        let named = self.loads.is_empty() || self.loads.contains(&load.name);
        let has_subjects = self.subjects.is_empty() || self.subjects.iter().any(|subject| load.is_put_on(subject));
        named && has_subjects && self.under.as_ref().is_none_or(|columns| columns.hold(load))
    }
}

/// A chart's form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// A bar for each subject, in groups by load.
    #[default]
    Bars,
    /// The metric against IOPS (or transactions) as load rises: a line for each subject.
    Curve,
    /// The metric against what the subjects have in number: the [`at`](Subject::at) of each, a line for each
    /// [`line`](Subject::line).
    Ladder,
    /// A table, with differences to the baseline.
    Table,
}
