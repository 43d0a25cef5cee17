//! What changes under running queues: the I/O threads that run them, and how their disks are opened.

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::convert::Infallible as Never;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use egret_confine::{Bounds, ThreadKind};
use egret_disk::{Disk, Driver as DiskDriver, Loss, RemoteKind};
use egret_export::{DiskSwap, Export, ExportError, IoStatus, Pause, reopen};
use egret_vocabulary::Config;
use egret_vocabulary::schema::{self, Blockdev, Child, Driver, Object as _};

use super::io_threads::iothreads_of;
use super::{ChangeError, DEFAULT_IOTHREAD, Daemon, StartError};

/// How long a disk that was reopened is waited for to be closed.
const PATIENCE: Duration = Duration::from_secs(5);

impl Daemon {
    /// Has an export's queues run where `object` says, which is that export on other I/O threads. Returns the longest
    /// time that a queue was not served.
    ///
    /// # Errors
    /// There is no such export or I/O thread, or one of the threads is stuck, the export is to stay where it is, or a queue
    /// cannot move. All queues are where they were, unless one that had moved cannot go back: the error says so.
    pub fn place_export(&mut self, object: schema::Export) -> Result<Pause, ChangeError> {
        let Some(running) = self.exports.get(&object.id) else { return Err(ChangeError::NoExport(object.id)) };
        let Some(at) = self.config.exports.iter().position(|now| now.id == object.id) else {
            return Err(ChangeError::NoExport(object.id));
        };
        if let Some((_, name)) = object.iothreads().find(|(_, name)| !self.io_threads.contains_key(*name)) {
            return Err(ChangeError::NoIoThread(name.to_owned()));
        }
        let now = &self.config.exports[at];
        let owners = iothreads_of(&object);
        let home = now.iothread_of(0).unwrap_or(DEFAULT_IOTHREAD);
        if now.fixed_iothread && owners.clone().any(|owner| owner != home) {
            return Err(ChangeError::FixedExport(object.id.clone(), home.to_owned()));
        }
        self.await_answers(iothreads_of(now).chain(owners.clone()).collect::<BTreeSet<_>>())?;
        let loops: Vec<_> = owners.map(|owner| self.io_threads[owner].handle().clone()).collect();
        let placed = running.run_on(&loops);
        let now = &mut self.config.exports[at];
        if let Err(ExportError::Scattered(_) | ExportError::Stuck(..)) = placed {
            for (queue, on) in (0..).zip(&loops) {
                if running.is_on(queue, on) {
                    let owner = object.iothread_of(queue).unwrap_or(DEFAULT_IOTHREAD);
                    *now = now.with_queue_on(queue, owner, now.mapping(DEFAULT_IOTHREAD))?;
                }
            }
        }
        let pause = placed.map_err(StartError::from)?;
        *now = object;
        Ok(pause)
    }

    /// Opens nodes otherwise while they are used. Each of `blockdevs` says all that its node is to be: what it leaves
    /// unset goes back to its default. Returns the longest time that a queue was not served.
    ///
    /// # Errors
    /// There is no such node, it would be another image, or an export could not use it as it would be. All nodes are as
    /// they were.
    pub fn reopen(&mut self, blockdevs: Vec<Blockdev>) -> Result<Pause, ChangeError> {
        let mut tops = self.config.blockdevs.clone();
        let mut named = Vec::new();
        for new in blockdevs {
            let name = new.node_name.clone().ok_or(ChangeError::NamelessReopening)?;
            named.push(name.clone());
            let old = tops.iter_mut().find_map(|top| node_mut(top, &name));
            replace(old.ok_or(ChangeError::NoNode(name))?, new)?;
        }
        let mut changed = self.config.clone();
        changed.blockdevs = tops;
        let writers = changed.exports.iter().filter(|export| export.writable);
        for (_, node) in writers.flat_map(schema::Export::node_names) {
            if changed.disk(node).is_some_and(|disk| disk.settings.read_only) {
                return Err(ChangeError::ReadOnlyInUse(node.to_owned()));
            }
        }
        let changed = changed.checked()?;
        let swaps = self.reopened(&changed, &named)?;
        let closed = self.closed(&changed, &named);
        closed.iter().try_for_each(|name| self.settled(name))?;
        let opened = self.opened(&changed, &closed)?;
        let users = self.users(&swaps)?;
        let objects = changed.exports.iter().filter(|object| users.iter().any(|user| user.id() == object.id));
        self.await_answers(objects.clone().flat_map(iothreads_of).collect::<BTreeSet<_>>())?;
        for object in objects {
            let swaps = swaps.iter().filter(|swap| object.has_node(swap.old.node_name()));
            self.make_engines(object, swaps.map(|swap| &swap.new))?;
        }
        let pause = reopen(&users, &swaps).map_err(StartError::from)?;
        self.config = changed;
        let (gone, left_behind) = channel::<Never>();
        for DiskSwap { old, new } in swaps {
            let name = old.node_name().to_owned();
            // They could be in the way of a disk that is opened after this one, and what holds the old one may hang.
            old.leave_locks();
            drop(old);
            let_go_of_predecessor(Arc::clone(&new), gone.clone());
            // It has the old one's locks, also where the old one was locked for a moment alone, by a session that goes on to
            // another disk, say: then nobody unlocks this one but who had it active last, which is here.
            let _until_handed_over = new.is_active().then(|| new.activate());
            for held in [self.held.get_mut(&name), self.unwritten.get_mut(&name)].into_iter().flatten() {
                held.hand_over(&new);
            }
            self.disks.insert(name, new);
        }
        for disk in opened {
            let loss = self.losses.remove(&self.image_of(disk.node_name()));
            // As with one that was open.
            loss.filter(Loss::is_untold).into_iter().for_each(|loss| disk.lose(loss));
            self.disks.insert(disk.node_name().to_owned(), disk);
        }
        // One with driver=throttle may be in another group.
        self.limit_disks();
        // Then the old ones are closed, unless they hang.
        drop(gone);
        let _ = left_behind.recv_timeout(PATIENCE);
        Ok(pause)
    }

