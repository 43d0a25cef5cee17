//! One measurement of one subject under one load.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which cell.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CellId {
    /// The load's name.
    pub load: String,
    /// The subject's name. The baseline's second measurement, for the noise floor, is called `NAME (again)`.
    pub subject: String,
    /// Counted from 0. Cells of one load and repetition were measured side by side and make pairs.
    pub repetition: u32,
    /// Of a curve: its point, counted from 1; the closed loop's peak is 0.
    #[serde(default)]
    pub point: u32,
}

impl CellId {
    /// The load, and of a curve its point.
    pub fn place(&self) -> String {
        place(&self.load, self.point)
    }
}

/// A load, and of a curve its point.
pub(crate) fn place(load: &str, point: u32) -> String {
    if point == 0 { load.to_owned() } else { format!("{load}, point {point}") }
}

/// A cell that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Which.
    pub id: CellId,
    /// When it began, in seconds since 1970.
    pub started: u64,
    /// What became of it.
    pub outcome: Outcome,
}

impl Cell {
    /// Why it failed, if it did.
    pub fn failure(&self) -> Option<&str> {
        match &self.outcome {
            Outcome::Failed { reason, .. } => Some(reason),
            Outcome::Measured(_) | Outcome::Impossible { .. } => None,
        }
    }

    /// What was measured, if it was.
    pub fn measured(&self) -> Option<&Measurement> {
        match &self.outcome {
            Outcome::Measured(measurement) => Some(measurement),
            Outcome::Failed { .. } | Outcome::Impossible { .. } => None,
        }
    }
}

/// What became of a cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Outcome {
    /// It was measured.
    Measured(Box<Measurement>),
    /// It was tried, and failed.
    Failed {
        /// Why, in one line.
        reason: String,
        /// The last lines of the server, the load or the kernel.
        log: Vec<String>,
    },
    /// This machine cannot run it; says what it lacks.
    Impossible {
        /// What is missing, and what would bring it.
        reason: String,
    },
}

impl From<Measurement> for Outcome {
    fn from(measurement: Measurement) -> Self {
        match measurement.is_stuck() {
            true => Self::Failed { reason: "no request was completed".into(), log: Vec::new() },
            false => Self::Measured(Box::new(measurement)),
        }
    }
}

/// What was measured. Absent is what this stack cannot tell; it is never shown as zero.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// How long was measured, in seconds.
    pub seconds: f64,
    /// Reads.
    pub reads: Option<Operations>,
    /// Writes.
    pub writes: Option<Operations>,
    /// How long requests of both kinds took together. Those of an open loop that were due and never started are among
    /// them, as far as they had waited.
    #[serde(default)]
    pub latency: Option<Latency>,
    /// Of an open loop: requests that were due and never started.
    #[serde(default)]
    pub unstarted: u64,
    /// The rate that an open loop asked for, in requests per second, of all jobs together.
    pub offered_iops: Option<f64>,
    /// Transactions per second, of a database.
    pub transactions: Option<f64>,
    /// Who spent how much CPU time.
    pub cpu: Ledger,
    /// What limited it, where that was not the server.
    pub limit: Option<Bottleneck>,
    /// It shows that it works, and says nothing of speed: a guest under emulation.
    #[serde(default)]
    pub functional_only: bool,
    /// How many samples `perf` took of the host while it was measured.
    #[serde(default)]
    pub samples: u64,
    /// The hottest symbols of the host, where `perf` was there.
    #[serde(default)]
    pub symbols: Vec<Symbol>,
    /// Physical cores that the server's I/O threads could use, all together.
    #[serde(default)]
    pub io_thread_cores: Option<u32>,
    /// The share of the time that the server's I/O threads slept in `io_submit`, where that was looked at.
    #[serde(default)]
    pub in_io_submit: Option<f64>,
    /// What the server's I/O threads said of their polling.
    pub polling: Option<Polling>,
}

/// Requests of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Operations {
    /// How many completed.
    pub requests: u64,
    /// What they moved.
    pub bytes: u64,
    /// How long they took.
    pub latency: Latency,
}

/// Latencies, in nanoseconds: of an open loop from when a request was to begin.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// The mean.
    pub mean: f64,
    /// Half of them took less.
    pub p50: f64,
    /// Nine of ten.
    pub p90: f64,
    /// 99 of 100.
    pub p99: f64,
    /// 999 of 1000.
    pub p999: f64,
    /// The longest.
    pub max: f64,
}

