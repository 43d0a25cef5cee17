//! What some requests in a row came to.

use super::buckets::LONGEST;
use super::price::Price;
use crate::{Standing, Wait};

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
    /// Between waits.
    busy: u64,
}

impl Slice {
    pub(super) fn add_done(&mut self, before: &Standing) {
        let Standing { in_flight, done, .. } = *before;
        self.requests = self.requests.saturating_add(done.requests);
        self.busy += done.took.0.min(LONGEST);
        self.most = self.most.max(in_flight).max(done.requests);
    }

    pub(super) fn add_wait(&mut self, wait: &Wait<'_>) {
        self.waits += 1;
        self.blocks += u32::from(wait.blocked);
        self.waited += wait.length.0.min(LONGEST);
        self.spun += wait.spun.0.min(LONGEST);
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
        let (requests, time) = (f64::from(self.requests), each(self.elapsed()));
        // A block makes the request late that ends it, and by half as much, on average, each that comes meanwhile.
        let most = f64::from(self.most);
        let wakeup = price.latency().max(0) as f64;
        let blocks = f64::from(self.blocks) * wakeup * (1.0 + (wakeup / time / 2.0).min(most));
        // Awake and not on a core: somebody else had it, probably in one piece.
        let stalled = awake.saturating_sub(cpu) as f64;
        let stalls = stalled * (stalled / time / 2.0).min(most);
        let (cpu, late) = (each(cpu), (blocks + stalls) / requests);
        Sample { requests, time, served: cpu + time * price.of_latency(), added: cpu + late * price.of_latency() }
    }
}

/// What a request came to, on average: nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    pub(super) requests: f64,
    /// From one request to the next.
    pub(super) time: f64,
    /// CPU, and the price of that time: what counts where the next request waits for this one.
    pub(super) served: f64,
    /// CPU, and the price of the time by which blocks made it later: what counts where requests come when they come.
    pub(super) added: f64,
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
        self.served.add(sample.served, sample.requests);
        self.added.add(sample.added, sample.requests);
    }

    /// How many slices went into it.
    pub(super) fn slices(&self) -> f64 {
        self.slices
    }

    /// What a request costs, the time until the next included.
    pub(super) fn served(&self) -> f64 {
        self.served.mean(self.requests)
    }

    /// Whether `sample` is none of these: a third more, or a quarter less, and further off than most.
    pub(super) fn is_strange(&self, sample: Sample) -> bool {
        let is_strange = |spread: &Spread, value: f64| {
            let (mean, deviation) = (spread.mean(self.requests), spread.variance(self.requests).sqrt());
            (value * 3.0 > mean * 4.0 || value * 4.0 < mean * 3.0) && (value - mean).abs() > STRANGE * deviation
        };
        is_strange(&self.time, sample.time) || is_strange(&self.added, sample.added)
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
        self.saved > (LIKELY * self.error).max(self.cost / 32.0)
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