    /// What is open.
    #[cfg(test)]
    pub(crate) const fn disks_by_name(&self) -> &std::collections::BTreeMap<String, Arc<egret_disk::Disk>> {
        &self.disks
    }

    /// Opens the images once more whose options `changed` changes, and of the `named` nodes those that are not open as they are
    /// to be, have lost writes, or have an export wait because they failed: who names them knows that. Who names a server's
    /// wants another connection. Of others nobody has said anything, however they are open.
    fn reopened(&self, changed: &Config, named: &[String]) -> Result<Vec<DiskSwap>, StartError> {
        let mut swaps = Vec::new();
        for (name, old) in &self.disks {
            let Some(disk) = changed.disk(name) else { continue };
            let options = self.wanted_options(changed, name, &disk);
            let is_stopped = |(id, export): (&String, &Export)| {
                let status = export.errors().status();
                status != IoStatus::Ok && changed.exports.iter().any(|export| export.id == *id && export.has_node(name))
            };
            let has_failed = old.has_lost_writes() || old.is_lost() || self.exports.iter().any(is_stopped);
            let connects = matches!(&options.driver, DiskDriver::Remote(disk) if disk.kind() == RemoteKind::Nbd);
            let is_named = lies_over(&changed.blockdevs, name, named);
            let is_otherwise = options != *old.options() && (is_named || self.config.disk(name) != changed.disk(name));
            if is_otherwise || is_named && (has_failed || connects) {
                swaps.push(DiskSwap { old: Arc::clone(old), new: self.open_image(&options, Some(old))? });
            }
        }
        Ok(swaps)
    }

    /// Those of the `named` nodes that are to be open and are not: their images were away when that was tried, say.
    fn closed(&self, changed: &Config, named: &[String]) -> BTreeSet<String> {
        let is_closed = |name: &&str| !self.disks.contains_key(*name) && lies_over(&changed.blockdevs, name, named);
        self.wanted_nodes().into_iter().filter(is_closed).map(str::to_owned).collect()
    }

    /// Opens the images of nodes that are not open.
    fn opened(&self, changed: &Config, closed: &BTreeSet<String>) -> Result<Vec<Arc<Disk>>, StartError> {
        let closed = closed.iter().filter_map(|name| Some((name.as_str(), changed.disk(name)?)));
        let open = |(name, disk): (&str, _)| self.open_image(&self.wanted_options(changed, name, &disk), None);
        closed.map(open).collect()
    }

    /// The exports that use the disks.
    fn users(&self, swaps: &[DiskSwap]) -> Result<Vec<&Export>, ChangeError> {
        // A unit that was taken away has requests in flight on a disk that no export has any more.
        let mut nodes = swaps.iter().map(|swap| swap.old.node_name());
        if let Some(leaving) = nodes.find_map(|node| self.teardowns.export_of(node)) {
            return Err(ChangeError::ShuttingDown(leaving.clone()));
        }
        let uses = |export: &&schema::Export| swaps.iter().any(|swap| export.has_node(swap.old.node_name()));
        let users = self.config.exports.iter().filter(uses);
        users.map(|user| self.exports.get(&user.id).ok_or_else(|| ChangeError::ShuttingDown(user.id.clone()))).collect()
    }
}