/// Who spent CPU time while it was measured, in nanoseconds. Parts that a stack does not have, or cannot tell, are absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    /// I/O threads: finding and doing work, in user space.
    pub io_thread_work: Option<u64>,
    /// I/O threads: spinning that ended with work.
    pub io_thread_spin_found: Option<u64>,
    /// I/O threads: spinning in vain.
    pub io_thread_spin_wasted: Option<u64>,
    /// I/O threads: in the kernel.
    pub io_thread_system: Option<u64>,
    /// The server's other threads: workers, main loop.
    pub server_other: Option<u64>,
    /// All of the server, where it cannot be told apart.
    pub server: Option<u64>,
    /// The guest's processors and the rest of QEMU.
    pub guest: Option<u64>,
    /// What serves the disk to the server, as far as it is on this host: an NBD server, or Ceph's OSDs.
    #[serde(default)]
    pub backend: Option<u64>,
    /// Kernel threads.
    pub kernel_threads: Option<u64>,
    /// Interrupts, hard and soft.
    pub interrupts: Option<u64>,
    /// What a hypervisor took of the processors' time: nobody here was busy with it.
    #[serde(default)]
    pub stolen: Option<u64>,
    /// The load itself.
    pub load: Option<u64>,
    /// All that the host was busy: what the others leave of it is somebody else's.
    pub host_busy: Option<u64>,
}

/// What limited a measurement, where that was not the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bottleneck {
    /// The load itself: says why.
    Load(String),
    /// The disk: as fast as the host's own fio on it.
    Device(String),
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(why) => write!(f, "load-bound: {why}"),
            Self::Device(why) => write!(f, "device-bound: {why}"),
        }
    }
}

/// How many symbols a profile has at most: the hottest.
pub const SYMBOLS: usize = 200;

/// A symbol's share of all samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Symbol {
    /// Its name.
    pub name: String,
    /// The program or thread that ran it.
    #[serde(default)]
    pub comm: String,
    /// Of all samples, in percent.
    pub percent: f64,
}

/// Polling, summed over a server's I/O threads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Polling {
    /// Waits.
    pub waits: u64,
    /// Waits that ended while spinning.
    pub hits: u64,
    /// Waits that ended in sleep.
    pub blocks: u64,
    /// The mean window, in nanoseconds.
    pub mean_window_ns: Option<f64>,
    /// Resets of a source's interval, or of a window, for each wait.
    pub windows_reset: Option<f64>,
    /// The share of the time that the window was near the maximum.
    pub windows_near_max: Option<f64>,
}

/// An open loop that reaches less than this share of its rate cannot keep up with it.
const KEEPS_UP: f64 = 0.97;

/// The share of their rate that measurements of an open loop reached together, if they fell short of it by more than chance.
pub fn shortfall<'a>(measured: impl IntoIterator<Item = &'a Measurement>) -> Option<f64> {
    let of_each = measured.into_iter().filter_map(|one| Some((one.requests() as f64, one.due()?)));
    let (reached, due) = of_each.fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    // Requests at random times come in numbers that deviate by their root.
    (reached < KEEPS_UP * due && reached < due - 4.0 * due.sqrt()).then(|| reached / due)
}

/// Other work disturbs if it takes this share of the machine.
pub const DISTURBS: f64 = 0.05;

impl Measurement {
    /// The share of the machine, which has so many processors, that something else used meanwhile.
    pub fn others(&self, processors: usize) -> Option<f64> {
        let others = self.cpu.unaccounted()? as f64 / 1e9;
        Some((others / self.seconds.max(1e-9) / processors.max(1) as f64).min(1.0))
    }

    /// Requests of both kinds.
    pub fn requests(&self) -> u64 {
        [&self.reads, &self.writes].into_iter().flatten().map(|operations| operations.requests).sum()
    }

    /// Takes in the rate that was asked for, in requests per second, of a load that does not say itself how much it left
    /// undone: what is missing by more than chance was due and never started.
    pub fn offer(&mut self, rate: Option<f64>) {
        self.offered_iops = rate;
        if let (Some(due), Some(share)) = (self.due(), shortfall([&*self])) {
            self.unstarted = (due * (1.0 - share)) as u64;
        }
    }

    /// Whether requests were made or due, by more than chance, and none was completed in so long a time that no machine stalls
    /// for it.
    fn is_stuck(&self) -> bool {
        let makes_requests = self.reads.is_some() || self.writes.is_some();
        let are_due = self.offered_iops.is_none() || shortfall([self]).is_some();
        makes_requests && self.requests() == 0 && are_due && self.seconds >= 1.0
    }

    /// Of an open loop: how many requests were due.
    pub fn due(&self) -> Option<f64> {
        Some(self.offered_iops? * self.seconds)
    }

