//! I/O threads: loops, each on a thread of its own.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use egret_disk::{Disk, EngineOptions, EngineSet};
use egret_event_loop::{ClockReads, EventLoop, LoopHandle, LoopOptions, LoopStats, MonitorChoice, Nanos, spawn};
use egret_export::Worker;
use egret_polling::trace::Trace;
use egret_polling::{ParameterError, Parameters, Policy, PolicyKind};
use egret_vocabulary::schema::{Cpus, Export, IoThread};

use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::calls::PATIENCE;
use super::{ChangeError, DEFAULT_IOTHREAD, Daemon, IoThreadCounters, StartError};
use crate::process::abort;

/// How long a thread may take to answer when the daemon is about to end.
const ANSWER: Duration = Duration::from_secs(1);

impl Daemon {
    /// Starts an I/O thread.
    ///
    /// # Errors
    /// Its name is taken, or the system has no room for it.
    pub fn add_io_thread(&mut self, object: IoThread) -> Result<(), ChangeError> {
        if self.config.has_object(&object.id) {
            return Err(ChangeError::DuplicateObject(object.id));
        }
        self.start_io_thread(&object)?;
        self.config.iothreads.push(object);
        Ok(())
    }

    pub(super) fn start_io_thread(&mut self, object: &IoThread) -> Result<(), StartError> {
        let running = RunningIoThread::start(object)?;
        if let Some(capacity) = self.recorded_waits {
            let failed = |e: std::io::Error| StartError::IoThread(object.id.clone(), e.to_string());
            running.record_waits(capacity).map_err(failed)?;
        }
        self.registry.register_io_thread(&object.id, running.counters.clone());
        self.io_threads.insert(object.id.clone(), running);
        Ok(())
    }

    /// Makes the engines that an export's disks need on its I/O threads: without them each client's session would be ended when
    /// its queues start, and nobody be told before.
    pub(super) fn make_engines<'a>(
        &self,
        export: &Export,
        disks: impl IntoIterator<Item = &'a Arc<Disk>> + Clone,
    ) -> Result<(), StartError> {
        for thread in iothreads_of(export).collect::<BTreeSet<_>>() {
            let disks = disks.clone().into_iter().cloned().collect();
            let made = self.io_threads[thread].make_engines(disks);
            made.map_err(|e| StartError::Engine(export.id.clone(), e))?;
        }
        Ok(())
    }

    /// Ends an I/O thread.
    ///
    /// # Errors
    /// There is none of this name, or an export runs on it, or it is stuck.
    pub fn remove_io_thread(&mut self, id: &str) -> Result<(), ChangeError> {
        let Some(running) = self.io_threads.get(id) else { return Err(ChangeError::NoObject(id.to_owned())) };
        if self.config.exports.iter().any(|export| iothreads_of(export).any(|name| name == id)) {
            return Err(ChangeError::ObjectInUse(id.to_owned()));
        }
        self.await_answers([id])?;
        // A queue that stops is where it was until its requests have ended, whatever its export was told meanwhile.
        if running.handle.call(|target| target.sources().next().is_some()).unwrap_or(false) {
            return Err(ChangeError::ObjectInUse(id.to_owned()));
        }
        self.config.iothreads.retain(|object| object.id != id);
        self.registry.unregister_io_thread(id);
        self.io_threads.remove(id);
        Ok(())
    }

    /// Changes an I/O thread to be as `object` says, while it runs.
    ///
    /// # Errors
    /// There is none of this name, or it is stuck, or a property differs that is fixed while it runs.
    pub fn change_io_thread(&mut self, object: IoThread) -> Result<(), ChangeError> {
        let Some(at) = self.config.iothreads.iter().position(|now| now.id == object.id) else {
            return Err(ChangeError::NoObject(object.id));
        };
        let now = &self.config.iothreads[at];
        if now.fd_monitor != object.fd_monitor {
            return Err(ChangeError::Fixed(object.id, "fd-monitor".to_owned()));
        }
        self.await_answers([object.id.as_str()])?;
        if let Some(running) = self.io_threads.get(&object.id) {
            running.change(now, &object)?;
        }
        self.config.iothreads[at] = object;
        Ok(())
    }

    /// Sees to it that threads come to what they are told, before a change tells them anything: one that is stuck has whoever
    /// waits for it wait for as long as that lasts, and with him all changes, and the end.
    pub(super) fn await_answers<'a>(&self, names: impl IntoIterator<Item = &'a str>) -> Result<(), StartError> {
        let mut running = names.into_iter().filter_map(|name| Some((name, self.io_threads.get(name)?)));
        match running.find(|(_, running)| !running.handle.answers_within(PATIENCE)) {
            None => Ok(()),
            Some((name, _)) => {
                let line = format!("it is stuck: no turn in {} s; try again when it goes on", PATIENCE.as_secs());
                Err(StartError::IoThread(name.to_owned(), line))
            }
        }
    }

    /// The number of an I/O thread's thread, as `ps -L` shows it.
    pub fn thread_id(&self, id: &str) -> Option<i32> {
        Some(self.io_threads.get(id)?.counters.thread_id)
    }
}

