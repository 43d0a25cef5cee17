//! What some requests in a row came to.

use std::ops::{AddAssign, Mul, Sub};

use super::buckets::LONGEST;
use super::price::Price;
use crate::{Active, EventKind, Nanos, Standing, Wait};

/// What happened while some requests were served; times in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slice {
    pub(super) requests: u32,
    pub(super) waits: u32,
    pub(super) blocks: u32,
    /// Spinning that was to find an end at any length, and did not.
    pub(super) vain: u32,
    /// The most that were seen at a time.
    most: u32,
    /// What waits took, and the part of it that was spent spinning.
    waited: u64,
    spun: u64,
    /// The part of it that nothing was in sight for.
    paused: u64,
    /// Between waits.
    busy: u64,
    /// Requests that engines had, each for so long.
    in_flight: u32,
    held: u64,
    /// Blocks that ended with requests that no engine had yet.
    kicks: u32,
}

impl Slice {
    /// The one after this.
    pub(super) fn next(&self) -> Self {
        Self { in_flight: self.in_flight, ..Self::default() }
    }

    pub(super) fn add_done(&mut self, before: &Standing) {
        let Standing { in_flight, done, .. } = *before;
        self.requests = self.requests.saturating_add(done.requests);
        let took = done.took.0.min(LONGEST);
        self.busy += took;
        self.held += took * u64::from(in_flight);
        self.in_flight = in_flight;
        self.most = self.most.max(in_flight).max(done.requests);
    }

    /// Takes in a wait. One that is longer than `in_sight` is none between two requests of one load: what was slept of it is no
    /// time that they took.
    pub(super) fn add_wait(&mut self, wait: &Wait<'_>, in_sight: Nanos) {
        let length = wait.length.0.min(LONGEST);
        self.waits += 1;
        self.blocks += u32::from(wait.blocked);
        self.waited += length;
        self.spun += wait.spun.0.min(LONGEST);
        self.held += length * u64::from(self.in_flight);
        let is_kick = |source: &Active| source.ready && source.kind == EventKind::Queue;
        self.kicks += u32::from(wait.blocked && wait.active.iter().any(is_kick));
        if wait.length > in_sight {
            self.paused += length.saturating_sub(wait.spun.0);
        }
    }

    /// From its beginning to its end.
    pub(super) fn elapsed(&self) -> u64 {
        self.busy + self.waited
    }

    /// What a request came to; `cpu` is the thread's in this time, as far as the kernel has told.
    pub(super) fn per_request(&self, cpu: Option<u64>, price: &Price) -> Sample {
        let awake = self.busy + self.spun;
        let each = |nanoseconds: u64| nanoseconds as f64 / f64::from(self.requests);
        let cpu = cpu.unwrap_or(awake + u64::from(self.blocks) * price.block_cpu());
        let (requests, time) = (f64::from(self.requests), each(self.elapsed() - self.paused));
        // What engines had shows how long they had it, whoever was slow: a thread that spins may keep the disk from its core. A block
        // makes a request late besides that it ends with, and by half as much, on average, each that comes meanwhile.
        let most = f64::from(self.most);
        let wakeup = price.latency().max(0) as f64;
        let blocks = f64::from(self.kicks) * wakeup * (1.0 + (wakeup / time / 2.0).min(most));
        // Awake and not on a core: somebody else had it, probably in one piece.
        let stalled = awake.saturating_sub(cpu) as f64;
        let stalls = stalled * (stalled / time / 2.0).min(most);
        let (cpu, late) = (each(cpu), each(self.held) + (blocks + stalls) / requests);
        let cost = Cost { served: cpu + time * price.of_latency(), added: cpu + late * price.of_latency() };
        Sample { requests, time, cost }
    }
}

/// What a request came to, on average: nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    pub(super) requests: f64,
    /// From one request to the next.
    pub(super) time: f64,
    pub(super) cost: Cost,
}

/// What requests cost, by what may be compared.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Cost {
    /// CPU, and the price of the time until the next: what counts where that waits for this one.
    pub(super) served: f64,
    /// CPU, and the price of the time it took: what counts where requests come when they come.
    pub(super) added: f64,
}

impl Sub for Cost {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { served: self.served - other.served, added: self.added - other.added }
    }
}

