//! What is compared: a server and its settings.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use toml::Value;

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
    /// How many I/O threads the server has, its queues dealt out over them. None at all is the server's main loop.
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
    /// Of the stack `ssh`: its disk, by the path that it has there.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub disk: Option<PathBuf>,
    /// Of the stack `ssh`: the libvirt domain on this host that the client is.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub domain: Option<String>,
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

/// The QEMU that is installed.
pub const QEMU: &str = "qemu-system-x86_64";

impl Subject {
    /// Of a guest: the QEMU that runs it.
    pub fn qemu(&self) -> &Path {
        self.qemu.as_deref().unwrap_or(Path::new(QEMU))
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
