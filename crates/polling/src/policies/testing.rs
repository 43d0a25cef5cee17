//! Waits by hand, for the policies' tests.

use crate::{Active, EventKind, Nanos, Policy, Slot, Wait};

pub(crate) fn active(slot: u32, ready: bool) -> Active {
    Active { slot: Slot(slot), kind: EventKind::Queue, ready }
}

pub(crate) fn wait(length: u64, active: &[Active]) -> Wait<'_> {
    Wait { length: Nanos(length), spun: Nanos::ZERO, blocked: true, active }
}

/// Feeds waits that one source ended; returns the window after each.
pub(crate) fn windows(policy: &mut dyn Policy, waits: &[u64]) -> Vec<u64> {
    waits
        .iter()
        .map(|&length| {
            policy.observe(&wait(length, &[active(0, true)]));
            policy.window_now().0
        })
        .collect()
}
