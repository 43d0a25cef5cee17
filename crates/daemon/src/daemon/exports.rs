//! Exports: disks offered at an address.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use egret_disk::{BlockLimits, Disk, Driver};
use egret_event_loop::Nanos;
use egret_export::{
    Address, ErrorPolicy, Export, ExportConfig, Keeping, Kickless, MAX_MAPPINGS, MAX_SOCKET_PATH, NbdOptions, OnError,
    Rings,
};
use egret_virtio::blk::{BlkConfig, DiscardLimits, SECTOR, WriteZeroesLimits};
use egret_virtio::scsi::ScsiConfig;
use egret_vocabulary::choices;
use egret_vocabulary::schema::{self, BlkDevice, FdAddr, NbdDevice, ScsiDevice, UnixAddr, VhostUser};
use egret_vring::memory::{MemoryFiles, MemoryLimits, MemoryRules};

use super::io_threads::iothreads_of;
use super::scsi::UnitOptions;
use super::teardowns::{TornDown, Waiter};
use super::{ChangeError, DEFAULT_IOTHREAD, Daemon, StartError, disks};
use crate::process::InheritError;

choices! {
    /// How an export is deleted.
    pub enum Deletion {
        /// Not while a client uses it.
        "safe" => Safe;
        /// At once; its client is cut off when what is in flight has ended.
        "hard" => Hard;
    }
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
        if let schema::Device::Nbd(device) = &object.device {
            match &self.nbd_server {
                None => return Err(ChangeError::NoNbdServer),
                Some(server) if server.has_export(device.name()) => {
                    return Err(ChangeError::NbdName(device.name().to_owned()));
                }
                Some(_) => {}
            }
        }
        if matches!(object.addr(), Some(schema::Addr::Fd(_))) && socket.is_none() {
            return Err(ChangeError::NoSocket(object.id));
        }
        self.await_answers(iothreads_of(&object))?;
        let warnings = self.config.warnings();
        let had_default = self.io_threads.contains_key(DEFAULT_IOTHREAD);
        self.config.add_export(object.clone())?;
        let about: Vec<_> = object.node_names().map(|(_, name)| name.to_owned()).collect();
        let started = self.reconcile_disks(&about).and_then(|()| self.start_export(&object, socket));
        if let Err(e) = started {
            self.config.exports.pop();
            self.reconcile_disks_or_log(&about);
            if !had_default {
                // It may not have been started.
                let _ = self.remove_io_thread(DEFAULT_IOTHREAD);
            }
            return Err(e.into());
        }
        self.leave_to_exports();
        self.warn_of_more_than(&warnings);
        Ok(())
    }

    /// Says what a change has made of the configuration that is probably not meant, as at the start.
    pub(super) fn warn_of_more_than(&self, before: &[String]) {
        let warnings = self.config.warnings();
        warnings.iter().filter(|line| !before.contains(line)).for_each(|line| tracing::warn!("{line}"));
    }

    /// Removes an export: at once if it has no client, else when its client's session is over and
    /// [`take_torn_down`](Self::take_torn_down) says so. Nobody waits for a client here: other changes come after this one.
    ///
    /// # Errors
    /// There is none of this name, or it is on its way out already, or a client uses it and the deletion is to be safe. Or
    /// there is no thread to wait for its client: then it ends, and is there until it is removed once more.
    pub fn remove_export(&mut self, id: &str, how: Deletion) -> Result<(), ChangeError> {
        let Some(export) = self.exports.get(id) else {
            let is_going = self.config.exports.iter().any(|export| export.id == id);
            return Err(if is_going { ChangeError::ExportLeaves } else { ChangeError::NoExport }(id.to_owned()));
        };
        if export.is_in_use() && how == Deletion::Safe {
            return Err(ChangeError::ExportInUse(id.to_owned()));
        }
        let waiter = match export.ends_at_once() {
            true => None,
            false => Some(Waiter::new("egret-teardown").map_err(|e| ChangeError::ExportEnds(id.to_owned(), e))?),
        };
        if let Some(export) = self.exports.remove(id) {
            self.registry.unregister_export(id);
            let what = TornDown::Export { id: id.to_owned() };
            match waiter {
                Some(waiter) => self.teardowns.add(waiter, what, move || export.end_and_write_out()),
                None => {
                    drop(export);
                    self.teardowns.add_gone(what);
                }
            }
        }
        Ok(())
    }

    /// Whether an export is on its way out.
    pub fn is_shutting_down(&self, id: &str) -> bool {
        !self.exports.contains_key(id)
    }

    pub(super) fn start_export(&mut self, object: &schema::Export, socket: Option<OwnedFd>) -> Result<(), StartError> {
        let disks = object.node_names().map(|(_, name)| self.open_disk_of(name)).collect::<Result<Vec<_>, _>>()?;
        disks.iter().try_for_each(|disk| check_size(object, disk))?;
        let Options { id, device, iothreads, errors } = Options::of(object, &disks);
        if object.vhost_user().is_some_and(|vhost_user| vhost_user.pin_memory) {
            for disk in disks.iter().filter(|disk| !disk.runs_on_io_uring()) {
                let disk = disk.node_name();
                tracing::warn!(
                    "export '{id}': pin-memory has no effect on requests to blockdev '{disk}'; it belongs to aio=io_uring"
                );
            }
        }
        let id = id.to_owned();
        let mut loops = Vec::new();
        for name in iothreads {
            if !self.io_threads.contains_key(name) {
                self.start_default_io_thread()?;
            }
            loops.push(self.io_threads[name].handle().clone());
        }
        self.make_engines(object, &disks)?;
        let mut kept = Vec::new();
        let export = match device {
            Device::Blk(device, client) => {
                let config = self.export_config(id, client, errors, socket)?;
                Export::start(config, device, Arc::clone(&disks[0]), loops)?
            }
            Device::Scsi(device, luns, client) => {
                let config = self.export_config(id, client, errors, socket)?;
                let luns = self.units(&config.id, luns, disks)?;
                kept.extend(luns.iter().map(|(_, unit, disk)| (disk.node_name().to_owned(), unit.clone())));
                let luns = luns.into_iter().map(|(at, unit, disk)| (at, unit.unit, disk)).collect();
                Export::start_scsi(config, device, luns, loops)?
            }
            Device::Nbd(options) => {
                let server = self.nbd_server.as_ref().ok_or_else(|| StartError::NoNbdServer(id.clone()))?;
                Export::start_nbd(id, options, server, Arc::clone(&disks[0]), &loops)?
            }
        };
        export.errors().watch(self.failures.bell());
        self.registry.register_export(&export);
        self.exports.insert(object.id.clone(), export);
        kept.into_iter().for_each(|(node, unit)| self.keep_unit(&node, unit));
        Ok(())
    }

    /// How a virtual machine finds an export.
    fn export_config(
        &self,
        id: String,
        client: ClientOptions<'_>,
        errors: ErrorPolicy,
        socket: Option<OwnedFd>,
    ) -> Result<ExportConfig, StartError> {
        let ClientOptions { addr, access, memory_files, memory, pin, rings } = client;
        let access = crate::access::resolve(access).map_err(|e| StartError::Access(id.clone(), e))?;
        let address = match (addr, socket) {
            (schema::Addr::Unix(UnixAddr { path }), _) => Address::Path(path.into()),
            (schema::Addr::Fd(_), Some(socket)) => Address::Fd(socket),
            (schema::Addr::Fd(FdAddr { str: fd }), None) => {
                return Err(StartError::Inherit(id, fd.clone(), InheritError::NotOpen));
            }
        };
        let budget = self.memory.part(memory, "export", "its memory-max");
        let memory = MemoryRules { files: memory_files, budget: Some(budget), pin };
        let keeping = match self.keeps_sessions {
            true if self.kept.contains_key(&id) => Keeping::Kept,
            true => Keeping::Keeps,
            false => Keeping::Not,
        };
        Ok(ExportConfig { id, address, access, memory, rings, errors, keeping })
    }

    /// The thread of exports that name none, which is an object like any other once it is there.
    fn start_default_io_thread(&mut self) -> Result<(), StartError> {
        let object = schema::IoThread::new(DEFAULT_IOTHREAD);
        if self.config.has_object(&object.id) {
            let line = "exports that name no I/O thread run on it, and another object has its name";
            return Err(StartError::IoThread(object.id, line.to_owned()));
        }
        self.start_io_thread(&object)?;
        self.config.iothreads.push(object);
        Ok(())
    }
}

