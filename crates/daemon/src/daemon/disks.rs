//! Images: which are open, how they are opened, and how they grow.
//!
//! Open are those that are exported, and those that no other blockdev lies over: a blockdev below another is opened
//! with that one. An image is open for writing while an export writes, or always where `auto-read-only=off` asks for
//! that, and locked while it is exported, or while its exports' rings run: as in QEMU, a blockdev that nobody uses keeps
//! nobody else from its image, another blockdev of this daemon's among them.
//!
//! A change is about the blockdevs that it names, and those that lie over or below one that it adds or removes. Their images
//! are opened as they are to be now; the others stay as they are, for one that does not answer is nobody else's matter.

use std::path::PathBuf;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use egret_disk::{DebugRules, Disk, Driver, InjectError, Locking, Options, RemoteDisk, SetState};
use egret_event_loop::Nanos;
use egret_nbd::{Address, Encryption, NbdDisk, Target};
use egret_rbd::RbdDisk;
use egret_vocabulary::Config;
use egret_vocabulary::disk::{self, Bottom, Settings};
use egret_vocabulary::schema::{self, Blockdev, Image, Nbd, NbdEndpoint, Null, Object as _, Secret};

use rustix::io::Errno;

use super::calls::{Settling, Unanswered};
use super::io_threads::batch;
use super::{ChangeError, Credentials, Daemon, FdSetError, StartError, remote};

/// An image that was closed before what was written to it had been made stable, because it did not answer.
pub(super) struct Unsettled {
    /// The blockdev that has it.
    image: String,
    path: PathBuf,
    settling: Settling,
}

impl Daemon {
    /// Adds a blockdev and opens its image.
    ///
    /// # Errors
    /// Its name is taken, it leads nowhere, or its image cannot be opened.
    pub fn add_blockdev(&mut self, object: Blockdev) -> Result<(), ChangeError> {
        let known = self.config.node_names();
        if object.name().is_empty() {
            return Err(ChangeError::NamelessNode);
        }
        if let Some(taken) = object.layers().map(Blockdev::name).find(|name| known.contains(name)) {
            return Err(ChangeError::DuplicateNode(taken.to_owned()));
        }
        if let Some(child) = object.child_name().filter(|child| !known.contains(child)) {
            return Err(ChangeError::NoDevice(child.to_owned(), child.to_owned()));
        }
        let about = with_below(&object);
        self.config.add_blockdev(object)?;
        if let Err(e) = self.reconcile_disks(&about) {
            self.config.blockdevs.pop();
            self.reconcile_disks_or_log(&about);
            return Err(e.into());
        }
        Ok(())
    }

    /// Removes a blockdev and closes its image.
    ///
    /// # Errors
    /// There is none of this name, it is in use, or it does not answer.
    pub fn remove_blockdev(&mut self, node_name: &str) -> Result<(), ChangeError> {
        let name = || node_name.to_owned();
        if !self.config.node_names().contains(&node_name) {
            return Err(ChangeError::NoNode(name()));
        }
        // By an export, or by requests for a unit that was taken away.
        let is_exported = |node: &str| self.config.exports.iter().any(|export| export.has_node(node));
        let is_used = |node: &str| is_exported(node) || self.teardowns.export_of(node).is_some();
        if is_used(node_name) {
            return Err(ChangeError::NodeInUse(name()));
        }
        let below: Vec<_> = self.config.blockdevs.iter().filter_map(Blockdev::child_name).collect();
        if below.contains(&node_name) {
            return Err(ChangeError::NodeBelow(name()));
        }
        let Some(at) = self.config.blockdevs.iter().position(|blockdev| blockdev.name() == node_name) else {
            return Err(ChangeError::NodeInside(name()));
        };
        // What is written inside it may be exported, or lie below another, by a name of its own.
        for part in self.config.blockdevs[at].layers().map(Blockdev::name) {
            if is_used(part) {
                return Err(ChangeError::NodeInUse(part.to_owned()));
            }
            if below.contains(&part) {
                return Err(ChangeError::NodeBelow(part.to_owned()));
            }
        }
        if let Some(disk) = self.disks.get(node_name) {
            self.calls.make_stable(node_name, disk)?;
            // What it lies over stays, perhaps.
            self.losses.extend(disk.loss().map(|loss| (self.image_of(node_name), loss)));
            self.disks.remove(node_name);
        }
        let about = with_below(&self.config.blockdevs.remove(at));
        let left = self.config.node_names();
        self.throttle_groups.retain(|name, _| left.contains(&name.as_str()));
        self.units.retain(|name, _| left.contains(&name.as_str()));
        self.reconcile_disks_or_log(&about);
        Ok(())
    }

