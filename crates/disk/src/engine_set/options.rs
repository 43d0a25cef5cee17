//! What is chosen once for all engines of an I/O thread.

use egret_event_loop::Nanos;
use egret_event_loop::ring::SharedRing;

use crate::engine::{WorkerLimits, native};

/// How the engines of an I/O thread are made.
#[derive(Clone)]
pub struct EngineOptions {
    /// The loop's ring; without it an io_uring engine makes its own.
    pub ring: Option<SharedRing>,
    /// Worker threads that stay.
    pub thread_pool_min: u32,
    /// The most worker threads.
    pub thread_pool_max: u32,
    /// How long a worker thread beyond the minimum waits for work before it leaves.
    pub thread_pool_idle: Nanos,
    /// The most requests that `aio=native` gives to the kernel in one system call; 0 leaves it to the engine.
    pub aio_max_batch: u32,
    /// Requests of `aio=native` in the kernel at a time; more wait in user space. Contexts count against
    /// `/proc/sys/fs/aio-max-nr` with it.
    pub aio_depth: u32,
}

impl EngineOptions {
    pub(super) fn workers(&self) -> WorkerLimits {
        let Self { thread_pool_min: min, thread_pool_max: max, thread_pool_idle: idle, .. } = *self;
        WorkerLimits { min, max, idle: idle.into() }
    }
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            ring: None,
            thread_pool_min: 0,
            thread_pool_max: 64,
            thread_pool_idle: Nanos::from_millis(10_000),
            aio_max_batch: 0,
            aio_depth: native::DEPTH,
        }
    }
}
