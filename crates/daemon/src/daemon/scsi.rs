//! What the guest is to see of a virtio-scsi export.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use egret_disk::Disk;
use egret_export::{ConfigError, DiscardConfig, LogicalUnit, LunConfig, Naa};
use egret_virtio::scsi::LunAddress;
use egret_vocabulary::schema::{Export, Lun};

use super::calls::Calls;
use super::error::UnitError;
use super::reservations::{self, PrFileError};
use super::{Daemon, StartError};

/// How many ranges one UNMAP may have: as many as Linux's own drivers ask for at a time.
const UNMAP_RANGES: u32 = 256;

/// A logical unit, and the file that its persistent reservations are kept in.
#[derive(Clone)]
pub(super) struct KeptUnit {
    pub(super) unit: Arc<LogicalUnit>,
    pr_file: Option<PathBuf>,
}

impl KeptUnit {
    /// Whether guests rely on it, and on nothing else: who was fenced would be let in if it were forgotten.
    fn remembers(&self) -> bool {
        self.pr_file.is_none() && self.unit.is_registered()
    }
}

/// What an export wants of a logical unit.
#[derive(Debug)]
pub(super) struct UnitOptions {
    pub(super) at: LunAddress,
    config: LunConfig,
    pr_file: Option<PathBuf>,
}

/// A logical unit on its way into an export.
pub(super) type Unit = (LunAddress, KeptUnit, Arc<Disk>);

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
    /// have another unit, unless reservations are kept: whoever they keep out would come in by the other one. What is known
    /// of its disk stays as it is while an export has it.
    ///
    /// Nothing is forgotten for it before an export has it, and [`keep_unit`](Self::keep_unit) is called.
    pub(super) fn unit(&mut self, export: &str, node: &str, wanted: UnitOptions) -> Result<KeptUnit, StartError> {
        let UnitOptions { at, config, pr_file } = wanted;
        let units = self.units.get(node).map(Vec::as_slice).unwrap_or_default();
        let same = |known: &KeptUnit| looks_alike(known.unit.config(), &config) && known.pr_file == pr_file;
        if let Some(known) = units.iter().find(|known| same(known)) {
            if self.exports_unit(&known.unit) {
                return Ok(known.clone());
            }
            let before = known.unit.config();
            if *before == (LunConfig { capacity_bytes: before.capacity_bytes, ..config.clone() }) {
                known.unit.power_on(config.capacity_bytes);
                return Ok(known.clone());
            }
            // Its disk was opened otherwise meanwhile.
            let anew = known.unit.anew(config).map_err(UnitError::from);
            let unit = anew.map(Arc::new).map_err(|e| StartError::Unit(export.to_owned(), at, e.into()))?;
            return Ok(KeptUnit { unit, pr_file });
        }
        let mut others = units.iter().filter(|known| self.exports_unit(&known.unit)).peekable();
        if others.peek().is_some() {
            if pr_file.is_some() || others.any(|known| known.pr_file.is_some()) {
                return Err(StartError::TwoUnits(export.to_owned(), at, node.to_owned()));
            }
            warn_of_two_units(export, node);
        } else {
            if units.iter().any(KeptUnit::remembers) {
                warn_of_reservations(export, node);
            }
            if let Some(units) = self.units.get_mut(node) {
                // What one that looked otherwise knows is in that file, which it has locked.
                units.retain(|known| known.pr_file.is_none() || known.pr_file != pr_file);
            }
        }
        let made = make(&self.calls, config, pr_file.as_deref());
        let unit = made.map(Arc::new).map_err(|e| StartError::Unit(export.to_owned(), at, e.into()))?;
        Ok(KeptUnit { unit, pr_file })
    }

    /// Keeps a unit that an export has for as long as its blockdev is there, and forgets those that nobody has: but for what
    /// guests have registered there, who may come again, unless it is to be in a file from here on. One that looks alike is this
    /// one as it was before: they have what was registered together.
    pub(super) fn keep_unit(&mut self, node: &str, unit: KeptUnit) {
        let mut units = self.units.remove(node).unwrap_or_default();
        let is_before = |known: &KeptUnit| looks_alike(known.unit.config(), unit.unit.config());
        let is_remembered = |known: &KeptUnit| unit.pr_file.is_none() && known.remembers() && !is_before(known);
        let stays = |known: &KeptUnit| self.exports_unit(&known.unit) || is_remembered(known);
        units.retain(|known| !Arc::ptr_eq(&known.unit, &unit.unit) && stays(known));
        units.push(unit);
        self.units.insert(node.to_owned(), units);
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

fn make(calls: &Calls, config: LunConfig, pr_file: Option<&Path>) -> Result<LogicalUnit, UnitError> {
    let Some(path) = pr_file else { return Ok(LogicalUnit::new(config)?) };
    let (file, of) = (path.to_owned(), config.clone());
    let open = move || reservations::open(&file, &of);
    let (registered, keeper) = calls.run_on(Some(path), "its reservations could not be had", open)??;
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

fn warn_of_reservations(export: &str, node: &str) {
    tracing::warn!(
        "export '{export}': blockdev '{node}' has reservations of guests that saw it otherwise, and they do not hold for this \
         export's; if they should, let writable, writethrough, logical-block-size, serial, wwn, removable and pr-file be as before"
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
