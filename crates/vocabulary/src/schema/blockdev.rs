//! The `blockdev` object.

use egret_disk::{Aio, DetectZeroes, Discard, Locking};
use serde::{Deserialize, Serialize};

use super::Problem;
use super::key::{Foreign, Harmless, Key, Kind, Shape, Variants};
use super::object::object;
use super::words::{as_word, words};

/// Longest `node-name`, in bytes: QEMU's.
pub(super) const LONGEST_NODE_NAME: usize = 31;

/// `PATH_MAX` less its terminator.
const LONGEST_PATH: usize = 4095;
/// No file offset is larger.
const LARGEST_DISK: u64 = i64::MAX as u64;
/// The largest number of a set of descriptors: QEMU's.
pub const LARGEST_FD_SET: u64 = i64::MAX as u64;
/// What a filename begins with that names a set.
const FD_SET: &str = "/dev/fdset/";
const DEFAULT_NULL_SIZE: u64 = 1 << 30;

/// A disk, or a layer over one.
///
/// Fields are as they were written: an inline child takes what it leaves unset from its parent, so what is in force is
/// known only in place ([`Config::disk`](crate::Config::disk)).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(remote = "Self", rename_all = "kebab-case")]
pub struct Blockdev {
    /// Its name; only a blockdev inside another may go without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// What it is, and the keys that only such a one has.
    #[serde(flatten)]
    pub driver: Driver,
    /// How the host's page cache is used.
    #[serde(default, skip_serializing_if = "Cache::is_unset")]
    pub cache: Cache,
    /// Whether writes are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// Whether to open the image for reading alone as long as nobody writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto_read_only: Option<bool>,
    /// What becomes of discards.
    #[serde(default, with = "as_word::optional", skip_serializing_if = "Option::is_none")]
    pub discard: Option<Discard>,
    /// What becomes of zeroes.
    #[serde(default, with = "as_word::optional", skip_serializing_if = "Option::is_none")]
    pub detect_zeroes: Option<DetectZeroes>,
}

/// What a blockdev is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "driver")]
pub enum Driver {
    /// A regular file.
    #[serde(rename = "file")]
    File(Image),
    /// A block device of the host.
    #[serde(rename = "host_device")]
    HostDevice(Image),
    /// A disk that keeps nothing; both of QEMU's spellings are the same here.
    #[serde(rename = "null-co")]
    NullCo(Null),
    /// As [`NullCo`](Self::NullCo).
    #[serde(rename = "null-aio")]
    NullAio(Null),
    /// The raw format: the disk below, as it is.
    #[serde(rename = "raw")]
    Raw {
        /// The disk below.
        file: Child,
    },
}

/// The set of descriptors that `filename` names, if it does: `/dev/fdset/N`.
pub fn fd_set_number(filename: &str) -> Option<FdSetNumber> {
    let digits = filename.strip_prefix(FD_SET)?;
    let number = digits.parse().ok().filter(|number| *number <= LARGEST_FD_SET)?;
    digits.bytes().all(|digit| digit.is_ascii_digit()).then_some(number)
}

impl Blockdev {
    /// The set of descriptors that its own image is opened through, if it is.
    pub fn fd_set(&self) -> Option<FdSetNumber> {
        match &self.driver {
            Driver::File(image) | Driver::HostDevice(image) => fd_set_number(&image.filename),
            _ => None,
        }
    }

    /// The name of the blockdev that this one lies over, if that was made elsewhere.
    pub fn child_name(&self) -> Option<&str> {
        match &self.driver {
            Driver::Raw { file: Child::Node(name) } => Some(name),
            _ => None,
        }
    }
}

impl Driver {
    /// How it is spelled.
    pub fn word(&self) -> &'static str {
        match self {
            Self::File(_) => "file",
            Self::HostDevice(_) => "host_device",
            Self::NullCo(_) => "null-co",
            Self::NullAio(_) => "null-aio",
            Self::Raw { .. } => "raw",
        }
    }
}

/// The number of a set of descriptors.
pub type FdSetNumber = u64;

/// A disk below another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Child {
    /// A blockdev made elsewhere, by its node-name.
    Node(String),
    /// A blockdev of its own.
    Inline(Box<Blockdev>),
}