/// The I/O threads that an export's queues are to be on, one for each queue.
pub(super) fn iothreads_of(export: &Export) -> impl Iterator<Item = &str> + Clone {
    (0..export.num_queues()).map(|queue| export.iothread_of(queue).unwrap_or(DEFAULT_IOTHREAD))
}

/// What an I/O thread runs with.
#[derive(Debug, PartialEq)]
struct Options {
    name: String,
    monitor: MonitorChoice,
    policy: PolicyKind,
    parameters: Parameters,
    idle_after: Nanos,
    aio_max_batch: u32,
    thread_pool_min: u32,
    thread_pool_max: u32,
    cpus: Option<Cpus>,
    clock_reads: ClockReads,
}

impl Options {
    /// What an object comes to. It takes the object apart, so that a property that nobody reads does not compile.
    fn of(object: &IoThread) -> Self {
        let IoThread {
            id,
            // The policy has a default, and `parameters` takes the properties that shape it.
            poll_policy: _,
            poll_max_ns: _,
            poll_grow: _,
            poll_shrink: _,
            poll_weight: _,
            poll_price: _,
            poll_idle_ms,
            aio_max_batch,
            thread_pool_min,
            thread_pool_max,
            fd_monitor,
            cpu_affinity,
            x_clock_per_request,
        } = object.clone();
        Self {
            name: id,
            monitor: fd_monitor,
            policy: object.policy(),
            parameters: object.parameters(),
            idle_after: Nanos::from_millis(poll_idle_ms.into()),
            aio_max_batch: batch(aio_max_batch),
            thread_pool_min,
            thread_pool_max,
            cpus: cpu_affinity,
            clock_reads: if x_clock_per_request { ClockReads::ByRequest } else { ClockReads::ByPhase },
        }
    }

    fn build_policy(&self) -> Result<Box<dyn Policy>, StartError> {
        let failed = |e: ParameterError| StartError::IoThread(self.name.clone(), e.to_string());
        egret_polling::build(self.policy, &self.parameters).map_err(failed)
    }
}

/// A loop on its thread. Dropping it ends it; nothing should be attached to it any more.
pub(super) struct RunningIoThread {
    handle: LoopHandle<Worker>,
    counters: IoThreadCounters,
    thread: Option<JoinHandle<()>>,
}

