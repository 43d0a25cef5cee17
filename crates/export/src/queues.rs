//! An export's queues: where each runs, and what is done to those that run.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::{io, mem};

use egret_disk::{Active, Debt, Disk, OpenError, ThrottleGroup};
use egret_event_loop::{Leaving, LoopHandle, SourceId};
use egret_virtio::{Device, DiskKey};
use egret_vring::memory::{GuestMemory, MemoryRules};
use egret_vring::ring::Queue;

use crate::errors::{ErrorHandling, ErrorPolicy};
use crate::export::{ExportError, Rings};
use crate::moves::PATIENCE;
use crate::peer_fd::PeerFd;
use crate::peer_log::PeerLog;
use crate::protocol::send_config_change;
use crate::source::Worker;
use crate::stats::QueueCounters;
use crate::worker::{Disks, Leave, QueueInfo, QueueWorker, VringFds};

/// What an export's conversation needs of it, and what others may ask meanwhile.
pub(crate) struct Shared {
    pub(crate) id: String,
    /// What is written about clients and guests.
    log: Arc<PeerLog>,
    pub(crate) rings: Rings,
    pub(crate) counts: QueueCounts,
    /// What is done about requests that fail.
    pub(crate) errors: Arc<ErrorHandling>,
    /// What a client may hand over as guest memory.
    pub(crate) memory: MemoryRules,
    /// Locked for as long as something is done to queues that run: by its name a worker is found on its loop, and on no
    /// other, only while nobody moves it. Nobody who has it locked for a client waits for a loop: one that is stuck would have
    /// all wait who change anything.
    pub(crate) queues: Mutex<Queues>,
    /// A queue that was to stop has stopped, or one that was to start has been taken in or refused.
    settled: Condvar,
    /// What each queue counts, whether it runs or not.
    counters: Vec<Arc<QueueCounters>>,
    /// A client has left, and what it asked for has not ended yet; or rings of its are to run, and wait for what is owed to limits.
    draining: AtomicBool,
    /// The client has not read the configuration space since a disk had another length, or never: it may have a copy from an
    /// earlier connection.
    has_news: AtomicBool,
    door: Mutex<Door>,
    /// The client's session is not to be kept for another daemon.
    forgets_session: AtomicBool,
    /// Where the client listens to us.
    channel: Mutex<Option<PeerFd>>,
}

/// What changes together: a disk that is added or removed must be so for every queue that runs, and for every one that
/// starts later.
pub(crate) struct Queues {
    /// The loop of each queue, where it runs or would run.
    pub(crate) loops: Vec<LoopHandle<Worker>>,
    /// The running ones.
    pub(crate) running: Vec<Option<SourceId>>,
    /// The workers that no loop took back after a move that failed.
    pub(crate) stranded: Vec<(usize, Worker)>,
    /// One is on its way to its loop, with the disks that there are: until it has arrived they stay, and so does where it is to
    /// run.
    starting: bool,
    /// How many are stopping.
    pub(crate) stopping: usize,
    /// Who waits for these to have stopped has the receivers: disks were taken away that they have still. Nothing is sent.
    pub(crate) awaited: Vec<Sender<()>>,
    /// The device's disks, by their keys.
    pub(crate) disks: Vec<Option<Arc<Disk>>>,
    /// Each of them is active, if a client's rings run.
    pub(crate) active: Option<Vec<(DiskKey, Active)>>,
    /// Those that stay active though none runs, because they could not be written out: who has one next would not find what
    /// was written.
    pub(crate) unwritten: Vec<(DiskKey, Active)>,
    /// What each queue has let go past limits, whichever client had it.
    drains: Vec<Vec<Drains>>,
}

/// Of a queue's drains that have let go what a group's limits had no room for: how much the device's disks of that group had
/// owed by then, ever.
struct Drains {
    of: Weak<ThrottleGroup>,
    last: u64,
    before: u64,
}

impl Drains {
    /// Whether what was let go before is not made up for. Disks may be in another group, and what they had let go nobody
    /// knows then.
    const fn is_owed(&self, Debt { owed, made_up }: Debt) -> bool {
        owed > 0 && made_up < self.before && self.before <= owed + made_up
    }
}

/// Whether a client is there, and whether one may come.
#[derive(Default, PartialEq, Eq)]
enum Door {
    #[default]
    Open,
    Taken,
    Shut,
}

