//! What the guest is to see of a virtio-scsi export.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use egret_disk::Disk;
use egret_export::{ConfigError, DiscardConfig, LogicalUnit, LunConfig, Naa};
use egret_virtio::scsi::LunAddress;
use egret_vocabulary::schema::{Export, Lun};

use super::error::UnitError;
use super::reservations::{self, PrFileError};
use super::{Daemon, StartError};

/// How many ranges one UNMAP may have: as many as Linux's own drivers ask for at a time.
const UNMAP_RANGES: u32 = 256;

/// A logical unit, and the file that its persistent reservations are kept in.
pub(super) struct KeptUnit {
    unit: Arc<LogicalUnit>,
    pr_file: Option<PathBuf>,
}

/// What an export wants of a logical unit.
#[derive(Debug)]
pub(super) struct UnitOptions {
    pub(super) at: LunAddress,
    config: LunConfig,
    pr_file: Option<PathBuf>,
}

/// A logical unit on its way into an export.
pub(super) type Unit = (LunAddress, Arc<LogicalUnit>, Arc<Disk>);

impl Daemon {
    /// The logical units of a device, with the disks of each.
    pub(super) fn units(
        &mut self,
        export: &str,
        luns: Vec<UnitOptions>,
        disks: Vec<Arc<Disk>>,
    ) -> Result<Vec<Unit>, StartError> {
        let unit = |(wanted, disk): (UnitOptions, Arc<Disk>)| {
            Ok((wanted.at, self.unit(export, disk.node_name(), wanted)?, disk))
        };
        luns.into_iter().zip(disks).map(unit).collect()
    }

    /// The logical unit of a blockdev, which all exports have together whose guests see the same of it: so they see each
    /// other's reservations, and these stay for as long as the blockdev does. Exports whose guests see something else
    /// have another unit, unless reservations are kept: whoever they keep out would come in by the other one.
    pub(super) fn unit(
        &mut self,
        export: &str,
        node: &str,
        wanted: UnitOptions,
    ) -> Result<Arc<LogicalUnit>, StartError> {
        let UnitOptions { at, config, pr_file } = wanted;
        let mut units = self.units.remove(node).unwrap_or_default();
        let same = |known: &KeptUnit| looks_alike(known.unit.config(), &config) && known.pr_file == pr_file;
        units.retain(|known| same(known) || self.exports_unit(&known.unit));
        let unit = match units.iter().find(|known| same(known)) {
            Some(KeptUnit { unit, .. }) => {
                if !self.exports_unit(unit) {
                    unit.power_on(config.capacity_bytes);
                }
                Ok(Arc::clone(unit))
            }
            None if !units.is_empty() && (pr_file.is_some() || units.iter().any(|known| known.pr_file.is_some())) => {
                Err(StartError::TwoUnits(export.to_owned(), at, node.to_owned()))
            }
            None => {
                if !units.is_empty() {
                    warn_of_two_units(export, node);
                }
                let made = make(config, pr_file.as_deref()).map(Arc::new);
                let made = made.inspect(|unit| units.push(KeptUnit { unit: Arc::clone(unit), pr_file }));
                made.map_err(|e| StartError::Unit(export.to_owned(), at, e.into()))
            }
        };
        self.units.insert(node.to_owned(), units);
        unit
    }

    /// Whether an export has the unit now.
    fn exports_unit(&self, unit: &Arc<LogicalUnit>) -> bool {
        let has_it = |export: &egret_export::Export| {
            let luns = export.luns().into_iter().filter_map(|at| export.lun(at));
            { luns }.any(|lun| Arc::ptr_eq(&lun.unit, unit))
        };
        self.exports.values().any(has_it)
    }
}

fn make(config: LunConfig, pr_file: Option<&Path>) -> Result<LogicalUnit, UnitError> {
    let Some(path) = pr_file else { return Ok(LogicalUnit::new(config)?) };
    let (registered, keeper) = reservations::open(path, &config)?;
    let unit = LogicalUnit::kept(config, &registered, keeper);
    unit.map_err(|e| match e {
        ConfigError::Reservations => PrFileError::damaged(path, e).into(),
        e => e.into(),
    })
}

/// Whether guests cannot tell them apart. What is known of the disk does not count: it may have been opened otherwise
/// since.
fn looks_alike(one: &LunConfig, other: &LunConfig) -> bool {
    let looks = |config: &LunConfig| {
        let LunConfig { logical_block_bytes, read_only, removable, write_cache, naa, .. } = *config;
        (logical_block_bytes, read_only, removable, write_cache, naa)
    };
    looks(one) == looks(other) && one.serial == other.serial
}

fn warn_of_two_units(export: &str, node: &str) {
    tracing::warn!(
        "export '{export}': guests of another export see blockdev '{node}' otherwise, and each other's reservations they do not \
         see; if they should, let writable, writethrough, logical-block-size, serial, wwn, removable and pr-file be the same"
    );
}

pub(super) fn address_of(lun: &Lun) -> LunAddress {
    LunAddress { target: lun.address.target, lun: lun.address.lun }
}

impl UnitOptions {
    pub(super) fn of(export: &Export, lun: &Lun, disk: &Disk) -> Self {
        let pr_file = (!lun.pr_file.is_empty()).then(|| PathBuf::from(&lun.pr_file));
        Self { at: address_of(lun), config: config(export, lun, disk), pr_file }
    }
}

/// What the guest is to see of a logical unit.
fn config(export: &Export, lun: &Lun, disk: &Disk) -> LunConfig {
    let block = export.logical_block_size();
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
        optimal_transfer_bytes: disk.optimal_io_size().into(),
        max_write_zeroes_bytes: whole(disk.max_write_zeroes_bytes()).max(block.into()),
        serial: lun.serial().to_owned(),
        naa: (lun.wwn != 0).then_some(Naa::Short(lun.wwn)),
        ..LunConfig::default()
    }
}
