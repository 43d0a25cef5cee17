//! A disk, a client with one request in flight, and an I/O thread between them: waits that answer to the policy.

use egret_polling::{Active, BlockCost, EventKind, LastWait, Nanos, Policy, Slot, Standing, Wait};

/// The client's queue and the engine, neither ready.
const IDLE: [Active; 2] = [
    Active { slot: Slot(1), kind: EventKind::Queue, ready: false },
    Active { slot: Slot(0), kind: EventKind::Completion, ready: false },
];
/// What the I/O thread takes to hand a request on, or an answer.
const HANDLING: u64 = 1_000;

/// What a world is made of; times in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct World {
    /// From submission to completion while the I/O thread sleeps.
    pub disk_beside_sleeper: u64,
    /// The same while it spins: more, where who serves the disk would rather have its core.
    pub disk_beside_spinner: u64,
    /// What a block costs the I/O thread in truth.
    pub block: BlockCost,
    /// How late the client wakes up if it slept for less than `client_dozes_for`, its own work included.
    pub client_from_doze: u64,
    /// The same if it slept longer, and its processor with it.
    pub client_from_sleep: u64,
    /// When its doze becomes a sleep.
    pub client_dozes_for: u64,
    /// Before its next request: 0 in a closed loop.
    pub client_idles_for: u64,
}

/// What came of it, over some requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    pub requests: u64,
    /// Of the I/O thread, waiting.
    pub cpu: u64,
    pub elapsed: u64,
    pub blocks: u64,
}

impl Outcome {
    /// Nanoseconds a request: CPU, and time at a price of one.
    pub fn cost(&self) -> u64 {
        (self.cpu + self.elapsed) / self.requests
    }
}

/// A world as it goes on.
pub struct Running<'a> {
    world: World,
    policy: &'a mut dyn Policy,
    random: u64,
    now: u64,
    /// When the client went to sleep, and when its next request will be there.
    asleep_since: u64,
    next_request: u64,
    last: LastWait,
    outcome: Outcome,
}

impl<'a> Running<'a> {
    pub fn new(world: World, policy: &'a mut dyn Policy) -> Self {
        let last = LastWait::default();
        let outcome = Outcome::default();
        Self { world, policy, random: 1, now: 0, asleep_since: 0, next_request: 0, last, outcome }
    }

    /// Goes on under other circumstances, with all that was learned.
    pub fn change(&mut self, world: World) {
        self.world = world;
    }

    /// Has the client ask `requests` times.
    pub fn run(&mut self, requests: u64) -> Outcome {
        self.outcome = Outcome::default();
        let begin = self.now;
        for _ in 0..requests {
            let request = self.next_request.saturating_sub(self.now);
            self.wait(0, EventKind::Queue, [request; 2]);
            self.now += HANDLING;
            let World { disk_beside_sleeper, disk_beside_spinner, .. } = self.world;
            let disk = [disk_beside_sleeper, disk_beside_spinner].map(|length| self.jitter(length));
            self.wait(1, EventKind::Completion, disk);
            self.now += HANDLING;
            self.answer();
        }
        Outcome { requests, elapsed: self.now - begin, ..self.outcome }
    }

    /// Waits as the policy says; the length is that for who blocks at once and that for who spins.
    fn wait(&mut self, in_flight: u32, kind: EventKind, [sleeping, spinning]: [u64; 2]) {
        let window = self.policy.window(&Standing { in_flight, last: self.last, ..Standing::default() });
        let start = self.now;
        let length = if window == Nanos::ZERO { sleeping } else { spinning };
        let blocked = length > window.0;
        let spun = length.min(window.0);
        self.outcome.cpu += spun;
        self.now += length;
        if blocked {
            self.outcome.blocks += 1;
            self.outcome.cpu += self.world.block.cpu.0;
            self.now += self.jitter(self.world.block.latency.0);
        }
        let length = Nanos(self.now - start);
        let mut active = IDLE;
        active.iter_mut().for_each(|source| source.ready = source.kind == kind);
        self.policy.observe(&Wait { length, spun: Nanos(spun), blocked, active: &active });
        self.last = LastWait { kind, length };
    }

    /// The client is woken, and asks again.
    fn answer(&mut self) {
        let World { client_from_doze, client_from_sleep, client_dozes_for, client_idles_for, .. } = self.world;
        let slept = self.now - self.asleep_since;
        let awake = if slept < client_dozes_for { client_from_doze } else { client_from_sleep };
        self.asleep_since = self.now + self.jitter(awake) + self.jitter(client_idles_for);
        self.next_request = self.asleep_since;
    }

    /// `length`, give or take an eighth; the same on every run.
    fn jitter(&mut self, length: u64) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        length * (896 + (self.random >> 33) % 257) / 1_024
    }
}
