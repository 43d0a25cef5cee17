//! Leaky buckets: how long the next request has to wait (QEMU's `util/throttle.c`, `docs/throttle.txt`).
//!
//! What is done fills a bucket, which leaks at the average rate; the next may begin while it is not over its brim. A
//! request is not cut to fit: it goes when there is room for the smallest, and those behind it wait for what it took.
//!
//! | limit | the brim |
//! |---|---|
//! | an average alone | a tenth of a second's worth |
//! | with a burst | the whole burst: its rate times its seconds |
//!
//! A burst of more than a second has a second bucket, which leaks at the burst's rate and holds a tenth of a second of
//! it, so that the burst does not come all at once.

use egret_event_loop::Nanos;

use super::limits::{Limit, Limits, Rates};
use crate::request::PartOf;

const SECOND: f64 = 1e9;

/// Whether a request counts against the limits of reads or of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Direction {
    pub(crate) const BOTH: [Self; 2] = [Self::Read, Self::Write];

    pub(super) const fn other(self) -> Self {
        match self {
            Self::Read => Self::Write,
            Self::Write => Self::Read,
        }
    }
}

/// What a request counts as.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub(crate) bytes: u64,
    pub(crate) part: PartOf,
}

/// One limit, and how far it is used up.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bucket {
    limit: Limit,
    /// Units over the average.
    level: f64,
    /// Units over the burst's rate.
    burst_level: f64,
}

impl Bucket {
    pub(super) fn new(limit: Limit) -> Self {
        Self { limit, ..Self::default() }
    }

    pub(super) fn leak(&mut self, passed: Nanos) {
        let leaked = |rate: u64| rate as f64 * passed.0 as f64 / SECOND;
        self.level = (self.level - leaked(self.limit.average)).max(0.0);
        if self.limit.burst_seconds > 1 {
            self.burst_level = (self.burst_level - leaked(self.limit.burst)).max(0.0);
        }
    }

    pub(super) fn fill(&mut self, units: f64) {
        self.level += units;
        if self.limit.burst_seconds > 1 {
            self.burst_level += units;
        }
    }

    /// How long it has to leak before another may begin.
    pub(super) fn wait(&self) -> Nanos {
        let Limit { average, burst, burst_seconds } = self.limit;
        if average == 0 {
            return Nanos::ZERO;
        }
        // Without a burst a few may still come at once, or every other request would wait for a timer.
        let brim = if burst == 0 { average as f64 / 10.0 } else { burst as f64 * burst_seconds as f64 };
        let until = |over: f64, rate: u64| Nanos((over * SECOND / rate as f64) as u64);
        if self.level > brim {
            return until(self.level - brim, average);
        }
        let burst_brim = burst as f64 / 10.0;
        if burst_seconds > 1 && self.burst_level > burst_brim {
            return until(self.burst_level - burst_brim, burst);
        }
        Nanos::ZERO
    }
}

/// The buckets of a group.
#[derive(Debug, Default)]
pub(super) struct Buckets {
    bytes: ByDirection,
    requests: ByDirection,
    request_bytes: u64,
    leaked: Nanos,
}

#[derive(Debug, Default)]
struct ByDirection {
    total: Bucket,
    read: Bucket,
    write: Bucket,
}

impl ByDirection {
    fn new(rates: &Rates) -> Self {
        Self { total: Bucket::new(rates.total), read: Bucket::new(rates.read), write: Bucket::new(rates.write) }
    }

    /// Those that a request in this direction fills.
    fn of(&mut self, direction: Direction) -> [&mut Bucket; 2] {
        let own = match direction {
            Direction::Read => &mut self.read,
            Direction::Write => &mut self.write,
        };
        [&mut self.total, own]
    }
}