/// Where a running queue is.
#[derive(Clone)]
pub(crate) struct RunningQueue {
    pub(crate) queue: usize,
    pub(crate) on: LoopHandle<Worker>,
    pub(crate) id: SourceId,
}

impl Queues {
    /// Where a queue is, if it runs.
    pub(crate) fn running_queue(&self, queue: usize) -> Option<RunningQueue> {
        Some(RunningQueue { queue, on: self.loops[queue].clone(), id: self.running[queue]? })
    }

    /// Those of its disks that are active, whether rings run or not.
    pub(crate) fn active_disks(&mut self) -> impl Iterator<Item = &mut (DiskKey, Active)> {
        self.active.iter_mut().flatten().chain(&mut self.unwritten)
    }

    /// What keeps one of them active, if it is.
    pub(crate) fn take_active(&mut self, key: DiskKey) -> Option<Active> {
        let taken = self.active.iter_mut().chain([&mut self.unwritten]).find_map(|all| {
            let at = all.iter().position(|(of, _)| *of == key)?;
            Some(all.swap_remove(at).1)
        });
        // One that was left while another was written out may be here twice, and whoever takes it sees to both.
        self.unwritten.retain(|(of, _)| *of != key);
        taken
    }

    /// The device's disks, with their keys.
    pub(crate) fn disks_by_key(&self) -> impl Iterator<Item = (DiskKey, &Arc<Disk>)> {
        (0..).map(DiskKey).zip(&self.disks).filter_map(|(key, disk)| Some((key, disk.as_ref()?)))
    }

    /// What drains of the device's disks have let go past the limits of each group.
    fn debts(&self) -> Vec<(Weak<ThrottleGroup>, Debt)> {
        let mut debts: Vec<(Weak<ThrottleGroup>, Debt)> = Vec::new();
        for disk in self.disks.iter().flatten() {
            let Debt { owed, made_up } = disk.limits_debt();
            let Some(group) = disk.throttle_group().filter(|_| owed + made_up > 0) else { continue };
            match debts.iter_mut().find(|(of, _)| of.as_ptr() == Arc::as_ptr(&group)) {
                Some((_, debt)) => *debt = Debt { owed: debt.owed + owed, made_up: debt.made_up + made_up },
                None => debts.push((Arc::downgrade(&group), Debt { owed, made_up })),
            }
        }
        debts
    }

    pub(crate) fn has_running(&self) -> bool {
        self.running.iter().any(Option::is_some)
    }

    /// Where the running queues are, from the queue `first` on.
    pub(crate) fn running_queues(&self, first: u16) -> Vec<RunningQueue> {
        (first.into()..self.running.len()).filter_map(|queue| self.running_queue(queue)).collect()
    }