/// Has what was written through the disk before made stable, on a thread of its own, which drops `gone` at its end. Until
/// then, and where there is no such thread, whoever flushes the disk waits for that.
fn let_go_of_predecessor(disk: Arc<Disk>, gone: Sender<Never>) {
    let bounds = Bounds::of_this_thread();
    let name = disk.node_name().to_owned();
    let thread = move || {
        bounds.narrow(ThreadKind::Control);
        if let Err(e) = disk.let_go_of_predecessor() {
            tracing::error!(
                "blockdev '{}': the last flush before it was reopened failed, so none succeeds before it is reopened once \
                 more: {e}",
                disk.node_name()
            );
        }
        drop(gone);
    };
    if let Err(e) = std::thread::Builder::new().name("egret-reopened".to_owned()).stack_size(256 << 10).spawn(thread) {
        tracing::warn!("blockdev '{name}': no thread to close what it was before: {e}");
    }
}

/// Whether the node of this name is one of `named`, or lies over one.
fn lies_over(tops: &[Blockdev], name: &str, named: &[String]) -> bool {
    let Some(mut node) = tops.iter().flat_map(Blockdev::layers).find(|node| node.name() == name) else { return false };
    loop {
        if named.iter().any(|name| name == node.name()) {
            return true;
        }
        match node.driver.child() {
            Some((_, Child::Inline(child))) => node = child,
            Some((_, Child::Node(below))) => return lies_over(tops, below, named),
            None => return false,
        }
    }
}

/// The node of this name, at the top or inside another.
fn node_mut<'a>(blockdev: &'a mut Blockdev, name: &str) -> Option<&'a mut Blockdev> {
    if blockdev.name() == name {
        return Some(blockdev);
    }
    match blockdev.driver.child_mut()? {
        (_, Child::Inline(child)) => node_mut(child, name),
        (_, Child::Node(_)) => None,
    }
}

/// Puts other settings in the place of a node's, which stays the node that it is.
fn replace(old: &mut Blockdev, mut new: Blockdev) -> Result<(), ChangeError> {
    let keeps = |same: bool, option: &'static str| if same { Ok(()) } else { Err(ChangeError::FixedOption(option)) };
    keeps(old.driver.word() == new.driver.word(), "driver")?;
    match (&mut old.driver, &mut new.driver) {
        (Driver::File(old), Driver::File(new)) | (Driver::HostDevice(old), Driver::HostDevice(new)) => {
            keeps(old.filename == new.filename, "filename")?;
        }
        (Driver::Rbd(old), Driver::Rbd(new)) => {
            keeps(old.spec() == new.spec(), "image")?;
            // Another cluster may have an image of this name, and one that is encrypted is another without its key.
            keeps(old.conf == new.conf, "conf")?;
            keeps(old.user == new.user, "user")?;
            keeps(old.key_secret == new.key_secret, "key-secret")?;
            keeps(old.auth_client_required == new.auth_client_required, "auth-client-required")?;
            keeps(old.server == new.server, "server")?;
            keeps(old.encrypt == new.encrypt, "encrypt")?;
            keeps(old.settings == new.settings, "settings")?;
        }
        (Driver::NullCo(old) | Driver::NullAio(old), Driver::NullCo(new) | Driver::NullAio(new)) => {
            keeps(old.size == new.size, "size")?;
        }
        (Driver::Nbd(old), Driver::Nbd(new)) => keeps(old.place().ok() == new.place().ok(), "server")?,
        _ => {}
    }
    if let (Some((key, old)), Some((_, new))) = (old.driver.child_mut(), new.driver.child_mut()) {
        match (&mut *old, &mut *new) {
            (Child::Inline(old), Child::Inline(new)) => {
                keeps(old.node_name == new.node_name, "node-name")?;
                replace(old, (**new).clone())?;
                new.clone_from(old);
            }
            // By its name, it stays as it is.
            (Child::Inline(child), Child::Node(name)) => {
                keeps(child.node_name.as_ref() == Some(name), key)?;
                new.clone_from(old);
            }
            _ => keeps(old == new, key)?,
        }
    }
    *old = new;
    Ok(())
}