    /// Closes the images that the configuration does not want open any more, and opens those of the nodes that a change is
    /// about as it wants them.
    ///
    /// On an error some images may be closed that should be open: the caller takes back its change, and calls
    /// [`reconcile_disks_or_log`](Self::reconcile_disks_or_log).
    pub(super) fn reconcile_disks(&mut self, about: &[String]) -> Result<(), StartError> {
        self.close_unwanted_disks();
        about.iter().try_for_each(|name| self.open_as_wanted(name))
    }

    /// As [`reconcile_disks`](Self::reconcile_disks), where nobody is left who could be told of an error: after a change
    /// that was taken back, and after a removal.
    pub(super) fn reconcile_disks_or_log(&mut self, about: &[String]) {
        self.close_unwanted_disks();
        for name in about {
            if let Err(e) = self.open_as_wanted(name) {
                tracing::error!("a disk that was open cannot be opened as it should be now: {e}");
            }
        }
    }

    /// The nodes that are to be open: those that are exported, and those that no other lies over.
    pub(super) fn wanted_nodes(&self) -> Vec<&str> {
        let config = &self.config;
        let below: Vec<_> = config.blockdevs.iter().filter_map(Blockdev::child_name).collect();
        let tops = config.blockdevs.iter().filter_map(|blockdev| blockdev.node_name.as_deref());
        let exported = config.exports.iter().flat_map(schema::Export::node_names).map(|(_, node)| node);
        exported.chain(tops.filter(|name| !below.contains(name))).collect()
    }

    fn close_unwanted_disks(&mut self) {
        let wanted: Vec<String> = self.wanted_nodes().into_iter().map(str::to_owned).collect();
        let known = self.config.node_names();
        let stays = |name: &String| {
            let is_unwritten = self.unwritten.contains_key(name) && known.contains(&name.as_str());
            wanted.contains(name) || self.teardowns.export_of(name).is_some() || is_unwritten
        };
        let unwanted: Vec<_> = self.disks.keys().filter(|name| !stays(name)).cloned().collect();
        for name in unwanted {
            let Some(disk) = self.disks.remove(&name) else { continue };
            let (image, settling) = (self.image_of(&name), Settling::default());
            if let Err(e) = self.calls.settle(&name, &disk, &settling) {
                tracing::error!("{e}");
                match e {
                    // One that does not answer is closed by who waits for it.
                    StartError::Unanswered(_, Unanswered::Hangs { path, .. }) => {
                        self.unsettled.push(Unsettled { image: image.clone(), path, settling });
                    }
                    // Nobody has made it stable: another change closes it, unless its name may be another image's by then.
                    _ if known.contains(&name.as_str()) => {
                        self.disks.insert(name, disk);
                        continue;
                    }
                    _ => {}
                }
            }
            // Another has been laid over it, which is to be opened.
            self.losses.extend(disk.loss().map(|loss| (image, loss)));
        }
        let known = self.config.node_names();
        self.losses.retain(|name, _| known.contains(&name.as_str()));
        self.unsettled.retain(|of| known.contains(&of.image.as_str()));
        let disks = &self.disks;
        self.held.retain(|name, _| disks.contains_key(name));
        self.unwritten.retain(|name, _| disks.contains_key(name));
        self.unlocked.retain(|name| disks.contains_key(name));
    }