impl Mul<f64> for Cost {
    type Output = Self;

    fn mul(self, times: f64) -> Self {
        Self { served: self.served * times, added: self.added * times }
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.served += other.served;
        self.added += other.added;
    }
}

impl Cost {
    pub(super) fn at_least_none(self) -> Self {
        Self { served: self.served.max(0.0), added: self.added.max(0.0) }
    }

    /// Whether it is no less than `excess`. The time between requests is nobody's who does not wait for them.
    pub(super) fn covers(self, excess: Self) -> bool {
        self.served.min(self.added) >= excess.served && self.added >= excess.added
    }
}

/// Mean and spread of what requests came to, by the slices they were in.
#[derive(Clone, Copy, Debug, Default)]
struct Spread {
    sum: f64,
    squares: f64,
}

impl Spread {
    fn add(&mut self, value: f64, requests: f64) {
        self.sum += value * requests;
        self.squares += value * value * requests;
    }

    fn mean(&self, requests: f64) -> f64 {
        self.sum / requests
    }

    /// The square of a slice's deviation.
    fn variance(&self, requests: f64) -> f64 {
        let mean = self.mean(requests);
        (self.squares / requests - mean * mean).max(0.0)
    }
}

/// What one habit came to, slice by slice.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    slices: f64,
    requests: f64,
    time: Spread,
    served: Spread,
    added: Spread,
}

/// One habit against another: what a request costs with the first less what it costs with the second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Difference {
    /// What a request costs with the first.
    cost: f64,
    saved: f64,
    /// The standard error of `saved`.
    error: f64,
}

/// So many standard errors are no accident, and so many are none that it would be a pity to fall for.
const CERTAIN: f64 = 3.0;
const LIKELY: f64 = 2.0;
/// So many deviations off is strange.
const STRANGE: f64 = 2.0;
/// Slices after which the earlier ones count half.
const MEMORY: f64 = 256.0;
/// A rate that differs by less than this is the same.
const SAME_RATE: f64 = 1.0 / 50.0;

impl Tally {
    /// Takes in a slice; the last few dozen count.
    pub(super) fn add(&mut self, sample: Sample) {
        if self.slices >= MEMORY {
            self.fade();
        }
        self.slices += 1.0;
        self.requests += sample.requests;
        self.time.add(sample.time, sample.requests);
        self.served.add(sample.cost.served, sample.requests);
        self.added.add(sample.cost.added, sample.requests);
    }

    /// How many slices went into it.
    pub(super) fn slices(&self) -> f64 {
        self.slices
    }

    /// What a request costs.
    pub(super) fn cost(&self) -> Cost {
        Cost { served: self.served.mean(self.requests), added: self.added.mean(self.requests) }
    }

    /// Whether `sample` is none of these: a third more, or a quarter less, and further off than most.
    pub(super) fn is_strange(&self, sample: Sample) -> bool {
        let is_strange = |spread: &Spread, value: f64| {
            let (mean, deviation) = (spread.mean(self.requests), spread.variance(self.requests).sqrt());
            (value * 3.0 > mean * 4.0 || value * 4.0 < mean * 3.0) && (value - mean).abs() > STRANGE * deviation
        };
        is_strange(&self.time, sample.time) || is_strange(&self.added, sample.cost.added)
    }

    /// As if it had been half as many slices.
    fn fade(&mut self) {
        self.slices /= 2.0;
        self.requests /= 2.0;
        for spread in [&mut self.time, &mut self.served, &mut self.added] {
            spread.sum /= 2.0;
            spread.squares /= 2.0;
        }
    }

    /// What the second saves over the first.
    ///
    /// Where the rate of requests answers to the habit, the rate is what counts; where it does not, how late they were.
    pub(super) fn against(&self, other: &Self) -> Difference {
        // Few slices say little of their own spread.
        let doubt = 1.0 + 3.0 / self.slices.min(other.slices);
        let error = |tally: &Self, spread: &Spread| spread.variance(tally.requests) / (tally.slices - 1.0).max(1.0);
        let difference = |of: fn(&Self) -> &Spread| {
            let (one, two) = (of(self), of(other));
            let error = ((error(self, one) + error(other, two)) * doubt).sqrt();
            let (one, two) = (one.mean(self.requests), two.mean(other.requests));
            (one, one - two, error)
        };
        let (time, saved, error) = difference(|tally| &tally.time);
        let closed = saved.abs() > (CERTAIN * error).max(SAME_RATE * time);
        let (cost, saved, error) =
            if closed { difference(|tally| &tally.served) } else { difference(|tally| &tally.added) };
        Difference { cost, saved, error }
    }
}

