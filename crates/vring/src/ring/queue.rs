//! A queue of either layout: what a worker has.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::chain::Chain;
use super::chains::Chains;
use super::either::{Either, either};
use super::inflight::Record;
use super::{RingError, packed, split};
use crate::memory::{Buffers, GuestMemory, Lent};

/// A queue at rest: where its ring is and where in it to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Descriptors in the table: for a split ring, a power of two.
    pub size: u16,
    /// The guest address of the descriptor table, or of the packed ring itself.
    pub desc: u64,
    /// The guest address of the available ring, or of the driver's event suppression.
    pub avail: u64,
    /// The guest address of the used ring, or of the device's event suppression.
    pub used: u64,
    /// What vhost-user calls the vring's base. For a split ring, the available index to pop next. For a packed one, in
    /// the low 16 bits where to pop next and in the high ones where to use next: each a descriptor's place with the wrap
    /// counter in bit 15, [`PACKED_BASE`](super::PACKED_BASE) after a reset.
    pub base: u32,
    /// Whether `VIRTIO_F_RING_PACKED` was negotiated.
    pub packed: bool,
    /// Whether `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
}

impl QueueConfig {
    /// Checks the addresses, finds the areas in `memory`, and asks the driver for kicks.
    ///
    /// A split ring's used index goes on from what the ring says. The driver may have made chains available before
    /// anybody asked for kicks: look before the first wait.
    ///
    /// # Errors
    ///
    /// A size or a base that the ring cannot have; an area that is misaligned or outside `memory`.
    pub fn start(self, memory: &Arc<GuestMemory>) -> Result<Queue, RingError> {
        self.start_recorded(memory, None)
    }

    /// As [`start`](Self::start), and keeps a record of what is in flight, if there is one. What it says was in flight when
    /// an earlier device on the ring went away is popped first.
    ///
    /// Popping then begins behind these chains, wherever `base` is: all before them has been used, and a front-end whose
    /// device went away without a word knows at best what was used. Of a packed ring it does not know that either; the
    /// record does.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start); a record that is not of this ring.
    pub fn start_recorded(self, memory: &Arc<GuestMemory>, record: Option<Record>) -> Result<Queue, RingError> {
        let ring = match self.packed {
            false => Either::Split(self.start_split(memory, record)?),
            true => Either::Packed(self.start_packed(memory, record)?),
        };
        let mut queue = Queue {
            memory: Arc::clone(memory),
            ring,
            config: self,
            chains: Chains::new(self.size),
            broken: None,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            lent: 0,
        };
        queue.arm_kicks();
        Ok(queue)
    }
}

/// Names queues to what they lend; 0 is nobody's.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// A running queue, the device's half: owned by one worker.
///
/// Drain it before it is dropped or stopped. Memory that it has lent is in the hands of a disk engine, and the kernel
/// writes to it; should the queue go away first, it leaves its memory map behind for good.
pub struct Queue {
    /// What keeps the ring's areas mapped, and everything that its chains point to.
    memory: Arc<GuestMemory>,
    ring: Either<split::Ring, packed::Ring>,
    config: QueueConfig,
    chains: Chains,
    broken: Option<RingError>,
    /// No other queue of the process has it.
    id: u64,
    /// How often memory of the map is out.
    lent: u32,
}

impl Queue {
    /// Gives the queue back at rest; what is in flight is no longer its business.
    pub fn stop(self) -> QueueConfig {
        self.at_rest()
    }

    fn at_rest(&self) -> QueueConfig {
        QueueConfig { base: either!(&self.ring, ring => ring.base()), ..self.config }
    }

    /// Descriptors in the table.
    #[inline]
    pub fn size(&self) -> u16 {
        self.config.size
    }

    /// The memory that its chains point into.
    #[inline]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Whether the peer took away memory that the queue needs. A few loads, whatever other peers do: cheap enough to ask
    /// before each batch of completions.
    #[inline]
    pub fn is_truncated(&self) -> bool {
        self.memory.is_truncated() || either!(&self.ring, ring => ring.is_record_truncated())
    }

    /// Where the next pop takes a chain: a split ring's available index; a packed ring's place, as in
    /// [`QueueConfig::base`].
    pub fn next_available(&self) -> u16 {
        either!(&self.ring, ring => ring.next_available())
    }

    /// Likewise where the chain after those of the next [`publish_used`](Self::publish_used) is used.
    pub fn next_used(&self) -> u16 {
        either!(&self.ring, ring => ring.next_used())
    }

    /// How many chains were popped and not used yet.
    pub fn in_flight(&self) -> u16 {
        self.chains.count()
    }

