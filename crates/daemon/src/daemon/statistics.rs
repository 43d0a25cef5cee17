//! What a running daemon tells of itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use egret_disk::{Disk, Standing};
use egret_event_loop::LoopStats;
use egret_export::QueueStats;

use super::Daemon;

/// A disk as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskState {
    /// Bytes.
    pub size: u64,
    /// Whether it is open for reading alone.
    pub read_only: bool,
    /// Whether its image is locked, unless nobody asks for that.
    pub active: bool,
}

impl DiskState {
    /// One that is not open, which nobody knows the size of.
    pub const CLOSED: Self = Self { size: 0, read_only: true, active: false };
}

/// Where the state of a disk can be read, which this does not keep open.
#[derive(Clone, Debug)]
pub(super) struct OpenDisk {
    read_only: bool,
    standing: Arc<Standing>,
}

impl OpenDisk {
    pub(super) fn state(&self) -> DiskState {
        let Self { read_only, ref standing } = *self;
        DiskState { size: standing.size(), read_only, active: standing.is_active() }
    }
}

impl Daemon {
    /// What the queues of all exports have counted since they began.
    pub fn queue_stats(&self) -> QueueStats {
        let mut sum = QueueStats::default();
        self.exports.values().for_each(|export| sum.add(&export.stats()));
        sum
    }

    /// What each I/O thread has counted since it began, by its name.
    pub fn loop_stats(&self) -> BTreeMap<&str, LoopStats> {
        self.io_threads.iter().map(|(name, io_thread)| (name.as_str(), io_thread.stats())).collect()
    }

    /// A disk as it is now; of one that another lies over, what that one sees.
    pub fn disk_state(&self, node_name: &str) -> Option<DiskState> {
        Some(self.open_disk(node_name)?.state())
    }

    pub(super) fn open_disk(&self, node_name: &str) -> Option<OpenDisk> {
        let disk = self.disk_of(node_name)?;
        Some(OpenDisk { read_only: disk.read_only(), standing: Arc::clone(disk.standing()) })
    }

    fn disk_of(&self, node_name: &str) -> Option<&Arc<Disk>> {
        self.disks.get(node_name).or_else(|| {
            let above = self.config.blockdevs.iter().find(|blockdev| {
                blockdev.child_name() == Some(node_name)
                    || blockdev.layers().skip(1).any(|child| child.node_name.as_deref() == Some(node_name))
            })?;
            self.disk_of(above.node_name.as_deref()?)
        })
    }
}
