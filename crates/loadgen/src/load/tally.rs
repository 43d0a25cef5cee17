//! What was measured.

use std::time::Duration;

use hdrhistogram::Histogram;

use super::lane::Flight;
use super::spec::Waiting;
use crate::client::Op;

/// The largest latency that is told apart; longer ones count as this.
const LONGEST_NS: u64 = 60_000_000_000;
/// If this share of turns began without a wait, the load itself is the bottleneck.
const SATURATED: f64 = 0.9;

/// What jobs have measured so far; it adds up over several runs, and over jobs.
#[derive(Clone, Debug)]
pub struct Tally {
    /// How long was measured, all runs together.
    pub elapsed: Duration,
    /// Reads that completed.
    pub reads: u64,
    /// Writes that completed.
    pub writes: u64,
    /// Bytes in both.
    pub bytes: u64,
    /// From a request's intended start to when its completion was seen, in nanoseconds. In a closed loop the intended
    /// start is the submission, and this is fio's `clat`; of requests that were in flight when measuring began it is not known.
    pub lat: Histogram<u64>,
    /// The latencies of writes alone.
    pub write_lat: Histogram<u64>,
    /// Of an open loop: how late requests were submitted (near fio's `slat`), and how long they took from then on.
    pub open: Option<OpenLoop>,
    /// CPU time of the jobs' threads, in nanoseconds.
    pub cpu_ns: u64,
    /// Turns with something to do.
    pub turns: u64,
    /// Turns that found it at the first poll: the job did not wait.
    pub at_once: u64,
    /// How often a job slept.
    pub sleeps: u64,
    /// How often a server was kicked.
    pub kicks: u64,
    waiting: Waiting,
}

/// The figures that only an open loop has.
#[derive(Clone, Debug)]
pub struct OpenLoop {
    /// From the intended to the actual start.
    pub slat: Histogram<u64>,
    /// From the actual start to the completion.
    pub clat: Histogram<u64>,
    /// Of that, how much the load itself was late: from when there was room for the request.
    pub late: Histogram<u64>,
    /// Requests that were due and found no free slot before the end.
    pub unstarted: u64,
    /// How long these had waited by then: they took longer than that.
    pub unstarted_lat: Histogram<u64>,
}

fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("good bounds")
}

impl Tally {
    /// Nothing yet.
    pub fn new(waiting: Waiting, open: bool) -> Self {
        Self {
            elapsed: Duration::ZERO,
            reads: 0,
            writes: 0,
            bytes: 0,
            lat: histogram(),
            write_lat: histogram(),
            open: open.then(|| OpenLoop {
                slat: histogram(),
                clat: histogram(),
                late: histogram(),
                unstarted: 0,
                unstarted_lat: histogram(),
            }),
            cpu_ns: 0,
            turns: 0,
            at_once: 0,
            sleeps: 0,
            kicks: 0,
            waiting,
        }
    }

    /// Adds the figures of a job that ran at the same time.
    pub fn join(&mut self, other: &Self) {
        self.elapsed = self.elapsed.max(other.elapsed);
        self.reads += other.reads;
        self.writes += other.writes;
        self.bytes += other.bytes;
        self.lat += &other.lat;
        self.write_lat += &other.write_lat;
        if let (Some(mine), Some(theirs)) = (&mut self.open, &other.open) {
            mine.slat += &theirs.slat;
            mine.clat += &theirs.clat;
            mine.late += &theirs.late;
            mine.unstarted += theirs.unstarted;
            mine.unstarted_lat += &theirs.unstarted_lat;
        }
        self.cpu_ns += other.cpu_ns;
        self.turns += other.turns;
        self.at_once += other.at_once;
        self.sleeps += other.sleeps;
        self.kicks += other.kicks;
    }

    /// Counts a request that completed.
    #[inline]
    pub(super) fn count(&mut self, flight: &Flight, bytes: u32) {
        *(if flight.op == Op::Write { &mut self.writes } else { &mut self.reads }) += 1;
        self.bytes += u64::from(bytes);
    }