    /// The loops that they are on, each once.
    pub(crate) fn running_loops(&self) -> Vec<LoopHandle<Worker>> {
        let mut loops = Vec::new();
        for RunningQueue { on, .. } in self.running_queues(0) {
            if !loops.contains(&on) {
                loops.push(on);
            }
        }
        loops
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lets go of a disk that is not served here any more: written out, unless somebody else serves it. Returned is one that stays
/// active, because that failed.
pub(crate) fn write_out_last(mut active: Active, log: &PeerLog) -> Option<Active> {
    (active.leave() && !write_out(active.disk(), log)).then_some(active)
}

/// Has what was written to a disk written out, if it is left to others then. Returns whether it may be; the log says why not.
fn write_out(disk: &Disk, log: &PeerLog) -> bool {
    let written = if disk.options().allow_inactive { disk.write_out() } else { Ok(()) };
    if let Err(e) = &written {
        log.warn(format_args!("blockdev '{}' stays locked: the last flush failed: {e}", disk.node_name()));
    }
    written.is_ok()
}

/// How many queues an export has.
#[derive(Clone, Copy)]
pub(crate) struct QueueCounts {
    pub(crate) all: u16,
    /// Of those, counted from the first, how many never ask anything of a disk.
    pub(crate) diskless: u16,
}

impl QueueCounts {
    /// Deals queues out to loops: those that have disks in turn; the others are with the first of them.
    pub(crate) fn assign(self, loops: &[LoopHandle<Worker>]) -> Vec<LoopHandle<Worker>> {
        let turn = |queue: u16| usize::from(queue.saturating_sub(self.diskless));
        (0..self.all).map(|queue| loops[turn(queue) % loops.len()].clone()).collect()
    }
}

impl Shared {
    /// Of an export that begins; it has a queue on each loop in turn.
    pub(crate) fn new(
        id: &str,
        counts: QueueCounts,
        memory: MemoryRules,
        rings: Rings,
        errors: ErrorPolicy,
        disks: Vec<Option<Arc<Disk>>>,
        loops: &[LoopHandle<Worker>],
    ) -> Self {
        let count = counts.all.into();
        let queues = Queues {
            loops: counts.assign(loops),
            running: vec![None; count],
            stranded: Vec::new(),
            starting: false,
            stopping: 0,
            awaited: Vec::new(),
            disks,
            active: None,
            unwritten: Vec::new(),
            drains: (0..count).map(|_| Vec::new()).collect(),
        };
        Self {
            id: id.to_owned(),
            log: Arc::new(PeerLog::new(id)),
            rings,
            counts,
            errors: ErrorHandling::new(id, errors),
            memory,
            counters: (0..count).map(|_| Arc::default()).collect(),
            queues: Mutex::new(queues),
            settled: Condvar::new(),
            draining: AtomicBool::new(false),
            has_news: AtomicBool::new(false),
            door: Mutex::default(),
            forgets_session: AtomicBool::new(false),
            channel: Mutex::default(),
        }
    }

    pub(crate) fn log(&self) -> &PeerLog {
        &self.log
    }

    /// As [`log`](Self::log), for who keeps it.
    pub(crate) fn shared_log(&self) -> Arc<PeerLog> {
        Arc::clone(&self.log)
    }

    pub(crate) fn counters(&self) -> &[Arc<QueueCounters>] {
        &self.counters
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Whether a client has queues running or starting, or requests in flight that it has left behind or whose queue it stops.
    pub(crate) fn is_in_use(&self) -> bool {
        let queues = lock(&self.queues);
        self.is_draining() || queues.starting || queues.stopping > 0 || queues.has_running()
    }

    /// The queues, when none of them starts and they are as `are_settled` says.
    ///
    /// # Errors
    ///
    /// That takes too long. Nothing has changed.
    pub(crate) fn lock_when(
        &self,
        are_settled: impl Fn(&Queues) -> bool,
    ) -> Result<MutexGuard<'_, Queues>, ExportError> {
        let is_early = |queues: &mut Queues| queues.starting || !are_settled(queues);
        let waited = self.settled.wait_timeout_while(lock(&self.queues), PATIENCE, is_early);
        let (queues, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        match waited.timed_out() {
            false => Ok(queues),
            true if queues.starting => Err(ExportError::Starts(self.id.clone())),
            true => Err(ExportError::Busy(self.id.clone())),
        }
    }

    /// The queues, when none of them starts: for who gives them other disks or other loops.
    ///
    /// # Errors
    ///
    /// As [`lock_when`](Self::lock_when).
    pub(crate) fn lock_started(&self) -> Result<MutexGuard<'_, Queues>, ExportError> {
        self.lock_when(|_| true)
    }

    /// Makes a worker of a queue, and gives it to its loop.
    pub(crate) fn run(
        &self,
        device: &Arc<dyn Device>,
        index: usize,
        queue: Queue,
        fds: VringFds,
        unpinned: Sender<Arc<GuestMemory>>,
    ) -> io::Result<()> {
        let model = Arc::clone(device).model(index as u16, queue.size());
        let counters = Arc::clone(&self.counters[index]);
        let mut queues = lock(&self.queues);
        queues.starting = true;
        let home = queues.loops[index].clone();
        let disks = if index < self.counts.diskless.into() { Vec::new() } else { queues.disks.clone() };
        drop(queues);
        let mut disks = Disks::new(disks);
        // Only a device with other queues beside may have several disks.
        if self.counts.diskless > 0 {
            disks.count_each(&counters);
        }
        let info = QueueInfo { log: Arc::clone(&self.log), index, kickless: self.rings.kickless, unpinned };
        let errors = Arc::clone(&self.errors);
        let mut worker = QueueWorker::new(info, queue, model, disks, fds, errors, counters);
        worker.set_home(home.clone());
        let attached = home.attach(worker.into());
        let mut queues = lock(&self.queues);
        queues.running[index] = attached.as_ref().ok().copied();
        queues.starting = false;
        // One that was refused is dropped when nobody waits for the lock: its descriptors are the peer's.
        drop(queues);
        self.settled.notify_all();
        let id = attached.map_err(|(_, e)| e)?;
        // Who has had something for it since it arrived has not found it.
        home.send(move |target| target.wake(id));
        Ok(())
    }

    /// Changes a queue's worker on its loop, if it runs, and waits for that. So a peer that orders changes without a pause
    /// has at most one command in the loop's mailbox.
    ///
    /// No lock is held meanwhile. If the queue has moved to another loop, the change is tried there. Returns what it
    /// returns, which the loop's thread need not drop then.
    pub(crate) fn change<R: Send + 'static>(
        &self,
        queue: usize,
        change: impl FnOnce(&mut QueueWorker) -> R + Send + 'static,
    ) -> Option<R> {
        self.change_worker(queue, |worker| worker.queue().map(change)).flatten()
    }

    /// As [`change`](Self::change).
    pub(crate) fn change_worker<R: Send + 'static>(
        &self,
        queue: usize,
        mut change: impl FnOnce(&mut Worker) -> R + Send + 'static,
    ) -> Option<R> {
        loop {
            let queue = lock(&self.queues).running_queue(queue);
            let RunningQueue { on, id, .. } = queue?;
            let changed = on.call(move |target| {
                let Some(worker) = target.source(id) else { return Err(change) };
                let changed = change(worker);
                // The change may have left something to signal, which the end of a turn does.
                target.wake(id);
                Ok(changed)
            });
            match changed {
                Ok(Err(again)) => change = again,
                Ok(Ok(changed)) => return Some(changed),
                Err(_) => return None,
            }
        }
    }

