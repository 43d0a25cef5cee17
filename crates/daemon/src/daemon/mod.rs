//! Objects brought to life: disks opened, I/O threads started, exports listening.
//!
//! | module | adds, changes and removes |
//! |---|---|
//! | `io_threads` | loops, each on a thread of its own |
//! | `disks`, `calls` | images that are open, and what waits for one that may hang |
//! | `remote` | images of clusters, as their options say |
//! | `exports` | disks offered at an address |
//! | `nbd` | the server that has exports over NBD |
//! | `luns`, `scsi` | logical units of an export, and what the guest sees of them |
//! | `reservations` | files that reservations are kept in |
//! | `limits` | limits on disks, and groups that share them |
//! | `fd_sets` | descriptors that were handed over, to open images through |
//! | `live` | which I/O threads and disks queues use while they run |
//! | `teardowns` | exports and units that drain before they are gone |
//! | `ending` | everything, at the end |
//! | `failures`, `view`, `statistics`, `counter_registry` | nothing: they show what disks could not do, what there is, and what was counted |
//!
//! The objects of a command line and those that a monitor adds go through the same functions. Each leaves everything as
//! it was when it fails.

mod activity;
mod calls;
mod counter_registry;
mod credentials;
mod disks;
mod ending;
mod error;
mod exports;
mod failures;
mod fd_sets;
mod io_threads;
mod limits;
mod live;
mod luns;
mod nbd;
mod remote;
mod reservations;
mod scsi;
mod secrets;
mod statistics;
mod teardowns;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use egret_disk::{Active, Disk, Loss, ThrottleGroup};
use egret_export::{KeptSession, NbdServer};
use egret_polling::trace::Trace;
use egret_vocabulary::Config;
use egret_vocabulary::schema::{AddFd, Addr, FdAddr};
use egret_vring::memory::{MemoryBudget, MemoryLimits};

use crate::process::{Inherited, Patience, forget_sessions, keeps_sessions};
use calls::{Calls, PATIENCE};
pub use counter_registry::{CounterRegistry, IoThreadCounters, Time, Watched};
pub use credentials::Credentials;
use disks::Unsettled;
pub use error::{ChangeError, StartError};
pub use exports::Deletion;
pub use failures::{BrokenQueue, DiskFailure, Failures, RequestTimeout};
use fd_sets::FdSets;
pub use fd_sets::{FdSetError, FdSetShown};
use io_threads::RunningIoThread;
pub(crate) use remote::cluster_of;
use scsi::KeptUnit;
pub use statistics::DiskState;
use teardowns::Teardowns;
pub use teardowns::TornDown;
pub use view::View;

/// The I/O thread of exports that name none.
pub(crate) const DEFAULT_IOTHREAD: &str = "io";

/// Everything that a [`Config`] asks for, running. Dropping it [ends](Self::end) it, however long that takes.
pub struct Daemon {
    /// The objects that there are; they always fit together.
    config: Config,
    exports: BTreeMap<String, egret_export::Export>,
    io_threads: BTreeMap<String, RunningIoThread>,
    /// How many waits of each I/O thread are kept, if they are recorded.
    recorded_waits: Option<usize>,
    disks: BTreeMap<String, Arc<Disk>>,
    /// The disks that `blockdev-set-active` has active; each is one of `disks`.
    held: BTreeMap<String, Active>,
    /// The disks that exports and units which are gone have left active, because they could not be written out, and that no
    /// other export has; each is one of `disks`.
    unwritten: BTreeMap<String, Active>,
    /// The disks that have given their locks back, whatever their options say, for they are to be opened otherwise and cannot
    /// be; each is one of `disks`, and nobody uses it.
    unlocked: BTreeSet<String>,
    /// What images have lost that are about to be opened otherwise, by the blockdev that has the image: others may be laid
    /// over it, or taken away, before it is opened.
    losses: BTreeMap<String, Loss>,
    /// Those of which it is not known yet, because they were closed as they hung. They are opened when it is.
    unsettled: Vec<Unsettled>,
    /// Those that commands have put a blockdev in, by blockdev; several may have the same.
    throttle_groups: BTreeMap<String, Arc<ThrottleGroup>>,
    /// Those of objects, by their names.
    throttle_objects: BTreeMap<String, Arc<ThrottleGroup>>,
    /// By blockdev: more than one where its exports look different.
    units: BTreeMap<String, Vec<KeptUnit>>,
    teardowns: Teardowns,
    registry: Arc<CounterRegistry>,
    failures: Arc<Failures>,
    /// What is mapped of guests' memory for all exports.
    memory: Arc<MemoryBudget>,
    fd_sets: FdSets,
    calls: Calls,
    /// What disks and the NBD server encrypt by.
    credentials: Credentials,
    /// It outlives its exports.
    nbd_server: Option<NbdServer>,
    /// Whether somebody keeps clients' sessions when this ends, and what was kept for it, by export.
    keeps_sessions: bool,
    kept: BTreeMap<String, KeptSession>,
}

/// Memory regions mapped for all exports together: half of the mappings that Linux lets a process have by default
/// (`vm.max_map_count`). The rest is for everything else that the process does.
const MOST_REGIONS: usize = 1 << 15;