impl Difference {
    /// Whether the second is certainly the cheaper one, by so much that a change is worth it.
    pub(super) fn is_gain(&self) -> bool {
        self.saves() && self.saved > LIKELY * self.error
    }

    /// Whether the second is cheaper by so much that a change is worth it, if by chance.
    pub(super) fn saves(&self) -> bool {
        self.saved > self.cost / 32.0
    }

    /// Whether the second is certainly the dearer one.
    pub(super) fn is_loss(&self) -> bool {
        self.saved + LIKELY * self.error < -self.cost / 32.0
    }

    /// Whether more of the same would not change the verdict.
    pub(super) fn is_clear(&self) -> bool {
        self.saved + LIKELY * self.error < self.cost / 32.0
    }

    /// Whether the second costs so much more that there is nothing to wait for.
    pub(super) fn is_hopeless(&self) -> bool {
        self.saved + CERTAIN * self.error < -self.cost / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Done;

    #[test]
    fn what_was_slept_of_a_pause_is_no_time_between_requests() {
        let price = Price::new(Nanos(1_000_000), 1);
        let mut slice = Slice::default();
        slice.add_done(&Standing { done: Done { requests: 2, took: Nanos(4_000) }, ..Standing::default() });
        for (length, spun) in [(6_000, 6_000), (5_000_000, 1_000)] {
            let blocked = spun < length;
            let wait = Wait { length: Nanos(length), spun: Nanos(spun), blocked, active: &[] };
            slice.add_wait(&wait, Nanos(1_000_000));
        }
        assert_eq!(slice.elapsed(), 5_010_000);
        assert_eq!(slice.per_request(Some(0), &price).time, (4_000.0 + 6_000.0 + 1_000.0) / 2.0);
    }

    #[test]
    fn a_request_is_as_late_as_engines_have_had_it_while_the_thread_worked_and_while_it_waited() {
        let price = Price::new(Nanos(1_000_000), 1);
        let mut slice = Slice::default();
        let done = Done { requests: 2, took: Nanos(1_000) };
        slice.add_done(&Standing { in_flight: 2, done, ..Standing::default() });
        let length = Nanos(10_000);
        slice.add_wait(&Wait { length, spun: length, blocked: false, active: &[] }, Nanos(1_000_000));
        // All of it was spent awake, so that nothing was stalled.
        let Cost { added, .. } = slice.per_request(Some(11_000), &price).cost;
        assert_eq!(added, 5_500.0 + 11_000.0 * price.of_latency());
    }

    #[test]
    fn a_core_that_is_taken_away_makes_a_slice_of_spinning_dearer_whether_the_kernel_counts_that_as_cpu_time_or_not() {
        let price = Price::new(Nanos(1_000_000), 1);
        let cost = |length: u64, cpu| {
            let mut slice = Slice::default();
            let done = Done { requests: 2, took: Nanos::ZERO };
            slice.add_done(&Standing { in_flight: 1, done, ..Standing::default() });
            let length = Nanos(length);
            slice.add_wait(&Wait { length, spun: length, blocked: false, active: &[] }, Nanos(10_000_000));
            slice.per_request(Some(cpu), &price).cost
        };
        let usual = cost(1_000_000, 1_000_000);
        for cpu in [1_000_000, 4_000_000] {
            let stolen = cost(4_000_000, cpu);
            assert!(stolen.served > usual.served && stolen.added > usual.added, "{stolen:?}, {usual:?}");
        }
    }

    #[test]
    fn time_between_requests_pays_for_no_trial() {
        let excess = Cost { served: 6.0, added: 0.0 };
        assert!(!Cost { served: 10.0, added: 5.0 }.covers(excess));
        assert!(Cost { served: 10.0, added: 6.0 }.covers(excess));
        assert!(!Cost { served: 10.0, added: 6.0 }.covers(Cost { served: 0.0, added: 7.0 }));
    }
}
