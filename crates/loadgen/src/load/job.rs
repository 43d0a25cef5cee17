//! One thread's load on its disks.
//!
//! ```text
//!   look ──► (completions) ──► reap, record, and in a closed loop issue the next in the same slot ─┐
//!    ▲  └──► (a start is due) ──► issue                                                             ├──► publish, kick
//!    └──────────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! One clock read serves a turn. Nothing is allocated while a job runs.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use rustix::thread::set_current_timer_slack;

use super::arrivals::Arrivals;
use super::lane::Lane;
use super::spec::{Spec, Waiting};
use super::tally::Tally;
use super::waiter::Waiter;
use super::{LoadError, SpecError};
use crate::client::{ClientError, Info, PATIENCE, Queue};
use crate::machine;
use crate::random::mix;

/// Completions taken from one disk before what follows them is published: few enough that the server is not kept
/// waiting, enough to share a clock read and a fence.
const BATCH: usize = 16;
/// Polls without a completion between two checks of the clock and of the connection.
const LOOKS: u32 = 1 << 16;

/// An edge of the measured interval, at which the caller may read the server's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// Measuring begins.
    Begin,
    /// Measuring has ended.
    End,
}

/// How long one run of a job is.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The warm-up, which is not measured.
    pub ramp: Duration,
    /// The measured time.
    pub length: Duration,
}

/// One thread's load, which can be run repeatedly.
pub struct Job {
    lanes: Vec<Lane>,
    is_open: bool,
    waiting: Waiting,
    waiter: Waiter,
    core: Option<usize>,
    patience_ns: u64,
}

/// The phase of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Ramping,
    Measuring,
    Draining,
}

/// The state of one run. Times are in nanoseconds since its beginning.
struct Run {
    clock: Instant,
    phase: Phase,
    begin: u64,
    end: u64,
    in_flight: usize,
    last_completion: u64,
    cpu_before: u64,
    kicks_before: u64,
}

impl Run {
    fn new(phase: Phase, begin: u64, end: u64) -> Self {
        let clock = Instant::now();
        Self { clock, phase, begin, end, in_flight: 0, last_completion: 0, cpu_before: 0, kicks_before: 0 }
    }

    #[inline]
    fn now(&self) -> u64 {
        self.clock.elapsed().as_nanos() as u64
    }

    fn next_edge(&self) -> u64 {
        match self.phase {
            Phase::Ramping => self.begin,
            Phase::Measuring => self.end,
            Phase::Draining => u64::MAX,
        }
    }
}

impl Job {
    /// Job `number` of those that `spec` describes, on one queue of each disk.
    ///
    /// # Errors
    /// The disk cannot be used as described.
    pub fn new(spec: &Spec, number: u16, disks: Vec<(Info, Queue)>) -> Result<Self, LoadError> {
        let seed = |lane: u64| mix(spec.randseed ^ u64::from(number) << 32 ^ lane);
        let count = disks.len();
        let mut lanes = Vec::with_capacity(count);
        for (disk, (info, queue)) in disks.into_iter().enumerate() {
            spec.check(&info)?;
            if queue.longest() < spec.bs || queue.depth() < spec.iodepth {
                return Err(SpecError::Queue { depth: queue.depth(), longest: queue.longest() }.into());
            }
            let disk_seed = seed(disk as u64 + 1);
            let arrivals = spec.rate_iops.map(|rate| Arrivals::new(rate, disk, count, mix(disk_seed)));
            lanes.push(Lane::new(queue, spec, spec.part(number, &info)?, disk as u64, disk_seed, arrivals));
        }
        let cores = &spec.cpus_allowed;
        Ok(Self {
            waiter: Waiter::new(lanes.iter().map(|lane| &lane.queue))?,
            lanes,
            is_open: spec.rate_iops.is_some(),
            waiting: spec.waiting,
            core: (!cores.is_empty()).then(|| cores[usize::from(number) % cores.len()]),
            patience_ns: PATIENCE.as_nanos() as u64,
        })
    }

