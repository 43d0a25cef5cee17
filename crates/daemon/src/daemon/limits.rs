//! Limits on disks, and the groups that share them.

use std::sync::Arc;

use egret_disk::{Limits, ThrottleGroup};

use super::{ChangeError, Daemon};

impl Daemon {
    /// Limits a blockdev, and with it all of its group: the one of this name, or else the one that it is in, or else
    /// one of its own. Limits of nothing take it out of its group. They stay when its image is opened anew.
    ///
    /// The limits have been [checked](Limits::check).
    ///
    /// # Errors
    /// There is no such blockdev, or it lies below another.
    pub fn set_limits(&mut self, node_name: &str, limits: Limits, group: Option<&str>) -> Result<(), ChangeError> {
        if !self.config.node_names().contains(&node_name) {
            return Err(ChangeError::NoNode(node_name.to_owned()));
        }
        let disk = self.disk_by_name(node_name, ChangeError::LimitBelow)?;
        if limits.are_set() {
            let group = match (group, self.throttle_groups.get(node_name)) {
                (None, Some(its)) => Arc::clone(its),
                (name, _) => {
                    let name = name.unwrap_or(node_name);
                    let known = self.throttle_groups.values().find(|group| group.name() == name);
                    known.map_or_else(|| ThrottleGroup::new(name, limits), Arc::clone)
                }
            };
            group.set_limits(limits);
            disk.set_throttle_group(Some(&group));
            self.throttle_groups.insert(node_name.to_owned(), group);
        } else {
            disk.set_throttle_group(None);
            self.throttle_groups.remove(node_name);
        }
        self.io_threads.values().for_each(|io_thread| {
            io_thread.handle().send(|target| target.backend().restart_throttled());
        });
        Ok(())
    }
}
