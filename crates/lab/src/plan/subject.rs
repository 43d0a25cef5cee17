//! What is compared: a server and its settings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use egret_vocabulary::schema::{Blockdev, Driver, NbdPlace, Object as _, Spelling};
use serde::{Deserialize, Serialize};
use toml::Value;

use super::units::OneOrMany;

/// A stack with its settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Subject {
    /// What the report calls it.
    pub name: String,
    /// What serves the disk, or runs the guest that uses it.
    pub stack: Stack,
    /// Whether the plan makes sense without it, where its programs are not installed. Its cells then say what is missing;
    /// otherwise nothing starts.
    #[serde(default)]
    pub optional: bool,
    /// On ladders: the line that it belongs to; its name without one.
    #[serde(default)]
    pub line: Option<String>,
    /// On ladders: its place, such as its number of I/O threads.
    #[serde(default)]
    pub at: Option<f64>,
    /// The `fio --server` that runs it, by the plan's `hosts`; this machine without one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub host: Option<String>,
    /// How many I/O threads the server has, its queues dealt out over them. None at all is QEMU's main loop; Egret has none that serves.
    #[serde(default = "one")]
    pub iothreads: u32,
    /// Properties of the I/O threads, as `--object iothread` spells them.
    #[serde(default)]
    pub iothread: BTreeMap<String, Value>,
    /// Properties of the disk, as `--blockdev` spells them. On the host `aio` chooses fio's ioengine.
    #[serde(default)]
    pub blockdev: BTreeMap<String, Value>,
    /// Properties of the export, as `--export` spells them.
    #[serde(default)]
    pub export: BTreeMap<String, Value>,
    /// On the host: the kernel's I/O scheduler of the disks, which they have while it is measured; as they are without it. Of
    /// a guest: its own kernel's; [`NO_SCHEDULER`] without it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub scheduler: Option<String>,
    /// Where its disk is, if the plan's is not on this host.
    #[serde(default)]
    pub backend: Backend,
    /// Cores for the server's I/O threads; the lab chooses if there are none.
    #[serde(default)]
    pub cpus: Vec<usize>,
    /// Of the stack `vhost-user-blk`: how to start it. `{socket}` and `{disk}` are put in; run by the shell.
    #[serde(default)]
    pub command: Option<String>,
    /// Of a guest: who serves its disk.
    #[serde(default)]
    pub server: Server,
    /// Of the stack `ssh`: where fio runs, as `ssh:HOST`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub client: Option<String>,
    /// Of the stack `ssh`: its disk, or several, by the paths that they have there.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub disk: Option<OneOrMany<PathBuf>>,
    /// Of the stack `ssh`: the libvirt domain on this host that the client is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub domain: Option<String>,
    /// Of the stack `ssh`: the monitor of the Egret on this host that serves its disk.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub monitor: Option<PathBuf>,
    /// Of a guest: the QEMU that runs it, by path or as `--qemu` names it; without it [`QEMU`].
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub qemu: Option<PathBuf>,
    /// Of a guest: which disk it sees. Egret and the load without a guest understand it, too.
    #[serde(default)]
    pub device: DeviceModel,
    /// Of a guest: how the host holds its memory.
    #[serde(default)]
    pub pages: Pages,
    /// Of a guest: its processors.
    #[serde(default = "two")]
    pub vcpus: u32,
}

/// The I/O scheduler that leaves requests as they come.
pub const NO_SCHEDULER: &str = "none";

/// The QEMU that is installed.
pub const QEMU: &str = "qemu-system-x86_64";

impl Subject {
    /// Of a guest: the QEMU that runs it.
    pub fn qemu(&self) -> &Path {
        self.qemu.as_deref().unwrap_or(Path::new(QEMU))
    }

    /// Of a guest: its kernel's I/O scheduler.
    pub fn guests_scheduler(&self) -> &str {
        self.scheduler.as_deref().unwrap_or(NO_SCHEDULER)
    }

    /// Of the stack `ssh`: the paths of its disks.
    pub fn disks(&self) -> &[PathBuf] {
        self.disk.as_ref().map_or(&[], OneOrMany::all)
    }
}

fn one() -> u32 {
    1
}

fn two() -> u32 {
    2
}

/// What can be put under load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stack {
    /// fio on the file or device itself.
    Host,
    /// `egret serve`.
    Egret,
    /// `qemu-storage-daemon`.
    QemuStorageDaemon,
    /// Any program that serves a vhost-user-blk socket.
    VhostUserBlk,
    /// A virtual machine, with fio inside.
    Guest,
    /// fio on a machine that is there already, over ssh.
    Ssh,
}

impl Stack {
    /// Whether fio loads it, and not the lab itself.
    pub const fn is_fios(self) -> bool {
        matches!(self, Self::Host | Self::Guest | Self::Ssh)
    }
}

/// How a subject gets at what is on the plan's disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Backend {
    /// The disk itself.
    #[default]
    Local,
    /// By an NBD server on this host that has it, over TCP.
    Nbd,
    /// The same over a UNIX socket.
    NbdUnix,
    /// An NBD server that is there already, by its URI: what it has is not the plan's disk.
    Server(String),
    /// As an image in a pool of a Ceph cluster, by Ceph's libraries.
    Rbd(String),
    /// As the same image, by the kernel.
    Krbd(String),
}

impl TryFrom<String> for Backend {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let (kind, pool) = text.split_once(':').unwrap_or((&text, "rbd"));
        let is_name =
            !pool.is_empty() && pool.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        match kind {
            "local" if pool == "rbd" => Ok(Self::Local),
            "nbd" if text == "nbd" => Ok(Self::Nbd),
            "nbd+unix" if text == "nbd+unix" => Ok(Self::NbdUnix),
            "nbd" | "nbd+tcp" | "nbd+unix" if nbd_place(&text).is_some() => Ok(Self::Server(text)),
            "rbd" if is_name => Ok(Self::Rbd(pool.into())),
            "krbd" if is_name => Ok(Self::Krbd(pool.into())),
            _ => Err(format!(
                "backend must be local, nbd, nbd+unix, the URI of an NBD server, rbd:POOL or krbd:POOL, got '{text}'"
            )),
        }
    }
}

impl From<Backend> for String {
    fn from(backend: Backend) -> Self {
        match backend {
            Backend::Local => "local".into(),
            Backend::Nbd => "nbd".into(),
            Backend::NbdUnix => "nbd+unix".into(),
            Backend::Server(uri) => uri,
            Backend::Rbd(pool) => format!("rbd:{pool}"),
            Backend::Krbd(pool) => format!("krbd:{pool}"),
        }
    }
}

/// Where a URI says that an NBD export is.
pub(crate) fn nbd_place(uri: &str) -> Option<NbdPlace> {
    let keys = serde_json::json!({ "driver": "nbd", "node-name": "d", "filename": uri });
    match Blockdev::from_value(keys, Spelling::Typed).ok()?.driver {
        Driver::Nbd(nbd) => nbd.place().ok(),
        _ => None,
    }
}

/// Who serves a guest's disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Server {
    /// QEMU itself.
    #[default]
    Qemu,
    /// `egret serve`, over vhost-user.
    Egret,
}

/// Which disk a guest sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceModel {
    /// virtio-blk.
    #[default]
    VirtioBlk,
    /// virtio-scsi, with one logical unit.
    VirtioScsi,
}

/// How the host holds a guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pages {
    /// In pages of 4 KiB.
    #[default]
    #[serde(rename = "4k")]
    Small,
    /// In huge pages from hugetlbfs.
    #[serde(rename = "huge")]
    Huge,
}
