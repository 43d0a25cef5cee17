//! Exports: a disk offered at an address.

use std::sync::Arc;

use egret_disk::Disk;
use egret_event_loop::LoopHandle;
use egret_export::{Address, Export, ExportConfig, Worker};
use egret_virtio::blk::{BlkConfig, DiscardLimits, SECTOR, WriteZeroesLimits};

use super::{StartError, disks, scsi};
use crate::process::sys::inherit;
use crate::schema;

/// Makes an export whose request queue `i` runs on the loop `i % loops.len()`, of the disks that `find` knows by name.
pub(super) fn start(
    object: &schema::Export,
    find: impl Fn(&str) -> Arc<Disk>,
    loops: Vec<LoopHandle<Worker>>,
) -> Result<Export, StartError> {
    let disks: Vec<_> = object.node_names().map(|(_, name)| find(name)).collect();
    for disk in &disks {
        let (block, size) = (object.logical_block_size, disk.size());
        if size % u64::from(block) != 0 {
            return Err(StartError::OddSize { export: object.id.clone(), block, disk: disks::described(disk), size });
        }
    }
    let address = match &object.addr {
        schema::Addr::Unix { path } => Address::Path(path.into()),
        schema::Addr::Fd { fd } => {
            Address::Fd(inherit(*fd).map_err(|e| StartError::Inherit(object.id.clone(), *fd, e))?)
        }
    };
    let id = object.id.clone();
    Ok(match object.kind {
        schema::ExportType::VhostUserBlk => {
            let disk = Arc::clone(&disks[0]);
            Export::start(ExportConfig { id, address, device: device(object, &disk) }, disk, loops)?
        }
        schema::ExportType::VhostUserScsi => Export::start_scsi(scsi::export(object, disks, address), loops)?,
    })
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
