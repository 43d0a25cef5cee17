//! How long requests took: counted by one thread, read by any.

use egret_event_loop::{Counter, Nanos};

/// Below this latencies are not told apart: 2^8 ns.
const FIRST_OCTAVE: u32 = 8;
/// From here on they are not told apart either: 2^36 ns, a good minute.
const END_OCTAVE: u32 = 36;
/// Buckets an octave, as a power of two: a bucket is at most a sixteenth as wide as what it holds is long.
const PER_OCTAVE: u32 = 4;
const BUCKETS: usize = ((END_OCTAVE - FIRST_OCTAVE) << PER_OCTAVE) as usize + 1;

#[inline]
fn bucket(latency: u64) -> usize {
    let octave = (latency | 1).ilog2();
    if octave < FIRST_OCTAVE {
        return 0;
    }
    // The bits after the leading one are the place within the octave.
    let within = (latency >> (octave - PER_OCTAVE)) as usize & ((1 << PER_OCTAVE) - 1);
    ((((octave - FIRST_OCTAVE) as usize) << PER_OCTAVE) + within).min(BUCKETS - 1)
}

/// Where a bucket ends and the next begins, in nanoseconds.
const fn end(bucket: usize) -> u64 {
    let next = bucket as u64 + 1;
    let (octave, within) = (next >> PER_OCTAVE, next & ((1 << PER_OCTAVE) - 1));
    ((1 << PER_OCTAVE) + within) << (FIRST_OCTAVE as u64 + octave - PER_OCTAVE as u64)
}

/// Latencies as they are counted, by their owner alone.
#[derive(Debug)]
pub(crate) struct LatencyCounters {
    buckets: [Counter; BUCKETS],
    sum: Counter,
    longest: Counter,
}

impl LatencyCounters {
    /// Nothing counted; some 4 KB.
    pub(crate) fn new() -> Self {
        Self {
            buckets: std::array::from_fn(|_| Counter::default()),
            sum: Counter::default(),
            longest: Counter::default(),
        }
    }

    #[inline]
    pub(crate) fn count(&self, latency: Nanos) {
        self.buckets[bucket(latency.0)].add(1);
        self.sum.add_time(latency);
        if latency > self.longest.time() {
            self.longest.set(latency.0);
        }
    }

    pub(crate) fn add_to(&self, sum: &mut Latencies) {
        sum.buckets.iter_mut().zip(&self.buckets).for_each(|(sum, more)| *sum += more.get());
        sum.sum += self.sum.time();
        sum.longest = sum.longest.max(self.longest.time());
    }
}

/// Latencies as they had been counted when they were read: how many were how long, to a sixteenth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Latencies {
    buckets: Box<[u64]>,
    sum: Nanos,
    longest: Nanos,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { buckets: vec![0; BUCKETS].into(), sum: Nanos::ZERO, longest: Nanos::ZERO }
    }
}

impl Latencies {
    /// How many there are.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// All of them together.
    pub const fn sum(&self) -> Nanos {
        self.sum
    }

    /// The longest there has been.
    pub const fn longest(&self) -> Nanos {
        self.longest
    }

    /// What `quantile` of them, from 0 to 1, do not exceed, to a sixteenth; zero of none.
    pub fn quantile(&self, quantile: f64) -> Nanos {
        let rank = ((self.count() as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        match found {
            None => Nanos::ZERO,
            // The last bucket has no end.
            Some(last) if last == BUCKETS - 1 => self.longest,
            Some(bucket) => Nanos(end(bucket) - 1).min(self.longest),
        }
    }

    /// How many were shorter than `2^n` nanoseconds, for each `n` of `octaves`.
    pub fn shorter_than_octaves(&self, octaves: std::ops::RangeInclusive<u32>) -> impl Iterator<Item = (Nanos, u64)> {
        let (mut seen, mut at) = (0, 0);
        octaves.map(move |octave| {
            let limit = 1 << octave;
            while at < BUCKETS - 1 && end(at) <= limit {
                seen += self.buckets[at];
                at += 1;
            }
            (Nanos(limit), seen)
        })
    }

    /// Those that there are, shortest first: at most so many nanoseconds, and how many.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let filled = self.buckets.iter().enumerate().filter(|(_, count)| **count > 0);
        filled.map(|(at, count)| (if at == BUCKETS - 1 { self.longest.0 } else { end(at) - 1 }, *count))
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(sum, more)| *sum += more);
        self.sum += other.sum;
        self.longest = self.longest.max(other.longest);
    }

