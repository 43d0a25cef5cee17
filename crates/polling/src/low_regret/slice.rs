//! What some requests in a row came to.

use std::ops::{AddAssign, Mul, Sub};

use super::buckets::LONGEST;
use super::price::Price;
use crate::{Active, EventKind, Nanos, Standing, Wait};

/// What a thread does for a request takes no longer than so many nanoseconds, on average.
const SLOWEST: u64 = 1 << 16;

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
        // A thread that always finds work has no wait for long. One that had its requests done sooner was stopped.
        let took = done.took.0.min(LONGEST.max(u64::from(done.requests) * SLOWEST));
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

    /// The same, as far as it may be a habit's doing: that there was nothing to wait for is none's.
    pub(super) fn lasted(&self) -> u64 {
        self.busy.min(LONGEST) + self.waited
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
    use crate::{BlockCost, Done};

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
    fn a_stretch_without_a_wait_is_as_long_as_its_requests_may_have_taken_and_the_rest_of_it_is_nobodys() {
        let ms = |milliseconds: u64| milliseconds * 1_000_000;
        for (requests, took, expected) in [
            (400_000, ms(100), ms(100)),
            (1_000, ms(100), 1_000 * SLOWEST),
            (1_000, ms(10), ms(10)),
            (8, ms(100), LONGEST),
        ] {
            let mut slice = Slice::default();
            slice.add_done(&Standing { done: Done { requests, took: Nanos(took) }, ..Standing::default() });
            assert_eq!((slice.elapsed(), slice.lasted()), (expected, expected.min(LONGEST)), "{requests} in {took}");
        }
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

    /// Four requests, of which engines had two at a time, with a wait that a guest ended while the thread slept, one that it ended
    /// while the thread spun, and one that an engine ended.
    fn four_requests() -> Slice {
        let mut slice = Slice::default();
        let done = Done { requests: 4, took: Nanos(1_000) };
        slice.add_done(&Standing { in_flight: 2, done, ..Standing::default() });
        for (length, spun, kind) in
            [(30_000, 5_000, EventKind::Queue), (9_000, 9_000, EventKind::Queue), (20_000, 0, EventKind::Completion)]
        {
            let active = [
                Active { slot: crate::Slot(0), kind, ready: true },
                Active { slot: crate::Slot(1), kind: EventKind::Queue, ready: false },
            ];
            let wait = Wait { length: Nanos(length), spun: Nanos(spun), blocked: spun < length, active: &active };
            slice.add_wait(&wait, Nanos(30_000));
        }
        slice
    }

    #[test]
    fn a_request_costs_its_cpu_and_its_lateness_at_the_price_of_latency() {
        let cost = |slice: &Slice, latency, cpu| {
            let mut price = Price::new(Nanos(1_000_000), 2);
            price.set_block(BlockCost { cpu: Nanos(10_000), latency: Nanos(latency) });
            let Sample { requests, time, cost } = slice.per_request(cpu, &price);
            [requests, time, cost.served, cost.added]
        };
        let slice = four_requests();
        assert_eq!((slice.requests, slice.waits, slice.blocks, slice.kicks, slice.elapsed()), (4, 3, 2, 1, 60_000));
        // Busy for 15 us, and two blocks; engines had requests for 30 us each. What the kick woke up too late for is late by 24 us, and
        // by half of it what came meanwhile: 1.6 requests.
        assert_eq!(cost(&slice, 24_000, None), [4.0, 15_000.0, 8_750.0 + 30_000.0, 8_750.0 + 2.0 * 40_800.0]);
        // Awake for 15 us, and on a core for 3.
        assert_eq!(cost(&slice, 24_000, Some(3_000)), [4.0, 15_000.0, 750.0 + 30_000.0, 750.0 + 2.0 * 42_000.0]);
        // No more come meanwhile than were ever seen at a time.
        assert_eq!(cost(&slice, 2_400_000, None)[3], 8_750.0 + 2.0 * 3_030_000.0);

        let mut one_by_one = Slice::default();
        let done = Done { requests: 1, took: Nanos(16_000) };
        (0..8).for_each(|_| one_by_one.add_done(&Standing { done, ..Standing::default() }));
        assert_eq!(cost(&one_by_one, 24_000, Some(0)), [8.0, 16_000.0, 32_000.0, 32_000.0]);
    }

    #[test]
    fn what_is_in_flight_at_the_end_of_a_slice_is_held_in_the_next() {
        let mut next = four_requests().next();
        assert_eq!((next.requests, next.waits, next.elapsed()), (0, 0, 0));
        next.add_wait(&Wait { length: Nanos(7), spun: Nanos(7), blocked: false, active: &[] }, Nanos(30_000));
        assert_eq!((next.held, next.waits, next.elapsed()), (14, 1, 7));
        // What an engine ended is no kick.
        let active = [Active { slot: crate::Slot(0), kind: EventKind::Completion, ready: true }];
        next.add_wait(&Wait { length: Nanos(7), spun: Nanos(0), blocked: true, active: &active }, Nanos(30_000));
        assert_eq!((next.blocks, next.kicks), (1, 0));
    }

    fn sample(requests: f64, time: f64, served: f64, added: f64) -> Sample {
        Sample { requests, time, cost: Cost { served, added } }
    }

    /// Slices of a request each.
    fn tally(slices: &[(f64, f64, f64)]) -> Tally {
        let mut tally = Tally::default();
        slices.iter().for_each(|&(time, served, added)| tally.add(sample(1.0, time, served, added)));
        tally
    }

    #[test]
    fn a_tally_is_of_all_its_requests_and_of_late_ones_above_all() {
        let mut all = Tally::default();
        all.add(sample(1.0, 1.0, 10.0, 100.0));
        all.add(sample(3.0, 1.0, 20.0, 300.0));
        assert_eq!((all.cost(), all.slices()), (Cost { served: 17.5, added: 250.0 }, 2.0));
        let mut long = tally(&[(1.0, 8.0, 80.0); 256]);
        assert_eq!(long.slices(), 256.0);
        long.add(sample(1.0, 1.0, 137.0, 209.0));
        assert_eq!((long.slices(), long.cost()), (129.0, Cost { served: 9.0, added: 81.0 }));
        // Their spread, too.
        let mut uneven = Tally::default();
        (0..256).for_each(|slice| uneven.add(sample(1.0, if slice % 2 == 0 { 200.0 } else { 400.0 }, 0.0, 0.0)));
        uneven.add(sample(1.0, 300.0, 0.0, 0.0));
        assert!((uneven.time.variance(uneven.requests) - 10_000.0 * 128.0 / 129.0).abs() < 1e-6);
    }

    #[test]
    fn strange_is_a_third_more_or_a_quarter_less_and_further_off_than_most() {
        let steady = tally(&[(300.0, 1.0, 3_000.0); 4]);
        let restless = tally(&[(200.0, 1.0, 3_000.0), (400.0, 1.0, 3_000.0)]);
        for (tally, time, added, is_strange) in [
            (&steady, 400.0, 3_000.0, false),
            (&steady, 401.0, 3_000.0, true),
            (&steady, 225.0, 3_000.0, false),
            (&steady, 224.0, 3_000.0, true),
            (&steady, 300.0, 4_000.0, false),
            (&steady, 300.0, 4_001.0, true),
            (&steady, 300.0, 2_249.0, true),
            (&restless, 500.0, 3_000.0, false),
            (&restless, 501.0, 3_000.0, true),
            (&restless, 100.0, 3_000.0, false),
            (&restless, 99.0, 3_000.0, true),
        ] {
            // What is served counts for nothing here.
            assert_eq!(tally.is_strange(sample(1.0, time, 50.0, added)), is_strange, "{time} {added}");
        }
    }

    #[test]
    fn habits_are_compared_by_the_rate_where_it_answers_and_else_by_how_late_requests_were() {
        let against = |one: &[_], two: &[_]| {
            let Difference { cost, saved, error } = tally(one).against(&tally(two));
            (cost, saved, error)
        };
        let usual = [(1_000.0, 50.0, 70.0); 2];
        assert_eq!(against(&usual, &[(980.0, 20.0, 30.0); 2]), (70.0, 40.0, 0.0));
        assert_eq!(against(&usual, &[(979.0, 20.0, 30.0); 2]), (50.0, 30.0, 0.0));
        assert_eq!(against(&usual, &[(1_021.0, 20.0, 30.0); 2]), (50.0, 30.0, 0.0));

        // The standard error of what is saved, and more where slices are few.
        let near = |(cost, saved, error): (f64, f64, f64), expected: (f64, f64, f64)| {
            assert_eq!((cost, saved), (expected.0, expected.1));
            assert!((error - expected.2).abs() < 1e-6, "{error} {expected:?}");
        };
        let uneven = [(1_000.0, 40.0, 90.0), (1_000.0, 60.0, 110.0)];
        near(against(&uneven, &[(1_000.0, 1.0, 30.0); 3]), (100.0, 70.0, 250_f64.sqrt()));
        let uneven = [(1_000.0, 40.0, 90.0), (1_000.0, 50.0, 100.0), (1_000.0, 60.0, 110.0)];
        near(against(&uneven, &[(1_000.0, 1.0, 30.0); 3]), (100.0, 70.0, (200.0 / 3.0_f64).sqrt()));
        near(against(&[(1_000.0, 1.0, 30.0); 3], &uneven), (30.0, -70.0, (200.0 / 3.0_f64).sqrt()));
        // A rate that differs by no more than chance is the same: three times the root of 6666.
        let restless = [(900.0, 40.0, 70.0), (1_000.0, 40.0, 70.0), (1_100.0, 40.0, 70.0)];
        assert_eq!(against(&restless, &[(756.0, 30.0, 50.0); 3]).0, 70.0);
        assert_eq!(against(&restless, &[(754.0, 30.0, 50.0); 3]).0, 40.0);
    }

    #[test]
    fn verdicts_allow_for_chance() {
        for (saved, error, [saves, gain, loss, clear, hopeless]) in [
            (1.0, 0.0, [false, false, false, false, false]),
            (1.5, 0.0, [true, true, false, false, false]),
            (2.0, 1.0, [true, false, false, false, false]),
            (2.5, 1.0, [true, true, false, false, false]),
            (-1.0, 1.0, [false, false, false, false, false]),
            (-1.5, 1.0, [false, false, false, true, false]),
            (-3.0, 1.0, [false, false, false, true, false]),
            (-3.5, 1.0, [false, false, true, true, false]),
            (-19.0, 1.0, [false, false, true, true, false]),
            (-19.5, 1.0, [false, false, true, true, true]),
        ] {
            let of = Difference { cost: 32.0, saved, error };
            let verdicts = [of.saves(), of.is_gain(), of.is_loss(), of.is_clear(), of.is_hopeless()];
            assert_eq!(verdicts, [saves, gain, loss, clear, hopeless], "{saved} {error}");
        }
    }

    #[test]
    fn costs_add_up_for_each_of_the_two_that_may_be_compared() {
        let mut cost = Cost { served: 5.0, added: 7.0 } - Cost { served: 2.0, added: 8.0 };
        assert_eq!(cost, Cost { served: 3.0, added: -1.0 });
        assert_eq!(cost * 2.0, Cost { served: 6.0, added: -2.0 });
        assert_eq!(cost.at_least_none(), Cost { served: 3.0, added: 0.0 });
        cost += Cost { served: 1.0, added: 2.0 };
        assert_eq!(cost, Cost { served: 4.0, added: 1.0 });
    }
}
