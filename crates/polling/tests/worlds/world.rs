//! A client, an I/O thread, who serves the disk, and two cores for the three of them: everything that a habit of waiting
//! does to those who are waited for.
//!
//! The I/O thread has a core of its own, and so has the client, unless a neighbour wants it, too. A disk that is hardware needs neither; one that is a
//! thread of the kernel runs on whichever core is free, and has part of the I/O thread's where none is.

use std::collections::VecDeque;

use egret_polling::{Active, Contention, Done, EventKind, LastWait, Nanos, Policy, Slot, Standing, Wait};

/// How late somebody who sleeps is up again.
#[derive(Clone, Copy, Debug)]
pub struct Wakeup {
    /// After a short sleep.
    pub doze: u64,
    /// After a long one, out of which the processor has to be woken, too.
    pub deep: u64,
    /// When a short sleep becomes a long one.
    pub dozes_for: u64,
}

/// Who asks.
#[derive(Clone, Copy, Debug)]
pub enum Load {
    /// So many requests in flight, always: the next is there when one has been answered, and thought about.
    Closed { depth: u32, think: u64, client: Client },
    /// A request every so often, whatever becomes of those before; at random (Poisson) or on the beat.
    Open { every: u64, at_random: bool },
}

/// What the client does until it is answered.
#[derive(Clone, Copy, Debug)]
pub enum Client {
    Polls,
    Sleeps(Wakeup),
}

/// Who answers.
#[derive(Clone, Copy, Debug)]
pub enum Disk {
    /// So many requests at a time, each for so long; `spread` in 256ths is how much longer or shorter.
    Hardware { lanes: usize, takes: u64, spread: u64 },
    /// One at a time, on a core; and so long until it is awake, where no core is.
    Kernel { takes: u64, awake_in: u64 },
}

/// Somebody else who wants a core; times in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// When it begins.
    pub from: u64,
    /// How long it works at a time, whether it has the core meanwhile or not, and sleeps then.
    pub works: u64,
    pub sleeps: u64,
    /// Whoever wakes up has the core at once. Otherwise the neighbour has had it for a time slice before, or stopped.
    pub makes_room: bool,
}

impl Neighbour {
    pub const NOBODY: Self = Self { from: FOREVER, works: 0, sleeps: 0, makes_room: true };
    /// It never stops.
    pub const ALWAYS: Self = Self { from: 0, works: FOREVER, sleeps: 0, makes_room: true };

    /// When the turn began in which it wants the core at `now`, if it does.
    fn turn(&self, now: u64) -> Option<u64> {
        let since = now.checked_sub(self.from)?;
        let into = since % self.works.saturating_add(self.sleeps);
        (into < self.works).then(|| now - into)
    }

    /// When it wants the core, from `now` on.
    fn next(&self, now: u64) -> u64 {
        if self.turn(now).is_some() || now <= self.from {
            return now.max(self.from);
        }
        let period = self.works + self.sleeps;
        now + period - (now - self.from) % period
    }

    /// Until when it has the core at most, if its turn began at `began`.
    fn end(&self, began: u64) -> u64 {
        began.saturating_add(self.works)
    }

    /// When it takes the core, from `now` on, from somebody who has had it since `since`.
    fn takes(&self, since: u64, now: u64) -> u64 {
        self.next(now.max(since + TIMESLICE))
    }

    /// When it gives the core back that it takes at `now`.
    fn returns(&self, now: u64) -> u64 {
        self.turn(now).map_or(now, |began| self.end(began).min(now + TIMESLICE))
    }

    /// When somebody who has slept since `since` and wakes up at `now` has the core.
    fn lets(&self, since: u64, now: u64) -> u64 {
        let Some(began) = self.turn(now).filter(|_| !self.makes_room) else { return now };
        let had = began.max(since.min(now));
        let slices = (now - had).div_ceil(TIMESLICE).max(1);
        self.end(began).min(had + slices * TIMESLICE).max(now)
    }
}