impl Daemon {
    /// Brings all of `config` to life, exports where they are `inherited` on the sockets of that.
    ///
    /// # Errors
    ///
    /// The first object that cannot be had. Nothing is left behind.
    pub fn start(config: &Config, inherited: &mut Inherited) -> Result<Self, StartError> {
        let no_bell = |e: std::io::Error| StartError::IoThread("main".to_owned(), e.to_string());
        // A disk may be added, and clients come, when the calling thread is confined.
        egret_nbd::start().map_err(no_bell)?;
        egret_event_loop::closer::begin().map_err(no_bell)?;
        let mut new = Self {
            config: config.clone(),
            exports: BTreeMap::new(),
            io_threads: BTreeMap::new(),
            recorded_waits: None,
            disks: BTreeMap::new(),
            held: BTreeMap::new(),
            unwritten: BTreeMap::new(),
            unlocked: BTreeSet::new(),
            losses: BTreeMap::new(),
            unsettled: Vec::new(),
            registry: Arc::default(),
            throttle_groups: BTreeMap::new(),
            throttle_objects: BTreeMap::new(),
            units: BTreeMap::new(),
            teardowns: Teardowns::new().map_err(no_bell)?,
            failures: Failures::new().map_err(no_bell)?.into(),
            memory: MemoryBudget::new(
                MemoryLimits { bytes: config.memory_max, regions: MOST_REGIONS },
                "daemon",
                "--memory-max",
            ),
            fd_sets: FdSets::default(),
            calls: Calls::default(),
            credentials: match inherited.take_credentials() {
                Some(read) => read,
                None => Credentials::read(config)?,
            },
            nbd_server: None,
            keeps_sessions: keeps_sessions(),
            kept: KeptSession::gather(inherited.take_sessions())
                .into_iter()
                .map(|session| (session.export().to_owned(), session))
                .collect(),
        };
        if let Some(server) = &config.nbd_server {
            new.nbd_server = Some(nbd::start(server, &new.credentials)?);
        }
        for AddFd { fd, set, opaque } in inherited.take_sets() {
            let descriptor = inherited.take(&fd).map_err(|e| StartError::AddFd(fd, e))?;
            new.keep_fd(set, descriptor, opaque);
        }
        config.throttle_groups.iter().for_each(|object| new.make_throttle_group(object));
        let all: Vec<_> = config.node_names().into_iter().map(str::to_owned).collect();
        new.reconcile_disks(&all)?;
        for io_thread in &config.iothreads {
            new.start_io_thread(io_thread)?;
        }
        for export in &config.exports {
            let socket = match export.addr() {
                None | Some(Addr::Unix(_)) => None,
                Some(Addr::Fd(FdAddr { str: fd })) => {
                    let explain = |e| StartError::Inherit(export.id.clone(), fd.clone(), e);
                    Some(inherited.take(fd).map_err(explain)?)
                }
            };
            new.start_export(export, socket)?;
        }
        new.nbd_server.iter().for_each(NbdServer::open);
        new.calls.limit(PATIENCE);
        Ok(new)
    }

    /// Has exports go on with the sessions that were kept for them, and only then with others: whoever starts next would find
    /// these nowhere.
    pub fn resume_sessions(&mut self) {
        if !self.keeps_sessions && self.kept.is_empty() {
            return;
        }
        for (id, session) in std::mem::take(&mut self.kept) {
            let taken = session.take();
            if let Err(e) = &taken {
                tracing::warn!("export '{id}': what was kept of its client's session cannot be had: {e}");
            }
            let left = match self.exports.get_mut(&id) {
                Some(export) => export.go_on_with(taken.ok()),
                None => taken.ok(),
            };
            if let Some(left) = left {
                tracing::warn!("export '{id}' is not for the client whose session was kept, who is hung up on");
                // How long it takes to close what a client has handed over is for the client to say.
                let _ = std::thread::Builder::new().name("peer-close".to_owned()).spawn(move || drop(left));
            }
        }
        forget_sessions();
    }

    /// Records how each I/O thread waits, from here on, and those that are yet to come from their beginning: the newest
    /// `capacity` waits, in memory that is taken now, or then.
    ///
    /// # Errors
    ///
    /// What blocking costs cannot be measured.
    pub fn record_waits(&mut self, capacity: usize) -> std::io::Result<()> {
        self.recorded_waits = Some(capacity);
        self.io_threads.values().try_for_each(|io_thread| io_thread.record_waits(capacity))
    }

    /// Ends the recording: a trace of each I/O thread that is not stuck, by its name. `note` says where it was made.
    pub fn take_recordings(&self, note: &str) -> BTreeMap<&str, Trace> {
        let take = |(name, io_thread): (_, &RunningIoThread)| {
            let note = format!("iothread {name}: {note}");
            Some((String::as_str(name), io_thread.take_recording(note)?))
        };
        self.io_threads.iter().filter_map(take).collect()
    }

    /// Where the counters of all that runs are found, for as long as it runs.
    pub const fn registry(&self) -> &Arc<CounterRegistry> {
        &self.registry
    }

    /// The objects that there are.
    pub const fn config(&self) -> &Config {
        &self.config
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.wind_down(&Patience::endless());
    }
}

#[cfg(test)]
mod tests;