/// An image on the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Image {
    /// Where it is.
    pub filename: String,
    /// Which engine carries its requests.
    #[serde(default, with = "as_word")]
    pub aio: Aio,
    /// Most requests of this disk handed to the kernel in one system call; 0 leaves it to the I/O thread.
    #[serde(default)]
    pub aio_max_batch: u64,
    /// Whether it is locked.
    #[serde(default, with = "as_word")]
    pub locking: Locking,
}

/// A disk that keeps nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Null {
    /// Its size in bytes.
    #[serde(default = "default_null_size")]
    pub size: u64,
    /// How long each request takes.
    #[serde(default)]
    pub latency_ns: u64,
    /// Whether reads fill their buffers with zeroes, or leave them alone.
    #[serde(default)]
    pub read_zeroes: bool,
}

/// How the host's page cache is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Cache {
    /// Whether it is bypassed (`O_DIRECT`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct: Option<bool>,
    /// Whether flushes are dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_flush: Option<bool>,
}

impl Cache {
    fn is_unset(&self) -> bool {
        *self == Self::default()
    }
}

pub(super) static SHAPE: Shape = Shape {
    keys: &[
        Key::optional(
            "node-name",
            Kind::Name(LONGEST_NODE_NAME),
            &"needed, except inside another blockdev",
            "Name of the disk.",
        ),
        Key::optional("cache", Kind::Object(&CACHE), &"see its keys", "How the host's page cache is used."),
        Key::optional("read-only", Kind::Flag, &"off; inline: the parent's", "Refuse writes."),
        Key::optional(
            "auto-read-only",
            Kind::Flag,
            &"on; inline: the parent's",
            "Open the image for reading alone as long as no writable export uses it. With `off` it is opened, and locked, \
             for writing from the start, unless `read-only` says otherwise: a disk that cannot be written to is refused, \
             and one that is read can get an export that writes.",
        ),
        Key::optional(
            "discard",
            Kind::Word(words::<Discard>),
            &"ignore; inline: unmap",
            "Whether discards give storage back or are dropped.",
        ),
        Key::optional(
            "detect-zeroes",
            Kind::Word(words::<DetectZeroes>),
            &"off",
            "Whether writes of zeroes become write-zeroes requests; `unmap` needs `discard=unmap`.",
        ),
    ],
    variants: Some(Variants {
        tag: "driver",
        about: "What the disk is.",
        of: &[
            ("file", IMAGE),
            ("host_device", IMAGE),
            ("null-co", NULL),
            ("null-aio", NULL),
            (
                "raw",
                &[Key::needed(
                    "file",
                    Kind::Child,
                    "The disk below: a node-name, or a blockdev of its own (`file.driver=...,file.filename=...`).",
                )],
            ),
        ],
        foreign: &[
            "blkdebug",
            "blklogwrites",
            "blkreplay",
            "blkverify",
            "bochs",
            "cloop",
            "compress",
            "copy-before-write",
            "copy-on-read",
            "dmg",
            "ftp",
            "ftps",
            "gluster",
            "host_cdrom",
            "http",
            "https",
            "io_uring",
            "iscsi",
            "luks",
            "nbd",
            "nfs",
            "nvme",
            "nvme-io_uring",
            "parallels",
            "preallocate",
            "qcow",
            "qcow2",
            "qed",
            "quorum",
            "rbd",
            "replication",
            "snapshot-access",
            "ssh",
            "throttle",
            "vdi",
            "vhdx",
            "virtio-blk-vfio-pci",
            "virtio-blk-vhost-user",
            "virtio-blk-vhost-vdpa",
            "vmdk",
            "vpc",
            "vvfat",
        ],
        because: "Egret serves raw files and block devices",
    }),
    foreign: &[
        Foreign {
            name: "force-share",
            harmless: Harmless::Off,
            because: "it reads an image that another process writes; use locking=off if that is what you want",
        },
        Foreign { name: "active", harmless: Harmless::On, because: "there is no migration of disks between daemons" },
        Foreign { name: "drop-cache", harmless: Harmless::Any, because: "it takes effect in live migration only" },
        Foreign {
            name: "x-check-cache-dropped",
            harmless: Harmless::Off,
            because: "it takes effect in live migration only",
        },
        Foreign { name: "pr-manager", harmless: Harmless::No, because: "persistent reservations are not passed on" },
        Foreign { name: "offset", harmless: Harmless::Zero, because: "a disk is a whole file or device" },
    ],
};

