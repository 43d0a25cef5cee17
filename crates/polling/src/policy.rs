//! The contract between the loop and whatever decides how long it spins.

use crate::{BlockCost, Contention, Nanos};

/// A small dense number by which the loop names one source; free for reuse after [`Policy::forget`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot(pub u32);

/// What a source tells of, as far as a policy may care.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A guest made requests available, or a client over NBD sent some.
    Queue,
    /// An engine finished requests.
    Completion,
    /// Everything rarer: the mailbox, a timer, or nothing yet.
    #[default]
    Other,
}

/// How the last wait ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LastWait {
    /// What ended it.
    pub kind: EventKind,
    /// How long it was, as [`Wait::length`].
    pub length: Nanos,
}

/// What the loop did between two waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Requests that engines gave back.
    pub requests: u32,
    /// From the end of the last wait to the beginning of the coming one.
    pub took: Nanos,
}

/// What the loop knows before a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Requests that engines hold now.
    pub in_flight: u32,
    /// What was done since the last wait; nothing in a replay, for a trace does not tell.
    pub done: Done,
    /// CPU time that the thread has had so far, where the policy [wanted to know](Policy::wants_cpu_time) and the thread
    /// can tell.
    pub cpu: Option<Nanos>,
    /// How the wait before this one ended.
    pub last: LastWait,
}

/// What a policy that compares habits calls them: to wait as single waits would have it; to spin for so many nanoseconds; to
/// spin to the end.
pub const HABITS: [&str; 5] = ["learned", "0", "4000", "16000", "endless"];

/// Something about each of the [`HABITS`]: a time.
pub type HabitTimes = [Nanos; HABITS.len()];

/// One source on the active list during a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Active {
    /// Which source.
    pub slot: Slot,
    /// What it tells of.
    pub kind: EventKind,
    /// Whether it had an event when the wait ended.
    pub ready: bool,
}

/// A wait that has just ended.
#[derive(Clone, Copy, Debug)]
pub struct Wait<'a> {
    /// From having nothing left to dispatch until a source was ready, spinning and blocking together.
    pub length: Nanos,
    /// The part of `length` that was spent spinning.
    pub spun: Nanos,
    /// Whether the loop gave up spinning and slept.
    pub blocked: bool,
    /// The active list, in no particular order.
    pub active: &'a [Active],
}

/// Decides, once per wait, how long an I/O thread spins before it blocks.
///
/// A policy sees only durations, never a clock, so a recorded trace replays through exactly the code that runs in
/// production. The loop calls [`window`](Self::window) before each wait and [`observe`](Self::observe) after it,
/// strictly in turn. Neither may allocate, except when a slot is seen for the first time.
///
/// A policy that expects each wait to be about as long as the last one:
///
/// ```
/// use egret_polling::{Nanos, Policy, Slot, Standing, Wait};
///
/// struct AsLast {
///     max: Nanos,
///     window: Nanos,
/// }
///
/// impl Policy for AsLast {
///     fn window(&mut self, _before: &Standing) -> Nanos {
///         self.window
///     }
///
///     fn observe(&mut self, wait: &Wait<'_>) {
///         let twice = wait.length + wait.length;
///         self.window = if twice <= self.max { twice } else { Nanos::ZERO };
///     }
///
///     fn forget(&mut self, _slot: Slot) {}
///
///     fn window_now(&self) -> Nanos {
///         self.window
///     }
/// }
///
/// let mut policy = AsLast { max: Nanos(32_768), window: Nanos::ZERO };
/// for (length, window) in [(10_000, 20_000), (100_000, 0)] {
///     policy.observe(&Wait { length: Nanos(length), spun: Nanos::ZERO, blocked: true, active: &[] });
///     assert_eq!(policy.window(&Standing::default()), Nanos(window));
/// }
/// ```
pub trait Policy: Send {
    /// How long to spin before the coming wait blocks; zero blocks at once, [`Nanos::MAX`] never blocks.
    fn window(&mut self, before: &Standing) -> Nanos;

    /// Learns from a wait that has just ended.
    ///
    /// `wait.length` counts spinning and blocking, not the handlers that ran afterwards. A policy that models the wait
    /// takes the wake-up latency off a blocked one, or an oversleeping loop would teach itself to oversleep.
    fn observe(&mut self, wait: &Wait<'_>);

    /// Forgets a source that left the loop; its slot may be given to another.
    fn forget(&mut self, slot: Slot);

    /// About what the next wait will get, for telemetry; [`Nanos::MAX`] from a policy that never blocks.
    fn window_now(&self) -> Nanos;

    /// Whether its windows depend on what blocking costs, which takes 10 to 50 ms to measure.
    fn weighs_block_cost(&self) -> bool {
        false
    }

    /// Whether it is to observe the turns, too, before which there was nothing to wait for, as QEMU does: each is a wait of no
    /// length, with no [`window`](Self::window) before it.
    fn observes_every_turn(&self) -> bool {
        false
    }

    /// How often the interval of a source, or a window, has been set to nothing because waits were too long.
    fn resets(&self) -> u64 {
        0
    }

    /// Whether the coming [`window`](Self::window) is to be told the thread's CPU time, for which the loop asks the kernel.
    fn wants_cpu_time(&self) -> bool {
        false
    }

    /// How long each of its [`HABITS`] was in use, up to the last wait that was [told the CPU time](Self::wants_cpu_time), if it
    /// chooses between them.
    fn habits(&self) -> Option<HabitTimes> {
        None
    }

    /// Learns what blocking costs on this thread, at its start and whenever the loop knows better.
    ///
    /// A policy that does not weigh it ignores it.
    fn set_block_cost(&mut self, _cost: BlockCost) {}

    /// Learns whether somebody else wants this thread's core.
    ///
    /// A policy that does not weigh costs ignores it.
    fn contend(&mut self, _evidence: Contention) {}
}
