//! Images that a command has active, whether or not rings of their exports run.

use std::sync::Arc;

use egret_vocabulary::Config;
use egret_vocabulary::schema::Export;

use super::{ChangeError, Daemon};

impl Daemon {
    /// Has a blockdev active, or inactive, or all of them: with `allow-inactive` an image is locked from here on, or until
    /// rings run again.
    ///
    /// # Errors
    /// There is no such blockdev, somebody else has its image locked, or an export needs it to be active, which may be on its
    /// way out. Those before it have changed.
    pub fn set_active(&mut self, node_name: Option<&str>, active: bool) -> Result<(), ChangeError> {
        let Some(name) = node_name else {
            let all: Vec<_> = self.disks.keys().cloned().collect();
            return all.iter().try_for_each(|name| self.set_active(Some(name), active));
        };
        if !self.config.node_names().contains(&name) {
            return Err(ChangeError::NoNode(name.to_owned()));
        }
        let disk = Arc::clone(self.disk_by_name(name, ChangeError::NodeBelow)?);
        let failed = |why: String| Err(ChangeError::SetActive(name.to_owned(), why));
        if !disk.options().allow_inactive {
            // What nobody exports is not locked: QEMU has it inactive and activates it when it is exported.
            let user = self.config.exports.iter().find(|export| export.has_node(name)).filter(|_| !active);
            return user.map_or(Ok(()), |user| failed(format!("export '{}' has allow-inactive=off", user.id)));
        }
        if active {
            if !self.held.contains_key(name) {
                match self.calls.activate(&disk) {
                    Ok(Ok(held)) => drop(self.held.insert(name.to_owned(), held)),
                    Ok(Err(e)) => return failed(e.cause.to_string()),
                    Err(why) => return failed(why.to_string()),
                }
            }
            return Ok(());
        }
        if let Some(user) = self.active_export_of(name) {
            return failed(format!(
                "rings of export '{}' run until its guest stops; if it had stopped before the daemon was started, until it has \
                 gone on and stops again, or its virtual machine monitor ends",
                user.id
            ));
        }
        if disk.is_active() {
            // Requests may be in flight in what has been deleted, which nobody sees any more, and has the image until they end.
            if let Some(leaving) = self.leaving_export_of(name) {
                return Err(ChangeError::ShuttingDown(leaving));
            }
            let of = Arc::clone(&disk);
            match self
                .calls
                .run(&disk.options().driver, "what was written could not be made stable", move || of.write_out())
            {
                Ok(Ok(())) => {}
                Ok(Err(e)) => return failed(format!("it stays locked: the last flush failed: {e}")),
                Err(why) => return failed(format!("it stays locked: {why}")),
            }
        }
        self.held.remove(name);
        self.exports.values().for_each(|export| export.let_go(&disk));
        if self.unwritten.remove(name).is_some() {
            // It was open as its unit had it.
            self.reconcile_disks_or_log(&[name.to_owned()]);
        }
        Ok(())
    }

    /// An export that is on its way out, with a blockdev, or that a unit of the blockdev has been taken away from.
    fn leaving_export_of(&self, name: &str) -> Option<String> {
        let leaves = |export: &&Export| export.has_node(name) && self.is_shutting_down(&export.id);
        let leaving = self.config.exports.iter().find(leaves).map(|export| &export.id);
        leaving.or_else(|| self.teardowns.export_of(name)).cloned()
    }

    /// An export that has a blockdev active, if one does.
    fn active_export_of(&self, name: &str) -> Option<&Export> {
        let has_active_disks =
            |export: &Export| self.exports.get(&export.id).is_some_and(egret_export::Export::has_active_disks);
        self.config.exports.iter().find(|export| export.has_node(name) && has_active_disks(export))
    }

    /// Leaves images that could not be written out to the exports that have them: those see to it when rings have run.
    pub(super) fn leave_to_exports(&mut self) {
        for (name, active) in std::mem::take(&mut self.unwritten) {
            let users = self.config.exports.iter().filter(|export| export.has_node(&name));
            let users = users.filter_map(|export| self.exports.get(&export.id));
            // Where rings run it is written out soonest.
            let user = users.max_by_key(|export| export.has_active_disks());
            let kept = match user {
                Some(export) => export.keep(active),
                None => Some(active),
            };
            self.unwritten.extend(kept.map(|active| (name, active)));
        }
    }

    /// Whether an image is kept as the last of its exports had it, because it could not be written out.
    pub(super) fn is_kept(&self, config: &Config, name: &str) -> bool {
        self.unwritten.contains_key(name) && !config.exports.iter().any(|export| export.has_node(name))
    }
}