    /// Opens an image, or opens it otherwise, if it is to be open and is not as it is to be. One that is open and cannot be had
    /// otherwise stays open, without locks.
    fn open_as_wanted(&mut self, name: &str) -> Result<(), StartError> {
        let config = &self.config;
        let Some(disk) = config.disk(name).filter(|_| self.wanted_nodes().contains(&name)) else { return Ok(()) };
        let wanted = self.wanted_options(config, name, &disk);
        let Some(disk) = self.disks.get(name) else {
            self.settled(name)?;
            let opened = self.open_image(&wanted, None);
            return self.have_open(name, opened);
        };
        let of = |options: &Options| (options.read_only, options.locking, options.allow_inactive);
        if of(disk.options()) == of(&wanted) && !self.unlocked.contains(name) {
            return Ok(());
        }
        let written = config.exports.iter().find(|export| export.writable && export.has_node(name));
        let reads = |export: &&schema::Export| !export.writable && export.has_node(name);
        let serves = |id: &&String| config.exports.iter().filter(reads).any(|export| export.id == **id);
        let server = self.exports.keys().find(serves).or_else(|| self.teardowns.export_of(name));
        match (written, server) {
            (Some(writer), Some(reader)) => {
                let (export, node, reader) = (writer.id.clone(), name.to_owned(), reader.clone());
                return Err(StartError::OpenForReading { export, node, reader });
            }
            // Who reads may go on with what was opened for another that wrote.
            (None, Some(_)) => return Ok(()),
            (_, None) if self.unwritten.contains_key(name) => return Err(StartError::Unwritten(name.to_owned())),
            (_, None) => self.calls.make_stable(name, disk)?,
        }
        self.open_otherwise(name, &wanted)
    }

    /// Has another disk in the place of one that nobody uses and that is stable.
    fn open_otherwise(&mut self, name: &str, wanted: &Options) -> Result<(), StartError> {
        self.held.remove(name);
        let Some(old) = self.disks.remove(name) else { return Ok(()) };
        let loss = old.loss();
        let opened = match &old.options().driver {
            // The other side may take one client at a time, and a lock of this one's is in the way of the next.
            Driver::Remote(_) => {
                drop(old);
                self.open_image(wanted, None)
            }
            Driver::File { .. } | Driver::HostDevice { .. } | Driver::Null { .. } => {
                // Its locks would be in the way, too; and nobody is to be kept from an image for ever that nobody uses.
                if old.options().locking != Locking::Off {
                    old.leave_locks();
                    self.unlocked.insert(name.to_owned());
                }
                match self.open_image(wanted, None) {
                    // Of a set with one descriptor, that one.
                    Err(StartError::FdSet(_, FdSetError::InUse(_))) => {
                        drop(old);
                        self.open_image(wanted, None)
                    }
                    Err(e) => {
                        self.disks.insert(name.to_owned(), old);
                        return Err(e);
                    }
                    opened => opened,
                }
            }
        };
        self.unlocked.remove(name);
        // This was no reopening that anybody has asked for, so it lifts nothing.
        self.losses.extend(loss.map(|loss| (self.image_of(name), loss)));
        self.have_open(name, opened)
    }

    /// Finds out what an image has lost that is to be opened, and was closed before that could be known.
    pub(super) fn settled(&mut self, name: &str) -> Result<(), StartError> {
        let image = self.image_of(name);
        for Unsettled { path, settling, .. } in self.unsettled.iter().filter(|of| of.image == image) {
            let Poll::Ready(loss) = settling.loss() else {
                return Err(StartError::Unanswered(name.to_owned(), Unanswered::Unsettled(path.clone())));
            };
            self.losses.extend(loss.map(|loss| (image.clone(), loss)));
        }
        self.unsettled.retain(|of| of.image != image);
        Ok(())
    }

    /// Has a disk open that was just opened, if it could be, which has lost what its image had lost before.
    fn have_open(&mut self, name: &str, opened: Result<Arc<Disk>, StartError>) -> Result<(), StartError> {
        let disk = opened?;
        self.losses.remove(&self.image_of(name)).into_iter().for_each(|loss| disk.lose(loss));
        self.disks.insert(name.to_owned(), disk);
        Ok(())
    }

    /// The node that has the image of a node: the lowest with a name of those that it lies over, or itself.
    pub(super) fn image_of(&self, name: &str) -> String {
        let Some(blockdev) = self.config.layers().find(|blockdev| blockdev.name() == name) else {
            return name.to_owned();
        };
        match blockdev.child_name() {
            Some(below) => self.image_of(below),
            None => {
                let named = blockdev.layers().map(Blockdev::name).filter(|name| !name.is_empty());
                named.last().unwrap_or(name).to_owned()
            }
        }
    }

