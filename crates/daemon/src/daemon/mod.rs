//! Objects brought to life: disks opened, I/O threads started, exports listening.

mod disks;
mod exports;
mod io_threads;
mod scsi;

use std::collections::BTreeMap;
use std::sync::Arc;

use egret_disk::Disk;
use egret_event_loop::LoopStats;
use egret_export::{Export, QueueStats};
use egret_polling::trace::Trace;

use crate::{Config, schema};
use io_threads::RunningIoThread;

/// The I/O thread of exports that name none.
const DEFAULT_IOTHREAD: &str = "io";

/// Why a daemon could not be started: one line that names the object.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] egret_disk::OpenError),
    /// An I/O thread cannot be started.
    #[error("iothread '{0}': {1}")]
    IoThread(String, String),
    /// An export's blocks do not fit the disk.
    #[error("export '{export}': logical-block-size={block} does not divide {disk}, which has {size} bytes")]
    OddSize {
        /// The export.
        export: String,
        /// Its logical block, in bytes.
        block: u32,
        /// The disk.
        disk: String,
        /// Its size in bytes.
        size: u64,
    },
    /// An export's descriptor is not there.
    #[error("export '{0}': addr.str {1}: {2}")]
    Inherit(String, i32, #[source] std::io::Error),
    /// An export cannot be made.
    #[error(transparent)]
    Export(#[from] egret_export::ExportError),
}

/// Everything that a [`Config`] asks for, running. Dropping it ends it: exports drain and go, then threads, then disks.
pub struct Daemon {
    exports: Vec<Export>,
    io_threads: BTreeMap<String, RunningIoThread>,
    disks: BTreeMap<String, Arc<Disk>>,
}

impl Daemon {
    /// Brings all of `config` to life.
    ///
    /// # Errors
    ///
    /// The first object that cannot be had. Nothing is left behind.
    pub fn start(config: &Config) -> Result<Self, StartError> {
        let mut new = Self { exports: Vec::new(), io_threads: BTreeMap::new(), disks: BTreeMap::new() };
        new.open_disks(config)?;
        for io_thread in &config.iothreads {
            new.start_io_thread(io_thread)?;
        }
        for export in &config.exports {
            new.start_export(export)?;
        }
        Ok(new)
    }

    fn open_disks(&mut self, config: &Config) -> Result<(), StartError> {
        let exported = config.exports.iter().flat_map(schema::Export::node_names).map(|(_, node)| node);
        // A blockdev that another lies over is opened with that one.
        let below: Vec<_> = config.blockdevs.iter().filter_map(schema::Blockdev::child_name).collect();
        let tops = config.blockdevs.iter().filter_map(|blockdev| blockdev.node_name.as_deref());
        for name in exported.chain(tops.filter(|name| !below.contains(name))) {
            if let (Some(disk), false) = (config.disk(name), self.disks.contains_key(name)) {
                let writes = |export: &schema::Export| export.writable && export.has_node(name);
                let written = config.exports.iter().any(writes);
                self.disks.insert(name.to_owned(), Arc::new(Disk::open(&disks::options(name, &disk, written))?));
            }
        }
        Ok(())
    }

    fn start_io_thread(&mut self, object: &schema::IoThread) -> Result<(), StartError> {
        self.io_threads.insert(object.id.clone(), RunningIoThread::start(object)?);
        Ok(())
    }

    fn start_export(&mut self, object: &schema::Export) -> Result<(), StartError> {
        let mut loops = Vec::new();
        for queue in 0..object.num_queues {
            let name = match object.iothread_of(queue) {
                Some(name) => name,
                None => {
                    if !self.io_threads.contains_key(DEFAULT_IOTHREAD) {
                        self.start_io_thread(&schema::IoThread::new(DEFAULT_IOTHREAD))?;
                    }
                    DEFAULT_IOTHREAD
                }
            };
            loops.push(self.io_threads[name].handle().clone());
        }
        self.exports.push(exports::start(object, |name| Arc::clone(&self.disks[name]), loops)?);
        Ok(())
    }

    /// What the queues of all exports have counted since they began.
    pub fn queue_stats(&self) -> QueueStats {
        let mut sum = QueueStats::default();
        self.exports.iter().for_each(|export| sum.add(&export.stats()));
        sum
    }

    /// Records how each I/O thread waits, from here on: the newest `capacity` waits, in memory that is taken now.
    ///
    /// # Errors
    ///
    /// What blocking costs cannot be measured.
    pub fn record_waits(&self, capacity: usize) -> std::io::Result<()> {
        self.io_threads.values().try_for_each(|io_thread| io_thread.record_waits(capacity))
    }

    /// Ends the recording: a trace of each I/O thread, by its name. `note` says where it was made.
    pub fn take_recordings(&self, note: &str) -> BTreeMap<&str, Trace> {
        let take = |(name, io_thread): (_, &RunningIoThread)| {
            let note = format!("iothread {name}: {note}");
            Some((String::as_str(name), io_thread.take_recording(note)?))
        };
        self.io_threads.iter().filter_map(take).collect()
    }

    /// What each I/O thread has counted since it began, by its name.
    pub fn loop_stats(&self) -> BTreeMap<&str, LoopStats> {
        self.io_threads.iter().filter_map(|(name, io_thread)| Some((name.as_str(), io_thread.stats()?))).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Clients first, so that everything in flight ends; then threads; what was written is made stable last.
        self.exports.clear();
        self.io_threads.clear();
        for (name, disk) in &self.disks {
            if let Err(e) = disk.flush() {
                tracing::error!("blockdev '{name}': the last flush failed: {e}");
            }
        }
    }
}
