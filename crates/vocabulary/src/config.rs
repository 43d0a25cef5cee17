//! A set of objects that fit together.

mod file;

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;

use crate::address::Address;
use crate::disk::{Disk, Settings};
use crate::nearest::hint;
use crate::schema::{
    Addr, Aio, Blockdev, Cache, Child, DetectZeroes, Device, Discard, Driver, Endpoint, Export, IoThread, NbdAddr,
    NbdServer, Object, ObjectError, Problem, Secret, Throttle, ThrottleGroup, TlsCreds, UnixAddr, default_memory_max,
};

pub use file::{ConfigFile, FileError, effective};

/// What a daemon is asked to be: objects whose names are unique, and whose references lead somewhere.
///
/// There is no way to have one that has not been [checked](Self::new).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Config {
    /// Keys and passphrases.
    pub secrets: Vec<Secret>,
    /// Certificates and keys for TLS.
    pub tls_creds: Vec<TlsCreds>,
    /// Limits that disks share.
    pub throttle_groups: Vec<ThrottleGroup>,
    /// Event loops.
    pub iothreads: Vec<IoThread>,
    /// Disks.
    pub blockdevs: Vec<Blockdev>,
    /// What is offered to virtual machines.
    pub exports: Vec<Export>,
    /// How much guest memory is mapped for all of them together at a time, at most, in bytes.
    pub memory_max: u64,
    /// Where the clients of exports over NBD connect, if there are to be some.
    pub nbd_server: Option<NbdServer>,
}

impl Config {
    /// Checks that the objects fit together. Their order does not matter.
    ///
    /// # Errors
    /// The first object that does not fit, and why: a name given twice or to nobody, an engine without what it needs,
    /// a writable export of a disk that is not, two exports at one address.
    pub fn new(iothreads: Vec<IoThread>, blockdevs: Vec<Blockdev>, exports: Vec<Export>) -> Result<Self, ObjectError> {
        Self { iothreads, blockdevs, exports, ..Self::empty() }.checked()
    }