    /// The disk of a blockdev that an export serves.
    pub(super) fn open_disk_of(&self, name: &str) -> Result<Arc<Disk>, StartError> {
        self.disks.get(name).cloned().ok_or_else(|| StartError::NotOpen(name.to_owned()))
    }

    /// How an image is to be open: as its exports in `config` want it.
    pub(super) fn wanted_options(&self, config: &Config, name: &str, disk: &disk::Disk<'_>) -> Options {
        let is_written = || config.exports.iter().any(|export| export.writable && export.has_node(name));
        let (written, locks) = match self.disks.get(name).filter(|_| self.is_kept(config, name)) {
            Some(kept) => (!kept.read_only(), Locks::Active),
            None => (is_written(), locks(config, name)),
        };
        options(name, disk, written, locks, &config.secrets, &self.credentials)
    }

    /// A disk that was just opened, with its node's limits, and with the log that its failures are noted in.
    pub(super) fn connected(&self, name: &str, disk: Disk) -> Arc<Disk> {
        disk.set_throttle_group(self.group_of(name));
        disk.log_failures(self.failures.log_of(name));
        disk.watch_size(self.failures.bell());
        Arc::new(disk)
    }

    /// The disk of a node that is used by its own name: one that `below` is not said of, because another lies over it.
    pub(super) fn disk_by_name(
        &self,
        name: &str,
        below: impl FnOnce(String) -> ChangeError,
    ) -> Result<&Arc<Disk>, ChangeError> {
        let is_wanted = || self.wanted_nodes().contains(&name);
        self.disks.get(name).ok_or_else(|| match is_wanted() {
            true => StartError::NotOpen(name.to_owned()).into(),
            false => below(name.to_owned()),
        })
    }

    /// Makes an image longer, or looks again how long a device is, and tells the clients of its exports. Returns the
    /// exports whose client could not be told.
    ///
    /// # Errors
    /// There is no such blockdev, or it cannot have that size.
    pub fn resize(&mut self, node_name: &str, bytes: u64) -> Result<Vec<String>, ChangeError> {
        let failed = |why: String| Err(ChangeError::Resize(node_name.to_owned(), why));
        if !self.config.node_names().contains(&node_name) {
            return Err(ChangeError::NoDevice(String::new(), node_name.to_owned()));
        }
        let disk = self.disk_by_name(node_name, ChangeError::NodeBelow)?;
        let is_file = match &disk.options().driver {
            Driver::File { .. } => true,
            Driver::HostDevice { .. } => false,
            Driver::Remote(remote) => remote.can_resize(),
            Driver::Null { .. } => return failed("a null disk keeps the size it was made with".to_owned()),
        };
        let exports = self.config.exports.iter().filter(|export| export.has_node(node_name));
        if is_file {
            let size = disk.size();
            if bytes < size {
                return failed(format!("it has {size} bytes, and shrinking would lose data; got {bytes}"));
            }
            let block = exports.clone().map(|export| export.logical_block_size()).max().unwrap_or(512);
            let block = block.max(disk.offset_alignment());
            if !bytes.is_multiple_of(block.into()) {
                return failed(format!("size must be a multiple of {block}, got {bytes}"));
            }
            if disk.read_only() && bytes > size {
                return failed(
                    "it is open for reading alone, and cannot grow; export it with writable=on first, or give the blockdev \
                     auto-read-only=off, and no read-only=on"
                        .to_owned(),
                );
            }
        }
        // One that nobody exports is open without locks, and others may have it.
        let unlocked = self.config.disk(node_name).and_then(|wanted| match wanted.bottom {
            Bottom::File(image) => Some(image.locking)
                .filter(|_| disk.options().locking == Locking::Off || self.unlocked.contains(node_name)),
            Bottom::HostDevice(_) | Bottom::Null(_) | Bottom::Nbd(_) | Bottom::Rbd(_) => None,
        });
        let of = Arc::clone(disk);
        let sized = move || {
            if !is_file {
                return of.refresh_size().map_err(|e| e.to_string());
            }
            // One that is inactive here may be locked by whoever has it active.
            let _active = of.activate().map_err(|e| e.cause.to_string())?;
            let _locked =
                unlocked.map(|locking| of.lock_for_now(locking)).transpose().map_err(|e| e.cause.to_string())?;
            of.grow(bytes).map_err(|e| e.to_string())
        };
        let size = match self.calls.run(&disk.options().driver, "it could not be resized", sized) {
            Ok(Ok(size)) => size,
            Ok(Err(e)) => return failed(format!("cannot be resized: {e}")),
            Err(why) => return failed(why.to_string()),
        };
        let running = exports.filter_map(|object| Some((object, self.exports.get(&object.id)?)));
        // Who connects later reads the size that there is then.
        let untold =
            running.filter(|(object, export)| !announce_size(object, export, node_name, size) && export.is_in_use());
        let untold = untold.map(|(object, _)| object.id.clone()).collect();
        if !is_file && size < bytes {
            return failed(format!("the device has {size} bytes, and only its owner can make it longer; got {bytes}"));
        }
        Ok(untold)
    }
}

