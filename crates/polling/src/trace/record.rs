//! One wait, noted.

use crate::{EventKind, Nanos, Slot, Standing, Wait};

/// A wait as a trace keeps it: what the policy knew before it, and how it ended.
///
/// The active list is not kept. A source joins it at its first event and leaves it after a while without one, so the
/// ready sources of the waits before tell who was on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// As [`Wait::length`]: a blocked wait includes the wake-up.
    pub length: Nanos,
    /// As [`Wait::spun`].
    pub spun: Nanos,
    /// As [`Wait::blocked`].
    pub blocked: bool,
    /// As [`Standing::in_flight`].
    pub in_flight: u32,
    /// What the next wait's [`LastWait`](crate::LastWait) says ended this one.
    pub ended_by: EventKind,
    /// The sources on the active list that had an event.
    pub ready: Ready,
}

impl Record {
    /// Notes a wait; costs a few loads and never allocates.
    ///
    /// `before` is what the policy was given before the wait, `ended_by` what it will be told in the next one's.
    pub fn new(before: &Standing, wait: &Wait<'_>, ended_by: EventKind) -> Self {
        let mut ready = Ready::default();
        for source in wait.active.iter().filter(|source| source.ready) {
            ready.push(source.slot, source.kind);
        }
        Self {
            length: wait.length,
            spun: wait.spun,
            blocked: wait.blocked,
            in_flight: before.in_flight,
            ended_by,
            ready,
        }
    }

    /// The wait without the wake-up: what it would have been to a loop that spun on.
    pub(crate) fn true_length(&self, wakeup: Nanos) -> Nanos {
        if self.blocked { (self.length - wakeup).max(self.spun) } else { self.length }
    }
}

/// The sources that were ready at the end of a wait: the first six of them, and how many more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// A slot, and in the two lowest bits its kind.
    sources: [u32; Self::KEPT],
    kept: u8,
    more: u16,
}

impl Ready {
    /// How many are kept by name.
    pub const KEPT: usize = 6;
    /// Slots from here on are only counted. A loop's are small, and a replay allocates by the highest.
    pub(crate) const MOST_SLOTS: u32 = 1 << 16;

    /// Adds a source; beyond the sixth it is only counted.
    pub fn push(&mut self, slot: Slot, kind: EventKind) {
        let kept = usize::from(self.kept);
        if kept == Self::KEPT || slot.0 >= Self::MOST_SLOTS {
            self.more = self.more.saturating_add(1);
            return;
        }
        self.sources[kept] = slot.0 << 2 | kind as u32;
        self.kept += 1;
    }

    /// The sources kept by name, in the order they were added.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, EventKind)> + '_ {
        self.sources[..usize::from(self.kept)].iter().map(|&packed| {
            let kind = match packed & 3 {
                q if q == EventKind::Queue as u32 => EventKind::Queue,
                c if c == EventKind::Completion as u32 => EventKind::Completion,
                _ => EventKind::Other,
            };
            (Slot(packed >> 2), kind)
        })
    }

    /// How many sources were ready beyond those kept.
    pub fn more(&self) -> u16 {
        self.more
    }

    pub(crate) fn set_more(&mut self, more: u16) {
        self.more = more;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Active;

    #[test]
    fn a_record_keeps_the_ready_sources_and_counts_those_it_cannot_keep() {
        let active: Vec<_> = (0..20)
            .map(|slot| Active { slot: Slot(slot), kind: EventKind::Completion, ready: slot % 2 == 1 })
            .collect();
        let wait = Wait { length: Nanos(9), spun: Nanos(9), blocked: false, active: &active };
        let record = Record::new(&Standing { in_flight: 3, ..Standing::default() }, &wait, EventKind::Completion);
        let slots: Vec<_> = record.ready.iter().map(|(slot, _)| slot.0).collect();
        assert_eq!(slots, [1, 3, 5, 7, 9, 11]);
        assert_eq!(record.ready.more(), 4);
        assert_eq!(record.in_flight, 3);
    }

    #[test]
    fn the_wakeup_comes_off_a_blocked_wait_but_never_more_than_was_slept() {
        let spun = Record { length: Nanos(50), spun: Nanos(50), ..Record::default() };
        assert_eq!(spun.true_length(Nanos(20)), Nanos(50));
        let blocked = Record { spun: Nanos(40), blocked: true, ..spun };
        assert_eq!(blocked.true_length(Nanos(5)), Nanos(45));
        assert_eq!(blocked.true_length(Nanos(20)), Nanos(40));
    }

    #[test]
    fn a_record_stays_small_enough_for_a_ring_of_many() {
        assert!(size_of::<Record>() <= 56);
    }

    #[test]
    fn six_sources_with_small_slots_are_kept_with_their_kinds_and_all_others_counted() {
        let highest = Ready::MOST_SLOTS - 1;
        let kinds = [EventKind::Queue, EventKind::Completion, EventKind::Other];
        let sources: Vec<_> = kinds.into_iter().flat_map(|kind| [(Slot(1), kind), (Slot(highest), kind)]).collect();
        let mut ready = Ready::default();
        ready.push(Slot(highest + 1), EventKind::Queue);
        assert_eq!((ready.iter().count(), ready.more()), (0, 1));
        sources.iter().for_each(|&(slot, kind)| ready.push(slot, kind));
        assert_eq!((ready.iter().collect::<Vec<_>>(), ready.more()), (sources.clone(), 1));
        (0..70_000).for_each(|_| ready.push(Slot(0), EventKind::Queue));
        assert_eq!((ready.iter().collect::<Vec<_>>(), ready.more()), (sources, u16::MAX));
    }
}
