//! What a device has to be told to go on in another's place (vhost-user, "Migrating back-end state").
//!
//! A driver that is migrated to another host, or saved and restored, does not notice: it neither sets the device up again
//! nor says again what it has said. What it may have said, or is still to be told, is the device's state:
//!
//! | bytes | hold, little-endian |
//! |---|---|
//! | 0..8 | `egretdev` |
//! | 8..10 | the version of all that follows: 1 |
//! | 10..12 | which device: its virtio ID, 2 for virtio-blk, 8 for virtio-scsi |
//! | 12..16 | how many bytes follow |
//! | | of virtio-blk one byte, the cache mode as the driver writes it (`writeback`) |
//! | | of virtio-scsi `sense_size`, `cdb_size`, whether events were not reported (0 or 1) and how many units there are, four bytes each; then for each unit its target, a zero, its LUN (two bytes) and what [`egret_scsi::UnitState`] says of it |
//!
//! What is in rings, in memory and on the disk is not part of it.

use std::fmt::Display;

pub use egret_scsi::Origin;
use thiserror::Error;

const MAGIC: [u8; 8] = *b"egretdev";
const VERSION: u16 = 1;

/// How long the part is that all devices have.
pub const STATE_HEADER: usize = 16;

/// Which device it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum DeviceId {
    Blk = 2,
    Scsi = 8,
}

/// Why a state is not one to go on with.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum StateError {
    /// Something else, or nothing.
    #[error("it does not begin as a device state of egret does")]
    Foreign,
    /// Of a later egret.
    #[error(
        "it is of version {0}, and this egret knows version {VERSION}: load it with one that is as new as its source"
    )]
    Version(u16),
    /// Of another device.
    #[error("it is of the virtio device {found}, and this is {expected}")]
    Device {
        /// Which one.
        found: u16,
        /// Which one it should be.
        expected: u16,
    },
    /// It ends before it should, or later.
    #[error("it has {found} bytes where {expected} were expected")]
    Length {
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// Something in it.
    #[error("{0}")]
    Invalid(String),
}

impl StateError {
    pub(crate) fn invalid(why: impl Display) -> Self {
        Self::Invalid(why.to_string())
    }
}

/// Makes a state of what a device says of itself.
pub(crate) fn pack(device: DeviceId, payload: &[u8]) -> Vec<u8> {
    let mut state = MAGIC.to_vec();
    state.extend(VERSION.to_le_bytes());
    state.extend((device as u16).to_le_bytes());
    state.extend((payload.len() as u32).to_le_bytes());
    state.extend(payload);
    state
}

/// How long the whole of a state is that begins so.
///
/// # Errors
///
/// It is not one that this version knows.
pub fn state_len(header: &[u8; STATE_HEADER]) -> Result<usize, StateError> {
    if header[..8] != MAGIC {
        return Err(StateError::Foreign);
    }
    match u16::from_le_bytes([header[8], header[9]]) {
        VERSION => {}
        other => return Err(StateError::Version(other)),
    }
    let [.., a, b, c, d] = *header;
    Ok(STATE_HEADER + u32::from_le_bytes([a, b, c, d]) as usize)
}

/// What a device has said of itself.
pub(crate) fn unpack(state: &[u8], device: DeviceId) -> Result<&[u8], StateError> {
    let header = state.first_chunk().ok_or(StateError::Foreign)?;
    let expected = state_len(header)?;
    if state.len() != expected {
        return Err(StateError::Length { found: state.len(), expected });
    }
    match u16::from_le_bytes([header[10], header[11]]) {
        found if found == device as u16 => Ok(&state[STATE_HEADER..]),
        found => Err(StateError::Device { found, expected: device as u16 }),
    }
}
