//! Logical units of a virtio-scsi export, which come and go while it serves.

use std::sync::Arc;

use egret_disk::Disk;
use egret_export::Export;
use egret_virtio::scsi::LunAddress;
use egret_vocabulary::schema::{self, Device, Lun};

use super::exports::check_size;
use super::io_threads::iothreads_of;
use super::teardowns::{TornDown, Waiter};
use super::{ChangeError, Daemon, StartError, scsi};

impl Daemon {
    /// Adds a logical unit to an export, and tells its client.
    ///
    /// # Errors
    /// There is no such export, or none with logical units; the address is taken; its disk is not there, cannot be had
    /// as the export needs it, or is another unit of this export.
    pub fn add_lun(&mut self, id: &str, lun: Lun) -> Result<(), ChangeError> {
        let (before, _) = self.scsi_export(id)?;
        let (before, node) = (before.clone(), lun.node_name.as_str());
        if before.luns().iter().any(|other| scsi::address_of(other) == scsi::address_of(&lun)) {
            return Err(ChangeError::LunInUse(id.to_owned(), scsi::address_of(&lun)));
        }
        if !self.config.node_names().contains(&node) {
            return Err(ChangeError::NoDevice(String::new(), node.to_owned()));
        }
        if before.has_node(node) {
            return Err(ChangeError::NodeInUse(node.to_owned()));
        }
        self.await_answers(iothreads_of(&before))?;
        let with = before.with_lun(lun.clone())?;
        let warnings = self.config.warnings();
        self.config.change_export(with.clone())?;
        let about = [lun.node_name.clone()];
        let started = self.reconcile_disks(&about).and_then(|()| self.start_lun(&with, &lun));
        if let Err(e) = started {
            self.config.put_export(before);
            self.reconcile_disks_or_log(&about);
            return Err(e.into());
        }
        self.leave_to_exports();
        self.warn_of_more_than(&warnings);
        Ok(())
    }

    /// Takes a logical unit from an export, and tells its client. Its requests in flight end;
    /// [`take_torn_down`](Self::take_torn_down) says when they have, and its disk is in use until then.
    ///
    /// # Errors
    /// There is no such export, or none with logical units, or there is nothing at this address, or no thread to wait for it.
    pub fn remove_lun(&mut self, id: &str, at: LunAddress) -> Result<(), ChangeError> {
        let (object, export) = self.scsi_export(id)?;
        let (without, lun) = object.without_lun(schema::LunAddress { lun: at.lun, target: at.target });
        let Lun { node_name, .. } = lun.ok_or_else(|| ChangeError::NoLun(id.to_owned(), at))?;
        let waiter = Waiter::new("egret-teardown").map_err(|e| ChangeError::LunStays(id.to_owned(), at, e))?;
        let leaving = export.remove_lun(at).map_err(StartError::from)?;
        self.config.put_export(without);
        let what = TornDown::Lun { export: id.to_owned(), at, node_name };
        self.teardowns.add(waiter, what, move || leaving.wait().into_iter().collect());
        Ok(())
    }

    fn start_lun(&mut self, object: &schema::Export, lun: &Lun) -> Result<(), StartError> {
        let disk = self.open_disk_of(&lun.node_name)?;
        check_size(object, &disk)?;
        self.make_engines(object, [&disk])?;
        let wanted = scsi::UnitOptions::of(object, lun, &disk);
        let at = wanted.at;
        let unit = self.unit(&object.id, &lun.node_name, wanted)?;
        let activate = |disk: &Arc<Disk>| {
            Ok(self.calls.activate(disk).map_err(|why| StartError::Unanswered(lun.node_name.clone(), why))??)
        };
        let added: Result<(), StartError> =
            self.exports[&object.id].add_lun(at, Arc::clone(&unit.unit), disk, activate);
        added?;
        self.keep_unit(&lun.node_name, unit);
        Ok(())
    }

    fn scsi_export(&self, id: &str) -> Result<(&schema::Export, &Export), ChangeError> {
        let object = self.config.exports.iter().find(|export| export.id == id);
        let Some((object, export)) = object.zip(self.exports.get(id)) else {
            return Err(ChangeError::NoExport(id.to_owned()));
        };
        match object.device {
            Device::VhostUserScsi(_) => Ok((object, export)),
            Device::VhostUserBlk(_) | Device::Nbd(_) => Err(ChangeError::NotScsi(id.to_owned())),
        }
    }
}
