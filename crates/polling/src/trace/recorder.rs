//! The newest waits, in bounded memory.

use super::{Record, Trace};
use crate::BlockCost;

/// A ring of records: pushing never allocates and costs one store; the oldest make room.
pub struct Recorder {
    ring: Vec<Record>,
    oldest: usize,
    lost: u64,
    capacity: usize,
}

impl Recorder {
    /// Room for `capacity` waits, at least one and at most [`Trace::MOST_WAITS`], allocated here.
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.clamp(1, Trace::MOST_WAITS);
        Self { ring: Vec::with_capacity(capacity), oldest: 0, lost: 0, capacity }
    }

    /// Keeps `record`, in the place of the oldest if there is no other.
    pub fn push(&mut self, record: Record) {
        if self.ring.len() < self.capacity {
            self.ring.push(record);
            return;
        }
        self.ring[self.oldest] = record;
        self.oldest = (self.oldest + 1) % self.capacity;
        self.lost += 1;
    }

    /// What was kept, oldest first.
    pub fn into_trace(mut self, note: String, block: BlockCost) -> Trace {
        self.ring.rotate_left(self.oldest);
        Trace { note, block, lost: self.lost, waits: self.ring }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Nanos;

    #[test]
    fn a_full_recorder_keeps_the_newest_in_order_and_counts_the_rest() {
        let mut recorder = Recorder::new(3);
        for length in 1..=5 {
            recorder.push(Record { length: Nanos(length), ..Record::default() });
        }
        let trace = recorder.into_trace(String::new(), BlockCost::default());
        let lengths: Vec<_> = trace.waits.iter().map(|record| record.length.0).collect();
        assert_eq!(lengths, [3, 4, 5]);
        assert_eq!(trace.lost, 2);
    }

    #[test]
    fn there_is_room_for_a_wait_at_least_and_for_no_more_than_a_trace_may_have() {
        assert_eq!(Recorder::new(0).capacity, 1);
        assert_eq!(Recorder::new(usize::MAX).capacity, Trace::MOST_WAITS);
    }
}
