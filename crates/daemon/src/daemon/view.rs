//! What there is, as it was after the last change: for queries, which are answered while the next is in work.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use egret_disk::Limits;
use egret_export::{IoStatus, QueueStats};
use egret_vocabulary::Config;
use egret_vocabulary::schema::Device;

use super::statistics::OpenDisk;
use super::{ChangeError, Daemon, DiskState, FdSetShown, Watched};

/// A daemon's objects. It holds none of them: what it shows may be closed meanwhile.
#[derive(Clone, Debug)]
pub struct View {
    config: Config,
    disks: BTreeMap<String, OpenDisk>,
    limits: BTreeMap<String, (String, Limits)>,
    shutting_down: BTreeSet<String>,
    fd_sets: Vec<FdSetShown>,
    watched: Arc<Watched>,
}

impl Daemon {
    /// What there is now.
    pub fn view(&self) -> View {
        let config = self.config.clone();
        let names = config.node_names();
        let disks = names.iter().filter_map(|name| Some(((*name).to_owned(), self.open_disk(name)?))).collect();
        let limits = self.groups().into_iter();
        let limits = limits.map(|(name, group)| (name.to_owned(), (group.name().to_owned(), group.limits()))).collect();
        let shutting_down = config.exports.iter().filter(|export| self.is_shutting_down(&export.id));
        let shutting_down = shutting_down.map(|export| export.id.clone()).collect();
        View { config, disks, limits, shutting_down, fd_sets: self.shown_fd_sets(), watched: self.registry.read() }
    }
}

impl View {
    /// The objects that there are.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The sets of descriptors that were handed over.
    pub fn fd_sets(&self) -> &[FdSetShown] {
        &self.fd_sets
    }

    /// The counters of what runs, which go on.
    pub fn watched(&self) -> &Watched {
        &self.watched
    }

    /// What the queues of one export have counted since they began.
    pub fn export_stats(&self, id: &str) -> Option<QueueStats> {
        let mut sum = QueueStats::default();
        self.watched.exports.get(id)?.iter().for_each(|queue| queue.add_to(&mut sum));
        Some(sum)
    }

    /// What the queues of all exports have counted for a disk; of one of several of an export without how long it took, and
    /// without what is of the queues.
    pub fn node_stats(&self, node_name: &str) -> QueueStats {
        let mut sum = QueueStats::default();
        for export in self.config.exports.iter().filter(|export| export.has_node(node_name)) {
            for queue in self.watched.exports.get(&export.id).into_iter().flatten() {
                match export.device {
                    Device::VhostUserScsi(_) => queue.add_of_disk_to(node_name, &mut sum),
                    Device::VhostUserBlk(_) | Device::Nbd(_) => queue.add_to(&mut sum),
                }
            }
        }
        sum
    }

    /// Whether an export is stopped because a request failed; one on its way out is not.
    pub fn io_status(&self, id: &str) -> IoStatus {
        self.watched.errors.get(id).map_or(IoStatus::Ok, |errors| errors.status())
    }

    /// Has an export go on that is stopped because a request failed; does nothing if it is not.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn resume_export(&self, id: &str) -> Result<(), ChangeError> {
        let errors = self.watched.errors.get(id).ok_or_else(|| ChangeError::NoExport(id.to_owned()))?;
        errors.resume();
        Ok(())
    }

    /// A disk; of one that another lies over, what that one sees.
    pub fn disk_state(&self, node_name: &str) -> Option<DiskState> {
        self.disks.get(node_name).map(OpenDisk::state)
    }

    /// What limits a blockdev: its group, and that one's limits.
    pub fn limits(&self, node_name: &str) -> Option<(&str, Limits)> {
        self.limits.get(node_name).map(|(group, limits)| (group.as_str(), *limits))
    }

    /// Whether an export is on its way out.
    pub fn is_shutting_down(&self, id: &str) -> bool {
        self.shutting_down.contains(id)
    }
}
