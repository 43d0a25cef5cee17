//! Objects brought to life: disks opened, I/O threads started, exports listening.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use egret_disk::{Aio, DetectZeroes, Discard, Disk, Driver, EngineOptions, Engines, Locking, Options};
use egret_event_loop::{EventLoop, LoopHandle, LoopOptions, LoopStats, MonitorChoice, Nanos, spawn};
use egret_export::{Address, Export, ExportConfig, QueueStats, Worker};
use egret_polling::{Parameters, PolicyKind};
use egret_virtio::blk::{BlkConfig, DiscardLimits, SECTOR, WriteZeroesLimits};

use crate::disk::Bottom;
use crate::process::sys::inherit;
use crate::{Config, disk, schema, scsi};

/// The I/O thread of exports that name none.
const DEFAULT_IOTHREAD: &str = "io";

/// The policy of I/O threads that name none.
const DEFAULT_POLICY: PolicyKind = PolicyKind::Weighted;

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
    io_threads: BTreeMap<String, IoThread>,
    disks: BTreeMap<String, Arc<Disk>>,
}

/// A loop on its thread.
struct IoThread {
    handle: LoopHandle<Worker>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
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
                let written = config
                    .exports
                    .iter()
                    .any(|export| export.writable && export.node_names().any(|(_, node)| node == name));
                self.disks.insert(name.to_owned(), Arc::new(Disk::open(&disk_options(name, &disk, written))?));
            }
        }
        Ok(())
    }

    fn start_io_thread(&mut self, object: &schema::IoThread) -> Result<(), StartError> {
        let failed = |e: String| StartError::IoThread(object.id.clone(), e);
        let parameters = Parameters {
            max: Nanos(object.poll_max_ns),
            grow: object.poll_grow,
            shrink: object.poll_shrink,
            weight: object.poll_weight,
            price: object.poll_price,
        };
        let kind = object.poll_policy.map_or(DEFAULT_POLICY, policy);
        let options = LoopOptions {
            name: object.id.clone(),
            monitor: monitor(object.fd_monitor),
            policy: egret_polling::build(kind, &parameters).map_err(|e| failed(e.to_string()))?,
            window_max: parameters.max,
            idle_after: Nanos::from_millis(object.poll_idle_ms.into()),
            calibrate: kind == PolicyKind::LowRegret,
        };
        let pool = (object.thread_pool_min, object.thread_pool_max);
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
                thread_pool_min: pool.0,
                thread_pool_max: pool.1,
                aio_max_batch,
                ..EngineOptions::default()
            })
        })
        .map_err(|e| failed(e.to_string()))?;
        self.io_threads.insert(object.id.clone(), IoThread { handle, thread: Some(thread) });
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
            loops.push(self.io_threads[name].handle.clone());
        }
        let address = match &object.addr {
            schema::Addr::Unix { path } => Address::Path(path.into()),
            schema::Addr::Fd { fd } => {
                Address::Fd(inherit(*fd).map_err(|e| StartError::Inherit(object.id.clone(), *fd, e))?)
            }
        };
        self.exports.push(match object.kind {
            schema::ExportType::VhostUserBlk => {
                let disk = self.fitting(object, &object.node_name)?;
                let device = device(object, &disk);
                Export::start(ExportConfig { id: object.id.clone(), address, device }, disk, loops)?
            }
            schema::ExportType::VhostUserScsi => {
                let disks = object.luns.iter().map(|lun| self.fitting(object, &lun.node_name));
                Export::start_scsi(scsi::export(object, disks.collect::<Result<_, _>>()?, address), loops)?
            }
        });
        Ok(())
    }

    /// A disk that the blocks of an export fit.
    fn fitting(&self, object: &schema::Export, node_name: &str) -> Result<Arc<Disk>, StartError> {
        let disk = &self.disks[node_name];
        let (block, size) = (object.logical_block_size, disk.size());
        if size % u64::from(block) != 0 {
            return Err(StartError::OddSize { export: object.id.clone(), block, disk: described(disk), size });
        }
        Ok(Arc::clone(disk))
    }

    /// What the queues of all exports have counted since they began.
    pub fn queue_stats(&self) -> QueueStats {
        let mut sum = QueueStats::default();
        self.exports.iter().for_each(|export| sum.add(&export.stats()));
        sum
    }

    /// What each I/O thread has counted since it began, by its name.
    pub fn loop_stats(&self) -> BTreeMap<&str, LoopStats> {
        let ask = |io_thread: &IoThread| io_thread.handle.call(|target| *target.stats()).ok();
        self.io_threads.iter().filter_map(|(name, io_thread)| Some((name.as_str(), ask(io_thread)?))).collect()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Clients first, so that everything in flight ends; then threads; what was written is made stable last.
        self.exports.clear();
        for io_thread in self.io_threads.values_mut() {
            io_thread.handle.send(EventLoop::stop);
            if let Some(Ok(Err(e))) = io_thread.thread.take().map(JoinHandle::join) {
                tracing::error!("an I/O thread ended early: {e}");
            }
        }
        for (name, disk) in &self.disks {
            if let Err(e) = disk.flush() {
                tracing::error!("blockdev '{name}': the last flush failed: {e}");
            }
        }
    }
}

