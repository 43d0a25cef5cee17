//! The intended start times of an open loop's requests.

use super::spec::{Rate, RateProcess};
use crate::random::Random;

/// The intended start times of one job, in nanoseconds since its beginning.
///
/// They do not depend on the server, so a stall delays every request that is due during it, and their latencies show that.
#[derive(Clone, Debug)]
pub(super) struct Arrivals {
    process: RateProcess,
    gap_ns: f64,
    next: f64,
    random: Random,
}

impl Arrivals {
    pub(super) fn new(rate: Rate, seed: u64) -> Self {
        Self { process: rate.process, gap_ns: 1e9 / rate.iops, next: 0.0, random: Random::new(seed) }
    }

    /// Starts over at time 0.
    pub(super) fn restart(&mut self) {
        self.next = 0.0;
        self.advance();
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
            let mut arrivals = Arrivals::new(Rate { iops: 10_000.0, process }, 3);
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
}
