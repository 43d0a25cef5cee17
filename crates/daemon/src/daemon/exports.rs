//! Exports: disks offered at an address.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use egret_disk::Disk;
use egret_export::{Address, Export, ExportConfig, Kickless, MAX_MEMORY_SLOTS, MAX_SOCKET_PATH, ScsiExportConfig};
use egret_virtio::blk::{BlkConfig, DiscardLimits, SECTOR, WriteZeroesLimits};
use egret_virtio::scsi::ScsiConfig;
use egret_vocabulary::schema::{self, BlkDevice, FdAddr, UnixAddr};
use egret_vring::memory::{MemoryFiles, MemoryLimits, MemoryRules};

use super::departures::Departed;
use super::{ChangeError, DEFAULT_IOTHREAD, Daemon, StartError, disks};
use crate::process::InheritError;

/// How an export is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deletion {
    /// Not while a client uses it.
    Safe,
    /// At once; its client is cut off when what is in flight has ended.
    Hard,
}

// A path that an option may hold is one that a socket can have.
const _: () = assert!(schema::LONGEST_SOCKET_PATH == MAX_SOCKET_PATH);

impl Daemon {
    /// Adds an export, which listens when this returns.
    ///
    /// # Errors
    /// Its name or address is taken, or what it needs is not there.
    pub fn add_export(&mut self, object: schema::Export) -> Result<(), ChangeError> {
        self.add_export_on(object, None)
    }

    /// As [`add_export`](Self::add_export), on a socket that was handed over if its address says so.
    ///
    /// # Errors
    /// As [`add_export`](Self::add_export).
    pub fn add_export_on(&mut self, object: schema::Export, socket: Option<OwnedFd>) -> Result<(), ChangeError> {
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
        if matches!(object.addr, schema::Addr::Fd(_)) && socket.is_none() {
            return Err(ChangeError::NoSocket(object.id));
        }
        self.config.add_export(object.clone())?;
        let started = self.settle_disks().and_then(|()| self.start_export(&object, socket));
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
            let what = Departed::Export { id: id.to_owned() };
            if export.is_in_use() {
                self.departures.add(what, move || drop(export));
            } else {
                drop(export);
                self.departures.add_gone(what);
            }
        }
        Ok(())
    }

    /// Whether an export is on its way out.
    pub fn is_departing(&self, id: &str) -> bool {
        !self.exports.contains_key(id)
    }

    pub(super) fn start_export(&mut self, object: &schema::Export, socket: Option<OwnedFd>) -> Result<(), StartError> {
        let disks: Vec<_> = object.node_names().map(|(_, name)| Arc::clone(&self.disks[name])).collect();
        disks.iter().try_for_each(|disk| check_size(object, disk))?;
        let access = crate::access::resolve(&object.access).map_err(|e| StartError::Access(object.id.clone(), e))?;
        let address = match (&object.addr, socket) {
            (schema::Addr::Unix(UnixAddr { path }), _) => Address::Path(path.into()),
            (schema::Addr::Fd(_), Some(socket)) => Address::Fd(socket),
            (schema::Addr::Fd(FdAddr { str: fd }), None) => {
                return Err(StartError::Inherit(object.id.clone(), fd.clone(), InheritError::NotOpen));
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
        let (id, memory, kickless) = (object.id.clone(), self.memory_rules(object), kickless(object));
        let export = match &object.device {
            schema::Device::VhostUserBlk(blk) => {
                let disk = Arc::clone(&disks[0]);
                let config = ExportConfig { id, address, access, device: device(object, blk, &disk), memory, kickless };
                Export::start(config, disk, loops)?
            }
            schema::Device::VhostUserScsi(scsi) => {
                let luns = self.units(object, &scsi.luns, disks)?;
                let device = ScsiConfig { num_queues: object.num_queues, queue_size: object.queue_size };
                let config = ScsiExportConfig { id, address, access, device, luns, kickless, memory };
                Export::start_scsi(config, loops)?
            }
        };
        self.board.put_up_export(&export);
        self.exports.insert(object.id.clone(), export);
        Ok(())
    }

    /// What an export's clients may hand over as guest memory.
    fn memory_rules(&self, object: &schema::Export) -> MemoryRules {
        let files = match object.memory_files {
            schema::MemoryFiles::SharedMemory => MemoryFiles::SharedMemory,
            schema::MemoryFiles::Any => MemoryFiles::Any,
        };
        let limits = MemoryLimits { bytes: object.memory_max, regions: MAX_MEMORY_SLOTS };
        MemoryRules { files, budget: Some(self.memory.part(limits, "export", "its memory-max")) }
    }

    /// The thread of exports that name none, which is an object like any other once it is there.
    fn start_default_io_thread(&mut self) -> Result<(), StartError> {
        let object = schema::IoThread::new(DEFAULT_IOTHREAD);
        self.start_io_thread(&object)?;
        self.config.iothreads.push(object);
        Ok(())
    }
}

/// What becomes of queues that clients ask to be polled.
const fn kickless(object: &schema::Export) -> Kickless {
    match object.kickless_queues {
        schema::Kickless::Timer => Kickless::Timer,
        schema::Kickless::Busy => Kickless::Busy,
    }
}

/// That a disk is whole blocks of an export.
pub(super) fn check_size(object: &schema::Export, disk: &Disk) -> Result<(), StartError> {
    let (block, size) = (object.logical_block_size, disk.size());
    if size.is_multiple_of(block.into()) {
        return Ok(());
    }
    Err(StartError::OddSize { export: object.id.clone(), block, disk: disks::described(disk), size })
}

/// What the guest is to see of an export.
fn device(export: &schema::Export, blk: &BlkDevice, disk: &Disk) -> BlkConfig {
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX);
    BlkConfig {
        capacity_bytes: disk.size(),
        logical_block_size: export.logical_block_size,
        physical_block_size: disk.physical_block_size().max(export.logical_block_size),
        num_queues: export.num_queues,
        queue_size: export.queue_size,
        read_only: !export.writable,
        serial: blk.serial().to_owned(),
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