/// What messages call a disk: its node, and its file if it has one.
fn described(disk: &Disk) -> String {
    let node = disk.node_name();
    match &disk.options().driver {
        Driver::File { filename } | Driver::HostDevice { filename } => {
            format!("blockdev '{node}' ('{}')", filename.display())
        }
        Driver::Null { .. } => format!("blockdev '{node}'"),
    }
}

fn bind_this_thread(cpus: &schema::Cpus) -> rustix::io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(cpu.into()));
    rustix::thread::sched_setaffinity(None, &set)
}

fn monitor(word: schema::FdMonitor) -> MonitorChoice {
    match word {
        schema::FdMonitor::Auto => MonitorChoice::Auto,
        schema::FdMonitor::Ppoll => MonitorChoice::Ppoll,
        schema::FdMonitor::Epoll => MonitorChoice::Epoll,
        schema::FdMonitor::IoUring => MonitorChoice::IoUring,
    }
}

fn policy(word: schema::PollPolicy) -> PolicyKind {
    match word {
        schema::PollPolicy::Off => PolicyKind::Off,
        schema::PollPolicy::Busy => PolicyKind::Busy,
        schema::PollPolicy::SharedWindow => PolicyKind::SharedWindow,
        schema::PollPolicy::PerSourceWindow => PolicyKind::PerSourceWindow,
        schema::PollPolicy::Weighted => PolicyKind::Weighted,
        schema::PollPolicy::LowRegret => PolicyKind::LowRegret,
    }
}

fn aio(word: schema::Aio) -> Aio {
    match word {
        schema::Aio::Threads => Aio::Threads,
        schema::Aio::Native => Aio::Native,
        schema::Aio::IoUring => Aio::IoUring,
    }
}

fn locking(word: schema::Locking) -> Locking {
    match word {
        schema::Locking::Auto => Locking::Auto,
        schema::Locking::On => Locking::On,
        schema::Locking::Off => Locking::Off,
    }
}

fn discard(word: schema::Discard) -> Discard {
    match word {
        schema::Discard::Ignore => Discard::Ignore,
        schema::Discard::Unmap => Discard::Unmap,
    }
}

fn detect_zeroes(word: schema::DetectZeroes) -> DetectZeroes {
    match word {
        schema::DetectZeroes::Off => DetectZeroes::Off,
        schema::DetectZeroes::On => DetectZeroes::On,
        schema::DetectZeroes::Unmap => DetectZeroes::Unmap,
    }
}

/// How the image at the bottom of `disk` is opened. It is opened for writing only if an export writes.
fn disk_options(name: &str, disk: &disk::Disk<'_>, written: bool) -> Options {
    let mut options = Options::new(
        name,
        match disk.bottom {
            Bottom::File(image) => Driver::File { filename: image.filename.clone().into() },
            Bottom::HostDevice(image) => Driver::HostDevice { filename: image.filename.clone().into() },
            Bottom::Null(null) => {
                Driver::Null { size: null.size, latency: Nanos(null.latency_ns), read_zeroes: null.read_zeroes }
            }
        },
    );
    if let Bottom::File(image) | Bottom::HostDevice(image) = disk.bottom {
        options.aio = aio(image.aio);
        options.locking = locking(image.locking);
    }
    options.direct = disk.direct;
    options.no_flush = disk.no_flush;
    options.read_only = disk.read_only || !written;
    options.discard = discard(disk.discard);
    options.detect_zeroes = detect_zeroes(disk.detect_zeroes);
    options
}

/// What the guest is to see of an export.
fn device(export: &schema::Export, disk: &Disk) -> BlkConfig {
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX);
    BlkConfig {
        capacity_bytes: disk.size(),
        logical_block_size: export.logical_block_size,
        physical_block_size: disk.physical_block_size().max(export.logical_block_size),
        num_queues: export.num_queues,
        queue_size: export.queue_size,
        read_only: !export.writable,
        serial: export.serial().to_owned(),
        writethrough: export.writethrough,
        // Offered always, as qemu-storage-daemon does, so that a guest can move between the two: a discard that is
        // ignored succeeds, and zeroes are written where they cannot be asked for.
        discard: Some(DiscardLimits {
            max_sectors: sectors(disk.max_discard_bytes()),
            alignment: sectors(disk.discard_granularity().into()).max(1),
        }),
        write_zeroes: Some(WriteZeroesLimits {
            max_sectors: sectors(disk.max_write_zeroes_bytes()),
            may_unmap: disk.supports_discard(),
        }),
    }
}