static CACHE: Shape = Shape {
    keys: &[
        Key::optional(
            "direct",
            Kind::Flag,
            &"off; inline: the parent's",
            "Bypass the host's page cache (`O_DIRECT`); `aio=native` needs it.",
        ),
        Key::optional(
            "no-flush",
            Kind::Flag,
            &"off; inline: the parent's",
            "Drop flushes: fast, and data is lost when the host goes down.",
        ),
    ],
    variants: None,
    foreign: &[],
};

const IMAGE: &[Key] = &[
    Key::needed(
        "filename",
        Kind::Text(1, LONGEST_PATH),
        "Path of the file or device; or `/dev/fdset/N`: a descriptor of the set N, which `add-fd` or `--add-fd` handed \
         over.",
    ),
    Key::optional("aio", Kind::Word(words::<Aio>), &"threads", "Engine that carries requests to the kernel."),
    Key::optional(
        "aio-max-batch",
        Kind::Number(0, LARGEST_DISK, "requests"),
        &"0",
        "Most requests of this disk handed to the kernel in one system call (`aio=native`); the smaller of this and the \
         I/O thread's counts, and 0 does not.",
    ),
    Key::optional(
        "locking",
        Kind::Word(words::<Locking>),
        &"auto",
        "Lock the image against other processes, QEMU included; `auto` does where the file system can.",
    ),
];

const NULL: &[Key] = &[
    Key::optional("size", Kind::Bytes(0, LARGEST_DISK), &"1G", "Size of the disk."),
    Key::optional("latency-ns", Kind::Number(0, LARGEST_DISK, "ns"), &"0", "How long each request takes."),
    Key::optional(
        "read-zeroes",
        Kind::Flag,
        &"off",
        "Fill what is read with zeroes; off leaves the guest's buffer as it was.",
    ),
];

object!(Blockdev, "blockdev", "node-name", &SHAPE);

impl Blockdev {
    /// A blockdev with every key that its driver does not need left at its default.
    pub fn new(node_name: impl Into<String>, driver: Driver) -> Self {
        Self {
            node_name: Some(node_name.into()),
            driver,
            cache: Cache::default(),
            read_only: None,
            auto_read_only: None,
            discard: None,
            detect_zeroes: None,
        }
    }

    /// The blockdev below that is written inside this one.
    pub fn inline_child(&self) -> Option<&Self> {
        match &self.driver {
            Driver::Raw { file: Child::Inline(child) } => Some(child),
            _ => None,
        }
    }

    fn own_name(&self) -> &str {
        self.node_name.as_deref().unwrap_or_default()
    }

    fn check(&self) -> Result<(), Problem> {
        if let Driver::File(Image { filename, .. }) | Driver::HostDevice(Image { filename, .. }) = &self.driver
            && filename.starts_with(FD_SET)
            && fd_set_number(filename).is_none()
        {
            let allowed = format!("{FD_SET} with a number in 0..={LARGEST_FD_SET}");
            return Err(Problem::must("filename", allowed, format!("'{filename}'")));
        }
        if let Driver::File(image) | Driver::HostDevice(image) = &self.driver
            && image.aio_max_batch > 0
            && image.aio != Aio::Native
        {
            let line = format!("aio-max-batch has no effect on aio={}; it belongs to native", image.aio);
            return Err(Problem::Together(line));
        }
        // What its values must agree on depends on what it inherits: `Config` knows.
        Ok(())
    }
}

impl Image {
    /// The image at `filename`, with every other key at its default.
    pub fn new(filename: impl Into<String>) -> Self {
        Self { filename: filename.into(), aio: Aio::default(), aio_max_batch: 0, locking: Locking::default() }
    }
}

fn default_null_size() -> u64 {
    DEFAULT_NULL_SIZE
}