/// Times in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct World {
    pub load: Load,
    pub disk: Disk,
    /// CPU of a block, and how late the I/O thread is up after it.
    pub block_cpu: u64,
    pub wakeup: Wakeup,
    /// What a turn takes: by itself, for each request or answer in it, for submitting, and for telling a client who
    /// sleeps.
    pub turn: u64,
    pub each: u64,
    pub submit: u64,
    pub notify: u64,
    /// On the I/O thread's core, and on the client's.
    pub neighbour: Neighbour,
    pub beside_client: Neighbour,
    /// Where the sequence of chances begins.
    pub chances: u64,
}

/// How long a thread runs before somebody else has its core for as long.
const TIMESLICE: u64 = 3_000_000;
/// Of a core that two want, what who serves the disk gets, in eighths.
const SHARE: u64 = 3;
const FOREVER: u64 = u64::MAX;

/// What came of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    pub requests: u64,
    pub cpu: u64,
    pub elapsed: u64,
    /// From asking to being answered, all requests together.
    pub latency: u64,
    pub spun: u64,
}

impl Outcome {
    /// What is to be as small as it can be: CPU and time, at a price of one. In an open loop that is the time that a request
    /// takes, in a closed one the time until the next.
    pub fn cost(&self, load: &Load) -> u64 {
        let time = match load {
            Load::Closed { .. } => self.elapsed,
            Load::Open { .. } => self.latency,
        };
        (self.cpu + time) / self.requests.max(1)
    }
}

/// A world as it goes on.
pub struct Running<'a> {
    world: World,
    policy: &'a mut dyn Policy,
    random: u64,
    now: u64,
    /// Requests that the I/O thread has not seen yet, and answers that it has not.
    asked: u32,
    done: u32,
    /// Hardware: when its requests end. Kernel: what they take, the first one's rest first.
    serving: VecDeque<u64>,
    lanes: Vec<u64>,
    /// When the client's next requests will be there, and when those were that are not answered.
    coming: VecDeque<u64>,
    waiting: VecDeque<u64>,
    /// When the client has done what it has to do, and goes to sleep; since when one that polls has its core.
    client_free: u64,
    client_since: u64,
    /// The I/O thread has its core.
    running: bool,
    ran_since: u64,
    in_flight: u32,
    ended: u64,
    completed: u32,
    last: LastWait,
    preempted: u64,
    delayed: u64,
    looked: u64,
    /// CPU time before this outcome's.
    cpu: u64,
    outcome: Outcome,
}

impl<'a> Running<'a> {
    pub fn new(world: World, policy: &'a mut dyn Policy) -> Self {
        let mut new = Self {
            world,
            policy,
            random: world.chances,
            now: 0,
            asked: 0,
            done: 0,
            serving: VecDeque::new(),
            lanes: Vec::new(),
            coming: VecDeque::new(),
            waiting: VecDeque::new(),
            client_free: 0,
            client_since: 0,
            running: true,
            ran_since: 0,
            in_flight: 0,
            ended: 0,
            completed: 0,
            last: LastWait::default(),
            preempted: 0,
            delayed: 0,
            looked: 0,
            cpu: 0,
            outcome: Outcome::default(),
        };
        new.change(world);
        new
    }

    /// Goes on under other circumstances, with all that was learned; what was asked is gone.
    pub fn change(&mut self, world: World) {
        self.world = world;
        (self.asked, self.done, self.in_flight) = (0, 0, 0);
        self.serving.clear();
        self.coming.clear();
        self.waiting.clear();
        self.lanes = match world.disk {
            Disk::Hardware { lanes, .. } => vec![0; lanes],
            Disk::Kernel { .. } => Vec::new(),
        };
        match world.load {
            Load::Closed { depth, .. } => self.coming.extend((0..depth).map(|_| self.now)),
            Load::Open { .. } => self.coming.push_back(self.now),
        }
    }

    /// Goes on for so long.
    pub fn run(&mut self, length: u64) -> Outcome {
        self.cpu += std::mem::take(&mut self.outcome).cpu;
        let begin = self.now;
        while self.now < begin + length {
            self.turn();
        }
        self.outcome.elapsed = self.now - begin;
        self.outcome
    }