    /// What broke the queue. It stays broken: it pops no more, but takes used chains.
    pub fn broken(&self) -> Option<RingError> {
        self.broken
    }

    /// Whether there is a chain to pop: at most one load of what the driver stores. Never when broken.
    #[inline]
    pub fn is_available(&self) -> bool {
        self.broken.is_none() && either!(&self.ring, ring => ring.is_available())
    }

    /// Takes the next chain, if there is one, and copies it to `chain`.
    ///
    /// The driver can make chains available as fast as they are popped: whoever loops over this counts.
    ///
    /// # Errors
    ///
    /// What the driver did wrong. The queue is then broken for good, and the next pop says the same.
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, RingError> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        let Self { ring, chains, memory, .. } = self;
        either!(ring, ring => ring.pop(chain, chains, memory)).inspect_err(|&error| self.broken = Some(error))
    }

    /// Ends a chain's flight. It goes to the driver with the next [`publish_used`](Self::publish_used).
    ///
    /// # Panics
    ///
    /// When `head` is not in flight: the caller has used it twice, or never popped it.
    #[inline]
    pub fn add_used(&mut self, head: u16, written: u32) {
        let taken = self.chains.end(head);
        match &mut self.ring {
            // The head says which descriptors these are.
            Either::Split(ring) => ring.add_used(head, written),
            Either::Packed(ring) => ring.add_used(head, taken, written),
        }
    }

    /// Ends a chain's flight without giving it back: for one that the device model could make nothing of.
    ///
    /// # Panics
    ///
    /// When `head` is not in flight.
    #[inline]
    pub fn abandon(&mut self, head: u16) {
        self.chains.end(head);
    }

    /// Shows the driver all at once what was used since the last time; returns whether it wants to be notified.
    #[inline]
    pub fn publish_used(&mut self) -> bool {
        either!(&mut self.ring, ring => ring.publish_used())
    }

    /// Tells the driver that it need not kick: somebody is looking anyway. A hint.
    #[inline]
    pub fn suppress_kicks(&mut self) {
        either!(&mut self.ring, ring => ring.suppress_kicks());
    }

    /// Asks the driver to kick for the next chain. False if one is there already: pop it instead of waiting.
    ///
    /// A broken queue is asked for nothing, and says that it may wait.
    #[inline]
    pub fn arm_kicks(&mut self) -> bool {
        self.broken.is_some() || either!(&mut self.ring, ring => ring.arm_kicks())
    }

    /// Lends memory to a disk: iovecs of the queue's map, or memory that goes along. It is to come back by
    /// [`take_back`](Self::take_back); until then the queue keeps its map.
    ///
    /// # Errors
    ///
    /// There is an iovec that the map does not hold. The buffers come back as they were.
    #[inline]
    pub fn lend(&mut self, buffers: Buffers) -> Result<Lent, Buffers> {
        if buffers.is_own() {
            // SAFETY: the iovec belongs to `buffers`.
            return Ok(unsafe { Lent::new(buffers, 0) });
        }
        if !buffers.iter().all(|iovec| self.memory.holds(iovec)) {
            return Err(buffers);
        }
        self.lent += 1;
        // SAFETY: the map holds the iovecs, and `replace_memory` and `drop` keep it while something is out that this
        // queue has lent.
        Ok(unsafe { Lent::new(buffers, self.id) })
    }

    /// Takes back what was lent. What another queue has lent stays out for that one.
    #[inline]
    pub fn take_back(&mut self, lent: Lent) -> Buffers {
        let (buffers, by) = lent.take_back();
        self.lent -= u32::from(by == self.id);
        buffers
    }

    /// Goes on in another memory map.
    ///
    /// # Errors
    ///
    /// [`RingError::InFlight`], and nothing has changed, while chains point into the old one, or it is lent. Or the ring is not in the
    /// new map; the queue keeps the old one and is broken.
    pub fn replace_memory(&mut self, memory: &Arc<GuestMemory>) -> Result<(), RingError> {
        match self.in_flight().max(self.lent.try_into().unwrap_or(u16::MAX)) {
            0 => {}
            in_flight => return Err(RingError::InFlight(in_flight)),
        }
        either!(&mut self.ring, ring => ring.replace_memory(&self.config, memory))
            .inspect_err(|&error| self.broken = Some(error))?;
        self.memory = Arc::clone(memory);
        Ok(())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.lent > 0 {
            // Address space lost, instead of a late disk read into whatever is mapped there next.
            mem::forget(Arc::clone(&self.memory));
        }
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue")
            .field("at_rest", &self.at_rest())
            .field("next_used", &self.next_used())
            .field("in_flight", &self.in_flight())
            .field("broken", &self.broken())
            .finish_non_exhaustive()
    }
}