impl Buckets {
    /// Empty ones.
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            bytes: ByDirection::new(&limits.bytes),
            requests: ByDirection::new(&limits.requests),
            request_bytes: limits.request_bytes,
            leaked: Nanos::ZERO,
        }
    }

    /// Lets the buckets leak until `now`; an earlier time than the last one changes nothing.
    pub(super) fn leak(&mut self, now: Nanos) {
        let passed = now - self.leaked;
        self.leaked = self.leaked.max(now);
        for all in [&mut self.bytes, &mut self.requests] {
            [&mut all.total, &mut all.read, &mut all.write].into_iter().for_each(|bucket| bucket.leak(passed));
        }
    }

    /// Until when they have leaked.
    pub(super) const fn leaked(&self) -> Nanos {
        self.leaked
    }

    /// How long after the last [`leak`](Self::leak) another request may begin.
    pub(super) fn wait(&mut self, direction: Direction) -> Nanos {
        let both = [&mut self.bytes, &mut self.requests].into_iter();
        both.flat_map(|all| all.of(direction)).map(|bucket| bucket.wait()).max().unwrap_or(Nanos::ZERO)
    }

    /// Counts a request that begins.
    pub(super) fn account(&mut self, direction: Direction, Cost { bytes, part: PartOf { whole, is_first } }: Cost) {
        let large = self.request_bytes > 0 && whole > self.request_bytes;
        let units = if large { bytes as f64 / self.request_bytes as f64 } else { f64::from(u8::from(is_first)) };
        self.bytes.of(direction).into_iter().for_each(|bucket| bucket.fill(bytes as f64));
        self.requests.of(direction).into_iter().for_each(|bucket| bucket.fill(units));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::throttle::LARGEST_LIMIT;

    fn is(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-6
    }

    fn limit(average: u64, burst: u64, burst_seconds: u64) -> Limit {
        Limit { average, burst, burst_seconds }
    }

    // The vectors are those of QEMU's tests/unit/test-throttle.c.

    #[test]
    fn a_bucket_leaks_at_its_average_and_a_burst_at_its_own_rate() {
        let mut bucket = Bucket { limit: limit(150, 15, 1), level: 1.5, burst_level: 0.0 };
        for left in [0.5, 0.0, 0.0] {
            bucket.leak(Nanos(1_000_000_000 / 150));
            assert!(is(bucket.level, left), "{bucket:?}");
        }
        let mut bucket = Bucket { limit: limit(150, 250, 2), level: 0.0, burst_level: 6.0 };
        for left in [3.5, 1.0, 0.0, 0.0] {
            bucket.leak(Nanos(1_000_000_000 / 100));
            assert!(is(bucket.burst_level, left), "{bucket:?}");
        }
    }

    #[test]
    fn what_is_over_the_brim_waits_for_it_to_leak() {
        let wait = |average, level| Bucket { limit: limit(average, 15, 1), level, burst_level: 0.0 }.wait();
        assert_eq!(wait(0, 1.5), Nanos::ZERO);
        assert_eq!(wait(150, 15.0), Nanos::ZERO);
        assert_eq!(wait(150, 9.0), Nanos::ZERO);
        assert_eq!(wait(150, 15.5), Nanos(1_000_000_000 / 150 / 2));
        assert_eq!(
            Bucket { limit: limit(150, 0, 1), level: 16.0, burst_level: 0.0 }.wait(),
            Nanos(1_000_000_000 / 150)
        );
        let rushed = Bucket { limit: limit(10, 200, 2), level: 0.0, burst_level: 30.0 };
        assert_eq!(rushed.wait(), Nanos::from_millis(50), "a burst does not come all at once");
    }

    #[test]
    fn a_burst_lasts_for_its_seconds() {
        let mut bucket = Bucket::new(limit(10, 200, 2));
        for step in 0..22 {
            bucket.fill(20.0);
            bucket.leak(Nanos::from_millis(100));
            assert!(is(bucket.burst_level, 0.0) && is(bucket.level, f64::from(step + 1) * 19.0), "{bucket:?}");
            // 100 ms more than its two seconds, because it has leaked meanwhile.
            let wait = if step < 21 { Nanos::ZERO } else { Nanos::from_millis(1800) };
            assert_eq!(bucket.wait(), wait, "{step}");
        }
    }

    #[test]
    fn a_request_counts_in_its_own_direction_and_in_the_total() {
        let rate =
            |average| Rates { total: limit(average, 0, 1), read: limit(average, 0, 1), write: limit(average, 0, 1) };
        for (bytes, request_bytes, units) in
            [(512, 0, 1.0), (1024, 0, 1.0), (1024, 17 * 512, 1.0), (64 * 512, 13 * 512, 64.0 / 13.0)]
        {
            let mut buckets = Buckets::new(&Limits { bytes: rate(150), requests: rate(150), request_bytes });
            let cost = Cost { bytes, part: PartOf::all(bytes) };
            buckets.account(Direction::Read, cost);
            buckets.account(Direction::Write, cost);
            let levels = |all: &ByDirection| [all.total.level, all.read.level, all.write.level];
            let expected = |one: f64| [2.0 * one, one, one];
            let near = |a: [f64; 3], b: [f64; 3]| a.into_iter().zip(b).all(|(a, b)| is(a, b));
            assert!(near(levels(&buckets.bytes), expected(bytes as f64)), "{buckets:?}");
            assert!(near(levels(&buckets.requests), expected(units)), "{buckets:?}");
        }
    }

    #[test]
    fn a_request_counts_as_much_in_parts_as_it_does_whole_however_many_bytes_are_one() {
        const PART: u64 = 1 << 20;
        let requests = Rates { total: limit(1000, 0, 1), ..Rates::default() };
        for request_bytes in [0, 4096, PART - 512, PART, 3 * PART / 2, 2 * PART, 7 * PART / 2, 1 << 30] {
            for parts in 1..5 {
                let whole = parts * PART;
                let level = |costs: &[Cost]| {
                    let mut buckets = Buckets::new(&Limits { requests, request_bytes, ..Limits::default() });
                    costs.iter().for_each(|cost| buckets.account(Direction::Read, *cost));
                    buckets.requests.total.level
                };
                let of_parts = (0..parts).map(|part| Cost { bytes: PART, part: PartOf { whole, is_first: part == 0 } });
                let (parts, all) = (of_parts.collect::<Vec<_>>(), Cost { bytes: whole, part: PartOf::all(whole) });
                assert!(is(level(&parts), level(&[all])), "{whole} bytes, where {request_bytes} are one");
            }
        }
    }

    /// Any limit that is taken.
    fn any_limit() -> impl Strategy<Value = Limit> {
        let rate = || prop_oneof![1..=10_u64, 1..=LARGEST_LIMIT, Just(LARGEST_LIMIT)];
        (rate(), prop::option::of(rate()), prop_oneof![Just(1), 1..=LARGEST_LIMIT]).prop_map(
            |(average, burst, seconds)| match burst.map(|burst| burst.max(average)) {
                None => limit(average, 0, 1),
                Some(burst) => limit(average, burst, seconds.min(LARGEST_LIMIT / burst)),
            },
        )
    }

    proptest! {
        /// Whatever is taken as a limit, however large what is done, and however long nothing is.
        #[test]
        fn levels_stay_finite_and_not_negative_and_time_only_lowers_them(
            limit in any_limit(),
            steps in prop::collection::vec((0..=u64::MAX, prop_oneof![0..=u64::MAX, 0..=1_000_000_000_u64]), 1..20),
        ) {
            let rates = Rates { total: limit, ..Rates::default() };
            prop_assert_eq!(Limits { bytes: rates, ..Limits::default() }.check(), Ok(()));
            let mut bucket = Bucket::new(limit);
            prop_assert_eq!(bucket.wait(), Nanos::ZERO, "an empty one");
            for (units, passed) in steps {
                bucket.fill(units as f64);
                let levels = [bucket.level, bucket.burst_level];
                prop_assert!(levels.iter().all(|level| level.is_finite() && *level >= 0.0), "{:?}", bucket);
                bucket.leak(Nanos(passed));
                let left = [bucket.level, bucket.burst_level];
                prop_assert!(left.iter().zip(levels).all(|(left, level)| (0.0..=level).contains(left)), "{:?}", bucket);
            }
        }

        /// The brim is all that may begin at once, beside the request that goes over it.
        #[test]
        fn no_more_begins_at_once_than_the_brim_holds_and_one_request(
            limit in any_limit(),
            units in prop_oneof![1..=4096_u64, 1..=LARGEST_LIMIT],
        ) {
            let Limit { average, burst, burst_seconds } = limit;
            let brim = if burst == 0 { average as f64 / 10.0 } else { burst as f64 * burst_seconds as f64 };
            let mut bucket = Bucket::new(limit);
            let mut begun = 0.0;
            for _ in 0..1000 {
                if bucket.wait() > Nanos::ZERO {
                    break;
                }
                // A wait of less than a nanosecond is none, and an f64 rounds.
                let nothing = 1.0 + average as f64 / SECOND + brim * 1e-9;
                prop_assert!(begun <= brim + nothing, "{begun} of {brim}");
                bucket.fill(units as f64);
                begun += units as f64;
            }
        }
    }

    #[test]
    fn time_that_goes_back_leaks_nothing_twice() {
        let rates = Rates { total: limit(1000, 0, 1), ..Rates::default() };
        let mut buckets = Buckets::new(&Limits { requests: rates, ..Limits::default() });
        buckets.leak(Nanos::from_millis(1000));
        let cost = Cost { bytes: 512, part: PartOf::all(512) };
        (0..200).for_each(|_| buckets.account(Direction::Read, cost));
        buckets.leak(Nanos::from_millis(500));
        buckets.leak(Nanos::from_millis(1010));
        assert!(is(buckets.requests.total.level, 190.0));
    }
}
