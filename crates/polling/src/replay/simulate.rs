//! One policy on one trace.

use crate::trace::Trace;
use crate::{Active, Kind, LastWait, Nanos, Policy, Slot, Standing, Wait};

/// A wait of a trace, ready to be replayed any number of times.
pub(super) struct Event {
    pub(super) length: Nanos,
    in_flight: u32,
    ended_by: Kind,
    active: Vec<Active>,
}

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

/// The true waits of `trace`, each with the active list of its time.
///
/// A source is on the list from its first event until [`IDLE`] without one, which is what the loop does too.
pub(super) fn events(trace: &Trace) -> Vec<Event> {
    /// `poll-idle-ms`, where it is left unset.
    const IDLE: Nanos = Nanos::from_millis(7_000);

    let mut clock = Nanos::ZERO;
    let mut list: Vec<(Slot, Kind, Nanos)> = Vec::new();
    trace
        .waits
        .iter()
        .zip(trace.true_lengths())
        .map(|(record, length)| {
            clock += length;
            for (slot, kind) in record.ready.iter() {
                match list.iter_mut().find(|source| source.0 == slot) {
                    Some(source) => *source = (slot, kind, clock),
                    None => list.push((slot, kind, clock)),
                }
            }
            list.retain(|&(_, _, last)| clock - last <= IDLE);
            let ready = |slot| record.ready.iter().any(|(other, _)| other == slot);
            let active = list
                .iter()
                .map(|&(slot, kind, _)| Active {
                    slot,
                    kind,
                    ready: ready(slot),
                })
                .collect();
            Event {
                length,
                in_flight: record.in_flight,
                ended_by: record.ended_by,
                active,
            }
        })
        .collect()
}

/// Runs `policy` over `events`; a block delays what the policy sees, as on the real thread, by `wakeup`.
pub(super) fn run(policy: &mut dyn Policy, events: &[Event], wakeup: Nanos) -> Tally {
    let mut tally = Tally::default();
    let mut last = LastWait::default();
    for event in events {
        let window = policy.window(&Standing {
            in_flight: event.in_flight,
            last,
        });
        let blocked = tally.add(event.length, window);
        let length = if blocked {
            event.length + wakeup
        } else {
            event.length
        };
        policy.observe(&Wait {
            length,
            spun: event.length.min(window),
            blocked,
            active: &event.active,
        });
        last = LastWait {
            kind: event.ended_by,
            length,
        };
    }
    tally
}
