//! Queues that change their I/O threads while they run.
//!
//! ```text
//!   who asks             old loop                        new loop
//!   prepare ───────────────────────────────────────────▶ its engines take the disks in
//!   move ──────────────▶ stop, drain, take out ─worker─▶ attach, look for what came meanwhile
//!   ◀──────────────────────────────────────────────────  where it is, and how long nobody served it
//! ```
//!
//! The loops hand the worker over by themselves: were it to pass through a third thread, the queue would wait for that
//! one to be scheduled too. A kick that falls in between is not lost, because a loop looks at a source that is new to
//! it before it waits for the first time.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use egret_disk::{Disk, DiskSlot};
use egret_event_loop::{LoopHandle, Nanos, clock};

use crate::export::{Export, ExportError};
use crate::queues::{Queues, RunningQueue, lock};
use crate::source::Worker;

/// How long a change waits for requests in flight, or for a queue that starts, before it is given up; [`ExportError::Busy`] and
/// [`ExportError::Starts`] say it too.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// How long a change had queues wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pause {
    /// From when the first queue stopped to take requests in until the last one was served again.
    pub whole: Nanos,
    /// Of that, until the requests in flight had ended and their loop had seen it: the disk's part.
    pub drain: Nanos,
}

/// Queues, each with the loop that it is to run on.
type Targets = Vec<(usize, LoopHandle<Worker>)>;

/// A queue that was to move: where it is now, how long it was not served, and what was in the way.
struct Moved {
    queue: usize,
    at: Result<RunningQueue, Worker>,
    pause: Pause,
    problem: Option<Problem>,
}

enum Problem {
    Busy,
    System(io::Error),
}

impl Export {
    /// Has queues run elsewhere, from here on: those that have disks on the loop `i % loops.len()`, counted from 0, and
    /// the others on the first. Returns the longest time that a running queue was not served.
    ///
    /// # Errors
    ///
    /// A loop cannot run one of the disks, requests in flight do not end, or a queue does not come to start. Every queue is where
    /// it was, unless the error is [`ExportError::Scattered`] or [`ExportError::Stuck`].
    ///
    /// # Panics
    ///
    /// If there is no loop.
    pub fn run_on(&self, loops: &[LoopHandle<Worker>]) -> Result<Pause, ExportError> {
        let mut queues = self.shared.lock_started()?;
        let targets = self.shared.counts.assign(loops).into_iter().enumerate();
        let targets = targets.filter(|(queue, to)| queues.loops[*queue] != *to).collect::<Targets>();
        let system = |e| ExportError::System(self.shared.id.clone(), e);
        let diskless = self.shared.counts.diskless.into();
        let with_disks = targets.iter().filter(|(queue, _)| *queue >= diskless && queues.running[*queue].is_some());
        let mut prepared: Vec<Prepared> = Vec::new();
        for (_, to) in with_disks {
            if prepared.iter().all(|other| other.on != *to) {
                prepared.push(Prepared::new(to, &queues.disks).map_err(system)?);
            }
        }
        let home: Targets = targets.iter().map(|(queue, _)| (*queue, queues.loops[*queue].clone())).collect();
        let shifted = shift(&mut queues, targets);
        drop(prepared);
        // Those that have arrived go back; the others are there.
        shifted.map_err(|problem| match (shift(&mut queues, home), problem) {
            (Err(Problem::Busy), Problem::Busy) => ExportError::Scattered(self.shared.id.clone()),
            // Of two causes the first, for which they were to go back.
            (Err(Problem::System(e)), Problem::Busy) | (Err(_), Problem::System(e)) => {
                ExportError::Stuck(self.shared.id.clone(), e)
            }
            (Ok(_), Problem::Busy) => ExportError::Busy(self.shared.id.clone()),
            (Ok(_), Problem::System(e)) => system(e),
        })
    }

