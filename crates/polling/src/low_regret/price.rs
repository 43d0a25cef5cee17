//! What spinning and blocking cost now.

use super::buckets::LONGEST;
use crate::{BlockCost, Contention, Nanos, Wait};

/// Prices of spinning are in 256ths.
const UNIT: u64 = 256;
/// What a spun nanosecond costs at most.
const DEAREST: u64 = 16 * UNIT;
/// How many times over the delay that contention shows is counted: whoever is kept off our core may be who serves our
/// wait. Of 1, 2 and 4 tried with a loop device on two cores, 1 spun where its kernel thread needed the core, and 4
/// slept where a spin would have paid.
const HARM: u64 = 2;

/// How long a wait is at most that has an end in sight: a millisecond, or so many blocks where those are dearer.
const ENDLESS: u64 = 1_000_000;
const ENDLESS_BLOCKS: u64 = 16;

/// The terms on which spinning and blocking compete.
#[derive(Clone, Debug)]
pub(super) struct Price {
    /// `poll-price`.
    latency_price: u32,
    /// What a block costs as far as it is known without looking at the waits.
    cost: BlockCost,
    /// K, in nanoseconds.
    block: u64,
    /// The longest window allowed, in nanoseconds.
    longest: u64,
    /// What a blocked wait is seen too long by, in nanoseconds.
    wakeup: u64,
    /// What a spun nanosecond costs, in 256ths of one.
    spin: u64,
    /// What `spin` tends to as contention goes on.
    smoothed: u64,
}

impl Price {
    /// A block costs what it does by default until [`set_block`](Self::set_block) says otherwise.
    pub(super) fn new(max: Nanos, latency_price: u32) -> Self {
        // Histograms end here: beyond, they cannot tell what a longer window would find.
        let longest = max.0.min(LONGEST / 2);
        let cost = BlockCost::default();
        let mut new = Self { latency_price, cost, block: 0, longest, wakeup: 0, spin: UNIT, smoothed: UNIT };
        new.set_block(cost);
        new
    }

    pub(super) fn block(&self) -> u64 {
        self.block
    }

    pub(super) fn longest(&self) -> u64 {
        self.longest
    }

    /// What spinning for `length` nanoseconds costs.
    pub(super) fn spinning(&self, length: u64) -> u64 {
        length * self.spin / UNIT
    }

    /// What a wait of `length` costs under `window`.
    pub(super) fn cost(&self, length: u64, window: u64) -> u64 {
        if length <= window { self.spinning(length) } else { self.spinning(window) + self.block }
    }

    /// The window after which spinning has cost as much as a block: at worst twice what the offline optimum pays.
    pub(super) fn break_even(&self) -> u64 {
        (self.block * UNIT / self.spin).min(self.longest)
    }

    /// How long `wait` would have been to a loop that spun on; no longer than [`LONGEST`].
    pub(super) fn true_length(&self, wait: &Wait<'_>) -> u64 {
        let length = wait.length.0;
        // One that blocked lasted longer than it was spun for, whatever its wake-up took.
        let length = if wait.blocked { length.saturating_sub(self.wakeup).max(wait.spun.0 + 1) } else { length };
        length.min(LONGEST)
    }

    /// What a block takes of the CPU.
    pub(super) fn block_cpu(&self) -> u64 {
        self.cost.cpu.0.min(LONGEST)
    }

    /// What a nanosecond of latency is worth.
    pub(super) fn of_latency(&self) -> f64 {
        f64::from(self.latency_price)
    }

    /// How long a wait is at most that has an end in sight, whatever window is allowed: one that is longer is a pause, of which
    /// nothing can be told.
    pub(super) fn in_sight(&self) -> u64 {
        (ENDLESS_BLOCKS * self.block).max(ENDLESS)
    }

    /// A window for who means to spin to the end.
    pub(super) fn endless(&self) -> u64 {
        self.in_sight().min(self.longest)
    }

    /// Learns what a block costs, and takes its latency for what it adds to a wait.
    pub(super) fn set_block(&mut self, cost: BlockCost) {
        self.cost = cost;
        self.set_added(cost.latency.0.min(LONGEST).cast_signed());
    }

    /// Learns by how many nanoseconds a block makes a wait longer, which may be fewer than none.
    pub(super) fn set_added(&mut self, added: i64) {
        self.block = self.total(added);
        self.wakeup = added.max(0).cast_unsigned();
    }

    /// What a block costs that makes a wait longer by `added`.
    fn total(&self, added: i64) -> u64 {
        let latency = added.saturating_mul(self.latency_price.into());
        let cpu = self.cost.cpu.0.min(LONGEST).cast_signed();
        // Dearer than the longest wait is dear enough, and keeps the sums small.
        cpu.saturating_add(latency).clamp(0, LONGEST.cast_signed()).cast_unsigned()
    }

    /// A window that finds all that could be worth spinning for, even if a block costs twice what it is known to.
    pub(super) fn reach(&self) -> u64 {
        (2 * self.block.max(self.total(self.latency()))).min(self.longest)
    }

    /// Whether blocking could be cheaper than spinning for waits of `length`: if at all, where a block takes nothing
    /// away but the wait.
    pub(super) fn may_pay_to_block(&self, length: u64) -> bool {
        self.total(-length.min(LONGEST).cast_signed()) < self.spinning(length.min(LONGEST))
    }

    /// How late a thread that blocked is known to wake up.
    pub(super) fn latency(&self) -> i64 {
        self.cost.latency.0.min(LONGEST).cast_signed()
    }