/// What an export is served with, as far as its object and its disks say.
#[derive(Debug)]
struct Options<'a> {
    id: &'a str,
    device: Device<'a>,
    /// The I/O thread of each queue, or of each lane.
    iothreads: Vec<&'a str>,
    errors: ErrorPolicy,
}

/// What clients are to see of an export.
#[derive(Debug)]
enum Device<'a> {
    Blk(BlkConfig, ClientOptions<'a>),
    Scsi(ScsiConfig, Vec<UnitOptions>, ClientOptions<'a>),
    Nbd(NbdOptions),
}

/// How an export over vhost-user is found, and what it takes from its client.
#[derive(Debug)]
struct ClientOptions<'a> {
    addr: &'a schema::Addr,
    access: &'a schema::Access,
    memory_files: MemoryFiles,
    memory: MemoryLimits,
    pin: bool,
    rings: Rings,
}

impl<'a> Options<'a> {
    /// What an object comes to with these disks, one for each that it names. It takes the object apart, so that a key
    /// that nobody reads does not compile.
    fn of(object: &'a schema::Export, disks: &[Arc<Disk>]) -> Self {
        let schema::Export {
            id,
            device,
            // What a guest sees of them `blk_config` and `scsi::config` say.
            writable,
            writethrough,
            // `iothread_of` knows whether it counts.
            iothread: _,
            // It is asked when a queue is to move.
            fixed_iothread: _,
        } = object;
        let device = match device {
            schema::Device::VhostUserBlk(blk) => {
                Device::Blk(blk_config(object, blk, &disks[0]), ClientOptions::of(&blk.vhost_user))
            }
            schema::Device::VhostUserScsi(ScsiDevice { luns, vhost_user }) => {
                let config = ScsiConfig { num_queues: vhost_user.num_queues, queue_size: vhost_user.queue_size };
                let luns = luns.iter().zip(disks);
                let luns = luns.map(|(lun, disk)| UnitOptions::of(object, lun, disk)).collect();
                Device::Scsi(config, luns, ClientOptions::of(vhost_user))
            }
            schema::Device::Nbd(device) => {
                let NbdDevice { node_name: _, name: _, description, max_connections } = device;
                let (name, description) = (device.name().to_owned(), description.clone());
                let (writable, writethrough, max_connections) = (*writable, *writethrough, *max_connections);
                Device::Nbd(NbdOptions { name, description, writable, writethrough, max_connections })
            }
        };
        Self {
            id,
            device,
            iothreads: iothreads_of(object).collect(),
            errors: object.vhost_user().map(errors).unwrap_or_default(),
        }
    }
}