impl Daemon {
    /// Tells clients of disks whose size somebody else has changed.
    pub fn announce_sizes(&self) {
        for (name, disk) in &self.disks {
            let Some(size) = disk.take_new_size() else { continue };
            let exports = self.config.exports.iter().filter(|export| export.has_node(name));
            for (object, export) in exports.filter_map(|object| Some((object, self.exports.get(&object.id)?))) {
                if !announce_size(object, export, name, size) && export.is_in_use() {
                    tracing::warn!("export '{}': its client cannot be told that '{name}' has {size} bytes", object.id);
                }
            }
        }
    }
}

/// The nodes that a blockdev comes with, and the one that it lies over.
fn with_below(blockdev: &Blockdev) -> Vec<String> {
    blockdev.layers().map(Blockdev::name).chain(blockdev.child_name()).map(str::to_owned).collect()
}

/// Tells the client of an export that the disk has another size; says whether it could be told.
fn announce_size(object: &schema::Export, export: &egret_export::Export, node_name: &str, bytes: u64) -> bool {
    match object.device {
        schema::Device::VhostUserBlk(_) => return export.resize(bytes),
        // NBD tells the size once, when a client comes.
        schema::Device::Nbd(_) => return false,
        schema::Device::VhostUserScsi(_) => {}
    }
    let lun = object.luns().iter().find(|lun| lun.node_name == node_name);
    lun.is_some_and(|lun| export.resize_lun(super::scsi::address_of(lun), bytes).is_ok())
}

/// When an image is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Locks {
    /// Nobody uses it.
    Never,
    /// While it is open.
    Open,
    /// While rings of its exports run.
    Active,
}

/// When the image of a blockdev is locked, as its exports say, which all say the same.
fn locks(config: &Config, name: &str) -> Locks {
    match config.exports.iter().find(|export| export.has_node(name)) {
        None => Locks::Never,
        Some(export) if export.allow_inactive() => Locks::Active,
        Some(_) => Locks::Open,
    }
}

