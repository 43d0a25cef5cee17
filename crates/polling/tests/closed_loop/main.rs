//! Waits that answer to what the policy does: the client sleeps more deeply the longer it is left to, and who serves the
//! disk may want the I/O thread's core. A replay cannot show this, for its waits are given.
#![allow(missing_docs)]

mod world;

use egret_polling::{BlockCost, Nanos, Parameters, Policy, PolicyKind, Slot, Standing, Wait, build};
use world::{Outcome, Running, World};

/// What calibration finds, about, on the machine that these worlds are modelled on.
const CALIBRATED: BlockCost = BlockCost { cpu: Nanos(9_000), latency: Nanos(14_000) };

/// A disk of 10 us. While everybody blocks the client's turn takes 30 us, longer than K; while the I/O thread spins the
/// client only dozes, and it takes 12 us.
const DROWSY_CLIENT: World = World {
    disk_beside_sleeper: 10_000,
    disk_beside_spinner: 10_000,
    block: CALIBRATED,
    client_from_doze: 12_000,
    client_from_sleep: 30_000,
    client_dozes_for: 30_000,
    client_idles_for: 0,
};

/// A disk served by a thread of the kernel, which is there sooner on the core that the I/O thread has left.
const SHARED_CORE: World = World {
    disk_beside_sleeper: 8_000,
    disk_beside_spinner: 17_000,
    block: BlockCost { cpu: Nanos(9_000), latency: Nanos(4_000) },
    client_from_doze: 8_000,
    client_from_sleep: 20_000,
    client_dozes_for: 60_000,
    client_idles_for: 0,
};

/// Spins for ever for what is worth it, and else blocks at once.
struct Arms {
    for_requests: bool,
    for_completions: bool,
}

impl Policy for Arms {
    fn window(&mut self, before: &Standing) -> Nanos {
        let spins = if before.in_flight == 0 { self.for_requests } else { self.for_completions };
        if spins { Nanos(32_768) } else { Nanos::ZERO }
    }
    fn observe(&mut self, _wait: &Wait<'_>) {}
    fn forget(&mut self, _slot: Slot) {}
    fn window_now(&self) -> Nanos {
        Nanos::ZERO
    }
}

/// The least that a request can cost for somebody who knows `world` and never changes his mind.
fn best(world: World) -> u64 {
    let arms = [false, true].map(|for_requests| {
        [false, true].map(|for_completions| {
            let mut arms = Arms { for_requests, for_completions };
            let mut running = Running::new(world, &mut arms);
            running.run(1_000);
            running.run(10_000).cost()
        })
    });
    arms.into_iter().flatten().min().expect("four of them")
}

fn low_regret(calibrated: BlockCost) -> Box<dyn Policy> {
    let mut policy = build(PolicyKind::LowRegret, &Parameters::default()).unwrap();
    policy.set_block_cost(calibrated);
    policy
}

/// K as it may be mistaken for.
fn calibrations() -> [BlockCost; 4] {
    [(5_000, 6_000), (9_000, 14_000), (9_000, 40_000), (15_000, 15_000)]
        .map(|(cpu, latency)| BlockCost { cpu: Nanos(cpu), latency: Nanos(latency) })
}

/// `world` after another that teaches to block, and time to learn.
fn after_a_quiet_time(world: World, calibrated: BlockCost) -> Outcome {
    let mut policy = low_regret(calibrated);
    let quiet = World { client_idles_for: 300_000, ..world };
    let mut running = Running::new(quiet, policy.as_mut());
    running.run(3_000);
    running.change(world);
    running.run(5_000);
    running.run(20_000)
}

#[test]
fn a_client_that_sleeps_deeply_because_we_do_does_not_keep_us_asleep() {
    for calibrated in calibrations() {
        let (got, best) = (after_a_quiet_time(DROWSY_CLIENT, calibrated), best(DROWSY_CLIENT));
        assert!(got.cost() * 20 <= best * 21, "{calibrated:?}: {got:?}, {} against {best}", got.cost());
    }
}

#[test]
fn who_serves_the_disk_is_given_the_core_where_it_is_the_sooner_done() {
    for calibrated in calibrations() {
        let (got, best) = (after_a_quiet_time(SHARED_CORE, calibrated), best(SHARED_CORE));
        assert!(got.cost() * 20 <= best * 21, "{calibrated:?}: {got:?}, {} against {best}", got.cost());
    }
}

#[test]
fn a_client_that_idles_is_slept_for_and_the_disk_it_then_asks_is_not() {
    let world = World { client_idles_for: 300_000, ..DROWSY_CLIENT };
    let mut policy = low_regret(CALIBRATED);
    let mut running = Running::new(world, policy.as_mut());
    running.run(5_000);
    let got = running.run(20_000);
    assert!((19_500..=21_000).contains(&got.blocks), "{got:?}");
    assert!(got.cpu / got.requests < 22_000, "{got:?}");
}