    /// Bytes of both kinds.
    pub fn bytes(&self) -> u64 {
        [&self.reads, &self.writes].into_iter().flatten().map(|operations| operations.bytes).sum()
    }

    /// A latency of all requests, in nanoseconds. `None` without requests, and where there were reads and writes and
    /// nobody measured them together: a quantile of both does not follow from those of each.
    pub fn latency(&self, of: impl Fn(&Latency) -> f64) -> Option<f64> {
        match (&self.latency, &self.reads, &self.writes) {
            (Some(all), ..) => Some(of(all)),
            (None, Some(only), None) | (None, None, Some(only)) => Some(of(&only.latency)),
            (None, Some(_), Some(_)) | (None, None, None) => None,
        }
        .filter(|_| self.requests() > 0)
    }

    /// The mean latency, which follows from those of both kinds.
    pub fn mean_latency(&self) -> Option<f64> {
        let weighed = [&self.reads, &self.writes].into_iter().flatten();
        let sum: f64 = weighed.map(|operations| operations.latency.mean * operations.requests as f64).sum();
        let both = || (self.requests() > 0).then(|| sum / self.requests() as f64);
        self.latency(|latency| latency.mean).or_else(both)
    }
}

impl Ledger {
    /// All times by a factor: for who could only be watched during a part of what was measured.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Self {
        let by = |time: Option<u64>| time.map(|time| (time as f64 * factor) as u64);
        Self {
            io_thread_work: by(self.io_thread_work),
            io_thread_spin_found: by(self.io_thread_spin_found),
            io_thread_spin_wasted: by(self.io_thread_spin_wasted),
            io_thread_system: by(self.io_thread_system),
            server_other: by(self.server_other),
            server: by(self.server),
            guest: by(self.guest),
            backend: by(self.backend),
            kernel_threads: by(self.kernel_threads),
            interrupts: by(self.interrupts),
            stolen: by(self.stolen),
            load: by(self.load),
            host_busy: by(self.host_busy),
        }
    }

    /// The guest's part without what its load has spent by the guest's clock, which is shown apart. Where the guest waits for
    /// a processor its clock goes on, so that this may be more than it had.
    #[must_use]
    pub fn without(self, load: Option<u64>) -> Self {
        let load = load.map(|load| load.min(self.guest.unwrap_or(load)));
        Self { guest: self.guest.map(|guest| guest - load.unwrap_or(0)), load, ..self }
    }

    /// CPU time of the server's I/O threads, in nanoseconds; `None` where nobody could tell.
    pub fn io_threads(&self) -> Option<u64> {
        sum([self.io_thread_work, self.io_thread_spin_found, self.io_thread_spin_wasted, self.io_thread_system])
    }

    /// CPU time of the server's threads, all of them.
    pub fn all_of_server(&self) -> Option<u64> {
        sum([self.io_threads(), self.server_other, self.server])
    }

    /// CPU time of all but the load and what is behind the disk, in nanoseconds; `None` where nobody could tell.
    pub fn serving(&self) -> Option<u64> {
        sum([self.all_of_server(), self.guest, self.kernel_threads, self.interrupts])
    }

    /// What the host was busy with beside all this, in nanoseconds.
    pub fn unaccounted(&self) -> Option<u64> {
        let known = self.serving().unwrap_or(0) + self.backend.unwrap_or(0) + self.load.unwrap_or(0);
        Some(self.host_busy?.saturating_sub(known))
    }
}