    /// Whether a queue is on this loop, or would be if it ran: one that has disks, counted from 0.
    pub fn is_on(&self, queue: u16, on: &LoopHandle<Worker>) -> bool {
        lock(&self.shared.queues).loops[usize::from(self.shared.counts.diskless + queue)] == *on
    }
}

/// Moves queues side by side. When it fails, some may be where they were, and others where they were to be.
fn shift(queues: &mut Queues, targets: Targets) -> Result<Pause, Problem> {
    let (tell, told) = channel();
    let mut moving = Vec::new();
    for (queue, to) in targets {
        match queues.running_queue(queue) {
            None => queues.loops[queue] = to,
            Some(place) if place.on == to => {}
            Some(place) => {
                hand_over(place.clone(), to, tell.clone());
                moving.push(place);
            }
        }
    }
    drop(tell);
    let mut pause = Pause::default();
    let mut problem = None;
    let patience_ends = Instant::now() + PATIENCE;
    while let Some(moved) = next(&mut moving, &told, patience_ends) {
        let queue = moved.queue;
        match moved.at {
            Ok(RunningQueue { on, id, .. }) => (queues.loops[queue], queues.running[queue]) = (on, Some(id)),
            Err(mut worker) => {
                worker.strand();
                tracing::error!("queue {queue} is served by nobody, until its client stops and starts it");
                queues.running[queue] = None;
                queues.stranded.push((queue, worker));
            }
        }
        pause = pause.max(moved.pause);
        problem = problem.or(moved.problem);
    }
    problem.map_or(Ok(pause), Err)
}

/// Has the loop of a queue give its worker to another loop, when it is drained, and that one tell.
fn hand_over(RunningQueue { queue, on, id }: RunningQueue, to: LoopHandle<Worker>, tell: Sender<Moved>) {
    let home = on.clone();
    on.send(move |target| {
        let begun = clock::now();
        target.detach(id, move |mut worker| {
            worker.set_home(to.clone());
            let drain = clock::now() - begun;
            to.clone().send(move |target| match target.attach(worker) {
                Ok(id) => {
                    let pause = Pause { whole: clock::now() - begun, drain };
                    let _ =
                        tell.send(Moved { queue, at: Ok(RunningQueue { queue, on: to, id }), pause, problem: None });
                }
                Err((worker, e)) => take_back(queue, worker, e, home, tell),
            });
        });
    });
}

/// Has a loop take back a worker that could not stay where it was sent.
fn take_back(queue: usize, mut worker: Worker, why: io::Error, home: LoopHandle<Worker>, tell: Sender<Moved>) {
    worker.set_home(home.clone());
    home.clone().send(move |target| {
        let at = target.attach(worker).map(|id| RunningQueue { queue, on: home, id }).map_err(|(worker, _)| worker);
        let _ = tell.send(Moved { queue, at, pause: Pause::default(), problem: Some(Problem::System(why)) });
    });
}

/// The next of those that move to have come to an end; `None` when all have.
fn next(moving: &mut Vec<RunningQueue>, told: &Receiver<Moved>, patience_ends: Instant) -> Option<Moved> {
    if moving.is_empty() {
        return None;
    }
    let arrived = told.recv_timeout(patience_ends.saturating_duration_since(Instant::now()));
    // A worker that has left its loop when the patience ends arrives at the other one at once.
    let moved = arrived.ok().or_else(|| stay(moving)).or_else(|| told.recv().ok())?;
    moving.retain(|place| place.queue != moved.queue);
    Some(moved)
}

/// Has one of those that move stay, because its requests do not end; `None` if all have set out.
fn stay(moving: &[RunningQueue]) -> Option<Moved> {
    let is_here = |place: &&RunningQueue| {
        let id = place.id;
        place.on.call(move |target| target.resume(id)).unwrap_or(true)
    };
    let place = moving.iter().find(is_here)?.clone();
    Some(Moved { queue: place.queue, at: Ok(place), pause: Pause::default(), problem: Some(Problem::Busy) })
}