    /// Sets how long the server may complete nothing before the run fails.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience_ns = patience.as_nanos() as u64;
    }

    /// An empty tally for this job.
    pub fn tally(&self) -> Tally {
        Tally::new(self.waiting, self.is_open)
    }

    /// Runs once in this thread, and adds to `tally`. `edge` is called where measuring begins and where it ends.
    ///
    /// # Errors
    /// A request failed, verification failed, or the server closed the connection. The job cannot be run again.
    pub fn run(&mut self, span: Span, tally: &mut Tally, edge: &mut dyn FnMut(Edge)) -> Result<(), LoadError> {
        let core = self.core;
        machine::on_cores(core.as_slice(), || self.run_here(span, tally, edge))
    }

    fn run_here(&mut self, span: Span, tally: &mut Tally, edge: &mut dyn FnMut(Edge)) -> Result<(), LoadError> {
        let begin = span.ramp.as_nanos() as u64;
        let mut run = Run::new(Phase::Ramping, begin, begin + span.length.as_nanos() as u64);
        if self.is_open {
            self.lanes.iter_mut().for_each(Lane::restart);
            // Start times are met to the microsecond, but Linux lets a thread's timers expire 50 us late by default.
            set_current_timer_slack(NonZeroU64::new(1)).map_err(ClientError::from)?;
        } else {
            for lane in &mut self.lanes {
                while let Some(slot) = lane.free.pop() {
                    lane.issue(slot, 0, 0, 0);
                    run.in_flight += 1;
                }
                lane.queue.publish()?;
            }
        }
        loop {
            let at_once = self.look(&run, tally)?;
            let now = run.now();
            self.reap(&mut run, now, tally)?;
            self.start_what_is_due(&mut run, now)?;
            if run.phase == Phase::Measuring {
                tally.turns += 1;
                tally.at_once += u64::from(at_once);
            }
            if now >= run.next_edge() {
                self.pass_edge(&mut run, now, tally, edge)?;
            }
            if run.phase == Phase::Draining && run.in_flight == 0 {
                return Ok(());
            }
        }
    }

    fn kicks(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.queue.kicks()).sum()
    }

    #[cold]
    fn pass_edge(
        &mut self,
        run: &mut Run,
        now: u64,
        tally: &mut Tally,
        edge: &mut dyn FnMut(Edge),
    ) -> Result<(), LoadError> {
        if run.phase == Phase::Ramping {
            edge(Edge::Begin);
            // The callback took time, which must not count as the server's.
            let now = run.now();
            run.phase = Phase::Measuring;
            run.kicks_before = self.kicks();
            run.cpu_before = machine::thread_cpu_time_ns();
            // If the end of the warm-up is noticed late, measuring begins late and keeps its full length.
            let length = run.end - run.begin;
            run.begin = now;
            run.end = now + length;
            // What a server that is too slow has left undone so far is the warm-up's, or nothing else would be measured.
            self.lanes.iter_mut().for_each(|lane| while lane.skip(now).is_some() {});
        } else {
            tally.cpu_ns += machine::thread_cpu_time_ns() - run.cpu_before;
            edge(Edge::End);
            run.phase = Phase::Draining;
            tally.kicks += self.kicks() - run.kicks_before;
            tally.elapsed += Duration::from_nanos(now - run.begin);
            run.end = now;
            if let Some(open) = &mut tally.open {
                for due in self.lanes.iter_mut().flat_map(|lane| std::iter::from_fn(|| lane.skip(now))) {
                    open.unstarted += 1;
                    open.unstarted_lat.saturating_record(now - due);
                }
            }
            // Nobody looked while the callback ran. What is there by now took at least until the edge; what it took beyond that
            // nobody can tell from the callback's own time.
            while self.lanes.iter().any(|lane| lane.queue.has_completed()) {
                self.reap(run, now, tally)?;
            }
        }
        Ok(())
    }

    /// Records completions, and in a closed loop submits the next requests.
    #[inline]
    fn reap(&mut self, run: &mut Run, now: u64, tally: &mut Tally) -> Result<(), LoadError> {
        let closed = !self.is_open;
        for lane in &mut self.lanes {
            let mut taken = 0;
            while taken < BATCH
                && let Some((slot, flight)) = lane.complete()?
            {
                taken += 1;
                let counts = if closed {
                    run.phase == Phase::Measuring
                } else {
                    // A request that was due within the interval counts, however late it completes.
                    run.phase != Phase::Ramping && flight.intended >= run.begin && flight.intended < run.end
                };
                if counts {
                    tally.count(&flight, lane.bs());
                    // What was in flight at the edge may have been done while nobody looked, for as long as the callback took.
                    if flight.intended >= run.begin {
                        tally.record(&flight, now);
                    }
                }
                if closed && run.phase != Phase::Draining {
                    lane.issue(slot, now, now, now);
                } else {
                    lane.free.push(slot);
                    run.in_flight -= 1;
                }
            }
            if taken > 0 {
                run.last_completion = now;
                lane.queue.publish()?;
            }
        }
        Ok(())
    }

    /// Submits the requests of an open loop that are due, as far as slots are free.
    fn start_what_is_due(&mut self, run: &mut Run, now: u64) -> Result<(), LoadError> {
        if !self.is_open || run.phase == Phase::Draining {
            return Ok(());
        }
        for lane in &mut self.lanes {
            while lane.next_start() <= now {
                // What finds no slot waits for one of this disk's, so that its stall is told of all that was due there.
                let Some(slot) = lane.free.pop() else {
                    lane.has_room = false;
                    break;
                };
                if run.in_flight == 0 {
                    // No request was in flight, so the server's silence begins only now.
                    run.last_completion = now;
                }
                lane.start(slot, now, run.now());
                lane.queue.publish()?;
                run.in_flight += 1;
            }
        }
        Ok(())
    }

    /// Waits until there is something to do; returns whether there was without waiting.
    #[inline]
    fn look(&mut self, run: &Run, tally: &mut Tally) -> Result<bool, LoadError> {
        if self.lanes.iter().any(|lane| lane.queue.has_completed()) {
            return Ok(true);
        }
        match self.waiting {
            Waiting::Polling => self.spin(run)?,
            Waiting::Blocking => self.sleep(run, tally)?,
        }
        Ok(false)
    }

    /// When the job must wake up even if no server notifies it.
    fn until(&self, run: &Run) -> u64 {
        if !self.is_open || run.phase == Phase::Draining {
            return u64::MAX;
        }
        // Without a free slot a disk's next start has to wait for a completion anyway.
        let with_room = self.lanes.iter().filter(|lane| !lane.free.is_empty());
        with_room.map(Lane::next_start).fold(run.next_edge(), u64::min)
    }

    fn spin(&self, run: &Run) -> Result<(), LoadError> {
        let until = self.until(run);
        let mut looks = 0;
        loop {
            if self.lanes.iter().any(|lane| lane.queue.has_completed()) || (until < u64::MAX && run.now() >= until) {
                return Ok(());
            }
            looks += 1;
            if looks % LOOKS == 0 {
                self.waiter.wait(0)?;
                self.patience_left(run)?;
            }
        }
    }

    fn sleep(&mut self, run: &Run, tally: &mut Tally) -> Result<(), LoadError> {
        let until = self.until(run);
        let mut ready = false;
        for lane in &mut self.lanes {
            ready |= !lane.queue.arm();
        }
        while !ready {
            let now = run.now();
            if now >= until {
                break;
            }
            let patience = self.patience_left(run)?;
            tally.sleeps += u64::from(run.phase == Phase::Measuring);
            self.waiter.wait(patience.min(until - now))?;
            ready = self.lanes.iter().any(|lane| lane.queue.has_completed());
        }
        // A thread that polls sees completions without being called.
        self.lanes.iter_mut().for_each(|lane| lane.queue.suppress());
        Ok(())
    }

    /// How much longer the server may complete nothing, in nanoseconds.
    fn patience_left(&self, run: &Run) -> Result<u64, LoadError> {
        if run.in_flight == 0 {
            return Ok(self.patience_ns);
        }
        match self.patience_ns.checked_sub(run.now() - run.last_completion) {
            Some(left) if left > 0 => Ok(left),
            _ => Err(ClientError::Stuck(self.patience_ns / 1_000_000_000).into()),
        }
    }

    /// Reads back every block that this job has written, and checks it. Does nothing where `verify` is not asked for.
    ///
    /// # Errors
    /// A block does not hold what was written last, or the server closed the connection.
    pub fn verify(&mut self) -> Result<u64, LoadError> {
        let mut tally = self.tally();
        let mut checked = 0;
        for index in 0..self.lanes.len() {
            let mut run = Run::new(Phase::Draining, 0, 0);
            let mut next = self.lanes[index].written_from(0);
            while next.is_some() || run.in_flight > 0 {
                let lane = &mut self.lanes[index];
                while let Some(block) = next
                    && let Some(slot) = lane.free.pop()
                {
                    lane.read_back(slot, block);
                    next = lane.written_from(block + 1);
                    run.in_flight += 1;
                    checked += 1;
                }
                lane.queue.publish()?;
                if run.in_flight > 0 {
                    self.look(&run, &mut tally)?;
                    let now = run.now();
                    self.reap(&mut run, now, &mut tally)?;
                }
            }
        }
        Ok(checked)
    }
}
