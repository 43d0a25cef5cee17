//! One policy on one trace.

use crate::trace::{Ready, Trace};
use crate::{Active, EventKind, LastWait, Nanos, Policy, Standing, Wait};

/// What a policy's windows came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) waits: u64,
    pub(super) spin_found: Nanos,
    pub(super) spin_wasted: Nanos,
    pub(super) blocks: u64,
}

impl Tally {
    /// Adds a wait of `length` under a window of `window`; returns whether it blocked.
    pub(super) fn add(&mut self, length: Nanos, window: Nanos) -> bool {
        let blocked = length > window;
        self.waits += 1;
        if blocked {
            self.spin_wasted += window;
            self.blocks += 1;
        } else {
            self.spin_found += length;
        }
        blocked
    }
}

/// Runs `policy` over `trace`; a block delays what the policy sees, as on the real thread, by `wakeup`.
pub(super) fn run(policy: &mut dyn Policy, trace: &Trace, wakeup: Nanos) -> Tally {
    let mut tally = Tally::default();
    let mut active = ActiveList::default();
    let mut last = LastWait::default();
    for (record, length) in trace.waits.iter().zip(trace.true_lengths()) {
        let active = active.after(length, &record.ready);
        if record.length == Nanos::ZERO {
            // No wait, and no more than the loop tells of it.
            if policy.observes_every_turn() {
                policy.observe(&Wait { length, spun: length, blocked: false, active });
            }
            continue;
        }
        let in_flight = record.in_flight;
        let window = policy.window(&Standing { in_flight, last, ..Standing::default() });
        let blocked = tally.add(length, window);
        let seen = if blocked { length + wakeup } else { length };
        policy.observe(&Wait { length: seen, spun: length.min(window), blocked, active });
        last = LastWait { kind: record.ended_by, length: seen };
    }
    tally
}

/// The active list, followed through a trace.
///
/// A guest's queue is on it from its first event until [`IDLE`](Self::IDLE) without one, and engines are always, which is
/// what the loop does too.
#[derive(Default)]
struct ActiveList {
    sources: Vec<Active>,
    /// When each of `sources` was last ready.
    last_ready: Vec<Nanos>,
    clock: Nanos,
    /// When somebody last looked for those without an event.
    looked: Nanos,
}

impl ActiveList {
    /// `poll-idle-ms`, where it is left unset.
    const IDLE: Nanos = Nanos::from_millis(7_000);

    /// The list at the end of a wait of `length` that `ready` ended.
    fn after(&mut self, length: Nanos, ready: &Ready) -> &[Active] {
        self.clock += length;
        self.sources.iter_mut().for_each(|source| source.ready = false);
        for (slot, kind) in ready.iter() {
            let ready = Active { slot, kind, ready: true };
            match self.sources.iter().position(|source| source.slot == slot) {
                Some(index) => {
                    self.sources[index] = ready;
                    self.last_ready[index] = self.clock;
                }
                None => {
                    self.sources.push(ready);
                    self.last_ready.push(self.clock);
                }
            }
        }
        if self.clock - self.looked >= Nanos(Self::IDLE.0 / 4) {
            self.looked = self.clock;
            self.drop_idle();
        }
        &self.sources
    }

    fn drop_idle(&mut self) {
        let mut index = 0;
        while index < self.sources.len() {
            let is_engine = self.sources[index].kind == EventKind::Completion;
            if !is_engine && self.clock - self.last_ready[index] >= Self::IDLE {
                self.sources.swap_remove(index);
                self.last_ready.swap_remove(index);
            } else {
                index += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Slot;

    fn ready(slots: &[u32]) -> Ready {
        let mut ready = Ready::default();
        slots.iter().for_each(|&slot| ready.push(Slot(slot), EventKind::Queue));
        ready
    }

    /// Slots on the list, those ready marked.
    fn seen(list: &[Active]) -> Vec<(u32, bool)> {
        list.iter().map(|source| (source.slot.0, source.ready)).collect()
    }

    #[test]
    fn a_source_joins_the_list_at_its_first_event_and_leaves_it_when_it_has_been_idle_long() {
        let mut list = ActiveList::default();
        let second = Nanos::from_millis(1_000);
        assert_eq!(seen(list.after(second, &ready(&[3]))), [(3, true)]);
        assert_eq!(seen(list.after(second, &ready(&[5]))), [(3, false), (5, true)]);
        let later = Nanos::from_millis(6_500);
        assert_eq!(seen(list.after(later, &ready(&[5]))), [(5, true)]);
        assert_eq!(seen(list.after(second, &ready(&[]))), [(5, false)]);
    }
}