    /// Itself, if it fits together.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn checked(self) -> Result<Self, ObjectError> {
        let config = self;
        // What `--object` makes shares one set of names, as in QEMU.
        let mut objects = BTreeMap::new();
        unique(&config.secrets, &mut objects)?;
        unique(&config.tls_creds, &mut objects)?;
        unique(&config.throttle_groups, &mut objects)?;
        unique(&config.iothreads, &mut objects)?;
        unique(&config.exports, &mut BTreeMap::new())?;
        config.check_blockdevs()?;
        if let Some(server) = &config.nbd_server {
            let error = |problem| ObjectError { subject: "nbd-server".to_owned(), problem };
            config.check_tls_creds(server.tls_creds.as_deref(), Endpoint::Server).map_err(error)?;
        }
        let nodes = config.nodes();
        for export in &config.exports {
            config.check_export(export, &nodes).map_err(|problem| export.error(problem))?;
        }
        config.check_addresses()?;
        Ok(config)
    }

    /// Itself, with what is in files of secrets read, so that nobody needs the files any more.
    ///
    /// # Errors
    /// A secret cannot be had.
    pub fn with_secrets_read(mut self) -> Result<Self, ObjectError> {
        self.secrets = self.secrets.into_iter().map(Secret::read).collect::<Result<_, _>>()?;
        Ok(self)
    }

    /// A configuration without objects.
    pub fn empty() -> Self {
        let (iothreads, blockdevs, exports) = Default::default();
        let (secrets, tls_creds, throttle_groups, nbd_server) = Default::default();
        let memory_max = default_memory_max();
        Self { secrets, tls_creds, throttle_groups, iothreads, blockdevs, exports, memory_max, nbd_server }
    }

    /// Checks that exports over NBD have a server.
    ///
    /// # Errors
    /// There is one, and no server.
    pub fn check_nbd_server(&self) -> Result<(), ObjectError> {
        let needs = |export: &&Export| matches!(export.device, Device::Nbd(_));
        match self.exports.iter().find(needs).filter(|_| self.nbd_server.is_none()) {
            Some(export) => {
                let line = "type=nbd needs --nbd-server, which says where clients connect";
                Err(export.error(Problem::Together(line.to_owned())))
            }
            None => Ok(()),
        }
    }

    /// What `--object` makes: the name of each, and what it is.
    pub fn objects(&self) -> impl Iterator<Item = (&str, &'static str)> {
        let iothreads = self.iothreads.iter().map(|object| (&*object.id, IoThread::NOUN));
        let throttle_groups = self.throttle_groups.iter().map(|object| (&*object.id, ThrottleGroup::NOUN));
        let secrets = self.secrets.iter().map(|object| (&*object.id, Secret::NOUN));
        let tls_creds = self.tls_creds.iter().map(|object| (&*object.id, TlsCreds::NOUN));
        iothreads.chain(throttle_groups).chain(secrets).chain(tls_creds)
    }

    /// Whether something that `--object` makes has this name: no two of them have the same.
    pub fn has_object(&self, id: &str) -> bool {
        self.objects().any(|(name, _)| name == id)
    }

    /// All blockdevs, with those that lie in others.
    pub fn layers(&self) -> impl Iterator<Item = &Blockdev> {
        self.blockdevs.iter().flat_map(Blockdev::layers)
    }

    /// Adds a blockdev.
    ///
    /// # Errors
    /// As [`new`](Self::new); everything stays as it was.
    pub fn add_blockdev(&mut self, object: Blockdev) -> Result<(), ObjectError> {
        self.blockdevs.push(object);
        self.check_blockdevs().inspect_err(|_| drop(self.blockdevs.pop()))
    }

    /// Adds an export.
    ///
    /// # Errors
    /// As [`new`](Self::new); everything stays as it was.
    pub fn add_export(&mut self, object: Export) -> Result<(), ObjectError> {
        if self.exports.iter().any(|other| other.id == object.id) {
            return Err(object.error(Problem::Duplicate(Export::NOUN)));
        }
        self.check_export(&object, &self.nodes()).map_err(|problem| object.error(problem))?;
        self.exports.push(object);
        self.check_addresses().inspect_err(|_| drop(self.exports.pop()))
    }

    /// Puts an export in the place of the one of its name.
    ///
    /// # Errors
    /// As [`new`](Self::new); everything stays as it was.
    pub fn change_export(&mut self, object: Export) -> Result<(), ObjectError> {
        self.check_export(&object, &self.nodes()).map_err(|problem| object.error(problem))?;
        self.put_export(object);
        Ok(())
    }

    /// As [`change_export`](Self::change_export), for one that is known to fit: what was there before, or less of it.
    pub fn put_export(&mut self, object: Export) {
        if let Some(export) = self.exports.iter_mut().find(|export| export.id == object.id) {
            *export = object;
        }
    }

    /// The names of blockdevs, inline ones too.
    pub fn node_names(&self) -> Vec<&str> {
        self.nodes().iter().map(|(blockdev, _)| blockdev.name()).filter(|name| !name.is_empty()).collect()
    }

    /// The disk of this name, with every layer's settings taken into account.
    pub fn disk(&self, node_name: &str) -> Option<Disk<'_>> {
        let nodes = self.nodes();
        let (blockdev, _) = nodes.iter().find(|(blockdev, _)| blockdev.name() == node_name)?;
        self.resolve(blockdev, &nodes)
    }

    /// The throttle group of each blockdev that is limited by the configuration, by the blockdev's name: its own, or that of one
    /// which it lies over.
    pub fn throttled(&self) -> BTreeMap<&str, &str> {
        // There are no groups, mostly.
        if self.throttle_groups.is_empty() {
            return BTreeMap::new();
        }
        let nodes = self.nodes().into_iter().filter(|(blockdev, _)| blockdev.node_name.is_some());
        let nodes: BTreeMap<_, _> = nodes.map(|node| (node.0.name(), node)).collect();
        let find = |name: &str| nodes.get(name).copied();
        let group = |blockdev| Disk::resolve(blockdev, find)?.throttle_groups.first().copied();
        nodes.iter().filter_map(|(&name, &(blockdev, _))| Some((name, group(blockdev)?))).collect()
    }

    /// What is allowed and probably not meant, a line each.
    pub fn warnings(&self) -> Vec<String> {
        let mut writers = BTreeMap::new();
        let writable = self.exports.iter().filter(|export| export.writable);
        let written = writable.flat_map(|export| export.node_names().map(move |(_, node)| (export, node)));
        let shared = written.filter_map(|(export, node)| {
            let first: &mut &Export = writers.entry(node).or_insert(export);
            (*first != export).then(|| {
                let (subject, other) = (export.subject(), &first.id);
                format!(
                    "{subject}: export '{other}' writes to blockdev '{node}' too; its guests must know of each other"
                )
            })
        });
        let cached = self.exports.iter().filter(|export| export.allow_inactive()).flat_map(|export| {
            let nodes = export.node_names().filter(|(_, node)| self.disk(node).is_some_and(|disk| disk.is_cached()));
            nodes.map(move |(_, node)| {
                format!(
                    "{}: allow-inactive=on, and blockdev '{node}' has cache.direct=off: two hosts agree on what is in \
                     the image for certain only with cache.direct=on",
                    export.subject()
                )
            })
        });
        shared.chain(cached).collect()
    }

    /// The same, with what is in force wherever something was left to a default.
    pub fn filled_in(&self) -> Self {
        let mut full = self.clone();
        full.throttle_groups.iter_mut().for_each(ThrottleGroup::fill_in);
        full.iothreads.iter_mut().for_each(IoThread::fill_in);
        for blockdev in &mut full.blockdevs {
            let layer = Settings::top(blockdev);
            blockdev.cache = Cache { direct: Some(layer.direct), no_flush: Some(layer.no_flush) };
            blockdev.read_only = Some(layer.read_only);
            blockdev.auto_read_only = Some(layer.auto_read_only);
            blockdev.discard = Some(layer.discard);
            blockdev.detect_zeroes = Some(layer.detect_zeroes);
        }
        full
    }

    /// Every blockdev, inline ones too, with the settings in force.
    fn nodes(&self) -> Vec<(&Blockdev, Settings)> {
        let mut nodes = Vec::new();
        for top in &self.blockdevs {
            let mut layer = Settings::top(top);
            let mut next = Some(top);
            while let Some(blockdev) = next {
                nodes.push((blockdev, layer));
                next = blockdev.inline_child();
                layer = next.map_or(layer, |child| layer.inline(child));
            }
        }
        nodes
    }

    fn resolve<'a>(&self, blockdev: &'a Blockdev, nodes: &[(&'a Blockdev, Settings)]) -> Option<Disk<'a>> {
        Disk::resolve(blockdev, |name| nodes.iter().find(|(blockdev, _)| blockdev.name() == name).copied())
    }

    fn check_blockdevs(&self) -> Result<(), ObjectError> {
        if let Some(nameless) = self.blockdevs.iter().find(|blockdev| blockdev.node_name.is_none()) {
            let subject = format!("blockdev {}", described(nameless));
            return Err(ObjectError { subject, problem: Problem::Missing { key: "node-name".to_owned() } });
        }
        let nodes = self.nodes();
        let named = nodes.iter().map(|(blockdev, _)| *blockdev).filter(|blockdev| blockdev.node_name.is_some());
        unique(named, &mut BTreeMap::new())?;
        for (blockdev, layer) in &nodes {
            check_layer(blockdev, *layer).map_err(|problem| match blockdev.node_name {
                Some(_) => blockdev.error(problem),
                None => ObjectError { subject: format!("blockdev {}", described(blockdev)), problem },
            })?;
            if let Driver::Rbd(rbd) = &blockdev.driver {
                let known = self.secrets.iter().map(|secret| secret.id.as_str());
                let missing = rbd.secrets().find_map(|(key, name)| reference(key, "secret", name, known.clone()).err());
                missing.map_or(Ok(()), |problem| Err(blockdev.error(problem)))?;
            }
            if let Driver::Nbd(nbd) = &blockdev.driver {
                let checked = self.check_tls_creds(nbd.tls_creds.as_deref(), Endpoint::Client);
                checked.map_err(|problem| blockdev.error(problem))?;
            }
            if let Driver::Throttle(Throttle { throttle_group, .. }) = &blockdev.driver {
                let known = self.throttle_groups.iter().map(|group| group.id.as_str());
                let found = reference("throttle-group", ThrottleGroup::NOUN, throttle_group, known);
                found.map_err(|problem| blockdev.error(problem))?;
            }
            if let Some((key, Child::Node(name))) = blockdev.driver.child() {
                let known = nodes.iter().map(|(blockdev, _)| blockdev.name()).filter(|name| !name.is_empty());
                reference(key, "blockdev", name, known).map_err(|problem| blockdev.error(problem))?;
            }
        }
        for (blockdev, _) in &nodes {
            let key = blockdev.driver.child().map_or("file", |(key, _)| key);
            let wrong = |what: &str| Err(blockdev.error(Problem::Together(format!("{key} leads {what}"))));
            match self.resolve(blockdev, &nodes) {
                None => return wrong("back to itself"),
                Some(disk) if disk.throttle_groups.len() > 1 => {
                    return wrong("to a second blockdev with driver=throttle: a disk is in one throttle-group");
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Checks that `name`, if one is given, is of credentials for that side.
    ///
    /// # Errors
    /// It is not.
    pub fn check_tls_creds(&self, name: Option<&str>, endpoint: Endpoint) -> Result<(), Problem> {
        let Some(name) = name else { return Ok(()) };
        reference("tls-creds", TlsCreds::NOUN, name, self.tls_creds.iter().map(|creds| creds.id.as_str()))?;
        match self.tls_creds.iter().find(|creds| creds.id == name).filter(|creds| creds.endpoint != endpoint) {
            Some(creds) => Err(Problem::Together(format!(
                "tls-creds: '{name}' has endpoint={}, and endpoint={endpoint} is needed",
                creds.endpoint
            ))),
            None => Ok(()),
        }
    }

    fn check_export(&self, export: &Export, nodes: &[(&Blockdev, Settings)]) -> Result<(), Problem> {
        let known = nodes.iter().map(|(blockdev, _)| blockdev.name()).filter(|name| !name.is_empty());
        for (key, node) in export.node_names() {
            reference(&key, "blockdev", node, known.clone())?;
        }
        for (key, name) in export.iothreads() {
            reference(key, "iothread", name, self.iothreads.iter().map(|iothread| iothread.id.as_str()))?;
        }
        for (_, node) in export.node_names() {
            let differs = |other: &&Export| other.has_node(node) && other.allow_inactive() != export.allow_inactive();
            if let Some(other) = self.exports.iter().find(differs).filter(|other| other.id != export.id) {
                let [ours, theirs] = [export, other].map(|export| if export.allow_inactive() { "on" } else { "off" });
                let (other, both) = (other.subject(), "of one blockdev have the same");
                return Err(Problem::Together(format!(
                    "allow-inactive={ours}, and {other} of blockdev '{node}' has {theirs}: all exports {both}"
                )));
            }
        }
        for (_, node) in export.node_names().filter(|_| export.writable) {
            let found = nodes.iter().find(|(blockdev, _)| blockdev.name() == node);
            let disk = found.and_then(|(blockdev, _)| self.resolve(blockdev, nodes));
            if disk.is_some_and(|disk| disk.settings.read_only) {
                return Err(Problem::Together(format!("writable=on, and blockdev '{node}' has read-only=on")));
            }
        }
        Ok(())
    }

    /// The UNIX sockets that are made for its objects: whose each is, and where.
    pub fn sockets(&self) -> impl Iterator<Item = (String, &Path)> {
        let server = self.nbd_server.iter().filter_map(|server| match &server.addr {
            NbdAddr::Unix(UnixAddr { path }) => Some(("nbd-server".to_owned(), path)),
            NbdAddr::Inet(_) => None,
        });
        let exports = self.exports.iter().filter_map(|export| match export.addr()? {
            Addr::Unix(UnixAddr { path }) => Some((export.subject(), path)),
            // A descriptor is given to one, and a monitor's client may give its name to the next.
            Addr::Fd(_) => None,
        });
        server.chain(exports).map(|(whose, path)| (whose, Path::new(path)))
    }

    /// Checks that no two sockets are to be made in one place, of its own and of `others`.
    ///
    /// # Errors
    /// Whose the second is, and whose the first.
    pub fn check_sockets<'a>(
        &'a self,
        others: impl IntoIterator<Item = (String, &'a Address)>,
    ) -> Result<(), ObjectError> {
        let own = self.sockets().map(|(whose, path)| (whose, "addr.path", path));
        let others = others.into_iter().filter_map(|(whose, address)| Some((whose, "path", address.path()?)));
        let mut taken = BTreeMap::new();
        for (subject, key, path) in own.chain(others) {
            let place = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
            if let Some(other) = taken.insert(place, subject.clone()) {
                let problem = Problem::Together(format!("{key} {} is taken by {other}", path.display()));
                return Err(ObjectError { subject, problem });
            }
        }
        Ok(())
    }

    fn check_addresses(&self) -> Result<(), ObjectError> {
        self.check_sockets([])?;
        let mut names: BTreeMap<&str, &Export> = BTreeMap::new();
        for export in &self.exports {
            let Device::Nbd(device) = &export.device else { continue };
            if let Some(other) = names.insert(device.name(), export) {
                let problem = format!("name '{}' is taken by {}", device.name(), other.subject());
                return Err(export.error(Problem::Together(problem)));
            }
        }
        Ok(())
    }
}

/// Rules that concern one layer, and need its parent's settings to be known.
fn check_layer(blockdev: &Blockdev, layer: Settings) -> Result<(), Problem> {
    if let Driver::File(image) | Driver::HostDevice(image) = &blockdev.driver
        && image.aio == Aio::Native
        && !layer.direct
    {
        return Err(Problem::Together("aio=native needs cache.direct=on (or use aio=io_uring)".to_owned()));
    }
    if layer.detect_zeroes == DetectZeroes::Unmap && layer.discard == Discard::Ignore {
        return Err(Problem::Together("detect-zeroes=unmap needs discard=unmap".to_owned()));
    }
    Ok(())
}

fn reference<'a>(
    key: &str,
    noun: &'static str,
    name: &str,
    known: impl Iterator<Item = &'a str> + Clone,
) -> Result<(), Problem> {
    if known.clone().any(|known| known == name) {
        return Ok(());
    }
    let hint = hint(name, known);
    Err(Problem::Unknown { key: key.to_owned(), noun, name: name.to_owned(), hint })
}

/// Checks that no name of `objects` is taken, and takes them.
fn unique<'a, T: Object + 'a>(
    objects: impl IntoIterator<Item = &'a T>,
    taken: &mut BTreeMap<&'a str, &'static str>,
) -> Result<(), ObjectError> {
    for object in objects {
        if let Some(noun) = taken.insert(object.name(), T::NOUN) {
            return Err(object.error(Problem::Duplicate(noun)));
        }
    }
    Ok(())
}

/// A blockdev that has no name, by what it is.
fn described(blockdev: &Blockdev) -> String {
    match &blockdev.driver {
        Driver::File(image) | Driver::HostDevice(image) => {
            format!("({}, {})", blockdev.driver.word(), image.filename)
        }
        Driver::Rbd(rbd) => format!("({}, {})", blockdev.driver.word(), rbd.spec()),
        driver => format!("({})", driver.word()),
    }
}

#[cfg(test)]
mod tests;
