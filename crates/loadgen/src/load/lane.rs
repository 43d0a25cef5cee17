//! One disk of a job: its queue, the next address, and the requests in flight.

use std::ops::Range;

use super::LoadError;
use super::arrivals::Arrivals;
use super::spec::Spec;
use super::verify::{Ledger, Stamp};
use crate::client::{Op, Queue};
use crate::random::{Permutation, Random};

/// The order of addresses.
enum Order {
    Sequential(u64),
    Uniform(Random),
    Permuted(Permutation),
}

/// A request in flight. Times are in nanoseconds since the job's beginning.
#[derive(Clone, Copy)]
pub(super) struct Flight {
    /// Its intended start.
    pub intended: u64,
    /// Its actual start.
    pub issued: u64,
    /// How much later than it could have that was, with room for it: the load's own doing.
    pub late: u64,
    pub op: Op,
    block: u64,
}

pub(super) struct Lane {
    pub queue: Queue,
    /// Free slots. A closed loop has few.
    pub free: Vec<u16>,
    /// Of an open loop: when its requests are due.
    pub arrivals: Option<Arrivals>,
    /// Of an open loop: whether the last request that was due found a slot, and since when all have.
    pub has_room: bool,
    pub room_since: u64,
    flights: Box<[Flight]>,
    begin: u64,
    blocks: u64,
    bs: u32,
    order: Order,
    mix: Random,
    /// In percent.
    reads: u64,
    ledger: Option<Ledger>,
    writes: bool,
    scratch: Vec<u8>,
}

impl Lane {
    /// A lane over `part` of the job's disk with this number; `seed` is its own, and so are `arrivals`.
    pub fn new(queue: Queue, spec: &Spec, part: Range<u64>, disk: u64, seed: u64, arrivals: Option<Arrivals>) -> Self {
        let blocks = (part.end - part.start) / u64::from(spec.bs);
        let mut random = Random::new(seed);
        let mix = Random::new(random.bits());
        let order = match (spec.rw.random, spec.norandommap) {
            (false, _) => Order::Sequential(0),
            (true, true) => Order::Uniform(random),
            (true, false) => Order::Permuted(Permutation::new(blocks, random)),
        };
        let none = Flight { intended: 0, issued: 0, late: 0, op: Op::Read, block: 0 };
        let mut lane = Self {
            free: (0..spec.iodepth.min(queue.depth())).rev().collect(),
            arrivals,
            has_room: true,
            room_since: 0,
            flights: vec![none; usize::from(queue.depth())].into(),
            begin: part.start,
            blocks,
            bs: spec.bs,
            order,
            mix,
            reads: match (spec.rw.reads, spec.rw.writes) {
                (true, true) => spec.rwmixread.into(),
                (reads, _) => 100 * u64::from(reads),
            },
            // No disk's blocks pass for another's, whoever reads them later.
            ledger: spec.verify.map(|seed| Ledger::new(seed.wrapping_add(disk), blocks)),
            writes: spec.rw.writes,
            scratch: vec![0; spec.bs as usize],
            queue,
        };
        // Faults in every page that the server will use, and fills the buffers that writes send.
        let mut noise = Random::new(seed ^ 1);
        for slot in 0..lane.queue.depth() {
            lane.scratch.chunks_mut(4).for_each(|bytes| {
                let word = (noise.bits() as u32).to_ne_bytes();
                bytes.copy_from_slice(&word[..bytes.len()]);
            });
            lane.queue.fill(slot, &lane.scratch);
        }
        lane
    }

    /// When the next request of an open loop is due.
    #[inline]
    pub fn next_start(&self) -> u64 {
        self.arrivals.as_ref().map_or(u64::MAX, Arrivals::next)
    }