impl<'a> ClientOptions<'a> {
    fn of(object: &'a VhostUser) -> Self {
        let VhostUser {
            addr,
            access,
            // What a guest sees of it `blk_config` and `scsi::config` say.
            logical_block_size: _,
            num_queues: _,
            queue_size: _,
            // `errors` reads them.
            rerror: _,
            werror: _,
            request_timeout: _,
            // `iothread_of` knows whether it counts.
            iothread_vq_mapping: _,
            // Its disks are opened accordingly.
            allow_inactive: _,
            kickless_queues,
            user_mode_linux,
            memory_max,
            memory_files,
            pin_memory,
        } = object;
        Self {
            addr,
            access,
            memory_files: match memory_files {
                schema::MemoryFiles::SharedMemory => MemoryFiles::SharedMemory,
                schema::MemoryFiles::Any => MemoryFiles::Any,
            },
            memory: MemoryLimits { bytes: *memory_max, regions: MAX_MAPPINGS },
            pin: *pin_memory,
            rings: Rings {
                kickless: match kickless_queues {
                    schema::Kickless::Timer => Kickless::Timer,
                    schema::Kickless::Busy => Kickless::Busy,
                },
                user_mode_linux: *user_mode_linux,
            },
        }
    }
}

fn errors(object: &VhostUser) -> ErrorPolicy {
    ErrorPolicy {
        rerror: on_error(object.rerror),
        werror: on_error(object.werror),
        timeout: object.request_timeout.map(|seconds| Nanos::from_millis(1000 * u64::from(seconds))),
    }
}

const fn on_error(word: schema::OnError) -> OnError {
    match word {
        schema::OnError::Report => OnError::Report,
        schema::OnError::Ignore => OnError::Ignore,
        schema::OnError::Enospc => OnError::Enospc,
        schema::OnError::Stop => OnError::Stop,
    }
}

