//! The in-flight record of a split ring.
//!
//! ```text
//!   pop      counter ──▶ inflight = 1
//!   use      next = last_batch_head ──▶ last_batch_head = head                   for each chain of a batch
//!   publish  the ring's used index ──▶ inflight = 0, for each of the batch ──▶ used_idx = the ring's
//! ```
//!
//! A device may be killed between any two of these stores. Up to the used index's, the driver has seen nothing of the
//! batch, and all of it is in flight. From there on the two indices differ, by as many chains as the driver has seen
//! but the record still has: the list that begins at `last_batch_head` says which. So the next device knows what the
//! driver waits for, chain by chain, and pops that first, in the order in which it was made available.

use super::{Field, Record, RecordError};

/// How long `QueueRegionSplit` is up to its descriptors' states, and each of these.
pub(super) const STRIDE: u64 = 16;

const LAST_BATCH_HEAD: Field<u16> = Field::at(12);
const USED_IDX: Field<u16> = Field::at(14);
/// Of a state.
const NEXT: Field<u16> = Field::at(6);

/// Keeps a queue's record.
pub(in crate::ring) struct Tracker {
    record: Record,
    /// The next counter.
    counter: u64,
}

impl Tracker {
    /// Brings a record into agreement with a ring of `ring` descriptors whose used index is `used`. Returns also the heads
    /// of the chains in flight, in the order in which they were popped; `None` for a record that was never used.
    pub(in crate::ring) fn start(
        mut record: Record,
        used: u16,
        ring: u16,
    ) -> Result<(Self, Option<Vec<u16>>), RecordError> {
        let has_been_used = record.take_in(false, ring, |record| {
            record.set(record.header(), LAST_BATCH_HEAD, 0);
            record.set(record.header(), USED_IDX, used);
        })?;
        let mut tracker = Self { record, counter: 0 };
        let in_flight = if has_been_used { Some(tracker.recover(used, ring)?) } else { None };
        Ok((tracker, in_flight))
    }

    fn recover(&mut self, used: u16, ring: u16) -> Result<Vec<u16>, RecordError> {
        let recorded = self.record.get(self.record.header(), USED_IDX);
        if used.wrapping_sub(recorded) > ring {
            return Err(RecordError::Batch { recorded, used, ring });
        }
        self.end_batch(recorded, used)?;
        let in_flight = self.record.in_flight();
        if let Some(&(_, head)) = in_flight.iter().find(|(_, head)| *head >= ring) {
            return Err(RecordError::NoSuchHead { head, ring });
        }
        self.counter = in_flight.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(in_flight.into_iter().map(|(_, head)| head).collect())
    }

    /// Whether the peer took the record's memory away.
    #[inline]
    pub(in crate::ring) fn is_truncated(&self) -> bool {
        self.record.is_truncated()
    }

    /// A chain has been popped.
    #[inline]
    pub(in crate::ring) fn begin(&mut self, head: u16) {
        self.record.set_counter(head, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.record.set_in_flight(head, true);
    }

    /// A chain has its place in the used ring, which the driver has not been shown.
    #[inline]
    pub(in crate::ring) fn add_used(&mut self, head: u16) {
        let record = &mut self.record;
        record.set(record.state(head), NEXT, record.get(record.header(), LAST_BATCH_HEAD));
        record.set(record.header(), LAST_BATCH_HEAD, head);
    }

    /// The driver has been shown the used ring from `old` up to `new`.
    #[inline]
    pub(in crate::ring) fn publish(&mut self, old: u16, new: u16) {
        // A head that does not exist was written there by somebody else, whose loss it is.
        let _ = self.end_batch(old, new);
    }

    /// Takes the last chains used, from the index `old` up to `new`, out of flight.
    #[inline]
    fn end_batch(&mut self, old: u16, new: u16) -> Result<(), RecordError> {
        if old == new {
            return Ok(());
        }
        let record = &mut self.record;
        let mut head = record.get(record.header(), LAST_BATCH_HEAD);
        for _ in 0..new.wrapping_sub(old) {
            if head >= record.size {
                return Err(RecordError::NoSuchHead { head, ring: record.size });
            }
            record.set_in_flight(head, false);
            head = record.get(record.state(head), NEXT);
        }
        record.set(record.header(), USED_IDX, new);
        Ok(())
    }
}
