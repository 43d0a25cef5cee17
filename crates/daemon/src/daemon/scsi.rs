//! What the guest is to see of a virtio-scsi export.

use std::sync::Arc;

use egret_disk::Disk;
use egret_export::{Address, DiscardConfig, LunConfig, Naa, ScsiExportConfig};
use egret_virtio::scsi::{LunAddress, ScsiConfig};

use crate::schema::{Export, Lun};

/// How many ranges one UNMAP may have: as many as Linux's own drivers ask for at a time.
const UNMAP_RANGES: u32 = 256;

/// An export of `disks`, one for each of its logical units.
pub(super) fn export(object: &Export, disks: Vec<Arc<Disk>>, address: Address) -> ScsiExportConfig {
    let luns = object.luns.iter().zip(disks);
    ScsiExportConfig {
        id: object.id.clone(),
        address,
        device: ScsiConfig { num_queues: object.num_queues, queue_size: object.queue_size },
        luns: luns.map(|(lun, disk)| (address_of(lun), unit(object, lun, &disk), disk)).collect(),
    }
}

pub(super) fn address_of(lun: &Lun) -> LunAddress {
    LunAddress { target: lun.target, lun: lun.lun }
}

pub(super) fn unit(export: &Export, lun: &Lun, disk: &Disk) -> LunConfig {
    let block = export.logical_block_size;
    let whole = |bytes: u64| bytes - bytes % u64::from(block);
    LunConfig {
        capacity_bytes: disk.size(),
        logical_block_bytes: block,
        physical_block_bytes: disk.physical_block_size().max(block),
        read_only: !export.writable,
        removable: lun.removable,
        write_cache: !export.writethrough,
        discard: disk.supports_discard().then(|| DiscardConfig {
            max_bytes: whole(disk.max_discard_bytes()).max(block.into()),
            granularity_bytes: disk.discard_granularity().max(block).into(),
            alignment_bytes: 0,
            max_descriptors: UNMAP_RANGES,
            reads_zeroes: false,
        }),
        max_write_zeroes_bytes: whole(disk.max_write_zeroes_bytes()).max(block.into()),
        serial: lun.serial().to_owned(),
        naa: (lun.wwn != 0).then_some(Naa::Short(lun.wwn)),
        ..LunConfig::default()
    }
}
