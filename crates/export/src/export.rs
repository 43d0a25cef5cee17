//! An export: a device at an address, one client at a time.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{mem, ptr};

use egret_confine::Bounds;
use egret_disk::{Active, Disk, OpenError};
use egret_event_loop::{EventNotifier, LoopHandle};
use egret_virtio::blk::{Blk, BlkConfig, BlkError};
use egret_virtio::scsi::{LunAddress, LunError, Scsi, ScsiError};
use egret_virtio::{Device, DiskKey};
use egret_vring::memory::MemoryRules;

use crate::budget::ClientBudget;
use crate::errors::{ErrorHandling, ErrorPolicy};
use crate::kept::Kept;
use crate::listener::{Address, ListenError, Listener};
use crate::moves::PATIENCE;
use crate::nbd::Offer;
use crate::protocol::{Connection, pause};
use crate::queues::{QueueCounts, Shared, lock, write_out_last};
use crate::session::Session;
use crate::socket::Access;
use crate::source::Worker;
use crate::stats::{QueueCounters, QueueStats};
use crate::worker::Kickless;

/// How an export is to be, whatever its device is.
#[derive(Debug)]
pub struct ExportConfig {
    /// Its name, for the log and the thread.
    pub id: String,
    /// Where clients find it.
    pub address: Address,
    /// Who may connect there.
    pub access: Access,
    /// What its clients may hand over as guest memory.
    pub memory: MemoryRules,
    /// What its queues may be.
    pub rings: Rings,
    /// What is done about requests that fail.
    pub errors: ErrorPolicy,
    /// What becomes of its client's session when the daemon ends.
    pub keeping: Keeping,
}

/// What an export's queues may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rings {
    /// What becomes of those that their client asks to be polled.
    pub kickless: Kickless,
    /// They are for user-mode Linux: none of them is packed, and its driver may be called by a socket.
    pub user_mode_linux: bool,
}

/// Whether somebody keeps clients' sessions from one daemon to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keeping {
    /// Nobody does: they end with the daemon.
    #[default]
    Not,
    /// Somebody would. What a client hands over stays open until then.
    Keeps,
    /// Likewise, and has kept one: nobody else is let in before the export [goes on with it](Export::go_on_with).
    Kept,
}

