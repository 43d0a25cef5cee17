//! The intended start times of an open loop's requests.

use super::spec::{Rate, RateProcess};
use crate::random::Random;

/// The intended start times of one disk of a job, in nanoseconds since its beginning.
///
/// They do not depend on the server, so a stall delays every request that is due during it, and their latencies show that.
/// Each disk has its own for the same reason: what is due on a disk that stalls is no other disk's to do.
#[derive(Clone, Debug)]
pub(super) struct Arrivals {
    process: RateProcess,
    gap_ns: f64,
    first: f64,
    next: f64,
    random: Random,
}

impl Arrivals {
    /// The part of a job's rate that its disk `number` of `count` has. Equal gaps of several disks are equal for the job, too:
    /// its disks take turns.
    pub(super) fn new(rate: Rate, number: usize, count: usize, seed: u64) -> Self {
        let gap_of_job = 1e9 / rate.iops;
        let first = gap_of_job * (number + 1) as f64;
        let random = Random::new(seed);
        Self { process: rate.process, gap_ns: gap_of_job * count as f64, first, next: first, random }
    }

    /// Starts over at time 0.
    pub(super) fn restart(&mut self) {
        self.next = match self.process {
            RateProcess::Fixed => self.first,
            RateProcess::Poisson => self.random.exponential(self.gap_ns),
        };
    }

    /// The intended start of the next request.
    #[inline]
    pub(super) fn next(&self) -> u64 {
        self.next as u64
    }

    /// Advances to the request after it.
    #[inline]
    pub(super) fn advance(&mut self) {
        self.next += match self.process {
            RateProcess::Fixed => self.gap_ns,
            RateProcess::Poisson => self.random.exponential(self.gap_ns),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_processes_keep_the_rate_and_only_one_keeps_the_gap() {
        for (process, regular) in [(RateProcess::Fixed, true), (RateProcess::Poisson, false)] {
            let mut arrivals = Arrivals::new(Rate { iops: 10_000.0, process }, 0, 1, 3);
            arrivals.restart();
            let mut starts = Vec::new();
            while arrivals.next() < 1_000_000_000 {
                starts.push(arrivals.next());
                arrivals.advance();
            }
            assert!((9_500..10_500).contains(&starts.len()), "{process:?}: {}", starts.len());
            let gaps: Vec<_> = starts.windows(2).map(|pair| pair[1] - pair[0]).collect();
            assert_eq!(gaps.iter().all(|gap| (99_999..=100_001).contains(gap)), regular);
        }
    }

    #[test]
    fn several_disks_have_the_rate_together_and_take_turns_where_gaps_are_equal() {
        for process in [RateProcess::Fixed, RateProcess::Poisson] {
            let rate = Rate { iops: 9000.0, process };
            let mut starts: Vec<(u64, usize)> = Vec::new();
            for disk in 0..3 {
                let mut arrivals = Arrivals::new(rate, disk, 3, disk as u64);
                arrivals.restart();
                while arrivals.next() < 1_000_000_000 {
                    starts.push((arrivals.next(), disk));
                    arrivals.advance();
                }
            }
            assert!((8_500..9_500).contains(&starts.len()), "{process:?}: {}", starts.len());
            if process == RateProcess::Fixed {
                starts.sort_unstable();
                assert!((0..).zip(&starts).all(|(turn, (_, disk))| turn % 3 == *disk));
                let gaps = starts.windows(2).map(|pair| pair[1].0 - pair[0].0);
                assert!(gaps.into_iter().all(|gap| (111_110..=111_112).contains(&gap)));
            }
        }
    }
}
