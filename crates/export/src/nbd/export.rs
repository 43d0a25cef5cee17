//! An export over NBD: its lanes, and the thread that knows what is allocated.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use egret_confine::{Bounds, ThreadKind};
use egret_disk::Disk;
use egret_event_loop::{EventNotifier, LoopHandle};
use egret_vring::memory::MemoryRules;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::client::NewClient;
use super::extents::Queries;
use super::inbox::{Inbox, Letter};
use super::lane::{Lane, Terms};
use super::server::NbdServer;
use crate::errors::ErrorPolicy;
use crate::export::{DeviceType, Export, ExportError, Rings};
use crate::peer_log::PeerLog;
use crate::queues::{QueueCounts, Shared, lock};
use crate::source::Worker;
use crate::worker::Leave;

/// How an export over NBD is to be.
#[derive(Clone, Debug)]
pub struct NbdOptions {
    /// What clients call it.
    pub name: String,
    /// What it is for, to people.
    pub description: Option<String>,
    /// Whether clients may write.
    pub writable: bool,
    /// Whether writes complete only when they are stable.
    pub writethrough: bool,
    /// Clients that it has at a time; 0: any number that the server has. Who chooses it then is refused.
    pub max_connections: u32,
}

/// What an export's clients are offered, and where they go when they take it.
pub(crate) struct Offer {
    pub(super) options: NbdOptions,
    /// Looked at by the server's thread, which waits for nobody who moves lanes.
    disk: Mutex<Arc<Disk>>,
    log: Arc<PeerLog>,
    inboxes: Vec<Arc<Inbox>>,
    /// The lane of the next client.
    next: AtomicUsize,
    /// How many there are.
    pub(super) clients: Arc<AtomicUsize>,
    /// The export's thread looks up what is allocated, which may take as long as it likes.
    is_answering: Arc<AtomicBool>,
}

impl Offer {
    /// One that no client gets to.
    pub(super) fn without_lanes(options: NbdOptions, disk: &Arc<Disk>) -> Self {
        Self {
            log: Arc::new(PeerLog::new(&options.name)),
            options,
            disk: Mutex::new(Arc::clone(disk)),
            inboxes: Vec::new(),
            next: AtomicUsize::default(),
            clients: Arc::default(),
            is_answering: Arc::default(),
        }
    }

    /// The disk as it is now.
    pub(super) fn disk(&self) -> Arc<Disk> {
        Arc::clone(&lock(&self.disk))
    }

    /// The disk was opened otherwise.
    pub(crate) fn set_disk(&self, disk: &Arc<Disk>) {
        *lock(&self.disk) = Arc::clone(disk);
    }

    /// Gives a client to the next lane.
    pub(super) fn take(&self, client: NewClient) {
        let lane = self.next.fetch_add(1, Ordering::Relaxed) % self.inboxes.len();
        self.log.info(format_args!("a client connected"));
        self.inboxes[lane].post(Letter::Client(Box::new(client)));
    }

    /// Whether it has as many clients as it may have.
    pub(super) fn is_full(&self) -> bool {
        let most = self.options.max_connections as usize;
        most > 0 && self.clients.load(Ordering::Acquire) >= most
    }

    /// Whether clients use it.
    pub(crate) fn is_in_use(&self) -> bool {
        self.clients.load(Ordering::Acquire) > 0
    }

    /// Whether nobody has to be waited for when it ends: neither clients nor a question of one that has gone.
    pub(crate) fn is_idle(&self) -> bool {
        !self.is_in_use() && !self.is_answering.load(Ordering::Acquire)
    }
}

impl Export {
    /// Offers a disk to the clients of `server`, who are dealt out to the loops.
    ///
    /// # Errors
    ///
    /// The name is taken, or an I/O thread cannot run the disk; nothing is left behind.
    ///
    /// # Panics
    ///
    /// If there is no loop.
    pub fn start_nbd(
        id: String,
        options: NbdOptions,
        server: &NbdServer,
        disk: Arc<Disk>,
        loops: &[LoopHandle<Worker>],
    ) -> Result<Self, ExportError> {
        assert!(!loops.is_empty(), "an export needs a loop to run its clients");
        let system = |e: io::Error| ExportError::System(id.clone(), e);
        let stop = EventNotifier::new().map_err(system)?;
        let queries = Arc::new(Queries::new().map_err(system)?);
        let counts = QueueCounts { all: loops.len() as u16, diskless: 0 };
        let disks = vec![Some(Arc::clone(&disk))];
        let (memory, errors) = (MemoryRules::default(), ErrorPolicy::default());
        let shared = Arc::new(Shared::new(&id, counts, memory, Rings::default(), errors, disks, loops));
        let inboxes: Vec<Arc<Inbox>> = loops.iter().map(|_| Arc::default()).collect();
        let offer = Arc::new(Offer {
            options: options.clone(),
            disk: Mutex::new(Arc::clone(&disk)),
            log: shared.shared_log(),
            inboxes: inboxes.clone(),
            next: AtomicUsize::new(0),
            clients: Arc::default(),
            is_answering: queries.is_answering(),
        });
        let terms =
            Terms { export: id.as_str().into(), writable: options.writable, writethrough: options.writethrough };
        // From here on whatever fails takes the lanes back.
        let lanes = Lanes { shared: Arc::clone(&shared), queries: Arc::clone(&queries) };
        for (at, inbox) in inboxes.into_iter().enumerate() {
            let (log, counters) = (shared.shared_log(), Arc::clone(&shared.counters()[at]));
            let lane = Lane::new(terms.clone(), log, Arc::clone(&disk), counters, Arc::clone(&queries), inbox);
            let mut worker = Worker::from(lane.map_err(system)?);
            worker.set_home(loops[at].clone());
            lock(&shared.queues).running[at] = Some(loops[at].attach(worker).map_err(|(_, e)| system(e))?);
        }
        let listed = server.list(&offer).ok_or_else(|| ExportError::NbdName(id.clone(), options.name.clone()))?;
        let (theirs, bounds) = (stop.clone(), Bounds::of_this_thread());
        let thread = std::thread::Builder::new().name(id.clone()).stack_size(256 << 10).spawn(move || {
            bounds.narrow(ThreadKind::Session);
            answer(&lanes.queries, &theirs);
            // Nobody comes any more, and those who are here go.
            drop(listed);
            drop(lanes);
            // Who had connected connects again.
            None
        });
        Ok(Self::running(shared, DeviceType::Nbd(offer), stop, thread.map_err(system)?))
    }
}

/// The lanes of an export, which end with this.
struct Lanes {
    shared: Arc<Shared>,
    queries: Arc<Queries>,
}

impl Drop for Lanes {
    fn drop(&mut self) {
        let count = self.shared.counts.all.into();
        let leaving: Vec<_> = (0..count).map(|lane| self.shared.stop(lane, Leave::Nothing)).collect();
        for leaving in leaving {
            drop(leaving.wait());
            self.shared.has_stopped();
        }
    }
}

/// Answers what is asked, until it is time to stop.
fn answer(queries: &Queries, stop: &EventNotifier) {
    loop {
        let mut fds = [stop.as_fd(), queries.bell().as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let _ = poll(&mut fds, None);
        if !fds[0].revents().is_empty() {
            return;
        }
        queries.bell().clear();
        while queries.answer() {
            let mut fds = [PollFd::new(stop, PollFlags::IN)];
            if poll(&mut fds, Some(&Timespec::default())) != Ok(0) {
                return;
            }
        }
    }
}
