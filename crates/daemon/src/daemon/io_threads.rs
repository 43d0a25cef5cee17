//! I/O threads: loops, each on a thread of its own.

use std::thread::JoinHandle;

use egret_disk::{EngineOptions, Engines};
use egret_event_loop::{EventLoop, LoopHandle, LoopOptions, LoopStats, Nanos, spawn};
use egret_export::Worker;

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
        Ok(Self { handle, thread: Some(thread) })
    }

    pub(super) const fn handle(&self) -> &LoopHandle<Worker> {
        &self.handle
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