    /// Learns of contention; returns whether the price of spinning moved.
    pub(super) fn contend(&mut self, evidence: Contention) -> bool {
        let seen = UNIT + evidence.delay_per(UNIT).min(DEAREST) * HARM;
        self.smoothed = (self.smoothed * 3 + seen.min(DEAREST)) / 4;
        // Small movements are noise, and every window would have to be reconsidered.
        let moved = self.smoothed.abs_diff(self.spin) * 8 > self.spin;
        if moved {
            self.spin = self.smoothed;
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn price() -> Price {
        let mut price = Price::new(Nanos(1_000_000), 1);
        price.set_block(BlockCost { cpu: Nanos(10_000), latency: Nanos(20_000) });
        price
    }

    #[test]
    fn a_spin_that_misses_costs_the_block_on_top() {
        assert_eq!(price().cost(4_000, 5_000), 4_000);
        assert_eq!(price().cost(5_001, 5_000), 35_000);
        assert_eq!(price().break_even(), 30_000);
    }

    #[test]
    fn the_wakeup_comes_off_a_blocked_wait_down_to_what_was_spun() {
        let wait = |length, spun, blocked| Wait { length: Nanos(length), spun: Nanos(spun), blocked, active: &[] };
        assert_eq!(price().true_length(&wait(25_000, 25_000, false)), 25_000);
        assert_eq!(price().true_length(&wait(25_000, 1_000, true)), 5_000);
        assert_eq!(price().true_length(&wait(25_000, 9_000, true)), 9_001);
        assert_eq!(price().true_length(&wait(u64::MAX, 0, true)), LONGEST);
    }

    #[test]
    fn what_a_block_adds_counts_in_its_cost_and_comes_off_the_wait() {
        let mut price = price();
        let wait = Wait { length: Nanos(25_000), spun: Nanos(0), blocked: true, active: &[] };
        price.set_added(12_000);
        assert_eq!((price.block(), price.true_length(&wait)), (22_000, 13_000));
        price.set_added(-4_000);
        assert_eq!((price.block(), price.true_length(&wait)), (6_000, 25_000));
        price.set_added(i64::MIN);
        assert_eq!(price.block(), 0);
    }

    #[test]
    fn contention_raises_the_price_of_spinning_and_its_end_brings_it_back() {
        let mut price = price();
        let shared = Contention { ran: Nanos(40_000_000), delayed: Nanos(40_000_000), preempted: 10 };
        (0..20).for_each(|_| _ = price.contend(shared));
        assert!((5 * UNIT / 2..=3 * UNIT).contains(&price.spin), "{}", price.spin);
        assert!((10_000..12_000).contains(&price.break_even()));
        (0..20).for_each(|_| _ = price.contend(Contention::default()));
        assert!(price.spin < UNIT + UNIT / 8, "{}", price.spin);
    }

    #[test]
    fn no_evidence_however_wild_overflows() {
        let mut price = Price::new(Nanos::MAX, u32::MAX);
        price.set_block(BlockCost { cpu: Nanos::MAX, latency: Nanos::MAX });
        (0..99).for_each(|_| _ = price.contend(Contention { ran: Nanos(0), delayed: Nanos::MAX, preempted: u64::MAX }));
        assert!(price.spin > DEAREST / 10 * 9);
        assert!(price.cost(LONGEST, price.longest()) > LONGEST);
    }

    #[test]
    fn contention_moves_the_price_a_quarter_of_the_way_at_a_time_and_not_by_an_eighth() {
        let contend = |price: &mut Price, delayed: u64| {
            let evidence = Contention { ran: Nanos(40_000_000), delayed: Nanos(delayed), preempted: u64::MAX };
            (price.contend(evidence), price.spin)
        };
        let mut price = price();
        assert_eq!(contend(&mut price, 10_000_000), (false, 256));
        assert_eq!(contend(&mut price, 10_000_000), (true, 312));
        let mut price = self::price();
        assert_eq!(contend(&mut price, 40_000_000), (true, 384));
        assert_eq!((price.spinning(1_000), price.break_even()), (1_500, 20_000));
        assert_eq!((price.cost(1_000, 1_000), price.cost(1_001, 1_000)), (1_500, 31_500));
        let mut price = self::price();
        assert_eq!(contend(&mut price, u64::MAX), (true, (3 * UNIT + DEAREST) / 4));
    }

    #[test]
    fn how_long_it_is_worth_to_look_follows_from_what_a_block_costs() {
        let mut price = price();
        assert_eq!((price.block_cpu(), price.latency(), price.of_latency()), (10_000, 20_000, 1.0));
        assert_eq!((price.reach(), price.endless()), (60_000, 1_000_000));
        // What trials have found makes it longer, and never shorter.
        price.set_added(-4_000);
        assert_eq!(price.reach(), 60_000);
        price.set_added(40_000);
        assert_eq!(price.reach(), 100_000);
        for (max, reach, endless) in [(u64::MAX, 220_000, 1_760_000), (150_000, 150_000, 150_000)] {
            let mut price = Price::new(Nanos(max), 1);
            price.set_block(BlockCost { cpu: Nanos(10_000), latency: Nanos(100_000) });
            assert_eq!((price.reach(), price.endless()), (reach, endless));
        }
        assert_eq!(Price::new(Nanos::MAX, 1).longest(), LONGEST / 2);
        let pays = [5_000, 5_001, u64::MAX].map(|length| self::price().may_pay_to_block(length));
        assert_eq!(pays, [false, true, true]);
    }
}
