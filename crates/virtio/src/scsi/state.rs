//! What a virtio-scsi device's state holds, beside what all devices' do: see [`crate::state`].

use std::sync::Arc;
use std::sync::atomic::Ordering;

use egret_scsi::UnitState;

use super::address::LunAddress;
use super::luns::Lun;
use super::{Scsi, config};
use crate::state::{DeviceId, Origin, StateError, pack, unpack};

/// Sizes, flag and count.
const FIXED: usize = 16;
/// An address, and what there is to say of the unit there.
const UNIT: usize = 4 + UnitState::BYTES;

pub(super) fn save(scsi: &Scsi) -> Vec<u8> {
    let (_, table) = scsi.snapshot();
    let sizes = [&scsi.sense_size, &scsi.cdb_size].map(|size| size.load(Ordering::Relaxed));
    let [sense, cdb] = sizes;
    let words = [sense, cdb, u32::from(scsi.events.len() > 0), table.all().len() as u32];
    let mut payload = words.map(u32::to_le_bytes).concat();
    for lun in table.all() {
        payload.extend([lun.address.target, 0]);
        payload.extend(lun.address.lun.to_le_bytes());
        payload.extend(lun.unit.save(scsi.nexus).to_bytes());
    }
    pack(DeviceId::Scsi, &payload)
}

pub(super) fn load(scsi: &Scsi, state: &[u8], origin: Origin) -> Result<(), StateError> {
    let payload = unpack(state, DeviceId::Scsi)?;
    let (fixed, units) =
        payload.split_first_chunk::<FIXED>().ok_or(StateError::Length { found: payload.len(), expected: FIXED })?;
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| fixed[at + byte]));
    let (sense, cdb, missed, count) = (word(0), word(4), word(8), word(12) as usize);
    if !config::SENSE_SIZES.contains(&sense) || !config::CDB_SIZES.contains(&cdb) || missed > 1 {
        return Err(StateError::invalid("sizes that the configuration space does not take"));
    }
    let (units, rest) = units.as_chunks::<UNIT>();
    if units.len() != count || !rest.is_empty() {
        let found = units.len() * UNIT + rest.len();
        return Err(StateError::Length { found, expected: count.saturating_mul(UNIT) });
    }
    let found = units.iter().map(|unit| find(scsi, unit)).collect::<Result<Vec<_>, _>>()?;
    // All of it, or nothing: a unit that is there twice would be restored once, and then be found to be busy.
    if !found.is_sorted_by(|(lun, _), (next, _)| lun.address < next.address) {
        return Err(StateError::invalid("units that are not in the order of their addresses"));
    }
    for (lun, unit) in &found {
        lun.unit.check(scsi.nexus, unit, origin).map_err(|e| of_unit(lun.address, e))?;
    }
    for (lun, unit) in &found {
        lun.unit.restore(scsi.nexus, unit, origin).map_err(|e| of_unit(lun.address, e))?;
    }
    scsi.sense_size.store(sense, Ordering::Relaxed);
    scsi.cdb_size.store(cdb, Ordering::Relaxed);
    if missed == 1 {
        scsi.events.miss();
    }
    Ok(())
}

/// The unit that a part of the state is about, and what it says.
fn find(scsi: &Scsi, bytes: &[u8; UNIT]) -> Result<(Arc<Lun>, UnitState), StateError> {
    let [target, zero, low, high, rest @ ..] = bytes;
    let address = LunAddress { target: *target, lun: u16::from_le_bytes([*low, *high]) };
    let lun = scsi.lun(address).filter(|_| *zero == 0);
    let lun = lun.ok_or_else(|| StateError::invalid(format!("{address} is not here")))?;
    let unit = rest.first_chunk().ok_or(StateError::Foreign)?;
    UnitState::from_bytes(unit).map(|unit| (lun, unit)).map_err(|e| of_unit(address, e))
}

fn of_unit(address: LunAddress, why: impl std::fmt::Display) -> StateError {
    StateError::invalid(format!("{address}: {why}"))
}