/// Why an export could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// Its address.
    #[error("export '{0}': {1}")]
    Listen(String, #[source] ListenError),
    /// What the guest was to see.
    #[error("export '{0}': {1}")]
    Device(String, #[source] BlkError),
    /// Likewise of a virtio-scsi device.
    #[error("export '{0}': {1}")]
    Scsi(String, #[source] ScsiError),
    /// One of its logical units.
    #[error("export '{0}': {1}")]
    Lun(String, #[source] LunError),
    /// It has no logical unit at this address, or no logical units at all.
    #[error("export '{0}': there is nothing at {1}")]
    NoLun(String, LunAddress),
    /// Its disk is somebody else's at present.
    #[error("export '{0}': {1}")]
    Disk(String, #[source] Box<OpenError>),
    /// Another export over NBD has its name.
    #[error("export '{0}': NBD server already has export named '{1}'")]
    NbdName(String, String),
    /// The system ran out of something.
    #[error("export '{0}': {1}")]
    System(String, #[source] io::Error),
    /// A change had to wait for requests that do not end.
    #[error("export '{0}': requests in flight have not ended in 5 s; nothing has changed")]
    Busy(String),
    /// Likewise, when some queues had moved already, which have since taken in requests that do not end either.
    #[error(
        "export '{0}': requests in flight have not ended in 5 s; some queues have moved and cannot go back before theirs end"
    )]
    Scattered(String),
    /// Likewise, when it was the system that was in the way of one there, or of one on its way back.
    #[error("export '{0}': {1}; some queues have moved and cannot go back")]
    Stuck(String, #[source] io::Error),
    /// A change had to wait for a queue that its client starts.
    #[error("export '{0}': a queue has not started in 5 s; nothing has changed")]
    Starts(String),
}

/// A disk on queues, for whoever connects.
///
/// One thread holds the conversation with the client; the queues run on I/O threads. When a client leaves, the export
/// listens for the next.
pub struct Export {
    pub(crate) shared: Arc<Shared>,
    pub(crate) device: DeviceType,
    /// From when it is set no client is let in any more, and the session of one that is there ends when its queues are drained.
    stop: EventNotifier,
    thread: Option<JoinHandle<Option<Vec<OwnedFd>>>>,
    /// Who waits for this lets nobody in.
    resumes: Option<Sender<Kept>>,
}

/// The device, for what is done to it from outside.
#[derive(Clone)]
pub(crate) enum DeviceType {
    Blk(Arc<Blk>),
    Scsi(Arc<Scsi>),
    /// None: clients speak NBD.
    Nbd(Arc<Offer>),
}

impl Export {
    /// Begins to listen. Queue `i` runs on the loop `i % loops.len()`.
    ///
    /// # Errors
    ///
    /// The address is taken or unusable; nothing is left behind.
    ///
    /// # Panics
    ///
    /// If there is no loop.
    pub fn start(
        config: ExportConfig,
        device: BlkConfig,
        disk: Arc<Disk>,
        loops: Vec<LoopHandle<Worker>>,
    ) -> Result<Self, ExportError> {
        let blk = Blk::new(device).map_err(|e| ExportError::Device(config.id.clone(), e))?;
        let device = Arc::clone(&blk) as _;
        Self::listen(config, DeviceType::Blk(blk), device, vec![Some(disk)], loops)
    }

    pub(crate) fn listen(
        config: ExportConfig,
        kind: DeviceType,
        device: Arc<dyn Device>,
        disks: Vec<Option<Arc<Disk>>>,
        loops: Vec<LoopHandle<Worker>>,
    ) -> Result<Self, ExportError> {
        let ExportConfig { id, address, access, memory, rings, errors, keeping } = config;
        assert!(!loops.is_empty(), "an export needs a loop to run its queues");
        let system = |e: io::Error| ExportError::System(id.clone(), e);
        let stop = EventNotifier::new().map_err(system)?;
        let listener = Listener::open(address, access).map_err(|e| ExportError::Listen(id.clone(), e))?;
        let counts = QueueCounts { all: device.num_queues(), diskless: device.diskless_queues() };
        let shared = Arc::new(Shared::new(&id, counts, memory, rings, errors, disks, &loops));
        let (theirs, their_stop) = (Arc::clone(&shared), stop.clone());
        let thread = std::thread::Builder::new().name(id.clone()).stack_size(256 << 10);
        let bounds = Bounds::of_this_thread();
        let (resumes, resumed) = channel();
        let thread = thread.spawn(move || {
            bounds.narrow(egret_confine::ThreadKind::Session);
            // Whoever ends the export before it is resumed lets go of the other end.
            let kept = if keeping == Keeping::Kept { resumed.recv().ok() } else { None };
            serve(&theirs, &device, listener, &their_stop, keeping != Keeping::Not, kept)
        });
        let thread = thread.map_err(system)?;
        let resumes = (keeping == Keeping::Kept).then_some(resumes);
        let mut new = Self::running(shared, kind, stop, thread);
        new.resumes = resumes;
        Ok(new)
    }

    /// One whose thread runs until it is stopped.
    pub(crate) const fn running(
        shared: Arc<Shared>,
        device: DeviceType,
        stop: EventNotifier,
        thread: JoinHandle<Option<Vec<OwnedFd>>>,
    ) -> Self {
        Self { shared, device, stop, thread: Some(thread), resumes: None }
    }

    /// Goes on with a session that was [kept](Keeping::Kept); if that is not to be had, the next client is let in. Returned is one
    /// that this export is not for.
    #[must_use]
    pub fn go_on_with(&mut self, session: Option<Kept>) -> Option<Kept> {
        let resumes = self.resumes.take();
        let session = session?;
        match resumes {
            Some(resumes) => resumes.send(session).err().map(|refused| refused.0),
            None => Some(session),
        }
    }

    /// The export's name.
    pub fn id(&self) -> &str {
        &self.shared.id
    }

    /// Whether a client has queues running or starting, or requests in flight that it has left behind or whose queue it stops.
    pub fn is_in_use(&self) -> bool {
        if let DeviceType::Nbd(offer) = &self.device {
            return offer.is_in_use();
        }
        self.shared.is_in_use()
    }

    /// Whether one of its queues runs, as none does from when it begins to stop.
    pub fn has_running_queues(&self) -> bool {
        lock(&self.shared.queues).has_running()
    }

    /// Stops it, and its client's session is not to be kept. Whether there is no client, and none comes any more, no disk is to be
    /// written out, and no loop that has something of it is stuck: then nobody has to be waited for when it ends. How long a
    /// client's session takes to end the client decides, though it uses nothing.
    pub fn ends_at_once(&self) -> bool {
        self.shared.forget_session();
        // Before it is stopped, for then a client that is there may be gone at any moment.
        if let DeviceType::Nbd(offer) = &self.device {
            let was_idle = offer.is_idle();
            self.stop.set();
            // It has a lane on each loop, which that one is to let go of. And somebody may have come until just now.
            let loops = lock(&self.shared.queues).loops.clone();
            return was_idle && offer.is_idle() && loops.iter().all(|on| on.answers_within(PATIENCE));
        }
        let is_shut = self.shared.shut();
        self.stop.set();
        is_shut && lock(&self.shared.queues).unwritten.is_empty()
    }

    /// Whether rings of a client run, or did so a moment ago, so that its disks are to be active.
    pub fn has_active_disks(&self) -> bool {
        lock(&self.shared.queues).active.is_some()
    }

    /// Has a disk stay active that could not be written out when somebody else had it, until rings have run and it can be.
    /// Returned is one that it does not have.
    #[must_use]
    pub fn keep(&self, active: Active) -> Option<Active> {
        let mut queues = lock(&self.shared.queues);
        let found = queues.disks_by_key().find(|(_, disk)| Arc::ptr_eq(disk, active.disk()));
        let Some((key, _)) = found else { return Some(active) };
        // Who serves it here has it written out, too; who has left it lets go of it.
        let is_kept = queues.unwritten.iter().any(|(of, _)| *of == key);
        if !is_kept && queues.active.iter().flatten().all(|(of, active)| *of != key || !active.serves()) {
            queues.unwritten.push((key, active));
        }
        None
    }

    /// Lets others have a disk that was active only because it could not be written out, as it has been now.
    pub fn let_go(&self, disk: &Disk) {
        lock(&self.shared.queues).unwritten.retain(|(_, active)| !ptr::eq(&raw const **active.disk(), disk));
    }

    /// The sum of what its queues have counted since the export began.
    pub fn stats(&self) -> QueueStats {
        let mut sum = QueueStats::default();
        self.queues().iter().for_each(|queue| queue.add_to(&mut sum));
        sum
    }

    /// What each of its queues counts, from the export's beginning to its end.
    pub fn queues(&self) -> &[Arc<QueueCounters>] {
        self.shared.counters()
    }

    /// What it does about requests that fail, and whether it is stopped for one.
    pub fn errors(&self) -> &Arc<ErrorHandling> {
        &self.shared.errors
    }

    /// Whoever sets it has the export end, without waiting for that, as dropping the export does.
    pub const fn stop(&self) -> &EventNotifier {
        &self.stop
    }

    /// Ends it, as dropping it does, which waits. Returns the disks that are active still because they could not be written out.
    #[must_use]
    pub fn end(self) -> Vec<Active> {
        self.end_and_keep().0
    }

    /// As [`end`](Self::end), and returns what [is to be kept](crate::KeptSession::gather) of the client's session, if it may be.
    #[must_use]
    pub fn end_and_keep(mut self) -> (Vec<Active>, Option<Vec<OwnedFd>>) {
        let kept = self.join();
        let unwritten = mem::take(&mut lock(&self.shared.queues).unwritten);
        (unwritten.into_iter().map(|(_, active)| active).collect(), kept)
    }

    /// As [`end`](Self::end), but tries once more to have them written out.
    #[must_use]
    pub fn end_and_write_out(self) -> Vec<Active> {
        let log = self.shared.shared_log();
        let unwritten = self.end().into_iter();
        unwritten.filter_map(|active| write_out_last(active, &log)).collect()
    }

    /// Ends the client's session, if there is one, when its queues are drained; the address is free afterwards.
    fn join(&mut self) -> Option<Vec<OwnedFd>> {
        self.stop.set();
        self.resumes = None;
        self.thread.take()?.join().ok()?
    }

    /// The disk of a virtio-blk device has `bytes` now: tells the client, if it listens; says whether it could be told.
    /// The disks of a virtio-scsi device are [resized](Self::resize_lun) one by one.
    pub fn resize(&self, bytes: u64) -> bool {
        let DeviceType::Blk(blk) = &self.device else { return false };
        blk.resize(DiskKey(0), bytes);
        self.shared.set_news(true);
        self.shared.notify_config_change()
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.join();
    }
}

/// How long an export that cannot accept clients lets go by.
const BEFORE_TRYING_AGAIN: Duration = Duration::from_secs(1);

/// The export's thread: one client after the other, whom another daemon has kept first. Returns what is to be kept of the last.
fn serve(
    shared: &Shared,
    device: &Arc<dyn Device>,
    mut listener: Listener,
    stop: &EventNotifier,
    may_be_kept: bool,
    kept: Option<Kept>,
) -> Option<Vec<OwnedFd>> {
    let mut budget = ClientBudget::new();
    let log = shared.log();
    let (mut client, mut from) = kept.map(|Kept { client, said, state }| (client, (said, state))).unzip();
    loop {
        let arrived = match client.take() {
            None => listener.accept(log, stop.as_fd()),
            Some(client) => match listener.readmit(client, log) {
                Ok(Some(client)) => Ok(Some(client)),
                refused => {
                    // It is nobody else's.
                    from = None;
                    let Err(e) = refused else { continue };
                    Err(e)
                }
            },
        };
        match arrived {
            Ok(Some(client)) => {
                if !shared.let_in() {
                    return None;
                }
                log.info(format_args!(
                    "{}",
                    if from.is_some() { "a client's session goes on" } else { "a client connected" }
                ));
                let connection = Connection::new(client, stop.as_fd());
                match Session::new(shared, device, connection, &mut budget, may_be_kept).run(from.take()) {
                    Ok(None) => log.info(format_args!("the client left")),
                    Ok(Some(kept)) => match kept.into_sockets(&shared.id) {
                        Ok(sockets) => {
                            log.info(format_args!("the client's session is kept"));
                            return Some(sockets);
                        }
                        Err(e) => log.warn(format_args!("the client's session cannot be kept: {e}")),
                    },
                    Err(e) => log.warn(format_args!("the client's session is ended: {e}")),
                }
                shared.let_out();
            }
            Ok(None) => return None,
            Err(e) => {
                log.warn(format_args!("cannot accept clients: {e}"));
                // Out of descriptors, say: others may give some back.
                if !pause(stop.as_fd(), BEFORE_TRYING_AGAIN).unwrap_or(false) {
                    return None;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::thread::JoinHandleExt;
    use std::time::Instant;

    use super::*;

    #[test]
    fn who_cannot_accept_clients_waits_a_second_unless_it_is_to_stop() {
        let (stop, begun) = (EventNotifier::new().unwrap(), Instant::now());
        assert!(pause(stop.as_fd(), BEFORE_TRYING_AGAIN).unwrap());
        assert!(begun.elapsed().as_secs() >= 1);
        stop.set();
        assert!(!pause(stop.as_fd(), BEFORE_TRYING_AGAIN).unwrap());
    }

    #[test]
    #[allow(unsafe_code)]
    fn a_signal_is_not_taken_for_the_time_to_stop() {
        extern "C" fn ignore(_signal: libc::c_int) {}
        // SAFETY: the handler does nothing.
        unsafe { libc::signal(libc::SIGUSR2, ignore as extern "C" fn(libc::c_int) as libc::sighandler_t) };
        let stop = EventNotifier::new().unwrap();
        let waiting = std::thread::spawn(move || pause(stop.as_fd(), Duration::from_millis(100)));
        while !waiting.is_finished() {
            // SAFETY: the thread was not joined yet.
            unsafe { libc::pthread_kill(waiting.as_pthread_t(), libc::SIGUSR2) };
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(waiting.join().unwrap().unwrap());
    }
}