    fn turn(&mut self) {
        if self.asked + self.done == 0 {
            self.wait();
        }
        let (asked, done) = (std::mem::take(&mut self.asked), std::mem::take(&mut self.done));
        let World { turn, each, submit, notify, .. } = self.world;
        let tells = done > 0 && self.client_sleeps();
        let work = turn + each * u64::from(asked + done) + submit * u64::from(asked > 0) + notify * u64::from(tells);
        self.work(work);
        for _ in 0..asked {
            self.serve();
        }
        self.in_flight = (self.in_flight + asked).saturating_sub(done);
        self.completed += done;
        self.outcome.requests += u64::from(done);
        for _ in 0..done {
            let since = self.waiting.pop_front().expect("nothing is answered that nobody asked");
            self.outcome.latency += self.now - since;
        }
        if done > 0 {
            self.answer(done);
        }
    }

    /// Handles what there is.
    fn work(&mut self, length: u64) {
        self.outcome.cpu += length;
        self.advance(self.now + length, false);
        if self.now == self.world.neighbour.takes(self.ran_since, self.now) {
            self.give_way();
        }
    }

    /// Somebody else has the core for a time slice.
    fn give_way(&mut self) {
        let until = self.world.neighbour.returns(self.now);
        self.preempted += 1;
        self.be_off_core(until);
    }

    /// Wants its core and has it from `until` on.
    fn be_off_core(&mut self, until: u64) {
        self.running = false;
        self.delayed += until - self.now;
        self.advance(until, false);
        self.running = true;
        self.ran_since = self.now;
    }

    fn wait(&mut self) {
        let done = Done { requests: std::mem::take(&mut self.completed), took: Nanos(self.now - self.ended) };
        let cpu = self.policy.wants_cpu_time().then_some(Nanos(self.cpu_time()));
        let before = Standing { in_flight: self.in_flight, done, cpu, last: self.last };
        let window = self.policy.window(&before).0;
        let start = self.now;
        let found = window > 0 && self.spin(start.saturating_add(window));
        let spun = self.now - start;
        self.outcome.spun += spun;
        if !found {
            self.sleep();
        }
        let length = Nanos(self.now - start);
        let active = [
            Active { slot: Slot(1), kind: EventKind::Queue, ready: self.asked > 0 },
            Active { slot: Slot(0), kind: EventKind::Completion, ready: self.done > 0 },
        ];
        self.policy.observe(&Wait { length, spun: Nanos(spun), blocked: !found, active: &active });
        self.last = LastWait { kind: if self.done > 0 { EventKind::Completion } else { EventKind::Queue }, length };
        self.ended = self.now;
        self.look();
    }

    fn cpu_time(&self) -> u64 {
        self.cpu + self.outcome.cpu
    }

    fn spin(&mut self, end: u64) -> bool {
        loop {
            let before = self.now;
            let slice = self.world.neighbour.takes(self.ran_since, before);
            let found = self.advance(end.min(slice), true);
            self.outcome.cpu += self.own_share(self.now - before);
            if found || self.now >= end {
                return found;
            }
            self.give_way();
        }
    }

    fn sleep(&mut self) {
        self.running = false;
        let since = self.now;
        self.advance(FOREVER, true);
        let Wakeup { doze, deep, dozes_for } = self.world.wakeup;
        let late = if self.now - since < dozes_for { doze } else { deep };
        let late = self.jitter(late);
        self.advance(self.now + late, false);
        self.outcome.cpu += self.world.block_cpu;
        self.be_off_core(self.world.neighbour.lets(since, self.now));
    }

    /// Ten times a second, as the loop does.
    fn look(&mut self) {
        if self.now - self.looked < 100_000_000 {
            return;
        }
        self.looked = self.now;
        let (delayed, preempted) = (Nanos(std::mem::take(&mut self.delayed)), std::mem::take(&mut self.preempted));
        self.policy.contend(Contention { ran: Nanos(100_000_000) - delayed, delayed, preempted });
    }

    /// Lets time go by until `until`, or until there is work for the I/O thread, which is told.
    fn advance(&mut self, until: u64, for_work: bool) -> bool {
        loop {
            if for_work && self.asked + self.done > 0 {
                return true;
            }
            let served = self.next_served();
            let asks = self.coming.front().copied().unwrap_or(FOREVER);
            let at = served.min(asks).max(self.now);
            if at > until {
                self.pass(until.max(self.now));
                return false;
            }
            self.pass(at);
            if served <= asks {
                self.serving.pop_front();
                self.done += 1;
                continue;
            }
            self.coming.pop_front();
            self.asked += 1;
            self.waiting.push_back(self.now);
            if let Load::Open { every, at_random } = self.world.load {
                let next = if at_random { self.exponential(every) } else { every };
                self.coming.push_back(self.now + next);
            }
        }
    }