    /// Starts over at time 0, with all slots free.
    pub fn restart(&mut self) {
        (self.has_room, self.room_since) = (true, 0);
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.restart();
        }
    }

    /// When the next request of an open loop was due if that was before `now`; it is not made any more.
    pub fn skip(&mut self, now: u64) -> Option<u64> {
        let arrivals = self.arrivals.as_mut().filter(|arrivals| arrivals.next() < now)?;
        let due = arrivals.next();
        arrivals.advance();
        Some(due)
    }

    /// Submits the next request of an open loop in `slot`.
    pub fn start(&mut self, slot: u16, now: u64, issued: u64) {
        if !self.has_room {
            (self.has_room, self.room_since) = (true, now);
        }
        self.issue(slot, self.next_start(), self.room_since, issued);
        if let Some(arrivals) = &mut self.arrivals {
            arrivals.advance();
        }
    }

    /// Submits the next request in `slot`, of which there was room since `possible`.
    #[inline]
    pub fn issue(&mut self, slot: u16, intended: u64, possible: u64, issued: u64) {
        let op = match self.reads {
            100 => Op::Read,
            0 => Op::Write,
            reads if self.mix.below(100) < reads => Op::Read,
            _ => Op::Write,
        };
        let block = match &self.ledger {
            None => self.next_block(),
            Some(_) => self.reserve(),
        };
        let late = issued.saturating_sub(possible.max(intended));
        self.issue_at(slot, block, Flight { intended, issued, late, op, block });
    }

    fn issue_at(&mut self, slot: u16, block: u64, flight: Flight) {
        let op = flight.op;
        let offset = self.begin + block * u64::from(self.bs);
        if op == Op::Write
            && let Some(ledger) = &mut self.ledger
        {
            let stamp = Stamp { offset, seed: ledger.seed, generation: ledger.advance(block) };
            stamp.fill(&mut self.scratch);
            self.queue.fill(slot, &self.scratch);
        }
        self.flights[usize::from(slot)] = flight;
        self.queue.submit(slot, op, offset, self.bs);
    }

    #[inline]
    fn next_block(&mut self) -> u64 {
        match &mut self.order {
            Order::Sequential(next) => {
                let block = *next;
                *next = if block + 1 == self.blocks { 0 } else { block + 1 };
                block
            }
            Order::Uniform(random) => random.below(self.blocks),
            Order::Permuted(permutation) => permutation.draw(),
        }
    }

    /// The next block without a request in flight. There are at least twice as many blocks as requests.
    fn reserve(&mut self) -> u64 {
        loop {
            let block = self.next_block();
            if self.ledger.as_mut().is_none_or(|ledger| ledger.reserve(block)) {
                return block;
            }
        }
    }

    /// The next completed request, with its slot.
    #[inline]
    pub fn complete(&mut self) -> Result<Option<(u16, Flight)>, LoadError> {
        let Some(done) = self.queue.reap()? else { return Ok(None) };
        let flight = self.flights[usize::from(done.slot)];
        if !done.is_ok() {
            let offset = self.begin + flight.block * u64::from(self.bs);
            return Err(LoadError::Failed { op: flight.op, offset, status: done.status });
        }
        if self.ledger.is_some() {
            self.check(done.slot, flight)?;
        }
        Ok(Some((done.slot, flight)))
    }

    fn check(&mut self, slot: u16, flight: Flight) -> Result<(), LoadError> {
        let Some(ledger) = &mut self.ledger else { return Ok(()) };
        let generation = ledger.generation(flight.block);
        ledger.release(flight.block);
        // With writes in the mix, blocks that were not written yet may hold anything. A load that only reads expects every
        // block to be stamped.
        if flight.op != Op::Read || (generation == 0 && self.writes) {
            return Ok(());
        }
        self.queue.copy(slot, &mut self.scratch);
        let offset = self.begin + flight.block * u64::from(self.bs);
        Stamp { offset, seed: ledger.seed, generation }.check(&self.scratch)?;
        Ok(())
    }

    /// The next block from `from` on that was written, if the lane keeps a ledger.
    pub fn written_from(&self, from: u64) -> Option<u64> {
        let ledger = self.ledger.as_ref()?;
        (from..ledger.blocks()).find(|&block| ledger.generation(block) > 0)
    }

    /// Submits a read of `block` in `slot`, which will be checked.
    pub fn read_back(&mut self, slot: u16, block: u64) {
        self.issue_at(slot, block, Flight { intended: 0, issued: 0, late: 0, op: Op::Read, block });
    }

    /// The length of a request in bytes.
    pub fn bs(&self) -> u32 {
        self.bs
    }
}
