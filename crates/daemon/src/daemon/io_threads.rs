//! I/O threads: loops, each on a thread of its own.

use std::thread::JoinHandle;

use egret_disk::{EngineOptions, Engines};
use egret_event_loop::{EventLoop, LoopHandle, LoopOptions, LoopStats, Nanos, spawn};
use egret_export::Worker;
use egret_polling::PolicyKind;
use egret_polling::trace::Trace;

use super::StartError;
use crate::schema::{Cpus, IoThread};

/// A loop on its thread. Dropping it ends it; nothing should be attached to it any more.
pub(super) struct RunningIoThread {
    handle: LoopHandle<Worker>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

impl RunningIoThread {
    pub(super) fn start(object: &IoThread) -> Result<Self, StartError> {
        let failed = |e: String| StartError::IoThread(object.id.clone(), e);
        let parameters = object.parameters();
        let options = LoopOptions {
            name: object.id.clone(),
            monitor: object.fd_monitor,
            policy: egret_polling::build(object.policy(), &parameters).map_err(|e| failed(e.to_string()))?,
            window_max: parameters.max,
            idle_after: Nanos::from_millis(object.poll_idle_ms.into()),
            calibrate: object.policy() == PolicyKind::LowRegret,
        };
        let (thread_pool_min, thread_pool_max) = (object.thread_pool_min, object.thread_pool_max);
        let aio_max_batch = u32::try_from(object.aio_max_batch).unwrap_or(u32::MAX);
        let (name, cpus) = (object.id.clone(), object.cpu_affinity.clone());
        let (handle, thread) = spawn(options, move |ring| {
            if let Some(cpus) = &cpus
                && let Err(e) = bind_this_thread(cpus)
            {
                tracing::warn!("iothread '{name}': cannot run on processors {cpus}: {e}");
            }
            Engines::new(EngineOptions {
                ring,
                thread_pool_min,
                thread_pool_max,
                aio_max_batch,
                ..EngineOptions::default()
            })
        })
        .map_err(|e| failed(e.to_string()))?;
        let new = Self { handle, thread: Some(thread) };
        if let Some(cost) = new.handle.call(|target| target.block_cost()).ok().flatten() {
            let (k, max) = (cost.total(parameters.price_or_default()), parameters.max);
            if k > max {
                // Known, and often meant: the cap is QEMU's default. Worth a line where somebody looks for one.
                tracing::info!("iothread '{}': blocking costs {k}, and poll-max-ns lets it spin for {max}", object.id);
            }
        }
        Ok(new)
    }

    pub(super) const fn handle(&self) -> &LoopHandle<Worker> {
        &self.handle
    }

    /// Keeps the newest `capacity` waits from here on, and what blocking costs beside them.
    pub(super) fn record_waits(&self, capacity: usize) -> std::io::Result<()> {
        self.handle.calibrate()?;
        self.handle.call(move |target| target.record_waits(capacity)).map_err(std::io::Error::other)
    }

    /// Ends the recording.
    pub(super) fn take_recording(&self, note: String) -> Option<Trace> {
        self.handle.call(|target| target.take_recording(note)).ok().flatten()
    }

    /// What it has counted since it began; `None` if it has ended.
    pub(super) fn stats(&self) -> Option<LoopStats> {
        self.handle.call(|target| *target.stats()).ok()
    }
}

impl Drop for RunningIoThread {
    fn drop(&mut self) {
        self.handle.send(EventLoop::stop);
        if let Some(Ok(Err(e))) = self.thread.take().map(JoinHandle::join) {
            tracing::error!("an I/O thread ended early: {e}");
        }
    }
}

fn bind_this_thread(cpus: &Cpus) -> rustix::io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(cpu.into()));
    rustix::thread::sched_setaffinity(None, &set)
}