    fn pass(&mut self, until: u64) {
        let length = until - self.now;
        let rate = self.kernel_rate();
        if let (Disk::Kernel { .. }, Some(left)) = (self.world.disk, self.serving.front_mut()) {
            *left = left.saturating_sub(length * rate / 8);
        }
        self.now = until;
    }

    /// How fast a thread of the kernel gets on, in eighths.
    fn kernel_rate(&self) -> u64 {
        if self.running && !self.client_core_is_free() { SHARE } else { 8 }
    }

    /// Of a time on the core, what was not the disk's.
    fn own_share(&self, length: u64) -> u64 {
        let shared = matches!(self.world.disk, Disk::Kernel { .. }) && !self.client_core_is_free();
        if shared && !self.serving.is_empty() { length * (8 - SHARE) / 8 } else { length }
    }

    fn client_core_is_free(&self) -> bool {
        if self.world.beside_client.turn(self.now).is_some() {
            return false;
        }
        match self.world.load {
            Load::Closed { client: Client::Polls, .. } => false,
            Load::Closed { client: Client::Sleeps(_), .. } => self.client_sleeps(),
            Load::Open { .. } => true,
        }
    }

    fn client_sleeps(&self) -> bool {
        let sleeps = match self.world.load {
            Load::Closed { client: Client::Polls, .. } => false,
            Load::Closed { client: Client::Sleeps(_), .. } | Load::Open { .. } => true,
        };
        sleeps && self.client_free <= self.now
    }

    fn next_served(&self) -> u64 {
        let Some(&first) = self.serving.front() else { return FOREVER };
        match self.world.disk {
            Disk::Hardware { .. } => first,
            Disk::Kernel { .. } => self.now + (first * 8).div_ceil(self.kernel_rate()),
        }
    }

    /// Hands a request to the disk.
    fn serve(&mut self) {
        match self.world.disk {
            Disk::Hardware { takes, spread, .. } => {
                let takes = takes * (256 - spread) / 256 + self.exponential(takes * spread / 256);
                let now = self.now;
                let lane = self.lanes.iter_mut().min().expect("a disk with a lane");
                *lane = (*lane).max(now) + takes;
                let ends = *lane;
                let place = self.serving.partition_point(|&other| other <= ends);
                self.serving.insert(place, ends);
            }
            Disk::Kernel { takes, awake_in } => {
                let awake_in = if self.serving.is_empty() { awake_in } else { 0 };
                let takes = self.jitter(takes) + awake_in;
                self.serving.push_back(takes);
            }
        }
    }

    /// The client is answered, and asks again.
    fn answer(&mut self, answers: u32) {
        let Load::Closed { think, client, .. } = self.world.load else { return };
        let neighbour = self.world.beside_client;
        match client {
            Client::Sleeps(Wakeup { doze, deep, dozes_for }) if self.client_sleeps() => {
                let late = if self.now - self.client_free < dozes_for { doze } else { deep };
                let up = self.now + self.jitter(late);
                self.client_free = neighbour.lets(self.client_free, up);
            }
            Client::Sleeps(_) => {}
            Client::Polls => loop {
                let taken = neighbour.takes(self.client_since, self.client_since);
                if taken > self.now {
                    break;
                }
                self.client_since = neighbour.returns(taken);
                self.client_free = self.client_free.max(self.client_since);
            },
        }
        self.client_free = self.client_free.max(self.now);
        for _ in 0..answers {
            self.client_free += self.jitter(think);
            self.coming.push_back(self.client_free);
        }
    }

    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.random >> 33
    }

    /// `length`, give or take an eighth; the same on every run.
    fn jitter(&mut self, length: u64) -> u64 {
        length * (896 + self.next_random() % 257) / 1_024
    }

    fn exponential(&mut self, mean: u64) -> u64 {
        let unit = (self.next_random() % (1 << 24) + 1) as f64 / f64::from(1 << 24);
        (-(mean as f64) * unit.ln()) as u64
    }
}