    /// What drains have let go past the limits of each group, ever, for [`note_drain`](Self::note_drain).
    pub(crate) fn let_go(&self) -> Vec<(Weak<ThrottleGroup>, u64)> {
        let debts = lock(&self.queues).debts();
        debts.into_iter().map(|(of, Debt { owed, made_up })| (of, owed + made_up)).collect()
    }

    /// Some queues have been drained, before which as much had been [let go](Self::let_go).
    pub(crate) fn note_drain(&self, drained: &[usize], before: &[(Weak<ThrottleGroup>, u64)]) {
        let mut let_go = self.let_go();
        let_go.retain(|(of, let_go)| !before.iter().any(|(other, before)| other.ptr_eq(of) && before >= let_go));
        let mut queues = lock(&self.queues);
        for (of, let_go) in let_go {
            for &queue in drained {
                let drains = &mut queues.drains[queue];
                match drains.iter_mut().find(|drains| drains.of.ptr_eq(&of)) {
                    Some(Drains { last, before, .. }) => *before = mem::replace(last, let_go),
                    None => {
                        drains.retain(|drains| drains.of.strong_count() > 0);
                        drains.push(Drains { of: Weak::clone(&of), last: let_go, before: 0 });
                    }
                }
            }
        }
    }

    /// Whether a queue may not be started: what its drains let go past a group's limits has not been made up for. The last one's
    /// does not count: who stops and starts once is not to wait, because others of its disks owe nothing.
    pub(crate) fn owes_limits(&self, queue: usize) -> bool {
        let queues = lock(&self.queues);
        let drains = &queues.drains[queue];
        // As of nearly every queue: its disks need not be asked.
        if drains.iter().all(|drains| drains.before == 0) {
            return false;
        }
        let debts = queues.debts();
        let is_owed = |drains: &Drains, of, debt| drains.of.ptr_eq(of) && drains.is_owed(debt);
        drains.iter().any(|drains| debts.iter().any(|(of, debt)| is_owed(drains, of, *debt)))
    }

    /// Waits until every queue that runs has been dispatched since it was started.
    pub(crate) fn await_turns(&self) {
        let loops = lock(&self.queues).running_loops();
        for on in loops {
            // A loop runs commands after it has dispatched what was ready, and a source that is new to it is.
            let _ = on.call(|_| ());
        }
    }

