//! When an I/O thread spins, for how long, and what that cost.
//!
//! A loop that has nothing left to do can spin (look at its queues again and again: fast, and a core burnt) or block
//! (sleep in the kernel: frugal, and slow to wake). A [`Policy`] chooses, once per wait. Nothing here touches a
//! clock, a file or a thread: a policy sees only durations, so a recorded trace replays through exactly the code that
//! runs in production.
//!
//! ```text
//!  Parameters ── build ──► Policy ◄── window, observe ── the loop ── Recorder ──► Trace
//!                            ▲                                                     │
//!                            └──────────────── replay ◄── text, or builtin ◄───────┘
//! ```

#![forbid(unsafe_code)]

pub mod builtin;
mod cost;
mod idle;
mod kind;
mod low_regret;
mod nanos;
mod parameters;
mod policies;
mod policy;
pub mod replay;
pub mod trace;

pub use cost::{BlockCost, Contention};
pub use idle::Idleness;
pub use kind::{PolicyKind, UnknownPolicy, build};
pub use nanos::Nanos;
pub use parameters::{ParameterError, Parameters, Property};
pub use policy::{Active, Done, EventKind, HABITS, HabitTimes, LastWait, Policy, Slot, Standing, Wait};
