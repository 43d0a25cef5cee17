//! A device's state on its way from one back-end to another (vhost-user, "Migrating back-end state").
//!
//! The client offers a channel, which could be anything: a pipe that nobody reads, a file of a file system that never
//! answers. It is not touched. A back-end may give a channel of its own instead, and ours is memory: it never blocks, and is
//! no longer than we have made it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use egret_virtio::{Device, Origin, STATE_HEADER, StateError, state_len};
use egret_vring::memory::{GuestMemory, MemoryError, Region};
use egret_vring::vhost_user::NO_FD;
use rustix::fs::{SealFlags, fcntl_add_seals};

use crate::memory_file::memory_file;

/// The longest state: of some thirty thousand logical units.
const LONGEST: usize = 1 << 20;

/// In a reply: it failed, and so there is no channel.
pub(crate) const FAILED: u64 = NO_FD | 1;

/// Which way a state goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Save,
    Load,
}

/// What has become of a state.
#[derive(Debug, Default)]
pub(crate) enum Transfer {
    /// Nothing was asked, or it has failed.
    #[default]
    None,
    /// The client has it.
    Saved,
    /// The client writes it, until it asks whether it is good.
    Loading(OwnedFd),
}

/// Why there is no state.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransferError {
    #[error("its queues run")]
    Running,
    #[error("it was not asked for")]
    NotAsked,
    #[error("{0} bytes of it; at most {LONGEST} are taken")]
    Long(usize),
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// The state of a device, to be read.
pub(crate) fn save(device: &dyn Device) -> Result<OwnedFd, TransferError> {
    let state = device.save();
    if state.len() > LONGEST {
        return Err(TransferError::Long(state.len()));
    }
    let file = channel(state.len())?;
    map(file.as_fd(), state.len())?.write(0, &state);
    fcntl_add_seals(&file, SealFlags::WRITE).map_err(io::Error::from)?;
    Ok(file)
}

/// Where a state is to be written.
pub(crate) fn begin_to_load() -> Result<OwnedFd, TransferError> {
    Ok(channel(LONGEST)?)
}

/// Has the device go on with what was written.
pub(crate) fn load(device: &dyn Device, file: &OwnedFd) -> Result<(), TransferError> {
    let memory = map(file.as_fd(), LONGEST)?;
    let mut header = [0; STATE_HEADER];
    memory.read(0, &mut header);
    let len = state_len(&header)?;
    if len > LONGEST {
        return Err(TransferError::Long(len));
    }
    // Read once: the client can still write to it.
    let mut state = vec![0; len];
    memory.read(0, &mut state);
    Ok(device.load(&state, Origin::Elsewhere)?)
}

fn channel(len: usize) -> io::Result<OwnedFd> {
    memory_file("egret-state", len as u64, SealFlags::empty())
}

/// Mapped, because a file's position is its reader's and writer's.
fn map(file: BorrowedFd<'_>, len: usize) -> Result<GuestMemory, TransferError> {
    let region = Region { guest_addr: 0, size: len as u64, user_addr: 0, file, offset: 0 };
    Ok(GuestMemory::empty().with(region)?)
}

#[cfg(test)]
mod tests {
    use egret_virtio::blk::{Blk, BlkConfig};

    use super::*;

    #[test]
    fn a_state_that_says_that_it_is_longer_than_any_is_not_made_room_for() {
        let config =
            BlkConfig { capacity_bytes: 1 << 20, queue_size: 64, serial: "state".into(), ..BlkConfig::default() };
        let device = Blk::new(config).unwrap();
        for len in [LONGEST, LONGEST + 1, u32::MAX as usize] {
            let mut state = device.save();
            // Its length follows what it is of.
            state[12..16].copy_from_slice(&((len - STATE_HEADER) as u32).to_le_bytes());
            let file = begin_to_load().unwrap();
            map(file.as_fd(), LONGEST).unwrap().write(0, &state);
            match load(&*device, &file) {
                Err(TransferError::Long(found)) => assert!(len > LONGEST && found == len),
                other => assert!(len == LONGEST && matches!(other, Err(TransferError::State(_))), "{len}"),
            }
        }
    }
}
