//! Images that a command has active, whether or not rings of their exports run.

use super::{ChangeError, Daemon};

impl Daemon {
    /// Has a blockdev active, or inactive, or all of them: with `allow-inactive` an image is locked from here on, or until
    /// rings run again.
    ///
    /// # Errors
    /// There is no such blockdev, somebody else has its image locked, or an export needs it to be active. Those before it
    /// have changed.
    pub fn set_active(&mut self, node_name: Option<&str>, active: bool) -> Result<(), ChangeError> {
        let Some(name) = node_name else {
            let all: Vec<_> = self.disks.keys().cloned().collect();
            return all.iter().try_for_each(|name| self.set_active(Some(name), active));
        };
        if !self.config.node_names().contains(&name) {
            return Err(ChangeError::NoNode(name.to_owned()));
        }
        let disk = self.disks.get(name).ok_or_else(|| ChangeError::NodeBelow(name.to_owned()))?;
        let failed = |why: String| Err(ChangeError::SetActive(name.to_owned(), why));
        if !disk.options().allow_inactive {
            // What nobody exports is not locked: QEMU has it inactive and activates it when it is exported.
            let user = self.config.exports.iter().find(|export| export.has_node(name)).filter(|_| !active);
            return user.map_or(Ok(()), |user| failed(format!("export '{}' has allow-inactive=off", user.id)));
        }
        if active {
            if !self.held.contains_key(name) {
                match disk.activate() {
                    Ok(held) => drop(self.held.insert(name.to_owned(), held)),
                    Err(e) => return failed(e.cause.to_string()),
                }
            }
            return Ok(());
        }
        let runs = |export: &&egret_vocabulary::schema::Export| {
            export.has_node(name) && self.exports.get(&export.id).is_some_and(egret_export::Export::has_active_disks)
        };
        if let Some(user) = self.config.exports.iter().find(runs) {
            return failed(format!("rings of export '{}' run; it is inactive when its guest has stopped", user.id));
        }
        if self.held.contains_key(name)
            && let Err(e) = disk.write_out()
        {
            return failed(format!("it stays locked: the last flush failed: {e}"));
        }
        self.held.remove(name);
        Ok(())
    }
}
