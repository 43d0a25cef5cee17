//! A queue of either layout, the device's half.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::chain::Chain;
use super::chains::Chains;
use super::either::{Either, either};
use super::inflight::Record;
use super::{RingError, packed, split};
use crate::memory::{Access, Buffers, GuestMemory, Lender, Lent};

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
    /// By which address what the device writes at `used` is noted, in the dirty log of the queue's memory; none if what
    /// the device writes to the ring is not to be noted. vhost-user has it as `log_guest_addr`.
    pub log: Option<u64>,
}

impl QueueConfig {
    /// Checks the addresses, finds the areas in `memory`, and asks the driver for kicks.
    ///
    /// A split ring's used index continues from the one in the ring. The driver may have made chains available before kicks
    /// were asked for, so the caller must look at the queue before it first waits.
    ///
    /// # Errors
    ///
    /// A size or a base that the ring cannot have; an area that is misaligned or outside `memory`.
    pub fn start(self, memory: &Arc<GuestMemory>) -> Result<Queue, RingError> {
        self.start_recorded(memory, None)
    }

    /// As [`start`](Self::start), and keeps a record of what is in flight, if there is one. The chains that it has in flight
    /// from an earlier device are popped first.
    ///
    /// Popping then continues behind these chains and not at `base`: everything before them has been used, and when a device
    /// dies, its front-end knows at best the used index, and of a packed ring not even that.
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
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            lent: 0,
        };
        queue.arm_kicks();
        Ok(queue)
    }

    /// Whether there is something available where a queue would begin that is [started](Self::start_recorded) so. Of a split
    /// ring that is also what is in flight. Nothing is written.
    ///
    /// # Errors
    ///
    /// As [`start_recorded`](Self::start_recorded).
    pub fn is_available(&self, memory: &GuestMemory, record: Option<&Record>) -> Result<bool, RingError> {
        if self.packed { self.is_packed_available(memory, record) } else { self.is_split_available(memory) }
    }
}

/// The next queue's number, by which memory that is lent names its lender; 0 is no queue's.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// A running queue, the device's half: owned by one worker.
///
/// It must be drained before it is dropped or stopped. The kernel may write to memory that is lent to a disk engine, so a
/// queue that is dropped while memory is lent leaks its memory map.
pub struct Queue {
    /// What keeps the ring's areas mapped, and everything that its chains point to.
    memory: Arc<GuestMemory>,
    ring: Either<split::Ring, packed::Ring>,
    config: QueueConfig,
    chains: Chains,
    broken: Option<RingError>,
    /// Unique in the process.
    number: u64,
    /// How many lists of buffers are lent.
    lent: u32,
}

impl Queue {
    /// Stops the queue. It must be drained: chains in flight can no longer be used.
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

    /// Whether a record is kept of what is in flight, from which another device may go on.
    pub fn has_record(&self) -> bool {
        either!(&self.ring, ring => ring.has_record())
    }

    /// Whether chains that the record had in flight from an earlier device are still to be popped. Until they have been, where
    /// the queue stands says nothing to who does not have the record. Never when broken.
    pub fn has_recovered(&self) -> bool {
        self.broken.is_none() && either!(&self.ring, ring => ring.has_recovered())
    }

    /// Whether the peer truncated a file behind memory that the queue needs. This is a few loads, and cheap enough to be asked
    /// before each completion.
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

    /// Whether the chain at `head` was popped and not used yet.
    pub fn is_in_flight(&self, head: u16) -> bool {
        self.chains.is_in_flight(head)
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
    /// The driver can make chains available as fast as they are popped, so a loop over this needs a limit.
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

    /// Ends a chain's flight without using it: for a chain that breaks the queue.
    ///
    /// # Panics
    ///
    /// When `head` is not in flight.
    #[inline]
    pub fn abandon(&mut self, head: u16) {
        self.chains.end(head);
    }

    /// Publishes all chains that were used since the last time, at once; returns whether the driver wants to be notified.
    #[inline]
    pub fn publish_used(&mut self) -> bool {
        either!(&mut self.ring, ring => ring.publish_used())
    }

    /// Tells the driver that it need not kick, because the queue is being polled. This is a hint.
    #[inline]
    pub fn suppress_kicks(&mut self) {
        either!(&mut self.ring, ring => ring.suppress_kicks());
    }

    /// Asks the driver to kick for the next chain. False if one is there already: pop it instead of waiting.
    ///
    /// True for a broken queue, whose driver is not asked for kicks.
    #[inline]
    pub fn arm_kicks(&mut self) -> bool {
        self.broken.is_some() || either!(&mut self.ring, ring => ring.arm_kicks())
    }

    /// Lends memory to a disk: iovecs of the queue's map, or memory that goes along. It is to come back by
    /// [`take_back`](Self::take_back); until then the queue keeps its map. What the disk writes to is then in the dirty log,
    /// if there is one.
    ///
    /// # Errors
    ///
    /// There is an iovec that the map does not hold. The buffers come back as they were.
    #[inline]
    pub fn lend(&mut self, buffers: Buffers, access: Access) -> Result<Lent, Buffers> {
        if buffers.is_own() {
            // SAFETY: the iovec belongs to `buffers`.
            return Ok(unsafe { Lent::new(buffers, Lender::NOBODY) });
        }
        if !buffers.iter().all(|iovec| self.memory.holds(iovec)) {
            return Err(buffers);
        }
        self.lent += 1;
        // SAFETY: the map holds the iovecs, and `replace_memory` and `drop` keep it while something is out that this
        // queue has lent.
        Ok(unsafe { Lent::new(buffers, Lender::queue(self.number, access)) })
    }

    /// Takes back what was lent. Memory of another queue stays lent by that one.
    #[inline]
    pub fn take_back(&mut self, lent: Lent) -> Buffers {
        let (buffers, by) = lent.take_back();
        self.lent -= u32::from(by.is_queue(self.number));
        if by.writes() {
            self.memory.log_written(&buffers);
        }
        buffers
    }

    /// Goes on in a map that has all that the queue's has, and perhaps more regions or another log, where it notes what the
    /// device writes from here on. `used` is [`QueueConfig::log`]. Chains may be in flight: what they point into is in either
    /// map, and what they have written is noted when they are used.
    ///
    /// All of the ring is noted as written: by a device that was killed, say, before it could do so.
    ///
    /// # Panics
    ///
    /// When `memory` lacks a region that the queue's map has.
    pub fn extend_memory(&mut self, memory: &Arc<GuestMemory>, used: Option<u64>) {
        assert!(memory.includes(&self.memory), "a queue goes to a map without its regions only when it is drained");
        self.config.log = used;
        self.memory = Arc::clone(memory);
        either!(&mut self.ring, ring => ring.set_log(&self.config, memory));
    }

    /// Notes used elements that are not going to be published: their queue is broken.
    #[cold]
    pub fn log_unpublished(&self) {
        either!(&self.ring, ring => ring.log_used());
    }

    /// Goes on in another memory map.
    ///
    /// # Errors
    ///
    /// [`RingError::InFlight`] while chains are in flight or memory is lent; nothing has changed. Any other error says that
    /// the ring is not in the new map; the queue keeps the old map and is broken.
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
            // To leak address space is better than a late disk read into whatever is mapped there next.
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