    /// Those that were counted after `before` was read of the same counters; the longest is still that of all.
    pub fn since(&self, before: &Self) -> Self {
        let buckets = self.buckets.iter().zip(&before.buckets).map(|(now, then)| now.saturating_sub(*then)).collect();
        Self { buckets, sum: Nanos(self.sum.0.saturating_sub(before.sum.0)), longest: self.longest }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(latencies: impl IntoIterator<Item = u64>) -> Latencies {
        let counters = LatencyCounters::new();
        latencies.into_iter().for_each(|latency| counters.count(Nanos(latency)));
        let mut read = Latencies::default();
        counters.add_to(&mut read);
        read
    }

    #[test]
    fn a_bucket_ends_where_the_next_begins() {
        assert_eq!([0, 1, 255, 271].map(bucket), [0; 4]);
        for at in 0..BUCKETS - 1 {
            assert_eq!((bucket(end(at) - 1), bucket(end(at))), (at, at + 1));
        }
        assert_eq!(end(BUCKETS - 2), 1 << END_OCTAVE);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn a_quantile_is_right_to_a_sixteenth() {
        let latencies = of((1..=1000).map(|n| n * 1000));
        for (quantile, exact) in [(0.0, 1000), (0.5, 500_000), (0.99, 990_000), (1.0, 1_000_000)] {
            let found = latencies.quantile(quantile).0;
            assert!(found >= exact && found <= exact + exact / 16, "{quantile}: {found}");
        }
        assert_eq!((latencies.count(), latencies.sum(), latencies.longest().0), (1000, Nanos(500_500_000), 1_000_000));
        assert_eq!(of([]).quantile(0.5), Nanos::ZERO);
        // The last that the bucket of the first holds.
        assert_eq!(of([300, 1 << 20]).quantile(0.5), Nanos(303));
        assert_eq!(of([u64::MAX / 2]).quantile(0.5), Nanos(u64::MAX / 2));
    }

    #[test]
    fn octaves_count_what_is_shorter() {
        let latencies = of([100, 1000, 1024, 3000, 1 << 40]);
        let octaves: Vec<u64> = latencies.shorter_than_octaves(9..=13).map(|(_, count)| count).collect();
        assert_eq!(octaves, [1, 2, 3, 4, 4]);
        // What the last bucket has may be longer than any.
        assert!(latencies.shorter_than_octaves(35..=41).all(|(_, count)| count == 4));
    }

    #[test]
    fn buckets_are_told_that_hold_something_by_where_they_end_and_the_last_by_the_longest() {
        assert_eq!(of([]).buckets().count(), 0);
        let latencies = of([300, 1000, 1023, 1 << 40, 1 << 50]);
        assert_eq!(latencies.buckets().collect::<Vec<_>>(), [(303, 1), (1023, 2), (1 << 50, 2)]);
    }

    #[test]
    fn what_was_counted_since_is_what_is_left_after_the_difference() {
        let (before, now) = (of([1000, 2000]), of([1000, 2000, 5000, 5000]));
        let since = now.since(&before);
        assert_eq!((since.count(), since.sum()), (2, Nanos(10_000)));
        let mut sum = before.clone();
        sum.add(&since);
        assert_eq!(sum, now);
        // Several queues' are one sum, whichever has the longest.
        for (one, other) in [([1000, 9000], [5000, 2000]), ([5000, 2000], [1000, 9000])] {
            let mut sum = of(one);
            sum.add(&of(other));
            assert_eq!(sum, of([1000, 2000, 5000, 9000]));
        }
    }
}