/// Disks that a loop's engines keep, until this is dropped: that they cannot be had is known, and their engines are
/// made, before anything stops for them.
struct Prepared {
    on: LoopHandle<Worker>,
    slots: Vec<DiskSlot>,
}

impl Prepared {
    fn new(on: &LoopHandle<Worker>, disks: &[Option<Arc<Disk>>]) -> io::Result<Self> {
        let mut new = Self { on: on.clone(), slots: Vec::new() };
        for disk in disks.iter().flatten().cloned() {
            new.slots.push(take_in(on, disk)?);
        }
        Ok(new)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let slots = std::mem::take(&mut self.slots);
        self.on.send(move |target| slots.into_iter().for_each(|slot| target.backend().detach(slot)));
    }
}

/// Has a loop's engines take a disk in.
pub(crate) fn take_in(on: &LoopHandle<Worker>, disk: Arc<Disk>) -> io::Result<DiskSlot> {
    let asked = on.call(move |target| target.backend().attach(&disk)).map_err(io::Error::other)?;
    asked.map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread::JoinHandle;

    use egret_disk::{EngineOptions, EngineSet};
    use egret_event_loop::{ClockReads, EventLoop, EventNotifier, LoopOptions, MonitorChoice, spawn};
    use egret_polling::{Parameters, PolicyKind};
    use egret_virtio::Device;
    use egret_virtio::blk::{Blk, BlkConfig};
    use egret_virtio::scsi::{Scsi, ScsiConfig};
    use egret_vring::memory::{GuestMemory, Region};
    use egret_vring::ring::{Driver, DriverConfig, Piece};
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::export::DeviceType;
    use crate::peer_fd::PeerFd;
    use crate::queues::{QueueCounts, Shared};
    use crate::worker::tests::Guest;
    use crate::worker::{Leave, QueueWorker, VringFds};

    fn io(monitor: MonitorChoice) -> (LoopHandle<Worker>, JoinHandle<()>) {
        let options = LoopOptions {
            name: "io".into(),
            monitor,
            policy: egret_polling::build(PolicyKind::Off, &Parameters::default()).unwrap(),
            window_max: Nanos::ZERO,
            idle_after: Nanos::MAX,
            clock_reads: ClockReads::ByPhase,
        };
        let engines = |ring| EngineSet::new(EngineOptions { ring, ..EngineOptions::default() });
        spawn(options, engines, |e| panic!("{e}")).unwrap()
    }

    #[test]
    fn a_queue_that_cannot_run_elsewhere_goes_on_where_it_was_and_waits_for_who_stops_it_if_it_cannot_there_either() {
        // Only ppoll can wait for a plain file.
        for monitor in [MonitorChoice::Ppoll, MonitorChoice::Epoll] {
            let ((home, first), (away, second)) = (io(monitor), io(MonitorChoice::Epoll));
            let counts = QueueCounts { all: 2, diskless: 0 };
            let (memory, kickless, errors) = Default::default();
            let shared = Shared::new("e", counts, memory, kickless, errors, Vec::new(), std::slice::from_ref(&home));
            let mut worker = Guest::new(false, Vec::new()).worker;
            worker.set_home(home.clone());
            worker.fds().kick = Some(PeerFd::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
            let id = home.attach(worker.into()).map_err(|(_, e)| e).unwrap();
            let kick = PeerFd::new(File::open("/proc/self/stat").unwrap().into());
            let swap = move |worker: &mut QueueWorker| worker.fds().kick.replace(kick);
            lock(&shared.queues).running[1] = Some(id);
            let _before = shared.change(1, swap).unwrap();

            let moved = shift(&mut lock(&shared.queues), vec![(0, away.clone()), (1, away.clone())]);
            assert!(matches!(moved, Err(Problem::System(e)) if e.kind() == io::ErrorKind::PermissionDenied));
            let goes_on = monitor == MonitorChoice::Ppoll;
            let queues = lock(&shared.queues);
            assert!(queues.loops == [away.clone(), home.clone()], "the queue that does not run is to start there");
            assert_eq!((queues.running[1].is_some(), queues.stranded.len()), (goes_on, usize::from(!goes_on)));
            drop(queues);
            assert_eq!(shared.change(1, |_| ()).is_some(), goes_on);
            assert_eq!(away.call(|target| target.sources().count()).unwrap(), 0);

            assert!(shared.stop(0, Leave::Nothing).wait().is_none());
            assert!(shared.stop(1, Leave::Nothing).wait().is_some());
            assert!(shared.stop(1, Leave::Nothing).wait().is_none(), "it is given back once");
            [home, away].iter().for_each(|of| of.send(EventLoop::stop));
            [first, second].into_iter().for_each(|thread| thread.join().unwrap());
        }
    }

    #[test]
    fn queues_that_cannot_go_back_for_another_reason_than_requests_are_where_they_are_said_to_be_and_why_is_said() {
        // Two change places. Each is kicked by a plain file, for which only ppoll can wait: one may go, the other may not, nor
        // may the first go back.
        let ((epoll, first), (ppoll, second)) = (io(MonitorChoice::Epoll), io(MonitorChoice::Ppoll));
        let homes = [epoll.clone(), ppoll.clone()];
        let (memory, kickless, errors) = Default::default();
        let counts = QueueCounts { all: 2, diskless: 0 };
        let shared = Arc::new(Shared::new("e", counts, memory, kickless, errors, Vec::new(), &homes));
        for (queue, home) in homes.iter().enumerate() {
            let mut worker = Guest::new(false, Vec::new()).worker;
            worker.set_home(home.clone());
            worker.fds().kick = Some(PeerFd::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
            let id = home.attach(worker.into()).map_err(|(_, e)| e).unwrap();
            lock(&shared.queues).running[queue] = Some(id);
        }
        let _before = [0, 1].map(|queue| {
            let kick = PeerFd::new(File::open("/proc/self/stat").unwrap().into());
            shared.change(queue, move |worker: &mut QueueWorker| worker.fds().kick.replace(kick)).unwrap()
        });
        let scsi = Scsi::new(ScsiConfig { num_queues: 1, queue_size: 128 }, "e").unwrap();
        let thread = std::thread::spawn(|| None);
        let export =
            Export::running(Arc::clone(&shared), DeviceType::Scsi(scsi), EventNotifier::new().unwrap(), thread);

        let refused = export.run_on(&[ppoll.clone(), epoll.clone()]).unwrap_err().to_string();
        let why = io::Error::from_raw_os_error(libc::EPERM);
        assert_eq!(refused, format!("export 'e': {why}; some queues have moved and cannot go back"));
        assert_eq!([0, 1].map(|queue| export.is_on(queue, &ppoll)), [true, true]);
        assert!([0, 1].iter().all(|queue| shared.change(*queue, |_| ()).is_some()));

        assert!([0, 1].iter().all(|queue| shared.stop(*queue, Leave::Nothing).wait().is_some()));
        drop(export);
        homes.iter().for_each(|of| of.send(EventLoop::stop));
        [first, second].into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn a_queue_is_looked_at_once_more_when_it_is_known_where_it_runs() {
        let (home, thread) = io(MonitorChoice::Ppoll);
        let counts = QueueCounts { all: 1, diskless: 0 };
        let (memory, kickless, errors) = Default::default();
        let shared = Shared::new("e", counts, memory, kickless, errors, Vec::new(), std::slice::from_ref(&home));
        let blk = BlkConfig { capacity_bytes: 1 << 20, serial: "moves".into(), ..BlkConfig::default() };
        let device = Blk::new(blk).unwrap() as Arc<dyn Device>;
        let memory = Arc::new(GuestMemory::empty().with(Region::anonymous(0, 0x10_0000).unwrap()).unwrap());
        let ring = DriverConfig { size: 64, packed: false, event_idx: true, indirect: None, base: 0 };
        let mut driver = Driver::new(&memory, 0, ring).unwrap();
        let queue = driver.queue().start(&memory).unwrap();
        let mut fds = VringFds::default();
        fds.kick = Some(PeerFd::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap()));
        let (go_on, stuck) = channel::<()>();
        home.send(move |_| stuck.recv().unwrap_or_default());
        std::thread::scope(|scope| {
            let starts = scope.spawn(|| shared.run(&device, 0, queue, fds, channel().0));
            while !shared.is_in_use() {
                std::thread::yield_now();
            }
            let not_known = lock(&shared.queues);
            drop(go_on);
            while home.call(|target| target.sources().count()).unwrap() == 0 {}
            // It has been looked at by then.
            home.call(|_| ()).unwrap();
            // GET_ID, of which no kick tells.
            assert!(memory.write(0x8_0000, &[&8u32.to_le_bytes()[..], &[0; 12]].concat()));
            let (asked, answered) = (Piece { addr: 0x8_0000, len: 16 }, Piece { addr: 0x9_0000, len: 21 });
            driver.add(&[asked], &[answered], 0).unwrap();
            driver.publish();
            drop(not_known);
            starts.join().unwrap().unwrap();
        });
        let patience_ends = Instant::now() + Duration::from_secs(30);
        while driver.reap().unwrap().is_none() {
            assert!(Instant::now() < patience_ends, "nobody looked");
            std::thread::yield_now();
        }
        assert!(shared.stop(0, Leave::Nothing).wait().is_some());
        home.send(EventLoop::stop);
        thread.join().unwrap();
    }

    #[test]
    fn who_waits_for_queues_to_have_had_a_turn_asks_each_loop_once() {
        let ((one, first), (other, second)) = (io(MonitorChoice::Ppoll), io(MonitorChoice::Ppoll));
        let homes = [one, other];
        let counts = QueueCounts { all: 6, diskless: 0 };
        let (memory, kickless, errors) = Default::default();
        let shared = Shared::new("e", counts, memory, kickless, errors, Vec::new(), &homes);
        // The last does not run.
        for queue in 0..5 {
            let home = &homes[queue % 2];
            let mut worker = Guest::new(false, Vec::new()).worker;
            worker.set_home(home.clone());
            lock(&shared.queues).running[queue] = Some(home.attach(worker.into()).map_err(|(_, e)| e).unwrap());
        }
        assert!(lock(&shared.queues).running_loops() == homes);
        shared.await_turns();
        assert!((0..5).all(|queue| shared.stop(queue, Leave::Nothing).wait().is_some()));
        homes.iter().for_each(|of| of.send(EventLoop::stop));
        [first, second].into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn who_stops_a_queue_without_disks_goes_on_when_it_knows() {
        let (home, thread) = io(MonitorChoice::Ppoll);
        let counts = QueueCounts { all: 1, diskless: 1 };
        let (memory, kickless, errors) = Default::default();
        let shared = Shared::new("e", counts, memory, kickless, errors, Vec::new(), std::slice::from_ref(&home));
        let mut worker = Guest::new(false, Vec::new()).worker;
        worker.set_home(home.clone());
        lock(&shared.queues).running[0] = Some(home.attach(worker.into()).map_err(|(_, e)| e).unwrap());
        let has_run = Arc::new(AtomicBool::new(false));
        let runs = Arc::clone(&has_run);
        home.send(move |_| {
            (0..1000).for_each(|_| std::thread::yield_now());
            runs.store(true, Ordering::Relaxed);
        });
        let leaving = shared.stop(0, Leave::Nothing);
        assert!(has_run.load(Ordering::Relaxed), "its loop has heard of it, after this");
        assert!(leaving.wait().is_some());
        home.send(EventLoop::stop);
        thread.join().unwrap();
    }
}