/// How the image at the bottom of `disk` is opened: with `auto-read-only` for writing only if an export writes.
///
/// It takes everything apart, so that an option that nobody reads does not compile.
fn options(
    name: &str,
    disk: &disk::Disk<'_>,
    written: bool,
    locks: Locks,
    secrets: &[Secret],
    credentials: &Credentials,
) -> Options {
    // Its group is found by its name, for it may be in another while it is open.
    let disk::Disk { bottom, settings, ref errors, throttle_groups: _ } = *disk;
    let Settings { direct, no_flush, read_only, auto_read_only, discard, detect_zeroes } = settings;
    let read_only = read_only || (auto_read_only && !written);
    let locking_of = |locking| if locks == Locks::Never { Locking::Off } else { locking };
    let driver = match bottom {
        Bottom::Rbd(rbd) => {
            let locking = locking_of(rbd.locking);
            Driver::Remote(RemoteDisk::new(RbdDisk::new(remote::rbd(name, rbd, read_only, locking, secrets))))
        }
        Bottom::File(image) => Driver::File { filename: image.filename.clone().into() },
        Bottom::HostDevice(image) => Driver::HostDevice { filename: image.filename.clone().into() },
        Bottom::Null(&Null { size, latency_ns, read_zeroes }) => {
            Driver::Null { size, latency: Nanos(latency_ns), read_zeroes }
        }
        Bottom::Nbd(nbd) => {
            Driver::Remote(RemoteDisk::new(NbdDisk::new(nbd_target(name, nbd, read_only, credentials))))
        }
    };
    let (aio, aio_max_batch, locking, drop_cache) = match bottom {
        Bottom::File(image) | Bottom::HostDevice(image) => {
            let Image { filename: _, aio, aio_max_batch, locking, drop_cache } = *image;
            (aio, batch(aio_max_batch), locking_of(locking), drop_cache)
        }
        Bottom::Rbd(rbd) => (Default::default(), 0, locking_of(rbd.locking), true),
        Bottom::Null(_) | Bottom::Nbd(_) => Default::default(),
    };
    Options {
        node_name: name.to_owned(),
        driver,
        aio,
        aio_max_batch,
        direct,
        no_flush,
        read_only,
        discard,
        detect_zeroes,
        locking,
        allow_inactive: locks == Locks::Active,
        drop_cache,
        blkdebug: rules(errors),
    }
}

/// Where the server of an NBD disk is, and how it is spoken to.
fn nbd_target(name: &str, nbd: &Nbd, read_only: bool, credentials: &Credentials) -> Target {
    // Server, export and filename are in its place, of which the name is that certificates are for.
    let Nbd { server: _, export: _, filename: _, ref tls_creds, tls_hostname: _, reconnect_delay, open_timeout } = *nbd;
    let encryption = tls_creds.as_ref().map(|id| {
        let credentials = credentials.client(id).unwrap_or_else(|| unreachable!("references were checked")).clone();
        Encryption { credentials, name: nbd.certified_name() }
    });
    let place = nbd.place().unwrap_or_else(|_| unreachable!("a blockdev was checked when it was read"));
    let address = match place.server {
        NbdEndpoint::Unix(path) => Address::Unix(path.into()),
        NbdEndpoint::Inet(host, port) => Address::Inet { host, port },
    };
    Target {
        node_name: name.to_owned(),
        uri: nbd.uri(),
        address,
        encryption,
        export: place.export,
        read_only,
        reconnect_delay: Duration::from_secs(reconnect_delay.into()),
        open_timeout: Duration::from_secs(open_timeout.into()),
    }
}

/// What the layers of a disk have go wrong. As in QEMU, the state 0 is any.
fn rules(layers: &[(&[schema::InjectError], &[schema::SetState])]) -> DebugRules {
    let is_said = |state: &u32| *state != 0;
    let inject_error = |error: &schema::InjectError| {
        let schema::InjectError { event, state, iotype, errno, sector, once } = *error;
        let errno = Errno::from_raw_os_error(errno.into());
        InjectError { event, state: state.filter(is_said), iotype, errno, sector, once }
    };
    let set_state = |change: &schema::SetState| {
        let schema::SetState { event, state, new_state } = *change;
        SetState { event, state: state.filter(is_said), new_state }
    };
    DebugRules {
        inject_error: layers.iter().flat_map(|(errors, _)| errors.iter().map(inject_error)).collect(),
        set_state: layers.iter().flat_map(|(_, changes)| changes.iter().map(set_state)).collect(),
    }
}

/// What messages call a disk: its node, and its file if it has one.
pub(super) fn described(disk: &Disk) -> String {
    let node = disk.node_name();
    match &disk.options().driver {
        Driver::File { filename } | Driver::HostDevice { filename } => {
            format!("blockdev '{node}' ('{}')", filename.display())
        }
        Driver::Remote(remote) => format!("blockdev '{node}' ('{}')", remote.name()),
        Driver::Null { .. } => format!("blockdev '{node}'"),
    }
}

#[cfg(test)]
mod tests {
    use egret_vocabulary::keyval;
    use egret_vocabulary::schema::{
        InjectError as InjectErrorShape, Object as _, SetState as SetStateShape, Spelling, ValueType,
    };
    use serde_json::json;