/// What is known of some parts together; `None` where nothing is.
fn sum<const N: usize>(parts: [Option<u64>; N]) -> Option<u64> {
    parts.iter().any(Option::is_some).then(|| parts.into_iter().flatten().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_guests_load_has_spent_is_the_loads_and_no_part_of_serving() {
        let ledger = Ledger { guest: Some(100), io_thread_work: Some(10), ..Ledger::default() };
        let apart = ledger.clone().without(Some(30));
        assert_eq!((apart.guest, apart.load, apart.serving()), (Some(70), Some(30), Some(80)));
        let more = ledger.clone().without(Some(300));
        assert_eq!((more.guest, more.load), (Some(0), Some(100)), "clocks differ");
        assert_eq!(ledger.clone().without(None), ledger, "an application does not say");
    }

    #[test]
    fn latencies_of_reads_and_writes_make_a_mean_and_no_quantile() {
        let of = |requests, mean| {
            Some(Operations { requests, bytes: 0, latency: Latency { mean, p99: 2.0 * mean, ..Latency::default() } })
        };
        let p99 = |one: &Measurement| one.latency(|latency| latency.p99);
        let both = Measurement { reads: of(3, 10.0), writes: of(1, 50.0), ..Measurement::default() };
        assert_eq!((both.requests(), both.mean_latency(), p99(&both)), (4, Some(20.0), None));
        let all = Measurement { latency: of(0, 30.0).map(|of| of.latency), ..both.clone() };
        assert_eq!((all.mean_latency(), p99(&all)), (Some(30.0), Some(60.0)));
        for only in
            [Measurement { reads: None, ..both.clone() }, Measurement { reads: of(1, 50.0), writes: None, ..both }]
        {
            assert_eq!((only.mean_latency(), p99(&only)), (Some(50.0), Some(100.0)));
        }
        for none in [
            Measurement::default(),
            Measurement { reads: of(0, 10.0), ..Measurement::default() },
            Measurement { reads: of(0, 10.0), writes: of(0, 10.0), ..Measurement::default() },
        ] {
            assert_eq!((none.mean_latency(), p99(&none)), (None, None));
        }
    }

    #[test]
    fn an_open_loop_has_so_many_requests_due_in_its_time() {
        let open = Measurement { offered_iops: Some(300.0), seconds: 2.0, ..Measurement::default() };
        assert_eq!((open.due(), Measurement::default().due()), (Some(600.0), None));
    }

    #[test]
    fn who_completes_nothing_in_a_second_has_failed_unless_nothing_was_due() {
        let of = |requests, seconds, offered_iops| {
            let reads = Some(Operations { requests, ..Operations::default() });
            Outcome::from(Measurement { seconds, reads, offered_iops, ..Measurement::default() })
        };
        let has_failed =
            |outcome| matches!(outcome, Outcome::Failed { reason, .. } if reason == "no request was completed");
        assert!(has_failed(of(0, 1.0, None)) && has_failed(of(0, 1.0, Some(1000.0))));
        for fine in [of(1, 1.0, None), of(0, 0.9, None), of(0, 1.0, Some(1.0)), Measurement::default().into()] {
            assert!(matches!(fine, Outcome::Measured(_)), "{fine:?}");
        }
    }

    #[test]
    fn what_a_load_left_undone_by_more_than_chance_was_never_started() {
        let of = |requests, rate| {
            let reads = Some(Operations { requests, ..Operations::default() });
            let mut measurement = Measurement { seconds: 2.0, reads, ..Measurement::default() };
            measurement.offer(rate);
            (measurement.offered_iops, measurement.unstarted)
        };
        assert_eq!(of(6300, Some(5000.0)), (Some(5000.0), 3700));
        assert_eq!(of(9900, Some(5000.0)), (Some(5000.0), 0), "it keeps up");
        assert_eq!(of(45, Some(30.0)), (Some(30.0), 0), "of so few some are missing by chance");
        assert_eq!(of(6300, None), (None, 0));
    }

    #[test]
    fn a_ledger_has_sums_of_what_is_known_and_leaves_the_rest_of_the_host_to_others() {
        // Each part is a bit, so that a sum says what is in it.
        let ledger = Ledger {
            io_thread_work: Some(1),
            io_thread_spin_found: Some(2),
            io_thread_spin_wasted: Some(4),
            io_thread_system: Some(8),
            server_other: Some(16),
            server: Some(32),
            guest: Some(64),
            backend: Some(128),
            kernel_threads: Some(256),
            interrupts: Some(512),
            stolen: Some(1024),
            load: Some(2048),
            host_busy: Some(10_000),
        };
        let serving = 0b11_0111_1111;
        assert_eq!(ledger.io_threads(), Some(0b1111));
        assert_eq!((ledger.all_of_server(), ledger.serving()), (Some(0b11_1111), Some(serving)));
        assert_eq!(ledger.unaccounted(), Some(10_000 - serving - 128 - 2048));
        let twice = ledger.scaled(2.0);
        assert_eq!(
            (twice.serving(), twice.unaccounted()),
            (Some(2 * serving), ledger.unaccounted().map(|time| 2 * time))
        );
        assert_eq!((twice.backend, twice.stolen, twice.load), (Some(256), Some(2048), Some(4096)));
        assert_eq!((twice.server, twice.guest, twice.host_busy), (Some(64), Some(128), Some(20_000)));
        let little = Ledger { host_busy: Some(5), ..ledger };
        assert_eq!(little.unaccounted(), Some(0), "clocks differ");
        let nothing = Ledger::default();
        assert_eq!((nothing.io_threads(), nothing.serving(), nothing.unaccounted()), (None, None, None));
        assert_eq!(Ledger { host_busy: Some(5), ..nothing }.unaccounted(), Some(5));
    }
}
