//! What an export asks of a device, whichever it is.

use std::sync::Arc;

use egret_vring::ring::Inflight;
use thiserror::Error;

use crate::model::{DiskKey, Model};
use crate::state::{Origin, StateError};

/// The feature bit of EVENT_IDX, which a queue is configured with.
pub const EVENT_IDX: u64 = 1 << virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;

/// The feature bit of packed rings, which a queue is configured with.
pub const RING_PACKED: u64 = 1 << virtio_bindings::bindings::virtio_config::VIRTIO_F_RING_PACKED;

/// What a driver did to the configuration space or the features that it must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum DriverError {
    /// A feature that was not offered.
    #[error("features {0:#x} were not offered")]
    NotOffered(u64),
    /// A field that is not for the driver to write.
    #[error("{len} bytes at {offset} of the configuration space cannot be written")]
    ReadOnly {
        /// Where it wrote.
        offset: u64,
        /// How much, in bytes.
        len: usize,
    },
    /// A value that the field cannot have.
    #[error("{value} cannot be written at {offset} of the configuration space")]
    Value {
        /// Where it wrote.
        offset: u64,
        /// What it wrote.
        value: u32,
    },
}

/// One device, as its session sees it: what all of its queues have in common.
pub trait Device: Send + Sync {
    /// How many queues there are, those for control and events among them.
    fn num_queues(&self) -> u16;

    /// How many of the queues, counted from the first, never ask anything of a disk.
    fn diskless_queues(&self) -> u16;

    /// The features offered. The transport adds its own.
    fn features(&self) -> u64;

    /// Takes the driver's choice of features; the transport keeps its own bits to itself.
    ///
    /// # Errors
    ///
    /// A feature that was not offered. Nothing has changed.
    fn set_features(&self, acked: u64) -> Result<(), DriverError>;

    /// Forgets the driver. Its queues do not run.
    fn reset(&self);

    /// Forgets what drivers have chosen in the configuration space: the front-end has gone, which may have a copy of it.
    fn forget_choices(&self) {}

    /// Reads the configuration space from byte `offset` on. It reads as zeroes past its end.
    fn read_config(&self, offset: u64, into: &mut [u8]);

    /// Writes to the configuration space.
    ///
    /// # Errors
    ///
    /// What cannot be written. Nothing has changed.
    fn write_config(&self, offset: u64, bytes: &[u8]) -> Result<(), DriverError>;

    /// A disk has `bytes` now. Returns whether that changes the configuration space, of which the caller notifies the driver.
    fn resize(&self, disk: DiskKey, bytes: u64) -> bool;

    /// Whether the configuration space says how long a disk is.
    fn tells_size(&self) -> bool {
        false
    }

    /// Makes the choices about write caches that a driver has made with another device in this one's place.
    fn choose(&self, choices: u8);

    /// Whether the record's choices were noted by this device, which goes by what its driver chose even after a
    /// [reset](Self::reset): then there is nothing to [`choose`](Self::choose).
    fn has_noted(&self, _record: &Inflight) -> bool {
        false
    }

    /// Notes in the record what the driver has chosen, and what it goes on to choose by requests, until a
    /// [reset](Self::reset).
    fn note_choices(&self, record: &Inflight);

    /// What another device needs to go on in this one's place ([`StateError`] says what may be wrong with it). Its queues do
    /// not run.
    fn save(&self) -> Vec<u8>;

    /// Goes on in the place of a device that has saved this, and where that was. Its queues do not run.
    ///
    /// # Errors
    ///
    /// It is not a state of such a device. Nothing has changed.
    fn load(&self, state: &[u8], origin: Origin) -> Result<(), StateError>;

    /// The model of the queue `index`, which has `size` descriptors.
    fn model(self: Arc<Self>, index: u16, size: u16) -> Model;
}

/// Reads what lies at `offset` of a configuration space.
pub(crate) fn read_space(space: &[u8], offset: u64, into: &mut [u8]) {
    into.fill(0);
    let Some(rest) = usize::try_from(offset).ok().and_then(|offset| space.get(offset..)) else { return };
    let len = rest.len().min(into.len());
    into[..len].copy_from_slice(&rest[..len]);
}