    use super::*;

    fn opened(text: &str) -> Options {
        let (value, spelling) = keyval::read(text, "driver").unwrap();
        let blockdev = Blockdev::from_value(value, spelling).unwrap_or_else(|error| panic!("{text}: {error}"));
        let secret =
            |id: &str, data: &str| Secret::from_value(json!({"id": id, "data": data}), Spelling::Typed).unwrap();
        let secrets = vec![secret("s", "one"), secret("t", "two")];
        let mut config = Config::empty();
        (config.secrets, config.blockdevs) = (secrets, vec![blockdev]);
        let config = config.checked().unwrap_or_else(|error| panic!("{text}: {error}"));
        options("d", &config.disk("d").unwrap(), false, Locks::Open, &config.secrets, &credentials())
    }

    /// What needs no files: a client that believes everybody.
    fn credentials() -> Credentials {
        let objects = ["t", "u"].map(|id| json!({"id": id, "dir": "/nowhere", "verify-peer": false}));
        let objects = objects.map(|object| schema::TlsCreds::from_value(object, Spelling::Typed).unwrap());
        let mut config = Config::empty();
        config.tls_creds = objects.into();
        Credentials::read(&config).unwrap()
    }

    /// Keys, each with a value beside its default, and with what it needs to have an effect.
    const OTHERWISE: [(&str, &str, &str); 28] = [
        ("pool", "q", ""),
        ("namespace", "n", ""),
        ("image", "j", ""),
        ("conf", "/c", ""),
        ("snapshot", "s", ""),
        ("user", "u", ""),
        ("key-secret", "s", ""),
        ("auth-client-required", ".0=none", ""),
        ("server", ".0.host=h,server.0.port=1", ""),
        ("encrypt.format", "luks", ",encrypt.format=luks2,encrypt.key-secret=s"),
        ("encrypt.key-secret", "t", ",encrypt.format=luks2,encrypt.key-secret=s"),
        ("connect-timeout", "7", ""),
        ("images-per-cluster-handle", "7", ""),
        ("settings", ".rbd_cache=true", ""),
        ("filename", "/y", ""),
        ("aio", "io_uring", ""),
        ("aio-max-batch", "7", ",aio=native,cache.direct=on"),
        ("locking", "off", ""),
        ("drop-cache", "off", ""),
        ("size", "1M", ""),
        ("latency-ns", "5", ""),
        ("read-zeroes", "on", ""),
        ("cache.direct", "on", ""),
        ("cache.no-flush", "on", ""),
        ("read-only", "on", ",auto-read-only=off"),
        ("auto-read-only", "off", ""),
        ("discard", "unmap", ""),
        ("detect-zeroes", "on", ""),
    ];

    #[test]
    fn each_key_of_a_blockdev_changes_how_its_image_is_opened() {
        for (driver, least) in [
            ("file", "file,node-name=d,filename=/x"),
            ("host_device", "host_device,node-name=d,filename=/x"),
            ("rbd", "rbd,node-name=d,pool=p,image=i"),
            ("null-co", "null-co,node-name=d"),
            ("null-aio", "null-aio,node-name=d"),
        ] {
            let keys = Blockdev::SHAPE.keys_of(Some(driver)).filter(|key| key.name != Blockdev::NAME);
            let names = keys.flat_map(|key| match key.kind {
                ValueType::Object(inner) => inner.keys.iter().map(|of| format!("{}.{}", key.name, of.name)).collect(),
                _ => vec![key.name.to_owned()],
            });
            for name in names {
                let (_, value, with) = OTHERWISE.iter().find(|(key, ..)| *key == name).expect(&name);
                let text = format!("{least}{with}");
                let other = format!("{name}{}{value}", if value.starts_with('.') { "" } else { "=" });
                // What was said of the key before is taken back.
                let others = text.split(',').filter(|part| !part.starts_with(&format!("{name}=")));
                let changed = others.map(str::to_owned).chain([other]).collect::<Vec<_>>().join(",");
                assert_ne!(opened(&changed), opened(&text), "{driver}: {name}");
            }
        }
    }