    /// Records how long one took that completed at `now`.
    #[inline]
    pub(super) fn record(&mut self, flight: &Flight, now: u64) {
        if flight.op == Op::Write {
            self.write_lat.saturating_record(now - flight.intended);
        }
        self.lat.saturating_record(now - flight.intended);
        if let Some(open) = &mut self.open {
            open.slat.saturating_record(flight.issued - flight.intended);
            open.clat.saturating_record(now.saturating_sub(flight.issued));
            open.late.saturating_record(flight.late);
        }
    }

    /// All latencies: of an open loop also those of requests that never started, as far as they had waited.
    pub fn all_lat(&self) -> Histogram<u64> {
        let mut all = self.lat.clone();
        if let Some(open) = &self.open {
            all += &open.unstarted_lat;
        }
        all
    }

    /// Requests that completed.
    pub fn requests(&self) -> u64 {
        self.reads + self.writes
    }

    /// Requests per second.
    pub fn iops(&self) -> f64 {
        self.requests() as f64 / self.elapsed.as_secs_f64()
    }

    /// The latency below which this share of requests stayed, in microseconds.
    pub fn lat_us(&self, quantile: f64) -> f64 {
        self.lat.value_at_quantile(quantile) as f64 / 1e3
    }

    /// The load's own CPU time per request, in microseconds.
    pub fn cpu_us(&self) -> f64 {
        self.cpu_ns as f64 / 1e3 / self.requests().max(1) as f64
    }

    /// The share of turns for which the load did not have to wait.
    pub fn never_waiting(&self) -> f64 {
        self.at_once as f64 / self.turns.max(1) as f64
    }

    /// Why the load, and not the server, was the bottleneck, if it was.
    pub fn limit(&self) -> Option<String> {
        if let Some(open) = &self.open {
            let late = open.late.value_at_quantile(0.5);
            let whole = self.lat.value_at_quantile(0.5).max(1);
            return (late * 2 > whole)
                .then(|| format!("half of the requests were made over {:.1} us late", late as f64 / 1e3));
        }
        let share = self.never_waiting();
        let by = match self.waiting {
            Waiting::Polling => "it looked",
            Waiting::Blocking => "it was about to sleep",
        };
        (self.turns > 0 && share >= SATURATED)
            .then(|| format!("in {:.0}% of cases a completion was there when {by}", share * 100.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_that_never_waits_says_that_it_was_the_limit() {
        let mut tally = Tally::new(Waiting::Polling, false);
        (tally.turns, tally.at_once) = (100, 50);
        assert_eq!(tally.limit(), None);
        tally.at_once = 97;
        assert_eq!(tally.limit().unwrap(), "in 97% of cases a completion was there when it looked");
    }

    #[test]
    fn an_open_loop_that_is_late_by_itself_says_so_and_one_without_room_does_not() {
        let mut tally = Tally::new(Waiting::Blocking, true);
        tally.lat.record(100_000).unwrap();
        tally.open.as_mut().unwrap().slat.record(80_000).unwrap();
        assert_eq!(tally.limit(), None);
        tally.open.as_mut().unwrap().late.record(80_000).unwrap();
        assert!(tally.limit().unwrap().starts_with("half of the requests were made over 8"));
    }

    #[test]
    fn requests_that_never_started_are_late_ones() {
        let mut tally = Tally::new(Waiting::Blocking, true);
        (0..99).for_each(|_| tally.lat.record(1000).unwrap());
        tally.open.as_mut().unwrap().unstarted_lat.record(1_000_000).unwrap();
        assert_eq!(tally.all_lat().len(), 100);
        assert!(tally.all_lat().max() >= 1_000_000 && tally.lat.max() < 2000);
    }

    #[test]
    fn jobs_side_by_side_add_up_and_last_as_long_as_the_longest() {
        let mut one = Tally::new(Waiting::Polling, false);
        (one.reads, one.elapsed) = (100, Duration::from_secs(2));
        let mut other = one.clone();
        (other.writes, other.elapsed) = (50, Duration::from_secs(1));
        one.join(&other);
        assert_eq!((one.requests(), one.iops()), (250, 125.0));
    }
}