/// That a disk is whole blocks of an export, which the disk takes: one on another machine reads and writes back no larger
/// block of its own.
pub(super) fn check_size(object: &schema::Export, disk: &Disk) -> Result<(), StartError> {
    let (block, size) = (object.logical_block_size(), disk.size());
    let least = disk.logical_block_size();
    if matches!(disk.options().driver, Driver::Remote(_)) && block < least {
        let (export, disk) = (object.id.clone(), disks::described(disk));
        return Err(StartError::SmallBlocks { export, block, disk, least });
    }
    if size.is_multiple_of(block.into()) {
        return Ok(());
    }
    Err(StartError::OddSize { export: object.id.clone(), block, disk: disks::described(disk), size })
}

/// What the guest is to see of the disk of a virtio-blk device.
fn blk_config(export: &schema::Export, blk: &BlkDevice, disk: &Disk) -> BlkConfig {
    let VhostUser { logical_block_size, num_queues, queue_size, .. } = &blk.vhost_user;
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR).unwrap_or(u32::MAX);
    BlkConfig {
        capacity_bytes: disk.size(),
        logical_block_size: *logical_block_size,
        physical_block_size: disk.physical_block_size().max(*logical_block_size),
        optimal_io_size: disk.optimal_io_size(),
        num_queues: *num_queues,
        queue_size: *queue_size,
        read_only: !export.writable,
        serial: blk.serial().to_owned(),
        writethrough: export.writethrough,
        // Offered always, as qemu-storage-daemon does, so that a guest can move between the two: a discard that is
        // ignored succeeds, and zeroes are written where they cannot be asked for. As long as any disk takes, whatever this
        // one does: a device of the host has a discard cut by the kernel. A guest that has moved here goes by what it was
        // told where it was, and Linux takes none at all for no limit.
        discard: Some(DiscardLimits {
            max_sectors: sectors(BlockLimits::unlimited(0).max_discard),
            alignment: sectors(disk.discard_granularity().into()).max(1),
        }),
        write_zeroes: Some(WriteZeroesLimits {
            max_sectors: sectors(disk.max_write_zeroes_bytes()),
            may_unmap: disk.supports_discard(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use egret_disk::{Blocks, Engine, EngineError, OpenCause, Options as DiskOptions, Remote, RemoteDisk, RemoteKind};
    use egret_vocabulary::keyval;
    use egret_vocabulary::schema::{Object as _, Shape, ValueType};

    use super::*;

    /// What an export comes to whose disks `d` and `e` are of different sizes.
    fn options(text: &str) -> String {
        let (value, spelling) = keyval::read(text, "type").unwrap();
        let object = schema::Export::from_value(value, spelling).unwrap_or_else(|error| panic!("{text}: {error}"));
        let open = |name: &str| {
            let size = if name == "d" { 1 << 20 } else { 2 << 20 };
            let driver = Driver::Null { size, latency: Nanos::ZERO, read_zeroes: false };
            Arc::new(Disk::open(&DiskOptions::new(name, driver)).unwrap())
        };
        let disks: Vec<_> = object.node_names().map(|(_, name)| open(name)).collect();
        let (moves, locks) = (!object.fixed_iothread, !object.allow_inactive());
        format!("{:?}, moves: {moves}, locks: {locks}", Options::of(&object, &disks))
    }

    const BLK: &str = "vhost-user-blk,id=x,node-name=d,addr.type=unix,addr.path=/s,iothread-vq-mapping.0.iothread=a";
    const SCSI: &str = "vhost-user-scsi,id=x,addr.type=fd,addr.str=3,luns.0.lun=1,luns.0.node-name=d,num-queues=2";

    const NBD: &str = "nbd,id=x,node-name=d";

    /// Keys, each with an export and a value that it does not have there.
    const OTHERWISE: [(&str, &str, &str); 41] = [
        ("id", BLK, "y"),
        ("addr.path", BLK, "/t"),
        ("addr.str", SCSI, "4"),
        ("mode", BLK, "0600"),
        ("user", BLK, "me"),
        ("group", BLK, "us"),
        ("allow-uid", BLK, "7"),
        ("writable", BLK, "on"),
        ("writable", SCSI, "on"),
        ("writable", NBD, "on"),
        ("writethrough", BLK, "on"),
        ("writethrough", SCSI, "on"),
        ("writethrough", NBD, "on"),
        ("logical-block-size", BLK, "4096"),
        ("rerror", BLK, "stop"),
        ("werror", BLK, "enospc"),
        ("request-timeout", BLK, "30"),
        ("num-queues", BLK, "2"),
        ("queue-size", BLK, "256"),
        ("iothread", SCSI, "a"),
        ("iothread-vq-mapping.0.iothread", BLK, "b"),
        (
            "iothread-vq-mapping.0.vqs.0",
            "vhost-user-blk,id=x,node-name=d,addr.type=unix,addr.path=/s,num-queues=2,iothread-vq-mapping.0.iothread=a,\
             iothread-vq-mapping.1.iothread=b,iothread-vq-mapping.0.vqs.0=0,iothread-vq-mapping.1.vqs.0=1",
            "1,iothread-vq-mapping.1.vqs.0=0",
        ),
        ("fixed-iothread", BLK, "on"),
        ("allow-inactive", BLK, "on"),
        ("kickless-queues", BLK, "busy"),
        ("user-mode-linux", BLK, "on"),
        ("memory-max", BLK, "1G"),
        ("memory-files", BLK, "any"),
        ("pin-memory", BLK, "on"),
        ("node-name", BLK, "e"),
        ("serial", BLK, "s"),
        ("name", NBD, "n"),
        ("description", NBD, "for whom"),
        ("max-connections", NBD, "7"),
        ("luns.0.lun", SCSI, "2"),
        ("luns.0.target", SCSI, "2"),
        ("luns.0.node-name", SCSI, "e"),
        ("luns.0.serial", SCSI, "s"),
        ("luns.0.wwn", SCSI, "0x5000c50015ea71ac"),
        ("luns.0.removable", SCSI, "on"),
        ("luns.0.pr-file", SCSI, "/pr"),
    ];

    /// The keys of a shape, as `key=value` text has them.
    fn names(shape: &Shape, path: &str) -> Vec<String> {
        shape
            .all_keys()
            .into_iter()
            .flat_map(|(key, _)| match key.kind {
                ValueType::Object(inner) => names(inner, &format!("{path}{}.", key.name)),
                ValueType::List(inner) => names(inner, &format!("{path}{}.0.", key.name)),
                ValueType::Numbers(..) => vec![format!("{path}{}.0", key.name)],
                _ => vec![format!("{path}{}", key.name)],
            })
            .collect()
    }

    #[test]
    fn each_key_of_an_export_changes_what_it_is_served_with() {
        for name in names(schema::Export::SHAPE, "") {
            let mut found = OTHERWISE.iter().filter(|(key, ..)| *key == name).peekable();
            assert!(found.peek().is_some(), "OTHERWISE has no value for {name}");
            for (_, text, value) in found {
                assert_ne!(options(&format!("{text},{name}={value}")), options(text), "{name} of {text}");
            }
        }
    }

    /// A disk elsewhere that discards so much at once.
    #[derive(Debug)]
    struct Far(u64);

    impl Remote for Far {
        fn kind(&self) -> RemoteKind {
            RemoteKind::Nbd
        }

        fn name(&self) -> &str {
            "far"
        }

        fn open(&self) -> Result<egret_disk::Shape, OpenCause> {
            let limits = BlockLimits { max_discard: self.0, ..BlockLimits::unlimited(512) };
            Ok(egret_disk::Shape { size: 1 << 20, blocks: Blocks { logical: 512, physical: 512 }, limits })
        }

        fn engine(&self) -> Result<Box<dyn Engine>, EngineError> {
            unreachable!("nothing is asked of it")
        }

        fn ask_size(&self) -> io::Result<u64> {
            Ok(1 << 20)
        }

        fn flush(&self) -> Result<(), egret_disk::FlushError> {
            Ok(())
        }
    }

    /// Linux, drivers/block/virtio_blk.c: a limit of no sectors is none.
    #[test]
    fn a_guest_is_told_of_the_same_limit_of_discards_whatever_its_disk_discards_and_never_of_none() {
        let (value, spelling) = keyval::read(BLK, "type").unwrap();
        let object = schema::Export::from_value(value, spelling).unwrap();
        let schema::Device::VhostUserBlk(blk) = &object.device else { panic!("it is one of virtio-blk") };
        let told = [0, 4096, 1 << 30].map(|max_discard| {
            let disk = Disk::open(&DiskOptions::new("d", Driver::Remote(RemoteDisk::new(Far(max_discard))))).unwrap();
            blk_config(&object, blk, &disk).discard.map(|limits| u64::from(limits.max_sectors) * SECTOR)
        });
        assert_eq!(told, [Some(1 << 30); 3]);
    }
}
