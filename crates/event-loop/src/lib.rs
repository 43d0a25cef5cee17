//! One I/O thread's turn: what is ready is dispatched, engines are told once, guests are told once.
//!
//! ```text
//!    other threads ──mailbox──▶ ┌───────────────┐ ◀──waits── policy (egret-polling)
//!                               │   EventLoop   │
//!    guests ─────source───────▶ │ wait reap     │ ◀──────── monitor: io_uring, epoll or ppoll
//!    (queues)                   │ dispatch      │
//!                               │ submit notify │ ──push──▶ backend (the engines)
//!                               └───────────────┘ ◀─reap───
//! ```
//!
//! A [`Source`] is what the loop watches and runs, a [`Backend`] what sources push work into. The loop owns both and
//! calls them on one thread; another thread speaks to it through a [`LoopHandle`].

#![deny(unsafe_code)]

pub mod aio;
mod backend;
#[cfg(test)]
#[allow(dead_code, missing_docs, reason = "the crate's other tests use the rest")]
#[path = "../tests/monitors/bell.rs"]
mod bell;
mod calibrate;
pub mod clock;
pub mod closer;
mod cost;
mod counter;
mod doorbell;
mod entry;
mod event_loop;
mod handle;
#[cfg(test)]
#[path = "../tests/lingering/mod.rs"]
mod lingering;
mod mailbox;
mod monitor;
mod notifier;
mod polling;
#[cfg(test)]
#[path = "../tests/refuse/mod.rs"]
mod refuse;
pub mod rights;
pub mod ring;
mod signals;
mod source;
mod sources;
mod stats;
mod timers;
mod wait;

/// By the name that the other tests know it by.
#[cfg(test)]
extern crate self as egret_event_loop;

/// What the wake-up protocol and the mailbox are made of; their tests put loom's in their place.
mod sync {
    pub use std::sync::Mutex;
    pub use std::sync::atomic::{AtomicBool, Ordering, fence};
}

pub use backend::Backend;
pub use calibrate::{Calibration, calibrate};
pub use clock::ClockReads;
pub use closer::FromPeer;
pub use counter::Counter;
pub use doorbell::Doorbell;
pub use egret_polling::Nanos;
pub use event_loop::{EventLoop, LoopOptions};
pub use handle::{Leaving, LoopGone, LoopHandle, spawn};
pub use monitor::MonitorChoice;
pub use notifier::EventNotifier;
pub use signals::Signals;
pub use source::{Source, SourceId, Turn};
pub use stats::{LoopCounters, LoopStats, Phase};
