//! Exports: disks offered at an address.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use egret_disk::Disk;
use egret_export::{Address, Export, ExportConfig};
use egret_virtio::blk::{BlkConfig, DiscardLimits, SECTOR, WriteZeroesLimits};
use rustix::event::{EventfdFlags, eventfd};

use super::{ChangeError, DEFAULT_IOTHREAD, Daemon, StartError, disks, scsi};
use crate::process::sys::inherit;
use crate::schema;

/// An export that serves.
pub(super) type RunningExport = Export;

/// How an export is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deletion {
    /// Not while a client uses it.
    Safe,
    /// At once; its client is cut off when what is in flight has ended.
    Hard,
}

/// Exports that are going: each drains on a thread of its own, so that nobody else waits for it.
pub(super) struct Departures {
    going: BTreeMap<String, JoinHandle<()>>,
    /// Those that are gone and not yet told of.
    gone: Vec<String>,
    tell: Sender<String>,
    told: Receiver<String>,
    bell: Arc<OwnedFd>,
}

impl Departures {
    pub(super) fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (tell, told) = channel();
        Ok(Self { going: BTreeMap::new(), gone: Vec::new(), tell, told, bell: Arc::new(bell) })
    }

    fn add(&mut self, id: &str, export: RunningExport) {
        if !export.is_in_use() {
            drop(export);
            self.gone.push(id.to_owned());
            return;
        }
        let (tell, bell, name) = (self.tell.clone(), Arc::clone(&self.bell), id.to_owned());
        let leave = move || {
            drop(export);
            let _ = tell.send(name);
            let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
        };
        match std::thread::Builder::new().name("egret-departure".to_owned()).spawn(leave) {
            Ok(thread) => drop(self.going.insert(id.to_owned(), thread)),
            // Then the export was dropped with the closure, here and now.
            Err(e) => {
                tracing::warn!("export '{id}': no thread to wait for its end: {e}");
                self.gone.push(id.to_owned());
            }
        }
    }

    fn take(&mut self) -> Vec<String> {
        let _ = rustix::io::read(&*self.bell, &mut [0_u8; 8]);
        while let Ok(id) = self.told.try_recv() {
            if let Some(thread) = self.going.remove(&id) {
                let _ = thread.join();
            }
            self.gone.push(id);
        }
        std::mem::take(&mut self.gone)
    }

    pub(super) fn wait(&mut self) {
        while let Some((_, thread)) = self.going.pop_first() {
            let _ = thread.join();
        }
    }
}

impl Daemon {
    /// Adds an export, which listens when this returns.
    ///
    /// # Errors
    /// Its name or address is taken, or what it needs is not there.
    pub fn add_export(&mut self, object: schema::Export) -> Result<(), ChangeError> {
        let known = |id: &str| self.config.exports.iter().any(|export| export.id == id);
        if known(&object.id) {
            return Err(ChangeError::DuplicateExport(object.id));
        }
        let nodes = self.config.node_names();
        if let Some((_, name)) = object.node_names().find(|(_, name)| !nodes.contains(name)) {
            return Err(ChangeError::NoDevice(String::new(), name.to_owned()));
        }
        if let Some((_, name)) = object.iothreads().find(|(_, name)| !self.io_threads.contains_key(*name)) {
            return Err(ChangeError::NoIoThread(name.to_owned()));
        }
        if let schema::Addr::Fd { .. } = object.addr {
            return Err(ChangeError::LateDescriptor(object.id));
        }
        self.config.add_export(object.clone())?;
        let started = self.settle_disks().and_then(|()| self.start_export(&object));
        if let Err(e) = started {
            self.config.exports.pop();
            self.settle_disks_again();
            return Err(e.into());
        }
        Ok(())
    }

    /// Removes an export: at once if it has no client, else when its client's requests have ended and
    /// [`departed`](Self::departed) says so.
    ///
    /// # Errors
    /// There is none of this name, or a client uses it and the deletion is to be safe.
    pub fn remove_export(&mut self, id: &str, how: Deletion) -> Result<(), ChangeError> {
        let Some(export) = self.exports.get(id) else {
            // It is on its way out already.
            let is_going = self.config.exports.iter().any(|export| export.id == id);
            return if is_going { Ok(()) } else { Err(ChangeError::NoExport(id.to_owned())) };
        };
        if export.is_in_use() && how == Deletion::Safe {
            return Err(ChangeError::ExportInUse(id.to_owned()));
        }
        if let Some(export) = self.exports.remove(id) {
            self.board.take_down_export(id);
            self.departures.add(id, export);
        }
        Ok(())
    }

    /// Readable when [`departed`](Self::departed) has news.
    pub fn departures(&self) -> BorrowedFd<'_> {
        self.departures.bell.as_fd()
    }

    /// The exports that have gone since this was last asked; their names, disks and threads are free from here on.
    pub fn departed(&mut self) -> Vec<String> {
        let gone = self.departures.take();
        if !gone.is_empty() {
            self.config.exports.retain(|export| !gone.contains(&export.id));
            self.settle_disks_again();
        }
        gone
    }

    /// Whether an export is on its way out.
    pub fn is_departing(&self, id: &str) -> bool {
        !self.exports.contains_key(id)
    }

    pub(super) fn start_export(&mut self, object: &schema::Export) -> Result<(), StartError> {
        let disks: Vec<_> = object.node_names().map(|(_, name)| Arc::clone(&self.disks[name])).collect();
        for disk in &disks {
            let (block, size) = (object.logical_block_size, disk.size());
            if size % u64::from(block) != 0 {
                return Err(StartError::OddSize {
                    export: object.id.clone(),
                    block,
                    disk: disks::described(disk),
                    size,
                });
            }
        }
        let address = match &object.addr {
            schema::Addr::Unix { path } => Address::Path(path.into()),
            schema::Addr::Fd { fd } => {
                Address::Fd(inherit(*fd).map_err(|e| StartError::Inherit(object.id.clone(), *fd, e))?)
            }
        };
        let mut loops = Vec::new();
        for queue in 0..object.num_queues {
            let name = object.iothread_of(queue).unwrap_or(DEFAULT_IOTHREAD);
            if !self.io_threads.contains_key(name) {
                self.start_default_io_thread()?;
            }
            loops.push(self.io_threads[name].handle().clone());
        }
        let id = object.id.clone();
        let export = match object.kind {
            schema::ExportType::VhostUserBlk => {
                let disk = Arc::clone(&disks[0]);
                Export::start(ExportConfig { id, address, device: device(object, &disk) }, disk, loops)?
            }
            schema::ExportType::VhostUserScsi => Export::start_scsi(scsi::export(object, disks, address), loops)?,
        };
        self.board.put_up_export(&export);
        self.exports.insert(object.id.clone(), export);
        Ok(())
    }

    /// The thread of exports that name none, which is an object like any other once it is there.
    fn start_default_io_thread(&mut self) -> Result<(), StartError> {
        let object = schema::IoThread::new(DEFAULT_IOTHREAD);
        self.start_io_thread(&object)?;
        self.config.iothreads.push(object);
        Ok(())
    }
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