    /// Takes a worker back from its loop; [`has_stopped`](Self::has_stopped) is to be called when it has arrived.
    pub(crate) fn stop(&self, queue: usize, leave: Leave) -> Leaving<Worker> {
        let mut queues = lock(&self.queues);
        queues.stopping += 1;
        if let Some(at) = queues.stranded.iter().position(|(stranded, _)| *stranded == queue) {
            return Leaving::left(queues.stranded.swap_remove(at).1);
        }
        match queues.running[queue].take() {
            Some(id) => {
                let on = queues.loops[queue].clone();
                on.send(move |target| {
                    if let Some(worker) = target.source(id) {
                        worker.leave(leave);
                        // It may have requests to give up.
                        target.wake(id);
                    }
                });
                let leaving = on.detach(id);
                drop(queues);
                if queue < self.counts.diskless.into() {
                    // It knows that it leaves before queues do that are told after it: what they leave to the record of
                    // functions' commands it must not answer.
                    let _ = on.call(|_| ());
                }
                leaving
            }
            None => Leaving::none(),
        }
    }

    /// A worker that was to stop is back.
    pub(crate) fn has_stopped(&self) {
        let mut queues = lock(&self.queues);
        queues.stopping -= 1;
        if queues.stopping == 0 {
            queues.awaited.clear();
        }
        drop(queues);
        self.settled.notify_all();
    }

    /// Has all disks active, because rings are to run. Tries once.
    pub(crate) fn activate(&self, device: &dyn Device) -> Result<(), OpenError> {
        loop {
            let disks: Vec<_> = {
                let queues = lock(&self.queues);
                if queues.active.is_some() {
                    return Ok(());
                }
                queues.disks_by_key().map(|(key, disk)| (key, Arc::clone(disk))).collect()
            };
            // Without the lock, which others' changes wait for: it may take as long as a disk does not answer.
            let active = disks.into_iter().map(|(key, disk)| Ok((key, disk.activate()?)));
            let mut active = active.collect::<Result<Vec<_>, OpenError>>()?;
            let mut queues = lock(&self.queues);
            let are_the_same = |((key, active), (of, disk)): (&(DiskKey, Active), (DiskKey, &Arc<Disk>))| {
                *key == of && Arc::ptr_eq(active.disk(), disk)
            };
            if active.len() != queues.disks_by_key().count()
                || !active.iter().zip(queues.disks_by_key()).all(are_the_same)
            {
                continue;
            }
            // The client has asked for their sizes before, when others may have had them active.
            let news = queues
                .disks_by_key()
                .filter(|(key, disk)| disk.options().allow_inactive && device.resize(*key, disk.size()));
            if news.count() > 0 {
                self.set_news(true);
            }
            active.iter_mut().for_each(|(_, active)| active.serve());
            queues.active = Some(active);
            queues.unwritten.clear();
            return Ok(());
        }
    }

    /// Lets others have the disks, because no ring runs and none is about to. One that others serve they write out when they
    /// are the last to leave. One whose writes cannot be written out stays active.
    pub(crate) fn deactivate(&self) {
        let (mut written, mut unwritten): (Vec<Arc<Disk>>, Vec<Arc<Disk>>) = Default::default();
        let is_of = |disks: &[Arc<Disk>], active: &Active| disks.iter().any(|disk| Arc::ptr_eq(disk, active.disk()));
        loop {
            let next: Vec<_> = {
                let mut queues = lock(&self.queues);
                let active = queues.active.iter_mut().flatten().map(|(_, active)| active);
                // One may have come meanwhile of a disk that was left already; and one that has left may have another disk.
                let next =
                    active.filter(|active| active.serves() || !is_of(&written, active) && !is_of(&unwritten, active));
                let next: Vec<_> = next.map(|active| (active.leave(), Arc::clone(active.disk()))).collect();
                if next.is_empty() {
                    let active = queues.active.take().unwrap_or_default();
                    let (stay, go) = active.into_iter().partition(|(_, active)| is_of(&unwritten, active));
                    // To those of an earlier time: this is called where none has run since, too.
                    queues.unwritten.extend(stay);
                    drop(queues);
                    return drop::<Vec<_>>(go);
                }
                next
            };
            // Meanwhile there may come others.
            for (is_last, disk) in next {
                let done = if !is_last || write_out(&disk, &self.log) { &mut written } else { &mut unwritten };
                done.push(disk);
            }
        }
    }

