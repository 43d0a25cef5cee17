//! Limits on disks, and the groups that share them: those of the configuration, and those of commands.

use std::collections::BTreeMap;
use std::sync::Arc;

use egret_disk::{Limits, ThrottleGroup};
use egret_vocabulary::schema::{self, Blockdev, Driver, Throttle};

use super::{ChangeError, Daemon};

impl Daemon {
    /// Adds a group, which blockdevs with `driver=throttle` may be in.
    ///
    /// # Errors
    /// Its name is taken.
    pub fn add_throttle_group(&mut self, object: schema::ThrottleGroup) -> Result<(), ChangeError> {
        if self.config.has_object(&object.id) {
            return Err(ChangeError::DuplicateObject(object.id));
        }
        if self.has_limited(&object.id) {
            return Err(ChangeError::DuplicateThrottleGroup);
        }
        self.make_throttle_group(&object);
        self.config.throttle_groups.push(object);
        Ok(())
    }

    /// Has the group of an object; the limits of those have been checked.
    pub(super) fn make_throttle_group(&mut self, object: &schema::ThrottleGroup) {
        let group = ThrottleGroup::new(&*object.id, object.limits());
        self.throttle_objects.insert(object.id.clone(), group);
    }

    /// Limits the disks of a group to what `object` says, which is that group otherwise.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn change_throttle_group(&mut self, object: schema::ThrottleGroup) -> Result<(), ChangeError> {
        let Some(now) = self.config.throttle_groups.iter_mut().find(|now| now.id == object.id) else {
            return Err(ChangeError::NoObject(object.id));
        };
        self.throttle_objects[&object.id].set_limits(object.limits());
        *now = object;
        self.limit_disks();
        Ok(())
    }

    /// Removes a group.
    ///
    /// # Errors
    /// There is none of this name, or a blockdev is in it.
    pub fn remove_throttle_group(&mut self, id: &str) -> Result<(), ChangeError> {
        if !self.throttle_objects.contains_key(id) {
            return Err(ChangeError::NoObject(id.to_owned()));
        }
        let names = |blockdev: &Blockdev| matches!(&blockdev.driver, Driver::Throttle(Throttle { throttle_group, .. }) if throttle_group == id);
        if self.has_limited(id) || self.config.layers().any(names) {
            return Err(ChangeError::ObjectInUse(id.to_owned()));
        }
        self.throttle_objects.remove(id);
        self.config.throttle_groups.retain(|object| object.id != id);
        Ok(())
    }

    /// Whether a command has put a blockdev in the group of this name.
    fn has_limited(&self, group: &str) -> bool {
        self.throttle_groups.values().any(|other| other.name() == group)
    }

    /// Limits a blockdev, and with it all of its group: the one of this name, or else the one that it is in, or else
    /// one of its own. Limits of nothing take it out of its group. They stay when its image is opened anew.
    ///
    /// The limits have been [checked](Limits::check).
    ///
    /// # Errors
    /// There is no such blockdev, it lies below another, or the configuration has it in a group.
    pub fn set_limits(&mut self, node_name: &str, limits: Limits, group: Option<&str>) -> Result<(), ChangeError> {
        if !self.config.node_names().contains(&node_name) {
            return Err(ChangeError::NoNode(node_name.to_owned()));
        }
        self.disk_by_name(node_name, ChangeError::LimitBelow)?;
        if let Some(id) = self.configured_group(node_name) {
            return Err(ChangeError::Throttled(node_name.to_owned(), id.to_owned()));
        }
        if limits.are_set() {
            let group = match (group, self.throttle_groups.get(node_name)) {
                (None, Some(its)) => Arc::clone(its),
                (name, _) => {
                    let name = name.unwrap_or(node_name);
                    let mut known = self.throttle_objects.values().chain(self.throttle_groups.values());
                    let known = known.find(|group| group.name() == name);
                    known.map_or_else(|| ThrottleGroup::new(name, limits), Arc::clone)
                }
            };
            group.set_limits(limits);
            if let Some(object) = self.config.throttle_groups.iter_mut().find(|object| object.id == group.name()) {
                *object = schema::ThrottleGroup::new(group.name(), limits);
            }
            self.throttle_groups.insert(node_name.to_owned(), group);
        } else {
            self.throttle_groups.remove(node_name);
        }
        self.limit_disks();
        Ok(())
    }

    /// Has each disk in its group, and loops look again what limits let through.
    pub(super) fn limit_disks(&self) {
        let groups = self.groups();
        for (name, disk) in &self.disks {
            disk.set_throttle_group(groups.get(&**name).copied());
        }
        self.io_threads.values().for_each(|io_thread| {
            io_thread.handle().send(|target| target.backend().restart_throttled());
        });
    }

    /// What limits each blockdev that is limited, by the blockdev's name.
    pub(super) fn groups(&self) -> BTreeMap<&str, &Arc<ThrottleGroup>> {
        let own = self.throttle_groups.iter().map(|(name, group)| (&**name, group));
        let configured = self.config.throttled().into_iter();
        own.chain(configured.filter_map(|(name, id)| Some((name, self.throttle_objects.get(id)?)))).collect()
    }

    /// What limits a blockdev. Who looks at all of them asks for [all](Self::groups) at once.
    pub(super) fn group_of(&self, node_name: &str) -> Option<&Arc<ThrottleGroup>> {
        match self.configured_group(node_name) {
            Some(id) => self.throttle_objects.get(id),
            None => self.throttle_groups.get(node_name),
        }
    }

    /// The group that the configuration has a blockdev in: its own, or that of one which it lies over.
    fn configured_group(&self, node_name: &str) -> Option<&str> {
        // There are none, mostly.
        if self.config.throttle_groups.is_empty() {
            return None;
        }
        self.config.disk(node_name)?.throttle_groups.first().copied()
    }
}