    #[test]
    fn what_is_encrypted_is_encrypted_by_another_thread_unless_the_user_says_otherwise() {
        let settings = |more: &str| {
            let text = format!("rbd,node-name=d,pool=p,image=i{more}");
            let (value, spelling) = keyval::read(&text, "driver").unwrap();
            let blockdev = Blockdev::from_value(value, spelling).unwrap();
            let schema::Driver::Rbd(rbd) = &blockdev.driver else { panic!("it is rbd") };
            let all = remote::rbd("d", rbd, false, Locking::Off, &[]).cluster.settings;
            all.into_iter()
                .filter(|(name, _)| name == "rbd_non_blocking_aio")
                .map(|(_, value)| value)
                .collect::<Vec<_>>()
        };
        let encrypted = ",encrypt.format=luks2,encrypt.key-secret=s";
        assert_eq!(settings(""), [""; 0]);
        assert_eq!(settings(encrypted), ["true"]);
        let both = settings(&format!("{encrypted},settings.rbd_non_blocking_aio=false"));
        assert_eq!(both, ["true", "false"], "the last one counts");
    }

    #[test]
    fn each_key_of_an_nbd_disk_changes_how_its_server_is_spoken_to() {
        let credentials = credentials();
        let target = |keys: &str| {
            let (value, spelling) = keyval::read(&format!("nbd,node-name=d,{keys}"), "driver").unwrap();
            let blockdev = Blockdev::from_value(value, spelling).unwrap_or_else(|error| panic!("{keys}: {error}"));
            let schema::Driver::Nbd(nbd) = &blockdev.driver else { panic!("it is nbd") };
            nbd_target("d", nbd, false, &credentials)
        };
        let least = "server.type=unix,server.path=/x";
        for key in Nbd::KEYS {
            let (keys, others) = match key.name {
                "server" => ("server.type=inet,server.host=h,server.port=1".to_owned(), least),
                "filename" => ("filename=nbd://h:2".to_owned(), "filename=nbd://h:3"),
                "tls-creds" => (format!("{least},tls-creds=t"), least),
                "tls-hostname" => {
                    (format!("{least},tls-creds=t,tls-hostname=h"), "server.type=unix,server.path=/x,tls-creds=t")
                }
                name => (format!("{least},{name}=7"), least),
            };
            assert_ne!(target(&keys), target(others), "{}", key.name);
        }
        for (one, other) in [
            (least, "server.type=unix,server.path=/y"),
            ("filename=nbds://h,tls-creds=t", "filename=nbds://h,tls-creds=u"),
            ("server.type=inet,server.host=h,server.port=1", "server.type=inet,server.host=h,server.port=2"),
            ("server.type=inet,server.host=h,server.port=1", "server.type=inet,server.host=g,server.port=1"),
        ] {
            assert_ne!(target(one), target(other));
        }
        assert!(opened(&format!("nbd,node-name=d,{least},auto-read-only=off,cache.no-flush=on")).no_flush);
    }

    #[test]
    fn each_key_of_an_injected_error_and_of_a_state_changes_what_goes_wrong() {
        let least = "blkdebug,node-name=d,image.driver=null-co,inject-error.0.event=none,set-state.0.event=none,\
                     set-state.0.new_state=2";
        for (list, shape) in [("inject-error", InjectErrorShape::KEYS), ("set-state", SetStateShape::KEYS)] {
            for key in shape {
                let value = match (key.name, key.kind) {
                    ("event", _) => "flush_to_disk",
                    ("iotype", _) => "write",
                    (_, ValueType::Flag) => "on",
                    _ => "7",
                };
                let name = format!("{list}.0.{}", key.name);
                let others = least.split(',').filter(|part| !part.starts_with(&format!("{name}=")));
                let text = others.collect::<Vec<_>>().join(",");
                assert_ne!(opened(&format!("{text},{name}={value}")), opened(least), "{name}");
            }
        }
        assert_ne!(opened(&format!("{least},image.size=1M")), opened(least));
        for key in ["inject-error.0.state", "set-state.0.state"] {
            assert_eq!(opened(&format!("{least},{key}=0")), opened(least), "0 is any");
        }
    }
}