    /// A client comes; false if none may any more.
    pub(crate) fn let_in(&self) -> bool {
        let mut door = lock(&self.door);
        if *door == Door::Open {
            *door = Door::Taken;
        }
        *door == Door::Taken
    }

    /// The client has left, and its session is over.
    pub(crate) fn let_out(&self) {
        *lock(&self.door) = Door::Open;
    }

    /// Lets no client in any more; false if there is one.
    pub(crate) fn shut(&self) -> bool {
        let mut door = lock(&self.door);
        if *door == Door::Open {
            *door = Door::Shut;
        }
        *door == Door::Shut
    }

    /// The client's session is not to be kept for another daemon.
    pub(crate) fn forget_session(&self) {
        self.forgets_session.store(true, Ordering::Release);
    }

    pub(crate) fn forgets_session(&self) -> bool {
        self.forgets_session.load(Ordering::Acquire)
    }

    pub(crate) fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Ordering::Release);
    }

    pub(crate) fn set_channel(&self, channel: Option<PeerFd>) {
        let before = mem::replace(&mut *lock(&self.channel), channel);
        // When nobody waits for the lock: it may take as long as the peer likes.
        drop(before);
    }

    /// Takes the client's channel, which hears nothing more from here.
    pub(crate) fn take_channel(&self) -> Option<PeerFd> {
        lock(&self.channel).take()
    }

    /// Whether the configuration space has what the client has not read. What it has is to be there before this says so, and
    /// is to be read after this has said otherwise.
    pub(crate) fn set_news(&self, has_news: bool) {
        self.has_news.store(has_news, Ordering::SeqCst);
    }

    /// Tells the client of a change that it has not read, now that a ring runs. It may have been told before, when none did:
    /// QEMU ignores that.
    pub(crate) fn tell_news(&self) {
        if self.has_news.swap(false, Ordering::SeqCst) && !self.notify_config_change() {
            self.set_news(true);
        }
    }

    /// Sends the client BACKEND_CONFIG_CHANGE, if it has given a channel for that. Returns whether it was sent.
    pub(crate) fn notify_config_change(&self) -> bool {
        lock(&self.channel).as_ref().is_some_and(|channel| send_config_change(channel).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use egret_disk::{Driver, EngineOptions, EngineSet, Limit, Limits, Op, Options, Rates, Request, RequestToken};
    use egret_event_loop::{Backend, Nanos, clock};
    use egret_vring::memory::{Buffers, Lent};

    use super::*;

    fn shared() -> Shared {
        let (memory, kickless, errors) = Default::default();
        Shared::new("e", QueueCounts { all: 0, diskless: 0 }, memory, kickless, errors, Vec::new(), &[])
    }

    #[test]
    fn one_client_is_let_in_at_a_time_and_none_when_the_door_is_shut_which_it_is_behind_the_last() {
        let shared = shared();
        assert!(shared.let_in());
        assert!(!shared.shut(), "somebody is in");
        shared.let_out();
        assert!(shared.let_in(), "it was not shut");
        shared.let_out();
        assert!(shared.shut() && shared.shut());
        assert!(!shared.let_in());
    }

    #[test]
    fn an_export_is_in_use_for_as_long_as_a_queue_runs_or_stops_or_what_a_client_has_left_behind_goes_on() {
        let shared = shared();
        assert!(!shared.is_in_use());
        lock(&shared.queues).stopping = 2;
        for stopping in [2, 1] {
            assert!(shared.is_in_use(), "{stopping} stop");
            shared.has_stopped();
        }
        assert!(!shared.is_in_use());
        shared.set_draining(true);
        assert!(shared.is_in_use());
        shared.set_draining(false);
        assert!(!shared.is_in_use());
    }

    #[test]
    fn who_waits_for_queues_to_have_stopped_waits_for_the_last_of_them() {
        let shared = shared();
        let (held, awaited) = std::sync::mpsc::channel();
        {
            let mut queues = lock(&shared.queues);
            (queues.stopping, queues.awaited) = (2, vec![held]);
        }
        shared.has_stopped();
        assert_eq!(awaited.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
        shared.has_stopped();
        assert_eq!(awaited.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected));
    }

    #[test]
    fn who_waits_for_queues_in_vain_is_told_whether_one_starts_or_requests_do_not_end() {
        let [starts, stops] = [(); 2].map(|()| shared());
        lock(&starts.queues).starting = true;
        let wait = |shared: &Shared| shared.lock_when(|_| false).map(drop);
        thread::scope(|scope| {
            let [starts, stops] = [&starts, &stops].map(|shared| scope.spawn(move || wait(shared)));
            assert!(matches!(starts.join().unwrap(), Err(ExportError::Starts(id)) if id == "e"));
            assert!(matches!(stops.join().unwrap(), Err(ExportError::Busy(id)) if id == "e"));
        });
    }

    /// A group that has room for so many requests a second.
    fn group(average: u64) -> Arc<ThrottleGroup> {
        let total = Limit { average, burst: 1, burst_seconds: 1 };
        ThrottleGroup::new("g", Limits { requests: Rates { total, ..Rates::default() }, ..Limits::default() })
    }

    /// A disk of a group, and a drain has let go what that had no room for.
    fn owing(group: &Arc<ThrottleGroup>) -> Arc<Disk> {
        let null = Driver::Null { size: 1 << 20, latency: Nanos::ZERO, read_zeroes: true };
        let disk = Arc::new(Disk::open(&Options::new("null", null)).unwrap());
        disk.set_throttle_group(Some(group));
        let mut engines = EngineSet::new(EngineOptions::default());
        let slot = engines.attach(&disk).unwrap();
        for at in 0..8 {
            let mut buffers = Buffers::pages();
            buffers.resize(512);
            let (buffers, token) = (Lent::of_pages(buffers), RequestToken::new(0, at));
            engines.push(slot, Request { op: Op::Read, offset: 0, len: 512, buffers, token });
        }
        engines.submit(clock::now());
        engines.disable_limits(slot);
        engines.submit(clock::now());
        engines.reap(clock::now(), &mut |_| ());
        let Debt { owed, made_up } = disk.limits_debt();
        // While this machine stood still there may have come room for all.
        if owed + made_up > 0 { disk } else { owing(group) }
    }

    #[test]
    fn what_drains_have_let_go_past_a_group_s_limits_is_that_of_all_its_disks_whether_it_is_made_up_for_or_not() {
        for (average, is_made_up) in [(1, false), (1000, true)] {
            let (group, shared) = (group(average), shared());
            let disks = [(); 2].map(|()| owing(&group));
            // Of what there is room for more and more is made up.
            while is_made_up && disks.iter().any(|disk| disk.limits_debt().owed > 0) {
                thread::yield_now();
            }
            let debts = disks.each_ref().map(|disk| disk.limits_debt());
            let sum: u64 = debts.iter().map(|debt| debt.owed + debt.made_up).sum();
            lock(&shared.queues).disks = disks.map(Some).to_vec();
            let let_go: Vec<u64> = shared.let_go().into_iter().map(|(_, let_go)| let_go).collect();
            assert_eq!(let_go, [sum], "{debts:?}");
        }
    }

    #[test]
    fn of_what_a_drain_let_go_before_something_is_owed_until_as_much_is_made_up_for() {
        let is_owed =
            |before, owed, made_up| Drains { of: Weak::new(), last: 0, before }.is_owed(Debt { owed, made_up });
        assert!(is_owed(3, 5, 0) && is_owed(3, 3, 0) && is_owed(3, 1, 2));
        assert!(!is_owed(3, 1, 3) && !is_owed(3, 1, 4), "that is made up for, and what others let go is owed");
        assert!(!is_owed(3, 0, 2) && !is_owed(3, 1, 1), "less than that: it was let go by disks that are not there");
    }

    #[test]
    fn of_limits_that_are_gone_nothing_is_kept_of_what_drains_have_let_go() {
        let shared = shared();
        lock(&shared.queues).drains.push(Vec::new());
        for _ in 0..3 {
            let disk = owing(&group(1));
            lock(&shared.queues).disks = vec![Some(Arc::clone(&disk))];
            shared.note_drain(&[0], &[]);
            let queues = lock(&shared.queues);
            let [Drains { of, .. }] = &queues.drains[0][..] else { panic!("{} are kept", queues.drains[0].len()) };
            assert_eq!(of.as_ptr(), Arc::as_ptr(&disk.throttle_group().unwrap()));
        }
    }
}