impl RunningIoThread {
    pub(super) fn start(object: &IoThread) -> Result<Self, StartError> {
        let options = Options::of(object);
        if let Some(line) = polls_as_qemu(None, object) {
            tracing::info!("{line}");
        }
        let policy = options.build_policy()?;
        let Options {
            name,
            monitor,
            policy: kind,
            parameters,
            idle_after,
            aio_max_batch,
            thread_pool_min,
            thread_pool_max,
            cpus,
            clock_reads,
        } = options;
        let window_max = parameters.max_for(kind);
        let failed = |e: String| StartError::IoThread(object.id.clone(), e);
        let options = LoopOptions { name: name.clone(), monitor, policy, window_max, idle_after, clock_reads };
        let (bound, is_bound) = channel();
        let engines = move |ring| {
            // Before anything that would not be bound with it.
            if let Some(cpus) = &cpus {
                let _ = bound.send(bind_this_thread(Some(cpus)));
            }
            let mut engines = EngineSet::new(EngineOptions {
                ring,
                thread_pool_min,
                thread_pool_max,
                aio_max_batch,
                ..EngineOptions::default()
            });
            engines.make_ring_ahead();
            engines
        };
        let name = object.id.clone();
        // Its exports would be there and serve nobody.
        let give_up = move |e| abort(format_args!("iothread '{name}' cannot go on: {e}"));
        let (handle, thread) = spawn(options, engines, give_up).map_err(|e| failed(e.to_string()))?;
        let asked = handle.call(|target: &mut EventLoop<Worker>| {
            (rustix::thread::gettid().as_raw_nonzero().get(), Arc::clone(target.backend().counters()))
        });
        let (thread_id, engines) = asked.map_err(|e| failed(e.to_string()))?;
        let turns = Arc::clone(handle.counters());
        let counters = IoThreadCounters { thread_id, turns, engines, stalls: Arc::default() };
        let new = Self { handle, counters, thread: Some(thread) };
        if let Ok(Err(e)) = is_bound.try_recv() {
            return Err(failed(not_bound(e)));
        }
        if let Some(cost) = new.handle.call(|target| target.block_cost()).ok().flatten() {
            let (k, max) = (cost.total(parameters.price_or_default()), window_max);
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

    /// Makes the engines that `disks` need, or says why they cannot be had.
    fn make_engines(&self, disks: Vec<Arc<Disk>>) -> Result<(), String> {
        let made =
            self.handle.call(move |target| disks.iter().try_for_each(|disk| target.backend().make_engines(disk)));
        made.map_err(|e| e.to_string())?.map_err(|e| e.to_string())
    }

    /// Keeps the newest `capacity` waits from here on, and what blocking costs beside them.
    pub(super) fn record_waits(&self, capacity: usize) -> std::io::Result<()> {
        self.handle.calibrate()?;
        self.handle.call(move |target| target.record_waits(capacity)).map_err(std::io::Error::other)
    }

    /// Ends the recording; `None` if there was none, or the thread does not answer.
    pub(super) fn take_recording(&self, note: String) -> Option<Trace> {
        let (answer, answered) = channel();
        self.handle.send(move |target| {
            let _ = answer.send(target.take_recording(note));
        });
        answered.recv_timeout(ANSWER).ok().flatten()
    }

    /// Goes from `now` to `object` at its next turn; what a policy had learned is gone with it.
    fn change(&self, now: &IoThread, object: &IoThread) -> Result<(), StartError> {
        let failed = |e: String| StartError::IoThread(object.id.clone(), e);
        let line = polls_as_qemu(Some(now), object);
        let (now, new) = (Options::of(now), Options::of(object));
        // Its name is who it is, and its monitor cannot change.
        let Options {
            name: _,
            monitor: _,
            policy,
            parameters,
            idle_after,
            aio_max_batch,
            thread_pool_min,
            thread_pool_max,
            ref cpus,
            clock_reads,
        } = new;
        if let Some(line) = line {
            tracing::info!("{line}");
        }
        if (now.policy, now.parameters) != (policy, parameters) {
            self.handle
                .set_policy(new.build_policy()?, parameters.max_for(policy))
                .map_err(|e| failed(e.to_string()))?;
        }
        if now.idle_after != idle_after {
            self.handle.send(move |target| target.set_idle_after(idle_after));
        }
        if now.clock_reads != clock_reads {
            self.handle.send(move |target| target.set_clock_reads(clock_reads));
        }
        if now.aio_max_batch != aio_max_batch {
            self.handle.send(move |target| target.backend().set_aio_max_batch(aio_max_batch));
        }
        if (now.thread_pool_min, now.thread_pool_max) != (thread_pool_min, thread_pool_max) {
            self.handle.send(move |target| target.backend().set_thread_pool(thread_pool_min, thread_pool_max));
        }
        if now.cpus != *cpus {
            let cpus = cpus.clone();
            let bound = self.handle.call(move |target| {
                bind_this_thread(cpus.as_ref())?;
                // Others come in the place of its workers, which run where they were started.
                target.backend().set_thread_pool(thread_pool_min, thread_pool_max);
                Ok(())
            });
            bound.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(not_bound(e)))?;
        }
        Ok(())
    }

    /// What it has counted since it began.
    pub(super) fn stats(&self) -> LoopStats {
        self.counters.turns.read()
    }
}

impl Drop for RunningIoThread {
    fn drop(&mut self) {
        self.handle.send(EventLoop::stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the log says where an I/O thread polls by QEMU's policy from here on, because its properties are set and none is named.
fn polls_as_qemu(before: Option<&IoThread>, object: &IoThread) -> Option<String> {
    let is_new = object.asks_for_qemus() && !before.is_some_and(IoThread::asks_for_qemus);
    let line = "it polls as QEMU does (weighted), whose properties are set; poll-policy names others";
    is_new.then(|| format!("iothread '{}': {line}", object.id))
}

/// `aio-max-batch`, as engines take it.
pub(super) fn batch(most: u64) -> u32 {
    u32::try_from(most).unwrap_or(u32::MAX)
}

/// Why a thread does not run on the processors of its `cpu-affinity`.
fn not_bound(error: Errno) -> String {
    match error {
        Errno::INVAL => "cpu-affinity names no processor that is there and that the daemon may use".to_owned(),
        error => format!("cpu-affinity: {error}"),
    }
}

/// Has this thread run on `cpus`, or wherever the daemon's main thread may.
fn bind_this_thread(cpus: Option<&Cpus>) -> rustix::io::Result<()> {
    if let Some(cpus) = cpus {
        return sched_setaffinity(None, &set_of(cpus.iter().map(usize::from)));
    }
    // Not on those where the main thread may by now: it would stay there when the daemon is given others.
    sched_setaffinity(None, &set_of(0..CpuSet::MAX_CPU))?;
    let of_main = sched_getaffinity(Some(rustix::process::getpid()))?;
    // Unless that is less than there is, because somebody has bound the daemon.
    if sched_getaffinity(None)? == of_main { Ok(()) } else { sched_setaffinity(None, &of_main) }
}

fn set_of(cpus: impl Iterator<Item = usize>) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.for_each(|cpu| set.set(cpu));
    set
}

#[cfg(test)]
mod tests {
    use egret_vocabulary::keyval;
    use egret_vocabulary::schema::Object as _;

    use super::*;

    fn io_thread(text: &str) -> IoThread {
        let (value, spelling) = keyval::read(text, "id").unwrap();
        IoThread::from_value(value, spelling).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn options(text: &str) -> Options {
        Options::of(&io_thread(text))
    }

    #[test]
    fn each_property_of_qemus_policy_is_said_to_ask_for_it_at_the_start_and_when_it_is_set_later() {
        let plain = io_thread("io0,poll-max-ns=1000,poll-price=2");
        assert_eq!(polls_as_qemu(None, &plain), None);
        for property in ["poll-grow=2", "poll-shrink=2", "poll-weight=2"] {
            let asks = io_thread(&format!("io0,{property}"));
            assert_eq!(Options::of(&asks).policy, PolicyKind::Weighted, "{property}");
            for before in [None, Some(&plain)] {
                let line = polls_as_qemu(before, &asks).unwrap_or_else(|| panic!("nothing is said of {property}"));
                assert!(line.starts_with("iothread 'io0': it polls as QEMU does (weighted)"), "{line}");
            }
            // It has been said, and who names a policy knows.
            assert_eq!(polls_as_qemu(Some(&asks), &io_thread("io0,poll-weight=5")), None);
            assert_eq!(polls_as_qemu(None, &io_thread(&format!("io0,poll-policy=weighted,{property}"))), None);
        }
    }

    /// Properties, each with a value beside its default.
    const OTHERWISE: [(&str, &str); 14] = [
        ("id", "io1"),
        ("poll-max-ns", "1"),
        ("poll-grow", "4"),
        ("poll-shrink", "0"),
        ("poll-weight", "4"),
        ("poll-policy", "busy"),
        ("poll-price", "2"),
        ("poll-idle-ms", "1"),
        ("aio-max-batch", "1"),
        ("thread-pool-min", "1"),
        ("thread-pool-max", "1"),
        ("fd-monitor", "epoll"),
        ("cpu-affinity", "0"),
        ("x-clock-per-request", "on"),
    ];

    #[test]
    fn each_key_of_an_iothread_changes_what_its_thread_runs_with() {
        for name in IoThread::KEYS.iter().map(|key| key.name) {
            let found = OTHERWISE.iter().find(|(key, _)| *key == name);
            let (_, value) = found.unwrap_or_else(|| panic!("OTHERWISE has no value for {name}"));
            assert_ne!(options(&format!("io0,{name}={value}")), options("io0"), "{name}");
        }
    }
}
